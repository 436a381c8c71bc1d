"""What flexsp uses of Triton beside its public interface: the parser that it calls, its launchers, its interpreter."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flexsp.runtime.workarounds.python_parser import persistent

ROOT = Path(__file__).resolve().parents[2]


def run_python(*args: str, timeout: float = 120, **env: str) -> str:
    inherited = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "WORLD_SIZE")}
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, *args], env=inherited | {"PYTHONPATH": path} | env, capture_output=True, text=True,
        timeout=timeout, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


# One file for what is private -----------------------------------------------------------------------------------------


def private_names(source: str) -> set[str]:
    """Modules of Triton that are imported, or reached through `triton.`, and are neither the language nor the top."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("triton.")}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "triton":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "triton":
            found.add(f"triton.{node.attr}")
        elif isinstance(node, ast.Attribute) and node.attr in ("_init_handles", "packed_metadata", "cache_key"):
            found.add(node.attr)
    public = re.compile(
        r"triton\.((language|jit|JITFunction|cdiv|next_power_of_2|__version__)\b|experimental\.gluon($|\.language\b))"
    )
    return {name for name in found if not public.match(name)}


def test_what_is_private_of_triton_stands_in_one_file_and_one_for_tests() -> None:
    files = {path: private_names(path.read_text()) for path in (ROOT / "flexsp").rglob("*.py")}
    found = {str(path.relative_to(ROOT / "flexsp")) for path, names in files.items() if names}
    assert found == {"runtime/triton_private.py", "testing/triton_hooks.py"}


@pytest.mark.parametrize(
    "source",
    ["from triton import knobs", "import triton.runtime.jit", "x = triton.runtime.driver", "k._init_handles()",
     "from triton.experimental.gluon._runtime import GluonASTSource"],
)
def test_a_private_name_is_noticed(source: str) -> None:
    assert private_names(source)
    assert not private_names("import triton, triton.language as tl\nfrom triton.language.extra.cuda import gdc_wait")
    assert not private_names("from triton.experimental import gluon")
    assert not private_names("from triton.experimental.gluon import language as gl")


# Parsing in threads ---------------------------------------------------------------------------------------------------

# Threads change places inside of a parse where the garbage collector runs Python code: here often.
PARSERS = """
import ast, gc, sys, threading
import triton
from flexsp.scan import propagate

source = open(ast.__file__).read()[:20000].rpartition("\\nclass ")[0]
sys.setswitchinterval(1e-5)
gc.freeze()
gc.callbacks.append(lambda *args: sum(range(50)))
gc.set_threshold(50)
failures, keys, _ = [], set(), propagate._propagate_kernel.cache_key  # those of what it calls come into those below

def repeatedly(work):
    for _ in range(15):
        try:
            work()
        except SystemError as error:
            failures.append(str(error))

def new_kernel():
    keys.add(triton.jit(propagate._propagate_kernel.fn).cache_key)

threads = [threading.Thread(target=repeatedly, args=(new_kernel,)) for _ in range(3)]
threads.append(threading.Thread(target=repeatedly, args=(lambda: ast.parse(source),)))  # no kernel: a tracer, say
for thread in threads:
    thread.start()
repeatedly(new_kernel)
for thread in threads:
    thread.join()
print(len(failures), len(keys), failures[:1])
"""


def test_threads_parse_side_by_side() -> None:
    """On Python 3.11.0 to 3.11.7 some of these parses fail as Python leaves them, and kernels keep half a cache key."""
    failures, keys, text = run_python("-c", PARSERS).split(maxsplit=2)
    assert (int(failures), int(keys)) == (0, 1), text


def test_other_errors_of_the_parser_are_raised() -> None:
    calls = []

    def parse(text: str) -> str:
        calls.append(text)
        if len(calls) < 3:
            raise SystemError("AST constructor recursion depth mismatch (before=18, after=11)")
        raise SystemError(text) if text == "another" else SyntaxError(text)

    for text, kind in (("another", SystemError), ("wrong", SyntaxError)):
        calls.clear()
        with pytest.raises(kind, match=text):
            persistent(parse)(text)
        assert len(calls) == 3
    calls.clear()

    def hopeless(text: str) -> None:
        calls.append(text)
        raise SystemError("AST constructor recursion depth mismatch")

    with pytest.raises(SystemError, match="mismatch"):
        persistent(hopeless)("x")
    assert 10 < len(calls) < 1000


# Launches on a driver that only writes down ---------------------------------------------------------------------------

DRIVER = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef struct { int id; char pad[4]; union { char bytes[64]; int value; } of; } Attribute;
typedef struct { unsigned grid[3], block[3], shared; void *stream; Attribute *attributes; unsigned count; } Config;

int cuLaunchKernelEx(const Config *c, void *function, void **params, void **extra) {
  printf("grid %u %u %u block %u shared %u stream %p function %p", c->grid[0], c->grid[1], c->grid[2], c->block[0],
         c->shared, c->stream, function);
  for (unsigned i = 0; i < c->count; ++i) printf(" attribute %d", c->attributes[i].id);
  char sizes[256];
  strcpy(sizes, getenv("SIZES"));
  char *size = strtok(sizes, ",");
  for (int i = 0; size; ++i, size = strtok(0, ",")) {
    unsigned long long value = 0;
    memcpy(&value, params[i], atoi(size));
    printf(" %llu", value);
  }
  printf("\\n");
  fflush(stdout);
  return 0;
}
int cuModuleLoadData(void **module, void *image) { *module = (void *)0x77; return 0; }
int cuModuleGetFunction(void **function, void *module, char *name) { *function = (void *)0x99; return 0; }
int cuCtxGetCurrent(void **context) { *context = (void *)0x55; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuDeviceGetAttribute(int *value, int which, int device) { *value = 227 * 1024; return 0; }
int cuFuncGetAttribute(int *value, int which, void *function) { *value = which == 0 ? 1024 : 0; return 0; }
int cuGetErrorString(int code, char **text) { *text = "no"; return 0; }
#define NOTHING(name) int name() { return 0; }
NOTHING(cuInit) NOTHING(cuDriverGetVersion) NOTHING(cuDeviceGetCount) NOTHING(cuCtxSetCurrent) NOTHING(cuCtxGetLimit)
NOTHING(cuCtxSetLimit) NOTHING(cuDevicePrimaryCtxRetain) NOTHING(cuFuncSetAttribute) NOTHING(cuFuncSetCacheConfig)
NOTHING(cuModuleUnload) NOTHING(cuOccupancyMaxActiveClusters) NOTHING(cuPointerGetAttribute)
NOTHING(cuStreamIsCapturing) NOTHING(cuTensorMapEncodeTiled) NOTHING(cuTensorMapEncodeIm2col)
"""

LAUNCHES = """
import warnings
import torch, triton, triton.language as tl

torch.cuda.current_device, torch.cuda.set_device = lambda: 0, lambda device: None
torch.cuda.get_device_capability, torch.cuda.get_device_name = lambda device=None: (9, 0), lambda device=None: "a stub"

from triton import knobs
from triton.backends.nvidia.driver import CudaDriver, CudaLauncher
from flexsp.exceptions import UncoveredWarning
from flexsp.runtime import tested_versions
from flexsp.runtime import triton_private as private
from flexsp.runtime.launch import KernelLaunch, begin, launch

tested_versions.COVERED = ()

driver = CudaDriver()
driver.get_current_stream = lambda device: 0x70
triton.runtime.driver.set_active(driver)

@triton.jit(do_not_specialize=["free"])
def kernel(x, y, unused, n, one, wide, free, scale, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i) * scale + n + one + wide + free)

python = CudaLauncher.__call__
CudaLauncher.__call__ = lambda *args: (print("python", flush=True), python(*args))

class OnGPU(torch.Tensor):
    is_cuda, device = True, torch.device("cuda", 0)

frame = {"x": torch.zeros(64), "y": torch.zeros(64)}
at = {"x": 4096, "y": 8192, None: None}
numbers, constants, options = [5, 1, 2**40, 16, 0.5], {"BLOCK": 32}, {"num_warps": 2}

def a_launch():
    return KernelLaunch(kernel, (3, 4, 5), ["x", "y", None], numbers, constants, options)

with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    a_launch().run(frame, at, 0x70)
    a_launch().run(frame, at, 0x70)
    private.RELEASE = (3, 99)  # one that is not known
    a_launch().run(frame, at, 0x70)
    knobs.runtime.launch_enter_hook.add(lambda metadata: print("hook", flush=True))
    a_launch().run(frame, at, 0x70)
given = [x.as_subclass(OnGPU) for x in frame.values()]
print("addresses", *[x.data_ptr() for x in given], flush=True)
launch(kernel, (3, 4, 5), (*given, None, *numbers), constants, options)
print("warnings", sum(w.category is UncoveredWarning for w in seen), flush=True)
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    if shutil.which("gcc") is None:
        pytest.skip("Triton's launchers need a C compiler")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    (folder / "launches.py").write_text(LAUNCHES)
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", "libcuda.so.1", "driver.c"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    libraries = os.pathsep.join(filter(None, [str(folder), os.environ.get("LD_LIBRARY_PATH")]))
    out = run_python(
        str(folder / "launches.py"), LD_LIBRARY_PATH=libraries, TRITON_LIBCUDA_PATH=str(folder),
        TRITON_CACHE_DIR=str(folder / "cache"), SIZES="8,8,4,8,4,4,8,8",
    )  # fmt: skip
    return out.splitlines()


def test_kernels_are_launched_with_what_they_take(written: list[str]) -> None:
    """By the launcher in C, by the one in Python and by Triton's own way under a profiler alike."""
    half = 0x3F000000
    values = f"4096 8192 5 {2**40} 16 {half} 0 0"
    line = f"grid 3 4 5 block 64 shared 0 stream 0x70 function 0x99 attribute 6 {values}"
    assert written[:7] == [line, line, "python", line, "python", "hook", line]
    _, *addresses = written[7].split()
    assert written[8:11] == ["python", "hook", line.replace("4096 8192", " ".join(addresses))]


def test_an_uncovered_gpu_is_named_once(written: list[str]) -> None:
    assert written[11] == "warnings 1"


# The interpreter ------------------------------------------------------------------------------------------------------

INTERPRETED = """
import torch, triton, triton.language as tl
from flexsp.testing.quick_interpreter import quicken_interpreter

@triton.jit
def kernel(x, y, n, a, N: tl.constexpr):
    i = tl.arange(0, N)
    live, mask, close = n > 3, i < 5, a < 1.0
    both = mask & live & close
    assert both.handle.data.dtype == bool, both.handle.data.dtype
    loaded = tl.load(x + i, mask=both, other=-1.0)
    tl.store(y + i, loaded, mask=(i < 7) | (n == 3))
    assert (live.to(tl.int32) + 1).handle.data == live.handle.data + 1

if FAST:
    quicken_interpreter()
for n, a in ((3, 0.5), (4, 0.5), (4, 1.5)):
    x, y = torch.rand(8), torch.zeros(8)
    kernel[(1,)](x, y, n, a, N=8)
    expected = torch.where((torch.arange(8) < 5) & (n > 3) & (a < 1), x, -1.0)
    expected[7 if n != 3 else 8 :] = 0
    assert y.equal(expected), (n, a, y)
"""


@pytest.mark.parametrize("fast", [True, False])
def test_scalars_join_masks_in_the_interpreter(tmp_path: Path, fast: bool) -> None:
    """Triton 3.9 refuses masks of integers, which such masks are in every release's interpreter."""
    script = tmp_path / "masks.py"
    script.write_text(INTERPRETED.replace("FAST", str(fast)))
    run_python(str(script), TRITON_INTERPRET="1")


TYPES = """
import torch, triton, triton.language as tl
from flexsp.testing.quick_interpreter import quicken_interpreter

@triton.jit
def inner(x, y):
    return x * y + 1

@triton.jit
def kernel(x, h, n, out, whole, N: tl.constexpr):
    i, j = tl.arange(0, N), tl.arange(0, 2 * N)
    a, b = tl.load(x + i), tl.load(h + j)
    tile = inner(a[:, None], b[None, :]) - (i[:, None] - j[None, :] - n) / 4
    tile += (i * a)[:, None] + b[None, :] * a[:, None]
    tile = tl.where(i[:, None] <= j[None, :], tile, 0.25)
    tile += tl.dot(tl.dot(tile, tl.trans(tile)), tile) * tl.sum(a, axis=0) + tl.max(b, axis=0)
    tile = tl.reshape(tile, [2, N, N]) + tl.full([1, N, 1], 2, tl.float32)
    tile = tl.reshape(tl.permute(tile, [0, 2, 1]), [N, 2 * N])
    assert tile.dtype == tl.float32 and tile.shape[1] == 2 * N and (a * a).shape[0] == N and a.type != b.type
    for k in range(n):
        tile += k * tl.cumsum(tile, axis=1)
    tl.store(out + i[:, None] * 2 * N + j[None, :], tile)
    at = i.to(tl.int64) * 2 + (i % 3 == 1)
    tl.store(whole + i, (at << 1 | i).to(tl.int64) // 3 + (n + 1) * tl.program_id(0))

@triton.jit
def masked(x, h, n, out, N: tl.constexpr):
    i, j = tl.arange(0, N), tl.arange(0, 2 * N)
    a = tl.load(x + i[:, None] + 0 * j[None, :], mask=(i < 9)[:, None], other=-1.0)
    b = tl.load(h + j, mask=j < n, other=1.5) + tl.load(h + j, mask=j < 5) + tl.load(h + j, mask=j > 7, other=0.1)
    c = tl.load(x + n, mask=n > 2, other=4) - tl.load(x + n, mask=n > 3, other=4) + tl.load(x)
    tl.store(out + i[:, None] * 2 * N + j[None, :], a, mask=(j < 20)[None, :])
    out += 2 * N * N
    tl.store(out + i[:, None] * 2 * N + j[None, :], a * b + c, mask=(i < 11)[:, None] & (j > n)[None, :])
    tl.store(out + i[:, None] * 2 * N + j[None, :], 2.5, mask=(i == 12)[:, None] & (j > n)[None, :])
    tl.store(out, c, mask=n < 3)
    tl.store(out + 1, n, mask=n < 4)

@triton.jit
def no_mask(x, N: tl.constexpr):
    tl.store(x + tl.arange(0, N), tl.load(x + tl.arange(0, N), other=1.0))

@triton.jit
def wide_mask(x, N: tl.constexpr):
    tl.store(x, 1.0, mask=tl.arange(0, N) < 3)

@triton.jit
def unlike(x, N: tl.constexpr):
    tl.store(x + tl.arange(0, N), tl.arange(0, N) + tl.arange(0, 2 * N))

@triton.jit
def no_power(x, N: tl.constexpr):
    tl.store(x + tl.arange(0, N), tl.zeros([N + 1], tl.float32))

x, h, found = torch.randn(16), torch.randn(32).half(), []
for fast in (False, True, True):
    if fast:
        quicken_interpreter()
    out, whole, told, parts = torch.empty(16, 32), torch.empty(16, dtype=torch.int64), [], torch.zeros(2, 16, 32)
    kernel[(2,)](x, h, 3, out, whole, N=16)
    masked[(1,)](x, h, 3, parts, N=16)
    for wrong in (unlike, no_power, no_mask, wide_mask):
        try:
            wrong[(1,)](x, N=16)
        except Exception as error:
            told.append(str(error))
    found.append((out, whole, told, parts.view(torch.int32)))
for out, whole, told, parts in found[1:]:
    assert out.isfinite().all() and out.equal(found[0][0]) and whole.equal(found[0][1])
    assert len(told) == 4 and told == found[0][2], (told, found[0][2])
    assert parts.equal(found[0][3]), (parts - found[0][3]).nonzero()
"""


def test_the_quick_interpreter_computes_and_refuses_the_same(tmp_path: Path) -> None:
    script = tmp_path / "alike.py"
    script.write_text(TYPES)
    run_python(str(script), TRITON_INTERPRET="1")


REWRITTEN = """
import traceback
import torch, triton, triton.language as tl
from flexsp.testing.quick_interpreter import quicken_interpreter

quicken_interpreter()

@triton.jit(
    do_not_specialize=["n"],
)
def kernel(out, n):
    k = 3
    for _ in range(n):
        k += 1
    tl.store(out, k.to(tl.int64) * 2)  # a number that was assigned is a tensor

@triton.jit
def wrong(out):
    k = 3

    tl.store(out, no_such_name + k)

out = torch.zeros(1, dtype=torch.int64)
kernel[(1,)](out, 2)
assert out.item() == 10, out
try:
    wrong[(1,)](out)
except Exception as error:
    told = [x for x in traceback.extract_tb(error.__cause__.__traceback__) if x.filename == __file__][-1]
    assert "no_such_name" in told.line, told
else:
    raise AssertionError("an unknown name passed")
"""


def test_the_quick_interpreter_rewrites_kernels_as_the_plain_one(tmp_path: Path) -> None:
    script = tmp_path / "rewritten.py"
    script.write_text(REWRITTEN)
    run_python(str(script), TRITON_INTERPRET="1")


ARITHMETIC = """
import warnings
import numpy as np, triton, triton.language as tl
from triton.language import core, semantic
from triton.runtime.interpreter import TensorHandle, interpreter_builder
from flexsp.testing.quick_interpreter import quicken_interpreter

quicken_interpreter()
warnings.simplefilter("ignore")
r, meaning = np.random.default_rng(SEED), semantic.TritonSemantic(interpreter_builder)
KINDS = [(tl.int1, "bool"), (tl.int32, "i4"), (tl.int64, "i8"), (tl.uint32, "u4"), (tl.float16, "f2"),
         (tl.bfloat16, "u2"), (tl.float32, "f4"), (tl.float64, "f8"), (tl.pointer_type(tl.float32), "u8"),
         (tl.pointer_type(tl.int64), "u8")]
OTHERS = "cast", "where", "broadcast_impl_value"
SHAPES = [(), (1,), (4,), (8,), (2, 1), (4, 4)]
NUMBERS = [0, 1, -3, 2**31 - 1, 2**31, -(2**31), 2**40, True, 0.0, -0.0, 0.3, -2.5, 1e300, float("inf"), float("nan")]

def operand(kind, numbers, shape):
    data = np.round(r.standard_normal(shape or (1,)) * 4, 1)
    data = (np.abs(data) if numbers[0] == "u" else data).astype(numbers)
    return core.tensor(TensorHandle(data, kind), core.block_type(kind, list(shape)) if shape else kind)

def outcome(call, *operands):
    try:
        x = call(meaning, *operands)
    except Exception as error:
        return type(error), str(error)
    return sum([told(y) for y in x], ()) if isinstance(x, tuple) else told(x)

def told(x):
    data = x.handle.data
    return str(x.type), str(x.dtype), str(x.handle.dtype), data.dtype, data.shape, data.tobytes()

def compare_all():
    tensors, quick = [operand(*kind, shape) for kind in KINDS for shape in SHAPES if shape != (2, 1)], 0
    tensors += [operand(tl.float32, "f4", (2, 1)), operand(tl.int32, "i4", (2, 1))]
    methods = [x for x in vars(semantic.TritonSemantic).items() if hasattr(x[1], "slow") and x[0] not in OTHERS]
    for name, method in methods:
        rest = (True,) if name in ("add", "sub", "mul") else ()
        for x in tensors:
            for y in [*tensors, *NUMBERS] if rest or name == "truediv" else tensors:
                for pair in ((x, y), (y, x)):
                    got, want = outcome(method, *pair, *rest), outcome(method.slow, *pair, *rest)
                    assert got == want, (name, *[getattr(z, "type", z) for z in pair], got, want)
                    quick += len(got) > 2
    assert quick > 5000, quick
    cast, where, broadcast = [getattr(semantic.TritonSemantic, name) for name in OTHERS]
    conditions = [operand(tl.int1, "bool", shape) for shape in ((), (4,), (4, 1), (4, 4))]
    conditions.append(operand(tl.int32, "i4", (4,)))
    for x in tensors:
        for y in [*tensors, *NUMBERS]:
            for pair in ((x, y), (y, x)):
                condition = conditions[quick % len(conditions)]
                got, want = outcome(where, condition, *pair), outcome(where.slow, condition, *pair)
                assert got == want, ("where", condition.type, *[getattr(z, "type", z) for z in pair], got, want)
                quick += 1
            if isinstance(y, core.tensor):
                got, want = outcome(broadcast, x, y), outcome(broadcast.slow, x, y)
                assert got == want, ("broadcast", x.type, y.type, got, want)
    for x in tensors:
        for to, _ in [*KINDS, (tl.block_type(tl.float64, [4]), "f8")]:
            got, want = outcome(cast, x, to), outcome(cast.slow, x, to)
            assert got == want, ("cast", x.type, to, got, want)

@triton.jit
def kernel(N: tl.constexpr):
    compare_all()

assert sum(hasattr(x, "slow") for x in vars(semantic.TritonSemantic).values()) == 16
kernel[(1,)](N=1)
for _ in range(2):
    try:
        TensorHandle(np.zeros(1, "f8"), tl.float32)
    except ValueError:
        continue
    raise AssertionError("wider numbers than the type has bits for")
"""


@pytest.mark.slow
def test_quick_arithmetic_is_arithmetic(tmp_path: Path, seed: int) -> None:
    """Of operands of all kinds: the same numbers, bit by bit, of the same types, or the same error."""
    script = tmp_path / "arithmetic.py"
    script.write_text(ARITHMETIC.replace("SEED", str(seed)))
    run_python(str(script), TRITON_INTERPRET="1")


HALF = """
import torch, triton, triton.language as tl
from flexsp.runtime import triton_private

@triton.jit
def kernel(a, b, c, out, product, sums, scale, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    x, y, wide = tl.load(a + at), tl.load(b + at), tl.load(c + at)
    tl.store(product + at, tl.dot(tl.trans(x), y) * 0.5)
    scaled = x * scale
    assert scaled.dtype == tl.float32
    tl.store(product + N * N + at, scaled)
    tl.store(sums + i, tl.sum(x, axis=1))
    tl.store(out + 0 * N * N + at, wide.to(tl.bfloat16))
    tl.store(out + 1 * N * N + at, x + y)
    tl.store(out + 2 * N * N + at, x * y)
    tl.store(out + 3 * N * N + at, -x)
    tl.store(out + 4 * N * N + at, tl.where(x < y, x, y))
    tl.store(out + 5 * N * N + at, tl.exp(x.to(tl.float32)).to(tl.bfloat16))
    tl.store(out + 6 * N * N + at, x.to(tl.int32).to(tl.bfloat16))

a, b = torch.randn(2, 16, 16).bfloat16()
c = torch.randn(16, 16)
c[0, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), 1 + 2.0**-8])  # the last is a tie
out, product = torch.empty(7, 16, 16, dtype=torch.bfloat16), torch.empty(2, 16, 16)
sums = torch.empty(16, dtype=torch.bfloat16)
kernel[(1,)](a, b, c, out, product, sums, 0.1, N=16)
torch.testing.assert_close(product, torch.stack([a.float().T @ b.float() / 2, a.float() * 0.1]), rtol=1e-6, atol=1e-6)
torch.testing.assert_close(sums, a.float().sum(1).bfloat16(), rtol=1e-2, atol=1e-2)
want = [c.bfloat16(), a + b, a * b, -a, torch.minimum(a, b), a.float().exp().bfloat16(), a.int().bfloat16()]
for found, exact in zip(out, want, strict=True):
    torch.testing.assert_close(found, exact, rtol=0, atol=0, equal_nan=True)
"""


def test_bfloat16_in_the_interpreter(tmp_path: Path) -> None:
    """As a GPU computes with it; Triton's own interpreter takes its bits for those of integers."""
    script = tmp_path / "half.py"
    script.write_text(HALF)
    run_python(str(script), TRITON_INTERPRET="1")


def test_a_constant_is_not_rounded_to_bfloat16_in_the_interpreter(tmp_path: Path) -> None:
    """A GPU would round it, by as much for all numbers that it meets: kernels multiply with it in float32."""
    script = tmp_path / "scalar.py"
    script.write_text(HALF.replace("x * y)", "x * 0.1)"))
    with pytest.raises(AssertionError, match=r"0\.1 would be rounded to bfloat16"):
        run_python(str(script), TRITON_INTERPRET="1")
