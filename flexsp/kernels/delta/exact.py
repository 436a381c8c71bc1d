"""The delta rule token by token in fp32, for the segments whose keys are so alike that chunks would round too much.

A chunk's inverse (I + G)^-1 makes rounding larger: an error of a token reaches those after it, weighted by its entries.
Where keys repeat and beta is near 2, a token reflects the state, no error ever decays, and all of an inverse's entries
are near 2. So `wy_inverse` leaves the sum of squares of the entries below the diagonal, of every chunk, and segments in
which one is beyond `LIMIT` are done again here, over what other kernels left (docs/math.md, section 7, "Keys that are
alike"). A program returns at once where its segment is not one of these.

For a token, with the decayed state S = e^g S_before: error e = v - k S, state S + beta k e. Backward, with the gradient
D of the state after it, its output's included: y = beta k D is the gradient of v, and D - k y that of S.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flexsp.kernels.delta.walks import CHANNEL, SCALAR, begins
from flexsp.kernels.delta.wy_transform import sum_over
from flexsp.kernels.keys_in_pytorch import EPS
from flexsp.kernels.primitives import GATE_MIN, LOG2E, chunk_info, load_state, store_state
from flexsp.runtime.launch import begin

LIMIT = tl.constexpr(1.25)
"""Of a chunk's sum of squares, for each of its tokens, made larger where few keys repeat (`size_of_inverse`). With unit
keys and beta up to 1 each step is a contraction, and the sum is never above 1 a token: such models are never done token
by token. Beyond, it depends on how keys repeat: with beta 2 one key has 126, 32 keys of 128 channels 4 to 5, and 1000
keys 1.0 to 1.3.

It is not lower because this walk is slow. On an H100 a gated rule in bf16 with 65,536 tokens and 32 heads of 128 x 128
takes 39 ms instead of 2 forward, and 230 ms instead of 8 with its gradients."""
ALIKE = tl.constexpr(1 / 3)
"""Of the same sum: beyond it dbeta is <e, dv> / beta. Otherwise <dp, k> is more exact, whose terms cancel less then.
With beta up to 1 random keys of 128 channels have 0.25 at most, one key 0.35 to 1 (docs/math.md, section 7)."""
LEAST_BETA = tl.constexpr(2.0**-40)
GROUP_OF_CHUNKS = tl.constexpr(8)
_EPS = tl.constexpr(EPS)
_MANY = tl.constexpr(128)


@triton.jit(do_not_specialize=["T", "n_chunks", "per_seg"])
def choose(
    gain, exact, table, T, n_chunks, per_seg, C: tl.constexpr, PACKED: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """exact [B H, chunks], of all chunks of a segment alike: whether it is done token by token. It is where a chunk's
    gain is too large, and where gains are negative, by which a program asks for it, for half of the tokens or more."""
    begin(PDL)
    row, seg = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c0 = seg * per_seg
    c1 = tl.minimum(c0 + per_seg, n_chunks)
    found, tokens, asked = 0, 0, 0
    for block in range(c0, c1, _MANY):
        c = block + tl.arange(0, _MANY)
        given = tl.load(gain + row * n_chunks + c, mask=c < c1, other=0.0)
        length = tl.load(table + c * 5 + 1, mask=c < c1, other=0) if PACKED else tl.minimum(T - c * C, C)
        found = tl.maximum(found, tl.max(((tl.abs(given) > LIMIT * length) & (c < c1)).to(tl.int32), axis=0))
        tokens += tl.sum(tl.where(c < c1, length, 0).to(tl.int32), axis=0)
        by_program = (c < c1) & (given < -1.0)  # not what rounding makes negative
        asked += tl.sum(tl.where(by_program, length, 0).to(tl.int32), axis=0)
    found = tl.where((asked > 0) & (2 * asked >= tokens), 1, found)
    for block in range(c0, c1, _MANY):
        c = block + tl.arange(0, _MANY)
        tl.store(exact + row * n_chunks + c, found + tl.zeros([_MANY], tl.int32), mask=c < c1)


@triton.jit
def by_errors(gain, at, length, beta):
    """Of a chunk's tokens with these beta, those whose dbeta is <e, dv> / beta."""
    return (tl.load(gain + at) > ALIKE * length) & (tl.abs(beta) > LEAST_BETA)


@triton.jit
def of_head(base, b, h, stride_b, stride_h, GROUP: tl.constexpr = 1):
    """Where the numbers of head h of sequence b begin; GROUP heads share them."""
    return base + (b * stride_b + h // GROUP * stride_h)


@triton.jit
def _row(base, n, stride, cols, width, when):
    """Row n of a matrix, in fp32; zeros unless `when`."""
    return tl.load(base + n * stride + cols, mask=(cols < width) & when, other=0.0).to(tl.float32)


@triton.jit
def _inverse_norm(row):
    return tl.rsqrt(tl.sum(tl.fma(row, row, 0.0), axis=0) + _EPS)  # `sum_over` keeps no 0.0 behind a square


@triton.jit
def _key(base, n, stride, cols, width, when, NORM: tl.constexpr):
    """A row of queries or keys, divided by its norm if NORM."""
    row = _row(base, n, stride, cols, width, when)
    if NORM:
        row *= _inverse_norm(row)
    return row


@triton.jit
def _number(base, n, stride, when):
    return tl.load(base + n * stride, mask=when, other=0.0).to(tl.float32)


@triton.jit
def _reading(key, beta, n, stride, rows, when, K: tl.constexpr, ERASES: tl.constexpr):
    """The key that reads. ERASES: beta has a number for each of its channels; else it is that which writes."""
    if ERASES:
        key = key * _row(beta, n, stride, rows, K, when)
    return key


@triton.jit
def _step(beta, n, stride, when, ERASES: tl.constexpr):
    """What the key that writes is multiplied by."""
    if ERASES:
        found = 1.0
    else:
        found = _number(beta, n, stride, when)
    return found


@triton.jit
def _decay(g, n, stride, rows, when, K: tl.constexpr, GATED: tl.constexpr, STEPS: tl.constexpr):
    """What key n leaves of a state: a number, or one for each channel [BK]. A token's gate is with its first key."""
    if GATED == CHANNEL:
        gate = _row(g, n, stride, rows, K, when)
    elif GATED == SCALAR:
        gate = _number(g, n // STEPS, stride, when & (n % STEPS == 0))
    else:
        gate = 0.0
    return tl.exp2(tl.maximum(gate, GATE_MIN, propagate_nan=tl.PropagateNan.ALL) * LOG2E)


@triton.jit
def _decayed(S, left, GATED: tl.constexpr):
    if GATED == CHANNEL:
        S = S * left[:, None]
    elif GATED == SCALAR:
        S = S * left
    return S


@triton.jit(do_not_specialize=["T", "H", "n_seg", "n_chunks", "per_seg", "before", "held"])
def exact_forward(
    q, k, v, beta, g, exact, o, entering, states, A, transition_nonzero, initial, final, table, q_sb, q_st, q_sh, k_sb,
    k_st, k_sh, v_sb, v_st, v_sh, beta_sb, beta_st, beta_sh, g_sb, g_st, g_sh, T, H, n_seg, n_chunks, per_seg, before,
    held, scale, K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    READS: tl.constexpr, KEEPS: tl.constexpr, SUMS: tl.constexpr, NONZERO: tl.constexpr, ENTERS: tl.constexpr,
    BOUNDARY: tl.constexpr, LEAVES: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr, GROUP: tl.constexpr,
    STEPS: tl.constexpr, NORM: tl.constexpr, ERASES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A walk from the first token of a segment to its last: READS, KEEPS and SUMS as in `hopper_walks.forward`.

    ERASES: beta are strengths of erasing [B, T, H, K], as in `hopper_channels.channel_scores`."""
    begin(PDL)
    panel, row, seg = tl.program_id(0), tl.program_id(1).to(tl.int64), before + tl.program_id(2)
    c0 = seg * per_seg
    c1 = tl.minimum(c0 + per_seg, n_chunks)
    if tl.load(exact + row * n_chunks + c0) == 0:
        return
    panels: tl.constexpr = (V + BV - 1) // BV
    of_state = panel < panels
    v0 = (panel if of_state else panel - panels) * BV
    b = row // H
    h = row % H
    q = of_head(q, b, h, q_sb, q_sh, GROUP)
    k = of_head(k, b, h, k_sb, k_sh, GROUP)
    v = of_head(v, b, h, v_sb, v_sh)
    beta = of_head(beta, b, h, beta_sb, beta_sh)
    g = of_head(g, b, h, g_sb, g_sh)
    o += (b * (T // STEPS) * H + h) * V
    rows = tl.arange(0, BK)
    cols = v0 + tl.arange(0, BV)
    slot = states + ((b * (n_seg + 1) + seg) * H + h) * K * V
    S = tl.zeros([BK, BV], tl.float32)
    if ENTERS:
        S = load_state(slot, 0, v0, True, K, V, BK, BV)
    elif BOUNDARY and not PACKED and not SUMS:
        S = load_state(initial + row * K * V, 0, v0, True, K, V, BK, BV)
    if SUMS:
        lives = c1 >= c0
        if PACKED:
            lives = ~begins(table, c0, c1)
        if NONZERO:
            tl.store(transition_nonzero + (b * n_seg + seg) * H + h, lives.to(tl.int32), mask=panel == 0)
        S = tl.where((rows[:, None] == cols[None, :]) & (lives & (not of_state)), 1.0, 0.0)
        if not (of_state | lives):
            c0 = c1
    for c in range(c0, c1):
        start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
        if PACKED:  # noqa: SIM102 (a constexpr, then a value)
            if first:
                S = tl.zeros([BK, BV], tl.float32)
                if BOUNDARY:
                    S = load_state(initial + (doc * H + h) * K * V, 0, v0, of_state, K, V, BK, BV)
        if KEEPS:
            to = entering + (row * held + c - before * per_seg) * V * K
            tl.store(to + cols[None, :] * K + rows[:, None], S, mask=(rows < K)[:, None] & (cols < V)[None, :])
        kn = _key(k, start, k_st, rows, K, length > 0, NORM)
        vn = _row(v, start, v_st, cols, V, of_state & (length > 0))
        bn = _step(beta, start, beta_st, length > 0, ERASES)
        read = _reading(kn, beta, start, beta_st, rows, length > 0, K, ERASES)
        left = _decay(g, start, g_st, rows, length > 0, K, GATED, STEPS)
        for i in range(0, length):
            n = start + i
            more = i + 1 < length  # the next token is read ahead
            k1 = _key(k, n + 1, k_st, rows, K, more, NORM)
            v1 = _row(v, n + 1, v_st, cols, V, of_state & more)
            b1 = _step(beta, n + 1, beta_st, more, ERASES)
            read1 = _reading(k1, beta, n + 1, beta_st, rows, more, K, ERASES)
            left1 = _decay(g, n + 1, g_st, rows, more, K, GATED, STEPS)
            S = _decayed(S, left, GATED)
            error = vn - sum_over(S * (read if ERASES else kn)[:, None], 0)
            S += kn[:, None] * (error * bn)[None, :]
            if READS:
                reads = n % STEPS == STEPS - 1
                found = sum_over(S * _key(q, n // STEPS, q_st, rows, K, reads, NORM)[:, None], 0) * scale
                tl.store(o + n // STEPS * H * V + cols, found.to(o.dtype.element_ty), mask=(cols < V) & reads)
            kn, vn, left = k1, v1, left1
            if ERASES:  # what does not change is not handed from token to token
                read = read1
            else:
                bn = b1
        if PACKED and LEAVES:
            store_state(final + (doc * H + h) * K * V, S, 0, v0, last, K, V, BK, BV)
    if LEAVES and not PACKED:
        store_state(final + row * K * V, S, 0, v0, seg == n_seg - 1, K, V, BK, BV)
    if SUMS:
        if of_state:
            store_state(slot + H * K * V, S, 0, v0, True, K, V, BK, BV)
        else:
            store_state(A + ((b * n_seg + seg) * H + h) * K * K, S, 0, v0, True, K, K, BK, BV)


@triton.jit(do_not_specialize=["T", "H", "n_seg", "n_chunks", "per_seg", "before", "held"])
def exact_backward(
    q, k, beta, g, do, exact, leaving, dstates, dfinal, dinitial, table, q_sb, q_st, q_sh, k_sb, k_st, k_sh,
    beta_sb, beta_st, beta_sh, g_sb, g_st, g_sh, do_sb, do_st, do_sh, T, H, n_seg, n_chunks, per_seg, before, held,
    scale, K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, SUMS: tl.constexpr,
    ENTERS: tl.constexpr, BOUNDARY: tl.constexpr, LEAVES: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr,
    GROUP: tl.constexpr, STEPS: tl.constexpr, NORM: tl.constexpr, ERASES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A walk from the last token of a segment to its first, as `hopper_walks.backward`; dv is made elsewhere."""
    begin(PDL)
    v0, row, seg = tl.program_id(0) * BV, tl.program_id(1).to(tl.int64), before + tl.program_id(2)
    c0 = seg * per_seg
    c1 = tl.minimum(c0 + per_seg, n_chunks)
    if tl.load(exact + row * n_chunks + c0) == 0:
        return
    b = row // H
    h = row % H
    q = of_head(q, b, h, q_sb, q_sh, GROUP)
    k = of_head(k, b, h, k_sb, k_sh, GROUP)
    do = of_head(do, b, h, do_sb, do_sh)
    beta = of_head(beta, b, h, beta_sb, beta_sh)
    g = of_head(g, b, h, g_sb, g_sh)
    rows = tl.arange(0, BK)
    cols = v0 + tl.arange(0, BV)
    slot = dstates + ((b * (n_seg + 1) + seg) * H + h) * K * V
    dS = tl.zeros([BK, BV], tl.float32)
    if ENTERS:
        dS = load_state(slot + H * K * V, 0, v0, True, K, V, BK, BV)
    elif BOUNDARY and not PACKED and not SUMS:
        dS = load_state(dfinal + row * K * V, 0, v0, True, K, V, BK, BV)
    for m in range(c0, c1):
        c = c1 - 1 - (m - c0)
        start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
        if PACKED:  # noqa: SIM102 (a constexpr, then a value)
            if last:
                dS = tl.zeros([BK, BV], tl.float32)
                if BOUNDARY:
                    dS = load_state(dfinal + (doc * H + h) * K * V, 0, v0, True, K, V, BK, BV)
        if not SUMS:
            to = leaving + (row * held + c - before * per_seg) * V * K
            tl.store(to + cols[None, :] * K + rows[:, None], dS, mask=(rows < K)[:, None] & (cols < V)[None, :])
        for i in range(0, length):
            n = start + length - 1 - i
            kn = _key(k, n, k_st, rows, K, True, NORM)
            reads = n % STEPS == STEPS - 1
            of_output = _row(do, n // STEPS, do_st, cols, V, reads) * scale
            dS += _key(q, n // STEPS, q_st, rows, K, reads, NORM)[:, None] * of_output[None, :]
            y = sum_over(dS * kn[:, None], 0) * _step(beta, n, beta_st, True, ERASES)
            dS -= _reading(kn, beta, n, beta_st, rows, True, K, ERASES)[:, None] * y[None, :]
            dS = _decayed(dS, _decay(g, n, g_st, rows, True, K, GATED, STEPS), GATED)
        if PACKED:
            if LEAVES:
                store_state(dinitial + (doc * H + h) * K * V, dS, 0, v0, first, K, V, BK, BV)
            dS = tl.where(first, 0.0, dS)
    if SUMS:
        store_state(slot, dS, 0, v0, True, K, V, BK, BV)
    if LEAVES and not PACKED:
        store_state(dinitial + row * K * V, dS, 0, v0, seg == 0, K, V, BK, BV)
