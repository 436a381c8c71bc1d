"""How kernels run under Triton's interpreter in tests."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from flexsp.devices import H200, Device, planned_for
from flexsp.testing.bounds import within_tensors

__all__ = ["INTERPRETED", "in_pieces", "poisoned"]

INTERPRETED = {"TRITON_INTERPRET": "1", "FLEXSP_BACKEND": "triton"}
"""The environment of ranks that run kernels on the CPU, in Triton's interpreter."""


def scan_rows(scan: Any, parts: Sequence[Any]) -> list[Any]:
    """What the interpreter's scans give, a row at a time: number by number they take most of a test's time."""
    data = [np.moveaxis(x.handle.data, scan.axis, 0).copy() for x in parts]
    for i in range(1, len(data[0])):
        rows = [scan.to_tensor(x[at], part.dtype) for at in (i - 1, i) for x, part in zip(data, parts, strict=True)]
        for x, new in zip(data, scan.combine_fn.fn(*rows), strict=True):
            x[i] = new.handle.data
    return [scan.to_tensor(np.moveaxis(x, 0, scan.axis), part.dtype) for x, part in zip(data, parts, strict=True)]


@contextmanager
def poisoned(segments: int, heads: int = 1, device: Device = H200) -> Iterator[None]:
    """Fresh memory is NaN, kernels stay within their tensors, nothing falls back to PyTorch; plans are for a GPU like
    `device` of `segments` times `heads` programs, which cut the tokens of so many heads (B * H) into about `segments`
    segments."""
    from triton.runtime.interpreter import ScanOps

    from flexsp.compiler.planning import tiling
    from flexsp.kernels.delta import tiling as delta

    ScanOps.generic_scan = scan_rows
    before = tiling._Cut.plans
    tiling._Cut.plans = lambda cut, chunk: iter([cut.plan(chunk, cut.width)])  # type: ignore[method-assign]
    long, delta.LONG = delta.LONG, 1
    delta.tiling_of.cache_clear()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(1).isnan(), "torch fills fresh memory only in its deterministic mode"
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*runs in PyTorch")
            with planned_for(replace(device, programs=segments * heads)), within_tensors():
                yield
    finally:
        torch.use_deterministic_algorithms(False)
        tiling._Cut.plans = before  # type: ignore[method-assign]
        delta.LONG = long
        delta.tiling_of.cache_clear()


@contextmanager
def in_pieces(columns: int) -> Iterator[None]:
    """Chunkwise kernels take states of all sizes in pieces of so many columns, as they do large ones; none if 0."""
    from flexsp.compiler.backend import generated_kernels
    from flexsp.compiler.planning import tiling

    before = generated_kernels.WHOLE, tiling._PIECE
    if columns:
        generated_kernels.WHOLE, tiling._PIECE = 0, dict.fromkeys((True, False), columns)
    try:
        yield
    finally:
        generated_kernels.WHOLE, tiling._PIECE = before
