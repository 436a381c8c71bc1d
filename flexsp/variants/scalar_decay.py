"""The engine for scalar decays runs whole calls of linear attention, simple GLA and RetNet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from flexsp.comm.group import SequenceParallel
from flexsp.compiler import Lowering
from flexsp.compiler.frontend.program import Program
from flexsp.compiler.planning.lowering import TensorSpec
from flexsp.kernels.diagonal import in_pytorch
from flexsp.kernels.launch_plan import LaunchPlan

if TYPE_CHECKING:
    from flexsp.compiler.backend.generated_kernels import Generated
    from flexsp.compiler.planning.generated_plan import GeneratedPlan
    from flexsp.kernels.executable import CallSpec

__all__ = ["SCALAR_DECAY"]

_MOST = 256
_F32 = torch.float32
_GATES = {"g": 2, "log_gamma": 1}  # their dimensions for one sequence


def _gate(program: Program) -> str | None:
    """The input that the state decays by; one that the functions do not take is not looked at."""
    return next((name for name in _GATES if name in program.decay.arguments), None)


def _dims(gate: str | None) -> dict[str, int]:
    """Dimensions of the inputs of one sequence."""
    return {"q": 3, "k": 3, "v": 3} | ({} if gate is None else {gate: _GATES[gate]})


class _ScalarDecay(Lowering):
    """Of inputs q, k, v and, where the state decays, g a token or log_gamma a head; "scale" is a number.

    Not of a given chunk size, heads of more than 256, and q, k and v of different dtypes.
    """

    name = "scalar_decay"

    def plan(
        self, code: Generated, given: CallSpec, initial: bool, n_docs: int, returns_final: bool,
        sp: SequenceParallel | None,
    ) -> LaunchPlan | None:  # fmt: skip
        from flexsp.devices import of_device
        from flexsp.kernels.diagonal.diagonal_plan import DiagonalPlan
        from flexsp.kernels.diagonal.tiling import tiling_of
        from flexsp.kernels.engine import last_in_backward_chain, neighbours

        looks = {x: (dtype, given.shapes[x]) for x, dtype in zip(given.names, given.dtypes, strict=True)}
        if not self.serves(code, looks):
            return None
        K, V = given.shapes["q"][-1], given.shapes["v"][-1]
        program, dq_first = code.program, last_in_backward_chain(sp)
        sizes = given.B, given.T, given.H, K, V, n_docs
        tiling = tiling_of(given.dtype, *sizes, of_device(given.device), gated=_gate(program) == "g")
        description, scale = program.description(given.dtype, n_docs > 0), program.meta.numbers["scale"]
        return DiagonalPlan(
            tiling, given.dtype, _gate(program), scale, initial, returns_final, dq_first, description,
            neighbours=neighbours(sp),
        )  # fmt: skip

    def in_pytorch(
        self, program: Program, inputs: dict[str, torch.Tensor], initial: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None, sp: SequenceParallel | None, description: str,
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:  # fmt: skip
        gate = _gate(program)
        if {name: x.dim() - (name in program.meta.tokens) for name, x in inputs.items()} != _dims(gate):
            return None
        (q, k, v), (g, log_gamma) = [inputs[name] for name in "qkv"], [inputs.get(name) for name in _GATES]
        scale = program.meta.numbers["scale"]
        return in_pytorch.run(q, k, v, g, log_gamma, scale, initial, cu_seqlens, sp, description, True)

    def serves(self, code: Generated, inputs: Mapping[str, TensorSpec]) -> bool:
        gate = _gate(code.program)
        if code.chunk is not None or {name: len(shape) for name, (_, shape) in inputs.items()} != _dims(gate):
            return False
        (dtype, (*_, K)), (of_v, (*_, V)) = inputs["q"], inputs["v"]
        alike = dtype == inputs["k"][0] == of_v and (gate is None or inputs[gate][0] in (dtype, _F32))
        return alike and max(K, V) <= _MOST

    def refuses(self, plan: GeneratedPlan) -> str | None:
        return "it runs whole calls only"


SCALAR_DECAY = _ScalarDecay()
