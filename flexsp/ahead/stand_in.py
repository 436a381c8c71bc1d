"""A process in which other tensors stand in for those on a GPU, so that calls plan what they would launch there.

Calls then run as they do on the GPU: the same checks, plans and executables, with the same strides and alignments.
Only the last step is left out, the compilation and launch of kernels, which are collected instead.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from flexsp import devices
from flexsp.devices import Device

__all__ = ["collected_on"]

_GPU = torch.device("cuda", 0)


class _StandIn(TorchFunctionMode):
    """Tensors whose device is of the type `kind` are on the GPU, and those made for the GPU are of that type.

    Memory that is not there begins at multiples of 16 bytes, as all that torch allocates on a GPU does.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        tensor = torch.Tensor
        self.answers: dict[Any, Callable[[torch.Tensor], Any]] = {
            tensor.is_cuda.__get__: lambda x: x.device.type == kind,  # type: ignore[attr-defined]
            tensor.is_meta.__get__: lambda x: x.is_meta and kind != "meta",  # type: ignore[attr-defined]
            tensor.is_cpu.__get__: lambda x: x.is_cpu and kind != "cpu",  # type: ignore[attr-defined]
            tensor.device.__get__: lambda x: _GPU if x.device.type == kind else x.device,  # type: ignore[attr-defined]
            tensor.get_device: lambda x: 0 if x.device.type == kind else -1,
        }
        if kind == "meta":
            self.answers[tensor.data_ptr] = _address

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        answer = self.answers.get(func)
        if answer is not None:
            return answer(args[0])
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        kwargs = {name: self._there(x) for name, x in (kwargs or {}).items() if name != "pin_memory"}
        return func(*[self._there(x) for x in args], **kwargs)

    def in_backward(self) -> Callable[..., Any]:
        """What starts backward passes, with this mode inside: torch leaves modes before it."""
        start = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

        def run(*args: Any, **kwargs: Any) -> Any:
            with nullcontext() if is_in_torch_dispatch_mode() else self:  # a program that is traced has no device
                return start(*args, **kwargs)

        return run

    def _there(self, x: Any) -> Any:
        on_gpu = isinstance(x, torch.device) and x.type == "cuda"
        return self.kind if on_gpu or (isinstance(x, str) and x.startswith("cuda")) else x


def _address(x: torch.Tensor) -> int:
    return int(x.storage_offset()) * x.element_size() if x.is_meta else x.data_ptr()


@contextmanager
def collected_on(device: Device, kind: str = "meta") -> Iterator[dict[Any, Any]]:
    """What `flexsp.runtime.launch.collecting` yields, in a process whose tensors of a kind of device stand in for those
    of a GPU. It is for processes that do nothing else.

    Args:
        kind: "meta", or "cpu" for tensors that have memory; then all are on the GPU.
    """
    from flexsp.runtime import launch, triton_private

    properties = SimpleNamespace(
        name=f"NVIDIA {device.name}", major=device.capability[0], minor=device.capability[1],
        multi_processor_count=device.multiprocessors, shared_memory_per_block_optin=device.shared,
        total_memory=1 << 40,
    )  # fmt: skip
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda *_: device.capability,
        "get_device_name": lambda *_: properties.name,
        "get_device_properties": lambda *_: properties,
        "device": lambda *_: nullcontext(),
        "is_current_stream_capturing": lambda: False,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "User provided device_type of 'cuda'")
        stack.enter_context(devices.standing_in(device))
        stack.enter_context(triton_private.standing_in(triton_private.gpu_target(device.arch)))
        mode = stack.enter_context(_StandIn(kind))
        stack.enter_context(mock.patch.object(torch.autograd, "_engine_run_backward", mode.in_backward()))
        yield stack.enter_context(launch.collecting())
