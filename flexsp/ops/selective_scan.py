"""The selective scan of Mamba-1: a state of N numbers a channel, each with its own decay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flexsp.comm.derivatives import share_backward
from flexsp.comm.group import SequenceParallel, ranks_call
from flexsp.kernels.selective import in_pytorch
from flexsp.kernels.selective.selective_scan import selective
from flexsp.ops import _programs as programs
from flexsp.ops import _validate as check
from flexsp.ops._peers import one_dtype
from flexsp.ops._recipe import by_recipe
from flexsp.ops._segments import in_segments
from flexsp.scan.tokens import without_tail

__all__ = ["recurrent_selective_scan", "selective_scan"]

_MOST_NUMBERS = 256
_DISCRETIZATIONS = ("euler", "zoh")
Optional = torch.Tensor | None


@ranks_call
@by_recipe
@in_segments("u delta B C z", "A D delta_bias", wants="return_last_state", kernels=True, three_axes="B C")
@one_dtype("u B C z", out="u")
def selective_scan(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    initial_state: torch.Tensor | None = None,
    discretization: str = "euler",
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    sp: SequenceParallel | bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """h_t = e^{dt_t A} h_{t-1} + dt_t B_t u_t, y_t = (C_t h_t + D u_t) silu(z_t), dt = softplus(delta + delta_bias).

    Gu & Dao 2023, Mamba (arXiv 2312.00752), algorithm 2: every channel has N numbers, which decay each by itself. The
    arguments have the names of ``selective_scan_fn`` of mamba_ssm; tokens are the second axis here, channels the last.
    No tensor has T x D x N numbers. The kernels' backward pass makes a state every 8 tokens, and what every 32 channels
    (with the zero-order hold 8; fewer for N of more than 16) add to the gradients of B and C: T x D x N / 8 and, twice,
    T x D x N / 32 numbers (with the zero-order hold / 8) in float32.

    Args:
        u: [batch, T, D], float16, bfloat16, float32 or float64, any strides.
        delta: step sizes [batch, T, D], >= 0 after ``delta_bias`` and ``delta_softplus``; u's dtype or float32.
        A: [D, N] <= 0, usually -exp(A_log); u's dtype or float32; N of 1..256. delta A is a natural-log gate.
        B: [batch, T, N] in u's dtype, shared by all channels; or [batch, T, G, N] with G a divisor of D: channel d
            uses group d // (D / G), and every group is a call of its own; or [D, N] in u's dtype or float32, shared by
            all tokens.
        C: [batch, T, N], [batch, T, G, N] or [D, N], as B, whose form may be another. If one of them is [D, N], the
            call runs in float32 (float64 for float64 inputs) and needs several tensors of batch x T x D x N numbers.
        D: [D] skip weights, or None; u's dtype or float32.
        z: [batch, T, D] in u's dtype, a gate: y is multiplied by silu(z); or None.
        delta_bias: [D] added to delta first, or None; u's dtype or float32.
        delta_softplus: delta becomes softplus(delta + delta_bias).
        return_last_state: also return the state after the last token.
        initial_state: [n, D, N] in float32 (float64 for float64 inputs); n = batch, or the number of documents.
        discretization: of B: "euler", dt B, which mamba_ssm computes, or "zoh", the zero-order hold
            (e^{dt A} - 1) / A B of the paper's equation 4.
        cu_seqlens: packed documents, as in `chunk_simple_gla`.
        cu_seqlens_cpu: CPU copy of ``cu_seqlens``, as in `chunk_simple_gla`.
        sp: the ranks, as in `chunk_simple_gla`.

    Returns:
        y [batch, T, D] in u's dtype and the final state [n, D, N], or None, by the same rules as `chunk_simple_gla`.
        Under ``sp`` the gradients of A, D and delta_bias, and of B and C that are [D, N], are this rank's share; their
        sum over ranks is the gradient.

    Raises:
        ValueError: a wrong shape, dtype, device or value, naming the argument.
        NotAvailable: on a GPU, more than 65535 blocks of channels in all sequences; a block has as many channels as the
            largest divisor of D up to 256 / N (of D N up to 256 where B or C is [D, N]).

    Example:
        >>> u, delta = torch.randn(2, 2, 100, 256).unbind(0)
        >>> B, C = torch.randn(2, 2, 100, 16).unbind(0)
        >>> y, state = selective_scan(u, delta, -torch.rand(256, 16), B, C, delta_softplus=True, return_last_state=True)
    """
    if _constant(B, C) or _has_axes(B, 4):
        tensors = (u, delta, A, B, C, D, z, delta_bias, initial_state)
        options: dict[str, Any] = {
            "delta_softplus": delta_softplus, "return_last_state": return_last_state, "discretization": discretization,
            "cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens_cpu, "sp": sp,
        }  # fmt: skip
        if _constant(B, C):
            return _with_constants(*tensors, **options)
        return _by_groups(selective_scan, *tensors, **options)
    batch, width, N = _checked(u, delta, A, B, C, D, z, delta_bias, delta_softplus, return_last_state, discretization)
    sp = check.resolve(sp, u)
    check.check_cu_seqlens(cu_seqlens, cu_seqlens_cpu, u, "u", sp)
    n = check.number_of_states(batch, cu_seqlens)
    check.check_state("initial_state", initial_state, (n, width, N), "[n, D, N]", u, cu_seqlens, sp)
    check.same_call(sp, "selective_scan", u, width, N, n, discretization, cu_seqlens is None)
    skip, bias = (None if x is None else programs.wide(x, u) for x in (D, delta_bias))
    return selective(
        u, delta, programs.wide(A, u), B, C, skip, z, bias, softplus=delta_softplus, zoh=discretization == "zoh",
        initial_state=initial_state, output_final_state=return_last_state, cu_seqlens=cu_seqlens, sp=sp,
    )  # fmt: skip


@one_dtype("u B C z", out="u")
def recurrent_selective_scan(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    initial_state: torch.Tensor | None = None,
    discretization: str = "euler",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The recurrence of `selective_scan` token by token: decoding, T = 1 a step.

    Takes and returns the same tensors, states included, so a prompt goes through `selective_scan` and its final state
    here. Differentiable. Runs on one rank, whatever the ambient ``sequence_parallel``.

    Raises:
        ValueError: a wrong shape, dtype, device or value, naming the argument.

    Example:
        >>> u, delta = torch.rand(2, 2, 1, 256).unbind(0)
        >>> B, C = torch.randn(2, 2, 1, 16).unbind(0)
        >>> y, state = recurrent_selective_scan(u, delta, -torch.rand(256, 16), B, C, return_last_state=True)
    """
    if _has_axes(B, 4) and not _constant(B, C):
        return _by_groups(
            recurrent_selective_scan, u, delta, A, B, C, D, z, delta_bias, initial_state, delta_softplus=delta_softplus,
            return_last_state=return_last_state, discretization=discretization,
        )  # fmt: skip
    batch, width, N = _checked(u, delta, A, B, C, D, z, delta_bias, delta_softplus, return_last_state, discretization)
    check.check_state("initial_state", initial_state, (batch, width, N), "[batch, D, N]", u, None, None)
    dt = in_pytorch.steps(delta, delta_bias, delta_softplus, check.accumulation_dtype(u))
    wide_A, wide_B, wide_C, wide_u = (programs.wide(x, u) for x in (A, B, C, u))
    wide_B, wide_C = (_rows(x, width) for x in (wide_B, wide_C))

    def step(h: torch.Tensor, t: int) -> tuple[torch.Tensor, torch.Tensor]:
        kept, given = in_pytorch.weights(dt[:, t, :, None], wide_A, discretization == "zoh")
        B_t, C_t = (x[:, t if x.shape[1] > 1 else 0] for x in (wide_B, wide_C))
        h = kept * h + given * wide_u[:, t, :, None] * B_t
        return (h * C_t).sum(-1), h

    start = dt.new_zeros(batch, width, N) if initial_state is None else initial_state
    y, last = programs.token_loop(step, start, u.shape[1], dt)
    return in_pytorch.gated(y, u, D, z), last if return_last_state else None


def _constant(B: object, C: object) -> bool:
    """Whether B or C is [D, N], the same for all tokens."""
    return _has_axes(B, 2) or _has_axes(C, 2)


def _has_axes(x: object, n: int) -> bool:
    return isinstance(x, torch.Tensor) and not x.is_nested and x.dim() == n


def _rows(x: torch.Tensor, width: int) -> torch.Tensor:
    """B or C in any of its forms, as [batch or 1, T or 1, D or 1, N]."""
    if x.dim() == 2:
        return x[None, None]
    return x.unsqueeze(2) if x.dim() == 3 else x.repeat_interleave(width // x.shape[2], 2)


def _with_constants(
    u: torch.Tensor, delta: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, D: Optional, z: Optional,
    delta_bias: Optional, initial_state: Optional, *, delta_softplus: bool, return_last_state: bool,
    discretization: str, cu_seqlens: Optional, cu_seqlens_cpu: Optional, sp: SequenceParallel | bool | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """A call with B or C of [D, N], by a call of D N channels with one number of state each, whose outputs are the
    states. The kernels only take B and C that all channels share, here ones.
    """
    batch, width, N = _checked(u, delta, A, B, C, D, z, delta_bias, delta_softplus, return_last_state, discretization)
    group = check.resolve(sp, u)
    check.check_cu_seqlens(cu_seqlens, cu_seqlens_cpu, u, "u", group)
    n = check.number_of_states(batch, cu_seqlens)
    check.check_state("initial_state", initial_state, (n, width, N), "[n, D, N]", u, cu_seqlens, group)
    if group is not None:  # C, D and z do not reach the exchange of states, whose backward pass must run all the same
        u, delta, A, B, C, D, z, delta_bias, initial_state = share_backward(
            group, u, delta, A, B, C, D, z, delta_bias, initial_state
        )[1:]
    u = without_tail(u, cu_seqlens, group)  # a NaN behind the last document would reach B's gradient
    wide_u, wide_B, wide_C = (programs.wide(x, u) for x in (u, B, C))
    of_states = (wide_u.unsqueeze(3) * _rows(wide_B, width)).flatten(2)
    ones = of_states.new_ones(()).expand(*u.shape[:2], 1)
    h, last = selective_scan(
        of_states, delta.to(wide_u.dtype).repeat_interleave(N, 2), programs.wide(A, u).reshape(-1, 1), ones, ones,
        delta_bias=None if delta_bias is None else programs.wide(delta_bias, u).repeat_interleave(N),
        delta_softplus=delta_softplus, return_last_state=return_last_state,
        initial_state=None if initial_state is None else initial_state.reshape(n, -1, 1),
        discretization=discretization, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu,
        sp=False if group is None else group,
    )  # fmt: skip
    y = (h.unflatten(2, (width, N)) * _rows(wide_C, width)).sum(3)
    y = without_tail(in_pytorch.gated(y, u, D, z), cu_seqlens, group)
    return y, None if last is None else last.view(n, width, N)


def _by_groups(
    op: Callable[..., Any], u: torch.Tensor, delta: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor,
    D: Optional, z: Optional, delta_bias: Optional, initial_state: Optional, **others: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """A call with B and C of [batch, T, G, N], by one call for each group of channels."""
    check.check_tensor("u", u, None, "[batch, T, D]", dtypes=check.FLOAT_DTYPES)
    (batch, T, width), (G, N) = u.shape, B.shape[2:]
    check.check_groups("B", G, width, "channels")
    for name, x in (("B", B), ("C", C)):
        check.check_tensor(name, x, (batch, T, G, N), "[batch, T, G, N]", dtypes=(u.dtype,), device=u.device)
    wholes: dict[str, tuple[Optional, int]] = {
        "delta": (delta, 2), "A": (A, 0), "D": (D, 0), "z": (z, 2), "delta_bias": (delta_bias, 0),
        "initial_state": (initial_state, 1),
    }  # fmt: skip
    for name, (whole, axis) in wholes.items():
        if whole is None:
            continue
        if not isinstance(whole, torch.Tensor) or whole.dim() <= axis or whole.shape[axis] != width:
            got = list(whole.shape) if isinstance(whole, torch.Tensor) else type(whole).__name__
            check.fail(name, f"a tensor with {width} channels along axis {axis}", got)
    parts, n = [], width // G
    for g in range(G):
        mine = {name: None if x is None else x.narrow(axis, g * n, n) for name, (x, axis) in wholes.items()}
        parts.append(op(u.narrow(2, g * n, n), B=B[:, :, g], C=C[:, :, g], **mine, **others))
    last = None if parts[0][1] is None else torch.cat([x for _, x in parts], 1)
    return torch.cat([y for y, _ in parts], 2), last


def _checked(
    u: torch.Tensor, delta: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, D: Optional, z: Optional,
    delta_bias: Optional, delta_softplus: bool, return_last_state: bool, discretization: str,
) -> tuple[int, int, int]:  # fmt: skip
    """Checks shapes, dtypes, devices and values; returns (batch, D, N)."""
    batch, T, width = check.check_first("u", u, "[batch, T, D]")
    params = (u.dtype, torch.float32)
    check.check_tensor("delta", delta, (batch, T, width), "[batch, T, D]", dtypes=params, device=u.device)
    check.check_tensor("A", A, None, "[D, N]", dtypes=params, device=u.device)
    N = A.shape[1]
    if A.shape[0] != width or not 1 <= N <= _MOST_NUMBERS:
        check.fail("A", f"shape [D, N] = [{width}, N] with N of 1..{_MOST_NUMBERS}", list(A.shape))
    check.check_non_positive("A", A, "values <= 0, usually -exp(A_log)")
    for name, x in (("B", B), ("C", C)):
        if _has_axes(x, 2):
            check.check_tensor(name, x, (width, N), "[D, N]", dtypes=params, device=u.device)
        elif _has_axes(x, 4) and _constant(B, C):
            G = x.shape[2]
            check.check_groups(name, G, width, "channels")
            check.check_tensor(name, x, (batch, T, G, N), "[batch, T, G, N]", dtypes=(u.dtype,), device=u.device)
        else:
            check.check_tensor(name, x, (batch, T, N), "[batch, T, N]", dtypes=(u.dtype,), device=u.device)
    for name, given in (("D", D), ("delta_bias", delta_bias)):
        if given is not None:
            check.check_tensor(name, given, (width,), "[D]", dtypes=params, device=u.device)
    if z is not None:
        check.check_tensor("z", z, (batch, T, width), "[batch, T, D]", dtypes=(u.dtype,), device=u.device)
    check.check_flag("delta_softplus", delta_softplus)
    check.check_flag("return_last_state", return_last_state)
    if not isinstance(discretization, str) or discretization not in _DISCRETIZATIONS:
        check.fail("discretization", '"euler" or "zoh"', repr(discretization))
    if not delta_softplus:
        steps = delta if delta_bias is None else delta + delta_bias
        check.check_non_negative("delta", steps, "step sizes >= 0 (after delta_bias)")
    return batch, width, N
