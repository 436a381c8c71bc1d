"""What stretches do, as `Transition.packed` lays it out: composed, or applied to states, in one launch where a kernel
runs, else by PyTorch."""

from __future__ import annotations

import torch

from flexsp.exceptions import kernels_on_cpu
from flexsp.scan.transitions import Transition

__all__ = ["applied", "composed", "in_one_launch"]


def in_one_launch(transition: Transition, device: torch.device) -> bool:
    """Whether the kernel runs: of A that are numbers, and of devices where Triton's kernels do."""
    return transition.kind != "dense" and (device.type == "cuda" or (device.type == "cpu" and kernels_on_cpu()))


def composed(transition: Transition, packed: torch.Tensor, earlier: torch.Tensor) -> torch.Tensor:
    """`Transition.compose_packed`, of many later stretches with as many earlier ones or with one."""
    if packed.is_meta and transition.kind != "dense":
        return packed + earlier  # of the right shape, and as the kernel one launch, for those who count
    if not in_one_launch(transition, packed.device):
        return transition.compose_packed(packed, earlier)
    from flexsp.scan.compose_kernel import compose

    return compose(transition.kind, packed, earlier, False)


def applied(transition: Transition, packed: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """`Transition.apply_packed`, of many stretches to as many states or to one."""
    if packed.is_meta and transition.kind != "dense":
        return transition.in_packed(packed)[1] + states
    if not in_one_launch(transition, packed.device):
        return transition.apply_packed(packed, states)
    from flexsp.scan.compose_kernel import compose

    return compose(transition.kind, packed, states, True)
