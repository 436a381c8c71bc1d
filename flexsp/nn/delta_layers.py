"""Token mixers of the delta rules: `DeltaNet`, `GatedDeltaNet`, `KimiDeltaAttention`, `GatedDeltaNet2` and
`GatedDeltaProduct`.

Parameters are named and laid out as in flash-linear-attention, so a state_dict of either loads into the other. Like
`flexsp.nn.SimpleGLA` all five work on packed documents, under sequence parallelism and token by token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexsp.exceptions import check_flags, check_integer, fail
from flexsp.nn.norm import GatedRMSNorm, RMSNorm, check_choice, check_eps
from flexsp.nn.recurrent import RecurrentLayer, _wide, head_size
from flexsp.nn.start import start_rates, start_steps
from flexsp.ops import (
    chunk_delta_rule,
    chunk_gated_delta_product,
    chunk_gated_delta_rule,
    chunk_gdn2,
    chunk_kda,
    recurrent_delta_rule,
    recurrent_gated_delta_product,
    recurrent_gated_delta_rule,
    recurrent_gdn2,
    recurrent_kda,
)
from flexsp.ops._delta import activated, beta_of, check_bound
from flexsp.ops._validate import MAX_HEAD_DIM, MAX_VALUE_DIM


class _DeltaLayer(RecurrentLayer):
    """The base of the layers of this file: projections, convolutions, decay, output norm and gate.

    Constructors call `_add_projections`, `_add_qkv_convolutions`, `_add_output` and, for a decay, `_add_decay`.
    `_tokens` makes the op's arguments.
    """

    _branches = ("q", "k", "v")
    _least_rate = 0.0  # e^{A_log} begins uniform from here to 16
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    g_proj: nn.Module | None
    o_proj: nn.Linear
    o_norm: RMSNorm

    def _add_projections(
        self, hidden_size: int, heads: tuple[int, int], head_dims: tuple[int, int], steps: int = 1
    ) -> None:
        """Projections to q of heads (H, K), and to k (H, K) and v (HV, V) of each step of a token."""
        self.hidden_size = hidden_size
        self.num_heads, self.num_v_heads = heads
        self.head_k_dim, self.head_v_dim = head_dims
        self.key_dim, self.value_dim = heads[0] * head_dims[0], heads[1] * head_dims[1]
        self._steps = steps
        self._add_branches((self.key_dim, self.key_dim * steps, self.value_dim * steps))

    def _add_qkv_convolutions(
        self, use_short_conv: bool, size: int, bias: bool, qk_activation: str | None = "silu"
    ) -> None:
        self._add_convolutions(use_short_conv, size, bias, (qk_activation, qk_activation, "silu"))

    def _add_output(self, gate: nn.Module | None, norm_eps: float, activation: str = "silu") -> None:
        eps = check_eps("norm_eps", norm_eps)
        self.g_proj = gate
        if gate is None:
            self.o_norm = RMSNorm(self.head_v_dim, eps)
        else:
            self.o_norm = GatedRMSNorm(self.head_v_dim, eps, activation=activation)
        self.o_proj = nn.Linear(self.value_dim, self.hidden_size, bias=False)

    def _add_decay(self, n_rates: int, n_biases: int) -> None:
        """The parameters of a log gate -e^{A_log} softplus(x + dt_bias)."""
        self.A_log = nn.Parameter(torch.empty(n_rates))
        self.dt_bias = nn.Parameter(torch.empty(n_biases))

    def reset_parameters(self) -> None:
        """The initialisation of the decay's parameters: e^{A_log} uniform up to 16, and dt_bias as in `Mamba2`."""
        if hasattr(self, "A_log"):
            with torch.no_grad():
                start_rates(self.A_log, self._least_rate, 16.0, floor=1e-4)
                start_steps(self.dt_bias, 1e-3, 1e-1, 0.0)

    def _state_shape(self, batch: int) -> tuple[int, ...]:
        return batch, self.num_v_heads, self.head_k_dim, self.head_v_dim

    def _arguments(self, mixed: Tensor, x: Tensor, *context: Any) -> tuple[dict[str, Any], Tensor]:
        return self._tokens(*self._heads(mixed), x), x

    def _activated(self, qkv: Tensor) -> tuple[Tensor, ...]:
        return F.silu(qkv).split(self._widths, dim=-1)

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, T, H, K], k [B, T n, H, K] and v [B, T n, HV, V] of n steps a token."""
        q, k, v = self._activated(qkv)
        of_key, of_value = (self.num_heads, self.head_k_dim), (self.num_v_heads, self.head_v_dim)
        return q.unflatten(-1, of_key), self._by_step(k, of_key), self._by_step(v, of_value)

    def _by_step(self, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """[B, T, n * ...] as [B, T n, ...]."""
        return x.unflatten(-1, (self._steps, *sizes)).flatten(1, 2)

    def _tokens(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> dict[str, Any]:
        raise NotImplementedError

    def _output(self, o: Tensor, x: Tensor) -> Tensor:
        if self.g_proj is None:
            o = self.o_norm(o)
        else:
            o = self.o_norm(o, self.g_proj(x).unflatten(-1, (self.num_v_heads, self.head_v_dim)))
        return self.o_proj(o.flatten(-2).to(x.dtype))


class DeltaNet(_DeltaLayer):
    """Linear attention with the delta rule (Yang et al. 2024, arXiv 2406.06484).

    ``S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T, o_t = K**-0.5 q_t S_t``, with q, k, v from projections
    followed by short causal convolutions and activations, q and k of length 1, ``beta = sigmoid(W_b x)``, and
    ``y = W_o norm(o)``, or with ``use_gate`` ``y = W_o (norm(o) * silu(W_g x))``.

    Args:
        hidden_size: model width D.
        num_heads: heads H.
        expand_k: heads have K = hidden_size * expand_k / num_heads, 1 to 256.
        expand_v: and V = hidden_size * expand_v / num_heads, as K.
        use_beta: else beta is 1.
        use_gate: multiply the normed output by silu(W_g x).
        use_short_conv: convolutions over q, k and v.
        conv_size: their tokens.
        conv_bias: whether they have biases.
        allow_neg_eigval: beta doubles, so that the state's transition has eigenvalues from -1 to 1.
        qk_activation: of q and k, ``"silu"``, ``"relu"``, ``"elu"`` (elu + 1) or ``"identity"``; v has silu.
        qk_norm: ``"l2"`` divides q and k by sqrt(sum of squares + 1e-6), ``"sum"`` by the sum of absolute values.
        norm_eps: of the output norm, which is over each head's V; at least 0.

    Raises:
        ValueError: an argument that is none of these, which the message names.
    """

    _ops = (chunk_delta_rule, recurrent_delta_rule)

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        use_beta: bool = True,
        use_gate: bool = False,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        allow_neg_eigval: bool = False,
        qk_activation: str = "silu",
        qk_norm: str = "l2",
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        hidden_size = check_integer("hidden_size", hidden_size, least=1)
        num_heads = check_integer("num_heads", num_heads, least=1)
        check_flags(use_beta=use_beta, use_gate=use_gate, allow_neg_eigval=allow_neg_eigval)
        self.qk_activation = check_choice("qk_activation", qk_activation, ("silu", "relu", "elu", "identity"))
        self.qk_norm = check_choice("qk_norm", qk_norm, ("l2", "sum"))
        self.allow_neg_eigval = allow_neg_eigval
        K = head_size("expand_k", hidden_size, expand_k, num_heads)
        V = head_size("expand_v", hidden_size, expand_v, num_heads, MAX_VALUE_DIM)
        self._add_projections(hidden_size, (num_heads, num_heads), (K, V))
        self.b_proj = nn.Linear(hidden_size, num_heads, bias=False) if use_beta else None
        self._add_qkv_convolutions(use_short_conv, conv_size, conv_bias, "silu" if qk_activation == "silu" else None)
        self._add_output(nn.Linear(hidden_size, self.value_dim, bias=False) if use_gate else None, norm_eps)

    def _activated(self, qkv: Tensor) -> tuple[Tensor, ...]:
        if self.qk_activation == "silu":
            return super()._activated(qkv)
        qk, v = qkv.split([2 * self.key_dim, self.value_dim], dim=-1)
        if self.qk_activation == "relu":
            qk = F.relu(qk)
        elif self.qk_activation == "elu":
            qk = torch.where(qk >= 0, qk + 1, qk.clamp(max=0).exp())  # small values keep their digits
        return (*qk.chunk(2, dim=-1), F.silu(v))

    def _tokens(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> dict[str, Any]:
        if self.qk_norm == "sum":
            q, k = (F.normalize(_wide(t), p=1, dim=-1, eps=1e-6).to(t.dtype) for t in (q, k))
        if self.b_proj is None:
            beta = torch.full_like(q[..., 0], 2.0 if self.allow_neg_eigval else 1.0)
        else:
            beta = beta_of(self.b_proj(x), True, self.allow_neg_eigval)
        return {"q": q, "k": k, "v": v, "beta": beta, "use_qk_l2norm_in_kernel": self.qk_norm == "l2"}


class GatedDeltaNet(_DeltaLayer):
    """The delta rule with one gate a head and token (Yang et al. 2024, arXiv 2412.06464).

    ``S_t = e^{g_t} (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T, o_t = K**-0.5 q_t S_t``, with q, k, v from
    projections followed by short causal convolutions and SiLU, q and k of length 1, ``beta = sigmoid(W_b x)``,
    ``g = -e^{A_log} softplus(W_a x + dt_bias)`` (natural log), and ``y = W_o (norm(o) * silu(W_g x))``.

    Args:
        hidden_size: model width D.
        num_heads: heads H of q and k.
        head_dim: their K, 1 to 256.
        expand_v: heads of v have V = head_dim * expand_v, as K.
        num_v_heads: heads HV of v, gates and state, a multiple of H, by default H; head h reads those of q and k at
            h // (HV / H).
        use_gate: multiply the normed output by silu(W_g x).
        use_short_conv: convolutions over q, k and v.
        allow_neg_eigval: beta doubles, so that the state's transition has eigenvalues from -1 to 1.
        conv_size: tokens of the convolutions.
        conv_bias: whether they have biases.
        norm_eps: of the output norm, which is over each head's V; at least 0.
        output_gate_activation: ``"swish"`` or ``"silu"``, the same, or ``"sigmoid"``.

    Raises:
        ValueError: an argument that is none of these, which the message names.
    """

    _ops = (chunk_gated_delta_rule, recurrent_gated_delta_rule)
    _shown = ("num_heads", "num_v_heads", "head_k_dim", "head_v_dim")

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        expand_v: float = 2.0,
        num_v_heads: int | None = None,
        use_gate: bool = True,
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        norm_eps: float = 1e-5,
        output_gate_activation: str = "swish",
    ) -> None:
        super().__init__()
        check_flags(use_gate=use_gate, allow_neg_eigval=allow_neg_eigval)
        check_choice("output_gate_activation", output_gate_activation, ("swish", "silu", "sigmoid"))
        self.allow_neg_eigval = allow_neg_eigval
        self._add_projections(*_grouped(hidden_size, num_heads, num_v_heads, head_dim, expand_v))
        self.a_proj = nn.Linear(self.hidden_size, self.num_v_heads, bias=False)
        self.b_proj = nn.Linear(self.hidden_size, self.num_v_heads, bias=False)
        self._add_decay(self.num_v_heads, self.num_v_heads)
        self._add_qkv_convolutions(use_short_conv, conv_size, conv_bias)
        gate = nn.Linear(self.hidden_size, self.value_dim, bias=False) if use_gate else None
        self._add_output(gate, norm_eps, "sigmoid" if output_gate_activation == "sigmoid" else "silu")
        self.reset_parameters()

    def _tokens(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> dict[str, Any]:
        return {
            "q": q, "k": k, "v": v, "g": self.a_proj(x), "beta": self.b_proj(x), "A_log": _wide(self.A_log),
            "dt_bias": _wide(self.dt_bias), "allow_neg_eigval": self.allow_neg_eigval, "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True, "use_qk_l2norm_in_kernel": True,
        }  # fmt: skip


class KimiDeltaAttention(_DeltaLayer):
    """Kimi Delta Attention: the delta rule with one gate a key channel and token (Kimi Team 2025, arXiv 2510.26692).

    ``S_t = (I - beta_t k_t k_t^T) diag(e^{g_t}) S_{t-1} + beta_t k_t v_t^T, o_t = K**-0.5 q_t S_t``, with q, k, v from
    projections followed by short causal convolutions and SiLU, q and k of length 1, ``beta = sigmoid(W_b x)``,
    ``g = -e^{A_log} softplus(f(x) + dt_bias)`` (natural log), or with ``lower_bound``
    ``g = lower_bound sigmoid(e^{A_log} (f(x) + dt_bias))``, and ``y = W_o (norm(o) * sigmoid(h(x)))``; f and h are
    pairs of linear maps with V channels between them.

    Args:
        hidden_size: model width D.
        num_heads: heads H of q and k.
        head_dim: their K, 1 to 256.
        expand_v: heads of v have V = head_dim * expand_v, as K.
        num_v_heads: heads HV of v, gates and state, a multiple of H, by default H; head h reads those of q and k at
            h // (HV / H).
        use_short_conv: convolutions over q, k and v.
        allow_neg_eigval: beta doubles, so that the state's transition has eigenvalues from -1 to 1.
        safe_gate: A_log is initialised to 0; needs a ``lower_bound`` of at least -5.
        lower_bound: the gates lie between this number below 0 and 0.
        conv_size: tokens of the convolutions.
        conv_bias: whether they have biases.
        norm_eps: of the output norm, which is over each head's V; at least 0.

    Raises:
        ValueError: an argument that is none of these, which the message names.
    """

    _ops = (chunk_kda, recurrent_kda)
    _shown = ("num_heads", "num_v_heads", "head_k_dim", "head_v_dim")
    _least_rate = 1.0

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int = 128,
        expand_v: float = 1.0,
        num_v_heads: int | None = None,
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        lower_bound: float | None = None,
        conv_size: int = 4,
        conv_bias: bool = False,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        check_flags(allow_neg_eigval=allow_neg_eigval, safe_gate=safe_gate)
        check_bound(lower_bound, safe_gate)
        self.allow_neg_eigval, self.safe_gate, self.lower_bound = allow_neg_eigval, safe_gate, lower_bound
        self._add_projections(*_grouped(hidden_size, num_heads, num_v_heads, head_dim, expand_v))
        self._add_qkv_convolutions(use_short_conv, conv_size, conv_bias)
        gates, V = self.num_v_heads * self.head_k_dim, self.head_v_dim
        self.f_proj = nn.Sequential(nn.Linear(self.hidden_size, V, bias=False), nn.Linear(V, gates, bias=False))
        self.b_proj = nn.Linear(self.hidden_size, self.num_v_heads, bias=False)
        self._add_decay(self.num_v_heads, gates)
        gate = nn.Sequential(nn.Linear(self.hidden_size, V, bias=False), nn.Linear(V, self.value_dim))
        self._add_output(gate, norm_eps, "sigmoid")
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The initialisation of the decay's parameters: e^{A_log} uniform in 1..16 or, with safe_gate, 1, and dt_bias
        as in `Mamba2`."""
        super().reset_parameters()
        if self.safe_gate:
            nn.init.zeros_(self.A_log)

    def _tokens(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> dict[str, Any]:
        g = self.f_proj(x).unflatten(-1, (self.num_v_heads, self.head_k_dim))
        return {
            "q": q, "k": k, "v": v, "g": g, "beta": self.b_proj(x), "A_log": _wide(self.A_log),
            "dt_bias": _wide(self.dt_bias), "allow_neg_eigval": self.allow_neg_eigval, "lower_bound": self.lower_bound,
            "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "use_qk_l2norm_in_kernel": True,
        }  # fmt: skip


class GatedDeltaNet2(_DeltaLayer):
    """Gated DeltaNet-2: one gate a key channel, and strengths of erasing and of writing by channel (arXiv 2605.22791).

    ``S_t = (I - k_t (b_t * k_t)^T) diag(e^{g_t}) S_{t-1} + k_t (w_t * v_t)^T, o_t = K**-0.5 q_t S_t``, with q, k, v
    from projections followed by short causal convolutions and SiLU, q and k of length 1, ``b = sigmoid(W_b x)``,
    ``w = sigmoid(W_w x)``, ``g = -e^{A_log} softplus(f(x) + dt_bias)`` (natural log), and
    ``y = W_o (norm(o) * sigmoid(h(x)))``; f and h are pairs of linear maps with V channels between them.

    Args:
        hidden_size: model width D.
        num_heads: heads H of q, k, b and gates.
        head_dim: their K, 1 to 256.
        expand_v: heads of v and w have V = head_dim * expand_v, up to 512.
        num_v_heads: heads HV of v, w and state, a multiple of H, by default H; head h reads those of q, k, b and gates
            at h // (HV / H).
        use_short_conv: convolutions over q, k and v.
        allow_neg_eigval: b doubles, so that the state's transition has eigenvalues from -1 to 1.
        conv_size: tokens of the convolutions.
        conv_bias: whether they have biases.
        norm_eps: of the output norm, which is over each head's V; at least 0.

    Raises:
        ValueError: an argument that is none of these, which the message names.
    """

    _ops = (chunk_gdn2, recurrent_gdn2)
    _shown = ("num_heads", "num_v_heads", "head_k_dim", "head_v_dim")
    _least_rate = 1.0

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int = 128,
        expand_v: float = 1.0,
        num_v_heads: int | None = None,
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        check_flags(allow_neg_eigval=allow_neg_eigval)
        self.allow_neg_eigval = allow_neg_eigval
        self._add_projections(*_grouped(hidden_size, num_heads, num_v_heads, head_dim, expand_v))
        self._add_qkv_convolutions(use_short_conv, conv_size, conv_bias)
        D, V = self.hidden_size, self.head_v_dim
        self.f_proj = nn.Sequential(nn.Linear(D, V, bias=False), nn.Linear(V, self.key_dim, bias=False))
        self.b_proj = nn.Linear(D, self.key_dim, bias=False)
        self.w_proj = nn.Linear(D, self.value_dim, bias=False)
        self._add_decay(self.num_heads, self.key_dim)
        self._add_output(nn.Sequential(nn.Linear(D, V, bias=False), nn.Linear(V, self.value_dim)), norm_eps, "sigmoid")
        self.reset_parameters()

    def _tokens(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> dict[str, Any]:
        b, w = self.b_proj(x).sigmoid(), self.w_proj(x).sigmoid()
        g, A_log, bias = self.f_proj(x), _wide(self.A_log), _wide(self.dt_bias).unflatten(-1, q.shape[2:])
        g, b = (y.unflatten(-1, q.shape[2:]) for y in (g, 2 * b if self.allow_neg_eigval else b))
        if (repeats := self.num_v_heads // self.num_heads) > 1:
            g, b = (y.repeat_interleave(repeats, 2) for y in (g, b))
            A_log, bias = (y.repeat_interleave(repeats, 0) for y in (A_log, bias))
        return {
            "q": q, "k": k, "v": v, "g": g, "b": b, "w": w.unflatten(-1, v.shape[2:]), "A_log": A_log, "dt_bias": bias,
            "use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True,
        }  # fmt: skip


class GatedDeltaProduct(_DeltaLayer):
    """Several steps of the delta rule a token, after one decay (Siems et al. 2025, arXiv 2502.10297).

    ``S_t = e^{g_t} S_{t-1}``, then ``S_t <- (I - beta_j k_j k_j^T) S_t + beta_j k_j v_j^T`` for the token's steps j in
    turn, ``o_t = K**-0.5 q_t S_t``, with q, and k, v and beta of each step, from projections followed by short causal
    convolutions and SiLU, q and k of length 1, ``beta = 2 sigmoid(W_b x)``,
    ``g = -e^{A_log} softplus(W_a x + dt_bias)`` (natural log), and ``y = W_o (norm(o) * silu(W_g x))``.

    Args:
        hidden_size: model width D.
        num_heads: heads H of q and k.
        head_dim: their K, 1 to 256.
        expand_v: heads of v have V = head_dim * expand_v, as K.
        num_v_heads: heads HV of v, gates and state, a multiple of H, by default H; head h reads those of q and k at
            h // (HV / H).
        use_output_gate: multiply the normed output by silu(W_g x).
        use_short_conv: convolutions over q, k and v.
        conv_size: their tokens.
        conv_bias: whether they have biases.
        norm_eps: of the output norm, which is over each head's V; at least 0.
        use_forget_gate: else g is 0.
        allow_neg_eigval: else ``beta = sigmoid(W_b x)``.
        num_householder: steps a token, at least 1.

    Raises:
        ValueError: an argument that is none of these, which the message names.
    """

    _ops = (chunk_gated_delta_product, recurrent_gated_delta_product)
    _shown = ("num_heads", "num_v_heads", "head_k_dim", "head_v_dim", "num_householder")

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        expand_v: float = 2.0,
        num_v_heads: int | None = None,
        use_output_gate: bool = True,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        norm_eps: float = 1e-5,
        use_forget_gate: bool = True,
        allow_neg_eigval: bool = True,
        num_householder: int = 2,
    ) -> None:
        super().__init__()
        check_flags(use_output_gate=use_output_gate, use_forget_gate=use_forget_gate, allow_neg_eigval=allow_neg_eigval)
        self.use_forget_gate, self.allow_neg_eigval = use_forget_gate, allow_neg_eigval
        self.num_householder = n = check_integer("num_householder", num_householder, least=1)
        self._add_projections(*_grouped(hidden_size, num_heads, num_v_heads, head_dim, expand_v), steps=n)
        self.b_proj = nn.Linear(self.hidden_size, self.num_v_heads * n, bias=False)
        if use_forget_gate:
            self.a_proj = nn.Linear(self.hidden_size, self.num_v_heads, bias=False)
            self._add_decay(self.num_v_heads, self.num_v_heads)
        self._add_qkv_convolutions(use_short_conv, conv_size, conv_bias)
        gate = nn.Linear(self.hidden_size, self.value_dim, bias=False) if use_output_gate else None
        self._add_output(gate, norm_eps)
        self.reset_parameters()

    def _tokens(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> dict[str, Any]:
        beta, g = beta_of(self.b_proj(x), True, self.allow_neg_eigval), None
        if self.use_forget_gate:
            g = activated(self.a_proj(x), q, _wide(self.A_log), _wide(self.dt_bias))
        return {
            "q": q, "k": k, "v": v, "g": g, "beta": self._by_step(beta, (self.num_v_heads,)),
            "num_householder": self.num_householder, "use_qk_l2norm_in_kernel": True,
        }  # fmt: skip


def _grouped(
    hidden_size: Any, num_heads: Any, num_v_heads: Any, head_dim: Any, expand_v: Any
) -> tuple[int, tuple[int, int], tuple[int, int]]:
    """The width, the heads (H, HV) and their channels (K, V), checked."""
    hidden_size = check_integer("hidden_size", hidden_size, least=1)
    num_heads = check_integer("num_heads", num_heads, least=1)
    head_dim = check_integer("head_dim", head_dim, least=1, most=MAX_HEAD_DIM)
    if num_v_heads is None:
        num_v_heads = num_heads
    elif check_integer("num_v_heads", num_v_heads, least=1) % num_heads:
        fail("num_v_heads", f"a multiple of num_heads={num_heads}", num_v_heads)
    V = head_size("expand_v", head_dim, expand_v, most=MAX_VALUE_DIM)
    return hidden_size, (num_heads, num_v_heads), (head_dim, V)
