"""What a run of train_lm.py leaves on disk so that it can go on: checkpoint.pt and metrics.jsonl.

Rank 0 alone reads and writes the files; whatever goes wrong there is raised on every rank. A checkpoint is what
torch.save writes, a zip archive, whose comment, the last bytes of the file, holds the SHA-256 of everything before it:
torch.load reads it too. Here it is read whole or refused: no bit of the file can change, nor its end be missing,
without the digest telling.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

ADVICE = "use another --name or --no-resume"
PARTS = {"settings": dict, "text": str, "step": int, "model": dict, "optimizer": dict}
T = TypeVar("T")


class Ranks(Protocol):
    """Ranks that exchange messages: those of a SequenceParallel, or all there are."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def global_ranks(self) -> Sequence[int]: ...
    @property
    def cpu_group(self) -> dist.ProcessGroup | None: ...


class UserError(Exception):
    """Something the person who started the run has to put right; its message is one line."""


@contextmanager
def file_errors() -> Iterator[None]:
    """Turns a full disk, a folder that cannot be written and their like into a UserError."""
    try:
        yield
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        raise UserError(f"{name}{error.strerror or error}") from error


def replace_file(path: Path, content: bytes) -> None:
    """Replaces the file at once: a process that is killed here, or finds the disk full, leaves the former content."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name itself is on the disk only now
    finally:
        os.close(folder)


def agree(problem: str, sp: Ranks) -> None:
    """Raises on every rank what went wrong on any of them: the others would wait for it in the next exchange."""
    problems: list[Any] = [problem]
    if sp.world_size > 1:
        problems = [None] * sp.world_size
        dist.all_gather_object(problems, problem, group=sp.cpu_group)
    for found in problems:
        if found:
            raise UserError(found)


def on_first_rank(work: Callable[[], T], sp: Ranks) -> T | None:
    """What ``work`` gives on rank 0, None on the others. Whatever it raises, none of them waits for rank 0."""
    result, failure, problem = None, None, ""
    if sp.rank == 0:
        try:
            with file_errors():
                result = work()
        except Exception as error:
            failure = error
            problem = str(error) if isinstance(error, UserError) else f"{type(error).__name__} on rank 0: {error}"
    try:
        agree(problem, sp)
    except UserError:
        if failure:
            raise failure from None
        raise
    return result


def from_first_rank(value: Any, sp: Ranks) -> Any:
    box = [value]
    if sp.world_size > 1:
        dist.broadcast_object_list(box, src=sp.global_ranks[0], group=sp.cpu_group)
    return box[0]


# ---------------------------------------------------------------- checkpoint.pt


def comment(archive: bytes) -> bytes:
    """That of an archive, of always the same length."""
    return f"train_lm checkpoint, sha256 {hashlib.sha256(archive).hexdigest()}".encode()


def write_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Writes ``state``, which has the PARTS. Where it cannot, it raises OSError and leaves the former checkpoint."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    written = buffer.getvalue()
    assert written[-22:-18] == b"PK\5\6" and written[-2:] == b"\0\0", "torch.save has begun to write comments itself"
    archive = written[:-2] + len(comment(b"")).to_bytes(2, "little")  # the length of the comment behind it
    replace_file(path, archive + comment(archive))


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The state that was written, its tensors on the CPU. Raises UserError, which names the file and what is wrong."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): {ADVICE}") from error
    length = len(comment(b""))
    if content[-length:] != comment(content[:-length]):
        raise UserError(f"{path} is damaged, cut short or no checkpoint: its content does not have the digest at its "
                        f"end; {ADVICE}")
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # written by a torch that this one does not understand
        detail = (str(error).splitlines() or [""])[0]
        raise UserError(f"{path} cannot be read ({type(error).__name__}: {detail}): {ADVICE}") from error
    if problem := wrong_part(state):
        raise UserError(f"{path}: {problem}; {ADVICE}")
    return state


def wrong_part(state: Any) -> str | None:
    if not isinstance(state, dict) or state.keys() != PARTS.keys():
        got = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
        return f"expected {', '.join(sorted(PARTS))} in it, got {got}"
    for name, kind in PARTS.items():
        if not isinstance(state[name], kind) or isinstance(state[name], bool):
            return f"{name}: expected {kind.__name__}, got {type(state[name]).__name__}"
    if state["step"] < 0:
        return f"step: expected a number >= 0, got {state['step']}"
    return None


def describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__


def check_tensors(path: Path, part: str, got: Mapping[Any, Any], expected: Mapping[Any, torch.Tensor]) -> None:
    """Raises UserError for the first tensor of ``part`` that is missing, too many, or of another shape or dtype."""
    for name in [*expected, *(name for name in got if name not in expected)]:
        want = describe(expected[name]) if name in expected else "nothing"
        have = describe(got[name]) if name in got else "nothing"
        if want != have:
            raise UserError(f"{path}: {part}: {name}: expected {want}, got {have}; {ADVICE}")


def restore(path: Path, state: Mapping[str, Any], model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Puts the state of a checkpoint into ``model`` and its AdamW ``optimizer``."""
    check_tensors(path, "model", state["model"], model.state_dict())
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    expected: dict[str, torch.Tensor] = {}
    for i, p in enumerate(parameters if state["step"] else []):  # before the first step the optimizer holds nothing
        expected |= {f"{i} step": torch.tensor(0.0), f"{i} exp_avg": p, f"{i} exp_avg_sq": p}
    moments = {f"{i} {key}": value for i, held in state["optimizer"].items() for key, value in dict(held).items()}
    check_tensors(path, "optimizer", moments, expected)
    model.load_state_dict(state["model"])
    groups = optimizer.state_dict()["param_groups"]  # weight decay and the like are the script's
    optimizer.load_state_dict({"state": state["optimizer"], "param_groups": groups})


def load_checkpoint(path: Path, resume: bool | None, sp: Ranks) -> dict[str, Any] | None:
    """The checkpoint on every rank. None: the run starts anew, with ``resume`` False, or None and no file there."""

    def read() -> dict[str, Any] | None:
        if resume is not False and path.exists():
            return read_checkpoint(path)
        if resume:
            raise UserError(f"--resume: expected a checkpoint, got none at {path}")
        return None

    return from_first_rank(on_first_rank(read, sp), sp)


def save_checkpoint(path: Path, state: Mapping[str, Any], metrics: Metrics | None, sp: Ranks) -> None:
    """Writes the checkpoint, which counts only with the ``metrics`` of its steps: their problem is raised first."""

    def write() -> None:
        if metrics and metrics.problem:
            raise UserError(metrics.problem)
        try:
            with file_errors():
                path.parent.mkdir(parents=True, exist_ok=True)
                write_checkpoint(path, state)
        except UserError as error:
            raise UserError(f"the checkpoint of step {state['step']} cannot be written: {error}") from error

    on_first_rank(write, sp)


# ---------------------------------------------------------------- metrics.jsonl


class Metrics:
    """metrics.jsonl of rank 0: one object a line. Lines after ``step`` are of steps that will be taken again: dropped.

    ``problem`` says why a line could not be written; training stops at the next point where all ranks hear of it.
    """

    def __init__(self, path: Path, step: int) -> None:
        self.path, self.problem = path, ""
        before = path.read_bytes() if path.exists() else None
        parsed = map(self.parse, (before or b"").decode(errors="replace").splitlines()) if step else ()
        self.rows: list[dict[str, Any]] = [row for row in parsed if row and row["step"] <= step]
        after = "".join(json.dumps(row) + "\n" for row in self.rows).encode()
        if after != before:
            replace_file(path, after)
        self.file = path.open("a")

    @staticmethod
    def parse(line: str) -> dict[str, Any] | None:
        """None for a line that a killed run left unfinished, or that no run wrote."""
        try:
            row = json.loads(line)
            numbers = isinstance(row, dict) and all(
                isinstance(value, int | float) and math.isfinite(value) for value in row.values()
            )
        except (ValueError, RecursionError, OverflowError):  # OverflowError: an integer that no float holds
            return None
        return row if numbers and "step" in row else None

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        if self.problem:
            return
        try:
            self.file.write(json.dumps(row) + "\n")
            self.file.flush()
        except OSError as error:
            self.problem = f"{self.path}: {error.strerror}"
            with suppress(OSError):  # what could not be written is still in its buffer
                self.file.close()

    def plot(self, path: Path, unit: str = "bits per byte", scale: float = 1 / math.log(2)) -> None:
        """Draws the loss, which is in nats, times ``scale``, and the learning rate."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt

        figure, (upper, lower) = plt.subplots(2, sharex=True, figsize=(7, 5), height_ratios=(3, 1))
        for key, style, label in (("loss", "-", "training"), ("held_out_loss", "o", "held out")):
            points = [(row["step"], row[key] * scale) for row in self.rows if key in row]
            if points:
                upper.plot([x for x, _ in points], [y for _, y in points], style, label=label)
        rates = [(row["step"], row["lr"]) for row in self.rows if "lr" in row]
        lower.plot([x for x, _ in rates], [y for _, y in rates])
        upper.set(ylabel=unit, ylim=(0, None))
        lower.set(xlabel="step", ylabel="learning rate", ylim=(0, None))
        upper.legend()
        for axes in (upper, lower):
            axes.grid(alpha=0.3)
        figure.tight_layout()
        figure.savefig(path, dpi=120)
        plt.close(figure)


def open_metrics(path: Path, step: int, sp: Ranks) -> Metrics | None:
    """Rank 0's Metrics; None on the others."""
    return on_first_rank(lambda: Metrics(path, step), sp)
