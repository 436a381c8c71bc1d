"""Stage 4c: the bytes that each launch of a call moves, and the time it is predicted to take.

Bytes are those of device memory: each tensor counts once a kernel that reads or writes it. Programs that read the same
rows (panels of the state's columns, the parts of `grads`) run side by side, so the L2 cache serves all but the first.
Small copies that PyTorch makes around the kernels (an initial state put in its place) are left out.

A launch takes the longest of three times: bytes over bandwidth; work over the multiprocessors' rate; the latency of
the steps that follow each other, times the rounds in which its programs run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from flexsp.compiler.backend.body import Kernel
from flexsp.compiler.backend.exact import EXACT
from flexsp.compiler.backend.generated_kernels import Generated
from flexsp.compiler.backend.walks import WALKS
from flexsp.compiler.planning.capacity import Load, intrinsic_load, part_load
from flexsp.compiler.planning.generated_plan import GeneratedPlan, Tiling
from flexsp.devices import REGISTERS, Device, of_device
from flexsp.kernels.launch_spec import PROPAGATE, Launch, LaunchSpec
from flexsp.runtime.kept import keep_with

__all__ = ["Predicted", "predict", "tiles_of"]

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


def predict(
    code: Generated, plan: Tiling, sizes: Mapping[str, int], heads: int, T: int, dtype: torch.dtype,
    *, n_docs: int = 0, backward: bool = False, device: Device | None = None,
) -> list[Predicted]:  # fmt: skip
    """The launches of the forward, or of the backward, of one call.

    Args:
        sizes: by name; `heads` is B * H, T tokens of this rank.
        n_docs: packed documents, 0 if not packed. Final states are written, initial ones not given.
        device: the GPU; None for the one that is there, else the one that is planned for.
    """
    call = GeneratedPlan(code, plan, sizes, 1, heads, T, n_docs, dtype)
    launches = call.backward(False, False) if backward else call.forward()
    # What ranks send each other is not counted, so the scan of a dense transition has nothing to count.
    # Nor are kernels that return at once, where no segment is done again.
    counted = [x for x in launches if x.host is None and (x.kind != PROPAGATE or not code.dense)]
    counted = [x for x in counted if not x.kind.startswith(EXACT)]
    return [_predicted(call, x, device or of_device()) for x in counted]


def tiles_of(
    code: Generated, plan: Tiling, sizes: Mapping[str, int], dtype: torch.dtype, kind: str, how: Launch, device: Device
) -> list[tuple[int, int]]:
    """(registers a thread for the tiles that are alive at once, products) of each part of a kernel."""
    loads = _loads(GeneratedPlan(code, plan, sizes, 1, 1, 1, 0, dtype), kind, how, device)
    return [(x.tiles // (32 * how.warps), x.products) for x in loads]


def _item(dtype: torch.dtype) -> int:
    """Bytes of a number as products read it."""
    return 2 if dtype == torch.bfloat16 else 4


@keep_with(0)
def _kernel_loads(
    kernel: Kernel, blocks: tuple[tuple[str, int], ...], item: int, stages: int, wide: frozenset[str], dense: bool,
    arch: int, pieces: str, packed: bool,
) -> tuple[Load, ...]:  # fmt: skip
    given = (dict(blocks), item, stages, wide, dense, arch, pieces, packed)
    return tuple(part_load(kernel.name, nodes, *given) for nodes in kernel.nodes)


def _loads(call: GeneratedPlan, kind: str, how: Launch, device: Device) -> tuple[Load, ...]:
    """What a program of each part of a generated kernel works on, in one step."""
    code, plan = call.code, call.tiling
    blocks = dict(plan.blocks) | {"C": plan.chunk, code.layout.cols: how.cols}
    tokens = (x for x in code.layout.tokens if x != "do" and call.buffers[x].dtype.itemsize == 4)
    wide = frozenset([*(x.name for x in code.layout.kept.values() if x.wide), *tokens])
    return _kernel_loads(
        code.kernels[kind], tuple(blocks.items()), _item(call.products), how.stages, wide, code.dense, device.arch,
        code.layout.cols if code.pieces else "", call.n_docs > 0,
    )  # fmt: skip


def _predicted(call: GeneratedPlan, launch: LaunchSpec, device: Device) -> Predicted:
    plan, grid, steps, inverse = call.tiling, launch.grid, 1, False
    if launch.kind == PROPAGATE:
        steps = plan.n_seg + 1
        grid = (max(1, call.buffers[launch.writes[0]].nbytes // steps // 4096),)
        loads: Sequence[Load] = [Load(0, 0, 4096, 0, 0, 0, 1, 1024)]
    elif launch.intrinsic is not None:
        inverse = launch.intrinsic.kind == "inverse"
        N = 0 if inverse else dict(plan.blocks)[call.code.layout.kept[launch.intrinsic.args[-1]].dims[1]]
        loads = [intrinsic_load(launch.intrinsic.kind, plan.chunk, N, _item(call.products))]
    elif launch.kernel is not None:  # hand-written: of it only its bytes are known
        loads = [Load(0, 0, 0, 0, 0, 0, 0, 0)]
    else:
        loads = _loads(call, launch.kind, launch.how, device)
        steps = plan.per_seg if launch.kind in WALKS else 1
        if call.code.pieces and launch.kind not in WALKS:
            steps = -(-call.sizes[call.code.layout.cols] // launch.how.cols)
    written = sum(call.buffers[x].nbytes for x in launch.writes) + (_inverted(call) if inverse else 0)
    return _timed(call, launch, grid, steps, _read(call, launch), written, loads, device)


def _read(call: GeneratedPlan, launch: LaunchSpec) -> int:
    """Bytes that a launch reads."""
    generated = call.code.kernels.get(launch.kind)
    by_row = frozenset() if generated is None else generated.by_row
    if launch.intrinsic is not None and launch.intrinsic.kind == "inverse":
        return 4 * call.B * call.H * call.tiling.n_chunks * call.tiling.chunk**2
    return sum(_bytes_read(call, launch, name, name in by_row) for name in launch.reads)


def _bytes_read(call: GeneratedPlan, launch: LaunchSpec, name: str, by_row: bool) -> int:
    """Rows past a chunk's length are written, but only those of gates are read, and of exponents by scores.

    Walks read no last state."""
    plan, buffer = call.tiling, call.buffers[name]
    if name in ("@states", "@dstates") and launch.kind != PROPAGATE:
        return buffer.nbytes // (plan.n_seg + 1) * plan.n_seg
    kept = call.code.layout.kept.get(name)
    if by_row:
        return 4 * call.B * call.H * plan.n_chunks * math.prod(buffer.shape[3:]) if len(buffer.shape) > 3 else 0
    read = kept is not None and (kept.running or (kept.past_the_end and launch.intrinsic is not None))
    if kept is not None and kept.dims[:1] == ("C",) and not read:
        return call.B * call.H * call.T * math.prod(buffer.shape[3:]) * buffer.dtype.itemsize
    return buffer.nbytes


def _inverted(call: GeneratedPlan) -> int:
    """Bytes that an inverse writes as it works in place: blocks of 16 on the diagonal, and all below them."""
    C = call.tiling.chunk
    blocks = C * 16 + sum(C // (2 * s) * s * s for s in (16 << i for i in range(C.bit_length() - 5)))
    return 4 * call.B * call.H * call.tiling.n_chunks * blocks


def _timed(
    call: GeneratedPlan, launch: LaunchSpec, grid: tuple[int, ...], steps: int, read: int, written: int,
    loads: Sequence[Load], device: Device,
) -> Predicted:  # fmt: skip
    """The prediction for a grid whose programs take `steps` steps of one of `loads` each, in equal numbers."""
    threads, walks = 32 * launch.how.warps, launch.kind in WALKS
    registers = max(x.tiles for x in loads) / threads
    shared, least = max(x.shared for x in loads), max(x.least for x in loads)
    spilled = int(6 * max(0.0, registers - _ROOM[walks]))
    held = (255 if spilled else min(255, int(registers) + 60)) * threads
    resident = max(1, min(REGISTERS // held, device.shared // max(shared, 1024), _THREADS // threads))
    rate = device.flops(call.products)
    waits = 0.0 if walks and call.tiling.walk.stages > 1 else _MEMORY
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
    return Predicted(launch.kind, grid, read, written, flops, _LAUNCH + times[bound], bound, shared, least, spilled)
