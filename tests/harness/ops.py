"""Every public op, and the tables that tests go through. An op without rows fails tests/ops/test_ops.py."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from flexsp import ops
from flexsp.testing import problems
from flexsp.testing.cases import CASES, PROGRAM_CASES
from tests.harness import mamba3, mlstm, selective, vector_gates
from tests.op_cases import OTHER_CASES

__all__ = ["ALL", "ON_GPU", "OVER_RANKS", "PARALLEL", "PUBLIC", "TOKEN_LOOPS", "named"]

ALL = CASES | PROGRAM_CASES | OTHER_CASES
"""Random inputs of every op that runs over ranks, by the way to call it."""

PUBLIC = {name for name in ops.__all__ if name != "Mamba3State"}
PARALLEL = {name for name in PUBLIC if "sp" in inspect.signature(getattr(ops, name)).parameters}


def named(calls: Iterable[Callable[..., Any]]) -> set[str]:
    """The public ops among them, those with arguments bound, and those that others call."""
    found = set()
    for call in calls:
        if isinstance(call, partial):
            found |= named([call.func, *filter(callable, call.args)])
        elif getattr(ops, getattr(call, "__name__", ""), None) is call:
            found.add(call.__name__)
        elif hasattr(call, "__code__"):
            found |= PUBLIC & {*call.__code__.co_names}
    return found


_OF_GATES = [call for op in vector_gates.OPS.values() for call in (op.chunk, op.step)]
_IN_CASES = [case.op for case in (CASES | PROGRAM_CASES).values()]
TOKEN_LOOPS = [*_IN_CASES, *_OF_GATES, mlstm.chunk, mlstm.step, selective.scan, selective.step, *mamba3.OPS]
"""Compared with token loops in float64 by test_ops.py, test_vector_gates.py, test_mlstm.py, test_selective_scan.py and
test_mamba3.py; the recurrent ops of `CASES` and `PROGRAM_CASES` stand in test_ops.py."""

OVER_RANKS = [case.op for case in ALL.values()]
"""Compared over ranks with one rank, by test_sp_ops.py."""

ON_GPU = [
    *problems.OPS.values(), *(case.op for case in PROGRAM_CASES.values()), *_OF_GATES, mlstm.chunk, selective.scan,
    *mamba3.OPS,
]  # fmt: skip
"""Compared with float64 on a GPU, by tests/gpu/: test_ops, test_delta_ops, test_vector_gates and test_memory."""
