"""RWKV-7: one gate a key channel and token, and a transition of rank one that reads the undecayed state."""

from __future__ import annotations

import torch

from flexsp.comm.group import SequenceParallel, ranks_call
from flexsp.ops import _programs as programs
from flexsp.ops import _validate as check
from flexsp.ops._peers import one_dtype, recurrence_of
from flexsp.ops._recipe import by_recipe
from flexsp.ops._segments import in_segments

__all__ = ["chunk_rwkv7", "recurrent_rwkv7"]


@ranks_call
@by_recipe
@in_segments("r w k v a b", kernels=True)
@one_dtype("r k v a b")
def chunk_rwkv7(
    r: torch.Tensor,
    w: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float | None = 1.0,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    sp: SequenceParallel | bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """S_t = diag(e^{w_t}) S_{t-1} + b_t (a_t S_{t-1}) + k_t v_t^T, o_t = scale r_t S_t, in chunks.

    Peng et al. 2025, RWKV-7 "Goose" (arXiv 2503.14456), the time mixing: a = -kk and b = kk * (in-context learning
    rate), with kk of length 1. What is removed is read from the state before its decay. Any a and b will do.

    In bfloat16 kernels do a head token by token, in float32, where decays are near 1 and one key repeats with rates of
    more than 0.71: in half of a text's chunks of 64 (a_i b_j)^2, with the decays between, is above 1/2 on average.
    Chunks would lose up to 7 % there; with smaller rates they lose up to 5 %. It is much slower.

    In half precision gates of later tokens in the same chunk may change an output by some roundings: kernels choose a
    method for each chunk by the size of its gates.

    Args:
        r: receptance [B, T, H, K], float16, bfloat16, float32 or float64, any strides; K of 1..256.
        w: natural-log gates [B, T, H, K] <= 0, in the model -e^{-1/2} sigmoid(.); r's dtype or float32. Values below
            -104 (-800 for float64 inputs) act as that, a decay of 0, and have no gradient.
            RWKV-LM hands its kernels numbers that decay by e^{-e^w}: pass -w.exp() for them.
        k: [B, T, H, K] in r's dtype.
        v: [B, T, H, V] in the same dtype; V of 1..512.
        a: [B, T, H, K] in the same dtype.
        b: [B, T, H, K] in the same dtype.
        scale: factor on r; None means K**-0.5.
        initial_state: [N, H, K, V] in float32 (float64 for float64 inputs); N = B, or the number of documents.
        output_final_state: also return the state after the last token.
        cu_seqlens: packed documents, as in `chunk_simple_gla`.
        cu_seqlens_cpu: CPU copy of ``cu_seqlens``, as in `chunk_simple_gla`.
        sp: the ranks, as in `chunk_simple_gla`.

    Returns:
        o [B, T, H, V] in the inputs' dtype and the final state [N, H, K, V], or None, by the same rules as
        `chunk_simple_gla`.

    Raises:
        ValueError: a wrong shape, dtype, device or value, naming the argument. On a GPU also B * H of more than 65535.
        NotAvailable: on a GPU whose blocks have too little shared memory for heads so large.

    Example:
        >>> r, k, v, x = torch.randn(4, 2, 100, 4, 64).unbind(0)
        >>> kk, w = torch.nn.functional.normalize(x, dim=-1), -0.6 * torch.rand(2, 100, 4, 64)
        >>> o, state = chunk_rwkv7(r, w, k, v, -kk, kk * torch.rand_like(kk), output_final_state=True)
    """
    sizes = _checked(r, w, k, v, a, b)
    call = programs.Call(initial_state, output_final_state, False, cu_seqlens, cu_seqlens_cpu, sp)
    inputs = {"q": r, "k": k, "v": v, "a": a, "b": b, "g": w}
    return programs.run_matrix("rwkv7", sizes, inputs, scale, call, first="r")


@recurrence_of(chunk_rwkv7)
@one_dtype("r k v a b")
def recurrent_rwkv7(
    r: torch.Tensor,
    w: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float | None = 1.0,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The recurrence of `chunk_rwkv7` token by token: decoding, T = 1 a step.

    Takes and returns the same tensors. Prompts, ranks and documents are as in `recurrent_simple_gla`.

    Raises:
        ValueError: a wrong shape, dtype, device or value, naming the argument.

    Example:
        >>> r, k, v, x = torch.randn(4, 2, 1, 4, 64).unbind(0)
        >>> kk, w = torch.nn.functional.normalize(x, dim=-1), -0.6 * torch.rand(2, 1, 4, 64)
        >>> o, state = recurrent_rwkv7(r, w, k, v, -kk, kk * torch.rand_like(kk), output_final_state=True)
    """
    B, T, H, K, V = _checked(r, w, k, v, a, b)
    call = programs.Call(initial_state, output_final_state)
    initial = programs.initial_state((H, K, V), "H, K, V", call, None, r)
    reads, decay = programs.wide(r) * check.check_scale(scale, K), programs.clamped(w, r).exp()
    keys, values, removes, writes = (programs.wide(x, r).unsqueeze(-1) for x in (k, v, a, b))

    def step(state: torch.Tensor, t: int) -> tuple[torch.Tensor, torch.Tensor]:
        removed = (removes[:, t] * state).sum(-2, keepdim=True)
        state = decay[:, t].unsqueeze(-1) * state + writes[:, t] * removed + keys[:, t] * values[:, t].mT
        return (reads[:, t].unsqueeze(-1) * state).sum(-2), state

    start = reads.new_zeros(B, H, K, V) if initial is None else initial
    out, last = programs.token_loop(step, start, T, v)
    return out.to(v.dtype), programs.final_state(last, call)


def _checked(
    r: torch.Tensor, w: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: torch.Tensor, b: torch.Tensor
) -> tuple[int, int, int, int, int]:
    sizes = check.check_qkv(r, k, v, "rkv")
    check.check_gate("w", w, tuple(r.shape), "[B, T, H, K]", r)
    for name, x in (("a", a), ("b", b)):
        check.check_tensor(name, x, tuple(r.shape), "[B, T, H, K]", dtypes=(r.dtype,), device=r.device)
    return sizes
