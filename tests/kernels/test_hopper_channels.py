"""Chunks with a gate a key channel, whose kernels are in Gluon, on the CPU: see `tests.harness.gluon_in_torch`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from flexsp.testing.compare import relative_error
from flexsp.testing.ranks import run_ranks
from tests.harness.interpreted import INTERPRETED

C, SCALE, LEAST = 64, 0.7, -104.0
BF16, F32 = torch.bfloat16, torch.float32
BOUND, EXACT = 1e-2, 1e-5
CHUNK, BLOCK, TOKEN = 6, 4, 0  # log2 of how many tokens a block has that has one middle
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Call:
    """`sizes`: of blocks, in each tile of 64 channels. `documents`: their lengths, packed; B sequences of T tokens if
    there are none. `group`: heads that share queries and keys. `errors`: gains are so large that gradients of beta are
    products of errors. `norm`: queries and keys have any length, and kernels divide by it. `erases`: beta has a number
    for each channel of the keys that read."""

    gates: str
    sizes: tuple[int, ...]
    K: int = 64
    V: int = 64
    T: int = 64
    documents: tuple[int, ...] = ()
    B: int = 1
    H: int = 1
    group: int = 1
    kind: torch.dtype = F32
    beta: float | None = None
    errors: bool = False
    norm: bool = False
    erases: bool = False

    @property
    def chunks(self) -> list[tuple[int, int, int]]:
        """Document, first token and length."""
        found, start = [], 0
        for n, length in enumerate(self.documents or (self.T,)):
            found += [(n, start + at, min(C, length - at)) for at in range(0, length, C)]
            start += length
        return found

    @property
    def tokens(self) -> int:
        return sum(self.documents) or self.T


def gates(call: Call, made: torch.Generator) -> torch.Tensor:
    """Log gates [B, T, H, K]."""
    shape = call.B, call.tokens, call.H, call.K
    mild = -0.3 * torch.rand(shape, generator=made)
    t, k = torch.arange(call.tokens)[:, None, None], torch.arange(call.K)
    strong = -5.0 * torch.sigmoid(torch.randn(shape, generator=made))
    found = {
        "none": 0.0 * mild, "mild": mild, "large keys": mild, "to the middle": 0.1 * mild - 1.6, "strong": strong,
        "very strong": 6.0 * strong,
        "one is closed": torch.where(
            (t % 64 == 37) & (k == 11), -1e4, torch.where((t % 64 == 20) & (k == 9), LEAST, 0.1 * mild)
        ),
        "all close": torch.where(t % 64 == 34, -1e9, strong),  # sums of gates that are not clamped lose what follows
        "strong in one channel": torch.where(k % 64 == 23, strong, 0.1 * mild),
        "early": torch.where(t % 64 == 1, -80.0, 0.1 * mild), "late": torch.where(t % 64 == 62, -80.0, 0.1 * mild),
        "tiles differ": torch.where(k < 64, mild, 0.03 * mild + torch.where(k % 5 == 3, strong, 0.0)),
        "tiles differ much": torch.where(k < 64, 6.0 * strong, 0.1 * mild),
        "growth": torch.where(t % 2 == 0, 0.05, -0.06) + 0.1 * mild, "much growth": 0.3 + mild,
        "blocks or tokens": torch.where(k < 64, -8.9, -9.1) + 0.0 * mild,
        "one closes, others are strong": torch.where(
            (t % 64 == 37) & (k == 11), -1e4, torch.where(k % 3 == 0, strong, 0.1 * mild)
        ),
    }[call.gates]  # fmt: skip
    return found.to(call.kind)


def drawn(call: Call, made: torch.Generator) -> Tensors:
    B, T, H, K, V = call.B, call.tokens, call.H, call.K, call.V
    shapes = {"q": (B, H // call.group, T, K), "k": (B, H // call.group, T, K), "do": (B, H, T, V)}
    given = {name: torch.randn(shape, generator=made) for name, shape in shapes.items()}
    given["k"] = torch.nn.functional.normalize(given["k"], dim=-1) * (1.7 if call.gates == "large keys" else 1.0)
    strengths = (B, T, H, K) if call.erases else (B, T, H)
    beta = torch.rand(strengths, generator=made) if call.beta is None else torch.full(strengths, call.beta)
    if call.norm:
        for name in "qk":
            given[name] *= torch.exp2(torch.randint(-6, 6, given[name].shape[:3], generator=made))[..., None]
        given["k"][:, :, 5] = 0.0
    given = {name: x.to(BF16).transpose(1, 2) for name, x in given.items()}  # heads are outermost in memory
    if call.errors:
        beta[:, ::9] = 0.0
    return given | {"beta": beta.to(BF16), "g": gates(call, made)}


def decays(g: torch.Tensor) -> torch.Tensor:
    return torch.where(g < LEAST, LEAST, g).cumsum(0)


def chunk(q: torch.Tensor, k: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> Tensors:
    """Of one chunk [length, K] what the formulas say; zeros for tokens behind it."""
    q, k, g = (torch.nn.functional.pad(x, (0, 0, 0, C - len(x))) for x in (q, k, g))
    beta = torch.nn.functional.pad(beta.view(len(beta), -1), (0, 0, 0, C - len(beta)))
    read, written = (beta * k, k) if beta.shape[1] > 1 else (k, beta * k)
    b = decays(g)
    pair = (b[:, None] - b[None]).masked_fill(torch.ones(C, C).triu(1).bool()[..., None], -torch.inf).exp()
    alike = torch.einsum("id,jd,ijd->ij", read, written, pair)
    scores = torch.einsum("id,jd,ijd->ij", q, written, pair) * SCALE
    left = (b[-1] - b).exp()
    return {"pairs": alike.tril(-1), "scores": scores, "reads": SCALE * q * b.exp(), "w": read * b.exp(),
            "writes": written * left, "decay": b[-1].exp()}  # fmt: skip


def norms(x: torch.Tensor) -> torch.Tensor:
    return (x.square().sum(1) + 1e-6).rsqrt()


def passes(x: Tensors, v: torch.Tensor, S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs of a chunk, the state that leaves it, and N."""
    N = torch.linalg.solve_triangular(torch.eye(C, dtype=v.dtype) + x["pairs"], v - x["w"] @ S, upper=False)
    return x["reads"] @ S + x["scores"] @ N, x["decay"][:, None] * S + x["writes"].T @ N, N


def wanted(call: Call, given: Tensors, made: torch.Generator) -> tuple[Tensors, Tensors]:
    """In float64 what kernels should find; and what the walks would have left, rounded."""
    found: dict[str, list[torch.Tensor]] = {}
    left: dict[str, list[torch.Tensor]] = {x: [] for x in ("v_new", "entering", "leaving")}
    of = {name: torch.zeros(call.B, call.tokens, call.H, *x.shape[3:]).double() for name, x in given.items()}
    dv = torch.zeros(call.B, call.tokens, call.H, call.V).double()
    for b in range(call.B):
        for h in range(call.H):
            for _, start, length in call.chunks:
                rows = slice(start, start + length)
                leaves = [
                    given[name][b, rows, h // (call.group if name in "qk" else 1)].double()
                    for name in ("q", "k", "g", "beta")
                ]
                if call.norm:
                    leaves[:2] = [x * norms(x)[:, None] for x in leaves[:2]]
                leaves = [x.requires_grad_() for x in leaves]
                v, S, dS = (torch.randn(n, call.V, generator=made).double() for n in (C, call.K, call.K))
                v[length:] = 0.0
                v.requires_grad_()
                do = torch.nn.functional.pad(given["do"][b, rows, h].double(), (0, 0, 0, C - length))
                x = chunk(*leaves)
                if call.norm:
                    both = [given[name][b, rows, h // call.group].double() for name in "qk"]
                    x["norms"] = torch.stack([norms(torch.nn.functional.pad(y, (0, 0, 0, C - length))) for y in both])
                o, state, N = passes(x, v, S.bfloat16().double())
                grads = torch.autograd.grad([o, state], [v, *leaves], [do, dS.bfloat16().double()])
                for name, dx in zip(("q", "k", "g", "beta"), grads[1:], strict=True):
                    of[name][b, rows, h] = dx
                dv[b, rows, h] = grads[0][:length]
                for name, y in x.items():
                    found.setdefault(name, []).append(y.detach())
                erased = (leaves[3].view(length, -1) * leaves[1].square()).sum(1)
                steps = (1 - erased).abs().clamp(min=1.0).log2().sum()
                grows = (leaves[2] > 0).any()
                found.setdefault("growth", []).append(torch.where(grows, torch.inf, steps.detach()))
                for name, y in (("v_new", N), ("entering", S), ("leaving", dS)):
                    left[name].append(y.detach().T.to(BF16))
    size = call.B * call.H, len(call.chunks)
    want = {name: torch.stack(y).view(*size, *y[0].shape) for name, y in found.items()}
    want |= {f"d{name}": x for name, x in of.items() if name != "do"}
    rounded = {name: torch.stack(y).view(*size, *y[0].shape) for name, y in left.items()}
    return want, rounded | {"dv": dv.to(BF16), "do": given["do"]}


class Kernels:
    """The kernels, on the inputs of a call."""

    def __init__(self, call: Call, given: Tensors) -> None:
        self.call, self.given, self.rows, self.tiles = call, given, call.B * call.H, call.K // 64
        self.table = torch.tensor([[start, length, document, 0, 0] for document, start, length in call.chunks]).int()
        self.norms = _room(2, self.rows, len(call.chunks), C, dtype=F32)
        self.sizes: dict[str, dict[tuple[int, int], list[int]]] = {}

    def _launch(
        self, name: str, programs: int, tensors: Sequence[torch.Tensor], *numbers: Any, **constants: Any
    ) -> None:
        from tests.harness.gluon_in_torch import Kernel

        kernel, chosen = Kernel("delta/hopper_channels.py", name), self.sizes.setdefault(name, {})
        choose = kernel.names["to_middle"]

        def to_middle(*args: Any) -> Any:
            answer, (program, row, _) = choose(*args), kernel.program
            chosen.setdefault((program * len(self.call.chunks) // programs, row), []).append(int(answer[0]))
            return answer

        kernel.names["to_middle"] = to_middle
        given = [self.given[x] for x in ("q", "k", "g", "beta")]
        strides = [n for x in given for n in x.stride()[:3]]
        kernel[programs, self.rows](
            *given, *tensors, self.table, *strides, *numbers, K=self.call.K, C=C, PACKED=bool(self.call.documents),
            GROUP=self.call.group, NORM=self.call.norm, ERASES=self.call.erases, PDL=False, **constants,
        )  # fmt: skip

    def scores(self) -> Tensors:
        call, size = self.call, (self.rows, len(self.call.chunks))
        made = {name: _room(*size, C, C) for name in ("pairs", "scores")}
        made |= {name: _room(*size, C, call.K) for name in ("reads", "writes", "w")}
        made |= {"decay": _room(*size, call.K, dtype=F32), "growth": _room(*size, dtype=F32)}
        tensors = [*made.values(), self.norms]
        self._launch("channel_scores", size[1], tensors, call.tokens, call.H, SCALE, GROWTH=True)
        return made | {"norms": self.norms.movedim(0, 2)}

    def grads(self, left: Tensors, skips: bool = False) -> Tensors:
        """left: by walks, and the gradient of outputs."""
        call, n = self.call, len(self.call.chunks)
        shape = call.B, call.tokens, call.H
        made = {"dq": _room(*shape, call.K), "dk": _room(*shape, call.K)}
        of_beta = (*shape, call.K) if call.erases else (self.tiles, *shape)
        made |= {"dbeta": _room(*of_beta, dtype=F32), "dg": _room(*shape, call.K, dtype=call.kind)}
        skipped = torch.full((self.rows, n), int(skips), dtype=torch.int32)
        gain = torch.full((self.rows, n), 60.0 if call.errors else 0.0)
        given = [left[x] for x in ("do", "dv", "v_new", "entering", "leaving")]
        self._launch(
            "channel_grads", n * self.tiles, [*given, skipped, gain, self.norms, *made.values()],
            *given[0].stride()[:3], call.tokens, call.H, n, SCALE, V=call.V,
        )  # fmt: skip
        return made if call.erases else made | {"dbeta": made["dbeta"].sum(0)}


def _room(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


def errors(sp: Any, seed: int, call: Call) -> dict[str, float]:
    made = torch.Generator().manual_seed(seed)
    given = drawn(call, made)
    want, left = wanted(call, given, made)
    kernels = Kernels(call, given)
    got = kernels.scores() | kernels.grads(left)
    of_scores, of_grads = kernels.sizes["channel_scores"], kernels.sizes["channel_grads"]
    assert [*call.sizes] in of_scores.values() and of_scores == of_grads, (of_scores, of_grads)
    below, above = got["pairs"].double().tril(-1), got["pairs"].double().triu(1).mT
    assert not got["pairs"].diagonal(dim1=2, dim2=3).any()
    got["pairs"] = below + above
    answer = {name: float(relative_error(got[name].double(), x)) for name, x in want.items() if x.isfinite().all()}
    if not want["growth"].isfinite().all():
        answer["growth"] = 0.0 if torch.equal(got["growth"].isinf(), want["growth"].isinf()) else 1.0
    answer["closed"] = float((got["dg"].double() * (given["g"] <= LEAST)).abs().max())  # those have no gradient at all
    return answer


CALLS = {
    "none": Call("none", (CHUNK,)), "mild": Call("mild", (CHUNK, CHUNK), 128, 128, 41),
    "strong": Call("strong", (BLOCK,), T=61, V=128), "very strong": Call("very strong", (TOKEN,), T=61),
    "one is closed": Call("one is closed", (TOKEN,)),
    "one is closed, of 128": Call("one is closed", (TOKEN, CHUNK), 128, 64, 127, kind=BF16),
    "all close": Call("all close", (TOKEN,)),
    "one closes, others are strong": Call("one closes, others are strong", (TOKEN,), V=128),
    "strong in one channel": Call("strong in one channel", (BLOCK,), T=100),
    "early": Call("early", (TOKEN,)), "late": Call("late", (TOKEN,)),
    "tiles differ": Call("tiles differ", (CHUNK, BLOCK), 128, 64, kind=BF16, H=2, group=2),
    "tiles differ much": Call("tiles differ much", (TOKEN, CHUNK), 128, 128, 64),
    "growth": Call("growth", (CHUNK,)), "much growth": Call("much growth", (BLOCK,)),
    "large keys": Call("large keys", (CHUNK,)), "blocks or tokens": Call("blocks or tokens", (BLOCK, TOKEN), 128, T=30),
    "to the middle": Call("to the middle", (CHUNK,), V=128),
    "packed": Call("strong in one channel", (BLOCK,), documents=(70, 0, 1, 64, 30), H=2),
    "packed, very strong": Call("very strong", (TOKEN, TOKEN), 128, 64, documents=(70, 0, 1, 30), H=2, group=2),
    "packed, mild": Call("mild", (CHUNK, CHUNK), 128, 128, documents=(61, 64, 5), H=2, kind=BF16),
    "sequences": Call("tiles differ", (CHUNK, BLOCK), 128, 128, 130, B=2, H=2),
    "beta 0": Call("mild", (CHUNK,), beta=0.0), "beta 1": Call("strong", (BLOCK,), beta=1.0),
    "errors": Call("mild", (CHUNK, CHUNK), 128, 64, errors=True),
    "any keys": Call("mild", (CHUNK, CHUNK), 128, 64, 100, H=2, group=2, norm=True),
    "any keys, packed": Call("tiles differ", (CHUNK, BLOCK), 128, documents=(70, 0, 1, 30), H=2, norm=True),
    "any keys, growth": Call("growth", (CHUNK,), norm=True),
    "any keys, errors": Call("mild", (CHUNK,), errors=True, norm=True),
    "errors, strong": Call("strong", (BLOCK,), T=50, errors=True),
    "strengths": Call("mild", (CHUNK, CHUNK), 128, 64, 100, H=2, group=2, norm=True, erases=True),
    "strengths, strong": Call("strong", (BLOCK,), T=61, V=128, erases=True),
    "strengths, very strong": Call("very strong", (TOKEN, TOKEN), 128, 64, documents=(70, 0, 1, 30), erases=True),
    "strengths, growth": Call("growth", (CHUNK,), erases=True),
    "strengths, large keys": Call("large keys", (CHUNK,), kind=BF16, erases=True, beta=1.7),
    "strengths, errors": Call("mild", (CHUNK,), errors=True, norm=True, erases=True),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_against_float64(name: str) -> None:
    """What is made before walks, and gradients after them, which take N and dV in bfloat16. Of pairs of keys that do
    not decay nothing is rounded."""
    (error,) = run_ranks(errors, 1, random.randrange(2**31), CALLS[name], env=INTERPRETED)
    assert error.pop("closed") == 0.0
    exact = ["decay", "growth", *(["pairs"] if name == "none" else [])]
    bad = {x: y for x, y in error.items() if not y <= (EXACT if x in exact else BOUND)}
    assert not bad, bad


def unlike(sp: Any, seed: int, call: Call, power: int) -> list[str]:
    """Of which inputs gradients are not as many times larger as those of outputs and final states, in any bit; and what
    is written of chunks that are skipped."""
    made = torch.Generator().manual_seed(seed)
    given = drawn(call, made)
    _, left = wanted(call, given, made)
    kernels = Kernels(call, given)
    other = {x: left[x] * 2.0 ** (power * (x not in ("v_new", "entering"))) for x in left}
    want, got = kernels.grads(left), kernels.grads(other)
    found = [name for name in want if not torch.equal(want[name] * 2.0**power, got[name])]
    return found + [name for name, x in kernels.grads(left, skips=True).items() if not x.isnan().all()]


@pytest.mark.parametrize("power", [-60, -20, 24, 50])
def test_gradients_of_any_size(power: int) -> None:
    """Decays hide none of them."""
    call = Call("one closes, others are strong", (TOKEN,), V=128, kind=BF16)
    (found,) = run_ranks(unlike, 1, random.randrange(2**31), call, power, env=INTERPRETED)
    assert not found


def seen(sp: Any, seed: int, kind: str, at: int) -> dict[str, list[int]]:
    """With a gate of NaN of token `at`: tokens of which what is made is wrong or not finite, though they are before it;
    and then those behind it, itself included, of which all is finite."""
    call, made = Call(kind, (TOKEN,)), torch.Generator().manual_seed(seed)
    given = drawn(call, made)
    want = chunk(*(given[name][0, :, 0].double() for name in ("q", "k", "g", "beta")))
    given["g"][0, at, 0, 5] = torch.nan
    got = {name: x[0, 0].double() for name, x in Kernels(call, given).scores().items()}
    found = {}
    for name in ("scores", "reads", "w"):
        right = [relative_error(x[: at + 1], y[: at + 1]) <= 0.1 for x, y in zip(got[name], want[name], strict=True)]
        hidden = [n for n in range(at, C) if got[name][n].isfinite().all()]
        found[name] = [n for n in range(at) if not right[n]] + hidden
    return found | {"writes": [n for n in range(at) if got["writes"][n].isfinite().all()]}


@pytest.mark.parametrize("kind", ["mild", "strong in one channel"])
def test_a_nan_gate_is_seen_behind_it_alone(kind: str) -> None:
    for at in (1, 23, 40, 63):
        (found,) = run_ranks(seen, 1, random.randrange(2**31), kind, at, env=INTERPRETED)
        assert not any(found.values()), (at, found)
