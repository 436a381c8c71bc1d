"""What goes over the ranks as on CUDA never makes the host wait for a GPU; GPUs are asked by tests/gpu."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flexsp.comm import collectives, halo, process_group
from flexsp.comm.collectives import sum_over_ranks
from flexsp.comm.halo import halo_exchange
from flexsp.comm.process_group import Call
from flexsp.nn import SequenceParallelLA, ShortConvolution
from flexsp.nn.conv import tokens_since_start
from flexsp.scan.schedules import SCHEDULES, incoming_state
from flexsp.scan.transitions import Transition
from flexsp.testing import run_ranks
from flexsp.testing.waits import HostWaits

WAITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a number into a place": lambda x: x.__setitem__(0, 5),
    "a number into places": lambda x: x.__setitem__([0, 1], 5.0),
    "a list": lambda x: torch.tensor([1, 2]),
    "a value": lambda x: x.sum().item(),
    "a decision": lambda x: bool((x > 0).any()),
    "a mask": lambda x: x[x > 0],
    "places": lambda x: x.nonzero(),
    "equality": lambda x: torch.equal(x, x),
}
FREE: dict[str, Callable[[torch.Tensor], Any]] = {
    "a number into a slice": lambda x: x[:1].__setitem__(slice(None), 5),
    "fill": lambda x: x[:1].fill_(5),
    "a tensor into a place": lambda x: x.__setitem__(0, x[1]),
    "where": lambda x: torch.where(x > 0, x, 5),
    "made on the device": lambda x: torch.full((3,), 2) + torch.arange(3),
    "gathered": lambda x: x[torch.arange(2)],
}


@pytest.mark.parametrize("name", WAITS)
def test_waits_are_found(name: str) -> None:
    x = torch.randn(4)
    with HostWaits() as waits:
        WAITS[name](x)
    assert waits.found and all(__file__ in text for text in waits.found), waits.found


@pytest.mark.parametrize("name", FREE)
def test_what_does_not_wait_is_not_found(name: str) -> None:
    x = torch.randn(4)
    with HostWaits() as waits:
        FREE[name](x)
    assert not waits.found


def _exchanges(sp: Any) -> dict[str, Callable[[], Any]]:
    """Everything that goes over torch.distributed, with gradients where there are any."""
    x = torch.randn(1, 6, 8, requires_grad=True)
    F, log_a, A = torch.randn(1, 3, 4, 4), -torch.rand(1, 3), torch.randn(1, 3, 4, 4)
    cu, convolution = torch.tensor([0, 8, 6 * sp.world_size]), SequenceParallelLA(ShortConvolution(8), sp)
    found: dict[str, Callable[[], Any]] = {
        "halo": lambda: halo_exchange(x, 3, sp).sum().backward(),
        "halo longer than the shard": lambda: halo_exchange(x, 9, sp).sum().backward(),
        "gather": lambda: sp.gather(x).sum().backward(),
        "sum": lambda: sum_over_ranks(x, sp),
        "convolution": lambda: convolution(x).sum().backward(),
        "convolution in documents":
            lambda: convolution(x, since=tokens_since_start(6, cu, sp, sp.device)).sum().backward(),
    }
    for reverse in (False, True):
        for through in (Transition.of(F, log_a), Transition.of(F, A, kind="dense")):
            name = f"state, {through.kind}, reverse {reverse}"
            found[name] = lambda way=reverse, through=through: incoming_state(F, through, sp, way)
    return found


def _waits(sp: Any, looking: bool) -> dict[str, list[str]]:
    """What waits in each exchange; with `looking`, looking at a message does."""
    inside: dict[tuple[Any, str], Any] = {  # operators as plain functions: a dispatch mode does not look into them
        (halo, "_halo"): halo._run, (halo, "_halo_adjoint"): halo._run_adjoint,
        (collectives, "_sum"): collectives._run_sum, (collectives, "_gather"): collectives._run_gather,
        (collectives, "_gather_adjoint"): collectives._run_adjoint,
        (process_group, "carries_stamp"): lambda data: True,  # as on CUDA
    }  # fmt: skip
    if looking:
        inside[Call, "look_at"] = lambda self, buffer, peer: buffer.sum().item()
    before = {(module, name): getattr(module, name) for module, name in inside}
    sp.set_lengths([6] * sp.world_size)
    seen = {}
    try:
        for (module, name), function in inside.items():
            setattr(module, name, function)
        for name, call in _exchanges(sp).items():
            call()  # what is made once
            with HostWaits() as waits:
                call()
            seen[name] = waits.found
            sp.check()
    finally:
        for (module, name), function in before.items():
            setattr(module, name, function)
        sp.set_lengths(None)
    return seen


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_exchanges_do_not_wait(schedule: str) -> None:
    for seen in run_ranks(_waits, 3, False, schedule=schedule):
        assert len(seen) == 10 and not any(seen.values()), seen


def test_waits_inside_every_exchange_are_found() -> None:
    seen = run_ranks(_waits, 3, True)
    assert all(any(rank[name] for rank in seen) for name in seen[0]), seen
