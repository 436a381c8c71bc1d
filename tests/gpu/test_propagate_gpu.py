"""The propagate kernel of one rank on a real GPU against float64; ranks are in ranks_propagate.py."""

from __future__ import annotations

import pytest
import torch

from flexsp.testing.scans import KINDS, ScanCall, random_calls, scan_error


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_shapes_of_models(kind: str, reverse: bool, seed: int) -> None:
    if reverse and kind == "max-plus":
        pytest.skip("the derivative of maxima has factors")
    for B, H, K, V, n in [(1, 32, 128, 128, 8), (1, 4, 64, 256, 33), (2, 3, 256, 256, 5), (1, 2, 16, 16, 1)]:
        for cuts in (False, True):
            error = scan_error(None, ScanCall(B, H, K, V, (n,), kind, cuts, reverse), seed, "cuda")
            assert error < 1e-5, (B, H, K, V, n, cuts, error)


def test_random_shapes(seed: int) -> None:
    for i, call in enumerate(random_calls(seed, 1, 20, heads=5, size=256, segments=17)):
        assert scan_error(None, call, seed + i, "cuda") < 1e-5, call


def test_graph_replay() -> None:
    from flexsp.scan.propagate import propagate
    from flexsp.scan.transitions import Transition

    source = torch.randn(1, 9, 4, 64, 64, device="cuda")
    gates = Transition("scalar", -torch.rand(1, 8, 4, device="cuda"))
    want = source.clone()
    propagate(want, gates)
    states = torch.empty_like(source)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        states.copy_(source)
        propagate(states, gates)
    for _ in range(3):
        states.fill_(float("nan"))
        graph.replay()
        torch.testing.assert_close(states, want, rtol=0, atol=0)


def test_large_offsets() -> None:
    """Element offsets past 2^31."""
    from flexsp.scan.propagate import propagate
    from flexsp.scan.transitions import Transition

    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GiB of free GPU memory")
    states = torch.zeros(1, 2200, 16, 256, 256, device="cuda")
    states[:, 0] = 1
    states[:, -1, -1, -1, -1] = 2
    propagate(states, Transition("none"))
    assert states[0, -1, -1, -1, -1].item() == 3
    assert states[0, -1, 0, 0, 0].item() == 1
