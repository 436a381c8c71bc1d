"""GLA by kernels that gate keys and make scores at once, beside the walks that are generated for it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from flexsp.comm.group import SequenceParallel
from flexsp.compiler import Lowering, replaced
from flexsp.compiler.planning.lowering import other_inputs
from flexsp.kernels.launch_plan import Buffer, LaunchPlan, Role, gradient_of
from flexsp.kernels.launch_spec import Launch, LaunchSpec

if TYPE_CHECKING:
    from flexsp.compiler.backend.generated_kernels import Generated
    from flexsp.compiler.planning.generated_plan import GeneratedPlan
    from flexsp.kernels.executable import CallSpec

__all__ = ["GATED_KEYS"]

_INPUTS = ("q", "k", "v", "g")
_LARGEST = 64  # tokens of a chunk
_SMALL = "@small_gates"
_RUN = 32  # chunks that a program looks at, where few of them are expected to have gates that are not small


class _How(NamedTuple):
    """Channels of keys that a program holds at a time, columns of values, how it is launched, whether it decays pairs
    level by level."""

    channels: int
    columns: int
    warps: int
    stages: int
    levels: bool


_FORWARD = {True: _How(128, 0, 4, 1, False), False: _How(64, 0, 8, 1, True)}
_BACKWARD = {True: _How(64, 64, 4, 1, False), False: _How(64, 64, 8, 1, True)}


class _GatedKeys(Lowering):
    """Of inputs q, k, v and gates g of every key channel, and the number "scale".

    Gates below -104 act as that, a decay of 0, and have no gradient. In bf16 kernels for small gates run first, on all
    chunks; those for any gates leave anew what they made of chunks that have others.
    """

    name = "gated_keys"

    def plan(
        self, code: Generated, given: CallSpec, initial: bool, n_docs: int, returns_final: bool,
        sp: SequenceParallel | None,
    ) -> LaunchPlan | None:  # fmt: skip
        """A generated call in chunks that the kernels here are made for."""
        from flexsp.compiler.planning.generated_plan import GeneratedPlan
        from flexsp.compiler.planning.tiling import choose_tiling
        from flexsp.devices import of_device

        if code.chunk is not None or other_inputs(code, _INPUTS) is not None:
            return None
        (T, H, K), V = given.shapes["q"][-3:], given.shapes["v"][-1]
        sizes, chained = {code.layout.rows: K, code.layout.cols: V}, sp is not None and sp.world_size > 1
        code = code.sized(sizes, given.dtype)
        tiling = choose_tiling(code, sizes, given.B * H, T, n_docs, given.dtype, chained, of_device(given.device))
        if tiling.chunk > _LARGEST:
            tiling = choose_tiling(
                code, sizes, given.B * H, T, n_docs, given.dtype, chained, of_device(given.device), chunk=_LARGEST
            )  # fmt: skip
        return GeneratedPlan(code, tiling, sizes, given.B, H, T, n_docs, given.dtype, initial, returns_final)

    def refuses(self, plan: GeneratedPlan) -> str | None:
        if plan.chunk > _LARGEST:
            return f"its chunks have up to {_LARGEST} tokens"
        return other_inputs(plan.code, _INPUTS)

    def buffers(self, plan: GeneratedPlan) -> list[Buffer]:
        return [Buffer(_SMALL, Role.SAVED, torch.int32, (plan.B * plan.H, plan.n_chunks))]

    def forward(self, plan: GeneratedPlan, launches: list[LaunchSpec]) -> list[LaunchSpec]:
        from flexsp.kernels.gated_keys.prepare import gate_keys, gate_keys_small

        scored = next(x for x in launches if x.kind == "scores_kernel")
        inputs, written = ("q", "k", "g"), _kept(plan)
        given = replace(
            scored, pointers=(*inputs, *written, _SMALL, scored.pointers[-1]), reads=inputs, writes=(*written, _SMALL),
            numbers=(*inputs, plan.T, plan.H), intrinsic=None,
        )  # fmt: skip
        others = replace(given, numbers=(*given.numbers, plan.n_chunks))
        mine = [_launch(plan, given, gate_keys_small, _FORWARD[True], 1)] if _small_apart(plan) else []
        mine.append(_launch(plan, others, gate_keys, _FORWARD[False], 1))
        return replaced(launches, {"prepare0": [], "scores_kernel": mine})

    def backward(self, plan: GeneratedPlan, launches: list[LaunchSpec]) -> list[LaunchSpec]:
        from flexsp.kernels.gated_keys.grads import key_grads, key_grads_small

        b, _, gated_k, scores = _kept(plan)
        scored = next(x for x in launches if x.kind == "scores_grad_kernel")
        reads = ("q", "k", "g", "v", "do", b, gated_k, scores, _SMALL, "@entering", "@leaving")
        writes = tuple(map(gradient_of, ("q", "k", "g", "v")))
        scale = float(plan.code.program.meta.numbers["scale"])
        given = replace(
            scored, pointers=(*reads, *writes, scored.pointers[-1]), reads=reads, writes=writes, intrinsic=None,
            numbers=("q", "k", "g", "v", "do", plan.T, plan.H, plan.n_chunks, scale),
        )  # fmt: skip
        ways = {True: key_grads_small, False: key_grads}
        which = (True, False) if _small_apart(plan) else (False,)
        mine = [_gradients(plan, given, ways[small], small) for small in which]
        return replaced(launches, {"adjoint0": [], "scores_grad_kernel": [], "grads": mine})


def _small_apart(plan: GeneratedPlan) -> bool:
    """Whether chunks of small gates have kernels of their own. Not in fp32: the exponential's error grows with its
    argument."""
    return plan.dtype == torch.bfloat16


def _kept(plan: GeneratedPlan) -> tuple[str, ...]:
    """Names of the running gates, gated queries and keys, and scores that walks read."""
    kernels, (what,) = plan.code.kernels, [x for x in plan.code.step.intrinsics if x.kind == "scores"]
    b = what.args[-1]
    (gated_q,), (gated_k,) = ([x for x in kernels[kind].kept if x != b] for kind in ("summarize_backward", "summarize"))
    return b, gated_q, gated_k, *what.results


def _launch(plan: GeneratedPlan, given: LaunchSpec, kernel: Any, how: _How, parts: int) -> LaunchSpec:
    """Of `given`, a generated launch for scores with other pointers, that of one of our kernels in `parts`."""
    K, run = plan.code.layout.rows, _RUN if how.levels and _small_apart(plan) else 1
    constants = {name: given.constants[name] for name in ("C", "PACKED", "DOT", "PREC")}
    constants |= {"K": plan.sizes[K], "BN": min(how.channels, dict(plan.tiling.blocks)[K])}
    constants |= {"LEVELS": given.constants["LEVELS"], "RUN": run} if how.levels else {}
    launch = Launch(0, how.warps if _small_apart(plan) else 4, how.stages)
    grid = (parts * -(-plan.n_chunks // run), plan.B * plan.H, 1)
    return replace(
        given, kind=kernel.__name__, how=launch, grid=grid, constants=constants, options=launch.options, kernel=kernel
    )


def _gradients(plan: GeneratedPlan, given: LaunchSpec, kernel: Any, small: bool) -> LaunchSpec:
    how, blocks, layout = _BACKWARD[small], dict(plan.tiling.blocks), plan.code.layout
    parts = -(-plan.sizes[layout.rows] // min(how.channels, blocks[layout.rows])) + 1
    # Two steps over more than 16 columns, even if one tile could hold them all. A loop of one step is unrolled, and the
    # loads that two such loops share become one: the registers that hold its result from loop to loop spill.
    columns = min(how.columns, max(16, blocks[layout.cols] // 2))
    sizes = {"V": plan.sizes[layout.cols], "BV": columns, "PARTS": parts}
    launch = _launch(plan, given, kernel, how, parts)
    return replace(launch, constants={**launch.constants, **sizes, "LEVELS": given.constants["LEVELS"]})


GATED_KEYS = _GatedKeys()
