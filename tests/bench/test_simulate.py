"""`flexsp simulate`: links and exchanges by hand, every message received, predictions beside what was measured."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flexsp.bench import record, simulate
from flexsp.bench.simulation import calibrate, exchange
from flexsp.bench.simulation.calibrate import KINDS_OF, Calibrated, Sample
from flexsp.bench.simulation.exchange import Phase, Rates, Simulation
from flexsp.bench.simulation.network import Clock, Fabric, Link, Route
from flexsp.bench.simulation.trace import Collective, Posts, State, Work, alike, driven, trace_of
from flexsp.launch import cli
from flexsp.scan.schedules import SCHEDULES
from tests.marks import slow

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
MESSAGES = [name for name in SCHEDULES if name != "chain"]
TILE = State(1, 1, 32, 128)  # a state of one tile of 16 KiB


def arrivals(route: Route, sends: list[tuple[float, float]], **options: float) -> list[float]:
    """When messages are there that start at these times with so many bytes."""
    clock, found = Clock(), [0.0] * len(sends)

    def started(i: int) -> None:
        def there(cause: Any) -> None:
            found[i] = clock.now

        route.send(clock, sends[i][1], None, there, **options)

    for i, (at, _) in enumerate(sends):
        clock.at(at, started, i)
    clock.run()
    return found


def test_one_message_takes_its_bytes_and_the_latency() -> None:
    assert arrivals(Route([Link("NVLink", 100e3)], 5.0), [(1.0, 1e6)]) == [1 + 10 + 5]
    assert arrivals(Route([Link("a", 100e3), Link("b", 50e3)], 0.0), [(0.0, 1e6)]) == [20]  # the slower of two at once
    assert arrivals(Route([Link("NVLink", 100e3)], 5.0), [(0.0, 1e6)], most=20e3, latency=1.0) == [50 + 6]
    assert arrivals(Route([Link("NVLink", float("inf"))], 5.0), [(0.0, 1e6), (2.0, 0.0)]) == [5, 7]


def test_messages_on_a_link_share_its_rate() -> None:
    together = arrivals(Route([Link("NVLink", 100e3)], 0.0), [(0.0, 1e6), (0.0, 1e6)])
    assert together == pytest.approx([20, 20])
    # The second one comes when half of the first has gone; the rest of it takes twice as long, and then it is alone.
    one_later = arrivals(Route([Link("NVLink", 100e3)], 0.0), [(0.0, 1e6), (5.0, 1e6)])
    assert one_later == pytest.approx([15, 20])
    short = arrivals(Route([Link("NVLink", 100e3)], 0.0), [(0.0, 1e6), (0.0, 0.2e6), (4.0, 0.2e6)])
    assert short == pytest.approx([14, 4, 8])
    # A message may be slower than its share of the link; the others then have no more for that.
    assert arrivals(Route([Link("NVLink", 100e3)], 0.0), [(0.0, 1e6)] * 2, most=40e3) == pytest.approx([25, 25])


def test_a_card_sends_one_message_after_another_to_a_rank() -> None:
    fabric = Fabric(4, 2, port_gb_s=400, card_gb_s=100, port_us=1, card_us=2, cards=1)
    assert arrivals(fabric.route(0, 2), [(0.0, 1e6), (0.0, 1e6)]) == pytest.approx([13, 23])
    assert arrivals(fabric.route(0, 1), [(0.0, 1e6), (0.0, 1e6)]) == pytest.approx([6, 6])
    clock, found = Clock(), []
    for source, target in ((0, 2), (1, 3)):  # both ranks of a host have the same card
        fabric.route(source, target).send(clock, 1e6, None, lambda cause: found.append(clock.now))
    clock.run()
    assert found == pytest.approx([23, 23])
    halves = Fabric(8, 4, port_gb_s=1, card_gb_s=1, cards=2)
    assert [halves.card_of(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


CHAIN = Rates(launch=1.0, hop=2.0, credit=0.5, fold=0.25, write=0.125, dense=4.0)


def chain(fabric: Fabric, state: State, *phases: Phase, pace: float = 0.0) -> exchange.Run:
    return exchange.simulate(Simulation(fabric, CHAIN, state, "chain", pace=pace), phases or (Phase(),))


def test_a_chain_by_hand() -> None:
    """A tile takes 1 us on a port and 2 us on a card."""
    run = chain(Fabric(3, 3, port_gb_s=16.384, card_gb_s=1), TILE)
    assert run.phases[0].us == pytest.approx([1 + 0.25 + 0.125, 1.25 + 3 + 0.625, 4.25 + 3 + 0.625])
    assert sum(run.phases[0].path.values()) == pytest.approx(run.phases[0].slowest)
    assert run.messages == 2 and run.busy == {"NVLink": 1.0, "network card": 0.0}
    apart = chain(Fabric(3, 2, port_gb_s=16.384, card_gb_s=8.192, card_us=10), TILE)
    assert apart.phases[0].slowest == pytest.approx(4.25 + 2 + 2 + 10 + 0.625)
    assert apart.phases[0].path == pytest.approx(
        {"kernels": 1 + 0.25 + 0.625, "NVLink, bytes": 1.0, "NVLink, latency": 2.0, "network card, bytes": 2.0,
         "network card, latency": 12.0}
    )  # fmt: skip
    back = chain(Fabric(3, 3, port_gb_s=16.384, card_gb_s=1), TILE, Phase(5.0, reverse=True))
    assert back.phases[0].us == pytest.approx([5 + x for x in reversed(run.phases[0].us)])


def test_tiles_of_a_chain_follow_at_the_pace_and_the_link() -> None:
    state = replace(TILE, H=4)
    fast = chain(Fabric(2, 2, port_gb_s=1e9, card_gb_s=1), state, pace=3.0)
    assert fast.phases[0].slowest == pytest.approx(1.25 + (3 * 3 - 0.25) + 2 + 0.625)
    slow = chain(Fabric(2, 2, port_gb_s=16.384, card_gb_s=1), state, pace=0.0)  # all four on the link at once
    assert slow.phases[0].slowest == pytest.approx(1.25 + 4 + 2 + 0.625)
    one_block = Simulation(Fabric(2, 2, port_gb_s=1e9, card_gb_s=1), CHAIN, state, "chain", blocks=1, pace=0.0)
    us = exchange.simulate(one_block).phases[0].us
    assert us == pytest.approx([1 + 4 * 0.375, 1.25 + 2 + 4 * 0.625])  # the last rank is slower than the tiles come
    dense = chain(Fabric(3, 3, port_gb_s=1e9, card_gb_s=1), replace(TILE, kind="dense"))
    assert dense.phases[0].slowest == pytest.approx(1 + 4 + 2 + 4 + 2 + 4 + 0.5)


def test_a_sender_waits_for_the_credit_of_the_call_before_last() -> None:
    """The third call's tile may go once the first one's place is free, which the second rank says late."""
    fabric, rates = Fabric(2, 2, port_gb_s=1e9, card_gb_s=1), replace(CHAIN, credit=100.0)
    run = exchange.simulate(Simulation(fabric, rates, TILE, "chain", pace=0.0), [Phase()] * 4)
    first = [phase.us[0] for phase in run.phases]
    assert first[1] == pytest.approx(2 * (1 + 0.375))
    assert first[2] == pytest.approx(1.25 + 2 + 100 + 2 + 0.125)
    assert first[3] - first[2] == pytest.approx(100 + 0.125 + 1 - 0.0)


@pytest.mark.parametrize("schedule", ["serial", "all_gather"])
def test_torch_messages_by_hand(schedule: str) -> None:
    rates = Rates(start=3.0, message=2.0, kernel=1.0, message_gb_s=10.0, gather=7.0, gather_gb_s=20.0)
    state, world = State(1, 2, 10, 8), 3
    packed = 640 + (80 if schedule == "all_gather" else 0)  # a factor for each row
    nbytes = 16 + packed + -packed % 16
    of = [[x.kernels for x in trace_of(state, schedule, world, world, rank, False) if isinstance(x, Work)]
          for rank in range(world)]  # fmt: skip
    run = exchange.simulate(Simulation(Fabric(world, world, port_gb_s=1e9, card_gb_s=1), rates, state, schedule))
    if schedule == "all_gather":
        wanted = max(3 + sum(works) + 7 + 2 * nbytes / 20e3 for works in of)
    else:
        # rank 1 receives between its first two works, works, and sends; rank 2 then does its last one
        hop = 2 + nbytes / 10e3
        wanted = 3 + of[0][0] + 2 * hop + of[1][1] + of[2][-1]
    assert run.phases[0].slowest == pytest.approx(wanted, abs=2e-3)  # memory takes some 1e-6


def test_a_rank_starts_one_kernel_of_messages_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 starts two messages without waiting for the first, which takes 5 us; both have a port to themselves."""
    deeds = {
        0: [Posts(((True, 1, 50_000),), ()), Posts(((True, 2, 10_000),), ()), Posts((), (0, 1))],
        1: [Posts(((False, 0, 50_000),), (0,))],
        2: [Posts(((False, 0, 10_000),), (0,))],
    }
    monkeypatch.setattr(exchange, "trace_of", lambda *at: deeds[at[4]])
    fabric = Fabric(3, 3, port_gb_s=10.0, card_gb_s=1)
    run = exchange.simulate(Simulation(fabric, Rates(message=2.0), State(1, 1, 1, 1), "serial"))
    assert run.phases[0].us == pytest.approx([2 + 5 + 2 + 1, 2 + 5, 2 + 5 + 2 + 1], abs=1e-6)


def test_an_all_gather_goes_over_all_cards() -> None:
    """Of 4 ranks on 2 hosts each has a state and its factors to be sent on three times, over two cards of each host."""
    rates, state = Rates(gather=7.0, gather_gb_s=20.0), State(1, 1, 8, 32)
    nbytes = 16 + 8 * 33 * 4
    for card, gb_s in ((2.0, 4.0), (50.0, 20.0)):
        fabric = Fabric(4, 2, port_gb_s=400, card_gb_s=card, card_us=11.0)
        run = exchange.simulate(Simulation(fabric, rates, state, "all_gather"))
        assert run.phases[0].slowest == pytest.approx(7 + 11 + 3 * nbytes / (gb_s * 1e3), abs=1e-3)


@pytest.mark.parametrize("schedule", MESSAGES)
@pytest.mark.parametrize("reverse", [False, True])
def test_every_message_that_is_sent_is_received(schedule: str, reverse: bool) -> None:
    world, per_host, state = 12, 4, State(1, 8, 4, 4)
    sent: Counter[tuple[int, int, int]] = Counter()
    received: Counter[tuple[int, int, int]] = Counter()
    gathers = []
    for rank in range(world):
        for deed in driven(state, schedule, world, per_host, rank, reverse):
            if isinstance(deed, Posts):
                for sends, peer, nbytes in deed.messages:
                    (sent if sends else received)[(rank, peer, nbytes) if sends else (peer, rank, nbytes)] += 1
            gathers += [deed] if isinstance(deed, Collective) else []
    assert sent == received and len(gathers) in (0, world) and bool(sent) != bool(gathers)
    fabric = Fabric(world, per_host, port_gb_s=400, card_gb_s=50)
    run = exchange.simulate(Simulation(fabric, Rates(message=1.0), state, schedule), [Phase(reverse=reverse)])
    assert run.messages == sum(sent.values())
    if schedule == "hierarchical":
        carried = sum(link.carried for pair in fabric.network for link in pair)
        apart = sum(nbytes * n for (a, b, nbytes), n in sent.items() if a // per_host != b // per_host)
        assert carried == 2 * apart  # a card of each host
        assert min(link.carried for i in (0, 2) for link in fabric.network[4:8][i]) > 0  # all have their share


def test_a_message_that_nobody_receives_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(state: State, schedule: str, world: int, per_host: int, rank: int, *how: bool) -> Any:
        deeds = trace_of(state, schedule, world, per_host, rank, *how)
        return [deed for deed in deeds if rank != 2 or not isinstance(deed, Posts)]

    monkeypatch.setattr(exchange, "trace_of", without)
    with pytest.raises(ValueError, match=r"ranks \[0, 1\] wait|ranks \[1\] wait"):
        exchange.simulate(Simulation(Fabric(3, 3, port_gb_s=1, card_gb_s=1), Rates(), State(1, 1, 4, 4), "serial"))


@pytest.mark.parametrize(
    ("schedule", "world", "per_host"),
    [("serial", 6, 4), ("hierarchical", 10, 2), ("hierarchical", 7, 3),
     *slow(("pipelined", 9, 4), ("hierarchical", 33, 3), ("hierarchical", 64, 4), ("hierarchical", 8, 8))],
)  # fmt: skip
def test_ranks_that_are_alike_do_the_same(schedule: str, world: int, per_host: int) -> None:
    state = State(1, 4, 8, 8)
    for reverse in (False, True):
        for rank in range(world):
            at = state, schedule, world, per_host, rank, reverse
            assert trace_of(*at) == driven(*at), rank
    if world >= 33 and per_host > 1:
        assert len({alike(schedule, world, per_host, rank) for rank in range(world)}) < world


def test_computing_only_adds() -> None:
    fabric, state = Fabric(6, 3, port_gb_s=400, card_gb_s=50, card_us=5), State(1, 8, 32, 128)
    for schedule in ("chain", "hierarchical"):
        rates = replace(CHAIN, message=3.0, kernel=1.0)
        bare = exchange.simulate(Simulation(fabric, rates, state, schedule), [Phase(), Phase(reverse=True)])
        phases = [Phase(100.0), Phase(50.0, reverse=True)]
        full = exchange.simulate(Simulation(fabric, rates, state, schedule), phases)
        for more, a, b in zip((100, 150), bare.phases, full.phases, strict=True):
            assert b.us == pytest.approx([more + us for us in a.us])


def test_a_search_finds_the_rates_that_made_the_times() -> None:
    truth = Rates(start=6.0, message=9.0, kernel=2.0, message_gb_s=100.0, memory_gb_s=4000.0)
    names = ["start", "message", "kernel", "message_gb_s"]
    samples = []
    for ranks in (2, 4):
        for heads in (16, 256):
            for segments in (1, 8):
                for schedule in ("serial", "pipelined"):
                    sample = Sample(schedule, State(1, heads, 64, 64, segments=segments), (0.0,) * ranks, 1.0)
                    ended = calibrate.run_sample(sample, truth)
                    samples.append(replace(sample, us=ended.us, slowest=ended.slowest))
    begin = replace(truth, start=3.0, message=15.0, kernel=3.0, message_gb_s=150.0)
    found = calibrate._search(begin, names, samples)
    assert [getattr(found, name) for name in names] == pytest.approx([getattr(truth, name) for name in names], rel=1e-3)


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return [record.load(RESULTS / name) for name in simulate.SOURCES]


@pytest.fixture(scope="module")
def found(results: list[dict[str, Any]]) -> Iterator[Calibrated]:
    yield calibrate.calibrate(results)


def test_exchanges_take_what_they_were_measured_to(results: list[dict[str, Any]], found: Calibrated) -> None:
    samples = calibrate.samples_of(results)
    assert len(samples) == 32  # four schedules, two numbers of ranks, sizes and segments
    errors = {x: calibrate.run_sample(x, found.rates).slowest / x.slowest - 1 for x in samples}
    assert max(map(abs, errors.values())) < simulate.NEAR
    assert max(abs(error) for x, error in errors.items() if x.schedule == "chain") < 0.03


def test_operators_take_what_they_were_measured_to(results: list[dict[str, Any]], found: Calibrated) -> None:
    """On 4 GPUs, of which the calibration knows the exchanges alone. Where others than the chain are far off, the host
    was late: a backward pass of so many operators of PyTorch took it longer than the device."""
    rows = [row for row in calibrate.compared(results, found, SCHEDULES) if row.ranks == 4]
    near = {name: [abs(row.error) <= simulate.NEAR for row in rows if row.schedule == name] for name in SCHEDULES[:-1]}
    assert {len(of) for of in near.values()} == {6 * len(KINDS_OF)}
    for row in rows:
        if abs(row.error) > simulate.NEAR:
            print(f"{row.key} {row.schedule}: {row.measured:.0f} us measured, {row.predicted:.0f} predicted")
            assert row.schedule != "chain" and row.key[2] < 65536 and row.measured > row.predicted
    shares = {name: sum(of) / len(of) for name, of in near.items()}
    assert shares["chain"] == 1 and shares["serial"] > 0.95 and shares["all_gather"] > 0.75, shares
    added = [row for row in rows if row.schedule == "chain" and KINDS_OF[row.key[0]] != "dense"]
    off = [row.added[1] - row.added[0] for row in added]
    assert sum(abs(x) < 6 for x in off) / len(off) > 0.85, off  # of 20 us forward and 45 us both


def test_the_cost_model_says_the_same(results: list[dict[str, Any]], found: Calibrated) -> None:
    fabrics = {n: Fabric(n, min(n, 8), port_gb_s=450, card_gb_s=50, card_us=20) for n in (8, 16)}
    ratios = simulate.against_cost_model(results, found.rates, fabrics)
    assert {name for name, *_ in ratios} == set(SCHEDULES)
    most = {"chain": 0.05, "serial": 0.05, "pipelined": 0.15, "all_gather": 0.35, "hierarchical": 1.0}
    for name, ranks, ratio in ratios:
        assert abs(ratio - 1) < most[name], (name, ranks, ratio)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: Calibrated, capsys: Any) -> None:
    monkeypatch.setattr(simulate, "calibrate", lambda results: found)
    monkeypatch.setattr(simulate, "close", lambda *of: ("Near.", ""))
    out, words = tmp_path / "s.json", ["simulate", "--ranks", "4,16", "--per-host", "4", "--case", "simple_gla,kda"]
    assert cli.main([*words, "--nic", "25GB/s", "--schedules", "chain,hierarchical", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "Predicted, not measured: 65,536 tokens a rank" in text and "4 on a host, as many cards of 25 GB/s" in text
    result = json.loads(out.read_text())
    assert result["prediction"] is True and set(result["calibrated_by"]) == set(simulate.SOURCES)
    assert len(result["rows"]) == 2 * 2 * 2 * 2
    for row in result["rows"]:
        assert row["efficiency"] == pytest.approx(row["alone_us"] / (row["alone_us"] + row["added_us"]))
        assert sum(row["path_us"].values()) > 0
    of = {(row["case"], row["schedule"], row["mode"], row["ranks"]): row for row in result["rows"]}
    for case in ("simple_gla", "kda"):
        assert of[case, "chain", "fwd", 16]["added_us"] > of[case, "chain", "fwd", 4]["added_us"]
    one_host = of["simple_gla", "chain", "fwd", 4]["added_us"]
    measured = [row for result in map(record.load, (RESULTS / name for name in simulate.SOURCES[-1:]))
                for row in result["rows"]]  # fmt: skip
    (row,) = [row for row in measured if (row["case"], row["schedule"], row["mode"], row["T_local"]) ==
              ("simple_gla", "chain", "fwd", 65536)]  # fmt: skip
    assert one_host == pytest.approx(row["added_us"], abs=5)
    pytest.importorskip("matplotlib")
    from flexsp.bench.plot import efficiencies

    efficiencies(result, tmp_path / "s.png")
    assert (tmp_path / "s.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "12"], "--ranks: expected at most 8, or whole hosts of 8, got 12"),
        (["--ranks", "1"], "--ranks: expected an integer >= 2, got 1"),
        (["--nics", "9"], "--nics: expected 1..8, an integer, got 9"),
        (["--nic", "0"], "--nic: expected a finite number > 0, got 0.0"),
        (["--nic-latency", "nan"], "--nic-latency: expected a number of microseconds >= 0, got nan"),
        (["--kernel-us", "-1"], "--kernel-us: expected a number of microseconds >= 0, got -1"),
        ([str(RESULTS / "host_h200_20261122.json")], "expected files of `flexsp bench scale`, got"),
        ([str(RESULTS / simulate.SOURCES[-1])], "expected operators on 1, 2 and 4 ranks, got none on 1 and 2"),
        ([str(RESULTS / name) for name in simulate.SOURCES[:3]], "operators on 1, 2 and 4 ranks, got none on 4"),
    ],
)
def test_what_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", *words]) == 1
    assert message in capsys.readouterr().err


def test_files_without_exchanges(results: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match="expected exchanges of chain and of other schedules, got none"):
        calibrate.fit_rates(results[:2])
    other = json.loads(json.dumps(results[0]))
    other["environment"]["device"] = "NVIDIA H100 80GB HBM3"
    with pytest.raises(ValueError, match="expected files of one device, got NVIDIA H100 80GB HBM3 and NVIDIA H200"):
        calibrate.fit_rates([other, *results[1:]])
    other["shape"]["H"] = 5
    with pytest.raises(ValueError, match="expected files of one shape"):
        calibrate.calibrate([other, *results[1:]])


def test_words_that_are_no_rate(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["simulate", "--nic", "fast"])
    assert "expected GB/s such as 50 or 50GB/s, got 'fast'" in capsys.readouterr().err


def test_a_length_that_was_not_measured(found: Calibrated) -> None:
    fabrics = {2: Fabric(2, 2, port_gb_s=450, card_gb_s=50)}
    with pytest.raises(ValueError, match=r"--T-local: expected one of \[8192, 32768, 65536\] .* of gla, got 7"):
        simulate.weak_scaling_rows(found, fabrics, ["gla"], ["chain"], 7)


@pytest.mark.slow
def test_a_thousand_ranks(found: Calibrated) -> None:
    """Every tile on every rank, and every rank of the hierarchy."""
    fabric = Fabric(1024, 8, port_gb_s=450, card_gb_s=50, card_us=20)
    run = exchange.simulate(Simulation(fabric, found.rates, replace(found.state, kind="scalar"), "chain"))
    assert run.messages == 1023 * 128
    other = exchange.simulate(Simulation(fabric, found.rates, found.state, "hierarchical"))
    assert other.phases[0].slowest < run.phases[0].slowest / 4
