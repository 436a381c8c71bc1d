"""The layer RWKV7: its formula token by token in float64, decoding, documents and ranks, and the names and first values
of flash-linear-attention's parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexsp.comm.group import SequenceParallel
from flexsp.nn import RWKV7, SequenceParallelLA
from flexsp.testing.ranks import run_ranks

D, EXACT = 12, 1e-12
CASES: dict[str, dict[str, Any]] = {
    "first": {"head_dim": 4},
    "later": {"head_dim": None, "num_heads": 2, "layer_idx": 2, "num_hidden_layers": 5, "value_dim": 8,
              "norm_eps": 1e-2, "decay_low_rank_dim": 3, "gate_low_rank_dim": 5, "a_low_rank_dim": 2,
              "v_low_rank_dim": 4},
    "later, plain norm": {"head_dim": 6, "layer_idx": 1, "elementwise_affine": False},
}  # fmt: skip
every_case = pytest.mark.parametrize("name", CASES)
BOUNDS = torch.tensor([0, 1, 1, 9, 12, 31])


def make(name: str) -> RWKV7:
    """With parameters that are no longer the ones and zeros that some begin as."""
    torch.manual_seed(len(name))
    layer = RWKV7(D, **CASES[name]).double()
    with torch.no_grad():
        for x in layer.parameters():
            x.add_(0.3 * torch.randn_like(x))
    return layer


def inputs(name: str, tokens: int, batch: int = 1) -> dict[str, Tensor]:
    """x, and in later layers the first one's values."""
    found = {"x": torch.randn(batch, tokens, D, dtype=torch.float64)}
    if name != "first":
        found["v_first"] = torch.randn(batch, tokens, CASES[name].get("value_dim", D), dtype=torch.float64)
    return found


def part(given: dict[str, Tensor], at: slice) -> dict[str, Tensor]:
    return {key: x[:, at] for key, x in given.items()}


def off(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.detach(), expected.detach()
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-30))


def low_rank(of: nn.Module, x: Tensor, activation: Any = lambda t: t) -> Tensor:
    first, _, last = of.lora
    y = activation(x @ first.weight.T) @ last.weight.T
    return y if last.bias is None else y + last.bias


def formula(layer: RWKV7, x: Tensor, v_first: Tensor | None, options: dict[str, Any]) -> Tensor:
    """y [T, D] of x [T, D]."""
    H = options.get("num_heads") or D // options["head_dim"]
    K, y, last = D // H, [], torch.zeros(D, dtype=x.dtype)
    V = options.get("value_dim", D) // H
    S = torch.zeros(H, K, V, dtype=x.dtype)
    for t in range(len(x)):
        r, w, k, v, a, g = ((x[t] + (last - x[t]) * getattr(layer, f"x_{i}")[0, 0]) for i in "rwkvag")
        xv, last = v, x[t]
        r, k, v = r @ layer.r_proj.weight.T, k @ layer.k_proj.weight.T, v @ layer.v_proj.weight.T
        w = -0.6065306597126334 * torch.sigmoid(low_rank(layer.w_lora, w, torch.tanh))
        a = torch.sigmoid(low_rank(layer.a_lora, a))
        g = low_rank(layer.g_lora, g, torch.sigmoid)
        if v_first is not None:
            v = v + (v_first[t] - v) * torch.sigmoid(low_rank(layer.v_lora, xv))
        kk, k = (k * layer.k_k).view(H, K), (k * (1 + (a - 1) * layer.k_a)).view(H, K)
        kk = kk / kk.square().sum(-1, keepdim=True).sqrt()
        r, w, a, v = r.view(H, K), w.view(H, K), a.view(H, K), v.view(H, V)
        removed = torch.einsum("hk,hkv->hv", kk, S)
        S = w.exp()[..., None] * S - torch.einsum("hk,hv->hkv", kk * a, removed) + torch.einsum("hk,hv->hkv", k, v)
        o = torch.einsum("hk,hkv->hv", r, S)
        spread = o.var(1, correction=0, keepdim=True) + K * options.get("norm_eps", 1e-5)
        o = (o - o.mean(1, keepdim=True)) / spread.sqrt()
        if options.get("elementwise_affine", True):
            o = o * layer.g_norm.weight.view(H, V) + layer.g_norm.bias.view(H, V)
        o = o + (r * k * layer.r_k).sum(1, keepdim=True) * v
        y.append((o.flatten() * g) @ layer.o_proj.weight.T)
    return torch.stack(y)


@every_case
def test_formulas(name: str) -> None:
    """Outputs, and the gradients of x, of the first layer's values and of every parameter."""
    layer, given = make(name), {key: x.requires_grad_() for key, x in inputs(name, 12, batch=2).items()}
    rows = zip(given["x"], given.get("v_first", (None, None)), strict=True)
    want = torch.stack([formula(layer, *row, CASES[name]) for row in rows])
    y, dy = layer(**given), torch.randn_like(want)
    assert off(y, want) < EXACT
    wanted = given | dict(layer.named_parameters())
    expected, actual = (torch.autograd.grad(out, list(wanted.values()), dy) for out in (want, y))
    wrong = {key: off(a, b) for key, a, b in zip(wanted, actual, expected, strict=True) if not off(a, b) < EXACT}
    assert not wrong and all(grad.abs().max() > 0 for grad in expected)


def test_the_first_layers_values() -> None:
    """What the first layer returns is what later ones take and return."""
    layer, x = make("first"), inputs("first", 7)["x"]
    mixed = x + (torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1) - x) * layer.x_v
    y, values = layer(x, return_v_first=True)
    assert off(y, layer(x)) < EXACT and off(values, mixed @ layer.v_proj.weight.T) < EXACT
    later, given = make("later, plain norm"), {"x": x, "v_first": values}
    y, same = later(**given, return_v_first=True)
    assert same is values and off(y, later(**given)) < EXACT
    y, cache, of_step = layer.step(x[:, 0], layer.init_cache(1), return_v_first=True)
    assert off(of_step, values[:, :1]) < EXACT
    _, cache, of_prompt = layer(x[:, 1:], cache=cache, return_v_first=True)
    assert off(of_prompt, values[:, 1:]) < EXACT
    assert off(layer.step(x[:, :1], cache)[0], layer(torch.cat([x, x[:, :1]], 1))[:, -1:]) < EXACT


@every_case
def test_decoding_and_documents(name: str) -> None:
    """A prompt in two parts, then token by token; and packed documents."""
    layer, given = make(name), inputs(name, 19, batch=3)
    cache, outputs = layer.init_cache(3), []
    for at in (slice(0, 2), slice(2, 13)):
        y, cache = layer(**part(given, at), cache=cache)
        outputs.append(y)
    for t in range(13, 19):
        token = part(given, slice(t, t + 1))
        y, cache = layer.step(**(token | ({"x": token["x"][:, 0]} if t % 2 else {})), cache=cache)
        outputs.append(y.view(3, 1, D))
    assert off(torch.cat(outputs, 1), layer(**given)) < EXACT
    given, bounds = inputs(name, 31), BOUNDS.tolist()
    alone = [layer(**part(given, slice(a, b))) for a, b in zip(bounds[:-1], bounds[1:], strict=True) if a < b]
    assert off(layer(**given, cu_seqlens=BOUNDS), torch.cat(alone, 1)) < EXACT


def cut(sp: SequenceParallel, lengths: list[int], cu: Tensor | None, given: Any, dy: Tensor) -> dict[str, Any]:
    results = {}
    for name in CASES:
        sp.set_lengths(lengths)
        mine, dy_mine = {key: sp.shard(x).requires_grad_() for key, x in given[name].items()}, sp.shard(dy)
        sp.set_lengths(lengths if len(name) % 2 else None)
        layer = SequenceParallelLA(make(name), sp)
        y = layer(**mine, cu_seqlens=cu)
        wanted = mine | dict(layer.named_parameters())
        grads = torch.autograd.grad(y, list(wanted.values()), dy_mine)
        results[name] = {"y": y.detach(), **dict(zip(wanted, grads, strict=True))}
    return results


@pytest.mark.parametrize(
    ("lengths", "packed"),
    [
        ([9, 1, 0, 21], True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (([9, 1, 0, 21], False), ([0, 0, 3, 28], True))),
    ],
)
def test_ranks_equal_one_rank(lengths: list[int], packed: bool) -> None:
    """Uneven and empty shards; gradients of parameters add up."""
    cu, given = BOUNDS if packed else None, {name: inputs(name, 31) for name in CASES}
    dy, wrong = torch.randn(1, 31, D, dtype=torch.float64), {}
    per_rank = run_ranks(cut, len(lengths), lengths, cu, given, dy)
    for name in CASES:
        layer, whole = make(name), {key: x.clone().requires_grad_() for key, x in given[name].items()}
        y = layer(**whole, cu_seqlens=cu)
        wanted = whole | dict(layer.named_parameters())
        expected = dict(zip(wanted, torch.autograd.grad(y, list(wanted.values()), dy), strict=True))
        for key, value in {"y": y.detach(), **expected}.items():
            parts = [results[name][key] for results in per_rank]
            error = off(torch.cat(parts, 1) if key == "y" or key in whole else sum(parts), value)
            wrong |= {(name, key): error} if not error < EXACT else {}
    assert not wrong


@pytest.mark.slow
def test_one_graph() -> None:
    """torch.compile breaks it nowhere."""
    layer, given = make("later"), inputs("later", 9)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    y, want, dy = compiled(**given), layer(**given), torch.randn(1, 9, D, dtype=torch.float64)
    parameters = list(layer.parameters())
    pairs = zip(torch.autograd.grad(y, parameters, dy), torch.autograd.grad(want, parameters, dy), strict=True)
    assert off(y, want) < EXACT and all(off(a, b) < EXACT for a, b in pairs)


def test_checkpoints_load() -> None:
    """Names and shapes of flash-linear-attention 0.6.0, for a width of 128 and heads of 32."""
    maps = {"w": 32, "a": 32, "g": 64, "v": 32}
    theirs = {f"x_{name}": [1, 1, 128] for name in "rwkvag"}
    theirs |= {f"{name}_proj.weight": [128, 128] for name in "rkvo"}
    theirs |= {f"{name}_lora.lora.0.weight": [rank, 128] for name, rank in maps.items()}
    theirs |= {f"{name}_lora.lora.2.weight": [128, rank] for name, rank in maps.items()}
    theirs |= {f"{name}_lora.lora.2.bias": [128] for name in "wav"}
    theirs |= {"k_k": [128], "k_a": [128], "r_k": [4, 32], "g_norm.weight": [128], "g_norm.bias": [128]}
    found = {key: list(x.shape) for key, x in RWKV7(128, 32, layer_idx=1).state_dict().items()}
    assert found == theirs
    first = {key: list(x.shape) for key, x in RWKV7(128, 32).state_dict().items()}
    assert first == {key: shape for key, shape in theirs.items() if not key.startswith("v_lora")}


def test_initialisation() -> None:
    """The authors' first values, for some channels worked out by hand; outputs begin as 0."""
    layer = RWKV7(128, 32, layer_idx=1, num_hidden_layers=3)
    zigzag = torch.tensor([-1.0, 1.0])  # of the first and the last channel
    ends = [0, 127]
    of_w = torch.tensor([-5.5, 0.5]) + 2.5 * zigzag
    of_a = torch.tensor([-0.39, 0.01]) + 0.3 * zigzag
    for bias, want in (
        (layer.w_lora.lora[2].bias, of_w), (layer.a_lora.lora[2].bias, of_a),
        (layer.v_lora.lora[2].bias, torch.tensor([0.93, 0.53])), (layer.k_k, torch.tensor([0.76, 0.66])),
        (layer.x_w[0, 0], 1 - torch.tensor([0, 127 / 128]) ** 0.6), (layer.g_norm.weight, torch.tensor(2 / 3) ** 0.7),
    ):  # fmt: skip
        torch.testing.assert_close(bias[ends], want.expand(2), rtol=1e-5, atol=1e-6)
    weight = layer.k_proj.weight
    torch.testing.assert_close(weight @ weight.T, 0.01 * torch.eye(128), rtol=1e-4, atol=1e-6)
    assert not layer(torch.randn(1, 5, 128), v_first=torch.randn(1, 5, 128)).any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: RWKV7(30, 4), "head_dim: expected a divisor of hidden_size=30, got 4"),
        (lambda: RWKV7(32, None), "num_heads: expected a number of heads with head_dim=None, got None"),
        (lambda: RWKV7(32, None, 5), "num_heads: expected a divisor of hidden_size=32"),
        (lambda: RWKV7(32, 8, 5), "num_heads: expected None with head_dim, or hidden_size / head_dim = 4, got 5"),
        (lambda: RWKV7(32, 8, value_dim=30), "value_dim: expected H . V for 4 heads and V of 1..512, got 30"),
        (lambda: RWKV7(32, 8, layer_idx=3, num_hidden_layers=3), "layer_idx: expected a number below num_hidden_layer"),
        (lambda: RWKV7(8, 4)(torch.rand(1, 3, 8), v_first=torch.rand(1, 3, 8)), "v_first: expected None in the first"),
        (lambda: RWKV7(8, 4, layer_idx=1)(torch.rand(1, 3, 8)), "v_first: expected the first layer's values"),
        (lambda: RWKV7(8, 4, layer_idx=1)(torch.rand(1, 3, 8), v_first=torch.rand(1, 2, 8)),
         r"v_first: expected \[1, 3, 8\], got \[1, 2, 8\]"),
        (lambda: (layer := RWKV7(8, 4, layer_idx=1)).step(torch.rand(1, 8), layer.init_cache(1)),
         "v_first: expected the first layer's values"),
    ],
)  # fmt: skip
def test_bad_arguments(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        call()
