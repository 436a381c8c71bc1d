"""What ``LinearAttention(..., autotune=True)`` does: it times plans on the GPU, beginning with the predicted one."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from typing import Any

import torch

from flexsp.comm.group import SequenceParallel
from flexsp.compiler.dispatch import executable_of
from flexsp.compiler.planning.generated_plan import GeneratedPlan, Tiling
from flexsp.compiler.planning.tiling import candidates
from flexsp.devices import of_device
from flexsp.kernels.executable import Executable
from flexsp.kernels.table import chunk_table
from flexsp.runtime.triton_private import OutOfResources, PTXASError

__all__ = ["Tuned", "autotuned", "tune"]

_HOPEFUL = 3.0  # plans predicted to take more than this of the best prediction are not tried
_WARMUP, _RUNS = 2, 7


@dataclass(frozen=True)
class Tuned:
    """The quickest of `tried` plans; its microseconds and those of the plan that a call takes without a search."""

    plan: Tiling
    us: float
    predicted_us: float
    tried: int

    def __str__(self) -> str:
        walk, plan = self.plan.walk, self.plan
        return (
            f"{self.us:.0f} us with chunks of {plan.chunk}, {plan.n_seg} segments, walks of {walk.cols} columns, "
            f"{walk.warps} warps, {walk.stages} stages, chunkwise kernels of {plan.whole.warps} and {plan.part.warps} "
            f"warps; the predicted plan takes {self.predicted_us:.0f} us, {self.predicted_us / self.us - 1:.1%} more; "
            f"{self.tried} plans tried"
        )


def _others(plan: Tiling) -> Iterator[Tiling]:
    """Plans with one number of `plan` changed."""
    for stages in {1, 2, 3, 4} - {plan.walk.stages}:
        yield replace(plan, walk=replace(plan.walk, stages=stages))
    for warps in {4, 8} - {plan.walk.warps}:
        yield replace(plan, walk=replace(plan.walk, warps=warps))
    for name in ("part", "whole"):
        launch = getattr(plan, name)
        for warps, registers in {(4, None), (4, 168), (8, None)} - {(launch.warps, launch.registers)}:
            yield replace(plan, **{name: replace(launch, warps=warps, registers=registers)})


def time_us(
    executable: Executable[GeneratedPlan], tensors: Sequence[torch.Tensor], initial: Any, table: Any, backward: bool
) -> float:
    """Median microseconds on the device of a forward, or of a forward and backward pass."""
    do = torch.ones(executable.out, dtype=executable.dtype, device=executable.device)
    times = []
    for i in range(_WARMUP + _RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        _, _, saved = executable.run_forward(tensors, initial, table)
        if backward:
            executable.run_backward(tensors, initial, saved, table, do, None, False)
        end.record()
        torch.cuda.synchronize(executable.device)
        if i >= _WARMUP:
            times.append(1e3 * begin.elapsed_time(end))
    return statistics.median(times)


@torch.no_grad()
def tune(
    make: Callable[[Tiling | None], Executable[GeneratedPlan]], tensors: Sequence[torch.Tensor],
    initial: torch.Tensor | None, table_for: Callable[[int], torch.Tensor | None], backward: bool,
    time: Callable[..., float] = time_us,
) -> Tuned:  # fmt: skip
    """Times plans for one call on this rank alone.

    Args:
        make: the executable for a plan, or for the predicted one.
        table_for: the chunk table for a chunk size, None if no documents are packed.
        backward: time a forward and a backward pass.
    """
    usual = make(None)
    executables: dict[Tiling, Executable[GeneratedPlan]] = {usual.plan.tiling: usual}
    seen: dict[Tiling, float] = {}

    def of(plan: Tiling) -> float:
        if plan not in seen:
            try:
                seen[plan] = time(executables[plan], tensors, initial, table_for(plan.chunk), backward)
            except (ValueError, OutOfResources, PTXASError):  # more shared memory or registers than a block has
                seen[plan] = float("inf")
        return seen[plan]

    def quickest(plans: list[Tiling]) -> Tiling:
        executables.update((plan, make(plan)) for plan in plans if plan not in executables)
        wait([job for plan in plans if plan.sure for job in executables[plan].precompile(tensors, initial, backward)])
        return min(plans, key=of)

    call, device = usual.plan, of_device(usual.device)
    found = candidates(call.code, call.sizes, call.B * call.H, call.T, call.n_docs, call.dtype, device=device)
    least = min((us for _, us in found), default=0.0)
    best = quickest([call.tiling, *(plan for plan, us in found if us <= _HOPEFUL * least)])
    improved = True
    while improved:
        better = quickest([*_others(best)])
        improved = of(better) < of(best)
        best = better if improved else best
    return Tuned(best, seen[best], of(call.tiling), len(seen))


def autotuned(
    executable: Executable[Any], inputs: dict[str, torch.Tensor], initial: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None, group: SequenceParallel | None, shard: tuple[int, int, int], backward: bool,
) -> tuple[Executable[Any], str | None]:  # fmt: skip
    """The executable with the quickest plan, and a line about the search.

    Calls of hand-written kernels alone have no plan to search: they come back as they are, without a line. Each rank
    searches by itself, since the plan does not change what ranks exchange.

    Args:
        shard: this rank's first token, its end, and the number of tokens of all ranks.
    """
    if not isinstance(executable.plan, GeneratedPlan):
        return executable, None
    given = {name: inputs[name].detach() for name in executable.names}
    made = functools.partial(executable_of, executable.plan.code, given, initial, cu_seqlens)

    def table(chunk: int) -> torch.Tensor | None:
        last = group is None or group.is_last
        return None if cu_seqlens is None else chunk_table(cu_seqlens, *shard[:2], chunk, last)

    found = tune(lambda plan: made(None, plan), [*given.values()], initial, table, backward)
    what = "forward and backward" if backward else "forward"
    shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in given.items())
    return made(group, found.plan), f"autotune of {what} for {shapes}: {found}"
