"""SequenceParallel: one group of ranks that share a sequence, and everything an op needs to talk inside it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import operator
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
import torch.utils.checkpoint

from flexsp.exceptions import FlexspError, check_dense, check_integer, fail

__all__ = [
    "SequenceParallel",
    "abandon",
    "current_sp",
    "get_sp",
    "ranks_call",
    "resolve_sp",
    "sequence_parallel",
    "sp_over",
]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_NO_ERROR = getattr(torch.utils.checkpoint, "_StopRecomputationError", ())  # ends a recomputation that is complete
_GROUPS: dict[int, SequenceParallel] = {}
_next_id = itertools.count()


class _Ambient(threading.local):
    """Thread-local rather than a ContextVar: torch.compile can trace it."""

    def __init__(self) -> None:
        # in __init__, so that torch.compile's guards find them on every thread
        self.sp: SequenceParallel | None = None
        self.entered: FrameType | None = None


_ambient = _Ambient()


class SequenceParallel:
    """The ranks one sequence is cut over, in order: rank r holds the r-th contiguous shard.

    Made by `flexsp.init_sequence_parallel`. Methods that talk to the other ranks (marked "collective") must be
    called by all of them in the same order.

    Attributes:
        id: key of this object in this process; compiled graphs and autograd nodes keep it instead of the object.
        rank: place in the group.
        world_size: ranks in the group.
        global_ranks: rank of every member in the default process group.
        group: torch ProcessGroup that carries data (None for a single process).
        cpu_group: a ProcessGroup of the same ranks on gloo.
        device: where this rank computes.
        transport: "process_group", "peer", "put" or "posix".
        schedule: "chain", "serial", "pipelined" or "all_gather".
        heap: symmetric memory of the transports other than process_group.
        timeout_s: seconds until a silent peer ends in `PeerTimeout`.
        order: int64 [1] on ``device``, declared as mutated by every communicating op, so that no compiler drops or
            reorders one.
        anchor: scalar leaf that requires grad; makes communicating ops part of the graph on every rank.
        calls: exchanges begun.
        compared: texts compared under FLEXSP_CHECK=1.
        abandoned: calls that an error ended on this rank (`ranks_call`).
        check_calls: whether call signatures are compared between the ranks before a launch (FLEXSP_CHECK=1).
        channels: scratch of the transports.
        records: error record of the watchdog.
    """

    def __init__(
        self,
        *,
        rank: int = 0,
        world_size: int = 1,
        global_ranks: Sequence[int] | None = None,
        group: dist.ProcessGroup | None = None,
        cpu_group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        transport: str = "process_group",
        schedule: str = "chain",
        heap: Any = None,
        timeout_s: float = 120.0,
        check_calls: bool = False,
    ) -> None:
        self.id = next(_next_id)
        self.rank, self.world_size = rank, world_size
        self.global_ranks = list(range(world_size)) if global_ranks is None else list(global_ranks)
        self.group, self.cpu_group = group, cpu_group
        self.device = torch.device(device)
        self.transport, self.schedule, self.heap = transport, schedule, heap
        self.timeout_s, self.check_calls = float(timeout_s), check_calls
        with torch.inference_mode(False):  # these outlast it
            self.order = torch.zeros(1, dtype=torch.int64, device=self.device)
            self.anchor = torch.zeros((), device=self.device, requires_grad=True)
        self.channels: dict[Any, Any] = {}
        self.records: Any = None
        self.failure: FlexspError | None = None
        self.calls = 0
        self.abandoned = 0
        self.compared = 0
        self._answered = 0
        self._lengths: list[int] | None = None
        _GROUPS[self.id] = self

    def __repr__(self) -> str:
        return (
            f"SequenceParallel(rank {self.rank} of {self.world_size}, global_ranks={self.global_ranks}, "
            f"device={self.device}, transport={self.transport!r}, schedule={self.schedule!r})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceParallel:
        """Copies of a module talk over the same group."""
        return self

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.world_size - 1

    def neighbours(self, reverse: bool = False) -> tuple[int | None, int | None]:
        """(source, target) of what passes along the ranks from left to right, or from right to left."""
        left = self.rank - 1 if self.rank > 0 else None
        right = self.rank + 1 if self.rank + 1 < self.world_size else None
        return (right, left) if reverse else (left, right)

    # Lengths ---------------------------------------------------------------------------------------------------

    @property
    def lengths(self) -> list[int] | None:
        """Shard lengths given by `set_lengths`, else None."""
        return self._lengths

    def set_lengths(self, lengths: Sequence[int] | None) -> None:
        """Fix the shard lengths of all ranks (zeros allowed), so that calls need not exchange them; None forgets them.

        Ops and layers then refuse any other number of tokens.

        Example: ``sp.set_lengths(sp.partition(total_tokens))``. Without them every call that needs lengths exchanges
        them on the CPU, which also breaks a torch.compile graph. And the tokens before a shard, which convolutions
        need, then go by torch.distributed even where a kernel could send them.
        """
        if lengths is None:
            self._lengths = None
            return
        try:
            given = list(lengths)
            values = [operator.index(n) for n in given]
        except TypeError:
            given = values = []
        booleans = any(isinstance(n, bool) or getattr(n, "dtype", None) == torch.bool for n in given)
        if len(values) != self.world_size or min(values) < 0 or booleans:
            raise ValueError(f"lengths: expected {self.world_size} integers >= 0, one a rank, got {lengths!r}")
        self._lengths = values

    def partition(self, total: int) -> list[int]:
        """Balanced shard lengths of ``total`` tokens; the first ranks take the remainder. Sets nothing."""
        base, extra = divmod(check_integer("total", total), self.world_size)
        return [base + (r < extra) for r in range(self.world_size)]

    def lengths_for(self, T_local: int, rows: int = 1) -> list[int]:
        """Shard lengths of all ranks. Collective on the CPU group unless `set_lengths` gave them.

        Args:
            T_local: this rank's length.
            rows: the lengths asked for count so many rows for each token of `set_lengths`.
        """
        if self._lengths is not None:
            self.check_shard(T_local, rows)
            lengths = [rows * n for n in self._lengths]
            if self.check_calls and not torch.compiler.is_compiling():
                self.check_signature(("set_lengths", *lengths))
            return lengths
        if self.world_size == 1:
            return [T_local]
        from flexsp.comm.process_group import exchange_ints

        return exchange_ints(get_sp(self.id), T_local)

    def check_shard(self, T_local: int, rows: int = 1) -> None:
        """ValueError unless this rank has as many tokens as `set_lengths` says, if it says. Sends nothing.

        Every op and layer asks it before anything else, so that a whole sequence is never taken for a shard.
        """
        if self._lengths is None or rows * self._lengths[self.rank] == T_local:
            return
        of = f"{self._lengths[self.rank]} tokens (set_lengths)" + (f" of {rows} rows" if rows > 1 else "")
        whole = T_local == rows * sum(self._lengths)
        hint = ", as many as all ranks have together: cut with sp.shard" if whole and self.world_size > 1 else ""
        raise ValueError(f"rank {self.rank}: expected a shard of {of}, got {T_local}{hint}")

    def shard_range(self, T_local: int, rows: int = 1) -> tuple[int, int, int]:
        """(start, stop, total) of this rank's tokens in the global sequence; see `lengths_for`."""
        lengths = self.lengths_for(T_local, rows)
        start = sum(lengths[: self.rank])
        return start, start + lengths[self.rank], sum(lengths)

    # Tensors ---------------------------------------------------------------------------------------------------

    def shard(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """This rank's slice (a view) of the full ``x`` along ``dim``: by `set_lengths`, else balanced."""
        dim = _axis(x, "x", dim)
        total = x.size(dim)
        lengths = self._lengths if self._lengths is not None else self.partition(total)
        if sum(lengths) != total:
            raise ValueError(f"x: expected {sum(lengths)} tokens along dim {dim} (set_lengths), got {total}")
        return x.narrow(dim, sum(lengths[: self.rank]), lengths[self.rank])

    def gather(self, y: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Shards joined along ``dim``, on every rank. Collective; shards may differ in length or be empty.

        The backward is the exact adjoint: a rank's gradient is the sum over all ranks of their gradients of its slice.
        """
        _axis(y, "y", dim)
        if self.world_size == 1:
            return y.clone()
        from flexsp.comm.collectives import gather

        return gather(y, dim, self)

    def token_mean(self, loss: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Mean of per-token losses over the tokens of all ranks, scaled for gradient averaging. Collective.

        Args:
            loss: losses of this rank's tokens, any shape, unreduced; may be empty.
            mask: same shape, True (or nonzero) where a token counts.

        Sums in float32 (float64 stays), which is the dtype of what it returns: a sum in float16 overflows after a few
        thousand tokens.

        Returns:
            (sum of local losses / number of tokens on all ranks) * world_size, a scalar. Its average over the ranks
            is the mean over the whole sequence, so DDP or FSDP, which average gradients, give what one rank gives.
        """
        check_dense("loss", loss)
        if mask is not None:
            check_dense("mask", mask)
        if mask is not None and mask.shape != loss.shape:
            raise ValueError(f"mask: expected the shape of loss {tuple(loss.shape)}, got {tuple(mask.shape)}")
        loss = loss.to(torch.promote_types(loss.dtype, torch.float32))
        if mask is None:
            count = torch.full((), loss.numel(), dtype=torch.float64, device=loss.device)
        else:
            keep = mask != 0
            loss = torch.where(keep, loss, torch.zeros((), dtype=loss.dtype, device=loss.device))
            count = keep.sum().to(torch.float64)
        if self.world_size > 1:
            from flexsp.comm.collectives import sum_over_ranks

            count = sum_over_ranks(count, self)
        return loss.sum() * (self.world_size / count.clamp(min=1)).to(loss.dtype)

    # Health ----------------------------------------------------------------------------------------------------

    def check_signature(self, sig: tuple[Any, ...]) -> None:
        """With FLEXSP_CHECK=1: compare ``sig`` between the ranks, PeerMismatch where they differ. Else nothing.

        Ops call it before they launch. Collective on the CPU group.
        """
        if self.check_calls and self.world_size > 1:
            from flexsp.comm.process_group import compare_text
            from flexsp.comm.signature import raised

            self.compared += 1
            of = f", of the backward pass of exchange {self._answered}" if self._answered else ""
            compare_text(self, " ".join(str(part) for part in sig) + of + raised(self.abandoned))

    def number(self) -> int:
        """Of the exchange that was compared last, the same on every rank; 0 without FLEXSP_CHECK=1 and in graphs."""
        return 0 if torch.compiler.is_compiling() else self.compared

    def answering(self, number: int) -> contextlib.AbstractContextManager[None]:
        """Exchanges inside are of the backward pass of the one with this `number`, and say so to each other."""
        return self._answering(number) if number else contextlib.nullcontext()

    @contextlib.contextmanager
    def _answering(self, number: int) -> Iterator[None]:
        self._answered = number
        try:
            yield
        finally:
            self._answered = 0

    def check(self) -> None:
        """Raise the PeerTimeout or PeerMismatch that an earlier call left behind, if any."""
        if self.failure is not None:
            raise self.failure
        if self.records is not None:
            from flexsp.comm import watchdog

            watchdog.raise_pending(self)

    def close(self) -> None:
        """Give back the groups and the heap. Collective; the object cannot be used afterwards."""
        if _GROUPS.pop(self.id, None) is None:
            return
        self.channels.clear()
        if self.heap is not None:
            self.heap.close()
            self.heap = None
        if dist.is_initialized():
            for group in (self.group, self.cpu_group):
                if group is not None:
                    dist.destroy_process_group(group)
        self.group = self.cpu_group = None


def abandon(error: BaseException, sp: object) -> None:
    """Counts a call over ``sp`` that ``error`` ends on this rank.

    The others may have made the call, and what they sent then still lies there: the count is part of what ranks
    compare, so that the next exchange says so. Errors that all ranks meet alike leave the counts equal.
    """
    found = _ambient.sp if sp is None else sp
    if isinstance(error, _NO_ERROR):
        return
    if isinstance(found, SequenceParallel) and found.world_size > 1 and not getattr(error, "_flexsp_counted", False):
        found.abandoned += 1
        with contextlib.suppress(AttributeError):
            error._flexsp_counted = True  # type: ignore[attr-defined]


def ranks_call(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorator of functions with an argument ``sp`` that all ranks call together; see `abandon`."""

    @functools.wraps(fn)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.compiler.is_compiling():
            return fn(*args, **kwargs)
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            with contextlib.suppress(TypeError):  # of arguments that the function does not take
                abandon(error, inspect.signature(fn).bind(*args, **kwargs).arguments.get("sp"))
            raise

    return run


def _axis(x: torch.Tensor, name: str, dim: int) -> int:
    check_dense(name, x)
    dim = check_integer("dim", dim, least=-x.dim())
    if dim >= x.dim():
        fail("dim", f"a dimension of a tensor of shape {tuple(x.shape)}", dim)
    return dim


def get_sp(sp_id: int) -> SequenceParallel:
    """The live SequenceParallel with this id; FlexspError once it is closed."""
    if sp_id not in _GROUPS:
        raise FlexspError(f"SequenceParallel {sp_id} was closed: a call or a backward pass still needs it")
    return _GROUPS[sp_id]


def sp_over(group: dist.ProcessGroup) -> SequenceParallel | None:
    """The newest live SequenceParallel over the ranks of a process group."""
    ranks = dist.get_process_group_ranks(group)
    return next((sp for sp in reversed(_GROUPS.values()) if sp.global_ranks == ranks), None)


@contextlib.contextmanager
def sequence_parallel(sp: SequenceParallel | None) -> Iterator[SequenceParallel | None]:
    """Ops inside that are called with ``sp=None`` run over ``sp`` (of the same thread only); None: over no ranks.

    Raises:
        ValueError: ``sp`` is something else.
    """
    if sp is not None and not isinstance(sp, SequenceParallel):
        raise ValueError(f"sp: expected a SequenceParallel or None, got {type(sp).__name__}")
    outer = _ambient.sp, _ambient.entered
    _ambient.sp = sp
    if not torch.compiler.is_compiling():
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename == contextlib.__file__:
            frame = frame.f_back
        _ambient.entered = frame
    try:
        yield sp
    finally:
        _ambient.sp, _ambient.entered = outer


def current_sp() -> SequenceParallel | None:
    """The SequenceParallel of the innermost ``with sequence_parallel(sp)``, else None."""
    return _ambient.sp


def _refuse_lost_recompute() -> None:
    """FlexspError if the op runs in a checkpointed function that does not itself enter the ambient group.

    Its recomputation would run in the backward pass, outside the group (on CUDA on another thread), and silently give
    the gradient of separate sequences.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame is not _ambient.entered:
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            raise FlexspError(
                "an op with sp=None runs inside a checkpointed function, which would be recomputed outside the ambient "
                "sequence_parallel. Checkpoint a submodule of a model wrapped in SequenceParallelLA, or pass sp= to "
                "the op, or enter sequence_parallel(sp) inside the function"
            )
        frame = frame.f_back


def resolve_sp(sp: SequenceParallel | bool | None) -> SequenceParallel | None:
    """What the ``sp`` argument of an op means: None the ambient group, False no group, else the group itself."""
    if sp is None:
        found = current_sp()
        if found is not None and found.world_size > 1 and not torch.compiler.is_compiling():
            _refuse_lost_recompute()
        return found
    if sp is False:
        return None
    if not isinstance(sp, SequenceParallel):
        raise ValueError(f"sp: expected a SequenceParallel, None or False, got {type(sp).__name__}")
    return sp
