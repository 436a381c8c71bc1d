"""What a release and its repository say of themselves: versions, classifiers, citation, forms, workflows."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import flexsp
from flexsp.launch import cli

yaml = pytest.importorskip("yaml")  # of transformers, which the dev extra leaves out for Python 3.10

ROOT = Path(__file__).resolve().parents[1]
GITHUB = ROOT / ".github"
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
PROJECT = (ROOT / "pyproject.toml").read_text()


def read(path: Path) -> dict[Any, Any]:
    return yaml.safe_load(path.read_text())


def test_the_command_prints_versions(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    torch, triton = (importlib.metadata.version(name) for name in ("torch", "triton"))
    said = f"flexsp {flexsp.__version__}, torch {torch}, triton {triton}, Python {platform.python_version()}\n"
    assert (stopped.value.code, capsys.readouterr().out) == (0, said)


def test_versions_are_printed_without_triton(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name == "triton":
            raise importlib.metadata.PackageNotFoundError(name)
        return "9.9"

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert ", torch 9.9, triton not installed, Python " in capsys.readouterr().out


def test_the_module_prints_versions_too() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flexsp", "--version"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout.split(",")[0]) == (0, f"flexsp {flexsp.__version__}")


def pythons() -> list[str]:
    return re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)


def test_classifiers_name_the_pythons_that_ran() -> None:
    runs = (ROOT / "docs" / "tested.md").read_text().partition("<!-- tested: runs -->")[2]
    ran = {line.split("|")[5].strip() for line in runs.splitlines() if line.startswith("| ") and "CPU" in line}
    assert pythons() == sorted(ran, key=lambda x: int(x.partition(".")[2]))
    (least,) = re.findall(r'requires-python = ">=(3\.\d+)"', PROJECT)
    assert pythons()[0] == least


def test_the_citation_is_of_this_version() -> None:
    found = read(ROOT / "CITATION.cff")
    (name, license) = (re.findall(rf'^{key} = "(.*)"', PROJECT, flags=re.MULTILINE)[0] for key in ("name", "license"))
    assert found["version"] == flexsp.__version__ and found["license"] == license and found["title"].startswith(name)
    assert {"cff-version", "message", "authors", "type"} <= found.keys() and found["authors"][0].keys() == {"name"}
    assert f"## {flexsp.__version__}" in (ROOT / "CHANGELOG.md").read_text()


NEEDS = {"textarea": {"label"}, "dropdown": {"label", "options"}, "checkboxes": {"label", "options"}}


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_forms_have_what_github_asks_for(path: Path) -> None:
    form = read(path)
    assert {"name", "description", "body"} <= form.keys() <= {"name", "description", "body", "labels", "title"}
    ids = [field["id"] for field in form["body"]]
    assert len({*ids}) == len(ids) and all(re.fullmatch(r"[\w-]+", x) for x in ids)
    for field in form["body"]:
        assert field.keys() <= {"type", "id", "attributes", "validations"}
        assert NEEDS[field["type"]] <= field["attributes"].keys()
        options = field["attributes"].get("options", [])
        assert not options or field["type"] != "textarea"
        assert all(isinstance(x, dict) == (field["type"] == "checkboxes") for x in options)


def commands_in(text: str) -> list[list[str]]:
    """The words of every call of the command that a document names in backticks."""
    return [words.split() for words in re.findall(r"`flexsp ([^`]+)`", text)]


@pytest.mark.parametrize("path", [*FORMS, ROOT / "SECURITY.md"], ids=lambda path: path.name)
def test_forms_name_commands_that_exist(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in commands_in(path.read_text()):
        try:
            cli.parser().parse_args(words)
        except SystemExit as stopped:
            assert stopped.code == 0 or "are required" in capsys.readouterr().err, words


def targets() -> set[str]:
    (line,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    return set(line.split())


def test_the_request_form_names_targets_that_exist() -> None:
    asked = re.findall(r"`make ([\w-]+)", (GITHUB / "PULL_REQUEST_TEMPLATE.md").read_text())
    assert len(asked) >= 4 and {*asked} <= targets()


def steps_of(job: dict[str, Any]) -> list[str]:
    """The commands of a job, once for each value of its matrix."""
    found = []
    for step in job["steps"]:
        assert (step.keys() & {"run", "uses"}) and len(step.keys() & {"run", "uses"}) == 1, step
        text = step.get("run", "")
        for name in re.findall(r"\$\{\{ matrix\.(\w+) \}\}", text):
            values = job["strategy"]["matrix"][name]
            found += [text.replace(f"${{{{ matrix.{name} }}}}", x) for x in values]
        if "matrix." not in text:
            found.append(text)
    return found


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_can_run(path: Path) -> None:
    flow = read(path)
    assert flow["name"] == path.stem and flow[True].keys() >= {"push", "pull_request"}  # YAML reads `on` as true
    assert flow["permissions"] == {"contents": "read"}
    for name, job in flow["jobs"].items():
        assert job["runs-on"] == "ubuntu-latest" and job["timeout-minutes"] <= 60, name
        assert {*([job["needs"]] if "needs" in job else [])} <= flow["jobs"].keys()
        for step in job["steps"]:
            if "uses" in step:
                assert re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]), step
            for key in step.get("with", {}):
                assert key in ("python-version", "cache", "cache-dependency-path", "name", "path"), step
        for command in steps_of(job):
            for target in re.findall(r"\bmake ([\w-]+)", command):
                assert target in targets(), command
            for words in re.findall(r"^flexsp (.*)$", command, flags=re.MULTILINE):
                if words != "--version":
                    cli.parser().parse_args(words.split())


def test_the_workflows_run_what_ci_runs() -> None:
    said = [text for path in WORKFLOWS for job in read(path)["jobs"].values() for text in steps_of(job)]
    ran = {target for text in said for target in re.findall(r"\bmake ([\w-]+)", text)}
    assert ran == {"lint", "test", "test-tools", "docs"}


def test_the_wheel_is_installed_with_every_python_and_with_the_lower_bounds() -> None:
    matrix = read(GITHUB / "workflows" / "wheel.yml")["jobs"]["install"]["strategy"]["matrix"]
    assert matrix["python"] == pythons()
    (oldest,) = matrix["include"]
    (asked,) = re.findall(r"^dependencies = \[(.*)\]", PROJECT, flags=re.MULTILINE)
    bounds = dict(re.findall(r'"(\w+)>=([\d.]+)"', asked))
    pins = dict(pin.split("==") for pin in oldest["pins"].split())
    assert pins.keys() == bounds.keys() and oldest["python"] == pythons()[0]
    for name, bound in bounds.items():
        assert [*pins[name].split("."), "0", "0"][:3] == [*bound.split("."), "0", "0"][:3], name
