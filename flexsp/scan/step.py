"""The scan over segments and ranks as a step of a call."""

from __future__ import annotations

from flexsp.comm.group import get_sp
from flexsp.runtime.launch import KernelLaunch
from flexsp.runtime.steps import Frame, Step
from flexsp.scan.propagate import local_launch, propagate
from flexsp.scan.transitions import Transition

__all__ = ["propagate_step"]


def propagate_step(
    states: str, a: str | None, cut: str | None, shape: tuple[int, int, int, int, int], kind: str, reverse: bool,
    sp_id: int, call: str = "",
) -> Step:  # fmt: skip
    """`propagate` on named tensors: over segments, and over the ranks of the group `sp_id` (-1: none).

    Args:
        a, cut: of the `Transition`.
        shape: B, NSEG, H, K, V.
        kind: of the transition.
        call: the op that needs it, the same text on every rank.
    """
    B, n_seg, H, K, V = shape
    if sp_id >= 0:

        def over_ranks(frame: Frame) -> None:
            through = Transition(kind, *(None if name is None else frame[name] for name in (a, cut)))
            propagate(frame[states].view(B, -1, H, K, V), through, get_sp(sp_id), reverse=reverse, call=call)

        return over_ranks
    kernel, grid, numbers, constants, options = local_launch(B, n_seg, H, K, V, kind, cut is not None, reverse)
    return KernelLaunch(kernel, (*grid, 1, 1), [states, a, cut, *[None] * 6], numbers, constants, options)
