"""The chunk table against a plain loop over documents and tokens."""

from __future__ import annotations

import random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flexsp.kernels.table import chunk_table
from flexsp.testing.cases import random_documents, random_lengths


def table_by_loop(bounds: list[int], start: int, stop: int, C: int, last_rank: bool) -> list[tuple[int, ...]]:
    rows: list[tuple[int, ...]] = []
    for doc, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        if begin == end:
            if start <= begin < stop or (last_rank and begin >= stop):
                rows.append((min(begin, stop) - start, 0, doc, 1, 1))
            continue
        tokens = [t for t in range(begin, end) if start <= t < stop]
        for i in range(0, len(tokens), C):
            part = tokens[i : i + C]
            rows.append((part[0] - start, len(part), doc, int(part[0] == begin), int(part[-1] == end - 1)))
    n_slots = -(-(stop - start) // C) + len(bounds) - 1
    assert len(rows) <= n_slots - (stop > start), "the last slot says where the tail begins"
    tail = min(max(bounds[-1], start), stop) - start
    return rows + [(tail, 0, 0, 0, 0)] * (n_slots - len(rows))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("C", [1, 7, 16, 64])
def test_equals_a_loop_over_random_documents_and_shards(C: int, dtype: torch.dtype) -> None:
    for _ in range(40):
        seed = random.randrange(2**31)
        generator = torch.Generator().manual_seed(seed)
        total, n, world_size = random.randrange(1, 200), random.randrange(1, 8), random.randrange(1, 5)
        bounds = random_documents(total, n, generator).clamp(max=random.choice([total, random.randrange(total)]))
        start = 0
        for rank, length in enumerate(random_lengths(total, world_size, generator)):
            last = rank == world_size - 1
            got = chunk_table(bounds.to(dtype), start, start + length, C, last)
            assert got.dtype == torch.int32
            want = table_by_loop(bounds.tolist(), start, start + length, C, last)
            assert [tuple(row) for row in got.tolist()] == want, f"seed {seed}, rank {rank}"
            start += length


def test_empty_documents_at_both_ends() -> None:
    bounds = torch.tensor([0, 0, 5, 5, 5])
    assert chunk_table(bounds, 0, 5, 4).tolist() == [
        [0, 0, 0, 1, 1],
        [0, 4, 1, 1, 0],
        [4, 1, 1, 0, 1],
        [5, 0, 2, 1, 1],
        [5, 0, 3, 1, 1],
        [5, 0, 0, 0, 0],
    ]
    assert chunk_table(bounds, 0, 5, 4, last_rank=False)[3:].tolist() == [[5, 0, 0, 0, 0]] * 3
    empty_last_shard = chunk_table(bounds, 5, 5, 4, last_rank=True)
    assert empty_last_shard.tolist() == [[0, 0, 2, 1, 1], [0, 0, 3, 1, 1], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]]


def test_every_document_starts_and_ends_once_over_all_ranks() -> None:
    generator = torch.Generator().manual_seed(random.randrange(2**31))
    for _ in range(50):
        bounds = random_documents(100, 6, generator)
        first, last, tokens, start = torch.zeros(6), torch.zeros(6), 0, 0
        for rank, length in enumerate(random_lengths(100, 4, generator)):
            table = chunk_table(bounds, start, start + length, 16, rank == 3)
            first.index_add_(0, table[:, 2], table[:, 3].float())
            last.index_add_(0, table[:, 2], table[:, 4].float())
            tokens += int(table[:, 1].sum())
            start += length
        assert first.tolist() == [1] * 6 and last.tolist() == [1] * 6 and tokens == 100


def test_reads_no_value_on_the_host() -> None:
    with FakeTensorMode() as mode:
        table = chunk_table(mode.from_tensor(torch.tensor([0, 3, 9])), 0, 9, 4)
    assert table.shape == (5, 5)
