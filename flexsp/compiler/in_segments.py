"""Calls of programs over a group that was made with ``bitwise``.

They go by segments of as many tokens, wherever the ranks' shards begin: kernels on all ranks at once, all else one
after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from flexsp.comm.group import SequenceParallel
from flexsp.compiler import arguments
from flexsp.exceptions import NotAvailable
from flexsp.kernels.between import Between
from flexsp.kernels.operators import plain
from flexsp.scan.in_order import Arguments, run_in_order

if TYPE_CHECKING:
    from flexsp.kernels.executable import Executable

__all__ = ["run"]

Optional = torch.Tensor | None
Tensors = dict[str, torch.Tensor]


def run(
    made: Any, group: SequenceParallel, inputs: Tensors, prev_s: Optional, cu_seqlens: Optional
) -> tuple[torch.Tensor, Optional]:  # fmt: skip
    """Outputs and final states of a `LinearAttention`, of inputs as the program takes them.

    Raises:
        NotAvailable: the program, or how it is called, does not keep its bits.
    """
    meta, name, chunk = made.program.meta, made.program.merge.name, made._C
    if meta.earlier:
        raise NotAvailable(f"{name}: bitwise is not available for shifted inputs, {', '.join(meta.earlier)}")
    if made._autotune:
        raise NotAvailable(f"{name}: bitwise is not available with autotune, whose plans depend on times")
    if chunk and group.segment % chunk:
        raise ValueError(f"{name}: expected segments (bitwise) of whole chunks of {chunk} tokens, got {group.segment}")
    if made.program.disagrees is not None and cu_seqlens is not None:
        raise NotAvailable(f"{name}: bitwise is not available for documents whose chunks are part of the model")
    tokens, params, batched = made._sorted(inputs)
    given = [inputs[x] for x in made.names]
    if cu_seqlens is None and plain(*given, prev_s) and made._has_kernels(inputs, prev_s, None):
        return _at_once(made, group, given, [x not in tokens for x in made.names], prev_s, int(batched))
    if made.rows > 1:
        raise NotAvailable(f"{name}: bitwise is not available for several rows a token")
    if prev_s is not None and cu_seqlens is None and not group.is_first:
        raise ValueError(f"prev_s: expected None on every rank but the first, got a tensor on rank {group.rank}")

    def call(asked: Arguments) -> tuple[torch.Tensor, list[torch.Tensor]]:
        state = None if asked.states is None else asked.states[0]
        o, final = made._over(None, {**asked.tokens, **asked.shared}, state, asked.bounds)
        return o, [final]

    cut, shared = ({x: inputs[x] for x in names} for names in (tokens, params))
    what = made.program.description(given[0].dtype, cu_seqlens is not None)
    states = None if prev_s is None else [prev_s]
    o, final = run_in_order(call, what, group, cut, shared, states, cu_seqlens, int(batched))
    return o, None if final is None else final[0]


def _at_once(
    made: Any, group: SequenceParallel, given: list[torch.Tensor], shared: list[bool], prev_s: Optional, axis: int
) -> tuple[torch.Tensor, Optional]:  # fmt: skip
    from flexsp.kernels.segments import run_in_segments

    between = cast("SequenceParallel", Between(group.device))

    def make(some: Sequence[torch.Tensor]) -> Executable[Any]:
        x = dict(zip(made.names, some, strict=True))
        signature = arguments.signature_of(x, None, None, between)
        found: Executable[Any] | None = made._kept_or_checked(signature, x, None, None, between).executable
        if found is None:
            raise NotAvailable(f"{made.program.merge.name}: bitwise needs kernels, and none run such a call")
        return found

    return run_in_segments(group, given, shared, prev_s, make, True, axis, made.rows)
