"""`Attention`, the softmax layer of hybrid models."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from flexsp.comm.group import resolve_sp
from flexsp.exceptions import check_flag, check_integer, check_number, fail
from flexsp.kernels.rotary import rotate
from flexsp.nn.attention.function import scaled_dot_product_attention
from flexsp.nn.attention.local import Sight, attend
from flexsp.nn.norm import RMSNorm, check_eps, check_input
from flexsp.nn.recurrent import _check_token, _project, _refuse_cache_under_sp, _wide
from flexsp.ops._validate import check_cu_seqlens
from flexsp.scan.tokens import positions

__all__ = ["Attention", "AttentionCache"]


class AttentionCache(NamedTuple):
    """What `Attention` remembers while it generates text. It grows with the text, up to `window - 1` tokens.

    Attributes:
        k: [B, N, HK, K], keys of the N tokens that later tokens may see.
        v: [B, N, HK, V], their values.
        seen: how many tokens the text has had.
    """

    k: Tensor
    v: Tensor
    seen: int


class Attention(nn.Module):
    """Causal softmax attention with grouped queries and rotary positions, exact over ranks and packed documents.

    ``o = softmax(K**-0.5 rotate(q) rotate(k)^T) v``, ``y = W_o o``, with q, k and v from projections. Parameters are
    named and laid out as in the attention of Llama in transformers, and with ``qk_norm`` of Qwen3.

    Positions count from the start of the sequence, whichever rank a token is on, and from the start of each document.

    Args:
        hidden_size: model width D.
        num_heads: query heads H.
        num_kv_heads: key heads HK, a divisor of H; default H.
        head_dim: K of a head; default ``hidden_size / num_heads``.
        head_v_dim: V of a head; default K.
        window: a token sees itself and the ``window - 1`` tokens before it; None: all before it.
        qk_norm: an `RMSNorm` over each head of the queries and of the keys.
        qkv_bias: whether the projections to q, k and v have a bias.
        rope_theta: base of the rotary embedding (Su et al. 2021); None for no positions.
        rope_dim: how many channels of a head it turns, an even number; default K.
        norm_eps: of the norms, at least 0.

    Raises:
        ValueError: an argument that is none of these, which the message names.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        head_v_dim: int | None = None,
        window: int | None = None,
        qk_norm: bool = False,
        qkv_bias: bool = False,
        rope_theta: float | None = 10000.0,
        rope_dim: int | None = None,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size = check_integer("hidden_size", hidden_size, least=1)
        self.num_heads = num_heads = check_integer("num_heads", num_heads, least=1)
        key_heads = num_heads if num_kv_heads is None else check_integer("num_kv_heads", num_kv_heads, least=1)
        if num_heads % key_heads:
            fail("num_kv_heads", f"a divisor of num_heads {num_heads}", key_heads)
        if head_dim is None and hidden_size % num_heads:
            fail("head_dim", f"a number where {num_heads} heads do not divide hidden_size {hidden_size}", None)
        K = hidden_size // num_heads if head_dim is None else check_integer("head_dim", head_dim, least=1)
        V = K if head_v_dim is None else check_integer("head_v_dim", head_v_dim, least=1)
        self.num_kv_heads, self.head_dim, self.head_v_dim = key_heads, K, V
        self.window = None if window is None else check_integer("window", window, least=1)
        check_flag("qk_norm", qk_norm)
        check_flag("qkv_bias", qkv_bias)
        self.rope_theta = None if rope_theta is None else check_number("rope_theta", rope_theta, above=0)
        self.rope_dim = _rope_dim(rope_dim, K, rope_theta)
        check_eps("norm_eps", norm_eps)
        self.q_proj = nn.Linear(hidden_size, num_heads * K, bias=qkv_bias)
        self.k_proj = nn.Linear(hidden_size, key_heads * K, bias=qkv_bias)
        self.v_proj = nn.Linear(hidden_size, key_heads * V, bias=qkv_bias)
        self.o_proj = nn.Linear(num_heads * V, hidden_size, bias=False)
        self.q_norm = RMSNorm(K, norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(K, norm_eps) if qk_norm else None

    def extra_repr(self) -> str:
        names = ("num_heads", "num_kv_heads", "head_dim", "head_v_dim", "window")
        return ", ".join([str(self.hidden_size), *(f"{name}={getattr(self, name)}" for name in names)])

    def forward(
        self, x: Tensor, cu_seqlens: Tensor | None = None, cache: AttentionCache | None = None
    ) -> Tensor | tuple[Tensor, AttentionCache]:
        """x [B, T, D] -> y [B, T, D]; with a cache (see `init_cache`), ``(y, new cache)``.

        Under sequence parallelism x is this rank's shard and `cu_seqlens` [N+1] the global boundaries. Behind the last
        of them outputs and gradients are 0.

        Raises:
            ValueError: bad shapes, or a cache together with documents or sequence parallelism.
        """
        check_input("x", x, (None, None, self.hidden_size))
        if cache is not None:
            self._check_cache(cache, x.shape[0])
            _refuse_cache_under_sp(cu_seqlens)
            return self._continued(x, cache)
        sp = resolve_sp(None)
        check_cu_seqlens(cu_seqlens, None, x, "x", sp)
        q, k, v = self._heads(x, None if self.rope_theta is None else positions(x.shape[1], x.device, cu_seqlens, sp))
        o = scaled_dot_product_attention(q, k, v, window=self.window, cu_seqlens=cu_seqlens)
        return self.o_proj(o.flatten(-2))

    def step(self, x: Tensor, cache: AttentionCache) -> tuple[Tensor, AttentionCache]:
        """One token on this rank alone, whatever sp is: x [B, D] or [B, 1, D] -> (y like x, new cache)."""
        token = _check_token(x, self.hidden_size)
        self._check_cache(cache, x.shape[0])
        y, cache = self._continued(token, cache)
        return y.reshape(x.shape), cache

    def init_cache(self, batch: int) -> AttentionCache:
        """The cache before the first token: no keys and no values."""
        weight, heads = self.k_proj.weight, (check_integer("batch", batch, least=1), 0, self.num_kv_heads)
        return AttentionCache(weight.new_empty(*heads, self.head_dim), weight.new_empty(*heads, self.head_v_dim), 0)

    def _continued(self, x: Tensor, cache: AttentionCache) -> tuple[Tensor, AttentionCache]:
        T, kept = x.shape[1], cache.k.shape[1]
        q, k, v = self._heads(x, torch.arange(cache.seen, cache.seen + T, device=x.device))
        k, v = torch.cat([cache.k.to(k), k], 1), torch.cat([cache.v.to(v), v], 1)
        # The cache holds just the keys that the next token sees, so a single token needs no mask.
        sight = Sight(T != 1, self.window if T != 1 else None, None, kept + T, start=kept)
        o = attend(q, k, v, sight, self.head_dim**-0.5, "auto")
        if self.window is not None:
            begin = max(0, kept + T - self.window + 1)
            k, v = k[:, begin:], v[:, begin:]
        return self.o_proj(o.flatten(-2)), AttentionCache(k, v, cache.seen + T)

    def _check_cache(self, cache: AttentionCache, batch: int) -> None:
        if not isinstance(cache, AttentionCache):
            fail("cache", "an AttentionCache, see init_cache", type(cache).__name__)
        check_input("cache.k", cache.k, (batch, None, self.num_kv_heads, self.head_dim))
        check_input("cache.v", cache.v, (batch, cache.k.shape[1], self.num_kv_heads, self.head_v_dim))

    def _heads(self, x: Tensor, at: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        q = _project(self.q_proj, x).unflatten(-1, (self.num_heads, -1))
        k = self.k_proj(x).unflatten(-1, (self.num_kv_heads, -1))
        v = self.v_proj(x).unflatten(-1, (self.num_kv_heads, -1))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if at is None or self.rope_theta is None:
            return q, k, v
        # In float64, because a large position times a frequency in float32 is off by a large part of a turn.
        powers = torch.arange(0, self.rope_dim, 2, dtype=torch.float64, device=x.device) / self.rope_dim
        angles = at[:, None, None] / self.rope_theta**powers
        return rotate_first(q, angles), rotate_first(k, angles), v


def rotate_first(x: Tensor, angles: Tensor) -> Tensor:
    """x [B, T, H, K] with its first 2 S channels rotated by angles [T, 1, S]: channel i together with i + S."""
    first, rest = x.split([2 * angles.shape[-1], x.shape[-1] - 2 * angles.shape[-1]], -1)
    return torch.cat([rotate(_wide(first), angles, pairwise=False).to(x.dtype), rest], -1)


def _rope_dim(rope_dim: int | None, K: int, rope_theta: float | None) -> int:
    if rope_theta is None:
        if rope_dim is not None:
            fail("rope_dim", "None without rope_theta", repr(rope_dim))
        return 0
    value = K if rope_dim is None else check_integer("rope_dim", rope_dim, least=2, most=K)
    if value % 2:
        fail("rope_dim" if rope_dim is not None else "head_dim", "an even number of channels to turn", value)
    return value
