"""Three PyTorch functions as a variant: against token loops in float64, packed, over ranks; and every error message."""

from __future__ import annotations

import copy
import functools
import pickle
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
    decayed_sums,
    identity,
    unit_lower_inverse,
)  # fmt: skip
from flexsp.testing.compare import relative_error
from flexsp.testing.ranks import run_ranks
from tests import variants
from tests.harness.functions import EXACT, assert_ranks
from tests.marks import quick
from tests.variants import VARIANTS, Function, H, K, V, draw, gradients, load, token_loop


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
@pytest.mark.parametrize("name", variants.USUAL)
def test_forward_and_every_gradient(name: str, chunk: int, seed: int) -> None:
    assert_equal(*solve(name, 37, seed, chunk=chunk))


@pytest.mark.parametrize("name", variants.USUAL)
def test_packed_documents(name: str, seed: int) -> None:
    assert_equal(*solve(name, 40, seed, chunk=8, bounds=[0, 0, 3, 19, 19, 20, 36, 40, 40]))


@pytest.mark.parametrize("name", quick(variants.VARIANTS, "simple_gla", "gla", "hgrn", "deltanet", "retnet"))
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

    tokens, params = draw("linear", 2, 30, seed)
    o, _ = build(chunk_mode=variants.narrow_chunk, merge_mode=variants.narrow_merge)(**tokens)
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


# Against the functions as they are ------------------------------------------------------------------------------------


GATED: dict[str, Any] = {"g": SymbTensor(["T", ConstExpr("H", H)])}


def assert_as_written(changes: dict[str, Any] | None = None, **options: Function) -> LinearAttention:
    """Compiled equals variants.untraced; parameters are drawn."""
    declared = GATED | (changes or {})
    model = build(declared, chunk_size=8, **options)
    x = variants.gated_inputs()
    shapes = {name: y.shape for name, y in model.program.meta.params.items()}
    params = {name: torch.rand([H, *(int(n) for n in shape[1:])]).double() for name, shape in shapes.items()}
    o, _ = model(**x, **params)
    functions = {
        "chunk_mode": variants.chunk_ok,
        "decay_mode": variants.decay_ok,
        "merge_mode": variants.merge_ok,
    } | options
    assert relative_error(o, variants.untraced(functions, x, params, 8)) < EXACT
    return model


@pytest.mark.parametrize("name", [*variants.EXPONENTS, *variants.CASTS])
def test_exponents_masked_and_masks_as_numbers(name: str) -> None:
    """Only exponents as large as the scores are masked; casts of masks make numbers."""
    assert_as_written(merge_mode=variants.scored((variants.EXPONENTS | variants.CASTS)[name]))


def test_exponent_of_a_parameter_is_not_masked() -> None:
    for sizes in ([], [1, 1]):
        assert_as_written({"u": SymbTensor([ConstExpr("H", H), *sizes])}, merge_mode=variants.by_a_parameter)


def test_dtype_keywords_do_not_narrow() -> None:
    assert_as_written(chunk_mode=lambda k, v: k.T @ torch.ones_like(v, dtype=k.dtype))
    x = variants.gated_inputs()
    model = build(GATED, chunk_mode=lambda k, v: (k * 2).T @ torch.ones_like(v, dtype=torch.float32))
    want = build(GATED, chunk_mode=lambda k, v: (k * 2).T @ torch.ones_like(v))
    assert torch.equal(model(**x)[0], want(**x)[0])


@pytest.mark.parametrize("name", variants.DECAYED)
def test_decay_masked_in_other_ways(name: str) -> None:
    merge = variants.sized(variants.DECAYED[name])
    model = assert_as_written(merge_mode=merge)
    x = {key: y.requires_grad_() for key, y in variants.gated_inputs(64, torch.float32).items()}
    x["g"] = torch.full((1, 64, H), -3.0, requires_grad=True)
    model = build(GATED, merge_mode=merge)
    o, _ = model(**x)
    o.sum().backward()
    assert o.isfinite().all() and all(y.grad is not None and y.grad.isfinite().all() for y in x.values())


def test_programs_can_be_pickled_and_copied() -> None:
    for name in ("two diagonals", "where"):
        model = build(GATED, merge_mode=variants.sized(variants.DECAYED[name]))
        x = variants.gated_inputs()
        for again in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
            assert torch.equal(model(**x)[0], again(**x)[0])


def test_decay_that_overflows_is_refused() -> None:
    with pytest.raises(CompileError, match=r"not finite where 'g' is -400: the exponential at .*decayed_scores"):
        build(GATED, merge_mode=variants.sized(lambda s, d: (s * (d.exp() + 0)).tril()))


def test_exponential_features_are_not_decay() -> None:
    assert_as_written(merge_mode=variants.exponential_features)


@pytest.mark.parametrize("name", variants.KINDS)
def test_kind_is_read_from_the_graph(name: str) -> None:
    decay, kind = variants.KINDS[name]
    assert assert_as_written(decay_mode=decay).program.transition == kind


def test_autocast_changes_nothing(seed: int) -> None:
    tokens = {key: x.float() for key, x in draw("deltanet", 1, 40, seed)[0].items()}
    model = load("deltanet").make(H, K, V)
    o, final = model(**tokens)
    with torch.autocast("cpu", torch.bfloat16):
        again, last = model(**tokens)
    assert torch.equal(o, again) and final is not None and last is not None and torch.equal(final, last)


def normalised(**sizes: Any) -> LinearAttention:
    key = SymbTensor(["T", sizes["h"], sizes["k"]])
    state = SymbTensor(["NS", sizes["h"], sizes["k"], sizes["wide"]])
    changes = {"q": key, "k": key, "v": SymbTensor(["T", sizes["h"], sizes["v"]]), "prev_s": state}
    return LinearAttention(changes, variants.Normalised.chunk, variants.decay_ok, variants.Normalised.merge)


@pytest.mark.parametrize("literal", [True, False])
def test_output_narrower_than_the_state(literal: bool) -> None:
    heads, k = ConstExpr("H", H), ConstExpr("K", K)
    v, wide = (V, V + 1) if literal else (ConstExpr("V", V), ConstExpr("Vn", V + 1))
    model = normalised(h=heads, k=k, v=v, wide=wide)
    for T in (0, 3):
        x = {name: torch.rand(1, T, H, V if name == "v" else K) for name in "qkv"}
        assert model(**x)[0].shape == (1, T, H, V)
    assert model.program.value_sizes == (v,)


def test_value_sizes_are_symbols() -> None:
    heads, k, v = ConstExpr("H", H), ConstExpr("K", 4), ConstExpr("V", 4)
    key = SymbTensor(["T", heads, k])
    changes = {"q": key, "k": key, "v": SymbTensor(["T", heads, v]), "prev_s": SymbTensor(["NS", heads, k, v])}
    assert build(changes).program.value_sizes == (v,)
    reads = build(
        changes, merge_mode=lambda q, k, chunk_state: (q @ k.T).tril() @ k + q @ (chunk_state @ chunk_state.T)
    )
    assert reads.program.value_sizes == (k,)


def test_inputs_of_one_sign() -> None:
    gates = variants.LogGates
    model = build(GATED, chunk_mode=gates.chunk, decay_mode=gates.decay, merge_mode=gates.merge)
    assert model.program.transition == "scalar"
    root = build(GATED, decay_mode=lambda prev_s, chunk_state, g: prev_s * (1 - g.exp()).sqrt().sum() + chunk_state)
    assert root.program.transition == "scalar"
    opposite = GATED | {"u": SymbTensor([ConstExpr("H", H)])}
    both = build(
        opposite, decay_mode=lambda prev_s, chunk_state, g, u: prev_s * (g.log() + (-u).log()).sum() + chunk_state
    )
    assert both.program.transition == "scalar"
    with pytest.raises(CompileError, match="chunk_mode 'bad': results, computed at .*, are not finite, whether inputs"):
        build(GATED, chunk_mode=variants.bad)


def test_building_leaves_generators_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    reseeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", reseeded.append)
    before = torch.get_rng_state()
    with torch.device("meta"), torch.inference_mode():
        build()
    assert torch.equal(before, torch.get_rng_state()) and not reseeded


def test_sizes_that_belong_together() -> None:
    """Functions that hold for the sizes given, and not for any: pairs of channels, a literal number of them."""
    heads, v = ConstExpr("H", H), ConstExpr("V", V)
    functions = {"chunk_mode": variants.Rotated.chunk, "merge_mode": variants.Rotated.merge}
    for k, half in ((ConstExpr("K", 6), ConstExpr("K2", 3)), (ConstExpr("K", 64), ConstExpr("K2", 32))):
        key, angle = SymbTensor(["T", heads, k]), SymbTensor(["T", heads, half])
        state = SymbTensor(["NS", heads, k, v])
        build({"q": key, "k": key, "v": SymbTensor(["T", heads, v]), "prev_s": state, "angle": angle}, **functions)
    build({"n": K}, chunk_mode=lambda k, v, n: k.reshape(-1, n).T @ v)


@pytest.mark.parametrize(
    "chunk",
    [variants.Chunks().chunk, variants.Chunks(), variants.Module(), functools.partial(variants.doubled, factor=1.0)],
)
def test_what_is_called_like_a_function(chunk: Function) -> None:
    assert build(chunk_mode=chunk).program.chunk.arguments == ("k", "v")


def test_defaults_are_kept() -> None:
    assert_as_written(chunk_mode=variants.doubled)
    assert_as_written(chunk_mode=lambda k, v: torch.nn.functional.logsigmoid(k).T @ v)


# Ranks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[13, 30], [9, 0, 21], [0, 17, 5, 8]], ids=str)
@pytest.mark.parametrize("name", variants.USUAL)
def test_ranks_equal_one_rank(name: str, lengths: list[int], seed: int) -> None:
    assert_ranks(name, lengths, None, seed)


@pytest.mark.parametrize("name", variants.USUAL)
def test_documents_across_ranks(name: str, seed: int) -> None:
    lengths = random.choice([[11, 4, 25], [0, 20, 20], [5, 6, 29, 0]])
    assert_ranks(name, lengths, [0, 0, 7, 11, 30, 30, 40], seed)


def saturating(decay: Any = None) -> LinearAttention:
    """A state that saturates after every chunk: not affine, so ranks run one after the other."""
    module = load("linear")
    return LinearAttention(meta(), module.chunk, decay or variants.saturated, module.merge, chunk_size=8)


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
    assert model.program.transition == "sequential" and "one after the other" in model.explain()
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


def final_only(sp: Any, saturates: bool, lengths: list[int], bounds: list[int] | None) -> list[float]:
    """A loss on final states alone, where there are none on outputs: every rank's gradients, against one rank's."""
    model = saturating() if saturates else load("simple_gla").make(H, K, V, chunk_size=8)
    tokens, _ = draw("linear" if saturates else "simple_gla", 1, sum(lengths), 7)
    sp.set_lengths(lengths)
    start, stop, _ = sp.shard_range(lengths[sp.rank])
    cu = None if bounds is None else torch.tensor(bounds)
    leaves = {key: x[:, start:stop].clone().requires_grad_() for key, x in tokens.items()}
    whole = {key: x.clone().requires_grad_() for key, x in tokens.items()}
    o, final = model(**leaves, cu_seqlens=cu, sp=sp)
    ((o * 0).sum() if final is None else final.square().sum()).backward()
    want = model(**whole, cu_seqlens=cu, sp=False)[1]
    assert want is not None
    want.square().sum().backward()
    errors = [0.0]
    for key in ("k", "v"):
        got, exact = leaves[key].grad, whole[key].grad
        assert got is not None and exact is not None
        errors += (
            [relative_error(got, exact[:, start:stop])] if exact[:, start:stop].any() else [float(got.abs().max())]
        )
    return errors


@pytest.mark.parametrize(
    ("saturates", "lengths", "bounds"),
    [
        (False, [16, 16], [0, 5, 20, 32]),
        (False, [16, 16, 16], [0, 5, 20, 48]),
        (True, [16, 16], None),
        (True, [16, 16, 16], [0, 8, 24, 40, 48]),
    ],
    ids=str,
)
def test_a_loss_on_final_states_alone(saturates: bool, lengths: list[int], bounds: list[int] | None) -> None:
    answers = run_ranks(final_only, len(lengths), saturates, lengths, bounds, sp_timeout_s=60.0)
    assert max(max(errors) for errors in answers) < EXACT, answers


def under_autocast(sp: Any) -> float:
    tokens = {key: x.float() for key, x in draw("linear", 1, 32, 7)[0].items()}
    sp.set_lengths([16, 16])
    part = slice(16 * sp.rank, 16 * sp.rank + 16)
    with torch.autocast("cpu", torch.bfloat16):
        o, _ = saturating(variants.mixed)(**{key: x[:, part] for key, x in tokens.items()}, sp=sp)
    want, _ = saturating(variants.mixed)(**tokens, sp=False)
    return relative_error(o, want[:, part])


def test_autocast_changes_nothing_over_ranks() -> None:
    assert max(run_ranks(under_autocast, 2)) < 1e-5


# Errors --------------------------------------------------------------------------------------------------------------


def build(changes: dict[str, Any] | None = None, **options: Any) -> LinearAttention:
    """Functions that need not agree about where a chunk ends, which a chunk size allows."""
    functions = {"chunk_mode": variants.chunk_ok, "decay_mode": variants.decay_ok, "merge_mode": variants.merge_ok}
    return LinearAttention(meta(**(changes or {})), **({"chunk_size": 64} | functions | options))


ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "control flow": ({"chunk_mode": variants.branching}, "control flow depends on a tensor"),
    "no gradients": ({"chunk_mode": variants.without_gradients}, r"computes at .*variants.py:\d+ .* without gradients"),
    "in place": ({"chunk_mode": variants.in_place}, r"add_ changes a tensor in place at .*variants.py:\d+ \(return"),
    "item assignment": ({"chunk_mode": variants.item}, "assigns to part of a tensor"),
    "operator": ({"chunk_mode": variants.unsupported}, r"operator 'fft_fft' at .*variants.py:\d+ .*not supported"),
    "shape of F": ({"chunk_mode": variants.wrong_shape}, r"expected the shape of the state, \[.*got \["),
    "shapes inside": ({"chunk_mode": variants.mismatched}, r"fails on one chunk of one head, k \[6, \d\], v \[6, \d\]"),
    "not causal": ({"merge_mode": variants.not_causal}, "not causal: token 1 of 'k'"),
    "output": ({"merge_mode": variants.wrong_output}, r"expected a result \[C, V\]"),
    "unknown name": ({"merge_mode": variants.unknown_cached}, "argument 'w' is no input and no cached value"),
    "hidden input": ({"chunk_mode": lambda k, v: cache_result(k.T @ v, "q")}, "cache_result name 'q' hides an input"),
    "cached twice": (
        {"chunk_mode": lambda k, v: cache_result(cache_result(k.T @ v, "u"), "u")},
        "needs a name of its own",
    ),
    "cached as text": ({"chunk_mode": lambda k, v: cache_result(k.T @ v, "u w")}, "a name of its own, got 'u w'"),
    "cached late": (
        {"decay_mode": lambda prev_s, chunk_state: cache_result(prev_s + chunk_state, "after")},
        "only chunk_mode may cache results",
    ),
    "from the right": ({"decay_mode": variants.from_the_right}, "write the state transposed"),
    "no state": ({"decay_mode": variants.forgets}, "expected an argument 'prev_s'"),
    "inverse": ({"chunk_mode": variants.general_inverse}, "not seen to be unit lower"),
    "integers": ({"chunk_mode": variants.whole_numbers}, r"casts to torch.int32 at .*variants.py"),
    "alpha": (
        {"chunk_mode": lambda k, v: torch.add(k.tril(-1), identity(k, k.size(0)), alpha=2).inverse() @ v},
        "not seen to be unit lower",
    ),
    "closure": ({"chunk_mode": variants.closure}, "uses a tensor that is no argument at .*give it as an input"),
    "constant": ({"chunk_mode": variants.constant}, "uses a tensor that is no argument"),
    "module": ({"chunk_mode": torch.nn.Linear(K, K)}, "a module with tensors of its own"),
    "loop over a size": (
        {"chunk_mode": variants.loops},
        r"cannot be traced at .*variants.py:\d+ .*no loop over a size",
    ),
    "len": ({"chunk_mode": lambda k, v: k.T @ v * len(k)}, "cannot be traced at"),
    "raises lines": ({"chunk_mode": variants.raises_lines}, r"ValueError: the first line; values and sizes"),
    "ones of a size": ({"chunk_mode": variants.makes_ones}, "cannot be traced at .*with ones_like"),
    "rows by mask in decay": (
        {"decay_mode": variants.sums_rows},
        "decay_mode 'sums_rows': runs on one chunk of one head, but not on many",
    ),
    "rows by mask": (
        {"merge_mode": variants.picks_rows},
        "merge_mode 'picks_rows': runs on one chunk of one head, but not",
    ),
    "cached number": (
        {"chunk_mode": lambda k, v: k.T @ v * cache_result(k.size(0), "n")},
        "expected a tensor as n, got 6",
    ),
    "no tokens": ({"chunk_mode": variants.no_tokens}, "expected at least one argument of the tokens"),
    "any arguments": ({"chunk_mode": variants.many_arguments}, "name every argument"),
    "not a function": ({"chunk_mode": 3}, "expected a Python function"),
    "two results": ({"chunk_mode": variants.two_results}, "expected one tensor as result"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_cause_and_remedy(name: str) -> None:
    functions, message = ERRORS[name]
    with pytest.raises(CompileError, match=message) as caught:
        build(**functions)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prev_s": None}, "prev_s.*expected SymbTensor"),
        ({"q": 1j}, "input_meta\\['q'\\]: expected a SymbTensor or a number"),
        ({"q": SymbTensor(["T", ConstExpr("heads", H), K])}, "expected the heads"),
        ({"v": SymbTensor(["T", ConstExpr("H", H), ConstExpr("K", 9)])}, "two lists of values"),
        ({"chunk_state": SymbTensor(["NC", ConstExpr("H", H), 3])}, "chunk_state.*expected sizes"),
        ({"u": SymbTensor([ConstExpr("H", H), "D"])}, "input_meta\\['u'\\]: expected ConstExprs or .*got 'D'"),
        ({"z": SymbTensor(["T", ConstExpr("H", H), ConstExpr("T", 3)])}, "'z'.*another .*'T', which are the tokens"),
        ({"u": SymbTensor([ConstExpr("H", H), ConstExpr("H", H)])}, "'u'.*another name .*'H', which are the heads"),
        ({"sp": SymbTensor(["T", ConstExpr("H", H)])}, "input_meta\\['sp'\\]: expected another name"),
        ({"self": SymbTensor(["T", ConstExpr("H", H)])}, "input_meta\\['self'\\]: expected another name"),
        ({"in": SymbTensor(["T", ConstExpr("H", H)])}, "input_meta: expected names that arguments can have, got 'in'"),
        ({"a b": SymbTensor(["T", ConstExpr("H", H)])}, "input_meta: expected names that arguments can have, got 'a b"),
    ],
)
def test_errors_of_input_meta(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(changes=changes)


def test_what_is_not_there_says_so() -> None:
    with pytest.raises(ValueError, match="sp_group: expected a ProcessGroup or what flexsp.init_sequence_parallel"):
        build(sp_group=object())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": None}, r"missing \['q'\]"),
        ({"extra": torch.ones(1)}, r"unknown \['extra'\]"),
        ({"k": torch.randn(1, 9, H, K)}, r"k: expected size T = 8, got 9 in \[B, T, H, K\] = \[1, 9, "),
        ({"v": torch.randn(1, 8, H, V + 1)}, f"v: expected size V = {V}, got {V + 1} in"),
        ({"k": torch.ones(1, 8, H, K, dtype=torch.int64)}, "k: expected a floating tensor"),
        ({"prev_s": torch.randn(2, H, K, V)}, "prev_s: expected"),
        ({"prev_s": torch.randn(1, H, K, V).double()}, "prev_s: expected .* of torch.float32 on cpu, got .*float64"),
        ({"prev_s": torch.ones(1, H, K, V, dtype=torch.int64)}, "prev_s: expected .* got .*int64"),
        ({"prev_s": torch.ones(1, H, K, V, dtype=torch.complex64)}, "prev_s: expected .* got .*complex64"),
        ({"prev_s": 1.0}, "prev_s: expected a tensor"),
        ({"cu_seqlens": [0, 8]}, r"cu_seqlens: expected a tensor \[N \+ 1\] of int32 or int64, got list"),
        ({"cu_seqlens": torch.tensor([0.0, 2.5, 8.0])}, "cu_seqlens: expected a tensor .* got torch.float32"),
        ({"cu_seqlens": torch.tensor([[0, 8]])}, r"cu_seqlens: expected a tensor .* got torch.int64 \[1, 2\]"),
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
    narrow = decayed_scores(q.float(), k.float(), b - 1e6)  # of sums in float64
    assert narrow.dtype == torch.float32 and torch.allclose(narrow, want.float(), atol=1e-5)
    g = torch.diff(b, dim=0, prepend=torch.zeros(1, 4))
    summed = torch.stack([sum((b[i] - b[j]).exp() * q[j] for j in range(i + 1)) for i in range(6)])
    assert torch.allclose(decayed_sums(q, g), summed)
    assert torch.allclose(decayed_sums(q, g[:, 0]), decayed_sums(q, g[:, :1].expand(6, 4)))
    assert torch.equal(decayed_sums(q, torch.full_like(g, -1e4)), q)
    with pytest.raises(ValueError, match=r"decayed_sums: expected x .* got \[6, 4\] and \[6, 3\]"):
        decayed_sums(q, g[:, :3])
    lower = torch.randn(6, 6).double()
    exact = (identity(lower, 6) + lower.tril(-1)).inverse()
    assert torch.allclose(unit_lower_inverse(lower), exact)
