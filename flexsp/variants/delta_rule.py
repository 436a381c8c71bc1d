"""The delta engine runs whole calls of DeltaNet, Gated DeltaNet and the delta rule with a gate a channel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from flexsp.comm.group import SequenceParallel
from flexsp.compiler import Lowering
from flexsp.compiler.frontend.program import Program
from flexsp.compiler.graphs.values import NotEmittable
from flexsp.compiler.planning.lowering import TensorSpec
from flexsp.kernels.launch_plan import LaunchPlan

if TYPE_CHECKING:
    from flexsp.compiler.backend.generated_kernels import Generated
    from flexsp.compiler.planning.generated_plan import GeneratedPlan
    from flexsp.kernels.executable import CallSpec

__all__ = ["DELTA_RULE", "OF_ANY_KEYS"]

_F32 = torch.float32


class _DeltaRule(Lowering):
    """Of inputs q, k, v, a number beta a token and, where the state decays, g, for each token or each of its key
    channels; "scale" is a number. Or of strengths by channel, "erase" and "write", in place of beta, and g by channel.

    Only on Hopper. Not of a given chunk size, heads of more than 256, and q, k and v of different dtypes.

    norm: q and k are divided by their norms, which the program's functions do not do: nothing else may run its calls.
    """

    def __init__(self, name: str, norm: bool) -> None:
        self.name, self.norm = name, norm

    def plan(
        self, code: Generated, given: CallSpec, initial: bool, n_docs: int, returns_final: bool,
        sp: SequenceParallel | None,
    ) -> LaunchPlan | None:  # fmt: skip
        from flexsp.kernels.delta.calls import launch_plan_of

        looks = {x: (dtype, given.shapes[x]) for x, dtype in zip(given.names, given.dtypes, strict=True)}
        beta, gate, write = _names(code)
        # Kernels for gates of channels have a token's key, query and gate in one row.
        apart = given.tokens_per_row("q") > 1 and gate is not None and len(given.shapes[gate]) == 3
        if apart or not _runs(code, looks, given.device):
            if self.norm:
                raise NotEmittable("only the delta engine divides q and k by their norms, and does not take the call")
            return None
        description, scale = code.program.description(given.dtype, n_docs > 0), code.program.meta.numbers["scale"]
        chained = sp is not None and sp.world_size > 1
        return launch_plan_of(
            given, beta, gate, scale, initial, n_docs, returns_final, chained, description, code.program.merge.name,
            self.norm, write,
        )  # fmt: skip

    def in_pytorch(self, program: Program, *given: Any) -> None:
        if self.norm:
            raise NotEmittable("only kernels divide q and k by their norms, and none run here")

    def serves(self, code: Generated, inputs: Mapping[str, TensorSpec]) -> bool:
        beta, gate, _write = _names(code)
        if not _runs(code, inputs, None):
            return False
        several = inputs["q"][1][0] != inputs["k"][1][0]  # keys a token
        # Kernels for gates of channels take one key a token, as `plan` says.
        return not (several and gate is not None and len(inputs[gate][1]) == 3)

    def refuses(self, plan: GeneratedPlan) -> str | None:
        return "it runs whole calls only"


def _names(code: Generated) -> tuple[str, str | None, str | None]:
    """Of the inputs that are beta, or strengths of erasing, gates, and strengths of writing."""
    arguments = code.program.chunk.arguments
    beta = next((x for x in ("beta", "erase") if x in arguments), "b")
    return beta, "g" if "g" in arguments else None, "write" if "write" in arguments else None


def _runs(code: Generated, inputs: Mapping[str, TensorSpec], device: torch.device | None) -> bool:
    """Whether calls with such inputs are run; not those of other kinds than the shipped variants have."""
    from flexsp.kernels.delta.calls import runs_strengths
    from flexsp.kernels.delta.tiling import engine_runs

    beta, gate, write = _names(code)
    dims = {"q": 3, "k": 3, "v": 3, beta: 2} | ({} if gate is None else {gate: 2})
    shapes = {name: shape for name, (_, shape) in inputs.items()}
    if gate is not None and len(shapes.get(gate, ())) == 3:
        dims[gate] = 3
    if write is not None:
        dims |= dict.fromkeys((beta, str(gate), write), 3)
    if code.chunk is not None or {name: len(shape) for name, shape in shapes.items()} != dims:
        return False
    dtype = inputs["q"][0]
    alike = dtype == inputs["k"][0] == inputs["v"][0] and {x for x, _ in inputs.values()} <= {dtype, _F32}
    sizes = shapes["q"][-1], shapes["v"][-1]
    return alike and (engine_runs(*sizes, device) if write is None else runs_strengths(dtype, *sizes, device))


DELTA_RULE = _DeltaRule("delta_rule", norm=False)
OF_ANY_KEYS = _DeltaRule("delta_rule_of_any_keys", norm=True)
