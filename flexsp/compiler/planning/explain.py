"""What a plan decided for one call, and what it is predicted to cost, as text."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from flexsp.compiler.backend.generated_kernels import CHUNKS, Generated
from flexsp.compiler.planning.generated_plan import GeneratedPlan, Tiling
from flexsp.compiler.planning.lowering import Lowering
from flexsp.compiler.planning.model import Predicted, predict
from flexsp.compiler.planning.tiling import candidates, choose_tiling
from flexsp.devices import Device, of_device

__all__ = ["describe", "engines_of", "kernels_of"]

_MB = 1e6


def engines_of(code: Generated) -> list[str]:
    """What replaces the generated kernels, or some of them."""
    lines = []
    for lowering in code.program.lowerings:
        whole = type(lowering).plan is not Lowering.plan
        runs = "whole calls; what follows is of those that it leaves to" if whole else "some launches, beside"
        lines.append(f"engine: {lowering.name} runs {runs} generated kernels")
    return lines


def kernels_of(code: Generated) -> list[str]:
    """The kernels with what each reads and writes."""
    lines = []
    for kind, kernel in code.kernels.items():
        parts = f" in {kernel.parts} parts" if kernel.parts > 1 else ""
        reads = ", ".join([*kernel.tokens, *kernel.kept, *kernel.params])
        lines.append(f"    {kind}{parts}: reads {reads}; writes {', '.join(kernel.writes) or 'states'}")
    for x in code.step.intrinsics:
        lines.append(f"    {x.kind}: reads {', '.join(x.args)}; writes {', '.join(x.results)}")
    return lines


def describe(
    code: Generated, sizes: Mapping[str, int], heads: int, T: int, dtype: torch.dtype,
    n_docs: int = 0, ranks: bool = False, device: Device | None = None,
) -> list[str]:  # fmt: skip
    """Lines on the plan of one call: schedule, chunk size and tiles with their reasons, then every launch.

    Args:
        sizes: the state's and the inputs' sizes by name, as {"K": 128, "V": 128}.
        heads: B * H; T is this rank's tokens.
        n_docs: packed documents, 0 if not packed.
        ranks: the call is chained over ranks.
        device: the GPU; None for the one that is there, else the one that is planned for.

    Raises:
        NotEmittable, ValueError: no kernels are made for these sizes, or for this chunk size.
    """
    device = device or of_device()
    plan = choose_tiling(code, sizes, heads, T, n_docs, dtype, ranks, device)
    name = str(dtype).removeprefix("torch.")
    given = ", ".join(f"{key} = {n}" for key, n in sizes.items())
    packed = f", {n_docs} packed documents" if n_docs else ""
    lines = [f"plan for B * H = {heads}, T = {T}, {given}, {name}{packed}{', over ranks' if ranks else ''}:"]
    call = GeneratedPlan(code, plan, sizes, 1, heads, T, n_docs, dtype)
    for x in code.program.lowerings if call.lowering is None else ():
        lines.append(f"    generated kernels alone, not those of {x.name}: {x.refuses(call)}")
    found = candidates(code, sizes, heads, T, n_docs, dtype, ranks, device)
    lines += [f"    {line}" for line in _decisions(code, plan, sizes, heads, dtype == torch.bfloat16, found, device)]
    passes = {
        title: predict(code, plan, sizes, heads, T, dtype, n_docs=n_docs, backward=title == "backward", device=device)
        for title in ("forward", "backward")
    }
    lines += [f"    {line}" for line in _table(passes)]
    lines.append(
        f"    Planned for {device}, with an H200's latencies. A tensor counts once a launch, which what is last bounds."
    )
    return lines


def _decisions(
    code: Generated, plan: Tiling, sizes: Mapping[str, int], heads: int, half: bool, found: list[tuple[Tiling, float]],
    device: Device,
) -> list[str]:  # fmt: skip
    walk, blocks = plan.walk, dict(plan.blocks)
    layout = code.layout
    walked = " x ".join(str(x) for x in (blocks.get(layout.rows), walk.cols) if x)
    lines = [f"schedule: {plan.schedule}, {_WHY[plan.schedule]}"]
    same = {x.schedule: us for x, us in found if (x.chunk, x.walk.cols) == (plan.chunk, walk.cols)}
    if len(same) > 1:
        lines[0] += f" (predicted {', '.join(f'{name} {us:.0f} us' for name, us in same.items())})"
    best: dict[int, float] = {}
    for x, us in found:
        best[x.chunk] = min(us, best.get(x.chunk, us))
    times = ", ".join(f"{chunk}: {us:.0f}" for chunk, us in best.items()) or "none fits"
    large = [str(x) for x in CHUNKS[:-1] if x > max(best, default=0)] if half and code.chunk is None else []
    note = f"; {', '.join(large)}: no shared memory for its tiles" if large else ""
    if code.chunk is None:  # in float32 one size is tried, by the registers that tiles take
        note += f"; {CHUNKS[-1] if half else 'others'} only where asked for"
    given = "given" if code.chunk is not None else "measured to be good, or predicted to save a fifth"
    lines.append(f"chunk size: {plan.chunk} ({given}; predicted us {times}{note})")
    segments = f"{plan.n_seg} segments of {plan.per_seg}" if plan.n_seg > 1 else "one segment"
    lines.append(
        f"walks: {plan.n_chunks} chunks in {segments}, {walked} of the state a "
        f"program, {walk.warps} warps, {walk.stages} stages"
    )
    lines.append(f"chunkwise: {plan.whole.warps} warps, grads {plan.part.warps} warps")
    extra = 3 * 4 * heads * plan.n_chunks * math.prod(layout.numbers(sizes))
    lines.append(
        f"decoupled (each chunk's contribution in memory, a scan over chunks) is not made: {extra / _MB:.0f} MB more, "
        f"{extra / device.bandwidth:.0f} us"
    )
    return lines


_WHY = {
    "fused": "one walk over all chunks of a head",
    "segmented": "a walk that sums up each segment, a scan that joins them, a walk of each segment",
}
_HEAD = ("grid", "read MB", "written MB", "GFLOP", "us", "bound by")


def _table(passes: Mapping[str, list[Predicted]]) -> list[str]:
    """The launches of each pass and their sum, in columns as wide as their widest entry."""
    rows: list[tuple[str, ...]] = []
    for title, launches in passes.items():
        rows.append((title, *_HEAD))
        for x in launches:
            spills = f", spills {x.spilled} B a thread" if x.spilled else ""
            rows.append((f"  {x.kernel}", " x ".join(map(str, x.grid)), *_numbers([x]), f"{x.bound}{spills}"))
        rows.append(("  total", "", *_numbers(launches), ""))
    rows.append((" + ".join(passes), "", *_numbers([x for each in passes.values() for x in each]), ""))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    left = {0, 1, len(widths) - 1}
    return [
        "  ".join(f"{x:<{n}}" if i in left else f"{x:>{n}}" for i, (x, n) in enumerate(zip(row, widths, strict=True)))
        .rstrip()
        for row in rows
    ]  # fmt: skip


def _numbers(rows: list[Predicted]) -> tuple[str, ...]:
    read, written, flops, us = (sum(getattr(x, key) for x in rows) for key in ("read", "written", "flops", "us"))
    return f"{read / _MB:.1f}", f"{written / _MB:.1f}", f"{flops / 1e9:.1f}", f"{us:.1f}"
