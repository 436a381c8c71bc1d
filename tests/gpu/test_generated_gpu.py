"""Generated kernels of every variant on one GPU, against the functions they are made of in float64 on the same GPU."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid, normalize

from flexsp.grammar.custom import CustomTransition
from flexsp.testing.compare import relative_error
from tests import variants
from tests.test_custom_transition import CLASSES

CUDA = torch.device("cuda")
BOUND = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
NAMES = list(variants.VARIANTS)
DOCUMENTS = (61, 0, 64, 1, 77, 0, 130)
H = 3
WIDE = ("g", "log_gamma", "u", "prev_s")  # float32 beside bfloat16 inputs

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("generated")


def _name(value: Any) -> str | None:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


def _draw(
    monkeypatch: pytest.MonkeyPatch, name: str, K: int, V: int, dtype: torch.dtype, documents: tuple[int, ...] | None,
    B: int = 2, T: int = 333,
) -> tuple[Tensors, torch.Tensor | None]:  # fmt: skip
    """Inputs in float64 with values that `dtype` has, and document boundaries."""
    for size, n in (("H", H), ("K", K), ("V", V)):
        monkeypatch.setattr(variants, size, n)
    if documents is not None:
        B, T = 1, sum(documents)
    tokens, params = variants.draw(name, B, T, random.randrange(2**31))
    n = B if documents is None else len(documents)
    inputs = {**tokens, **params, "prev_s": torch.randn(n, H, *variants.state_sizes(name))}
    bounds = None
    if documents is not None:
        bounds = torch.tensor([sum(documents[:i]) for i in range(n + 1)], device=CUDA)
    kept = {key: x.to(torch.float32 if key in WIDE else dtype) for key, x in inputs.items()}
    return {key: x.double().to(CUDA) for key, x in kept.items()}, bounds


def _solve(model: Any, inputs: Tensors, bounds: torch.Tensor | None, dtype: torch.dtype, seed: int) -> Tensors:
    """Outputs, final states and gradients for cotangents drawn from `seed`; a call that falls back fails."""
    kinds = {key: torch.promote_types(dtype, torch.float32) if key in WIDE else dtype for key in inputs}
    leaves = {key: x.to(kinds[key], copy=True).requires_grad_() for key, x in inputs.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*runs in PyTorch")
        o, final = model(**leaves, cu_seqlens=bounds)
    made = torch.Generator(device=CUDA).manual_seed(seed)
    cotangents = [torch.randn(y.shape, generator=made, device=CUDA).bfloat16().to(y.dtype) for y in (o, final)]
    torch.autograd.backward([o, final], cotangents)
    grads = {f"d{key}": torch.zeros_like(x) if x.grad is None else x.grad for key, x in leaves.items()}
    return {"o": o.detach(), "final": final.detach(), **grads}


def _assert_right(found: Tensors, want: Tensors, bound: float) -> None:
    errors = {key: relative_error(found[key], x) for key, x in want.items()}
    bad = {key: f"{error:.1e}" for key, error in errors.items() if not error <= bound}
    assert not bad, f"{bad} of {errors}"


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("dtype", BOUND, ids=_name)
@pytest.mark.parametrize(("K", "V"), [(128, 128), (128, 64)])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("poisoned")
def test_every_variant(
    monkeypatch: pytest.MonkeyPatch, folder: Path, seed: int, name: str, K: int, V: int, dtype: torch.dtype,
    packed: bool,
) -> None:  # fmt: skip
    inputs, bounds = _draw(monkeypatch, name, K, V, dtype, DOCUMENTS if packed else None)
    model = variants.load(name).make(H, K, V, dtype, code_dir=str(folder))
    found = _solve(model, inputs, bounds, dtype, seed)
    _assert_right(found, _solve(model, inputs, bounds, torch.float64, seed), BOUND[dtype])


@pytest.mark.parametrize(
    ("name", "K", "V"),
    [
        (name, K, V)
        for name in ("simple_gla", "gla", "deltanet", "gated_deltanet", "vector_gated_delta", "hgrn")
        for K, V in ((20, 24), (20, 64), (64, 24), (100, 33), (64, 128), (128, 256), (256, 128))
        if K <= 128 or "delta" not in name
    ],
)  # fmt: skip
@pytest.mark.usefixtures("poisoned")
def test_head_sizes(monkeypatch: pytest.MonkeyPatch, folder: Path, seed: int, name: str, K: int, V: int) -> None:
    inputs, bounds = _draw(monkeypatch, name, K, V, torch.bfloat16, DOCUMENTS)
    model = variants.load(name).make(H, K, V, torch.bfloat16, code_dir=str(folder))
    found = _solve(model, inputs, bounds, torch.bfloat16, seed)
    _assert_right(found, _solve(model, inputs, bounds, torch.float64, seed), BOUND[torch.bfloat16])


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "packed"])
@pytest.mark.parametrize("dtype", BOUND, ids=_name)
@pytest.mark.parametrize(
    ("name", "K", "V"),
    [("momentum", 64, 64), ("momentum", 128, 128), ("normalised", 128, 128), ("normalised", 40, 33)],
)
@pytest.mark.usefixtures("poisoned")
def test_states_of_several_parts(
    seed: int, name: str, K: int, V: int, dtype: torch.dtype, documents: tuple[int, ...] | None
) -> None:  # fmt: skip
    given = CustomTransition(CLASSES[name])
    B, T = (2, 333) if documents is None else (1, sum(documents))
    n = B if documents is None else len(documents)
    shapes = {"q": (K,), "k": (K,), "v": (V,), "g": (), "beta": ()}
    inputs = {key: torch.randn(B, T, H, *shape, device=CUDA) for key, shape in shapes.items()}
    inputs |= {"k": normalize(inputs["k"], dim=-1), "g": logsigmoid(inputs["g"])}
    beta = inputs.pop("beta").sigmoid() / 2
    if given.inputs:
        inputs["beta"] = beta
    inputs["prev_s"] = torch.randn(n, H, *given.rows_and_columns(K, V), device=CUDA)
    if name == "normalised":  # nothing is there
        inputs["prev_s"][..., K:, V:] = 0
    inputs = {key: x.to(torch.float32 if key in WIDE else dtype).double() for key, x in inputs.items()}
    bounds = None if documents is None else torch.tensor([sum(documents[:i]) for i in range(n + 1)], device=CUDA)
    model = given.program(H, K, V, K**-0.5, "g", False)
    found = _solve(model, inputs, bounds, dtype, seed)
    want = _solve(model, inputs, bounds, torch.float64, seed)
    if name == "normalised":
        for each in (found, want):
            each["final"][..., K:, V:] = each["dprev_s"][..., K:, V:] = 0
    _assert_right(found, want, BOUND[dtype])


@pytest.mark.parametrize("T", [1, 63, 64, 65, 129])
@pytest.mark.parametrize("name", ["gla", "deltanet", "hgrn"])
@pytest.mark.usefixtures("poisoned")
def test_lengths_around_a_chunk(monkeypatch: pytest.MonkeyPatch, folder: Path, seed: int, name: str, T: int) -> None:
    inputs, _ = _draw(monkeypatch, name, 128, 128, torch.bfloat16, None, T=T)
    model = variants.load(name).make(H, 128, 128, torch.bfloat16, code_dir=str(folder))
    found = _solve(model, inputs, None, torch.bfloat16, seed)
    _assert_right(found, _solve(model, inputs, None, torch.float64, seed), BOUND[torch.bfloat16])


@pytest.mark.parametrize("chunk", [16, 32, 128])
@pytest.mark.parametrize("name", ["simple_gla", "gla", "deltanet", "gated_deltanet", "hgrn"])
@pytest.mark.usefixtures("poisoned")
def test_chunk_sizes(monkeypatch: pytest.MonkeyPatch, folder: Path, seed: int, name: str, chunk: int) -> None:
    """Other chunk sizes than the usual one."""
    size = 64 if name in ("simple_gla", "gla", "hgrn") or chunk < 128 else 32
    inputs, bounds = _draw(monkeypatch, name, size, size, torch.bfloat16, DOCUMENTS)
    model = variants.load(name).make(H, size, size, torch.bfloat16, chunk_size=chunk, code_dir=str(folder))
    found = _solve(model, inputs, bounds, torch.bfloat16, seed)
    _assert_right(found, _solve(model, inputs, bounds, torch.float64, seed), BOUND[torch.bfloat16])


def test_a_chunk_too_large_says_so(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    inputs, _ = _draw(monkeypatch, "simple_gla", 128, 128, torch.bfloat16, None)
    model = variants.load("simple_gla").make(H, 128, 128, torch.bfloat16, chunk_size=256, code_dir=str(folder))
    with pytest.raises(ValueError, match="chunk_size = 256: kernel `.*` needs .* KiB of shared memory"):
        _solve(model, inputs, None, torch.bfloat16, 0)


@pytest.mark.parametrize("B", [1, 48])
@pytest.mark.parametrize("name", ["simple_gla", "gla", "deltanet", "hgrn"])
@pytest.mark.usefixtures("poisoned")
def test_schedules(monkeypatch: pytest.MonkeyPatch, folder: Path, seed: int, name: str, B: int) -> None:
    """Few heads over many chunks, and so many heads that one walk takes each whole."""
    inputs, _ = _draw(monkeypatch, name, 128, 128, torch.bfloat16, None, B=B, T=2100 if B == 1 else 200)
    model = variants.load(name).make(H, 128, 128, torch.bfloat16, code_dir=str(folder))
    found = _solve(model, inputs, None, torch.bfloat16, seed)
    _assert_right(found, _solve(model, inputs, None, torch.float64, seed), BOUND[torch.bfloat16])


@pytest.mark.parametrize("name", NAMES)
def test_results_are_the_same_every_time(monkeypatch: pytest.MonkeyPatch, folder: Path, seed: int, name: str) -> None:
    inputs, bounds = _draw(monkeypatch, name, 128, 128, torch.bfloat16, DOCUMENTS)
    model = variants.load(name).make(H, 128, 128, torch.bfloat16, code_dir=str(folder))
    first = _solve(model, inputs, bounds, torch.bfloat16, seed)
    for _ in range(3):
        again = _solve(model, inputs, bounds, torch.bfloat16, seed)
        assert all(torch.equal(again[key], x) for key, x in first.items())
