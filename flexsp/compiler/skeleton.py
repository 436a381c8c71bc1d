"""Stage 5b: the kernels around emitted code: which tile each program has, what it loads, walks and stores.

`summarize`, `output` and `states` walk a segment from left to right with the state in registers, `collect` and `back`
from right to left with its gradient. The other kinds are chunkwise, one chunk a program: `prepare0`, ..., `adjoint0`,
..., `grads` and `gather` (`stages`). Forward: prepare, summarize, (rank scan), output. Backward: collect, (rank scan),
states, back, adjoint, grads, gather.
"""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import Graph

from flexsp.compiler.differentiate import Step, cut
from flexsp.compiler.emit import Emitter
from flexsp.compiler.homogeneous import without
from flexsp.compiler.meta import Part
from flexsp.compiler.places import Place, matrix, places
from flexsp.compiler.rewrite import dims
from flexsp.compiler.values import NotEmittable, Value, block, is_state, is_turned, turned

__all__ = ["Kernel", "Layout", "make_kernel"]

# Walks that hold the state transposed: so it enters its products from registers.
FLIPPED = ("output",)
HELD = {"summarize": "S", "output": "S", "states": "S", "collect": "dS", "back": "dS"}
"""What each walk holds: the state or its gradient."""
WALKS = tuple(HELD)
_KEEPS = ("states", "back")  # walks that leave the state, or its gradient, of every chunk


@dataclass(frozen=True)
class Layout:
    """Names of the sizes: `rows` and `cols` of the state, `sizes` all; tokens, params and kept values by name.

    A vector is one row, "1"; `state` are its own sizes. Its walks have some of its numbers a program, as they have some
    columns of a matrix, and the scan over segments sees one column, since it takes a decay a row. `parts` are those of
    the state besides the first.
    """

    rows: str
    cols: str
    sizes: tuple[str, ...]
    tokens: dict[str, tuple[str, ...]]
    params: dict[str, tuple[str, ...]]
    kept: dict[str, tuple[str, ...]]
    parts: tuple[Part, ...] = ()

    @property
    def state(self) -> tuple[str, ...]:
        return (self.cols,) if self.rows == "1" else (self.rows, self.cols)

    @property
    def matrix(self) -> tuple[str, ...]:
        """Sizes of all of the state as it is kept in memory, sums where it has parts."""
        return matrix(self.state, self.parts)

    def places(self, flip: bool = False) -> list[Place]:
        return places(self.state, self.parts, flip)

    def numbers(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Those of `matrix`."""
        return tuple(sum(int(n) if n.isdigit() else sizes[n] for n in x.split(" + ")) for x in self.matrix)


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
class _Body:
    """Code of one chunk under construction. `panels`: a program has some of the state's columns, from v0 on: in walks,
    and of a vector state everywhere."""

    layout: Layout
    panels: bool
    tokens: list[str] = field(default_factory=list)
    params: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    once: list[str] = field(default_factory=list)
    by_row: set[str] = field(default_factory=set)
    indices: set[str] = field(default_factory=set)
    entering: bool = False


def make_kernel(
    step: Step, layout: Layout, kind: str, parts: Sequence[Sequence[str]], given: Sequence[str], dense: bool
) -> Kernel:
    """One kernel that computes outputs of `step`, reading kept values `given`. Walks have one part.

    `dense`: the transition is, so `summarize` has programs that leave columns of A^T beside those that leave F.
    """
    chunkwise = kind not in WALKS
    state = HELD.get(kind)
    body = _Body(layout, panels=not chunkwise or len(layout.state) == 1)
    memory = {name: f"{name}_ptr + c * {_elements(layout.kept[name])}" for name in given}
    made = [_emitter(*cut(step, outputs, given, join=not chunkwise), body, memory, state) for outputs in parts]
    if chunkwise:
        kernel = _chunkwise(kind, body, made)
        return replace(kernel, nodes=tuple(tuple(emitter.values) for emitter, _ in made))
    [(emitter, found)] = made
    results: dict[str, Value] = {}
    if kind in FLIPPED and not dense and len(layout.state) == 2 and not layout.parts:
        emitter.flip("S")
    emitter.run(found, results.__setitem__, order=False)
    if kind != "summarize" or not dense:
        return replace(_walk(kind, body, emitter, results), nodes=(tuple(emitter.values),))
    across, lines = _transition(step, given, body, memory)
    kernel = _walk(kind, body, emitter, results, lines)
    return replace(kernel, nodes=(tuple(emitter.values), tuple(across.values)))


def _emitter(
    graph: Graph, found: Mapping[str, Any], body: _Body, memory: Mapping[str, str], state: str | None
) -> tuple[Emitter, Mapping[str, Any]]:
    emitter = Emitter(graph, {}, memory, apart=state is None)
    emitter.given = {node.name: _loader(node, body, emitter, state) for node in graph.nodes if node.op == "placeholder"}
    return emitter, found


def _elements(sizes: tuple[str, ...]) -> str:
    """Numbers of one chunk of a kept value, or of a state."""
    return " * ".join(f"({s})" if " " in s else s for s in sizes) or "1"


# Loads ----------------------------------------------------------------------------------------------------------------


def _loader(node: Any, body: _Body, emitter: Emitter, state: str | None) -> Callable[[], Value]:
    """What loads a placeholder; `state` is what the walk holds, None in chunkwise kernels."""
    name, sizes = node.name, dims(node)

    def load() -> Value:
        if is_state(name):
            return _load_state(name, sizes, body, emitter, state)
        if any(s.isdigit() for s in sizes) or len(sizes) > 2:
            raise NotEmittable(f"{name}: kernels are made of sizes that are ConstExprs, got {sizes}")
        if name in body.layout.kept:
            return _load_kept(name, sizes, body, emitter)
        if name in body.layout.params:
            return _load_param(name, sizes, body)
        if name not in body.tokens:
            body.tokens.append(name)
        if len(sizes) == 1:
            text = f"tl.load({name}_ptr + (start + rows) * {name}_st, mask=rows < length, other=0.0).to(tl.float32)"
            return emitter.let(f"{name}_c", Value(text, sizes, frozenset({0})))
        n = sizes[1]
        text = f"load_rows({name}_ptr + start * {name}_st, {name}_st, length, {_first(n, body)}, C, {n}, {block(n)})"
        return emitter.let(f"{name}_c", Value(text, sizes, frozenset({0, 1}), raw=True))

    return load


def _load_state(name: str, sizes: tuple[str, ...], body: _Body, emitter: Emitter, state: str | None) -> Value:
    """The state or its gradient, or a part: what the walk holds, or that of a chunk."""
    stem = name.split("__")[0]
    if state == stem:
        text = f"tl.trans({name})" if emitter.flipped else name
        return Value(text, sizes, frozenset(range(len(sizes))))
    layout = body.layout
    body.entering = body.entering or state is not None  # the gradient of a merge_mode that is not linear in the state
    place = next(x for x in layout.places() if name == stem + x.suffix)
    at = f"{'entering' if stem == 'S' else 'leaving'} + (row * n_chunks + c) * {_elements(layout.matrix)}"
    if len(sizes) == 1:
        return emitter.let(name, Value(place.load(at, _first(layout.cols, body)), sizes, frozenset({0})))
    K, V = sizes
    text = f"load_rows({at}{place.offset}, {place.stride}, {K}, {_first(V, body)}, B{K}, {V}, B{V})"
    return emitter.let(name, Value(text, sizes, frozenset({0, 1}), raw=True))


def _first(size: str, body: _Body) -> str:
    """First column of this program's tile."""
    return "v0" if body.panels and size == body.layout.cols else "0"


def _load_kept(name: str, sizes: tuple[str, ...], body: _Body, emitter: Emitter) -> Value:
    if name not in body.kept:
        body.kept.append(name)
    body.by_row.discard(name)
    at = f"{name}_ptr + c * {_elements(sizes)}"
    gates = name.startswith("gates_")  # running sums, whose rows past the chunk's length are all the same
    steady = frozenset({0} if gates else ())
    if not sizes:
        return emitter.let(f"{name}_c", Value(f"tl.load({name}_ptr + c)", ()))
    if sizes[0] != "C":
        n = _index(sizes[0], body)
        text = f"tl.load({at} + at_{n}, mask=at_{n} < {n}, other=0.0)"
        return emitter.let(f"{name}_c", Value(text, sizes, frozenset({0})))
    if len(sizes) == 1:
        text = f"tl.load({at} + rows)" if gates else f"tl.load({at} + rows, mask=rows < length, other=0.0)"
        return emitter.let(f"{name}_c", Value(text, sizes, frozenset(() if gates else {0}), steady=steady))
    n = sizes[1]
    zero = frozenset({1} if n != "C" else ()) | frozenset(() if gates else {0})
    text = f"load_rows({at}, {n}, {'C' if gates else 'length'}, {_first(n, body)}, C, {n}, {block(n)})"
    return emitter.let(f"{name}_c", Value(text, sizes, zero, wild=gates and n == "C", raw=True, steady=steady))


def _index(size: str, body: _Body) -> str:
    """The size, whose indices `at_SIZE` the code then has."""
    body.indices.add(size)
    return size


def _load_param(name: str, sizes: tuple[str, ...], body: _Body) -> Value:
    if name not in body.params:
        body.params.append(name)
        if not sizes:
            body.once.append(f"{name}_h = tl.load({name}_ptr + h).to(tl.float32)")
        elif len(sizes) == 1:
            n = _index(sizes[0], body)
            text = f"tl.load({name}_ptr + h * {n} + at_{n}, mask=at_{n} < {n}, other=0.0).to(tl.float32)"
            body.once.append(f"{name}_h = {text}")
        else:
            raise NotEmittable(f"{name}: kernels take parameters of [H] or [H, N], got {sizes} a head")
    return Value(f"{name}_h", sizes, frozenset(range(len(sizes))))


# Text -----------------------------------------------------------------------------------------------------------------


def _header(name: str, pointers: Sequence[str], numbers: Sequence[str], body: _Body, flags: Sequence[str]) -> str:
    sizes = [x for size in body.layout.sizes for x in (size, f"B{size}")]
    constants = ", ".join(f"{x}: tl.constexpr" for x in (*sizes, "C", *flags, "PACKED", "DOT", "PREC", "PDL"))
    strides = [f"{x}_{axis}" for x in body.tokens for axis in ("sb", "st", "sh")]
    lines = textwrap.wrap(", ".join([*pointers, *strides, *numbers]) + ",", 112)
    lines += textwrap.wrap(constants + ",", 112)
    free = [*numbers, *(f"{x}_sb" for x in body.tokens if len(body.layout.tokens[x]) == 1)]
    names = ", ".join(f'"{x}"' for x in free)
    decorator = textwrap.wrap(f"@triton.jit(do_not_specialize=[{names}])", 112, subsequent_indent="    ")
    return "\n".join([*decorator, f"def {name}(", *("    " + line for line in lines), "):\n"])


def _setup(body: _Body, writes: Sequence[str]) -> list[str]:
    lines = [
        "b = tl.program_id(1) // H",
        "h = (tl.program_id(1) % H).to(tl.int64)",
        "row = tl.program_id(1).to(tl.int64)",
        "rows = tl.arange(0, C)",
    ]
    for size in sorted(body.indices):
        first = _first(size, body)
        lines.append(f"at_{size} = {'' if first == '0' else f'{first} + '}tl.arange(0, {block(size)})")
    lines += [f"{x}_ptr += b.to(tl.int64) * {x}_sb + h * {x}_sh" for x in body.tokens]
    kept = [*body.kept, *(w for w in writes if w in body.layout.kept)]
    lines += [f"{x}_ptr += row * n_chunks * {_elements(body.layout.kept[x])}" for x in kept]
    return lines + body.once


def _indent(lines: Sequence[str], by: int) -> str:
    return "".join("    " * by + line + "\n" for line in lines)


def _laid_out(emitter: Emitter, x: Value, sizes: tuple[str, ...]) -> str:
    return emitter.full(x, sizes).text


def _store_tokens(emitter: Emitter, at: str, x: Value, sizes: tuple[str, ...], body: _Body) -> str:
    """Stores the chunk's rows of a contiguous tensor [B, T, H, ...]."""
    turn = is_turned(x.text)
    text = turned(x).text if turn else _laid_out(emitter, x, sizes)
    if len(sizes) == 1:
        return f"tl.store({at}_ptr + ((b.to(tl.int64) * T + start + rows) * H + h), {text}, mask=rows < length)"
    n = sizes[1]
    base = f"{at}_ptr + ((b.to(tl.int64) * T + start) * H + h) * {n}"
    return (
        f"store_{'columns' if turn else 'rows'}({base}, {text}, H * {n}, length, {_first(n, body)}, C, {n}, {block(n)})"
    )


def _chunkwise(kind: str, body: _Body, parts: Sequence[tuple[Emitter, Mapping[str, Any]]]) -> Kernel:
    code: list[str] = []
    contracted: set[str] = set()
    writes = [name.removeprefix("keep_") for _, outputs in parts for name in outputs]
    for i, (emitter, outputs) in enumerate(parts):
        emitter.run(outputs, functools.partial(_store, emitter, body))
        _reads_in_memory(body, emitter)
        contracted |= emitter.contracted
        if len(parts) > 1:
            code += [f"if part == {i}:", *(f"    {line}" for line in emitter.lines)]
        else:
            code += emitter.lines
    body.tokens[:] = _do_last(body.tokens)
    pointers = [f"{x}_ptr" for x in (*body.tokens, *body.kept, *body.params, *writes)]
    pointers += [*([] if kind.startswith("prepare") else ["entering", "leaving"]), "table"]
    which = ["c = tl.program_id(0)"]
    if len(parts) > 1:  # parts of a chunk run side by side and share what they load through the cache
        which = [f"c = tl.program_id(0) // {len(parts)}", f"part = tl.program_id(0) % {len(parts)}"]
    which += [f"v0 = tl.program_id(2) * B{body.layout.cols}"] if body.panels else []
    lines = ["begin(PDL)", *which, *_setup(body, [name for name in writes if name in body.layout.kept])]
    lines.append("start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)")
    source = _header(kind, pointers, ["T", "H", "n_chunks"], body, ["APART"]) + _indent([*lines, *code], 1)
    return _kernel(kind, source, body, writes, contracted, len(parts))


def _store(emitter: Emitter, body: _Body, name: str, x: Value) -> None:
    layout = body.layout
    if name.startswith("keep_"):
        kept = name.removeprefix("keep_")
        line = _store_kept(emitter, kept, x, layout.kept[kept], body)
    else:
        source = name.removeprefix("d_")
        if source in layout.tokens:
            line = _store_tokens(emitter, name, x, layout.tokens[source], body)
        else:
            sizes = layout.params[source]
            x = Value(f"tl.where(length > 0, {_laid_out(emitter, x, sizes)}, 0.0)", sizes)
            line = _store_of_chunk(emitter, f"{name}_ptr", x, sizes, body, "row * n_chunks + c")
    emitter.lines.append(line)


def _kernel(kind: str, source: str, body: _Body, writes: Sequence[str], contracted: set[str], parts: int = 1) -> Kernel:
    return Kernel(
        kind,
        source,
        tuple(body.tokens),
        tuple(body.params),
        tuple(body.kept),
        tuple(writes),
        frozenset(contracted),
        frozenset(body.by_row),
        parts,
        body.entering,
    )


def _reads_in_memory(body: _Body, emitter: Emitter) -> None:
    """Kept values that code reads a row at a time are arguments too."""
    rows = [name for name in emitter.memory if name in emitter.rows_read and name not in body.kept]
    body.kept += rows
    body.by_row.update(rows)
    body.indices |= emitter.indices


def _do_last(tokens: list[str]) -> list[str]:
    return [*(x for x in tokens if x != "do"), *(x for x in tokens if x == "do")]


def _store_kept(emitter: Emitter, name: str, x: Value, sizes: tuple[str, ...], body: _Body) -> str:
    if not sizes or sizes[0] != "C":
        return _store_of_chunk(emitter, f"{name}_ptr", x, sizes, body, "c")
    at = f"{name}_ptr + c * {_elements(sizes)}"
    x = emitter.full(x, sizes)
    if not name.startswith("gates_"):
        x = emitter.masked(x, 0)
        x = emitter.masked(x, 1) if x.wild and sizes[1:] == ("C",) else x  # the others are loaded without their padding
    text = x.f32
    if len(sizes) == 1:
        return f"tl.store({at} + rows, {text})"
    return f"store_rows({at}, {text}, {sizes[1]}, C, {_first(sizes[1], body)}, C, {sizes[1]}, {block(sizes[1])})"


def _store_of_chunk(emitter: Emitter, base: str, x: Value, sizes: tuple[str, ...], body: _Body, row: str) -> str:
    """Stores a number or a vector that a chunk leaves as a whole in its row of [rows, ...]."""
    if not sizes:
        return f"tl.store({base} + {row}, {x.f32})"
    n = _index(sizes[0], body)
    row = f"({row})" if " " in row else row
    return f"tl.store({base} + {row} * {n} + at_{n}, {_laid_out(emitter, x, sizes)}, mask=at_{n} < {n})"


def _transition(step: Step, given: Sequence[str], body: _Body, memory: Mapping[str, str]) -> tuple[Emitter, list[str]]:
    """Programs of `summarize` that take columns of the unit matrix from right to left: A^T, stored as A (MATH 8)."""
    layout = body.layout
    K, V, rows = layout.rows, layout.cols, _elements(layout.matrix[:1])
    held = [x for x in layout.places() if x.of_columns]
    graph, _ = cut(step, [f"d_S{x.suffix}" for x in held], given, join=True)
    for name in ("do", *(f"dS{x.suffix}" for x in layout.places() if x not in held)):
        without(graph, name)
    wide = [x.name for x in graph.nodes if x.op == "placeholder" and x.users and not is_state(x.name) and V in dims(x)]
    if wide:
        raise NotEmittable(f"{', '.join(wide)}: no kernels are made of a dense transition that differs between columns")
    end: Any = next(node for node in graph.nodes if node.op == "output")
    emitter, found = _emitter(
        graph, {f"d_S{x.suffix}": node for x, node in zip(held, end.args[0], strict=True)}, body, memory, "dS"
    )
    results: dict[str, Value] = {}
    emitter.run(found, results.__setitem__, order=False)
    _reads_in_memory(body, emitter)
    if V in emitter.contracted:
        raise NotEmittable("no kernels are made of a dense transition that sums over columns")
    new = {x: emitter.full(results[f"d_S{x.suffix}"], x.sizes) for x in held}
    texts = {x: (emitter.masked(y, 0) if len(x.sizes) == 2 else y).f32 for x, y in new.items()}
    cols = f"v0 + tl.arange(0, B{V})"
    firsts = ["0", *(part.row for part in layout.parts if part.sizes != (K,))]
    start, last = [], []
    for place, first in zip(held, firsts, strict=True):
        at = f"transition + row * {rows} * {rows}" + ("" if first == "0" else f" + {first}")
        name, apart = f"dS{place.suffix}", f", False, {rows}" if layout.parts else ""
        if len(place.sizes) == 2:
            unit = f"tl.arange(0, B{K})[:, None]" + ("" if first == "0" else f" + {first}")
            unit = f"({unit} == {cols}[None, :]).to(tl.float32)"
            start.append(f"{name} = {f'keep_rows({unit}, {K})' if layout.parts else unit}")
            last.append(f"store_state({at}, tl.trans({name}), v0, 0, True, {rows}, {K}, B{V}, B{K}{apart})")
        else:
            start.append(f"{name} = ({cols} == {first}).to(tl.float32)")
            last.append(f"store_state({at}, {name}, 0, v0, True, None, {rows}, None, B{V}, False, {rows})")
    lines = [
        f"v0 = (tl.program_id(0) - tl.cdiv({V}, B{V})) * B{V}",
        *start,
        *_walk_loop("transition", "dS", layout, None),
        *(f"    {line}" for line in [*emitter.lines, *_advance("transition", "dS", texts, layout)]),
        *last,
    ]
    return emitter, [lines[0], *(re.sub(rf"\b{V}\b", rows, line) for line in lines[1:])]


def _walk(
    kind: str, body: _Body, emitter: Emitter, results: dict[str, Value], transition: Sequence[str] = ()
) -> Kernel:
    """A walk; with lines of `transition`, programs past the panels of the state's columns run those."""
    layout, state = body.layout, HELD[kind]
    V = layout.cols
    reverse, flip = state == "dS", bool(emitter.flipped)
    body.tokens[:] = _do_last(body.tokens)
    _reads_in_memory(body, emitter)
    held = layout.places(flip)
    new = {x: _new_state(emitter, results[f"{'d_S' if reverse else 'S'}{x.suffix}"], x, layout, flip) for x in held}
    writes, after = [], []
    if "o" in results:
        writes.append("o")
        after.append(_store_tokens(emitter, "o", results["o"], ("C", V), body))
    decays = "A" in results
    ones, factors, stored = _decays(emitter, body, results) if decays else ([], [], [])
    after += factors
    at = "((b * (n_seg + 1) + seg + {}).to(tl.int64) * H + h) * " + _elements(layout.matrix)
    ends = kind in ("summarize", "collect")
    lines = [
        "begin(PDL)", f"v0 = tl.program_id(0) * B{V}", "seg = tl.program_id(2)", *_setup(body, []),
        "c0 = seg * per_seg", "c1 = tl.minimum(c0 + per_seg, n_chunks)",
    ]  # fmt: skip
    cuts = kind == "summarize" and not transition
    walk = [
        *_walk_start(kind, state, f"states + {at.format(int(reverse))}", held, layout),
        *ones,
        *(["cuts = 0"] if cuts else []),
        *_walk_loop(kind, state, layout, held, cuts),
    ]
    texts = {x: y.f32 for x, y in new.items()}
    walk += [f"    {x}" for x in (*emitter.lines, *after, *_advance(kind, state, texts, layout))]
    last = []
    if ends:
        last += [x.store(f"states + {at.format(int(not reverse))}", f"{state}{x.suffix}") for x in held]
    elif kind in ("output", "back"):
        last += ["if LEAVES:", "    if not PACKED:", f"        if seg == {'0' if reverse else 'n_seg - 1'}:"]
        last += [
            f"            {x.store(f'left + row * {_elements(layout.matrix)}', state + x.suffix)}" for x in held
        ]
    last += stored
    if cuts:
        last += ["if PACKED:", "    tl.store(cut + b * n_seg + seg, cuts, mask=(tl.program_id(0) == 0) & (h == 0))"]
    source = _walk_header(kind, body, writes, ["transition"] if transition else ["decay"] if decays else [], cuts)
    walk += last
    if transition:
        walk = [f"if tl.program_id(0) < tl.cdiv({V}, B{V}):", *(f"    {x}" for x in walk)]
        walk += ["else:", *(f"    {x}" for x in transition)]
    return _kernel(kind, source + _indent([*lines, *walk], 1), body, writes, emitter.contracted)


def _new_state(emitter: Emitter, x: Value, place: Place, layout: Layout, flip: bool) -> Value:
    x = emitter.full(x, place.sizes)
    for axis, size in enumerate(place.sizes):
        x = emitter.masked(x, axis) if size == layout.rows or size in emitter.contracted else x
    return turned(x) if flip else x


def _decays(emitter: Emitter, body: _Body, results: Mapping[str, Value]) -> tuple[list[str], list[str], list[str]]:
    """Lines before the loop, in it and after it that multiply a segment's decays up and store their logarithms, one a
    row of the matrix. A column of it decays as the state does."""
    layout = body.layout
    factors = layout.state[0]
    at = f"decay + ((b * n_seg + seg) * H + h) * {_elements(layout.matrix[:1] if layout.parts else (factors,))}"
    ones, inside, stored = [], [], []
    firsts = {f"__{part.name}": part.row for part in layout.parts}
    for place in layout.places():
        total, a = f"total{place.suffix}", results[f"A{place.suffix}"]
        if not place.of_columns:
            continue
        first = firsts.get(place.suffix)
        where = at if first is None else f"{at} + {first}"
        if len(place.sizes) == 2 or len(layout.state) == 1:
            _index(factors, body)
            ones.append(f"{total} = tl.full([B{factors}], 1.0, tl.float32)")
            factor = _per_row(emitter, a, layout)
            once = f"(at_{factors} < {factors})" + (" & (tl.program_id(0) == 0)" if factors != layout.cols else "")
            stored.append(f"tl.store({where} + at_{factors}, tl.log({total}), mask={once})")
        else:
            ones.append(f"{total} = 1.0")
            factor = a.f32 if not a.sizes else f"tl.max({_laid_out(emitter, a, place.sizes)}, axis=0)"
            stored.append(f"tl.store({where}, tl.log({total}), mask=tl.program_id(0) == 0)")
        inside.append(f"{total} = tl.where(length > 0, {total} * {factor}, {total})")
    return ones, inside, stored


def _walk_start(kind: str, state: str, entry: str, held: Sequence[Place], layout: Layout) -> list[str]:
    """The state that a walk begins with; `summarize` and `collect` leave it for the scan where nothing precedes it."""
    given = f"boundary + row * {_elements(layout.matrix)}"
    names = {x: f"{state}{x.suffix}" for x in held}
    if kind in ("summarize", "collect"):
        edge = [f"edge{x.suffix} = {x.zeros}" for x in held]
        edge += ["if BOUNDARY:", "    if not PACKED:"]
        edge += [f"        edge{x.suffix} = {x.load(given)}" for x in held]
        edge += [x.store(entry, f"edge{x.suffix}") for x in held]
        at_edge = f"if seg == {'n_seg - 1' if state == 'dS' else '0'}:"
        return [*(f"{name} = {x.zeros}" for x, name in names.items()), at_edge, *(f"    {line}" for line in edge)]
    return [
        "if ENTERS:", *(f"    {name} = {x.load(entry)}" for x, name in names.items()),
        "else:", *(f"    {name} = {x.zeros}" for x, name in names.items()),
        "    if BOUNDARY:", "        if not PACKED:",
        *(f"            {name} = {x.load(given)}" for x, name in names.items()),
    ]  # fmt: skip


def _walk_header(kind: str, body: _Body, writes: Sequence[str], carries: Sequence[str], cuts: bool) -> str:
    leaves = kind in ("output", "back")
    pointers = [f"{x}_ptr" for x in (*body.tokens, *body.kept, *body.params, *writes)]
    pointers += ["states", "boundary", *(["left"] if leaves else []), *(["chunk_states"] if kind in _KEEPS else [])]
    pointers += [*carries, *(["cut"] if cuts else []), *(["entering"] if body.entering else []), "table"]
    ends = kind in ("summarize", "collect")
    flags = ["BOUNDARY", *([] if ends else ["ENTERS"]), *(["LEAVES"] if leaves else [])]
    return _header(kind, pointers, ["T", "H", "n_seg", "n_chunks", "per_seg"], body, flags)


def _per_row(emitter: Emitter, a: Value, layout: Layout) -> str:
    """A as a vector over the state's rows, or over the numbers of a vector."""
    if not a.sizes:
        return a.f32
    if len(layout.state) == 1:
        return _laid_out(emitter, a, layout.state)
    if a.sizes == ("1", "1"):
        return f"tl.sum(tl.sum({a.f32}, axis=1), axis=0)"
    if a.sizes[1] == "1":
        return f"tl.sum({a.f32}, axis=1)"
    return f"col_of({_laid_out(emitter, a, (layout.rows, layout.cols))}, 0)"


def _walk_loop(
    kind: str, state: str, layout: Layout, held: Sequence[Place] | None, cuts: bool = False
) -> list[str]:  # fmt: skip
    """A document starts from zeros or what is given; with `held` None nothing passes through the start of one."""
    reverse = state == "dS"
    edge, elements = "last" if reverse else "first", _elements(layout.matrix)
    lines = [
        "for n in range(c0, c1):",
        f"    c = {'c1 - 1 - (n - c0)' if reverse else 'n'}",
        "    start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)",
    ]
    if held is None:
        return lines
    given = f"boundary + (doc * H + h).to(tl.int64) * {elements}"
    lines += ["    if PACKED:", f"        if {edge}:", *(f"            {state}{x.suffix} = {x.zeros}" for x in held)]
    lines += ["            if BOUNDARY:", *(f"                {state}{x.suffix} = {x.load(given)}" for x in held)]
    if cuts:
        lines.append("        cuts = cuts | first.to(tl.int32)")
    if kind in _KEEPS:
        at = f"chunk_states + (row * n_chunks + c) * {elements}"
        lines += [f"    {x.store(at, state + x.suffix)}" for x in held]
    return lines


def _advance(kind: str, state: str, new: Mapping[Place, str], layout: Layout) -> list[str]:
    """The state after a chunk. A slot without tokens leaves it as it is; nothing flows back past a document's start."""
    names = {x: f"{state}{x.suffix}" for x in new}
    lines = []
    if len(new) > 1:  # one may be made of another's old value
        lines = [f"new{x.suffix} = {text}" for x, text in new.items()]
        new = {x: f"new{x.suffix}" for x in new}
    lines += ["if PACKED:", *(f"    {names[x]} = tl.where(length > 0, {text}, {names[x]})" for x, text in new.items())]
    lines += ["else:", *(f"    {names[x]} = {text}" for x, text in new.items())]
    left = f"left + (doc * H + h).to(tl.int64) * {_elements(layout.matrix)}"
    if kind in ("output", "back"):
        lines += ["if PACKED:", "    if LEAVES:", f"        if {'last' if kind == 'output' else 'first'}:"]
        lines += [f"            {x.store(left, names[x])}" for x in new]
    if state == "dS":
        lines += ["if PACKED:", *(f"    {names[x]} = tl.where(first, 0.0, {names[x]})" for x in new)]
    return lines
