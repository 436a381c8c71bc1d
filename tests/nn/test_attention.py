"""Softmax attention on one rank: against the token loop, in blocks of any size, for every backend that runs on CPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flexsp.comm.group import SequenceParallel
from flexsp.exceptions import NotAvailable
from flexsp.nn import Attention, SequenceParallelLA
from flexsp.nn.attention import blocks, local, scaled_dot_product_attention
from flexsp.nn.attention.function import _check_backend
from flexsp.nn.attention.local import Sight, choose_backend
from flexsp.testing.compare import DRAWS, RoundedProducts, check_functions
from tests.attention_oracle import attention_at_once, attention_token_loop

Inputs = dict[str, torch.Tensor]


def random_inputs(B: int, T: int, heads: tuple[int, int], sizes: tuple[int, int]) -> Inputs:
    (H, HK), (K, V) = heads, sizes
    shapes = {"q": (B, T, H, K), "k": (B, T, HK, K), "v": (B, T, HK, V)}
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}


def random_options(B: int, T: int) -> dict[str, Any]:
    options: dict[str, Any] = {
        "is_causal": random.random() < 0.6, "window": random.choice([None, 1, 5, 100]),
        "scale": random.choice([None, 0.7]),
    }  # fmt: skip
    if B == 1:
        inner = [random.randint(0, T) for _ in range(3)]
        options["cu_seqlens"] = torch.tensor(sorted([0, *inner, inner[0], T]), dtype=random.choice([torch.int32, None]))
    return options


def answers(run: Callable[..., torch.Tensor], x: Inputs, dtype: torch.dtype, draws: int = 1) -> list[Inputs]:
    """Outputs and gradients, for cotangents that are the same for every function and dtype."""
    x = {name: t.to(dtype).detach().requires_grad_() for name, t in x.items()}
    o, made, found = run(**x), torch.Generator().manual_seed(0), []
    for _ in range(draws):
        do = torch.randn(o.shape, generator=made).bfloat16().to(o.dtype)
        grads = torch.autograd.grad(o, list(x.values()), do, retain_graph=True)
        found.append({"o": o.detach(), **{f"d{name}": grad for name, grad in zip(x, grads, strict=True)}})
    return found


def same(run: Callable[..., torch.Tensor], x: Inputs, options: dict[str, Any]) -> None:
    (got,) = answers(run, x, torch.float64)
    (want,) = answers(lambda **x: attention_token_loop(**x, **options), x, torch.float64)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("rows", [3, 256])
def test_equals_the_token_loop(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grouped heads, values of another size, windows and documents, in one block of queries and in many."""
    monkeypatch.setattr(blocks, "_ROWS", rows)
    for number in range(16):
        B, T = 1 + number % 2, random.choice([0, 1, 9, 23])
        HK, group = random.choice([1, 2, 3]), random.choice([1, 2, 3])
        sizes, options = random.choice([(4, 4), (3, 6), (5, 1)]), random_options(B, T)
        x = random_inputs(B, T, (HK * group, HK), sizes)
        same(lambda options=options, **x: scaled_dot_product_attention(**x, **options), x, options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    x = {name: t.to(dtype).double() for name, t in random_inputs(1, 60, (4, 2), (16, 24)).items()}
    options = {"window": 20, "cu_seqlens": torch.tensor([0, 7, 7, 41, 60])}
    got = answers(lambda **x: scaled_dot_product_attention(**x, **options), x, dtype, DRAWS)
    assert all(t.dtype == dtype for t in got[0].values())
    want = answers(lambda **x: attention_token_loop(**x, **options), x, torch.float64, DRAWS)
    with RoundedProducts(dtype):
        low = answers(lambda **x: attention_at_once(**x, **options), x, torch.float32, DRAWS)
    check_functions(got, want, low)


def test_unusual_strides_and_gradients_twice() -> None:
    x = random_inputs(2, 11, (4, 2), (3, 5))
    strided = {name: t.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0).requires_grad_() for name, t in x.items()}
    do = torch.randn(2, 11, 4, 5, dtype=torch.float64).transpose(1, 2).contiguous().transpose(1, 2)
    o = scaled_dot_product_attention(**strided)
    first = torch.autograd.grad(o, list(strided.values()), do, retain_graph=True)
    second = torch.autograd.grad(o, list(strided.values()), do)
    plain = {name: t.clone().requires_grad_() for name, t in x.items()}
    want = torch.autograd.grad(attention_token_loop(**plain), list(plain.values()), do)
    for a, b, c in zip(first, second, want, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c, rtol=1e-10, atol=1e-10)


def test_compiled() -> None:
    torch._dynamo.reset()
    options = {"window": 4, "cu_seqlens": torch.tensor([0, 5, 12])}
    call = lambda q, k, v: scaled_dot_product_attention(q, k, v, **options)  # noqa: E731
    same(torch.compile(call, fullgraph=True, backend="aot_eager"), random_inputs(1, 12, (4, 2), (4, 3)), options)


@pytest.mark.parametrize("is_causal", [True, False])
def test_sdpa(is_causal: bool) -> None:
    x, options = random_inputs(2, 13, (6, 2), (4, 4)), {"is_causal": is_causal, "scale": 0.3}
    same(lambda **x: scaled_dot_product_attention(**x, backend="sdpa", **options), x, options)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex() -> None:
    """Which keys it hides, by flex_attention as it is, which has no backward pass on CPU. On CUDA it is compiled."""
    for at in range(4):
        T, is_causal = 300, at != 1
        window, bounds = [None, 9, 150, 200][at], torch.tensor([0, 20, 20, 290, 300]) if at % 2 else None
        x = {name: t.float() for name, t in random_inputs(1, T, (4, 2), (16, 24)).items()}
        ranges = Sight(is_causal, window, bounds, T).ranges(T, T, torch.device("cpu"))
        got = local._flex(**x, ranges=ranges, scale=0.25)
        want = scaled_dot_product_attention(**x, is_causal=is_causal, window=window, cu_seqlens=bounds)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 100, 140])
def test_blocks_of_the_mask(window: int | None, is_causal: bool, packed: bool) -> None:
    """Every block that a query sees part of is listed, as whole exactly where all of its queries see all of it."""
    start, T, total = 70, 300, 520
    first, last = (0, start + T) if is_causal else (0, total)
    bounds = torch.tensor([0, 100, 233, 233, total]) if packed else None
    sight = Sight(is_causal, window, bounds, total, start, first)
    begin, end = ranges = sight.ranges(T, last, torch.device("cpu"))
    seen = (torch.arange(last) >= begin[:, None]) & (torch.arange(last) < end[:, None])
    mask = local.block_mask(ranges, last)
    for row in range(-(-T // 128)):
        few = mask.kv_indices[0, 0, row, : mask.kv_num_blocks[0, 0, row]].tolist()
        whole = mask.full_kv_indices[0, 0, row, : mask.full_kv_num_blocks[0, 0, row]].tolist()
        for column in range(-(-last // 128)):
            part = seen[row * 128 : row * 128 + 128, column * 128 : column * 128 + 128]
            assert (column in whole) == (bool(part.all()) and part.shape[1] == 128)
            assert (column in few) <= (column not in whole) and (column in few + whole) >= bool(part.any())


def test_bounds_that_are_known_without_reading() -> None:
    """Blocks on a GPU, where ranges are not read, are those on CPU where there are no documents, on any rank."""
    for is_causal in (True, False):
        for window in (None, 1, 7):
            for start, first in ((0, 0), (11, 0), (11, 5 if window else 0)):
                T, total = 600, 620
                keys = (start + T if is_causal else total) - first
                ranges = Sight(is_causal, window, None, total, start, first).ranges(T, keys, torch.device("cpu"))
                numbers = start - first, is_causal, -1 if window is None else window
                read, known = (list(blocks._blocks((1, T, 1), keys, x, *numbers)) for x in (ranges, ranges.to("meta")))
                assert read == known and len(read) == 3


def test_what_auto_takes() -> None:
    def like(T: int, dtype: torch.dtype, size: int, device: str = "cuda") -> Any:
        shape = torch.Size((1, T, 2, size))
        return SimpleNamespace(
            shape=shape, dtype=dtype, device=device, is_cuda=device == "cuda", numel=lambda: shape.numel()
        )

    half, plain = torch.bfloat16, Sight(True, None, None, 64)
    for q, v, sight, keys, want in (
        (like(64, half, 64), like(64, half, 64), plain, 64, "sdpa"),
        (like(64, half, 64), like(64, half, 128), plain, 64, "flex"),
        (like(64, half, 64), like(64, half, 64), plain._replace(window=3), 64, "flex"),
        (like(64, half, 64), like(64, half, 64), plain._replace(cu_seqlens=torch.tensor([0, 64])), 64, "flex"),
        (like(32, half, 64), like(32, half, 64), plain, 64, "flex"),
        (like(32, half, 64), like(32, half, 64), plain._replace(is_causal=False), 64, "sdpa"),
        (like(64, torch.float32, 64), like(64, torch.float32, 64), plain, 64, "flex"),
        (like(64, torch.float64, 64), like(64, torch.float64, 64), plain, 64, "blocks"),
        (like(64, half, 8), like(64, half, 64), plain, 64, "blocks"),
        (like(64, half, 64), like(64, half, 512), plain, 64, "blocks"),
        (like(0, half, 64), like(0, half, 64), plain, 64, "blocks"),
        (like(64, half, 64, "cpu"), like(64, half, 64, "cpu"), plain, 64, "blocks"),
    ):
        assert choose_backend(q, v, sight, keys) == want
    _check_backend("flex", like(64, torch.float32, 64), None, None)
    with pytest.raises(ValueError, match='backend: .* not in float64, got "flex" for torch.float64 on cuda'):
        _check_backend("flex", like(64, torch.float64, 64), None, None)


def test_wrong_arguments() -> None:
    x = {name: t.float() for name, t in random_inputs(1, 6, (4, 2), (3, 5)).items()}
    for change, message in (
        ({"q": x["q"][0]}, r"q: expected a 4-D tensor \[B, T, H, K\], got shape \[6, 4, 3\]"),
        ({"k": x["k"][:, :5]}, r"k: expected shape \[B, T, HK, K\] = \[1, 6, 2, 3\], got \[1, 5, 2, 3\]"),
        ({"k": torch.randn(1, 6, 3, 3)}, "k: expected a number of heads that divides the 4 of q, got 3"),
        ({"k": x["k"].double()}, "k: expected dtype float32, got torch.float64"),
        ({"v": x["v"][:, :, :1]}, r"v: expected shape \[B, T, HK, V\] = \[1, 6, 2, 5\], got \[1, 6, 1, 5\]"),
        ({"window": 0}, "window: expected an integer >= 1, got 0"),
        ({"cu_seqlens": torch.tensor([0, 7])}, "cu_seqlens: expected a last entry of at most 6"),
        ({"dropout_p": 0.1}, r"dropout_p: expected 0.0 \(dropout of attention weights is not available\), got 0.1"),
        ({"softcap": 30.0}, r"softcap: expected None \(not available\), got a float"),
        ({"sinks": torch.ones(4)}, r"sinks: expected None \(not available\), got a Tensor"),
        ({"backend": "flash"}, 'backend: expected "auto" or "sdpa" or "flex" or "blocks", got \'flash\''),
        ({"backend": "sdpa", "window": 3}, 'backend: expected "auto", "flex" or "blocks" with a window or documents'),
        ({"backend": "flex"}, 'backend: expected "flex" only on CUDA'),
        ({"exchange": "ring"}, 'exchange: expected "auto" or "heads" or "keys"'),
        ({"sp": True}, "sp: expected a SequenceParallel, None or False, got bool"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            scaled_dot_product_attention(**{**x, **change})
    sp = SequenceParallel(rank=0, world_size=3)
    with pytest.raises(ValueError, match=r'exchange: expected "auto" or "keys" \(4 heads do not divide by 3 ranks\)'):
        scaled_dot_product_attention(**x, sp=sp, exchange="heads")


def test_derivatives_that_are_not_there() -> None:
    x = {name: t.requires_grad_() for name, t in random_inputs(1, 6, (2, 2), (3, 3)).items()}
    o = scaled_dot_product_attention(**x)
    with pytest.raises(NotAvailable, match="second derivatives"):
        torch.autograd.grad(o.sum(), x["q"], create_graph=True)
    with pytest.raises(NotAvailable, match="transforms of torch.func"):
        torch.func.vmap(lambda q: scaled_dot_product_attention(q, x["k"], x["v"]))(x["q"][None])


def test_positions_turn_pairs_of_channels() -> None:
    """Rotary embedding as a product of complex numbers, of part of the channels."""
    layer = Attention(12, 2, rope_theta=100.0, rope_dim=4).double()
    x = torch.randn(1, 7, 12, dtype=torch.float64)
    q, _, _ = layer._heads(x, torch.arange(5, 12))
    plain = layer.q_proj(x).unflatten(-1, (2, 6))
    numbers = torch.complex(plain[..., :2], plain[..., 2:4])
    angles = torch.arange(5, 12)[:, None] * torch.tensor([1.0, 0.1], dtype=torch.float64)
    turned = numbers * torch.polar(torch.ones_like(angles), angles)[:, None]
    torch.testing.assert_close(q, torch.cat([turned.real, turned.imag, plain[..., 4:]], -1))


def test_layer_against_torch() -> None:
    """Without positions and norms it is torch's attention of the projections."""
    layer, x = Attention(12, 4, num_kv_heads=2, rope_theta=None), torch.randn(2, 9, 12)
    q, k, v = (p(x).unflatten(-1, (-1, 3)).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(layer(x), layer.o_proj(o.transpose(1, 2).flatten(-2)))


def test_a_window_bounds_the_cache() -> None:
    layer = Attention(12, 2, window=4)
    _, cache = layer(torch.randn(2, 9, 12), cache=layer.init_cache(2))
    assert cache.k.shape == (2, 3, 2, 6) and cache.seen == 9
    _, cache = layer.step(torch.randn(2, 12), cache)
    assert cache.v.shape == (2, 3, 2, 6) and cache.seen == 10
    for wrong in (None, cache._replace(v=cache.v[:1]), cache._replace(k=cache.k[..., :3])):
        with pytest.raises(ValueError, match="^cache"):
            layer.step(torch.randn(2, 12), wrong)


class Caller(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(-1, (2, -1))
        return scaled_dot_product_attention(x, x, x).flatten(-2)


def test_the_wrapper_takes_both() -> None:
    sp = SequenceParallel()
    for module in (Attention(12, 2), nn.Sequential(Caller())):
        x = torch.randn(1, 5, 12)
        want = module(x)
        assert torch.equal(SequenceParallelLA(module, sp)(x), want)
    with pytest.raises(ValueError, match="use flexsp.nn.Attention or"):
        SequenceParallelLA(nn.MultiheadAttention(12, 2), sp)
