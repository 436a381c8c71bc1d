"""The variants of examples/variants as token loops in float64, with inputs for them. Shares no code with flexsp."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.nn.functional import logsigmoid, normalize

FOLDER = Path(__file__).parents[1] / "examples" / "variants"
H, K, V = 2, 5, 4
Tensors = dict[str, torch.Tensor]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"variants_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _outer(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return k.unsqueeze(-1) * v.unsqueeze(-2)


def _read(q: torch.Tensor, S: torch.Tensor) -> torch.Tensor:
    return (q.unsqueeze(-1) * S).sum(-2)


def _gated(S: torch.Tensor, x: Tensors, p: Tensors) -> torch.Tensor:
    """e^{g} S for a gate a head [B, H] or a gate a key channel [B, H, K]."""
    g = p["log_gamma"].expand(S.shape[:2]) if "log_gamma" in p else x["g"] if "g" in x else S.new_zeros(S.shape[:2])
    return g.exp().reshape(*g.shape, *[1] * (S.dim() - g.dim())) * S


def _diagonal(S: torch.Tensor, x: Tensors, p: Tensors) -> torch.Tensor:
    return _gated(S, x, p) + _outer(x["k"], x["v"])


def _delta(S: torch.Tensor, x: Tensors, p: Tensors) -> torch.Tensor:
    S = _gated(S, x, p)
    beta = x["b"] if "b" in x else x["beta"]
    return S + _outer(beta.unsqueeze(-1) * x["k"], x["v"] - _read(x["k"], S))


def _hgrn(S: torch.Tensor, x: Tensors, p: Tensors) -> torch.Tensor:
    return _gated(S, x, p) + (1 - x["g"].exp()) * x["x"]


def _scaled(S: torch.Tensor, x: Tensors, p: Tensors) -> torch.Tensor:
    return K**-0.5 * _read(x["q"], S)


def _with_own_bias(S: torch.Tensor, x: Tensors, p: Tensors) -> torch.Tensor:
    own = (p["u"].exp() - 1) * (x["q"] * x["k"]).sum(-1)
    return K**-0.5 * (_read(x["q"], S) + own.unsqueeze(-1) * x["v"])


@dataclass(frozen=True)
class Variant:
    """`step(S, x, params)` is the recurrence of one token, `read(S, x, params)` its output."""

    step: Callable[..., torch.Tensor]
    tokens: Sequence[str]
    params: Sequence[str] = ()
    read: Callable[..., torch.Tensor] = _scaled
    state: Sequence[int] = (K, V)
    transition: str = "none"


VARIANTS = {
    "linear": Variant(_diagonal, "qkv"),
    "retnet": Variant(_diagonal, "qkv", ["log_gamma"], transition="scalar"),
    "simple_gla": Variant(_diagonal, ["q", "k", "v", "g"], transition="scalar"),
    "gla": Variant(_diagonal, ["q", "k", "v", "G"], transition="vector"),
    "gla_own_bias": Variant(_diagonal, ["q", "k", "v", "G"], ["u"], read=_with_own_bias, transition="vector"),
    "deltanet": Variant(_delta, ["q", "k", "v", "b"], transition="dense"),
    "gated_deltanet": Variant(_delta, ["q", "k", "v", "beta", "g"], transition="dense"),
    "vector_gated_delta": Variant(_delta, ["q", "k", "v", "beta", "G"], transition="dense"),
    "hgrn": Variant(_hgrn, ["q", "x", "G"], read=lambda S, x, p: x["q"] * S, state=(K,), transition="vector"),
}


def draw(name: str, B: int, T: int, seed: int) -> tuple[Tensors, Tensors]:
    """(tokens, params) in float64; "G" above is a gate a channel. Keys of delta rules have length 1."""
    variant, made = VARIANTS[name], torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made, dtype=torch.float64)

    tokens: Tensors = {}
    for key in variant.tokens:
        if key in ("b", "beta"):
            tokens[key] = normal(B, T, H).sigmoid()
        elif key in ("g", "G"):
            tokens["g"] = logsigmoid(normal(B, T, H, K) if key == "G" else normal(B, T, H))
        else:
            tokens[key] = normal(B, T, H, V if key == "v" else K)
    if variant.step is _delta:
        tokens["k"] = normalize(tokens["k"], dim=-1)
    params = {key: logsigmoid(normal(H)) if key == "log_gamma" else normal(H) for key in variant.params}
    return tokens, params


def token_loop(
    name: str, tokens: Tensors, params: Tensors, initial: torch.Tensor, bounds: Sequence[int] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, final states) of states [N, H, ...]; N = B, or the number of documents at `bounds`."""
    variant = VARIANTS[name]
    T = tokens["q"].shape[1]
    o, finals = [], []
    spans = [(0, T)] if bounds is None else list(zip(bounds, bounds[1:], strict=False))
    for n, (begin, end) in enumerate(spans):
        S = initial if bounds is None else initial[n : n + 1]
        for t in range(begin, end):
            x = {key: value[:, t] for key, value in tokens.items()}
            S = variant.step(S, x, params)
            o.append(variant.read(S, x, params))
        finals.append(S)
    return torch.stack(o, dim=1), torch.cat(finals)


def gradients(
    call: Callable[[Tensors, Tensors, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    tokens: Tensors, params: Tensors, initial: torch.Tensor, seed: int,
) -> Tensors:  # fmt: skip
    """Outputs, final states and all gradients for random cotangents drawn from `seed`."""
    leaves = {key: x.detach().clone().requires_grad_() for key, x in {**tokens, **params, "initial": initial}.items()}
    o, final = call({key: leaves[key] for key in tokens}, {key: leaves[key] for key in params}, leaves["initial"])
    made = torch.Generator().manual_seed(seed)
    cotangents = [torch.randn(y.shape, generator=made, dtype=torch.float64).to(y.dtype) for y in (o, final)]
    grads: Any = torch.autograd.grad([o, final], list(leaves.values()), cotangents, allow_unused=True)
    found = {"o": o.detach(), "final": final.detach()}
    for (key, leaf), grad in zip(leaves.items(), grads, strict=True):
        found[f"d{key}"] = torch.zeros_like(leaf) if grad is None else grad
    return found
