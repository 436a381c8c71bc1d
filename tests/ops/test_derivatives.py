"""What autograd may ask of flexsp: second derivatives, transforms, inference mode, gradients of some leaves only."""

from __future__ import annotations

import importlib
import itertools
import os
import pkgutil
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import flexsp
from flexsp import SequenceParallel, nn, ops, sequence_parallel
from flexsp.comm import collectives
from flexsp.comm.derivatives import share_backward
from flexsp.comm.halo import halo_exchange
from flexsp.exceptions import NotAvailable
from flexsp.grammar import FlexLinearAttention, decay, transition
from flexsp.grammar import feature_map as features
from flexsp.nn import conv
from flexsp.nn.attention import scaled_dot_product_attention
from flexsp.scan.by_segments import by_segments
from flexsp.scan.exchange import add_backward_dependency
from flexsp.testing import compare
from flexsp.testing.cases import Shape
from flexsp.testing.ranks import run_ranks
from tests.harness.interpreted import INTERPRETED
from tests.harness.leaves import (
    ALL,
    Tensors,
    inputs_of,
    leaf,
    of_conv,
    of_graph,
    of_keys,
    of_mamba3,
    of_mlstm,
    of_op,
    of_raw_gates,
    of_variant,
    saturating,
    variant,
)
from tests.marks import quick, slow

Call = Callable[[], tuple[torch.Tensor, ...]]

# Every autograd.Function of the package -------------------------------------------------------------------------------


def functions_of_flexsp() -> dict[str, Any]:
    for module in pkgutil.walk_packages(flexsp.__path__, "flexsp."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found, waiting = {}, [torch.autograd.Function]
    while waiting:
        for cls in waiting.pop().__subclasses__():
            waiting.append(cls)
            if cls.__module__.startswith("flexsp."):
                found[f"{cls.__module__}.{cls.__name__}"] = cls
    return found


# Name: one output and the leaves it was computed from. Their backward passes refuse to be differentiated.
REFUSING: dict[str, Callable[[SequenceParallel], tuple[torch.Tensor, list[torch.Tensor]]]] = {
    "flexsp.kernels.operators._Function": lambda sp: of_variant("deltanet", sp, torch.float32),
    "flexsp.kernels.operators._Function on one rank": lambda sp: of_variant("deltanet", False, torch.float32),
    "flexsp.kernels.operators._Function of the engine": lambda sp: of_op(sp, torch.float32),
    "flexsp.kernels.operators._Function of the engine on one rank": lambda sp: of_op(False, torch.float32),
    "flexsp.kernels.operators._Function in operators": lambda sp: of_graph("deltanet", sp, torch.float32),
    "flexsp.kernels.operators._Function in PyTorch": lambda sp: of_graph("saturating", None, torch.float64),
    "flexsp.comm.process_group.OverRanks": of_conv,
    "flexsp.comm.process_group.OverRanks that gathers": lambda sp: (lambda x: (sp.gather(x * x), [x]))(leaf(1, 3)),
    "flexsp.comm.process_group.OverRanks with rows": lambda sp: (
        lambda x: (collectives.exchange_rows(x * x, [2, 1], [2 - sp.rank] * 2, "rows", sp), [x])
    )(leaf(3, 2)),
    "flexsp.nn.attention.blocks._BlocksFunction": lambda sp: (
        lambda x: (scaled_dot_product_attention(*x, sp=False), list(x))
    )([leaf(1, 6, 2, 4) for _ in range(3)]),
    "flexsp.scan.exchange._ExchangeFunction": lambda sp: of_op(sp, torch.float64),
    "flexsp.scan.exchange._ExchangeFunction of matrices": lambda sp: of_variant("deltanet", sp, torch.float64),
    "flexsp.scan.relay._FromLeft": lambda sp: of_variant("saturating", sp, torch.float64),
    "flexsp.scan.relay._ToRight": lambda sp: of_variant("saturating", sp, torch.float64),
    "flexsp.kernels.keys._UnitKeys": lambda sp: of_keys(),
    "flexsp.kernels.raw_gates._Activated": lambda sp: of_raw_gates(),
    "flexsp.kernels.mamba3.autograd_functions._Steps": lambda sp: of_mamba3(),
    "flexsp.kernels.mamba3.autograd_functions._Turns": lambda sp: of_mamba3(final=True),
    "flexsp.kernels.mamba3.autograd_functions._Turning": lambda sp: of_mamba3(),
    "flexsp.kernels.mamba3.autograd_functions._Rows": lambda sp: of_mamba3(),
    "flexsp.kernels.mlstm.gates._Gates": lambda sp: of_mlstm(),
    "flexsp.kernels.operators._BothFunction": lambda sp: of_mlstm(),
    "flexsp.kernels.mlstm.rows._Quotients": lambda sp: of_mlstm(),
    "flexsp.testing.compare._LowPrecisionFunction": lambda sp: (
        lambda x: (compare.low_precision(*x, scale=1.0)[0], list(x))
    )([leaf(1, 4, 2, 3, dtype=torch.float32) for _ in range(3)]),
}
# The same over a group that keeps the bits of one rank.
_IN_ORDER = ("_BeginFunction", "_EnterFunction", "_EdgeFunction", "_JoinFunction", "_LeaveFunction")
IN_SEGMENTS = {
    "flexsp.kernels.segments._Function": lambda sp: of_op(sp, torch.float32),
    **dict.fromkeys((f"flexsp.scan.in_order.{x}" for x in _IN_ORDER), lambda sp: of_op(sp, torch.float64)),
    "flexsp.scan.by_segments._TogetherFunction": lambda sp: of_tokens(sp),
}


def of_tokens(sp: SequenceParallel) -> tuple[torch.Tensor, list[torch.Tensor]]:
    x, w = leaf(1, 6, 4), leaf(4)
    with sequence_parallel(sp):
        return by_segments(None, "tokens", lambda x, w: x * x * w, x, shared=[w]), [x, w]


def of_shared(*x: torch.Tensor) -> torch.Tensor:
    _, a, b = share_backward(SequenceParallel(world_size=2), *x)
    return a.sin() * b


# Name: a function of tensors that may be differentiated twice, and the shapes of these.
TWICE: dict[str, tuple[Callable[..., torch.Tensor], list[tuple[int, ...]]]] = {
    "flexsp.comm.derivatives._SharedBackward": (of_shared, [(3,), (3,)]),
    "flexsp.scan.exchange._BackwardDependency": (lambda a, b: add_backward_dependency(a * a * b, b), [(3,), (3,)]),
    "flexsp.nn.conv._CausalTapsFunction": (
        lambda x, w: conv._CausalTapsFunction.apply(x, w, torch.tensor([0, 1, 0, 1, 2])),
        [(1, 7, 2), (2, 3)],
    ),
}


def nodes_of(o: torch.Tensor) -> set[str]:
    seen, waiting = set(), [o.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [other for other, _ in node.next_functions]
    return {type(node).__name__ for node in seen}


def refuse_all(sp: SequenceParallel) -> dict[str, list[str]]:
    """For each call: was its Function there, and what came of gradients that need (no) gradients themselves."""
    torch.manual_seed(sp.rank)
    found: dict[str, list[str]] = {}
    for name, call in (IN_SEGMENTS if sp.segment else REFUSING).items():
        problems = found[name] = []
        for cotangent in (None, "its own"):
            o, leaves = call(sp)
            enters = name.endswith("._EnterFunction") and sp.is_first  # nothing does, on the first rank
            if not enters and f"{name.partition(' ')[0].rpartition('.')[2]}Backward" not in nodes_of(o):
                problems.append(f"is not there: {nodes_of(o)}")
            do = torch.ones_like(o) if cotangent is None else o.detach().clone().requires_grad_()
            try:
                torch.autograd.grad(o, leaves, do, create_graph=True)
                problems.append("was differentiated twice")
            except NotAvailable as error:
                if "create_graph=True" not in str(error) or ";" not in str(error):
                    problems.append(f"says {error}")
        o, leaves = call(sp)  # and nothing was sent: the ranks still understand each other
        grads = torch.autograd.grad(o.sum(), leaves)
        if not all(g.isfinite().all() for g in grads):
            problems.append("is wrong afterwards")
    return found


def test_every_function_is_looked_at() -> None:
    """A new autograd.Function has to stand in one of the tables."""
    assert set(functions_of_flexsp()) == {name.partition(" ")[0] for name in REFUSING | IN_SEGMENTS} | set(TWICE)


@pytest.mark.parametrize("segment", [0, 3], ids=["", "in segments"])
def test_second_derivatives_are_refused(segment: int) -> None:
    for found in run_ranks(refuse_all, 2, bitwise=segment or False, env=INTERPRETED, timeout=100, sp_timeout_s=20):
        assert not any(found.values()), found


@pytest.mark.parametrize("name", TWICE)
def test_second_derivatives_are_right(name: str) -> None:
    function, shapes = TWICE[name]
    assert torch.autograd.gradgradcheck(function, tuple(leaf(*shape) for shape in shapes))


@pytest.mark.parametrize("name", ["normalized", "gated_delta_rule_in_kernel", *slow("simple_gla", "mamba2_groups")])
def test_ops_in_pytorch_have_second_derivatives(name: str) -> None:
    case = ALL[name]
    given = case.inputs(Shape(B=1, T=3, H=2, K=2, V=2), random.randrange(2**31))
    names = [key for key, x in given.items() if isinstance(x, torch.Tensor)]

    def f(*x: torch.Tensor) -> torch.Tensor:
        return case.op(**(given | dict(zip(names, x, strict=True))))[0]

    assert torch.autograd.gradgradcheck(f, tuple(given[key].requires_grad_() for key in names))


def first_derivatives(sp: SequenceParallel) -> list[float]:
    """Differences of gradients taken with grad mode turned on here and there from plain ones."""
    torch.manual_seed(0)
    found = []
    for function in (lambda *x: ops.chunk_simple_gla(*x, sp=False)[0], lambda q, k, v: deltanet(q, k, v)):
        x = [leaf(1, 6, 2, 4, dtype=torch.float32) for _ in range(3)]
        want = torch.autograd.grad(function(*x).square().sum(), x)
        for reentrant in (True, False):
            o = checkpoint(function, *x, use_reentrant=reentrant).square().sum()
            with torch.enable_grad():
                o.backward()
            found += [float((y.grad - g).abs().max()) for y, g in zip(x, want, strict=True)]
            for y in x:
                y.grad = None
    return found


def deltanet(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return variant("deltanet")(q=q, k=k, v=v[..., :3], b=q.new_full(q.shape[:3], 0.5), sp=False)[0]


def test_checkpoints_are_no_second_derivatives() -> None:
    (found,) = run_ranks(first_derivatives, 1, env=INTERPRETED)
    assert max(found) == 0


# Transforms -----------------------------------------------------------------------------------------------------------


def vmapped(f: Call, x: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(f)(torch.stack([x, x]))[1]


def gradient(f: Call, x: torch.Tensor) -> torch.Tensor:
    return torch.func.grad(lambda y: f(y).sum())(x)


def of_something_else(f: Call, x: torch.Tensor) -> torch.Tensor:
    return torch.func.grad(lambda y: (f(x) * y).sum())(torch.ones((), dtype=x.dtype))


def moved(f: Call, x: torch.Tensor) -> torch.Tensor:
    return torch.func.jvp(f, (x,), (x,))[1]


def moved_without_grad(f: Call, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, x))).tangent


TRANSFORMS = (vmapped, gradient, of_something_else, moved, moved_without_grad)


def transformed(sp: SequenceParallel) -> dict[str, str]:
    """What a transform of each op on kernels ends in."""
    found = {}
    for name, transform in itertools.product(ALL, TRANSFORMS):
        case = ALL[name]
        given = case.inputs(Shape(B=1, T=5, K=6, V=5), 0)
        given = {key: x.float() if isinstance(x, torch.Tensor) else x for key, x in given.items()}
        lead = case.tokens[0]
        try:
            transform(lambda y, case=case, given=given, lead=lead: case.op(**given | {lead: y})[0], given[lead])
            found[f"{name} {transform.__name__}"] = "nothing"
        except NotAvailable as error:
            found[f"{name} {transform.__name__}"] = str(error)
    return found


def test_transforms_of_kernels_are_refused() -> None:
    (found,) = run_ranks(transformed, 1, env=INTERPRETED)
    assert all("vmap, grad, jvp" in text and "float64" in text for text in found.values()), found


def transformed_over_ranks(sp: SequenceParallel) -> dict[str, str]:
    x, found = torch.randn(1, 6, 2, 4, dtype=torch.float64), {}
    layer = nn.ShortConvolution(4).double()
    with_gates, chain = variant("simple_gla"), saturating()
    gates = -torch.rand(1, 6, 2, dtype=torch.float64)

    def short_conv(y: torch.Tensor) -> torch.Tensor:
        with flexsp.sequence_parallel(sp):
            return layer(y[:, :, 0])

    calls = {
        "op": lambda y: ops.chunk_simple_gla(y, y, y, sp=sp)[0],
        "affine": lambda y: with_gates(q=y, k=y, v=y[..., :3], g=gates, sp=sp)[0],
        "not affine": lambda y: chain(q=y, k=y, v=y[..., :3], sp=sp)[0],
        "convolution": short_conv,
        "gather": lambda y: sp.gather(y),
    }
    for (name, f), transform in itertools.product(calls.items(), TRANSFORMS):
        try:
            transform(f, x)
            found[f"{name} {transform.__name__}"] = "nothing"
        except NotAvailable as error:
            found[f"{name} {transform.__name__}"] = str(error)
    return found


def test_transforms_over_ranks_are_refused() -> None:
    for found in run_ranks(transformed_over_ranks, 2, timeout=60, sp_timeout_s=10):
        assert all("vmap, grad, jvp" in text and "one rank" in text for text in found.values()), found


@pytest.mark.parametrize("transform", [vmapped, moved, moved_without_grad])
def test_variants_are_not_made_in_transforms(transform: Callable[..., torch.Tensor]) -> None:
    flex = FlexLinearAttention(transition=transition.delta_rule())
    x = torch.randn(1, 5, 3, 7 + TRANSFORMS.index(transform), dtype=torch.float64)  # sizes that nobody called before

    def f(y: torch.Tensor) -> torch.Tensor:
        return flex(y, y, y, beta=y[..., 0].sigmoid(), sp=False)[0]

    with pytest.raises(NotAvailable, match="making a variant: .*call what makes it, once before"):
        transform(f, x)
    want = f(x)
    assert transform is not vmapped or torch.allclose(vmapped(f, x), want)


@pytest.mark.parametrize(
    "name",
    quick(
        [*ALL, "convolution"], "simple_gla", "normalized", "mamba2_groups", "kda_in_kernel", "delta_product",
        "convolution",
    ),
)  # fmt: skip
def test_transforms_in_pytorch_are_right(name: str) -> None:
    layer = nn.ShortConvolution(4).double().requires_grad_(False)
    case = ALL.get(name)
    given = {} if case is None else case.inputs(Shape(B=1, T=5, K=6, V=5), random.randrange(2**31))
    lead = "" if case is None else case.tokens[0]
    x = torch.randn(1, 6, 4, dtype=torch.float64) if case is None else given[lead]

    def f(y: torch.Tensor) -> torch.Tensor:
        return layer(y) if case is None else case.op(**given | {lead: y})[0]

    y = x.clone().requires_grad_()
    o = f(y)
    h = 1e-6
    difference = (f(x * (1 + h)) - f(x * (1 - h))) / (2 * h)
    torch.testing.assert_close(vmapped(f, x), o.detach())
    torch.testing.assert_close(gradient(f, x), torch.autograd.grad(o.sum(), y)[0])
    torch.testing.assert_close(of_something_else(f, x), o.detach().sum())
    for transform in (moved, moved_without_grad):
        torch.testing.assert_close(transform(f, x), difference, rtol=1e-6, atol=1e-6)


def turned(name: str, angles: torch.Tensor) -> torch.Tensor:
    """Outputs and final states of a variant whose rows turn by angles [1, T, 2, 2], from an initial state on."""
    T, made = angles.shape[1], torch.Generator().manual_seed(0)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=made)

    q, k, v, state, step = some(1, T, 2, 4), some(1, T, 2, 4) / 2, some(1, T, 2, 4), some(1, 2, 4, 4), some(1, T, 2)
    if name == "mamba3":
        start = ops.Mamba3State(angles[:, 0], state, some(1, 1, 2, 4), some(1, 2, 4))
        o, end = ops.mamba3(
            v, step.abs(), -step.abs(), k, q, step, angles, initial_state=start, output_final_state=True
        )  # fmt: skip
        return torch.cat([o.flatten(), *(x.flatten() for x in end)])
    given = {"theta": angles, "psi": angles.flip(1)} if name == "spectral" else {"theta": angles}
    if name == "delta_rule":
        given["beta"] = step.sigmoid()
    rope = None if name == "spectral" else features.rope(data_dependent=True)
    made_of = FlexLinearAttention(features=rope, transition=getattr(transition, name)())
    o, end = made_of(q, k, v, **given, initial_state=state, output_final_state=True)
    return torch.cat([o.flatten(), end.flatten()])


@pytest.mark.parametrize("name", ["spectral", "one_step_gd", "delta_rule", "mamba3"])
def test_angles_in_forward_mode(name: str) -> None:
    """Engines give gradients of angles, so that nothing else may have derivatives by them, in forward mode neither."""
    x = torch.randn(1, 70, 2, 2, dtype=torch.float64) / 4

    def f(y: torch.Tensor) -> torch.Tensor:
        return turned(name, y)

    h = 1e-6
    want = (f(x * (1 + h)) - f(x * (1 - h))) / (2 * h)
    for transform in (moved, moved_without_grad):
        torch.testing.assert_close(transform(f, x), want, rtol=1e-6, atol=1e-6)


# Inference mode -------------------------------------------------------------------------------------------------------


def inference_calls(sp: SequenceParallel) -> dict[str, tuple[Callable[..., torch.Tensor], torch.Tensor]]:
    """Functions of one tensor, and that tensor."""
    made = FlexLinearAttention(decay.gated(), features.rope(), custom_mask=lambda q_idx, k_idx: q_idx >= k_idx)
    packed = torch.tensor([0, 2, 12])
    delta, chain = variant("deltanet"), saturating()
    layers = nn.SimpleGLA(8, 2), nn.Mamba2(8, head_dim=4, state_size=4)
    heads, hidden = torch.randn(1, 6, 2, 4), torch.randn(1, 6, 8)

    def layer(i: int, x: torch.Tensor) -> torch.Tensor:
        with flexsp.sequence_parallel(sp):
            return layers[i](x)

    return {
        "op": (lambda x: ops.chunk_simple_gla(x, x, x, -x[..., 0].abs(), sp=sp)[0], heads),
        "packed": (lambda x: ops.chunk_linear_attn(x.abs(), x.abs(), x, cu_seqlens=packed, sp=sp)[0], heads),
        "deltanet": (lambda x: delta(q=x, k=x, v=x[..., :3], b=x[..., 0].sigmoid(), sp=sp)[0], heads),
        "in PyTorch": (lambda x: chain(q=x, k=x, v=x[..., :3], sp=sp)[0], heads),
        "flex": (lambda x: made(x, x, x, decay=-x[..., 0].abs(), sp=sp)[0], heads),
        "SimpleGLA": (lambda x: layer(0, x), hidden),
        "Mamba2": (lambda x: layer(1, x), hidden),
        "gather": (lambda x: sp.gather(x), heads),
    }


def infer_then_train(_: Any, transport: str, folder: str) -> dict[str, tuple[bool, bool]]:
    """In a new process all is made, and each call made first, in inference mode; then recorded by autograd."""
    os.environ["FLEXSP_CODE_DIR"] = folder
    torch.manual_seed(0)
    with torch.inference_mode():
        sp = flexsp.init_sequence_parallel(None, transport=transport, timeout_s=30)
    torch.manual_seed(0)
    calls = inference_calls(sp)
    found = {}
    for name, (f, x) in calls.items():
        with torch.inference_mode():
            inferred = f(x.clone())
        y = x.clone().requires_grad_()
        o = f(y)
        o.square().sum().backward()
        found[name] = torch.allclose(inferred, o, atol=1e-6), bool(y.grad.abs().sum() > 0)
    sp.close()
    return found


@pytest.mark.parametrize("transport", ["process_group", *slow("posix")])
def test_a_process_may_begin_in_inference_mode(transport: str, tmp_path: Path) -> None:
    options = {"env": INTERPRETED, "own_processes": True, "timeout": 200}  # and kernels of its own
    for found in run_ranks(infer_then_train, 2, transport, str(tmp_path), **options):
        assert all(same and moved for same, moved in found.values()), found


# Saved tensors --------------------------------------------------------------------------------------------------------


# What saves tensors that kernels read.
KEEPING: dict[str, Callable[[], tuple[torch.Tensor, list[torch.Tensor]]]] = {
    "op": lambda: of_op(False, torch.float32),
    "variant": lambda: of_variant("simple_gla", False, torch.float32),
    "keys": lambda: of_keys(),
    "mlstm": of_mlstm,
    "mamba3": of_mamba3,
}


def given_back(sp: Any) -> dict[str, list[str]]:
    """What the backward pass says of saved tensors that hooks changed, each kind of change on its own."""
    said: dict[str, list[str]] = {name: [] for name in KEEPING}
    changes = (lambda x: x.to("meta"), lambda x: x.double() if x.is_floating_point() else x)
    for (name, call), change in itertools.product(KEEPING.items(), changes):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, change):
            o, leaves = call()
            try:
                torch.autograd.grad(o.sum(), leaves)
                said[name].append("nothing")
            except ValueError as error:
                said[name].append(str(error))
    return said


def test_changed_saved_tensors_are_refused() -> None:
    (found,) = run_ranks(given_back, 1, env=INTERPRETED)
    for name, said in found.items():
        for text, what in zip(said, ("device cpu", "dtypes"), strict=True):
            assert "saved tensors: expected" in text and what in text, (name, said)


def given_back_turned(sp: Any) -> dict[str, float]:
    """Errors of gradients where hooks give saved tensors back in other strides."""
    found = {}
    for name, call in KEEPING.items():
        grads = []
        for change in (lambda x: x, lambda x: x.transpose(0, -1).contiguous().transpose(0, -1)):
            torch.manual_seed(5)
            random.seed(5)
            with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x, f=change: f(x) if x.dim() > 1 else x):
                o, leaves = call()
                grads.append(torch.autograd.grad(o.sin().sum(), leaves))
        found[name] = max((a - b).abs().max().item() for a, b in zip(*grads, strict=True))
    return found


def test_saved_tensors_may_come_back_in_other_strides() -> None:
    (found,) = run_ranks(given_back_turned, 1, env=INTERPRETED)
    assert max(found.values()) < 1e-6, found


# Gradients of some leaves ---------------------------------------------------------------------------------------------


def leaves_of(x: Tensors) -> Tensors:
    return {name: y.clone().requires_grad_() for name, y in x.items()}


def with_parameters(layer: Any, x: torch.Tensor, sp: SequenceParallel) -> tuple[Any, Tensors]:
    leaves = {"x": x, **dict(layer.named_parameters())}

    def f(x: torch.Tensor, **parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with flexsp.sequence_parallel(sp):
            return (torch.func.functional_call(layer, parameters, (x,)),)

    return f, {name: y.detach() for name, y in leaves.items()}


def paths(sp: SequenceParallel, dtype: torch.dtype, T: int) -> dict[str, tuple[Callable[..., Any], Tensors]]:
    """Name: what exchanges something (floating outputs, None where there is none), and its leaves."""
    bounds = torch.tensor([0, 2, 2, sum(sp.lengths or [])])
    found: dict[str, tuple[Callable[..., Any], Tensors]] = {}
    for name in ("simple_gla", "gamma", "normalized", "mamba2_groups", "gated_delta_rule_in_kernel"):
        case = ALL[name]
        x = case.inputs(Shape(B=1, T=T, H=2, K=4, V=3), random.randrange(2**31))
        leaves = {key: y.to(dtype) for key, y in x.items() if isinstance(y, torch.Tensor)}
        for packed in (False, True):
            more = {"cu_seqlens": bounds} if packed else {}

            def op(case: Any = case, more: Any = more, **x: torch.Tensor) -> tuple[torch.Tensor, ...]:
                o, final = case.op(**x, **case.constants, **more, output_final_state=True, sp=sp)
                return (o, *final) if isinstance(final, tuple) else (o, final)

            found[f"{name}{' packed' * packed}"] = op, leaves
    for name in ("gla", "deltanet", "gla_own_bias", "saturating"):
        model = variant(name)
        found[f"variant {name}"] = lambda model=model, **x: model(**x, sp=sp), inputs_of(name, T, dtype)
    flex = FlexLinearAttention(decay.gated(), features.rope(data_dependent=True))
    heads = {key: torch.randn(1, T, 2, 4).to(dtype) for key in "qkv"}
    gates = {"decay": -torch.rand(1, T, 2).to(dtype), "theta": torch.randn(1, T, 2, 2).to(dtype)}
    found["flex"] = lambda **x: flex(**x, output_final_state=True, sp=sp), heads | gates
    found["convolution"] = with_parameters(
        nn.ShortConvolution(3, bias=True).to(dtype), torch.randn(1, T, 3).to(dtype), sp
    )
    found["halo"] = lambda x: (halo_exchange(x, 2, sp),), {"x": torch.randn(1, T, 3).to(dtype)}
    found["gather"] = lambda x: (sp.gather(x),), {"x": torch.randn(1, T, 3).to(dtype)}
    return found


def some_leaves(
    sp: SequenceParallel, lengths: list[int], dtype: torch.dtype, seed: int, *names_of_paths: str
) -> dict[str, float]:
    """Largest difference of gradients of one leaf, another one on each rank, of one output, from all of `backward`."""
    sp.set_lengths(lengths)
    random.seed(seed)
    torch.manual_seed(seed)
    found = {}
    for name, (f, x) in paths(sp, dtype, lengths[sp.rank]).items():
        if names_of_paths and name not in names_of_paths:
            continue
        names = [*x]
        for turn in range(len(names)):
            mine = names[(turn * (1 + sp.rank) + sp.rank) % len(names)]
            results = []
            for only in (False, True):
                leaves = leaves_of(x)
                outputs = [o for o in f(**leaves) if o is not None]
                loss = outputs[turn % len(outputs)].sin().sum()
                if only:
                    results += torch.autograd.grad(loss, leaves[mine], allow_unused=True)
                else:
                    loss.backward()
                    results.append(leaves[mine].grad)
            want, got = (torch.zeros_like(x[mine]) if y is None else y for y in results)
            found[f"{name}: {mine}"] = float((got - want).abs().sum())
    return found


@pytest.mark.parametrize("lengths", [[4, 0, 5], *slow([6, 7], [0, 9])])
def test_each_rank_asks_for_another_gradient(lengths: list[int], seed: int) -> None:
    """Of another output, too. None waits for a message that a rank leaves out."""
    given = lengths, torch.float64, seed
    for found in run_ranks(some_leaves, len(lengths), *given, timeout=100, sp_timeout_s=20):
        assert not any(found.values()), found


def test_each_rank_asks_for_another_gradient_of_kernels(seed: int) -> None:
    given = [3, 2], torch.float32, seed, "normalized"  # two exchanges
    for found in run_ranks(some_leaves, 2, *given, env=INTERPRETED, timeout=200, sp_timeout_s=60):
        assert not any(found.values()), found
