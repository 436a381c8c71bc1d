"""Calls that other libraries take: mixed dtypes, states in half precision, their layouts, tokens backwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flexsp import ops
from flexsp.testing.cases import CASES, PROGRAM_CASES, Shape
from tests.op_cases import OTHER_CASES

ALL = CASES | PROGRAM_CASES | OTHER_CASES
ROWS = {"mamba": ("x", "B", "C"), "selective": ("u", "B", "C", "z"), "rwkv": ("r", "k", "v", "a", "b")}
Tensor = torch.Tensor


def rows_of(name: str) -> tuple[str, ...]:
    if name in ("hgrn", "rg_lru"):
        return ("x",)
    return next((rows for start, rows in ROWS.items() if name.startswith(start)), ("q", "k", "v"))


def mapped(x: Any, dtype: torch.dtype) -> Any:
    return tuple(y.to(dtype) for y in x) if isinstance(x, tuple) else x.to(dtype) if torch.is_tensor(x) else x


def finals(x: Any) -> tuple[Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)


@pytest.mark.parametrize("name", ALL)
def test_what_is_not_in_the_rows_dtype_is_taken_in_float32(name: str, seed: int) -> None:
    """Rows in float16 beside all else in bfloat16, and one row in bfloat16 beside others in float16."""
    case, rows = ALL[name], rows_of(name)
    shape = Shape(B=1, T=5, H=4, K=4, V=4, states=1)
    drawn = {key: mapped(x, torch.bfloat16) for key, x in case.inputs(shape, seed).items()}
    halves = {key: mapped(x, torch.float16) if key in rows else x for key, x in drawn.items()}
    wide = {key: x if key in rows else mapped(x, torch.float32) for key, x in halves.items()}
    (got, states), (want, others) = (case.op(**x, output_final_state=True) for x in (halves, wide))
    assert got.dtype == torch.float16 and torch.equal(got, want)
    assert all(torch.equal(a, b) for a, b in zip(finals(states), finals(others), strict=True))
    if len(rows) > 1:
        mixed = halves | {rows[-1] if rows[0] in "xu" else rows[0]: drawn[rows[-1] if rows[0] in "xu" else rows[0]]}
        single = {key: mapped(x, torch.float32) for key, x in mixed.items()}
        out = rows[0] if rows[0] in "xu" else "v"
        (got, _), (want, _) = (case.op(**x, output_final_state=True) for x in (mixed, single))
        assert got.dtype == mixed[out].dtype and torch.equal(got, want.to(got.dtype))


def test_gradients_have_the_dtypes_of_the_arguments() -> None:
    q, k, v = (torch.randn(1, 5, 2, 4).requires_grad_() for _ in range(3))
    state = torch.randn(1, 2, 4, 4, dtype=torch.bfloat16).requires_grad_()
    half = v.detach().half().requires_grad_()
    o, _ = ops.chunk_simple_gla(q, k, half, initial_state=state)
    o.float().sum().backward()
    assert (o.dtype, q.grad.dtype, half.grad.dtype, state.grad.dtype) == (
        torch.float16, torch.float32, torch.float16, torch.bfloat16,
    )  # fmt: skip


def test_other_dtypes_are_still_refused() -> None:
    q, k, v = torch.randn(3, 1, 5, 2, 4).unbind(0)
    with pytest.raises(ValueError, match="v: expected dtype float32, got torch.float64"):
        ops.chunk_simple_gla(q, k, v.double())
    with pytest.raises(ValueError, match="initial_state: expected dtype float32, got torch.float64"):
        ops.chunk_simple_gla(q, k, v, initial_state=torch.zeros(1, 2, 4, 4).double())
    with pytest.raises(TypeError, match="multiple values"):
        ops.chunk_simple_gla(q, k, v.half(), q=q)


DECODED: dict[str, Any] = {
    "simple_gla": ("simple_gla", "g"), "gla": ("gla", "g"), "rwkv6": ("rwkv6", "w"), "rwkv7": ("rwkv7", "w"),
    "hgrn": ("hgrn", "g"), "hgrn2": ("hgrn2", "g"), "delta_rule": ("delta_rule", ""), "kda_in_kernel": ("kda", ""),
    "gated_delta_rule": ("gated_delta_rule", ""), "gdn2_in_kernel": ("gdn2", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", DECODED)
def test_decoding_of_packed_documents(name: str, seed: int) -> None:
    """Each document by itself."""
    case, op = ALL[name], getattr(ops, f"recurrent_{DECODED[name][0]}")
    inputs, bounds = case.inputs(Shape(B=1, T=7, H=4, K=4, V=4, states=3), seed), torch.tensor([0, 3, 3, 6])
    got, states = op(**inputs, cu_seqlens=bounds, output_final_state=True)
    for n, (a, b) in enumerate(zip(bounds, bounds[1:], strict=False)):
        part = {key: x[:, a:b] if key in case.tokens else x for key, x in inputs.items()}
        part["initial_state"] = inputs["initial_state"][n : n + 1]
        want, state = op(**part, output_final_state=True)
        torch.testing.assert_close(got[:, a:b], want, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(states[n : n + 1], state, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["simple_gla", "gla", "rwkv6"])
def test_from_the_last_token_to_the_first(name: str, seed: int) -> None:
    case, op = ALL[name], getattr(ops, f"recurrent_{name}")
    inputs = case.inputs(Shape(B=2, T=4, H=2, K=4, V=3, states=2), seed)
    turned = {key: x.flip(1) if key in case.tokens else x for key, x in inputs.items()}
    got, state = op(**inputs, reverse=True, output_final_state=True)
    want, other = op(**turned, output_final_state=True)
    assert torch.equal(got.flip(1), want) and torch.equal(state, other)
    with pytest.raises(ValueError, match="reverse: expected False with cu_seqlens"):
        op(**{key: x[:1] for key, x in inputs.items()}, reverse=True, cu_seqlens=torch.tensor([0, 4]))


def test_gates_of_values(seed: int) -> None:
    """gv of fused_recurrent_gla, against a loop."""
    x = OTHER_CASES["gla"].inputs(Shape(B=2, T=4, H=2, K=4, V=3, states=2), seed)
    gv, S, o = F.logsigmoid(torch.randn_like(x["v"])), x["initial_state"], []
    for t in range(4):
        S = x["g"][:, t].exp().unsqueeze(-1) * S * gv[:, t].exp().unsqueeze(-2)
        S = S + x["k"][:, t].unsqueeze(-1) * x["v"][:, t].unsqueeze(-2)
        o.append(0.5 * (x["q"][:, t].unsqueeze(-2) @ S).squeeze(-2))
    got, state = ops.recurrent_gla(**x, gv=gv, output_final_state=True)
    torch.testing.assert_close(got, torch.stack(o, 1))
    torch.testing.assert_close(state, S)


def test_parameters_as_fla_has_them(seed: int) -> None:
    """A_log [1, 1, HV, 1], and a lower_bound that nothing reads."""
    case = PROGRAM_CASES["kda_in_kernel"]
    inputs = case.inputs(Shape(B=1, T=5, H=4, K=4, V=4), seed)
    wide = inputs | {"A_log": inputs["A_log"].view(1, 1, -1, 1)}
    assert torch.equal(case.op(**wide)[0], case.op(**inputs)[0])
    with pytest.raises(ValueError, match=r"A_log: expected shape \[1, 1, HV, 1\] = \[1, 1, 4, 1\], got \[1, 4, 1, 1\]"):
        case.op(**inputs | {"A_log": inputs["A_log"].view(1, -1, 1, 1)})
    plain = PROGRAM_CASES["kda"].inputs(Shape(B=1, T=5, H=4, K=4, V=4), seed)
    assert torch.equal(ops.chunk_kda(**plain, lower_bound=-5.0)[0], ops.chunk_kda(**plain)[0])


@pytest.mark.parametrize("op", [ops.selective_scan, ops.recurrent_selective_scan])
def test_groups_of_the_selective_scan(op: Any, seed: int) -> None:
    """Channels of a group are a call of their own."""
    x = OTHER_CASES["selective_scan"].inputs(Shape(B=2, T=4, H=1, states=2), seed)
    B, C = torch.randn(2, 2, 4, 2, 4, dtype=torch.float64)
    y, last = op(**x | {"B": B, "C": C}, delta_softplus=True, return_last_state=True)
    for g in range(2):
        mine = slice(4 * g, 4 * g + 4)
        part = {key: x[key][..., mine] for key in ("u", "delta", "z", "D", "delta_bias")}
        part |= {"A": x["A"][mine], "initial_state": x["initial_state"][:, mine], "B": B[:, :, g], "C": C[:, :, g]}
        want, state = op(**part, delta_softplus=True, return_last_state=True)
        assert torch.equal(y[..., mine], want) and torch.equal(last[:, mine], state)
    with pytest.raises(ValueError, match="B: expected a number of groups G that divides the 8 channels, got 3"):
        op(**x | {"B": torch.randn(2, 4, 3, 4).double(), "C": torch.randn(2, 4, 3, 4).double()})


def test_raw_gates_that_nothing_reads_are_refused(seed: int) -> None:
    inputs = PROGRAM_CASES["gdn2"].inputs(Shape(B=1, T=5, H=4, K=4, V=4), seed)
    for op in (ops.chunk_gdn2, ops.recurrent_gdn2):
        with pytest.raises(ValueError, match="A_log: expected None without use_gate_in_kernel, got a tensor"):
            op(**inputs, A_log=torch.zeros(4))


def test_strengths_of_one_number_a_token_are_those_of_kda(seed: int) -> None:
    """Of Gated DeltaNet-2, outputs and states; strengths may be float32 beside rows in bfloat16."""
    inputs = PROGRAM_CASES["kda"].inputs(Shape(B=1, T=70, H=2, K=8, V=6, states=1), seed)
    beta = inputs.pop("beta").unsqueeze(-1)
    wide = inputs | {"b": beta.expand_as(inputs["k"]), "w": beta.expand_as(inputs["v"])}
    want = ops.chunk_kda(**inputs, beta=beta.squeeze(-1), output_final_state=True)
    for got, other in zip(ops.chunk_gdn2(**wide, output_final_state=True), want, strict=True):
        torch.testing.assert_close(got, other, rtol=1e-12, atol=1e-12)
    half = {name: mapped(x, torch.bfloat16 if name in ("q", "k", "v") else torch.float32) for name, x in wide.items()}
    got = ops.chunk_gdn2(**half)[0]
    other = ops.chunk_gdn2(**{name: mapped(x, torch.float32) for name, x in half.items()})[0]
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), other, rtol=2**-6, atol=2**-6)
