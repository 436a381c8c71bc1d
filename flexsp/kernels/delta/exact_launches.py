"""The launches of `exact` and `exact_grads`, behind those whose results they replace."""

from __future__ import annotations

import torch

from flexsp.kernels.delta import exact, exact_grads
from flexsp.kernels.delta.call_args import CallArgs
from flexsp.kernels.delta.plan import Part
from flexsp.kernels.launch_plan import LaunchPlan
from flexsp.kernels.launch_spec import Launch, LaunchSpec, named

__all__ = ["backward", "choose", "forward", "grads", "rounds", "scratch"]

_COLS = 8  # of the state, in one warp
_WARP = Launch(_COLS, 1, 1)


def rounds(call: CallArgs) -> bool:
    """Whether the call's chunks multiply rounded inverses: in other dtypes products are of fp32."""
    return call.dtype == torch.bfloat16


def choose(call: LaunchPlan, mild: str | None = None) -> LaunchSpec:
    """Which segments are done token by token, of a call that `rounds`; `mild` are told of it, too."""
    p, docs = call.tiling, call.docs
    pointers = "@gain", "@exact", mild or "@exact", "@table" if docs else "@exact"
    constants = {"C": p.chunk, "MILD": mild is not None, "PACKED": docs > 0}
    return LaunchSpec(
        "choose", _WARP, (call.B * call.H, p.n_seg, 1), pointers, ("@gain", *named(mild)), ("@exact", *named(mild)),
        (call.T, p.n_chunks, p.per_seg), constants, _WARP.options, kernel=exact.choose,
    )  # fmt: skip


def _constants(call: CallArgs) -> dict[str, int]:
    p = call.tiling
    given = {"K": p.K, "BK": p.key_block, "V": p.V, "C": p.chunk, "GATED": call.gated}
    return given | {"GROUP": p.group, "STEPS": p.steps}


def _walk(
    call: CallArgs, kernel: str, inputs: list[str | None], pointers: list[str | None], writes: tuple[str, ...],
    panels: int, part: Part | None, **flags: bool,
) -> list[LaunchSpec]:  # fmt: skip
    """Of the segments of a part, or of all."""
    p = call.tiling
    if not rounds(call):
        return []
    n_seg, before = (p.n_seg, 0) if part is None else part[:2]
    numbers = (*call.strides(inputs), p.T, p.H, p.n_seg, p.n_chunks, p.per_seg, before, p.held, call.scale)
    return [call.launch(
        kernel, _WARP, (panels, p.B * p.H, n_seg), [*inputs, "@exact", *pointers], writes, numbers,
        _constants(call) | {"BV": _COLS} | flags, kernel=getattr(exact, kernel),
    )]  # fmt: skip


def forward(
    call: CallArgs, kind: str, given: str | None, part: Part | None = None, final: str | None = None
) -> list[LaunchSpec]:
    """As the walk of this kind: "summarize", "output" or "states"."""
    p, sums, reads = call.tiling, kind == "summarize", kind == "output"
    alive = call.alive if sums else None
    made: list[str | None] = ["o" if reads else None, "@entering" if kind == "states" else None]
    made += ["@states" if p.scanned else None, "@A" if sums else None, alive]
    writes = {"summarize": ("@states", "@A", *named(alive)), "output": ("o", *named(final)), "states": ("@entering",)}
    panels = -(-p.V // _COLS) + (-(-p.K // _COLS) if sums else 0)
    return _walk(
        call, "exact_forward", ["q", "k", "v", call.beta, call.gate], [*made, given, final], writes[kind], panels, part,
        READS=reads, KEEPS=kind == "states", SUMS=sums, ALIVE=alive is not None, ENTERS=p.scanned and not sums,
        BOUNDARY=given is not None, LEAVES=final is not None,
    )  # fmt: skip


def backward(
    call: CallArgs, kind: str, after: str | None, to: str | None = None, part: Part | None = None
) -> list[LaunchSpec]:
    """As the walk of this kind: "collect" or "back"."""
    p, sums = call.tiling, kind == "collect"
    pointers = [None if sums else "@leaving", "@dstates" if p.scanned else None, after, to]
    writes = ("@dstates",) if sums else ("@leaving", *named(to))
    return _walk(
        call, "exact_backward", ["q", "k", call.beta, call.gate, "do"], pointers, writes, -(-p.V // _COLS), part,
        SUMS=sums, ENTERS=p.scanned and not sums, BOUNDARY=after is not None, LEAVES=to is not None,
    )  # fmt: skip


def grads(call: CallArgs, part: Part, to_beta: str, to_gate: str | None, tiles: int) -> list[LaunchSpec]:
    """Of the chunks of a part; dbeta [tiles, ..], or parts with so many tiles."""
    p = call.tiling
    if not rounds(call):
        return []
    cols, inputs = columns_of_grads(call), ["q", "k", "v", call.beta, call.gate, "do"]
    how = Launch(cols, max(4, p.key_block * cols // 2048), 1)
    made = (*call.to_keys, "d_v", to_beta, *named(to_gate))
    groups = -(-part.chunks // int(exact.GROUP_OF_CHUNKS.value)) * p.B * p.H
    numbers = *call.strides(inputs), p.T, p.H, p.n_chunks, part.chunks_before, part.chunks, p.held, groups, call.scale
    pointers = [*inputs, "@exact", "@entering", "@leaving", "@scratch", *call.to_keys, "d_v", to_beta, to_gate]
    return [call.launch(
        "exact_grads", how, (min(groups, programs_of_grads(call)), 1, 1), pointers, [*made, "@scratch"], numbers,
        _constants(call) | {"BV": cols, "TILES": tiles}, kernel=exact_grads.exact_grads,
    )]  # fmt: skip


def columns_of_grads(call: CallArgs) -> int:
    """Columns of the values at a time: a state of so many is in the registers of eight warps at most."""
    p = call.tiling
    return min(max(16, 1 << (p.V - 1).bit_length()), 16384 // p.key_block)


def programs_of_grads(call: CallArgs) -> int:
    return 2 * call.tiling.programs


def scratch(call: CallArgs) -> tuple[int, ...]:
    """Numbers in fp32: rows of a chunk for each program."""
    p = call.tiling
    return programs_of_grads(call), p.chunk, 3 * p.K + 2 * columns_of_grads(call)
