"""One-line changes made from the code itself, by kind, and which tests should notice each: `make mutate --sample N`.

`mutants_of` makes all of a file, `sample` draws some. What no test could notice is left out where that can be told:
docstrings, messages, types, decorators, checks of one's own (assert), numbers that only set how fast something is, and
in Gluon kernels, which nothing interprets, all but barriers and waits, whose absence is a race in their PTX.
"""

from __future__ import annotations

import ast
import fnmatch
import functools
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from tests.harness.jobs import LONGEST
from tests.mutate import ROOT, Mutation, Outcome, copy_tree, run_tests, try_out

__all__ = ["KINDS", "files_of", "mutants_of", "sample", "score", "which_tests", "try_sample"]

# What changes how fast something is, how much is kept, or when it is given up, and no result: arguments, constants and
# variables of these names.
_SPEED = re.compile(
    r"num_warps|num_stages|maxnreg|maxsize|evict|eviction_policy|num_ctas|_?KEPT|_?MANY|_?LONG|timeout|_?LIMIT|programs"
    r"|_CALLS|_LAYOUTS|_?WARPS|stages|stacklevel|warn_only|cost|launch_pdl|PDL|poll|interval"
)
_SPARES = ("set_materialize_grads", "mark_non_differentiable")  # calls that spare autograd work, and change no number
# Files that only say how fast something is, or to whom: plans that are all right, prices, and what needs a GPU to run.
_LEFT_OUT = (
    "*/bench/*", "*/testing/*", "*/__init__.py", "*/__main__.py", "*/tiles.py", "*/cost.py",
    "*/runtime/tested_versions.py", "*/compiler/autotune.py", "*/compiler/planning/model.py",
    "*/comm/nvshmem.py", "*/comm/device.py",
)  # fmt: skip
# Files in Gluon whose barriers stand between plain accesses to shared memory, or behind a wait for copies, where Triton
# puts one if there is none: without them the machine code has no race. Needed are those behind products.
_PUT_BY_TRITON = tuple(
    f"flexsp/kernels/{name}.py"
    for name in ("gluon", "delta/hopper_gates", "delta/hopper_channels", "delta/hopper_wy_transform")
)
_NOT_IN_COPIES = ("test_bench_documents", "test_mutations", "test_package", "test_wheel")
"""They need the whole tree."""
# Tests that go through all of a folder.
_OF_FOLDERS = {
    "flexsp/ops/": ("bad_arguments", "op_edges", "peers_calls", "kept_checks", "validation"),
    "flexsp/nn/": ("layer_formulas", "start", "bad_arguments"),
    "flexsp/kernels/": ("op_edges", "fallback", "derivatives"),
    "flexsp/comm/": ("propagate", "derivatives"),
    "flexsp/grammar/": ("bad_arguments", "grammar"),
}
_OF_REFUSALS = ("test_bad_arguments", "test_validation", "test_kept_checks")
_BEGINS = "tests/runtime/test_kernel_launch.py::test_kernels_wait_for_the_one_before_in_their_first_statement"
_WAITS = ("begin", "thread_barrier", "debug_barrier", "arrived", "visible", "wait_group", "_keep_alive")
_TYPES = {"float32": "bfloat16", "float64": "float32", "int64": "int32"}
_BOUNDS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
_SIGNS = {ast.Add: "-", ast.Sub: "+"}
_ALWAYS = "length >= 0"  # a branch that is always taken, for what Triton makes of it; all in it is 0 without tokens
_STEPS = ("contiguous", "zero_", "clone", "detach", "float", "abs", "flip", "cumsum", "conj", "neg", "round")
KINDS = ("sign", "bound", "index", "mask", "stride", "dtype", "barrier", "logic", "constant", "dropped")
"""+ for -; < for <=; a slice without an end; an access or a choice without its mask; a stride left out; a rounder type;
a barrier or a wait left out; and for or, == for !=; a number one too large; a statement or a step left out."""

Change = tuple[str, ast.AST, str]  # kind, what is replaced, by what


class _Finder(ast.NodeVisitor):
    """All changes of a tree."""

    def __init__(self, text: str) -> None:
        self.lines, self.found = [x.encode() for x in text.splitlines(keepends=True)], list[Change]()
        self.converted = set[ast.AST]()  # what is converted once more where it goes, or has that type already
        found = re.findall(r"^(\w+) = (?:tl\.constexpr\()?(-?\d[\d.e-]*)\)?(?:  #.*)?$", text, re.MULTILINE)
        self.numbers = {name: ast.literal_eval(value) for name, value in found}

    def code(self, node: ast.AST) -> str:
        """As ast.get_source_segment, which splits the whole text each time."""
        assert isinstance(node, (ast.expr, ast.stmt, ast.Slice))
        lines = self.lines[node.lineno - 1 : node.end_lineno]
        lines[-1] = lines[-1][: node.end_col_offset]
        lines[0] = lines[0][node.col_offset :]
        return b"".join(lines).decode()

    def add(self, kind: str, node: ast.AST, new: str) -> None:
        assert isinstance(node, (ast.expr, ast.stmt, ast.Slice))
        if node.lineno == node.end_lineno:
            self.found.append((kind, node, new))

    def visit_all(self, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)

    # What is left out

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None: ...
    def visit_Raise(self, node: ast.Raise) -> None:
        self.add("dropped", node, "pass")

    def visit_Assert(self, node: ast.Assert) -> None: ...
    def visit_Import(self, node: ast.Import) -> None: ...
    def visit_ImportFrom(self, node: ast.ImportFrom) -> None: ...

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None and not _SPEED.fullmatch(self.code(node.target)):
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        names = [self.code(y) for x in node.targets for y in (x.elts if isinstance(x, ast.Tuple) else [x])]
        if not all(_SPEED.fullmatch(x) or x.startswith("__") for x in names):
            self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if not _SPEED.fullmatch(node.arg or ""):
            self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in self.code(node.test):
            self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name in ("__repr__", "__str__", "explain", "extra_repr"):
            return
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            if default is not None:
                self.visit(default)
        self.visit_all(node.body)

    # Changes

    def visit_BinOp(self, node: ast.BinOp) -> None:
        left, right, op = self.code(node.left), self.code(node.right), type(node.op)
        nothing = right == "0.0" or right.startswith("0 * ")
        if op in _SIGNS and not (nothing or _is_text(node.left) or _is_text(node.right)):
            self.add("sign", node, f"{left} {_SIGNS[op]} {_closed(node.right, right)}")
        if op is ast.BitAnd:
            self.add("mask", node, left)
        if op is ast.Mult and re.search(r"(_s(?!ize)[a-z]+|stride\w*)$", right):
            self.add("stride", node, left)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if re.search(r"""["']""", self.code(node)):
            return  # of a message
        if type(node.op) in _SIGNS:
            target, value = self.code(node.target), self.code(node.value)
            self.add("sign", node, f"{target} {_SIGNS[type(node.op)]}= {value}")
        self.add("dropped", node, "pass")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        value = self.code(node.operand)
        if isinstance(node.op, ast.USub):
            self.add("sign", node, value)
        elif isinstance(node.op, (ast.Not, ast.Invert)):
            self.add("logic", node, value)
        if not isinstance(node.operand, ast.Constant):
            self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if self.code(node) == _ALWAYS:
            return
        new = _BOUNDS.get(type(node.ops[0]))
        if len(node.ops) == 1 and new and not (new in ("<", "<=", ">", ">=") and self.is_real(node.comparators[0])):
            kind = "logic" if new in ("!=", "==") else "bound"
            self.add(kind, node, f"{self.code(node.left)} {new} {self.code(node.comparators[0])}")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        parts = [_closed(x, self.code(x)) for x in node.values]
        self.add("logic", node, f"({f' {new} '.join(parts)})")
        self.generic_visit(node)

    def visit_Slice(self, node: ast.Slice) -> None:
        if node.step is None and (node.lower is None) != (node.upper is None):
            self.add("index", node, ":")
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.visit(node.value)
        if not (isinstance(node.value, ast.Name) and node.value.id in ("list", "dict", "tuple", "Callable", "cast")):
            self.visit(node.slice)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self.add("logic", node, str(not value))
        elif isinstance(value, int):
            self.add("constant", node, str(value + 1))
        elif isinstance(value, float):
            self.add("constant", node, repr(2 * value if value else 1.0))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr in _TYPES and self.code(node) not in ("tl.int64", "gl.int64"):  # offsets of large tensors
            self.add("dtype", node, f"{self.code(node.value)}.{_TYPES[node.attr]}")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name, of = _name(node.func), node.func
        if name in ("load", "store"):
            masks = [x for x in node.keywords if x.arg in ("mask", "other")]
            if any(x.arg == "mask" for x in masks):
                kept = [self.code(x) for x in node.args]
                kept += [f"{x.arg}={self.code(x.value)}" for x in node.keywords if x not in masks]
                self.add("mask", node, f"{self.code(of)}({', '.join(kept)})")
        if name == "where" and len(node.args) == 3:
            self.add("mask", node, f"({self.code(node.args[1])})")
        if isinstance(of, ast.Attribute) and name in _STEPS and self.code(of.value) not in ("torch", "tl", "gl"):
            self.add("dropped", node, self.code(of.value))
        if name == "store":
            self.converted.update(node.args[1:2])
        elif name == "mm":
            self.converted.update(x.args[0] if _name(x.func) == "trans" and x.args else x
                                  for x in node.args[:2] if isinstance(x, ast.Call))  # fmt: skip
        if name == "to" and isinstance(of, ast.Attribute) and not self.settled(node, of):
            self.add("dtype", node, self.code(of.value))  # int64: of offsets that only large tensors need
        if name == "Launch":  # after its columns: how it is launched
            self.visit_all(node.args[:1])
        elif name in ("zeros", "full") and self.code(of).startswith(("tl.", "gl.")):
            self.visit_all(node.args[:-1])  # Triton takes no sum whose type changes in a loop, and others take it over
        elif name == "zip":
            self.visit_all(node.args)  # `strict` is a check of one's own
        elif name not in ("cast", "TypeVar", "warn", "getattr", "isinstance", "check_type"):
            self.generic_visit(node)

    def is_real(self, node: ast.AST) -> bool:
        """Whether it is a number with a fraction other than 0: that something equals it happens to nobody."""
        value = self.numbers.get(node.id) if isinstance(node, ast.Name) else getattr(node, "value", None)
        return isinstance(value, float) and value != 0

    def settled(self, node: ast.Call, of: ast.Attribute) -> bool:
        """Whether the type is that of offsets, which only large tensors need, or what comes of it is the same without
        this conversion. Sums and products with numbers in float32 are in float32, and those of truths are integers."""
        loaded = isinstance(of.value, ast.Call) and "load" in _name(of.value.func) and of.value.args
        same = f"{re.split(r'[ +]', self.code(of.value.args[0]))[0]}.dtype.element_ty" if loaded else None
        types = {*map(self.code, node.args)}
        return "int64" in self.code(node) or node in self.converted or bool(types & {same, "tl.float32", "tl.int32"})

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Call):
            return  # docstrings, yield
        if _name(node.value.func) in _SPARES:
            return
        self.add("barrier" if _name(node.value.func) in _WAITS else "dropped", node, "pass")
        self.visit(node.value)


def _name(func: ast.AST) -> str:
    return func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, (ast.JoinedStr, ast.List, ast.Tuple)) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _closed(node: ast.AST, code: str) -> str:
    return code if isinstance(node, (ast.Name, ast.Constant, ast.Call, ast.Attribute, ast.Subscript)) else f"({code})"


# Of a file ------------------------------------------------------------------------------------------------------------


def mutants_of(file: str, root: Path = ROOT) -> list[Mutation]:
    """All changes of a file that are on one line; without their tests. One in a thousand leaves code that does not
    parse, which `sample` draws again."""
    text = (root / file).read_text()
    finder = _Finder(text)
    finder.visit(ast.parse(text, file))
    in_gluon = re.search(r"^@gluon\.jit", text, re.MULTILINE) is not None
    found: list[Mutation] = []
    for kind, node, new in finder.found:
        assert isinstance(node, (ast.expr, ast.stmt, ast.Slice))
        put_anyway = file in _PUT_BY_TRITON and finder.code(node) == "gl.thread_barrier()"
        if in_gluon and (kind != "barrier" or put_anyway):
            continue
        made = _changed(text, node.lineno, node.col_offset, node.end_col_offset or 0, new)
        if made is not None:
            what = f"line {node.lineno}: {kind}: `{finder.code(node)}` becomes `{new}`"
            found.append(Mutation(file, *made, what, ()))
    return list(dict.fromkeys(found))


def _changed(text: str, line: int, start: int, stop: int, new: str) -> tuple[str, str] | None:
    """(text that the file has once, with whole lines around the change; what it becomes)."""
    lines = text.splitlines(keepends=True)
    raw = lines[line - 1].encode()
    changed = (raw[:start] + new.encode() + raw[stop:]).decode()
    for around in range(12):
        a, b = max(0, line - 1 - around), min(len(lines), line + around)
        before, after = "".join(lines[a : line - 1]), "".join(lines[line:b])
        if text.count(before + lines[line - 1] + after) == 1:
            return before + lines[line - 1] + after, before + changed + after
    return None


def _parses(mutation: Mutation, root: Path) -> bool:
    try:
        ast.parse((root / mutation.file).read_text().replace(mutation.old, mutation.new))
    except SyntaxError:
        return False
    return True


def files_of(glob: str, root: Path = ROOT) -> list[str]:
    """Files of flexsp/ that a pattern names, several of them apart by commas."""
    every = sorted(str(x.relative_to(root)) for x in (root / "flexsp").rglob("*.py"))
    chosen = [x for x in every if any(fnmatch.fnmatch(x, one) for one in glob.split(","))]
    return [x for x in chosen if not any(fnmatch.fnmatch(x, one) for one in _LEFT_OUT)]


def sample(n: int, seed: int, glob: str = "flexsp/*", root: Path = ROOT) -> list[Mutation]:
    """So many changes, with their tests: the same for the same seed and code. A kind is drawn first, so that rare ones
    come as often as frequent ones."""
    files = files_of(glob, root)
    if not files:
        raise ValueError(f"--files: expected a pattern of files with code to change, none of flexsp/ is {glob!r}")
    draw = random.Random(seed)
    by_kind: dict[str, list[Mutation]] = {}
    for file in files:
        for x in mutants_of(file, root):
            by_kind.setdefault(x.what.split(": ")[1], []).append(x)
    chosen: dict[Mutation, None] = {}
    left = {kind: draw.sample(found, len(found)) for kind, found in sorted(by_kind.items())}
    while len(chosen) < n and any(left.values()):
        one = left[draw.choice([x for x in left if left[x]])].pop()
        if _parses(one, root):
            chosen[one] = None
    tests = functools.cache(lambda file: which_tests(file, root))
    return [Mutation(x.file, x.old, x.new, x.what, _in_order(x, tests(x.file))) for x in chosen]


def _in_order(mutation: Mutation, tests: tuple[str, ...]) -> tuple[str, ...]:
    """The interpreter shows no barriers of shared memory that are left out: only tests of compiled kernels are of use
    then, where the file has some. Of other changes they tell least and take longest: they come last, after other long
    files."""
    compiled = tuple(x for x in tests if "compile" in x or "offline" in x)
    if "`begin(PDL)`" in mutation.what:
        return (_BEGINS,)
    if ": barrier: " in mutation.what and "tl.debug_barrier" not in mutation.what:
        return compiled or tests
    refusal = re.search(r"dropped: `(raise|check\w*\.|\w*(fail|check)\w*\()", mutation.what)

    def place(test: str) -> tuple[bool, bool, bool]:
        first = refusal is not None and Path(test).stem in _OF_REFUSALS
        return not first, test in compiled, "::" not in test and Path(test).stem in LONGEST

    return tuple(sorted(tests, key=place))


def _stages(tests: Sequence[str]) -> list[list[str]]:
    """Arguments of pytest: first the tests that are named, then whole files without these. In one run pytest has the
    tests of a file in their own order."""
    named = [x for x in tests if "::" in x]
    whole = [x for x in tests if "::" not in x]
    again = [f"--deselect={x}" for x in named if x.partition("::")[0] in whole and "[" not in x]
    return [x for x in (named, [*whole, *again] if whole else []) if x]


def _try_stages(mutation: Mutation, tree: Path, limit: float) -> Outcome:
    """Slow tests are left out: one of `make test` has to notice a change."""
    for tests in _stages(mutation.tests):
        outcome = try_out(replace(mutation, tests=tuple(tests)), tree, limit, slow=False)
        if outcome.kind != "survived":
            return outcome
    return Outcome("survived", " ".join(mutation.tests))


# Which tests ----------------------------------------------------------------------------------------------------------


def which_tests(file: str, root: Path = ROOT, most: int = 12) -> tuple[str, ...]:
    """Tests that should notice a change of a file, those that tell most first: what tests/mutations.py has for it;
    files of tests that import it, or are named after it; what tests/mutations.py has for files that import it; tests
    that go through all of its folder; what tests/mutations.py has for the folder."""
    from tests.mutations import MUTATIONS

    path = Path(file)
    module = ".".join(path.with_suffix("").parts)
    listed = Counter(test for x in MUTATIONS if x.file == file for test in x.tests)
    beside = Counter(
        test.partition("::")[0] for x in MUTATIONS if Path(x.file).parent == path.parent for test in x.tests
    )
    own, folder = re.compile(rf"\b{re.escape(module)}\b"), f"from {module.rpartition('.')[0]} import "
    from_folder = re.compile(rf"{re.escape(folder)}[^\n]*\b{path.stem}\b")

    def imports(text: str) -> bool:
        return bool((module in text and own.search(text)) or (folder in text and from_folder.search(text)))

    def named(test: str) -> bool:
        return path.stem.strip("_") in Path(test).stem.split("_") or Path(test).stem.startswith(f"test_{path.stem}")

    users = {name for name, text in _files(root).items() if name != file and imports(text)}
    of_users = Counter(test for x in MUTATIONS if x.file in users for test in x.tests)
    files = [name for name, text in _test_files(root).items() if imports(text) or named(name)]
    files.sort(key=lambda name: not (named(name) or imports((root / name).read_text())))  # else by way of tests/harness
    folders = [names for folder, names in _OF_FOLDERS.items() if file.startswith(folder)]
    stems = {f"test_{name}" for names in folders for name in names}
    of_all = [test for test in _test_files(root) if Path(test).stem in stems]
    most_of = [[test for test, _ in found.most_common(3)] for found in (of_users, beside)]
    ranked = [*[test for test, _ in listed.most_common()], *files[:8], *most_of[0], *of_all, *most_of[1]]
    kept: list[str] = []
    for test in dict.fromkeys(ranked):
        whole = test.partition("::")[0]
        if whole not in kept and len({x.partition("::")[0] for x in [*kept, whole]}) <= most:
            kept.append(test)
    return tuple(kept)


@functools.cache
def _files(root: Path) -> dict[str, str]:
    """The text of each file of flexsp/."""
    return {str(x.relative_to(root)): x.read_text() for x in (root / "flexsp").rglob("*.py")}


@functools.cache
def _test_files(root: Path) -> dict[str, str]:
    """The text of each, and of what it imports of tests/harness/."""
    shared = {x.stem: x.read_text() for x in (root / "tests" / "harness").glob("*.py")}
    paths = [x for x in sorted((root / "tests").rglob("test_*.py")) if "gpu" not in x.parts]
    found = {str(x.relative_to(root)): x.read_text() for x in paths}
    names = {name: re.findall(r"tests\.harness(?:\.| import )(\w+)", text) for name, text in found.items()}
    with_shared = {name: text + "".join(shared.get(x, "") for x in names[name]) for name, text in found.items()}
    return {name: text for name, text in with_shared.items() if Path(name).stem not in _NOT_IN_COPIES}


# Results --------------------------------------------------------------------------------------------------------------


def try_sample(mutations: Sequence[Mutation], limit: float) -> dict[Mutation, Outcome]:
    """What became of each, one by one in a copy of the tree; prints them as they come.

    The tests do not run without a change first, which would take as long as all tests do: a test that fails is run
    again without the change, and counts only if it passes then.
    """
    found: dict[Mutation, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="flexsp-mutate-") as folder:
        tree = copy_tree(Path(folder) / "tree")
        passes = functools.cache(lambda test: run_tests(tree, [test], limit)[0] == 0)
        for mutation in mutations:
            begun = time.monotonic()
            outcome = _try_stages(mutation, tree, limit)
            if outcome.kind == "killed" and not passes(outcome.told):
                outcome = Outcome("no answer", f"{outcome.told} fails without the change too")
            found[mutation] = outcome
            print(f"{outcome.kind:9} {time.monotonic() - begun:4.0f} s  {mutation}  [{outcome.told}]", flush=True)
    return found


def score(outcomes: Iterable[Outcome]) -> tuple[float, str]:
    """(percent of the changes that tests noticed, of those with an answer; the same in words)."""
    kinds = Counter(outcome.kind for outcome in outcomes)
    answered, without = kinds["killed"] + kinds["survived"], kinds["no answer"] + kinds["stale"]
    percent = 100 * kinds["killed"] / answered if answered else 0.0
    said = f"{percent:.0f} %: of {answered} random changes {kinds['killed']} were noticed"
    return percent, said + (f"; {without} more had no answer" if without else "")
