"""The launcher that goes straight to compiled kernels, with a kernel and tensors that only pretend to be on a GPU."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from triton import knobs

from flexsp.runtime import launch as module
from flexsp.runtime import triton_private as private
from flexsp.runtime.launch import dependent, launch, newer_assembler


class OnGPU(torch.Tensor):
    is_cuda = True  # type: ignore[assignment]
    device = torch.device("cuda", 0)  # type: ignore[assignment]


class Kernel:
    """Counts compilations and keeps the arguments of launches."""

    arg_names: tuple[str, ...] = ("x", "n", "scale", "BLOCK", "FLAG", "PDL")
    free: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.compilations: list[tuple[Any, ...]] = []
        self.launches: list[tuple[Any, ...]] = []
        self.loads = 0

    @property
    def params(self) -> list[Any]:
        return [Param(name, name.isupper(), name in self.free) for name in self.arg_names]

    def built(self, *what: Any) -> Kernel:
        self.compilations.append(what)
        return self

    def _init_handles(self) -> None:
        self.loads += 1

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self.launches.append((grid, args))


class Param(NamedTuple):
    name: str
    is_constexpr: bool
    do_not_specialize: bool
    default: Any = None


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(module, "dependent", lambda device: True)
    monkeypatch.setattr(module, "build", lambda kernel, *what: kernel.built(*what))
    monkeypatch.setattr(module, "current_target", lambda: private.gpu_target(90))
    monkeypatch.setattr(module, "make_launcher", lambda compiled: None)
    monkeypatch.setattr(module, "warn_if_uncovered", lambda triton, device: None)
    return Kernel()


def gpu(numbers: int, dtype: torch.dtype = torch.float32, skip: int = 0) -> torch.Tensor:
    return torch.zeros(numbers + skip, dtype=dtype)[skip:].as_subclass(OnGPU)


def test_a_repeated_call_is_not_compiled_again(kernel: Kernel) -> None:
    first, second = gpu(8), gpu(8)
    for x in (first, second):
        launch(kernel, (2, 3), (x, 5, 0.5), {"FLAG": True, "BLOCK": 16}, {"num_warps": 4})
    assert len(kernel.compilations) == 1
    assert kernel.launches == [((2, 3, 1), (x.data_ptr(), 5, 0.5, 16, True, True)) for x in (first, second)]


@pytest.mark.parametrize(
    "other",
    [
        {"x": gpu(8, torch.float64)},
        {"x": gpu(8, skip=1)},
        {"n": 16},
        {"n": 1},
        {"n": 2**31},
        {"n": -(2**31) - 1},
        {"constants": {"BLOCK": 32, "FLAG": True}},
        {"options": {"num_warps": 8}},
        {"options": {"num_warps": 4, "extern_libs": {"lib": "path"}}},
    ],
    ids=["dtype", "alignment", "by 16", "one", "wide", "wide below", "constant", "option", "library"],
)
def test_what_changes_the_compiled_kernel_compiles_again(kernel: Kernel, other: dict[str, Any]) -> None:
    usual = {
        "x": gpu(8), "n": 5, "scale": 0.5, "constants": {"BLOCK": 16, "FLAG": True}, "options": {"num_warps": 4}
    }  # fmt: skip
    for call in (usual, usual | other):
        launch(kernel, (1,), (call["x"], call["n"], call["scale"]), call["constants"], call["options"])
    assert len(kernel.compilations) == 2


@pytest.mark.parametrize(
    "other",
    [{"n": 6}, {"n": 0x7FFFFFFF}, {"n": -(2**31) + 1}, {"scale": 0.25}],
    ids=["number", "largest", "smallest", "float"],
)
def test_what_is_not_compiled_in_compiles_nothing(kernel: Kernel, other: dict[str, Any]) -> None:
    usual = {"x": gpu(8), "n": 5, "scale": 0.5}
    for call in (usual, usual | other):
        launch(kernel, (1,), (call["x"], call["n"], call["scale"]), {"BLOCK": 16, "FLAG": True}, {"num_warps": 4})
    assert len(kernel.compilations) == kernel.loads == 1
    assert [args[1:3] for _, args in kernel.launches] == [(5, 0.5), (other.get("n", 5), other.get("scale", 0.5))]


def test_kernels_stay_few_whatever_the_numbers(kernel: Kernel) -> None:
    """Over ranks the number of segments changes from call to call."""
    before, x = len(module._compiled), gpu(8)
    for n in range(300):
        launch(kernel, (1,), (x, n, 0.5), {"BLOCK": 16, "FLAG": True}, {"num_warps": 4})
    assert len(kernel.compilations) == kernel.loads == len(module._compiled) - before == 3  # 1, by 16, others
    assert [args[1] for _, args in kernel.launches] == [*range(300)]


def test_numbers_that_are_not_specialised_build_one_kernel(kernel: Kernel) -> None:
    class Free(Kernel):
        free = ("n",)

    free = Free()
    for n in range(300):
        launch(free, (1,), (gpu(8), n, 0.5), {"BLOCK": 16, "FLAG": True}, {"num_warps": 4})
    assert len(free.compilations) == 1


def test_the_key_is_what_the_kernel_is_built_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of one key are built alike, calls of two keys are not: neither stale kernels nor more than are needed."""

    def compiled(kernel: Any, *what: Any) -> Any:
        return SimpleNamespace(what=repr(what), metadata=SimpleNamespace(shared=0))

    monkeypatch.setattr(private, "compile_kernel", compiled)

    class Free(Kernel):
        free = ("n", "y")
        __name__ = "free"
        arg_names = ("x", "y", "n", "m", "scale", "flag", "PDL")

    made, built = Free(), {}
    tensors = [None, torch.zeros(8), torch.zeros(9)[1:], torch.zeros(8, dtype=torch.bfloat16)]
    numbers = [-(2**40), -(2**31) - 1, -(2**31), -1, 0, 1, 5, 16, 2**31 - 1, 2**31, 2**40, True]
    for _ in range(4000):
        args = (*random.choices(tensors, k=2), *random.choices(numbers, k=2), random.random(), random.random() < 0.5)
        key = module.specialisation(made, args, {}, {})
        text = module.build(made, args, {"PDL": True}, {}, private.gpu_target(80)).what
        assert built.setdefault(key, text) == text, args
    assert len(set(built.values())) == len(built)


@pytest.mark.usefixtures("kernel")
def test_memory_of_the_host_is_left_to_the_driver() -> None:
    class Pinned(Kernel):
        arg_names = ("x", "record", "PDL")

    pinned, record = Pinned(), torch.zeros(4)
    launch(pinned, (1,), (gpu(8), record), {}, {})
    assert pinned.launches[0][1][1] is record


@pytest.mark.parametrize(("capability", "expected"), [((8, 0), False), ((9, 0), True), ((10, 0), True)])
def test_dependent_launch_needs_hopper(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: bool
) -> None:
    monkeypatch.setattr(module, "dependent", dependent.__wrapped__)
    monkeypatch.setattr(module, "current_target", lambda: private.gpu_target(10 * capability[0] + capability[1]))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    launch(kernel, (1,), (gpu(8), 5, 0.5), {"BLOCK": 16, "FLAG": True}, {})
    _, constants, options, _ = kernel.compilations[0]
    assert (constants["PDL"], options["launch_pdl"], kernel.launches[0][1][-1]) == (expected,) * 3


def test_the_newest_ptxas_that_torch_can_load_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def tool(name: str, version: str) -> str:
        path = tmp_path / name / "bin" / "ptxas"
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/sh\necho Cuda compilation tools, release {version}, V{version}.1\n")
        path.chmod(0o755)
        return str(path)

    def found(cuda: str | None) -> str:
        monkeypatch.setattr(torch.version, "cuda", cuda)
        return newer_assembler.__wrapped__().version

    own, other = tool("own", "12.8"), tool("other", "12.9")
    monkeypatch.setenv("TRITON_PTXAS_PATH", own)
    monkeypatch.setenv("TRITON_PTXAS_BLACKWELL_PATH", other)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "none"))
    assert found("12.8") == found("13.0") == "12.9"
    tool("toolkit", "13.0")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    assert found("12.8") == "12.9"
    assert found("13.0") == found(None) == "13.0"
    monkeypatch.setenv("TRITON_PTXAS_BLACKWELL_PATH", own)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert newer_assembler.__wrapped__() is None


@pytest.mark.parametrize(("own", "old"), [("12.8", True), ("12.9", False), ("13.2", False)])
def test_tritons_own_choice_may_be_new_enough(own: str, old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be of a newer CUDA than torch's, which is not taken for another."""
    monkeypatch.setattr(module, "newer_assembler", lambda: None)
    monkeypatch.setattr(module.private, "assembler_for", lambda arch: knobs.NvidiaTool("somewhere/ptxas", own))
    assert module.only_old_assemblers() is old


def test_the_newer_ptxas_is_that_of_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """What others compile meanwhile is assembled by Triton's own from beginning to end."""
    from triton.backends.nvidia import compiler

    newer = knobs.NvidiaTool("elsewhere/ptxas", "13.9")
    monkeypatch.setattr(module, "newer_assembler", lambda: newer)
    own, key = compiler.get_ptxas(90), compiler.get_ptxas_version(90)
    with ThreadPoolExecutor(1) as other, module._assembler(90) as told:
        assert told == {"flexsp_ptxas": "13.9"} and compiler.get_ptxas(90) is newer
        assert other.submit(compiler.get_ptxas, 90).result().path == own.path
        assert compiler.get_ptxas_version(90) == key
    with module._assembler(80) as nothing:
        assert nothing == {}
    assert compiler.get_ptxas(90).path == own.path
