"""Where the parts of a call meet: sequences, heads, tiles of K and segments; closed gates between small numbers and
large ones."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from flexsp.devices import H200, planned_for
from flexsp.kernels.diagonal.tiling import make_tiling
from flexsp.testing.cases import CASES, Shape
from flexsp.testing.compare import relative_error
from flexsp.testing.ranks import run_ranks
from tests.harness.diagonal import ONE_SEGMENT, SOME_SEGMENTS, Run, check_runs, one_walk
from tests.harness.interpreted import INTERPRETED, poisoned
from tests.op_cases import OTHER_CASES


def test_several_sequences_heads_and_tiles_of_keys() -> None:
    """Every part of the sums has an index of the sequence, the head, the segment and the tile."""
    check_runs(
        Run("simple_gla", Shape(B=2, T=20, H=2, K=33, V=3), segments=SOME_SEGMENTS),
        Run("simple_gla", Shape(B=1, T=20, H=2, K=33, V=3, states=3), bounds=(0, 3, 3, 20), segments=SOME_SEGMENTS),
    )


def _error_before_large_numbers(sp: Any, seed: int, joint: bool) -> float:
    """Largest error of dg in units of the float32 error of adding up the magnitudes that cross each gate.

    All chunks are of one segment, since sums begin anew at a segment's edge. Numbers behind a chunk of closed gates
    are a thousand times larger than those before it. None of them reaches past that chunk, and neither may what
    rounding leaves of them. The bound is that of `test_triton_engine.py`: K, V and at most T numbers are added on the
    way to a gradient, and n roundings add up to about sqrt(n) eps.
    """
    from flexsp.ops import chunk_simple_gla

    torch.manual_seed(seed)
    C, K, H = 16, 16, 6  # in one head of four the rounding happens to cancel
    T = 5 * C
    q, k, v, do = torch.randn(4, 1, T, H, K).unbind(0)
    g = torch.full((1, T, H), -1e-3)
    g[:, 3 * C : 4 * C : 2] = -10.0
    for x in (q, k, v, do):
        x[:, 4 * C :] *= 1000.0
    found, exact = g.clone().requires_grad_(), g.double().requires_grad_()
    with poisoned(ONE_SEGMENT, H), one_walk() if joint else nullcontext():
        chunk_simple_gla(q, k, v, found)[0].backward(do)
    chunk_simple_gla(q.double(), k.double(), v.double(), exact)[0].backward(do.double())
    assert found.grad is not None and exact.grad is not None
    a, da = (torch.einsum("thk,shk->hts", x[0].double().abs(), y[0].double().abs()) for x, y in ((q, k), (do, v)))
    b = g[0].T.double().cumsum(1)
    pairs = (K**-0.5 * a * da * (b[:, :, None] - b[:, None, :]).exp()).tril(-1)
    crossing = torch.stack([pairs[:, p:, :p].sum((1, 2)) for p in range(1, 3 * C)])
    error = (found.grad - exact.grad)[0, 1 : 3 * C].abs() / crossing
    return float(error.max() / ((K + K + T) ** 0.5 * torch.finfo(torch.float32).eps))


@pytest.mark.parametrize("joint", [False, True])
def test_large_numbers_behind_closed_gates_leave_no_rounding(joint: bool, seed: int) -> None:
    (error,) = run_ranks(_error_before_large_numbers, 1, seed, joint, env=INTERPRETED)
    assert error < 1


def test_a_document_that_starts_inside_a_segment_between_others() -> None:
    """What came before it must not reach the segment behind, although that segment's last chunks start no document:
    without gates, and with gates so weak that it would be seen there."""
    shape = Shape(B=1, T=134, H=1, K=5, V=3)
    check_runs(*(Run(name, shape, bounds=(0, 64, 134), segments=3) for name in ("linear", "retention")))


def test_more_heads_than_a_grid_has_rows() -> None:
    """CUDA's second axis ends at 65,535 blocks; what is past it is refused before anything is launched."""
    q, v = torch.empty(2**16, 1, 1, 16, device="meta"), torch.empty(2**16, 1, 1, 4, device="meta")
    with planned_for(H200):
        assert make_tiling(q[1:], v[1:], 0).B == 65535
        with pytest.raises(ValueError, match=r"q: expected B \* H <= 65535 .* got 65536\. Pack"):
            make_tiling(q, v, 0)


def _after_nan(sp: Any, name: str) -> list[bool]:
    """With NaN in one token: whether outputs from it on are NaN, and the final state. Others of its chunk may be."""
    from flexsp.ops import chunk_simple_gla

    T, at = 40, 21
    x = dict(zip("qkv", torch.randn(3, 1, T, 2, 16).unbind(0), strict=True)) | {"g": torch.full((1, T, 2), -0.1)}
    x[name][:, at] = float("nan")
    with poisoned(ONE_SEGMENT, 2):
        o, final = chunk_simple_gla(**x, output_final_state=True)
    return [bool(o[:, at:].isnan().all()), bool(final.isnan().all())]


@pytest.mark.parametrize("name", ["g", "k", "v"])
def test_nan_is_seen_from_its_token_on(name: str) -> None:
    (found,) = run_ranks(_after_nan, 1, name, env=INTERPRETED)
    assert all(found), found


def _far_apart(sp: Any, file: str) -> float:
    """Difference of outputs where heads of gates lie 4 GiB apart, in a file of holes, and where they do not."""
    from flexsp.ops import chunk_simple_gla

    far, T, H = 2**30, 20, 3
    g = torch.from_file(file, shared=True, size=(H - 1) * far + T).as_strided((1, T, H), (0, 1, far))
    g.copy_(-torch.rand(1, T, H))
    q, k, v = torch.randn(3, 1, T, H, 4)
    found, want = (chunk_simple_gla(q, k, v, x)[0] for x in (g, g.contiguous()))
    return float((found - want).abs().max())


def test_heads_of_gates_that_lie_far_apart(tmp_path: Any) -> None:
    """Strides fit 32 bits, offsets do not."""
    assert run_ranks(_far_apart, 1, str(tmp_path / "gates"), env=INTERPRETED) == [0.0]


_SEGMENTED = {name: CASES[name] for name in ("retention", "simple_gla", "mamba2")}
_SEGMENTED |= {name: OTHER_CASES[name] for name in ("hgrn", "rg_lru", "selective_scan")}


def _unlike(sp: Any, seed: int) -> list[str]:
    """Ops whose outputs or gradients change where final states are given back and initial states have gradients."""
    shape, bad = Shape(B=1, T=70, H=2, K=16, V=16, states=1), []
    for name, case in _SEGMENTED.items():
        made = {x: t.float() for x, t in case.make(shape, torch.Generator().manual_seed(seed)).items()}
        initial, found = 0 * made.pop("initial_state"), []
        for whole in (False, True):
            x = {name: t.clone().requires_grad_() for name, t in made.items()}
            states = {"initial_state": initial.requires_grad_(), "output_final_state": True} if whole else {}
            with poisoned(3, 2):
                o, final = case.op(**x, **states)
                loss = o.sum() + 0 * final.sum() if whole else o.sum()
                found.append([o, *torch.autograd.grad(loss, [*x.values(), *([initial] if whole else [])])[: len(x)]])
        bad += [] if all(torch.equal(a, b) for a, b in zip(*found, strict=True)) else [name]
    return bad


def test_states_that_nobody_reads_change_nothing(seed: int) -> None:
    """What the last segment adds is left out where no state leaves it."""
    (bad,) = run_ranks(_unlike, 1, seed, env=INTERPRETED)
    assert not bad


def _shard_of(sp: Any, seed: int) -> dict[str, list[torch.Tensor]]:
    """This rank's outputs and gradients of tokens, of a sequence without initial or final states."""
    lengths = [70] if sp.world_size == 1 else [31, 0, 39]
    start, found = sum(lengths[: sp.rank]), {}
    sp.set_lengths(lengths)
    for name, case in _SEGMENTED.items():
        made = case.make(Shape(B=1, T=70, H=2, K=16, V=16), torch.Generator().manual_seed(seed))
        x = {
            key: (t[:, start : start + lengths[sp.rank]] if key in case.tokens else t).float().contiguous()
            for key, t in made.items()
        }
        leaves = {key: x[key].requires_grad_() for key in case.tokens}
        with poisoned(3, 2):
            o, _ = case.op(**x, sp=sp)
            weights = torch.randn(1, 70, *o.shape[2:], generator=torch.Generator().manual_seed(seed))
            grads = torch.autograd.grad(o, [*leaves.values()], weights[:, start : start + lengths[sp.rank]].to(o))
        found[name] = [o.detach(), *grads]
    return found


def test_ranks_without_states_of_their_own(seed: int) -> None:
    """What the last segment of a rank adds is there where the next rank reads it."""
    (alone,) = run_ranks(_shard_of, 1, seed, env=INTERPRETED)
    parts = run_ranks(_shard_of, 3, seed, env=INTERPRETED)
    for name, want in alone.items():
        for n, x in enumerate(want):
            assert relative_error(torch.cat([part[name][n] for part in parts], 1), x) < 1e-5, (name, n)
