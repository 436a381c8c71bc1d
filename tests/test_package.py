"""What holds for the package as a whole: imports, public names, documents that are true of the files."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import flexsp.variants
from flexsp.testing.ranks import _FOR_KERNELS
from tests.guides import run_script, save_scripts
from tests.harness.interpreted import INTERPRETED
from tests.harness.jobs import LONGEST, TOOLS
from tests.variants import VARIANTS

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "flexsp").rglob("*.py"))
DOCUMENTS = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")]
DOCUMENTS += sorted((ROOT / "flexsp").rglob("README.md"))
DOCUMENTS += sorted(path for path in (ROOT / "docs").glob("*.md") if path.name != "changelog.md")
PUBLIC = (
    "flexsp", "flexsp.ops", "flexsp.nn", "flexsp.nn.attention", "flexsp.compiler", "flexsp.variants", "flexsp.grammar",
    "flexsp.integrations", "flexsp.integrations.fla", "flexsp.integrations.transformers",
)  # fmt: skip

# Who may import whom. `exceptions` and `log` are below everything; ahead, bench, testing and the command are above.
BELOW = {
    "exceptions": set(),
    "devices": set(),
    "comm": {"exceptions"},
    "runtime": {"exceptions", "devices"},
    "scan": {"exceptions", "devices", "comm", "runtime"},
    "kernels": {"exceptions", "devices", "comm", "runtime", "scan"},
    "compiler": {"exceptions", "devices", "comm", "runtime", "scan", "kernels"},
    "ops": {"exceptions", "comm", "runtime", "scan", "kernels", "compiler", "variants"},
    "nn": {"exceptions", "comm", "scan", "kernels", "compiler", "variants", "ops"},
    "variants": {"exceptions", "devices", "comm", "scan", "kernels", "compiler"},
    "grammar": {"exceptions", "comm", "scan", "kernels", "ops", "compiler", "variants"},
    "integrations": {"exceptions", "comm", "scan", "ops", "nn"},
    "planner": {"exceptions", "devices", "scan", "nn", "integrations"},
    "launch": {"exceptions", "comm", "scan"},
}
BELOW = {room: rooms | {"log"} for room, rooms in BELOW.items()} | {"log": set()}
ABOVE_ALL = {"flexsp", "__main__", "ahead", "bench", "testing", "launch.cli", "launch.doctor"}

# The compiler's folders, from the bottom up; modules beside them are above all.
FLOORS = ("frontend", "graphs", "backend", "planning")

BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"triton", "nvshmem", "cuda"}:
            raise ModuleNotFoundError(f"{name} is blocked in this test", name=name)

sys.meta_path.insert(0, Blocked())
"""


def run_python(code: str, timeout: float = 280) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_works_without_triton_and_nvshmem() -> None:
    code = BLOCKED + (
        "import torch, flexsp, flexsp.ops, flexsp.nn\n"
        "q, k, v = (torch.randn(1, 40, 2, 16, requires_grad=True) for _ in range(3))\n"
        "o, _ = flexsp.ops.chunk_simple_gla(q, k, v, g=-torch.rand(1, 40, 2))\n"
        "o.sum().backward()\n"
        "assert q.grad.isfinite().all()\n"
        "assert not {name.partition('.')[0] for name in sys.modules} & {'triton', 'nvshmem', 'cuda'}\n"
        "print('done')\n"
    )
    assert run_python(code).strip() == "done"


def test_imports_are_light() -> None:
    """torch.compile, sympy and Triton are loaded where they are used, each slower to import than flexsp."""
    heavy = {"fla", "matplotlib", "rich", "sympy", "torch._dynamo", "torch._inductor", "transformers", "triton"}
    heavy |= {"torch.fx.experimental.proxy_tensor", "torch.fx.experimental.symbolic_shapes"}
    code = (
        "import sys, torch\n"
        f"heavy = {heavy} - set(sys.modules)\n"
        "assert 'torch._dynamo' in heavy\n"
        f"import {', '.join(PUBLIC)}, flexsp.launch.cli\n"
        "q, k, v = torch.randn(3, 1, 20, 2, 16, requires_grad=True)\n"
        "flexsp.ops.chunk_linear_attn(q, k, v)[0].sum().backward()\n"
        "flexsp.ops.chunk_delta_rule(q, k, v, beta=torch.rand(1, 20, 2))[0].sum().backward()\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    run_python(code)


def test_the_block_blocks() -> None:
    code = BLOCKED + "\ntry:\n    import triton\nexcept ImportError as error:\n    print(error)\n"
    assert "blocked in this test" in run_python(code)


def room_of(module: str) -> str:
    """flexsp.comm.heap -> comm; the command's modules are rooms of their own."""
    parts = module.split(".")
    if len(parts) == 1:
        return "flexsp"
    name = ".".join(parts[1:3])
    return name if name in ABOVE_ALL else parts[1]


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in SOURCES}


@functools.cache
def imported_modules(source: str) -> tuple[str, ...]:
    """Modules of flexsp that a file imports: anywhere, for types alone, or by a name that it builds."""
    nodes = [*ast.walk(ast.parse(source))]
    return (*imported_in(nodes), *named_in(nodes))


def imported_in(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] == "flexsp")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the direction"
            if node.module and node.module.partition(".")[0] == "flexsp":
                for alias in node.names:
                    deeper = f"{node.module}.{alias.name}"
                    yield deeper if deeper in MODULES else node.module


def named_in(nodes: list[ast.AST]) -> Iterator[str]:
    """Modules that strings name, where a file imports by name: one, or all that begin like an f-string or a sum."""
    called = {getattr(x, "attr", None) or getattr(x, "id", None) or getattr(x, "name", None) for x in nodes}
    for node in nodes if called & {"import_module", "__import__"} else ():
        begins = node.values[:1] if isinstance(node, ast.JoinedStr) else []
        begins = [node.left] if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) else begins
        whole = isinstance(node, ast.Constant) and not str(node.value).endswith(".")
        for x in [node] if whole else begins:
            text = str(x.value) if isinstance(x, ast.Constant) else ""
            if text.startswith("flexsp."):
                yield from (name for name in MODULES if name == text or (text.endswith(".") and name.startswith(text)))


def wrong_imports(module: str, source: str) -> list[str]:
    room = room_of(module)
    if room in ABOVE_ALL:
        return []
    allowed = BELOW[room] | {room}
    return [name for name in imported_modules(source) if room_of(name) not in allowed]


def test_imports_point_one_way() -> None:
    wrong = {module_of(path): wrong_imports(module_of(path), path.read_text()) for path in SOURCES}
    assert {module: names for module, names in wrong.items() if names} == {}


def imported_tests(source: str) -> list[str]:
    """Test files that a file imports, of the package `tests` or by their bare names."""
    named: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            named += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            named += [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
    files = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    return [x for x in named if x.partition(".")[0] in files or (x.startswith("tests.") and files & {*x.split(".")})]


def test_no_test_file_imports_another() -> None:
    """What tests share stands in tests/harness/ and in the files beside it that are no tests."""
    found = {path.name: imported_tests(path.read_text()) for path in sorted((ROOT / "tests").rglob("*.py"))}
    assert {name: tests for name, tests in found.items() if tests} == {}
    for source in ("from test_group import x", "import tests.comm.test_group as y", "from tests import test_group"):
        assert imported_tests(source)


def circles(edges: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Modules that import each other, directly or by way of others: strongly connected components of two and more."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    path: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        path.append(name)
        for other in edges.get(name, ()):
            if other not in order:
                visit(other)
            if other in path:
                low[name] = min(low[name], low[other])
        if low[name] == order[name]:
            members = path[path.index(name) :]
            del path[-len(members) :]
            found.extend([sorted(members)] if len(members) > 1 else [])

    for name in edges:
        if name not in order:
            visit(name)
    return found


def test_no_circle_of_imports() -> None:
    """Inside functions, for types alone, by importlib: wherever a file names another."""
    edges = {name: {*imported_modules(path.read_text())} - {name} for name, path in MODULES.items()}
    assert circles(edges) == []


@pytest.mark.parametrize(
    "source",
    [
        "from flexsp.comm import heap",
        "def f():\n    import flexsp.comm.heap",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from flexsp.comm.heap import SymmetricHeap",
        "import importlib\nimportlib.import_module('flexsp.comm.heap')",
        "from importlib import import_module as load\nload(f'flexsp.comm.{name}')",
        "import importlib\nfor name in ['flexsp.comm.heap']:\n    importlib.import_module(name)",
        "import importlib\nimportlib.import_module('flexsp.comm.' + name)",
    ],
)
def test_a_circle_is_noticed(source: str) -> None:
    edges = {"flexsp.exceptions": {*imported_modules(source)}}
    edges |= {"flexsp.comm.heap": {"flexsp.comm.group"}, "flexsp.comm.group": {"flexsp.exceptions", "flexsp.devices"}}
    assert circles(edges) == [["flexsp.comm.group", "flexsp.comm.heap", "flexsp.exceptions"]]
    assert circles(edges | {"flexsp.comm.group": {"flexsp.devices"}}) == []


def climbing_imports(module: str, source: str) -> list[str]:
    """Imports of the compiler's higher floors."""
    above = [name for name in imported_modules(source) if name.startswith("flexsp.compiler.")]
    return [name for name in above if floor_of(name) > floor_of(module)]


def floor_of(module: str) -> int:
    parts = module.split(".")
    return FLOORS.index(parts[2]) if len(parts) > 2 and parts[2] in FLOORS else len(FLOORS)


def test_the_compilers_floors() -> None:
    modules = {module_of(path): path for path in SOURCES if "compiler" in path.parts}
    assert {name.split(".")[2] for name in modules if name.count(".") == 3} == set(FLOORS)
    wrong = {name: climbing_imports(name, path.read_text()) for name, path in modules.items()}
    assert {module: names for module, names in wrong.items() if names} == {}
    assert climbing_imports("flexsp.compiler.frontend.check", "from flexsp.compiler.graphs import values")


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("flexsp.comm.heap", "from flexsp.scan import schedules"),
        ("flexsp.kernels.diagonal.op", "def f():\n    import flexsp.ops"),
        ("flexsp.ops.simple_gla", "from flexsp import nn"),
        ("flexsp.scan.exchange", "import flexsp"),
        ("flexsp.launch.bootstrap", "from flexsp.launch.cli import main"),
        ("flexsp.nn.layers", "from flexsp.testing.oracles import simple_gla"),
    ],
)
def test_an_upward_import_is_noticed(module: str, source: str) -> None:
    assert wrong_imports(module, source)


def wrong_exports(module: str, source: str) -> list[str]:
    """Read from the source, so that files whose import needs Triton are covered too."""
    tree = ast.parse(source)
    exported = next((ast.literal_eval(node.value) for node in tree.body if is_all(node)), [])
    if module in PUBLIC and not exported:
        return ["a public module lists its names in __all__"]
    names = defined_names(tree)
    if "__getattr__" in names:  # a package that imports its names when they are asked for
        names |= {name for name in exported if hasattr(importlib.import_module(module), name)}
    return [name for name in exported if name not in names or exported.count(name) > 1]


def test_exported_names_exist() -> None:
    wrong = {module_of(path): wrong_exports(module_of(path), path.read_text()) for path in SOURCES}
    assert {module: names for module, names in wrong.items() if names} == {}


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("flexsp.comm.heap", "__all__ = ['f', 'g']\ndef f(): pass", ["g"]),
        ("flexsp.comm.heap", "__all__ = ['f', 'f']\nif True:\n    def f(): pass", ["f", "f"]),
        ("flexsp.ops", "def f(): pass", ["a public module lists its names in __all__"]),
        ("flexsp.testing", "__all__ = ['run_ranks', 'g']\ndef __getattr__(name): pass", ["g"]),
        ("flexsp.comm.heap", "__all__ = ['f']\nfrom x import y as f", []),
    ],
)
def test_a_wrong_export_is_noticed(module: str, source: str, wrong: list[str]) -> None:
    assert wrong_exports(module, source) == wrong


def is_all(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)


def defined_names(tree: ast.Module) -> set[str]:
    """Names bound at module level, inside `if` and `try` too."""
    names: set[str] = set()
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        else:
            pending.extend(ast.iter_child_nodes(node))
    return names


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_resolve_and_are_documented(name: str) -> None:
    module = importlib.import_module(name)
    for public in module.__all__:
        value = getattr(module, public)
        if callable(value):
            assert (value.__doc__ or "").strip(), f"{name}.{public} has no docstring"


def test_files_stay_short() -> None:
    folders = ("flexsp", "tests", "examples", "benchmarks")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert {str(p.relative_to(ROOT)): n for p in paths if (n := len(p.read_text().splitlines())) > 600} == {}


def test_the_guide_to_variants_runs() -> None:
    """Its blocks are one program."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "write-a-variant.md").read_text(), flags=re.DOTALL)
    assert len(blocks) >= 4
    run_python("import torch\ntorch.set_num_threads(1)\n" + "\n".join(blocks))


def test_the_guide_to_hybrid_models_runs(tmp_path: Path) -> None:
    _, blocks = save_scripts("hybrid-models.md", tmp_path)
    assert len(blocks) == 2
    run_python("import torch\ntorch.set_num_threads(1)\n" + "\n".join(blocks))


@pytest.mark.slow
def test_the_guide_to_transports_runs(tmp_path: Path) -> None:
    """Its transport, under the interpreter; and it is what sends: one that doubles tiles gives another result."""
    assert save_scripts("add-a-transport.md", tmp_path) == ({"staged.py", "run.py"}, [])
    (line,) = run_script(tmp_path / "run.py", 3, **INTERPRETED)
    assert line.startswith("rank 0 over staged: off by")
    code = (tmp_path / "staged.py").read_text()
    (tmp_path / "staged.py").write_text(code.replace("tl.load(stage + offsets, mask=mask)", "tile * 2"))
    with pytest.raises(AssertionError, match="off by"):
        run_script(tmp_path / "run.py", 2, **INTERPRETED)


@pytest.mark.slow
def test_the_guide_to_engines_runs(tmp_path: Path) -> None:
    """Its engine, under the interpreter; and it is what runs: other kept states give other gradients."""
    assert save_scripts("add-an-engine.md", tmp_path) == ({"keeping.py", "compare.py"}, [])
    interpreted = INTERPRETED | {"FLEXSP_CODE_DIR": str(tmp_path)}
    assert run_script(tmp_path / "compare.py", 1, **interpreted) == ["as generated"]
    code = (tmp_path / "keeping.py").read_text()
    (tmp_path / "keeping.py").write_text(code.replace("K * V, S, 0, v0, True, K", "K * V, 2 * S, 0, v0, True, K"))
    with pytest.raises(AssertionError, match="1e-5"):
        run_script(tmp_path / "compare.py", 1, **interpreted)


def test_every_variant_has_a_token_loop() -> None:
    makes = re.compile(r"^(def make\(|make = )", flags=re.MULTILINE)
    files = {path.stem for path in (ROOT / "flexsp" / "variants").glob("*.py") if makes.search(path.read_text())}
    assert files == {*flexsp.variants.__all__}, "flexsp/variants/__init__.py: expected every file with a `make`"
    assert files == {*VARIANTS}, "tests/variants.py: expected a row in VARIANTS for every variant"


def test_the_reference_has_every_public_name() -> None:
    """`::: path` in docs/reference, or a member of what stands there."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        expanded = importlib.import_module("reference").expanded
    finally:
        sys.path.remove(str(ROOT / "docs"))
    pages = "\n".join(expanded(page.read_text()) for page in (ROOT / "docs" / "reference").glob("*.md"))
    objects, listed = [], [*re.findall(r"^::: (\S+)", pages, flags=re.MULTILINE)]
    for path in listed:
        module, _, name = path.rpartition(".")
        home = importlib.import_module(module)
        objects.append(getattr(home, name) if hasattr(home, name) else importlib.import_module(path))
    members = {name for line in re.findall(r"members: \[(.*)\]", pages) for name in line.split(", ")}
    missing = [
        f"{module}.{name}" for module in PUBLIC for name in importlib.import_module(module).__all__
        if not any(getattr(importlib.import_module(module), name) is x for x in objects) and name not in members
        and f"{module}.{name}" not in PUBLIC
    ]  # fmt: skip
    assert not missing


def named_paths(text: str) -> set[str]:
    """What a document names in backticks and looks like a file or folder of the repository."""
    words = {word for span in re.findall(r"`([^`\n]+)`", text) for word in span.split()}
    links = set(re.findall(r"\]\(([^)#:]+)\)", text))
    path = re.compile(r"[\w.\-/]*/|[\w.\-/]+\.(py|md|txt|toml|sh|sbatch|yaml|json|png)|Makefile|LICENSE|\.ci/run")
    return {word for word in words if path.fullmatch(word)} | links


def made_by_use(path: str) -> bool:
    made = {"metrics.jsonl", "loss.png", "sample.txt", "checkpoint.pt", "train.py", "check.py", "staged.py", "run.py"}
    made |= {"rank_N.json"}
    made |= {"finetune.py", "pretrain.py", "layer.py", "trainer.py", "own.py", "checkpoints/", "model/"}
    return path.startswith((".venv", "runs/")) or path in made


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_documents_name_only_files_that_exist(document: Path) -> None:
    named = {path for path in named_paths(document.read_text()) if not made_by_use(path)}
    assert named
    homes = (ROOT, ROOT / "flexsp", document.parent)
    missing = {path for path in named if not any((home / path).exists() for home in homes)}
    assert not missing


def test_environment_variables_stand_in_the_page_on_settings() -> None:
    pattern = re.compile(r"\bFLEXSP_[A-Z0-9_]+")
    used = {name for path in (*SOURCES, ROOT / "tests/conftest.py") for name in pattern.findall(path.read_text())}
    row = re.compile(r"^\| `(FLEXSP_[A-Z0-9_]+)` \|(.*?)\|", flags=re.MULTILINE)
    listed = dict(row.findall((ROOT / "docs/use.md").read_text()))
    assert used == {*listed}
    numbers = re.findall(r'"(FLEXSP_[A-Z0-9_]+)", ([\d.]+)\)', (ROOT / "flexsp/launch/bootstrap.py").read_text())
    assert [name for name, _ in numbers] == ["FLEXSP_TIMEOUT_S"]
    assert all(float(default) == float(listed[name]) for name, default in numbers)


def _names_missing(path: Path) -> list[str]:
    """Attributes of modules of the project, read or replaced in a file, that these modules do not have."""
    tree = ast.parse(path.read_text())
    space: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            try:
                exec(compile(ast.Module([node], []), str(path), "exec"), space)
            except pytest.skip.Exception:
                continue
    used = [(x.value, x.attr) for x in ast.walk(tree) if isinstance(x, ast.Attribute)]
    calls = [x for x in ast.walk(tree) if isinstance(x, ast.Call) and isinstance(x.func, ast.Attribute)]
    replaced = [x.args[:2] for x in calls if x.func.attr in ("setattr", "object") and len(x.args) > 1]  # type: ignore
    used += [(of, name.value) for of, name in replaced if isinstance(name, ast.Constant)]
    modules = [(space.get(of.id), name) for of, name in used if isinstance(of, ast.Name)]
    ours = [(x, name) for x, name in modules if isinstance(x, ModuleType) and x.__name__.startswith("flexsp")]
    return [f"{path.name}: {x.__name__}.{name}" for x, name in ours if not hasattr(x, name)]


def test_tests_of_the_gpu_name_what_is_there(tmp_path: Path) -> None:
    """They do not run here, so that a renamed function would be found on a GPU only."""
    files = [path for path in (ROOT / "tests" / "gpu").glob("*.py") if path.name != "test_exact_as_peer_gpu.py"]
    assert files and [name for path in files for name in _names_missing(path)] == []
    wrong = tmp_path / "wrong.py"
    wrong.write_text("from flexsp.kernels.delta import tiling\ntiling.Plan\nmonkeypatch.setattr(tiling, '_gone', 1)\n")
    assert _names_missing(wrong) == [f"wrong.py: flexsp.kernels.delta.tiling.{name}" for name in ("Plan", "_gone")]


def test_tool_releases_agree() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    constraints = (ROOT / "constraints.txt").read_text()
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    for tool, repository in (("ruff", "ruff-pre-commit"), ("mypy", "mirrors-mypy")):
        (release,) = re.findall(rf'"{tool}==([\d.]+)"', project)
        assert re.findall(rf"^{tool}==(.+)$", constraints, flags=re.MULTILINE) == [release]
        assert re.findall(rf"{repository}\n\s+rev: v(.+)", hooks) == [release]


@pytest.mark.parametrize("script", sorted((ROOT / "torchrun_configs").iterdir()), ids=lambda p: p.name)
def test_launch_scripts_parse_and_name_the_demo(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert "examples/train_lm.py" in script.read_text() or "two_hosts.sh" in script.read_text()


def test_lists_of_test_files_name_files_that_exist() -> None:
    named = {*LONGEST, *TOOLS}
    assert named <= {path.stem for path in (ROOT / "tests").rglob("test_*.py")} and len({*LONGEST}) == len(LONGEST)


def test_what_ranks_import_first_is_there() -> None:
    """By name: every rank under the interpreter would end otherwise, and say no more than that."""
    ours = {name: ROOT / f"{name.replace('.', '/')}.py" for name in _FOR_KERNELS if name.startswith("flexsp")}
    assert [name for name, path in ours.items() if not path.is_file()] == []
