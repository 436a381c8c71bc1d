"""Calls that no kernel can run: they raise and name the remedy, unless running them in PyTorch was asked for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flexsp import exceptions
from flexsp.compiler import ConstExpr, LinearAttention, SymbTensor
from flexsp.exceptions import NotAvailable
from flexsp.grammar import FlexLinearAttention, decay
from flexsp.testing import run_ranks
from tests import variants
from tests.harness.interpreted import INTERPRETED


@pytest.mark.parametrize("on_gpu", [False, True])
def test_all_dtypes_but_float64_have_kernels(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for wanted in (False, True):
        monkeypatch.setattr(exceptions, "kernels_on_cpu", lambda wanted=wanted: wanted)
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            assert exceptions.asks_for_kernels(on_gpu, dtype) == ((on_gpu or wanted) and dtype != torch.float64)


def refusals(sp: Any, folder: str) -> dict[str, tuple[str, str]]:
    """(what a call without fallback raises, what `runs` says of it); no kernel may be replaced unseen."""

    def told(model: Any) -> tuple[str, str]:
        tokens = {
            name: -torch.rand([1, 5, *(s.choices[0] for s in what.shape[1:])])
            for name, what in model.program.meta.tokens.items()
        }
        with pytest.raises(NotAvailable) as caught:
            model(**tokens)
        wide = {name: x.double() for name, x in tokens.items()}
        assert model(**wide)[0].isfinite().all()  # float64 asks for PyTorch by itself
        assert model.runs(**wide) == "runs in PyTorch: kernels have no float64"
        return str(caught.value), model.runs(**tokens)

    make = variants.load("linear").make
    found = {
        "large": told(make(1, 257, 4, code_dir=folder)),
        "chunk": told(make(2, 5, 4, chunk_size=48, code_dir=folder)),
        "not affine": told(LinearAttention(*_bent(), code_dir=folder, chunk_size=64)),
    }
    fine = make(2, 5, 4, code_dir=folder)
    x = {name: torch.rand(1, 5, 2, 4 if name == "v" else 5) for name in ("q", "k", "v")}
    assert fine.runs(**x) == "runs generated kernels"
    grammar = FlexLinearAttention(decay.gated(per_head=False))
    x |= {"decay": -torch.rand(1, 5, 2, 5)}
    assert grammar.explain(**x).endswith("this call runs generated kernels")
    large = {"q": torch.rand(1, 2, 1, 300), "k": torch.rand(1, 2, 1, 300), "v": torch.rand(1, 2, 1, 4)}
    large["decay"] = -torch.rand(1, 2, 1, 300)
    found["grammar"] = "", grammar.explain(**large)
    with pytest.raises(NotAvailable, match=r'K = 300.*fallback="pytorch"'):
        grammar(**large)
    asked = FlexLinearAttention(decay.gated(per_head=False), fallback="pytorch")
    assert 'runs in PyTorch (fallback="pytorch"): K = 300' in asked.explain(**large)
    with pytest.warns(UserWarning, match="runs in PyTorch, slowly: K = 300"):
        asked(**large)
    engine = sys.modules.pop("flexsp.compiler.backend.generated_kernels")
    sys.modules["flexsp.compiler.backend.generated_kernels"] = None  # type: ignore[assignment]
    try:
        found["no Triton"] = told(make(2, 5, 4, code_dir=folder))
    finally:
        sys.modules["flexsp.compiler.backend.generated_kernels"] = engine
    return found


def _bent() -> tuple[Any, ...]:
    H, K, V = ConstExpr("H", 2), ConstExpr("K", 5), ConstExpr("V", 4)
    meta = {"k": SymbTensor(["T", H, K]), "v": SymbTensor(["T", H, V]), "prev_s": SymbTensor(["NS", H, K, V])}

    def chunk(k: Any, v: Any) -> Any:
        return k.T @ v

    def kept(prev_s: Any, k: Any, v: Any, chunk_state: Any) -> Any:
        return (prev_s * (k.sum(0)[:, None] + v.sum(0)).sigmoid()).tanh() + chunk_state

    def merge(k: Any, v: Any, chunk_state: Any) -> Any:
        return (k @ k.T).tril(0) @ v + k @ chunk_state

    return meta, chunk, kept, merge


def test_no_fallback_unless_asked_for(tmp_path: Path) -> None:
    (found,) = run_ranks(refusals, 1, str(tmp_path), env=INTERPRETED)
    reasons = {
        "large": "K = 257", "chunk": "chunk_size = 48", "no Triton": "Triton",
        "grammar": "K = 300", "not affine": "not affine in the state",
    }  # fmt: skip
    assert found.keys() == reasons.keys()
    for case, reason in reasons.items():
        error, says = found[case]
        assert reason in says and 'fallback="pytorch"' in says and "raises" in says, (case, says)
        assert case == "grammar" or (reason in error and 'fallback="pytorch"' in error), (case, error)


def test_on_cpu_nothing_is_refused() -> None:
    x = {name: torch.rand(1, 3, 1, 4 if name == "v" else 300) for name in ("q", "k", "v")}
    x["decay"] = -torch.rand(1, 3, 1, 300)
    model = FlexLinearAttention(decay.gated(per_head=False))
    assert model(**x)[0].isfinite().all()
    assert model.explain(**x).endswith("this call runs in PyTorch: the tensors are on CPU")
    assert (
        FlexLinearAttention(decay.gated())
        .explain(**x | {"decay": x["decay"][..., 0]})
        .endswith("this call runs its reference in PyTorch")
    )
    for make in (FlexLinearAttention, lambda **options: LinearAttention(*_bent(), chunk_size=64, **options)):
        with pytest.raises(ValueError, match="fallback: expected None or \"pytorch\", got 'slow'"):
            make(fallback="slow")
