"""The benchmarks at toy sizes: what they measure, write and judge; never how fast anything is."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexsp.bench import beside, op, plot, ranks, record, table
from flexsp.bench.cases import CASES, Shape, forward_backward, make_inputs
from flexsp.bench.gates import decays
from flexsp.bench.sizes import DEFAULTS, choose
from flexsp.bench.timing import Stopwatch, measure, spread, summarize
from flexsp.launch.cli import main
from tests.harness.bench import CPU, TOY, _row, torchrun
from tests.marks import quick


def test_summarize_gives_order_statistics() -> None:
    timing = summarize([5.0, 1.0, 2.0, 3.0, 4.0])
    assert (timing.median, timing.best, timing.n) == (3.0, 1.0, 5)
    assert timing.p20 == pytest.approx(1.8) and timing.p80 == pytest.approx(4.2)
    assert summarize([7.0]).p20 == 7.0
    with pytest.raises(ValueError, match="times_ms: expected at least one"):
        summarize([])


class Clock:
    """Seconds that pass only where a test says so."""

    def __init__(self) -> None:
        self.now = 1.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("flexsp.bench.timing.time", made)
    return made


def test_measure_times_only_the_call_and_interleaves(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def call(name: str, seconds: float) -> None:
        calls.append(name)
        clock.now += seconds

    monkeypatch.setattr("flexsp.bench.timing.busy_wait", lambda *args: call("between", 4.0))
    slow, fast = (lambda: call("slow", 0.25)), (lambda: call("fast", 0.125))
    timings = measure({"slow": slow, "fast": fast}, CPU, warmup=1, iterations=4)
    for name, ms in (("slow", 250.0), ("fast", 125.0)):
        assert (timings[name].best, timings[name].median, timings[name].n) == (ms, ms, 4)
    calls = [name for name in calls if name != "between"]
    assert calls[2:] == ["slow", "fast"] * 4
    with pytest.raises(ValueError, match="iterations: expected at least 1, got 0"):
        measure({"slow": slow}, CPU, iterations=0)


def test_stopwatch_leaves_out_what_lies_between(clock: Clock) -> None:
    watch = Stopwatch(CPU)
    for pause, inside in ((0.0, 0.5), (20.0, 0.25)):
        clock.now += pause
        watch.start()
        clock.now += inside
        watch.stop()
    assert watch.times_ms() == [500.0, 250.0]


@pytest.mark.parametrize(
    "name",
    quick(
        CASES, "linear_attn_normalized", "mamba2", "generated_gla", "gated_delta_rule_shared_keys", "mamba3",
        "attention",
    ),
)  # fmt: skip
def test_cases_run_and_give_every_gradient(name: str) -> None:
    inputs = make_inputs(CASES[name], Shape(1, 40, 2, 16, 8), torch.float32, CPU)
    gradients = forward_backward(CASES[name].ours, inputs)
    leaves = [tensor for key, tensor in inputs.items() if key != "do"]
    assert [g.shape for g in gradients] == [t.shape for t in leaves]
    assert all(g.isfinite().all() and g.abs().sum() > 0 for g in gradients)
    assert CASES[name].draw or ("g" in inputs) == CASES[name].gated
    assert "g" not in inputs or inputs["g"].max() <= 0
    assert "beta" not in inputs or torch.allclose(inputs["k"].norm(dim=-1), torch.ones(()))


def test_heads_share_keys_and_tokens_have_steps() -> None:
    shared, steps = (
        {key: tuple(x.shape) for key, x in make_inputs(CASES[name], Shape(1, 40, 4, 16, 8), torch.float32, CPU).items()}
        for name in ("gated_delta_rule_shared_keys", "gated_delta_product")
    )
    v, qk, g = (1, 40, 4, 8), (1, 40, 2, 16), (1, 40, 4)
    assert shared == {"q": qk, "k": qk, "v": v, "g": g, "beta": g, "do": v}
    q, k = (1, 40, 4, 16), (1, 80, 4, 16)
    assert steps == {"q": q, "k": k, "v": (1, 80, 4, 8), "g": g, "beta": (1, 80, 4), "do": v}


def test_gates_are_drawn_as_asked() -> None:
    def drawn(gates: str, name: str = "gated_delta_rule") -> torch.Tensor:
        shape = Shape(1, 400, 64, 8, 4)
        return make_inputs(CASES[name], shape, torch.float32, CPU, gates=gates)["g"].detach().double()

    assert not drawn("none").any() and drawn("initialised", "kda").shape == (1, 400, 64, 8)
    torch.testing.assert_close(drawn("mild").neg().expm1().log().neg().mean().item(), 3.0, rtol=0, atol=0.05)
    g = drawn("initialised")  # the median over tokens is -A dt
    middle = -g.median(dim=1).values
    assert g.max() <= 0 and 0 <= middle.min() < 0.02 and 0.2 < middle.max() < 16 * 0.12
    g = drawn("bounded", "kda")
    assert -5 < g.min() < -4.5 and -0.5 < g.max() < 0 and abs(g.mean() + 2.5) < 0.05
    A = decays("unbounded", (4000,), torch.randn).A
    assert 7 < A.mean() < 9 and 100 < A.max() <= 200 and drawn("unbounded").min() < drawn("initialised").min()
    spread = [torch.randn(9000).add(3).sigmoid().log(), -torch.nn.functional.softplus(torch.randn(9000) - 3)]
    torch.testing.assert_close(*(x.quantile(torch.tensor([0.2, 0.5, 0.8])) for x in spread), rtol=0.1, atol=0)
    with pytest.raises(ValueError, match="gates: expected one of mild, .*, none, got 'strong'"):
        drawn("strong")
    with pytest.raises(ValueError, match="H: expected a multiple of 2 for gated_delta_rule_shared_keys, got 3"):
        make_inputs(CASES["gated_delta_rule_shared_keys"], Shape(1, 4, 3, 4, 4), torch.float32, CPU)
    with pytest.raises(ValueError, match="gates: expected mild for mlstm, got 'none'"):
        make_inputs(CASES["mlstm"], Shape(1, 4, 3, 4, 4), torch.float32, CPU, gates="none")


def test_floor_counts_inputs_and_outputs() -> None:
    """B=1, H=32, K=V=128, T=65536, bf16: 4 tensors of 0.537 GB forward and 11 with backward, gates besides."""
    shape = Shape(1, 65536, 32, 128, 128)
    one = 65536 * 32 * 128 * 2
    assert CASES["linear_attn"].floor_bytes(shape, 2, backward=False) == 4 * one
    assert CASES["linear_attn"].floor_bytes(shape, 2, backward=True) == 11 * one
    gate = 65536 * 32 * 4
    assert CASES["simple_gla"].floor_bytes(shape, 2, backward=True) == 11 * one + 3 * gate
    beta = 65536 * 32 * 2
    floors = {
        name: [CASES[name].floor_bytes(shape, 2, backward) for backward in (False, True)]
        for name in ("delta_rule", "gated_delta_rule", "gated_delta_rule_shared_keys", "kda", "gated_delta_product")
    }
    assert floors == {
        "delta_rule": [4 * one + beta, 11 * one + 3 * beta],
        "gated_delta_rule": [4 * one + gate + beta, 11 * one + 3 * (gate + beta)],
        "gated_delta_rule_shared_keys": [3 * one + gate + beta, 8 * one + 3 * (gate + beta)],
        "kda": [4 * one + 128 * gate + beta, 11 * one + 3 * (128 * gate + beta)],
        "gated_delta_product": [6 * one + gate + 2 * beta, 17 * one + 3 * (gate + 2 * beta)],
    }
    assert 4 * one / 4.3e9 == pytest.approx(0.50, abs=0.005)
    assert CASES["hgrn"].floor_bytes(shape, 2, backward=True) == 8 * one
    assert CASES["mlstm"].floor_bytes(shape, 2, backward=True) == 11 * one + 6 * gate


def test_targets_pass_miss_and_stay_open() -> None:
    rows = [
        _row("simple_gla", 4096, "fwd", "flexsp", 0.10), _row("simple_gla", 4096, "fwd", "fla", 0.25),
        _row("simple_gla", 65536, "fwd", "flexsp", 1.5), _row("simple_gla", 65536, "fwd", "fla", 2.0),
        _row("simple_gla", 65536, "fwd_bwd", "flexsp", 4.0, peak=5.6),
        _row("linear_attn", 65536, "fwd_bwd", "fla", 8.0),
        {"case": "simple_gla", "T": 16384, "mode": "fwd", "provider": "fla", "error": "refused"},
        _row("generated_simple_gla", 4096, "fwd", "flexsp", 0.11),
        _row("generated_gla", 4096, "fwd_bwd", "flexsp", 3.2), _row("generated_gla", 4096, "fwd_bwd", "fla", 2.0),
    ]  # fmt: skip
    cold = [
        {"provider": "flexsp", "case": "simple_gla", "fwd_bwd_s": spread([16.0, 9.0, 99.0]).as_dict()},
        {"provider": "flexsp", "case": "generated_gla", "fwd_bwd_s": 8.0},
    ]  # fmt: skip
    verdicts = [(v["value"], v["verdict"]) for v in op.judge(rows, cold)]
    assert verdicts == [
        (0.4, "pass"),
        (None, "not measured"),
        (0.75, "MISS"),
        (0.5, "pass"),
        (5.6, "MISS"),
        (16.0, "MISS"),
        (8.0, "pass"),
        (pytest.approx(1.1), "pass"), *[(None, "not measured")] * 5,
        *[(None, "not measured")] * 3, (1.6, "MISS"), *[(None, "not measured")] * 8,
    ]  # fmt: skip


def test_commit_comes_from_the_environment_or_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXSP_COMMIT", "abc123-dirty")
    assert record.commit() == {"commit": "abc123", "dirty": True}
    monkeypatch.delenv("FLEXSP_COMMIT")
    found = record.commit()["commit"]
    assert found is None or len(found) == 40


def test_bench_op_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "op", "--T", "40,64", "--device", "cpu", "--ops", "simple_gla", "--out", str(tmp_path)]
    assert main([*words, *TOY]) == 0
    printed = capsys.readouterr().out
    (path,) = tmp_path.glob("op_cpu_*.json")
    result = record.load(path)
    env = result["environment"]
    assert env["torch"] == torch.__version__ and env["command"].startswith("flexsp bench op --T 40,64")
    assert result["baseline_missing"] == "CPU run" and "none (CPU run)" in printed
    assert [(r["T"], r["mode"], r["ms"]["n"]) for r in result["rows"]] == [
        (40, "fwd", 3), (40, "fwd_bwd", 3), (64, "fwd", 3), (64, "fwd_bwd", 3)
    ]  # fmt: skip
    assert main(["bench", "table", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    median = f"{result['rows'][3]['ms']['median']:.3f}"
    assert lines[5].startswith(f"| simple_gla | 64 | fwd+bwd | {median} |")
    assert "--ops simple_gla" in lines[-1]


def test_a_table_has_the_second_baseline_where_it_ran() -> None:
    rows = [_row("gated_delta_rule", 4096, mode, "flexsp", 1.0) for mode in ("fwd", "fwd_bwd")]
    rows += [_row("gated_delta_rule", 4096, "fwd", "fla", 2.0), _row("gated_delta_rule", 4096, "fwd", "flashqla", 4.0)]
    rows += [_row("kda", 4096, "fwd", "flexsp", 3.0)]
    rows += [{"case": "gated_delta_rule", "T": 4096, "mode": "fwd_bwd", "provider": "fla", "error": "refused it"}]
    lines = table.op_table({"rows": rows, "cold": []}).splitlines()
    assert "| flash-linear-attention ms | ratio | FlashQLA ms | ratio | memory floor ms |" in lines[0]
    assert lines[2].startswith("| gated_delta_rule | 4096 | fwd | 1.000 | 2.000 | 0.50 | 4.000 | 0.25 | 0.500 |")
    assert lines[3].startswith("| gated_delta_rule | 4096 | fwd+bwd | 1.000 | refused |  |  |  | 0.500 |")
    assert lines[4].startswith("| kda | 4096 | fwd | 3.000 |  |  |  |  | 0.500 |")
    assert "FlashQLA" not in table.op_table({"rows": rows[:3], "cold": []})
    rows = [_row("mamba3", 4096, "fwd", "flexsp", 1.0), _row("mamba3", 4096, "fwd", "mamba_ssm", 2.0)]
    lines = table.op_table({"rows": rows, "cold": []}).splitlines()
    assert "| flexsp ms | mamba_ssm ms | ratio | memory floor ms |" in lines[0]
    assert lines[2].startswith("| mamba3 | 4096 | fwd | 1.000 | 2.000 | 0.50 | 0.500 |")


def test_bench_op_goes_on_with_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run in parts: rows of the same operator and length are replaced, others stay."""
    words = ["bench", "op", "--device", "cpu", "--out", str(tmp_path), *TOY]
    assert main([*words, "--ops", "retention", "--T", "16,32"]) == 0
    (path,) = tmp_path.glob("op_cpu_*.json")
    moved = path.rename(tmp_path / "op_cpu_20200101.json")
    assert main([*words, "--ops", "retention,lightning", "--T", "32", "--add", str(moved)]) == 0
    result = record.load(moved)
    found = [(r["case"], r["T"], r["mode"]) for r in result["rows"]]
    wanted = (("retention", 16), ("retention", 32), ("lightning", 32))
    assert found == [(*key, mode) for key in wanted for mode in ("fwd", "fwd_bwd")]
    assert result["environment"]["command"].count("flexsp bench op") == 2 and not path.exists()
    assert result["gates"] == "mild"
    assert main([*words, "--ops", "retention", "--T", "32", "--add", str(moved), "--gates", "none"]) == 1
    assert "--add: expected a file of gates none, got mild" in capsys.readouterr().err
    result["environment"]["torch"] = "1.0"
    record.save(moved, result)
    assert main([*words, "--ops", "retention", "--T", "32", "--add", str(moved)]) == 1
    assert f"--add: expected a file of torch {torch.__version__}, got 1.0" in capsys.readouterr().err


def test_an_exhausted_time_limit_skips(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "op", "--T", "40", "--device", "cpu", "--time-limit", "1e-9", "--out", str(tmp_path)]
    assert main([*words, *TOY]) == 0
    assert "skipped, past --time-limit" in capsys.readouterr().out


def test_first_steps_run_in_fresh_processes() -> None:
    from flexsp.bench.cold import first_call

    shape = Shape(1, 40, 2, 16, 16)
    row = first_call("simple_gla", shape, "float32", "cpu", "flexsp", 250, repeats=2)
    found = row["fwd_bwd_s"]
    assert found["n"] == 2 and 0 < found["min"] <= found["median"] <= found["max"]
    assert "not finished" in first_call("simple_gla", shape, "float32", "cpu", "flexsp", 0.1, 1)["error"]


def test_a_first_step_is_one_training_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from flexsp.bench import cold

    steps: list[bool] = []
    monkeypatch.setattr(cold, "forward_backward", lambda op, inputs: steps.append(True) or op(inputs))
    request = {"case": "simple_gla", "dtype": "float32", "device": "cpu", "provider": "flexsp"}
    assert cold._measure(request | {"shape": [1, 9, 2, 4, 4]}) > 0 and steps == [True]


def test_spread_of_repeated_runs() -> None:
    assert spread([3.0, 1.0, 9.0]).as_dict() == {"median": 3.0, "min": 1.0, "max": 9.0, "n": 3}
    assert table.shown(spread([3.0, 1.0, 9.0]).as_dict(), 1, " s") == "3.0 s [1.0, 9.0]"
    assert table.shown(4.04, 1, " GiB") == "4.0 GiB (one run)" and table.shown(None, 1) == ""
    with pytest.raises(ValueError, match="values: expected at least one"):
        spread([])


def test_host_times_are_those_of_several_processes() -> None:
    from flexsp.bench.host import _targets, combine

    runs = [[{"case": "x", "mode": "forward", "dispatcher_us": us, "plain_us": 10 * us}] for us in (50.0, 40.0, 90.0)]
    (row,) = combine(runs)
    assert row["dispatcher_us"] == {"median": 50.0, "min": 40.0, "max": 90.0, "n": 3}
    assert row["plain_us"]["median"] == 500.0 and row["case"] == "x"
    hand_written = [{"case": case, "mode": "forward", "dispatcher_us": 70.0} for case in ("mamba2", "simple_gla")]
    assert [(x["target"], x["verdict"]) for x in _targets([row, *combine([hand_written])])] == [
        ("x host microseconds of a forward", "pass"), ("x host time / without the dispatcher", "pass"),
        ("mamba2 host microseconds of a forward", "MISS"),
    ]  # fmt: skip


def test_host_times_start_processes_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    from flexsp.bench import host

    answers = [(0, "noise\n[1]\n"), (0, "[2]\n"), (1, "it broke")]
    commands: list[list[str]] = []

    def start(command: list[str], **options: Any) -> SimpleNamespace:
        commands.append(command)
        status, text = answers[len(commands) - 1]
        return SimpleNamespace(returncode=status, stdout=text, stderr="")

    monkeypatch.setattr(host.subprocess, "run", start)
    args = SimpleNamespace(argv=["bench", "host", "--T", "9"], repeats=2)
    assert host._repeated(args) == [[1], [2]]  # type: ignore[arg-type]
    assert commands[0][1:] == ["-m", "flexsp", "bench", "host", "--T", "9", "--child"]
    with pytest.raises(ValueError, match="a process failed: it broke"):
        host._repeated(args)  # type: ignore[arg-type]


def test_peak_memory_is_repeated_from_an_empty_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every repetition empties the cache and resets the peak; what other tensors hold does not count."""
    peaks, log = iter([3 << 30, 5 << 30, 4 << 30]), []
    for name, result in (("empty_cache", None), ("reset_peak_memory_stats", None), ("memory_allocated", 1 << 30)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name, result=result: (log.append(name), result)[1])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: next(peaks))
    monkeypatch.setattr(beside, "synchronize", lambda _: None)
    found = beside.peak_gib(lambda: log.append("call"), {}, torch.device("cuda"), repeats=3)
    assert found == {"median": 3.0, "min": 2.0, "max": 4.0, "n": 3}
    assert log == ["call", *["empty_cache", "memory_allocated", "reset_peak_memory_stats", "call"] * 3]


def test_sizes_are_those_of_the_device() -> None:
    from flexsp.launch.cli import parser

    for device, H, T, cold in (("cpu", 2, [128, 512], []), ("cuda", 32, [4096, 16384, 65536], ["simple_gla"])):
        args = parser().parse_args(["bench", "op", "--K", "48"])
        choose(args, device)
        assert (args.H, args.K, args.T, args.cold) == (H, 48, T, cold)
        assert not [name for name in DEFAULTS if getattr(args, name, ...) is None]
    args = parser().parse_args(["bench", "scale"])
    choose(args, "cpu")
    assert args.T_local == [128, 512] and args.dtype == "float32"


def test_bench_scale_measures_every_schedule(tmp_path: Path) -> None:
    done = torchrun(2, "bench", "scale", "--T-local", "64", "--timeout", "200", "--out", str(tmp_path), *TOY)
    assert done.returncode == 0, done.stderr[-3000:]
    result = record.load(tmp_path / next(tmp_path.glob("scale_cpux2_*.json")).name)
    rows = result["rows"]
    assert [(r["mode"], r["schedule"]) for r in rows] == [
        (mode, name) for mode in ("fwd", "fwd_bwd") for name in ("local", *ranks.SCHEDULES)
    ]
    for row in rows:
        assert row["world_size"] == 2 and len(row["rank_ms"]) == 2 and row["ms"]["n"] == 3
        assert row["slowest_rank_ms"] == max(row["rank_ms"])
        if row["schedule"] != "local":
            assert row["disagreement"] < 1e-5
            local = next(r for r in rows if r["schedule"] == "local" and r["mode"] == row["mode"])
            assert row["efficiency"] == pytest.approx(local["slowest_rank_ms"] / row["ms"]["median"])
            assert row["added_us"] == pytest.approx((row["ms"]["median"] - local["slowest_rank_ms"]) * 1e3)
    assert "| chain |" in table.markdown([next(tmp_path.glob("scale_*.json"))])
    pytest.importorskip("matplotlib")
    plot.weak_scaling([result], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


@pytest.mark.slow
def test_bench_scale_of_several_operators_and_world_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--case", "retention,mamba2", "--T-local", "32", "--schedules", "chain", "--timeout", "200"]
    done = torchrun("1,2", "bench", "scale", *words, "--out", str(tmp_path), *TOY)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "1 x cpu, T1 only" in done.stdout and "2 x cpu, chain over" in done.stdout
    files = sorted(tmp_path.glob("scale_retention_mamba2_cpu*.json"))
    results = [record.load(path) for path in files]
    assert [result["environment"]["world_size"] for result in results] == [1, 2]
    for result, schedules in zip(results, (["local"], ["local", "chain"]), strict=True):
        wanted = [(c, m, s) for c in ("retention", "mamba2") for m in ("fwd", "fwd_bwd") for s in schedules]
        assert [(r["case"], r["mode"], r["schedule"]) for r in result["rows"]] == wanted
    assert "| mamba2 | 32 | fwd+bwd | chain |" in table.markdown(files)
    pytest.importorskip("matplotlib")
    words = ["bench", "plot", *map(str, files), "--out", str(tmp_path / "plot.png"), "--case"]
    assert main([*words, "mamba2"]) == 0 and (tmp_path / "plot.png").stat().st_size > 10_000
    assert main([*words, "simple_gla,linear_attn"]) == 1
    assert "expected weak-scaling rows of simple_gla, linear_attn, got none" in capsys.readouterr().err


def test_world_sizes_that_cannot_start_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    for gpus, sizes, message in ((0, "2,0", "1 to 8, 4 for"), (0, "8,9", "got 9"), (4, "2,8", "1 to 4, the GPUs here")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert main(["bench", "scale", "--ranks", sizes]) == 1
        assert message in capsys.readouterr().err


def test_one_status_of_several_world_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    from flexsp.bench import scale

    started = []

    def start(command: list[str], check: bool) -> SimpleNamespace:
        started.append(next(word for word in command if word.startswith("--nproc")))
        return SimpleNamespace(returncode=[0, 3, 0][len(started) - 1])

    monkeypatch.setattr(scale.subprocess, "run", start)
    assert scale.under_torchrun([1, 2, 4], ["bench", "scale"]) == 3
    assert started == ["--nproc-per-node=1", "--nproc-per-node=2", "--nproc-per-node=4"]


def test_the_chain_is_judged_on_4_and_8_gpus() -> None:
    from flexsp.bench.scale import _judge

    row = {"schedule": "chain", "case": "simple_gla", "T_local": 8192, "mode": "fwd_bwd", "added_us": 60.0}
    rows = [row | {"world_size": ranks} for ranks in (2, 4, 8)] + [row | {"world_size": 8, "case": "mamba2"}]
    verdicts = [(v["target"][:13], v["limit"], v["verdict"]) for v in _judge(rows, torch.device("cuda"))]
    assert verdicts == [("chain, 4 GPUs", 50.0, "MISS"), ("chain, 8 GPUs", 90.0, "pass")]
    assert not _judge(rows, CPU)


def test_disagreeing_schedules_fail_the_run() -> None:
    from flexsp.bench.scale import _check_agreement

    rows = [{"schedule": "chain", "disagreement": 1e-7}, {"schedule": "serial", "disagreement": float("nan")},
            {"schedule": "local", "disagreement": None}]  # fmt: skip
    assert [text.split(":")[0] for text in _check_agreement(rows, torch.float32)] == ["serial"]


def test_schedule_names_carry_a_transport() -> None:
    assert ranks.split_schedule("chain", "peer") == ("chain", "peer")
    assert ranks.split_schedule("serial", "peer") == ("serial", "process_group")
    assert ranks.split_schedule("chain:put", "peer") == ("chain", "put")
    with pytest.raises(ValueError, match="schedule: expected one of chain"):
        ranks.split_schedule("ring", "peer")


def test_a_file_that_is_no_result_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text(json.dumps({"rows": []}))
    assert main(["bench", "table", str(tmp_path / "x.json")]) == 1
    assert "expected a flexsp result file" in capsys.readouterr().err
    (tmp_path / "z.json").write_text(json.dumps({"kind": "experiments"}))
    assert main(["bench", "table", str(tmp_path / "z.json")]) == 1
    kinds = "op, scale, host, traffic, sanitize, model, released, simulation"
    expected = f"z.json: expected a result of kind {kinds}, got 'experiments'"
    assert expected in capsys.readouterr().err
    (tmp_path / "y.json").write_text(json.dumps({"kind": "op", "rows": []}))
    with pytest.raises(ValueError, match="expected files of `flexsp bench scale`"):
        plot.run(SimpleNamespace(results=[tmp_path / "y.json"], out=str(tmp_path / "z.png")))  # type: ignore[arg-type]


NCU = """==PROF== Connected
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","output","dram__bytes_read.sum","Mbyte","1,200.5"
"0","output","dram__bytes_write.sum","Kbyte","300"
"0","output","gpu__time_duration.sum","ms","1.5"
"1","void at::native::fill(int)","dram__bytes_read.sum","byte","7"
"1","void at::native::fill(int)","dram__bytes_write.sum","byte","8"
"1","void at::native::fill(int)","gpu__time_duration.sum","ns","900"
"2","grads","dram__bytes_read.sum","Gbyte","2"
"2","grads","dram__bytes_write.sum","byte","0"
"2","grads","gpu__time_duration.sum","us","40"
"""


def test_traffic_of_our_kernels_is_read_and_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from flexsp.bench import traffic

    @dataclass
    class Predicted:
        kernel: str
        read: int
        written: int
        us: float

    measured = traffic.parse(NCU)
    assert measured[0] == {"kernel": "output", "read": 1200.5e6, "written": 300e3, "us": 1500.0}
    assert measured[1]["us"] == 0.9 and len(measured) == 3
    plan = [Predicted("output", 10**9, 200_800_000, 1000.0), Predicted("grads", 10**9, 10**9, 50.0)]
    rows = traffic.compare(measured, plan)
    assert [row["kernel"] for row in rows] == ["output", "grads"]
    assert rows[0]["ratio"] == rows[1]["ratio"] == 1.0
    with pytest.raises(ValueError, match="expected launches .*'grads', 'output'"):
        traffic.compare(measured, plan[::-1])
    with pytest.raises(ValueError, match="ncu: expected a table, got 'ERR_NVGPUCTRPERM'"):
        traffic.parse("ERR_NVGPUCTRPERM")
    text = table.traffic_table({"rows": rows, "targets": [{"value": 1.0}]})
    assert "| output | 1.20 | 1.20 | 1.00 | 1500 | 1000 |" in text


def test_without_dispatcher_ends() -> None:
    from flexsp.bench.host import without_dispatcher
    from flexsp.compiler import LinearAttention
    from flexsp.kernels.executable import Executable
    from flexsp.runtime.launch import KernelLaunch

    def parts() -> list[object]:
        return [KernelLaunch.run, KernelLaunch.prepare, Executable.precompile, LinearAttention.remembered]

    before = parts()
    with without_dispatcher():
        assert not any(a is b for a, b in zip(parts(), before, strict=True))
    assert parts() == before
