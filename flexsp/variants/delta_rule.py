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
        from flexsp.devices import of_device
        from flexsp.kernels.delta.launches import DeltaCall
        from flexsp.kernels.delta.plan import engine_runs, plan_of
        from flexsp.runtime.triton_private import runs_gluon

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
        chained, device = sp is not None and sp.world_size > 1, of_device(given.device)
        by_token, gluon = gate is not None and not by_channel, runs_gluon() and not by_channel
        plan = plan_of(given.dtype, given.B, given.T, given.H, K, V, docs, by_token, chained, device, gluon)
        text = code.program.call_text(given.dtype, docs > 0)
        types = dtypes[beta], _F32 if gate is None else dtypes[gate]
        kind: type[DeltaCall] = DeltaCall
        if by_channel:
            from flexsp.kernels.delta.channel_launches import ChannelCall

            kind = ChannelCall
        elif plan.tiles.copies:
            from flexsp.kernels.delta.hopper_launches import HopperCall

            kind = HopperCall
            given.require_vectors("q", "k", "v")
        return kind(
            plan, given.dtype, beta, gate, types, numbers["scale"], initial, ends, text, code.program.merge.name
        )

    def refuses(self, call: GeneratedCall) -> str | None:
        return "it runs whole calls only"


DELTA_RULE = _DeltaRule()
