"""The list of tests/mutate.py fits the code and the tests; `make mutate` runs it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutate import ROOT, Mutation, try_out, why_stale
from tests.mutations import MUTATIONS


def test_every_mutation_can_be_applied() -> None:
    stale = [f"{mutation}: {why}" for mutation in MUTATIONS if (why := why_stale(mutation))]
    assert not stale, "\n".join(stale)


def test_every_mutation_leaves_code_that_parses() -> None:
    for mutation in MUTATIONS:
        ast.parse((ROOT / mutation.file).read_text().replace(mutation.old, mutation.new), mutation.file)


def test_every_mutation_stands_once_and_has_tests_that_are_there() -> None:
    assert len({(x.file, x.old, x.new) for x in MUTATIONS}) == len(MUTATIONS)
    defined: dict[str, set[str]] = {}
    for mutation in MUTATIONS:
        assert mutation.tests and mutation.what, mutation
        for test in mutation.tests:
            file, _, name = test.partition("::")
            if file not in defined:
                tree = ast.parse((ROOT / file).read_text())
                defined[file] = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert not name or name.partition("[")[0] in defined[file], f"{mutation}: no test {test}"


@pytest.mark.parametrize(
    ("old", "new", "kind", "limit"),
    [
        ("x * 2", "x * 3", "killed", 120.0),
        ("UNSEEN = 1", "UNSEEN = 2", "survived", 120.0),
        ("x * 4", "x * 5", "stale", 120.0),
        ("x", "y", "stale", 120.0),  # not once
        ("return x", "while True: x", "no answer", 3.0),
        ("def double", "def twice", "no answer", 120.0),  # tests are not found
    ],
)
def test_what_becomes_of_a_mutation(old: str, new: str, kind: str, limit: float, tmp_path: Path) -> None:
    code, test = tmp_path / "doubling.py", tmp_path / "test_doubling.py"
    code.write_text("def double(x):\n    return x * 2\n\n\nUNSEEN = 1\n")
    test.write_text("from doubling import double\n\n\ndef test_double():\n    assert double(3) == 6\n")
    before = code.read_text()
    outcome = try_out(Mutation("doubling.py", old, new, "", ("test_doubling.py",)), tmp_path, limit)
    assert outcome.kind == kind, outcome
    assert code.read_text() == before
    if kind == "killed":
        assert outcome.told == "test_doubling.py::test_double"
