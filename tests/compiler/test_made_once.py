"""Variants while they are made, kept and let go: in threads, in graphs, and in another process."""

from __future__ import annotations

import gc
import os
import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from flexsp.compiler import CompileError, ConstExpr, LinearAttention, SymbTensor, torch_compile
from flexsp.compiler.backend.generated_kernels import Generated
from flexsp.ops import recurrent_simple_gla
from flexsp.runtime.clean_thread import run_in_clean_thread
from flexsp.variants import gla, simple_gla

CPU = torch.device("cpu")


def _inputs(T: int = 5, K: int = 4) -> dict[str, torch.Tensor]:
    q, k, v = (torch.randn(1, T, 1, K, requires_grad=True) for _ in range(3))
    return {"q": q, "k": k, "v": v, "g": -torch.rand(1, T, 1)}


def test_a_variant_made_inside_another_ones_function_is_refused() -> None:
    """It used to wait for itself, and with it every variant made later in the process."""

    def chunk(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        simple_gla.make(1, 2, 2)
        return k.T @ v

    H, K, V = ConstExpr("H", 1), ConstExpr("K", 2), ConstExpr("V", 2)
    meta = {"q": SymbTensor(["T", H, K]), "k": SymbTensor(["T", H, K]), "v": SymbTensor(["T", H, V])}
    meta["prev_s"] = SymbTensor(["NS", H, K, V])
    with pytest.raises(CompileError, match="made while the functions of another one are traced"):
        LinearAttention(
            meta, chunk, lambda prev_s, chunk_state: prev_s + chunk_state, lambda q, chunk_state: q @ chunk_state
        )
    assert simple_gla.make(1, 2, 2).program is not None


@pytest.mark.parametrize("error", [SystemExit("over"), KeyboardInterrupt(), ValueError("wrong")])
def test_errors_of_any_kind_come_back_from_elsewhere(error: BaseException) -> None:
    def work() -> None:
        raise error

    with pytest.raises(type(error)) as told:
        run_in_clean_thread(CPU, work)
    assert told.value is error


def test_graphs_tell_variants_apart_and_know_them_in_another_process() -> None:
    """Inductor's cache on disk holds graphs by these names."""

    def name(variant: LinearAttention) -> str:
        return variant.graph_name.rsplit(" ", 1)[0]

    assert not re.search(r"0x[0-9a-f]{6}", gla.make(1, 4, 4).likeness()), "an address"
    assert name(gla.make(1, 4, 4)) == name(gla.make(1, 4, 4))
    others = [simple_gla.make(1, 4, 4), gla.make(1, 4, 4, chunk_size=16), gla.make(1, 4, 8), gla.make(2, 4, 4)]
    assert len({name(x) for x in (gla.make(1, 4, 4), *others)}) == 5
    assert gla.make(1, 4, 4).graph_name != gla.make(1, 4, 4).graph_name, "a graph runs the variant that it was made of"


def test_another_release_of_the_package_makes_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch_compile.name_of(gla.make(1, 4, 4))
    monkeypatch.setattr(torch_compile, "_package", lambda: "another")
    assert torch_compile.name_of(gla.make(1, 4, 4)).split()[0] != before.split()[0]


class _Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.variant = simple_gla.make(1, 4, 4)

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        return self.variant(**inputs)[0]


def test_a_graph_keeps_its_variant_for_the_backward_pass() -> None:
    inputs = _inputs()

    def loss() -> torch.Tensor:
        torch._dynamo.reset()
        out: torch.Tensor = torch.compile(_Layer(), fullgraph=True, backend="aot_eager")(**inputs).square().sum()
        return out

    found = loss()
    gc.collect()
    found.backward()
    got = inputs["q"].grad
    inputs["q"].grad = None
    _Layer()(**inputs).square().sum().backward()
    torch.testing.assert_close(got, inputs["q"].grad)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_second_derivatives_through_a_graph_raise(backend: str) -> None:
    """torch.compile(backend="eager") runs operators only, and would leave them out without a word."""
    inputs, variant = _inputs(), simple_gla.make(1, 4, 4)
    torch._dynamo.reset()
    f = torch.compile(lambda **x: variant(**x)[0], backend=backend, fullgraph=True)
    first, *_ = torch.autograd.grad(f(**inputs).square().sum(), inputs["q"])
    assert first.norm() > 0
    with pytest.raises(Exception, match="second derivatives|double backward|in-place operation|create_graph=False"):
        (dq,) = torch.autograd.grad(f(**inputs).square().sum(), inputs["q"], create_graph=True)
        dq.square().sum().backward()


def test_calls_in_threads_do_not_meet() -> None:
    """Forward-mode differentiation, for one, has one state for all threads: results of the others were wrong."""
    inputs = _inputs(T=50) | {"g": -torch.rand(1, 50, 1, 4)}
    model = gla.make(1, 4, 4, chunk_size=4)
    want = model(**inputs)
    with ThreadPoolExecutor(6) as pool:
        made = list(pool.map(lambda _: gla.make(1, 4, 4, chunk_size=4), range(12)))
        for got in pool.map(lambda i: made[i % 12](**inputs), range(240)):
            assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_the_final_state_of_no_tokens_is_not_the_callers_tensor() -> None:
    inputs, state = _inputs(T=0), torch.randn(1, 1, 4, 4)
    given = simple_gla.make(1, 4, 4).program.meta
    meta = {**given.tokens, **given.numbers, "prev_s": given.state}
    curved = lambda prev_s, chunk_state: prev_s.tanh() + chunk_state  # noqa: E731
    chained = LinearAttention(meta, simple_gla.chunk, curved, simple_gla.merge, chunk_size=64)
    for final in (
        simple_gla.make(1, 4, 4)(**inputs, prev_s=state)[1],
        chained(**inputs, prev_s=state)[1],
        recurrent_simple_gla(**inputs, initial_state=state, output_final_state=True)[1],
    ):
        assert torch.equal(final, state)
        assert final.data_ptr() != state.data_ptr()


@pytest.mark.parametrize("code_dir", [5, b"folder", True])
def test_code_dir_is_checked(code_dir: Any) -> None:
    with pytest.raises(ValueError, match="code_dir: expected a path or None, got"):
        gla.make(1, 4, 4, code_dir=code_dir)


def test_the_aot_arch_is_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLEXSP_AOT_ARCH", "sm_90")
    with pytest.raises(ValueError, match="FLEXSP_AOT_ARCH: expected a compute capability such as 90, got 'sm_90'"):
        gla.make(1, 4, 4, code_dir=tmp_path, enable_aot=True)


def test_folders_that_are_not_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty variable counts as unset; a user without a home needs none where a folder is named."""

    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    program = gla.make(1, 4, 4).program
    derived = Generated(program).derive()  # once: it takes a second, and no folder has a part in it

    def folder(**options: Any) -> Path:
        kernels = Generated(program, **options)
        kernels._found = derived
        return kernels.path.parent

    monkeypatch.setenv("FLEXSP_CODE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert folder() == Path.home() / ".cache" / "flexsp" / "generated"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert folder() == tmp_path / "flexsp" / "generated"
    monkeypatch.setattr(Path, "home", nobody)
    assert folder(code_dir=str(tmp_path / "a")) == tmp_path / "a"
    monkeypatch.setenv("FLEXSP_CODE_DIR", str(tmp_path / "b"))
    assert folder() == tmp_path / "b"
    monkeypatch.setenv("FLEXSP_CODE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    own = folder()
    assert own == folder() and own.stat().st_mode & 0o777 == 0o700 and own.parent == Path(tempfile.gettempdir())
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "file")  # nothing can be made there, by root neither
    assert folder() == own
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "read only")
    monkeypatch.setattr(os, "access", lambda path, mode: tmp_path not in Path(path).parents)
    assert folder() == own
