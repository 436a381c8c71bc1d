"""Over a group made with bitwise, ops have the same bits for any number of ranks: in all outputs and gradients."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from flexsp import SequenceParallel, ops
from flexsp.launch.bootstrap import init_sequence_parallel
from flexsp.testing.cases import Shape
from flexsp.testing.compare import relative_error
from flexsp.testing.ranks import RankFailure, run_ranks
from flexsp.variants import simple_gla
from tests.harness.bitwise import BOUNDS, SEGMENT, TOTAL, differing, flat, inputs_of, joined, leaf, lengths_of, run
from tests.harness.interpreted import INTERPRETED
from tests.harness.ops import ALL, PARALLEL
from tests.marks import quick, slow

CUTS = {1: ((4,),), 2: ((2, 2), (1, 3)), 4: ((1, 1, 1, 1), (2, 0, 2, 0))}  # segments of each rank
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
EXACT = 1e-10
Tensors = dict[str, torch.Tensor]
EVERY = [(name, dtype, packed) for name in ALL for dtype in DTYPES for packed in (False, True)]
QUICK = [
    ("simple_gla", torch.float32, False), ("gated_delta_rule_in_kernel", torch.bfloat16, True),
    ("mamba3", torch.float64, False), ("mlstm", torch.float64, True), ("mamba2_groups", torch.float16, False),
    ("rg_lru", torch.float64, True), ("gla", torch.float64, True),
]  # fmt: skip
IN_KERNELS = [(name, dtype) for name in ALL for dtype in DTYPES[:3]]


def on_rank(
    sp: SequenceParallel, name: str, dtype: torch.dtype, packed: bool, cuts: Any, seed: int, of_outputs: bool = False
) -> list[Any]:  # fmt: skip
    results = []
    for segments in cuts:
        lengths = lengths_of(segments)
        sp.set_lengths(lengths)
        begin = sum(lengths[: sp.rank])
        given = inputs_of(ALL[name], dtype, packed, seed)
        results.append(run(sp, ALL[name], given, begin, begin + lengths[sp.rank], of_outputs=of_outputs))
    return results


def over_ranks(
    name: str, dtype: torch.dtype, packed: bool, seed: int, cuts: dict[int, Any], **how: Any
) -> list[Tensors]:  # fmt: skip
    """Of each way to cut the sequence, what all ranks gave."""
    found = []
    for world, some in cuts.items():
        by_rank = run_ranks(on_rank, world, name, dtype, packed, some, seed, **how)
        found += [joined(ALL[name], [results[i] for results in by_rank]) for i in range(len(some))]
    return found


def seeded() -> int:
    return int(torch.randint(2**31, ()))


@pytest.mark.parametrize(("name", "dtype", "packed"), quick(EVERY, *QUICK), ids=str)
def test_bits_do_not_depend_on_ranks(name: str, dtype: torch.dtype, packed: bool) -> None:
    case, seed = ALL[name], seeded()
    given = inputs_of(case, dtype, packed, seed)
    one = run(SequenceParallel(segment=SEGMENT), case, given)
    cuts = {world: some for world, some in CUTS.items() if world > 1}
    for x in over_ranks(name, dtype, packed, seed, cuts, bitwise=SEGMENT):
        assert differing(one, x) == []
    if dtype == torch.float64:
        want = run(None, case, given)
        assert one.keys() == want.keys()
        assert {n: e for n in one if not (e := relative_error(one[n], want[n])) < EXACT} == {}


@pytest.mark.parametrize(("name", "dtype", "packed"), quick(EVERY, ("kda", torch.float64, False)), ids=str)
def test_bits_of_gradients_of_outputs_alone(name: str, dtype: torch.dtype, packed: bool) -> None:
    """Where nobody has a gradient of final states, ops add up others than where it is 0."""
    case, seed = ALL[name], seeded()
    one = run(SequenceParallel(segment=SEGMENT), case, inputs_of(case, dtype, packed, seed), of_outputs=True)
    for cut in ((2, 2), (4, 0)):
        by_rank = run_ranks(on_rank, 2, name, dtype, packed, [cut], seed, True, bitwise=SEGMENT)
        assert differing(one, joined(case, [found for (found,) in by_rank])) == []


@pytest.mark.parametrize(
    ("name", "dtype"), quick(IN_KERNELS, ("gamma", torch.bfloat16)), ids=str
)  # fmt: skip
def test_bits_of_kernels_do_not_depend_on_ranks(name: str, dtype: torch.dtype) -> None:
    """And they are as near to float64 as those of the same kernels without bitwise."""
    seed, how = seeded(), {"env": INTERPRETED, "timeout": 400.0}
    some = {1: ((4,),), 2: ((2, 2), (4, 0))}
    one, *others = over_ranks(name, dtype, False, seed, some, bitwise=SEGMENT, **how)
    for x in others:
        assert differing(one, x) == []
    (usual,) = over_ranks(name, dtype, False, seed, {1: ((4,),)}, **how)
    given = {n: wide(x) for n, x in inputs_of(ALL[name], dtype, False, seed).items()}
    exact = run(None, ALL[name], given)
    assert one.keys() == exact.keys()
    errors = {n: (relative_error(one[n].double(), x), relative_error(usual[n].double(), x)) for n, x in exact.items()}
    most = max(theirs for _, theirs in errors.values()) + torch.finfo(torch.float32).eps
    # Errors of few numbers, each a sum over all tokens, scatter. What is wrong is wrong by a tenth and more.
    assert {n: e for n, (e, _) in errors.items() if e > (2 if exact[n].numel() > 100 else 16) * most} == {}


def wide(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(wide(y) for y in x)
    return x.double() if torch.is_tensor(x) and x.is_floating_point() else x


def count_calls(sp: SequenceParallel, names: list[str]) -> list[int]:
    """How often kernels run a call of each op for all its segments at once."""
    from flexsp.kernels import segments

    counts, original = [], segments.run_in_segments

    def counted(*args: Any, **kwargs: Any) -> Any:
        counts[-1] += 1
        return original(*args, **kwargs)

    segments.run_in_segments = counted
    try:
        for name in names:
            counts.append(0)
            given = inputs_of(ALL[name], torch.bfloat16, False, 0)
            with torch.no_grad():
                ALL[name].op(**given, sp=sp)
    finally:
        segments.run_in_segments = original
    return counts


def test_kernels_run_all_segments_at_once() -> None:
    names = ["simple_gla", "delta_rule", "gated_delta_rule_in_kernel", "mlstm"]
    assert run_ranks(count_calls, 1, names, bitwise=SEGMENT, env=INTERPRETED)[0] == [1, 1, 0, 0]


def test_without_bitwise_bits_depend_on_ranks() -> None:
    """So the tests above see a difference where there is one."""
    seed = seeded()
    one = run(None, ALL["simple_gla"], inputs_of(ALL["simple_gla"], torch.float32, False, seed))
    (two,) = over_ranks("simple_gla", torch.float32, False, seed, {2: ((2, 2),)})
    assert {"o", "final 0", "dq 0", "dk 0"} <= {*differing(one, two)}


def gradients_of_a_program(sp: SequenceParallel, T: int, packed: bool, seed: int) -> Tensors:
    program = simple_gla.make(2, 6, 5, scale=1.0)
    case = ALL["simple_gla"]
    made = case.inputs(Shape(B=1, T=T, H=2, K=6, V=5), seed)
    sp.set_lengths([SEGMENT, T - SEGMENT] if sp.world_size == 2 else [T])
    mine = {n: leaf(sp.shard(x.float())) for n, x in made.items()}
    bounds = torch.tensor([0, 20, T]) if packed else None
    o, _ = program(**mine, cu_seqlens=bounds, sp=sp)
    grads = torch.autograd.grad((o * o).sum(), [*mine.values()])
    return {"o": o.detach(), **{f"d{n} 0": dx for n, dx in zip(mine, grads, strict=True)}}


@pytest.mark.parametrize("packed", [False, True])
def test_bits_of_a_program_do_not_depend_on_ranks(packed: bool) -> None:
    T, seed = 2 * SEGMENT + 5, seeded()
    one = gradients_of_a_program(SequenceParallel(segment=SEGMENT), T, packed, seed)
    two = run_ranks(gradients_of_a_program, 2, T, packed, seed, bitwise=SEGMENT)
    assert differing(one, joined(ALL["simple_gla"], two)) == []


def starts(sp: SequenceParallel, lengths: list[int]) -> None:
    q = torch.zeros(1, lengths[sp.rank], 2, 4)
    sp.set_lengths(lengths)
    ops.chunk_retention(q, q, q, sp=sp)


@pytest.mark.parametrize("lengths", [[SEGMENT - 1, SEGMENT], [SEGMENT // 2, SEGMENT // 2]])
def test_shards_are_whole_segments(lengths: list[int]) -> None:
    with pytest.raises(RankFailure, match=f"shards of whole segments of {SEGMENT} tokens.*rank 1 begins at token"):
        run_ranks(starts, 2, lengths, bitwise=SEGMENT)


def test_first_text_begins_with_a_weight_of_one() -> None:
    """Of `rg_lru`: the first token of the sequence, but not that of a later segment."""
    given = {n: x.float() for n, x in ALL["rg_lru"].inputs(Shape(B=1, T=TOTAL), seeded()).items()}
    for bounds in (None, torch.tensor(BOUNDS)):
        o, _ = ops.rg_lru(**given, unit_start=True, cu_seqlens=bounds, sp=SequenceParallel(segment=SEGMENT))
        want, _ = ops.rg_lru(**given, unit_start=True, cu_seqlens=bounds, sp=False)
        assert relative_error(o, want) < 1e-5


def test_heads_before_tokens() -> None:
    case = ALL["mlstm"]
    given = {n: x.transpose(1, 2) for n, x in case.inputs(Shape(B=1, T=TOTAL), seeded()).items()}
    o, _ = ops.chunk_mlstm(**given, head_first=True, sp=SequenceParallel(segment=SEGMENT))
    want, _ = ops.chunk_mlstm(**given, head_first=True, sp=False)
    assert relative_error(o, want) < EXACT


def test_arguments_of_one_op() -> None:
    """What one op or another takes: gates of outputs, a D of each channel, groups of B and C, and B of all tokens."""
    sp, made = SequenceParallel(segment=SEGMENT), torch.Generator().manual_seed(seeded())
    x, z = torch.randn(2, 1, TOTAL, 2, 4, generator=made, dtype=torch.float64).unbind(0)
    dt, A, D = x[..., 0].abs(), -torch.rand(2, generator=made).double(), torch.randn(2, 4, generator=made).double()
    found = [ops.mamba2_ssd(x, dt, A, z[:, :, :1], x[:, :, :1], D=D, z=z, sp=over)[0] for over in (sp, False)]
    assert relative_error(*found) < EXACT
    u, rates = x.flatten(2), -torch.rand(8, 3, generator=made).double()
    for B in (torch.randn(1, TOTAL, 2, 3, generator=made).double(), torch.randn(8, 3, generator=made).double()):
        C = torch.randn(1, TOTAL, *B.shape[2:], generator=made).double() if B.dim() == 4 else B
        found = [ops.selective_scan(u, u.abs(), rates, B, C, sp=over)[0] for over in (sp, False)]
        assert relative_error(*found) < EXACT


def test_what_cannot_keep_its_bits_says_so() -> None:
    sp = SequenceParallel(segment=SEGMENT)
    q = torch.randn(1, SEGMENT, 2, 4)
    dt, A = torch.rand(1, SEGMENT, 2), -torch.rand(2)
    runs = torch.zeros(1, SEGMENT, dtype=torch.int64)
    with pytest.raises(ValueError, match="seq_idx: expected None over ranks with bitwise"):
        ops.mamba2_ssd(q, dt, A, q[:, :, :1], q[:, :, :1], seq_idx=runs, sp=sp)


@pytest.mark.slow
def test_a_call_ends_a_graph() -> None:
    sp, q = SequenceParallel(segment=SEGMENT), torch.randn(1, TOTAL, 2, 4)

    def call(fullgraph: bool) -> Any:
        torch._dynamo.reset()
        return torch.compile(lambda q: ops.chunk_retention(q, q, q, sp=sp)[0], backend="eager", fullgraph=fullgraph)(q)

    assert torch.equal(call(False), ops.chunk_retention(q, q, q, sp=sp)[0])
    with pytest.raises(torch._dynamo.exc.Unsupported):
        call(True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bitwise": True, "schedule": "hierarchical"}, "schedule: expected 'chain' with bitwise"),
        ({"bitwise": True, "schedule": "auto"}, "schedule: expected 'chain' with bitwise"),
        ({"bitwise": 0}, "bitwise: expected an integer >= 1"),
        ({"bitwise": 1.5}, "bitwise: expected an integer >= 1"),
    ],
)
def test_bad_groups(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        init_sequence_parallel(device="cpu", **given)


def test_segments_by_default() -> None:
    assert init_sequence_parallel(device="cpu", bitwise=True).segment == 1024
    assert init_sequence_parallel(device="cpu", bitwise=256).segment == 256
    assert init_sequence_parallel(device="cpu").segment == 0


def rows_of_the_table() -> dict[str, list[str]]:
    text = (Path(__file__).resolve().parents[2] / "docs" / "same-bits.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", text, re.MULTILINE)
    return {name: [cell.strip() for cell in cells.split("|")] for name, cells in rows}


def test_the_table_has_every_op() -> None:
    """What its cells of CPUs say is tested here for every op and dtype: calls, and ranks with bitwise. Over batch it
    promises nothing."""
    table = rows_of_the_table()
    assert {*table} == PARALLEL
    on_cpu, on_gpu = "yes; optional; no", r"yes\*; optional\*; no"
    for name, cells in table.items():
        how = "at once" if getattr(ops, name).in_segments.at_once else "in turn"
        assert cells == [on_cpu, on_cpu, on_gpu, on_gpu, how]


@pytest.mark.parametrize("dtype", quick(DTYPES, torch.float32), ids=str)
def test_bits_are_the_same_from_call_to_call(dtype: torch.dtype) -> None:
    for case in ALL.values():
        given = inputs_of(case, dtype, False, seeded())
        assert differing(run(None, case, given), run(None, case, given)) == []


FEW = ["mlstm", "rg_lru", "simple_gla"]


def of_no_tokens(sp: SequenceParallel | None, names: list[str], docs: int, seed: int) -> dict[str, list[torch.Tensor]]:
    """Of each op, the gradients of its initial states where no rank has a token; zeros for ranks that give none."""
    found = {}
    for name in names:
        made = ALL[name].inputs(Shape(B=1 if docs else 2, T=0, H=2, K=6, V=5, states=docs or 2), seed)
        given = {n: leaf(x.double() if torch.is_tensor(x) and x.is_floating_point() else x) for n, x in made.items()}
        states = flat(given.get("initial_state"))
        if not states:
            continue
        others = [x for x in flat([*given.values()]) if torch.is_tensor(x) and x.requires_grad]
        if docs:
            given["cu_seqlens"] = torch.zeros(docs + 1, dtype=torch.int64)
        elif sp is not None and not sp.is_first:
            del given["initial_state"]
        o, final = ALL[name].op(**given, output_final_state=True, sp=False if sp is None else sp)
        loss = o.sum() + sum((x.sin().sum() for x in flat(final)), torch.zeros(()))
        torch.autograd.backward(loss, inputs=others)
        found[name] = [torch.zeros_like(x) if x.grad is None else x.grad for x in states]
    return found


@pytest.mark.parametrize(
    ("names", "world", "docs", "bitwise"),
    [
        *((FEW, 2, docs, SEGMENT) for docs in (0, 3)),
        *slow(*itertools.product(([*ALL],), (1, 2, 4), (0, 3), (False, SEGMENT))),
    ],
)
def test_initial_states_without_tokens(names: list[str], world: int, docs: int, bitwise: int) -> None:
    """They have the gradients that they have on one rank without bitwise, whatever the number of ranks."""
    seed = seeded()
    one = of_no_tokens(None, names, docs, seed)
    assert "mlstm" in one
    by_rank = run_ranks(of_no_tokens, world, names, docs, seed, bitwise=bitwise)
    for name, want in one.items():
        got = [sum(some[1:], some[0]) for some in zip(*(found[name] for found in by_rank), strict=True)]
        assert [relative_error(x, y) < EXACT for x, y in zip(got, want, strict=True)] == [True] * len(want), name


def test_no_token_of_mlstm_is_as_one_that_changes_nothing() -> None:
    q, states = torch.randn(1, 1, 2, 3).double(), [torch.randn(1, 2, *x).double() for x in ((3, 4), (3,), (1,))]
    grads = []
    for T in (0, 1):
        C, n, m = (leaf(x) for x in states)
        keeps, writes = torch.full((1, T, 2), 1e4).double(), torch.full((1, T, 2), -torch.inf).double()
        _, final = ops.chunk_mlstm(
            q[:, :T], q[:, :T], q[:, :T, :, :1].expand(-1, -1, -1, 4), writes, keeps, head_first=False, c_initial=C,
            n_initial=n, m_initial=m, return_last_states=True, sp=SequenceParallel(segment=SEGMENT),
        )  # fmt: skip
        grads.append(torch.autograd.grad(sum(x.sin().sum() for x in final), [C, n, m]))
    assert max(relative_error(x, y) for x, y in zip(*grads, strict=True)) < EXACT
