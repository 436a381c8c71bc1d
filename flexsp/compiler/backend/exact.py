"""Stage 5b: kernels that recompute segments token by token in float32, over the results of other kernels.

In bfloat16 a chunk's inverse is rounded, and so is what it multiplies. Where keys repeat and steps are near
reflections, all entries of an inverse are large and no error decays (docs/math.md, section 7, "Keys that are alike").
The kernel of inverses leaves the size of each, `choose` of `flexsp.kernels.delta.exact` says by it which segments are
done again, and programs of the kernels here return at once where theirs is not. The functions of a program are right
for chunks of any length, and so for those of one token, which have no inverse to round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from flexsp.compiler.backend.body import (
    Body,
    Kernel,
    Layout,
    do_last,
    elements,
    emitter_of,
    first_of,
    header,
    indent,
    kernel_of,
    laid_out,
    setup,
    store_of_chunk,
    store_tokens,
)  # fmt: skip
from flexsp.compiler.backend.emit import Emitter
from flexsp.compiler.backend.walks import (
    CHUNK_OF_TOKENS,
    HELD,
    make_transition,
    make_walk,
    new_state,
    renewed,
    token_at,
)  # fmt: skip
from flexsp.compiler.graphs.differentiate import Step, cut
from flexsp.compiler.graphs.values import Value, block
from flexsp.scan.transitions import KINDS

__all__ = ["EXACT", "exact_kernels"]

EXACT = "exact_"
"""The prefix of their names."""
_BLOCK = 8  # tokens between the states that a walk from the chunk's start reaches
_GROUP = 8  # chunks whose flags are read together


def exact_kernels(
    step: Step, layout: Layout, walks: Mapping[str, Sequence[str]], gradients: Sequence[str], transition: str
) -> dict[str, Kernel]:
    """The exact kernels: of `walks`, each with its outputs, and of the kernel that computes `gradients` of inputs."""
    found = {f"{EXACT}{kind}": _walk(step, layout, kind, outputs, transition) for kind, outputs in walks.items()}
    return found | {f"{EXACT}grads": _grads(step, layout, gradients)}


def _walk(step: Step, layout: Layout, kind: str, outputs: Sequence[str], transition: str) -> Kernel:
    body = Body(layout, panels=True, exact=True)
    emitter, found = emitter_of(*cut(step, outputs, join=True), body, {}, HELD[kind])
    results: dict[str, Value] = {}
    emitter.run(found, results.__setitem__, order=False)
    lines: list[str] = []
    if kind == "summarize" and transition == "dense":
        _, lines = make_transition(step, (), body, {})
    each, again = KINDS[transition].by_number, []
    if body.entering:  # from right to left, and what a token reads depends on the state
        forward = _Forward.of(step, body)
        again = [*forward.entering(body), *forward.walked("0", "exact_i"), *token_at("exact_i")]
    return make_walk(kind, body, emitter, results, lines, each=each, before=again)


@dataclass(frozen=True)
class _Forward:
    """Lines that move the state `S` over a token."""

    lines: list[str]
    contracted: set[str]

    @classmethod
    def of(cls, step: Step, body: Body) -> _Forward:
        places = body.layout.places()
        emitter, found = emitter_of(*cut(step, [f"S{x.suffix}" for x in places], join=True), body, {}, "S")
        results: dict[str, Value] = {}
        emitter.run(found, results.__setitem__, order=False)
        new = {x: new_state(emitter, results[f"S{x.suffix}"], x, body.layout, False).f32 for x in places}
        return cls([*emitter.lines, *renewed("S", new)], emitter.contracted)

    def entering(self, body: Body) -> list[str]:
        """The state that enters the chunk."""
        at = f"entering + (row * n_chunks + c) * {elements(body.layout.matrix)}"
        return [f"S{x.suffix} = {x.load(at)}" for x in body.layout.places()]

    def walked(self, first: str, end: str) -> list[str]:
        """From token `first` of the chunk to before `end`."""
        inside = [*token_at("exact_j"), *self.lines]
        return [f"for exact_j in range({first}, {end}):", *(f"    {x}" for x in inside)]


@dataclass
class _Sums:
    """Lines around those of a token: initial values and stores of gradients, for all columns and for some."""

    of_all: list[str] = field(default_factory=list)
    of_panel: list[str] = field(default_factory=list)
    panel_ends: list[str] = field(default_factory=list)
    all_end: list[str] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)


def _grads(step: Step, layout: Layout, gradients: Sequence[str]) -> Kernel:
    """Gradients of all inputs, of a chunk's tokens from the last to the first.

    A token's need the state before it, and the gradient of the state behind it. The latter is carried from token to
    token. The former is walked to from the state that enters the chunk: first to the beginning of each block of tokens,
    then from there. All of it for some columns of the state, whose gradients add up: rows of inputs without columns are
    in `scratch` meanwhile. Its size a program is that of EXACT_C rows of them in fp32.
    """
    body, sums, V = Body(layout, panels=True, exact=True), _Sums(), layout.cols
    places = layout.places()
    forward = _Forward.of(step, body)
    before = [f"d_S{x.suffix}" for x in places]
    emitter, outputs = emitter_of(*cut(step, [*gradients, *before]), body, {}, "dS")
    results: dict[str, Value] = {}

    def done(name: str, x: Value) -> None:
        if name in before:
            results[name] = x
        else:
            _store(emitter, body, sums, name, x)

    emitter.run(outputs, done)
    new = {x: new_state(emitter, results[f"d_S{x.suffix}"], x, layout, False).f32 for x in places}
    at = f"leaving + (row * n_chunks + c) * {elements(layout.matrix)}"
    token = [
        *(f"S{x.suffix} = exact_S{x.suffix}" for x in places), *forward.walked("exact_first", "exact_i"),
        *token_at("exact_i"), *emitter.lines, *renewed("dS", new),
    ]  # fmt: skip
    block_of_tokens = [
        f"exact_first = (exact_blocks - 1 - exact_block) * {_BLOCK}", *forward.entering(body),
        *forward.walked("0", "exact_first"), *(f"exact_S{x.suffix} = S{x.suffix}" for x in places),
        f"exact_behind = tl.minimum(exact_first + {_BLOCK}, exact_tokens)",
        "for exact_at in range(exact_first, exact_behind):",
        "    exact_i = exact_first + exact_behind - 1 - exact_at",
        *(f"    {x}" for x in token),
    ]  # fmt: skip
    panel = [
        *_indices(body), *sums.of_panel, *(f"dS{x.suffix} = {x.load(at)}" for x in places),
        "for exact_block in range(0, exact_blocks):", *(f"    {x}" for x in block_of_tokens),
        *sums.panel_ends, "tl.debug_barrier()  # rows in scratch are read before they are written over",
    ]  # fmt: skip
    chunk = [
        CHUNK_OF_TOKENS, f"exact_blocks = (exact_tokens + {_BLOCK - 1}) // {_BLOCK}", *sums.of_all,
        f"for v0 in range(0, {V}, B{V}):", *(f"    {x}" for x in panel), *sums.all_end,
    ]  # fmt: skip
    some = f"exact_group + tl.arange(0, {_GROUP})"
    flags = f"tl.load(exact + row * n_chunks + {some}, mask={some} < n_chunks, other=0)"
    body.tokens[:] = do_last(body.tokens)
    of_all = replace(body, indices=body.indices - {V})
    width = " + ".join(sums.rows) or "0"
    lines = [
        "begin(PDL)", *setup(of_all),
        "scratch += (row * tl.num_programs(0) + tl.program_id(0)) * EXACT_C * " + f"({width})",
        f"for exact_group in range(tl.program_id(0) * {_GROUP}, n_chunks, tl.num_programs(0) * {_GROUP}):",
        f"    exact_end = tl.where(tl.max({flags}, axis=0) != 0, exact_group + {_GROUP}, exact_group)",
        "    for c in range(exact_group, tl.minimum(exact_end, n_chunks)):",
        "        if tl.load(exact + row * n_chunks + c) != 0:", *(f"            {x}" for x in chunk),
    ]  # fmt: skip
    pointers = [f"{x}_ptr" for x in (*body.tokens, *body.params, *gradients)]
    pointers += ["exact", "scratch", "entering", "leaving", "table"]
    name = f"{EXACT}grads"
    source = header(name, pointers, ["T", "H", "n_chunks"], body, ["EXACT_C"]) + indent(lines, 1)
    return kernel_of(name, source, body, gradients, forward.contracted)


def _indices(body: Body) -> list[str]:
    """The part of the panel's columns."""
    V = body.layout.cols
    return [f"at_{V} = v0 + tl.arange(0, {block(V)})"] if V in body.indices else []


def _store(emitter: Emitter, body: Body, sums: _Sums, name: str, x: Value) -> None:
    """Stores the gradient of a token's row, or adds it to that of a parameter."""
    layout, source = body.layout, name.removeprefix("d_")
    if source in layout.params:
        _add(emitter, body, sums, name, x, layout.params[source])
        return
    sizes = layout.tokens[source]
    if layout.cols not in sizes:
        text, made = laid_out(emitter, x, sizes), f"{name}_row"
        offset = " + ".join(sums.rows) or "0"
        size = sizes[1] if len(sizes) == 2 else "1"
        index = f"tl.arange(0, {block(size)})[None, :]" if len(sizes) == 2 else "rows"
        place = f"scratch + EXACT_C * ({offset}) + exact_i * {size} + {index}"
        mask = f"{index} < {size}"
        emitter.lines += [
            f"{made} = {text}", f"if B{layout.cols} < {layout.cols}:", "    if v0 > 0:",
            f"        {made} += tl.load({place}, mask={mask}, other=0.0)",
            "        tl.debug_barrier()  # all threads that hold a number have read it before one writes over it",
            f"    tl.store({place}, {made}, mask={mask})",
        ]  # fmt: skip
        sums.rows.append(size)
        x = Value(made, sizes)
    emitter.lines.append(store_tokens(emitter, name, x, sizes, body))


def _add(emitter: Emitter, body: Body, sums: _Sums, name: str, x: Value, sizes: tuple[str, ...]) -> None:
    total = f"{name}_sum"
    shape = ", ".join(map(block, sizes))
    zeros = f"{total} = {f'tl.zeros([{shape}], tl.float32)' if sizes else 'tl.full((), 0.0, tl.float32)'}"
    emitter.lines.append(f"{total} += {laid_out(emitter, x, sizes)}")
    stored = store_of_chunk(emitter, f"{name}_ptr", Value(total, sizes), sizes, body)
    in_panel = any(first_of(size, body) != "0" for size in sizes)
    (sums.of_panel if in_panel else sums.of_all).append(zeros)
    (sums.panel_ends if in_panel else sums.all_end).append(stored)
