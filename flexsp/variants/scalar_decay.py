"""The engine for scalar decays runs whole calls of linear attention, simple GLA and RetNet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from flexsp.compiler import Lowering

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

        dtypes, numbers = dict(zip(given.names, given.dtypes, strict=True)), code.program.meta.numbers
        gate = next((name for name in _GATES if name in dtypes), None)
        K, V = given.shapes["q"][-1], given.shapes["v"][-1]
        dims = {"q": 3, "k": 3, "v": 3} | ({} if gate is None else {gate: _GATES[gate]})
        if {name: len(shape) for name, shape in given.shapes.items()} != dims:
            return None  # inputs of other kinds than those of the shipped variants
        alike = dtypes["q"] == dtypes["k"] == dtypes["v"] and (gate is None or dtypes[gate] in (given.dtype, _F32))
        if code.chunk is not None or not alike or max(K, V) > _MOST:
            return None
        plan = plan_of(given.dtype, given.B, given.T, given.H, K, V, docs, of_device(given.device))
        text = code.program.call_text(given.dtype, docs > 0)
        return DiagonalCall(plan, given.dtype, gate, numbers["scale"], initial, ends, waited_for_by_nobody(sp), text)

    def serves(self, code: Generated, sizes: Mapping[str, int]) -> bool:
        return code.chunk is None and max(sizes["K"], sizes["V"]) <= _MOST

    def refuses(self, call: GeneratedCall) -> str | None:
        return "it runs whole calls only"


SCALAR_DECAY = _ScalarDecay()
