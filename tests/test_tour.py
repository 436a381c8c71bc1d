"""`examples/tour.ipynb`: its cells run, and what is kept of them is theirs."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

import pytest
import torch

from tests.tour import NOTEBOOK, run_cells


def notebook() -> dict[str, Any]:
    return json.loads(NOTEBOOK.read_text())


def code() -> list[dict[str, Any]]:
    return [cell for cell in notebook()["cells"] if cell["cell_type"] == "code"]


def kinds(outputs: list[dict[str, Any]]) -> list[str]:
    return [x["output_type"] for x in outputs]


def test_it_is_a_notebook_as_jupyter_has_it() -> None:
    found = notebook()
    assert (found["nbformat"], found["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in found["cells"]]
    assert len({*ids}) == len(ids) and found["cells"][0]["cell_type"] == "markdown"
    for cell in found["cells"]:
        wanted = {"cell_type", "id", "metadata", "source"}
        wanted |= {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        assert cell.keys() == wanted
        assert isinstance(cell["source"], list) and all(line.endswith("\n") for line in cell["source"][:-1])


def test_its_links_lead_to_files() -> None:
    said = "".join(line for x in notebook()["cells"] if x["cell_type"] == "markdown" for line in x["source"])
    links = re.findall(r"\]\(([^)#]+)\)", said)
    assert len(links) >= 4 and all((NOTEBOOK.parent / link).is_file() for link in links)
    assert all((NOTEBOOK.parents[1] / name).is_file() for name in re.findall(r"`(docs/[\w.]+)`", said))


def test_it_was_run_as_a_whole() -> None:
    """All cells have run in order; those that print or draw keep what came, and none an error or somebody's folder."""
    assert [cell["execution_count"] for cell in code()] == [*range(1, len(code()) + 1)]
    for cell in code():
        source = "".join(cell["source"])
        calls = {ast.unparse(node.func) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)}
        want = ["stream"] * ("print" in calls) + ["display_data"] * ("plt.show" in calls)
        assert kinds(cell["outputs"]) == want, source
    kept = json.dumps([cell["outputs"] for cell in code()])
    assert not re.search(r"Traceback|/home/|/tmp/|/root/|/Users/", kept)


@pytest.mark.slow
def test_its_cells_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cells themselves compare the recurrence with a token loop, and two ranks with one."""
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parents[1]))  # of the ranks that it starts
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    try:
        names, outputs = run_cells(notebook())
    finally:
        torch.set_num_threads(before)
    assert [kinds(x) for x in outputs] == [kinds(cell["outputs"]) for cell in code()]
    assert names["recalled"] > 0.9 and names["losses"][0] > 2 and names["losses"][-1] < 0.5
    assert names["error"] < 1e-12 and max(names["differences"]) < 1e-12 and len(names["differences"]) > 20
    (said,) = [x for x in outputs if x and "rank 0 of 2" in "".join(x[0].get("text", []))]
    assert [line.split(") has")[1] for line in said[0]["text"]] == [" tokens [4, 11]\n", " tokens [4, 7]\n"]
