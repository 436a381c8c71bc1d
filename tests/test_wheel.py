"""What users get: the installed package works without a checkout, and the sdist holds what its documents link to."""

from __future__ import annotations

import fnmatch
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def _project() -> str:
    return (ROOT / "pyproject.toml").read_text()


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder that holds what the wheel holds, and nothing else of the checkout."""
    assert 'packages = ["flexsp"]' in _project(), "this fixture copies what the wheel takes"
    shutil.copytree(ROOT / "flexsp", tmp_path / "site" / "flexsp", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "site"


def _run(installed: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK", "LOCAL_RANK")}
    environment |= {"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "flexsp", *words]
    where = installed.parent
    return subprocess.run(command, env=environment, cwd=where, capture_output=True, text=True, timeout=150)


def test_bench_op_runs_where_only_the_package_is(installed: Path) -> None:
    """At the sizes that a CPU takes when none are given."""
    cases = "simple_gla,kda,mlstm,generated_deltanet"
    done = _run(installed, "bench", "op", "--ops", cases, "--out", "found", "--iterations", "1")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "generated_deltanet" in done.stdout
    assert len(list((installed.parent / "found").glob("op_cpu_*.json"))) == 1


def _sdist_patterns() -> list[str]:
    (section,) = re.findall(r"\[tool\.hatch\.build\.targets\.sdist\]\ninclude = \[(.*?)\]", _project(), flags=re.DOTALL)
    return [pattern.lstrip("/") for pattern in re.findall(r'"([^"]+)"', section)]


def _in_sdist(path: str, patterns: list[str]) -> bool:
    inside = any(path == pattern or path.startswith(f"{pattern}/") for pattern in patterns)
    return inside or ("/" not in path and any(fnmatch.fnmatch(path, pattern) for pattern in patterns))


@functools.cache
def _kept(root: Path) -> set[str]:
    """Files and folders that the repository keeps: not a virtual environment or a cache that stands beside them."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True, timeout=60).stdout
    files = [Path(line) for line in listed.splitlines()]
    return {str(path) for file in files for path in (file, *file.parents)} - {"."}


def _linked(document: Path, root: Path = ROOT) -> set[str]:
    """Files and folders of the repository that a document links to or names in backticks."""
    text = document.read_text()
    links = set(re.findall(r"\]\(([^)#:]+)\)", text)) | set(re.findall(r"\]\(([^)#:]+)#[^)]*\)", text))
    named = {word for span in re.findall(r"`([^`\n]+)`", text) for word in span.split()}
    found = {os.path.normpath(document.parent / link) for link in links}
    found |= {os.path.normpath(root / name) for name in named if re.fullmatch(r"[\w.\-/]+", name)}
    return {os.path.relpath(path, root) for path in found if Path(path).exists()} & _kept(root)


DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "README.md"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_sdist_has_what_documents_link_to(document: Path) -> None:
    patterns, linked = _sdist_patterns(), _linked(document) | {str(document.relative_to(ROOT))}
    assert [path for path in sorted(linked) if not _in_sdist(path, patterns)] == []


def test_a_file_outside_the_sdist_is_noticed() -> None:
    assert not _in_sdist("docs/math.md", ["flexsp", "*.md"]) and _in_sdist("docs/math.md", ["docs"])
    assert "docs/write-a-variant.md" in _linked(ROOT / "README.md")


def test_what_git_ignores_is_no_file_of_the_repository(tmp_path: Path) -> None:
    """CONTRIBUTING.md names `.venv`, which stands there after `make test` and not before."""
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True, timeout=60)
    (tmp_path / ".gitignore").write_text(".venv/\n")
    for name in (".venv/bin/python", "docs/math.md"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    (tmp_path / "page.md").write_text("`.venv`, `.venv/bin/python`, `docs` and [mathematics](docs/math.md)")
    assert _linked(tmp_path / "page.md", root=tmp_path) == {"docs", "docs/math.md"}


@pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="hatchling is not installed")
def test_the_built_distributions_have_these_files(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
    assert {f"flexsp/variants/{path.name}" for path in (ROOT / "flexsp" / "variants").glob("*.py")} <= names
    assert not [name for name in names if not name.startswith(("flexsp/", "flexsp-"))]
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"README.md", "LICENSE", "docs/write-a-variant.md", "tests/test_wheel.py", "Makefile"} <= names
