"""Stage 5d: the kernel of a program that decodes: some tokens, one after the other, with the state in registers.

The functions of a program are right for chunks of any length, and so for those of one token. Each block of the kernel
reads some columns of a sequence's state, moves them over the tokens, and writes them where they were: that is all
memory traffic but for the tokens themselves. Sums and products are in float32, whatever dtypes tokens and states have.
"""

from __future__ import annotations

from flexsp.compiler.backend.body import (
    Body,
    Kernel,
    Layout,
    elements,
    emitter_of,
    header,
    indent,
    kernel_of,
    setup,
    store_tokens,
)
from flexsp.compiler.backend.walks import new_state, renewed
from flexsp.compiler.graphs.differentiate import Step, cut
from flexsp.compiler.graphs.values import Value

__all__ = ["decode_kernel"]


def decode_kernel(step: Step, layout: Layout) -> Kernel:
    """The kernel "decode": outputs of T tokens from the states `entering`, and the states that they leave.

    Its arguments are tokens, parameters, "o", `entering` and `left`, which may be the same states, the tokens' strides,
    T and H. Unless ENTERS, zeros take the place of `entering`.

    Raises:
        NotEmittable: an operator that has no code.
    """
    places = layout.places()
    body = Body(layout, panels=True, exact=True)
    emitter, outputs = emitter_of(*cut(step, ["o", *(f"S{x.suffix}" for x in places)], join=True), body, {}, "S")
    results: dict[str, Value] = {}
    emitter.run(outputs, results.__setitem__, order=False)
    new = {x: new_state(emitter, results[f"S{x.suffix}"], x, layout, False).f32 for x in places}
    stored = store_tokens(emitter, "o", results["o"], ("C", layout.cols), body)
    token = ["start = first + n", "length = tl.minimum(T, 1)", *emitter.lines, stored, *renewed("S", new)]
    at = f" + row * {elements(layout.matrix)}"
    lines = [
        "begin(PDL)", f"v0 = tl.program_id(0) * B{layout.cols}", *setup(body),
        *(f"S{x.suffix} = {x.zeros}" for x in places),
        "if ENTERS:", *(f"    S{x.suffix} = {x.load('entering' + at)}" for x in places),
        "first = tl.full((), 0, tl.int64)  # offsets of rows have 64 bits",
        "for n in range(0, T):", *(f"    {x}" for x in token),
        "tl.debug_barrier()  # other threads may have yet to read what this one writes over",
        *(x.store("left" + at, f"S{x.suffix}") for x in places),
    ]  # fmt: skip
    pointers = [f"{x}_ptr" for x in (*body.tokens, *body.params, "o")] + ["entering", "left"]
    source = header("decode", pointers, ["T", "H"], body, ["ENTERS"]) + indent(lines, 1)
    return kernel_of("decode", source, body, ["o"], emitter.contracted)
