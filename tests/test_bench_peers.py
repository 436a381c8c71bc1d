"""Other libraries in `flexsp bench scale --peers`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexsp.bench import scale, table
from flexsp.bench.peers import peer_over_ranks
from flexsp.launch.cli import main, parser
from tests.test_bench import TOY


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
    monkeypatch.setattr(scale, "peer_over_ranks", lambda peer, case, T, world, heads: off[peer])
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
    assert all(peer_over_ranks(*x, 64, 2, 4) is None for x in (("flashqla", "kda"), ("fla", "delta_rule")))
    monkeypatch.setattr("flexsp.bench.peers.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="peers: expected the module 'flash_qla' of 'flashqla'"):
        peer_over_ranks("flashqla", "gated_delta_rule", 64, 2, 4)
