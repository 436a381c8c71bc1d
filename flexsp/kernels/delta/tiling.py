"""How one call of the delta engine is cut: chunks, segments, tiles. A deterministic table, no autotuning."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch

from flexsp.devices import Device, check_heads, filled, of_device
from flexsp.kernels.launch_spec import Launch

__all__ = ["LONG", "MOST", "Part", "Tiling", "Tiles", "engine_runs", "in_gluon", "tiling_of"]

MOST = 256
"""Of K and V."""
LONG = 256
"""Chunks from which on heads are cut."""
_LEAST = 4  # chunks of a segment
_MOST_PARTS = 16
_LONG_SEGMENT = 128  # chunks, beside which what a segment more takes is little


@dataclass(frozen=True)
class Tiles:
    """Tokens of a chunk, and for each kernel the columns of the state a program has and how it is launched.

    `grads` has columns of the state's transpose, and sums over `values_of_grads` of its rows at a time. Kernels of
    `channels` go over tiles of so many key channels; `channel_width`: columns of values that `channel_parts` has at
    once. `copies`: what chunks read is copied to shared memory ahead, by kernels in Gluon, whose walks have 64 columns.
    """

    chunk: int
    wy_inverse: Launch
    wy_transform: Launch
    output: Launch
    chunk_states: Launch
    output_backward: Launch
    grads: Launch
    values_of_grads: int
    channel_scores: Launch
    channel_parts: Launch
    channel_grads: Launch
    channel_width: int
    copies: bool = False


class Part(NamedTuple):
    """Segments that a backward pass goes through at once, and how many segments and chunks are before them."""

    segments: int
    before: int
    chunks: int
    chunks_before: int


@dataclass(frozen=True)
class Tiling:
    """How one call is cut: `n_seg` segments of `per_seg` chunks. `ranks`: over several. `programs`: so many have a
    multiprocessor each. `per_part`: segments whose states of chunks a backward pass keeps at once. `group`: heads that
    share a query and a key. `steps`: keys a token has; T counts keys."""

    B: int
    T: int
    H: int
    K: int
    V: int
    n_docs: int
    tiles: Tiles
    n_chunks: int
    per_seg: int
    n_seg: int
    ranks: bool
    programs: int
    per_part: int
    group: int = 1
    steps: int = 1

    @property
    def chunk(self) -> int:
        return self.tiles.chunk

    @property
    def key_block(self) -> int:
        """Rows of a state in registers."""
        return max(64, 1 << (self.K - 1).bit_length())

    @property
    def key_tile(self) -> int:
        """Key channels that kernels in Gluon have side by side: all, or tiles of 64, which take fewer registers."""
        return self.key_block if self.K <= 128 else 64

    @property
    def scanned(self) -> bool:
        """States enter segments from elsewhere."""
        return self.ranks or self.n_seg > 1

    @property
    def parts(self) -> list[Part]:
        """Of a backward pass, in order."""
        found = []
        for before in range(0, self.n_seg, self.per_part):
            end = min(before + self.per_part, self.n_seg)
            chunks = before * self.per_seg, min(end * self.per_seg, self.n_chunks)
            found.append(Part(end - before, before, chunks[1] - chunks[0], chunks[0]))
        return found

    @property
    def held(self) -> int:
        """Chunks of the largest part."""
        return min(self.per_part * self.per_seg, self.n_chunks)


def engine_runs(K: int, V: int, device: torch.device | None) -> bool:
    """Whether the engine runs calls of kernels with heads of these sizes; it clamps gates as it reads them.

    device: None for the current one.
    """
    return max(K, V) <= MOST and of_device(device).capability[0] == 9


def _chunk(dtype: torch.dtype) -> int:
    return 64 if dtype == torch.bfloat16 else 32


def in_gluon(dtype: torch.dtype, K: int, V: int, gates: int) -> bool:
    """Whether kernels in Gluon run such calls, where they may be launched; `gates` that a token has."""
    if gates > 1:
        return dtype == torch.bfloat16 and {K, V} <= {64, 128}
    return dtype == torch.bfloat16 and 64 <= K <= MOST and K % 16 == 0 and V % 64 == 0


def _choose(dtype: torch.dtype, K: int, V: int, packed: bool, few: bool, copies: bool) -> Tiles:
    """bf16 multiplies bf16 tiles; fp16 and fp32 multiply fp32 tiles, three tf32 products for one.

    packed: a document sets the state anew, which takes registers and shared memory. With more than 64 keys Triton 3.6
    leaves out barriers of walks with 64 columns, so these have 32.
    few: heads and segments alone are too few programs, so columns of the state are spread over more.
    """
    block = max(16, 1 << (V - 1).bit_length())
    part, narrow = min(block, 64), min(block, 32)
    keys = min(64, max(16, 1 << (K - 1).bit_length()))
    large = max(K, V) > 128 and not copies
    if dtype == torch.bfloat16:
        wide = min(block, 128) if not packed else part if K <= 64 else narrow
        walk = Launch(narrow, 4, 3) if few or V <= 32 else Launch(wide, 4 if K <= 64 and wide <= 64 else 8, 2)
        states, few_keys = walk, min(keys, 32)
        if K > 128:  # wider ones have no room for the rows of chunks that are copied ahead
            walk, states = Launch(16, 8, 2), Launch(narrow, 8, 2)
        return Tiles(
            _chunk(dtype), Launch(0, 2 if large else 1, 1), Launch(part, 4, 1), walk, states, walk,
            Launch(keys, 8 if large else 4, 1), part if large else block, Launch(few_keys, 4, 1),
            Launch(few_keys if large else keys, 4, 1), Launch(few_keys, 8 if large else 4, 1),
            part if large else block, copies,
        )  # fmt: skip
    walk, warps = (Launch(narrow, 4, 1), 4) if K <= 128 else (Launch(16, 8, 1), 8)
    return Tiles(
        _chunk(dtype), Launch(0, warps, 1), Launch(narrow, warps, 1), walk, walk, walk, Launch(keys, 8, 1), narrow,
        Launch(16, 4, 1), Launch(16, 8, 1), Launch(16, 4, 1), narrow,
    )  # fmt: skip


def _cut(gates: int, ranks: bool, copies: bool) -> bool:
    """Whether long heads are cut into segments."""
    return ranks if gates == 0 else gates == 1 or copies


def _segments(n_chunks: int, programs: int, at_once: int) -> int:
    """Segments of `programs` programs each, on a GPU that runs `at_once` together: the fewest that keep it busy.

    Programs that find no place run when all others have ended, and take as long. On an H200 a call whose 90 programs a
    segment ran in two turns took 1.05 / 4.25 ms forward / both with 3 segments, and 0.85 / 3.57 with 5.
    """
    most = max(1, min(n_chunks // _LEAST, -(-4 * at_once // programs)))
    return max(range(1, most + 1), key=lambda n: filled(n * programs, at_once))


def _parts(gates: int, steps: int, n_chunks: int, segments: int) -> int:
    """Parts in which a backward pass goes through heads that are cut, keeping states of chunks of one part at once.

    As many as a token has keys, so that these are no more than with one key a token. And where a part needs several
    segments anyway, as many as leave long segments if every part has so many, up to `_MOST_PARTS`: they cost no time.
    """
    if gates != 1:
        return 1
    long = n_chunks // (segments * _LONG_SEGMENT) if segments > 1 else 1
    return max(steps, min(_MOST_PARTS, long))


@functools.lru_cache(maxsize=4096)
def tiling_of(
    dtype: torch.dtype, B: int, T: int, H: int, K: int, V: int, n_docs: int, gates: int, ranks: bool, device: Device,
    gluon: bool = False, group: int = 1, steps: int = 1,
) -> Tiling:  # fmt: skip
    """The plan of calls of B sequences of T keys and H heads; `n_docs` packed documents, 0 if not packed.

    gates: that a token has, 0 if states do not decay. Long heads whose states decay are cut into segments: most of
    these need no matrix (`walks.within_horizon`; with a gate a channel `hopper_horizon`, in Gluon alone). So are, over
    ranks, those whose states do not: a rank has to make matrices anyway. Of others, columns of the state are spread
    over more programs instead, where heads are few.

    gluon: whether kernels in Gluon may be launched.
    """
    check_heads("q", B, H)
    n_chunks = -(-T // _chunk(dtype)) + n_docs
    copies = gluon and in_gluon(dtype, K, V, gates)
    cut = n_chunks >= LONG and _cut(gates, ranks, copies)
    tiles = _choose(dtype, K, V, n_docs > 0, few=not cut and device.programs >= 2 * B * H, copies=copies)
    cols, at_once = tiles.output.cols, device.programs
    if tiles.copies:
        cols, at_once = 64, device.programs * (2 if K <= 128 else 1)
    wanted = _segments(n_chunks, max(1, B * H * -(-V // cols)), at_once) if cut else 1
    parts = _parts(gates, steps, n_chunks, wanted) if cut and tiles.copies else 1
    per_seg = max(1, -(-n_chunks // max(1, min(n_chunks // _LEAST, wanted * parts))))
    n_seg = max(1, -(-n_chunks // per_seg))
    per_part = -(-n_seg // parts)
    return Tiling(
        B, T, H, K, V, n_docs, tiles, n_chunks, per_seg, n_seg, ranks, device.programs, per_part, group, steps
    )
