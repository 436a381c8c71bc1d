"""The time mixing of RWKV-7."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexsp.comm.derivatives import share_backward
from flexsp.comm.group import resolve_sp
from flexsp.exceptions import check_flag, check_integer, fail
from flexsp.nn.conv import tokens_since_start
from flexsp.nn.norm import HeadNorm, check_eps, check_input
from flexsp.nn.recurrent import LayerCache, RecurrentLayer, _project, _wide
from flexsp.nn.start import Start, StartedLinear, assign, start_orthogonal
from flexsp.ops import chunk_rwkv7, recurrent_rwkv7
from flexsp.ops._validate import MAX_HEAD_DIM, MAX_VALUE_DIM, check_cu_seqlens
from flexsp.scan.tokens import tokens_before

__all__ = ["RWKV7"]

_LEAST_LOG_DECAY = -math.exp(-0.5)
_MIXED = ("r", "w", "k", "v", "a", "g")


class _LowRank(nn.Module):
    """Two linear maps with an activation between them. ``bias`` initialises the second bias; None leaves it out."""

    def __init__(self, width: int, rank: int, out: int, activation: nn.Module, bias: Start | None = None) -> None:
        super().__init__()
        last = functools.partial(start_orthogonal, gain=0.1 * max(1.0, math.sqrt(rank / out)))
        maps = StartedLinear(width, rank, nn.init.zeros_), StartedLinear(rank, out, last, bias)
        self.lora = nn.Sequential(maps[0], activation, maps[1])

    def forward(self, x: Tensor) -> Tensor:
        return self.lora(x)


class _ForOutput(NamedTuple):
    """What `_output` reads in addition to the op's output.

    r and k are [B, T, H, K], v is [B, T, H, V], the gate g and the first layer's values are [B, T, H * V].
    """

    r: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    v_first: Tensor
    dtype: torch.dtype


class RWKV7(RecurrentLayer):
    """The time mixing of RWKV-7 "Goose" (Peng et al. 2025, arXiv 2503.14456), with the parameters of
    flash-linear-attention's ``RWKV7Attention``.

    Each of r, w, k, v, a and g is made of x_t + x_i * (x_{t-1} - x_t), with a weight x_i a channel. Of a head
    ``S_t = diag(e^{w_t}) S_{t-1} - kk_t^T a_t (kk_t S_{t-1}) + k_t v_t^T, o_t = r_t S_t``, see
    `flexsp.ops.chunk_rwkv7`, with ``w = -e^{-1/2} sigmoid(lora(x))``, ``a = sigmoid(lora(x))``, kk = k * k_k of length
    1, and k * (1 + (a - 1) * k_a) in the place of k; ``y = W_o ((norm(o) + (r_t r_k k_t) v_t) * g)``. Layers but the
    first mix their values with those of the first, ``v_first``, by weights sigmoid(lora(x)).

    Args:
        hidden_size: model width D, a multiple of the number of heads.
        head_dim: K of a head, 1 to 256.
        num_heads: heads H with ``head_dim=None``.
        decay_low_rank_dim: channels between the two maps of w; None gives the authors' number, as of the next three.
        gate_low_rank_dim: of g.
        a_low_rank_dim: of a.
        v_low_rank_dim: of the weights of v_first.
        elementwise_affine: whether the norm has weights and biases.
        norm_eps: of the norm over each head's V channels, times K; at least 0.
        layer_idx: the layer's number; the first, 0, has no v_first.
        value_dim: H * V, by default D; V is 1 to 512.
        num_hidden_layers: of the model, for the initialisation alone.

    Raises:
        ValueError: an argument that is none of these, which the message names.
    """

    _ops = (chunk_rwkv7, recurrent_rwkv7)
    _shown = ("num_heads", "head_dim", "head_v_dim")
    _projection_names = ("r_proj",)

    def __init__(
        self,
        hidden_size: int,
        head_dim: int | None = 64,
        num_heads: int | None = None,
        decay_low_rank_dim: int | None = None,
        gate_low_rank_dim: int | None = None,
        a_low_rank_dim: int | None = None,
        v_low_rank_dim: int | None = None,
        elementwise_affine: bool = True,
        norm_eps: float = 1e-5,
        layer_idx: int = 0,
        value_dim: int | None = None,
        num_hidden_layers: int = 1,
    ) -> None:
        super().__init__()
        self.hidden_size = D = check_integer("hidden_size", hidden_size, least=1)
        self.num_heads, self.head_dim = _heads(D, head_dim, num_heads)
        self.value_dim = D if value_dim is None else check_integer("value_dim", value_dim, least=1)
        if self.value_dim % self.num_heads or self.value_dim > MAX_VALUE_DIM * self.num_heads:
            fail("value_dim", f"H * V for {self.num_heads} heads and V of 1..{MAX_VALUE_DIM}", self.value_dim)
        self.head_v_dim, V = self.value_dim // self.num_heads, self.value_dim
        check_flag("elementwise_affine", elementwise_affine)
        self.layer_idx = check_integer("layer_idx", layer_idx)
        self.num_hidden_layers = check_integer("num_hidden_layers", num_hidden_layers, least=1)
        if num_hidden_layers > 1 and layer_idx >= num_hidden_layers:
            fail("layer_idx", f"a number below num_hidden_layers={num_hidden_layers}", layer_idx)
        wide = self.head_dim / 64
        ranks = {
            name: _rank(f"{name}_low_rank_dim", given, factor * math.sqrt(D))
            for name, given, factor in (
                ("decay", decay_low_rank_dim, 2.5 * wide), ("gate", gate_low_rank_dim, 5.0),
                ("a", a_low_rank_dim, 2.5 * wide), ("v", v_low_rank_dim, 1.7 * wide),
            )
        }  # fmt: skip
        for name in _MIXED:
            setattr(self, f"x_{name}", nn.Parameter(torch.empty(1, 1, D)))
        self.k_k, self.k_a = nn.Parameter(torch.empty(D)), nn.Parameter(torch.empty(D))
        self.r_k = nn.Parameter(torch.empty(self.num_heads, self.head_dim))
        whole, tenth = (functools.partial(start_orthogonal, gain=gain) for gain in (1.0, 0.1))
        self.r_proj, self.k_proj = StartedLinear(D, D, whole), StartedLinear(D, D, tenth)
        self.v_proj, self.o_proj = StartedLinear(D, V, whole), StartedLinear(V, D, nn.init.zeros_)
        depth = layer_idx / max(num_hidden_layers - 1, 1)
        decays = functools.partial(_start_decays, head_dim=self.head_dim, depth=depth)
        rates = functools.partial(_start_rates, head_dim=self.head_dim)
        self.w_lora = _LowRank(D, ranks["decay"], D, nn.Tanh(), decays)
        self.v_lora = None if layer_idx == 0 else _LowRank(D, ranks["v"], V, nn.Identity(), _start_mixing)
        self.a_lora = _LowRank(D, ranks["a"], D, nn.Identity(), rates)
        self.g_lora = _LowRank(D, ranks["gate"], V, nn.Sigmoid())
        eps = self.head_dim * check_eps("norm_eps", norm_eps)
        strength = ((layer_idx + 1) / max(num_hidden_layers, layer_idx + 1)) ** 0.7
        self.g_norm = HeadNorm(V, eps, strength if elementwise_affine else None)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The authors' initialisation, in which W_o is 0."""
        left = max(1 - self.layer_idx / self.num_hidden_layers, 0.0)
        channel = torch.arange(self.hidden_size, device=self.k_k.device)
        for name, power in zip(_MIXED, (0.2, 0.9, 0.7, 0.7, 0.9, 0.2), strict=True):
            assign(getattr(self, f"x_{name}"), 1 - (channel / self.hidden_size) ** (power * left))
        assign(self.k_k, 0.76 - 0.1 * _places(self.k_k))
        self.k_a.fill_(1.02)
        self.r_k.fill_(-0.04)

    def forward(
        self, x: Tensor, cu_seqlens: Tensor | None = None, cache: LayerCache | None = None,
        v_first: Tensor | None = None, return_v_first: bool = False,
    ) -> Any:  # fmt: skip
        """x [B, T, D] -> y [B, T, D]; with a cache (see `init_cache`), ``(y, new cache)``.

        Under sequence parallelism x is this rank's shard and `cu_seqlens` [N+1] the global boundaries. Behind the last
        of them outputs and gradients are 0.

        Args:
            v_first: the first layer's values [B, T, value_dim] of these tokens; None in the first layer.
            return_v_first: also return v_first, the first layer its own, last in the tuple.

        Raises:
            ValueError: bad shapes, or a cache together with documents or sequence parallelism.
        """
        y, cache, found = self._forward(x, cu_seqlens, cache, v_first, return_v_first)
        results = [y, *([] if cache is None else [cache]), *([found.v_first] if return_v_first else [])]
        return tuple(results) if len(results) > 1 else y

    def step(
        self, x: Tensor, cache: LayerCache, v_first: Tensor | None = None, return_v_first: bool = False
    ) -> Any:  # fmt: skip
        """One token on this rank alone, whatever sp is: x [B, D] or [B, 1, D] -> (y like x, new cache).

        ``v_first`` is [B, 1, value_dim]; with ``return_v_first`` it is last in the tuple.
        """
        y, cache, found = self._step(x, cache, v_first, return_v_first)
        return (y, cache, found.v_first) if return_v_first else (y, cache)

    def _state_shape(self, batch: int) -> tuple[int, ...]:
        return batch, self.num_heads, self.head_dim, self.head_v_dim

    def _conv_shape(self, batch: int) -> tuple[int, ...]:
        return batch, self.hidden_size, 1  # the last input

    def _check_context(self, x: Tensor, *context: Any) -> None:
        v_first, return_v_first = context
        if self.v_lora is None:
            if v_first is not None:
                fail("v_first", "None in the first layer, whose values are those", type(v_first).__name__)
        elif v_first is None:
            fail("v_first", "the first layer's values [B, T, value_dim] (return_v_first gives them)", None)
        else:
            check_input("v_first", v_first, (*x.shape[:2], self.value_dim))
        check_flag("return_v_first", return_v_first)

    def _mixes(self) -> list[Tensor]:
        return [getattr(self, f"x_{name}") for name in _MIXED]

    def _shifted(self, x: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, list[Tensor]]:
        """x, x shifted by one token (0 at the start of a document), and the weights of the mixtures."""
        sp, mixes = resolve_sp(None, keeps_bits=True), self._mixes()
        check_cu_seqlens(cu_seqlens, None, x, "x", sp)
        since = tokens_since_start(x.shape[1], cu_seqlens, sp, x.device)
        if sp is None:
            first = x.new_zeros(x.shape[0], 1, self.hidden_size)
        else:
            _, x, *mixes = share_backward(sp, x, *mixes)
            first = tokens_before(x, 1, sp)
        before = torch.cat([first, x], 1)[:, :-1]
        return x, before if since is None else before.masked_fill((since < 1)[None, :, None], 0.0), mixes

    def _mixed(
        self, x: Tensor, conv_cache: Tensor | None, cu_seqlens: Tensor | None, is_step: bool
    ) -> tuple[list[Tensor], Tensor | None]:
        """The inputs [B, T, D] of r, w, k, v, a and g, each a mixture of x_t and x_{t-1}."""
        if conv_cache is None:
            x, before, mixes = self._shifted(x, cu_seqlens)
        else:
            before, mixes = conv_cache.transpose(1, 2).to(x.dtype), self._mixes()
            seen = x if is_step else torch.cat([before, x], 1)
            before = before if is_step else seen[:, :-1]
            conv_cache = seen[:, -1:].transpose(1, 2).to(conv_cache.dtype)
        return self._by_token("mixtures", self._between, x, before, shared=mixes, is_step=is_step), conv_cache

    def _between(self, x: Tensor, before: Tensor, *mixes: Tensor) -> list[Tensor]:
        delta = before - x
        return [torch.addcmul(x, delta, mix.to(x.dtype)) for mix in mixes]

    def _arguments(self, mixed: list[Tensor], x: Tensor, *context: Any) -> tuple[dict[str, Any], _ForOutput]:
        (v_first, _), heads = context, (self.num_heads, -1)
        xr, xw, xk, xv, xa, xg = mixed
        r, k, v = _project(self.r_proj, xr), self.k_proj(xk), self.v_proj(xv)
        w = _LEAST_LOG_DECAY * _wide(self.w_lora(xw)).sigmoid()
        a, k_wide = _wide(self.a_lora(xa)).sigmoid(), _wide(k)
        if self.v_lora is None:
            v_first = v
        else:
            v = torch.lerp(_wide(v), _wide(v_first), _wide(self.v_lora(xv)).sigmoid()).to(v.dtype)
        kk = F.normalize((k_wide * self.k_k).unflatten(-1, heads), dim=-1)
        k_wide = k_wide * (1 + (a - 1) * self.k_a)
        r, k, v = (t.unflatten(-1, heads) for t in (r, k_wide.to(k.dtype), v))
        arguments = {
            "r": r, "w": w.unflatten(-1, heads), "k": k, "v": v, "a": -kk.to(k.dtype),
            "b": (kk * a.unflatten(-1, heads)).to(k.dtype),
        }  # fmt: skip
        return arguments, _ForOutput(r, k, v, self.g_lora(xg), v_first, x.dtype)

    def _output(self, o: Tensor, for_output: _ForOutput) -> Tensor:
        r, k, v = (_wide(t) for t in for_output[:3])
        own = (r * k * self.r_k).sum(-1, keepdim=True) * v
        return self.o_proj(((self.g_norm(o) + own).flatten(2) * _wide(for_output.g)).to(for_output.dtype))


def _places(x: Tensor) -> Tensor:
    """From 0 to 1 over the channels of x."""
    return torch.arange(len(x), device=x.device) / max(len(x) - 1, 1)


def _zigzag(x: Tensor, head_dim: int) -> Tensor:
    """From -1 to 1 over the channels of each head."""
    middle = max(head_dim - 1, 1) / 2
    within = (torch.arange(len(x), device=x.device) % head_dim - middle) / middle
    return within * within.abs()


def _start_decays(bias: Tensor, head_dim: int, depth: float) -> None:
    assign(bias, -5.5 + 6 * _places(bias) ** (1 + depth**0.3) + 2.5 * _zigzag(bias, head_dim))


def _start_rates(bias: Tensor, head_dim: int) -> None:
    assign(bias, -0.39 + 0.3 * _zigzag(bias, head_dim) + 0.4 * _places(bias))


def _start_mixing(bias: Tensor) -> None:
    assign(bias, 0.93 - 0.4 * _places(bias))


def _heads(hidden_size: int, head_dim: Any, num_heads: Any) -> tuple[int, int]:
    """(heads, their size)."""
    if head_dim is None:
        if num_heads is None:
            fail("num_heads", "a number of heads with head_dim=None", None)
        H = check_integer("num_heads", num_heads, least=1)
        if hidden_size % H or hidden_size > MAX_HEAD_DIM * H:
            fail("num_heads", f"a divisor of hidden_size={hidden_size} with heads of 1..{MAX_HEAD_DIM}", num_heads)
        return H, hidden_size // H
    K = check_integer("head_dim", head_dim, least=1, most=MAX_HEAD_DIM)
    if hidden_size % K:
        fail("head_dim", f"a divisor of hidden_size={hidden_size}", head_dim)
    if num_heads is not None and num_heads != hidden_size // K:
        fail("num_heads", f"None with head_dim, or hidden_size / head_dim = {hidden_size // K}", repr(num_heads))
    return hidden_size // K, K


def _rank(name: str, given: Any, size: float) -> int:
    """As given, else the multiple of 32 that is nearest to ``size``, at least 32."""
    return max(32, round(size / 32) * 32) if given is None else check_integer(name, given, least=1)
