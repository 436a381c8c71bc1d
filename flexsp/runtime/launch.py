"""Launch of Triton kernels with little host time: a repeated call goes straight to the compiled kernel.

Triton's own launcher describes every argument of every call in text to find the kernel it compiled before. Here what
is compiled in (types, alignments, which numbers are 1 or divisible by 16) forms a tuple, and the compiled kernel it led
to is kept. The kernels of several launches (`KernelLaunch`) are compiled side by side.

From Hopper on, kernels are launched as programmatic dependents: a kernel is set up before the memory of the one before
has settled, and waits for that in `begin`.

ptxas 12.8, which Triton 3.6 uses for Hopper, miscompiles some kernels with small wgmma products: wrong results or
illegal accesses, gone with 12.9 and 13.0. Kernels for Hopper are assembled by the newest ptxas that is found. All
releases make mistakes in kernels that spill registers; see `flexsp.runtime.workarounds.unwritten_registers`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from flexsp.devices import REGISTERS, check_shared, reads_shared
from flexsp.log import tell
from flexsp.runtime import triton_private as private
from flexsp.runtime.tested_versions import warn_if_uncovered
from flexsp.runtime.triton_private import current_target, make_launcher
from flexsp.runtime.workarounds import unwritten_registers, vector_flags

__all__ = [
    "KernelLaunch", "Request", "begin", "build", "collecting", "current_target", "dependent", "key_of", "launch",
    "newer_assembler", "old_assembler", "only_old_assemblers", "outcome", "specialisation", "workers",
]  # fmt: skip

_OLDEST = (12, 9)
_TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32", torch.int64: "*i64",
    torch.uint8: "*u8", torch.float64: "*fp64",
}  # fmt: skip
_WORKERS = 16
_compiled: dict[Any, Future[Any]] = {}
_launched: dict[Any, Any] = {}  # loaded kernels of `launch`
_lock = threading.RLock()
_collected: dict[Any, Request] | None = None


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


def _version(tool: Any) -> tuple[int, ...]:
    return tuple(int(x) for x in tool.version.split("."))


@functools.lru_cache(maxsize=1)
def newer_assembler() -> Any:
    """The newest ptxas (path, version) that is there, to assemble kernels for Hopper with; None before 12.9.

    Looked at are Triton's two, that of the CUDA toolkit and that of the package nvidia-cuda-nvcc; none of a newer CUDA
    than torch's, whose cubins the driver might not load.
    """
    limit = int(torch.version.cuda.partition(".")[0]) if torch.version.cuda else 99
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "ptxas"
    package = Path(torch.__file__).parents[1] / "nvidia" / f"cu{limit}" / "bin" / "ptxas"
    found = [private.tool_at(path) for path in (toolkit, package) if path.exists()]
    tools = [*private.shipped_assemblers(), *(tool for tool in found if tool is not None)]
    fit = [tool for tool in tools if _OLDEST <= _version(tool) < (limit + 1,)]
    return max(fit, key=_version, default=None)


def only_old_assemblers() -> bool:
    """Whether kernels for Hopper would be assembled by a ptxas before 12.9."""
    return newer_assembler() is None and _version(private.assembler_for(90)) < _OLDEST


def old_assembler(on_gpu: bool) -> str | None:
    """Why kernels that are compiled here are not to be trusted, or None."""
    if on_gpu and torch.cuda.get_device_capability()[0] == 9 and only_old_assemblers():
        return "ptxas before 12.9 miscompiles kernels for Hopper; pip install nvidia-cuda-nvcc"
    return None


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


def _forget_workers() -> None:
    """After a fork the child has none of the parent's threads, so the compilations that they began never finish."""
    global _lock
    _lock = threading.RLock()
    workers.cache_clear()
    for key in [key for key, found in _compiled.items() if not found.done()]:
        del _compiled[key]


os.register_at_fork(after_in_child=_forget_workers)


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


@contextmanager
def _assembler(arch: int) -> Iterator[dict[str, str]]:
    """Lets Triton use the newer ptxas in this thread; yields what its cache key must contain for that."""
    tool = newer_assembler() if arch == 90 else None
    if tool is None or tool.path == private.assembler_for(arch).path:
        yield {}
        return
    with private.assembling_with(tool, arch):
        yield {"flexsp_ptxas": tool.version}


class _Pointer(NamedTuple):
    """What a kernel is compiled for, of a tensor."""

    dtype: torch.dtype
    aligned: bool


def build(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any], options: dict[str, Any], target: Any) -> Any:
    """`kernel` compiled for `target` and arguments like `args`; tensors count by dtype and alignment, on any device.

    Numbers that are 1 or divisible by 16 are compiled in as such, unless the kernel names them in do_not_specialize.

    Raises:
        ValueError: the kernel needs more shared memory than a block of the target has.
    """
    begun = time.perf_counter()
    with _compiling(kernel, args, constants, options, target) as asked:
        compiled = private.compile_kernel(*asked)
    took = time.perf_counter() - begun
    tell(logging.DEBUG, f"kernel: {kernel.__name__} for sm_{target.arch}, ready after {took:.3f} s")
    sizes = ", ".join(f"{name} = {n}" for name, n in constants.items() if type(n) is int and n > 1)
    check_shared(kernel.__name__, compiled.metadata.shared, target.arch, sizes)
    return compiled


def key_of(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any], options: dict[str, Any], target: Any) -> str:
    """The key in Triton's cache of what `build` returns. Nothing is compiled."""
    with _compiling(kernel, args, constants, options, target) as asked:
        return private.key_in_cache(*asked)


@contextmanager
def _compiling(
    kernel: Any, args: tuple[Any, ...], constants: dict[str, Any], options: dict[str, Any], target: Any
) -> Iterator[tuple[Any, ...]]:
    """The arguments of `private.compile_kernel`, to be called inside."""
    named = dict(zip(kernel.arg_names, args, strict=False)) | constants
    signature: dict[str, str] = {}
    fixed: dict[Any, Any] = {}
    divisible = []
    for i, param in enumerate(private.parameters(kernel)):
        value = named.get(param.name, param.default)
        kind = _CONSTANT if param.constant else _kind(value, param.free)
        signature[param.name] = kind.type
        if kind.type == "constexpr":
            fixed[(i,)] = value
        elif kind.divisible:
            divisible.append(i)
    if not reads_shared(target.arch):  # left alone, ptxas gives kernels that spill 32 registers a thread on sm_80
        options = {"maxnreg": min(255, REGISTERS // (32 * options.get("num_warps", 4)))} | options
    edited = private.editing_llvm(vector_flags.drop_lane_flags)
    checked = private.assembling_by(unwritten_registers.assembled)
    with _assembler(target.arch) as told, edited, checked:
        told = told | {"flexsp_lane_flags": "dropped", "flexsp_registers": unwritten_registers.rules()}
        yield kernel, signature, fixed, divisible, target, options, told


class Request(NamedTuple):
    """A kernel that a launch needs, as arguments of `build`."""

    kernel: Any
    args: tuple[Any, ...]
    constants: dict[str, Any]
    options: dict[str, Any]

    def build(self, target: Any) -> Any:
        return build(*self, target)

    def key(self, target: Any) -> str:
        return key_of(*self, target)


@contextmanager
def collecting() -> Iterator[dict[Any, Request]]:
    """Collects what launches on GPUs would have compiled, from the whole process: inside nothing is compiled, loaded or
    launched. Calls that look like some from before leave nothing, so it is for processes that do nothing else."""
    global _collected
    found: dict[Any, Request] = {}
    _collected = found
    try:
        yield found
    finally:
        _collected = None


@dataclass(frozen=True, eq=False)
class _Kind:
    """What a kernel is compiled for, of an argument. All there are stand below: they are compared by identity."""

    type: str
    divisible: bool = False


_CONSTANT, _ONE = _Kind("constexpr"), _Kind("constexpr")
_BOOL, _FLOAT = _Kind("i1"), _Kind("fp32")
_NARROW, _WIDE = [(_Kind(text), _Kind(text, True)) for text in ("i32", "i64")]
_POINTERS = {dtype: (_Kind(text), _Kind(text, True)) for dtype, text in _TYPES.items()}


def _kind(value: Any, free: bool) -> _Kind:
    if type(value) is int:
        if value == 1 and not free:
            return _ONE
        return (_NARROW if -(2**31) <= value < 2**31 else _WIDE)[value % 16 == 0 and not free]
    if value is None:
        return _CONSTANT
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype][_aligned(value) and not free]
    if isinstance(value, _Pointer):
        return _POINTERS[value.dtype][value.aligned and not free]
    if isinstance(value, bool):
        return _BOOL
    if isinstance(value, float):
        return _FLOAT
    raise TypeError(f"argument of a kernel: expected a tensor, an int, a float, a bool or None, got {type(value)}")


def specialisation(
    kernel: Any, args: Sequence[Any], constants: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[Any, ...]:
    """The key of the compiled kernel that `build` returns, without the device. Calls of one kernel have one key."""
    kinds = tuple(map(_kind, args, private.freedom(kernel)))
    how = [(k, tuple(v.items()) if type(v) is dict else v) for k, v in options.items()]
    return kernel, kinds, *constants.items(), *how


def _described(args: Sequence[Any]) -> tuple[Any, ...]:
    """`args` as `build` needs them: descriptions that hold no memory."""
    return tuple([_looks(x) if isinstance(x, torch.Tensor) else x for x in args])


def launch(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any], options: dict[str, Any],
    prepare: Callable[[Any], None] | None = None,
) -> None:  # fmt: skip
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
    pdl, key = dependent(device), (device, specialisation(kernel, args, constants, options))
    compiled = _launched.get(key)
    if compiled is None:
        what = Request(kernel, _described(args), constants | {"PDL": pdl}, options | {"launch_pdl": pdl})
        compiled = outcome(_begin(key, what))
        if _collected is not None:
            return
        with _lock:
            if key not in _launched:
                _load(compiled, device)
                if prepare is not None:
                    prepare(compiled)
                _launched[key] = compiled
    fixed = [constants[name] for name in kernel.arg_names[len(args) : -1]]
    values = [x.data_ptr() if isinstance(x, torch.Tensor) and x.is_cuda else x for x in args]
    compiled[grid + (1,) * (3 - len(grid))](*values, *fixed, pdl)


class KernelLaunch:
    """A launch whose numbers are known beforehand and whose tensors are named: repeated calls only fill in addresses.

    ``frame[name]`` is the tensor of a name; None stands for a pointer that the kernel does not use. Tensors of later
    calls must have the dtypes and alignments of the first call's.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], pointers: Sequence[str | None],
        numbers: Sequence[int | float], constants: dict[str, Any], options: dict[str, Any],
    ) -> None:  # fmt: skip
        self.kernel, self.grid, self.pointers, self.numbers = kernel, grid, tuple(pointers), tuple(numbers)
        self.constants, self.options = constants, options
        pick = operator.itemgetter(*self.pointers)
        self._pick = pick if len(self.pointers) > 1 else lambda at: (pick(at),)
        self.compiled: Any = None
        self._found: Future[Any] | None = None
        self._start: Any = None
        self._after: tuple[Any, ...] = ()

    def __call__(self, frame: Any) -> None:
        """Launches on the tensors of `frame`, by way of `launch`."""
        launch(self.kernel, self.grid, self.arguments(frame), self.constants, self.options)

    def arguments(self, frame: Any) -> tuple[Any, ...]:
        """The arguments of the kernel before its constants."""
        return (*(None if name is None else frame[name] for name in self.pointers), *self.numbers)

    def described(self, frame: Any) -> tuple[Any, ...]:
        """`arguments` as `build` needs them, without the memory."""
        return _described(self.arguments(frame))

    def run(self, frame: Any, at: Mapping[str | None, int | None], stream: int) -> None:
        """Launches with the addresses `at` of the tensors of `frame`, on the current device."""
        if self.compiled is None:
            self._compile(frame)
            if self.compiled is None:  # `collecting`
                return
        if private.profiled():
            self.compiled[self.grid](*self._pick(at), *self._after)
        else:
            self._start(stream, self._pick(at))

    def request(self, frame: Any, pdl: bool) -> Request:
        """What is compiled for it; `pdl`: it is launched as a programmatic dependent."""
        args = self.described(frame)
        return Request(self.kernel, args, self.constants | {"PDL": pdl}, self.options | {"launch_pdl": pdl})

    def prepare(self, frame: Any, device: int) -> Future[Any]:
        """Starts to compile the kernel for a GPU, in another thread, unless that was done before."""
        found = self._found
        if found is None or _failed(found):
            key, request = (device, self.facts(frame)), self.request(frame, dependent(device))
            with torch.cuda.device(device) if device != torch.cuda.current_device() else nullcontext():
                found = self._found = _begin(key, request)
        return found

    def facts(self, frame: Any) -> tuple[Any, ...]:
        """The key of the compiled kernel, without the device."""
        return specialisation(self.kernel, self.arguments(frame), self.constants, self.options)

    def _compile(self, frame: Any) -> None:
        device = torch.cuda.current_device()
        found, self._found = self.prepare(frame, device), None  # kept, a failure would keep the frames of this call
        compiled = outcome(found)
        if _collected is not None:
            return
        with _lock:
            _load(compiled, device)
        constants = self.constants | {"PDL": dependent(device)}
        fixed = [constants[name] for name in self.kernel.arg_names[len(self.pointers) + len(self.numbers) :]]
        self._after = (*self.numbers, *fixed)
        self._start = private.starter(compiled, self.grid, self._after)
        self.compiled = compiled  # last: another thread that sees it finds what it is launched with


def _begin(key: Any, request: Request) -> Future[Any]:
    """The kernel of a request for the current GPU, begun in another thread unless that was done before."""
    with _lock:
        if _collected is not None:
            _collected[key] = request
            nothing: Future[Any] = Future()
            nothing.set_result(None)
            return nothing
        found = _compiled.get(key)
        if found is None or _failed(found):
            found = _compiled[key] = _submit(_built, request, current_target())
        return found


def _built(request: Request, target: Any) -> Any:
    """The kernel, and in Triton's cache what launches it, which may be compiled too."""
    compiled = request.build(target)
    make_launcher(compiled)
    return compiled


def outcome(found: Future[Any]) -> Any:
    """The compiled kernel. A failure is raised, and forgotten: its traceback will hold the frames of this call."""
    error = found.exception()
    if error is None:
        return found.result()
    with _lock:
        for key in [key for key, other in _compiled.items() if other is found]:
            del _compiled[key]
    raise error.with_traceback(None)


def _load(compiled: Any, device: int) -> None:
    private.load(compiled)
    warn_if_uncovered(triton.__version__, device)


def _failed(found: Future[Any]) -> bool:
    return found.done() and (found.cancelled() or found.exception() is not None)


def _aligned(x: torch.Tensor) -> bool:
    return x.data_ptr() % 16 == 0 or x.device.type == "meta"


def _looks(x: torch.Tensor) -> _Pointer:
    return _Pointer(x.dtype, _aligned(x))
