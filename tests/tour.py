"""The cells of a notebook, run one after the other without Jupyter; `python -m tests.tour` writes what comes out into
`examples/tour.ipynb`, with its pictures."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

__all__ = ["NOTEBOOK", "run_cells"]

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples" / "tour.ipynb"
_DPI = 80


def run_cells(notebook: dict[str, Any]) -> tuple[dict[str, Any], list[list[dict[str, Any]]]]:
    """What the code cells leave behind as names, and the outputs of each of them, as notebooks keep them.

    An output is what a cell prints, or a picture that is open at its end.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names: dict[str, Any] = {"__name__": "__main__"}
    found = []
    for number, cell in enumerate(x for x in notebook["cells"] if x["cell_type"] == "code"):
        said, outputs = io.StringIO(), []
        with contextlib.redirect_stdout(said):
            exec(compile("".join(cell["source"]), f"cell {number + 1} of the notebook", "exec"), names)
        if said.getvalue():
            lines = said.getvalue().splitlines(keepends=True)
            outputs.append({"name": "stdout", "output_type": "stream", "text": lines})
        for figure in map(plt.figure, plt.get_fignums()):
            picture = io.BytesIO()
            figure.savefig(picture, format="png", dpi=_DPI, metadata={"Software": None})
            data = {"image/png": base64.b64encode(picture.getvalue()).decode(), "text/plain": ["<Figure>"]}
            outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
        plt.close("all")
        found.append(outputs)
    return names, found


def main() -> None:
    os.environ["PYTHONPATH"] = str(NOTEBOOK.parents[1])  # of the ranks that it starts
    notebook = json.loads(NOTEBOOK.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, outputs) in enumerate(zip(code, run_cells(notebook)[1], strict=True)):
        for row in outputs:
            if "text" in row:  # where the kernels are is nobody else's place
                row["text"] = [re.sub(r"^file: .*/", "file: ~/.cache/flexsp/", line) for line in row["text"]]
        cell["execution_count"], cell["outputs"] = number + 1, outputs
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    sys.exit(main())
