"""Mamba-3's own kernels: in the interpreter against the token loop, and compiled for sm_90."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

from flexsp.comm.group import SequenceParallel
from flexsp.exceptions import NotAvailable
from flexsp.ops import Mamba3State, mamba3
from flexsp.runtime.triton_private import RELEASE
from flexsp.testing.compare import check_op, relative_error
from flexsp.testing.ranks import run_ranks
from tests.harness import mamba3 as loops
from tests.harness.compiling import in_child, told_of
from tests.harness.interpreted import INTERPRETED, poisoned
from tests.marks import quick, slow

HALF = (torch.bfloat16, torch.float16)
BOUNDS = [0, 0, 1, 12, 12, 20, 29, 29]
ONE_ROW = "one row, documents", "one row, wide"  # of angles, for all heads


def turned_strides(x: Tensor) -> Tensor:
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def prepare(kind: str, seed: int) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """A case of the token loop, its arguments, and how they are compared."""
    case = "siso" if kind in ("plain", "one token", "steps of all sizes") else "siso, halves"
    case = {
        "documents": "siso, groups", "wide": "wide", "one row, wide": "wide", "long segments": "siso, groups",
        "wide values": "siso, groups",
    }.get(kind, case)  # fmt: skip
    T = {"one token": 1, "long segments": 53}.get(kind, 29)
    packed = kind in ("documents", "documents without states", "one row, documents", "wide values")
    inputs = loops.draw(case, 1 if packed else 2, T, len(BOUNDS) - 1 if packed else 2, seed)
    how: dict[str, Any] = {}
    if packed:
        inputs["cu_seqlens"] = torch.tensor(BOUNDS)
    if kind in ("documents without states", "strides"):
        del inputs["initial_state"]
        how["arrange"] = turned_strides
    if kind == "strides":
        del inputs["B_bias"], inputs["D"]
    if kind == "one head's angles":
        how["arrange"] = lambda x: x[:, :, :1].expand_as(x) if x.dim() == 4 and x.shape[-1] == 3 else x
        inputs["angles"] = inputs["angles"][:, :, :1].expand_as(inputs["angles"]).contiguous()
        del inputs["C_bias"]
    if kind in ONE_ROW:
        inputs["angles"] = inputs["angles"][:, :, :1]
    if kind == "steps of all sizes":
        for name, values in {"trap": (60.0, -60.0), "angles": (50.0, -50.0, 0.9, 1e-6), "dt": (0.0, 1e-6)}.items():
            for at, value in enumerate(values):
                inputs[name][:, at::7] = value
    return case, inputs, how


def in_kernels(sp: SequenceParallel, kind: str, dtype: torch.dtype, seed: int) -> bool:
    """Whether the kernels ran."""
    from flexsp.kernels import run
    from flexsp.kernels.mamba3 import autograd_functions as op

    loops.CASES["wide"] = 0, 1, 40, 13, False
    loops.H, loops.P = {"wide": (2, 33), "one row, wide": (3, 2), "wide values": (2, 270)}.get(kind, (4, 5))
    op._SEGMENT, op._SEGMENTS = (8, 2) if kind == "long segments" else (8, 512)
    op._ADDED = 32 if kind == "one row, wide" else 8  # blocks of two heads
    run._launches.clear()
    case, inputs, how = prepare(kind, seed)
    with poisoned(1000):
        if kind == "all in half precision":
            oracle = functools.partial(loops.oracle, rotate_pairwise=False)
            call = functools.partial(loops.call, mamba3, rotate_pairwise=False)
            check_op(call, oracle, inputs, dtype=dtype, wide=("initial_state",))
        else:
            loops.compare(mamba3, case, inputs, dtype, **how)
    shared = {launch.constants["SHARED"] for (launch,), _ in run._launches.values() if "SHARED" in launch.constants}
    assert shared == {kind == "one head's angles" or kind in ONE_ROW}
    return len({launch.kernel for (launch,), _ in run._launches.values()}) == 9


KINDS = [
    "plain", *ONE_ROW, "documents", "documents without states", "strides", "one head's angles", "one token", "wide",
    "long segments", "steps of all sizes", "all in half precision", "wide values",
]  # fmt: skip


@pytest.mark.parametrize("kind", quick(KINDS, "documents", "one row, documents"))
def test_kernels(kind: str) -> None:
    """Outputs, states and gradients. Quick only in one dtype."""
    half = random.choice(HALF)
    for dtype in [half] if kind in ("documents", "one row, documents") else [torch.float32, half]:
        assert run_ranks(in_kernels, 1, kind, dtype, random.randrange(2**31), env=INTERPRETED) == [True]


TRANSPORTS = pytest.mark.parametrize("transport", ["process_group", "posix"])


@pytest.mark.slow
@TRANSPORTS
@pytest.mark.parametrize("case", ["siso", "siso, groups", "siso, halves"])
def test_kernels_over_ranks(case: str, transport: str) -> None:
    loops.check_ranks([(case, kind, s) for kind in loops.SHARDS for s in (True, False)], torch.float32, 1e-4,
                      env=INTERPRETED, transport=transport)  # fmt: skip


@pytest.mark.parametrize("transport", [*slow("process_group"), "posix"])
def test_documents_over_ranks(transport: str) -> None:
    kinds = "documents", "documents that end with shards", "the first and last have none"
    cases = [("siso", kind, True) for kind in kinds]
    loops.check_ranks(cases, torch.float32, 1e-4, env=INTERPRETED, transport=transport)


# Parts ----------------------------------------------------------------------------------------------------------------


def tanhs(sp: SequenceParallel, seed: int) -> float:
    """The largest relative error of tanh, of small and large numbers: the turns of steps of 2."""
    from flexsp.kernels.mamba3 import autograd_functions as op

    made = torch.Generator().manual_seed(seed)
    angles = torch.randn(1, 1, 32, 64, generator=made) * 10.0 ** torch.randint(-6, 2, (1, 1, 32, 64), generator=made)
    found, last = op.turns(angles, torch.full((1, 1, 32), 0.999), None, None)  # no half turns
    want = 0.5 * angles.double().tanh() * torch.tensor(0.999).double()
    assert torch.equal(found[:, 0], last)
    return float((found / want - 1).abs().max())


def circles(sp: SequenceParallel, seed: int) -> float:
    """The largest error of sines and cosines: queries (1, 0), turned."""
    from flexsp.kernels.mamba3 import autograd_functions as op

    turns = torch.rand(1, 64, 1, 16, generator=torch.Generator().manual_seed(seed)) - 0.5
    turns[0, :, 0, 0] = torch.linspace(-0.5, 0.5, 64)
    C = torch.tensor([1.0, 0.0]).repeat(16).expand(1, 64, 1, 32)
    weights = torch.zeros(1, 64, 1)
    found = op.rows(C, C, None, None, turns, None, None, weights, weights, None, True)
    angle = 2 * torch.pi * turns.double()
    return float((found.q.view(1, 64, 1, 16, 2) - torch.stack([angle.cos(), angle.sin()], -1)).abs().max())


def sums(sp: SequenceParallel, seed: int) -> list[float]:
    """How far sums of many turns, and their gradients, are from those in float64; documents begin within segments."""
    from flexsp.kernels.mamba3 import autograd_functions as op

    op._SEGMENT, made, found = 8, torch.Generator().manual_seed(seed), []
    for packed in (False, True):
        dt = 1e4 * torch.rand(1, 50, 2, generator=made)
        initial = torch.rand(3 if packed else 1, 2, 3, generator=made).requires_grad_()
        angles = torch.full((1, 50, 2, 3), 50.0).requires_grad_()  # a tanh of 1
        starts = torch.full((50,), -1, dtype=torch.int32)
        begins = [11, 27] if packed else [0]
        if packed:
            starts[11], starts[27] = 0, 2
        got, last = op.turns(angles, dt, initial, starts if packed else None)
        dy, dlast = torch.randn(1, 50, 2, 3, generator=made), torch.randn(1, 2, 3, generator=made)
        (dinitial,) = torch.autograd.grad([got, last], initial, [dy, dlast])
        want, back = (0.5 * dt.double()).unsqueeze(-1).expand(1, 50, 2, 3).clone(), dy.double()
        back[:, -1] += dlast
        expected, ends = torch.zeros(initial.shape, dtype=torch.float64), [*begins[1:], 50]
        for n, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            at = n if not packed else int(starts[begin])
            want[:, begin] += initial.detach()[at]
            expected[at] = back[0, begin:end].sum(0)
        parts = want.tensor_split(([0] if packed else []) + begins[0 if packed else 1 :], 1)
        total = torch.cat([part.cumsum(1) for part in parts], 1)
        off = got.detach().double() - total
        found += [float((off - off.round()).abs().max()), relative_error(dinitial, expected)]
        assert got.detach().abs().max() <= 0.5 and torch.equal(got[:, -1], last)
    return found


def no_tokens() -> None:
    """States pass, as do their gradients, and gradients are 0 elsewhere."""
    inputs = loops.draw("siso", 2, 0, 2)
    states = [z.float().requires_grad_() for z in inputs.pop("initial_state")]
    leaves = {key: x.float().requires_grad_() for key, x in inputs.items()}
    y, final = mamba3(**leaves, initial_state=Mamba3State(*states), output_final_state=True)
    assert y.shape == (2, 0, 4, 5) and all(torch.equal(a, b) for a, b in zip(final, states, strict=True))
    found = torch.autograd.grad(y.sum() + sum(z.sum() for z in final), [*states, *leaves.values()])
    assert all(z.eq(1).all() for z in found[1:4]) and not any(z.any() for z in found[4:])
    assert (found[0] - 1).abs().max() < 1e-5  # of the first angles: what first and last states leave cancels


def refusals(sp: SequenceParallel, seed: int) -> None:
    inputs = {key: x for key, x in loops.draw("siso", 1, 5, 0, seed).items()}
    narrow = {key: x.float().requires_grad_() for key, x in inputs.items()}
    y, _ = mamba3(**narrow)
    (dx,) = torch.autograd.grad(y.sum(), narrow["x"], create_graph=False, retain_graph=True)
    (again,) = torch.autograd.grad(y.sum(), narrow["x"])
    assert torch.equal(dx, again)
    y, _ = mamba3(**narrow)
    with pytest.raises(NotAvailable, match="second derivatives"):
        torch.autograd.grad(y.sum(), narrow["x"], create_graph=True)
    with pytest.raises(NotAvailable, match=r"transforms of torch\.func"):
        torch.func.jvp(lambda x: mamba3(**(narrow | {"x": x}))[0], (narrow["x"],), (narrow["x"],))
    y, _ = mamba3(**narrow)
    with torch.no_grad():
        assert torch.equal(mamba3(**narrow)[0], y)
        of_one, _ = mamba3(**(narrow | {"x": narrow["x"][..., :1]}))  # channels do not act on each other
        assert relative_error(of_one, y[..., :1]) < 1e-5
    with pytest.raises(NotAvailable, match="is_grads_batched|not available"):
        torch.autograd.grad(y, narrow["x"], torch.ones(2, *y.shape), is_grads_batched=True)
    kept = torch.utils.checkpoint.checkpoint(lambda: mamba3(**narrow)[0], use_reentrant=False)
    found = [torch.autograd.grad(z.square().sum(), list(narrow.values())) for z in (mamba3(**narrow)[0], kept)]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    frozen = {key: x.detach().requires_grad_(key in ("B", "dt")) for key, x in narrow.items()}
    y, _ = mamba3(**narrow)
    want = torch.autograd.grad(y.square().sum(), [narrow["B"], narrow["dt"]])
    y, _ = mamba3(**frozen)
    got = torch.autograd.grad(y.square().sum(), [frozen["B"], frozen["dt"]])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def parts(sp: SequenceParallel, seed: int) -> None:
    loops.H, loops.P = 4, 5
    assert tanhs(sp, seed) < 3e-7
    assert circles(sp, seed) < 3e-7
    found = sums(sp, seed)
    assert max(found[::2]) < 1e-7 and max(found[1::2]) < 3e-7, found
    no_tokens()
    refusals(sp, seed)


def test_parts() -> None:
    """tanh, sines and cosines, sums of many turns, no tokens, and what is refused."""
    run_ranks(parts, 1, random.randrange(2**31), env=INTERPRETED)


def not_finite(sp: SequenceParallel, seed: int) -> None:
    """NaN in one document reaches its later tokens, and nothing of the others."""
    from flexsp.kernels.mamba3 import autograd_functions as op

    op._SEGMENT = 8
    inputs = {key: x.float() for key, x in loops.draw("siso", 1, 29, 0, seed).items()}
    inputs["angles"][0, 9] = torch.nan
    leaves = {key: x.requires_grad_() for key, x in inputs.items()}
    with poisoned(1000):
        y, _ = mamba3(**leaves, cu_seqlens=torch.tensor([0, 5, 16, 29]))
        dangles, dB = torch.autograd.grad(y[:, 16:].sum() + y[:, :5].sum(), [leaves["angles"], leaves["B"]])
    assert y[:, 9:16].isnan().all() and y[:, :5].isfinite().all() and y[:, 16:].isfinite().all()
    assert all(x[:, part].isfinite().all() for x in (dangles, dB) for part in (slice(5), slice(16, 29)))


def test_what_is_not_finite_stays_in_its_document() -> None:
    run_ranks(not_finite, 1, random.randrange(2**31), env=INTERPRETED)


def in_a_graph(sp: SequenceParallel, seed: int) -> None:
    """torch.compile breaks the op nowhere, and gives the same, from PyTorch."""
    inputs = {key: x.float() for key, x in loops.draw("siso", 2, 21, 0, seed).items()}
    inputs = {key: x.requires_grad_() for key, x in inputs.items()}

    def call(**given: Tensor) -> Tensor:
        return mamba3(**given)[0].square().sum()

    want = torch.autograd.grad(call(**inputs), list(inputs.values()))
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for a, b in zip(torch.autograd.grad(compiled(**inputs), list(inputs.values())), want, strict=True):
        assert relative_error(a, b) < 1e-5


@pytest.mark.slow
def test_one_graph() -> None:
    run_ranks(in_a_graph, 1, random.randrange(2**31), env=INTERPRETED)


# Launches -------------------------------------------------------------------------------------------------------------


def unaligned(x: Tensor) -> Tensor:
    return torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], set[str]]] = {
    "nothing": (lambda x: {}, set()),
    "strides of C": (
        lambda x: {"C": x["C"].transpose(1, 2).contiguous().transpose(1, 2)}, {"rows_kernel", "rows_grad_kernel"},
    ),
    "alignment of B": (lambda x: {"B": unaligned(x["B"])}, {"rows_kernel", "rows_grad_kernel"}),
    "no bias": (lambda x: {"B_bias": None}, {"rows_kernel", "rows_grad_kernel"}),
    "no skip": (lambda x: {"D": None}, {"rows_kernel"}),
    "pairs": (lambda x: {"pairwise": False}, {"rows_kernel", "rows_grad_kernel"}),
    "sums that arrived": (lambda x: {"arrived": torch.zeros(1, 4, 2)}, {"rows_kernel", "rows_grad_kernel"}),
}  # fmt: skip
"""What a second call differs in, and for which kernels launches are worked out for it."""


@pytest.mark.parametrize("change", CHANGES)
def test_what_tells_launches_apart(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from flexsp.kernels import run
    from flexsp.kernels.mamba3 import autograd_functions as op

    monkeypatch.setattr(run, "run_steps", lambda *args: None)  # no kernel runs
    monkeypatch.setattr(run, "_launches", {})

    def call(pairwise: bool = True, **given: Any) -> None:
        leaves = {key: None if x is None else x.detach().requires_grad_() for key, x in given.items()}
        found = op.rows(**leaves, until=None, pairwise=pairwise)
        torch.autograd.backward([*found], [torch.zeros_like(z) for z in found])

    def worked_out() -> list[str]:
        return sorted(launch.kernel.__name__ for (launch,), _ in run._launches.values())

    sizes = {"B": (1, 6, 2, 8), "C": (1, 6, 2, 8), "B_bias": (4, 8), "C_bias": (4, 8), "D": (4,),
             "turned": (1, 6, 4, 2), "gamma": (1, 6, 4), "eta": (1, 6, 4)}  # fmt: skip
    given: dict[str, Any] = {key: torch.zeros(size) for key, size in sizes.items()} | {"arrived": None}
    call(**given)
    first = worked_out()
    assert first == ["rows_grad_kernel", "rows_grad_kernel", "rows_kernel"]  # of pairs that turn, and of others
    make, more = CHANGES[change]
    call(**(given | make(given)))
    assert sorted([*first, *(name for name in first if name in more)]) == worked_out()


# Compiled for sm_90 ---------------------------------------------------------------------------------------------------

CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one row of angles": {"angles": "one row"},
    "one row of angles, few heads": {"H": 8, "K": 64, "S": 16, "angles": "one row"},
    "packed, over ranks": {"docs": 4, "ranks": True, "pairwise": False, "angles": "of heads"},
    "fp32": {"dtype": "float32"},
    "large heads": {"K": 256, "S": 128}, "small heads": {"K": 64, "S": 32}, "smaller heads": {"K": 32, "S": 8},
    "odd sizes": {"T": 99, "H": 6, "G": 2, "K": 7, "S": 3, "dtype": "float16"},
}
NAMES = ["steps", "turn_sums", "turn_scan", "turns", "rows", "rows_grad", "turn_grad_sums", "turn_scan", "turns_grad",
         "steps_grad"]  # fmt: skip


def compile_config(
    dtype: str = "bfloat16", T: int = 65536, H: int = 32, G: int = 1, K: int = 128, S: int = 32,
    docs: int = 0, ranks: bool = False, pairwise: bool = True, angles: str = "of one head",
) -> list[dict[str, Any]]:  # fmt: skip
    """In a child process: a forward and backward pass on meta tensors, every launch compiled."""
    from flexsp.kernels.mamba3 import autograd_functions as op
    from flexsp.testing.offline import record_launches

    def meta(*size: int, kind: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=kind, device="meta", requires_grad=kind.is_floating_point)

    of, tokens = getattr(torch, dtype), (1, T, H)
    starts = meta(T, kind=torch.int32) if docs else None
    arrived, until = meta(1, H, S) if ranks else None, meta(kind=torch.int64) if ranks and docs else None
    with record_launches() as launches:
        gate, gamma, eta = op.steps(*(meta(*tokens) for _ in range(3)))
        given = meta(1, T, H if angles == "of heads" else 1, S)
        given = given.expand(1, T, H, S) if angles == "of one head" else given
        turned, last = op.turns(given, meta(*tokens), meta(docs or 1, H, S), starts)
        rows = op.rows(
            *(meta(1, T, G, K, kind=of) for _ in range(2)), meta(H, K), meta(H, K), turned, arrived, until,
            gamma, eta, meta(H), pairwise,
        )  # fmt: skip
        found = *rows, last, gate
        torch.autograd.backward(found, [x.detach() for x in found])
    return told_of(launches)


@functools.cache
def compiled(name: str) -> list[dict[str, Any]]:
    return in_child(functools.partial(compile_config, **CONFIGS[name]))


@pytest.mark.compiles(always=True)
@pytest.mark.parametrize("name", slow(*CONFIGS))
def test_what_the_interpreter_cannot_show(name: str) -> None:
    """The wait for the kernel before comes first; no NaN that gives way to a number, no missing barriers, no registers
    that nothing wrote, no lanes that round a sum differently, no spills."""
    kernels = compiled(name)
    names = [kernel["name"].removesuffix("_kernel") for kernel in kernels]
    of_all = {"small heads", "large heads", "odd sizes"}
    # Else once more, for pairs that do not turn.
    assert names == (NAMES if name in of_all else [*NAMES[:5], "rows_grad", *NAMES[5:]])
    for kernel in kernels:
        assert kernel["waits_first"], kernel
        assert not any(kernel[what] for what in ("uneven_sums", "drops_nan", "races", "unwritten")), kernel
        assert RELEASE != (3, 6) or not kernel["stack"], kernel
