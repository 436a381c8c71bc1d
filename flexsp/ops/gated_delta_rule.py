"""The gated delta rule (Gated DeltaNet): the delta rule with one scalar gate a head and token."""

from __future__ import annotations

import torch

from flexsp.comm.group import SequenceParallel, ranks_call
from flexsp.ops import _delta
from flexsp.ops._peers import one_dtype
from flexsp.ops._recipe import by_recipe
from flexsp.ops._segments import in_segments

__all__ = ["chunk_gated_delta_rule", "recurrent_gated_delta_rule"]


@ranks_call
@by_recipe
@in_segments("q k v g beta", "A_log dt_bias", kernels=True, apart="use_gate_in_kernel use_beta_sigmoid_in_kernel")
@one_dtype("q k v")
def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    state_v_first: bool = False,
    sp: SequenceParallel | bool | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """S_t = e^{g_t} (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T, o_t = scale q_t S_t, in chunks.

    Yang et al. 2024, Gated Delta Networks (arXiv 2412.06464), eq. 10.

    Args:
        q: [B, T, H, K], float16, bfloat16, float32 or float64, any strides; K of 1..256.
        k: [B, T, H, K] in the same dtype, of unit length unless ``use_qk_l2norm_in_kernel``.
        v: [B, T, HV, V] in the same dtype, V as K; HV is a multiple of H, and value head h uses the key head
            h // (HV / H). On Hopper GPUs q and k are read as they are; elsewhere, and in graphs of
            torch.compile, they are repeated in memory.
        g: natural-log gates [B, T, HV] <= 0; q's dtype or float32. Values below -104 (-800 for float64 inputs) act
            as that, a decay of 0, and have no gradient. With ``use_gate_in_kernel`` any numbers.
        beta: step sizes [B, T, HV], from 0 to 1 (to 2 for negative eigenvalues); q's dtype or float32.
        scale: factor on q; None means K**-0.5.
        initial_state: [N, HV, K, V] in float32 (float64 for float64 inputs); N = B, or the number of documents.
        output_final_state: also return the state after the last token.
        cu_seqlens: packed documents, as in `chunk_simple_gla`.
        use_qk_l2norm_in_kernel: divide q and k by sqrt(sum of squares + 1e-6) first.
        use_beta_sigmoid_in_kernel: the step sizes are sigmoid(beta).
        allow_neg_eigval: they are 2 sigmoid(beta); needs ``use_beta_sigmoid_in_kernel``.
        use_gate_in_kernel: the gates are -e^{A_log} softplus(g + dt_bias).
        A_log: [HV] or [1, 1, HV, 1], q's dtype or float32; needed by ``use_gate_in_kernel``.
        dt_bias: [HV], q's dtype or float32, or None.
        state_v_first: states are [N, HV, V, K].
        sp: the ranks, as in `chunk_simple_gla`.
        cu_seqlens_cpu: CPU copy of ``cu_seqlens``, as in `chunk_simple_gla`.

    Returns:
        o [B, T, HV, V] in the inputs' dtype and the final state, or None, by the same rules as `chunk_simple_gla`.
        Under ``sp`` the gradients of A_log and dt_bias are this rank's share; their sum over ranks is the gradient.

    Raises:
        ValueError: a wrong shape, dtype, device or value, naming the argument. On a GPU also B * HV of more than 65535.
        NotAvailable: on a GPU other than Hopper, whose blocks have too little shared memory for heads so large.

    Example:
        >>> q, k, v = torch.randn(3, 2, 100, 4, 64).unbind(0)
        >>> g, beta = torch.nn.functional.logsigmoid(torch.randn(2, 100, 4)), torch.rand(2, 100, 4)
        >>> o, state = chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
    """
    heads, tokens = _delta.prepared(
        q, k, v, beta, g, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval, use_gate_in_kernel=use_gate_in_kernel, A_log=A_log, dt_bias=dt_bias,
    )  # fmt: skip
    call = _delta.Call(initial_state, output_final_state, state_v_first, cu_seqlens, cu_seqlens_cpu, sp)
    return _delta.run("gated_deltanet", heads, tokens, scale, call)


@one_dtype("q k v")
def recurrent_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The recurrence of `chunk_gated_delta_rule` token by token: decoding, T = 1 a step.

    Takes and returns the same tensors. Prompts, ranks and documents are as in `recurrent_simple_gla`.

    Raises:
        ValueError: a wrong shape, dtype, device or value, naming the argument.

    Example:
        >>> q, k, v = torch.randn(3, 2, 1, 4, 64).unbind(0)
        >>> g, beta = -torch.rand(2, 1, 4), torch.rand(2, 1, 4)
        >>> o, state = recurrent_gated_delta_rule(q, k, v, g, beta, output_final_state=True)
    """
    heads, tokens = _delta.prepared(
        q, k, v, beta, g, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval, use_gate_in_kernel=use_gate_in_kernel, A_log=A_log, dt_bias=dt_bias,
    )  # fmt: skip
    call = _delta.Call(initial_state, output_final_state, state_v_first, cu_seqlens)
    return _delta.recurrent("gated_deltanet", heads, tokens, scale, call)
