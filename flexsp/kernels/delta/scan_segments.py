"""What segments do to the state, one after the other: S_{s+1} = A_s S_s + F_s, where A_s is not zero."""

from __future__ import annotations

import triton
import triton.language as tl

from flexsp.kernels.primitives import load_state, store_state
from flexsp.runtime.launch import begin

_BLOCK = tl.constexpr(32)


@triton.jit
def _through(A, place, rows, cols, width, K: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, REVERSE: tl.constexpr):
    """A S, A^T S if REVERSE, for a state that lies at `place`: A as a whole would not fit the registers."""
    new = tl.zeros([BK, BV], tl.float32)
    for i in range(0, K, _BLOCK):
        inner = i + tl.arange(0, _BLOCK)
        at = inner[None, :] * K + rows[:, None] if REVERSE else rows[:, None] * K + inner[None, :]
        a = tl.load(A + at, mask=(rows < K)[:, None] & (inner < K)[None, :], other=0.0)
        mask = (inner < K)[:, None] & (cols < width)[None, :]
        s = tl.load(place + inner[:, None] * width + cols[None, :], mask=mask, other=0.0, cache_modifier=".cg")
        new = tl.dot(a, s, new, input_precision="tf32x3")
    return new


@triton.jit(do_not_specialize=["H", "n_seg", "edge_slots"])
def scan_segments(
    states, A, transition_nonzero, edges, total, H, n_seg, edge_slots,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, REVERSE: tl.constexpr, WHOLE: tl.constexpr,
    GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """States at the edges of segments, in states [B, n_seg + 1, H, K, V], from what each segment leaves there.

    The first one (the last one if REVERSE) is that of `edges` [B, edge_slots, H, K, V]. WHOLE: what all segments
    together leave of a state of zeros, into `edges` [B, 2, H, K, V]; programs beyond the panels of the state's columns
    multiply the matrices A [B, n_seg, H, K, K], into total [B, 1, H, K, K].
    """
    begin(PDL)
    panel, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    panels: tl.constexpr = (V + BV - 1) // BV
    of_state = panel < panels
    v0 = (panel if of_state else panel - panels) * BV
    b = row // H
    h = row % H
    states += (b * (n_seg + 1) * H + h) * K * V
    edges += (b * edge_slots * H + h) * K * V
    A += (b * n_seg * H + h) * K * K
    n0 = n_seg if REVERSE else 0
    rows = tl.arange(0, BK)
    cols = v0 + tl.arange(0, BV)
    if WHOLE:
        unit = rows[:, None] == cols[None, :]
        S = tl.where(unit & (not of_state), 1.0, 0.0)
        first = load_state(states + n0 * H * K * V, 0, v0, of_state, K, V, BK, BV)
        store_state(edges + (H * K * V if REVERSE else 0), first, 0, v0, of_state, K, V, BK, BV)
        edges += 0 if REVERSE else H * K * V
        width = V if of_state else K
        place = edges if of_state else total + row * K * K
    else:
        S = load_state(edges + ((edge_slots - 1) * H * K * V if REVERSE else 0), 0, v0, True, K, V, BK, BV)
        width = V
        place = states + n0 * H * K * V
    inside = (rows < K)[:, None] & (cols < width)[None, :]
    at = rows[:, None] * width + cols[None, :]
    tl.store(place + at, S, mask=inside)
    passes = True
    for n in range(0, n_seg):
        s = n_seg - 1 - n if REVERSE else n
        slot = states + (s if REVERSE else s + 1) * H * K * V
        new = load_state(slot, 0, v0, of_state, K, V, BK, BV)
        lives = True
        if GATED:
            lives = tl.load(transition_nonzero + (b * n_seg + s) * H + h) != 0
        passes = passes & lives  # what is behind such a segment may be NaN, and the product is zero for good
        tl.debug_barrier()  # the state is read again by other threads than those that stored it
        if lives & (of_state | passes):
            new += _through(A + s * H * K * K, place, rows, cols, width, K, BK, BV, REVERSE)
        if WHOLE:
            tl.debug_barrier()  # all of the state is read before it is written over
        else:
            place = slot
        tl.store(place + at, new, mask=inside)
