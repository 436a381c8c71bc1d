"""Which of the delta engine's kernels run a call."""

from __future__ import annotations

import torch

from flexsp.devices import of_device
from flexsp.kernels.delta.channel_plan import ChannelPlan
from flexsp.kernels.delta.delta_plan import DeltaPlan
from flexsp.kernels.delta.tiling import engine_runs, in_gluon, tiling_of
from flexsp.kernels.executable import CallSpec
from flexsp.runtime.triton_private import runs_gluon

__all__ = ["launch_plan_of", "runs_strengths"]


def launch_plan_of(
    given: CallSpec, beta: str, gate: str | None, scale: float, initial: bool, n_docs: int,
    returns_final: bool, chained: bool, description: str, name: str, norm: bool = False, write: str | None = None,
) -> DeltaPlan:  # fmt: skip
    """The plan for inputs q, k, v, beta [T, H] and gates [T, H] or [T, H, K]; see `DeltaPlan`.

    H is a multiple of the heads of q and k, and T of the rows of q and of gates a token.

    chained: over several ranks. norm: q and k are to be divided by their norms. write: of calls that
    `runs_strengths`, the strengths of writing [T, H, V]; beta are those of erasing [T, H, K].
    """
    types = dict(zip(given.names, given.dtypes, strict=True))
    K, V = given.shapes["q"][-1], given.shapes["v"][-1]
    by_channel = gate is not None and len(given.shapes[gate]) == 3
    tiling = tiling_of(
        given.dtype, given.B, given.T, given.H, K, V, n_docs, 0 if gate is None else K if by_channel else 1, chained,
        of_device(given.device), runs_gluon(), given.H // given.shapes["q"][1], given.tokens_per_row("q"),
    )  # fmt: skip
    kind: type[DeltaPlan] = ChannelPlan if by_channel else DeltaPlan
    if tiling.tiles.copies:
        kind = _in_gluon(by_channel)
        given.require_vectors("q", "k", "v", *([str(gate)] if by_channel else []))
    kinds = types[beta], torch.float32 if gate is None else types[gate]
    called = tiling, given.dtype, beta, gate, kinds, scale, initial, returns_final, description, name, norm
    if write is None:
        return kind(*called)
    from flexsp.kernels.delta.hopper_strengths_plan import HopperStrengthsPlan

    given.require_vectors(beta)
    return HopperStrengthsPlan(*called, write, types[write])


def runs_strengths(dtype: torch.dtype, K: int, V: int, device: torch.device | None) -> bool:
    """Whether the engine runs calls with strengths of erasing and of writing by channel: in Gluon alone."""
    return runs_gluon() and engine_runs(K, V, device) and in_gluon(dtype, K, V, K)


def _in_gluon(by_channel: bool) -> type[DeltaPlan]:
    """Not imported before: Gluon is not in all releases of Triton."""
    from flexsp.kernels.delta.hopper_channel_plan import HopperChannelPlan
    from flexsp.kernels.delta.hopper_plan import HopperPlan

    return HopperChannelPlan if by_channel else HopperPlan
