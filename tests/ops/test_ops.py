"""Every op against its float64 token loop, and the properties all of them share."""

from __future__ import annotations

import functools
import math
import random
from typing import Any

import pytest
import torch

from flexsp import ops
from flexsp.testing.cases import CASES, PROGRAM_CASES, Case, Shape, random_documents
from flexsp.testing.compare import DRAWS, check_op, relative_error
from flexsp.testing.oracles import token_loop
from tests.harness.ops import ON_GPU, OVER_RANKS, PARALLEL, PUBLIC, TOKEN_LOOPS, named
from tests.marks import by_turns

EXACT = 1e-12
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ALL = CASES | PROGRAM_CASES
every_case = pytest.mark.parametrize("case", ALL.values(), ids=ALL.keys())


def fresh(case: Case, shape: Shape) -> dict[str, Any]:
    return case.inputs(shape, random.randrange(2**31))


def leaves(inputs: dict[str, Any]) -> list[torch.Tensor]:
    found = []
    for x in inputs.values():
        for t in x if isinstance(x, tuple) else (x,):
            if isinstance(t, torch.Tensor) and t.is_floating_point():
                found.append(t.requires_grad_())
    return found


def flat(result: tuple[torch.Tensor, Any]) -> list[torch.Tensor]:
    o, state = result
    return [o, *(state if isinstance(state, tuple) else (state,))]


def some_heads_first(x: torch.Tensor) -> torch.Tensor:
    """The same values behind other strides: heads before tokens, and every second channel of a wider tensor."""
    if x.dim() == 4:
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    return torch.stack([x, torch.full_like(x, float("nan"))], dim=-1)[..., 0]


def draws(case: Case, dtype: torch.dtype) -> int:
    return case.draws if dtype == torch.float32 else DRAWS


def against_oracle(case: Case, inputs: dict[str, Any], dtype: torch.dtype) -> None:
    check_op(case.op, case.oracle, inputs, dtype=dtype, draws=draws(case, dtype))


@pytest.mark.parametrize(("name", "dtype"), by_turns(ALL, DTYPES[1:], DTYPES[0]))
def test_against_the_token_loop(name: str, dtype: torch.dtype) -> None:
    case = ALL[name]
    T, K, V = random.choice([(67, 24, 17), (33, 5, 40), (90, 48, 1), (1, 16, 16)])
    inputs = fresh(case, Shape(T=T, K=K, V=V, states=2))
    against_oracle(case, inputs, dtype)
    if T > 1:  # the first output of normalised attention is v itself: no gradient to q and k but rounding
        against_oracle(case, fresh(case, Shape(T=T, K=K, V=V)), dtype)


@every_case
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_documents_and_strides(case: Case, dtype: torch.dtype) -> None:
    n = random.randrange(1, 7)
    inputs = fresh(case, Shape(B=1, T=83, states=n))
    documents = random_documents(83, n, torch.Generator().manual_seed(random.randrange(2**31)))
    inputs["cu_seqlens"] = documents.to(random.choice([torch.int32, torch.int64]))
    check_op(case.op, case.oracle, inputs, dtype=dtype, arrange=some_heads_first)


@every_case
def test_wide_heads(case: Case) -> None:
    inputs = fresh(case, Shape(B=1, T=20, K=256, V=250, states=1))
    against_oracle(case, inputs, torch.float32)


@every_case
def test_split_equals_whole(case: Case) -> None:
    """Two calls that hand the state on, gradients included, are one call."""
    inputs = fresh(case, Shape(T=75, states=2))
    tensors = leaves(inputs)
    whole = flat(case.op(**inputs, output_final_state=True))
    cut = random.randrange(1, 75)
    state, o = inputs["initial_state"], []
    for part in (slice(0, cut), slice(cut, 75)):
        piece = {name: x[:, part] if name in case.tokens else x for name, x in inputs.items()}
        piece["initial_state"] = state
        out, state = case.op(**piece, output_final_state=True)
        o.append(out)
    split = flat((torch.cat(o, dim=1), state))
    cotangents = [torch.randn_like(x) for x in whole]
    want = torch.autograd.grad(whole, tensors, cotangents)
    got = torch.autograd.grad(split, tensors, cotangents)
    for a, b in zip([*split, *got], [*whole, *want], strict=True):
        assert relative_error(a, b) < EXACT


@every_case
def test_second_backward_of_two_forwards(case: Case) -> None:
    """Nothing that a forward saved is disturbed by the next call."""
    first, second = fresh(case, Shape(T=40, states=2)), fresh(case, Shape(T=40, states=2))
    results = [flat(case.op(**inputs, output_final_state=True)) for inputs in (_with_grad(first), _with_grad(second))]
    later = torch.autograd.grad([x.sum() for x in results[1]], leaves(second))
    earlier = torch.autograd.grad([x.sum() for x in results[0]], leaves(first), retain_graph=True)
    again = torch.autograd.grad([x.sum() for x in results[0]], leaves(first))
    for inputs, got in ((first, earlier), (first, again), (second, later)):
        alone = flat(case.op(**inputs, output_final_state=True))
        want = torch.autograd.grad([x.sum() for x in alone], leaves(inputs))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def _with_grad(inputs: dict[str, Any]) -> dict[str, Any]:
    leaves(inputs)
    return inputs


@every_case
def test_final_state_only_when_asked(case: Case) -> None:
    inputs = {n: x.float() if torch.is_tensor(x) else x for n, x in fresh(case, Shape(B=1, T=9)).items()}
    assert case.op(**inputs)[1] is None
    assert all(x.dtype == torch.float32 for x in flat(case.op(**inputs, output_final_state=True)))


@every_case
def test_gradcheck(case: Case) -> None:
    inputs = fresh(case, Shape(B=1, T=5, K=2, V=2, states=2))
    inputs["cu_seqlens"] = torch.tensor([0, 2, 5])
    tensors = leaves(inputs)

    def f(*_: torch.Tensor) -> Any:  # the leaves are perturbed in place
        return tuple(flat(case.op(**inputs, output_final_state=True)))

    assert torch.autograd.gradcheck(f, tuple(tensors), fast_mode=True)


def float32_token_loop(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: Any = None, **rest: Any) -> Any:
    o, state = token_loop(q.float(), k.float(), v.float(), g, **rest)
    return o.to(v.dtype), state


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", ["g", "g_gamma", "none"])
def test_recurrent_equals_chunked(gate: str, dtype: torch.dtype) -> None:
    inputs = fresh(CASES["gamma" if gate == "g_gamma" else "simple_gla"], Shape(T=21, states=2))
    if gate == "none":
        del inputs["g"]
    oracle = CASES["simple_gla"].oracle
    check_op(ops.recurrent_simple_gla, oracle, inputs, dtype=dtype, low_engine=float32_token_loop)


# `recurrent_NAME` of ops of `PROGRAM_CASES`, and the case that it is tested with.
RECURRENT = {
    name: f"{name}_in_kernel" if f"{name}_in_kernel" in PROGRAM_CASES else name
    for name in PROGRAM_CASES if hasattr(ops, f"recurrent_{name}")
}  # fmt: skip


def recurrent(name: str, **inputs: Any) -> Any:
    if name == "gated_delta_product":
        inputs = inputs | {key: inputs[key].flatten(1, 2) for key in ("k", "v", "beta")} | {"num_householder": 2}
    return getattr(ops, f"recurrent_{name}")(**inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_ops_of_programs(name: str, dtype: torch.dtype) -> None:
    case = PROGRAM_CASES[RECURRENT[name]]
    inputs = fresh(case, Shape(T=21, states=2))
    op = functools.partial(recurrent, name)
    check_op(op, case.oracle, inputs, dtype=dtype, low_engine=float32_token_loop, draws=draws(case, dtype))


@pytest.mark.parametrize("name", RECURRENT)
def test_prompt_of_a_program_then_token_by_token(name: str) -> None:
    case = PROGRAM_CASES[RECURRENT[name]]
    inputs = fresh(case, Shape(T=50))
    if name == "gated_delta_rule":
        inputs["state_v_first"] = True
    whole, last = case.op(**inputs, output_final_state=True)
    cuts = slice(0, 40), slice(40, 50)
    parts = [{n: x[:, at] if n in case.tokens else x for n, x in inputs.items()} for at in cuts]
    first, state = case.op(**parts[0], output_final_state=True)
    rest, state = recurrent(name, **parts[1], initial_state=state, output_final_state=True)
    assert relative_error(torch.cat([first, rest], dim=1), whole) < EXACT
    assert relative_error(state, last) < EXACT


def test_prompt_in_chunks_then_token_by_token() -> None:
    inputs = fresh(CASES["simple_gla"], Shape(T=50))
    whole, last = ops.chunk_simple_gla(**inputs, output_final_state=True)
    prompt = {name: x[:, :40] for name, x in inputs.items()}
    o, state = ops.chunk_simple_gla(**prompt, output_final_state=True)
    steps = [o]
    for t in range(40, 50):
        token = {name: x[:, t : t + 1] for name, x in inputs.items()}
        o, state = ops.recurrent_simple_gla(**token, initial_state=state, output_final_state=True)
        steps.append(o)
    assert relative_error(torch.cat(steps, dim=1), whole) < EXACT
    assert relative_error(state, last) < EXACT
    assert ops.recurrent_simple_gla(**inputs)[1] is None


def test_decoding_ignores_autocast() -> None:
    inputs = {name: x.float() for name, x in fresh(CASES["simple_gla"], Shape(T=5)).items()}
    o, state = ops.recurrent_simple_gla(**inputs, output_final_state=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o_cast, state_cast = ops.recurrent_simple_gla(**inputs, output_final_state=True)
    assert torch.equal(o, o_cast) and torch.equal(state, state_cast)


def test_documents_equal_separate_calls() -> None:
    for case in CASES.values():
        inputs = fresh(case, Shape(B=1, T=60, states=3))
        bounds = [0, 17, 17, 60]
        o, final = case.op(**inputs, cu_seqlens=torch.tensor(bounds), output_final_state=True)
        for n, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
            alone = {name: x[:, begin:end] if name in case.tokens else x for name, x in inputs.items()}
            state = inputs["initial_state"]
            pair = isinstance(state, tuple)
            alone["initial_state"] = tuple(x[n : n + 1] for x in state) if pair else state[n : n + 1]
            o_n, final_n = case.op(**alone, output_final_state=True)
            assert relative_error(o[:, begin:end], o_n) < EXACT
            for a, b in zip(final, final_n, strict=True) if pair else [(final, final_n)]:
                assert relative_error(a[n : n + 1], b) < EXACT


def test_normalizer_of_an_empty_past_is_zero() -> None:
    """0 / 0 becomes 0 through the documented epsilon, in the gradient too."""
    q, k = torch.zeros(2, 1, 3, 1, 4).unbind(0)
    v = torch.randn(1, 3, 1, 4, requires_grad=True)
    o, _ = ops.chunk_linear_attn(q, k, v)
    o.sum().backward()
    assert o.abs().max() == 0 and v.grad is not None and v.grad.abs().max() == 0


def test_gates_beyond_the_floor() -> None:
    """Finite outputs and gradients with every gate from 0 to -1e4, in the low dtypes as well."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        inputs = {n: x.to(dtype).requires_grad_() for n, x in fresh(CASES["simple_gla"], Shape(T=130)).items()}
        with torch.no_grad():
            inputs["g"].copy_(-(10 ** (torch.rand(2, 130, 4) * 8 - 4)))
        o, final = ops.chunk_simple_gla(**inputs, output_final_state=True)
        grads = torch.autograd.grad([o.float().sum(), final.sum()], list(inputs.values()))
        assert all(x.isfinite().all() for x in (o, final, *grads))


def test_gradients_of_gates_that_nearly_close() -> None:
    """A gate's gradient is far smaller than those of scores beside it, and keeps its precision all the same."""
    q, k, v, do = torch.randn(4, 1, 128, 2, 16)
    g, found = -12 * (0.5 + torch.rand(1, 128, 2)), []
    for dtype in (torch.float32, torch.float64):
        gates = g.to(dtype).requires_grad_()
        o, _ = ops.chunk_simple_gla(q.to(dtype), k.to(dtype), v.to(dtype), gates)
        found.append(torch.autograd.grad(o, gates, do.to(dtype))[0].double())
    assert (found[0] - found[1]).norm() < 32 * torch.finfo(torch.float32).eps * found[1].norm()


def test_a_nearly_closed_gate_in_decoding() -> None:
    """What is left of a state where nothing is written to it: e^g."""
    state = torch.randn(1, 1, 3, 2, dtype=torch.float64)
    q, k, v = torch.randn(1, 1, 1, 3), torch.zeros(1, 1, 1, 3), torch.randn(1, 1, 1, 2)
    for gate, left in ((-60.0, -60.0), (-300.0, -300.0), (-1e4, -math.inf)):
        g = torch.full((1, 1, 1), gate, dtype=torch.float64)
        _, final = ops.recurrent_simple_gla(
            q.double(), k.double(), v.double(), g, initial_state=state, output_final_state=True
        )
        torch.testing.assert_close(final, state * math.exp(left), rtol=1e-12, atol=0)


@pytest.mark.parametrize("steepness", [50.0, 89.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["chunk_kda", "chunk_gated_delta_rule", "recurrent_kda"])
def test_raw_gates_of_any_steepness(name: str, dtype: torch.dtype, steepness: float) -> None:
    """e^A_log may overflow: gates close, and gradients stay finite."""
    q, k, v = torch.randn(3, 1, 10, 2, 4, dtype=dtype)
    g = torch.randn(1, 10, 2, *([4] if "kda" in name else []), dtype=dtype)
    g[0, 3], g[0, 4] = -200.0, -1e4
    for bound in {} if name == "chunk_gated_delta_rule" else {"lower_bound": -5.0}, {}:
        leaves = [g, torch.full((2,), steepness, dtype=dtype), torch.randn(g[0, 0].numel(), dtype=dtype)]
        raw, A_log, dt_bias = (x.clone().requires_grad_() for x in leaves)
        o, _ = getattr(ops, name)(
            q, k, v, raw, torch.rand(1, 10, 2, dtype=dtype), A_log=A_log, dt_bias=dt_bias, use_gate_in_kernel=True,
            use_qk_l2norm_in_kernel=True, **bound,
        )  # fmt: skip
        grads = torch.autograd.grad(o.sum(), (raw, A_log, dt_bias))
        assert all(x.isfinite().all() for x in (o, *grads))


def test_raw_gates_and_steps_in_half_precision_are_activated_in_float32() -> None:
    q, k, v = torch.randn(3, 1, 20, 2, 8).bfloat16()
    raw, beta, A_log = torch.randn(1, 20, 2).bfloat16(), 4 * torch.randn(1, 20, 2).bfloat16(), torch.randn(2)
    inside: dict[str, Any] = {"use_beta_sigmoid_in_kernel": True, "use_gate_in_kernel": True, "A_log": A_log}
    found, _ = ops.chunk_gated_delta_rule(q, k, v, raw, beta, use_qk_l2norm_in_kernel=True, **inside)
    gates, steps = -A_log.exp() * torch.nn.functional.softplus(raw.float()), beta.float().sigmoid()
    want, _ = ops.chunk_gated_delta_rule(q, k, v, gates, steps, use_qk_l2norm_in_kernel=True)
    assert torch.equal(found, want)


def test_public_names() -> None:
    """Each has rows in the tables of token loops; those that run over ranks, in those of ranks and of GPUs."""
    assert all(callable(getattr(ops, name)) for name in ops.__all__)
    recurrent = {f"recurrent_{name}" for name in ("simple_gla", *RECURRENT)}  # above
    missing = PUBLIC - named(TOKEN_LOOPS) - recurrent
    assert not missing, f"flexsp/testing/cases.py: expected a row with a token loop for {sorted(missing)}"
    assert named(TOKEN_LOOPS) | recurrent == PUBLIC
    assert named(OVER_RANKS) >= PARALLEL
    assert named(ON_GPU) >= PARALLEL


@pytest.mark.parametrize("scale", [1e-9, 1e-5, 3.0])
def test_the_denominator_is_scaled(scale: float) -> None:
    """Beside the constant in the denominator the scale shows: o = scale q S / (scale q z + 1e-10)."""
    q, k = torch.rand(2, 1, 20, 2, 5, dtype=torch.float64).unbind(0)
    q, k = q * 1e-2, k * 1e-2
    v = torch.randn(1, 20, 2, 4, dtype=torch.float64)
    S, z = (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(1), k.cumsum(1)
    numerator, denominator = (q.unsqueeze(-1) * S).sum(-2), (q * z).sum(-1, keepdim=True)
    want = scale * numerator / (scale * denominator + ops.linear_attn.NORMALIZER_EPS)
    o, _ = ops.chunk_linear_attn(q, k, v, scale=scale)
    assert relative_error(o, want) < EXACT


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gate_of_minus_infinity_acts_as_the_least_one(dtype: torch.dtype) -> None:
    """And keeps the precision of what follows: a sum of gates that holds -inf or -1e4 would not."""
    q, k, v = torch.randn(3, 1, 150, 2, 8, dtype=dtype).unbind(0)
    g = torch.nn.functional.logsigmoid(torch.randn(1, 150, 2, dtype=dtype))
    closed = g.clone()
    closed[:, 10::37] = -torch.inf
    least = closed.clamp(min=-104.0)
    for op in (ops.chunk_simple_gla, ops.recurrent_simple_gla):
        o, state = op(q, k, v, closed, output_final_state=True)
        want = op(q, k, v, least, output_final_state=True)
        assert torch.equal(o, want[0]) and torch.equal(state, want[1])
    want, _ = ops.recurrent_simple_gla(*(x.double() for x in (q, k, v, least)))
    o, _ = ops.chunk_simple_gla(q, k, v, closed)
    assert relative_error(o, want) < 64 * torch.finfo(dtype).eps
