"""The kernels of vector states against a token loop that stands here, in the interpreter; and compiled for sm_90."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from flexsp import ops
from flexsp.comm.group import SequenceParallel
from flexsp.runtime.triton_private import RELEASE
from flexsp.testing.compare import WIDE, check_op, relative_error
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


def rg_lru_in_kernels(sp: SequenceParallel, dtype: torch.dtype, seed: int) -> int:
    """Compares `rg_lru` with its token loop; how many kernels ran."""
    from flexsp.kernels.vector import op

    inputs = vector_gates.draw("rg_lru", 1, 40, states=4, seed=seed)
    inputs |= {"cu_seqlens": torch.tensor([0, 0, 13, 39, 40])}
    with poisoned(1000):
        given = vector_gates.OPS["rg_lru"]
        check_op(given.chunk, given.oracle, inputs, dtype=dtype, wide=vector_gates.KEPT_WIDE)
    return len(op._executables)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rg_lru_in_kernels(dtype: torch.dtype) -> None:
    (found,) = run_ranks(rg_lru_in_kernels, 1, dtype, random.randrange(2**31), env=INTERPRETED)
    assert found > 0


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

CONFIGS: dict[str, dict[str, Any]] = {"plain": {}, "packed": {"docs": 4}, "odd sizes": {"D": 301, "dtype": "float32"}}


def compile_config(dtype: str = "bfloat16", T: int = 32768, D: int = 2048, docs: int = 0) -> list[dict[str, Any]]:
    """In a child process: a forward and backward pass on meta tensors, every launch compiled."""
    from flexsp.kernels import executable, operators
    from flexsp.kernels.vector.op import vector_state
    from flexsp.testing.offline import record_launches

    def meta(*size: int, kind: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=kind, device="meta", requires_grad=kind.is_floating_point)

    executable.propagate_step = lambda *args: lambda frame: None  # type: ignore[assignment]  # compiled in its own tests
    operators.chunk_table = lambda *args: meta(T // 8 + docs, 5, kind=torch.int32)  # type: ignore[assignment]
    x, g = (meta(1, T, D, kind=getattr(torch, dtype)) for _ in range(2))
    with record_launches() as launches:
        o, last = vector_state(
            x, g, "hgrn", initial_state=meta(docs or 1, D), output_final_state=True,
            cu_seqlens=meta(docs + 1, kind=torch.int64) if docs else None, sp=None,
        )  # fmt: skip
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
