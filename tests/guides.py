"""The scripts in the guides of docs/, written to a folder and run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def save_scripts(document: str, folder: Path) -> tuple[set[str], list[str]]:
    """(names of the scripts of a document, which are written to the folder; its other blocks)."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / document).read_text(), flags=re.DOTALL)
    scripts = {found[1]: block for block in blocks if (found := re.match(r"# (\w+\.py)\n", block))}
    for name, block in scripts.items():
        (folder / name).write_text(block)
    return set(scripts), [block for block in blocks if block not in scripts.values()]


def run_script(
    path: Path, ranks: int, *arguments: str, python: Path | None = None, **environment: str
) -> list[str]:  # fmt: skip
    """Lines that the first rank prints. ``python`` is another environment's, which has the package installed."""
    torchrun = f"-m torch.distributed.run --standalone --local-ranks-filter 0 --nproc-per-node {ranks}"
    command = [str(python or sys.executable), *(torchrun.split() if ranks > 1 else []), str(path), *arguments]
    env = os.environ | {"PYTHONPATH": "" if python else str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()
