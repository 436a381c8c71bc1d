"""From torchrun to a SequenceParallel.

docs/use.md has the table of environment variables. RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are
torchrun's; LOCAL_RANK chooses the CUDA device.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from flexsp.comm.group import SequenceParallel
from flexsp.comm.transport import PROCESS_GROUP, in_kernel, open_further, transport_of, transports
from flexsp.exceptions import NotAvailable, PeerMismatch, PeerTimeout, check_integer, checks_wanted
from flexsp.launch.termination import dump_when_ended
from flexsp.log import logs, tell
from flexsp.scan.cost import quicker
from flexsp.scan.schedules import SCHEDULES

__all__ = ["init_sequence_parallel"]

_TRIAL_S = 30.0
_SEGMENT = 1024  # tokens, with bitwise
_FIRST_MIB = 256  # of a heap, which may grow where nobody gave its size


def init_sequence_parallel(
    group: dist.ProcessGroup | DeviceMesh | None = None,
    transport: str = "auto",
    heap_mib: int | None = None,
    schedule: str | None = None,
    timeout_s: float | None = None,
    device: torch.device | str | None = None,
    bitwise: bool | int = False,
) -> SequenceParallel:
    """Make the group that a sequence is cut over. Collective over the default process group.

    Every rank of the world calls it, each with the group it belongs to (on a (dp, sp) mesh: ``mesh["sp"]``). Starts
    torch.distributed from torchrun's environment, with the same timeout, if the caller has not; without torchrun
    there is one rank.

    Args:
        group: None (all ranks), a ProcessGroup, or a one-dimensional DeviceMesh.
        transport: "process_group" (torch.distributed), "peer" (stores to the neighbour's memory, one host), "put"
            (NVSHMEM put, across hosts), "posix" (shared memory between CPU processes), one that was registered, or
            "auto". On CUDA that is "peer" if every rank's memory can be mapped here; else "put", if its device library
            is there and a small state has arrived everywhere by it; else "process_group", with a warning that says why.
            On the CPU it is "process_group".
        heap_mib: symmetric memory of each rank in MiB, default FLEXSP_HEAP_MIB. It then keeps this size. Without either
            it begins with 256 and grows in calls whose states need more, for which the ranks' hosts wait for each
            other; a captured graph keeps the memory that it was captured with. Where NVSHMEM gives the memory and the
            group is a part of the world, it does not grow.
        schedule: "chain" (default); "hierarchical", for many hosts, by torch.distributed in any case; "auto",
            that one of the two which `flexsp.scan.cost` expects to be quicker, on one host always "chain"; or a
            baseline: "serial", "pipelined", "all_gather".
        timeout_s: seconds until a silent peer ends in `PeerTimeout`, default FLEXSP_TIMEOUT_S or 120. A rank that
            compiles kernels is silent meanwhile.
        device: where this rank computes; default cuda:LOCAL_RANK if there is CUDA, else the CPU.
        bitwise: ops, layers and models in `SequenceParallelLA` give the same bits for any number of ranks: outputs,
            final states and gradients. Sequences are cut into segments of 1024 tokens, or of as many as this says, and
            states go through one after the other. Shards must be whole segments, but for the end of the sequence. Ranks
            take longer then; what cannot keep its bits, such as softmax attention, raises NotAvailable
            (docs/same-bits.md).

    Raises:
        ValueError: an unknown transport or schedule, another schedule than "chain" with ``bitwise``, a mesh with
            several dimensions, a group without this rank.
        NotAvailable: the transport asked for does not work here.
        PeerMismatch: the ranks called it with different settings, or their groups overlap.
    """
    schedule = "chain" if schedule is None else schedule
    _choice("transport", transport, ("auto", *transports()))
    _choice("schedule", schedule, (*SCHEDULES, "auto"))
    timeout_s = _positive("timeout_s", timeout_s, "FLEXSP_TIMEOUT_S", 120.0)
    if heap_mib is not None or "FLEXSP_HEAP_MIB" in os.environ:
        heap_mib = int(_positive("heap_mib", heap_mib, "FLEXSP_HEAP_MIB", _FIRST_MIB))
    segment = _segment(bitwise, schedule)
    where = _device(device)
    check_calls, per_host = checks_wanted(), _ranks_per_host()
    try:
        _start_distributed(where, timeout_s)
        if not dist.is_initialized():
            alone = "chain" if schedule == "auto" else schedule
            sp = SequenceParallel(
                device=where, schedule=alone, timeout_s=timeout_s, check_calls=check_calls, segment=segment
            )
            _tell_of(sp)
            return sp
        settings = (transport, schedule, segment, timeout_s, heap_mib, where.type, check_calls, per_host)
        everyone, machines = _agree(_members(group), settings)
        data_group, cpu_group = _make_groups(everyone, where, timeout_s)
        if cpu_group is not None:  # without it a rank might go on and exit while others still connect to it
            dist.barrier(group=cpu_group)
    except (ValueError, PeerMismatch):
        raise
    except RuntimeError as error:
        from flexsp.comm.process_group import lost_peer

        if not lost_peer(error):
            raise
        me = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
        detail = str(error).splitlines()[0]
        raise PeerTimeout(me, None, direction="init_sequence_parallel", detail=detail) from error
    ranks = everyone[dist.get_rank()]
    sp = SequenceParallel(
        rank=ranks.index(dist.get_rank()), world_size=len(ranks), global_ranks=ranks, group=data_group,
        cpu_group=cpu_group, device=where, schedule="chain" if schedule == "auto" else schedule, timeout_s=timeout_s,
        check_calls=check_calls, hosts=_hosts([machines[r] for r in ranks], per_host), segment=segment,
    )  # fmt: skip
    dump_when_ended()
    if max(len(members) for members in everyone) > 1:
        _take_transport(sp, transport, heap_mib)
    if schedule == "auto":
        sp.schedule = quicker(sp.hosts, in_kernel(sp))
    if where.type == "cuda" and data_group is not None:
        # NCCL builds its communicator here, while all ranks are present. If a first send built it, that send would wait
        # for ranks that have no part in it.
        dist.all_reduce(torch.zeros(1, device=where), group=data_group)
    _tell_of(sp)
    return sp


def _tell_of(sp: SequenceParallel) -> None:
    """Logs how the ranks of a group are joined: at INFO on the first of them, at DEBUG on the others."""
    level = logging.INFO if sp.is_first else logging.DEBUG
    if not logs(level):
        return
    if sp.world_size == 1:
        tell(level, f"ranks: one, on {sp.device}; no transport")
        return
    hosts = len(sp.hosts)
    heap = f", symmetric memory of {sp.heap.nbytes >> 20} MiB a rank" if sp.heap is not None else ""
    tell(
        level,
        f"ranks: {sp.rank} of {sp.world_size} on {hosts} host{'s' * (hosts > 1)}, here {sp.device}; transport "
        f"{sp.transport}, schedule {sp.schedule}{heap}, timeout {sp.timeout_s:g} s",
    )


def _choice(name: str, got: str, choices: tuple[str, ...]) -> None:
    if got not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {got!r}")


def _positive(name: str, given: float | None, variable: str, default: float) -> float:
    raw = given if given is not None else os.environ.get(variable, default)
    try:
        value = -1.0 if isinstance(raw, bool) else float(raw)
    except (TypeError, ValueError):
        value = -1.0
    if not 0 < value < float("inf"):
        raise ValueError(f"{name if given is not None else variable}: expected a number > 0, got {raw!r}")
    return value


def _segment(bitwise: bool | int, schedule: str) -> int:
    """Tokens of a segment, 0 without ``bitwise``."""
    if bitwise is False:
        return 0
    segment = _SEGMENT if bitwise is True else check_integer("bitwise", bitwise, least=1)
    if schedule != "chain":
        raise ValueError(f"schedule: expected 'chain' with bitwise, whose order of sums is that one; got {schedule!r}")
    return segment


def _ranks_per_host() -> int | None:
    given = os.environ.get("FLEXSP_RANKS_PER_HOST", "")
    if given and not (given.isdecimal() and int(given)):
        raise ValueError(f"FLEXSP_RANKS_PER_HOST: expected an integer > 0 or nothing, got {given!r}")
    return int(given) if given else None


def _machine() -> str:
    """A text that the ranks of one host share: its name and its start, as two hosts may have one name."""
    start = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {start.read_text().strip() if start.exists() else ''}"


def _hosts(machines: list[str], per_host: int | None) -> tuple[int, ...]:
    """How many ranks stand on each host: `per_host`, or as many as have the same name in `machines`."""
    if per_host is not None:
        return tuple(min(per_host, len(machines) - start) for start in range(0, len(machines), per_host))
    return tuple(len(list(ranks)) for _, ranks in itertools.groupby(machines))


def _device(device: torch.device | str | None) -> torch.device:
    try:
        where = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device: expected one such as 'cpu' or 'cuda:0', got {device!r}") from error
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"device: expected the CPU or a CUDA device, got {device!r}")
    if where.type == "cuda":
        if ":" not in str(where):
            where = torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))
        torch.cuda.set_device(where)
    return where


def _start_distributed(where: torch.device, timeout_s: float) -> None:
    if dist.is_initialized() or "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return
    backend = "cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))


def _members(group: dist.ProcessGroup | DeviceMesh | None) -> list[int]:
    """Global ranks of the group in the order of the sequence."""
    if group is not None and not isinstance(group, (DeviceMesh, dist.ProcessGroup)):
        raise ValueError(f"group: expected a ProcessGroup, a DeviceMesh or None, got {type(group).__name__}")
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names or ()
            raise ValueError(
                f"group: expected a one-dimensional DeviceMesh such as mesh['sp'], got dimensions {names or group.ndim}"
            )
        group = group.get_group()
    ranks = list(range(dist.get_world_size())) if group is None else dist.get_process_group_ranks(group)
    if dist.get_rank() not in ranks:
        raise ValueError(f"group: expected a group that contains this rank {dist.get_rank()}, got ranks {ranks}")
    return ranks


def _agree(ranks: list[int], settings: tuple[Any, ...]) -> tuple[list[list[int]], list[str]]:
    """The member list and the host of every rank of the world, once all ranks are seen to want the same thing."""
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, (ranks, settings, _machine()))
    me = dist.get_rank()
    for peer, (theirs, their_settings, _) in enumerate(rows):
        if their_settings != settings or (peer in ranks and theirs != ranks):
            ours = f"init_sequence_parallel on ranks {ranks} with {settings}"
            raise PeerMismatch(me, peer, ours, f"it on ranks {theirs} with {their_settings}")
    return [row[0] for row in rows], [row[2] for row in rows]


def _make_groups(
    everyone: list[list[int]], where: torch.device, timeout_s: float
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """The data group and the gloo group of this rank. Every rank of the world takes part in making every group."""
    timeout = timedelta(seconds=timeout_s)
    mine: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None] = (None, None)
    if all(len(members) == 1 for members in everyone):
        return mine
    for ranks in sorted({tuple(members) for members in everyone}):
        data = dist.new_group(list(ranks), timeout=timeout, backend="nccl" if where.type == "cuda" else "gloo")
        cpu = dist.new_group(list(ranks), timeout=timeout, backend="gloo")
        if dist.get_rank() in ranks:
            mine = (data, cpu)
    return mine


def _take_transport(sp: SequenceParallel, transport: str, heap_mib: int | None) -> None:
    """Takes the transport and sets aside the symmetric memory that it needs, on all ranks or on none."""
    if transport == "auto" and sp.device.type != "cuda":
        transport = PROCESS_GROUP
    chosen = transport_of("peer" if transport == "auto" else transport)
    grows = heap_mib is None and (sp.world_size == dist.get_world_size() or not chosen.of_world)
    nbytes = (_FIRST_MIB if heap_mib is None else heap_mib) << 20
    heap, problem, near, of_put = None, "", False, ""
    try:
        if chosen.device not in (sp.device.type, "any"):
            memory, others = ("GPU", "; CPU ranks have 'posix'") if chosen.device == "cuda" else ("CPU", "")
            raise NotAvailable(f"it moves {memory} memory and this rank computes on {sp.device}{others}")
        assert sp.cpu_group is not None
        heap = chosen.open_heap(
            nbytes, rank=sp.rank, global_ranks=sp.global_ranks, cpu_group=sp.cpu_group, device=sp.device
        )
        if heap is not None and transport == "auto":
            near = all(heap.reaches(r) for r in range(sp.world_size))
            of_put = transport_of("put").problem(heap, sp.world_size)
        elif heap is not None:
            problem = chosen.problem(heap, sp.world_size)
    except Exception as error:  # whatever it is, the other ranks are waiting to hear of it
        problem = f"{type(error).__name__}: {error}"
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, (problem, near, of_put))
    problems = [text for text, _, _ in reports]
    name = transport
    if transport == "auto":
        name = "peer" if all(near for _, near, _ in reports) else "put"
        if name == "put" and not any(problems):
            problems = [text for _, _, text in reports]
    if not any(problems):
        sp.heap, sp.transport = heap, name
        sp.open_heap = partial(open_further, sp, chosen) if grows and heap is not None else None
        if transport != "auto" or name != "put":
            return
        dist.all_gather_object(problems, _trial(sp))
        if not any(problems):
            return
        sp.heap, sp.open_heap, sp.transport = None, None, PROCESS_GROUP
        sp.start_anew()
    if heap is not None:
        heap.close()
    report = "; ".join(f"rank {r}: {text}" for r, text in enumerate(problems) if text)
    if transport != "auto":
        raise NotAvailable(f"transport {transport!r} does not work here ({report})")
    lacks = "no transport between these hosts but" if name == "put" else "no symmetric heap, states go over"
    tell(logging.INFO, f"fallback: {lacks} torch.distributed ({report})")
    if dist.get_rank() == 0:
        warnings.warn(f"flexsp: {lacks} torch.distributed ({report})", stacklevel=3)


def _trial(sp: SequenceParallel) -> str:
    """Sends one small state along the ranks and one back, as calls will do; what went wrong, or "".

    NVSHMEM says that a rank is there before a message has reached it: only a message shows that the network cards and
    the device library work. A rank that hears nothing gives up well before the others, which wait for its answer.
    """
    from flexsp.scan.propagate import propagate
    from flexsp.scan.transitions import Transition

    patience, sp.timeout_s = sp.timeout_s, min(_TRIAL_S, sp.timeout_s / 4)
    try:
        for reverse in (False, True):
            states = torch.full((1, 2, 1, 16, 16), 1.0, device=sp.device)
            propagate(states, Transition("none"), sp, reverse=reverse, call="the trial of a transport")
            gone = states[0, 0 if reverse else -1, 0]
            want = float(1 + (sp.world_size - sp.rank if reverse else sp.rank + 1))
            if not bool((gone == want).all()):
                sp.check()
                return f"a state arrived as {gone.flatten()[0].item():g}, which should be {want:g}"
            sp.check()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        sp.timeout_s = patience
    return ""
