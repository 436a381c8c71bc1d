"""The list of tests/mutate.py fits the code and the tests; `make mutate` runs it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants import KINDS, files_of, mutants_of, sample, score, which_tests
from tests.mutate import ROOT, Mutation, Outcome, try_out, why_stale
from tests.mutations import MUTATIONS


def test_every_mutation_can_be_applied() -> None:
    stale = [f"{mutation}: {why}" for mutation in MUTATIONS if (why := why_stale(mutation))]
    assert not stale, "\n".join(stale)


def test_every_mutation_leaves_code_that_parses() -> None:
    """Whole files would take seconds: of each, the statements at its top level that the change is in."""
    kept: dict[str, tuple[str, list[ast.stmt]]] = {}
    for mutation in MUTATIONS:
        if mutation.file not in kept:
            text = (ROOT / mutation.file).read_text()
            kept[mutation.file] = text, ast.parse(text).body
        text, body = kept[mutation.file]
        first = text[: text.index(mutation.old)].count("\n") + 1
        last = first + mutation.old.count("\n")
        starts = [min([x.lineno, *(y.lineno for y in getattr(x, "decorator_list", []))]) for x in body]
        begin = max([start for start in starts if start <= first], default=1)
        end = min([start for start in starts if start > last], default=text.count("\n") + 2)
        part = "".join(text.splitlines(keepends=True)[begin - 1 : end - 1])
        assert part.count(mutation.old) == 1, mutation
        ast.parse(part.replace(mutation.old, mutation.new), mutation.file)


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


@pytest.mark.slow
def test_every_parameter_of_listed_tests_is_there() -> None:
    """Of files that are not skipped here."""
    listed = {test for mutation in MUTATIONS for test in mutation.tests if test.endswith("]")}
    files = sorted({test.partition("::")[0] for test in listed})
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "", *files]
    collected = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    some = {test.partition("::")[0] for test in collected}
    assert not {test for test in listed if test.partition("::")[0] in some}.difference(collected)


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
    marked = "@pytest.mark.parametrize('x', [3], ids=['a number'])\ndef test_double(x):\n    assert double(x) == 6\n"
    test.write_text("import pytest\nfrom doubling import double\n\n\n" + marked)
    before = code.read_text()
    outcome = try_out(Mutation("doubling.py", old, new, "", ("test_doubling.py",)), tmp_path, limit)
    assert outcome.kind == kind, outcome
    assert code.read_text() == before
    if kind == "killed":
        assert outcome.told == "test_doubling.py::test_double[a number]"


# Random changes -------------------------------------------------------------------------------------------------------

CODE = '''"""A doc + a string."""
from x import y

_WARPS = 4
_CALLS, _LAYOUTS = 6, 8
_MOST = tl.constexpr(8.0)  # of floats


@gluon_or_not(3)
def f(a: int, b_st: "1 - 1" = 7, *, C: tl.constexpr = 2) -> "2 + 2":
    """Less < more."""
    assert a < 3, "1 - 1"
    a < 0.5
    if length >= 0:
        pass
    if a <= 9 and not C and not a < _MOST:
        raise ValueError(f"{a - 1} < 5")
    rows = tl.load(a + C * b_st, mask=C == 0, other=0.5)
    rows = tl.where(C, rows, a).to(tl.float32).to(C) + 0.0
    tl.debug_barrier()
    tl.store(a, mm(rows.to(C), tl.trans(y.to(C)), C).to(a.dtype.element_ty))
    rows = load(b, C).to(b.dtype.element_ty) + 0 * a
    rows += tl.zeros([C], tl.float32)
    ctx.set_materialize_grads(y)
    _HOW = Launch(C, 4, 1)
    pairs = zip(a, y, strict=True)
    y.zero_()
    C -= 1
    return g(a[1:], num_warps=8, x=-C)  # < 3
'''
WANTED = {
    "constant: `7` becomes `8`", "constant: `2` becomes `3`",
    "constant: `8.0` becomes `16.0`", "logic: `not a < _MOST` becomes `a < _MOST`",
    "bound: `a <= 9` becomes `a < 9`", "constant: `9` becomes `10`", "logic: `not C` becomes `C`",
    "logic: `a <= 9 and not C and not a < _MOST` becomes `((a <= 9) or (not C) or (not a < _MOST))`",
    'dropped: `raise ValueError(f"{a - 1} < 5")` becomes `pass`',
    "sign: `a + C * b_st` becomes `a - (C * b_st)`", "stride: `C * b_st` becomes `C`",
    "logic: `C == 0` becomes `C != 0`", "constant: `0` becomes `1`",
    "mask: `tl.load(a + C * b_st, mask=C == 0, other=0.5)` becomes `tl.load(a + C * b_st)`",
    "constant: `0.5` becomes `1.0`", "constant: `0.0` becomes `1.0`", "mask: `tl.where(C, rows, a)` becomes `(rows)`",
    "dtype: `tl.where(C, rows, a).to(tl.float32).to(C)` becomes `tl.where(C, rows, a).to(tl.float32)`",
    "dropped: `tl.store(a, mm(rows.to(C), tl.trans(y.to(C)), C).to(a.dtype.element_ty))` becomes `pass`",
    "sign: `rows += tl.zeros([C], tl.float32)` becomes `rows -= tl.zeros([C], tl.float32)`",
    "dropped: `rows += tl.zeros([C], tl.float32)` becomes `pass`",
    "dtype: `tl.float32` becomes `tl.bfloat16`", "barrier: `tl.debug_barrier()` becomes `pass`",
    "dropped: `y.zero_()` becomes `pass`", "dropped: `y.zero_()` becomes `y`", "sign: `C -= 1` becomes `C += 1`",
    "dropped: `C -= 1` becomes `pass`", "constant: `1` becomes `2`", "index: `1:` becomes `:`",
    "sign: `-C` becomes `C`",
}


def _written(folder: Path, code: str) -> str:
    (folder / "flexsp").mkdir()
    (folder / "flexsp" / "some.py").write_text(code)
    return "flexsp/some.py"


def test_changes_of_each_kind(tmp_path: Path) -> None:
    """And none of docstrings, messages, types, decorators, asserts, strict, imports, numbers that only set a speed,
    branches that are always taken, or conversions that are repeated."""
    file = _written(tmp_path, CODE)
    found = mutants_of(file, tmp_path)
    assert {x.what.partition(": ")[2] for x in found} == WANTED
    assert {x.what.split(": ")[1] for x in found} == {*KINDS}
    for x in found:
        assert CODE.count(x.old) == 1
        changed = CODE.replace(x.old, x.new)
        ast.parse(changed)
        pairs = [*zip(CODE.splitlines(), changed.splitlines(), strict=True)]
        assert [f"line {n}" for n, (a, b) in enumerate(pairs, 1) if a != b] == [x.what.partition(":")[0]]


def test_of_gluon_kernels_only_barriers_are_changed(tmp_path: Path) -> None:
    file = _written(tmp_path, CODE.replace("@gluon_or_not(3)", "@gluon.jit"))
    assert [x.what.split(": ")[1] for x in mutants_of(file, tmp_path)] == ["barrier"]


def test_barriers_that_triton_puts_itself_are_left_out() -> None:
    in_walks, in_inverses = (
        {x.what.partition(": barrier: ")[2] for x in mutants_of(f"flexsp/kernels/delta/hopper_{name}.py")}
        for name in ("walks", "wy_transform")
    )
    barrier = "`gl.thread_barrier()` becomes `pass`"
    assert barrier in in_walks and in_inverses and barrier not in in_inverses


def test_a_line_that_stands_twice_is_changed_once(tmp_path: Path) -> None:
    code = "def f(x):\n    x = x + y\n    g(x)\n\n\ndef h(x):\n    x = x + y\n    g(x)\n"
    found = [x for x in mutants_of(_written(tmp_path, code), tmp_path) if ": sign: " in x.what]
    changed = [code.replace(x.old, x.new) for x in found]
    assert [x.count("x - y") for x in changed] == [1, 1] and changed[0] != changed[1]


def test_a_sample_is_drawn_from_all_kinds_and_has_tests() -> None:
    found = sample(30, 7, "flexsp/kernels/delta/*.py,flexsp/scan/*.py")
    assert len({*found}) == 30 and found == sample(30, 7, "flexsp/kernels/delta/*.py,flexsp/scan/*.py")
    assert found != sample(30, 8, "flexsp/kernels/delta/*.py,flexsp/scan/*.py")
    assert len({x.what.split(": ")[1] for x in found}) >= 7
    for x in found:
        assert x.file.startswith(("flexsp/kernels/delta/", "flexsp/scan/")) and x.tests and not why_stale(x)
        assert all((ROOT / test.partition("::")[0]).is_file() for test in x.tests)
    with pytest.raises(ValueError, match=r"--files: .* 'flexsp/nothing\*'"):
        sample(1, 0, "flexsp/nothing*")


def test_every_file_has_tests() -> None:
    """That should notice a change of it; those that list it come first."""
    without = [file for file in files_of("flexsp/*") if not which_tests(file)]
    assert not without
    assert which_tests("flexsp/kernels/table.py")[0] == "tests/kernels/test_table.py"


def test_the_score() -> None:
    kinds = ["killed"] * 3 + ["survived"] + ["no answer"] * 2
    percent, said = score(Outcome(kind) for kind in kinds)
    assert percent == 75 and said == "75 %: of 4 random changes 3 were noticed; 2 more had no answer"
    assert score([Outcome("no answer")])[0] == 0
