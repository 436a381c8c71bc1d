"""A call as a list of steps: launches whose pointers are named, and what PyTorch does between them.

Worked out once for a signature (shapes, strides, dtypes, alignment), it runs again by filling in addresses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import triton

from flexsp.comm.group import get_sp
from flexsp.exceptions import NotAvailable
from flexsp.scan.launch import Shot, begin
from flexsp.scan.propagate import local_launch, propagate
from flexsp.scan.triton_private import current_stream

__all__ = ["Frame", "Room", "Step", "copy", "play", "scan", "shots_of"]

Tensors = dict[str, torch.Tensor]
_INTERPRETED = not isinstance(begin, triton.JITFunction)


class Room:
    """Named buffers of one call in one allocation."""

    def __init__(self) -> None:
        self.places: dict[str, tuple[int, torch.dtype, tuple[int, ...]]] = {}
        self.nbytes = 0

    def add(self, name: str, dtype: torch.dtype, *shape: int) -> str:
        if name not in self.places:
            self.places[name] = (self.nbytes, dtype, shape)
            self.nbytes += -(-math.prod(shape) * dtype.itemsize // 256) * 256
        return name

    def view(self, memory: torch.Tensor, name: str) -> torch.Tensor:
        start, dtype, shape = self.places[name]
        return memory[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


class Frame:
    """The memory of one call: given tensors by name, and rooms with what was allocated for them."""

    def __init__(self, tensors: Tensors, rooms: Sequence[tuple[Room, torch.Tensor]]) -> None:
        self.tensors, self.rooms = tensors, rooms

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self.tensors:
            return self.tensors[name]
        room, memory = next(pair for pair in self.rooms if name in pair[0].places)
        return room.view(memory, name)

    def addresses(self) -> dict[str | None, int | None]:
        at: dict[str | None, int | None] = {None: None}
        for name, x in self.tensors.items():
            at[name] = x.data_ptr()
        for room, memory in self.rooms:
            base = memory.data_ptr()
            for name, place in room.places.items():
                at[name] = base + place[0]
        return at


Step = Shot | Callable[[Frame], None]


def copy(to: torch.Tensor, source: torch.Tensor) -> None:
    """As a function, for steps."""
    to.copy_(source)


def shots_of(steps: Sequence[Step]) -> list[Shot]:
    return [step for step in steps if isinstance(step, Shot)]


def play(steps: Sequence[Step], frame: Frame, device: torch.device) -> None:
    """Runs the steps; on CUDA on the device's current stream."""
    if device.type == "cpu" and not _INTERPRETED:
        raise NotAvailable("Triton kernels on CPU tensors need its interpreter: set TRITON_INTERPRET=1")
    if device.type != "cuda":
        for step in steps:
            step(frame)
        return
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return play(steps, frame, device)
    at = frame.addresses()
    stream = current_stream(device.index)
    for step in steps:
        if isinstance(step, Shot):
            if step.compiled is None:
                for other in shots_of(steps):
                    other.prepare(frame, device.index)
            step.fire(frame, at, stream)
        else:
            step(frame)


def scan(
    states: str, decay: str | None, cut: str | None, shape: tuple[int, int, int, int, int], kind: str, reverse: bool,
    sp_id: int, call: str = "",
) -> Step:  # fmt: skip
    """`propagate` on named tensors: over segments, and over the ranks of the group `sp_id` (-1: none).

    Args:
        decay: log decay, or A where `kind` is "dense"; None where it is "none".
        shape: B, NSEG, H, K, V.
        call: the op that needs it, the same text on every rank.
    """
    B, n_seg, H, K, V = shape
    if sp_id >= 0:

        def over_ranks(frame: Frame) -> None:
            found = None if decay is None else frame[decay]
            dense = kind == "dense"
            propagate(
                frame[states].view(B, -1, H, K, V), None if dense else found, None if cut is None else frame[cut],
                get_sp(sp_id), A=found if dense else None, reverse=reverse, call=call,
            )  # fmt: skip

        return over_ranks
    kernel, grid, numbers, constants, options = local_launch(B, n_seg, H, K, V, kind, cut is not None, reverse)
    return Shot(kernel, (*grid, 1, 1), [states, decay, cut, *[None] * 6], numbers, constants, options)
