"""The kernel of `flexsp.scan.composing`. Import this module only where Triton is needed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flexsp.runtime.launch import begin, launch
from flexsp.scan.transitions import KINDS

__all__ = ["compose"]

_NUMBERS = 1024  # of a program
_COLUMNS = 256  # at most


@triton.jit(do_not_specialize=["rows", "V", "later_step", "earlier_step", "earlier_row"])
def _compose_kernel(
    later, earlier, out, rows, V, later_step, earlier_step, earlier_row,
    MAXIMUM: tl.constexpr, WIDE: tl.constexpr, STATE: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """(A2 A1, A2 F1 + F2), or A2 S + F2 of a STATE: later [n, rows, A and F], earlier [n or 1, rows, A and F], or F.

    WIDE: A has a number for each of the V numbers of F, else one for all. MAXIMUM: it is a shift before a maximum.
    """
    begin(PDL)
    n, width = tl.program_id(1).to(tl.int64), V if WIDE else 1
    behind = 0 if STATE else width  # where F begins in earlier rows and in those that are written
    r = (tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR))[:, None]
    c = (tl.program_id(2) * BV + tl.arange(0, BV))[None, :]
    at = c if WIDE else c * 0
    inside = (r < rows) & (c < V)
    second = later + n * later_step + r * (width + V)
    first = earlier + n * earlier_step + r * earlier_row
    both = out + (n * rows + r) * (behind + V)
    a = tl.load(second + at, mask=inside, other=0.0)
    F = tl.load(second + width + c, mask=inside, other=0.0)
    S = tl.load(first + behind + c, mask=inside, other=0.0)
    if MAXIMUM:
        left = tl.where(a == float("-inf"), float("-inf"), a + S)
        tl.store(both + behind + c, tl.maximum(left, F, propagate_nan=tl.PropagateNan.ALL), mask=inside)
    else:
        tl.store(both + behind + c, tl.where(a == 0.0, 0.0, a * S) + F, mask=inside)
    if not STATE:
        before = tl.load(first + at, mask=inside, other=0.0)
        if MAXIMUM:
            closed = (a == float("-inf")) | (before == float("-inf"))
            a = tl.where(closed, float("-inf"), a + before)
        else:
            a = tl.where((a == 0.0) | (before == 0.0), 0.0, a * before)
        tl.store(both + at, a, mask=inside if WIDE else inside & (c == 0))


def compose(kind: str, packed: torch.Tensor, earlier: torch.Tensor, states: bool) -> torch.Tensor:
    """What `Transition.compose_packed` gives, or, of earlier `states`, `Transition.apply_packed`; not of dense A."""
    wide = KINDS[kind].by_number
    *many, rows, width = packed.shape
    V = width // 2 if wide else width - 1
    n, behind = max(packed.shape[:-2].numel(), 1), 0 if states else width - V
    packed = packed.contiguous()
    out = packed.new_empty((*many, rows, behind + V))
    if not out.numel():
        return out
    if earlier.stride(-1) != 1:
        earlier = earlier.contiguous()
    step = earlier.stride(-3) if earlier.dim() == 3 else 0
    columns = min(triton.next_power_of_2(V), _COLUMNS)
    tall = _NUMBERS // columns
    launch(
        _compose_kernel, (triton.cdiv(rows, tall), n, triton.cdiv(V, columns)),
        (packed, earlier, out, rows, V, rows * width, step, earlier.stride(-2)),
        {"MAXIMUM": kind == "max-plus", "WIDE": wide, "STATE": states, "BR": tall, "BV": columns},
        {"num_warps": 4},
    )  # fmt: skip
    return out
