"""Stage 5b: the kernels around emitted code: the tile of each program, its loads, loops and stores.

`summarize`, `output`, `chunk_states`, `summarize_backward` and `output_backward` are walks (`walks`). The other kinds
are chunkwise, one chunk a program: `prepare0`, ..., `adjoint0`, ..., `grads` and `reduce_gate_grads` (`stages`).
Forward: prepare, summarize, (rank scan), output. Backward: summarize_backward, (rank scan), chunk_states,
output_backward, adjoint, grads, reduce_gate_grads.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
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
    kernel_of,
    laid_out,
    reads_in_memory,
    setup,
    store_kept,
    store_of_chunk,
    store_tokens,
)
from flexsp.compiler.backend.emit import Emitter
from flexsp.compiler.backend.pieces import NotInPieces
from flexsp.compiler.backend.walks import FLIPPED, HELD, WALKS, make_horizon, make_transition, make_walk
from flexsp.compiler.graphs.differentiate import Step, cut
from flexsp.compiler.graphs.values import NotEmittable, Value
from flexsp.scan.transitions import KINDS

__all__ = ["make_kernel"]


def make_kernel(
    step: Step, layout: Layout, kind: str, parts: Sequence[Sequence[str]], given: Sequence[str], transition: str,
    pieces: bool = False,
) -> Kernel:  # fmt: skip
    """One kernel that computes outputs of `step`, reading kept values `given`. Walks have one part.

    Where the `transition` is dense, `summarize` has programs that leave columns of A^T beside those that leave F. With
    `pieces`, chunkwise kernels take the state's columns in pieces.
    """
    chunkwise, dense = kind not in WALKS, transition == "dense"
    state = HELD.get(kind)
    body = Body(layout, panels=not chunkwise or len(layout.state) == 1, pieces=chunkwise and pieces)
    memory = {name: f"{name}_ptr + (row * n_chunks + c) * {elements(layout.kept[name].dims)}" for name in given}
    made = [emitter_of(*cut(step, outputs, given, join=not chunkwise), body, memory, state) for outputs in parts]
    if chunkwise:
        try:
            kernel = _chunkwise(kind, body, made)
        except NotInPieces as error:
            raise NotEmittable(
                f"kernel `{kind}` has to take {layout.cols} in pieces, and {error}; states of up to 128 x 256 or "
                f"256 x 128 are taken whole, so make {layout.rows} or {layout.cols} smaller"
            ) from None
        return replace(kernel, nodes=tuple(tuple(emitter.values) for emitter, _ in made))
    [(emitter, found)] = made
    results: dict[str, Value] = {}
    each = KINDS[transition].by_number
    horizon = None if dense or each or transition == "none" else make_horizon(kind, step, given, body, memory)
    if kind in FLIPPED and not dense and len(layout.state) == 2 and not layout.parts:
        emitter.flip("S")
    emitter.run(found, results.__setitem__, order=False)
    if kind != "summarize" or not dense:
        kernel = make_walk(kind, body, emitter, results, horizon=horizon, each=each)
        return replace(kernel, nodes=(tuple(emitter.values),))
    across, lines = make_transition(step, given, body, memory)
    kernel = make_walk(kind, body, emitter, results, lines)
    return replace(kernel, nodes=(tuple(emitter.values), tuple(across.values)))


def _chunkwise(kind: str, body: Body, parts: Sequence[tuple[Emitter, Mapping[str, Any]]]) -> Kernel:
    code: list[str] = []
    contracted: set[str] = set()
    writes = [name.removeprefix("keep_") for _, outputs in parts for name in outputs]
    for i, (emitter, outputs) in enumerate(parts):
        emitter.run(outputs, functools.partial(_store, emitter, body))
        reads_in_memory(body, emitter)
        contracted |= emitter.contracted
        if len(parts) > 1:
            code += [f"if part == {i}:", *(f"    {line}" for line in emitter.lines)]
        else:
            code += emitter.lines
    body.tokens[:] = do_last(body.tokens)
    pointers = [f"{x}_ptr" for x in (*body.tokens, *body.kept, *body.params, *writes)]
    pointers += [*([] if kind.startswith("prepare") else ["entering", "leaving"]), "table"]
    which = ["c = tl.program_id(0)"]
    if len(parts) > 1:  # parts of a chunk run side by side and share what they load through the cache
        which = [f"c = tl.program_id(0) // {len(parts)}", f"part = tl.program_id(0) % {len(parts)}"]
    which += [f"v0 = tl.program_id(2) * B{body.layout.cols}"] if body.panels else []
    lines = ["begin(PDL)", *which, *setup(body)]
    lines.append("start, length, doc, first, last = chunk_info(table, c, T, C, PACKED)")
    source = header(kind, pointers, ["T", "H", "n_chunks"], body, ["APART"]) + indent([*lines, *code], 1)
    return kernel_of(kind, source, body, writes, contracted, len(parts))


def _store(emitter: Emitter, body: Body, name: str, x: Value) -> None:
    layout = body.layout
    if name.startswith("keep_"):
        line = store_kept(emitter, layout.kept[name.removeprefix("keep_")], x, body)
    else:
        source = name.removeprefix("d_")
        if source in layout.tokens:
            line = store_tokens(emitter, name, x, layout.tokens[source], body)
        else:
            sizes = layout.params[source]
            x = Value(f"tl.where(length > 0, {laid_out(emitter, x, sizes)}, 0.0)", sizes)
            line = store_of_chunk(emitter, f"{name}_ptr", x, sizes, body)
    emitter.lines.append(line)
