"""What is worked out once for calls that look alike is worked out anew for a call that differs in one thing."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import flexsp
from flexsp import ops
from flexsp.comm.group import SequenceParallel
from flexsp.compiler.arguments import signature_of
from flexsp.exceptions import checks_wanted
from flexsp.kernels import executable as executables
from flexsp.kernels import run as launches
from flexsp.kernels.diagonal.op import Diagonal, Ssd
from flexsp.ops import _validate, chunk_simple_gla
from tests import host_time, variants
from tests.harness.executables import scalar_decay_executable

Tensors = dict[str, torch.Tensor]
HALF = torch.float16


def drawn(docs: int = 2) -> Tensors:
    x = {name: torch.randn(1, 20, 2, 16, dtype=HALF) for name in "qkv"}
    return x | {"g": -torch.rand(1, 20, 2, dtype=HALF), "initial_state": torch.randn(docs, 2, 16, 16)}


def call(x: Tensors, bounds: tuple[int, ...] = (0, 9, 20), frozen: str = "", final: bool = True, **more: Any) -> None:
    leaves = {name: y.requires_grad_(name != frozen) for name, y in x.items()}
    o, last = chunk_simple_gla(
        **leaves, cu_seqlens=torch.tensor(bounds), output_final_state=more.pop("wanted", True), **more
    )
    ends = [o, last] if final and last is not None else [o]
    torch.autograd.backward(ends, [torch.zeros_like(y) for y in ends])


def turned(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def unaligned(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)


CHANGES: dict[str, tuple[Any, tuple[int, int]]] = {
    "nothing": (lambda x: call(x), (0, 0)),
    "the scale": (lambda x: call(x, scale=2.0), (1, 1)),
    "whether final states are wanted": (lambda x: call(x, wanted=False), (1, 1)),
    "whether there are initial states": (lambda x: call({k: y for k, y in x.items() if k != "initial_state"}), (1, 1)),
    "strides": (lambda x: call(x | {"q": turned(x["q"])}), (1, 1)),
    "alignment": (lambda x: call(x | {"k": unaligned(x["k"])}), (1, 1)),
    "the type of gates": (lambda x: call(x | {"g": x["g"].float()}), (1, 1)),
    "how many documents there are": (lambda x: call(drawn(3), (0, 9, 12, 20)), (1, 1)),
    "whether gates want gradients": (lambda x: call(x, frozen="g"), (0, 1)),
    "whether initial states want gradients": (lambda x: call(x, frozen="initial_state"), (0, 1)),
    "whether final states have gradients": (lambda x: call(x, final=False), (0, 1)),
}
"""What a second call differs in, and how many forward and backward calls are worked out for it."""


@pytest.mark.parametrize("change", CHANGES)
def test_what_tells_calls_of_the_engine_apart(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXSP_BACKEND", "triton")
    monkeypatch.setattr(executables, "run_steps", lambda *args: None)  # no kernel runs
    monkeypatch.setattr(Diagonal, "_executables", {})

    def worked_out() -> list[int]:
        return [len(Diagonal._executables), sum(len(x.backwards) for x in Diagonal._executables.values())]

    call(drawn())
    before = worked_out()
    assert before == [1, 1]
    second, more = CHANGES[change]
    second(drawn())
    assert [b - a for a, b in zip(before, worked_out(), strict=True)] == list(more)


def test_the_number_of_documents_tells_calls_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without initial states, whose number would tell them apart too."""
    monkeypatch.setenv("FLEXSP_BACKEND", "triton")
    monkeypatch.setattr(executables, "run_steps", lambda *args: None)  # no kernel runs
    monkeypatch.setattr(Diagonal, "_executables", {})
    x = {name: y for name, y in drawn().items() if name != "initial_state"}
    for n, bounds in enumerate([(0, 9, 20), (0, 9, 12, 20), (0, 5, 20)]):
        call(x, bounds)
        assert len(Diagonal._executables) == min(n + 1, 2)


def drawn_dual(groups: int = 2, *left_out: str) -> Tensors:
    """Of mamba2_ssd. B and C are parts of wider tensors, so that their strides tell no number of groups."""
    B, C = (torch.randn(1, 20, 2, 16, dtype=HALF)[:, :, :groups] for _ in "BC")
    x = {"x": torch.randn(1, 20, 2, 16, dtype=HALF), "dt": torch.rand(1, 20, 2), "A": -torch.rand(2), "B": B, "C": C}
    x |= {"D": torch.rand(2), "dt_bias": torch.rand(2)}
    return {name: y for name, y in x.items() if name not in left_out}


DUALS: dict[str, tuple[Tensors, dict[str, Any], int]] = {
    "nothing": (drawn_dual(), {}, 0),
    "fewer groups": (drawn_dual(1), {}, 1),
    "softplus": (drawn_dual(), {"dt_softplus": True}, 1),
    "no skip": (drawn_dual(2, "D"), {}, 1),
    "no bias": (drawn_dual(2, "dt_bias"), {}, 1),
    "the type of steps": (drawn_dual() | {"dt": torch.rand(1, 20, 2, dtype=HALF)}, {}, 1),
}
"""Of a second call of mamba2_ssd its tensors, its options, and how many calls are worked out for it."""


@pytest.mark.parametrize("change", DUALS)
def test_what_tells_calls_of_the_dual_apart(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXSP_BACKEND", "triton")
    monkeypatch.setattr(executables, "run_steps", lambda *args: None)  # no kernel runs
    monkeypatch.setattr(Ssd, "_executables", {})
    tensors, options, more = DUALS[change]
    for left_out in ("D", "dt_bias"):  # calls with as many tensors of the same sizes
        ops.mamba2_ssd(**drawn_dual(2, left_out))
        assert len(Ssd._executables) == 1 + (left_out == "dt_bias")
    Ssd._executables.clear()
    ops.mamba2_ssd(**drawn_dual())
    ops.mamba2_ssd(**tensors, **options)
    assert len(Ssd._executables) == 1 + more


def test_what_tells_generated_calls_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    x, state, cu = torch.randn(1, 20, 2, 16), torch.randn(2, 2, 16, 16), torch.tensor([0, 9, 20])
    sp = SequenceParallel()
    given: dict[str, Any] = {"inputs": {"q": x, "k": x}, "prev_s": state, "cu_seqlens": cu, "sp": sp}
    changes: dict[str, dict[str, Any]] = {
        "names": {"inputs": {"k": x, "q": x}},
        "shapes": {"inputs": {"q": x, "k": torch.empty_strided((1, 19, 2, 16), x.stride())}},
        "strides": {"inputs": {"q": x, "k": turned(x)}},
        "types": {"inputs": {"q": x, "k": x.view(torch.int32)}},
        "devices": {"inputs": {"q": x, "k": x.to("meta")}},
        "alignment": {"inputs": {"q": x, "k": unaligned(x)}},
        "states": {"prev_s": None},
        "strides of states": {"prev_s": turned(state)},
        "documents": {"cu_seqlens": None},
        "how many documents": {"cu_seqlens": torch.tensor([0, 20])},
        "ranks": {"sp": None},
        "other ranks": {"sp": SequenceParallel()},
    }
    first = signature_of(**given)
    assert first == signature_of(**(given | {"inputs": {"q": x.clone(), "k": x.clone()}}))
    alike = [name for name, change in changes.items() if signature_of(**(given | change)) == first]
    assert not alike
    monkeypatch.setenv("FLEXSP_BACKEND", "triton")
    assert signature_of(**given) != first


@pytest.mark.parametrize("autotune", [False, True])
def test_a_plan_tuned_without_gradients_is_not_used_with_them(autotune: bool) -> None:
    """On a CPU nothing is tuned, but the calls are told apart."""
    model = variants.load("linear").make(2, 16, 16, torch.float32)
    model._autotune = autotune
    x = {name: torch.randn(1, 20, 2, 16) for name in "qkv"}
    for _ in range(2):
        model(**x)
        with torch.no_grad():
            model(**{name: y.clone().requires_grad_() for name, y in x.items()})
        model(**{name: y.clone().requires_grad_() for name, y in x.items()})
    assert len(model._calls) == 1 + autotune


def test_calls_whose_text_leaves_the_scale_out_have_recipes_of_their_own() -> None:
    """As in graphs where it is a symbol."""
    x = drawn()
    given = {name: x[name] for name in ("q", "k", "v", "g")}
    made = [scalar_decay_executable(given, None, 0, scale) for scale in (0.1, 0.2, 0.1)]
    assert made[0] is made[2] and made[0] is not made[1]


# What a call does that was worked out before --------------------------------------------------------------------------

FUNCTIONS = {
    "chunk_simple_gla": 21, "mamba2_ssd": 21, "chunk_gated_delta_rule": 25, "chunk_rwkv7": 25, "chunk_hgrn": 27,
    "chunk_mlstm": 52,
}  # fmt: skip
"""How many functions of this package a forward call may run, each of which costs the host a part of a microsecond."""


@pytest.mark.parametrize("op", FUNCTIONS)
def test_calls_worked_out_before_run_few_functions(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXSP_BACKEND", "triton")
    monkeypatch.setattr(executables, "run_steps", lambda *args: None)  # no kernel runs
    monkeypatch.setattr(launches, "run_steps", lambda *args: None)
    monkeypatch.setattr(_validate, "readable", lambda x: checks_wanted())  # nor are values read, as on a GPU
    inputs, folder = host_time.inputs_of(op), str(Path(flexsp.__file__).parent)
    options = host_time.OPTIONS.get(op, {})
    run: list[str] = []

    def note(frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(folder) and not code.co_name.startswith("<"):
            run.append(code.co_name)

    for profile in (None, None, note):
        sys.setprofile(profile)
        try:
            with torch.no_grad():
                getattr(ops, op)(**inputs, **options)
        finally:
            sys.setprofile(None)
    assert 0 < len(run) <= FUNCTIONS[op], f"{len(run)} functions: {run}"
