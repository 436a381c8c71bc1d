"""Programs in plain PyTorch on any device: what a user has without kernels, in eager mode or compiled by torch."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

import torch

from flexsp.compiler import ConstExpr, arguments
from flexsp.compiler.frontend import functions

if TYPE_CHECKING:
    from flexsp.bench.case import Inputs
    from flexsp.compiler import LinearAttention
    from flexsp.compiler.frontend.meta import InputMeta, Size

__all__ = ["in_pytorch", "program"]

_CHUNK = 64


def _key(size: Size) -> str | int:
    return size.name if isinstance(size, ConstExpr) else size


def _sizes(meta: InputMeta, inputs: Inputs) -> dict[str | int, int]:
    """The program's sizes by name."""
    found: dict[str | int, int] = {}
    for name, what in (meta.tokens | meta.params).items():
        given = inputs[name].shape[1 if name in meta.tokens else 0 :]
        found |= dict(zip(map(_key, what.shape), given, strict=True))
    for size in meta.state_sizes:
        found.setdefault(_key(size), size.choices[0] if isinstance(size, ConstExpr) else int(size))
    return found


def in_pytorch(variant: LinearAttention, inputs: Inputs) -> torch.Tensor:
    """Outputs [B, T, H, V] of inputs as `LinearAttention` takes them with a batch.

    The three functions run on all chunks of 64 tokens at once, in float32; states then pass from chunk to chunk.
    """
    program = variant.program
    meta = program.meta
    inputs, _ = arguments.asked(meta, inputs, None, None)
    sizes = _sizes(meta, inputs)
    wide = torch.promote_types(torch.float32, arguments.widest(*inputs.values()))
    tokens, params = ({name: inputs[name].to(wide) for name in names} for names in (meta.tokens, meta.params))
    state = tuple(sizes[_key(n)] for n in meta.state_sizes)
    o, final = functions.run(program, tokens, params, None, state, None, variant._C or _CHUNK, None, 1, "")
    return arguments.answered(meta, None, o, final)[0].to(inputs[next(iter(meta.tokens))].dtype)


@torch.compiler.disable
@functools.cache
def _made(name: str, H: int, K: int, V: int, dtype: torch.dtype, scale: float | None) -> Any:
    return importlib.import_module(f"flexsp.variants.{name}").make(H, K, V, dtype, scale)


def program(name: str, x: Inputs, scale: float | None = None) -> torch.Tensor:
    """The program flexsp.variants.NAME in PyTorch. The scale is K**-0.5 if it is None."""
    lead = x["q"]
    return in_pytorch(_made(name, lead.shape[2], lead.shape[3], x["v"].shape[3], lead.dtype, scale), x)
