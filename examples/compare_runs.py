"""Compares the losses of two runs of train_hybrid.py, step by step, and fails where more than rounding differs.

    python examples/compare_runs.py runs/one_rank runs/many_ranks --nudged runs/nudged

The third run is the first one with weights that were changed by one rounding at its start (--nudge). How far its losses
drift from the first run's is what rounding alone does to such a run. By a step, the second run may have drifted eight
times as far as the third by twice that step, and eight roundings of the loss in float32: when rounding first sends a
token to another expert is chance, and differs between any two runs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from checkpoint import Metrics, UserError
from training import Screen, one_line_errors

EPSILON = 2.0**-23  # of float32
FACTOR = 8


def losses(folder: Path) -> dict[int, float]:
    """The loss of each step."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        raise UserError(f"{folder}: expected the folder of a run, got none with metrics.jsonl")
    rows = [row for row in map(Metrics.parse, path.read_text().splitlines()) if row]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def compare(one: dict[int, float], many: dict[int, float], nudged: dict[int, float]) -> list[tuple[int, float, float]]:
    """(step, difference of the two runs, what rounding explains) for each step."""
    if not one or not one.keys() == many.keys() == nudged.keys():
        raise UserError(f"expected runs of the same steps, got {len(one)}, {len(many)} and {len(nudged)} steps")
    rows = []
    for step, loss in sorted(one.items()):
        drift = max(abs(nudged[at] - one[at]) for at in one if at <= 2 * step)
        rows.append((step, abs(many[step] - loss), FACTOR * (drift + EPSILON * abs(loss))))
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("one", type=Path, help="folder of the run on one rank")
    parser.add_argument("many", type=Path, help="folder of the run on many ranks")
    parser.add_argument("--nudged", type=Path, required=True, help="folder of the run on one rank with --nudge")
    options = parser.parse_args(argv)
    with one_line_errors("compare_runs"):
        one, many, nudged = (losses(folder) for folder in (options.one, options.many, options.nudged))
        rows = compare(one, many, nudged)
    header = ["step", options.one.name, options.many.name, "difference", "rounding explains"]
    cells = ([str(at), f"{one[at]:.7f}", f"{many[at]:.7f}", f"{off:.1e}", f"{bound:.1e}"] for at, off, bound in rows)
    Screen(enabled=True).table("loss in nats a token", header, cells)
    wrong = [step for step, off, bound in rows if not off <= bound]
    if wrong:
        raise SystemExit(f"the losses DIFFER by more than rounding, first in step {wrong[0]}")
    print("the losses agree", flush=True)


if __name__ == "__main__":
    main()
