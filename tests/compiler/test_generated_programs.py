"""The kernels of intrinsics alone, and generated kernels of random programs, under the interpreter."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from flexsp.compiler.dispatch import refusal
from flexsp.compiler.frontend import primitives
from flexsp.testing.bounds import within_tensors
from flexsp.testing.compare import relative_error
from flexsp.testing.ranks import run_ranks
from tests import variants
from tests.generated_programs import (
    CONSTANT_DECAY,
    KEPT_TILES,
    MAXIMA,
    OF_ALL_SIZES,
    OF_EACH_NUMBER,
    OF_SOME_SIZES,
    OPERATORS,
    PADDED_STATES,
    SCORES_OF_SCORES,
    SIZES_IN_A_DENSE_DECAY,
    SUMS,
    UNSUPPORTED,
    WILD_PADDING,
    DrawnProgram,
    draw_program,
)
from tests.harness.generated import SOME_SEGMENTS, hgrn_by_pairs
from tests.harness.interpreted import INTERPRETED, in_pieces, poisoned
from tests.harness.programs import PACKED, WHOLE, check_program
from tests.marks import quick, slow

# Kernels of intrinsics ------------------------------------------------------------------------------------------------


def inverses(sp: Any, C: int) -> list[float]:
    from flexsp.compiler.backend.intrinsic_kernels import inverse_kernel
    from flexsp.runtime.launch import launch

    x = torch.randn(2, 3, C, C) / C**0.5
    x[1, 2, C // 2 + 1 :] = 0.0  # rows past the chunk's length
    given = torch.where(torch.ones(C, C).tril(-1) > 0, x, float("nan"))
    y = torch.full_like(x, float("nan"))
    table = torch.empty(0, dtype=torch.int32)
    gain = torch.full((2, 3), float("nan"))
    flags = {"C": C, "GAIN": True, "MORE": False, "REPEATS": False, "DITHERED": False, "PACKED": False}
    with within_tensors():
        launch(inverse_kernel, (3, 2), (given, y, gain, table, 3 * C), flags, {"num_warps": 1})
    torch.testing.assert_close(gain, (y.tril(-1) ** 2).sum((2, 3)))
    want = torch.linalg.inv(x.double().tril(-1) + torch.eye(C, dtype=torch.float64))
    assert torch.equal(y, y.tril()), "what is above the diagonal is zero"
    assert torch.equal(y[1, 2, C // 2 + 1 :], torch.eye(C)[C // 2 + 1 :])
    return [relative_error(a, b) for a, b in zip(y.flatten(0, 1), want.flatten(0, 1), strict=True)]


@pytest.mark.parametrize("C", [16, 32, 64, 128])
def test_inverse_kernel(C: int, seed: int) -> None:
    (errors,) = run_ranks(inverses, 1, C, env=INTERPRETED)
    assert max(errors) < 1e-5, errors


GATES = (0.0, -1e-6, -1.0, -20.0, -103.0, -105.0, -1e3, -1e4)


def in_any_order(combine: Any, runs: list[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    """Neighbours joined in random order, as a scan on the GPU does; the interpreter adds row to row."""
    while len(runs) > 1:
        i = random.randrange(len(runs) - 1)
        runs[i : i + 2] = [combine.fn(*runs[i], *runs[i + 1])]
    return runs[0]


def test_sums_in_any_order() -> None:
    """What scans make of decayed sums, and of their gradients, against the primitive and autograd."""
    from flexsp.compiler.backend import tile_ops

    x, g = torch.randn(9, 4).double().requires_grad_(), -3 * torch.rand(9, 4).double()
    g.requires_grad_()
    h, dh = primitives.decayed_sums(x, g), torch.randn(9, 4).double()
    dx, dg = torch.autograd.grad(h, [x, g], dh)
    a, one, zero = g.exp(), torch.ones(4).double(), torch.zeros(4).double()
    for i in range(9):
        above, below = range(i + 1), range(8, i - 1, -1)
        sums = in_any_order(tile_ops._sum_after, [(a[j], x[j]) for j in above])[1]
        earlier = in_any_order(tile_ops._earlier_after, [(a[j], x[j], zero) for j in above])[2]
        later = in_any_order(tile_ops._later_before, [(a[j], one, dh[j]) for j in below])[2]
        assert torch.allclose(sums, h[i]) and torch.allclose(earlier, h[i] - x[i])
        assert torch.allclose(later, dx[i]) and torch.allclose(later * earlier, dg[i])


def test_derivative_of_sums() -> None:
    """Of the operator that graphs hold, also where gates are closed."""
    from flexsp.compiler.graphs import intrinsics

    x, dh = torch.randn(2, 9, 4).double()
    for gates in ((-1.0, -0.1), (0.0, -1.0, -200.0, -1e4)):
        g = torch.tensor(gates).double()[torch.randint(len(gates), (9, 4))]
        leaves = x.clone().requires_grad_(), g.requires_grad_()
        found, want = (
            (h, *torch.autograd.grad(h, leaves, dh, retain_graph=True))
            for h in (intrinsics.decayed_sums(*leaves), primitives.decayed_sums(*leaves))
        )
        assert all(torch.allclose(a, b) for a, b in zip(found, want, strict=True))


def scores(sp: Any, seed: int, C: int, kept: bool, gates: tuple[float, ...], half: bool) -> dict[str, float]:
    """Errors of the scores and of their gradients. `kept`: q and k lie in memory by chunk; `half`: products of numbers
    in bfloat16."""
    from flexsp.compiler.backend import intrinsic_kernels
    from flexsp.runtime.launch import launch

    torch.manual_seed(seed)
    B, H, N, n = 2, 2, 45 if half else 20, 2  # two blocks of columns if `half`, of which one may be small
    T = 2 * C - 5
    q, k, da = torch.randn(B, n * C, H, N), torch.randn(B, n * C, H, N), torch.randn(B * H, n, C, C)
    g = torch.tensor(gates)[torch.randint(len(gates), (B, n * C, H, N))]
    g[:, :C, :, 32:] *= 20
    q[:, T:], k[:, T:], g[:, T:] = 0, 0, 0

    def by_chunk(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).reshape(B * H, n, C, N)

    b = by_chunk(g).cumsum(2)
    qc, kc, bc = (x.double().requires_grad_() for x in (by_chunk(q), by_chunk(k), b))
    inside = (torch.arange(n * C) < T).view(n, C)
    square = (inside[:, :, None] & inside[:, None]).tril()
    chunks = zip(*(x.flatten(0, 1) for x in (qc, kc, bc)), strict=True)
    want = torch.stack([primitives.decayed_scores(*x) for x in chunks]).view(B * H, n, C, C)
    exact = torch.autograd.grad(want, [qc, kc, bc], torch.where(square, da, 0.0).double())
    given = torch.where(square, da, float("nan"))
    tensors = (by_chunk(q).contiguous(), by_chunk(k).contiguous()) if kept else (q[:, :T], k[:, :T])
    if not kept:
        tensors = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors)
    strides = [s for x in tensors for s in ((0, 0, 0) if kept else x.stride()[:3])]
    table = torch.empty(0, dtype=torch.int32)
    import triton.language as tl

    shape = {"N": N, "BN": 32, "C": C, "LEVELS": C.bit_length() - 1, "Q_KEPT": kept, "K_KEPT": kept, "PACKED": False,
             "DOT": tl.bfloat16 if half else tl.float32, "PREC": "ieee" if half else "tf32x3"}  # fmt: skip
    a = torch.full((B * H, n, C, C), float("nan"))
    found = [torch.full((B * H, n, C, N), float("nan")) for _ in range(3)]
    launch(intrinsic_kernels.scores_kernel, (n, B * H), (*tensors, b, a, table, *strides, T, H), shape, {})
    args = (given, *tensors, b, *found, table, *strides, T, H)
    launch(intrinsic_kernels.scores_grad_kernel, (n, B * H), args, shape, {})
    assert torch.equal(a, a.tril())
    pairs = {"scores": (a, want), **dict(zip(("dq", "dk", "db"), zip(found, exact, strict=True), strict=True))}
    # Of all pairs of tokens the first of a chunk has both ends, so that rounded numbers cancel too.
    pairs["pairs that cancel"] = 1 + found[2].double().sum(2), 1 + exact[2].sum(2)
    return {name: relative_error(*pair) for name, pair in pairs.items()}


@pytest.mark.parametrize("gates", [(0.0,), (0.0, -0.1, -1.0), GATES], ids=["none", "small", "to -1e4"])
@pytest.mark.parametrize(("C", "kept"), [(16, False), (32, True), *slow((64, False))])
def test_scores_kernels(C: int, kept: bool, gates: tuple[float, ...], seed: int) -> None:
    (errors,) = run_ranks(scores, 1, seed, C, kept, gates, False, env=INTERPRETED)
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("gates", [(0.0, -0.1, -1.0), (-0.5, -1.5), (0.0, float("-inf"), -0.1), GATES],
                         ids=["small", "up to the limit", "closed", "to -1e4"])  # fmt: skip
@pytest.mark.parametrize("C", [16, 64])
def test_scores_kernels_of_bfloat16(C: int, gates: tuple[float, ...], seed: int) -> None:
    """Chunks whose pairs of tokens meet in the middle, and others."""
    gates = tuple(max(g, -1e4) for g in gates)
    (errors,) = run_ranks(scores, 1, seed, C, False, gates, True, env=INTERPRETED)
    assert errors.pop("pairs that cancel") < 1e-4, errors
    assert max(errors.values()) < 2e-2, errors


# Random programs ------------------------------------------------------------------------------------------------------

PROGRAMS = 3


@pytest.mark.parametrize("n", range(PROGRAMS))
def test_random_programs(n: int, seed: int, folder: str) -> None:
    drawn = n if "FLEXSP_TEST_SEED" not in os.environ else seed + n  # the same three unless asked
    print(f"draw_program({drawn})")
    check_program(draw_program(drawn), seed, folder, (17 + seed % 16, None), PACKED, pieces=16 * (seed % 2))


def programs(groups: dict[str, list[str]]) -> list[Any]:
    """Features of one program by group; each in a program of its own is slow."""
    alone = [x for features in groups.values() for x in features]
    return [
        *(pytest.param(features, id=name) for name, features in groups.items()),
        *(pytest.param([x], id=f"alone {x}", marks=pytest.mark.slow) for x in alone),
    ]


PADDING = {name: list(WILD_PADDING.values())[i::2] for i, name in enumerate(("even", "odd"))}


@pytest.mark.parametrize("features", programs(PADDING))
def test_padding_that_is_not_finite(features: list[str], seed: int, folder: str) -> None:
    check_program(DrawnProgram.of_features(*features), seed, folder, WHOLE)


@pytest.mark.parametrize("case", PADDED_STATES)
def test_padding_of_states_and_of_kept_values(case: str, seed: int, folder: str) -> None:
    check_program(DrawnProgram.of_source(PADDED_STATES[case]), seed, folder, (45, None))


@pytest.mark.parametrize("case", quick(KEPT_TILES, "tokens are columns"))
def test_kept_tiles_of_all_orders(case: str, seed: int, folder: str) -> None:
    check_program(KEPT_TILES[case], seed, folder)


@pytest.mark.parametrize("features", programs(OPERATORS))
def test_operators(features: list[str], seed: int, folder: str) -> None:
    check_program(DrawnProgram.of_features(*features), seed, folder, WHOLE)


def reasons(sp: Any) -> dict[str, str]:
    """Why no kernel is made of a feature."""
    programs = {name: DrawnProgram.of_features(x) for name, x in UNSUPPORTED.items()}
    return {name: str(program.model()._generated) for name, program in programs.items()}


def test_operators_without_a_kernel_are_named_with_their_line() -> None:
    (found,) = run_ranks(reasons, 1, env=INTERPRETED)
    for name, reason in found.items():
        assert reason.startswith(f"no kernel is made of {name}") and ", at <string>:" in reason, (name, reason)


@pytest.mark.slow
def test_kernels_are_made_for_all_sizes_or_not_at_all() -> None:
    """What a number of tokens or channels makes is refused: a trace may hold for the sizes of the trace alone."""
    for feature in OF_SOME_SIZES:
        made = DrawnProgram.of_features(feature).model()._generated
        assert isinstance(made, str), f"{feature}: kernels were made"
        assert "plain numbers" not in made, made


@pytest.mark.parametrize(
    ("writes", "why"),
    [
        ("k.T @ v", None), ("(k.T @ v).tril()", "tril is of all of them at once"),
        ("k.T @ v.cumsum(1)", "cumsum is of all of them at once"),
        ("k.T @ (v / (v * v).sum(1)[:, None])", "some are made of sums over all"),
    ],
)  # fmt: skip
def test_what_needs_all_columns_is_not_taken_in_pieces(writes: str, why: str | None, folder: str) -> None:
    source = f"def chunk(k, v):\n    return {writes}\n\n\n"
    source += "def decay(prev_s, chunk_state):\n    return prev_s + chunk_state\n\n\n"
    program = DrawnProgram.of_source(source + "def merge(q, chunk_state):\n    return q @ chunk_state\n")
    model = program.model(code_dir=folder)
    with in_pieces(16):
        found = refusal(model.kernels, program.sizes, model.program.meta.looks(program.sizes, 1), on_gpu=False)
    assert found is None if why is None else why in str(found)


def test_sizes_in_a_feature(seed: int, folder: str) -> None:
    check_program(DrawnProgram.of_features(*OF_ALL_SIZES), seed, folder, WHOLE)


def test_gradients_of_scores_one_behind_the_other(seed: int, folder: str) -> None:
    check_program(DrawnProgram.of_source(SCORES_OF_SCORES, "gk"), seed, folder, WHOLE)


@pytest.mark.parametrize("case", SUMS)
def test_decayed_sums(case: str, seed: int, folder: str) -> None:
    check_program(SUMS[case], seed, folder)


@pytest.mark.parametrize("case", quick(OF_EACH_NUMBER, "a parameter"))
def test_a_factor_for_each_number_of_the_state(case: str, seed: int, folder: str) -> None:
    program = DrawnProgram.of_source(*OF_EACH_NUMBER[case])
    assert program.model().program.transition == "elementwise"
    check_program(program, seed, folder, (45, None), PACKED)


@pytest.mark.parametrize("case", quick(MAXIMA, "a matrix"))
def test_maxima(case: str, seed: int, folder: str) -> None:
    assert MAXIMA[case].model().program.transition == "max-plus"
    check_program(MAXIMA[case], seed, folder, (45, None), PACKED)


def test_hgrn_by_pairs_is_hgrn(seed: int) -> None:
    """The decay of every pair of tokens written out, in PyTorch."""
    torch.manual_seed(seed)
    tokens, _ = variants.draw("hgrn", 1, 37, seed)
    leaves = {name: x.requires_grad_() for name, x in (tokens | {"prev_s": torch.randn(3, 2, 5).double()}).items()}
    models = hgrn_by_pairs(chunk_size=16), variants.load("hgrn").make(variants.H, variants.K)
    found, want = (model(**leaves, cu_seqlens=torch.tensor([0, 20, 20, 37])) for model in models)
    cotangents = [torch.randn_like(x) for x in found]
    found, want = ([*x, *torch.autograd.grad(x, list(leaves.values()), cotangents)] for x in (found, want))
    assert all(torch.allclose(a, b) for a, b in zip(found, want, strict=True))


def over_ranks(
    sp: Any, program: DrawnProgram, folder: str, lengths: list[int], bounds: tuple[int, ...]
) -> dict[str, float]:
    """Errors of a program over ranks. The functions in PyTorch go over the same chunks."""
    model, found = program.model(code_dir=folder), []
    model.program = replace(model.program, disagrees=None)  # shards off the edges of chunks are part of the test
    inputs = program.inputs(1, sum(lengths), bounds, torch.Generator().manual_seed(0))
    sp.set_lengths(lengths)
    start, stop, _ = sp.shard_range(lengths[sp.rank])
    for dtype in (torch.float32, torch.float64):
        mine = {name: x[:, start:stop] if name in ("q", "k", "v", "g", "gk") else x for name, x in inputs.items()}
        leaves = {name: x.to(dtype, copy=True).requires_grad_() for name, x in mine.items()}
        with poisoned(SOME_SEGMENTS, program.H):
            o, final = model(**leaves, cu_seqlens=torch.tensor(bounds), sp=sp)
            loss = o.sum() + final.square().sum()
            grads = torch.autograd.grad(loss, [*leaves.values()], materialize_grads=True)
        found.append({"o": o.detach(), "final": final.detach(), **dict(zip(leaves, grads, strict=True))})
    return {name: relative_error(x, found[1][name]) for name, x in found[0].items()}


@pytest.mark.parametrize(
    ("bounds", "lengths"),
    [
        ((0, 9, 21), [5, 16]), ((0, 9, 9, 21), [13, 8]), ((0, 21), [21]), ((0, 0, 21), [5, 16]),
        *slow(
            ((0, 9, 21), [21]), ((0, 9, 21), [13, 8]), ((0, 9, 9, 21), [21]), ((0, 9, 9, 21), [5, 16]),
            ((0, 21), [13, 8]), ((0, 21), [5, 16]), ((0, 0, 21), [21]), ((0, 0, 21), [13, 8]),
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("factor", ["(-(u * u)).exp()", *slow("A.sigmoid()")])
def test_a_decay_that_no_token_changes(
    factor: str, bounds: tuple[int, ...], lengths: list[int], folder: str
) -> None:  # fmt: skip
    """A factor of the state that is the same in every chunk, with tokens or without: such as there are in the room for
    documents that do not begin where a chunk does."""
    program = DrawnProgram(CONSTANT_DECAY.format(factor=factor), ("q", "k", "v", "u", "A"), 2, 20, 24, 16)
    for errors in run_ranks(over_ranks, len(lengths), program, folder, lengths, bounds, env=INTERPRETED):
        assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize(
    ("case", "transport", "bounds"),
    slow(
        ("zeros", "posix", (0, 3, 45)), ("a parameter", "posix", (0, 45)), ("a parameter", "process_group", (0, 3, 45)),
    ),
)
def test_a_factor_for_each_number_over_ranks(case: str, transport: str, bounds: tuple[int, ...], folder: str) -> None:
    program, heap = DrawnProgram.of_source(*OF_EACH_NUMBER[case]), {"heap_mib": 4} if transport == "posix" else {}
    given = program, folder, [10, 19, 16], bounds
    for errors in run_ranks(over_ranks, 3, *given, env=INTERPRETED, transport=transport, **heap):
        assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize(
    ("case", "transport", "bounds", "lengths"),
    slow(
        ("a vector", "posix", (0, 3, 45), [10, 19, 16]), ("a vector", "process_group", (0, 45), [10, 19, 16]),
        ("a vector", "posix", (0, 45), [0, 29, 16]),
        ("a matrix", "posix", (0, 45), [10, 19, 16]), ("a matrix", "process_group", (0, 3, 45), [10, 35, 0]),
        ("a number", "process_group", (0, 30, 30, 45), [10, 0, 35]),
    ),
)  # fmt: skip
def test_maxima_over_ranks(
    case: str, transport: str, bounds: tuple[int, ...], lengths: list[int], folder: str
) -> None:  # fmt: skip
    heap = {"heap_mib": 4} if transport == "posix" else {}
    given = MAXIMA[case], folder, lengths, bounds
    for errors in run_ranks(over_ranks, len(lengths), *given, env=INTERPRETED, transport=transport, **heap):
        assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("bounds", [(0, 45), (0, 3, 45)])
def test_sizes_of_the_state_in_a_dense_decay(bounds: tuple[int, ...], folder: str) -> None:
    program = DrawnProgram.of_source(SIZES_IN_A_DENSE_DECAY)
    for errors in run_ranks(over_ranks, 3, program, folder, [10, 19, 16], bounds, env=INTERPRETED):
        assert max(errors.values()) < 1e-5, errors
