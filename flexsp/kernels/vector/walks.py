"""The walks of vector states: what segments add to the state, the outputs, and the same for the backward pass.

A program is one warp and walks the chunks of a segment, with the states [BD] of some channels in registers. All rows of
a chunk are loaded before its first token is computed. Places of a chunk without a token have a gate of 0 and all else
0: a state passes them. Log gates are natural logarithms.

What a token adds to the state, and its log gate, are x and g. GATED: they are made of x, of g before its sigmoid and of
another gate, e, for which `rg_lru` has the formulas; they never go to memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flexsp.kernels.primitives import LOG2E, chunk_info
from flexsp.kernels.vector.rg_lru import gates_of, made_of, starts_of, through_gate, token_of
from flexsp.runtime.launch import begin


@triton.jit
def place(d0, D: tl.constexpr, P: tl.constexpr, BD: tl.constexpr):
    """Channels, whether they are there, and their heads and places in these."""
    d = d0 + tl.arange(0, BD)
    return d, d < D, (d // P).to(tl.int64), d % P


@triton.jit
def rows_of(base, start, length, st, at, valid, C: tl.constexpr):
    """fp32 [BD] of every place of a chunk, 0 where there is no token."""
    rows: tl.tuple = ()
    for i in tl.static_range(C):
        row = tl.load(base + (start + i) * st + at, mask=valid & (i < length), other=0.0)
        rows = rows + (row.to(tl.float32),)  # noqa: RUF005 (Triton knows no unpacking)
    return rows


@triton.jit
def decay_of(g):
    """e^g; 0 for gates below -104, whose gradients are then 0 too."""
    return tl.exp2(g * LOG2E)


@triton.jit
def rate_of(rate, d, valid, BD: tl.constexpr, GATED: tl.constexpr):
    """The rates [BD] of channels, where there are some."""
    found = tl.zeros([BD], tl.float32)
    if GATED:
        found = tl.load(rate + d, mask=valid, other=0.0)
    return found


@triton.jit
def begun(h, starts, given, doc, d, valid, D: tl.constexpr, GIVEN: tl.constexpr):
    """The state h [BD]; where a document starts, its own of `given` [n_docs, D] or zeros."""
    if starts:
        h = tl.zeros(h.shape, tl.float32)
        if GIVEN:
            h = tl.load(given + doc.to(tl.int64) * D + d, mask=valid, other=0.0)
    return h


# Kernels --------------------------------------------------------------------------------------------------------------


@triton.jit
def summarize_kernel(
    x, g, e, rate, unit, states, decay, cut, initial, table,
    x_sb, x_st, x_sh, g_sb, g_st, g_sh, e_sb, e_st, e_sh, T, n_seg, n_chunks, per_seg,
    D: tl.constexpr, P: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, GATED: tl.constexpr, UNIT: tl.constexpr,
    PACKED: tl.constexpr, INITIAL: tl.constexpr, ZERO: tl.constexpr, ONWARD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """states [batch, n_seg + 1, D]: what segment s adds in slot s + 1; its log decay in decay [batch, n_seg, D].

    ZERO: nothing enters the rank, so slot 0 becomes 0. Unless ONWARD nobody reads what the last segment leaves: it is
    not walked. initial [n_docs, D]: states before packed documents.
    """
    begin(PDL)
    d, valid, head, p = place(tl.program_id(0) * BD, D, P, BD)
    b = tl.program_id(1).to(tl.int64)
    seg = tl.program_id(2)
    per_channel = rate_of(rate, d, valid, BD, GATED)
    h = tl.zeros([BD], tl.float32)
    total = tl.zeros([BD], tl.float32)
    cuts = 0
    until = tl.minimum(seg * per_seg + per_seg, n_chunks)
    if not ONWARD:
        until = tl.where(seg == n_seg - 1, 0, until)
    for c in range(seg * per_seg, until):
        start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
        if PACKED:
            cuts = cuts | first.to(tl.int32)
            h = begun(h, first, initial, doc, d, valid, D, INITIAL)
            total = tl.where(first, 0.0, total)
        xs = rows_of(x + b * x_sb, start, length, x_st, head * x_sh + p, valid, C)
        gs = rows_of(g + b * g_sb, start, length, g_st, head * g_sh + p, valid, C)
        if GATED:
            es = rows_of(e + b * e_sb, start, length, e_st, head * e_sh + p, valid, C)
            starts = starts_of(unit, c, b, doc, first, PACKED, UNIT)
            xs, gs = made_of(xs, gs, es, per_channel, starts, length, C, UNIT)
        for i in tl.static_range(C):
            h = decay_of(gs[i]) * h + xs[i]
            total += gs[i]
    to = states + (b * (n_seg + 1) + seg + 1) * D + d
    tl.store(to, h, mask=valid)
    if ZERO:
        tl.store(to - D, tl.zeros([BD], tl.float32), mask=valid & (seg == 0))
    tl.store(decay + (b * n_seg + seg) * D + d, total, mask=valid)
    if PACKED:
        tl.store(cut + seg, cuts, mask=tl.program_id(0) == 0)  # of packed documents there is one sequence


@triton.jit
def output_kernel(
    x, g, e, rate, unit, o, states, chunks, initial, final, table,
    x_sb, x_st, x_sh, g_sb, g_st, g_sh, e_sb, e_st, e_sh, T, n_seg, n_chunks, per_seg,
    D: tl.constexpr, P: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, GATED: tl.constexpr, UNIT: tl.constexpr,
    PACKED: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """o [batch, T, D] = h; chunks [batch, n_chunks, D], the states that enter the chunks; and the final states of
    packed documents."""
    begin(PDL)
    d, valid, head, p = place(tl.program_id(0) * BD, D, P, BD)
    b = tl.program_id(1).to(tl.int64)
    seg = tl.program_id(2)
    per_channel = rate_of(rate, d, valid, BD, GATED)
    h = tl.load(states + (b * (n_seg + 1) + seg) * D + d, mask=valid, other=0.0)
    for c in range(seg * per_seg, tl.minimum(seg * per_seg + per_seg, n_chunks)):
        start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
        at_doc = doc.to(tl.int64) * D if PACKED else 0
        if PACKED:
            h = begun(h, first, initial, doc, d, valid, D, INITIAL)
        xs = rows_of(x + b * x_sb, start, length, x_st, head * x_sh + p, valid, C)
        gs = rows_of(g + b * g_sb, start, length, g_st, head * g_sh + p, valid, C)
        if GATED:
            es = rows_of(e + b * e_sb, start, length, e_st, head * e_sh + p, valid, C)
            starts = starts_of(unit, c, b, doc, first, PACKED, UNIT)
            xs, gs = made_of(xs, gs, es, per_channel, starts, length, C, UNIT)
        tl.store(chunks + (b * n_chunks + c) * D + d, h, mask=valid)
        to = o + (b * T + start) * D + d
        for i in tl.static_range(C):
            h = decay_of(gs[i]) * h + xs[i]
            tl.store(to + i * D, h.to(o.dtype.element_ty), mask=valid & (i < length))
        if PACKED and FINAL:  # noqa: SIM102 (a constexpr, then a value)
            if last:
                tl.store(final + at_doc + d, h, mask=valid)


@triton.jit
def summarize_backward_kernel(
    g, rate, do, dstates, dfinal, table,
    g_sb, g_st, g_sh, o_sb, o_st, o_sh, T, n_seg, n_chunks, per_seg,
    D: tl.constexpr, P: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr,
    FINAL: tl.constexpr, ZERO: tl.constexpr, ONWARD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dstates [batch, n_seg + 1, D]: what segment s adds, from right to left, to the gradient of the state before it in
    slot s. ZERO: nothing enters, so slot n_seg becomes 0. Unless ONWARD nobody reads what the first segment leaves: it
    is not walked. dfinal: of packed documents."""
    begin(PDL)
    d, valid, head, p = place(tl.program_id(0) * BD, D, P, BD)
    b = tl.program_id(1).to(tl.int64)
    seg = tl.program_id(2)
    per_channel = rate_of(rate, d, valid, BD, GATED)
    dh = tl.zeros([BD], tl.float32)
    chunk = seg * per_seg
    until = tl.minimum(chunk + per_seg, n_chunks)
    if not ONWARD:
        until = tl.where(seg == 0, chunk, until)
    for j in range(0, until - chunk):
        start, length, doc, first, last = chunk_info(table, until - 1 - j, T, C, PACKED)
        if PACKED:
            dh = begun(dh, last, dfinal, doc, d, valid, D, FINAL)
        gs = rows_of(g + b * g_sb, start, length, g_st, head * g_sh + p, valid, C)
        if GATED:
            gs = gates_of(gs, per_channel, length, C)
        dos = rows_of(do + b * o_sb, start, length, o_st, head * o_sh + p, valid, C)
        for i in tl.static_range(C):
            dh = decay_of(gs[C - 1 - i]) * (dh + dos[C - 1 - i])
        if PACKED:
            dh = tl.where(first, 0.0, dh)  # nothing flows back past a document's start
    to = dstates + (b * (n_seg + 1) + seg) * D + d
    tl.store(to, dh, mask=valid)
    if ZERO:
        tl.store(to + D, tl.zeros([BD], tl.float32), mask=valid & (seg == n_seg - 1))


@triton.jit
def grads_kernel(
    x, g, e, rate, unit, do, chunks, dstates, dfinal, dinitial, dx, dg, de, drate, table,
    x_sb, x_st, x_sh, g_sb, g_st, g_sh, e_sb, e_st, e_sh, o_sb, o_st, o_sh, T, n_seg, n_chunks, per_seg,
    D: tl.constexpr, P: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, GATED: tl.constexpr, UNIT: tl.constexpr,
    PACKED: tl.constexpr, FINAL: tl.constexpr, INITIAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dx, dg and de [batch, T, D], from right to left; drate of each segment; and the gradients of initial states of
    packed documents."""
    begin(PDL)
    d, valid, head, p = place(tl.program_id(0) * BD, D, P, BD)
    b = tl.program_id(1).to(tl.int64)
    seg = tl.program_id(2)
    per_channel = rate_of(rate, d, valid, BD, GATED)
    dh = tl.load(dstates + (b * (n_seg + 1) + seg + 1) * D + d, mask=valid, other=0.0)
    of_segment = tl.zeros([BD], tl.float32)
    chunk = seg * per_seg
    until = tl.minimum(chunk + per_seg, n_chunks)
    for j in range(0, until - chunk):
        c = until - 1 - j
        start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)
        at_doc = doc.to(tl.int64) * D if PACKED else 0
        if PACKED:
            dh = begun(dh, last, dfinal, doc, d, valid, D, FINAL)
        h = tl.load(chunks + (b * n_chunks + c) * D + d, mask=valid, other=0.0)
        xs = rows_of(x + b * x_sb, start, length, x_st, head * x_sh + p, valid, C)
        gs = rows_of(g + b * g_sb, start, length, g_st, head * g_sh + p, valid, C)
        if GATED:
            es = rows_of(e + b * e_sb, start, length, e_st, head * e_sh + p, valid, C)
            starts = starts_of(unit, c, b, doc, first, PACKED, UNIT)
        dos = rows_of(do + b * o_sb, start, length, o_st, head * o_sh + p, valid, C)
        slopes: tl.tuple = ()
        for i in tl.static_range(C):
            if GATED:
                gate, opened, w, to_e, to_g = token_of(
                    xs[i], gs[i], es[i], per_channel, i < length, starts, UNIT and i == 0
                )
                kept = decay_of(gate) * h
                h = kept + w * xs[i]
                slopes = slopes + ((gate, kept + to_g, opened, w, to_e),)  # noqa: RUF005
            else:
                kept = decay_of(gs[i]) * h
                h = kept + xs[i]
                slopes = slopes + ((gs[i], kept),)  # noqa: RUF005
        to_tokens = (b * T + start) * D + d
        of_chunk = tl.zeros([BD], tl.float32)  # sums of sums keep more digits
        for i in tl.static_range(C - 1, -1, -1):
            there = valid & (i < length)
            back = dh + dos[i]
            to_x = back
            to_gate = back * slopes[i][1]
            if GATED:
                to_x = back * slopes[i][3]
                to_gate, to_rate = through_gate(to_gate, slopes[i][0], slopes[i][2], i < length)
                of_chunk += to_rate
                tl.store(de + to_tokens + i * D, (back * slopes[i][4]).to(de.dtype.element_ty), mask=there)
            tl.store(dx + to_tokens + i * D, to_x.to(dx.dtype.element_ty), mask=there)
            tl.store(dg + to_tokens + i * D, to_gate.to(dg.dtype.element_ty), mask=there)
            dh = decay_of(slopes[i][0]) * back
        of_segment += of_chunk
        if PACKED and INITIAL:
            tl.store(dinitial + at_doc + d, dh, mask=valid & first)
    if GATED:
        tl.store(drate + ((b * (D // P) + head) * n_seg + seg) * P + p, of_segment, mask=valid)
