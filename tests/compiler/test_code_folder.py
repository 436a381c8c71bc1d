"""The folder of generated kernels: what lies there is not trusted, and others may not write to it."""

from __future__ import annotations

import importlib.util
import os
import py_compile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from flexsp.compiler.backend.generated_kernels import _users_folder, write_code
from flexsp.exceptions import NotAvailable
from flexsp.testing import run_ranks
from tests import variants
from tests.harness.interpreted import INTERPRETED

TRAP = "raise SystemExit('a foreign file was run')\n"


def _kernels(folder: str) -> Any:
    return variants.load("linear").make(2, 5, 4, code_dir=folder).kernels


def _after_damage(sp: Any, folder: str) -> list[bool]:
    path, source = _kernels(folder).path, _kernels(folder).source
    x = {name: torch.rand(1, 7, 2, 4 if name == "v" else 5) for name in ("q", "k", "v")}
    found = []
    for what in ("foreign", "torn", "compiled", "link"):
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        trap = path.parent.parent / f"trap_{what}.py"
        trap.write_text(TRAP)
        if what == "link":
            path.symlink_to(trap)
        else:
            path.write_text({"foreign": TRAP, "torn": source[: len(source) // 2], "compiled": source}[what])
        if what == "compiled":  # Python would take this for the file's own, whatever it holds
            cached = importlib.util.cache_from_source(str(path))
            py_compile.compile(str(trap), cached, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
        code = _kernels(folder)
        code.__dict__.pop("module", None)
        found.append(hasattr(code.module, "output") and path.read_text() == source and trap.read_text() == TRAP)
        found.append(not path.is_symlink())
    o, _ = variants.load("linear").make(2, 5, 4, code_dir=folder)(**x)
    return [*found, bool(o.isfinite().all())]


def test_what_lies_in_the_folder_is_not_run(tmp_path: Path) -> None:
    assert run_ranks(_after_damage, 1, str(tmp_path / "code"), env=INTERPRETED) == [[True] * 9]


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o707])
def test_a_folder_that_others_can_write_is_refused(mode: int, tmp_path: Path) -> None:
    folder = tmp_path / "code"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(NotAvailable, match=rf"{folder}.*every user.*mode {mode:o}.*FLEXSP_CODE_DIR"):
        write_code(folder / "a.py", "x = 1\n")
    assert not list(folder.iterdir())
    link = tmp_path / "link"
    link.symlink_to(folder)
    with pytest.raises(NotAvailable, match="every user"):
        write_code(link / "a.py", "x = 1\n")


def test_groups_and_owners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of one's own may write, another may not; root takes what is a user's, a user not what is another's."""
    folder = tmp_path / "code"
    folder.mkdir()
    folder.chmod(0o775)
    group, owner = folder.stat().st_gid, folder.stat().st_uid
    monkeypatch.setattr(os, "getegid", lambda: group)
    write_code(folder / "a.py", "x = 1\n")
    if group != 0:
        monkeypatch.setattr(os, "getegid", lambda: group + 1)
        with pytest.raises(NotAvailable, match="the group"):
            write_code(folder / "a.py", "x = 1\n")
    folder.chmod(0o755)
    if owner != 0:
        monkeypatch.setattr(os, "getuid", lambda: owner + 1)
        with pytest.raises(NotAvailable, match="the user"):
            write_code(folder / "a.py", "x = 1\n")
    monkeypatch.setattr(os, "getuid", lambda: 0)
    write_code(folder / "a.py", "x = 1\n")


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotAvailable, match="cannot be written.*FLEXSP_CODE_DIR"):
        write_code(tmp_path / "file" / "a.py", "x = 1\n")


def test_many_write_at_once(tmp_path: Path) -> None:
    """Readers see the old file or the new one, whole; an umask of 0 does not open the folder."""
    before = os.umask(0)
    try:
        path, source = tmp_path / "made" / "a.py", "x = 1\n" * 20000
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda i: write_code(path, source), range(32)))
    finally:
        os.umask(before)
    assert path.read_text() == source and [x.name for x in path.parent.iterdir()] == ["a.py"]


def test_the_users_folder_with_an_umask_of_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made so that no others may write to it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = os.umask(0)
    try:
        folder = _users_folder()
        write_code(folder / "a.py", "x = 1\n")
    finally:
        os.umask(before)
    assert folder.is_relative_to(tmp_path) and folder.stat().st_mode & 0o777 == 0o755
