"""The token mixer of Mamba-3."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexsp.exceptions import check_flags, check_integer, check_number, fail
from flexsp.nn.norm import GatedRMSNorm, RMSNorm, check_eps, check_input
from flexsp.nn.recurrent import RecurrentLayer, _wide, expanded
from flexsp.nn.start import check_starts, start_steps
from flexsp.ops import Mamba3State, mamba3, recurrent_mamba3
from flexsp.ops._validate import MAX_HEAD_DIM, MAX_VALUE_DIM

__all__ = ["Mamba3"]


class Mamba3(RecurrentLayer):
    """Mamba-3 (Lahoti et al. 2026, ICLR), parameters named and laid out as in the authors' code.

    ``[z, x, B, C, dt, A, trap, angles] = W_in u``; ``dt = softplus(dt + dt_bias)``, ``A = -max(softplus(A), A_floor)``;
    B and C pass a norm and get biases; then the recurrence of `flexsp.ops.mamba3`, and ``out = W_out (y * silu(z))``.
    With ``is_mimo`` a head has R rows of B and C, ``out = W_out sum_j mimo_o_j * (y_j * silu(mimo_z_j * z))``, and
    rotations pair channels i and i + K / 2 instead of 2 i and 2 i + 1. There is no convolution. The cache is the
    `flexsp.ops.Mamba3State` of the op.

    Args:
        hidden_size: model width.
        state_size: K, channels of B and C, 2 to 256, even with ``is_mimo``.
        expand: inner width = expand * hidden_size.
        head_dim: P, channels a head, 1 to 512; a divisor of the inner width.
        n_groups: groups of heads that share B and C; a divisor of the number of heads.
        rope_fraction: the part of state_size that is rotated, 0.5 or 1.
        dt_min: softplus(dt_bias) is initialised log-uniform between this and ``dt_max``; 0 < dt_min <= dt_max.
        dt_max: see ``dt_min``.
        dt_init_floor: the least value of softplus of that bias at initialisation; 0 for no limit.
        A_floor: the least -A, at least 0.
        is_outproj_norm: a norm over each head's channels between y and the gate.
        is_mimo: see above.
        mimo_rank: R with ``is_mimo``.
        use_bias: biases of the two projections.
        norm_eps: of the norms; at least 0.

    Raises:
        ValueError: an argument that is none of these, which the message names.
    """

    _ops = (mamba3, recurrent_mamba3)
    _shown = ("num_heads", "head_dim", "state_size", "n_groups", "mimo_rank")
    _projection_names = ("in_proj",)

    def __init__(
        self,
        hidden_size: int,
        state_size: int = 128,
        expand: float = 2,
        head_dim: int = 64,
        n_groups: int = 1,
        rope_fraction: float = 0.5,
        dt_min: float = 1e-3,
        dt_max: float = 1e-1,
        dt_init_floor: float = 1e-4,
        A_floor: float = 1e-4,
        is_outproj_norm: bool = False,
        is_mimo: bool = False,
        mimo_rank: int = 4,
        use_bias: bool = False,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size = check_integer("hidden_size", hidden_size, least=1)
        self.state_size = state_size = check_integer("state_size", state_size, least=2, most=MAX_HEAD_DIM)
        self.head_dim = head_dim = check_integer("head_dim", head_dim, least=1, most=MAX_VALUE_DIM)
        self.n_groups = n_groups = check_integer("n_groups", n_groups, least=1)
        check_flags(is_outproj_norm=is_outproj_norm, is_mimo=is_mimo, use_bias=use_bias)
        self.is_mimo, self.mimo_rank = is_mimo, check_integer("mimo_rank", mimo_rank, least=1) if is_mimo else 1
        if check_number("rope_fraction", rope_fraction) not in (0.5, 1.0):
            fail("rope_fraction", "0.5 or 1", repr(rope_fraction))
        self.num_rope_angles = int(state_size * rope_fraction) // 2
        if self.num_rope_angles < 1 or (is_mimo and state_size % 2):
            fail("state_size", "a size with pairs of channels to rotate, and even with is_mimo", state_size)
        self.A_floor = check_number("A_floor", A_floor)
        if self.A_floor < 0:
            fail("A_floor", "a number >= 0", repr(A_floor))
        check_eps("norm_eps", norm_eps)
        check_starts(dt_min, dt_max, dt_init_floor, (1.0, 1.0))
        self.inner_size = inner = expanded("expand", hidden_size, expand)
        if inner % head_dim:
            fail("head_dim", f"a divisor of expand * hidden_size {inner}", head_dim)
        self.num_heads = H = inner // head_dim
        if H % n_groups:
            fail("n_groups", f"a divisor of the {H} heads", n_groups)
        shared, R = n_groups * state_size * self.mimo_rank, self.mimo_rank
        self._widths = (inner, inner, shared, shared, H, H, H, self.num_rope_angles)
        self.in_proj = nn.Linear(hidden_size, sum(self._widths), bias=use_bias)
        self.dt_bias = nn.Parameter(torch.empty(H))
        self.B_bias, self.C_bias = (nn.Parameter(torch.empty(H, R, state_size)) for _ in range(2))
        self.B_norm, self.C_norm = RMSNorm(state_size, norm_eps), RMSNorm(state_size, norm_eps)
        if is_mimo:
            self.mimo_x, self.mimo_z, self.mimo_o = (nn.Parameter(torch.empty(H, R, head_dim)) for _ in range(3))
        self.D = nn.Parameter(torch.empty(H))
        self.norm = GatedRMSNorm(inner, norm_eps, head_dim) if is_outproj_norm else None
        self.out_proj = nn.Linear(inner, hidden_size, bias=use_bias)
        self._dt_range, self._dt_init_floor = (dt_min, dt_max), dt_init_floor
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The authors' initialisation of dt_bias, the biases of B and C, D and the factors of MIMO."""
        with torch.no_grad():
            start_steps(self.dt_bias, *self._dt_range, self._dt_init_floor)
            for ones in (self.B_bias, self.C_bias, self.D):
                ones.fill_(1.0)
            if self.is_mimo:
                self.mimo_x.fill_(1 / self.mimo_rank)
                self.mimo_z.fill_(1.0)
                self.mimo_o.fill_(1 / self.mimo_rank)

    def forward(  # type: ignore[override]
        self, x: Tensor, cu_seqlens: Tensor | None = None, cache: Mamba3State | None = None
    ) -> Tensor | tuple[Tensor, Mamba3State]:
        """x [B, T, D] -> y [B, T, D]; with a cache (see `init_cache`), ``(y, new cache)``; as the other layers'."""
        return super().forward(x, cu_seqlens, cache)  # type: ignore[arg-type, return-value]

    def step(self, x: Tensor, cache: Mamba3State) -> tuple[Tensor, Mamba3State]:  # type: ignore[override]
        """One token on this rank alone, whatever sp is: x [B, D] or [B, 1, D] -> (y like x, new cache)."""
        return super().step(x, cache)  # type: ignore[arg-type, return-value]

    def init_cache(self, batch: int) -> Mamba3State:  # type: ignore[override]
        """The cache before the first token: zeros."""
        return super().init_cache(batch)  # type: ignore[return-value]

    def _state_shape(self, batch: int) -> tuple[tuple[int, ...], ...]:
        H, K, P = self.num_heads, self.state_size, self.head_dim
        return (batch, H, self.num_rope_angles), (batch, H, K, P), (batch, self.mimo_rank, H, K), (batch, H, P)

    def _check_cache(self, cache: Any, batch: int) -> None:
        if not isinstance(cache, Mamba3State):
            fail("cache", "a Mamba3State, see init_cache", type(cache).__name__)
        for name, part, shape in zip(cache._fields, cache, self._state_shape(batch), strict=True):
            check_input(f"cache.{name}", part, shape)

    def _parts(self, cache: Any) -> tuple[Any, None]:
        return cache, None

    def _cache(self, state: Any, conv: Tensor | None) -> Any:
        return Mamba3State(*state)

    def _arguments(self, mixed: Tensor, x: Tensor, *context: Any) -> tuple[dict[str, Any], Any]:
        z, values, B, C, dt, A, trap, angles = mixed.split(self._widths, dim=-1)
        groups = (self.mimo_rank, self.n_groups, -1) if self.is_mimo else (self.n_groups, -1)
        heads = (self.num_heads, -1)
        return {
            "x": values.unflatten(-1, heads),
            "dt": F.softplus(_wide(dt) + self.dt_bias),
            "A": -F.softplus(_wide(A)).clamp(min=self.A_floor),
            "B": self.B_norm(B.unflatten(-1, groups)),
            "C": self.C_norm(C.unflatten(-1, groups)),
            "trap": trap,
            "angles": angles.unsqueeze(-2),
            "D": self.D,
            "B_bias": self.B_bias if self.is_mimo else self.B_bias.squeeze(1),
            "C_bias": self.C_bias if self.is_mimo else self.C_bias.squeeze(1),
            "mimo_x": self.mimo_x if self.is_mimo else None,
            "rotate_pairwise": not self.is_mimo,
        }, (z.unflatten(-1, heads), x.dtype)

    def _output(self, o: Tensor, for_output: Any) -> Tensor:
        """The layer's output [B, T, D] of y [B, T, H, P], or [B, T, R, H, P] with MIMO, and z [B, T, H, P]."""
        z, dtype = for_output
        y, z = _wide(o), _wide(z)
        if self.is_mimo:
            z = z.unsqueeze(2) * self.mimo_z.transpose(0, 1)
        y, z = y.flatten(-2), z.flatten(-2)
        y = y * F.silu(z) if self.norm is None else self.norm(y, z)
        if self.is_mimo:
            y = (y * self.mimo_o.transpose(0, 1).flatten(1)).sum(2)
        return self.out_proj(y.to(dtype))
