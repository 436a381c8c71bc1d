"""`Record`, one run of a module: the inputs and outputs of every submodule, and their gradients."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["Key", "Record", "each", "has_gradient"]

_PLAIN = (str, bytes, enum.Enum, torch.dtype, torch.device, torch.Size, type, nn.Module)


class Key(NamedTuple):
    """An input ("in") or output ("out") tensor of the n-th call of a submodule."""

    path: str
    n: int
    side: str
    leaf: str


class Record:
    """One run of a module. Values are in the order in which they are computed, and so are gradients."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.values: dict[Key, Tensor] = {}
        self.grads: dict[Key, Tensor] = {}
        self.callers: dict[tuple[str, int], str] = {}
        self.outputs: dict[str, Tensor] = {}
        self.unseen: dict[str, str] = {}
        self._counts: dict[str, int] = {}
        self._running: list[tuple[str, int]] = []
        self._live = False

    def forward(self, x: Tensor, inputs: Mapping[str, Any]) -> None:
        handles = []
        for path, submodule in self.module.named_modules():
            handles.append(submodule.register_forward_pre_hook(self._entering(path), with_kwargs=True))
            handles.append(submodule.register_forward_hook(self._leaving))
        self._live = True
        x = x.detach().clone()
        if has_gradient(x):
            x = x.requires_grad_() * 1  # not a leaf, so that the module may change it in place
        try:
            self.module(x, **inputs)
        finally:
            self._live = False
            for handle in handles:
                handle.remove()

    def backward(self, cotangents: Mapping[str, Tensor]) -> None:
        pairs = [(y, cotangents[name]) for name, y in self.outputs.items() if y.requires_grad and name in cotangents]
        if pairs:
            torch.autograd.backward([y for y, _ in pairs], [dy for _, dy in pairs])
        self.outputs = {}

    def _entering(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if not self._live:
                return None
            n = self._counts.get(path, 0)
            self._counts[path] = n + 1
            self.callers[path, n] = self._running[-1][0] if self._running else ""
            self._running.append((path, n))
            return _mapped(args, "", self._note_input), _mapped(kwargs, "", self._note_input)

        return hook

    def _note_input(self, leaf: str, x: Tensor) -> Tensor:
        key = Key(*self._running[-1], "in", leaf)
        x = x.view_as(x) if x.requires_grad else x  # a view of its own, whose gradient comes from this submodule alone
        self._note(key, x)
        return x

    def _leaving(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._live:
            return
        path, n = self._running.pop()
        root = not self._running
        for leaf, y in _leaves(output, "", set()):
            if root and isinstance(y, (bool, int, float, complex)):
                y = torch.tensor(y, dtype=torch.float64 if isinstance(y, float) else None, device="cpu")
            if isinstance(y, Tensor):
                self._note(Key(path, n, "out", leaf), y)
                if root:
                    self.outputs[leaf] = y
            elif root:
                self.unseen[leaf] = type(y).__name__

    def _note(self, key: Key, x: Tensor) -> None:
        self.values[key] = x.detach().clone()
        if x.requires_grad:
            x.register_hook(lambda grad: self.grads.__setitem__(key, grad.detach().clone()))


def has_gradient(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _mapped(x: Any, name: str, f: Any) -> Any:
    if isinstance(x, Tensor):
        return f(name, x)
    if type(x) in (tuple, list):
        return type(x)(_mapped(y, f"{name}[{i}]", f) for i, y in enumerate(x))
    if type(x) is dict:
        return {key: _mapped(y, f"{name}[{key!r}]", f) for key, y in x.items()}
    return x


def each(x: Any, f: Callable[[Tensor], Tensor]) -> Any:
    return _mapped(x, "", lambda _, y: f(y))


def _leaves(x: Any, name: str, above: set[int]) -> Iterator[tuple[str, Any]]:
    """(name, value) of all tensors and numbers in x, and of objects that have no parts."""
    if x is None or isinstance(x, _PLAIN) or id(x) in above:
        return
    inner: Any = ()
    if isinstance(x, (Tensor, bool, int, float, complex)):
        yield name, x
    elif isinstance(x, (tuple, list)):
        inner = ((f"{name}[{i}]", y) for i, y in enumerate(x))
    elif isinstance(x, Mapping):
        inner = ((f"{name}[{key!r}]", y) for key, y in x.items())
    elif hasattr(x, "__dict__") or hasattr(x, "__dataclass_fields__"):
        names = {**getattr(x, "__dict__", {}), **getattr(x, "__dataclass_fields__", {})}
        inner = ((f"{name}.{key}", getattr(x, key, None)) for key in names)
    elif not callable(x):
        yield name, x
    for leaf, y in inner:
        yield from _leaves(y, leaf, above | {id(x)})
