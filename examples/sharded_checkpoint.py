"""Checkpoints of which every rank writes its part, and that ranks of any number and mesh read.

A checkpoint is a folder ``step-00000012`` of torch.distributed.checkpoint, with run.json beside its files: what the run
keeps to, and the files' sizes. It is written under another name and renamed when it is whole and on the disk, so that
whatever ends a run, the newest folder of such a name is a whole checkpoint. All ranks must see the same folder.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from checkpoint import ADVICE, Ranks, UserError, agree, file_errors, from_first_rank, on_first_rank, replace_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

ABOUT = "run.json"


def checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, the newest first."""
    found = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name)]
    return sorted(found, key=lambda path: int(path.name[5:]), reverse=True)


def find_checkpoint(folder: Path, resume: bool | None, ranks: Ranks) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint and what its run.json says. None: the run starts anew, with ``resume`` False, or None and
    no checkpoint there. Collective.

    Raises:
        UserError: on all ranks, where there is none with ``resume`` True, or it cannot be read.
    """

    def find() -> tuple[Path, dict[str, Any]] | None:
        found = [] if resume is False else checkpoints(folder)
        if found:
            return found[0], read_about(found[0])
        if resume:
            raise UserError(f"--resume: expected a checkpoint, got none in {folder}")
        return None

    return from_first_rank(on_first_rank(find, ranks), ranks)


def remove_checkpoints(folder: Path, ranks: Ranks) -> None:
    """The oldest first, so that the newest is there until none is. Collective."""

    def remove() -> None:
        for path in reversed(checkpoints(folder)):
            shutil.rmtree(path)

    on_first_rank(remove, ranks)


def read_about(path: Path) -> dict[str, Any]:
    """What was saved with the checkpoint. Raises UserError where a file of the checkpoint is missing or cut short."""
    try:
        about = json.loads((path / ABOUT).read_bytes())
        sizes = about.pop("sizes")
    except (ValueError, KeyError, OSError) as error:
        raise UserError(f"{path / ABOUT} cannot be read ({type(error).__name__}: {error}); {ADVICE}") from error
    for name, size in sizes.items():
        got = (path / name).stat().st_size if (path / name).exists() else 0
        if got != size:
            advice = f"remove {path} to go on from the one before, or {ADVICE}"
            raise UserError(f"{path / name}: expected {size} bytes, got {got}; {advice}")
    return about


def save_checkpoint(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, about: dict[str, Any], keep: int, ranks: Ranks
) -> None:
    """Saves the model, the optimizer and ``about``, which has the step; keeps the ``keep`` newest. Collective.

    Raises:
        UserError: on all ranks, where one of them cannot write. The checkpoints that were there are still there.
    """
    path = folder / f"step-{about['step']:08d}"
    partial = folder / (path.name + ".partial")
    problem = f"the checkpoint of step {about['step']} cannot be written"

    def clear() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

    def finish() -> None:
        sizes = {file.name: file.stat().st_size for file in partial.iterdir()}
        replace_file(partial / ABOUT, json.dumps({**about, "sizes": sizes}).encode())  # syncs the folder too
        shutil.rmtree(path, ignore_errors=True)
        os.replace(partial, path)
        sync(folder)
        for old in checkpoints(folder)[keep:]:
            shutil.rmtree(old, ignore_errors=True)

    try:
        on_first_rank(clear, ranks)
        write_parts(partial, model, optimizer, ranks)
        on_first_rank(finish, ranks)
    except UserError as error:
        raise UserError(f"{problem}: {error}") from error


def write_parts(partial: Path, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
    parameters, moments = get_state_dict(model, optimizer)
    said = ""
    try:
        dcp.save({"model": parameters, "optimizer": moments}, storage_writer=dcp.FileSystemWriter(partial))
    except (CheckpointException, OSError, RuntimeError) as error:
        said = first_problem(error)
    agree(said, ranks)


def first_problem(error: BaseException) -> str:
    """One line of what a rank met, without the tracebacks of all of them."""
    met = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
    return f"{type(met).__name__}: {(str(met).splitlines() or [''])[0]}"


def sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
    """Puts a checkpoint into a model and its optimizer, whatever ranks wrote it. Collective.

    Raises:
        UserError: on all ranks, where the files cannot be read or are of another model.
    """
    parameters, moments = get_state_dict(model, optimizer)
    said = ""
    try:
        with file_errors():
            dcp.load({"model": parameters, "optimizer": moments}, storage_reader=dcp.FileSystemReader(path))
    except (CheckpointException, UserError, RuntimeError, ValueError) as error:
        said = f"{path} cannot be read ({first_problem(error)}); {ADVICE}"
    agree(said, ranks)
    set_state_dict(model, optimizer, model_state_dict=parameters, optim_state_dict=moments)
