"""Brings the arguments of a call into the program's layout, checks them, and computes the key of calls alike."""

from __future__ import annotations

import functools as ft
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from flexsp.comm.derivatives import share_backward, transformed
from flexsp.comm.group import SequenceParallel, sp_over
from flexsp.compiler.frontend.meta import STATE, ConstExpr, InputMeta
from flexsp.compiler.planning.lowering import TensorSpec
from flexsp.exceptions import check_dense, checks_wanted, fail
from flexsp.scan.tokens import previous

__all__ = [
    "alike", "aligned", "answered", "asked", "boundaries", "check_boundaries", "check_edges", "check_initial", "looks",
    "no_autocast", "ranks_of", "shard_of", "signature_of", "tokens_and_params", "widest",
]  # fmt: skip

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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


def shard_of(
    T: int, rows: int, cu_seqlens: torch.Tensor | None, sp: SequenceParallel | None
) -> tuple[int, int, int]:  # fmt: skip
    """(first row, end, rows of all ranks) of this rank's T rows, in the whole sequence if there are documents; else
    (0, T, T)."""
    if sp is not None and cu_seqlens is not None:
        return sp.shard_range(T, rows)
    if sp is not None:
        sp.check_shard(T, rows)
    return 0, T, T


def boundaries(cu_seqlens: torch.Tensor, total: int, look: bool, rows: int = 1) -> list[int]:
    """The boundaries as numbers, checked: non-decreasing from 0, none above `total`. They count `rows` of a token.

    On CUDA they are read only if `look` or under FLEXSP_CHECK=1, since that synchronises; else the list is empty.
    """
    if not look and cu_seqlens.is_cuda and not checks_wanted():
        return []
    bounds = [int(n) for n in cu_seqlens.tolist()]
    if bounds[0] != 0 or bounds[-1] > total or sorted(bounds) != bounds:
        got = [n // rows for n in bounds]
        raise ValueError(f"cu_seqlens: expected non-decreasing boundaries from 0 to {total // rows}, got {got}")
    return bounds


def check_edges(
    sp: SequenceParallel | None, T: int, bounds: list[int] | None, chunk: int, rows: int
) -> None:
    """ValueError unless every shard starts on an edge of a chunk of its document.

    Every rank checks all shards, so that all ranks raise. T, ``bounds`` and ``chunk`` count ``rows`` for a token.
    ``bounds`` are boundaries of documents: None if there is one document, empty if they were not read.
    """
    if sp is None or sp.world_size == 1:
        return
    if bounds is not None and not bounds:
        fail("cu_seqlens", "None over several ranks on a GPU, or FLEXSP_CHECK=1, where chunks are part of the model",
             "boundaries that are not looked at")  # fmt: skip
    start = 0
    for rank, length in enumerate(sp.lengths_for(T, rows)):
        if bounds and start >= bounds[-1]:
            break  # no documents follow the last boundary
        into = start - max(n for n in bounds or [0] if n <= start)
        if length and into % chunk:
            fail("sp", f"shards that start on edges of chunks of {chunk} tokens, which are part of the model",
                 f"rank {rank} from token {into // rows} of the sequence or document")  # fmt: skip
        start += length


def signature_of(
    inputs: dict[str, Any], prev_s: Any, cu_seqlens: Any, sp: SequenceParallel | None
) -> tuple[Any, ...]:
    """The key of a call: calls with equal keys run the same executable. Arguments that are no tensors, which the call
    refuses later, count by their type."""
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
    """Whether kernels can load vectors of 16 bytes; None for tensors under torch.func, which have no address."""
    if isinstance(x, FakeTensor):
        return True
    try:
        return x.data_ptr() % 16 == 0
    except RuntimeError:
        return None


def ranks_of(sp_group: Any) -> SequenceParallel | None:
    """The ranks of a variant's `sp_group` argument."""
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


def looks(tokens: dict[str, torch.Tensor], params: dict[str, torch.Tensor]) -> dict[str, TensorSpec]:
    """TensorSpecs of inputs [B, T, H, ...] and [H, ...]."""
    of_tokens = {name: (x.dtype, tuple(x.shape[1:])) for name, x in tokens.items()}
    return of_tokens | {name: (x.dtype, tuple(x.shape)) for name, x in params.items()}


def widest(*tensors: torch.Tensor) -> torch.dtype:
    """The dtype of states: float64 if an input is, else float32."""
    return ft.reduce(torch.promote_types, (x.dtype for x in tensors), torch.float32)


def asked(
    meta: InputMeta, inputs: dict[str, torch.Tensor], cu_seqlens: torch.Tensor | None, sp: SequenceParallel | None
) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:  # fmt: skip
    """Inputs and boundaries of a call as the program takes them: [T, H, ...] or [B, T, H, ...], with the rows of a
    token as tokens. Collective over ``sp`` if the program has shifted inputs (`SymbTensor.before`)."""
    inputs = _with_earlier(meta, _tokens_first(meta, inputs), cu_seqlens, sp)
    if cu_seqlens is None or meta.rows is None:
        return _rows_of_tokens(meta, inputs), cu_seqlens
    check_dense("cu_seqlens", cu_seqlens, "a tensor [N + 1] of int32 or int64")
    check_boundaries(cu_seqlens, 1, cu_seqlens.device)
    return _rows_of_tokens(meta, inputs), cu_seqlens * meta.rows


def tokens_and_params(
    meta: InputMeta, inputs: dict[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], bool]:
    """Tokens [B, T, H, ...] and parameters [H, ...], checked, and whether the tokens came with B."""
    expected = {*meta.tokens, *meta.params}
    if inputs.keys() != expected:
        missing, unknown = sorted(expected - inputs.keys()), sorted(inputs.keys() - expected)
        raise ValueError(f"inputs: expected {sorted(expected)}; missing {missing}, unknown {unknown}")
    for name, x in inputs.items():
        check_dense(name, x, "a floating tensor of 16, 32 or 64 bits")
        if x.dtype not in _FLOATS:
            fail(name, "a floating tensor of 16, 32 or 64 bits", x.dtype)
        if x.dim() and 0 in (x.shape[0] if name in meta.params else 1, *x.shape[-1:]):
            fail(name, "sizes of 1 and more, but for tokens", list(x.shape))
    leading = next(iter(meta.tokens))
    extra = inputs[leading].dim() - len(meta.tokens[leading].shape)
    if extra not in (0, 1):
        raise ValueError(f"{leading}: expected [T, H, ...] or [B, T, H, ...], got {tuple(inputs[leading].shape)}")
    tokens = {name: inputs[name] if extra else inputs[name].unsqueeze(0) for name in meta.tokens}
    return tokens, {name: inputs[name] for name in meta.params}, bool(extra)


def alike(meta: InputMeta, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of the shapes and dtypes that `asked` returns, without exchanges: shifted inputs keep the values of their
    own token."""
    found = _tokens_first(meta, inputs)
    earlier = {name: found[source] for name, source in meta.earlier.items() if source in found}
    return _rows_of_tokens(meta, found | earlier)


def answered(
    meta: InputMeta, sp: SequenceParallel | None, o: torch.Tensor, final: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Outputs of each token's last row, and the final states.

    If `asked` exchanged tokens, both depend on all of them, so that the backward exchange happens on every rank,
    whichever of the two a rank's loss uses.
    """
    if meta.rows is not None:
        o = o[..., meta.rows - 1 :: meta.rows, :, :]
    if sp is None or not meta.earlier:
        return o, final
    _, o, final = share_backward(sp, o, final)
    return o, final


def _tokens_first(meta: InputMeta, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inputs, of which those that come as [H, T, ...] or [B, H, T, ...] are views [T, H, ...] or [B, T, H, ...]."""
    found = dict(inputs) if meta.heads_first else inputs
    for name in meta.heads_first:
        if name not in inputs or name in meta.earlier:
            continue
        x, what = inputs[name], meta.tokens[name]
        rows = () if what.rows is None else (what.rows,)
        dims = ", ".join(map(str, ("H", "T", *rows, *(getattr(n, "name", n) for n in what.shape[2:]))))
        check_dense(name, x, f"a tensor [{dims}]")
        heads, extra = what.shape[1], x.dim() - meta.dims(name)
        choices = heads.choices if isinstance(heads, ConstExpr) else (heads,) if isinstance(heads, int) else None
        if extra not in (0, 1) or (choices is not None and x.shape[extra] not in choices):
            many = "" if choices is None else f" with H = {' or '.join(map(str, choices))}"
            fail(name, f"[{dims}] or [B, {dims}]{many}", list(x.shape))
        found[name] = x.movedim(extra, extra + 1 + len(rows))
    return found


def _rows_of_tokens(meta: InputMeta, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Inputs of T n rows, for n rows a token. Inputs [T, n, H, ...] are flattened; others have their value at the row
    that `SymbTensor.row` names and zeros elsewhere, or the same value at all rows."""
    n = meta.rows
    if n is None:
        return inputs
    found, T = dict(inputs), None
    for name, what in meta.tokens.items():
        if name not in inputs:
            continue
        x, own = inputs[name], () if what.rows is None else (n,)
        dims = ", ".join(map(str, ("T", *own, *(getattr(size, "name", size) for size in what.shape[1:]))))
        check_dense(name, x, f"a tensor [{dims}]")
        batch = x.dim() - meta.dims(name)
        if batch not in (0, 1) or (own and x.shape[batch + 1] != n):
            fail(name, f"[{dims}] or [B, {dims}]", list(x.shape))
        if T is None:
            T = name, x.shape[batch]
        if x.shape[batch] != T[1]:
            fail(name, f"the {T[1]} tokens of {T[0]} in [{dims}]", list(x.shape))
        if not own:
            x = x.unsqueeze(batch + 1)
            if what.row is None:
                x = x.expand(*x.shape[: batch + 1], n, *x.shape[batch + 2 :])
            else:
                at = what.row % n
                x = torch.nn.functional.pad(x, (*(0, 0) * (x.dim() - batch - 2), at, n - 1 - at))
        found[name] = x.flatten(batch, batch + 1)
    return found


def _with_earlier(
    meta: InputMeta, inputs: dict[str, torch.Tensor], cu_seqlens: torch.Tensor | None, sp: SequenceParallel | None
) -> dict[str, torch.Tensor]:
    """The inputs and the shifted inputs (`SymbTensor.before`). Collective over ``sp`` if there are shifted inputs."""
    if not meta.earlier:
        return inputs
    expected = [name for name in (*meta.tokens, *meta.params) if name not in meta.earlier]
    missing = [name for name in sorted(expected) if name not in inputs]
    unknown = sorted(inputs.keys() - {*expected, *meta.earlier})
    if missing or unknown:
        raise ValueError(f"inputs: expected {sorted(expected)}; missing {missing}, unknown {unknown}")
    given = {name: inputs[name] for name in expected}
    starts = {name: inputs[name] for name in meta.earlier if name in inputs}
    for name, source in meta.earlier.items():
        _check_earlier(meta, name, inputs[source], starts.get(name), cu_seqlens, sp)
    if sp is not None:
        _, *views = share_backward(sp, *given.values(), *starts.values())
        given, starts = dict(zip(given, views, strict=False)), dict(zip(starts, views[len(given) :], strict=True))
    return given | {
        name: _earlier(given[source], starts.get(name), meta.dims(name), cu_seqlens, sp)
        for name, source in meta.earlier.items()
    }


def _earlier(
    x: torch.Tensor, start: torch.Tensor | None, dims: int, cu_seqlens: torch.Tensor | None,
    sp: SequenceParallel | None,
) -> torch.Tensor:  # fmt: skip
    wide = x if x.dim() > dims else x.unsqueeze(0)
    if sp is not None and sp.world_size > 1:
        wide = wide.to(torch.promote_types(x.dtype, torch.float32))  # ranks exchange float32 and float64 only
    found = previous(wide, cu_seqlens, sp, None if start is None else start.to(wide.dtype)).to(x.dtype)
    return found if x.dim() > dims else found.squeeze(0)


def _check_earlier(
    meta: InputMeta, name: str, x: torch.Tensor, start: torch.Tensor | None, cu_seqlens: torch.Tensor | None,
    sp: SequenceParallel | None,
) -> None:  # fmt: skip
    """Checks x, the input that the shifted input ``name`` reads, and what stands before x's first tokens."""
    source, dims = meta.earlier[name], meta.dims(name)
    check_dense(source, x, "a floating tensor of 16, 32 or 64 bits")
    if x.dim() - dims not in (0, 1) or not x.is_floating_point():
        fail(source, "a floating tensor [T, H, ...] or [B, T, H, ...]", f"{x.dtype} {list(x.shape)}")
    if sp is not None:
        sp.check_shard(x.shape[x.dim() - dims])
    B, N = x.shape[0] if x.dim() > dims else 1, x.shape[0] if x.dim() > dims else 1
    if cu_seqlens is not None:
        check_boundaries(cu_seqlens, B, x.device)
        N = cu_seqlens.numel() - 1
    if start is None:
        return
    check_dense(name, start, f"what is before the first tokens of {source}")
    shape = (N, *x.shape[x.dim() - dims + 1 :])
    if tuple(start.shape) != shape or start.device != x.device or start.dtype != x.dtype:
        got = f"{tuple(start.shape)} of {start.dtype} on {start.device}"
        fail(name, f"what is before the first tokens of {source}, {shape} of {x.dtype} on {x.device}", got)
    if sp is not None and cu_seqlens is None and not sp.is_first:
        fail(name, "None on every rank but the first", f"a tensor on rank {sp.rank}")


def no_autocast(kind: str) -> AbstractContextManager[Any]:
    """A context without autocast, in which states stay in the accumulation dtype."""
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()
