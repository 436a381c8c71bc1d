"""Models of `flexsp.grammar` with objectives, their inputs and token loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import logsigmoid, normalize

from flexsp.grammar import FlexLinearAttention, decay, feature_map, transition
from flexsp.testing.compare import relative_error
from tests.harness.grammar import angles, rotated

H, K, V, R = 2, 4, 6, 3
EXACT = 1e-11
Tensors = dict[str, torch.Tensor]
SHARED = ("A", "mimo_x")  # by all tokens
TRAPEZOID: dict[str, Any] = {"data_dependent": True, "discretization": "trapezoidal"}
ROPE = feature_map.rope(data_dependent=True)
READ, WRITE = transition.preconditioned_gd(eps=0.1), transition.preconditioned_gd(at="write", eps=0.1)


def model(d: Any, t: Any, f: Any = None) -> FlexLinearAttention:
    return FlexLinearAttention(decay=d, features=f, transition=t)


MODELS: dict[str, Callable[[], FlexLinearAttention]] = {
    "spectral": lambda: model(decay.gated(), transition.spectral()),
    "spectral, steps": lambda: model(decay.exponential(), transition.spectral()),
    "read": lambda: model(decay.gated(), READ),
    "read, no decay": lambda: model(decay.none(), READ),
    "read, a gate a channel": lambda: model(decay.gated(per_head=False), READ),
    "read, steps": lambda: model(decay.exponential(), READ, feature_map.rope()),
    "write": lambda: model(decay.gated(), WRITE),
    "write, a gate a channel": lambda: model(decay.gated(per_head=False), WRITE),
    "write, rows": lambda: model(
        decay.exponential(), transition.preconditioned_gd(at="write", eps=0.1, mimo_rank=R)
    ),
    "rows": lambda: model(decay.gated(), transition.one_step_gd(mimo_rank=R)),
    "rows, fixed": lambda: model(decay.fixed(), transition.one_step_gd(mimo_rank=R), feature_map.elu()),
    "trapezoid": lambda: model(decay.exponential(**TRAPEZOID), transition.one_step_gd()),
    "mamba3": lambda: model(decay.exponential(**TRAPEZOID), transition.one_step_gd(mimo_rank=R), ROPE),
    "trapezoid, gates": lambda: model(decay.gated(discretization="trapezoidal"), transition.one_step_gd()),
    "trapezoid, gates, rows": lambda: model(
        decay.gated(discretization="trapezoidal"), transition.one_step_gd(mimo_rank=R), ROPE
    ),
    "trapezoid, a gate a channel, read": lambda: model(
        decay.gated(per_head=False, discretization="trapezoidal"), READ
    ),
    "mamba3, a gate a channel": lambda: model(
        decay.gated(per_head=False, discretization="trapezoidal"), transition.one_step_gd(), feature_map.rope()
    ),
    "trapezoid, read": lambda: model(decay.exponential(**TRAPEZOID), READ),
    "mamba3, read": lambda: model(
        decay.exponential(**TRAPEZOID), transition.preconditioned_gd(eps=0.1, mimo_rank=R), ROPE
    ),
    "difference": lambda: model(decay.gated(), transition.temporal_difference()),
    "difference, bootstrapped": lambda: model(decay.gated(per_head=False), transition.temporal_difference(0.7)),
    "difference, rope": lambda: model(decay.exponential(), transition.temporal_difference(0.7), ROPE),
    "information": lambda: model(decay.gated(), transition.information(eps=0.3)),
    "information, a gate a channel": lambda: model(decay.gated(per_head=False), transition.information()),
    "information, no decay": lambda: model(decay.none(), transition.information()),
    "information, steps": lambda: model(decay.exponential(), transition.information()),
    "steps of a token": lambda: model(decay.gated(), transition.delta_rule(steps=2)),
    "steps, a gate a channel": lambda: model(decay.gated(per_head=False), transition.delta_rule(3), feature_map.elu()),
    "steps, no decay": lambda: model(decay.none(), transition.delta_rule(2)),
    "steps, exponential": lambda: model(decay.exponential(), transition.delta_rule(2)),
    "steps, fixed": lambda: model(decay.fixed(), transition.delta_rule(2)),
    "delta rows": lambda: model(decay.gated(), transition.delta_rule(mimo_rank=R)),
    "delta rows, a gate a channel": lambda: model(
        decay.gated(per_head=False), transition.delta_rule(mimo_rank=2), feature_map.elu()
    ),
    "delta rows, no decay": lambda: model(decay.none(), transition.delta_rule(mimo_rank=2)),
    "delta rows, rope": lambda: model(decay.exponential(), transition.delta_rule(mimo_rank=2), ROPE),
    "contrastive": lambda: model(decay.gated(), transition.contrastive(block=5)),
    "contrastive, large blocks": lambda: model(
        decay.gated(per_head=False), transition.contrastive(block=64, temperature=0.5)
    ),
    "contrastive, steps": lambda: model(decay.exponential(), transition.contrastive(block=5), feature_map.relu()),
}  # fmt: skip
QUICK = (
    "spectral", "read", "read, steps", "write", "mamba3, read", "difference, bootstrapped", "information",
    "contrastive", "trapezoid, a gate a channel, read", "steps, exponential", "steps, a gate a channel",
    "delta rows", "delta rows, rope",
)  # fmt: skip


def draw(name: str, B: int, T: int, seed: int) -> Tensors:
    return draw_for(MODELS[name](), B, T, seed)


def draw_for(what: FlexLinearAttention, B: int, T: int, seed: int) -> Tensors:
    made = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made, dtype=torch.float64)

    rank = what.transition.rank
    keys = (B, T, H, K) if rank == 1 else (B, T, rank, H, K)
    several = [n] if (n := getattr(what.transition, "steps", 1)) > 1 else []
    found = {"q": normal(*keys), "k": normal(*keys), "v": normal(B, T, *several, H, V)}
    if several:
        found["k"] = normal(B, T, *several, H, K)
    shapes = {"theta": (K // 2,), "psi": (V // 2,), "trap": ()}
    for key in what.inputs:
        if key in shapes:
            found[key] = normal(B, T, H, *shapes[key])
    if what.transition.kind in ("temporal_difference", "information", "contrastive", "delta_rule"):
        found["k"] = normalize(found["k"], dim=-1)
    if "eta" in what.inputs:
        found["eta"] = normal(B, T, H).sigmoid()
    if "beta" in what.inputs:
        found["beta"] = normal(B, T, *several, H).sigmoid()
    if "mimo_x" in what.inputs:
        found["mimo_x"] = normal(H, rank, V)
    if "A" in what.inputs:
        found["A"] = -normal(H).exp()
    if "decay" in what.inputs:
        gates = normal(B, T, H, K) if what.decay.vector else normal(B, T, H)
        found["decay"] = logsigmoid(gates) if what.decay.kind == "gated" else gates.exp()
    return found


def outer(k: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return k.unsqueeze(-1) * x.unsqueeze(-2)


def read(q: torch.Tensor, S: torch.Tensor) -> torch.Tensor:
    return (q.unsqueeze(-1) * S).sum(-2)


def turned(S: torch.Tensor, theta: torch.Tensor, psi: torch.Tensor) -> torch.Tensor:
    """R(theta) S R'(psi)^T, by matrices."""

    def matrix(angle: torch.Tensor) -> torch.Tensor:
        blocks = torch.stack(
            [torch.stack([angle.cos(), -angle.sin()], -1), torch.stack([angle.sin(), angle.cos()], -1)], -2
        )
        n = angle.shape[-1]
        return (torch.eye(n, dtype=S.dtype)[:, None, :, None] * blocks.unsqueeze(-2)).flatten(-2).flatten(-3, -2)

    return matrix(theta) @ S @ matrix(psi).transpose(-1, -2)


def rows_step(what: FlexLinearAttention, x: Tensors, a: torch.Tensor, M: torch.Tensor) -> tuple[Any, Any]:
    trapezoid, t = what.decay.trapezoidal, what.transition
    q, k = (x[key] if t.rank > 1 else x[key].unsqueeze(1) for key in ("q", "k"))  # [B, R, H, K]
    factors = x["mimo_x"].transpose(0, 1) if t.rank > 1 else torch.ones(1, 1, 1, dtype=a.dtype)
    step = x["decay"] if what.decay.kind == "exponential" else torch.ones_like(x["v"][..., 0])
    l = x["trap"].sigmoid() if trapezoid else torch.ones_like(step)
    S, squares = M[..., :K, :V], k.square().sum(1)
    P = M[..., :K, -1] if t.eps is not None else torch.zeros_like(squares)
    if trapezoid:
        before, value = M[..., :K, V : V + t.rank].permute(0, 3, 1, 2), M[..., K, :V].unsqueeze(1)
        S = S + ((1 - l) * step)[..., None, None] * outer(before, factors * value).sum(1)
        P = P + ((1 - l) * step)[..., None] * before.square().sum(1)
    P = a * P + (l * step)[..., None] * squares
    writes = k
    if t.at == "write":
        writes = x["eta"][:, None, :, None] * k / (P + t.eps).unsqueeze(1)
    S = a.unsqueeze(-1) * S + (l * step)[..., None, None] * outer(writes, factors * x["v"].unsqueeze(1)).sum(1)
    reads = q / (P + t.eps).unsqueeze(1) if t.eps is not None and t.at == "read" else q
    o = K**-0.5 * read(reads, S.unsqueeze(1))
    columns = [S] + ([k.permute(0, 2, 3, 1)] if trapezoid else []) + ([P.unsqueeze(-1)] if t.eps is not None else [])
    new = torch.cat(columns, -1)
    if trapezoid:
        row = torch.cat([x["v"], torch.zeros(*x["v"].shape[:-1], new.shape[-1] - V, dtype=a.dtype)], -1)
        new = torch.cat([new, row.unsqueeze(-2)], -2)
    return (o if t.rank > 1 else o.squeeze(1)), new


def spectral_step(what: FlexLinearAttention, x: Tensors, a: torch.Tensor, M: torch.Tensor) -> tuple[Any, Any]:
    v = x["v"] * x["decay"].unsqueeze(-1) if what.decay.kind == "exponential" else x["v"]
    S = a.unsqueeze(-1) * turned(M, x["theta"], x["psi"]) + outer(x["k"], v)
    return K**-0.5 * read(x["q"], S), S


def error_step(what: FlexLinearAttention, x: Tensors, a: torch.Tensor, M: torch.Tensor) -> tuple[Any, Any]:
    """The information filter and temporal differences: both correct what the decayed state predicts."""
    k, v = x["k"], x["v"]
    v = v * x["decay"].unsqueeze(-1) if what.decay.kind == "exponential" else v
    S, kept = a.unsqueeze(-1) * M[..., :V], M[..., V]
    if what.transition.kind == "information":
        kept = a * kept
        p = 1 / (kept + what.transition.eps)
        gain = x["eta"].unsqueeze(-1) * p * k / (1 + (p * k * k).sum(-1, keepdim=True))
        S, kept = S + outer(gain, v - read(k, S)), kept + k * k
    else:
        S = S + outer(x["eta"].unsqueeze(-1) * kept, v + what.transition.discount * read(k, S) - read(kept, S))
        kept = k
    return K**-0.5 * read(x["q"], S), torch.cat([S, kept.unsqueeze(-1)], -1)


def contrastive_step(what: FlexLinearAttention, x: Tensors, a: torch.Tensor, M: torch.Tensor) -> tuple[Any, Any]:
    """`seen` are the block's values so far, `entered` the state before its first token."""
    seen, logits = x["seen"], [torch.zeros_like(a[..., 0])]
    logits += [(read(x["k"], x["entered"]) * v).sum(-1) / what.transition.temperature for v in seen]
    p = torch.stack(logits, -1).softmax(-1)
    vbar = sum((p[..., j + 1, None] * v for j, v in enumerate(seen)), torch.zeros_like(x["v"]))
    step = x["decay"].unsqueeze(-1) if what.decay.kind == "exponential" else 1
    S = a.unsqueeze(-1) * M + outer(x["eta"].unsqueeze(-1) * x["k"], step * (x["v"] - vbar))
    return K**-0.5 * read(x["q"], S), S


STEPS: dict[str, Callable[..., tuple[Any, Any]]] = {
    "one_step_gd": rows_step, "preconditioned_gd": rows_step, "spectral": spectral_step,
    "temporal_difference": error_step, "information": error_step,
    "contrastive": contrastive_step,
}  # fmt: skip


def mapped(what: FlexLinearAttention, x: Tensors, key: str) -> torch.Tensor:
    """q or k of one document with features."""
    y, kind = x[key], what.features.kind
    if kind == "elu":
        return torch.where(y > 0, y + 1, y.exp())
    if kind == "relu":
        return y * (y > 0)
    if kind != "rope":
        return y
    angle = x["angle"][:, : y.shape[1]]
    angle = angle.unsqueeze(2).expand(*y.shape[:-1], K // 2) if y.dim() == 5 else angle
    return rotated(y, angle)


def token_loop(
    what: FlexLinearAttention, x: Tensors, initial: torch.Tensor, bounds: list[int] | None
) -> tuple[Any, Any]:
    T = x["v"].shape[1]
    step, outputs, finals = STEPS[what.transition.kind], [], []
    for n, (begin, end) in enumerate([(0, T)] if bounds is None else zip(bounds, bounds[1:], strict=False)):
        M = initial if bounds is None else initial[n : n + 1]
        here = {key: y if key in SHARED else y[:, begin:end] for key, y in x.items()}
        rope = what.features.kind == "rope"
        if rope:
            angle = angles(x, begin, end)
            if what._keeps_angle:
                M, angle = M[..., :-1], angle + M[..., : K // 2, -1].unsqueeze(1)
        of_rope = {"angle": angle} if rope else {}
        here |= {key: mapped(what, here | of_rope, key) for key in ("q", "k")}
        entered = M
        for t in range(end - begin):
            now = {key: y if key in SHARED else y[:, t] for key, y in here.items()}
            first = t - t % getattr(what.transition, "block", 1)
            entered = M if t == first else entered
            now |= {"entered": entered, "seen": [here["v"][:, j] for j in range(first, t + 1)]}
            a = torch.ones(M.shape[0], H, 1, dtype=M.dtype)
            if what.decay.kind == "gated":
                a = now["decay"].exp() if what.decay.vector else now["decay"].exp().unsqueeze(-1)
            elif what.decay.kind == "exponential":
                a = (now["decay"] * now["A"]).exp().unsqueeze(-1)
            elif what.decay.kind == "fixed":
                a = a * torch.tensor([1 - 2.0 ** (-5 - h) for h in range(H)], dtype=M.dtype)[:, None]
            o, M = step(what, now, a, M)
            outputs.append(o)
        if rope and what._keeps_angle:
            column = angle[:, -1] - 2 * math.pi * (angle[:, -1] / (2 * math.pi)).detach().round()
            column = torch.cat([column, column.new_zeros(*column.shape[:-1], M.shape[-2] - K // 2)], -1)
            M = torch.cat([M, column.unsqueeze(-1)], -1)
        elif rope:
            rows = M[..., :K, :].mT
            back = -angle[:, -1].unsqueeze(-2).expand(*rows.shape[:-1], -1)
            M = torch.cat([rotated(rows, back).mT, M[..., K:, :]], -2)
        finals.append(M)
    return torch.stack(outputs, 1), torch.cat(finals)


def draw_state(name: str, N: int, seed: int) -> torch.Tensor:
    return state_for(MODELS[name](), N, seed)


def state_for(what: FlexLinearAttention, N: int, seed: int) -> torch.Tensor:
    """Initial states with sums of squares above 0; what is never read is 0."""
    rows, columns = what.rows_and_columns(K, V)
    made = torch.Generator().manual_seed(seed)
    state = torch.randn(N, H, rows, columns, dtype=torch.float64, generator=made)
    if getattr(what.transition, "eps", None) is not None:
        sums = state[..., :K, columns - 1 - what._keeps_angle]
        sums.abs_()
    state[..., K:, V:] = 0
    if what._keeps_angle:
        state[..., K // 2 :, -1] = 0
    return state


def call_of(name: str, bounds: list[int] | None = None) -> Callable[..., Any]:
    cu, made = None if bounds is None else torch.tensor(bounds), MODELS[name]()
    return lambda values, state: made(**values, initial_state=state, output_final_state=True, cu_seqlens=cu)


def on_ranks(
    sp: Any, name: str, lengths: list[int], bounds: list[int] | None, seed: int, dtype: torch.dtype = torch.float64
) -> Tensors:
    """This rank's outputs and gradients, its share of those that ranks add up, and its final states."""
    T, N = sum(lengths), len(bounds) - 1 if bounds else 2
    x, initial = draw(name, 1 if bounds else 2, T, seed), draw_state(name, N, seed)
    sp.set_lengths(lengths)
    start, stop, _ = sp.shard_range(lengths[sp.rank])
    leaves = {key: (y if key in SHARED else y[:, start:stop]).to(dtype, copy=True) for key, y in x.items()}
    leaves = {key: y.requires_grad_() for key, y in leaves.items()}
    leaf = initial.to(dtype, copy=True).requires_grad_() if bounds or sp.is_first else None
    cu = None if bounds is None else torch.tensor(bounds)
    o, final = MODELS[name]()(**leaves, sp=sp, initial_state=leaf, output_final_state=True, cu_seqlens=cu)
    loss = (o * cotangent(o.shape, T, seed)[:, start:stop]).sum()
    if final is not None:
        loss = loss + (final * cotangent(final.shape, final.shape[1], seed)).sum()
    loss.backward()
    found = {"o": o.detach(), "final": final, "initial": None if leaf is None else leaf.grad}
    return {key: y.detach() for key, y in (found | {k: y.grad for k, y in leaves.items()}).items() if y is not None}


def cotangent(shape: Any, T: int, seed: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(shape[0], T, *shape[2:], dtype=torch.float64, generator=made)


def compare(parts: list[Tensors], whole: Tensors, bound: float) -> None:
    """What ranks have, put together, is what one has."""
    for key, want in whole.items():
        found = [part[key] for part in parts if key in part]
        of_tokens = key not in (*SHARED, "final", "initial")
        error = relative_error(torch.cat(found, 1) if of_tokens else torch.stack(found).sum(0), want)
        assert error < bound, (key, error)


def delta_step(what: FlexLinearAttention, x: Tensors, a: torch.Tensor, M: torch.Tensor) -> tuple[Any, Any]:
    S, n = a.unsqueeze(-1) * M, what.transition.steps
    if what.transition.rank > 1:
        v = x["v"] * x["decay"].unsqueeze(-1) if what.decay.kind == "exponential" else x["v"]
        for j, k in enumerate(x["k"].unbind(1)):
            S = S + outer(x["beta"].unsqueeze(-1) * k, x["mimo_x"][:, j] * v - read(k, S))
        return K**-0.5 * read(x["q"], S.unsqueeze(1)), S
    for k, v, beta in zip(*(x[key].unbind(1) if n > 1 else [x[key]] for key in ("k", "v", "beta")), strict=True):
        v = v * x["decay"].unsqueeze(-1) if what.decay.kind == "exponential" else v
        S = S + outer(beta.unsqueeze(-1) * k, v - read(k, S))
    return K**-0.5 * read(x["q"], S), S


STEPS["delta_rule"] = delta_step
