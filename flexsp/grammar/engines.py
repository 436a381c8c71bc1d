"""`Call`, the arguments of a transition of several steps, and the engines and programs that its steps run on."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from flexsp.comm.group import SequenceParallel
from flexsp.comm.tracing import constant_in_graphs
from flexsp.compiler import LinearAttention, torch_compile
from flexsp.grammar import programs
from flexsp.grammar.turned import THETA
from flexsp.ops import _programs as vectors
from flexsp.ops import _validate as check
from flexsp.ops._rows import Turns, on_engine

__all__ = ["Call", "compiled", "on_diagonal", "running_weights", "runs_compiled"]

Tensor = torch.Tensor
Optional = torch.Tensor | None


class Call(NamedTuple):
    """A call's tensors, checked and with features, and its options.

    Attributes:
        q, k: [B, T, H, K], with several rows a token [B, T, R, H, K]; not scaled.
        v: [B, T, H, V].
        gate: log gates [B, T, H] or [B, T, H, K] in the accumulation dtype, at least so large that differences of
            their sums keep what follows; None where nothing decays.
        column: step sizes [B, T, H], factors of what a token writes, or None.
        turns, own: where q and k were turned by running sums of angles that have gradients, these and scale <q, k>
            [B, T, H]; see `on_diagonal`. Else None.
        theta: radians that each token adds [B, T, H, K/2], where q and k were turned by their running sums, not for
            autograd, and the program gives the gradient (flexsp/grammar/turned.py). Else None.
        given: what else the call brings, by name.
        initial: [N, H, K + rows, V + columns], or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Optional
    column: Optional
    given: dict[str, Tensor]
    scale: float
    initial: Optional = None
    want_final: bool = False
    cu_seqlens: Optional = None
    group: SequenceParallel | None = None
    fallback: str | None = None
    turns: Turns | None = None
    own: Optional = None
    theta: Optional = None

    @property
    def wide(self) -> torch.dtype:
        """The accumulation dtype."""
        return check.accumulation_dtype(self.q)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """H, K and V."""
        return self.q.shape[-2], self.q.shape[-1], self.v.shape[-1]

    @property
    def state(self) -> Optional:
        """The initial state alone, [N, H, K, V]."""
        _, K, V = self.sizes
        return None if self.initial is None else self.initial[..., :K, :V].contiguous()

    @property
    def last_column(self) -> Optional:
        """The last column of the initial state beside its rows, [N, H, K]."""
        return None if self.initial is None else self.initial[..., : self.sizes[1], -1]

    @property
    def values(self) -> Tensor:
        """v times the step sizes, in the accumulation dtype."""
        v = self.v.to(self.wide)
        return v if self.column is None else v * self.column.unsqueeze(-1)

    @property
    def further(self) -> dict[str, Tensor]:
        """The log gates, and theta, under their names in programs."""
        gates = {} if self.gate is None else {"g" if self.gate.dim() == 3 else "gk": self.gate}
        return gates if self.theta is None else gates | {THETA: self.theta}


def on_diagonal(
    call: Call, q: Tensor, k: Tensor, v: Tensor, initial: Optional, op: str, turns: Turns | None = None
) -> tuple[Tensor, Optional]:  # fmt: skip
    """S_t = e^{g_t} S_{t-1} + sum over rows of k_t v_t^T, o_t = scale q_t S_t, for rows [B, T, R, H, *] in one dtype.

    The diagonal engine runs it; with a gate for each channel (then R is 1) a compiled program does. turns: by
    which the caller has rotated pairs of channels of q and k, not for autograd: the engine gives the gradient. Then o_t
    lacks what token t itself writes, in which turns cancel, but not what rounds it.
    """
    if call.gate is not None and call.gate.dim() == 4:
        assert turns is None, "such gates do not commute with turns"
        q, k, v = (x.squeeze(2) for x in (q, k, v))
        o, final = compiled(call, "linear", {"q": q, "k": k, "v": v}, initial)
        return o.unsqueeze(2), final
    for name, x in (("q", q), ("v", v)):
        most = check.MAX_VALUE_DIM if name == "v" else check.MAX_HEAD_DIM
        if x.shape[-1] > most:
            check.fail(name, f"a last dimension of 1..{most}", x.shape[-1])
    N = check.number_of_states(q.shape[0], call.cu_seqlens)
    check.same_call(call.group, op, q, *q.shape[2:], v.shape[-1], N, call.cu_seqlens is None)
    return on_engine(
        q, k, v, call.gate, scale=call.scale, initial=initial, want_final=call.want_final, cu_seqlens=call.cu_seqlens,
        sp=call.group, op=op, turns=turns, strict=turns is not None,
    )  # fmt: skip


def running_weights(call: Call, x: Tensor, initial: Optional, op: str) -> tuple[Tensor, Optional]:
    """The vector state P_t = e^{g_t} P_{t-1} + x_t for x [B, T, H, K]: P of all tokens, and final states [N, H, K]."""
    gate = torch.zeros_like(x[..., 0]) if call.gate is None else call.gate
    gate = gate if gate.dim() == 4 else gate.unsqueeze(-1).expand(x.shape)
    group: Any = False if call.group is None else call.group
    start = None if initial is None else initial.flatten(1)
    options = vectors.Call(start, True, cu_seqlens=call.cu_seqlens, sp=group)
    o, final = vectors.run_vector(op, x.flatten(2), gate.flatten(2), options)
    return o.unflatten(2, x.shape[2:]), None if final is None else final.unflatten(1, x.shape[2:])


def compiled(
    call: Call, name: str, tokens: dict[str, Tensor], initial: Optional, **options: float
) -> tuple[Tensor, Optional]:
    """Runs the program ``name`` of `flexsp.grammar.programs` with the call's gates. ``options`` are its numbers."""
    tokens = tokens | call.further
    key = _key(call, name, tokens, options)
    if torch.compiler.is_compiling():
        made, inputs = _made_for_graphs(*key)
        return torch_compile.call(made, [tokens[x] for x in inputs], initial, call.cu_seqlens, call.group)
    group = False if call.group is None else call.group
    return _program(*key)(prev_s=initial, cu_seqlens=call.cu_seqlens, sp=group, **tokens)


def runs_compiled(call: Call, name: str, tokens: dict[str, Tensor], **options: float) -> str:
    """A sentence that says what `compiled` runs for such tensors."""
    tokens = tokens | call.further
    return _program(*_key(call, name, tokens, options)).runs(sp=False, **tokens)


def _key(call: Call, name: str, tokens: dict[str, Tensor], options: dict[str, float]) -> tuple[Any, ...]:
    further = tuple(x for x in ("column", "g", "gk", THETA) if x in tokens)
    return name, (*call.sizes, call.scale, further, call.fallback), tuple(options.items())


def _program(name: str, sizes: tuple[Any, ...], options: tuple[tuple[str, float], ...]) -> LinearAttention:
    made: LinearAttention = getattr(programs, name)(*sizes, **dict(options))
    return made


@constant_in_graphs
def _made_for_graphs(*key: Any) -> tuple[str, tuple[str, ...]]:
    """The program's name in graphs and the names of its inputs, found while torch.compile traces."""
    return torch_compile.kept(lambda: _program(*key))
