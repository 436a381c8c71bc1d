"""Tensors that do not lie in memory as kernels read them, and what hooks give back, are read right or refused.

The same of the operators that are made of the engine's kernels and of a variant's generated kernels.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from flexsp.ops import chunk_simple_gla
from flexsp.testing.ranks import run_ranks
from tests import variants
from tests.test_triton_engine import ENV

Tensors = list[torch.Tensor]
Gla = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def drawn() -> Tensors:
    q, k, v = (0.3 * torch.randn(1, 20, 2, 16) for _ in range(3))
    return [q, k, v, -torch.rand(1, 20, 2), torch.randn(1, 2, 16, 16)]


def of_ops(q: Any, k: Any, v: Any, g: Any, state: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return chunk_simple_gla(q, k, v, g, initial_state=state, output_final_state=True)


def of_kernels(q: Any, k: Any, v: Any, g: Any, state: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return variants.load("simple_gla").make(2, 16, 16)(q=q, k=k, v=v, g=g, prev_s=state)


def results(f: Gla, x: Tensors) -> Tensors:
    """Outputs, final states and gradients of both."""
    o, final = f(*x)
    return [o, final, *torch.autograd.grad(o.square().sum() + final.sin().sum(), x)]


def differ(a: Tensors, b: Tensors) -> float:
    return max([(x.detach() - y.detach()).abs().max().item() for x, y in zip(a, b, strict=True)])


class Wrapped(torch.Tensor):
    """A tensor without memory of its own, as those of torch.distributed are."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, strides=inner.stride())  # type: ignore[attr-defined]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def plain(x: Any) -> Any:
            return x.inner if isinstance(x, Wrapped) else x

        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))


# In the worker --------------------------------------------------------------------------------------------------------


def negative_views(sp: Any, op: str) -> list[float]:
    """Differences between calls of views that negate and of tensors that hold the same numbers."""
    f: Gla = {"ops": of_ops, "kernels": of_kernels}[op]
    found = []
    for i in range(5):
        x = drawn()
        y = [z.clone() for z in x]
        x[i] = torch._neg_view(-x[i])
        assert x[i].is_neg()
        with torch.no_grad():
            found.append(differ([*f(*x)], [*f(*y)]))
        if i == 0:
            x, y = ([z.requires_grad_() for z in each] for each in (x, y))
            found.append(differ(results(f, x), results(f, y)))
    return found


def wrapped(sp: Any) -> list[float]:
    found = []
    for i in (0, 2, 3):
        x = drawn()
        y = [z.clone() for z in x]
        x[i] = Wrapped(x[i])
        with torch.no_grad():
            found.append(differ([*of_ops(*x)], [*of_ops(*y)]))
        o, final = of_ops(*[z.requires_grad_() for z in y])
        do, dfinal = torch.randn_like(o), torch.randn_like(final)
        want = torch.autograd.grad([o, final], y, [do, dfinal], retain_graph=True)
        got = torch.autograd.grad([o, final], y, [Wrapped(do), dfinal])
        found.append(differ([*got], [*want]))
    return found


def hooked(sp: Any, op: str) -> dict[str, Any]:
    """What hooks on saved tensors do: a difference, or the error."""
    f: Gla = {"ops": of_ops, "kernels": of_kernels}[op]

    def elsewhere(x: torch.Tensor) -> torch.Tensor:
        """The same bytes behind an address that is no multiple of 16."""
        at = torch.empty(x.numel() + 4, dtype=x.dtype)
        return at[4:].view(x.shape).copy_(x) if x.dtype == torch.uint8 else x

    hooks: dict[str, tuple[Any, Any]] = {
        "moved": (lambda x: x, elsewhere),
        "half": (lambda x: x.half(), lambda x: x.float()),
        "shorter": (lambda x: x, lambda x: x[:-1] if x.dtype == torch.uint8 else x),
        "states": (lambda x: x, lambda x: x.double() if x.shape == (1, 2, 16, 16) else x),
        "inputs": (lambda x: x, lambda x: x.half() if x.shape == (1, 20, 2, 16) else x),
    }
    x = [z.requires_grad_() for z in drawn()]
    want, found = results(f, x), {}
    for name, (pack, unpack) in hooks.items():
        for mode in ("", "under a mode, ") if op == "ops" else ("",):
            try:
                with saved_tensors_hooks(pack, unpack):
                    if mode:
                        with FlopCounterMode(display=False):
                            o, final = f(*x)
                    else:
                        o, final = f(*x)
                grads = torch.autograd.grad(o.square().sum() + final.sin().sum(), x)
                found[mode + name] = differ([*grads], want[2:])
            except ValueError as error:
                found[mode + name] = str(error)
    return found


def checkpointed(sp: Any, op: str) -> list[float]:
    """Counting the operations of one of the passes."""
    f: Gla = {"ops": of_ops, "kernels": of_kernels}[op]
    x = [z.requires_grad_() for z in drawn()]
    want = results(f, x)[2:]
    found = []
    for forward in (True, False):
        count = FlopCounterMode(display=False)
        with count if forward else warnings.catch_warnings():
            o, final = checkpoint(f, *x, use_reentrant=False)
        with warnings.catch_warnings() if forward else count:
            found.append(differ([*torch.autograd.grad(o.square().sum() + final.sin().sum(), x)], want))
    return found


def recorded(sp: Any) -> bool:
    """Whether a trace of TorchScript has the operator."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return "diagonal_forward" in str(torch.jit.trace(of_ops, tuple(drawn()), check_trace=False).graph)


# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["ops", "kernels"])
def test_views_that_negate(op: str) -> None:
    assert run_ranks(negative_views, 1, op, env=ENV) == [[0.0] * 6]


def test_tensors_without_memory() -> None:
    assert run_ranks(wrapped, 1, env=ENV) == [[0.0] * 6]


@pytest.mark.parametrize("op", ["ops", "kernels"])
def test_hooks_that_give_back_others(op: str) -> None:
    (found,) = run_ranks(hooked, 1, op, env=ENV)
    for name, what in found.items():
        if name.endswith("moved"):
            assert what == 0.0, (name, what)
        else:
            assert "saved tensors: expected those that the forward pass kept" in str(what), (name, what)


@pytest.mark.parametrize("op", ["ops", "kernels"])
def test_a_checkpoint_of_which_one_pass_is_watched(op: str) -> None:
    assert run_ranks(checkpointed, 1, op, env=ENV) == [[0.0] * 2]


def test_a_trace_has_the_operator() -> None:
    assert run_ranks(recorded, 1, env=ENV) == [True]
