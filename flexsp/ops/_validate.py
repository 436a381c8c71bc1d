"""Checks of the ops' arguments; every failure is a ValueError "name: expected ..., got ...".

Shapes, dtypes and devices are always checked. Values (gates <= 0, document boundaries) are checked on CPU tensors, and
on CUDA tensors only with FLEXSP_CHECK=1, because reading them synchronises. While torch.compile traces, values are
never checked.
"""

from __future__ import annotations

import functools
import logging
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from flexsp.comm.derivatives import transformed
from flexsp.comm.group import SequenceParallel, resolve_sp
from flexsp.exceptions import (
    asks_for_kernels,
    check_dense,
    check_flag,
    check_integer,
    check_number,
    checks_wanted,
    fail,
)
from flexsp.log import tell

__all__ = [
    "accumulation_dtype", "check_cu_seqlens", "check_decay_inputs", "check_first", "check_flag", "check_gate",
    "check_groups", "check_head_sizes", "check_integer", "check_non_negative", "check_non_positive", "check_qkv",
    "check_scale", "check_state", "check_tensor", "fail", "number_of_states", "once", "resolve", "same_call",
]  # fmt: skip

_R = TypeVar("_R")
_KEPT = 256  # answers of each check
_NEW = object()
_TENSORS = {torch.Tensor, torch.nn.Parameter}
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_HEAD_DIM = 256
MAX_VALUE_DIM = 512


def once(check: Callable[..., _R]) -> Callable[..., _R]:
    """Decorator of a check that reads only shapes, dtypes and devices of tensors. It remembers which arguments passed,
    and skips the check for equal ones.

    It remembers plain tensors only: in graphs of torch.compile sizes may be symbols, and a subclass of Tensor may have
    more that counts.
    """
    kept: dict[Any, _R] = {}

    @functools.wraps(check)
    def run(*args: Any) -> _R:
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return check(*args)
        key: Any = []
        for x in args:
            if type(x) in _TENSORS and x.layout is torch.strided and not x.is_nested:
                key += (x.shape, x.dtype, x.device)
            elif isinstance(x, torch.Tensor):
                return check(*args)
            else:
                key += (type(x), x)  # True is not 1
        key = (*key,)
        try:
            found: Any = kept.get(key, _NEW)
        except TypeError:  # cannot be hashed
            return check(*args)
        if found is _NEW:
            found = check(*args)
            if len(kept) >= _KEPT:
                kept.clear()
            kept[key] = found
        return found  # type: ignore[no-any-return]

    run.kept = kept  # type: ignore[attr-defined]
    return run


def accumulation_dtype(x: torch.Tensor) -> torch.dtype:
    """Dtype of states: float64 for float64 inputs, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def readable(x: torch.Tensor) -> bool:
    """Whether the values of ``x`` can be read here, and may be."""
    if torch.compiler.is_compiling():
        return False
    if x.is_meta or not (x.is_cpu or checks_wanted()):
        return False
    if type(x) not in _TENSORS or transformed():
        return False
    return get_proxy_mode() is None  # while make_fx traces there are no values


def resolve(sp: SequenceParallel | bool | None, x: torch.Tensor) -> SequenceParallel | None:
    """The ranks this call runs on: ``sp`` itself, the ambient ones for None, none for False."""
    found = resolve_sp(sp)
    if found is not None and found.device.type != x.device.type:
        fail("sp", f"a group on the inputs' device ({x.device.type})", f"one on {found.device}")
    if not asks_for_kernels(x.is_cuda, x.dtype):
        why = "kernels have no float64" if x.dtype == torch.float64 else "the tensors are on CPU"
        tell(logging.INFO, f"fallback: ops run in PyTorch: {why}")
    return found


def same_call(sp: SequenceParallel | None, op: str, x: torch.Tensor, *signature: object) -> None:
    """Under FLEXSP_CHECK=1: raise unless all ranks make this call, with shapes equal up to the shard length."""
    if sp is not None and not torch.compiler.is_compiling():
        sp.check_signature((op, x.dtype, f"B={x.shape[0]}", *signature))


def check_tensor(
    name: str, x: object, shape: tuple[int, ...] | None, dims: str, *, dtypes: tuple[torch.dtype, ...] | None = None,
    device: torch.device | None = None,
) -> None:  # fmt: skip
    """``shape`` None checks only the number of dimensions that ``dims`` ("[B, T, H, K]") names."""
    check_dense(name, x, f"a tensor {dims}")
    assert isinstance(x, torch.Tensor)
    if shape is None:
        if x.dim() != dims.count(",") + 1:
            fail(name, f"a {dims.count(',') + 1}-D tensor {dims}", f"shape {list(x.shape)}")
    elif tuple(x.shape) != shape:
        fail(name, f"shape {dims} = {list(shape)}", list(x.shape))
    if dtypes is not None and x.dtype not in dtypes:
        fail(name, "dtype " + " or ".join(str(d).removeprefix("torch.") for d in dict.fromkeys(dtypes)), x.dtype)
    if device is not None and x.device != device:
        fail(name, f"device {device}", x.device)


def check_first(name: str, x: torch.Tensor, dims: str) -> torch.Size:
    """Checks an op's first tensor, which gives the call its dtype and device; returns its sizes.

    ``dims`` are "[B, T, H, K]" or "[B, T, D]". T may be 0.
    """
    check_tensor(name, x, None, dims, dtypes=FLOAT_DTYPES)
    if x.shape[0] < 1 or x.shape[2] < 1:
        fail(name, f"at least one batch row and one {'head' if x.dim() == 4 else 'channel'}", list(x.shape))
    return x.shape


def check_head_sizes(values: Mapping[str, int], **sizes: int) -> None:
    """The last dimensions of tensors, by the tensors' names; those of values may be larger."""
    for name, size in {**sizes, **values}.items():
        most = MAX_VALUE_DIM if name in values else MAX_HEAD_DIM
        if not 1 <= size <= most:
            fail(name, f"a last dimension of 1..{most}", size)


def check_groups(name: str, G: int, n: int, what: str) -> None:
    """G groups share the n heads or channels evenly."""
    if G < 1 or n % G:
        fail(name, f"a number of groups G that divides the {n} {what}", G)


@once
def check_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, names: str = "qkv") -> tuple[int, int, int, int, int]:
    """Shapes, dtype and device of q, k [B, T, H, K] and v [B, T, H, V]; returns (B, T, H, K, V)."""
    name_q, name_k, name_v = tuple(names)
    B, T, H, K = check_first(name_q, q, "[B, T, H, K]")
    check_tensor(name_k, k, (B, T, H, K), "[B, T, H, K]", dtypes=(q.dtype,), device=q.device)
    check_tensor(name_v, v, None, "[B, T, H, V]", dtypes=(q.dtype,), device=q.device)
    V = v.shape[-1]
    if tuple(v.shape[:3]) != (B, T, H):
        fail(name_v, f"shape [B, T, H, V] = [{B}, {T}, {H}, V]", list(v.shape))
    check_head_sizes({name_v: V}, **{name_q: K})
    return B, T, H, K, V


def check_scale(scale: float | None, K: int) -> float:
    return K**-0.5 if scale is None else check_number("scale", scale)


def check_gate(name: str, g: torch.Tensor, shape: tuple[int, ...], dims: str, like: torch.Tensor) -> None:
    """A natural-log gate: in the inputs' dtype or float32, and <= 0."""
    check_tensor(name, g, shape, dims, dtypes=(like.dtype, torch.float32), device=like.device)
    check_non_positive(name, g, "natural-log gates <= 0")


def check_limits(name: str, limits: Any) -> tuple[float, float]:
    """(least, most) >= 0 of a pair of numbers; most may be infinite."""
    if not isinstance(limits, (tuple, list)) or len(limits) != 2:
        fail(name, "a pair of numbers", repr(limits))
    low, high = limits
    least = check_number(f"{name}[0]", low)
    most = math.inf if isinstance(high, float) and high == math.inf else check_number(f"{name}[1]", high)
    if not 0 <= least <= most:
        fail(name, "a pair of numbers >= 0, the smaller one first", repr(limits))
    return float(least), float(most)


def check_non_positive(name: str, x: torch.Tensor, meaning: str) -> None:
    if readable(x) and x.numel() and bool((x > 0).any()):
        fail(name, meaning, f"a largest value of {x.detach().max().item():g}")


def check_non_negative(name: str, x: torch.Tensor, meaning: str) -> None:
    if readable(x) and x.numel() and bool((x < 0).any()):
        fail(name, meaning, f"a smallest value of {x.detach().min().item():g}")


def check_cu_seqlens(
    cu_seqlens: torch.Tensor | None, cu_seqlens_cpu: torch.Tensor | None, x: torch.Tensor, name: str,
    sp: SequenceParallel | None,
) -> None:  # fmt: skip
    """Checks that ``x`` [B, T, ...] has as many tokens as `set_lengths` says, and the global document boundaries [N+1],
    which need B = 1. Tokens behind the last boundary belong to no document."""
    if sp is not None:
        sp.check_shard(x.shape[1])
    if cu_seqlens is None:
        if cu_seqlens_cpu is not None:
            got = getattr(cu_seqlens_cpu, "shape", None)
            fail("cu_seqlens_cpu", "None without cu_seqlens", "a list" if got is None else f"shape {list(got)}")
        return
    integers = (torch.int32, torch.int64)
    check_tensor("cu_seqlens", cu_seqlens, None, "[N + 1]", dtypes=integers, device=x.device)
    if cu_seqlens.numel() < 2:
        fail("cu_seqlens", "at least two entries (one document)", cu_seqlens.numel())
    if x.shape[0] != 1:
        fail(name, "batch size 1 with cu_seqlens (pack the documents along T)", x.shape[0])
    values = cu_seqlens
    if cu_seqlens_cpu is not None:
        shape, cpu = tuple(cu_seqlens.shape), torch.device("cpu")
        check_tensor("cu_seqlens_cpu", cu_seqlens_cpu, shape, "[N + 1]", dtypes=integers, device=cpu)
        values = cu_seqlens_cpu
    if readable(values):
        total = x.shape[1] if sp is None else sp.shard_range(x.shape[1])[2]
        bounds = values.tolist()
        _check_boundaries("cu_seqlens" if values is cu_seqlens else "cu_seqlens_cpu", bounds, total)
        if values is not cu_seqlens and readable(cu_seqlens) and cu_seqlens.tolist() != bounds:
            fail("cu_seqlens_cpu", f"the values of cu_seqlens, {cu_seqlens.tolist()}", bounds)
        if sp is not None and sp.check_calls:
            sp.check_signature((f"cu_seqlens of {len(bounds)}", f"hash {zlib.crc32(repr(bounds).encode()):08x}"))


def _check_boundaries(name: str, bounds: list[int], total: int) -> None:
    if bounds[0] != 0:
        fail(name, "a first entry of 0", bounds[0])
    for n, (a, b) in enumerate(zip(bounds, bounds[1:], strict=False)):
        if b < a:
            fail(name, "non-decreasing entries", f"{a} then {b} at position {n + 1}")
    if bounds[-1] > total:
        fail(name, f"a last entry of at most {total} (the total number of tokens)", bounds[-1])


def number_of_states(B: int, cu_seqlens: torch.Tensor | None) -> int:
    return B if cu_seqlens is None else cu_seqlens.numel() - 1


def check_state(
    name: str, state: torch.Tensor | None, shape: tuple[int, ...], dims: str, x: torch.Tensor,
    cu_seqlens: torch.Tensor | None, sp: SequenceParallel | None,
) -> None:  # fmt: skip
    if state is None:
        return
    check_tensor(name, state, shape, dims, dtypes=(accumulation_dtype(x),), device=x.device)
    if sp is not None and cu_seqlens is None and sp.rank != 0:
        fail(name, "None on every rank but the first of the sequence-parallel group", f"a tensor on rank {sp.rank}")


def check_decay_inputs(q: torch.Tensor, g: torch.Tensor | None, g_gamma: torch.Tensor | None) -> None:
    B, T, H, _ = q.shape
    if g is not None and g_gamma is not None:
        fail("g_gamma", "None when g is given", f"both (g_gamma of shape {list(g_gamma.shape)})")
    if g is not None:
        check_gate("g", g, (B, T, H), "[B, T, H]", q)
    if g_gamma is not None:
        check_gate("g_gamma", g_gamma, (H,), "[H]", q)
