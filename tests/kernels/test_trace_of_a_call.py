"""How many files and functions of the package a reader meets who follows a call, forward and backward, to its launches.

Kernels count as their launches, and values are not read, as on a GPU.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import flexsp
from flexsp import ops
from flexsp.testing.ranks import run_ranks
from tests import host_time
from tests.harness.interpreted import INTERPRETED

FOLDER = str(Path(flexsp.__file__).parent)


def met(call: Callable[[], object]) -> tuple[list[str], list[str]]:
    """The files and the functions that a call runs. What modules run as they are imported is left out."""
    files, functions = set(), set()

    def note(frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if event != "call" or code.co_name.startswith("<") or not code.co_filename.startswith(FOLDER):
            return
        outer = frame.f_back
        while outer is not None and outer.f_code.co_name != "<module>":
            outer = outer.f_back
        if outer is None or not outer.f_code.co_filename.startswith(FOLDER):
            files.add(code.co_filename.removeprefix(f"{FOLDER}/"))
            functions.add(f"{code.co_filename.removeprefix(f'{FOLDER}/')}:{code.co_firstlineno} {code.co_name}")

    sys.setprofile(note)
    threading.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return sorted(files), sorted(functions)


def followed(sp: Any, op: str, before: int) -> tuple[list[str], list[str]]:
    """What a call meets after so many others."""
    from flexsp.kernels import executable
    from flexsp.ops import _validate
    from flexsp.runtime import launch

    for module in (executable, launch):
        module.run_steps = lambda *args: None  # type: ignore[attr-defined]
    _validate.readable = lambda x: False
    given = {name: x.requires_grad_() for name, x in host_time.inputs_of(op).items()}

    def both_passes() -> None:
        o, _ = getattr(ops, op)(**given)
        torch.autograd.backward(o, torch.zeros_like(o))

    for _ in range(before):
        both_passes()
    return met(both_passes)


def of(op: str, before: int) -> tuple[list[str], list[str]]:
    (found,) = run_ranks(followed, 1, op, before, env=INTERPRETED, own_processes=True)
    return found


def test_a_call_like_earlier_ones() -> None:
    files, functions = of("chunk_simple_gla", 2)
    assert "kernels/executable.py" in files and any("run_backward" in x for x in functions)
    assert len(files) <= 12, files
    assert len(functions) <= 45, functions


def test_a_first_call() -> None:
    """Its program is traced and checked, its launches are planned."""
    files, _ = of("chunk_gated_delta_rule", 0)
    assert {"compiler/frontend/check.py", "kernels/delta/delta_plan.py", "kernels/executable.py"} <= {*files}
    assert len(files) <= 45, files
