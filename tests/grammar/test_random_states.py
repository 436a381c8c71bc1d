"""Custom transitions with random further state: numbers, rows, columns, matrices in any order, each with its decay."""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid, pad

from flexsp.compiler import decayed_scores
from flexsp.grammar import FlexLinearAttention, decay
from flexsp.testing.compare import DRAWS, RoundedProducts, check_functions, relative_error
from flexsp.testing.ranks import run_ranks
from tests.harness.generated import SOME_SEGMENTS
from tests.harness.grammar import EXACT, H, K, Tensors, V
from tests.harness.interpreted import INTERPRETED, poisoned
from tests.harness.programs import variable
from tests.harness.state_parts import Case, solved

KINDS = ((), ("V",), ("K",), ("K", "V"))


class Drawn:
    """Parts by name: their shape and how fast they decay, as a multiple of the gate; columns decay as the state."""

    def __init__(self, seed: int) -> None:
        made = random.Random(seed)
        self.per_head = made.random() < 0.6
        shapes = [(), *(made.choice(KINDS) for _ in range(made.randint(1, 3)))]
        made.shuffle(shapes)
        rates = [1.0 if shape == ("K",) else made.choice([0.0, 0.5, 1.0, 2.0]) for shape in shapes]
        self.parts = {f"p{i}": part for i, part in enumerate(zip(shapes, rates, strict=True))}
        self.extra_state = {name: shape for name, (shape, _) in self.parts.items()}
        chunks = ["chunk_state", *(f"chunk_{name}" for name in self.parts)]
        self.chunk = taking(["k", "v", "g"], self._chunk)
        self.propagate = taking(["g", "state", *self.parts, *chunks], self._propagate)
        self.output = taking(["q", "k", "v", "g", "state", *self.parts], self._output)

    def _chunk(self, k, v, g):  # type: ignore[no-untyped-def]
        number = self._single(g)
        left, alone = self._wide(g.sum(0) - g.cumsum(0)), number.sum(0) - number.cumsum(0)
        found = [(k * left.exp()).T @ v]
        for shape, rate in self.parts.values():
            if shape == ():
                found.append(((rate * alone).exp() * counted(k)).sum())
            elif shape == ("V",):
                found.append((v * (rate * alone).exp()[:, None]).sum(0))
            else:
                written = k * (rate * left).exp()
                found.append(written.sum(0) if shape == ("K",) else written.T @ v)
        return tuple(found)

    def _propagate(self, g, state, chunk_state, **given):  # type: ignore[no-untyped-def]
        rows, number = g.sum(0), self._single(g).sum(0)
        by_row = rows if self.per_head else rows[:, None]
        found = [by_row.exp() * state + chunk_state]
        for name, (shape, rate) in self.parts.items():
            gate = {(): number, ("V",): number, ("K",): rows, ("K", "V"): by_row}[shape]
            found.append((rate * gate).exp() * given[name] + given[f"chunk_{name}"])
        return tuple(found)

    def _output(self, q, k, v, g, state, **given):  # type: ignore[no-untyped-def]
        b, c = g.cumsum(0), self._single(g).cumsum(0)
        ones = torch.ones_like(q[:, :1])
        scores, reads = decayed_scores(q, k, b), q * self._wide(b).exp()
        o = scores @ v + reads @ state
        for name, (shape, rate) in self.parts.items():
            pairs, enters = decayed_scores(ones, ones, rate * c), (rate * c).exp()
            if shape == ():
                o = o + (0.2 * ((pairs * counted(k)[None, :]).sum(1) + enters * given[name])).tanh()[:, None]
            elif shape == ("V",):
                o = o + 0.3 * (pairs @ v + enters[:, None] * given[name])
            elif shape == ("K",):
                weight = scores.sum(1) + reads @ given[name]
                o = o / (1 + weight * weight)[:, None]
            else:
                o = o + decayed_scores(q, k, rate * b) @ v + (q * self._wide(rate * b).exp()) @ given[name]
        return o

    def _wide(self, x):  # type: ignore[no-untyped-def]
        """Gates [C] or [C, K] for tiles [C, K]."""
        return x[:, None] if self.per_head else x

    def _single(self, g):  # type: ignore[no-untyped-def]
        """One gate a token, [C]."""
        return g if self.per_head else g.sum(1) / g.size(1)

    @property
    def sizes(self) -> tuple[int, int]:
        rows = sum(K if len(shape) == 2 else 1 for shape in self.extra_state.values() if shape != ("K",))
        return K + rows, V + sum(shape == ("K",) for shape in self.extra_state.values())

    def matrix(self, state: torch.Tensor, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        """The state [..., K, V] and its parts as one matrix."""
        shapes = self.extra_state
        columns = [parts[name].unsqueeze(-1) for name in shapes if shapes[name] == ("K",)]
        rows = []
        for name, shape in shapes.items():
            if shape != ("K",):
                x = parts[name]
                x = x.unsqueeze(-1) if shape == () else x
                x = x.unsqueeze(-2) if len(shape) < 2 else x
                rows.append(pad(x, (0, self.sizes[1] - x.shape[-1])))
        return torch.cat([torch.cat([state, *columns], -1), *rows], -2)

    def split(self, S: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """What `matrix` put together."""
        row, column, parts = K, V, {}
        for name, shape in self.extra_state.items():
            if shape == ("K",):
                parts[name], column = S[..., :K, column], column + 1
            else:
                end = row + (K if len(shape) == 2 else 1)
                x = S[..., row:end, :V]
                parts[name], row = x if len(shape) == 2 else x[..., 0, :] if shape else x[..., 0, 0], end
        return S[..., :K, :V], parts

    def within(self, S: torch.Tensor) -> torch.Tensor:
        return self.matrix(*self.split(S))

    def step(self, x: Tensors, S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(state after one token, output) of tokens [B, H, ...]."""
        (state, parts), g = self.split(S), x["decay"]
        q, k, v = K**-0.5 * x["q"], x["k"], x["v"]
        number = g if self.per_head else g.mean(-1)
        rows = g.unsqueeze(-1).expand_as(k) if self.per_head else g
        written = k.unsqueeze(-1) * v.unsqueeze(-2)
        state = rows.exp().unsqueeze(-1) * state + written
        o = (q.unsqueeze(-1) * state).sum(-2)
        for name, (shape, rate) in self.parts.items():
            kept = (rate * number).exp()
            if shape == ():
                parts[name] = kept * parts[name] + 1 + 0.1 * k.sum(-1)
                o = o + (0.2 * parts[name]).tanh().unsqueeze(-1)
            elif shape == ("V",):
                parts[name] = kept.unsqueeze(-1) * parts[name] + v
                o = o + 0.3 * parts[name]
            elif shape == ("K",):
                parts[name] = rows.exp() * parts[name] + k
                o = o / (1 + (q * parts[name]).sum(-1, keepdim=True) ** 2)
            else:
                parts[name] = (rate * rows).exp().unsqueeze(-1) * parts[name] + written
                o = o + (q.unsqueeze(-1) * parts[name]).sum(-2)
        return self.matrix(state, parts), o


def taking(names: Sequence[str], function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with arguments of these names."""

    def call(**given: Any) -> Any:
        return function(**given)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    call.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
    return call


def counted(k: torch.Tensor) -> torch.Tensor:
    """What a token adds to a number, [C]."""
    return 1 + 0.1 * k.sum(-1)


@functools.cache
def model_of(seed: int) -> tuple[Drawn, FlexLinearAttention]:
    drawn = Drawn(seed)
    return drawn, FlexLinearAttention(decay.gated(drawn.per_head), custom_transition=drawn)


def inputs(drawn: Drawn, B: int, T: int, states: int, seed: int) -> tuple[Tensors, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    shapes = {"q": (K,), "k": (K,), "v": (V,), "decay": () if drawn.per_head else (K,)}
    x = {name: torch.randn(B, T, H, *shape, generator=made).double() for name, shape in shapes.items()}
    x["decay"] = logsigmoid(x["decay"]).float().double()
    return x, drawn.within(torch.randn(states, H, *drawn.sizes, generator=made).double())


@pytest.mark.parametrize("n", range(3))
def test_against_a_token_loop(n: int, seed: int) -> None:
    check(seed + n, seed)


def test_gates_of_channels_beside_numbers(seed: int) -> None:
    """Each row of the matrix that holds them has a factor; and nothing flows through what is beside a number."""
    drawn, model = model_of(6)
    assert not drawn.per_head and () in drawn.extra_state.values()
    assert model.transition.program(H, K, V, 1.0, "gk", False).program.transition == "vector"  # type: ignore[union-attr]
    check(6, seed)


def check(draw: int, seed: int) -> None:
    drawn, model = model_of(draw)
    x, initial = inputs(drawn, 2, 70, 2, seed)
    leaves = {name: y.requires_grad_() for name, y in (x | {"initial": initial}).items()}
    S, outputs = initial, []
    for t in range(70):
        S, o = drawn.step({name: y[:, t] for name, y in x.items()}, S)
        outputs.append(o)
    found = model(**x, initial_state=initial, output_final_state=True)
    want = torch.stack(outputs, 1), S
    cotangents = [torch.randn_like(y) for y in want]
    grads = [torch.autograd.grad(y, list(leaves.values()), cotangents) for y in (found, want)]
    pairs = zip(("o", "final", *leaves), (*found, *grads[0]), (*want, *grads[1]), strict=True)
    errors = {name: relative_error(a, b) for name, a, b in pairs}
    assert max(errors.values()) < EXACT, (drawn.parts, errors)


def by_kernels(sp: Any, seed: int, case: Case, problem: Any, folder: str) -> Tensors:
    over = sp if case.lengths else None
    if over:
        sp.set_lengths(list(case.lengths))
    x, initial, cotangents = problem
    x = {name: y.float() for name, y in x.items()}
    with poisoned(case.segments, case.B * H), variable("FLEXSP_CODE_DIR", folder):
        return solved(model_of(seed)[1], case, x, initial.float(), cotangents[:1], over)[0]


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(), (20, 0, 17), (12, 9, 16)])
@pytest.mark.parametrize("n", range(3))
def test_kernels(n: int, lengths: tuple[int, ...], seed: int, tmp_path: Path) -> None:
    """Whole with several segments, and packed over ranks."""
    drawn, model = model_of(seed + n)
    bounds = (0, 1, 20, 20, 37) if lengths[1:2] == (9,) else None
    case = Case("", B=1, bounds=bounds, lengths=lengths, segments=SOME_SEGMENTS)
    x, initial = inputs(drawn, 1, case.T, 1 if bounds is None else 4, seed)
    x, initial = {name: y.float().double() for name, y in x.items()}, initial.float().double()
    made = torch.Generator().manual_seed(seed)
    finals = [drawn.within(torch.randn(initial.shape)) for _ in range(DRAWS)]
    cotangents = [{"o": torch.randn(1, case.T, H, V, generator=made).bfloat16(), "final": y} for y in finals]
    given = x, initial, cotangents
    parts = run_ranks(by_kernels, len(lengths) or 1, seed + n, case, given, str(tmp_path), env=INTERPRETED)
    want = solved(model, case, x, initial, cotangents, None)
    with RoundedProducts(torch.float32):
        low = solved(model, case, {name: y.float() for name, y in x.items()}, initial.float(), cotangents, None)
    found = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        pieces = [part[name] for part in parts if name in part]
        found[name] = torch.stack(pieces).sum(0) if name in ("final", "dinitial") else torch.cat(pieces, 1)
    check_functions([found], want, low)
