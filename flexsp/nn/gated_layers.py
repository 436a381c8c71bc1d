"""Token mixers with a gate for each channel: `GatedLinearAttention`, `HGRN2`, `HGRN` and `RGLRU`.

The first three have the parameters of flash-linear-attention's layers, the last one those of the recurrent block of
RecurrentGemma in transformers. Like `flexsp.nn.SimpleGLA` all work on packed documents, under sequence parallelism and
token by token.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexsp.exceptions import check_flag, check_flags, check_integer, check_number, fail
from flexsp.nn.conv import ShortConvolution
from flexsp.nn.norm import GatedRMSNorm, RMSNorm, check_choice, check_eps, check_input
from flexsp.nn.recurrent import LayerCache, RecurrentLayer, _wide, expanded, head_size
from flexsp.ops import (
    chunk_gla,
    chunk_hgrn,
    chunk_hgrn2,
    recurrent_gla,
    recurrent_hgrn,
    recurrent_hgrn2,
    recurrent_rg_lru,
    rg_lru,
)
from flexsp.ops._validate import MAX_HEAD_DIM, MAX_VALUE_DIM, check_tensor

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu, "sigmoid": torch.sigmoid, "silu": F.silu, "sqrelu": lambda x: F.relu(x).square(), "swish": F.silu,
}  # fmt: skip


class GatedLinearAttention(RecurrentLayer):
    """Gated linear attention (GLA; Yang et al. 2023, arXiv 2312.06635).

    ``S_t = diag(e^{g_t}) S_{t-1} + k_t v_t^T, o_t = K**-0.5 q_t S_t``, with q, k, v from projections, with
    ``use_short_conv`` followed by short causal convolutions and SiLU, ``g = logsigmoid(f(x)) / gate_logit_normalizer``
    (natural log) with a pair of linear maps f, and ``y = W_o (norm(o) * silu(W_g x))``.

    Args:
        hidden_size: model width D.
        num_heads: heads H of q and of the state.
        expand_k: heads have K = hidden_size * expand_k / num_heads, 1 to 256.
        expand_v: and V = hidden_size * expand_v / num_heads, 1 to 512.
        num_kv_heads: heads of k, v and the gates, a divisor of num_heads, by default H; head h reads those at
            h // (H / num_kv_heads).
        feature_map: of q and k, ``"relu"``, ``"sigmoid"``, ``"sqrelu"`` (relu squared), ``"silu"`` or ``"swish"``, the
            same, or None.
        use_short_conv: convolutions over q, k and v.
        conv_size: their tokens.
        conv_bias: whether they have biases.
        use_output_gate: multiply the normed output by gate_fn(W_g x).
        gate_fn: ``"swish"`` or ``"silu"``, the same, or another name that ``feature_map`` has.
        norm_eps: of the output norm, which is over each head's V; at least 0.
        gate_logit_normalizer: larger remembers longer.
        gate_low_rank_dim: channels between the two maps of the gates.
        clamp_min: the least log gate, below 0, or None.
        fuse_norm: decides the norm's name alone: with an output gate and ``"swish"`` it is ``g_norm_swish_gate``, else
            ``g_norm``.

    Raises:
        ValueError: an argument that is none of these, which the message names.
    """

    _ops = (chunk_gla, recurrent_gla)
    _shown = ("num_heads", "num_kv_heads", "head_k_dim", "head_v_dim")
    _branches = ("q", "k", "v")
    g_proj: nn.Linear | None

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        num_kv_heads: int | None = None,
        feature_map: str | None = None,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        use_output_gate: bool = True,
        gate_fn: str = "swish",
        norm_eps: float = 1e-5,
        gate_logit_normalizer: float = 16.0,
        gate_low_rank_dim: int = 16,
        clamp_min: float | None = None,
        fuse_norm: bool = True,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size = check_integer("hidden_size", hidden_size, least=1)
        self.num_heads = num_heads = check_integer("num_heads", num_heads, least=1)
        self.num_kv_heads = num_heads if num_kv_heads is None else check_integer("num_kv_heads", num_kv_heads, least=1)
        if num_heads % self.num_kv_heads:
            fail("num_kv_heads", f"a divisor of num_heads={num_heads}", num_kv_heads)
        self.head_k_dim = head_size("expand_k", hidden_size, expand_k, num_heads)
        self.head_v_dim = head_size("expand_v", hidden_size, expand_v, num_heads, MAX_VALUE_DIM)
        names = tuple(_ACTIVATIONS)
        self.feature_map = None if feature_map is None else check_choice("feature_map", feature_map, names)
        self.gate_fn = check_choice("gate_fn", gate_fn, names)
        check_flags(use_output_gate=use_output_gate, fuse_norm=fuse_norm)
        self.gate_logit_normalizer = check_number("gate_logit_normalizer", gate_logit_normalizer, above=0)
        if clamp_min is not None and check_number("clamp_min", clamp_min) >= 0:
            fail("clamp_min", "a number below 0, or None", repr(clamp_min))
        self.clamp_min = clamp_min
        keys, values = self.num_kv_heads * self.head_k_dim, self.num_kv_heads * self.head_v_dim
        width, rank = num_heads * self.head_v_dim, check_integer("gate_low_rank_dim", gate_low_rank_dim, least=1)
        self._add_branches((num_heads * self.head_k_dim, keys, values))
        self.g_proj = nn.Linear(hidden_size, width, bias=False) if use_output_gate else None
        self._add_convolutions(use_short_conv, conv_size, conv_bias, ("silu",) * 3)
        self.gk_proj = nn.Sequential(nn.Linear(hidden_size, rank, bias=False), nn.Linear(rank, keys))
        self.o_proj = nn.Linear(width, hidden_size, bias=False)
        self._norm_name = "g_norm_swish_gate" if use_output_gate and fuse_norm and gate_fn == "swish" else "g_norm"
        setattr(self, self._norm_name, RMSNorm(self.head_v_dim, check_eps("norm_eps", norm_eps)))

    def _arguments(self, mixed: Tensor, x: Tensor, *context: Any) -> tuple[dict[str, Any], Tensor]:
        q, k, v = (F.silu(mixed) if self.use_short_conv else mixed).split(self._widths, dim=-1)
        if self.feature_map is not None:
            q, k = (_ACTIVATIONS[self.feature_map](t) for t in (q, k))
        g = F.logsigmoid(_wide(self.gk_proj(x))) / self.gate_logit_normalizer
        if self.clamp_min is not None:
            g = g.clamp(min=self.clamp_min)
        q, (k, v, g) = q.unflatten(-1, (self.num_heads, -1)), (self._repeated(t) for t in (k, v, g))
        return {"q": q, "k": k, "v": v, "g": g}, x

    def _repeated(self, x: Tensor) -> Tensor:
        """[B, T, HK * D], the channels of k, v or the gates, as [B, T, H, D], repeated for the query heads."""
        x = x.unflatten(-1, (self.num_kv_heads, -1))
        repeats = self.num_heads // self.num_kv_heads
        return x if repeats == 1 else x.repeat_interleave(repeats, dim=2)

    def _output(self, o: Tensor, x: Tensor) -> Tensor:
        o = getattr(self, self._norm_name)(o).flatten(-2)
        if self.g_proj is not None:
            o = _wide(o) * _ACTIVATIONS[self.gate_fn](_wide(self.g_proj(x)))
        return self.o_proj(o.to(x.dtype))


class _LowerBounded(RecurrentLayer):
    """The base of `HGRN2` and `HGRN`, whose gates have a lower bound that the model passes to each call."""

    def forward(  # type: ignore[override]
        self, x: Tensor, cu_seqlens: Tensor | None = None, cache: LayerCache | None = None,
        lower_bound: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, LayerCache]:  # fmt: skip
        """x [B, T, D] -> y [B, T, D]; with a cache (see `init_cache`), ``(y, new cache)``.

        Under sequence parallelism x is this rank's shard and `cu_seqlens` [N+1] the global boundaries. Behind the last
        of them outputs and gradients are 0. `lower_bound` is the least gate of each channel, [forget channels] from 0
        to 1; None means 0, as models have it in their first layer.

        Raises:
            ValueError: bad shapes, or a cache together with documents or sequence parallelism.
        """
        y, cache, _ = self._forward(x, cu_seqlens, cache, lower_bound)
        return y if cache is None else (y, cache)

    def step(  # type: ignore[override]
        self, x: Tensor, cache: LayerCache, lower_bound: Tensor | None = None
    ) -> tuple[Tensor, LayerCache]:
        """One token on this rank alone, whatever sp is: x [B, D] or [B, 1, D] -> (y like x, new cache)."""
        return self._step(x, cache, lower_bound)[:2]

    def _log_gate(self, f: Tensor, lower_bound: Tensor | None) -> Tensor:
        """log(lower_bound + (1 - lower_bound) sigmoid(f)), in the accumulation dtype."""
        g = F.logsigmoid(_wide(f))
        if lower_bound is None:
            return g
        check_input("lower_bound", lower_bound, (f.shape[-1],))
        bound = lower_bound.to(g.dtype)
        least = bound.clamp(min=torch.finfo(g.dtype).tiny).log()  # finite, and so is its gradient
        return torch.logaddexp(least.expand_as(g), torch.log1p(-bound) + g).clamp(max=0.0)


class HGRN2(_LowerBounded):
    """HGRN2: gated linear attention whose keys are what the gates forget (Qin et al. 2024, arXiv 2404.07904).

    ``S_t = diag(e^{g_t}) S_{t-1} + (1 - e^{g_t}) i_t^T, o_t = K**-0.5 q_t S_t``, with ``q = silu(W_q x)``,
    ``g = logsigmoid(W_f x)`` (natural log) and ``i = W_i x``, with ``use_short_conv`` with a short causal convolution
    after each projection, and ``y = W_o norm(o)``, the norm over all heads.

    Args:
        hidden_size: model width D.
        num_heads: heads H, a divisor of D; by default ``hidden_size // expand_ratio``, which also overrides it.
        expand_ratio: K of a head, 1 to 256. None means ``hidden_size // num_heads``, which is V, up to 512.
        use_short_conv: convolutions over q, f and i.
        conv_size: their tokens.
        conv_bias: whether they have biases.
        norm_eps: of the output norm, at least 0.

    Raises:
        ValueError: an argument that is none of these, which the message names.
    """

    _ops = (chunk_hgrn2, recurrent_hgrn2)
    _branches = ("q", "f", "i")

    def __init__(
        self,
        hidden_size: int,
        num_heads: int | None = None,
        expand_ratio: int | None = 128,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size = check_integer("hidden_size", hidden_size, least=1)
        if num_heads is not None:
            num_heads = check_integer("num_heads", num_heads, least=1)
        if expand_ratio is None:
            if num_heads is None or hidden_size % num_heads:
                fail("num_heads", f"a divisor of hidden_size={hidden_size} without expand_ratio", num_heads)
            expand_ratio = hidden_size // num_heads
        expand_ratio = check_integer("expand_ratio", expand_ratio, least=1, most=MAX_HEAD_DIM)
        self.num_heads = num_heads = hidden_size // expand_ratio
        if num_heads < 1 or hidden_size % num_heads:
            fail("expand_ratio", f"hidden_size // expand_ratio, a divisor of hidden_size={hidden_size}", num_heads)
        if hidden_size // num_heads > MAX_VALUE_DIM:
            fail("expand_ratio", f"heads of 1..{MAX_VALUE_DIM} inputs", hidden_size // num_heads)
        self.head_k_dim, self.head_v_dim = expand_ratio, hidden_size // num_heads
        self._add_branches((num_heads * expand_ratio, num_heads * expand_ratio, hidden_size))
        self._add_convolutions(use_short_conv, conv_size, conv_bias, (None,) * 3)
        self.g_norm = RMSNorm(hidden_size, check_eps("norm_eps", norm_eps))
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def _arguments(self, mixed: Tensor, x: Tensor, *context: Any) -> tuple[dict[str, Any], Tensor]:
        q, f, i = mixed.split(self._widths, dim=-1)
        found = {"q": F.silu(q), "v": i, "g": self._log_gate(f, *context)}
        return {name: each.unflatten(-1, (self.num_heads, -1)) for name, each in found.items()}, x

    def _output(self, o: Tensor, x: Tensor) -> Tensor:
        return self.o_proj(self.g_norm(o.flatten(-2)).to(x.dtype))


class HGRN(_LowerBounded):
    """The gated recurrent layer of HGRN, with real numbers (Qin et al. 2023, arXiv 2311.04823).

    ``h_t = e^{g_t} h_{t-1} + (1 - e^{g_t}) silu(W_i x)``, with ``g = logsigmoid(W_f x)`` (natural log), with
    ``use_short_conv`` with a short causal convolution after these projections, and
    ``y = W_o (norm(h) * silu(W_g x))``.

    Args:
        hidden_size: model width D.
        expand_ratio: the state has hidden_size * expand_ratio channels.
        use_short_conv: convolutions over i and f.
        conv_size: their tokens.
        conv_bias: whether they have biases.
        norm_eps: of the output norm, which is over all channels; at least 0.

    Raises:
        ValueError: an argument that is none of these, which the message names.
    """

    _ops = (chunk_hgrn, recurrent_hgrn)
    _shown = ("input_dim",)
    _branches = ("i", "f")

    def __init__(
        self,
        hidden_size: int,
        expand_ratio: float = 1,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size = check_integer("hidden_size", hidden_size, least=1)
        self.input_dim = width = expanded("expand_ratio", hidden_size, expand_ratio)
        self._add_branches((width, width))
        self.g_proj = nn.Linear(hidden_size, width, bias=False)
        self._add_convolutions(use_short_conv, conv_size, conv_bias, (None, None))
        self.g_norm = GatedRMSNorm(width, check_eps("norm_eps", norm_eps))
        self.o_proj = nn.Linear(width, hidden_size, bias=False)

    def _state_shape(self, batch: int) -> tuple[int, ...]:
        return batch, self.input_dim

    def _arguments(self, mixed: Tensor, x: Tensor, *context: Any) -> tuple[dict[str, Any], Tensor]:
        i, f = mixed.split(self._widths, dim=-1)
        g = self._log_gate(f, *context)
        return {"x": (F.silu(_wide(i)) * -g.expm1()).to(i.dtype), "g": g}, x

    def _output(self, o: Tensor, x: Tensor) -> Tensor:
        return self.o_proj(self.g_norm(o, self.g_proj(x)).to(x.dtype))


class _RealGates(nn.Module):
    """The two gates of `RGLRU`, block-diagonal linear maps with a block for each head."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        block = width // num_heads
        self.num_heads = num_heads
        self.recurrent_param = nn.Parameter(torch.empty(width))
        self.input_gate_weight = nn.Parameter(torch.empty(num_heads, block, block))
        self.input_gate_bias = nn.Parameter(torch.empty(num_heads, block))
        self.recurrent_gate_weight = nn.Parameter(torch.empty(num_heads, block, block))
        self.recurrent_gate_bias = nn.Parameter(torch.empty(num_heads, block))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The authors' initialisation of Lambda, a^8 uniform in 0.9..0.999 for open gates, and of the gates' maps."""
        most = torch.empty_like(self.recurrent_param).uniform_(0.9, 0.999)
        self.recurrent_param.copy_(torch.log(torch.expm1(-most.log() / 8)))  # 8 softplus of it is -log(most)
        for weight in (self.input_gate_weight, self.recurrent_gate_weight):
            weight.normal_(std=1 / math.sqrt(weight.shape[1]))
        self.input_gate_bias.zero_()
        self.recurrent_gate_bias.zero_()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, W] -> the recurrence and the input gates before their sigmoids, [B, T, W]."""
        heads = x.unflatten(-1, (self.num_heads, -1)).unsqueeze(-2)
        r = (heads @ self.recurrent_gate_weight).squeeze(-2) + self.recurrent_gate_bias
        i = (heads @ self.input_gate_weight).squeeze(-2) + self.input_gate_bias
        return r.flatten(-2), i.flatten(-2)


def _from_state(op: Any, initial_state: Any, unit_start: bool, **given: Any) -> tuple[Tensor, Any]:
    """The op on states of an `RGLRU` cache, which says of each text whether it has begun."""
    if initial_state is None:
        return op(**given, unit_start=unit_start)  # type: ignore[no-any-return]
    h, begun = initial_state
    o, h = op(**given, initial_state=h, unit_start=~begun if unit_start else False)
    return o, (h, torch.ones_like(begun) if given["x"].shape[1] else begun)


class RGLRU(RecurrentLayer):
    """The recurrent block of Hawk and Griffin, with the real-gated linear recurrent unit (De et al. 2024,
    arXiv 2402.19427, section 2.4 and figure 2).

    ``h_t = a_t h_{t-1} + sqrt(1 - a_t^2) sigmoid(i_t) u_t`` with ``a = exp(-8 softplus(Lambda) sigmoid(r))``; u is
    ``W_x x + b_x`` followed by a short causal convolution, r and i are block-diagonal linear maps of u, and
    ``y = W_o (h * gelu(W_y x + b_y)) + b_o``. The first token of each text has a weight of 1 in the place of
    sqrt(1 - a_t^2), as in the authors' code and in RecurrentGemma.

    Args:
        hidden_size: model width D.
        lru_width: channels of the state, by default D.
        num_heads: blocks of the gates' maps, a divisor of lru_width.
        conv_size: tokens of the convolution, which has a bias.
        unit_start: whether the first token of each text, or document, has a weight of 1; else it is weighed like all
            others, as in the paper's equations.

    The state of its cache is (h [B, lru_width], which texts have begun [B]).

    Raises:
        ValueError: an argument that is none of these, which the message names.
    """

    _ops = (functools.partial(_from_state, rg_lru), functools.partial(_from_state, recurrent_rg_lru))
    _shown = ("lru_width", "num_heads")
    _projection_names = ("linear_x",)
    _convolution_names = ("conv_1d",)

    def __init__(
        self, hidden_size: int, lru_width: int | None = None, num_heads: int = 1, conv_size: int = 4,
        unit_start: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.hidden_size = hidden_size = check_integer("hidden_size", hidden_size, least=1)
        width = hidden_size if lru_width is None else check_integer("lru_width", lru_width, least=1)
        self.lru_width, self.num_heads = width, check_integer("num_heads", num_heads, least=1)
        if width % num_heads:
            fail("num_heads", f"a divisor of lru_width={width}", num_heads)
        self.use_short_conv, self.conv_size = True, check_integer("conv_size", conv_size, least=1)
        check_flag("unit_start", unit_start)
        self.unit_start = unit_start
        self.linear_y = nn.Linear(hidden_size, width)
        self.linear_x = nn.Linear(hidden_size, width)
        self.linear_out = nn.Linear(width, hidden_size)
        self.conv_1d = ShortConvolution(width, conv_size, bias=True, activation=None)
        self.rg_lru = _RealGates(width, num_heads)

    def init_cache(self, batch: int) -> LayerCache:
        """The cache before the first token: a state of zeros, no text begun, and zeros for the convolution's inputs
        [B, D, W]."""
        h, inputs = super().init_cache(batch)
        return LayerCache((h, torch.zeros(batch, dtype=torch.bool, device=h.device)), inputs)

    def _check_state(self, state: Any, batch: int) -> None:
        if not isinstance(state, tuple) or len(state) != 2:
            fail("cache.state", "(h, which texts have begun), see init_cache", type(state).__name__)
        h, begun = state
        check_input("cache.state[0]", h, self._state_shape(batch))
        check_tensor("cache.state[1]", begun, (batch,), "[B]", dtypes=(torch.bool,), device=h.device)

    def _state_shape(self, batch: int) -> tuple[int, ...]:
        return batch, self.lru_width

    def _arguments(self, mixed: Tensor, x: Tensor, *context: Any) -> tuple[dict[str, Any], Tensor]:
        r, i = self.rg_lru(mixed)
        given = {"x": mixed, "r": r, "i": i, "Lambda": _wide(self.rg_lru.recurrent_param)}
        return {**given, "unit_start": self.unit_start}, x

    def _output(self, o: Tensor, x: Tensor) -> Tensor:
        return self.linear_out(o.to(x.dtype) * F.gelu(self.linear_y(x), approximate="tanh"))
