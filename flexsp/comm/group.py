"""SequenceParallel: what users call of a group of ranks that share a sequence."""

from __future__ import annotations

import contextlib
import operator
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.utils.checkpoint

from flexsp.comm import collectives, process_group
from flexsp.comm.ranks import GROUPS, Ranks, ambient, count_failed_call, ranks_call, ranks_of
from flexsp.exceptions import FlexspError, NotAvailable, check_dense, check_integer, fail

__all__ = [
    "SequenceParallel", "count_failed_call", "current_sp", "get_sp", "keeping_bits", "ranks_call",
    "refuse_bitwise", "resolve_sp", "sequence_parallel", "sp_over",
]  # fmt: skip


class SequenceParallel(Ranks):
    """The ranks one sequence is cut over, in order: rank r holds the r-th contiguous shard.

    Made by `flexsp.init_sequence_parallel`. Methods that talk to the other ranks (marked "collective") must be
    called by all of them in the same order.

    Attributes:
        rank: place in the group.
        world_size: ranks in the group.
        global_ranks: rank of every member in the default process group.
        group: torch ProcessGroup that carries data (None for a single process).
        cpu_group: a ProcessGroup of the same ranks on gloo.
        device: where this rank computes.
        transport: "process_group", "peer", "put", "posix", or what `register_transport` made known.
        schedule: "chain", "serial", "pipelined", "all_gather" or "hierarchical".
        hosts: how many ranks, in their order, stand on each host; a host counts again where it comes up again.
        timeout_s: seconds until a silent peer ends in `PeerTimeout`.
        segment: tokens of a segment where results have the same bits for any number of ranks (``bitwise``), else 0.
    """

    def __repr__(self) -> str:
        if self.world_size == 1:
            return f"SequenceParallel(one rank, device={str(self.device)!r})"
        options = []
        if self.global_ranks != list(range(self.world_size)):
            told = list(map(str, self.global_ranks))
            options = [f"of the world {', '.join(told if len(told) <= 8 else [*told[:3], '...', told[-1]])}"]
        options += [f"device={str(self.device)!r}", f"transport={self.transport!r}", f"schedule={self.schedule!r}"]
        options += [f"bitwise={self.segment}"] if self.segment else []
        return f"SequenceParallel(rank {self.rank} of {self.world_size}, {', '.join(options)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceParallel:
        """Copies of a module talk over the same group."""
        return self

    # Lengths ---------------------------------------------------------------------------------------------------

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
            rows: the lengths asked for count this number of rows for each token of `set_lengths`.
        """
        return process_group.lengths_for(self, T_local, rows)

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
        return collectives.gather(y, dim, self)

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
            count = collectives.sum_over_ranks(count, self)
        return loss.sum() * (self.world_size / count.clamp(min=1)).to(loss.dtype)

    # Health ----------------------------------------------------------------------------------------------------

    def check_signature(self, sig: tuple[Any, ...]) -> None:
        """With FLEXSP_CHECK=1: compare ``sig`` between the ranks, PeerMismatch where they differ. Else nothing.

        Ops call it before they launch. Collective on the CPU group.
        """
        if self.check_calls:
            process_group.check_signature(self, sig)

    def close(self) -> None:
        """Give back the groups and the heap. Collective; the object cannot be used afterwards."""
        if GROUPS.pop(self.id, None) is None:
            return
        self.channels.clear()
        for heap in (*[heap for heap, _ in self.outgrown], self.heap):
            if heap is not None:
                heap.close()
        self.heap = self.open_heap = None
        self.outgrown.clear()
        if dist.is_initialized():
            for group in (self.group, self.cpu_group):
                if group is not None:
                    dist.destroy_process_group(group)
        self.group = self.cpu_group = None


def _axis(x: torch.Tensor, name: str, dim: int) -> int:
    check_dense(name, x)
    dim = check_integer("dim", dim, least=-x.dim())
    if dim >= x.dim():
        fail("dim", f"a dimension of a tensor of shape {tuple(x.shape)}", dim)
    return dim


# The open group with this id; FlexspError once it is closed. Every open group is a SequenceParallel.
get_sp = cast("Callable[[int], SequenceParallel]", ranks_of)


def sp_over(group: dist.ProcessGroup) -> SequenceParallel | None:
    """The newest live SequenceParallel over the ranks of a process group."""
    ranks = dist.get_process_group_ranks(group)
    return next((get_sp(sp.id) for sp in reversed(GROUPS.values()) if sp.global_ranks == ranks), None)


@contextlib.contextmanager
def sequence_parallel(sp: SequenceParallel | None) -> Iterator[SequenceParallel | None]:
    """Ops inside that are called with ``sp=None`` run over ``sp`` (of the same thread only); None: over no ranks.

    Raises:
        ValueError: ``sp`` is something else.
    """
    if sp is not None and not isinstance(sp, SequenceParallel):
        raise ValueError(f"sp: expected a SequenceParallel or None, got {type(sp).__name__}")
    outer = ambient.sp, ambient.entered
    ambient.sp = sp
    if not torch.compiler.is_compiling():
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename == contextlib.__file__:
            frame = frame.f_back
        ambient.entered = frame
    try:
        yield sp
    finally:
        ambient.sp, ambient.entered = outer


def current_sp() -> SequenceParallel | None:
    """The SequenceParallel of the innermost ``with sequence_parallel(sp)``, else None."""
    return ambient.sp


def _refuse_lost_recompute() -> None:
    """FlexspError if the op runs in a checkpointed function that does not itself enter the ambient group.

    Its recomputation would run in the backward pass, outside the group (on CUDA on another thread), and silently give
    the gradient of separate sequences.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame is not ambient.entered:
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            raise FlexspError(
                "an op with sp=None runs inside a checkpointed function, which would be recomputed outside the ambient "
                "sequence_parallel. Checkpoint a submodule of a model wrapped in SequenceParallelLA, or pass sp= to "
                "the op, or enter sequence_parallel(sp) inside the function"
            )
        frame = frame.f_back


_warned: set[str] = set()


def _who_asks(level: int) -> tuple[str, int]:
    """The op or layer in or above the frame `level` frames above this one, and the level of what called it."""
    name, frame = "an op", cast("FrameType | None", sys._getframe(level))
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(("flexsp.", "torch.")):
        holder, module = frame.f_locals.get("self"), frame.f_globals["__name__"]
        # Decorators of ops are in the others, and torch calls a layer's forward.
        if "._" not in module and not module.startswith(("flexsp.comm.", "flexsp.runtime.", "torch.")):
            name = frame.f_code.co_name if holder is None else type(holder).__name__
        frame, level = frame.f_back, level + 1
    return name, level


def _warn_of_open_group() -> None:
    """Warns, once for each op or layer, that it runs on this rank alone while a group of several ranks is open."""
    world = max((group.world_size for group in GROUPS.values()), default=1)
    if world == 1:
        return
    name, level = _who_asks(4)
    if name not in _warned:
        _warned.add(name)
        warnings.warn(
            f"{name}: each of {world} ranks takes its tokens for a sequence of their own. If the ranks share one, pass "
            "sp=, or call it in `with sequence_parallel(sp):` or in a SequenceParallelLA; sp=False, or `with "
            "sequence_parallel(None):`, says that they do not",
            stacklevel=level,
        )


def resolve_sp(sp: SequenceParallel | bool | None, keeps_bits: bool = False) -> SequenceParallel | None:
    """What the ``sp`` argument of an op means: None the ambient group, False no group, else the group itself.

    None outside of `sequence_parallel` warns where a group of several ranks is open.

    Args:
        keeps_bits: what asks gives the same bits for any number of ranks. Otherwise a group that was asked to
            (``bitwise``) raises NotAvailable.
    """
    found = _resolved(sp)
    if found is None or not found.segment:
        return found
    who = "a call" if torch.compiler.is_compiling() else _who_asks(2)[0]
    if ambient.in_segment:
        raise NotAvailable(
            f"{who}: it is called in a module that treats tokens one by one, which a group made with bitwise gives one "
            "segment at a time. Call it beside that module"
        )
    if not (keeps_bits or ambient.keeps_bits):
        refuse_bitwise(found, who)
    return found


def refuse_bitwise(sp: SequenceParallel, what: str) -> None:
    """NotAvailable where a group was made with ``bitwise``, for what does not keep its bits."""
    if sp.segment:
        raise NotAvailable(
            f"{what}: its bits depend on how many ranks there are, and the group was made with bitwise "
            "(docs/same-bits.md). Call it with another group, or on one rank with sp=False"
        )


@contextlib.contextmanager
def keeping_bits() -> Iterator[None]:
    """Inside, an op runs over a group that was made with ``bitwise`` by kernels that give the same bits."""
    before, ambient.keeps_bits = ambient.keeps_bits, True
    try:
        yield
    finally:
        ambient.keeps_bits = before


def _resolved(sp: SequenceParallel | bool | None) -> SequenceParallel | None:
    """`resolve_sp`, whatever has the same bits."""
    if sp is None:
        found = current_sp()
        if torch.compiler.is_compiling():
            return found
        if found is None and ambient.entered is None:
            _warn_of_open_group()
        if found is not None and found.world_size > 1:
            _refuse_lost_recompute()
        return found
    if sp is False:
        return None
    if not isinstance(sp, SequenceParallel):
        raise ValueError(f"sp: expected a SequenceParallel, None or False, got {type(sp).__name__}")
    return sp
