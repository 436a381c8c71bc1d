"""The operators that `flexsp bench op` runs, their inputs, their baseline and the bytes they cannot avoid moving."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from flexsp.comm.group import SequenceParallel

__all__ = ["CASES", "GATES", "Case", "Shape", "baseline_available", "forward_backward", "make_inputs", "variant_of"]

GATES = ("usual", "initialised", "none")
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
class Case:
    """One operator: ours, the baseline's name for it, and whether it takes gates, a head's or (wide) a channel's.

    shared: one q and one k serve all heads; groups: heads that share a q and a k; steps: rows of k, v and beta a token.
    flashqla: FlashQLA's name for it.
    """

    name: str
    ours: Op
    baseline: Op | None
    gated: bool
    positive: bool = False
    wide: bool = False
    beta: bool = False
    shared: bool = False
    groups: int = 1
    steps: int = 1
    flashqla: Op | None = None

    def floor_bytes(self, shape: Shape, itemsize: int, backward: bool) -> int:
        """Bytes of every input read once and every output written once; with backward, of both passes.

        Forward q, k, v -> o. Backward q, k, v, do -> dq, dk, dv. Gates fp32 and beta: read, read, gradient written.
        """
        q, o = shape.tensors(itemsize)
        q //= shape.H if self.shared else self.groups
        qkv = q + self.steps * (q + o)
        gate = shape.B * shape.T * shape.H * 4 * (shape.K if self.wide else 1) if self.gated else 0
        gate += shape.B * shape.T * self.steps * shape.H * itemsize if self.beta else 0
        total = qkv + o + gate
        if backward:
            total += 2 * qkv + o + 2 * gate
        return total


def make_inputs(
    case: Case, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0, gates: str = "usual"
) -> Inputs:
    """Fresh random leaves q, k, v (and log gates g <= 0, one of `GATES`), and the output gradient do."""
    if shape.H % case.groups:
        raise ValueError(f"H: expected a multiple of {case.groups} for {case.name}, got {shape.H}")
    generator = torch.Generator(device=device).manual_seed(seed)
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
        inputs["g"] = _gates(gates if case.name != "mamba2" else "usual", size, generator)
    if case.beta:
        inputs["k"] = torch.nn.functional.normalize(k.float(), dim=-1).to(dtype)
        raw = torch.randn(shape.B, rows, shape.H, device=device, generator=generator)
        inputs["beta"] = raw.sigmoid().to(dtype)
    for tensor in inputs.values():
        tensor.requires_grad_()
    inputs["do"] = normal(shape.V)
    return inputs


def _gates(kind: str, size: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Log gates [B, T, H] or [B, T, H, K]. "initialised": -A softplus(N(0, 1) + b), with A uniform in 0..16 a head and
    softplus(b) log-uniform in 0.001..0.1 a head, or a channel: as layers begin."""
    if kind not in GATES:
        raise ValueError(f"gates: expected one of {', '.join(GATES)}, got {kind!r}")
    device = generator.device
    if kind == "none":
        return torch.zeros(size, device=device)
    raw = torch.randn(size, device=device, generator=generator)
    if kind == "usual":
        return torch.nn.functional.logsigmoid(raw + 3.0)
    A = 16 * torch.rand(size[2], *[1] * (len(size) - 3), device=device, generator=generator)
    dt = 1e-3 * 100 ** torch.rand(size[2:], device=device, generator=generator)
    return -A * torch.nn.functional.softplus(raw + dt.expm1().log())


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


def _simple_gla(x: Inputs, sp: SequenceParallel | bool = False) -> torch.Tensor:
    from flexsp.ops import chunk_simple_gla

    return chunk_simple_gla(x["q"], x["k"], x["v"], g=x["g"], sp=sp)[0]


def _fla_simple_gla(x: Inputs) -> torch.Tensor:
    from fla.ops.simple_gla import chunk_simple_gla

    return chunk_simple_gla(x["q"], x["k"], x["v"], g=x["g"])[0]


def _linear_attn(normalize: bool) -> Op:
    def run(x: Inputs, sp: SequenceParallel | bool = False) -> torch.Tensor:
        from flexsp.ops import chunk_linear_attn

        return chunk_linear_attn(x["q"], x["k"], x["v"], normalize=normalize, sp=sp)[0]

    return run


def _fla_linear_attn(normalize: bool) -> Op:
    def run(x: Inputs) -> torch.Tensor:
        from fla.ops.linear_attn import chunk_linear_attn

        return chunk_linear_attn(x["q"], x["k"], x["v"], normalize=normalize)[0]

    return run


def _retention(x: Inputs, sp: SequenceParallel | bool = False) -> torch.Tensor:
    from flexsp.ops import chunk_retention

    return chunk_retention(x["q"], x["k"], x["v"], sp=sp)[0]


def _lightning(x: Inputs, sp: SequenceParallel | bool = False) -> torch.Tensor:
    from flexsp.ops import chunk_lightning_attn

    return chunk_lightning_attn(x["q"], x["k"], x["v"], layer_idx=6, num_layers=12, sp=sp)[0]


def _mamba2(x: Inputs, sp: SequenceParallel | bool = False) -> torch.Tensor:
    """C, B, x and dt are q, k, v and g; A = -1."""
    from flexsp.ops import mamba2_ssd

    A = x["g"].new_full(x["g"].shape[2:], -1.0)
    return mamba2_ssd(x["v"], x["g"], A, x["k"], x["q"], dt_softplus=True, sp=sp)[0]


@functools.lru_cache(maxsize=16)
def _variant(name: str, H: int, K: int, V: int, dtype: torch.dtype) -> Any:
    module = importlib.import_module(f"flexsp.variants.{name}")
    return module.make(H, K, V, dtype, lowering="generated")


def variant_of(case: str, H: int, K: int, V: int, dtype: torch.dtype) -> Any:
    """The variant whose kernels a generated case runs."""
    return _variant(case.removeprefix("generated_"), H, K, V, dtype)


def _generated(name: str, **names: str) -> Op:
    """Kernels generated from flexsp/variants/NAME.py; `names` are the variant's names of our inputs."""

    def run(x: Inputs, sp: SequenceParallel | bool = False) -> torch.Tensor:
        H, K, V = *x["q"].shape[2:], x["v"].shape[-1]
        given = {names.get(key, key): value for key, value in x.items() if key != "do"}
        o: torch.Tensor = _variant(name, H, K, V, x["q"].dtype)(sp=sp, **given)[0]
        return o

    return run


def _fla_gla(x: Inputs) -> torch.Tensor:
    from fla.ops.gla import chunk_gla

    return chunk_gla(x["q"], x["k"], x["v"], x["g"])[0]


def _fla_delta_rule(x: Inputs) -> torch.Tensor:
    from fla.ops.delta_rule import chunk_delta_rule

    return chunk_delta_rule(x["q"], x["k"], x["v"], x["beta"])[0]


def _delta(name: str, **constants: Any) -> Op:
    """One of our chunked delta rules; all inputs but do have its arguments' names."""

    def run(x: Inputs, sp: SequenceParallel | bool = False) -> torch.Tensor:
        op = getattr(importlib.import_module("flexsp.ops"), f"chunk_{name}")
        o: torch.Tensor = op(**{key: y for key, y in x.items() if key != "do"}, **constants, sp=sp)[0]
        return o

    return run


def _peer_delta(module: str, name: str, **constants: Any) -> Op:
    """The same of another library, which is imported by the first call."""

    def run(x: Inputs) -> torch.Tensor:
        op = getattr(importlib.import_module(module), f"chunk_{name}")
        o: torch.Tensor = op(**{key: y for key, y in x.items() if key != "do"}, **constants)[0]
        return o

    return run


def _delta_case(name: str, op: str, gated: bool = True, flashqla: bool = False, **options: Any) -> Case:
    constants = {"num_householder": options["steps"]} if "steps" in options else {}
    peer = _peer_delta("flash_qla", op) if flashqla else None
    ours, fla = _delta(op, **constants), _peer_delta(f"fla.ops.{op}", op, **constants)
    return Case(name, ours, fla, gated=gated, beta=True, flashqla=peer, **options)


# flash-linear-attention's gated backward refuses Triton 3.4 to 3.7.0 on Hopper (its issue 640).
CASES = {
    case.name: case
    for case in (
        Case("simple_gla", _simple_gla, _fla_simple_gla, gated=True),
        Case("linear_attn", _linear_attn(False), _fla_linear_attn(False), gated=False),
        Case("linear_attn_normalized", _linear_attn(True), _fla_linear_attn(True), gated=False, positive=True),
        Case("retention", _retention, None, gated=False),
        Case("lightning", _lightning, None, gated=False),
        Case("mamba2", _mamba2, None, gated=True, shared=True),
        Case("generated_simple_gla", _generated("simple_gla"), None, gated=True),
        Case("generated_gla", _generated("gla"), _fla_gla, gated=True, wide=True),
        Case("generated_deltanet", _generated("deltanet", beta="b"), _fla_delta_rule, gated=False, beta=True),
        _delta_case("delta_rule", "delta_rule", gated=False),
        _delta_case("gated_delta_rule", "gated_delta_rule", flashqla=True),
        _delta_case("gated_delta_rule_shared_keys", "gated_delta_rule", flashqla=True, groups=2),
        _delta_case("kda", "kda", wide=True),
        _delta_case("gated_delta_product", "gated_delta_product", steps=2),
    )
}
