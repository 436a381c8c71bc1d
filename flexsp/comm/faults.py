"""After a fault: ranks tell each other what they met, so that every rank's error names the same rank and exchange.

A rank that waits for another one sees no further than that one. If rank 2 of 4 stops, rank 1 waits for it, and rank 0
for rank 1. So each rank that gives up puts a report into the store of torch.distributed: whom it waited for, in which
call. Then it follows the reports from rank to rank: the rank at their end, which has made none, is where the trouble
began. Where ranks made different calls, those of most ranks are right. The first rank that comes to an end puts its
verdict into the store, and the others take it over.

Nothing here runs before a fault. A rank whose store is gone goes by what it has seen itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import torch.distributed as dist

from flexsp.comm.recorder import as_text, digest_of, hop_of, number_of
from flexsp.comm.root_cause import record_root_cause
from flexsp.exceptions import BetweenRanks, Fault, PeerMismatch, PeerTimeout

__all__ = ["among_texts", "explained", "report", "trace"]

SILENT, CLOSED, MISMATCH, CIRCLE = "silent", "closed", "mismatch", "circle"
_E = TypeVar("_E", bound=BetweenRanks)
Report = dict[str, Any]
_BROKEN_S = 1.0  # for the report of a rank that broke off, which it made before
_SHARE, _LEAST_S = 0.25, 3.0  # of the timeout, for reports of ranks that began to wait later
_MOST_S = 5.0  # a job should end within 10 s of the first error
_STORE_S = 5.0  # for a store that does not answer
_POLL_S = 0.05
_CLOSED = re.compile(r"closed|reset|broken pipe|refused", re.IGNORECASE)


def report(sp: Any, error: BetweenRanks) -> bool:
    """Tells the other ranks what this one met; the first time only. Whether the store answered. `sp` is a `Ranks`."""
    if sp.reported is not None:
        return True
    sp.reported = _report_of(sp, error)
    store = _store()
    return store is not None and _in_time(lambda: _put(store, sp.store_key, sp.reported), _STORE_S) is not None


def explained(sp: Any, error: _E) -> _E:
    """The error, once it says which exchange this rank was in, where the trouble began, and which file has more.

    It waits for the reports of other ranks, some seconds at most.
    """
    if error.explained:
        return error
    error.explained = True
    error.call = _entry_of(sp, error)[1]
    _dump(sp, error)  # now, since who started the ranks may end them before the others have reported
    answers = report(sp, error)
    found = trace({sp.rank: sp.reported}, sp.rank, sp.world_size)[0]
    if answers and (store := _store()) is not None and sp.world_size > 1:
        patience = _BROKEN_S if sp.reported["closed"] else max(_LEAST_S, _SHARE * sp.timeout_s)
        patience = min(patience, _MOST_S)
        told = _in_time(lambda: _agreed(sp, store, patience), patience + _STORE_S)
        found = found if told is None else told
    error.fault = found
    _dump(sp, error)
    record_root_cause(sp, error)
    return error


def among_texts(sp: Any, error: PeerMismatch, texts: Sequence[str]) -> PeerMismatch:
    """The error of a rank that knows what every rank was about to do, and need ask none."""
    error.explained = True
    entry = sp.recorder.last()
    error.call = as_text(entry)
    odd = max(range(len(texts)), key=lambda rank: (-texts.count(texts[rank]), rank))
    other = next(rank for rank, text in enumerate(texts) if text != texts[odd])
    text = f"rank {odd} made another call than rank {other}: {texts[odd]}; rank {other} {texts[other]}"
    error.fault = Fault(MISMATCH, odd, number_of(entry), texts[other], None, text)
    _dump(sp, error)
    record_root_cause(sp, error)
    return error


def _waited(error: BetweenRanks) -> bool:
    """Whether this rank waited until its time was over: then others may still do so."""
    return isinstance(error, PeerTimeout) and not _CLOSED.search(error.detail)


def _dump(sp: Any, error: BetweenRanks) -> None:
    folder = os.environ.get("FLEXSP_DUMP", "")
    if folder:
        try:
            error.dumped = str(sp.dump(folder, error))
        except OSError as problem:
            warnings.warn(f"FLEXSP_DUMP: {problem}", stacklevel=2)


def _entry_of(sp: Any, error: BetweenRanks) -> tuple[Any, str]:
    """The exchange that an error is about and what errors say of it."""
    recorder = sp.recorder
    entry = recorder.of_number(error.number) if error.number else None
    if entry is None and error.word:
        entry = recorder.of_word(error.word)
    if entry is None and not error.number:
        entry = recorder.last()
    text = as_text(entry) or (f"call {error.number}" if error.number else "")
    hop = hop_of(entry, sp.rank, error.peer) if isinstance(error, (PeerTimeout, PeerMismatch)) else None
    return entry, text + _of_hop(hop)


def _of_hop(hop: Any) -> str:
    return "" if hop is None else f", hop {hop[0]} -> {hop[1]}"


def _report_of(sp: Any, error: BetweenRanks) -> Report:
    assert isinstance(error, (PeerTimeout, PeerMismatch))
    entry, _ = _entry_of(sp, error)
    hop = hop_of(entry, sp.rank, error.peer)
    return {
        "rank": sp.rank, "peer": error.peer, "mismatch": isinstance(error, PeerMismatch), "heard": error.heard,
        "closed": isinstance(error, PeerTimeout) and not _waited(error),
        "number": error.number or number_of(entry), "call": as_text(entry), "digest": digest_of(entry),
        "hop": None if hop is None else list(hop), "abandoned": sp.abandoned, "calls": sp.recorder.digests(),
        "theirs": str(getattr(error, "theirs", "")),
    }  # fmt: skip


# The store ------------------------------------------------------------------------------------------------------------


def _store() -> Any:
    if not dist.is_initialized():
        return None
    try:
        return dist.distributed_c10d._get_default_store()
    except Exception:  # a private name
        return None


_R = TypeVar("_R")


def _in_time(work: Callable[[], _R], seconds: float) -> _R | None:
    """What `work` returns, None where it fails or takes longer: the rank that died may be the one with the store."""
    found: list[_R] = []

    def run() -> None:
        with contextlib.suppress(Exception):  # whatever a store says when its server is gone
            found.append(work())

    thread = threading.Thread(target=run, daemon=True, name="flexsp-faults")
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


def _put(store: Any, key: str, mine: Report) -> bool:
    store.set(f"{key}/report/{store.add(f'{key}/reports', 1)}", json.dumps(mine))
    store.check([key])  # set does not wait for the server
    return True


def _agreed(sp: Any, store: Any, patience: float) -> Fault | None:
    """What the ranks agree on, once it is certain, else after `patience` seconds."""
    key, reports, read = sp.store_key, {sp.rank: sp.reported}, set[int]()
    deadline = time.monotonic() + patience
    while True:
        _read(store, key, reports, read)
        verdict = _verdict(store, key)
        start = sp.rank if verdict is None else verdict.rank
        fault, certain = trace(reports, start, sp.world_size, verdict)
        if certain or time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    if fault is None or fault == verdict:
        return fault
    before = "" if verdict is None else json.dumps(asdict(verdict))
    kept = store.compare_set(f"{key}/verdict", before, json.dumps(asdict(fault)))
    return _fault_of(json.loads(kept))


def _read(store: Any, key: str, reports: dict[int, Report], read: set[int]) -> None:
    """Adds the reports that are not among those `read`."""
    for index in range(1, int(store.add(f"{key}/reports", 0)) + 1):
        if index not in read and store.check([f"{key}/report/{index}"]):
            read.add(index)
            found = json.loads(store.get(f"{key}/report/{index}"))
            reports[found["rank"]] = found


def _verdict(store: Any, key: str) -> Fault | None:
    return _fault_of(json.loads(store.get(f"{key}/verdict"))) if store.check([f"{key}/verdict"]) else None


def _fault_of(row: dict[str, Any]) -> Fault:
    return Fault(**row | {"hop": _pair(row["hop"])})


def _pair(hop: Any) -> tuple[int, int] | None:
    return None if hop is None else (hop[0], hop[1])


# Who it was -----------------------------------------------------------------------------------------------------------


def trace(
    reports: Mapping[int, Report], start: int, world_size: int, verdict: Fault | None = None
) -> tuple[Fault | None, bool]:
    """Follows reports from rank `start` to where the trouble began; and whether later reports can change nothing.

    `verdict` is what ranks have agreed on before, from whose rank the search starts. It stays unless that rank has
    itself reported another one. A rank that was only late has reported one that waited for it, in the same call; of
    ranks that wait for each other in different calls the one that fewest others agree with is the fault.
    """
    path: list[int] = []
    at: int | None = start
    while at is not None and at in reports and at not in path:
        path.append(at)
        row = reports[at]
        if row["mismatch"] and verdict is not None and verdict.kind == MISMATCH:
            return verdict, True
        at = row["peer"] if row["peer"] is not None else _instead(reports, path, world_size)
        # What a rank has only heard leads to the rank that it heard of, as long as that one says more.
        if row["mismatch"] and (not row["heard"] or at not in reports or at in path):
            return _dispute(reports, row["rank"], at, world_size)
    complete = len(reports) == world_size
    if at is not None and at in path and (verdict is None or verdict.kind != CIRCLE):
        fault, decided = _circle(reports, path[path.index(at) :])
        if decided or verdict is None:
            return fault, complete
    if verdict is not None and (at is None or at in path or at == verdict.rank):
        return verdict, True
    if at is None:
        return None, False
    by = _first_hand(reports, at)
    kind, said = (CLOSED, "broke off its connection to") if by["closed"] else (SILENT, "did not answer")
    text = f"rank {at} {said} rank {by['rank']} in {by['call'] or 'a call'}{_of_hop(by['hop'])}"
    fault = Fault(kind, at, by["number"], by["call"], _pair(by["hop"]), text)
    made, same = _made(reports, by)  # else the rank may wait for one of the others, in the call that these did not make
    return fault, len(reports) == world_size - 1 and made == same


def _instead(reports: Mapping[int, Report], path: list[int], world_size: int) -> int | None:
    """Where to go on from a rank that waited for all others and does not know for whom."""
    known = [row for row in reports.values() if row["peer"] is not None and row["rank"] not in path]
    if known:
        return min(known, key=lambda row: (row["number"], row["rank"]))["rank"]
    silent = [rank for rank in range(world_size) if rank not in reports]
    return silent[0] if len(silent) == 1 else None


def _first_hand(reports: Mapping[int, Report], rank: int) -> Report:
    """The earliest report about a rank, by one that met it itself if there is such."""
    about = [row for row in reports.values() if row["peer"] == rank] or [*reports.values()]
    return min(about, key=lambda row: (row["heard"], row["number"], row["rank"]))


def _dispute(reports: Mapping[int, Report], a: int, b: int | None, world_size: int) -> tuple[Fault | None, bool]:
    """Of rank `a`, which reports that `b` made another call, and `b`: the one that fewer others agree with."""
    if b is None:
        return None, False
    first, second = reports[a], reports.get(b)
    number, (there, same) = first["number"], _made(reports, first)
    reached = second is not None and any(n >= number for n, _ in second["calls"])
    votes = {a: same, b: there - same + (not reached)}
    odd = max((a, b), key=lambda rank: (-votes[rank], _gave_up(reports, rank), rank))
    other = a if odd == b else b
    same = second is not None and second["number"] == number and not second["heard"]
    calls = {a: first["call"], b: second["call"] if second is not None and same else first["theirs"] or "another call"}
    hops = [row["hop"] for row in (reports.get(other), first, second) if row is not None and row["peer"] in (a, b)]
    hop = next((hop for hop in hops if hop is not None), None)  # as the rank sees it that is not the odd one
    if votes[a] == votes[b] and _gave_up(reports, a) == _gave_up(reports, b):
        low, high = sorted((a, b))
        text = f"ranks {low} and {high} made different calls: rank {low} {calls[low]}; rank {high} {calls[high]}"
    else:
        text = f"rank {odd} made another call than rank {other}: {calls[odd]}; rank {other} {calls[other]}"
    certain = len(reports) == world_size or abs(votes[a] - votes[b]) > world_size - len(reports)
    return Fault(MISMATCH, odd, number, calls[other], _pair(hop), text + _of_hop(hop)), certain


def _made(reports: Mapping[int, Report], by: Report) -> tuple[int, int]:
    """How many ranks have made a call of the number that a report is about, and how many the same one."""
    call = [by["number"], by["digest"]]
    there = [row for row in reports.values() if any(number >= by["number"] for number, _ in row["calls"])]
    return len(there), sum(call in row["calls"] for row in there)


def _votes(reports: Mapping[int, Report], rank: int) -> int:
    """How many ranks made the call that a rank was in, itself included."""
    mine = reports[rank]
    return sum([mine["number"], mine["digest"]] in row["calls"] for row in reports.values())


def _gave_up(reports: Mapping[int, Report], rank: int) -> int:
    """Calls that errors ended on a rank before."""
    return reports[rank]["abandoned"] if rank in reports else 0


def _circle(reports: Mapping[int, Report], ranks: list[int]) -> tuple[Fault, bool]:
    """Of ranks that wait for each other, the one whose call fewest others made; and whether that decides it."""
    votes = {rank: _votes(reports, rank) for rank in ranks}
    odd = min(ranks, key=lambda rank: (votes[rank], -_gave_up(reports, rank), -rank))
    row = reports[min((rank for rank in ranks if rank != odd), default=odd)]
    rows = [reports[rank] for rank in sorted(ranks)]
    said = "; ".join(f"rank {x['rank']} for rank {x['peer']} in {x['call']}" for x in rows)
    fault = Fault(CIRCLE, odd, row["number"], row["call"], _pair(row["hop"]), f"ranks wait for each other: {said}")
    return fault, [*votes.values()].count(votes[odd]) == 1
