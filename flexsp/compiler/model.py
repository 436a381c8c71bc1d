"""Stage 4c: the launches of one call, in order, with the bytes each moves and the time it is predicted to take.

Bytes are those of device memory: each tensor counts once a kernel that reads or writes it. Programs that read the same
rows (panels of the state's columns, the parts of `grads`) run side by side, so the L2 cache serves all but the first.
Small copies that PyTorch makes around the kernels (an initial state put in its place) are left out.

A launch takes the longest of three times: bytes over bandwidth; work over the multiprocessors' rate; the latency of
the steps that follow each other, times the rounds in which its programs run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from flexsp.compiler.body import Kernel
from flexsp.compiler.capacity import Load, intrinsic_load, part_load
from flexsp.compiler.intrinsic_kernels import WARPS
from flexsp.compiler.values import is_state
from flexsp.compiler.walks import WALKS
from flexsp.devices import Device, of_device
from flexsp.runtime.kept import keep_with

if TYPE_CHECKING:
    from flexsp.compiler.differentiate import Intrinsic
    from flexsp.compiler.engine import Generated
    from flexsp.compiler.plan import Launch, Plan

__all__ = ["Predicted", "predict", "tiles_of"]

_REGISTERS = 64 * 1024
_THREADS = 2048
_ROOM = {True: 160, False: 240}
"""Registers a thread that tiles may have before others spill, in walks (addresses of a pipeline) and elsewhere."""


# Fitted to the times of the generated simple GLA, GLA and DeltaNet on an H200. Of a multiprocessor, in a microsecond:
_NUMBERS = 0.1e6  # numbers that elementwise work makes
_SPILLED = 0.06e6  # bytes of spilled registers
_SHARE = 3.0  # of the bandwidth that one multiprocessor can take, in fair shares
# Microseconds:
_LAUNCH = 2.0
_PRODUCT = 0.25  # of a product in a chain of them
_MEMORY = 1.1  # of a load


@dataclass(frozen=True)
class Predicted:
    """One launch: bytes read and written, floating-point operations of products with padded tiles, microseconds.

    `bound` is what it waits for: "memory", "work" or "latency". `shared` and `least` are bytes of shared memory a
    program (`Load`), `spilled` bytes a thread.
    """

    kernel: str
    grid: tuple[int, ...]
    read: int
    written: int
    flops: int
    us: float
    bound: str
    shared: int
    least: int
    spilled: int


@dataclass(frozen=True)
class _Call:
    """Shapes of one call, and bytes of its tensors."""

    code: Generated
    plan: Plan
    sizes: Mapping[str, int]
    heads: int
    T: int
    docs: int
    dtype: torch.dtype
    device: Device

    @property
    def item(self) -> int:
        """Bytes of a number as products read it, and of one of the chunks' states."""
        return 2 if self.dtype == torch.bfloat16 else 4

    @functools.cached_property
    def state(self) -> int:
        """Bytes of one fp32 state of every head."""
        return 4 * self.heads * math.prod(self.code.layout.numbers(self.sizes))

    @property
    def chunk_states(self) -> int:
        return self.plan.n_chunks * self.state * self.item // 4

    def width(self, name: str) -> int:
        """Bytes of a number of a token; what shares the first one's type in the metadata has the call's."""
        tokens = self.code.program.meta.tokens
        if name in ("do", "o") or tokens[name].dtype == next(iter(tokens.values())).dtype:
            return self.dtype.itemsize
        return tokens[name].dtype.itemsize

    def token(self, name: str) -> int:
        sizes = self.code.layout.tokens["do" if name == "o" else name]
        return self.heads * self.T * math.prod(self.sizes[s] for s in sizes[1:]) * self.width(name)

    def kept(self, name: str, reads: bool) -> int:
        """Bytes of a kept value. Rows past a chunk's length are written, but only those of running gates are read."""
        kept = self.code.layout.kept[name]
        sizes = kept.dims
        rows = self.plan.n_chunks * (self.plan.chunk if "C" in sizes[:1] else 1)
        if reads and "C" in sizes[:1] and not kept.running:
            rows = self.T
        numbers = math.prod(
            self.plan.chunk if s == "C" else self.sizes[s] for s in sizes[1 if "C" in sizes[:1] else 0 :]
        )
        return self.heads * rows * numbers * (4 if kept.wide else self.dtype.itemsize)

    def value(self, name: str, reads: bool) -> int:
        """Bytes of what a kernel reads or writes under this name."""
        layout = self.code.layout
        if name in layout.kept:
            return self.kept(name, reads)
        source = name if reads or name == "o" else name.removeprefix("d_")
        if source in layout.params:
            each = math.prod(self.sizes[s] for s in layout.params[source])
            return 4 * self.heads * each * (1 if reads else self.plan.n_chunks)
        return self.token(source)

    def read(self, kernel: Kernel) -> int:
        """Bytes of a kernel's arguments, of some kept values one row a chunk."""
        whole = [x for x in (*kernel.tokens, *kernel.kept, *kernel.params) if x not in kernel.by_row]
        by_row = [self.code.layout.kept[x].dims for x in kernel.by_row]
        row = sum(self.sizes[x[1]] for x in by_row if len(x) > 1)
        return sum(self.value(x, True) for x in whole) + 4 * self.heads * self.plan.n_chunks * row

    @functools.cached_property
    def wide(self) -> frozenset[str]:
        """Names of fp32 values, whatever the inputs are."""
        kept = [x.name for x in self.code.layout.kept.values() if x.wide]
        return frozenset([*kept, *(x for x in self.code.layout.tokens if x != "do" and self.width(x) == 4)])


def predict(
    code: Generated, plan: Plan, sizes: Mapping[str, int], heads: int, T: int, dtype: torch.dtype,
    *, docs: int = 0, backward: bool = False, device: Device | None = None,
) -> list[Predicted]:  # fmt: skip
    """The launches of the forward, or of the backward, of one call.

    Args:
        sizes: by name; `heads` is B * H, T tokens of this rank.
        docs: packed documents, 0 if not packed. Final states are written, initial ones not given.
        device: the GPU; None for the one that is there, else the one that is planned for.
    """
    call = _Call(code, plan, sizes, heads, T, docs, dtype, device or of_device())
    return [*(_backward(call) if backward else _forward(call))]


def tiles_of(
    code: Generated, plan: Plan, sizes: Mapping[str, int], dtype: torch.dtype, kind: str, how: Launch, device: Device
) -> list[tuple[int, int]]:
    """(registers a thread for the tiles that are alive at once, products) of each part of a kernel."""
    loads = _loads(_Call(code, plan, sizes, 1, 1, 0, dtype, device), kind, how)
    return [(x.tiles // (32 * how.warps), x.products) for x in loads]


def _forward(call: _Call) -> Iterator[Predicted]:
    plan = call.plan
    yield from _stages(call, False)
    if plan.schedule == "segmented":
        yield _walk(call, "summarize")
        yield from _scan(call)
    yield _walk(call, "output")


def _backward(call: _Call) -> Iterator[Predicted]:
    code, plan = call.code, call.plan
    early = code.kernels["collect"].entering
    if early:
        yield _walk(call, "states")
    if plan.schedule == "segmented":
        yield _walk(call, "collect")
        yield from _scan(call)
    if not early:
        yield _walk(call, "states")
    yield _walk(call, "back")
    yield from _stages(call, True)
    yield _chunkwise(call, "grads", plan.part)
    if code.small:
        yield _chunkwise(call, "gather", plan.small)


def _stages(call: _Call, backward: bool) -> Iterator[Predicted]:
    for stage in call.code.stages:
        if stage.backward == backward:
            if stage.writes:
                yield _chunkwise(call, stage.kind, call.plan.whole)
            for x in stage.intrinsics:
                yield _intrinsic(call, x)


@keep_with(0)
def _kernel_loads(
    kernel: Kernel, blocks: tuple[tuple[str, int], ...], item: int, stages: int, wide: frozenset[str], dense: bool,
    arch: int,
) -> tuple[Load, ...]:  # fmt: skip
    return tuple(part_load(kernel.name, nodes, dict(blocks), item, stages, wide, dense, arch) for nodes in kernel.nodes)


def _loads(call: _Call, kind: str, how: Launch) -> tuple[Load, ...]:
    code, plan = call.code, call.plan
    blocks = dict(plan.blocks) | {"C": plan.chunk, code.layout.cols: how.cols}
    return _kernel_loads(
        code.kernels[kind], tuple(blocks.items()), call.item, how.stages, call.wide, code.dense, call.device.arch
    )


def _walk(call: _Call, kind: str) -> Predicted:
    code, plan, how = call.code, call.plan, call.plan.walk
    kernel, n_seg = code.kernels[kind], plan.n_seg
    read = call.read(kernel)
    written = sum(call.value(x, False) for x in kernel.writes)
    rows, columns, state = code.layout.numbers(call.sizes)[0], call.sizes[code.layout.cols], call.state
    panels = -(-columns // how.cols)
    ends, segmented = kind in ("summarize", "collect"), plan.schedule == "segmented"
    if segmented and not ends:
        read += n_seg * state
    if ends:  # and the state before the first segment, or after the last
        written += (n_seg + 1) * state
    elif kind == "output":
        written += (call.docs or 1) * state
    if kind == "summarize" and code.dense:  # and A, by panels of its own
        written += 4 * call.heads * rows * rows
        panels += -(-rows // how.cols)
    elif kind == "summarize" and code.program.transition != "none":
        written += 4 * call.heads * n_seg * rows
    if kind in ("states", "back"):
        written += call.chunk_states
    read += call.chunk_states if kernel.entering else 0
    grid = (panels, call.heads, n_seg)
    return _timed(call, kind, grid, plan.per_seg, read, written, _loads(call, kind, how), how.warps)


def _chunkwise(call: _Call, kind: str, how: Launch) -> Predicted:
    kernel, plan = call.code.kernels[kind], call.plan
    read = call.read(kernel)
    names = {node.name for part in kernel.nodes for node in part if node.op == "placeholder"}
    read += call.chunk_states * len({name.split("__")[0] for name in names if is_state(name)})
    written = sum(call.value(x, False) for x in kernel.writes)
    panels = -(-call.sizes[call.code.layout.cols] // how.cols)
    grid = (plan.n_chunks * kernel.parts, call.heads, *([panels] if panels > 1 else []))
    return _timed(call, kind, grid, 1, read, written, _loads(call, kind, how), how.warps)


def _intrinsic(call: _Call, what: Intrinsic) -> Predicted:
    plan, C, layout = call.plan, call.plan.chunk, call.code.layout
    read = sum(call.value(x, True) for x in what.args)
    written = sum(call.value(x, False) for x in what.results)
    N = 0
    if what.kind == "inverse":  # it works in place: blocks of 16 on the diagonal, and all below them
        blocks = C * 16 + sum(C // (2 * s) * s * s for s in (16 << i for i in range(C.bit_length() - 5)))
        written += 4 * call.heads * plan.n_chunks * blocks
        read = 4 * call.heads * plan.n_chunks * C * C
    else:
        N = dict(plan.blocks)[layout.kept[what.args[-1]].dims[1]]
    load = intrinsic_load(what.kind, C, N, call.item)
    grid = (plan.n_chunks, call.heads)
    return _timed(call, f"{what.kind}_kernel", grid, 1, read, written, [load], WARPS[what.kind])


def _scan(call: _Call) -> Iterator[Predicted]:
    """The scan over segments. What ranks send each other is not counted, so dense transitions have none."""
    if call.code.dense:
        return
    slots, rows = call.plan.n_seg + 1, call.code.layout.numbers(call.sizes)[0]
    decay = 0 if call.code.program.transition == "none" else 4 * call.heads * call.plan.n_seg * rows
    load = Load(0, 0, 4096, 0, 0, 0, 1, 1024)
    grid = (max(1, call.state // 4096),)
    read, written = slots * call.state + decay, slots * call.state
    yield _timed(call, "_propagate_kernel", grid, slots, read, written, [load], 4)


def _timed(
    call: _Call, kernel: str, grid: tuple[int, ...], steps: int, read: int, written: int, loads: Sequence[Load],
    warps: int,
) -> Predicted:  # fmt: skip
    """The prediction for a grid whose programs take `steps` steps of one of `loads` each, in equal numbers."""
    device, threads, walks = call.device, 32 * warps, kernel in WALKS
    registers = max(x.tiles for x in loads) / threads
    shared, least = max(x.shared for x in loads), max(x.least for x in loads)
    spilled = int(6 * max(0.0, registers - _ROOM[walks]))
    held = (255 if spilled else min(255, int(registers) + 60)) * threads
    resident = max(1, min(_REGISTERS // held, device.shared // max(shared, 1024), _THREADS // threads))
    rate = device.flops(call.dtype)
    waits = 0.0 if walks and call.plan.walk.stages > 1 else _MEMORY
    work = latency = 0.0
    for x in loads:
        spills = 8 * max(0.0, x.tiles / threads - _ROOM[walks]) * threads
        own = (x.flops + x.slow) / rate + (x.numbers / _NUMBERS + spills / _SPILLED) / device.multiprocessors
        work += own / len(loads)
        latency += (own * device.multiprocessors + x.products * _PRODUCT + x.loads * waits) / len(loads)
    programs = math.prod(grid)
    at_once = max(1, min(programs, device.multiprocessors * resident))
    rounds = math.ceil(programs / at_once) if walks else programs / at_once
    busy = max(1, min(programs, device.multiprocessors)) / device.multiprocessors
    times = {
        "memory": (read + written) / (device.bandwidth * min(1.0, _SHARE * busy)),
        "work": work * programs * steps,
        "latency": rounds * (steps * latency + (_MEMORY if walks else 0.0)),
    }
    bound = max(times, key=lambda x: times[x])
    flops = sum(x.flops for x in loads) * steps * programs // len(loads)
    return Predicted(kernel, grid, read, written, flops, _LAUNCH + times[bound], bound, shared, least, spilled)
