"""The Dockerfile, as far as it goes without Docker: its instructions, what it copies, and the releases it installs."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
KNOWN = {"FROM", "RUN", "ARG", "WORKDIR", "COPY", "ENV", "USER", "CMD"}


def instructions() -> list[tuple[str, str]]:
    """Of the file: (instruction, what stands behind it), lines joined."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    whole = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in whole.splitlines() if line]


def of(name: str) -> list[str]:
    return [rest for found, rest in instructions() if found == name]


def test_instructions_are_known_and_in_order() -> None:
    found = [name for name, _ in instructions()]
    assert {*found} <= KNOWN and found[0] == "FROM" and found[-1] == "CMD" and found.count("FROM") == 1
    assert found.index("USER") > max(i for i, name in enumerate(found) if name == "RUN")  # root installs, then no more
    (base,) = of("FROM")
    assert re.fullmatch(r"python:3\.\d+-slim-\w+", base)


def patterns() -> list[str]:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_what_is_copied_is_there_and_not_ignored() -> None:
    copied = [word for rest in of("COPY") for word in rest.split()[:-1]]
    assert {"pyproject.toml", "flexsp", "examples", "torchrun_configs"} <= {*copied}
    assert all((ROOT / name).exists() for name in copied)
    assert patterns()[0] == "*" and {f"!{name}" for name in copied} == {x for x in patterns() if x.startswith("!")}


def test_the_package_is_built_of_what_was_copied_before() -> None:
    """The files that the build reads: those that pyproject.toml names, and the package."""
    at = next(i for i, (name, rest) in enumerate(instructions()) if name == "RUN" and "--editable" in rest)
    before = {word for name, rest in instructions()[:at] if name == "COPY" for word in rest.split()[:-1]}
    project = (ROOT / "pyproject.toml").read_text()
    needed = {"pyproject.toml", "flexsp", *re.findall(r'^readme = "(.*)"', project, flags=re.MULTILINE)}
    needed |= {*re.findall(r'^license-files = \["(.*)"\]', project, flags=re.MULTILINE)}
    assert len(needed) == 4 and needed <= before


def test_releases_ran_on_gpus() -> None:
    """Those of Python and torch are of a run in docs/tested.md, and NVSHMEM is as the extra asks for it."""
    (torch,) = of("ARG")
    (python,) = re.findall(r"python:(3\.\d+)", of("FROM")[0])
    runs = (ROOT / "docs" / "tested.md").read_text().partition("<!-- tested: runs -->")[2].splitlines()
    cells = [[cell.strip() for cell in line.split("|")] for line in runs if line.startswith("| ") and "H200" in line]
    assert (python, torch.removeprefix("TORCH=")) in {(row[5], row[6]) for row in cells}
    (extra,) = re.findall(r'^nvshmem = \["(.*)"\]', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    assert any(f'"{extra}"' in rest for rest in of("RUN"))
    for rest in of("RUN"):  # what comes after torch keeps torch's libraries
        assert "pip install" not in rest or 'install --no-cache-dir "torch' in rest or "--constraint" in rest


def test_variables_are_those_of_the_scripts() -> None:
    said = dict(pair.split("=", 1) for rest in of("ENV") for pair in rest.split())
    script = (ROOT / "torchrun_configs" / "two_hosts.sh").read_text()
    (line,) = re.findall(r"^export (NCCL.*)$", script, flags=re.MULTILINE)
    exported = dict(pair.split("=") for pair in line.split())
    assert exported and exported.items() <= said.items()
    caches = {said[name].split("/")[1] for name in ("TRITON_CACHE_DIR", "FLEXSP_CODE_DIR")}
    assert all(f"chown -R flexsp: /{name}" in of("RUN")[-1] for name in caches)


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed")
def test_hadolint_has_nothing_to_say() -> None:
    done = subprocess.run(["hadolint", str(ROOT / "Dockerfile")], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
