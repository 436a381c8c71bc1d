"""How close a kernel must come to the float64 oracle: one rule instead of hand-tuned tolerances.

The error of an op (relative, in the 2-norm, outputs, final states and every gradient alike) may be at most twice the
error of a low-precision reference plus one rounding: of the result, or of float32 arithmetic where that is coarser.
The reference is the same mathematics with the operands of matrix products rounded to the inputs' dtype and float32
accumulation, in the quadratic (attention) form, which shares nothing with the chunked kernels; for delta rules, which
have no such form, chunk by chunk in float32, with no code of theirs. NaN and inf never pass.

The reference is near the oracle by luck where a tensor has few numbers, or few independent ones: gradients of gates are
running sums, those of parameters sums over all tokens. Such tensors are judged by the largest error that the reference
makes in the same call and for a few more cotangents, with inputs that are a rounding off (a sum, or a quotient, may
magnify that), and measured against their size for all of these, since the terms of one sum may cancel by chance.

A tensor of many numbers has few independent ones where few rows outweigh the others. What gates leave of a state
is one: the row that decays least has one factor, and one error of it. Such tensors are judged by their own
largest error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flexsp.comm.derivatives import first_only
from flexsp.testing.delta_chunks import delta_chunks
from flexsp.testing.oracles import Engine, token_loop

__all__ = [
    "DRAWS", "Report", "RoundedProducts", "a_rounding_off", "assert_close", "check_functions", "check_op",
    "described_difference", "judge", "low_precision", "relative_error", "sizes",
]  # fmt: skip

FLOAT64_BOUND = 4096 * torch.finfo(torch.float64).eps  # the oracle itself rounds: T operations in another order
FLOAT32_ROUNDING = torch.finfo(torch.float32).eps
FEW = 1024
ROWS = 32  # of as many errors each, one sum of squares in 10^4 is more than 4 times another
DRAWS = 4
MIN_LOG_DECAY = -104.0

WIDE = ("g", "g_gamma", "initial_state", "dt", "A", "A_log", "D", "dt_bias")
"""Arguments that stay float32 when the op runs in float16 or bfloat16."""


@dataclass(frozen=True)
class Report:
    """Errors of one tensor against the oracle."""

    name: str
    error: float
    low_error: float
    rounding: float
    where: str = ""

    @property
    def bound(self) -> float:
        return 2 * self.low_error + self.rounding

    @property
    def ok(self) -> bool:
        return math.isfinite(self.bound) and self.error <= self.bound

    def __str__(self) -> str:
        parts = f"2 x {self.low_error:.2e} + {self.rounding:.2e}"
        return f"{self.name}: error {self.error:.2e}, bound {self.bound:.2e} = {parts}{self.where}"


def relative_error(got: torch.Tensor, want: torch.Tensor, size: float = 0.0) -> float:
    """||got - want|| / ||want|| (absolute where want is zero in float32); inf where a value is not finite.

    ``size`` is what ||want|| is taken for where it is smaller.
    """
    if got.shape != want.shape:
        raise AssertionError(f"shape {list(got.shape)} instead of {list(want.shape)}")
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    if not (bool(torch.isfinite(got).all()) and bool(torch.isfinite(want).all())):
        return float("inf")
    norm = max(want.norm().item(), size)
    return (got - want).norm().item() / (norm if norm > torch.finfo(torch.float32).tiny else 1.0)


def assert_close(
    name: str, got: torch.Tensor, oracle: torch.Tensor, low: torch.Tensor | None = None, low_error: float = 0.0,
    size: float = 0.0,
) -> Report:  # fmt: skip
    """Raise AssertionError unless ``got`` obeys the rule.

    ``low`` is the low-precision result (None for float64 results only); ``low_error`` the least error that it is
    credited with; ``size`` as in `relative_error`.
    """
    report = _report(name, got, oracle, low, low_error, size)
    _raise_unless_ok([report])
    return report


def described_difference(got: torch.Tensor, want: torch.Tensor, least: float = 0.0, shown: int = 6) -> str:
    """Where two tensors differ by more than ``least``, and by what: what a rare failure leaves to go by."""
    got, want = got.detach().cpu(), want.detach().cpu().to(torch.float64)
    off = (got.double() - want).abs().nan_to_num(nan=torch.inf)
    at = (off > least).nonzero()
    if not len(at):
        return ""
    ends = [f"{a}..{b}" for a, b in zip(at.amin(0).tolist(), at.amax(0).tolist(), strict=True)]
    worst = off.flatten().topk(min(shown, len(at))).indices.tolist()
    places = [tuple(int(i) for i in torch.unravel_index(torch.tensor(k), off.shape)) for k in worst]
    values = ", ".join(f"{got[place].item():.8g} for {want[place].item():.8g} at {[*place]}" for place in places)
    return f"; {len(at)} of {off.numel()} differ by over {least:.1e}, within [{', '.join(ends)}]: {values}"


def _report(
    name: str, got: torch.Tensor, oracle: torch.Tensor, low: torch.Tensor | None, low_error: float, size: float
) -> Report:
    error = relative_error(got, oracle, size)
    if low is None:
        if got.dtype != torch.float64:
            raise ValueError(f"low: expected the low-precision result for {got.dtype}, got None")
        return Report(name, error, 0.0, FLOAT64_BOUND)
    rounding = max(relative_error(oracle.to(got.dtype), oracle, size), FLOAT32_ROUNDING)
    found = Report(name, error, max(low_error, relative_error(low, oracle, size)), rounding)
    if found.ok:
        return found
    usual = 4 * found.bound * float(oracle.abs().max() if oracle.numel() else 0.0)
    return replace(found, where=described_difference(got, oracle, usual))


def _raise_unless_ok(reports: Sequence[Report]) -> None:
    if bad := [str(report) for report in reports if not report.ok]:
        raise AssertionError("\n".join(bad))


def check_op(
    op: Callable[..., Any],
    oracle: Callable[..., Any],
    inputs: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    op_kwargs: Mapping[str, Any] | None = None,
    wide: tuple[str, ...] = WIDE,
    arrange: Callable[[torch.Tensor], torch.Tensor] | None = None,
    gradients: bool = True,
    seed: int = 0,
    low_engine: Engine | None = None,
    draws: int = DRAWS,
    credit: float = 0.0,
) -> list[Report]:
    """Compare ``op`` with its token-loop ``oracle``: outputs, final states, all gradients for random cotangents.

    Args:
        op: called as ``op(**inputs, output_final_state=True, **op_kwargs)``; returns (o, final state or pair).
        oracle: one of `oracles`, called as ``oracle(**inputs, engine=...)``.
        inputs: the op's arguments. Floating tensors (or tuples of them) are rounded to ``dtype``, those named in
            ``wide`` to at least float32; everything computed sees the rounded values. All get gradients.
        arrange: changes the strides, not the values, of each input tensor before the op sees it.
        gradients: False compares the forward pass only.
        low_engine: what makes the low-precision reference, `low_precision` unless the op is another algorithm.
        draws: how many cotangents the reference answers. The op answers the first one; and the first `DRAWS` where a
            tensor of few numbers is nearer to its bound than to the oracle, so that luck with one decides nothing.
        credit: an error that the low-precision reference is credited with in every tensor.

    Returns:
        One Report a tensor.

    Raises:
        AssertionError: listing every tensor outside its bound, or naming one of another dtype than the reference's.
    """
    rounded = {name: _map(x, partial(_round, dtype=dtype, wide=name in wide)) for name, x in inputs.items()}
    op_kwargs = {"output_final_state": True, **(op_kwargs or {})}

    runs = partial(_run, inputs=rounded, gradients=gradients)
    seeds = [seed] if dtype == torch.float64 else [seed + i for i in range(draws)]
    answers = partial(runs, lambda **kw: op(**kw, **op_kwargs), None, device, arrange)
    gots = answers(seeds[:1])
    want = runs(lambda **kw: oracle(**kw, engine=token_loop), torch.float64, "cpu", None, seeds)
    lows: list[dict[str, torch.Tensor]] = []
    if dtype != torch.float64:
        engine = low_engine or low_precision
        reference = partial(oracle, engine=engine)
        lows = runs(reference, None, "cpu", None, seeds[:1])
        made = torch.Generator().manual_seed(seed)
        for each in seeds[1:]:
            off = {name: _map(x, partial(a_rounding_off, made=made)) for name, x in rounded.items()}
            lows += _run(reference, None, "cpu", None, [each], inputs=off, gradients=gradients)
    for name, x in (lows or want)[0].items():
        if gots[0][name].dtype != x.dtype:
            raise AssertionError(f"{name}: {gots[0][name].dtype} instead of {x.dtype}")
    credits = _credits(lows, want) if lows else {}
    credits = {name: max(credits.get(name, 0.0), credit) for name in want[0]}
    reports, few = _judged(gots, want, lows, credits), _few(want[0])
    if lows and any(report.name in few and not 2 * report.error <= report.bound for report in reports):
        reports = _judged(answers(seeds[:DRAWS]), want, lows, credits)
    _raise_unless_ok(reports)
    return reports


def _credits(low: Sequence[Mapping[str, torch.Tensor]], want: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, float]:
    """Errors that the reference is credited with, by name: the largest of any tensor in any answer where there are few
    numbers, its own largest one where they lie in few rows."""
    size = sizes(want)
    errors = {
        name: [relative_error(a[name], b[name], size[name]) for a, b in zip(low, want, strict=True)] for name in want[0]
    }
    # Errors near 1 are gradients that vanish, such as a closed gate's, and say nothing about the others.
    worst = max((error for each in errors.values() for error in each if error < 0.1), default=0.0)
    own = {name: max(errors[name]) for name, x in want[0].items() if _rows(x) < ROWS}
    return own | dict.fromkeys(_few(want[0]), worst)


def _rows(x: torch.Tensor) -> float:
    """In how many rows the numbers are: all rows if they are equally large, one if it outweighs the others by far."""
    squares = x.double().square().sum(-1)
    return float(squares.sum() ** 2 / squares.square().sum().clamp(min=torch.finfo(torch.float64).tiny))


def check_functions(
    got: Sequence[Mapping[str, torch.Tensor]], want: Sequence[Mapping[str, torch.Tensor]],
    low: Sequence[Mapping[str, torch.Tensor]], credit: float | Mapping[str, float] = 0.0,
) -> list[Report]:  # fmt: skip
    """Compare what kernels make of PyTorch functions with an oracle: outputs, final states, gradients by name.

    Args:
        got: what the kernels give, for one pair of cotangents or more.
        want: the oracle's, for the cotangents of ``got`` and then for a few more, `DRAWS` in all.
        low: what the functions give in PyTorch under `RoundedProducts`, for the same cotangents.
        credit: an error that the reference is credited with in every tensor, or in those of these names.

    Raises:
        AssertionError: listing every tensor outside its bound.
    """
    credits = {name: credit if isinstance(credit, float) else credit.get(name, 0.0) for name in want[0]}
    reports = judge(got, want, low, credits)
    _raise_unless_ok(reports)
    return reports


def judge(
    got: Sequence[Mapping[str, torch.Tensor]], want: Sequence[Mapping[str, torch.Tensor]],
    low: Sequence[Mapping[str, torch.Tensor]], credit: Mapping[str, float], factor: float = 1.0,
) -> list[Report]:  # fmt: skip
    """Every tensor by the rule, from answers for several cotangents; ``low`` is empty for float64.

    ``got`` may be for the first cotangents alone; errors of tensors of few numbers are averaged over them.

    Every tensor is credited with the largest error that the reference makes in it for any of the cotangents, since a
    sum over all tokens may nearly vanish for some; one of few numbers with the largest error of all tensors but
    parameters, which are summed over tokens, and with four roundings, since a few may be right by chance; and with
    ``credit`` by its name. ``factor`` is how much coarser the kernels' arithmetic is than the reference's.
    """
    if not low:
        return _judged(got, want, (), {})
    tiny = torch.finfo(torch.float32).tiny
    size = sizes(want)
    pairs = list(zip(low, want, strict=True))
    least = {
        name: max((a[name].cpu().double() - b[name].cpu().double()).norm().item() for a, b in pairs)
        / (size[name] if size[name] > tiny else 1.0)
        for name in size
    }
    worst = max((least[name] for name, x in want[0].items() if x.dim() > 2 and least[name] < 0.1), default=0.0)
    least |= {name: max(least[name], worst, 4 * FLOAT32_ROUNDING) for name in _few(want[0])}
    least = {name: factor * max(error, credit.get(name, 0.0)) for name, error in least.items()}
    return _judged(got, want, low, least)


def _few(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    return [name for name, x in tensors.items() if x.numel() < FEW or x.dim() < 4]


def _pooled(draws: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The first draw; of tensors of few numbers those of all draws in one, so that their errors are averaged."""
    together = {name: torch.stack([draw[name] for draw in draws]) for name in _few(draws[0])}
    return {name: together.get(name, x) for name, x in draws[0].items()}


def sizes(want: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, float]:
    """The norms of the first answer's tensors; of those of few numbers, the root mean square over all cotangents."""
    norms = {name: x.norm().item() for name, x in want[0].items()}
    few = {name: sum(x[name].norm().item() ** 2 / len(want) for x in want) ** 0.5 for name in _few(want[0])}
    return norms | few


def _judged(
    got: Sequence[Mapping[str, torch.Tensor]], want: Sequence[Mapping[str, torch.Tensor]],
    low: Sequence[Mapping[str, torch.Tensor]], least: Mapping[str, float],
) -> list[Report]:  # fmt: skip
    """Every tensor by the rule, each argument by cotangents, of which `got` may lack the last ones; `least` are errors
    that the low-precision result is credited with, by name."""
    assert got[0].keys() == want[0].keys(), f"{sorted(got[0])} instead of {sorted(want[0])}"
    n, size = len(got), sizes(want)
    size |= {name: size[name] * n**0.5 for name in _few(want[0])}
    found, exact, near = _pooled(got), _pooled(want[:n]), _pooled(low[:n]) if low else {}
    return [
        _report(name, x, exact[name], near.get(name), least.get(name, 0.0), size[name])
        for name, x in found.items()
    ]


def _round(x: torch.Tensor, dtype: torch.dtype, wide: bool) -> torch.Tensor:
    return x.to(torch.promote_types(dtype, torch.float32) if wide else dtype) if x.is_floating_point() else x


def a_rounding_off(x: torch.Tensor, made: torch.Generator, dtype: torch.dtype | None = None) -> torch.Tensor:
    """x with relative errors whose deviation is the unit roundoff of ``dtype`` (x's if None)."""
    if not x.is_floating_point():
        return x
    roundoff = torch.finfo(dtype or x.dtype).eps / 2
    return (x.cpu() * (1 + roundoff * torch.randn(x.shape, generator=made))).to(x)


def _map(x: Any, f: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(x, torch.Tensor):
        return f(x)
    return tuple(_map(y, f) for y in x) if isinstance(x, tuple) else x


def _leaves(prefix: str, x: Any) -> dict[str, torch.Tensor]:
    if isinstance(x, torch.Tensor):
        return {prefix: x} if x.is_floating_point() else {}
    if isinstance(x, (tuple, list)):
        return {name: t for i, y in enumerate(x) for name, t in _leaves(f"{prefix}[{i}]", y).items()}
    return {}


def _run(
    f: Callable[..., Any],
    dtype: torch.dtype | None,
    device: torch.device | str,
    arrange: Callable[[torch.Tensor], torch.Tensor] | None,
    seeds: list[int],
    *,
    inputs: Mapping[str, Any],
    gradients: bool,
) -> list[dict[str, torch.Tensor]]:
    """Named outputs and gradients of f, for each seed of cotangents; ``dtype`` None keeps the dtypes of the inputs."""

    def prepare(x: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point():
            return x.to(device)
        x = x.to(device=device, dtype=dtype)
        return (x.clone() if arrange is None else arrange(x)).detach().requires_grad_(gradients)

    args = {name: _map(x, prepare) for name, x in inputs.items()}
    outputs = _leaves("out", f(**args))
    if not gradients:
        return [outputs for _ in seeds]
    leaves = {n: t for name, x in args.items() for n, t in _leaves(f"d{name}", x).items()}
    results = []
    for i, seed in enumerate(seeds):
        generator = torch.Generator().manual_seed(seed)
        random = [torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in outputs.values()]
        # Rounded to bfloat16, a cotangent is the same number in every dtype that is compared.
        cotangents = [c.bfloat16().to(t) for c, t in zip(random, outputs.values(), strict=True)]
        again = i + 1 < len(seeds)
        grads = torch.autograd.grad(list(outputs.values()), list(leaves.values()), cotangents, retain_graph=again)
        results.append({**{n: t.detach() for n, t in outputs.items()}, **dict(zip(leaves, grads, strict=True))})
    return results


# ------------------------------------------------------------------------------------- the low-precision reference


class RoundedProducts(TorchDispatchMode):
    """Rounds the operands of matrix products to a dtype, or to the 22 bits that three tf32 products for one keep of
    float32 ("tf32x3"): the low-precision reference of functions in PyTorch."""

    def __init__(self, dtype: torch.dtype | Literal["tf32x3"]) -> None:
        super().__init__()
        self.dtype = dtype

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.dtype, torch.dtype):
            return x.to(self.dtype).to(x.dtype)
        large = _tf32(x)
        return large + _tf32(x - large)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.mv.default):
            args = [self._rounded(x) for x in args]
        return func(*args, **(kwargs or {}))


def _tf32(x: torch.Tensor) -> torch.Tensor:
    """float32 x rounded to the 10 bits of mantissa that tf32 has."""
    return ((x.float().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32).to(x.dtype)


def low_precision(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    *,
    scale: float,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    reads: torch.Tensor | None = None,
    steps: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`token_loop` as matrix products with operands in q's dtype; for a delta rule `delta_chunks` in float32.

    Quadratic form for each document, float32 accumulation and elementwise work, o in v's dtype, states float32; the
    backward pass by the formulas of docs/math.md, section 5, with the same rounding. Gates are summed as integers plus
    remainders, so that a gate of -104 costs the sums after it no precision.
    """
    if beta is not None:
        return delta_chunks(
            q.float(), k.float(), v, g, scale=scale, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens,
            reads=reads, steps=steps,
        )  # fmt: skip
    B, T, H, K = q.shape
    V = v.shape[-1]
    bounds = [0, T] if cu_seqlens is None else cu_seqlens.tolist()
    if initial_state is None:
        n = B if cu_seqlens is None else len(bounds) - 1
        initial_state = torch.zeros(n, H, K, V, dtype=torch.float32, device=q.device)
    if g is None:
        g = torch.zeros(B, T, H, dtype=torch.float32, device=q.device)
    outputs, finals = [], []
    for n, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        here = [x[:, begin:end].transpose(1, 2) for x in (q, k, v, g)]
        state = initial_state if cu_seqlens is None else initial_state[n : n + 1]
        out, final = _LowPrecisionFunction.apply(*here, state, scale)
        outputs.append(out.transpose(1, 2))
        finals.append(final)
    return torch.cat(outputs, dim=1), torch.cat(finals)


class _LowPrecisionFunction(torch.autograd.Function):
    """q, k [B, H, T, K], v [B, H, T, V], g [B, H, T], state [B, H, K, V] of one document."""

    @staticmethod
    def forward(ctx, q, k, v, g, state, scale):  # type: ignore[no-untyped-def]
        def dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a.to(q.dtype).float() @ b.to(q.dtype).float()

        gates = g.float().clamp(min=MIN_LOG_DECAY)
        whole, part = gates.round().cumsum(-1), (gates - gates.round()).cumsum(-1)
        causal = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
        log_decay = (whole[..., :, None] - whole[..., None, :]) + (part[..., :, None] - part[..., None, :])
        decay = log_decay.masked_fill(~causal, float("-inf")).exp()
        since_start = (whole + part).exp()[..., None]
        to_end = decay[..., -1, :, None] if g.shape[-1] else since_start
        total = since_start[..., -1:, :] if g.shape[-1] else 1.0
        scores = scale * dot(q, k.mT) * decay
        o = dot(scores, v) + scale * since_start * dot(q, state)
        final = total * state + dot((k * to_end).mT, v)
        ctx.save_for_backward(q, k, v, g, state, scores, decay, since_start, to_end, final)
        ctx.dot, ctx.scale, ctx.total = dot, scale, total
        return o.to(v.dtype), final

    @staticmethod
    def backward(ctx, do, dfinal):  # type: ignore[no-untyped-def]
        first_only("the low-precision reference", "the token loop has them")
        q, k, v, g, state, scores, decay, since_start, to_end, final = ctx.saved_tensors
        dot, scale = ctx.dot, ctx.scale
        dscores = scale * dot(do, v.mT) * decay
        dq = dot(dscores, k) + scale * since_start * dot(do, state.mT)
        dk = dot(dscores.mT, q) + to_end * dot(v, dfinal.mT)
        dv = dot(scores.mT, do) + dot(k * to_end, dfinal)
        dstate = ctx.total * dfinal + dot((scale * q * since_start).mT, do)
        dg = (q * dq - k * dk).sum(-1).flip(-1).cumsum(-1).flip(-1) + (dfinal * final).sum((-1, -2))[..., None]
        dg = dg.masked_fill(g < MIN_LOG_DECAY, 0.0)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dg.to(g.dtype), dstate, None
