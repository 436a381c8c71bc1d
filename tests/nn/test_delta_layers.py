"""The layers of the delta rules: their formulas token by token in float64, with every option; decoding, documents and
ranks to the last digits; and the names that checkpoints of flash-linear-attention have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexsp import sequence_parallel
from flexsp.comm.group import SequenceParallel
from flexsp.nn import (
    DeltaNet,
    GatedDeltaNet,
    GatedDeltaNet2,
    GatedDeltaProduct,
    KimiDeltaAttention,
    SequenceParallelLA,
    conv,
)
from flexsp.testing.ranks import run_ranks
from tests.marks import quick

D = 12
GROUPS = {"num_heads": 2, "num_v_heads": 4, "head_dim": 5}
CASES: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "delta": (DeltaNet, {"num_heads": 2}),
    "delta, elu": (
        DeltaNet,
        {"num_heads": 3, "expand_k": 0.5, "expand_v": 1.25, "use_gate": True, "qk_activation": "elu", "qk_norm": "sum",
         "allow_neg_eigval": True, "conv_bias": True, "conv_size": 3, "norm_eps": 1e-2},
    ),
    "delta, relu": (DeltaNet, {"num_heads": 2, "qk_activation": "relu", "use_beta": False, "allow_neg_eigval": True}),
    "delta, bare": (DeltaNet, {"num_heads": 1, "qk_activation": "identity", "use_short_conv": False}),
    "delta, silu, bare": (DeltaNet, {"num_heads": 1, "use_short_conv": False, "qk_norm": "sum"}),
    "gated": (GatedDeltaNet, GROUPS),
    "gated, sigmoid": (
        GatedDeltaNet,
        {**GROUPS, "expand_v": 0.8, "allow_neg_eigval": True, "conv_bias": True, "conv_size": 2,
         "output_gate_activation": "sigmoid", "norm_eps": 1e-2},
    ),
    "gated, bare": (GatedDeltaNet, {"num_heads": 2, "head_dim": 4, "use_gate": False, "use_short_conv": False}),
    "kda": (KimiDeltaAttention, GROUPS),
    "kda, bounded": (
        KimiDeltaAttention,
        {**GROUPS, "expand_v": 1.2, "safe_gate": True, "lower_bound": -4, "allow_neg_eigval": True, "conv_bias": True,
         "norm_eps": 1e-2},
    ),
    "kda, bare": (KimiDeltaAttention, {"num_heads": 2, "head_dim": 4, "use_short_conv": False}),
    "gdn2": (GatedDeltaNet2, GROUPS),
    "gdn2, negative": (
        GatedDeltaNet2,
        {**GROUPS, "expand_v": 1.2, "allow_neg_eigval": True, "conv_bias": True, "norm_eps": 1e-2},
    ),
    "gdn2, bare": (GatedDeltaNet2, {"num_heads": 2, "head_dim": 4, "use_short_conv": False}),
    "product": (GatedDeltaProduct, GROUPS),
    "product, ungated": (
        GatedDeltaProduct,
        {**GROUPS, "expand_v": 1.2, "use_forget_gate": False, "allow_neg_eigval": False, "num_householder": 3,
         "conv_bias": True, "norm_eps": 1e-2},
    ),
    "product, bare": (
        GatedDeltaProduct,
        {"num_heads": 2, "head_dim": 4, "num_householder": 1, "use_output_gate": False, "use_short_conv": False},
    ),
}  # fmt: skip
DEFAULTS = ["delta", "gated", "kda", "gdn2", "product"]
BOUNDS = torch.tensor([0, 1, 1, 9, 12, 31])


def make(name: str) -> nn.Module:
    """With parameters that are no longer the ones and zeros that some begin as."""
    cls, options = CASES[name]
    torch.manual_seed(sum(map(ord, name)))
    layer = cls(D, **options).double()
    with torch.no_grad():
        for x in layer.parameters():
            x.add_(0.3 * torch.randn_like(x) * (x.dim() == 1))
            x.mul_(2.0 if x.dim() == 2 else 1.0)
    return layer


def inputs(tokens: int, batch: int = 1) -> Tensor:
    return torch.randn(batch, tokens, D, dtype=torch.float64)


def off(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.detach(), expected.detach()
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-30))


# The formulas ---------------------------------------------------------------------------------------------------------


class Formulas:
    """A layer's output for one document, token by token and head by head, from its parameters alone."""

    def __init__(self, cls: type[nn.Module], options: dict[str, Any], parameters: dict[str, Tensor]) -> None:
        self.cls, self.p = cls, parameters
        self.o: dict[str, Any] = {"norm_eps": 1e-5, "use_short_conv": True, "qk_activation": "silu", **options}
        self.H = self.o["num_heads"]
        self.HV = self.o.get("num_v_heads", self.H)
        self.steps = self.o.get("num_householder", 2) if cls is GatedDeltaProduct else 1

    def mapped(self, name: str, x: Tensor) -> Tensor:
        return x @ self.p[f"{name}.weight"].T

    def convolved(self, which: str, x: Tensor) -> Tensor:
        """After the projection: sum_j weight[:, 0, W - 1 - j] x_{t - j}, the bias and the activation."""
        x = self.mapped(f"{which}_proj", x)
        if self.o["use_short_conv"]:
            weight, bias = self.p[f"{which}_conv1d.weight"][:, 0], self.p.get(f"{which}_conv1d.bias")
            W, rows = weight.shape[1], []
            for t in range(len(x)):
                row = sum(weight[:, W - 1 - j] * x[t - j] for j in range(min(W, t + 1)))
                rows.append(row if bias is None else row + bias)
            x = torch.stack(rows)
        activation = "silu" if which == "v" else self.o["qk_activation"]
        return {
            "silu": lambda: x * torch.sigmoid(x), "relu": lambda: x * (x > 0), "identity": lambda: x,
            "elu": lambda: torch.where(x > 0, x + 1, torch.exp(x)),
        }[activation]()  # fmt: skip

    def unit(self, x: Tensor) -> Tensor:
        if self.o.get("qk_norm", "l2") == "sum":
            return x / x.abs().sum().clamp(min=1e-6)
        return x / (x.square().sum() + 1e-6).sqrt()

    def strengths(self, x: Tensor, K: int, V: int) -> tuple[Tensor, Tensor]:
        """[T, n HV, K or 1] and [T, n HV, V or 1]: what the key that reads and the value are multiplied by."""
        if self.cls is GatedDeltaNet2:
            erase = torch.sigmoid(self.mapped("b_proj", x)).view(len(x), self.H, K)
            erase = torch.stack([erase[:, h // (self.HV // self.H)] for h in range(self.HV)], 1)
            write = torch.sigmoid(self.mapped("w_proj", x)).view(len(x), self.HV, V)
            return erase * 2 if self.o.get("allow_neg_eigval") else erase, write
        doubled = self.o.get("allow_neg_eigval", self.cls is GatedDeltaProduct)
        beta = torch.sigmoid(self.mapped("b_proj", x)) if "b_proj.weight" in self.p else x.new_ones(len(x), self.HV)
        beta = beta * 2 if doubled else beta
        return beta[:, :, None], beta[:, :, None]

    def decays(self, x: Tensor, K: int) -> Tensor:
        """[T, HV, K or 1]: what the state is multiplied by."""
        if "A_log" not in self.p:
            return x.new_ones(len(x), self.HV, 1)
        A = torch.exp(self.p["A_log"])[:, None]
        if self.cls is KimiDeltaAttention:
            raw = self.mapped("f_proj.1", self.mapped("f_proj.0", x)).view(len(x), self.HV, K)
            raw = raw + self.p["dt_bias"].view(self.HV, K)
        elif self.cls is GatedDeltaNet2:
            raw = self.mapped("f_proj.1", self.mapped("f_proj.0", x)) + self.p["dt_bias"]
            raw, shared = raw.view(len(x), self.H, K), self.HV // self.H
            raw = torch.stack([raw[:, h // shared] for h in range(self.HV)], 1)
            A = torch.stack([A[h // shared] for h in range(self.HV)])
        else:
            raw = (self.mapped("a_proj", x) + self.p["dt_bias"])[:, :, None]
        if self.o.get("lower_bound") is not None:
            return torch.exp(self.o["lower_bound"] * torch.sigmoid(A * raw))
        return torch.exp(-A * torch.log1p(torch.exp(raw)))

    def gate(self, x: Tensor) -> Tensor | float:
        """[T, HV * V]: what the normed output is multiplied by."""
        if self.cls in (KimiDeltaAttention, GatedDeltaNet2):
            return torch.sigmoid(self.mapped("g_proj.1", self.mapped("g_proj.0", x)) + self.p["g_proj.1.bias"])
        if "g_proj.weight" not in self.p:
            return 1.0
        z = self.mapped("g_proj", x)
        return torch.sigmoid(z) * (1 if self.o.get("output_gate_activation") == "sigmoid" else z)

    def output(self, x: Tensor) -> Tensor:
        """x [T, D] -> y [T, D]."""
        q, k, v = (self.convolved(which, x) for which in "qkv")
        K, V = q.shape[1] // self.H, v.shape[1] // (self.steps * self.HV)
        (erase, write), decay, o = self.strengths(x, K, V), self.decays(x, K), []
        for h in range(self.HV):
            S, of = x.new_zeros(K, V), h // (self.HV // self.H)
            for t in range(len(x)):
                S = decay[t, h, :, None] * S
                for s in range(self.steps):
                    at_k, at_v = (s * self.H + of) * K, (s * self.HV + h) * V
                    key, value, at = self.unit(k[t, at_k : at_k + K]), v[t, at_v : at_v + V], s * self.HV + h
                    S = S + torch.outer(key, write[t, at] * value - S.T @ (erase[t, at] * key))
                out = S.T @ self.unit(q[t, of * K : (of + 1) * K]) / K**0.5
                o.append(out / (out.square().mean() + self.o["norm_eps"]).sqrt() * self.p["o_norm.weight"])
        by_token = torch.stack(o).view(self.HV, len(x), V).transpose(0, 1).reshape(len(x), -1)
        return self.mapped("o_proj", by_token * self.gate(x))


@pytest.mark.parametrize("name", CASES)
def test_formulas(name: str) -> None:
    """Outputs, and the gradients of x and of every parameter."""
    layer, x = make(name), inputs(12, batch=2).requires_grad_()
    parameters = dict(layer.named_parameters())
    formulas = Formulas(*CASES[name], parameters)
    want = torch.stack([formulas.output(row) for row in x])
    y, dy = layer(x), torch.randn_like(want)
    assert off(y, want) < 1e-12
    wanted = {"x": x, **parameters}
    expected = torch.autograd.grad(want, list(wanted.values()), dy)
    actual = torch.autograd.grad(y, list(wanted.values()), dy)
    wrong = {key: off(a, b) for key, a, b in zip(wanted, actual, expected, strict=True) if off(a, b) >= 1e-12}
    assert not wrong and all(grad.abs().max() > 0 for grad in expected)


@pytest.mark.parametrize("name", DEFAULTS)
def test_formulas_of_long_texts(name: str) -> None:
    """More tokens than a chunk has."""
    layer, x = make(name), inputs(150)
    assert off(layer(x)[0], Formulas(*CASES[name], dict(layer.named_parameters())).output(x[0])) < 1e-12


# Parts equal the whole ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_documents_are_separate(name: str) -> None:
    layer, x, bounds = make(name), inputs(31), BOUNDS.tolist()
    alone = [layer(x[:, a:b]) for a, b in zip(bounds[:-1], bounds[1:], strict=True) if a < b]
    assert off(layer(x, cu_seqlens=BOUNDS), torch.cat(alone, 1)) < 1e-12


@pytest.mark.parametrize("name", CASES)
def test_decoding(name: str) -> None:
    """A prompt in two parts, then token by token."""
    layer, x = make(name), inputs(19, batch=3)
    cache = layer.init_cache(3)
    channels = sum(getattr(layer, f"{which}_proj").out_features for which in "qkv")
    assert cache.conv is None or cache.conv.shape == (3, channels, layer.conv_size)
    first, cache = layer(x[:, :2], cache=cache)
    outputs = [first]
    second, cache = layer(x[:, 2:13], cache=cache)
    outputs.append(second)
    for t in range(13, 19):
        y, cache = layer.step(x[:, t] if t % 2 else x[:, t : t + 1], cache)
        outputs.append(y.view(3, 1, D))
    assert off(torch.cat(outputs, 1), layer(x)) < 1e-12


def cut(sp: SequenceParallel, lengths: list[int], cu: Tensor | None, x: Tensor, dy: Tensor) -> dict[str, Any]:
    results = {}
    for name in CASES:
        sp.set_lengths(lengths)
        mine, dy_mine = sp.shard(x), sp.shard(dy)
        sp.set_lengths(lengths if len(name) % 2 else None)
        layer = SequenceParallelLA(make(name), sp)
        y = layer(mine.requires_grad_(), cu_seqlens=cu)
        wanted = {"x": mine, **dict(layer.named_parameters())}
        grads = torch.autograd.grad(y, list(wanted.values()), dy_mine)
        results[name] = {"y": y.detach(), **dict(zip(wanted, grads, strict=True))}
    return results


@pytest.mark.parametrize("packed", [False, True], ids=["one text", "documents"])
@pytest.mark.parametrize("lengths", [[29, 2], [0, 31], [9, 1, 0, 21], [0, 0, 3, 28]], ids=str)
def test_ranks_equal_one_rank(lengths: list[int], packed: bool) -> None:
    """Uneven and empty shards, some shorter than the convolutions; gradients of parameters add up."""
    cu, (x, dy) = BOUNDS if packed else None, inputs(31, batch=2).unsqueeze(1).unbind(0)
    wrong = {}
    per_rank = run_ranks(cut, len(lengths), lengths, cu, x, dy)
    for name in CASES:
        layer, whole = make(name), x.clone().requires_grad_()
        y = layer(whole, cu_seqlens=cu)
        wanted = {"x": whole, **dict(layer.named_parameters())}
        expected = dict(zip(wanted, torch.autograd.grad(y, list(wanted.values()), dy), strict=True))
        for key, value in {"y": y.detach(), **expected}.items():
            parts = [results[name][key] for results in per_rank]
            error = off(torch.cat(parts, 1) if key in ("x", "y") else sum(parts), value)
            if error >= 1e-12:
                wrong[name, key] = error
    assert not wrong


@pytest.mark.parametrize("name", DEFAULTS)
def test_ranks_exchange_one_halo(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, exchange = [], conv.tokens_before
    monkeypatch.setattr(conv, "tokens_before", lambda *given: calls.append(given) or exchange(*given))
    layer, x = make(name), inputs(5)
    with sequence_parallel(SequenceParallel()):
        y = layer(x)
    assert len(calls) == 1 and off(y, layer(x)) < 1e-15


@pytest.mark.parametrize("name", quick(DEFAULTS, "gated", "kda"))
def test_one_graph(name: str) -> None:
    """torch.compile breaks it nowhere."""
    layer, x = make(name), inputs(9)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    y, want, dy = compiled(x), layer(x), torch.randn_like(x)
    assert off(y, want) < 1e-12
    parameters = list(layer.parameters())
    pairs = zip(torch.autograd.grad(y, parameters, dy), torch.autograd.grad(want, parameters, dy), strict=True)
    assert all(off(a, b) < 1e-12 for a, b in pairs)


# Checkpoints ----------------------------------------------------------------------------------------------------------

# Names, order and shapes of flash-linear-attention 0.6.0, for a width of 12.
CHECKPOINTS: dict[str, tuple[type[nn.Module], dict[str, Any], dict[str, list[int]]]] = {
    "delta": (
        DeltaNet, {"num_heads": 3, "expand_k": 0.5, "expand_v": 1.5, "use_gate": True, "conv_bias": True},
        {
            "q_proj.weight": [6, 12], "k_proj.weight": [6, 12], "v_proj.weight": [18, 12], "b_proj.weight": [3, 12],
            "q_conv1d.weight": [6, 1, 4], "q_conv1d.bias": [6], "k_conv1d.weight": [6, 1, 4], "k_conv1d.bias": [6],
            "v_conv1d.weight": [18, 1, 4], "v_conv1d.bias": [18], "g_proj.weight": [18, 12], "o_norm.weight": [6],
            "o_proj.weight": [12, 18],
        },
    ),
    "delta, fewest": (
        DeltaNet, {"num_heads": 3, "use_beta": False, "use_short_conv": False},
        {
            "q_proj.weight": [12, 12], "k_proj.weight": [12, 12], "v_proj.weight": [12, 12], "o_norm.weight": [4],
            "o_proj.weight": [12, 12],
        },
    ),
    "gated": (
        GatedDeltaNet, GROUPS,
        {
            "A_log": [4], "dt_bias": [4], "q_proj.weight": [10, 12], "k_proj.weight": [10, 12],
            "v_proj.weight": [40, 12], "a_proj.weight": [4, 12], "b_proj.weight": [4, 12],
            "q_conv1d.weight": [10, 1, 4], "k_conv1d.weight": [10, 1, 4], "v_conv1d.weight": [40, 1, 4],
            "g_proj.weight": [40, 12], "o_norm.weight": [10], "o_proj.weight": [12, 40],
        },
    ),
    "gated, fewest": (
        GatedDeltaNet, {**GROUPS, "use_gate": False, "use_short_conv": False},
        {
            "A_log": [4], "dt_bias": [4], "q_proj.weight": [10, 12], "k_proj.weight": [10, 12],
            "v_proj.weight": [40, 12], "a_proj.weight": [4, 12], "b_proj.weight": [4, 12], "o_norm.weight": [10],
            "o_proj.weight": [12, 40],
        },
    ),
    "kda": (
        KimiDeltaAttention, {**GROUPS, "expand_v": 1.2},
        {
            "A_log": [4], "dt_bias": [20], "q_proj.weight": [10, 12], "k_proj.weight": [10, 12],
            "v_proj.weight": [24, 12], "q_conv1d.weight": [10, 1, 4], "k_conv1d.weight": [10, 1, 4],
            "v_conv1d.weight": [24, 1, 4], "f_proj.0.weight": [6, 12], "f_proj.1.weight": [20, 6],
            "b_proj.weight": [4, 12], "g_proj.0.weight": [6, 12], "g_proj.1.weight": [24, 6], "g_proj.1.bias": [24],
            "o_norm.weight": [6], "o_proj.weight": [12, 24],
        },
    ),
    "gdn2": (
        GatedDeltaNet2, {**GROUPS, "expand_v": 1.2},
        {
            "A_log": [2], "dt_bias": [10], "q_proj.weight": [10, 12], "k_proj.weight": [10, 12],
            "v_proj.weight": [24, 12], "q_conv1d.weight": [10, 1, 4], "k_conv1d.weight": [10, 1, 4],
            "v_conv1d.weight": [24, 1, 4], "f_proj.0.weight": [6, 12], "f_proj.1.weight": [10, 6],
            "b_proj.weight": [10, 12], "w_proj.weight": [24, 12], "g_proj.0.weight": [6, 12],
            "g_proj.1.weight": [24, 6], "g_proj.1.bias": [24], "o_norm.weight": [6], "o_proj.weight": [12, 24],
        },
    ),
    "product": (
        GatedDeltaProduct, {**GROUPS, "num_householder": 3, "conv_size": 2},
        {
            "A_log": [4], "dt_bias": [4], "q_proj.weight": [10, 12], "k_proj.weight": [30, 12],
            "v_proj.weight": [120, 12], "b_proj.weight": [12, 12], "a_proj.weight": [4, 12],
            "q_conv1d.weight": [10, 1, 2], "k_conv1d.weight": [30, 1, 2], "v_conv1d.weight": [120, 1, 2],
            "g_proj.weight": [40, 12], "o_norm.weight": [10], "o_proj.weight": [12, 40],
        },
    ),
    "product, fewest": (
        GatedDeltaProduct,
        {**GROUPS, "use_forget_gate": False, "use_output_gate": False, "use_short_conv": False},
        {
            "q_proj.weight": [10, 12], "k_proj.weight": [20, 12], "v_proj.weight": [80, 12], "b_proj.weight": [8, 12],
            "o_norm.weight": [10], "o_proj.weight": [12, 40],
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints_load(name: str) -> None:
    cls, options, shapes = CHECKPOINTS[name]
    theirs, layer = {key: torch.randn(shape) for key, shape in shapes.items()}, cls(D, **options)
    layer.load_state_dict(theirs, strict=True)
    ours = layer.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[key], x) for key, x in theirs.items())


def test_initialisation() -> None:
    cases = ((GatedDeltaNet, 0), (GatedDeltaProduct, 0), (KimiDeltaAttention, 1), (GatedDeltaNet2, 1))
    for layer, least in [(cls(8, 512, 1), least) for cls, least in cases]:
        dt, A = F.softplus(layer.dt_bias.double()), layer.A_log.double().exp()
        assert 1e-3 * 0.999 <= dt.min() < 2e-3 and 5e-2 < dt.max() <= 1e-1 * 1.001
        assert least * 0.999 <= A.min() < least + 1 and 15 < A.max() <= 16 * 1.001
        assert torch.equal(layer.o_norm.weight, torch.ones_like(layer.o_norm.weight))
    assert not KimiDeltaAttention(8, 2, 4, safe_gate=True, lower_bound=-5).A_log.any()


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: DeltaNet(30, 4), r"expand_k: expected a size of heads of 1\.\.256, .*, got 30 \* 1\.0 / 4 = 7\.5"),
        (lambda: DeltaNet(600, 2), r"expand_k: expected .*, got 600 \* 1\.0 / 2 = 300"),
        (lambda: DeltaNet(32, 2, expand_v=0.3), r"expand_v: expected .*, got 32 \* 0\.3 / 2 = 4\.8"),
        (lambda: DeltaNet(32, 2, qk_activation="tanh"), r'qk_activation: expected "silu" or "relu" or'),
        (lambda: DeltaNet(32, 2, qk_norm="l1"), r'qk_norm: expected "l2" or "sum", got \'l1\''),
        (lambda: GatedDeltaNet(32, 2, 256, expand_v=3), r"expand_v: expected .* of 1\.\.512, an integer, got 256 \* 3"),
        (lambda: GatedDeltaNet(32, 2, 300), r"head_dim: expected 1\.\.256, an integer, got 300"),
        (lambda: GatedDeltaNet(32, 4, 8, num_v_heads=6), "num_v_heads: expected a multiple of num_heads=4, got 6"),
        (lambda: GatedDeltaNet(32, 4, 8, num_v_heads=2), "num_v_heads: expected a multiple of num_heads=4, got 2"),
        (lambda: GatedDeltaNet(32, 2, 8, output_gate_activation="tanh"), "output_gate_activation: expected"),
        (lambda: KimiDeltaAttention(32, 2, 8, lower_bound=1), "lower_bound: expected a number below 0, or None, got 1"),
        (lambda: KimiDeltaAttention(32, 2, 8, safe_gate=True), r"lower_bound: expected a number in \[-5, 0\) with"),
        (
            lambda: KimiDeltaAttention(32, 2, 8, safe_gate=True, lower_bound=-6),
            r"lower_bound: expected a number in \[-5, 0\) with safe_gate, got -6",
        ),
        (lambda: GatedDeltaProduct(32, 2, 8, num_householder=0), "num_householder: expected an integer >= 1, got 0"),
    ],
)
def test_bad_arguments(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        call()


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_wrong_cache_is_refused(name: str) -> None:
    layer, x = make(name), inputs(5)
    cache = layer.init_cache(1)
    with pytest.raises(ValueError, match=r"cache: expected None with cu_seqlens"):
        layer(x, cu_seqlens=torch.tensor([0, 2, 5]), cache=cache)
    with pytest.raises(ValueError, match=r"cache\.conv: expected \[1, "):
        layer.step(x[:, 0], cache._replace(conv=cache.conv[:, :-1]))
    with pytest.raises(ValueError, match=r"cache\.conv: expected a floating tensor \[1, .*, got NoneType"):
        layer(x, cache=cache._replace(conv=None))
    with pytest.raises(ValueError, match=r"cache\.state: expected \[1, "):
        layer(x, cache=cache._replace(state=cache.state[:, :, :-1]))


def test_slopes_beyond_float32_have_finite_gradients() -> None:
    layer = GatedDeltaProduct(16, 2, 8)
    with torch.no_grad():
        layer.A_log.fill_(89.0)
    layer(torch.randn(1, 5, 16)).sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in layer.parameters())
