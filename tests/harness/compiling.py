"""Kernels compiled for a GPU that is not there, in processes that end with the call: it may patch what it likes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flexsp.testing.ranks import run_ranks

__all__ = ["described", "in_child", "told_of"]

SEEN = ("name", "registers", "stack", "shared", "spills", "assembler", "unwritten", "serialized")
FOUND = ("waits_first", "uneven_sums", "drops_nan", "races")


def in_child(call: Callable[..., Any], *args: Any, timeout: float = 280, **environment: str | Path) -> Any:
    """What ``call(*args)`` returns in a process of its own with more environment variables, and without Triton's
    interpreter. The process has imported torch and flexsp already: it is a fork, which costs a tenth of a second."""
    (answer,) = run_ranks(_answer, 1, call, args, environment, own_processes=True, timeout=timeout)
    return answer


def _answer(sp: Any, call: Callable[..., Any], args: tuple[Any, ...], environment: dict[str, Any]) -> Any:
    assert os.environ.get("TRITON_INTERPRET", "0") != "1", "nothing is compiled under the interpreter"
    os.environ.pop("FLEXSP_BACKEND", None)
    os.environ["CUDA_HOME"] = os.devnull  # the ptxas of a toolkit that happens to be here spills as it likes
    os.environ.update({name: str(value) for name, value in environment.items()})
    return call(*args)


def told_of(launches: Any) -> list[dict[str, Any]]:
    """Of each recorded launch what its machine code says, and what is wrong with it."""
    from flexsp.testing.offline import compile_launches

    return [
        {name: getattr(found, name) for name in (*SEEN, *FOUND)} | {"wgmma": found.ptx.count("wgmma.mma_async")}
        for found in compile_launches(launches)
    ]


def described(kernels: list[dict[str, Any]]) -> str:
    return "\n".join(" ".join(f"{key}={value}" for key, value in kernel.items()) for kernel in kernels)
