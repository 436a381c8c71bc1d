"""What treats tokens one by one, done segment by segment: over groups made with ``bitwise``, beside their ops.

Projections, norms and activations need no other token. But a matrix product of 1000 tokens may add up its columns in
another order than one of 2000, and the last elements of a tensor may pass through other code than those before. So a
segment is a call of its own, as in `flexsp.scan.in_order`, with tensors of the same sizes on whichever rank it is. The
gradients of parameters are summed up from the last segment to the first over all ranks; the first rank has the sum,
the others zeros. No rank waits for another one but for that sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten

from flexsp.comm.derivatives import ON_ONE_RANK, untransformed
from flexsp.comm.group import SequenceParallel, current_sp
from flexsp.comm.ranks import ambient
from flexsp.comm.tracing import outside_graphs
from flexsp.scan.in_order import (
    NAME,
    Segment,
    begin_segments,
    join_segments,
    look_for_order,
    owned,
    rows_of,
    save_for_order,
    segments_of,
)
from flexsp.scan.relay import Relay

__all__ = ["by_segments", "segments_wanted"]

Function = Callable[..., Any]
Named = Mapping[str, torch.Tensor]
Tensors = Sequence[Any]
_AXIS = 1  # of tokens


def segments_wanted() -> SequenceParallel | None:
    """The ambient group if it was made with ``bitwise``, and what runs now has not been given one of its segments."""
    sp = current_sp()
    return sp if sp is not None and sp.segment and not ambient.in_segment else None


def by_segments(
    module: nn.Module | None, what: str, fn: Function, *args: Any, shared: Tensors = (), reach: int = 0,
    of_segments: Function | None = None,
) -> Any:  # fmt: skip
    """``fn(*args, *shared)``; segment by segment where `segments_wanted`. Differentiable.

    Args:
        module: whose parameters ``fn`` uses, None for none.
        what: the same text on every rank.
        args: tensors, and tuples, lists and dicts of them. Those of two axes and more have rows of tokens along axis 1,
            the first of them a row a token; all others are the same for all segments, and on all ranks.
        fn: gives tensors, in tuples and so on, whose rows are along axis 1 too. Tensors that do not depend on tokens
            may be among them.
        shared: tensors of any axes that are the same for all segments, and None.
        reach: the number of rows of earlier tokens that the tensors of tokens, and those of each segment, begin with.
        of_segments: of a `Segment`, further arguments of ``fn`` behind ``shared``, which have no gradients. For callers
            that know that segments are wanted.
    """
    sp = segments_wanted()
    if sp is None:
        return fn(*args, *shared)
    what = what if module is None else f"{what} of {type(module).__name__}"
    return _by_segments(sp, _Call(module, fn, args, shared, of_segments), what, reach)


@outside_graphs("bitwise: a call over a group that was made with bitwise is no part of a graph")
def _by_segments(sp: SequenceParallel, call: _Call, what: str, reach: int) -> Any:
    untransformed(f"{what}: {NAME}", ON_ONE_RANK)
    T = next(iter(call.tokens.values())).shape[_AXIS] - reach
    sp.check_shard(T)
    lengths = sp.lengths_for(T)
    segments, begin = segments_of(sp, lengths, what), sum(lengths[: sp.rank])
    without = {n: x.narrow(_AXIS, 0, reach) for n, x in call.tokens.items()}
    looks, spec = tree_flatten(call(Segment(begin, begin, begin, False), without))
    of_tokens = [isinstance(x, torch.Tensor) and x.dim() > _AXIS and x.shape[_AXIS] == 0 for x in looks]
    parameters = call.used([x for x, has_rows in zip(looks, of_tokens, strict=True) if has_rows])
    floating = {n: x for n, x in call.tokens.items() if x.is_floating_point()}
    others = {n: x for n, x in call.tokens.items() if n not in floating}
    relay = Relay(sp, sp.anchor, f"{what} in segments of {sp.segment}, parameters")
    anchor, cut, copies, _ = begin_segments(relay, segments, floating, parameters, None, False, _AXIS, reach)
    outputs = []
    for segment, mine, copied in zip(segments, cut, copies, strict=True):
        rows = {n: owned(x.narrow(*rows_of(x, segment, segments, _AXIS, reach))) for n, x in others.items()}
        outputs.append(tree_flatten(call(segment, mine | rows, copied))[0])
    found = [*looks]
    joined = [i for i, has_rows in enumerate(of_tokens) if has_rows]
    for i in joined:
        found[i] = join_segments([each[i] for each in outputs], _AXIS) if outputs else looks[i].detach()
    joined = [i for i in joined if found[i].is_floating_point()]
    for i, x in zip(joined, _TogetherFunction.apply(anchor, *[found[i] for i in joined]), strict=True):
        found[i] = x
    return tree_unflatten(found, spec)


class _Call:
    """A function, and the tensors that it is given.

    Attributes:
        tokens: those with rows of tokens, by their places.
    """

    def __init__(
        self, module: nn.Module | None, fn: Function, args: tuple[Any, ...], shared: Tensors,
        of_segments: Function | None,
    ) -> None:  # fmt: skip
        self._leaves, self._spec = tree_flatten(args)
        self._stage = _Stage(module, fn)
        tensors = {f"argument {i}": x for i, x in enumerate(self._leaves) if isinstance(x, torch.Tensor)}
        self.tokens = {n: x for n, x in tensors.items() if x.dim() > _AXIS}
        self._others = [n for n in tensors if n not in self.tokens]
        self._shared = [f"shared {i}" for i in range(len(shared))]
        self._values = tensors | dict(zip(self._shared, shared, strict=True))
        self._of_segments = of_segments

    def __call__(self, segment: Segment, tokens: Named, copied: Named | None = None) -> Any:
        """What the function gives of a segment, with these copies of parameters, of some of them."""
        copied = {} if copied is None else copied
        values = {**self._values, **tokens, **copied}
        args = tree_unflatten([values.get(f"argument {i}", x) for i, x in enumerate(self._leaves)], self._spec)
        further = () if self._of_segments is None else self._of_segments(segment)
        swapped = {n: x for n, x in copied.items() if n not in self._values}
        with _in_segment():
            return functional_call(self._stage, swapped, (*args, *[values[n] for n in self._shared], *further))

    def used(self, outputs: Tensors) -> dict[str, torch.Tensor]:
        """The parameters that these tensors depend on, by name: those of the module, and arguments without tokens."""
        ahead = [_edge(x) for x in outputs if x.requires_grad]
        if not ahead:
            return {}
        named = dict(self._stage.named_parameters()) | {n: self._values[n] for n in (*self._others, *self._shared)}
        ends = {_edge(x): n for n, x in named.items() if x is not None and x.requires_grad}
        seen = set(ahead)
        while ahead:
            node, _ = ahead.pop()
            new = {edge for edge in node.next_functions if edge[0] is not None} - seen
            seen |= new
            ahead += new
        return {n: named[n] for edge, n in ends.items() if edge in seen}


class _Stage(nn.Module):
    """A function that uses parameters of a module, as a module of its own: `functional_call` takes one."""

    def __init__(self, module: nn.Module | None, fn: Function) -> None:
        super().__init__()
        self.module, self._fn = module, fn

    def forward(self, *args: Any) -> Any:
        return self._fn(*args)


def _edge(x: torch.Tensor) -> tuple[Any, int]:
    """The node and output that gradients of x go to, as nodes name those behind them."""
    edge = get_gradient_edge(x)
    return edge.node, edge.output_nr


@contextmanager
def _in_segment() -> Iterator[None]:
    ambient.in_segment = True
    try:
        yield
    finally:
        ambient.in_segment = False


class _TogetherFunction(torch.autograd.Function):
    """All outputs of all segments: a gradient of any of them leads to all, and to the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        save_for_order(ctx, anchor)
        return tuple([x.clone() for x in outputs])  # views of several outputs could not be changed in place

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        look_for_order(ctx)
        return None, *grads
