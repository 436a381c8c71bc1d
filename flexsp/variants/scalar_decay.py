"""The engine for scalar decays runs whole calls of linear attention, simple GLA and RetNet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from flexsp.compiler import Lowering
from flexsp.compiler.planning.lowering import Looks

if TYPE_CHECKING:
    from flexsp.comm.group import SequenceParallel
    from flexsp.compiler.engine import Generated
    from flexsp.compiler.planning.launches import GeneratedCall
    from flexsp.kernels.launches import Call
    from flexsp.kernels.recipe import Given

__all__ = ["SCALAR_DECAY"]

_MOST = 256
_F32 = torch.float32
_GATES = {"g": 2, "log_gamma": 1}  # their dimensions for one sequence


def _gate(code: Generated) -> str | None:
    """The input that the state decays by; one that the functions do not take is not looked at."""
    return next((name for name in _GATES if name in code.program.decay.arguments), None)


class _ScalarDecay(Lowering):
    """Of inputs q, k, v and, where the state decays, g a token or log_gamma a head; "scale" is a number.

    Not of a given chunk size, heads of more than 256, and q, k and v of different dtypes.
    """

    name = "scalar_decay"

    def call(
        self, code: Generated, given: Given, initial: bool, docs: int, ends: bool, sp: SequenceParallel | None
    ) -> Call | None:  # fmt: skip
        from flexsp.devices import of_device
        from flexsp.kernels.diagonal.dispatch import waited_for_by_nobody
        from flexsp.kernels.diagonal.launches import DiagonalCall
        from flexsp.kernels.diagonal.plan import plan_of

        looks = {x: (dtype, given.shapes[x]) for x, dtype in zip(given.names, given.dtypes, strict=True)}
        if not self.serves(code, looks):
            return None
        K, V = given.shapes["q"][-1], given.shapes["v"][-1]
        plan = plan_of(given.dtype, given.B, given.T, given.H, K, V, docs, of_device(given.device))
        text, scale = code.program.call_text(given.dtype, docs > 0), code.program.meta.numbers["scale"]
        return DiagonalCall(plan, given.dtype, _gate(code), scale, initial, ends, waited_for_by_nobody(sp), text)

    def serves(self, code: Generated, inputs: Mapping[str, Looks]) -> bool:
        gate = _gate(code)
        dims = {"q": 3, "k": 3, "v": 3} | ({} if gate is None else {gate: _GATES[gate]})
        if code.chunk is not None or {name: len(shape) for name, (_, shape) in inputs.items()} != dims:
            return False
        (dtype, (*_, K)), (of_v, (*_, V)) = inputs["q"], inputs["v"]
        alike = dtype == inputs["k"][0] == of_v and (gate is None or inputs[gate][0] in (dtype, _F32))
        return alike and max(K, V) <= _MOST

    def refuses(self, call: GeneratedCall) -> str | None:
        return "it runs whole calls only"


SCALAR_DECAY = _ScalarDecay()
