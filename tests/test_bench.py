"""The benchmarks at toy sizes: what they measure, write and judge; never how fast anything is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexsp.bench import op, plot, ranks, record, table
from flexsp.bench.cases import CASES, Shape, forward_backward, make_inputs
from flexsp.bench.timing import Stopwatch, measure, summarize
from flexsp.launch.cli import main

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
TOY = ["--H", "2", "--K", "16", "--V", "16", "--dtype", "float32", "--iterations", "3", "--warmup", "1"]


def test_summarize_gives_order_statistics() -> None:
    timing = summarize([5.0, 1.0, 2.0, 3.0, 4.0])
    assert (timing.median, timing.best, timing.n) == (3.0, 1.0, 5)
    assert timing.p20 == pytest.approx(1.8) and timing.p80 == pytest.approx(4.2)
    assert summarize([7.0]).p20 == 7.0
    with pytest.raises(ValueError, match="times_ms: expected at least one"):
        summarize([])


def test_measure_times_only_the_call_and_interleaves() -> None:
    calls: list[str] = []

    def slow() -> None:
        calls.append("slow")
        time.sleep(0.01)

    timings = measure({"slow": slow, "fast": lambda: calls.append("fast")}, CPU, warmup=1, iterations=4)
    assert timings["slow"].best >= 10.0 > 5.0 > timings["fast"].median
    assert calls[2:] == ["slow", "fast"] * 4
    with pytest.raises(ValueError, match="iterations: expected at least 1, got 0"):
        measure({"slow": slow}, CPU, iterations=0)


def test_stopwatch_leaves_out_what_lies_between() -> None:
    watch = Stopwatch(CPU)
    for pause in (0.0, 0.02):
        time.sleep(pause)
        watch.start()
        watch.stop()
    assert all(ms < 10 for ms in watch.times_ms()) and len(watch.times_ms()) == 2


@pytest.mark.parametrize("name", CASES)
def test_cases_run_and_give_every_gradient(name: str) -> None:
    inputs = make_inputs(CASES[name], Shape(1, 40, 2, 16, 8), torch.float32, CPU)
    gradients = forward_backward(CASES[name].ours, inputs)
    leaves = [tensor for key, tensor in inputs.items() if key != "do"]
    assert [g.shape for g in gradients] == [t.shape for t in leaves]
    assert all(g.isfinite().all() and g.abs().sum() > 0 for g in gradients)
    assert ("g" in inputs) == CASES[name].gated
    assert "g" not in inputs or inputs["g"].max() <= 0


def test_floor_is_that_of_the_plan() -> None:
    """B=1, H=32, K=V=128, T=65536, bf16: 4 tensors of 0.537 GB forward and 11 with backward, gates besides."""
    shape = Shape(1, 65536, 32, 128, 128)
    one = 65536 * 32 * 128 * 2
    assert CASES["linear_attn"].floor_bytes(shape, 2, backward=False) == 4 * one
    assert CASES["linear_attn"].floor_bytes(shape, 2, backward=True) == 11 * one
    gate = 65536 * 32 * 4
    assert CASES["simple_gla"].floor_bytes(shape, 2, backward=True) == 11 * one + 3 * gate
    assert 4 * one / 4.3e9 == pytest.approx(0.50, abs=0.005)


def _row(case: str, T: int, mode: str, provider: str, ms: float, peak: float = 5.0) -> dict[str, Any]:
    return {"case": case, "T": T, "mode": mode, "provider": provider, "ms": summarize([ms]).as_dict(),
            "peak_gib": peak, "floor_ms": 0.5}  # fmt: skip


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
        {"provider": "flexsp", "fwd_bwd_s": 9.0}, {"provider": "flexsp", "fwd_bwd_s": 16.0},
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
    words = [
        "bench",
        "op",
        "--T",
        "40,64",
        "--device",
        "cpu",
        "--cold",
        "",
        "--ops",
        "simple_gla",
        "--out",
        str(tmp_path),
    ]
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


def test_an_exhausted_time_limit_skips(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "bench",
        "op",
        "--T",
        "40",
        "--device",
        "cpu",
        "--cold",
        "",
        "--time-limit",
        "1e-9",
        "--out",
        str(tmp_path),
    ]
    assert main([*words, *TOY]) == 0
    assert "skipped, past --time-limit" in capsys.readouterr().out


def test_first_call_runs_in_a_fresh_process() -> None:
    from flexsp.bench.cold import first_call

    row = first_call("simple_gla", Shape(1, 40, 2, 16, 16), "float32", "cpu", "flexsp", 100)
    assert row["fwd_s"] > 0 and row["fwd_bwd_s"] > 0
    assert "not finished" in first_call("simple_gla", Shape(1, 40, 2, 16, 16), "float32", "cpu", "flexsp", 0.1)["error"]


def test_first_calls_are_of_one_pass_each(monkeypatch: pytest.MonkeyPatch) -> None:
    from flexsp.bench import cold

    steps: list[bool] = []
    monkeypatch.setattr(cold, "forward_backward", lambda op, inputs: steps.append(True) or op(inputs))
    request = {
        "case": "simple_gla",
        "dtype": "float32",
        "device": "cpu",
        "provider": "flexsp",
        "shape": [1, 9, 2, 4, 4],
    }
    for mode, trained in (("fwd", 0), ("fwd_bwd", 1)):
        assert cold._measure(request | {"mode": mode}) and len(steps) == trained


def _torchrun(processes: int | str, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK", "LOCAL_RANK")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "flexsp", *words, "--ranks", str(processes)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)


def test_bench_scale_measures_every_schedule(tmp_path: Path) -> None:
    done = _torchrun(2, "bench", "scale", "--T-local", "64", "--timeout", "60", "--out", str(tmp_path), *TOY)
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


def test_bench_scale_of_several_operators_and_world_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--case", "retention,mamba2", "--T-local", "32", "--schedules", "chain", "--timeout", "60"]
    done = _torchrun("1,2", "bench", "scale", *words, "--out", str(tmp_path), *TOY)
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
    for gpus, sizes, message in ((0, "2,0", "expected at least 1, got 0"), (4, "2,8", "1 to 4, the GPUs here, got 8")):
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
    assert scale._under_torchrun([1, 2, 4], ["bench", "scale"]) == 3
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
    assert "z.json: expected a result of kind op, scale, host, traffic, got 'experiments'" in capsys.readouterr().err
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
    from flexsp.compiler.dispatch import Recipe
    from flexsp.scan.launch import Shot

    def parts() -> list[object]:
        return [Shot.fire, Shot.prepare, Recipe.foresee, LinearAttention.remembered]

    before = parts()
    with without_dispatcher():
        assert not any(a is b for a, b in zip(parts(), before, strict=True))
    assert parts() == before


def test_tables_of_all_results_can_be_made() -> None:
    kinds = {path: record.load(path)["kind"] for path in sorted((ROOT / "benchmarks" / "results").glob("*.json"))}
    files = [path for path, kind in kinds.items() if kind != "experiments"]
    assert {kinds[path] for path in files} == {"host", "traffic", "op", "scale"}
    assert table.markdown(files).count("commit") >= len(files)
