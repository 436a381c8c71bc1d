"""Initialisation of parameters.

Every module with parameters of its own has `reset_parameters`, which its constructor calls. It writes these parameters
and no others. So a model made on the meta device can reset its modules in any order, and its parameters are initialised
as by the constructors, also if they are cut over ranks (DTensor).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flexsp.exceptions import check_number, fail

__all__ = [
    "StartedLinear", "assign", "check_starts", "positive", "start_orthogonal", "start_rates", "start_steps",
]  # fmt: skip

Start = Callable[[Tensor], Any]


class StartedLinear(nn.Linear):
    """`nn.Linear` whose weight and bias these functions initialise.

    Without ``weight`` the weight is initialised as in `nn.Linear`; without ``bias`` there is no bias.
    """

    def __init__(self, inputs: int, outputs: int, weight: Start | None = None, bias: Start | None = None) -> None:
        self._starts = weight, bias  # before nn.Linear's constructor, which calls reset_parameters
        super().__init__(inputs, outputs, bias=bias is not None)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        weight, bias = self._starts
        if weight is None:
            nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        else:
            weight(self.weight)
        if bias is not None:
            bias(self.bias)


def assign(parameter: Tensor, values: Tensor, drawn: bool = False) -> None:
    """Writes the values of a whole parameter, of which this rank may hold a part (a DTensor).

    Args:
        drawn: the values are random, so all ranks take the first rank's. All ranks of the parameter's mesh must call
            this then. Otherwise ranks exchange nothing.
    """
    from torch.distributed.tensor import DTensor, distribute_tensor

    if isinstance(parameter, DTensor):
        values = values.to(parameter.dtype).expand(parameter.shape).contiguous()
        source = 0 if drawn else None
        cut = distribute_tensor(values, parameter.device_mesh, parameter.placements, src_data_rank=source)
        parameter.to_local().copy_(cut.to_local())
    else:
        parameter.copy_(values)


def start_orthogonal(weight: Tensor, gain: float) -> None:
    """An orthogonal matrix times ``gain``, computed in float32 or float64: torch has no QR in half precision."""
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    whole = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    assign(weight, nn.init.orthogonal_(whole, gain=gain), drawn=True)


def start_steps(bias: Tensor, low: float, high: float, floor: float) -> None:
    """A bias whose softplus is log-uniform in low..high, and at least ``floor``."""
    dt = torch.empty_like(bias).uniform_(math.log(low), math.log(high)).exp().clamp(min=floor)
    bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # softplus(bias) = dt


def start_rates(A_log: Tensor, low: float, high: float, floor: float = 0.0) -> None:
    """A log rate A_log whose e^{A_log} is uniform in low..high, and at least ``floor``."""
    A_log.uniform_(low, high).clamp_(min=floor).log_()


def positive(name: str, x: Any) -> float:
    """x as a number that float32 holds, as it does its inverse."""
    value = check_number(name, x)
    if not 1e-30 <= value <= 1e30:
        fail(name, "a number of 1e-30..1e30", repr(x))
    return value


def check_starts(dt_min: Any, dt_max: Any, dt_init_floor: Any, A_init_range: Any) -> None:
    """Checks a layer's arguments for `start_steps` and `start_rates`."""
    low = positive("dt_min", dt_min)
    if positive("dt_max", dt_max) < low:
        fail("dt_max", f"a number >= dt_min={dt_min}", dt_max)
    if check_number("dt_init_floor", dt_init_floor) != 0:
        positive("dt_init_floor", dt_init_floor)
    if not isinstance(A_init_range, (tuple, list)) or len(A_init_range) != 2:
        fail("A_init_range", "a pair of numbers", repr(A_init_range))
    first, last = (positive(f"A_init_range[{i}]", bound) for i, bound in enumerate(A_init_range))
    if last < first:
        fail("A_init_range", "a pair of numbers, the smaller one first", A_init_range)
