"""Root-mean-square and layer norms. They work on one token at a time, so ranks exchange nothing for them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexsp.exceptions import check_dense, check_flag, check_integer, check_number, fail

_PLAIN = (Tensor, nn.Parameter)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def accumulation_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """float64 where an input is float64, else float32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def check_input(name: str, x: Tensor, sizes: tuple[Any, ...]) -> None:
    """ValueError unless x is a dense floating tensor of these sizes. None stands for any size, ``...`` at the front for
    any number of axes."""
    compiling = torch.compiler.is_compiling()  # sizes may be symbols then, which torch.compile cannot turn into text
    plain = not compiling and type(x) in _PLAIN and not (x.is_meta or x.is_nested) and x.layout is torch.strided
    if plain and x.dtype in FLOATS and _fits(x.shape, sizes):
        return  # the usual case, without the cost of the messages below
    check_dense(name, x, "a floating tensor" if compiling else f"a floating tensor {_shown(sizes)}")
    if x.dtype not in FLOATS:
        fail(name, f"a floating tensor {_shown(sizes)}", x.dtype)
    if not _fits(x.shape, sizes):
        fail(name, _shown(sizes), list(x.shape))


def _fits(shape: torch.Size, sizes: tuple[Any, ...]) -> bool:
    if sizes[0] is ...:
        sizes = sizes[1:]
        shape = shape[max(len(shape) - len(sizes), 0) :]
    return len(shape) == len(sizes) and all([n is None or n == m for n, m in zip(sizes, shape, strict=True)])


def _shown(sizes: tuple[Any, ...]) -> str:
    return "[" + ", ".join("*" if n is None else "..." if n is ... else str(n) for n in sizes) + "]"


def check_eps(name: str, eps: Any) -> float:
    value = check_number(name, eps)
    if value < 0:
        fail(name, "a finite number >= 0", repr(eps))
    return value


def check_choice(name: str, x: Any, choices: tuple[str, ...]) -> str:
    if not isinstance(x, str) or x not in choices:
        fail(name, " or ".join(f'"{choice}"' for choice in choices), repr(x))
    return x


class RMSNorm(nn.Module):
    """``x / rms(x) * weight`` over the last axis, or over equal groups of it; computed in float32 (float64 stays).

    Args:
        dim: size of the last axis of the input.
        eps: added to the mean square, at least 0.
        group_size: channels that share one rms; ``None`` means all `dim`.
    """

    def __init__(self, dim: int, eps: float = 1e-5, group_size: int | None = None) -> None:
        super().__init__()
        dim = check_integer("dim", dim, least=1)
        if group_size is not None:
            group_size = check_integer("group_size", group_size, least=1)
        self.dim, self.eps, self.group_size = dim, check_eps("eps", eps), group_size or dim
        if dim % self.group_size:
            raise ValueError(f"group_size: expected a divisor of dim={dim}, got {group_size}")
        self.weight = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Ones."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., dim] -> [..., dim] in x's dtype."""
        check_input("x", x, (..., self.dim))
        return self._normalise(x.to(accumulation_dtype(x.dtype))).to(x.dtype)

    def _normalise(self, x: Tensor) -> Tensor:
        grouped = x.unflatten(-1, (-1, self.group_size))
        scale = torch.rsqrt(grouped.square().mean(-1, keepdim=True) + self.eps)
        return (grouped * scale).flatten(-2) * self.weight

    def extra_repr(self) -> str:
        groups = "" if self.group_size == self.dim else f", group_size={self.group_size}"
        return f"{self.dim}, eps={self.eps}{groups}"


class GatedRMSNorm(RMSNorm):
    """Output norm of a recurrent layer: ``norm(x) * silu(gate)``, or ``norm(x * silu(gate))`` with ``gate_first``.

    `SimpleGLA` gates after the norm (one norm a head, as in GLA, Yang et al. 2024); `Mamba2` gates first
    (Dao & Gu 2024). With ``activation="sigmoid"`` that takes the place of silu.
    """

    def __init__(
        self,
        dim: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        gate_first: bool = False,
        activation: str = "silu",
    ) -> None:
        super().__init__(dim, eps, group_size)
        check_flag("gate_first", gate_first)
        check_choice("activation", activation, ("silu", "sigmoid"))
        self.gate_first, self.activation = gate_first, activation

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """x [..., dim], gate [..., dim] or None (no gate) -> [..., dim] in x's dtype."""
        if gate is None:
            return super().forward(x)
        check_input("x", x, (..., self.dim))
        check_input("gate", gate, tuple(x.shape))
        wide = x.to(accumulation_dtype(x.dtype))
        wide_gate = gate.to(wide.dtype)
        factor = F.silu(wide_gate) if self.activation == "silu" else wide_gate.sigmoid()
        out = self._normalise(wide * factor) if self.gate_first else self._normalise(wide) * factor
        return out.to(x.dtype)

    def extra_repr(self) -> str:
        sigmoid = "" if self.activation == "silu" else f", activation={self.activation!r}"
        return super().extra_repr() + (", gate_first=True" if self.gate_first else "") + sigmoid


class HeadNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) over each head's channels, then a weight and a bias for each channel of all
    heads, as in `torch.nn.GroupNorm`.

    Weights are initialised to ``start``, biases to 0. With ``start=None`` there are neither.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, width: int, eps: float, start: float | None = 1.0, bias: bool = True) -> None:
        super().__init__()
        self.eps, self._start = eps, start
        for name, there in (("weight", start is not None), ("bias", start is not None and bias)):
            self.register_parameter(name, nn.Parameter(torch.empty(width)) if there else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None and self._start is not None:
            nn.init.constant_(self.weight, self._start)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, H, V] -> [B, T, H, V] in float32 (float64 stays)."""
        x = F.layer_norm(x.to(accumulation_dtype(x.dtype)), x.shape[-1:], eps=self.eps)
        x = x if self.weight is None else x * self.weight.view(x.shape[2:])
        return x if self.bias is None else x + self.bias.view(x.shape[2:])
