"""The selective scan of Mamba-1 against a token loop that stands here: values, gradients, documents, ranks; a layer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexsp import ops
from flexsp.comm.group import SequenceParallel
from flexsp.exceptions import NotAvailable
from flexsp.kernels.channel_tiling import channels_of_head, make_tiling
from flexsp.kernels.selective import in_pytorch, selective_plan
from flexsp.kernels.selective.selective_plan import LIMITS
from flexsp.nn import Mamba, SequenceParallelLA
from flexsp.testing.compare import check_op, relative_error
from flexsp.testing.ranks import run_ranks
from tests.harness.interpreted import INTERPRETED, poisoned
from tests.harness.selective import HOW, KEPT_WIDE, ZOH, Tensors, draw, oracle, scan, step
from tests.marks import quick, slow

EXACT = 1e-12
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
TOKENS = ("u", "delta", "B", "C", "z")


def constant(inputs: Tensors, *names: str) -> Tensors:
    """The inputs, with those of B and C that are named the same for all tokens."""
    return inputs | {name: inputs["A"].flip(0) * random.uniform(0.3, 1.0) * (1 - 2 * (name == "C")) for name in names}


def with_gradients(inputs: Tensors) -> Tensors:
    return {key: x.detach().clone().requires_grad_() for key, x in inputs.items()}


def gradients(outputs: Any, inputs: Tensors, cotangents: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(list(outputs), list(inputs.values()), cotangents))


def assert_alike(got: list[Tensor], want: list[Tensor], bound: float = EXACT) -> None:
    errors = [relative_error(a, b) for a, b in zip(got, want, strict=True)]
    assert max(errors) < bound, errors


@pytest.mark.parametrize("how", [HOW, ZOH])
@pytest.mark.parametrize("dtype", quick(DTYPES, torch.float64, torch.float32))
def test_against_the_token_loop(dtype: torch.dtype, how: dict[str, Any]) -> None:
    """More tokens than a chunk has, and one."""
    for T, width, N in ((random.choice((67, 131)), 9, 16), (1, 7, 1)):
        inputs = draw(2, T, 2, width, N)
        check_op(partial(scan, **how), partial(oracle, **how), inputs, dtype=dtype, wide=KEPT_WIDE)


@pytest.mark.parametrize("dtype", quick(DTYPES, torch.float64))
def test_token_by_token(dtype: torch.dtype) -> None:
    for how in (HOW, ZOH):
        check_op(partial(step, **how), partial(oracle, **how), draw(2, 21, 2), dtype=dtype, wide=KEPT_WIDE)


@pytest.mark.parametrize("names", [("B",), ("B", "C"), *slow(("C",))])
@pytest.mark.parametrize("dtype", quick(DTYPES, torch.float64))
def test_the_same_for_all_tokens(dtype: torch.dtype, names: tuple[str, ...]) -> None:
    """B and C [D, N], as mamba_ssm takes them, with sequences and with documents before a tail that is not finite."""
    kept, how = (*KEPT_WIDE, *names), random.choice((HOW, ZOH))
    for op, T in ((scan, 19), (step, 5)):
        check_op(partial(op, **how), partial(oracle, **how), constant(draw(2, T, 2), *names), dtype=dtype, wide=kept)
    inputs = constant(draw(1, 20, 3), *names) | {"cu_seqlens": torch.tensor([0, 7, 7, 20])}
    check_op(partial(scan, **how), partial(oracle, **how), inputs, dtype=dtype, wide=kept)
    inputs = with_gradients({key: x for key, x in inputs.items() if key != "cu_seqlens"})
    with torch.no_grad():
        inputs["u"][:, 15:] = torch.nan
    y, _ = ops.selective_scan(**inputs, **how, cu_seqlens=torch.tensor([0, 7, 7, 15]))
    assert not y[:, 15:].any() and torch.autograd.grad(y.sum(), inputs["B"])[0].isfinite().all()


def test_the_same_for_all_tokens_beside_steps_of_half_precision() -> None:
    """Their gradients are rounded once."""
    inputs, halves = constant(draw(2, 9, 2), "B"), ("u", "delta", "B", "C", "z")
    given = {key: x.to(torch.bfloat16 if key in halves else torch.float32) for key, x in inputs.items()}
    found = []
    for delta in (given["delta"], given["delta"].float()):
        y, state = scan(**given | {"delta": delta.requires_grad_()}, **HOW, output_final_state=True)
        found.append([y, state, *(x.bfloat16() for x in torch.autograd.grad(y.float().square().sum(), delta))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_same_for_all_tokens_beside_groups() -> None:
    inputs = draw(2, 9, 2, 6, 4)
    grouped = torch.randn(2, 9, 3, 4, dtype=torch.float64)
    for name, other in (("B", "C"), ("C", "B")):
        given = constant(inputs, name)
        for op in (scan, step):
            got = op(**given | {other: grouped}, **HOW, output_final_state=True)
            parts = []
            for g in range(3):
                axes = dict.fromkeys(("u", "delta", "z"), 2) | dict.fromkeys(("A", "D", "delta_bias", name), 0)
                axes["initial_state"] = 1
                some = {key: x.narrow(axes[key], 2 * g, 2) if key in axes else x for key, x in given.items()}
                parts.append(oracle(**some | {other: grouped[:, :, g]}, **HOW))
            assert_alike([*got], [torch.cat([y for y, _ in parts], 2), torch.cat([h for _, h in parts], 1)])


def test_what_may_be_left_out() -> None:
    inputs = draw(2, 70)
    inputs["delta"] = inputs["delta"].abs()
    for names in (["D"], ["z"], ["delta_bias"], ["D", "z", "delta_bias"]):
        some = {key: x for key, x in inputs.items() if key not in names and key != "delta_bias"}
        for op in (ops.selective_scan, ops.recurrent_selective_scan):
            y, state = op(**some)
            assert relative_error(y, oracle(**some)[0]) < EXACT and state is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_documents_and_strides(dtype: torch.dtype) -> None:
    inputs = draw(1, 83, 6)
    inputs["cu_seqlens"] = torch.tensor([0, 0, 1, 37, 37, 83, 83], dtype=random.choice((torch.int32, torch.int64)))
    check_op(
        partial(scan, **HOW), partial(oracle, **HOW), inputs, dtype=dtype, wide=KEPT_WIDE,
        arrange=lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    )  # fmt: skip


def test_no_tokens() -> None:
    """The state passes through, and so does its gradient."""
    inputs = with_gradients(draw(2, 0, 2))
    for op in (ops.selective_scan, ops.recurrent_selective_scan):
        y, state = op(**inputs, **HOW, return_last_state=True)
        assert y.shape == inputs["u"].shape and torch.equal(state, inputs["initial_state"])
        assert state.data_ptr() != inputs["initial_state"].data_ptr()
        assert torch.equal(torch.autograd.grad(state.sum(), inputs["initial_state"])[0], torch.ones_like(state))


def test_parts_equal_the_whole() -> None:
    """A text in two calls and then token by token: states and gradients pass through them."""
    inputs = with_gradients(draw(2, 75, 2))
    whole = ops.selective_scan(**inputs, **HOW, return_last_state=True)
    cotangents = [torch.randn_like(x) for x in whole]
    cut, state, y = random.randrange(1, 70), inputs["initial_state"], []
    prompt = [(slice(0, cut), ops.selective_scan), (slice(cut, 70), ops.selective_scan)]
    for at, op in (*prompt, *((slice(t, t + 1), ops.recurrent_selective_scan) for t in range(70, 75))):
        some = {key: x[:, at] if key in TOKENS else x for key, x in inputs.items()} | {"initial_state": state}
        out, state = op(**some, **HOW, return_last_state=True)
        y.append(out)
    parts = torch.cat(y, 1), state
    want = [*whole, *gradients(whole, inputs, cotangents)]
    assert_alike([*parts, *gradients(parts, inputs, cotangents)], want)


@pytest.mark.parametrize("how", [HOW, ZOH])
@pytest.mark.parametrize("dtype", quick([torch.float64, torch.float32, torch.bfloat16], torch.float64))
def test_steps_of_all_sizes(dtype: torch.dtype, how: dict[str, Any]) -> None:
    """Steps after which nothing is left, and such that hardly anything changes; decays of 0."""
    inputs = draw(2, 70, 2)
    kinds = (torch.randint(0, 24, inputs["delta"].shape) - 20).clamp(min=0)  # most are as drawn
    delta = inputs["delta"]
    inputs["delta"] = torch.stack([delta, delta - 20, delta + 40, delta + 1e4]).gather(0, kinds[None])[0]
    check_op(partial(scan, **how), partial(oracle, **how), inputs, dtype=dtype, wide=KEPT_WIDE)
    inputs["A"][:, 0] = 0.0
    low = with_gradients({key: x.to(torch.promote_types(dtype, torch.float32) if key in KEPT_WIDE else dtype)
                          for key, x in inputs.items()})  # fmt: skip
    found = ops.selective_scan(**low, **how, return_last_state=True)
    grads = gradients(found, low, [torch.ones_like(x) for x in found])
    assert all(x.isfinite().all() for x in (*found, *grads))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_zero_order_hold_near_zero(dtype: torch.dtype) -> None:
    """(e^z - 1) / z and its derivative, (e^z - (e^z - 1) / z) / z, on both sides of where the series ends and at 0."""
    z = -torch.cat([torch.logspace(-12, 2, 200), torch.tensor([0.0, 0.2499999, 0.25, 0.2500001])]).double()
    A = z.to(dtype).requires_grad_()
    _, phi = in_pytorch.weights(torch.ones((), dtype=dtype), A, True)
    (slope,) = torch.autograd.grad(phi.sum(), A)
    exact, k = A.detach().double(), torch.arange(60).double()
    factorials = (k + 1).cumprod(0)
    small = exact.clamp(min=-1)[:, None]
    near = (small**k / factorials).sum(1), (k[1:] * small ** (k[1:] - 1) / factorials[1:]).sum(1)
    far = torch.expm1(exact) / exact, (exact.exp() - torch.expm1(exact) / exact) / exact
    bound = 32 * torch.finfo(dtype).eps
    for got, a, b in zip((phi, slope), near, far, strict=True):
        assert ((got.double() / torch.where(exact > -1, a, b) - 1).abs() < bound).all()


def test_what_is_not_finite_stays_in_its_document() -> None:
    bounds, clean = torch.tensor([0, 20, 45, 70]), draw(1, 70, 3)
    for name in ("u", "delta", "B", "initial_state"):
        inputs = {key: x.clone() for key, x in clean.items()}
        inputs[name][1 if name == "initial_state" else (0, 30)] = torch.nan
        found, want = (ops.selective_scan(**x, **HOW, cu_seqlens=bounds, return_last_state=True)
                       for x in (inputs, clean))  # fmt: skip
        assert torch.equal(found[0][:, :20], want[0][:, :20]) and torch.equal(found[0][:, 45:], want[0][:, 45:])
        assert found[0][:, 30:45].isnan().any() and torch.equal(found[1][[0, 2]], want[1][[0, 2]])


def nan_over_ranks(sp: SequenceParallel, seed: int) -> list[Tensors]:
    """Gradients and outputs of this rank, with NaN in the last document and without."""
    found = []
    for value in (torch.nan, 0.5):
        whole = draw(1, 12, 2, seed=seed)
        whole["delta"][0, 9:] = value
        at = slice(6 * sp.rank, 6 * sp.rank + 6)
        mine = with_gradients({key: x[:, at] if key in TOKENS else x for key, x in whole.items()})
        y, _ = ops.selective_scan(**mine, **HOW, cu_seqlens=torch.tensor([0, 9, 12]), sp=sp)
        grads = torch.autograd.grad(y[:, : 6 - 3 * sp.rank].sum(), [mine[key] for key in TOKENS])
        found.append({"y": y.detach(), **dict(zip(TOKENS, grads, strict=True))})
    return found


@pytest.mark.slow
def test_what_is_not_finite_stays_in_its_document_over_ranks() -> None:
    """The second document begins in the second rank's shard."""
    for rank, (with_nan, without) in enumerate(run_ranks(nan_over_ranks, 2, random.randrange(2**31))):
        kept = slice(0, 6 - 3 * rank)
        for key, x in with_nan.items():
            assert x[:, kept].isfinite().all() and torch.equal(x[:, kept], without[key][:, kept]), (rank, key)


@pytest.mark.parametrize(("batch", "width", "N"), [(256, 4096, 16), (16, 4096, 256), (16, 5003, 16)])
def test_more_blocks_than_a_grid_has(batch: int, width: int, N: int) -> None:
    block = channels_of_head(width, N)
    u = torch.empty(batch, 10, width // block, block, device="meta")
    said = rf"u: .* at most 65535 blocks of {block} channels, .* got {batch * width // block}$"
    with pytest.raises(NotAvailable, match=said):
        make_tiling(u, N, 0, LIMITS)


def test_memory_does_not_grow_with_the_states_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd keeps less than a number for each token, channel and state; in groups the results are the same."""
    inputs, kept = with_gradients(draw(2, 500, 2, 8, 16)), []

    def pack(x: Tensor) -> Tensor:
        kept.append(x.untyped_storage())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        whole = ops.selective_scan(**inputs, **HOW, return_last_state=True)
    numbers = sum(x.nbytes() // 8 for x in {x.data_ptr(): x for x in kept}.values())
    assert numbers < 2 * 500 * 8 * 16
    cotangents = [torch.randn_like(x) for x in whole]
    want = [*whole, *gradients(whole, inputs, cotangents)]
    monkeypatch.setattr(in_pytorch, "_NUMBERS", 3 * 2 * 64 * 8 * 16)
    groups = ops.selective_scan(**inputs, **HOW, return_last_state=True)
    assert_alike([*groups, *gradients(groups, inputs, cotangents)], want)


# Kernels, in Triton's interpreter -------------------------------------------------------------------------------------


def not_finite(seed: int) -> None:
    """Outputs and gradients of documents beside one that has NaN or infinities."""
    bounds, clean = torch.tensor([0, 6, 9, 21]), {key: x.float() for key, x in draw(1, 21, 3, 7, 4, seed=seed).items()}
    found = []
    for value in (torch.nan, torch.inf, 0.5):
        inputs = with_gradients(clean)
        with torch.no_grad():
            for name in (*TOKENS, "z"):
                inputs[name][0, 6:9] = value
        y, state = ops.selective_scan(**inputs, **HOW, cu_seqlens=bounds, return_last_state=True)
        at = [inputs[name] for name in (*TOKENS, "z", "initial_state")]
        grads = torch.autograd.grad([y, state], at, [torch.ones_like(y), torch.ones_like(state)])
        rows = [x[:, [*range(6), *range(9, 21)]] for x in (y.detach(), *grads[:-1])]
        found.append([*rows, *(x[[0, 2]] for x in (state.detach(), grads[-1]))])
    for values in found[:2]:
        assert all(torch.equal(a, b) for a, b in zip(values, found[2], strict=True))


@contextmanager
def on_a_small_gpu(programs: int) -> Iterator[None]:
    """Plans are for a GPU of so many programs, which walk over several chunks each; one over all."""
    selective_plan.LIMITS = LIMITS._replace(programs=programs)
    try:
        with poisoned(1):
            yield
    finally:
        selective_plan.LIMITS = LIMITS


def behind_strides(name: str, **inputs: Any) -> Any:
    """`scan` where tokens of one of the inputs lie further apart than those of the others."""
    x = inputs[name]
    return scan(**inputs | {name: torch.cat([x, x.detach()], -1)[..., : x.shape[-1]]})


SEGMENTS = {"long segments": 1, "long segments with documents": 1, "small steps": 6}  # of two sequences


def in_kernels(sp: SequenceParallel, kind: str, dtype: torch.dtype, seed: int) -> None:
    run, how = partial(check_op, dtype=dtype, wide=KEPT_WIDE), random.Random(seed).choice((HOW, ZOH))
    with on_a_small_gpu(SEGMENTS[kind]) if kind in SEGMENTS else poisoned(1000):
        if kind == "long segments with documents":
            for cuts in ([0, 10, 63], [0, 26, 63], [0, 9, 9, 30, 63]):
                inputs = draw(1, 63, len(cuts) - 1, 5, 3, seed=seed)
                run(partial(scan, **how), partial(oracle, **how), inputs | {"cu_seqlens": torch.tensor(cuts)})
        elif kind == "documents":
            inputs = draw(1, 40, 6, 6, 5, seed=seed)
            inputs["cu_seqlens"] = torch.tensor([0, 0, 1, 19, 19, 40, 40])
            run(partial(scan, **how), partial(oracle, **how), inputs)
            del inputs["initial_state"]
            run(partial(scan, **how), partial(oracle, **how), inputs)
        elif kind == "parts":
            inputs = draw(2, 20, 0, 3, 2, seed=seed)
            inputs["delta"] = inputs["delta"].abs()
            del inputs["delta_bias"]
            for names in (("D",), ("z",), ("D", "z")):
                some = {key: x for key, x in inputs.items() if key not in names}
                run(scan, oracle, some, arrange=lambda x: x.transpose(0, -1).contiguous().transpose(0, -1))
            outputs = ops.selective_scan(**{key: x.to(dtype) for key, x in inputs.items()})
            assert outputs[1] is None
        elif kind == "constants":
            for names in (("B",), ("C",), ("B", "C")):
                inputs = constant(draw(2, 11, 2, 3, 2, seed=seed), *names)
                check_op(partial(scan, **how), partial(oracle, **how), inputs, dtype=dtype, wide=(*KEPT_WIDE, *names))
        elif kind == "no tokens":
            inputs = {key: x.float() for key, x in draw(2, 0, 2, 3, 2, seed=seed).items()}
            inputs = with_gradients(inputs)
            y, state = ops.selective_scan(**inputs, **HOW, return_last_state=True)
            assert torch.equal(state, inputs["initial_state"])
            grads = dict(zip(inputs, gradients([y, state], inputs, [y.detach(), torch.ones_like(state)]), strict=True))
            assert grads["initial_state"].eq(1).all() and not grads["A"].any() and not grads["delta_bias"].any()
        elif kind == "steps of all sizes":
            inputs = draw(2, 40, 2, 3, 2, seed=seed)
            inputs["delta"][:, ::3] -= 20
            inputs["delta"][:, 1::5] += 1e3
            run(partial(scan, **how), partial(oracle, **how), inputs)
        elif kind == "numbers":  # sums over a warp's channels of each power of two of numbers
            for N in (1, 2, 3, 7, 16):
                run(partial(scan, **HOW), partial(oracle, **HOW), draw(1, 9, 1, 36, N, seed=seed))
        elif kind == "not finite":
            not_finite(seed)
        elif kind == "small steps":  # softplus of numbers far below 0
            inputs = draw(2, 37, 2, 3, 2, seed=seed)
            inputs["delta"][:, :20] = inputs["delta"][:, :20] * 5 - 22
            del inputs["D"], inputs["initial_state"]
            run(partial(behind_strides, "z", **how), partial(oracle, **how), inputs)
        else:
            T, width, N = (18, 40, 16) if kind == "several programs" else (90, 3, 5)
            run(partial(scan, **how), partial(oracle, **how), draw(2, T, 2, width, N, seed=seed))


KINDS = [
    "plain", "long segments", "long segments with documents", "several programs", "documents", "parts", "no tokens",
    "steps of all sizes", "small steps", "numbers",
    "not finite", "constants",
]  # fmt: skip


@pytest.mark.parametrize("kind", quick(KINDS, "small steps"))
def test_kernels(kind: str) -> None:
    for dtype in (torch.float32, random.choice((torch.bfloat16, torch.float16))):
        run_ranks(in_kernels, 1, kind, dtype, random.randrange(2**31), env=INTERPRETED)


@pytest.mark.slow
def test_one_graph() -> None:
    """torch.compile breaks the op nowhere."""
    inputs = with_gradients(draw(2, 9, 2))
    compiled = torch.compile(ops.selective_scan, backend="aot_eager", fullgraph=True)
    want, got = (op(**inputs, **HOW, return_last_state=True) for op in (ops.selective_scan, compiled))
    cotangents = [torch.randn_like(x) for x in want]
    assert_alike([*got, *gradients(got, inputs, cotangents)], [*want, *gradients(want, inputs, cotangents)])


# Ranks ----------------------------------------------------------------------------------------------------------------

SHARDS = {
    "uneven": ((30, 0, 41, 4), None),
    "the first rank is empty": ((0, 75, 0, 0), None),
    "documents": ((30, 0, 41, 4), (0, 0, 12, 50, 50, 75)),
    "documents that end with shards": ((20, 20, 0, 35), (0, 20, 40, 75, 75)),
    "constants": ((30, 0, 41, 4), None),
}


def over_ranks(sp: SequenceParallel, seed: int, kinds: list[str], dtype: torch.dtype) -> dict[str, Any]:
    found = {}
    for kind in kinds:
        lengths, bounds = SHARDS[kind]
        whole = {key: x.to(dtype) for key, x in draw_for_ranks(kind, seed).items()}
        at = slice(sum(lengths[: sp.rank]), sum(lengths[: sp.rank + 1]))
        mine = with_gradients({key: x[:, at] if is_of_tokens(key, x) else x for key, x in whole.items()})
        if bounds is None and sp.rank:
            del mine["initial_state"]
        sp.set_lengths(lengths if kind in ("uneven", "constants") else None)
        cu = None if bounds is None else torch.tensor(bounds)
        y, state = ops.selective_scan(**mine, **ZOH, cu_seqlens=cu, return_last_state=True, sp=sp)
        assert (state is None) == (bounds is None and not sp.is_last)
        outputs = [x for x in (y, state) if x is not None]
        drawn = rank_cotangents(seed, whole)
        grads = gradients(outputs, mine, [drawn[0][:, at], drawn[1]][: len(outputs)])
        found[kind] = dict(zip(mine, grads, strict=True)) | {"y": y.detach()}
        found[kind] |= {} if state is None else {"state": state.detach()}
    return found


def draw_for_ranks(kind: str, seed: int) -> Tensors:
    bounds = SHARDS[kind][1]
    found = draw(2, 75, 2, seed=seed) if bounds is None else draw(1, 75, len(bounds) - 1, seed=seed)
    return found | {"B": found["A"] * 0.7, "C": found["A"].flip(0)} if kind == "constants" else found


def is_of_tokens(key: str, x: Tensor) -> bool:
    return key in (*TOKENS, "y") and x.dim() == 3


def rank_cotangents(seed: int, whole: Tensors) -> list[Tensor]:
    made = torch.Generator().manual_seed(seed + 1)
    return [torch.randn(whole[x].shape, generator=made, dtype=torch.float64).to(whole[x])
            for x in ("u", "initial_state")]  # fmt: skip


@pytest.mark.parametrize(
    ("kinds", "dtype", "how"),
    [
        ([*SHARDS], torch.float64, {}),
        *(pytest.param([*SHARDS], torch.float32, {"transport": transport, "env": INTERPRETED}, marks=pytest.mark.slow)
          for transport in ("posix", "process_group")),
    ],
)  # fmt: skip
def test_ranks_equal_one_rank(kinds: list[str], dtype: torch.dtype, how: dict[str, Any]) -> None:
    """Uneven and empty shards, documents across them: outputs, final states, gradients; those of parameters add up."""
    seed = random.randrange(2**31)
    answers, wrong = run_ranks(over_ranks, 4, seed, kinds, dtype, **how), {}
    for kind in kinds:
        _, bounds = SHARDS[kind]
        whole, cu = with_gradients(draw_for_ranks(kind, seed)), None if bounds is None else torch.tensor(bounds)
        want = ops.selective_scan(**whole, **ZOH, cu_seqlens=cu, return_last_state=True, sp=False)
        expected = dict(zip(whole, gradients(want, whole, rank_cotangents(seed, whole)), strict=True))
        for key, x in (expected | {"y": want[0], "state": want[1]}).items():
            parts = [answer[kind][key] for answer in answers if key in answer[kind]]
            error = relative_error(torch.cat(parts, 1) if is_of_tokens(key, x) else sum(parts), x)
            if not error < (EXACT if dtype == torch.float64 else 1e-5):
                wrong[kind, key] = error
    assert not wrong


# What is refused ------------------------------------------------------------------------------------------------------


def test_a_wrong_argument_is_named() -> None:
    inputs, cu = draw(1, 6, 2), torch.tensor([0, 2, 6])
    for op, given in (
        (ops.selective_scan, inputs | {"cu_seqlens": cu}), (ops.recurrent_selective_scan, draw(1, 6, 1)),
    ):  # fmt: skip
        given = given | HOW
        op(**given)
        for key in inputs:
            for bad in (given[key].to(torch.complex64), given[key].tolist(), given[key][None]):
                with pytest.raises(ValueError, match=f"^{key}: expected .*, got "):
                    op(**(given | {key: bad}))
        for key, bad, message in (
            ("A", -given["A"], "values <= 0, usually -exp.A_log., got a largest value"),
            ("A", given["A"][:, :0], r"shape \[D, N\] = \[9, N\] with N of 1..256, got \[9, 0\]"),
            ("discretization", "bilinear", '"euler" or "zoh", got .bilinear'),
            ("delta_softplus", 1, ""), ("return_last_state", None, ""),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=f"^{key}: expected {message}"):
                op(**(given | {key: bad}))
        with pytest.raises(ValueError, match="^delta: expected step sizes >= 0 .after delta_bias., got a smallest"):
            op(**(given | {"delta_softplus": False}))


# The layer ------------------------------------------------------------------------------------------------------------

WIDTH = 12
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {"state_size": 3, "expand": 1.5, "dt_rank": 4, "conv_size": 3, "bias": True, "discretization": "zoh"},
    "bare": {"conv_bias": False, "dt_init": "constant", "dt_scale": 0.5},
}
every_case = pytest.mark.parametrize("name", CASES)


def make(name: str) -> Mamba:
    """With parameters that are no longer the ones and zeros that some begin as."""
    torch.manual_seed(len(name))
    layer = Mamba(WIDTH, **CASES[name]).double()
    with torch.no_grad():
        for x in layer.parameters():
            x.add_(0.3 * torch.randn_like(x) * (x.dim() == 1))
    return layer


def convolved(x: Tensor, taps: nn.Module) -> Tensor:
    """silu(bias + sum_j weight[:, W - 1 - j] x_{t - j}) of x [T, N]."""
    weight = taps.weight.squeeze(1)
    W = weight.shape[1]
    rows = [sum(weight[:, W - 1 - j] * x[t - j] for j in range(min(W, t + 1))) for t in range(len(x))]
    y = torch.stack(rows) + (0 if taps.bias is None else taps.bias)
    return y * torch.sigmoid(y)


def formula(layer: Mamba, u: Tensor) -> Tensor:
    """The layer's equations of u [T, hidden]."""
    x, z = layer.in_proj(u).tensor_split(2, -1)
    x = convolved(x, layer.conv1d)
    found = layer.x_proj(x)
    R, N = layer.dt_proj.weight.shape[1], layer.A_log.shape[1]
    given = {"u": x, "delta": layer.dt_proj(found[:, :R]), "B": found[:, R : R + N], "C": found[:, R + N :], "z": z}
    given = {key: each[None] for key, each in given.items()} | {"A": -layer.A_log.exp(), "D": layer.D}
    y, _ = oracle(**given, delta_softplus=True, discretization=layer.discretization)
    return layer.out_proj(y[0])


@every_case
def test_the_layer_is_its_formula(name: str) -> None:
    layer, x = make(name), torch.randn(2, 19, WIDTH, dtype=torch.float64)
    y, want = layer(x), torch.stack([formula(layer, row) for row in x])
    dy, parameters = torch.randn_like(y), list(layer.parameters())
    assert relative_error(y, want) < EXACT
    for a, b in zip(*(torch.autograd.grad(out, parameters, dy) for out in (y, want)), strict=True):
        assert relative_error(a, b) < EXACT


@every_case
def test_decoding(name: str) -> None:
    """A prompt in two parts, then tokens: what the whole text gives."""
    layer, x = make(name), torch.randn(3, 17, WIDTH, dtype=torch.float64)
    cache, outputs = layer.init_cache(3), []
    for part in (x[:, :7], x[:, 7:13]):
        y, cache = layer(part, cache=cache)
        outputs.append(y)
    for t in range(13, 17):
        y, cache = layer.step(x[:, t] if t % 2 else x[:, t : t + 1], cache)
        outputs.append(y.view(3, 1, WIDTH))
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
    cu = torch.tensor([0, 1, 1, 9, 12, 31]) if packed else None
    lengths, (x, dy) = [9, 1, 0, 21], torch.randn(2, 1, 31, WIDTH, dtype=torch.float64)
    answers, wrong = run_ranks(cut, 4, lengths, cu, x, dy), {}
    for name in CASES:
        layer, whole = make(name), x.clone().requires_grad_()
        y = layer(whole, cu_seqlens=cu)
        wanted = {"x": whole, **dict(layer.named_parameters())}
        expected = dict(zip(wanted, torch.autograd.grad(y, list(wanted.values()), dy), strict=True))
        for key, value in {"y": y.detach(), **expected}.items():
            parts = [answer[name][key] for answer in answers]
            error = relative_error(torch.cat(parts, 1) if key in ("x", "y") else sum(parts), value)
            if not error < EXACT:
                wrong[name, key] = error
    assert not wrong


def test_checkpoints_load() -> None:
    """Names and shapes of Mamba of mamba_ssm 2.2, for a width of 12."""
    shapes = {
        "A_log": [24, 16], "D": [24], "in_proj.weight": [48, 12], "conv1d.weight": [24, 1, 4], "conv1d.bias": [24],
        "x_proj.weight": [33, 24], "dt_proj.weight": [24, 1], "dt_proj.bias": [24], "out_proj.weight": [12, 24],
    }  # fmt: skip
    theirs, layer = {key: torch.randn(shape) for key, shape in shapes.items()}, Mamba(WIDTH)
    layer.load_state_dict(theirs, strict=True)
    assert all(torch.equal(layer.state_dict()[key], x) for key, x in theirs.items())


def test_initialisation() -> None:
    layer = Mamba(64, 4, dt_init="constant", dt_scale=3.0)
    assert torch.equal(layer.dt_proj.weight, torch.full((128, 4), 1.5)) and layer.D.eq(1).all()
    torch.testing.assert_close(layer.A_log.exp(), torch.tensor([1.0, 2.0, 3.0, 4.0]).expand(128, 4))
    dt = torch.nn.functional.softplus(Mamba(2048).dt_proj.bias)
    assert 0.99e-3 < dt.min() < 1.1e-3 and 0.09 < dt.max() < 0.1001
    assert 0.9 < Mamba(64).dt_proj.weight.abs().max() * 2 <= 1.0
    assert [Mamba(size).dt_rank for size in (64, 65, 2048)] == [4, 5, 128]  # a sixteenth of the width, rounded up
