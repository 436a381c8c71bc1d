"""Compares the compiled kernels of two versions of the code: `make same-code BASE=commit`.

A refactoring should not change a kernel. Every test that is marked `compiles` compiles kernels for sm_90 on a machine
without a GPU. This script runs these tests in the working tree and in a checkout of BASE, with an empty Triton cache
for each, and compares the PTX. Names of kernels and places in the source do not count; instructions, registers,
parameters, shared memory and the number of warps do. It prints the kernels that only one side has, and exits with 1
if there are any.

Kernels of a commit are kept in build/same-code, so that a second comparison with it compiles one side alone.
"""

from __future__ import annotations

import argparse
import collections
import difflib
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "build" / "same-code"
QUICK = "compiles and not gpu and not slow or compiles(always=True)"
METADATA = ("shared", "num_warps", "num_ctas", "maxnreg", "launch_pdl", "launch_cooperative_grid")
Kernels = dict[str, dict[str, str]]  # by digest: its text, and its names in the source


def normalised(ptx: str, name: str) -> str:
    """Without the kernel's name, comments and places in the source."""
    ptx = re.split(r"^\s*\.section\s+\.debug", ptx, maxsplit=1, flags=re.MULTILINE)[0]
    ptx = re.sub(r"//.*", "", ptx).replace(name, "kernel")
    lines = (line.rstrip() for line in ptx.splitlines())
    return "\n".join(x for x in lines if x.strip() and not re.match(r"\s*\.(?:loc|file)\b|\$L__tmp\d+:", x))


def kernels_in(cache: Path) -> Kernels:
    """All that Triton has put into its cache, by a digest of what the comparison is of."""
    found: Kernels = {}
    for path in sorted(cache.rglob("*.ptx")):
        told = json.loads(path.with_suffix(".json").read_text())
        kept = {key: told.get(key) for key in METADATA} | {"arch": told["target"]["arch"]}
        text = json.dumps(kept) + "\n" + normalised(path.read_text(), path.stem)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        names = {path.stem, *found.get(digest, {"names": path.stem})["names"].split("/")}
        found[digest] = {"names": "/".join(sorted(names)), "text": text}
    return found


def compiled(tree: Path, slow: bool, workers: int, more: list[str]) -> Kernels:
    """The kernels that the marked tests of a tree compile."""
    with tempfile.TemporaryDirectory(prefix="flexsp-same-code-") as folder:
        env = {key: x for key, x in os.environ.items() if key not in ("TRITON_INTERPRET", "FLEXSP_BACKEND")}
        env |= {"TRITON_CACHE_DIR": folder, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", str(workers)]
        command += ["--dist", "loadfile", "-m", "compiles and not gpu" if slow else QUICK, *more]
        done = subprocess.run(command, cwd=tree, env=env, check=False)
        if done.returncode not in (0, 1):  # failing tests are the suite's business
            raise SystemExit(f"pytest ended with {done.returncode} in {tree}")
        return kernels_in(Path(folder))


def of_commit(commit: str, slow: bool, workers: int, more: list[str]) -> Kernels:
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", commit], capture_output=True, text=True, check=True).stdout.strip()
    import triton

    what = hashlib.sha256(json.dumps([slow, more, triton.__version__]).encode()).hexdigest()[:8]
    kept = KEPT / f"{commit}-{what}.json"
    if not kept.exists():
        with tempfile.TemporaryDirectory(prefix="flexsp-base-") as folder:
            tree = Path(folder) / "tree"
            subprocess.run([*git, "worktree", "add", "--detach", "--quiet", str(tree), commit], check=True)
            try:
                found = compiled(tree, slow, workers, more)
            finally:
                subprocess.run([*git, "worktree", "remove", "--force", str(tree)], check=True)
        KEPT.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(found))
    return json.loads(kept.read_text())


def compare(base: Kernels, now: Kernels) -> list[str]:
    """What differs, a line a kernel; [] if the same kernels are compiled."""
    by_name: dict[str, list[list[str]]] = collections.defaultdict(lambda: [[], []])
    for side, (ours, others) in enumerate(((base, now), (now, base))):
        for digest in ours.keys() - others.keys():
            by_name[ours[digest]["names"]][side].append(ours[digest]["text"])
    return [f"{name}: {_told(*(sorted(x) for x in both))}" for name, both in sorted(by_name.items())]


def _told(before: list[str], after: list[str]) -> str:
    if not before or not after:
        return f"{len(before)} of BASE are gone" if before else f"{len(after)} are new"
    lines = [*difflib.unified_diff(before[0].splitlines(), after[0].splitlines(), lineterm="", n=0)][2:]
    told = f"{len(before)} became {len(after)}; of the first two {len(lines)} lines differ:"
    return "\n    ".join([told, *lines[:12]])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="the commit to compare with")
    parser.add_argument("--slow", action="store_true", help="also what `make test-all` compiles")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("tests", nargs="*", help="files of tests (default: all)")
    args = parser.parse_intermixed_args()  # ARGS of make stand behind BASE: options, then files
    base = of_commit(args.base, args.slow, args.workers, args.tests)
    now = compiled(ROOT, args.slow, args.workers, args.tests)
    differing = compare(base, now)
    same = len(base.keys() & now.keys())
    print("\n".join([*differing, f"{len(base)} kernels of {args.base}, {len(now)} now, {same} the same"]))
    if not base:
        print(f"no test of {args.base} is marked `compiles`")
    return int(bool(differing) or not base)


if __name__ == "__main__":
    sys.exit(main())
