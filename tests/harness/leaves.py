"""Calls with one output and the leaves it was computed from, for tests of what autograd may ask of them."""

from __future__ import annotations

import functools
import random
from typing import Any

import torch

from flexsp import SequenceParallel, nn, ops, sequence_parallel
from flexsp.compiler import ConstExpr, LinearAttention, SymbTensor, torch_compile
from flexsp.testing.cases import CASES, PROGRAM_CASES
from tests import variants

ALL = CASES | PROGRAM_CASES
Tensors = dict[str, torch.Tensor]


def saturating() -> LinearAttention:
    """A variant whose state is not affine: ranks run one after the other. Its shards start on edges of chunks."""
    h, k, v = ConstExpr("H", 2), ConstExpr("K", 4), ConstExpr("V", 3)
    key = SymbTensor(["T", h, k])
    meta = {"q": key, "k": key, "v": SymbTensor(["T", h, v]), "prev_s": SymbTensor(["NS", h, k, v])}
    return LinearAttention(
        meta,
        lambda k, v: k.T @ v,
        lambda prev_s, chunk_state: (prev_s + chunk_state).tanh(),
        lambda q, k, v, chunk_state: (q @ k.T).tril(0) @ v + q @ chunk_state,
        chunk_size=2,
        fallback="pytorch",
    )


@functools.cache
def variant(name: str) -> LinearAttention:
    return saturating() if name == "saturating" else variants.load(name).make(2, 4, 3)


def inputs_of(name: str, T: int, dtype: torch.dtype = torch.float64) -> Tensors:
    """Of a shipped variant, or of the one above, with H = 2, K = 4, V = 3."""
    if name == "saturating":
        x = {"q": torch.randn(1, T, 2, 4), "k": torch.randn(1, T, 2, 4), "v": torch.randn(1, T, 2, 3)}
        return {key: y.to(dtype) for key, y in x.items()}
    tokens, params = variants.draw(name, 1, T, random.randrange(2**31))
    cut = {5: 4, 4: 3}  # the sizes K and V of tests/variants.py
    found = {key: y[..., : cut[y.shape[-1]]] if y.dim() == 4 else y for key, y in tokens.items()}
    return {key: y.to(dtype) for key, y in (found | params).items()}


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def of_variant(name: str, sp: Any, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    x = {key: y.requires_grad_() for key, y in inputs_of(name, 6, dtype).items()}
    return variant(name)(**x, sp=sp)[0], list(x.values())


def of_graph(name: str, sp: Any, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model, given = variant(name), inputs_of(name, 6, dtype)
    x = [given[key].requires_grad_() for key in model.names]
    return torch_compile.call(model.graph_name, x, None, None, sp)[0], x


def of_op(sp: Any, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    x = [leaf(1, 6, 2, 4, dtype=dtype) for _ in range(3)]
    return ops.chunk_simple_gla(*x, sp=sp)[0], x


def of_conv(sp: SequenceParallel | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
    layer, x = nn.ShortConvolution(3).double(), leaf(1, 6, 3)
    with sequence_parallel(sp):
        return layer(x), [x, *layer.parameters()]


def of_keys() -> tuple[torch.Tensor, list[torch.Tensor]]:
    from flexsp.kernels.keys import unit_keys
    x = leaf(1, 6, 2, 4, dtype=torch.float32)
    return unit_keys((x,), 2, True)[0], [x]


def of_raw_gates() -> tuple[torch.Tensor, list[torch.Tensor]]:
    from flexsp.kernels.raw_gates import activated

    x = [leaf(*size, dtype=torch.float32) for size in ((1, 6, 2, 4), (2,), (2, 4))]
    return activated(x[0], x[1], x[2], None), x


def of_mlstm() -> tuple[torch.Tensor, list[torch.Tensor]]:
    x = [leaf(1, 6, 2, 4, dtype=torch.float32) for _ in range(3)]
    x += [leaf(1, 6, 2, dtype=torch.float32) for _ in range(2)]
    return ops.chunk_mlstm(*x, head_first=False)[0], x


def of_mamba3(final: bool = False) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The outputs, or the final angles."""
    x, B, C = (leaf(2, 6, n, 4, dtype=torch.float32) for n in (2, 1, 1))
    trap, angles, bias = (leaf(*size, dtype=torch.float32) for size in ((2, 6, 2), (2, 6, 2, 2), (2, 4)))
    dt, A = torch.rand(2, 6, 2).requires_grad_(), (-torch.rand(2, 6, 2)).requires_grad_()
    if final:
        _, state = ops.mamba3(x, dt, A, B, C, trap, angles, output_final_state=True)
        assert state is not None
        return state.angle, [dt, angles]
    return ops.mamba3(x, dt, A, B, C, trap, angles, B_bias=bias)[0], [x, dt, A, B, C, trap, angles, bias]
