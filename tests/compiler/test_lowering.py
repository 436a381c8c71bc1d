"""Engines of hand-written kernels: who gets them, and what they replace. The engine of docs/add-an-engine.md is one."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import pickle
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from flexsp.compiler import ConstExpr, LinearAttention, Lowering, SymbTensor, replaced
from flexsp.compiler.backend.generated_kernels import Generated
from flexsp.compiler.dispatch import executable_of
from flexsp.compiler.graphs.values import NotEmittable
from flexsp.compiler.planning import tiling as planning
from flexsp.compiler.planning.generated_plan import GeneratedPlan
from flexsp.compiler.planning.model import predict
from flexsp.compiler.planning.tiling import choose_tiling
from flexsp.kernels.launch_plan import Buffer, Role
from flexsp.kernels.launch_spec import LaunchSpec
from flexsp.variants import linear, vector_gated_delta
from flexsp.variants.delta_rule import DELTA_RULE
from tests.guides import run_script, save_scripts
from tests.harness.interpreted import INTERPRETED

OVER_RANKS = """
import torch, flexsp
from flexsp.compiler import ConstExpr, LinearAttention, SymbTensor
from keeping import KEEPING, chunk, decay, merge

sp = flexsp.init_sequence_parallel(transport="posix", heap_mib=4)
h, k, v = ConstExpr("H", 2), ConstExpr("K", 16), ConstExpr("V", 16)
meta = {name: SymbTensor(["T", h, k if name != "v" else v]) for name in "qkv"} | {"prev_s": SymbTensor(["NS", h, k, v])}
variant = LinearAttention(meta, chunk, decay, merge, chunk_size=16, lowerings=[KEEPING])
torch.manual_seed(0)
x, do = torch.randn(3, 1, 90, 2, 16), torch.randn(1, 90, 2, 16)
for bounds in (None, torch.tensor([0, 40, 40, 41, 90])):
    packed = {} if bounds is None else {"cu_seqlens": bounds}
    whole = [y.double().requires_grad_() for y in x]
    want, _ = variant(**dict(zip("qkv", whole)), sp=False, **packed)
    wanted = torch.autograd.grad(want, whole, do.double())
    mine = [sp.shard(y).clone().requires_grad_() for y in x]
    o, _ = variant(**dict(zip("qkv", mine)), sp=sp, **packed)
    assert variant.remembered is not None
    assert any(c.executable.plan.lowering for c in variant._calls.values() if c.executable)
    grads = torch.autograd.grad(o, mine, sp.shard(do))
    for got, right in zip((o, *grads), (want, *wanted)):
        right = sp.shard(right)
        assert (got - right).norm() < 1e-5 * right.norm()
sp.check()
print("as one rank")
sp.close()
"""


@pytest.fixture
def keeping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The engine of the guide."""
    save_scripts("add-an-engine.md", tmp_path)
    spec = importlib.util.spec_from_file_location("keeping", tmp_path / "keeping.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "keeping", module)
    spec.loader.exec_module(module)
    yield module


def variant(functions: Any, K: int = 16, **options: Any) -> LinearAttention:
    h, k, v = ConstExpr("H", 2), ConstExpr("K", K), ConstExpr("V", 16)
    meta = {name: SymbTensor(["T", h, v if name == "v" else k]) for name in "qkv"}
    meta["prev_s"] = SymbTensor(["NS", h, k, v])
    engines = {"lowerings": [functions.KEEPING]} | options
    return LinearAttention(meta, functions.chunk, functions.decay, functions.merge, **engines)


def call_of(model: LinearAttention, K: int = 16, n_docs: int = 0) -> GeneratedPlan:
    sizes = {"K": K, "V": 16}
    plan = choose_tiling(model.kernels, sizes, 2, 4096, n_docs, torch.float32)
    return GeneratedPlan(model.kernels, plan, sizes, 1, 2, 4096, n_docs, torch.float32)


def test_what_an_engine_replaces(keeping: ModuleType) -> None:
    mine, plain = call_of(variant(keeping)), call_of(variant(keeping, lowering="generated"))
    kinds = [[x.kind for x in call.backward(False, True)] for call in (mine, plain)]
    assert "chunk_states" in kinds[1] and [x for x in kinds[1] if x != "chunk_states"] == kinds[0]
    assert [x.kernel for x in mine.forward() if x.kernel is not None] == [keeping.output]
    kept, like = mine.memory(mine.forward())["@kept_entering"], plain.buffers["@entering"]
    assert (kept.dtype, kept.shape) == (like.dtype, like.shape) and mine.saved("@kept_entering")
    assert "@entering" not in mine.memory(mine.backward(False, True))


def test_the_cost_model_counts_what_an_engine_moves(keeping: ModuleType) -> None:
    mine, plain = variant(keeping).kernels, variant(keeping, lowering="generated").kernels
    call = call_of(variant(keeping))
    given = call.tiling, call.sizes, 2, 4096, torch.float32
    written = [{x.kernel: x.written for x in predict(code, *given)} for code in (mine, plain)]
    assert written[0]["output"] - written[1]["output"] == call.buffers["@entering"].nbytes


def test_a_call_that_an_engine_refuses(keeping: ModuleType) -> None:
    model = variant(keeping, K=8)
    assert "generated kernels alone, not those of keeping: products need 16 rows" in model.explain()
    call = call_of(model, K=8)
    assert call.lowering is None and all(x.kernel is None for x in call.forward())


def test_what_runs_a_call(keeping: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXSP_BACKEND", "triton")
    for K, said in ((16, "runs kernels of the engine keeping"), (8, "runs generated kernels")):
        x = {name: torch.ones(1, 20, 2, 16 if name == "v" else K) for name in "qkv"}
        assert variant(keeping, K).runs(**x) == said
        assert variant(keeping, K, lowering="generated").runs(**x) == "runs generated kernels"


def test_engines_are_of_a_program(keeping: ModuleType) -> None:
    mine, plain, other = variant(keeping), variant(keeping, lowering="generated"), variant(keeping, lowerings=[])
    assert mine.kernels.program.lowerings == (keeping.KEEPING,)
    assert plain.kernels is other.kernels and plain.kernels.program.lowerings == ()
    assert mine.likeness() != plain.likeness()
    with pytest.raises(ValueError, match='lowering: expected "auto" or "generated", got None'):
        variant(keeping, lowering=None)


def test_copies_have_the_engine(keeping: ModuleType) -> None:
    model = variant(keeping)
    assert copy.deepcopy(model).kernels is model.kernels
    (again,) = pickle.loads(pickle.dumps(model)).kernels.program.lowerings
    assert isinstance(again, keeping.Keeping)


def test_the_first_engine_that_takes_a_call_runs_it(keeping: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several: of whole calls, of parts, and in PyTorch."""

    class Whole(Lowering):
        def __init__(self, name: str, takes: bool) -> None:
            self.name, self.takes = name, takes

        def plan(self, code: Any, *given: Any) -> Any:
            return call_of(variant(keeping, lowering="generated")) if self.takes else None

        def in_pytorch(self, program: Any, inputs: Any, *given: Any) -> Any:
            return (inputs["v"] * len(self.name), None) if self.takes else None

        def refuses(self, plan: Any) -> str | None:
            return "it runs whole calls only"

    x = {name: torch.ones(1, 20, 2, 16) for name in "qkv"}
    refusing, first, second = Whole("refusing", False), Whole("first", True), Whole("second", True)
    model = variant(keeping, lowerings=[refusing, first, second])
    assert model(**x)[0].unique().tolist() == [5.0]
    part = variant(keeping, lowerings=[refusing, keeping.KEEPING])
    assert call_of(part).lowering is keeping.KEEPING
    monkeypatch.setenv("FLEXSP_BACKEND", "triton")
    assert model.runs(**x) == "runs kernels of the engine first"
    assert part.runs(**x) == "runs kernels of the engine keeping"


def test_what_nothing_wrote_is_not_read(keeping: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that do not save what they read, leave out what a call returns, or launch in another order, are refused
    before the first launch."""

    def executable() -> Any:
        given = {name: torch.empty(1, 9000, 2, 16) for name in "qkv"}
        return executable_of(variant(keeping).kernels, given, None, None, None)

    do = torch.empty(1, 9000, 2, 16)
    assert "d_q" in executable().backward(do, None, False).makes
    with monkeypatch.context() as leaving_out:
        leaving_out.setattr(keeping.Keeping, "backward", lambda self, plan, launches: [])
        with pytest.raises(ValueError, match="expected launches that write @dinitial, d_k, d_q, d_v, got only"):
            executable().backward(do, None, True)
        leaving_out.setattr(keeping.Keeping, "forward", lambda self, plan, launches: launches[:-1])
        with pytest.raises(ValueError, match="expected launches that write @final, o, got only"):
            executable()
    with monkeypatch.context() as forgetful:
        forgetful.setattr(keeping, "Role", SimpleNamespace(SAVED=Role.SCRATCH))
        made = executable()
        with pytest.raises(ValueError, match=r"a launch before '\w+' to write '@kept_entering', which it reads"):
            made.backward(do, None, False)
    monkeypatch.setattr(keeping.Keeping, "forward", lambda self, plan, launches: launches[::-1])
    with pytest.raises(ValueError, match="a launch before 'output' to write '@states'"):
        executable()


def test_what_no_program_carries(keeping: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(Lowering):
        name = "other"

    for wrong in (Other(), ["other"]):
        with pytest.raises(ValueError, match="lowerings: expected a list of instances of classes made from"):
            variant(keeping, lowerings=wrong)
    with pytest.raises(ValueError, match="lowerings: expected one of each name, got other, other"):
        variant(keeping, lowerings=[Other(), Other()])
    with pytest.raises(ValueError, match="lowering.name: expected one word, got ''"):
        variant(keeping, lowerings=[Lowering()])
    for former, now in (("call", "plan"), ("buffer", "buffers")):
        old = type("Old", (Other,), {former: lambda self, *given: None})
        with pytest.raises(ValueError, match=f"lowerings: other: expected a method {now}, which {former} was called b"):
            variant(keeping, lowerings=[old()])
        both = type("Both", (old,), {now: lambda self, *given: ()})
        assert variant(keeping, lowerings=[both()]).program.lowerings
    call = call_of(variant(keeping))
    with pytest.raises(ValueError, match="phases: expected kinds among .*output, got outputs"):
        replaced(call.forward(), {"outputs": []})
    taken = [Buffer("@states", Role.SCRATCH, torch.float32, (1,))]
    monkeypatch.setattr(keeping.Keeping, "buffers", lambda self, plan: taken)
    with pytest.raises(ValueError, match="names that no other buffer of the plan has, got @states"):
        _ = call_of(variant(keeping)).buffers


def test_several_launches_in_place_of_one(keeping: ModuleType) -> None:
    launches: list[LaunchSpec] = call_of(variant(keeping, lowering="generated")).forward()
    two = [replace(launches[-1], kind=name) for name in ("first", "second")]
    assert [x.kind for x in replaced(launches, {"output": two})] == [
        *(x.kind for x in launches[:-1]), "first", "second",
    ]  # fmt: skip


@pytest.mark.slow
def test_over_ranks(tmp_path: Path) -> None:
    save_scripts("add-an-engine.md", tmp_path)
    (tmp_path / "ranks.py").write_text(OVER_RANKS)
    interpreted = INTERPRETED | {"FLEXSP_CODE_DIR": str(tmp_path)}
    assert run_script(tmp_path / "ranks.py", 3, **interpreted) == ["as one rank"]


def merge_by_parts(q, k, v, chunk_state, scale):  # type: ignore[no-untyped-def]
    """No kernel is made of the slices."""
    w = (q @ k.T).tril()
    return (q @ chunk_state + torch.cat([w[:16] * 1.0, w[16:]]) @ v) * scale


@pytest.mark.parametrize("reads", [False, True])
def test_what_a_lowering_serves_and_does_not_take_runs_in_pytorch(monkeypatch: pytest.MonkeyPatch, reads: bool) -> None:
    """Where no kernels are generated: `fallback` says so, whatever the lowering says it serves, or reads to say it."""

    class Declines(Lowering):
        name = "declines"

        def serves(self, code: Any, inputs: Any) -> bool:
            return not reads or bool(code.layout)

    monkeypatch.setenv("FLEXSP_BACKEND", "triton")
    h, k, v = ConstExpr("H", 1), ConstExpr("K", 4), ConstExpr("V", 4)
    meta = {name: SymbTensor(["T", h, k if name != "v" else v]) for name in "qkv"}
    given: dict[str, Any] = meta | {"prev_s": SymbTensor(["NS", h, k, v]), "scale": 0.5}
    functions = (linear.chunk, linear.decay, merge_by_parts)
    x = {name: torch.randn(1, 20, 1, 4) for name in "qkv"}
    variant = LinearAttention(given, *functions, lowerings=[Declines()], fallback="pytorch")
    with pytest.warns(UserWarning, match="runs in PyTorch, slowly: no kernel is made of slice"):
        o, _ = variant(**x)
    assert o.isfinite().all()
    with pytest.raises(NotEmittable, match="no kernels run this call: no kernel is made of slice"):
        LinearAttention(given, *functions, lowerings=[Declines()])(**x)
    # Neither do generated kernels run what they are known to get wrong.
    monkeypatch.setattr(planning, "_wrong_on_gpus", lambda *args: "wrong on GPUs")
    with pytest.raises(NotEmittable, match="no kernels run this call: wrong on GPUs"):
        LinearAttention(given, linear.chunk, linear.decay, linear.merge, lowerings=[Declines()])(**x)


def test_the_delta_engine_serves_what_it_takes() -> None:
    """Kernels for gates of channels take one key a token."""
    model = vector_gated_delta.make(1, 16, 16, torch.bfloat16)
    code, (half, rows) = Generated(model.program), (torch.bfloat16, (8, 1, 16))
    spec = {"q": (half, rows), "k": (half, rows), "v": (half, rows), "g": (torch.float32, rows)}
    spec["beta" if "beta" in model.program.meta.tokens else "b"] = half, rows[:2]
    assert DELTA_RULE.serves(code, spec)
    assert not DELTA_RULE.serves(code, spec | {"q": (half, (4, 1, 16))})
