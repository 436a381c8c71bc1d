"""autotune=True: the plan of a call is searched for by timing plans on the GPU, from the predicted one on."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from typing import Any

import torch

from flexsp.compiler.planning.launches import GeneratedCall, Plan
from flexsp.compiler.planning.plan import candidates
from flexsp.devices import of_device
from flexsp.kernels.executable import Executable
from flexsp.runtime.triton_private import OutOfResources, PTXASError

__all__ = ["Tuned", "tune"]

_HOPEFUL = 3.0  # plans predicted to take more than this of the best prediction are not tried
_WARMUP, _RUNS = 2, 7


@dataclass(frozen=True)
class Tuned:
    """The quickest plan of `tried`, its microseconds, and those of the plan that would be taken without a search."""

    plan: Plan
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


def _others(plan: Plan) -> Iterator[Plan]:
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
    executable: Executable[GeneratedCall], tensors: Sequence[torch.Tensor], initial: Any, table: Any, backward: bool
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
    make: Callable[[Plan | None], Executable[GeneratedCall]], tensors: Sequence[torch.Tensor],
    initial: torch.Tensor | None, table_for: Callable[[int], torch.Tensor | None], backward: bool,
    time: Callable[..., float] = time_us,
) -> Tuned:  # fmt: skip
    """Times plans for one call on this rank alone.

    Args:
        make: the executable for a plan, or for the predicted one.
        table_for: the chunk table for a chunk size, None if nothing is packed.
        backward: a backward pass counts too.
    """
    usual = make(None)
    executables: dict[Plan, Executable[GeneratedCall]] = {usual.call.plan: usual}
    seen: dict[Plan, float] = {}

    def of(plan: Plan) -> float:
        if plan not in seen:
            try:
                seen[plan] = time(executables[plan], tensors, initial, table_for(plan.chunk), backward)
            except (ValueError, OutOfResources, PTXASError):  # what a block does not have
                seen[plan] = float("inf")
        return seen[plan]

    def quickest(plans: list[Plan]) -> Plan:
        executables.update((plan, make(plan)) for plan in plans if plan not in executables)
        wait([job for plan in plans if plan.sure for job in executables[plan].precompile(tensors, initial, backward)])
        return min(plans, key=of)

    call, device = usual.call, of_device(usual.device)
    found = candidates(call.code, call.sizes, call.B * call.H, call.T, call.docs, call.dtype, device=device)
    least = min((us for _, us in found), default=0.0)
    best = quickest([call.plan, *(plan for plan, us in found if us <= _HOPEFUL * least)])
    improved = True
    while improved:
        better = quickest([*_others(best)])
        improved = of(better) < of(best)
        best = better if improved else best
    return Tuned(best, seen[best], of(call.plan), len(seen))
