"""Mamba-2: the state-space dual with a scalar decay for each head and token."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from flexsp.comm.derivatives import share_backward
from flexsp.comm.documents import seq_idx_to_cu_seqlens
from flexsp.comm.group import SequenceParallel, ranks_call
from flexsp.exceptions import asks_for_kernels
from flexsp.kernels.diagonal.op import diagonal, ssd
from flexsp.kernels.views import contiguous, turned
from flexsp.ops import _validate as check
from flexsp.ops._peers import one_dtype
from flexsp.ops._recipe import by_recipe
from flexsp.ops._segments import in_segments
from flexsp.runtime.recipe import step
from flexsp.scan.tokens import without_tail

__all__ = ["mamba2_ssd"]

NO_LIMIT = (0.0, math.inf)


@ranks_call
@by_recipe
@in_segments("x dt B C z", "A D dt_bias", refuses="seq_idx", kernels=True, apart="z", one_axis="D")
@one_dtype("x B C z", out="x")
def mamba2_ssd(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    sp: SequenceParallel | bool | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    *,
    state_v_first: bool | None = None,
    z: torch.Tensor | None = None,
    dt_limit: tuple[float, float] = NO_LIMIT,
    seq_idx: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """S_t = e^{dt_t A} S_{t-1} + B_t (dt_t x_t)^T, y_t = C_t S_t + D x_t, times silu(z_t) where z is given.

    Dao & Gu 2024, Transformers are SSMs (arXiv 2405.21060), eq. 2 with a scalar A, discretised as in section 7
    (dt multiplies x; no scale on C).

    Args:
        x: [B, T, H, P], float16, bfloat16, float32 or float64, any strides; P of 1..512.
        dt: step sizes [B, T, H] >= 0 after ``dt_bias`` and ``dt_softplus``; x's dtype or float32.
        A: [H] <= 0, usually -exp(A_log); x's dtype or float32. dt A is a natural-log gate: below -104 (-800 for
            float64 inputs) it acts as that, a decay of 0, and has no gradient.
        B: [B, T, G, N] in x's dtype, N of 1..256; G divides H and head h uses group h // (H / G).
        C: [B, T, G, N] in x's dtype.
        D: [H] or [H, P] skip weights, or None; x's dtype or float32.
        dt_bias: [H] added to dt first, or None; x's dtype or float32.
        dt_softplus: dt becomes softplus(dt + dt_bias).
        initial_state: [B, H, N, P] in float32 (float64 for float64 inputs); with ``cu_seqlens`` one a document. With
            ``state_v_first`` [B, H, P, N].
        output_final_state: also return the state after the last token.
        cu_seqlens: packed documents, as in `chunk_simple_gla`.
        sp: the ranks, as in `chunk_simple_gla`.
        cu_seqlens_cpu: CPU copy of ``cu_seqlens``, as in `chunk_simple_gla`.
        state_v_first: True for states [B, H, P, N], as mamba_ssm has them, False for [B, H, N, P]. Must be given where
            a state comes in or goes out: the two cannot be told apart where N = P.
        z: [B, T, H, P] in x's dtype, or None. It is applied in PyTorch, outside of the kernels.
        dt_limit: the least and the largest step size, after softplus: a pair of numbers from 0 to infinity. Steps
            outside have no gradient.
        seq_idx: int32 or int64 [B, T] in place of ``cu_seqlens``, as mamba_ssm has it: documents are the runs of tokens
            with the same index, in each row. The first document of a row goes on from its initial state, and the final
            state is that of the last one: states [B, ...], as without documents. Over ranks B is 1, there are no
            states, and a document may go on over the edges of ranks. Each call reads the indices, which the host waits
            for: `flexsp.seq_idx_to_cu_seqlens` does so once for all layers.

    Returns:
        y [B, T, H, P] in x's dtype and the final state, laid out as the initial one, or None, by the same rules as
        `chunk_simple_gla`. Under ``sp`` the gradients of A, D and dt_bias are this rank's share;
        their sum over ranks is the gradient.

    Raises:
        ValueError: a wrong shape, dtype, device or value, naming the argument. On a GPU also B * H of more than 65535.

    Example:
        >>> x, dt, A = torch.randn(2, 100, 8, 64), torch.randn(2, 100, 8), -torch.rand(8)
        >>> B, C = torch.randn(2, 2, 100, 1, 128).unbind(0)
        >>> y, _ = mamba2_ssd(x, dt, A, B, C, D=torch.ones(8), dt_softplus=True)
    """
    batch, H, P, N = _check_shapes(x, dt, A, B, C, D, dt_bias)
    check.check_non_positive("A", A, "values <= 0, usually -exp(A_log)")
    check.check_flag("dt_softplus", dt_softplus)
    check.check_flag("output_final_state", output_final_state)
    unlimited = type(dt_limit) is tuple and dt_limit == NO_LIMIT
    limits = None if unlimited else check.check_limits("dt_limit", dt_limit)
    sp = check.resolve(sp, x)
    check.check_cu_seqlens(cu_seqlens, cu_seqlens_cpu, x, "x", sp)
    _check_runs(seq_idx, x, cu_seqlens, initial_state, output_final_state, sp)
    n_states = check.number_of_states(batch, cu_seqlens)
    sizes, dims = ((n_states, H, P, N), "[B, H, P, N]") if state_v_first else ((n_states, H, N, P), "[B, H, N, P]")
    _check_layout(state_v_first, initial_state is not None or output_final_state)
    check.check_state("initial_state", initial_state, sizes, dims, x, cu_seqlens, sp)
    if z is not None:
        check.check_tensor("z", z, tuple(x.shape), "[B, T, H, P]", dtypes=(x.dtype,), device=x.device)
    runs = None if seq_idx is None else _Runs.of(seq_idx, sp)
    if runs is not None:
        cu_seqlens, n_states = runs.bounds, len(runs.bounds) - 1
        x, dt, B, C = (t.flatten(0, 1).unsqueeze(0) for t in (x, dt, B, C))
        z = None if z is None else z.flatten(0, 1).unsqueeze(0)
        initial_state = None if initial_state is None else runs.initial(initial_state)
    check.same_call(sp, "mamba2", x, H, N, P, n_states, cu_seqlens is None)

    kernels, wide = asks_for_kernels(x.is_cuda, x.dtype), D is not None and D.dim() == 2
    added = D if wide or not kernels else None  # what kernels do not add themselves
    if sp is not None and added is not None:  # it does not reach the exchange of states, whose backward pass must run
        x, dt, A, B, C, D, dt_bias, initial_state = share_backward(sp, x, dt, A, B, C, D, dt_bias, initial_state)[1:]
        added = D
    if state_v_first and initial_state is not None:
        initial_state = turned(initial_state)
    call: dict[str, Any] = {
        "initial_state": initial_state, "output_final_state": output_final_state, "cu_seqlens": cu_seqlens, "sp": sp,
        "op": "mamba2",
    }  # fmt: skip
    dtype = check.accumulation_dtype(x)
    if kernels:
        if not dt_softplus and limits is None and check.readable(dt):
            check.check_non_negative("dt", dt if dt_bias is None else dt + dt_bias, "step sizes >= 0 (after dt_bias)")
        skip = None if wide else D
        y, final = ssd(C, B, x, dt, A, dt_bias, skip, softplus=dt_softplus, limits=limits, **call)
    else:
        step = dt.to(dtype) if dt_bias is None else dt.to(dtype) + dt_bias.to(dtype)
        step = F.softplus(step) if dt_softplus else step
        if limits is not None:
            step = step.clamp(*limits)
        elif not dt_softplus:
            check.check_non_negative("dt", step, "step sizes >= 0 (after dt_bias)")
        values, gates = (x * step.unsqueeze(-1)).to(x.dtype), step * A.to(dtype)
        y, final = diagonal(_heads(C, H), _heads(B, H), values, gates, scale=1.0, **call)
    if added is not None:
        weight = added.to(dtype) if wide else added.to(dtype).unsqueeze(-1)
        y = without_tail((y + x * weight).to(x.dtype), cu_seqlens, sp)
    y = y if z is None else _gated(y, z, cu_seqlens, sp)
    if runs is not None:
        y = y.view(*runs.shape, H, P)
        final = None if final is None else final.index_select(0, runs.last)
    return y, contiguous(turned(final)) if state_v_first and final is not None else final


class _Runs(NamedTuple):
    """The documents of `seq_idx` in rows of the shape [B, T], which are packed one after the other.

    Attributes:
        bounds: of the N documents, [N + 1].
        first, last: which document is the first and the last one of each row, [B].
    """

    shape: torch.Size
    bounds: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor

    @staticmethod
    def of(seq_idx: torch.Tensor, sp: SequenceParallel | None) -> _Runs:
        bounds, (B, T) = seq_idx_to_cu_seqlens(seq_idx, False if sp is None else sp), seq_idx.shape
        rows = torch.arange(B + 1, device=bounds.device)
        edges = torch.searchsorted(bounds, rows * T) if T else rows
        return _Runs(seq_idx.shape, bounds, edges[:-1], edges[1:] - 1)

    def initial(self, states: torch.Tensor) -> torch.Tensor:
        """Of all documents, [N, ...]: zeros where a document does not begin a row."""
        return states.new_zeros(len(self.bounds) - 1, *states.shape[1:]).index_copy(0, self.first, states)


def _check_runs(
    seq_idx: torch.Tensor | None, x: torch.Tensor, cu_seqlens: torch.Tensor | None, initial: torch.Tensor | None,
    final: bool, sp: SequenceParallel | None,
) -> None:  # fmt: skip
    if seq_idx is None:
        return
    integers = (torch.int32, torch.int64)
    check.check_tensor("seq_idx", seq_idx, tuple(x.shape[:2]), "[B, T]", dtypes=integers, device=x.device)
    if cu_seqlens is not None:
        check.fail("seq_idx", "None beside cu_seqlens", "both")
    if sp is None:
        return
    if x.shape[0] != 1:
        check.fail("seq_idx", "batch size 1 over ranks (pack the documents along T)", x.shape[0])
    if initial is not None or final:
        expected = "no initial and final states over ranks (cu_seqlens has states of documents)"
        check.fail("seq_idx", expected, "initial_state" if initial is not None else "output_final_state")


@step
def _gated(
    y: torch.Tensor, z: torch.Tensor, cu_seqlens: torch.Tensor | None, sp: SequenceParallel | None
) -> torch.Tensor:
    """y silu(z) in y's dtype, with zeros behind the last document whatever is in z there."""
    dtype = check.accumulation_dtype(y)
    return (y.to(dtype) * F.silu(without_tail(z, cu_seqlens, sp).to(dtype))).to(y.dtype)


def _check_layout(state_v_first: bool | None, states: bool) -> None:
    if state_v_first is None and states:
        check.fail("state_v_first", "True for states [B, H, P, N] (mamba_ssm) or False for [B, H, N, P]", None)
    if state_v_first is not None:
        check.check_flag("state_v_first", state_v_first)


def _heads(x: torch.Tensor, H: int) -> torch.Tensor:
    """Groups [B, T, G, N] repeated to heads [B, T, H, N]; no copy for one group."""
    return x.unsqueeze(3).expand(-1, -1, -1, H // x.shape[2], -1).flatten(2, 3)


@check.once
def _check_shapes(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, D: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
) -> tuple[int, int, int, int]:  # fmt: skip
    """Shapes, dtypes and device; returns (B, H, P, N)."""
    batch, T, H, P = check.check_first("x", x, "[B, T, H, P]")
    check.check_tensor("B", B, None, "[B, T, G, N]", dtypes=(x.dtype,), device=x.device)
    G, N = B.shape[2:]
    if tuple(B.shape[:2]) != (batch, T):
        check.fail("B", f"shape [B, T, G, N] = [{batch}, {T}, G, N]", list(B.shape))
    check.check_tensor("C", C, (batch, T, G, N), "[B, T, G, N]", dtypes=(x.dtype,), device=x.device)
    check.check_groups("B", G, H, "heads")
    check.check_head_sizes({"x": P}, B=N)
    params = (x.dtype, torch.float32)
    check.check_tensor("dt", dt, (batch, T, H), "[B, T, H]", dtypes=params, device=x.device)
    check.check_tensor("A", A, (H,), "[H]", dtypes=params, device=x.device)
    if dt_bias is not None:
        check.check_tensor("dt_bias", dt_bias, (H,), "[H]", dtypes=params, device=x.device)
    if D is not None:
        wide = isinstance(D, torch.Tensor) and D.dim() == 2
        shape, dims = ((H, P), "[H, P]") if wide else ((H,), "[H] or [H, P]")
        check.check_tensor("D", D, shape, dims, dtypes=params, device=x.device)
    return batch, H, P, N
