"""Checks of a call's initial states and document boundaries, and what tells calls apart."""

from __future__ import annotations

import functools as ft
import os
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from flexsp.comm.derivatives import transformed
from flexsp.comm.group import SequenceParallel, sp_over
from flexsp.compiler.frontend.meta import STATE
from flexsp.compiler.planning.lowering import Looks
from flexsp.exceptions import check_dense, fail

__all__ = ["aligned", "boundaries", "check_boundaries", "check_initial", "looks", "ranks_of", "signature_of", "widest"]


def check_initial(
    prev_s: torch.Tensor | None, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, packed: bool,
    sp: SequenceParallel | None,
) -> None:  # fmt: skip
    if prev_s is None:
        return
    check_dense(STATE, prev_s, f"a tensor {shape} or None")
    if tuple(prev_s.shape) != shape or prev_s.device != device or prev_s.dtype != dtype:
        got = f"{tuple(prev_s.shape)} of {prev_s.dtype} on {prev_s.device}"
        raise ValueError(f"{STATE}: expected {shape} of {dtype} on {device}, got {got}")
    if sp is not None and not packed and not sp.is_first:
        raise ValueError(f"{STATE}: expected on the first rank only, got one on rank {sp.rank}")


def check_boundaries(cu_seqlens: torch.Tensor, B: int, device: torch.device) -> None:
    integers = (torch.int32, torch.int64)
    check_dense("cu_seqlens", cu_seqlens, "a tensor [N + 1] of int32 or int64")
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in integers:
        got = f"{cu_seqlens.dtype} {list(cu_seqlens.shape)}"
        fail("cu_seqlens", "a tensor [N + 1] of int32 or int64", got)
    if cu_seqlens.device != device:
        raise ValueError(f"cu_seqlens: expected a tensor on {device}, got one on {cu_seqlens.device}")
    if B != 1:
        raise ValueError(f"cu_seqlens: expected batch size 1, got {B}")
    if cu_seqlens.numel() < 2:
        raise ValueError(f"cu_seqlens: expected boundaries of one document or more, got {cu_seqlens.tolist()}")


def boundaries(cu_seqlens: torch.Tensor, total: int, look: bool) -> list[int]:
    """The boundaries, which must end at `total`; not looked at on CUDA unless `look` or FLEXSP_CHECK=1."""
    if not look and cu_seqlens.is_cuda and os.environ.get("FLEXSP_CHECK") != "1":
        return []
    bounds = [int(n) for n in cu_seqlens.tolist()]
    if bounds[0] != 0 or bounds[-1] != total or sorted(bounds) != bounds:
        raise ValueError(f"cu_seqlens: expected non-decreasing boundaries from 0 to {total}, got {bounds}")
    return bounds


def signature_of(
    inputs: dict[str, Any], prev_s: Any, cu_seqlens: Any, sp: SequenceParallel | None
) -> tuple[Any, ...]:
    """What decides how a call runs; what is no tensor is told apart by its type, to be refused."""
    facts: list[Any] = [*inputs]
    for x in (*inputs.values(), prev_s, cu_seqlens):
        if isinstance(x, torch.Tensor) and x.layout == torch.strided and not x.is_nested:
            facts.append((x.shape, x.stride(), x.dtype, x.device, aligned(x)))
        else:
            facts.append(type(x))
    facts += [None if sp is None else sp.id, transformed()]
    if not getattr(next(iter(inputs.values()), None), "is_cuda", False):
        facts.append(os.environ.get("FLEXSP_BACKEND"))
    return tuple(facts)


def aligned(x: torch.Tensor) -> bool | None:
    """Whether vectors of 16 bytes can be loaded; None for what torch.func transforms, which has no address."""
    if isinstance(x, FakeTensor):
        return True
    try:
        return x.data_ptr() % 16 == 0
    except RuntimeError:
        return None


def ranks_of(sp_group: Any) -> SequenceParallel | None:
    """The ranks that a variant's `sp_group` names."""
    if sp_group is None or isinstance(sp_group, SequenceParallel):
        return sp_group
    if not isinstance(sp_group, torch.distributed.ProcessGroup):
        raise ValueError(
            "sp_group: expected a ProcessGroup or what flexsp.init_sequence_parallel(group) returns, got "
            f"{type(sp_group).__name__}"
        )
    found = sp_over(sp_group)
    if found is None:
        ranks = torch.distributed.get_process_group_ranks(sp_group)
        raise ValueError(f"sp_group: call flexsp.init_sequence_parallel(group) first; none is open over ranks {ranks}")
    return found


def looks(tokens: dict[str, torch.Tensor], params: dict[str, torch.Tensor]) -> dict[str, Looks]:
    """Of inputs [B, T, H, ...] and [H, ...]."""
    of_tokens = {name: (x.dtype, tuple(x.shape[1:])) for name, x in tokens.items()}
    return of_tokens | {name: (x.dtype, tuple(x.shape)) for name, x in params.items()}


def widest(*tensors: torch.Tensor) -> torch.dtype:
    """The dtype of states: float64 if an input is, else float32."""
    return ft.reduce(torch.promote_types, (x.dtype for x in tensors), torch.float32)
