"""Transport over torch.distributed: point-to-point messages, calls compared between ranks, errors that name the peer.

Before CPU tensors move over gloo, neighbours exchange the text of the call that they are in, so that ranks which
disagree raise PeerMismatch instead of hanging or mixing up data. CUDA tensors go over NCCL in stream order without any
host synchronisation: there the stamp of the call travels in front of the data and is compared on the device; what came
with another stamp becomes NaN, and the next call or sp.check() raises. A silent peer is NCCL's own watchdog to report.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from flexsp.comm import faults, watchdog
from flexsp.comm.derivatives import first_only
from flexsp.comm.ranks import Ranks, ranks_of
from flexsp.comm.recorder import Entry, ended
from flexsp.comm.signature import Signature, digest, poison, raised
from flexsp.comm.tracing import outside_graphs
from flexsp.exceptions import PeerMismatch, PeerTimeout

__all__ = [
    "Call", "Message", "OverRanks", "Pending", "begin_call", "check_signature", "compare_text", "define_op",
    "exchange_ints", "group_for", "lengths_for", "lost_peer", "of_all_ranks", "peer_errors", "post", "wait_all",
]  # fmt: skip

_TEXT_BYTES = 384
_FAILED = b"\1"  # first byte of a text that says which ranks disagree
_COLLECTIVE = "collective "  # how texts of calls begin in which every rank talks to all
_HEADER = 16  # bytes in front of data on CUDA
# Gloo raises plain RuntimeErrors. They begin with the file of its source, in most builds.
_OF_CONNECTIONS = re.compile(
    r"gloo|nccl|timed? ?out|connect|socket|broken pipe|reset by peer|closed|wait.*(key|store)", re.IGNORECASE
)
_library = torch.library.Library("flexsp", "FRAGMENT")


def define_op(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Register ``flexsp::<schema>``; a schema with ``Tensor(o!) order`` survives dead-code elimination, in order."""
    name = schema[: schema.index("(")]
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flexsp::{name}", fake, lib=_library)
    return getattr(torch.ops.flexsp, name).default


class OverRanks(torch.autograd.Function):
    """An operator of `define_op` on x, differentiable: ``apply(x, anchor, run, adjoint, sp_id, refusal)``.

    The group's `anchor` makes autograd record the node on every rank, whether x needs it or not. `run` is the operator,
    and its arguments behind x, but for the last two, ``order`` and ``sp_id``; `adjoint` the same of its adjoint.
    `refusal` is what `first_only` says of second derivatives.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: torch.Tensor, run: Any, adjoint: Any, *how: Any) -> torch.Tensor:
        (op, *arguments), (sp_id, _) = run, how
        ctx.adjoint, ctx.how = adjoint, how
        # Nothing is needed, but only a node that saves a tensor makes checkpointing recompute up to and including it.
        ctx.save_for_backward(anchor)
        found = op(x, *arguments, ranks_of(sp_id).order, sp_id)
        ctx.number = ranks_of(sp_id).number()
        return found

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (op, *arguments), (sp_id, refusal) = ctx.adjoint, ctx.how
        first_only(*refusal)
        (_,) = ctx.saved_tensors
        sp = ranks_of(sp_id)
        with sp.answering(ctx.number):
            return op(grad, *arguments, sp.order, sp_id), None, None, None, None, None


def group_for(sp: Ranks, tensor: torch.Tensor) -> dist.ProcessGroup | None:
    """The group that can carry ``tensor``."""
    return sp.group if tensor.is_cuda else sp.cpu_group if sp.device.type == "cuda" else sp.group


def lost_peer(error: RuntimeError) -> bool:
    """Whether torch.distributed says with it that a rank did not answer or that its connection broke."""
    return isinstance(error, dist.DistError) or _OF_CONNECTIONS.search(str(error)) is not None


@contextmanager
def peer_errors(sp: Ranks, peer: int | None, doing: str) -> Iterator[None]:
    """torch.distributed reports timeouts and lost connections as RuntimeError: say who and keep it for sp.check()."""
    try:
        yield
    except (PeerTimeout, PeerMismatch):
        raise
    except RuntimeError as error:
        if not lost_peer(error):
            raise
        found = PeerTimeout(sp.rank, peer, direction=doing, detail=str(error).splitlines()[0])
        if sp.failure is None:
            sp.failure = found
            faults.explained(sp, found)
        raise found from error


def _encode(text: str) -> torch.Tensor:
    raw = text.encode()
    if len(raw) > _TEXT_BYTES:
        raw = raw[: _TEXT_BYTES - 17] + b"#" + f"{digest(text):016x}".encode()
    return torch.frombuffer(bytearray(raw.ljust(_TEXT_BYTES, b"\0")), dtype=torch.uint8)


def _decode(buffer: torch.Tensor) -> str:
    return bytes(buffer.tolist()).rstrip(b"\0").decode(errors="replace")


def _compare(sp: Ranks, text: str, value: int, doing: str) -> list[int]:
    """Every rank's ``value``; PeerMismatch unless all came with the same ``text``.

    The only kind of message on the CPU group: two calls that meet by mistake then have the same size, where gloo would
    end the process over different ones.
    """
    mine = torch.cat([_encode(text), torch.tensor([value], dtype=torch.int64, device="cpu").view(torch.uint8)])
    rows = [torch.empty_like(mine) for _ in range(sp.world_size)]
    entry = sp.recorder.begin(sp.calls, text, None, None, "cpu group")
    with peer_errors(sp, None, doing):
        dist.all_gather(rows, mine, group=sp.cpu_group)
    texts = [_decode(row[:_TEXT_BYTES]) for row in rows]
    for peer, theirs in enumerate(texts):
        if theirs != texts[sp.rank]:
            raise faults.among_texts(sp, PeerMismatch(sp.rank, peer, texts[sp.rank], theirs), texts)
    ended(entry)
    return [int(row[_TEXT_BYTES:].clone().view(torch.int64)) for row in rows]


def compare_text(sp: Ranks, text: str, doing: str = "comparing calls") -> None:
    """PeerMismatch unless every rank calls this with the same text. Collective on the CPU group."""
    _compare(sp, text, 0, doing)


@outside_graphs("ranks tell each other how long their shards are; sp.set_lengths spares them that")
def exchange_ints(sp: Ranks, value: int) -> list[int]:
    """One integer of every rank. Collective on the CPU group; never touches the GPU."""
    sp.check()
    text = f"{_COLLECTIVE}shard lengths (after call {sp.calls}{raised(sp.abandoned)})"
    if sp.device.type == "cpu" and not sp.check_calls:  # else neighbours compare nothing on the CPU group
        _greet(sp, text, *sp.neighbours())
    return _compare(sp, text, value, "exchanging shard lengths")


def lengths_for(sp: Ranks, T_local: int, rows: int = 1) -> list[int]:
    """Shard lengths of all ranks; see `SequenceParallel.lengths_for`."""
    given = sp.lengths
    if given is not None:
        sp.check_shard(T_local, rows)
        lengths = [rows * n for n in given]
        if sp.check_calls and not torch.compiler.is_compiling():
            check_signature(sp, ("set_lengths", *lengths))
        return lengths
    if sp.world_size == 1:
        return [T_local]
    sp.asked += 1
    return exchange_ints(ranks_of(sp.id), T_local)


def check_signature(sp: Ranks, sig: tuple[Any, ...]) -> None:
    """See `SequenceParallel.check_signature`."""
    if sp.check_calls and sp.world_size > 1:
        sp.compared += 1
        of = f", of the backward pass of exchange {sp.answered}" if sp.answered else ""
        compare_text(sp, " ".join(str(part) for part in sig) + of + raised(sp.abandoned))


class Message(NamedTuple):
    """One contiguous buffer to or from a group rank; ``op`` is "send" or "recv"."""

    op: Literal["send", "recv"]
    buffer: torch.Tensor
    peer: int


class Pending(NamedTuple):
    """A message under way; holds its buffer alive until waited for."""

    work: dist.Work
    message: Message


def post(sp: Ranks, *messages: Message) -> list[Pending]:
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


def of_all_ranks(sp: Ranks, mine: torch.Tensor) -> torch.Tensor:
    """Every rank's ``mine`` [n], as [ranks, n]."""
    everyone = mine.new_empty(sp.world_size * mine.numel())
    everyone.view(sp.world_size, -1)[:, :_HEADER].zero_()  # no stamp of an earlier call, should a rank send less
    run = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
    with peer_errors(sp, None, "all_gather"):
        run(everyone, mine, group=group_for(sp, mine))
    return everyone.view(sp.world_size, -1)


def wait_all(sp: Ranks, pending: Sequence[Pending]) -> None:
    """Wait for messages: on CPU until they are through, on CUDA by ordering the current stream behind them."""
    for item in pending:
        with peer_errors(sp, item.message.peer, item.message.op):
            item.work.wait()


def begin_call(
    sp: Ranks, signature: Signature, like: torch.Tensor, source: int | None = None, target: int | None = None
) -> Call:
    """Counts an exchange and, where the data `like` is on CPU, compares it: with the neighbours that data comes from
    and goes to, or, without them, with every rank. PeerMismatch where they are in another call."""
    sp.check()
    sp.calls += 1
    collective = source is None and target is None
    text = f"{_COLLECTIVE if collective else ''}call {sp.calls}{raised(sp.abandoned)}: {signature.text()}"
    text += f", shards of {sp.lengths} tokens" if sp.lengths is not None else ""
    entry = sp.recorder.begin(sp.calls, signature, source, target, "process_group")
    check_signature(sp, (text,))
    call = Call(sp, signature, like, target)
    call.entry = entry
    if not call.stamped and not collective:
        call.error = _greet(sp, text, source, target)
        if call.error is not None:
            faults.report(sp, call.error)
            call.target = None
    elif not call.stamped and not sp.check_calls:  # else it has just been done
        _greet(sp, text, *sp.neighbours())
        compare_text(sp, text)
    return call


class Call:
    """One exchange under way. On CUDA every message is bytes, its stamp in front of the data.

    Attributes:
        target: where data goes; None where the neighbour there turned out to be in another call. `end` raises then,
            after what comes from the other side has been taken.
        stamped: whether messages carry the stamp, to be compared on the device.
    """

    def __init__(self, sp: Ranks, signature: Signature, like: torch.Tensor, target: int | None) -> None:
        self.sp, self.signature, self.target = sp, signature, target
        self.stamped = carries_stamp(like)
        self.word = signature.word(sp.abandoned)
        self.error: PeerMismatch | None = None
        self.entry: Entry | None = None
        self._seen: list[torch.Tensor] = []
        self._peers: list[int] = []
        self._bad: torch.Tensor | None = None  # whether one of the first `_judged` was another's
        self._judged = 0
        self._header: torch.Tensor | None = None  # of messages until another stamp comes in

    def buffer(self, like: torch.Tensor) -> torch.Tensor:
        """Zeros to receive a message in."""
        return self.buffers([like])[0]

    def buffers(self, likes: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Zeros to receive messages in, which are filled in one launch; the tensors are of one dtype."""
        if not likes:
            return []
        if not self.stamped:
            zeros = likes[0].new_zeros(sum(like.numel() for like in likes))
            parts = zeros.split([like.numel() for like in likes])
            return [part.view(like.shape) for part, like in zip(parts, likes, strict=True)]
        sizes = [like.numel() * like.element_size() for like in likes]
        sizes = [_HEADER + size + -size % _HEADER for size in sizes]
        return torch.zeros(sum(sizes), dtype=torch.uint8, device=likes[0].device).split(sizes)

    def data(self, buffer: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The tensor in a message."""
        if not self.stamped:
            return buffer.view(like.shape)
        end = _HEADER + like.numel() * like.element_size()
        return buffer[_HEADER:end].view(like.dtype).view(like.shape)

    def sealed(self, data: torch.Tensor) -> torch.Tensor:
        """The message with this tensor in it; once a wrong stamp has come in, it says so."""
        return self.all_sealed([data])[0]

    def all_sealed(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The messages with these tensors in them, which are written in one launch."""
        if not self.stamped or not tensors:
            return [data.contiguous() for data in tensors]
        if self._header is None:
            # Not `stamp[0] = self.word`, which makes the host wait for the GPU.
            stamp = torch.full((_HEADER // 8,), self.word, dtype=torch.int64, device=tensors[0].device)
            if self._seen:
                stamp.masked_fill_(self._wrong(), poison(self.sp.rank, self._peers[0]))
            self._header = stamp.view(torch.uint8)
        header, parts, sizes = self._header, [], []
        for data in tensors:
            body = data.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
            parts += [header, body, header[: -body.numel() % _HEADER]]  # of many messages, each begins aligned
            sizes.append(sum(x.numel() for x in parts[-3:]))
        return torch.cat(parts).split(sizes)

    def _wrong(self) -> torch.Tensor:
        """Whether a stamp that has come in was another's."""
        if self._judged < len(self._seen):
            new = torch.cat(self._seen[self._judged :]).ne(self.word).any()
            self._bad = new if self._bad is None else self._bad | new
            self._judged = len(self._seen)
        assert self._bad is not None
        return self._bad

    def look_at(self, buffer: torch.Tensor, peer: int) -> None:
        """Takes note of the stamp of what has arrived from ``peer``."""
        if self.stamped and peer != self.sp.rank:
            self._seen.append(buffer[:_HEADER].view(torch.int64)[:1])
            self._peers.append(peer)
            self._header = None

    def compare_on_device(self, device: torch.device) -> None:
        """For collectives on CUDA: every rank's stamp to every rank, in a message of its own."""
        if self.stamped:
            mine = torch.full((_HEADER // 8,), self.word, dtype=torch.int64, device=device).view(torch.uint8)
            for peer, stamp in enumerate(of_all_ranks(self.sp, mine)):
                self.look_at(stamp, peer)

    def end(self, result: torch.Tensor) -> torch.Tensor:
        """What the exchange gave: on CUDA NaN, and a record for `sp.check`, where a stamp was another's."""
        if self.entry is not None:
            ended(self.entry)
        if self.error is not None:
            self.sp.failure = self.error
            raise faults.explained(self.sp, self.error)
        if not self._seen:
            return result
        if self.sp.records is None:
            self.sp.records = watchdog.ErrorRecord(self.sp.device)
        bad = self._wrong()
        watchdog.note_stamps(self.sp, bad, torch.cat(self._seen), self._peers, self.word, self.signature.backward)
        return result.masked_fill(bad, float("nan")) if result.is_floating_point() else result


def carries_stamp(data: torch.Tensor) -> bool:
    """Whether messages with such data are compared on the device, not by texts before them."""
    return data.is_cuda


def _greet(sp: Ranks, text: str, source: int | None, target: int | None) -> PeerMismatch | None:
    """Tells both neighbours which call this is and compares it with theirs: PeerMismatch where the source is in another
    one. Where only the target is, the error is returned, since the source is about to send.

    Texts against the data's way are sent at once, those along it after the source's has come: a rank that disagrees
    with its source says so to its target, instead of leaving it to wait.
    """
    ours, error = _encode(text), None
    sent = post(sp, Message("send", ours, source)) if source is not None else []
    if source is not None:
        error = _differs(sp, text, source)
    if target is not None:
        sent += post(sp, Message("send", ours if error is None else _report(error), target))
    if error is not None:
        sp.failure = error
        faults.report(sp, error)
        with contextlib.suppress(PeerTimeout):
            if target is not None:
                _differs(sp, text, target)
            wait_all(sp, sent)
        raise faults.explained(sp, error)
    if target is not None:
        error = _differs(sp, text, target)
    wait_all(sp, sent)
    if error is not None and text.startswith(_COLLECTIVE):  # nothing comes from the source
        sp.failure = error
        raise faults.explained(sp, error)
    return error


def _differs(sp: Ranks, text: str, peer: int) -> PeerMismatch | None:
    """The error where the text that a neighbour sends is another. Collectives are left to `compare_text`."""
    theirs = torch.empty(_TEXT_BYTES, dtype=torch.uint8, device="cpu")
    wait_all(sp, post(sp, Message("recv", theirs, peer)))
    said = _decode(theirs)
    both = said.startswith(_COLLECTIVE) and text.startswith(_COLLECTIVE)
    if both or torch.equal(theirs, _encode(text)):
        return None
    if not said.startswith(_FAILED.decode()):
        return PeerMismatch(sp.rank, peer, text, said)
    about, what = said[1:].split(":", 1)
    error = PeerMismatch(sp.rank, int(about), text, f"{what} (reported by rank {peer})")
    error.heard = True
    return error


def _report(error: PeerMismatch) -> torch.Tensor:
    return _encode(f"{_FAILED.decode()}{error.peer}:{error.theirs}")
