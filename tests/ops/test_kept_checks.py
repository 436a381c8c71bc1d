"""What is looked at once of arguments that look alike: what tells them apart, and what is looked at in every call."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flexsp import ops
from flexsp.kernels import executable, run
from flexsp.ops import _delta, _validate
from flexsp.testing.compare import relative_error
from flexsp.testing.ranks import run_ranks
from tests.harness.interpreted import INTERPRETED

Tensors = dict[str, torch.Tensor]


class Own(torch.Tensor):
    pass


def turned(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def counted() -> tuple[Callable[..., Any], list[Any]]:
    """A check, and what it looked at."""
    seen: list[Any] = []

    @_validate.once
    def check(*args: Any) -> int:
        seen.append([type(x) for x in args])
        if type(args[-1]) is str:
            raise ValueError("wrong")
        return len(seen)

    return check, seen


X = torch.randn(2, 3)
CHANGES: dict[str, tuple[tuple[Any, ...], bool]] = {
    "other numbers": ((torch.randn(2, 3), 1), False),
    "strides": ((torch.randn(3, 2).T, 1), False),
    "whether gradients are wanted": ((torch.randn(2, 3).requires_grad_(), 1), False),
    "parameters": ((torch.nn.Parameter(torch.randn(2, 3)), 1), False),
    "shapes": ((torch.randn(3, 2), 1), True),
    "dtypes": ((torch.randn(2, 3).double(), 1), True),
    "devices": ((torch.empty(2, 3, device="meta"), 1), True),
    "no tensor": ((None, 1), True),
    "another number": ((X, 2), True),
    "True for 1": ((X, True), True),
    "1.0 for 1": ((X, 1.0), True),
    "more arguments": ((X, 1, None), True),
    "another order": ((1, X), True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_tells_arguments_apart(change: str) -> None:
    check, seen = counted()
    assert check(X, 1) == check(X, 1) == 1
    args, anew = CHANGES[change]
    assert check(*args) == 1 + anew and len(seen) == 1 + anew
    assert check(X, 1) == 1


@pytest.mark.parametrize(
    "args",
    [
        (X, "fails"), (X.as_subclass(Own), 1), (X.to_sparse(), 1), (torch.nested.nested_tensor([X, X]), 1), (X, [1]),
        (X, {1: 2}),
    ],
    ids=["failures", "subclasses", "sparse", "nested", "lists", "dicts"],
)  # fmt: skip
def test_what_is_looked_at_anew(args: tuple[Any, ...]) -> None:
    check, seen = counted()
    for _ in range(2):
        try:
            check(*args)
        except ValueError:
            assert args[-1] == "fails"
    assert len(seen) == 2 and not check.kept  # type: ignore[attr-defined]


def test_traces_keep_nothing() -> None:
    """Their sizes are tensors."""
    check, seen = counted()

    def run(x: torch.Tensor) -> torch.Tensor:
        check(x, 1)
        return x + 1

    torch.jit.trace(run, (X,), check_trace=False)
    assert seen and not check.kept  # type: ignore[attr-defined]


def test_answers_that_are_kept_are_not_many() -> None:
    check, seen = counted()
    for n in range(600):
        check(torch.empty(n), 1)
    assert len(seen) == 600 and len(check.kept) <= 256  # type: ignore[attr-defined]


def test_no_tensor_is_kept_alive() -> None:
    check, _ = counted()
    x = torch.randn(2, 3)
    alive = weakref.ref(x)
    check(x, 1)
    del x
    gc.collect()
    assert alive() is None


def drawn() -> Tensors:
    x = {name: torch.randn(1, 20, 2, 16) for name in "qkv"}
    return x | {"g": -torch.rand(1, 20, 2), "beta": torch.rand(1, 20, 2)}


@pytest.fixture(params=[True, False], ids=["read", "by recipe"])
def read(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether values are read. Where they are not, as on a GPU, the good calls have a recipe."""
    if not request.param:
        monkeypatch.setenv("FLEXSP_BACKEND", "triton")
        monkeypatch.setattr(_validate, "readable", lambda x: False)
        for module in (executable, run):
            monkeypatch.setattr(module, "run_steps", lambda *args: None)  # no kernel runs
    return bool(request.param)


BAD: dict[str, tuple[Callable[[Tensors], dict[str, Any]], str]] = {
    "gates": (lambda x: {"g": x["g"] + 2}, "g: expected natural-log gates"),
    "boundaries": (lambda x: {"cu_seqlens": torch.tensor([0, 9, 21])}, "cu_seqlens: expected a last entry of at"),
    "a flag": (lambda x: {"use_qk_l2norm_in_kernel": 1}, "use_qk_l2norm_in_kernel: expected True or False"),
    "a scale": (lambda x: {"scale": True}, "scale: expected a finite number"),
    "a type": (lambda x: {"beta": x["beta"].double()}, "beta: expected dtype"),
    "a device": (lambda x: {"k": x["k"].to("meta")}, "k: expected a tensor .* with values"),
    "a shape": (lambda x: {"g": x["g"][:, 1:]}, "g: expected shape"),
    "an initial state": (lambda x: {"initial_state": torch.zeros(1, 2, 16, 16)}, "initial_state: expected shape"),
    "strength": (lambda x: {"allow_neg_eigval": True, "use_beta_sigmoid_in_kernel": False}, "allow_neg_eigval:"),
    "a gate's argument": (lambda x: {"A_log": torch.zeros(2)}, "A_log: expected None"),
    "no slope": (lambda x: {"use_gate_in_kernel": True}, "A_log: expected a tensor"),
    "a slope's shape": (lambda x: {"use_gate_in_kernel": True, "A_log": torch.zeros(3)}, r"A_log: expected shape \[HV"),
}


@pytest.mark.parametrize("change", BAD)
def test_bad_arguments_after_good_ones(change: str, read: bool) -> None:
    if not read and change in ("gates", "boundaries"):
        pytest.skip("values are not read")
    x, (made, message) = drawn(), BAD[change]
    good: dict[str, Any] = {
        "cu_seqlens": torch.tensor([0, 9, 20]), "initial_state": torch.zeros(2, 2, 16, 16), "scale": 1.0,
        "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
    }  # fmt: skip
    for _ in range(2):
        ops.chunk_gated_delta_rule(**x, **good)
        with pytest.raises(ValueError, match=message):
            ops.chunk_gated_delta_rule(**(x | good | made(x)))


def drawn_dual() -> Tensors:
    x = {"x": torch.randn(1, 20, 4, 16), "dt": torch.rand(1, 20, 4), "A": -torch.rand(4), **groups(2)}
    return x | {"D": torch.rand(4), "dt_bias": torch.rand(4)}


def groups(n: int) -> Tensors:
    return {name: torch.randn(1, 20, n, 8) for name in "BC"}


BAD_DUAL: dict[str, tuple[dict[str, Any], str]] = {
    "rates": ({"A": torch.rand(4)}, "A: expected values <= 0"),
    "steps": ({"dt": -torch.rand(1, 20, 4) - 1}, "dt: expected step sizes >= 0"),
    "a flag": ({"dt_softplus": 1}, "dt_softplus: expected True or False"),
    "groups of queries": ({"C": torch.randn(1, 20, 1, 8)}, "C: expected shape"),
    "groups of both": (groups(3), "B: expected a number of groups"),
    "a skip": ({"D": torch.rand(4, 8)}, "D: expected shape"),
    "a bias's type": ({"dt_bias": torch.rand(4).double()}, "dt_bias: expected dtype"),
}


@pytest.mark.parametrize("change", BAD_DUAL)
def test_bad_arguments_of_mamba2_after_good_ones(change: str, read: bool) -> None:
    if not read and change in ("rates", "steps"):
        pytest.skip("values are not read")
    x, (made, message) = drawn_dual(), BAD_DUAL[change]
    for _ in range(2):
        ops.mamba2_ssd(**x)
        with pytest.raises(ValueError, match=message):
            ops.mamba2_ssd(**(x | made))


def test_gates_are_looked_at_as_soon_as_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that did not look does not keep the next one from looking."""
    monkeypatch.setattr(_validate, "readable", lambda x: False)
    x = drawn() | {"g": torch.rand(1, 20, 2)}
    ops.chunk_gated_delta_rule(**x)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="g: expected natural-log gates"):
        ops.chunk_gated_delta_rule(**x)


def test_one_look_at_the_heads_of_calls_that_look_alike() -> None:
    kept = _delta.check_heads.kept  # type: ignore[attr-defined]
    kept.clear()
    for _ in range(3):
        ops.chunk_gated_delta_rule(**drawn())
    ops.chunk_gated_delta_rule(**(drawn() | {"q": turned(drawn()["q"])}), use_qk_l2norm_in_kernel=True)
    assert len(kept) == 1
    ops.chunk_delta_rule(**{name: y for name, y in drawn().items() if name != "g"})
    ops.chunk_kda(**(drawn() | {"g": -torch.rand(1, 20, 2, 16)}))
    assert len(kept) == 3


# Calls that differ in one thing from one before ---------------------------------------------------------------------


def variations(x: Tensors) -> dict[str, dict[str, Any]]:
    raw = {"use_gate_in_kernel": True, "A_log": torch.rand(2), "dt_bias": torch.rand(2)}
    return {
        "nothing": {}, "scale": {"scale": 2.0}, "strides": {"k": turned(x["k"])},
        "units": {"use_qk_l2norm_in_kernel": True}, "sigmoid": {"use_beta_sigmoid_in_kernel": True},
        "final": {"output_final_state": True},
        "negative": {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}, "raw gates": raw,
        "another bias": raw | {"dt_bias": torch.rand(2)}, "documents": {"cu_seqlens": torch.tensor([0, 7, 20])},
        "other documents": {"cu_seqlens": torch.tensor([0, 13, 20])},
        "initial": {"initial_state": torch.randn(1, 2, 16, 16), "output_final_state": True},
        "turned": {"initial_state": torch.randn(1, 2, 16, 16), "output_final_state": True, "state_v_first": True},
        "value heads": {"v": torch.randn(1, 20, 4, 16), "g": -torch.rand(1, 20, 4), "beta": torch.rand(1, 20, 4)},
    }  # fmt: skip


def differences(sp: object, seed: int) -> dict[str, float]:
    """From the same in float64, of outputs and gradients; each call follows a call without the change."""
    torch.manual_seed(seed)
    x, found = drawn(), {}
    x["k"] = torch.nn.functional.normalize(x["k"], dim=-1)

    def results(more: dict[str, Any], dtype: torch.dtype) -> list[torch.Tensor]:
        given = {
            name: y.to(dtype).requires_grad_() if torch.is_tensor(y) and y.is_floating_point() else y
            for name, y in (x | more).items()
        }
        outs = [y for y in ops.chunk_gated_delta_rule(**given) if y is not None]
        leaves = [y for y in given.values() if torch.is_tensor(y) and y.requires_grad]
        generator = torch.Generator().manual_seed(seed)
        cotangents = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype) for y in outs]
        return [*outs, *torch.autograd.grad(outs, leaves, cotangents)]

    for name, more in variations(x).items():
        with torch.no_grad():
            ops.chunk_gated_delta_rule(**x)
        want = results(more, torch.float64)
        got = results(more, torch.float32)
        ambient = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            again = results(more, torch.float32)
        torch.set_default_dtype(ambient)
        pairs = zip([*got, *again], [*want, *want], strict=True)
        found[name] = max(relative_error(a, b) for a, b in pairs)
        assert [y.dtype for y in again] == [y.dtype for y in got]
    return found


def test_calls_that_differ_in_one_thing() -> None:
    (found,) = run_ranks(differences, 1, random.randrange(2**31), env=INTERPRETED, timeout=300)
    assert max(found.values()) < 1e-4, found
