"""`flexsp bench models`, and a program of one's own in `flexsp bench op`, at toy sizes on CPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flexsp.bench import beside, document, layers, models, record, summary, table
from flexsp.bench.case import Case, Peer, Shape, make_inputs
from flexsp.bench.gates import TRAINED
from flexsp.bench.layers import Layer, case_of, ways
from flexsp.bench.naive import rg_lru
from flexsp.bench.released import RELEASED
from flexsp.bench.variant import variant_case
from flexsp.launch.cli import main
from tests.harness.bench import CPU, TOY, _row, torchrun
from tests.marks import quick, slow

NAMED = {layer.name: layer for layer in RELEASED}
SHORT = TOY[6:]  # dtype, iterations and warm-up


def _few_heads(layer: Layer) -> Layer:
    """Two groups of heads, or as many channels as there are numbers of state."""
    if layer.H == 1:
        return replace(layer, V=6)
    return replace(layer, H=2 * layer.H // layer.G, G=2) if layer.G > 1 else replace(layer, H=2)


def _small(layer: Layer) -> Layer:
    return replace(_few_heads(layer), K=8, V=6) if layer.H > 1 else _few_heads(layer)


def _seed() -> int:
    return int(torch.randint(1 << 30, ()))


def _inputs(layer: Layer, case: Case | None, T: int, B: int = 1) -> dict[str, torch.Tensor]:
    assert case is not None
    return make_inputs(case, layer.shape(B, T), torch.float32, CPU, seed=_seed())


AT_ONCE = [name for name, x in NAMED.items() if x.op not in ("kda", "rwkv7", "rwkv6", "hgrn2", "mamba")]


@pytest.mark.parametrize("name", quick(NAMED, *AT_ONCE))
def test_every_layer_is_called(name: str) -> None:
    """Its inputs can be made, and its op takes them."""
    layer = _few_heads(NAMED[name])
    case = case_of(layer)
    inputs = _inputs(layer, case, 3)
    assert case is not None
    o = beside.Provider("flexsp", case.ours, inputs).forward()
    assert o.shape == inputs["do"].shape and o.isfinite().all() and o.abs().sum() > 0


def test_layers_have_the_sizes_of_their_models() -> None:
    assert len(NAMED) == len(RELEASED) and [x.op for x in RELEASED[:4]] == ["mamba2"] * 4
    for layer in RELEASED:
        case, shape = case_of(layer), layer.shape(1, 3)
        assert case is not None and case.floor_bytes(shape, 2, True) > case.floor_bytes(shape, 2, False) > 0

    def shapes(name: str, *tensors: str) -> list[tuple[int, ...]]:
        case = case_of(NAMED[name])
        assert case is not None and case.draw is not None
        found = case.draw(NAMED[name].shape(2, 3), torch.bfloat16, lambda *size: torch.empty(size, device="meta"))
        return [tuple(found[x].shape) for x in tensors]

    assert shapes("Nemotron-H 8B", "x", "B", "dt", "A") == [(2, 3, 128, 64), (2, 3, 8, 128), (2, 3, 128), (128,)]
    assert shapes("Qwen3.5-27B", "q", "v", "g") == [(2, 3, 16, 128), (2, 3, 48, 128), (2, 3, 48)]
    assert shapes("Kimi K3", "g", "A_log", "dt_bias") == [(2, 3, 32, 128), (32,), (4096,)]
    assert shapes("OLMo-hybrid 7B", "k", "v") == [(2, 3, 30, 96), (2, 3, 30, 192)]
    assert shapes("Mamba-1 2.8B", "u", "A", "B") == [(2, 3, 5120), (5120, 16), (2, 3, 16)]
    assert [NAMED[x].sizes for x in ("Falcon-H1 34B", "GLA-1.3B", "RecurrentGemma 9B")] == [
        "2/32 x 256/128", "4 x 256/512", "4096 channels",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="odd: expected G to divide H = 3, got 2"):
        Layer("odd", "gla", 3, 8, 8, 2, "mild")


IN_PYTORCH = [(kind, op) for kind in layers.KINDS for op, way in ways(kind).items() if way.naive is not None]
FEW = [
    ("initialised", "mamba2"), ("mild", "gated_deltanet"), ("unbounded", "gated_delta_rule_to_2"), ("own", "retention"),
    ("own", "lightning"), ("own", "delta_rule"), ("own", "mlstm"), ("own", "mamba"), ("own", "mamba3"),
    ("own", "rg_lru"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "op"), quick(IN_PYTORCH, *FEW))
def test_an_op_in_pytorch_is_the_op(kind: str, op: str) -> None:
    layer = _small(Layer("x", op, 4, 8, 6, 2 if op in ("mamba2", "gated_delta_rule_to_2") else 4, kind))
    case = case_of(layer, naive=("eager",))
    assert case is not None
    whole = op in ("mlstm", "mamba", "mamba3", "rg_lru")  # written for this, so that several chunks have to meet
    inputs = models._wide(_inputs(layer, case, 200 if whole else 9, B=2))
    ours, plain = (beside.Provider("", op, inputs) for op in (case.ours, case.others["pytorch"].op))
    apart = beside.differences(beside.results(plain), beside.results(ours))
    assert max(apart.values()) < 2 * torch.finfo(torch.float32).eps  # fixed decays are in float32


@pytest.mark.parametrize("kind", TRAINED)
def test_gates_are_those_of_the_kind(kind: str) -> None:
    """Of layers that are given log gates, and of those that make them from what projections give."""

    def inputs(op: str) -> dict[str, torch.Tensor]:
        layer = Layer("x", op, 64, 8, 4, 64, kind)
        return {name: x.detach() for name, x in _inputs(layer, case_of(layer), 300).items()}

    x = inputs("kda")
    A, raw = x["A_log"].exp().view(-1, 1), x["g"] + x["dt_bias"].view(64, 8)
    found = [inputs("gla")["g"], -5 * (A * raw).sigmoid() if kind == "bounded" else -A * F.softplus(raw)]
    steps = [F.softplus(x["dt_bias"])]
    assert ("mamba2" in ways(kind)) == (kind != "bounded")
    if kind != "bounded":
        x = inputs("mamba2")
        found, steps = [*found, x["A"] * F.softplus(x["dt"] + x["dt_bias"])], [*steps, F.softplus(x["dt_bias"])]
    means = [g.mean().item() for g in found]
    assert all(g.max() <= 0 and g.isfinite().all() for g in found)
    if kind in ("mild", "bounded"):
        mild = F.logsigmoid(torch.randn(100_000) + 3).mean().item()
        assert means == pytest.approx([mild if kind == "mild" else -2.5] * len(means), rel=0.1)
        assert kind == "mild" or min(g.min() for g in found) > -5
        return
    assert all(step.min() > 0.00099 and step.max() < 0.101 for step in steps)
    most = 16 if kind == "initialised" else 200
    assert max(A.max(), -x["A"].min()) <= most * 1.0001 and min(A.max(), -x["A"].min()) > most / 16


def test_libraries_are_called_as_their_layers_call_them(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, dict[str, Any]] = {}
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}

    def library(module: str, name: str) -> None:
        def theirs(*args: Any, **given: Any) -> torch.Tensor:
            told[name] = {key: x for key, x in given.items() if not isinstance(x, torch.Tensor)}
            shapes[name] = {key: tuple(x.shape) for key, x in given.items() if isinstance(x, torch.Tensor)}
            return torch.zeros(3, 3)[None] if module == "cudnn.linear_attention" else torch.zeros(1)

        before = vars(sys.modules[module]) if isinstance(sys.modules.get(module), SimpleNamespace) else {}
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**before, **{name: theirs}))

    library("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined")
    library("mlstm_kernels.torch.chunkwise.triton_xl_chunk", "mlstm_chunkwise__xl_chunk")
    for op in ("kimi_delta_attention", "gated_delta_net", "mamba2"):
        library("cudnn.linear_attention", op)
    for op in ("kda", "rwkv7", "gated_delta_rule"):
        library(f"fla.ops.{op}", f"chunk_{op}")
    for name, peer in (
        ("Zamba2 7B", "mamba_ssm"), ("xLSTM-7B", "mlstm_kernels"), ("Kimi K3", "fla"), ("Kimi K3", "cudnn"),
        ("Zamba2 7B", "cudnn"), ("Qwen3-Next", "cudnn"),
        ("RWKV-7 2.9B", "fla"), ("Gated DeltaNet 8 x 256/256", "fla"),
    ):  # fmt: skip
        layer = _few_heads(NAMED[name])
        case = case_of(layer)
        assert case is not None
        of = case.others[peer]
        inputs = _inputs(layer, case, 3)
        of.op(inputs if of.prepare is None else of.prepare(inputs))
    whole = shapes["kimi_delta_attention"]
    assert whole["q"] == (3, 2, 128) and whole["dt_bias"] == (2, 128) and whole["cu_seqlens"] == (2,)
    told.pop("kimi_delta_attention")
    assert shapes["mamba2"] == {
        "x": (3, 112, 64), "B": (3, 2, 64), "C": (3, 2, 64), "dt": (3, 112), "cu_seqlens": (2,),
        **dict.fromkeys(("A", "D", "dt_bias"), (112,)),
    }  # fmt: skip
    assert shapes["gated_delta_net"] == {
        "q": (3, 2, 128), "k": (3, 2, 128), "v": (3, 4, 128), "g": (3, 4), "beta": (3, 4), "cu_seqlens": (2,),
    }  # fmt: skip
    assert told.pop("mamba2") == {"dt_softplus": True}
    assert told.pop("gated_delta_net") == {"use_qk_l2norm_in_kernel": True}
    raw = dict.fromkeys(("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel"), True)
    assert told == {
        "mamba_chunk_scan_combined": {"chunk_size": 256, "dt_softplus": True},
        "mlstm_chunkwise__xl_chunk": {"chunk_size": 64, "eps": 1e-6, "autocast_kernel_dtype": torch.bfloat16},
        "chunk_kda": {**raw, "safe_gate": True, "lower_bound": -5.0},
        "chunk_rwkv7": {"safe_gate": True, "lower_bound": -0.6065306597126334, "chunk_size": 64},
        "chunk_gated_delta_rule": raw,
    }


def _bench(tmp_path: Path, *words: str) -> dict[str, Any]:
    assert main(["bench", "models", "--device", "cpu", *SHORT, "--out", str(tmp_path), *words]) == 0
    (path,) = tmp_path.glob("released_cpu_*.json")
    return record.load(path)


def test_bench_models_writes_what_ran_and_what_did_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--only", "RecurrentGemma|^xLSTM|Zamba", "--lengths", "5,7", "--check", "6", "--gates", "bounded"]
    result = _bench(tmp_path, *words, "--naive", "")
    assert result["left_out"] == [["Zamba2 7B", 1, T, "its op has no bounded gates"] for T in (5, 7)]
    rows = {(row["case"], row["T"], row["provider"], row["mode"]): row for row in result["rows"]}
    assert rows["xLSTM-7B", 5, "mlstm_kernels", "fwd"]["error"] == "not run on a CPU"
    assert rows["xLSTM-7B", 7, "flexsp", "fwd"]["ms"]["n"] == 3
    both = rows["RecurrentGemma 9B", 7, "flexsp", "fwd_bwd"]
    assert both["ms"]["n"] == 3 and both["gates"] == "own" and max(both["from_float64"].values()) < 1e-5
    assert sorted(both["from_float64"]) == ["Lambda", "i", "o", "r", "x"] and both["from_float64"]["o"] > 0
    assert result["differ"] == []
    assert main(["bench", "table", *map(str, tmp_path.glob("*.json"))]) == 0
    printed = capsys.readouterr().out
    forward = rows["RecurrentGemma 9B", 7, "flexsp", "fwd"]["ms"]["median"]
    assert f"| RecurrentGemma 9B | 4096 channels | own | 1 x 7 | {forward:.2f} / " in printed
    assert "- Zamba2 7B, 1 x 5: left out, its op has no bounded gates" in printed and "not run on a CPU" in printed
    assert main(["bench", "models", "--device", "cpu", "--only", "nobody"]) == 1
    assert "--only: expected a pattern of Mamba-2 2.7B, " in capsys.readouterr().err


def test_the_op_in_pytorch_may_be_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here without a compiler, which takes a minute: see `test_compiled_by_torch`."""
    asked: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda op: asked.append(op) or op)
    result = _bench(tmp_path, "--only", "RecurrentGemma 9B", "--lengths", "5", "--naive", "compile", "--check", "0")
    rows = {(row["provider"], row["mode"]): row for row in result["rows"]}
    assert asked == [rg_lru] and {name for name, _ in rows} == {"flexsp", "torch.compile"}
    assert rows["torch.compile", "fwd_bwd"]["ms"]["n"] == 3
    assert max(rows["torch.compile", "fwd_bwd"]["difference"].values()) < 1e-5


@pytest.mark.slow
def test_compiled_by_torch() -> None:
    """By torch's own compiler, of C++ on CPU, which takes minutes for other ops."""
    layer = _small(Layer("x", "retention", 2, 8, 6, 2, "own"))
    case = case_of(layer, naive=("eager", "compile"))
    assert case is not None
    inputs = _inputs(layer, case, 9)
    plain, compiled = (beside.Provider("", case.others[x].op, inputs) for x in ("pytorch", "torch.compile"))
    assert max(beside.differences(beside.results(compiled), beside.results(plain)).values()) < 1e-5


def test_a_library_that_differs_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    layer = replace(NAMED["RecurrentGemma 9B"], V=6)
    case = case_of(layer)
    assert case is not None

    def off(x: dict[str, torch.Tensor]) -> torch.Tensor:
        given = {**x, "Lambda": x["Lambda"].detach() + 0.5 * (x["Lambda"] - x["Lambda"].detach())}
        return case.ours(given)

    def broken(x: dict[str, torch.Tensor]) -> torch.Tensor:
        if torch.is_grad_enabled():
            raise torch.OutOfMemoryError("no more")
        return case.ours(x)

    others = {"off": Peer("torch", off), "broken": Peer("torch", broken), "gone": Peer("no_such_module", off)}
    monkeypatch.setattr(models, "_chosen", lambda case, args, device: (replace(case, others=others), []))
    args = SimpleNamespace(dtype="float32", warmup=0, iterations=1, repeats=1, check=5)
    rows = models._run_layer(layer, case, 1, 7, args, CPU, None)  # type: ignore[arg-type]
    found = {(row["provider"], row["mode"]): row for row in rows}
    assert {key: row["error"] for key, row in found.items() if "error" in row} == {
        ("gone", "fwd"): "not installed", ("gone", "fwd_bwd"): "not installed", ("broken", "fwd_bwd"): "out of memory",
    }  # fmt: skip
    difference = found["off", "fwd_bwd"]["difference"]
    assert difference["Lambda"] == pytest.approx(0.5, rel=1e-4) and difference["o"] == difference["x"] == 0
    rows = [{"case": layer.name, "B": 1, "T": 7, **row} for row in rows]
    [line] = models.differing(rows, torch.float32)
    start, _, exact = line.partition("; from float64 0.5, flexsp ")
    assert start == "off, RecurrentGemma 9B, 1 x 7: gradient of Lambda differs by 0.5" and float(exact) < 1e-5

    def narrow(x: dict[str, torch.Tensor]) -> torch.Tensor:
        if x["x"].dtype == torch.float64:
            raise torch.OutOfMemoryError("no more")
        return case.ours(x)

    rows = models._run_layer(layer, replace(case, ours=narrow), 1, 7, args, CPU, None)  # type: ignore[arg-type]
    assert [row["from_float64"] for row in rows if row["mode"] == "fwd_bwd" and "ms" in row] == [None, None]
    assert "float64       not compared: out of memory" in capsys.readouterr().out


def _measured(device: str, *rows: dict[str, Any]) -> dict[str, Any]:
    env = {"device": f"NVIDIA {device}", "commit": "abcdefgh", "torch": "2", "triton": "3", "mamba_ssm": "2.3"}
    differ = ["x, y: o", "x, y: dq"]
    return {"kind": "released", "environment": env, "rows": list(rows), "left_out": [], "differ": differ}


def _layer_row(provider: str, mode: str, ms: float, **more: Any) -> dict[str, Any]:
    row = {**_row("Zamba2 7B", 32768, mode, provider, ms), "over_floor": 2 * ms, **more}
    peak = {"median": ms, "min": 0, "max": 0, "n": 2}
    return {**row, "B": 1, "sizes": "2/112 x 64/64", "gates": "mild", "peak_gib": peak}


def test_tables_of_released_layers(tmp_path: Path) -> None:
    exact = {"from_float64": {"o": 0.001, "A": 0.25, "x": 0.002}}
    rows = [
        _layer_row("flexsp", "fwd", 1.0), _layer_row("flexsp", "fwd_bwd", 3.0, **exact),
        _layer_row("mamba_ssm", "fwd", 2.0), _layer_row("mamba_ssm", "fwd_bwd", 4.0),
        _layer_row("pytorch", "fwd", 0.5),
    ]  # fmt: skip
    gone = {"case": "xLSTM-7B", "sizes": "8", "gates": "own", "B": 1, "T": 32768, "provider": "flexsp"}
    rows += [{**gone, "mode": mode, "error": "refused: because"} for mode in ("fwd", "fwd_bwd")]
    line = "| Zamba2 7B | 2/112 x 64/64 | mild | 1 x 32768 | 1.00 / 3.00 | 2.0 / 6.0 | "
    line += "mamba_ssm: 2.00 / 4.00; pytorch: 0.50 / - "
    whole = table.released_table(_measured("H100", *rows))
    assert f"{line}| 0.50 / 0.75 | 3.0; mamba_ssm 4.0 | 0.1 / 25 (A); mamba_ssm - |" in whole
    paths = []
    for device in ("H100", "H200"):
        paths.append(tmp_path / f"released_{device}_20260101.json")
        record.save(paths[-1], _measured(device, *rows))
    text = summary.ratios(paths)
    assert "| flexsp ms, H100 | ratio to the fastest library | flexsp ms, H200 |" in text
    assert "| Zamba2 7B | 2/112 x 64/64 | mild | 1.00 / 3.00 | 0.50 / 0.75 of mamba_ssm | 1.00 / 3.00 |" in text
    assert "xLSTM" not in text and "mamba_ssm 2.3." in text  # no library was measured beside it
    assert "| xLSTM-7B | 8 | own | 1 x 32768 | refused |" in summary.released(paths)
    assert f"| H200 {line}" in summary.released(paths) and summary.released(paths).count("- x, y: o; dq\n") == 1
    (tmp_path / "doc.md").write_text("<!-- measured: released none_*.json -->\n<!-- /measured -->\n")
    assert "Not measured yet." in document.refreshed(tmp_path / "doc.md") and not document.sources(tmp_path / "doc.md")


OWN = """
import torch
from flexsp.compiler import ConstExpr, LinearAttention, SymbTensor

def chunk(k, v, g): return (k * (g.sum(0) - g.cumsum(0)).exp()[:, None]).T @ v
def decay(prev_s, chunk_state, g): return prev_s * g.sum(0).exp() + chunk_state
def merge(q, k, v, g, chunk_state):
    b = g.cumsum(0)
    return ((q @ k.T).tril(0) * (b[:, None] - b).exp()) @ v + (q * b.exp()[:, None]) @ chunk_state

h, k, v = ConstExpr("H", 2), ConstExpr("K", [8, 16]), ConstExpr("V", 4)
meta = {"q": SymbTensor(["T", h, k]), "k": SymbTensor(["T", h, k]), "v": SymbTensor(["T", h, v])}
meta |= {"g": SymbTensor(["T", h]), "prev_s": SymbTensor(["NS", h, k, v])}
gated = LinearAttention(meta, chunk, decay, merge)
number = 3
"""


def test_a_program_of_ones_own_stands_beside_pytorch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    words = ["bench", "op", "--device", "cpu", "--T", "9", *SHORT, "--H", "7", "--K", "16", "--out", str(tmp_path)]
    assert main([*words, "--variant", f"{file}:gated"]) == 0
    (path,) = tmp_path.glob("op_own_cpu_*.json")
    result = record.load(path)
    assert [(row["provider"], row["mode"]) for row in result["rows"]] == [
        ("flexsp", "fwd"), ("pytorch", "fwd"), ("flexsp", "fwd_bwd"), ("pytorch", "fwd_bwd")
    ]  # fmt: skip
    assert [result["shape"][x] for x in "HKV"] == [2, 16, 4] and result["cold"] == []
    for spec, message in (
        ("nothing.py:gated", "with a file that exists, got 'nothing.py:gated'"),
        (f"{file}:other", "expected an object of"), (f"{file}:number", "that makes one, got int"),
    ):  # fmt: skip
        assert main([*words, "--variant", spec]) == 1 and message in capsys.readouterr().err


@pytest.mark.parametrize("ranks", [1, *slow(2)])
def test_weak_scaling_of_a_program_of_ones_own(tmp_path: Path, ranks: int) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    words = ["bench", "scale", "--variant", f"{file}:gated", "--T-local", "9", "--schedules", "chain", *TOY]
    words += ["--timeout", "200", "--out", str(tmp_path)]
    if ranks == 1:
        assert main(words) == 0
    else:
        done = torchrun(ranks, *words)
        assert done.returncode == 0, done.stderr[-3000:]
    (path,) = tmp_path.glob("scale_own_cpu*.json")
    result, schedules = record.load(path), ["local", *(["chain"] if ranks > 1 else []), "pytorch local"]
    assert [(row["case"], row["mode"], row["schedule"]) for row in result["rows"]] == [
        ("own", mode, name) for mode in ("fwd", "fwd_bwd") for name in schedules
    ]  # fmt: skip
    assert [result["shape"][x] for x in "HKV"] == [2, 16, 4]
    assert all(row["disagreement"] < 1e-5 for row in result["rows"] if row["schedule"] == "chain")


def test_a_file_may_draw_the_inputs_of_its_program(tmp_path: Path) -> None:
    file = "flexsp/variants/gated_deltanet.py:make"
    args: Any = SimpleNamespace(H=2, K=8, V=4, dtype="float32", gates="bounded", variant=file)

    def drawn(case: Case) -> dict[str, torch.Tensor]:
        return make_inputs(case, Shape(1, 40, args.H, args.K, args.V), torch.float32, CPU, seed=_seed())

    case = variant_case(args, CPU)
    x = drawn(case)
    assert -5 <= x["g"].min() < -1 and x["beta"].min() > 0 and x["k"].norm(dim=-1).allclose(torch.ones(()))
    found = [beside.results(beside.Provider("", op, x)) for op in (case.ours, case.others["pytorch"].op)]
    assert max(beside.differences(*found).values()) < 1e-6
    own = tmp_path / "own.py"
    own.write_text(OWN + """
def bench_inputs(B, T, dtype, normal):
    x = {name: normal(B, T, 2, n).to(dtype) for name, n in (("q", 8), ("k", 8), ("v", 4))}
    return x | {"g": -0.5 + 0 * normal(B, T, 2)}
""")
    args.variant = f"{own}:gated"
    x = drawn(variant_case(args, CPU))
    assert (x["g"] == -0.5).all() and x["do"].shape == (1, 40, 2, 4)
