"""Mamba-3: trapezoidal rule, rotations by data-dependent angles, and several inputs and outputs a head (MIMO)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from flexsp.comm.derivatives import share_backward, transformed
from flexsp.comm.group import SequenceParallel, ranks_call
from flexsp.exceptions import asks_for_kernels
from flexsp.kernels.diagonal.op import diagonal
from flexsp.kernels.gates import clamped
from flexsp.kernels.operators import plain
from flexsp.kernels.rotary import rotate
from flexsp.ops import _validate as check
from flexsp.ops._peers import one_dtype
from flexsp.ops._programs import token_loop
from flexsp.ops._recipe import by_recipe
from flexsp.ops._rows import Turns, entering, leaving, on_engine, own_products, products, value_rows
from flexsp.ops._segments import in_segments
from flexsp.runtime.recipe import step
from flexsp.scan.exchange import add_backward_dependency
from flexsp.scan.tokens import (
    arriving,
    begins,
    ended,
    following,
    last_of_ended,
    read_here,
    running_sum,
    without_tail,
)

__all__ = ["Mamba3State", "mamba3", "recurrent_mamba3"]

Tensor = torch.Tensor
Optional = torch.Tensor | None
_TURN = 2 * math.pi


class Mamba3State(NamedTuple):
    """What Mamba-3 remembers of a sequence, in float32 (float64 for float64 inputs).

    Attributes:
        angle: sums of the angles [N, H, S] in radians; whole turns do not matter, final ones lie in -pi..pi.
        ssm: the state h [N, H, K, P], K rows of B's channels.
        k: the last token's B, with bias and rotation, [N, R, H, K]; R = 1 without ``mimo_x``.
        v: the last token's x [N, H, P].
    """

    angle: Tensor
    ssm: Tensor
    k: Tensor
    v: Tensor


@ranks_call
@by_recipe
@in_segments("x dt A B C trap angles", "D B_bias C_bias mimo_x")
@one_dtype("x B C", out="x")
def mamba3(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    trap: torch.Tensor,
    angles: torch.Tensor,
    D: torch.Tensor | None = None,
    B_bias: torch.Tensor | None = None,
    C_bias: torch.Tensor | None = None,
    mimo_x: torch.Tensor | None = None,
    rotate_pairwise: bool = True,
    initial_state: Mamba3State | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    sp: SequenceParallel | bool | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Mamba3State | None]:
    """h_t = e^{dt_t A_t} (h_{t-1} + (1 - l_t) dt_t b_{t-1} x_{t-1}^T) + l_t dt_t b_t x_t^T, y_t = c_t h_t + D x_t.

    Lahoti et al. 2026, Mamba-3 (ICLR 2026): the exponential-trapezoidal rule with l = sigmoid(trap), and complex states
    as rotations. b_t = R(theta_t) (B_t + B_bias) and c_t = R(theta_t) (C_t + C_bias), where theta_t is the sum of
    pi tanh(angles_s) dt_s up to t. With ``mimo_x`` (MIMO) a token has R rows of B and C, writes the sum of R products
    b^(j) (mimo_x^(j) x)^T, and row j of C reads y^(j); a skip adds D mimo_x^(j) x. Arguments as of mamba_ssm's module.

    The recurrence runs on the engine of `chunk_simple_gla`. On a GPU kernels of its own compute what comes before it,
    of [B, T, H, S] and more numbers; with ``mimo_x``, with P = 1, in graphs of torch.compile, in float64 and on CPU
    that runs in PyTorch. Both compute in float32. Angles are summed in turns in float64, without whole turns; over
    ranks sums of at most half a turn a rank are exchanged in float32.

    Gradients of ``angles`` are sums over all later tokens, whose terms nearly cancel. Kernels begin these sums anew
    every few thousand tokens, with what states in float32 tell, so that roundings do not add up over the text.

    Args:
        x: [B, T, H, P], float16, bfloat16, float32 or float64, any strides; P of 1..512.
        dt: step sizes [B, T, H] >= 0; x's dtype or float32, as the next three.
        A: [B, T, H] <= 0. dt A is a natural-log gate: below -104 (-800 for float64 inputs) it acts as that and has
            no gradient.
        B: [B, T, G, K] in x's dtype, with ``mimo_x`` [B, T, R, G, K]; K of 1..256; G divides H and head h uses group
            h // (H / G).
        C: as B.
        trap: [B, T, H], the weight of a token's own write before the sigmoid.
        angles: [B, T, H, S] before tanh, or [B, T, 1, S] for all heads, which takes less memory and time than the same
            expanded; S of 1..K/2 pairs of channels turn, the others stay.
        D: [H] skip weights, or None; x's dtype or float32, as the next three.
        B_bias: added to B for each head, [H, K], with ``mimo_x`` [H, R, K], or None.
        C_bias: as B_bias.
        mimo_x: [H, R, P] factors of x, or None.
        rotate_pairwise: pairs are channels 2 i and 2 i + 1 for i < S; False: i and i + K / 2 (K is even), as mamba_ssm
            has them with MIMO.
        initial_state: one `Mamba3State` of N = B sequences or, with ``cu_seqlens``, N documents.
        output_final_state: also return the state after the last token; the same on all ranks.
        cu_seqlens: packed documents, as in `chunk_simple_gla`.
        sp: the ranks, as in `chunk_simple_gla`.
        cu_seqlens_cpu: CPU copy of ``cu_seqlens``, as in `chunk_simple_gla`.

    Returns:
        y [B, T, H, P], with ``mimo_x`` [B, T, R, H, P], in x's dtype and the final `Mamba3State`, or None, by the same
        rules as `chunk_simple_gla`. Under ``sp`` the gradients of D, B_bias, C_bias and mimo_x are this rank's share;
        their sum over ranks is the gradient.

    Raises:
        ValueError: a wrong shape, dtype, device or value, naming the argument. On a GPU also B * H of more than 65535.

    Example:
        >>> x, dt, A = torch.randn(2, 100, 8, 64), torch.rand(2, 100, 8), -torch.rand(2, 100, 8)
        >>> B, C = torch.randn(2, 2, 100, 1, 128).unbind(0)
        >>> trap, angles = torch.randn(2, 100, 8), torch.randn(2, 100, 8, 32)
        >>> y, state = mamba3(x, dt, A, B, C, trap, angles, D=torch.ones(8), output_final_state=True)
    """
    given = _Inputs(x, dt, A, B, C, trap, angles, D, B_bias, C_bias, mimo_x)
    sizes = _checked(given, rotate_pairwise)
    check.check_flag("output_final_state", output_final_state)
    sp = check.resolve(sp, x)
    check.check_cu_seqlens(cu_seqlens, cu_seqlens_cpu, x, "x", sp)
    N = check.number_of_states(sizes.batch, cu_seqlens)
    initial = _check_state(initial_state, N, sizes, x, cu_seqlens, sp)
    check.same_call(sp, "mamba3", x, *sizes[2:], N, cu_seqlens is None, output_final_state)
    if sp is not None:
        _, *views = _shared(sp, *given, *(initial or ()))
        given, states = _Inputs(*views[: len(given)]), views[len(given) :]
        if initial is not None:
            here = [read_here(part, sizes.T, cu_seqlens, sp) for part in states]
            initial = Mamba3State(*here)  # type: ignore[arg-type]
    options = _Options(rotate_pairwise, initial, output_final_state, cu_seqlens, sp)
    run = _by_kernels if _has_kernels(sizes, given) else _in_pytorch
    y, ssm, ends = run(sizes, given, options)
    if sp is not None:
        if ends:  # so that y's backward pass makes the exchange of ends, too
            y = add_backward_dependency(y, ends[0])
        _, y, ssm, *views = _shared(sp, y, ssm, *ends)
        ends = tuple(views)
    return y, None if ssm is None else Mamba3State(ends[0], ssm, *ends[1:])


_shared = step(share_backward)


@one_dtype("x B C", out="x")
def recurrent_mamba3(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    trap: torch.Tensor,
    angles: torch.Tensor,
    D: torch.Tensor | None = None,
    B_bias: torch.Tensor | None = None,
    C_bias: torch.Tensor | None = None,
    mimo_x: torch.Tensor | None = None,
    rotate_pairwise: bool = True,
    initial_state: Mamba3State | None = None,
    output_final_state: bool = False,
) -> tuple[torch.Tensor, Mamba3State | None]:
    """The recurrence of `mamba3` token by token: decoding, T = 1 a step.

    Takes and returns the same tensors, states included, so a prompt goes through `mamba3` and its final state here.
    Differentiable. Runs on one rank, whatever the ambient ``sequence_parallel``.

    Raises:
        ValueError: a wrong shape, dtype, device or value, naming the argument.

    Example:
        >>> x, dt, A = torch.randn(2, 1, 8, 64), torch.rand(2, 1, 8), -torch.rand(2, 1, 8)
        >>> B, C = torch.randn(2, 2, 1, 1, 128).unbind(0)
        >>> trap, angles = torch.randn(2, 1, 8), torch.randn(2, 1, 8, 32)
        >>> y, state = recurrent_mamba3(x, dt, A, B, C, trap, angles, output_final_state=True)
    """
    given = _Inputs(x, dt, A, B, C, trap, angles, D, B_bias, C_bias, mimo_x)
    sizes = _checked(given, rotate_pairwise)
    check.check_flag("output_final_state", output_final_state)
    initial = _check_state(initial_state, sizes.batch, sizes, x, None, None)
    tokens = _tokens(sizes, given)
    decay = clamped(tokens.gate).exp()

    def step(state: Mamba3State, t: int) -> tuple[Tensor, Mamba3State]:
        angle = _wrapped(state.angle + _TURN * tokens.turns[:, t])
        k, q = (rotate(row[:, t], angle.unsqueeze(1), rotate_pairwise) for row in (tokens.B, tokens.C))
        before = tokens.eta[:, t, :, None, None] * products(state.k, value_rows(state.v, mimo_x))
        own = tokens.gamma[:, t, :, None, None] * products(k, tokens.x[:, t])
        h = decay[:, t, :, None, None] * (state.ssm + before) + own
        return (q.unsqueeze(-1) * h.unsqueeze(1)).sum(-2), Mamba3State(angle, h, k, tokens.v[:, t])

    start = initial
    if start is None:
        start = Mamba3State(*[tokens.gate.new_zeros(shape) for shape in _state_shapes(sizes.batch, sizes)])
    out, state = token_loop(step, start, sizes.T, tokens.x)
    if D is not None:
        out = out + tokens.x * D.to(out.dtype).unsqueeze(-1)
    out = out if sizes.mimo else out.squeeze(2)
    return out.to(x.dtype), state if output_final_state else None


class _Sizes(NamedTuple):
    batch: int
    T: int
    H: int
    P: int
    K: int
    R: int
    S: int
    mimo: bool


class _Inputs(NamedTuple):
    """The tensor arguments of `mamba3`."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    trap: Tensor
    angles: Tensor
    D: Optional
    B_bias: Optional
    C_bias: Optional
    mimo_x: Optional


class _Options(NamedTuple):
    """The other arguments of `mamba3`, and the initial state that this rank reads."""

    pairwise: bool
    initial: Mamba3State | None
    want_final: bool
    cu_seqlens: Optional
    sp: SequenceParallel | None


class _Tokens(NamedTuple):
    """What the recurrence reads of the tokens, in the accumulation dtype."""

    gate: Tensor  # natural-log decay [B, T, H]
    gamma: Tensor  # weight l_t dt_t of the token's own product [B, T, H]
    eta: Tensor  # weight (1 - l_t) dt_t of the previous token's product, before the decay [B, T, H]
    turns: Tensor  # by how much the token rotates the state, in turns [B, T, H, S]
    B: Tensor  # [B, T, R, H, K], with bias
    C: Tensor
    x: Tensor  # [B, T, R, H, P]
    v: Tensor  # [B, T, H, P]


def _tokens(sizes: _Sizes, given: _Inputs) -> _Tokens:
    dtype = check.accumulation_dtype(given.x)
    x, dt, A, B, C, trap, angles = (t.to(dtype) for t in given[:7])
    share = trap.sigmoid()
    keys, reads = _heads(B, given.B_bias, sizes), _heads(C, given.C_bias, sizes)
    turns = 0.5 * angles.tanh() * dt.unsqueeze(-1)
    return _Tokens(dt * A, share * dt, (1 - share) * dt, turns, keys, reads, value_rows(x, given.mimo_x), x)


def _heads(rows: Tensor, bias: Optional, sizes: _Sizes) -> Tensor:
    """[B, T, R, H, K] of groups [B, T, G, K] or [B, T, R, G, K], with the bias."""
    rows = rows if sizes.mimo else rows.unsqueeze(2)
    rows = rows.unsqueeze(4).expand(-1, -1, -1, -1, sizes.H // rows.shape[3], -1).flatten(3, 4)
    if bias is None:
        return rows
    return rows + (bias.transpose(0, 1) if sizes.mimo else bias).to(rows.dtype)


# A token's product b_t x_t^T has two weights: gamma from the token itself and eta from the next one. The diagonal
# engine writes each product once, with their sum. So its state is h_t plus the part that belongs to the next token, and
# its output would be wrong only in what a token reads of its own product. A row reads its own product apart, with the
# weight gamma: rotations cancel there, so that angles get no gradient, of which the engine would leave the roundings.
# What row i reads of the products j < i of its token is corrected, and of those behind it is added (`own_products`).
_Outputs = tuple[Tensor, Optional, tuple[Tensor, ...]]
"""y, the final ssm, and (angle, k, v) of the final state. If no final state is wanted: y, None and ()."""


def _in_pytorch(sizes: _Sizes, given: _Inputs, options: _Options) -> _Outputs:
    x, mimo_x, initial = given.x, given.mimo_x, options.initial
    at = options.cu_seqlens, options.sp
    tokens = _tokens(sizes, given)
    eta, eta_first = following(tokens.eta, *at)
    turns = running_sum(tokens.turns, *at, None if initial is None else initial.angle / _TURN, wrapped=True)
    angle = _TURN * turns.detach().unsqueeze(2)  # the engine gives the gradient of turns
    written = rotate(tokens.B, angle, options.pairwise) * (tokens.gamma + eta)[:, :, None, :, None]
    q, k, v = (rows.to(x.dtype) for rows in (rotate(tokens.C, angle, options.pairwise), written, tokens.x))
    start = None if initial is None else initial.angle / _TURN
    ends: tuple[Tensor, ...] = ()
    if options.want_final:
        found, B, last = ended(*at, turns, tokens.B, tokens.v)
        ends = _ends(sizes, found, B, last, options, turns)
    end = ends[0] / _TURN if ends else None
    y, ssm = on_engine(
        q, k, v, tokens.gate, scale=1.0, initial=_start(initial, eta_first, mimo_x), want_final=options.want_final,
        cu_seqlens=options.cu_seqlens, sp=options.sp, op="mamba3", turns=Turns(tokens.turns, start, end),
        strict=True, pairwise=options.pairwise,
    )  # fmt: skip
    y = y + own_products(tokens.C, tokens.B, tokens.x, tokens.gamma, eta, strict=True)
    if given.D is not None:
        y = y + tokens.x * given.D.to(y.dtype).unsqueeze(-1)
    y = without_tail((y if sizes.mimo else y.squeeze(2)).to(x.dtype), *at)
    return y, ssm, ends


def _start(initial: Mamba3State | None, eta_first: Tensor, mimo_x: Optional) -> Optional:
    """The engine's initial state: ssm plus the last product before the text, with the weight ``eta_first`` that the
    first token gives it."""
    if initial is None:
        return None
    return initial.ssm + eta_first[..., None, None] * products(initial.k, value_rows(initial.v, mimo_x))


def _ends(
    sizes: _Sizes, turns: Tensor, keys: Tensor, v: Tensor, options: _Options, sums: Optional
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The final angle, k and v, which ranks exchange in one message.

    Args:
        turns, keys, v: of last tokens; keys [B, *, R, H, K] have their bias and are not yet rotated.
        sums: what came from the ranks before. Its backward pass is an exchange that all ranks make, those without
            tokens too, whose last angles are those of the initial state.
    """
    S, (R, _, K), P, initial = turns.shape[-1], keys.shape[2:], v.shape[-1], options.initial
    angle = _TURN * turns
    keys = rotate(keys, angle.unsqueeze(2), options.pairwise)
    together = torch.cat([angle, keys.transpose(2, 3).flatten(3), v], -1)
    before = None
    if initial is not None:
        before = torch.cat([initial.angle, initial.k.transpose(1, 2).flatten(2), initial.v], -1)
    found = last_of_ended(together, sizes.T, before, options.cu_seqlens, options.sp)
    if options.sp is not None and sums is not None:
        found = add_backward_dependency(found, sums)
    angle, k, v = found.split([S, R * K, P], -1)
    return angle, k.unflatten(-1, (R, K)).transpose(1, 2), v


# On GPUs


def _has_kernels(sizes: _Sizes, given: _Inputs) -> bool:
    """Whether kernels compute what comes before the engine, which then adds what tokens read of themselves: to values
    of more than one channel. They take one row a token, and no graphs or transforms of torch.func."""
    in_kernels = not sizes.mimo and sizes.P > 1 and asks_for_kernels(given.x.is_cuda, given.x.dtype)
    return in_kernels and plain(*given) and not transformed()


@step
def _by_kernels(sizes: _Sizes, given: _Inputs, options: _Options) -> _Outputs:
    """As `_in_pytorch`."""
    from flexsp.kernels.mamba3 import autograd_functions as kernels

    x, initial, cu_seqlens = given.x, options.initial, options.cu_seqlens
    at = cu_seqlens, options.sp
    gate, gamma, eta = kernels.steps(given.dt, given.A, given.trap)
    eta, eta_first = following(eta, *at)
    start = None if initial is None else initial.angle / _TURN
    resets = None if cu_seqlens is None else begins(sizes.T, cu_seqlens, options.sp)
    turns, mine = kernels.turns(given.angles, given.dt, _with_tail(start, resets), resets)
    arrived, more, until = arriving(mine, sizes.T, *at, start), None, None
    if arrived is not None:
        more = arrived.sum.squeeze(1).detach()
        until = None if arrived.tokens is None else arrived.tokens.sum()
    rows = kernels.rows(
        given.B, given.C, given.B_bias, given.C_bias, turns.detach(), more, until, gamma, eta, given.D, options.pairwise
    )
    ends: tuple[Tensor, ...] = ()
    if options.want_final:
        found, B, v = ended(*at, turns, given.B, x)
        found = found if arrived is None else arrived.onto(found, arrived.documents, True)
        sums = None if arrived is None else arrived.sum
        ends = _ends(sizes, found, _heads(B.float(), given.B_bias, sizes), v.float(), options, sums)
    y, ssm = diagonal(
        rows.q, rows.k, x, gate, w=rows.w, turned=kernels.turning(given.angles, given.dt, turns), scale=1.0,
        initial_state=entering(_start(initial, eta_first, None), start, options.pairwise),
        output_final_state=options.want_final, cu_seqlens=cu_seqlens, sp=options.sp, op="mamba3", strict=True,
    )  # fmt: skip
    return y, leaving(ssm, ends[0] / _TURN if ends else None, options.pairwise), ends


def _with_tail(start: Optional, resets: Optional) -> Optional:
    """The angles that documents begin with, and zeros for the tokens behind the last document."""
    return start if start is None or resets is None else F.pad(start, (0, 0, 0, 0, 0, 1))


def _wrapped(angle: Tensor) -> Tensor:
    return angle - _TURN * (angle.detach() / _TURN).round()


def _state_shapes(N: int, sizes: _Sizes) -> tuple[tuple[int, ...], ...]:
    _, _, H, P, K, R, S, _ = sizes
    return (N, H, S), (N, H, K, P), (N, R, H, K), (N, H, P)


def _check_state(
    state: Mamba3State | None, N: int, sizes: _Sizes, x: Tensor, cu_seqlens: Optional, sp: SequenceParallel | None
) -> Mamba3State | None:  # fmt: skip
    if state is None:
        return None
    if not isinstance(state, tuple) or len(state) != 4:
        check.fail("initial_state", "a Mamba3State (angle, ssm, k, v)", type(state).__name__)
    dims = "[N, H, S]", "[N, H, K, P]", "[N, R, H, K]", "[N, H, P]"
    for name, part, shape, dim in zip(Mamba3State._fields, state, _state_shapes(N, sizes), dims, strict=True):
        if part is None:
            check.fail(f"initial_state.{name}", f"a tensor {dim}", None)
        check.check_state(f"initial_state.{name}", part, shape, dim, x, cu_seqlens, sp)
    return Mamba3State(*state)


def _checked(given: _Inputs, rotate_pairwise: bool) -> _Sizes:
    check.check_flag("rotate_pairwise", rotate_pairwise)
    sizes = _check_shapes(*given)
    if not rotate_pairwise and sizes.K % 2:
        check.fail("rotate_pairwise", "True where the last dimension of B is odd", f"False with {sizes.K}")
    check.check_non_negative("dt", given.dt, "step sizes >= 0")
    check.check_non_positive("A", given.A, "values <= 0")
    return sizes


@check.once
def _check_shapes(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, trap: Tensor, angles: Tensor, D: Optional, B_bias: Optional,
    C_bias: Optional, mimo_x: Optional,
) -> _Sizes:  # fmt: skip
    batch, T, H, P = check.check_first("x", x, "[B, T, H, P]")
    params = (x.dtype, torch.float32)
    R, rows = 1, ""
    if mimo_x is not None:
        check.check_tensor("mimo_x", mimo_x, None, "[H, R, P]", dtypes=params, device=x.device)
        R, rows = mimo_x.shape[1], "R, "
        if tuple(mimo_x.shape) != (H, max(R, 1), P):
            check.fail("mimo_x", f"shape [H, R, P] = [{H}, R, {P}] with R >= 1", list(mimo_x.shape))
    check.check_tensor("B", B, None, f"[B, T, {rows}G, K]", dtypes=(x.dtype,), device=x.device)
    G, K = B.shape[-2:]
    outer = (batch, T) if mimo_x is None else (batch, T, R)
    if tuple(B.shape[:-2]) != outer:
        check.fail("B", f"shape [B, T, {rows}G, K] = [{', '.join(map(str, outer))}, G, K]", list(B.shape))
    check.check_groups("B", G, H, "heads")
    check.check_head_sizes({"x": P}, B=K)
    check.check_tensor("C", C, tuple(B.shape), f"[B, T, {rows}G, K]", dtypes=(x.dtype,), device=x.device)
    for name, each in (("dt", dt), ("A", A), ("trap", trap)):
        check.check_tensor(name, each, (batch, T, H), "[B, T, H]", dtypes=params, device=x.device)
    check.check_tensor("angles", angles, None, "[B, T, H or 1, S]", dtypes=params, device=x.device)
    S = angles.shape[-1]
    if tuple(angles.shape[:3]) not in ((batch, T, H), (batch, T, 1)) or not 1 <= S <= K // 2:
        wanted = f"shape [B, T, H or 1, S] = [{batch}, {T}, {H} or 1, S] with S of 1..{K // 2}"
        check.fail("angles", wanted, list(angles.shape))
    if D is not None:
        check.check_tensor("D", D, (H,), "[H]", dtypes=params, device=x.device)
    shape, dims = ((H, K), "[H, K]") if mimo_x is None else ((H, R, K), "[H, R, K]")
    for name, bias in (("B_bias", B_bias), ("C_bias", C_bias)):
        if bias is not None:
            check.check_tensor(name, bias, shape, dims, dtypes=params, device=x.device)
    return _Sizes(batch, T, H, P, K, R, S, mimo_x is not None)
