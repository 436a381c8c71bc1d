"""Do they learn? Small models of every variant on tasks of recall, copying and state tracking: a table and a picture.

    python examples/synthetics.py --minutes 9

Cells (a variant, a task, a seed) are trained side by side by worker processes. Each result is a line of
OUT/cells.jsonl, and the same command goes on where it stopped. At the end OUT has the results as one JSON file, the
table and the picture. ``--report FILE`` writes those of such a JSON file into docs/synthetics.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

import torch
from checkpoint import UserError, file_errors
from synthetic_tasks import TASKS, VARIANTS, Task, train
from training import one_line_errors

from flexsp.bench.record import environment, file_stem, load

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "synthetics.md"
SAME = ("commit", "dirty", "device", "torch", "triton")  # of all cells of a table
Cell = tuple[str, str, int]  # variant, task, seed
Result = dict[str, Any]


# ---------------------------------------------------------------- settings


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="runs/synthetics", help="folder of the results (default: runs/synthetics)")
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    parser.add_argument("--jobs", type=int, help="worker processes (default: a core each, 16 at most)")
    parser.add_argument("--minutes", type=float, default=60.0, help="training ends then, finished or not (default: 60)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each variant and task (default: 3)")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), metavar="TASK",
                        help="some of " + ", ".join(TASKS))  # fmt: skip
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), metavar="VARIANT",
                        help="some of " + ", ".join(VARIANTS))  # fmt: skip
    parser.add_argument("--tiny", action="store_true", help="small batches, short texts and few steps, for a CPU")
    parser.add_argument("--report", type=Path, metavar="FILE", help="train nothing: write docs/synthetics.md of FILE")
    return parser.parse_args(argv)


def check_options(options: argparse.Namespace) -> None:
    """Fills in the defaults that depend on the machine."""
    if options.device is None:
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.device not in ("cpu", "cuda"):
        raise UserError(f"--device: expected cpu or cuda, got {options.device}")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: expected a CUDA device, got a machine or a torch without one")
    if options.jobs is None:
        options.jobs = min(16, len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1)
    for name in ("jobs", "seeds", "minutes"):
        value = getattr(options, name)
        if not 0 < value < float("inf"):
            raise UserError(f"--{name}: expected more than 0, got {value}")


def task_of(name: str, tiny: bool) -> Task:
    task = TASKS[name]
    if not tiny:
        return task
    size = replace(task.size, width=task.size.width // 2, heads=task.size.heads // 2)
    lengths = tuple(length // 2 for length in task.lengths)
    return replace(task, size=size, lengths=lengths, steps=max(200, task.steps // 5), batch=task.batch // 4)


# ---------------------------------------------------------------- workers


def work(pipe: Connection, device: str, tiny: bool) -> None:
    """Trains the cells that come through the pipe and sends their results, until one fails or the other end is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process tells when to stop
    torch.set_num_threads(1)
    result: Result = {}
    while "error" not in result:  # after an error on a GPU a process can do no more there
        try:
            variant, task, seed = pipe.recv()
        except EOFError:
            return
        try:
            result = train(variant, task_of(task, tiny), seed, torch.device(device))
        except Exception as error:  # noqa: BLE001  a cell of the table says what it was
            result = {"error": shortened(f"{type(error).__name__}: {error}")}
        pipe.send(result)


def shortened(message: str) -> str:
    line = " ".join(message.split())
    return line if len(line) <= 300 else line[:297] + "..."


class Worker:
    def __init__(self, device: str, tiny: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=work, args=(other, device, tiny), daemon=True)
        self.process.start()
        other.close()  # so that the pipe ends with the process
        self.idle = True

    def train(self, cell: Cell, stop: Event, deadline: float) -> Result | None:
        """The result, or None where training has to end before."""
        self.idle = False
        try:
            self.pipe.send(cell)
            while not self.pipe.poll(0.2):
                if stop.is_set() or time.monotonic() >= deadline:
                    return None
            result: Result = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(10)
            return {"error": f"its process ended with exit code {self.process.exitcode}"}
        self.idle = True
        return result

    def end(self) -> None:
        """At once where it is in the middle of a cell."""
        self.pipe.close()
        self.process.join(10 if self.idle else 0)
        self.process.kill()
        self.process.join()


class Run:
    """The cells that are left, and the file of those that are done."""

    def __init__(self, path: Path, cells: Iterable[Cell], options: argparse.Namespace, deadline: float) -> None:
        self.path, self.left, self.options, self.deadline = path, list(cells), options, deadline
        self.lock, self.stop, self.total = Lock(), Event(), len(self.left)
        self.done = 0

    def go(self) -> None:
        threads = [Thread(target=self._drive) for _ in range(min(self.options.jobs, self.total))]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except KeyboardInterrupt:
            print("stopping; the same command goes on from here", flush=True)
        finally:
            self.stop.set()
            for thread in threads:
                thread.join()

    def _drive(self) -> None:
        """One worker after another, a new one after each that failed, until no cell or no time is left."""
        worker: Worker | None = None
        try:
            while (cell := self._next()) is not None:
                worker = worker or Worker(self.options.device, self.options.tiny)
                result = worker.train(cell, self.stop, self.deadline)
                if result is None:
                    return
                self._add(cell, result)
                if "error" in result:
                    worker.end()
                    worker = None
        finally:
            if worker is not None:
                worker.end()

    def _next(self) -> Cell | None:
        with self.lock:
            over = self.stop.is_set() or time.monotonic() >= self.deadline
            return self.left.pop(0) if self.left and not over else None

    def _add(self, cell: Cell, result: Result) -> None:
        variant, task, seed = cell
        with self.lock:
            self.done += 1
            with self.path.open("a") as file:
                file.write(json.dumps({"variant": variant, "task": task, "seed": seed, **result}) + "\n")
            print(f"[{self.done}/{self.total}] {task}, {variant}, seed {seed}: {one_line(result)}", flush=True)


def one_line(result: Result) -> str:
    if "error" in result:
        return f"error: {result['error']}"
    shown = ", ".join(f"{accuracy:.3f} at {length}" for length, accuracy in result["accuracy"].items())
    return f"{shown}; {result['steps']} steps, {result['seconds']:.0f} s"


# ---------------------------------------------------------------- results


def read_cells(path: Path, head: Result) -> list[Result]:
    """Those of an earlier run with the same head, which a new file is given; the last of a cell counts."""
    if not path.exists():
        path.write_text(json.dumps(head) + "\n")
    lines = path.read_text().splitlines()
    try:
        found, *rows = [json.loads(line) for line in lines if line.endswith("}")]  # the last may be cut off
        old, new = ({**x["environment"], "tiny": x["tiny"]} for x in (found, head))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: expected the results of this script, got something else ({error})") from error
    for what in (*SAME, "tiny"):
        if old[what] != new[what]:
            raise UserError(f"{path}: expected results of {what} {new[what]}, got {old[what]}; take another --out")
    if lines and not path.read_text().endswith("\n"):
        path.write_text("".join(line + "\n" for line in lines if line.endswith("}")))
    return list({(row["variant"], row["task"], row["seed"]): row for row in rows}.values())


def run(options: argparse.Namespace) -> Path:
    """Trains what is left and writes the results, the table and the picture; returns the JSON file."""
    deadline = time.monotonic() + 60 * options.minutes
    out = Path(options.out)
    with file_errors():
        out.mkdir(parents=True, exist_ok=True)
        env = environment(torch.device(options.device), [])
        env["command"] = "python " + shlex.join(["examples/synthetics.py", *sys.argv[1:]])
        head = {"kind": "synthetics", "environment": env, "tiny": options.tiny}
        path = out / "cells.jsonl"
        finished = {(row["variant"], row["task"], row["seed"]) for row in read_cells(path, head) if "error" not in row}
    wanted = [(v, t, s) for s in range(options.seeds) for t in options.tasks for v in options.variants]
    left = [cell for cell in wanted if cell not in finished]
    print(f"{len(wanted)} cells, {len(wanted) - len(left)} of them finished before", flush=True)
    began = time.monotonic()
    Run(path, left, options, deadline).go()
    rows = read_cells(path, head)
    if not rows:
        raise UserError(f"--minutes: expected the time that one cell takes at least, got {options.minutes}")
    result = {**head, "seconds": round(time.monotonic() - began), "tasks": described(options.tiny), "cells": rows}
    with file_errors():
        file = out / f"{file_stem('synthetics', env)}.json"
        save_lines(file, result)
        (out / "table.md").write_text(markdown(result) + "\n")
        if find_spec("matplotlib") is None:
            print("no picture: pip install matplotlib, then the same command once more", flush=True)
        else:
            picture(result, out / "synthetics.png")
    print(f"\n{markdown(result)}\n\n{file}", flush=True)
    return file


def save_lines(file: Path, result: Result) -> None:
    """As JSON with a line for each cell."""
    head, mark = json.dumps({**result, "cells": []}, indent=1), '"cells": []'
    cells = ",\n".join(json.dumps(row) for row in result["cells"])
    part = file.with_suffix(".part")
    part.write_text(head.replace(mark, f'"cells": [\n{cells}\n]') + "\n")
    part.replace(file)  # one that is killed leaves the last whole version


def described(tiny: bool) -> dict[str, Any]:
    """The tasks as numbers, so that a table can be made of a file alone."""
    found = {}
    for name in TASKS:
        task = task_of(name, tiny)
        plain = {key: getattr(task, key) for key in ("title", "lengths", "layers", "guessing", "steps", "lr", "batch")}
        found[name] = {**plain, **vars(task.size)}
    return found


def accuracies(result: Result, variant: str, task: str, length: int) -> list[float]:
    """Of the seeds that ended without an error, smallest first."""
    rows = cells_of(result, variant, task)
    return sorted(row["accuracy"][str(length)] for row in rows if "error" not in row)


def cells_of(result: Result, variant: str, task: str) -> list[Result]:
    return [row for row in result["cells"] if row["variant"] == variant and row["task"] == task]


def columns(result: Result) -> list[tuple[str, int]]:
    """Tasks that have cells, with each of their lengths."""
    tasks = {row["task"] for row in result["cells"]}
    return [(name, length) for name, task in result["tasks"].items() if name in tasks for length in task["lengths"]]


def variants(result: Result) -> list[str]:
    """In the order of the list here; those that it no longer has come last."""
    found = dict.fromkeys(row["variant"] for row in result["cells"])
    return [name for name in VARIANTS if name in found] + [name for name in found if name not in VARIANTS]


def markdown(result: Result) -> str:
    """The table, what failed, and where it was measured."""
    result = json.loads(json.dumps(result))
    tasks, wide = result["tasks"], columns(result)
    header = ["variant", *(f"{tasks[name]['title']}, {length} tokens" for name, length in wide)]
    rows = [[variant, *(entry(result, variant, *at) for at in wide)] for variant in variants(result)]
    rows.append(["guessing", *(f"{tasks[name]['guessing']:.2f}" for name, _ in wide)])
    lines = ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]
    failed = [row for row in result["cells"] if "error" in row]
    if failed:
        lines += ["", "Errors:", ""]
        lines += [f"- {row['variant']}, {row['task']}, seed {row['seed']}: `{row['error']}`" for row in failed]
    env = result["environment"]
    source = (env["commit"] or "unknown")[:10] + (" with local changes" if env["dirty"] else "")
    versions = f"torch {env['torch']}" + (f", Triton {env['triton']}" if env.get("triton") else "")
    device = env["device"].upper() if env["device"] == "cpu" else env["device"]
    seeds = len({row["seed"] for row in result["cells"]})
    command = re.sub(r" --out \S+", "", env["command"])  # a folder of that machine
    lines += ["", f"{device}, {versions}; commit {source}, {env['date'][:10]}, {seeds} seeds: `{command}`"]
    return "\n".join(lines)


def entry(result: Result, variant: str, task: str, length: int) -> str:
    """Median [smallest, largest] of the seeds; at the last length the steps until the task was solved, by how many."""
    rows, found = cells_of(result, variant, task), accuracies(result, variant, task, length)
    failed = sum("error" in row for row in rows)
    if not found:
        return "error" if failed else "-"
    low, middle, high = (f"{x:.2f}" for x in (found[0], statistics.median(found), found[-1]))
    text = middle if low == high else f"{middle} [{low}, {high}]"
    steps = [row["solved"] for row in rows if row.get("solved")]
    if steps and length == result["tasks"][task]["lengths"][-1]:
        count = "" if len(steps) == len(rows) else f" ({len(steps)} of {len(rows)})"
        text += f"; {statistics.median(steps):.0f} steps{count}"
    return text + (f"; {failed} of {len(rows)} failed" if failed else "")


def picture(result: Result, path: Path) -> None:
    """A map: the lighter a field, the nearer its median accuracy is to 1 on the way from guessing."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    result = json.loads(json.dumps(result))
    names, wide, tasks = variants(result), columns(result), result["tasks"]
    figure, axes = pyplot.subplots(figsize=(2.5 + 1.15 * len(wide), 1.6 + 0.27 * len(names)), layout="constrained")
    grid = [[float("nan")] * len(wide) for _ in names]
    for row, variant in enumerate(names):
        for column, (task, length) in enumerate(wide):
            found = accuracies(result, variant, task, length)
            if found:
                guessing, median = tasks[task]["guessing"], statistics.median(found)
                grid[row][column] = level = max(0.0, (median - guessing) / (1 - guessing))
                spread = "" if found[-1] - found[0] < 0.01 else f"  [{found[0]:.2f}, {found[-1]:.2f}]"
                axes.text(column, row, f"{median:.2f}{spread}", ha="center", va="center", fontsize=6.5,
                          color="black" if level > 0.55 else "white")  # fmt: skip
    shown = axes.imshow(grid, vmin=0, vmax=1, cmap="cividis", aspect="auto")
    axes.set_xticks(range(len(wide)), [f"{tasks[t]['title'].replace(' ', chr(10), 1)}\n{n} tokens" for t, n in wide])
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(labelsize=8, length=0)
    axes.xaxis.tick_top()
    bar = figure.colorbar(shown, ax=axes, shrink=0.6)
    bar.set_ticks([0, 1], labels=["guessing", "all right"], fontsize=8)
    figure.savefig(path, dpi=150, metadata={"Software": None})
    pyplot.close(figure)


MEASURED = re.compile(r"(<!-- measured: (\S*) -->\n).*?(<!-- /measured -->)", re.DOTALL)


def report(file: Path, page: Path) -> None:
    """Writes table and picture of a result file into a page, between its two marks."""
    with file_errors():
        try:
            result = load(file)
        except ValueError as error:
            raise UserError(f"--report: {error}") from error
        if result["kind"] != "synthetics":
            raise UserError(f"--report: expected a result of examples/synthetics.py, got one of kind {result['kind']}")
        text = page.read_text()
        if len(MEASURED.findall(text)) != 1:
            raise UserError(f"{page}: expected the marks '<!-- measured: ... -->' and '<!-- /measured -->' once")
        picture(result, page.with_suffix(".png"))
        page.write_text(MEASURED.sub(lambda marks: f"<!-- measured: {file.name} -->\n{measured(result, page)}\n"
                                                   f"{marks[3]}", text))  # fmt: skip
    print(f"wrote {page} and {page.with_suffix('.png')}")


def measured(result: Result, page: Path) -> str:
    return f"{markdown(result)}\n\n![The same numbers as a picture]({page.with_suffix('.png').name})"


def main(argv: Sequence[str] | None = None) -> None:
    with one_line_errors("synthetics.py"):
        options = parse_options(None if argv is None else list(argv))
        if options.report is not None:
            return report(options.report, PAGE)
        check_options(options)
        run(options)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
