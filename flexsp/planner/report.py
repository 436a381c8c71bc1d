"""`flexsp plan`: its arguments, its tables and its JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from flexsp.exceptions import NotAvailable
from flexsp.planner.measured import MEMORY_GIB, SOURCES, TIMES, initialised_ratio
from flexsp.planner.memory import USABLE, available
from flexsp.planner.model_sizes import ModelSizes, read_model
from flexsp.planner.setup import Kind, Part, Setup, parse_tokens
from flexsp.planner.splits import Plan, advice, plan
from flexsp.planner.step_time import step_flops

__all__ = ["as_json", "report", "run"]

_GIB = 2**30
# Column of the table -> the parts that it adds up.
_MEMORY = {
    "states": ("parameters", "gradients", "optimizer states"),
    "gathered": ("gathered parameters",),
    "activations": ("hidden states", "a layer's activations", "its linear operators", "its softmax attention",
                    "kept activations", "kept by linear operators", "a layer's backward pass", "logits"),
}  # fmt: skip
_TIME = {
    "operators": ("linear operators",),
    "products": ("matrix products", "experts"),
    "softmax": ("softmax attention",),
    "other": ("elementwise and loss", "optimizer"),
    "ranks": ("states between ranks", "heads or keys between ranks"),
    "FSDP": ("FSDP, exposed",),
}


def not_modelled(model: ModelSizes, setup: Setup) -> list[str]:
    """What the numbers leave out, for this model and these GPUs."""
    lines = ["the host's time between launches, the data loader and checkpoints"]
    if setup.hosts > 1:
        lines.append("ranks on several hosts: never measured, and other traffic on their network")
    if setup.gpu != "h200":
        lines.append("linear operators on this GPU: times are an H200's, by memory bandwidth")
    if any(layer.experts for layer in model.layers):
        lines.append("the load of experts: every rank is taken to have the mean")
    cases = sorted({x.case for layer in model.layers for x in layer.linear})
    for case in cases:
        if (ratio := initialised_ratio(case)) is not None:
            lines.append(f"gates as layers begin, with which {case} took {ratio:.1f} times as long")
    if "mamba2" in cases:
        lines.append("memory of the Mamba-2 operator, not measured: simple GLA's, which its engine runs too, is taken")
    if any(layer.softmax for layer in model.layers):
        lines.append("packed documents, which make softmax attention cheaper")
    return lines


def sources(model: ModelSizes) -> list[str]:
    """Result files, with commits, of the measured numbers that a plan of this model starts from."""
    cases = {x.case for layer in model.layers for x in layer.linear}
    names = list(dict.fromkeys(row.source for row in TIMES if row.case in cases))
    names += ["horizon_op_h200_20261123.json"] if "mamba2" in cases else []
    names += ["scale_h200x2_20261126.json", "scale_h200x4_20261126.json"]
    return [f"{name} (commit {SOURCES[name]})" for name in names]


def _sum(parts: Sequence[Part], names: Sequence[str]) -> float:
    return sum(part.value for part in parts if part.name in names)


def _kind(parts: Sequence[Part], names: Sequence[str]) -> Kind:
    """The weakest of the parts that are there."""
    kinds = [part.kind for part in parts if part.name in names and part.value] or [
        part.kind for part in parts if part.name in names
    ]
    return next(kind for kind in (Kind.PREDICTED, Kind.SCALED, Kind.MEASURED, Kind.COUNTED) if kind in kinds)


def _grid(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    for row in (header, *rows):
        yield "  " + "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 or value == 0 else f"{value:.2g}"


def _row(found: Plan) -> list[str]:
    cells = [str(found.split.dp), str(found.split.sp), f"{found.shard:,}"]
    cells += [f"{_sum(found.memory, names) / _GIB:.1f}" for names in _MEMORY.values()]
    cells.append(f"{found.bytes / _GIB:.1f}")
    cells += [_number(_sum(found.time, names)) for names in _TIME.values()]
    return [*cells, _number(found.step_ms), _number(found.tokens_per_s)]


def _split_table(plans: Sequence[Plan]) -> Iterator[str]:
    header = ["dp", "sp", "tokens a GPU", *(f"{name} GiB" for name in _MEMORY), "all GiB"]
    yield from _grid([*header, *(f"{name} ms" for name in _TIME), "step ms", "tokens/s"], [_row(x) for x in plans])
    kinds: dict[Kind, list[str]] = {}
    for columns, field in ((_MEMORY, "memory"), (_TIME, "time")):
        for name, names in columns.items():
            for kind in sorted({_kind(getattr(x, field), names) for x in plans}):
                kinds.setdefault(kind, []).append(name)
    text = "; ".join(f"{kind.value}: {', '.join(kinds[kind])}" for kind in Kind if kind in kinds)
    yield f"  {text}, and all sums"
    yield "  A prediction cannot tell rates apart that differ by less than a tenth."


def _part_table(parts: Sequence[Part], unit: float) -> Iterator[str]:
    width, kinds = max(len(x.name) for x in parts), max(len(x.kind.value) for x in parts)
    for x in parts:
        if x.value:
            yield f"  {x.name:<{width}}  {_number(x.value / unit):>9}  {x.kind.value:<{kinds}}  {x.how}"


def _head(model: ModelSizes, setup: Setup) -> Iterator[str]:
    yield (
        f"{model.class_name} ({model.model_type}): {model.parameters:,} parameters, {model.active:,} of which a token "
        "meets (counted)"
    )
    given = "given" if setup.memory_gib is not None else f"measured: {MEMORY_GIB[setup.gpu][1]}"
    yield (
        f"{setup.gpus} {setup.gpu.upper()} of {setup.memory / _GIB:.1f} GiB ({given}), {setup.host} a host; "
        f"{available(setup) / _GIB:.1f} GiB can be filled ({USABLE:.0%}, assumed)"
    )
    yield (
        f"sequences of {setup.tokens:,} tokens; bfloat16, {setup.parameters} parameters and {setup.optimizer} AdamW "
        f"states under FSDP2, {'with' if setup.checkpointing else 'without'} activation checkpointing"
    )


def _details(model: ModelSizes, setup: Setup, best: Plan) -> Iterator[str]:
    split = best.split
    yield f"Best: dp={split.dp}, sp={split.sp}; a step has {best.sequences} sequence{'s' * (best.sequences != 1)}"
    yield "memory of a GPU, GiB"
    yield from _part_table(best.memory, _GIB)
    yield f"time of a step, ms: {_number(best.step_ms)}"
    yield from _part_table(best.time, 1.0)
    flops = step_flops(model, setup.tokens, setup.checkpointing) * best.sequences
    rate = flops / setup.gpus / best.step_ms * 1e-9
    yield f"a step computes {flops:.3g} FLOP (counted, without linear operators), {rate:.0f} TFLOP/s a GPU (predicted)"


def report(model: ModelSizes, setup: Setup, plans: Sequence[Plan]) -> str:
    """The whole report as text."""
    fitting = [x for x in plans if x.fits]
    lines = [*_head(model, setup), ""]
    if fitting:
        lines += ["Splits that fit, the best first", *_split_table(fitting), ""]
        lines += [*_details(model, setup, fitting[0]), ""]
    else:
        lines += ["No split fits; the least memory first", *_split_table(plans), "", "What would fit:"]
        lines += [*(f"  {text}" for text in advice(model, setup)), ""]
    lines += ["Measured numbers are of", *(f"  {name}" for name in sources(model))]
    lines += ["Not modelled", *(f"  {text}" for text in not_modelled(model, setup))]
    return "\n".join(lines)


def as_json(model: ModelSizes, setup: Setup, plans: Sequence[Plan]) -> dict[str, Any]:
    """The same numbers: bytes, milliseconds, tokens a second."""
    found: dict[str, Any] = {
        "model": {"model_type": model.model_type, "class": model.class_name, "parameters": model.parameters,
                  "active_parameters": model.active},
        "setup": asdict(setup), "available_bytes": available(setup),
        "plans": [_plan_json(model, setup, x) for x in plans],
        "sources": sources(model), "not_modelled": not_modelled(model, setup),
    }  # fmt: skip
    if not any(x.fits for x in plans):
        found["advice"] = advice(model, setup)
    return found


def _plan_json(model: ModelSizes, setup: Setup, found: Plan) -> dict[str, Any]:
    def parts(values: Sequence[Part]) -> list[dict[str, Any]]:
        return [{"name": x.name, "value": x.value, "kind": x.kind.value, "how": x.how} for x in values]

    return {
        "dp": found.split.dp, "sp": found.split.sp, "fits": found.fits, "sequences": found.sequences,
        "tokens_per_gpu": found.shard, "memory_bytes": found.bytes, "memory": parts(found.memory),
        "step_ms": found.step_ms, "time": parts(found.time), "tokens_per_s": found.tokens_per_s,
        "flop": step_flops(model, setup.tokens, setup.checkpointing) * found.sequences,
    }  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Print the plan; 0 where a split fits."""
    setup = Setup(
        parse_tokens(args.tokens), args.gpus, args.gpus_per_host, args.gpu, args.gpu_memory, args.sequences,
        args.parameters, args.optimizer, not args.no_checkpointing, args.network,
    )  # fmt: skip
    try:
        model = read_model(args.model)
    except NotAvailable as error:
        print(f"flexsp: {error}", file=sys.stderr)
        return 1
    plans = plan(model, setup)
    print(json.dumps(as_json(model, setup, plans), indent=1) if args.json else report(model, setup, plans))
    return int(not any(x.fits for x in plans))
