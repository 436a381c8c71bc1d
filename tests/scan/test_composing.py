"""The kernel that composes what stretches do: PyTorch's values, and what it compiles to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexsp.scan.composing import applied, composed, in_one_launch
from flexsp.scan.transitions import KINDS, Transition
from flexsp.testing import run_ranks
from tests.harness.compiling import in_child
from tests.harness.interpreted import INTERPRETED, poisoned

NUMBERS = ["none", "scalar", "vector", "elementwise", "max-plus"]


def _draw(kind: str, n: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """n stretches, packed; some numbers close what is before, some are not finite."""
    found = []
    for _ in range(n):
        F, axes = torch.randn(shape, dtype=dtype), KINDS[kind].axes
        a = None if axes is None else torch.randn(shape if axes == "KV" else (*shape[:2], *shape[2:3] * len(axes)))
        if a is not None and not KINDS[kind].logarithm:
            a[torch.rand(a.shape) < 0.2] = -torch.inf if kind == "max-plus" else 0.0
            a[torch.rand(a.shape) < 0.1] = torch.inf
        F[torch.rand(shape) < 0.05] = torch.nan
        F[torch.rand(shape) < 0.05] = -torch.inf
        cut = torch.rand(shape[0]) < 0.3
        found.append(Transition.of(F, None if a is None else a.to(dtype), cut, kind).packed(F))
    return found


def _differences(sp: Any, seed: int) -> list[str]:
    torch.manual_seed(seed)
    wrong = []
    for kind in NUMBERS:
        for shape in ((2, 3, 4, 5), (1, 2, 3, 300), (1, 4, 33)):
            for dtype in (torch.float32, torch.float64):
                through = Transition(kind)
                later, earlier = (torch.stack(_draw(kind, 3, shape, dtype)) for _ in range(2))
                states = through.in_packed(earlier)[1]
                assert in_one_launch(through, later.device)
                with poisoned(2):
                    for x, y, z in (
                        (later, earlier, states), (later, earlier[1], states[1]), (later[0], earlier[0], states[0]),
                        (later[1:], earlier[:-1], states[:-1].contiguous()),
                    ):  # fmt: skip
                        for got, want in (
                            (composed(through, x, y), through.compose_packed(x, y)),
                            (applied(through, x, z), through.apply_packed(x, z)),
                        ):
                            close = torch.isclose(got, want, rtol=1e-6, atol=1e-6, equal_nan=True)
                            if got.shape != want.shape or not close.all():
                                wrong.append(f"{kind} {shape} {dtype} {tuple(x.shape)} {tuple(y.shape)}")
    return wrong


def test_against_pytorch(seed: int) -> None:
    """Of every kind of numbers, of one and of many stretches, within its tensors, and in fresh memory that is NaN."""
    assert run_ranks(_differences, 1, seed, env=INTERPRETED) == [[]]


def _compiled(arch: int) -> list[dict[str, Any]]:
    from flexsp.scan.compose_kernel import compose
    from flexsp.testing.offline import compile_launches, record_launches

    found = []
    for kind, shape, dtype in (
        ("vector", (1, 8, 128, 128), torch.float32), ("elementwise", (1, 8, 64, 100), torch.float32),
        ("max-plus", (1, 8, 64), torch.float64),
    ):  # fmt: skip
        packed = torch.stack(_draw(kind, 2, shape, dtype)).to("meta")
        with record_launches() as launches:
            compose(kind, packed, packed, False)
            compose(kind, packed, Transition(kind).in_packed(packed[0])[1], True)
        found += [vars(x) | {"waits_first": x.waits_first} for x in compile_launches(launches, arch)]
    return found


@pytest.mark.compiles
def test_compiled() -> None:
    for made in in_child(_compiled, 90):
        assert made["spills"] == 0 and made["registers"] <= 128 and made["waits_first"], made
