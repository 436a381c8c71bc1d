"""Functions that are off by one diagonal or one sign are refused, not compiled into something else."""

from __future__ import annotations

from typing import Any

import pytest

from flexsp.compiler import CompileError
from tests.generated_programs import DrawnProgram

CHUNK = "def chunk(k, v):\n    return k.T @ v\n\n\n"
DECAY = "def decay(prev_s, chunk_state):\n    return prev_s + chunk_state\n\n\n"
MERGE = "def merge(q, k, v, chunk_state):\n    return (q @ k.T).tril() @ v + q @ chunk_state\n"


def model(chunk: str = CHUNK, decay: str = DECAY, merge: str = MERGE) -> Any:
    return DrawnProgram.of_source(chunk + decay + merge).model()


def test_a_merge_that_sees_one_token_ahead() -> None:
    model()
    with pytest.raises(CompileError, match="not causal: token [0-9]+ of '[kv]' changes the output of earlier tokens"):
        model(merge=MERGE.replace("tril()", "tril(1)"))
    with pytest.raises(CompileError, match="not causal"):
        model(merge=MERGE.replace("@ v +", "@ v + 0.1 * v[-1] +"))


@pytest.mark.parametrize(
    "matrix", ["identity(k, k.size(0)) + (k @ k.T).tril()", "(k @ k.T).tril(-1) - identity(k, k.size(0))"]
)
def test_an_inverse_of_what_has_no_ones_on_its_diagonal(matrix: str) -> None:
    right = CHUNK.replace("k.T @ v", "k.T @ ((identity(k, k.size(0)) + (k @ k.T).tril(-1)).inverse() @ v)")
    model(chunk=right)
    wrong = CHUNK.replace("k.T @ v", f"k.T @ (({matrix}).inverse() @ v)")
    with pytest.raises(CompileError, match="a matrix that is not seen to be unit lower"):
        model(chunk=wrong)
