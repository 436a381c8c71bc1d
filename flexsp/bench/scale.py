"""`flexsp bench scale`: weak scaling of an operator over ranks, and the states' travel alone.

Run by every rank under torchrun; `--ranks N,N` starts torchrun itself, once a world size. T1 is the same operator with
sp=False, on every rank at once, interleaved with the sequence-parallel runs; T_R - T1 is then what communication and
waiting add.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from flexsp.bench.beside import agreement_limit, relative
from flexsp.bench.cases import CASES, Case, Op, Shape, forward_backward, make_inputs
from flexsp.bench.gates import at_least_bound
from flexsp.bench.peers import peer_over_ranks
from flexsp.bench.ranks import Aligned, open_schedules, split_schedule
from flexsp.bench.record import environment, file_stem, save
from flexsp.bench.sizes import choose
from flexsp.bench.timing import synchronize
from flexsp.bench.variant import variant_case

if TYPE_CHECKING:
    from flexsp.comm.group import SequenceParallel

__all__ = ["run", "under_torchrun"]

_RANKS_A_CORE = 4  # processes that one core can still run in turn

Row = dict[str, Any]
TARGETS_US = {4: {"fwd": 25.0, "fwd_bwd": 50.0}, 8: {"fwd": 45.0, "fwd_bwd": 90.0}}


def _operator(
    case: Case, sp: SequenceParallel | bool, mode: str, inputs: dict[str, torch.Tensor]
) -> Callable[[], object]:
    return _call(partial(case.ours, sp=sp), mode, inputs)


def _call(op: Op, mode: str, inputs: dict[str, torch.Tensor]) -> Callable[[], object]:
    within = getattr(op, "within", nullcontext)  # for both passes

    def call() -> object:
        with within():
            if mode == "fwd_bwd":
                return forward_backward(op, inputs)
            with torch.no_grad():
                return op(inputs)

    return call


def _others(args: argparse.Namespace, case: Case, T: int, world: int) -> dict[str, tuple[Op, ...]]:
    """Other libraries' ops on one rank and over ranks, of those that have this one."""
    if args.variant is not None:
        return {}
    promised = case.promised if at_least_bound(args.gates) else {}
    found = {peer: peer_over_ranks(peer, case.name, T, world, args.H, promised) for peer in args.peers}
    return {peer: ops for peer, ops in found.items() if ops is not None}


def _disagreement(
    aligned: Aligned, case: Case, sps: dict[str, SequenceParallel], inputs: dict[str, torch.Tensor]
) -> dict[str, float]:
    """Largest relative difference over ranks between each schedule's output and the last schedule's."""
    if not sps:
        return {}
    outputs = {name: _operator(case, sp, "fwd", inputs)() for name, sp in sps.items()}
    reference = list(outputs.values())[-1]
    return {name: max(aligned.gather(relative(out, reference))) for name, out in outputs.items()}  # type: ignore[arg-type]


def _scale_rows(
    aligned: Aligned, sps: dict[str, SequenceParallel], args: argparse.Namespace, case: Case, T: int
) -> list[Row]:
    world, device = aligned.sp.world_size, aligned.sp.device
    inputs = make_inputs(
        case,
        Shape(args.B, T, args.H, args.K, args.V),
        getattr(torch, args.dtype),
        device,
        seed=aligned.sp.rank,
        gates=args.gates if args.variant is None else "mild",
    )
    for sp in sps.values():
        sp.set_lengths([T] * world)
    apart = _disagreement(aligned, case, sps, inputs)
    others = _others(args, case, T, world)
    for name, (*_, alike) in others.items():
        mine = _operator(case, next(iter(sps.values())), "fwd", inputs)()
        theirs = _call(alike, "fwd", inputs)()
        apart[name] = max(aligned.gather(relative(theirs, mine)))  # type: ignore[arg-type]
    rows = []
    for mode in ("fwd", "fwd_bwd"):
        functions = {"local": _operator(case, False, mode, inputs)}
        functions.update({name: _operator(case, sp, mode, inputs) for name, sp in sps.items()})
        in_torch = {name: peer.op for name, peer in case.others.items() if peer.module == "torch"}
        functions |= {f"{name} local": _call(op, mode, inputs) for name, op in in_torch.items()}
        for name, (one_rank, over_ranks, *_) in others.items():
            functions |= {f"{name} local": _call(one_rank, mode, inputs), name: _call(over_ranks, mode, inputs)}
        timed = aligned.measure(functions, warmup=args.warmup, iterations=args.iterations)
        throughput = {name: aligned.back_to_back(call, args.iterations) for name, call in functions.items()}
        for name, timing in timed.items():
            slowest, local = timing["ms"]["median"], f"{name} local" if name in others else "local"
            alone, itself = timed[local]["slowest_rank_ms"], name.endswith("local")
            rows.append(
                {
                    "case": case.name,
                    "T_local": T,
                    "mode": mode,
                    "schedule": name,
                    "world_size": world,
                    **timing,
                    "added_us": None if itself else (slowest - alone) * 1e3,
                    "efficiency": None if itself else alone / slowest,
                    "back_to_back_ms": throughput[name],
                    "back_to_back_efficiency": None if itself else throughput[local] / throughput[name],
                    "tokens_per_s": args.B * T * world / throughput[name] * 1e3,
                    "disagreement": apart.get(name),
                }
            )
    return rows


def _state_rows(aligned: Aligned, sps: dict[str, SequenceParallel], args: argparse.Namespace) -> list[Row]:
    """Time of `propagate` alone: B states [H, K, V] in fp32 a rank through the whole group, segments 1 and 8."""
    from flexsp.scan.propagate import propagate
    from flexsp.scan.transitions import Transition

    first = aligned.sp
    rows = []
    for batch in args.state_batches:
        for segments in args.state_segments:
            generator = torch.Generator(device=first.device).manual_seed(first.rank)
            master = torch.randn(batch, segments + 1, args.H, args.K, args.V, device=first.device, generator=generator)
            master[:, 0] = 0
            states = torch.empty_like(master)
            log_a = torch.full((batch, segments, args.H), -0.1, device=first.device)

            def call(sp: SequenceParallel, states: torch.Tensor = states, log_a: torch.Tensor = log_a) -> torch.Tensor:
                propagate(states, Transition("scalar", log_a), sp)
                return states

            def refill(states: torch.Tensor = states, master: torch.Tensor = master) -> None:
                states.copy_(master)

            outputs = {}
            for name, sp in sps.items():
                refill()
                outputs[name] = call(sp).clone()
            reference = list(outputs.values())[-1]
            functions: dict[str, Callable[[], object]] = {name: partial(call, sp) for name, sp in sps.items()}
            timed = aligned.measure(functions, warmup=args.warmup, iterations=args.iterations, before=refill)
            size = batch * args.H * args.K * args.V * 4
            for name, timing in timed.items():
                rows.append(
                    {
                        "batch": batch,
                        "segments": segments,
                        "schedule": name,
                        "world_size": first.world_size,
                        "bytes_per_rank": size,
                        "bytes_total": size * first.world_size,
                        **timing,
                        "disagreement": max(aligned.gather(relative(outputs[name], reference))),
                    }
                )
    return rows


def _judge(rows: list[Row], device: torch.device) -> list[Row]:
    """T_R - T1 of the chain against the aims, which are for 4 and 8 GPUs."""
    verdicts: list[Row] = []
    if device.type != "cuda":
        return verdicts
    for row in rows:
        R = row["world_size"]
        if R in TARGETS_US and row["schedule"] == "chain" and row.get("case") == "simple_gla":
            limit, value = TARGETS_US[R][row["mode"]], row["added_us"]
            verdicts.append(
                {
                    "target": f"chain, {R} GPUs, T_local={row['T_local']}, {row['mode']}: T{R} - T1 in us",
                    "limit": limit,
                    "value": value,
                    "verdict": "pass" if value <= limit else "MISS",
                }
            )
    return verdicts


def _print_scale(rows: list[Row]) -> None:
    for row in rows:
        ms = row["ms"]
        text = (
            f"  {row['case']} T_local {row['T_local']:6d} {row['mode']:8s}{row['schedule']:14s}{ms['median']:9.3f} ms "
            f"[{ms['p20']:.3f}, {ms['p80']:.3f}]  back to back {row['back_to_back_ms']:.3f}"
        )
        if row["added_us"] is not None:
            text += f"  {row['added_us']:+.1f} us  efficiency {row['efficiency']:.3f}"
        print(text, flush=True)


def _print_states(rows: list[Row]) -> None:
    for row in rows:
        print(
            f"  states {row['bytes_total'] / 1e6:7.2f} MB over {row['world_size']} ranks, {row['segments']} segments "
            f"{row['schedule']:14s}{row['ms']['median'] * 1e3:9.1f} us",
            flush=True,
        )


def _check_agreement(rows: list[Row], dtype: torch.dtype) -> list[str]:
    limit = agreement_limit(dtype)
    return [
        " ".join(filter(None, (row.get("case"), row["schedule"])))
        + f": output differs by {row['disagreement']:.1e} (allowed {limit:.1e})"
        for row in rows
        if row.get("disagreement") is not None and not row["disagreement"] <= limit
    ]


def run(args: argparse.Namespace) -> int:
    """All operators, lengths and schedules on this job's ranks; rank 0 prints and writes. One rank alone gives T1 only.

    Non-zero where schedules disagree. Outside torchrun, --ranks starts as many, one world size after another.
    """
    for name in args.schedules:
        split_schedule(name, args.transport)
    if args.ranks and "WORLD_SIZE" not in os.environ:
        return under_torchrun(args.ranks, args.argv)
    opened = open_schedules(args.schedules, args.transport, args.timeout)
    aligned = Aligned(next(iter(opened.values())))
    choose(args, aligned.sp.device.type)
    if args.peers and aligned.sp.device.type != "cuda":
        raise ValueError(f"--peers: expected GPUs, got ranks on {aligned.sp.device}")
    if args.peers and aligned.sp.world_size == 1:
        raise ValueError("--peers: expected several ranks, got one")
    sps = opened if aligned.sp.world_size > 1 else {}
    cases = [CASES[name] for name in args.case] if args.variant is None else [variant_case(args, aligned.sp.device)]
    result = _empty_result(args, aligned.sp, sps)
    kind = _kind(args.case) if args.variant is None else f"scale_{cases[0].name}"
    out = Path(args.out) / f"{file_stem(kind, result['environment'])}.json"
    chief, device = aligned.sp.rank == 0, aligned.sp.device
    if chief:
        print(_title(result), flush=True)
    if sps and not args.no_states and (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"):
        result["states"] = _state_rows(aligned, sps, args)
        if chief:
            _print_states(result["states"])
            save(out, result)
    for case in cases:
        for T in args.T_local:
            rows = _scale_rows(aligned, sps, args, case, T)
            result["rows"] += rows
            if chief:
                _print_scale(rows)
                save(out, result)
    result["targets"] = _judge(result["rows"], device)
    problems = _check_agreement(result["rows"], getattr(torch, args.dtype))
    problems += _check_agreement(result["states"], torch.float32)
    missed = any(verdict["verdict"] == "MISS" for verdict in result["targets"])
    if chief:
        save(out, result)
        for verdict in result["targets"]:
            print(f"  {verdict['verdict']:5s}{verdict['value']:7.1f} <= {verdict['limit']:<5g} {verdict['target']}")
        print("\n".join(problems + [f"wrote {out}"]), flush=True)
    synchronize(device)
    for sp in opened.values():
        sp.check()
    _close(opened)
    return int(bool(problems) or (args.strict and missed))


def _kind(cases: list[str]) -> str:
    """First part of the file's name, with up to three operators; that of a run with simple_gla has none in it."""
    more = [f"and_{len(cases) - 3}_more"] if len(cases) > 3 else []
    return "scale" if "simple_gla" in cases else "_".join(["scale", *cases[:3], *more])


def _empty_result(args: argparse.Namespace, first: SequenceParallel, sps: dict[str, SequenceParallel]) -> Row:
    return {
        "kind": "scale",
        "environment": {**environment(first.device, args.argv), "world_size": first.world_size},
        "shape": {"B": args.B, "H": args.H, "K": args.K, "V": args.V, "dtype": args.dtype},
        "gates": args.gates,
        "method": "every run starts after an all-reduce of one number on the stream, host running ahead; ms is the "
        "slowest rank's of each run; T1 is the slowest rank's median with sp=False in the same loop",
        "transports": {name: sp.transport for name, sp in sps.items()},
        "hosts": first.hosts,
        "rows": [],
        "states": [],
    }


def _title(result: Row) -> str:
    env, transports = result["environment"], result["transports"]
    over = ", ".join(f"{name} over {transport}" for name, transport in transports.items())
    return f"flexsp bench scale: {env['world_size']} x {env['device']}, {over or 'T1 only: one rank has no neighbour'}"


def _close(sps: dict[str, SequenceParallel]) -> None:
    for sp in sps.values():
        sp.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def under_torchrun(world_sizes: list[int], argv: list[str]) -> int:
    """The same command on each number of local ranks, one after another; the first status that is not zero."""
    gpus, cores = torch.cuda.device_count(), len(os.sched_getaffinity(0))
    most = gpus or _RANKS_A_CORE * cores
    wrong = [ranks for ranks in world_sizes if not 1 <= ranks <= most]
    if wrong:
        of = "the GPUs here" if gpus else f"{_RANKS_A_CORE} for each of {cores} CPU cores (torchrun starts any number)"
        raise ValueError(f"--ranks: expected 1 to {most}, {of}, got {wrong[0]}")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    statuses = []
    for ranks in world_sizes:
        command = [*launcher, f"--nproc-per-node={ranks}", "-m", "flexsp", *argv]
        statuses.append(subprocess.run(command, check=False).returncode)
    return next(filter(None, statuses), 0)
