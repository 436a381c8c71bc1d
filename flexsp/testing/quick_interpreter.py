"""Makes Triton's interpreter faster, for tests.

The interpreter spends most of a kernel's time on the types of its tiles: every operation makes a type, whose shape is a
tuple of constants, and compares two of them number by number. Here equal types are one object, which remembers the
shape of its tensors.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
from typing import Any

import triton.language as tl
from triton.language import core, semantic

from flexsp.runtime import triton_private as private
from flexsp.testing import triton_hooks
from flexsp.testing.quick_arithmetic import operators, quicken_arithmetic, quicken_memory, with_new_axes

__all__ = ["quicken_interpreter"]


@functools.lru_cache(maxsize=1)
def quicken_interpreter() -> None:
    """Makes interpreted kernels run in less than half of the time. It changes Triton's modules in this process for
    good. Releases of Triton other than 3.6 to 3.9 stay as they are.

    The interpreter replaces the language of a device function at every call of it; here it does so once a launch.
    Types of numbers and of shapes are looked up instead of made. Integer arithmetic is not checked for overflow, as on
    a GPU.
    """
    if not (3, 6) <= private.RELEASE <= (3, 9):
        return
    interpreter = triton_hooks.interpreter()
    _patch_once_a_launch(interpreter)
    _rewrite_from_files(interpreter.FunctionRewriter)
    interpreter._patch_attr = _attribute(interpreter._patch_attr, interpreter.TritonSemantic, interpreter.TensorHandle)
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter._get_np_dtype = _by_text(interpreter._get_np_dtype)
    core._type_for_tuple_values = _of_shapes(core._type_for_tuple_values)
    core._unwrap_if_constexpr = _unwrapped(core._unwrap_if_constexpr)
    for kind in (core.dtype, core.pointer_type, core.block_type):
        kind.__eq__ = _same_or(kind.__eq__)  # type: ignore[method-assign]
    core.tuple.__eq__ = _equal_numbers(core.tuple.__eq__)  # type: ignore[method-assign]
    _keep_block_types(core.block_type)
    core.tensor.__init__ = _looks_kept(core.tensor.__init__)  # type: ignore[method-assign]
    meaning = semantic.TritonSemantic
    meaning.to_tensor = _tensors_pass(meaning.to_tensor)
    meaning.arange = _made_once(meaning.arange)
    meaning.binary_op_type_checking_impl = _alike_join(meaning.binary_op_type_checking_impl)
    interpreter.TensorHandle.__init__ = _sizes_kept(interpreter.TensorHandle.__init__)
    quicken_arithmetic(meaning, interpreter.TensorHandle)
    quicken_memory(meaning, interpreter.TensorHandle)


def _patch_once_a_launch(interpreter: Any) -> None:
    """A device function that a kernel calls has the language replaced for every call of it: here once a launch."""
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    interpreter._patch_builtin = _members_known(interpreter)
    languages = (interpreter.tl, interpreter.tl.core)
    patched: set[frozenset[int]] = set()

    @functools.cache
    def seen_by(fn: Any) -> frozenset[int]:
        return frozenset(id(x) for x in fn.__globals__.values() if inspect.ismodule(x) and x in languages)

    def patch_once(fn: Any) -> Any:
        if seen_by(fn) in patched:
            return None
        patched.add(seen_by(fn))
        return patch(fn)

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        return launch(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_anew


def _members_known(interpreter: Any) -> Any:
    """What is replaced of the language, and with which members, is looked for once."""

    @functools.cache
    def builtins_of(pkg: Any) -> list[tuple[str, Any]]:
        return [(name, member) for name, member in inspect.getmembers(pkg) if core.is_builtin(member)]

    class Replaced(list[Any]):
        """Records what a scope of the interpreter would set."""

        def set_attr(self, *what: Any) -> None:
            self.append(what)

    @functools.cache
    def replaced(pkg: Any, builder: Any) -> list[Any]:
        """The functions that take the place of members are made once: there are hundreds."""
        found = Replaced()
        for name, member in builtins_of(pkg):
            interpreter._patch_attr(pkg, name, member, builder, found)
        return found

    def patch_known(pkg: Any, builder: Any, *scope: Any) -> None:
        if scope:
            for what in replaced(pkg, builder):
                scope[0].set_attr(*what)
            return
        for name, member in builtins_of(pkg):
            interpreter._patch_attr(pkg, name, member, builder)

    return patch_known


def _rewrite_from_files(rewriter: Any) -> None:
    """The source of every function is looked for and parsed several times, and all its lines are counted anew: here a
    file is parsed once, which numbers the lines."""
    slowly = rewriter.rewrite_ast

    @functools.lru_cache(maxsize=64)
    def functions_of(text: str) -> dict[tuple[int, str], ast.FunctionDef]:
        """By the line of the first decorator, or of `def`, and by name."""
        found = [x for x in ast.walk(ast.parse(text)) if isinstance(x, ast.FunctionDef)]
        return {(min([x.lineno, *(y.lineno for y in x.decorator_list)]), x.name): x for x in found}

    def rewrite(self: Any) -> Any:
        code = self.fn.__code__
        linecache.checkcache(code.co_filename)
        known = functions_of("".join(linecache.getlines(code.co_filename)))
        found = known.pop((code.co_firstlineno, self.fn.__name__), None)  # the rewriter changes it
        if found is None:
            return slowly(self)
        found.decorator_list = []
        self.filename = code.co_filename
        changed = ast.fix_missing_locations(self.ast_transformer.visit(ast.Module([found], [])))
        return self._compile_and_exec(changed)

    rewriter.rewrite_ast = rewrite


def _attribute(patch: Any, meaning_of: Any, handle: Any) -> Any:
    """What a builtin is replaced by, without a copy of the keywords and without the function that asks for one."""
    asks = core.builtin(lambda: None).__code__  # type: ignore[attr-defined]
    straight = operators()

    def patch_attribute(obj: Any, name: str, member: Any, builder: Any, *scope: Any) -> None:
        if not scope or not inspect.isfunction(member):
            return patch(obj, name, member, builder, *scope)
        meaning = meaning_of(builder)
        if obj is core.tensor and name in straight:
            return scope[0].set_attr(obj, name, straight[name](meaning))
        inner = member.__wrapped__ if member.__code__ is asks else member  # type: ignore[attr-defined]

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = meaning
            return inner(*args, **kwargs)

        scope[0].set_attr(obj, name, with_new_axes(call, handle) if name == "__getitem__" else call)

    return patch_attribute


def _by_text(f: Any) -> Any:
    found: dict[str, Any] = {}

    def look_up(x: Any) -> Any:
        key = str(x)
        if key not in found:
            found[key] = f(x)
        return found[key]

    return look_up


def _of_shapes(f: Any) -> Any:
    found: dict[Any, Any] = {}

    def look_up(values: Any, fields: Any = None) -> Any:
        key = tuple([getattr(x, "value", None) for x in values])
        if fields is not None or not all([type(n) is int for n in key]):
            return f(values, fields)
        if key not in found:
            found[key] = f(values, fields)
        return found[key]

    return look_up


def _unwrapped(unwrap: Any) -> Any:
    constant = core.constexpr
    plain = {int, core.tensor, core.dtype, core.block_type, core.pointer_type, bool, float, str, type(None)}

    def unwrap_quickly(x: Any) -> Any:
        kind = type(x)
        return x.value if kind is constant else x if kind in plain else unwrap(x)

    return unwrap_quickly


def _same_or(equal: Any) -> Any:
    return lambda self, other: self is other or equal(self, other)


def _equal_numbers(equal: Any) -> Any:
    def compare(self: Any, other: Any) -> Any:
        a, b = self.values, getattr(other, "values", other)
        if type(b) is list and all([type(n) is int for n in a]) and all([type(n) is int for n in b]):
            return core.constexpr(a == b)
        return equal(self, other)

    return compare


def _keep_block_types(kind: Any) -> None:
    found: dict[Any, Any] = {}
    plain = kind.__init__

    def new(cls: Any, element_ty: Any, shape: Any) -> Any:
        sizes = tuple([x.value if type(x) is core.constexpr else x for x in getattr(shape, "values", shape)])
        if cls is not kind or not all([type(n) is int for n in sizes]):
            return object.__new__(cls)
        key = (element_ty.name, getattr(element_ty, "address_space", None), sizes)
        if key not in found:
            made = object.__new__(cls)
            plain(made, element_ty, shape)  # raises where there is no such type
            found[key] = made
        return found[key]

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        if "name" not in self.__dict__:
            plain(self, element_ty, shape)

    kind.__new__, kind.__init__ = new, init


def _looks_kept(init: Any) -> Any:
    """Shape, size and dtype of a type's tensors are worked out once; those of one shape share it."""
    shapes: dict[Any, Any] = {}

    def made(self: Any, handle: Any, type: Any) -> None:
        looks = type.__dict__.get("_looks")
        if looks is None:
            init(self, handle, type)
            shape, numel = shapes.setdefault(tuple([n.value for n in self.shape]), (self.shape, self.numel))
            looks = type._looks = {"shape": shape, "numel": numel, "dtype": self.dtype, "type": type}
        self.__dict__.update(looks)
        self.handle = handle

    return made


def _sizes_kept(init: Any) -> Any:
    """Numbers no wider than their type are looked at by a size that the type keeps."""
    most = 1 << 16  # of pointers, which may be of any size

    def made(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        size = dtype.__dict__.get("_bytes")
        if size is None:
            pointer = isinstance(dtype, core.pointer_type)
            size = dtype._bytes = most if pointer else max(8, dtype.primitive_bitwidth) // 8
        if data.itemsize > size:
            init(self, data, dtype)  # raises
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    return made


def _tensors_pass(convert: Any) -> Any:
    """Numbers become tensors once: nothing changes a tensor."""
    tensor, found = core.tensor, dict[Any, Any]()

    def converted(self: Any, x: Any, check_type: bool = True) -> Any:
        kind = type(x)
        if kind is tensor:
            return x
        if kind is not int and (kind is not float or x == 0):  # of which there are two
            return convert(self, x, check_type)
        made = found.get((kind, x))
        if made is None:
            made = convert(self, x, check_type)
            if len(found) < _KEPT:
                found[kind, x] = made
        return made

    return converted


def _made_once(arange: Any) -> Any:
    """Ranges of the same ends are one tensor."""
    found: dict[Any, Any] = {}

    def look_up(self: Any, start: Any, end: Any, *, ret_ty: Any = None) -> Any:
        if ret_ty is not None:
            return arange(self, start, end, ret_ty=ret_ty)
        if (start, end) not in found:
            found[start, end] = arange(self, start, end)
        return found[start, end]

    return look_up


def _alike_join(check: Any) -> Any:
    """Two tensors of the same numbers stay what they are in sums and products."""
    tensor = core.tensor

    def checked(
        self: Any, lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True, div_or_mod: bool = False,
    ) -> Any:  # fmt: skip
        if type(lhs) is tensor and type(rhs) is tensor and not div_or_mod and lhs.dtype is rhs.dtype in _NUMBERS:
            return self.broadcast_impl_value(lhs, rhs)
        return check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    return checked


_KEPT = 4096  # numbers that are tensors already
_NUMBERS = (tl.float32, tl.int32, tl.int64, tl.float64, tl.float16, tl.bfloat16)
