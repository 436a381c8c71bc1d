"""Gradients of what `feature_map.rope` adds to angles by data, token by token and summed up, against a float64 loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import normalize

from flexsp.testing.compare import relative_error
from flexsp.testing.ranks import run_ranks
from tests.harness.compiling import in_child, told_of
from tests.harness.interpreted import INTERPRETED, poisoned
from tests.harness.rope import COMPILED, MODELS, Case, H, Tensors, errors
from tests.marks import quick, slow

QUICK = "rows, trapezoid", "delta, steps", "delta, mask", "difference", "contrastive"


@pytest.mark.parametrize("name", quick(MODELS, *QUICK))
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_against_the_loop(name: str, packed: bool, seed: int) -> None:
    """All gradients in float64, of several chunks, with first and last states, documents, and tokens behind them."""
    case = Case(name, 150, seed, [0, 0, 70, 71, 71, 141] if packed else None)
    found, want = case.found(torch.float64), case.exact()
    errors = {key: relative_error(found[key], want[key]) for key in want}
    assert max(errors.values()) < 1e-10, errors


@pytest.mark.parametrize(
    ("name", "T"),
    quick([*((x, 2048) for x in MODELS), *((x, 16384) for x in ("delta", "mask", "one step", "delta rows"))],
          ("delta", 2048), ("one step", 2048), ("delta rows", 2048)),
)  # fmt: skip
def test_nothing_adds_up_over_long_texts(name: str, T: int, seed: int) -> None:
    """Of rotated rows and a sum over all later tokens, errors of sums over tokens grew with the text: of the delta rule
    with such gates 6e-4 at 2,048 tokens and 4e-3 at 16,384, of one step 2e-4 and 1e-3. They are those of a chunk now,
    at any length."""
    case = Case(name, T, seed, strong=True)
    of_tokens, of_sums = errors(case.found()["theta"], case.exact()["theta"])
    assert of_tokens < 1e-5 and of_sums < 1e-4, (of_tokens, of_sums)


def in_kernels(sp: Any, name: str, bounds: list[int] | None, seed: int) -> dict[str, float]:
    case = Case(name, 90, seed, bounds)
    with poisoned(2, H):
        found = case.found(torch.float32)
    want = case.exact()
    return {key: relative_error(found[key], want[key]) for key in want}


@pytest.mark.parametrize(
    ("name", "bounds"),
    quick([(x, b) for x in COMPILED for b in (None, [0, 0, 40, 41, 41, 85])], ("delta", None),
          ("difference", [0, 0, 40, 41, 41, 85])),
)  # fmt: skip
def test_in_kernels(name: str, bounds: list[int] | None, seed: int) -> None:
    (found,) = run_ranks(in_kernels, 1, name, bounds, seed, env=INTERPRETED, timeout=300)
    assert max(found.values()) < 2e-5, found


def of_sizes(sp: Any, K: int, V: int, seed: int) -> float:
    """Of the delta rule, against PyTorch in float64."""
    made = torch.Generator().manual_seed(seed)
    widths = {"q": K, "k": K, "v": V, "theta": K // 2}
    x = {name: torch.randn(1, 40, 2, n, generator=made) for name, n in widths.items()}
    x |= {"k": normalize(x["k"], dim=-1), "beta": torch.rand(1, 40, 2, generator=made)}
    do, found = torch.randn(1, 40, 2, V, generator=made), []
    for dtype in (torch.float32, torch.float64):
        leaves = {name: y.to(dtype).requires_grad_() for name, y in x.items()}
        with poisoned(2, H):
            o, final = MODELS["delta, no decay"](**leaves, output_final_state=True, sp=False)
            loss = (o.double() * do).sum() + final.double().square().sum()
            found.append(torch.autograd.grad(loss, leaves["theta"])[0].double())
    return relative_error(*found)


def test_sizes(seed: int) -> None:
    """Pairs in two programs, one of which has others beside it, and columns in two tiles."""
    (found,) = run_ranks(of_sizes, 1, 44, 70, seed, env=INTERPRETED, timeout=300)
    assert found < 2e-5


def over_ranks(sp: Any, name: str, bounds: list[int] | None, lengths: list[int], exact: bool, seed: int) -> Any:
    case = Case(name, sum(lengths), seed, bounds)
    if exact:
        found = case.found(torch.float64, lengths, sp)
    else:
        with poisoned(2, H):
            found = case.found(torch.float32, lengths, sp)
    parts: list[Any] = [None] * sp.world_size
    dist.all_gather_object(parts, found)
    want = case.exact()
    whole: Tensors = {}
    for key in want:
        each = [y[key] for y in parts]
        whole[key] = torch.stack(each).sum(0) if key in ("A", "mimo_x", "start") else torch.cat(each, 1)
    return {key: relative_error(whole[key], want[key]) for key in want}


@pytest.mark.parametrize("name", quick(MODELS, "rows, trapezoid", "delta", "mask", "difference"))
@pytest.mark.parametrize("bounds", [None, [0, 20, 130, 148]], ids=["batch", "packed"])
def test_over_ranks(name: str, bounds: list[int] | None, seed: int) -> None:
    """One rank has no tokens, another fewer than a chunk."""
    for found in run_ranks(over_ranks, 4, name, bounds, [75, 0, 5, 70], True, seed):
        assert max(found.values()) < 1e-10, found


@pytest.mark.parametrize(
    ("name", "bounds"),
    quick([(x, b) for x in COMPILED for b in (None, [0, 10, 60, 77])], ("delta", [0, 10, 60, 77])),
)  # fmt: skip
def test_over_ranks_in_kernels(name: str, bounds: list[int] | None, seed: int) -> None:
    ranks = run_ranks(
        over_ranks, 2, name, bounds, [40, 40], False, seed, env=INTERPRETED, transport="posix", heap_mib=8, timeout=400
    )
    for found in ranks:
        assert max(found.values()) < 2e-5, found


def compile_config(name: str, n: int, n_docs: int, ranks: bool) -> list[dict[str, Any]]:
    """In a child process: of heads of n x n a forward and backward pass on meta tensors, every launch compiled."""
    from flexsp.comm.group import SequenceParallel
    from flexsp.comm.heap import SymmetricHeap
    from flexsp.compiler import dispatch
    from flexsp.compiler.backend.generated_kernels import Generated
    from flexsp.grammar import programs
    from flexsp.kernels import operators
    from flexsp.testing.offline import record_launches

    length, heads = 4096, 8
    operators.chunk_table = lambda *args: torch.empty(1, dtype=torch.int32, device="meta")  # type: ignore[assignment]
    code = Generated(getattr(programs, name)(heads, n, n, 1.0, ("g", "theta")).program)
    sizes = {"K": n, "V": n, "P": n // 2}
    given = {
        key: torch.empty(1, length, heads, *(sizes[s.name] for s in x.shape[2:]), device="meta", requires_grad=True)
        for key, x in code.program.meta.tokens.items()
    }
    bounds = torch.empty(n_docs + 1, dtype=torch.int64, device="meta") if n_docs else None
    sp = None
    if ranks:
        arena = torch.empty(64 << 20, dtype=torch.uint8, device="meta")
        sp = SequenceParallel(
            rank=2, world_size=3, device="meta", transport="peer", heap=SymmetricHeap(arena, [arena] * 3)
        )
    with record_launches() as launches:
        executable = dispatch.executable_of(code, given, None, bounds, sp)
        o, final = operators.run(executable, None, [*given.values()], None, bounds, (0, length, length))
        torch.autograd.backward([o, final], [torch.empty_like(o), torch.empty_like(final)])
    return told_of([x for x in launches if x[0].fn.__module__ == "flexsp.kernels.angles"])


@pytest.mark.compiles(always=True)
@pytest.mark.parametrize(
    ("name", "n", "n_docs", "ranks"),
    slow(("delta", 64, 0, False), ("general_delta", 128, 4, True), ("linear", 40, 4, False)),
)  # fmt: skip
def test_what_the_interpreter_cannot_show(name: str, n: int, n_docs: int, ranks: bool) -> None:
    """The wait for the kernel before comes first; no lanes that round a sum differently, no NaN that gives way to a
    number, no missing barriers, no registers that nothing wrote; nothing on the stack."""
    (found,) = in_child(compile_config, name, n, n_docs, ranks)
    assert found["waits_first"] and not found["stack"], found
    assert not any(found[what] for what in ("uneven_sums", "drops_nan", "races", "unwritten")), found
