"""What the delta engine does chunk by chunk where each key channel has a gate (docs/math.md, section 7).

Decays e^{b_i - b_j} of pairs of tokens go over the edges of blocks: at the level of blocks of s tokens, those of the
odd blocks meet those of the even blocks before them. The decay of a pair is that from the edge to i times that from
j to the edge, neither of which grows where gates are not positive. Every pair of tokens meets at one level.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flexsp.kernels.delta.prepare import load_numbers, sum_over, unit_inverse
from flexsp.kernels.primitives import GATE_MIN, LOG2E, chunk_info, load_rows, load_state, mm, store_rows
from flexsp.runtime.launch import begin


@triton.jit
def _load_gates(base, stride_t, length, k0, C: tl.constexpr, K: tl.constexpr, COLS: tl.constexpr, DOT: tl.constexpr):
    """Gates [C, COLS] as two parts in DOT whose sum they are; the second one is 0 where the first is exact."""
    gate = load_rows(base, stride_t, length, k0, C, K, COLS).to(tl.float32)
    gate = tl.maximum(gate, GATE_MIN, propagate_nan=tl.PropagateNan.ALL)
    first = gate.to(DOT)
    return first, (gate - first.to(tl.float32)).to(DOT)


@triton.jit
def _summed(chosen, first, second, EXACT: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr):
    """For each token the sum of the gates of the tokens that are chosen [C, C], in log2."""
    ones = tl.where(chosen, 1.0, 0.0)
    x = mm(ones, first, DOT, PREC)
    if not EXACT:
        x += mm(ones, second, DOT, PREC)
    return x * LOG2E


@triton.jit
def _to_edge(i, shift):
    """[C, C]: the tokens whose gates lie between a token and the edge at which it meets others, by blocks of 2^shift."""
    same = (i[:, None] >> shift) == (i[None, :] >> shift)
    odd = ((i[:, None] >> shift) & 1) == 1
    return same & ((odd & (i[None, :] <= i[:, None])) | (~odd & (i[None, :] > i[:, None])))


@triton.jit
def _meet(i, shift):
    """[C, C]: pairs of a token of an odd block and one of the even block before it."""
    block = i >> shift
    return ((block[:, None] & 1) == 1) & (block[None, :] == block[:, None] - 1)


@triton.jit
def _levels(C: tl.constexpr):
    return 4 if C == 16 else 5 if C == 32 else 6


@triton.jit(do_not_specialize=["T", "H"])
def channel_scores(
    q, k, g, beta, pairs, scores, reads, writes, w, decay, table, q_sb, q_st, q_sh, k_sb, k_st, k_sh, g_sb, g_st, g_sh,
    beta_sb, beta_st, beta_sh, T, H, scale, K: tl.constexpr, COLS: tl.constexpr, C: tl.constexpr,
    PACKED: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of chunks [B H, chunks]: pairs G and scores [.., C, C]; what reads the state that enters, scale q e^b into reads
    and k e^b into w; what writes to the one that leaves, beta k e^{b_C - b}, into writes [.., C, K]; decay e^{b_C}
    [.., K].
    """
    begin(PDL)
    row = tl.program_id(1).to(tl.int64)
    b = row // H
    h = row % H
    start, length, doc, first_chunk, last_chunk = chunk_info(table, tl.program_id(0), T, C, PACKED)
    at = row * tl.num_programs(0) + tl.program_id(0)
    q += b * q_sb + h * q_sh + start * q_st
    k += b * k_sb + h * k_sh + start * k_st
    g += b * g_sb + h * g_sh + start * g_st
    EXACT: tl.constexpr = g.dtype.element_ty == DOT
    LEVELS: tl.constexpr = _levels(C)
    i = tl.arange(0, C)
    strength = load_numbers(beta + b * beta_sb + h * beta_sh + start * beta_st, beta_st, length, C).to(tl.float32)
    of_keys = tl.zeros([C, C], tl.float32)
    of_queries = tl.zeros([C, C], tl.float32)
    own = tl.zeros([C], tl.float32)
    for k0 in tl.static_range(0, K, COLS):
        first, second = _load_gates(g, g_st, length, k0, C, K, COLS, DOT)
        qc = load_rows(q, q_st, length, k0, C, K, COLS)
        kc = load_rows(k, k_st, length, k0, C, K, COLS)
        own += sum_over(qc.to(tl.float32) * kc.to(tl.float32), 1)
        for level in range(LEVELS):
            e = tl.exp2(_summed(_to_edge(i, level), first, second, EXACT, DOT, PREC))
            met = _meet(i, level)
            ke = (kc.to(tl.float32) * e).to(DOT)
            qe = (qc.to(tl.float32) * e).to(DOT)
            of_keys += tl.where(met, mm(ke, tl.trans(ke), DOT, PREC), 0.0)
            of_queries += tl.where(met, mm(qe, tl.trans(ke), DOT, PREC), 0.0)
        e = tl.exp2(_summed(i[:, None] >= i[None, :], first, second, EXACT, DOT, PREC))
        store_rows(reads + at * C * K, qc.to(tl.float32) * e * scale, K, C, k0, C, K, COLS)
        store_rows(w + at * C * K, kc.to(tl.float32) * e, K, C, k0, C, K, COLS)
        left = tl.where((i == C - 1)[:, None], e, 0.0)
        cols = k0 + tl.arange(0, COLS)
        tl.store(decay + at * K + cols, tl.sum(left, axis=0), mask=cols < K)
        e = tl.exp2(_summed(i[:, None] < i[None, :], first, second, EXACT, DOT, PREC))
        store_rows(writes + at * C * K, kc.to(tl.float32) * strength[:, None] * e, K, C, k0, C, K, COLS)
    square = at * C * C + i[:, None] * C + i[None, :]
    of_queries += tl.where(i[:, None] == i[None, :], own[:, None], 0.0)
    tl.store(pairs + square, (of_keys * strength[None, :]).to(pairs.dtype.element_ty))
    tl.store(scores + square, (of_queries * (strength * scale)[None, :]).to(scores.dtype.element_ty))


@triton.jit
def channel_inverse(inverse, C: tl.constexpr, PDL: tl.constexpr):
    """Inverses of I + G in place of G [B H, chunks, C, C]."""
    begin(PDL)
    at = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    i = tl.arange(0, C)
    place = inverse + at * C * C + i[:, None] * C + i[None, :]
    found = unit_inverse(tl.load(place).to(tl.float32), C)
    tl.debug_barrier()
    tl.store(place, found.to(inverse.dtype.element_ty))


@triton.jit(do_not_specialize=["T", "H"])
def channel_values(
    v, inverse, u, w, table, v_sb, v_st, v_sh, T, H, K: tl.constexpr, V: tl.constexpr, COLS: tl.constexpr,
    C: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """U = M^-1 V [B H, chunks, C, V], and W = M^-1 e^b K [B H, chunks, C, K] in place of e^b K."""
    begin(PDL)
    row = tl.program_id(1).to(tl.int64)
    b = row // H
    h = row % H
    start, length, doc, first, last = chunk_info(table, tl.program_id(0), T, C, PACKED)
    at = row * tl.num_programs(0) + tl.program_id(0)
    i = tl.arange(0, C)
    found = tl.load(inverse + at * C * C + i[:, None] * C + i[None, :])
    for k0 in tl.static_range(0, K, COLS):
        kc = load_rows(w + at * C * K, K, C, k0, C, K, COLS)
        wc = mm(found, kc, DOT, PREC)
        tl.debug_barrier()  # all of a tile is read before it is written
        store_rows(w + at * C * K, wc, K, C, k0, C, K, COLS)
    for v0 in tl.static_range(0, V, COLS):
        vc = load_rows(v + b * v_sb + h * v_sh + start * v_st, v_st, length, v0, C, V, COLS)
        store_rows(u + at * C * V, mm(found, vc, DOT, PREC), V, C, v0, C, V, COLS)


@triton.jit(do_not_specialize=["T", "H", "n_chunks"])
def channel_parts(
    do, inverse, errors, derrors, entering, leaving, dv, kept, parts, dwrites, dpairs, table, do_sb, do_st, do_sh,
    T, H, n_chunks, scale, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, COLS: tl.constexpr, C: tl.constexpr,
    ROWS: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dv [B, T, H, V], and what `channel_grads` goes on with: for each chunk ROWS rows of `parts`, gradients of scale
    q e^b and then of k e^b [C, K], of `dwrites`, those of beta k e^{b_C - b} [C, K], and of `dpairs`, those of scores,
    with scale, and then of G [C, C]; and kept [.., K], products of the states around the chunk, summed.

    These may be the memory of entering, leaving and errors, which have V = ROWS rows a chunk then.
    """
    begin(PDL)
    c, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b = row // H
    h = row % H
    start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
    at = row * n_chunks + c
    i = tl.arange(0, C)
    turned = tl.trans(tl.load(inverse + at * C * C + i[:, None] * C + i[None, :]))
    oc = load_rows(do + b * do_sb + h * do_sh + start * do_st, do_st, length, 0, C, V, BV)
    dN = load_state(derrors + at * V * C, 0, 0, True, V, C, BV, C).to(derrors.dtype.element_ty)
    N = load_state(errors + at * V * C, 0, 0, True, V, C, BV, C).to(errors.dtype.element_ty)
    y = mm(turned, tl.trans(dN), DOT, PREC)
    store_rows(dv + ((b * T + start) * H + h) * V, y, H * V, length, 0, C, V, BV)
    y = y.to(DOT)
    square = dpairs + at * ROWS * C + i[:, None] * C + i[None, :]
    of_scores = tl.where(i[:, None] >= i[None, :], mm(oc, N, DOT, PREC) * scale, 0.0)
    of_pairs = tl.where(i[:, None] > i[None, :], -mm(y, N, DOT, PREC), 0.0)
    tl.debug_barrier()  # all of N is read before it is written over
    tl.store(square, of_scores.to(dpairs.dtype.element_ty))
    tl.store(square + C * C, of_pairs.to(dpairs.dtype.element_ty))
    for k0 in tl.static_range(0, K, COLS):
        S = load_state(entering + at * V * K, 0, k0, True, V, K, BV, COLS).to(entering.dtype.element_ty)
        dS = load_state(leaving + at * V * K, 0, k0, True, V, K, BV, COLS).to(leaving.dtype.element_ty)
        cols = k0 + tl.arange(0, COLS)
        both = sum_over(S.to(tl.float32) * dS.to(tl.float32), 0)
        tl.store(kept + at * K + cols, both, mask=cols < K)
        to_reads = mm(oc, S, DOT, PREC)
        to_keys = -mm(y, S, DOT, PREC)
        to_writes = mm(tl.trans(N), dS, DOT, PREC)
        tl.debug_barrier()
        store_rows(parts + at * ROWS * K, to_reads, K, C, k0, C, K, COLS)
        store_rows(parts + at * ROWS * K + C * K, to_keys, K, C, k0, C, K, COLS)
        store_rows(dwrites + at * ROWS * K, to_writes, K, C, k0, C, K, COLS)


@triton.jit
def _exact_sums(chosen, x, DOT: tl.constexpr, PREC: tl.constexpr):
    """For each token the sum of x [C, N] over the tokens that are chosen [C, C], in fp32."""
    ones = tl.where(chosen, 1.0, 0.0)
    first = x.to(DOT)
    found = mm(ones, first, DOT, PREC)
    if DOT == tl.bfloat16:
        rest = x - first.to(tl.float32)
        second = rest.to(DOT)
        found += mm(ones, second, DOT, PREC)
        found += mm(ones, rest - second.to(tl.float32), DOT, PREC)
    return found


@triton.jit(do_not_specialize=["T", "H", "n_chunks"])
def channel_grads(
    q, k, g, beta, kept, parts, dwrites, dpairs, dq, dk, dbeta, dg, table, q_sb, q_st, q_sh, k_sb, k_st, k_sh, g_sb,
    g_st, g_sh, beta_sb, beta_st, beta_sh, T, H, n_chunks, scale, K: tl.constexpr, COLS: tl.constexpr, C: tl.constexpr,
    ROWS: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dq, dk, dg [B, T, H, K] and dbeta [B, T, H], of what `channel_parts` left."""
    begin(PDL)
    c, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b = row // H
    h = row % H
    start, length, doc, first_chunk, last_chunk = chunk_info(table, c, T, C, PACKED)
    at = row * n_chunks + c
    q += b * q_sb + h * q_sh + start * q_st
    k += b * k_sb + h * k_sh + start * k_st
    g += b * g_sb + h * g_sh + start * g_st
    to = ((b * T + start) * H + h) * K
    EXACT: tl.constexpr = g.dtype.element_ty == DOT
    LEVELS: tl.constexpr = _levels(C)
    i = tl.arange(0, C)
    strength = load_numbers(beta + b * beta_sb + h * beta_sh + start * beta_st, beta_st, length, C).to(tl.float32)
    square = dpairs + at * ROWS * C + i[:, None] * C + i[None, :]
    of_scores = tl.load(square)
    of_pairs = tl.load(square + C * C)
    own = tl.sum(tl.where(i[:, None] == i[None, :], of_scores.to(tl.float32), 0.0), axis=1)
    written = tl.zeros([C], tl.float32)
    for k0 in tl.static_range(0, K, COLS):
        first, second = _load_gates(g, g_st, length, k0, C, K, COLS, DOT)
        qc = load_rows(q, q_st, length, k0, C, K, COLS)
        kc = load_rows(k, k_st, length, k0, C, K, COLS)
        to_q = tl.zeros([C, COLS], tl.float32)
        to_k = tl.zeros([C, COLS], tl.float32)
        to_p = tl.zeros([C, COLS], tl.float32)
        sums = tl.zeros([C, COLS], tl.float32)
        for level in range(LEVELS):
            e = tl.exp2(_summed(_to_edge(i, level), first, second, EXACT, DOT, PREC))
            met = _meet(i, level)
            odd = (((i >> level) & 1) == 1)[:, None]
            qe = (qc.to(tl.float32) * e).to(DOT)  # rounded once: what pairs of tokens add to dg cancels in its sums
            ke = (kc.to(tl.float32) * e).to(DOT)
            pe = (kc.to(tl.float32) * strength[:, None] * e).to(DOT)
            chosen = tl.where(met, of_scores, 0.0).to(DOT)
            x = mm(chosen, pe, DOT, PREC) + mm(tl.trans(chosen), qe, DOT, PREC)
            chosen = tl.where(met, of_pairs, 0.0).to(DOT)
            y = mm(chosen, pe, DOT, PREC) + mm(tl.trans(chosen), ke, DOT, PREC)
            read = qe.to(tl.float32) * x + ke.to(tl.float32) * y
            sums += tl.where(odd, read, -pe.to(tl.float32) * (x + y))
            to_q += tl.where(odd, e * x, 0.0)
            to_k += tl.where(odd, e * y, 0.0)
            to_p += tl.where(odd, 0.0, e * (x + y))
        queries = qc.to(tl.float32)
        keys = kc.to(tl.float32)
        e = tl.exp2(_summed(i[:, None] >= i[None, :], first, second, EXACT, DOT, PREC))
        part = load_rows(parts + at * ROWS * K, K, C, k0, C, K, COLS).to(tl.float32) * e * scale
        sums += queries * part
        to_q += part + own[:, None] * keys * strength[:, None]
        store_rows(dq + to, to_q, H * K, length, k0, C, K, COLS)
        part = load_rows(parts + at * ROWS * K + C * K, K, C, k0, C, K, COLS).to(tl.float32) * e
        sums += keys * part
        to_k += part
        cols = k0 + tl.arange(0, COLS)
        end = tl.sum(tl.where((i == C - 1)[:, None], e, 0.0), axis=0)
        through = tl.load(kept + at * K + cols, mask=cols < K, other=0.0) * end
        e = tl.exp2(_summed(i[:, None] < i[None, :], first, second, EXACT, DOT, PREC))
        part = load_rows(dwrites + at * ROWS * K, K, C, k0, C, K, COLS).to(tl.float32) * e
        to_g = _exact_sums(i[:, None] > i[None, :], keys * strength[:, None] * part, DOT, PREC) + through[None, :]
        to_g += _exact_sums(i[:, None] <= i[None, :], sums, DOT, PREC)
        gate = load_rows(g, g_st, length, k0, C, K, COLS).to(tl.float32)
        store_rows(dg + to, tl.where(gate < GATE_MIN, 0.0, to_g), H * K, length, k0, C, K, COLS)
        to_p += part + own[:, None] * queries
        written += sum_over(to_p * keys, 1)
        store_rows(dk + to, to_k + to_p * strength[:, None], H * K, length, k0, C, K, COLS)
    at_token = (b * T + start + i) * H + h
    tl.store(dbeta + at_token, written.to(dbeta.dtype.element_ty), mask=i < length)
