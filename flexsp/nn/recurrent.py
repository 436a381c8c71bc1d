"""What layers share whose projections may pass through short convolutions: forward, step and cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flexsp.comm.group import resolve_sp
from flexsp.exceptions import check_flag, check_integer
from flexsp.nn.conv import ShortConvolution, convolve, convolve_prompt, convolve_token
from flexsp.nn.layers import LayerCache, _check_cache, _check_token, _project, _refuse_cache_under_sp
from flexsp.nn.norm import accumulation_dtype, check_input
from flexsp.scan.sequence import without_tail

Op = Callable[..., tuple[Tensor, Tensor | None]]


class RecurrentLayer(nn.Module):
    """A layer of an op of `flexsp.ops`.

    ``_branches`` names projections that lie side by side: of a branch "q" they are q_proj and, with convolutions,
    q_conv1d. `_arguments` makes an op's arguments of them, and `_output` the layer's output of the op's.
    """

    _ops: tuple[Op, Op]  # over the whole sequence, token by token
    _branches: tuple[str, ...]
    _widths: tuple[int, ...]
    hidden_size: int

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

    def forward(
        self, x: Tensor, cu_seqlens: Tensor | None = None, cache: LayerCache | None = None
    ) -> Tensor | tuple[Tensor, LayerCache]:
        """x [B, T, D] -> y [B, T, D]; with a cache (see `init_cache`), ``(y, new cache)``.

        Under sequence parallelism x is this rank's shard and `cu_seqlens` [N+1] the global boundaries. Behind the last
        of them outputs and gradients are 0.

        Raises:
            ValueError: bad shapes, or a cache together with documents or sequence parallelism.
        """
        return self._forward(x, cu_seqlens, cache)

    def _forward(
        self, x: Tensor, cu_seqlens: Tensor | None, cache: LayerCache | None, *context: Any
    ) -> Tensor | tuple[Tensor, LayerCache]:
        check_input("x", x, (None, None, self.hidden_size))
        if cache is not None:
            self._check_cache(cache, x.shape[0])
        mixed, conv_cache = self._projected(x), None
        if cache is not None:
            _refuse_cache_under_sp(cu_seqlens)
            if self.use_short_conv:
                assert cache.conv is not None
                mixed, conv_cache = convolve_prompt(mixed, cache.conv, *self._taps())
        elif self.use_short_conv:
            mixed = convolve(mixed, *self._taps(), cu_seqlens)
        o, state = self._ops[0](
            **self._arguments(mixed, x, *context),
            initial_state=None if cache is None else cache.state,
            output_final_state=cache is not None,
            cu_seqlens=cu_seqlens,
        )
        y = self._output(o, x)
        if cache is None:
            return without_tail(y, cu_seqlens, resolve_sp(None))
        assert state is not None
        return y, LayerCache(state, conv_cache)

    def step(self, x: Tensor, cache: LayerCache) -> tuple[Tensor, LayerCache]:
        """One token on this rank alone, whatever sp is: x [B, D] or [B, 1, D] -> (y like x, new cache)."""
        return self._step(x, cache)

    def _step(self, x: Tensor, cache: LayerCache, *context: Any) -> tuple[Tensor, LayerCache]:
        token = _check_token(x, self.hidden_size)
        self._check_cache(cache, x.shape[0])
        mixed, conv_cache = self._projected(token), None
        if self.use_short_conv:
            assert cache.conv is not None
            convolved, conv_cache = convolve_token(mixed.squeeze(1), cache.conv, *self._taps())
            mixed = convolved.unsqueeze(1)
        o, state = self._ops[1](
            **self._arguments(mixed, token, *context), initial_state=cache.state, output_final_state=True
        )
        assert state is not None
        return self._output(o, token).reshape(x.shape), LayerCache(state, conv_cache)

    def init_cache(self, batch: int) -> LayerCache:
        """The cache of an empty text: the op's state, and the inputs [B, D, W] of the convolutions side by side."""
        shape = self._state_shape(check_integer("batch", batch, least=1))
        weight = self._projections()[0].weight
        state = torch.zeros(shape, dtype=accumulation_dtype(weight.dtype), device=weight.device)
        if not self.use_short_conv:
            return LayerCache(state, None)
        taps = self._convolutions()[0].weight
        return LayerCache(state, taps.new_zeros(batch, sum(self._widths), self.conv_size))

    def _check_cache(self, cache: Any, batch: int) -> None:
        _check_cache(cache, self._state_shape(batch), None)
        if self.use_short_conv:
            check_input("cache.conv", cache.conv, (batch, sum(self._widths), self.conv_size))

    def _projections(self) -> list[nn.Linear]:
        return [getattr(self, f"{branch}_proj") for branch in self._branches]

    def _convolutions(self) -> list[ShortConvolution]:
        return [getattr(self, f"{branch}_conv1d") for branch in self._branches]

    def _projected(self, x: Tensor) -> Tensor:
        first, *others = self._projections()
        return torch.cat([_project(first, x), *(linear(x) for linear in others)], dim=-1)

    def _taps(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of one convolution over all branches, so that ranks exchange one halo."""
        convolutions = self._convolutions()
        weight = torch.cat([each.taps for each in convolutions])
        biases: list[Tensor] = [each.bias for each in convolutions if each.bias is not None]
        return weight, torch.cat(biases) if biases else None

    def _state_shape(self, batch: int) -> tuple[int, ...]:
        raise NotImplementedError

    def _arguments(self, mixed: Tensor, x: Tensor, *context: Any) -> dict[str, Any]:
        """An op's arguments, but for states and boundaries, from what the convolutions gave and the input."""
        raise NotImplementedError

    def _output(self, o: Tensor, x: Tensor) -> Tensor:
        raise NotImplementedError
