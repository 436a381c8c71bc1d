"""What is kept of a call for the next one: executables, launches with addresses filled in, kernels for any T."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.autograd import forward_ad

from flexsp.comm.group import SequenceParallel
from flexsp.comm.ranks import GROUPS
from flexsp.compiler import (
    ConstExpr,
    LinearAttention,
    SymbTensor,
    cache_result,
    decayed_scores,
    identity,
    unit_lower_inverse,
)
from flexsp.compiler.backend import generated_kernels
from flexsp.exceptions import NotAvailable
from flexsp.runtime.steps import Step, launches_of
from flexsp.testing.compare import relative_error
from flexsp.testing.ranks import run_ranks
from tests import variants
from tests.harness.compiling import in_child
from tests.harness.executables import scalar_decay_executable
from tests.harness.interpreted import INTERPRETED

Tensors = dict[str, torch.Tensor]


@contextmanager
def only_noted() -> Iterator[set[Any]]:
    """No kernel is launched; what each would be compiled for is put into the set."""
    found: set[Any] = set()

    def note(steps: Sequence[Step], frame: Any, device: torch.device) -> None:
        found.update(x.facts(frame) for x in launches_of(steps))

    with mock.patch("flexsp.kernels.executable.run_steps", note):
        yield found


# Recipes --------------------------------------------------------------------------------------------------------------


def keys_of_lengths(sp: Any, name: str, folder: str, lengths: list[int]) -> list[int]:
    """How many different kernels calls of the first n lengths need, forward and backward, for every n."""
    from flexsp.compiler import dispatch

    code = variants.load(name).make(4, 64, 64, torch.bfloat16, code_dir=folder)._generated
    meta, counts, found = code.program.meta, [], set()
    sizes = {"H": 4, "K": 64, "V": 64}
    for T in lengths:
        lead = {name: [2, T] for name in meta.tokens} | {name: [] for name in meta.params}
        given = {}
        for name, what in (meta.tokens | meta.params).items():
            shape = lead[name] + [sizes[s.name] for s in what.shape if s != "T"]
            given[name] = torch.empty(shape, dtype=what.dtype, device="meta")
        executable = dispatch.executable_of(code, given, None, None, None)
        with only_noted() as noted:
            o, _, saved = executable.run_forward(list(given.values()), None, None)
            executable.run_backward(list(given.values()), None, saved, None, torch.empty_like(o), None, False)
        found |= noted
        counts.append(len(found))
    return counts


def precompiled(sp: Any, name: str, folder: str) -> list[bool]:
    """Whether the kernels that calls and their backward passes launch are those that were precompiled."""
    from flexsp.compiler import dispatch

    code, found = variants.load(name).make(4, 64, 64, torch.bfloat16, code_dir=folder)._generated, []
    for packed, given, odd, turned in ((0, 0, 0, 0), (1, 0, 0, 1), (0, 1, 0, 0), (0, 1, 1, 0)):
        x = {
            n: torch.randn(1, 4096, 4, *[64] * (len(t.shape) - 2)).to(t.dtype)
            for n, t in code.program.meta.tokens.items()
        }
        if turned:
            x["k"] = x["k"].transpose(2, 3).contiguous().transpose(2, 3)
        initial = torch.zeros(4 * 64 * 64 + odd)[odd:].view(1, 4, 64, 64).requires_grad_() if given else None
        bounds = torch.tensor([0, 100, 4096]) if packed else None
        executable = dispatch.executable_of(code, x, initial, bounds, None)
        table = torch.zeros(executable.plan.n_chunks, 5, dtype=torch.int32) if packed else None
        with only_noted() as facts:
            o, _, saved = executable.run_forward([*x.values()], initial, table)
            executable.run_backward([*x.values()], initial, saved, table, torch.empty_like(o), None, given)
        again = executable.launches([*x.values()], initial, True)
        found.append({launch.facts(frame) for launch, frame in again} == facts)
    return found


@pytest.mark.parametrize("name", ["simple_gla", "gla", "deltanet"])
def test_backward_kernels_are_precompiled(name: str, tmp_path: Path) -> None:
    assert run_ranks(precompiled, 1, name, str(tmp_path), own_processes=True) == [[True] * 4]


def precompiled_engine(sp: Any) -> list[bool]:
    found = []
    for gate, packed, given, turned in (("g", 0, 0, 0), (None, 0, 1, 0), ("g_gamma", 1, 1, 0), ("g", 1, 0, 1)):
        x = {name: torch.randn(1, 4096, 4, 64).bfloat16() for name in "qkv"}
        if turned:
            x["k"] = x["k"].transpose(1, 2).contiguous().transpose(1, 2)
        x |= {} if gate is None else {gate: -torch.rand((1, 4096, 4) if gate == "g" else 4)}
        x = {name: y.requires_grad_() for name, y in x.items()}
        initial = torch.zeros(2 if packed else 1, 4, 64, 64).requires_grad_() if given else None
        executable = scalar_decay_executable(x, initial, 2 * packed, 0.1)
        table = torch.zeros(executable.plan.n_chunks, 5, dtype=torch.int32) if packed else None
        with only_noted() as facts:
            o, _, saved = executable.run_forward([*x.values()], initial, table)
            executable.run_backward([*x.values()], initial, saved, table, torch.empty_like(o), None, given)
        again = executable.launches([*x.values()], initial, True)
        found.append({launch.facts(frame) for launch, frame in again} == facts)
    return found


def test_backward_kernels_of_the_engine_are_precompiled() -> None:
    assert run_ranks(precompiled_engine, 1, own_processes=True) == [[True] * 4]


class Launched(Exception):
    pass


@pytest.mark.parametrize("sure", [True, False])
@pytest.mark.parametrize("backward", [True, False])
def test_kernels_that_may_not_fit_are_compiled_before_the_first_is_launched(
    sure: bool, backward: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flexsp.compiler import dispatch
    from flexsp.kernels import operators
    from flexsp.runtime.launch import KernelLaunch

    code = variants.load("simple_gla").make(2, 16, 16, torch.float32, code_dir=tmp_path)._generated
    x = {"q": torch.randn(1, 99, 2, 16), "k": torch.randn(1, 99, 2, 16), "v": torch.randn(1, 99, 2, 16)}
    x = {name: y.requires_grad_(backward) for name, y in (x | {"g": -torch.rand(1, 99, 2)}).items()}
    executable = dispatch.executable_of(code, x, None, None, None)
    assert executable.plan.tiling.sure
    executable.plan = replace(executable.plan, tiling=replace(executable.plan.tiling, sure=sure))
    executable.device, asked = torch.device("cuda", 0), []

    def prepare(self: Any, frame: Any, device: int) -> Future[Any]:
        asked.append(self.kernel.__name__)
        job: Future[Any] = Future()
        last = "grads" if backward else "output"
        job.set_exception(ValueError("too large")) if asked[-1] == last else job.set_result(None)
        return job

    def launched(*args: Any, **others: Any) -> Any:
        raise Launched

    monkeypatch.setattr(KernelLaunch, "prepare", prepare)
    monkeypatch.setattr(executable, "run_forward", launched)
    for _ in range(2):
        with pytest.raises(Launched if sure else ValueError, match=None if sure else "too large"):
            operators.run(executable, None, [*x.values()], None, None, (0, 99, 99))
    assert ("grads" in asked) == backward and bool(asked) == (backward or not sure)
    # Not sure: in each of the two calls, with and without gradients of final states.
    assert asked.count("output_backward") == (0 if not backward else 1 if sure else 4)


@pytest.mark.parametrize("name", ["retnet", "gla", "gated_deltanet"])
def test_another_length_needs_no_other_kernel(name: str, tmp_path: Path) -> None:
    """Of lengths for which the plan is of one kind: several segments (or one, of a dense transition)."""
    lengths = [4096, 4097, 5000, 6001, 8192, 10007]
    (counts,) = run_ranks(keys_of_lengths, 1, name, str(tmp_path), lengths, own_processes=True)
    assert counts[0] >= 5
    assert counts == [counts[0]] * len(lengths), counts


def repeated(sp: Any, folder: str) -> dict[str, Any]:
    """Calls alike and not alike: executables made, and errors of outputs and gradients against PyTorch in float64."""
    from flexsp.kernels import executable as executables

    torch.manual_seed(0)
    model = variants.load("simple_gla").make(2, 8, 4, code_dir=folder)
    made = []
    plain = executables.Executable.__init__

    def count(self: Any, *args: Any) -> None:
        made.append(args)
        plain(self, *args)

    executables.Executable.__init__ = count  # type: ignore[method-assign]
    errors, executables = [], []
    calls = ((9, False, True), (9, False, True), (10, False, True), (9, True, True), (9, False, False))
    for T, lay, batched in calls:
        x = {"q": torch.randn(1, T, 2, 8), "k": torch.randn(1, T, 2, 8), "v": torch.randn(1, T, 2, 4)}
        x["g"] = torch.nn.functional.logsigmoid(torch.randn(1, T, 2))
        if lay:
            x = {name: y.transpose(1, 2).contiguous().transpose(1, 2) for name, y in x.items()}
        if not batched:
            x = {name: y[0] for name, y in x.items()}
        mine = {name: y.detach().requires_grad_() for name, y in x.items()}
        theirs = {name: y.detach().double().requires_grad_() for name, y in x.items()}
        (o, final), (want, last) = model(**mine), model(**theirs)
        do = torch.randn(o.shape[::-1]).movedim(0, -1).reshape(o.shape) if lay else torch.randn(o.shape)
        for cotangent in (do, torch.ones(()).expand(o.shape)):  # two backward passes, of gradients that lie differently
            ends, keep = [cotangent, torch.ones_like(final)], {"retain_graph": True}
            got = torch.autograd.grad([o, final], [*mine.values()], ends, **keep)
            ref = torch.autograd.grad([want, last], [*theirs.values()], [x.double() for x in ends], **keep)
            assert all(a.shape == b.shape for a, b in zip(got, mine.values(), strict=True))
            errors += [relative_error(a, b) for a, b in zip(got, ref, strict=True)]
        errors += [relative_error(o, want), relative_error(final, last)]
        executables.append(len(made))
    only_final = torch.autograd.grad(final.sum(), mine["k"])[0]
    errors.append(relative_error(only_final, torch.autograd.grad(last.sum(), theirs["k"])[0]))
    with torch.no_grad():
        again = model(**mine)[0]
    same = torch.equal(again, o)
    return {"executables": executables, "errors": errors, "recorded": again.requires_grad, "same": same}


def test_a_repeated_call_makes_no_recipe(tmp_path: Path) -> None:
    (found,) = run_ranks(repeated, 1, str(tmp_path), env=INTERPRETED)
    assert found["executables"] == [1, 1, 2, 3, 4]
    assert max(found["errors"]) < 1e-5, found["errors"]
    assert not found["recorded"]
    assert found["same"]


def under_autocast(sp: Any, folder: str) -> list[float]:
    """Errors of a dense transition over ranks, its states and products in fp32 whatever autocast says."""
    torch.manual_seed(5)
    sizes = {"q": (1, 40, 1, 8), "k": (1, 40, 1, 8), "v": (1, 40, 1, 8), "b": (1, 40, 1)}
    x = {name: torch.rand(size) - 0.3 for name, size in sizes.items()}
    x["k"] = torch.nn.functional.normalize(x["k"], dim=-1)
    model = variants.load("deltanet").make(1, 8, 8, code_dir=folder)
    want = model(**{name: y.double() for name, y in x.items()}, sp=False)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, _ = model(**{name: sp.shard(y) for name, y in x.items()}, sp=sp)
    return [relative_error(o, sp.shard(want))]


def test_autocast_leaves_states_alone(tmp_path: Path) -> None:
    for (error,) in run_ranks(under_autocast, 3, str(tmp_path), env=INTERPRETED):
        assert error < 1e-5


def gated(T: int = 9, B: int = 1, **more: torch.Tensor) -> Tensors:
    x = {"q": torch.randn(B, T, 2, 8), "k": torch.randn(B, T, 2, 8), "v": torch.randn(B, T, 2, 4)}
    return x | {"g": -torch.rand(B, T, 2)} | more


def gradients(o: torch.Tensor, final: torch.Tensor, of: Tensors) -> list[torch.Tensor]:
    loss = (o * o).sum() + (final * final).sum().to(o.dtype)
    return [*torch.autograd.grad(loss, [*of.values()], materialize_grads=True)]


def differs(model: Any, x: Tensors) -> float:
    """From PyTorch in float64: the worst error of outputs and gradients; kernels must have run."""
    mine = {name: y.detach().requires_grad_() for name, y in x.items()}
    theirs = {name: y.detach().double().requires_grad_() for name, y in x.items()}
    got, want = model(**mine), model(**theirs)
    assert any(call.executable is not None for call in model._calls.values())
    pairs = zip([*got, *gradients(*got, mine)], [*want, *gradients(*want, theirs)], strict=True)
    return max(relative_error(a, b) for a, b in pairs)


def hooked(sp: Any, folder: str) -> tuple[float, bool]:
    """Error of gradients where hooks give saved tensors back contiguous, also in a process's first group, whose number
    is 0; on one rank, kernels for gradients of other alignment."""
    with mock.patch.dict(GROUPS, {0: sp}), mock.patch.object(sp, "id", 0):
        return _hooked(sp, folder)


def _hooked(sp: Any, folder: str) -> tuple[float, bool]:
    torch.manual_seed(0)
    model = variants.load("simple_gla").make(2, 8, 4, code_dir=folder)
    given = gated(9 * sp.world_size)
    x = {name: sp.shard(y).transpose(1, 2).contiguous().transpose(1, 2) for name, y in given.items()}
    leaves, over = {name: y.requires_grad_() for name, y in x.items()}, sp if sp.world_size > 1 else None
    copied = torch.autograd.graph.saved_tensors_hooks(lambda y: y.clone(memory_format=torch.contiguous_format), _same)

    def found() -> list[torch.Tensor]:
        o, final = model(**leaves, sp=over)
        return gradients(o, o if final is None else final, leaves)

    with copied:
        again = found()
    pairs = zip(again, found(), strict=True)
    if over is not None:
        return max(relative_error(a, b) for a, b in pairs), True
    (call,) = model._calls.values()
    do, dfinal = torch.zeros(1, 9, 2, 4), torch.zeros(1 * 2 * 8 * 4 + 1)
    one, other = (call.executable.backward(do, y.view(1, 2, 8, 4), False) for y in (dfinal[:-1], dfinal[1:]))
    return max(relative_error(a, b) for a, b in pairs), one is not other


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_of_tensors_that_lie_otherwise(ranks: int, tmp_path: Path) -> None:
    for error, apart in run_ranks(hooked, ranks, str(tmp_path), env=INTERPRETED):
        assert error < 1e-6
        assert apart


def plain(sp: Any, folder: str) -> list[Any]:
    """What is not a call of kernels on plain tensors: copies, another backend, transforms of torch.func, tangents."""
    import copy
    import pickle

    torch.manual_seed(0)
    model, x = variants.load("simple_gla").make(2, 8, 4, code_dir=folder, fallback="pytorch"), gated()
    o = model(**x)[0]
    found = [torch.equal(other(**x)[0], o) for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)))]
    os.environ["FLEXSP_BACKEND"] = ""
    model(**x)
    found += [call.executable is not None for call in model._calls.values()]
    os.environ["FLEXSP_BACKEND"] = "triton"

    def of(v: torch.Tensor) -> torch.Tensor:  # linear
        return model(**(x | {"v": v}))[0]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        many = torch.func.vmap(of)(x["v"][None])[0]
        _, moved = torch.func.jvp(of, (x["v"],), (x["v"],))
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(of(forward_ad.make_dual(x["v"], x["v"]))).tangent
        (down,) = torch.autograd.grad(of(x["v"].requires_grad_()).sum(), x["v"])
        up = torch.func.grad(lambda v: of(v).sum())(x["v"].detach())
    told = [str(w.message) for w in caught if "runs in PyTorch" in str(w.message)]
    pairs = ((many, o), (moved, o), (tangent, o), (up, down))
    return [*found, *(torch.allclose(a, b, atol=1e-6) for a, b in pairs), len(told) == 1]


def test_copies_backends_and_transforms(tmp_path: Path) -> None:
    (found,) = run_ranks(plain, 1, str(tmp_path), env=INTERPRETED)
    assert found == [True, True, True, False, True, True, True, True, True]


def _k_v(k: Any, v: Any) -> Any:
    return k.T @ v


def _sum(prev_s: Any, chunk_state: Any) -> Any:
    return prev_s + chunk_state


def _learned(q: Any, k: Any, v: Any, g: Any, u: Any, chunk_state: Any) -> Any:
    return (q @ k.T).tril(0) @ v + (u * g.exp()[:, None]) @ chunk_state


def _constant_keys(q: Any, v: Any, g: Any, chunk_state: Any) -> Any:
    return decayed_scores(q, torch.ones_like(q), torch.zeros_like(q)) @ v + (q * g[:, None]) @ chunk_state


def _by_distance(q: Any, k: Any, v: Any, chunk_state: Any) -> Any:
    place = torch.ones_like(k[:, 0]).cumsum(0)
    weight = 1 / (1 + place[:, None] - place[None, :])  # inf where j = i + 1
    return (weight.tril(0) * (q @ k.T).tril(0)) @ v + q @ chunk_state


def _within(q: Any, k: Any, v: Any) -> Any:
    return (q @ k.T).tril(0) @ v


def _replaced(prev_s: Any, chunk_state: Any) -> Any:
    return chunk_state


def _halved(prev_s: Any) -> Any:
    return 0.5 * prev_s


def _erasing(prev_s: Any, chunk_state: Any, k: Any) -> Any:
    return prev_s - (0.1 * k).T @ ((0.1 * k) @ prev_s) + chunk_state


def _opened(q: Any, k: Any, v: Any, chunk_state: Any) -> Any:
    return (q @ chunk_state) * v.sigmoid() + (q @ k.T).tril(0) @ v


def _caching(name: str) -> tuple[Any, Any]:
    """chunk_mode and merge_mode with a product kept under a name."""

    def chunk(k: Any, v: Any, g: Any) -> Any:
        kept = cache_result(unit_lower_inverse((k * g[:, None]) @ k.T) @ v, name)
        return k.T @ kept

    text = f"lambda q, k, {name}, chunk_state: (q @ k.T).tril(0) @ {name} + q @ chunk_state"
    return chunk, eval(text)


def odd(sp: Any, folder: str) -> list[float]:
    torch.manual_seed(0)
    H, K, V = ConstExpr("H", 2), ConstExpr("K", 8), ConstExpr("V", 4)
    meta = {"q": SymbTensor(["T", H, K]), "k": SymbTensor(["T", H, K]), "v": SymbTensor(["T", H, V])}
    meta |= {"g": SymbTensor(["T", H]), "prev_s": SymbTensor(["NS", H, K, V])}
    options = {"chunk_size": 16, "code_dir": folder}
    learned = LinearAttention(meta | {"u": SymbTensor([H, K])}, _k_v, _sum, _learned, **options)
    found = [differs(learned, gated(u=torch.randn(2, 8)))]
    found.append(differs(LinearAttention(meta, _k_v, _sum, _constant_keys, **options), gated()))
    for name in ("A", "mul"):  # an upper-case name, and one that a graph gives to its own nodes
        chunk, merge = _caching(name)
        found.append(differs(LinearAttention(meta, chunk, _sum, merge, **options), gated()))
    found.append(differs(LinearAttention(meta, _k_v, _sum, _by_distance, **options), gated()))
    found.append(differs(LinearAttention(meta, _k_v, _erasing, _opened, **options), gated()))
    for decay in (_replaced, _halved):
        model = LinearAttention(meta, _k_v, decay, _within, **options)
        found += [differs(model, gated(19, prev_s=torch.randn(1, 2, 8, 4))), differs(model, gated(B=0))]
    return found


@pytest.mark.parametrize(("rows", "cols"), [("n", "V"), ("K", "b"), ("K", "BK"), ("tl", "V"), ("row", "length")])
def test_sizes_named_like_the_code_have_no_kernels(rows: str, cols: str) -> None:
    H, K, V = ConstExpr("H", 2), ConstExpr(rows, 8), ConstExpr(cols, 4)
    meta = {"q": SymbTensor(["T", H, K]), "k": SymbTensor(["T", H, K]), "v": SymbTensor(["T", H, V])}
    model = LinearAttention(meta | {"prev_s": SymbTensor(["NS", H, K, V])}, _k_v, _sum, _within, chunk_size=64)
    with pytest.raises(NotAvailable, match="the size .* would hide a name in the code of kernels: choose another name"):
        _ = model.kernels


@pytest.mark.parametrize("n", [13, 1091])
def test_a_size_given_as_a_number_is_no_other_size(n: int) -> None:
    H, K, V = ConstExpr("H", 2), ConstExpr("K", 8), ConstExpr("V", 4)
    meta = {"q": SymbTensor(["T", H, K]), "k": SymbTensor(["T", H, K]), "v": SymbTensor(["T", H, V])}
    meta |= {"z": SymbTensor(["T", H, n]), "prev_s": SymbTensor(["NS", H, K, V])}
    model = LinearAttention(meta, lambda k, v, z: k.T @ (v * z.sum(1)[:, None]), _sum, _within, chunk_size=64)
    with pytest.raises(NotAvailable, match=f"the sizes {n} are plain numbers in input_meta; kernels need names"):
        _ = model.kernels


def test_a_factor_of_what_is_subtracted_is_seen() -> None:
    def decay(prev_s: Any, chunk_state: Any, k: Any) -> Any:
        return torch.sub(identity(k, k.size(1)), k.T @ k, alpha=0.1) @ prev_s + chunk_state

    H, K, V = ConstExpr("H", 2), ConstExpr("K", 8), ConstExpr("V", 4)
    meta = {"q": SymbTensor(["T", H, K]), "k": SymbTensor(["T", H, K]), "v": SymbTensor(["T", H, V])}
    model = LinearAttention(meta | {"prev_s": SymbTensor(["NS", H, K, V])}, _k_v, decay, _within, chunk_size=64)
    with pytest.raises(NotAvailable, match="no kernel is made of sub with alpha yet"):
        _ = model.kernels


def test_any_number_of_sizes() -> None:
    H, K, V = ConstExpr("H", 2), ConstExpr("K", 8), ConstExpr("V", 4)
    meta = {"q": SymbTensor(["T", H, K]), "k": SymbTensor(["T", H, K]), "v": SymbTensor(["T", H, V])}
    meta |= {f"z{i}": SymbTensor(["T", H, ConstExpr(f"Z{i}", 8)]) for i in range(9)}
    model = LinearAttention(meta | {"prev_s": SymbTensor(["NS", H, K, V])}, _k_v, _sum, _within, chunk_size=64)
    assert model.kernels.layout.tokens["z8"] == ("C", "Z8")


def test_odd_programs(tmp_path: Path) -> None:
    """A factor of rows times a vector, scores with a constant, values kept under names that mean something else,
    weights that are infinite above the diagonal, outputs of a dense transition with a gate for each of their columns,
    states that are not read, no sequences."""
    (errors,) = run_ranks(odd, 1, str(tmp_path), env=INTERPRETED)
    assert max(errors) < 1e-5, errors


def test_kernels_are_shared_by_what_is_alike(tmp_path: Path) -> None:
    """By objects of the same functions, for all values of their sizes; not where a number or a folder differs."""
    make = variants.load("simple_gla").make
    kernels = make(2, 16, 17).kernels
    assert make(4, 16, 32).kernels is kernels
    assert make(2, 16, 17, code_dir=str(tmp_path)).kernels is not kernels
    others = [make(2, 8, 17), make(2, 16, 17, dtype=torch.bfloat16), variants.load("retnet").make(2, 16, 17)]
    assert len({generated_kernels._likeness(x.program) for x in (make(2, 16, 17), *others)}) == 4  # 8 has another scale


def test_more_heads_than_a_grid_has() -> None:
    from flexsp.compiler.dispatch import executable_of

    code = variants.load("linear").make(2, 16, 16, torch.bfloat16).kernels
    given = {name: torch.empty(40000, 3, 2, 16, dtype=torch.bfloat16, device="meta") for name in "qkv"}
    with pytest.raises(ValueError, match=r"expected B \* H <= 65535 \(a grid's second axis\), got 80000. Pack"):
        executable_of(code, given, None, None, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": torch.ones(1, 9, 2, 8).to(torch.float8_e4m3fn)}, "k: expected a floating .* got torch.float8_e4m3fn"),
        ({"k": torch.ones(1, 9, 2, 8).to_sparse()}, "k: expected a floating .* got .*sparse_coo"),
        ({"cu_seqlens": torch.tensor([0, 9], device="meta")}, "cu_seqlens: .* got one on the meta device"),
        ({"sp": SequenceParallel(device="meta")}, "sp: expected a group on the inputs' cpu, got one on meta"),
    ],
)
def test_what_kernels_could_not_read_is_refused(changes: dict[str, Any], message: str) -> None:
    model = variants.load("simple_gla").make(2, 8, 4)
    with pytest.raises(ValueError, match=message):
        model(**(gated() | changes))


def test_threads_make_variants_at_once() -> None:
    def make(name: str) -> str:
        together.wait()
        return variants.load(name).make(2, 8, 4).program.transition

    names = ("linear", "simple_gla", "gla", "deltanet")
    together = threading.Barrier(len(names))
    with ThreadPoolExecutor(len(names)) as pool:
        assert [*pool.map(make, names)] == ["none", "scalar", "vector", "dense"]


def twice(sp: Any, folder: str, name: str) -> bool:
    """Whether gradients of a shard without tokens are the same in a second backward pass."""
    x, _ = variants.draw(name, 2, 0, 0)
    leaves = {key: y.float().requires_grad_() for key, y in x.items()}
    leaves["prev_s"] = torch.randn(2, variants.H, *variants.state_sizes(name)).requires_grad_()
    _, final = variants.load(name).make(variants.H, variants.K, variants.V, code_dir=folder)(**leaves)
    first, second = (torch.autograd.grad(final.sum(), leaves["prev_s"], retain_graph=True)[0] for _ in range(2))
    return torch.equal(first, torch.ones_like(first)) and torch.equal(first, second)


@pytest.mark.parametrize("name", ["simple_gla", "deltanet"])
def test_no_tokens_twice(name: str, tmp_path: Path) -> None:
    assert run_ranks(twice, 1, str(tmp_path), name, env=INTERPRETED) == [True]


# Ahead of time --------------------------------------------------------------------------------------------------------


def ahead() -> int:
    from triton.backends.compiler import GPUTarget

    from flexsp.compiler.aot import compile_ahead
    from flexsp.compiler.backend.generated_kernels import Generated

    code = Generated(variants.load("linear").make(2, 16, 16, torch.bfloat16).program)
    found = compile_ahead(code, code.program.meta, GPUTarget("cuda", 90, 32))
    variants.load("linear").make(2, 16, 16, torch.bfloat16, enable_aot=True)
    return found


def test_kernels_are_compiled_ahead(tmp_path: Path) -> None:
    found = in_child(ahead, TRITON_CACHE_DIR=tmp_path / "cache", FLEXSP_CODE_DIR=tmp_path)
    cubins = list((tmp_path / "cache").glob("*/*.cubin"))
    assert len(cubins) == found >= 10
    assert {"output.cubin", "grads.cubin", "_propagate_kernel.cubin"} <= {x.name for x in cubins}


def test_what_has_no_kernels_cannot_be_compiled_ahead() -> None:
    with pytest.raises(NotAvailable, match="enable_aot: .*chunk_size = 48"):
        variants.load("hgrn").make(2, 8, enable_aot=True, chunk_size=48)


def interpreted(sp: Any) -> str:
    try:
        variants.load("linear").make(2, 16, 16, enable_aot=True)
    except ValueError as error:
        return str(error)
    return ""


def test_the_interpreter_compiles_nothing() -> None:
    (message,) = run_ranks(interpreted, 1, env=INTERPRETED)
    assert "TRITON_INTERPRET" in message


def over_group(sp: Any, folder: str) -> tuple[bool, list[int], str]:
    import torch.distributed as dist

    from flexsp.comm.ranks import GROUPS

    live = dict(GROUPS)
    GROUPS.clear()
    try:
        variants.load("simple_gla").make(2, 8, 4, sp_group=dist.group.WORLD)
        message = ""
    except ValueError as error:
        message = str(error)
    finally:
        GROUPS.update(live)
    torch.manual_seed(3)
    meta = {"q": (1, 24, 2, 8), "k": (1, 24, 2, 8), "v": (1, 24, 2, 4), "g": (1, 24, 2)}
    x = {name: -torch.rand(shape, dtype=torch.float64) for name, shape in meta.items()}
    model = variants.load("simple_gla").make(2, 8, 4, torch.float64, sp_group=dist.group.WORLD)
    alone = model(**x, sp=False)[0]
    mine = model(**{name: sp.shard(y) for name, y in x.items()})[0]
    return torch.allclose(mine, sp.shard(alone)), model._sp.global_ranks, message


def test_a_process_group_is_taken(tmp_path: Path) -> None:
    for right, ranks, message in run_ranks(over_group, 2, str(tmp_path), fresh_sp=True):
        assert right
        assert ranks == [0, 1]
        assert "init_sequence_parallel(group) first; none is open over ranks [0, 1]" in message
