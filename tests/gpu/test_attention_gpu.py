"""Softmax attention on a GPU: every backend, dtype and mask against PyTorch in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from flexsp.nn import Attention
from flexsp.nn.attention import scaled_dot_product_attention
from flexsp.testing.compare import DRAWS, RoundedProducts, check_functions
from tests.attention_oracle import attention_at_once

T = 700
BOUNDS = torch.tensor([0, 130, 130, 131, 512, T])
MASKS: dict[str, dict[str, Any]] = {
    "causal": {}, "not causal": {"is_causal": False}, "window": {"window": 200},
    "window of both sides": {"window": 65, "is_causal": False}, "packed": {"cu_seqlens": BOUNDS},
    "packed window": {"cu_seqlens": BOUNDS, "window": 90},
}  # fmt: skip
HEADS = [(4, 4, 64, 64), (6, 2, 128, 128), (8, 1, 192, 128), (4, 2, 40, 24)]  # H, HK, K, V
Tensors = dict[str, torch.Tensor]
IN_A_GRAPH = pytest.mark.xfail(
    torch.__version__.startswith("2.11"), strict=True, reason="its compiler (docs/hybrid-models.md)"
)


def inputs(heads: tuple[int, int, int, int], dtype: torch.dtype) -> Tensors:
    H, HK, K, V = heads
    shapes = {"q": (1, T, H, K), "k": (1, T, HK, K), "v": (1, T, HK, V)}
    return {name: torch.randn(shape, device="cuda").to(dtype) for name, shape in shapes.items()}


def on_gpu(options: dict[str, Any]) -> dict[str, Any]:
    return {name: t.cuda() if isinstance(t, torch.Tensor) else t for name, t in options.items()}


def answers(run: Callable[..., torch.Tensor], x: Tensors, dtype: torch.dtype) -> list[Tensors]:
    x = {name: t.to(dtype).detach().requires_grad_() for name, t in x.items()}
    o, found, made = run(**x), [], torch.Generator().manual_seed(0)
    for _ in range(DRAWS):
        do = torch.randn(o.shape, generator=made).bfloat16().to(o.device, o.dtype)
        grads = torch.autograd.grad(o, list(x.values()), do, retain_graph=True)
        found.append({"o": o.detach(), **{f"d{name}": grad for name, grad in zip(x, grads, strict=True)}})
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_against_float64(mask: str, heads: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    x = inputs(heads, dtype)
    got = answers(partial(scaled_dot_product_attention, **on_gpu(MASKS[mask])), x, dtype)
    on_cpu = {name: t.cpu() for name, t in x.items()}
    want = answers(partial(attention_at_once, **MASKS[mask]), on_cpu, torch.float64)
    with RoundedProducts("tf32x3" if dtype == torch.float32 else dtype):
        low = answers(partial(attention_at_once, **MASKS[mask]), on_cpu, torch.float32)
    check_functions(got, want, low)


@pytest.mark.parametrize("mask", MASKS)
def test_blocks(mask: str) -> None:
    """In float64 on the GPU and on the CPU, where blocks are cut by what is read of the mask."""
    x = inputs((6, 2, 24, 16), torch.float64)
    got = answers(partial(scaled_dot_product_attention, **on_gpu(MASKS[mask])), x, torch.float64)[0]
    on_cpu = {name: t.cpu() for name, t in x.items()}
    want = answers(partial(scaled_dot_product_attention, **MASKS[mask]), on_cpu, torch.float64)[0]
    for name in want:
        torch.testing.assert_close(got[name].cpu(), want[name], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("mask", ["causal", pytest.param("packed window", marks=IN_A_GRAPH)])
def test_compiled(mask: str) -> None:
    torch._dynamo.reset()
    x = inputs((4, 2, 64, 64), torch.bfloat16)
    call = partial(scaled_dot_product_attention, **on_gpu(MASKS[mask]))
    run = torch.compile(lambda **x: call(**x), fullgraph=True)
    torch.testing.assert_close(run(**x), call(**x), rtol=2e-2, atol=2e-2)


def test_no_synchronisation() -> None:
    x = {name: t.requires_grad_() for name, t in inputs((4, 2, 64, 64), torch.bfloat16).items()}
    options = [on_gpu(mask) for mask in MASKS.values()]
    for once in (False, True):  # the first calls compile
        torch.cuda.set_sync_debug_mode("error" if once else "default")
        try:
            for each in options:
                scaled_dot_product_attention(**x, **each).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("window", [None, 16])
def test_decoding(window: int | None) -> None:
    layer = Attention(256, 4, 2, window=window).cuda().bfloat16()
    x = torch.randn(2, 40, 256, device="cuda").bfloat16()
    with torch.no_grad():
        want = layer(x)
        y, cache = layer(x[:, :30], cache=layer.init_cache(2))
        found = [y]
        for token in x[:, 30:].unbind(1):
            y, cache = layer.step(token, cache)
            found.append(y[:, None])
    torch.testing.assert_close(torch.cat(found, 1), want, rtol=3e-2, atol=3e-2)
