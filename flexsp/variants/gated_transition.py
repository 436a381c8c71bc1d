"""RWKV-7 by kernels that make a chunk's scores and gradients at once, beside the walks that are generated for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from flexsp.compiler import Lowering, replaced
from flexsp.compiler.planning.lowering import other_inputs
from flexsp.kernels.launch_plan import Buffer, Role, gradient_of
from flexsp.kernels.launch_spec import Launch, LaunchSpec

if TYPE_CHECKING:
    from flexsp.compiler.planning.generated_plan import GeneratedPlan

__all__ = ["GATED_TRANSITION"]

_INPUTS = ("q", "k", "v", "a", "b", "g")
_LARGEST = 64  # tokens of a chunk, and columns that a program holds at a time
_RUN = 32  # chunks that a program looks at, where few of them are expected to have gates that are not small
_READS, _SOLVED, _SMALL = "@reads", "@solved", "@small_gates"


class _How(NamedTuple):
    """Channels of keys that a program holds at a time and its warps."""

    channels: int
    warps: int


class _Kept(NamedTuple):
    """Names of what walks and our kernels read, each of every chunk."""

    running: str
    gated_q: str
    gated_k: str
    gated_b: str
    gated_a: str
    q_k: str
    q_b: str
    a_k: str
    lower: str
    inverse: str


class _GatedTransition(Lowering):
    """Of inputs q, k, v, a, b and gates g of every key channel, and the number "scale", in bfloat16.

    In other dtypes generated kernels run: products of three tf32 ones are what bounds those.
    """

    name = "gated_transition"

    def refuses(self, plan: GeneratedPlan) -> str | None:
        if plan.products != torch.bfloat16:
            return "its products are of bfloat16"
        if plan.chunk > _LARGEST:
            return f"its chunks have up to {_LARGEST} tokens"
        return other_inputs(plan.code, _INPUTS)

    def buffers(self, plan: GeneratedPlan) -> list[Buffer]:
        shape = (plan.B * plan.H, plan.n_chunks, plan.chunk, plan.sizes[plan.code.layout.cols])
        scratch = [Buffer(name, Role.SCRATCH, plan.dtype, shape) for name in (_READS, _SOLVED)]
        return [Buffer(_SMALL, Role.SAVED, torch.int32, shape[:2]), *scratch]

    def forward(self, plan: GeneratedPlan, launches: list[LaunchSpec]) -> list[LaunchSpec]:
        from flexsp.kernels.gated_transition.prepare import gate_operands, gate_operands_small, solve_chunks

        x, tokens = _kept(plan), ("q", "k", "a", "b", "g")
        made = (x.running, x.gated_q, x.gated_k, x.gated_a, x.gated_b, x.q_k, x.q_b, x.a_k, x.lower)
        gated = [
            _launch(plan, gate_operands_small, _How(64, 4), tokens, tokens, (*made, _SMALL)),
            _launch(plan, gate_operands, _How(32, 8), tokens, tokens, made, also=(_SMALL,)),
        ]
        reads = ("v", x.inverse, x.gated_a, x.a_k)
        solved = _launch(plan, solve_chunks, _How(64, 4), ("v",), reads, ("u", "w"))
        return replaced(launches, {"prepare0": gated, "scores_kernel": [], "prepare1": [], "prepare2": [solved]})

    def backward(self, plan: GeneratedPlan, launches: list[LaunchSpec]) -> list[LaunchSpec]:
        from flexsp.kernels.gated_transition.grads import operand_grads, operand_grads_small, value_grads

        x, states = _kept(plan), ("@entering", "@leaving")
        reads = ("do", "u", "w", x.inverse, x.gated_k, x.gated_b, x.q_k, x.q_b, x.a_k, *states)
        writes = (_READS, _SOLVED, gradient_of("v"))
        first = _launch(plan, value_grads, _How(64, 4), ("do",), reads, writes)
        tokens = ("q", "k", "a", "b", "g", "v", "do")
        given, made = (*tokens, _READS, _SOLVED, x.running, _SMALL, *states), tuple(map(gradient_of, tokens[:5]))
        grads = [
            _launch(plan, kernel, how, tokens, given, made)
            for kernel, how in ((operand_grads_small, _How(32, 4)), (operand_grads, _How(32, 8)))
        ]
        return replaced(launches, {"adjoint0": [first], "scores_grad_kernel": [], "grads": grads})


def _kept(plan: GeneratedPlan) -> _Kept:
    """Found by what reads them: the program may be traced in another order."""
    step, kernels = plan.code.step, plan.code.kernels
    scored = {x.args[:2]: x for x in step.intrinsics if x.kind == "scores"}
    q_k, q_b = scored["q", "k"], scored["q", "b"]
    (inverse,) = (x for x in step.intrinsics if x.kind == "inverse")
    end: Any = next(x for x in step.graph.nodes if x.op == "output")
    named = dict(zip(step.outputs, end.args[0], strict=True))
    operands = [name for name, x in step.kept.items() if x.role in ("gated", "operand")]
    gated = {x.name: name for name in operands for x in named[f"keep_{name}"].all_input_nodes}
    of_values = next(x for x in kernels["prepare2"].kept if x in {y for z in scored.values() for y in z.results})
    (lower,), (solved,) = inverse.args, inverse.results
    (of_qk,), (of_qb,) = q_k.results, q_b.results
    return _Kept(q_k.args[-1], gated["q"], gated["k"], gated["b"], gated["a"], of_qk, of_qb, of_values, lower, solved)


def _launch(
    plan: GeneratedPlan, kernel: Any, how: _How, strided: tuple[str, ...], reads: tuple[str, ...],
    writes: tuple[str, ...], also: tuple[str, ...] = (),
) -> LaunchSpec:  # fmt: skip
    """Of a kernel whose numbers and constants are those of ours that it names; `also` are read, behind what is
    written."""
    from flexsp.kernels.primitives import dots

    K, V, blocks = plan.code.layout.rows, plan.code.layout.cols, dict(plan.tiling.blocks)
    table, channels = "@table" if plan.n_docs else None, min(how.channels, blocks[K])
    parts, launch = -(-plan.sizes[K] // channels), Launch(0, how.warps, 1)
    constants: dict[str, Any] = {
        "K": plan.sizes[K], "V": plan.sizes[V], "BN": channels, "BV": min(_LARGEST, blocks[V]), "C": plan.chunk,
        "PARTS": parts, "LEVELS": plan.chunk.bit_length() - 1, "RUN": _RUN, "PACKED": plan.n_docs > 0,
        **dots(plan.products),
    }  # fmt: skip
    numbers = {"n_chunks": plan.n_chunks, "scale": float(plan.code.program.meta.numbers["scale"])}
    names = kernel.arg_names
    groups = -(-plan.n_chunks // (_RUN if "RUN" in names else 1)) * (parts if "PARTS" in names else 1)
    return LaunchSpec(
        kernel.__name__, launch, (groups, plan.B * plan.H, 1), (*reads, *writes, *also, table), (*reads, *also), writes,
        (*strided, plan.T, plan.H, *(n for name, n in numbers.items() if name in names)),
        {name: x for name, x in constants.items() if name in names}, launch.options, kernel=kernel,
    )  # fmt: skip


GATED_TRANSITION = _GatedTransition()
