"""A program of one's own in `flexsp bench op` and `flexsp bench scale`, beside the same in PyTorch, compiled or not."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flexsp.bench.case import Case, Inputs, Peer, Shape
from flexsp.bench.gates import Normal, log_gates
from flexsp.bench.in_pytorch import in_pytorch
from flexsp.compiler import ConstExpr, LinearAttention, SymbTensor

if TYPE_CHECKING:
    from flexsp.comm.group import SequenceParallel

__all__ = ["variant_case"]

_GATES, _RATES = ("g", "w"), ("beta", "b")
_DRAWN = "bench_inputs"


def _loaded(spec: str) -> tuple[str, Any, Callable[..., Any] | None]:
    """The file's stem, the object, and the file's function that draws inputs."""
    file, _, name = spec.rpartition(":")
    path = Path(file)
    if not file or not path.is_file():
        raise ValueError(f"--variant: expected FILE.py:OBJECT with a file that exists, got {spec!r}")
    found = importlib.util.spec_from_file_location(path.stem, path)
    if found is None or found.loader is None:
        raise ValueError(f"--variant: expected a Python file, got {file!r}")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    if not hasattr(module, name):
        raise ValueError(f"--variant: expected an object of {file}, got {name!r}")
    return path.stem, getattr(module, name), getattr(module, _DRAWN, None)


def _sizes(variant: LinearAttention, asked: Mapping[str, int]) -> dict[str, int]:
    """Sizes by name: what is asked for where the program allows it, else the largest that it allows."""
    meta = variant.program.meta
    named = {
        size.name: size for what in (*meta.tokens.values(), *meta.params.values(), meta.state)
        for size in what.shape if isinstance(size, ConstExpr)
    }  # fmt: skip
    return {
        name: asked[name] if asked.get(name) in size.choices else max(size.choices) for name, size in named.items()
    }


def _drawn(
    variant: LinearAttention, sizes: Mapping[str, int], kind: str, shape: Shape, dtype: torch.dtype, normal: Normal
) -> Inputs:  # fmt: skip
    """Inputs by their names: log gates of a kind, rates in 0..1, keys of length 1 beside rates, and N(0, 1)."""
    meta, found = variant.program.meta, {}
    rates = [x for x in _RATES if x in meta.tokens and len(meta.tokens[x].shape) == 2]

    def size(x: Any) -> int:
        return shape.T if x == "T" else sizes[x.name] if isinstance(x, ConstExpr) else int(x)

    def of(what: SymbTensor, heads_first: bool) -> tuple[int, ...]:
        rest = [size(x) for x in what.shape[1:]]
        tokens = [shape.T, *([what.rows] if what.rows else [])]
        return (shape.B, rest[0], *tokens, *rest[1:]) if heads_first else (shape.B, *tokens, *rest)

    for name, what in meta.tokens.items():
        if name in meta.earlier:
            continue
        whole = of(what, name in meta.heads_first)
        if name in _GATES and not what.rows and name not in meta.heads_first:
            found[name] = log_gates(kind, whole, normal)
            continue
        x = normal(*whole)
        x = x.sigmoid() if name in rates else torch.nn.functional.normalize(x, dim=-1) if rates and name == "k" else x
        found[name] = x.to(dtype)
    return found | {name: normal(*(size(x) for x in what.shape)) for name, what in meta.params.items()}


def variant_case(args: argparse.Namespace, device: torch.device) -> Case:
    """The program of `--variant FILE.py:OBJECT` as a case. OBJECT is a `LinearAttention`, or a function
    make(H, K, V, dtype) of one. `args` get the sizes that it has. On a CPU, where runs are to end in seconds, the
    program in PyTorch is not compiled.

    A function bench_inputs(B, T, dtype, normal) of the file returns the program's inputs by name, where ``normal`` of
    sizes is a tensor of normal numbers; else they are drawn by their names.

    Raises:
        ValueError: there is no such program.
    """
    stem, made, draws = _loaded(args.variant)
    dtype = getattr(torch, args.dtype)
    variant = made if isinstance(made, LinearAttention) or not callable(made) else made(args.H, args.K, args.V, dtype)
    if not isinstance(variant, LinearAttention):
        got = type(variant).__name__
        raise ValueError(f"--variant: expected a LinearAttention or a function that makes one, got {got}")
    sizes, state = _sizes(variant, {"H": args.H, "K": args.K, "V": args.V}), variant.program.meta.state.shape[1:]
    for flag, size in zip("HKV", state, strict=False):
        setattr(args, flag, sizes[size.name] if isinstance(size, ConstExpr) else int(size))

    def draw(shape: Shape, dtype: torch.dtype, normal: Normal) -> Inputs:
        if draws is not None:
            inputs = dict(draws(shape.B, shape.T, dtype, normal))
        else:
            inputs = _drawn(variant, sizes, args.gates, shape, dtype, normal)
        tokens = [x for name, x in inputs.items() if name in variant.program.meta.tokens]
        values = variant.program.value_sizes[0]
        width = sizes[values.name] if isinstance(values, ConstExpr) else values
        if not isinstance(width, int):
            width = shape.V
        return inputs | {"do": normal(shape.B, shape.T, args.H, width).to(tokens[0].dtype)}

    def ours(x: Inputs, sp: SequenceParallel | bool = False) -> torch.Tensor:
        return variant(**{name: y for name, y in x.items() if name != "do"}, sp=sp)[0]

    def plain(x: Inputs) -> torch.Tensor:
        return in_pytorch(variant, {name: y for name, y in x.items() if name != "do"})

    others = {"pytorch": Peer("torch", plain)}
    if device.type == "cuda":
        others["torch.compile"] = Peer("torch", torch.compile(plain))
    return Case(stem, ours, None, draw=draw, others=others)
