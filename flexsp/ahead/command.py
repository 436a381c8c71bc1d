"""`flexsp compile`: its steps, and what it prints."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from flexsp import devices
from flexsp.ahead.steps import Call, Step, of_folder, of_layer, of_variant, roles
from flexsp.comm.transport import PROCESS_GROUP
from flexsp.devices import Device
from flexsp.exceptions import NotAvailable, check_integer, fail
from flexsp.planner.setup import parse_tokens

__all__ = ["planned", "run"]


def run(args: argparse.Namespace) -> int:
    """Compile what the steps of the model launch, and print a table; 0 where all kernels are in the cache."""
    try:
        return _run(args)
    except NotAvailable as error:
        print(f"flexsp: {error}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace) -> int:
    _check(args)
    device = _device(args.gpu)
    if args.out:
        os.environ["TRITON_CACHE_DIR"] = str(Path(args.out).absolute())
    version = torch.version.cuda if args.cuda is None else args.cuda
    with mock.patch.object(torch.version, "cuda", version):
        return _compile(args, device)


def _compile(args: argparse.Namespace, device: Device) -> int:
    began = time.perf_counter()
    requests = planned(args, device, say=lambda text: print(text, flush=True))
    from flexsp.ahead.kernels import build_all, cores, table
    from flexsp.runtime.launch import newer_assembler
    from flexsp.runtime.triton_private import assembler_for, cache_folder, gpu_target

    if not requests:
        fail("the layers", "some whose kernels are flexsp's", "none: nothing is to be compiled")
    tool = (newer_assembler() if device.arch == 90 else None) or assembler_for(device.arch)
    target, jobs = gpu_target(device.arch), args.jobs or cores()
    seconds = time.perf_counter() - began
    print(f"planned for {device} in {seconds:.1f} s; ptxas {tool.version} ({tool.path})", flush=True)
    found = [*build_all(requests, target, jobs, args.check)]
    print("\n".join(table(found)))
    missing, known = [x for x in found if x.problem], sum(x.known for x in found)
    print(
        f"{len(found)} kernels in {cache_folder()}: {known} were there, {len(found) - known - len(missing)} compiled, "
        f"{len(missing)} missing; {time.perf_counter() - began:.1f} s"
    )
    return int(bool(missing))


def _check(args: argparse.Namespace) -> None:
    given = [bool(args.model), bool(args.layer), bool(args.variant)]
    if sum(given) != 1:
        fail("flexsp compile", "one of MODEL_FOLDER, --layer and --variant", f"{sum(given)} of them")
    for name in ("B", "ranks"):
        check_integer(f"--{name}", getattr(args, name), least=1)
    for n in args.packed:
        check_integer("--packed", n)
    if any(args.packed) and args.B != 1:
        fail("--B", "1 with --packed, since documents are packed in one sequence", args.B)
    if args.jobs is not None:
        check_integer("--jobs", args.jobs, least=1)
    if args.cuda is not None and not re.fullmatch(r"\d+\.\d+", args.cuda):
        fail("--cuda", "the CUDA release of torch where the kernels run, such as 12.8", repr(args.cuda))
    if importlib.util.find_spec("triton") is None:
        raise NotAvailable("flexsp compile needs Triton, of the release with which the kernels run: pip install triton")
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        fail("TRITON_INTERPRET", "a process without it, whose kernels can be compiled", 1)


def _device(name: str | None) -> Device:
    if name is not None:
        try:
            return devices.of_name(name)
        except ValueError as error:
            raise ValueError(f"--gpu: {error}") from None
    if not torch.cuda.is_available():
        fail("--gpu", "the GPU to compile for, such as h100 or sm_90, since none is here", None)
    return devices.of_device()


def planned(args: argparse.Namespace, device: Device, kind: str = "meta", say: Any = lambda text: None) -> list[Any]:
    """What the steps' launches would have compiled, as requests of `flexsp.runtime.launch`.

    Args:
        kind: of device, whose tensors stand in for those on the GPU.
        say: is told of each step.
    """
    steps = [*_steps(args)]
    calls = [(parse_tokens(text), n) for text in args.tokens for n in args.packed]
    transport = args.transport if args.schedule == "chain" else PROCESS_GROUP
    heap = None if args.heap is None else args.heap << 20
    from flexsp.ahead.stand_in import collected_on

    with collected_on(device, kind) as found:
        for sp in roles(args.ranks, transport, args.schedule, heap):
            for step in steps:
                for T, packed in calls:
                    before = len(found)
                    step.run(Call(args.B, T, getattr(torch, args.dtype), packed, sp))
                    at = f" in {packed} documents" if packed else ""
                    at += f", rank {sp.rank} of {args.ranks}" if args.ranks > 1 else ""
                    say(f"{step.name}, {args.B} x {T:,} tokens{at}: {len(found) - before} kernels more")
    return [*found.values()]


def _steps(args: argparse.Namespace) -> Iterator[Step]:
    if args.model:
        yield from of_folder(args.model)
    for name in args.layer:
        yield of_layer(name)
    if args.variant:
        yield of_variant(args)
