"""That `block_order` is what the kernel of the chain does, seen in Triton's interpreter, over shared memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexsp.scan.tile_order import Act, block_order
from flexsp.testing.ranks import run_ranks
from flexsp.testing.scans import ScanCall, scan_error
from tests.harness.interpreted import INTERPRETED
from tests.marks import slow

BLOCKS = 2
Seen = list[tuple[str, int]]


def recorded(sp: Any, call: ScanCall, seed: int) -> dict[int, Seen]:
    """What the blocks of this rank's kernel did, by block: acts, and the tiles of those that are told it, -1 else."""
    from dataclasses import replace

    from triton.runtime import interpreter

    from flexsp.scan import propagate

    seen: dict[int, Seen] = {}

    def noting(act: Act, called: Any, tile: int | None = None) -> Any:
        def call(*args: Any, **others: Any) -> Any:
            block = int(interpreter.interpreter_builder.grid_idx[0])
            at = -1 if tile is None else int(args[tile])
            seen.setdefault(block, []).append((act.value, at))
            return called(*args, **others)

        return call

    scan_error(sp, call, seed)  # the channel is open
    channel = sp.channels["propagate"]
    inner = {name: getattr(propagate, name) for name in ("fold", "load_dense", "apply", "through", "write")}
    acts = {"fold": Act.FOLD, "load_dense": Act.FOLD, "apply": Act.APPLY, "through": Act.APPLY, "write": Act.WRITE}
    for name, called in inner.items():
        setattr(propagate, name, noting(acts[name], called))
    propagate.wait_credit = noting(Act.WAIT_CREDIT, propagate.wait_credit, 4)  # type: ignore[assignment]
    propagate.wait_tile = noting(Act.WAIT_TILE, propagate.wait_tile, 5)  # type: ignore[assignment]
    propagate.cycles = lambda: 0  # type: ignore[assignment]
    propagate.wait_cycles = noting(Act.PACE, lambda began, turn: None)  # type: ignore[assignment]
    sp.channels["propagate"] = replace(
        channel, push=noting(Act.PUSH, channel.push), signal=noting(Act.CREDIT, channel.signal)
    )
    launch = propagate.launch

    def fewer(kernel: Any, grid: Any, args: Any, constants: Any, *others: Any) -> Any:
        if constants["HAS_OUT"] and not constants["HAS_IN"]:
            constants = constants | {"PACE": 1}  # the interpreter has no clock of a multiprocessor to wait for
        return launch(kernel, (min(BLOCKS, *grid),), args, constants, *others)

    propagate.launch = fewer  # type: ignore[assignment]
    assert scan_error(sp, call, seed) < 1e-5
    sp.check()
    torch.distributed.barrier(group=sp.cpu_group)
    return seen


@pytest.mark.parametrize(
    "call",
    [
        ScanCall(1, 5, 3, 4, (1, 2, 1)),
        ScanCall(1, 3, 20, 7, (1, 0, 1), "dense", reverse=True),
        ScanCall(1, 3, 3, 4, (2, 24, 2), "scalar", cuts=True),  # of 24 segments one has a cut
        *slow(ScanCall(1, 3, 3, 4, (1, 2, 1), "vector", reverse=True), ScanCall(1, 5, 20, 7, (1, 1, 1), "dense")),
    ],
    ids=lambda call: f"{call.kind}{'-reverse' * call.reverse}{'-cut' * call.cuts}",
)
def test_the_kernel_keeps_the_order(call: ScanCall, seed: int) -> None:
    world = len(call.nsegs)
    found = run_ranks(recorded, world, call, seed, transport="posix", heap_mib=4, env=INTERPRETED, own_processes=True)
    for rank, blocks in enumerate(found):
        place = world - 1 - rank if call.reverse else rank
        how = {"has_in": place > 0, "has_out": place < world - 1, "dense": call.kind == "dense", "cut": call.cuts}
        assert sorted(blocks) == list(range(BLOCKS))
        for block, seen in blocks.items():
            wanted = list(block_order(block, BLOCKS, call.H, **how))  # a head is a tile
            assert [act for act, _ in seen] == [act.value for act, _ in wanted], (rank, block)
            waits = (Act.WAIT_CREDIT, Act.WAIT_TILE)
            assert [x for _, x in seen if x >= 0] == [x for act, x in wanted if act in waits], (rank, block)
