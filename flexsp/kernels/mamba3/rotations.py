"""Queries and keys of a Mamba-3 recurrence: rows of C and B with biases, turned; and weights of tokens' own
values.

A program has some tokens of one group, holds their rows of B and C as tiles [BT, BP] of the first and the second
channels of pairs, and goes over the group's heads: what is summed over heads, the gradients of B and C, is summed
here, always in the same order. Pairs of B and C are channels 2 p and 2 p + 1, or with HALVES p and p + K / 2; in rows
for the engine they lie side by side. Those from S on do not turn. Where the first BP pairs have all that do, the next
BP have tiles of their own (STILL).
"""

from __future__ import annotations

import triton
import triton.language as tl

from flexsp.kernels.pairs import load_pairs, store_pairs
from flexsp.runtime.launch import begin

# sin(2 pi r) / r and (cos(2 pi r) - 1) / r^2 in r^2, for r in -1/4..1/4: least squares in Chebyshev's points, off by
# 7e-9 of the sine and 3e-10 of the cosine.
_S1 = tl.constexpr(6.283185280261414)
_S2 = tl.constexpr(-41.34168066806315)
_S3 = tl.constexpr(81.6024807428661)
_S4 = tl.constexpr(-76.58128455933517)
_S5 = tl.constexpr(39.760722075515076)
_C1 = tl.constexpr(-19.739208618745952)
_C2 = tl.constexpr(64.93935286348893)
_C3 = tl.constexpr(-85.45379898242165)
_C4 = tl.constexpr(60.147644931647754)
_C5 = tl.constexpr(-25.003320319665143)
_SIZES = ["T", "blocks"]


@triton.jit
def circle(turns):
    """(cos, sin) of turns in -1/2..1/2, in fp32."""
    half = tl.floor(2.0 * turns + 0.5)  # -1, 0 or 1: whether by half a turn more
    r = turns - 0.5 * half
    z = r * r
    sign = 1.0 - 2.0 * tl.abs(half)
    cos = 1.0 + z * (_C1 + z * (_C2 + z * (_C3 + z * (_C4 + z * _C5))))
    return sign * cos, (sign * r) * (_S1 + z * (_S2 + z * (_S3 + z * (_S4 + z * _S5))))


@triton.jit
def _nothing():
    """0, which the compiler does not know. Added to columns it leaves it no alignment, so that threads of a warp have
    neighbouring pairs, and a thread has the same pair of several tokens: sums over tokens are then sums of a thread's
    own numbers, but for one exchange between warps. Threads with several pairs of a token would shuffle for each."""
    return tl.num_programs(2) - 1


@triton.jit
def _biased(
    one, two, bias, h, shift, FIRST: tl.constexpr, K: tl.constexpr, BP: tl.constexpr, HALVES: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """Tiles of pairs with a head's bias [H, K], if there is one."""
    if BIAS:
        row = tl.arange(0, 1)
        more, further = load_pairs(bias + h * K + row, row == 0, shift, FIRST, K, BP, HALVES)
        one, two = one + more, two + further
    return one, two


@triton.jit
def _store_sums(sums, v1, v2, u1, u2, pairs, K: tl.constexpr, HALVES: tl.constexpr):
    """Sums over tokens of tiles [BT, BP] of `pairs` [BP] at sums [2, K]: v of B's channels, u of C's. All together,
    since warps wait for each other at every such sum."""
    found = tl.sum(tl.join(tl.join(v1, v2), tl.join(u1, u2)), axis=0)
    pair, second, of_c = pairs[:, None, None], tl.arange(0, 2)[None, :, None], tl.arange(0, 2)[None, None, :]
    channels = (pair + second * (K // 2)) if HALVES else (2 * pair + second)
    tl.store(sums + of_c * K + channels, found, mask=pair < K // 2 if HALVES else channels < K)


@triton.jit
def _turned(
    turns, arrived, until, t, there, shift, K: tl.constexpr, S: tl.constexpr, BP: tl.constexpr, ARRIVED: tl.constexpr
):
    """(cos, sin) [BT, BP] of tokens' turns at `turns` [BT]; the first `until` tokens go on from arrived [S]."""
    p = shift + tl.arange(0, BP)
    found = tl.load(turns[:, None] + p[None, :], mask=there[:, None] & (p < S)[None, :], other=0.0)
    if ARRIVED:
        more = tl.load(arrived + p, mask=p < S, other=0.0)
        found = tl.where((t < until)[:, None], found + more[None, :], found)
        found -= tl.floor(found + 0.5)
    return circle(found)


@triton.jit
def _until(until, T, ARRIVED: tl.constexpr, PACKED: tl.constexpr):
    """How many tokens go on from sums that arrived."""
    count = T.to(tl.int64)
    if ARRIVED and PACKED:
        count = tl.load(until).to(tl.int64)
    return count


# Kernels --------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=_SIZES)
def rows_kernel(
    b, c, b_bias, c_bias, turns, arrived, until, gamma, eta, d, q, k, own, w,
    b_sb, b_st, b_sg, c_sb, c_st, c_sg, T, blocks,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, S: tl.constexpr, BT: tl.constexpr, BP: tl.constexpr,
    STILL: tl.constexpr, STAGES: tl.constexpr, HALVES: tl.constexpr, B_BIAS: tl.constexpr, C_BIAS: tl.constexpr,
    ARRIVED: tl.constexpr, PACKED: tl.constexpr, SKIP: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """q = R(c + c_bias), k = (gamma + eta) R(b + b_bias) [batch, T, H, K] in their dtype, R a rotation by turns
    [batch, T, H, S]; in fp32 own = <b + b_bias, c + c_bias> [batch, T, H], and the factor of a token's own values,
    w = d + gamma own [batch, H, T].

    A program takes HEADS heads of a group. arrived [batch, H, S]: sums from the ranks before; until: as in `_turned`.
    """
    begin(PDL)
    n = tl.program_id(0).to(tl.int64)
    batch = n // blocks
    first_head = tl.program_id(1) * HEADS
    group = first_head // (H // G)
    far = group.to(tl.int64)  # what it is multiplied by may be large
    t = (n % blocks) * BT + tl.arange(0, BT)
    there = t < T
    count = _until(until, T, ARRIVED, PACKED)
    b += batch * b_sb + t * b_st + far * b_sg
    c += batch * c_sb + t * c_st + far * c_sg
    b1, b2 = load_pairs(b, there, 0, 0, K, BP, HALVES)
    c1, c2 = load_pairs(c, there, 0, 0, K, BP, HALVES)
    if STILL:
        b3, b4 = load_pairs(b, there, 0, BP, K, BP, HALVES)
        c3, c4 = load_pairs(c, there, 0, BP, K, BP, HALVES)
    for h in tl.range(first_head, first_head + HEADS, num_stages=STAGES):
        x1, x2 = _biased(b1, b2, b_bias, h, 0, 0, K, BP, HALVES, B_BIAS)
        y1, y2 = _biased(c1, c2, c_bias, h, 0, 0, K, BP, HALVES, C_BIAS)
        row = (batch * T + t) * H + h
        cos, sin = _turned(turns + row * S, arrived + (batch * H + h) * S, count, t, there, 0, K, S, BP, ARRIVED)
        mine = tl.load(gamma + row, mask=there, other=0.0)
        behind = tl.load(eta + row, mask=there, other=0.0)
        weight = (mine + behind)[:, None]
        to_q, to_k = q + row * K, k + row * K
        store_pairs(to_q, there, y1 * cos - y2 * sin, y1 * sin + y2 * cos, 0, 0, K, BP, False)
        k1, k2 = weight * (x1 * cos - x2 * sin), weight * (x1 * sin + x2 * cos)
        store_pairs(to_k, there, k1, k2, 0, 0, K, BP, False)
        products = x1 * y1 + x2 * y2
        if STILL:
            x3, x4 = _biased(b3, b4, b_bias, h, 0, BP, K, BP, HALVES, B_BIAS)
            y3, y4 = _biased(c3, c4, c_bias, h, 0, BP, K, BP, HALVES, C_BIAS)
            store_pairs(to_q, there, y3, y4, 0, BP, K, BP, False)
            store_pairs(to_k, there, weight * x3, weight * x4, 0, BP, K, BP, False)
            products += x3 * y3 + x4 * y4
        product = tl.sum(products, axis=1)
        tl.store(own + row, product, mask=there)
        factor = mine * product
        if SKIP:
            factor += tl.load(d + h).to(tl.float32)
        tl.store(w + (batch * H + h) * T + t, factor, mask=there)


@triton.jit(do_not_specialize=_SIZES)
def rows_grad_kernel(
    b, c, b_bias, c_bias, turns, arrived, until, gamma, eta, own, dq, dk, dw, db, dc, dbiases, dweights, still,
    b_sb, b_st, b_sg, c_sb, c_st, c_sg, T, blocks,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, S: tl.constexpr, BT: tl.constexpr, BP: tl.constexpr,
    STILL: tl.constexpr, TURNS: tl.constexpr, STAGES: tl.constexpr, HALVES: tl.constexpr, B_BIAS: tl.constexpr,
    C_BIAS: tl.constexpr, ARRIVED: tl.constexpr, PACKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The gradients of `rows_kernel`: db, dc [batch, T, G, K]; in fp32 dweights [batch, T, H, 2], those of gamma and
    eta; and in fp32 sums over a program's tokens, dbiases [programs, H, 2, K]. The engine has those of turns.

    A program takes all heads of a group, and BP pairs: the first of them, which turn (TURNS), or those behind, where
    there are such (STILL). These come first and leave their part of the gradient of gamma, still [batch, T, H]. All
    pairs at once would leave a multiprocessor half as many programs. dw lies as w does.
    """
    begin(PDL)
    FIRST: tl.constexpr = 0 if TURNS else BP
    n = tl.program_id(0).to(tl.int64)
    batch = n // blocks
    group = tl.program_id(1)
    far = group.to(tl.int64)
    t = (n % blocks) * BT + tl.arange(0, BT)
    there = t < T
    count = _until(until, T, ARRIVED, PACKED)
    shift = _nothing()
    p = shift + tl.arange(0, BP)
    b += batch * b_sb + t * b_st + far * b_sg
    c += batch * c_sb + t * c_st + far * c_sg
    b1, b2 = load_pairs(b, there, shift, FIRST, K, BP, HALVES)
    c1, c2 = load_pairs(c, there, shift, FIRST, K, BP, HALVES)
    db1, db2 = tl.zeros([BT, BP], tl.float32), tl.zeros([BT, BP], tl.float32)
    dc1, dc2 = tl.zeros([BT, BP], tl.float32), tl.zeros([BT, BP], tl.float32)
    for h in tl.range(group * (H // G), (group + 1) * (H // G), num_stages=STAGES):
        # All is read before anything is written: what comes later would wait for memory once more.
        row = (batch * T + t) * H + h
        of_k, of_q = dk + row * K, dq + row * K
        v1, v2 = load_pairs(of_k, there, shift, FIRST, K, BP, False)
        u1, u2 = load_pairs(of_q, there, shift, FIRST, K, BP, False)
        x1, x2 = _biased(b1, b2, b_bias, h, shift, FIRST, K, BP, HALVES, B_BIAS)
        y1, y2 = _biased(c1, c2, c_bias, h, shift, FIRST, K, BP, HALVES, C_BIAS)
        mine = tl.load(gamma + row, mask=there, other=0.0)
        behind = tl.load(eta + row, mask=there, other=0.0)
        back = tl.load(dw + (batch * H + h) * T + t, mask=there, other=0.0)
        weight = (mine + behind)[:, None]
        own_part = (mine * back)[:, None]
        if TURNS:
            product = tl.load(own + row, mask=there, other=0.0)
            of_weight = tl.zeros([BT], tl.float32)
            if STILL:
                of_weight += tl.load(still + row, mask=there, other=0.0)
            at_turns = turns + row * S
            cos, sin = _turned(at_turns, arrived + (batch * H + h) * S, count, t, there, shift, K, S, BP, ARRIVED)
            v1, v2 = v1 * cos + v2 * sin, v2 * cos - v1 * sin
            u1, u2 = u1 * cos + u2 * sin, u2 * cos - u1 * sin
        products = v1 * x1 + v2 * x2
        v1, v2 = weight * v1 + own_part * y1, weight * v2 + own_part * y2
        u1, u2 = u1 + own_part * x1, u2 + own_part * x2
        db1, db2, dc1, dc2 = db1 + v1, db2 + v2, dc1 + u1, dc2 + u2
        if B_BIAS or C_BIAS:
            _store_sums(dbiases + (n * H + h) * (2 * K), v1, v2, u1, u2, FIRST + p, K, HALVES)
        if TURNS:
            of_weight += tl.sum(products, axis=1)
            both = tl.join(of_weight + back * product, of_weight)
            tl.store(dweights + (row * 2)[:, None] + tl.arange(0, 2)[None, :], both, mask=there[:, None])
        else:
            tl.store(still + row, tl.sum(products, axis=1), mask=there)
    to = ((batch * T + t) * G + group) * K
    store_pairs(db + to, there, db1, db2, shift, FIRST, K, BP, HALVES)
    store_pairs(dc + to, there, dc1, dc2, shift, FIRST, K, BP, HALVES)
