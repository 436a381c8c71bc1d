"""The cost model of the rank scan: forms by hand, fit on made-up times, `flexsp bench predict` on real files."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flexsp.bench import predict, record
from flexsp.launch.cli import main
from flexsp.scan import cost, tile_order
from flexsp.scan.cost import Cost, Measurement, fit
from flexsp.scan.schedules import SCHEDULES

FILES = [Path(__file__).parents[1] / "data" / f"scale_{ranks}_ranks.json" for ranks in (2, 4)]  # measured on H200s
BYTE, MEMORY = 5e-6, 2.5e-7  # us: 200 GB/s, 4 TB/s
TRUTH = {
    "chain": Cost("chain", 5.0, 4.0, BYTE, MEMORY, 0.001),
    "serial": Cost("serial", 10.0, 20.0, BYTE, MEMORY),
    "pipelined": Cost("pipelined", 0.0, 10.0, BYTE, MEMORY, 3.0),
    "all_gather": Cost("all_gather", 40.0, 10.0, BYTE, MEMORY),
    "hierarchical": Cost("hierarchical", 20.0, 10.0, BYTE, MEMORY),
}
MEASURED = SCHEDULES[:4]  # in the files
FAR = {"network_latency": 15.0, "network_byte": 2e-5}  # 50 GB/s


@pytest.mark.parametrize(
    ("name", "nbytes", "ranks", "segments", "us"),
    [
        # 128 tiles: one passes 3 times, the others once; the first rank folds and the last writes all of it
        ("chain", 2 << 20, 4, 1, 5 + 3 * 4 + (2**21 + 2 * 2**14) * BYTE + 2 * 2**21 * MEMORY + 3 * 128 * 0.001),
        ("chain", 8 << 20, 2, 8, 5 + 4 + 2**23 * BYTE + 2 * 8 * 2**21 * MEMORY + 512 * 8 * 0.001),
        ("chain", 1000, 3, 1, 5 + 2 * (4 + 1000 * BYTE) + 2000 * MEMORY + 2 * 1000 / 2**14 * 0.001),
        ("chain:put", 1000, 3, 1, 5 + 2 * (4 + 1000 * BYTE) + 2000 * MEMORY + 2 * 1000 / 2**14 * 0.001),
        ("serial", 1_000_000, 3, 2, 10 + 2 * (20 + 5) + 1.5),
        ("chain:process_group", 1_000_000, 3, 2, 5 + 2 * (4 + 5) + 1.5),
        ("pipelined", 8_000_000, 2, 1, 8 * (10 + 5) + 6),
        ("pipelined", 8_000_000, 3, 1, 9 * (10 + 5) + 8 * 3 + 6),
        ("pipelined", 8_000_000, 4, 1, 10 * (10 + 5) + 9 * 3 + 6),
        ("all_gather", 1_000_000, 8, 4, 40 + 7 * 10 + 8 * 5 + 3),
        # on one host: to the owners and back, in one piece of 125,000 bytes, and in eight of 524,288 each
        ("hierarchical", 1_000_000, 8, 4, 20 + 2 * 10 + 2 * 7 / 8 * 5 + 3),
        ("hierarchical", 32 << 20, 8, 1, 20 + 9 * 10 + (2 * 7 / 8 * BYTE + 3 * MEMORY) * (32 << 20)),
    ],
)
def test_forms_by_hand(name: str, nbytes: int, ranks: int, segments: int, us: float) -> None:
    assert replace(TRUTH[name.partition(":")[0]], name=name).us(nbytes, ranks, segments) == pytest.approx(us, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "nbytes", "per_host", "us"),
    [
        # 6 ranks. A piece of 1,000,000 bytes takes 5 us inside a host, 20 us between two
        ("chain", 1_000_000, 3, 5 + 5 * 4 + 15 + 4 * 2**14 * BYTE + 20 + 61.03515625 * 5 * 0.001 + 0.5),
        ("chain", 1_000_000, 2, 5 + 5 * 4 + 2 * 15 + 3 * 2**14 * BYTE + 20 + 2**14 * 2e-5 + 61.03515625 * 0.005 + 0.5),
        ("serial", 1_000_000, 3, 10 + 5 * 20 + 15 + 4 * 5 + 20 + 0.75),
        ("serial", 1_000_000, 1, 10 + 5 * 20 + 5 * 15 + 5 * 20 + 0.75),
        ("pipelined", 8_000_000, 3, 12 * 10 + 15 + 4 * 5 + 8 * 20 + 11 * 3 + 6),
        ("all_gather", 1_000_000, 3, 40 + 5 * 10 + 15 + 6 * 5 + 20 + 0.75),
        ("hierarchical", 1_000_000, 3, 20 + 3 * 10 + 15 + 2 * 2 / 3 * 5 + 20 / 3 + 0.75),
        ("hierarchical", 1_000_000, 2, 20 + 4 * 10 + 2 * 15 + 2 * 1 / 2 * 5 + 2 * 20 / 2 + 0.75),
        ("hierarchical", 500_000, 1, 20 + 3 * 10 + 3 * 15 + 3 * 10 + 0.375),
        # two pieces a share: a step more, each of half the bytes
        ("hierarchical", 3 << 20, 3, 20 + 4 * 10 + 2 * 15 + (4 / 3 * BYTE + 2 * 2e-5 / 6 + 3 * MEMORY) * (3 << 20)),
    ],
)  # fmt: skip
def test_forms_of_several_hosts_by_hand(name: str, nbytes: int, per_host: int, us: float) -> None:
    assert replace(TRUTH[name], per_host=per_host, **FAR).us(nbytes, 6) == pytest.approx(us, rel=1e-12)


def test_the_network_costs_nothing_on_one_host() -> None:
    for name, truth in TRUTH.items():
        for per_host in (None, 4, 9):
            assert replace(truth, per_host=per_host, **FAR).us(1 << 20, 4) == truth.us(1 << 20, 4), name
    with pytest.raises(ValueError, match="per_host: expected at least 1, got 0"):
        replace(TRUTH["chain"], per_host=0).us(1 << 20, 4)


@pytest.mark.parametrize(
    ("hosts", "in_kernel", "name"),
    [([8], True, "chain"), ([64], False, "chain"), ([8, 8], True, "chain"), ([8, 8], False, "hierarchical"),
     ([8] * 16, True, "hierarchical"), ([1, 1], False, "chain"), ([2, 2, 1], True, "chain")],
)  # fmt: skip
def test_the_quicker_schedule(hosts: list[int], in_kernel: bool, name: str) -> None:
    assert cost.quicker(hosts, in_kernel) == name


@pytest.mark.parametrize(("mib", "ranks", "us"), [(2, 4, 11), (2, 8, 20), (2, 64, 134), (2, 1024, 2093), (8, 8, 35)])
def test_chain_is_that_of_the_plan(mib: int, ranks: int, us: int) -> None:
    """2 us and 400 GB/s, a tile applied in no time."""
    assert Cost("chain", latency=2.0, byte=1 / 400e3).us(mib << 20, ranks) == pytest.approx(us, abs=0.6)


def test_tiles_are_those_of_the_kernel() -> None:
    pytest.importorskip("triton")
    from flexsp.scan import tiles

    assert (cost.TILE, cost.BLOCKS) == (4 * tiles.CHAIN_TILE, tile_order.MAX_BLOCKS)


def test_small_gpus_hold_fewer_tiles() -> None:
    """On a GPU of 58 multiprocessors the chain's kernel has 58 blocks, and as many tiles are exposed."""
    truth = replace(TRUTH["chain"], blocks=58)
    us = 5 + 3 * 4 + (2**21 + 2 * 2**14) * BYTE + 2 * 58 * 2**14 * MEMORY + 3 * 128 * 0.001
    assert truth.us(2 << 20, 4) == pytest.approx(us, rel=1e-12)
    memory = {n: fit(_made_up(truth), n)["chain"].cost.memory for n in (58, 132)}
    assert memory[58] == pytest.approx(MEMORY, rel=1e-6) and memory[132] == pytest.approx(MEMORY * 58 / 128, rel=1e-6)


def _made_up(truth: Cost, noise: float = 0.0, sizes: tuple[int, ...] = (2, 4)) -> list[Measurement]:
    generator = torch.Generator().manual_seed(0)
    grid = [(mib << 20, ranks, segments) for mib in (2, 8) for segments in (1, 8) for ranks in sizes]
    factors = 1 + noise * torch.randn(len(grid), generator=generator)
    return [Measurement(truth.name, *at, truth.us(*at) * f) for at, f in zip(grid, factors.tolist(), strict=True)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_fit_finds_the_parameters(name: str) -> None:
    truth = TRUTH[name]
    exact = fit(_made_up(truth))[name]
    for parameter in ("launch", "latency", "byte", "memory", "apply"):
        assert getattr(exact.cost, parameter) == pytest.approx(getattr(truth, parameter), rel=1e-6)
    assert exact.worst < 1e-9
    noisy = fit(_made_up(truth, 0.01))[name]
    assert 0.001 < noisy.worst < 0.03
    for mib, segments in ((2, 1), (2, 8), (8, 1), (8, 8)):
        assert noisy.cost.us(mib << 20, 8, segments) == pytest.approx(truth.us(mib << 20, 8, segments), rel=0.05)


def test_no_parameter_is_negative() -> None:
    found = fit(_made_up(Cost("serial", -20.0, 30.0, BYTE, MEMORY)))["serial"]
    assert found.cost.launch == 0 and found.worst > 0.01
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        matrix, wanted = (torch.randn(8, n, generator=generator, dtype=torch.float64) for n in (4, 1))
        x = cost._nonnegative(matrix, wanted[:, 0])
        descent = matrix.T @ (matrix @ x - wanted[:, 0])
        assert (x >= 0).all() and (descent > -1e-9).all() and (descent * x).abs().max() < 1e-9


@pytest.mark.parametrize(
    ("measurements", "message"),
    [
        ([], "expected at least one, got none"),
        (_made_up(TRUTH["chain"])[:4], "of chain: expected at least 5 .* got 4 that determine 4"),
        (_made_up(TRUTH["serial"], sizes=(4,)), "tell launch, latency, byte, memory apart, got 4 that determine 3"),
        ([Measurement("ring", 1, 2, 1, 1.0)], "schedule: expected one of chain, .*, got 'ring'"),
        ([Measurement("chain", 1, 2, 1, float("nan"))], "of chain: expected positive microseconds, got nan"),
        ([Measurement("chain", 1, 1, 1, 1.0)], "ranks: expected at least 2, got 1"),
        ([Measurement("chain", 0, 2, 1, 1.0)], "nbytes: expected at least 1, got 0"),
    ],
)
def test_what_cannot_be_fitted_is_refused(measurements: list[Measurement], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(measurements)


def test_lines_share_their_slope() -> None:
    added = {("op", "fwd", 8): {2: 10.0, 4: 16.0, 8: 99.0}, ("op", "fwd", 16): {2: 20.0, 4: 30.0},
             ("op", "fwd_bwd", 8): {2: 1.0, 4: 2.0}, ("op", "fwd", 32): {4: 7.0}}  # fmt: skip
    lines = predict.added_lines(added, [2, 4])
    assert lines == {("op", "fwd", 8): (5.0, 4.0), ("op", "fwd", 16): (17.0, 4.0), ("op", "fwd_bwd", 8): (0.5, 0.5)}


def test_a_chain_of_torch_messages_costs_what_serial_does() -> None:
    results = [record.load(path) for path in FILES]
    for result in results:
        result["transports"]["chain"] = "process_group"
    assert {key[0] for key in predict.exchanges(results)} == {"chain:process_group", *MEASURED[1:]}


def _doubled() -> dict[str, Any]:
    """A file of 8 ranks in which everything takes twice as long as on 4."""
    result = copy.deepcopy(record.load(FILES[1]))
    result["environment"]["world_size"] = 8
    for row in result["rows"] + result["states"]:
        row["world_size"] = 8
        row["ms"]["median"] *= 2
        row["added_us"] = 2 * row["added_us"] if row.get("added_us") else None
    return result


def _cells(text: str, *start: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith("| " + " | ".join(start))]
    return line.strip("| ").split(" | ")


def test_prediction_from_the_real_files() -> None:
    results = [record.load(path) for path in FILES]
    text = predict.report(results, 8)
    chain = _cells(text, "chain", "2.1", "1")
    assert chain[3].startswith("20.3 / ") and chain[4].startswith("30.0 / ") and chain[6] == "not measured"
    forward = _cells(text, "simple_gla", "fwd", "65536")
    assert forward[3].startswith("12.5 / ") and forward[-2:] == ["not measured", "45"]
    both = _cells(text, "simple_gla", "fwd+bwd", "8192")
    assert float(both[5]) == pytest.approx((24.03 + 41.3) / 2 + 5 * 10.5, abs=0.5) and both[-1] == "90"
    again = predict.report([*results, _doubled()], 8)
    measured = _cells(again, "chain", "2.1", "1")
    assert measured[:6] == chain[:6] and measured[6] == "60.1"
    assert _cells(again, "simple_gla", "fwd", "65536")[:6] == forward[:6]
    assert _cells(again, "simple_gla", "fwd", "65536")[6] == "45.2"


def test_the_model_fits_the_real_files() -> None:
    fits = predict.fit_exchanges(predict.exchanges([record.load(path) for path in FILES]), [2, 4])
    assert set(fits) == set(MEASURED)
    for name, one in fits.items():
        assert len(one.measurements) == 8 and one.worst < 0.025, name
        assert 3500 < one.cost.memory_gb_s < 4500, name  # a copy reaches 4300
    assert fits["chain"].cost.link_gb_s == pytest.approx(16384 / 160 * 1.98, rel=0.05)  # PACE cycles a tile at 1.98 GHz


def test_files_that_cannot_be_used_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "op.json").write_text('{"kind": "op"}')
    for words, message in (
        ([str(FILES[0])], "expected at least two world sizes besides 1 and 8 to fit, got [2]"),
        ([*map(str, FILES), "--ranks", "4"], "besides 1 and 4 to fit, got [2]"),
        ([*map(str, FILES), "--ranks", "1"], "--ranks: expected at least 2, got 1"),
        ([str(tmp_path / "op.json")], "expected files of `flexsp bench scale`, got"),
    ):
        assert main(["bench", "predict", *words]) == 1
        assert message in capsys.readouterr().err
    unlike = [record.load(path) for path in FILES]
    unlike[0] |= {"states": [], "rows": [row for row in unlike[0]["rows"] if row["schedule"] == "local"]}
    unlike[1] |= {"states": []}
    with pytest.raises(ValueError, match=r"expected an exchange or an operator over two of \[2, 4\] ranks, got none"):
        predict.report(unlike, 8)
    other = _doubled()
    other["environment"]["device"] = "another GPU"
    with pytest.raises(ValueError, match="expected files of one device, got NVIDIA H200 and another GPU"):
        predict.report([record.load(FILES[0]), other], 8)
