"""Stage 5b: parts that all generated kernels share: arguments with sizes and addresses, loads, stores, signatures."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Graph

from flexsp.compiler.backend.by_token import ByToken
from flexsp.compiler.backend.emit import Emitter
from flexsp.compiler.backend.pieces import InPieces
from flexsp.compiler.backend.places import Place, matrix, places
from flexsp.compiler.frontend.meta import Extent, Part
from flexsp.compiler.graphs.differentiate import ChunkTensor
from flexsp.compiler.graphs.rewrite import dims
from flexsp.compiler.graphs.values import NotEmittable, Value, block, is_state

__all__ = [
    "Body", "Kernel", "Layout", "do_last", "elements", "emitter_of", "header", "indent", "index", "kernel_of",
    "laid_out", "reads_in_memory", "setup", "store_kept", "store_of_chunk", "store_tokens",
]  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """Names of the sizes: `rows` and `cols` of the state, `sizes` all; tokens, params and kept values by name.

    A vector is one row, "1"; `state` are its own sizes. Its walks have some of its numbers a program, as they have some
    columns of a matrix, and the scan over segments sees one column, since it takes a decay a row. `parts` are those of
    the state besides the first, `clamped` the tokens that are log gates to be clamped.
    """

    rows: str
    cols: str
    sizes: tuple[str, ...]
    tokens: dict[str, tuple[str, ...]]
    params: dict[str, tuple[str, ...]]
    kept: dict[str, ChunkTensor]
    parts: tuple[Part, ...] = ()
    clamped: frozenset[str] = frozenset()

    @property
    def state(self) -> tuple[str, ...]:
        return (self.cols,) if self.rows == "1" else (self.rows, self.cols)

    @property
    def matrix(self) -> tuple[Extent, ...]:
        """Sizes of all of the state as it is kept in memory."""
        return matrix(self.state, self.parts)

    def places(self, flip: bool = False) -> list[Place]:
        return places(self.state, self.parts, flip)

    def numbers(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Those of `matrix`."""
        return tuple(size.number(sizes) for size in self.matrix)


@dataclass(frozen=True)
class Kernel:
    """Source of one kernel, the order of its arguments by role, and what it writes. `by_row`: kept values of which it
    reads single rows only; `entering`: a walk from right to left that reads the state that enters each chunk.

    `nodes` are the graph's nodes of each part, in the order in which they are loaded or computed.
    """

    name: str
    source: str
    tokens: tuple[str, ...]
    params: tuple[str, ...]
    kept: tuple[str, ...]
    writes: tuple[str, ...]
    contracted: frozenset[str]
    by_row: frozenset[str]
    parts: int
    entering: bool = False
    nodes: tuple[tuple[Any, ...], ...] = ()


@dataclass
class Body:
    """Code of one chunk under construction. `panels`: a program has some of the state's columns, from v0 on: in walks,
    and of a vector state everywhere. `pieces`: it has all, but some at a time, from v0 on (`InPieces`). `exact`: the
    code is that of one token, and holds the states that it reads (`flexsp.compiler.backend.exact`)."""

    layout: Layout
    panels: bool
    pieces: bool = False
    exact: bool = False
    tokens: list[str] = field(default_factory=list)
    params: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    once: list[str] = field(default_factory=list)
    by_row: set[str] = field(default_factory=set)
    indices: set[str] = field(default_factory=set)
    entering: bool = False


def emitter_of(
    graph: Graph, found: Mapping[str, Any], body: Body, memory: Mapping[str, str], state: str | None
) -> tuple[Emitter, Mapping[str, Any]]:
    if body.pieces:
        emitter: Emitter = InPieces(graph, {}, memory, True, body.layout.cols)
    elif body.exact:
        emitter = ByToken(graph, {}, memory)
    else:
        emitter = Emitter(graph, {}, memory, apart=state is None)
    emitter.given = {node.name: _loader(node, body, emitter, state) for node in graph.nodes if node.op == "placeholder"}
    return emitter, found


def elements(sizes: Sequence[str | Extent]) -> str:
    """Numbers of one chunk of a kept value, or of a state."""
    return " * ".join(map(str, sizes)) or "1"


def reads_in_memory(body: Body, emitter: Emitter) -> None:
    """Saved values that code reads a row at a time are arguments too."""
    rows = [name for name in emitter.memory if name in emitter.rows_read and name not in body.kept]
    body.kept += rows
    body.by_row.update(rows)
    body.indices |= emitter.indices


def do_last(tokens: list[str]) -> list[str]:
    return [*(x for x in tokens if x != "do"), *(x for x in tokens if x == "do")]


def kernel_of(
    kind: str, source: str, body: Body, writes: Sequence[str], contracted: set[str], parts: int = 1
) -> Kernel:  # fmt: skip
    return Kernel(
        kind, source, tuple(body.tokens), tuple(body.params), tuple(body.kept), tuple(writes), frozenset(contracted),
        frozenset(body.by_row), parts, body.entering,
    )  # fmt: skip


def index(size: str, body: Body) -> str:
    """The size, whose indices `at_SIZE` the code then has."""
    body.indices.add(size)
    return size


def first_of(size: str, body: Body) -> str:
    """First column of this program's tile."""
    return "v0" if (body.panels or body.pieces) and size == body.layout.cols else "0"


# Loads ----------------------------------------------------------------------------------------------------------------


def _loader(node: Any, body: Body, emitter: Emitter, state: str | None) -> Callable[[], Value]:
    """Loads a placeholder. `state` is the placeholder that a walk holds in registers, None in chunkwise kernels."""
    name, sizes = node.name, dims(node)

    def load() -> Value:
        if is_state(name):
            return _load_state(name, sizes, body, emitter, state)
        if any(s.isdigit() for s in sizes) or len(sizes) > 2:
            raise NotEmittable(f"{name}: kernels are made of sizes that are ConstExprs, got [{', '.join(sizes)}]")
        if name in body.layout.kept:
            return _load_kept(body.layout.kept[name], body, emitter)
        if name in body.layout.params:
            return _load_param(name, sizes, body, emitter)
        text, clamped = _rows_of_tokens(name, sizes, body), name in body.layout.clamped
        text = f"clamped({text})" if clamped else text
        raw = len(sizes) == 2 and not clamped
        return emitter.let(f"{name}_c", Value(text, sizes, frozenset(range(len(sizes))), raw=raw))

    return load


def _rows_of_tokens(name: str, sizes: tuple[str, ...], body: Body) -> str:
    """A chunk's rows of an input [B, T, H, ...]: numbers in fp32, vectors in the input's dtype."""
    if name not in body.tokens:
        body.tokens.append(name)
    if len(sizes) == 1:
        return f"tl.load({name}_ptr + (start + rows) * {name}_st, mask=rows < length, other=0.0).to(tl.float32)"
    n = sizes[1]
    return f"load_rows({name}_ptr + start * {name}_st, {name}_st, length, {first_of(n, body)}, C, {n}, {block(n)})"


def _load_state(name: str, sizes: tuple[str, ...], body: Body, emitter: Emitter, state: str | None) -> Value:
    """The state or its gradient, or a part: what the walk holds, or that of a chunk."""
    stem = name.split("__")[0]
    if state == stem or body.exact:
        body.entering = body.entering or state != stem
        return Value(name, sizes, frozenset(range(len(sizes))), view="transposed" if emitter.flipped else "")
    layout = body.layout
    body.entering = body.entering or state is not None  # the gradient of a merge_mode that is not linear in the state
    place = next(x for x in layout.places() if name == stem + x.suffix)
    at = f"{'entering' if stem == 'S' else 'leaving'} + (row * n_chunks + c) * {elements(layout.matrix)}"
    if len(sizes) < 2:
        zero = frozenset(range(len(sizes)))
        return emitter.let(name, Value(place.load(at, first_of(layout.cols, body)), sizes, zero))
    K, V = sizes
    text = f"load_rows({at}{place.offset}, {place.stride}, {K}, {first_of(V, body)}, B{K}, {V}, B{V})"
    return emitter.let(name, Value(text, sizes, frozenset({0, 1}), raw=True))


def _load_kept(kept: ChunkTensor, body: Body, emitter: Emitter) -> Value:
    name, sizes, gates = kept.name, kept.dims, kept.running
    if name not in body.kept:
        body.kept.append(name)
    body.by_row.discard(name)
    at = f"{name}_ptr + (row * n_chunks + c) * {elements(sizes)}"
    steady = frozenset({0} if gates else ())
    if not sizes:
        return emitter.let(f"{name}_c", Value(f"tl.load({name}_ptr + row * n_chunks + c)", ()))
    if sizes[0] != "C" and len(sizes) == 2:
        n, m = sizes
        text = f"load_rows({at}, {m}, {n}, {first_of(m, body)}, {block(n)}, {m}, {block(m)})"
        return emitter.let(f"{name}_c", Value(text, sizes, frozenset({0, 1}), raw=True))
    if sizes[0] != "C":
        n = index(sizes[0], body)
        text = f"tl.load({at} + at_{n}, mask=at_{n} < {n}, other=0.0)"
        return emitter.let(f"{name}_c", Value(text, sizes, frozenset({0})))
    if len(sizes) == 1:
        text = f"tl.load({at} + rows)" if gates else f"tl.load({at} + rows, mask=rows < length, other=0.0)"
        return emitter.let(f"{name}_c", Value(text, sizes, frozenset(() if gates else {0}), steady=steady))
    n = sizes[1]
    zero = frozenset({1} if n != "C" else ()) | frozenset(() if gates else {0})
    text = f"load_rows({at}, {n}, {'C' if gates else 'length'}, {first_of(n, body)}, C, {n}, {block(n)})"
    return emitter.let(f"{name}_c", Value(text, sizes, zero, wild=gates and n == "C", raw=True, steady=steady))


def _load_param(name: str, sizes: tuple[str, ...], body: Body, emitter: Emitter) -> Value:
    in_piece = body.pieces and body.layout.cols in sizes
    if name not in body.params or in_piece:
        body.params += [name] if name not in body.params else []
        if not sizes:
            body.once.append(f"{name}_h = tl.load({name}_ptr + h).to(tl.float32)")
        elif len(sizes) == 1:
            n = index(sizes[0], body)
            text = f"tl.load({name}_ptr + h * {n} + at_{n}, mask=at_{n} < {n}, other=0.0).to(tl.float32)"
            (emitter.lines if in_piece else body.once).append(f"{name}_h = {text}")
        elif first_of(sizes[0], body) != "0":
            raise NotEmittable(f"{name}: kernels take parameters [{sizes[1]}, {sizes[0]}] a head, got {sizes}")
        else:
            n, m = sizes
            at = f"{name}_ptr + h * {elements(sizes)}, {m}, {n}, {first_of(m, body)}, {block(n)}, {m}, {block(m)}"
            (emitter.lines if in_piece else body.once).append(f"{name}_h = load_rows({at}).to(tl.float32)")
    return Value(f"{name}_h", sizes, frozenset(range(len(sizes))))


# Text -----------------------------------------------------------------------------------------------------------------


def header(name: str, pointers: Sequence[str], numbers: Sequence[str], body: Body, flags: Sequence[str]) -> str:
    sizes = [x for size in body.layout.sizes for x in (size, f"B{size}")]
    constants = ", ".join(f"{x}: tl.constexpr" for x in (*sizes, "C", *flags, "PACKED", "DOT", "PREC", "PDL"))
    strides = [f"{x}_{axis}" for x in body.tokens for axis in ("sb", "st", "sh")]
    lines = textwrap.wrap(", ".join([*pointers, *strides, *numbers]) + ",", 112)
    lines += textwrap.wrap(constants + ",", 112)
    free = [*numbers, *(f"{x}_sb" for x in body.tokens if len(body.layout.tokens[x]) == 1)]
    names = ", ".join(f'"{x}"' for x in free)
    decorator = textwrap.wrap(f"@triton.jit(do_not_specialize=[{names}])", 112, subsequent_indent="    ")
    return "\n".join([*decorator, f"def {name}(", *("    " + line for line in lines), "):\n"])


def setup(body: Body) -> list[str]:
    """First lines of every kernel. `row` has 64 bits, and so what is computed with it: chunks * C * K may need them."""
    lines = [
        "b = tl.program_id(1) // H",
        "h = (tl.program_id(1) % H).to(tl.int64)",
        "row = tl.program_id(1).to(tl.int64)",
        "rows = tl.arange(0, C)",
    ]
    for size in sorted(body.indices - ({body.layout.cols} if body.pieces else set())):
        first = first_of(size, body)
        lines.append(f"at_{size} = {'' if first == '0' else f'{first} + '}tl.arange(0, {block(size)})")
    lines += [f"{x}_ptr += b.to(tl.int64) * {x}_sb + h * {x}_sh" for x in body.tokens]
    return lines + body.once


def indent(lines: Sequence[str], by: int) -> str:
    return "".join("    " * by + line + "\n" for line in lines)


def laid_out(emitter: Emitter, x: Value, sizes: tuple[str, ...]) -> str:
    return emitter.full(x, sizes).text


def store_tokens(emitter: Emitter, at: str, x: Value, sizes: tuple[str, ...], body: Body) -> str:
    """Stores the chunk's rows of a contiguous tensor [B, T, H, ...]. The gradient of a gate that is clamped is 0."""
    source = at.removeprefix("d_")
    if at != source and source in body.layout.clamped:
        x = Value(f"where_open({_rows_of_tokens(source, sizes, body)}, {laid_out(emitter, x, sizes)})", sizes)
    text = x.code if x.is_transposed else laid_out(emitter, x, sizes)
    if len(sizes) == 1:
        return f"tl.store({at}_ptr + ((b.to(tl.int64) * T + start + rows) * H + h), {text}, mask=rows < length)"
    n = sizes[1]
    base = f"{at}_ptr + ((b.to(tl.int64) * T + start) * H + h) * {n}"
    cols = f"{first_of(n, body)}, C, {n}, {block(n)}"
    return f"store_{'columns' if x.is_transposed else 'rows'}({base}, {text}, H * {n}, length, {cols})"


def store_kept(emitter: Emitter, kept: ChunkTensor, x: Value, body: Body) -> str:
    name, sizes = kept.name, kept.dims
    if sizes[:1] != ("C",) and len(sizes) == 2:
        n, m = sizes
        at, text = f"{name}_ptr + (row * n_chunks + c) * {elements(sizes)}", emitter.full(x, sizes).f32
        return f"store_rows({at}, {text}, {m}, {n}, {first_of(m, body)}, {block(n)}, {m}, {block(m)})"
    if not sizes or sizes[0] != "C":
        return store_of_chunk(emitter, f"{name}_ptr", x, sizes, body)
    at = f"{name}_ptr + (row * n_chunks + c) * {elements(sizes)}"
    x = emitter.full(x, sizes)
    if not kept.past_the_end:
        x = emitter.masked(x, 0)
        x = emitter.masked(x, 1) if x.wild and sizes[1:] == ("C",) else x  # the others are loaded without their padding
    text = x.f32
    if len(sizes) == 1:
        return f"tl.store({at} + rows, {text})"
    return f"store_rows({at}, {text}, {sizes[1]}, C, {first_of(sizes[1], body)}, C, {sizes[1]}, {block(sizes[1])})"


def store_of_chunk(emitter: Emitter, base: str, x: Value, sizes: tuple[str, ...], body: Body) -> str:
    """Stores a number, vector or matrix of the whole chunk in the chunk's row of [rows, ...]."""
    if not sizes:
        return f"tl.store({base} + row * n_chunks + c, {x.f32})"
    if len(sizes) == 2:
        n, m = sizes
        at = f"{base} + (row * n_chunks + c) * {elements(sizes)}"
        cols = f"{m}, {n}, {first_of(m, body)}, {block(n)}, {m}, {block(m)}"
        return f"store_rows({at}, {laid_out(emitter, x, sizes)}, {cols})"
    n = index(sizes[0], body)
    return f"tl.store({base} + (row * n_chunks + c) * {n} + at_{n}, {laid_out(emitter, x, sizes)}, mask=at_{n} < {n})"
