"""Calls that run in PyTorch, as one node of a graph of torch.compile.

Traced, such a call would have as many steps as its length asks for, and the graph would hold for no other. The
operators (`flexsp.kernels.operators`) keep nothing but inputs: the backward pass computes the call again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from flexsp.comm.derivatives import IN_PYTORCH
from flexsp.comm.group import SequenceParallel
from flexsp.kernels import operators
from flexsp.kernels.operators import Asked, Saved, wants_final
from flexsp.runtime.clean_thread import run_in_clean_thread

__all__ = ["Like", "define", "forward", "gradients", "in_graph", "run"]

Optional = torch.Tensor | None
_KIND = "in PyTorch"


class Like(NamedTuple):
    """Shapes and dtypes of outputs and of final states."""

    o: tuple[int, ...]
    dtype: torch.dtype
    states: tuple[int, ...]
    wide: torch.dtype


class Function(Protocol):
    def run(self, how: str, asked: Asked) -> tuple[torch.Tensor, Optional]:
        """Outputs and final states, differentiable. `how` is text that says which call it is."""

    def like(self, how: str, asked: Asked) -> Like:
        """Of the tensors of `run`, whose sizes may be symbols."""


_functions: dict[str, Function] = {}


def define(name: str, function: Function) -> None:
    """Calls of `name` in graphs run this function."""
    _functions[name] = function


def in_graph() -> bool:
    """Whether torch.compile traces this, for a graph of its own: an exported one has PyTorch's operators alone."""
    return torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting()


def run(
    name: str, how: str, tensors: list[torch.Tensor], initial: Optional, cu_seqlens: Optional, *,
    output_final_state: bool, sp: SequenceParallel | None, scale: float = 1.0,
) -> tuple[torch.Tensor, Optional]:  # fmt: skip
    """Outputs and final states of the function `name`, differentiable: one node in a graph, else PyTorch's operators.

    Args:
        how: says which call of the function it is. It ends with what ranks compare.
    """
    if in_graph():
        want_final = wants_final(output_final_state, cu_seqlens, sp)
        key = f"{_KIND}|{name}|{how}"
        return operators.call(key, tensors, initial, cu_seqlens, want_final=want_final, sp=sp, scale=scale)
    if sp is not None and cu_seqlens is not None and not cu_seqlens.is_cuda and not torch.compiler.is_compiling():
        how += f", boundaries {cu_seqlens.tolist()}"
    n_docs = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    with torch.autocast(tensors[0].device.type, enabled=False):  # states stay in fp32, as in the kernels
        return _functions[name].run(how, Asked(tensors, initial, cu_seqlens, n_docs, scale, output_final_state, sp))


class _InPytorch:
    def __init__(self, name: str) -> None:
        name, self.how = name.split("|", 1)
        self.function = _functions[name]

    def run(self, asked: Asked) -> tuple[torch.Tensor, Optional]:
        return self.function.run(self.how, asked)

    def forward(self, asked: Asked) -> tuple[torch.Tensor, Optional, torch.Tensor, Optional]:
        return forward(self.run, asked)

    def backward(self, asked: Asked, kept: Saved, *others: Any) -> tuple[list[Optional], Optional]:
        return gradients(self.run, asked._replace(cu_seqlens=kept[1]), *others)

    def axes(self, first: torch.Tensor) -> int:
        return 2

    def like_forward(self, asked: Asked) -> tuple[torch.Tensor, ...]:
        x, like = asked.tensors[0], self.function.like(self.how, asked)
        return (
            x.new_empty(like.o, dtype=like.dtype),
            x.new_empty(like.states if asked.want_final else 0, dtype=like.wide),
            x.new_empty(0, dtype=torch.uint8),
            x.new_empty(0, dtype=torch.int32) if asked.cu_seqlens is None else torch.empty_like(asked.cu_seqlens),
        )


operators.define_kind(_KIND, _InPytorch, "a call in a graph", f"outside of graphs, {IN_PYTORCH}")


def forward(
    run: Callable[[Asked], tuple[torch.Tensor, Optional]], asked: Asked
) -> tuple[torch.Tensor, Optional, torch.Tensor, Optional]:
    """`Operation.forward` of what `run` computes."""
    x, cu_seqlens = asked.tensors[0], asked.cu_seqlens
    o, final = run_in_clean_thread(x.device, torch.no_grad()(lambda: run(asked)))
    final = None if final is None else final.clone(memory_format=torch.contiguous_format)  # may be `initial` itself
    table = None if cu_seqlens is None else cu_seqlens.clone()
    return o.contiguous(), final, x.new_empty(0, dtype=torch.uint8), table


def gradients(
    run: Callable[[Asked], tuple[torch.Tensor, Optional]], asked: Asked, do: Optional, dfinal: Optional,
    wanted: Sequence[bool], want_dinitial: bool,
) -> tuple[list[Optional], Optional]:  # fmt: skip
    """`Operation.backward` of it: it runs again, since a graph keeps no other graph."""

    def again() -> tuple[list[Optional], Optional]:
        leaves = [x.detach().requires_grad_() for x in asked.tensors]
        state = None if asked.initial is None else asked.initial.detach().requires_grad_(want_dinitial)
        outputs = run(asked._replace(tensors=leaves, initial=state))
        # A final state may depend on nothing: there may be no tokens, and none given.
        pairs = [(y, dy) for y, dy in zip(outputs, (do, dfinal), strict=True) if y is not None and y.requires_grad]
        grads = torch.autograd.grad(
            [y for y, _ in pairs], [*leaves, *([state] if want_dinitial else [])],  # type: ignore[arg-type]
            [torch.zeros_like(y) if dy is None else dy for y, dy in pairs], materialize_grads=True,
        )  # fmt: skip
        found: list[Optional] = [g.clone(memory_format=torch.contiguous_format) for g in grads]
        return found[: len(leaves)], found[-1] if want_dinitial else None

    return run_in_clean_thread(asked.tensors[0].device, again)  # type: ignore[no-any-return]
