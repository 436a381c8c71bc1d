"""Random inputs of every op, beside its oracle: what the tests of ops, kernels and ranks run over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from flexsp import ops
from flexsp.testing import oracles
from flexsp.testing.compare import DRAWS

__all__ = ["CASES", "PROGRAM_CASES", "Case", "Shape", "random_documents", "random_lengths"]


@dataclass(frozen=True)
class Shape:
    """``states`` is the number of initial states, 0 for none; H must be even (4: two groups of two heads)."""

    B: int = 2
    T: int = 70
    H: int = 4
    K: int = 24
    V: int = 20
    states: int = 0


@dataclass(frozen=True)
class Case:
    """One way to call an op.

    ``tokens`` names the inputs that have one entry a token along dim 1, ``shared`` the parameters; what is left is
    ``initial_state``. ``draws`` are the cotangents that `check_op` asks of the yardstick in float32: more where there
    are parameters, whose gradients are a number a head and may nearly vanish for some.
    """

    op: Callable[..., Any]
    oracle: Callable[..., Any]
    make: Callable[[Shape, torch.Generator], dict[str, Any]]
    tokens: tuple[str, ...] = ("q", "k", "v")
    shared: tuple[str, ...] = ()
    constants: dict[str, Any] = field(default_factory=dict)
    draws: int = DRAWS

    def inputs(self, shape: Shape, seed: int) -> dict[str, Any]:
        """Arguments in float64, fresh for each seed."""
        return {**self.make(shape, torch.Generator().manual_seed(seed)), **self.constants}


def _normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _qkv(s: Shape, r: torch.Generator) -> dict[str, Any]:
    made: dict[str, Any] = {name: _normal(r, s.B, s.T, s.H, s.K) for name in "qk"}
    made["v"] = _normal(r, s.B, s.T, s.H, s.V)
    if s.states:
        made["initial_state"] = _normal(r, s.states, s.H, s.K, s.V)
    return made


def _features(s: Shape, r: torch.Generator) -> dict[str, Any]:
    made = _qkv(s, r)
    made["q"], made["k"] = (torch.nn.functional.elu(made[name]) + 1.1 for name in "qk")
    if s.states:
        made["initial_state"] = (made["initial_state"], 1 + torch.rand(s.states, 1, s.H, s.K, generator=r).double())
    return made


def _gated(s: Shape, r: torch.Generator) -> dict[str, Any]:
    return {**_qkv(s, r), "g": torch.nn.functional.logsigmoid(_normal(r, s.B, s.T, s.H) + 1)}


def _gamma(s: Shape, r: torch.Generator) -> dict[str, Any]:
    return {**_qkv(s, r), "g_gamma": -0.2 * torch.rand(s.H, generator=r).double()}


def _mamba2(s: Shape, r: torch.Generator, groups: int = 1, full: bool = False) -> dict[str, Any]:
    made = {
        "x": _normal(r, s.B, s.T, s.H, s.V),
        "dt": torch.rand(s.B, s.T, s.H, generator=r).double() if not full else _normal(r, s.B, s.T, s.H),
        "A": -torch.rand(s.H, generator=r).double() - 0.05,
        "B": _normal(r, s.B, s.T, groups, s.K),
        "C": _normal(r, s.B, s.T, groups, s.K),
        "D": _normal(r, s.H) if full else _normal(r, s.H, s.V),
    }
    if full:
        made["dt_bias"] = _normal(r, s.H)
    if s.states:
        made["initial_state"] = _normal(r, s.states, s.H, s.K, s.V)
    return made


def _delta(
    s: Shape, r: torch.Generator, groups: int = 1, gate: str = "", steps: int = 0, gate_in_kernel: bool = False
) -> dict[str, Any]:
    """`groups` heads share a key; gates a "head" or a "channel". With steps, k, v, beta are [B, T, steps, H, ...]."""
    n, keys = [steps] if steps else [], s.H // groups
    made = {"q": _normal(r, s.B, s.T, keys, s.K), "k": _normal(r, s.B, s.T, *n, keys, s.K)}
    made |= {"v": _normal(r, s.B, s.T, *n, s.H, s.V), "beta": torch.rand(s.B, s.T, *n, s.H, generator=r).double()}
    if gate:
        raw = _normal(r, s.B, s.T, s.H, *([s.K] if gate == "channel" else []))
        made["g"] = raw if gate_in_kernel else torch.nn.functional.logsigmoid(raw + 1)
    if gate_in_kernel:
        made["A_log"], made["dt_bias"] = 0.3 * _normal(r, s.H), _normal(r, *made["g"].shape[2:]).flatten()
    if s.states:
        made["initial_state"] = _normal(r, s.states, s.H, s.K, s.V)
    return made


def _gdn2(s: Shape, r: torch.Generator, groups: int = 1, gate_in_kernel: bool = False) -> dict[str, Any]:
    made = _delta(s, r, groups, "channel", gate_in_kernel=gate_in_kernel)
    strong = (torch.rand(s.B, s.T, s.H, n, generator=r).double() for n in (s.K, s.V))
    return {name: x for name, x in made.items() if name != "beta"} | dict(zip("bw", strong, strict=True))


def _product_op(**x: Any) -> Any:
    n = x["k"].shape[2]
    flat = {name: x[name].flatten(1, 2) for name in ("k", "v", "beta")}
    return ops.chunk_gated_delta_product(**({"g": None} | x | flat), num_householder=n)


def _product_oracle(**x: Any) -> Any:
    n = x["k"].shape[2]
    return oracles.delta_rule(**(x | {name: x[name].flatten(1, 2) for name in ("k", "v", "beta")}), steps=n)


_LIGHTNING = {"layer_idx": 1, "num_layers": 4}
_ssd = partial(ops.mamba2_ssd, state_v_first=False)
_MAMBA_TOKENS = ("x", "dt", "B", "C")

CASES: dict[str, Case] = {
    "linear": Case(ops.chunk_linear_attn, oracles.linear_attn, _qkv, constants={"normalize": False}),
    "normalized": Case(ops.chunk_linear_attn, oracles.linear_attn, _features),
    "simple_gla": Case(ops.chunk_simple_gla, oracles.simple_gla, _gated, tokens=("q", "k", "v", "g")),
    "gamma": Case(ops.chunk_simple_gla, oracles.simple_gla, _gamma, shared=("g_gamma",)),
    "retention": Case(ops.chunk_retention, oracles.retention, _qkv),
    "lightning": Case(ops.chunk_lightning_attn, oracles.lightning_attn, _qkv, constants=_LIGHTNING),
    "mamba2": Case(_ssd, oracles.mamba2_ssd, _mamba2, tokens=_MAMBA_TOKENS, shared=("A", "D")),
    "mamba2_groups": Case(
        _ssd,
        oracles.mamba2_ssd,
        partial(_mamba2, groups=2, full=True),
        tokens=_MAMBA_TOKENS,
        shared=("A", "D", "dt_bias"),
        constants={"dt_softplus": True},
    ),
}

_NORM = {"use_qk_l2norm_in_kernel": True}
_IN_KERNEL = {**_NORM, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True, "use_gate_in_kernel": True}
_delta_case = partial(Case, oracle=oracles.delta_rule, tokens=("q", "k", "v", "beta"), constants=_NORM)
_gated_case = partial(_delta_case, tokens=("q", "k", "v", "beta", "g"))
_in_kernel = partial(_gated_case, shared=("A_log", "dt_bias"), draws=4 * DRAWS)
_gdn2_case = partial(
    Case, ops.chunk_gdn2, oracles.gdn2, tokens=("q", "k", "v", "g", "b", "w"), constants=_NORM
)  # fmt: skip

PROGRAM_CASES: dict[str, Case] = {
    "delta_rule": _delta_case(ops.chunk_delta_rule, make=_delta),
    "gated_delta_rule": _gated_case(ops.chunk_gated_delta_rule, make=partial(_delta, gate="head")),
    "gated_delta_rule_in_kernel": _in_kernel(
        ops.chunk_gated_delta_rule, make=partial(_delta, groups=2, gate="head", gate_in_kernel=True),
        constants=_IN_KERNEL,
    ),
    "kda": _gated_case(ops.chunk_kda, make=partial(_delta, gate="channel")),
    "kda_in_kernel": _in_kernel(
        ops.chunk_kda, make=partial(_delta, groups=2, gate="channel", gate_in_kernel=True),
        constants={**_IN_KERNEL, "lower_bound": -4.0},
    ),
    "gdn2": _gdn2_case(make=_gdn2),
    "gdn2_in_kernel": _gdn2_case(
        make=partial(_gdn2, groups=2, gate_in_kernel=True), shared=("A_log", "dt_bias"), draws=4 * DRAWS,
        constants={**_NORM, "use_gate_in_kernel": True, "lower_bound": -4.0},
    ),
    "delta_product": _delta_case(_product_op, oracle=_product_oracle, make=partial(_delta, steps=3)),
    "gated_delta_product": _gated_case(
        _product_op, oracle=_product_oracle, make=partial(_delta, groups=2, gate="head", steps=2)
    ),
    "kda_product": _gated_case(
        _product_op, oracle=_product_oracle, make=partial(_delta, groups=2, gate="channel", steps=2)
    ),
}  # fmt: skip
"""Ops that call a program of `flexsp.variants`. Those of `CASES` call the engine for scalar decays."""


def random_documents(total: int, n: int, generator: torch.Generator) -> torch.Tensor:
    """int64 [n + 1] boundaries of n documents in ``total`` tokens; some are empty, often at the ends."""
    inner = torch.randint(0, total + 1, (max(n - 1, 0),), generator=generator).sort().values
    if n > 3:
        copy = int(torch.randint(1, n - 1, (), generator=generator))
        inner[copy] = inner[copy - 1]
    if n > 2 and torch.rand((), generator=generator) < 0.5:
        inner[-1] = total
    return torch.cat([torch.tensor([0]), inner.sort().values, torch.tensor([total])])


def random_lengths(total: int, world_size: int, generator: torch.Generator) -> list[int]:
    """Shard lengths that sum to ``total``: uneven, now and then empty or only a few tokens long."""
    kind = torch.randint(0, 4, (world_size,), generator=generator).tolist()
    weight = torch.rand(world_size, generator=generator).tolist()
    lengths = [0] * world_size
    left = total
    for r in range(world_size):
        small = int(torch.randint(1, 6, (), generator=generator))
        size = (0, small, int(weight[r] * 2 * total / world_size))[min(kind[r], 2)]
        lengths[r] = min(left, size)
        left -= lengths[r]
    lengths[int(torch.randint(0, world_size, (), generator=generator))] += left
    return lengths
