"""`flexsp.compiler.check`, which the constructor of a program calls, and its report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import flexsp.compiler.linear_attention as constructor
from flexsp import variants
from flexsp.compiler import CompileError, LinearAttention, SymbTensor, check
from flexsp.compiler.frontend.check import functions_of
from flexsp.compiler.frontend.meta import InputMeta

Tensor = torch.Tensor
META: dict[str, Any] = {name: SymbTensor(["T", 2, n]) for name, n in {"q": 4, "k": 4, "v": 3}.items()}
META |= {"g": SymbTensor(["T", 2]), "prev_s": SymbTensor(["NS", 2, 4, 3])}


def _chunk(k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    return (k * (g.sum(0) - g.cumsum(0)).exp()[:, None]).T @ v


def _decay(prev_s: Tensor, chunk_state: Tensor, g: Tensor) -> Tensor:
    return g.sum(0).exp() * prev_s + chunk_state


def _merge(q: Tensor, k: Tensor, v: Tensor, g: Tensor, chunk_state: Tensor) -> Tensor:
    b = g.cumsum(0)
    b_i, b_j = b[:, None], b[None, :]
    return ((q @ k.T) * (b_i - b_j).tril().exp()).tril() @ v + (q * b.exp()[:, None]) @ chunk_state


def _ahead(q: Tensor, k: Tensor, v: Tensor, chunk_state: Tensor) -> Tensor:
    return (q @ k.T).tril(1) @ v + q @ chunk_state


def _once(prev_s: Tensor, chunk_state: Tensor) -> Tensor:
    return 0.9 * prev_s + chunk_state


def test_the_report_of_a_gated_program() -> None:
    model = LinearAttention(META, _chunk, _decay, _merge)
    report = check(model)
    assert report == model.report and report.program.transition == model.program.transition
    assert report.functions == ("_chunk", "_decay", "_merge")
    assert report.transition == "scalar" and report.causal and report.chunk_independent and report.affine
    assert report.leak <= 1e-12 and 0 < report.cuts < 1e-12 and 0 < report.affine_error < 1e-12
    assert report.zeros_are_neutral is True
    assert report.grows == (("g", 400.0),)  # e^{6 x 400} is no number; e^{-2400} is 0
    text = str(report)
    for line in (
        "transition: scalar (one factor for the state", "causal: later tokens change outputs by at most ",
        "chunks: results do not depend on where they end, up to ", "affine: the state after a chunk is A S + F, up to ",
        "tokens of zeros: leave the state as it is", "but for g at 400",
    ):  # fmt: skip
        assert line in text
    assert text in model.explain() and "transition='scalar'" in repr(report) and "\n" not in repr(report)
    other = check(model, seed=7)
    assert other.seed == 7 and other.cuts != report.cuts and other.cuts < 1e-12


def test_the_constructor_calls_this_function(monkeypatch: pytest.MonkeyPatch) -> None:
    class Called(Exception):
        pass

    def called(*_: Any) -> None:
        raise Called

    monkeypatch.setattr(constructor, "check", called)
    with pytest.raises(Called):
        LinearAttention(META, _chunk, _decay, _merge)


@pytest.mark.parametrize("seed", [0, 1])
def test_errors_are_those_of_the_constructor(seed: int) -> None:
    functions = functions_of(InputMeta.of(META), False, _chunk, _decay, _ahead)
    with pytest.raises(CompileError, match="not causal: token [0-9]+ of '[kv]'") as mine:
        check(functions, seed=seed)
    with pytest.raises(CompileError) as theirs:
        LinearAttention(META, _chunk, _decay, _ahead)
    assert (mine.value.role, mine.value.name) == (theirs.value.role, theirs.value.name) == ("merge_mode", "_ahead")
    # A program that was changed after it was made is checked as it is now.
    model = LinearAttention(META, _chunk, _decay, _merge)
    model.program = replace(model.program, merge=functions.merge)
    with pytest.raises(CompileError, match="not causal"):
        check(model, seed=seed)


def test_chunks_that_are_part_of_a_program() -> None:
    with pytest.raises(CompileError, match="disagree about where a chunk ends"):
        LinearAttention(META, _chunk, _once, _merge)
    report = check(LinearAttention(META, _chunk, _once, _merge, chunk_size=8))
    assert not report.chunk_independent and report.cuts > 1e-3
    assert "results depend on where they end, by " in str(report)


def test_what_tokens_of_zeros_do() -> None:
    assert check(variants.gla.make(2, 8, 8)).zeros_are_neutral is True
    retnet = check(variants.retnet.make(2, 8, 8))
    assert retnet.zeros_are_neutral is False and "tokens of zeros: change the state" in str(retnet)

    def logarithms(k: Tensor, v: Tensor) -> Tensor:
        return k.log().T @ v

    def kept(prev_s: Tensor, chunk_state: Tensor) -> Tensor:
        return prev_s + chunk_state

    def reads(q: Tensor, k: Tensor, v: Tensor, chunk_state: Tensor) -> Tensor:
        return (q @ k.log().T).tril() @ v + q @ chunk_state

    report = check(LinearAttention({x: y for x, y in META.items() if x != "g"}, logarithms, kept, reads))
    assert report.zeros_are_neutral is None and "tokens of zeros: results are not finite" in str(report)


def test_updates_that_are_not_affine() -> None:
    def squashed(prev_s: Tensor, chunk_state: Tensor) -> Tensor:
        return (prev_s + chunk_state).tanh()

    report = check(LinearAttention(META, _chunk, squashed, _merge, chunk_size=8))
    assert report.transition == "sequential" and not report.affine and report.affine_error is None
    assert "affine: no" in str(report) and "one after the other" in str(report)

    def larger(prev_s: Tensor, chunk_state: Tensor) -> Tensor:
        return torch.maximum(prev_s, chunk_state)

    report = check(LinearAttention(META, _chunk, larger, _merge, chunk_size=8))
    assert report.transition == "max-plus" and not report.affine and "affine: no, it is max(S + a, F)" in str(report)


def test_what_is_no_program() -> None:
    with pytest.raises(ValueError, match="program: expected a flexsp.compiler.LinearAttention, got function"):
        check(_chunk)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seed: expected an integer >= 0, got 0.5"):
        check(variants.linear.make(2, 4, 4), seed=0.5)  # type: ignore[arg-type]
