"""Kernels that launches need, compiled in processes side by side into Triton's cache."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from flexsp.runtime.launch import Request
from flexsp.runtime.triton_private import in_cache, keep_launcher
from flexsp.runtime.workarounds.unwritten_registers import registers_of, stack_of

__all__ = ["Built", "build_all", "cores", "table"]


@dataclass(frozen=True)
class Built:
    """A kernel in Triton's cache.

    Attributes:
        name: of its function.
        seconds: of its compilation, with that of its launcher.
        registers: of a thread; stack: bytes of a thread; shared: bytes of a block.
        known: it was in the cache.
        problem: why it is not there now; empty if it is.
    """

    name: str
    seconds: float = 0.0
    registers: int = 0
    stack: int = 0
    shared: int = 0
    known: bool = False
    problem: str = ""


_requests: list[tuple[Request, str]] = []  # of this process and those that it forks
_target: Any = None


def build_all(requests: Iterable[Request], target: Any, jobs: int, only_look: bool = False) -> Iterator[Built]:
    """Compiles what is not in the cache yet; each distinct kernel once, in the order in which they are done.

    The processes are forks of this one, which must not have used a GPU.

    Args:
        target: of `flexsp.runtime.triton_private.gpu_target`.
        jobs: processes; 1 is this one.
        only_look: nothing is compiled.
    """
    global _target
    distinct = {request.key(target): request for request in requests}
    _requests[:], _target = [(request, key) for key, request in distinct.items()], target
    if only_look:
        for request, key in _requests:
            known = in_cache(key, request.kernel.__name__)
            yield Built(request.kernel.__name__, known=known, problem="" if known else "is not in the cache")
        return
    if jobs == 1:
        yield from map(_build, range(len(_requests)))
        return
    with ProcessPoolExecutor(max(1, min(jobs, len(_requests))), multiprocessing.get_context("fork")) as pool:
        work = {pool.submit(_build, i): i for i in range(len(_requests))}
        for job in as_completed(work):
            try:
                yield job.result()
            except BrokenProcessPool as error:
                yield Built(_requests[work[job]][0].kernel.__name__, problem=f"its compiler's process ended: {error}")


def _build(index: int) -> Built:
    request, key = _requests[index]
    name = request.kernel.__name__
    known, began = in_cache(key, name), time.perf_counter()
    try:
        compiled = request.build(_target)
        known = keep_launcher(compiled) and known
    except Exception as error:
        text = " ".join(str(error).split()) or "no message"
        return Built(name, problem=f"{type(error).__name__}: {text[:500]}")
    seconds, cubin = time.perf_counter() - began, compiled.asm["cubin"]
    return Built(name, seconds, registers_of(cubin), stack_of(cubin), compiled.metadata.shared, known)


def table(found: Iterable[Built]) -> Iterator[str]:
    """Lines of a table of kernels, the slowest first."""
    rows = sorted(found, key=lambda x: (x.known, -x.seconds, x.name))
    width = max((len(x.name) for x in rows), default=0)
    yield f"{'kernel':{width}}  seconds  registers  stack  shared KiB"
    for x in rows:
        if x.problem:
            yield f"{x.name:{width}}  {x.problem}"
            continue
        seconds, shared = "cached" if x.known else f"{x.seconds:.1f}", f"{x.shared / 1024:.1f}" if x.shared else ""
        yield f"{x.name:{width}}  {seconds:>7}  {x.registers or '':>9}  {x.stack or '':>5}  {shared:>10}".rstrip()


def cores() -> int:
    """Processes that this one may run on."""
    return len(os.sched_getaffinity(0))
