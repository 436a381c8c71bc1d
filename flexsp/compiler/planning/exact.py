"""The launches that do segments again token by token, behind those of the same kind.

Their kernels are those of `flexsp.compiler.backend.exact`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from flexsp.compiler.backend.exact import EXACT
from flexsp.compiler.backend.generated_kernels import Generated
from flexsp.kernels.launches import Launch, LaunchSpec

__all__ = ["again", "choose", "grads", "rounds", "scratch"]



class Call(Protocol):
    """What is read here of a call of generated kernels."""

    @property
    def code(self) -> Generated: ...

    @property
    def plan(self) -> Any: ...

    @property
    def sizes(self) -> Mapping[str, int]: ...

    @property
    def B(self) -> int: ...

    @property
    def H(self) -> int: ...

    @property
    def T(self) -> int: ...

    @property
    def docs(self) -> int: ...

    @property
    def products(self) -> torch.dtype: ...

    @property
    def state(self) -> tuple[int, ...]: ...

    def of_tokens(
        self, kind: str, how: Launch, grid: tuple[int, ...], others: Sequence[str | None], reads: Sequence[str],
        writes: Sequence[str], flags: Mapping[str, bool],
    ) -> LaunchSpec: ...  # fmt: skip


_NARROWEST = 16  # columns of the state, as many as products of tiles need
_WARP = 512  # numbers of the state that a warp has
_TILE = 2048  # that a program of `grads` has, which holds three of them: more spill
_PROGRAMS = 512  # of `grads`, in all: four for each multiprocessor of the largest GPUs
_GROUP = 8


def rounds(call: Call) -> bool:
    """Whether the call has inverses that are rounded. In other dtypes products are of fp32."""
    return call.code.inverts and call.products == torch.bfloat16 and call.plan.n_chunks > 0


def choose(call: Call) -> list[LaunchSpec]:
    """Which segments are done again."""
    if not rounds(call):
        return []
    from flexsp.kernels.delta.exact import choose as kernel

    plan, how = call.plan, Launch(0, 1, 1)
    table = "@table" if call.docs else "@exact"
    constants = {"C": plan.chunk, "MILD": False, "PACKED": call.docs > 0}
    return [LaunchSpec(
        "choose", how, (call.B * call.H, plan.n_seg, 1), ("@gain", "@exact", "@exact", table), ("@gain",), ("@exact",),
        (call.T, plan.n_chunks, plan.per_seg), constants, how.options, kernel=kernel,
    )]  # fmt: skip


def again(
    call: Call, kind: str, others: Sequence[str | None], reads: Sequence[str], writes: Sequence[str],
    flags: Mapping[str, bool],
) -> list[LaunchSpec]:  # fmt: skip
    """A walk of this kind once more, with the same last pointers."""
    if not rounds(call):
        return []
    code, (rows, cols) = call.code, _state(call)
    width = max(_NARROWEST, _WARP // rows)
    width = min(cols, width) if code.split_tokens else cols
    how = Launch(width, min(16, max(1, rows * width // _WARP)), 1)
    panels = -(-call.sizes[code.layout.cols] // width)
    if kind == "summarize" and code.dense:
        panels += -(-call.state[0] // width)
    return [call.of_tokens(
        f"{EXACT}{kind}", how, (panels, call.B * call.H, call.plan.n_seg), ["@exact", *others], reads, writes, flags
    )]  # fmt: skip


def grads(call: Call) -> list[LaunchSpec]:
    """All gradients of inputs, of chunks that are done again."""
    if not rounds(call):
        return []
    how = _of_grads(call)
    others = ["@exact", "@scratch", "@entering", "@leaving", "@table" if call.docs else None]
    grid = (_programs(call), call.B * call.H, 1)
    return [call.of_tokens(f"{EXACT}grads", how, grid, others, ("@entering", "@leaving"), ("@scratch",), {})]


def scratch(call: Call) -> tuple[int, ...]:
    """Numbers in fp32 that `grads` adds up where it has some of the state's columns at a time; else it needs none."""
    cols = call.code.layout.cols
    tokens = [sizes for name, sizes in call.code.layout.tokens.items() if name != "do" and cols not in sizes]
    width = sum(call.sizes[sizes[1]] if len(sizes) == 2 else 1 for sizes in tokens)
    if _of_grads(call).cols >= call.sizes[cols]:
        return (1,)
    return call.B * call.H * _programs(call), call.plan.chunk, max(1, width)


def _state(call: Call) -> tuple[int, int]:
    """Rows and columns of a tile of the whole state."""
    blocks, layout = dict(call.plan.blocks), call.code.layout
    return blocks.get(layout.rows, 1), blocks[layout.cols]


def _of_grads(call: Call) -> Launch:
    rows, cols = _state(call)
    width = min(cols, max(_NARROWEST, _TILE // rows)) if call.code.split_tokens else cols
    return Launch(width, min(16, max(1, rows * width // _WARP)), 1)


def _programs(call: Call) -> int:
    """For each sequence of a head."""
    groups = -(-call.plan.n_chunks // _GROUP)
    return max(1, min(groups, _PROGRAMS // max(1, call.B * call.H)))
