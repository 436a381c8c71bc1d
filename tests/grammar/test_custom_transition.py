"""A custom transition with state of its own against token loops in float64, packed and over ranks."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from flexsp.compiler import CompileError, cache_result
from flexsp.grammar import FlexLinearAttention, decay, transition
from flexsp.testing.compare import relative_error
from flexsp.testing.ranks import run_ranks
from tests.harness.grammar import EXACT, H, K, Tensors, V, gradients
from tests.harness.transitions import CLASSES, SIZES, Counted, Counters, Momentum, Plain, draw_transition, within


def step(name: str, x: Tensors, S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(state after one token, output)."""
    q, k, v, kept = K**-0.5 * x["q"], x["k"], x["v"], x["decay"].exp()[..., None, None]

    def read(k: torch.Tensor, S: torch.Tensor) -> torch.Tensor:
        return (k.unsqueeze(-1) * S).sum(-2)

    if name == "momentum":
        state, momentum = S[..., :K, :], S[..., K:, :]
        write = x["beta"].unsqueeze(-1) * (v - read(k, state))
        momentum = kept * momentum + k.unsqueeze(-1) * write.unsqueeze(-2)
        state = state + momentum
        return torch.cat([state, momentum], -2), read(q, state)
    if name == "plain":
        S = kept * S + k.unsqueeze(-1) * v.unsqueeze(-2)
        return S, read(q, S)
    ones = torch.ones_like(v[..., :1])
    if name == "counted":
        n, mean, slow = kept[..., 0, 0] * S[..., K, 0] + 1, kept[..., 0] * S[..., K + 1, :V] + v, S[..., K + 2, 0]
        slow = (0.5 * x["decay"]).exp() * slow + k.sum(-1)
        top = kept * S[..., :K, :] + k.unsqueeze(-1) * torch.cat([v, ones], -1).unsqueeze(-2)
        read_all = read(q, top)
        o = (read_all[..., :V] + mean + read_all[..., V:]) / (1 + n * n).unsqueeze(-1) + slow.unsqueeze(-1)
        return stacked(top, n, mean, slow), o
    if name == "counted delta":
        beta, values = x["beta"].unsqueeze(-1), torch.cat([v, ones], -1)
        top = S[..., :K, :] + k.unsqueeze(-1) * (beta * (values - read(k, S[..., :K, :]))).unsqueeze(-2)
        mean, n = kept[..., 0] * S[..., K, :V] + v, kept[..., 0, 0] * S[..., K + 1, 0] + x["beta"]
        read_all = read(q, top)
        o = (read_all[..., :V] + read_all[..., V:]) / (1 + n * n).unsqueeze(-1) + mean
        return stacked(top, mean, n), o
    written = torch.cat([k, ones], -1).unsqueeze(-1) * torch.cat([v, ones], -1).unsqueeze(-2)
    written = torch.cat([written[..., :K, :], written[..., K:, :] * torch.tensor([1.0] * V + [0.0])], -2)
    S = kept * S + written
    weight = read(q, S[..., :K, V:])
    return S, read(q, S[..., :K, :V]) / (1 + weight * weight) + S[..., K, :V]


def stacked(top: torch.Tensor, *rows: torch.Tensor) -> torch.Tensor:
    """A state [..., K, V + 1] with numbers [...] and rows [..., V] below it."""
    wide = [x.unsqueeze(-1) if x.dim() == top.dim() - 2 else x for x in rows]
    return torch.cat([top, *(torch.nn.functional.pad(x, (0, V + 1 - x.shape[-1])).unsqueeze(-2) for x in wide)], -2)


@pytest.mark.parametrize("bounds", [None, [0, 1, 38, 38, 70]], ids=["batch", "packed"])
@pytest.mark.parametrize("name", CLASSES)
def test_transition_against_token_loop(name: str, bounds: list[int] | None, seed: int) -> None:
    model = FlexLinearAttention(decay.gated(), custom_transition=CLASSES[name])
    spans = [(0, 70)] if bounds is None else list(zip(bounds, bounds[1:], strict=False))
    B, cu = (2, None) if bounds is None else (1, torch.tensor(bounds))
    x = draw_transition(name, B, 70, seed)
    initial = within(name, torch.randn(B if bounds is None else len(spans), H, *SIZES[name], dtype=torch.float64))

    def slow(values: Tensors, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs, finals = [], []
        for n, (begin, end) in enumerate(spans):
            S = state if bounds is None else state[n : n + 1]
            for t in range(begin, end):
                S, o = step(name, {key: y[:, t] for key, y in values.items()}, S)
                outputs.append(o)
            finals.append(S)
        return torch.stack(outputs, 1), torch.cat(finals)

    def call(values: Tensors, state: torch.Tensor) -> Any:
        return model(**values, initial_state=state, output_final_state=True, cu_seqlens=cu)

    found, want = gradients(call, x, initial, seed), gradients(slow, x, initial, seed)
    for each in (found, want):  # nothing reads or writes what is beside the parts
        for key in ("final", "dinitial"):
            each[key] = within(name, each[key])
    errors = {key: relative_error(found[key], want[key]) for key in want}
    assert max(errors.values()) < EXACT, errors


def transition_on_ranks(sp: Any, name: str, lengths: list[int], seed: int) -> float:
    T = sum(lengths)
    x = draw_transition(name, 2, T, seed)
    made = torch.Generator().manual_seed(seed)
    cotangent = torch.randn(2, T, H, V, dtype=torch.float64, generator=made)
    initial = within(name, torch.randn(2, H, *SIZES[name], dtype=torch.float64, generator=made))
    model = FlexLinearAttention(decay.gated(), custom_transition=CLASSES[name])
    sp.set_lengths(lengths)
    start, stop, _ = sp.shard_range(lengths[sp.rank])

    def run(part: slice, ranks: Any, state: torch.Tensor | None) -> list[torch.Tensor]:
        leaves = {key: y[:, part].clone().requires_grad_() for key, y in x.items()}
        o, final = model(**leaves, sp=ranks, initial_state=state, output_final_state=True)
        loss = (o * cotangent[:, part]).sum()
        (loss if final is None else loss + final.square().sum()).backward()
        of_tokens = [o.detach(), *(y.grad for y in leaves.values() if y.grad is not None)]
        return of_tokens + ([] if final is None else [final.detach()])

    mine = run(slice(start, stop), sp, initial if sp.is_first else None)
    whole = run(slice(0, T), False, initial)
    n = len(x) + 1
    pairs = [(a, b[:, start:stop]) for a, b in zip(mine[:n], whole[:n], strict=True)]
    if sp.is_last:
        pairs.append((mine[n], whole[n]))
    return max((relative_error(a, b) for a, b in pairs if a.numel()), default=0.0)


@pytest.mark.parametrize(
    ("name", "lengths"),
    [("momentum", [20, 0, 17]), ("normalised", [20, 0, 17]), ("counted", [20, 0, 17]), ("counted delta", [15, 5, 17])],
)
def test_transition_on_ranks_equals_one_rank(name: str, lengths: list[int], seed: int) -> None:
    answers = run_ranks(transition_on_ranks, 3, name, lengths, seed)
    assert max(answers) < EXACT, answers


def test_explain_says_how_states_lie_and_what_runs() -> None:
    text = FlexLinearAttention(decay.gated(), custom_transition=Momentum()).explain()
    assert "Momentum, state [K, V] and momentum ['K', 'V'] as rows, in one matrix" in text
    assert "on GPUs generated kernels" in text
    text = FlexLinearAttention(decay.gated(), custom_transition=Counted).explain()
    assert "state [K, V] and the number n, mean ['V'] as rows, z ['K'] as columns, the number slow, in one" in text
    text = FlexLinearAttention(custom_transition=Counters).explain()
    assert "methods run in PyTorch, no kernels: low: kernels hold extra state [K, V], [V], [K] or (), a number" in text
    assert 'raises without fallback="pytorch"' in text
    assert "on GPUs generated kernels" in FlexLinearAttention(decay.gated(), custom_transition=Plain).explain()


def test_a_transition_that_wants_gates_gets_zeros_without_decay(seed: int) -> None:
    x = draw_transition("plain", 1, 9, seed)
    closed = FlexLinearAttention(decay.gated(), custom_transition=Plain)(**x | {"decay": 0 * x["decay"]})[0]
    del x["decay"]
    assert torch.equal(FlexLinearAttention(custom_transition=Plain)(**x)[0], closed)
    assert relative_error(FlexLinearAttention()(**x)[0], closed) < EXACT


def test_steps_of_an_exponential_decay_reach_a_class(seed: int) -> None:
    """As the gate and as a factor on the values."""
    x = draw_transition("plain", 1, 9, seed)
    x |= {"decay": -x["decay"], "A": -torch.rand(H, dtype=torch.float64)}
    found = gradients(with_state(FlexLinearAttention(decay.exponential(), custom_transition=Plain)), x, ZERO, seed)
    want = gradients(with_state(FlexLinearAttention(decay.exponential())), x, ZERO, seed)
    assert max(relative_error(found[key], want[key]) for key in want) < EXACT


ZERO = torch.zeros(1, H, K, V, dtype=torch.float64)


def with_state(model: FlexLinearAttention) -> Any:
    return lambda values, state: model(**values, initial_state=state, output_final_state=True)


def test_places_of_rows_and_columns(seed: int) -> None:
    x = {key: y for key, y in draw_transition("plain", 1, 7, seed).items() if key != "decay"}
    state = torch.randn(1, H, K + 3, V + 3, dtype=torch.float64)
    o, final = FlexLinearAttention(custom_transition=Counters)(**x, initial_state=state, output_final_state=True)
    plain, last = FlexLinearAttention()(**x, initial_state=state[..., :K, :V].clone(), output_final_state=True)
    high = (K**-0.5 * x["q"].unsqueeze(-1) * state[:, None, :, :K, V:]).sum((-1, -2)).unsqueeze(-1)
    assert final is not None and last is not None
    assert relative_error(o, plain + state[:, None, :, K : K + 2, :V].sum(-2) + high) < EXACT
    assert relative_error(final[..., :K, :V], last) < EXACT
    assert relative_error(final[..., K : K + 2, :V], 0.5 * state[..., K : K + 2, :V]) < EXACT
    assert relative_error(final[..., :K, V:], 2 * state[..., :K, V:]) < EXACT
    assert relative_error(final[..., K + 2, :V], state[..., K + 2, :V] + x["v"].sum(1)) < EXACT
    assert not final[..., K:, V:].any()


def test_a_model_can_be_copied(seed: int) -> None:
    x = draw_transition("momentum", 1, 9, seed)
    model = FlexLinearAttention(decay.gated(), custom_transition=Momentum)
    o, _ = model(**x)
    assert torch.equal(copy.deepcopy(model)(**x)[0], o) and torch.equal(pickle.loads(pickle.dumps(model))(**x)[0], o)


def altered(**changes: Any) -> type:
    return type("Altered", (Momentum,), changes)


def _in_a_row(self: Any, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> Any:
    S, n, *others = Counted.chunk(self, k, v, g)
    return S, n[None], *others


def _with_a_number(  # type: ignore[no-untyped-def]
    self, state, n, mean, z, slow, chunk_state, chunk_n, chunk_mean, chunk_z, chunk_slow
):
    return state + chunk_state, n + chunk_n, chunk_mean + (mean + n), z + chunk_z, slow + chunk_slow


class Hidden(Momentum):
    """Keeps a value under the name of its state, which would never be read."""

    def chunk(self, k, v, g, beta):  # type: ignore[no-untyped-def]
        cache_result(k * 2, "momentum")
        return super().chunk(k, v, g, beta)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (object(), "expected a class with the methods chunk, propagate, output, chunk is missing"),
        (altered(output=None), "output is missing"),
        (altered(extra_state=["z"]), "extra_state: expected a dict"),
        (altered(extra_state={"z": ("Z",)}), r"extra_state\['z'\]: expected one of"),
        (altered(extra_state={"z": (3, 4)}), r"extra_state\['z'\]: expected rows .* or a number \(\), got \(3, 4\)"),
        (altered(extra_state={"state": ("V",)}), "expected another name than 'state'"),
        (altered(inputs={"beta": 3}), r"inputs\['beta'\]: expected one of \(\), \(\"K\",\)"),
        (altered(inputs={"q": ()}), "inputs: expected another name than 'q'"),
        (altered(inputs={"one two": ()}), "inputs: expected another name than 'one two'"),
        (altered(inputs={"momentum": ()}), "extra_state: expected another name than 'momentum', which is an input"),
        (altered(output=lambda self, q, **more: q), r"output: expected every argument by its name, got \*args or"),
        (altered(inputs={"decay": ()}), "custom_transition: expected another name than 'decay'"),
    ],
)
def test_classes_that_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FlexLinearAttention(decay.gated(), custom_transition=given)


def test_errors_of_calls_with_a_transition() -> None:
    x = {key: y.float() for key, y in draw_transition("momentum", 1, 5, 0).items()}
    model = FlexLinearAttention(decay.gated(), custom_transition=Momentum)
    with pytest.raises(ValueError, match=r"beta: expected shape \[B, T, H\] = \[1, 5, 2\]"):
        model(**x | {"beta": x["k"]})
    with pytest.raises(ValueError, match=r"initial_state: .*\[N, H, K \+ rows, V \+ columns\] = \[1, 2, 8, 3\]"):
        model(**x, initial_state=torch.zeros(1, H, K, V))
    row = type("Row", (Counted,), {"chunk": _in_a_row})
    with pytest.raises(CompileError, match=r"'Row.chunk': .*result 2: expected a number, of shape \[\], got \[1\]"):
        FlexLinearAttention(decay.gated(), custom_transition=row)(**{key: y for key, y in x.items() if key != "beta"})
    mixed = type("Mixed", (Counted,), {"propagate": _with_a_number})
    with pytest.raises(CompileError, match=r"\(mean \+ n\).*, is affine .* the parts of a state are rows and columns"):
        FlexLinearAttention(decay.gated(), custom_transition=mixed)(**{key: y for key, y in x.items() if key != "beta"})
    few = altered(propagate=lambda self, state, chunk_state: state + chunk_state)
    with pytest.raises(CompileError, match="expected 2 results, state, momentum, got 1"):
        FlexLinearAttention(decay.gated(), custom_transition=few)(**x)
    with pytest.raises(ValueError, match="cache_result: expected another name than 'momentum', which is part of the"):
        FlexLinearAttention(decay.gated(), custom_transition=Hidden)(**x)
    with pytest.raises(ValueError, match="expected no transition beside it"):
        FlexLinearAttention(transition=transition.delta_rule(), custom_transition=Momentum)
    with pytest.raises(NotImplementedError, match="custom_mask with custom_transition"):
        FlexLinearAttention(custom_mask=lambda i, j: 1.0, custom_transition=Momentum)
