"""Every op on one GPU against float64, in every dtype and at every tile choice, and what training needs of it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flexsp.devices import A100, H200
from flexsp.kernels.diagonal import tiles as table
from flexsp.kernels.diagonal import tiling
from flexsp.kernels.diagonal.tiles import Tiles, all_configs
from flexsp.ops import chunk_linear_attn, chunk_simple_gla
from flexsp.ops._recipe import forget
from flexsp.testing.cases import Case, Shape
from flexsp.testing.compare import WIDE, check_op
from flexsp.testing.problems import OPS, Problem, check, draw, solve_all
from tests.harness.diagonal import weighed, writing

CUDA = torch.device("cuda")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DOCUMENTS = (61, 0, 64, 1, 77, 0)


def _name(value: Any) -> str | None:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return None


def _assert_right(
    problem: Problem, dtype: torch.dtype, found: list[dict[str, torch.Tensor]] | None = None, **how: Any
) -> None:
    found = solve_all(problem, dtype, CUDA) if found is None else found
    reports = check(problem, dtype, found, **how)
    bad = [str(report) for report in reports if not report.ok]
    assert not bad, "\n".join(bad)


def _configurations() -> list[Any]:
    """Every choice in bfloat16 and float32, those for smaller GPUs too; float16 shares float32's, tested above."""
    found = []
    for dtype, K, V, tiles in dict.fromkeys([*all_configs(H200), *all_configs(A100)]):
        dtype = torch.float32 if dtype == torch.float16 else dtype
        name = f"{_name(dtype)}-{K}x{V}-chunk{tiles.chunk}{'-shared' if tiles.shared else ''}"
        name += "-hopper" if tiles.hopper else ""
        found.append(pytest.param(dtype, K, V, tiles, id=name))
    return found


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize(("dtype", "K", "V", "tiles"), _configurations())
@pytest.mark.parametrize("op", ["simple_gla", "mamba2"])
@pytest.mark.usefixtures("poisoned")
def test_every_tile_configuration(
    monkeypatch: pytest.MonkeyPatch, op: str, dtype: torch.dtype, K: int, V: int, tiles: Tiles, packed: bool
) -> None:
    """Two chunks a segment and several segments, so that every kernel walks, starts and ends in the middle."""
    how = {"shared": bool(tiles.shared), "gluon": tiles.hopper}
    some = itertools.product((H200, A100), (False, True))
    assert tiles in [table.choose(dtype, K, V, device, **how, gated=gated) for device, gated in some]
    monkeypatch.setattr(table, "choose", lambda *args: tiles)
    monkeypatch.setattr(table, "segment_length", lambda *args: 2)
    tiling.tiling_of.cache_clear()
    problem = draw(op, T=sum(DOCUMENTS), H=2, K=K, V=V, documents=DOCUMENTS if packed else None)
    try:
        _assert_right(problem.rounded(dtype), dtype)
    finally:
        tiling.tiling_of.cache_clear()


@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 129])
@pytest.mark.usefixtures("poisoned")
def test_lengths_around_a_chunk(T: int) -> None:
    _assert_right(draw("simple_gla", B=2, T=T, H=3, K=64, V=64).rounded(torch.bfloat16), torch.bfloat16)


@pytest.mark.parametrize(("K", "V"), [(16, 200), (80, 48), (33, 17), (255, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=_name)
@pytest.mark.usefixtures("poisoned")
def test_head_sizes_between_powers_of_two(K: int, V: int, dtype: torch.dtype) -> None:
    _assert_right(draw("simple_gla", T=150, H=2, K=K, V=V).rounded(dtype), dtype)


@pytest.mark.parametrize(("K", "V"), [(64, 64), (128, 64), (128, 128), (256, 128), (96, 80)])
@pytest.mark.parametrize("dtype", DTYPES, ids=_name)
@pytest.mark.usefixtures("poisoned")
def test_heads_of_mamba2(K: int, V: int, dtype: torch.dtype) -> None:
    """Of released models, over several segments; four calls give the same bits."""
    problem = draw("mamba2", T=1100, H=8, K=K, V=V).rounded(dtype)
    first, *others = (solve_all(problem, dtype, CUDA) for _ in range(4))
    assert all(torch.equal(x, y) for found in others for a, b in zip(first, found, strict=True)
               for x, y in zip(a.values(), b.values(), strict=True))  # fmt: skip
    _assert_right(problem, dtype, first)


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize(
    ("weights", "K", "V"),
    [*((weighed, *size) for size in [(64, 64), (128, 64), (128, 128), (256, 64), (256, 256), (128, 256), (100, 40)]),
     *((writing, *size) for size in [(64, 64), (128, 128), (256, 256), (256, 128), (128, 256), (100, 40), (64, 1)])],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=_name)
@pytest.mark.usefixtures("poisoned")
def test_weights_of_tokens(
    weights: Callable[[str], Case], K: int, V: int, dtype: torch.dtype, packed: bool, seed: int
) -> None:
    """Of tokens' own values, as Mamba-3 has them, and of keys, as mLSTM has them, some of which are 0."""
    case, n = weights("simple_gla"), len(DOCUMENTS) if packed else 1
    inputs = case.inputs(Shape(B=1, T=sum(DOCUMENTS), H=2, K=K, V=V, states=n), seed)
    if packed:
        inputs["cu_seqlens"] = torch.tensor([0, *itertools.accumulate(DOCUMENTS)])
    check_op(case.op, case.oracle, inputs, dtype=dtype, device="cuda", wide=(*WIDE, "w", "i"))


@pytest.mark.parametrize(("H", "K"), [(80, 128), (112, 64)], ids=["2.7B", "Zamba2"])
@pytest.mark.usefixtures("poisoned")
def test_pieces_of_mamba2(monkeypatch: pytest.MonkeyPatch, H: int, K: int) -> None:
    """Gradients that go through the tokens in pieces are those of all at once, to the bit.

    A piece of two segments has so many chunks that its heads are not cut into more blocks than those of all at once.
    """
    problem, found = draw("mamba2", T=16385, H=H, K=K, V=64).rounded(torch.bfloat16), []
    monkeypatch.setattr(table, "segment_length", lambda *args: 66)
    for few in (table.FEW, 2**60):
        monkeypatch.setattr(table, "FEW", few)
        tiling.tiling_of.cache_clear()
        forget()
        found.append(solve_all(problem, torch.bfloat16, CUDA))
    tiling.tiling_of.cache_clear()
    pieces, whole = found
    assert all(torch.equal(x, y) for a, b in zip(pieces, whole, strict=True)
               for x, y in zip(a.values(), b.values(), strict=True))  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=_name)
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("documents", [DOCUMENTS, (61, 0, 700, 1, 77, 0)], ids=["short", "long"])
@pytest.mark.usefixtures("poisoned")
def test_gates_from_zero_to_minus_ten_thousand(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, documents: tuple[int, ...], packed: bool
) -> None:
    """Segments of eight chunks, of which the horizon leaves all (head 0) to one (heads 1 and 2) to walk."""
    monkeypatch.setattr(table, "segment_length", lambda *args: 8)
    tiling.tiling_of.cache_clear()
    problem = draw("simple_gla", T=sum(documents), H=4, K=64, V=64, documents=documents if packed else None)
    g = problem.tokens["g"]
    g[:, :, 0] = 0.0
    g[:, ::7, 1] = -1e4
    g[:, :, 2] = -torch.rand(g.shape[1], dtype=torch.float64) * 90
    try:
        found = solve_all(problem.rounded(dtype), dtype, CUDA)
    finally:
        tiling.tiling_of.cache_clear()
    assert all(x.isfinite().all() for answer in found for x in answer.values())
    _assert_right(problem.rounded(dtype), dtype, found)


def test_at_the_size_people_train() -> None:
    """H=32, K=V=128 over several segments; the oracle is the float64 reference, the yardstick runs on the GPU."""
    problem = draw("simple_gla", T=4133, H=32, K=128, V=128).rounded(torch.bfloat16)
    _assert_right(problem, torch.bfloat16, oracle=solve_all(problem, torch.float64, CUDA), device=CUDA)


def test_more_elements_than_32_bits_count() -> None:
    """Past 2^31 elements a tensor: the last tokens agree with a run that starts there from the state before them."""
    T, H, D, tail = 600_064, 32, 128, 1024
    if torch.cuda.get_device_properties(0).total_memory < 100 << 30:
        pytest.skip("needs a GPU of 100 GiB")
    try:
        pairs = _last_tokens(T, H, D, tail)
    except torch.OutOfMemoryError:
        pytest.skip("needs 100 GiB that no other process has")
    for name, whole, end in pairs:
        difference = (whole[:, -tail:].double() - end.double()).norm() / end.double().norm()
        assert difference < 1e-2, f"{name}: {difference:.1e}"


def _last_tokens(T: int, H: int, D: int, tail: int) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """(name, of all tokens, of the last ones alone)."""
    q, k, v, do = (torch.randn(1, T, H, D, device=CUDA, dtype=torch.bfloat16) for _ in range(4))
    g = -torch.rand(1, T, H, device=CUDA) / 50
    leaves = [x.requires_grad_() for x in (q, k, v, g)]
    o, _ = chunk_simple_gla(q, k, v, g)
    gradients = torch.autograd.grad(o, leaves, do)
    with torch.no_grad():
        _, state = chunk_simple_gla(*(x[:, :-tail] for x in (q, k, v, g)), output_final_state=True)
    ends = [x[:, -tail:].detach().requires_grad_() for x in leaves]
    o_end, _ = chunk_simple_gla(*ends, initial_state=state)
    expected = (o_end, *torch.autograd.grad(o_end, ends, do[:, -tail:]))
    return list(zip(("o", "dq", "dk", "dv", "dg"), (o, *gradients), expected, strict=True))


def _inputs(T: int = 200, H: int = 3, D: int = 64) -> list[torch.Tensor]:
    tensors = [torch.randn(2, T, H, D, device=CUDA, dtype=torch.bfloat16) for _ in range(3)]
    return [x.requires_grad_() for x in (*tensors, torch.nn.functional.logsigmoid(torch.randn(2, T, H, device=CUDA)))]


def _step(
    leaves: list[torch.Tensor], do: torch.Tensor, op: Callable[..., Any] = chunk_simple_gla
) -> list[torch.Tensor]:
    o, _ = op(*leaves)
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "batch last": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
    "every other token": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
    "part of a wider row": lambda x: torch.cat([x, x], dim=-1)[..., : x.shape[-1]],
    "expanded heads": lambda x: x[:, :, :1].expand_as(x),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("poisoned")
def test_strides_do_not_matter(layout: str) -> None:
    leaves = [x.detach() for x in _inputs()]
    do = torch.randn_like(leaves[2])
    strided = [LAYOUTS[layout](x) for x in leaves]
    assert any(not x.is_contiguous() for x in strided)
    plain = [x.contiguous().requires_grad_() for x in strided]
    expected = _step(plain, LAYOUTS[layout](do).contiguous())
    found = _step([x.detach().requires_grad_() for x in strided], LAYOUTS[layout](do))
    for name, a, b in zip(("o", "dq", "dk", "dv", "dg"), found, expected, strict=True):
        assert torch.equal(a, b), name


def test_results_are_the_same_every_time() -> None:
    leaves = _inputs(T=1000)
    do = torch.randn_like(leaves[2])
    first = _step(leaves, do)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(_step(leaves, do), first, strict=True))


def test_float64_stays_float64() -> None:
    problem = draw("simple_gla", T=100, H=2, K=32, V=16)
    found = solve_all(problem, torch.float64, CUDA)
    assert all(x.dtype == torch.float64 for answer in found for x in answer.values())
    _assert_right(problem, torch.float64, found)


def test_a_cuda_graph_replays_new_inputs() -> None:
    leaves = _inputs()
    do = torch.randn_like(leaves[2])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            _step(leaves, do)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _step(leaves, do)
    for _ in range(3):
        fresh = _inputs()
        with torch.no_grad():
            for leaf, new in zip(leaves, fresh, strict=True):
                leaf.copy_(new)
            do.copy_(torch.randn_like(do))
        graph.replay()
        expected = _step([x.detach().clone().requires_grad_() for x in leaves], do)
        for name, a, b in zip(("o", "dq", "dk", "dv", "dg"), captured, expected, strict=True):
            assert torch.equal(a, b), name


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("op", OPS)
def test_the_host_never_waits(op: str, packed: bool) -> None:
    problem = draw(op, T=sum(DOCUMENTS), H=2, K=64, V=64, documents=DOCUMENTS if packed else None)
    leaves = {name: x.to(CUDA, torch.float32).requires_grad_() for name, x in (problem.tokens | problem.params).items()}
    initial = tuple(x.to(CUDA, torch.float32).requires_grad_() for x in problem.initial)
    bounds = torch.tensor(problem.cu_seqlens, device=CUDA) if packed else None
    common = {"output_final_state": True, "cu_seqlens": bounds, "sp": False}
    do = problem.do.to(CUDA, torch.float32)

    def step() -> None:
        o, _ = OPS[op](leaves, initial, common)
        torch.autograd.grad(o, list(leaves.values()), do, allow_unused=True)

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("op", ["simple_gla", "linear_attn_normalized", "mamba2"])
def test_torch_compile_keeps_one_graph(op: str, backend: str) -> None:
    problem = draw(op, T=150, H=2, K=64, V=64).rounded(torch.bfloat16)
    torch._dynamo.reset()
    call = torch.compile(OPS[op], fullgraph=True, backend=backend)
    _assert_right(problem, torch.bfloat16, solve_all(problem, torch.bfloat16, CUDA, call=call))


def test_gates_in_bfloat16() -> None:
    """Gates in bfloat16 are accepted beside bfloat16 inputs, and their gradient has their dtype."""
    leaves = _inputs()
    leaves[3] = leaves[3].detach().bfloat16().requires_grad_()
    do = torch.randn_like(leaves[2])
    found = _step(leaves, do)
    single = [*leaves[:3], leaves[3].detach().float().requires_grad_()]
    expected = _step(single, do)
    assert found[4].dtype == torch.bfloat16
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(found, expected, strict=True))


def test_bad_input_is_refused_before_a_launch() -> None:
    q, k, v, g = _inputs()
    with pytest.raises(ValueError, match=r"k: expected .*, got"):
        chunk_simple_gla(q, k.cpu(), v, g)
    with pytest.raises(ValueError, match=r"v: expected .*, got"):
        chunk_linear_attn(q, k, v.double())
    os.environ["FLEXSP_CHECK"] = "1"
    try:
        with pytest.raises(ValueError, match=r"g: expected natural-log gates <= 0, got"):
            chunk_simple_gla(q, k, v, -g)
    finally:
        del os.environ["FLEXSP_CHECK"]
