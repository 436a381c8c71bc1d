"""The real-gated linear recurrent unit (RG-LRU) of Hawk and Griffin."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from flexsp.comm.group import SequenceParallel, ranks_call
from flexsp.exceptions import asks_for_kernels, check_number
from flexsp.kernels.vector.vector_state import Gates
from flexsp.ops import _programs as programs
from flexsp.ops import _validate as check
from flexsp.ops._peers import one_dtype
from flexsp.ops._recipe import by_recipe
from flexsp.ops._segments import in_segments
from flexsp.runtime.recipe import step
from flexsp.scan.tokens import begins

__all__ = ["recurrent_rg_lru", "rg_lru"]


@ranks_call
@by_recipe
@in_segments("x r i", "Lambda", begins="unit_start", kernels=True)
@one_dtype("x", out="x")
def rg_lru(
    x: torch.Tensor,
    r: torch.Tensor,
    i: torch.Tensor,
    Lambda: torch.Tensor,
    c: float = 8.0,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    sp: SequenceParallel | bool | None = None,
    unit_start: bool | torch.Tensor = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """h_t = a_t h_{t-1} + sqrt(1 - a_t^2) sigmoid(i_t) x_t, a_t = exp(-c softplus(Lambda) sigmoid(r_t)), o_t = h_t.

    De et al. 2024, Griffin (arXiv 2402.19427), eq. 1-4; every channel by itself. In these equations the first token of
    a text is weighed like all others. The authors' code, and RecurrentGemma in transformers, take it with a weight of
    1 in the place of sqrt(1 - a_t^2): ``unit_start=True``.

    Kernels make a_t and the weighted inputs of x, r and i wherever they need them: no tensor of either is in memory,
    and none is kept for the backward pass but the state before every eighth token, in float32.

    Args:
        x: [B, T, D], float16, bfloat16, float32 or float64, any strides.
        r: recurrence gates before their sigmoid, [B, T, D]; x's dtype or float32.
        i: input gates before their sigmoid, [B, T, D]; x's dtype or float32.
        Lambda: [D], x's dtype or float32. The natural log decay is -c softplus(Lambda) sigmoid(r); below -104 (-800
            for float64 inputs) it acts as that, a decay of 0, and has no gradient.
        c: a number above 0.
        initial_state: [N, D] in float32 (float64 for float64 inputs); N = B, or the number of documents.
        output_final_state: also return the state after the last token.
        cu_seqlens: packed documents, as in `chunk_simple_gla`.
        cu_seqlens_cpu: CPU copy of ``cu_seqlens``, as in `chunk_simple_gla`.
        sp: the ranks, as in `chunk_simple_gla`.
        unit_start: True where the first token of each sequence, or document, has a weight of 1. Over ranks that is the
            first token of the whole sequence, not of a shard. A text that goes on from an initial state has no such
            token: give False then, or a boolean tensor [N] that says which sequences, or documents, begin here.

    Returns:
        o [B, T, D] in x's dtype and the final state [N, D], or None, by the same rules as `chunk_simple_gla`. Under
        ``sp`` the gradient of Lambda is this rank's share; their sum over ranks is the gradient.

    Raises:
        ValueError: a wrong shape, dtype, device or value, naming the argument.
        NotAvailable: on a GPU, more than 65535 blocks of channels in all sequences; a block has as many channels as the
            largest divisor of D up to 256.

    Example:
        >>> x, r, i = torch.randn(3, 2, 100, 256).unbind(0)
        >>> o, state = rg_lru(x, r, i, torch.randn(256), output_final_state=True)
    """
    call = programs.Call(initial_state, output_final_state, False, cu_seqlens, cu_seqlens_cpu, sp)
    _check(x, r, i, Lambda, c)
    rate, begin = _rate(Lambda, c, x), _beginning(unit_start, x, call)
    if asks_for_kernels(x.is_cuda, x.dtype):
        return programs.run_vector("rg_lru", x, r, call, Gates(i, rate, begin))
    inputs, gates = _gated(x, r, i, rate, _starts(begin, x, call))
    o, state = programs.run_vector("rg_lru", inputs, gates, call)
    return o.to(x.dtype), state


@one_dtype("x", out="x")
def recurrent_rg_lru(
    x: torch.Tensor,
    r: torch.Tensor,
    i: torch.Tensor,
    Lambda: torch.Tensor,
    c: float = 8.0,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    unit_start: bool | torch.Tensor = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The recurrence of `rg_lru` token by token: decoding, T = 1 a step.

    Takes and returns the same tensors, states included, so a prompt goes through `rg_lru` and its final state here.
    Differentiable. Runs on one rank, whatever the ambient ``sequence_parallel``.

    Raises:
        ValueError: a wrong shape, dtype, device or value, naming the argument.

    Example:
        >>> x, r, i = torch.randn(3, 2, 1, 256).unbind(0)
        >>> o, state = recurrent_rg_lru(x, r, i, torch.randn(256), output_final_state=True)
    """
    call = programs.Call(initial_state, output_final_state)
    _check(x, r, i, Lambda, c)
    begin = _beginning(unit_start, x, call)
    inputs, gates = _gated(x, r, i, _rate(Lambda, c, x), _starts(begin, x, call))
    return programs.recur_vector(x, inputs, gates, call)


def _check(x: torch.Tensor, r: torch.Tensor, i: torch.Tensor, Lambda: torch.Tensor, c: float) -> None:
    _, _, D = check.check_first("x", x, "[B, T, D]")
    dtypes = (x.dtype, torch.float32)
    for name, gate in (("r", r), ("i", i)):
        check.check_tensor(name, gate, tuple(x.shape), "[B, T, D]", dtypes=dtypes, device=x.device)
    check.check_tensor("Lambda", Lambda, (D,), "[D]", dtypes=dtypes, device=x.device)
    if check_number("c", c) <= 0:
        check.fail("c", "a number above 0", repr(c))


@step
def _rate(Lambda: torch.Tensor, c: float, x: torch.Tensor) -> torch.Tensor:
    """The log decays of open gates [D], in the accumulation dtype."""
    return -c * F.softplus(programs.wide(Lambda, x))


def _beginning(unit_start: bool | torch.Tensor, x: torch.Tensor, call: programs.Call) -> torch.Tensor | None:
    """Which texts [N] begin with a weight of 1, on this rank unless they are documents; None if none does."""
    if not isinstance(unit_start, torch.Tensor):
        check.check_flag("unit_start", unit_start)
        if not unit_start:
            return None
        if call.initial_state is not None:
            check.fail("unit_start", "False, or which texts begin [N], with initial_state", True)
    group = check.resolve(call.sp, x)
    check.check_cu_seqlens(call.cu_seqlens, call.cu_seqlens_cpu, x, "x", group)
    check.same_call(group, "rg_lru", x, "unit_start")
    N = check.number_of_states(x.shape[0], call.cu_seqlens)
    if not isinstance(unit_start, torch.Tensor):
        unit_start = torch.ones(N, dtype=torch.bool, device=x.device)
    check.check_tensor("unit_start", unit_start, (N,), "[N]", dtypes=(torch.bool,), device=x.device)
    if call.cu_seqlens is None and group is not None:
        start = group.shard_range(x.shape[1])[0]  # a graph may not know it
        unit_start = unit_start & (torch.arange(start, start + 1, device=x.device) == 0)
    return unit_start


def _starts(begin: torch.Tensor | None, x: torch.Tensor, call: programs.Call) -> torch.Tensor | None:
    """The mask [B, T] or [1, T] of this rank's tokens with a weight of 1, of what `_beginning` says."""
    if begin is None:
        return None
    T = x.shape[1]
    if call.cu_seqlens is None:
        return begin.unsqueeze(1) & (torch.arange(T, device=x.device) == 0)
    document = begins(T, call.cu_seqlens.to(torch.int64), check.resolve(call.sp, x))
    N = begin.shape[0]
    return ((document >= 0) & (document < N) & begin[document.clamp(0, N - 1)]).unsqueeze(0)


def _gated(
    x: torch.Tensor, r: torch.Tensor, i: torch.Tensor, rate: torch.Tensor, starts: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is added to the state, and the log gates, both [B, T, D] in the accumulation dtype."""
    recurrence, entry = programs.wide(r, x), programs.wide(i, x)
    g = programs.clamped(rate * recurrence.sigmoid(), x)
    weight = _root(-torch.expm1(2 * g))
    if starts is not None:
        weight = weight.masked_fill(starts.unsqueeze(-1), 1.0)
    return weight * entry.sigmoid() * programs.wide(x), g


def _root(x: torch.Tensor) -> torch.Tensor:
    """sqrt(x), with a gradient of 0 instead of infinity at x = 0. There 1 - a^2 has underflowed, and the gradient of a
    is 0 too."""
    closed = x < torch.finfo(x.dtype).tiny
    return torch.where(closed, 0.0, torch.where(closed, 1.0, x).sqrt())
