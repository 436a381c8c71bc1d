"""The kernels of vector states against a token loop that stands here, in the interpreter; and compiled for sm_90."""

from __future__ import annotations

import functools
import itertools
import random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from flexsp import ops
from flexsp.comm.group import SequenceParallel
from flexsp.runtime.triton_private import RELEASE
from flexsp.testing.compare import WIDE, assert_close, check_op, relative_error
from flexsp.testing.oracles import token_loop
from flexsp.testing.ranks import run_ranks
from tests.harness import vector_gates
from tests.harness.compiling import in_child, told_of
from tests.harness.interpreted import INTERPRETED, poisoned
from tests.marks import quick, slow

Tensors = dict[str, Tensor]


def draw(batch: int, T: int, D: int, states: int, seed: int) -> Tensors:
    made = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=made, dtype=torch.float64)

    found = {"x": normal(batch, T, D), "g": torch.nn.functional.logsigmoid(normal(batch, T, D) + 1)}
    return found | ({"initial_state": normal(states, D)} if states else {})


def oracle(
    x: Tensor, g: Tensor, initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None,
    engine: Any = token_loop,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dtype, wide = x.dtype, torch.promote_types(x.dtype, torch.float32)
    x, g = x.to(wide), g.to(wide)
    bounds = [0, x.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    o, last = [x[:, :0]], []
    for n, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        h = x.new_zeros(x.shape[0], x.shape[2]) if initial_state is None else initial_state
        h = h if cu_seqlens is None or initial_state is None else initial_state[n : n + 1]
        for t in range(begin, end):
            h = torch.exp(g[:, t].clamp(min=-104)) * h + x[:, t]
            o.append(h.unsqueeze(1))
        last.append(h)
    return torch.cat(o, 1).to(dtype), torch.cat(last)


def run(inputs: Tensors, dtype: torch.dtype, **others: Any) -> None:
    check_op(ops.chunk_hgrn, oracle, inputs, dtype=dtype, wide=(*WIDE, *others.pop("wide", ())), **others)


def in_kernels(sp: SequenceParallel, kind: str, dtype: torch.dtype, seed: int) -> None:
    with poisoned(1 if kind.startswith("long") else 1000):
        if kind == "documents":
            inputs = draw(1, 60, 11, 7, seed)
            inputs["cu_seqlens"] = torch.tensor([0, 0, 1, 19, 19, 35, 60, 60])
            run(inputs, dtype)
            del inputs["initial_state"]
            run(inputs, dtype, wide=("g",))
        elif kind == "long segments with documents":
            for cuts in ([0, 10, 63], [0, 26, 63], [0, 9, 9, 30, 63]):
                inputs = draw(1, 63, 5, len(cuts) - 1, seed)
                run(inputs | {"cu_seqlens": torch.tensor(cuts)}, dtype)
        elif kind == "no states":
            run(draw(2, 21, 6, 0, seed), dtype)
        elif kind == "strides":
            run(draw(2, 21, 6, 2, seed), dtype, arrange=lambda x: x.transpose(0, -1).contiguous().transpose(0, -1))
        elif kind == "no tokens":
            inputs = {key: x.float().requires_grad_() for key, x in draw(2, 0, 5, 2, seed).items()}
            o, state = ops.chunk_hgrn(**inputs, output_final_state=True)
            assert torch.equal(state, inputs["initial_state"]) and o.shape == (2, 0, 5)
            (found,) = torch.autograd.grad(state.sum(), inputs["initial_state"])
            assert found.eq(1).all()
        elif kind == "gates that close":
            inputs = draw(2, 40, 7, 2, seed)
            inputs["g"][:, ::5] = -300.0
            inputs["g"][:, 3::7] = 0.0
            run(inputs, dtype, wide=("g",))
            leaves = {key: x.to(dtype if key == "x" else torch.float32).requires_grad_() for key, x in inputs.items()}
            leaves["g"].data[:, ::5] = -torch.inf
            (dg,) = torch.autograd.grad(ops.chunk_hgrn(**leaves)[0].float().square().sum(), leaves["g"])
            assert dg.isfinite().all() and not dg[:, ::5].any() and dg[:, 1].all()
        elif kind == "several programs":
            run(draw(2, 9, 300, 2, seed), dtype)
        else:
            run(draw(2, 90, 3, 2, seed), dtype)


KINDS = [
    "plain", "long segments", "long segments with documents", "no states", "documents", "strides", "no tokens",
    "gates that close", "several programs",
]  # fmt: skip


@pytest.mark.parametrize("kind", quick(KINDS, *KINDS[:4], "gates that close", "several programs"))
def test_kernels(kind: str) -> None:
    for dtype in (torch.float32, random.choice((torch.bfloat16, torch.float16))):
        run_ranks(in_kernels, 1, kind, dtype, random.randrange(2**31), env=INTERPRETED)


# The RG-LRU, whose gates kernels make ---------------------------------------------------------------------------------

LRU_KINDS = ["plain", "several programs", "wide gates", "documents", "first tokens", "gates that close"]
LRU_CASES = [(kind, dtype, n) for kind in LRU_KINDS for dtype in ("float32", "bfloat16", "float16") for n in (1, 1000)]
LRU_QUICK = [
    ("first tokens", "float32", 1000), ("documents", "bfloat16", 1000), ("several programs", "float16", 1),
    ("gates that close", "float32", 1000),
]  # fmt: skip


def rg_lru_case(kind: str, seed: int) -> tuple[Tensors, dict[str, Any], dict[str, Any]]:
    """Inputs, what the op is given beside them, and the token loop."""
    drawn, others, loop = functools.partial(vector_gates.draw, "rg_lru", seed=seed), {}, {}
    if kind == "documents":
        inputs = drawn(1, 23, states=5) | {"cu_seqlens": torch.tensor([0, 0, 9, 12, 22, 23])}
        others = {"unit_start": torch.tensor([True, True, False, True, False])}
        loop = {"starts": [(0, 0), (0, 12)]}
    elif kind == "first tokens":
        inputs, others, loop = drawn(2, 13, states=2), {"unit_start": torch.tensor([False, True])}, {"starts": [(1, 0)]}
    elif kind == "several programs":
        inputs = drawn(1, 12, states=1, K=35)
    elif kind == "gates that close":
        inputs = drawn(1, 17, states=1, K=12)
        inputs["Lambda"][::3], inputs["Lambda"][1::3] = 40.0, -25.0
        inputs["r"][:, ::5] = -60.0  # a gate of 0
        inputs["r"][:, 3::5] -= 20.0
        inputs["r"][:, 4::5] += 30.0
    else:
        inputs = drawn(2, 21, states=2)
    return inputs, others, loop


def rg_lru_in_kernels(sp: SequenceParallel, kind: str, dtype: torch.dtype, segments: int, seed: int) -> int:
    """Compares `rg_lru` with its token loop; how many kernels ran."""
    from flexsp.kernels.vector import vector_plan
    from flexsp.kernels.vector.vector_state import _Vector

    inputs, others, loop = rg_lru_case(kind, seed)
    limits = vector_plan.GATED._replace(programs=1)  # for few tokens, segments of several chunks
    wide = (*vector_gates.KEPT_WIDE, *("r", "i") * (kind == "wide gates"))
    laid = itertools.cycle((lambda x: x, beside_others, lambda x: x.transpose(0, -1).contiguous().transpose(0, -1)))
    with poisoned(segments), patch.object(vector_plan, "GATED", limits):
        check_op(
            ops.rg_lru, functools.partial(vector_gates.rg_lru, **loop), inputs, dtype=dtype, wide=wide,
            op_kwargs=others, arrange=lambda x: next(laid)(x),
        )  # fmt: skip
        if kind == "first tokens":
            nothing(dtype)
        if kind == "gates that close":
            edges(dtype)
    return len(_Vector._executables)


def beside_others(x: Tensor) -> Tensor:
    """The same values, with NaN behind every row."""
    return torch.cat([x, torch.full_like(x, torch.nan)], -1)[..., : x.shape[-1]]


def nothing(dtype: torch.dtype) -> None:
    """Without tokens the state passes, and parameters have gradients of 0."""
    inputs = vector_gates.draw("rg_lru", 2, 0, states=2)
    leaves = {key: x.to(torch.float32 if key in vector_gates.KEPT_WIDE else dtype) for key, x in inputs.items()}
    leaves = {key: x.requires_grad_() for key, x in leaves.items()}
    o, state = ops.rg_lru(**leaves, output_final_state=True)
    assert torch.equal(state, leaves["initial_state"]) and o.shape == leaves["x"].shape and o.dtype == dtype
    found = torch.autograd.grad(state.sum(), [leaves["initial_state"], leaves["Lambda"]])
    assert found[0].eq(1).all() and not found[1].any()


def edges(dtype: torch.dtype) -> None:
    """A rate of -inf forgets, and its gates have no gradient; a gate that has underflowed to 0 keeps all of the state,
    adds nothing to it, and has no gradient either."""
    leaves = vector_gates.draw("rg_lru", 1, 17)
    leaves["Lambda"][0] = torch.inf
    leaves["r"][:, 4, 1:] = leaves["r"][:, 11, 1:] = -200.0
    leaves = {key: x.to(torch.float32 if key == "Lambda" else dtype).requires_grad_() for key, x in leaves.items()}
    o, _ = ops.rg_lru(**leaves)
    grads = dict(zip(leaves, torch.autograd.grad(o.float().square().sum(), [*leaves.values()]), strict=True))
    assert all(x.isfinite().all() for x in (o, *grads.values())), grads
    alone = leaves["x"].double() * leaves["i"].double().sigmoid()
    assert relative_error(o[..., 0], alone[..., 0]) < 4 * torch.finfo(dtype).eps
    assert not grads["r"][..., 0].any() and not grads["Lambda"][0] and grads["Lambda"][1:].all()
    for t in (4, 11):
        assert torch.equal(o[:, t, 1:], o[:, t - 1, 1:])
        assert not any(grads[key][:, t, 1:].any() for key in ("x", "r", "i"))


@pytest.mark.parametrize(("kind", "dtype", "segments"), quick(LRU_CASES, *LRU_QUICK))
def test_rg_lru_in_kernels(kind: str, dtype: str, segments: int) -> None:
    """Values and all gradients, of Lambda too, in one segment and in several. Inputs lie in three ways."""
    seed = random.randrange(2**31)
    (found,) = run_ranks(rg_lru_in_kernels, 1, kind, getattr(torch, dtype), segments, seed, env=INTERPRETED)
    assert found > 0


LENGTHS = [0, 17, 22]


def rg_lru_over_ranks(sp: SequenceParallel, seed: int, documents: list[int] | None) -> Tensors:
    """This rank's part, and its gradients; the state of a text without documents begins with zeros."""
    inputs, start = vector_gates.draw("rg_lru", 1, 39, states=5 if documents else 0, seed=seed), sum(LENGTHS[: sp.rank])
    here = slice(start, start + LENGTHS[sp.rank])
    mine = {key: (x[:, here] if key in ("x", "r", "i") else x).float().requires_grad_() for key, x in inputs.items()}
    with poisoned(1000):
        sp.set_lengths(LENGTHS)
        given = {"unit_start": True} if documents is None else packed(documents)
        o, state = ops.rg_lru(**mine, **given, output_final_state=True, sp=sp)
        cotangents = [x.float() for x in answers_of(seed, documents)]
        pairs = [(o, cotangents[0][:, here]), *([] if state is None else [(state, cotangents[1])])]
        grads = torch.autograd.grad([x for x, _ in pairs], [*mine.values()], [x for _, x in pairs])
    return {"o": o.detach(), **dict(zip(mine, grads, strict=True))}


def packed(documents: list[int]) -> dict[str, Any]:
    """The second has begun before; the fourth is empty."""
    return {"cu_seqlens": torch.tensor(documents), "unit_start": torch.tensor([True, False, True, False, True])}


def answers_of(seed: int, documents: list[int] | None) -> list[Tensor]:
    made = torch.Generator().manual_seed(seed + 1)
    shapes = (1, 39, 18), (len(documents) - 1 if documents else 1, 18)
    return [torch.randn(shape, generator=made, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("documents", [None, [0, 4, 9, 30, 30, 39]])
def test_rg_lru_in_kernels_over_ranks(documents: list[int] | None) -> None:
    """The first rank has no tokens; gradients of Lambda add up over ranks."""
    seed = random.randrange(2**31)
    parts = run_ranks(rg_lru_over_ranks, 3, seed, documents, env=INTERPRETED)
    whole = vector_gates.draw("rg_lru", 1, 39, states=5 if documents else 0, seed=seed)
    starts = [(0, 0)] if documents is None else [(0, 0), (0, 9), (0, 30)]
    given = {} if documents is None else {"cu_seqlens": torch.tensor(documents)}
    found: list[Tensors] = []
    for dtype in (torch.float64, torch.float32):
        leaves = {key: x.to(dtype).requires_grad_() for key, x in whole.items()}
        o, state = vector_gates.rg_lru(**leaves, **given, starts=starts, engine=token_loop)
        grads = torch.autograd.grad([o, state], [*leaves.values()], [x.to(dtype) for x in answers_of(seed, documents)])
        found.append({"o": o.detach(), **dict(zip(leaves, grads, strict=True))})
    want, low = found
    worst = max(relative_error(low[key], want[key]) for key in want)  # the tensors are small
    for key in want:
        each = [part[key] for part in parts]
        got = torch.cat(each, 1) if key in ("o", "x", "r", "i") else torch.stack(each).sum(0)
        assert_close(key, got, want[key], low[key], worst)


def in_kernels_over_ranks(sp: SequenceParallel, seed: int, documents: list[int] | None) -> dict[str, Tensor]:
    """This rank's part, its gradients, and the final states where they are, of several programs' segments."""
    lengths = [17, 0, 38]
    inputs = draw(1, sum(lengths), 5, len(documents) - 1 if documents else 1, seed)
    inputs["g"][:, 11::16, 2:] = -torch.inf
    start = sum(lengths[: sp.rank])
    with poisoned(1000):
        sp.set_lengths(lengths)
        mine = {
            key: (x[:, start : start + lengths[sp.rank]] if key in "xg" else x).float().contiguous().requires_grad_()
            for key, x in inputs.items()
            if key in "xg" or documents or not sp.rank
        }
        cu = None if documents is None else torch.tensor(documents)
        o, state = ops.chunk_hgrn(**mine, cu_seqlens=cu, output_final_state=True, sp=sp)
        assert (state is None) == (documents is None and not sp.is_last)
        total = (o * weights(seed, sum(lengths))[:, start : start + lengths[sp.rank]]).sum()
        total = total if state is None else total + state.square().sum()
        grads = torch.autograd.grad(total, list(mine.values()))
    return {"o": o.detach(), **dict(zip(mine, grads, strict=True))}


def weights(seed: int, T: int) -> Tensor:
    return torch.randn(1, T, 5, generator=torch.Generator().manual_seed(seed + 1))


@pytest.mark.parametrize("documents", quick([None, [0, 9, 9, 30, 55]], [0, 9, 9, 30, 55]))
def test_kernels_over_ranks(documents: list[int] | None) -> None:
    seed = random.randrange(2**31)
    parts = run_ranks(in_kernels_over_ranks, 3, seed, documents, env=INTERPRETED)
    states = len(documents) - 1 if documents else 1
    inputs = draw(1, 55, 5, states, seed)
    inputs["g"][:, 11::16, 2:] = -torch.inf
    inputs = {key: x.requires_grad_() for key, x in inputs.items()}
    o, state = oracle(**inputs, cu_seqlens=None if documents is None else torch.tensor(documents))
    total = (o * weights(seed, 55)).sum() + state.square().sum()
    want = dict(zip(inputs, torch.autograd.grad(total, list(inputs.values())), strict=True))
    for key in ("x", "g"):
        assert relative_error(torch.cat([part[key] for part in parts], 1), want[key]) < 3e-6
    assert relative_error(torch.cat([part["o"] for part in parts], 1), o) < 3e-6
    entered = [part["initial_state"] for part in parts if "initial_state" in part]
    assert relative_error(torch.stack(entered).sum(0), want["initial_state"]) < 3e-6


@pytest.mark.slow
def test_one_graph() -> None:
    run_ranks(in_a_graph, 1, random.randrange(2**31), env=INTERPRETED)


def in_a_graph(sp: SequenceParallel, seed: int) -> None:
    """torch.compile breaks the op nowhere, and gives the same."""
    inputs = {key: x.float().requires_grad_() for key, x in draw(2, 21, 6, 2, seed).items()}

    def call(**given: Tensor) -> Tensor:
        o, state = ops.chunk_hgrn(**given, output_final_state=True)
        return o.square().sum() + state.sum()

    want = torch.autograd.grad(call(**inputs), list(inputs.values()))
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for a, b in zip(torch.autograd.grad(compiled(**inputs), list(inputs.values())), want, strict=True):
        torch.testing.assert_close(a, b)


# Compiled for sm_90 ---------------------------------------------------------------------------------------------------

CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {}, "packed": {"docs": 4}, "odd sizes": {"D": 301, "dtype": "float32"},
    "RG-LRU": {"D": 4096, "gated": True}, "RG-LRU, packed": {"D": 4096, "docs": 4, "gated": True},
    "RG-LRU, odd sizes": {"D": 301, "dtype": "float32", "gated": True},
}  # fmt: skip


def compile_config(
    dtype: str = "bfloat16", T: int = 32768, D: int = 2048, docs: int = 0, gated: bool = False
) -> list[dict[str, Any]]:
    """In a child process: a forward and backward pass on meta tensors, every launch compiled."""
    from flexsp.kernels import executable, operators
    from flexsp.kernels.vector.vector_state import Gates, vector_state
    from flexsp.testing.offline import record_launches

    def meta(*size: int, kind: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=kind, device="meta", requires_grad=kind.is_floating_point)

    executable.propagate_step = lambda *args: lambda frame: None  # type: ignore[assignment]  # compiled in its own tests
    operators.chunk_table = lambda *args: meta(T // 8 + docs, 5, kind=torch.int32)  # type: ignore[assignment]
    x, g, e = (meta(1, T, D, kind=getattr(torch, dtype)) for _ in range(3))
    others: dict[str, Any] = {
        "initial_state": meta(docs or 1, D), "output_final_state": True, "sp": None,
        "cu_seqlens": meta(docs + 1, kind=torch.int64) if docs else None,
    }  # fmt: skip
    with record_launches() as launches:
        if gated:
            gates = Gates(e, meta(D), meta(docs or 1, kind=torch.bool))
            o, last = vector_state(x, g, "rg_lru", gates, **others)
        else:
            o, last = vector_state(x, g, "hgrn", **others)
        assert last is not None
        torch.autograd.backward([o, last], [o.detach(), last.detach()])
    return told_of(launches)


@functools.cache
def compiled(name: str) -> list[dict[str, Any]]:
    return in_child(functools.partial(compile_config, **CONFIGS[name]))


@pytest.mark.compiles(always=True)
@pytest.mark.parametrize("name", slow(*CONFIGS))
def test_what_the_interpreter_cannot_show(name: str) -> None:
    """The wait for the kernel before comes first; no NaN that gives way to a number, no missing barriers, no registers
    that nothing wrote, no spills."""
    kernels = compiled(name)
    names = [kernel["name"].removesuffix("_kernel") for kernel in kernels if kernel["name"] != "tail_kernel"]
    assert names == ["summarize", "output", "summarize_backward", "grads"]
    for kernel in kernels:
        assert kernel["waits_first"], kernel
        assert not any(kernel[what] for what in ("uneven_sums", "drops_nan", "races", "unwritten")), kernel
        assert RELEASE != (3, 6) or not kernel["stack"], kernel
