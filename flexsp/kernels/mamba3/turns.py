"""Running sums of the turns 0.5 tanh(angles) dt, within documents and without whole turns; and their gradients.

Tokens are cut into segments. One kernel adds up each segment, one these sums, and one walks the segments again from
what enters them. A program has a tile [BH, BS] of heads and angles, and adds up in float64: sums of long texts are as
precise as those of short ones. The gradients go the same way from right to left. A document's first token starts a sum
anew, so that what is not finite stays in its document.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flexsp.runtime.launch import begin

_NEAR_ZERO = tl.constexpr(0.9)
# (tanh(x) - x) / x^3 in x^2 up to 0.9: least squares in Chebyshev's points, off by 1.2e-9 of tanh(x).
_T1 = tl.constexpr(-0.3333332226088465)
_T2 = tl.constexpr(0.13332979718449875)
_T3 = tl.constexpr(-0.05392948237080621)
_T4 = tl.constexpr(0.021664352626083336)
_T5 = tl.constexpr(-0.008266231238494551)
_T6 = tl.constexpr(0.002584329105417699)
_T7 = tl.constexpr(-0.00045608545492759343)
_SIZES = ["T", "n_seg", "per_seg"]


@triton.jit
def tanh_of(x):
    """tanh in fp32, to a rounding or two, near 0 too."""
    z = x * x
    series = z * (_T1 + z * (_T2 + z * (_T3 + z * (_T4 + z * (_T5 + z * (_T6 + z * _T7))))))
    size = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(x)) + 1.0)
    return tl.where(tl.abs(x) < _NEAR_ZERO, x + x * series, tl.where(x < 0, -size, size))


@triton.jit
def _place(n_seg, H: tl.constexpr, S: tl.constexpr, BH: tl.constexpr, BS: tl.constexpr):
    """(sequence, segment in the order of the walk, heads [BH], angles [BS], whether both are there [BH, BS])."""
    BLOCKS: tl.constexpr = (H + BH - 1) // BH
    program = tl.program_id(0)
    h = (program % BLOCKS) * BH + tl.arange(0, BH)
    s = tl.arange(0, BS).to(tl.int64)
    at = program // BLOCKS
    return (at // n_seg).to(tl.int64), at % n_seg, h.to(tl.int64), s, (h < H)[:, None] & (s < S)[None, :]


@triton.jit
def _angles(angles, h, s, a_sh, a_ss, valid, S: tl.constexpr, SHARED: tl.constexpr):
    """(places of a token's angles, whether they are there): a tile [BH, BS], or [1, BS] that all heads share."""
    if SHARED:
        at, given = angles + s[None, :] * a_ss, (s < S)[None, :]
    else:
        at, given = angles + h[:, None] * a_sh + s[None, :] * a_ss, valid
    return at, given


@triton.jit
def _token(t, T, resets, PACKED: tl.constexpr):
    """Whether token t is there, and the document that begins with it, -1 for none."""
    there = (t >= 0) & (t < T)
    document = -1
    if PACKED:
        document = tl.load(resets + t, mask=there, other=-1)
    return there, document


@triton.jit
def _started(total, document, initial, channel, valid, W: tl.constexpr, INITIAL: tl.constexpr):
    """The sum before a token: where a document begins with it, what its sums begin with."""
    start = tl.zeros(total.shape, tl.float64)
    if INITIAL:
        at = initial + document.to(tl.int64) * W + channel
        start = tl.load(at, mask=valid & (document >= 0), other=0.0).to(tl.float64)
    return tl.where(document >= 0, start, total)


# Kernels --------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=_SIZES)
def turn_sums_kernel(
    angles, dt, resets, initial, sums, cuts, a_sb, a_st, a_sh, a_ss, d_sb, d_st, d_sh, T, n_seg, per_seg,
    H: tl.constexpr, S: tl.constexpr, BH: tl.constexpr, BS: tl.constexpr, STEP: tl.constexpr, PACKED: tl.constexpr,
    INITIAL: tl.constexpr, SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """sums [batch, n_seg, H, S], fp64: the turns of each segment, since the last document that begins there; and
    whether one does, cuts [batch, n_seg].

    resets [T]: the document that begins with a token, or -1. initial [documents, H, S], with PACKED: what their sums
    begin with.
    """
    begin(PDL)
    b, seg, h, s, valid = _place(n_seg, H, S, BH, BS)
    angles, given = _angles(angles + b * a_sb, h, s, a_sh, a_ss, valid, S, SHARED)
    dt += b * d_sb + h * d_sh
    channel = h[:, None] * S + s[None, :]
    total = tl.zeros([BH, BS], tl.float64)
    cut = 0
    first = seg.to(tl.int64) * per_seg
    for i in range(0, per_seg, STEP):
        rows: tl.tuple = ()
        steps: tl.tuple = ()
        documents: tl.tuple = ()
        for j in tl.static_range(STEP):
            there, document = _token(first + i + j, T, resets, PACKED)
            rows = rows + (tl.load(angles + (first + i + j) * a_st, mask=given & there, other=0.0),)  # noqa: RUF005
            steps = steps + (tl.load(dt + (first + i + j) * d_st, mask=(h < H) & there, other=0.0),)  # noqa: RUF005
            documents = documents + (document,)  # noqa: RUF005
        for j in tl.static_range(STEP):
            if PACKED:
                total = _started(total, documents[j], initial, channel, valid, H * S, INITIAL)
                cut = cut | (documents[j] >= 0).to(tl.int32)
            total += 0.5 * tanh_of(rows[j].to(tl.float32)).to(tl.float64) * steps[j].to(tl.float64)[:, None]
    row = b * n_seg + seg
    tl.store(sums + row * (H * S) + channel, total, mask=valid)
    if PACKED:
        tl.store(cuts + row + 0 * h, cut + tl.zeros([BH], tl.int32), mask=h == 0)


@triton.jit(do_not_specialize=["n_seg"])
def turn_scan_kernel(
    sums, cuts, initial, enters, n_seg, W: tl.constexpr, BW: tl.constexpr, STEP: tl.constexpr, PACKED: tl.constexpr,
    INITIAL: tl.constexpr, REVERSE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """enters [batch, n_seg, W], fp64: what enters each segment, from the left, or from the right with REVERSE, of what
    each adds, sums; initial [batch, W] enters the first one."""
    begin(PDL)
    b = tl.program_id(1).to(tl.int64)
    w = tl.program_id(0) * BW + tl.arange(0, BW)
    valid = w < W
    total = tl.zeros([BW], tl.float64)
    if INITIAL:
        total = tl.load(initial + b * W + w, mask=valid, other=0.0).to(tl.float64)
    for i in range(0, n_seg, STEP):
        rows: tl.tuple = ()
        closed: tl.tuple = ()
        for j in tl.static_range(STEP):
            at = b * n_seg + ((n_seg - 1 - i - j) if REVERSE else (i + j))
            rows = rows + (tl.load(sums + at * W + w, mask=valid & (i + j < n_seg), other=0.0),)  # noqa: RUF005
            cut = 0
            if PACKED:
                cut = tl.load(cuts + at, mask=i + j < n_seg, other=0)
            closed = closed + (cut,)  # noqa: RUF005
        for j in tl.static_range(STEP):
            at = b * n_seg + ((n_seg - 1 - i - j) if REVERSE else (i + j))
            tl.store(enters + at * W + w, total, mask=valid & (i + j < n_seg))
            if PACKED:
                total = tl.where(closed[j] != 0, 0.0, total)
            total += rows[j]


@triton.jit(do_not_specialize=_SIZES)
def turns_kernel(
    angles, dt, resets, initial, enters, turns, last, a_sb, a_st, a_sh, a_ss, d_sb, d_st, d_sh, T, n_seg,
    per_seg, H: tl.constexpr, S: tl.constexpr, BH: tl.constexpr, BS: tl.constexpr, STEP: tl.constexpr,
    PACKED: tl.constexpr, INITIAL: tl.constexpr, SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """turns [batch, T, H, S], fp32: the running sums in -1/2..1/2, and those of the last tokens in last [batch, H, S].
    resets and initial: as in `turn_sums_kernel`."""
    begin(PDL)
    b, seg, h, s, valid = _place(n_seg, H, S, BH, BS)
    angles, given = _angles(angles + b * a_sb, h, s, a_sh, a_ss, valid, S, SHARED)
    dt += b * d_sb + h * d_sh
    channel = h[:, None] * S + s[None, :]
    total = tl.load(enters + (b * n_seg + seg) * (H * S) + channel, mask=valid, other=0.0)
    first = seg.to(tl.int64) * per_seg
    for i in range(0, per_seg, STEP):
        rows: tl.tuple = ()
        steps: tl.tuple = ()
        documents: tl.tuple = ()
        for j in tl.static_range(STEP):
            there, document = _token(first + i + j, T, resets, PACKED)
            rows = rows + (tl.load(angles + (first + i + j) * a_st, mask=given & there, other=0.0),)  # noqa: RUF005
            steps = steps + (tl.load(dt + (first + i + j) * d_st, mask=(h < H) & there, other=0.0),)  # noqa: RUF005
            documents = documents + (document,)  # noqa: RUF005
        for j in tl.static_range(STEP):
            if PACKED:
                total = _started(total, documents[j], initial, channel, valid, H * S, INITIAL)
            total += 0.5 * tanh_of(rows[j].to(tl.float32)).to(tl.float64) * steps[j].to(tl.float64)[:, None]
            found = (total - tl.floor(total + 0.5)).to(tl.float32)
            t = first + i + j
            tl.store(turns + (b * T + t) * (H * S) + channel, found, mask=valid & (t < T))
            tl.store(last + b * (H * S) + channel, found, mask=valid & (t == T - 1))


@triton.jit(do_not_specialize=_SIZES)
def turn_grad_sums_kernel(
    dturns, resets, sums, cuts, T, n_seg, per_seg, H: tl.constexpr, S: tl.constexpr, BH: tl.constexpr,
    BS: tl.constexpr, STEP: tl.constexpr, PACKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """sums [batch, n_seg, H, S], fp64: the gradients of a segment's sums, up to the first document that begins there;
    and whether one does, cuts."""
    begin(PDL)
    b, seg, h, s, valid = _place(n_seg, H, S, BH, BS)
    channel = h[:, None] * S + s[None, :]
    total = tl.zeros([BH, BS], tl.float64)
    cut = 0
    end = seg.to(tl.int64) * per_seg + per_seg - 1
    for i in range(0, per_seg, STEP):
        rows: tl.tuple = ()
        documents: tl.tuple = ()
        for j in tl.static_range(STEP):
            there, document = _token(end - i - j, T, resets, PACKED)
            at = dturns + (b * T + end - i - j) * (H * S) + channel
            rows = rows + (tl.load(at, mask=valid & there, other=0.0),)  # noqa: RUF005
            documents = documents + (document,)  # noqa: RUF005
        for j in tl.static_range(STEP):
            total += rows[j]
            if PACKED:
                total = tl.where(documents[j] >= 0, 0.0, total)
                cut = cut | (documents[j] >= 0).to(tl.int32)
    row = b * n_seg + seg
    tl.store(sums + row * (H * S) + channel, total, mask=valid)
    if PACKED:
        tl.store(cuts + row + 0 * h, cut + tl.zeros([BH], tl.int32), mask=h == 0)


@triton.jit(do_not_specialize=_SIZES)
def turns_grad_kernel(
    angles, dt, resets, enters, dturns, dangles, ddt, dinitial, a_sb, a_st, a_sh, a_ss, d_sb, d_st, d_sh, T,
    n_seg, per_seg, H: tl.constexpr, S: tl.constexpr, BH: tl.constexpr, BS: tl.constexpr, STEP: tl.constexpr,
    PACKED: tl.constexpr, INITIAL: tl.constexpr, SHARED: tl.constexpr, ADDED: tl.constexpr, SUMMED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """dangles [batch, T, H, S], ddt [batch, T, H] in fp32, and what sums began with, dinitial [batch, H, S], or with
    PACKED of the documents that begin here. ADDED: dangles [batch, T, blocks, S] are sums over each block of heads.

    SUMMED: dturns are sums over the tokens behind already, and `enters` is not read."""
    begin(PDL)
    b, seg, h, s, valid = _place(n_seg, H, S, BH, BS)
    angles, given = _angles(angles + b * a_sb, h, s, a_sh, a_ss, valid, S, SHARED)
    dt += b * d_sb + h * d_sh
    channel = h[:, None] * S + s[None, :]
    total = tl.zeros([BH, BS], tl.float64)
    if not SUMMED:
        total = tl.load(enters + (b * n_seg + seg) * (H * S) + channel, mask=valid, other=0.0)
    end = seg.to(tl.int64) * per_seg + per_seg - 1
    for i in range(0, per_seg, STEP):
        grads: tl.tuple = ()
        rows: tl.tuple = ()
        steps: tl.tuple = ()
        documents: tl.tuple = ()
        for j in tl.static_range(STEP):
            t = end - i - j
            there, document = _token(t, T, resets, PACKED)
            at = dturns + (b * T + t) * (H * S) + channel
            grads = grads + (tl.load(at, mask=valid & there, other=0.0),)  # noqa: RUF005
            rows = rows + (tl.load(angles + t * a_st, mask=given & there, other=0.0),)  # noqa: RUF005
            steps = steps + (tl.load(dt + t * d_st, mask=(h < H) & there, other=0.0),)  # noqa: RUF005
            documents = documents + (document,)  # noqa: RUF005
        for j in tl.static_range(STEP):
            t = end - i - j
            total = grads[j].to(tl.float64) if SUMMED else total + grads[j]
            back = 0.5 * total.to(tl.float32)
            slope = tanh_of(rows[j].to(tl.float32))
            found = back * (1.0 - slope * slope) * steps[j].to(tl.float32)[:, None]
            # Whatever the sizes, these sums have a condition: so all lanes round products before they add.
            if ADDED:
                found = tl.sum(tl.where(valid & (t < T), found, 0.0), axis=0)
                block = tl.program_id(0) % ((H + BH - 1) // BH)
                at = dangles + ((b * T + t) * ((H + BH - 1) // BH) + block) * S + s
                tl.store(at, found.to(dangles.dtype.element_ty), mask=(s < S) & (t < T))
            else:
                found = found.to(dangles.dtype.element_ty)
                tl.store(dangles + (b * T + t) * (H * S) + channel, found, mask=valid & (t < T))
            of_step = tl.sum(tl.where(valid & (t < T), back * slope, 0.0), axis=1)
            tl.store(ddt + (b * T + t) * H + h, of_step, mask=(h < H) & (t < T))
            if PACKED:
                if INITIAL:
                    at = dinitial + documents[j].to(tl.int64) * (H * S) + channel
                    tl.store(at, total.to(tl.float32), mask=valid & (documents[j] >= 0))
                total = tl.where(documents[j] >= 0, 0.0, total)
    if INITIAL and not PACKED:
        tl.store(dinitial + b * (H * S) + channel, total.to(tl.float32), mask=valid & (seg == 0))
