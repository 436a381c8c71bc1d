"""Simple gated linear attention: one scalar gate a head and token."""

from __future__ import annotations

import torch

from flexsp.comm.group import SequenceParallel, ranks_call
from flexsp.kernels.diagonal.op import diagonal
from flexsp.ops import _programs as programs
from flexsp.ops import _validate as check
from flexsp.ops._peers import one_dtype, recurrence_of
from flexsp.ops._recipe import by_recipe
from flexsp.ops._segments import in_segments

__all__ = ["chunk_simple_gla", "recurrent_simple_gla"]


@ranks_call
@by_recipe
@in_segments("q k v g", "g_gamma", kernels=True)
@one_dtype("q k v")
def chunk_simple_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    g_gamma: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    sp: SequenceParallel | bool | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """S_t = e^{g_t} S_{t-1} + k_t v_t^T, o_t = scale q_t S_t, in chunks.

    Yang et al. 2024, Gated Linear Attention (arXiv 2312.06635), eq. 3 with a scalar gate: the recurrence of
    RetNet with a data-dependent decay, and of Mamba-2 (arXiv 2405.21060, eq. 16).

    Args:
        q: [B, T, H, K], float16, bfloat16, float32 or float64, any strides; K of 1..256.
        k: [B, T, H, K] in the same dtype.
        v: [B, T, H, V] in the same dtype; V of 1..512.
        g: natural-log gates [B, T, H] <= 0 in the inputs' dtype or float32; values below -104 (-800
            for float64 inputs) act as that, a decay of 0, and have no gradient.
        g_gamma: natural-log decay [H] <= 0 of every token; not together with ``g``.
        scale: factor on q; None means K**-0.5.
        initial_state: [N, H, K, V] in float32 (float64 for float64 inputs); N = B, or the number of documents.
        output_final_state: also return the state after the last token.
        cu_seqlens: int32 or int64 [N + 1] boundaries of N documents packed along T; B must be 1. Documents may be
            empty. Under ``sp`` they count tokens over all ranks. They may end before the tokens do, as where documents
            are padded to a capacity: outputs and gradients of the tokens behind are 0. The inputs there must be
            finite, since gradients of parameters are sums over all tokens of gradients times inputs.
        sp: the ranks among which the sequence is cut. None: those of the enclosing ``sequence_parallel``, if any;
            False: none. The tensors are then this rank's shard (which may be empty).
        cu_seqlens_cpu: CPU copy of ``cu_seqlens``, whose values can be checked without synchronising.

    Returns:
        o [B, T, H, V] in the inputs' dtype and the final state [N, H, K, V], or None unless asked for. Under
        ``sp`` without ``cu_seqlens``, ``initial_state`` is given on the first rank only and the final state is
        None on every rank but the last. With ``cu_seqlens`` every rank takes and returns [N, H, K, V]: it reads
        the rows of documents that start in its shard and fills those of documents that end there, the rest is 0.
        Gradients of ``g_gamma`` are this rank's share; their sum over ranks is the gradient.

    Raises:
        ValueError: a wrong shape, dtype, device or value, naming the argument. On a GPU also B * H of more than 65535:
            pack the sequences, with ``cu_seqlens``.

    Example:
        >>> q, k, v = torch.randn(3, 2, 100, 4, 64).unbind(0)
        >>> g = torch.nn.functional.logsigmoid(torch.randn(2, 100, 4))
        >>> o, state = chunk_simple_gla(q, k, v, g, output_final_state=True)
    """
    B, _, H, K, V = check.check_qkv(q, k, v)
    check.check_flag("output_final_state", output_final_state)
    sp = check.resolve(sp, q)
    check.check_decay_inputs(q, g, g_gamma)
    check.check_cu_seqlens(cu_seqlens, cu_seqlens_cpu, q, "q", sp)
    N = check.number_of_states(B, cu_seqlens)
    check.check_state("initial_state", initial_state, (N, H, K, V), "[N, H, K, V]", q, cu_seqlens, sp)
    check.same_call(sp, "simple_gla", q, H, K, V, N, g is None, g_gamma is None, cu_seqlens is None)
    return diagonal(
        q, k, v, g, g_gamma, scale=check.check_scale(scale, K), initial_state=initial_state,
        output_final_state=output_final_state, cu_seqlens=cu_seqlens, sp=sp, op="simple_gla",
    )  # fmt: skip


@recurrence_of(chunk_simple_gla, "q k v g")
@one_dtype("q k v")
def recurrent_simple_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    g_gamma: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    reverse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The recurrence of `chunk_simple_gla` token by token: decoding, T = 1 a step.

    Takes and returns the same tensors, states [B, H, K, V] included, so a prompt goes through the chunked op and
    its final state here. Differentiable. Runs on one rank, whatever the ambient ``sequence_parallel``.

    With ``cu_seqlens`` it is the chunked op on one rank.
    ``reverse`` goes from the last token to the first one, as flash-linear-attention's op of this name does.

    Raises:
        ValueError: a wrong shape, dtype, device or value, naming the argument.

    Example:
        >>> o, state = chunk_simple_gla(q, k, v, g, output_final_state=True)
        >>> q1, k1, v1, g1 = (x[:, -1:] for x in (q, k, v, g))  # the next token's
        >>> o1, state = recurrent_simple_gla(q1, k1, v1, g1, initial_state=state, output_final_state=True)
    """
    B, T, H, _, _ = check.check_qkv(q, k, v)
    check.check_decay_inputs(q, g, g_gamma)
    if g_gamma is not None:
        g = g_gamma.expand(B, T, H)
    gates = None if g is None else programs.clamped(g, q)
    return programs.recur_matrix(q, k, v, gates, scale, programs.Call(initial_state, output_final_state))
