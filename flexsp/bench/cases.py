"""The operators that the benchmarks run."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

import torch

from flexsp.bench.case import (
    GATES,
    Case,
    Inputs,
    Op,
    Peer,
    Shape,
    baseline_available,
    floor_ms,
    forward_backward,
    make_inputs,
)  # fmt: skip
from flexsp.bench.own_inputs import OWN

if TYPE_CHECKING:
    from flexsp.comm.group import SequenceParallel

__all__ = [
    "CASES", "GATES", "Case", "Inputs", "Op", "Shape", "baseline_available", "floor_ms", "forward_backward",
    "make_inputs", "variant_of",
]  # fmt: skip


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

    A = _rates(x["g"].shape[2], x["g"].dtype, x["g"].device)
    return mamba2_ssd(x["v"], x["g"], A, x["k"], x["q"], dt_softplus=True, sp=sp)[0]


@functools.lru_cache(maxsize=16)
def _rates(H: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Made once, since a model has them: making them would count in the host's time of a call."""
    return torch.full((H,), -1.0, dtype=dtype, device=device)


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
    """One of our chunked operators; all inputs but do have its arguments' names."""

    def run(x: Inputs, sp: SequenceParallel | bool = False) -> torch.Tensor:
        op = getattr(importlib.import_module("flexsp.ops"), f"chunk_{name}")
        o: torch.Tensor = op(**{key: y for key, y in x.items() if key != "do"}, **constants, sp=sp)[0]
        return o

    return run


def _peer_delta(module: str, name: str, **constants: Any) -> Op:
    """The same of another library, which is imported by the first call."""

    def run(x: Inputs, **promised: Any) -> torch.Tensor:
        op = getattr(importlib.import_module(module), f"chunk_{name}")
        o: torch.Tensor = op(**{key: y for key, y in x.items() if key != "do"}, **constants, **promised)[0]
        return o

    return run


def _delta_case(name: str, op: str, gated: bool = True, flashqla: bool = False, **options: Any) -> Case:
    constants = {"num_householder": options["steps"]} if "steps" in options else {}
    others = {"flashqla": Peer("flash_qla", _peer_delta("flash_qla", op))} if flashqla else {}
    ours, fla = _delta(op, **constants), _peer_delta(f"fla.ops.{op}", op, **constants)
    return Case(name, ours, fla, gated=gated, beta=True, others=others, **options)


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
        Case("gla", _delta("gla"), _fla_gla, gated=True, wide=True),
        Case("generated_simple_gla", _generated("simple_gla"), None, gated=True),
        Case("generated_gla", _generated("gla"), _fla_gla, gated=True, wide=True),
        Case("generated_deltanet", _generated("deltanet", beta="b"), _fla_delta_rule, gated=False, beta=True),
        _delta_case("delta_rule", "delta_rule", gated=False),
        _delta_case("gated_delta_rule", "gated_delta_rule", flashqla=True),
        _delta_case("gated_delta_rule_shared_keys", "gated_delta_rule", flashqla=True, groups=2),
        _delta_case("kda", "kda", wide=True, promised={"safe_gate": True}),
        _delta_case("gated_delta_product", "gated_delta_product", steps=2),
        *OWN,
    )
}
