"""Plans of random calls, of the engine and of generated kernels: all chunks are in a segment, all numbers in a tile."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from flexsp.compiler.backend.generated_kernels import CHUNKS
from flexsp.compiler.planning.tiling import _Cut
from flexsp.devices import H200
from flexsp.kernels.delta import tiling as delta
from flexsp.kernels.diagonal import tiles
from flexsp.kernels.diagonal import tiling as engine
from flexsp.kernels.table import chunk_table
from tests import variants


def boundaries(T: int, n_docs: int) -> torch.Tensor:
    return torch.tensor([0, *sorted(random.choices(range(T + 1), k=n_docs - 1)), T])


def assert_covers(plan: Any, T: int, n_docs: int, chunk: int) -> None:
    """The kernels walk the chunks [s per_seg, (s + 1) per_seg) of segment s, and no chunk past the last."""
    slots = chunk_table(boundaries(T, n_docs), 0, T, chunk).shape[0] if n_docs else -(-T // chunk)
    assert plan.n_chunks == slots
    walked = [c for s in range(plan.n_seg) for c in range(s * plan.per_seg, min((s + 1) * plan.per_seg, plan.n_chunks))]
    assert walked == list(range(plan.n_chunks)), plan
    assert plan.n_seg == 1 or (plan.n_seg - 1) * plan.per_seg < plan.n_chunks, f"an empty segment: {plan}"


def test_the_engine() -> None:
    for _ in range(300):
        dtype = random.choice([torch.bfloat16, torch.float16, torch.float32])
        B, H, K, V = random.randrange(1, 5), random.randrange(1, 40), random.randrange(1, 257), random.randrange(1, 257)
        n_docs = random.choice([0, 0, 1, random.randrange(2, 9)])
        T, programs = random.choice([0, 1, random.randrange(300), random.randrange(70000)]), random.choice([1, 3, 128])
        plan = engine.tiling_of(dtype, B, T, H, K, V, n_docs, replace(H200, programs=programs), random.random() < 0.5)
        assert_covers(plan, T, n_docs, plan.tiles.chunk)
        least = -(-plan.n_chunks // (tiles.MOST_CHUNKS * plan.pieces))
        most = plan.pieces * max(4 * -(-programs // (B * H)), 2 * least, 1)
        assert plan.n_seg <= most, f"{plan.n_seg} segments of {B * H} sequences are more than {programs} programs need"
        assert plan.tiles.output.bk >= K and plan.tiles.dq.bv >= V
        assert plan.tiles.dk.bv >= V and (plan.tiles.dv is None or plan.tiles.dv.bk >= K)
        assert plan.tiles.dv is not None or (plan.tiles.dk.bk >= K and plan.tiles.dk.bv >= V)


def test_the_delta_engine() -> None:
    """Parts of backward passes have all segments and chunks, in order."""
    several = 0
    for _ in range(300):
        B, H, K, V = random.randrange(1, 4), random.randrange(1, 40), random.choice([64, 128, 80]), 128
        n_docs, steps, gates = random.choice([0, 0, 5]), random.choice([1, 2, 3]), random.choice([0, 1, 1])
        T = random.choice([0, 1, random.randrange(300), *random.choices(range(200000), k=2)]) * steps
        ranks, dtype = random.random() < 0.5, random.choice([torch.bfloat16, torch.float32])
        plan = delta.tiling_of(dtype, B, T, H, K, V, n_docs, gates, ranks, H200, random.random() < 0.7, 1, steps)
        assert_covers(plan, T, n_docs, plan.tiles.chunk) if not n_docs else None
        segments = [s for part in plan.parts for s in range(part.before, part.before + part.segments)]
        chunks = [c for part in plan.parts for c in range(part.chunks_before, part.chunks_before + part.chunks)]
        assert segments == list(range(plan.n_seg)) and chunks == list(range(plan.n_chunks)), plan
        assert all(part.chunks_before == part.before * plan.per_seg for part in plan.parts), plan
        assert max(part.chunks for part in plan.parts) == plan.held, plan
        assert len(plan.parts) == 1 or (plan.tiles.copies and gates == 1 and (steps > 1 or plan.per_seg > 64)), plan
        several += len(plan.parts) > 1
    assert several


@pytest.mark.parametrize(("H", "V", "n_seg"), [(30, 192, 8), (32, 128, 4), (48, 128, 5), (16, 128, 8), (128, 128, 1)])
def test_segments_of_the_delta_engine_run_in_few_turns(H: int, V: int, n_seg: int) -> None:
    """256 programs run at once, each of 64 columns: 30 heads of 192 take 2 turns for 3 segments, 3 for 8."""
    plan = delta.tiling_of(torch.bfloat16, 1, 32768, H, 128, V, 0, 1, False, H200, True)
    assert plan.n_seg == n_seg and len(plan.parts) == 1


@pytest.mark.parametrize(("H", "V", "n_seg"), [(8, 256, 4), (12, 256, 5), (16, 128, 4)])
def test_walks_of_large_keys_have_a_multiprocessor_each(H: int, V: int, n_seg: int) -> None:
    plan = delta.tiling_of(torch.bfloat16, 1, 32768, H, 256, V, 0, 1, False, H200, True)
    assert plan.n_seg == n_seg and plan.key_tile == 64


@pytest.mark.parametrize(("T", "parts"), [(32768, 1), (65536, 2), (131072, 4), (1 << 20, 16), (1 << 22, 16)])
def test_long_sequences_keep_states_of_a_part_of_their_chunks(T: int, parts: int) -> None:
    plan = delta.tiling_of(torch.bfloat16, 1, T, 32, 128, 128, 0, 1, False, H200, True)
    assert len(plan.parts) == parts and plan.held * parts == plan.n_chunks
    assert all(part.segments == 4 for part in plan.parts), "programs of a part fill the GPU"


def test_generated_kernels() -> None:
    for name in ("simple_gla", "deltanet", "hgrn"):
        code = variants.load(name).make(2, 16, 16, torch.bfloat16).kernels
        for _ in range(40):
            sizes = {key: random.randrange(1, 129) for key in (("K",) if name == "hgrn" else ("K", "V"))}
            T, heads = random.choice([0, 1, random.randrange(300), random.randrange(70000)]), random.randrange(1, 300)
            n_docs, ranks = random.choice([0, 0, 1, random.randrange(2, 9)]), random.random() < 0.5
            chunk = random.choice(CHUNKS)
            cut = _Cut.of(code, tuple(sizes.items()), heads, T, n_docs, torch.bfloat16, ranks, H200)
            for plan in cut.plans(chunk):
                assert plan.chunk == chunk
                assert_covers(plan, T, n_docs, chunk)
                assert all(block >= sizes[key] for key, block in plan.blocks), plan
                whole = plan.n_seg == 1 and plan.n_chunks > 0 and not ranks
                assert (plan.schedule == "fused") == whole, plan
