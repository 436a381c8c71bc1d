"""`shard`: this rank's part of a batch, and what layers and loss need to know of the whole batch."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flexsp.comm.group import SequenceParallel, ranks_call
from flexsp.comm.process_group import compare_text
from flexsp.exceptions import check_dense, check_flag, check_number, fail

__all__ = ["IGNORED", "KEY", "Running", "Shard", "shard"]

KEY = "flexsp_shard"  # the keyword argument that brings a Shard to every layer
IGNORED = -100  # a label that does not count

_TENSORS = (
    "input_ids", "inputs_embeds", "attention_mask", "position_ids", "labels", "shift_labels", "cu_seq_lens_q",
    "cu_seq_lens_k", "cu_seqlens", "seq_idx",
)  # fmt: skip
_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "seq_idx")  # what says where documents begin
_NUMBERS = ("max_length_q", "max_length_k", "num_items_in_batch")


@dataclass(frozen=True, eq=False)
class Shard:
    """What a model needs to know of a whole batch to run on one rank's tokens. It takes it as ``flexsp_shard``.

    Attributes:
        sp: the ranks.
        lengths: tokens of a row that each rank has.
        batch: rows B.
        cu_seqlens: int64 [N + 1] boundaries of the documents in the whole row, on ``sp.device``; None for one document.
        cu_seqlens_cpu: the same on the CPU.
        counted: labels that count, over all ranks; the loss is a sum over this number. None without labels.
        keep: bool [B, T_local] on ``sp.device``, False for padding; None where there is none.
        kept: tokens of the whole batch that are not padding.
    """

    sp: SequenceParallel
    lengths: tuple[int, ...]
    batch: int
    cu_seqlens: Tensor | None
    cu_seqlens_cpu: Tensor | None
    counted: int | float | Tensor | None
    keep: Tensor | None
    kept: int

    @property
    def length(self) -> int:
        """T_local, the tokens of a row that this rank has."""
        return self.lengths[self.sp.rank]

    @contextlib.contextmanager
    def known_lengths(self) -> Iterator[SequenceParallel]:
        """The ranks; inside they know each other's shard lengths without an exchange."""
        before = self.sp.lengths
        self.sp.set_lengths(self.lengths)
        try:
            yield self.sp
        finally:
            self.sp.set_lengths(before)

    @contextlib.contextmanager
    def call(self) -> Iterator[dict[str, Any]]:
        """The same, as the arguments of an op: the ranks and the documents."""
        with self.known_lengths() as sp:
            yield {"sp": sp, "cu_seqlens": self.cu_seqlens, "cu_seqlens_cpu": self.cu_seqlens_cpu}


class Running(Shard):
    """The Shard that a parallelized model's forward gives its layers. They refuse a plain one, since only that forward
    counts labels and losses over the ranks."""


@ranks_call
def shard(batch: Mapping[str, Any], sp: SequenceParallel, shift: bool = True) -> dict[str, Any]:
    """This rank's part of a batch, as keyword arguments of a model that `parallelize` has changed. Collective.

    Every rank of ``sp`` must pass the same whole batch. Ranks compare what they pass (a hash, on the CPU group). Rank r
    takes the r-th stretch of every row: of the lengths that ``sp.set_lengths`` gave, else balanced ones
    (``sp.partition``).

    Args:
        batch: as transformers' collators make it, on any device. Values of None are left out.
            ``input_ids`` int [B, T], or ``inputs_embeds`` [B, T, D].
            ``labels`` int [B, T], not shifted; -100 does not count. Or ``shift_labels``, where token t has the label of
            the token after it. Or labels of rows, for a head that classifies sequences: [B], or floating [B, labels].
            ``position_ids`` [B or 1, T], or [3 or 4, B or 1, T]. Without them positions count from the start of the
            row, or of the document. They may jump ahead.
            ``attention_mask`` [B, T], of ones, and zeros behind them (padding on the right).
            Packed documents (B = 1): ``cu_seq_lens_q`` or ``cu_seqlens`` [N + 1], else ``seq_idx`` [1, T], else
            positions that start again (that do not grow from one token to the next), with a mask of ones or without.
            ``num_items_in_batch``: divide the loss by this number rather than by the labels of this batch that count.
            ``cu_seq_lens_k``, ``max_length_q`` and ``max_length_k`` may be there and add nothing.
        sp: the ranks, those of `parallelize`.
        shift: False where labels of tokens belong to the tokens that have them, as heads that classify tokens take
            them; not with ``num_items_in_batch``, which these do not read.

    Returns:
        ``input_ids`` or ``inputs_embeds``, ``position_ids``, ``shift_labels`` (where there are labels of tokens;
        without ``shift`` they are ``labels``), each with T_local tokens and on ``sp.device``, labels of rows as they
        are, and ``flexsp_shard``, a `Shard`.

    Raises:
        ValueError: keys that are not known, wrong shapes, a rank without tokens, padding on the left or inside,
            documents with B > 1, or sources of documents that contradict each other.
        PeerMismatch: the ranks pass different batches.
    """
    if not isinstance(sp, SequenceParallel):
        fail("sp", "a SequenceParallel", type(sp).__name__)
    given = _known(batch)
    tokens = _tokens(given)
    B, T = tokens.shape[:2]
    lengths = tuple(sp.lengths or sp.partition(T))
    if sum(lengths) != T:
        fail("batch", f"{sum(lengths)} tokens a row (set_lengths)", T)
    if min(lengths) < 1:  # transformers' own code fails on empty tensors
        fail("batch", "at least one token of each row for every rank", f"lengths {list(lengths)}")
    _check_positions(given.get("position_ids"), B, T)
    mask = _padding(given.get("attention_mask"), B, T)
    bounds = _documents(given, B, T, mask)
    if bounds is not None and mask is not None:
        fail("attention_mask", "only ones with packed documents", "zeros")
    check_flag("shift", shift)
    of_rows = _labels_of_rows(given, B)
    labels = None if of_rows is not None else _labels(given, B, T, mask, shift)
    _compare(sp, given, lengths)
    stop = list(accumulate(lengths))[sp.rank]
    mine = slice(stop - lengths[sp.rank], stop)

    def local(x: Tensor) -> Tensor:
        return x[..., mine].to(sp.device)

    cpu = None if bounds is None else torch.tensor(bounds)
    made = Shard(
        sp, lengths, B, None if cpu is None else cpu.to(sp.device), cpu, _counted(given, labels),
        None if mask is None else local(mask), B * T if mask is None else int(mask.sum()),
    )  # fmt: skip
    name = "input_ids" if "input_ids" in given else "inputs_embeds"
    found: dict[str, Any] = {name: tokens[:, mine].to(sp.device)}
    found["position_ids"] = local(given["position_ids"] if "position_ids" in given else _positions(T, bounds))
    if labels is not None:
        found["shift_labels" if shift else "labels"] = local(labels)
    if of_rows is not None:
        found["labels"] = of_rows.to(sp.device)
    return found | {KEY: made}


def _known(batch: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(batch, Mapping):
        fail("batch", "a mapping of names to tensors", type(batch).__name__)
    given = {name: x for name, x in batch.items() if x is not None}
    unknown = [name for name in given if name not in _TENSORS + _NUMBERS]
    if unknown:
        fail("batch", f"only keys of {', '.join(_TENSORS + _NUMBERS)}", ", ".join(map(repr, unknown)))
    for name in given:
        if name in _TENSORS:
            check_dense(name, given[name])
    return given


def _tokens(given: dict[str, Any]) -> Tensor:
    if ("input_ids" in given) == ("inputs_embeds" in given):
        fail("batch", "either input_ids or inputs_embeds", "both" if "input_ids" in given else "none of them")
    if "inputs_embeds" in given:
        embeds: Tensor = given["inputs_embeds"]
        if embeds.dim() != 3 or not embeds.is_floating_point():
            fail("inputs_embeds", "floating [B, T, D]", f"{embeds.dtype} {list(embeds.shape)}")
        return embeds
    ids: Tensor = given["input_ids"]
    _check_rows("input_ids", ids, None)
    return ids


def _check_rows(name: str, x: Tensor, shape: tuple[int, int] | None, floats: bool = False) -> None:
    if x.is_floating_point() and not floats:
        fail(name, "integers", str(x.dtype))
    if x.dim() != 2 or x.shape[0] < 1 or (shape is not None and tuple(x.shape) != shape):
        fail(name, "shape [B, T]" + ("" if shape is None else f" = {list(shape)}"), list(x.shape))


def _check_positions(positions: Tensor | None, B: int, T: int) -> None:
    if positions is None:
        return
    rows = positions.dim() == 2 or (positions.dim() == 3 and positions.shape[0] in (3, 4))
    if positions.is_floating_point() or not rows or positions.shape[-1] != T or positions.shape[-2] not in (1, B):
        expected = f"integers [{B} or 1, {T}], or such rows 3 or 4 times"
        fail("position_ids", expected, f"{positions.dtype} {list(positions.shape)}")


def _documents(given: dict[str, Any], B: int, T: int, mask: Tensor | None) -> list[int] | None:
    """Boundaries of the documents, or None where each row is one."""
    positions = given.get("position_ids")
    starts = set() if positions is None else _starts(positions, mask)
    found = {name: _boundaries(name, given, B, T) for name in _BOUNDARIES}
    said = {name: bounds for name, bounds in found.items() if bounds is not None}
    if not said:
        if starts and B != 1:
            fail("position_ids", "rows of one document each, or batch size 1 (packed documents)", f"{B} rows")
        return [0, *sorted(starts), T] if starts else None
    (name, bounds), *others = said.items()
    for other, again in others:
        if set(again) != set(bounds):
            fail(other, f"the documents of {name}, {sorted(set(bounds))}", sorted(set(again)))
    if not starts <= set(bounds):
        fail("position_ids", f"positions that start again only at documents of {name}, {bounds}", sorted(starts))
    return bounds if len(set(bounds)) > 2 else None


def _starts(positions: Tensor, mask: Tensor | None) -> set[int]:
    """The tokens at which a document begins in some row: their position is not larger than the previous token's. A jump
    ahead begins none, since some methods of training for longer sequences leave positions out (PoSE).

    Positions may have rows for text, time, height and width. The row for text counts. Without it a document begins
    where all three others do, since one of them grows with every token of an image.
    """
    again = positions.diff(dim=-1) <= 0
    if positions.dim() == 3:
        again = again[0] if len(again) == 4 else again.all(0)
    if mask is not None:
        again = again & mask[:, 1:].to(again.device)
    return _places(again)


def _places(changed: Tensor) -> set[int]:
    """The tokens, counted from 1, at which ``changed`` [B, T - 1] holds in some row."""
    return set(changed.any(0).nonzero()[:, 0].add(1).tolist())


def _boundaries(name: str, given: dict[str, Any], B: int, T: int) -> list[int] | None:
    x = given.get(name)
    if x is None:
        return None
    if B != 1:
        fail("batch", f"batch size 1 with {name} (documents are packed along T)", B)
    if name == "seq_idx":
        _check_rows(name, x, (B, T))
        return [0, *sorted(_places(x.diff(dim=-1) != 0)), T]
    bounds = x.tolist() if x.dim() == 1 and not x.is_floating_point() else []
    if not bounds or bounds[0] != 0 or bounds[-1] != T or any(a > b for a, b in zip(bounds, bounds[1:], strict=False)):
        got = bounds if bounds else f"{x.dtype} {list(x.shape)}"
        fail(name, f"integers that go from 0 up to the {T} tokens of the row", got)
    return bounds


def _padding(mask: Tensor | None, B: int, T: int) -> Tensor | None:
    """A mask [B, T], True for tokens and False for padding; None if there is no padding."""
    if mask is None:
        return None
    _check_rows("attention_mask", mask, (B, T), floats=True)
    kept = mask != 0
    if bool((mask != kept).any()):
        fail("attention_mask", "zeros and ones", "other numbers")
    if bool(kept.all()):
        return None
    if bool((kept[:, 1:] & ~kept[:, :-1]).any()):
        fail("attention_mask", "padding on the right only", "a zero before a one (set padding_side='right')")
    return kept


def _labels_of_rows(given: dict[str, Any], B: int) -> Tensor | None:
    labels = given.get("labels")
    if labels is None or (labels.dim() == 2 and not labels.is_floating_point()):
        return None
    if labels.dim() not in (1, 2) or len(labels) != B:
        fail("labels", f"[B, T] of tokens, or of rows [{B}] or floating [{B}, labels]", list(labels.shape))
    if "shift_labels" in given or "num_items_in_batch" in given:
        other = "shift_labels" if "shift_labels" in given else "num_items_in_batch"
        fail(other, "None beside labels of rows", "a value")
    found: Tensor = labels
    return found


def _labels(given: dict[str, Any], B: int, T: int, mask: Tensor | None, shift: bool) -> Tensor | None:
    """Labels of the whole batch, each at the token that predicts it, or as they are."""
    labels, shifted = given.get("labels"), given.get("shift_labels")
    if labels is not None:
        _check_rows("labels", labels, (B, T))
    if not shift:
        for name in ("shift_labels", "num_items_in_batch"):
            if name in given:
                fail(name, "None with shift=False", "a value")
        shifted = labels
    elif shifted is not None:
        _check_rows("shift_labels", shifted, (B, T))
    elif labels is not None:
        shifted = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    if shifted is not None and mask is not None and bool((~mask.to(shifted.device) & (shifted != IGNORED)).any()):
        fail("labels", f"{IGNORED} behind the first token of padding", "others: the loss would count padding")
    return shifted


def _counted(given: dict[str, Any], labels: Tensor | None) -> int | float | Tensor | None:
    items = given.get("num_items_in_batch")
    if isinstance(items, Tensor):
        if items.numel() != 1:
            fail("num_items_in_batch", "one number", f"shape {list(items.shape)}")
        return items.detach().reshape(())
    if items is not None:
        return check_number("num_items_in_batch", items, above=0)
    return None if labels is None else int((labels != IGNORED).sum())


def _positions(T: int, bounds: list[int] | None) -> Tensor:
    """[1, T], from 0 on in each document."""
    positions = torch.arange(T)
    if bounds is not None:
        starts = torch.tensor(bounds)
        positions = positions - starts[torch.searchsorted(starts, positions, right=True) - 1]
    return positions[None]


def _compare(sp: SequenceParallel, given: dict[str, Any], lengths: tuple[int, ...]) -> None:
    """PeerMismatch if ranks have different batches, as with a sampler that deals data out to all ranks."""
    if sp.world_size == 1:
        return
    said = []
    for name, x in sorted(given.items()):
        if not isinstance(x, Tensor):
            said.append(f"{name} {x}")
            continue
        content = b"" if name == "inputs_embeds" else x.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
        said.append(f"{name} {list(x.shape)} hash {zlib.crc32(content):08x}")
    rule = "shard (every rank calls it with the same batch, also to evaluate)"
    compare_text(sp, f"{rule} of lengths {list(lengths)}, {', '.join(said)}", rule)
