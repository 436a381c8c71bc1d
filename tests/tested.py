"""Which tests ran on which GPUs: `make test-gpu` records it, and docs/tested.md shows it.

A run leaves a JSON file in benchmarks/results/tested: device, versions, commit, and for each file of tests and each op
how many tests passed, failed and were skipped (also: were expected to fail). The tables of docs/tested.md stand between
marks. Write them anew with

    python -m tests.tested

`python -m tests.tested ranks` runs the scripts tests/gpu/ranks_*.py on 2 and 4 GPUs and records them.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from flexsp import ops
from flexsp.bench import record
from flexsp.bench.table import grid
from tests.variants import VARIANTS

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "tested"
PAGE = ROOT / "docs" / "tested.md"
LIMIT_S = 900

Run = dict[str, Any]
Counts = dict[tuple[str, str], Counter[str]]

OPS = [name for name in ops.__all__ if name[0].islower() and not name.startswith("recurrent_")]

# What tests call an op, where it is neither the op's name nor that without "chunk_".
NAMES = {
    "linear": "chunk_linear_attn", "normalized": "chunk_linear_attn", "lightning": "chunk_lightning_attn",
    "gamma": "chunk_simple_gla", "mamba2": "mamba2_ssd", "mamba": "selective_scan",
    "delta": "chunk_delta_rule", "delta_product": "chunk_gated_delta_product", "product": "chunk_gated_delta_product",
    "gated": "chunk_gated_delta_rule",
}  # fmt: skip
ENDINGS = ("_normalized", "_gamma", "_groups", "_in_kernel", "_shared_keys", "_mimo")

# Files whose words are variants of three functions, and files whose checks are of no single op.
OF_VARIANTS = ("test_generated", "test_delta_engine", "test_torch_compile", "ranks_generated")
OF_ALL = ("ranks_ops", "ranks_layers", "ranks_transformers", "ranks_attention", "test_attention", "test_decode")
# What tests are of, by file, where no word is an op.
SUBJECTS = {
    "test_attention": "softmax attention", "ranks_attention": "softmax attention",
    "test_delta_engine": "delta rules: gates, segments, strides", "test_delta_ops": "delta rules: several keys, sizes",
    "test_decode": "steps of programs",
    "test_generated": "generated kernels: chunks, parts of states", "test_nonfinite": "NaN and inf",
    "test_large_states": "large states: layouts, long texts", "test_mamba2": "Mamba-2: its other arguments",
    "test_ops": "scalar decay: tiles, strides, CUDA graphs", "test_propagate": "exchange of states",
    "test_recipes": "calls that look alike", "test_tail": "tokens behind the last document",
    "test_exact_as_peer": "as exact as other libraries", "test_matrix": "all ops in many sizes",
    "test_memory": "mLSTM, Mamba-1 and Mamba-3", "test_large_values": "values of more than 256: layers",
    "ranks_generated": "generated kernels over ranks", "ranks_operators": "ops over ranks, as benchmarks call them",
    "test_states": "programs with several states", "test_torch_compile": "torch.compile",
    "test_vector_gates": "gates of channels: strong gates", "test_long_gates": "gates' gradients: layers",
    "ranks_bitwise": "same bits for any number of ranks", "ranks_long_gates": "gates' gradients: layers",
    "ranks_layers": "layers over ranks", "ranks_ops": "ops over ranks: graphs, absent ranks",
    "ranks_propagate": "exchange of states", "ranks_transformers": "models of transformers",
}  # fmt: skip

# What no test on a GPU is of yet: the table says so.
WITHOUT_TESTS = ("layers and models of flash-linear-attention", "objectives of flexsp.grammar")


def short(file: str) -> str:
    return Path(file).stem.removesuffix("_gpu")


def op_of(word: str) -> str | None:
    """The op that a word of a test's name means."""
    for ending in ("", *ENDINGS):
        name = word.removesuffix(ending)
        for found in (NAMES.get(name), f"chunk_{name}", name):
            if found in OPS:
                return found
    return None


def subject(file: str, text: str) -> str:
    """What a test is of: an op, a variant, else what its file is about. ``text`` has the words of its name."""
    name = short(file)
    if name == "test_memory":  # test_mlstm, test_mamba3_gives_the_same_bits_again
        text = re.sub("_(gives|kernels|of_every)", " ", text.removeprefix("test_"))
    variants = name in OF_VARIANTS or "variant" in text or (name == "test_matrix" and "test_ops" not in text)
    for word in re.findall(r"\w+", text):
        if variants and word in VARIANTS:
            return f"variant {word}"
        if not variants and name not in OF_ALL and (op := op_of(word)) is not None:
            return op
    return SUBJECTS.get(name, name)


class Recorder:
    """A pytest plugin: counts tests and writes a record when the session ends."""

    def __init__(self, folder: Path, part: str) -> None:
        self.folder, self.part = folder, part
        self.outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid] = report.outcome

    @pytest.hookimpl(tryfirst=True)  # before pytest-xdist waits for its workers
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        counts: Counts = {}
        for node, outcome in self.outcomes.items():
            file, _, text = node.partition("::")
            counts.setdefault((file, subject(file, text)), Counter())[outcome] += 1
        if torch.cuda.is_available():
            cut_off = exitstatus == pytest.ExitCode.INTERRUPTED
            save(self.folder, counts, 1, sys.argv[1:], self.part, cut_off)


def save(
    folder: Path, counts: Counts, gpus: int, command: Sequence[str], part: str = "1/1", cut_off: bool = False
) -> None:
    """Write a record, unless no test came to an end. ``cut_off``: time was up before all tests had run."""
    if not any(count["passed"] or count["failed"] for count in counts.values()):
        return
    env = record.environment(torch.device("cuda"), command) | {"command": " ".join(command), "world_size": gpus}
    rows = [
        {"file": file, "op": op, **{outcome: count[outcome] for outcome in ("passed", "failed", "skipped")}}
        for (file, op), count in sorted(counts.items())
    ]
    time = env["date"][11:19].replace(":", "")
    path = folder / f"{record.file_stem('tested', env)}_{time}.json"
    run = {"environment": env, "part": part, "cut_off": cut_off, "rows": rows}
    record.save(path, {"kind": "tested", "runs": [run]})
    print(f"recorded {path}")


def count_lines(file: str, lines: Iterable[str], counts: Counts) -> None:
    """Adds up what a script of ranks prints: "ok simple_gla ..." or "FAILED kda ..." for each check."""
    for line in lines:
        found = re.match(r"\s*(ok|FAIL)(?:ED)?\b(.*)", line)
        if found is not None:
            outcome = "passed" if found[1] == "ok" else "failed"
            counts.setdefault((file, subject(file, found[2])), Counter())[outcome] += 1


def run_ranks(folder: Path) -> int:
    """Runs each script on 2 and on 4 GPUs, if there are that many. One that fails or hangs does not stop the others."""
    there, failed = torch.cuda.device_count(), False
    for gpus in (2, 4):
        if there < gpus:
            print(f"torchrun with {gpus} GPUs left out: {there} found")
            continue
        counts: Counts = {}
        for script in sorted((ROOT / "tests" / "gpu").glob("ranks_*.py")):
            file = str(script.relative_to(ROOT))
            print(f"== {gpus} GPUs: {file}", flush=True)
            torchrun = f"-m torch.distributed.run --standalone --nproc-per-node {gpus} {file}"
            command = ["timeout", "-k", "10", str(LIMIT_S), sys.executable, *torchrun.split()]
            printed = []
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            with subprocess.Popen(command, cwd=ROOT, **pipes) as run:
                for line in run.stdout or ():
                    print(line, end="", flush=True)
                    printed.append(line)
            count_lines(file, printed, counts)
            if run.returncode:
                failed = True
                print(f"FAILED with {gpus} GPUs: {file}")
                if not any(count["failed"] for (where, _), count in counts.items() if where == file):
                    counts.setdefault((file, subject(file, "")), Counter())["failed"] += 1
        save(folder, counts, gpus, ["python", "-m", "tests.tested", "ranks"])
    return int(failed)


def load(folder: Path = RESULTS) -> list[Run]:
    """All runs, the oldest first; the first run is number 1."""
    runs = [run for path in sorted(folder.glob("*.json")) for run in record.load(path)["runs"]]
    for row in (row for run in runs for row in run["rows"]):
        row["op"] = SUBJECTS.get(row["op"], row["op"])  # the file had no subject when its record was written
    return sorted(runs, key=lambda run: str(run["environment"]["date"] or ""))


def device(run: Run) -> str:
    env = run["environment"]
    count = f"{env['world_size']} x " if env["world_size"] > 1 else ""
    return count + str(env["device"]).removeprefix("NVIDIA ").replace("cpu", "CPU")


def column(run: Run) -> tuple[int, str]:
    env = run["environment"]
    return env["world_size"], f"{device(run)}, Triton {re.split('[+-]', str(env['triton']))[0]}"


def _parts(runs: Sequence[tuple[int, Run]]) -> dict[str, tuple[int, Run]]:
    """Of the newest run all parts that were run of its commit: shard 1/2 and shard 2/2."""
    env = runs[-1][1]["environment"]
    of = runs[-1][1].get("part", "1/1").partition("/")[2]
    return {
        run.get("part", "1/1"): (number, run) for number, run in runs
        if run["environment"]["commit"] == env["commit"] and run.get("part", "1/1").endswith(f"/{of}")
    }  # fmt: skip


def cell(runs: Sequence[tuple[int, Run]], op: str) -> str:
    """What the newest runs say of an op: of each file of tests, the newest run that has it."""
    by_file: dict[str, list[tuple[int, Run]]] = {}
    for number, run in runs:
        for row in run["rows"]:
            if row["op"] == op:
                by_file.setdefault(row["file"], []).append((number, run))
    total, numbers, counted = Counter[str](), set(), True
    for file, found in by_file.items():
        for number, run in _parts(found).values():
            numbers.add(number)
            for row in run["rows"]:
                if (row["file"], row["op"]) == (file, op):
                    counted &= row["passed"] is not None
                    total.update({key: row.get(key) or 0 for key in ("passed", "failed")})
    if not numbers:
        return "not run"
    ran = total["passed"] + total["failed"]
    text = "passed" if not counted else str(ran) if not total["failed"] else f"{total['passed']} of {ran}"
    if not counted and total["failed"]:
        text = f"{total['failed']} failed"
    return f"{text} [{', '.join(map(str, sorted(numbers)))}]"


def by_op(runs: Sequence[Run]) -> str:
    """One line an op, one column a device and a release of Triton."""
    on_gpus = [(number, run) for number, run in enumerate(runs, start=1) if run["environment"]["device"] != "cpu"]
    columns = sorted({column(run) for _, run in on_gpus})
    seen = {row["op"] for _, run in on_gpus for row in run["rows"]}
    variants = [f"variant {name}" for name in VARIANTS]
    others = sorted((seen | {*WITHOUT_TESTS}) - {*OPS, *variants})
    lines = [
        [f"`{op}`" if op in OPS else re.sub(r"variant (\w+)", r"variant `\1`", op),
         *(cell([x for x in on_gpus if column(x[1]) == at], op) for at in columns)]
        for op in (*OPS, *variants, *others)
    ]
    return grid(["op", *(name for _, name in columns)], lines)


def of_runs(runs: Sequence[Run]) -> str:
    """One line a run."""
    lines = []
    for number, run in enumerate(runs, start=1):
        env, rows = run["environment"], run["rows"]
        files = list(dict.fromkeys(f"`{short(row['file'])}`" for row in rows))
        part = "" if run.get("part", "1/1") == "1/1" else f", part {run['part']}"
        part += ", cut off" if run.get("cut_off") else ""
        totals = [
            "" if any(row[key] is None for row in rows) else str(sum(row[key] for row in rows))
            for key in ("passed", "failed", "skipped")
        ]
        versions = [str(env.get(key) or "") for key in ("python", "torch", "triton", "nvshmem")]
        commit = (env["commit"] or "")[:7] + (" with changes" if env.get("dirty") else "")
        what = run.get("what") or ", ".join(files) + part
        lines.append([str(number), str(env["date"] or "")[:10], commit, device(run), *versions, what, *totals])
    header = ["run", "date", "commit", "device", "Python", "torch", "Triton", "NVSHMEM", "what ran"]
    return grid([*header, "passed", "failed", "skipped"], lines)


def refreshed(text: str, runs: Sequence[Run]) -> str:
    """The page with its tables written anew."""
    for name, table in (("ops", by_op), ("runs", of_runs)):
        pattern = rf"(<!-- tested: {name} -->\n).*?(\n<!-- /tested -->)"
        found = table(runs)
        text, count = re.subn(pattern, lambda match, found=found: match[1] + found + match[2], text, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"docs/tested.md: expected one part <!-- tested: {name} -->, got {count}")
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["document", "ranks"], default="document")
    parser.add_argument("--tested", type=Path, default=RESULTS, metavar="FOLDER", help="where records are")
    options = parser.parse_args()
    if options.what == "ranks":
        return run_ranks(options.tested)
    PAGE.write_text(refreshed(PAGE.read_text(), load(options.tested)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
