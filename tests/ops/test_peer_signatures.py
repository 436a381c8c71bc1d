"""The tables of docs/coming-from.md for mamba_ssm and mlstm_kernels: every argument there, and which takes it here.

They are compared with the signatures of the library that is installed, else with the names of the release in RELEASES.
"""

from __future__ import annotations

import ast
import inspect
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from flexsp import ops

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"
TITLE = re.compile(r"^`(\w+)`(?: of [\w-]+)? is `(\w+)`(?: of one token[^:]*)?:\n\n((?:\|.*\n)+)", re.MULTILINE)
ROW = re.compile(r"^\| `(\w+)(?:=([^`]+))?` \| (?:`(\w+)`|-) \|", re.MULTILINE)
Defaults = dict[str, str | None]


def _function(text: str) -> Defaults:
    """Arguments, and their defaults as text, of a function's head."""
    (node,) = ast.parse(f"def f({text}): ...").body
    assert isinstance(node, ast.FunctionDef)
    return _arguments(node)


def _arguments(node: ast.FunctionDef) -> Defaults:
    names, defaults = [x.arg for x in node.args.args], [ast.unparse(x) for x in node.args.defaults]
    none: list[str | None] = [None] * (len(names) - len(defaults))
    return dict(zip(names, none + defaults, strict=True))


RELEASES = {  # what `mamba_ssm` 2.3.2.post1 and `mlstm_kernels` 2.0.6 take
    "mamba_ssm": {
        "mamba_chunk_scan_combined": _function(
            "x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None, "
            "cu_seqlens=None, dt_softplus=False, dt_limit=(0.0, float('inf')), return_final_states=False, "
            "return_varlen_states=False"
        ),
        "selective_scan_fn": _function(
            "u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False"
        ),
        "selective_state_update": _function(
            "state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, state_batch_indices=None"
        ),
    },
    "mlstm_kernels": {
        "mlstm_chunkwise__xl_chunk": _function(
            "q, k, v, i, f, c_initial=None, n_initial=None, m_initial=None, return_last_states=False, eps=1e-06, "
            "chunk_size=128, chunk_size_inter=None, chunk_size_intra=None, siz_b_L_parallel=None, siz_b_L_loop=None, "
            "siz_b_DH_parallel=None, siz_b_DH_loop=None, num_warps_intra=None, num_warps_inter=None, "
            "num_stages_intra=None, num_stages_inter=None, recompute_states_in_bw=True, "
            "autocast_kernel_dtype=torch.float32"
        ),
        "mlstm_recurrent_step__triton": _function("q, k, v, i, f, c, n, m, eps=1e-06, dtype_state=torch.float32"),
    },
}


def _installed(library: str) -> dict[str, Defaults]:
    """Functions of the installed library that the tables name. Nothing is imported, which would need a GPU."""
    spec, found = find_spec(library), {}
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for path in Path(folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef) and node.name in RELEASES[library]:
                    found[node.name] = _arguments(node)
    return found


def _tables(library: str) -> dict[str, tuple[str, list[tuple[str, str, str]]]]:
    """By what is there: what is here, and (argument there, its default where that is another, argument here)."""
    part = PAGE.read_text().partition(f"## {library}\n")[2].partition("\n## ")[0]
    return {there: (here, ROW.findall(rows)) for there, here, rows in TITLE.findall(part)}


def _differences(theirs: Defaults, here: str, rows: list[tuple[str, str, str]]) -> list[str]:
    wrong, ours = [], inspect.signature(getattr(ops, here)).parameters
    if [name for name, *_ in rows] != [*theirs]:
        wrong.append(f"the table has {[name for name, *_ in rows]}, there are {[*theirs]}")
    for name, told, mine in rows:
        if mine and mine not in ours:
            wrong.append(f"{name}: {here} has no {mine}")
            continue
        text = theirs.get(name)
        if not mine and told:
            wrong.append(f"{name}: a default of what is not here")
        if not mine or text is None:
            continue
        default = ours[mine].default
        same = default is not inspect.Parameter.empty and repr(default) == repr(eval(text, {"float": float}))
        if told != ("" if same or default == _MOST else text):
            wrong.append(f"{name}: by default {text} there and {default} here, the table has {told or 'nothing'}")
    return wrong


_MOST = inspect.signature(ops.mamba2_ssd).parameters["dt_limit"].default


@pytest.mark.parametrize("library", RELEASES)
def test_the_tables_have_every_argument(library: str) -> None:
    tables, theirs = _tables(library), RELEASES[library] | _installed(library)
    assert tables.keys() == theirs.keys()
    wrong = {there: _differences(theirs[there], here, rows) for there, (here, rows) in tables.items()}
    assert not any(wrong.values()), wrong


def test_differences_are_seen() -> None:
    rows = [("q", "", "q"), ("eps", "1e-06", "eps")]
    theirs: Defaults = {"q": None, "eps": "1e-06"}
    assert not _differences(theirs, "chunk_mlstm", rows)
    for other in ([("q", "", "q")], [("q", "", "q"), ("eps", "", "eps")], [("q", "", "u"), rows[1]], rows[::-1]):
        assert _differences(theirs, "chunk_mlstm", other)
