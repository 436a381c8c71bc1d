"""Generated kernels on one GPU beyond the matrix of sizes: chunks, lengths, schedules, states of several parts."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch.nn.functional import logsigmoid, normalize

from flexsp.exceptions import NotAvailable
from flexsp.grammar.custom import CustomTransition
from tests import variants
from tests.generated_programs import KEPT_TILES
from tests.gpu.judge import assert_right, check_variant
from tests.harness.rows import heads_first
from tests.harness.transitions import CLASSES, within

CUDA = torch.device("cuda")
DTYPES = (torch.bfloat16, torch.float32)
DOCUMENTS = (61, 0, 64, 1, 77, 0, 130)
H = 3
WIDE = (*variants.WIDE, "prev_s")

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
    [("momentum", 64, 64), ("momentum", 128, 128), ("normalised", 128, 128), ("normalised", 40, 33),
     ("counted", 128, 128), ("counted", 40, 33), ("counted delta", 64, 64), ("counted delta", 100, 33)],
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
    inputs["prev_s"] = within(name, torch.randn(n, H, *given.rows_and_columns(K, V), device=CUDA), K, V)
    leaves = {key: x.cpu().to(torch.float32 if key in WIDE else dtype) for key, x in inputs.items()}
    bounds = None if documents is None else torch.tensor([0, *accumulate(documents)])
    on_gpu = None if bounds is None else bounds.to(CUDA)
    program = given.program(H, K, V, K**-0.5, "g", False)
    if name == "counted" and K == V == 128 and dtype == torch.float32:  # dinitial was wrong, packed
        with pytest.raises(NotAvailable, match="gave wrong gradients on an H200"):
            program(**{key: x.cuda() for key, x in leaves.items()}, cu_seqlens=on_gpu)
        return

    def run(given: Tensors, bounds: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """With zeros where nothing is there."""
        o, final = program(**given | {"prev_s": within(name, given["prev_s"], K, V)}, cu_seqlens=bounds)
        return o, within(name, final, K, V)

    do, dfinal = (torch.randn(shape).bfloat16().double() for shape in ((B, T, H, V), leaves["prev_s"].shape))
    assert_right(
        lambda x: run(x, on_gpu), lambda x: run(x, on_gpu), lambda x: run(x, bounds), leaves, do, dfinal, dtype, seed
    )


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "packed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=("bfloat16", "float32"))
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.usefixtures("poisoned")
def test_rows_of_tokens_with_heads_first(
    seed: int, n: int, dtype: torch.dtype, documents: tuple[int, ...] | None
) -> None:  # fmt: skip
    """Gated DeltaProduct from three functions; queries, keys and gates come as [B, H, T, ...]."""
    B, T = (2, 333) if documents is None else (1, sum(documents))
    K, V = 64, 40
    shapes = {"q": (H, T, K), "k": (H, T, n, K), "v": (T, n, H, V), "beta": (T, n, H), "g": (H, T)}
    inputs = {key: torch.randn(B, *shape) for key, shape in shapes.items()}
    inputs |= {"k": normalize(inputs["k"], dim=-1), "g": logsigmoid(inputs["g"]), "beta": inputs["beta"].sigmoid()}
    inputs["prev_s"] = torch.randn(B if documents is None else len(documents), H, K, V)
    leaves = {key: x.to(torch.float32 if key in WIDE else dtype) for key, x in inputs.items()}
    bounds = None if documents is None else torch.tensor([0, *accumulate(documents)])
    on_gpu = None if bounds is None else bounds.to(CUDA)
    program = heads_first(n, H, K, V, dtype)
    do, dfinal = (torch.randn(shape).bfloat16().double() for shape in ((B, T, H, V), leaves["prev_s"].shape))
    runs = [lambda x, cu=cu: program(**x, cu_seqlens=cu) for cu in (on_gpu, on_gpu, bounds)]
    assert_right(*runs, leaves, do, dfinal, dtype, seed)


@pytest.mark.parametrize("case", KEPT_TILES)
@pytest.mark.parametrize("dtype", DTYPES, ids=("bfloat16", "float32"))
@pytest.mark.usefixtures("poisoned")
def test_kept_tiles_of_all_orders(seed: int, case: str, dtype: torch.dtype) -> None:
    drawn = KEPT_TILES[case]
    made = torch.Generator().manual_seed(seed)
    bounds = torch.tensor([0, *accumulate(DOCUMENTS)])
    leaves = drawn.inputs(1, sum(DOCUMENTS), bounds.tolist(), made)
    leaves |= {"k": normalize(leaves["k"], dim=-1)}
    leaves = {key: x.to(torch.float32 if key in WIDE else dtype) for key, x in leaves.items()}
    program, on_gpu = drawn.model(), bounds.to(CUDA)
    shapes = (1, sum(DOCUMENTS), drawn.H, drawn.V), leaves["prev_s"].shape
    do, dfinal = (torch.randn(shape).bfloat16().double() for shape in shapes)
    runs = [lambda x, cu=cu: program(**x, cu_seqlens=cu) for cu in (on_gpu, on_gpu, bounds)]
    assert_right(*runs, leaves, do, dfinal, dtype, seed)


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
