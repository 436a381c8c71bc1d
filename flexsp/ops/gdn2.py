"""Gated DeltaNet-2: a gate a key channel, and strengths of erasing and of writing by channel, each of its own."""

from __future__ import annotations

import torch

from flexsp.comm.derivatives import transformed
from flexsp.comm.group import SequenceParallel, ranks_call
from flexsp.exceptions import asks_for_kernels
from flexsp.ops import _delta
from flexsp.ops import _programs as programs
from flexsp.ops import _validate as check
from flexsp.ops._peers import one_dtype, recurrence_of
from flexsp.ops._recipe import by_recipe
from flexsp.ops._segments import in_segments

__all__ = ["chunk_gdn2", "recurrent_gdn2"]

Tensor = torch.Tensor


@ranks_call
@by_recipe
@in_segments("q k v g b w", "A_log dt_bias", kernels=True, apart="use_gate_in_kernel")
@one_dtype("q k v")
def chunk_gdn2(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    b: torch.Tensor,
    w: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    sp: SequenceParallel | bool | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """S_t = (I - k_t (b_t * k_t)^T) diag(e^{g_t}) S_{t-1} + k_t (w_t * v_t)^T, o_t = scale q_t S_t, in chunks.

    Gated DeltaNet-2 (arXiv 2605.22791): the state decays first, then the key, weighted by b, reads what is erased, and
    the key as it is erases it and writes the value, weighted by w. With b and w one number a token this is `chunk_kda`.

    Args:
        q: [B, T, H, K], float16, bfloat16, float32 or float64, any strides; K of 1..256.
        k: [B, T, H, K] in the same dtype, of unit length unless ``use_qk_l2norm_in_kernel``.
        v: [B, T, HV, V] in the same dtype, V of 1..512; HV is a multiple of H, and value head h uses the key head
            h // (HV / H). On Hopper GPUs kernels read q and k as they are, in bfloat16 with K and V of 64 or 128;
            elsewhere, and in graphs of torch.compile, they are repeated in memory.
        g: natural-log gates [B, T, HV, K] <= 0; q's dtype or float32. Values below -104 (-800 for float64 inputs)
            act as that, a decay of 0, and have no gradient. With ``use_gate_in_kernel`` any numbers.
        b: strengths of erasing [B, T, HV, K], from 0 to 1 (to 2 for negative eigenvalues); q's dtype or float32.
        w: strengths of writing [B, T, HV, V], from 0 to 1; q's dtype or float32.
        scale: factor on q; None means K**-0.5.
        initial_state: [N, HV, K, V] in float32 (float64 for float64 inputs); N = B, or the number of documents.
        output_final_state: also return the state after the last token.
        cu_seqlens: packed documents, as in `chunk_simple_gla`.
        use_qk_l2norm_in_kernel: divide q and k by sqrt(sum of squares + 1e-6) first.
        use_gate_in_kernel: the gates are -e^{A_log} softplus(g + dt_bias), or, with ``lower_bound``,
            lower_bound sigmoid(e^{A_log} (g + dt_bias)).
        A_log: [HV] or [1, 1, HV, 1], q's dtype or float32; needed by ``use_gate_in_kernel`` without ``lower_bound``.
        dt_bias: [HV * K] or [HV, K], q's dtype or float32, or None.
        safe_gate: the gates lie in [-5, 0), as in `chunk_kda`; results do not depend on it.
        lower_bound: see ``use_gate_in_kernel``, without which it changes nothing; below 0.
        state_v_first: states are [N, HV, V, K].
        sp: the ranks, as in `chunk_simple_gla`.
        cu_seqlens_cpu: CPU copy of ``cu_seqlens``, as in `chunk_simple_gla`.

    Returns:
        o [B, T, HV, V] in the inputs' dtype and the final state, or None, by the same rules as `chunk_simple_gla`.
        Under ``sp`` the gradients of A_log and dt_bias are this rank's share; their sum over ranks is the gradient.

    Raises:
        ValueError: a wrong shape, dtype, device or value, naming the argument. On a GPU also B * HV of more than 65535.
        NotAvailable: on a GPU whose blocks have too little shared memory for heads so large.

    Example:
        >>> q, k, v = torch.randn(3, 2, 100, 4, 64).unbind(0)
        >>> g, b, w = torch.nn.functional.logsigmoid(torch.randn(2, 100, 4, 64)), *torch.rand(2, 2, 100, 4, 64)
        >>> o, state = chunk_gdn2(q, k, v, g, b, w, use_qk_l2norm_in_kernel=True)
    """
    _delta.check_safe_gates(g, use_gate_in_kernel, safe_gate, lower_bound)
    heads, inputs = _prepared(
        q, k, v, g, b, w, use_qk_l2norm_in_kernel, use_gate_in_kernel, A_log, dt_bias, lower_bound
    )
    norm, repeats = False, 1
    if _on_engine(heads, q):  # its kernels read grouped heads, and divide by norms
        norm, repeats = heads.norm, heads.HV // programs.known(heads.H)[0]
    else:
        inputs |= dict(zip("qk", _delta.keys(q, k, heads), strict=True))
    call = programs.Call(initial_state, output_final_state, state_v_first, cu_seqlens, cu_seqlens_cpu, sp)
    sizes = heads.B, heads.T, heads.HV, heads.K, heads.V
    return programs.run_matrix("gdn2", sizes, inputs, scale, call, heads_per_key=repeats, norm=norm)


def _on_engine(heads: _delta.Heads, q: Tensor) -> bool:
    """Whether the delta engine runs this call, outside of graphs and transforms of torch.func."""
    if torch.compiler.is_compiling() or transformed() or not asks_for_kernels(q.is_cuda, q.dtype):
        return False
    from flexsp.kernels.delta.calls import runs_strengths  # it needs Triton

    return runs_strengths(q.dtype, heads.K, heads.V, q.device)


@recurrence_of(chunk_gdn2)
@one_dtype("q k v")
def recurrent_gdn2(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    b: torch.Tensor,
    w: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The recurrence of `chunk_gdn2` token by token: decoding, T = 1 a step.

    Takes and returns the same tensors. Prompts, ranks and documents are as in `recurrent_simple_gla`.

    Raises:
        ValueError: a wrong shape, dtype, device or value, naming the argument.

    Example:
        >>> q, k, v = torch.randn(3, 2, 1, 4, 64).unbind(0)
        >>> g, b, w = -torch.rand(2, 1, 4, 64), *torch.rand(2, 2, 1, 4, 64)
        >>> o, state = recurrent_gdn2(q, k, v, g, b, w, output_final_state=True)
    """
    _delta.check_safe_gates(g, use_gate_in_kernel, False, lower_bound)
    heads, x = _prepared(q, k, v, g, b, w, use_qk_l2norm_in_kernel, use_gate_in_kernel, A_log, dt_bias, lower_bound)
    x |= dict(zip("qk", _delta.keys(q, k, heads), strict=True))
    call = programs.Call(initial_state, output_final_state, state_v_first)
    initial = programs.initial_state((heads.HV, heads.K, heads.V), "HV, K, V", call, None, q)
    decay = programs.clamped(x["g"], q).exp()
    reads, keys, values, erase, write = (programs.wide(x[name], q) for name in ("q", "k", "v", "erase", "write"))
    reads, erased, written = reads * check.check_scale(scale, heads.K), keys * erase, values * write

    def step(state: Tensor, t: int) -> tuple[Tensor, Tensor]:
        state = state * programs.rows_at(decay, t)
        error = written[:, t] - (erased[:, t].unsqueeze(-1) * state).sum(-2)
        state = state + keys[:, t].unsqueeze(-1) * error.unsqueeze(-2)
        return (reads[:, t].unsqueeze(-1) * state).sum(-2), state

    start = reads.new_zeros(heads.B, heads.HV, heads.K, heads.V) if initial is None else initial
    out, last = programs.token_loop(step, start, heads.T, written)
    return out.to(v.dtype), programs.final_state(last, call)


def _prepared(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor, norm: bool, use_gate_in_kernel: bool,
    A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None,
) -> tuple[_delta.Heads, dict[str, Tensor]]:  # fmt: skip
    """The sizes, and what the program reads: log gates, and the rest as it is given."""
    heads = _checked(q, k, v, g, b, w)
    check.check_flag("use_qk_l2norm_in_kernel", norm)
    _delta.check_raw_gates(use_gate_in_kernel, A_log, dt_bias)
    gates = _delta.log_gates(g, q, use_gate_in_kernel, A_log, dt_bias, lower_bound)
    return heads._replace(norm=norm), {"q": q, "k": k, "v": v, "erase": b, "write": w, "g": gates}


@check.once
def _checked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor) -> _delta.Heads:
    heads = _delta.check_heads(q, k, v, None, g, 1, True)
    B, T, _, HV, K, V, _ = heads
    for name, x, size, dims in (("b", b, K, "[B, T, HV, K]"), ("w", w, V, "[B, T, HV, V]")):
        check.check_tensor(name, x, (B, T, HV, size), dims, dtypes=(q.dtype, torch.float32), device=q.device)
    return heads
