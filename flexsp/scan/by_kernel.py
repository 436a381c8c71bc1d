"""The state that arrives at a rank, sent by the kernel of `flexsp.scan.propagate`, to which a rank is one segment.

What `flexsp.scan.schedules` does with torch.distributed, in one launch. A transition that is the same for all numbers
("none") needs no rows and columns of a state: its numbers go as few tiles, of few widths, so that few kernels are
compiled.
"""

from __future__ import annotations

import torch

from flexsp.comm.group import SequenceParallel
from flexsp.comm.signature import facts_of
from flexsp.comm.transport import in_kernel
from flexsp.exceptions import kernels_on_cpu
from flexsp.scan.transitions import Transition

__all__ = ["goes_by_kernel", "incoming_by_kernel", "sends"]

_COLUMNS = 256  # of a state in the kernel, at most; rows too
_ROWS = 16  # with as many columns, of a whole tile


def sends(sp: SequenceParallel, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel sends numbers of this dtype on such devices between the ranks of a group: the same on all."""
    launches = device.type == "cuda" or kernels_on_cpu()
    return in_kernel(sp) and launches and device.type == sp.device.type and dtype == torch.float32


def goes_by_kernel(F: torch.Tensor, transition: Transition, sp: SequenceParallel) -> bool:
    """Whether the kernel sends states F [B, H, *state] between the ranks of a group: if the group's arenas hold them.

    It depends on nothing but the group, dtype, device and shape of F and the kind of the transition, which are alike on
    all ranks that make the same call.
    """
    tiled = F.dim() == 4 and max(F.shape[2:]) <= _COLUMNS and transition.kind != "elementwise"
    if not sends(sp, F.device, F.dtype) or not (transition.kind == "none" or tiled):
        return False
    from flexsp.scan.propagate import fits

    return fits(F.shape[0], *_shape(F, transition), transition.kind == "dense", sp)


def _shape(F: torch.Tensor, transition: Transition) -> tuple[int, int, int]:
    """(heads, rows, columns) of a state in the kernel."""
    return _tiles(F.shape[1:].numel()) if transition.kind == "none" else (F.shape[1], F.shape[2], F.shape[3])


def incoming_by_kernel(
    F: torch.Tensor, transition: Transition, sp: SequenceParallel, reverse: bool = False, call: str = ""
) -> torch.Tensor:
    """What `incoming_state` gives, where `goes_by_kernel`. Collective over ``sp``, no autograd.

    Raises:
        PeerTimeout, PeerMismatch: an earlier call failed. A call that fails itself gives NaN, and the next one or
        sp.check() raises.
    """
    from flexsp.scan.propagate import propagate

    count = F.shape[1:].numel()
    cut, log_a, A = transition.cut, transition.log_a, transition.A
    with torch.no_grad():
        first = sp.neighbours(reverse)[0] is None
        states = (F.new_zeros if first else F.new_empty)((F.shape[0], 2, *_shape(F, transition)))
        slots = [slot[:, :count].view(F.shape) for slot in states.flatten(2).unbind(1)]
        own, entering = slots if reverse else reversed(slots)
        own.copy_(F)
        propagate(
            states, None if log_a is None else log_a.to(F.dtype).unsqueeze(1),
            None if cut is None else cut.to(torch.int32).unsqueeze(1), sp,
            A=None if A is None else A.to(F.dtype).unsqueeze(1).contiguous(), reverse=reverse,
            call=f"{call} with states {facts_of((F,))}",
        )  # fmt: skip
    aligned = entering.is_contiguous() and transition.kind == "none"  # as compiled graphs take results to be
    return entering if aligned else entering.clone(memory_format=torch.contiguous_format)


def _tiles(count: int) -> tuple[int, int, int]:
    """(heads, rows, columns) of at least so many numbers."""
    rows = -(-count // _COLUMNS)
    each = min(_ROWS, 1 << max(0, rows - 1).bit_length())
    return -(-rows // each), each, _COLUMNS
