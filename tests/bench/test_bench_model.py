"""`flexsp bench model`: training steps of a whole model of transformers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexsp.bench import model, record, table
from flexsp.launch.cli import main

SMALL = ("bench", "model", "--size", "tiny", "--T", "70", "--warmup", "1", "--iterations", "2")


def test_table_and_what_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    row: dict[str, Any] = {"size": "1b", "T": 32768, "world_size": 2, "unmodified": False}
    fits = row | {"step_s": 0.5, "tokens_per_s": 65536.0, "peak_gib": 12.34}
    shown = table.model_table({"rows": [fits, row | {"world_size": 1, "unmodified": True, "error": "out of memory"}]})
    assert "| 1b | 32768 | 2 | 0.50 | 65,536 | 12.3 |" in shown
    assert "| 1b | 2 x 32768 | 4 | 0.50 |" in table.model_table({"rows": [fits | {"sequences": 2, "world_size": 4}]})
    assert "| 1b, unmodified | 32768 | 1 | did not fit |  |  |" in shown
    with monkeypatch.context() as without:
        without.setattr(model, "find_spec", lambda name: None)
        assert main([*SMALL]) == 1 and "transformers: expected it to be installed" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(model, "find_spec", lambda name: name)
    group = SimpleNamespace(world_size=2, rank=0, device=torch.device("cpu"))
    monkeypatch.setattr("flexsp.launch.bootstrap.init_sequence_parallel", lambda **how: group)
    assert main([*SMALL, "--unmodified"]) == 1
    assert "--unmodified: expected one rank, got 2" in capsys.readouterr().err
    for size in ("3", "0"):
        assert main([*SMALL, "--sp", size]) == 1
        assert f"--sp: expected a divisor of the 2 ranks, got {size}" in capsys.readouterr().err


@pytest.mark.slow
def test_one_rank_two_ranks_and_the_unmodified_model_learn_alike(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    losses = []
    runs = {"one": ["--profile"], "two": ["--ranks", "2"], "unmodified": ["--unmodified"]}
    for name, words in (runs | {"rows": ["--ranks", "2", "--sp", "1"]}).items():
        assert main([*SMALL, *words, "--out", str(tmp_path / name)]) == 0
        [row] = record.load(next((tmp_path / name).glob("model_*.json")))["rows"]
        assert row["world_size"] == (2 if name in ("two", "rows") else 1) and row["tokens_per_s"] > 0
        assert row["sequences"] == (2 if name == "rows" else 1)
        if name == "rows":  # of another sequence too
            assert row["losses"][0] > row["losses"][-1]
            continue
        losses.append(torch.tensor(row["losses"]))
        assert ("kernels" in row) == (name == "one")
        assert all(ms > 0 and calls > 0 for _, ms, calls in row.get("kernels", []))
    assert losses[0][0] > losses[0][-1]
    for other in losses[1:]:
        torch.testing.assert_close(other, losses[0], atol=2e-3, rtol=0.0)
    assert set(model.SIZES) == {"1b", "tiny"}
