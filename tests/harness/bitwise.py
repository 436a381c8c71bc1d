"""Calls of every op whose bits are compared over ranks: inputs, answers, and which of these differ."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from flexsp import SequenceParallel, sequence_parallel
from flexsp.testing.cases import Case, Shape

__all__ = [
    "BOUNDS", "SEGMENT", "TOTAL", "WHOLE", "differing", "Tensors", "flat", "inputs_of", "joined", "joined_rows", "leaf",
    "lengths_of", "of_a_layer", "run", "with_gradients",
]  # fmt: skip

SEGMENT = 48
TOTAL = 4 * SEGMENT - 7  # the last segment is short
BOUNDS = (0, 0, 30, 48, 48, 100, 150, 180, 180)  # empty documents at both ends, one over two segments; then a tail
WHOLE = (*BOUNDS[:-2], TOTAL, TOTAL)  # without a tail
SMALL = Shape(T=TOTAL, H=2, K=6, V=5)
Tensors = dict[str, torch.Tensor]


def lengths_of(segments: tuple[int, ...], size: int = SEGMENT, total: int = TOTAL) -> list[int]:
    """The shards of ranks with so many segments."""
    ends = [min(total, size * sum(segments[: r + 1])) for r in range(len(segments))]
    return [end - begin for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def inputs_of(case: Case, dtype: torch.dtype, packed: bool, seed: int, shape: Shape = SMALL) -> dict[str, Any]:
    """Arguments of a call: tokens in the dtype, gates, parameters and states in float32, or all in float64."""
    n = len(BOUNDS) - 1 if packed else 2
    made = case.inputs(replace(shape, B=1 if packed else 2, states=n), seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def cast(name: str, x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(cast(name, y) for y in x)
        if not (torch.is_tensor(x) and x.is_floating_point()):
            return x
        return x.to(dtype if name in case.tokens and x.dim() > 3 else wide)

    without_heads = made[case.tokens[0]].dim() == 3  # all their tokens have one dtype
    made = {n: x.to(dtype) if without_heads and n in case.tokens else cast(n, x) for n, x in made.items()}
    return made | ({"cu_seqlens": torch.tensor(WHOLE if dtype == torch.float64 else BOUNDS)} if packed else {})


def leaf(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(leaf(y) for y in x)
    return x.detach().clone().requires_grad_() if torch.is_tensor(x) and x.is_floating_point() else x


def flat(x: Any) -> list[torch.Tensor]:
    return [t for y in x for t in flat(y)] if isinstance(x, (tuple, list)) else [] if x is None else [x]


def rows_of(states: Any, here: torch.Tensor) -> Any:
    """The initial states that a rank may see: NaN for documents that do not begin there."""
    if isinstance(states, tuple):
        return tuple(rows_of(x, here) for x in states)
    return torch.where(here.view(-1, *[1] * (states.dim() - 1)), states, float("nan"))


def run(
    sp: SequenceParallel | None, case: Case, given: dict[str, Any], begin: int = 0, stop: int = TOTAL,
    total: int = TOTAL, of_outputs: bool = False,
) -> Tensors:  # fmt: skip
    """Outputs, final states and gradients of the tokens [begin, stop), by name; on this rank alone without ``sp``.
    of_outputs: gradients are of the outputs alone."""
    mine = {n: leaf(x[:, begin:stop] if n in case.tokens else x) for n, x in given.items()}
    if "initial_state" in mine and "cu_seqlens" in mine and sp is not None:
        begins = given["cu_seqlens"][:-1]
        here = (begins >= begin) & ((begins < stop) | sp.is_last)
        mine["initial_state"] = leaf(rows_of(given["initial_state"], here))
    elif "initial_state" in mine and sp is not None and not sp.is_first:
        del mine["initial_state"]
    o, final = case.op(**mine, output_final_state=True, sp=False if sp is None else sp)
    found = {"o": o, **{f"final {i}": x for i, x in enumerate(flat(final))}}
    random = torch.Generator().manual_seed(len(given))
    whole = torch.randn(o.shape[0], total, *o.shape[2:], generator=random, dtype=torch.float64)
    finals = [x for x in flat(final) if x.requires_grad and not of_outputs]
    weights = [whole[:, begin:stop].to(o)]
    weights += [torch.randn(x.shape, generator=random, dtype=torch.float64).to(x) for x in finals]
    leaves = [(f"d{n} {i}", x) for n, xs in mine.items() for i, x in enumerate(flat(xs)) if torch.is_tensor(x)]
    leaves = [(n, x) for n, x in leaves if x.requires_grad]
    grads = torch.autograd.grad([o, *finals], [x for _, x in leaves], weights, allow_unused=True)
    for (name, x), dx in zip(leaves, grads, strict=True):
        found[name] = torch.zeros_like(x) if dx is None else dx
    return {name: x.detach() for name, x in found.items()}


def joined(case: Case, parts: list[Tensors]) -> Tensors:
    """What all ranks gave of a call of `run`, as one rank has it."""
    names = {n for part in parts for n in part}
    return joined_rows(parts, {n for n in names if n == "o" or n[1:].rsplit(" ", 1)[0] in case.tokens})


def with_gradients(y: torch.Tensor, w: torch.Tensor, named: Tensors) -> Tensors:
    """y, and the gradients of sum(y * w), of which some may not depend on the tensor."""
    grads = torch.autograd.grad(y, [*named.values()], w.to(y.dtype), allow_unused=True)
    both = zip(named.items(), grads, strict=True)
    return {"y": y.detach(), **{f"d{n}": torch.zeros_like(x) if dx is None else dx for (n, x), dx in both}}


def of_a_layer(
    sp: SequenceParallel | None, layer: nn.Module, x: torch.Tensor, w: torch.Tensor, bounds: torch.Tensor | None
) -> Tensors:  # fmt: skip
    """Outputs of the tokens x, and gradients of x and of parameters."""
    mine = leaf(x)
    with sequence_parallel(sp):
        y = layer(mine, bounds)
    return with_gradients(y, w, {"x": mine, **dict(layer.named_parameters())})


def joined_rows(parts: list[Tensors], of_tokens: Collection[str]) -> Tensors:
    """What all ranks gave, as one rank has it: the tensors of these names lie side by side, others add up."""
    found = {}
    for name in dict.fromkeys(n for part in parts for n in part):
        some = [part[name] for part in parts if name in part]
        found[name] = torch.cat(some, 1) if name in of_tokens else sum(some[1:], some[0])
    return found


def differing(a: Tensors, b: Tensors) -> list[str]:
    """Names of tensors whose bits differ; a sum over ranks makes 0 of -0."""
    assert a.keys() == b.keys()
    both = [(name, *((x[name] + 0.0).contiguous().view(-1).view(torch.uint8) for x in (a, b))) for name in a]
    return [name for name, x, y in both if not torch.equal(x, y)]
