"""What a `LinearAttention` says of itself: its short form, and the page of `explain`."""

from __future__ import annotations

import textwrap
from typing import Any

import torch

from flexsp.compiler.frontend.meta import ConstExpr
from flexsp.compiler.graphs.values import NotEmittable
from flexsp.exceptions import check_flag

__all__ = ["page", "short"]

_WIDTH = 118
_MORE = "explain(graph=True) adds what each kernel reads and writes, and the graphs of the functions"


def page(made: Any, T: int, B: int, graph: bool) -> str:
    """See `LinearAttention.explain`; ``made`` is one."""
    for name, n in (("T", T), ("B", B)):
        if type(n) is not int or n < 0:
            raise ValueError(f"{name}: expected a number of {'tokens' if name == 'T' else 'sequences'}, got {n!r}")
    check_flag("graph", graph)
    program, code = made.program, made._derived()
    sizes, dtype = made.largest(), next(iter(program.meta.tokens.values())).dtype
    of = ", ".join(f"{name} = {n}" for name, n in sizes.items())
    reason = made._refusal(sizes, program.meta.looks(sizes, 1), torch.cuda.is_available())
    lines = [
        *str(made.report).splitlines(),
        f"on CPU and in float64 a call runs in PyTorch, chunks of {made.pytorch_chunk}",
        f"on a GPU a call with {of} in {str(dtype).removeprefix('torch.')} {made._outcome(reason)}",
    ]
    kernels: list[str] = []
    if not isinstance(code, str):
        from flexsp.compiler.planning.explain import engines_of, kernels_of

        sized = code.sized(sizes, dtype) if reason is None else code
        lines += [*engines_of(code), f"file: {sized.path}", *_plan(made, code, sizes, T, B), *made._tuned]
        kernels = ["", "kernels:", *kernels_of(sized)]
    if not graph:
        return "\n".join([*map(_wrapped, lines), _MORE])
    for role, traced in (("chunk", program.chunk), ("decay", program.decay), ("merge", program.merge)):
        kernels.append(f"\n{role}: {traced.name}({', '.join(traced.arguments)})")
        kernels += [f"    {node.format_node()}" for node in traced.graph.nodes]
    return "\n".join([*map(_wrapped, lines), *kernels])


def short(made: Any) -> str:
    """``repr`` of a `LinearAttention`: the output function with its inputs, their sizes, the kind of transition."""
    meta = made.program.meta
    shapes = {name: (x.name if isinstance(x, ConstExpr) else str(x) for x in each.shape)
              for name, each in (meta.tokens | meta.params).items()}  # fmt: skip
    inputs = ", ".join(f"{name} [{', '.join(shape)}]" for name, shape in shapes.items())
    sizes = [f"{name} = {' or '.join(map(str, choices))}" for name, choices in made._sizes.items()]
    options = [f"transition {made.program.transition}"]
    options += [f"chunk_size={made._C}"] if made._C else []
    options += ["autotune=True"] if made._autotune else []
    options += [f"fallback={made._fallback!r}"] if made._fallback else []
    parts = filter(None, (inputs, ", ".join(sizes), ", ".join(options)))
    return f"LinearAttention({made.program.merge.name}: {'; '.join(parts)})"


def _plan(made: Any, code: Any, sizes: dict[str, int], T: int, B: int) -> list[str]:
    from flexsp.compiler.planning.explain import describe

    first = next(iter(made.program.meta.tokens.values()))
    heads = first.shape[1]
    H = heads if isinstance(heads, int) else sizes.get(heads.name if isinstance(heads, ConstExpr) else heads, 32)
    try:
        return describe(code, {x: sizes[x] for x in code.layout.sizes}, B * H, T * made.rows, first.dtype)
    except (NotEmittable, ValueError) as error:
        return [f"no plan: {error}"]


def _wrapped(line: str) -> str:
    """A long line as several, which are indented further than the first. Rows of tables, whose columns are two spaces
    apart, stay whole."""
    if len(line) <= _WIDTH or "  " in line.strip():
        return line
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.fill(
        line, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    )
