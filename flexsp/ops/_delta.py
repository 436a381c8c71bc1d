"""How the ops of the delta rules run: checks, preparation of keys, gates and beta, the program, and the token loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from flexsp.comm.derivatives import transformed
from flexsp.comm.group import SequenceParallel
from flexsp.exceptions import asks_for_kernels, check_number
from flexsp.kernels import keys_in_pytorch, raw_gates_in_pytorch
from flexsp.kernels.columns import ColumnBlocks
from flexsp.kernels.delta.tiling import engine_runs
from flexsp.kernels.operators import plain
from flexsp.ops import _validate as check
from flexsp.ops._programs import (
    Call,
    Sizes,
    clamped,
    factor_of,
    final_state,
    initial_state,
    known,
    rows_at,
    run_program,
    token_loop,
    wide,
)  # fmt: skip

__all__ = ["Call", "Heads", "prepared", "recurrent", "run"]

Tensor = torch.Tensor
Optional = torch.Tensor | None


class Heads(NamedTuple):
    """Sizes of q, k [B, T, H, K] and v [B, T, HV, V]; HV is a multiple of H. norm: q and k are to be divided by their
    norms."""

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    norm: bool = False


@check.once
def check_heads(q: Tensor, k: Tensor, v: Tensor, beta: Optional, g: Optional, steps: int, by_channel: bool) -> Heads:
    """Shapes, dtypes and device of q [B, T, H, K], k [B, T n, H, K], v [B, T n, HV, V] and, unless they are None, beta
    [B, T n, HV] and g [B, T, HV] or [B, T, HV, K]."""
    B, T, H, K = check.check_first("q", q, "[B, T, H, K]")
    tokens = "T" if steps == 1 else "T n"
    shape = (B, T * steps, H, K)
    check.check_tensor("k", k, shape, f"[B, {tokens}, H, K]", dtypes=(q.dtype,), device=q.device)
    check.check_tensor("v", v, None, f"[B, {tokens}, HV, V]", dtypes=(q.dtype,), device=q.device)
    HV, V = v.shape[2:]
    if tuple(v.shape[:2]) != (B, T * steps) or HV < 1 or HV % H:
        expected = f"shape [B, {tokens}, HV, V] = [{B}, {T * steps}, HV, V], HV a multiple of the {H} heads of q"
        check.fail("v", expected, list(v.shape))
    check.check_head_sizes({"v": V}, q=K)
    dtypes = (q.dtype, torch.float32)
    if beta is not None:
        check.check_tensor("beta", beta, (B, T * steps, HV), f"[B, {tokens}, HV]", dtypes=dtypes, device=q.device)
    if g is not None:
        wide, dims = ((K,), "[B, T, HV, K]") if by_channel else ((), "[B, T, HV]")
        check.check_tensor("g", g, (B, T, HV, *wide), dims, dtypes=dtypes, device=q.device)
    return Heads(B, T, H, HV, K, V)


def check_bound(lower_bound: float | None, safe_gate: bool) -> None:
    """The least gate of a channel; ``safe_gate`` needs one of at least -5."""
    if lower_bound is not None and check_number("lower_bound", lower_bound) >= 0:
        check.fail("lower_bound", "a number below 0, or None", repr(lower_bound))
    if safe_gate and (lower_bound is None or lower_bound < -5):
        check.fail("lower_bound", "a number in [-5, 0) with safe_gate", repr(lower_bound))


def check_safe_gates(g: Tensor, use_gate_in_kernel: bool, safe_gate: bool, lower_bound: float | None) -> None:
    """The arguments that bound gates of channels, and gates that ``safe_gate`` promises."""
    check.check_flag("use_gate_in_kernel", use_gate_in_kernel)
    check.check_flag("safe_gate", safe_gate)
    check_bound(lower_bound, safe_gate and use_gate_in_kernel)
    if use_gate_in_kernel or not safe_gate:
        return
    if isinstance(g, Tensor) and check.readable(g) and g.numel() and g.min() < -5:
        check.fail("g", "gates in [-5, 0) with safe_gate", f"a smallest value of {g.detach().min().item():g}")


@check.once
def check_gate_arguments(g: Tensor, like: Tensor, A_log: Optional, dt_bias: Optional, bounded: bool) -> None:
    """Shapes and dtypes of the arguments that turn raw gates g [B, T, HV] or [B, T, HV, K] into log gates."""
    dtypes, heads = (like.dtype, torch.float32), g.shape[2:]
    if dt_bias is not None:
        shape, dims = tuple(heads), "[HV]" if len(heads) == 1 else "[HV, K]"
        if len(heads) == 2 and isinstance(dt_bias, Tensor) and dt_bias.dim() == 1:
            shape, dims = (heads.numel(),), "[HV * K]"
        check.check_tensor("dt_bias", dt_bias, shape, dims, dtypes=dtypes, device=g.device)
    if A_log is not None:
        shape, dims = ((heads[0],), "[HV]")
        if isinstance(A_log, Tensor) and A_log.dim() == 4:
            shape, dims = (1, 1, heads[0], 1), "[1, 1, HV, 1]"
        check.check_tensor("A_log", A_log, shape, dims, dtypes=dtypes, device=g.device)
    elif not bounded:
        check.fail("A_log", "a tensor [HV] with use_gate_in_kernel", None)


def keys(q: Tensor, k: Tensor, heads: Heads) -> Sequence[Tensor]:
    """q and k of the value heads, [B, T, HV, K], divided by sqrt(sum x^2 + 1e-6) if that is asked for."""
    repeats = heads.HV // heads.H
    if not heads.norm and repeats == 1:
        return q, k
    if q.is_cuda and q.dtype != torch.float64 and plain(q, k) and not transformed():
        from flexsp.kernels.keys import unit_keys

        return unit_keys((q, k), repeats, heads.norm)
    return [keys_in_pytorch.unit_keys(x, repeats, heads.norm) for x in (q, k)]


def beta_of(beta: Tensor, use_beta_sigmoid_in_kernel: bool, allow_neg_eigval: bool) -> Tensor:
    """beta, or sigmoid(beta), or twice that."""
    if not use_beta_sigmoid_in_kernel:
        return beta
    return _activated(beta, beta, None, None, 2.0 if allow_neg_eigval else 1.0)


def activated(
    g: Tensor, like: Tensor, A_log: Optional, dt_bias: Optional, lower_bound: float | None = None
) -> Tensor:  # fmt: skip
    """The natural-log gates [B, T, HV] or [B, T, HV, K] of raw g."""
    check_gate_arguments(g, like, A_log, dt_bias, lower_bound is not None)
    return _activated(g, like, A_log, dt_bias, lower_bound)


def _activated(x: Tensor, like: Tensor, A_log: Optional, bias: Optional, factor: float | None) -> Tensor:
    """In the accumulation dtype of ``like``, whatever x has."""
    if x.is_cuda and like.dtype != torch.float64 and plain(x, A_log, bias) and not transformed():
        from flexsp.kernels import raw_gates

        return raw_gates.activated(x, A_log, bias, factor)
    return raw_gates_in_pytorch.activated(x, A_log, bias, factor, check.accumulation_dtype(like))


def prepared(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Optional, norm: bool, *, by_channel: bool = False, steps: int = 1,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, use_gate_in_kernel: bool = False,
    A_log: Optional = None, dt_bias: Optional = None, lower_bound: float | None = None,
) -> tuple[Heads, dict[str, Tensor]]:  # fmt: skip
    """Checks the arguments and makes what the recurrence reads: beta and, unless g is None, g. Others are as given."""
    heads = check_heads(q, k, v, beta, g, steps, by_channel)
    check.check_flag("use_qk_l2norm_in_kernel", norm)
    check.check_flag("use_beta_sigmoid_in_kernel", use_beta_sigmoid_in_kernel)
    check.check_flag("allow_neg_eigval", allow_neg_eigval)
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        check.fail("allow_neg_eigval", "False unless use_beta_sigmoid_in_kernel", True)
    check_raw_gates(use_gate_in_kernel, A_log, dt_bias)
    tokens = {"q": q, "k": k, "v": v, "beta": beta_of(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)}
    if g is not None:
        tokens["g"] = log_gates(g, q, use_gate_in_kernel, A_log, dt_bias, lower_bound)
    return heads._replace(norm=norm), tokens


def check_raw_gates(use_gate_in_kernel: bool, A_log: Optional, dt_bias: Optional) -> None:
    """That there are no arguments for raw gates where gates are none."""
    check.check_flag("use_gate_in_kernel", use_gate_in_kernel)
    if not use_gate_in_kernel:
        for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
            if x is not None:
                check.fail(name, "None without use_gate_in_kernel", "a tensor")


def log_gates(
    g: Tensor, like: Tensor, use_gate_in_kernel: bool, A_log: Optional, dt_bias: Optional, lower_bound: float | None
) -> Tensor:  # fmt: skip
    """The natural-log gates of an op's arguments, whose shapes have been checked."""
    if use_gate_in_kernel:
        return activated(g, like, A_log, dt_bias, lower_bound)
    check.check_non_positive("g", g, "natural-log gates <= 0")
    return g


def _on_engine(heads: Heads, q: Tensor) -> bool:
    """Whether the delta engine runs this call, outside of graphs and transforms of torch.func."""
    if torch.compiler.is_compiling() or transformed():
        return False
    return asks_for_kernels(q.is_cuda, q.dtype) and engine_runs(heads.K, ColumnBlocks.of(heads.V).width, q.device)


def _state(heads: Heads, call: Call, group: SequenceParallel | None, x: Tensor) -> Optional:
    """The initial states [N, HV, K, V]."""
    return initial_state((heads.HV, heads.K, heads.V), "HV, K, V", call, group, x)


def _sizes(heads: Heads) -> Heads:
    """With plain integers for what programs are made for."""
    H, HV, K, V = known(*heads[2:6])
    return Heads(heads.B, heads.T, H, HV, K, V, heads.norm)


def run(
    name: str, heads: Heads, tokens: dict[str, Tensor], scale: float | None, call: Call, steps: int = 1, reads: int = 1
) -> tuple[Tensor, Optional]:  # fmt: skip
    """Runs the program flexsp.variants.NAME on what `prepared` returned.

    Args:
        steps: keys of a token. `heads.T` and ``cu_seqlens`` count tokens, not keys.
        reads: queries of a token, [B, T, reads, H, K], which read after its last ``reads`` keys; outputs are
            [B, T, reads, HV, V]. With 1 there is no such axis.
    """
    q, heads = tokens["q"], _sizes(heads)
    on_engine = _on_engine(heads, q)  # its kernels read grouped heads, divide by norms, and clamp gates
    if not on_engine:
        tokens = tokens | dict(zip("qk", keys(q, tokens["k"], heads), strict=True))
    group = check.resolve(call.sp, q)
    check.check_cu_seqlens(call.cu_seqlens, call.cu_seqlens_cpu, q, "q", group)
    initial, N = _state(heads, call, group, q), check.number_of_states(heads.B, call.cu_seqlens)
    factor = factor_of(scale, heads.K)
    check.same_call(group, name, q, *heads[2:], N, steps, call.cu_seqlens is None)
    if "g" in tokens and not on_engine:
        tokens = tokens | {"g": clamped(tokens["g"], q)}
    # Kernels for gates of channels have a token's key, query and gate in one row.
    apart = steps > 1 and (not on_engine or name == "vector_gated_delta" or reads > 1)
    if apart:
        tokens = tokens | _by_key(tokens, steps)
    if name == "deltanet":
        tokens = {"b" if key == "beta" else key: x for key, x in tokens.items()}
    bounds = None if call.cu_seqlens is None else call.cu_seqlens if steps == 1 else call.cu_seqlens * steps
    blocks = ColumnBlocks.of(heads.V) if asks_for_kernels(q.is_cuda, q.dtype) else ColumnBlocks(heads.V, 1, heads.V)
    shared = heads.HV * blocks.n // known(tokens["q"].shape[2])[0]
    sizes = Sizes(
        heads.HV * blocks.n, heads.K, blocks.width, factor, steps, shared, 1 if apart else steps,
        heads.norm and on_engine,
    )  # fmt: skip
    tokens = {x: blocks.values(t) if x == "v" else t if x in "qk" else blocks.repeated(t) for x, t in tokens.items()}
    o, final = run_program(name, sizes, tokens, blocks.states(initial), bounds, group)
    o, final = blocks.outputs(o), blocks.joined(final)
    if reads > 1:
        return o.unflatten(1, (heads.T, steps))[:, :, steps - reads :], final_state(final, call)
    return o[:, steps - 1 :: steps] if apart else o, final_state(final, call)


def _by_key(tokens: dict[str, Tensor], steps: int) -> dict[str, Tensor]:
    """Queries and gates with one row a key. Zeros fill the other rows: a token's queries stand at its last keys, its
    gate at its first."""
    q = tokens["q"] if tokens["q"].dim() == 5 else tokens["q"].unsqueeze(2)
    found = {"q": F.pad(q, (0, 0, 0, 0, steps - q.shape[2], 0)).flatten(1, 2)}
    if "g" in tokens:
        g = tokens["g"]
        found["g"] = F.pad(g.unsqueeze(2), (*(0, 0) * (g.dim() - 2), 0, steps - 1)).flatten(1, 2)
    return found


def recurrent(
    name: str, heads: Heads, tokens: dict[str, Tensor], scale: float | None, call: Call, steps: int = 1
) -> tuple[Tensor, Optional]:  # fmt: skip
    """`run` token by token, on this rank alone; with ``cu_seqlens`` in chunks, on this rank alone too."""
    if call.cu_seqlens is not None:
        return run(name, heads, tokens, scale, call, steps)
    q, k = keys(tokens["q"], tokens["k"], heads)
    v, beta, g = tokens["v"], tokens["beta"], tokens.get("g")
    initial = _state(heads, call, None, q)
    decay = None if g is None else clamped(g, q).exp()
    q_t, k_t, v_t, b_t = (wide(x, q) for x in (q, k, v, beta))
    q_t = q_t * check.check_scale(scale, heads.K)

    def step(state: Tensor, t: int) -> tuple[Tensor, Tensor]:
        if decay is not None:
            state = state * rows_at(decay, t)
        for s in range(t * steps, (t + 1) * steps):
            key = k_t[:, s, :, :, None]
            error = v_t[:, s] - (key * state).sum(-2)
            state = state + key * (b_t[:, s, :, None] * error).unsqueeze(-2)
        return (q_t[:, t, :, :, None] * state).sum(-2), state

    start = q_t.new_zeros(heads.B, heads.HV, heads.K, heads.V) if initial is None else initial
    out, last = token_loop(step, start, heads.T, v_t[:, :0])
    return out.to(v.dtype), final_state(last, call)
