"""Run a function on several ranks from a test: a pool of processes that stays up, or in place under torchrun."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["RankFailure", "close_pools", "run_ranks"]

_GRACE_S = 5.0
_START_S = 120.0
_Key = tuple[int, str, tuple[tuple[str, str], ...]]


class RankFailure(RuntimeError):
    """A rank raised or did not answer. ``rank`` is the first one; its exception, if it has one, is the cause."""

    def __init__(self, rank: int, text: str) -> None:
        self.rank = rank
        super().__init__(text)


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    transport: str = "process_group",
    schedule: str | None = None,
    heap_mib: int | None = None,
    bitwise: bool | int = False,
    device: str = "cpu",
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    sp_timeout_s: float | None = None,
    fresh_sp: bool = False,
    whole_world: bool = False,
    own_processes: bool = False,
) -> list[Any]:
    """Call ``fn(sp, *args)`` on ``world_size`` ranks at once and return their results in rank order.

    ``fn`` must be importable (defined at the top level of a module); arguments and results are pickled, tensors come
    back detached. Processes stay up between calls, one pool for each (world_size, device, env); every call gets a
    SequenceParallel with the given transport, schedule, heap and timeout, made once for each combination unless
    ``fresh_sp``. Its lengths are unset at the start of a call, and torch is seeded as in the caller: ranks draw alike.

    Under torchrun (WORLD_SIZE set) the function runs in place with rank 0's arguments, on the first ``world_size``
    ranks, and every rank gets all results; where the world is too small or ``env`` differs, the test is skipped.

    Args:
        env: environment variables of the pool, for example {"TRITON_INTERPRET": "1", "FLEXSP_BACKEND": "triton"}.
        timeout: seconds for the whole call; past it the pool is killed.
        own_processes: the call has processes to itself, which end with it: for what leaves other values in modules
            or a group that no longer works. Under torchrun the test is skipped.
        whole_world: ``fn`` talks over the default process group, so under torchrun the world must have this size.

    Raises:
        RankFailure: with the tracebacks of all failed ranks, from the first one's exception. The pool is torn down.
    """
    settings = {
        "transport": transport,
        "schedule": schedule,
        "heap_mib": heap_mib,
        "bitwise": bitwise,
        "timeout_s": timeout if sp_timeout_s is None else sp_timeout_s,
        "device": device,
    }
    env = dict(env or {})
    if "WORLD_SIZE" in os.environ:
        return _run_in_place(fn, world_size, args, settings, env, fresh_sp, whole_world, own_processes)
    if own_processes:
        own = _Pool(world_size, device, env)
        try:
            return own.run(fn, args, settings, fresh_sp, timeout)
        finally:
            own.kill()
    key: _Key = (world_size, device, tuple(sorted(env.items())))
    pool = _pools.get(key)
    if pool is None:
        pool = _pools[key] = _Pool(world_size, device, env)
    try:
        return pool.run(fn, args, settings, fresh_sp, timeout)
    except BaseException:
        _pools.pop(key).kill()
        raise


def close_pools() -> None:
    """End the processes of all pools."""
    while _pools:
        _pools.popitem()[1].close()
    while _origins:
        _origins.popitem()[1].close()


class _Origin:
    """A process with its own environment that has imported flexsp once and started no threads: ranks are its forks."""

    def __init__(self, env: dict[str, str]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed"])
        self.channel, there = context.Pipe()
        names = {"env": env, "channel": there}
        self.process = context.Process(target=exec, args=(_ORIGIN, names), daemon=True)
        self.process.start()
        there.close()

    def fork(self, pipe: Connection, *args: Any) -> int:
        """The id of a new process that runs ``_serve(pipe, *args)``; it alone holds that end of the pipe."""
        self.channel.send(args)
        send_handle(self.channel, pipe.fileno(), self.process.pid)
        pipe.close()
        return self.channel.recv()

    def end(self, pids: list[int], grace: float) -> None:
        """Wait for processes to end, and kill those that have not after ``grace`` seconds."""
        with contextlib.suppress(EOFError, OSError):
            self.channel.send((pids, grace))
            self.channel.recv()

    def close(self) -> None:
        self.channel.close()
        self.process.join(timeout=_GRACE_S)


class _Pool:
    """Processes of one default process group, waiting for tasks on pipes.

    On the CPU they are stopped between tasks: the threads of gloo's groups wake up a hundred times a second each.
    """

    def __init__(self, world_size: int, device: str, env: dict[str, str]) -> None:
        at_import = {name: value for name, value in env.items() if name in _READ_AT_IMPORT}
        key = tuple(sorted(at_import.items()))
        if key not in _origins or not _origins[key].process.is_alive():
            _origins[key] = _Origin(at_import)
        self.origin = _origins[key]
        self.folder = tempfile.mkdtemp(prefix="flexsp-ranks-")
        self.pipes: list[Connection] = []
        self.pids: list[int] = []
        for rank in range(world_size):
            here, there = multiprocessing.Pipe()
            self.pids.append(self.origin.fork(there, rank, world_size, self.folder, device, env))
            self.pipes.append(here)
        self.started = False
        self.pauses = device == "cpu"

    def run(
        self, fn: Callable[..., Any], args: tuple[Any, ...], settings: dict[str, Any], fresh: bool, timeout: float
    ) -> list[Any]:
        self._signal(signal.SIGCONT)
        results = self._run(fn, args, settings, fresh, timeout)
        if self.pauses:
            self._signal(signal.SIGSTOP)
        return results

    def _signal(self, number: int) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _run(
        self, fn: Callable[..., Any], args: tuple[Any, ...], settings: dict[str, Any], fresh: bool, timeout: float
    ) -> list[Any]:
        task = (list(sys.path), pickle.dumps((fn, args)), settings, fresh, torch.initial_seed())
        for pipe in self.pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send(task)
        deadline = time.monotonic() + timeout + (0.0 if self.started else _START_S)
        answers: dict[int, tuple[bool, Any]] = {}
        while len(answers) < len(self.pipes):
            waiting = [pipe for rank, pipe in enumerate(self.pipes) if rank not in answers]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank, pipe in enumerate(self.pipes):
                if pipe not in ready:
                    continue
                answers[rank] = _receive(pipe)
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        _raise_failures(answers, len(self.pipes), timeout)
        self.started = True
        return [answers[rank][1] for rank in range(len(self.pipes))]

    def kill(self) -> None:
        self._end(0.0)

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        self._end(_GRACE_S)

    def _end(self, grace: float) -> None:
        self.origin.end(self.pids, grace)
        for pipe in self.pipes:
            pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _receive(pipe: Connection) -> tuple[bool, Any]:
    try:
        ok, payload = pipe.recv()
        return (True, pickle.loads(payload)) if ok else (False, payload)
    except (EOFError, OSError):
        return False, ("the process ended without an answer", None)


def _raise_failures(answers: dict[int, tuple[bool, Any]], world_size: int, timeout: float) -> None:
    failed = [rank for rank, (ok, _) in answers.items() if not ok]
    missing = [rank for rank in range(world_size) if rank not in answers]
    if not failed and not missing:
        return
    parts = [f"rank {rank} failed:\n{answers[rank][1][0]}" for rank in failed]
    if missing:
        after = f"{_GRACE_S:g} s after the first failure" if failed else f"within {timeout:g} s"
        parts.append(f"no answer from ranks {missing} {after}")
    cause = None
    if failed and answers[failed[0]][1][1] is not None:
        with contextlib.suppress(Exception):
            cause = pickle.loads(answers[failed[0]][1][1])
    raise RankFailure((failed + missing)[0], "\n".join(parts)) from cause


# The environment comes first: importing flexsp may import triton, which reads TRITON_INTERPRET once and for all. Other
# variables are set in the ranks, so that pools with different ones have one origin.
_READ_AT_IMPORT = ("TRITON_INTERPRET",)
_ORIGIN = """
import os
os.environ.update(env)
from flexsp.testing.ranks import _fork_ranks
_fork_ranks(channel)
"""


# What each rank would import itself. Deterministic algorithms, which fill fresh memory with NaN, import inductor.
_FOR_KERNELS = (
    "flexsp.compiler.backend.generated_kernels", "flexsp.kernels.delta.calls", "flexsp.kernels.diagonal.diagonal_plan",
    "flexsp.scan.propagate", "torch._inductor.config",
)  # fmt: skip


def _fork_ranks(channel: Connection) -> None:
    """Body of an origin: forks ranks and ends them, as asked, until there is nobody to ask."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    slow_to_import = _FOR_KERNELS if interpreted else ("torch._dynamo",)
    for name in ("flexsp.launch.bootstrap", "flexsp.compiler", "flexsp.ops", *slow_to_import):
        importlib.import_module(name)
    if interpreted:
        _make_launches_small()
    gc.freeze()  # the garbage collector of a rank need not look at all that was imported, again and again
    gc.set_threshold(20_000, 20, 20)
    children: set[int] = set()
    while True:
        try:
            asked = channel.recv()
        except EOFError:  # a stopped child does not notice that its pipe was closed
            _end(list(children), 0.0)
            os._exit(0)
        if isinstance(asked[0], list):
            _end(*asked)
            children -= set(asked[0])
            channel.send(None)
            continue
        handle = recv_handle(channel)
        pid = os.fork()
        if pid == 0:
            channel.close()
            _serve(Connection(handle), *asked)
        os.close(handle)
        children.add(pid)
        channel.send(pid)


def _make_launches_small() -> None:
    """Few programs and small blocks where a launch is as large as a GPU: the interpreter runs all of its programs, one
    after another, also those that find nothing to do."""
    tail = importlib.import_module("flexsp.kernels.tail")
    tail._PROGRAMS, tail._BLOCK = 2, 64  # type: ignore[attr-defined]


def _end(pids: list[int], grace: float) -> None:
    """These children are not waited for elsewhere, so that no id is another process's by now."""
    deadline = time.monotonic() + grace
    alive = list(pids)
    while alive and time.monotonic() < deadline:
        alive = [pid for pid in alive if os.waitpid(pid, os.WNOHANG)[0] == 0]
        time.sleep(0.01)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _serve(pipe: Connection, rank: int, world_size: int, folder: str, device: str, env: dict[str, str]) -> None:
    """Body of a pool process: join the default group, then one task after another until told to stop."""
    os.environ.update(env)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device == "cuda":
        os.environ["LOCAL_RANK"] = str(rank)
        torch.cuda.set_device(rank)
    torch.set_num_threads(1)
    if os.environ.get("TRITON_INTERPRET") == "1":
        from flexsp.testing.quick_interpreter import quicken_interpreter

        quicken_interpreter()
    made: dict[Any, Any] = {}
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            task = None
        if task is None:
            os._exit(0)
        paths, call, settings, fresh, seed = task
        torch.manual_seed(seed)
        sys.path.extend(path for path in paths if path not in sys.path)
        importlib.invalidate_caches()
        try:
            if not dist.is_initialized():
                backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
                dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
            fn, args = pickle.loads(call)
            result = fn(_get_sp(made, settings, fresh), *args)
            pipe.send((True, pickle.dumps(_detached(result))))
        except BaseException as error:  # noqa: BLE001 - whatever it is, the parent has to hear of it
            pipe.send((False, (traceback.format_exc(), _pickled(error))))


def _get_sp(made: dict[Any, Any], settings: dict[str, Any], fresh: bool, group: Any = None) -> Any:
    from flexsp.launch.bootstrap import init_sequence_parallel

    key = tuple(settings.values())
    sp = None if fresh else made.get(key)
    if sp is None:
        sp = init_sequence_parallel(group, **settings)
        if not fresh:
            made[key] = sp
    sp.set_lengths(None)
    return sp


def _detached(result: Any) -> Any:
    from torch.utils._pytree import tree_map

    return tree_map(lambda x: x.detach().cpu() if isinstance(x, torch.Tensor) else x, result)


def _pickled(error: BaseException) -> bytes | None:
    try:
        raw = pickle.dumps(error)
        pickle.loads(raw)
        return raw
    except Exception:
        return None


def _run_in_place(
    fn: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    settings: dict[str, Any],
    env: dict[str, str],
    fresh: bool,
    whole_world: bool,
    own_processes: bool,
) -> list[Any]:
    import pytest

    if own_processes:
        pytest.skip("needs processes of its own")

    world = int(os.environ["WORLD_SIZE"])
    if world < world_size:
        pytest.skip(f"needs {world_size} ranks, torchrun started {world}")
    if whole_world and world > world_size:
        pytest.skip(f"needs a world of exactly {world_size} ranks, torchrun started {world}")
    if any(os.environ.get(name) != value for name, value in env.items()):
        pytest.skip(f"needs {env} in the environment of torchrun")
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    group, active = _subgroup(world_size)
    box = [pickle.dumps((args, torch.initial_seed()))]  # also where they come from: fn may change its arguments
    dist.broadcast_object_list(box, src=0)
    sp = _get_sp(_made_in_place.setdefault(world_size, {}), settings, fresh, group)
    answer: tuple[bool, Any] = (True, None)
    failure: BaseException | None = None
    if active:
        try:
            args, seed = pickle.loads(box[0])
            with torch.random.fork_rng(devices=[]):  # the caller's own generators stay as they are
                torch.default_generator.manual_seed(seed)
                answer = (True, _detached(fn(sp, *args)))
        except BaseException as error:  # noqa: BLE001
            failure, answer = error, (False, traceback.format_exc())
    answers: list[Any] = [None] * world
    dist.all_gather_object(answers, answer)
    failed = [rank for rank, (ok, _) in enumerate(answers) if not ok]
    if failed:
        text = "\n".join(f"rank {rank} failed:\n{answers[rank][1]}" for rank in failed)
        raise RankFailure(failed[0], text) from failure
    return [value for _, value in answers[:world_size]]


def _subgroup(world_size: int) -> tuple[Any, bool]:
    """The group of the first ``world_size`` ranks and whether this rank is in it; the others get their own."""
    world, rank = dist.get_world_size(), dist.get_rank()
    if world_size == world:
        return None, True
    if world_size not in _subgroups:
        parts = [list(range(world_size)), list(range(world_size, world))]
        _subgroups[world_size] = [dist.new_group(ranks) for ranks in parts]
    return _subgroups[world_size][int(rank >= world_size)], rank < world_size


_pools: dict[_Key, _Pool] = {}
_origins: dict[tuple[tuple[str, str], ...], _Origin] = {}
_made_in_place: dict[int, dict[Any, Any]] = {}
_subgroups: dict[int, list[Any]] = {}
atexit.register(close_pools)
