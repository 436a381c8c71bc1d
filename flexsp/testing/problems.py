"""One random problem a public op, solved on one device or cut over ranks, in any dtype: outputs and every gradient.

What the self-test, the GPU tests and the rank tests share. A problem is drawn in float64 on the CPU; `rounded` gives
the same problem with the values that a dtype can hold, so that its float64 oracle is that dtype's reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from flexsp.testing import oracles
from flexsp.testing.compare import DRAWS, Report, judge, low_precision, relative_error, sizes

if TYPE_CHECKING:
    from flexsp.comm.group import SequenceParallel

__all__ = ["OPS", "Problem", "check", "draw", "exact_answers", "merge", "solve", "solve_all"]

Tensors = dict[str, torch.Tensor]
Cotangents = tuple[torch.Tensor, tuple[torch.Tensor, ...]]
# A float32 product on tensor cores (tf32x3) keeps 22 of float32's 24 bits.
_UNIT = {torch.float32: 4.0}
# Gates and parameters that stay in float32 when the op runs in a half precision.
_SINGLE = {"g", "g_gamma", "dt", "A", "D", "dt_bias"}


@dataclass(frozen=True)
class Problem:
    """Inputs of one op: `tokens` [B, T, ...] are cut over ranks, `params` are not; `initial` are the states [N, ...].

    `cu_seqlens` are global boundaries or None; `cotangents` are gradients of the output and of the final states, the
    first for what is checked, all for its yardstick.
    """

    op: str
    tokens: Tensors
    params: Tensors
    initial: tuple[torch.Tensor, ...]
    cu_seqlens: list[int] | None
    cotangents: tuple[Cotangents, ...]

    @property
    def do(self) -> torch.Tensor:
        return self.cotangents[0][0]

    @property
    def T(self) -> int:
        return self.do.shape[1]

    def rounded(self, dtype: torch.dtype) -> Problem:
        """The same problem with inputs that `dtype` represents exactly."""

        def through(name: str, x: torch.Tensor) -> torch.Tensor:
            return x.to(_dtype_of(name, dtype)).to(torch.float64)

        return replace(
            self,
            tokens={name: through(name, x) for name, x in self.tokens.items()},
            params={name: through(name, x) for name, x in self.params.items()},
            initial=tuple(through("A", x) for x in self.initial),
            cotangents=tuple(
                (through("do", do), tuple(through("A", x) for x in dfinal)) for do, dfinal in self.cotangents
            ),
        )


def _dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if name in _SINGLE and dtype != torch.float64 else dtype


def _simple_gla(x: Tensors, initial: Any, common: Mapping[str, Any]) -> Any:
    from flexsp import ops

    return ops.chunk_simple_gla(
        x["q"], x["k"], x["v"], x.get("g"), x.get("g_gamma"), initial_state=initial and initial[0], **common
    )


def _linear_attn(normalize: bool) -> Callable[..., Any]:
    def call(x: Tensors, initial: Any, common: Mapping[str, Any]) -> Any:
        from flexsp import ops

        state = initial if normalize or initial is None else initial[0]
        return ops.chunk_linear_attn(x["q"], x["k"], x["v"], initial_state=state, normalize=normalize, **common)

    return call


def _retention(x: Tensors, initial: Any, common: Mapping[str, Any]) -> Any:
    from flexsp import ops

    return ops.chunk_retention(x["q"], x["k"], x["v"], initial_state=initial and initial[0], **common)


def _lightning(x: Tensors, initial: Any, common: Mapping[str, Any]) -> Any:
    from flexsp import ops

    return ops.chunk_lightning_attn(x["q"], x["k"], x["v"], 1, 4, initial_state=initial and initial[0], **common)


def _mamba2(x: Tensors, initial: Any, common: Mapping[str, Any]) -> Any:
    from flexsp import ops

    return ops.mamba2_ssd(
        x["x"], x["dt"], x["A"], x["B"], x["C"], x["D"], x["dt_bias"], dt_softplus=True,
        initial_state=initial and initial[0], state_v_first=False, **common,
    )  # fmt: skip


OPS: dict[str, Callable[..., Any]] = {
    "simple_gla": _simple_gla,
    "simple_gla_gamma": _simple_gla,
    "linear_attn": _linear_attn(False),
    "linear_attn_normalized": _linear_attn(True),
    "retention": _retention,
    "lightning": _lightning,
    "mamba2": _mamba2,
}


def _oracle(op: str, engine: oracles.Engine, x: Tensors, initial: Any, common: Mapping[str, Any]) -> Any:
    rest: dict[str, Any] = {"cu_seqlens": common["cu_seqlens"], "engine": engine}
    state = initial and initial[0]
    if op == "mamba2":
        rest |= x
        return oracles.mamba2_ssd(dt_softplus=True, initial_state=state, **rest)
    qkv = (x["q"], x["k"], x["v"])
    if op == "linear_attn_normalized":
        return oracles.linear_attn(*qkv, initial_state=initial, **rest)
    if op == "linear_attn":
        return oracles.linear_attn(*qkv, initial_state=state, normalize=False, **rest)
    if op == "retention":
        return oracles.retention(*qkv, initial_state=state, **rest)
    if op == "lightning":
        return oracles.lightning_attn(*qkv, 1, 4, initial_state=state, **rest)
    return oracles.simple_gla(*qkv, x.get("g"), x.get("g_gamma"), initial_state=state, **rest)


def draw(
    op: str,
    *,
    B: int = 1,
    T: int,
    H: int = 2,
    K: int = 16,
    V: int = 16,
    documents: Sequence[int] | None = None,
    seed: int | None = None,
) -> Problem:
    """A fresh random problem; `documents` are lengths (zeros allowed) that sum to T and make it a packed one (B=1)."""
    generator = torch.Generator()
    generator.manual_seed(int(torch.randint(2**31, ())) if seed is None else seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    def gates(*shape: int) -> torch.Tensor:
        return torch.nn.functional.logsigmoid(normal(*shape) * 2 + 2)

    params: Tensors = {}
    if op == "mamba2":
        tokens = {"x": normal(B, T, H, V), "dt": normal(B, T, H), "B": normal(B, T, 1, K), "C": normal(B, T, 1, K)}
        params = {"A": -normal(H).exp(), "D": normal(H), "dt_bias": normal(H)}
    else:
        tokens = {"q": normal(B, T, H, K), "k": normal(B, T, H, K), "v": normal(B, T, H, V)}
        if op == "linear_attn_normalized":
            tokens["q"], tokens["k"] = tokens["q"].abs() + 0.1, tokens["k"].abs() + 0.1
        if op == "simple_gla":
            tokens["g"] = gates(B, T, H)
        if op == "simple_gla_gamma":
            params["g_gamma"] = gates(H) / 16
    bounds = None
    if documents is not None:
        bounds = [0]
        for length in documents:
            bounds.append(bounds[-1] + length)
    N = B if bounds is None else len(bounds) - 1
    shapes = [(N, H, K, V)] + ([(N, 1, H, K)] if op == "linear_attn_normalized" else [])
    initial = [normal(*shape) for shape in shapes]
    if op == "linear_attn_normalized":
        initial[1] = initial[1].abs()
    draws = 4 * DRAWS if params else DRAWS  # the gradient of a parameter is a number a head, and may nearly vanish
    cotangents = tuple((normal(B, T, H, V), tuple(normal(*s) for s in shapes)) for _ in range(draws))
    return Problem(op, tokens, params, tuple(initial), bounds, cotangents)


def solve(problem: Problem, *args: Any, **kwargs: Any) -> Tensors:
    """`solve_all` for the first of the problem's cotangents alone."""
    return solve_all(replace(problem, cotangents=problem.cotangents[:1]), *args, **kwargs)[0]


def solve_all(
    problem: Problem,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
    sp: SequenceParallel | bool = False,
    lengths: Sequence[int] | None = None,
    call: Callable[..., Any] | None = None,
) -> list[Tensors]:
    """Outputs `o`, `final0..` and gradients `d<input>`, `dinitial0..` of the op, for each of the problem's cotangents;
    under `sp` this rank's part of them.

    Args:
        lengths: shard lengths of all ranks, with `sp` only.
        call: used instead of OPS[problem.op], for example that under torch.compile or a checkpoint.
    """
    start, stop, keep_initial, keep_final = 0, problem.T, True, True
    packed = problem.cu_seqlens is not None
    if not isinstance(sp, bool):
        assert lengths is not None
        sp.set_lengths(list(lengths))
        start = sum(lengths[: sp.rank])
        stop = start + lengths[sp.rank]
        keep_initial, keep_final = packed or sp.rank == 0, packed or sp.rank == sp.world_size - 1

    def leaf(name: str, x: torch.Tensor) -> torch.Tensor:
        return x.to(device=device, dtype=_dtype_of(name, dtype)).detach().clone().requires_grad_()

    tokens = {name: leaf(name, x[:, start:stop]) for name, x in problem.tokens.items()}
    params = {name: leaf(name, x) for name, x in problem.params.items()}
    initial = tuple(leaf("A", x) for x in problem.initial) if keep_initial else None
    common = {
        "output_final_state": True,
        "cu_seqlens": torch.tensor(problem.cu_seqlens, device=device) if packed else None,
        "sp": sp,
    }
    o, final = (call or OPS[problem.op])({**tokens, **params}, initial, common)
    finals = () if final is None else final if isinstance(final, tuple) else (final,)
    assert bool(finals) == keep_final, f"final state: expected {keep_final}, got {bool(finals)}"
    leaves = {**tokens, **params}
    leaves |= {f"initial{i}": state for i, state in enumerate(initial or ())}
    found = {"o": o.detach()} | {f"final{i}": state.detach() for i, state in enumerate(finals)}
    answers = []
    for i, (do, dfinal) in enumerate(problem.cotangents):
        gradients = [do[:, start:stop].to(o)]
        gradients += [d.to(state) for d, state in zip(dfinal, finals, strict=bool(finals))]
        torch.autograd.backward([o, *finals], gradients, retain_graph=i + 1 < len(problem.cotangents))
        grads = {f"d{name}": torch.zeros_like(x) if x.grad is None else x.grad for name, x in leaves.items()}
        answers.append(found | grads)
        for x in leaves.values():
            x.grad = None
    return answers


def merge(problem: Problem, parts: Sequence[Tensors]) -> Tensors:
    """One rank's answer from the parts of all ranks: tokens joined, parameters and states summed."""
    cut = {"o", *(f"d{name}" for name in problem.tokens)}
    names = dict.fromkeys(name for part in parts for name in part)
    merged = {}
    for name in names:
        pieces = [part[name].cpu() for part in parts if name in part]
        merged[name] = torch.cat(pieces, dim=1) if name in cut else torch.stack([p.double() for p in pieces]).sum(0)
    return merged


def exact_answers(problem: Problem, device: torch.device | str = "cpu") -> list[Tensors]:
    """The token loop's answers in float64, for each of the problem's cotangents."""
    return solve_all(problem, device=device, call=partial(_oracle, problem.op, oracles.token_loop))


def check(
    problem: Problem,
    dtype: torch.dtype,
    found: Sequence[Tensors],
    *,
    one_rank: Tensors | None = None,
    oracle: Sequence[Tensors] | None = None,
    device: torch.device | str = "cpu",
    oracle_device: torch.device | str = "cpu",
) -> list[Report]:
    """Reports of every tensor of `found` against the float64 token loop, by the rule of flexsp.testing.compare.

    `problem` must be `rounded(dtype)`; `found` may lack its last cotangents. The yardstick is the low-precision
    reference; with `one_rank`, the same op's answer without ranks, whichever of the two is further from the oracle; in
    float32 four times that, since the kernels multiply in tf32x3 there. `oracle` replaces the token loop's answers,
    whose steps are slow where T is large; `device` is where the low-precision reference runs, `oracle_device` where the
    token loop does.
    """
    want = list(exact_answers(problem, oracle_device) if oracle is None else oracle)
    low: list[Tensors] = []
    if dtype != torch.float64:
        low = solve_all(problem, dtype, device, call=partial(_oracle, problem.op, low_precision))
    size = sizes(want)
    credit = {name: relative_error(x, want[0][name], size[name]) for name, x in (one_rank or {}).items()}
    reports = judge(found, want, low, credit, _UNIT.get(dtype, 1.0))
    return [replace(report, name=f"{problem.op} {report.name}") for report in reports]
