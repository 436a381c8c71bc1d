"""How the kernel of `flexsp.scan.propagate` goes over the segments of a rank, one tile of a state at a time.

Needs Triton. `flexsp.scan.transitions.KINDS` names the function that reads a transition of each kind.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "apply", "decay_elementwise", "decay_none", "decay_scalar", "decay_shift", "decay_vector", "fold", "write",
]  # fmt: skip


# The transition of one segment: logarithms [BK, 1], or factors or shifts [BK, BV]; the unit past the end --------------


@triton.jit
def decay_none(log_a, segment, h, rows, offsets, mask, live, H, K: tl.constexpr, V: tl.constexpr):
    return (rows * 0).to(tl.float32)[:, None]


@triton.jit
def decay_scalar(log_a, segment, h, rows, offsets, mask, live, H, K: tl.constexpr, V: tl.constexpr):
    a = tl.load(log_a + segment * H + h, mask=live, other=0.0)
    return (rows * 0).to(tl.float32)[:, None] + a


@triton.jit
def decay_vector(log_a, segment, h, rows, offsets, mask, live, H, K: tl.constexpr, V: tl.constexpr):
    return tl.load(log_a + (segment * H + h) * K + rows, mask=(rows < K) & live, other=0.0)[:, None]


@triton.jit
def decay_elementwise(log_a, segment, h, rows, offsets, mask, live, H, K: tl.constexpr, V: tl.constexpr):
    return tl.load(log_a + (segment * H + h) * (K * V) + offsets, mask=mask & live, other=1.0)


@triton.jit
def decay_shift(log_a, segment, h, rows, offsets, mask, live, H, K: tl.constexpr, V: tl.constexpr):
    return tl.load(log_a + (segment * H + h) * (K * V) + offsets, mask=mask & live, other=0.0)


# The walk over segments ----------------------------------------------------------------------------------------------


@triton.jit
def _load(
    states, log_a, cut, b, h, j, rows, offsets, mask, nseg, H,
    K: tl.constexpr, V: tl.constexpr, DECAY: tl.constexpr, BY: tl.constexpr, HAS_CUT: tl.constexpr,
    REVERSE: tl.constexpr,
):  # fmt: skip
    """(F, a, cut) of the j-th segment on the way, and the address of F. The state that leaves the segment goes there.

    Past the end it is the identity, so that loops may take four segments at a time.
    """
    live = j < nseg
    s = nseg - 1 - j if REVERSE else j
    slot = s if REVERSE else s + 1
    at = states + ((b.to(tl.int64) * (nseg + 1) + slot) * H + h) * (K * V) + offsets
    F = tl.load(at, mask=mask & live, other=float("-inf") if BY == 2 else 0.0)
    segment = b.to(tl.int64) * nseg + s
    a = DECAY(log_a, segment, h, rows, offsets, mask, live, H, K, V)
    c = tl.load(cut + segment, mask=live, other=0) != 0 if HAS_CUT else j < 0
    return F, a, c, at


@triton.jit
def _load4(
    states, log_a, cut, b, h, j, rows, offsets, mask, nseg, H,
    K: tl.constexpr, V: tl.constexpr, DECAY: tl.constexpr, BY: tl.constexpr, HAS_CUT: tl.constexpr,
    REVERSE: tl.constexpr,
):  # fmt: skip
    """Four segments whose loads are in flight together: the loop over segments waits for memory, not for arithmetic."""
    F0, a0, c0, at0 = _load(
        states, log_a, cut, b, h, j, rows, offsets, mask, nseg, H, K, V, DECAY, BY, HAS_CUT, REVERSE
    )
    F1, a1, c1, at1 = _load(
        states, log_a, cut, b, h, j + 1, rows, offsets, mask, nseg, H, K, V, DECAY, BY, HAS_CUT, REVERSE
    )
    F2, a2, c2, at2 = _load(
        states, log_a, cut, b, h, j + 2, rows, offsets, mask, nseg, H, K, V, DECAY, BY, HAS_CUT, REVERSE
    )
    F3, a3, c3, at3 = _load(
        states, log_a, cut, b, h, j + 3, rows, offsets, mask, nseg, H, K, V, DECAY, BY, HAS_CUT, REVERSE
    )
    return F0, F1, F2, F3, a0, a1, a2, a3, c0, c1, c2, c3, at0, at1, at2, at3


@triton.jit
def apply(S, F, a, c, BY: tl.constexpr, HAS_CUT: tl.constexpr):
    """The state behind a segment of the state before it; nothing passes a cut."""
    if BY == 2:
        S = S + a
    elif BY == 1:
        S = a * S
    else:
        S = tl.exp(a) * S
    if HAS_CUT:
        S = tl.where(c, float("-inf") if BY == 2 else 0.0, S)
    return tl.maximum(S, F, propagate_nan=tl.PropagateNan.ALL) if BY == 2 else S + F


@triton.jit
def fold(
    S, states, log_a, cut, b, h, rows, offsets, mask, nseg, H,
    K: tl.constexpr, V: tl.constexpr, DECAY: tl.constexpr, BY: tl.constexpr, HAS_CUT: tl.constexpr,
    REVERSE: tl.constexpr,
):  # fmt: skip
    """Composes all segments onto S. Returns (F_tot, the decay of all, whether there was a cut)."""
    if BY > 0:
        total = (offsets * 0).to(states.dtype.element_ty) + (1.0 if BY == 1 else 0.0)
    else:
        total = (rows * 0).to(tl.float32)[:, None]
    any_cut = nseg < 0
    for j in range(0, nseg, 4):
        F0, F1, F2, F3, a0, a1, a2, a3, c0, c1, c2, c3, _0, _1, _2, _3 = _load4(
            states, log_a, cut, b, h, j, rows, offsets, mask, nseg, H, K, V, DECAY, BY, HAS_CUT, REVERSE
        )
        S = apply(apply(S, F0, a0, c0, BY, HAS_CUT), F1, a1, c1, BY, HAS_CUT)
        S = apply(apply(S, F2, a2, c2, BY, HAS_CUT), F3, a3, c3, BY, HAS_CUT)
        if BY == 1:
            total *= (a0 * a1) * (a2 * a3)
        else:
            total += (a0 + a1) + (a2 + a3)
        any_cut = any_cut | c0 | c1 | c2 | c3
    return S, total, any_cut


@triton.jit
def write(
    S, alive, states, log_a, cut, b, h, rows, offsets, mask, nseg, H,
    K: tl.constexpr, V: tl.constexpr, DECAY: tl.constexpr, BY: tl.constexpr, HAS_CUT: tl.constexpr,
    REVERSE: tl.constexpr,
):  # fmt: skip
    """Replaces every F by the state that leaves its segment and enters the next one.

    Where not ``alive``, the call has failed and S is NaN. Cuts then do not stop it: all results have to be NaN.
    """
    for j in range(0, nseg, 4):
        F0, F1, F2, F3, a0, a1, a2, a3, c0, c1, c2, c3, at0, at1, at2, at3 = _load4(
            states, log_a, cut, b, h, j, rows, offsets, mask, nseg, H, K, V, DECAY, BY, HAS_CUT, REVERSE
        )
        S0 = apply(S, F0, a0, c0 & alive, BY, HAS_CUT)
        S1 = apply(S0, F1, a1, c1 & alive, BY, HAS_CUT)
        S2 = apply(S1, F2, a2, c2 & alive, BY, HAS_CUT)
        S = apply(S2, F3, a3, c3 & alive, BY, HAS_CUT)
        tl.store(at0, S0, mask=mask)
        tl.store(at1, S1, mask=mask & (j + 1 < nseg))
        tl.store(at2, S2, mask=mask & (j + 2 < nseg))
        tl.store(at3, S, mask=mask & (j + 3 < nseg))
