"""The delta engine on one GPU: both sets of its kernels, in Triton and in Gluon; segments; tensors that lie anyhow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flexsp.compiler.backend import generated_kernels
from flexsp.kernels.delta import tiling
from flexsp.ops import chunk_delta_rule, chunk_gated_delta_rule, chunk_kda
from flexsp.runtime import tested_versions
from tests.gpu.judge import check_variant

BF16 = torch.bfloat16
NAMES = ["deltanet", "gated_deltanet", "vector_gated_delta"]
DOCUMENTS = (61, 0, 64, 1, 200, 77, 130)


@pytest.fixture(params=["in Gluon", "in Triton"], autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generated_kernels, "_made", {})  # what was worked out for the other kernels is not kept
    if request.param == "in Triton":
        monkeypatch.setattr(tested_versions, "GLUON", frozenset())


@pytest.fixture
def segments(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Heads of 20 chunks are cut into four segments of five."""
    monkeypatch.setattr(tiling, "LONG", 5)
    monkeypatch.setattr(tiling, "_LEAST", 5)
    tiling.tiling_of.cache_clear()
    yield
    tiling.tiling_of.cache_clear()


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "packed"])
@pytest.mark.parametrize("size", [(64, 64), (64, 128), (128, 64), (128, 128), (96, 192), (80, 64)], ids=str)
@pytest.mark.parametrize("name", [*NAMES, "gdn2"])
@pytest.mark.usefixtures("poisoned")
def test_sizes(folder: Path, seed: int, name: str, size: tuple[int, int], documents: tuple[int, ...] | None) -> None:
    check_variant(name, *size, BF16, folder, seed, documents, lowering="auto")


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "packed"])
@pytest.mark.parametrize("size", [(256, 256), (192, 128), (64, 256), (208, 64)], ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("poisoned")
def test_large_heads(
    folder: Path, seed: int, name: str, size: tuple[int, int], documents: tuple[int, ...] | None
) -> None:  # fmt: skip
    check_variant(name, *size, BF16, folder, seed, documents, lowering="auto")


@pytest.mark.parametrize("kernels", ["in Triton"], indirect=True)
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "packed"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [(256, 256), (128, 256)], ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("poisoned")
def test_large_heads_of_other_dtypes(
    folder: Path, seed: int, name: str, size: tuple[int, int], dtype: torch.dtype, documents: tuple[int, ...] | None
) -> None:  # fmt: skip
    check_variant(name, *size, dtype, folder, seed, documents, B=1, H=1, lowering="auto")


def pattern(kind: str, T: int) -> torch.Tensor:
    """Log gates [T]; segments have 320 tokens."""
    t, slow = torch.arange(T), torch.full((T,), -0.01)
    return {
        "slow": slow,
        "none": torch.zeros(T),
        "strong": torch.full((T,), -3.0),
        "closed": torch.where(t % 97 == 5, -1e4, -0.01),
        "strong where segments end": torch.where(t % 320 >= 256, -3.0, slow),
        "strong where segments begin": torch.where(t % 320 < 64, -3.0, slow),
        "growth": torch.where(t % 2 == 0, 0.05, -0.06),
    }[kind].float()


KINDS = ["slow", "none", "strong", "closed", "strong where segments end", "strong where segments begin", "growth"]


@pytest.mark.parametrize("documents", [None, (1, 500, 0, 64, 640, 75)], ids=["whole", "packed"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("poisoned", "segments")
def test_segments(folder: Path, seed: int, kind: str, documents: tuple[int, ...] | None) -> None:
    T = 1280 if documents is None else sum(documents)
    check_variant(
        "gated_deltanet", 64, 64, BF16, folder, seed, documents, B=1, T=T, H=2, lowering="auto", gates=pattern(kind, T)
    )


@pytest.mark.parametrize("documents", [None, (1, 500, 0, 64, 640, 75)], ids=["whole", "packed"])
@pytest.mark.parametrize("size", [(64, 64), (128, 64), (128, 128)], ids=str)
@pytest.mark.usefixtures("poisoned", "segments")
def test_segments_without_decay(
    folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], documents: tuple[int, ...] | None
) -> None:  # fmt: skip
    """They are there over ranks."""
    monkeypatch.setattr(tiling, "_cut", lambda *args: True)
    T = 1280 if documents is None else sum(documents)
    check_variant("deltanet", *size, BF16, folder, seed, documents, B=1, T=T, H=2, lowering="auto")


@pytest.mark.parametrize("documents", [None, (1, 500, 0, 64, 640, 75)], ids=["whole", "packed"])
@pytest.mark.parametrize("size", [(256, 256), (192, 128)], ids=str)
@pytest.mark.usefixtures("poisoned", "segments")
def test_segments_of_large_heads(
    folder: Path, seed: int, size: tuple[int, int], documents: tuple[int, ...] | None
) -> None:  # fmt: skip
    T = 1280 if documents is None else sum(documents)
    gates = pattern("slow", T) / 10  # a segment's matrix counts
    check_variant(
        "gated_deltanet", *size, BF16, folder, seed, documents, B=1, T=T, H=2, lowering="auto", gates=gates
    )  # fmt: skip


def of_channels(kind: str, T: int, K: int) -> torch.Tensor:
    """Log gates [T, K]; some chunks of 64 tokens, or blocks of 16, have gates that add up to little, and others not."""
    t, k = torch.arange(T)[:, None], torch.arange(K)[None, :]
    slow = -0.002 * (1 + k) + 0.0 * t
    return {
        "little": slow,
        "strong in some channels": torch.where((k % 5 == 3) & (t % 256 >= 128), -2.0, slow),
        "strong in some chunks": torch.where(t % 192 >= 128, -3.0, slow),
        "at the edge": torch.where(t // 64 % 2 == 0, -2.2, -2.3) + slow / 10,
        "at the edge of 16": torch.where(t // 64 % 2 == 0, -8.9, -9.1) + slow / 10,
        "closed": torch.where((t % 97 == 5) & (k % 3 == 0), -1e4, slow),
        "growth": torch.where(t % 2 == 0, 0.05, -0.06) + 0.0 * k,
        "early in chunks": torch.where(t % 64 == 1, -50.0, slow),
        "late in chunks": torch.where(t % 64 == 62, -50.0, slow),
        "fast": torch.full_like(slow, -0.6),
        "fast but for a channel": torch.where(k == K - 27, 0.1, 60.0) * slow.clamp(min=-0.01),
        "fast where segments end": torch.where(t % 320 >= 192, -0.9, slow),
        "fast where segments begin": torch.where(t % 320 < 128, -0.9, slow),
    }[kind].float()


OF_CHANNELS = [
    "little", "strong in some channels", "strong in some chunks", "at the edge", "closed", "growth", "early in chunks",
    "late in chunks",
]  # fmt: skip


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "packed"])
@pytest.mark.parametrize("kind", [*OF_CHANNELS, "at the edge of 16"])
@pytest.mark.usefixtures("poisoned")
def test_gates_of_channels(folder: Path, seed: int, kind: str, documents: tuple[int, ...] | None) -> None:
    T = 640 if documents is None else sum(documents)
    check_variant(
        "vector_gated_delta", 64, 128, BF16, folder, seed, documents, B=1, T=T, H=2, lowering="auto",
        gates=of_channels(kind, T, 64),
    )  # fmt: skip


@pytest.mark.parametrize("documents", [None, (1, 500, 0, 64, 640, 75)], ids=["whole", "packed"])
@pytest.mark.parametrize(
    "kind",
    [
        "fast", "fast but for a channel", "fast where segments end", "fast where segments begin", "little", "closed",
        "growth", "strong in some chunks",
    ],
)  # fmt: skip
@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("name", ["vector_gated_delta", "gdn2"])
@pytest.mark.usefixtures("poisoned", "segments")
def test_segments_of_channels(
    folder: Path, seed: int, name: str, K: int, kind: str, documents: tuple[int, ...] | None
) -> None:  # fmt: skip
    T = 1280 if documents is None else sum(documents)
    check_variant(
        name, K, 64, BF16, folder, seed, documents, B=1, T=T, H=2, lowering="auto",
        gates=of_channels(kind, T, K),
    )  # fmt: skip


def seen_beyond(change: str, packed: bool) -> tuple[bool, bool]:
    """Of four segments whether NaN in the values at the second one's start is seen after it, and NaN in the gradient of
    the outputs at its end before it."""
    made = torch.Generator().manual_seed(0)
    x = {name: torch.randn(1, 1280, 1, 128, generator=made) for name in "qkv"}
    x |= {"beta": torch.ones(1, 1280, 1), "g": torch.full((1, 1280, 1, 128), -0.6)}
    x["k"] = torch.nn.functional.normalize(x["k"], dim=-1) * (3.0 if change == "large keys" else 1.0)
    do = torch.randn(1, 1280, 1, 128, generator=made)
    if change == "a positive gate":
        x["g"][:, 450, :, 100] = 0.05
    elif change == "a slow channel":
        x["g"][..., 100] = -0.05
    bounds = None if not packed else torch.tensor([0, 400, 1280] if change == "a document begins" else [0, 1280])
    found, size = [], 384 if packed else 320  # a document has one chunk more
    for wrong, at, seen in (("v", size, slice(2 * size, 1280)), ("do", 2 * size - 1, slice(0, size))):
        given = {name: y.clone() for name, y in (x | {"do": do}).items()}
        given[wrong][0, at, 0, 0] = torch.nan
        given = {name: y.to("cuda", torch.float32 if name == "g" else BF16) for name, y in given.items()}
        to = given.pop("do")
        leaves = {name: y.requires_grad_() for name, y in given.items()}
        o, _ = chunk_kda(**leaves, cu_seqlens=None if bounds is None else bounds.cuda())
        shown = o if wrong == "v" else torch.autograd.grad(o, leaves["v"], to)[0]
        found.append(bool(shown[:, seen].isnan().any()))
    return found[0], found[1]


@pytest.mark.parametrize("change", ["none", "large keys", "a positive gate", "a slow channel", "a document begins"])
@pytest.mark.usefixtures("segments")
def test_nan_behind_the_horizon_of_channels(change: str, request: pytest.FixtureRequest) -> None:
    """It is not seen where nothing of a segment is left, or a document begins in it; else it is, in kernels in Gluon:
    what decays is never taken for nothing where keys or gates could make it grow again."""
    if "in Triton" in request.node.name:
        pytest.skip("there are no segments")
    seen = change in ("large keys", "a positive gate", "a slow channel")
    for packed in (False, True):
        if change != "a document begins" or packed:
            assert seen_beyond(change, packed) == (seen, seen)


@pytest.mark.usefixtures("segments")
@pytest.mark.parametrize("op", [chunk_delta_rule, chunk_gated_delta_rule, chunk_kda], ids=["rule", "gated", "kda"])
def test_nan_stays_in_its_document(op: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """A document begins in the second of four segments; gates are slow, and one is positive."""
    monkeypatch.setattr(tiling, "_cut", lambda gates, ranks, copies: gates < 2 or copies)
    made, bounds = torch.Generator().manual_seed(0), torch.tensor([0, 400, 1280], device="cuda")
    x = {name: torch.randn(1, 1280, 1, 64, generator=made) for name in "qkv"} | {"beta": torch.ones(1, 1280, 1)}
    x["k"] = torch.nn.functional.normalize(x["k"], dim=-1)
    if op is not chunk_delta_rule:
        x["g"] = torch.full((1, 1280, 1) if op is chunk_gated_delta_rule else (1, 1280, 1, 64), -0.001)
        x["g"][:, 450] = 0.001
    given = {name: y.to("cuda", torch.float32 if name == "g" else BF16) for name, y in x.items()}
    do = torch.randn(1, 1280, 1, 64, generator=made).to("cuda", BF16)
    given["v"][0, 3, 0, 0] = torch.nan
    leaves = {name: y.requires_grad_() for name, y in given.items()}
    o, _ = op(**leaves, cu_seqlens=bounds)  # type: ignore[operator]
    assert o[:, 3:400].isnan().any() and not o[:, 400:].isnan().any()
    do[0, 1279, 0, 0], given["v"].detach()[0, 3, 0, 0] = torch.nan, 0.0
    o, _ = op(**leaves, cu_seqlens=bounds)  # type: ignore[operator]
    (dv,) = torch.autograd.grad(o, leaves["v"], do)
    assert dv[:, 400:].isnan().any() and not dv[:, :400].isnan().any()


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "packed"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("much_memory", "poisoned")
def test_many_heads(folder: Path, seed: int, name: str, documents: tuple[int, ...] | None) -> None:
    """Walks share multiprocessors, and copy no further ahead than one chunk."""
    check_variant(name, 128, 128, BF16, folder, seed, documents, B=2, T=202, H=80, lowering="auto")


@pytest.mark.usefixtures("poisoned")
def test_gates_that_differ_in_half_of_the_channels(folder: Path, seed: int) -> None:
    gates = of_channels("little", 384, 128) / 4
    gates[:, 64:] += of_channels("strong in some chunks", 384, 64)
    check_variant("vector_gated_delta", 128, 128, BF16, folder, seed, B=1, T=384, H=2, lowering="auto", gates=gates)


@pytest.mark.parametrize("kind", OF_CHANNELS)
@pytest.mark.parametrize("power", [-20, 24])
def test_gradients_of_any_size_of_channels(kind: str, power: int) -> None:
    """Gradients are as many times smaller or larger as those of the outputs, to the bit: decays hide none of them."""
    T, H, K, V = 384, 2, 64, 128
    made = torch.Generator("cuda").manual_seed(3)
    q, k, v, do = (torch.randn(1, T, H, n, device="cuda", generator=made).bfloat16() for n in (K, K, V, V))
    beta = torch.rand(1, T, H, device="cuda", generator=made).bfloat16()
    k = torch.nn.functional.normalize(k.float(), dim=-1).bfloat16()
    g = of_channels(kind, T, K).cuda().view(1, T, 1, K).expand(1, T, H, K)
    inputs = [x.detach().clone().requires_grad_() for x in (q, k, v, g, beta)]
    o, _ = chunk_kda(*inputs)
    large = torch.autograd.grad(o, inputs, do, retain_graph=True)
    other = torch.autograd.grad(o, inputs, do * 2.0**power)
    assert all(a.any() for a in large)
    assert all(torch.equal(a * 2.0**power, b) for a, b in zip(large, other, strict=True))


LIE = ("q", "k", "v", "erase", "write")


def shifted(name: str, x: torch.Tensor) -> torch.Tensor:
    """At an address that 16 does not divide."""
    if name not in LIE:
        return x
    memory = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape)
    return _Filled.apply(x, memory)


def spread(name: str, x: torch.Tensor) -> torch.Tensor:
    """Rows 9 numbers longer than they are."""
    if name not in LIE:
        return x
    memory = torch.empty(*x.shape[:-1], x.shape[-1] + 9, dtype=x.dtype, device=x.device)[..., : x.shape[-1]]
    return _Filled.apply(x, memory)


class _Filled(torch.autograd.Function):
    """x in other memory."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return memory.copy_(x)

    @staticmethod
    def backward(ctx: object, dx: torch.Tensor) -> tuple[torch.Tensor, None]:
        return dx, None


@pytest.mark.parametrize("lie", [shifted, spread])
@pytest.mark.parametrize("name", [*NAMES, "gdn2"])
@pytest.mark.usefixtures("poisoned")
def test_tensors_that_lie_anyhow(folder: Path, seed: int, name: str, lie: object) -> None:
    check_variant(name, 64, 128, BF16, folder, seed, lowering="auto", lie=lie)  # type: ignore[arg-type]


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "packed"])
@pytest.mark.parametrize("K", [64, 128, 256])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("poisoned")
def test_heads_that_share_queries_and_keys(seed: int, name: str, K: int, documents: tuple[int, ...] | None) -> None:
    """Bit for bit as with the queries and keys of each head, whose gradients are added up."""
    T, group = 300 if documents is None else sum(documents), 4
    made = torch.Generator("cuda").manual_seed(seed)
    q, k = torch.randn(2, 1, T, 2, K, device="cuda", generator=made).bfloat16().unbind()
    k = torch.nn.functional.normalize(k.float(), dim=-1).bfloat16()
    v, do = torch.randn(2, 1, T, 2 * group, 128, device="cuda", generator=made).bfloat16().unbind()
    beta = torch.rand(1, T, 2 * group, device="cuda", generator=made)
    gates = (
        () if name == "deltanet" else (-torch.rand(1, T, 2 * group, *([K] if "vector" in name else []), device="cuda"),)
    )
    op = {"deltanet": chunk_delta_rule, "gated_deltanet": chunk_gated_delta_rule, "vector_gated_delta": chunk_kda}[name]
    bounds = None if documents is None else torch.tensor([0, *documents], device="cuda").cumsum(0)

    def passes(*keys: torch.Tensor) -> list[torch.Tensor]:
        leaves = [x.detach().clone().requires_grad_() for x in (*keys, v, *gates, beta)]
        o, final = op(*leaves, output_final_state=True, cu_seqlens=bounds)
        return [o.detach(), final.detach(), *torch.autograd.grad([o, final], leaves, [do, torch.ones_like(final)])]

    found, want = passes(q, k), passes(*(x.repeat_interleave(group, 2) for x in (q, k)))
    for n in (2, 3):
        parts = want[n].unflatten(2, (-1, group)).unbind(3)
        want[n] = sum((x.float() for x in parts[1:]), parts[0].float()).bfloat16()
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
