"""The layer of Mamba-1: `Mamba`."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexsp.exceptions import check_flags, check_integer
from flexsp.nn.conv import ShortConvolution
from flexsp.nn.norm import check_choice
from flexsp.nn.recurrent import RecurrentLayer, _project, _wide, expanded
from flexsp.nn.start import StartedLinear, assign, check_starts, positive, start_steps
from flexsp.ops import recurrent_selective_scan, selective_scan
from flexsp.ops._validate import MAX_HEAD_DIM


class Mamba(RecurrentLayer):
    """Mamba-1 (Gu & Dao 2023, arXiv 2312.00752), parameters named and laid out as in the authors' code.

    ``[x, z] = W_in u``, a short causal convolution and SiLU over x, ``[r, B, C] = W_x x``,
    ``dt = softplus(W_dt r + b_dt)``, ``h_t = e^{dt A} h_{t-1} + dt B x``, ``y = (C h + D x) silu(z)`` with
    ``A = -e^{A_log}`` (natural log), of every channel by itself; then ``out = W_out y``.

    Args:
        hidden_size: model width.
        state_size: N, numbers of the state a channel, 1 to 256.
        expand: inner width = expand * hidden_size.
        dt_rank: channels of r, by default hidden_size / 16, rounded up.
        conv_size: tokens of the convolution.
        conv_bias: whether it has a bias.
        bias: biases of W_in and W_out.
        dt_min: softplus(b_dt) is initialised log-uniform between this and ``dt_max``; 0 < dt_min <= dt_max.
        dt_max: see ``dt_min``.
        dt_init: of W_dt: "random", uniform in +- dt_scale / sqrt(dt_rank), or "constant", that number.
        dt_scale: above 0.
        dt_init_floor: the least value of softplus of that bias at initialisation; 0 for no limit.
        discretization: of B, "euler" or "zoh", as in `flexsp.ops.selective_scan`.

    Raises:
        ValueError: an argument that is none of these, which the message names.
    """

    _ops = (selective_scan, recurrent_selective_scan)
    _shown = ("state_size", "inner_size", "dt_rank")
    _want_final = "return_last_state"
    _projection_names = ("in_proj",)
    _convolution_names = ("conv1d",)

    def __init__(
        self,
        hidden_size: int,
        state_size: int = 16,
        expand: float = 2,
        dt_rank: int | None = None,
        conv_size: int = 4,
        conv_bias: bool = True,
        bias: bool = False,
        dt_min: float = 1e-3,
        dt_max: float = 1e-1,
        dt_init: str = "random",
        dt_scale: float = 1.0,
        dt_init_floor: float = 1e-4,
        discretization: str = "euler",
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size = check_integer("hidden_size", hidden_size, least=1)
        self.state_size = state_size = check_integer("state_size", state_size, least=1, most=MAX_HEAD_DIM)
        self.inner_size = width = expanded("expand", hidden_size, expand)
        rank = -(-hidden_size // 16) if dt_rank is None else check_integer("dt_rank", dt_rank, least=1)
        self.dt_rank = rank
        check_integer("conv_size", conv_size, least=1)
        check_flags(conv_bias=conv_bias, bias=bias)
        check_starts(dt_min, dt_max, dt_init_floor, (1.0, 1.0))
        check_choice("dt_init", dt_init, ("random", "constant"))
        self.discretization = check_choice("discretization", discretization, ("euler", "zoh"))
        most = positive("dt_scale", dt_scale) / math.sqrt(rank)
        if dt_init == "random":
            weight = functools.partial(nn.init.uniform_, a=-most, b=most)
        else:
            weight = functools.partial(nn.init.constant_, val=most)
        steps = functools.partial(start_steps, low=dt_min, high=dt_max, floor=dt_init_floor)
        self.in_proj = nn.Linear(hidden_size, 2 * width, bias=bias)
        self.conv1d = ShortConvolution(width, conv_size, bias=conv_bias)
        self.x_proj = nn.Linear(width, rank + 2 * state_size, bias=False)
        self.dt_proj = StartedLinear(rank, width, weight, steps)
        self.A_log = nn.Parameter(torch.empty(width, state_size))
        self.D = nn.Parameter(torch.empty(width))
        self.out_proj = nn.Linear(width, hidden_size, bias=bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The authors' initialisation of D and A_log: -A is 1..N in every channel (S4D-Real)."""
        rates = torch.arange(1, self.state_size + 1, dtype=self.A_log.dtype, device=self.A_log.device)
        with torch.no_grad():
            assign(self.A_log, rates.log().expand(self.A_log.shape))
            self.D.fill_(1.0)

    def _state_shape(self, batch: int) -> tuple[int, ...]:
        return batch, self.inner_size, self.state_size

    def _projected(self, x: Tensor) -> tuple[Tensor, ...]:
        return _project(self.in_proj, x).chunk(2, dim=-1)

    def _convolved(self, x: Any, *how: Any) -> tuple[Any, Tensor | None]:
        mixed, z = x
        mixed, conv_cache = super()._convolved(mixed, *how)
        return (mixed, z), conv_cache

    def _arguments(self, mixed: Any, x: Tensor, *context: Any) -> tuple[dict[str, Any], Any]:
        mixed, z = mixed
        r, B, C = self.x_proj(mixed).split([self.dt_rank, self.state_size, self.state_size], dim=-1)
        delta = F.linear(r, self.dt_proj.weight)  # the bias is added in the accumulation dtype
        return {
            "u": mixed, "delta": delta, "A": -torch.exp(_wide(self.A_log)), "B": B, "C": C, "D": _wide(self.D), "z": z,
            "delta_bias": _wide(self.dt_proj.bias), "delta_softplus": True, "discretization": self.discretization,
        }, x.dtype  # fmt: skip

    def _output(self, o: Tensor, dtype: torch.dtype) -> Tensor:
        return self.out_proj(o.to(dtype))
