"""What the training scripts of this folder share: settings of a run, its text, optimizer, progress and errors."""

from __future__ import annotations

import argparse
import os
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import field, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from checkpoint import ADVICE, Ranks, UserError, file_errors
from torch import nn

S = TypeVar("S")


# ---------------------------------------------------------------- settings


def setting(default: Any, meaning: str) -> Any:
    return field(default=default, metadata={"help": f"{meaning} (default: {default}, or the checkpoint's)"})


def add_settings(parser: argparse.ArgumentParser, kind: type[Any]) -> None:
    """An option for each field of the dataclass; one that is not given is None."""
    for f in fields(kind):
        parser.add_argument(option(f.name), type=type(f.default), help=f.metadata["help"])


def option(name: str) -> str:
    return "--" + name.replace("_", "-")


def settings_of(
    kind: type[S], options: argparse.Namespace, held: dict[str, Any] | None, path: Path, free: tuple[str, ...] = (),
    complete: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> S:  # fmt: skip
    """Those that the checkpoint ``held``, which the command line may repeat but not change, but for ``free`` ones; of a
    new run (None), the command line's, to which ``complete`` may add some that were not given."""
    names = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if held is None:
        return kind(**complete(given))
    try:
        settings = kind(**held)
    except (TypeError, UserError) as error:
        raise UserError(f"{path}: settings: {error}; {ADVICE}") from error
    for name, value in given.items():
        if getattr(settings, name) != value and name not in free:
            raise UserError(f"{option(name)}: expected {getattr(settings, name)}, which {path} was trained with, got "
                            f"{value}; leave it out, or {ADVICE}")  # fmt: skip
    return kind(**{**held, **{name: value for name, value in given.items() if name in free}})


# ---------------------------------------------------------------- text


def standard_library() -> list[Path]:
    """The .py files Python itself came with, tests left out."""
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    return sorted(p for p in root.rglob("*.py") if not skip.intersection(p.relative_to(root).parts))


def read_files(data: str | None) -> tuple[list[bytes], str]:
    """The files of a folder in the order of their names, or one file, or the standard library (None); and a name for
    them. Files that are empty or have a zero byte, as pictures do, are left out."""
    with file_errors():
        if data is None:
            paths, source = standard_library(), "Python's standard library"
        else:
            path, source = Path(data), data
            if not path.exists():
                raise UserError(f"--data: expected a text file or a folder, got {data!r}, which does not exist")
            paths = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
        return [content for content in (p.read_bytes() for p in paths) if content and b"\0" not in content], source


# ---------------------------------------------------------------- training


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.AdamW:
    """Weight decay for matrices, none for vectors."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def mean_over_ranks(values: list[float], ranks: Ranks) -> list[float]:
    if ranks.world_size == 1:
        return values
    summed = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(summed, group=ranks.cpu_group)
    return (summed / ranks.world_size).tolist()


# ---------------------------------------------------------------- what a person sees


class Screen:
    """Progress on rank 0: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, enabled: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self.console = Console(quiet=not enabled)
        columns = (BarColumn(bar_width=30), TextColumn("{task.description}"))
        self.bar = Progress(*columns, console=self.console, disable=not (enabled and self.console.is_terminal))
        self.task = self.bar.add_task("first step ...", total=1.0)
        self.enabled, self.next_line = enabled, 0.0

    def update(self, done: float, step: int, loss: float, speed: float, left: float, memory: int | None = None) -> None:
        """``left`` in seconds, ``memory`` in bytes."""
        minutes, seconds = divmod(int(left), 60)
        clock = f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}" if minutes >= 60 else f"{minutes}:{seconds:02d}"
        peak = "" if memory is None else f"peak {memory / 2**30:.2f} GiB  "
        line = f"step {step}  loss {loss:.3f}  {speed:,.0f} tokens/s  {peak}{clock} left"
        self.bar.update(self.task, completed=done, description=line)
        if self.enabled and not self.console.is_terminal and time.monotonic() >= self.next_line:
            print(line, flush=True)
            self.next_line = time.monotonic() + 15

    def table(self, title: str, header: list[str], rows: Iterable[list[str]]) -> None:
        from rich.table import Table

        table = Table(title=title, title_justify="left")
        for i, name in enumerate(header):
            table.add_column(name, justify="right" if i else "left")
        for row in rows:
            table.add_row(*row)
        self.console.print(table)


class Budget:
    """How far this invocation is, 0 to 1: by steps, by seconds, whichever is further. Starts with the first step."""

    def __init__(self, first_step: int, steps: int | None, seconds: float) -> None:
        self.first, self.steps, self.seconds = first_step, steps, seconds
        self.start = time.monotonic()

    def elapsed(self) -> float:
        return time.monotonic() - self.start

    def fraction(self, step: int) -> float:
        by_steps = (step - self.first) / max(1, self.steps - self.first) if self.steps else 0.0
        return min(1.0, max(by_steps, self.elapsed() / self.seconds))

    def left(self, step: int) -> float:
        """Estimated seconds."""
        fraction = self.fraction(step)
        return self.elapsed() * (1 - fraction) / fraction if fraction else 0.0


@contextmanager
def one_line_errors(script: str) -> Iterator[None]:
    """Ends the process with the message of a UserError, which rank 0 alone prints."""
    try:
        yield
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":
            raise SystemExit(f"{script}: {error}") from None
        time.sleep(2)  # torchrun stops the others once one has ended: rank 0 first gets to speak
        raise SystemExit(1) from None
