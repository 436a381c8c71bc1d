"""Calls that look alike are checked and planned once: what a recipe gives is what the op gives, and nothing that the
op would refuse or do otherwise is taken for a call that looks alike."""

from __future__ import annotations

import contextlib
import gc
import math
import random
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._vmap_internals import _vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from flexsp import ops
from flexsp.comm import group
from flexsp.comm.group import SequenceParallel, sequence_parallel
from flexsp.exceptions import NotAvailable, checks_wanted
from flexsp.kernels import executable, run
from flexsp.ops import _recipe, _validate, chunk_simple_gla
from flexsp.ops._recipe import forget
from flexsp.runtime.recipe import Recipe, noted, step
from flexsp.testing.cases import Shape
from flexsp.testing.ranks import run_ranks
from tests.harness.interpreted import INTERPRETED
from tests.harness.ops import ALL

Tensors = dict[str, torch.Tensor]
SMALL = Shape(B=1, T=6, H=2, K=8, V=8)
READS = _validate.readable
BY_RECIPE = {
    "linear", "simple_gla", "gamma", "retention", "lightning", "mamba2_groups", "delta_rule", "gated_delta_rule", "kda",
    "delta_product", "gated_delta_product", "gla", "hgrn", "hgrn2", "rg_lru", "rwkv6", "rwkv7", "selective_scan",
    "mamba3", "mlstm",
}  # fmt: skip
"""Cases whose ops have recipes; others do more with tensors than steps do."""
GENERATED = {"hgrn2", "rwkv6", "rwkv7"}
"""Those whose kernels are derived first, which takes seconds: their calls go the way of gla's."""


BY_NAME = [x for x in (getattr(ops, name) for name in ops.__all__) if hasattr(getattr(x, "__wrapped__", None), "kept")]
"""The public ops whose calls may have recipes."""


def recipes() -> list[Any]:
    """Of calls that are kept, None for those that have none."""
    return [each.recipe for op in BY_NAME for calls in op.__wrapped__.kept.values() for each in calls]


def unread(x: torch.Tensor) -> bool:
    return checks_wanted()


@pytest.fixture(autouse=True)
def none_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel runs, and values are not read, as on a GPU; no call was made before."""
    monkeypatch.setenv("FLEXSP_BACKEND", "triton")
    for module in (executable, run):
        monkeypatch.setattr(module, "run_steps", lambda *args: None)
    monkeypatch.setattr(_validate, "readable", unread)
    forget()


def drawn(**others: Any) -> dict[str, Any]:
    x: dict[str, Any] = {name: torch.randn(1, 20, 2, 16) for name in "qkv"}
    return x | {"g": -torch.rand(1, 20, 2), "scale": 1.0} | others


def asked(op: Any, x: dict[str, Any], reads: Callable[[torch.Tensor], bool] = unread) -> list[torch.Tensor]:
    """Outputs, final states and gradients of a call. Where values are read there are no recipes."""
    _validate.readable = reads
    floats = {name: y for name, y in x.items() if torch.is_tensor(y) and y.is_floating_point()}
    made_of = {id(y): y.detach().requires_grad_() for y in floats.values()}  # one leaf of a tensor that is there twice
    leaves = {name: made_of[id(y)] for name, y in floats.items()}
    made = [y for y in op(**x | leaves) if y is not None]
    made = [z for y in made for z in (y if isinstance(y, tuple) else (y,))]
    ends = [y for y in made if y.requires_grad]
    return [*made, *torch.autograd.grad(ends, [*made_of.values()], [torch.ones_like(y) for y in ends])]


def in_float32(name: str, seed: int) -> dict[str, Any]:
    given = ALL[name].inputs(SMALL, seed)
    return {key: y.float() if torch.is_tensor(y) and y.is_floating_point() else y for key, y in given.items()}


def by_recipe_and_without(sp: Any, names: list[str], seed: int) -> dict[str, list[bool]]:
    """Whether two calls give what the op gives, the second one by recipe."""
    found = {}
    for name in names:
        same = []
        for n in range(2):
            x = in_float32(name, seed + n)
            made, expected = asked(ALL[name].op, x), asked(ALL[name].op, x, READS)
            same.append(all(torch.equal(a, b) for a, b in zip(made, expected, strict=True)))
        found[name] = [*same, *(x is not None for x in recipes())]
        forget()
    return found


def test_a_recipe_gives_what_the_op_gives() -> None:
    names = sorted(BY_RECIPE - GENERATED)
    (found,) = run_ranks(by_recipe_and_without, 1, names, random.randrange(2**31), env=INTERPRETED, own_processes=True)
    assert found == dict.fromkeys(names, [True] * 3)


def documents_by_index(sp: Any, seed: int) -> list[bool]:
    """Whether calls that look alike, with documents elsewhere, give what the op gives; and whether one has a recipe."""
    torch.manual_seed(seed)
    given = {name: torch.randn(1, 20, *sizes) for name, sizes in {"x": (2, 16), "B": (1, 16), "C": (1, 16)}.items()}
    given |= {"dt": torch.rand(1, 20, 2), "A": -torch.rand(2)}
    same = []
    for begin in (3, 11, 17):
        x = given | {"seq_idx": (torch.arange(20) >= begin).int()[None]}
        found, expected = asked(ops.mamba2_ssd, x), asked(ops.mamba2_ssd, x, READS)
        same.append(all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)))
    return [*same, any(x is not None for x in recipes())]


def test_documents_that_are_read_have_no_recipe() -> None:
    """How many there are decides what is launched, and is no fact of how a call looks."""
    seed = random.randrange(2**31)
    (found,) = run_ranks(documents_by_index, 1, seed, env=INTERPRETED, own_processes=True)
    assert found == [True, True, True, False]


@pytest.mark.slow
def test_which_ops_have_recipes() -> None:
    found = set()
    for name, case in ALL.items():
        forget()
        case.op(**in_float32(name, 1))
        found |= {name} if recipes() and None not in recipes() else set()
    assert found == BY_RECIPE


def turned(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def unaligned(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)


OTHERS: dict[str, Callable[[], dict[str, Any]]] = {
    "the scale": lambda: drawn(scale=2.0),
    "a flag": lambda: drawn(output_final_state=True),
    "a state": lambda: drawn(initial_state=torch.randn(1, 2, 16, 16)),
    "documents": lambda: drawn(cu_seqlens=torch.tensor([0, 9, 20])),
    "the length": lambda: {name: x[:, :19] if torch.is_tensor(x) else x for name, x in drawn().items()},
    "strides": lambda: drawn(k=turned(torch.randn(1, 20, 2, 16))),
    "alignment": lambda: drawn(v=unaligned(torch.randn(1, 20, 2, 16))),
    "a dtype": lambda: {name: x.half() if torch.is_tensor(x) else x for name, x in drawn().items()},
    "a need of gradients": lambda: drawn(q=torch.randn(1, 20, 2, 16).requires_grad_()),
    "a parameter": lambda: drawn(q=torch.nn.Parameter(torch.randn(1, 20, 2, 16))),
    "names": lambda: {"g_gamma": -torch.rand(2)} | {name: x for name, x in drawn().items() if name != "g"},
}


@pytest.mark.parametrize("other", OTHERS)
def test_what_tells_calls_apart(other: str) -> None:
    chunk_simple_gla(**drawn())
    first = recipes()
    x = OTHERS[other]()
    chunk_simple_gla(**x)
    assert len(recipes()) == len(first) + 1
    for y in (x, drawn()):
        chunk_simple_gla(**y)
    assert len(recipes()) == len(first) + 1


def test_gradients_wanted_or_not_tell_calls_apart() -> None:
    x = drawn(q=torch.randn(1, 20, 2, 16).requires_grad_())
    with torch.no_grad():
        assert not chunk_simple_gla(**x)[0].requires_grad
    assert chunk_simple_gla(**x)[0].requires_grad
    assert len(recipes()) == 2


BAD: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "a shape": (lambda: drawn(g=-torch.rand(1, 20, 3)), "g: expected shape"),
    "a dtype": (lambda: drawn(g=-torch.rand(1, 20, 2).double()), "g: expected dtype"),
    "a device": (lambda: drawn(k=torch.randn(1, 20, 2, 16, device="meta")), "k: expected a tensor .* meta device"),
    "a layout": (lambda: drawn(k=torch.randn(1, 20, 2, 16).to_sparse()), "k: expected"),
    "a flag": (lambda: drawn(output_final_state=1), "output_final_state: expected"),
    "no tensor": (lambda: drawn(g=3.0), "g: expected"),
    "a number": (lambda: drawn(scale=math.inf), "scale: expected"),
    "ranks": (lambda: drawn(sp=True), "sp: expected"),
    "what is nested": (
        lambda: drawn(v=torch.nested.nested_tensor([torch.ones(20, 2, 16)], layout=torch.strided)), "v: expected",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("bad", BAD)
def test_bad_arguments_are_refused_after_good_ones(bad: str) -> None:
    make, message = BAD[bad]
    for _ in range(2):
        chunk_simple_gla(**drawn())
        with pytest.raises(ValueError, match=message):
            chunk_simple_gla(**make())


def test_checks_of_values_are_made_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        chunk_simple_gla(**drawn())
    monkeypatch.setenv("FLEXSP_CHECK", "1")
    with pytest.raises(ValueError, match="g: expected natural-log gates <= 0"):
        chunk_simple_gla(**drawn(g=torch.rand(1, 20, 2)))


def test_transforms_and_forward_mode_are_refused_after_plain_calls() -> None:
    x = drawn()
    for _ in range(2):
        chunk_simple_gla(**x)
    with pytest.raises(NotAvailable), torch.autograd.forward_ad.dual_level():
        chunk_simple_gla(**x)
    with pytest.raises(NotAvailable):
        torch.func.vmap(lambda q: chunk_simple_gla(**x | {"q": q})[0])(torch.stack([x["q"]] * 2))


def traced(call: Callable[[torch.Tensor], Any], q: torch.Tensor) -> None:
    torch.jit.trace(call, q, check_trace=False)


WATCHED: dict[str, Callable[[Callable[[torch.Tensor], Any], torch.Tensor], Any]] = {
    "a mode": lambda call, q: inside(FlopCounterMode(display=False), call, q),
    "tensors without memory": lambda call, q: inside(FakeTensorMode(allow_non_fake_inputs=True), call, q),
    "inference mode": lambda call, q: inside(torch.inference_mode(), call, q),
    "autocast": lambda call, q: inside(torch.autocast("cpu", dtype=torch.bfloat16), call, q),
    "forward mode": lambda call, q: inside(torch.autograd.forward_ad.dual_level(), call, q),
    "a graph of operators": lambda call, q: make_fx(call)(q),
    "a trace": traced,
    "vmap": lambda call, q: torch.func.vmap(call)(q.unsqueeze(0)),
    "grad": lambda call, q: torch.func.grad(lambda q: call(q)[0].sum())(q),
    "the earlier vmap": lambda call, q: _vmap(call)(q.unsqueeze(0)),
}


def inside(context: Any, call: Callable[[torch.Tensor], Any], q: torch.Tensor) -> None:
    with context:
        call(q)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WATCHED)
def test_what_looks_at_a_call_sees_the_op(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe of calls that nothing looked at is not taken, whatever the op then does."""
    x, taken, follow = drawn(), [], Recipe.__call__

    def note(recipe: Recipe, tensors: list[Any]) -> Any:
        taken.append(recipe)
        return follow(recipe, tensors)

    monkeypatch.setattr(Recipe, "__call__", note)
    for _ in range(2):
        chunk_simple_gla(**x)
    assert len(taken) == 1
    with contextlib.suppress(Exception):
        WATCHED[way](lambda q: chunk_simple_gla(**x | {"q": q}), x["q"])
    assert len(taken) == 1
    chunk_simple_gla(**x)
    assert len(taken) == 2


def odd_tensors(sp: Any) -> list[bool]:
    """Whether calls with views that are negated when they are read, and with a tensor twice, give what the op gives."""
    x, same = drawn(), []
    twice = x | {"k": x["q"]}
    for given in (twice, x, x | {"q": torch._neg_view(x["q"])}, twice, x, x):
        found, expected = asked(chunk_simple_gla, given), asked(chunk_simple_gla, given, READS)
        same.append(torch.equal(found[0], expected[0]))
    return same


def test_tensors_that_are_read_otherwise_or_twice() -> None:
    assert run_ranks(odd_tensors, 1, env=INTERPRETED, own_processes=True) == [[True] * 6]


def test_graphs_hold_the_op_itself() -> None:
    x, nodes = drawn(), []

    def note(graph: Any, _: Any) -> Any:
        nodes.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    chunk_simple_gla(**x)
    with torch.no_grad():
        torch.compile(chunk_simple_gla, fullgraph=True, backend=note)(**x)
    assert any("flexsp" in name for name in nodes)


def test_groups_tell_calls_apart_and_lengths_are_checked() -> None:
    x, sp = drawn(), SequenceParallel()
    for _ in range(2):
        chunk_simple_gla(**x, sp=sp)
    first = len(recipes())
    with sequence_parallel(sp):
        chunk_simple_gla(**x)
    chunk_simple_gla(**x, sp=SequenceParallel())
    chunk_simple_gla(**x)
    assert len(recipes()) == first + 3
    sp.set_lengths([21])
    with pytest.raises(ValueError, match=r"expected a shard of 21 tokens \(set_lengths\), got 20"):
        chunk_simple_gla(**x, sp=sp)


def test_a_group_that_is_opened_later_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a call that was made before without ranks, and has a recipe."""
    x = drawn()
    monkeypatch.setattr(group, "_warned", set())
    with mock.patch.dict(group.GROUPS, clear=True):
        for _ in range(2):
            chunk_simple_gla(**x)
        group.GROUPS[-1] = SimpleNamespace(world_size=2)
        with pytest.warns(UserWarning, match="chunk_simple_gla: each of 2 ranks takes its tokens"):
            chunk_simple_gla(**x)


def twice_over_ranks(sp: Any, seed: int, packed: bool) -> list[bool]:
    """Whether calls by recipe give what the op gives, and have one."""
    torch.manual_seed(seed)
    same = []
    for _ in range(2):
        x = {name: sp.shard(y) if torch.is_tensor(y) else y for name, y in drawn().items()}
        x |= {"sp": sp, "output_final_state": True}
        x |= {"cu_seqlens": torch.tensor([0, 7, 20])} if packed else {}
        found, expected = asked(chunk_simple_gla, x), asked(chunk_simple_gla, x, READS)
        same.append(all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)))
    return [*same, *(x is not None for x in recipes())]


@pytest.mark.parametrize("packed", [False, True])
def test_over_ranks(packed: bool) -> None:
    """Ranks tell each other their lengths where documents are packed, in each call: that has no recipe."""
    found = run_ranks(
        twice_over_ranks, 2, random.randrange(2**31), packed, env=INTERPRETED, own_processes=True, timeout=200
    )  # fmt: skip
    assert found == [[True, True, not packed]] * 2


# Notes ----------------------------------------------------------------------------------------------------------------


@step
def doubled(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by


@step
def parts(x: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, None, torch.Tensor]:
    return x[0] + 1, None, x[1] - 1


@step
def named(x: Tensors) -> torch.Tensor:
    return x["x"] * 2


class Box:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


@step
def boxed(x: Box) -> torch.Tensor:
    return x.x * 2


@step
def measured(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
    return x * 2, float(x.sum())


def test_steps_are_done_again_with_other_tensors() -> None:
    a, b = torch.randn(2, 3).unbind(0)

    def call(a: torch.Tensor, b: torch.Tensor) -> Any:
        up, _, down = parts((b, doubled(a, 3.0)))
        return down, None, [up, b]

    made, recipe = noted(lambda: call(a, b), [a, b])
    assert recipe is not None
    x, y = torch.randn(2, 5).unbind(0)
    (down, none, (up, same)), (expected_down, _, (expected_up, _)) = recipe([x, y]), call(x, y)
    assert none is None and same is y and torch.equal(down, expected_down) and torch.equal(up, expected_up)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: doubled(x + 1, 2.0), lambda x: doubled(x, 2.0) + 1, lambda x: x, lambda x: doubled(x, 2.0).sum(),
        lambda x: parts((x, x.clone())), lambda x: parts((x, x[:1])), lambda x: (doubled(x, 2.0), x * 1),
        lambda x: named({"x": x}), lambda x: boxed(Box(x)), lambda x: doubled(*measured(x)),
        lambda x: (doubled(x, 2.0), Box(x)), lambda x: doubled(x, by=2.0),
    ],
)  # fmt: skip
def test_what_no_step_made_has_no_recipe(call: Callable[[torch.Tensor], Any]) -> None:
    x = torch.randn(3)
    made, recipe = noted(lambda: call(x), [x])
    assert made is not None and recipe is None
    assert noted(lambda: doubled(x, 2.0), [x])[1] is not None  # an earlier call leaves nothing behind


def test_a_failing_call_leaves_no_notes() -> None:
    def fails() -> None:
        raise KeyError("here")

    with pytest.raises(KeyError):
        noted(fails, [torch.ones(1)])
    chunk_simple_gla(**drawn())
    assert recipes() and None not in recipes()


def test_no_tensor_of_a_noted_call_stays() -> None:
    x = drawn(q=torch.randn(1, 20, 2, 16).requires_grad_())
    made = chunk_simple_gla(**x)
    kept = [weakref.ref(y) for y in (*x.values(), made[0]) if torch.is_tensor(y)]
    del x, made
    gc.collect()
    assert [y() for y in kept] == [None] * len(kept) and recipes() != [None]


def made_by_recipe(**others: Any) -> tuple[dict[str, Any], torch.Tensor]:
    """Arguments of a second call, q with a gradient, and its outputs."""
    for _ in range(2):
        x = drawn(q=torch.randn(1, 20, 2, 16).requires_grad_(), **others)
        o = chunk_simple_gla(**x)[0]
    return x, o


def test_autograd_sees_a_call_by_recipe_as_any_other() -> None:
    x, o = made_by_recipe()
    x["k"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()
    x, o = made_by_recipe()
    with pytest.raises(NotAvailable, match="second derivatives"):
        torch.autograd.grad(o.sum(), x["q"], create_graph=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda y: kept.append(y) or y, lambda y: y):
        x, o = made_by_recipe()
    assert any(y is x["k"] for y in kept)
    for _ in range(2):
        o.sum().backward(retain_graph=True)
    with torch.no_grad():
        assert not chunk_simple_gla(**x)[0].requires_grad


def test_few_calls_are_kept() -> None:
    kept = chunk_simple_gla.__wrapped__.kept
    for n in range(_recipe._CALLS + 3):
        chunk_simple_gla(**drawn(scale=1.0 + n))
    assert len(kept) == _recipe._CALLS
    forget()
    for n in range(_recipe._LAYOUTS + 3):
        chunk_simple_gla(**drawn(v=torch.randn(1, 20, 2, 16 + n)))
    assert [len(calls) for calls in kept.values()] == [_recipe._LAYOUTS]


def refused(*args: Any, **options: Any) -> Any:
    raise TypeError


class TellsNothing:
    def check(self, *tensors: torch.Tensor) -> bool:
        return True


@pytest.mark.parametrize("guards", [refused, lambda tensors: torch.gone, lambda tensors: TellsNothing()])
def test_without_guards_there_are_no_recipes(guards: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_recipe, "_guards", guards)
    _recipe._guards_tell.cache_clear()
    try:
        for _ in range(2):
            chunk_simple_gla(**drawn())
        assert recipes() == []
    finally:
        _recipe._guards_tell.cache_clear()


def test_pytorch_tells_tensors_apart_as_recipes_need_it() -> None:
    """`TensorGuards` is not public. Where a release lacks it, or compares less, that is seen here."""
    a, b = torch.randn(2, 3), torch.randn(3)
    assert _recipe._guards_tell(), "no call has a recipe with this release"
    guards = _recipe._guards([a, b])
    assert guards.check(torch.randn(2, 3), torch.randn(3))
    others = [
        torch.randn(2, 4), torch.randn(3, 2).t(), a.double(), a.to("meta"), a.clone().requires_grad_(),
        torch.nn.Parameter(a, requires_grad=False), torch._neg_view(a), torch._efficientzerotensor(2, 3), a.to_sparse(),
    ]  # fmt: skip
    assert not any(guards.check(x, b) for x in others)
    with torch.inference_mode():
        assert not guards.check(a, b)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not guards.check(a, b)
    kept = [weakref.ref(x) for x in (a, b)]
    del a, b, others
    assert [x() for x in kept] == [None, None]
