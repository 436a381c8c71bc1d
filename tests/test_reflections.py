"""Delta rules and RWKV-7 in bfloat16 whose keys repeat or are alike, with beta beyond 1: kernels, those of the engine
for delta rules and generated ones, against token loops in float64.

A reflection (beta 2) lets no error decay, so that rounded inverses of chunks would be off by any factor: see
`flexsp.kernels.delta.exact` and `flexsp.compiler.backend.exact`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from flexsp import ops
from flexsp.compiler import ConstExpr, LinearAttention, SymbTensor, cache_result, identity, unit_lower_inverse
from flexsp.devices import H200, Device, of_arch
from flexsp.testing import oracles
from flexsp.testing.compare import (
    DRAWS,
    WIDE,
    RoundedProducts,
    a_rounding_off,
    check_functions,
    low_precision,
    relative_error,
)
from flexsp.testing.ranks import run_ranks
from tests.interpreted import poisoned
from tests.marks import quick
from tests.test_generated import ENV, MANY_SEGMENTS, ONE_SEGMENT, differentiated
from tests.test_vector_gates import rwkv7

BOUND = 0.02
NAMES = ("delta", "gated", "kda", "product")
GENERATED = ("gated, generated", "rwkv7", "own")


@dataclass(frozen=True)
class Keys:
    """A call; `vocabulary`: so many different keys, 0 for one direction with a little noise. Of H heads the last has
    keys as random ones are. `lengths`: of the ranks' shards. `generated`: on a GPU that has no engine for it."""

    name: str
    vocabulary: int
    beta: float = 2.0
    T: int = 70
    H: int = 1
    K: int = 64
    V: int = 16
    bounds: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    segments: int = ONE_SEGMENT
    generated: bool = False
    dtype: torch.dtype = torch.bfloat16

    @property
    def device(self) -> Device:
        return of_arch(80) if self.generated else H200

    @property
    def steps(self) -> int:
        return 2 if self.name == "product" else 1

    def inputs(self, seed: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(seed)
        n, docs = self.T * self.steps, max(1, len(self.bounds) - 1)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=draw)

        many = self.vocabulary or n
        keys = normal(many, self.K)
        if not self.vocabulary:
            keys = keys[:1] + 0.05 * keys
        keys = keys[torch.randint(0, many, (n,), generator=draw)].view(1, n, 1, self.K)
        if self.H > 1:
            keys = torch.cat([keys.expand(-1, -1, self.H - 1, -1), normal(1, n, 1, self.K)], 2)
        given = {"q": normal(1, self.T, self.H, self.K), "k": keys, "v": normal(1, n, self.H, self.V)}
        given |= {x: torch.nn.functional.normalize(given[x], dim=-1) for x in "qk"}
        given = {x: y.to(self.dtype) for x, y in given.items()}
        given["beta"] = torch.full((1, n, self.H), self.beta)
        if self.H > 1:
            given["beta"][..., -1] *= 0.4
        if self.name not in ("delta", "own"):
            gates = (self.K,) if self.name in ("kda", "rwkv7") else ()
            given["g"] = -0.02 * torch.rand(1, self.T, self.H, *gates, generator=draw)
        return self.named(given) | {"initial_state": normal(docs, self.H, self.K, self.V)}

    def named(self, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The inputs as the op calls them."""
        return given

    @property
    def op(self) -> Any:
        return {"delta": ops.chunk_delta_rule, "gated": ops.chunk_gated_delta_rule, "kda": ops.chunk_kda,
                "product": ops.chunk_gated_delta_product}[self.name]  # fmt: skip

    def call(self, given: dict[str, torch.Tensor], **more: Any) -> Any:
        bounds = {"cu_seqlens": torch.tensor(self.bounds, device=given["q"].device)} if self.bounds else {}
        if self.name == "product":
            more["num_householder"] = 2
        return self.op(**given, **bounds, **more, output_final_state=True)

    def loop(self, given: dict[str, torch.Tensor], engine: oracles.Engine = oracles.token_loop) -> Any:
        bounds = {"cu_seqlens": torch.tensor(self.bounds, device=given["q"].device)} if self.bounds else {}
        return oracles.delta_rule(**given, **bounds, steps=self.steps, engine=engine)


class RWKV7(Keys):
    """Its rates are beta, and its gates those of channels."""

    def named(self, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        q, k, v, beta, g = given.values()
        return {"r": q, "w": g, "k": k, "v": v, "a": -k, "b": (k * beta[..., None]).to(self.dtype)}

    def call(self, given: dict[str, torch.Tensor], **more: Any) -> Any:
        bounds = {"cu_seqlens": torch.tensor(self.bounds, device=given["r"].device)} if self.bounds else {}
        return ops.chunk_rwkv7(**given, **bounds, **more, output_final_state=True)

    def loop(self, given: dict[str, torch.Tensor], engine: oracles.Engine = oracles.token_loop) -> Any:
        return rwkv7(**given, cu_seqlens=torch.tensor(self.bounds) if self.bounds else None, engine=engine)


class Own(Keys):
    """A program of a user's own: a delta rule with a parameter [H, K] of signs, whose outputs are s sigmoid(s) of what
    is read, and so not linear in the state."""

    def named(self, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return given | {"w": torch.tensor([1.0, -1.0]).repeat(self.H, self.K // 2)}

    def call(self, given: dict[str, torch.Tensor], **more: Any) -> Any:
        given = dict(given)
        bounds = {"cu_seqlens": torch.tensor(self.bounds, device=given["q"].device)} if self.bounds else {}
        initial = given.pop("initial_state")
        made = LinearAttention(self.meta, _own_chunk, _own_decay, _own_merge)
        return made(prev_s=initial, **given, **bounds, **more)

    @property
    def meta(self) -> dict[str, Any]:
        h, k, v = ConstExpr("H", self.H), ConstExpr("K", self.K), ConstExpr("V", self.V)
        rows = {x: SymbTensor(["T", h, k], self.dtype) for x in "qk"} | {"v": SymbTensor(["T", h, v], self.dtype)}
        return rows | {"beta": SymbTensor(["T", h]), "w": SymbTensor([h, k]), "prev_s": SymbTensor(["NS", h, k, v])}

    def loop(self, given: dict[str, torch.Tensor], engine: oracles.Engine = oracles.token_loop) -> Any:
        starts, states, o = [*self.bounds] or [0, self.T], [], []
        for n, (start, end) in enumerate(itertools.pairwise(starts)):
            S = given["initial_state"][n]
            for t in range(start, end):
                key = given["k"][0, t] * given["w"]
                error = given["v"][0, t] - (key.unsqueeze(-1) * S).sum(-2)
                S = S + (given["beta"][0, t].unsqueeze(-1) * key).unsqueeze(-1) * error.unsqueeze(-2)
                o.append((given["q"][0, t].unsqueeze(-1) * S).sum(-2))
            states.append(S)
        read = torch.stack(o).unsqueeze(0)
        return read * read.sigmoid(), torch.stack(states)


def _own_chunk(k: Any, v: Any, beta: Any, w: Any) -> Any:
    keys = k * w
    p = keys * beta[:, None]
    inverse = unit_lower_inverse(identity(k, k.size(0)) + (keys @ p.T).tril(-1))
    cache_result(inverse @ v, "u")
    cache_result(inverse @ keys, "y")
    return p.T @ (inverse @ v)


def _own_decay(prev_s: Any, k: Any, beta: Any, w: Any, y: Any, chunk_state: Any) -> Any:
    return prev_s - (k * w * beta[:, None]).T @ (y @ prev_s) + chunk_state


def _own_merge(q: Any, k: Any, beta: Any, w: Any, u: Any, y: Any, chunk_state: Any) -> Any:
    read = (q @ (k * w * beta[:, None]).T).tril() @ (u - y @ chunk_state) + q @ chunk_state
    return read * read.sigmoid()


def wrong(keys: Keys, seed: int, sp: Any = None, device: str = "cpu", bound: float = BOUND) -> list[str]:
    """What is off by more than the bound, of this rank's part."""
    given = keys.inputs(seed)
    draw = torch.Generator().manual_seed(seed + 1)
    do = torch.randn(1, keys.T, keys.H, keys.V, generator=draw).to(keys.dtype)
    ends = torch.randn(given["initial_state"].shape, generator=draw)
    wide = {x: y.double().to(device).requires_grad_() for x, y in given.items()}
    o, state = keys.loop(wide)
    cotangents = [x.double().to(device) for x in (do, ends)]
    want = [o, state, *torch.autograd.grad([o, state], [*wide.values()], cotangents)]
    part, whole = {}, {}
    for x, y in given.items():
        whole[x] = slice(None)
        if sp is not None and sp.rank and x == "initial_state" and not keys.bounds:
            continue
        if sp is not None and x != "initial_state":
            start, n = sum(keys.lengths[: sp.rank]), keys.lengths[sp.rank]
            each = y.shape[1] // keys.T
            whole[x] = slice(start * each, (start + n) * each)
        part[x] = (y if whole[x] == slice(None) else y[:, whole[x]]).to(device).clone().requires_grad_()
    if sp is not None:
        sp.set_lengths([*keys.lengths])
    got_o, got_state = keys.call(part, **({} if sp is None else {"sp": sp}))
    to = [(got_o, do[:, whole["v" if keys.steps == 1 else "q"]].to(device))]
    to += [] if got_state is None else [(got_state, ends.to(device))]
    grads = torch.autograd.grad([x for x, _ in to], [*part.values()], [x for _, x in to], allow_unused=True)
    got = {"o": got_o, "state": got_state} | {f"d{x}": y for x, y in zip(part, grads, strict=True)}
    found = []
    for name, y in zip(["o", "state", *(f"d{x}" for x in given)], want, strict=True):
        x = got.get(name)
        if x is None or (sp is not None and keys.bounds and name in ("state", "dinitial_state")):
            continue
        every = y
        y = y[:, whole[name[1:] if name != "o" else "v" if keys.steps == 1 else "q"]] if name not in ("state", "dinitial_state") else y
        # A shard's part of a gradient may be next to nothing: its size is its share of the whole.
        size = every.norm().item() * (y.numel() / every.numel()) ** 0.5
        error = relative_error(x, y, size)
        found += [f"{name} {error:.2g}"] if not error < bound else []
    return found


def of_kernels(sp: Any, cases: list[Keys], seed: int) -> list[str]:
    found = []
    for keys in cases:
        with poisoned(keys.segments, keys.H, keys.device):
            found += [f"{keys}: {x}" for x in wrong(keys, seed, sp if keys.lengths else None)]
    return found


LESS: dict[str, Any] = {"K": 24, "generated": True}
CASES = {
    "delta": [Keys("delta", 4, 1.9, T=67, H=2), Keys("delta", 1, T=66, bounds=(0, 20, 20, 66))],
    "gated": [Keys("gated", 2, T=140, segments=MANY_SEGMENTS, bounds=(0, 66, 140)), Keys("gated", 1, T=66)],
    "kda": [Keys("kda", 1, T=66), Keys("kda", 0, 1.9, T=40, bounds=(0, 33, 40))],
    "product": [Keys("product", 1, T=36, bounds=(0, 33, 36))],
    "delta, generated": [Keys("delta", 4, 1.9, T=67, H=2, V=17, **LESS)],
    "gated, generated": [Keys("gated", 1, T=40, bounds=(0, 4, 4, 40), **LESS)],
    "kda, generated": [Keys("kda", 1, 1.9, T=40, **LESS)],
    "product, generated": [Keys("product", 4, T=36, bounds=(0, 33, 36), **LESS)],
    "rwkv7": [RWKV7("rwkv7", 4, 1.9, T=44, H=2, **LESS), RWKV7("rwkv7", 1, T=40, bounds=(0, 4, 4, 40), **LESS)],
    "own": [Own("own", 1, T=36, bounds=(0, 4, 36), **LESS)],
    "large": [Keys("gated", 1, K=256, V=130), Keys("kda", 1, K=200, V=256)],
    "longer": [Keys(name, many, T=300) for name in NAMES for many in (1, 4)],
}


@pytest.mark.parametrize("what", quick(CASES, *NAMES, *GENERATED))
def test_against_token_loops(what: str, seed: int) -> None:
    (found,) = run_ranks(of_kernels, 1, CASES[what], seed, env=ENV)
    assert not found, found


def judged(sp: Any, cases: list[Keys], seed: int) -> None:
    """By chunks in PyTorch, on data that is a rounding off and with products of operands in bfloat16."""
    for keys in cases:
        given, made = keys.inputs(seed), torch.Generator().manual_seed(seed + 1)
        shapes = (*given["q"].shape[:3], keys.V), given["initial_state"].shape
        ends = [tuple(torch.randn(x, generator=made).bfloat16().double() for x in shapes) for _ in range(DRAWS)]
        with poisoned(keys.segments, keys.H):
            found = differentiated(lambda x, keys=keys: keys.call(x), dict(given), ends[:1])
        want = differentiated(lambda x, keys=keys: keys.loop(x), {x: y.double() for x, y in given.items()}, ends)
        off = {x: y if x in WIDE else a_rounding_off(y, made, torch.bfloat16) for x, y in given.items()}
        ends = [tuple(a_rounding_off(x, made, torch.bfloat16) for x in each) for each in ends]
        with RoundedProducts(torch.bfloat16):
            low = differentiated(lambda x, keys=keys: keys.loop(x, low_precision), off, ends)
        check_functions(found, want, low)


@pytest.mark.parametrize("name", quick(NAMES, "gated"))
def test_steps_that_do_not_reflect(name: str, seed: int) -> None:
    """With beta up to 1 such keys stay in chunks, and round as those do."""
    run_ranks(judged, 1, [Keys(name, 0, 0.7), Keys(name, 1, 1.0)], seed, env=ENV)


@pytest.mark.parametrize("name", quick(("delta", "gated", "kda"), "gated"))
def test_over_ranks(name: str, seed: int) -> None:
    """A rank without tokens; documents over ranks."""
    given: dict[str, Any] = {"T": 50, "K": 32, "lengths": (30, 0, 20)}
    cases = [Keys(name, 1, 1.9, **given), Keys(name, 4, **given, bounds=(0, 35, 50))]
    found = run_ranks(of_kernels, 3, cases, seed, env=ENV)
    assert not any(found), found


def chosen(sp: Any, packed: bool) -> tuple[list[list[int]], list[list[int]]]:
    """Of two heads, whose chunks of 64, 64 and 22 tokens are in two segments: those done token by token."""
    from flexsp.kernels.delta.exact import choose

    gain = torch.tensor([[1.0, 80.1, 27.4], [79.9, 79.9, 27.6]])
    table = torch.tensor([[64 * c, (64, 64, 22)[c], 0, 0, 0] for c in range(3)], dtype=torch.int32)
    exact, mild = torch.full((2, 3), -1, dtype=torch.int32), torch.tensor([[1, 0, 1]] * 2, dtype=torch.int32)
    choose[(2, 2)](gain, exact, mild, table, 150, 3, 2, C=64, MILD=True, PACKED=packed, PDL=False)
    return exact.tolist(), mild.tolist()


@pytest.mark.parametrize("packed", [True, False])
def test_what_is_done_token_by_token(packed: bool) -> None:
    """Each token may add 1.25: short chunks less. What lies behind the last chunk does not count."""
    (found,) = run_ranks(chosen, 1, packed, env=ENV)
    assert found == ([[1, 1, 0], [0, 0, 1]], [[2, 2, 1], [1, 0, 2]])
