"""Tokens to train on, and which of them a step takes.

Tokens lie in shards, files that are mapped into memory. Text becomes one such file, with a separator behind each
document. A run's sequences are windows of the shards in a random order, which is a function of the seed and of the
number of the sequence alone: a run that goes on, on whatever ranks, takes the sequences that it would have taken.
"""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpoint import Ranks, UserError, file_errors, from_first_rank, on_first_rank, replace_file
from training import read_files

IGNORED = -100  # a label that does not count
BYTES = 256  # tokens of a text without a tokenizer; its separator is byte 0, which no text has
SHARDS = (".npy", ".bin")
DTYPES = ("uint16", "uint32")
EDGE = 1 << 16  # bytes at both ends of a shard that stand for all of it in a digest


@dataclass(frozen=True, eq=False)
class Tokens:
    """Token shards.

    Attributes:
        shards: uint8, uint16 or uint32 [n] each, mapped into memory.
        separator: the token that ends a document; None where documents are not told apart.
        source: what a person calls them.
        digest: tells them from others.
    """

    shards: tuple[np.ndarray, ...]
    separator: int | None
    source: str
    digest: str

    def __len__(self) -> int:
        return sum(map(len, self.shards))

    def windows(self, length: int) -> list[int]:
        """How many windows of ``length`` tokens and the one behind them each shard has."""
        return [max(0, (len(shard) - 1) // length) for shard in self.shards]

    def window(self, index: int, length: int, seed: int) -> torch.Tensor:
        """The tokens of sequence ``index`` of a run, int64 [length + 1]."""
        counts = self.windows(length)
        epoch, at = divmod(index, sum(counts))
        place = int(epoch_order(seed, epoch, sum(counts))[at])
        for shard, count in zip(self.shards, counts, strict=True):
            if place < count:
                return torch.from_numpy(shard[place * length : (place + 1) * length + 1].astype(np.int64))
            place -= count
        raise AssertionError("unreachable")


@lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, count: int) -> np.ndarray:
    """The order of an epoch's windows."""
    return np.random.default_rng([seed, epoch]).permutation(count)


def make_batch(window: torch.Tensor, context: int, separator: int | None) -> dict[str, torch.Tensor]:
    """A batch for `flexsp.integrations.transformers.shard` of one row, the documents of a window.

    A document ends behind a separator, and after ``context`` tokens. A separator predicts nothing: its label does not
    count.

    Args:
        window: int64 [T + 1].
        context: tokens of a document at most.
    """
    inputs, labels = window[:-1], window[1:].clone()
    ends = torch.tensor([], dtype=torch.int64)
    if separator is not None:
        labels[inputs == separator] = IGNORED
        ends = (inputs == separator).nonzero()[:, 0] + 1
    edges = sorted({0, len(inputs), *ends.tolist()})
    starts = [at for a, b in zip(edges, edges[1:], strict=False) for at in range(a, b, context)]
    batch = {"input_ids": inputs[None], "shift_labels": labels[None]}
    if len(starts) > 1:
        batch["cu_seq_lens_q"] = torch.tensor([*starts, len(inputs)], dtype=torch.int32)
    return batch


def open_tokens(
    data: str | None, tokenizer: Any, separator: int | None, token_dtype: str, folder: Path, ranks: Ranks
) -> Tokens:
    """The tokens of ``data``, the same on all ranks. Collective.

    Args:
        data: a text file, a token shard (.npy, or .bin without a header), a folder of either, or None, the standard
            library.
        tokenizer: of transformers; None for bytes.
        separator: None for the tokenizer's token at the end of a text.
        token_dtype: of .bin shards.
        folder: which all ranks see; the tokens of a text are kept there.
    """
    if separator is None and tokenizer is not None:
        separator = tokenizer.eos_token_id
    paths = shard_paths(data)
    source = "Python's standard library" if data is None else data
    if not paths:
        separator = 0 if tokenizer is None else separator
        if separator is None:
            raise UserError("--separator: expected a token (the tokenizer has none for the end of a text), got none")
        paths = [from_first_rank(on_first_rank(lambda: write_tokens(data, tokenizer, separator, folder), ranks), ranks)]
    with file_errors():
        shards = tuple(open_shard(path, token_dtype) for path in paths)
    return Tokens(shards, separator, source, digest_of(paths, shards, separator))


def shard_paths(data: str | None) -> list[Path]:
    if data is None:
        return []
    path = Path(data)
    with file_errors():
        if path.is_dir():
            return sorted(p for p in path.rglob("*") if p.suffix in SHARDS)
        return [path] if path.suffix in SHARDS and path.exists() else []


def open_shard(path: Path, token_dtype: str) -> np.ndarray:
    if path.suffix == ".bin":
        size, item = path.stat().st_size, np.dtype(token_dtype).itemsize
        if size == 0 or size % item:
            expected = f"one whose {item} bytes divide the {size} of {path}"
            raise UserError(f"--token-dtype: expected {expected}, got {token_dtype}")
        return np.memmap(path, dtype=token_dtype, mode="r")
    try:
        shard = np.load(path, mmap_mode="r")
    except ValueError as error:
        raise UserError(f"--data: expected a NumPy array in {path}, got {error}") from error
    if shard.ndim != 1 or shard.dtype.name not in ("uint8", *DTYPES):
        raise UserError(f"--data: expected uint16 or uint32 [n] in {path}, got {shard.dtype} {list(shard.shape)}")
    return shard


def digest_of(paths: list[Path], shards: tuple[np.ndarray, ...], separator: int | None) -> str:
    found = hashlib.sha256(f"separator {separator}\n".encode())
    for path, shard in zip(paths, shards, strict=True):
        edge = EDGE // shard.itemsize
        found.update(f"{path.name} {shard.dtype} {len(shard)}\n".encode(errors="surrogateescape"))
        found.update(shard[:edge].tobytes() + shard[-edge:].tobytes())
    return found.hexdigest()[:16]


def write_tokens(data: str | None, tokenizer: Any, separator: int, folder: Path) -> Path:
    """Tokens of a text, in a file whose name tells the text and the tokenizer; one that is there is taken."""
    files, source = read_files(data)
    if not files:
        raise UserError(f"--data: expected text, got no file of text in {source}")
    vocabulary = None if tokenizer is None else sorted(tokenizer.get_vocab().items())
    key = hashlib.sha256(repr((vocabulary, separator)).encode())
    for content in files:
        key.update(len(content).to_bytes(8, "big") + content)
    path = folder / f"tokens-{key.hexdigest()[:16]}.npy"
    if not path.exists():
        size = BYTES if tokenizer is None else len(tokenizer)
        dtype = np.uint16 if max(size, separator + 1) <= 1 << 16 else np.uint32
        parts = [np.array([*tokens_of(content, tokenizer), separator], dtype=dtype) for content in files]
        buffer = io.BytesIO()
        np.save(buffer, np.concatenate(parts))
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(path, buffer.getvalue())
    return path


def tokens_of(content: bytes, tokenizer: Any) -> list[int]:
    if tokenizer is None:
        return list(content)
    return tokenizer(content.decode(errors="replace"), add_special_tokens=False)["input_ids"]
