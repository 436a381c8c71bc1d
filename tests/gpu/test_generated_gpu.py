"""Generated kernels on one GPU beyond the matrix of sizes: chunks, lengths, schedules, states of several parts."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch.nn.functional import logsigmoid, normalize

from flexsp.grammar.custom import CustomTransition
from tests.gpu.judge import assert_right, check_variant
from tests.test_custom_transition import CLASSES

CUDA = torch.device("cuda")
DTYPES = (torch.bfloat16, torch.float32)
DOCUMENTS = (61, 0, 64, 1, 77, 0, 130)
H = 3
WIDE = ("g", "w", "log_gamma", "u", "prev_s")  # float32 beside bfloat16 inputs

Tensors = dict[str, torch.Tensor]


@pytest.mark.parametrize(
    ("name", "K", "V"),
    [
        (name, K, V)
        for name in ("simple_gla", "gla", "deltanet", "gated_deltanet", "vector_gated_delta", "hgrn")
        for K, V in ((20, 24), (20, 64), (64, 24), (100, 33), (64, 128), (128, 64), (128, 256), (256, 128))
        if K <= 128 or "delta" not in name
    ],
)  # fmt: skip
@pytest.mark.usefixtures("poisoned")
def test_head_sizes(folder: Path, seed: int, name: str, K: int, V: int) -> None:
    check_variant(name, K, V, torch.bfloat16, folder, seed, DOCUMENTS)


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "packed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=("bfloat16", "float32"))
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
    leaves = {key: x.cpu().to(torch.float32 if key in WIDE else dtype) for key, x in inputs.items()}
    bounds = None if documents is None else torch.tensor([0, *accumulate(documents)])
    on_gpu = None if bounds is None else bounds.to(CUDA)
    program = given.program(H, K, V, K**-0.5, "g", False)

    def run(given: Tensors, bounds: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """With zeros where nothing is there."""
        there = torch.ones_like(given["prev_s"][:1])
        if name == "normalised":
            there[..., K:, V:] = 0
        o, final = program(**given | {"prev_s": given["prev_s"] * there}, cu_seqlens=bounds)
        return o, final * there

    do, dfinal = (torch.randn(shape).bfloat16().double() for shape in ((B, T, H, V), leaves["prev_s"].shape))
    assert_right(
        lambda x: run(x, on_gpu), lambda x: run(x, on_gpu), lambda x: run(x, bounds), leaves, do, dfinal, dtype, seed
    )


@pytest.mark.parametrize("T", [1, 63, 64, 65, 129])
@pytest.mark.parametrize("name", ["gla", "deltanet", "hgrn"])
@pytest.mark.usefixtures("poisoned")
def test_lengths_around_a_chunk(folder: Path, seed: int, name: str, T: int) -> None:
    check_variant(name, 128, 128, torch.bfloat16, folder, seed, T=T)


@pytest.mark.parametrize("chunk", [16, 32, 128])
@pytest.mark.parametrize("name", ["simple_gla", "gla", "deltanet", "gated_deltanet", "hgrn"])
@pytest.mark.usefixtures("poisoned")
def test_chunk_sizes(folder: Path, seed: int, name: str, chunk: int) -> None:
    """Other chunk sizes than the usual one."""
    size = 64 if name in ("simple_gla", "gla", "hgrn") or chunk < 128 else 32
    check_variant(name, size, size, torch.bfloat16, folder, seed, DOCUMENTS, chunk=chunk)


def test_a_chunk_too_large_says_so(folder: Path) -> None:
    with pytest.raises(ValueError, match="chunk_size = 256.*kernel `.*` needs .* KiB of shared memory"):
        check_variant("simple_gla", 128, 128, torch.bfloat16, folder, 0, chunk=256)


@pytest.mark.parametrize("B", [1, 48])
@pytest.mark.parametrize("name", ["simple_gla", "gla", "deltanet", "hgrn"])
@pytest.mark.usefixtures("poisoned")
def test_schedules(folder: Path, seed: int, name: str, B: int) -> None:
    """Few heads over many chunks, and so many heads that one walk takes each whole."""
    check_variant(name, 128, 128, torch.bfloat16, folder, seed, B=B, T=2100 if B == 1 else 200)
