"""Scores of queries and keys of a chunk on Hopper GPUs, for walks that wait for nothing else than states."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from flexsp.kernels.delta.hopper import arrived, begin, begun, by_sum, chunk_at, copy, copy_tokens, store, tiles

__all__ = ["scores"]


@gluon.jit(do_not_specialize=["T", "H"])
def scores(
    q, k, strength, gates, made, table, q_sb, q_st, q_sh, k_sb, k_st, k_sh, T, H, scale,
    K: gl.constexpr, C: gl.constexpr, GATED: gl.constexpr, PACKED: gl.constexpr, GROUP: gl.constexpr,
    STEPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """scale q_i . k_j e^{b_i - b_j} beta_j of queries and keys not after them, into made [B H, chunks, C, C]."""
    begin(PDL)
    c, row = gl.program_id(0), gl.program_id(1).to(gl.int64)
    start, length, doc, first, last = chunk_at(table, c, T, C, PACKED)
    at = row * gl.num_programs(0) + c
    qs, ks = tiles(1, C, K).index(0), tiles(1, C, K).index(0)
    copy_tokens(qs, q + row // H * q_sb + row % H // GROUP * q_sh, start, length, C, K, q_st, STEPS)
    copy(ks, k + row // H * k_sb + row % H // GROUP * k_sh + start * k_st, length, C, K, k_st)
    async_copy.commit_group()
    i = gl.arange(0, C, gl.SliceLayout(1, by_sum(C)))
    j = gl.arange(0, C, gl.SliceLayout(0, by_sum(C)))
    until = i[:, None] >= j[None, :]
    factor = (gl.load(strength + at * C + j) * scale)[None, :]
    if GATED:
        gap = gl.load(gates + at * C + i)[:, None] - gl.load(gates + at * C + j)[None, :]
        factor = factor * gl.exp2(gl.where(until, gap, float("-inf")))
    arrived(0)
    found = warpgroup_mma_wait(0, [begun(qs, ks.permute((1, 0)), C)]) * factor
    store(made + at * C * C, gl.where(until, found, 0.0), C, C, C, C)
