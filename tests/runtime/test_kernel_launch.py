"""Launches that are worked out once, with a kernel that only pretends to be on a GPU: addresses, and compilation."""

from __future__ import annotations

import ast
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from triton import knobs

from flexsp.runtime import launch as module
from flexsp.runtime import triton_private as private
from flexsp.runtime.launch import KernelLaunch


class Param(NamedTuple):
    name: str
    is_constexpr: bool
    do_not_specialize: bool
    default: Any = None


class Kernel:
    """Pretends to be a kernel on a GPU and keeps what it is launched with."""

    arg_names = ("x", "y", "T", "step", "BLOCK", "PDL")

    def __init__(self) -> None:
        self.function, self.packed_metadata = "function", "metadata"
        self.launches: list[tuple[Any, ...]] = []
        self.hooked: list[tuple[Any, ...]] = []
        self.builds: list[tuple[Any, ...]] = []

    @property
    def params(self) -> list[Param]:
        return [Param(name, name in ("BLOCK", "PDL"), name == "T") for name in self.arg_names]

    def run(self, *args: Any) -> None:
        self.launches.append(args)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self.hooked.append((grid, args))

    def _init_handles(self) -> None: ...


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made = Kernel()

    def build(kernel: Kernel, *what: Any) -> Kernel:
        kernel.builds.append(what)
        return kernel

    monkeypatch.setattr(module, "build", build)
    monkeypatch.setattr(module, "make_launcher", lambda compiled: None)
    monkeypatch.setattr(module, "dependent", lambda device: True)
    monkeypatch.setattr(module, "current_target", lambda: private.gpu_target(90))
    monkeypatch.setattr(module, "warn_if_uncovered", lambda triton, device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return made


def a_launch(kernel: Kernel, T: int = 5, step: int = 32, **constants: int) -> KernelLaunch:
    return KernelLaunch(kernel, (2, 3, 1), ["x", None], [T, step], {"BLOCK": 16} | constants, {"num_warps": 4})


def test_a_shot_fills_in_addresses(kernel: Kernel) -> None:
    one, frame = a_launch(kernel), {"x": torch.zeros(8)}
    for address in (64, 4096):
        one.run(frame, {"x": address, None: None}, 7)
    assert len(kernel.builds) == 1
    head = (2, 3, 1, 7, "function", "metadata", None, None, None)
    assert kernel.launches == [(*head, address, None, 5, 32, 16, True) for address in (64, 4096)]


def test_only_what_is_specialised_builds_again(kernel: Kernel) -> None:
    frame = {"x": torch.zeros(8)}

    def builds(other: KernelLaunch, of: Any = frame) -> int:
        before = len(kernel.builds)
        other.run(of, {"x": 64, None: None}, 7)
        return len(kernel.builds) - before

    assert builds(a_launch(kernel)) == 1
    assert builds(a_launch(kernel, T=16)) == builds(a_launch(kernel, T=1)) == builds(a_launch(kernel, step=64)) == 0
    assert builds(a_launch(kernel, T=2**31)) == 1
    assert builds(a_launch(kernel, step=33)) == 1
    assert builds(a_launch(kernel, step=1)) == 1
    assert builds(a_launch(kernel, BLOCK=32)) == 1
    assert builds(a_launch(kernel), {"x": torch.zeros(8, dtype=torch.bfloat16)}) == 1
    assert builds(a_launch(kernel), {"x": torch.zeros(9)[1:]}) == 1


def test_profilers_see_the_launch(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs.runtime.launch_enter_hook, "calls", [print])
    a_launch(kernel).run({"x": torch.zeros(8)}, {"x": 64, None: None}, 7)
    assert not kernel.launches
    assert kernel.hooked == [((2, 3, 1), (64, None, 5, 32, 16, True))]


def test_kernels_are_built_side_by_side(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)
    plain = module.build

    def build(*what: Any) -> Any:
        both.wait(timeout=30)
        return plain(*what)

    monkeypatch.setattr(module, "build", build)
    monkeypatch.setattr(module, "workers", lambda: pool)
    launches, frame = [a_launch(kernel), a_launch(kernel, BLOCK=32)], {"x": torch.zeros(8)}
    with ThreadPoolExecutor(2) as pool:
        for one in (*launches, *launches, a_launch(kernel)):
            one.prepare(frame, 0)
        for one in launches:
            one.run(frame, {"x": 64, None: None}, 7)
    assert len(kernel.builds) == 2
    assert [args[-2] for args in kernel.launches] == [16, 32]


def test_what_cannot_be_built_says_so_each_time(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def build(*what: Any) -> Any:
        tried.append(what)
        raise RuntimeError("no space")

    monkeypatch.setattr(module, "build", build)
    for one in [a_launch(kernel)] * 2 + [a_launch(kernel)]:
        with pytest.raises(RuntimeError, match="no space"):
            one.run({"x": torch.zeros(8)}, {"x": 64, None: None}, 7)
    assert len(tried) == 3


def test_a_failure_is_forgotten(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps no tensors of the call, and all launches of the next one are built again."""
    plain = module.build

    def fails(*what: Any) -> Any:
        raise RuntimeError("no space")

    def call(frame: dict[str, torch.Tensor]) -> weakref.ref[torch.Tensor]:
        with pytest.raises(RuntimeError, match="no space"):
            launches[0].run(frame, {"x": 64, None: None}, 7)
        return weakref.ref(frame["x"])

    monkeypatch.setattr(module, "build", fails)
    launches = [a_launch(kernel, BLOCK=n) for n in (16, 32)]
    wait([one.prepare({"x": torch.zeros(8)}, 0) for one in launches])
    seen = call({"x": torch.zeros(8)})
    gc.collect()
    assert seen() is None
    monkeypatch.setattr(module, "build", plain)
    for one in launches:
        one.run({"x": torch.zeros(8)}, {"x": 64, None: None}, 7)
    assert len(kernel.builds) == 2


def test_an_interpreter_that_ends_builds_in_place(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = ThreadPoolExecutor(1)
    ended.shutdown()
    monkeypatch.setattr(module, "workers", lambda: ended)
    a_launch(kernel).run({"x": torch.zeros(8)}, {"x": 64, None: None}, 7)
    assert len(kernel.builds) == len(kernel.launches) == 1


def test_kernels_wait_for_the_one_before_in_their_first_statement() -> None:
    """In the source of all of them; tests of compiled kernels look at what becomes of it, most of these slowly."""
    found = []
    for file in (Path(module.__file__).parents[1]).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.FunctionDef) or node.name == "begin":
                continue
            if any(arg.arg == "PDL" and arg.annotation is not None for arg in node.args.args) and node.decorator_list:
                first = node.body[ast.get_docstring(node) is not None]
                found.append((file.name, node.name, ast.unparse(first)))
    assert len(found) >= 50, found
    assert not [x for x in found if x[2] != "begin(PDL)"]
