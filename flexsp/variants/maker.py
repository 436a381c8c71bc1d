"""Makes the program of a variant from its three functions and the axes of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from flexsp.compiler import ConstExpr, LinearAttention, Lowering, SymbTensor
from flexsp.exceptions import fail

__all__ = ["maker"]

Function = Callable[..., torch.Tensor]


def maker(
    chunk: Function,
    decay: Function,
    merge: Function,
    inputs: Mapping[str, str],
    gates: Mapping[str, str] | None = None,
    *,
    clamped: Sequence[str] = (),
    state: str = "HKV",
    lowerings: Sequence[Lowering] = (),
) -> Callable[..., LinearAttention]:
    """The function ``make(H, K, V, dtype=torch.float32, scale=None, **options)`` of a variant.

    Args:
        inputs: name -> axes of a tensor in ``dtype``. "THK" is a tensor [T, H, K], "HK" a parameter [H, K].
        gates: the same of tensors in float32, whatever ``dtype`` is.
        clamped: those of them that are log gates to be clamped, as in `SymbTensor`.
        state: axes of a state. The variant has a ``scale``, K^-1/2 where the call of ``make`` names none, if this is a
            matrix.
        lowerings: hand-written kernels, as for `LinearAttention`.
    """

    def make(
        H: int, K: int, V: int = 0, dtype: torch.dtype = torch.float32, scale: float | None = None, **options: Any
    ) -> LinearAttention:
        """The variant for H heads with states [K, V], or [K]; `options` are those of `LinearAttention`."""
        if state != "HKV" and scale is not None:
            fail("scale", "None, since outputs of a vector state are the state", scale)
        if state == "HKV" and V == 0:
            fail("V", "the columns of a state", V)
        sizes: dict[str, Any] = {"T": "T"} | {name: ConstExpr(name, n) for name, n in (("H", H), ("K", K))}
        if state == "HKV":
            sizes["V"] = ConstExpr("V", V)
        meta: dict[str, Any] = {name: SymbTensor([sizes[x] for x in axes], dtype) for name, axes in inputs.items()}
        for name, axes in (gates or {}).items():
            meta[name] = SymbTensor([sizes[x] for x in axes], clamped=name in clamped)
        meta["prev_s"] = SymbTensor(["NS", *(sizes[x] for x in state)])
        if state == "HKV":
            meta["scale"] = K**-0.5 if scale is None else scale
        return LinearAttention(meta, chunk, decay, merge, **{"lowerings": lowerings, **options})

    return make
