"""Calls under `torch.compile`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from flexsp.compiler import ConstExpr, LinearAttention, SymbTensor


def compiled(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(f, fullgraph=True, backend="aot_eager", **options)


def leaf(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(leaf(y) for y in x)
    return x.detach().clone().requires_grad_() if torch.is_tensor(x) and x.is_floating_point() else x


def tensors(x: Any) -> list[torch.Tensor]:
    if isinstance(x, dict):
        x = tuple(x.values())
    if isinstance(x, (tuple, list)):
        return [t for y in x for t in tensors(y)]
    return [x] if isinstance(x, torch.Tensor) and x.is_floating_point() else []


def counted(f: Callable[..., Any], inductor: bool = False) -> tuple[Callable[..., Any], dict[str, int]]:
    """A compiled function, and the graphs that are made of it; Inductor compiles their operators too, if asked to."""
    made = {"traced": 0, "forward": 0, "backward": 0}

    def compiler(way: str) -> Callable[..., Any]:
        def count(module: torch.fx.GraphModule, inputs: Any) -> Any:
            made[way] += 1
            return make_boxed_func(module.forward)

        return count

    def by_inductor(module: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        made["backward" if options.get("is_backward") else "forward"] += 1
        return compile_fx_inner(module, inputs, **options)

    if inductor:
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        inner: Callable[..., Any] = partial(compile_fx, inner_compile=by_inductor)
    else:
        inner = aot_autograd(fw_compiler=compiler("forward"), bw_compiler=compiler("backward"))

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        made["traced"] += 1
        return inner(module, inputs)

    torch._dynamo.reset()
    return torch.compile(f, fullgraph=True, backend=backend), made


ONE = {"traced": 1, "forward": 1, "backward": 1}


def of_many_sizes(x: Any, *axes: int) -> Any:
    """A leaf whose graph shall hold for other sizes of these axes."""
    if isinstance(x, tuple):
        parts = [of_many_sizes(y, *axes) for y in x]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    x = leaf(x)
    torch._dynamo.maybe_mark_dynamic(x, [*axes])
    return x


SIZES = (2, 4, 3)


def saturating() -> LinearAttention:
    h, k, v = ConstExpr("H", 2), ConstExpr("K", 4), ConstExpr("V", 3)
    key = SymbTensor(["T", h, k])
    meta = {"q": key, "k": key, "v": SymbTensor(["T", h, v]), "prev_s": SymbTensor(["NS", h, k, v])}
    # a constant width, which no input has, and a state that is not affine
    return LinearAttention(
        meta, lambda k, v: k.T @ v, lambda prev_s, chunk_state: (prev_s + chunk_state).tanh(),
        lambda q, v, chunk_state: (torch.cat([q @ chunk_state, v, v[:, :1]], 1)), chunk_size=4,
    )  # fmt: skip
