"""Transitions of several steps (docs/variants.md): each one knows its inputs, its state, and how to run itself.

All of the state of a head travels as one matrix [N, H, K + rows, V + columns]: the state first, columns to its right.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
from torch.nn.functional import pad

from flexsp.grammar.decay import Decay
from flexsp.grammar.engines import Call, compiled, on_diagonal, running_weights, runs_compiled
from flexsp.grammar.feature_map import FeatureMap
from flexsp.kernels.rotary import rotate
from flexsp.ops import _delta as delta
from flexsp.ops import _validate as check
from flexsp.ops import chunk_gated_delta_product
from flexsp.ops._rows import Turns, of_first_rows, own_products, products, value_rows
from flexsp.scan.exchange import add_backward_dependency
from flexsp.scan.tokens import following, last, previous, running_sum, without_tail

__all__ = [
    "Contrastive", "DeltaRows", "DeltaSteps", "Information", "Objective", "Rows", "Spectral", "TemporalDifference",
    "Transition",
]  # fmt: skip

Tensor = torch.Tensor
Optional = torch.Tensor | None
Shapes = dict[str, tuple[tuple[int, ...], str]]
_TURN = 2 * math.pi


@dataclass(frozen=True)
class Transition:
    """A transition. `inputs` are names of tensors that a call must give for it; `rank` is the rows of a token's q and
    k, `steps` those of its k and v, of which each changes the state in turn."""

    kind: str
    inputs: tuple[str, ...] = ()
    rank: int = 1
    steps: int = 1

    @property
    def turns_with_keys(self) -> bool:
        """Whether one rotation of all queries and keys turns the rows of the state and does nothing else."""
        return True

    def engine(self, decay: Decay, features: FeatureMap, masked: bool) -> Objective | None:
        """The transition itself if it takes several steps beside these components, None if a single program runs it."""
        if decay.trapezoidal:
            self._refuse(f"decay.{decay.kind}(discretization='trapezoidal')")
        return None

    def _refuse(self, what: str, why: str = "") -> NoReturn:
        raise NotImplementedError(f"transition.{self.kind} with {what} is not there{why}")


@dataclass(frozen=True)
class Objective(Transition):
    """A transition of several steps."""

    def engine(self, decay: Decay, features: FeatureMap, masked: bool) -> Objective | None:
        super().engine(decay, features, masked)
        if masked:
            self._refuse("custom_mask")
        return self

    def shapes(self, q: Tensor, v: Tensor) -> Shapes:
        """Shapes of the transition's inputs, as numbers and as text."""
        return {name: ((*q.shape[:2], q.shape[-2]), "[B, T, H]") for name in self.inputs}

    def rows_and_columns(self, K: int, V: int) -> tuple[int, int]:
        """Sizes of the matrix that stores a head's state with all its parts."""
        return K, V

    def check(self, q: Tensor, v: Tensor) -> None:
        """Raises ValueError for sizes that the transition does not take."""

    def explain(self) -> str:
        """What runs, and what the state is."""
        raise NotImplementedError

    def runs(self, call: Call) -> str:
        """A sentence that says what runs this call."""
        raise NotImplementedError

    def run(self, call: Call) -> tuple[Tensor, Optional]:
        """Outputs in v's dtype, and final states or None."""
        raise NotImplementedError


def _diagonal_runs(call: Call) -> str:
    kernels = call.q.is_cuda and call.q.dtype != torch.float64
    return f"runs {'the kernels of chunk_simple_gla' if kernels else 'its reference in PyTorch'}"


@dataclass(frozen=True)
class Rows(Objective):
    """One gradient step with several rows a token, the trapezoidal rule or a diagonal preconditioner.

    With the weights gamma_t = l_t dt_t of a token's own products and eta_t = (1 - l_t) dt_t of those before it
    (Mamba-3; dt_t = 1 without steps; gamma_t = dt_t and eta_t = 0 by Euler's rule), summed over the rows j:

        S_t = e^{g_t} (S_{t-1} + eta_t k_{t-1} x_{t-1}^T) + gamma_t k_t x_t^T
        P_t = e^{g_t} (P_{t-1} + eta_t k_{t-1}^2) + gamma_t k_t^2
        o_t = scale q_t S_t, preconditioned at reading scale (q_t / (P_t + eps)) S_t
    """

    eps: float | None = None
    at: str = "read"
    trapezoidal: bool = False

    @property
    def turns_with_keys(self) -> bool:
        return self.eps is None  # squares of keys do not turn

    def engine(self, decay: Decay, features: FeatureMap, masked: bool) -> Objective | None:
        if self.eps is None and self.rank == 1 and not decay.trapezoidal:
            return None
        if masked:
            self._refuse("custom_mask" if self.rank == 1 else f"mimo_rank={self.rank} and custom_mask")
        if decay.vector and self.rank > 1:
            self._refuse(f"mimo_rank={self.rank} and a gate for each key channel")
        if self.at == "write" and decay.trapezoidal:
            self._refuse(f"at='write' and decay.{decay.kind}(discretization='trapezoidal')")
        return replace(self, trapezoidal=decay.trapezoidal)

    def shapes(self, q: Tensor, v: Tensor) -> Shapes:
        H, V = q.shape[-2], v.shape[-1]
        found = super().shapes(q, v)
        return found | ({"mimo_x": ((H, self.rank, V), "[H, R, V]")} if self.rank > 1 else {})

    def rows_and_columns(self, K: int, V: int) -> tuple[int, int]:
        return K + self.trapezoidal, V + self.trapezoidal * self.rank + (self.eps is not None)

    def explain(self) -> str:
        kept = ["K x V"]
        kept += [f"the last {self.rank} key(s) as columns"] if self.trapezoidal else []
        kept += ["P as the last column"] if self.eps is not None else []
        kept += ["the last value as a row"] if self.trapezoidal else []
        first = ""
        if self.eps is not None:
            what = "q / (P + eps)" if self.at == "read" else "eta k / (P + eps)"
            first = f"P as by chunk_hgrn, then {what} "
        rows = f", {self.rank} row(s) a token" if self.rank > 1 or self.trapezoidal else ""
        return (
            f"runs {first}on the diagonal engine (flexsp.ops.chunk_simple_gla){rows}, with a gate a channel on "
            f"flexsp/grammar/programs.py; the state holds {', '.join(kept)}"
        )

    def runs(self, call: Call) -> str:
        if call.gate is None or call.gate.dim() == 3:
            return _diagonal_runs(call)
        return runs_compiled(call, "linear", {"q": call.q, "k": call.k, "v": call.v})

    def run(self, call: Call) -> tuple[Tensor, Optional]:
        reads, keys = (x.to(call.wide) if self.rank > 1 else x.to(call.wide).unsqueeze(2) for x in (call.q, call.k))
        factors, start, P = call.given.get("mimo_x"), call.state, None
        x = value_rows(call.v.to(call.wide), factors)
        gamma, eta = self._weights(call)
        last_keys, last_v = self._before(call)
        written = keys
        if self.eps is not None:
            sums, P = self._sums(call, keys, gamma, eta, last_keys)
            over = (1 / (sums + self.eps)).unsqueeze(2)
            if self.at == "read":
                reads = reads * over
            else:
                written = keys * over * call.given["eta"].to(call.wide)[:, :, None, :, None]
        if self.trapezoidal:  # a product is written once, with the weight that the next token gives it
            eta, first = following(eta, call.cu_seqlens, call.group)
            if start is not None and last_keys is not None and last_v is not None:
                start = start + first[..., None, None] * products(last_keys, value_rows(last_v, factors))
        narrow = torch.float32 if self.eps is not None and call.q.dtype == torch.float16 else call.q.dtype
        rows = (reads, written * (gamma + eta)[:, :, None, :, None], x)
        q, k, v = (row.to(narrow) for row in rows)
        o, S = on_diagonal(call, q, k, v, start, f"FlexLinearAttention {self.kind}", call.turns)
        if self.rank > 1 or self.trapezoidal:
            o = o + own_products(call.scale * reads, written, x, gamma, eta, strict=call.turns is not None)
            o = without_tail(o, call.cu_seqlens, call.group)
        final = None
        if call.want_final:
            o, final = self._together(call, o, S, P, keys, last_keys, last_v)
        return (o if self.rank > 1 else o.squeeze(2)).to(call.v.dtype), final

    def _weights(self, call: Call) -> tuple[Tensor, Tensor]:
        """(gamma, eta) [B, T, H]."""
        step = call.v.new_ones(call.v.shape[:3]) if call.column is None else call.column
        step = step.to(call.wide)
        if not self.trapezoidal:
            return step, torch.zeros_like(step)
        share = call.given["trap"].to(call.wide).sigmoid()
        return share * step, (1 - share) * step

    def _before(self, call: Call) -> tuple[Optional, Optional]:
        """The last keys [N, R, H, K] and value [N, H, V] of the initial state."""
        if call.initial is None or not self.trapezoidal:
            return None, None
        _, K, V = call.sizes
        return call.initial[..., :K, V : V + self.rank].permute(0, 3, 1, 2), call.initial[..., K, :V]

    def _sums(
        self, call: Call, keys: Tensor, gamma: Tensor, eta: Tensor, last_keys: Optional
    ) -> tuple[Tensor, Optional]:  # fmt: skip
        """P of every token, and final states. They are sums of squares; the engine would subtract some of them."""
        squares = keys.square().sum(2)
        new = gamma.unsqueeze(-1) * squares
        if self.trapezoidal and call.gate is not None:
            start = None if last_keys is None else last_keys.square().sum(1)
            before = previous(squares, call.cu_seqlens, call.group, start)
            gate = call.gate if call.gate.dim() == 4 else call.gate.unsqueeze(-1)
            new = new + gate.exp() * eta.unsqueeze(-1) * before
        return running_weights(call, new, call.last_column, f"FlexLinearAttention {self.kind}, P")

    def _together(
        self, call: Call, o: Tensor, S: Optional, P: Optional, keys: Tensor, last_keys: Optional, last_v: Optional
    ) -> tuple[Tensor, Optional]:  # fmt: skip
        """o, made to depend on all exchanges, and the final state as one matrix."""
        _, K, V = call.sizes
        columns, row = [], None
        if self.trapezoidal:
            ends = torch.cat([keys.transpose(2, 3).flatten(3), call.v.to(call.wide)], -1)
            start = None
            if last_keys is not None and last_v is not None:
                start = torch.cat([last_keys.transpose(1, 2).flatten(2), last_v], -1)
            ends = last(ends, start, call.cu_seqlens, call.group)
            o = o if call.group is None else add_backward_dependency(o, ends)
            of_keys, row = ends.split([self.rank * K, V], -1)
            columns.append(of_keys.unflatten(-1, (self.rank, K)).transpose(-1, -2))
        if S is None:
            return o, None
        columns += [] if P is None else [P.unsqueeze(-1)]
        final = torch.cat([S, *columns], -1)
        return o, final if row is None else torch.cat([final, pad(row.unsqueeze(-2), (0, final.shape[-1] - V))], -2)


@dataclass(frozen=True)
class Spectral(Objective):
    """S_t = e^{g_t} R(theta_t) S_{t-1} R'(psi_t)^T + k_t v_t^T: rotations commute, so tokens are turned instead."""

    kind: str = "spectral"
    inputs: tuple[str, ...] = ("theta", "psi")

    def engine(self, decay: Decay, features: FeatureMap, masked: bool) -> Objective | None:
        if decay.vector:
            self._refuse("a gate for each key channel", ": it does not commute with turning pairs of channels")
        if features.kind == "rope":
            self._refuse("feature_map.rope", ": it would turn q and k once more, so add its angles to theta")
        return super().engine(decay, features, masked)

    def shapes(self, q: Tensor, v: Tensor) -> Shapes:
        return {
            "theta": ((*q.shape[:3], q.shape[-1] // 2), "[B, T, H, K/2]"),
            "psi": ((*v.shape[:3], v.shape[-1] // 2), "[B, T, H, V/2]"),
        }

    def check(self, q: Tensor, v: Tensor) -> None:
        for name, x in (("q", q), ("v", v)):
            if x.shape[-1] % 2:
                check.fail(name, "an even last dimension for transition.spectral", x.shape[-1])

    def explain(self) -> str:
        return (
            "runs on the diagonal engine (flexsp.ops.chunk_simple_gla), with q, k, v and outputs turned by running "
            "sums of theta and psi, in float32 at least; the state holds K x V"
        )

    def runs(self, call: Call) -> str:
        return _diagonal_runs(call)

    def run(self, call: Call) -> tuple[Tensor, Optional]:
        _, K, V = call.sizes
        steps, ends = [call.given[name].to(call.wide) for name in self.inputs], None
        with torch.no_grad():  # the engine gives the gradients; forward mode, too, which goes on without grad mode
            given = torch.cat(steps, -1).detach()
            angles = _TURN * running_sum(given, call.cu_seqlens, call.group, wrapped=True, unit=_TURN)
            if call.want_final:
                ends = last(angles, None, call.cu_seqlens, call.group)
        theta, psi = angles.split([K // 2, V // 2], -1)
        # No rows are rounded: FlexLinearAttention has widened them, for the gradients of theta and psi.
        q, k, v = (rotate(x, -by).unsqueeze(2) for x, by in ((call.q, theta), (call.k, theta), (call.values, psi)))
        turns = Turns(-steps[0] / _TURN, of_values=-steps[1] / _TURN)
        o, S = on_diagonal(call, q, k, v, call.state, "FlexLinearAttention spectral", turns)
        reads, keys, values = (without_tail(x, call.cu_seqlens, call.group) for x in (call.q, call.k, call.values))
        o = rotate(o.squeeze(2), psi) + call.scale * (reads * keys).sum(-1, keepdim=True) * values
        if S is None or ends is None:
            return o, None
        theta, psi = (x.unsqueeze(-2) for x in ends.split([K // 2, V // 2], -1))
        S = rotate(rotate(S, psi).transpose(-1, -2), theta).transpose(-1, -2)
        return o, S.contiguous()


@dataclass(frozen=True)
class DeltaSteps(Objective):
    """Several steps of the delta rule a token, after one decay: what `chunk_gated_delta_product` runs."""

    kind: str = "delta_rule"
    inputs: tuple[str, ...] = ("beta",)

    def engine(self, decay: Decay, features: FeatureMap, masked: bool) -> Objective | None:
        if features.kind == "rope":
            self._refuse(f"steps={self.steps} and feature_map.rope")
        return super().engine(decay, features, masked)

    def shapes(self, q: Tensor, v: Tensor) -> Shapes:
        return {"beta": (tuple(v.shape[:-1]), "[B, T, n, H]")}

    def explain(self) -> str:
        return f"runs as by chunk_gated_delta_product, {self.steps} steps a token"

    def runs(self, call: Call) -> str:
        return "runs what chunk_gated_delta_product does"

    def run(self, call: Call) -> tuple[Tensor, Optional]:
        v = call.v
        if call.column is not None:
            v = (v.to(call.wide) * call.column[:, :, None, :, None]).to(v.dtype)
        k, v, beta = (x.flatten(1, 2) for x in (call.k, v, call.given["beta"]))
        return chunk_gated_delta_product(
            call.q, k, v, call.gate, beta, self.steps, scale=call.scale, initial_state=call.initial,
            output_final_state=call.want_final, cu_seqlens=call.cu_seqlens,
            sp=False if call.group is None else call.group,
        )  # fmt: skip


@dataclass(frozen=True)
class DeltaRows(Objective):
    """R steps of the delta rule a token, of values m^(j) v_t, and R queries that read the state after the last one.

    Between its R keys and its R queries a token has R - 1 rows that change nothing: queries stand at the last key and
    behind it. So it runs as a delta rule of 2 R - 1 rows a token.
    """

    kind: str = "delta_rule"
    inputs: tuple[str, ...] = ("beta", "mimo_x")

    def shapes(self, q: Tensor, v: Tensor) -> Shapes:
        H, V = q.shape[-2], v.shape[-1]
        return super().shapes(q, v) | {"mimo_x": ((H, self.rank, V), "[H, R, V]")}

    def check(self, q: Tensor, v: Tensor) -> None:
        check.check_head_sizes({"v": v.shape[-1]}, q=q.shape[-1])

    def explain(self) -> str:
        return (
            f"runs what chunk_gated_delta_rule does, {2 * self.rank - 1} rows a token: {self.rank} keys, and "
            f"{self.rank} queries at the last of them and behind it, but with feature_map.rope(data_dependent=True) "
            "what is compiled from delta in flexsp/grammar/programs.py; the state holds K x V"
        )

    def runs(self, call: Call) -> str:
        if call.theta is not None:
            return runs_compiled(*self._turned(call), rows=self._rows)
        return "runs what chunk_gated_delta_rule does"

    @property
    def _rows(self) -> int:
        return 2 * self.rank - 1

    def _keys(self, call: Call) -> dict[str, Tensor]:
        """k, v and beta of all rows, [B, T rows, H, ...]."""
        (B, T, R, H), behind = call.k.shape[:4], self.rank - 1
        v = value_rows(call.values, call.given["mimo_x"]).to(call.v.dtype)
        beta = call.given["beta"].unsqueeze(2).expand(B, T, R, H)
        found = {"k": pad(call.k, (0, 0, 0, 0, 0, behind)), "v": pad(v, (0, 0, 0, 0, 0, behind))}
        return {name: x.flatten(1, 2) for name, x in (found | {"beta": pad(beta, (0, 0, 0, behind))}).items()}

    def _turned(self, call: Call) -> tuple[Call, str, dict[str, Tensor]]:
        """The call of a program that has one row for a token, where queries and keys were turned."""
        queries = pad(call.q, (0, 0, 0, 0, self.rank - 1, 0)).flatten(1, 2)
        bounds = None if call.cu_seqlens is None else call.cu_seqlens * self._rows
        gate, theta = (of_first_rows(x, self._rows) for x in (call.gate, call.theta))
        return call._replace(gate=gate, theta=theta, cu_seqlens=bounds), "delta", {"q": queries} | self._keys(call)

    def run(self, call: Call) -> tuple[Tensor, Optional]:
        (B, T), (H, K, V), rows = call.q.shape[:2], call.sizes, self._rows
        if call.theta is not None:
            o, S = compiled(*self._turned(call), call.initial, rows=rows)
            return o.unflatten(1, (T, rows))[:, :, self.rank - 1 :], S if call.want_final else None
        tokens, name = {"q": call.q} | self._keys(call), "deltanet"
        if call.gate is not None:
            name, tokens["g"] = "gated_deltanet" if call.gate.dim() == 3 else "vector_gated_delta", call.gate
        options = delta.Call(
            call.initial, call.want_final, cu_seqlens=call.cu_seqlens, sp=False if call.group is None else call.group
        )
        return delta.run(name, delta.Heads(B, T, H, H, K, V), tokens, call.scale, options, rows, self.rank)


@dataclass(frozen=True)
class _GeneralDelta(Objective):
    """S_t = S' + p_t (v_t - r_t S')^T of the decayed state S', with one column of further state."""

    def rows_and_columns(self, K: int, V: int) -> tuple[int, int]:
        return K, V + 1

    def runs(self, call: Call) -> str:
        key = call.k.to(call.wide)
        return runs_compiled(call, "general_delta", self._tokens(call, key, key))

    def _tokens(self, call: Call, r: Tensor, p: Tensor) -> dict[str, Tensor]:
        return {"q": call.q, "r": r, "p": p, "v": call.v if call.column is None else call.values}

    def _run(self, call: Call, r: Tensor, p: Tensor, column: Optional) -> tuple[Tensor, Optional]:
        """``column`` is that of final states, [N, H, K]."""
        o, S = compiled(call, "general_delta", self._tokens(call, r, p), call.state)
        if not call.want_final or column is None:
            return o, None
        o = o if call.group is None else add_backward_dependency(o, column)
        return o, None if S is None else torch.cat([S, column.unsqueeze(-1)], -1)


@dataclass(frozen=True)
class TemporalDifference(_GeneralDelta):
    """S_t = S' + eta_t k_{t-1} (v_t + discount k_t S' - k_{t-1} S')^T with the decayed state S'."""

    kind: str = "temporal_difference"
    inputs: tuple[str, ...] = ("eta",)
    discount: float = 0.0

    def explain(self) -> str:
        return (
            "compiled from general_delta in flexsp/grammar/programs.py, with the token before's key; the state holds "
            "K x V, the last key as a column"
        )

    def run(self, call: Call) -> tuple[Tensor, Optional]:
        k, start = call.k.to(call.wide), call.last_column
        before = previous(k, call.cu_seqlens, call.group, start)
        if call.theta is not None:  # the one that a token adds does not turn the key before, as it does the other rows
            before = rotate(before, call.theta.detach() - call.theta)
        p = before * call.given["eta"].to(call.wide).unsqueeze(-1)
        end = last(k, start, call.cu_seqlens, call.group) if call.want_final else None
        return self._run(call, before - self.discount * k, p, end)


@dataclass(frozen=True)
class Information(_GeneralDelta):
    """S_t = S' + gain_t (v_t - k_t S')^T, the gain that of a filter whose precisions lam [K] are kept a channel."""

    kind: str = "information"
    inputs: tuple[str, ...] = ("eta",)
    eps: float = 1.0

    @property
    def turns_with_keys(self) -> bool:
        return False  # lam has squares of keys

    def explain(self) -> str:
        return (
            "runs lam as by chunk_hgrn, then what is compiled from general_delta in "
            "flexsp/grammar/programs.py; the state holds K x V, lam as a column"
        )

    def run(self, call: Call) -> tuple[Tensor, Optional]:
        k, start = call.k.to(call.wide), call.last_column
        lam, end = running_weights(call, k.square(), start, "FlexLinearAttention information, lam")
        left = previous(lam, call.cu_seqlens, call.group, start)
        if call.gate is not None:
            left = left * (call.gate if call.gate.dim() == 4 else call.gate.unsqueeze(-1)).exp()
        spread = k / (left + self.eps)
        gain = spread / (1 + (spread * k).sum(-1, keepdim=True)) * call.given["eta"].to(call.wide).unsqueeze(-1)
        return self._run(call, call.k, gain, end)


@dataclass(frozen=True)
class Contrastive(Objective):
    """S_t = S' + eta_t k_t (v_t - vbar_t)^T, vbar_t by a softmax of what the state that enters the block predicts."""

    kind: str = "contrastive"
    inputs: tuple[str, ...] = ("eta",)
    block: int = 64
    temperature: float = 1.0

    def explain(self) -> str:
        return (
            "compiled from contrastive in flexsp/grammar/programs.py, in PyTorch: it is not affine in the state, for "
            'which no kernels can be generated (a GPU call raises without fallback="pytorch"), and ranks run one after '
            f"the other, with shards that start on edges of blocks of {self.block}; the state holds K x V"
        )

    def runs(self, call: Call) -> str:
        return runs_compiled(call, "contrastive", self._tokens(call), **self._options)

    @property
    def _options(self) -> dict[str, float]:
        return {"chunk_size": self.block, "temperature": self.temperature}

    def _tokens(self, call: Call) -> dict[str, Tensor]:
        found = {"q": call.q, "k": call.k, "v": call.v, "eta": call.given["eta"]}
        return found if call.column is None else found | {"column": call.column}

    def run(self, call: Call) -> tuple[Tensor, Optional]:
        o, S = compiled(call, "contrastive", self._tokens(call), call.state, **self._options)
        return o, S if call.want_final else None
