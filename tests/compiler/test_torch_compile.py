"""torch.compile keeps every op, alone or over ranks, in one graph and changes no result."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import flexsp
from flexsp import SequenceParallel, SequenceParallelLA, ops
from flexsp.compiler import LinearAttention
from flexsp.grammar import FlexLinearAttention, transition
from flexsp.nn.wrapper import _warn_of_checkpoint
from flexsp.testing.cases import CASES, PROGRAM_CASES, Shape
from flexsp.testing.compare import relative_error
from flexsp.testing.ranks import run_ranks
from tests import variants
from tests.harness.compiled import ONE, SIZES, compiled, counted, leaf, of_many_sizes, saturating, tensors
from tests.harness.interpreted import INTERPRETED
from tests.harness.layers import LAYERS, make
from tests.marks import quick, slow
from tests.op_cases import OTHER_CASES

EXACT = 1e-12
ALL = CASES | PROGRAM_CASES
OF_SIZES = ALL | OTHER_CASES


def results(f: Callable[..., Any], inputs: dict[str, Any]) -> list[torch.Tensor]:
    """Outputs and gradients of the sum of their squares."""
    inputs = {name: leaf(x) for name, x in inputs.items()}
    outputs = tensors(f(**inputs))
    loss = sum((x.square().sum() for x in outputs), torch.zeros((), dtype=torch.float64))
    return [*outputs, *torch.autograd.grad(loss, tensors(inputs))]


def assert_same(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert len(got) == len(want)
    assert all(relative_error(a, b) < EXACT for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    "name",
    quick(
        ["mamba2_groups", *PROGRAM_CASES],
        "simple_gla", "normalized", "gated_delta_rule_in_kernel", "kda_in_kernel", "gated_delta_product",
    ),
)  # fmt: skip
def test_one_graph(name: str) -> None:
    case = ALL[name]
    inputs = case.inputs(Shape(B=1, T=70, K=6, V=5, states=3), random.randrange(2**31))
    inputs["cu_seqlens"] = torch.tensor([0, 20, 20, 70])

    def f(**kwargs: Any) -> Any:
        return case.op(**kwargs, output_final_state=True)

    assert_same(results(compiled(f), inputs), results(f, inputs))


@pytest.mark.parametrize("name", ["gamma", "mamba2", *slow("linear", "retention", "lightning")])
def test_one_graph_of_the_other_gates(name: str) -> None:
    T = 2200 if name == "gamma" else 20  # long enough for two levels of the scan, once
    inputs = CASES[name].inputs(Shape(T=T, K=6, V=5), random.randrange(2**31))
    with torch.no_grad():
        assert_same([compiled(CASES[name].op)(**inputs)[0]], [CASES[name].op(**inputs)[0]])


def differences(f: Callable[..., Any], g: Callable[..., Any], inputs: dict[str, Any]) -> list[float]:
    """Of outputs, and of gradients of the sum of their squares, of two functions."""
    found = []
    for each in (f, g):
        outputs = tensors(each(**inputs))
        loss = sum((x.square().sum() for x in outputs), torch.zeros((), dtype=torch.float64))
        found.append([*outputs, *torch.autograd.grad(loss, tensors(inputs))])
    return [relative_error(a, b) for a, b in zip(*found, strict=True)]


@pytest.mark.parametrize("name", quick(OF_SIZES, "simple_gla", "kda", "mlstm"))
def test_one_graph_of_all_lengths_and_batches(name: str) -> None:
    """Of less than a chunk, of whole chunks and of more."""
    case = OF_SIZES[name]

    def f(**kwargs: Any) -> Any:
        return case.op(**kwargs, output_final_state=True)

    step, made = counted(f)
    for B, T in ((2, 70), (3, 129), (4, 64), (2, 20), (5, 2100)):
        if T > 1000 and name != "simple_gla":
            continue
        drawn = case.inputs(Shape(B=B, T=T, K=6, V=5, states=B), random.randrange(2**31))
        inputs = {key: of_many_sizes(x, 0, 1) if key in case.tokens else of_many_sizes(x, 0) if "initial" in key
                  else leaf(x) for key, x in drawn.items()}  # fmt: skip
        assert max(differences(step, f, inputs)) < EXACT
    assert made == ONE


@pytest.mark.parametrize("name", ["hgrn", "rwkv7", "mlstm", *slow("gla", "kda", "gated_delta_product", "rwkv6")])
def test_one_graph_where_all_sizes_are_symbols(name: str) -> None:
    """Also those of heads, for which a program is made while torch.compile traces, and defaults such as scale."""
    case = OF_SIZES[name]
    step = torch.compile(lambda x: case.op(**x)[0], backend="eager", dynamic=True, fullgraph=True)
    for T in (20, 33):
        inputs = case.inputs(Shape(T=T, K=6, V=5), random.randrange(2**31))
        assert relative_error(step(inputs), case.op(**inputs)[0]) < EXACT


def lengths_in_kernels(sp: Any, packed: bool, inductor: bool) -> tuple[float, list[dict[str, int]]]:
    """The largest difference of a variant of generated kernels, and of an op, from the same in no graph."""
    model, found, worst = variants.load("deltanet").make(*SIZES), [], 0.0

    def of_model(cu: Any, **x: torch.Tensor) -> Any:
        return model(**{key: y * 1.5 for key, y in x.items()}, cu_seqlens=cu, sp=False)

    def of_op(cu: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, b: torch.Tensor) -> Any:
        return ops.chunk_simple_gla(q, k, v, -b.abs(), output_final_state=True, cu_seqlens=cu)

    for f in (of_model, of_op):
        step, made = counted(f, inductor)
        for B, T, cuts in ((2, 9, 1), (3, 40, 3), (4, 33, 2)):
            cu = torch.tensor([0, *range(1, cuts + 1), T]) if packed else None
            x = {key: of_many_sizes(y, *((1,) if packed else (0, 1)))
                 for key, y in inputs_of("deltanet", 1 if packed else B, T, torch.float32).items()}  # fmt: skip
            if cu is not None:
                torch._dynamo.maybe_mark_dynamic(cu, 0)
            worst = max(worst, *differences(functools.partial(step, cu), functools.partial(f, cu), x))
        found.append(made)
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda y: y):
            outputs = tensors(step(cu, **x))
        with pytest.raises(ValueError, match="saved tensors: expected those that the forward pass kept"):
            torch.autograd.grad(sum(y.sum() for y in outputs), tensors(x))
    return worst, found


@pytest.mark.parametrize(("packed", "inductor"), [*slow((False, False), (False, True), (True, True)), (True, False)])
def test_one_graph_of_kernels_of_all_lengths(packed: bool, inductor: bool) -> None:
    """Whose plan, and the memory that they keep, depend on the length."""
    assert run_ranks(lengths_in_kernels, 1, packed, inductor, env=INTERPRETED) == [(0.0, [ONE, ONE])]


def test_decoding_step() -> None:
    inputs = CASES["simple_gla"].inputs(Shape(T=1, K=6, V=5, states=2), random.randrange(2**31))

    def f(**kwargs: Any) -> Any:
        return ops.recurrent_simple_gla(**kwargs, output_final_state=True)

    assert_same(results(compiled(f), inputs), results(f, inputs))


@pytest.mark.parametrize("name", quick(LAYERS, "conv", "gla", "mamba2"))
def test_one_graph_of_a_layer(name: str) -> None:
    """Nothing breaks it, other lengths and batches neither, forward and backward."""
    layer, width = make(name, 0), LAYERS[name][2]
    f, made = counted(layer)
    for B, T in ((2, 70), (2, 129), (3, 64)):
        x = of_many_sizes(torch.randn(B, T, width, dtype=torch.float64), 0, 1)
        found = []
        for each in (f, layer):
            y = each(x)
            found.append([y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])])
        assert_same(*found)
    assert made == ONE


# Variants -------------------------------------------------------------------------------------------------------------


def inputs_of(name: str, B: int, T: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    tokens, params = variants.draw(name, B, T, random.randrange(2**31))
    cut = {variants.K: SIZES[1], variants.V: SIZES[2]}
    x = {key: y[..., : cut[y.shape[-1]]] if y.dim() == 4 else y for key, y in tokens.items()} | params
    return {key: y.to(dtype) for key, y in x.items()}


def of_variant(model: LinearAttention, sp: Any, **more: Any) -> Callable[..., Any]:
    """With something before and after it to compile, and every output used."""

    def f(**x: torch.Tensor) -> Any:
        o, final = model(**{key: y * 1.5 if key != "prev_s" else y for key, y in x.items()}, **more, sp=sp)
        return o.sin(), None if final is None else final * 2

    return f


@pytest.mark.parametrize(
    ("packed", "name"),
    [
        (False, "gla"), (False, "saturating"), (True, "deltanet"), (True, "gla_own_bias"),
        *slow((False, "deltanet"), (False, "gla_own_bias"), (True, "gla"), (True, "saturating")),
    ],
)  # fmt: skip
def test_one_graph_of_a_variant_in_pytorch(packed: bool, name: str) -> None:
    model = saturating() if name == "saturating" else variants.load(name).make(*SIZES)
    x = inputs_of("linear" if name == "saturating" else name, 1 if packed else 2, 9, torch.float64)
    x["prev_s"] = torch.randn(2, *SIZES, dtype=torch.float64)
    f = of_variant(model, False, cu_seqlens=torch.tensor([0, 4, 9]) if packed else None)
    assert_same(results(compiled(f), x), results(f, x))
    with torch.no_grad():
        assert_same(tensors(compiled(f)(**x)), tensors(f(**x)))
    if not packed:
        lone = {key: y[0] if y.dim() > 1 and key not in ("prev_s", "u") else y for key, y in x.items()}
        lone["prev_s"] = x["prev_s"][:1]
        assert_same(results(compiled(f), lone), results(f, lone))


def test_one_graph_of_two_variants_and_another_length() -> None:
    """The same code with other objects, and with other lengths, of which each has a graph."""
    step = compiled(lambda model, **x: model(**x, sp=False)[0])
    for name, T in (("gla", 9), ("deltanet", 9), ("gla", 9), ("gla", 17), ("gla", 5)):
        model, x = variants.load(name).make(*SIZES), inputs_of(name, 1, T, torch.float64)
        with torch.no_grad():
            assert_same([step(model, **x)], [model(**x, sp=False)[0]])


@pytest.mark.parametrize("name", ["delta", "custom"])
def test_one_graph_of_a_grammar(name: str) -> None:
    class Saved:
        def chunk(self, k: Any, v: Any) -> Any:
            return k.T @ v

        def propagate(self, state: Any, chunk_state: Any) -> Any:
            return state + chunk_state

        def output(self, q: Any, k: Any, v: Any, state: Any) -> Any:
            return (q @ k.T).tril() @ v + q @ state

    model = FlexLinearAttention(
        **{"transition": transition.delta_rule()} if name == "delta" else {"custom_transition": Saved}
    )
    x = {key: torch.randn(1, 9, 2, 4, dtype=torch.float64) for key in "qkv"}
    if name == "delta":
        x["beta"] = torch.rand(1, 9, 2, dtype=torch.float64)

    def f(**x: torch.Tensor) -> Any:
        return model(**{key: y * 0.5 for key, y in x.items()}, output_final_state=True, sp=False)

    assert_same(results(compiled(f), x), results(f, x))


def test_wrong_inputs_are_named_while_compiling() -> None:
    model = variants.load("simple_gla").make(*SIZES)
    x = inputs_of("simple_gla", 1, 9, torch.float64)
    with pytest.raises(Exception, match="g: expected"):
        compiled(model)(**x | {"g": x["q"]})
    with pytest.raises(Exception, match="inputs: expected"):
        compiled(model)(**x | {"h": x["q"]})


def variants_over_ranks(sp: SequenceParallel, seed: int, dtype: torch.dtype, names: list[str]) -> list[float]:
    random.seed(seed)
    sp.set_lengths(random.choice([[5, 0], [0, 5]]))
    errors = []
    for name, packed in itertools.product(names, (False, True)):
        torch.manual_seed(seed)
        model = saturating() if name == "saturating" else variants.load(name).make(*SIZES)
        x = inputs_of("linear" if name == "saturating" else name, 1, sum(sp.lengths or []), dtype)
        x = {key: sp.shard(y) if key != "u" else y for key, y in x.items()}
        f = of_variant(model, sp, cu_seqlens=torch.tensor([0, 2, sum(sp.lengths or [])]) if packed else None)
        got, want = results(compiled(f), x), results(f, x)
        errors += [relative_error(a, b) for a, b in zip(got, want, strict=True)]
    return errors


def test_one_graph_of_variants_over_ranks(seed: int) -> None:
    for errors in run_ranks(variants_over_ranks, 2, seed, torch.float64, ["gla", "saturating"], timeout=200):
        assert max(errors) < EXACT


def graphs_without_gradients(sp: Any) -> int:
    """How many graphs serve calls with one document to five."""
    counters.clear()
    f = compiled(lambda q, bounds: ops.chunk_simple_gla(q, q, q, -q.abs()[..., 0], cu_seqlens=bounds)[0])
    with torch.no_grad():
        for N in range(1, 6):
            f(torch.randn(1, 24, 2, 16), torch.tensor([0, *range(1, N), 24]))
    return counters["stats"]["unique_graphs"]


def test_the_number_of_documents_makes_no_graph_without_gradients() -> None:
    assert run_ranks(graphs_without_gradients, 1, env=INTERPRETED) == [2]  # of one document, and of more


def test_one_graph_of_kernels_over_ranks(seed: int) -> None:
    for errors in run_ranks(variants_over_ranks, 2, seed, torch.float32, ["deltanet"], env=INTERPRETED, timeout=200):
        assert max(errors) == 0


def twice_in_graphs(sp: Any) -> list[str]:
    """What differentiating a compiled call twice ends in."""
    found = []
    model = variants.load("linear").make(2, 4, 4)
    calls = (
        lambda q, k, v: ops.chunk_linear_attn(q, k, v, normalize=False)[0],
        lambda q, k, v: model(q=q, k=k, v=v)[0],
    )
    for f in calls:
        x = [torch.randn(1, 5, 2, 4, requires_grad=True) for _ in range(3)]
        o = compiled(f)(*x).sum()
        try:
            grads = torch.autograd.grad(o, x, create_graph=True)
            torch.autograd.grad(grads[0].square().sum(), x)
            found.append("differentiated twice")
        except RuntimeError as error:
            found.append(str(error))
    return found


def test_second_derivatives_of_graphs_are_refused() -> None:
    (found,) = run_ranks(twice_in_graphs, 1, env=INTERPRETED)
    assert all("double backward" in x for x in found), found  # torch.compile's own refusal


# Over ranks -----------------------------------------------------------------------------------------------------------


def over_ranks(
    sp: SequenceParallel, name: str, lengths: list[int], packed: bool, ambient: bool, seed: int,
    dtype: torch.dtype = torch.float64,
) -> None:  # fmt: skip
    case = ALL[name]
    sp.set_lengths(lengths)
    start = sum(lengths[: sp.rank])
    inputs = case.inputs(Shape(B=1, T=sum(lengths), K=6, V=5), seed)
    inputs = {n: x[:, start : start + lengths[sp.rank]] if n in case.tokens else x for n, x in inputs.items()}
    inputs = {n: x.to(dtype) if isinstance(x, torch.Tensor) else x for n, x in inputs.items()}
    if packed:
        inputs["cu_seqlens"] = torch.tensor([0, 10, 45, sum(lengths)])

    def f(**kwargs: Any) -> Any:
        if ambient:
            with flexsp.sequence_parallel(sp):
                return case.op(**kwargs)
        return case.op(**kwargs, sp=sp)

    want = results(f, inputs)
    assert_same(results(compiled(f), inputs), want)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.mix(x).view(*x.shape[:2], 2, 4)
        return x + ops.chunk_simple_gla(y, y.sin(), y.cos(), -y[..., 0].abs())[0].flatten(2)


class Checkpointed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def compile_checkpoints(sp: SequenceParallel, seed: int, whole: bool) -> float:
    """Largest difference of a compiled model's gradients from those of the eager one."""
    torch.manual_seed(seed)
    sp.set_lengths([6, 5])
    model = Checkpointed().double()
    if whole:
        SequenceParallelLA(model, sp)
    for block in [] if whole else model.blocks:
        SequenceParallelLA(block, sp)
    x = torch.randn(1, 11, 8, dtype=torch.float64)
    found = []
    for f in (model, compiled(model)):
        leaf = sp.shard(x).clone().requires_grad_()
        with flexsp.sequence_parallel(None if whole else sp):
            o = f(leaf)
        found.append(torch.autograd.grad(o.square().sum(), [leaf, *model.parameters()]))
    return max(relative_error(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("whole", [*slow(True), False])
def test_checkpoints_in_a_compiled_model(whole: bool, seed: int) -> None:
    """Of a wrapped model; of wrapped blocks, where the call enters the group."""
    for error in run_ranks(compile_checkpoints, 2, seed, whole, timeout=200):
        assert error < EXACT


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_checkpoint_that_ends_the_graph_says_so_once(fullgraph: bool) -> None:
    """Blocks wrapped one by one, in a model that is called outside their group."""
    sp = SequenceParallel()
    model = Checkpointed().double()
    for block in model.blocks:
        SequenceParallelLA(block, sp)
    _warn_of_checkpoint.cache_clear()
    x = torch.randn(1, 11, 8, dtype=torch.float64)
    f = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
    error = pytest.raises(torch._dynamo.exc.Unsupported) if fullgraph else contextlib.nullcontext()
    with pytest.warns(UserWarning, match="Block is checkpointed .* wrap the whole model") as told, error:
        f(x)
    assert len([w for w in told if "is checkpointed" in str(w.message)]) == 1


def test_a_checkpoint_in_the_graph_says_nothing() -> None:
    sp = SequenceParallel()
    model = SequenceParallelLA(Checkpointed().double(), sp)
    plain = SequenceParallelLA(torch.nn.Sequential(Block()).double(), sp)
    x = torch.randn(1, 11, 8, dtype=torch.float64)
    _warn_of_checkpoint.cache_clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".* is checkpointed")
        for f in (model, plain, plain[0]):
            compiled(f)(x)


def compile_over_ranks(sp: SequenceParallel, calls: list[tuple[Any, ...]]) -> None:
    for call in calls:
        over_ranks(sp, *call)


@pytest.mark.slow
def test_one_graph_over_ranks() -> None:
    """An empty shard compiles and answers too: its outputs have no elements, and its neighbours wait for it."""
    seed = random.randrange(2**31)
    calls = [
        ("simple_gla", [0, 70], False, True, seed),
        ("normalized", [40, 30], True, False, seed + 1),
        ("delta_product", [0, 70], False, True, seed + 2),
        ("gated_delta_product", [40, 30], True, False, seed + 3),
    ]
    run_ranks(compile_over_ranks, 2, calls, timeout=200)
    call = ("gated_delta_product", [30, 40], True, True, seed + 4, torch.float32)
    run_ranks(compile_over_ranks, 2, [call], env=INTERPRETED, timeout=200)
