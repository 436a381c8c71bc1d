"""Ops with a gate for each channel, and their token loops."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.functional import logsigmoid, normalize

from flexsp import ops
from flexsp.testing.compare import WIDE
from flexsp.testing.oracles import token_loop

KEPT_WIDE = (*WIDE, "w", "u", "Lambda")
CHUNK = 64
Tensors = dict[str, torch.Tensor]


def accumulated(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def matrix_tokens(q: Any, k: Any, v: Any, g: Any, S: Any, bonus: Any) -> Any:
    """S_t = diag(e^{g_t}) S_{t-1} + k_t v_t^T and q_t S_t, or with a bonus q_t (S_{t-1} + diag(bonus) k_t v_t^T)."""
    o = []
    for t in range(q.shape[1]):
        new = torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        after = g[:, t].exp()[..., None] * S + new
        read = after if bonus is None else S + bonus[..., None] * new
        o.append(torch.einsum("bhk,bhkv->bhv", q[:, t], read))
        S = after
    return (torch.stack(o, 1) if o else v), S


def matrix_chunks(
    q: Any, k: Any, v: Any, g: Any, S: Any, bonus: Any, size: int = CHUNK, stored: Any = lambda sums: sums
) -> Any:
    """The same from whole chunks, with a running sum of the gates in each: what sound chunks round. `stored`: what is
    left of such sums in memory."""
    o = [v[:, :0]]
    for at in range(0, q.shape[1], size):
        q_c, k_c, v_c, g_c = (x[:, at : at + size] for x in (q, k, v, g))
        g_c = g_c.clamp(min=-104)
        b = stored(g_c.cumsum(1))
        total = b[:, -1]
        reads = b if bonus is None else b - g_c
        earlier = torch.ones(b.shape[1], b.shape[1]).tril(0 if bonus is None else -1).bool()[None, :, :, None, None]
        pairs = torch.where(earlier, reads[:, :, None] - b[:, None], -torch.inf).exp()
        scores = torch.einsum("bihk,bjhk,bijhk->bijh", q_c, k_c, pairs)
        if bonus is not None:
            scores = scores + torch.diag_embed((q_c * bonus * k_c).sum(-1).transpose(1, 2)).permute(0, 2, 3, 1)
        read = torch.einsum("bihk,bhkv->bihv", q_c * reads.exp(), S)
        o.append(torch.einsum("bijh,bjhv->bihv", scores, v_c) + read)
        written = torch.einsum("bjhk,bjhv->bhkv", k_c * (total[:, None] - b).exp(), v_c)
        S = total.exp()[..., None] * S + written
    return torch.cat(o, 1), S


def float32_sums(*given: Any) -> Any:
    """`matrix_chunks` in float64 but for the running sums of gates, which are in float32, of as many tokens as chunks
    of kernels in float32 have: the engine of a yardstick for gradients of strong gates, of which such sums lose digits.
    """
    return matrix_chunks(*given, 16, lambda sums: sums + (sums.float().double() - sums).detach())


def vector_tokens(x: Any, g: Any, h: Any) -> Any:
    o = []
    for t in range(x.shape[1]):
        h = g[:, t].exp() * h + x[:, t]
        o.append(h)
    return (torch.stack(o, 1) if o else x), h


def low_rank_tokens(r: Any, w: Any, k: Any, v: Any, a: Any, b: Any, S: Any) -> Any:
    """S_t = diag(e^{w_t}) S_{t-1} + b_t (a_t S_{t-1}) + k_t v_t^T and r_t S_t."""
    o = []
    for t in range(r.shape[1]):
        removed = torch.einsum("bhk,bhkv->bhv", a[:, t], S)
        S = w[:, t].exp()[..., None] * S + torch.einsum("bhk,bhv->bhkv", b[:, t], removed)
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        o.append(torch.einsum("bhk,bhkv->bhv", r[:, t], S))
    return (torch.stack(o, 1) if o else v), S


def low_rank_chunks(r: Any, w: Any, k: Any, v: Any, a: Any, b: Any, S: Any) -> Any:
    """The same from whole chunks: what sound chunks round."""
    o = [v[:, :0]]
    for at in range(0, r.shape[1], CHUNK):
        r_c, w_c, k_c, v_c, a_c, b_c = (x[:, at : at + CHUNK] for x in (r, w, k, v, a, b))
        w_c = w_c.clamp(min=-104)
        since, total, one = w_c.cumsum(1), w_c.sum(1), torch.ones(w_c.shape[1], w_c.shape[1])
        left, before = (total[:, None] - since).exp(), since - w_c

        def pairs(x: Any, y: Any, reads: Any, offset: int, since: Any = since, one: Any = one) -> Any:
            seen = one.tril(offset).bool()[None, :, :, None, None]
            decays = torch.where(seen, reads[:, :, None] - since[:, None], -torch.inf).exp()
            return torch.einsum("bihk,bjhk,bijhk->bhij", x, y, decays)

        known = torch.einsum("bhij,bjhv->bhiv", pairs(a_c, k_c, before, -1), v_c)
        known = known + torch.einsum("bihk,bhkv->bhiv", a_c * before.exp(), S)
        system = torch.eye(len(one)) - pairs(a_c, b_c, before, -1)
        removed = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True).transpose(1, 2)
        scores = ((pairs(r_c, k_c, since, 0), v_c), (pairs(r_c, b_c, since, 0), removed))
        inside = sum(torch.einsum("bhij,bjhv->bihv", *each) for each in scores)
        o.append(inside + torch.einsum("bihk,bhkv->bihv", r_c * since.exp(), S))
        written = sum(torch.einsum("bjhk,bjhv->bhkv", x * left, y) for x, y in ((k_c, v_c), (b_c, removed)))
        S = total.exp()[..., None] * S + written
    return torch.cat(o, 1), S


def by_document(call: Callable[..., Any], tokens: list[torch.Tensor], state: torch.Tensor, bounds: Any) -> Any:
    """call(*tokens, state) of each document by itself."""
    if bounds is None:
        return call(*tokens, state)
    parts = [
        call(*(x[:, a:b] for x in tokens), state[n : n + 1])
        for n, (a, b) in enumerate(zip(bounds.tolist(), bounds.tolist()[1:], strict=False))
    ]
    return torch.cat([o for o, _ in parts], 1), torch.cat([last for _, last in parts])


def matrix_oracle(
    q: Any, k: Any, v: Any, g: Any, bonus: Any, scale: Any, initial_state: Any, cu: Any, engine: Any
) -> Any:
    loop = matrix_tokens if engine is token_loop or q.dtype == torch.float64 else matrix_chunks
    wide = [accumulated(x) for x in (q, k, v, g)]
    if engine is float32_sums:
        loop, wide = engine, [x.double() for x in wide]
    wide[0] = wide[0] * (q.shape[-1] ** -0.5 if scale is None else scale)
    N = q.shape[0] if cu is None else len(cu) - 1
    state = wide[0].new_zeros(N, *k.shape[2:], v.shape[-1]) if initial_state is None else initial_state.to(wide[0])
    bonus = None if bonus is None else bonus.to(wide[0])
    o, last = by_document(lambda *x: loop(*x, bonus), wide, state, cu)
    return o.to(v.dtype), last


def gla(q: Any, k: Any, v: Any, g: Any, scale: Any = None, initial_state: Any = None, cu_seqlens: Any = None,
        engine: Any = None) -> Any:  # fmt: skip
    return matrix_oracle(q, k, v, g, None, scale, initial_state, cu_seqlens, engine)


def hgrn2(q: Any, v: Any, g: Any, engine: Any = None, **rest: Any) -> Any:
    return gla(q, -torch.expm1(accumulated(g)), v, g, engine=engine, **rest)


def rwkv6(r: Any, k: Any, v: Any, w: Any, u: Any, scale: Any = None, initial_state: Any = None, cu_seqlens: Any = None,
          engine: Any = None) -> Any:  # fmt: skip
    return matrix_oracle(r, k, v, w, u, scale, initial_state, cu_seqlens, engine)


def rwkv7(r: Any, w: Any, k: Any, v: Any, a: Any, b: Any, scale: float = 1.0, initial_state: Any = None,
          cu_seqlens: Any = None, engine: Any = None) -> Any:  # fmt: skip
    loop = low_rank_tokens if engine is token_loop or r.dtype == torch.float64 else low_rank_chunks
    wide = [accumulated(x) for x in (r, w, k, v, a, b)]
    wide[0] = wide[0] * scale
    N = r.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    state = wide[0].new_zeros(N, *k.shape[2:], v.shape[-1]) if initial_state is None else initial_state
    o, last = by_document(loop, wide, state, cu_seqlens)
    return o.to(v.dtype), last


def hgrn(x: Any, g: Any, initial_state: Any = None, cu_seqlens: Any = None, engine: Any = None) -> Any:
    N = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    wide = [accumulated(x), accumulated(g)]
    state = wide[0].new_zeros(N, x.shape[2]) if initial_state is None else initial_state
    o, last = by_document(vector_tokens, wide, state, cu_seqlens)
    return o.to(x.dtype), last


def rg_lru(
    x: Any, r: Any, i: Any, Lambda: Any, c: float = 8.0, engine: Any = None, starts: Any = (), **rest: Any
) -> Any:
    """Griffin's equations 1 to 4; ``starts`` are (row, token) whose input has no weight."""
    x_w, r_w, i_w, of_channel = (accumulated(t) for t in (x, r, i, Lambda))
    recurrence, entry = 1 / (1 + torch.exp(-r_w)), 1 / (1 + torch.exp(-i_w))
    log_a = -c * torch.log1p(torch.exp(of_channel)) * recurrence
    weight = (-torch.expm1(2 * log_a)).sqrt()
    for row, token in starts:
        weight = weight.index_put((torch.tensor(row), torch.tensor(token)), torch.ones((), dtype=weight.dtype))
    o, last = hgrn(weight * entry * x_w, log_a, **rest)
    return o.to(x.dtype), last


class Op(NamedTuple):
    """`tokens` have an entry a token; what is left of the inputs are parameters, and the initial state."""

    chunk: Callable[..., Any]
    step: Callable[..., Any]
    oracle: Callable[..., Any]
    tokens: str
    gate: str
    matrix: bool = True


OPS = {
    "gla": Op(ops.chunk_gla, ops.recurrent_gla, gla, "q k v g", "g"),
    "hgrn2": Op(ops.chunk_hgrn2, ops.recurrent_hgrn2, hgrn2, "q v g", "g"),
    "rwkv6": Op(ops.chunk_rwkv6, ops.recurrent_rwkv6, rwkv6, "r k v w", "w"),
    "rwkv7": Op(ops.chunk_rwkv7, ops.recurrent_rwkv7, rwkv7, "r w k v a b", "w"),
    "hgrn": Op(ops.chunk_hgrn, ops.recurrent_hgrn, hgrn, "x g", "g", matrix=False),
    "rg_lru": Op(ops.rg_lru, ops.recurrent_rg_lru, rg_lru, "x r i", "r", matrix=False),
}


def draw(name: str, B: int, T: int, states: int = 0, K: int = 9, V: int = 7, seed: int | None = None) -> Tensors:
    """Arguments in float64 of two heads, or of 2 K channels."""
    made = torch.Generator().manual_seed(random.randrange(2**31) if seed is None else seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=made, dtype=torch.float64)

    op, found = OPS[name], {}
    for x in op.tokens.split():
        found[x] = normal(B, T, 2, V if x == "v" else K) if op.matrix else normal(B, T, 2 * K)
        if x in ("g", "w"):
            found[x] = logsigmoid(found[x] + 1)
    if name == "rwkv7":
        removed = normalize(found["a"], dim=-1)
        found |= {"a": -removed, "b": removed * found["b"].sigmoid()}
    if name == "rwkv6":
        found["u"] = normal(2, K)
    if name == "rg_lru":
        found["Lambda"] = normal(2 * K) - 2
    if states:
        found["initial_state"] = normal(states, 2, K, V) if op.matrix else normal(states, 2 * K)
    return found
