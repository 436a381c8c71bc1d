"""Functions that are off by one diagonal or one sign are refused, not compiled into something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flexsp.compiler import CompileError, LinearAttention, SymbTensor, decayed_scores
from flexsp.compiler.frontend import check
from flexsp.grammar import FlexLinearAttention, decay
from flexsp.testing.compare import relative_error
from flexsp.testing.ranks import run_ranks
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


# Where chunks end -----------------------------------------------------------------------------------------------------


def _chunk(k: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return (k * (g.sum(0) - g.cumsum(0)).exp()[:, None]).T @ v


def _decay(prev_s: torch.Tensor, chunk_state: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return g.sum(0).exp() * prev_s + chunk_state


def _merge(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, chunk_state: torch.Tensor
) -> torch.Tensor:
    b = g.cumsum(0)
    return decayed_scores(q, k, b) @ v + (q * b.exp()[:, None]) @ chunk_state


def _mean(k: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return _chunk(k, v, g) / k.shape[0]


def _once(prev_s: torch.Tensor, chunk_state: torch.Tensor) -> torch.Tensor:
    return 0.9 * prev_s + chunk_state


def _forgets(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, chunk_state: torch.Tensor
) -> torch.Tensor:
    return decayed_scores(q, k, g.cumsum(0)) @ v + q @ chunk_state


def of(*functions: Callable[..., torch.Tensor], **options: Any) -> LinearAttention:
    meta: dict[str, Any] = {name: SymbTensor(["T", 2, n]) for name, n in {"q": 4, "k": 4, "v": 3}.items()}
    meta |= {"g": SymbTensor(["T", 2]), "prev_s": SymbTensor(["NS", 2, 4, 3])}
    return LinearAttention(meta, functions[0], functions[1], functions[2], **options)


WRONG = {
    "chunk_mode '_mean'.*the state after one chunk": (_mean, _decay, _merge),
    "decay_mode '_once'.*the state after one chunk": (_chunk, _once, _merge),
    "merge_mode '_forgets'.*outputs after one chunk": (_chunk, _decay, _forgets),
}


@pytest.mark.parametrize("message", WRONG)
def test_functions_that_disagree_about_where_a_chunk_ends(message: str) -> None:
    assert of(_chunk, _decay, _merge).program.disagrees is None
    with pytest.raises(CompileError, match=message):
        of(*WRONG[message])
    assert of(*WRONG[message], chunk_size=8).program.disagrees is not None
    assert of(_chunk, _decay, _merge, chunk_size=8).program.disagrees is None


class Divided:
    """What a chunk writes is divided by the sum of squares at its end: not affine, and right for one chunk size."""

    extra_state = {"squares": ("K",)}

    def chunk(self, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _chunk(k, v, g), (k * k).sum(0)

    def propagate(
        self, state: torch.Tensor, squares: torch.Tensor, chunk_state: torch.Tensor, chunk_squares: torch.Tensor,
        g: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        new = (2 * g.sum(0)).exp() * squares + chunk_squares
        return g.sum(0).exp() * state + chunk_state / (new[:, None] + 1e-6), new

    def output(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, state: torch.Tensor
    ) -> torch.Tensor:
        return _merge(q, k, v, g, state)


class DividedByEight(Divided):
    chunk_size = 8


def tokens(seed: int, T: int) -> dict[str, torch.Tensor]:
    made, sizes = torch.Generator().manual_seed(seed), {"q": 4, "k": 4, "v": 3}
    x = {name: torch.randn(1, T, 2, n, generator=made, dtype=torch.float64) for name, n in sizes.items()}
    return x | {"decay": -torch.rand(1, T, 2, generator=made, dtype=torch.float64)}


def cut(sp: Any, seed: int, lengths: list[int], bounds: list[int] | None) -> Any:
    """The error of outputs over ranks, or the message of a ValueError."""
    model, x = FlexLinearAttention(decay.gated(), custom_transition=DividedByEight), tokens(seed, sum(lengths))
    cu = None if bounds is None else torch.tensor(bounds)
    sp.set_lengths(lengths)
    start, stop, _ = sp.shard_range(lengths[sp.rank])
    try:
        o = model(**{name: y[:, start:stop] for name, y in x.items()}, cu_seqlens=cu, sp=sp)[0]
    except ValueError as error:
        return str(error)
    return relative_error(o, model(**x, cu_seqlens=cu, sp=False)[0][:, start:stop])


def test_chunks_that_are_part_of_the_model(seed: int) -> None:
    with pytest.raises(CompileError, match=r"decay_mode 'Divided.propagate'.*disagree about where a chunk ends"):
        FlexLinearAttention(decay.gated(), custom_transition=Divided)(**tokens(seed, 9))
    assert max(run_ranks(cut, 2, seed, [16, 5], None)) < 1e-11
    assert max(run_ranks(cut, 2, seed, [11, 10], [0, 3, 21])) < 1e-11
    for text in run_ranks(cut, 2, seed, [11, 10], None):
        assert "sp: expected shards that start on edges of chunks of 8 tokens" in text
        assert "rank 1 from token 11" in text
    for text in run_ranks(cut, 2, seed, [16, 5], [0, 3, 21]):
        assert "rank 1 from token 13" in text


# What is said of a second matrix, and parts of one --------------------------------------------------------------------

BOTH = "def chunk(k, v):\n    return torch.cat([k.T @ v, k.T @ (v * v)], {axis})\n\n\n"


def test_a_second_matrix_by_cat_is_told_of_extra_state(tmp_path: Any) -> None:
    for axis in (0, 1):
        with pytest.raises(CompileError, match="expected the shape of the state.*extra_state of a custom_transition"):
            model(chunk=BOTH.format(axis=axis))
    halves = CHUNK.replace("k.T @ v", "torch.cat([k.T @ v[:, :12], k.T @ v[:, 12:]], 1)")
    reads = MERGE.replace("q @ chunk_state", "torch.cat([q @ (a + b), q @ (a - b)], 1)")
    reads = reads.replace("    return", "    a, b = chunk_state[:, :12], chunk_state[:, 12:]\n    return")
    made = DrawnProgram.of_source(halves + DECAY + reads).model(code_dir=str(tmp_path))
    assert "sizes only" in str(made._generated) and "extra_state of a custom_transition" in str(made._generated)


@pytest.mark.parametrize(
    ("parts", "slices"),
    [
        ("v.split(5, 1)", "v[:, :5], v[:, 5:10]"), ("torch.split(v, [5, 7, 12], dim=-1)", "v[:, :5], v[:, 5:12]"),
        ("v.chunk(3, dim=1)", "v[:, :8], v[:, 8:16]"), ("torch.chunk(v, 5, 1)", "v[:, :5], v[:, 5:10]"),
        ("v.split(split_size=9, dim=1)", "v[:, :9], v[:, 9:18]"),
    ],
)  # fmt: skip
def test_chunk_and_split_are_slices(parts: str, slices: str, seed: int) -> None:
    found = []
    for given in (parts, slices):
        first = f"    parts = {given}\n    a, b = parts[0], parts[1]\n"
        writes = CHUNK.replace("    return k.T @ v", first + "    return k.T @ v * (a.sum() - b.square().sum()).cos()")
        made = DrawnProgram.of_source(writes + DECAY + MERGE)
        x = made.inputs(1, 20, None, torch.Generator().manual_seed(seed))
        found.append(made.model()(**{key: y.double() for key, y in x.items()})[0])
    assert torch.equal(*found)


@pytest.mark.parametrize("size", [1e6, -1e6])
def test_numbers_are_compared_by_their_size(size: float) -> None:
    x, zero = torch.full((3,), size, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for like in (zero, x):
        assert check._close(x, x * (1 + check._TOLERANCE / 2), like)
        assert not check._close(x, x * (1 + 2 * check._TOLERANCE), like)
    assert check._close(zero, zero + check._TOLERANCE, x) and not check._close(zero, zero + 2 * check._TOLERANCE, zero)
