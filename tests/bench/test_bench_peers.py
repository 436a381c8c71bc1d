"""Other libraries in `flexsp bench scale --peers`."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexsp import ops
from flexsp.bench import beside, scale, table
from flexsp.bench.cases import CASES, Shape, make_inputs
from flexsp.bench.peers import peer_over_ranks
from flexsp.launch.cli import main, parser
from tests.harness.bench import CPU, TOY


def test_peers_stand_beside_their_own_single_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another library over ranks is compared with itself on one rank, and its results with ours."""
    times = {"local": 1.0, "chain": 1.1, "fla local": 2.0, "fla": 2.5}

    def measure(functions: dict[str, Any], **how: int) -> dict[str, Any]:
        assert [*functions] == [*times]
        return {name: {"ms": {"median": times[name]}, "slowest_rank_ms": times[name]} for name in functions}

    sp = SimpleNamespace(world_size=2, device=torch.device("cpu"), rank=0, set_lengths=lambda lengths: None)
    aligned = SimpleNamespace(
        sp=sp, gather=lambda x: [x, 2 * x], measure=measure, back_to_back=lambda call, n: float(call is not None)
    )
    monkeypatch.setattr(scale, "_operator", lambda case, sp, mode, inputs: lambda: torch.ones(4))
    off = {"fla": (lambda x: x["q"], lambda x: torch.ones(4) * 1.01), "flashqla": None}
    monkeypatch.setattr(scale, "peer_over_ranks", lambda peer, case, T, world, heads, promised: off[peer])
    args = parser().parse_args(["bench", "scale", *TOY, "--peers", "fla,flashqla"])
    rows = scale._scale_rows(aligned, {"chain": sp}, args, scale.CASES["kda"], 64)  # type: ignore[arg-type]
    found = {row["schedule"]: row for row in rows if row["mode"] == "fwd_bwd"}
    assert found["fla"]["efficiency"] == 2.0 / 2.5 and found["fla"]["added_us"] == 500
    assert found["fla local"]["efficiency"] is None and found["chain"]["efficiency"] == 1 / 1.1
    assert found["fla"]["disagreement"] == pytest.approx(0.02)
    shown = table.scale_table({"rows": rows})
    assert "| fla 1 rank | 2.000 |" in shown and "| fla | 2.500" in shown.replace(" [", " ")


def test_what_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["bench", "scale", *TOY, "--peers", "fla"]) == 1
    assert "--peers: expected GPUs, got ranks on cpu" in capsys.readouterr().err
    assert all(peer_over_ranks(*x, 64, 2, 4, {}) is None for x in (("flashqla", "kda"), ("fla", "delta_rule")))
    monkeypatch.setattr("flexsp.bench.peers.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="peers: expected the module 'flash_qla' of 'flashqla'"):
        peer_over_ranks("flashqla", "gated_delta_rule", 64, 2, 4, {})


def test_another_library_refuses_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is called with its own names of the inputs; what raises is reported by provider and mode."""
    called: list[tuple[str, bool, list[str]]] = []

    def peer(module: str) -> SimpleNamespace:
        def op(**given: Any) -> tuple[torch.Tensor, None]:
            called.append((module, torch.is_grad_enabled(), sorted(given)))
            if torch.is_grad_enabled() and module != "flash_qla":
                raise RuntimeError("this release of Triton is refused")
            return ops.chunk_gated_delta_rule(**given)

        return SimpleNamespace(chunk_gated_delta_rule=op)

    for module in ("fla.ops.gated_delta_rule", "flash_qla"):
        monkeypatch.setitem(sys.modules, module, peer(module))
    monkeypatch.setattr(beside, "find_spec", lambda name: name)
    case = CASES["gated_delta_rule_shared_keys"]
    inputs = make_inputs(case, Shape(1, 9, 2, 4, 4), torch.float32, CPU)
    functions = beside.calls(beside.providers(case, inputs, fla=True)[0])
    (refused,) = beside.warm(functions, CPU)
    assert (refused["provider"], refused["mode"]) == ("fla", "fwd_bwd") and "refused" in refused["error"]
    ran = {(p, mode) for p in ("flexsp", "flashqla") for mode in ("fwd", "fwd_bwd")} | {("fla", "fwd")}
    assert set(functions) == ran
    given = ["beta", "g", "k", "q", "v"]
    assert called == [(m, grad, given) for m in ("fla.ops.gated_delta_rule", "flash_qla") for grad in (False, True)]


def test_another_library_gets_its_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """mlstm_kernels has heads before tokens; its gradients are those of its own leaves."""
    name, seen = "mlstm_kernels.torch.chunkwise.triton_xl_chunk", []

    def theirs(**given: Any) -> torch.Tensor:
        seen.append({key: tuple(x.shape) for key, x in given.items() if isinstance(x, torch.Tensor)})
        turned = {key: given[key].transpose(1, 2) for key in "qkvif"}
        return ops.chunk_mlstm(**turned, head_first=False, eps=given["eps"])[0].transpose(1, 2)

    monkeypatch.setitem(sys.modules, name, SimpleNamespace(mlstm_chunkwise__xl_chunk=theirs))
    monkeypatch.setattr(beside, "find_spec", lambda name: name)
    inputs = make_inputs(CASES["mlstm"], Shape(1, 9, 2, 4, 8), torch.float32, CPU)
    found, _ = beside.providers(CASES["mlstm"], inputs, fla=True)
    functions = beside.calls(found)
    assert ("mlstm_kernels", "fwd") in functions
    for mode in ("fwd", "fwd_bwd"):
        ours, other = functions["flexsp", mode](), functions["mlstm_kernels", mode]()
        pairs = [(ours, other)] if mode == "fwd" else list(zip(ours, other, strict=True))  # type: ignore[call-overload]
        for a, b in pairs:
            torch.testing.assert_close(a.transpose(1, 2), b)
    wide = (1, 2, 9, 4)
    assert seen[0] == {"q": wide, "k": wide, "v": (1, 2, 9, 8), "i": (1, 2, 9), "f": (1, 2, 9)}


def test_other_libraries_are_called_as_their_layers_call_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-linear-attention's layers promise bounds on gates, with which its kernels are faster."""
    told: list[set[str]] = []

    def theirs(**given: Any) -> tuple[torch.Tensor, None]:
        told.append({name for name, x in given.items() if not isinstance(x, torch.Tensor)})
        return torch.zeros(1), None

    for name in ("rwkv7", "kda"):
        monkeypatch.setitem(sys.modules, f"fla.ops.{name}", SimpleNamespace(**{f"chunk_{name}": theirs}))
    for name, bounded in (("rwkv7", False), ("kda", True), ("kda", False)):
        inputs = make_inputs(CASES[name], Shape(1, 3, 2, 4, 4), torch.float32, CPU)
        found, missing = beside.providers(CASES[name], inputs, fla=True, bounded=bounded)
        found[1].forward()
        assert found[1].name == "fla" and not missing
    assert told == [{"safe_gate", "lower_bound", "chunk_size"}, {"safe_gate"}, set()]
