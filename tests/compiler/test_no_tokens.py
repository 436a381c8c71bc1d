"""Calls without a token, or a sequence: gradients have the shapes of their inputs, and states pass with theirs.

A rank's shard may have no tokens, and a batch may have no text. Every op and some variants, in PyTorch and as kernels;
called, watched (through the operators that graphs hold, whose fakes are compared with them) and compiled.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from flexsp.testing.cases import CASES, PROGRAM_CASES, Shape
from flexsp.testing.compare import relative_error
from flexsp.testing.ranks import run_ranks
from tests import variants
from tests.harness.compiled import SIZES, compiled, leaf, saturating, tensors
from tests.harness.interpreted import INTERPRETED
from tests.harness.recorder import Recorder
from tests.marks import quick

ALL = CASES | PROGRAM_CASES
NAMES = [*ALL, *(f"variant {name}" for name in ("gla", "deltanet", "gla_own_bias", "hgrn"))]
AS_KERNELS = ["normalized", "gamma", "delta_rule", "kda", "variant gla_own_bias"]
COMPILED = ["normalized", "kda_in_kernel", "variant gla_own_bias"]
Call = Callable[..., Any]


@functools.cache
def model_of(name: str) -> Any:
    return saturating() if name == "saturating" else variants.load(name).make(*SIZES)


def drawn(name: str, docs: int, states: bool, dtype: torch.dtype) -> tuple[Call, dict[str, Any]]:
    """A call, and its inputs: two sequences without a token, or so many documents."""
    kind, _, variant = name.rpartition(" ")
    n = (docs or 2) if states else 0
    if kind:
        model = model_of(variant)
        x, params = variants.draw("linear" if variant == "saturating" else variant, 1 if docs else 2, 0, 0)
        widths = {variants.K: SIZES[1], variants.V: SIZES[2]}
        x = {key: y[..., : widths[y.shape[-1]]] if y.dim() == 4 else y for key, y in x.items()}
        params = {key: y[..., : SIZES[1]] for key, y in params.items()}
        state = {"prev_s": torch.randn(n, *model_states(model))} if n else {}
        return functools.partial(model, sp=False), {**cast(x | params | state, dtype), **bounds(docs)}
    case = ALL[name]
    inputs = case.inputs(Shape(B=1 if docs else 2, T=0, K=6, V=5, states=n), random.randrange(2**31))
    return functools.partial(case.op, output_final_state=True), {**cast(inputs, dtype), **bounds(docs)}


def model_states(model: Any) -> tuple[int, ...]:
    return (SIZES[0], *(SIZES[1:] if len(model.program.meta.state_sizes) == 2 else SIZES[1:2]))


def bounds(docs: int) -> dict[str, torch.Tensor]:
    return {"cu_seqlens": torch.zeros(docs + 1, dtype=random.choice([torch.int32, torch.int64]))} if docs else {}


def cast(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    def one(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(one, x))
        return x.to(dtype) if isinstance(x, torch.Tensor) else x

    return {name: one(x) for name, x in inputs.items()}


def wrong(f: Call, given: dict[str, Any], only: str | None = None) -> list[str]:
    """What is not as it should be of a call's gradients, all of them or those of one input."""
    inputs = {name: leaf(x) for name, x in given.items()}
    if only is not None:
        for name, x in inputs.items():
            if name != only:
                inputs[name] = tree_map(lambda y: y.detach() if isinstance(y, torch.Tensor) else y, x)
    o, final = f(**inputs)
    states = tensors({name: x for name, x in inputs.items() if name in ("initial_state", "prev_s")})
    found = [] if o.shape[1] == 0 and o.numel() == 0 else [f"o of shape {list(o.shape)}"]
    ends = tensors((final,))
    for got, want in zip(ends, states or [torch.zeros_like(x) for x in ends], strict=True):
        found += [] if relative_error(got, want) == 0 else ["final states are not those that were given"]
    loss = o.square().sum() + sum((x.sin().sum() for x in ends), torch.zeros(()))
    if not loss.requires_grad:
        return found
    named = [(name, x) for name, y in inputs.items() for x in tensors((y,)) if x.requires_grad]
    grads = torch.autograd.grad(loss, [x for _, x in named], allow_unused=only is not None)
    for (name, x), grad in zip(named, grads, strict=True):
        if grad is None:
            continue
        if (grad.shape, grad.dtype) != (x.shape, x.dtype):
            found.append(f"d{name} of shape {list(grad.shape)}, {grad.dtype} for {list(x.shape)}, {x.dtype}")
        want = x.detach().cos() if name in ("initial_state", "prev_s") else torch.zeros_like(x)
        if grad.numel() and relative_error(grad.expand_as(x), want) > 0:
            found.append(f"d{name} is wrong")
    return found


def of_operators(f: Call, given: dict[str, Any]) -> list[str]:
    """As `wrong`, through the operators; and where these give what their fakes do not say."""
    with Recorder() as told:
        found = wrong(f, given)
    for func, args in told.calls:
        args = tree_map(lambda y: y.detach() if isinstance(y, torch.Tensor) else y, args)
        try:
            torch.library.opcheck(func, args, test_utils=("test_schema", "test_faketensor"))
        except Exception as error:
            found.append(f"{func}: {str(error)[-300:]}")
    return found


def all_wrong(sp: Any, name: str, dtype: torch.dtype, graphs: bool) -> list[str]:
    found = []
    for docs, states in ((0, False), (0, True), (2, True)):
        f, given = drawn(name, docs, states, dtype)
        checks = [wrong(compiled(f), given)] if graphs else [wrong(f, given), of_operators(f, given)]
        if not graphs and not docs:
            checks += [wrong(f, given, name) for name, x in given.items() if tensors((x,))]
        found += [f"{docs} documents, states {states}: {x}" for check in checks for x in check]
    return found


@pytest.mark.parametrize("name", [*NAMES, "variant saturating"])
def test_in_pytorch(name: str) -> None:
    assert all_wrong(None, name, torch.float64, False) == []


@pytest.mark.parametrize("name", quick(NAMES, *AS_KERNELS))
def test_as_kernels(name: str) -> None:
    assert run_ranks(all_wrong, 1, name, torch.float32, False, env=INTERPRETED, timeout=200) == [[]]


@pytest.mark.parametrize("name", ["gla", "deltanet", "gla_own_bias", "retnet", "hgrn"])
def test_no_sequences(name: str) -> None:
    for T, dtype in itertools.product((0, 9), (torch.float64, torch.float32)):
        tokens, params = variants.draw(name, 0, T, 0)
        x = {key: leaf(y.to(dtype)) for key, y in (tokens | params).items()}
        o, final = variants.load(name).make(variants.H, variants.K, variants.V)(**x, sp=False)
        assert o.shape[:3] == (0, T, variants.H) and final.shape[0] == 0
        for y, grad in zip(x.values(), torch.autograd.grad(o.sum() + final.sum(), [*x.values()]), strict=True):
            assert torch.equal(grad, torch.zeros_like(y))


@pytest.mark.parametrize("name", quick(COMPILED, "variant gla_own_bias"))
def test_compiled(name: str) -> None:
    assert all_wrong(None, name, torch.float64, True) == []
    assert run_ranks(all_wrong, 1, name, torch.float32, True, env=INTERPRETED, timeout=200) == [[]]
