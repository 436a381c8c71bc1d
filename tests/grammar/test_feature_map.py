"""`feature_map.map`: features by a function of one's own, against token loops in float64, over ranks, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import logsigmoid, normalize

from flexsp.exceptions import NotAvailable
from flexsp.grammar import FlexLinearAttention, decay, feature_map, transition
from flexsp.testing.compare import relative_error
from flexsp.testing.ranks import run_ranks
from tests.harness.grammar import gradients

H, K, M, V = 2, 4, 8, 3
EXACT = 1e-10
Tensors = dict[str, torch.Tensor]


def both_signs(x: torch.Tensor) -> torch.Tensor:
    """[..., 2 K], of length 1."""
    return normalize(torch.cat([x.clamp(min=0), (-x).clamp(min=0)], -1), dim=-1)


class Learned(nn.Module):
    """softmax over M channels of a map for each head, as of Hedgehog (Zhang et al. 2024)."""

    def __init__(self) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(H, K, M, dtype=torch.float64, generator=made))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("...hk,hkm->...hm", x, self.weight.to(x.dtype)).softmax(-1)


def squared(x: torch.Tensor) -> torch.Tensor:
    return x.square()


MODELS: dict[str, Callable[[Any], FlexLinearAttention]] = {
    "gates": lambda fn: FlexLinearAttention(decay.gated(), feature_map.map(fn)),
    "gates of channels": lambda fn: FlexLinearAttention(decay.gated(per_head=False), feature_map.map(fn)),
    "delta": lambda fn: FlexLinearAttention(decay.gated(), feature_map.map(fn), transition.delta_rule()),
    "read": lambda fn: FlexLinearAttention(
        decay.gated(), feature_map.map(fn), transition.preconditioned_gd(eps=0.1)
    ),
}  # fmt: skip


def draw(name: str, B: int, T: int, seed: int, channels: int = M) -> Tensors:
    made = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made, dtype=torch.float64)

    x = {"q": normal(B, T, H, K), "k": normal(B, T, H, K), "v": normal(B, T, H, V)}
    x["decay"] = logsigmoid(normal(B, T, H, channels) if name == "gates of channels" else normal(B, T, H))
    return x | ({"beta": normal(B, T, H).sigmoid()} if name == "delta" else {})


def token_loop(name: str, fn: Any, x: Tensors, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    outputs = []
    for t in range(x["v"].shape[1]):
        q, k, v = fn(x["q"][:, t]), fn(x["k"][:, t]), x["v"][:, t]
        a = x["decay"][:, t].exp()
        state = state * (a if name == "gates of channels" else a.unsqueeze(-1)).unsqueeze(-1)
        S, P = state[..., :V], state[..., V:]
        if name == "delta":
            v = x["beta"][:, t].unsqueeze(-1) * (v - (k.unsqueeze(-1) * S).sum(-2))
        S = S + k.unsqueeze(-1) * v.unsqueeze(-2)
        if name == "read":
            P = P + k.square().unsqueeze(-1)
            q = q / (P.squeeze(-1) + 0.1)
        state = torch.cat([S, P], -1)
        outputs.append(k.shape[-1] ** -0.5 * (q.unsqueeze(-1) * S).sum(-2))
    return torch.stack(outputs, 1), state


def initial(name: str, seed: int, channels: int = M) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    state = torch.randn(2, H, channels, V + (name == "read"), dtype=torch.float64, generator=made)
    state[..., V:].abs_()
    return state


@pytest.mark.parametrize("name", MODELS)
def test_against_token_loop(name: str, seed: int) -> None:
    for fn, channels in ((both_signs, M), (squared, K)):
        what, x, state = MODELS[name](fn), draw(name, 2, 70, seed, channels), initial(name, seed, channels)
        found = gradients(lambda y, s, w=what: w(**y, initial_state=s, output_final_state=True), x, state, seed)
        want = gradients(lambda y, s, f=fn: token_loop(name, f, y, s), x, state, seed)
        errors = {key: relative_error(found[key], want[key]) for key in want}
        assert max(errors.values()) < EXACT, errors


def test_a_module_is_trained(seed: int) -> None:
    x, state, fn = draw("gates", 2, 33, seed), initial("gates", seed), Learned()
    o, _ = MODELS["gates"](fn)(**x, initial_state=state)
    want, _ = token_loop("gates", fn, x, state)
    assert relative_error(o, want) < EXACT
    found, right = (torch.autograd.grad(y.square().sum(), fn.weight)[0] for y in (o, want))
    assert found.abs().max() > 0 and relative_error(found, right) < EXACT


def on_ranks(sp: Any, name: str, lengths: list[int], seed: int) -> Tensors:
    x, fn = draw(name, 2, sum(lengths), seed), Learned()
    made = torch.Generator().manual_seed(seed)
    weights = torch.randn(2, sum(lengths), H, V, dtype=torch.float64, generator=made)
    sp.set_lengths(lengths)
    start, stop, _ = sp.shard_range(lengths[sp.rank])
    leaves = {key: y[:, start:stop].clone().requires_grad_() for key, y in x.items()}
    o, _ = MODELS[name](fn)(**leaves, sp=sp)
    (o * weights[:, start:stop]).sum().backward()
    return {"o": o.detach(), "weight": fn.weight.grad} | {key: y.grad for key, y in leaves.items()}


@pytest.mark.parametrize("name", ["gates", "delta"])
def test_ranks_equal_one_rank(name: str, seed: int) -> None:
    (whole,) = run_ranks(on_ranks, 1, name, [37], seed)
    parts = run_ranks(on_ranks, 2, name, [20, 17], seed)
    for key, want in whole.items():
        found = [part[key] for part in parts]
        both = torch.stack(found).sum(0) if key == "weight" else torch.cat(found, 1)
        assert relative_error(both, want) < EXACT, key


def test_half_precision_and_autocast(seed: int) -> None:
    x, fn = {key: y.bfloat16() for key, y in draw("gates", 1, 20, seed).items()}, Learned()
    what = MODELS["gates"](fn)
    o, final = what(**x, output_final_state=True)
    assert o.dtype == torch.bfloat16 and final is not None and final.shape == (1, H, M, V)
    with torch.autocast("cpu", torch.bfloat16):
        o, _ = what(**{key: y.float() for key, y in x.items()})
    assert o.dtype == torch.float32
    want, _ = what(**{key: y.double() for key, y in x.items()})
    assert relative_error(o, want) < 2.0**-6


def test_one_graph(seed: int) -> None:
    torch._dynamo.reset()
    x, what = draw("gates", 2, 20, seed), MODELS["gates"](both_signs)
    want, _ = what(**x)
    found, _ = torch.compile(lambda y: what(**y), fullgraph=True, backend="aot_eager")(x)
    assert relative_error(found, want) < EXACT


def test_explain_names_the_function() -> None:
    what = MODELS["gates"](both_signs)
    assert "map(both_signs) features" in what.explain()
    assert "map(Learned) features" in MODELS["gates"](Learned()).explain()
    assert "this call runs its reference in PyTorch" in what.explain(**draw("gates", 1, 5, 0))


def centred(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(1, keepdim=True)


def over_the_batch(x: torch.Tensor) -> torch.Tensor:
    return x / x.norm(dim=0)


def noisy(x: torch.Tensor) -> torch.Tensor:
    return x + torch.randn_like(x)


@pytest.mark.parametrize("fn", [centred, over_the_batch, noisy])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_looks_at_other_tokens_is_refused(fn: Any, dtype: torch.dtype) -> None:
    x = {key: y.to(dtype) for key, y in draw("gates", 1, 1, 0).items()}  # one token tells nothing
    expected = rf"feature_map.map\({fn.__name__}\): expected a function that makes a token's features of that token"
    with pytest.raises(ValueError, match=expected):
        MODELS["gates"](fn)(**x)


def test_features_that_are_not_finite_are_not_taken_for_others() -> None:
    x = draw("gates", 1, 5, 0, K) | {"q": torch.ones(1, 5, H, K).double(), "k": torch.ones(1, 5, H, K).double()}
    o, _ = MODELS["gates"](torch.sqrt)(**x)  # of the random rows that are looked at half are negative
    assert o.isfinite().all()


@pytest.mark.parametrize(
    ("fn", "changes", "message"),
    [
        (lambda x: x.sum(-1), {}, r"expected floating features \[1, 5, 2\] \+ \[M\] of rows \[1, 5, 2, 4\], got"),
        (lambda x: x.long(), {}, r"got \[1, 5, 2, 4\] of torch.int64"),
        (lambda x: (x, x), {}, "expected a tensor as result, got tuple"),
        (both_signs, {"q": 1.0}, r"q: expected a floating tensor \[B, T, ..., H, K\], got"),
        (both_signs, {"k": torch.ones(1, 5, H, K).long()}, "k: expected a floating tensor"),
        (both_signs, {"initial_state": torch.zeros(1, H, K, V).double()}, "initial_state: expected shape"),
    ],
)
def test_errors_of_a_call(fn: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MODELS["gates"](fn)(**(draw("gates", 1, 5, 0) | changes))


def test_what_is_no_function() -> None:
    with pytest.raises(ValueError, match=r"fn: expected a function of a tensor \[..., K\], got 'elu'"):
        feature_map.map("elu")  # type: ignore[arg-type]


def in_segments(sp: Any, seed: int) -> tuple[torch.Tensor, str]:
    x = draw("gates", 1, 24, seed)
    sp.set_lengths([24 // sp.world_size] * sp.world_size)
    start, stop, _ = sp.shard_range(24 // sp.world_size)
    mine = {key: y[:, start:stop] for key, y in x.items()}
    o, _ = MODELS["gates"](squared)(**mine, sp=sp)
    with pytest.raises(NotAvailable) as error:
        MODELS["gates"](Learned())(**mine, sp=sp)
    return o, str(error.value)


def test_bits_over_ranks(seed: int) -> None:
    (whole, _), *_ = run_ranks(in_segments, 1, seed, bitwise=4)
    parts = run_ranks(in_segments, 2, seed, bitwise=4)
    assert torch.equal(torch.cat([o for o, _ in parts], 1), whole)
    assert relative_error(whole, MODELS["gates"](squared)(**draw("gates", 1, 24, seed))[0]) < EXACT
    assert all("bitwise is not available for parameters of feature_map.map" in text for _, text in parts)
