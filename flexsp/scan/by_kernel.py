"""The scan over ranks of states that PyTorch computes, by the kernel of `flexsp.scan.propagate`.

It is one launch, in which a rank is one segment, and gives what `flexsp.scan.schedules` gives with torch.distributed.
Where each number has a transition of its own, or none, rows and columns of a state do not matter (`Kind.sent_as`). Such
numbers are laid out as tiles of few shapes, so that few kernels are compiled.
"""

from __future__ import annotations

import torch

from flexsp.comm.group import SequenceParallel
from flexsp.comm.signature import facts_of
from flexsp.comm.transport import in_kernel
from flexsp.exceptions import kernels_on_cpu
from flexsp.scan.transitions import KINDS, Transition

__all__ = ["goes_by_kernel", "incoming_by_kernel", "sends"]

_COLUMNS = 256  # of a state in the kernel, at most; rows too
_ROWS = 16  # with as many columns, of a whole tile


def sends(sp: SequenceParallel, device: torch.device, dtype: torch.dtype, kind: str = "none") -> bool:
    """Whether the kernel sends numbers of this dtype on such devices between the ranks of a group: the same on all."""
    launches = device.type == "cuda" or kernels_on_cpu()
    return in_kernel(sp) and launches and device.type == sp.device.type and dtype in KINDS[kind].dtypes


def goes_by_kernel(F: torch.Tensor, transition: Transition, sp: SequenceParallel) -> bool:
    """Whether the kernel sends states F [B, H, *state] between the ranks of a group: if the group's arenas hold them.

    The answer must be the same on all ranks. So it depends only on the group, on the dtype, device and shape of F, and
    on the kind of the transition, which are alike on all ranks that make the same call.
    """
    sent_as = KINDS[transition.kind].sent_as
    tiled = F.dim() == 4 and max(F.shape[2:]) <= _COLUMNS and sent_as == "matrix"
    if not sends(sp, F.device, F.dtype, transition.kind) or not (sent_as == "numbers" or tiled):
        return False
    from flexsp.scan.propagate import fits

    return fits(F.shape[0], *_shape(F, transition), transition.kind, sp)


def _shape(F: torch.Tensor, transition: Transition) -> tuple[int, int, int]:
    """(heads, rows, columns) of a state in the kernel."""
    if KINDS[transition.kind].sent_as == "numbers":
        return _tiles(F.shape[1:].numel())
    return F.shape[1], F.shape[2], F.shape[3]


def incoming_by_kernel(
    F: torch.Tensor, transition: Transition, sp: SequenceParallel, reverse: bool = False, call: str = ""
) -> torch.Tensor:
    """What `incoming_state` gives, where `goes_by_kernel`. Collective over ``sp``, no autograd.

    Raises:
        PeerTimeout, PeerMismatch: an earlier call failed. A call that fails itself gives NaN, and the next one or
        sp.check() raises.
    """
    from flexsp.scan.propagate import propagate

    count, numbers = F.shape[1:].numel(), KINDS[transition.kind].sent_as == "numbers"
    with torch.no_grad():
        first = sp.neighbours(reverse)[0] is None
        states = F.new_empty((F.shape[0], 2, *_shape(F, transition)))
        if first:
            states.fill_(transition.neutral)
        slots = [slot[:, :count].view(F.shape) for slot in states.flatten(2).unbind(1)]
        own, entering = slots if reverse else reversed(slots)
        own.copy_(F)
        a = transition.a
        if numbers and a is not None:  # laid out as the states are
            given, a = a, torch.zeros_like(states[:, 1])
            a.flatten(1)[:, :count].view(F.shape).copy_(given)
        through = Transition(
            transition.kind, None if a is None else a.to(F.dtype).unsqueeze(1),
            None if transition.cut is None else transition.cut.to(torch.int32).unsqueeze(1),
        )  # fmt: skip
        propagate(states, through, sp, reverse=reverse, call=f"{call} with states {facts_of((F,))}")
    aligned = entering.is_contiguous() and numbers  # as compiled graphs take results to be
    return entering if aligned else entering.clone(memory_format=torch.contiguous_format)


def _tiles(count: int) -> tuple[int, int, int]:
    """(heads, rows, columns) that hold `count` numbers: tiles of `_COLUMNS` columns and at most `_ROWS` rows."""
    rows = -(-count // _COLUMNS)
    each = min(_ROWS, 1 << max(0, rows - 1).bit_length())
    return -(-rows // each), each, _COLUMNS
