"""How layers of released models call their ops: inputs, ours, other libraries as those libraries' own layers call them,
and the same in PyTorch."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from flexsp.bench.case import Case, Inputs, Op, Peer, Shape, ours, theirs
from flexsp.bench.cases import CASES
from flexsp.bench.gates import BOUND, TRAINED, Decays, Normal, decays, log_gates
from flexsp.bench.in_pytorch import program
from flexsp.bench.naive import mamba, mamba3, mlstm, rg_lru
from flexsp.bench.own_inputs import xl_chunk

__all__ = ["KINDS", "Layer", "Way", "case_of", "ways"]


@dataclass(frozen=True)
class Layer:
    """A layer of a released model: its op as a name of `ways`, and sizes.

    Attributes:
        H: heads of values.
        K, V: sizes of a head's state, which mamba_ssm calls N and P. A layer whose state is a vector has H = 1 and V
            channels, each with K numbers of state.
        G: heads of queries and keys, or groups of B and C.
        gates: the kind of log gates of its trained models, of `flexsp.bench.gates`; "own" where the op has its own,
            "none" where it has none.
    """

    name: str
    op: str
    H: int
    K: int
    V: int
    G: int
    gates: str

    def __post_init__(self) -> None:
        if self.H % self.G:
            raise ValueError(f"{self.name}: expected G to divide H = {self.H}, got {self.G}")

    def shape(self, B: int, T: int) -> Shape:
        return Shape(B, T, self.H, self.K, self.V)

    @property
    def sizes(self) -> str:
        if self.H == 1:
            return f"{self.V} channels" + (f" x {self.K}" if self.K > 1 else "")
        return (f"{self.G}/" if self.G not in (1, self.H) else "") + f"{self.H} x {self.K}/{self.V}"


@dataclass(frozen=True)
class Way:
    """A way to call an op, for one kind of gates: what `flexsp.bench.case.Case` has, and the op in PyTorch."""

    draw: Callable[[Layer, Shape, torch.dtype, Normal], Inputs]
    ours: Op
    peers: Mapping[str, Peer] = field(default_factory=dict)
    naive: Op | None = None


def _fla(op: str, **constants: Any) -> dict[str, Peer]:
    return {"fla": Peer("fla", theirs(f"fla.ops.{op}", f"chunk_{op}", **constants))}


@functools.cache
def _bounds(B: int, T: int, device: torch.device) -> torch.Tensor:
    return torch.arange(0, B * T + 1, T, dtype=torch.int32, device=device)


def _cudnn(name: str, **how: Any) -> dict[str, Peer]:
    """An op of cuDNN's frontend, which has tokens of all sequences in one axis, and `a_log` for `A_log`."""

    def run(x: Inputs) -> torch.Tensor:
        op, (B, T) = getattr(importlib.import_module("cudnn.linear_attention"), name), x["do"].shape[:2]
        given = {key: y.flatten(0, 1) if y.dim() > 2 else y for key, y in _renamed(x, A_log="a_log").items()}
        if name == "kimi_delta_attention":
            given["dt_bias"] = x["dt_bias"].view(x["g"].shape[2:])
        o: torch.Tensor = op(**given, cu_seqlens=_bounds(B, T, x["do"].device), **how)[0]
        return o.unflatten(0, (B, T))

    return {"cudnn": Peer("cudnn", run)}


def _rows(shape: Shape, dtype: torch.dtype, normal: Normal, **widths: tuple[int, int]) -> Inputs:
    """Tensors [B, T, heads, width] by name."""
    return {name: normal(shape.B, shape.T, *size).to(dtype) for name, size in widths.items()}


def _heads(x: torch.Tensor, H: int) -> torch.Tensor:
    """Rows of groups for each head."""
    return x.repeat_interleave(H // x.shape[2], 2)


# Decays of a head that do not depend on tokens


def _attention(of: Layer, shape: Shape, dtype: torch.dtype, normal: Normal) -> Inputs:
    keys, values = (of.G, of.K), (of.H, of.V)
    return _rows(shape, dtype, normal, q=keys, k=keys, v=values, do=values)


def _with_decay(decay: Callable[[int, torch.device], torch.Tensor]) -> Op:
    def naive(x: Inputs) -> torch.Tensor:
        B, T, H, _ = x["q"].shape
        return program("simple_gla", {**_without(x), "g": decay(H, x["q"].device).expand(B, T, H)})

    return naive


def _without(x: Inputs, *names: str) -> Inputs:
    return {name: y for name, y in x.items() if name not in ("do", *names)}


_LAYER = {"layer_idx": 40, "num_layers": 80}  # the middle of MiniMax-01


def _retention_decay(H: int, device: torch.device) -> torch.Tensor:
    return torch.log1p(-(2.0 ** (-5.0 - torch.arange(H, device=device))))


def _lightning_decay(H: int, device: torch.device) -> torch.Tensor:
    return -(8 / H) * (1 - _LAYER["layer_idx"] / _LAYER["num_layers"]) * torch.arange(H, device=device)


# Mamba-2


def _mamba2(of: Layer, shape: Shape, dtype: torch.dtype, normal: Normal, kind: str) -> Inputs:
    """Log gates -A softplus(dt + dt_bias), of the kind."""
    found = _rows(shape, dtype, normal, x=(of.H, of.V), B=(of.G, of.K), C=(of.G, of.K), do=(of.H, of.V))
    gates = decays(kind, (of.H,), normal)
    found |= {"dt": normal(shape.B, shape.T, of.H).to(dtype), "A": -gates.A, "D": normal(of.H)}
    return found | {"dt_bias": gates.bias}


def _mamba2_naive(x: Inputs) -> torch.Tensor:
    H, step = x["x"].shape[2], F.softplus(x["dt"] + x["dt_bias"])  # the bias is in float32
    inputs = {"q": _heads(x["C"], H), "k": _heads(x["B"], H), "g": step * x["A"]}
    inputs["v"] = (x["x"] * step.unsqueeze(-1)).to(x["x"].dtype)
    return (program("simple_gla", inputs, 1.0) + x["x"] * x["D"].unsqueeze(-1)).to(x["x"].dtype)


# Gates of a channel


def _gla(of: Layer, shape: Shape, dtype: torch.dtype, normal: Normal, kind: str) -> Inputs:
    found = _attention(of, shape, dtype, normal)
    return found | {"g": log_gates(kind, (shape.B, shape.T, of.H, of.K), normal).to(dtype)}


def _hgrn2(of: Layer, shape: Shape, dtype: torch.dtype, normal: Normal, kind: str) -> Inputs:
    return {name: x for name, x in _gla(of, shape, dtype, normal, kind).items() if name != "k"}


def _fla_hgrn2(x: Inputs) -> torch.Tensor:
    """Keys are what gates forget, as in flash-linear-attention's layer."""
    k = (1 - x["g"].exp()).to(x["v"].dtype)
    return theirs("fla.ops.gla", "chunk_gla")({**_without(x), "k": k})


def _rwkv6(of: Layer, shape: Shape, dtype: torch.dtype, normal: Normal, kind: str) -> Inputs:
    found = _gla(of, shape, dtype, normal, kind)
    found["r"], found["w"] = found.pop("q"), found.pop("g")
    return found | {"u": normal(of.H, of.K).to(dtype)}


def _renamed(x: Inputs, **names: str) -> Inputs:
    return {names.get(name, name): y for name, y in _without(x).items()}


# Delta rules


def _delta(of: Layer, shape: Shape, dtype: torch.dtype, normal: Normal, most: float = 1.0) -> Inputs:
    """beta in 0..most."""
    beta = most * normal(shape.B, shape.T, of.H).sigmoid()
    return _attention(of, shape, dtype, normal) | {"beta": beta.to(dtype)}


def _gated_delta(
    of: Layer, shape: Shape, dtype: torch.dtype, normal: Normal, kind: str, most: float = 1.0
) -> Inputs:  # fmt: skip
    g = log_gates(kind, (shape.B, shape.T, of.H), normal)
    return _delta(of, shape, dtype, normal, most) | {"g": g}


def _raw_delta(
    of: Layer, shape: Shape, dtype: torch.dtype, normal: Normal, kind: str, wide: bool
) -> Inputs:  # fmt: skip
    """What projections give: beta and g before a sigmoid and the function that makes log gates of them."""
    channels = (of.H, of.K) if wide else (of.H,)
    found = _attention(of, shape, dtype, normal) | {"beta": normal(shape.B, shape.T, of.H).to(dtype)}
    found["g"] = normal(shape.B, shape.T, *channels).to(dtype)
    x = normal(of.H)
    gates = Decays(torch.ones_like(x), torch.zeros_like(normal(*channels))) if kind == "bounded" else None
    gates = gates or decays(kind, channels, normal)
    return found | {"A_log": gates.A.log(), "dt_bias": gates.bias.flatten()}


_IN_KERNEL = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
_SAFE = {"safe_gate": True, "lower_bound": BOUND}
_CUDNN = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "safe_gate": True}


def _units(x: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) * (x.to(wide).square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)


def _delta_naive(x: Inputs, name: str, raw: bool = False, bounded: bool = False) -> torch.Tensor:
    H = x["v"].shape[2]
    found = _without(x, "A_log", "dt_bias") | {key: _heads(_units(x[key]), H) for key in "qk"}
    if raw:
        A, shifted = x["A_log"].exp(), x["g"] + x["dt_bias"].view(x["g"].shape[2:])
        A = A.view(-1, *[1] * (x["g"].dim() - 3))
        found["beta"] = x["beta"].sigmoid()
        found["g"] = BOUND * (A * shifted).sigmoid() if bounded else -A * F.softplus(shifted)
    if name == "deltanet":
        found["b"] = found.pop("beta")
    return program(name, found)


def _two_strengths(of: Layer, shape: Shape, dtype: torch.dtype, normal: Normal, kind: str) -> Inputs:
    """As flash-linear-attention's layer calls Gated DeltaNet-2, whose log gates are in float32."""
    found = _attention(of, shape, dtype, normal)
    found |= {"b": normal(shape.B, shape.T, of.H, of.K).sigmoid().to(dtype)}
    found |= {"w": normal(shape.B, shape.T, of.H, of.V).sigmoid().to(dtype)}
    return found | {"g": log_gates(kind, (shape.B, shape.T, of.H, of.K), normal)}


def _two_strengths_naive(x: Inputs) -> torch.Tensor:
    units = {name: _heads(_units(x[name]), x["v"].shape[2]) for name in "qk"}
    return program("gdn2", _renamed(x, b="erase", w="write") | units)


def _given_gates(kind: str, most: float = 1.0) -> Way:
    """As layers of transformers call the gated delta rule."""
    how = {"use_qk_l2norm_in_kernel": True}
    flashqla = Peer("flash_qla", theirs("flash_qla", "chunk_gated_delta_rule", **how))
    return Way(
        partial(_gated_delta, kind=kind, most=most), ours("chunk_gated_delta_rule", **how),
        {**_fla("gated_delta_rule", **how), "flashqla": flashqla, **_cudnn("gated_delta_net", **how)},
        partial(_delta_naive, name="gated_deltanet"),
    )  # fmt: skip


# States that are vectors


def _rg_lru(of: Layer, shape: Shape, dtype: torch.dtype, normal: Normal) -> Inputs:
    """RecurrentGemma's decays at a full gate are uniform in 0.9..0.999."""
    found = {name: normal(shape.B, shape.T, of.V).to(dtype) for name in ("x", "r", "i", "do")}
    decay = 0.9 + 0.099 * torch.special.ndtr(normal(of.V))
    return found | {"Lambda": (-decay.log() / 8).expm1().log()}


def _of_case(name: str) -> Way:
    """A case of `bench op` that draws its own inputs, and its other libraries."""
    case = CASES[name]
    assert case.draw is not None
    draw, fla = case.draw, {} if case.baseline is None else {"fla": Peer("fla", case.baseline)}
    return Way(lambda of, shape, dtype, normal: draw(shape, dtype, normal), case.ours, {**fla, **case.others})


def _rwkv7_naive(x: Inputs) -> torch.Tensor:
    return program("rwkv7", _renamed(x, r="q", w="g"), 1.0)


def _ways(kind: str) -> dict[str, Way]:
    """For gates of the kind; an op that cannot have such gates is not there."""
    found = {
        "gated_delta_rule": _given_gates(kind),
        "gated_delta_rule_to_2": _given_gates(kind, 2.0),
        "gdn2": Way(
            partial(_two_strengths, kind=kind), ours("chunk_gdn2", **_NORM), _fla("gdn2", **_NORM),
            _two_strengths_naive,
        ),
        "gla": Way(
            partial(_gla, kind=kind), ours("chunk_gla"), _fla("gla"), lambda x: program("gla", _without(x)),
        ),
        "hgrn2": Way(
            partial(_hgrn2, kind=kind), ours("chunk_hgrn2"), {"fla": Peer("fla", _fla_hgrn2)},
            lambda x: program("hgrn2", _without(x)),
        ),
        "rwkv6": Way(
            partial(_rwkv6, kind=kind), ours("chunk_rwkv6", scale=1.0), _fla("rwkv6", scale=1.0),
            lambda x: program("rwkv6", _renamed(x, r="q", w="g"), 1.0),
        ),
    }  # fmt: skip
    how = _IN_KERNEL | (_SAFE if kind == "bounded" else {})
    cudnn = _cudnn("kimi_delta_attention", **_CUDNN, gate_lower_bound=BOUND) if kind == "bounded" else {}
    found["kda"] = Way(
        partial(_raw_delta, kind=kind, wide=True), ours("chunk_kda", **how), {**_fla("kda", **how), **cudnn},
        partial(_delta_naive, name="vector_gated_delta", raw=True, bounded=kind == "bounded"),
    )  # fmt: skip
    if kind == "bounded":
        return found
    scan = theirs("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined", chunk_size=256, dt_softplus=True)
    found["mamba2"] = Way(
        partial(_mamba2, kind=kind), ours("mamba2_ssd", dt_softplus=True),
        {"mamba_ssm": Peer("mamba_ssm", scan), **_cudnn("mamba2", dt_softplus=True)}, _mamba2_naive,
    )  # fmt: skip
    found["gated_deltanet"] = Way(  # as flash-linear-attention's layer calls it
        partial(_raw_delta, kind=kind, wide=False), ours("chunk_gated_delta_rule", **_IN_KERNEL),
        {**_fla("gated_delta_rule", **_IN_KERNEL), **_cudnn("gated_delta_net", **_CUDNN)},
        partial(_delta_naive, name="gated_deltanet", raw=True),
    )  # fmt: skip
    return found


_NORM = {"use_qk_l2norm_in_kernel": True}
_OWN = {
    "retention": Way(_attention, ours("chunk_retention"), _fla("retention"), _with_decay(_retention_decay)),
    "lightning": Way(
        _attention, ours("chunk_lightning_attn", **_LAYER), _fla("lightning_attn", **_LAYER),
        _with_decay(_lightning_decay),
    ),
    "delta_rule": Way(
        _delta, ours("chunk_delta_rule", **_NORM), _fla("delta_rule", **_NORM),
        partial(_delta_naive, name="deltanet"),
    ),
    "rg_lru": Way(_rg_lru, ours("rg_lru", unit_start=True), naive=rg_lru),
    "rwkv7": replace(_of_case("rwkv7"), naive=_rwkv7_naive),
    "mlstm": replace(
        _of_case("mlstm"), peers={"mlstm_kernels": xl_chunk(64), "mlstm_kernels (chunks of 128)": xl_chunk(128)},
        naive=mlstm,
    ),
    "mamba": replace(_of_case("mamba"), naive=mamba), "mamba3": replace(_of_case("mamba3"), naive=mamba3),
}  # fmt: skip
KINDS = (*TRAINED, "own")


def ways(kind: str) -> Mapping[str, Way]:
    """The ops by name, as layers call them, that may have such gates: a kind of `TRAINED`, or "own" for ops whose gates
    are not drawn by kind."""
    if kind not in KINDS:
        raise ValueError(f"gates: expected one of {', '.join(KINDS)}, got {kind!r}")
    return _OWN if kind == "own" else _ways(kind)


def case_of(layer: Layer, gates: str | None = None, naive: tuple[str, ...] = ()) -> Case | None:
    """The layer as a case of benchmarks; None where its op has no such gates.

    Args:
        gates: in place of the layer's own kind; ops whose gates are not drawn by kind keep theirs.
        naive: of "eager" and "compile": the op in PyTorch too, as it is and compiled by torch.
    """
    way = ways(layer.gates if layer.gates == "own" or gates is None else gates).get(layer.op)
    if way is None:
        return None
    others = dict(way.peers)
    if way.naive is not None:
        others |= {"pytorch": Peer("torch", way.naive)} if "eager" in naive else {}
        others |= {"torch.compile": Peer("torch", torch.compile(way.naive))} if "compile" in naive else {}
    draw = way.draw
    return Case(
        layer.name, way.ours, None, others=others,
        draw=lambda shape, dtype, normal: draw(layer, shape, dtype, normal),
    )  # fmt: skip
