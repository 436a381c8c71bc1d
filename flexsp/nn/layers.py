"""Token mixers ready to use: `SimpleGLA` and `Mamba2`.

Both work on packed documents, under sequence parallelism (`flexsp.nn.SequenceParallelLA`, or the ambient
`flexsp.sequence_parallel`), and token by token for generation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexsp.exceptions import check_flags, check_integer, check_number, fail
from flexsp.nn.conv import ShortConvolution
from flexsp.nn.norm import GatedRMSNorm, check_choice, check_eps
from flexsp.nn.recurrent import RecurrentLayer, _project, _wide, expanded, head_size
from flexsp.nn.start import check_starts, start_rates, start_steps
from flexsp.ops import chunk_simple_gla, mamba2_ssd, recurrent_simple_gla
from flexsp.ops._validate import MAX_HEAD_DIM, MAX_VALUE_DIM, check_limits

_HIDDEN: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "swish": F.silu, "relu": F.relu, "gelu": F.gelu}


class SimpleGLA(RecurrentLayer):
    """Gated linear attention with one scalar gate a head and token (simple GLA; Yang et al. 2024, RetNet with a
    data-dependent decay).

    ``S_t = e^{g_t} S_{t-1} + k_t v_t^T, o_t = K**-0.5 q_t S_t``, with q, k, v from one projection followed by a short
    causal convolution and SiLU, ``g = logsigmoid(W_g x) / gate_logit_normalizer`` (natural log), and
    ``y = W_o (norm(o) * silu(W_z x))``.

    Args:
        hidden_size: model width D.
        num_heads: heads H.
        head_k_dim: K of a head, 1 to 256; default ``hidden_size * expand_k / num_heads``.
        head_v_dim: V of a head, 1 to 512; default ``hidden_size * expand_v / num_heads``.
        expand_k: gives the default of ``head_k_dim``.
        expand_v: gives the default of ``head_v_dim``.
        use_short_conv: a convolution over q, k and v (one, so that ranks exchange one halo).
        conv_size: its tokens.
        conv_bias: whether it has a bias.
        use_output_gate: multiply by silu(W_z x).
        gate_logit_normalizer: larger remembers longer.
        norm_eps: of the output norm, which is over each head's V; at least 0.

    Raises:
        ValueError: an argument that is none of these, which the message names.
    """

    _ops = (chunk_simple_gla, recurrent_simple_gla)
    _projection_names = ("qkv_proj",)

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_k_dim: int | None = None,
        head_v_dim: int | None = None,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        use_output_gate: bool = True,
        gate_logit_normalizer: float = 16.0,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        hidden_size = check_integer("hidden_size", hidden_size, least=1)
        num_heads = check_integer("num_heads", num_heads, least=1)
        check_integer("conv_size", conv_size, least=1)
        check_flags(use_short_conv=use_short_conv, conv_bias=conv_bias, use_output_gate=use_output_gate)
        check_number("gate_logit_normalizer", gate_logit_normalizer, above=0)
        check_eps("norm_eps", norm_eps)
        self.hidden_size, self.num_heads = hidden_size, num_heads
        check_number("expand_k", expand_k, above=0)
        check_number("expand_v", expand_v, above=0)
        if head_k_dim is None:
            head_k_dim = head_size("expand_k", hidden_size, expand_k, num_heads)
        if head_v_dim is None:
            head_v_dim = head_size("expand_v", hidden_size, expand_v, num_heads, MAX_VALUE_DIM)
        self.head_k_dim = check_integer("head_k_dim", head_k_dim, least=1, most=MAX_HEAD_DIM)
        self.head_v_dim = check_integer("head_v_dim", head_v_dim, least=1, most=MAX_VALUE_DIM)
        self.gate_logit_normalizer = gate_logit_normalizer
        self.key_dim, self.value_dim = num_heads * self.head_k_dim, num_heads * self.head_v_dim
        channels = 2 * self.key_dim + self.value_dim
        self.qkv_proj = nn.Linear(hidden_size, channels, bias=False)
        self.g_proj = nn.Linear(hidden_size, num_heads, bias=True)
        self.z_proj = nn.Linear(hidden_size, self.value_dim, bias=False) if use_output_gate else None
        self.conv = ShortConvolution(channels, conv_size, bias=conv_bias) if use_short_conv else None
        self._convolution_names = ("conv",) if use_short_conv else ()
        self.norm = GatedRMSNorm(self.head_v_dim, norm_eps)
        self.o_proj = nn.Linear(self.value_dim, hidden_size, bias=False)

    def _arguments(self, mixed: Tensor, x: Tensor, *context: Any) -> tuple[dict[str, Any], Tensor]:
        parts = (F.silu(mixed) if self.conv is None else mixed).split([self.key_dim, self.key_dim, self.value_dim], -1)
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)) for part in parts)
        g = F.logsigmoid(_wide(self.g_proj(x))) / self.gate_logit_normalizer
        return {"q": q, "k": k, "v": v, "g": g}, x

    def _output(self, o: Tensor, x: Tensor) -> Tensor:
        gate = None if self.z_proj is None else self.z_proj(x).unflatten(-1, (self.num_heads, -1))
        return self.o_proj(self.norm(o, gate).flatten(-2).to(x.dtype))


def _ssd_token(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor, dt_softplus: bool,
    dt_limit: tuple[float, float], **states: Any,
) -> tuple[Tensor, Any]:
    """`mamba2_ssd` token by token, of a dt that goes through softplus."""
    dt = F.softplus(_wide(dt) + dt_bias).clamp(*dt_limit)
    B, C = (rows.repeat_interleave(x.shape[2] // rows.shape[2], dim=2) for rows in (B, C))
    written = (x * dt.unsqueeze(-1)).to(B.dtype)
    y, state = recurrent_simple_gla(C, B, written, g=dt * A, scale=1.0, **states)
    return (y + (D if D.dim() == 2 else D[:, None]) * x).to(x.dtype), state


class Mamba2(RecurrentLayer):
    """Mamba-2 (state space duality; Dao & Gu 2024), parameters named and laid out as in the authors' code.

    ``[z, xBC, dt] = W_in u``; a short causal convolution and SiLU over x, B, C;
    ``dt = softplus(dt + dt_bias)``, ``h_t = e^{dt A} h_{t-1} + dt B x^T``, ``y = C h + D x`` with ``A = -e^{A_log}``
    (natural log); then ``out = W_out norm(y * silu(z))``.

    Args:
        hidden_size: model width.
        head_dim: P, channels a head (the state's V), 1 to 512; a divisor of the inner width.
        state_size: N, the state's K, 1 to 256.
        n_groups: groups G of heads that share B and C; a divisor of the number of heads.
        expand: inner width = expand * hidden_size.
        conv_size: tokens of the convolution.
        conv_bias: whether it has a bias.
        dt_min: softplus(dt_bias) is initialised log-uniform between this and ``dt_max``; 0 < dt_min <= dt_max.
        dt_max: see ``dt_min``.
        dt_init_floor: the least value of softplus of that bias at initialisation; 0 for no limit.
        A_init_range: -A is initialised uniformly in this pair of numbers > 0.
        norm_eps: of the gated norm, over each group's channels; at least 0.
        use_bias: biases of W_in and W_out.
        conv_init: the convolution's weights are initialised uniformly in +- this number above 0; None: as those of
            `ShortConvolution`.
        hidden_act: after the convolution: ``"silu"`` or ``"swish"``, the same, ``"relu"`` or ``"gelu"``.
        D_has_hdim: D is a number for each channel, [inner width]; else for each head.
        rmsnorm: whether there is a norm; without it ``out = W_out (y * silu(z))``.
        norm_before_gate: ``out = W_out (norm(y) * silu(z))``.
        dt_limit: the least and the largest dt, after softplus: a pair of numbers from 0 to infinity.

    Raises:
        ValueError: an argument that is none of these, which the message names.
    """

    _ops = (functools.partial(mamba2_ssd, state_v_first=False), _ssd_token)
    _shown = ("num_heads", "head_dim", "state_size", "n_groups")
    _projection_names = ("in_proj",)
    _convolution_names = ("conv1d",)

    def __init__(
        self,
        hidden_size: int,
        head_dim: int = 64,
        state_size: int = 128,
        n_groups: int = 1,
        expand: float = 2,
        conv_size: int = 4,
        conv_bias: bool = True,
        dt_min: float = 1e-3,
        dt_max: float = 1e-1,
        dt_init_floor: float = 1e-4,
        A_init_range: tuple[float, float] = (1.0, 16.0),
        norm_eps: float = 1e-5,
        use_bias: bool = False,
        conv_init: float | None = None,
        hidden_act: str = "silu",
        D_has_hdim: bool = False,
        rmsnorm: bool = True,
        norm_before_gate: bool = False,
        dt_limit: tuple[float, float] = (0.0, math.inf),
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size = check_integer("hidden_size", hidden_size, least=1)
        self.head_dim = head_dim = check_integer("head_dim", head_dim, least=1, most=MAX_VALUE_DIM)
        self.state_size = state_size = check_integer("state_size", state_size, least=1, most=MAX_HEAD_DIM)
        self.n_groups = n_groups = check_integer("n_groups", n_groups, least=1)
        check_integer("conv_size", conv_size, least=1)
        check_flags(conv_bias=conv_bias, use_bias=use_bias, D_has_hdim=D_has_hdim)
        check_flags(rmsnorm=rmsnorm, norm_before_gate=norm_before_gate)
        check_eps("norm_eps", norm_eps)
        if conv_init is not None:
            check_number("conv_init", conv_init, above=0)
        self.hidden_act = check_choice("hidden_act", hidden_act, tuple(_HIDDEN))
        self.dt_limit = check_limits("dt_limit", dt_limit)
        check_starts(dt_min, dt_max, dt_init_floor, A_init_range)
        self.inner_size = expanded("expand", hidden_size, expand)
        if self.inner_size % head_dim:
            fail("head_dim", f"a divisor of expand * hidden_size {self.inner_size}", head_dim)
        self.num_heads = self.inner_size // head_dim
        if self.num_heads % n_groups:
            fail("n_groups", f"a divisor of the {self.num_heads} heads", n_groups)
        channels = self.inner_size + 2 * n_groups * state_size
        self.in_proj = nn.Linear(hidden_size, self.inner_size + channels + self.num_heads, bias=use_bias)
        activation = "silu" if hidden_act in ("silu", "swish") else None
        self.conv1d = ShortConvolution(channels, conv_size, conv_bias, activation, conv_init)
        self.dt_bias = nn.Parameter(torch.empty(self.num_heads))
        self.A_log = nn.Parameter(torch.empty(self.num_heads))
        self.D = nn.Parameter(torch.empty(self.inner_size if D_has_hdim else self.num_heads))
        self.norm: GatedRMSNorm | None = None
        if rmsnorm:
            group = self.inner_size // n_groups
            self.norm = GatedRMSNorm(self.inner_size, norm_eps, group, gate_first=not norm_before_gate)
        self.out_proj = nn.Linear(self.inner_size, hidden_size, bias=use_bias)
        self._dt_range, self._dt_init_floor, self._A_init_range = (dt_min, dt_max), dt_init_floor, A_init_range
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The authors' initialisation of dt_bias, A_log and D."""
        with torch.no_grad():
            start_steps(self.dt_bias, *self._dt_range, self._dt_init_floor)
            start_rates(self.A_log, *self._A_init_range)
            self.D.fill_(1.0)

    def _state_shape(self, batch: int) -> tuple[int, ...]:
        return batch, self.num_heads, self.state_size, self.head_dim

    def _projected(self, x: Tensor) -> tuple[Tensor, ...]:
        return _project(self.in_proj, x).split([self.inner_size, self.conv1d.dim, self.num_heads], dim=-1)

    def _convolved(self, x: Any, *how: Any) -> tuple[Any, Tensor | None]:
        z, mixed, dt = x
        mixed, conv_cache = super()._convolved(mixed, *how)
        return (z, mixed, dt), conv_cache

    def _arguments(self, mixed: Any, x: Tensor, *context: Any) -> tuple[dict[str, Any], Any]:
        z, mixed, dt = mixed
        if self.conv1d.activation is None:
            mixed = _HIDDEN[self.hidden_act](mixed)
        shared, groups = self.n_groups * self.state_size, (self.n_groups, self.state_size)
        values, B, C = mixed.split([self.inner_size, shared, shared], dim=-1)
        return {
            "x": values.unflatten(-1, (self.num_heads, self.head_dim)), "dt": dt, "A": -torch.exp(_wide(self.A_log)),
            "B": B.unflatten(-1, groups), "C": C.unflatten(-1, groups), "D": self._skip(),
            "dt_bias": self.dt_bias, "dt_softplus": True, "dt_limit": self.dt_limit,
        }, (z, x.dtype)  # fmt: skip

    def _skip(self) -> Tensor:
        """D as [H] or [H, P]."""
        return self.D if len(self.D) == self.num_heads else self.D.unflatten(0, (self.num_heads, self.head_dim))

    def _output(self, o: Tensor, for_output: Any) -> Tensor:
        y, (z, dtype) = o.flatten(-2), for_output
        return self.out_proj((_wide(y) * F.silu(_wide(z)) if self.norm is None else self.norm(y, z)).to(dtype))

