"""How a call whose state has no heads is cut: its D channels into heads for the scan and blocks for walks, its tokens
into chunks and segments. A channel's state is N numbers."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import triton

from flexsp.devices import MOST_HEADS, Device, of_device
from flexsp.exceptions import NotAvailable
from flexsp.scan.dense import MOST

__all__ = ["ChannelTiling", "Limits", "channels_of_head", "make_tiling"]


class Limits(NamedTuple):
    """What a set of kernels takes at most.

    Attributes:
        title: of the kernels, for messages.
        first: the op's own name for its first tensor.
        channels: of a program.
        numbers: of the states of a program.
        programs: how many times the device's number of programs the segments are cut into.
        chunks: of a segment.
    """

    title: str
    first: str
    channels: int
    numbers: int
    programs: int
    chunks: int


@dataclass(frozen=True)
class ChannelTiling:
    """How one call is cut: P channels a head, blocks of channels, chunks and segments."""

    B: int
    T: int
    D: int
    N: int
    P: int
    n_docs: int
    block: int
    n_chunks: int
    per_seg: int
    n_seg: int

    chunk: ClassVar[int] = 8

    @property
    def H(self) -> int:
        return self.D // self.P

    @property
    def numbers(self) -> int:
        """N, as kernels have it in registers."""
        return triton.next_power_of_2(self.N)  # type: ignore[no-any-return]

    def programs(self, block: int) -> int:
        return -(-self.D // block)


def channels_of_head(D: int, N: int = 1) -> int:
    """How many channels the scan over segments and ranks takes for a head: a divisor, of states that it holds."""
    return next(size for size in range(min(D, MOST // N), 0, -1) if D % size == 0)


def make_tiling(x: torch.Tensor, N: int, n_docs: int, limits: Limits) -> ChannelTiling:
    """Tiling for x [batch, T, H, P] and `n_docs` packed documents (0: not packed), on the GPU that x is on."""
    sizes = (*x.shape, N, n_docs)
    build = tiling_of if all(type(n) is int for n in sizes) else tiling_of.__wrapped__  # symbolic sizes have no hash
    return build(*sizes, limits, of_device(x.device))


@functools.lru_cache(maxsize=4096)
def tiling_of(
    batch: int, T: int, H: int, P: int, N: int, n_docs: int, limits: Limits, device: Device
) -> ChannelTiling:  # fmt: skip
    """As `make_tiling`, of sizes."""
    D = H * P
    if batch * H > MOST_HEADS:
        blocks = f"blocks of {P} channels, the largest divisor of D = {D} up to {MOST // N}"
        raise NotAvailable(
            f"{limits.first}: {limits.title} take at most {MOST_HEADS} {blocks}, in all sequences, got {batch * H}"
        )
    block = max(1, min(triton.next_power_of_2(D), limits.channels, limits.numbers // triton.next_power_of_2(N)))
    n_chunks = -(-T // ChannelTiling.chunk) + n_docs
    wanted = max(1, limits.programs * device.programs // max(1, batch * -(-D // block)))
    per_seg = min(limits.chunks, max(1, -(-n_chunks // max(1, min(n_chunks, wanted)))))
    n_seg = max(1, -(-n_chunks // per_seg))
    return ChannelTiling(batch, T, D, N, P, n_docs, block, n_chunks, per_seg, n_seg)
