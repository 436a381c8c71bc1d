"""mLSTM against token loops that stand here: values, gradients, documents, ranks; and its layer."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexsp.comm.group import SequenceParallel
from flexsp.kernels.diagonal.op import diagonal_pair
from flexsp.kernels.mlstm import in_pytorch
from flexsp.nn import MLSTM, SequenceParallelLA
from flexsp.ops import mlstm
from flexsp.scan import maxima
from flexsp.testing.compare import DRAWS, check_op, relative_error
from flexsp.testing.ranks import run_ranks
from tests.harness.interpreted import INTERPRETED
from tests.harness.mlstm import (
    KEPT_WIDE,
    STATES,
    TOKENS,
    Tensors,
    chunk,
    chunk_mlstm,
    conditioned,
    draw,
    oracle,
    recurrent_mlstm,
    step,
    with_gradients,
)
from tests.marks import quick

EXACT = 1e-12
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def results(outputs: Any, inputs: Tensors, cotangents: list[Tensor]) -> Tensors:
    """h, the final states and the gradients."""
    h, (C, n, m) = outputs
    grads = torch.autograd.grad([h, C, n], list(inputs.values()), cotangents, allow_unused=True)
    found = {name: torch.zeros_like(x) if g is None else g for (name, x), g in zip(inputs.items(), grads, strict=True)}
    return found | {"h": h.detach(), "C": C.detach(), "n": n.detach(), "m": m.detach()}


def cotangents_of(outputs: Any) -> list[Tensor]:
    h, (C, n, _) = outputs
    return [torch.randn_like(x) for x in (h, C, n)]


def assert_alike(got: Tensors, want: Tensors, bound: float = EXACT) -> None:
    errors = {key: relative_error(got[key], x) for key, x in want.items()}
    assert all(error < bound for error in errors.values()), errors


@pytest.mark.parametrize("dtype", quick(DTYPES, torch.float64, torch.float32))
@pytest.mark.parametrize("states", [2, 0])
def test_against_the_token_loop(dtype: torch.dtype, states: int) -> None:
    """Without a state, the first token reads its own value whatever q is, so that one alone has a dq of 0.

    Texts of few tokens have few numbers: the reference answers more cotangents, since it may be near the loop by luck.
    """
    for T, K, V in ((random.choice((67, 131)), 20, 11), (2, 16, 5), (1, 16, 5)):
        inputs = conditioned(draw(2, T, states, K, V), dtype)
        alone, draws = T == 1 and not states, DRAWS if T > 2 else 4 * DRAWS
        check_op(chunk, oracle, inputs, dtype=dtype, wide=KEPT_WIDE, gradients=not alone, draws=draws)


@pytest.mark.parametrize("dtype", quick(DTYPES, torch.float64))
def test_token_by_token(dtype: torch.dtype) -> None:
    check_op(step, oracle, conditioned(draw(2, 21, 2), dtype), dtype=dtype, wide=KEPT_WIDE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_keys_are_not_rounded(dtype: torch.dtype) -> None:
    """Sums of weights are what outputs are divided by."""
    q, i, f = torch.randn(1, 65, 2, 8).to(dtype), *torch.randn(2, 1, 65, 2).to(dtype).unbind(0)
    found, _ = mlstm._stabilised(q, i, f, None, 1, None, None, False)
    want = (i.double() - found.m).exp()
    assert relative_error(found.weight, want) < torch.finfo(torch.float32).eps
    assert relative_error(found.log_weight.double().exp(), want) < 4 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_nothing_is_rounded_before_the_quotient(dtype: torch.dtype) -> None:
    """Numerators and denominators in PyTorch are as exact as float32 beside narrow queries, keys and values; and
    quotients of numerators that are narrow already are."""
    (q, k, v), u, f = torch.randn(3, 1, 65, 2, 8).to(dtype), torch.rand(1, 65, 2, 1), -torch.rand(2, 1, 65, 2)
    how: dict[str, Any] = {"scale": 0.3, "initial_states": (None, None), "output_final_state": True}
    how |= {"cu_seqlens": None, "sp": None, "ops": ("mlstm", "mlstm (normaliser)")}
    got = diagonal_pair(q, k, (v, u), *f, **how)
    want = diagonal_pair(q.double(), k.double(), (v.double(), u.double()), *f.double(), **how)
    errors = [relative_error(x, y) for each in zip(got, want, strict=True) for x, y in zip(*each, strict=True)]
    n, d, m = v, 3 * torch.randn(1, 65, 2, 1), torch.randn(1, 65, 2).double()
    exact = in_pytorch.quotients(n.double(), d.double(), m, 0.0, torch.float64)
    errors.append(relative_error(in_pytorch.quotients(n, d, m, 0.0, torch.float32), exact))
    assert max(errors) < 8 * torch.finfo(torch.float32).eps, errors


@pytest.mark.slow
@pytest.mark.parametrize(("K", "V"), [(256, 3), (5, 256)])
def test_wide_heads(K: int, V: int) -> None:
    check_op(chunk, oracle, conditioned(draw(1, 70, 1, K, V), torch.float32), dtype=torch.float32, wide=KEPT_WIDE)


def test_scale_and_eps() -> None:
    """The constant is added to the stabilised denominator, beside which the stabiliser shows."""
    inputs = with_gradients(draw(2, 70, 2))
    want = oracle(**inputs, scale=0.3, eps=0.25)
    cotangents = cotangents_of(want)
    expected = results(want, inputs, cotangents)
    for op in (chunk_mlstm, recurrent_mlstm):
        got = op(**inputs, scale=0.3, eps=0.25, return_last_states=True)
        assert not got[1][2].requires_grad
        assert_alike(results(got, inputs, cotangents), expected)
        assert op(**inputs)[1] is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_documents_and_strides(dtype: torch.dtype) -> None:
    inputs = conditioned(draw(1, 83, 6), dtype)
    inputs["cu_seqlens"] = torch.tensor([0, 0, 1, 37, 37, 83, 83], dtype=random.choice((torch.int32, torch.int64)))
    check_op(
        chunk, oracle, inputs, dtype=dtype, wide=KEPT_WIDE,
        arrange=lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    )  # fmt: skip


def test_no_tokens() -> None:
    """States pass through. C e^m is what counts, so the gradient of m is made of the others'."""
    inputs = with_gradients(draw(2, 0, 2))
    for op in (chunk_mlstm, recurrent_mlstm):
        h, (C, n, m) = op(**inputs, return_last_states=True)
        assert h.shape[1] == 0
        for name, x in zip(STATES, (C, n, m), strict=True):
            assert torch.equal(x, inputs[name])
        dm = torch.autograd.grad([C.sum() + n.sum()], [inputs["m_initial"]])[0]
        assert relative_error(dm.squeeze(-1), C.sum((-1, -2)) + n.sum(-1)) < EXACT


def test_parts_equal_the_whole() -> None:
    """A text in two calls and then token by token: states and gradients pass through them."""
    inputs = with_gradients(draw(2, 75, 2))
    whole = chunk_mlstm(**inputs, return_last_states=True)
    cotangents, cut = cotangents_of(whole), random.randrange(1, 70)
    states, h = [inputs[name] for name in STATES], []
    prompt = [(slice(0, cut), chunk_mlstm), (slice(cut, 70), chunk_mlstm)]
    for at, op in (*prompt, *((slice(t, t + 1), recurrent_mlstm) for t in range(70, 75))):
        part = {name: inputs[name][:, at] for name in TOKENS} | dict(zip(STATES, states, strict=True))
        out, states = op(**part, return_last_states=True)
        h.append(out)
    got = results((torch.cat(h, 1), states), inputs, cotangents)
    assert_alike(got, results(whole, inputs, cotangents))


@pytest.mark.parametrize("dtype", quick([torch.float64, torch.float32, torch.bfloat16], torch.float64))
def test_gates_of_all_sizes(dtype: torch.dtype) -> None:
    """Gates with which e^i and sums of log f leave the range of the dtype, and m with them.

    Where e^-m underflows, h is a quotient by q n alone: all terms of that are positive here, so that none cancel.
    """
    inputs = draw(2, 140, 2)
    inputs |= {key: inputs[key].abs() for key in ("q", "k", "n_initial")}
    kinds = (torch.randint(0, 24, inputs["i"].shape) - 20).clamp(min=0)  # most are as drawn
    i, f = inputs["i"], inputs["f"]
    inputs["i"] = torch.stack([i, i + 60, i - 200, i * 0]).gather(0, kinds[None])[0]
    inputs["f"] = torch.stack([f, f + 40, f - 80, f * 100]).gather(0, kinds.flip(1)[None])[0]
    bounded = partial(oracle, exact=False)
    check_op(chunk, bounded, inputs, dtype=dtype, wide=KEPT_WIDE)
    if dtype == torch.float64:
        check_op(step, bounded, inputs, dtype=dtype, wide=KEPT_WIDE)


@pytest.mark.parametrize("op", [chunk_mlstm, recurrent_mlstm], ids=["chunk", "recurrent"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_nothing_written_or_kept(op: Any, dtype: torch.dtype) -> None:
    """Input gates of -inf, forget gates of -inf and an m of -inf are zeros; no query gives 0, however small e^-m is."""
    inputs = {key: x.to(dtype) for key, x in draw(1, 70, 1, seed=5).items()}
    inputs["i"][:, 3:20], inputs["f"][:, 30] = -torch.inf, -torch.inf
    inputs["i"][:, 60], inputs["f"][:, 60] = -torch.inf, -torch.inf
    inputs["m_initial"][:, 0] = -torch.inf
    inputs["i"][:, 40], inputs["q"][:, 40] = 900.0, 0.0
    inputs = with_gradients(inputs)
    cotangents = [torch.ones_like(inputs[name]) for name in ("v", *STATES[:2])]
    cotangents[0][:, 40] = 0.0  # where h is 0, it may have a slope of e^900
    found = results(op(**inputs, return_last_states=True), inputs, cotangents)
    assert all(x.isfinite().all() for x in found.values())
    assert not found["h"][:, 40].any()
    without = {key: x.detach().clone() for key, x in inputs.items()}
    for key in TOKENS:
        without[key] = without[key][:, 30:]
    without["f"][:, 0] = 0.0
    for name, value in zip(STATES, (0.0, 0.0, -50.0), strict=True):
        without[name] = torch.full_like(without[name], value)
    assert relative_error(found["h"][:, 30:], op(**without)[0]) < (EXACT if dtype == torch.float64 else 1e-4)


def test_what_is_not_finite_stays_in_its_document() -> None:
    bounds = torch.tensor([0, 20, 45, 70])
    clean = draw(1, 70, 3)
    for name in ("i", "f", "k", "m_initial"):
        inputs = {key: x.clone() for key, x in clean.items()}
        inputs[name][1 if name == "m_initial" else (0, 30)] = torch.nan
        found, want = (chunk_mlstm(**x, cu_seqlens=bounds, return_last_states=True) for x in (inputs, clean))
        assert torch.equal(found[0][:, :20], want[0][:, :20]) and torch.equal(found[0][:, 45:], want[0][:, 45:])
        assert found[0][:, 30:45].isnan().any()
        for a, b in zip(found[1], want[1], strict=True):
            assert torch.equal(a[[0, 2]], b[[0, 2]])


def test_float16_holds_sums_over_many_tokens() -> None:
    """Numerator and denominator pass its largest number long before h does."""
    T, ones = 300, torch.ones(1, 300, 1, 64, dtype=torch.float16)
    i, f = torch.zeros(1, T, 1), torch.full((1, T, 1), 30.0)
    h, _ = chunk_mlstm(ones, ones, 1000 * ones, i, f)
    want, _ = recurrent_mlstm(ones, ones, 1000 * ones, i, f)
    assert h.isfinite().all() and relative_error(h.double(), want.double()) < 1e-2


@pytest.mark.parametrize("T", [2150, 2151, 2158])
def test_states_that_are_forgotten_are_finite(T: int) -> None:
    """However far below 0 their maximum is: nothing was written, or all of it forgotten."""
    q = k = v = torch.randn(1, T, 1, 4)
    closed = torch.full((1, T, 1), -torch.inf)
    ones = {"c_initial": torch.ones(1, 1, 4, 4), "n_initial": torch.ones(1, 1, 4), "m_initial": torch.ones(1, 1, 1)}
    for given in ({}, ones):
        h, states = chunk_mlstm(q, k, v, closed, closed, return_last_states=True, **given)
        assert h.isfinite().all() and all(x.isfinite().all() for x in states) and not states[0].any()
        after = dict(zip(("c_initial", "n_initial", "m_initial"), states, strict=True))
        found = chunk_mlstm(q, k, v, torch.zeros_like(closed), torch.zeros_like(closed), **after)[0]
        want = chunk_mlstm(q, k, v, torch.zeros_like(closed), torch.zeros_like(closed))[0]
        assert relative_error(found.double(), want.double()) < 1e-5


def test_the_stabiliser_is_right_over_long_sequences() -> None:
    """More tokens than two levels of the scan take; float64 sums in another order."""
    T = 64 * 64 + 70
    a, c = -torch.rand(3, T, dtype=torch.float64) * 3, 50 * torch.randn(3, T, dtype=torch.float64)
    cut = torch.rand(3, T) < 1e-3
    found, m, want = maxima.scan(a.masked_fill(cut, -torch.inf), c)[1], torch.full((3,), -torch.inf).double(), []
    for t in range(T):
        m = torch.maximum(torch.where(cut[:, t], -torch.inf, a[:, t] + m), c[:, t])
        want.append(m)
    assert relative_error(found, torch.stack(want, 1)) < 1e-15


def test_a_large_maximum() -> None:
    """C and n belong to the m that is returned, which float32 rounds by 1e-4 and more here."""
    inputs = {key: x.float() for key, x in conditioned(draw(1, 300, 1, K=4, V=3), torch.float32).items()}
    inputs["i"] += 5000
    want = recurrent_mlstm(**{key: x.double() for key, x in inputs.items()}, return_last_states=True)
    got = chunk_mlstm(**inputs, return_last_states=True)
    assert relative_error(got[0], want[0]) < 1e-6
    (C, n, m), (C_want, n_want, m_want) = got[1], want[1]
    apart = (m - m_want).exp()
    assert relative_error(C * apart[..., None], C_want) < 1e-6 and relative_error(n * apart, n_want) < 1e-6


def in_kernels(sp: SequenceParallel, dtype: torch.dtype, seed: int) -> None:
    inputs = conditioned(draw(1, 70, 3, K=16, V=16, seed=seed), dtype)
    check_op(chunk, oracle, inputs | {"cu_seqlens": torch.tensor([0, 37, 37, 70])}, dtype=dtype, wide=KEPT_WIDE)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels(dtype: torch.dtype) -> None:
    """The kernels of the diagonal engine, in Triton's interpreter."""
    run_ranks(in_kernels, 1, dtype, random.randrange(2**31), env=INTERPRETED)


@pytest.mark.slow
def test_one_graph() -> None:
    """torch.compile breaks the op nowhere."""
    inputs = with_gradients(draw(2, 70, 2))
    compiled = torch.compile(chunk_mlstm, backend="aot_eager", fullgraph=True)
    want, got = (op(**inputs, return_last_states=True) for op in (chunk_mlstm, compiled))
    cotangents = cotangents_of(want)
    assert_alike(results(got, inputs, cotangents), results(want, inputs, cotangents))


# Ranks ----------------------------------------------------------------------------------------------------------------

SHARDS = {
    "uneven": ((30, 0, 41, 4), None),
    "the first rank is empty": ((0, 40, 35, 0), None),
    "documents": ((30, 0, 41, 4), (0, 0, 12, 50, 50, 75)),
    "documents that end with shards": ((20, 20, 0, 35), (0, 20, 40, 75, 75)),
    "the first rank has no documents": ((0, 40, 35, 0), (0, 0, 50, 75)),
}


def over_ranks(sp: SequenceParallel, seed: int, kinds: list[str], dtype: torch.dtype) -> dict[str, Tensors]:
    found = {}
    for kind in kinds:
        lengths, bounds = SHARDS[kind]
        n = 2 if bounds is None else len(bounds) - 1
        whole = {key: x.to(dtype) for key, x in draw(2 if bounds is None else 1, 75, n, seed=seed).items()}
        at = slice(sum(lengths[: sp.rank]), sum(lengths[: sp.rank + 1]))
        mine = with_gradients({key: x[:, at] if key in TOKENS else x for key, x in whole.items()})
        if bounds is None and sp.rank:
            mine = {key: x for key, x in mine.items() if key in TOKENS}
        sp.set_lengths(lengths if "documents" in kind else None)
        cu = None if bounds is None else torch.tensor(bounds)
        h, states = chunk_mlstm(**mine, cu_seqlens=cu, return_last_states=True, sp=sp)
        assert (states is None) == (bounds is None and not sp.is_last)
        drawn = rank_cotangents(seed, whole)
        outputs, cotangents = [h, *(states or ())[:2]], [drawn[0][:, at], *drawn[1:]]
        grads = torch.autograd.grad(outputs, list(mine.values()), cotangents[: len(outputs)])
        found[kind] = dict(zip(mine, grads, strict=True)) | {"h": h.detach()}
        if states is not None:
            found[kind] |= {name: x.detach() for name, x in zip("Cnm", states, strict=True)}
    return found


def rank_cotangents(seed: int, whole: Tensors) -> list[Tensor]:
    made = torch.Generator().manual_seed(seed + 1)
    return [torch.randn(whole[x].shape, generator=made, dtype=torch.float64).to(whole[x]) for x in ("v", *STATES[:2])]


@pytest.mark.parametrize(
    ("kinds", "dtype", "how"),
    [
        ([*SHARDS], torch.float64, {}),
        pytest.param(["uneven", "documents"], torch.float32, {"transport": "posix", "env": INTERPRETED},
                     marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_ranks_equal_one_rank(kinds: list[str], dtype: torch.dtype, how: dict[str, Any]) -> None:
    """Uneven and empty shards, documents across them: outputs, final states, gradients; in kernels too."""
    seed = random.randrange(2**31)
    answers, wrong = run_ranks(over_ranks, 4, seed, kinds, dtype, **how), {}
    for kind in kinds:
        _, bounds = SHARDS[kind]
        B, n = (2, 2) if bounds is None else (1, len(bounds) - 1)
        whole = with_gradients(draw(B, 75, n, seed=seed))
        cu = None if bounds is None else torch.tensor(bounds)
        want = chunk_mlstm(**whole, cu_seqlens=cu, return_last_states=True, sp=False)
        for key, x in results(want, whole, rank_cotangents(seed, whole)).items():
            parts = [answer[kind][key] for answer in answers if key in answer[kind]]
            error = relative_error(torch.cat(parts, 1) if key in (*TOKENS, "h") else sum(parts), x)
            if not error < (EXACT if dtype == torch.float64 else 1e-4):
                wrong[kind, key] = error
    assert not wrong


# What is refused ------------------------------------------------------------------------------------------------------


def test_a_wrong_argument_is_named() -> None:
    inputs = draw(1, 6, 2)
    cu = torch.tensor([0, 2, 6])
    chunk_mlstm(**inputs, cu_seqlens=cu)
    for op, given in ((chunk_mlstm, inputs | {"cu_seqlens": cu}), (recurrent_mlstm, draw(1, 6, 1))):
        for key in inputs:
            for bad in (given[key].to(torch.complex64), given[key].tolist(), given[key][None]):
                with pytest.raises(ValueError, match=f"^{key}: expected .*, got "):
                    op(**(given | {key: bad}))
        for name in STATES:
            with pytest.raises(ValueError, match=f"^{name}: expected a tensor together with ., got None|^{name}: "):
                op(**{key: x for key, x in given.items() if key != name})
        with pytest.raises(ValueError, match=r"^eps: expected a number >= 0, got -1"):
            op(**given, eps=-1)
        with pytest.raises(ValueError, match=r"^return_last_states: expected"):
            op(**given, return_last_states=1)


# The layer ------------------------------------------------------------------------------------------------------------

D = 12
CASES: dict[str, dict[str, Any]] = {
    "plain": {"num_heads": 2},
    "all": {"num_heads": 3, "qk_dim_factor": 1, "v_dim_factor": 1.5, "use_bias": True, "gate_soft_cap": 2.0, "eps": 0.1,
            "norm_eps": 1e-2, "use_short_conv": True, "conv_bias": True, "conv_size": 3},
    "no cap": {"num_heads": 1, "gate_soft_cap": None},
}  # fmt: skip
every_case = pytest.mark.parametrize("name", CASES)


def make(name: str) -> MLSTM:
    """With gates that open, and parameters that are no longer the ones and zeros that some begin as."""
    torch.manual_seed(len(name))
    layer = MLSTM(D, **CASES[name]).double()
    with torch.no_grad():
        layer.igate_preact.bias.add_(9.0)
        for x in layer.parameters():
            x.add_(0.3 * torch.randn_like(x) * (x.dim() == 1))
    return layer


def convolved(x: Tensor, taps: nn.Module) -> Tensor:
    """silu(bias + sum_j weight[:, W - 1 - j] x_{t - j}) of x [T, N]."""
    weight = taps.weight.squeeze(1)
    W = weight.shape[1]
    rows = [sum(weight[:, W - 1 - j] * x[t - j] for j in range(min(W, t + 1))) for t in range(len(x))]
    y = torch.stack(rows) + taps.bias
    return y * torch.sigmoid(y)


def formula(layer: MLSTM, x: Tensor, options: dict[str, Any]) -> Tensor:
    """The layer's equations of x [T, D]."""
    q, k, v = (getattr(layer, which)(x) for which in "qkv")
    if options.get("use_short_conv"):
        q, k, v = (convolved(y, getattr(layer, f"{which}_conv1d")) for which, y in zip("qkv", (q, k, v), strict=True))
    i, f = (x @ gate.weight.T + gate.bias for gate in (layer.igate_preact, layer.fgate_preact))
    cap = options.get("gate_soft_cap", 15.0)
    if cap is not None:
        i, f = cap * torch.tanh(i / cap), cap * torch.tanh(f / cap)
    H = options["num_heads"]
    given = {"q": q, "k": k, "v": v}
    given = {name: y.reshape(1, len(x), H, -1) for name, y in given.items()} | {"i": i[None], "f": f[None]}
    h, _ = oracle(**given, eps=options.get("eps", 1e-6))
    centred = h[0] - h[0].mean(-1, keepdim=True)
    normed = centred / (centred.square().mean(-1, keepdim=True) + options.get("norm_eps", 1e-6)).sqrt()
    normed = normed.flatten(1) * layer.multihead_norm.weight
    if options.get("use_bias"):
        normed = normed + layer.multihead_norm.bias
    return layer.out_proj(torch.sigmoid(layer.ogate_preact(x)) * normed)


@every_case
def test_the_layer_is_its_formula(name: str) -> None:
    layer, x = make(name), torch.randn(2, 19, D, dtype=torch.float64)
    y, want = layer(x), torch.stack([formula(layer, row, CASES[name]) for row in x])
    dy, parameters = torch.randn_like(y), list(layer.parameters())
    assert relative_error(y, want) < EXACT
    for a, b in zip(*(torch.autograd.grad(out, parameters, dy) for out in (y, want)), strict=True):
        assert relative_error(a, b) < EXACT


@every_case
def test_decoding(name: str) -> None:
    """A prompt in two parts, then tokens: what the whole text gives."""
    layer, x = make(name), torch.randn(3, 17, D, dtype=torch.float64)
    cache, outputs = layer.init_cache(3), []
    for part in (x[:, :7], x[:, 7:13]):
        y, cache = layer(part, cache=cache)
        outputs.append(y)
    for t in range(13, 17):
        y, cache = layer.step(x[:, t] if t % 2 else x[:, t : t + 1], cache)
        outputs.append(y.view(3, 1, D))
    assert relative_error(torch.cat(outputs, 1), layer(x)) < EXACT


def cut(sp: SequenceParallel, lengths: list[int], cu: Tensor | None, x: Tensor, dy: Tensor) -> dict[str, Tensors]:
    found = {}
    for name in CASES:
        sp.set_lengths(lengths)
        layer = SequenceParallelLA(make(name), sp)
        mine = sp.shard(x).requires_grad_()
        y = layer(mine, cu_seqlens=cu)
        wanted = {"x": mine, **dict(layer.named_parameters())}
        grads = torch.autograd.grad(y, list(wanted.values()), sp.shard(dy))
        found[name] = {"y": y.detach(), **dict(zip(wanted, grads, strict=True))}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("packed", [True, False])
def test_layers_over_ranks(packed: bool) -> None:
    """The gradient of input gates' biases nearly cancels, since h hardly changes where all tokens are weighed alike
    more: its error is relative to what the ranks add up to it."""
    cu = torch.tensor([0, 1, 1, 9, 12, 31]) if packed else None
    lengths, (x, dy) = [9, 1, 0, 21], torch.randn(2, 1, 31, D, dtype=torch.float64)
    answers, wrong = run_ranks(cut, 4, lengths, cu, x, dy), {}
    for name in CASES:
        layer, whole = make(name), x.clone().requires_grad_()
        y = layer(whole, cu_seqlens=cu)
        wanted = {"x": whole, **dict(layer.named_parameters())}
        expected = dict(zip(wanted, torch.autograd.grad(y, list(wanted.values()), dy), strict=True))
        for key, value in {"y": y.detach(), **expected}.items():
            parts = [answer[name][key] for answer in answers]
            if key == "igate_preact.bias":
                error = float((sum(parts) - value).norm() / sum(part.norm() for part in parts))
            else:
                error = relative_error(torch.cat(parts, 1) if key in ("x", "y") else sum(parts), value)
            if not error < EXACT:
                wrong[name, key] = error
    assert not wrong


def test_checkpoints_load() -> None:
    """Names and shapes of mLSTMLayer of xlstm 2.0.5 with separate weights, for a width of 12."""
    shapes = {
        "q.weight": [6, 12], "k.weight": [6, 12], "v.weight": [12, 12], "ogate_preact.weight": [12, 12],
        "igate_preact.weight": [2, 12], "igate_preact.bias": [2], "fgate_preact.weight": [2, 12],
        "fgate_preact.bias": [2], "multihead_norm.weight": [12], "out_proj.weight": [12, 12],
    }  # fmt: skip
    theirs, layer = {key: torch.randn(shape) for key, shape in shapes.items()}, MLSTM(D, 2)
    layer.load_state_dict(theirs, strict=True)
    assert all(torch.equal(layer.state_dict()[key], x) for key, x in theirs.items())


def test_initialisation() -> None:
    layer = MLSTM(16, 4)
    assert layer.fgate_preact.bias.tolist() == [3.0, 4.0, 5.0, 6.0]
    assert layer.igate_preact.bias.tolist() == [-10.0] * 4


def test_a_wrong_cache_is_refused() -> None:
    layer, x = make("all"), torch.randn(1, 5, D, dtype=torch.float64)
    cache = layer.init_cache(1)
    with pytest.raises(ValueError, match=r"cache: expected None with cu_seqlens"):
        layer(x, cu_seqlens=torch.tensor([0, 2, 5]), cache=cache)
    with pytest.raises(ValueError, match=r"cache\.state: expected the states \(C, n, m\), see init_cache, got Te"):
        layer(x, cache=cache._replace(state=cache.state[0]))
    with pytest.raises(ValueError, match=r"cache\.state\[1\]: expected \[1, 3, 4\]"):
        layer.step(x[:, 0], cache._replace(state=(cache.state[0], *cache.state[::2])))
    with pytest.raises(ValueError, match=r"cache\.conv: expected \[1, "):
        layer.step(x[:, 0], cache._replace(conv=cache.conv[:, :-1]))
