"""Variants that the delta engine runs, against token loops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from flexsp.devices import H200, planned_for
from flexsp.kernels.delta.channels import _exact_sums
from flexsp.kernels.primitives import dots
from flexsp.testing.compare import relative_error
from flexsp.testing.ranks import run_ranks
from flexsp.variants import deltanet, gated_deltanet
from tests.harness.generated import MANY_SEGMENTS, ONE_SEGMENT, Run, check_runs, documents, half
from tests.harness.interpreted import INTERPRETED, poisoned
from tests.marks import quick

BF16 = torch.bfloat16
NAMES = ["deltanet", "gated_deltanet", "vector_gated_delta"]


def runs(name: str, **options: object) -> Run:
    return Run(name, **({"lowering": "auto"} | options))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_batched_and_packed(name: str, folder: str) -> None:
    """Against token loops, with initial states and gradients of final ones; any strides, half precision."""
    packed = documents(150, 4)
    check_runs(
        folder,
        runs(name, T=130, B=2, strided=True), runs(name, T=150, bounds=packed), runs(name, T=1), runs(name, T=0, B=2),
        runs(name, T=150, bounds=(0, 0, 70, 70, 150), dtype=BF16, segments=MANY_SEGMENTS),
        runs(name, T=65, dtype=BF16, segments=ONE_SEGMENT), runs(name, T=0, bounds=(0, 0, 0)),
        runs(name, T=90, V=80, H=1, dtype=BF16, bounds=(0, 20, 90)),
        runs(name, T=70, V=40, dtype=BF16, segments=ONE_SEGMENT),
    )  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_over_ranks(name: str, folder: str) -> None:
    """The first rank, which has the initial state, may have no tokens."""
    lengths = (70, 0, 60)
    check_runs(
        folder, runs(name, T=130, lengths=lengths), runs(name, T=130, lengths=lengths, bounds=(0, 20, 20, 100, 130)),
        runs(name, T=9, lengths=(0, 9, 0), H=1),
    )  # fmt: skip


_SLOWLY = {"T": 330, "H": 1, "gates": (-0.002, 0.0)}
LARGE = {
    "deltanet": [
        runs("deltanet", T=67, K=256, V=256, H=1, dtype=BF16),
        runs("deltanet", T=35, K=192, V=256, H=1, bounds=(0, 0, 33, 35)),
    ],
    "gated_deltanet": [
        runs("gated_deltanet", T=67, K=256, V=192, H=1, dtype=BF16, bounds=(0, 3, 3, 67)),
    ],
    "vector_gated_delta": [
        runs("vector_gated_delta", T=67, K=256, V=256, H=1, dtype=BF16, bounds=(0, 64, 64, 67)),
    ],
    "float32": [
        runs("gated_deltanet", T=35, K=256, V=256, H=1), runs("vector_gated_delta", T=35, K=256, V=192, H=1),
    ],
    "half precisions": [
        runs("gated_deltanet", T=131, K=256, V=256, B=2, dtype=torch.float16, strided=True),
        runs("vector_gated_delta", T=65, K=192, V=256, H=1, dtype=torch.float16),
        runs("deltanet", T=70, K=256, V=64, H=1, dtype=torch.float16),
    ],
    "K alone or V alone": [
        runs("vector_gated_delta", T=35, K=16, V=256, H=1), runs("vector_gated_delta", T=35, K=256, V=40, H=1),
        runs("gated_deltanet", T=67, K=16, V=256, H=1, dtype=BF16), runs("gated_deltanet", T=40, K=130, V=16, H=1),
    ],
    "segments": [
        runs("gated_deltanet", K=192, V=130, segments=MANY_SEGMENTS, **_SLOWLY),
        runs("gated_deltanet", K=256, V=64, segments=MANY_SEGMENTS, bounds=(0, 100, 270), dtype=BF16, H=1, T=270),
    ],
}  # fmt: skip


@pytest.mark.parametrize("what", quick(LARGE, *NAMES))
def test_large_heads(what: str, folder: str) -> None:
    check_runs(folder, *LARGE[what])


LARGE_OVER_RANKS = {
    "K": [runs("deltanet", T=37, K=140, V=16, H=1, lengths=(20, 0, 17))],
    "both": [runs(name, T=90, K=256, V=192, H=1, lengths=(33, 0, 57), bounds=(0, 60, 60, 90)) for name in NAMES],
    "segments": [runs("gated_deltanet", K=256, V=130, lengths=(200, 130), segments=MANY_SEGMENTS, **_SLOWLY)],
}


@pytest.mark.parametrize("what", quick(LARGE_OVER_RANKS, "K"))
def test_large_heads_over_ranks(what: str, folder: str) -> None:
    check_runs(folder, *LARGE_OVER_RANKS[what])


def error_on_other_gpus(sp: Any, channels: bool) -> float:
    """Of a call with 129 keys, as for a GPU before Hopper; `channels`: gates are of channels."""
    from flexsp import ops

    q, k, v = torch.randn(3, 1, 3, 1, 129).unbind()
    k = torch.nn.functional.normalize(k, dim=-1)
    g = -torch.rand(1, 3, 1, 129) if channels else -torch.rand(1, 3, 1)
    op, given = ops.chunk_kda if channels else ops.chunk_gated_delta_rule, (q, k, v, g, torch.rand(1, 3, 1))
    with planned_for(replace(H200, capability=(8, 0))):
        return relative_error(op(*given)[0], op(*(x.double() for x in given))[0])


@pytest.mark.parametrize("channels", quick((False, True), False))
def test_large_heads_on_other_gpus(channels: bool) -> None:
    """Generated kernels run them."""
    (error,) = run_ranks(error_on_other_gpus, 1, channels, env=INTERPRETED)
    assert error < 1e-5


GATES = {"as models have them": None, "strong": (-30.0, -4.0), "slow": (-0.002, 0.0), "growth": (0.3, -0.2, 0.0),
         "closed": (-104.0, -1.0)}  # fmt: skip


@pytest.mark.parametrize("gates", quick(GATES, "strong", "slow", "growth"))
def test_segments(gates: str, folder: str) -> None:
    """With a horizon within a segment and beyond all; documents over segments; over ranks."""
    bounds, lengths = (0, 0, 30, 240, 250, 360), (230, 0, 130)
    given = {"T": 360, "gates": GATES[gates], "segments": MANY_SEGMENTS}
    check_runs(folder, runs("gated_deltanet", H=1, **given), runs("gated_deltanet", H=1, bounds=bounds, **given))
    over_ranks = [runs("gated_deltanet", H=1, lengths=lengths, bounds=bounds, **given)]
    if gates in ("slow", "growth", "strong"):  # a rank's matrix counts, or has to be nothing
        over_ranks.append(runs("gated_deltanet", H=2 if gates == "slow" else 1, lengths=lengths, **given))
    check_runs(folder, *over_ranks)


def test_segments_without_decay(folder: str) -> None:
    """They are there over ranks."""
    given: dict[str, Any] = {"T": 360, "lengths": (230, 0, 130), "segments": MANY_SEGMENTS, "H": 1}
    check_runs(folder, runs("deltanet", **given), runs("deltanet", bounds=(0, 0, 30, 240, 250, 360), **given))


_OVER_RANKS = {"T": 78, "lengths": (33, 5, 40), "bounds": (0, 38, 78), "gates": GATES["slow"], "H": 1}
STARTS = {
    "segments": runs("gated_deltanet", T=320, bounds=(0, 256, 320), segments=MANY_SEGMENTS, gates=GATES["slow"], H=1),
    **{f"ranks, {name}": runs(name, **_OVER_RANKS) for name in NAMES},
    **{f"ranks, generated {name}": Run(name, **_OVER_RANKS) for name in ("deltanet", "gla")},  # type: ignore[arg-type]
}  # fmt: skip


@pytest.mark.parametrize("where", quick(STARTS, "segments", "ranks, deltanet", "ranks, generated gla"))
def test_documents_that_begin_where_segments_or_ranks_do(where: str, folder: str) -> None:
    """What a document adds to the gradient of its initial state would pass to the one before, which is open there."""
    check_runs(folder, STARTS[where])


CHANNELS = {"strong": (-30.0, -4.0), "slow": (-0.002, 0.0), "growth": (0.3, -0.2, 0.0), "closed": (-104.0, -1.0, 0.0),
            "medium": (-8.0, -1.0, 0.0), "far past": (0.0, -1e4, -105.0, -0.5)}  # fmt: skip


@pytest.mark.parametrize("gates", quick(CHANNELS, "closed", "growth", "medium"))
def test_gates_of_channels(gates: str, folder: str) -> None:
    """Blocks of all sizes; gradients in the place of states; and several tiles of channels. What grows may be too large
    for the reference in float16."""
    given, name, other = {"gates": CHANNELS[gates], "H": 1}, "vector_gated_delta", BF16 if gates == "growth" else half()
    check_runs(
        folder, runs(name, T=70, K=64, V=64, **given), runs(name, T=66, K=40, V=20, bounds=(0, 66), **given),
        runs(name, T=70, K=33, V=128, dtype=BF16, **given), runs(name, T=65, bounds=(0, 60, 65), dtype=other, **given),
    )  # fmt: skip


@triton.jit
def later_sums_kernel(x, to, N: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr):
    i, n = tl.arange(0, 16), tl.arange(0, N)[None, :]
    later = (i[:, None] <= i[None, :]).to(DOT)
    tl.store(to + i[:, None] * N + n, _exact_sums(later, tl.load(x + i[:, None] * N + n), DOT, PREC))


def off_of_sums(sp: Any, seed: int, dtype: torch.dtype) -> float:
    """The largest error of a sum, of that of magnitudes."""
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(seed))
    found = torch.empty_like(x)
    later_sums_kernel[(1,)](x, found, N=64, **dots(dtype))
    want, sizes = (y.double().flip(0).cumsum(0).flip(0) for y in (x, x.abs()))
    return float(((found - want).abs() / sizes).max())


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_sums_of_gradients_of_gates_are_in_float32(dtype: torch.dtype, seed: int) -> None:
    """Also where products are in bfloat16, which lose nothing of numbers in three parts."""
    assert run_ranks(off_of_sums, 1, seed, dtype, env=INTERPRETED)[0] < 5e-7


def leaked(sp: Any, decays: bool) -> list[str]:
    """What of one document changes with NaN in the values, or in the outputs' gradient, of the other. One of three
    segments has the end of the first and the start of the second, and slow gates or none."""
    from flexsp.kernels.delta import tiling

    tiling._cut = lambda *args: True  # type: ignore[assignment]
    torch.manual_seed(0)
    first, T = 150, 380
    x = {name: torch.randn(1, T, 1, 16) for name in "qkv"} | {"beta": torch.rand(1, T, 1)}
    x["k"] = torch.nn.functional.normalize(x["k"], dim=-1)
    do, bounds = torch.randn(1, T, 1, 16), torch.tensor([0, first, T])
    if decays:
        x["g"] = -0.01 * torch.rand(1, T, 1)
    else:
        x["b"] = x.pop("beta")
    model, found = (gated_deltanet if decays else deltanet).make(1, 16, 16), []

    def passes(v: torch.Tensor, do: torch.Tensor) -> dict[str, torch.Tensor]:
        leaves = {name: y.clone().requires_grad_() for name, y in (x | {"v": v}).items()}
        with poisoned(MANY_SEGMENTS, 1):
            o, final = model(**leaves, cu_seqlens=bounds)
            grads = torch.autograd.grad(o, [*leaves.values()], do)
        return {"o": o, "final": final} | {f"d{name}": dx for name, dx in zip(leaves, grads, strict=True)}

    want, wrong_v, wrong_do = passes(x["v"], do), x["v"].clone(), do.clone()
    wrong_v[0, 3, 0, 0] = wrong_do[0, -2, 0, 0] = torch.nan
    for part, state, got in (
        (slice(first, T), 1, passes(wrong_v, do)), (slice(first), 0, passes(x["v"], wrong_do)),
    ):  # fmt: skip
        for name, y in got.items():
            of = state if name == "final" else (0, part)
            found += [] if torch.equal(y[of], want[name][of]) else [f"{name} of document {state}"]
        assert any(y.isnan().any() for y in got.values())
    return found


@pytest.mark.parametrize("decays", [True, False])
def test_nan_stays_in_its_document_where_segments_have_two(decays: bool) -> None:
    (wrong,) = run_ranks(leaked, 1, decays, env=INTERPRETED)
    assert not wrong, wrong


def leaked_between_ranks(sp: Any, decays: bool, cuts: list[tuple[tuple[int, ...], int]]) -> list[str]:
    """What of one document changes on this rank with NaN in the other, where each document begins on the rank before or
    after: `cuts` are lengths of shards, and where the second document begins."""
    from flexsp.ops import chunk_delta_rule, chunk_gated_delta_rule

    wrong = []
    for lengths, first in cuts:
        made, T = torch.Generator().manual_seed(0), sum(lengths)
        x = {name: torch.randn(1, T, 1, 16, generator=made) for name in ("q", "k", "v", "do")}
        x |= {"beta": torch.rand(1, T, 1, generator=made)} | ({"g": torch.full((1, T, 1), -0.01)} if decays else {})
        x["k"] = torch.nn.functional.normalize(x["k"], dim=-1)
        start = sum(lengths[: sp.rank])
        here, bounds = slice(start, start + lengths[sp.rank]), torch.tensor([0, first, T])
        sp.set_lengths(list(lengths))

        def passes(names: str = "", at: int = 0, x=x, here=here, bounds=bounds) -> dict[str, torch.Tensor]:  # type: ignore[no-untyped-def]
            given = {key: y.clone() for key, y in x.items()}
            for name in names.split():
                given[name][0, at] = torch.nan
            do = given.pop("do")[:, here]
            leaves = {key: y[:, here].clone().requires_grad_() for key, y in given.items()}
            with poisoned(MANY_SEGMENTS, 1):
                op = chunk_gated_delta_rule if decays else chunk_delta_rule
                o, _ = op(**leaves, cu_seqlens=bounds, sp=sp)  # type: ignore[operator]
                grads = torch.autograd.grad(o, [*leaves.values()], do)
            return {"o": o.detach()} | {f"d{key}": dx for key, dx in zip(leaves, grads, strict=True)}

        want = passes()
        at = torch.arange(here.start, here.stop)
        for names, place in (("k v", 10), ("k do", T - 10)):
            got, other = passes(names, place), at >= first if place < first else at < first
            wrong += [
                f"{key} of {lengths} on rank {sp.rank}, NaN in {names} of token {place}" for key, y in got.items()
                if not torch.equal(y[:, other], want[key][:, other])
            ]  # fmt: skip
    return wrong


@pytest.mark.parametrize("decays", [True, False])
def test_nan_stays_in_its_document_over_ranks(decays: bool) -> None:
    """NaN two ranks from where the other document begins; and on that rank, of one segment and of several."""
    cuts = [((40, 60, 40), 70), ((40, 130, 4), 80), ((130, 140, 5), 250)]
    found = run_ranks(leaked_between_ranks, 3, decays, cuts if decays else cuts[:2], transport="posix", env=INTERPRETED)
    assert not any(found), found


def large_keys(sp: Any) -> str:
    """Gates that close by far, and one key again and again, so large that the state grows by more along it."""
    torch.manual_seed(0)
    x = {name: torch.randn(1, 520, 1, 16) for name in "qkv"} | {"beta": torch.ones(1, 520, 1)}
    x["k"] = 2.9 * torch.nn.functional.normalize(x["k"][:, :1], dim=-1).expand(-1, 520, -1, -1)
    x["g"] = torch.full((1, 520, 1), -1.95)
    model, state = gated_deltanet.make(1, 16, 16), torch.randn(1, 1, 16, 16)
    with poisoned(MANY_SEGMENTS, 1):
        o, final = model(**x, prev_s=state)
    want = model(**{name: y.double() for name, y in x.items()}, prev_s=state.double())
    errors = [relative_error(a.double(), b) for a, b in zip((o, final), want, strict=True)]
    return "" if max(errors) < 1e-3 else str(errors)


def of_horizons(sp: Any, per_seg: int, chunks: int, scale: float) -> list[str]:
    """What `horizons` says of segments and should not, for random bounds; the sums are of halves, which are exact."""
    from flexsp.kernels.delta.walks import HORIZON, horizons

    rows, n_seg, wrong = 2, -(-chunks // per_seg), []
    bounds = torch.stack([-scale * torch.rand(rows, chunks) ** 4, scale * torch.rand(rows, chunks) ** 8], 1)
    bounds = (2 * bounds).round() / 2
    alive, walked = torch.full((1, n_seg, rows), -1), torch.full((2, rows, n_seg), -1)
    alive, walked = alive.int(), walked.int()
    horizons[rows, n_seg](bounds, alive, walked, bounds, rows, n_seg, chunks, per_seg, True, False, False)
    for row in range(rows):
        for seg in range(n_seg):
            decay, growth = (x[seg * per_seg : (seg + 1) * per_seg].double() for x in bounds[row])
            want = [int(decay.sum() > HORIZON.value)]
            for last_first in (True, False):
                near, grows = (x.flip(0) if last_first else x for x in (decay, growth))
                counts = (near.cumsum(0) - near + grows > HORIZON.value).nonzero()
                want.append(int(counts.max()) + 1 if len(counts) else 0)
            found = [int(alive[0, seg, row]), *walked[:, row, seg].tolist()]
            wrong += [] if found == want else [f"row {row}, segment {seg}: {found}, expected {want}"]
    return wrong


@pytest.mark.parametrize(("per_seg", "chunks", "scale"), [(3, 40, 200.0), (20, 310, 60.0), (140, 270, 5.0)])
def test_what_counts_at_the_ends_of_segments(per_seg: int, chunks: int, scale: float) -> None:
    """In all chunks; also where the first chunk of a segment decays little and the last one much, or the reverse."""
    (wrong,) = run_ranks(of_horizons, 1, per_seg, chunks, scale, env=INTERPRETED)
    assert not wrong, wrong


def far_away(sp: Any) -> list[float]:
    """Errors of outputs and of gradients of v, 20 tokens after 20 tokens, where the first values and the last gradients
    of outputs are large: they count until a decay of e^-76 is reached."""
    torch.manual_seed(0)
    x = {name: torch.randn(1, 520, 1, 16) for name in "qkv"} | {"beta": torch.rand(1, 520, 1)}
    x["k"] = torch.nn.functional.normalize(x["k"], dim=-1)
    x["g"], do = torch.full((1, 520, 1), -0.3), torch.randn(1, 520, 1, 16)
    x["v"][:, :5] *= 1e33
    do[:, -5:] *= 1e33
    model, found = gated_deltanet.make(1, 16, 16), []
    for dtype in (torch.float32, torch.float64):
        given = {name: y.to(dtype).requires_grad_() for name, y in x.items()}
        with poisoned(MANY_SEGMENTS, 1):
            o, _ = model(**given)
        found.append((o, torch.autograd.grad(o, given["v"], do.to(dtype))[0]))
    pairs = [(a[:, t : t + 20], b[:, t : t + 20]) for a, b in zip(*found, strict=True) for t in range(0, 520, 20)]
    return [relative_error(a.double(), b) for a, b in pairs]


def test_large_numbers_far_away() -> None:
    (errors,) = run_ranks(far_away, 1, env=INTERPRETED)
    assert max(errors) < 1e-3, errors


def test_large_keys_have_no_horizon() -> None:
    (wrong,) = run_ranks(large_keys, 1, env=INTERPRETED)
    assert not wrong, wrong
