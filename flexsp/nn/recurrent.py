"""The base of all recurrent layers: what their calls, their steps and their caches have in common."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flexsp.comm.group import resolve_sp
from flexsp.exceptions import check_flag, check_integer, check_number, fail
from flexsp.nn.conv import ShortConvolution, SideBySide
from flexsp.nn.norm import accumulation_dtype, check_input
from flexsp.ops._validate import MAX_HEAD_DIM
from flexsp.scan.tokens import without_tail

Op = Callable[..., tuple[Tensor, Any]]


class LayerCache(NamedTuple):
    """What a layer remembers while generating: `state` [B, H, K, V] (float32; float64 layers float64) or what else its
    op has, and `conv` [B, D, W], the last inputs of the short convolution (None without one)."""

    state: Any
    conv: Tensor | None


class RecurrentLayer(nn.Module):
    """A layer of an op of `flexsp.ops`. A call goes through

    - `_mixed`: the projections of x and, where the layer has one, the short convolution;
    - `_arguments`: the op's arguments, made of what these gave;
    - the op, over the whole sequence or token by token;
    - `_output`: norm, gate and the last projection.

    A layer says which projections lie side by side before the convolution (``_branches``: of a branch "q" they are
    q_proj and q_conv1d) or overrides `_projections` and `_convolutions`, and gives `_state_shape`, `_arguments` and
    `_output`. One whose first projection has parts that go past the convolution overrides `_mixed`. What a call has
    beside x, such as the least gate of `HGRN`, is its *context*: `forward` and `step` hand it to `_arguments`.
    """

    _ops: tuple[Op, Op]  # over the whole sequence, token by token
    _want_final = "output_final_state"  # what the ops call this argument
    _branches: tuple[str, ...]
    _widths: tuple[int, ...]
    hidden_size: int
    use_short_conv: bool

    def _add_branches(self, widths: tuple[int, ...]) -> None:
        """The projections, of these many channels."""
        self._widths = widths
        for branch, width in zip(self._branches, widths, strict=True):
            setattr(self, f"{branch}_proj", nn.Linear(self.hidden_size, width, bias=False))

    def _add_convolutions(
        self, use_short_conv: bool, size: int, bias: bool, activations: tuple[str | None, ...]
    ) -> None:  # fmt: skip
        """``activations`` are what the convolutions of the branches say; `_arguments` applies them."""
        check_flag("use_short_conv", use_short_conv)
        size = check_integer("conv_size", size, least=1)
        check_flag("conv_bias", bias)
        self.use_short_conv, self.conv_size, self.conv_bias = use_short_conv, size, bias
        if use_short_conv:
            for branch, width, activation in zip(self._branches, self._widths, activations, strict=True):
                setattr(self, f"{branch}_conv1d", ShortConvolution(width, size, bias, activation))

    # ------------------------------------------------------------------------------------------------- calls

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
            y, _, beside = self._run(x, None, context, cu_seqlens)
            return without_tail(y, cu_seqlens, resolve_sp(None)), None, beside
        self._check_cache(cache, x.shape[0])
        _refuse_cache_under_sp(cu_seqlens)
        return self._run(x, cache, context)

    def _step(self, x: Tensor, cache: Any, *context: Any) -> tuple[Tensor, Any, Any]:
        """As `_forward`, of one token."""
        token = _check_token(x, self.hidden_size)
        self._check_context(token, *context)
        self._check_cache(cache, x.shape[0])
        y, cache, beside = self._run(token, cache, context, one=True)
        return y.reshape(x.shape), cache, beside

    def _run(
        self, x: Tensor, cache: Any, context: tuple[Any, ...], cu_seqlens: Tensor | None = None, one: bool = False
    ) -> tuple[Tensor, Any, Any]:
        state, kept = (None, None) if cache is None else self._parts(cache)
        mixed, kept = self._mixed(x, kept, cu_seqlens, one)
        arguments, beside = self._arguments(mixed, x, *context)
        arguments[self._want_final] = cache is not None
        if not one:
            arguments["cu_seqlens"] = cu_seqlens
        o, state = self._ops[1 if one else 0](**arguments, initial_state=state)
        del mixed, arguments  # without gradients nothing else holds them, and the output takes memory of its own
        return self._output(o, beside), None if cache is None else self._cache(state, kept), beside

    def _mixed(self, x: Tensor, kept: Tensor | None, cu_seqlens: Tensor | None, one: bool) -> tuple[Any, Tensor | None]:
        """What `_arguments` reads of x [B, T, D], and the last inputs of the convolution for the cache.

        Args:
            kept: the inputs [B, D, W] before x, from the cache; None without a cache.
            one: x is one token, of a step.
        """
        first, *others = self._projections()
        mixed = _project(first, x)
        if others:
            mixed = torch.cat([mixed, *(linear(x) for linear in others)], dim=-1)
        return self._convolved(mixed, kept, cu_seqlens, one)

    def _convolved(
        self, x: Tensor, kept: Tensor | None, cu_seqlens: Tensor | None, one: bool
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """x [B, T, D], convolved where the layer has convolutions, and their last inputs. Arguments as of `_mixed`."""
        parts = self._convolutions()
        if not parts:
            return x, None
        convolution = parts[0] if len(parts) == 1 else SideBySide(parts)
        if kept is None:
            return convolution(x, cu_seqlens), None
        if not one:
            return convolution.prefill(x, kept)
        y, kept = convolution.step(x.squeeze(1), kept)
        return y.unsqueeze(1), kept

    # ------------------------------------------------------------------------------------------------ caches

    def init_cache(self, batch: int) -> LayerCache:
        """The cache of an empty text: the op's state, and the inputs [B, D, W] of the convolutions side by side."""
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
        """What `init_cache` or an earlier call gave, for as many sequences as the input has."""
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
        """The op's state and the last inputs of the convolution."""
        return cache.state, cache.conv

    def _cache(self, state: Any, conv: Tensor | None) -> Any:
        return LayerCache(state, conv)

    # ------------------------------------------------------------------------------------- what a layer gives

    def _projections(self) -> list[nn.Linear]:
        return [getattr(self, f"{branch}_proj") for branch in self._branches]

    def _convolutions(self) -> list[ShortConvolution]:
        return [getattr(self, f"{branch}_conv1d") for branch in self._branches] if self.use_short_conv else []

    def _check_context(self, x: Tensor, *context: Any) -> None:
        """What a layer's calls have beside x [B, T, D]."""

    def _state_shape(self, batch: int) -> tuple[Any, ...]:
        """The shape of the op's state, or those of its parts."""
        raise NotImplementedError

    def _arguments(self, mixed: Any, x: Tensor, *context: Any) -> tuple[dict[str, Any], Any]:
        """An op's arguments, but for states and boundaries, from what `_mixed` gave and the input [B, T, D]; and what
        `_output` reads beside the op's output."""
        raise NotImplementedError

    def _output(self, o: Tensor, beside: Any) -> Tensor:
        raise NotImplementedError


def _wide(x: Tensor) -> Tensor:
    return x.to(accumulation_dtype(x.dtype))


def _refuse_cache_under_sp(cu_seqlens: Tensor | None) -> None:
    if cu_seqlens is not None:
        fail("cache", "None with cu_seqlens (generation is not packed)", "a cache")
    if resolve_sp(None) is not None:
        remedy = "layer.step(), or flexsp.nn.unwrap(copy.deepcopy(model)) for a plain copy of the model"
        fail("cache", "None under sequence parallelism (generation is local to a rank)", f"a cache; use {remedy}")


def _check_token(x: Tensor, hidden_size: int) -> Tensor:
    """x [B, D] or [B, 1, D] as [B, 1, D]."""
    one = isinstance(x, Tensor) and not x.is_nested and x.dim() == 3
    check_input("x", x, (None, 1, hidden_size) if one else (None, hidden_size))
    return x if one else x.unsqueeze(1)


def _project(linear: nn.Linear, x: Tensor) -> Tensor:
    """linear(x). What may come in is for torch to say: autocast and the hooks of FSDP cast x on its way."""
    if torch.compiler.is_compiling():
        return linear(x)
    try:
        return linear(x)
    except RuntimeError as error:
        if "same dtype" not in str(error):
            raise
        raise ValueError(f"x: expected dtype {linear.weight.dtype}, the layer's own, got {x.dtype}") from error


def expanded(name: str, hidden_size: int, expand: Any) -> int:
    """``hidden_size * expand``, an integer."""
    width = hidden_size * check_number(name, expand, above=0)
    if not 0.5 <= width < 2**31 or not math.isclose(width, round(width), rel_tol=1e-6):
        fail(name, f"hidden_size * {name}, an integer of 1..{2**31 - 1}", f"{hidden_size} * {expand} = {width:g}")
    return round(width)


def head_size(name: str, width: int, expand: Any, parts: int = 1, whole: bool = False) -> int:
    """``width * expand / parts``, an integer. ``whole`` has the message name the product that is not one."""
    if whole:
        expanded(name, width, expand)
    total = width * check_number(name, expand, above=0)
    shown = f"a size of heads of 1..{MAX_HEAD_DIM}, an integer"
    if not 0.5 <= total <= (MAX_HEAD_DIM + 1) * parts or not math.isclose(total, round(total), rel_tol=1e-6):
        fail(name, shown, f"{width} * {expand} / {parts} = {total / parts:g}")
    size, rest = divmod(round(total), parts)
    if rest or not 1 <= size <= MAX_HEAD_DIM:
        fail(name, shown, f"{width} * {expand} / {parts} = {total / parts:g}")
    return size
