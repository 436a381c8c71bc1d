"""Arithmetic of Triton's interpreter in one call of numpy.

For every two operands the interpreter works out their common type and broadcasts them, and only then calls numpy, which
would have done both. Here a table gives the common type of the types that kernels compute with most. Other operands,
and operands that do not fit each other, take the interpreter's own way.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core

__all__ = ["operators", "quicken_arithmetic", "quicken_memory", "with_new_axes"]

_INTEGERS: dict[int, Any] = {id(tl.int32): np.int32, id(tl.int64): np.int64}
_WIDE: dict[int, Any] = {id(tl.float32): np.float32, id(tl.float64): np.float64}
_NUMBERS: dict[int, Any] = _INTEGERS | _WIDE | {id(tl.float16): np.float16}
_NUMPY = _NUMBERS | {id(tl.bfloat16): np.uint16}  # in which the interpreter has them
_INT32 = (-(2**31), 2**31 - 1)  # integers outside have other types
_ARITHMETIC: dict[str, Any] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
_COMPARISONS: dict[str, Any] = {
    "less_than": np.less, "less_equal": np.less_equal, "greater_than": np.greater,
    "greater_equal": np.greater_equal, "equal": np.equal, "not_equal": np.not_equal,
}  # fmt: skip
_BITWISE: dict[str, Any] = {"and_": np.bitwise_and, "or_": np.bitwise_or, "xor_": np.bitwise_xor}

_Pairs = dict[tuple[int, int], tuple[Any, Any, Any]]  # what numpy makes of each (None: it stays), the result
_Method = Callable[..., Any]


def quicken_arithmetic(meaning: Any, handle: Any) -> None:
    """Changes the methods of `meaning` for good, Triton's TritonSemantic. `handle`: its TensorHandle."""
    pairs = _alike(tl.int32, tl.int64, tl.float16, tl.float32, tl.float64) | _mixed(meaning)
    wide, bits = _alike(tl.float32, tl.float64), _alike(tl.int1, tl.int32, tl.int64)
    compared = {pair: (left, right, tl.int1) for pair, (left, right, _) in pairs.items()}
    quick = {name: (operation, pairs, _NUMBERS) for name, operation in _ARITHMETIC.items()}
    quick |= {"truediv": (np.divide, wide, _WIDE)}
    quick |= {name: (operation, compared, {}) for name, operation in _COMPARISONS.items()}
    quick |= {name: (operation, bits, {}) for name, operation in _BITWISE.items()}
    for name, how in quick.items():
        setattr(meaning, name, _quick(getattr(meaning, name), handle, *how))
    meaning.add = _with_pointers(meaning.add, handle)
    meaning.cast = _cast(meaning.cast, handle)
    meaning.broadcast_impl_value = _broadcast(meaning.broadcast_impl_value, handle)
    chosen = _alike(tl.int1, tl.bfloat16, tl.int32, tl.int64, tl.float16, tl.float32, tl.float64)
    meaning.where = _where(meaning.where, handle, chosen)


def _alike(*types: Any) -> _Pairs:
    return {(id(x), id(x)): (None, None, x) for x in types}


def _mixed(meaning: Any) -> _Pairs:
    found: _Pairs = {}
    every = (tl.int32, tl.int64, tl.float32, tl.float64)
    for a, b in [(a, b) for a in every for b in every if a is not b]:
        made = meaning(None).computation_type_impl(a, False, b, False, False)
        to = _NUMBERS[id(made)]
        found[id(a), id(b)] = (None if a is made else to, None if b is made else to, made)
    return found


def _quick(slow: _Method, handle: Any, operation: Any, pairs: _Pairs, numbers: dict[int, Any]) -> _Method:
    """`slow`, a method of two operands, by this operation where both are tensors of `pairs`, or one is of `numbers` and
    the other one a number of Python's."""
    tensor, types, operands = core.tensor, _BlockTypes(), _operands(pairs, numbers)

    def quick(self: Any, x: Any, y: Any, *rest: Any, **options: Any) -> Any:
        found = operands(x, y)
        if found is None:
            return slow(self, x, y, *rest, **options)
        a, b, made = found
        try:
            data = operation(a, b)
        except ValueError:  # shapes that do not fit
            return slow(self, x, y, *rest, **options)
        of_blocks = _is_block(x) or _is_block(y)
        return tensor(handle(data, made), types.of(id(made), made, data.shape) if of_blocks else made)

    quick.slow = slow  # type: ignore[attr-defined]
    return quick


def _operands(pairs: _Pairs, numbers: dict[int, Any]) -> Callable[[Any, Any], Any]:
    """What numpy makes the result of, and its type; None where that takes more than `pairs` and `numbers` say."""
    tensor = core.tensor

    def operands(x: Any, y: Any) -> Any:
        if type(x) is not tensor:
            found = _constant(x, y.dtype, numbers) if type(y) is tensor else None
            return None if found is None else (found, y.handle.data, y.dtype)
        if type(y) is not tensor:
            found = _constant(y, x.dtype, numbers)
            return None if found is None else (x.handle.data, found, x.dtype)
        pair = pairs.get((id(x.dtype), id(y.dtype)))
        if pair is None:
            return None
        left, right, made = pair
        a, b = x.handle.data, y.handle.data
        return a if left is None else a.astype(left), b if right is None else b.astype(right), made

    return operands


class _BlockTypes:
    """Types of tiles by their elements and shape."""

    def __init__(self) -> None:
        self.found: dict[Any, Any] = {}

    def of(self, key: Any, element: Any, shape: tuple[int, ...]) -> Any:
        """`key` stands for `element`."""
        known = self.found.get((key, shape))
        if known is None:
            known = self.found[key, shape] = core.block_type(element, list(shape))
        return known


def _is_block(x: Any) -> bool:
    return type(x) is core.tensor and type(x.type) is core.block_type


def _constant(x: Any, dtype: Any, numbers: dict[int, Any]) -> Any:
    """A number of Python's as the interpreter gives it to a tensor of this type, None where that takes more."""
    to = numbers.get(id(dtype))
    if to is None or (type(x) is not int and (type(x) is not float or id(dtype) in _INTEGERS)):
        return None
    if type(x) is int and not _INT32[0] <= x <= _INT32[1]:
        return None
    if x == 0 and math.copysign(1.0, x) < 0:  # which some releases make positive
        return None
    return _array(x, to)


@functools.lru_cache(maxsize=4096)
def _array(x: float, to: Any) -> Any:
    """Shared by all that meet this number: nothing writes into operands."""
    return np.array([x], to)


def _with_pointers(add: _Method, handle: Any) -> _Method:
    """`add`, also of pointers and offsets of 32 or 64 bits."""
    tensor, pointer, types = core.tensor, core.pointer_type, _BlockTypes()

    def quick(self: Any, x: Any, y: Any, *rest: Any, **options: Any) -> Any:
        if type(x) is not tensor or type(x.dtype) is not pointer or type(x.dtype.element_ty) is not core.dtype:
            return add(self, x, y, *rest, **options)
        size = max(1, x.dtype.element_ty.primitive_bitwidth // 8)
        if type(y) is tensor and id(y.dtype) in _INTEGERS:
            offset = y.handle.data.astype(np.uint64)
            offset *= size
        elif type(y) is int and _INT32[0] <= y <= _INT32[1]:
            offset = np.uint64(size * y % 2**64)
        else:
            return add(self, x, y, *rest, **options)
        try:
            data = x.handle.data + offset
        except ValueError:
            return add(self, x, y, *rest, **options)
        made = x.type
        if _is_block(x) or _is_block(y):
            made = types.of(_key(x.dtype), x.dtype, data.shape)
        return tensor(handle(data, x.dtype), made)

    quick.slow = add.slow  # type: ignore[attr-defined]
    return quick


def _cast(cast: _Method, handle: Any) -> _Method:
    """`cast`, of tensors to the type they have, and between numbers of 32 and of 64 bits."""
    tensor, types, numbers = core.tensor, _BlockTypes(), _INTEGERS | _WIDE

    def quick(self: Any, x: Any, to: Any, fp_downcast_rounding: Any = None) -> Any:
        of = x.dtype
        if of is to:
            return x
        if id(of) not in numbers or id(to) not in numbers or fp_downcast_rounding is not None:
            return cast(self, x, to, fp_downcast_rounding)
        data = x.handle.data.astype(numbers[id(to)])
        return tensor(handle(data, to), types.of(id(to), to, data.shape) if _is_block(x) else to)

    quick.slow = cast  # type: ignore[attr-defined]
    return quick


def quicken_memory(meaning: Any, handle: Any) -> None:
    """Loads and stores through pointers, without the questions that have one answer for all of them. Changes the
    methods of `meaning` for good."""
    meaning.load = _load(meaning.load, handle)
    meaning.store = _store(meaning.store, handle)


_CACHED = {"load": ("", ".ca", ".cg", ".cv"), "store": ("", ".wb", ".cg", ".cs", ".wt")}
_EVICTED = ("", "evict_first", "evict_last")


class _Masks:
    """Masks of what is loaded or stored through pointers to numbers."""

    def __init__(self, what: str, handle: Any) -> None:
        self.cached, self.handle = _CACHED[what], handle
        self.everything: dict[tuple[int, ...], Any] = {}

    def of(self, pointers: Any, mask: Any, cache: str, eviction: str) -> Any:
        """The mask's handle, of the pointers' shape; None where that takes more, or where they point to no numbers."""
        kind = pointers.dtype
        if type(kind) is not core.pointer_type or kind.const or id(kind.element_ty) not in _NUMPY:
            return None
        if cache not in self.cached or eviction not in _EVICTED:
            return None
        shape = pointers.handle.data.shape
        if mask is None:
            if shape not in self.everything:
                self.everything[shape] = self.handle(np.ones(shape, bool), tl.int1)
            return self.everything[shape]
        if mask.dtype is not tl.int1 or (_is_block(mask) and not _is_block(pointers)):
            return None
        data = mask.handle.data
        if data.shape == shape:
            return mask.handle
        if data.ndim != len(shape) or not all([m == n or m == 1 for m, n in zip(data.shape, shape, strict=True)]):
            return None
        return self.handle(np.broadcast_to(data, shape), tl.int1)


def _load(load: _Method, handle: Any) -> _Method:
    """`load`; what is masked is another number, made once, since nothing writes into it."""
    tensor, types, masks, others = core.tensor, _BlockTypes(), _Masks("load", handle), dict[Any, Any]()

    def quick(
        self: Any, pointers: Any, mask: Any, other: Any, boundary_check: Any, padding: str, cache: str, eviction: str,
        is_volatile: bool,
    ) -> Any:  # fmt: skip
        there = None if boundary_check or padding else masks.of(pointers, mask, cache, eviction)
        if there is None or (other is not None and (mask is None or _is_block(other))):
            return load(self, pointers, mask, other, boundary_check, padding, cache, eviction, is_volatile)
        element, shape = pointers.dtype.element_ty, pointers.handle.data.shape
        key = id(element), shape, None if other is None else (id(other.dtype), other.handle.data.tobytes())
        instead = others.get(key)
        if instead is None:
            data = np.zeros((), _NUMPY[id(element)]) if other is None else self.cast(other, element).handle.data
            instead = others[key] = handle(np.full(shape, data, data.dtype), element)
        found = self.builder.create_masked_load(pointers.handle, there, instead, None, None, is_volatile)
        return tensor(found, types.of(id(element), element, shape) if _is_block(pointers) else element)

    return quick


def _store(store: _Method, handle: Any) -> _Method:
    """`store`, of values of the pointers' shape and kind."""
    tensor, masks = core.tensor, _Masks("store", handle)

    def quick(self: Any, pointers: Any, value: Any, mask: Any, boundary_check: Any, cache: str, eviction: str) -> Any:
        there = None if boundary_check else masks.of(pointers, mask, cache, eviction)
        if there is None or value.shape is not pointers.shape or value.dtype is not pointers.dtype.element_ty:
            return store(self, pointers, value, mask, boundary_check, cache, eviction)
        return tensor(self.builder.create_masked_store(pointers.handle, value.handle, there, None, None), tl.void)

    return quick


def _key(kind: Any) -> Any:
    """Stands for a type of elements among `_BlockTypes`. Types of pointers are made anew, others are there once."""
    return (kind.element_ty.name, kind.address_space) if type(kind) is core.pointer_type else id(kind)


def _broadcast(broadcast: _Method, handle: Any) -> _Method:
    """`broadcast`, of tiles of as many axes, and of a tile and a number."""
    tensor, types = core.tensor, _BlockTypes()

    def stretched(x: Any, shape: tuple[int, ...]) -> Any:
        if x.handle.data.shape == shape and _is_block(x):
            return x
        kind = x.dtype
        return tensor(handle(np.broadcast_to(x.handle.data, shape), kind), types.of(_key(kind), kind, shape))

    def quick(self: Any, x: Any, y: Any) -> Any:
        if x.shape is y.shape:
            return x, y
        a, b = (z.handle.data.shape if _is_block(z) else None for z in (x, y))
        if a is not None and b is not None:
            if len(a) != len(b) or not all([m == n or m == 1 or n == 1 for m, n in zip(a, b, strict=True)]):
                return broadcast(self, x, y)
            shape = tuple([n if m == 1 else m for m, n in zip(a, b, strict=True)])
        elif a is not None or b is not None:
            shape = a or b or ()
        else:
            return x, y
        return stretched(x, shape), stretched(y, shape)

    quick.slow = broadcast  # type: ignore[attr-defined]
    return quick


def _where(where: _Method, handle: Any, pairs: _Pairs) -> _Method:
    """`where`, of choices of one type, or of a tensor and a number."""
    tensor, types, operands = core.tensor, _BlockTypes(), _operands(pairs, _NUMBERS)

    def quick(self: Any, condition: Any, x: Any, y: Any) -> Any:
        found = operands(x, y) if condition.dtype is tl.int1 else None
        if found is None:
            return where(self, condition, x, y)
        a, b, made = found
        try:
            data = np.where(condition.handle.data, a, b)
        except ValueError:  # shapes that do not fit
            return where(self, condition, x, y)
        of_blocks = _is_block(condition) or _is_block(x) or _is_block(y)
        return tensor(handle(data, made), types.of(id(made), made, data.shape) if of_blocks else made)

    quick.slow = where  # type: ignore[attr-defined]
    return quick


def with_new_axes(index: _Method, handle: Any) -> _Method:
    """Indexing of a tile by None and whole slices alone; `index` is the interpreter's own."""
    tensor, whole, types = core.tensor, slice(None), {}

    def quick(x: Any, at: Any) -> Any:
        if type(at) is not tuple or not _is_block(x) or not all([n is None or n == whole for n in at]):
            return index(x, at)
        if len(at) - at.count(None) != x.handle.data.ndim:
            return index(x, at)
        data = x.handle.data[at]
        key = (id(x.type), data.shape)
        if key not in types:
            types[key] = index(x, at).type
        return tensor(handle(data, x.handle.dtype), types[key])

    return quick


def operators() -> dict[str, Callable[[Any], _Method]]:
    """Python's operators of tensors by name: what calls a semantic's method at once."""
    unwrap = core._unwrap_if_constexpr

    def straight(name: str, *rest: Any) -> Callable[[Any], _Method]:
        def of(meaning: Any) -> _Method:
            method = getattr(meaning, name)
            return lambda x, y: method(x, unwrap(y), *rest)

        return of

    def reflected(name: str, *rest: Any) -> Callable[[Any], _Method]:
        def of(meaning: Any) -> _Method:
            method = getattr(meaning, name)
            return lambda x, y: method(unwrap(y), x, *rest)

        return of

    found = {"__truediv__": straight("truediv")}
    for name in _ARITHMETIC:  # overflow is looked for where the interpreter is told to
        found |= {f"__{name}__": straight(name, True), f"__r{name}__": reflected(name, True)}
    return found | {f"__{name.strip('_')}__": straight(name) for name in _BITWISE}
