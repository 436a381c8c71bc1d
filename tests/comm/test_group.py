"""Making groups, cutting and joining tensors, the token mean, and what bad input says."""

from __future__ import annotations

import copy
import importlib
import os
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import flexsp
from flexsp import ops
from flexsp.comm.group import SequenceParallel, current_sp, get_sp, resolve_sp, sequence_parallel
from flexsp.comm.process_group import peer_errors
from flexsp.comm.transport import transports
from flexsp.exceptions import FlexspError, NotAvailable, PeerMismatch, PeerTimeout, checks_wanted, kernels_on_cpu
from flexsp.launch import bootstrap
from flexsp.launch.bootstrap import init_sequence_parallel
from flexsp.scan.schedules import SCHEDULES
from flexsp.testing import RankFailure, run_ranks

LENGTHS = [[3, 0, 5, 1], [0, 0, 0, 2], [2, 2, 2, 2], [0, 0, 0, 0]]


# Calls that forget the group ----------------------------------------------------------------------------------------


def _warnings_of_calls(sp: SequenceParallel) -> dict[str, list[str]]:
    from flexsp import nn
    from flexsp.comm import group
    from flexsp.variants import linear

    q, layer = torch.randn(1, 4, 2, 8), nn.SimpleGLA(16, num_heads=2)
    variant = linear.make(2, 8, 8)

    def op(**given: Any) -> Any:
        return ops.chunk_linear_attn(q, q, q, **given)

    def said(call: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            call()
        here = [x for x in found if "each of" in str(x.message)]
        assert all(x.filename == __file__ for x in here), here[0].filename
        return [str(x.message).partition(":")[0] for x in here]

    def within(given: SequenceParallel | None) -> None:
        with sequence_parallel(given):
            op()

    group._warned.clear()
    silent = {
        "sp": lambda: op(sp=sp), "sp=False": lambda: op(sp=False), "within": lambda: within(sp),
        "within None": lambda: within(None),
    }  # fmt: skip
    found = {name: said(call) for name, call in silent.items()}
    found |= {"op": said(op), "again": said(op), "layer": said(lambda: layer(torch.randn(1, 4, 16)))}
    return found | {"variant": said(lambda: variant(q=q, k=q, v=q))}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_call_that_forgets_the_group_warns_once(ranks: int) -> None:
    """Not where there is one rank, or where it is said which ranks take part. The line of the caller is named."""
    named = {"op": ["chunk_linear_attn"], "layer": ["SimpleGLA"], "variant": ["LinearAttention"]}
    for found in run_ranks(_warnings_of_calls, ranks, fresh_sp=True, own_processes=True, env={"FLEXSP_BACKEND": ""}):
        assert {name: x for name, x in found.items() if x} == (named if ranks > 1 else {})


# Cutting and joining -------------------------------------------------------------------------------------------------


def _gather(sp: SequenceParallel, full: torch.Tensor, dim: int, lengths: list[int], weight: torch.Tensor) -> tuple:
    sp.set_lengths(lengths)
    mine = sp.shard(full, dim).clone().requires_grad_()
    sp.set_lengths(None)  # gather asks the others
    joined = sp.gather(mine.sin(), dim)
    (joined.square() * weight[sp.rank]).sum().backward()
    return joined, mine.grad


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("dim", [1, -1])
def test_gather_and_its_adjoint(lengths: list[int], dim: int) -> None:
    shape = (2, sum(lengths), 3) if dim == 1 else (2, 3, sum(lengths))
    full = torch.randn(shape, dtype=torch.float64)
    weight = torch.randn(4, *shape, dtype=torch.float64)
    got = run_ranks(_gather, 4, full, dim, lengths, weight)
    whole = full.clone().requires_grad_()
    (whole.sin().square() * weight.sum(0)).sum().backward()
    start = 0
    for r, (joined, grad) in enumerate(got):
        assert torch.equal(joined, full.sin())
        want = whole.grad.narrow(dim, start, lengths[r])
        torch.testing.assert_close(grad, want, rtol=1e-13, atol=1e-13)
        start += lengths[r]


def _gather_dtype(sp: SequenceParallel, x: torch.Tensor) -> torch.Tensor:
    return sp.gather(sp.shard(x))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.complex64])
def test_gather_any_dtype(dtype: torch.dtype) -> None:
    x = (10 * torch.randn(1, 7, 2)).to(dtype)
    for joined in run_ranks(_gather_dtype, 3, x):
        assert joined.dtype == dtype and torch.equal(joined, x)


def _gather_compiled(sp: SequenceParallel, x: torch.Tensor) -> tuple:
    sp.set_lengths([4, 0])
    mine = sp.shard(x).clone().requires_grad_()
    torch._dynamo.reset()
    joined = torch.compile(lambda x: sp.gather(x.sin()), fullgraph=True, backend="aot_eager")(mine)
    joined.sum().backward()
    return joined, mine.grad


def test_gather_compiled() -> None:
    x = torch.randn(1, 4, 2, dtype=torch.float64)
    got = run_ranks(_gather_compiled, 2, x)
    assert all(torch.equal(joined, x.sin()) for joined, _ in got)
    torch.testing.assert_close(got[0][1], 2 * x.cos())
    assert got[1][1].shape == (1, 0, 2)


def _ranges(sp: SequenceParallel, lengths: list[int]) -> Any:
    exchanged = sp.shard_range(lengths[sp.rank])
    sp.set_lengths(lengths)
    with pytest.raises(ValueError, match=rf"rank {sp.rank}: expected a shard of {lengths[sp.rank]} tokens"):
        sp.shard_range(lengths[sp.rank] + 1)
    return exchanged, sp.shard_range(lengths[sp.rank])


def test_rows_of_a_token() -> None:
    sp = SequenceParallel(rank=1, world_size=3)
    sp.set_lengths([2, 3, 0])
    assert sp.shard_range(9, rows=3) == (6, 15, 15) and sp.shard_range(3) == (2, 5, 5)
    with pytest.raises(ValueError, match=r"expected a shard of 3 tokens \(set_lengths\) of 3 rows, got 3"):
        sp.shard_range(3, rows=3)
    assert sp.lengths == [2, 3, 0]


def test_shard_range() -> None:
    for r, (exchanged, given) in enumerate(run_ranks(_ranges, 4, LENGTHS[0])):
        assert exchanged == given == ([0, 3, 3, 8][r], [3, 3, 8, 9][r], 9)


def test_partition_and_shard() -> None:
    sp = SequenceParallel(rank=2, world_size=4)
    assert sp.partition(10) == [3, 3, 2, 2] and sp.lengths is None
    x = torch.arange(10)[None]
    assert sp.shard(x).tolist() == [[6, 7]]
    sp.set_lengths([1, 0, 9, 0])
    assert sp.shard(x).tolist() == [list(range(1, 10))]
    with pytest.raises(ValueError, match=r"x: expected 10 tokens along dim 1 \(set_lengths\), got 9"):
        sp.shard(x[:, 1:])
    for call in (sp.shard, sp.gather):
        with pytest.raises(ValueError, match=r"dim: expected a dimension of a tensor of shape \(1, 10\), got 2"):
            call(x, 2)
    for bad in ([1, 2, 3], [1, 2, 3, -1], [1, 2, 3, 3.5], [1, 2, 3, True], 9):
        with pytest.raises(ValueError, match="lengths: expected 4 integers >= 0"):
            sp.set_lengths(bad)
    with pytest.raises(ValueError, match="total: expected"):
        sp.partition(-1)


# Loss ----------------------------------------------------------------------------------------------------------------


def _token_mean(sp: SequenceParallel, losses: torch.Tensor, mask: torch.Tensor | None, lengths: list[int]) -> tuple:
    sp.set_lengths(lengths)
    mine = sp.shard(losses).clone().requires_grad_()
    loss = sp.token_mean(mine * 1.0, None if mask is None else sp.shard(mask))
    loss.backward()
    return loss, mine.grad


@pytest.mark.parametrize("masked", [False, True])
def test_token_mean(masked: bool) -> None:
    """Averaged over the ranks, as DDP and FSDP do, it is the mean over all tokens; an empty shard keeps its graph."""
    lengths = LENGTHS[0]
    losses = torch.randn(2, sum(lengths), dtype=torch.float64)
    mask = torch.rand(2, sum(lengths)) < 0.6 if masked else None
    if mask is not None:
        losses[~mask] = float("nan")
    keep = torch.ones_like(losses, dtype=torch.bool) if mask is None else mask
    got = run_ranks(_token_mean, 4, losses, mask, lengths)
    torch.testing.assert_close(sum(loss for loss, _ in got) / 4, losses[keep].mean())
    grad = torch.cat([grad for _, grad in got], 1) / 4
    torch.testing.assert_close(grad, keep / keep.sum().double())
    assert got[1][0] == 0 and got[1][1].shape == (2, 0)


def test_token_mean_of_nothing_is_zero() -> None:
    sp = SequenceParallel()
    assert sp.token_mean(torch.zeros(1, 0, requires_grad=True)).item() == 0.0
    with pytest.raises(ValueError, match=r"mask: expected the shape of loss \(1, 2\), got \(2,\)"):
        sp.token_mean(torch.zeros(1, 2), torch.ones(2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.bool])
def test_token_mean_sums_in_float32(dtype: torch.dtype) -> None:
    losses = torch.ones(9001, dtype=dtype) * (1 if dtype == torch.bool else 11)
    mean = SequenceParallel().token_mean(losses)
    assert mean.dtype == torch.float32 and mean.item() == pytest.approx(losses[0].item(), rel=1e-6)


def _draw(sp: SequenceParallel, more: bool) -> torch.Tensor:
    drawn = torch.rand(3)
    torch.rand(sp.rank * more)
    return drawn


def test_ranks_of_a_test_draw_the_same_numbers() -> None:
    """Whatever an earlier test drew on one of them."""
    for _ in range(2):
        drawn = run_ranks(_draw, 4, True)
        assert all(torch.equal(x, drawn[0]) for x in drawn)


# Making groups -------------------------------------------------------------------------------------------------------


def _on_mesh(sp: SequenceParallel) -> tuple:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    rows = init_sequence_parallel(mesh["sp"], timeout_s=20)
    columns = init_sequence_parallel(mesh["dp"].get_group(), timeout_s=20)
    me = torch.tensor([[sp.rank]])
    joined = rows.gather(me).tolist(), columns.gather(me).tolist()
    with pytest.raises(ValueError, match="one-dimensional DeviceMesh"):
        init_sequence_parallel(mesh)
    rows.close()
    columns.close()
    with pytest.raises(FlexspError, match="was closed"):
        get_sp(rows.id)
    with pytest.raises(FlexspError, match="was closed"):
        rows.shard_range(1)  # would otherwise talk over the default group
    return joined, rows.global_ranks, rows.rank


def test_groups_of_a_mesh() -> None:
    got = run_ranks(_on_mesh, 4, whole_world=True)
    assert [joined[0] for joined, _, _ in got] == [[[0, 1]], [[0, 1]], [[2, 3]], [[2, 3]]]
    assert [joined[1] for joined, _, _ in got] == [[[0, 2]], [[1, 3]], [[0, 2]], [[1, 3]]]
    assert [(ranks, rank) for _, ranks, rank in got] == [([0, 1], 0), ([0, 1], 1), ([2, 3], 0), ([2, 3], 1)]


def _singletons(sp: SequenceParallel) -> Any:
    groups = [dist.new_group([r]) for r in range(sp.world_size)]
    alone = init_sequence_parallel(groups[sp.rank])
    return alone.world_size, alone.global_ranks, alone.gather(torch.ones(1, 2)).shape


def test_groups_of_one() -> None:
    assert run_ranks(_singletons, 2, whole_world=True) == [(1, [0], (1, 2)), (1, [1], (1, 2))]


def _settings_differ(sp: SequenceParallel) -> str:
    with pytest.raises(PeerMismatch) as caught:
        init_sequence_parallel(schedule=["serial", "pipelined"][sp.rank])
    return str(caught.value)


def test_settings_must_agree() -> None:
    text = run_ranks(_settings_differ, 2, whole_world=True)[0]
    assert "rank 0 called" in text and "'serial'" in text and "'pipelined'" in text


def _late(sp: SequenceParallel) -> str:
    if sp.rank == 1:
        return ""
    with pytest.raises(PeerTimeout) as caught:
        sp.shard_range(3)
    return str(caught.value)


def test_lengths_that_never_come() -> None:
    options = {"own_processes": True, "sp_timeout_s": 2.0}
    assert "rank 0: no answer from rank 1" in run_ranks(_late, 2, **options)[0]


def test_names_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=f"transport: expected one of auto, {', '.join(transports())}, got 'ib'"):
        init_sequence_parallel(transport="ib")
    with pytest.raises(ValueError, match=f"schedule: expected one of {', '.join(SCHEDULES)}, auto, got 'ring'"):
        init_sequence_parallel(schedule="ring")
    with pytest.raises(ValueError, match="timeout_s: expected a number > 0, got 0"):
        init_sequence_parallel(timeout_s=0)
    monkeypatch.setenv("FLEXSP_HEAP_MIB", "lots")
    with pytest.raises(ValueError, match="FLEXSP_HEAP_MIB: expected a number > 0, got 'lots'"):
        init_sequence_parallel()


@pytest.mark.parametrize("word", ["1", "true", "YES", " on ", "0", "False", "no", "off", ""])
def test_words_for_on_and_off(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on = word.strip().lower() in ("1", "true", "yes", "on")
    monkeypatch.setenv("FLEXSP_CHECK", word)
    assert checks_wanted() is on and init_sequence_parallel().check_calls is on


def test_other_words_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, word, expected in (
        ("FLEXSP_CHECK", "2", "1, true"), ("FLEXSP_CHECK", "y", "1, true"), ("FLEXSP_BACKEND", "cuda", "triton")
    ):  # fmt: skip
        with monkeypatch.context() as changed, pytest.raises(ValueError, match=f"^{name}: expected {expected}"):
            changed.setenv(name, word)
            importlib.reload(flexsp)
    importlib.reload(flexsp)
    monkeypatch.setenv("FLEXSP_BACKEND", "cuda")
    with pytest.raises(ValueError, match="^FLEXSP_BACKEND: expected triton or nothing .*, got 'cuda'"):
        ops.chunk_simple_gla(*torch.randn(3, 1, 4, 1, 8))
    monkeypatch.setenv("FLEXSP_BACKEND", "Triton")
    assert kernels_on_cpu()


@pytest.mark.parametrize("text", ["Numpy is not available", "expected a tensor of 3 dimensions"])
def test_what_is_no_silence_of_a_peer(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sp = SequenceParallel(world_size=2)
    with pytest.raises(RuntimeError, match=f"^{text}$"), peer_errors(sp, 1, "recv"):
        raise RuntimeError(text)
    assert sp.failure is None

    def start(*_: Any) -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(bootstrap, "_start_distributed", start)
    with pytest.raises(RuntimeError, match=f"^{text}$"):
        init_sequence_parallel()


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:2"),
        RuntimeError("Timed out waiting 1000ms for recv operation to complete"),
        RuntimeError("Wait timeout. Original exception: Connection reset by peer"),
        RuntimeError("Application timeout caused pair closure"), dist.DistStoreError("gone"),
        dist.DistNetworkError("?"),
    ],
)  # fmt: skip
def test_what_is_a_silence_of_a_peer(error: RuntimeError, monkeypatch: pytest.MonkeyPatch) -> None:
    sp = SequenceParallel(world_size=2)
    with pytest.raises(PeerTimeout, match="rank 0: no answer from rank 1 in recv"), peer_errors(sp, 1, "recv"):
        raise error
    assert isinstance(sp.failure, PeerTimeout)


def _no_such_memory(sp: SequenceParallel) -> str:
    with pytest.raises(NotAvailable, match="transport 'peer' does not work here"):
        init_sequence_parallel(transport="peer", device="cpu")
    return init_sequence_parallel(device="cpu").transport


def test_a_transport_this_machine_lacks() -> None:
    assert run_ranks(_no_such_memory, 2, whole_world=True) == ["process_group"] * 2


def _posix(sp: SequenceParallel) -> Any:
    return sp.transport, sp.heap.nbytes


def test_posix_heap() -> None:
    assert run_ranks(_posix, 2, transport="posix", heap_mib=1) == [("posix", 1 << 20)] * 2


def _slow_to_connect(sp: SequenceParallel) -> tuple[float, float]:
    """When this rank has its groups, and when it may go on."""
    from flexsp.launch import bootstrap

    made, connected = bootstrap._make_groups, []

    def late(*args: Any) -> Any:
        groups = made(*args)
        time.sleep(0.5 * sp.rank)
        connected.append(time.monotonic())
        return groups

    bootstrap._make_groups = late
    try:
        other = bootstrap.init_sequence_parallel(device="cpu")
    finally:
        bootstrap._make_groups = made
    done = time.monotonic()
    other.close()
    return connected[0], done


def test_no_rank_goes_on_before_all_are_connected() -> None:
    """Else one that dies early breaks off what another is still making, and the other cannot say who it was."""
    times = run_ranks(_slow_to_connect, 3, whole_world=True)
    assert min(done for _, done in times) >= max(connected for connected, _ in times)


def _run_python(script: Path, *launcher: str, **env: str) -> str:
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    root = str(Path(__file__).parents[2])
    clean["PYTHONPATH"] = os.pathsep.join(filter(None, [root, clean.get("PYTHONPATH")]))
    command = [sys.executable, *launcher, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env={**clean, **env})
    assert done.returncode == 0, done.stderr
    return done.stdout


SCRIPT = """
    import torch, flexsp
    from flexsp.launch.bootstrap import init_sequence_parallel
    sp = init_sequence_parallel(device="cpu")
    x = sp.gather(torch.full((1, sp.rank + 1), sp.rank))
    print(f"{sp.rank}/{sp.world_size} {sp.timeout_s} {x.tolist()}\\n", end="")
    sp.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
"""


def test_one_process_and_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    assert _run_python(script).split("\n")[0] == "0/1 120.0 [[0]]"
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    out = _run_python(script, *launcher, FLEXSP_TIMEOUT_S="30")
    assert sorted(filter(None, out.split("\n"))) == ["0/2 30.0 [[0, 1, 1]]", "1/2 30.0 [[0, 1, 1]]"]


# Ambient group, harness ----------------------------------------------------------------------------------------------


def test_ambient() -> None:
    sp, inner = SequenceParallel(), SequenceParallel()
    assert resolve_sp(None) is None and resolve_sp(False) is None and resolve_sp(sp) is sp
    with sequence_parallel(sp):
        assert resolve_sp(None) is sp and resolve_sp(False) is None and resolve_sp(inner) is inner
        with sequence_parallel(inner):
            assert current_sp() is inner
        with pytest.raises(RuntimeError), sequence_parallel(inner):
            raise RuntimeError
        assert current_sp() is sp
    assert current_sp() is None
    with pytest.raises(ValueError, match="sp: expected a SequenceParallel, None or False, got str"):
        resolve_sp("sp")
    for bad in ("sp", False):
        with pytest.raises(ValueError, match="sp: expected a SequenceParallel or None"), sequence_parallel(bad):
            pass
    assert get_sp(sp.id) is sp and copy.deepcopy({"sp": sp})["sp"] is sp
    sp.close()
    inner.close()


def _fails_on_rank_1(sp: SequenceParallel) -> int:
    if sp.rank == 1:
        raise LookupError("on purpose")
    return sp.rank


def _sleeps(sp: SequenceParallel) -> None:
    time.sleep(600 * sp.rank)


def _pid(sp: SequenceParallel) -> int:
    return os.getpid()


@pytest.mark.skipif("WORLD_SIZE" in os.environ, reason="of a pool, which torchrun takes the place of")
def test_harness() -> None:
    """Failures carry the rank's traceback and a fresh pool follows; without one the processes stay."""
    with pytest.raises(RankFailure, match="rank 1 failed:(.|\n)*on purpose") as caught:
        run_ranks(_fails_on_rank_1, 2)
    assert caught.value.rank == 1 and isinstance(caught.value.__cause__, LookupError)
    pids = run_ranks(_pid, 2)
    assert run_ranks(_pid, 2) == pids
    with pytest.raises(RankFailure, match=r"no answer from ranks \[(0, )?1\] within 1 s"):  # 0: on a busy machine
        run_ranks(_sleeps, 2, timeout=1.0, sp_timeout_s=60.0)
    alone = run_ranks(_pid, 2, own_processes=True)
    for pid in [*pids, *alone]:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert set(run_ranks(_pid, 2)).isdisjoint([*pids, *alone])


_LEAVES_A_POOL = """
import os, signal
from flexsp.testing import run_ranks
from tests.comm.test_group import _pid
print(*run_ranks(_pid, 2), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"


def _become(pids: list[int], states: set[str]) -> bool:
    deadline = time.monotonic() + 60
    while not all(_state(pid) in states for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    return all(_state(pid) in states for pid in pids)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks processes up in /proc")
def test_idle_ranks_are_stopped_and_do_not_outlive_who_started_them() -> None:
    assert _become(run_ranks(_pid, 2), {"T"})
    found = subprocess.run([sys.executable, "-c", _LEAVES_A_POOL], capture_output=True, text=True, timeout=300)
    pids = [int(pid) for pid in found.stdout.split()]
    assert len(pids) == 2, found.stderr
    assert _become(pids, {"gone", "Z"})
