"""The delta engine runs whole calls of DeltaNet, Gated DeltaNet and the delta rule with a gate a channel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flexsp.compiler import Lowering

if TYPE_CHECKING:
    from flexsp.comm.group import SequenceParallel
    from flexsp.compiler.engine import Generated
    from flexsp.compiler.planning.launches import GeneratedCall
    from flexsp.kernels.launches import Call
    from flexsp.kernels.recipe import Given

__all__ = ["DELTA_RULE"]

_F32 = torch.float32


class _DeltaRule(Lowering):
    """Of inputs q, k, v, a number beta a token and, where the state decays, g, for each token or each of its key
    channels; "scale" is a number.

    Only on Hopper. Not of a given chunk size, heads of more than 128, and q, k and v of different dtypes.
    """

    name = "delta_rule"

    def call(
        self, code: Generated, given: Given, initial: bool, docs: int, ends: bool, sp: SequenceParallel | None
    ) -> Call | None:  # fmt: skip
        from flexsp.kernels.delta.calls import call_of
        from flexsp.kernels.delta.plan import engine_runs

        dtypes, numbers = dict(zip(given.names, given.dtypes, strict=True)), code.program.meta.numbers
        arguments = code.program.chunk.arguments
        beta, gate = "beta" if "beta" in arguments else "b", "g" if "g" in arguments else None
        by_channel = gate is not None and len(given.shapes[gate]) == 3
        dims = {"q": 3, "k": 3, "v": 3, beta: 2} | ({} if gate is None else {gate: 2 + by_channel})
        if {name: len(shape) for name, shape in given.shapes.items()} != dims:
            return None  # inputs of other kinds than those of the shipped variants
        K, V = given.shapes["q"][-1], given.shapes["v"][-1]
        alike = dtypes["q"] == dtypes["k"] == dtypes["v"] and {*dtypes.values()} <= {given.dtype, _F32}
        if code.chunk is not None or not alike or not engine_runs(K, V, given.device):
            return None
        if given.every("q") > 1 and by_channel:
            return None  # kernels for gates of channels have a token's key, query and gate in one row
        text = code.program.call_text(given.dtype, docs > 0)
        chained = sp is not None and sp.world_size > 1
        return call_of(
            given, beta, gate, numbers["scale"], initial, docs, ends, chained, text, code.program.merge.name
        )

    def refuses(self, call: GeneratedCall) -> str | None:
        return "it runs whole calls only"


DELTA_RULE = _DeltaRule()
