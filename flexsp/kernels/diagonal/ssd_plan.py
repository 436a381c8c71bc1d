"""The launches of one call of the state-space dual: those of the diagonal engine, with step sizes and skip weights."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from flexsp.kernels.diagonal import step_sizes
from flexsp.kernels.diagonal.diagonal_plan import DiagonalPlan
from flexsp.kernels.launch_plan import Buffer, Role, by_name, gradient_of
from flexsp.kernels.launch_spec import LaunchSpec

__all__ = ["SsdPlan"]

_F32 = torch.float32
_CHUNKS = 16  # a program of `step_grads_kernel`


@dataclass(frozen=True)
class SsdPlan(DiagonalPlan):
    """A call of the state-space dual; the gate is "dt", the step sizes.

    Buffers beside those of `DiagonalPlan`: ``@writing`` gates by which keys are written, ``@dgates`` gradients of the
    log gates, and what keys leave to the gradients of steps.

    Attributes:
        softplus: steps are softplus(dt + bias).
        bias: there is a dt_bias.
        skips: there is a D.
        limits: of steps, None if there are none.
        dt_dtype: of dt.
    """

    softplus: bool = False
    bias: bool = False
    skips: bool = False
    limits: tuple[float, float] | None = None
    dt_dtype: torch.dtype = _F32
    params: ClassVar[tuple[str, ...]] = ()  # whose gradients are sums over tokens
    kernels: ClassVar[dict[str, Any]] = DiagonalPlan.kernels | by_name(
        step_sizes.step_kernel, step_sizes.step_grads_kernel
    )

    def settled(self) -> dict[str, Any]:
        params = ("A", *(["dt_bias"] if self.bias else []), *(["D"] if self.skips else []))
        return super().settled() | {
            "optional": frozenset(("dt", *params)), "by_head": frozenset({"dt"}), "by_token": frozenset(),
            "skip": "D" if self.skips else None, "writing": "@writing", "params": params,
        }  # fmt: skip

    def of_gates(self, gate: str) -> list[Buffer]:
        of_parts = self.B, self.H, self._programs
        token = self.B, self.H, self.T
        return [
            *super().of_gates(gate),
            Buffer("dt", Role.INPUT, self.dt_dtype, (self.B, self.T, self.H)),
            Buffer("d_dt", Role.GRADIENT, _F32, token),
            *(Buffer(name, Role.INPUT, _F32, (self.H,)) for name in self.params),
            *(Buffer(gradient_of(name), Role.SCRATCH, _F32, of_parts) for name in self.params),
            Buffer("@dgates", Role.SCRATCH, _F32, token),
        ]

    @property
    def _programs(self) -> int:
        return -(-self.n_chunks // _CHUNKS)

    @property
    def _how(self) -> dict[str, Any]:
        return {"C": self.chunk, "BIAS": self.bias, "SOFTPLUS": self.softplus, "LIMITED": self.limits is not None}

    @property
    def _sizes(self) -> tuple[str | int | float, ...]:
        return "dt", self.tiling.T, self.tiling.H, *(self.limits or (0.0, math.inf))

    def of_gate(self, wanted: Collection[str]) -> bool:
        return any(name in wanted for name in ("dt", "A", "dt_bias"))

    def of_sums(self, wanted: Collection[str]) -> bool:
        return self.of_gate(wanted) or "D" in wanted

    def sums(self, wanted: Collection[str]) -> list[str]:
        of_steps, of_skip = self.of_gate(wanted), "D" in wanted
        return [gradient_of(x) for x in self.params if (of_skip if x == "D" else of_steps)]

    def gate_sums(self, gate: str) -> LaunchSpec:
        p = self.tiling
        return self.small(
            "step_kernel", (p.n_chunks, p.B * p.H, 1),
            ["dt", "A", "dt_bias" if self.bias else None, "@gates", "@writing"], ["@gates", "@writing"],
            self._sizes, **self._how,
        )  # fmt: skip

    def gate_gradients(self, last: str | None, wanted: Collection[str]) -> list[LaunchSpec]:
        of_steps, of_skip = self.of_gate(wanted), "D" in wanted
        if not (of_steps or of_skip):
            return []
        if self.shared is not None:
            gates = [self.shared.gate_grad("@dgates", steps=of_steps, skip=of_skip)]
        else:
            gates = [self.gate_grad("@dgates", last)] if of_steps else []
        of_keys, parts = self.of_keys
        skip_parts = math.prod(self._skip_parts) if self.shared is None else 1
        made = ["d_dt", *self.sums(wanted)] if of_steps else self.sums(wanted)
        pointers = [
            "@dgates" if of_steps else None, of_keys if of_steps else None, "@of_skip" if of_skip else None, "dt", "A",
            "dt_bias" if self.bias else None,
            *(x if x in made else None for x in ("d_dt", "d_A", "d_dt_bias", "d_D")),
        ]  # fmt: skip
        of_step = self.small(
            "step_grads_kernel", (self._programs, self.B * self.H, 1), pointers, made, (*self._sizes, self.n_chunks),
            **self._how, PARTS=parts, SKIP_PARTS=skip_parts, PER=_CHUNKS, STEPS=of_steps, SKIP=of_skip,
        )  # fmt: skip
        return [*gates, of_step]
