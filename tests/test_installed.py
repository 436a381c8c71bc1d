"""What a user's first commands do, in an environment that holds the package and what it asks for, and nothing else."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.guides import ROOT, run_script, save_scripts
from tests.marks import slow

HIDDEN = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
TIMEOUT_S = 280.0


def asked_for() -> list[str]:
    (line,) = re.findall(r"^dependencies = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    return re.findall(r'"([^"]+)"', line)


def link(requirements: list[str], site: Path, done: set[str]) -> None:
    """Links to these distributions of this environment and to all that they ask for."""
    for text in requirements:
        wanted = Requirement(text)
        if wanted.name in done or (wanted.marker is not None and not wanted.marker.evaluate({"extra": ""})):
            continue
        done.add(wanted.name)
        there = importlib.metadata.distribution(wanted.name)
        assert wanted.specifier.contains(there.version, prereleases=True), f"{text}: {there.version} is installed"
        for top in {file.parts[0] for file in there.files or []} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(there.locate_file(top))).resolve())
        link(there.requires or [], site, done)


def linked(folder: Path, without: str = "") -> Path:
    """The interpreter of an environment with links to what pip would install there, which takes no time."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    shutil.copytree(ROOT / "flexsp", site / "flexsp", ignore=shutil.ignore_patterns("__pycache__"))
    link([text for text in asked_for() if Requirement(text).name != without], site, {without})
    return folder / "bin" / "python"


def by_pip(folder: Path) -> Path:
    """The interpreter of an environment into which pip installs the wheel that it builds."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    torch = importlib.metadata.version("torch").partition("+")[0]
    for words in (
        ["wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT)],
        ["install", str(folder / "flexsp-*.whl"), f"torch=={torch}"],
    ):
        words = [str(*folder.glob("flexsp-*.whl")) if word.endswith("*.whl") else word for word in words]
        done = subprocess.run([str(python), "-m", "pip", *words], capture_output=True, text=True, timeout=TIMEOUT_S)
        assert done.returncode == 0, done.stderr
    return python


@pytest.fixture(scope="module", params=["linked", *slow("by pip")])
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = linked if request.param == "linked" else by_pip
    return made(tmp_path_factory.mktemp("environment"))


def run(python: Path, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    names = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "PYTHONPATH", "TRITON_INTERPRET", "FLEXSP_BACKEND")
    environment = {name: value for name, value in os.environ.items() if name not in names} | HIDDEN
    command = [str(python), *words]
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_S)


def test_readme_examples_run(python: Path, tmp_path: Path) -> None:
    pages = [ROOT / "README.md", ROOT / "docs" / "use.md", ROOT / "docs" / "compose.md"]
    found = {page.name: re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL) for page in pages}
    assert all(found.values())
    each = [
        f"exec(compile({block!r}, {name!r}, 'exec'), {{'__name__': '__main__'}})"
        for name, blocks in found.items() for block in blocks
    ]  # fmt: skip
    where = f"import flexsp; assert not flexsp.__file__.startswith({str(ROOT)!r})"
    done = run(python, "-c", "\n".join(["import torch", "torch.set_num_threads(1)", where, *each]), cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_tutorial_runs(python: Path, tmp_path: Path) -> None:
    """Its scripts, on one rank and on several: the same losses. Its other blocks.

    What takes time are the processes that start, so one runs the blocks and a script, and each rank both scripts.
    """
    scripts, others = save_scripts("tutorial.md", tmp_path)
    assert scripts == {"train.py", "check.py"} and len(others) >= 2
    train, check = (f"import runpy\nrunpy.run_path({name!r}, run_name='__main__')" for name in ("train.py", "check.py"))
    done = run(python, "-c", "\n".join([*others, train]), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "both.py").write_text(f"import os\nos.chdir({str(tmp_path)!r})\n{train}\n{check}\n")
    alone, cut = done.stdout.splitlines(), run_script(tmp_path / "both.py", 3, python=python, **HIDDEN)
    assert alone == cut[:3] and len(alone) == 3 and float(alone[-1].split()[-1]) < 1.0
    exact, found = (line for line in cut if "over 3 ranks" in line)
    assert exact.startswith("exact over 3 ranks") and found.startswith("not exact") and "(Difference)" in found


def test_doctor_tests_this_machine(python: Path, tmp_path: Path) -> None:
    """The whole command as a user runs it: ops on the CPU against float64, and 2 ranks against one."""
    done = run(python, "-m", "flexsp", "doctor", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for text in ("ops on the CPU", "2 CPU ranks", "process_group", "flexsp doctor: no failure"):
        assert text in done.stdout


def test_doctor_names_numpy_where_it_is_missing(tmp_path: Path) -> None:
    """And ranks say what torch says; they do not blame a neighbour."""
    python = linked(tmp_path / "environment", without="numpy")
    done = run(python, "-m", "flexsp", "doctor", cwd=tmp_path)
    assert done.returncode == 1 and re.search(r"FAIL  numpy +not installed: .*pip install numpy", done.stdout)
    (tmp_path / "start.py").write_text("import flexsp\nflexsp.init_sequence_parallel()\n")
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "start.py"]
    done = run(python, *words, cwd=tmp_path)
    assert done.returncode == 1 and "RuntimeError: Numpy is not available" in done.stderr
    assert "PeerTimeout" not in done.stderr
