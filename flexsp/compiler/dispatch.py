"""Stage 6: the executable of a call, from the first lowering that takes it, or why none does.

Each length T has an executable of its own, but shares compiled kernels: no kernel is specialised on T.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from flexsp.comm.group import SequenceParallel
from flexsp.compiler.backend.generated_kernels import Generated
from flexsp.compiler.graphs.values import NotEmittable
from flexsp.compiler.planning.generated_plan import GeneratedPlan, Tiling
from flexsp.compiler.planning.lowering import TensorSpec
from flexsp.compiler.planning.tiling import choose_tiling, not_generated
from flexsp.devices import of_device
from flexsp.kernels.executable import CallSpec, Executable
from flexsp.log import tell
from flexsp.runtime.launch import old_assembler

__all__ = ["executable_of", "refusal"]

Tensors = dict[str, torch.Tensor]


def executable_of(
    code: Generated, given: Tensors, initial: torch.Tensor | None, cu_seqlens: torch.Tensor | None,
    sp: SequenceParallel | None, plan: Tiling | None = None,
) -> Executable[Any]:  # fmt: skip
    """The executable of calls with such inputs: a lowering's, else that of generated kernels.

    Args:
        given: the inputs by name, tokens [T, H, ...] or [B, T, H, ...] and parameters [H, ...].
        plan: the plan of a generated call. None asks the lowerings, and predicts a plan if none takes the call.
    """
    of_program = code.program.meta.tokens
    tokens = [name for name in given if name in of_program]
    n_docs = 0 if cu_seqlens is None else cu_seqlens.numel() - 1
    spec = CallSpec(tokens, len(of_program[tokens[0]].shape), given, initial)
    returns_final = sp is None or n_docs > 0 or sp.rank == sp.world_size - 1
    bounds = torch.empty(n_docs + 1, dtype=torch.int64, device="meta") if n_docs else None

    def remake(others: Tensors, state: torch.Tensor | None, group: SequenceParallel | None) -> Executable[Any]:
        return executable_of(code, others, state, bounds, group, plan)

    for lowering in code.program.lowerings if plan is None else ():
        own = lowering.plan(code, spec, initial is not None, n_docs, returns_final, sp)
        if own is not None:
            tell(logging.DEBUG, f"plan: {_of_call(code, spec, n_docs, sp)}: kernels of the engine {lowering.name}")
            return Executable(own, spec, sp, remake, lowering.name)
    for axis, size, what in ((0, spec.T, "rows"), (1, spec.H, "heads")):
        fewer = [name for name in tokens if spec.shapes[name][axis] != size]
        if fewer:
            raise NotEmittable(f"{fewer[0]}: expected {size} {what}, got {spec.shapes[fewer[0]][axis]}")
    sizes = _sizes(code, spec, initial)
    if plan is None and code.program.lowerings and (reason := not_generated(code, sizes, spec.dtype)) is not None:
        raise NotEmittable(reason)  # a lowering serves such calls, but did not take this one
    chained = sp is not None and sp.world_size > 1
    if plan is None:
        plan = choose_tiling(
            code, sizes, spec.B * spec.H, spec.T, n_docs, spec.dtype, chained, of_device(spec.device)
        )
    elif chained:  # a plan that was tuned on one rank may have no summary, which ranks exchange
        plan = replace(plan, schedule="segmented")
    call = GeneratedPlan(
        code, plan, sizes, spec.B, spec.H, spec.T, n_docs, spec.dtype, initial is not None, returns_final
    )
    walk, beside = plan.walk, "" if call.lowering is None else f", with kernels of {call.lowering.name}"
    tell(
        logging.DEBUG,
        f"plan: {_of_call(code, spec, n_docs, sp)}: generated kernels{beside}, {plan.schedule}, {plan.n_chunks} chunks "
        f"of {plan.chunk} in {plan.n_seg} segments, walks of {walk.cols} columns in {walk.warps} warps",
    )
    return Executable(call, spec, sp, remake)


def refusal(
    code: Generated, sizes: Mapping[str, int], inputs: Mapping[str, TensorSpec], on_gpu: bool
) -> str | None:  # fmt: skip
    """Why neither generated kernels nor a lowering run a call with these inputs, or None.

    `sizes` are the inputs' sizes by name.
    """
    if (old := old_assembler(on_gpu)) is not None:
        return old
    try:
        # Asked first: what is generated is derived when it is first read, which takes seconds.
        if any(x.serves(code, inputs) for x in code.program.lowerings):
            return None
    except NotEmittable as error:  # a lowering that reads it
        return str(error)
    return not_generated(code, sizes, inputs[next(iter(code.program.meta.tokens))][0])


def _of_call(code: Generated, spec: CallSpec, n_docs: int, sp: SequenceParallel | None) -> str:
    """A call as the log names it."""
    dtype = str(spec.dtype).removeprefix("torch.")
    packed = f", {n_docs} documents" if n_docs else ""
    ranks = f", {sp.world_size} ranks" if sp is not None and sp.world_size > 1 else ""
    return f"{code.program.merge.name} with B = {spec.B}, T = {spec.T}, H = {spec.H}, {dtype}{packed}{ranks}"


def _sizes(code: Generated, given: CallSpec, initial: torch.Tensor | None) -> dict[str, int]:
    """Sizes of the state and the inputs, by name."""
    layout = code.layout
    found: dict[str, int] = {}
    for name, shape in given.shapes.items():
        names = layout.tokens[name][1:] if name in layout.tokens else layout.params[name]
        found.update(zip(names, shape[2 if name in layout.tokens else 1 :], strict=True))
    if initial is not None and not layout.parts:
        found.update(zip(layout.state, initial.shape[2:], strict=True))
    return {name: found[name] for name in layout.sizes}
