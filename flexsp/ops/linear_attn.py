"""Linear attention, plain or normalised."""

from __future__ import annotations

import torch

from flexsp.comm.derivatives import share_backward
from flexsp.comm.group import SequenceParallel, ranks_call
from flexsp.kernels.diagonal.op import diagonal, diagonal_pair
from flexsp.ops import _validate as check
from flexsp.ops._peers import one_dtype
from flexsp.ops._recipe import by_recipe
from flexsp.ops._segments import in_segments

__all__ = ["NORMALIZER_EPS", "chunk_linear_attn"]

NORMALIZER_EPS = 1e-10
"""Added to the denominator of normalised linear attention, as flash-linear-attention does."""

State = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None


@ranks_call
@by_recipe
@in_segments("q k v", kernels=True)
@one_dtype("q k v")
def chunk_linear_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    initial_state: State = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: torch.Tensor | None = None,
    sp: SequenceParallel | bool | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
) -> tuple[torch.Tensor, State]:
    """S_t = S_{t-1} + k_t v_t^T, z_t = z_{t-1} + k_t; o_t = q_t S_t / (q_t z_t), or scale q_t S_t.

    Katharopoulos et al. 2020, Transformers are RNNs (arXiv 2006.16236), eq. 18-20. ``q`` and ``k`` are the features
    phi(.) themselves. With ``normalize`` the denominator is scale q_t.z_t + 1e-10 (``NORMALIZER_EPS``, what
    flash-linear-attention adds). That constant only turns 0 / 0 into 0: features must keep q_t.z_t > 0, for example
    elu(x) + 1; nothing guards against a denominator that is negative or near 0. The numerator is not normalised while
    it is in the inputs' dtype: over long sequences it can leave float16's range.

    Args:
        q: features [B, T, H, K], float16, bfloat16, float32 or float64, any strides; K of 1..256.
        k: features [B, T, H, K] in the same dtype.
        v: [B, T, H, V] in the same dtype; V of 1..512.
        scale: factor on q; None means K**-0.5. With ``normalize`` it cancels, up to the constant 1e-10.
        initial_state: with ``normalize`` the pair (S [N, H, K, V], z [N, 1, H, K]), else S alone; float32 (float64
            for float64 inputs); N = B, or the number of documents.
        output_final_state: also return the state after the last token, in the same form.
        normalize: divide by q_t.z_t.
        cu_seqlens: packed documents, as in `chunk_simple_gla`.
        sp: the ranks, as in `chunk_simple_gla`.
        cu_seqlens_cpu: CPU copy of ``cu_seqlens``, as in `chunk_simple_gla`.

    Returns:
        o [B, T, H, V] in the inputs' dtype and the final state (pair or tensor), or None, by the same rules as
        `chunk_simple_gla`.

    Raises:
        ValueError: a wrong shape, dtype, device or value, naming the argument. On a GPU also B * H of more than 65535.

    Example:
        >>> q, k, v = torch.randn(3, 2, 100, 4, 64).unbind(0)
        >>> q, k = (torch.nn.functional.elu(x) + 1 for x in (q, k))
        >>> o, (S, z) = chunk_linear_attn(q, k, v, output_final_state=True)
    """
    B, _, H, K, V = check.check_qkv(q, k, v)
    check.check_flag("output_final_state", output_final_state)
    check.check_flag("normalize", normalize)
    sp = check.resolve(sp, q)
    check.check_cu_seqlens(cu_seqlens, cu_seqlens_cpu, q, "q", sp)
    N = check.number_of_states(B, cu_seqlens)
    state, z = _split_state(initial_state, normalize)
    name = "initial_state[0]" if normalize else "initial_state"
    check.check_state(name, state, (N, H, K, V), "[N, H, K, V]", q, cu_seqlens, sp)
    check.check_state("initial_state[1]", z, (N, 1, H, K), "[N, 1, H, K]", q, cu_seqlens, sp)
    check.same_call(sp, "linear_attn", q, H, K, V, N, normalize, cu_seqlens is None)

    scale = check.check_scale(scale, K)
    if not normalize:
        return diagonal(
            q, k, v, scale=scale, initial_state=state, output_final_state=output_final_state, cu_seqlens=cu_seqlens,
            sp=sp, op="linear_attn",
        )  # fmt: skip
    # In a graph the two states may be exchanged one after the other, and so must their gradients be, in one order on
    # all ranks.
    if sp is not None:
        _, q, k, v, state, z = share_backward(sp, q, k, v, state, z)
    ones = v.new_ones(1, 1, 1, 1).expand(*v.shape[:3], 1)
    (numerator, denominator), (final, final_z) = diagonal_pair(
        q, k, (v, ones), scale=scale, initial_states=(state, None if z is None else z.permute(0, 2, 3, 1)),
        output_final_state=output_final_state, cu_seqlens=cu_seqlens, sp=sp,
        ops=("linear_attn", "linear_attn (normaliser)"),
    )  # fmt: skip
    dtype = check.accumulation_dtype(q)
    o = (numerator.to(dtype) / (denominator.to(dtype) + NORMALIZER_EPS)).to(v.dtype)
    if final is None or final_z is None:
        return o, None
    final_z = final_z.permute(0, 3, 1, 2)
    if sp is not None:
        _, o, final, final_z = share_backward(sp, o, final, final_z)
    return o, (final, final_z)


def _split_state(initial_state: State, normalize: bool) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if initial_state is None:
        return None, None
    if not normalize:
        if not isinstance(initial_state, torch.Tensor):
            check.fail("initial_state", "a tensor [N, H, K, V] with normalize=False", type(initial_state).__name__)
        return initial_state, None
    if not isinstance(initial_state, (tuple, list)) or len(initial_state) != 2:
        check.fail(
            "initial_state", "a pair (S [N, H, K, V], z [N, 1, H, K]) with normalize=True", type(initial_state).__name__
        )
    return initial_state[0], initial_state[1]
