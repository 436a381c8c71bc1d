"""Variants that the engine for scalar decays runs: linear attention, simple GLA and RetNet, as programs."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from flexsp import ops
from flexsp.compiler import ConstExpr, LinearAttention, SymbTensor
from flexsp.compiler.backend import generated_kernels
from flexsp.compiler.graphs.values import NotEmittable
from flexsp.kernels.diagonal.diagonal_plan import DiagonalPlan
from flexsp.testing.compare import relative_error
from flexsp.testing.ranks import run_ranks
from flexsp.variants import hgrn, hgrn2, linear, retnet, simple_gla
from flexsp.variants.scalar_decay import SCALAR_DECAY
from tests.harness.generated import MANY_SEGMENTS, ONE_SEGMENT, Run, check_runs, documents
from tests.harness.interpreted import INTERPRETED
from tests.marks import quick

NAMES = ["linear", "simple_gla", "retnet"]
MODULES = {"linear": linear, "simple_gla": simple_gla, "retnet": retnet}
H, K, V = 2, 20, 24


def runs(name: str, **options: Any) -> Run:
    few = {"H": 6} if name == "retnet" else {}  # of gradients that sum over tokens, one a head
    return Run(name, **({"lowering": "auto"} | few | options))


@pytest.mark.parametrize("name", quick(NAMES, "simple_gla", "retnet"))
def test_batched_and_packed(name: str, folder: str) -> None:
    """Against token loops, with initial states and gradients of final ones; any strides, half precision."""
    packed = documents(150, 4)
    check_runs(
        folder,
        runs(name, T=130, B=2, strided=True), runs(name, T=150, bounds=packed), runs(name, T=1), runs(name, T=0, B=2),
        runs(name, T=150, bounds=(0, 0, 70, 70, 150), dtype=torch.bfloat16, segments=MANY_SEGMENTS),
        runs(name, T=65, dtype=torch.bfloat16, segments=ONE_SEGMENT),
    )  # fmt: skip


@pytest.mark.parametrize("name", quick(NAMES, "simple_gla", "linear"))
def test_over_ranks(name: str, folder: str) -> None:
    lengths = (70, 0, 60)
    check_runs(
        folder, runs(name, T=130, lengths=lengths), runs(name, T=130, lengths=lengths, bounds=(0, 20, 20, 100, 130))
    )  # fmt: skip


def test_gates_from_growth_to_closed(folder: str) -> None:
    """Programs may have gates above 0, which the ops refuse."""
    given = [(0.3, -0.2, 0.0), (-104.0, -1.0)]
    check_runs(folder, *(runs("simple_gla", T=150, gates=gates) for gates in given))


def tensors(name: str, lead: tuple[int, ...], T: int, width: int = K) -> dict[str, torch.Tensor]:
    x = {key: torch.randn(*lead, T, H, V if key == "v" else width) for key in "qkv"}
    gates = {"simple_gla": {"g": -torch.rand(*lead, T, H)}, "retnet": {"log_gamma": -torch.rand(H)}}
    return x | gates.get(name, {})


def called(sp: Any, name: str) -> list[str]:
    """What is wrong of calls of one sequence, in graphs, and of what an engine leaves to the generated kernels."""
    wrong, make = [], MODULES[name].make
    model, functions = make(H, K, V), make(H, K, V, lowering="generated")

    def right(what: str, got: Any, x: dict[str, torch.Tensor], of: Any = functions, **given: Any) -> None:
        leaves = [y.detach().double().requires_grad_() for y in x.values()]
        o, final = of(**dict(zip(x, leaves, strict=True)), **given)
        want = [o, final, *torch.autograd.grad(o.sum() + final.square().sum(), leaves)]
        errors = [relative_error(a.double(), b) for a, b in zip(got, want, strict=True)]
        if max(errors) > 1e-5 or any(a.shape != b.shape for a, b in zip(got, want, strict=True)):
            wrong.append(f"{what}: {errors}")

    def answer(call: Any, x: dict[str, torch.Tensor], **given: Any) -> list[torch.Tensor]:
        leaves = {key: y.requires_grad_() for key, y in x.items()}
        o, final = call(**leaves, **given)
        return [o, final, *torch.autograd.grad(o.sum() + final.square().sum(), list(leaves.values()))]

    bounds = torch.tensor([0, 30, 30, 77])
    x = tensors(name, (), 77)
    right("one sequence", answer(model, x), x)
    right("one sequence of documents", answer(model, x, cu_seqlens=bounds), x, cu_seqlens=bounds)
    kinds = {type(call.executable.plan) for call in model._calls.values() if call.executable is not None}
    wrong += [] if kinds == {DiagonalPlan} else [f"ran {kinds}"]
    x = tensors(name, (1,), 77)
    compiled = torch.compile(lambda **y: model(**y), fullgraph=True, backend="aot_eager")
    right("graph", answer(compiled, x), x)
    right("graph of documents", answer(compiled, x, cu_seqlens=bounds), x, cu_seqlens=bounds)
    wide, y = make(H, 256, 256), {key: z[:, :20] if key != "log_gamma" else z for key, z in x.items()}
    y |= {key: torch.randn(1, 20, H, 256) for key in "qkv"}
    right("no kernels are generated", answer(wide, y), y, make(H, 256, 256, lowering="generated"))
    if "scalar_decay" not in (said := wide.runs(**y)) or "on a GPU a call with H = 2" not in wide.explain():
        wrong.append(said)
    others = [(make(H, K, V, chunk_size=16), x), (make(H, 300, V), tensors(name, (1,), 20, 300))]
    others += [(model, x | {key: x[key].detach().bfloat16()}) for key in "kv"]
    for variant, y in others:
        if "scalar_decay" in (said := variant.runs(**y)):
            wrong.append(f"{said}: {', '.join(f'{key} {tuple(z.shape)} {z.dtype}' for key, z in y.items())}")
    if model.runs(**x) != "runs kernels of the engine scalar_decay":
        wrong.append(model.runs(**x))
    return wrong


@pytest.mark.parametrize("name", quick(NAMES, "simple_gla", "linear"))
def test_calls(name: str) -> None:
    (wrong,) = run_ranks(called, 1, name, env=INTERPRETED, timeout=200)
    assert not wrong, "\n".join(wrong)


def differs_in_pytorch(sp: Any, name: str, seed: int) -> list[str]:
    """Where the engine in PyTorch and the functions themselves differ, over ranks or not."""
    wrong, models = [], [MODULES[name].make(H, K, V, lowering=lowering) for lowering in ("auto", "generated")]
    cases: list[tuple[int, int, Any]] = [(2, 150, None), (0, 20, None), (1, 0, None), (1, 150, [0, 0, 30, 30, 150])]
    for B, T, bounds in [*cases, (1, 0, [0, 0, 0])]:
        made = torch.Generator().manual_seed(seed)
        x = {key: torch.randn(B, T, H, V if key == "v" else K, generator=made).double() for key in "qkv"}
        x |= {"g": 0.2 - torch.rand(B, T, H, generator=made).double()} if name == "simple_gla" else {}
        x |= {"log_gamma": -torch.rand(H, generator=made).double()} if name == "retnet" else {}
        several, N = sp.world_size > 1, B if bounds is None else len(bounds) - 1
        state = torch.randn(N, H, K, V, generator=made).double()
        parts, found = sp.partition(T), []
        own = slice(sum(parts[: sp.rank]), sum(parts[: sp.rank + 1])) if several else slice(T)
        for model in models:
            leaves = {key: (y if y.dim() == 1 else y[:, own]).clone().requires_grad_() for key, y in x.items()}
            given = {"prev_s": state.clone().requires_grad_()} if bounds is not None or sp.is_first else {}
            packed = {} if bounds is None else {"cu_seqlens": torch.tensor(bounds)}
            results = [y for y in model(**leaves, **given, **packed, sp=sp if several else False) if y is not None]
            asked = [*leaves.values(), *given.values()]
            loss = torch.stack([y.square().sum() for y in results]).sum()
            found.append([*results, *torch.autograd.grad(loss, asked, allow_unused=True)])
        for i, (a, b) in enumerate(zip(*found, strict=True)):
            if (a is None) != (b is None) or (a is not None and relative_error(a, b) > 1e-12):
                wrong.append(f"{name}, {B} x {T}, {bounds}: {i}")
    return wrong


@pytest.mark.parametrize("ranks", [1, 3])
def test_in_pytorch_as_the_functions(ranks: int, seed: int) -> None:
    for name in NAMES:
        assert run_ranks(differs_in_pytorch, ranks, name, seed, timeout=200) == [[]] * ranks


@pytest.mark.parametrize("chunk_size", [None, 64])
def test_in_pytorch_programs_run_what_ops_run(chunk_size: int | None) -> None:
    """Unless a chunk size is given: sums of gates then lose digits after a closed gate, as they do in the functions."""
    x = tensors("simple_gla", (1,), 77)
    x["g"][:, 10] = -104.0
    o, _ = simple_gla.make(H, K, V, chunk_size=chunk_size)(**x)
    assert torch.equal(o, ops.chunk_simple_gla(**x)[0]) == (chunk_size is None)


def scaled(sp: Any) -> str:
    """The shipped functions with an input in place of their number."""
    h, k, v = ConstExpr("H", H), ConstExpr("K", K), ConstExpr("V", V)
    meta = {name: SymbTensor(["T", h, v if name == "v" else k]) for name in "qkv"}
    meta |= {"scale": SymbTensor([h]), "prev_s": SymbTensor(["NS", h, k, v])}
    model = LinearAttention(meta, linear.chunk, linear.decay, linear.merge, lowerings=[SCALAR_DECAY])
    return model.runs(**tensors("linear", (1,), 30), scale=torch.ones(H))


def test_functions_with_other_inputs() -> None:
    (said,) = run_ranks(scaled, 1, env=INTERPRETED)
    assert said == "runs generated kernels"


def far_gates(sp: Any) -> list[str]:
    """Gates whose gradients go past a chunk that decays by far: later ones grow, or the state before is large."""
    wrong = []
    cases = [
        (torch.bfloat16, {70: 10.0, 130: -10.0}, 0.0, 192, 1e-2),
        (torch.float32, {70: 20.0, 130: -22.0}, 0.0, 192, 1e-5),
        (torch.bfloat16, {70: -10.0}, 1e4, 128, 2e-2), (torch.float32, {70: -25.0}, 1e10, 128, 1e-5),
        (torch.float16, {70: -22.0}, 1e10, 128, 1e-5),
    ]  # fmt: skip
    for dtype, gates, before, first, bound in cases:
        torch.manual_seed(0)
        x = {name: torch.randn(1, 256, 1, 16).to(dtype) for name in "qkv"} | {"g": torch.zeros(1, 256, 1)}
        for token, gate in gates.items():
            x["g"][0, token] = gate
        state, do = before * torch.randn(1, 1, 16, 16), torch.randn(1, 256, 1, 16).to(dtype)
        do[:, :first] = 0
        found = []
        for wide in (torch.float64, None):
            leaves = {name: y.to(wide or y.dtype).requires_grad_() for name, y in x.items()}
            model = simple_gla.make(1, 16, 16, dtype, lowering="generated" if wide else "auto")
            o, _ = model(**leaves, prev_s=state.to(wide or state.dtype))
            found.append(torch.autograd.grad(o, leaves["g"], do.to(o.dtype))[0].double())
        if (error := relative_error(found[1], found[0])) > bound:
            wrong.append(f"{dtype} {gates} {before}: {error}")
    return wrong


def test_gradients_of_gates_before_strong_decay() -> None:
    (wrong,) = run_ranks(far_gates, 1, env=INTERPRETED, timeout=200)
    assert not wrong, "\n".join(wrong)


def odd_inputs(sp: Any) -> list[str]:
    """Inputs that the functions do not take, and sizes of other names: as the functions in PyTorch say."""
    wrong, h = [], ConstExpr("H", H)
    for sizes in (("K", "V", 20), ("D", "E", 20), ("D", "E", 256)):
        k, v = (ConstExpr(name, sizes[2]) for name in sizes[:2])
        meta: dict[str, Any] = {name: SymbTensor(["T", h, v if name == "v" else k]) for name in "qkv"}
        meta |= {"scale": 0.5, "prev_s": SymbTensor(["NS", h, k, v])}
        unused = {"g": SymbTensor(["T", h])} if sizes[0] == "K" else {}
        functions = linear.chunk, linear.decay, linear.merge
        model, plain = (LinearAttention(meta | unused, *functions, lowerings=x) for x in ([SCALAR_DECAY], []))
        x = {name: torch.randn(1, 70, H, sizes[2]) for name in "qkv"} | {name: -torch.rand(1, 70, H) for name in unused}
        doubles = {name: y.double() for name, y in x.items()}
        want = plain(**doubles)[0]
        for o in (model(**x)[0], model(**doubles)[0]):
            if relative_error(o.double(), want) > 1e-5:
                wrong.append(f"{sizes}: {relative_error(o.double(), want)}")
        model.explain()
    other = simple_gla.make(H, 300, 300, fallback="pytorch")
    x = {name: torch.randn(1, 20, H, 300) for name in "qkv"} | {"g": -torch.rand(1, 20, H)}
    x["k"] = x["k"].bfloat16()
    if "runs in PyTorch" not in other.runs(**x) or not other(**x)[0].isfinite().all():
        wrong.append(other.runs(**x))
    return wrong


def test_inputs_of_other_kinds() -> None:
    (wrong,) = run_ranks(odd_inputs, 1, env=INTERPRETED, timeout=200)
    assert not wrong, "\n".join(wrong)


def test_in_another_process(tmp_path: Path) -> None:
    """Which gets the engine with the program."""
    (tmp_path / "model").write_bytes(pickle.dumps(simple_gla.make(H, 16, 16)))
    script = (
        "import pickle, torch\n"
        f"model = pickle.load(open({str(tmp_path / 'model')!r}, 'rb'))\n"
        f"x = {{name: torch.ones(1, 20, {H}, 16) for name in 'qkv'}} | {{'g': torch.zeros(1, 20, {H})}}\n"
        "assert model.runs(**x) == 'runs kernels of the engine scalar_decay', model.runs(**x)\n"
        "assert model(**x)[0].isfinite().all()\n"
    )
    env = os.environ | INTERPRETED | {"PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", script], env=env, check=True, timeout=120)


def derived(sp: Any) -> list[Any]:
    """How often a program is differentiated: by calls that the engine runs, and by reading the layout twice."""
    found, model = [0], simple_gla.make(1, 5, 6)
    plain = generated_kernels.differentiate

    def counted(program: Any) -> Any:
        found[0] += 1
        return plain(program)

    q, k, v, g = (torch.randn(1, 9, 1, n) for n in (5, 5, 6, 1))
    counts = []
    with mock.patch.object(generated_kernels, "differentiate", counted):
        for packed in (None, torch.tensor([0, 4, 9])):
            model(q=q, k=k, v=v, g=-g[..., 0].abs(), cu_seqlens=packed)
            counts.append(found[0])
        made = generated_kernels.Generated(model.program)
        return [counts, made.layout is made.layout, found[0]]


def test_kernels_are_generated_where_no_engine_runs_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes seconds; a failure to do it is remembered, too."""
    ((counts, same, after),) = run_ranks(derived, 1, env=INTERPRETED)
    assert counts == [0, 0] and same and after == 1
    model, tried = simple_gla.make(1, 5, 6), []

    def refused(program: Any) -> Any:
        tried.append(program)
        raise NotEmittable("no kernel is made of it")

    monkeypatch.setattr(generated_kernels, "differentiate", refused)
    made = generated_kernels.Generated(model.program)
    for _ in range(2):
        with pytest.raises(NotEmittable, match="no kernel is made of it"):
            made.layout  # noqa: B018  (read, not used)
    assert len(tried) == 1


def test_explain(tmp_path: Path) -> None:
    text = simple_gla.make(H, K, V, code_dir=tmp_path).explain()
    assert "engine: scalar_decay runs whole calls; what follows is of those that it leaves to generated kernels" in text
    assert "engine:" not in simple_gla.make(H, K, V, code_dir=tmp_path, lowering="generated").explain()


def test_sizes_and_scales_that_a_variant_has_not() -> None:
    with pytest.raises(ValueError, match="scale: expected None, since outputs of a vector state are"):
        hgrn.make(2, 8, scale=0.5)
    with pytest.raises(ValueError, match="V: expected the columns of a state, got 0"):
        linear.make(2, 8)
    assert hgrn2.make(1, 4, 4, lowerings=[SCALAR_DECAY]).program.lowerings == (SCALAR_DECAY,)
