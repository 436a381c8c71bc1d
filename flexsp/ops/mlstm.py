"""mLSTM: a matrix memory with exponential input gates, a normaliser and a stabiliser."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from flexsp.comm.derivatives import share_backward, transformed
from flexsp.comm.group import SequenceParallel, ranks_call
from flexsp.exceptions import asks_for_kernels, check_number
from flexsp.kernels.diagonal.op import diagonal_pair
from flexsp.kernels.mlstm import in_pytorch
from flexsp.kernels.operators import plain
from flexsp.kernels.views import unsqueeze
from flexsp.ops import _programs as programs
from flexsp.ops import _validate as check
from flexsp.ops._peers import one_dtype
from flexsp.ops._recipe import by_recipe
from flexsp.ops._segments import in_segments
from flexsp.runtime.recipe import step
from flexsp.scan.maxima import enters, maxima_between
from flexsp.scan.tokens import read_here

__all__ = ["chunk_mlstm", "recurrent_mlstm"]

MAXIMA = "the maxima of mLSTM"  # as ranks call their exchange
_LEAST_MAXIMUM = -1e30  # of initial states, finite so that differences are
Optional = torch.Tensor | None
State = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@ranks_call
@by_recipe
@in_segments("q k v i f", states="c_initial n_initial m_initial", wants="return_last_states", head_first="head_first")
@one_dtype("q k v")
def chunk_mlstm(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    i: torch.Tensor,
    f: torch.Tensor,
    *,
    head_first: bool,
    scale: float | None = None,
    c_initial: torch.Tensor | None = None,
    n_initial: torch.Tensor | None = None,
    m_initial: torch.Tensor | None = None,
    return_last_states: bool = False,
    eps: float = 0.0,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    sp: SequenceParallel | bool | None = None,
) -> tuple[torch.Tensor, State | None]:
    """C_t = f'_t C_{t-1} + i'_t k_t v_t^T, n_t = f'_t n_{t-1} + i'_t k_t, with scale q_t C_t over a denominator.

    Beck et al. 2024, xLSTM (arXiv 2405.04517), eq. 19-27, stabilised as there by m_t = max(log f_t + m_{t-1}, i_t):
    f'_t = e^{log f_t + m_{t-1} - m_t} with log f = logsigmoid(f), i'_t = e^{i_t - m_t}, and
    h_t = scale q_t C_t / (max(|scale q_t n_t|, e^{-m_t}) + eps). The arguments have the names of mlstm_kernels, which
    has heads before tokens: so ``head_first`` must be given, and all arguments behind f by name.

    C e^m and n e^m, and with ``eps`` = 0 h, do not depend on m. So m is a constant to the backward pass: the final m
    has no gradient, and with ``eps`` > 0 what h depends on m has none.

    Args:
        q: [B, T, H, K], float16, bfloat16, float32 or float64, any strides; K of 1..256.
        k: [B, T, H, K] in the same dtype. Kernels read it as it is, but of float16 in float32, whose range the sums
            over tokens need, and i'_t in float32 beside it.
        v: [B, T, H, V] in the same dtype; V of 1..512.
        i: input gates before their exponential, natural logarithms [B, T, H]; q's dtype or float32. -inf writes
            nothing.
        f: forget gates before their sigmoid, [B, T, H]; q's dtype or float32. Below -1e6 they act as that. Where f'_t
            is less than e^-104, e^-800 for float64 inputs, it acts as that and has no gradient.
        head_first: True where heads come before tokens in q, k, v, i and f, and then in h too: [B, H, T, ...].
        scale: factor on q; None means K**-0.5.
        c_initial: C [N, H, K, V] in float32 (float64 for float64 inputs); N = B, or the number of documents. Given
            together with the other two, or None for zeros.
        n_initial: n [N, H, K] in the same dtype.
        m_initial: m [N, H, 1] in the same dtype.
        return_last_states: also return the states after the last token.
        eps: added to the denominator, at least 0; mlstm_kernels adds 1e-6.
        cu_seqlens: packed documents, as in `chunk_simple_gla`.
        cu_seqlens_cpu: CPU copy of ``cu_seqlens``, as in `chunk_simple_gla`.
        sp: the ranks, as in `chunk_simple_gla`.

    Returns:
        h [B, T, H, V] in the inputs' dtype and the final (C, n, m), or None, by the same rules as `chunk_simple_gla`.
        A pair in every case.

    Raises:
        ValueError: a wrong shape, dtype, device or value, naming the argument. On a GPU also B * H of more than 65535.

    Example:
        >>> q, k, v = torch.randn(3, 2, 100, 4, 64).unbind(0)
        >>> i, f = torch.randn(2, 100, 4), torch.randn(2, 100, 4) + 3
        >>> h, (C, n, m) = chunk_mlstm(q, k, v, i, f, head_first=False, return_last_states=True)
    """
    q, k, v, i, f = _tokens_first(head_first, q, k, v, i, f)
    B, _, H, K, V = _checked(q, k, v, i, f, return_last_states, eps)
    sp = check.resolve(sp, q)
    check.check_cu_seqlens(cu_seqlens, cu_seqlens_cpu, q, "q", sp)
    N = check.number_of_states(B, cu_seqlens)
    given = _initial(c_initial, n_initial, m_initial, (N, H, K, V), q, cu_seqlens, sp)
    scale = check.check_scale(scale, K)
    check.same_call(sp, "mlstm", q, H, K, V, N, eps, cu_seqlens is None)
    if sp is not None:
        _, q, k, v, i, f, *given = _shared(sp, q, k, v, i, f, *given)
        given = [read_here(x, q.shape[1], cu_seqlens, sp) for x in given]
    C, n, m = _states(*given)
    in_kernels = asks_for_kernels(q.is_cuda, q.dtype) and plain(q, k, v, i, f, *given, cu_seqlens) and not transformed()
    stabilised = _stabilised_in_kernels if in_kernels else _stabilised
    gates, last_m = stabilised(q, i, f, m, N, cu_seqlens, sp, return_last_states)
    kind = torch.float32 if q.dtype == torch.float16 else q.dtype
    reads, keys = q.to(kind), k.to(kind)
    rows: Any = in_pytorch
    if in_kernels:
        from flexsp.kernels.mlstm import rows
    # The gradient of h jumps where the denominator crosses its lower bound, so the denominator must be precise: its
    # weights are the values, in float32, instead of factors of the keys.
    (numerator, denominator), (C, n) = diagonal_pair(
        reads, keys, (v.to(kind), unsqueeze(gates.weight, -1)), gates.log_forget, gates.log_weight, scale=scale,
        initial_states=(C, None if n is None else n.unsqueeze(-1)), output_final_state=return_last_states,
        cu_seqlens=cu_seqlens, sp=sp, ops=("mlstm", "mlstm (normaliser)"),
    )  # fmt: skip
    h = rows.quotients(numerator, denominator, gates.m, eps + 0.0, v.dtype)  # a float, also if eps is an int
    h = h.transpose(1, 2) if head_first else h
    if C is None or n is None or last_m is None:
        return h, None
    if sp is not None:
        _, h, C, n = _shared(sp, h, C, n)
    return h, _last(last_m, C, n.squeeze(-1))


_shared = step(share_backward)


@one_dtype("q k v")
def recurrent_mlstm(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    i: torch.Tensor,
    f: torch.Tensor,
    *,
    head_first: bool,
    scale: float | None = None,
    c_initial: torch.Tensor | None = None,
    n_initial: torch.Tensor | None = None,
    m_initial: torch.Tensor | None = None,
    return_last_states: bool = False,
    eps: float = 0.0,
) -> tuple[torch.Tensor, State | None]:
    """The recurrence of `chunk_mlstm` token by token: decoding, T = 1 a step.

    Takes and returns the same tensors, states included, so a prompt goes through the chunked op and its final states
    here. Differentiable, as `chunk_mlstm` is. Runs on one rank, whatever the ambient ``sequence_parallel``.

    Raises:
        ValueError: a wrong shape, dtype, device or value, naming the argument.

    Example:
        >>> q, k, v = torch.randn(3, 2, 1, 4, 64).unbind(0)
        >>> i, f = torch.randn(2, 2, 1, 4).unbind(0)
        >>> h, (C, n, m) = recurrent_mlstm(q, k, v, i, f, head_first=False, return_last_states=True)
    """
    q, k, v, i, f = _tokens_first(head_first, q, k, v, i, f)
    B, _, H, K, V = _checked(q, k, v, i, f, return_last_states, eps)
    C, n, m = _states(*_initial(c_initial, n_initial, m_initial, (B, H, K, V), q, None, None))
    gates, last_m = _stabilised(q, i, f, m, B, None, None, return_last_states)
    wide_q, wide_v = programs.wide(q, q) * check.check_scale(scale, K), programs.wide(v, q)
    written = programs.wide(k, q) * unsqueeze(gates.weight, -1)
    augmented = torch.cat([wide_v, torch.ones_like(wide_v[..., :1])], -1)
    state = None if C is None or n is None else torch.cat([C, n.unsqueeze(-1)], -1)
    read, state = programs.matrix_loop(wide_q, written, augmented, gates.log_forget.exp(), state)
    h = in_pytorch.quotients(read[..., :V], read[..., V:], gates.m, eps, v.dtype)
    h = h.transpose(1, 2) if head_first else h
    return h, None if last_m is None else _last(last_m, state[..., :V], state[..., V])


def _last(final: torch.Tensor, C: torch.Tensor, n: torch.Tensor) -> State:
    """The final states. m is rounded up to the dtype of C and n, so that these are multiplied by at most 1."""
    m = final.to(C.dtype)
    m = torch.where(m.to(final.dtype) < final, m.nextafter(m.new_tensor(torch.inf)), m)
    rest = (final - m.to(final.dtype)).exp().to(C.dtype)  # what m gained by rounding
    return C * rest[..., None, None], n * rest.unsqueeze(-1), m.unsqueeze(-1)


def _stabilised(
    q: torch.Tensor, i: torch.Tensor, f: torch.Tensor, start: Optional, N: int, cu_seqlens: Optional,
    sp: SequenceParallel | None, wants_last: bool,
) -> tuple[in_pytorch.Gates, Optional]:  # fmt: skip
    """The gates relative to their maxima m, and the final m [N, H] if it is wanted. m is computed in float64 and is a
    constant to autograd.

    Results do not depend on m as long as all factors use the same one. So its differences are taken in float64, too.

    Args:
        start: m [N, H] before documents or, on the first rank, before the sequences.
    """
    log_f = in_pytorch.log_forget(f)
    a, c = log_f.detach().transpose(1, 2), i.detach().double().transpose(1, 2)  # [B, H, T]
    begun, documents = _begun(i, start, N), None if cu_seqlens is None else _Documents.of(cu_seqlens, i.shape[1], sp)
    if documents is None:
        before, along = maxima_between(a, c, begun, None, None, sp, MAXIMA)
    else:
        own = begun.index_select(0, documents.of_token).t()
        before, along = maxima_between(a, c, begun, own, documents.first, sp, MAXIMA)
    m = along[..., 1:]
    last = None
    if wants_last:
        last = along[..., -1] if documents is None else documents.last(m, begun)
    dtype = check.accumulation_dtype(q)
    return in_pytorch.gates(log_f, i, before.transpose(1, 2), m.transpose(1, 2), dtype), last


@step
def _stabilised_in_kernels(
    q: torch.Tensor, i: torch.Tensor, f: torch.Tensor, start: Optional, N: int, cu_seqlens: Optional,
    sp: SequenceParallel | None, wants_last: bool,
) -> tuple[in_pytorch.Gates, Optional]:  # fmt: skip
    """`_stabilised` by kernels, in float32."""
    from flexsp.kernels.mlstm import gates

    T, begun = i.shape[1], _begun(i, start, N)
    documents = None if cu_seqlens is None else _Documents.of(cu_seqlens, T, sp)
    starts, entering = None, begun
    if documents is not None:
        starts = gates.Starts(documents.of_token, documents.first, begun.contiguous())
        entering = begun.new_full((1, i.shape[2]), -torch.inf)
    before = None
    if sp is not None and sp.world_size > 1:
        found = gates.blocks(f.detach(), i.detach(), starts)
        before = found.before
        cut = None if documents is None else documents.first.any().view(1)
        entering = enters(*found.all, entering, cut, sp, MAXIMA)
    made = gates.gates(f, i, starts, before, entering)
    if not wants_last:
        return made, None
    if documents is not None:
        return made, documents.last(made.m.transpose(1, 2), begun)
    return made, made.m[:, -1] if T else entering


def _begun(i: torch.Tensor, start: Optional, N: int) -> torch.Tensor:
    """m [N, H] before documents or sequences, in float64."""
    shape = N, i.shape[2]
    return torch.zeros(shape, dtype=torch.float64, device=i.device) if start is None else start.detach().double()


class _Documents(NamedTuple):
    """The document of each token of this shard, where documents begin, and which of them end here.

    For empty documents the rules are those of `flexsp.kernels.table.chunk_table`.
    """

    of_token: torch.Tensor  # [T]
    first: torch.Tensor  # bool [T]
    end: torch.Tensor  # [N] the last token, counted from the start of the shard
    empty: torch.Tensor  # bool [N]
    here: torch.Tensor  # bool [N]

    @classmethod
    def of(cls, cu_seqlens: torch.Tensor, T: int, sp: SequenceParallel | None) -> _Documents:
        bounds = cu_seqlens.to(torch.int64)
        start, stop = (0, T) if sp is None else sp.shard_range(T)[:2]
        place = torch.arange(start, stop, device=bounds.device)
        begin, end = bounds[:-1], bounds[1:]
        of_token = (torch.searchsorted(bounds, place, right=True) - 1).clamp(0, begin.numel() - 1)
        here = (begin >= start) & (begin < stop)
        if sp is None or sp.is_last:
            here = here | (begin >= stop)
        empty = begin == end
        here = torch.where(empty, here, (end > start) & (end <= stop))
        return cls(of_token, place == begin[of_token], end - 1 - start, empty, here)

    def last(self, m: torch.Tensor, begun: torch.Tensor) -> torch.Tensor:
        """Final m [N, H] of documents that end here, else 0; ``m`` [1, H, T] of tokens and ``begun`` of documents."""
        if m.shape[-1]:
            found = m[0].index_select(1, self.end.clamp(0, m.shape[-1] - 1)).t()
            begun = torch.where(self.empty.unsqueeze(-1), begun, found)
        return begun.masked_fill(~self.here.unsqueeze(-1), 0.0)


def _tokens_first(head_first: bool, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors as views [B, T, H, ...]. Objects that have no such axes pass; the checks refuse them later."""
    check.check_flag("head_first", head_first)
    if not head_first:
        return tensors
    return tuple(x.transpose(1, 2) if isinstance(x, torch.Tensor) and x.dim() > 2 else x for x in tensors)


def _states(c: Optional, n: Optional, m: Optional) -> tuple[Optional, Optional, Optional]:
    """Initial C, n and m [N, H], m without gradients.

    h depends on C e^m and n e^m alone. So m can be a constant here, too; its gradient goes through a factor e^{m - m}
    of C and n.
    """
    if c is None or n is None or m is None:
        return None, None, None
    m = m.squeeze(-1).clamp(min=_LEAST_MAXIMUM)
    one = (m - m.detach()).exp()
    return c * one[..., None, None], n * one.unsqueeze(-1), m.detach()


def _initial(
    c: Optional, n: Optional, m: Optional, sizes: tuple[int, int, int, int], q: torch.Tensor, cu_seqlens: Optional,
    sp: SequenceParallel | None,
) -> list[Optional]:  # fmt: skip
    """The initial states, checked: all three or none."""
    N, H, K, V = sizes
    given = {"c_initial": c, "n_initial": n, "m_initial": m}
    shapes = ((N, H, K, V), "[N, H, K, V]"), ((N, H, K), "[N, H, K]"), ((N, H, 1), "[N, H, 1]")
    missing = [name for name, x in given.items() if x is None]
    if missing and len(missing) < 3:
        others = " and ".join(name for name in given if name not in missing)
        check.fail(missing[0], f"a tensor together with {others}", None)
    for (name, x), (shape, dims) in zip(given.items(), shapes, strict=True):
        check.check_state(name, x, shape, dims, q, cu_seqlens, sp)
    return list(given.values())


def _checked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, i: torch.Tensor, f: torch.Tensor, last: bool, eps: float
) -> tuple[int, int, int, int, int]:  # fmt: skip
    sizes = check.check_qkv(q, k, v)
    for name, gate in (("i", i), ("f", f)):
        shape = tuple(q.shape[:3])
        check.check_tensor(name, gate, shape, "[B, T, H]", dtypes=(q.dtype, torch.float32), device=q.device)
    check.check_flag("return_last_states", last)
    if check_number("eps", eps) < 0:
        check.fail("eps", "a number >= 0", repr(eps))
    return sizes
