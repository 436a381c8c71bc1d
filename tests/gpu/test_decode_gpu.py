"""Steps of programs on one GPU, against token loops in float64 and steps of the functions in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flexsp.testing.compare import assert_close
from tests import variants
from tests.harness.decode import drawn


@pytest.mark.parametrize(
    ("B", "T", "dtype", "of_states"),
    [
        (1, 1, torch.bfloat16, torch.float32), (64, 1, torch.bfloat16, torch.bfloat16),
        (3, 16, torch.float16, torch.float32), (2, 5, torch.float32, torch.float32),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("K", "V"), [(128, 128), (64, 64), (100, 33), (256, 256)])
@pytest.mark.parametrize("name", variants.VARIANTS)
@pytest.mark.usefixtures("poisoned")
def test_steps(
    name: str, K: int, V: int, B: int, T: int, dtype: torch.dtype, of_states: torch.dtype, folder: Path, seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(variants, "K", K)
    monkeypatch.setattr(variants, "V", V)
    tokens, params, initial = drawn(name, B, T, seed, dtype)
    initial = initial.to(of_states).double()
    want, final = variants.token_loop(name, tokens, params, initial, None)
    model = variants.load(name).make(variants.H, K, V, dtype, code_dir=str(folder))
    given = tokens | params
    given = {key: x.to(torch.float32 if key in variants.WIDE else dtype) for key, x in given.items()}
    low = initial.to(of_states)
    o_low = model.step(prev_s=low, **given)
    on_gpu, first = {key: x.cuda() for key, x in given.items()}, None
    for _ in range(3):
        state = initial.to(of_states).cuda()
        o = model.step(prev_s=state, **on_gpu)
        first = first or (o, state)
        assert torch.equal(o, first[0]) and torch.equal(state, first[1])
    assert_close("o", o, want, o_low)
    assert_close("state", state, final, low)
