"""`scaled_dot_product_attention`: checks, and the choice of what runs it and of what ranks exchange."""

from __future__ import annotations

import torch

from flexsp.comm.group import SequenceParallel, ranks_call
from flexsp.exceptions import check_integer, check_number
from flexsp.nn.attention.local import BACKENDS, Sight, attend
from flexsp.nn.attention.over_ranks import EXCHANGES, attend_over_ranks, choose_exchange
from flexsp.nn.norm import check_choice
from flexsp.ops import _validate as check
from flexsp.scan.tokens import without_tail

__all__ = ["scaled_dot_product_attention"]


@ranks_call
def scaled_dot_product_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    cu_seqlens: torch.Tensor | None = None,
    sp: SequenceParallel | bool | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    backend: str = "auto",
    exchange: str = "auto",
    dropout_p: float = 0.0,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(scale q k^T) v, for softmax layers of models whose sequence is cut over ranks.

    Args:
        q: [B, T, H, K], float16, bfloat16, float32 or float64, any strides.
        k: [B, T, HK, K] in the same dtype, HK a divisor of H: query head h reads key head h // (H / HK).
        v: [B, T, HK, V] in the same dtype; V may differ from K.
        is_causal: a token sees itself and those before it; False: all tokens.
        scale: factor on the scores; None means K**-0.5.
        window: a token sees itself and the ``window - 1`` tokens before it; without ``is_causal`` as many after it too.
            None: no limit.
        cu_seqlens: int32 or int64 [N + 1] boundaries of N documents packed along T; B must be 1. A token sees its own
            document only. Documents may be empty. Under ``sp`` they count tokens over all ranks. Behind the last one
            outputs and gradients are 0.
        sp: the ranks among which the sequence is cut. None: those of the enclosing ``sequence_parallel``, if any;
            False: none. The tensors are then this rank's shard (which may be empty).
        cu_seqlens_cpu: CPU copy of ``cu_seqlens``, whose values can be checked without synchronising.
        backend: "blocks" is PyTorch, a block of queries at a time; "sdpa" is torch's function of this name, without
            documents and windows; "flex" is torch's ``flex_attention``, on CUDA. "auto" takes "blocks" on CPU, in
            float64, and for heads of fewer than 16 or more than 256 channels (in float32 128). Else it takes "sdpa" in
            half precision without documents and windows where K = V, and "flex" for everything else.
        exchange: what ranks exchange. "heads": each gets all tokens of H / R heads, which all have the same work, and
            gives the outputs back. R must divide H. A key head goes to each rank that has queries of it, so there may
            be fewer key heads than ranks. "keys": each gets the keys and values that its queries may see, those up to
            its last token where causal, and not those before its window. They are not kept for the backward pass, but
            come again, and the forward pass is computed again. "auto" takes "keys" where R does not divide H, or where
            there is a window that is not longer than an average shard (R * window <= T of all ranks), else "heads".
        dropout_p: only 0.0.
        softcap: only None.
        sinks: only None.

    Returns:
        o [B, T, H, V] in the inputs' dtype. Gradients are those of the whole sequence. What is kept for the backward
        pass is of the size of a shard. Its gradients cannot be differentiated again where "blocks" or ranks compute
        them.

    Raises:
        ValueError: a wrong shape, dtype, device or value, naming the argument.
        PeerMismatch: the ranks make different calls.

    Example:
        >>> q, k, v = torch.randn(1, 100, 8, 64), torch.randn(1, 100, 2, 64), torch.randn(1, 100, 2, 64)
        >>> o = scaled_dot_product_attention(q, k, v, window=32)
    """
    B, T, H, HK, K, V = _check_heads(q, k, v)
    check.check_flag("is_causal", is_causal)
    scale = check.check_scale(scale, K)
    if window is not None:
        window = check_integer("window", window, least=1)
    _check_refused(dropout_p, softcap, sinks)
    check_choice("backend", backend, BACKENDS)
    check_choice("exchange", exchange, EXCHANGES)
    _check_backend(backend, q, window, cu_seqlens)
    sp = check.resolve(sp, q)
    if sp is None or sp.world_size == 1:
        check.check_cu_seqlens(cu_seqlens, cu_seqlens_cpu, q, "q", sp)
        o = attend(q, k, v, Sight(is_causal, window, cu_seqlens, T), scale, backend)
        return without_tail(o, cu_seqlens, None)
    if exchange == "heads" and H % sp.world_size:
        check.fail("exchange", f'"auto" or "keys" ({H} heads do not divide by {sp.world_size} ranks)', '"heads"')
    check.check_cu_seqlens(cu_seqlens, cu_seqlens_cpu, q, "q", sp)
    call = f"of attention, B={B}, heads {H} of {K}, {HK} of {V}, {'causal' if is_causal else 'not causal'}"
    call += f", scale {scale:.6g}, window {window}, {'packed' if cu_seqlens is not None else 'not packed'}"
    check.same_call(sp, "scaled_dot_product_attention", q, call, exchange)
    lengths = sp.lengths_for(T)
    if exchange == "auto":
        exchange = choose_exchange(H, window, lengths)
    if exchange == "keys" and backend == "sdpa" and is_causal:
        check.fail("backend", '"auto", "flex" or "blocks" where ranks exchange keys and is_causal', '"sdpa"')
    sight = Sight(is_causal, window, cu_seqlens, sum(lengths))
    o = attend_over_ranks(q, k, v, sight, scale, backend, exchange, call, sp, lengths)
    return without_tail(o, cu_seqlens, sp)


@check.once
def _check_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[int, int, int, int, int, int]:
    """Shapes, dtype and device; returns (B, T, H, HK, K, V)."""
    check.check_tensor("q", q, None, "[B, T, H, K]", dtypes=check.FLOAT_DTYPES)
    B, T, H, K = q.shape
    if B < 1 or H < 1 or K < 1:
        check.fail("q", "at least one batch row, one head and one channel", list(q.shape))
    check.check_tensor("k", k, None, "[B, T, HK, K]", dtypes=(q.dtype,), device=q.device)
    HK = k.shape[2]
    check.check_tensor("k", k, (B, T, HK, K), "[B, T, HK, K]")
    if HK < 1 or H % HK:
        check.fail("k", f"a number of heads that divides the {H} of q", HK)
    check.check_tensor("v", v, None, "[B, T, HK, V]", dtypes=(q.dtype,), device=q.device)
    V = v.shape[-1]
    check.check_tensor("v", v, (B, T, HK, V), "[B, T, HK, V]")
    if V < 1:
        check.fail("v", "at least one channel", list(v.shape))
    return B, T, H, HK, K, V


def _check_refused(dropout_p: float, softcap: float | None, sinks: torch.Tensor | None) -> None:
    if check_number("dropout_p", dropout_p) != 0:
        check.fail("dropout_p", "0.0 (dropout of attention weights is not available)", repr(dropout_p))
    for name, x in (("softcap", softcap), ("sinks", sinks)):
        if x is not None:
            check.fail(name, "None (not available)", f"a {type(x).__name__}")


def _check_backend(backend: str, q: torch.Tensor, window: int | None, cu_seqlens: torch.Tensor | None) -> None:
    if backend == "sdpa" and (window is not None or cu_seqlens is not None):
        check.fail("backend", '"auto", "flex" or "blocks" with a window or documents', '"sdpa"')
    if backend == "flex" and (not q.is_cuda or q.dtype == torch.float64):
        check.fail("backend", '"flex" only on CUDA and not in float64', f'"flex" for {q.dtype} on {q.device}')
