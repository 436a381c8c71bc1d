"""Calls of `mamba3` and their token loop."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch.nn.functional import softplus

from flexsp.comm.group import SequenceParallel
from flexsp.ops import mamba3, recurrent_mamba3
from flexsp.testing.compare import WIDE, check_op, relative_error
from flexsp.testing.oracles import token_loop
from flexsp.testing.ranks import run_ranks

TOKENS = ("x", "dt", "A", "B", "C", "trap", "angles")
KEPT_WIDE = (*WIDE, "trap", "angles", "B_bias", "C_bias", "mimo_x")
H, P = 4, 5
Tensors = dict[str, Any]
# R, groups, K, pairs of channels that turn, whether these are neighbours
CASES: dict[str, tuple[int, int, int, int, bool]] = {
    "siso": (0, 1, 8, 2, True), "siso, groups": (0, 2, 7, 3, True), "siso, halves": (0, 2, 12, 3, False),
    "mimo": (3, 1, 8, 2, False),
    "mimo, groups": (2, 4, 6, 3, True), "mimo of one": (1, 2, 6, 3, False),
}  # fmt: skip


def draw(case: str, batch: int, T: int, states: int = 0, seed: int | None = None) -> Tensors:
    """Arguments in float64; D, biases and `mimo_x` are parameters."""
    made = torch.Generator().manual_seed(random.randrange(2**31) if seed is None else seed)
    R, G, K, S, _ = CASES[case]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=made, dtype=torch.float64)

    rows = (R,) if R else ()
    found: Tensors = {
        "x": normal(batch, T, H, P), "dt": softplus(normal(batch, T, H)), "A": -softplus(normal(batch, T, H) - 1),
        "B": normal(batch, T, *rows, G, K), "C": normal(batch, T, *rows, G, K), "trap": normal(batch, T, H),
        "angles": normal(batch, T, H, S), "D": normal(H), "B_bias": normal(H, *rows, K), "C_bias": normal(H, *rows, K),
    }  # fmt: skip
    if R:
        found["mimo_x"] = normal(H, R, P)
    if states:
        shapes = (states, H, S), (states, H, K, P), (states, max(R, 1), H, K), (states, H, P)
        found["initial_state"] = tuple(normal(*shape) for shape in shapes)
    return found


def turned(z: torch.Tensor, angle: torch.Tensor, pairwise: bool) -> torch.Tensor:
    """z [N, R, H, K] with pairs of channels turned by angle [N, H, S]."""
    channels, half = list(z.unbind(-1)), z.shape[-1] // 2
    for s in range(angle.shape[-1]):
        i, j = (2 * s, 2 * s + 1) if pairwise else (s, s + half)
        c, sn = torch.cos(angle[..., s])[:, None], torch.sin(angle[..., s])[:, None]
        channels[i], channels[j] = z[..., i] * c - z[..., j] * sn, z[..., i] * sn + z[..., j] * c
    return torch.stack(channels, -1)


def loop(x: Any, dt: Any, A: Any, B: Any, C: Any, trap: Any, angles: Any, params: Any, pairwise: bool, state: Any,
         rounded: Any) -> Any:  # fmt: skip
    """Token by token, y [B, T, R, H, P] and the state. With `rounded` every product is written once, with the weight
    that the next token gives it, and what products read is rounded: what sound chunks round."""
    D, B_bias, C_bias, mimo_x = params
    heads = torch.arange(H) // (H // B.shape[3])
    angle, h, k_old, v_old = state
    y = []
    for t in range(x.shape[1]):
        angle = angle + torch.pi * torch.tanh(angles[:, t]) * dt[:, t, :, None]
        k = turned(B[:, t][:, :, heads] + B_bias.transpose(0, 1), angle, pairwise)
        q = turned(C[:, t][:, :, heads] + C_bias.transpose(0, 1), angle, pairwise)
        share, step = 1 / (1 + torch.exp(-trap[:, t])), dt[:, t]
        alpha = torch.exp((step * A[:, t]).clamp(min=-104))
        values, old = (torch.einsum("bhp,hrp->brhp", v, mimo_x) for v in (x[:, t], v_old))
        beta, gamma = (1 - share) * step * alpha, share * step
        if rounded is None:
            before, own = (torch.einsum("brhk,brhp->bhkp", *pair) for pair in ((k_old, old), (k, values)))
            h = alpha[..., None, None] * h + beta[..., None, None] * before + gamma[..., None, None] * own
            out = torch.einsum("brhk,bhkp->brhp", q, h)
        else:
            following = t + 1 < x.shape[1]
            eta = ((1 - torch.sigmoid(trap)) * dt)[:, t + 1] if following else 0 * step
            if t == 0:
                h = h + ((1 - share) * step)[..., None, None] * torch.einsum("brhk,brhp->bhkp", k_old, old)
            written = rounded(k * (gamma + eta)[:, None, :, None])
            h = alpha[..., None, None] * h + torch.einsum("brhk,brhp->bhkp", written, rounded(values))
            twice = torch.einsum("bihk,bjhk,bjhp->bihp", q, k, values)
            out = torch.einsum("brhk,bhkp->brhp", rounded(q), h) - eta[:, None, :, None] * twice
        y.append(out + D[:, None] * values)
        k_old, v_old = k, x[:, t]
    out = torch.stack(y, 1) if y else x.new_zeros(x.shape[0], 0, mimo_x.shape[1], H, P)
    return out, (angle, h, k_old, v_old)


def oracle(x: Any, dt: Any, A: Any, B: Any, C: Any, trap: Any, angles: Any, D: Any = None, B_bias: Any = None,
           C_bias: Any = None, mimo_x: Any = None, rotate_pairwise: bool = True, initial_state: Any = None,
           cu_seqlens: Any = None, engine: Any = token_loop) -> Any:  # fmt: skip
    wide = torch.promote_types(x.dtype, torch.float32)
    tokens = [z.to(wide) for z in (x, dt, A, B, C, trap, angles)]
    D, B_bias, C_bias = (None if z is None else z.to(wide) for z in (D, B_bias, C_bias))
    mimo = mimo_x is not None
    if not mimo:
        tokens[3:5] = (z.unsqueeze(2) for z in tokens[3:5])
        B_bias, C_bias = (None if z is None else z.unsqueeze(1) for z in (B_bias, C_bias))
    one, (R, K, S) = tokens[0].new_ones, (tokens[3].shape[2], B.shape[-1], angles.shape[-1])
    D, B_bias, C_bias = (0 * one(shape) if z is None else z for z, shape in (
        (D, (H,)), (B_bias, (H, R, K)), (C_bias, (H, R, K))))  # fmt: skip
    params = D, B_bias, C_bias, mimo_x.to(wide) if mimo else one(H, 1, P)
    N = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    if initial_state is None:
        initial_state = tuple(0 * one(N, *shape) for shape in ((H, S), (H, K, P), (R, H, K), (H, P)))
    rounded = None if engine is token_loop else (lambda z: z.to(x.dtype).to(wide))
    spans = [(slice(None), 0, x.shape[1])]
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        spans = [(slice(n, n + 1), a, b) for n, (a, b) in enumerate(zip(bounds, bounds[1:], strict=False))]
    parts = [
        loop(*(z[:, a:b] for z in tokens), params, rotate_pairwise, [z[n] for z in initial_state], rounded)
        for n, a, b in spans
    ]
    y, states = torch.cat([y for y, _ in parts], 1), [torch.cat(z) for z in zip(*(s for _, s in parts), strict=True)]
    return (y if mimo else y.squeeze(2)).to(x.dtype), on_circle(states)


def on_circle(state: Any) -> Any:
    """Of a state's angle its sine and cosine, which whole turns do not change."""
    return torch.stack([state[0].sin(), state[0].cos()]), *state[1:]


def call(op: Any, **given: Any) -> Any:
    y, state = op(**given)
    return (y, None) if state is None else (y, on_circle(state))


def options(case: str) -> dict[str, bool]:
    return {} if CASES[case][4] else {"rotate_pairwise": False}


OPS = mamba3, recurrent_mamba3


def compare(op: Any, case: str, inputs: Tensors, dtype: torch.dtype, **others: Any) -> None:
    how = options(case)
    check_op(
        lambda **x: call(op, **x, **how), lambda **x: oracle(**x, **how), inputs, dtype=dtype, wide=KEPT_WIDE, **others
    )  # fmt: skip


def part(inputs: Tensors, at: slice) -> Tensors:
    return {key: x[:, at] if key in TOKENS else x for key, x in inputs.items()}


def flat(outputs: Any) -> list[torch.Tensor]:
    return [outputs[0], *(outputs[1] or ())]


def leaves(inputs: Tensors) -> Tensors:
    def leaf(x: Any) -> Any:
        return tuple(leaf(z) for z in x) if isinstance(x, tuple) else x.detach().clone().requires_grad_()

    return {key: leaf(x) for key, x in inputs.items()}


def gradients(outputs: Any, inputs: Tensors, cotangents: list[torch.Tensor]) -> Tensors:
    names = {f"{key}{i}": z for key, x in inputs.items() for i, z in enumerate(x if isinstance(x, tuple) else (x,))}
    found = torch.autograd.grad(flat(outputs), list(names.values()), cotangents)
    return dict(zip(names, found, strict=True))


SHARDS = {
    "uneven": ((30, 0, 41, 4), None),
    "documents": ((30, 0, 41, 4), (0, 0, 12, 50, 50, 75)),
    "the first and last have none": ((0, 40, 35, 0), None),
    "one rank has all": ((0, 75, 0, 0), None),
    "documents that end with shards": ((20, 20, 0, 35), (0, 20, 40, 75, 75)),
}


def whole_case(case: str, kind: str, seed: int) -> tuple[Tensors, list[torch.Tensor], dict[str, Any]]:
    """Inputs of all ranks, cotangents of the outputs, and the boundaries."""
    _, bounds = SHARDS[kind]
    batch, n = (2, 2) if bounds is None else (1, len(bounds) - 1)
    inputs, made = draw(case, batch, 75, states=n, seed=seed), torch.Generator().manual_seed(seed + 1)
    R, state = CASES[case][0], inputs["initial_state"]
    shapes = [(batch, 75, *((R,) if R else ()), H, P), (2, *state[0].shape), *(z.shape for z in state[1:])]
    cotangents = [torch.randn(shape, generator=made, dtype=torch.float64) for shape in shapes]
    return inputs, cotangents, {} if bounds is None else {"cu_seqlens": torch.tensor(bounds)}


def over_ranks(sp: SequenceParallel, seed: int, runs: list[Any], dtype: torch.dtype) -> dict[Any, Any]:
    results = {}
    for case, kind, with_state in runs:
        inputs, cotangents, cu = whole_case(case, kind, seed)
        lengths, start = SHARDS[kind][0], sum(SHARDS[kind][0][: sp.rank])
        mine = part(inputs, slice(start, start + lengths[sp.rank]))
        mine = leaves({key: tuple(z.to(dtype) for z in x) if isinstance(x, tuple) else x.to(dtype)
                       for key, x in mine.items()})  # fmt: skip
        if not with_state or (not cu and sp.rank):
            del mine["initial_state"]
        sp.set_lengths(lengths if kind in ("uneven", "documents") else None)
        y, state = mamba3(**mine, **cu, **options(case), output_final_state=with_state, sp=sp)
        assert (state is None) == (not with_state or (not cu and not sp.is_last))
        outputs = y, None if state is None else on_circle(state)
        drawn = [cotangents[0][:, start : start + lengths[sp.rank]], *cotangents[1:]][: len(flat(outputs))]
        found = gradients(outputs, mine, [x.to(dtype) for x in drawn])
        results[case, kind, with_state] = [x.detach() for x in flat(outputs)], found
    return results


def check_ranks(runs: list[tuple[str, str, bool]], dtype: torch.dtype, bound: float, **how: Any) -> None:
    seed, wrong = random.randrange(2**31), {}
    answers = run_ranks(over_ranks, 4, seed, runs, dtype, **how)
    for case, kind, with_state in runs:
        inputs, cotangents, cu = whole_case(case, kind, seed)
        inputs = leaves(inputs)
        if not with_state:
            del inputs["initial_state"]
        want = call(mamba3, **inputs, **cu, **options(case), output_final_state=with_state, sp=False)
        expected = gradients(want, inputs, cotangents[: len(flat(want))])
        each = [answer[case, kind, with_state] for answer in answers]
        pairs = {"y": (torch.cat([outputs[0] for outputs, _ in each], 1), flat(want)[0])}
        for i, part_of_state in enumerate(flat(want)[1:], 1):
            parts = [outputs[i] for outputs, _ in each if len(outputs) > 1]
            if i == 1:  # sine and cosine of documents that end elsewhere are those of 0
                nothing = torch.zeros_like(parts[0][:1]), torch.ones_like(parts[0][:1])
                parts = [z - torch.cat(nothing) * ((z[:1] == 0) & (z[1:] == 1)) for z in parts]
            pairs[f"final {i}"] = sum(parts), part_of_state
        for key, gradient in expected.items():
            parts = [found[key] for _, found in each if key in found]
            pairs[key] = torch.cat(parts, 1) if key[:-1] in TOKENS else sum(parts), gradient
        errors = {(case, kind, with_state, key): relative_error(*pair) for key, pair in pairs.items()}
        wrong |= {where: error for where, error in errors.items() if not error < bound}
    assert not wrong, wrong
