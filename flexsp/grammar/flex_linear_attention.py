"""FlexLinearAttention: a variant made of components. An engine runs it if one fits, else a compiled program."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F

from flexsp.comm.derivatives import share_backward
from flexsp.comm.group import SequenceParallel, ranks_call, resolve_sp
from flexsp.comm.tracing import constant_in_graphs, outside_graphs
from flexsp.compiler import LinearAttention, torch_compile
from flexsp.exceptions import NotAvailable
from flexsp.grammar import programs
from flexsp.grammar.custom import CustomTransition
from flexsp.grammar.decay import Decay, none
from flexsp.grammar.engines import Call, on_diagonal
from flexsp.grammar.feature_map import FeatureMap, identity
from flexsp.grammar.objectives import Rows
from flexsp.grammar.rope import Angles, split_angle
from flexsp.grammar.transition import Transition, one_step_gd
from flexsp.grammar.turned import THETA
from flexsp.kernels import gates
from flexsp.ops import _validate as check
from flexsp.ops import chunk_simple_gla
from flexsp.scan.in_order import Arguments, run_in_order
from flexsp.scan.tokens import without_tail

if TYPE_CHECKING:
    from flexsp.grammar.mask import Factors, Mask

__all__ = ["FlexLinearAttention"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ARGUMENTS = {"q", "k", "v", "scale", "initial_state", "output_final_state", "cu_seqlens", "sp"}
Tensors = dict[str, torch.Tensor]


class FlexLinearAttention:
    """A linear-attention variant from a decay, a feature map and a transition, or a mask and transition of one's own.

    Args:
        decay: from `flexsp.grammar.decay`: none (the default), fixed, gated, exponential.
        features: from `flexsp.grammar.feature_map`: identity (the default), elu, relu, rope, map.
        transition: from `flexsp.grammar.transition`: one_step_gd (the default), delta_rule, preconditioned_gd,
            temporal_difference, information, spectral, contrastive.
        custom_mask: a scalar function ``mask(i, j, g, ...)`` of the query's position i, the key's position j and
            arrays, whose names calls give: o_i = scale sum_{j <= i} M(i, j) q_i P_ij k_j v_j, with P_ij what the
            transition does between the two tokens (1 for one_step_gd). See below.
        custom_transition: a class in place of ``transition``, with state of its own. See below.
        fallback: what runs a call on a GPU that no kernels can run: None raises NotAvailable, which says why; "pytorch"
            runs it in PyTorch, many times slower, and warns once. `explain` says which calls.

    A mask must be a product of causal (what it gives for j > i is left out; if it asks for the order of i and j it must
    be 0 there), a decay e^{G_i - G_j} that does not grow with i, and a local factor, a term of i times a term of j.
    i == j may have a value of its own. ``decay`` multiplies with it. The function is run on symbols: ``g[i]`` and
    ``g[j]`` are entries of an array [B, T, H], ``g.cumsum(0)`` an array of running sums, an array that is not indexed
    a number of the head [H], i and j integers. `if` and torch.where may ask whether i < j, i == j and the like;
    torch.where also for values of one token. Positions and running sums count from the start of the sequence, over all
    ranks, and of each document where packed. G should be a sum of `cumsum` terms, of multiples of i, or of both: then
    only gates inside a chunk are added up. What else is subtracted, an array that holds running sums already for
    example, is taken apart into gates first, from float32 at least; a term of i or j that does not cancel is
    evaluated as it is, even if it overflows. An initial state counts as written at a running sum of 0 (position -1).
    Final states hold decay and terms of j, not terms of i.

    A custom transition has three methods on one chunk of one head, which take what they name. ``chunk(k, v, ...)``
    gives what the chunk adds; ``propagate(state, chunk_state, ...)`` the state after the chunk; ``output(q, state,
    ...)`` the outputs [C, V] from the state that enters it. q is [C, K] with features and scale, k [C, K], v [C, V],
    g the log gates of ``decay`` [C] ([C, K] if it has one a channel), states are [K, V]; `cache_result` in chunk
    names further arguments of the other two. ``inputs`` maps names of more inputs of a call to what is behind
    [B, T, H]: (), ("K",), ("V",). ``extra_state`` maps names of further state to shapes: rows (n, "V") or ("V",),
    columns ("K",) or ("K", m), a number (); n may be "K". chunk and propagate then return tuples, the state first;
    propagate gets ``name`` and ``chunk_name``, output ``name``. Initial and final states are one matrix
    [N, H, K + rows, V + columns]: the state, columns to its right, rows below it, in the order of ``extra_state``. A
    number is the first of a row of its own; what is beside rows, columns and numbers is zero. Ranks run side by side if
    propagate multiplies that matrix from the left, or elementwise, and one after the other if it is not affine. Results
    must not depend on where chunks end (CompileError), unless ``chunk_size`` of the class says how long they are: then
    shards must start on edges of chunks.

    Raises:
        CompileError: what cannot be traced or factored; it names the factor and the line, or i and j and values.
        NotImplementedError: a combination that is not there.
    """

    def __init__(
        self,
        decay: Decay | None = None,
        features: FeatureMap | None = None,
        transition: Transition | None = None,
        *,
        custom_mask: Callable[..., Any] | None = None,
        custom_transition: Any = None,
        fallback: str | None = None,
    ) -> None:
        if fallback not in (None, "pytorch"):
            raise ValueError(f'fallback: expected None or "pytorch", got {fallback!r}')
        self.fallback = fallback
        for name, value, kind in (
            ("decay", decay, Decay), ("features", features, FeatureMap), ("transition", transition, Transition),
        ):  # fmt: skip
            if value is not None and not isinstance(value, kind):
                raise ValueError(f"{name}: expected a component of flexsp.grammar, got {value!r}")
        if custom_transition is not None and transition is not None:
            raise ValueError("custom_transition: expected no transition beside it; leave one of the two out")
        if custom_transition is not None and custom_mask is not None:
            raise NotImplementedError("custom_mask with custom_transition: use decay and the class's own factors")
        self.decay, self.features = decay or none(), features or identity()
        self.transition: Transition | CustomTransition = transition or one_step_gd()
        if custom_transition is not None:
            self.transition = CustomTransition(custom_transition)
        self.mask: Mask | None = None
        if custom_mask is not None:
            from flexsp.grammar.mask import make_mask  # sympy is slow to import

            self.mask = make_mask(custom_mask)
        self._objective = self.transition.engine(self.decay, self.features, self.mask is not None)
        own = self.mask.inputs if self.mask is not None else tuple(getattr(self._custom, "inputs", ()))
        taken = _ARGUMENTS | {*self.decay.inputs, *self.features.inputs, *getattr(transition, "inputs", ())}
        for name in own:
            if name in taken:
                what = "custom_mask" if self.mask is not None else "custom_transition"
                raise ValueError(f"{what}: expected another name than {name!r}, which calls already have")

        self._name = _named(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._name = _named(self)

    def __repr__(self) -> str:
        """The kinds of the components, and the inputs that a call must bring besides q, k and v."""
        channels = " by channel" if self.decay.vector else ""
        parts = [f"{self.decay.kind} decay{channels}", f"{self.features.kind} features"]
        custom = f"custom transition {self._custom.name}" if self._custom is not None else ""
        parts.append(custom or f"transition {self.transition.kind}")
        parts += [f"custom mask {self.mask.name}"] if self.mask is not None else []
        parts += [f"fallback={self.fallback!r}"] if self.fallback else []
        return f"FlexLinearAttention({', '.join(parts)}; inputs {', '.join(('q', 'k', 'v', *self.inputs))})"

    @property
    def _custom(self) -> CustomTransition | None:
        return self.transition if isinstance(self.transition, CustomTransition) else None

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the tensors that a call must give besides q, k and v."""
        of_mask = self.mask.inputs if self.mask is not None else ()
        return (*self.decay.inputs, *self.features.inputs, *self.transition.inputs, *of_mask)

    def explain(
        self, q: torch.Tensor | None = None, k: torch.Tensor | None = None, v: torch.Tensor | None = None,
        **given: torch.Tensor,
    ) -> str:  # fmt: skip
        """Which engine runs the combination, the factors of a custom mask, and what a call must bring.

        With the tensors of a call (q, k, v and what else it brings) also what runs that call, which depends on sizes,
        dtype and device; only then are kernels promised. Nothing is sent to other ranks.
        """
        lines = [f"{self.features.name} features, {self.decay.kind} decay, {self.transition.kind}"]
        lines[0] += f"; besides q, k and v: {', '.join(self.inputs) or 'nothing'}"
        lines += [x.explain() for x in (self.mask, self._custom, self._objective) if x is not None]
        lines += [] if self._objective is not None else self._engine()
        if self._keeps_angle:
            lines.append("the state's last column holds the angle of feature_map.rope, in K/2 rows")
        if q is not None and k is not None and v is not None:
            lines.append(f"this call {self._what_runs(q, k, v, given)}")
        return "\n".join(lines)

    def _engine(self) -> list[str]:
        """Lines of `explain` about the engine, for a transition that is a single program."""
        if self._on_the_diagonal_engine:
            return ["runs on the diagonal engine (flexsp.ops.chunk_simple_gla)"]
        if self._custom is not None and self._custom.without_kernels:
            found = [f"the class's three methods run in PyTorch, no kernels: {self._custom.without_kernels}"]
            return found + ([] if self.fallback else ['on a GPU, which raises without fallback="pytorch"'])
        of = "the class's three methods" if self._custom is not None else "flexsp/grammar/programs.py"
        return [
            f"compiled from {of}: PyTorch on CPU and in float64; on GPUs generated kernels, where they can be made "
            "for the sizes of a call (give explain its tensors)"
        ]

    @torch.no_grad()
    def _what_runs(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: dict[str, torch.Tensor]) -> str:
        q, k = self._mapped(q, k)
        self._check(q, k, v, given)
        if self._on_the_diagonal_engine:
            kernels = q.is_cuda and q.dtype != torch.float64
            return f"runs {'the kernels of chunk_simple_gla' if kernels else 'its reference in PyTorch'}"
        q, k, v = self._widened(q, k, v)
        angles = self._angles(q, given, None, None, None)
        q, k = self._map(q, angles), self._map(k, angles)
        gate, per_head, column, factors = self._operands(q, given, None, None)
        theta = given[THETA].to(q.dtype) if self._turned_by_the_program else None
        if self._objective is not None:
            scale = q.shape[-1] ** -0.5
            call = Call(
                q, k, v, _clamped(gate, per_head, q), column, given, scale, fallback=self.fallback, theta=theta
            )
            return self._objective.runs(call)
        tokens: dict[str, Any] = {"q": q, "k": k, "v": v} | {name: given[name] for name in self.transition.inputs}
        tokens |= {} if theta is None else {THETA: theta}
        sizes = (q.shape[2], q.shape[3], v.shape[3])
        key = self._key(tokens, sizes, q.shape[3] ** -0.5, _clamped(gate, per_head, q), column, factors)
        return self.make(*key).runs(sp=False, **tokens)

    @property
    def _on_the_diagonal_engine(self) -> bool:
        plain = self.mask is None or self.mask.is_decay
        return self.transition.kind == "one_step_gd" and self._objective is None and not self.decay.vector and plain

    @property
    def _turned_by_the_engine(self) -> bool:
        """Whether the diagonal engine gives the gradients of angles by which q and k are turned."""
        of_rows = isinstance(self._objective, Rows) and not self._keeps_angle
        return self.features.kind == "rope" and (self._on_the_diagonal_engine or of_rows)

    @property
    def _turned_by_the_program(self) -> bool:
        """Whether a compiled program gives the gradients of theta: not where the state keeps its frame."""
        alone = self._custom is not None or self._keeps_angle
        return THETA in self.features.inputs and not self._turned_by_the_engine and not alone

    @property
    def _keeps_angle(self) -> bool:
        """Whether the state has one more column, the angle of `feature_map.rope` (flexsp/grammar/rope.py)."""
        return self.features.kind == "rope" and (self.decay.vector or not self.transition.turns_with_keys)

    def rows_and_columns(self, K: int, V: int) -> tuple[int, int]:
        """Sizes of the matrix that stores a head's state with all its parts; its K x V corner is the state itself."""
        owner = self._custom or self._objective
        rows, columns = (K, V) if owner is None else owner.rows_and_columns(K, V)
        return rows, columns + self._keeps_angle

    @property
    def _has_steps(self) -> bool:
        return self.decay.kind == "exponential" and "decay" in self.decay.inputs

    @ranks_call
    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float | None = None,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: torch.Tensor | None = None,
        sp: SequenceParallel | bool | None = None,
        **given: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Outputs [B, T, H, V] in v's dtype, and the final state [N, H, K, V] or None.

        Args:
            q, k: [B, T, H, K]; v: [B, T, H, V], in one dtype. Under ``sp`` this rank's tokens. With several rows a
                token (``mimo_rank``) q, k and the outputs are [B, T, R, H, *], with several ``steps`` k and v are
                [B, T, n, H, *].
            given: what the components name: ``decay``, ``A``, ``theta``, ``eta``, arrays of a custom mask, inputs of
                a custom transition; docstrings give shapes and units. In the inputs' dtype or float32. Log gates
                below -104 (-800 in float64) act as that, a decay of 0, and have no gradient. Signs are checked as by
                the ops: on CPU, on CUDA under FLEXSP_CHECK=1.
            scale: factor on q, K^-1/2 if None.
            initial_state, output_final_state, cu_seqlens, sp: as for `flexsp.ops.chunk_simple_gla`. States of a custom
                transition and of some others are larger, see there.
        """
        check.check_flag("output_final_state", output_final_state)
        rows, (q, k) = (q, k), self._mapped(q, k)
        self._check(q, k, v, given)
        group, sizes = resolve_sp(sp, keeps_bits=True), (q.shape[-2], q.shape[-1], v.shape[-1])
        check.check_cu_seqlens(cu_seqlens, None, q, "q", group)
        state = self.rows_and_columns(*sizes[1:])
        states = (check.number_of_states(q.shape[0], cu_seqlens), sizes[0], *state)
        dims = "[N, H, K, V]" if state == sizes[1:] else "[N, H, K + rows, V + columns]"
        check.check_state("initial_state", initial_state, states, dims, q, cu_seqlens, group)
        scale = check.check_scale(scale, q.shape[-1])
        if group is not None and group.segment:
            tokens = {"q": rows[0], "k": rows[1], "v": v} | given
            return self._in_segments(group, tokens, scale, initial_state, output_final_state, cu_seqlens)
        dtype = v.dtype
        q, k, v = self._widened(q, k, v)
        summed = "theta" in given or self._keeps_angle or self.mask is not None or self._objective is not None
        several = group is not None and summed  # sums go over the ranks too
        if group is not None and several:
            names = tuple(given)
            _, q, k, v, initial_state, *views = share_backward(group, q, k, v, initial_state, *given.values())
            given = dict(zip(names, views, strict=True))
        before = None
        if self._keeps_angle:
            initial_state, before = split_angle(initial_state, sizes[1])
        angles, turns, own = self._angles(q, given, before, cu_seqlens, group), None, None
        if angles is not None and THETA in given and self._turned_by_the_engine:
            turns = angles.taken(output_final_state)
            if self._objective is None:
                reads, keys = (without_tail(x, cu_seqlens, group) for x in (q, k))
                own = scale * (reads * keys).sum(-1)
        q, k = self._map(q, angles), self._map(k, angles)
        call = Call(
            q, k, v, None, None, given, scale, initial_state, output_final_state, cu_seqlens, group, self.fallback,
            turns, own, given[THETA].to(q.dtype) if self._turned_by_the_program else None,
        )
        o, final = self._run(call)
        if angles is not None and output_final_state:
            o, final = angles.finish(o, final, sizes[2])
        if group is not None and several:
            _, o, final = share_backward(group, o, final)
        return o.to(dtype), final if output_final_state else None

    @outside_graphs("bitwise: a call over a group that was made with bitwise is no part of a graph")
    def _in_segments(
        self, group: SequenceParallel, given: Tensors, scale: float, initial: torch.Tensor | None, want_final: bool,
        cu_seqlens: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """A call over a group that was made with ``bitwise``: one segment after the other, each from the final state
        of the one before."""
        name = type(self).__name__
        if self.mask is not None:
            raise NotAvailable(f"{name}: bitwise is not available for custom_mask, whose positions no state holds")
        if self.features.function is not None and self.features.function.has_parameters:
            raise NotAvailable(f"{name}: bitwise is not available for parameters of feature_map.map")
        chunk = getattr(self.transition, "block", None) or getattr(self._custom, "chunk_size", None) or 1
        if chunk > 1 and cu_seqlens is not None:
            raise NotAvailable(f"{name}: bitwise is not available for documents whose chunks are part of the model")
        if group.segment % chunk:
            expected = f"segments (bitwise) of whole chunks of {chunk} tokens"
            raise ValueError(f"{name}: expected {expected}, got {group.segment}")

        def call(asked: Arguments) -> tuple[torch.Tensor, list[torch.Tensor]]:
            state = None if asked.states is None else asked.states[0]
            x: dict[str, Any] = {**asked.tokens, **asked.shared, "cu_seqlens": asked.bounds}
            o, final = self(**x, scale=scale, initial_state=state, output_final_state=True, sp=False)
            return o, [] if final is None else [final]

        shapes = self._shapes(given["q"], given["v"])
        shared = {n: x for n, x in given.items() if n in shapes and not shapes[n][1].startswith("[B, T")}
        tokens = {n: x for n, x in given.items() if n not in shared}
        kinds = self.decay.kind, self.features.kind, self.transition.kind
        what = f"{name} ({', '.join(kinds)}) on {str(given['q'].dtype)}{'' if cu_seqlens is None else ', packed'}"
        states = None if initial is None else [initial]
        o, final = run_in_order(call, what, group, tokens, shared, states, cu_seqlens)
        return o, final[0] if final is not None and want_final else None

    def _widened(self, *rows: torch.Tensor) -> list[torch.Tensor]:
        """Rows in the dtype that they are computed in: float32 at least where angles have gradients. Each is a sum over
        all later tokens, of which little is left, and what rounds rows would add up over long texts."""
        of_tokens = self.transition.kind == "spectral" or "theta" in self.features.inputs
        return [x.to(torch.promote_types(x.dtype, torch.float32)) if of_tokens else x for x in rows]

    def _run(self, call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Outputs and final states of a call whose q and k have features, and whose gate and column are still None."""
        q, k, v, scale = call.q, call.k, call.v, call.scale
        gate, per_head, column, factors = self._operands(q, call.given, call.cu_seqlens, call.group)
        if self._objective is not None:
            return self._objective.run(call._replace(gate=_clamped(gate, per_head, q), column=column))
        common: dict[str, Any] = {"cu_seqlens": call.cu_seqlens, "sp": call.group if call.group is not None else False}
        if call.turns is not None and call.own is not None:
            own, call = call.own, call._replace(gate=_clamped(gate, per_head, q), column=column)
            q, k, v = (x.unsqueeze(2) for x in (q, k, call.values))
            o, final = on_diagonal(call, q, k, v, call.initial, "FlexLinearAttention rope", call.turns)
            return o.squeeze(2) + own.unsqueeze(-1) * without_tail(call.values, call.cu_seqlens, call.group), final
        if self._on_the_diagonal_engine:
            if column is not None:
                v = (v.to(check.accumulation_dtype(q)) * column.unsqueeze(-1)).to(v.dtype)
            return chunk_simple_gla(
                q, k, v, gate, per_head, scale=scale, initial_state=call.initial,
                output_final_state=call.want_final, **common,
            )  # fmt: skip
        tokens: dict[str, Any] = {"q": q, "k": k, "v": v} | {name: call.given[name] for name in self.transition.inputs}
        tokens |= {} if call.theta is None else {THETA: call.theta}
        key = self._key(tokens, call.sizes, scale, _clamped(gate, per_head, q), column, factors)
        if torch.compiler.is_compiling():
            name, inputs = _made_for_graphs(self._name, *key)
            return torch_compile.call(name, [tokens[x] for x in inputs], call.initial, call.cu_seqlens, call.group)
        return self.make(*key)(prev_s=call.initial, **tokens, **common)

    def _operands(
        self, q: torch.Tensor, given: Tensors, cu_seqlens: torch.Tensor | None, group: SequenceParallel | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, Factors | None]:
        """(log gate of every token, constant log gate of every head, column factor, factors of the mask)."""
        factors = None if self.mask is None else self.mask.factors(given, q, cu_seqlens, group)
        gate, per_head = self._gate(given, q)
        if factors is not None:
            gate, per_head = _sum(gate, factors.gate), _sum(per_head, factors.per_head)
        column = given["decay"] if self._has_steps else None
        if factors is not None and factors.column is not None:
            column = factors.column if column is None else factors.column * column
        if gate is not None and per_head is not None:
            gate, per_head = gate + (per_head if gate.dim() == 3 else per_head.unsqueeze(-1)), None
        return gate, per_head, column, factors

    @property
    def make(self) -> Callable[..., LinearAttention]:
        """The function that makes the compiled variant, for the arguments that `_key` returns."""
        if self._custom is not None:
            return self._custom.program
        return programs.delta if self.transition.kind == "delta_rule" else programs.linear

    def _key(
        self, tokens: dict[str, Any], sizes: tuple[int, int, int], scale: float, gate: torch.Tensor | None,
        column: torch.Tensor | None, factors: Factors | None,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Arguments of `make`. Adds the variant's further inputs to `tokens`."""
        if self._custom is not None and gate is None and self._custom.wants_gate:
            gate = tokens["q"].new_zeros((), dtype=check.accumulation_dtype(tokens["q"])).expand(tokens["q"].shape[:3])
        kind = None if gate is None else "g" if gate.dim() == 3 else "gk"
        if self._custom is not None:
            tokens |= {name: x for name, x in (("g", gate), ("column", column)) if x is not None}
            return *sizes, scale, kind, column is not None, self.fallback
        further = {"column": column} | ({} if factors is None else {"row": factors.row, "own": factors.own})
        further |= {} if kind is None else {kind: gate}
        found = {name: x for name, x in further.items() if x is not None}
        tokens |= found
        return *sizes, scale, tuple(sorted([*found, *({THETA} & tokens.keys())])), self.fallback

    def _shapes(self, q: torch.Tensor, v: torch.Tensor) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shapes of further inputs, and what they are called, by name; those of masks are elsewhere."""
        (B, T, *_, H, K), owner = q.shape, self._custom or self._objective
        shapes: dict[str, tuple[tuple[int, ...], str]] = {
            "decay": ((B, T, H, K), "[B, T, H, K]") if self.decay.vector else ((B, T, H), "[B, T, H]"),
            "A": ((H,), "[H]"),
            "theta": ((B, T, H, K // 2), "[B, T, H, K/2]"),
            "beta": ((B, T, H), "[B, T, H]"),
            "trap": ((B, T, H), "[B, T, H]"),
        }
        return shapes if owner is None else shapes | owner.shapes(q, v)

    def _check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Tensors) -> None:
        if given.keys() != set(self.inputs):
            raise ValueError(f"inputs: expected {sorted(self.inputs)} besides q, k and v, got {sorted(given)}")
        of_queries = "[B, T, H, K]" if self.transition.rank == 1 else "[B, T, R, H, K]"
        steps = getattr(self.transition, "steps", 1)
        of_keys, of_values = (of_queries, "[B, T, H, V]") if steps == 1 else ("[B, T, n, H, K]", "[B, T, n, H, V]")
        named = (("q", q, of_queries), ("k", k, of_keys), ("v", v, of_values))
        for name, x, dims in named:
            check.check_tensor(name, x, None, dims)
        B, T, *rows, H, K = q.shape
        several = [steps] if steps > 1 else []  # keys and values a token
        if k.shape != (B, T, *(several or rows), H, K) or v.shape[:-1] != (B, T, *several, H):
            raise ValueError(
                f"q, k, v: expected {of_queries}, {of_keys} and {of_values}{f', n = {steps}' if several else ''}, got "
                f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
            )
        if rows and rows != [self.transition.rank]:
            check.fail("q", f"mimo_rank = {self.transition.rank} rows R in {of_queries}", rows[0])
        for name, x, dims in named:
            check.check_tensor(name, x, None, dims, dtypes=_FLOATS if x is q else (q.dtype,), device=q.device)
        for name, n in (("q", min(B, H, K)), ("v", v.shape[-1])):
            if n < 1:
                check.fail(name, "one row, head and channel at least", list(q.shape if name == "q" else v.shape))
        if self._objective is not None:
            self._objective.check(q, v)
        shapes = self._shapes(q, v)
        if self.mask is not None:
            self.mask.check(given, q)
        for name in (*self.decay.inputs, *self.features.inputs, *self.transition.inputs):
            dtypes = _FLOATS if name == "theta" else (q.dtype, torch.float32)
            check.check_tensor(name, given[name], *shapes[name], dtypes=dtypes, device=q.device)
        if self.decay.kind == "gated":
            check.check_non_positive("decay", given["decay"], "natural-log gates <= 0")
        if self.decay.kind == "exponential":
            check.check_non_positive("A", given["A"], "values <= 0")
            if self._has_steps:
                check.check_non_negative("decay", given["decay"], "step sizes >= 0")

    def _gate(self, given: dict[str, torch.Tensor], q: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(log gate of every token, constant log gate of every head)."""
        wide = check.accumulation_dtype(q)
        if self.decay.kind == "none":
            return None, None
        if self.decay.kind == "gated":
            return given["decay"], None
        if self.decay.kind == "exponential":
            A = given["A"].to(wide)
            return (given["decay"].to(wide) * A, None) if self._has_steps else (None, A)
        H = q.shape[-2]
        if self.decay.log_decay is None:
            return None, torch.log1p(-(2.0 ** (-5.0 - torch.arange(H, device=q.device, dtype=wide))))
        if len(self.decay.log_decay) != H:
            raise ValueError(f"decay.fixed: expected {H} values, one a head, got {len(self.decay.log_decay)}")
        return None, torch.tensor(self.decay.log_decay, device=q.device, dtype=wide)

    def _mapped(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q and k with the features of `feature_map.map`, from which on their K is that of the features."""
        made = self.features.function
        return (q, k) if made is None else (made("q", q), made("k", k))

    def _map(self, x: torch.Tensor, angles: Angles | None) -> torch.Tensor:
        """q or k with features."""
        if self.features.kind == "elu":
            return F.elu(x) + 1
        if self.features.kind == "relu":
            return F.relu(x)
        return x if angles is None else angles.turn(x)

    def _angles(
        self, q: torch.Tensor, given: Tensors, before: torch.Tensor | None, cu_seqlens: torch.Tensor | None,
        sp: SequenceParallel | None,
    ) -> Angles | None:  # fmt: skip
        if self.features.kind != "rope":
            return None
        base, fixed = self.features.base, self._turned_by_the_program
        return Angles(q, given.get(THETA), base, self._keeps_angle, before, cu_seqlens, sp, fixed)


_models: WeakValueDictionary[str, FlexLinearAttention] = WeakValueDictionary()
_count = itertools.count()


def _named(model: FlexLinearAttention) -> str:
    name = f"flex {next(_count)}"
    _models[name] = model
    return name


@constant_in_graphs
def _made_for_graphs(name: str, *key: Any) -> tuple[str, tuple[str, ...]]:
    """The variant's name in graphs and the names of its inputs, found while torch.compile traces."""
    return torch_compile.kept(lambda: _models[name].make(*key))


def _sum(x: torch.Tensor | None, y: torch.Tensor | None) -> torch.Tensor | None:
    """The sum of log gates, either of which may be None: [B, T, H] or [B, T, H, K] with [B, T, H], or [H] with [H]."""
    if x is None or y is None:
        return x if y is None else y
    return x + (y if x.dim() == y.dim() else y.unsqueeze(-1))


def _clamped(gate: torch.Tensor | None, per_head: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    """The log gate of every token, clamped, so that differences of its running sums keep digits of later gates."""
    if gate is not None:
        return gates.clamped(gate.to(check.accumulation_dtype(q)))
    return None if per_head is None else gates.clamped(per_head).expand(*q.shape[:2], q.shape[-2])
