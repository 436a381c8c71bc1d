"""`RecurrentLayer`, the base of all recurrent layers: their calls, their steps and their caches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flexsp.comm.group import resolve_sp
from flexsp.exceptions import check_flags, check_integer, check_number, fail
from flexsp.nn.conv import ShortConvolution, SideBySide
from flexsp.nn.norm import accumulation_dtype, check_input
from flexsp.ops._validate import MAX_HEAD_DIM
from flexsp.scan.by_segments import by_segments, segments_wanted
from flexsp.scan.tokens import without_tail

Op = Callable[..., tuple[Tensor, Any]]


class LayerCache(NamedTuple):
    """What a layer remembers while it generates text.

    Attributes:
        state: the state of the layer's op, [B, H, K, V] for most, in float32 (float64 in layers of float64).
        conv: the last W inputs [B, D, W] of the short convolution; None in layers without one.
    """

    state: Any
    conv: Tensor | None


class RecurrentLayer(nn.Module):
    """A layer around an op of `flexsp.ops`. A call has four steps:

    1. `_mixed` projects x (`_projected`) and, where the layer has a short convolution, convolves the result.
    2. `_arguments` makes the op's arguments of it.
    3. The op runs over the whole sequence, or token by token.
    4. `_output` applies the norm, the gate and the last projection.

    A layer names its first projections and their convolutions (`_add_branches` and `_add_convolutions` do it for the
    usual names) and writes `_arguments` and `_output`. It overrides `_state_shape` if its state is not a matrix for
    each head, and `_mixed` if a part of its first projection is not convolved. Further arguments of a call, such as
    the least gate of `HGRN`, are the *context*: `forward` and `step` hand them to `_arguments`.
    """

    _ops: tuple[Op, Op]  # over the whole sequence, token by token
    _shown: tuple[str, ...] = ("num_heads", "head_k_dim", "head_v_dim")  # sizes that `repr` tells
    _want_final = "output_final_state"  # what the ops call this argument
    _branches: tuple[str, ...]
    _widths: tuple[int, ...]  # channels of each branch
    _projection_names: tuple[str, ...]  # the first ones, whose outputs lie side by side before the convolution
    _convolution_names: tuple[str, ...] = ()
    hidden_size: int
    num_heads: int
    head_k_dim: int
    head_v_dim: int
    use_short_conv: bool

    def _add_branches(self, widths: tuple[int, ...]) -> None:
        """A projection for each branch, called q_proj for branch q, to ``widths`` channels."""
        self._widths = widths
        self._projection_names = tuple([f"{branch}_proj" for branch in self._branches])
        for name, width in zip(self._projection_names, widths, strict=True):
            setattr(self, name, nn.Linear(self.hidden_size, width, bias=False))

    def _add_convolutions(
        self, use_short_conv: bool, size: int, bias: bool, activations: tuple[str | None, ...]
    ) -> None:  # fmt: skip
        """A convolution for each branch, called q_conv1d for branch q. It only remembers its activation, which
        `_arguments` applies."""
        check_flags(use_short_conv=use_short_conv, conv_bias=bias)
        size = check_integer("conv_size", size, least=1)
        self.use_short_conv, self.conv_size, self.conv_bias = use_short_conv, size, bias
        if not use_short_conv:
            return
        self._convolution_names = tuple([f"{branch}_conv1d" for branch in self._branches])
        for name, width, activation in zip(self._convolution_names, self._widths, activations, strict=True):
            setattr(self, name, ShortConvolution(width, size, bias, activation))

    # ------------------------------------------------------------------------------------------------- calls

    def extra_repr(self) -> str:
        return ", ".join([str(self.hidden_size), *(f"{name}={getattr(self, name)}" for name in self._shown)])

    def forward(
        self, x: Tensor, cu_seqlens: Tensor | None = None, cache: LayerCache | None = None
    ) -> Tensor | tuple[Tensor, LayerCache]:
        """x [B, T, D] -> y [B, T, D]; with a cache (see `init_cache`), ``(y, new cache)``.

        Under sequence parallelism x is this rank's shard and `cu_seqlens` [N+1] the global boundaries. Behind the last
        of them outputs and gradients are 0.

        Raises:
            ValueError: bad shapes, or a cache together with documents or sequence parallelism.
        """
        y, cache, _ = self._forward(x, cu_seqlens, cache)
        return y if cache is None else (y, cache)

    def step(self, x: Tensor, cache: LayerCache) -> tuple[Tensor, LayerCache]:
        """One token on this rank alone, whatever sp is: x [B, D] or [B, 1, D] -> (y like x, new cache)."""
        return self._step(x, cache)[:2]

    def _forward(self, x: Tensor, cu_seqlens: Tensor | None, cache: Any, *context: Any) -> tuple[Tensor, Any, Any]:
        """y, the new cache or None, and what `_arguments` left for `_output`."""
        check_input("x", x, (None, None, self.hidden_size))
        self._check_context(x, *context)
        if cache is None:
            y, _, for_output = self._run(x, None, context, cu_seqlens)
            return without_tail(y, cu_seqlens, resolve_sp(None, keeps_bits=True)), None, for_output
        self._check_cache(cache, x.shape[0])
        _refuse_cache_under_sp(cu_seqlens)
        return self._run(x, cache, context)

    def _step(self, x: Tensor, cache: Any, *context: Any) -> tuple[Tensor, Any, Any]:
        """`_forward` for one token."""
        token = _check_token(x, self.hidden_size)
        self._check_context(token, *context)
        self._check_cache(cache, x.shape[0])
        y, cache, for_output = self._run(token, cache, context, is_step=True)
        return y.reshape(x.shape), cache, for_output

    def _run(
        self, x: Tensor, cache: Any, context: tuple[Any, ...], cu_seqlens: Tensor | None = None, is_step: bool = False
    ) -> tuple[Tensor, Any, Any]:
        state, conv_cache = (None, None) if cache is None else self._parts(cache)
        mixed, conv_cache = self._mixed(x, conv_cache, cu_seqlens, is_step)
        arguments, for_output = self._by_token("arguments", self._arguments, mixed, x, *context, is_step=is_step)
        arguments[self._want_final] = cache is not None
        if not is_step:
            arguments["cu_seqlens"] = cu_seqlens
        o, state = self._ops[1 if is_step else 0](**arguments, initial_state=state)
        # Without gradients only these names hold the memory, and `_output` allocates more.
        del mixed, arguments
        y = self._by_token("output", self._output, o, for_output, is_step=is_step)
        return y, None if cache is None else self._cache(state, conv_cache), for_output

    def _mixed(
        self, x: Tensor, conv_cache: Tensor | None, cu_seqlens: Tensor | None, is_step: bool
    ) -> tuple[Any, Tensor | None]:
        """What `_arguments` reads of x [B, T, D], and the new conv_cache.

        Args:
            conv_cache: the convolution's inputs [B, D, W] before x; None without a cache.
            is_step: x is the one token of a step.
        """
        mixed = self._by_token("projections", self._projected, x, is_step=is_step)
        return self._convolved(mixed, conv_cache, cu_seqlens, is_step)

    def _by_token(
        self, what: str, fn: Callable[..., Any], *args: Any, is_step: bool, shared: Sequence[Tensor] = ()
    ) -> Any:
        """``fn(*args, *shared)``, which treats tokens one by one; over groups made with ``bitwise`` by segments."""
        if is_step or segments_wanted() is None:  # asked for here, which is quicker
            return fn(*args, *shared)
        return by_segments(self, what, fn, *args, shared=shared)

    def _projected(self, x: Tensor) -> Any:
        """The first projections of x [B, T, D], side by side."""
        first, *others = self._projections()
        mixed = _project(first, x)
        return torch.cat([mixed, *(linear(x) for linear in others)], dim=-1) if others else mixed

    def _convolved(
        self, x: Tensor, conv_cache: Tensor | None, cu_seqlens: Tensor | None, is_step: bool
    ) -> tuple[Tensor, Tensor | None]:
        """x [B, T, D] after the convolutions, if there are any, and the new conv_cache. Arguments as of `_mixed`."""
        parts = self._convolutions()
        if not parts:
            return x, None
        convolution = parts[0] if len(parts) == 1 else SideBySide(parts)
        if conv_cache is None:
            return convolution(x, cu_seqlens), None
        if not is_step:
            return convolution.prefill(x, conv_cache)
        y, conv_cache = convolution.step(x.squeeze(1), conv_cache)
        return y.unsqueeze(1), conv_cache

    # ------------------------------------------------------------------------------------------------ caches

    def init_cache(self, batch: int) -> LayerCache:
        """The cache before the first token: zeros for the op's state and for the convolutions' inputs [B, D, W]."""
        batch = check_integer("batch", batch, least=1)
        shape, conv = self._state_shape(batch), self._conv_shape(batch)
        several, weight = isinstance(shape[0], tuple), self._projections()[0].weight
        dtype, device = accumulation_dtype(weight.dtype), weight.device
        states = [torch.zeros(each, dtype=dtype, device=device) for each in (shape if several else (shape,))]
        if conv is not None:
            weight = (self._convolutions() or self._projections())[0].weight
        inputs = None if conv is None else torch.zeros(conv, dtype=weight.dtype, device=weight.device)
        return self._cache(tuple(states) if several else states[0], inputs)  # type: ignore[no-any-return]

    def _check_cache(self, cache: Any, batch: int) -> None:
        """ValueError unless `cache` comes from `init_cache` or an earlier call, for as many sequences as the input."""
        if not isinstance(cache, LayerCache):
            fail("cache", "a LayerCache, see init_cache", type(cache).__name__)
        self._check_state(cache.state, batch)
        conv = self._conv_shape(batch)
        if conv is not None:
            check_input("cache.conv", cache.conv, conv)  # type: ignore[arg-type]

    def _check_state(self, state: Any, batch: int) -> None:
        check_input("cache.state", state, self._state_shape(batch))

    def _conv_shape(self, batch: int) -> tuple[int, ...] | None:
        parts = self._convolutions()
        return (batch, sum([part.dim for part in parts]), parts[0].width) if parts else None

    def _parts(self, cache: Any) -> tuple[Any, Tensor | None]:
        """The op's state and conv_cache."""
        return cache.state, cache.conv

    def _cache(self, state: Any, conv: Tensor | None) -> Any:
        return LayerCache(state, conv)

    def _projections(self) -> list[nn.Linear]:
        return [getattr(self, name) for name in self._projection_names]

    def _convolutions(self) -> list[ShortConvolution]:
        return [getattr(self, name) for name in self._convolution_names]

    # ------------------------------------------------------------------------------------- what a layer writes

    def _check_context(self, x: Tensor, *context: Any) -> None:
        """ValueError for a bad context of a call with x [B, T, D]."""

    def _state_shape(self, batch: int) -> tuple[Any, ...]:
        """The shape of the op's state, or a shape for each of its parts."""
        return batch, self.num_heads, self.head_k_dim, self.head_v_dim

    def _arguments(self, mixed: Any, x: Tensor, *context: Any) -> tuple[dict[str, Any], Any]:
        """The op's arguments except states and document boundaries, made of what `_mixed` returned and x [B, T, D];
        and what `_output` reads in addition to the op's output."""
        raise NotImplementedError

    def _output(self, o: Tensor, for_output: Any) -> Tensor:
        raise NotImplementedError


def _wide(x: Tensor) -> Tensor:
    return x.to(accumulation_dtype(x.dtype))


def _refuse_cache_under_sp(cu_seqlens: Tensor | None) -> None:
    if cu_seqlens is not None:
        fail("cache", "None with cu_seqlens (generation is not packed)", "a cache")
    if resolve_sp(None, keeps_bits=True) is not None:
        remedy = "layer.step(), or flexsp.nn.unwrap(copy.deepcopy(model)) for a plain copy of the model"
        fail("cache", "None under sequence parallelism (generation is local to a rank)", f"a cache; use {remedy}")


def _check_token(x: Tensor, hidden_size: int) -> Tensor:
    """x [B, D] or [B, 1, D] as [B, 1, D]."""
    one = isinstance(x, Tensor) and not x.is_nested and x.dim() == 3
    check_input("x", x, (None, 1, hidden_size) if one else (None, hidden_size))
    return x if one else x.unsqueeze(1)


def _project(linear: nn.Linear, x: Tensor) -> Tensor:
    """linear(x), with a ValueError for an x of another dtype. Torch finds it, since only torch knows which dtype
    autocast and FSDP's hooks cast x to."""
    if torch.compiler.is_compiling():
        return linear(x)
    try:
        return linear(x)
    except RuntimeError as error:
        if "same dtype" not in str(error):
            raise
        raise ValueError(f"x: expected dtype {linear.weight.dtype}, the layer's own, got {x.dtype}") from error


def expanded(name: str, hidden_size: int, expand: Any) -> int:
    """The inner width ``hidden_size * expand``; ValueError unless it is an integer."""
    width = hidden_size * check_number(name, expand, above=0)
    if not 0.5 <= width < 2**31 or not math.isclose(width, round(width), rel_tol=1e-6):
        fail(name, f"hidden_size * {name}, an integer of 1..{2**31 - 1}", f"{hidden_size} * {expand} = {width:g}")
    return round(width)


def head_size(name: str, width: int, expand: Any, heads: int = 1, most: int = MAX_HEAD_DIM) -> int:
    """Channels of a head, ``width * expand / heads``; ValueError unless that is an integer of 1..``most``."""
    total = width * check_number(name, expand, above=0)
    # The product of floats may be off by a rounding: 100 * 0.29 is 28.999999999999996.
    fits = 0.5 <= total <= (most + 1) * heads and math.isclose(total, round(total), rel_tol=1e-6)
    size, rest = divmod(round(total), heads) if fits else (0, 0)
    if rest or not 1 <= size <= most:
        got = f"{width} * {expand} / {heads} = {total / heads:g}"
        fail(name, f"a size of heads of 1..{most}, an integer", got)
    return size
