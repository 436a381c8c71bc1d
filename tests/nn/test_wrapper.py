"""SequenceParallelLA: what it refuses, what it leaves alone, and user modules under checkpointing and torch.compile."""

from __future__ import annotations

import contextlib
import copy
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from flexsp.comm.group import SequenceParallel, current_sp, sequence_parallel
from flexsp.exceptions import FlexspError
from flexsp.nn import Mamba2, SequenceParallelLA, ShortConvolution, SimpleGLA, unwrap, verify, wrapper
from flexsp.ops import chunk_simple_gla
from flexsp.testing.ranks import run_ranks
from tests.guides import save_scripts

WORLD = 4
LENGTHS = [7, 0, 21, 2]
MODES = ("plain", "reentrant", "non-reentrant")


class UserAttention(nn.Module):
    """A mixer as a user would write it: the op is called without sp."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkvg = nn.Linear(dim, 3 * dim + 1)

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v, g = self.qkvg(x).split([x.shape[-1]] * 3 + [1], dim=-1)
        heads = (t.unsqueeze(2) for t in (q, k, v))
        return chunk_simple_gla(*heads, g=F.logsigmoid(g), cu_seqlens=cu_seqlens)[0].squeeze(2)


class UserModel(nn.Module):
    """Two kinds of mixers, each checkpointed inside the wrapped module: recomputed outside its context."""

    def __init__(self, mode: str = "plain", dim: int = 16) -> None:
        super().__init__()
        self.mode = mode
        self.mixers = nn.ModuleList([UserAttention(dim), SimpleGLA(dim, 1), UserAttention(dim)])
        self.head = nn.Linear(dim, 3)

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
        for mixer in self.mixers:
            if self.mode == "plain":
                x = x + mixer(x, cu_seqlens)
            else:
                x = x + checkpoint(mixer, x, cu_seqlens, use_reentrant=self.mode == "reentrant")
        return self.head(x)


class Closure(nn.Module):
    """Checkpoints a function, which the wrapper cannot bind; the op knows its group only if `sp` is given."""

    def __init__(self, use_reentrant: bool, sp: SequenceParallel | None = None) -> None:
        super().__init__()
        self.use_reentrant, self.sp = use_reentrant, sp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.unsqueeze(2)
        return checkpoint(lambda t: chunk_simple_gla(t, t, t, sp=self.sp)[0], heads, use_reentrant=self.use_reentrant)


def make(mode: str, seed: int) -> UserModel:
    torch.manual_seed(seed)
    return UserModel(mode).double()


def gradients(model: nn.Module, x: torch.Tensor, dy: torch.Tensor, cu: torch.Tensor | None) -> tuple[Any, ...]:
    x = x.clone().requires_grad_()
    y = model(x, cu)
    # As on CUDA, backward runs on a thread of its own, with no ambient group.
    failure: list[BaseException] = []

    def backward() -> None:
        try:
            y.backward(dy)
        except BaseException as error:  # noqa: BLE001
            failure.append(error)

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return y.detach(), x.grad, {name: p.grad for name, p in model.named_parameters()}


def cut_model(
    sp: SequenceParallel, mode: str, seed: int, x: torch.Tensor, dy: torch.Tensor, cu: torch.Tensor | None, known: bool
) -> tuple[Any, ...]:
    sp.set_lengths(LENGTHS)
    x, dy = sp.shard(x), sp.shard(dy)
    sp.set_lengths(LENGTHS if known else None)
    model = make(mode, seed)
    wrapped = SequenceParallelLA(model, sp)
    assert wrapped is model
    results = gradients(wrapped, x, dy, cu)
    assert current_sp() is None
    return results


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_user_module(mode: str, packed: bool) -> None:
    """Uneven and empty shards; forward, input and parameter gradients equal one rank's."""
    seed, total = int(torch.randint(1 << 30, ())), sum(LENGTHS)
    x = torch.randn(1, total, 16, dtype=torch.float64)
    dy = torch.randn(1, total, 3, dtype=torch.float64)
    cu = torch.tensor([0, 3, 3, 20, total]) if packed else None
    y, dx, grads = gradients(make("plain", seed), x, dy, cu)
    cut = run_ranks(cut_model, WORLD, mode, seed, x, dy, cu, packed)
    torch.testing.assert_close(torch.cat([r[0] for r in cut], 1), y, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(torch.cat([r[1] for r in cut], 1), dx, rtol=1e-10, atol=1e-11)
    for name, grad in grads.items():
        torch.testing.assert_close(sum(r[2][name] for r in cut), grad, rtol=1e-10, atol=1e-11)


def compiled_layer(
    sp: SequenceParallel, layer: nn.Module, lengths: list[int], x: torch.Tensor, dy: torch.Tensor, cu: torch.Tensor
) -> tuple[Any, ...]:
    sp.set_lengths(lengths)
    wrapped = SequenceParallelLA(layer, sp)
    torch._dynamo.reset()
    compiled = torch.compile(wrapped, fullgraph=True, backend="aot_eager")
    y, dx, _ = gradients(compiled, sp.shard(x), sp.shard(dy), cu)
    return y, dx, {name: p.grad for name, p in wrapped.named_parameters()}


def test_compiled_layer() -> None:
    """One graph, forward and backward, also on a rank without tokens, which must pass on what its neighbours send."""
    lengths = [9, 0, 14]
    layer = SimpleGLA(16, 1, conv_bias=True).double()
    x, dy = torch.randn(2, 1, 23, 16, dtype=torch.float64).unbind(0)
    cu = torch.tensor([0, 3, 3, 20, 23])
    y, dx, grads = gradients(copy.deepcopy(layer), x, dy, cu)
    cut = run_ranks(compiled_layer, 3, layer, lengths, x, dy, cu)
    torch.testing.assert_close(torch.cat([r[0] for r in cut], 1), y, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(torch.cat([r[1] for r in cut], 1), dx, rtol=1e-10, atol=1e-11)
    for name, grad in grads.items():
        torch.testing.assert_close(sum(r[2][name] for r in cut), grad, rtol=1e-10, atol=1e-11)


def checkpointed_closure(sp: SequenceParallel, use_reentrant: bool) -> None:
    x = torch.randn(1, 5, 16, requires_grad=True)
    with pytest.raises(FlexspError, match="runs inside a checkpointed function"):
        SequenceParallelLA(Closure(use_reentrant), sp)(x)
    SequenceParallelLA(Closure(use_reentrant, sp), sp)(x).sum().backward()
    checkpoint(SequenceParallelLA(UserAttention(16), sp), x, use_reentrant=use_reentrant).sum().backward()

    def enters(x: torch.Tensor) -> torch.Tensor:
        with contextlib.ExitStack() as stack:
            stack.enter_context(sequence_parallel(sp))
            return plain(x)

    plain = UserAttention(16)
    checkpoint(enters, x, use_reentrant=use_reentrant).sum().backward()
    checkpoint(plain, x, use_reentrant=use_reentrant).sum().backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_function(use_reentrant: bool) -> None:
    """An error in forward, not a silently local recomputation; fine where the function knows its group."""
    run_ranks(checkpointed_closure, WORLD, use_reentrant)


class Functional(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def helper(x: torch.Tensor) -> torch.Tensor:
    return F.conv1d(x, x)


class HiddenConvolution(nn.Module):
    def mix(self, x: torch.Tensor) -> torch.Tensor:
        return [helper(part) for part in (x,)][0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x)


@pytest.mark.parametrize(
    ("build", "remedy"),
    [
        (lambda: nn.Conv1d(8, 8, 4, groups=8), "use flexsp.nn.ShortConvolution"),
        (lambda: nn.ConvTranspose1d(8, 8, 2), "use flexsp.nn.ShortConvolution"),
        (lambda: nn.LSTM(8, 8), "use a layer built on flexsp.ops"),
        (lambda: nn.GRUCell(8, 8), "use a layer built on flexsp.ops"),
        (lambda: nn.MultiheadAttention(8, 2), "sp.gather"),
        (lambda: nn.TransformerEncoderLayer(8, 2), "sp.gather"),
        (lambda: nn.BatchNorm1d(8), "use nn.LayerNorm"),
        (lambda: nn.SyncBatchNorm(8), "use nn.LayerNorm"),
        (lambda: nn.InstanceNorm1d(8), "use nn.LayerNorm"),
        (lambda: nn.AvgPool1d(2), "reads tokens of other ranks"),
        (lambda: nn.ConstantPad1d(2, 0.0), "reads tokens of other ranks"),
        (Functional, "its code calls scaled_dot_product_attention"),
        (HiddenConvolution, "its code calls conv1d"),
        (lambda: torch.jit.script(nn.Linear(8, 8)), "wrap the original module"),
    ],
)
def test_refuses(build: Callable[[], nn.Module], remedy: str) -> None:
    sp = SequenceParallel()
    model = nn.Sequential(nn.Linear(8, 8), nn.ModuleDict({"inner": nn.Sequential(build())}))
    with pytest.raises(ValueError, match=r"(?s)^layer: expected .* at '1\.inner\.0': .*" + remedy):
        SequenceParallelLA(model, sp)
    assert type(model) is nn.Sequential
    with pytest.raises(ValueError, match=r"at '\(the layer itself\)'"):
        SequenceParallelLA(build(), sp)
    with pytest.raises(ValueError, match=r"allow: expected paths of submodules, got \['1.inner.1'\]"):
        SequenceParallelLA(model, sp, allow=["1.inner.0", "1.inner.1"])
    SequenceParallelLA(model, sp, allow=["1.inner.0"])


def test_accepts_tokenwise_modules() -> None:
    sp = SequenceParallel()
    SequenceParallelLA(nn.Sequential(nn.Conv1d(8, 8, 1), nn.LayerNorm(8), nn.GELU(), nn.Embedding(3, 8)), sp)
    SequenceParallelLA(nn.Sequential(ShortConvolution(8), Mamba2(32, 16, 16), SimpleGLA(32, 2)), sp)


@pytest.mark.parametrize(
    ("layer", "sp", "message"),
    [
        (lambda x: x, SequenceParallel(), "layer: expected an nn.Module"),
        (nn.Linear(2, 2), None, "sp: expected a SequenceParallel"),
        (nn.Linear(2, 2), True, "sp: expected a SequenceParallel .*, got bool"),
    ],
)
def test_bad_arguments(layer: Any, sp: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SequenceParallelLA(layer, sp)


def test_what_cannot_be_seen_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrapper, "_said", [])
    sp, second = SequenceParallel(world_size=2), SequenceParallel(rank=1, world_size=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SequenceParallelLA(nn.Sequential(nn.Linear(4, 4), SimpleGLA(4, 1)), sp)  # nobody's own code
        SequenceParallelLA(UserModel(), second)
        SequenceParallelLA(UserModel(), SequenceParallel())
        SequenceParallelLA(UserModel(), sp, allow=[""])
        SequenceParallelLA(nn.Sequential(nn.Sequential(UserModel())), sp, allow=["0.0"])
    with pytest.warns(UserWarning, match=r"of UserModel, UserAttention calls.*flexsp\.verify.*shard_range") as told:
        for _ in range(2):
            SequenceParallelLA(UserModel(), sp)
    assert len(told) == 1 and told[0].filename == __file__


def verified(sp: SequenceParallel, block: str) -> list[bool]:
    """Of the positions of the tutorial, and of those that know nothing of ranks."""
    torch.manual_seed(0)  # all ranks draw the same
    names: dict[str, Any] = {}
    exec(block, names)  # noqa: S102
    alone = block.replace("if sp is not None", "if False")
    others: dict[str, Any] = {}
    exec(alone, others)  # noqa: S102
    x = torch.randn(1, 31, 8)
    models = [made["Positions"](8, 40) for made in (names, others)]
    return [verify(model, sp, x, raise_on_error=False).ok for model in models]


def test_positions_of_the_tutorial_go_on_over_ranks(tmp_path: Path) -> None:
    _, blocks = save_scripts("tutorial.md", tmp_path)
    (block,) = (block for block in blocks if "class Positions" in block)
    assert run_ranks(verified, 2, block) == [[True, False]] * 2


def test_names_attributes_copies_and_unwrap() -> None:
    plain = UserModel()
    keys, names = list(plain.state_dict()), [name for name, _ in plain.named_parameters()]
    sp = SequenceParallel()
    model = SequenceParallelLA(copy.deepcopy(plain), sp)
    assert isinstance(model, UserModel) and isinstance(model, SequenceParallelLA)
    assert list(model.state_dict()) == keys and [name for name, _ in model.named_parameters()] == names
    assert model.mode == "plain" and model.head.out_features == 3
    assert "UserModel(" in repr(model) and "SequenceParallel" not in repr(model)
    assert "SimpleGLA(\n" in repr(model) and "16, num_heads=1, head_k_dim=16, head_v_dim=16, rank 0 of 1" in repr(model)
    assert type(model.head) is nn.Linear and type(model.mixers) is nn.ModuleList
    model.load_state_dict(plain.state_dict())

    twin = copy.deepcopy(model)
    assert twin.mixers[0]._flexsp_sp is sp and twin.head.weight is not model.head.weight
    assert type(type(model)("reentrant")) is UserModel

    other = SequenceParallel()
    assert SequenceParallelLA(model, other) is model
    assert model.mixers[1]._flexsp_sp is other and twin.mixers[1]._flexsp_sp is sp

    unwrap(model)
    assert type(model) is UserModel and type(model.mixers[1]) is SimpleGLA and repr(model) == repr(plain)
    x = torch.randn(1, 9, 16)
    assert torch.equal(model(x), plain(x)) and torch.equal(twin(x), plain(x))


def test_replaced_forward() -> None:
    model = nn.Sequential(UserAttention(16))
    model[0].forward = model[0].forward
    with pytest.raises(ValueError, match="forward was replaced on the instance"):
        SequenceParallelLA(model, SequenceParallel())
    assert type(model) is nn.Sequential


class Registered(nn.Module):
    names: list[str] = []

    def __init_subclass__(cls, *, tag: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.names.append(tag)


class Tagged(Registered, tag="one"):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def test_a_class_that_wants_to_hear_of_its_subclasses() -> None:
    """Only of those that its user writes."""
    model = nn.Sequential(Tagged())
    SequenceParallelLA(model, SequenceParallel())
    assert isinstance(model[0], Tagged) and isinstance(model[0], SequenceParallelLA)
    assert torch.equal(model(torch.zeros(1)), torch.ones(1))
    assert Registered.names == ["one"]
    assert type(unwrap(model)[0]) is Tagged


class Final(type(nn.Module)):
    def __new__(meta, name: str, bases: tuple[type, ...], attributes: dict[str, Any]) -> Any:
        if any(type(base) is meta for base in bases):
            raise TypeError(f"{name} has a final base")
        return super().__new__(meta, name, bases, attributes)


class Last(nn.Module, metaclass=Final):
    pass


def test_a_class_that_refuses_subclasses() -> None:
    model = nn.Sequential(UserAttention(16), Last())
    with pytest.raises(ValueError, match="^layer: expected classes that have subclasses, got Last: .*final base"):
        SequenceParallelLA(model, SequenceParallel())
    assert type(model) is nn.Sequential and type(model[0]) is UserAttention
