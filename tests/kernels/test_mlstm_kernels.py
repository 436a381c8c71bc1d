"""The kernels around mLSTM's engine, in Triton's interpreter: gates, quotients; and the operator."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from flexsp import ops
from flexsp.comm.group import SequenceParallel
from flexsp.devices import H200, planned_for
from flexsp.kernels.mlstm import in_pytorch
from flexsp.ops import mlstm
from flexsp.scan import maxima
from flexsp.scan.by_kernel import goes_by_kernel
from flexsp.scan.transitions import Transition
from flexsp.testing.bounds import within_tensors
from flexsp.testing.compare import check_op, relative_error
from flexsp.testing.offline import compile_launches, record_launches
from flexsp.testing.ranks import run_ranks
from tests.harness import mlstm as whole
from tests.harness.interpreted import INTERPRETED
from tests.marks import quick

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def within(sp: SequenceParallel, function: Any, *args: Any) -> Any:
    with within_tensors():
        return function(sp, *args)


def in_kernels(function: Any, *args: Any, ranks: int = 1) -> list[Any]:
    """Which stay within their tensors."""
    return run_ranks(within, ranks, function, *args, env=INTERPRETED)


def gate_inputs(T: int, H: int, B: int, dtype: torch.dtype, made: torch.Generator) -> tuple[Tensor, Tensor]:
    """Gates behind strides, some of them far out."""
    f, i = (torch.randn(H, T, B, generator=made).permute(2, 1, 0) for _ in range(2))
    f = 3 + 2 * f
    some = torch.rand(B, T, H, generator=made)
    f = torch.where(some < 0.05, -1e8, torch.where(some > 0.95, 50.0, f))
    return f.to(dtype), torch.where(some.roll(1, 1) < 0.05, -torch.inf, 3 * i).to(dtype)


def differences(sp: SequenceParallel, seed: int, T: int, H: int, B: int, dtype: torch.dtype, cu: Any) -> list[float]:
    """Between the gates of kernels and of PyTorch: log_forget, m, final m, weights and their logarithms where they
    count, and the gradients of f and of i, of all gates and of each alone."""
    made = torch.Generator().manual_seed(seed)
    f, i = gate_inputs(T, H, B, dtype, made)
    N = B if cu is None else len(cu) - 1
    start = torch.randn(N, H, generator=made) if T % 2 else None
    bounds, grads = None if cu is None else torch.tensor(cu), torch.randn(3, B, T, H, generator=made)
    found = []
    for make in (mlstm._stabilised, mlstm._stabilised_in_kernels):
        leaves = [x.detach().requires_grad_() for x in (f, i)]
        got, final = make(f, leaves[1], leaves[0], start, N, bounds, None, True)
        wide = got[:3]
        assert not got.m.requires_grad and all(x.dtype == torch.float32 for x in wide)
        of = [torch.autograd.grad(wide, leaves, [*grads], retain_graph=True)]
        how = {"retain_graph": True, "materialize_grads": True}
        of += [torch.autograd.grad([wide[n]], leaves, [grads[n]], **how) for n in range(3)]
        seen = got.log_weight.clamp(min=-100.0)  # less is the weight 0, whatever it is
        found.append([got.log_forget, got.m, final, got.weight, seen, *(x for each in of for x in each)])
    return [(x.double() - y.double()).abs().max().item() if x.numel() else 0.0 for x, y in zip(*found, strict=True)]


SHAPES = [(70, 3, 2, None), (129, 20, 1, None), (0, 2, 2, None), (1, 1, 1, None),
          (261, 5, 1, [0, 0, 37, 128, 128, 129, 261, 261])]  # fmt: skip


@pytest.mark.parametrize("dtype", quick(DTYPES, torch.float32))
@pytest.mark.parametrize(("T", "H", "B", "cu"), SHAPES)
def test_gates(T: int, H: int, B: int, cu: list[int] | None, dtype: torch.dtype) -> None:
    (found,) = in_kernels(differences, random.randrange(2**31), T, H, B, dtype, cu)
    assert found[0] < 1e-5 and found[1] < 1e-8 and found[2] < 1e-8 and max(found[3:5]) < 1e-5, found
    assert max(found[5:]) < 16 * torch.finfo(dtype).eps, found


@pytest.mark.slow
def test_gates_of_more_blocks_than_are_put_together_at_once() -> None:
    (found,) = in_kernels(differences, random.randrange(2**31), 128 * 260 + 5, 1, 1, torch.float32, None)
    assert found[0] < 1e-4 and found[1] < 1e-6, found


def not_finite(sp: SequenceParallel, value: float, name: str) -> list[bool]:
    """Whether a number of the second document leaves the others' gates as they are, and whether it shows."""
    made = torch.Generator().manual_seed(1)
    gates = dict(zip("fi", torch.randn(2, 1, 300, 2, generator=made).unbind(0), strict=True))
    bounds, found = torch.tensor([0, 100, 200, 300]), []
    for wrong in (False, True):
        given = {key: x.clone() for key, x in gates.items()}
        if wrong:
            given[name][0, 150, 1] = value
        got, last = mlstm._stabilised_in_kernels(given["f"], given["i"], given["f"], None, 3, bounds, None, True)
        found.append([got.log_forget, got.m, last])
    (forget, m, final), (wrong_forget, wrong_m, wrong_final) = found
    outside = torch.ones(300, dtype=torch.bool)
    outside[150:200] = False
    same = torch.equal(forget[:, outside], wrong_forget[:, outside]) and torch.equal(m[:, outside], wrong_m[:, outside])
    return [same, torch.equal(final[[0, 2]], wrong_final[[0, 2]]), not bool(wrong_m[0, 150:200, 1].isfinite().any())]


@pytest.mark.parametrize(
    ("value", "name"), quick([(torch.nan, "f"), (torch.nan, "i"), (torch.inf, "i")], (torch.nan, "f"))
)
def test_what_is_not_finite_stays_in_its_document(value: float, name: str) -> None:
    assert in_kernels(not_finite, value, name) == [[True, True, True]]


def rows_apart(sp: SequenceParallel, seed: int, dtype: torch.dtype) -> list[float]:
    """Quotients of kernels and of float64, and their gradients."""
    from flexsp.kernels.mlstm import rows

    made, found = torch.Generator().manual_seed(seed), []

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made)

    for B, T, H, N in ((2, 9, 3, 20), (1, 5, 2, 256), (1, 3, 1, 1)):
        dy = normal(B, T, H, N).to(dtype)
        n, d = normal(B, H, T, N).to(dtype).transpose(1, 2), (2 * normal(B, H, T, 1)).to(dtype).transpose(1, 2)
        m = 2 * normal(B, T, H).double()
        for eps in (0.0, 0.25):
            leaves, exact = ([x.detach().to(kind).requires_grad_() for x in (n, d)] for kind in (dtype, torch.float64))
            got, want = rows.quotients(*leaves, m, eps, dtype), in_pytorch.quotients(*exact, m, eps, torch.float64)
            grads, exact_grads = (
                torch.autograd.grad(got, leaves, dy),
                torch.autograd.grad(want, exact, dy.double()),
            )
            found += [relative_error(a, b) for a, b in zip((got, *grads), (want, *exact_grads), strict=True)]
    return found


def quotients_of_nan(sp: SequenceParallel) -> list[list[bool]]:
    """Which outputs and gradients are NaN where a numerator, a normaliser or a maximum is: of kernels and PyTorch."""
    from flexsp.kernels.mlstm import rows

    found = []
    for divided in (rows.quotients, in_pytorch.quotients):
        n, d, m = torch.ones(1, 4, 1, 2), torch.ones(1, 4, 1, 1), torch.zeros(1, 4, 1, dtype=torch.float64)
        n[0, 1, 0, 0], d[0, 2], m[0, 3] = torch.nan, torch.nan, torch.nan
        leaves = [n.requires_grad_(), d.requires_grad_()]
        y = divided(*leaves, m, 0, torch.float32)
        grads = torch.autograd.grad(y, leaves, torch.ones_like(y))
        found.append([bool(x) for each in (y, *grads) for x in each.isnan().flatten()])
    return found


def test_quotients_of_nan() -> None:
    ((kernels, pytorch),) = in_kernels(quotients_of_nan)
    assert kernels == pytorch and any(kernels) and not all(kernels)


@pytest.mark.parametrize("dtype", quick(DTYPES, torch.bfloat16))
def test_rows(dtype: torch.dtype) -> None:
    (found,) = in_kernels(rows_apart, random.randrange(2**31), dtype)
    assert len(found) == 3 * 6 and max(found) < 6 * torch.finfo(dtype).eps, max(found)


def operator(sp: SequenceParallel, seed: int, dtype: torch.dtype, packed: bool, K: int, V: int) -> int:
    """Compares with the token loop; how many kernels of mLSTM were launched, of each one."""
    from flexsp.kernels import run

    run._launches.clear()
    inputs = whole.conditioned(whole.draw(1 if packed else 2, 150, 6 if packed else 2, K, V, seed), dtype)
    inputs |= {"cu_seqlens": torch.tensor([0, 37, 37, 101, 101, 150, 150])} if packed else {}
    check_op(whole.chunk, whole.oracle, inputs, dtype=dtype, wide=whole.KEPT_WIDE)
    return len({launch.kernel.__name__ for launches, _ in run._launches.values() for launch in launches})


@pytest.mark.parametrize("dtype", quick(DTYPES, torch.float32))
@pytest.mark.parametrize(("packed", "K", "V"), [(False, 20, 7), (True, 16, 16)])
def test_against_the_token_loop(packed: bool, K: int, V: int, dtype: torch.dtype) -> None:
    assert in_kernels(operator, random.randrange(2**31), dtype, packed, K, V) == [5]


def denominators(sp: SequenceParallel, seed: int, packed: bool) -> list[float]:
    """Errors of outputs and final states of one column, values in float32 beside queries and keys in bfloat16, and of
    their gradients; of packed tokens with write gates."""
    from flexsp.kernels.diagonal.op import diagonal

    made = torch.Generator().manual_seed(seed)
    bounds, N = (torch.tensor([0, 37, 37, 101, 150]), 4) if packed else (None, 1)
    q, k = torch.randn(2, 1, 150, 2, 20, generator=made).bfloat16()
    w, f = torch.rand(1, 150, 2, 1, generator=made), -0.2 * torch.rand(1, 150, 2, generator=made)
    f[:, 70] = -1e4
    i = (f * 5 + torch.rand(f.shape, generator=made)).masked_fill(f < -0.18, -torch.inf)
    state, found = torch.randn(N, 2, 20, 1, generator=made), []
    do, dlast = torch.randn(1, 150, 2, 1, generator=made), torch.randn(N, 2, 20, 1, generator=made)
    for exact in (False, True):
        leaves = [x.detach().to(torch.float64 if exact else x.dtype).requires_grad_() for x in (q, k, w, f, state)]
        writes = {"i": i.to(leaves[3]).detach().requires_grad_()} if packed else {}
        with planned_for(dataclasses.replace(H200, programs=4)):  # two segments, the first of several chunks
            o, last = diagonal(
                *leaves[:4], **writes, scale=0.3, initial_state=leaves[4], output_final_state=True, cu_seqlens=bounds
            )  # fmt: skip
        assert exact or o.dtype == torch.float32
        leaves += writes.values()
        grads = torch.autograd.grad([o, last], leaves, [do.to(o), dlast.to(o)])
        assert all(x.dtype == y.dtype for x, y in zip(grads, leaves, strict=True))
        found.append([o, last, *grads])
    return [relative_error(x, y) for x, y in zip(*found, strict=True)]


@pytest.mark.parametrize("packed", [False, True])
def test_denominators_are_exact(packed: bool) -> None:
    """Where they cross what is divided by at least, gradients jump: so nothing is rounded to bfloat16 on the way."""
    (found,) = in_kernels(denominators, random.randrange(2**31), packed)
    assert max(found[:2]) < 1e-5 and max(found[2:]) < 2e-2, found


def gates_over_ranks(sp: SequenceParallel, seed: int, cu: list[int] | None) -> list[Tensor]:
    made = torch.Generator().manual_seed(seed)
    f, i = (x[:1] for x in gate_inputs(150, 3, 1, torch.float32, made))
    N = 1 if cu is None else len(cu) - 1
    start = torch.randn(N, 3, generator=made)
    lengths = [61, 0, 64, 25][: sp.world_size] if sp.world_size > 1 else [150]
    at = slice(sum(lengths[: sp.rank]), sum(lengths[: sp.rank + 1]))
    sp.set_lengths(lengths)
    given = start if cu is not None or sp.rank == 0 else None
    bounds = None if cu is None else torch.tensor(cu)
    got, _ = mlstm._stabilised_in_kernels(f, i[:, at], f[:, at], given, N, bounds, sp, True)
    return [got.log_forget, got.m]


@pytest.mark.parametrize("cu", [None, [0, 0, 70, 70, 120, 150]])
def test_ranks(cu: list[int] | None) -> None:
    """Gates of an empty shard, of shards within a document, and of what enters the first rank."""
    seed = random.randrange(2**31)
    (alone,) = in_kernels(gates_over_ranks, seed, cu)
    parts = in_kernels(gates_over_ranks, seed, cu, ranks=4)
    for n, want in enumerate(alone):
        assert (torch.cat([part[n] for part in parts], 1) - want).abs().max() < 1e-5


NUMBERS = [0.0, -0.0, 1.5, -1e300, 5e-324, math.inf, -math.inf, math.nan, -745.133, 2**-1050]


@triton.jit
def push_bytes(there, stage, offsets, tile, mask, flag, value, nbytes, pe):
    """As `push_store`, but it sends `nbytes` and no more, as a put does."""
    sent = offsets < nbytes // (there.dtype.element_ty.primitive_bitwidth // 8)
    tl.store(there + offsets, tile, mask=mask & sent)
    tl.debug_barrier()
    tl.atomic_xchg(flag, value, sem="release", scope="sys")


def entering(sp: SequenceParallel, a: Tensor, c: Tensor, start: Tensor, cut: Tensor) -> tuple[Tensor, bool]:
    """What enters this rank, and whether the kernel of the scan sent it."""
    through = Transition("max-plus", a[sp.rank])
    if sp.heap is not None:
        from flexsp.scan import propagate

        sp.channels["propagate"] = dataclasses.replace(propagate._channel(sp), push=push_bytes)
    mine = start if sp.is_first else torch.full_like(start, math.nan)
    arrived = maxima.enters(a[sp.rank], c[sp.rank], mine, cut[sp.rank], sp, "a test")
    return arrived, goes_by_kernel(c[sp.rank], through, sp)


@pytest.mark.parametrize("transport", ["posix", "process_group"])
def test_what_enters_ranks_is_exact(transport: str) -> None:
    """Whatever the numbers are, in float64; a document that begins lets nothing pass."""
    numbers = torch.tensor(random.choices(NUMBERS, k=2 * 4 * 2 * 2090), dtype=torch.float64)
    a, c = numbers.view(2, 4, 2, 2090).unbind(0)
    a, start = torch.where(a.abs() == math.inf, -0.3, a), torch.randn(2, 2090, dtype=torch.float64)
    cut = torch.tensor([[0, 1], [0, 0], [1, 0], [0, 0]], dtype=torch.bool)
    a[cut] = -math.inf  # as kernels of gates have it
    heap = {"heap_mib": 1, "fresh_sp": True} if transport == "posix" else {}
    m, found = start, run_ranks(entering, 4, a, c, start, cut, transport=transport, env=INTERPRETED, **heap)
    for r, (got, by_kernel) in enumerate(found):
        assert by_kernel == (transport == "posix")
        torch.testing.assert_close(got, m, rtol=0, atol=0, equal_nan=True)
        m = torch.where(cut[r].unsqueeze(-1), c[r], torch.maximum(a[r] + m, c[r]))


def twice(sp: SequenceParallel, seed: int) -> bool:
    """Whether two backward passes of one graph give the same, after memory was full of NaN."""
    inputs = whole.with_gradients({key: x.float() for key, x in whole.draw(1, 90, 0, 16, 16, seed).items()})
    h, _ = ops.chunk_mlstm(**inputs, head_first=False)
    leaves, dh = list(inputs.values()), torch.randn_like(h)
    first = torch.autograd.grad(h, leaves, dh, retain_graph=True)
    del first
    again = [torch.autograd.grad(h, leaves, dh, retain_graph=True) for _ in range(2)]
    return all(torch.equal(a, b) and bool(a.isfinite().all()) for a, b in zip(*again, strict=True))


def test_two_backward_passes() -> None:
    assert in_kernels(twice, random.randrange(2**31)) == [True]


@functools.cache
def launched() -> list[Any]:
    """All kernels, as they are launched in training of packed documents."""
    from flexsp.kernels.mlstm import gates, rows

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta").requires_grad_(dtype.is_floating_point)

    f, i, v = meta(1, 8192, 32), meta(1, 8192, 32), meta(1, 8192, 32, 256)
    starts = gates.Starts(
        meta(8192, dtype=torch.int64),
        meta(8192, dtype=torch.bool),
        torch.empty(3, 32, dtype=torch.float64, device="meta"),
    )
    with record_launches() as found:
        blocks = gates.blocks(f.detach(), i.detach(), starts)
        made = gates.gates(f, i, starts, blocks.before, torch.empty(1, 32, dtype=torch.float64, device="meta"))
        h = rows.quotients(v, made.weight.unsqueeze(-1), made.m, 0.0, torch.bfloat16)
        h.backward(torch.empty_like(h))
    assert len(found) == 5
    return found


@pytest.mark.compiles(always=True)
@pytest.mark.slow
def test_compiles_without_spills() -> None:
    for kernel in compile_launches(launched()):
        assert kernel.spills == 0 and kernel.waits_first and not kernel.races and not kernel.uneven_sums, kernel.name
