"""Decoding with a program: a few tokens of many sequences, whose states are read and written once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from flexsp.comm.derivatives import transformed
from flexsp.comm.tracing import outside_graphs
from flexsp.compiler import arguments
from flexsp.compiler.frontend import functions
from flexsp.compiler.frontend.meta import STATE
from flexsp.compiler.graphs.values import NotEmittable
from flexsp.exceptions import NotAvailable, asks_for_kernels, check_dense, fail
from flexsp.kernels.gates import clamped
from flexsp.kernels.operators import in_memory

if TYPE_CHECKING:
    from flexsp.compiler.backend.generated_kernels import Generated

__all__ = ["MOST_TOKENS", "decode", "launched"]

MOST_TOKENS = 16
Tensors = dict[str, torch.Tensor]
_STATES = (torch.float32, torch.bfloat16)
# Numbers of the state that a warp has, and columns of a block at least. A block of one warp waits for no other where it
# sums rows up: on an H200 it is 1.1 to 2.1 times as fast as eight warps of 512 numbers each.
_TILE, _NARROW = 2048, 16
_HELD = 128 * 256  # numbers of the state that a block holds at most
_SEQUENCES = 65535  # blocks in the second axis of a launch
_BLOCKS = 512  # four for each multiprocessor of the largest GPUs


@outside_graphs("step: it changes its states in place, which is no part of a graph of torch.compile")
def decode(made: Any, prev_s: torch.Tensor, inputs: Tensors) -> torch.Tensor:
    """Outputs of ``made.step``, a `LinearAttention`'s, which documents the arguments."""
    meta, name = made.program.meta, made.program.merge.name
    if made.program.disagrees is not None:
        raise NotAvailable(f"{name}: no step where chunks are part of the model: {made.program.disagrees}")
    if made.heads_per_key or made.rows_per_token:
        raise NotAvailable(f"{name}: no step where heads or rows share inputs, which only engines read")
    inputs, _ = arguments.asked(meta, inputs, None, None)
    tokens, params, batched = made._sorted(inputs)
    first, wide = next(iter(tokens.values())), arguments.widest(*tokens.values(), *params.values())
    names, (B, T, H) = made._known(tokens, params), first.shape[:3]
    if made.rows * MOST_TOKENS < T:
        fail(next(iter(tokens)), f"at most {MOST_TOKENS} tokens a step", T // made.rows)
    states = (B, H, *(made._size(s, names, prev_s) for s in meta.state_sizes))
    _check_state(prev_s, states, first.device, wide)
    for name_of, x in inputs.items():
        if _overlap(prev_s, x):
            fail(name_of, f"memory of its own, since {STATE} is changed in place", f"memory of {STATE}")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (prev_s, *inputs.values())):
        raise NotAvailable(f"{name}: step has no gradients; call it under torch.no_grad(), or the program itself")
    with torch.no_grad():
        by_kernel = asks_for_kernels(first.is_cuda, wide)
        o = _by_kernel(made, tokens, params, names, prev_s) if by_kernel else None
        o = _in_pytorch(made, tokens, params, prev_s, wide) if o is None else o
    return arguments.answered(meta, None, o if batched else o[0], None)[0]


def _check_state(prev_s: torch.Tensor, shape: tuple[int, ...], device: torch.device, wide: torch.dtype) -> None:
    dtypes = (wide,) if wide == torch.float64 else _STATES
    of = " or ".join(str(x).removeprefix("torch.") for x in dtypes)
    check_dense(STATE, prev_s, f"a tensor {shape}")
    if tuple(prev_s.shape) != shape or prev_s.dtype not in dtypes or prev_s.device != device:
        fail(STATE, f"{shape} of {of} on {device}", f"{tuple(prev_s.shape)} of {prev_s.dtype} on {prev_s.device}")
    if not prev_s.is_contiguous():
        fail(STATE, "contiguous states, which are changed in place", f"strides {prev_s.stride()}")


def _overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors may share numbers, by the ranges of memory that they lie in."""
    if not in_memory(x, y) or x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr():
        return False
    (begin, end), (first, last) = (_range(z) for z in (x, y))
    return begin < last and first < end


def _range(x: torch.Tensor) -> tuple[int, int]:
    length = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1 if x.numel() else 0
    return x.data_ptr(), x.data_ptr() + length * x.element_size()


def _in_pytorch(
    made: Any, tokens: Tensors, params: Tensors, prev_s: torch.Tensor, wide: torch.dtype
) -> torch.Tensor:  # fmt: skip
    """The three functions on chunks of one token."""
    first, program = next(iter(tokens.values())), made.program
    tokens, params = ({name: x.to(wide) for name, x in each.items()} for each in (tokens, params))
    tokens |= {name: clamped(tokens[name]) for name in program.meta.clamped}
    with arguments.no_autocast(first.device.type):
        o, final = functions.run(
            program, tokens, params, prev_s.to(wide), tuple(prev_s.shape[2:]), None, 1, None, made.rows, "step"
        )
    assert final is not None
    prev_s.copy_(final)
    return o.to(first.dtype)


def _by_kernel(
    made: Any, tokens: Tensors, params: Tensors, names: dict[str, int], prev_s: torch.Tensor
) -> torch.Tensor | None:
    """None where the functions have to run in PyTorch, since no kernel can run the call."""
    from flexsp.runtime.launch import old_assembler

    code = made._derived()
    reason = code if isinstance(code, str) else old_assembler(prev_s.is_cuda)
    if transformed() or not in_memory(prev_s, *tokens.values(), *params.values()):
        reason = "a step changes memory in place, and tensors of other kinds have none"
    if reason is None and not isinstance(code, str):
        try:
            return launched(code, tokens, params, names, prev_s)
        except NotEmittable as error:
            reason = str(error)
    made._refused(str(reason))
    return None


def launched(
    code: Generated, tokens: Tensors, params: Tensors, names: dict[str, int], prev_s: torch.Tensor
) -> torch.Tensor:  # fmt: skip
    """Launches the kernel on checked tensors; ``names`` are sizes by name.

    Raises:
        NotEmittable: there is no kernel, or a block would hold too many numbers.
    """
    from flexsp.compiler.backend.generated_kernels import padded
    from flexsp.kernels.primitives import dots
    from flexsp.kernels.run import run

    kernel, function = code.decode
    layout, first = code.layout, next(iter(tokens.values()))
    B, T, H = first.shape[:3]
    sizes = {} if layout.parts else dict(zip(layout.state, prev_s.shape[2:], strict=True))
    sizes = {name: n for name, n in (sizes | names).items() if name in layout.sizes}
    rows, cols = padded(sizes[layout.rows]) if layout.rows in sizes else 1, sizes[layout.cols]
    tiles = sum(len(x.sizes) == 2 for x in layout.places()) or 1
    # A block that stores what is not of its own columns must not meet another one that still reads it.
    whole = layout.cols in kernel.contracted or not all(x.of_columns for x in layout.places())
    width = padded(cols)
    while not whole and width > _NARROW and (tiles * rows * width > _TILE or B * H * -(-cols // width) < _BLOCKS):
        width //= 2
    if B * H > _SEQUENCES:
        raise NotEmittable(f"a launch has up to {_SEQUENCES} heads of sequences, and these are {B * H}")
    if tiles * rows * width > _HELD:
        raise NotEmittable(
            f"{kernel.name}: a block would hold {tiles * rows} x {width} numbers of the state, and kernels hold up to "
            f"{_HELD}, so make {layout.rows} or {layout.cols} smaller"
        )
    constants: dict[str, object] = {}
    for name in layout.sizes:
        constants |= {name: sizes[name], f"B{name}": width if name == layout.cols else padded(sizes[name])}
    constants |= {"C": 1, "ENTERS": True, "PACKED": False, **dots(torch.float32)}
    given = {x: _rows(tokens[x]) for x in kernel.tokens}
    o = first.new_empty(B, T, H, cols)
    pointers = {f"{x}_ptr": y for x, y in given.items()} | {f"{x}_ptr": params[x].contiguous() for x in kernel.params}
    pointers |= {"o_ptr": o, "entering": prev_s, "left": prev_s}
    numbers = [n for x in given.values() for n in x.stride()[:3]]
    warps = min(16, max(1, tiles * rows * width // _TILE))
    run(function, (-(-cols // width), B * H, 1), pointers, [*numbers, T, H], constants, warps)
    return o


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Tokens whose rows kernels can read."""
    return x if x.dim() == 3 or x.stride(-1) == 1 else x.contiguous()
