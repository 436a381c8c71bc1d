"""The variants of flexsp/variants as token loops in float64, with inputs, and functions to compile or to refuse.

The loops share no code with flexsp.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch.nn.functional import logsigmoid, normalize

from tests.marks import quick

H, K, V = 2, 5, 4
WIDE = ("g", "w", "log_gamma", "u")
"""Inputs that are float32 beside others in bfloat16 or float16."""
Tensors = dict[str, torch.Tensor]
Function = Callable[..., Any]


class _Generated:
    """A shipped variant whose kernels are generated, whatever engine it has."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def make(self, *sizes: Any, **options: Any) -> Any:
        return self._module.make(*sizes, **({"lowering": "generated"} | options))


def load(name: str) -> _Generated:
    return _Generated(importlib.import_module(f"flexsp.variants.{name}"))


def _outer(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return k.unsqueeze(-1) * v.unsqueeze(-2)


def _read(q: torch.Tensor, S: torch.Tensor) -> torch.Tensor:
    return (q.unsqueeze(-1) * S).sum(-2)


def _gated(S: torch.Tensor, x: Tensors, p: Tensors) -> torch.Tensor:
    """e^{g} S for a gate a head [B, H] or a gate a key channel [B, H, K]."""
    g = p["log_gamma"].expand(S.shape[:2]) if "log_gamma" in p else x["g"] if "g" in x else S.new_zeros(S.shape[:2])
    S = x["w"].exp().unsqueeze(-2) * S if "w" in x else S
    return g.exp().reshape(*g.shape, *[1] * (S.dim() - g.dim())) * S


def _diagonal(S: torch.Tensor, x: Tensors, p: Tensors) -> torch.Tensor:
    return _gated(S, x, p) + _outer(x["k"], x["v"])


def _delta(S: torch.Tensor, x: Tensors, p: Tensors) -> torch.Tensor:
    S = _gated(S, x, p)
    beta = x["b"] if "b" in x else x["beta"]
    return S + _outer(beta.unsqueeze(-1) * x["k"], x["v"] - _read(x["k"], S))


def _erased(S: torch.Tensor, x: Tensors, p: Tensors) -> torch.Tensor:
    S = _gated(S, x, p)
    return S + _outer(x["k"], x["write"] * x["v"] - _read(x["erase"] * x["k"], S))


def _low_rank(S: torch.Tensor, x: Tensors, p: Tensors) -> torch.Tensor:
    return _gated(S, x, p) + _outer(x["b"], _read(x["a"], S)) + _outer(x["k"], x["v"])


def _hgrn(S: torch.Tensor, x: Tensors, p: Tensors) -> torch.Tensor:
    return _gated(S, x, p) + (1 - x["g"].exp()) * x["x"]


def _hgrn2(S: torch.Tensor, x: Tensors, p: Tensors) -> torch.Tensor:
    return _gated(S, x, p) + _outer(1 - x["g"].exp(), x["v"])


def _added(S: torch.Tensor, x: Tensors, p: Tensors) -> torch.Tensor:
    return _gated(S, x, p) + x["x"]


def _scaled(S: torch.Tensor, x: Tensors, p: Tensors) -> torch.Tensor:
    return K**-0.5 * _read(x["q"], S)


def _with_own_bias(S: torch.Tensor, x: Tensors, p: Tensors) -> torch.Tensor:
    own = (p["u"].exp() - 1) * (x["q"] * x["k"]).sum(-1)
    return K**-0.5 * (_read(x["q"], S) + own.unsqueeze(-1) * x["v"])


def _with_bonus(S: torch.Tensor, x: Tensors, p: Tensors) -> torch.Tensor:
    return K**-0.5 * _read(x["q"], S + p["u"].unsqueeze(-1) * _outer(x["k"], x["v"]))


@dataclass(frozen=True)
class Variant:
    """`step(S, x, params)` is the recurrence of one token, `read(S, x, params)` its output, of the state after it or
    before it."""

    step: Callable[..., torch.Tensor]
    tokens: Sequence[str]
    params: Sequence[str] = ()
    read: Callable[..., torch.Tensor] = _scaled
    state: Sequence[int] = (K, V)
    transition: str = "none"
    before: bool = False


VARIANTS = {
    "linear": Variant(_diagonal, "qkv"),
    "retnet": Variant(_diagonal, "qkv", ["log_gamma"], transition="scalar"),
    "simple_gla": Variant(_diagonal, ["q", "k", "v", "g"], transition="scalar"),
    "gla": Variant(_diagonal, ["q", "k", "v", "G"], transition="vector"),
    "gla_outer_gates": Variant(_diagonal, ["q", "k", "v", "G", "W"], transition="elementwise"),
    "gla_own_bias": Variant(_diagonal, ["q", "k", "v", "G"], ["u"], read=_with_own_bias, transition="vector"),
    "deltanet": Variant(_delta, ["q", "k", "v", "b"], transition="dense"),
    "gated_deltanet": Variant(_delta, ["q", "k", "v", "beta", "g"], transition="dense"),
    "vector_gated_delta": Variant(_delta, ["q", "k", "v", "beta", "G"], transition="dense"),
    "gdn2": Variant(_erased, ["q", "k", "v", "erase", "write", "G"], transition="dense"),
    "hgrn": Variant(_hgrn, ["q", "x", "G"], read=lambda S, x, p: x["q"] * S, state=(K,), transition="vector"),
    "hgrn2": Variant(_hgrn2, ["q", "v", "G"], transition="vector"),
    "rwkv6": Variant(_diagonal, ["q", "k", "v", "G"], ["U"], read=_with_bonus, transition="vector", before=True),
    "rwkv7": Variant(_low_rank, ["q", "k", "v", "ab", "G"], transition="dense"),
    "vector_state": Variant(_added, ["x", "G"], read=lambda S, x, p: S, state=(K,), transition="vector"),
}

OFTEN = [name for name in VARIANTS if name not in ("gla_outer_gates", "hgrn2", "rwkv6", "rwkv7", "vector_state")]
USUAL = quick(VARIANTS, *OFTEN)
"""For the loops that CI runs: the latest ones, which are put together like others, are slow tests."""


def state_sizes(name: str) -> tuple[int, ...]:
    """Of one head's state, at the sizes that are set; the last is the width of the outputs."""
    return (K, V)[: len(VARIANTS[name].state)]


def draw(name: str, B: int, T: int, seed: int) -> tuple[Tensors, Tensors]:
    """(tokens, params) in float64; "G" is a gate a channel, "W" a small one of values, "U" a number a channel, "ab"
    the pair a = -x and b, a share of x, with x of length 1.

    Keys of delta rules have length 1.
    """
    variant, made = VARIANTS[name], torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made, dtype=torch.float64)

    tokens: Tensors = {}
    for key in variant.tokens:
        if key in ("b", "beta"):
            tokens[key] = normal(B, T, H).sigmoid()
        elif key == "ab":
            removed = normalize(normal(B, T, H, K), dim=-1)
            tokens |= {"a": -removed, "b": removed * normal(B, T, H, K).sigmoid()}
        elif key in ("g", "G"):
            tokens["g"] = logsigmoid(normal(B, T, H, K) if key == "G" else normal(B, T, H))
        elif key in ("erase", "write"):
            tokens[key] = normal(B, T, H, K if key == "erase" else V).sigmoid()
        elif key == "W":
            tokens["w"] = 0.1 * logsigmoid(normal(B, T, H, V))
        else:
            tokens[key] = normal(B, T, H, V if key == "v" else K)
    if variant.step in (_delta, _erased):
        tokens["k"] = normalize(tokens["k"], dim=-1)
    params = {
        key.lower(): logsigmoid(normal(H)) if key == "log_gamma" else normal(H, K) if key == "U" else normal(H)
        for key in variant.params
    }
    return tokens, params


def token_loop(
    name: str, tokens: Tensors, params: Tensors, initial: torch.Tensor, bounds: Sequence[int] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, final states) of states [N, H, ...]; N = B, or the number of documents at `bounds`."""
    variant = VARIANTS[name]
    T = next(iter(tokens.values())).shape[1]
    o, finals = [], []
    spans = [(0, T)] if bounds is None else list(zip(bounds, bounds[1:], strict=False))
    for n, (begin, end) in enumerate(spans):
        S = initial if bounds is None else initial[n : n + 1]
        for t in range(begin, end):
            x = {key: value[:, t] for key, value in tokens.items()}
            after = variant.step(S, x, params)
            o.append(variant.read(S if variant.before else after, x, params))
            S = after
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


# Linear attention in other forms --------------------------------------------------------------------------------------


def chunk_ok(k: Any, v: Any) -> Any:
    return k.T @ v


def decay_ok(prev_s: Any, chunk_state: Any) -> Any:
    return prev_s + chunk_state


def merge_ok(q: Any, k: Any, v: Any, chunk_state: Any, scale: Any) -> Any:
    return ((q @ k.T).tril(0) @ v + q @ chunk_state) * scale


def gated_inputs(T: int = 20, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    x = {name: torch.randn(1, T, H, V if name == "v" else K, dtype=dtype) for name in "qkv"}
    return x | {"g": -torch.rand(1, T, H, dtype=dtype)}


def untraced(functions: dict[str, Function], x: dict[str, torch.Tensor], params: dict[str, Any], C: int) -> Any:
    """Outputs of the functions called as they are, head by head and chunk by chunk."""

    def call(role: str, values: dict[str, Any]) -> Any:
        function = functions[role]
        return function(**{name: values[name] for name in inspect.signature(function).parameters if name in values})

    T = x["q"].shape[1]
    o = torch.zeros(1, T, H, V, dtype=torch.float64)
    for head in range(H):
        S = torch.zeros(K, V, dtype=torch.float64)
        for t in range(0, T, C):
            values = {name: y[0, t : t + C, head] for name, y in x.items()} | {"scale": K**-0.5}
            values |= {name: y[head] for name, y in params.items()}
            o[0, t : t + C, head] = call("merge_mode", values | {"chunk_state": S})
            S = call("decay_mode", values | {"prev_s": S, "chunk_state": call("chunk_mode", values)})
    return o


def scored(scores: Function) -> Function:
    """merge_mode whose scores are made by `scores(s, g, b)` from tril(q k^T)."""

    def merge(q: Any, k: Any, v: Any, g: Any, chunk_state: Any) -> Any:
        return scores((q @ k.T).tril(), g, g.cumsum(0)) @ v + q @ chunk_state

    return merge


EXPONENTS: dict[str, Function] = {
    "factors": lambda s, g, b: s * b.unsqueeze(1).exp() * (-b).unsqueeze(0).exp(),
    "a row": lambda s, g, b: s * g[None].exp(),
    "1-D": lambda s, g, b: s * g.exp(),
    "keyword": lambda s, g, b: torch.mul(input=s, other=torch.exp(input=b[:, None] - b[None])),
}


CASTS: dict[str, Function] = {
    "sum of masks": lambda s, g, b: s * ((s > 0).float() + (s > -1).float()),
    "type_as": lambda s, g, b: s * ((s > 0).type_as(s) + (s > -1).type_as(s)),
    "one minus": lambda s, g, b: s * (1 - (s > 0).to(s.dtype)),
    "negative": lambda s, g, b: s * -(s > 0).double(),
    "product": lambda s, g, b: (s > 0).to(s.dtype),
    "mean": lambda s, g, b: s * (s > 0).float().mean(-1, keepdim=True),
    "to a mask": lambda s, g, b: torch.where((s * s).to(torch.bool), s, 2 * s),
    "inverted": lambda s, g, b: s * (~torch.ones_like(s).tril().bool()).to(s.dtype) + s,
    "count": lambda s, g, b: s / (1 + (g < -0.5).cumsum(0, dtype=torch.float64)[:, None]),
}


def sized(scores: Function) -> Function:
    """merge_mode with all scores: `scores(s, d)` masks them and multiplies by e^d."""

    def merge(q: Any, k: Any, v: Any, g: Any, chunk_state: Any) -> Any:
        b = g.cumsum(0)
        return scores(q @ k.T, b[:, None] - b[None]) @ v + (q * b.exp()[:, None]) @ chunk_state

    return merge


DECAYED: dict[str, Function] = {
    "mask last": lambda s, d: (s * d.exp()).tril(),
    "mask last, negative": lambda s, d: -(s * 0.5 * d.exp() / 3).tril(0),
    "where": lambda s, d: torch.where(torch.ones_like(s).tril() > 0, s * d.exp(), 0.0),
    "masked_fill": lambda s, d: (s * d.exp()).masked_fill(torch.ones_like(s).tril() == 0, 0.0),
    "a mask as factor": lambda s, d: s * d.exp() * (torch.ones_like(s).tril() > 0).to(s.dtype),
    "scaled": lambda s, d: s.tril() * (0.5 * d.exp()),
    "base 2": lambda s, d: s.tril() * torch.exp2(d),
    "two diagonals": lambda s, d: (lambda e: s.tril(0) * e + (s + 1).tril() * e + s.tril(-1) * e)(d.exp()),
}


KINDS: dict[str, tuple[Function, str]] = {
    "clamp": (lambda prev_s, chunk_state: (prev_s + chunk_state).clamp(-100, 100), "sequential"),
    "norm": (lambda prev_s, chunk_state: prev_s * (30 / prev_s.norm()).clamp(max=1) + chunk_state, "sequential"),
    "where": (lambda prev_s, chunk_state: torch.where(prev_s < 99, prev_s, 99.0) + chunk_state, "sequential"),
    "gate far off": (
        lambda prev_s, chunk_state, k, g: prev_s - (g - 99).relu().sum() * (k.T @ (k @ prev_s)) + chunk_state,
        "dense",
    ),
    "factor far off": (lambda prev_s, chunk_state, g: prev_s * (1 + (g - 99).relu().sum()) + chunk_state, "scalar"),
    "far off by row": (lambda prev_s, chunk_state, k: prev_s * (k - 9).relu().sum(0)[:, None] + chunk_state, "vector"),
    "turned twice": (lambda prev_s, chunk_state, k: (prev_s.T * k.sum(0)).transpose(0, 1) + chunk_state, "vector"),
    "turned once": (lambda prev_s, chunk_state, k, v: (prev_s.T * v.sum(0)[:, None]).T + chunk_state, "elementwise"),
    "by column": (lambda prev_s, chunk_state, v: prev_s * v.sum(0).unsqueeze(0) + chunk_state, "elementwise"),
    "triangle": (lambda prev_s, chunk_state: prev_s.tril() + chunk_state, "elementwise"),
    "subtracted": (lambda prev_s, chunk_state: chunk_state - prev_s / 2, "scalar"),
    "static mask": (
        lambda prev_s, chunk_state, g: torch.where(g.sum() > 0, prev_s, prev_s * 0.5) + chunk_state,
        "scalar",
    ),
    "one or the other": (lambda prev_s, chunk_state, g: torch.where(g.sum() > 0, prev_s * 0.5, chunk_state), "scalar"),
    "by a method": (lambda prev_s, chunk_state, g: (prev_s * 0.5).where(g.sum() < 99, chunk_state), "scalar"),
    "filled": (lambda prev_s, chunk_state, g: prev_s.masked_fill(g.sum() > 0, 2.0) + chunk_state, "scalar"),
    "a number added": (lambda prev_s, chunk_state: 1 - torch.add(prev_s / 2, chunk_state, alpha=3), "scalar"),
    "by keywords": (
        lambda prev_s, chunk_state: torch.cat(tensors=[torch.rsub(prev_s[:1], other=2.0), prev_s[1:]]) + chunk_state,
        "dense",
    ),
    "where by keywords": (
        lambda prev_s, chunk_state, g: prev_s.where(condition=g.sum() > 0, other=chunk_state),
        "sequential",
    ),
    "twice": (lambda prev_s, chunk_state: prev_s + prev_s + chunk_state, "scalar"),
    "a sum of three": (lambda prev_s, chunk_state: sum([prev_s] * 3) + chunk_state, "scalar"),
    "real": (lambda prev_s, chunk_state, g: prev_s.real * g.sum() + chunk_state, "scalar"),
    "real, far off": (
        lambda prev_s, chunk_state, g: torch.where(g.sum() > 99, (prev_s * 2).real, prev_s) + chunk_state,
        "scalar",
    ),
    "turned twice by attributes": (lambda prev_s, chunk_state, k: (prev_s.H * k.sum(0)).mT + chunk_state, "vector"),
    "not used": (lambda prev_s, chunk_state: chunk_state * 2 + prev_s.size(0), "scalar"),
}  # fmt: skip


class LogGates:
    """Gates in (0, 1)."""

    @staticmethod
    def chunk(k: Any, v: Any, g: Any) -> Any:
        b = g.log().cumsum(0)
        return (k * (b[-1] - b).exp()[:, None]).T @ v

    @staticmethod
    def decay(prev_s: Any, chunk_state: Any, g: Any) -> Any:
        return prev_s * g.log().sum(0).exp() + chunk_state

    @staticmethod
    def merge(q: Any, k: Any, v: Any, g: Any, chunk_state: Any) -> Any:
        b = g.log().cumsum(0)
        return ((q @ k.T).tril() * (b[:, None] - b[None]).exp()) @ v + (q * b.exp()[:, None]) @ chunk_state


class Normalised:
    """The output is narrower than the state, whose last column is the normaliser."""

    @staticmethod
    def augmented(v: Any) -> Any:
        return torch.cat([v, torch.ones_like(v[:, :1])], 1)

    @staticmethod
    def chunk(k: Any, v: Any) -> Any:
        return k.square().T @ Normalised.augmented(v)

    @staticmethod
    def merge(q: Any, k: Any, v: Any, chunk_state: Any) -> Any:
        y = (q.square() @ k.square().T).tril() @ Normalised.augmented(v) + q.square() @ chunk_state
        return y[:, :-1] / y[:, -1:]


class HGRNByPairs:
    """HGRN with the decay of every pair of tokens and channel, [C, C, K]."""

    @staticmethod
    def chunk(x: Any, g: Any) -> Any:
        return ((1 - g.exp()) * x * (g.sum(0) - g.cumsum(0)).exp()).sum(0)

    @staticmethod
    def decay(prev_s: Any, chunk_state: Any, g: Any) -> Any:
        return prev_s * g.sum(0).exp() + chunk_state

    @staticmethod
    def merge(q: Any, x: Any, g: Any, chunk_state: Any) -> Any:
        b = g.cumsum(0)
        causal = torch.ones_like(b @ b.T).tril(0) > 0
        between = torch.where(causal.unsqueeze(-1), b.unsqueeze(1) - b.unsqueeze(0), float("-inf")).exp()
        return q * ((between * ((1 - g.exp()) * x).unsqueeze(0)).sum(1) + b.exp() * chunk_state)


class Rotated:
    """Pairs of channels, so K is even and there are K/2 angles."""

    @staticmethod
    def turned(x: Any, angle: Any) -> Any:
        even, odd, c, s = x[:, ::2], x[:, 1::2], angle.cos(), angle.sin()
        return torch.stack([even * c - odd * s, even * s + odd * c], -1).flatten(-2)

    @staticmethod
    def chunk(k: Any, v: Any, angle: Any) -> Any:
        return Rotated.turned(k, angle).T @ v

    @staticmethod
    def merge(q: Any, k: Any, v: Any, angle: Any, chunk_state: Any) -> Any:
        q, k = Rotated.turned(q, angle), Rotated.turned(k, angle)
        return (q @ k.T).tril() @ v + q @ chunk_state


def exponential_features(q: Any, k: Any, v: Any, chunk_state: Any) -> Any:
    s = (q.exp() @ k.exp().T).tril()
    return (s / s.sum(-1, keepdim=True)) @ v + q @ chunk_state


def mixed(prev_s: Any, chunk_state: Any, k: Any) -> Any:
    return (k.T @ k @ (prev_s + chunk_state)).tanh()


def saturated(prev_s: Any, chunk_state: Any) -> Any:
    return (prev_s + chunk_state).tanh()


def narrow_chunk(k: Any, v: Any) -> Any:
    return (k.to(torch.bfloat16).T @ v.half()).float()


def narrow_merge(q: Any, k: Any, v: Any, chunk_state: Any, scale: Any) -> Any:
    return ((q @ k.T).tril(0).to(v.dtype) @ v + q @ chunk_state.bfloat16()) * scale


def by_a_parameter(q: Any, k: Any, v: Any, u: Any, chunk_state: Any) -> Any:
    return ((q @ k.T).tril() * u.exp()) @ v + q @ chunk_state


class Chunks:
    def chunk(self, k: Any, v: Any) -> Any:
        return k.T @ v

    __call__ = chunk


class Module(torch.nn.Module):
    def forward(self, k: Any, v: Any) -> Any:
        return k.T @ v


def doubled(k: Any, v: Any, factor: float = 2.0) -> Any:
    return k.T @ v * factor


# Functions to refuse --------------------------------------------------------------------------------------------------


def branching(k: Any, v: Any) -> Any:
    return k.T @ v if k.sum() > 0 else v.T @ k


def without_gradients(k: Any, v: Any) -> Any:
    with torch.no_grad():
        k = k * 2
    return k.T @ v


def in_place(k: Any, v: Any) -> Any:
    return (k.T @ v).add_(1.0)


def item(k: Any, v: Any) -> Any:
    state = k.T @ v
    state[0] = 0
    return state


def unsupported(k: Any, v: Any) -> Any:
    return torch.fft.fft(k).real.T @ v


def wrong_shape(k: Any, v: Any) -> Any:
    return v.T @ k


def mismatched(k: Any, v: Any) -> Any:
    return k @ v


def not_causal(q: Any, k: Any, v: Any, chunk_state: Any, scale: Any) -> Any:
    return ((q @ k.T) @ v + q @ chunk_state) * scale


def wrong_output(q: Any, chunk_state: Any) -> Any:
    return (q @ chunk_state).sum(0)


def unknown_cached(q: Any, w: Any, chunk_state: Any) -> Any:
    return q @ chunk_state + w


def from_the_right(prev_s: Any, chunk_state: Any, v: Any) -> Any:
    return prev_s @ (v.T @ v) + chunk_state


def forgets(chunk_state: Any) -> Any:
    return chunk_state * 2


def general_inverse(k: Any, v: Any) -> Any:
    return (k @ k.T).inverse() @ v


def two_results(k: Any, v: Any) -> Any:
    return k.T @ v, v


def whole_numbers(k: Any, v: Any) -> Any:
    return k.to(torch.int32).to(k.dtype).T @ v


WEIGHT = torch.randn(K, K)


def closure(k: Any, v: Any) -> Any:
    return (k @ WEIGHT).T @ v


def constant(k: Any, v: Any) -> Any:
    return (k * torch.tensor(2.0)).T @ v


def loops(k: Any, v: Any) -> Any:
    return sum(k[i][:, None] * v[i][None] for i in range(k.shape[0]))


def makes_ones(k: Any, v: Any) -> Any:
    return (k * torch.ones(k.size(0), 1)).T @ v


def raises_lines(k: Any, v: Any) -> Any:
    raise ValueError("the first line\nand more\nof them")


def sums_rows(prev_s: Any, chunk_state: Any, k: Any) -> Any:
    return prev_s * k[k[:, 0] > -1e9].sum() + chunk_state


def picks_rows(q: Any, k: Any, v: Any, chunk_state: Any) -> Any:
    s = (q @ k.T).tril()
    return s[s[:, 0] > -1e9] @ v + q @ chunk_state


def no_tokens(scale: Any) -> Any:
    return scale


def many_arguments(k: Any, v: Any, *more: Any) -> Any:
    return k.T @ v


def bad(k: Any, v: Any, g: Any) -> Any:
    return k.T @ v * (-g * g - 1).log().sum()
