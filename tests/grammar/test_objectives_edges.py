"""Transitions of several steps: precision, generated kernels, edges, graphs of torch.compile, and what is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flexsp.exceptions import NotAvailable
from flexsp.grammar import FlexLinearAttention, decay, feature_map, objectives, transition
from flexsp.testing.compare import DRAWS, RoundedProducts, check_functions, relative_error
from flexsp.testing.ranks import run_ranks
from tests.harness.generated import MANY_SEGMENTS
from tests.harness.grammar import gradients
from tests.harness.interpreted import INTERPRETED, poisoned
from tests.harness.objectives import (  # fmt: skip
    EXACT,
    MODELS,
    QUICK,
    READ,
    SHARED,
    TRAPEZOID,
    WRITE,
    H,
    K,
    Tensors,
    V,
    call_of,
    compare,
    draw,
    draw_state,
    model,
    on_ranks,
    token_loop,
)
from tests.harness.programs import variable
from tests.marks import quick, slow

GATED = [name for name in MODELS if MODELS[name]().decay.kind == "gated" and "contrastive" not in name]
ANEW = [name for name in GATED if not MODELS[name]()._keeps_angle]  # else angles count from before the closed gate
OVER_RANKS = [name for name in MODELS if name != "contrastive, large blocks"]


def answers(
    what: FlexLinearAttention, x: Tensors, initial: torch.Tensor, bounds: list[int] | None, cotangents: list[Tensors]
) -> list[Tensors]:
    """Outputs, final states and gradients for each pair of cotangents."""
    leaves = {key: y.clone().requires_grad_() for key, y in x.items()} | {
        "initial_state": initial.clone().requires_grad_()
    }
    cu, found = None if bounds is None else torch.tensor(bounds), []
    o, final = what(**leaves, output_final_state=True, cu_seqlens=cu)
    for each in cotangents:
        ends = [each["o"].to(o), each["final"].to(final)]
        grads = torch.autograd.grad([o, final], list(leaves.values()), ends, retain_graph=True)
        found.append({"o": o.detach(), "final": final.detach(), **dict(zip(leaves, grads, strict=True))})
    return found


def by_kernels(sp: Any, name: str, args: tuple[Any, ...], folder: str) -> list[Tensors]:
    with poisoned(MANY_SEGMENTS, H), variable("FLEXSP_CODE_DIR", folder):
        return answers(MODELS[name](), *args)


def check_precision(name: str, dtype: torch.dtype, bounds: list[int] | None, seed: int, folder: str | None) -> None:
    what, B = MODELS[name](), 1 if bounds else 2
    x = {key: y.to(torch.float32 if key in ("A", "decay") else dtype) for key, y in draw(name, B, 37, seed).items()}
    initial = draw_state(name, len(bounds) - 1 if bounds else B, seed).float()
    made = torch.Generator().manual_seed(seed)
    shape = (B, 37, *([what.transition.rank] if what.transition.rank > 1 else []), H, V)
    cotangents = [
        {"o": torch.randn(shape, generator=made).to(dtype), "final": torch.randn(initial.shape, generator=made)}
        for _ in range(DRAWS)
    ]
    want = answers(what, {key: y.double() for key, y in x.items()}, initial.double(), bounds, cotangents)
    with RoundedProducts(dtype):
        low = answers(what, x, initial, bounds, cotangents)
    args = x, initial, bounds, cotangents[:1]
    found = answers(what, *args) if folder is None else run_ranks(by_kernels, 1, name, args, folder, env=INTERPRETED)[0]
    check_functions(found, want, low, credit={"A": 2e-6})  # what reaches a gate through P and through S nearly cancels


@pytest.mark.parametrize("name", ["spectral", "read"])
def test_the_engine_is_given_rows_of_one_dtype(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it asks for: values that were turned are converted back."""
    given = []

    def told(call: Any, *rows: Any) -> Any:
        given.extend(x.dtype for x in rows[:3])
        return on_diagonal(call, *rows)

    on_diagonal = objectives.on_diagonal
    monkeypatch.setattr(objectives, "on_diagonal", told)
    x = {key: y.float() if key in ("A", "decay") else y.bfloat16() for key, y in draw(name, 1, 5, seed).items()}
    MODELS[name]()(**x)
    assert given == [torch.float32 if name == "spectral" else torch.bfloat16] * 3  # angles have gradients there


def test_angles_of_spectral_transitions_over_long_texts(seed: int) -> None:
    """Of turned rows, errors of sums over tokens of gradients of theta and psi grew with the text: with strong gates
    1e-4 at 2,048 tokens and 8e-4 at 16,384, in float32. They are those of a chunk now, at any length."""
    found, want = [], []
    x = draw("spectral", 1, 16384, seed)
    x["decay"] = -3 * x["decay"].exp()
    for dtype, to in ((torch.float32, found), (torch.float64, want)):
        leaves = {name: y.float().to(dtype).requires_grad_() for name, y in x.items()}
        o, _ = MODELS["spectral"]()(**leaves, sp=False)
        made = torch.Generator().manual_seed(seed + 1)
        do = torch.randn(o.shape, generator=made).to(dtype)
        to += torch.autograd.grad(o, [leaves["theta"], leaves["psi"]], do)
    for a, b in zip(found, want, strict=True):
        errors = relative_error(a.double(), b), relative_error(a.double().sum(1), b.sum(1))
        assert errors[0] < 5e-6 and errors[1] < 1e-4, errors


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_precision_in_pytorch(name: str, dtype: torch.dtype, seed: int) -> None:
    check_precision(name, dtype, [0, 0, 1, 20, 37], seed, None)


@pytest.mark.parametrize(
    ("name", "dtype", "bounds"),
    [
        ("difference", torch.float32, [0, 20, 37]),
        *slow(
            ("difference, bootstrapped", torch.float32, [0, 0, 1, 20, 37]),
            ("difference, bootstrapped", torch.float16, None),
            ("information", torch.float32, None), ("information", torch.float16, [0, 0, 1, 20, 37]),
            ("information, steps", torch.float32, [0, 0, 1, 20, 37]), ("read", torch.float16, None),
            ("read, a gate a channel", torch.float32, None), ("write, rows", torch.float32, [0, 0, 1, 20, 37]),
            ("mamba3, read", torch.float32, None), ("spectral", torch.float16, [0, 0, 1, 20, 37]),
            ("delta rows", torch.float32, [0, 0, 1, 20, 37]), ("delta rows, a gate a channel", torch.float16, None),
            ("trapezoid, a gate a channel, read", torch.float32, [0, 0, 1, 20, 37]),
        ),
    ],
)  # fmt: skip
def test_generated_kernels(name: str, dtype: torch.dtype, bounds: list[int] | None, tmp_path: Path, seed: int) -> None:
    check_precision(name, dtype, bounds, seed, str(tmp_path))


def test_small_keys_in_float16(seed: int) -> None:
    """A query over nearly nothing is larger than float16 can hold."""
    x = {key: y.half() for key, y in draw("read", 1, 9, seed).items()}
    x["k"] = x["k"] * 1e-3
    what = model(decay.gated(), transition.preconditioned_gd())
    want, _ = what(**{key: y.double() for key, y in x.items()})
    assert relative_error(what(**x)[0], want) < 1e-3


def test_large_logits(seed: int) -> None:
    """The softmax of numbers whose exponentials are not finite."""
    x, initial = draw("contrastive", 1, 20, seed), 1e4 * draw_state("contrastive", 1, seed)
    found = gradients(call_of("contrastive"), x, initial, seed)
    what = MODELS["contrastive"]()
    want = gradients(lambda values, state: token_loop(what, values, state, None), x, initial, seed)
    assert max(relative_error(found[key], want[key]) for key in want) < 1e-8


@pytest.mark.parametrize("name", quick(MODELS, "mamba3, read"))
def test_no_tokens(name: str, seed: int) -> None:
    """The state passes through, and so does its gradient; an angle in its last column goes through turns and back."""
    x, state = draw(name, 2, 0, seed), draw_state(name, 2, seed).requires_grad_()
    o, final = call_of(name)(x, state)
    kept = slice(None, -1) if "mamba3" in name or name == "read, steps" else slice(None)  # those with angles
    assert o.shape[1] == 0 and torch.equal(final[..., :K, kept], state[..., :K, kept])
    assert relative_error(final[..., :K, :], state[..., :K, :]) < 1e-15
    found = torch.autograd.grad(final.square().sum(), state)[0]
    assert torch.equal(found[..., kept], 2 * final.detach()[..., kept])
    assert relative_error(found, 2 * final.detach()) < 1e-15
    assert relative_error(found, 2 * final.detach()) < 1e-15


@pytest.mark.parametrize("name", quick(MODELS, "mamba3, read"))
def test_tensors_with_other_strides(name: str, seed: int) -> None:
    x, state = draw(name, 2, 20, seed), draw_state(name, 2, seed)
    turned = {key: y.transpose(0, -1).contiguous().transpose(0, -1) for key, y in x.items()}
    found = gradients(call_of(name), turned, state.transpose(1, 3).contiguous().transpose(1, 3), seed)
    want = gradients(call_of(name), x, state, seed)
    assert max(relative_error(found[key], want[key]) for key in want) < EXACT


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("strength", [-1e3, -float("inf")])
@pytest.mark.parametrize("name", quick(ANEW, "read", "information"))
def test_a_closed_gate_starts_anew(name: str, strength: float, dtype: torch.dtype, seed: int) -> None:
    """But for the key of the token before. A contrastive block goes on to read the state that entered it."""
    x = {key: y if key == "mimo_x" else y[:, :20] for key, y in draw(name, 1, 20, seed).items()}
    x = {key: y.to(dtype) for key, y in x.items()}
    x["decay"][:, 10] = strength
    leaves = {key: y.clone().requires_grad_() for key, y in x.items()}
    o, _ = MODELS[name]()(**leaves)
    o.sum().backward()
    state = torch.zeros(1, H, *MODELS[name]().rows_and_columns(K, V), dtype=dtype)
    if "difference" in name:
        state[..., V] = x["k"][:, 9]
    after, _ = call_of(name)({key: y if key == "mimo_x" else y[:, 10:] for key, y in x.items()}, state)
    assert relative_error(o[:, 10:], after) < 1e4 * torch.finfo(dtype).eps
    assert all(y.grad is not None and y.grad.isfinite().all() for y in leaves.values())


def with_a_bad_token(sp: Any, name: str, value: float, seed: int) -> tuple[Tensors, Tensors]:
    """(answers with, answers without) of this rank's tokens; the token is the last of the second document."""
    x, initial = draw(name, 1, 35, seed), draw_state(name, 3, seed)
    sp.set_lengths([15, 0, 20])
    start, stop, _ = sp.shard_range([15, 0, 20][sp.rank])
    found = []
    for bad in (True, False):
        now = {key: y.clone() for key, y in x.items()}
        if bad:
            for key in "qkv":  # of q, gradients of states before are not finite either
                now[key][0, 24] = value
        leaves = {key: (y if key in SHARED else y[:, start:stop]).clone().requires_grad_() for key, y in now.items()}
        state = initial.clone().requires_grad_()
        o, final = MODELS[name]()(
            **leaves, initial_state=state, output_final_state=True, cu_seqlens=torch.tensor([0, 5, 25, 35]), sp=sp
        )
        (o.sum() + final.sum()).backward()
        tokens = {"o": o.detach()} | {
            key: y.grad for key, y in leaves.items() if key not in SHARED and y.grad is not None
        }
        place = torch.arange(start, stop)
        others = {key: y[:, (place < 5) | (place >= 25)] for key, y in tokens.items()}
        d_state = torch.zeros_like(state) if state.grad is None else state.grad
        found.append(others | {"final": final.detach()[[0, 2]], "initial": d_state[[0, 2]]})
    return found[0], found[1]


@pytest.mark.parametrize("name", quick(OVER_RANKS, "mamba3, read"))
def test_what_is_not_finite_stays_in_its_document(name: str, seed: int) -> None:
    for found, want in run_ranks(with_a_bad_token, 3, name, float("nan"), seed):
        for key in want:
            assert torch.equal(found[key], want[key]) or relative_error(found[key], want[key]) < EXACT, key


def in_graphs(sp: Any, name: str, seed: int) -> float:
    """The largest difference of a call in a graph of torch.compile."""
    x, initial = draw(name, 2, 20, seed), draw_state(name, 2, seed)
    what, T = MODELS[name](), 20 // sp.world_size
    part = slice(sp.rank * T, (sp.rank + 1) * T)
    sp.set_lengths([T] * sp.world_size)  # else ranks would tell each other
    x = {key: y if key in SHARED else y[:, part].contiguous() for key, y in x.items()}

    def call(values: Tensors, state: Any) -> Any:
        return what(**values, initial_state=state, output_final_state=True, sp=sp)

    found = []
    torch._dynamo.reset()
    for run in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        leaves = {key: y.clone().requires_grad_() for key, y in x.items()}
        state = initial.clone().requires_grad_() if sp.is_first else None
        o, final = run(leaves, state)
        (o.square().sum() + (0 if final is None else final.square().sum())).backward()
        grads = [y.grad for y in (*leaves.values(), *([] if state is None else [state]))]
        found.append([o.detach(), *([] if final is None else [final.detach()]), *grads])
    return max(relative_error(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("bounds", [None, [0, 0, 5, 20, 30, 30, 37]], ids=["batch", "packed"])
@pytest.mark.parametrize(
    "name", ["difference, bootstrapped", "information", "mamba3, read", "write", "spectral", "delta rows"]
)
def test_generated_kernels_over_ranks(name: str, bounds: list[int] | None, seed: int) -> None:
    (whole,) = run_ranks(on_ranks, 1, name, [37], bounds, seed)
    compare(run_ranks(on_ranks, 3, name, [20, 0, 17], bounds, seed, torch.float32, env=INTERPRETED), whole, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", OVER_RANKS)
def test_graphs(name: str, ranks: int, seed: int) -> None:
    assert max(run_ranks(in_graphs, ranks, name, seed, timeout=200)) < EXACT


def contrastive_shards(sp: Any, bounds: list[int] | None) -> str:
    x = draw("contrastive", 1, 10, 0)
    sp.set_lengths([4, 6])
    start, stop, _ = sp.shard_range([4, 6][sp.rank])
    with pytest.raises(ValueError) as caught:
        MODELS["contrastive"]()(
            **{key: y[:, start:stop] for key, y in x.items()}, sp=sp,
            cu_seqlens=None if bounds is None else torch.tensor(bounds),
        )  # fmt: skip
    return str(caught.value)


@pytest.mark.parametrize(("bounds", "into"), [(None, 4), ([0, 2, 10], 2)])
def test_shards_start_on_edges_of_blocks(bounds: list[int] | None, into: int) -> None:
    for text in run_ranks(contrastive_shards, 2, bounds):
        assert f"edges of chunks of 5 tokens, which are part of the model, got rank 1 from token {into} of" in text


def contrastive_without_kernels(sp: Any) -> None:
    x = {key: y.float() for key, y in draw("contrastive", 1, 10, 0).items()}
    with pytest.raises(NotAvailable, match='not affine in the state.*fallback="pytorch"'):
        MODELS["contrastive"]()(**x)
    assert "raises" in MODELS["contrastive"]().explain(**x).splitlines()[-1]
    what = FlexLinearAttention(decay.gated(), transition=transition.contrastive(block=5), fallback="pytorch")
    with pytest.warns(UserWarning, match="runs in PyTorch, slowly"):
        o, _ = what(**x)
    want, _ = what(**{key: y.double() for key, y in x.items()})
    assert relative_error(o, want) < 1e-5


def test_contrastive_has_no_kernels() -> None:
    run_ranks(contrastive_without_kernels, 1, env=INTERPRETED)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: decay.exponential(discretization="zoh"), "only 'euler' and 'trapezoidal'"),
        (lambda: decay.gated(discretization="zoh"), r"decay.gated\(discretization='zoh'\): only 'euler' and 'trapez"),
        (lambda: decay.exponential(False, "trapezoidal"), "needs data_dependent=True"),
        (lambda: transition.preconditioned_gd("full"), "only 'diagonal'"),
        (lambda: transition.contrastive("exact"), "only 'chunk_lagged'"),
        (lambda: model(decay.exponential(**TRAPEZOID), transition.delta_rule()), "delta_rule with decay.exponential"),
        (lambda: model(decay.exponential(**TRAPEZOID), transition.spectral()), "spectral with decay.exponential"),
        (lambda: model(decay.exponential(**TRAPEZOID), WRITE), "at='write' and decay.exponential"),
        (lambda: model(decay.gated(False, "trapezoidal"), transition.delta_rule()), "delta_rule with decay.gated"),
        (lambda: model(decay.gated(per_head=False), transition.one_step_gd(2)), "mimo_rank=2 and a gate for each key"),
        (lambda: model(decay.gated(per_head=False), transition.spectral()), "spectral with a gate for each key"),
        (lambda: model(decay.gated(), transition.spectral(), feature_map.rope()), "spectral with feature_map.rope"),
        (lambda: model(decay.none(), transition.delta_rule(2), feature_map.rope()), "delta_rule with steps=2 and"),
        (lambda: transition.delta_rule(2, mimo_rank=3), r"steps=2, mimo_rank=3\): only one may be above 1"),
        (lambda: model(decay.gated(True, "trapezoidal"), transition.delta_rule(1, 2)), "delta_rule with decay.gated"),
        (lambda: FlexLinearAttention(transition=transition.delta_rule(2), custom_mask=lambda i, j: 1.0), "custom_mask"),
        (lambda: FlexLinearAttention(transition=READ, custom_mask=lambda i, j: 1.0), "gd with custom_mask"),
        (lambda: FlexLinearAttention(transition=transition.contrastive(), custom_mask=lambda i, j: 1.0), "custom_mask"),
        (
            lambda: FlexLinearAttention(decay.exponential(**TRAPEZOID), custom_mask=lambda i, j: 1.0),
            "custom_mask",
        ),
    ],
)  # fmt: skip
def test_what_is_not_there(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: transition.preconditioned_gd(at="end"), "at: expected 'read' or 'write', got 'end'"),
        (lambda: transition.preconditioned_gd(eps=0.0), "eps: expected a finite number > 0"),
        (lambda: transition.preconditioned_gd(mimo_rank=0), "mimo_rank: expected an integer >= 1"),
        (lambda: transition.one_step_gd(mimo_rank=2.0), "mimo_rank: expected an integer >= 1"),
        (lambda: transition.delta_rule(steps=0), "steps: expected an integer >= 1"),
        (lambda: transition.delta_rule(mimo_rank=1.5), "mimo_rank: expected an integer >= 1"),
        (lambda: transition.information(eps=-1), "eps: expected a finite number > 0"),
        (lambda: transition.contrastive(block=0), "block: expected an integer >= 1"),
        (lambda: transition.contrastive(temperature=0), "temperature: expected a finite number > 0"),
        (lambda: transition.temporal_difference("0.5"), "discount: expected a finite number"),
    ],
)
def test_errors_of_components(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("write", {"eta": torch.ones(1, 5)}, r"eta: expected shape \[B, T, H\] = \[1, 5, 2\]"),
        ("write", {"eta": None}, r"expected \['decay', 'eta'\] besides q, k and v, got \['decay'\]"),
        ("rows", {"mimo_x": torch.ones(H, 2, V)}, r"mimo_x: expected shape \[H, R, V\] = \[2, 3, 6\]"),
        ("rows", {key: torch.ones(1, 5, 2, H, K).double() for key in "qk"}, "q: expected mimo_rank = 3 rows R in"),
        ("rows", {"q": torch.ones(1, 5, H, K)}, r"q: expected a 5-D tensor \[B, T, R, H, K\]"),
        ("trapezoid", {"trap": torch.ones(1, 5, H, 1)}, r"trap: expected shape \[B, T, H\]"),
        ("spectral", {"psi": torch.ones(1, 5, H, 2).double()}, r"psi: expected shape \[B, T, H, V/2\] = \[1, 5, 2"),
        ("spectral", {"v": torch.ones(1, 5, H, 3).double()}, "v: expected an even last dimension"),
        ("read", {"initial_state": torch.ones(1, H, K, V).double()}, r"K \+ rows, V \+ columns\] = \[1, 2, 4, 7\]"),
        ("steps of a token", {"beta": torch.ones(1, 5, H)}, r"beta: expected shape \[B, T, n, H\] = \[1, 5, 2, 2\]"),
        ("steps of a token", {"k": torch.ones(1, 5, 3, H, K).double()}, r"\[B, T, n, H, V\], n = 2, got"),
        ("steps of a token", {"v": torch.ones(1, 5, H, V).double()}, r"v: expected a 5-D tensor \[B, T, n, H, V\]"),
        ("read", {"v": torch.ones(1, 5, H, 513).double()}, "v: expected a last dimension of 1..512, got 513"),
        ("difference", {"decay": torch.ones(1, 5, H).double()}, "decay: expected natural-log gates <= 0"),
    ],
)  # fmt: skip
def test_errors_of_a_call(name: str, changes: dict[str, Any], message: str) -> None:
    x = {key: value for key, value in (draw(name, 1, 5, 0) | changes).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        MODELS[name]()(**x)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("read", "P as by chunk_hgrn, then q / (P + eps) on the diagonal engine"),
        ("write", "then eta k / (P + eps) on the diagonal engine"),
        ("mamba3, read", "3 row(s) a token, .*; the state holds K x V, the last 3 key(s) as columns, P as the last"),
        ("spectral", "turned by running sums of theta and psi"),
        ("difference", "compiled from general_delta in flexsp/grammar/programs.py, with the token before's key"),
        ("steps of a token", "runs as by chunk_gated_delta_product, 2 steps a token"),
        ("information", "lam as by chunk_hgrn, then what is compiled from general_delta"),
        ("contrastive", "ranks run one after the other, with shards that start on edges of blocks of 5"),
    ],
)  # fmt: skip
def test_explain(name: str, says: str) -> None:
    text = MODELS[name]().explain()
    assert all(part in text for part in says.split(".*"))
    call = MODELS[name]().explain(**draw(name, 1, 5, 0))
    assert call.startswith(text) and call.splitlines()[-1].startswith("this call runs ")


def test_a_model_can_be_copied(seed: int) -> None:
    x, what = draw("mamba3, read", 1, 9, seed), MODELS["mamba3, read"]()
    o, _ = what(**x)
    assert torch.equal(copy.deepcopy(what)(**x)[0], o) and torch.equal(pickle.loads(pickle.dumps(what))(**x)[0], o)


@pytest.mark.parametrize("name", QUICK)
def test_autocast_changes_nothing(name: str, seed: int) -> None:
    x, state = {key: y.float() for key, y in draw(name, 1, 20, seed).items()}, draw_state(name, 1, seed).float()
    want = call_of(name)(x, state)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = call_of(name)(x, state)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
