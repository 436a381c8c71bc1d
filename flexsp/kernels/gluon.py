"""What kernels in Gluon, Triton's lower level, share. They are for Hopper GPUs.

What a chunk reads is copied to shared memory while the chunk before is worked on, and products that do not wait for
each other run side by side. Triton has such copies only in pipelines of its own, which choose what waits for what.

Only for bfloat16 and rows of a multiple of 16 numbers, which are whole vectors of the copies. Sizes of tiles are powers
of two. Where rows are narrower, only their `width` columns are read and written, and the others are zero. Where a
function chooses layouts, programs have four warps, or WARPS.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

__all__ = [
    "arrived", "begin", "begun", "by_row", "by_sum", "chunk_at", "copy", "copy_numbers", "load_state", "narrower",
    "nothing", "numbers", "copy_tokens", "of_gates", "of_outputs", "operand", "power", "shared", "state_or", "store",
    "store_state", "store_tokens", "store_turned_tokens", "tiles", "visible",
]  # fmt: skip


@gluon.constexpr_function
def by_row(columns, warps=4):
    """Layout of a tile [R, columns] in memory, 16 bytes a thread."""
    across = min(32, columns // 8)
    return gl.BlockedLayout([1, 8], [32 // across, across], [warps, 1], [1, 0])


@gluon.constexpr_function
def by_column(rows):
    """Layout of a tile [rows, C] whose transpose lies in memory."""
    along = min(32, rows // 8)
    return gl.BlockedLayout([8, 1], [along, 32 // along], [1, 4], [0, 1])


@gluon.constexpr_function
def by_sum(columns):
    """Layout of products [64, columns]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def narrower(width, columns):
    """The width of rows that tiles with so many columns hold, None if they fill them."""
    return None if width >= columns else width


_WIDE_COLUMNS = gl.constexpr(gl.BlockedLayout([4, 1], [16, 2], [1, 4], [0, 1]))
_NUMBERS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def begin(PDL: gl.constexpr):
    """As `flexsp.runtime.launch.begin`."""
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def chunk_at(table, c, T, C: gl.constexpr, PACKED: gl.constexpr):
    """As `flexsp.kernels.primitives.chunk_info`."""
    if PACKED:
        start = gl.load(table + c * 5)
        length = gl.load(table + c * 5 + 1)
        document = gl.load(table + c * 5 + 2)
        first = gl.load(table + c * 5 + 3) != 0
        last = gl.load(table + c * 5 + 4) != 0
    else:
        start = c * C
        length = gl.minimum(T - start, C)
        document = 0
        first = False
        last = False
    return start.to(gl.int64), length, document, first, last


@gluon.jit
def nothing():
    """A tuple that others are added to."""
    return ()


# Shared memory


@gluon.jit
def tiles(COUNT: gl.constexpr, R: gl.constexpr, N: gl.constexpr):
    """Room for tiles [R, N] of bfloat16."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([R, N], gl.bfloat16)
    return gl.allocate_shared_memory(gl.bfloat16, [COUNT, R, N], layout)


@gluon.jit
def numbers(COUNT: gl.constexpr, N: gl.constexpr):
    """Room for N numbers in float32, COUNT times."""
    return gl.allocate_shared_memory(gl.float32, [COUNT, N], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def shared(x):
    """x as bfloat16 in shared memory."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(x.shape, gl.bfloat16)
    return gl.allocate_shared_memory(gl.bfloat16, x.shape, layout, x.to(gl.bfloat16))


@gluon.jit
def _offsets(R: gl.constexpr, N: gl.constexpr, stride, WARPS: gl.constexpr):
    rows = gl.arange(0, R, gl.SliceLayout(1, by_row(N, WARPS)))
    columns = gl.arange(0, N, gl.SliceLayout(0, by_row(N, WARPS)))
    return rows[:, None] * stride + columns[None, :]


@gluon.jit
def _inside(here, N: gl.constexpr, width, LAYOUT: gl.constexpr):
    """Which numbers of a tile [.., N] there are: of rows that are `here`, the first `width` if not None."""
    found = here[:, None]
    if width is not None:
        found = found & (gl.arange(0, N, gl.SliceLayout(0, LAYOUT)) < width)[None, :]
    return found


@gluon.jit
def copy(to, base, length, R: gl.constexpr, N: gl.constexpr, stride, WARPS: gl.constexpr = 4, width=None):
    """Rows 0..length-1 of a tile [R, N] of bfloat16 on their way to shared memory, zero below."""
    rows = gl.arange(0, R, gl.SliceLayout(1, by_row(N, WARPS)))
    at = base + _offsets(R, N, stride, WARPS)
    async_copy.async_copy_global_to_shared(to, at, _inside(rows < length, N, width, by_row(N, WARPS)))


@gluon.jit
def _places(start, length, R: gl.constexpr, STEPS: gl.constexpr, AT: gl.constexpr, LAYOUT: gl.constexpr):
    """As in `flexsp.kernels.delta.tokens`."""
    i = gl.arange(0, R, LAYOUT)
    key = (start % STEPS).to(gl.int32) + i
    return key // STEPS, (key % STEPS == AT) & (i < length)


@gluon.jit
def of_gates(start, length, C: gl.constexpr, STEPS: gl.constexpr, LAYOUT: gl.constexpr):
    """As `flexsp.kernels.delta.tokens.of_gates`."""
    return _places(start, length, C, STEPS, 0, LAYOUT)


@gluon.jit
def of_outputs(start, length, C: gl.constexpr, STEPS: gl.constexpr, LAYOUT: gl.constexpr):
    """For each key the token whose query and output belong to it, counted from that of the first; and if it has any."""
    return _places(start, length, C, STEPS, STEPS - 1, LAYOUT)


@gluon.jit
def copy_tokens(to, base, start, length, R: gl.constexpr, N: gl.constexpr, stride, STEPS: gl.constexpr, width=None):
    """A tile [R, N] of tokens' rows on its way to shared memory, zero at other keys than the last of a token."""
    if STEPS == 1:
        copy(to, base + start * stride, length, R, N, stride, width=width)
    else:
        token, there = of_outputs(start, length, R, STEPS, gl.SliceLayout(1, by_row(N)))
        at = token[:, None] * stride + gl.arange(0, N, gl.SliceLayout(0, by_row(N)))[None, :]
        at = base + start // STEPS * stride + at
        async_copy.async_copy_global_to_shared(to, at, _inside(there, N, width, by_row(N)))


@gluon.jit
def copy_numbers(to, base, N: gl.constexpr):
    """N numbers in float32 on their way to shared memory."""
    async_copy.async_copy_global_to_shared(to, base + gl.arange(0, N, _NUMBERS))


@gluon.jit
def arrived(groups: gl.constexpr):
    """Waits for all copies but those of the last `groups`; what was stored may then be read by products, too."""
    async_copy.wait_group(groups)
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def visible():
    """Lets products read what all threads stored to shared memory."""
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def power(x):
    """2^x, 0 where it is less than the least normal number."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


# Products


@gluon.jit
def begun(a, b, N: gl.constexpr):
    """a [64, n] times b [n, N], which goes on by itself."""
    zeros = gl.zeros([64, N], gl.float32, by_sum(N))
    return warpgroup_mma(a, b, zeros, use_acc=False, is_async=True)


@gluon.jit
def operand(x, N: gl.constexpr):
    """x [64, n] as the left operand of products with N columns, in registers."""
    return gl.convert_layout(x.to(gl.bfloat16), gl.DotOperandLayout(0, by_sum(N), 2))


# Memory


@gluon.jit
def store(base, x, length, R: gl.constexpr, N: gl.constexpr, stride, WARPS: gl.constexpr = 4, width=None):
    """Rows 0..length-1 of x [R, N] as bfloat16."""
    rows = gl.arange(0, R, gl.SliceLayout(1, by_row(N, WARPS)))
    x = gl.convert_layout(x.to(gl.bfloat16), by_row(N, WARPS))
    at = base + _offsets(R, N, stride, WARPS)
    gl.store(at, x, mask=_inside(rows < length, N, width, by_row(N, WARPS)))


@gluon.jit
def store_tokens(base, x, start, length, R: gl.constexpr, N: gl.constexpr, stride, STEPS: gl.constexpr, width=None):
    """Stores as bfloat16 the rows that `copy_tokens` would read."""
    token, there = of_outputs(start, length, R, STEPS, gl.SliceLayout(1, by_row(N)))
    at = token[:, None] * stride + gl.arange(0, N, gl.SliceLayout(0, by_row(N)))[None, :]
    at = base + start // STEPS * stride + at
    gl.store(at, gl.convert_layout(x.to(gl.bfloat16), by_row(N)), mask=_inside(there, N, width, by_row(N)))


@gluon.jit
def store_turned_tokens(base, x, start, length, R: gl.constexpr, N: gl.constexpr, stride, STEPS: gl.constexpr):
    """Columns of x [R, N] as `store_tokens` stores rows."""
    token, there = of_outputs(start, length, N, STEPS, gl.SliceLayout(0, by_column(R)))
    at = token[None, :] * stride + gl.arange(0, R, gl.SliceLayout(1, by_column(R)))[:, None]
    x = gl.convert_layout(x.to(gl.bfloat16), by_column(R))
    gl.store(base + start // STEPS * stride + at, x, mask=there[None, :])


@gluon.jit
def _turned(R: gl.constexpr, N: gl.constexpr, stride):
    rows = gl.arange(0, R, gl.SliceLayout(1, _WIDE_COLUMNS))
    columns = gl.arange(0, N, gl.SliceLayout(0, _WIDE_COLUMNS))
    return columns[None, :] * stride + rows[:, None]


@gluon.jit
def load_state(base, R: gl.constexpr, N: gl.constexpr, stride, width=None):
    """S^T [R, N] of a state [N, R] in float32 whose rows are `stride` apart."""
    if width is None:
        found = gl.load(base + _turned(R, N, stride))
    else:
        rows = gl.arange(0, R, gl.SliceLayout(1, _WIDE_COLUMNS))
        inside = _inside(rows < R, N, width, _WIDE_COLUMNS)
        found = gl.load(base + _turned(R, N, stride), mask=inside, other=0.0)
    return gl.convert_layout(found, by_sum(N))


@gluon.jit
def state_or(x, base, here, stride, width=None):
    """What `load_state` reads if `here`, and x [64, N] of products otherwise. Without a branch, behind which a large x
    would be moved to other registers, of which there are too few."""
    L: gl.constexpr = by_sum(x.shape[1])
    rows = gl.arange(0, 64, gl.SliceLayout(1, L))
    at = base + gl.arange(0, x.shape[1], gl.SliceLayout(0, L))[None, :] * stride + rows[:, None]
    inside = _inside(rows < gl.where(here, 64, 0), x.shape[1], width, L)
    return gl.load(at, mask=inside, other=x)


@gluon.jit
def store_state(base, x, R: gl.constexpr, N: gl.constexpr, stride, width=None, length=None):
    """Stores what `load_state` would read, of the first `length` rows of x if not None."""
    at = base + _turned(R, N, stride)
    x = gl.convert_layout(x, _WIDE_COLUMNS)
    if width is None and length is None:
        gl.store(at, x)
    else:
        rows = gl.arange(0, R, gl.SliceLayout(1, _WIDE_COLUMNS))
        gl.store(at, x, mask=_inside(rows < (R if length is None else length), N, width, _WIDE_COLUMNS))
