"""Three PyTorch functions as a variant: against token loops in float64, packed, over ranks; and every error message."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from flexsp.compiler import (
    CompileError,
    ConstExpr,
    LinearAttention,
    SymbTensor,
    cache_result,
    decayed_scores,
    identity,
    unit_lower_inverse,
)  # fmt: skip
from flexsp.testing.compare import relative_error
from flexsp.testing.ranks import run_ranks
from tests.variants import VARIANTS, H, K, V, draw, gradients, load, token_loop

EXACT = 1e-10


def solve(
    name: str, T: int, seed: int, *, chunk: int, bounds: list[int] | None = None, dtype: torch.dtype = torch.float64
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(the compiled variant's answers, the token loop's) for one random problem."""
    B = 1 if bounds else 2
    tokens, params = draw(name, B, T, seed)
    n = len(bounds) - 1 if bounds else B
    initial = torch.randn(n, H, *VARIANTS[name].state, dtype=torch.float64)
    model = load(name).make(H, K, V, chunk_size=chunk)
    cu = torch.tensor(bounds) if bounds else None

    def compiled(x: Any, p: Any, s: torch.Tensor) -> Any:
        cast = {key: value.to(dtype) for key, value in {**x, **p}.items()}
        return model(**cast, prev_s=s, cu_seqlens=cu)

    found = gradients(compiled, tokens, params, initial, seed)
    return found, gradients(lambda x, p, s: token_loop(name, x, p, s, bounds), tokens, params, initial, seed)


def assert_equal(found: dict[str, torch.Tensor], want: dict[str, torch.Tensor], bound: float = EXACT) -> None:
    assert found.keys() == want.keys()
    errors = {key: relative_error(found[key], want[key]) for key in want}
    assert max(errors.values()) < bound, errors


@pytest.mark.parametrize("chunk", [1, 16, 64])
@pytest.mark.parametrize("name", VARIANTS)
def test_forward_and_every_gradient(name: str, chunk: int, seed: int) -> None:
    assert_equal(*solve(name, 37, seed, chunk=chunk))


@pytest.mark.parametrize("name", VARIANTS)
def test_packed_documents(name: str, seed: int) -> None:
    assert_equal(*solve(name, 40, seed, chunk=8, bounds=[0, 0, 3, 19, 19, 20, 36, 40, 40]))


@pytest.mark.parametrize("name", VARIANTS)
def test_kind_of_transition(name: str) -> None:
    model = load(name).make(H, K, V)
    assert model.program.transition == VARIANTS[name].transition
    assert f"transition: {VARIANTS[name].transition}" in model.explain()


@pytest.mark.parametrize("name", ["simple_gla", "deltanet"])
def test_half_precision_inputs_keep_states_in_float32(name: str, seed: int) -> None:
    tokens, params = draw(name, 2, 100, seed)
    tokens = {key: x.bfloat16() for key, x in tokens.items()}
    o, final = load(name).make(H, K, V)(**tokens)
    wide = {key: x.double() for key, x in tokens.items()}
    want, last = token_loop(name, wide, params, torch.zeros(2, H, K, V, dtype=torch.float64), None)
    assert o.dtype == torch.bfloat16 and final is not None and final.dtype == torch.float32
    assert relative_error(o, want) < 2 * torch.finfo(torch.bfloat16).eps
    assert relative_error(final, last) < 1e3 * torch.finfo(torch.float32).eps


def test_casts_do_not_round(seed: int) -> None:
    """What the functions cast stays in the accumulation dtype: here in float64, so the answers are exact."""

    def chunk(k: Any, v: Any) -> Any:
        return (k.to(torch.bfloat16).T @ v.half()).float()

    def merge(q: Any, k: Any, v: Any, chunk_state: Any, scale: Any) -> Any:
        return ((q @ k.T).tril(0).to(v.dtype) @ v + q @ chunk_state.bfloat16()) * scale

    tokens, params = draw("linear", 2, 30, seed)
    o, _ = build(chunk_mode=chunk, merge_mode=merge)(**tokens)
    want, _ = token_loop("linear", tokens, params, torch.zeros(2, H, K, V, dtype=torch.float64), None)
    assert relative_error(o, want) < EXACT


def test_inverse_of_the_listing_becomes_a_triangular_solve() -> None:
    nodes = load("deltanet").make(H, K, V).program.chunk.graph.nodes
    assert [node.target for node in nodes if node.target in ("inverse", unit_lower_inverse)] == [unit_lower_inverse]


def test_without_a_batch_axis(seed: int) -> None:
    tokens, _ = draw("simple_gla", 1, 20, seed)
    model = load("simple_gla").make(H, K, V)
    o, final = model(**tokens)
    flat, last = model(**{key: x[0] for key, x in tokens.items()})
    assert torch.equal(o[0], flat) and final is not None and last is not None and torch.equal(final, last)


def test_strong_gates_overflow_nowhere() -> None:
    """Listing 1 multiplies tril(scores) by e^{b_i - b_j} also above the diagonal, where it is infinite."""
    q, k, v = torch.randn(3, 1, 64, H, 4, dtype=torch.float32).unbind(0)
    g = torch.full((1, 64, H), -3.0, requires_grad=True)
    o, _ = load("simple_gla").make(H, 4, 4)(q=q, k=k, v=v, g=g)
    o.sum().backward()
    assert o.isfinite().all() and g.grad is not None and g.grad.isfinite().all()


# Ranks ---------------------------------------------------------------------------------------------------------------


def on_ranks(sp: Any, name: str, lengths: list[int], bounds: list[int] | None, seed: int) -> dict[str, torch.Tensor]:
    tokens, params = draw(name, 1 if bounds else 2, sum(lengths), seed)
    n = len(bounds) - 1 if bounds else 2
    generator = torch.Generator().manual_seed(seed)
    initial = torch.randn(n, H, *VARIANTS[name].state, dtype=torch.float64, generator=generator)
    cotangents = [
        torch.randn(shape, dtype=torch.float64, generator=generator)
        for shape in ((len(tokens["q"]), sum(lengths), H, V if "v" in tokens else K), initial.shape)
    ]
    sp.set_lengths(lengths)
    start, stop, _ = sp.shard_range(lengths[sp.rank])
    model = load(name).make(H, K, V, chunk_size=8)
    cu = None if bounds is None else torch.tensor(bounds)

    def run(part: slice, ranks: Any, owns: bool) -> dict[str, torch.Tensor]:
        leaves = {key: x[:, part].clone().requires_grad_() for key, x in tokens.items()}
        leaves |= {key: x.clone().requires_grad_() for key, x in params.items()}
        state = initial.clone().requires_grad_()
        o, final = model(**leaves, prev_s=state if owns else None, cu_seqlens=cu, sp=ranks)
        loss = (o * cotangents[0][:, part]).sum()
        if final is not None:
            loss = loss + (final * cotangents[1]).sum()
        loss.backward()
        found = {f"d{key}": x.grad for key, x in leaves.items() if x.grad is not None}
        found["dinitial"] = torch.zeros_like(state) if state.grad is None else state.grad
        found["o"] = o.detach()
        found["final"] = torch.zeros_like(initial) if final is None else final.detach()
        return found

    mine = run(slice(start, stop), sp, sp.is_first or bounds is not None)
    whole = run(slice(0, sum(lengths)), False, True)
    worst = {}
    for key, want in whole.items():
        got = mine.get(key)
        if key == "o" or key.removeprefix("d") in tokens:
            assert got is not None
            worst[key] = relative_error(got, want[:, start:stop]) if stop > start else 0.0
        else:
            worst[key] = torch.zeros_like(want) if got is None else got
    return worst | {f"want {key}": whole[key] for key in worst if isinstance(worst[key], torch.Tensor)}


def assert_ranks(name: str, lengths: list[int], bounds: list[int] | None, seed: int) -> None:
    answers = run_ranks(on_ranks, len(lengths), name, lengths, bounds, seed)
    for key, value in answers[0].items():
        if key.startswith("want "):
            continue
        if isinstance(value, torch.Tensor):
            total = torch.stack([answer[key] for answer in answers]).sum(0)
            assert relative_error(total, answers[0][f"want {key}"]) < EXACT, key
        else:
            assert max(answer[key] for answer in answers) < EXACT, (key, [answer[key] for answer in answers])


@pytest.mark.parametrize("lengths", [[13, 30], [9, 0, 21], [0, 17, 5, 8]], ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_ranks_equal_one_rank(name: str, lengths: list[int], seed: int) -> None:
    assert_ranks(name, lengths, None, seed)


@pytest.mark.parametrize("name", VARIANTS)
def test_documents_across_ranks(name: str, seed: int) -> None:
    lengths = random.choice([[11, 4, 25], [0, 20, 20], [5, 6, 29, 0]])
    assert_ranks(name, lengths, [0, 0, 7, 11, 30, 30, 40], seed)


def saturating(decay: Any = None) -> LinearAttention:
    """A state that saturates after every chunk: not affine, so ranks run one after the other."""
    module = load("linear")

    def saturated(prev_s: Any, chunk_state: Any) -> Any:
        return (prev_s + chunk_state).tanh()

    return LinearAttention(meta(), module.chunk, decay or saturated, module.merge, chunk_size=8)


def meta(**changes: Any) -> dict[str, Any]:
    h, k, v = ConstExpr("H", H), ConstExpr("K", K), ConstExpr("V", V)
    found = {
        "q": SymbTensor(["T", h, k]),
        "k": SymbTensor(["T", h, k]),
        "v": SymbTensor(["T", h, v]),
        "prev_s": SymbTensor(["NS", h, k, v]),
        "scale": K**-0.5,
    }
    return {key: value for key, value in (found | changes).items() if value is not None}


def not_affine(sp: Any, lengths: list[int], seed: int) -> list[float]:
    model = saturating()
    assert model.program.transition == "not affine" and "one after the other" in model.explain()
    tokens, _ = draw("linear", 2, sum(lengths), seed)
    sp.set_lengths(lengths)
    start, stop, _ = sp.shard_range(lengths[sp.rank])
    cotangent = torch.randn(2, sum(lengths), H, V, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    errors = []
    leaves = {key: x[:, start:stop].clone().requires_grad_() for key, x in tokens.items()}
    whole = {key: x.clone().requires_grad_() for key, x in tokens.items()}
    o, _ = model(**leaves, sp=sp)
    (o * cotangent[:, start:stop]).sum().backward()
    want, _ = model(**whole, sp=False)
    (want * cotangent).sum().backward()
    if start == stop:
        return [0.0]
    errors.append(relative_error(o, want[:, start:stop]))
    for key in tokens:
        got, exact = leaves[key].grad, whole[key].grad
        assert got is not None and exact is not None
        errors.append(relative_error(got, exact[:, start:stop]))
    return errors


@pytest.mark.parametrize("lengths", [[8, 21], [16, 0, 8, 5]], ids=str)
def test_what_is_not_affine_runs_rank_after_rank(lengths: list[int], seed: int) -> None:
    answers = run_ranks(not_affine, len(lengths), lengths, seed)
    assert max(max(errors) for errors in answers) < EXACT, answers


# Errors --------------------------------------------------------------------------------------------------------------


def chunk_ok(k: Any, v: Any) -> Any:
    return k.T @ v


def decay_ok(prev_s: Any, chunk_state: Any) -> Any:
    return prev_s + chunk_state


def merge_ok(q: Any, k: Any, v: Any, chunk_state: Any, scale: Any) -> Any:
    return ((q @ k.T).tril(0) @ v + q @ chunk_state) * scale


def build(changes: dict[str, Any] | None = None, **options: Any) -> LinearAttention:
    functions = {"chunk_mode": chunk_ok, "decay_mode": decay_ok, "merge_mode": merge_ok}
    return LinearAttention(meta(**(changes or {})), **(functions | options))


def branching(k: Any, v: Any) -> Any:
    return k.T @ v if k.sum() > 0 else v.T @ k


def in_place(k: Any, v: Any) -> Any:
    return (k.T @ v).add_(1.0)


def item(k: Any, v: Any) -> Any:
    state = k.T @ v
    state[0] = 0
    return state


def unsupported(k: Any, v: Any) -> Any:
    return torch.fft.fft(k).real.T @ v


def wrong_shape(k: Any, v: Any) -> Any:
    return v.T @ k


def mismatched(k: Any, v: Any) -> Any:
    return k @ v


def not_causal(q: Any, k: Any, v: Any, chunk_state: Any, scale: Any) -> Any:
    return ((q @ k.T) @ v + q @ chunk_state) * scale


def wrong_output(q: Any, chunk_state: Any) -> Any:
    return (q @ chunk_state).sum(0)


def unknown_cached(q: Any, w: Any, chunk_state: Any) -> Any:
    return q @ chunk_state + w


def hides(k: Any, v: Any) -> Any:
    return cache_result(k.T @ v, "q")


def twice(k: Any, v: Any) -> Any:
    cache_result(v, "u")
    return cache_result(k.T @ v, "u")


def caches_late(prev_s: Any, chunk_state: Any) -> Any:
    return cache_result(prev_s + chunk_state, "after")


def from_the_right(prev_s: Any, chunk_state: Any, v: Any) -> Any:
    return prev_s @ (v.T @ v) + chunk_state


def forgets(chunk_state: Any) -> Any:
    return chunk_state * 2


def general_inverse(k: Any, v: Any) -> Any:
    return (k @ k.T).inverse() @ v


def two_results(k: Any, v: Any) -> Any:
    return k.T @ v, v


ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "control flow": ({"chunk_mode": branching}, "control flow depends on a tensor"),
    "in place": ({"chunk_mode": in_place}, r"add_ changes a tensor in place at .*test_compiler.py:\d+ \(return"),
    "item assignment": ({"chunk_mode": item}, "assigns to part of a tensor"),
    "operator": ({"chunk_mode": unsupported}, r"operator 'fft_fft' at .*test_compiler.py:\d+ .*not supported"),
    "shape of F": ({"chunk_mode": wrong_shape}, r"expected the shape of the state, \[.*got \["),
    "shapes inside": ({"chunk_mode": mismatched}, r"fails on one chunk of one head, k \[6, \d\], v \[6, \d\]"),
    "not causal": ({"merge_mode": not_causal}, "not causal: token 1 of 'k'"),
    "output": ({"merge_mode": wrong_output}, r"expected a result \[C, V\]"),
    "unknown name": (
        {"merge_mode": unknown_cached},
        "argument 'w' is no input and no cached value",
    ),
    "hidden input": ({"chunk_mode": hides}, "cache_result name 'q' hides an input"),
    "cached twice": ({"chunk_mode": twice}, "needs a name of its own"),
    "cached late": ({"decay_mode": caches_late}, "only chunk_mode may cache results"),
    "from the right": ({"decay_mode": from_the_right}, "write the state transposed"),
    "no state": ({"decay_mode": forgets}, "expected an argument 'prev_s'"),
    "inverse": ({"chunk_mode": general_inverse}, "not seen to be unit lower"),
    "two results": ({"chunk_mode": two_results}, "expected one tensor as result"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_cause_and_remedy(name: str) -> None:
    functions, message = ERRORS[name]
    with pytest.raises(CompileError, match=message):
        build(**functions)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prev_s": None}, "prev_s.*expected SymbTensor"),
        ({"q": 1j}, "input_meta\\['q'\\]: expected a SymbTensor or a number"),
        ({"q": SymbTensor(["T", ConstExpr("heads", H), K])}, "expected the heads"),
        ({"v": SymbTensor(["T", ConstExpr("H", H), ConstExpr("K", 9)])}, "two lists of values"),
        ({"chunk_state": SymbTensor(["NC", ConstExpr("H", H), 3])}, "chunk_state.*expected sizes"),
    ],
)
def test_errors_of_input_meta(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(changes=changes)


def test_what_is_not_there_says_so() -> None:
    for option in ({"enable_aot": True}, {"code_dir": "there"}, {"autotune": True}):
        with pytest.raises(NotImplementedError, match=next(iter(option))):
            build(**option)
    with pytest.raises(ValueError, match="sp_group: expected what flexsp.init_sequence_parallel"):
        build(sp_group=object())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": None}, r"missing \['q'\]"),
        ({"extra": torch.ones(1)}, r"unknown \['extra'\]"),
        ({"k": torch.randn(1, 9, H, K)}, "k: expected size T = 8"),
        ({"v": torch.randn(1, 8, H, V + 1)}, "v: expected size V"),
        ({"k": torch.ones(1, 8, H, K, dtype=torch.int64)}, "k: expected a floating tensor"),
        ({"prev_s": torch.randn(2, H, K, V)}, "prev_s: expected"),
        ({"cu_seqlens": torch.tensor([0, 5, 9])}, "cu_seqlens: expected non-decreasing boundaries from 0 to 8"),
        ({"cu_seqlens": torch.tensor([0, 5, 4, 8])}, "cu_seqlens: expected non-decreasing"),
    ],
)
def test_errors_of_a_call(changes: dict[str, Any], message: str) -> None:
    inputs: dict[str, Any] = {"q": torch.randn(1, 8, H, K), "k": torch.randn(1, 8, H, K), "v": torch.randn(1, 8, H, V)}
    inputs = {key: x for key, x in (inputs | changes).items() if x is not None}
    with pytest.raises(ValueError, match=message):
        build()(**inputs)


# Primitives ----------------------------------------------------------------------------------------------------------


def test_primitives() -> None:
    q, k, b = torch.randn(6, 4).double(), torch.randn(6, 4).double(), -torch.rand(6, 4).double().cumsum(0)
    want = torch.stack(
        [torch.stack([(q[i] * k[j] * (b[i] - b[j]).exp()).sum() * (j <= i) for j in range(6)]) for i in range(6)]
    )
    assert torch.allclose(decayed_scores(q, k, b), want)
    one = b[:, :1].expand(6, 4)
    assert torch.allclose(decayed_scores(q, k, b[:, 0]), decayed_scores(q, k, one))
    assert decayed_scores(q, k, 1e4 * b).isfinite().all()
    lower = torch.randn(6, 6).double()
    exact = (identity(lower, 6) + lower.tril(-1)).inverse()
    assert torch.allclose(unit_lower_inverse(lower), exact)
