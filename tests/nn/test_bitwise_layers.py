"""Layers, models and FlexLinearAttention over a group made with bitwise: the same bits for any number of ranks, in
outputs and in the gradients of inputs and of parameters."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import flexsp
from flexsp import SequenceParallel, SequenceParallelLA, ops
from flexsp.exceptions import NotAvailable
from flexsp.grammar import FlexLinearAttention, decay, transition
from flexsp.nn import unwrap
from flexsp.testing.compare import relative_error
from flexsp.testing.ranks import run_ranks
from tests.harness import grammar, objectives
from tests.harness.bitwise import (
    BOUNDS,
    SEGMENT,
    TOTAL,
    differing,
    joined_rows,
    leaf,
    lengths_of,
    of_a_layer,
    with_gradients,
)
from tests.harness.compiled import SIZES, saturating
from tests.harness.interpreted import INTERPRETED
from tests.harness.layers import LAYERS, make
from tests.marks import quick, slow

CUTS = ((2, (1, 3)), (4, (2, 0, 2, 0)))  # ranks, and the segments of each
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
EXACT = 1e-10
Tensors = dict[str, Tensor]
Run = Callable[..., Tensors]
NAMES = [name for name in LAYERS if not name.startswith("attention")]
WAYS = [*itertools.product(DTYPES, (False, True), (CUTS,))]
LINEAR = grammar.MODELS | {n: made for n, made in objectives.MODELS.items() if not n.startswith("contrastive")}
LINEAR["contrastive"] = lambda: objectives.model(decay.gated(), transition.contrastive(block=16))
LINEAR["custom"] = lambda: FlexLinearAttention(decay.gated(), custom_transition=Gated)
OVER_TOKENS = ("A", "mimo_x")  # inputs of these that have no rows of tokens


class Gated:
    """A custom transition: linear attention with values that are weighed by eta, and a decay."""

    inputs = {"eta": ()}  # noqa: RUF012

    def chunk(self, k: Tensor, v: Tensor, g: Tensor, eta: Tensor) -> Tensor:
        return (k * (g.sum(0) - g.cumsum(0)).exp().unsqueeze(-1)).T @ (v * eta.unsqueeze(-1))

    def propagate(self, state: Tensor, chunk_state: Tensor, g: Tensor) -> Tensor:
        return g.sum(0).exp() * state + chunk_state

    def output(self, q: Tensor, state: Tensor, k: Tensor, v: Tensor, g: Tensor, eta: Tensor) -> Tensor:
        sums = g.cumsum(0)
        weights = (sums.unsqueeze(1) - sums.unsqueeze(0)).tril().exp().tril()
        return (q * sums.exp().unsqueeze(-1)) @ state + ((q @ k.T) * weights) @ (v * eta.unsqueeze(-1))


def seeded() -> int:
    return int(torch.randint(2**31, ()))


def here(sp: SequenceParallel | None, segments: tuple[int, ...]) -> slice:
    """This rank's tokens."""
    lengths = lengths_of(segments)
    if sp is None:
        return slice(None)
    sp.set_lengths(lengths)
    begin = sum(lengths[: sp.rank])
    return slice(begin, begin + lengths[sp.rank])


def of_layers(
    sp: SequenceParallel | None, segments: tuple[int, ...], name: str, dtype: torch.dtype, packed: bool, seed: int
) -> Tensors:  # fmt: skip
    layer, width = make(name, seed).to(dtype), LAYERS[name][2]
    x, w = torch.randn(2, 1 if packed else 2, TOTAL, width)[:, :, here(sp, segments)].to(dtype)
    return of_a_layer(sp, layer, x, w, torch.tensor(BOUNDS) if packed else None)


class Mixer(nn.Module):
    """A user's own, around an op."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(width, 3 * width + 2), nn.Linear(width, width)

    def forward(self, x: Tensor, bounds: Tensor | None) -> Tensor:
        q, k, v, g = self.project(x).split([x.shape[-1]] * 3 + [2], -1)
        q, k, v = (y.unflatten(-1, (2, -1)) for y in (q, k, v))
        return self.out(ops.chunk_simple_gla(q, k, v, -g.abs(), cu_seqlens=bounds)[0].flatten(-2))


class Block(nn.Module):
    def __init__(self, width: int, mixer: nn.Module) -> None:
        super().__init__()
        self.before, self.between, self.mixer = nn.LayerNorm(width), flexsp.nn.RMSNorm(width), mixer
        self.mlp = nn.Sequential(nn.Linear(width, 3 * width), nn.SiLU(), nn.Linear(3 * width, width))

    def forward(self, x: Tensor, bounds: Tensor | None) -> Tensor:
        x = x + self.mixer(self.before(x), bounds)
        return x + self.mlp(self.between(x))


class Model(nn.Module):
    """Two blocks between an embedding and a head that share their weight."""

    def __init__(self, width: int = 11) -> None:
        super().__init__()
        self.checkpointed = False
        self.embed, self.head = nn.Embedding(30, 2 * width), nn.Linear(2 * width, 30)
        self.head.weight = self.embed.weight
        mixers = Mixer(2 * width), flexsp.nn.SimpleGLA(2 * width, num_heads=2)
        self.blocks, self.norm = nn.ModuleList([Block(2 * width, mixer) for mixer in mixers]), nn.RMSNorm(2 * width)

    def forward(self, ids: Tensor, bounds: Tensor | None) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, bounds, use_reentrant=False) if self.checkpointed else block(x, bounds)
        return self.head(self.norm(x))


def of_a_model(
    sp: SequenceParallel | None, segments: tuple[int, ...], dtype: torch.dtype, packed: bool, seed: int
) -> Tensors:  # fmt: skip
    torch.manual_seed(seed)
    model, ids, mine = Model().to(dtype), torch.randint(30, (1 if packed else 2, TOTAL)), here(sp, segments)
    w = torch.randn(*ids.shape, 30)[:, mine]
    if sp is not None:
        model = flexsp.SequenceParallelLA(model, sp)
    y = model(ids[:, mine], torch.tensor(BOUNDS) if packed else None)
    return with_gradients(y, w, dict(model.named_parameters()))


def of_a_variant(
    sp: SequenceParallel | None, segments: tuple[int, ...], name: str, dtype: torch.dtype, packed: bool, seed: int
) -> Tensors:  # fmt: skip
    torch.manual_seed(seed)
    made, mine = LINEAR[name](), here(sp, segments)
    B = 1 if packed else 2
    drawn = grammar.draw(name, B, TOTAL, seed) if name in grammar.MODELS else objectives.draw_for(made, B, TOTAL, seed)
    x = {n: leaf((y if n in OVER_TOKENS else y[:, mine]).to(dtype)) for n, y in drawn.items()}
    state, n = made.rows_and_columns(x["q"].shape[-1], x["v"].shape[-1]), len(BOUNDS) - 1 if packed else 2
    initial = torch.randn(n, x["q"].shape[-2], *state).to(torch.promote_types(dtype, torch.float32))
    if packed or sp is None or sp.is_first:
        x["initial_state"] = leaf(initial)
    bounds = torch.tensor(BOUNDS) if packed else None
    o, final = made(**x, cu_seqlens=bounds, output_final_state=True, sp=False if sp is None else sp)
    w = torch.randn(o.shape[0], TOTAL, *o.shape[2:])[:, mine]
    return with_gradients(o, w, x) | ({} if final is None else {"final": final.detach()})


def assert_same_bits(run: Run, *given: Any, of_tokens: tuple[str, ...], dtype: torch.dtype, cuts: Any = CUTS) -> None:
    """And in float64 they are right."""
    one = run(SequenceParallel(segment=SEGMENT), (4,), *given)
    for world, segments in cuts:
        parts = run_ranks(run, world, segments, *given, bitwise=SEGMENT)
        assert differing(one, joined_rows(parts, of_tokens)) == []
    if dtype == torch.float64:
        want = run(None, (4,), *given)
        assert {n: e for n, x in one.items() if not (e := relative_error(x, want[n])) < EXACT} == {}


@pytest.mark.parametrize(
    ("name", "dtype", "packed"),
    quick(list(itertools.product(NAMES, DTYPES, (False, True))), ("mamba2", torch.bfloat16, True)), ids=str,
)  # fmt: skip
def test_bits_of_layers(name: str, dtype: torch.dtype, packed: bool) -> None:
    assert_same_bits(of_layers, name, dtype, packed, seeded(), of_tokens=("y", "dx"), dtype=dtype)


def trained(sp: SequenceParallel, segments: tuple[int, ...], seed: int) -> Tensors:
    """The parameters after two steps, the second one with checkpointed blocks."""
    torch.manual_seed(seed)
    model, ids, mine = Model(), torch.randint(30, (2, TOTAL + 1)), here(sp, segments)
    model = flexsp.SequenceParallelLA(model, sp)
    replicated = DistributedDataParallel(model) if sp.world_size > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for checkpointed in (False, True):
        model.checkpointed = checkpointed
        logits, targets = replicated(ids[:, :-1][:, mine], None), ids[:, 1:][:, mine]
        sp.token_mean(F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {n: x.detach() for n, x in model.named_parameters()}


@pytest.mark.parametrize("cuts", [((2, (1, 3)), (2, (4, 0))), *slow((CUTS[1:],))])
def test_bits_of_training(cuts: Any) -> None:
    """By DDP, whose mean of gradients over 2 or 4 ranks is a sum of one with zeros; what is computed again for the
    backward pass sends the same messages on ranks without tokens."""
    seed = seeded()
    one = trained(SequenceParallel(segment=SEGMENT), (4,), seed)
    for world, segments in cuts:
        for mine in run_ranks(trained, world, segments, seed, bitwise=SEGMENT, whole_world=True):
            assert differing(one, mine) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gla", "delta", "mamba2"])
def test_bits_of_layers_in_kernels(name: str) -> None:
    """Whose ops kernels run for all segments at once."""
    seed, how = seeded(), {"bitwise": SEGMENT, "env": INTERPRETED, "timeout": 400.0}
    (one,) = run_ranks(of_layers, 1, (4,), name, torch.bfloat16, False, seed, **how)
    two = run_ranks(of_layers, 2, (1, 3), name, torch.bfloat16, False, seed, **how)
    assert differing(one, joined_rows(two, ("y", "dx"))) == []


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "packed", "cuts"), WAYS)
def test_bits_of_models(dtype: torch.dtype, packed: bool, cuts: Any) -> None:
    assert_same_bits(of_a_model, dtype, packed, seeded(), of_tokens=("y",), dtype=dtype, cuts=cuts)


@pytest.mark.parametrize(
    ("name", "dtype", "packed", "cuts"),
    quick(
        [(name, *way) for name in LINEAR for way in WAYS if not (way[1] and name == "contrastive")],
        ("mamba3, read", torch.float64, True, CUTS[:1]),
    ),
)
def test_bits_of_flex_linear_attention(name: str, dtype: torch.dtype, packed: bool, cuts: Any) -> None:
    of_tokens = ("y", *(f"d{n}" for n in ("q", "k", "v", *LINEAR[name]().inputs) if n not in OVER_TOKENS))
    assert_same_bits(of_a_variant, name, dtype, packed, seeded(), of_tokens=of_tokens, dtype=dtype, cuts=cuts)


def of_a_projection(sp: SequenceParallel, segments: tuple[int, ...], seed: int) -> Tensors:
    torch.manual_seed(seed)
    linear, mine = nn.Linear(33, 17), here(sp, segments)
    x, w = torch.randn(1, TOTAL, 33)[:, mine], torch.randn(1, TOTAL, 17)[:, mine]
    return with_gradients(F.softplus(linear(leaf(x))), w, dict(linear.named_parameters()))


def test_bits_of_projections_depend_on_their_rows() -> None:
    """So the tests above see a difference where there is one: PyTorch's own code on whole shards."""
    seed = seeded()
    one = of_a_projection(SequenceParallel(), (4,), seed)
    two = run_ranks(of_a_projection, 2, (1, 3), seed)
    assert {"dweight", "dbias"} <= {*differing(one, joined_rows(two, ("y",)))}


def test_what_cannot_keep_its_bits_says_so() -> None:
    sp, x = SequenceParallel(segment=SEGMENT), torch.randn(1, SEGMENT, 8)
    with flexsp.sequence_parallel(sp), pytest.raises(NotAvailable, match="Attention: its bits depend"):
        flexsp.nn.Attention(8, num_heads=2)(x)
    with flexsp.sequence_parallel(sp), pytest.raises(ValueError, match="segments of at least the 49 tokens before"):
        flexsp.nn.ShortConvolution(8, SEGMENT + 2)(x)
    with pytest.raises(NotAvailable, match="verify: its bits depend"):
        flexsp.verify(nn.Linear(8, 8), sp, x)
    with pytest.raises(NotAvailable, match=r"SequenceParallelLinear: with bitwise expected tokens \[B, T, ...\]"):
        flexsp.SequenceParallelLA(nn.Linear(8, 8), sp)(x[0])
    q = x.unflatten(-1, (2, 4))
    for linear, bounds, error, message in (
        (FlexLinearAttention(custom_mask=lambda i, j: (i + 1) * (j + 1)), None, NotAvailable, "for custom_mask"),
        (LINEAR["contrastive"](), torch.tensor([0, SEGMENT]), NotAvailable, "for documents whose chunks are part"),
        (objectives.MODELS["contrastive"](), None, ValueError, r"segments \(bitwise\) of whole chunks of 5 tokens"),
    ):
        given = {n: q[..., 0].sigmoid().log() if n == "decay" else q[..., 0] for n in linear.inputs}
        with pytest.raises(error, match=message):
            linear(q, q, q, cu_seqlens=bounds, sp=sp, **given)
    widths = {"q": SIZES[1], "k": SIZES[1], "v": SIZES[2]}
    rows = {n: torch.randn(1, SEGMENT, SIZES[0], width) for n, width in widths.items()}
    with pytest.raises(NotAvailable, match="for documents whose chunks are part"):
        saturating()(**rows, cu_seqlens=torch.tensor([0, SEGMENT]), sp=sp)


class Nested(nn.Linear):
    """A module that PyTorch's says is a projection, and that is not."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.chunk_retention(*3 * (super().forward(x).unflatten(-1, (2, -1)),))[0].flatten(-2)


@pytest.mark.parametrize("made", [
    lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)), lambda: nn.LayerNorm(8),
    lambda: flexsp.nn.SimpleGLA(8, num_heads=2),
], ids=["ReLU", "LayerNorm", "SimpleGLA"])  # fmt: skip
def test_outputs_can_be_changed_in_place(made: Any) -> None:
    torch.manual_seed(1)
    layer, x, found = made().double(), torch.randn(1, 20, 8, dtype=torch.float64), []
    for sp in (SequenceParallel(), SequenceParallel(segment=8)):
        layer.zero_grad()
        y = SequenceParallelLA(layer, sp)(x)
        y = y[0] if isinstance(y, tuple) else y
        y.mul_(2.0)
        y.square().sum().backward()
        found.append([y.detach(), *[p.grad for p in layer.parameters()]])
        unwrap(layer)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("module", "expected"), [
    (nn.Embedding(5, 8, max_norm=1.0), "an embedding without max_norm"),
    (nn.Embedding(5, 8, scale_grad_by_freq=True), "an embedding without max_norm and scale_grad_by_freq"),
    (nn.RReLU(), "evaluation mode"),
], ids=["max_norm", "scale_grad_by_freq", "RReLU"])  # fmt: skip
def test_modules_that_look_at_other_tokens_are_refused(module: nn.Module, expected: str) -> None:
    x = torch.zeros(1, 9, dtype=torch.int64) if isinstance(module, nn.Embedding) else torch.randn(1, 9, 8)
    with pytest.raises(NotAvailable, match=f"with bitwise expected {expected}"):
        SequenceParallelLA(module, SequenceParallel(segment=8))(x)


def test_ops_are_not_run_on_one_segment() -> None:
    with pytest.raises(NotAvailable, match="it is called in a module that treats tokens one by one"):
        flexsp.SequenceParallelLA(Nested(8, 8), SequenceParallel(segment=SEGMENT))(torch.randn(1, SEGMENT, 8))


def test_wrapped_modules_change_their_group() -> None:
    model, sp, usual = Model(), SequenceParallel(segment=SEGMENT), SequenceParallel()
    kinds = [type(x) for x in model.modules()]
    flexsp.SequenceParallelLA(model, sp)
    assert isinstance(model.head, flexsp.SequenceParallelLA)
    flexsp.SequenceParallelLA(model, usual)
    assert {x._flexsp_sp for x in model.modules() if isinstance(x, flexsp.SequenceParallelLA)} == {usual}
    flexsp.nn.unwrap(model)
    assert [type(x) for x in model.modules()] == kinds


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Any) -> None:
    layer, sp = make("mamba2", seeded()).float(), SequenceParallel(segment=SEGMENT)
    x = torch.randn(1, TOTAL, LAYERS["mamba2"][2])
    with flexsp.sequence_parallel(sp):
        want = layer(x)
        with mode():
            assert torch.equal(layer(x), want)


def test_a_step_is_one_token_of_this_rank() -> None:
    layer = make("mamba2", seeded()).float()
    x, cache = torch.randn(1, LAYERS["mamba2"][2]), layer.init_cache(1)
    sp = SequenceParallel(segment=SEGMENT)
    sp.set_lengths([3 * SEGMENT])  # which are not those of a step
    with flexsp.sequence_parallel(sp):
        y, _ = layer.step(x, cache)
    assert torch.equal(y, layer.step(x, cache)[0])
