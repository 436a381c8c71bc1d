"""`LinearAttention.step`: tokens of many sequences with states in place, in PyTorch and in generated kernels, against
token loops in float64; and the kernels compiled for sm_90."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from flexsp.compiler import LinearAttention, SymbTensor, decayed_scores
from flexsp.exceptions import NotAvailable
from flexsp.grammar.custom import CustomTransition
from flexsp.testing.compare import assert_close, relative_error
from flexsp.testing.ranks import run_ranks
from tests import variants
from tests.harness import rows, transitions
from tests.harness.compiling import described, in_child, told_of
from tests.harness.decode import drawn
from tests.harness.interpreted import INTERPRETED, poisoned
from tests.harness.programs import variable
from tests.marks import quick, slow

EXACT = 1e-12
Tensors = dict[str, torch.Tensor]


# In PyTorch -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", variants.VARIANTS)
def test_against_token_loop(name: str, seed: int) -> None:
    tokens, params, initial = drawn(name, 2, 9, seed)
    model = variants.load(name).make(variants.H, variants.K, variants.V)
    want, final = variants.token_loop(name, tokens, params, initial, None)
    state, o = initial.clone(), []
    at = state.data_ptr()
    for begin, end in ((0, 1), (1, 2), (2, 7), (7, 7), (7, 9)):
        part = {key: x[:, begin:end] for key, x in tokens.items()}
        o.append(model.step(prev_s=state, **part, **params))
    assert relative_error(torch.cat(o, 1), want) < EXACT and relative_error(state, final) < EXACT
    assert state.data_ptr() == at
    one = model.step(prev_s=initial[:1].clone(), **{key: x[0, :4] for key, x in tokens.items()}, **params)
    assert one.shape == want[0, :4].shape and relative_error(one, want[0, :4]) < EXACT


def test_rows_of_tokens(seed: int) -> None:
    model, made = LinearAttention(rows.meta(2), rows.chunk, rows.decay, rows.merge), torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made, dtype=torch.float64)

    x = {"q": normal(2, 10, rows.H, rows.K), "k": normal(2, 10, 2, rows.H, rows.K) / 4}
    x |= {"v": normal(2, 10, 2, rows.H, rows.V), "beta": normal(2, 10, 2, rows.H).sigmoid()}
    x |= {"g": -normal(2, 10, rows.H).square()}
    state = torch.zeros(2, rows.H, rows.K, rows.V, dtype=torch.float64)
    want, final = model(**x)
    o = [model.step(prev_s=state, **{key: y[:, t] for key, y in x.items()}) for t in (slice(9), slice(9, 10))]
    assert relative_error(torch.cat(o, 1), want) < EXACT and relative_error(state, final) < EXACT


def _with_shift(k: torch.Tensor, v: torch.Tensor, k_before: torch.Tensor) -> torch.Tensor:
    return (k + 0.5 * k_before).T @ v


def _reads_shifts(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_before: torch.Tensor, chunk_state: torch.Tensor
) -> torch.Tensor:
    return (q @ (k + 0.5 * k_before).T).tril() @ v + q @ chunk_state


def test_inputs_of_the_token_before(seed: int) -> None:
    sizes = {"q": 5, "k": 5, "v": 4}
    meta: dict[str, Any] = {name: SymbTensor(["T", 2, n]) for name, n in sizes.items()}
    meta |= {"k_before": SymbTensor(["T", 2, 5], before="k"), "prev_s": SymbTensor(["NS", 2, 5, 4])}
    model = LinearAttention(meta, _with_shift, variants.decay_ok, _reads_shifts)
    made = torch.Generator().manual_seed(seed)
    x = {name: torch.randn(3, 7, 2, n, generator=made, dtype=torch.float64) for name, n in sizes.items()}
    want, final = model(**x)
    state, o = torch.zeros(3, 2, 5, 4, dtype=torch.float64), []
    for begin, end in ((0, 1), (1, 2), (2, 7)):
        before = x["k"][:, begin - 1] if begin else torch.zeros_like(x["k"][:, 0])
        o.append(model.step(prev_s=state, k_before=before, **{name: y[:, begin:end] for name, y in x.items()}))
    assert relative_error(torch.cat(o, 1), want) < EXACT and relative_error(state, final) < EXACT


def test_a_closed_gate_starts_anew(seed: int) -> None:
    tokens, params, initial = drawn("rwkv7", 2, 4, seed)
    tokens["g"][:, 2] = -torch.inf
    model = variants.load("rwkv7").make(variants.H, variants.K, variants.V)
    want, final = variants.token_loop("rwkv7", tokens, params, initial, None)
    o = model.step(prev_s=initial, **tokens, **params)
    assert relative_error(o, want) < EXACT and relative_error(initial, final) < EXACT


def test_states_of_bfloat16_are_rounded_once_a_step(seed: int) -> None:
    tokens, params, initial = drawn("gla", 2, 4, seed)
    model = variants.load("gla").make(variants.H, variants.K, variants.V)
    x = {key: y.float() for key, y in tokens.items()}
    narrow = initial.bfloat16()
    wide = narrow.float()
    o = model.step(prev_s=narrow, **x, **params)
    want = model.step(prev_s=wide, **x, **params)
    assert torch.equal(o, want) and torch.equal(narrow, wide.bfloat16())


# Kernels --------------------------------------------------------------------------------------------------------------


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, apart in memory: heads before tokens."""
    return x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() > 3 else x


def apart(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, whose last dimension is apart in memory."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


CALLS = [  # sizes, tokens, and dtypes of inputs and states
    ((20, 40), 1, torch.float32, torch.float32), ((20, 40), 5, None, torch.bfloat16),
    ((33, 16), 16, None, torch.float32), ((33, 16), 2, torch.float32, torch.bfloat16),
]  # fmt: skip


def by_kernels(sp: Any, name: str, seed: int, folder: str) -> list[str]:
    """What breaks the rule of flexsp.testing.compare: kernels against token loops, and the functions in float32."""
    before, wrong = (variants.K, variants.V), []
    half = torch.float16 if seed % 2 else torch.bfloat16
    models = []  # kept, so that those of one dtype share kernels
    try:
        for sizes, T, dtype, of_states in CALLS:
            variants.K, variants.V = sizes
            dtype = dtype or half
            tokens, params, initial = drawn(name, 3, T, seed, dtype)
            initial = initial.to(of_states).double()
            want, final = variants.token_loop(name, tokens, params, initial, None)
            models.append(variants.load(name).make(variants.H, *sizes, dtype, code_dir=folder))
            wide = {key: torch.float32 if key in variants.WIDE else dtype for key in tokens | params}
            x = {key: y.to(wide[key]) for key, y in (tokens | params).items()}
            found, low = initial.to(of_states), initial.to(of_states)
            with variable("FLEXSP_BACKEND", None):
                o_low = models[-1].step(prev_s=low, **x)
            with poisoned(1):
                arrange = strided if len(models) % 2 else apart
                o = models[-1].step(prev_s=found, **{key: arrange(y) for key, y in x.items()})
            for what, got, right, near in (("o", o, want, o_low), ("state", found, final, low)):
                try:
                    assert_close(f"{name}, T = {T}, {dtype}: {what}", got, right, near)
                except AssertionError as error:
                    wrong.append(str(error))
    finally:
        variants.K, variants.V = before
    return wrong


@pytest.mark.parametrize("name", quick(variants.VARIANTS, "gla", "hgrn"))
def test_kernels_against_token_loop(name: str, tmp_path: Path, seed: int) -> None:
    (wrong,) = run_ranks(by_kernels, 1, name, seed, str(tmp_path), env=INTERPRETED, timeout=200)
    assert not wrong, "\n".join(wrong)


def of_parts(sp: Any, name: str, seed: int, folder: str) -> list[float]:
    """Errors of outputs and states of two steps, and of what lies beside the state's parts."""
    H, K, V = transitions.H, transitions.K, transitions.V
    x = transitions.draw_transition(name, 2, 5, seed)
    x["g"] = x.pop("decay")
    made = torch.Generator().manual_seed(seed)
    state = torch.randn(2, H, *transitions.SIZES[name], generator=made, dtype=torch.float64)
    state = transitions.within(name, state)
    model = CustomTransition(transitions.CLASSES[name]).program(H, K, V, K**-0.5, "g", False)
    with variable("FLEXSP_CODE_DIR", folder):
        found, right = state.float(), state.clone()
        want = model.step(prev_s=right, **x)
        given = {key: y.float() for key, y in x.items()}
        with poisoned(1):
            spans = slice(2), slice(2, 5)
            o = [model.step(prev_s=found, **{key: y[:, t] for key, y in given.items()}) for t in spans]
    return [relative_error(torch.cat(o, 1), want), relative_error(found, right)]


@pytest.mark.parametrize("name", quick(transitions.CLASSES, "counted delta"))
def test_kernels_of_states_in_parts(name: str, tmp_path: Path, seed: int) -> None:
    (errors,) = run_ranks(of_parts, 1, name, seed, str(tmp_path), env=INTERPRETED)
    assert max(errors) < 2e-6, errors


class Weighted:
    """o_t = q_t S_t / (q_t . z_t) with the sum of weights z_t = e^{g_t} z_{t-1} + k_t as a column."""

    extra_state = {"z": ("K",)}

    def chunk(self, k, v, g):  # type: ignore[no-untyped-def]
        written = k * (g.sum(0) - g.cumsum(0)).exp()[:, None]
        return written.T @ v, written.sum(0)

    def propagate(self, state, z, chunk_state, chunk_z, g):  # type: ignore[no-untyped-def]
        return g.sum(0).exp() * state + chunk_state, g.sum(0).exp() * z + chunk_z

    def output(self, q, k, v, g, state, z):  # type: ignore[no-untyped-def]
        b = g.cumsum(0)
        scores, reads = decayed_scores(q, k, b), q * b.exp()[:, None]
        return (scores @ v + reads @ state) / (scores.sum(1) + reads @ z)[:, None]


def beside_panels(sp: Any, seed: int, folder: str) -> list[float]:
    """A column beside a state whose columns several blocks could have. Of two launches one runs the first block last.
    """
    made, K, V = torch.Generator().manual_seed(seed), 8, 40
    x = {key: torch.randn(2, 3, 2, n, generator=made).double() for key, n in {"q": K, "k": K, "v": V}.items()}
    x |= {"q": x["q"].abs() + 0.1, "k": x["k"].abs(), "g": -torch.rand(2, 3, 2, generator=made).double()}
    state = torch.rand(2, 2, K, V + 1, generator=made).double()
    model = CustomTransition(Weighted).program(2, K, V, K**-0.5, "g", False)
    found, right = state.float(), state.clone()
    want = model.step(prev_s=right, **x)
    with variable("FLEXSP_CODE_DIR", folder), poisoned(1):
        o = [model.step(prev_s=found, **{key: y[:, t : t + 1].float() for key, y in x.items()}) for t in range(3)]
    return [relative_error(torch.cat(o, 1), want), relative_error(found, right)]


def test_kernels_of_columns_beside_panels(tmp_path: Path, seed: int) -> None:
    (errors,) = run_ranks(beside_panels, 1, seed, str(tmp_path), env=INTERPRETED)
    assert max(errors) < 2e-6, errors


# What is refused ------------------------------------------------------------------------------------------------------


def model_and_inputs() -> tuple[LinearAttention, Tensors, torch.Tensor]:
    tokens, params, initial = drawn("gla", 2, 3, 0)
    model = variants.load("gla").make(variants.H, variants.K, variants.V)
    return model, {key: x.float() for key, x in (tokens | params).items()}, initial.float()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda S: S[:1], r"prev_s: expected \(2, 2, 5, 4\) of float32 or bfloat16 on cpu, got \(1, 2, 5, 4\)"),
        (lambda S: S.double(), "got .* of torch.float64 on cpu"),
        (lambda S: S.half(), "got .* of torch.float16 on cpu"),
        (lambda S: S.mT.contiguous().mT, "prev_s: expected contiguous states, which are changed in place, got strides"),
        (lambda S: None, r"prev_s: expected a tensor \(2, 2, 5, 4\), got"),
    ],
)  # fmt: skip
def test_states_that_are_refused(change: Any, message: str) -> None:
    model, x, state = model_and_inputs()
    with pytest.raises(ValueError, match=message):
        model.step(prev_s=change(state), **x)


def test_calls_that_are_refused() -> None:
    model, x, state = model_and_inputs()
    with pytest.raises(ValueError, match="expected at most 16 tokens a step, got 18"):
        model.step(prev_s=state, **{key: y.repeat(1, 6, *[1] * (y.dim() - 2)) for key, y in x.items()})
    memory = torch.zeros(state.numel() + x["k"].numel())
    shared, apart = (memory[at : at + x["k"].numel()].view(x["k"].shape) for at in (state.numel() - 1, state.numel()))
    with pytest.raises(ValueError, match="k: expected memory of its own, since prev_s is changed in place, got memory"):
        model.step(prev_s=memory[: state.numel()].view(state.shape), **(x | {"k": shared}))
    model.step(prev_s=memory[: state.numel()].view(state.shape), **(x | {"k": apart}))
    with pytest.raises(ValueError, match=r"missing \['g'\]"):
        model.step(prev_s=state, **{key: y for key, y in x.items() if key != "g"})
    x["q"].requires_grad_()
    with pytest.raises(NotAvailable, match="step has no gradients"):
        model.step(prev_s=state, **x)
    with torch.no_grad():
        assert model.step(prev_s=state, **x).shape == (2, 3, variants.H, variants.V)

    def once(prev_s: torch.Tensor, chunk_state: torch.Tensor) -> torch.Tensor:
        return 0.9 * prev_s + chunk_state

    meta: dict[str, Any] = {name: model.program.meta.tokens[name] for name in "qkv"}
    meta |= {"prev_s": model.program.meta.state, "scale": 1.0}
    chunks = LinearAttention(meta, variants.chunk_ok, once, variants.merge_ok, chunk_size=4)
    with pytest.raises(NotAvailable, match="no step where chunks are part of the model"):
        chunks.step(prev_s=state, **{name: x[name].detach() for name in "qkv"})


def test_a_graph_ends_before_a_step(seed: int) -> None:
    model, x, state = model_and_inputs()
    other = state.clone()
    torch._dynamo.reset()
    want = model.step(prev_s=state, **x) + 1
    found = torch.compile(lambda S: model.step(prev_s=S, **x) + 1, backend="aot_eager")(other)
    assert torch.equal(found, want) and torch.equal(other, state)


def test_heads_that_share_inputs() -> None:
    model, x, state = model_and_inputs()
    model.heads_per_key = {"q": 2, "k": 2}
    with pytest.raises(NotAvailable, match="no step where heads or rows share inputs"):
        model.step(prev_s=state, **x)


def without_kernels(sp: Any) -> tuple[str, list[str], float]:
    """The error of a program whose sizes are numbers, of which there are no kernels; then what it does instead."""
    meta: dict[str, Any] = {name: SymbTensor(["T", 2, n]) for name, n in {"q": 5, "k": 5, "v": 4}.items()}
    meta |= {"prev_s": SymbTensor(["NS", 2, 5, 4]), "scale": 1.0}
    functions = variants.chunk_ok, variants.decay_ok, variants.merge_ok
    x = {name: torch.randn(1, 2, 2, n) for name, n in {"q": 5, "k": 5, "v": 4}.items()}
    state, right = torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5, 4).double()
    with pytest.raises(NotAvailable) as error:
        LinearAttention(meta, *functions).step(prev_s=state, **x)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        LinearAttention(meta, *functions, fallback="pytorch").step(prev_s=state, **x)
    LinearAttention(meta, *functions).step(prev_s=right, **{name: y.double() for name, y in x.items()})
    return str(error.value), [str(each.message) for each in said], relative_error(state, right)


def test_more_sequences_than_a_launch_has() -> None:
    (text,) = run_ranks(too_many, 1, env=INTERPRETED)
    assert "a launch has up to 65535 heads of sequences, and these are 65536" in text


def too_many(sp: Any) -> str:
    model, x, _ = model_and_inputs()
    x = {name: y[:1, :1].expand(32768, *y[:1, :1].shape[1:]) for name, y in x.items()}
    with pytest.raises(NotAvailable) as error:
        model.step(prev_s=torch.zeros(32768, variants.H, variants.K, variants.V), **x)
    return str(error.value)


def test_a_step_that_no_kernel_runs() -> None:
    [(text, said, error)] = run_ranks(without_kernels, 1, env=INTERPRETED)
    assert "no kernels run this call: the sizes 4, 5 are plain numbers" in text
    assert any("runs in PyTorch, slowly: the sizes 4, 5" in x for x in said) and error < 1e-6


# Compiled -------------------------------------------------------------------------------------------------------------


def compile_steps(name: str, K: int, V: int, dtype: torch.dtype, of_states: torch.dtype) -> list[dict[str, Any]]:
    """The kernel for one sequence and for many, compiled."""
    from flexsp.compiler.decode import launched
    from flexsp.testing import offline

    model = variants.load(name).make(32, K, V, dtype)
    meta, sizes = model.program.meta, {"K": K, "V": V}

    def made(what: Any, lead: list[int]) -> torch.Tensor:
        shape = [*lead, *(sizes.get(s.name, 32) for s in what.shape[len(lead) > 0 :])]
        return torch.empty(shape, dtype=what.dtype, device="meta")

    with offline.record_launches() as launches:
        for B in (1, 64):
            tokens = {key: made(what, [B, 1]) for key, what in meta.tokens.items()}
            params = {key: made(what, []) for key, what in meta.params.items()}
            state = torch.empty(B, 32, *(sizes[s.name] for s in meta.state_sizes), dtype=of_states, device="meta")
            launched(model.kernels, tokens, params, sizes, state)
    return told_of(launches)


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("name", "K", "V", "dtype", "of_states"),
    [
        ("gated_deltanet", 128, 128, torch.bfloat16, torch.float32),
        *slow(
            ("gla", 128, 128, torch.bfloat16, torch.bfloat16), ("rwkv7", 64, 64, torch.bfloat16, torch.float32),
            ("hgrn", 128, 0, torch.bfloat16, torch.float32), ("gdn2", 256, 256, torch.float16, torch.float32),
            ("gla_outer_gates", 128, 128, torch.float32, torch.float32),
        ),
    ],
)  # fmt: skip
def test_compiled(
    tmp_path: Path, name: str, K: int, V: int, dtype: torch.dtype, of_states: torch.dtype
) -> None:  # fmt: skip
    """Nothing on the stack, no race, and the wait before memory is touched."""
    found = in_child(compile_steps, name, K, V, dtype, of_states, FLEXSP_CODE_DIR=tmp_path)
    told = described(found)
    assert len(found) == 2 and {x["name"] for x in found} == {"decode"}, told
    assert all(x["stack"] == 0 and x["waits_first"] for x in found), told
    assert not any(x[what] for x in found for what in ("races", "unwritten", "drops_nan", "uneven_sums")), told
