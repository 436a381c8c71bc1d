"""One operator of the benchmarks: its inputs, its name in other libraries, and the bytes it cannot avoid moving."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from flexsp.bench.gates import GATES, Normal, log_gates

if TYPE_CHECKING:
    from flexsp.comm.group import SequenceParallel

__all__ = [
    "GATES", "Case", "Inputs", "Op", "Peer", "Shape", "baseline_available", "floor_ms",
    "forward_backward", "make_inputs", "ours", "theirs",
]  # fmt: skip

Inputs = dict[str, torch.Tensor]
Op = Callable[..., torch.Tensor]  # of the inputs and, for ours, of `sp`


@dataclass(frozen=True)
class Shape:
    """Sizes of one run: q, k [B, T, H, K], v [B, T, H, V]."""

    B: int
    T: int
    H: int
    K: int
    V: int

    def tensors(self, itemsize: int) -> tuple[int, int]:
        """Bytes of one q or k, and of one v or o."""
        rows = self.B * self.T * self.H
        return rows * self.K * itemsize, rows * self.V * itemsize


@dataclass(frozen=True)
class Peer:
    """Another library's operator: the module that must be there, the call, and inputs in its layout made of ours.

    back: its output, named "o", or the gradient of an input, in our layout.
    """

    module: str
    op: Op
    prepare: Callable[[Inputs], Inputs] | None = None
    back: Callable[[str, torch.Tensor], torch.Tensor] | None = None


@dataclass(frozen=True)
class Case:
    """One operator: ours, flash-linear-attention's name for it, and whether it takes gates, a head's or a channel's.

    wide: gates a channel; shared: one q and one k serve all heads; groups: heads that share a q and a k; steps: rows of
    k, v and beta a token. draw: inputs of other names, of a shape, a dtype and a source of random numbers, with "do".
    promised: arguments of the baseline where no log gate is below `flexsp.bench.gates.BOUND`. others: further libraries
    by name.
    """

    name: str
    ours: Op
    baseline: Op | None
    gated: bool = False
    positive: bool = False
    wide: bool = False
    beta: bool = False
    shared: bool = False
    groups: int = 1
    steps: int = 1
    draw: Callable[[Shape, torch.dtype, Normal], Inputs] | None = None
    promised: Mapping[str, Any] = field(default_factory=dict)
    others: Mapping[str, Peer] = field(default_factory=dict)

    def floor_bytes(self, shape: Shape, itemsize: int, backward: bool) -> int:
        """Bytes of every input read once and every output written once; with backward, of both passes.

        Forward q, k, v -> o. Backward q, k, v, do -> dq, dk, dv. Gates fp32 and beta: read, read, gradient written.
        """
        read, o = self._bytes(shape, itemsize)
        return read + o + (2 * read + o if backward else 0)

    def _bytes(self, shape: Shape, itemsize: int) -> tuple[int, int]:
        """Of all inputs, and of the output."""
        if self.draw is not None:
            dtype = {2: torch.bfloat16, 4: torch.float32}[itemsize]
            inputs = self.draw(shape, dtype, lambda *size: torch.empty(size, device="meta"))
            sizes = {name: x.numel() * x.element_size() for name, x in inputs.items()}
            o = sizes.pop("do")
            return sum(sizes.values()), o
        q, o = shape.tensors(itemsize)
        q //= shape.H if self.shared else self.groups
        gate = shape.B * shape.T * shape.H * 4 * (shape.K if self.wide else 1) if self.gated else 0
        gate += shape.B * shape.T * self.steps * shape.H * itemsize if self.beta else 0
        return q + self.steps * (q + o) + gate, o


def make_inputs(
    case: Case, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0, gates: str = "mild"
) -> Inputs:
    """Fresh random leaves q, k, v (and log gates g <= 0, one of `GATES`), and the output gradient do."""
    if shape.H % case.groups:
        raise ValueError(f"H: expected a multiple of {case.groups} for {case.name}, got {shape.H}")
    generator = torch.Generator(device=device).manual_seed(seed)
    if case.draw is not None:
        if gates != "mild":
            raise ValueError(f"gates: expected mild for {case.name}, got {gates!r}")
        inputs = case.draw(shape, dtype, lambda *size: torch.randn(size, device=device, generator=generator))
        return {name: x if name == "do" else x.requires_grad_() for name, x in inputs.items()}
    rows = shape.T * case.steps

    def normal(width: int, heads: int = shape.H, tokens: int = shape.T) -> torch.Tensor:
        size = (shape.B, tokens, heads, width)
        return torch.randn(size, dtype=dtype, device=device, generator=generator)

    keys = 1 if case.shared else shape.H // case.groups
    q, k = normal(shape.K, keys), normal(shape.K, keys, rows)
    if case.positive:
        q, k = q.abs_(), k.abs_()
    inputs = {"q": q, "k": k, "v": normal(shape.V, tokens=rows)}
    if case.gated:
        size = (shape.B, shape.T, shape.H, *([shape.K] if case.wide else []))
        kind = gates if case.name != "mamba2" else "mild"
        inputs["g"] = log_gates(kind, size, lambda *n: torch.randn(n, device=device, generator=generator))
    if case.beta:
        inputs["k"] = torch.nn.functional.normalize(k.float(), dim=-1).to(dtype)
        raw = torch.randn(shape.B, rows, shape.H, device=device, generator=generator)
        inputs["beta"] = raw.sigmoid().to(dtype)
    for tensor in inputs.values():
        tensor.requires_grad_()
    inputs["do"] = normal(shape.V)
    return inputs


def floor_ms(case: Case, shape: Shape, dtype: torch.dtype, mode: str, gb_s: float | None) -> float | None:
    """Milliseconds of the bytes that a mode cannot avoid moving; None where no bandwidth is known."""
    return case.floor_bytes(shape, dtype.itemsize, mode == "fwd_bwd") / (gb_s * 1e6) if gb_s else None


def forward_backward(op: Op, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """Output gradients of every leaf, without accumulating into .grad."""
    leaves = [tensor for name, tensor in inputs.items() if name != "do"]
    return torch.autograd.grad(op(inputs), leaves, inputs["do"])


def baseline_available() -> str | None:
    """None where flash-linear-attention can be imported, else the reason."""
    try:
        import fla.ops.simple_gla  # type: ignore[import-not-found]  # noqa: F401
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def ours(name: str, **constants: Any) -> Op:
    """An op of `flexsp.ops`: all inputs but do have the argument's names."""

    def run(x: Inputs, sp: SequenceParallel | bool = False) -> torch.Tensor:
        op = getattr(importlib.import_module("flexsp.ops"), name)
        o: torch.Tensor = op(**{key: y for key, y in x.items() if key != "do"}, **constants, sp=sp)[0]
        return o

    return run


def theirs(module: str, name: str, **constants: Any) -> Op:
    """The same of another library, which is imported by the first call."""

    def run(x: Inputs) -> torch.Tensor:
        op = getattr(importlib.import_module(module), name)
        found = op(**{key: y for key, y in x.items() if key != "do"}, **constants)
        o: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return o

    return run
