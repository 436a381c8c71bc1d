"""Mamba-3 against a token loop that stands here: the op, its decoding and the layer; documents and ranks."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from flexsp.comm.group import SequenceParallel
from flexsp.nn import Mamba3, SequenceParallelLA
from flexsp.ops import Mamba3State, mamba3, recurrent_mamba3
from flexsp.testing.compare import relative_error
from flexsp.testing.ranks import run_ranks
from tests.harness.interpreted import INTERPRETED
from tests.harness.mamba3 import (
    CASES,
    OPS,
    SHARDS,
    call,
    check_ranks,
    compare,
    draw,
    flat,
    gradients,
    leaves,
    on_circle,
    options,
    oracle,
    part,
    turned,
    whole_case,
)
from tests.marks import quick, slow

EXACT = 1e-12
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
every_case = pytest.mark.parametrize("case", quick(CASES, "siso", "mimo"))


# The op ---------------------------------------------------------------------------------------------------------------


@every_case
@pytest.mark.parametrize("dtype", quick(DTYPES, torch.float64))
def test_against_the_token_loop(case: str, dtype: torch.dtype) -> None:
    for T in (random.choice((67, 91)), 1):
        compare(mamba3, case, draw(case, 2, T, states=2), dtype)


@every_case
@pytest.mark.parametrize("dtype", quick(DTYPES, torch.float64))
def test_token_by_token(case: str, dtype: torch.dtype) -> None:
    inputs = draw(case, 2, 15, states=2)
    compare(recurrent_mamba3, case, inputs, dtype)
    if dtype == torch.float32:
        plain = {key: tuple(z.float() for z in x) if isinstance(x, tuple) else x.float() for key, x in inputs.items()}
        for op in OPS:
            want = op(**plain, output_final_state=True)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                found = op(**plain, output_final_state=True)
            assert all(torch.equal(a, b) for a, b in zip((found[0], *found[1]), (want[0], *want[1]), strict=True))


@every_case
def test_one_row_of_angles(case: str) -> None:
    """For all heads."""
    inputs = draw(case, 2, 20, states=2)
    inputs["angles"] = inputs["angles"][:, :, :1]
    for op in OPS:
        compare(op, case, inputs, torch.float64)


@every_case
def test_what_may_be_left_out(case: str) -> None:
    inputs = draw(case, 2, 20)
    for name in ("D", "B_bias", "C_bias"):
        del inputs[name]
    want, _ = oracle(**inputs, **options(case))
    for op in OPS:
        y, state = op(**inputs, **options(case))
        assert relative_error(y, want) < EXACT and state is None


@every_case
@pytest.mark.parametrize("dtype", quick([torch.float64, torch.bfloat16], torch.float64))
def test_documents_and_strides(case: str, dtype: torch.dtype) -> None:
    inputs = draw(case, 1, 83, states=6)
    inputs["cu_seqlens"] = torch.tensor([0, 0, 1, 37, 37, 83, 83], dtype=random.choice((torch.int32, torch.int64)))
    compare(mamba3, case, inputs, dtype, arrange=lambda x: x.transpose(0, -1).contiguous().transpose(0, -1))


@every_case
def test_no_tokens(case: str) -> None:
    """The state passes through, and so does its gradient."""
    inputs = draw(case, 2, 0, states=2)
    state = Mamba3State(*(z.requires_grad_() for z in inputs["initial_state"]))
    for op in OPS:
        y, final = op(**(inputs | {"initial_state": state}), output_final_state=True)
        assert y.shape[1] == 0 and all(torch.equal(a, b) for a, b in zip(final, state, strict=True))
        assert not {z.data_ptr() for z in final} & {z.data_ptr() for z in state}
        gradients = torch.autograd.grad(sum(z.sum() for z in final), list(state))
        assert all(torch.equal(g, torch.ones_like(g)) for g in gradients)


@every_case
def test_parts_equal_the_whole(case: str) -> None:
    """A text in two calls and then token by token: states and gradients pass through them."""
    inputs = leaves(draw(case, 2, 75, states=2))
    whole = call(mamba3, **inputs, **options(case), output_final_state=True)
    cut, state, y = random.randrange(1, 70), inputs["initial_state"], []
    prompt = [(slice(0, cut), mamba3), (slice(cut, 70), mamba3)]
    for at, op in (*prompt, *((slice(t, t + 1), recurrent_mamba3) for t in range(70, 75))):
        out, state = op(**(part(inputs, at) | {"initial_state": state}), **options(case), output_final_state=True)
        y.append(out)
    found = torch.cat(y, 1), on_circle(state)
    cotangents = [torch.randn_like(z) for z in flat(whole)]
    pairs = [*zip(flat(found), flat(whole), strict=True)]
    ours, theirs = (gradients(outputs, inputs, cotangents) for outputs in (found, whole))
    pairs += [(ours[key], theirs[key]) for key in theirs]
    assert max(relative_error(a, b) for a, b in pairs) < EXACT


@every_case
@pytest.mark.parametrize("dtype", quick([torch.float64, torch.float32], torch.float64))
def test_steps_of_all_sizes(case: str, dtype: torch.dtype) -> None:
    """Decays of 1 and of 0, weights of 0 and 1, quarter turns, no step at all."""
    inputs = draw(case, 2, 70, states=2)
    sizes = {"A": (0.0, -1e-9, -1e4), "trap": (60.0, -60.0), "angles": (50.0, -50.0), "dt": (0.0, 1e-6)}
    for name, values in sizes.items():
        kinds = (torch.randint(0, 4 * len(values), inputs[name].shape) - 3 * len(values)).clamp(min=-1)
        for at, value in enumerate(values):
            inputs[name][kinds == at] = value
    compare(mamba3, case, inputs, dtype)


def test_long_texts_have_precise_angles() -> None:
    """Sums of angles that go round many thousand times, in float32."""
    T, narrow = 2**17, dict.fromkeys(("B", "C"), torch.zeros(1, 2**17, 1, 2))
    angles, dt = torch.rand(1, T, 1, 1), torch.rand(1, T, 1)
    others = {"x": torch.zeros(1, T, 1, 1), "A": torch.zeros(1, T, 1), "trap": torch.zeros(1, T, 1)}
    _, state = mamba3(dt=dt, angles=angles, **narrow, **others, output_final_state=True)
    want = (torch.pi * angles.double().tanh() * dt.double().unsqueeze(-1)).sum(1)
    assert want.max() > 1e4 and state.angle.abs().max() <= torch.pi * (1 + 1e-6)
    assert (state.angle.double() - want).sin().abs().max() < 1e-4


@pytest.mark.parametrize("case", slow("siso", "mimo"))
def test_one_graph(case: str) -> None:
    """torch.compile breaks the op nowhere."""
    inputs = leaves(draw(case, 2, 9, states=2))
    compiled = torch.compile(mamba3, backend="aot_eager", fullgraph=True)
    want, got = (op(**inputs, **options(case), output_final_state=True) for op in (mamba3, compiled))
    cotangents = [torch.randn_like(z) for z in flat(want)]
    ours, theirs = (gradients(x, inputs, cotangents) for x in (got, want))
    assert max(relative_error(ours[key], theirs[key]) for key in theirs) < EXACT


# Ranks ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cases", "kinds"), [(("siso", "mimo"), ("uneven", "documents")), *slow(((*CASES,), (*SHARDS,)))]
)
def test_ranks_equal_one_rank(cases: tuple[str, ...], kinds: tuple[str, ...]) -> None:
    """Uneven and empty shards, documents across them: outputs, final states, gradients; those of parameters add up."""
    check_ranks([(case, kind, s) for case in cases for kind in kinds for s in (True, False)], torch.float64, EXACT)


def in_graphs(sp: SequenceParallel, seed: int, kind: str) -> float:
    """How far a compiled call over ranks is from a plain one, with a state as output on the last rank alone."""
    inputs, _, cu = whole_case("mimo", kind, seed)
    lengths, start, both = SHARDS[kind][0], sum(SHARDS[kind][0][: sp.rank]), []
    sp.set_lengths(lengths)
    for op in (mamba3, torch.compile(mamba3, backend="aot_eager", fullgraph=True)):
        mine = leaves(part(inputs, slice(start, start + lengths[sp.rank])))
        if not cu and sp.rank:
            del mine["initial_state"]
        outputs = op(**mine, **cu, **options("mimo"), output_final_state=True, sp=sp)
        found = gradients(outputs, mine, [x.detach().cos() for x in flat(outputs)])
        both.append([*flat(outputs), *found.values()])
    return max(relative_error(a, b) for a, b in zip(*both, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["uneven", "documents"])
def test_graphs_over_ranks(kind: str) -> None:
    assert max(run_ranks(in_graphs, 4, random.randrange(2**31), kind)) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("case", ["siso", "mimo"])
def test_kernels_over_ranks(case: str) -> None:
    """The diagonal engine's kernels under Triton's interpreter, in float32."""
    check_ranks([(case, kind, True) for kind in ("uneven", "documents")], torch.float32, 1e-4, env=INTERPRETED)


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["siso", "mimo"])
def test_a_wrong_argument_is_named(case: str) -> None:
    inputs = draw(case, 1, 6, states=1)
    for op in OPS:
        op(**inputs, **options(case))
        for key in inputs:
            if key == "initial_state":
                continue
            sets_sizes = key in ("x", "B", "mimo_x")
            x = inputs[key]
            for bad in (x.to(torch.complex64), x.tolist(), x[None], x.to_sparse()):
                with pytest.raises(ValueError, match=f"^{key}: expected .*, got "):
                    op(**(inputs | {key: bad}))
            if key != "angles":
                with pytest.raises(ValueError, match=r"^[\w.]+: expected " if sets_sizes else f"^{key}: expected "):
                    op(**(inputs | {key: inputs[key][..., :-1]}))
        for at, name in enumerate(Mamba3State._fields):
            state = list(inputs["initial_state"])
            for bad in (state[at][..., :-1], state[at].float(), None):
                with pytest.raises(ValueError, match=rf"^initial_state\.{name}: expected .*, got "):
                    op(**(inputs | {"initial_state": (*state[:at], bad, *state[at + 1 :])}))
        for key, bad, message in (
            ("initial_state", inputs["initial_state"][1], "initial_state: expected a Mamba3State"),
            ("A", -inputs["A"], "A: expected values <= 0, got a largest"),
            ("dt", -inputs["dt"], "dt: expected step sizes >= 0, got a smallest"),
            ("angles", inputs["A"][..., None].expand(-1, -1, -1, 5), r"angles: expected .* with S of 1\.\.4"),
            ("B", inputs["B"].repeat(*[1] * (inputs["B"].dim() - 2), 3, 1), "B: expected a number of groups G"),
            ("rotate_pairwise", 1, "rotate_pairwise: expected True or False"),
            ("output_final_state", 1, "output_final_state: expected True or False"),
        ):
            with pytest.raises(ValueError, match=f"^{message}"):
                op(**(inputs | {key: bad}))
    odd = draw("siso, groups", 1, 3)
    with pytest.raises(ValueError, match=r"^rotate_pairwise: expected True where the last dimension of B is odd"):
        mamba3(**odd, rotate_pairwise=False)


# The layer ------------------------------------------------------------------------------------------------------------

D = 12
LAYERS: dict[str, dict[str, Any]] = {
    "siso": {"state_size": 8, "head_dim": 6},
    "siso, norm": {"state_size": 6, "head_dim": 3, "expand": 1, "n_groups": 2, "rope_fraction": 1.0, "use_bias": True,
                   "is_outproj_norm": True, "norm_eps": 1e-2, "A_floor": 0.3},
    "mimo": {"state_size": 8, "head_dim": 6, "is_mimo": True, "mimo_rank": 3},
    "mimo, norm": {"state_size": 6, "head_dim": 6, "n_groups": 2, "is_mimo": True, "mimo_rank": 2, "norm_eps": 1e-2,
                   "rope_fraction": 1, "is_outproj_norm": True},
}  # fmt: skip
BOUNDS = torch.tensor([0, 1, 1, 9, 12, 31])


def make(name: str) -> Mamba3:
    """With parameters that are no longer the ones that some begin as."""
    torch.manual_seed(len(name))
    layer = Mamba3(D, **LAYERS[name]).double()
    with torch.no_grad():
        for x in layer.parameters():
            x.add_(0.3 * torch.randn_like(x))
    return layer


def formula(layer: Mamba3, x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """The layer's y [T, D] of x [T, D]."""
    state, head, groups = options["state_size"], options["head_dim"], options.get("n_groups", 1)
    width, mimo, eps = round(D * options.get("expand", 2)), options.get("is_mimo", False), options.get("norm_eps", 1e-5)
    heads, R = width // head, options["mimo_rank"] if mimo else 1
    pairs = round(state * options.get("rope_fraction", 0.5)) // 2
    bias = layer.in_proj.bias if options.get("use_bias") else 0
    sizes = [width, width, R * groups * state, R * groups * state, heads, heads, heads, pairs]
    z, v, B, C, dt, A, trap, angle = (x @ layer.in_proj.weight.T + bias).split(sizes, dim=1)
    B, C = (
        norm.weight * t / (t.square().mean(-1, keepdim=True) + eps).sqrt()
        for t, norm in ((B.view(-1, R, groups, state), layer.B_norm), (C.view(-1, R, groups, state), layer.C_norm))
    )
    dt = torch.log(1 + torch.exp(dt + layer.dt_bias))
    A = -torch.log(1 + torch.exp(A)).clamp(min=options.get("A_floor", 1e-4))
    factors = layer.mimo_x if mimo else torch.ones(heads, 1, head, dtype=x.dtype)
    theta, h = torch.zeros(heads, pairs, dtype=x.dtype), torch.zeros(heads, state, head, dtype=x.dtype)
    k_old, v_old, y = torch.zeros(R, heads, state, dtype=x.dtype), torch.zeros(heads, head, dtype=x.dtype), []
    of = torch.arange(heads) // (heads // groups)
    for t in range(len(x)):
        theta = theta + torch.pi * torch.tanh(angle[t]) * dt[t, :, None]
        k, q = (turned((row[t][:, of] + b.transpose(0, 1))[None], theta[None], not mimo)[0]
                for row, b in ((B, layer.B_bias), (C, layer.C_bias)))  # fmt: skip
        share, value = torch.sigmoid(trap[t]), v[t].view(heads, head)
        old = torch.einsum("rhk,hrp,hp->hkp", k_old, factors, v_old) * ((1 - share) * dt[t])[:, None, None]
        new = torch.einsum("rhk,hrp,hp->hkp", k, factors, value) * (share * dt[t])[:, None, None]
        h = torch.exp(dt[t] * A[t])[:, None, None] * (h + old) + new
        y.append(torch.einsum("rhk,hkp->rhp", q, h) + layer.D[:, None] * torch.einsum("hrp,hp->rhp", factors, value))
        k_old, v_old = k, value
    out, z = torch.stack(y), z.view(-1, 1, heads, head)
    z = z * layer.mimo_z.transpose(0, 1) if mimo else z
    if options.get("is_outproj_norm"):
        out = out / (out.square().mean(-1, keepdim=True) + eps).sqrt() * layer.norm.weight.view(heads, head)
    out = out * z * torch.sigmoid(z) * (layer.mimo_o.transpose(0, 1) if mimo else 1)
    return out.sum(1).flatten(1) @ layer.out_proj.weight.T + (layer.out_proj.bias if options.get("use_bias") else 0)


def off(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).detach().norm() / expected.detach().norm().clamp(min=1e-30))


@pytest.mark.parametrize("name", LAYERS)
def test_the_layers_formula(name: str) -> None:
    """Outputs, and the gradients of x and of every parameter."""
    layer, x = make(name), torch.randn(2, 12, D, dtype=torch.float64, requires_grad=True)
    want = torch.stack([formula(layer, row, LAYERS[name]) for row in x])
    y, dy = layer(x), torch.randn_like(want)
    wanted = {"x": x, **dict(layer.named_parameters())}
    expected, actual = (torch.autograd.grad(out, list(wanted.values()), dy) for out in (want, y))
    wrong = {key: off(a, b) for key, a, b in zip(wanted, actual, expected, strict=True) if off(a, b) >= EXACT}
    assert off(y, want) < EXACT and not wrong and all(grad.abs().max() > 0 for grad in expected)


@pytest.mark.parametrize("name", LAYERS)
def test_decoding_and_documents(name: str) -> None:
    layer, x = make(name), torch.randn(3, 19, D, dtype=torch.float64)
    cache, y = layer.init_cache(3), []
    for at in (slice(0, 2), slice(2, 13)):
        out, cache = layer(x[:, at], cache=cache)
        y.append(out)
    for t in range(13, 19):
        out, cache = layer.step(x[:, t] if t % 2 else x[:, t : t + 1], cache)
        y.append(out.view(3, 1, D))
    assert off(torch.cat(y, 1), layer(x)) < EXACT
    packed, bounds = torch.randn(1, 31, D, dtype=torch.float64), BOUNDS.tolist()
    alone = [layer(packed[:, a:b]) for a, b in zip(bounds[:-1], bounds[1:], strict=True) if a < b]
    assert off(layer(packed, cu_seqlens=BOUNDS), torch.cat(alone, 1)) < EXACT


def cut_layer(sp: SequenceParallel, lengths: list[int], x: torch.Tensor, dy: torch.Tensor) -> dict[Any, Any]:
    results = {}
    for name in LAYERS:
        for cu in (None, BOUNDS):
            sp.set_lengths(lengths)
            mine, dy_mine = sp.shard(x).requires_grad_(), sp.shard(dy)
            layer = SequenceParallelLA(make(name), sp)
            y = layer(mine, cu_seqlens=cu)
            wanted = {"x": mine, **dict(layer.named_parameters())}
            grads = torch.autograd.grad(y, list(wanted.values()), dy_mine)
            results[name, cu is None] = {"y": y.detach(), **dict(zip(wanted, grads, strict=True))}
    return results


@pytest.mark.slow
def test_layers_over_ranks() -> None:
    x, dy = torch.randn(2, 1, 31, D, dtype=torch.float64).unbind(0)
    per_rank, wrong = run_ranks(cut_layer, 4, [9, 1, 0, 21], x, dy), {}
    for name in LAYERS:
        for cu in (None, BOUNDS):
            layer, whole = make(name), x.clone().requires_grad_()
            y = layer(whole, cu_seqlens=cu)
            wanted = {"x": whole, **dict(layer.named_parameters())}
            expected = dict(zip(wanted, torch.autograd.grad(y, list(wanted.values()), dy), strict=True))
            for key, value in {"y": y, **expected}.items():
                parts = [results[name, cu is None][key] for results in per_rank]
                error = off(torch.cat(parts, 1) if key in ("x", "y") else sum(parts), value)
                wrong |= {(name, key): error} if error >= EXACT else {}
    assert not wrong
