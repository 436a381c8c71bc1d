"""After a fault every rank's error names the same rank, call and hop; and the last exchanges of each are kept."""

from __future__ import annotations

import contextlib
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from flexsp.exceptions import BetweenRanks, PeerMismatch, PeerTimeout
from flexsp.ops import chunk_simple_gla
from flexsp.testing import run_ranks
from flexsp.testing.ranks import RankFailure
from tests.harness.interpreted import INTERPRETED
from tests.marks import quick

WORLD, ODD = 4, 2  # the rank that dies, is silent, or makes another call
LIMIT_S = 3.0


def train(sp: Any, how: str, backward: bool, folder: str) -> None:
    """Steps of one call each, of which rank ODD does not make the second as the others do; what this rank is told."""
    sp.set_lengths([4] * sp.world_size)
    q, k, v = (torch.randn(1, 4, 1, 16).requires_grad_() for _ in range(3))
    g = -torch.rand(1, 4, 1)
    try:
        for step in range(8):  # the first rank of a chain of kernels hears of a fault two calls later
            odd = step == 1 and sp.rank == ODD
            if odd and not backward and _leaves(how):
                return
            o, _ = chunk_simple_gla(q, k, v, None if odd and not backward else g, sp=sp)
            if odd and backward:
                if _leaves(how):
                    return
                o, _ = chunk_simple_gla(q, k, v, sp=sp)
            if backward and not odd:
                o.sum().backward()
            sp.check()
    except BetweenRanks as error:
        Path(folder, str(sp.rank)).write_bytes(pickle.dumps(error))
        if how == "dies":  # the pool would wait for the others
            raise RuntimeError("told") from error


def _leaves(how: str) -> bool:
    if how == "dies":
        os._exit(3)
    return how == "is silent"


CASES = [
    (transport, schedule, how, backward)
    for transport, schedule in [("posix", "chain")] + [
        ("process_group", name) for name in ("chain", "serial", "pipelined", "all_gather")
    ]
    for how in ("is silent", "dies", "calls another op")
    for backward in (False, True)
]  # fmt: skip
QUICK = [
    ("posix", "chain", "is silent", False),
    ("process_group", "chain", "dies", True),
    ("process_group", "chain", "is silent", False),
    ("process_group", "all_gather", "calls another op", False),
]


def told(transport: str, schedule: str, how: str, backward: bool, folder: Path) -> list[Any]:
    options: dict[str, Any] = {"own_processes": True, "env": {"FLEXSP_DUMP": str(folder / "dumps")}}
    if transport == "posix":
        options |= {"heap_mib": 1, "env": options["env"] | INTERPRETED}
    with contextlib.nullcontext() if how != "dies" else pytest.raises(RankFailure):
        run_ranks(
            train, WORLD, how, backward, str(folder), transport=transport, schedule=schedule, sp_timeout_s=LIMIT_S,
            **options,
        )  # fmt: skip
    files = [folder / str(rank) for rank in range(WORLD)]
    return [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]


@pytest.mark.parametrize(("transport", "schedule", "how", "backward"), quick(CASES, *QUICK))
def test_all_ranks_name_the_same_fault(
    transport: str, schedule: str, how: str, backward: bool, tmp_path: Path
) -> None:  # fmt: skip
    errors = told(transport, schedule, how, backward, tmp_path)
    if os.environ.get("SHOW"):
        for rank, error in enumerate(errors):
            print(rank, type(error).__name__, error)
    for rank, error in enumerate(errors):
        if rank == ODD and how != "calls another op":
            assert error is None
            continue
        assert isinstance(error, PeerMismatch | PeerTimeout) and error.rank == rank, errors
        assert error.fault is not None and error.fault == errors[0].fault, [error and error.fault for error in errors]
        assert error.fault.rank == ODD and str(error.fault) in str(error)
