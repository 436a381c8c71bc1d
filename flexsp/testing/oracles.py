"""Token-by-token definitions of the ops: what every kernel is measured against, in float64.

Each function takes the op's own arguments and always returns ``(o, final_state)``. It computes in the dtype it is
given, so float64 inputs make it an oracle, with gradients by autograd. ``engine`` replaces the token loop: the
low-precision yardstick of `compare` uses that. Nothing here shares code with ``flexsp.ops``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = [
    "Engine", "delta_rule", "gdn2", "lightning_attn", "linear_attn", "mamba2_ssd", "retention", "simple_gla",
    "token_loop",
]  # fmt: skip

Engine = Callable[..., tuple[torch.Tensor, torch.Tensor]]
Pair = tuple[torch.Tensor, torch.Tensor]


def token_loop(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    *,
    scale: float,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    reads: torch.Tensor | None = None,
    steps: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """S_t = e^{g_t} S_{t-1} + k_t v_t^T, o_t = scale q_t S_t, one token after the other.

    With beta a delta rule: S_t = e^{g_t} S_{t-1}, to which each of the token's steps adds beta k (v - k S_t)^T; with
    reads, of k's shape, beta k (v - reads S_t)^T.
    q [B, T, H, K], k [B, T steps, H, K], v [B, T steps, H, V], g [B, T, H] or [B, T, H, K], beta [B, T steps, H];
    states [N, H, K, V], N = B or the number of packed documents.
    """
    B, T, H, K = q.shape
    V = v.shape[-1]
    bounds = [0, T] if cu_seqlens is None else cu_seqlens.tolist()
    finals, o = [], []
    for n, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        state = q.new_zeros(B, H, K, V)
        if initial_state is not None:
            state = initial_state if cu_seqlens is None else initial_state[n : n + 1]
        for t in range(begin, end):
            if g is not None:
                state = g[:, t].exp().view(B, H, -1, 1) * state
            for s in range(t * steps, (t + 1) * steps):
                key, new = k[:, s, :, :, None], v[:, s]
                if beta is not None:
                    read = key if reads is None else reads[:, s, :, :, None]
                    new = beta[:, s, :, None] * (new - (read * state).sum(-2))
                state = state + key * new[:, :, None, :]
            o.append(scale * (q[:, t, :, :, None] * state).sum(-2))
        finals.append(state)
    out = torch.stack(o, dim=1) if o else v.new_zeros(B, 0, H, V)
    return out, torch.cat(finals)


def simple_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    g_gamma: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    engine: Engine = token_loop,
) -> tuple[torch.Tensor, torch.Tensor]:
    gates = g
    if g_gamma is not None:
        gates = torch.stack([g_gamma] * q.shape[1], dim=0).unsqueeze(0).repeat(q.shape[0], 1, 1)
    scale = 1 / q.shape[-1] ** 0.5 if scale is None else scale
    return engine(q, k, v, gates, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens)


def retention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    engine: Engine = token_loop,
) -> tuple[torch.Tensor, torch.Tensor]:
    gamma = torch.tensor([1 - 2.0 ** (-5 - h) for h in range(q.shape[2])], dtype=torch.float64, device=q.device)
    return simple_gla(q, k, v, None, gamma.log(), scale, initial_state, cu_seqlens, engine)


def lightning_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    engine: Engine = token_loop,
) -> tuple[torch.Tensor, torch.Tensor]:
    H = q.shape[2]
    slopes = [-8 * h * (num_layers - layer_idx) / (H * num_layers) for h in range(H)]
    g_gamma = torch.tensor(slopes, dtype=torch.float64, device=q.device)
    return simple_gla(q, k, v, None, g_gamma, scale, initial_state, cu_seqlens, engine)


def linear_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | Pair | None = None,
    normalize: bool = True,
    cu_seqlens: torch.Tensor | None = None,
    engine: Engine = token_loop,
) -> tuple[torch.Tensor, torch.Tensor | Pair]:
    if not normalize:
        assert initial_state is None or isinstance(initial_state, torch.Tensor)
        return simple_gla(q, k, v, None, None, scale, initial_state, cu_seqlens, engine)
    state, z = (None, None) if initial_state is None else initial_state
    z = None if z is None else z.transpose(1, 2).transpose(-1, -2)
    numerator, state = simple_gla(q, k, v, None, None, scale, state, cu_seqlens, engine)
    ones = torch.ones_like(v[..., :1])
    denominator, z = simple_gla(q, k, ones, None, None, scale, z, cu_seqlens, engine)
    o = numerator.to(state.dtype) / (denominator.to(state.dtype) + 1e-10)
    return o.to(v.dtype), (state, z.transpose(-1, -2).transpose(1, 2))


def mamba2_ssd(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    engine: Engine = token_loop,
    z: torch.Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, T, H, P = x.shape
    step = dt if dt_bias is None else dt + dt_bias
    if dt_softplus:
        step = torch.log1p(step.exp())
    step = torch.where(step < dt_limit[0], dt_limit[0], torch.where(step > dt_limit[1], dt_limit[1], step))
    values = (x * step[..., None]).to(x.dtype)
    repeats = H // B.shape[2]
    keys, queries = B.repeat_interleave(repeats, dim=2), C.repeat_interleave(repeats, dim=2)
    y, state = engine(
        queries, keys, values, A * step, scale=1.0, initial_state=initial_state, cu_seqlens=cu_seqlens
    )  # fmt: skip
    if D is not None:
        y = (y + x * (D if D.dim() == 2 else D[:, None])).to(x.dtype)
    return y if z is None else (y * z * z.sigmoid()).to(x.dtype), state


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    g: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    steps: int = 1,
    engine: Engine = token_loop,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The delta rule, gated by a head (g of 3 dimensions) or by a key channel (4), with all that comes before it."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scale = 1 / q.shape[-1] ** 0.5 if scale is None else scale
    q, k = (_of_each_head(x, v.shape[2], use_qk_l2norm_in_kernel) for x in (q, k))
    if use_beta_sigmoid_in_kernel:
        beta = (2 if allow_neg_eigval else 1) / (1 + (-beta.to(wide)).exp())
    if use_gate_in_kernel:
        assert g is not None
        g = _log_gates(g.to(wide), A_log, dt_bias, lower_bound)
    if state_v_first and initial_state is not None:
        initial_state = initial_state.transpose(-1, -2)
    o, state = engine(
        q, k, v, g, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens, beta=beta, steps=steps
    )  # fmt: skip
    return o, state.transpose(-1, -2) if state_v_first else state


def _of_each_head(x: torch.Tensor, heads: int, norm: bool) -> torch.Tensor:
    """Queries or keys of every value head, of length 1 if ``norm``."""
    if norm:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        x = (x / (1e-6 + (x.to(wide) ** 2).sum(-1, keepdim=True)) ** 0.5).to(x.dtype)
    return x.repeat_interleave(heads // x.shape[2], dim=2)


def _log_gates(
    g: torch.Tensor, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None, lower_bound: float | None
) -> torch.Tensor:  # fmt: skip
    g = g + (0 if dt_bias is None else dt_bias.to(g.dtype).reshape(g.shape[2:]))
    slope = 1 if A_log is None else A_log.to(g.dtype).exp().view(-1, *[1] * (g.dim() - 3))
    return -slope * (1 + g.exp()).log() if lower_bound is None else lower_bound / (1 + (-slope * g).exp())


def gdn2(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    b: torch.Tensor,
    w: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    engine: Engine = token_loop,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The delta rule that reads with b * k, writes w * v with k, and has a gate a key channel."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scale = 1 / q.shape[-1] ** 0.5 if scale is None else scale
    q, k = (_of_each_head(x, v.shape[2], use_qk_l2norm_in_kernel) for x in (q, k))
    if use_gate_in_kernel:
        g = _log_gates(g.to(wide), A_log, dt_bias, lower_bound)
    if state_v_first and initial_state is not None:
        initial_state = initial_state.transpose(-1, -2)
    o, state = engine(
        q, k, w.to(wide) * v.to(wide), g, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens,
        beta=torch.ones_like(v[..., 0]), reads=b.to(wide) * k.to(wide),
    )  # fmt: skip
    return o.to(v.dtype), state.transpose(-1, -2) if state_v_first else state
