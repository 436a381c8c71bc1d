"""Keys that repeat, that lie alike and that reflect, and how wrong a delta rule is with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flexsp import ops
from flexsp.devices import H200, Device, of_arch
from flexsp.ops import _delta
from flexsp.testing import oracles
from flexsp.testing.compare import (
    relative_error,
)
from tests.harness.generated import ONE_SEGMENT


def drawn(
    seed: int, T: int, n: int, gated: bool, dtype: torch.dtype, states: int, K: int = 24, V: int = 40
) -> dict[str, torch.Tensor]:
    """A sequence of one key head and two value heads; and the gradient of the outputs."""
    made = torch.Generator().manual_seed(seed)
    shapes = {"q": (1, T, 1, K), "k": (1, T * n, 1, K), "v": (1, T * n, 2, V), "do": (1, T, 2, V)}
    given = {name: torch.randn(shape, generator=made) for name, shape in shapes.items()}
    given["k"] = F.normalize(given["k"], dim=-1)
    given["beta"] = 2.0 * torch.rand(1, T * n, 2, generator=made)
    given = {name: x.to(dtype) for name, x in given.items()}
    if gated:
        given["g"] = torch.where(torch.rand(1, T, 2, generator=made) < 0.1, -120.0, -0.1)
    return given | {"initial_state": torch.randn(states, 2, K, V, generator=made)}


def between_zeros(x: torch.Tensor, n: int, at: int) -> torch.Tensor:
    """[B, T n, ..] with the rows of x [B, T, ..] at every n-th from `at` on."""
    wide = x.new_zeros(x.shape[0], x.shape[1] * n, *x.shape[2:])
    wide[:, at::n] = x
    return wide


def passes(op: Any, given: dict[str, torch.Tensor], **options: Any) -> dict[str, torch.Tensor]:
    """Outputs, final states and gradients of all inputs and of initial states."""
    leaves = {name: x.clone().requires_grad_() for name, x in given.items() if name != "do"}
    o, final = op(**leaves, output_final_state=True, **options)
    outputs, to = [o], [given["do"]]
    if final is not None:
        outputs, to = [o, final], [given["do"], torch.ones_like(final)]
    grads = torch.autograd.grad(outputs, [*leaves.values()], to, allow_unused=True)
    found = {"o": o.detach()} | ({} if final is None else {"final": final.detach()})
    return found | {f"d{name}": dx for name, dx in zip(leaves, grads, strict=True) if dx is not None}


def unlike(
    given: dict[str, torch.Tensor], n: int, gated: bool, bounds: torch.Tensor | None, **options: Any
) -> list[str]:
    """What differs in any bit from a call with a row of queries and gates for each key."""
    gate = {} if gated else {"g": None}
    spread = _delta._by_key
    _delta._by_key = lambda *given: pytest.fail("queries were given a row a key")  # type: ignore[assignment]
    try:
        found = passes(ops.chunk_gated_delta_product, given, **gate, num_householder=n, cu_seqlens=bounds, **options)
    finally:
        _delta._by_key = spread
    wide = given | {name: between_zeros(given[name], n, n - 1) for name in ("q", "do")}
    if gated:
        wide["g"] = between_zeros(given["g"], n, 0)
    rule = ops.chunk_gated_delta_rule if gated else ops.chunk_delta_rule
    want = passes(rule, wide, cu_seqlens=None if bounds is None else bounds * n, **options)
    for name, at in (("o", n - 1), ("dq", n - 1), ("dg", 0)):
        if name in want:
            want[name] = want[name][:, at::n]
    return sorted({*want} ^ {*found}) + [x for x in found if not torch.equal(found[x], want[x])]


BOUND = 0.02
NAMES = ("delta", "gated", "kda", "product")


@dataclass(frozen=True)
class Keys:
    """A call; `vocabulary`: so many different keys, 0 for one direction with a little noise. Each `group` of H heads
    shares queries and keys; the first have keys as random ones are. Several sequences lie behind strides, and their
    steps are not all alike. `lengths`: of the ranks' shards. `generated`: on a GPU that has no engine for it. Log gates
    are between 0 and -`gate`."""

    name: str
    vocabulary: int
    beta: float = 2.0
    T: int = 70
    H: int = 1
    group: int = 1
    K: int = 64
    V: int = 16
    B: int = 1
    bounds: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    segments: int = ONE_SEGMENT
    generated: bool = False
    dtype: torch.dtype = torch.bfloat16
    gate: float = 0.02

    @property
    def device(self) -> Device:
        return of_arch(80) if self.generated else H200

    @property
    def steps(self) -> int:
        return 2 if "product" in self.name else 1

    def inputs(self, seed: int) -> dict[str, torch.Tensor]:
        each = [self._sequence(self.B * seed + b) for b in range(self.B)]
        if self.B == 1:
            return each[0]
        return {x: _apart(torch.cat([given[x] for given in each])) for x in each[0]}

    def _sequence(self, seed: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(seed)
        n, docs = self.T * self.steps, max(1, len(self.bounds) - 1)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=draw)

        many = self.vocabulary or n
        keys = normal(many, self.K)
        if not self.vocabulary:
            keys = keys[:1] + 0.05 * keys
        keys = keys[torch.randint(0, many, (n,), generator=draw)].view(1, n, 1, self.K)
        heads = self.H // self.group
        if heads > 1:
            keys = torch.cat([normal(1, n, 1, self.K), keys.expand(-1, -1, heads - 1, -1)], 2)
        given = {"q": normal(1, self.T, heads, self.K), "k": keys, "v": normal(1, n, self.H, self.V)}
        given |= {x: torch.nn.functional.normalize(given[x], dim=-1) for x in "qk"}
        given = {x: y.to(self.dtype) for x, y in given.items()}
        given["beta"] = torch.full((1, n, self.H), self.beta)
        if heads > 1:
            given["beta"][..., : self.group] *= 0.4
        if self.B > 1:
            given["beta"] *= 1 - 0.1 * torch.rand(1, n, self.H, generator=draw)
        if self.name not in ("delta", "own"):
            gates = (self.K,) if self.name in ("kda", "kda product", "rwkv7", "gdn2") else ()
            given["g"] = -self.gate * torch.rand(1, self.T, self.H, *gates, generator=draw)
        return self.named(given) | {"initial_state": normal(docs, self.H, self.K, self.V)}

    def named(self, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The inputs as the op calls them."""
        return given

    @property
    def op(self) -> Any:
        return {"delta": ops.chunk_delta_rule, "gated": ops.chunk_gated_delta_rule, "kda": ops.chunk_kda,
                **dict.fromkeys(("product", "kda product"), ops.chunk_gated_delta_product)}[self.name]  # fmt: skip

    def call(self, given: dict[str, torch.Tensor], **more: Any) -> Any:
        bounds = {"cu_seqlens": torch.tensor(self.bounds, device=given["q"].device)} if self.bounds else {}
        if self.steps > 1:
            more["num_householder"] = 2
        return self.op(**given, **bounds, **more, output_final_state=True)

    def loop(self, given: dict[str, torch.Tensor], engine: oracles.Engine = oracles.token_loop) -> Any:
        bounds = {"cu_seqlens": torch.tensor(self.bounds, device=given["q"].device)} if self.bounds else {}
        given = given | {x: given[x].repeat_interleave(self.group, 2) for x in "qk"}
        return oracles.delta_rule(**given, **bounds, steps=self.steps, engine=engine)


def _apart(x: torch.Tensor) -> torch.Tensor:
    """With heads outermost in memory, then sequences."""
    return x.movedim(2, 0).contiguous().movedim(0, 2)


def wrong(keys: Keys, seed: int, sp: Any = None, device: str = "cpu", bound: float = BOUND) -> list[str]:
    """What is off by more than the bound, of this rank's part. Where there is a parameter, whose gradient may nearly
    vanish as a sum over tokens, gradients are of three cotangents together."""
    given = keys.inputs(seed)
    draw = torch.Generator().manual_seed(seed + 1)
    draws = 3 if any(x.dim() < 3 for x in given.values()) else 1
    do = torch.randn(draws, keys.B, keys.T, keys.H, keys.V, generator=draw).to(keys.dtype)
    ends = torch.randn(draws, *given["initial_state"].shape, generator=draw)
    wide = {x: y.double().to(device).requires_grad_() for x, y in given.items()}
    o, state = keys.loop(wide)
    want = [o, state, *_gradients([o, state], [*wide.values()], [do.double().to(device), ends.double().to(device)])]
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
    whole["o"] = whole["q" if "q" in whole else "r"]
    to = [(got_o, do[:, :, whole["o"]].to(device))]
    to += [] if got_state is None else [(got_state, ends.to(device))]
    grads = _gradients([x for x, _ in to], [*part.values()], [x for _, x in to])
    got = {"o": got_o, "state": got_state} | {f"d{x}": y for x, y in zip(part, grads, strict=True)}
    found = []
    for name, y in zip(["o", "state", *(f"d{x}" for x in given)], want, strict=True):
        x = got.get(name)
        if x is None or (sp is not None and keys.bounds and name in ("state", "dinitial_state")):
            continue
        every = y
        if name not in ("state", "dinitial_state"):
            y = y[:, :, whole[name[1:]]] if name.startswith("d") else y[:, whole[name]]
        # A shard's part of a gradient may be next to nothing: its size is its share of the whole.
        size = every.norm().item() * (y.numel() / every.numel()) ** 0.5
        error = relative_error(x, y, size)
        found += [f"{name} {error:.2g}"] if not error < bound else []
    return found


def _gradients(outputs: list[torch.Tensor], leaves: list[torch.Tensor], draws: list[torch.Tensor]) -> list[Any]:
    """Of each leaf [draws, ...], None if none is there."""
    found = [
        torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True, retain_graph=True)
        for cotangents in zip(*draws, strict=True)
    ]
    return [None if x[0] is None else torch.stack(x) for x in zip(*found, strict=True)]


def error_of_steps(keys: Keys, seed: int, device: str = "cpu") -> float:
    """How far the first head's gradient of beta is from products of errors, by a token loop in float64, and the call's
    own dv, which do not say how that of beta 0 is."""
    given, made = keys.inputs(seed), torch.Generator().manual_seed(seed + 1)
    given["beta"][:, 5] = 0.0
    cotangents = torch.randn(1, keys.T, keys.H, keys.V, generator=made).to(keys.dtype), torch.randn(
        given["initial_state"].shape, generator=made
    )
    leaves = {x: y.to(device).requires_grad_() for x, y in given.items()}
    grads = torch.autograd.grad(keys.call(leaves), [*leaves.values()], [x.to(device) for x in cotangents])
    got = {x: y.cpu().double() for x, y in zip(leaves, grads, strict=True)}
    assert got["beta"].isfinite().all()
    k, v, beta = (given[x].detach()[0, :, 0].double() for x in ("k", "v", "beta"))
    state, errors = given["initial_state"].detach()[0, 0].double(), torch.empty_like(v)
    for t in range(keys.T):
        if "g" in given:
            state = given["g"].detach()[0, t, 0].double().exp().reshape(-1, 1) * state
        errors[t] = v[t] - k[t] @ state
        state = state + beta[t] * torch.outer(k[t], errors[t])
    want = (errors * got["v"][0, :, 0]).sum(-1) / beta
    return relative_error(got["beta"][0, beta != 0, 0], want[beta != 0])


def inverse_of_alike(
    sp: Any, seed: int, K: int = 64, device: str = "cpu", gluon: bool = False
) -> tuple[float, float, int]:  # fmt: skip
    """Of a chunk of KDA without decays, whose keys have much in common: the error of its inverse, and that of one
    rounded; and how many numbers above the diagonal are not zero."""
    from flexsp.kernels.delta import channels, hopper_channels, hopper_wy_transform
    from flexsp.kernels.primitives import dots

    C, draw, half = 64, torch.Generator().manual_seed(seed), torch.bfloat16
    k = F.normalize(torch.randn(K, generator=draw) + 0.5 * torch.randn(C, K, generator=draw), dim=-1)
    k, beta = k.to(device, half), torch.sigmoid(torch.randn(C, generator=draw) + 4).to(device, half)
    square = torch.full((2, C, C), torch.nan, dtype=half, device=device)
    rows, numbers = torch.empty(3, C, K, dtype=half, device=device), torch.empty(K, device=device)
    inputs = k, k, torch.zeros(C, K, device=device), beta
    strides, sizes = (*(C * K, K, K) * 3, C, 1, 1), {"K": K, "C": C, "PACKED": False, "GROUP": 1, "PDL": False}
    if gluon:
        made, how = (*square, *rows, numbers, numbers, numbers, k), {"num_warps": 8, "maxnreg": 128}
        how |= {"GROWTH": False, "NORM": False, "ERASES": False}
        hopper_channels.channel_scores[(1, 1)](*inputs, *made, *strides, C, 1, 1.0, **sizes, **how)
        flags = {"C": C, "GAIN": True, "PACKED": False, "PDL": False}
        hopper_wy_transform.inverse[(1, 1)](square[0], numbers, k, C, **flags, num_warps=1)
    else:
        blocks = torch.empty(channels.matrices(C), C, C, dtype=half, device=device)
        channels.channel_blocks[(len(blocks),)](blocks, C=C, PDL=False)
        block = torch.empty(K // 32, dtype=torch.int32, device=device)
        made = blocks, *square, *rows, numbers, block, k
        channels.channel_scores[(1, 1)](*inputs, *made, *strides, C, 1, 1.0, **sizes, COLS=32, **dots(half))
        channels.channel_inverse[(1, 1)](square[0], numbers, k, C, C=C, GAIN=True, PACKED=False, PDL=False)
    k, beta = k.double(), beta.double()
    want = torch.linalg.inv(torch.eye(C, dtype=torch.float64, device=device) + (k @ k.T * beta).tril(-1))
    above = int(square[0].triu(1).count_nonzero())
    return relative_error(square[0], want), relative_error(want.to(half), want), above


def _inverted_pairs(kernel: Any, step: float, gain: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """By a kernel that reads pairs of tokens, as numbers of bfloat16 and what these lack above the diagonal."""
    pairs = _pairs(step, table)
    square = pairs.bfloat16() + (pairs - pairs.bfloat16().float()).bfloat16().T
    kernel[1, 1](square, gain, table, 64, C=64, GAIN=True, PACKED=True, PDL=False)
    return square


def _inverted_keys(kernel: Any, step: float, gain: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """By one that reads keys, which are all (1, 0, ...)."""
    from flexsp.kernels.primitives import dots

    C, K, gluon = 64, 64, not hasattr(kernel, "fn")
    keys, beta = torch.zeros(C, K, dtype=torch.bfloat16), torch.full((C,), step)
    keys[:, 0] = 1.0
    square, numbers = torch.full((C, C), torch.nan, dtype=torch.bfloat16), torch.full((4, C), torch.nan)
    strides, sizes = (0, K, 0), {"K": K, "BK": K, "C": C, "GATED": 0, "BOUNDS": False, "GROUP": 1, "STEPS": 1}
    sizes |= {"PACKED": True, "PDL": False}
    if gluon:
        others = (numbers, numbers, numbers, gain, numbers, numbers, square.clone(), table)
        ends = (*strides, *strides, 0, 1, 0, 0, 0, 0, C, 1, 1.0)
        kernel[1, 1](keys, keys, beta, beta, square, *others, *ends, **sizes, NORM=False)
    else:
        others, ends = (numbers, numbers, numbers, gain, table), (*strides, 0, 1, 0, 0, 0, 0, C, 1)
        kernel[1, 1](keys, beta, beta, square, *others, *ends, **sizes, GAIN=True, **dots(torch.bfloat16))
    return square


def _inverted_by_generated(kernel: Any, step: float, gain: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    found = torch.full((64, 64), torch.nan)
    flags = {"C": 64, "GAIN": True, "MORE": False, "REPEATS": False, "DITHERED": True, "PACKED": True, "PDL": False}
    kernel[1, 1](_pairs(step, table), found, gain, table, 64, **flags)
    assert torch.equal(found, found.bfloat16().float())
    return found


def _pairs(step: float, table: torch.Tensor) -> torch.Tensor:
    pairs = torch.full((64, 64), step).tril(-1)
    pairs[int(table[0, 1]) :] = 0.0
    return pairs


def roundings_of_equal_entries(sp: Any, step: float, name: str, kernel: Any = None) -> tuple[float, list[float]]:
    """Of a chunk with one key and one step size between 0.5 and 1: the sum of errors of an inverse's entries beside the
    diagonal, for which exact ones are -`step`, in units of their last place. And `gain` over what it is without
    `size_of_inverse`, of documents of 8, 20 and 64 tokens.

    name: of the kernel, in Triton where none is given.
    """
    from flexsp.compiler.backend.intrinsic_kernels import inverse_kernel
    from flexsp.kernels.delta import channels, wy_transform

    inverted, triton_kernel = {
        "inverse": (_inverted_pairs, None), "channel_inverse": (_inverted_pairs, channels.channel_inverse),
        "wy_inverse": (_inverted_keys, wy_transform.wy_inverse),
        "inverse_kernel": (_inverted_by_generated, inverse_kernel),
    }[name]  # fmt: skip
    ratios = []
    for tokens in (8, 20, 64):
        gain, table = torch.full((1,), torch.nan), torch.tensor([[0, tokens, 0, 1, 1]], dtype=torch.int32)
        square = inverted(triton_kernel if kernel is None else kernel, step, gain, table)
        found = torch.linalg.inv(_pairs(step, table).double() + torch.eye(64, dtype=torch.float64)).tril(-1)
        ratios.append(gain.item() / found.square().sum().item())
    errors = square.diagonal(-1).double() + step
    return 256 * errors.sum().item(), ratios


def check_equal_entries(found: tuple[float, list[float]]) -> None:
    """To the nearest number the sum would be 30."""
    errors, ratios = found
    assert abs(errors) < 4 and [round(x, 3) for x in ratios] == [1.0, 1.225, 1.225], found
