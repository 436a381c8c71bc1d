"""Tensors that do not lie in memory as kernels read them, and what hooks give back, are read right or refused.

The same of the operators that are made of the engine's kernels and of a variant's generated kernels.
"""

from __future__ import annotations

import contextlib
import functools as ft
import gc
import re
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from flexsp.ops import chunk_simple_gla
from flexsp.testing.ranks import run_ranks
from tests import variants
from tests.harness.interpreted import INTERPRETED
from tests.harness.recorder import Recorder
from tests.marks import quick

Tensors = list[torch.Tensor]
Gla = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def drawn(op: str) -> Tensors:
    q, k, v = (0.3 * torch.randn(1, 20, 2, 16) for _ in range(3))
    return [q, k, v, -torch.rand(1, 20, 2), torch.randn(2 if "packed" in op else 1, 2, 16, 16)]


def of_ops(q: Any, k: Any, v: Any, g: Any, state: Any, bounds: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    return chunk_simple_gla(q, k, v, g, initial_state=state, output_final_state=True, cu_seqlens=bounds)


@ft.cache
def made() -> Any:
    return variants.load("simple_gla").make(2, 16, 16)


def of_kernels(q: Any, k: Any, v: Any, g: Any, state: Any, bounds: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    return made()(q=q, k=k, v=v, g=g, prev_s=state, cu_seqlens=bounds)


BOUNDS = torch.tensor([0, 7, 20])
OPS: dict[str, Gla] = {
    "ops": lambda q, k, v, g, state: of_ops(q, k, v, g, state),
    "kernels": lambda q, k, v, g, state: of_kernels(q, k, v, g, state),
    "packed ops": lambda *x: of_ops(*x, BOUNDS), "packed kernels": lambda *x: of_kernels(*x, BOUNDS),
}  # fmt: skip


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
    f, found = OPS[op], []
    for i in range(5):
        x = drawn(op)
        y = [z.clone() for z in x]
        x[i] = torch._neg_view(-x[i])
        assert x[i].is_neg()
        with torch.no_grad():
            found.append(differ([*f(*x)], [*f(*y)]))
        if i == 0:
            x, y = ([z.requires_grad_() for z in each] for each in (x, y))
            found.append(differ(results(f, x), results(f, y)))
    return found


def wrapped(sp: Any, op: str) -> list[float]:
    """Differences between calls of tensors without memory and of tensors that hold the same numbers."""
    f, found = OPS[op], []
    for i in (0, 2, 3):
        x = drawn(op)
        y = [z.clone() for z in x]
        x[i] = Wrapped(x[i])
        with torch.no_grad():
            found.append(differ([*f(*x)], [*f(*y)]))
        x, y = ([z.requires_grad_() for z in each] for each in (x, y))
        found.append(differ(results(f, x), results(f, y)))
        o, final = f(*y)
        do, dfinal = torch.randn_like(o), torch.randn_like(final)
        want = torch.autograd.grad([o, final], y, [do, dfinal], retain_graph=True)
        got = torch.autograd.grad([o, final], y, [Wrapped(do), dfinal])
        found.append(differ([*got], [*want]))
    return found


def hooked(sp: Any, op: str) -> dict[str, Any]:
    """What hooks on saved tensors do: a difference, or the error."""
    f = OPS[op]

    def behind_an_odd_address(x: torch.Tensor) -> torch.Tensor:
        """The same bytes behind an address that is no multiple of 16."""
        at = torch.empty(x.numel() + 4, dtype=x.dtype)
        return at[4:].view(x.shape).copy_(x) if x.dtype == torch.uint8 else x

    hooks: dict[str, tuple[Any, Any]] = {
        "moved": (lambda x: x, behind_an_odd_address),
        "half": (lambda x: x.half(), lambda x: x.float()),
        "shorter": (lambda x: x, lambda x: x[:-1] if x.dtype == torch.uint8 else x),
        "states": (lambda x: x, lambda x: x.double() if x.shape[1:] == (2, 16, 16) else x),
        "inputs": (lambda x: x, lambda x: x.half() if x.shape == (1, 20, 2, 16) else x),
    }
    x = [z.requires_grad_() for z in drawn(op)]
    want, found = results(f, x), {}
    for name, (pack, unpack) in hooks.items():
        for mode in ("", "under a mode, "):
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
    f = OPS[op]
    x = [z.requires_grad_() for z in drawn(op)]
    want = results(f, x)[2:]
    found = []
    for forward in (True, False):
        count = FlopCounterMode(display=False)
        with count if forward else warnings.catch_warnings():
            o, final = checkpoint(f, *x, use_reentrant=False)
        with warnings.catch_warnings() if forward else count:
            found.append(differ([*torch.autograd.grad(o.square().sum() + final.sin().sum(), x)], want))
    return found


def selected(sp: Any, op: str) -> list[float]:
    """Of checkpoints that keep what operators give, or compute it again."""
    x, found = [z.requires_grad_() for z in drawn(op)], []
    want = results(OPS[op], x)[2:]
    for policy in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE):
        choose = ft.partial(create_selective_checkpoint_contexts, lambda *args, policy=policy, **named: policy)
        o, final = checkpoint(OPS[op], *x, use_reentrant=False, context_fn=choose)
        found.append(differ([*torch.autograd.grad(o.square().sum() + final.sin().sum(), x)], want))
    return found


def shapes_only(sp: Any, op: str) -> list[Any]:
    """Shapes of a call and its gradients where no tensor has memory, and where all have."""
    found = []
    for mode in (FakeTensorMode(allow_non_fake_inputs=True), contextlib.nullcontext()):
        with mode:
            found.append([tuple(y.shape) for y in results(OPS[op], [z.requires_grad_() for z in drawn(op)])])
    return found


def bad_arguments(sp: Any) -> list[str]:
    """What a variant says of them where kernels would run it."""
    *tokens, state = drawn("packed")
    found, bad = [], [(state, bounds) for bounds in ([0, 7, 20], BOUNDS.numpy(), BOUNDS[0])]
    bad += [(given, BOUNDS) for given in (state.numpy(), [1])]
    for mode in (contextlib.nullcontext(), FlopCounterMode(display=False)):
        for given in bad:
            with mode:
                try:
                    of_kernels(*tokens, *given)
                except ValueError as error:
                    found.append(str(error).split(":")[0])
    return found


def tuned(sp: Any) -> int:
    """Operators that a watched call of a variant that tunes its plans comes to."""
    variant, x = variants.load("simple_gla").make(2, 16, 16), [z.requires_grad_() for z in drawn("kernels")]
    variant._autotune = True
    with Recorder() as told:
        variant(**dict(zip("qkvg", x, strict=False)))[0].sum().backward()
    return len(told.calls)


def ended(sp: Any) -> bool:
    """Whether a variant that was watched once ends."""
    variant, x = variants.load("simple_gla").make(2, 16, 16), drawn("kernels")
    seen = weakref.ref(variant)
    with FlopCounterMode(display=False):
        variant(**dict(zip("qkvg", x, strict=False)))
    del variant
    gc.collect()
    return seen() is None


def recorded(sp: Any, op: str) -> list[float]:
    """Differences between what traces, of TorchScript and of make_fx, compute of other tensors, and calls."""
    packed, found = "packed" in op, []
    bounds = [BOUNDS] if packed else []
    f = OPS[op] if not packed else of_kernels if "kernels" in op else of_ops
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.cache_clear()  # no operator knows this one yet
        traces = [torch.jit.trace(f, (*drawn(op), *bounds), check_trace=False)]
        traces += [make_fx(f, tracing_mode=mode)(*drawn(op), *bounds) for mode in ("real", "fake")]
        made.cache_clear()  # traces keep their variant
        gc.collect()
        for trace in traces:
            assert re.search(r"flexsp(::|\.)forward", str(trace.graph))
            x = drawn(op)
            found.append(differ([*trace(*x, *bounds)], [*f(*x, *bounds)]))
    return found


def faked(sp: Any, op: str) -> int:
    """Checks that the operators give what their fakes say, whatever gradients are wanted; how many calls they were."""
    found = 0
    for wanted in ((0, 1, 2, 3, 4), (1,), (3, 4), (4,)):
        x = drawn(op)
        for i in wanted:
            x[i].requires_grad_()
        with Recorder() as told:
            o, final = OPS[op](*x)
            (o.square().sum() + final.sin().sum()).backward()
        for func, args in told.calls:
            args = tree_map(lambda y: y.detach() if isinstance(y, torch.Tensor) else y, args)
            torch.library.opcheck(func, args, test_utils=("test_schema", "test_faketensor"))
            if len(wanted) == 5:
                torch.library.opcheck(func, args, test_utils="test_aot_dispatch_static")
        found += len(told.calls)
    return found


def compiled_backward(sp: Any, op: str) -> list[float]:
    """Differences between gradients of a backward pass that torch.compile traces, and of one that it does not."""
    x = [z.requires_grad_() for z in drawn(op)]
    want, found = results(OPS[op], x)[2:], []
    for whole in (False, True):
        torch._dynamo.reset()
        o, final = OPS[op](*x)
        with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=whole)):
            (o.square().sum() + final.sin().sum()).backward()
        found.append(differ([z.grad for z in x], want))  # type: ignore[misc]
        for z in x:
            z.grad = None
    return found


# ----------------------------------------------------------------------------------------------------------------------

TWO = quick(OPS, "ops", "packed kernels")


@pytest.mark.parametrize("op", quick(OPS, "ops"))
def test_views_that_negate(op: str) -> None:
    assert run_ranks(negative_views, 1, op, env=INTERPRETED) == [[0.0] * 6]


@pytest.mark.parametrize("op", OPS)
def test_tensors_without_memory(op: str) -> None:
    assert run_ranks(wrapped, 1, op, env=INTERPRETED) == [[0.0] * 9]


@pytest.mark.parametrize("op", OPS)
def test_hooks_that_give_back_others(op: str) -> None:
    (found,) = run_ranks(hooked, 1, op, env=INTERPRETED)
    for name, what in found.items():
        if name.endswith("moved"):
            assert what == 0.0, (name, what)
        else:
            assert "saved tensors: expected those that the forward pass kept" in str(what), (name, what)


@pytest.mark.parametrize("op", TWO)
def test_a_checkpoint_of_which_one_pass_is_watched(op: str) -> None:
    assert run_ranks(checkpointed, 1, op, env=INTERPRETED) == [[0.0] * 2]


def test_bad_arguments_of_calls_that_kernels_run() -> None:
    names = ["cu_seqlens", "cu_seqlens", "cu_seqlens", "prev_s", "prev_s"]
    assert run_ranks(bad_arguments, 1, env=INTERPRETED) == [names * 2]


def test_a_watched_call_has_the_plan_of_others() -> None:
    """A checkpoint may watch one of two passes, and the memory of one plan is not that of another."""
    assert run_ranks(tuned, 1, env=INTERPRETED)[0] < 2, "the forward pass comes to an operator"


def test_a_variant_that_was_watched_ends() -> None:
    assert run_ranks(ended, 1, env=INTERPRETED) == [True]


@pytest.mark.parametrize("op", TWO)
def test_a_checkpoint_of_selected_operators(op: str) -> None:
    assert run_ranks(selected, 1, op, env=INTERPRETED) == [[0.0] * 2]


@pytest.mark.parametrize("op", TWO)
def test_shapes_without_memory(op: str) -> None:
    ((fake, real),) = run_ranks(shapes_only, 1, op, env=INTERPRETED)
    assert fake == real


@pytest.mark.parametrize("op", TWO)
def test_traces_hold_the_operators(op: str) -> None:
    assert run_ranks(recorded, 1, op, env=INTERPRETED) == [[0.0] * 3]


@pytest.mark.parametrize("op", OPS)
def test_operators_give_what_their_fakes_say(op: str) -> None:
    assert run_ranks(faked, 1, op, env=INTERPRETED) == [8]


@pytest.mark.parametrize("op", TWO)
def test_a_compiled_backward_pass_of_an_eager_call(op: str) -> None:
    assert max(run_ranks(compiled_backward, 1, op, env=INTERPRETED)[0]) < 1e-6
