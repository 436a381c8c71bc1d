"""Changes the code on purpose, one line at a time, and reports the changes that no test notices: `make mutate`.

Every entry of tests/mutations.py is applied to a copy of the tree, never to the tree itself, and the tests that should
notice it run there. A change that its tests do not notice has survived: a test is missing. One whose text is no longer
in the file is stale: the entry has to follow the code. Either ends with exit status 1, and so does a run of tests that
does not end.

With --sample so many changes are made from the code instead, at random (tests/mutants.py): what share of them the tests
notice is their score. --files names what is changed, and --seed draws the same ones again.

Triton's interpreter has no threads. Barriers between accesses to global memory are seen there all the same
(flexsp/testing/bounds.py), those of shared memory in compiled kernels alone, and memory orders nowhere here.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("flexsp", "docs", "examples", "tests")
FILES = ("pyproject.toml",)
# Packages without which tests are skipped.
NEEDED = {f"tests/integrations/{name}.py": "fla" for name in ("test_fla", "test_fla_checks")}


@dataclass(frozen=True)
class Mutation:
    """`old`, which `file` has exactly once, becomes `new`; `tests` are arguments of pytest that should notice it."""

    file: str
    old: str
    new: str
    what: str
    tests: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


def in_file(file: str, *entries: tuple[str, ...]) -> list[Mutation]:
    """Entries (old, new, what, test, ...) of one file."""
    return [Mutation(file, old, new, what, tuple(tests)) for old, new, what, *tests in entries]


@dataclass(frozen=True)
class Outcome:
    """`kind` is "killed", "survived", "stale" or "no answer"; `told` says by which test, or what happened."""

    kind: str
    told: str = ""


def why_stale(mutation: Mutation, root: Path = ROOT) -> str:
    """Why a mutation cannot be applied; empty if it can."""
    path = root / mutation.file
    if not path.is_file():
        return "there is no such file"
    times = path.read_text().count(mutation.old)
    return "" if times == 1 else f"the file has the text {times} times, not once: {mutation.old!r}"


@contextlib.contextmanager
def applied(mutation: Mutation, tree: Path) -> Iterator[None]:
    """The mutation in a copy of the tree."""
    path = tree / mutation.file
    before = path.read_text()
    path.write_text(before.replace(mutation.old, mutation.new))
    try:
        yield
    finally:
        path.write_text(before)


def copy_tree(to: Path) -> Path:
    for name in FOLDERS:
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, to / name)
    return to


def run_tests(tree: Path, tests: Sequence[str], limit: float, slow: bool = True) -> tuple[int | None, str]:
    """(exit status, None past the limit; output) of pytest in a copy of the tree, up to the first failure. Where
    all of the tests are slow, these are run, or, unless `slow`, none, which is a success."""
    status, output = _run_pytest(tree, tests, limit)
    if status == pytest.ExitCode.NO_TESTS_COLLECTED:
        if not slow:
            return 0, output
        status, output = _run_pytest(tree, ["-m", "", *tests], limit)
    return status, output


def _run_pytest(tree: Path, words: Sequence[str], limit: float) -> tuple[int | None, str]:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=short", *words]
    # No byte code: two changes within a second would look alike to the importer.
    env = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    env |= {"FLEXSP_CODE_DIR": str(tree / "generated")}
    paths = [x for x in (str(tree), os.environ.get("PYTHONPATH")) if x]
    env = os.environ | env | {"PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=tree, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also the ranks that it started
            process.wait()
        output.seek(0)
        return status, output.read()


def try_out(mutation: Mutation, tree: Path, limit: float, slow: bool = True) -> Outcome:
    stale = why_stale(mutation, tree)
    if stale:
        return Outcome("stale", stale)
    with applied(mutation, tree):
        status, output = run_tests(tree, mutation.tests, limit, slow)
    failed = re.search(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", output, re.MULTILINE)
    if status == 0:
        return Outcome("survived", " ".join(mutation.tests))
    if status == 1 and failed:
        return Outcome("killed", failed[1])
    if status is None:
        return Outcome("no answer", f"tests still ran after {limit:.0f} s")
    return Outcome("no answer", f"pytest ended with {status}:\n{output[-2000:]}")


def check_unchanged(trees: Sequence[Path], tests: Sequence[str], limit: float) -> str:
    """Why the tests do not pass without a change; empty if they do. The trees share out the files."""
    by_file: dict[str, list[str]] = {}
    for test in tests:
        by_file.setdefault(test.partition("::")[0], []).append(test)
    shares: list[list[str]] = [[] for _ in trees]
    for each in sorted(by_file.values(), key=len, reverse=True):
        min(shares, key=len).extend(each)
    where = "import pathlib, flexsp; print(pathlib.Path(flexsp.__file__).resolve())"
    found = subprocess.run([sys.executable, "-c", where], cwd=trees[0], capture_output=True, text=True, check=True)
    if not found.stdout.startswith(str(trees[0].resolve())):
        return f"the copy in {trees[0]} is not what is imported there, but {found.stdout}"
    with ThreadPoolExecutor(len(trees)) as pool:
        work = [(tree, share) for tree, share in zip(trees, shares, strict=True) if share]
        for status, output in pool.map(lambda x: run_tests(*x, limit), work):
            if status != 0:
                return output[-4000:] or f"no answer within {limit:.0f} s"
    return ""


def try_all(mutations: Sequence[Mutation], jobs: int, limit: float) -> dict[Mutation, Outcome]:
    """What became of each; prints them as they come. SystemExit where tests fail without a change."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="flexsp-mutate-") as folder:
        trees = [copy_tree(Path(folder) / str(i)) for i in range(jobs)]
        tests = list(dict.fromkeys(test for mutation in mutations for test in mutation.tests))
        print(f"{len(tests)} tests without a change ...", flush=True)
        wrong = check_unchanged(trees, tests, limit * max(1, len(tests) // 4))
        if wrong:
            raise SystemExit(f"the tests do not pass without a change:\n{wrong}")
        print(f"pass, {time.monotonic() - started:.0f} s", flush=True)
        free: SimpleQueue[Path] = SimpleQueue()
        for tree in trees:
            free.put(tree)

        def one(mutation: Mutation) -> Outcome:
            tree, begun = free.get(), time.monotonic()
            try:
                outcome = try_out(mutation, tree, limit)
            finally:
                free.put(tree)
            print(f"{outcome.kind:9} {time.monotonic() - begun:4.0f} s  {mutation}  [{outcome.told}]", flush=True)
            return outcome

        with ThreadPoolExecutor(jobs) as pool:
            try:
                return dict(zip(mutations, pool.map(one, mutations), strict=True))
            except BaseException:  # Ctrl+C: what runs comes to its end, the others do not begin
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def sampled(options: argparse.Namespace) -> None:
    """Tries random changes, and ends with status 1 where fewer than `at_least` percent were noticed."""
    from tests import mutants

    seed = int.from_bytes(os.urandom(3), "big") if options.seed is None else options.seed
    print(f"--sample {options.sample} --seed {seed} --files '{options.files}'", flush=True)
    chosen = mutants.sample(options.sample, seed, options.files)
    if options.list:
        for mutation in chosen:
            print(f"{mutation}\n    {' '.join(mutation.tests)}")
        return
    found = mutants.try_sample(chosen, options.limit)
    for mutation, outcome in found.items():
        if outcome.kind != "killed":
            print(f"\n{outcome.kind}: {mutation}\n- {mutation.old}\n+ {mutation.new}\n{outcome.told}")
    percent, said = mutants.score(found.values())
    print(f"\n{said} (seed {seed})")
    sys.exit(0 if percent >= options.at_least else 1)


def main() -> None:
    from tests.mutations import MUTATIONS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="TEXT", default="", help="those whose file or description has this text")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="how many at once (default: 2)")
    parser.add_argument("--limit", type=float, default=300, help="seconds for the tests of one (default: 300)")
    parser.add_argument("--list", action="store_true", help="print the mutations and their tests, run nothing")
    parser.add_argument("--sample", type=int, metavar="N", default=0, help="make so many random changes instead")
    parser.add_argument("--seed", type=int, help="of the sample (default: another one each time)")
    parser.add_argument("--files", metavar="GLOBS", default="flexsp/*", help="of the sample (default: flexsp/*)")
    parser.add_argument("--at-least", type=float, default=95, help="percent that a sample has to reach (default: 95)")
    options = parser.parse_args()
    if options.sample:
        sampled(options)
        return
    chosen = [x for x in MUTATIONS if options.only in str(x)]
    skipped = tuple(file for file, package in NEEDED.items() if find_spec(package) is None)
    left_out = [x for x in chosen if skipped and any(test.startswith(skipped) for test in x.tests)]
    if left_out:
        print(f"{len(left_out)} left out: the package that {', '.join(skipped)} need is not installed")
        chosen = [x for x in chosen if x not in left_out]
    if not chosen:
        parser.error(f"--only: expected text of a mutation, none has {options.only!r}")
    if options.list:
        for mutation in chosen:
            print(f"{mutation}\n    {' '.join(mutation.tests)}")
        return
    found = try_all(chosen, max(1, options.jobs), options.limit)
    kinds = [outcome.kind for outcome in found.values()]
    print(", ".join(f"{kinds.count(kind)} {kind}" for kind in ("killed", "survived", "stale", "no answer")))
    left = {mutation: outcome for mutation, outcome in found.items() if outcome.kind != "killed"}
    for mutation, outcome in left.items():
        print(f"\n{outcome.kind}: {mutation}\n- {mutation.old}\n+ {mutation.new}\n{outcome.told}")
    sys.exit(1 if left else 0)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
