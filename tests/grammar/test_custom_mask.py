"""Custom masks against token loops in float64, packed, over ranks and in kernels; and what is refused, and why."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid

from flexsp.compiler import CompileError
from flexsp.grammar import FlexLinearAttention, decay, transition
from flexsp.testing.compare import DRAWS, check_functions, relative_error
from flexsp.testing.ranks import run_ranks
from tests.harness.generated import KERNELS, SOME_SEGMENTS, differentiated
from tests.harness.grammar import EXACT, H, K, Tensors, V, gradients
from tests.harness.interpreted import INTERPRETED, poisoned
from tests.harness.masks import MASKS, draw, gated, half, mlstm_gates, of_heads, retention, segments
from tests.harness.programs import variable

Spans = list[tuple[int, int]]


ENGINE = {"segments", "gated", "mlstm_gates", "retention"}


def loop(
    name: str, model: FlexLinearAttention, x: Tensors, initial: torch.Tensor, spans: Spans, batched: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token by token, with the factors written by hand."""
    outputs, finals = [], []
    for n, (begin, end) in enumerate(spans):
        S = initial if batched else initial[n : n + 1]
        part = {key: y if of_heads(name, key) else y[:, begin:end] for key, y in x.items()}
        t = torch.arange(end - begin, dtype=torch.float64).view(1, -1, 1)
        like = part["v"][..., 0]
        gate, row, column, own = MASKS[name][1](part, t)
        gate, row, column = (y + 0 * like for y in (gate, row, column))
        for i in range(end - begin):
            q, k, v = (part[key][:, i] for key in "qkv")
            S = gate[:, i].exp()[..., None, None] * S
            if "decay" in part:
                S = part["decay"][:, i].exp().unsqueeze(-1) * S
            write = column[:, i].unsqueeze(-1) * v
            if model.transition.kind == "delta_rule":
                write, v = (part["beta"][:, i].unsqueeze(-1) * y for y in (write - (k.unsqueeze(-1) * S).sum(-2), v))
            S = S + k.unsqueeze(-1) * write.unsqueeze(-2)
            o = row[:, i].unsqueeze(-1) * (q.unsqueeze(-1) * S).sum(-2)
            if own is not None:
                more = (own + 0 * like)[:, i] - row[:, i] * column[:, i]
                o = o + (more * (q * k).sum(-1)).unsqueeze(-1) * v
            outputs.append(K**-0.5 * o)
        finals.append(S)
    return torch.stack(outputs, 1), torch.cat(finals)


def models(name: str) -> list[FlexLinearAttention]:
    mask = MASKS[name][0]
    found = [FlexLinearAttention(custom_mask=mask)]
    if name in ("half", "own_bonus", "gated"):
        found.append(FlexLinearAttention(transition=transition.delta_rule(), custom_mask=mask))
    if name in ("half", "retention"):
        found.append(FlexLinearAttention(decay.gated(per_head=False), custom_mask=mask))
    return found


@pytest.mark.parametrize("bounds", [None, [0, 1, 18, 18, 40]], ids=["batch", "packed"])
@pytest.mark.parametrize("name", MASKS)
def test_mask_against_token_loop(name: str, bounds: list[int] | None, seed: int) -> None:
    spans = [(0, 70)] if bounds is None else list(zip(bounds, bounds[1:], strict=False))
    T, B = spans[-1][1], 2 if bounds is None else 1
    cu = None if bounds is None else torch.tensor(bounds)
    for model in models(name):
        x = draw(name, model, B, T, seed)
        initial = torch.randn(B if bounds is None else len(spans), H, K, V, dtype=torch.float64)

        def call(values: Tensors, state: torch.Tensor, model: Any = model) -> Any:
            return model(**values, initial_state=state, output_final_state=True, cu_seqlens=cu)

        def slow(values: Tensors, state: torch.Tensor, model: Any = model) -> Any:
            return loop(name, model, values, state, spans, bounds is None)

        if name == "segments" and bounds is not None:  # running sums that start anew
            x["delta_cumsum"] = torch.cat([x["delta_cumsum"].diff(dim=1)[:, :1] * 0 + logsigmoid(
                torch.randn(1, end - begin, H, dtype=torch.float64)).cumsum(1) for begin, end in spans], 1)  # fmt: skip
        found, want = gradients(call, x, initial, seed), gradients(slow, x, initial, seed)
        errors = {key: relative_error(found[key], want[key]) for key in want}
        assert max(errors.values()) < EXACT, (model.explain(), errors)


@pytest.mark.parametrize("name", ["gated", "half"])
def test_arrays_may_be_in_float32_beside_half_precision(name: str, seed: int) -> None:
    model = FlexLinearAttention(custom_mask=MASKS[name][0])
    x = draw(name, model, 1, 9, seed)
    low = {key: y.bfloat16() for key, y in x.items()}
    wide = {key: y if key in "qkv" else y.float() for key, y in low.items()}
    (got, _), (beside, _) = model(**low), model(**wide)
    assert got.dtype == torch.bfloat16 and torch.equal(got, beside)
    with pytest.raises(ValueError, match="g: expected .*float32.*, got torch.bfloat16"):
        model(**{key: y.float() if key in "qkv" else y for key, y in low.items()})


@pytest.mark.parametrize("name", MASKS)
def test_mask_is_the_function(name: str, seed: int) -> None:
    """o_i = sum_j M(i, j) (q_i . k_j) v_j with M what the function gives on plain tensors."""
    model = FlexLinearAttention(custom_mask=MASKS[name][0])
    T = 9
    x = draw(name, model, 1, T, seed)
    M = torch.zeros(H, T, T, dtype=torch.float64)
    for h in range(H):
        arrays = {key: x[key][h] if of_heads(name, key) else x[key][0, :, h] for key in model.inputs}
        for i in range(T):
            for j in range(i + 1):
                M[h, i, j] = MASKS[name][0](torch.tensor(i), torch.tensor(j), **arrays)
    scores = torch.einsum("thk,shk->hts", x["q"][0], x["k"][0])
    want = 0.3 * torch.einsum("hts,shv->thv", M * scores, x["v"][0])
    o, _ = model(**x, scale=0.3)
    assert relative_error(o[0], want) < 1e-6  # positions alone are float32 in the function
    assert ("diagonal engine" in model.explain()) == (name in ENGINE), model.explain()


def mask_on_ranks(sp: Any, name: str, which: int, bounds: list[int] | None, lengths: list[int], seed: int) -> Any:
    model = models(name)[which]
    T = sum(lengths)
    x = draw(name, model, 1, T, seed)
    cotangent = torch.randn(1, T, H, V, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    cu = None if bounds is None else torch.tensor(bounds)
    sp.set_lengths(lengths)
    start, stop, _ = sp.shard_range(lengths[sp.rank])

    def run(part: slice, ranks: Any) -> tuple[torch.Tensor, Tensors]:
        leaves = {key: (y if of_heads(name, key) else y[:, part]).clone().requires_grad_() for key, y in x.items()}
        o, _ = model(**leaves, cu_seqlens=cu, sp=ranks)
        (o * cotangent[:, part]).sum().backward()
        return o.detach(), {key: torch.zeros_like(y) if y.grad is None else y.grad for key, y in leaves.items()}

    o, mine = run(slice(start, stop), sp)
    want, whole = run(slice(0, T), False)
    tokens = [key for key in x if not of_heads(name, key)]
    errors = [relative_error(a, b) for a, b in
              [(o, want[:, start:stop]), *((mine[key], whole[key][:, start:stop]) for key in tokens)]
              if a.numel()]  # fmt: skip
    heads = {key: (mine[key], whole[key]) for key in x if of_heads(name, key)}
    return max(errors, default=0.0), heads


@pytest.mark.parametrize(
    ("name", "which", "bounds"),
    [("segments", 0, None), ("half", 0, [0, 5, 25, 25, 37]), ("half", 1, None), ("average", 0, None),
     ("own_bonus", 0, None)],
)  # fmt: skip
def test_mask_on_ranks_equals_one_rank(name: str, which: int, bounds: list[int] | None, seed: int) -> None:
    answers = run_ranks(mask_on_ranks, 3, name, which, bounds, [20, 0, 17], seed)
    assert max(error for error, _ in answers) < EXACT, answers
    for key, (_, want) in answers[0][1].items():
        assert relative_error(sum(heads[key][0] for _, heads in answers), want) < EXACT


def by_kernels(sp: Any, folder: str, seed: int) -> str:
    """A mask with every factor, in kernels that the interpreter runs; folder: where they are written."""

    def every(i, j, g, w):  # type: ignore[no-untyped-def]
        G = g.cumsum(0)
        if i == j:
            return w[i]
        return torch.sigmoid(w[i]) * torch.exp(G[i] - G[j]) * (w[j] - 2)

    model = FlexLinearAttention(custom_mask=every)
    x = {key: y.float() for key, y in draw("half", model, 1, 20, seed).items()}
    made = torch.Generator().manual_seed(seed)
    cotangents = [(torch.randn(1, 20, H, V, generator=made), torch.randn(1, H, K, V, generator=made))
                  for _ in range(DRAWS)]  # fmt: skip

    def run(dtype: torch.dtype, n: int = DRAWS) -> list[Tensors]:
        leaves = {key: y.to(dtype, copy=True) for key, y in x.items()}
        return differentiated(lambda given: model(**given, output_final_state=True), leaves, cotangents[:n])

    with poisoned(SOME_SEGMENTS, H), variable("FLEXSP_CODE_DIR", folder):
        [found] = run(torch.float32, 1)
    (source,) = (path.read_text() for path in Path(folder).iterdir() if path.suffix == ".py")
    assert all(f"def {kind}" in source for kind in KERNELS)
    with variable("FLEXSP_BACKEND", None):
        low = run(torch.float32)
    check_functions([found], run(torch.float64), low)
    return source


def test_mask_in_generated_kernels(tmp_path: Any, seed: int) -> None:
    assert run_ranks(by_kernels, 1, str(tmp_path), seed, env=INTERPRETED)


def distance(i, j):  # type: ignore[no-untyped-def]
    return 1 / (1 + i - j)


def product(i, j, g):  # type: ignore[no-untyped-def]
    return torch.exp(g[i] * g[j])


def window(i, j, g):  # type: ignore[no-untyped-def]
    return torch.where(i - j < 4, torch.exp(g[j]), 0.0)


def branch(i, j, g):  # type: ignore[no-untyped-def]
    return g[j] if g[i] > 0 else 1.0


def backwards(i, j, g):  # type: ignore[no-untyped-def]
    return g[j] if i <= j else 0.5


def nothing(i, j, g):  # type: ignore[no-untyped-def]
    return g[j] if i <= j else 0.0


def hidden(i, j, g):  # type: ignore[no-untyped-def]
    return torch.abs(g[i] * g[j])


def clamped(i, j, g):  # type: ignore[no-untyped-def]
    return torch.exp(torch.clamp(g[i] - g[j], max=0.0))


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "distance": (distance, r"1/\(i - j \+ 1\) depends on i and on j.*M\(\d, \d\) M\(\d, \d\).*the local factor"),
    "product": (product, r"exp\(g\[i\]\*g\[j\]\) depends on i and on j.*with g = \[.*the decay is what fails"),
    "clamped": (clamped, r"minimum\(g\[i\] - g\[j\], 0\)\) depends on i and on j"),
    "window": (window, r"how far i and j are apart \(a band or window\).*test_custom_mask.py:\d+ \(return torch.wh"),
    "levels": (lambda i, j: torch.floor(torch.log2(i - j + 1.0)), "log2 takes positions apart.*no state of fixed size"),
    "other levels": (lambda i, j: i ^ j, "xor takes positions apart.*no state of fixed size"),
    "blocks": (lambda i, j: torch.where(i // 8 == j // 8, 1.0, 0.5), "floordiv takes.*may be packed as documents"),
    "branch": (branch, r"control flow depends on values.*if g\[i\] > 0"),
    "backwards": (backwards, r"not causal: .* at i = \d, j = \d with g = .*return 0 where j > i"),
    "nothing": (nothing, r"not causal"),
    "sum": (lambda i, j, g: g[i] + g[j], r"g\[i\] \+ g\[j\] depends on i and on j"),
    "math": (lambda i, j, g: math.exp(g[i]), "use torch.exp for math.exp"),
    "vector": (lambda i, j, g: g * g[i], "'g' is used with an index.*and without"),
    "running sum": (lambda i, j, g: g.cumsum(0), "a running sum is used without an index"),
    "neighbour": (lambda i, j, g: g[i - 1], "indexed with something else than i or j"),
    "tuple": (lambda i, j, g: (g[i], g[j]), "expected one number as result, got tuple"),
    "unused": (lambda i, j, g: 1.0, "argument 'g' is not used"),
    "zero": (lambda i, j, g: 0.0 * g[i], "is 0 for every j < i|argument 'g' is not used"),
    "operator": (lambda i, j, g: torch.erf(g[i]), "operator 'erf' is not supported; supported are abs"),
    "not finite": (lambda i, j, g: g[i] / j, r"is not finite, .*at i, j = \d, 0 with g = "),
    "tensor": (lambda i, j, g: torch.ones(()) * g[i], "a tensor that is no argument"),
    "arguments": (lambda i: i, "expected the arguments i, j"),
    "stars": (lambda i, j, *g: 1.0, r"no \*args"),
    "raises": (lambda i, j, g: {}["x"], "cannot be traced at .*KeyError"),
    "a complex root": (lambda i, j, g: g[j] * (0 * j - 2) ** 0.5, r"is not a real number for j < i: .*I\*"),
    "alternating": (lambda i, j: (0 * i - 1) ** (i - j), "is not a real number for j < i"),
    "factors, not seen": (hidden, "its 2 x 2 minors vanish, so it does factor, but not as it is written"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_masks_that_are_refused(name: str) -> None:
    function, message = REFUSED[name]
    with pytest.raises(CompileError, match=re.compile("custom_mask.*" + message, re.DOTALL)):
        FlexLinearAttention(custom_mask=function)


def test_the_values_in_a_refusal_are_the_masks() -> None:
    with pytest.raises(CompileError) as caught:
        FlexLinearAttention(custom_mask=distance)
    entry = r"M\((\d), (\d)\)"
    pattern = f"{entry} {entry} = {entry} {entry}, here they are (\\S+) and (\\S+)"
    text = re.findall(pattern, str(caught.value))[0]
    i, j, k, l, i2, l2, k2, j2 = (int(n) for n in text[:8])
    assert (i, l, k, j) == (i2, l2, k2, j2) and max(j, l) < min(i, k)
    left, right = distance(i, j) * distance(k, l), distance(i, l) * distance(k, j)
    assert [float(n) for n in text[8:]] == pytest.approx([left, right], rel=1e-3) and left != right


def test_errors_of_calls_with_a_mask() -> None:
    q = torch.randn(1, 5, H, K)
    v = torch.randn(1, 5, H, V)
    with pytest.raises(ValueError, match=r"u: expected shape \[B, T, H\] = \[1, 5, 2\], got \[2\]"):
        FlexLinearAttention(custom_mask=mlstm_gates)(q, q, v, f=torch.zeros(1, 5, H), u=torch.zeros(H))
    with pytest.raises(ValueError, match=r"f: expected shape \[B, T, H\] = \[1, 5, 2\], got \[1, 4, 2\]"):
        FlexLinearAttention(custom_mask=mlstm_gates)(q, q, v, f=torch.zeros(1, 4, H), u=torch.zeros(1, 5, H))
    with pytest.raises(ValueError, match=r"gamma: expected shape \[H\] = \[2\], got \[1, 5, 2\]"):
        FlexLinearAttention(custom_mask=retention)(q, q, v, gamma=torch.ones(1, 5, H))
    with pytest.raises(ValueError, match="custom_mask 'gated': expected a mask that decays with i, log gates <= 0"):
        FlexLinearAttention(custom_mask=gated)(q, q, v, g=torch.ones(1, 5, H))
    with pytest.raises(ValueError, match="custom_mask 'retention': expected a mask that decays .* <= 0, got nan"):
        FlexLinearAttention(custom_mask=retention)(q, q, v, gamma=torch.tensor([0.5, -0.5]))
    with pytest.raises(ValueError, match="custom_mask: expected another name than 'beta'"):
        FlexLinearAttention(transition=transition.delta_rule(), custom_mask=segments)
    with pytest.raises(ValueError, match="custom_mask: expected another name than 'scale'"):
        FlexLinearAttention(custom_mask=lambda i, j, scale: scale)


def test_an_array_may_have_the_name_of_a_step_size(seed: int) -> None:
    def named(i, j, decay):  # type: ignore[no-untyped-def]
        return torch.exp(decay[j])

    model = FlexLinearAttention(decay.exponential(data_dependent=False), custom_mask=named)
    x = draw("", model, 1, 9, seed) | {"decay": torch.randn(1, 9, H, dtype=torch.float64)}
    o, _ = model(**x)
    want, _ = FlexLinearAttention(decay.exponential(data_dependent=False))(
        **{key: y * x["decay"].exp().unsqueeze(-1) if key == "v" else y for key, y in x.items() if key != "decay"}
    )
    assert relative_error(o, want) < EXACT


def test_strong_gates_of_a_mask_do_not_overflow(seed: int) -> None:
    """e^{-G_j} alone would be infinite."""
    model = FlexLinearAttention(transition=transition.delta_rule(), custom_mask=gated)
    x = {key: y.float() for key, y in draw("gated", model, 1, 40, seed).items()}
    x["g"] = -60 * torch.rand(1, 40, H)
    leaves = {key: y.clone().requires_grad_() for key, y in x.items()}
    o, _ = model(**leaves)
    o.sum().backward()
    want, _ = model(**{key: y.double() for key, y in x.items()})
    assert relative_error(o, want) < 1e-4
    assert all(y.grad is not None and y.grad.isfinite().all() for y in leaves.values())


def test_explain_gives_the_factors() -> None:
    text = FlexLinearAttention(custom_mask=half).explain()
    assert "log gate 0.5*g[t], row" in text and "exp(0.5*cumsum(g)[t])" in text and "generated kernels" in text


@pytest.mark.parametrize(("rows", "columns", "rest"), [(2, 1, "row exp(cumsum("), (1, 2, "column exp(-cumsum(")])
def test_a_running_sum_is_a_decay_as_often_as_both_positions_have_it(rows: int, columns: int, rest: str) -> None:
    def mask(i, j, f):  # type: ignore[no-untyped-def]
        F = logsigmoid(f).cumsum(0)
        return torch.exp(rows * F[i] - columns * F[j])

    assert f"log gate logsigmoid(f[t]), {rest}logsigmoid(f))[t])" in FlexLinearAttention(custom_mask=mask).explain()
