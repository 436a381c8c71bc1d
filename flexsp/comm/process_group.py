"""Transport over torch.distributed: point-to-point messages, CPU-side checks, and errors that name the peer.

CPU tensors go over gloo with a short text in front of every message, so that ranks which disagree raise PeerMismatch
instead of hanging or mixing up data. CUDA tensors go over NCCL in stream order without any host synchronisation; there
a silent peer is NCCL's own watchdog to report.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from flexsp.comm.group import SequenceParallel
from flexsp.exceptions import PeerMismatch, PeerTimeout

__all__ = [
    "Message",
    "Pending",
    "compare_text",
    "define_op",
    "exchange_ints",
    "greet",
    "group_for",
    "peer_errors",
    "post",
    "stamp",
    "wait_all",
]

_TEXT_BYTES = 192
_library = torch.library.Library("flexsp", "FRAGMENT")


def define_op(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Register ``flexsp::<schema>``; a schema with ``Tensor(o!) order`` survives dead-code elimination, in order."""
    name = schema[: schema.index("(")]
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flexsp::{name}", fake, lib=_library)
    return getattr(torch.ops.flexsp, name).default


def group_for(sp: SequenceParallel, tensor: torch.Tensor) -> dist.ProcessGroup | None:
    """The group that can carry ``tensor``."""
    return sp.group if tensor.is_cuda else sp.cpu_group if sp.device.type == "cuda" else sp.group


@contextmanager
def peer_errors(sp: SequenceParallel, peer: int | None, doing: str) -> Iterator[None]:
    """torch.distributed reports timeouts and lost connections as RuntimeError: say who and keep it for sp.check()."""
    try:
        yield
    except (PeerTimeout, PeerMismatch):
        raise
    except RuntimeError as error:
        sp.failure = PeerTimeout(sp.rank, peer, direction=doing, detail=str(error).splitlines()[0])
        raise sp.failure from error


def stamp(sp: SequenceParallel, what: str, *tensors: torch.Tensor | None) -> str:
    """Text that must be the same on all ranks for the call about to start: its number, name, shapes and dtypes."""
    sp.check()
    sp.calls += 1
    parts = ["-" if t is None else f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors]
    text = f"call {sp.calls} {what} {', '.join(parts)}"
    sp.check_signature((text,))
    return text


def _encode(text: str) -> torch.Tensor:
    raw = text.encode()
    if len(raw) > _TEXT_BYTES:
        raw = raw[: _TEXT_BYTES - 17] + b"#" + hashlib.sha256(raw).hexdigest()[:16].encode()
    return torch.frombuffer(bytearray(raw.ljust(_TEXT_BYTES, b"\0")), dtype=torch.uint8)


def _decode(buffer: torch.Tensor) -> str:
    return bytes(buffer.tolist()).rstrip(b"\0").decode(errors="replace")


def _compare(sp: SequenceParallel, text: str, value: int, doing: str) -> list[int]:
    """Every rank's ``value``; PeerMismatch unless all came with the same ``text``.

    The only kind of message on the CPU group: two calls that meet by mistake then have the same size, where gloo would
    end the process over different ones.
    """
    mine = torch.cat([_encode(text), torch.tensor([value], dtype=torch.int64, device="cpu").view(torch.uint8)])
    rows = [torch.empty_like(mine) for _ in range(sp.world_size)]
    with peer_errors(sp, None, doing):
        dist.all_gather(rows, mine, group=sp.cpu_group)
    for peer, row in enumerate(rows):
        if not torch.equal(row[:_TEXT_BYTES], mine[:_TEXT_BYTES]):
            raise PeerMismatch(sp.rank, peer, _decode(mine[:_TEXT_BYTES]), _decode(row[:_TEXT_BYTES]))
    return [int(row[_TEXT_BYTES:].clone().view(torch.int64)) for row in rows]


def compare_text(sp: SequenceParallel, text: str) -> None:
    """PeerMismatch unless every rank calls this with the same text. Collective on the CPU group."""
    _compare(sp, text, 0, "comparing calls")


@torch.compiler.disable
def exchange_ints(sp: SequenceParallel, value: int) -> list[int]:
    """One integer of every rank. Collective on the CPU group; never touches the GPU."""
    sp.check()
    return _compare(sp, f"shard lengths (after call {sp.calls})", value, "exchanging shard lengths")


class Message(NamedTuple):
    """One contiguous buffer to or from a group rank; ``op`` is "send" or "recv"."""

    op: Literal["send", "recv"]
    buffer: torch.Tensor
    peer: int


class Pending(NamedTuple):
    """A message under way; holds its buffer alive until waited for."""

    work: dist.Work
    message: Message


def post(sp: SequenceParallel, *messages: Message) -> list[Pending]:
    """Start messages that may proceed together, in stream order on CUDA."""
    if not messages:
        return []
    calls = {"send": dist.isend, "recv": dist.irecv}
    group = group_for(sp, messages[0].buffer)
    first = messages[0]
    if first.buffer.is_cuda:
        # One NCCL group on the group's communicator; single isend/irecv would build a communicator for each pair.
        ops = [dist.P2POp(calls[m.op], m.buffer, sp.global_ranks[m.peer], group) for m in messages]
        with peer_errors(sp, first.peer, first.op):
            works = dist.batch_isend_irecv(ops)
        return [Pending(work, m) for work, m in zip(works * len(messages), messages, strict=False)]
    pending = []
    for m in messages:
        with peer_errors(sp, m.peer, m.op):
            work = calls[m.op](m.buffer, sp.global_ranks[m.peer], group=group)
        assert work is not None  # None only on a rank outside the group
        pending.append(Pending(work, m))
    return pending


def wait_all(sp: SequenceParallel, pending: Sequence[Pending]) -> None:
    """Wait for messages: on CPU until they are through, on CUDA by ordering the current stream behind them."""
    for item in pending:
        with peer_errors(sp, item.message.peer, item.message.op):
            item.work.wait()


def greet(sp: SequenceParallel, text: str, source: int | None, target: int | None, like: torch.Tensor) -> list[Pending]:
    """Before CPU data moves: tell ``target`` which call this is, compare with what ``source`` says (see stamp)."""
    if like.is_cuda:
        return []
    ours = _encode(text)
    leaving = post(sp, Message("send", ours, target)) if target is not None else []
    if source is not None:
        theirs = torch.empty_like(ours)
        wait_all(sp, post(sp, Message("recv", theirs, source)))
        if not torch.equal(theirs, ours):
            sp.failure = PeerMismatch(sp.rank, source, _decode(ours), _decode(theirs))
            raise sp.failure
    return leaving
