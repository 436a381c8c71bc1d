"""Models of `flexsp.grammar` whose angles are data, with inputs, and a float64 loop over tokens.

The loop turns its state, not queries and keys, so that it adds up no angles.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from flexsp.grammar import FlexLinearAttention, decay, feature_map, transition
from flexsp.testing.compare import relative_error
from tests.harness.grammar import rotated
from tests.harness.objectives import TRAPEZOID

__all__ = ["COMPILED", "MODELS", "Case", "H", "Tensors", "errors"]

H, K, V, R, DISCOUNT, BLOCK = 2, 8, 8, 2, 0.5, 5
ROPE = feature_map.rope(data_dependent=True)
Tensors = dict[str, Tensor]


def _local(i: int, j: int, h: Any) -> Any:
    """A mask with a term of i: the engine for scalar decays does not run it."""
    return torch.where(i >= j, torch.exp(-0.05 * (i - j)), 0.0) * h[i] * h[j]


def _made(d: Any, t: Any, **others: Any) -> FlexLinearAttention:
    return FlexLinearAttention(d, ROPE, t, **others)


MODELS = {
    "one step": _made(decay.gated(), transition.one_step_gd()),
    "rows": _made(decay.gated(), transition.one_step_gd(mimo_rank=R)),
    "trapezoid": _made(decay.exponential(**TRAPEZOID), transition.one_step_gd()),
    "rows, trapezoid": _made(decay.exponential(**TRAPEZOID), transition.one_step_gd(mimo_rank=R)),
    "mask": _made(decay.gated(), transition.one_step_gd(), custom_mask=_local),
    "delta": _made(decay.gated(), transition.delta_rule()),
    "delta, no decay": _made(decay.none(), transition.delta_rule()),
    "delta, steps": _made(decay.exponential(), transition.delta_rule()),
    "delta rows": _made(decay.exponential(), transition.delta_rule(mimo_rank=R)),
    "delta, mask": _made(decay.gated(), transition.delta_rule(), custom_mask=_local),
    "difference": _made(decay.gated(), transition.temporal_difference(DISCOUNT)),
    "contrastive": _made(decay.gated(), transition.contrastive(block=BLOCK)),
}
COMPILED = [name for name in MODELS if "delta" in name or name in ("mask", "difference")]  # in kernels


def draw(name: str, T: int, seed: int, strong: bool = False) -> Tensors:
    """In bfloat16 what is rounded to it. strong: with log gates of -1.5 on average, instead of -.05."""
    made, model = torch.Generator().manual_seed(seed), MODELS[name]

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, T, *shape, generator=made)

    rows = (R,) if model.transition.rank > 1 else ()
    x = {"q": normal(*rows, H, K), "k": normal(*rows, H, K), "v": normal(H, V), "theta": 0.5 * normal(H, K // 2)}
    if model.transition.kind in ("delta_rule", "temporal_difference", "contrastive"):
        x["k"] = normalize(x["k"], dim=-1)
    x |= {name: normal(H).sigmoid() for name in ("beta", "eta", "trap") if name in model.inputs}
    x |= {"h": 0.5 + normal(H).sigmoid()} if model.mask is not None else {}
    x |= {"mimo_x": torch.randn(H, R, V, generator=made)} if rows else {}
    if model.decay.kind == "gated":
        x["decay"] = logsigmoid(normal(H) + (-1.2 if strong else 3))
    elif model.decay.kind == "exponential":
        x |= {"decay": 0.1 * normal(H).sigmoid(), "A": -(30.0 if strong else 1.0) * torch.ones(H)}
    return x | {name: x[name].bfloat16() for name in ("q", "k", "v")}


def by_token(name: str, x: Tensors, M: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and the last state of one text, of inputs in float64 and the first state M [1, H, K + rows, ...]."""
    model, outputs, masked = MODELS[name], [], MODELS[name].mask is not None
    kind, trapezoid = model.transition.kind, model.decay.trapezoidal
    S, before = M[..., :K, :V], M[..., :K, V:].transpose(-1, -2).transpose(1, 2)  # [1, rows, H, K]
    value = M[..., K, :V] if trapezoid else None
    steps = model.decay.kind == "exponential"
    entered = torch.zeros_like(S)
    for t in range(x["v"].shape[1]):
        q, k, v, theta = (x[key][:, t] for key in ("q", "k", "v", "theta"))
        q, k = (y if y.dim() == 4 else y.unsqueeze(1) for y in (q, k))
        step = x["decay"][:, t] if steps else torch.ones_like(v[..., 0])
        a = (step * x["A"] if steps else x["decay"][:, t] if "decay" in x else 0 * step).exp()
        a = a * (2.718281828459045**-0.05 if masked else 1.0)
        column = (x["h"][:, t] if masked else 1.0) * step
        factors = x["mimo_x"].transpose(0, 1) if "mimo_x" in x else torch.ones_like(k[..., :1])
        if trapezoid:
            assert value is not None
            share = x["trap"][:, t].sigmoid()
            earlier = (before.unsqueeze(-1) * (factors * value.unsqueeze(1)).unsqueeze(-2)).sum(1)
            S, column = S + ((1 - share) * step)[..., None, None] * earlier, share * step
        if kind == "contrastive":  # a block's tokens expect values of the state before it
            entered = S if t % BLOCK == 0 else entered
            entered = _turned(entered, -theta)
        S = _turned(a[..., None, None] * S, -theta)
        write = column[..., None, None] * v.unsqueeze(-2)
        if kind == "contrastive":
            seen = x["v"][:, t - t % BLOCK : t + 1]
            logits = ((k[:, 0].unsqueeze(-1) * entered).sum(-2).unsqueeze(1) * seen).sum(-1)  # [1, tokens, H]
            shares = torch.cat([torch.zeros_like(logits[:, :1]), logits], 1).softmax(1)[:, 1:]
            write = (v - (shares.unsqueeze(-1) * seen).sum(1)).unsqueeze(-2)
            S = S + x["eta"][:, t, :, None, None] * k[:, 0].unsqueeze(-1) * write
        elif kind == "one_step_gd":
            S = S + column[..., None, None] * (k.unsqueeze(-1) * (factors * v.unsqueeze(1)).unsqueeze(-2)).sum(1)
        elif kind == "delta_rule":
            rate, values = x["beta"][:, t, :, None, None], (factors * v.unsqueeze(1)).unsqueeze(-2)
            for j in range(k.shape[1]):
                key = k[:, j].unsqueeze(-1)
                S = S + rate * key * (column[..., None, None] * values[:, j] - (key * S).sum(-2, keepdim=True))
        else:
            p = rotated(before[:, 0], -theta)
            r = p - DISCOUNT * k[:, 0]
            rate = x["eta"][:, t, :, None, None]
            S = S + rate * p.unsqueeze(-1) * (write - (r.unsqueeze(-1) * S).sum(-2, keepdim=True))
        row = x["h"][:, t, :, None] if masked else 1.0
        outputs.append(K**-0.5 * row * (q.unsqueeze(-1) * S.unsqueeze(1)).sum(-2))
        before, value = k, v
        if kind == "temporal_difference" or trapezoid:
            M = torch.cat([S, k.permute(0, 2, 3, 1)], -1)
            if trapezoid:
                last = torch.nn.functional.pad(v, (0, M.shape[-1] - V))
                M = torch.cat([M, last.unsqueeze(-2)], -2)
        else:
            M = S
    o = torch.stack(outputs, 1) if outputs else x["v"].unsqueeze(2)
    return o if model.transition.rank > 1 else o.squeeze(2), M


def _turned(S: Tensor, angle: Tensor) -> Tensor:
    return rotated(S.transpose(-1, -2), angle.unsqueeze(-2)).transpose(-1, -2)


class Case:
    """Inputs, first states, and weights of outputs and last states."""

    def __init__(
        self, name: str, T: int, seed: int, bounds: list[int] | None = None, strong: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        self.name, self.T, self.bounds = name, T, bounds
        self.x = {key: y.to(device) for key, y in draw(name, T, seed, strong).items()}
        made = torch.Generator().manual_seed(seed + 1)
        rows = (R,) if MODELS[name].transition.rank > 1 else ()
        shape = (1 if bounds is None else len(bounds) - 1, H, *MODELS[name].rows_and_columns(K, V))
        self.do = torch.randn(1, T, *rows, H, V, generator=made).bfloat16().to(device)
        self.start, self.dfinal = (torch.randn(shape, generator=made).to(device) for _ in range(2))
        self.dfinal[..., K:, V:] = 0.0  # holds nothing

    def _of_tokens(self, x: Tensor) -> bool:
        return x.dim() > 1 and x.shape[1] == self.T

    def exact(self) -> Tensors:
        leaves = {key: y.double().requires_grad_() for key, y in {**self.x, "start": self.start}.items()}
        loss = 0.0
        bounds = self.bounds or [0, self.T]
        for n, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
            part = {key: y[:, begin:end] if self._of_tokens(y) else y for key, y in leaves.items()}
            o, final = by_token(self.name, part, leaves["start"][n : n + 1])
            loss = loss + (final * self.dfinal[n : n + 1]).sum()
            loss = loss + ((o * self.do[:, begin:end]).sum() if end > begin else 0.0)
        return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))

    def found(self, dtype: torch.dtype | None = None, lengths: list[int] | None = None, sp: Any = None) -> Tensors:
        """Gradients of this rank's part; `dtype` None leaves that of inputs."""
        begin, end, first, last = 0, self.T, True, True
        if sp is not None and lengths is not None:
            sp.set_lengths(lengths)
            begin, end, _ = sp.shard_range(lengths[sp.rank])
            first, last = (sp.is_first, sp.is_last) if self.bounds is None else (True, True)
        kinds = {key: y if dtype is None else y.to(dtype) for key, y in {**self.x, "start": self.start}.items()}
        leaves = {
            key: (y[:, begin:end] if self._of_tokens(y) else y).clone().requires_grad_()
            for key, y in kinds.items()
        }
        given = {key: y for key, y in leaves.items() if key != "start"}
        o, final = MODELS[self.name](
            **given, initial_state=leaves["start"] if first else None, output_final_state=True, sp=sp or False,
            cu_seqlens=None if self.bounds is None else torch.tensor(self.bounds),
        )  # fmt: skip
        loss = (o.double() * self.do[:, begin:end]).sum()
        if final is not None and last:
            here = torch.ones(len(final), dtype=torch.bool)
            if self.bounds is not None and sp is not None:
                stops = torch.tensor(self.bounds)[1:]
                here = (stops > begin) & (stops <= end)
            loss = loss + (final.double() * self.dfinal)[here].sum()
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        return {key: (0 * leaves[key] if y is None else y).double() for key, y in zip(leaves, grads, strict=True)}


def errors(found: Tensor, want: Tensor) -> tuple[float, float]:
    return relative_error(found, want), relative_error(found.sum(1), want.sum(1))
