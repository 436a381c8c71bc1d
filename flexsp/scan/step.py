"""The scan over segments and ranks as a step of a call."""

from __future__ import annotations

from typing import Any

from flexsp.comm.group import get_sp
from flexsp.runtime.launch import KernelLaunch
from flexsp.runtime.steps import Frame, Step
from flexsp.scan.propagate import local_launch, propagate

__all__ = ["propagate_step"]


def propagate_step(
    states: str, decay: str | None, cut: str | None, shape: tuple[int, int, int, int, int], kind: str, reverse: bool,
    sp_id: int, call: str = "",
) -> Step:  # fmt: skip
    """`propagate` on named tensors: over segments, and over the ranks of the group `sp_id` (-1: none).

    Args:
        decay: log decay; A where `kind` is "dense", factors where it is "elementwise", shifts where it is "max-plus";
            None where it is "none".
        shape: B, NSEG, H, K, V.
        call: the op that needs it, the same text on every rank.
    """
    B, n_seg, H, K, V = shape
    if sp_id >= 0:

        def over_ranks(frame: Frame) -> None:
            found = None if decay is None else frame[decay]
            name = {"dense": "A", "elementwise": "factors", "max-plus": "shifts"}.get(kind, "log_a")
            carried: dict[str, Any] = {name: found}
            propagate(
                frame[states].view(B, -1, H, K, V), carried.pop("log_a", None), None if cut is None else frame[cut],
                get_sp(sp_id), **carried, reverse=reverse, call=call,
            )  # fmt: skip

        return over_ranks
    kernel, grid, numbers, constants, options = local_launch(B, n_seg, H, K, V, kind, cut is not None, reverse)
    return KernelLaunch(kernel, (*grid, 1, 1), [states, decay, cut, *[None] * 6], numbers, constants, options)
