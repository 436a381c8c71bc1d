"""What stands behind the last document of an output."""

from __future__ import annotations

from typing import Any

import torch

from flexsp.testing.cases import CASES, Case, Shape


def _leaves(x: Any) -> list[torch.Tensor]:
    return [leaf for y in x for leaf in _leaves(y)] if isinstance(x, tuple) else [x] if torch.is_tensor(x) else []


def _solved(case: Case, inputs: dict[str, Any], cu: torch.Tensor, seed: int) -> list[tuple[str, torch.Tensor]]:
    """Outputs, final states and every gradient, by name; cotangents of tokens are the same for any number of them."""

    def leaf(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(leaf, x))
        return x.clone().requires_grad_() if torch.is_tensor(x) else x

    given = {name: leaf(x) for name, x in inputs.items()}
    o, final = case.op(**given, cu_seqlens=cu, output_final_state=True)
    finals = _leaves(final if isinstance(final, tuple) else (final,))
    do = torch.randn(999, *o.shape[2:], generator=torch.Generator().manual_seed(seed))[: o.shape[1]]
    loss = (o * do.to(o)).sum() + sum(x.square().sum() for x in finals)
    named = [(name, x) for name, y in given.items() for x in _leaves(y if isinstance(y, tuple) else (y,))]
    grads = torch.autograd.grad(loss, [x for _, x in named])
    return [
        ("o", o.detach()), *[("final", x.detach()) for x in finals],
        *[(f"d.{name}", dx) for (name, _), dx in zip(named, grads, strict=True)],
    ]  # fmt: skip


def wrong(
    case: Case, dtype: torch.dtype, end: int, T: int, seed: int, states: int = 3, size: int = 4, device: str = "cpu"
) -> list[str]:  # fmt: skip
    """What a tail of T - end tokens changes, or leaves other than 0. Heads of ``size`` channels."""
    bounds = torch.tensor([0, 2, 2, end], device=device)
    heads = 4 if case is CASES["mamba2_groups"] else 2
    inputs = case.inputs(Shape(B=1, T=T, H=heads, K=size, V=size, states=states), seed)
    wide = torch.promote_types(dtype, torch.float32)  # of states

    def _cast(key: str, x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(_cast(key, y) for y in x)
        return x.to(device, wide if key == "initial_state" else dtype) if torch.is_tensor(x) else x

    rounded = {key: _cast(key, x) for key, x in inputs.items()}
    short = {key: x[:, :end] if key in case.tokens else x for key, x in rounded.items()}
    found = []
    for (what, want), (_, got) in zip(*(_solved(case, x, bounds, seed) for x in (short, rounded)), strict=True):
        if got.shape != want.shape and not bool((got[:, end:] == 0).all()):
            found.append(f"{what} of the tail")
        got = got[:, :end] if got.shape != want.shape else got
        # The same sums; where there are more slots, zeros are among the terms.
        if not bool((got - want).abs().max() <= 8 * torch.finfo(dtype).eps * (1 + want.abs().max())):
            found.append(f"{what} by {(got - want).abs().max():.1e}")
    return found
