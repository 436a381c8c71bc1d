"""What a call of the delta engine was given, and how it is cut: what its launches are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flexsp.kernels.delta import walks
from flexsp.kernels.delta.plan import Tiling
from flexsp.kernels.launch_plan import LaunchPlan

__all__ = ["CallArgs"]


@dataclass(frozen=True)
class CallArgs(LaunchPlan):
    """The tiling, the inputs and the options of one call.

    Attributes:
        dtype: of q, k and v.
        beta: the name of the input beta.
        gate: that of the log gates, None where the state does not decay.
        types: dtypes of beta and of the gates.
    """

    tiling: Tiling
    dtype: torch.dtype
    beta: str
    gate: str | None
    types: tuple[torch.dtype, torch.dtype]
    scale: float
    initial: bool
    ends: bool
    text: str
    name: str

    def settled(self) -> dict[str, Any]:
        return {"sparse": self.docs > 0, "scanned": self.tiling.scanned, "aligned_gradient": self.tiling.tiles.copies}

    @property
    def gated(self) -> int:
        """What decays a state, as `walks` knows it."""
        return int((walks.NONE if self.gate is None else walks.SCALAR).value)

    @property
    def alive(self) -> str | None:
        """Which segments' matrices count: not where states decay to nothing, or a document begins."""
        return "@alive" if self.gate is not None or (self.tiling.docs and self.tiling.scanned) else None

    def strides(self, names: Sequence[str | None]) -> list[int | str]:
        """Those of a token's numbers are 0 where there is no such input."""
        return [n for x in names for n in ([0, 0, 0] if x is None else [x])]

    @property
    def to_keys(self) -> list[str]:
        """Gradients of q and k, of each head."""
        return ["d_q", "d_k"] if self.tiling.group == 1 else ["@dq", "@dk"]
