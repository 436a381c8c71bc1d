"""The mLSTM layer of xLSTM: `MLSTM`."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flexsp.exceptions import check_flag, check_integer, check_number, fail
from flexsp.nn.norm import HeadNorm, check_eps, check_input
from flexsp.nn.recurrent import RecurrentLayer, _wide, head_size
from flexsp.nn.start import StartedLinear, assign
from flexsp.ops import chunk_mlstm, recurrent_mlstm
from flexsp.ops._validate import MAX_VALUE_DIM


def _with_states(op: Any, initial_state: Any, output_final_state: bool, **given: Any) -> tuple[Tensor, Any]:
    c, n, m = (None, None, None) if initial_state is None else initial_state
    states = {"c_initial": c, "n_initial": n, "m_initial": m, "return_last_states": output_final_state}
    return op(**given, **states, head_first=False)  # type: ignore[no-any-return]


def _start_forget_gates(bias: Tensor) -> None:
    """The biases go from 3 to 6 over the heads, as in xLSTM."""
    assign(bias, torch.linspace(3.0, 6.0, len(bias), dtype=bias.dtype, device=bias.device))


class MLSTM(RecurrentLayer):
    """The mLSTM layer of xLSTM (Beck et al. 2024, arXiv 2405.04517).

    Its parameters have the names of those of ``mLSTMLayer`` in the package xlstm (arXiv 2503.13427), with
    ``weight_mode="single"``. The heads of xLSTM 7B have K = 256 and V = 512.

    ``h`` is `flexsp.ops.chunk_mlstm` of q, k, v from projections and of gates ``i = cap(W_i x + b_i)`` (a natural
    logarithm) and ``f = cap(W_f x + b_f)`` (before a sigmoid), with ``cap(z) = gate_soft_cap tanh(z / gate_soft_cap)``,
    and ``y = W_out (sigmoid(W_o x) * norm(h))`` with a layer norm over each head's V.

    Args:
        hidden_size: model width D.
        num_heads: heads H.
        qk_dim_factor: heads have K = hidden_size * qk_dim_factor / num_heads, 1 to 256.
        v_dim_factor: and V = hidden_size * v_dim_factor / num_heads, 1 to 512.
        use_bias: biases of the projections, but for those of i and f, which always have them, and of the norm.
        gate_soft_cap: the cap of i and f, above 0, or None.
        norm_eps: of the norm, at least 0.
        eps: added to the stabilised denominator, at least 0.
        use_short_conv: short causal convolutions and SiLU after the projections of q, k and v; xLSTM 7B has none.
        conv_size: their tokens.
        conv_bias: whether they have biases.

    The state of its cache is (C [B, H, K, V], n [B, H, K], m [B, H, 1]).

    Raises:
        ValueError: an argument that is none of these, which the message names.
    """

    _ops = (functools.partial(_with_states, chunk_mlstm), functools.partial(_with_states, recurrent_mlstm))
    _branches = _projection_names = ("q", "k", "v")

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        qk_dim_factor: float = 0.5,
        v_dim_factor: float = 1.0,
        use_bias: bool = False,
        gate_soft_cap: float | None = 15.0,
        norm_eps: float = 1e-6,
        eps: float = 1e-6,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size = check_integer("hidden_size", hidden_size, least=1)
        self.num_heads = num_heads = check_integer("num_heads", num_heads, least=1)
        self.head_k_dim = head_size("qk_dim_factor", hidden_size, qk_dim_factor, num_heads)
        self.head_v_dim = head_size("v_dim_factor", hidden_size, v_dim_factor, num_heads, MAX_VALUE_DIM)
        check_flag("use_bias", use_bias)
        self.gate_soft_cap = None if gate_soft_cap is None else check_number("gate_soft_cap", gate_soft_cap, above=0)
        self.eps = check_eps("eps", eps)
        keys, values = num_heads * self.head_k_dim, num_heads * self.head_v_dim
        self._widths = keys, keys, values
        self.q = nn.Linear(hidden_size, keys, bias=use_bias)
        self.k = nn.Linear(hidden_size, keys, bias=use_bias)
        self.v = nn.Linear(hidden_size, values, bias=use_bias)
        self.ogate_preact = nn.Linear(hidden_size, values, bias=use_bias)
        closed = functools.partial(nn.init.constant_, val=-10.0)  # as in xLSTM 7B
        self.igate_preact = StartedLinear(hidden_size, num_heads, bias=closed)
        self.fgate_preact = StartedLinear(hidden_size, num_heads, bias=_start_forget_gates)
        self._add_convolutions(use_short_conv, conv_size, conv_bias, ("silu",) * 3)
        self.multihead_norm = HeadNorm(values, check_eps("norm_eps", norm_eps), bias=use_bias)
        self.out_proj = nn.Linear(values, hidden_size, bias=use_bias)

    def _check_state(self, state: Any, batch: int) -> None:
        if not isinstance(state, tuple) or len(state) != 3:
            fail("cache.state", "the states (C, n, m), see init_cache", type(state).__name__)
        for at, (x, shape) in enumerate(zip(state, self._state_shape(batch), strict=True)):
            check_input(f"cache.state[{at}]", x, shape)

    def _state_shape(self, batch: int) -> tuple[tuple[int, ...], ...]:
        H, K, V = self.num_heads, self.head_k_dim, self.head_v_dim
        return (batch, H, K, V), (batch, H, K), (batch, H, 1)

    def _arguments(self, mixed: Tensor, x: Tensor, *context: Any) -> tuple[dict[str, Any], Tensor]:
        parts = (F.silu(mixed) if self.use_short_conv else mixed).split(self._widths, dim=-1)
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)) for part in parts)
        i, f = (self._capped(gate(x)) for gate in (self.igate_preact, self.fgate_preact))
        return {"q": q, "k": k, "v": v, "i": i, "f": f, "eps": self.eps}, x

    def _capped(self, gate: Tensor) -> Tensor:
        wide, cap = _wide(gate), self.gate_soft_cap
        return wide if cap is None else cap * torch.tanh(wide / cap)

    def _output(self, o: Tensor, x: Tensor) -> Tensor:
        gated = _wide(self.ogate_preact(x)).sigmoid() * self.multihead_norm(o).flatten(-2)
        return self.out_proj(gated.to(x.dtype))
