"""A call as a list of steps: kernel launches with named pointers, and PyTorch operations between them.

Worked out once for a signature (shapes, strides, dtypes, alignment), it runs again by filling in addresses.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence

import torch
import triton

from flexsp.exceptions import NotAvailable
from flexsp.log import logs, tell
from flexsp.runtime.launch import KernelLaunch, begin
from flexsp.runtime.triton_private import current_stream

__all__ = ["Frame", "Workspace", "Step", "launches_of", "run_steps"]

Tensors = dict[str, torch.Tensor]
_INTERPRETED = not isinstance(begin, triton.JITFunction)


class Workspace:
    """Named buffers of one call in one allocation; with `others`, also theirs."""

    def __init__(self, *others: Workspace) -> None:
        self.places: dict[str, tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]] = {}
        self.nbytes = 0
        for workspace in others:
            self.places |= {name: (self.nbytes + x[0], *x[1:]) for name, x in workspace.places.items()}
            self.nbytes += workspace.nbytes

    def add(self, name: str, dtype: torch.dtype, *shape: int) -> str:
        if name not in self.places:
            strides = tuple([math.prod(shape[i + 1 :]) for i in range(len(shape))])
            self.places[name] = (self.nbytes, dtype, shape, strides)
            self.nbytes += -(-math.prod(shape) * dtype.itemsize // 256) * 256
        return name

    def view(self, memory: torch.Tensor, name: str) -> torch.Tensor:
        start, dtype, shape, strides = self.places[name]
        memory = memory.view(dtype)  # whose own place in its storage counts too
        return memory.as_strided(shape, strides, memory.storage_offset() + start // dtype.itemsize)


class Frame:
    """The memory of one call: given tensors by name, and workspaces with what was allocated for them."""

    def __init__(self, tensors: Tensors, workspaces: Sequence[tuple[Workspace, torch.Tensor]]) -> None:
        self.tensors, self.workspaces = tensors, workspaces

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self.tensors:
            return self.tensors[name]
        workspace, memory = next(pair for pair in self.workspaces if name in pair[0].places)
        return workspace.view(memory, name)

    def addresses(self) -> dict[str | None, int | None]:
        at: dict[str | None, int | None] = {None: None}
        for name, x in self.tensors.items():
            at[name] = x.data_ptr()
        for workspace, memory in self.workspaces:
            base = memory.data_ptr()
            for name, place in workspace.places.items():
                at[name] = base + place[0]
        return at


Step = KernelLaunch | Callable[[Frame], None]


def launches_of(steps: Sequence[Step]) -> list[KernelLaunch]:
    return [step for step in steps if isinstance(step, KernelLaunch)]


def run_steps(steps: Sequence[Step], frame: Frame, device: torch.device) -> None:
    """Runs the steps; on CUDA on the device's current stream."""
    if device.type != "cuda":
        if device.type == "cpu" and not _INTERPRETED:
            raise NotAvailable("Triton kernels on CPU tensors need its interpreter: set TRITON_INTERPRET=1")
        _tell_of(launches_of(steps))
        for step in steps:
            step(frame)
        return
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return run_steps(steps, frame, device)
    at = frame.addresses()
    stream = current_stream(device.index)
    new: list[KernelLaunch] = []
    begun = 0.0
    for step in steps:
        if isinstance(step, KernelLaunch):
            if step.compiled is None and not new:
                launches = launches_of(steps)
                new, begun = [x for x in launches if x.compiled is None], time.perf_counter()
                _tell_of(launches)
                for other in launches:
                    other.prepare(frame, device.index)
            step.run(frame, at, stream)
        else:
            step(frame)
    new = [x for x in new if x.compiled is not None]  # none where kernels are only collected
    if new:
        names = ", ".join(dict.fromkeys(x.kernel.__name__ for x in new))
        took = time.perf_counter() - begun
        tell(logging.INFO, f"kernels: {len(new)} made ready and launched for the first time in {took:.2f} s: {names}")


def _tell_of(launches: Sequence[KernelLaunch]) -> None:
    """Logs a list of launches that is about to run for the first time."""
    if launches and logs(logging.DEBUG):
        listed = [f"{x.kernel.__name__} {' x '.join(map(str, x.grid))}" for x in launches]
        tell(logging.DEBUG, f"launches: {', '.join(listed)}")
