"""Ops with vector gates and vector states against token loops that stand here: values, gradients, documents, ranks."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from flexsp import ops
from flexsp.comm.group import SequenceParallel
from flexsp.testing.compare import check_op, relative_error
from flexsp.testing.oracles import token_loop
from flexsp.testing.ranks import run_ranks
from tests.harness.vector_gates import KEPT_WIDE, OPS, Tensors, draw, rg_lru
from tests.marks import by_turns, quick

EXACT = 1e-12
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


# The ops --------------------------------------------------------------------------------------------------------------


every_op = pytest.mark.parametrize("name", OPS)


def part(name: str, inputs: Tensors, at: slice) -> Tensors:
    tokens = OPS[name].tokens.split()
    return {key: x[:, at] if key in tokens else x for key, x in inputs.items()}


def gradients(outputs: Any, inputs: Tensors, cotangents: list[torch.Tensor]) -> list[torch.Tensor]:
    return list(torch.autograd.grad(list(outputs), list(inputs.values()), cotangents))


def with_gradients(inputs: Tensors) -> Tensors:
    return {key: x.detach().clone().requires_grad_() for key, x in inputs.items()}


def assert_alike(got: list[torch.Tensor], want: list[torch.Tensor], bound: float = EXACT) -> None:
    errors = [relative_error(a, b) for a, b in zip(got, want, strict=True)]
    assert max(errors) < bound, errors


@every_op
@pytest.mark.parametrize("dtype", quick(DTYPES, torch.float64, torch.float32))
def test_against_the_token_loop(name: str, dtype: torch.dtype) -> None:
    """More tokens than a chunk has, and one; of channels numbers with and without large divisors."""
    for T, K, V in ((random.choice((67, 91)), random.choice((20, 137)), 11), (1, 16, 5)):
        inputs = draw(name, 2, T, states=2, K=K, V=V)
        check_op(OPS[name].chunk, OPS[name].oracle, inputs, dtype=dtype, wide=KEPT_WIDE)


@every_op
def test_no_states_and_scale(name: str) -> None:
    inputs, op = draw(name, 3, 70), OPS[name]
    other = {"scale": 0.3} if op.matrix else {"c": 2.0} if name == "rg_lru" else {}
    for given in ({}, other):
        want, _ = op.oracle(**inputs, **given, engine=token_loop)
        o, state = op.chunk(**inputs, **given)
        assert relative_error(o, want) < EXACT and state is None
        assert relative_error(op.step(**inputs, **given)[0], want) < EXACT


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_unit_start(dtype: torch.dtype) -> None:
    """Of every sequence, of those that a tensor names, of every document, and of those that a tensor names."""
    cu = torch.tensor([0, 0, 5, 6, 6, 40], dtype=dtype)
    named = torch.tensor([True, False])
    of_documents = torch.tensor([True, False, True, True, True])
    cases = [
        (draw("rg_lru", 2, 21), {"unit_start": True}, {"starts": [(0, 0), (1, 0)]}, True),
        (draw("rg_lru", 2, 21, states=2), {"unit_start": named}, {"starts": [(0, 0)]}, True),
        (draw("rg_lru", 1, 40), {"unit_start": True, "cu_seqlens": cu}, {"starts": [(0, 0), (0, 5), (0, 6)]}, False),
        (draw("rg_lru", 1, 40, states=5), {"unit_start": of_documents, "cu_seqlens": cu},
         {"starts": [(0, 5), (0, 6)]}, False),
    ]  # fmt: skip
    for inputs, given, oracle, both in cases:
        inputs, rest = with_gradients(inputs), {key: x for key, x in given.items() if key == "cu_seqlens"}
        want, last = rg_lru(**inputs, **rest, **oracle, engine=token_loop)
        dy, dlast = torch.randn_like(want), torch.randn_like(last)
        expected = [want, last, *gradients((want, last), inputs, [dy, dlast])]
        for op in (ops.rg_lru, ops.recurrent_rg_lru)[: 2 if both else 1]:
            o, state = op(**inputs, **given, output_final_state=True)
            assert_alike([o, state, *gradients((o, state), inputs, [dy, dlast])], expected)
    with pytest.raises(ValueError, match=r"unit_start: expected False, or which texts begin \[N\], with initial_state"):
        ops.rg_lru(**inputs, cu_seqlens=cu, unit_start=True)
    with pytest.raises(ValueError, match=r"unit_start: expected shape \[N\] = \[5\]"):
        ops.rg_lru(**inputs, cu_seqlens=cu, unit_start=named)


@every_op
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_documents_and_strides(name: str, dtype: torch.dtype) -> None:
    """Empty documents at the ends and between, of tensors whose last axis does not lie together in memory."""
    inputs = draw(name, 1, 83, states=6)
    inputs["cu_seqlens"] = torch.tensor([0, 0, 1, 37, 37, 83, 83], dtype=random.choice((torch.int32, torch.int64)))
    check_op(
        OPS[name].chunk, OPS[name].oracle, inputs, dtype=dtype, wide=KEPT_WIDE,
        arrange=lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    )  # fmt: skip


@every_op
def test_no_tokens(name: str) -> None:
    """The state passes through, and so does its gradient."""
    inputs = with_gradients(draw(name, 2, 0, states=2))
    for op in (OPS[name].chunk, OPS[name].step):
        o, state = op(**inputs, output_final_state=True)
        assert o.shape[1] == 0 and torch.equal(state, inputs["initial_state"])
        assert state.data_ptr() != inputs["initial_state"].data_ptr()
        assert torch.equal(torch.autograd.grad(state.sum(), inputs["initial_state"])[0], torch.ones_like(state))


@every_op
def test_parts_equal_the_whole(name: str) -> None:
    """A text in two calls and then token by token: states and gradients pass through them."""
    inputs, op = with_gradients(draw(name, 2, 75, states=2)), OPS[name]
    whole = op.chunk(**inputs, output_final_state=True)
    cotangents = [torch.randn_like(x) for x in whole]
    cut, state, o = random.randrange(1, 70), inputs["initial_state"], []
    prompt = [(slice(0, cut), op.chunk), (slice(cut, 70), op.chunk)]
    for at, call in (*prompt, *((slice(t, t + 1), op.step) for t in range(70, 75))):
        out, state = call(**(part(name, inputs, at) | {"initial_state": state}), output_final_state=True)
        o.append(out)
    parts = torch.cat(o, 1), state
    want = [*whole, *gradients(whole, inputs, cotangents)]
    assert_alike([*parts, *gradients(parts, inputs, cotangents)], want)


@every_op
@pytest.mark.parametrize("dtype", quick(DTYPES, torch.float64, torch.float32))
def test_token_by_token(name: str, dtype: torch.dtype) -> None:
    inputs = draw(name, 2, 21, states=2)
    check_op(OPS[name].step, OPS[name].oracle, inputs, dtype=dtype, wide=KEPT_WIDE)
    if dtype == torch.float32:
        plain = {key: x.float() for key, x in inputs.items()}
        want = OPS[name].step(**plain, output_final_state=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = OPS[name].step(**plain, output_final_state=True)
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize("name", ["gla", "hgrn2"])
def test_states_with_values_first(name: str) -> None:
    inputs = draw(name, 2, 20, states=2)
    turned = inputs | {"initial_state": inputs["initial_state"].mT.contiguous(), "state_v_first": True}
    for call in (OPS[name].chunk, OPS[name].step):
        (o, state), (want, last) = (call(**x, output_final_state=True) for x in (turned, inputs))
        assert torch.equal(o, want) and torch.equal(state.mT, last)


@pytest.mark.parametrize(("name", "dtype"), by_turns(OPS, [torch.float32, torch.bfloat16], torch.float64))
def test_gates_of_all_sizes(name: str, dtype: torch.dtype) -> None:
    """Gates of 0, nearly 0, closed and far below what e^x tells from 0: outputs and gradients are right."""
    inputs, gate = draw(name, 2, 70, states=2), OPS[name].gate
    kinds = (torch.randint(0, 24, inputs[gate].shape) - 20).clamp(min=0)  # most are as drawn
    if name == "rg_lru":  # a gate is -c softplus(Lambda) sigmoid(r)
        inputs["Lambda"][::3], inputs["Lambda"][1::3] = 40.0, -25.0
        inputs["r"] = torch.stack([inputs["r"], inputs["r"] - 60, inputs["r"] + 30, inputs["r"] - 20])
        inputs["r"] = inputs["r"].gather(0, kinds[None])[0]
    else:
        sizes = torch.stack([inputs[gate], inputs[gate] * 0, inputs[gate] * 1e-12, inputs[gate].clamp(max=-0.1) * 1e4])
        inputs[gate] = sizes.gather(0, kinds[None])[0]
    check_op(OPS[name].chunk, OPS[name].oracle, inputs, dtype=dtype, wide=KEPT_WIDE)
    closed = inputs | {gate: torch.full_like(inputs[gate], -1e4 if name != "rg_lru" else -1e3)}
    low = with_gradients({key: x.to(dtype if key not in KEPT_WIDE else torch.promote_types(dtype, torch.float32))
                          for key, x in closed.items()})  # fmt: skip
    found = OPS[name].chunk(**low, output_final_state=True)
    cotangents = [torch.ones_like(x) for x in found]
    assert all(x.isfinite().all() for x in (*found, *gradients(found, low, cotangents)))


@pytest.mark.parametrize("name", quick(OPS, "gla"))
def test_one_graph(name: str) -> None:
    """torch.compile breaks the op nowhere."""
    inputs = with_gradients(draw(name, 2, 9, states=2))
    compiled = torch.compile(OPS[name].chunk, backend="aot_eager", fullgraph=True)
    want, got = (call(**inputs, output_final_state=True) for call in (OPS[name].chunk, compiled))
    cotangents = [torch.randn_like(x) for x in want]
    assert_alike([*got, *gradients(got, inputs, cotangents)], [*want, *gradients(want, inputs, cotangents)])


# Ranks ----------------------------------------------------------------------------------------------------------------

SHARDS = {
    "uneven": ((30, 0, 41, 4), None),
    "one rank has all": ((0, 75, 0, 0), None),
    "documents": ((30, 0, 41, 4), (0, 0, 12, 50, 50, 75)),
    "documents that end with shards": ((20, 20, 0, 35), (0, 20, 40, 75, 75)),
}


def over_ranks(sp: SequenceParallel, seed: int, kinds: tuple[str, ...]) -> dict[Any, Any]:
    results = {}
    for name in OPS:
        for kind in kinds:
            lengths, bounds = SHARDS[kind]
            n = 2 if bounds is None else len(bounds) - 1
            whole = draw(name, 2 if bounds is None else 1, 75, states=n, seed=seed)
            start = sum(lengths[: sp.rank])
            mine = with_gradients(part(name, whole, slice(start, start + lengths[sp.rank])))
            if bounds is None and sp.rank:
                del mine["initial_state"]
            cu = {} if bounds is None else {"cu_seqlens": torch.tensor(bounds)}
            sp.set_lengths(lengths if kind == "uneven" else None)
            o, state = OPS[name].chunk(**mine, **cu, output_final_state=True, sp=sp)
            assert (state is None) == (bounds is None and not sp.is_last)
            outputs = [x for x in (o, state) if x is not None]
            drawn = cotangents_of(seed, name, bounds is not None, n)
            cotangents = [drawn[0][:, start : start + lengths[sp.rank]], drawn[1]][: len(outputs)]
            found = dict(zip(mine, gradients(outputs, mine, cotangents), strict=True))
            results[name, kind] = o.detach(), None if state is None else state.detach(), found
    return results


def cotangents_of(seed: int, name: str, packed: bool, n: int) -> list[torch.Tensor]:
    B, made = 1 if packed else 2, torch.Generator().manual_seed(seed + 1)
    shapes = [(B, 75, 2, 7), (n, 2, 9, 7)] if OPS[name].matrix else [(B, 75, 18), (n, 18)]
    return [torch.randn(shape, generator=made, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("kinds", [("uneven", "documents"), pytest.param((*SHARDS,), marks=pytest.mark.slow)])
def test_ranks_equal_one_rank(kinds: tuple[str, ...]) -> None:
    """Uneven and empty shards, documents across them: outputs, final states, gradients; those of parameters add up."""
    seed = random.randrange(2**31)
    answers, wrong = run_ranks(over_ranks, 4, seed, kinds), {}
    for name, op in OPS.items():
        for kind in kinds:
            _, bounds = SHARDS[kind]
            n = 2 if bounds is None else len(bounds) - 1
            whole = with_gradients(draw(name, 2 if bounds is None else 1, 75, states=n, seed=seed))
            cu = {} if bounds is None else {"cu_seqlens": torch.tensor(bounds)}
            want = op.chunk(**whole, **cu, output_final_state=True, sp=False)
            cotangents = cotangents_of(seed, name, bounds is not None, n)
            expected = dict(zip(whole, gradients(want, whole, cotangents), strict=True))
            each = [answer[name, kind] for answer in answers]
            pairs = {"o": (torch.cat([x[0] for x in each], 1), want[0])}
            pairs["final"] = sum(x[1] for x in each if x[1] is not None), want[1]
            for key, gradient in expected.items():
                parts = [x[2][key] for x in each if key in x[2]]
                pairs[key] = torch.cat(parts, 1) if key in op.tokens.split() else sum(parts), gradient
            errors = {(name, kind, key): relative_error(*pair) for key, pair in pairs.items()}
            wrong |= {where: error for where, error in errors.items() if not error < EXACT}
    assert not wrong


# What is refused ------------------------------------------------------------------------------------------------------


@every_op
def test_a_wrong_argument_is_named(name: str) -> None:
    op, inputs, packed = OPS[name], draw(name, 1, 6, states=2), {"cu_seqlens": torch.tensor([0, 2, 6])}
    first, one = op.tokens.split()[0], inputs | {"initial_state": inputs["initial_state"][:1]}
    for call, given in ((op.chunk, inputs | packed), (op.step, one)):
        call(**given)
        for key in inputs:
            # The sizes of the first tensor, and V of v, decide what the others must be.
            sets_sizes = key in (first, "v")
            for bad in (given[key].to(torch.complex64), given[key].tolist(), given[key][None], given[key].to_sparse()):
                with pytest.raises(ValueError, match=f"^{key}: expected .*, got "):
                    call(**(given | {key: bad}))
            with pytest.raises(ValueError, match=r"^\w+: expected " if sets_sizes else f"^{key}: expected .*, got "):
                call(**(given | {key: given[key][..., :-1]}))
        if name != "rg_lru":
            above = given | {op.gate: torch.ones_like(given[op.gate])}
            with pytest.raises(ValueError, match=f"^{op.gate}: expected natural-log gates <= 0, got a largest"):
                call(**above)
        with pytest.raises(ValueError, match=r"^output_final_state: expected"):
            call(**given, output_final_state=1)
    with pytest.raises(ValueError, match=r"^cu_seqlens: expected a last entry of at most 6"):
        op.chunk(**inputs, cu_seqlens=torch.tensor([0, 2, 7]))
    with pytest.raises(ValueError, match=r"^initial_state: expected shape \[N, "):
        op.chunk(**inputs)
    if name == "rg_lru":
        with pytest.raises(ValueError, match=r"^c: expected a number above 0, got -1"):
            op.chunk(**inputs, **packed, c=-1)
