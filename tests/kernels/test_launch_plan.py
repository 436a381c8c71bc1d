"""The list of launches that runner and cost model share: order, buffers, plans of one rank over ranks."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from flexsp.compiler import ConstExpr, LinearAttention, SymbTensor, dispatch
from flexsp.compiler.backend.generated_kernels import Generated
from flexsp.compiler.planning.generated_plan import GeneratedPlan
from flexsp.compiler.planning.tiling import choose_tiling
from flexsp.devices import of_arch
from flexsp.kernels.delta.calls import launch_plan_of
from flexsp.kernels.diagonal.diagonal_plan import DiagonalPlan
from flexsp.kernels.diagonal.tiling import make_tiling
from flexsp.kernels.executable import CallSpec, Executable
from flexsp.kernels.launch_plan import Role, gradient_of
from flexsp.kernels.launch_spec import PROPAGATE, LaunchSpec, SameTokenStride
from flexsp.runtime.steps import Workspace, launches_of
from tests import variants

BF16 = torch.bfloat16
H = 3


NAMES = [*variants.USUAL, "bounded"]


def bounded() -> LinearAttention:
    """The linear variant with outputs that are not linear in the state, whose gradients read it."""
    h, K, V = ConstExpr("H", H), ConstExpr("K", 64), ConstExpr("V", 64)
    sizes: dict[str, list[str | int | ConstExpr]] = {
        "q": ["T", h, K], "k": ["T", h, K], "v": ["T", h, V], "prev_s": ["NS", h, K, V],
    }  # fmt: skip
    return LinearAttention(
        {name: SymbTensor(x, dtype=BF16 if name != "prev_s" else torch.float32) for name, x in sizes.items()},
        lambda k, v: k.T @ v, lambda prev_s, chunk_state: prev_s + chunk_state,
        lambda q, k, v, chunk_state: (q @ k.T).tril() @ v + torch.tanh(q @ chunk_state), chunk_size=64,
    )  # fmt: skip


@functools.cache
def code_of(name: str) -> Generated:
    model = bounded() if name == "bounded" else variants.load(name).make(H, 64, 64, BF16)
    return Generated(model.program)


def calls(name: str) -> Iterator[GeneratedPlan]:
    code = code_of(name)
    sizes = dict.fromkeys(code.layout.sizes, 64)
    for T, docs, ranks, given in itertools.product((40, 9000), (0, 3), (False, True), (False, True)):
        B = 1 if docs else 2
        plan = choose_tiling(code, sizes, B * H, T, docs, BF16, ranks, of_arch(90))
        yield GeneratedPlan(code, plan, sizes, B, H, T, docs, BF16, given, returns_final=not ranks)


def given_to(call: GeneratedPlan) -> set[str]:
    """Buffers that hold something before the first launch."""
    layout = call.code.layout
    return {*layout.tokens, *layout.params, "do", "@initial", "@dfinal"}


def check_order(launches: list[LaunchSpec], there: set[str]) -> set[str]:
    for x in launches:
        assert set(x.reads) <= there, (x.kind, set(x.reads) - there)
        assert {*x.reads, *x.writes} <= set(x.pointers), x.kind
        there = there | set(x.writes)
    return there


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_read_before_it_is_written(name: str) -> None:
    for call in calls(name):
        forward = call.forward()
        there = check_order(forward, given_to(call))
        assert "o" in there and ("@final" in there) == call.returns_final
        kept = {x for x in there if x in call.memory(forward) and call.saved(x)}
        for dfinal, dinitial in itertools.product((False, True), repeat=2):
            backward = call.backward(dfinal, dinitial)
            after = check_order(backward, given_to(call) | kept)
            assert {gradient_of(x) for x in (*call.code.step.tokens, *call.code.step.params)} <= after
            assert ("@dinitial" in after) == dinitial
            if name == "bounded" and call.scanned:
                assert any("@entering" in x.reads for x in backward if x.kind == "summarize_backward")


def engine_calls() -> Iterator[DiagonalPlan]:
    gates, either = (None, "g", "g_gamma"), (False, True)
    sizes = itertools.product((64, 256), (0, 40, 9000), (0, 3), gates, either, either, either)
    for n, (K, T, docs, gate, given, early, skips) in enumerate(sizes):
        q = torch.empty(1 if docs else 2, T, H, K, dtype=BF16, device="meta")
        tiling = make_tiling(q, q, docs)
        writes = gate is not None and n % 3 > 0
        yield DiagonalPlan(
            tiling, BF16, gate, 0.1, given, not early, early, "", token_skips=skips, write_gates=writes
        )  # fmt: skip


def test_nothing_is_read_before_it_is_written_in_the_engine() -> None:
    for call in engine_calls():
        skip = {"w"} if call.token_skips else set()
        gates = {*([call.gate] if call.gate else []), *(["i"] if call.write_gates else [])}
        inputs = {"q", "k", "v", *gates, "@initial", *skip}
        forward = call.forward()
        there = check_order(forward, inputs)
        assert "o" in there and ("@final" in there) == call.returns_final
        kept = {x for x in there if x in call.memory(forward) and call.saved(x)}
        assert kept == {x.name for x in call.buffers.values() if x.role is Role.SAVED}
        wants = [{"q"}, *({"q", x} for x in gates), {"q", *gates, *skip}]
        for dfinal, dinitial, wanted in itertools.product((False, call.returns_final), (False, True), wants):
            backward = call.backward(dfinal, dinitial, wanted)
            after = check_order(backward, inputs | kept | {"do", "@dfinal"})
            walks = [x for x in (*forward, *backward) if x.kind == "walk_kernel" and x.constants["SKIP"]]
            assert all(x.constants["BY_TOKEN"] and "w" in x.numbers for x in walks), "as if they were of heads"
            gradients = {x for x in after if x in map(gradient_of, ("q", "k", "v", "g", "g_gamma", "i", "w"))}
            assert gradients == {gradient_of(x) for x in ("q", "k", "v", *wanted)}
            assert ("@dinitial" in after) == dinitial


@pytest.mark.parametrize("name", NAMES)
def test_states_that_a_kernel_reads_are_in_its_code(name: str) -> None:
    """And the other way round, so that neither the cost model nor the order is wrong about them."""
    (call, *_) = (x for x in calls(name) if x.scanned)
    for x in (*call.forward(), *call.backward(True, True)):
        if x.kind in call.code.kernels:
            source = call.code.kernels[x.kind].source
            signature = re.findall(r"\w+", source.partition(f"def {x.kind}(")[2].partition("):")[0])
            for state in {"@entering", "@leaving"} & set(x.pointers):
                uses = re.findall(rf"\b{signature[x.pointers.index(state)]}\b", source)
                assert (state in (*x.reads, *x.writes)) == (len(uses) > 1), (x.kind, state)


@pytest.mark.parametrize("name", ["simple_gla", "deltanet"])
def test_a_plan_that_was_tuned_on_one_rank_serves_ranks(name: str) -> None:
    """It may have no summary; ranks need one."""
    code = code_of(name)
    given = {
        key: torch.empty(1, 40, H, *[64] * (len(x.shape) - 2), dtype=BF16, device="meta")
        for key, x in code.program.meta.tokens.items()
    }
    alone = dispatch.executable_of(code, given, None, None, None)
    assert alone.plan.tiling.schedule == "fused"
    sp: Any = SimpleNamespace(id=0, world_size=2, rank=0)
    chained = dispatch.executable_of(code, given, None, None, sp, alone.plan.tiling)
    kinds = [x.kind for x in chained.plan.forward()]
    assert "summarize" in kinds and PROPAGATE in kinds and "@states" in chained.saved.places


@pytest.mark.parametrize("name", ["gla", "vector_gated_delta", "hgrn", "retnet", "gla_own_bias"])
def test_memory_is_what_the_launches_point_to(name: str) -> None:
    code = code_of(name)
    given = {
        key: torch.empty(2, 9000, H, *[64] * (len(x.shape) - 2), dtype=BF16, device="meta")
        for key, x in code.program.meta.tokens.items()
    }
    given |= {
        key: torch.empty(H, *[64] * (len(x.shape) - 1), dtype=x.dtype, device="meta")
        for key, x in code.program.meta.params.items()
    }
    executable = dispatch.executable_of(code, given, None, None, None)
    held = {**executable.saved.places, **executable.scratch.places}
    pointed = {x for step in launches_of(executable.forward) for x in step.pointers if x is not None}
    assert set(held) == pointed - {*given, "o", "@final"}
    for key, (_, dtype, shape, _strides) in held.items():
        assert (dtype, shape) == (executable.plan.buffers[key].dtype, executable.plan.buffers[key].shape)


def test_buffers_lie_in_memory_that_begins_anywhere() -> None:
    made, whole = Workspace(), torch.arange(4096, dtype=torch.int32).view(torch.uint8)
    for name, shape in (("first", (3, 5)), ("none", (2, 0, 4)), ("second", (2, 3, 4))):
        made.add(name, torch.int32, *shape)
    memory = whole[1024 : 1024 + made.nbytes]
    first, none, second = (made.view(memory, name) for name in ("first", "none", "second"))
    assert first.tolist() == torch.arange(256, 271).view(3, 5).tolist() and none.shape == (2, 0, 4)
    assert second.tolist() == torch.arange(320, 344).view(2, 3, 4).tolist() and second.is_contiguous()


def test_buffers_of_two_workspaces_in_one_piece_of_memory() -> None:
    one, other = Workspace(), Workspace()
    for made, name in ((one, "a"), (one, "b"), (other, "c")):
        made.add(name, torch.int32, 3, 5)
    both = Workspace(one, other)
    memory = torch.zeros(both.nbytes, dtype=torch.uint8)
    assert both.nbytes == one.nbytes + other.nbytes
    for n, name in enumerate("abc"):
        both.view(memory, name).fill_(n)
    assert [both.view(memory, name).unique().tolist() for name in "abc"] == [[0], [1], [2]]


@pytest.mark.parametrize(
    ("strides", "others", "alike"),
    [
        ({"q": (0, 12, 4), "v": (0, 12, 2)}, (12,), True),
        ({"q": (5, 12, 4), "v": (7, 12, 4)}, (), True),
        ({"q": (0, 12, 4), "v": (0, 6, 2)}, (12,), False),
        ({"q": (0, 12, 4), "v": (0, 12, 4)}, (6,), False),
        ({"q": (0, 12, 4), "v": (0, 12, 4)}, (12, 6), False),
    ],
)
def test_one_token_stride_for_all(
    strides: dict[str, tuple[int, int, int]], others: tuple[int, ...], alike: bool
) -> None:  # fmt: skip
    """Kernels that share their offsets read the wrong tokens otherwise."""
    assert SameTokenStride(("q", "v"), others).of(strides) == alike


@pytest.mark.parametrize("lies", ["shifted", "spread", "turned"])
def test_inputs_are_copied_where_vectors_of_them_do_not_lie_at_multiples_of_16_bytes(lies: str) -> None:
    tensors = {name: torch.randn(2, 32, 3, 64).bfloat16() for name in "qkv"}
    if lies == "shifted":
        tensors["k"] = torch.randn(2 * 32 * 3 * 64 + 1).bfloat16()[1:].view(2, 32, 3, 64)
    elif lies == "spread":
        tensors["k"] = torch.randn(2, 32, 3, 73).bfloat16()[..., :64]
    else:
        tensors["k"] = torch.randn(2, 3, 32, 64).bfloat16().transpose(1, 2)
    given = CallSpec([*tensors], 3, tensors, None)
    given.require_vectors(*tensors)
    assert given.copied == ([] if lies == "turned" else ["k"])
    read = Executable.inputs(SimpleNamespace(names=tuple(tensors), given=given), [*tensors.values()], None, None)  # type: ignore[arg-type]
    for name, x in read.items():
        assert torch.equal(x, tensors[name])
        assert x.data_ptr() % 16 == 0
        assert given.strides[name] == given.strides_of(x)
    do, copied = _read_as_gradient(given, tensors["k"])
    assert torch.equal(do, tensors["k"]) and copied == (lies != "turned")
    assert _read_as_gradient(given, tensors["k"], vectors=False)[1] is False


@pytest.mark.parametrize("lies", ["shifted", "spread", "well"])
def test_gates_of_channels_are_copied_where_vectors_of_them_do_not_lie_so(lies: str) -> None:
    x = {name: torch.empty(1, 64, 2, 64, dtype=torch.bfloat16) for name in "qkvg"}
    if lies == "shifted":
        x["g"] = torch.empty(64 * 2 * 64 + 1, dtype=torch.bfloat16)[1:].view(1, 64, 2, 64)
    elif lies == "spread":
        x["g"] = torch.empty(1, 64, 2, 73, dtype=torch.bfloat16)[..., :64]
    x["beta"] = torch.empty(1, 64, 2, dtype=torch.bfloat16)
    given = CallSpec([*x], 3, x, None)
    with mock.patch("flexsp.kernels.delta.calls.runs_gluon", return_value=True):
        launch_plan_of(given, "beta", "g", 1.0, False, 0, False, False, "a call", "vector_gated_delta")
    assert given.copied == ([] if lies == "well" else ["g"])


def _read_as_gradient(given: CallSpec, do: torch.Tensor, vectors: bool = True) -> tuple[torch.Tensor, bool]:
    """The outputs' gradient as kernels of the backward pass read it, and whether it is a copy."""
    instead = {"__init__": lambda self: None, "_as_kept": lambda self, *x: x[:2], "inputs": lambda *x: {}}
    with mock.patch.multiple(Executable, **instead):
        executable: Any = Executable()  # type: ignore[call-arg]
        executable.plan, executable.given = SimpleNamespace(aligned_gradient=vectors), given
        executable.backward = mock.Mock(side_effect=StopIteration)
        with pytest.raises(StopIteration):
            executable.run_backward([do], None, do, None, do, None, False)
    found = executable.backward.call_args.args[0]
    return found, found.data_ptr() != do.data_ptr()
