"""Stage 2: what the three functions do, found out by running them on small random chunks in float64.

`decay` is classified by how it acts on the state: that decides what ranks exchange. `merge` must be causal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch.func import jvp

from flexsp.compiler.meta import CHUNK_STATE, STATE, ConstExpr, InputMeta, Size
from flexsp.compiler.trace import CompileError, Traced

__all__ = ["Program", "Transition", "check"]

Transition = Literal["none", "scalar", "vector", "elementwise", "dense", "not affine"]
Tensors = dict[str, torch.Tensor]
_CHUNK = 6
_TOLERANCE = 1e-8


@dataclass(frozen=True)
class Program:
    """The three traced functions with what was found out about them."""

    meta: InputMeta
    chunk: Traced
    decay: Traced
    merge: Traced
    transition: Transition
    value_sizes: tuple[Size, ...]  # of one token's output


def call(traced: Traced, values: Mapping[str, torch.Tensor | float]) -> tuple[torch.Tensor, Tensors]:
    """Result and cached values of one function on one chunk of one head."""
    result, *cached = traced.module(**{name: values[name] for name in traced.arguments})
    return result, dict(zip(traced.cached, cached, strict=True))


def check(meta: InputMeta, chunk: Traced, decay: Traced, merge: Traced) -> Program:
    """Arguments, shapes, causality of `merge` and the kind of `decay`; CompileError says what is wrong."""
    _check_arguments(meta, chunk, decay, merge)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        values, state = _draw(meta)
        F, cached = _run(chunk, "chunk_mode", values)
        _expect(chunk, "chunk_mode", F, state.shape)
        inputs = values | cached
        after, _ = _run(decay, "decay_mode", inputs | {STATE: state, CHUNK_STATE: F})
        _expect(decay, "decay_mode", after, state.shape)
        o, _ = _run(merge, "merge_mode", inputs | {CHUNK_STATE: state})
        if o.dim() != 2 or o.shape[0] != _CHUNK:
            raise CompileError("merge_mode", merge.name, f"expected a result [C, V], got {_shape(o.shape)}")
        _check_causal(meta, chunk, merge, values, state, o)
        kind = _classify(decay, inputs | {CHUNK_STATE: F}, state)
    return Program(meta, chunk, decay, merge, kind, (o.shape[1],))


def _shape(shape: torch.Size) -> str:
    return str(list(shape))


def _check_arguments(meta: InputMeta, chunk: Traced, decay: Traced, merge: Traced) -> None:
    inputs = {**meta.tokens, **meta.params, **meta.numbers}
    for role, traced, more in (
        ("chunk_mode", chunk, set()),
        ("decay_mode", decay, {STATE, CHUNK_STATE, *chunk.cached}),
        ("merge_mode", merge, {CHUNK_STATE, *chunk.cached}),
    ):
        for name in traced.arguments:
            if name not in inputs and name not in more:
                known = ", ".join(sorted({*inputs, *more}))
                raise CompileError(
                    role, traced.name, f"argument {name!r} is no input and no cached value; there are {known}"
                )
        if role != "chunk_mode" and traced.cached:
            raise CompileError(
                role, traced.name, f"only chunk_mode may cache results, it caches {', '.join(traced.cached)}"
            )
    for name in chunk.cached:
        if name in inputs or name in (STATE, CHUNK_STATE):
            raise CompileError("chunk_mode", chunk.name, f"cache_result name {name!r} hides an input of the same name")
    if STATE not in decay.arguments:
        raise CompileError("decay_mode", decay.name, f"expected an argument {STATE!r}, the state that enters the chunk")


def _small(sizes: tuple[Size, ...] | list[Size], names: dict[str, int]) -> list[int]:
    """Test sizes: small and different for each ConstExpr, literal integers as they are."""
    return [names.setdefault(s.name, 3 + len(names)) if isinstance(s, ConstExpr) else int(s) for s in sizes]


def _draw(meta: InputMeta) -> tuple[dict[str, torch.Tensor | float], torch.Tensor]:
    names: dict[str, int] = {}
    state = torch.randn(_small(meta.state_sizes, names), dtype=torch.float64)
    values: dict[str, torch.Tensor | float] = dict(meta.numbers)
    for name, what in meta.tokens.items():
        values[name] = torch.randn([_CHUNK, *_small(list(what.shape[2:]), names)], dtype=torch.float64) / 2
    for name, what in meta.params.items():
        values[name] = torch.randn(_small(list(what.shape[1:]), names), dtype=torch.float64) / 2
    return values, state


def _run(traced: Traced, role: str, values: Mapping[str, torch.Tensor | float]) -> tuple[torch.Tensor, Tensors]:
    try:
        return call(traced, values)
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        shapes = ", ".join(
            f"{name} {_shape(x.shape)}" for name in traced.arguments if isinstance(x := values[name], torch.Tensor)
        )
        raise CompileError(role, traced.name, f"fails on one chunk of one head, {shapes}: {error}") from error


def _expect(traced: Traced, role: str, got: torch.Tensor, shape: torch.Size) -> None:
    if got.shape != shape:
        raise CompileError(
            role, traced.name, f"expected the shape of the state, {_shape(shape)}, got {_shape(got.shape)}"
        )


def _check_causal(
    meta: InputMeta,
    chunk: Traced,
    merge: Traced,
    values: dict[str, torch.Tensor | float],
    state: torch.Tensor,
    o: torch.Tensor,
) -> None:
    """New values for the tokens from j on must not change what comes out before j."""
    for name in meta.tokens:
        for j in range(1, _CHUNK):
            x = values[name]
            assert isinstance(x, torch.Tensor)
            changed = values | {name: torch.cat([x[:j], torch.randn_like(x[j:])])}
            _, cached = _run(chunk, "chunk_mode", changed)
            again, _ = _run(merge, "merge_mode", changed | cached | {CHUNK_STATE: state})
            if not torch.allclose(again[:j], o[:j], rtol=_TOLERANCE, atol=_TOLERANCE):
                raise CompileError(
                    "merge_mode",
                    merge.name,
                    f"not causal: token {j} of {name!r} changes the output of earlier tokens; "
                    "mask the scores, for example with tril(0)",
                )


def _classify(decay: Traced, values: dict[str, torch.Tensor | float], state: torch.Tensor) -> Transition:
    """How decay acts on the state, S -> A S + F. Random states tell the kinds apart with probability one."""

    def step(S: torch.Tensor) -> torch.Tensor:
        return call(decay, values | {STATE: S})[0]

    def close(x: torch.Tensor, y: torch.Tensor) -> bool:
        return torch.allclose(x, y, rtol=_TOLERANCE, atol=_TOLERANCE)

    def linear(X: torch.Tensor) -> torch.Tensor:
        return jvp(step, (torch.zeros_like(state),), (X,))[1]

    X, zero = torch.randn_like(state), torch.zeros_like(state)
    if not all(close(step(S) - step(zero), linear(S)) for S in (X, state, 3 * X - 2 * state)):
        return "not affine"
    ones = linear(torch.ones_like(state))
    if close(linear(X), ones * X):
        if close(ones, ones.flatten()[0].expand_as(ones)):
            return "none" if close(ones, torch.ones_like(ones)) else "scalar"
        row = ones if ones.dim() == 1 else ones[:, :1].expand_as(ones)
        return "vector" if close(ones, row) else "elementwise"
    if state.dim() == 2:
        K = state.shape[0]
        columns = [linear(row.unsqueeze(1).expand_as(state)) for row in torch.eye(K, dtype=state.dtype)]
        A = torch.stack([column[:, 0] for column in columns], dim=1)
        if close(linear(X), A @ X):
            return "dense"
    raise CompileError(
        "decay_mode",
        decay.name,
        f"affine in {STATE}, but neither elementwise nor a matrix from the left (A @ {STATE}); "
        "write the state transposed if its matrix multiplies from the right",
    )
