"""flexsp.verify: names the submodule that is wrong over ranks, not those that suffer from it; accepts what is exact."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flexsp
from flexsp.comm.group import SequenceParallel, current_sp
from flexsp.nn import Mamba2, SequenceParallelLA, ShortConvolution, SimpleGLA
from flexsp.nn.verify import _converted
from flexsp.ops import chunk_simple_gla
from flexsp.testing.ranks import run_ranks

WORLD = 3
LENGTHS = [[5, 14, 2], [9, 0, 12], [1, 1, 19]]
D = 16


class Block(nn.Module):
    """A model in which one part may be exchanged for a wrong one."""

    def __init__(self, inner: nn.Module, embed: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, D) if embed else nn.Identity()
        self.first = SimpleGLA(D, 1)
        self.inner = nn.Sequential(nn.LayerNorm(D), inner)
        self.last = nn.Linear(D, 3)

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(x)
        x = x + self.first(x, cu_seqlens)
        return self.last(x + self.inner(x))


class LocalScan(nn.Module):
    """Its own scan, which starts anew on every rank: what a mixer of another library does."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.project(x).cumsum(1)


class Shift(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * F.pad(x, (0, 0, 1, 0))[:, :-1]


class Positions(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.01 * torch.arange(x.shape[1]).unsqueeze(-1)


class Rotary(nn.Module):
    """Angles that start anew on every rank."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(x.shape[1]).unsqueeze(-1) * 10.0 ** -torch.arange(D // 2)
        first, second = x.chunk(2, -1)
        turned = (first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos())
        return torch.cat(turned, -1).to(x)


class RunningMean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1).unsqueeze(-1)


class CatShift(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)


class ScanOfChunks(nn.Module):
    """Starts anew every 64 tokens of a shard: right where shards end at multiples of 64."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([chunk.cumsum(1) for chunk in x.split(64, 1)], 1)


class Between(nn.Module):
    """Its own code, between two submodules that are right, is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.before(x)
        return self.after(h - h.mean(1, keepdim=True))


class _ForgetsNeighbours(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> torch.Tensor:
        return dx + 0.1 * dx.cumsum(1)


class WrongGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _ForgetsNeighbours.apply(x) * self.weight


class WrongGradientBetween(Between):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(_ForgetsNeighbours.apply(self.before(x)))


class _PerToken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return dy * weight, (dy * x).sum((0, 1)) / max(1, x.shape[1])


class WrongParameterGradient(WrongGradient):
    """Only the gradient of its parameter is wrong: a mean over this rank's tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _PerToken.apply(x, self.weight)


class Flattened(nn.Module):
    """Exact, with tokens on other axes inside."""

    def __init__(self) -> None:
        super().__init__()
        self.flat, self.channels_first = nn.Linear(D, D), nn.Conv1d(D, D, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.flat(x.flatten(0, 1)).view_as(x)
        return self.channels_first(y.transpose(1, 2)).transpose(1, 2)


class UserOp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(chunk_simple_gla(*[x.unsqueeze(2)] * 3, g=-x[..., :1].abs())[0].squeeze(2))


WRONG = {
    "scan": (LocalScan, "inner.1", "output"),
    "shift": (Shift, "inner.1", "output"),
    "positions": (Positions, "inner.1", "output"),
    "rotary": (Rotary, "inner.1", "output"),
    "running mean": (RunningMean, "inner.1", "output"),
    "cat shift": (CatShift, "inner.1", "output"),
    "convolution": (lambda: Padded(), "inner.1.conv", "output"),
    "between": (Between, "inner.1", "output"),
    "gradient": (WrongGradient, "inner.1", "gradient"),
    "gradient between": (WrongGradientBetween, "inner.1", "gradient"),
    "parameter": (WrongParameterGradient, "inner.1", "gradient"),
}


class Padded(nn.Module):
    """A causal convolution as transformers writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(D, D, 4, groups=D, padding=3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)


RIGHT = {
    "flattened": Flattened,
    "op": UserOp,
    "convolution": lambda: ShortConvolution(D),
    "mamba2": lambda: Mamba2(D, 16, 16),
    "mlp": lambda: nn.Sequential(nn.Linear(D, 4), nn.GELU(), nn.Linear(4, D)),
}


def made(seed: int, build: Any, embed: bool = False) -> nn.Module:
    torch.manual_seed(seed)
    return Block(build(), embed)


def verify_all(sp: SequenceParallel, seed: int) -> dict[str, Any]:
    found = {}
    for i, (name, (build, *_)) in enumerate(WRONG.items()):
        model = made(seed, build)
        x = torch.randn(2, 21, D)
        sp.set_lengths(LENGTHS[i % 3])
        found["wrong", name] = flexsp.verify(model, sp, x, raise_on_error=False)
        assert sp.lengths == LENGTHS[i % 3] and current_sp() is None
    for i, (name, build) in enumerate(RIGHT.items()):
        embed = i % 2 == 0
        model = made(seed, build, embed)
        x = torch.randint(7, (1, 21)) if embed else torch.randn(1, 21, D)
        sp.set_lengths(LENGTHS[i % 3])
        found["right", name] = flexsp.verify(model, sp, x, cu_seqlens=torch.tensor([0, 4, 4, 21]))
        sp.set_lengths(None)
        if i % 2:
            found["right", name, "float32"] = flexsp.verify(SequenceParallelLA(model, sp), sp, x, dtype=None)
    return found


def test_names_the_submodule() -> None:
    """Wrong in its output, in its gradients or between its children; uneven and empty shards; nested; packed."""
    seed = int(torch.randint(1 << 30, ()))
    results = run_ranks(verify_all, WORLD, seed)
    for case, report in results[0].items():
        verdict, *name = case
        assert all(other[case] == report for other in results), "the ranks disagree"
        assert report.ok == (verdict == "right"), f"{name}: {report}"
        if not report.ok:
            _, where, what = WRONG[name[0]]
            assert (report.submodule, report.what) == (where, what), f"{name}: {report}"
            assert f"submodule {where!r}" in str(report) and what in str(report)
        else:
            assert report.compared > 20 and str(report).startswith("exact over 3 ranks")


def edges(sp: SequenceParallel, seed: int) -> None:
    model, x = made(seed, LocalScan), torch.randn(1, 9, D)
    twin = copy.deepcopy(model)
    with pytest.raises(flexsp.NotExact, match=r"not exact over 2 ranks with 7, 2 tokens: submodule 'inner\.1' .L"):
        flexsp.verify(model, sp, x)
    assert type(model) is Block and type(model.first) is SimpleGLA, "the module itself is left alone"
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs) and ours.grad is None, name
    with pytest.raises(ValueError, match="module: expected one that draws no random numbers"):
        flexsp.verify(made(seed, lambda: nn.Dropout(0.5)), sp, x)
    flexsp.verify(made(seed, lambda: nn.Dropout(0.5)).eval(), sp, x)
    with pytest.raises(ValueError, match="x: expected the same on all ranks"):
        flexsp.verify(model, sp, x + sp.rank)
    with pytest.raises(ValueError, match="module: parameter .*: expected the same on all ranks"):
        flexsp.verify(made(seed + sp.rank, LocalScan), sp, x)
    with pytest.raises(ValueError, match="dtype: expected one in which the module runs, got torch.float64"):
        flexsp.verify(OnlyFloat32(), sp, x)
    flexsp.verify(OnlyFloat32(), sp, x, dtype=torch.float32)
    torch.manual_seed(seed)
    assert flexsp.verify(TokenMean(sp), sp, x).ok


class OnlyFloat32(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.eye(D, dtype=torch.float32)


class TokenMean(nn.Module):
    """A loss beside the outputs: not cut, its mean over the ranks is that of the whole."""

    def __init__(self, sp: SequenceParallel) -> None:
        super().__init__()
        self.mix, self.sp = SimpleGLA(D, 1), sp

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.mix(x)
        return {"y": y, "loss": self.sp.token_mean(y.square().sum(-1)) if current_sp() else y.square().sum(-1).mean()}


def off_the_edges_of_chunks(sp: SequenceParallel) -> None:
    x = torch.randn(1, 256, D)
    for total in (256, 250, 129):
        report = flexsp.verify(ScanOfChunks(), sp, x[:, :total], raise_on_error=False)
        assert not report.ok and all(sum(report.lengths[:rank]) % 64 for rank in range(1, sp.world_size)), report
    edges = [64] * (sp.world_size - 1)
    sp.set_lengths([*edges, 256 - sum(edges)])
    assert flexsp.verify(ScanOfChunks(), sp, x).ok, "only other cuts show it"


@pytest.mark.parametrize("ranks", [2, 3])
def test_cuts_are_off_the_edges_of_chunks(ranks: int) -> None:
    run_ranks(off_the_edges_of_chunks, ranks)


def test_edges() -> None:
    run_ranks(edges, 2, int(torch.randint(1 << 30, ())))


def test_one_rank_and_bad_arguments() -> None:
    sp = SequenceParallel()
    assert flexsp.verify(made(1, LocalScan), sp, torch.randn(1, 9, D)).ok, "one rank cuts nothing"
    layer, x = nn.Linear(4, 4), torch.randn(1, 3, 4)
    for args, error, message in (
        ((lambda x: x, sp, x), TypeError, "module: expected an nn.Module, got function"),
        ((layer, None, x), TypeError, "sp: expected a SequenceParallel"),
        ((layer, sp, [1.0]), ValueError, r"x: expected a tensor \(the whole batch\), got list"),
        ((layer, sp, torch.randn(3)), ValueError, "dim: expected one of the 1 axes"),
        ((layer, sp, torch.randn(1, 0, 4)), ValueError, "x: expected tokens along dim 1"),
    ):
        with pytest.raises(error, match=message):
            flexsp.verify(*args)


class Then(nn.Module):
    """A projection, then code of its own."""

    def __init__(self, f: Any, first: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.project, self.f = nn.Identity() if first is None else first, nn.Linear(D, D), f

    def forward(self, x: torch.Tensor, scale: Any = 1.0) -> Any:
        return self.f(self.project(self.first(x)))


class OneAxis(nn.Module):
    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.embed, self.mixes = nn.Embedding(7, D), mixes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embed(x).cumsum(0) if self.mixes else self.embed(x)


@dataclasses.dataclass
class Output:
    y: torch.Tensor
    rest: Any = None


class Opaque:
    __slots__ = ("y",)

    def __init__(self, y: torch.Tensor) -> None:
        self.y = y


class Indices(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.arange(x.shape[1]).expand(x.shape[:2])


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.indices, self.embed = Indices(), nn.Embedding(64, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.embed(self.indices(x))


class Codes(nn.Module):
    """Its roll is hidden behind codes that any rounding changes."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.project, self.mixes = nn.Linear(D, D), mixes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes = ((x * 8).round() / 8).detach()
        return self.project(x) + (codes.roll(1, 1) if self.mixes else codes)


class ComplexScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(D, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale).imag


UNSEEN = {
    "dataclass": lambda y: Output(y.cumsum(1)),
    "nested": lambda y: {"a": [Output(y, Output(y.cumsum(1)))]},
    "integers": lambda y: (8 * y.cumsum(1)).long(),
    "bools": lambda y: y.cumsum(1) > 1,
    "complex": lambda y: torch.fft.fft(y, dim=1),
    "number": lambda y: (y, y.mean().item()),
    "mean pool": lambda y: y.mean(1),
    "in place": lambda y: y.add_(y.cumsum(1)),
}
SEEN = {
    "dataclass": lambda y: Output(y, None),
    "integers": lambda y: (y.argmax(-1), y > 0),
    "complex": lambda y: torch.fft.fft(y, dim=2),
    "numbers": lambda y: (y, 3.0, "text", None),
    "in place": lambda y: y.mul_(2).relu_(),
}


def outputs(sp: SequenceParallel, seed: int) -> None:
    torch.manual_seed(seed)
    x, tokens = torch.randn(1, 30, D), torch.randint(7, (31,))
    for name, f in UNSEEN.items():
        report = flexsp.verify(Then(f), sp, x, raise_on_error=False)
        assert (report.ok, report.submodule, report.what) == (False, "", "output"), f"{name}: {report}"
    for name, f in SEEN.items():
        assert flexsp.verify(Then(f, nn.ReLU(inplace=True)), sp, x).ok, name
    assert not flexsp.verify(OneAxis(True), sp, tokens, dim=0, raise_on_error=False).ok
    assert flexsp.verify(OneAxis(False), sp, tokens, dim=0).ok
    assert flexsp.verify(Embedded(), sp, x, raise_on_error=False).submodule == "indices"
    report = flexsp.verify(ComplexScale(), sp, x)
    assert report.ok and flexsp.verify(ComplexScale(), sp, x, dtype=None).ok
    whole = ComplexScale()
    flexsp.verify(whole, sp, x)
    assert whole.scale.dtype == torch.complex64
    beside = (lambda y: (y, Opaque(y)), r"a Opaque at output\[1\]")
    for f, got in ((Opaque, "a Opaque at output"), (lambda y: None, "none"), beside):
        with pytest.raises(ValueError, match="module: cannot be judged: expected an output of tensors.*" + got):
            flexsp.verify(Then(f), sp, x)
    with pytest.raises(ValueError, match=r"expected outputs with the tokens along one axis.*got \[30, 30\] whole"):
        flexsp.verify(Then(lambda y: y[0] @ y[0].mT), sp, x)


def judgements(sp: SequenceParallel, seed: int) -> None:
    torch.manual_seed(0)  # for the codes: whether a rounding moves them past the error depends on the draw
    codes = torch.randn(1, 300, D).bfloat16()
    codes[:, ::3] = (codes[:, ::3] * 8).floor() / 8 + 0.0625  # halves, which any rounding moves
    with pytest.raises(ValueError, match=r"cannot be judged: output of the module itself \(Codes\) is off by"):
        flexsp.verify(Codes(True), sp, codes)
    assert flexsp.verify(Codes(False), sp, codes).ok
    torch.manual_seed(seed)
    x = torch.randn(1, 300, D)
    with pytest.raises(ValueError, match="cannot be judged: .* moves it by inf"):
        flexsp.verify(Then(lambda y: y, nn.Sequential(Pole())), sp, torch.ones(1, 9, D))
    half = sp.partition(300)
    sp.set_lengths(half)
    assert len(set(half)) == 1
    with pytest.raises(ValueError, match=r"cannot be judged: expected uneven lengths, got \[150, 150\]"):
        flexsp.verify(Then(lambda y: y.mean(1)), sp, x)
    assert flexsp.verify(Then(lambda y: y.exp()), sp, x).ok
    sp.set_lengths(None)
    for total in (1, 2, 3):
        assert flexsp.verify(Then(lambda y: y.exp()), sp, x[:, :total]).ok, total
    for dtype in (torch.bfloat16, torch.float32):
        assert flexsp.verify(made(seed, lambda: Mamba2(D, 16, 16)), sp, x[:, :50], dtype=dtype).ok


class Pole(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.acos(x) + x.cumsum(1)


class FailsOnEmpty(nn.Module):
    def __init__(self, before: nn.Module, backward: bool = False) -> None:
        super().__init__()
        self.before, self.project, self.backward = before, nn.Linear(D, D), backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.project(self.before(x))
        if self.backward:
            y.register_hook(lambda dy: dy + 0 * dy.amax(1, keepdim=True))
            return y
        return y - y.detach().abs().amax(1, keepdim=True)


def failures(sp: SequenceParallel, seed: int) -> None:
    """An error on one rank is one on all, and the next call starts afresh."""
    torch.manual_seed(seed)
    for before, backward in ((nn.Identity(), False), (nn.Identity(), True), (SimpleGLA(D, 1), False)):
        with pytest.raises(ValueError, match="0 of 1 tokens, got IndexError: amax.* on rank 1"):
            flexsp.verify(FailsOnEmpty(before, backward), sp, torch.randn(1, 1, D))
        assert flexsp.verify(nn.Linear(D, D), sp, torch.randn(1, 9, D)).ok and sp.lengths is None
    x = torch.randn(1, 9, D)
    same = {"a": [1.0, "text", None], "b": (True, torch.arange(3))}
    assert flexsp.verify(Then(lambda y: y), sp, x, scale=same).ok
    for scale in (1.0 + sp.rank, [1, sp.rank], {"a": (sp.rank == 0,)}, {f"{sp.rank}": 1}, [torch.ones(2) * sp.rank]):
        with pytest.raises(ValueError, match="scale: expected the same on all ranks, got another on rank"):
            flexsp.verify(Then(lambda y: y), sp, x, scale=scale)
    with pytest.raises(ValueError, match="dtype: expected one in which the module runs.*only here"):
        flexsp.verify(Then(_raise if sp.rank == 1 else lambda y: y), sp, x)


def _raise(y: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("only here")


@pytest.mark.parametrize("given", [torch.complex64, torch.complex128])
def test_complex_numbers_are_converted_to_the_precision_that_is_asked_for(given: torch.dtype) -> None:
    x, pairs = torch.ones(3, dtype=given), {torch.float64: torch.complex128, torch.float32: torch.complex64}
    assert {dtype: _converted(x, dtype).dtype for dtype in pairs} == pairs
    assert {_converted(x, dtype).dtype for dtype in (None, torch.bfloat16)} == {given}


@pytest.mark.parametrize("what", [outputs, judgements, failures])
def test_what_is_seen_and_judged(what: Any) -> None:
    run_ranks(what, 2, int(torch.randint(1 << 30, ())))


def fails_amid_an_exchange(sp: SequenceParallel) -> None:
    """Rank 1 raises while rank 0 waits for its gradient."""
    got = "an error on another rank meanwhile" if sp.rank == 0 else "IndexError: amax"
    with pytest.raises(ValueError, match=f"expected one that runs on the gradient of .* rank {sp.rank}, got {got}"):
        flexsp.verify(FailsOnEmpty(SimpleGLA(D, 1), True), sp, torch.randn(1, 1, D))


def test_fails_amid_an_exchange() -> None:
    run_ranks(fails_amid_an_exchange, 2, fresh_sp=True)
