"""Layers: sequence parallel equals one rank, documents are separate, decoding equals the parallel pass."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from flexsp import nn as nn_of_flexsp
from flexsp.comm.group import sequence_parallel
from flexsp.nn import (
    GatedRMSNorm,
    Mamba2,
    RMSNorm,
    ShortConvolution,
    SimpleGLA,
)
from flexsp.nn.recurrent import RecurrentLayer
from flexsp.testing.ranks import run_ranks
from tests.harness.layers import LAYERS, make
from tests.marks import by_turns

WORLD = 4
MIXERS = [name for name in LAYERS if not name.startswith("conv")]
SHARDS = {
    "uneven": [11, 70, 3, 20],
    "shorter than the convolution": [1, 2, 1, 3],
    "empty": [0, 9, 0, 14],
    "one rank has all": [0, 0, 5, 0],
}


def random_documents(total: int, seed: int) -> torch.Tensor:
    """Boundaries of documents of any length, empty ones and one-token ones included."""
    source = random.Random(seed)
    cuts = sorted(source.randint(0, total) for _ in range(source.randint(1, 6)))
    last = source.choice((total, total - total // 7))  # what is behind the last document is 0
    return torch.tensor([0, *cuts, *cuts[:1], last]).sort().values.clamp(max=last)


def forward_backward(layer: nn.Module, x: torch.Tensor, dy: torch.Tensor, cu: torch.Tensor | None) -> dict[str, Any]:
    x = x.detach().clone().requires_grad_()
    y = layer(x, cu_seqlens=cu)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad, "grads": {name: p.grad for name, p in layer.named_parameters()}}


class Separately(nn.Module):
    """One call for each document: what packing must equal."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
        if cu_seqlens is None:
            return self.layer(x)
        bounds = cu_seqlens.tolist()
        found = [self.layer(x[:, a:b]) for a, b in zip(bounds[:-1], bounds[1:], strict=True) if a < b]
        return torch.cat([*found, torch.zeros_like(x[:, bounds[-1] :])], 1)


def cut_cases(sp: Any, name: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    results = []
    for case in cases:
        layer = make(name, case["seed"])
        sp.set_lengths(case["lengths"] if case["known"] else None)
        start = sum(case["lengths"][: sp.rank])
        mine = slice(start, start + case["lengths"][sp.rank])
        with sequence_parallel(sp):
            results.append(forward_backward(layer, case["x"][:, mine], case["dy"][:, mine], case["cu"]))
    return results


@pytest.mark.parametrize("name", LAYERS)
def test_ranks_equal_one_rank(name: str) -> None:
    """Outputs, input gradients and (summed) parameter gradients, with and without documents."""
    cases, width = [], LAYERS[name][2]
    for shards in SHARDS.values():
        for packed in (False, True):
            seed = random.randrange(1 << 30)
            torch.manual_seed(seed)
            lengths = random.Random(seed).sample(shards, WORLD)
            x, dy = torch.randn(2, 1 if packed else 2, sum(lengths), width, dtype=torch.float64).unbind(0)
            cu = random_documents(sum(lengths), seed) if packed else None
            cases.append({"seed": seed, "lengths": lengths, "x": x, "dy": dy, "cu": cu, "known": seed % 2 == 0})
    per_rank = run_ranks(cut_cases, WORLD, name, cases)
    for i, case in enumerate(cases):
        whole = forward_backward(Separately(make(name, case["seed"])), case["x"], case["dy"], case["cu"])
        cut = [results[i] for results in per_rank]

        def same(actual: torch.Tensor, expected: torch.Tensor, what: str, case: dict[str, Any] = case) -> None:
            where = f"{what}, seed {case['seed']}, lengths {case['lengths']}, documents {case['cu']}"
            torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-11, msg=lambda m: f"{where}: {m}")

        same(torch.cat([r["y"] for r in cut], 1), whole["y"], "y")
        same(torch.cat([r["dx"] for r in cut], 1), whole["dx"], "dx")
        for parameter, grad in whole["grads"].items():
            same(sum(r["grads"][parameter.removeprefix("layer.")] for r in cut), grad, parameter)


@pytest.mark.parametrize("name", LAYERS)
def test_documents_are_separate(name: str) -> None:
    seed = random.randrange(1 << 30)
    layer, cu = make(name, seed), random_documents(90, seed)
    x = torch.randn(1, 90, LAYERS[name][2], dtype=torch.float64)
    torch.testing.assert_close(layer(x, cu_seqlens=cu), Separately(layer)(x, cu), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", LAYERS)
def test_tokens_behind_the_last_document(name: str) -> None:
    """They are 0, outputs and gradients, and nothing else knows of them, the gradients of parameters neither."""
    layer, cu = make(name, random.randrange(1 << 30)), torch.tensor([0, 3, 3, 11])
    x, dy = torch.randn(2, 1, 16, LAYERS[name][2], dtype=torch.float64).unbind(0)
    found = forward_backward(layer, x, dy, cu)
    layer.zero_grad()
    want = forward_backward(layer, x[:, :11], dy[:, :11], cu)
    for key in ("y", "dx"):
        assert not found[key][:, 11:].any()
        torch.testing.assert_close(found[key][:, :11], want[key], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found["grads"], want["grads"], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("width", [1, 2, 4, 7])
def test_convolution_against_conv1d(width: int, bias: bool) -> None:
    conv = ShortConvolution(3, width, bias=bias, activation=None).double()
    x, dy = torch.randn(2, 2, 15, 3, dtype=torch.float64).unbind(0)
    x.requires_grad_()
    padded = F.pad(x.transpose(1, 2), (width - 1, 0))
    expected = F.conv1d(padded, conv.weight, conv.bias, groups=3).transpose(1, 2)
    wanted = [x, *conv.parameters()]
    torch.testing.assert_close(conv(x), expected)
    for actual, gradient in zip(
        torch.autograd.grad(conv(x), wanted, dy), torch.autograd.grad(expected, wanted, dy), strict=True
    ):
        torch.testing.assert_close(actual, gradient)


def test_convolution_stops_nan_at_documents() -> None:
    conv = ShortConvolution(3, 4)
    x = torch.randn(1, 12, 3)
    x[:, 4:7] = float("nan")
    x.requires_grad_()
    y = conv(x, cu_seqlens=torch.tensor([0, 4, 7, 7, 12]))
    assert y[:, :4].isfinite().all() and y[:, 7:].isfinite().all()
    (dx,) = torch.autograd.grad(y[:, 7:].sum(), x)
    assert dx[:, :4].isfinite().all() and dx[:, 7:].isfinite().all()


def test_taps_never_read_another_document() -> None:
    """A document of one NaN: the taps behind the first are never on it, so their gradients are finite."""
    conv, x = ShortConvolution(3, 4), torch.randn(1, 12, 3)
    x[:, 4] = float("nan")
    y = conv(x, cu_seqlens=torch.tensor([0, 4, 5, 12]))
    (dweight,) = torch.autograd.grad(y[:, 5:].sum(), conv.weight)
    assert dweight[..., :-1].isfinite().all()


def test_convolution_stops_nan_of_other_ranks() -> None:
    """NaN in the halo that belongs to another document is neither an output's nor a gradient's affair."""
    (_, before, _), (y, dx, dweight) = run_ranks(nan_in_the_halo, 2)
    assert before[:, :3].isfinite().all()
    assert y.isfinite().all() and dx.isfinite().all() and dweight.isfinite().all()


def nan_in_the_halo(sp: Any) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(3)
    conv, x = ShortConvolution(3, 4), torch.randn(1, 6, 3)
    if sp.rank == 0:
        x[:, 3:] = float("nan")
    x.requires_grad_()
    with sequence_parallel(sp):
        y = conv(x, cu_seqlens=torch.tensor([0, 3, 6, 12]))
    (y[:, :3] if sp.rank == 0 else y).square().sum().backward()
    return y, x.grad, conv.weight.grad


@pytest.mark.parametrize(("name", "dtype"), by_turns(LAYERS, [torch.bfloat16, torch.float16]))
def test_low_precision(name: str, dtype: torch.dtype) -> None:
    """Output and gradients in fp16/bf16 are near the same layer in float64, in the input's dtype."""
    exact = make(name, random.randrange(1 << 30)).to(dtype).double()
    layer, tolerance = copy.deepcopy(exact).to(dtype), 60 * torch.finfo(dtype).eps
    apart: dict[str, list[tuple[float, float]]] = {}
    for _ in range(4):  # together, since the gradient of one or two numbers may cancel by chance
        x = torch.randn(1, 40, LAYERS[name][2]).to(dtype)
        y, expected = layer(x), exact(x.double())
        assert y.dtype == dtype
        grads = [torch.autograd.grad(o.double().square().sum(), list(made.parameters()))
                 for o, made in ((y, layer), (expected, exact))]  # fmt: skip
        found, wanted = (
            [o.detach().double(), *(g.double() for g in of)] for o, of in zip((y, expected), grads, strict=True)
        )
        names = ["output", *(name for name, _ in layer.named_parameters())]
        for what, actual, reference in zip(names, found, wanted, strict=True):
            pair = float((actual - reference).norm()), float(reference.norm())
            assert reference.numel() < 8 or pair[0] <= tolerance * pair[1], what
            apart.setdefault(what, []).append(pair)
    for what, pairs in apart.items():
        error, size = (sum(n * n for n in column) ** 0.5 for column in zip(*pairs, strict=True))
        assert error <= tolerance * size, what


@pytest.mark.parametrize("name", MIXERS)
def test_decoding_equals_parallel(name: str) -> None:
    """Token by token, with gradients, and a prompt in two parts followed by tokens, against the parallel pass."""
    layer = make(name, random.randrange(1 << 30))
    x, dy = torch.randn(2, 3, 21, LAYERS[name][2], dtype=torch.float64).unbind(0)
    expected = layer(x.requires_grad_())
    cache, steps = layer.init_cache(3), []
    for token in x.unbind(1):
        y, cache = layer.step(token, cache)
        steps.append(y)
    torch.testing.assert_close(torch.stack(steps, 1), expected, rtol=1e-10, atol=1e-12)
    wanted = [x, *layer.parameters()]
    grads = (torch.autograd.grad(o, wanted, dy) for o in (torch.stack(steps, 1), expected))
    for found, of in zip(*grads, strict=True):
        torch.testing.assert_close(found, of, rtol=1e-9, atol=1e-10)

    first, again = layer(x[:, :2], cache=layer.init_cache(3))
    second, again = layer(x[:, 2:20], cache=again)
    last, again = layer.step(x[:, 20:], again)
    torch.testing.assert_close(torch.cat([first, second, last], 1), expected, rtol=1e-10, atol=1e-12)
    for ours, theirs in zip(again, cache, strict=True):
        if isinstance(theirs, torch.Tensor):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("name", "dtype"), by_turns(MIXERS, [torch.float32, torch.bfloat16]))
def test_decoding_in_other_dtypes(name: str, dtype: torch.dtype) -> None:
    """A prompt, then tokens: as far from the layer in float64 as the parallel pass is; dtypes and sizes as promised."""
    exact = make(name, random.randrange(1 << 30)).to(dtype).double()
    layer = copy.deepcopy(exact).to(dtype)
    x = torch.randn(2, 30, LAYERS[name][2]).to(dtype)
    want = exact(x.double())
    y, cache = layer(x[:, :11], cache=layer.init_cache(2))
    outputs = [y]
    for token in x[:, 11:].unbind(1):
        y, cache = layer.step(token, cache)
        assert y.dtype == dtype and y.shape == token.shape
        if not name.startswith("attention"):
            states = getattr(cache, "state", cache[0])
            states = states if isinstance(states, tuple) else (states,)
            assert all(x.dtype in (torch.float32, torch.bool) for x in states)
        outputs.append(y.unsqueeze(1))
    error = (torch.cat(outputs, 1) - want).norm() / want.norm()
    parallel = (layer(x) - want).norm() / want.norm()
    assert error <= 2 * parallel + 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("name", [x for x in MIXERS if "bare" not in x and "attention" not in x])
def test_a_cache_for_other_sequences_is_refused(name: str) -> None:
    layer, x = make(name, 0), torch.randn(1, 5, LAYERS[name][2], dtype=torch.float64)
    for cache, message in (
        (None, "cache: expected a LayerCache, see init_cache, got NoneType"),
        (layer.init_cache(2), r"cache.state(\[0\])?: expected \[1, "),
        (layer.init_cache(1)._replace(conv=layer.init_cache(2).conv), r"cache.conv: expected \[1, "),
    ):
        with pytest.raises(ValueError, match=message):
            layer.step(x[:, 0], cache)
        if cache is not None:
            with pytest.raises(ValueError, match=message):
                layer(x, cache=cache)
    with pytest.raises(ValueError, match=r"x: expected \[\*, 1, "):
        layer.step(x, layer.init_cache(1))


@pytest.mark.parametrize("size", [1, 8, 256])
def test_the_smallest_and_largest_heads(size: int) -> None:
    x = torch.randn(1, 5, 256)
    for layer in (SimpleGLA(256, 1, head_k_dim=size, head_v_dim=size), Mamba2(256, size, size)):
        assert layer(x).isfinite().all() and layer.step(x[:, 0], layer.init_cache(1))[0].isfinite().all()


@pytest.mark.parametrize("name", MIXERS)
def test_x_of_another_dtype_than_the_layer(name: str) -> None:
    layer, width = make(name, 0).float(), LAYERS[name][2]
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        x = torch.randn(1, 5, width).to(dtype)
        with pytest.raises(ValueError, match=f"^x: expected dtype torch.float32, .*, got {dtype}"):
            layer(x)
        with pytest.raises(ValueError, match=f"^x: expected dtype torch.float32, .*, got {dtype}"):
            layer.step(x[:, 0], layer.init_cache(1))
        with pytest.raises(ValueError, match=f"^x: expected dtype torch.float32, .*, got {dtype}"):
            layer(x, cache=layer.init_cache(1))


@pytest.mark.parametrize("name", MIXERS)
def test_autocast(name: str) -> None:
    """Whatever dtype of the two comes in, the layer's weights are cast too."""
    layer, width = make(name, 0).float(), LAYERS[name][2]
    x = torch.randn(1, 9, width, requires_grad=True)
    want = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        for given in (x, x.bfloat16()):
            y = layer(given)
            assert y.dtype == torch.bfloat16 and (y - want).norm() <= 0.1 * want.norm()
            layer.step(given[:, 0], layer.init_cache(1))
    y.float().sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


def mixed_precision(sp: Any, name: str, each: bool) -> None:
    torch.manual_seed(0)
    layer, x = make(name, 0).float(), torch.randn(1, 9, LAYERS[name][2])
    want = layer(x)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for module in [m for m in layer.modules() if isinstance(m, nn.Linear)] if each else []:
        fully_shard(module, mesh=init_device_mesh("cpu", (sp.world_size,)), mp_policy=policy)
    if not each:
        fully_shard(layer, mesh=init_device_mesh("cpu", (sp.world_size,)), mp_policy=policy)
    for given in (x, x.bfloat16()):
        y = layer(given)
        assert (y - want).norm() <= 0.1 * want.norm()
        y.float().sum().backward()


@pytest.mark.parametrize("each", [False, True], ids=["the layer", "each projection"])
def test_mixed_precision_of_fsdp(each: bool) -> None:
    """Projections that are cut one by one show their own dtype, not that of what comes in, until their hooks run."""
    for name in ("gla", "mamba2", "gated-delta", "kda"):
        run_ranks(mixed_precision, 2, name, each)


def test_mamba2_initialisation() -> None:
    layer = Mamba2(256, head_dim=16, state_size=16)
    dt = F.softplus(layer.dt_bias.double())
    assert dt.min() >= 1e-3 * 0.999 and dt.max() <= 1e-1 * 1.001 and dt.max() > 5 * dt.min()
    assert layer.A_log.exp().min() >= 1 and layer.A_log.exp().max() <= 16
    assert torch.equal(layer.D, torch.ones(32))
    weights = {f"{name}.weight" for name in ("in_proj", "conv1d", "norm", "out_proj")}
    names = weights | {"conv1d.bias", "dt_bias", "A_log", "D"}
    assert set(layer.state_dict()) == names


def test_convolution_loads_conv1d_weights() -> None:
    """In both directions, and those of one that had no axis for the group."""
    theirs, ours = nn.Conv1d(6, 6, 4, groups=6), ShortConvolution(6, 4, bias=True)
    first = {name: x.clone() for name, x in ours.state_dict().items()}
    theirs.load_state_dict(first)
    assert torch.equal(ours.weight, theirs.weight) and torch.equal(ours.bias, theirs.bias)
    ours.load_state_dict(nn.Conv1d(6, 6, 4, groups=6).state_dict())
    assert not torch.equal(ours.weight, theirs.weight)
    ours.load_state_dict({**first, "weight": first["weight"].squeeze(1)})
    assert torch.equal(ours.weight, theirs.weight)


@pytest.mark.parametrize("gate_first", [False, True])
def test_norms(gate_first: bool) -> None:
    x, gate = torch.randn(2, 3, 5, 12, dtype=torch.float64).unbind(0)
    norm = GatedRMSNorm(12, group_size=4, gate_first=gate_first).double()
    nn.init.normal_(norm.weight)
    read = x * F.silu(gate) if gate_first else x
    expected = torch.cat([F.rms_norm(part, (4,), eps=1e-5) for part in read.split(4, -1)], -1) * norm.weight
    torch.testing.assert_close(norm(x, gate), expected if gate_first else expected * F.silu(gate))
    plain = RMSNorm(12).double()
    torch.testing.assert_close(plain(x), F.rms_norm(x, (12,), eps=1e-5))


def cache_under_ranks(sp: Any) -> None:
    for name in ("gla", "mamba2", "gated-delta"):
        layer = make(name, 0)
        x, cache = torch.randn(1, 5, LAYERS[name][2], dtype=torch.float64), layer.init_cache(1)
        with sequence_parallel(sp):
            with pytest.raises(ValueError, match="cache: expected None under sequence parallelism"):
                layer(x, cache=cache)
            if sp.rank == 0:  # generation on one rank needs nobody else
                layer.step(x[:, :1], cache)


def test_cache_under_ranks() -> None:
    run_ranks(cache_under_ranks, WORLD)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ShortConvolution(4, 0), "width: expected an integer >= 1"),
        (lambda: ShortConvolution(4, activation="relu"), "activation: expected"),
        (lambda: ShortConvolution(4)(torch.randn(1, 3, 5)), r"x: expected \[\*, \*, 4\]"),
        (lambda: ShortConvolution(4)(torch.randn(2, 3, 4), torch.tensor([0, 3])), "x: expected batch size 1"),
        (lambda: ShortConvolution(4)(torch.randn(1, 3, 4), [0, 3]), r"cu_seqlens: expected a tensor .*, got list"),
        (lambda: ShortConvolution(4)(torch.randn(1, 3, 4), torch.tensor([0, 4])), "cu_seqlens: expected a last entry"),
        (lambda: ShortConvolution(4)(torch.randn(1, 3, 4), torch.tensor([0.0, 3])), "cu_seqlens: expected dtype int"),
        (lambda: ShortConvolution(4).prefill(torch.randn(1, 3, 4), torch.randn(1, 4, 3)), "cache: expected"),
        (lambda: Mamba2(24, head_dim=32), "head_dim: expected a divisor"),
        (lambda: Mamba2(32, head_dim=16, n_groups=3), "n_groups: expected a divisor"),
        (lambda: Mamba2(600, head_dim=600), r"head_dim: expected 1\.\.512, an integer, got 600"),
        (lambda: Mamba2(32, dt_min=1, dt_max=0.5), r"dt_max: expected a number >= dt_min=1, got 0\.5"),
        (lambda: Mamba2(32, A_init_range=(5, 1)), r"A_init_range: expected .* smaller one first, got \(5, 1\)"),
        (lambda: Mamba2(32, A_init_range=(-1, 1)), r"A_init_range\[0\]: expected a number of 1e-30\.\.1e30, got -1"),
        (lambda: SimpleGLA(30, num_heads=4), "expand_k: expected"),
        (lambda: SimpleGLA(100, 1, expand_k=0.295), r"expand_k: expected .*, an integer, got 100 \* 0\.295 / 1 = "),
        (lambda: Mamba2(64, expand=1.3, head_dim=1), r"expand: expected .*, an integer .*, got 64 \* 1\.3 = 83\.2"),
        (lambda: SimpleGLA(600, 2), r"expand_k: expected a size of heads of 1\.\.256, an integer, got .* = 300"),
        (lambda: SimpleGLA(64, 2, expand_v=32), r"expand_v: expected a size of heads of 1\.\.512, .* = 1024"),
        (lambda: RMSNorm(10, group_size=3), "group_size: expected a divisor"),
    ],
)
def test_bad_input(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_layers_that_generate_are_on_one_base() -> None:
    """Those of ops: attention keeps keys and no state, and a short convolution is a part of layers."""
    generate = {name for name in nn_of_flexsp.__all__ if hasattr(getattr(nn_of_flexsp, name), "init_cache")}
    by_hand = {name for name in generate if not issubclass(getattr(nn_of_flexsp, name), RecurrentLayer)}
    assert by_hand == {"Attention", "ShortConvolution"} and len(generate) > 14
    assert generate <= {cls.__name__ for cls, _, _ in LAYERS.values()}


def test_widths_are_not_cut_off() -> None:
    """100 * 0.29 is a rounding less than 29."""
    layer = SimpleGLA(100, num_heads=1, expand_k=0.29, expand_v=0.57)
    assert layer(torch.randn(1, 3, 100)).shape == (1, 3, 100)
    assert (layer.head_k_dim, layer.head_v_dim) == (29, 57)
