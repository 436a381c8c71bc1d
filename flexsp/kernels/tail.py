"""Zeros in the rows of tokens that no document holds: packed documents may end before the tokens do.

No kernel of an engine has a chunk there, so nothing else writes these rows. Where they begin is known on the device
alone: it is the first token of the last slot of the chunk table, which is never needed (`flexsp.kernels.table`). Where
there are none, the programs of this kernel find nothing to do.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl

from flexsp.runtime.launch import KernelLaunch, begin

__all__ = ["tail_launches"]

_TENSORS = 8  # of a launch
_PROGRAMS, _BLOCK = 264, 2048
_NUMBERS = [f"{name}{i}" for i in range(_TENSORS) for name in "trhn"]


@triton.jit
def _zeros(x, start, tokens, row, heads, every, BLOCK: tl.constexpr):
    """Zeros from token `start` / `every` on in x [heads, tokens, row]."""
    first = (start // every).to(tl.int64)
    left = (tokens - first) * row
    for h in range(0, heads):
        base = (h * tokens.to(tl.int64) + first) * row
        for i in range(tl.program_id(0) * BLOCK, left, tl.num_programs(0) * BLOCK):
            at = i + tl.arange(0, BLOCK)
            tl.store(x + base + at, tl.zeros([BLOCK], x.dtype.element_ty), mask=at < left)


@triton.jit(do_not_specialize=["last", *_NUMBERS])
def tail_kernel(
    table, x0, x1, x2, x3, x4, x5, x6, x7, last, t0, r0, h0, n0, t1, r1, h1, n1, t2, r2, h2, n2, t3, r3, h3, n3,
    t4, r4, h4, n4, t5, r5, h5, n5, t6, r6, h6, n6, t7, r7, h7, n7, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of each tensor x [h, t, r]: a row of it stands for n tokens of the table [last + 1, 5]; None for no tensor."""
    begin(PDL)
    start = tl.load(table + last * 5)
    _zeros(x0, start, t0, r0, h0, n0, BLOCK)
    if x1 is not None:
        _zeros(x1, start, t1, r1, h1, n1, BLOCK)
    if x2 is not None:
        _zeros(x2, start, t2, r2, h2, n2, BLOCK)
    if x3 is not None:
        _zeros(x3, start, t3, r3, h3, n3, BLOCK)
    if x4 is not None:
        _zeros(x4, start, t4, r4, h4, n4, BLOCK)
    if x5 is not None:
        _zeros(x5, start, t5, r5, h5, n5, BLOCK)
    if x6 is not None:
        _zeros(x6, start, t6, r6, h6, n6, BLOCK)
    if x7 is not None:
        _zeros(x7, start, t7, r7, h7, n7, BLOCK)


def tail_launches(n_slots: int, tensors: Sequence[tuple[str, tuple[int, ...], int]]) -> list[KernelLaunch]:
    """Launches that write zeros behind the last document.

    Args:
        n_slots: rows of "@table".
        tensors: of each its name, its shape as [heads, tokens, numbers of a row], and tokens of the table for each row.
    """
    made = []
    for at in range(0, len(tensors), _TENSORS):
        some = tensors[at : at + _TENSORS]
        absent = _TENSORS - len(some)
        names = ["@table", *[name for name, *_ in some], *[None] * absent]
        numbers = [n for _, (heads, tokens, row), every in some for n in (tokens, row, heads, every)]
        numbers = [n_slots - 1, *numbers, *[0, 0, 0, 1] * absent]
        made.append(KernelLaunch(tail_kernel, (_PROGRAMS, 1, 1), names, numbers, {"BLOCK": _BLOCK}, {"num_warps": 4}))
    return made
