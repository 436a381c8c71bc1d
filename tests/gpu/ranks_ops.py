"""Sequence-parallel ops against one rank, over every transport. Run by torchrun, not by pytest:

    torchrun --standalone --nproc-per-node 4 tests/gpu/ranks_ops.py [--transports peer,put,process_group] [--only NAME]
        [--schedule NAME]

Every rank runs every check, which fails if it fails on any rank. Prints one line a check; exit status 1 if one failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from flexsp import SequenceParallel, init_sequence_parallel
from flexsp.exceptions import NotAvailable, PeerMismatch, PeerTimeout
from flexsp.ops import chunk_simple_gla
from flexsp.testing.problems import OPS, Problem, check, draw, exact_answers, merge, solve

# A check returns what is wrong. It raises only where that cannot leave another rank waiting for a call.
Check = Callable[[SequenceParallel], "list[str] | None"]
SHORT_S = 6.0
LONG_S = 60.0


def gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def uneven(sp: SequenceParallel, unit: int) -> list[int]:
    """Lengths of about `unit`: one shard empty, one of a single token, the others odd, in a random common order."""
    lengths = [unit, 0, 1, unit // 2 + 3, unit + 17, 64, unit - 5, 128][: max(sp.world_size, 2)]
    if sp.world_size == 2:
        lengths = [unit, unit // 2 + 3]
    order = torch.randperm(sp.world_size, generator=torch.Generator().manual_seed(unit)).tolist()
    return [lengths[i] for i in order]


class Case(NamedTuple):
    """A problem that every rank draws alike."""

    op: str
    dtype: torch.dtype
    lengths: list[int]
    B: int = 1
    H: int = 2
    documents: list[int] | None = None
    seed: int = 0
    K: int = 64
    V: int = 64

    @property
    def key(self) -> tuple[Any, ...]:
        return self.op, self.dtype, sum(self.lengths), self.B, self.H, str(self.documents), self.seed, self.K, self.V

    def drawn(self) -> Problem:
        shape: dict[str, Any] = {"B": self.B, "T": sum(self.lengths), "H": self.H, "K": self.K, "V": self.V}
        return draw(self.op, **shape, documents=self.documents, seed=self.seed).rounded(self.dtype)


# By key: a check's problems are the same over every transport, and the token loop takes longest.
_oracles: dict[tuple[Any, ...], list[dict[str, torch.Tensor]]] = {}


def oracle_of(case: Case, problem: Problem, device: torch.device) -> list[dict[str, torch.Tensor]]:
    if case.key not in _oracles:
        _oracles[case.key] = exact_answers(problem, device)
    return _oracles[case.key]


def compare(sp: SequenceParallel, cases: list[Case], call: Callable[..., Any] | None = None) -> list[str]:
    """All ranks' parts together against float64, with the one-rank answer on the same device as yardstick.

    Every rank judges its share of the cases.
    """
    mine = []
    for i, case in enumerate(cases):
        problem, part, failure = case.drawn(), {}, ""
        try:
            solved = solve(problem, case.dtype, sp.device, sp, case.lengths, call)
            part = {name: x.cpu() for name, x in solved.items()}
            sp.check()
        except Exception as error:
            failure = f"rank {sp.rank}: {type(error).__name__}: {error}"
        failures, parts = zip(*gathered((failure, part)), strict=True)
        if any(failures):
            raise RuntimeError("; ".join(filter(None, failures)))
        if i % sp.world_size == sp.rank:
            mine.append((case, problem, merge(problem, parts)))
    sp.set_lengths(None)
    wrong = []
    for case, problem, found in mine:
        alone = solve(problem, case.dtype, sp.device)
        oracle = oracle_of(case, problem, sp.device)
        reports = check(problem, case.dtype, [found], one_rank=alone, oracle=oracle, device=sp.device)
        where = f" (lengths {case.lengths}, boundaries {problem.cu_seqlens})"
        wrong += [str(report) + where for report in reports if not report.ok]
    return wrong


def every_op(sp: SequenceParallel, dtype: torch.dtype) -> list[str]:
    return compare(
        sp, [Case(op, dtype, uneven(sp, unit), B=2, H=3, seed=i) for i, op in enumerate(OPS) for unit in (70, 150)]
    )


def documents(sp: SequenceParallel, dtype: torch.dtype) -> list[str]:
    """Documents that span several ranks, end on their borders, are empty at the start, inside and at the end."""
    lengths = uneven(sp, 130)
    total = sum(lengths)
    ways = ([0, total // 3, 0, total - total // 3 - 1, 1, 0], [0, *lengths, 0], [total])
    return compare(sp, [Case(op, dtype, lengths, documents=way, seed=i) for i, op in enumerate(OPS) for way in ways])


def large_states(sp: SequenceParallel) -> list[str]:
    """Of the sizes that have walks of their own, whole and in documents across ranks."""
    lengths = uneven(sp, 200)
    ways = None, [sum(lengths) // 3, 0, sum(lengths) - sum(lengths) // 3]
    return compare(
        sp,
        [
            Case(op, torch.bfloat16, lengths, documents=way, seed=K + V, K=K, V=V)
            for op in ("simple_gla", "retention", "mamba2")
            for K, V in ((128, 256), (256, 128), (256, 256))
            for way in ways
        ],
    )


def all_shards_empty_but_one(sp: SequenceParallel) -> list[str]:
    ranks = range(sp.world_size)
    return compare(
        sp, [Case("simple_gla", torch.float32, [90 * (r == owner) for r in ranks], seed=owner) for owner in ranks]
    )


def lengths_exchanged(sp: SequenceParallel) -> list[str]:
    """cu_seqlens without set_lengths: the ranks tell each other their lengths at every call."""
    lengths = uneven(sp, 100)

    def call(x: dict[str, torch.Tensor], initial: Any, common: dict[str, Any]) -> Any:
        sp.set_lengths(None)
        return OPS["simple_gla"](x, initial, common)

    case = Case("simple_gla", torch.float32, lengths, documents=[40, sum(lengths) - 40], seed=1)
    return compare(sp, [case], call)


def under_checkpoint(sp: SequenceParallel) -> list[str]:
    def call(x: Any, initial: Any, common: Any) -> Any:
        return checkpoint(OPS["simple_gla"], x, initial, common, use_reentrant=False)

    cases = [Case("simple_gla", torch.float32, uneven(sp, 120 + seed), seed=seed) for seed in range(3)]
    return compare(sp, cases, call)


def under_compile(sp: SequenceParallel) -> list[str]:
    torch._dynamo.reset()
    call = torch.compile(OPS["simple_gla"], fullgraph=True, backend="aot_eager")
    return compare(sp, [Case("simple_gla", torch.float32, uneven(sp, 120), seed=5)], call)


def leaves_of(sp: SequenceParallel, T: int, H: int = 4, D: int = 64, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator(sp.device).manual_seed(100 * seed + sp.rank)
    shape = (1, T, H, D)
    tensors = [torch.randn(shape, device=sp.device, dtype=torch.bfloat16, generator=generator) for _ in range(3)]
    g = -torch.rand(1, T, H, device=sp.device, generator=generator)
    return [x.requires_grad_() for x in (*tensors, g)]


def step(sp: SequenceParallel, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    o, _ = chunk_simple_gla(*leaves, sp=sp)
    return [o.detach(), *torch.autograd.grad(o, leaves, o.detach())]


def same(label: str, found: list[torch.Tensor], expected: list[torch.Tensor]) -> list[str]:
    pairs = zip(("o", "dq", "dk", "dv", "dg"), found, expected, strict=True)
    return [f"{label}: {name} differs" for name, a, b in pairs if not torch.equal(a.cpu(), b.cpu())]


def many_calls_of_changing_size(sp: SequenceParallel) -> list[str]:
    """Slots, epochs and credits over hundreds of calls whose numbers of tiles differ; equal calls give equal bits."""
    sp.set_lengths(None)
    sizes = [(64, 1, 16), (300, 4, 64), (1, 2, 128), (200, 8, 64)]
    inputs = [leaves_of(sp, *size, seed=i) for i, size in enumerate(sizes)]
    first = [[x.cpu() for x in step(sp, leaves)] for leaves in inputs]
    wrong = []
    for turn in range(60):
        for leaves, expected in zip(inputs, first, strict=True):
            results = step(sp, leaves)
            if turn % 20 == 19:
                wrong += same(f"turn {turn}", results, expected)
    return wrong


def forward_only_then_backward(sp: SequenceParallel) -> list[str]:
    """Calls without gradients between others, and two graphs alive at once whose backwards run in the same order."""
    a, b = leaves_of(sp, 100, seed=1), leaves_of(sp, 80, seed=2)
    expected_a, expected_b = step(sp, a), step(sp, b)
    o_a, _ = chunk_simple_gla(*a, sp=sp)
    with torch.no_grad():
        chunk_simple_gla(*b, sp=sp)
    o_b, _ = chunk_simple_gla(*b, sp=sp)
    found_a = [o_a.detach(), *torch.autograd.grad(o_a, a, o_a.detach())]
    found_b = [o_b.detach(), *torch.autograd.grad(o_b, b, o_b.detach())]
    return same("first graph", found_a, expected_a) + same("second graph", found_b, expected_b)


def the_host_never_waits(sp: SequenceParallel) -> None:
    sp.set_lengths([128] * sp.world_size)
    leaves = leaves_of(sp, 128)
    bounds = torch.tensor([0, 100, 128 * sp.world_size], device=sp.device)
    step(sp, leaves)
    chunk_simple_gla(*leaves, cu_seqlens=bounds, sp=sp)[0].sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(sp, leaves)
        chunk_simple_gla(*leaves, cu_seqlens=bounds, sp=sp)[0].sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def graph_replay(sp: SequenceParallel) -> list[str]:
    """A captured forward and backward, replayed on new inputs, eager calls between the replays."""
    leaves = leaves_of(sp, 200)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step(sp, leaves)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(sp, leaves)
    wrong = []
    for turn in range(6):
        with torch.no_grad():
            for leaf, new in zip(leaves, leaves_of(sp, 200, seed=turn + 1), strict=True):
                leaf.copy_(new)
        graph.replay()
        replayed = [x.cpu() for x in captured]
        eager = step(sp, [x.detach().clone().requires_grad_() for x in leaves])
        wrong += same(f"replay {turn}", replayed, eager)
    return wrong


def reported(sp: SequenceParallel, heads: int) -> Exception | None:
    """What a forward and backward leave behind on this rank, if anything."""
    try:
        step(sp, leaves_of(sp, 64, H=heads))
        torch.cuda.synchronize()
        sp.check()
    except (PeerTimeout, PeerMismatch) as error:
        return error
    return None


def absent_rank(transport: str, sp: SequenceParallel) -> None:
    """Rank 0 never calls: every other rank says so within the timeout, and none hangs."""
    short = init_sequence_parallel(transport=transport, timeout_s=SHORT_S)
    step(short, leaves_of(short, 64, H=2))
    torch.cuda.synchronize()
    gathered(None)
    began = time.monotonic()
    error = None if sp.rank == 0 else reported(short, 2)
    waited = time.monotonic() - began
    everyone = gathered((str(error), waited))
    short.close()
    if sp.rank:
        assert isinstance(error, PeerTimeout), "no PeerTimeout"
        assert error.rank == sp.rank and error.peer is not None and error.tile is not None, error
        assert error.fault is not None and (error.fault.kind, error.fault.rank) == ("silent", 0), error
        if sp.rank == 1:
            assert error.peer == 0 and error.expected is not None and error.seen is not None, error
            assert error.seen < error.expected, error
        assert waited < 4 * SHORT_S, f"reported after {waited:.1f} s"
    else:
        print("    " + "\n    ".join(f"rank {r}: {text}, {s:.1f} s" for r, (text, s) in enumerate(everyone)))


def stopped_rank(transport: str, sp: SequenceParallel) -> None:
    """A rank's process is stopped by SIGSTOP between two steps: the others say so within the timeout. Once it goes on,
    its own step ends too."""
    short = init_sequence_parallel(transport=transport, timeout_s=SHORT_S)
    stopped, pause = sp.world_size // 2, 5 * SHORT_S
    for _ in range(3):
        step(short, leaves_of(short, 64, H=2))
    torch.cuda.synchronize()
    short.check()
    gathered(None)
    if sp.rank == stopped:
        subprocess.Popen(["sh", "-c", f"sleep {pause}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    began = time.monotonic()
    error = reported(short, 2)
    waited = time.monotonic() - began
    everyone = gathered((str(error), waited))
    short.close()
    if sp.rank == 0:
        print("    " + "\n    ".join(f"rank {r}: {text}, {s:.1f} s" for r, (text, s) in enumerate(everyone)))
    if sp.rank != stopped:
        assert isinstance(error, PeerTimeout), f"no PeerTimeout but {error}"
        assert waited < pause, f"reported after {waited:.1f} s, when rank {stopped} had gone on"


def disagreeing_rank(transport: str, sp: SequenceParallel) -> None:
    """Rank 1 comes with other shapes: the ranks that receive from a neighbour notice, and none hangs."""
    short = init_sequence_parallel(transport=transport, timeout_s=SHORT_S)
    error = reported(short, 3 if sp.rank == 1 else 2)
    errors = gathered(str(error))
    short.close()
    if sp.rank == 0:
        print("    " + "\n    ".join(f"rank {r}: {text}" for r, text in enumerate(errors)))
    assert sp.rank != 1 or isinstance(error, PeerMismatch), "rank 1 noticed nothing"


def checks(transport: str) -> dict[str, Check]:
    found: dict[str, Check] = {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        found[f"every op, uneven shards, {name}"] = partial(every_op, dtype=dtype)
        found[f"documents across ranks, {name}"] = partial(documents, dtype=dtype)
    found["large states"] = large_states
    found["all shards empty but one"] = all_shards_empty_but_one
    found["lengths exchanged"] = lengths_exchanged
    found["checkpointing"] = under_checkpoint
    found["torch.compile"] = under_compile
    found["many calls of changing size"] = many_calls_of_changing_size
    found["forward only between"] = forward_only_then_backward
    found["the host never waits"] = the_host_never_waits
    if transport != "process_group":
        # NCCL ends the process of a rank whose neighbour is absent, and its sends are not captured here.
        found["CUDA graph replay"] = graph_replay
        found["absent rank"] = partial(absent_rank, transport)
        found["stopped rank"] = partial(stopped_rank, transport)
        found["disagreeing rank"] = partial(disagreeing_rank, transport)
    return found


def broken(sp: SequenceParallel) -> bool:
    """Whether this group can no longer be used here."""
    try:
        sp.check()
    except (PeerTimeout, PeerMismatch):
        return True
    return False


def run_check(sp: SequenceParallel, name: str, function: Check) -> bool:
    began, problem = time.monotonic(), ""
    sp.set_lengths(None)
    try:
        wrong = function(sp) or []
        problem = "; ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        torch.cuda.synchronize()
        sp.check()
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        if os.environ.get("FLEXSP_TEST_TRACEBACK"):
            traceback.print_exc()
    problems = {rank: text[:900] for rank, text in enumerate(gathered(problem)) if text}
    if sp.rank == 0:
        mark = "FAIL" if problems else "ok  "
        print(f"  {mark} {sp.transport:14s}{name:40s}{time.monotonic() - began:6.1f} s", flush=True)
        for rank, text in problems.items():
            print(f"       rank {rank}: {text}", flush=True)
    return not problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transports", default="peer,put,process_group")
    parser.add_argument("--only", default="", help="checks whose name contains this")
    text = "of the groups; FLEXSP_RANKS_PER_HOST=2 makes two hosts of four GPUs for hierarchical"
    parser.add_argument("--schedule", default="chain", help=text)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to test")
        return 0
    # Longer than any wait of a check, so that a rank that fails early is still there when the others report.
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(seconds=5 * LONG_S))
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    failed = total = 0
    for transport in args.transports.split(","):
        try:
            sp = init_sequence_parallel(transport=transport, schedule=args.schedule, timeout_s=LONG_S)
        except NotAvailable as error:
            if dist.get_rank() == 0:
                print(f"  left out {transport}: {error}")
            continue
        for name, function in checks(transport).items():
            if args.only not in name:
                continue
            total += 1
            failed += not run_check(sp, name, function)
            if any(gathered(broken(sp))):
                if sp.rank == 0:
                    print(f"  the ranks lost each other over {transport}: its other checks are left out")
                break
        if sp.rank == 0:
            print(f"{transport}, {sp.world_size} ranks: {failed} of {total} checks failed so far", flush=True)
        sp.close()
    chief = dist.get_rank() == 0
    if chief:
        print(f"ranks_ops: {'FAILED' if failed else 'passed'}, {total - failed} of {total}")
    dist.destroy_process_group()
    return int(failed > 0 or total == 0)


if __name__ == "__main__":
    sys.exit(main())
