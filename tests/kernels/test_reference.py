"""The PyTorch engine against the token loop, and the comparison rule itself."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flexsp.kernels.diagonal.op import diagonal
from flexsp.testing import oracles
from flexsp.testing.cases import Case, Shape, random_documents
from flexsp.testing.compare import (
    DRAWS,
    RoundedProducts,
    assert_close,
    check_functions,
    check_op,
    judge,
    relative_error,
)
from flexsp.testing.delta_chunks import delta_chunks
from flexsp.testing.problems import check, draw, solve, solve_all
from tests.harness.diagonal import weighed, writing

engine = partial(diagonal, scale=0.3)
oracle = partial(oracles.simple_gla, scale=0.3)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def make(B: int = 2, T: int = 70, H: int = 2, K: int = 12, V: int = 9, states: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(random.randrange(2**31))
    normal = partial(torch.randn, generator=generator, dtype=torch.float64)
    made = {"q": normal(B, T, H, K), "k": normal(B, T, H, K), "v": normal(B, T, H, V)}
    made["g"] = torch.nn.functional.logsigmoid(normal(B, T, H) + 1)
    if states:
        made["initial_state"] = normal(states, H, K, V)
    return made


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 131])
def test_lengths(T: int, dtype: torch.dtype) -> None:
    check_op(engine, oracle, make(T=T, states=2), dtype=dtype)


@pytest.mark.parametrize("gated", [True, False])
def test_many_chunks(gated: bool) -> None:
    """More chunks than one level of the scan takes."""
    inputs = make(B=1, T=64 * 37 + 5, H=1, K=3, V=2, states=1)
    if not gated:
        del inputs["g"]
    check_op(engine, oracle, inputs, dtype=torch.float64)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_documents(dtype: torch.dtype, gated: bool) -> None:
    for n in (1, 4, 7):
        inputs = make(B=1, T=150, states=n)
        if not gated:
            del inputs["g"]
        inputs["cu_seqlens"] = random_documents(150, n, torch.Generator().manual_seed(random.randrange(2**31)))
        check_op(engine, oracle, inputs, dtype=dtype)


@pytest.mark.parametrize("weights", [weighed, writing])
def test_weights_of_tokens(weights: Callable[[str], Case]) -> None:
    case = weights("simple_gla")
    for bounds in (None, torch.tensor([0, 0, 60, 90])):
        inputs = case.inputs(Shape(B=1, T=90, states=1 if bounds is None else 3), random.randrange(2**31))
        check_op(case.op, case.oracle, inputs | {"cu_seqlens": bounds}, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_narrow_decays_get_is_summed_in_float32(dtype: torch.dtype) -> None:
    """Of all tokens, and rounded once: the gradient of the same numbers in float32."""
    (q, k, v), gamma, found = torch.randn(3, 1, 200, 2, 8).to(dtype), (-0.2 * torch.rand(2)).to(dtype), []
    do = torch.randn_like(v)
    for kind in (dtype, torch.float32):
        leaf = gamma.to(kind).requires_grad_()
        o, _ = engine(q, k, v, g_gamma=leaf)
        found.append(torch.autograd.grad(o, leaf, do)[0])
    assert torch.equal(found[0], found[1].to(dtype))


@pytest.mark.parametrize("n", [6, 60])
def test_documents_over_two_levels_of_the_scan(n: int) -> None:
    """Without gates nothing that leaks over a boundary is forgotten again."""
    inputs = make(B=1, T=1500 if n > 6 else 2200, H=1, K=3, V=2, states=n)
    del inputs["g"]
    generator = torch.Generator().manual_seed(random.randrange(2**31))
    inputs["cu_seqlens"] = random_documents(inputs["q"].shape[1], n, generator)
    check_op(engine, oracle, inputs, dtype=torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_from_none_to_total(dtype: torch.dtype) -> None:
    """Values below -104 act as -104 and have no gradient; no NaN, and no precision lost after them."""
    inputs = make(T=200, states=2)
    levels = torch.tensor([0.0, -1e-6, -1e-3, -0.1, -20.0, -103.0, -104.0, -150.0, -1e4])
    weights = torch.tensor([4.0, 4, 4, 4, 1, 0.3, 0.3, 0.3, 0.3])
    levels[-1] = -6e4 if dtype == torch.float16 else -1e4
    inputs["g"] = levels[torch.multinomial(weights, 400, replacement=True)].view(2, 200, 1).repeat(1, 1, 2).double()

    def clamped(g: torch.Tensor, **rest: Any) -> Any:
        return oracle(g=torch.where(g < -104, -104, g), **rest)

    check_op(engine, clamped, inputs, dtype=dtype)


def test_all_gates_closed_in_every_dtype() -> None:
    for dtype in DTYPES:
        inputs = make(T=130, states=2)
        inputs["g"] = torch.full_like(inputs["g"], -1e4)
        check_op(engine, lambda g, **rest: oracle(g=g.clamp(min=-104), **rest), inputs, dtype=dtype)


def test_states_of_other_shapes_of_memory() -> None:
    """Strides: heads first, every second channel, an expanded value."""
    inputs = make(B=2, T=67, states=2)
    inputs["v"] = inputs["v"][:, :, :, :1]
    inputs["initial_state"] = inputs["initial_state"][..., :1]

    def arrange(x: torch.Tensor) -> torch.Tensor:
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), float("nan"), dtype=x.dtype)
        wide[..., ::2] = x
        return wide.transpose(0, 1).contiguous().transpose(0, 1)[..., ::2]

    for dtype in (torch.float64, torch.bfloat16):
        check_op(engine, oracle, inputs, dtype=dtype, arrange=arrange)
    q, k, g = (inputs[name] for name in "qkg")
    ones = torch.ones(1, 1, 1, 1, dtype=torch.float64).expand(2, 67, 2, 1)
    o, _ = engine(q, k, ones, g)
    assert_close("o", o, oracle(q, k, ones.clone(), g)[0])


def test_no_tokens() -> None:
    inputs = make(B=2, T=0, states=2)
    o, final = engine(**inputs, output_final_state=True)
    assert o.shape == (2, 0, 2, 9) and torch.equal(final, inputs["initial_state"])
    del inputs["initial_state"]
    assert engine(**inputs, output_final_state=True)[1].abs().max() == 0


def test_a_final_state_is_no_part_of_all_states() -> None:
    _, final = engine(**make(T=200), output_final_state=True)
    assert final.untyped_storage().nbytes() == final.nbytes


def test_rows_of_other_documents_are_not_read() -> None:
    """NaN in what must not matter stays out of outputs and gradients: here the states of ranks' other documents."""
    from flexsp.comm.group import SequenceParallel

    inputs = make(B=1, T=40, states=3)
    inputs["cu_seqlens"] = torch.tensor([0, 15, 30, 40])
    state = inputs["initial_state"].clone()
    state[2] = float("nan")
    sp = SequenceParallel(world_size=1)
    sp.shard_range = lambda T, rows: (0, 30, 40)  # type: ignore[method-assign]
    sp.world_size, sp.rank = 1, 0
    short = {name: x[:, :30] for name, x in inputs.items() if name in "qkvg"}
    leaf = state.requires_grad_()
    o, final = engine(**short, initial_state=leaf, cu_seqlens=inputs["cu_seqlens"], output_final_state=True, sp=sp)
    (o.sum() + final.sum()).backward()
    assert o.isfinite().all() and final.isfinite().all()
    assert leaf.grad is not None and leaf.grad.isfinite().all() and leaf.grad[2].abs().max() == 0
    assert final[2].abs().max() == 0


def test_gradcheck() -> None:
    inputs = {name: x.requires_grad_() for name, x in make(B=1, T=9, H=1, K=2, V=2, states=3).items()}
    cu_seqlens = torch.tensor([0, 4, 4, 9])

    def f(*args: torch.Tensor) -> Any:
        return engine(*args[:4], initial_state=args[4], output_final_state=True, cu_seqlens=cu_seqlens)

    assert torch.autograd.gradcheck(f, tuple(inputs.values()))


@pytest.mark.parametrize("packed", [True, False])
def test_reads_no_value_on_the_host(packed: bool) -> None:
    """A fake tensor has no values: .item(), .tolist() or a data-dependent shape would raise."""
    inputs = make(B=1, T=50, states=2 if packed else 1)
    if packed:
        inputs["cu_seqlens"] = torch.tensor([0, 20, 50])
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(x) for name, x in inputs.items()}
        leaves = [x.requires_grad_() for x in fake.values() if x.is_floating_point()]
        o, final = engine(**fake, output_final_state=True)
        grads = torch.autograd.grad([o, final], leaves, [o, final])
    assert [g.shape for g in grads] == [x.shape for x in leaves]


# ------------------------------------------------------------------------------------------ the rule can fail


def swapped(f: Callable[..., Any], i: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    def g(*args: Any, **kwargs: Any) -> Any:
        results = list(f(*args, **kwargs))
        results[i] = change(results[i])
        return tuple(results)

    return g


def forgets_every_other_gate(g: torch.Tensor, **rest: Any) -> Any:
    same = g * 1
    same.register_hook(lambda grad: grad.index_fill(1, torch.arange(0, grad.shape[1], 2), 0.0))
    return engine(g=same, **rest)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rule_rejects_errors(dtype: torch.dtype) -> None:
    inputs = make(states=2)
    off = 16 * torch.finfo(dtype).eps if dtype != torch.float64 else 1e-11
    scaled = swapped(engine, 0, lambda o: (o.double() * (1 + off)).to(o.dtype))
    with_nan = swapped(engine, 1, lambda s: s.index_fill(0, torch.tensor(1), float("nan")))
    for op, message in ((scaled, r"out\[0\]: error"), (with_nan, "error inf"), (forgets_every_other_gate, "dg: error")):
        with pytest.raises(AssertionError, match=message):
            check_op(op, oracle, inputs, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_low_precision_reference_is_as_good_as_its_dtype(dtype: torch.dtype) -> None:
    """Otherwise the bounds made from it would mean nothing. Of three problems, since a sum may nearly vanish in one."""
    errors = []
    for _ in range(3):
        inputs = make(B=1, T=90, states=3)
        inputs["cu_seqlens"] = torch.tensor([0, 20, 20, 90])
        errors.append({report.name: report.low_error for report in check_op(engine, oracle, inputs, dtype=dtype)})
    for name in errors[0]:
        assert min(each[name] for each in errors) < 16 * torch.finfo(dtype).eps, (name, errors)


@pytest.mark.parametrize("gate", ["", "head", "channel"])
@pytest.mark.parametrize("steps", [1, 3])
def test_yardstick_of_delta_rules_is_the_token_loop(gate: str, steps: int) -> None:
    """In float64, over several chunks and documents, with every gradient."""
    made = make(B=1, T=150, states=3)
    del made["g"]
    made["k"], made["v"] = torch.randn(1, 150 * steps, 2, 12).double(), torch.randn(1, 150 * steps, 2, 9).double()
    made["k"] = torch.nn.functional.normalize(made["k"], dim=-1)
    made["beta"] = torch.rand(1, 150 * steps, 2).double()
    if gate:
        made["g"] = -torch.rand(1, 150, 2, *([12] if gate == "channel" else [])).double()
    tensors = [x.requires_grad_() for x in made.values()]
    found, want = (
        loop(**made, scale=0.3, cu_seqlens=torch.tensor([0, 20, 20, 150]), steps=steps)
        for loop in (delta_chunks, oracles.token_loop)
    )
    cotangents = [torch.randn_like(x) for x in want]
    grads = (torch.autograd.grad(x, tensors, cotangents) for x in (found, want))
    for a, b in zip((*found, *next(grads)), (*want, *next(grads)), strict=True):
        assert relative_error(a, b) < 1e-12


def test_relative_error() -> None:
    one = torch.ones(3)
    assert relative_error(one, one) == 0
    assert relative_error(torch.tensor([1.0, float("nan"), 1.0]), one) == float("inf")
    assert relative_error(one, torch.full((3,), float("nan"))) == float("inf")
    assert relative_error(torch.zeros(3), torch.zeros(3)) == 0
    with pytest.raises(AssertionError, match="shape"):
        relative_error(one, torch.ones(4))
    with pytest.raises(ValueError, match="low"):
        assert_close("x", one, one)


def test_products_are_rounded_forward_and_backward() -> None:
    x, y, do = (torch.randn(3, n, m) for n, m in ((4, 5), (5, 6), (4, 6)))
    with RoundedProducts(torch.bfloat16):
        left, right = x.clone().requires_grad_(), y.clone().requires_grad_()
        o = left @ right
        grads = torch.autograd.grad(o, [left, right], do)
    x, y, do = (z.bfloat16().float() for z in (x, y, do))
    for found, want in zip((o, *grads), (x @ y, do @ y.mT, x.mT @ do), strict=True):
        assert torch.equal(found, want)


def test_sums_that_vanish_are_credited_with_the_error_of_others() -> None:
    want = [{"du": torch.tensor([value], dtype=torch.float64)} for value in (0.01, 40.0)]
    low = [{"du": torch.tensor([value])} for value in (0.01, 40.0 + 4e-6)]  # 4 roundings of their size, 28, are 3e-5
    check_functions([{"du": torch.tensor([0.01 + 2e-5])}], want, low)
    with pytest.raises(AssertionError, match="du: error"):
        check_functions([{"du": torch.tensor([0.01 + 4e-5])}], want, low)
    with pytest.raises(AssertionError, match="instead of"):
        check_functions([{}], want, low)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_wrong_tensor_of_a_problem_is_named(dtype: torch.dtype) -> None:
    problem = draw("simple_gla", T=150, H=8, K=16, V=16).rounded(dtype)
    found = solve_all(problem, dtype)
    assert all(report.ok for report in check(problem, dtype, found))
    for name in found[0]:
        changed = [answer | {name: answer[name] * 1.25} for answer in found]
        assert [report.name for report in check(problem, dtype, changed) if not report.ok] == [f"simple_gla {name}"]


def off_by(x: torch.Tensor, error: float) -> torch.Tensor:
    """x plus one number, in float32: its relative error."""
    return (x + error * x.norm() / x.numel() ** 0.5).float()


def test_errors_of_running_sums_are_averaged_over_cotangents() -> None:
    """All gradients of a gate may share one error, and the reference be right there by luck."""
    want = [{"dg": torch.randn(1, 300, 8).double(), "dq": torch.randn(1, 300, 8, 2).double()} for _ in range(4)]
    low = [{name: off_by(x, 1e-3) for name, x in answer.items()} for answer in want]
    got = [{name: off_by(x, 0.0 if i else 3e-3) for name, x in answer.items()} for i, answer in enumerate(want)]
    assert {report.name: report.ok for report in judge(got, want, low, {})} == {"dg": True, "dq": False}
    assert {report.name: report.ok for report in judge(got[:1], want, low, {})} == {"dg": False, "dq": False}
    low[0] = {name: x.float() for name, x in want[0].items()}
    assert {report.name: report.ok for report in judge(got, want, low, {})} == {"dg": True, "dq": False}


@pytest.mark.parametrize("share", [0.25, 0.7])
def test_few_numbers_near_their_bound_are_asked_for_again(share: float) -> None:
    """The op answers more cotangents if its gradients of gates are off by more than half of their bound."""
    inputs, errors, asked = make(T=150, states=2), [0.0], itertools.count()

    def op(g: torch.Tensor, output_final_state: bool, **rest: torch.Tensor) -> Any:
        def off(grad: torch.Tensor) -> torch.Tensor:
            next(asked)
            return grad * (1 + errors[-1])

        same = g.double() * 1
        same.register_hook(off)
        o, final = oracle(g=same, **{name: x.double() for name, x in rest.items()})
        return o.to(rest["q"].dtype), final.float()

    (bound,) = (x.bound for x in check_op(op, oracle, inputs, dtype=torch.bfloat16) if x.name == "dg")
    errors.append(share * bound)
    first = next(asked)
    check_op(op, oracle, inputs, dtype=torch.bfloat16)
    assert first == 1 and next(asked) - first == 2 + (DRAWS if share > 0.5 else 0)
    errors.append(2 * bound)
    with pytest.raises(AssertionError, match="^dg: error"):
        check_op(op, oracle, inputs, dtype=torch.bfloat16)


@pytest.mark.parametrize("wrong", ["one row", "all rows"])
def test_a_row_that_outweighs_all_others_has_one_error(wrong: str) -> None:
    """The reference is right there by luck in its first answer, and is judged by the other ones."""
    one, every = torch.randn(2, 1, 64, 4, 8, dtype=torch.float64).unbind(0)
    one[:, 5, 2] *= 1e4
    called = itertools.count()

    def off(x: torch.Tensor, error: float) -> torch.Tensor:
        return x + error * x.detach()

    def engine(one: torch.Tensor, every: torch.Tensor) -> Any:
        return tuple(off(x, 2e-5 if next(called) > 1 else 0.0) for x in (one, every))

    def oracle(one: torch.Tensor, every: torch.Tensor, engine: Any) -> Any:
        return (one * 1.0, every * 1.0) if engine is oracles.token_loop else engine(one, every)

    def op(one: torch.Tensor, every: torch.Tensor, output_final_state: bool) -> Any:
        return off(one, 3e-5), off(every, 0.0 if wrong == "one row" else 3e-5)

    given = {"one": one, "every": every}
    if wrong == "one row":
        check_op(op, oracle, given, dtype=torch.float32, low_engine=engine)
    else:
        with pytest.raises(AssertionError, match=r"^out\[1\]: error [^\n]*$"):
            check_op(op, oracle, given, dtype=torch.float32, low_engine=engine)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.0])
def test_what_is_not_finite_never_passes(value: float) -> None:
    """Not where the reference is not finite either, in the same call or for another cotangent."""
    want = [{"o": torch.ones(2, 30, 5, 7).double()} for _ in range(4)]
    for i in (0, 3):
        low = [{"o": x["o"].float()} for x in want]
        low[i]["o"][0, 0] = float("inf")
        (report,) = judge([{"o": want[0]["o"].float() * value}], want, low, {})
        assert not report.ok


def test_what_is_not_finite_without_ranks_either_does_not_pass() -> None:
    problem = draw("simple_gla", T=30, H=2, K=8, V=8).rounded(torch.float32)
    bad = {name: x * float("nan") for name, x in solve(problem, torch.float32).items()}
    assert not any(report.ok for report in check(problem, torch.float32, [bad], one_rank=bad))
