"""Layers with a gate for each channel: their formulas token by token in float64, decoding, documents and ranks to the
last digits, and the names that checkpoints have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexsp import sequence_parallel
from flexsp.comm.group import SequenceParallel
from flexsp.nn import HGRN, HGRN2, RGLRU, GatedLinearAttention, GatedRMSNorm, SequenceParallelLA, conv
from flexsp.testing.ranks import run_ranks

D = 12
CONVOLVED = {"use_short_conv": True, "conv_bias": True, "conv_size": 3}
CASES: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "gla": (GatedLinearAttention, {"num_heads": 2}),
    "gla, groups": (
        GatedLinearAttention,
        {"num_heads": 4, "num_kv_heads": 2, "expand_k": 1, "expand_v": 2, "feature_map": "sigmoid", "clamp_min": -0.02,
         "gate_logit_normalizer": 8, "gate_low_rank_dim": 3, "norm_eps": 1e-2, "gate_fn": "sigmoid", **CONVOLVED},
    ),
    "gla, bare": (GatedLinearAttention, {"num_heads": 3, "use_output_gate": False, "feature_map": "sqrelu"}),
    "hgrn2": (HGRN2, {"expand_ratio": 4}),
    "hgrn2, bounded": (HGRN2, {"num_heads": 2, "expand_ratio": None, "norm_eps": 1e-2, **CONVOLVED}),
    "hgrn": (HGRN, {}),
    "hgrn, bounded": (HGRN, {"expand_ratio": 1.5, "norm_eps": 1e-2, **CONVOLVED}),
    "rg_lru": (RGLRU, {}),
    "rg_lru, heads": (RGLRU, {"lru_width": 15, "num_heads": 3, "conv_size": 2, "unit_start": False}),
}  # fmt: skip
every_case = pytest.mark.parametrize("name", CASES)
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


def context(name: str, layer: nn.Module) -> dict[str, Tensor]:
    """The lower bound of gates, in the cases that have one; the first channel's is 0."""
    if "bounded" not in name:
        return {}
    return {"lower_bound": torch.linspace(0, 0.9, layer.f_proj.out_features, dtype=torch.float64)}


def inputs(tokens: int, batch: int = 1) -> Tensor:
    return torch.randn(batch, tokens, D, dtype=torch.float64)


def off(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.detach(), expected.detach()
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-30))


# The formulas ---------------------------------------------------------------------------------------------------------


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def convolved(x: Tensor, taps: nn.Module | None) -> Tensor:
    """bias + sum_j weight[:, W - 1 - j] x_{t - j} of x [T, N]."""
    if taps is None:
        return x
    weight = taps.weight.squeeze(1)
    W = weight.shape[1]
    rows = [sum(weight[:, W - 1 - j] * x[t - j] for j in range(min(W, t + 1))) for t in range(len(x))]
    return torch.stack(rows) + (0 if taps.bias is None else taps.bias)


def branch(layer: nn.Module, which: str, x: Tensor) -> Tensor:
    return convolved(x @ getattr(layer, f"{which}_proj").weight.T, getattr(layer, f"{which}_conv1d", None))


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def attended(q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> Tensor:
    """K**-0.5 q_t S_t with S_t = diag(a_t) S_{t-1} + k_t v_t^T, of one head."""
    S, o = q.new_zeros(q.shape[1], v.shape[1]), []
    for t in range(len(q)):
        S = a[t, :, None] * S + torch.outer(k[t], v[t])
        o.append(S.T @ q[t] / q.shape[1] ** 0.5)
    return torch.stack(o)


def summed(x: Tensor, a: Tensor) -> Tensor:
    h, o = torch.zeros_like(x[0]), []
    for t in range(len(x)):
        h = a[t] * h + x[t]
        o.append(h)
    return torch.stack(o)


def gla(layer: GatedLinearAttention, x: Tensor, options: dict[str, Any]) -> Tensor:
    q, k, v = (branch(layer, which, x) for which in "qkv")
    if options.get("use_short_conv"):
        q, k, v = silu(q), silu(k), silu(v)
    feature = options.get("feature_map")
    if feature is not None:
        q, k = ({"sigmoid": torch.sigmoid, "sqrelu": lambda t: (t * (t > 0)) ** 2}[feature](t) for t in (q, k))
    first, second = layer.gk_proj
    gate = torch.sigmoid((x @ first.weight.T) @ second.weight.T + second.bias)
    a = gate ** (1 / options.get("gate_logit_normalizer", 16))
    if "clamp_min" in options:
        a = torch.where(a.log() < options["clamp_min"], torch.full_like(a, options["clamp_min"]).exp(), a)
    H, norm = options["num_heads"], getattr(layer, "g_norm", getattr(layer, "g_norm_swish_gate", None))
    K, V, per = q.shape[1] // H, norm.weight.shape[0], H // options.get("num_kv_heads", H)
    o = []
    for h in range(H):
        at, key, value = slice(h * K, h * K + K), slice(h // per * K, h // per * K + K), h // per * V
        head = attended(q[:, at], k[:, key], v[:, value : value + V], a[:, key])
        o.append(rms(head, norm.weight, options.get("norm_eps", 1e-5)))
    y = torch.cat(o, 1)
    if layer.g_proj is not None:
        z = x @ layer.g_proj.weight.T
        y = y * torch.sigmoid(z) * (1 if options.get("gate_fn") == "sigmoid" else z)
    return y @ layer.o_proj.weight.T


def bounded(f: Tensor, lower_bound: Tensor | float = 0.0) -> Tensor:
    return lower_bound + (1 - lower_bound) * torch.sigmoid(f)


def hgrn2(layer: HGRN2, x: Tensor, options: dict[str, Any], **bound: Tensor) -> Tensor:
    q, f, i = (branch(layer, which, x) for which in "qfi")
    q, a, H = silu(q), bounded(f, **bound), layer.num_heads
    K, V = q.shape[1] // H, i.shape[1] // H
    heads = [(slice(h * K, h * K + K), slice(h * V, h * V + V)) for h in range(H)]
    o = torch.cat([attended(q[:, key], 1 - a[:, key], i[:, value], a[:, key]) for key, value in heads], 1)
    return rms(o, layer.g_norm.weight, options.get("norm_eps", 1e-5)) @ layer.o_proj.weight.T


def hgrn(layer: HGRN, x: Tensor, options: dict[str, Any], **bound: Tensor) -> Tensor:
    i, f = (branch(layer, which, x) for which in "if")
    a = bounded(f, **bound)
    h = summed((1 - a) * silu(i), a)
    gate = silu(x @ layer.g_proj.weight.T)
    return (rms(h, layer.g_norm.weight, options.get("norm_eps", 1e-5)) * gate) @ layer.o_proj.weight.T


def rg_lru(layer: RGLRU, x: Tensor, options: dict[str, Any]) -> Tensor:
    u, unit = convolved(layer.linear_x(x), layer.conv_1d), layer.rg_lru
    heads = u.chunk(options.get("num_heads", 1), dim=1)
    r, i = (
        torch.cat([head @ weight[h] + bias[h] for h, head in enumerate(heads)], 1)
        for weight, bias in (
            (unit.recurrent_gate_weight, unit.recurrent_gate_bias), (unit.input_gate_weight, unit.input_gate_bias),
        )
    )  # fmt: skip
    a = torch.exp(-8 * torch.log(1 + unit.recurrent_param.exp()) * torch.sigmoid(r))
    weight = (1 - a**2).sqrt()
    if options.get("unit_start", True):
        weight = torch.cat([torch.ones_like(weight[:1]), weight[1:]])
    h = summed(weight * torch.sigmoid(i) * u, a)
    z = layer.linear_y(x)
    gelu = 0.5 * z * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (z + 0.044715 * z**3)))
    return layer.linear_out(h * gelu)


FORMULAS = {GatedLinearAttention: gla, HGRN2: hgrn2, HGRN: hgrn, RGLRU: rg_lru}


@every_case
def test_formulas(name: str) -> None:
    """Outputs, and the gradients of x and of every parameter."""
    (cls, options), layer, x = CASES[name], make(name), inputs(12, batch=2).requires_grad_()
    given = context(name, layer)
    want = torch.stack([FORMULAS[cls](layer, row, options, **given) for row in x])
    y, dy = layer(x, **given), torch.randn_like(want)
    assert off(y, want) < 1e-12
    wanted = {"x": x, **dict(layer.named_parameters())}
    expected = torch.autograd.grad(want, list(wanted.values()), dy)
    actual = torch.autograd.grad(y, list(wanted.values()), dy)
    wrong = {key: off(a, b) for key, a, b in zip(wanted, actual, expected, strict=True) if off(a, b) >= 1e-12}
    assert not wrong and all(grad.abs().max() > 0 for grad in expected)


@pytest.mark.parametrize("name", ["gla", "hgrn2", "hgrn", "rg_lru"])
def test_formulas_of_long_texts(name: str) -> None:
    """More tokens than a chunk has."""
    (cls, options), layer, x = CASES[name], make(name), inputs(150)
    assert off(layer(x)[0], FORMULAS[cls](layer, x[0], options)) < 1e-12


@pytest.mark.parametrize("cls", [HGRN2, HGRN])
def test_the_least_gate_has_a_gradient(cls: type[nn.Module]) -> None:
    """Of bounds of 0 and 1, and of gates that are closed, it is finite."""
    layer = cls(8, **({"expand_ratio": 4} if cls is HGRN2 else {})).double()
    bound = torch.tensor([0, 1e-12, 0.3, 0.5, 0, 0.9, 0.99, 0.2], dtype=torch.float64, requires_grad=True)
    y = layer(1e3 * torch.randn(1, 9, 8, dtype=torch.float64), lower_bound=bound)
    (gradient,) = torch.autograd.grad(y.sum(), bound)
    assert y.isfinite().all() and gradient.isfinite().all() and gradient[2:4].abs().max() > 0


# Parts equal the whole ------------------------------------------------------------------------------------------------


@every_case
def test_documents_are_separate(name: str) -> None:
    layer, x, bounds = make(name), inputs(31), BOUNDS.tolist()
    given = context(name, layer)
    alone = [layer(x[:, a:b], **given) for a, b in zip(bounds[:-1], bounds[1:], strict=True) if a < b]
    assert off(layer(x, cu_seqlens=BOUNDS, **given), torch.cat(alone, 1)) < 1e-12


@every_case
def test_decoding(name: str) -> None:
    """A prompt in two parts, then token by token."""
    layer, x = make(name), inputs(19, batch=3)
    given, cache, outputs = context(name, layer), layer.init_cache(3), []
    for part in (x[:, :2], x[:, 2:13]):
        y, cache = layer(part, cache=cache, **given)
        outputs.append(y)
    for t in range(13, 19):
        y, cache = layer.step(x[:, t] if t % 2 else x[:, t : t + 1], cache, **given)
        outputs.append(y.view(3, 1, D))
    assert off(torch.cat(outputs, 1), layer(x, **given)) < 1e-12


def cut(sp: SequenceParallel, lengths: list[int], cu: Tensor | None, x: Tensor, dy: Tensor) -> dict[str, Any]:
    results = {}
    for name in CASES:
        sp.set_lengths(lengths)
        mine, dy_mine = sp.shard(x), sp.shard(dy)
        sp.set_lengths(lengths if len(name) % 2 else None)
        plain = make(name)
        layer = SequenceParallelLA(plain, sp)
        y = layer(mine.requires_grad_(), cu_seqlens=cu, **context(name, plain))
        wanted = {"x": mine, **dict(layer.named_parameters())}
        grads = torch.autograd.grad(y, list(wanted.values()), dy_mine)
        results[name] = {"y": y.detach(), **dict(zip(wanted, grads, strict=True))}
    return results


@pytest.mark.parametrize(
    ("lengths", "packed"),
    [
        ([9, 1, 0, 21], True),
        *(pytest.param(lengths, packed, marks=pytest.mark.slow)
          for lengths, packed in (([9, 1, 0, 21], False), ([0, 0, 3, 28], False), ([0, 0, 3, 28], True))),
    ],
)  # fmt: skip
def test_ranks_equal_one_rank(lengths: list[int], packed: bool) -> None:
    """Uneven and empty shards, some shorter than the convolutions; gradients of parameters add up."""
    cu, (x, dy) = BOUNDS if packed else None, inputs(31, batch=2).unsqueeze(1).unbind(0)
    wrong = {}
    per_rank = run_ranks(cut, len(lengths), lengths, cu, x, dy)
    for name in CASES:
        layer, whole = make(name), x.clone().requires_grad_()
        y = layer(whole, cu_seqlens=cu, **context(name, layer))
        wanted = {"x": whole, **dict(layer.named_parameters())}
        expected = dict(zip(wanted, torch.autograd.grad(y, list(wanted.values()), dy), strict=True))
        for key, value in {"y": y.detach(), **expected}.items():
            parts = [results[name][key] for results in per_rank]
            error = off(torch.cat(parts, 1) if key in ("x", "y") else sum(parts), value)
            if error >= 1e-12:
                wrong[name, key] = error
    assert not wrong


@pytest.mark.parametrize("name", ["gla, groups", "hgrn2, bounded", "hgrn, bounded", "rg_lru"])
def test_ranks_exchange_one_halo(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, exchange = [], conv.tokens_before
    monkeypatch.setattr(conv, "tokens_before", lambda *given: calls.append(given) or exchange(*given))
    layer, x = make(name), inputs(5)
    with sequence_parallel(SequenceParallel()):
        y = layer(x)
    assert len(calls) == 1 and off(y, layer(x)) < 1e-15


def recurrent_block() -> RGLRU:
    torch.manual_seed(1)
    return RGLRU(D, lru_width=16, num_heads=2).double()


def cut_block(sp: SequenceParallel, lengths: list[int], x: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    sp.set_lengths(lengths)
    layer, mine = recurrent_block(), sp.shard(x).requires_grad_()
    y = SequenceParallelLA(layer, sp)(mine)
    return y, *torch.autograd.grad(y, [mine, *layer.parameters()], sp.shard(dy))


@pytest.mark.parametrize("lengths", [[0, 1, 20, 0], [11, 1, 0, 9]])
def test_recurrent_gemma(lengths: list[int]) -> None:
    """transformers' block, over uneven ranks, the first of which may be empty. It weighs a text's first token by 1."""
    package = pytest.importorskip("transformers.models.recurrent_gemma")
    config = package.RecurrentGemmaConfig(hidden_size=D, lru_width=16, num_attention_heads=2, num_key_value_heads=1)
    theirs, ours = package.modeling_recurrent_gemma.RecurrentGemmaRecurrentBlock(config, 0).double(), recurrent_block()
    theirs.load_state_dict(ours.state_dict())
    x, dy = inputs(21, batch=2).requires_grad_(), inputs(21, batch=2)
    want, _ = theirs(x, torch.arange(21).expand(2, -1), None, use_cache=False)
    y, dx, *grads = (list(parts) for parts in zip(*run_ranks(cut_block, 4, lengths, x.detach(), dy), strict=True))
    found = [torch.cat(y, 1), torch.cat(dx, 1), *(sum(parts) for parts in grads)]
    names = [name for name, _ in ours.named_parameters()]
    of_theirs = dict(theirs.named_parameters())
    expected = torch.autograd.grad(want, [x, *(of_theirs[name] for name in names)], dy)
    for name, got, of in zip(["y", "x", *names], found, [want, *expected], strict=True):
        assert off(got, of.detach()) < 1e-5, name


@pytest.mark.slow
@every_case
def test_one_graph(name: str) -> None:
    """torch.compile breaks it nowhere."""
    layer, x = make(name), inputs(9)
    given = context(name, layer)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    y, want, dy = compiled(x, **given), layer(x, **given), torch.randn_like(x)
    assert off(y, want) < 1e-12
    parameters = list(layer.parameters())
    pairs = zip(torch.autograd.grad(y, parameters, dy), torch.autograd.grad(want, parameters, dy), strict=True)
    assert all(off(a, b) < 1e-12 for a, b in pairs)


# Checkpoints ----------------------------------------------------------------------------------------------------------

# Names and shapes of flash-linear-attention 0.6.0, and of RecurrentGemma's block in transformers, for a width of 12.
CHECKPOINTS: dict[str, tuple[type[nn.Module], dict[str, Any], dict[str, list[int]]]] = {
    "gla": (
        GatedLinearAttention, {"num_heads": 4, "num_kv_heads": 2, "expand_k": 1, "use_short_conv": True},
        {
            "q_proj.weight": [12, 12], "k_proj.weight": [6, 12], "v_proj.weight": [6, 12], "g_proj.weight": [12, 12],
            "q_conv1d.weight": [12, 1, 4], "k_conv1d.weight": [6, 1, 4], "v_conv1d.weight": [6, 1, 4],
            "gk_proj.0.weight": [16, 12], "gk_proj.1.weight": [6, 16], "gk_proj.1.bias": [6],
            "o_proj.weight": [12, 12], "g_norm_swish_gate.weight": [3],
        },
    ),
    "gla, fewest": (
        GatedLinearAttention, {"num_heads": 2, "use_output_gate": False, "gate_low_rank_dim": 3},
        {
            "q_proj.weight": [6, 12], "k_proj.weight": [6, 12], "v_proj.weight": [12, 12], "gk_proj.0.weight": [3, 12],
            "gk_proj.1.weight": [6, 3], "gk_proj.1.bias": [6], "o_proj.weight": [12, 12], "g_norm.weight": [6],
        },
    ),
    "gla, a gate apart": (
        GatedLinearAttention, {"num_heads": 2, "fuse_norm": False},
        {
            "q_proj.weight": [6, 12], "k_proj.weight": [6, 12], "v_proj.weight": [12, 12], "g_proj.weight": [12, 12],
            "gk_proj.0.weight": [16, 12], "gk_proj.1.weight": [6, 16], "gk_proj.1.bias": [6],
            "o_proj.weight": [12, 12], "g_norm.weight": [6],
        },
    ),
    "hgrn2": (
        HGRN2, {"expand_ratio": 4, "use_short_conv": True},
        {
            "q_proj.weight": [12, 12], "f_proj.weight": [12, 12], "i_proj.weight": [12, 12],
            "q_conv1d.weight": [12, 1, 4], "f_conv1d.weight": [12, 1, 4], "i_conv1d.weight": [12, 1, 4],
            "g_norm.weight": [12], "o_proj.weight": [12, 12],
        },
    ),
    "hgrn": (
        HGRN, {"expand_ratio": 2, "use_short_conv": True},
        {
            "i_proj.weight": [24, 12], "f_proj.weight": [24, 12], "g_proj.weight": [24, 12],
            "f_conv1d.weight": [24, 1, 4], "i_conv1d.weight": [24, 1, 4], "g_norm.weight": [24],
            "o_proj.weight": [12, 24],
        },
    ),
    "rg_lru": (
        RGLRU, {"lru_width": 16, "num_heads": 2},
        {
            "linear_y.weight": [16, 12], "linear_y.bias": [16], "linear_x.weight": [16, 12], "linear_x.bias": [16],
            "linear_out.weight": [12, 16], "linear_out.bias": [12], "conv_1d.weight": [16, 1, 4], "conv_1d.bias": [16],
            "rg_lru.recurrent_param": [16], "rg_lru.input_gate_weight": [2, 8, 8], "rg_lru.input_gate_bias": [2, 8],
            "rg_lru.recurrent_gate_weight": [2, 8, 8], "rg_lru.recurrent_gate_bias": [2, 8],
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints_load(name: str) -> None:
    cls, options, shapes = CHECKPOINTS[name]
    theirs, layer = {key: torch.randn(shape) for key, shape in shapes.items()}, cls(D, **options)
    layer.load_state_dict(theirs, strict=True)
    ours = layer.state_dict()
    for key, x in theirs.items():
        assert torch.equal(ours[key], x)


def test_initialisation() -> None:
    """The decay of an RG-LRU whose gate is open lies in 0.9..0.999."""
    a = torch.exp(-8 * torch.nn.functional.softplus(RGLRU(2048).rg_lru.recurrent_param.double()))
    assert 0.9 * 0.999 < a.min() < 0.905 and 0.994 < a.max() < 0.9995


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: GatedLinearAttention(30, 4), r"expand_k: expected a size of heads of 1\.\.256, an integer, got 30 \*"),
        (lambda: GatedLinearAttention(2048, 2), r"expand_k: expected .*, got 2048 \* 0\.5 / 2 = 512"),
        (lambda: GatedLinearAttention(32, 4, expand_v=0.1), r"expand_v: expected a size of heads .* 32 \* 0\.1 / 4"),
        (lambda: GatedLinearAttention(32, 4, num_kv_heads=3), "num_kv_heads: expected a divisor of num_heads=4, got 3"),
        (lambda: GatedLinearAttention(32, feature_map="tanh"), 'feature_map: expected "relu" or "sigmoid" or'),
        (lambda: GatedLinearAttention(32, gate_fn="tanh"), 'gate_fn: expected "relu" or "sigmoid" or'),
        (lambda: GatedLinearAttention(32, clamp_min=0.5), "clamp_min: expected a number below 0, or None, got 0.5"),
        (lambda: GatedLinearAttention(32, gate_low_rank_dim=0), "gate_low_rank_dim: expected an integer >= 1, got 0"),
        (lambda: HGRN2(32), "expand_ratio: expected hidden_size // expand_ratio, a divisor of hidden_size=32, got 0"),
        (lambda: HGRN2(32, expand_ratio=None), "num_heads: expected a divisor of hidden_size=32 without expand_ratio"),
        (lambda: HGRN2(32, num_heads=5, expand_ratio=None), "num_heads: expected a divisor of hidden_size=32"),
        (lambda: HGRN2(32, expand_ratio=300), r"expand_ratio: expected 1\.\.256, an integer, got 300"),
        (lambda: HGRN(32, expand_ratio=0.3), "expand_ratio: expected hidden_size . expand_ratio, an integer"),
        (lambda: HGRN(8)(torch.rand(1, 3, 8), lower_bound=torch.rand(9)), r"lower_bound: expected \[8\], got \[9\]"),
        (lambda: RGLRU(32, num_heads=5), "num_heads: expected a divisor of lru_width=32, got 5"),
        (lambda: RGLRU(32, conv_size=0), "conv_size: expected an integer >= 1, got 0"),
    ],
)
def test_bad_arguments(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        call()


@every_case
def test_a_wrong_cache_is_refused(name: str) -> None:
    layer, x = make(name), inputs(5)
    cache = layer.init_cache(1)
    with pytest.raises(ValueError, match=r"cache: expected None with cu_seqlens"):
        layer(x, cu_seqlens=torch.tensor([0, 2, 5]), cache=cache)
    with pytest.raises(ValueError, match=r"cache\.state(\[0\])?: expected \[1, "):
        h = cache.state
        layer(x, cache=cache._replace(state=(h[0][..., :-1], h[1]) if isinstance(h, tuple) else h[..., :-1]))
    if cache.conv is not None:
        with pytest.raises(ValueError, match=r"cache\.conv: expected \[1, "):
            layer.step(x[:, 0], cache._replace(conv=cache.conv[:, :-1]))


def test_an_activation_that_a_norm_has_not_is_refused() -> None:
    with pytest.raises(ValueError, match="activation: expected .*silu.*, got 'tanh'"):
        GatedRMSNorm(8, activation="tanh")
