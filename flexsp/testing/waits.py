"""What would make the host wait for a GPU, found on CPU tensors."""

from __future__ import annotations

import traceback
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["HostWaits"]

aten = torch.ops.aten
# Their result's value or shape is needed on the host.
_READ = {
    aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default, aten.masked_select.default,
    aten.is_nonzero.default, aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default,
    aten.repeat_interleave.Tensor, aten.bincount.default,
    aten.item.default, aten.where.default, aten.allclose.default,  # whole in inference mode, else as what they are of
}  # fmt: skip


class HostWaits(TorchDispatchMode):
    """Inside it, `found` collects the calls that would make the host wait if the tensors were on a GPU.

    These are values read on the host, masks as indices, and numbers or lists of the host made into tensors; among the
    latter is ``x[0] = 1``, for which torch copies a tensor from the host. ``x[:1] = 1`` and ``x.fill_(1)`` do not wait.
    Each is the operator and the lines that led to it. Code that looks at CPU tensors only is found as well; `tolist`
    and copies between devices are not, nor what operators of `torch.library` do inside: call what is behind them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._found: list[str] = []
        self._made: list[tuple[torch.Tensor, str]] = []  # on the host

    @property
    def found(self) -> list[str]:
        return self._found + [text for _, text in self._made]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        masks = func in (aten.index.Tensor, aten.index_put_.default) and any(
            x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]
        )
        if func in _READ or masks:
            self._found.append(_told(func))
        elif func is aten.lift_fresh.default:
            self._made.append((out, _told(func)))
        elif func is aten.fill_.Tensor:  # the value goes along with the kernel
            self._made = [(x, text) for x, text in self._made if x is not args[1]]
        return out


def _told(func: Any) -> str:
    lines = [x for x in traceback.extract_stack()[:-3] if "torch" not in x.filename]
    return f"{func} at " + " < ".join(f"{x.filename}:{x.lineno}" for x in reversed(lines[-3:]))
