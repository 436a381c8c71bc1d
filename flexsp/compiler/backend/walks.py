"""Stage 5b: walks, kernels that go over a segment's chunks with the state or its gradient in registers.

`summarize`, `output` and `chunk_states` go from left to right with the state, `summarize_backward` and
`output_backward` from right to left with its gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flexsp.compiler.backend.body import (
    Body,
    Kernel,
    Layout,
    do_last,
    elements,
    emitter_of,
    header,
    indent,
    index,
    kernel_of,
    laid_out,
    reads_in_memory,
    setup,
    store_tokens,
)  # fmt: skip
from flexsp.compiler.backend.emit import Emitter
from flexsp.compiler.backend.places import Place
from flexsp.compiler.frontend.trace import needed_by
from flexsp.compiler.graphs.differentiate import Step, cut
from flexsp.compiler.graphs.homogeneous import without
from flexsp.compiler.graphs.rewrite import dims
from flexsp.compiler.graphs.stages import for_users
from flexsp.compiler.graphs.values import NotEmittable, Value, block, inner, is_state

__all__ = [
    "CHUNK_OF_TOKENS", "FLIPPED", "HELD", "WALKS", "make_horizon", "make_transition", "make_walk", "new_state",
    "over_tokens", "renewed", "token_at",
]  # fmt: skip

# Walks that hold the state transposed, so that products read it from registers.
FLIPPED = ("output",)
HELD = {"summarize": "S", "output": "S", "chunk_states": "S", "summarize_backward": "dS", "output_backward": "dS"}
"""What each walk holds: the state or its gradient."""
WALKS = tuple(HELD)
_KEEPS = ("chunk_states", "output_backward")  # walks that store the state, or its gradient, of every chunk


def make_walk(
    kind: str, body: Body, emitter: Emitter, results: dict[str, Value], transition: Sequence[str] = (),
    horizon: Horizon | None = None, each: bool = False, before: Sequence[str] = (),
) -> Kernel:  # fmt: skip
    """A walk.

    Args:
        transition: lines that the programs after the panels of the state's columns run.
        each: whether every number of the state has a decay of its own.
        before: for an `exact` body, lines that compute what a token reads of the state.
    """
    layout, state = body.layout, HELD[kind]
    V = layout.cols
    reverse, flip = state == "dS", bool(emitter.flipped)
    body.tokens[:] = do_last(body.tokens)
    reads_in_memory(body, emitter)
    held = layout.places(flip)
    new = {x: new_state(emitter, results[f"{'d_S' if reverse else 'S'}{x.suffix}"], x, layout, flip) for x in held}
    writes, after = [], []
    if "o" in results:
        writes.append("o")
        after.append(store_tokens(emitter, "o", results["o"], ("C", V), body))
    decays = "A" in results or "shift" in results
    ones: list[str] = []
    factors: list[str] = []
    stored: list[str] = []
    if decays and horizon is None:
        ones, factors, stored = (_decays_of_each if each else _decays)(emitter, body, results)
    elif horizon is not None:
        ones, stored = horizon.lines, horizon.stored if decays else []
    after += factors
    at = "((b * (n_seg + 1) + seg + {}).to(tl.int64) * H + h) * " + elements(layout.matrix)
    ends = kind in ("summarize", "summarize_backward")
    lines = [
        "begin(PDL)", f"v0 = tl.program_id(0) * B{V}", "seg = tl.program_id(2)", *setup(body),
        "c0 = seg * per_seg", "c1 = tl.minimum(c0 + per_seg, n_chunks)",
    ]  # fmt: skip
    if body.exact:
        lines += ["if tl.load(exact + row * n_chunks + c0) == 0:", "    return"]
    if horizon is None:
        lines += ["n0, n1 = c0, c1"]
    cuts = kind == "summarize" and not transition
    walk = [
        *_walk_start(kind, state, f"states + {at.format(int(reverse))}", held, layout, "shift" in results),
        *ones,
        *(["cuts = 0"] if cuts and horizon is None else []),
        *_walk_loop(kind, state, layout, held, cuts and horizon is None, body.exact),
    ]
    texts = {x: y.f32 for x, y in new.items()}
    walk += _of_chunk(kind, state, [*before, *emitter.lines, *after], texts, body)
    last = []
    if ends:
        last += [x.store(f"states + {at.format(int(not reverse))}", f"{state}{x.suffix}") for x in held]
    elif kind in ("output", "output_backward"):
        last += ["if LEAVES:", "    if not PACKED:", f"        if seg == {'0' if reverse else 'n_seg - 1'}:"]
        last += [
            f"            {x.store(f'left + row * {elements(layout.matrix)}', state + x.suffix)}" for x in held
        ]
    last += stored
    if cuts:
        last += ["if PACKED:", "    tl.store(cut + b * n_seg + seg, cuts, mask=(tl.program_id(0) == 0) & (h == 0))"]
    source = _walk_header(kind, body, writes, ["transition"] if transition else ["decay"] if decays else [], cuts)
    walk += last
    if transition:
        walk = [f"if tl.program_id(0) < tl.cdiv({V}, B{V}):", *(f"    {x}" for x in walk)]
        walk += ["else:", *(f"    {x}" for x in transition)]
    name = f"exact_{kind}" if body.exact else kind
    return kernel_of(name, source + indent([*lines, *walk], 1), body, writes, emitter.contracted)


def new_state(emitter: Emitter, x: Value, place: Place, layout: Layout, flip: bool) -> Value:
    x = emitter.full(x, place.sizes)
    for axis, size in enumerate(place.sizes):
        x = emitter.masked(x, axis) if size == layout.rows or size in emitter.contracted else x
    return x.transposed() if flip else x


def _decays(emitter: Emitter, body: Body, results: Mapping[str, Value]) -> tuple[list[str], list[str], list[str]]:
    """Lines before the loop, in it and after it that multiply a segment's decays up and store their logarithms, one a
    row of the matrix. A column of it decays as the state does."""
    layout = body.layout
    factors = layout.state[0]
    at = f"decay + ((b * n_seg + seg) * H + h) * {layout.matrix[0] if layout.parts else factors}"
    ones, inside, stored = [], [], []
    firsts = {f"__{part.name}": part.first for part in layout.parts}
    for place in layout.places():
        total, a = f"total{place.suffix}", results[f"A{place.suffix}"]
        if place.sizes and not place.of_columns:
            continue
        first = firsts.get(place.suffix)
        where = at if first is None else f"{at} + {first.sum}"
        if len(place.sizes) == 2 or len(layout.state) == 1:
            index(factors, body)
            ones.append(f"{total} = tl.full([B{factors}], 1.0, tl.float32)")
            factor = _per_row(emitter, a, layout)
            once = f"(at_{factors} < {factors})" + (" & (tl.program_id(0) == 0)" if factors != layout.cols else "")
            stored.append(f"tl.store({where} + at_{factors}, tl.log({total}), mask={once})")
        else:
            ones.append(f"{total} = 1.0")
            one = f"tl.where(tl.arange(0, {block(layout.cols)}) == 0, {laid_out(emitter, a, place.sizes)}, 0.0)"
            factor = f"tl.sum({one}, axis=0)" if a.sizes else a.f32
            stored.append(f"tl.store({where}, tl.log({total}), mask=tl.program_id(0) == 0)")
        inside.append(f"{total} = tl.where(length > 0, {total} * {factor}, {total})")
    return ones, inside, stored


def _decays_of_each(
    emitter: Emitter, body: Body, results: Mapping[str, Value]
) -> tuple[list[str], list[str], list[str]]:  # fmt: skip
    """As `_decays`, with a tile of factors as large as that of the state, or of shifts; they are stored themselves."""
    layout = body.layout
    [place] = layout.places()
    at = f"decay + ((b * n_seg + seg) * H + h) * {elements(layout.matrix)}"
    name, unit, sign = ("shift", "0.0", "+") if "shift" in results else ("A", "1.0", "*")
    each = inner(laid_out(emitter, results[name], place.sizes))
    return (
        [f"total = tl.full([{place.shape}], {unit}, tl.float32)"],
        [f"total = tl.where(length > 0, total {sign} {each}, total)"],
        [place.store(at, "total")],
    )


def _per_row(emitter: Emitter, a: Value, layout: Layout) -> str:
    """A as a vector over the state's rows, or over the numbers of a vector."""
    if not a.sizes:
        return a.f32
    if len(layout.state) == 1:
        return laid_out(emitter, a, layout.state)
    if a.sizes == ("1", "1"):
        return f"tl.sum(tl.sum({a.f32}, axis=1), axis=0)"
    if a.sizes[1] == "1":
        return f"tl.sum({a.f32}, axis=1)"
    return f"col_of({laid_out(emitter, a, (layout.rows, layout.cols))}, 0)"


# Horizon --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Horizon:
    """Lines that find the first and the last chunk to walk and the decay of all chunks; lines that store the decay."""

    lines: list[str]
    stored: list[str]


def make_horizon(
    kind: str, step: Step, given: Sequence[str], body: Body, memory: Mapping[str, str]
) -> Horizon | None:  # fmt: skip
    """For walks that leave a segment's sum, which needs no chunk whose part decays to nothing (docs/math.md, 3, 17).

    None where the decay of a chunk is not a number or a row in memory: finding it out costs as much as the walk.
    """
    layout = body.layout
    if kind not in ("summarize", "summarize_backward") or layout.parts:
        return None
    graph, found = cut(step, ["A"], given, join=True)
    trial = Body(layout, body.panels)
    for of in (trial, body):
        emitter, _ = emitter_of(graph, found, of, memory, HELD[kind])
        results: dict[str, Value] = {}
        emitter.run(found, results.__setitem__, order=False)
        if of is trial:
            reads_in_memory(trial, emitter)
            whole = [x for x in trial.kept if x not in trial.by_row and layout.kept[x].dims[:1] == ("C",)]
            if trial.tokens or trial.entering or whole:
                return None
    rows, a, reverse = layout.state[0], results["A"], kind == "summarize_backward"
    index(rows, body)
    factor, every = _per_row(emitter, a, layout), bool(a.sizes)
    reads_in_memory(body, emitter)
    nothing = f"tl.where(at_{rows} < {rows}, 0.0, float('-inf'))" if every else "0.0"
    count = "tl.max(walked, axis=0)" if every else "walked"
    lines = [
        f"total = {nothing}", f"walked = {f'tl.zeros([B{rows}], tl.int32)' if every else '0'}", "cuts = 0",
        "for i in tl.range(0, c1 - c0, loop_unroll_factor=8):",
        f"    c = {'c0 + i' if reverse else 'c1 - 1 - i'}",
        "    start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)",
        "    walked = tl.where((total <= HORIZON) | (cuts > 0), walked, i + 1)",
        "    if PACKED:", f"        cuts = cuts | {'last' if reverse else 'first'}.to(tl.int32)",
        *(f"    {line}" for line in emitter.lines),
        f"    total += tl.where(length > 0, tl.log({factor}), 0.0)",
        *([f"n0, n1 = c0, c0 + {count}"] if reverse else [f"n0, n1 = c1 - {count}, c1"]),
    ]  # fmt: skip
    at = f"decay + ((b * n_seg + seg) * H + h) * {rows}"
    once = f"(at_{rows} < {rows})" + (" & (tl.program_id(0) == 0)" if rows != layout.cols else "")
    return Horizon(lines, [f"tl.store({at} + at_{rows}, total, mask={once})"])


def _walk_start(
    kind: str, state: str, entry: str, held: Sequence[Place], layout: Layout, maxima: bool = False
) -> list[str]:  # fmt: skip
    """The state that a walk begins with: 0 for sums over a segment, -inf for `maxima`. If nothing precedes the segment,
    `summarize` and `summarize_backward` store it for the scan."""
    given = f"boundary + row * {elements(layout.matrix)}"
    names = {x: f"{state}{x.suffix}" for x in held}
    if kind in ("summarize", "summarize_backward"):
        edge = [f"edge{x.suffix} = {x.zeros}" for x in held]
        edge += ["if BOUNDARY:", "    if not PACKED:"]
        edge += [f"        edge{x.suffix} = {x.load(given)}" for x in held]
        edge += [x.store(entry, f"edge{x.suffix}") for x in held]
        at_edge = f"if seg == {'n_seg - 1' if state == 'dS' else '0'}:"
        nothing = {x: f'tl.full([{x.shape}], float("-inf"), tl.float32)' if maxima else x.zeros for x in held}
        return [*(f"{name} = {nothing[x]}" for x, name in names.items()), at_edge, *(f"    {line}" for line in edge)]
    return [
        "if ENTERS:", *(f"    {name} = {x.load(entry)}" for x, name in names.items()),
        "else:", *(f"    {name} = {x.zeros}" for x, name in names.items()),
        "    if BOUNDARY:", "        if not PACKED:",
        *(f"            {name} = {x.load(given)}" for x, name in names.items()),
    ]  # fmt: skip


def _walk_header(kind: str, body: Body, writes: Sequence[str], carries: Sequence[str], cuts: bool) -> str:
    leaves = kind in ("output", "output_backward")
    pointers = [f"{x}_ptr" for x in (*body.tokens, *body.kept, *body.params, *writes)]
    pointers += [*(["exact"] if body.exact else []), "states", "boundary"]
    pointers += [*(["left"] if leaves else []), *(["chunk_states"] if kind in _KEEPS else [])]
    pointers += [*carries, *(["cut"] if cuts else []), *(["entering"] if body.entering else []), "table"]
    ends = kind in ("summarize", "summarize_backward")
    flags = ["BOUNDARY", *([] if ends else ["ENTERS"]), *(["LEAVES"] if leaves else [])]
    flags += ["EXACT_C"] if body.exact else []
    name = f"exact_{kind}" if body.exact else kind
    return header(name, pointers, ["T", "H", "n_seg", "n_chunks", "per_seg"], body, flags)


def _walk_loop(
    kind: str, state: str, layout: Layout, held: Sequence[Place] | None, cuts: bool = False, exact: bool = False
) -> list[str]:  # fmt: skip
    """The state at the start of a document: zeros or a given one. With `held` None nothing passes such a start."""
    reverse = state == "dS"
    edge, each = "last" if reverse else "first", elements(layout.matrix)
    lines = [
        "for n in range(n0, n1):",
        f"    c = {'n1 - 1 - (n - n0)' if reverse else 'n'}",
        f"    {CHUNK_OF_TOKENS if exact else 'start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)'}",
    ]
    if held is None:
        return lines
    given = f"boundary + (doc * H + h).to(tl.int64) * {each}"
    lines += ["    if PACKED:", f"        if {edge}:", *(f"            {state}{x.suffix} = {x.zeros}" for x in held)]
    lines += ["            if BOUNDARY:", *(f"                {state}{x.suffix} = {x.load(given)}" for x in held)]
    if cuts:
        lines.append("        cuts = cuts | first.to(tl.int32)")
    if kind in _KEEPS:
        at = f"chunk_states + (row * n_chunks + c) * {each}"
        lines += [f"    {x.store(at, state + x.suffix)}" for x in held]
    return lines


def _of_chunk(kind: str, state: str, lines: Sequence[str], new: Mapping[Place, str], body: Body) -> list[str]:
    """The inside of a walk's loop: `lines`, and the `new` state. Exact walks go over the chunk's tokens one by one."""
    if not body.exact:
        return [f"    {x}" for x in (*lines, *_advance(kind, state, new, body.layout))]
    inside = [*lines, *renewed(state, new)]
    ends = [f"    {x}" for x in _at_ends(kind, state, new, body.layout)]
    return [*(f"    {x}" for x in over_tokens(inside, state == "dS")), *ends]


def over_tokens(lines: Sequence[str], reverse: bool = False) -> list[str]:
    """A loop over the tokens of a chunk that `CHUNK_OF_TOKENS` described: each is a chunk of its own to `lines`."""
    return [
        "for exact_at in range(0, exact_tokens):",
        f"    exact_i = {'exact_tokens - 1 - exact_at' if reverse else 'exact_at'}",
        *(f"    {x}" for x in (*token_at("exact_i"), *lines)),
    ]


def token_at(i: str) -> list[str]:
    """Token i of the chunk as a chunk of its own."""
    return [f"start = exact_start + {i}", "length = tl.minimum(exact_tokens, 1)"]


CHUNK_OF_TOKENS = "exact_start, exact_tokens, doc, first, last = chunk_info(table, c, T, EXACT_C, PACKED)"


def renewed(state: str, new: Mapping[Place, str]) -> list[str]:
    """The state after a token."""
    if len(new) == 1:
        return [f"{state}{x.suffix} = {text}" for x, text in new.items()]
    made = [f"new{x.suffix} = {text}" for x, text in new.items()]  # one may be made of another's old value
    return [*made, *(f"{state}{x.suffix} = new{x.suffix}" for x in new)]


def _advance(kind: str, state: str, new: Mapping[Place, str], layout: Layout) -> list[str]:
    """The state after a chunk. An empty slot does not change it, and no gradient passes a document's start."""
    names = {x: f"{state}{x.suffix}" for x in new}
    lines = []
    if len(new) > 1:  # one may be made of another's old value
        lines = [f"new{x.suffix} = {text}" for x, text in new.items()]
        new = {x: f"new{x.suffix}" for x in new}
    lines += ["if PACKED:", *(f"    {names[x]} = tl.where(length > 0, {text}, {names[x]})" for x, text in new.items())]
    lines += ["else:", *(f"    {names[x]} = {text}" for x, text in new.items())]
    return [*lines, *_at_ends(kind, state, new, layout)]


def _at_ends(kind: str, state: str, held: Collection[Place], layout: Layout) -> list[str]:
    """Lines for the end of a document, or for its start in walks from right to left."""
    names = {x: f"{state}{x.suffix}" for x in held}
    lines = []
    left = f"left + (doc * H + h).to(tl.int64) * {elements(layout.matrix)}"
    if kind in ("output", "output_backward"):
        lines += ["if PACKED:", "    if LEAVES:", f"        if {'last' if kind == 'output' else 'first'}:"]
        lines += [f"            {x.store(left, names[x])}" for x in held]
    if state == "dS":
        lines += ["if PACKED:", *(f"    {names[x]} = tl.where(first, 0.0, {names[x]})" for x in held)]
    return lines


# Dense transitions over ranks -----------------------------------------------------------------------------------------


def make_transition(
    step: Step, given: Sequence[str], body: Body, memory: Mapping[str, str]
) -> tuple[Emitter, list[str]]:  # fmt: skip
    """Programs of `summarize` that take the unit matrix from right to left, for A^T (docs/math.md, section 8)."""
    layout = body.layout
    V, rows = layout.cols, str(layout.matrix[0])
    held = [x for x in layout.places() if x.of_columns or not x.sizes]
    emitter, new = _across(step, given, body, memory, held)
    start, last = _unit(layout, held, rows)
    return emitter, [
        f"v0 = (tl.program_id(0) - tl.cdiv({V}, B{V})) * B{V}",
        *start,
        *_walk_loop("transition", "dS", layout, None, exact=body.exact),
        *_of_chunk("transition", "dS", emitter.lines, new, body),
        *last,
    ]


def _across(
    step: Step, given: Sequence[str], body: Body, memory: Mapping[str, str], held: Sequence[Place]
) -> tuple[Emitter, dict[Place, str]]:  # fmt: skip
    """What carries the gradients of the parts `held` over a chunk, those of outputs and columns being zero.

    Their columns are those of the unit matrix, as many as the state has rows; nothing looks where they end. A number is
    held as its factor so far: it has one column of its own.
    """
    V = body.layout.cols
    graph, _ = cut(step, [f"d_S{x.suffix}" for x in held], given, join=True)
    for name in ("do", *(f"dS{x.suffix}" for x in body.layout.places() if x not in held)):
        without(graph, name)
    wide = [x.name for x in graph.nodes if x.op == "placeholder" and x.users and not is_state(x.name) and V in dims(x)]
    if wide:
        raise NotEmittable(
            f"the matrix of decay_mode depends on {for_users(step, wide)}, of a size along the state's columns {V}; "
            "kernels are made of matrices that are the same for all columns, so make it of keys, gates and parameters"
        )
    end: Any = next(node for node in graph.nodes if node.op == "output")
    named = {f"d_S{x.suffix}": node for x, node in zip(held, end.args[0], strict=True)}
    _refuse_mixed_numbers(named, held)
    emitter, found = emitter_of(graph, named, body, memory, "dS")
    results: dict[str, Value] = {}
    emitter.run(found, results.__setitem__, order=False)
    reads_in_memory(body, emitter)
    if V in emitter.contracted:
        sums = [x for x in graph.nodes if V not in dims(x) and any(V in dims(y) for y in x.all_input_nodes)]
        at = next((f", at {x.meta['line']}" for x in sums if x.meta.get("line")), "")
        raise NotEmittable(
            f"decay_mode sums over the state's columns {V}{at}; kernels are made of matrices that multiply each column "
            "alone, so take that sum out of what prev_s goes into"
        )
    new = {x: emitter.full(results[f"d_S{x.suffix}"], x.sizes) for x in held}
    return emitter, {x: (emitter.masked(y, 0) if len(x.sizes) == 2 else y).f32 for x, y in new.items()}


def _refuse_mixed_numbers(named: Mapping[str, Any], held: Sequence[Place]) -> None:
    """NotEmittable if a part that is a number depends on other parts of the state, or they on it."""
    numbers = {f"dS{x.suffix}" for x in held if not x.sizes}
    for name, node in named.items():
        read = {x.name for x in needed_by([node]) if x.op == "placeholder" and is_state(x.name)}
        own = name.removeprefix("d_").replace("S", "dS", 1)
        mixed = (read & numbers) - {own} or (own in numbers and read - {own})
        if mixed:
            number = min(numbers & {*mixed, own}).removeprefix("dS__")
            raise NotEmittable(
                f"{number}: beside a state that a matrix multiplies, kernels hold numbers that only a factor of their "
                'own multiplies; keep it as a row ("V",)'
            )


def _unit(layout: Layout, held: Sequence[Place], rows: str) -> tuple[list[str], list[str]]:
    """Lines that make columns of the unit matrix, for the rows of each part, and lines that store their results."""
    K, V = layout.rows, layout.cols
    cols = f"v0 + tl.arange(0, B{V})"
    firsts = ["0", *(part.first.sum for part in layout.parts if part.sizes != (K,))]
    start, last = [], []
    for place, first in zip(held, firsts, strict=True):
        at = f"transition + row * {rows} * {rows}" + ("" if first == "0" else f" + {first}")
        name, apart = f"dS{place.suffix}", f", False, {rows}" if layout.parts else ""
        if len(place.sizes) == 2:
            unit = f"tl.arange(0, B{K})[:, None]" + ("" if first == "0" else f" + {first}")
            unit = f"({unit} == {cols}[None, :]).to(tl.float32)"
            start.append(f"{name} = {f'keep_rows({unit}, {K})' if layout.parts else unit}")
            last.append(f"store_state({at}, tl.trans({name}), v0, 0, True, {rows}, {K}, B{V}, B{K}{apart})")
        elif not place.sizes:
            start.append(f"{name} = tl.full((), 1.0, tl.float32)")
            row = f"tl.where({cols} == {first}, {name}, 0.0)"
            last.append(f"store_state({at}, {row}, 0, v0, True, None, {rows}, None, B{V}, False, {rows})")
        else:
            start.append(f"{name} = ({cols} == {first}).to(tl.float32)")
            last.append(f"store_state({at}, {name}, 0, v0, True, None, {rows}, None, B{V}, False, {rows})")
    return start, last
