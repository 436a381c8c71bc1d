"""Accesses outside of a kernel's tensors, and barriers that it lacks, are seen under the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from flexsp.testing.bounds import within_tensors
from flexsp.testing.ranks import run_ranks
from tests.harness.interpreted import INTERPRETED


@triton.jit
def copy_kernel(x, y, n, stride, FROM: tl.constexpr, TO: tl.constexpr):
    """Elements FROM to n - 1 of x, in y."""
    i = tl.arange(0, 16) + FROM
    tl.store(y + i, tl.load(x + i * stride, mask=i < n), mask=i < TO)


def _copied(sp: Any, size: int, n: int, first: int, to: int, stride: int) -> str:
    memory = torch.zeros(64)
    x, y = memory[8 : 8 + size * stride : stride], memory[40 : 40 + size]
    with within_tensors():
        try:
            copy_kernel[(1,)](x, y, n, stride, FROM=first, TO=to)
        except Exception as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("size", "n", "first", "to", "stride", "said"),
    [
        (12, 12, 0, 12, 1, ""), (12, 12, 0, 12, 2, ""), (12, 13, 0, 12, 1, "1 of 13 elements of a load"),
        (8, 9, 0, 8, 2, "1 of 9 elements of a load"), (12, 12, 0, 16, 1, "4 of 16 elements of a store"),
        (12, 12, -2, 12, 1, "2 of 14 elements of a load"),
    ],
)  # fmt: skip
def test_accesses_beside_tensors_are_seen(size: int, n: int, first: int, to: int, stride: int, said: str) -> None:
    (found,) = run_ranks(_copied, 1, size, n, first, to, stride, env=INTERPRETED)
    assert said in found and bool(found) == bool(said), found


def _beside(sp: Any, n: int, between: bool) -> str:
    memory = torch.zeros(32)
    x, y = memory.view(16, 2).unbind(1) if between else memory.split(16)
    with within_tensors():
        try:
            copy_kernel[(1,)](x, y, 17, x.stride(0), FROM=n - 16, TO=n)
        except Exception as error:
            return str(error)
    return ""


def test_accesses_of_two_tensors_at_once_are_seen() -> None:
    """Of one that reaches into the next, and not of views that lie between each other's numbers."""
    (found,) = run_ranks(_beside, 1, 17, False, env=INTERPRETED)
    assert "the 16 elements of a load lie in several tensors" in found
    for between in (False, True):
        assert run_ranks(_beside, 1, 16, between, env=INTERPRETED) == [""]


@triton.jit
def turned_kernel(x, y, WHAT: tl.constexpr, BARRIER: tl.constexpr):
    """The first 16 numbers of x are read after they were stored, or the other way round, by tiles of other shapes."""
    i = tl.arange(0, 16)
    j = tl.arange(0, 4)[:, None] + 4 * tl.arange(0, 4)[None, :]
    if WHAT == "load behind store":
        tl.store(x + i, i.to(tl.float32))
    elif WHAT == "store behind load":
        tl.store(y + j, tl.load(x + j))
    elif WHAT == "store behind store":
        tl.store(x + j, 0.0 * j)
    else:
        tl.store(x + i, tl.load(x + i))
        tl.store(y + j, 0.0 * j)
        tl.store(y + j, 1.0 * j)
    if BARRIER:
        tl.debug_barrier()
    if WHAT == "load behind store":
        tl.store(y + j, tl.load(x + j))
    elif WHAT != "nothing":
        tl.store(x + i, i + 1.0)


def _turned(sp: Any, what: str, barrier: bool) -> str:
    with within_tensors():
        try:
            turned_kernel[(2,)](*torch.zeros(2, 16), WHAT=what, BARRIER=barrier)
        except Exception as error:
            return str(error)
    return ""


@pytest.mark.parametrize("what", ["load behind store", "store behind load", "store behind store", "nothing"])
def test_barriers_that_are_not_there_are_seen(what: str) -> None:
    """Programs do not wait for each other, and threads need no barrier where each overwrites its own numbers."""
    assert run_ranks(_turned, 1, what, True, env=INTERPRETED) == [""]
    (found,) = run_ranks(_turned, 1, what, False, env=INTERPRETED)
    first, _, second = what.partition(" behind ")
    assert (f"a {first} behind a {second} of the same memory" in found) if second else not found, found


@triton.jit
def last_of_all_kernel(x):
    """A number that every program writes, of which there is the last one's alone; and of each its own."""
    i = tl.program_id(0) + tl.num_programs(0) * tl.program_id(1)
    tl.store(x, i)
    tl.store(x + 1 + i, i)


def _orders(sp: Any) -> list[list[float]]:
    found = []
    with within_tensors():
        for _ in range(3):
            last_of_all_kernel[(3, 2)](x := torch.zeros(7))
            found.append(x.tolist())
    return found


def test_programs_run_in_either_order() -> None:
    """A GPU promises none: a kernel whose programs overwrite each other's numbers is wrong in one of the two."""
    (found,) = run_ranks(_orders, 1, env=INTERPRETED)
    assert found == [[last, *range(6)] for last in (0, 5, 0)]
