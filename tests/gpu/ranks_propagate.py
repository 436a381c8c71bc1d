"""The propagate kernel between GPUs: float64, CUDA graphs, an absent rank, latency. Run by torchrun, not by pytest:

    torchrun --standalone --nproc-per-node 4 tests/gpu/ranks_propagate.py [--heap auto|nvshmem|torch_symm]
        [--transports peer,put] [--epochs 100] [--no-latency]

Prints one line a check and a table of latencies on rank 0; exit status 1 if a check failed on any rank.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist

from flexsp import SequenceParallel, init_sequence_parallel
from flexsp.comm.transport import create_heap, in_kernel
from flexsp.exceptions import NotAvailable, PeerTimeout
from flexsp.scan.exchange import exchange
from flexsp.scan.propagate import propagate
from flexsp.scan.transitions import Transition
from flexsp.testing.scans import ScanCall, fill_slots_with_nan, random_calls, scan_error

HEADS, SIZE = 32, 128  # of the measured state: 32 x 128 x 128 fp32 = 2 MiB
SHAPES = 20  # of random calls


def open_sp(transport: str, heap: str, heap_mib: int = 64, timeout_s: float = 60.0) -> SequenceParallel:
    sp = init_sequence_parallel(transport="process_group", timeout_s=timeout_s)
    if transport != "process_group":
        assert sp.cpu_group is not None
        sp.heap = create_heap(
            heap, heap_mib << 20, rank=sp.rank, global_ranks=sp.global_ranks, cpu_group=sp.cpu_group, device=sp.device
        )
        sp.transport = transport
    return sp


def many_epochs(sp: SequenceParallel, epochs: int) -> str:
    """Interleaved shapes and directions, ranks without segments, slots full of NaN. Each shape is a kernel to compile,
    so a few are called many times."""
    if sp.heap is not None:
        fill_slots_with_nan(sp)
    worst = 0.0
    shapes = random_calls(7, sp.world_size, SHAPES, heads=6, size=160, segments=9)
    order = torch.randint(SHAPES, (epochs,), generator=torch.Generator().manual_seed(7)).tolist()
    calls = [shapes[i] for i in order]
    calls += [
        ScanCall(1, HEADS, SIZE, SIZE, (3,) * sp.world_size, "scalar", cuts, reverse)
        for cuts in (False, True) for reverse in (False, True)
    ]  # fmt: skip
    wide = (2,) * sp.world_size  # more tiles than blocks
    calls += [ScanCall(3, HEADS, SIZE, SIZE, wide, "scalar", True, reverse) for reverse in (False, True)]
    for seed, call in enumerate(calls):
        worst = max(worst, scan_error(sp, call, seed, sp.device))
        sp.check()
    assert worst < 2e-5, f"error {worst}"
    return f"{len(calls)} calls, error {worst:.1e}"


def free_running(sp: SequenceParallel) -> str:
    """Hundreds of calls without a host synchronisation, with a random slow rank: the credits at work."""
    calls = 300
    F = torch.zeros(calls, 1, 2, 8, 64, 64, device=sp.device)
    F[:, :, 1] = sp.rank + 1 + torch.arange(calls, device=sp.device).view(-1, 1, 1, 1, 1)
    for i in range(calls):
        if (i // 20) % sp.world_size == sp.rank:
            torch.cuda._sleep(400_000)
        propagate(F[i], Transition("none"), sp)
    torch.cuda.synchronize()
    sp.check()
    step = torch.arange(calls, device=sp.device)
    arrived = sp.rank * (sp.rank + 1) / 2 + sp.rank * step
    for slot, want in ((0, arrived), (1, arrived + sp.rank + 1 + step)):
        got = F[:, 0, slot].flatten(1)
        assert bool((got == want[:, None]).all()), f"slot {slot}: {got[:, 0].tolist()[:8]} for {want.tolist()[:8]}"
    return f"{calls} calls exact"


def growing(sp: SequenceParallel) -> str:
    """A graph is captured with the first heap, of 256 MiB. Then states of 67 MB in four sequences need another one, and
    the graph is replayed with the first."""
    first = sp.heap.nbytes
    said = graph_replay(sp, lambda: larger_states(sp))
    assert sp.heap.nbytes > 1 << 30 and [heap.nbytes for heap, _ in sp.outgrown] == [first], sp.outgrown
    last = sp.heap.nbytes
    sp.close()
    return f"{first >> 20} MiB, then {last >> 20}; {said}"


def larger_states(sp: SequenceParallel) -> None:
    for reverse in (False, True):
        call = ScanCall(4, 64, 512, 512, (1,) * sp.world_size, "scalar", reverse=reverse)
        error = scan_error(sp, call, 3, sp.device)
        assert error < 2e-5, error
        sp.check()


def graph_replay(sp: SequenceParallel, between: Callable[[], None] = lambda: None) -> str:
    """Forward and backward captured once and replayed with new data: epochs count on in device memory. `between` runs
    before the replays."""
    n, shape = 4, (1, 5, 8, 64, 64)
    sources = [torch.zeros(shape, device=sp.device) for _ in range(2)]
    log_a = torch.full((1, n, 8), -0.1, device=sp.device)
    states = [torch.empty_like(s) for s in sources]

    def step() -> None:
        for reverse in (False, True):
            states[reverse].copy_(sources[reverse])
            propagate(states[reverse], Transition("scalar", log_a), sp, reverse=reverse)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    between()
    for i in range(50):
        for reverse, source in enumerate(sources):
            source.fill_(float("nan"))
            (source[:, :n] if reverse else source[:, 1:]).fill_(i + 1.0)
            edge = sp.world_size - 1 if reverse else 0
            if sp.rank == edge:
                source[:, n if reverse else 0] = 0
        graph.replay()
        torch.cuda.synchronize()
        sp.check()
        total = n * sp.world_size
        for reverse, state in enumerate(states):
            for s in range(n + 1):
                done = total - (sp.rank * n + s) if reverse else sp.rank * n + s
                want = (i + 1) * sum(2.718281828459045 ** (-0.1 * j) for j in range(done))
                got = state[0, s]
                assert bool(((got - want).abs() <= 1e-5 * (i + 1) * total).all()), (i, reverse, s, want)
    return "50 replays"


def exchanges(sp: SequenceParallel) -> str:
    """What PyTorch gives to `exchange`, sums of ranks in both directions: exact, also in a captured graph."""
    sizes = ((1, HEADS, 1, 1), (1, HEADS, 1, 64), (2, 3, 5, 7), (1, HEADS, SIZE, SIZE))
    given = [(torch.arange(torch.Size(size).numel(), device=sp.device) % 999).float().view(size) for size in sizes]
    before = {False: sum(range(1, sp.rank + 1)), True: sum(range(sp.rank + 2, sp.world_size + 1))}

    def sums() -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [
            (exchange(F * (sp.rank + 1), Transition("none"), sp, reverse=reverse), F * before[reverse])
            for F in given for reverse in before
        ]  # fmt: skip

    with torch.no_grad():
        found = sums()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        if in_kernel(sp):
            with torch.cuda.graph(graph):
                captured = sums()
        for _ in range(20 if in_kernel(sp) else 0):
            graph.replay()
            torch.cuda.synchronize()
            found += [(got.clone(), want) for got, want in captured]
    sp.check()
    assert all(torch.equal(got, want) for got, want in found)
    for F in given:
        F.requires_grad_()
        state = exchange(F, Transition("none"), sp)
        (grad,) = torch.autograd.grad(state.sum(), F)
        assert bool((grad == sp.world_size - 1 - sp.rank).all())
    return f"{len(found)} exchanges exact"


def absent_rank(sp: SequenceParallel) -> str:
    """The last rank does not call: everyone else reports it, nobody hangs."""
    start = time.monotonic()
    error: PeerTimeout | None = None
    if sp.rank != sp.world_size - 1:
        try:
            for _ in range(4):
                propagate(torch.zeros(1, 3, 2, 32, 32, device=sp.device), Transition("none"), sp, reverse=True)
                torch.cuda.synchronize()
                sp.check()
        except PeerTimeout as caught:
            error = caught
        assert error is not None, "no PeerTimeout"
        assert error.peer is not None and error.expected == 1
    seconds = time.monotonic() - start
    assert seconds < 3 * sp.timeout_s + 10, f"{seconds:.1f} s"
    return f"{error} after {seconds:.1f} s"


def run(name: str, check: Callable[[], str]) -> bool:
    try:
        answer: tuple[bool, str] = (True, check())
    except Exception:
        answer = (False, traceback.format_exc(limit=3))
    answers: list[tuple[bool, str]] = [answer] * dist.get_world_size()
    dist.all_gather_object(answers, answer)
    ok = all(a[0] for a in answers)
    if dist.get_rank() == 0:
        print(f"{'ok    ' if ok else 'FAILED'} {name}: {answers[0][1]}", flush=True)
        for r, (fine, text) in enumerate(answers):
            if not fine:
                print(f"  rank {r}: {text}", flush=True)
    return ok


def slowest_us(sp: SequenceParallel, call: Callable[[], None], repeats: int = 50) -> float:
    """Median over repeats of the slowest rank's device time; every repeat starts after a barrier on the device."""
    token = torch.zeros(1, device=sp.device)
    times = []
    for _ in range(repeats + 5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(400_000)  # the host runs ahead
        dist.all_reduce(token)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    every = torch.tensor(times[5:], device=sp.device)
    dist.all_reduce(every, op=dist.ReduceOp.MAX)
    return statistics.median(every.tolist())


def latency(sps: dict[str, SequenceParallel]) -> None:
    """Local scan, whole scan over the ranks and time of a hop for a 2 MiB state, by number of segments."""
    world = dist.get_world_size()
    rows = []
    for nseg in (4, 8, 16, 32):
        sp = next(iter(sps.values()))
        states = torch.zeros(1, nseg + 1, HEADS, SIZE, SIZE, device=sp.device)
        gates = Transition("scalar", torch.zeros(1, nseg, HEADS, device=sp.device))
        local = slowest_us(sp, lambda s=states, a=gates: propagate(s, a))
        for name, sp in sps.items():
            for reverse in (False, True):
                over = slowest_us(sp, lambda s=states, a=gates, p=sp, r=reverse: propagate(s, a, p, reverse=r))
                sp.check()
                way = "backward" if reverse else "forward"
                rows.append((nseg, name, way, local, over, (over - local) / max(world - 1, 1)))
    few = []
    for count in (1, 128):
        F = torch.zeros(1, HEADS, 1, count, device=sp.device)
        for name, sp in sps.items():
            with torch.no_grad():
                few.append((count, name, slowest_us(sp, lambda F=F, p=sp: exchange(F, Transition("none"), p))))
    if dist.get_rank() == 0:
        for count, name, over in few:
            print(f"exchange of {HEADS} x {count} numbers, {name}: {over:.1f} us, median of 50, slowest rank")
        print(f"2 MiB state, {world} GPUs; us, median of 50, slowest rank")
        print(f"{'NSEG':>4} {'transport':<24} {'way':<8} {'local':>7} {'ranks':>7} {'per hop':>8}")
        for nseg, name, way, local, over, hop in rows:
            print(f"{nseg:>4} {name:<24} {way:<8} {local:>7.1f} {over:>7.1f} {hop:>8.1f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heap", default="auto")
    parser.add_argument("--transports", default="peer,put,process_group")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--no-latency", action="store_true")
    options = parser.parse_args()
    ok = True
    sps: dict[str, SequenceParallel] = {}
    for transport in options.transports.split(","):
        try:
            start = time.monotonic()
            sp = open_sp(transport, options.heap)
        except NotAvailable as error:
            if int(dist.get_rank()) == 0:
                print(f"left out {transport}: {error}", flush=True)
            continue
        kind = sp.heap.kind if sp.heap is not None else "torch.distributed"
        name = f"{transport}/{kind}"
        sps[name] = sp
        ok &= run(f"{name} many epochs", lambda s=sp: many_epochs(s, options.epochs))
        if dist.get_rank() == 0:
            print(f"       {time.monotonic() - start:.1f} s since the heap was opened", flush=True)
        ok &= run(f"{name} free running", lambda s=sp: free_running(s))
        ok &= run(f"{name} exchanges", lambda s=sp: exchanges(s))
        if transport != "process_group":
            ok &= run(f"{name} graph replay", lambda s=sp: graph_replay(s))
            ok &= run(f"{name} growing", lambda t=transport: growing(init_sequence_parallel(transport=t)))
            lost = open_sp(transport, options.heap, heap_mib=4, timeout_s=2.0)
            ok &= run(f"{name} absent rank", lambda s=lost: absent_rank(s))
    if not options.no_latency and sps:
        latency(sps)
    dist.barrier()
    dist.destroy_process_group()
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
