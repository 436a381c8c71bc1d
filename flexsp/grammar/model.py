"""FlexLinearAttention: a variant put together from components, on an engine where one fits, else compiled."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from flexsp.comm.group import SequenceParallel, resolve_sp
from flexsp.grammar import programs
from flexsp.grammar.decay import Decay
from flexsp.grammar.feature_map import FeatureMap
from flexsp.grammar.transition import Transition
from flexsp.ops import _validate as check
from flexsp.ops import chunk_simple_gla
from flexsp.scan.exchange import exchange

__all__ = ["FlexLinearAttention"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MIN_LOG_DECAY = {torch.float32: -104.0, torch.float64: -800.0}  # e^x is 0 there


class FlexLinearAttention:
    """A linear-attention variant from a decay, a feature map and a transition.

    Args:
        decay: from `flexsp.grammar.decay`: none, fixed, gated, exponential.
        features: from `flexsp.grammar.feature_map`: identity, elu, relu, rope.
        transition: from `flexsp.grammar.transition`: one_step_gd, delta_rule.
        custom_mask, custom_transition: not there yet, NotImplementedError.
    """

    def __init__(
        self, decay: Decay, features: FeatureMap, transition: Transition, *,
        custom_mask: Any = None, custom_transition: Any = None,
    ) -> None:  # fmt: skip
        for name, value, kind in (
            ("decay", decay, Decay), ("features", features, FeatureMap), ("transition", transition, Transition),
        ):  # fmt: skip
            if not isinstance(value, kind):
                raise ValueError(f"{name}: expected a component of flexsp.grammar, got {value!r}")
        for name, value in (("custom_mask", custom_mask), ("custom_transition", custom_transition)):
            if value is not None:
                raise NotImplementedError(f"{name} is not there yet")
        self.decay, self.features, self.transition = decay, features, transition

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the tensors besides q, k and v that a call must bring."""
        return (*self.decay.inputs, *self.features.inputs, *self.transition.inputs)

    def explain(self) -> str:
        """Which engine runs the combination, and what a call must bring."""
        parts = f"{self.features.kind} features, {self.decay.kind} decay, {self.transition.kind}"
        if self._on_the_diagonal_engine:
            runs = "runs on the diagonal engine (flexsp.ops.chunk_simple_gla)"
        else:
            runs = "compiled from three PyTorch functions (flexsp/grammar/programs.py), which run in PyTorch"
        return f"{parts}; besides q, k and v: {', '.join(self.inputs) or 'nothing'}\n{runs}"

    @property
    def _on_the_diagonal_engine(self) -> bool:
        return self.transition.kind == "one_step_gd" and not self.decay.vector

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float | None = None,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: torch.Tensor | None = None,
        sp: SequenceParallel | bool | None = None,
        **given: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Outputs [B, T, H, V] in v's dtype, and the final state [N, H, K, V] or None.

        Args:
            q, k: [B, T, H, K]; v: [B, T, H, V], in one dtype. Under ``sp`` this rank's tokens.
            given: what the components name: ``decay``, ``A``, ``theta``, ``beta``; their docstrings give shapes and
                units. In the inputs' dtype or float32. Log gates below -104 (-800 in float64) act as that, a decay
                of 0, and have no gradient. Signs are checked as by the ops: on CPU, on CUDA under FLEXSP_CHECK=1.
            scale: factor on q, K^-1/2 if None.
            initial_state, output_final_state, cu_seqlens, sp: as for `flexsp.ops.chunk_simple_gla`.
        """
        if given.keys() != set(self.inputs):
            raise ValueError(f"inputs: expected {sorted(self.inputs)} besides q, k and v, got {sorted(given)}")
        _check(q, k, v, given, self.decay)
        group, sizes = resolve_sp(sp), (q.shape[2], q.shape[3], v.shape[3])
        check.check_cu_seqlens(cu_seqlens, None, q, "q", group)
        states = (check.number_of_states(q.shape[0], cu_seqlens), *sizes)
        check.check_state("initial_state", initial_state, states, "[N, H, K, V]", q, cu_seqlens, group)
        scale = check.check_scale(scale, q.shape[3])
        q, k = self._map(q, k, given.get("theta"), cu_seqlens, group)
        gate, per_head = self._gate(given, q)
        wide, dtype = check.accumulation_dtype(q), v.dtype
        if self.decay.kind == "exponential" and "decay" in given:
            v = v.to(wide) * given["decay"].unsqueeze(-1).to(wide)
        common: dict[str, Any] = {"cu_seqlens": cu_seqlens, "sp": group if group is not None else False}
        if self._on_the_diagonal_engine:
            return chunk_simple_gla(
                q, k, v.to(dtype), gate, per_head, scale=scale, initial_state=initial_state,
                output_final_state=output_final_state, **common,
            )  # fmt: skip
        tokens: dict[str, Any] = {"q": q.to(wide) * scale, "k": k, "v": v, "g": _every_channel(gate, per_head, q)}
        program = programs.gla
        if self.transition.kind == "delta_rule":
            program, tokens["beta"] = programs.delta, given["beta"]
        o, final = program(*sizes)(**tokens, prev_s=initial_state, **common)
        return o.to(dtype), final if output_final_state else None

    def _gate(self, given: dict[str, torch.Tensor], q: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(log gate of every token, constant log gate of every head)."""
        wide = check.accumulation_dtype(q)
        if self.decay.kind == "none":
            return None, None
        if self.decay.kind == "gated":
            return given["decay"], None
        if self.decay.kind == "exponential":
            A = given["A"].to(wide)
            return (given["decay"].to(wide) * A, None) if "decay" in given else (None, A)
        H = q.shape[2]
        if self.decay.log_decay is None:
            return None, torch.log1p(-(2.0 ** (-5.0 - torch.arange(H, device=q.device, dtype=wide))))
        if len(self.decay.log_decay) != H:
            raise ValueError(f"decay.fixed: expected {H} values, one a head, got {len(self.decay.log_decay)}")
        return None, torch.tensor(self.decay.log_decay, device=q.device, dtype=wide)

    def _map(
        self, q: torch.Tensor, k: torch.Tensor, theta: torch.Tensor | None, cu_seqlens: torch.Tensor | None,
        sp: SequenceParallel | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        if self.features.kind == "elu":
            return F.elu(q) + 1, F.elu(k) + 1
        if self.features.kind == "relu":
            return F.relu(q), F.relu(k)
        if self.features.kind == "rope":
            angle = _angles(q, theta, self.features.base, cu_seqlens, sp)
            return _rotate(q, angle), _rotate(k, angle)
        return q, k


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: dict[str, torch.Tensor], decay: Decay) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        check.check_tensor(name, x, None, f"[B, T, H, {'V' if name == 'v' else 'K'}]")
    if k.shape != q.shape or v.shape[:3] != q.shape[:3]:
        raise ValueError(
            "q, k, v: expected [B, T, H, K], [B, T, H, K] and [B, T, H, V], got "
            f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    for name, x in (("q", q), ("k", k), ("v", v)):
        check.check_tensor(name, x, None, "[B, T, H, K]", dtypes=_FLOATS if x is q else (q.dtype,), device=q.device)
    B, T, H, K = q.shape
    shapes = {
        "decay": ((B, T, H, K), "[B, T, H, K]") if decay.vector else ((B, T, H), "[B, T, H]"),
        "A": ((H,), "[H]"),
        "theta": ((B, T, H, K // 2), "[B, T, H, K/2]"),
        "beta": ((B, T, H), "[B, T, H]"),
    }
    for name, x in given.items():
        dtypes = _FLOATS if name == "theta" else (q.dtype, torch.float32)
        check.check_tensor(name, x, *shapes[name], dtypes=dtypes, device=q.device)
    if decay.kind == "gated":
        check.check_non_positive("decay", given["decay"], "natural-log gates <= 0")
    if decay.kind == "exponential":
        check.check_non_positive("A", given["A"], "values <= 0")
        if "decay" in given:
            check.check_non_negative("decay", given["decay"], "step sizes >= 0")


def _every_channel(gate: torch.Tensor | None, per_head: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor:
    """The log gate as [B, T, H, K], at least so large that differences of its sums keep what follows."""
    wide = check.accumulation_dtype(q)
    least = _MIN_LOG_DECAY[wide]
    if gate is not None:
        gate = gate.to(wide).clamp(min=least)
        return gate if gate.dim() == 4 else gate.unsqueeze(-1).expand(q.shape)
    if per_head is not None:
        return per_head.clamp(min=least).view(1, 1, -1, 1).expand(q.shape)
    return torch.zeros((), device=q.device, dtype=wide).expand(q.shape)


def _angles(
    q: torch.Tensor, theta: torch.Tensor | None, base: float, cu_seqlens: torch.Tensor | None,
    sp: SequenceParallel | None,
) -> torch.Tensor:  # fmt: skip
    """Angles [B, T, H, K/2] or what broadcasts to it, float32 at least."""
    _, T, _, K = q.shape
    if K % 2:
        raise ValueError(f"q: feature_map.rope expected an even K, got {K}")
    if theta is not None:
        return _running_sum(theta, cu_seqlens, sp)
    start = 0 if sp is None else sp.shard_range(T)[0]
    position = torch.arange(start, start + T, device=q.device)
    if cu_seqlens is not None:
        position = position - cu_seqlens[torch.searchsorted(cu_seqlens, position, right=True) - 1]
    inverse = base ** (-torch.arange(0, K, 2, device=q.device, dtype=torch.float64) / K)
    return (position.unsqueeze(-1) * inverse).view(1, T, 1, K // 2)


def _running_sum(theta: torch.Tensor, cu_seqlens: torch.Tensor | None, sp: SequenceParallel | None) -> torch.Tensor:
    if cu_seqlens is not None:
        raise NotImplementedError("feature_map.rope(data_dependent=True) with cu_seqlens is not there yet")
    total = theta.to(torch.promote_types(theta.dtype, torch.float32)).cumsum(1)
    if sp is None or sp.world_size == 1:
        return total
    mine = total[:, -1:] if total.shape[1] else total.new_zeros(theta.shape[0], 1, *theta.shape[2:])
    before = exchange(mine.transpose(1, 2).contiguous(), None, None, sp)
    return total + before.transpose(1, 2)


def _rotate(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    even, odd = x[..., ::2], x[..., 1::2]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)
