"""Everything of Triton that is not its public interface, and what it needs of each release.

Public are the language, `triton.jit`, `triton.JITFunction` and `triton.cdiv`. All else is used here alone, but for
what only tests use (`flexsp.testing.triton_hooks`).

| | 3.6 | 3.7 | 3.8 | 3.9 |
|---|---|---|---|---|
| launcher in C | one compiled for each signature | one for all, arguments in a tuple | as 3.7 | as 3.7 |
| a compiled kernel that is dropped | stays loaded | stays loaded | is unloaded | is unloaded |
| sm_100, an accumulator that a branch sets anew: warp specialisation, even of no loop | fails | works | works | works |
| the same in a pipeline of stages | fails | fails | fails | fails |
| ptxas for Hopper | `ptxas` | `ptxas` | `ptxas` | `ptxas_blackwell` |
| Hopper: a fence between a copy to shared memory and a product that reads it | left out | from 3.7.1 on | yes | yes |
| fused multiply and add, if an option does not say | yes | yes | yes | yes, with a warning that 3.10 will not |
| interpreter: `mask & scalar` as a mask | taken | taken | taken | refused |
| interpreter: numpy 2.4 and newer | fails | works | works | works |

Other releases are launched by Triton's own launcher in Python, which takes more host time.
"""

from __future__ import annotations

import functools
import hashlib
import re
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import get_cache_key, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.cache import FileCacheManager, get_cache_manager
from triton.runtime.errors import OutOfResources, PTXASError
from triton.runtime.jit import get_cache_invalidating_env_vars

from flexsp.runtime import tested_versions
from flexsp.runtime.workarounds.moved_cache import find_in_moved_folders
from flexsp.runtime.workarounds.python_parser import mend_parser

__all__ = [
    "FENCES_COPIES", "RELEASE", "OutOfResources", "PTXASError", "Parameter", "assembler_for", "assembling_by",
    "assembling_with", "cache_folder", "compile_kernel", "current_stream", "current_target", "editing_llvm", "freedom",
    "gpu_target", "in_cache", "keep_launcher", "key_in_cache", "load", "make_launcher", "parameters", "profiled",
    "runs_gluon", "shipped_assemblers", "standing_in", "starter", "tool", "tool_at",
]  # fmt: skip

RELEASE = tuple(int(n) for n in re.findall(r"\d+", triton.__version__)[:2])
FENCES_COPIES = tuple(int(n) for n in re.findall(r"\d+", triton.__version__)[:3]) >= (3, 7, 1)

mend_parser()
find_in_moved_folders(FileCacheManager)

# Kernels and their compilation ----------------------------------------------------------------------------------------


class Parameter(NamedTuple):
    """Of a kernel. `free`: numbers and alignments are not compiled in."""

    name: str
    constant: bool
    free: bool
    default: Any


@functools.lru_cache(maxsize=1024)
def parameters(kernel: Any) -> tuple[Parameter, ...]:
    """Those of a kernel in order."""
    return tuple(Parameter(p.name, p.is_constexpr, bool(p.do_not_specialize), p.default) for p in kernel.params)


@functools.lru_cache(maxsize=1024)
def freedom(kernel: Any) -> tuple[bool, ...]:
    """Which of its parameters are free."""
    return tuple([p.free for p in parameters(kernel)])


def gpu_target(arch: int) -> Any:
    """What Triton compiles for: NVIDIA GPUs of compute capability arch / 10."""
    return GPUTarget("cuda", arch, 32)


def runs_gluon() -> bool:
    """Whether kernels in Gluon may be launched: the interpreter has none, and its language changes with releases."""
    return not knobs.runtime.interpret and ".".join(map(str, RELEASE[:2])) in tested_versions.GLUON


def current_target() -> Any:
    """What Triton compiles for: the current GPU."""
    return triton.runtime.driver.active.get_current_target()


@contextmanager
def standing_in(target: Any) -> Iterator[None]:
    """Inside, Triton takes `target` for the current GPU of this process. Nothing can be launched there: launches of
    kernels of other libraries do nothing."""
    from triton.runtime.jit import KernelInterface

    driver = triton.runtime.driver
    before = getattr(driver, "_active", None)
    driver.set_active(_StandIn(target))
    try:
        with mock.patch.object(KernelInterface, "__getitem__", lambda kernel, grid: lambda *args, **kwargs: None):
            yield
    finally:
        driver.set_active(before)


class _StandIn:
    """What is asked of Triton's driver before a launch."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        return self.target

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_kernel(
    kernel: Any, signature: dict[str, str], constants: dict[Any, Any], divisible: Iterable[int], target: Any,
    options: Mapping[str, Any], told: Mapping[str, str],
) -> Any:  # fmt: skip
    """A kernel compiled, or out of Triton's cache.

    Args:
        signature: types by parameter name; constexpr where `constants` has a value.
        constants: values by (position,).
        divisible: positions of arguments that are divisible by 16.
        told: what else decides, for the cache's key.
    """
    source, options, environment = _source(kernel, signature, constants, divisible, options, told)
    return triton.compile(source, target, options, _env_vars=environment)


def key_in_cache(
    kernel: Any, signature: dict[str, str], constants: dict[Any, Any], divisible: Iterable[int], target: Any,
    options: Mapping[str, Any], told: Mapping[str, str],
) -> str:  # fmt: skip
    """The key of `compile_kernel` in Triton's cache, which is the hash of what it returns. Nothing is compiled."""
    source, options, environment = _source(kernel, signature, constants, divisible, options, told)
    backend = make_backend(target)
    parsed = backend.parse_options({**options, **source.parse_options()})
    key: str = get_cache_key(source, backend, parsed, env_vars=environment)
    return hashlib.sha256(key.encode("utf-8")).hexdigest()


def _source(
    kernel: Any, signature: dict[str, str], constants: dict[Any, Any], divisible: Iterable[int],
    options: Mapping[str, Any], told: Mapping[str, str],
) -> tuple[Any, dict[str, Any], dict[str, str]]:  # fmt: skip
    attributes = {(i,): [["tt.divisibility", 16]] for i in divisible}
    made = GluonASTSource if kernel.is_gluon() else ASTSource
    source = made(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"enable_fp_fusion": knobs.language.default_fp_fusion, **options}
    return source, options, get_cache_invalidating_env_vars() | dict(told)


# What the compiler of one thread does otherwise ----------------------------------------------------------------------

_here = threading.local()
_lock = threading.Lock()


def tool_at(path: Path) -> Any:
    """The tool (path, version) there, or None."""
    return knobs.NvidiaTool.from_path(str(path))


def shipped_assemblers() -> list[Any]:
    """Triton's ptxas, one or two."""
    tools = []
    for name in ("ptxas", "ptxas_blackwell"):
        with suppress(AttributeError, RuntimeError):
            tools.append(getattr(knobs.nvidia, name))
    return [tool for tool in tools if tool is not None]


@functools.lru_cache(maxsize=1)
def _let_threads_choose() -> Callable[[int], Any]:
    """Has Triton assemble with `_here.tool` and by `_here.assemble`, and edit LLVM text by `_here.edit`, in threads
    that set them; gives its own choice of a ptxas. Its settings are the whole process's, and what others compile
    meanwhile must find its own from beginning to end."""
    from triton.backends.nvidia import compiler

    backend = compiler.CUDABackend
    plain, make_llir, make_cubin = compiler.get_ptxas, backend.make_llir, backend.make_cubin

    def edited(*args: Any, **kwargs: Any) -> str:
        text: str = make_llir(*args, **kwargs)
        edit = getattr(_here, "edit", None)
        return text if edit is None else edit(text)

    def assembled(self: Any, ptx: str, *args: Any) -> bytes:
        by = getattr(_here, "assemble", None)
        found: bytes = make_cubin(self, ptx, *args) if by is None else by(ptx, lambda x: make_cubin(self, x, *args))
        return found

    compiler.get_ptxas = lambda arch: getattr(_here, "tool", None) or plain(arch)
    backend.make_llir, backend.make_cubin = edited, assembled
    if RELEASE == (3, 6):
        _skip_warp_specialization(compiler.passes.ttgpuir)
    return plain


def _skip_warp_specialization(passes: Any) -> None:
    """In threads that set `_here.edit`, loops are not searched for work that warps could share out. No kernel of ours
    asks for that, and for tcgen05 the search fails over accumulators that a branch sets anew."""
    search = passes.add_warp_specialize

    def unless_ours(*args: Any) -> None:
        if getattr(_here, "edit", None) is None:
            search(*args)

    passes.add_warp_specialize = unless_ours


def assembler_for(arch: int) -> Any:
    """The ptxas that Triton itself would take."""
    with _lock:
        plain = _let_threads_choose()
    return plain(arch)


@contextmanager
def _choosing(what: str, value: Any) -> Iterator[None]:
    """Has this thread's compiler do something otherwise: `what` is an attribute of `_here`."""
    with _lock:
        _let_threads_choose()
    setattr(_here, what, value)
    try:
        yield
    finally:
        setattr(_here, what, None)


def assembling_with(tool: Any, arch: int) -> AbstractContextManager[None]:
    """Has Triton assemble with another ptxas in this thread."""
    from triton.backends.nvidia import compiler

    assembler_for(arch)
    compiler.get_ptxas_version(arch)  # which Triton remembers, is that of its own
    return _choosing("tool", tool)


def assembling_by(assemble: Callable[[str, Callable[[str], bytes]], bytes]) -> AbstractContextManager[None]:
    """Kernels that this thread compiles for NVIDIA GPUs are what `assemble` gives for PTX and Triton's assembling."""
    return _choosing("assemble", assemble)


def editing_llvm(edit: Callable[[str], str]) -> AbstractContextManager[None]:
    """Kernels that this thread compiles for NVIDIA GPUs have their LLVM text edited, between optimisation and PTX."""
    return _choosing("edit", edit)


def tool(name: str) -> Path:
    """A program of NVIDIA's that comes with Triton."""
    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name


# Launches -------------------------------------------------------------------------------------------------------------


def current_stream(device: int) -> int:
    """Handle of the current stream of a GPU."""
    return int(triton.runtime.driver.active.get_current_stream(device))


def profiled() -> bool:
    """Whether somebody listens to launches."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool((enter is not None and enter.calls) or (leave is not None and leave.calls))


def make_launcher(compiled: Any) -> Any:
    """Triton's launcher of a kernel. In 3.6 that is C code, compiled for its signature into Triton's cache."""
    return triton.runtime.driver.active.launcher_cls(compiled.src, compiled.metadata)


def cache_folder() -> str:
    """Where Triton keeps compiled kernels."""
    return str(knobs.cache.dir)


def in_cache(key: str, name: str) -> bool:
    """Whether Triton's cache has the kernel of this name under a key of `key_in_cache`."""
    file = f"{name[:150]}.json"  # where Triton ends the names of files
    return file in (get_cache_manager(key).get_group(file) or {})


def keep_launcher(compiled: Any) -> bool:
    """Compiles what `make_launcher` would compile, and what Triton compiles before its first launch, into Triton's
    cache, without a GPU. Nothing is loaded. Whether all was there already. Of Triton 3.6 alone; others compile one
    launcher for all kernels, which is left to them.

    It is for processes that launch nothing.

    Raises:
        RuntimeError: there is no C compiler.
    """
    if RELEASE != (3, 6):
        return True
    from triton.backends.nvidia import driver

    there = []

    def keep(src: str, name: str, **how: Any) -> Any:
        there.append(_keep_module(src, name, how["include_dirs"], how["libraries"]))
        return mock.MagicMock()

    dirs = mock.patch.object(driver, "library_dirs", list)
    with dirs, mock.patch.object(driver, "compile_module_from_src", keep):
        driver.CudaUtils.__init__(mock.MagicMock())
        driver.CudaLauncher(compiled.src, compiled.metadata)
    return all(there)


def _keep_module(source: str, name: str, include_dirs: list[str], libraries: list[str]) -> bool:
    """As Triton's `compile_module_from_src`, but the module is not loaded. The CUDA driver's library need not be there:
    what is linked with has its name and the functions that the source names."""
    from triton.runtime import build

    key = hashlib.sha256((source + build.platform_key()).encode("utf-8")).hexdigest()
    cache, suffix = get_cache_manager(key), sysconfig.get_config_var("EXT_SUFFIX")
    if cache.get_file(f"{name}{suffix}") is not None:
        return True
    with tempfile.TemporaryDirectory() as folder:
        place, text = Path(folder), Path(folder) / f"{name}.c"
        functions = sorted({*re.findall(r"\bcu[A-Z]\w+", source)})
        (place / "driver.c").write_text("".join(f"void {x}(void) {{}}\n" for x in functions))
        link = ["-Wl,-soname,libcuda.so.1"]
        stub = build._build("driver", str(place / "driver.c"), folder, [], [], [], link)
        Path(stub).rename(place / "libcuda.so.1")
        text.write_text(source)
        made = build._build(name, str(text), folder, [folder], include_dirs, libraries, [])
        cache.put(Path(made).read_bytes(), f"{name}{suffix}", binary=True)
    return False


def load(compiled: Any) -> None:
    """Loads a compiled kernel onto the current GPU, unless it is loaded."""
    compiled._init_handles()


def starter(
    compiled: Any, grid: tuple[int, ...], after: tuple[Any, ...]
) -> Callable[[int, Sequence[int | None]], None]:
    """What launches a loaded kernel: a function of the stream's handle and the addresses that the kernel gets before
    its other arguments, `after`.

    Triton's launcher in C, in releases whose arguments are known and where nothing is to be allocated for the kernel;
    else the one in Python around it. No hooks are called.
    """
    run, function, packed = compiled.run, compiled.function, compiled.packed_metadata
    launch, plain = getattr(run, "launch", None), not getattr(run, "gsan_enabled", False)
    scratch = (getattr(run, "global_scratch_size", 1), getattr(run, "profile_scratch_size", 1))
    if launch is not None and plain and scratch == (0, 0):
        lead = (function, run.launch_cooperative_grid, run.launch_pdl)
        if RELEASE == (3, 6):
            each = (*lead, None, None, packed, None, None, None)
            return lambda stream, at: launch(*grid, stream, *each, *at, *after)
        if RELEASE in ((3, 7), (3, 8), (3, 9)):
            once = (*lead, packed, None, None, None, None, None, run.arg_annotations, run.kernel_signature)
            return lambda stream, at: launch(*grid, stream, *once, (*at, *after))
    return lambda stream, at: run(*grid, stream, function, packed, None, None, None, *at, *after)


# The interpreter ------------------------------------------------------------------------------------------------------


def _mend_interpreter() -> None:
    """Comparisons give booleans, numbers in bfloat16 are computed with as such, and Python's floats as arguments are
    float32.

    The interpreter gives a comparison the type of what is compared; where a scalar one joins a mask that becomes a mask
    of integers, which Triton 3.9 refuses. Numbers in bfloat16 it multiplies and adds as if their bits were integers,
    and it rounds to them towards zero. A constant that meets them is refused: a GPU would round it, by as much for all.
    Arguments, float32 on a GPU, it takes for constants. The larger one of NaN and a number is NaN to it, in Triton 3.6
    to 3.8, and the number on a GPU.
    """
    import numpy
    from triton.language import core
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, ReduceOps

    def boolean(compare: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(compare)
        def compared(self: Any, lhs: Any, rhs: Any) -> Any:
            result = compare(self, lhs, rhs)
            result.dtype = core.int1
            return result

        return compared

    for name in [name for name in vars(InterpreterBuilder) if re.match(r"create_[if]cmp", name)]:
        setattr(InterpreterBuilder, name, boolean(getattr(InterpreterBuilder, name)))
    for name in ("binary_op", "unary_op", "create_fma", "create_dot"):
        setattr(InterpreterBuilder, name, _in_float32(getattr(InterpreterBuilder, name)))
    InterpreterBuilder.cast_impl = _cast(InterpreterBuilder.cast_impl)

    InterpreterBuilder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, numpy.fmax)
    InterpreterBuilder.create_minnumf = lambda self, a, b: self.binary_op(a, b, numpy.fmin)
    InterpreterBuilder.get_bf16 = _exactly
    ReduceOps.sum = _sum(ReduceOps.sum)
    interpreter._implicit_cvt = _argument(interpreter._implicit_cvt)


def _sum(add: Callable[..., Any]) -> Callable[..., Any]:
    from triton.language import bfloat16, float32
    from triton.runtime.interpreter import TensorHandle

    @functools.wraps(add)
    def added(self: Any, x: Any) -> Any:
        if x.dtype.scalar != bfloat16:
            return add(self, x)
        total = _widened(x.handle).data.sum(axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(_rounded(TensorHandle(total, float32)).data, x.dtype)

    return added


def _argument(convert: Callable[..., Any]) -> Callable[..., Any]:
    import numpy
    from triton.language import float32, tensor
    from triton.runtime.interpreter import TensorHandle

    @functools.wraps(convert)
    def converted(x: Any) -> Any:
        return tensor(TensorHandle(numpy.array([x], "float32"), float32), float32) if type(x) is float else convert(x)

    return converted


def _exactly(builder: Any, value: float) -> Any:
    """A constant in bfloat16."""
    rounded = _rounded(builder.get_fp32(value))
    if not (_widened(rounded).data == value).all() and value == value:
        raise TypeError(f"{value} would be rounded to bfloat16, as the numbers that it meets: make these float32 first")
    return rounded


def _in_float32(compute: Callable[..., Any]) -> Callable[..., Any]:
    """`compute` with operands in bfloat16 as float32, and a result rounded to bfloat16 where the last of them was."""
    from triton.language import bfloat16
    from triton.runtime.interpreter import TensorHandle

    @functools.wraps(compute)
    def computed(self: Any, *operands: Any) -> Any:
        handles = [x for x in operands if isinstance(x, TensorHandle)]
        if all(x.dtype.scalar != bfloat16 for x in handles):
            return compute(self, *operands)
        result = compute(self, *(_widened(x) if isinstance(x, TensorHandle) else x for x in operands))
        is_number = result.data.dtype.kind == "f"
        return _rounded(result) if is_number and handles[-1].dtype.scalar == bfloat16 else result

    return computed


def _cast(cast: Callable[..., Any]) -> Callable[..., Any]:
    from triton.language import bfloat16
    from triton.language import float32 as single

    @functools.wraps(cast)
    def converted(self: Any, src: Any, dst_type: Any) -> Any:
        types = (src.dtype.scalar, dst_type.scalar)
        if types == (bfloat16, single):
            return _widened(src)
        if types == (single, bfloat16):
            return _rounded(src)
        if types[0] == bfloat16:
            return cast(self, _widened(src), dst_type)
        return _rounded(cast(self, src, single)) if types[1] == bfloat16 else cast(self, src, dst_type)

    return converted


def _widened(handle: Any) -> Any:
    """A handle in float32 of the same numbers; the interpreter keeps bfloat16 as 16 bits of an integer."""
    from triton.language import bfloat16, float32
    from triton.runtime.interpreter import TensorHandle

    if handle.dtype.scalar != bfloat16:
        return handle
    return TensorHandle((handle.data.astype("uint32") << 16).view("float32"), float32)


def _rounded(handle: Any) -> Any:
    """A handle in bfloat16 of numbers in float32, rounded to the nearest, ties to even, as GPUs do."""
    import numpy
    from triton.language import bfloat16
    from triton.runtime.interpreter import TensorHandle

    numbers = numpy.asarray(handle.data, "float32")
    bits = numbers.view("uint32").astype("uint64")
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return TensorHandle(numpy.where(numpy.isnan(numbers), 0x7FC0, nearest).astype("uint16"), bfloat16)


if knobs.runtime.interpret:
    _mend_interpreter()
