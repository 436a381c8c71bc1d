"""Launch of Triton kernels with little host time: a repeated call goes straight to the compiled kernel.

Triton's own launcher describes every argument of every call in text to find the kernel it compiled before. Here the
numbers of a call and the types and alignments of its tensors form a tuple, and the compiled kernel it led to is kept.
The kernels of several launches (`Shot`) are compiled side by side.

From Hopper on, kernels are launched as programmatic dependents: a kernel is set up before the memory of the one before
has settled, and waits for that in `begin`.

ptxas 12.8, which Triton 3.6 uses for Hopper, miscompiles some kernels with small wgmma products: wrong results or
illegal accesses, gone with 12.9 and 13.0. Kernels for Hopper are assembled by the newest ptxas that is found.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.compiler import ASTSource
from triton.language.extra.cuda import gdc_wait
from triton.runtime.jit import get_cache_invalidating_env_vars

__all__ = ["Shot", "begin", "build", "current_target", "dependent", "launch", "newer_assembler", "workers"]

_OLDEST = (12, 9)
_TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32", torch.int64: "*i64",
    torch.uint8: "*u8", torch.float64: "*fp64",
}  # fmt: skip
_WORKERS = 16
_DIRECT = triton.__version__.startswith("3.6.")  # whose launcher's arguments are known
_compiled: dict[Any, Any] = {}
_lock = threading.RLock()
_here = threading.local()


@triton.jit
def begin(PDL: tl.constexpr) -> None:
    """First statement of every kernel that `launch` starts: waits until what the kernel before wrote can be seen.

    Nothing may touch global memory above it. The kernel before gives no signal of its own, so this one is set up when
    its last block is done: set up earlier, small blocks crowd on the few SMs that the walks leave idle.
    """
    if PDL:
        gdc_wait()


@functools.lru_cache(maxsize=64)
def dependent(device: int) -> bool:
    """Whether kernels on this GPU are launched as programmatic dependents."""
    return torch.cuda.get_device_capability(device)[0] >= 9


def current_target() -> Any:
    """What Triton compiles for: the current GPU."""
    return triton.runtime.driver.active.get_current_target()


def _version(tool: Any) -> tuple[int, ...]:
    return tuple(int(x) for x in tool.version.split("."))


@functools.lru_cache(maxsize=1)
def newer_assembler() -> Any:
    """The newest ptxas (path, version) that is there, to assemble kernels for Hopper with; None before 12.9.

    Looked at are Triton's two, that of the CUDA toolkit and that of the package nvidia-cuda-nvcc; none of a newer CUDA
    than torch's, whose cubins the driver might not load.
    """
    limit = int(torch.version.cuda.partition(".")[0]) if torch.version.cuda else 99
    tools = []
    for name in ("ptxas", "ptxas_blackwell"):
        with contextlib.suppress(AttributeError, RuntimeError):
            tools.append(getattr(knobs.nvidia, name))
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "ptxas"
    package = Path(torch.__file__).parents[1] / "nvidia" / f"cu{limit}" / "bin" / "ptxas"
    tools += [knobs.NvidiaTool.from_path(str(path)) for path in (toolkit, package) if path.exists()]
    fit = [tool for tool in tools if tool is not None and _OLDEST <= _version(tool) < (limit + 1,)]
    return max(fit, key=_version, default=None)


@functools.lru_cache(maxsize=1)
def workers() -> ThreadPoolExecutor:
    """Threads that compile: this process's share of the host's cores. Most of a compilation runs outside the GIL.

    At the interpreter's end what has not begun is dropped, else it would be compiled first.
    """
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
    pool = ThreadPoolExecutor(max(1, min(_WORKERS, len(os.sched_getaffinity(0)) // ranks)), "flexsp-compile")
    with contextlib.suppress(AttributeError):  # runs before the pool's own, which waits for the whole queue
        threading._register_atexit(functools.partial(pool.shutdown, wait=False, cancel_futures=True))  # type: ignore[attr-defined]
    return pool


os.register_at_fork(after_in_child=workers.cache_clear)


def _submit(work: Callable[..., Any], *args: Any) -> Future[Any]:
    try:
        return workers().submit(work, *args)
    except RuntimeError:  # the interpreter is ending, and takes no more work
        done: Future[Any] = Future()
        try:
            done.set_result(work(*args))
        except Exception as error:
            done.set_exception(error)
        return done


@functools.lru_cache(maxsize=1)
def _let_threads_choose() -> None:
    """Has Triton assemble with `_here.tool` in threads that set it. Its own setting is the whole process's, and what
    others compile meanwhile must not find another ptxas halfway."""
    from triton.backends.nvidia import compiler

    plain = compiler.get_ptxas
    compiler.get_ptxas = lambda arch: getattr(_here, "tool", None) or plain(arch)


@contextmanager
def _assembler(arch: int) -> Iterator[dict[str, str]]:
    """Lets Triton use the newer ptxas in this thread; gives what tells its cache so."""
    tool = newer_assembler() if arch == 90 else None
    if tool is None or tool.path == knobs.nvidia.ptxas.path:
        yield {}
        return
    from triton.backends.nvidia import compiler

    with _lock:
        _let_threads_choose()
    compiler.get_ptxas_version(arch)  # which Triton remembers, is that of its own
    _here.tool = tool
    try:
        yield {"flexsp_ptxas": tool.version}
    finally:
        _here.tool = None


class _Pointer(NamedTuple):
    """What a kernel is compiled for, of a tensor."""

    dtype: torch.dtype
    aligned: bool


def build(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any], options: dict[str, Any], target: Any) -> Any:
    """`kernel` compiled for `target` and arguments like `args`; tensors count by dtype and alignment, on any device.

    Numbers that are 1 or divisible by 16 are compiled in as such, unless the kernel names them in do_not_specialize.
    """
    named = dict(zip(kernel.arg_names, args, strict=False)) | constants
    signature: dict[str, str] = {}
    fixed: dict[Any, Any] = {}
    attrs: dict[Any, Any] = {}
    for i, param in enumerate(kernel.params):
        value = named.get(param.name, param.default)
        free = param.name in (kernel.do_not_specialize or ())
        if param.is_constexpr or value is None or (type(value) is int and value == 1 and not free):
            signature[param.name], fixed[(i,)] = "constexpr", value
            continue
        signature[param.name], aligned = _describe(value)
        if aligned and not free:
            attrs[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed, attrs=attrs)
    with _assembler(target.arch) as told:
        return triton.compile(source, target, options, _env_vars=get_cache_invalidating_env_vars() | told)


def _describe(value: Any) -> tuple[str, bool]:
    if isinstance(value, torch.Tensor):
        value = _looks(value)
    if isinstance(value, _Pointer):
        return _TYPES[value.dtype], value.aligned
    if isinstance(value, bool):
        return "i1", False
    if isinstance(value, float):
        return "fp32", False
    return ("i32" if -(2**31) <= value < 2**31 else "i64"), value % 16 == 0


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    args: tuple[Any, ...],
    constants: dict[str, Any],
    options: dict[str, Any],
    prepare: Callable[[Any], None] | None = None,
) -> None:
    """Runs `kernel[grid](*args, **constants, **options)` on the first tensor's device and its current stream.

    The kernel's constexpr parameters come after all others, the last is PDL, given here and handed to `begin`; option
    values are hashable or dictionaries. `prepare` is called with a freshly compiled kernel, its module loaded, before
    its first launch.
    """
    lead = args[0] if args[0] is not None else next(x for x in args if x is not None)
    if not lead.is_cuda:
        kernel[grid](*args, **constants, PDL=False, **options)
        return
    device = lead.device.index
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, grid, args, constants, options, prepare)
    pdl = dependent(device)
    fixed = (*[constants[name] for name in kernel.arg_names[len(args) : -1]], pdl)
    how = tuple([tuple(v.items()) if isinstance(v, dict) else v for v in options.values()])
    facts, values = [], []
    for x in args:
        if isinstance(x, torch.Tensor):
            address = x.data_ptr()
            facts.append((x.dtype, address % 16 == 0))
            values.append(address if x.is_cuda else x)  # the driver need not look up what is known to be on the GPU
        else:
            facts.append(x)
            values.append(x)
    key = (kernel, device, tuple(facts), fixed, how)
    compiled = _compiled.get(key)
    if compiled is None:
        compiled = build(kernel, args, constants | {"PDL": pdl}, options | {"launch_pdl": pdl}, current_target())
        if prepare is not None:
            compiled._init_handles()
            prepare(compiled)
        _compiled[key] = compiled
    compiled[grid + (1,) * (3 - len(grid))](*values, *fixed)


class Shot:
    """A launch whose numbers are known beforehand and whose tensors are named: repeated calls only fill in addresses.

    ``frame[name]`` is the tensor of a name; None stands for a pointer that the kernel does not use. Tensors of later
    calls must have the dtypes and alignments of the first call's.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], pointers: Sequence[str | None], numbers: Sequence[int],
        constants: dict[str, Any], options: dict[str, Any],
    ) -> None:  # fmt: skip
        self.kernel, self.grid, self.pointers, self.numbers = kernel, grid, tuple(pointers), tuple(numbers)
        self.constants, self.options = constants, options
        pick = operator.itemgetter(*self.pointers)
        self._pick = pick if len(self.pointers) > 1 else lambda at: (pick(at),)
        self.compiled: Any = None
        self._found: Future[Any] | None = None
        self._start: Any = None
        self._lead: tuple[Any, ...] = ()
        self._after: tuple[Any, ...] = ()

    def __call__(self, frame: Any) -> None:
        """Launches on the tensors of `frame`, by way of `launch`."""
        launch(self.kernel, self.grid, self.arguments(frame), self.constants, self.options)

    def arguments(self, frame: Any) -> tuple[Any, ...]:
        """What the kernel takes before its constants."""
        return (*(None if name is None else frame[name] for name in self.pointers), *self.numbers)

    def described(self, frame: Any) -> tuple[Any, ...]:
        """`arguments` as `build` needs them, without the memory."""
        return tuple([_looks(x) if isinstance(x, torch.Tensor) else x for x in self.arguments(frame)])

    def fire(self, frame: Any, at: Mapping[str | None, int | None], stream: int) -> None:
        """Launches with the addresses `at` of the tensors of `frame`, on the current device."""
        if self.compiled is None:
            self._compile(frame)
        enter = knobs.runtime.launch_enter_hook
        if enter is not None and enter.calls:  # a profiler listens
            self.compiled[self.grid](*self._pick(at), *self._after)
            return
        self._start(*self.grid, stream, *self._lead, *self._pick(at), *self._after)

    def build(self, args: tuple[Any, ...], target: Any) -> Any:
        """The kernel compiled for a target, which need not be here, and arguments as `described`."""
        pdl = target.arch >= 90
        return build(self.kernel, args, self.constants | {"PDL": pdl}, self.options | {"launch_pdl": pdl}, target)

    def prepare(self, frame: Any, device: int) -> Future[Any]:
        """Starts to compile the kernel for a GPU, in another thread, unless that was done before."""
        found = self._found
        if found is None or _failed(found):
            key = (device, self.facts(frame))
            with _lock, torch.cuda.device(device) if device != torch.cuda.current_device() else nullcontext():
                if key not in _compiled or _failed(_compiled[key]):
                    _compiled[key] = _submit(self._built, self.described(frame), current_target())
                found = self._found = _compiled[key]
        return found

    def _built(self, args: tuple[Any, ...], target: Any) -> Any:
        """The kernel, and in Triton's cache what launches it, which is compiled too."""
        compiled = self.build(args, target)
        make_launcher(compiled)
        return compiled

    def facts(self, frame: Any) -> tuple[Any, ...]:
        """What decides which compiled kernel it is, but for the device."""
        facts: list[Any] = [None if name is None else _looks(frame[name]) for name in self.pointers]
        names = self.kernel.arg_names[len(self.pointers) :]
        free = self.kernel.do_not_specialize or ()
        for name, n in zip(names, self.numbers, strict=False):
            facts.append((abs(n) >= 2**31, *(() if name in free else (n % 16 == 0, n == 1))))
        constants = tuple(self.constants[name] for name in names[len(self.numbers) :] if name in self.constants)
        return (self.kernel, tuple(facts), constants, tuple(sorted(self.options.items())))

    def _compile(self, frame: Any) -> None:
        device = torch.cuda.current_device()
        found = self.prepare(frame, device)
        error = found.exception()
        if error is not None:  # dropped, since its traceback will hold the frames of this call
            self._found = None
            with _lock:
                for key in [key for key, other in _compiled.items() if other is found]:
                    del _compiled[key]
            raise error.with_traceback(None)
        compiled = found.result()
        compiled._init_handles()
        constants = self.constants | {"PDL": dependent(device)}
        fixed = [constants[name] for name in self.kernel.arg_names[len(self.pointers) + len(self.numbers) :]]
        self._start, self._lead = _entry(compiled)
        self._after = (*self.numbers, *fixed)
        self.compiled = compiled  # last: another thread that sees it finds what it is launched with


def make_launcher(compiled: Any) -> Any:
    """Triton's launcher of a kernel: C code that is compiled for its signature, into the cache."""
    return triton.runtime.driver.active.launcher_cls(compiled.src, compiled.metadata)


def _failed(found: Future[Any]) -> bool:
    return found.done() and (found.cancelled() or found.exception() is not None)


def _entry(compiled: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What launches a kernel, and its arguments between the stream and the kernel's own.

    Triton's launcher in C where nothing is to be allocated for the kernel, else the one in Python around it.
    """
    run, rest = compiled.run, (compiled.packed_metadata, None, None, None)
    if _DIRECT and getattr(run, "global_scratch_size", 1) == 0 and getattr(run, "profile_scratch_size", 1) == 0:
        return run.launch, (compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None, *rest)
    return run, (compiled.function, *rest)


def _looks(x: torch.Tensor) -> _Pointer:
    return _Pointer(x.dtype, x.device.type == "meta" or x.data_ptr() % 16 == 0)
