"""Runs compute-sanitizer over one small call of every distinct kernel configuration (`make sanitize`).

    python tests/gpu/sanitize.py [--tools memcheck racecheck synccheck] [--jobs 8] [--out FILE] [--only REGEX]

The configurations are compiled first, side by side and without a sanitizer. Then each tool runs over all of them, in
several processes. The summary says for each tool how many calls and distinct kernels ran and what was found, and of
which kernels machine code was turned down for the tools' sake (see `registers_left`); with `--out` it is written as
JSON, beside what the file has of other tools if it is of the same commit and machine. Exit code 1 where a tool reports
an error, a call fails or a process crashes.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TOOLS = ("memcheck", "racecheck", "synccheck")
DOCUMENTS = (33, 0, 64, 1, 70)
HEADS = 2
OWN_REGISTERS = 24  # R0 to R23 are used by code that a tool puts in
_PRODUCT = re.compile(r"\b\w+GMMA\S*\s+R(\d+)\b")
_REPORT = re.compile(r"^========= (?!COMPUTE|ERROR SUMMARY|RACECHECK SUMMARY)(\S.*)")
_SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) error)")


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    """Name and call of every configuration: forward and backward, whole and packed."""
    import torch

    from flexsp.testing.problems import draw, solve
    from tests import variants

    dtypes = (torch.bfloat16, torch.float32)  # float16 runs float32's kernels

    def of_engine(op: str, dtype: torch.dtype, K: int, V: int, packed: bool) -> None:
        solve(draw(op, T=sum(DOCUMENTS), H=HEADS, K=K, V=V, documents=DOCUMENTS if packed else None), dtype, "cuda")

    def of_variant(name: str, dtype: torch.dtype, K: int, V: int, packed: bool) -> None:
        variants.H, variants.K, variants.V = HEADS, K, V
        tokens, params = variants.draw(name, 1, sum(DOCUMENTS), 0)
        given = {
            key: x.to("cuda", torch.float32 if key in variants.WIDE else dtype) for key, x in (tokens | params).items()
        }
        bounds, n = None, 1
        if packed:
            bounds, n = torch.tensor([0, *itertools.accumulate(DOCUMENTS)], device="cuda"), len(DOCUMENTS)
        given["prev_s"] = torch.zeros(n, HEADS, *variants.state_sizes(name), device="cuda")
        for x in given.values():
            x.requires_grad_()
        o, final = variants.load(name).make(HEADS, K, V, dtype)(**given, cu_seqlens=bounds)
        torch.autograd.backward([o, final], [torch.ones_like(o), torch.ones_like(final)])

    def of_segments(*how: Any) -> None:
        from flexsp.kernels.delta import tiling

        whole = tiling.LONG, tiling._LEAST, tiling._cut
        tiling.LONG, tiling._LEAST = 1, 1
        tiling._cut = lambda gates, ranks, copies: gates < 2 or copies  # without decay too, as over ranks
        tiling.tiling_of.cache_clear()
        try:
            of_variant(*how)
        finally:
            tiling.LONG, tiling._LEAST, tiling._cut = whole
            tiling.tiling_of.cache_clear()

    def of_keys(dtype: torch.dtype, K: int, norm: bool) -> None:
        from flexsp.kernels.keys import unit_keys

        x = [torch.randn(2, T, 3, K, dtype=dtype, device="cuda", requires_grad=True) for T in (77, 154)]
        sum(y.sum() for y in unit_keys(x, 2, norm)).backward()  # type: ignore[union-attr]

    def of_raw_gates(dtype: torch.dtype, K: int, factor: float | None) -> None:
        from flexsp.kernels.raw_gates import activated

        heads = (3, K) if K > 1 else (3,)
        sizes = (2, 300, *heads), (3,), heads
        x = [torch.randn(size, dtype=dtype, device="cuda", requires_grad=True) for size in sizes]
        activated(x[0], x[1], x[2], factor).sum().backward()

    for packed, dtype in itertools.product((False, True), dtypes):
        how = f"{str(dtype)[6:]} {'packed' if packed else 'whole'}"
        for op in ("linear_attn", "simple_gla"):
            for K, V in itertools.product((64, 128, 256), (16, 64, 128, 256)):
                yield f"{op} {K}x{V} {how}", lambda a=(op, dtype, K, V, packed): of_engine(*a)  # type: ignore[misc]
        for size, name in itertools.product((16, 64, 128, 256), ("deltanet", "gated_deltanet", "vector_gated_delta")):
            of = f"{name} of segments {size} {how}"
            yield of, lambda a=(name, dtype, size, size, packed): of_segments(*a)  # type: ignore[misc]
        for name in variants.VARIANTS:
            large = (256,) if variants.VARIANTS[name].transition == "dense" else ()  # an engine runs these
            for size in (16, 64, 128, *large):
                yield f"{name} {size} {how}", lambda a=(name, dtype, size, size, packed): of_variant(*a)  # type: ignore[misc]
    for dtype, K, norm in itertools.product(dtypes, (20, 128, 256), (True, False)):
        yield f"unit keys {K} {norm} {str(dtype)[6:]}", lambda a=(dtype, K, norm): of_keys(*a)  # type: ignore[misc]
    for dtype, K, factor in itertools.product(dtypes, (1, 20, 128), (None, -5.0)):
        yield f"raw gates {K} {factor} {str(dtype)[6:]}", lambda a=(dtype, K, factor): of_raw_gates(*a)  # type: ignore[misc]


@contextlib.contextmanager
def registers_left() -> Iterator[list[str]]:
    """Has kernels assembled with other limits of registers where a wgmma writes its result to registers of the tools';
    gives the names of the kernels, one for each machine code turned down.

    Synccheck puts code in front of every wait for a wgmma, which then is under way and overwrites what that code holds
    in these registers. The warps go astray, and synccheck reports what they do. ptxas takes the registers from R24 on,
    but for some kernels that spill.
    """
    from flexsp.runtime.workarounds import unwritten_registers

    names: list[str] = []
    unwritten, rules = unwritten_registers.unwritten, unwritten_registers.rules

    def in_the_way(listing: str) -> list[str]:
        found = [line.strip() for line in listing.splitlines() if any(map(_is_own, _PRODUCT.findall(line)))]
        kernel = re.search(r"\.text\.(\w+)", listing)
        names.extend([kernel[1] if kernel else "kernel"] if found else [])
        return unwritten(listing) + found

    unwritten_registers.unwritten = in_the_way
    unwritten_registers.rules = lambda: f"{rules()} {OWN_REGISTERS} left"  # in Triton's cache they are others
    try:
        yield names
    finally:
        unwritten_registers.unwritten, unwritten_registers.rules = unwritten, rules


def _is_own(register: str) -> bool:
    return int(register) < OWN_REGISTERS


def work(claims: Path, only: str) -> None:
    """Child: takes case after case that no other process has claimed; prints one line before each and one after all."""
    with registers_left() as turned_down:
        _work(claims, only, turned_down)


def _work(claims: Path, only: str, turned_down: list[str]) -> None:
    import torch

    from flexsp.runtime import launch

    torch.cuda.synchronize()  # a tool lets a process fail that uses no GPU, and others may have taken all cases
    calls, failed = 0, []
    for index, (name, call) in enumerate(case for case in cases() if re.search(only, case[0])):
        try:
            (claims / str(index)).mkdir()
        except FileExistsError:
            continue
        print(_line(begin=name, index=index), flush=True)
        begin = time.monotonic()
        try:
            call()
            torch.cuda.synchronize()
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
        calls += 1
        print(_line(end=name, seconds=round(time.monotonic() - begin, 1)), flush=True)
    kernels = sorted({str(getattr(x, "result", lambda x=x: x)().hash) for x in launch._compiled.values()})
    print(_line(calls=calls, kernels=kernels, failed=failed, turned_down=turned_down), flush=True)


def _line(**told: Any) -> str:
    return "sanitize: " + json.dumps(told)


def _told(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("sanitize: ")) for line in text.splitlines() if line.startswith("sanitize: ")]


def _kinds(text: str) -> Counter[str]:
    """How often each report was printed in each case: its first line, and the case that the process had begun."""
    kinds, case = Counter[str](), "no case"
    for line in text.splitlines():
        if line.startswith("sanitize: "):
            case = _told(line)[0].get("begin", case)
        elif report := _REPORT.match(line):
            kinds[f"{report[1]} In {case}."] += 1
    return kinds


def child(command: list[str], env: dict[str, str], limit_s: float) -> tuple[str, str | None]:
    """What a process and its children print, and None or why it did not end well; none of them outlives the limit."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True)
        try:
            code = process.wait(limit_s)
            bad = f"a process ended with {code}" if code else None
        except subprocess.TimeoutExpired:
            bad = f"a process was stopped after {limit_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        return log.read(), bad


def summary(tool: str | None, outputs: list[tuple[str, str | None]]) -> dict[str, Any]:
    """What all processes of a tool told. A process that broke off counts as failed, with the case it was at."""
    kernels: set[str] = set()
    calls, failed, errors, findings, seconds, kinds, turned_down = 0, [], 0, [], {}, Counter[str](), Counter[str]()
    for text, bad in outputs:
        told = _told(text)
        ended = {each["end"]: each["seconds"] for each in told if "end" in each}
        totals = [each for each in told if "calls" in each]
        seconds |= ended
        if bad or not totals:
            at = [each["begin"] for each in told if "begin" in each and each["begin"] not in ended]
            failed.append(f"{bad or 'a process told nothing'}, at {at or 'no case'}: {text[-3000:]}")
        for each in totals:
            calls += each["calls"]
            kernels |= set(each["kernels"])
            failed += each["failed"]
            turned_down += Counter(each["turned_down"])
        found = _SUMMARY.findall(text)
        if tool is not None and not found:
            failed.append(f"{tool} printed no summary: {text[-600:]}")
        wrong = sum(int(a or b) for a, b in found)
        errors += wrong
        kinds += _kinds(text)
        findings += [line for line in text.splitlines() if line.startswith("=========")][:40] if wrong else []
    slowest = dict(sorted(seconds.items(), key=lambda item: -item[1])[:5])
    return {
        "calls": calls, "kernels": len(kernels), "errors": errors, "failed": failed, "kinds": dict(kinds),
        "turned_down": dict(turned_down), "findings": findings[:60], "slowest": slowest,
    }  # fmt: skip


def crashes(outputs: list[tuple[str, str | None]]) -> list[tuple[str, str | None]]:
    """The processes that a signal ended at their first case: seen under tools when many start at once, unexplained."""
    return [(text, bad) for text, bad in outputs if "ended with -" in (bad or "") and len(_told(text)) == 1]


def run(tool: str | None, jobs: int, only: str, limit_s: float) -> dict[str, Any]:
    """All cases in `jobs` processes, under a tool or plainly (which compiles them).

    Under a tool, processes that crashed at once are started once more for the cases to be complete, and are reported.
    """
    under = [] if tool is None else ["compute-sanitizer", "--tool", tool, "--print-limit", "20"]
    if tool == "memcheck":  # Triton 3.9 asks the driver for a mode of shared memory that it may refuse, and goes on
        under += ["--report-api-errors", "no"]
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool == "memcheck" else dict(os.environ)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as claims, ThreadPoolExecutor(jobs) as pool:
        command = [*under, sys.executable, __file__, "--work", claims, "--only", only]
        outputs = list(pool.map(lambda _: child(command, env, limit_s), range(jobs)))
        crashed = crashes(outputs) if tool is not None else []
        for text, _ in crashed:
            (Path(claims) / str(_told(text)[0]["index"])).rmdir()
        again = pool.map(lambda _: child(command, env, limit_s), crashed)
        outputs = [*(x for x in outputs if x not in crashed), *again]
    restarted = [f"{bad}, at {_told(text)[0]['begin']}: {text[-3000:]}" for text, bad in crashed]
    return summary(tool, outputs) | {"restarted": restarted, "seconds": round(time.monotonic() - begin)}


def earlier(out: Path | None, environment: dict[str, Any]) -> dict[str, Any]:
    """What `out` has of the tools, if it was measured at the same commit with the same software and GPU."""
    if out is None or not out.exists():
        return {}
    found = json.loads(out.read_text())
    same = ("commit", "dirty", "torch", "triton", "driver", "device")
    return found["tools"] if all(found["environment"].get(key) == environment.get(key) for key in same) else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--only", default="", help="cases in whose name this regular expression is found")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--limit-s", type=float, default=1200, help="for each tool")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        faulthandler.enable()
        work(args.work, args.only)
        return 0
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer: not found; it comes with the CUDA toolkit", file=sys.stderr)
        return 1
    if not any(re.search(args.only, name) for name, _ in cases()):
        parser.error(f"--only: expected to find it in a case's name, such as {next(cases())[0]!r}, got {args.only!r}")
    import torch

    from flexsp.bench.record import environment, save

    result: dict[str, Any] = {"kind": "sanitize", "environment": environment(torch.device("cuda"), sys.argv)}
    result["tools"] = earlier(args.out, result["environment"])
    bad = False
    for tool in (None, *args.tools):
        found = run(tool, args.jobs, args.only, args.limit_s)
        result["tools"][tool or "without a tool"] = found
        bad |= bool(found["errors"] or found["failed"] or found["restarted"])
        told = f"{found['calls']} calls, {found['kernels']} kernels, {found['errors']} errors, {found['seconds']} s"
        slow = f"slowest: {found['slowest']}, machine code turned down: {found['turned_down']}"
        wrong = [*found["failed"], *found["kinds"].items(), *found["findings"], *found["restarted"]]
        print(f"{tool or 'compiling':10s} {told}", slow, *wrong, sep="\n  ", flush=True)
        if args.out is not None:
            save(args.out, result)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
