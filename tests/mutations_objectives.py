"""The changes of tests/mutate.py to the transitions of several steps."""

from __future__ import annotations

from tests.mutate import in_file as _in

__all__ = ["OBJECTIVES"]

_MAP = "tests/grammar/test_feature_map.py::"
_LOOP = "tests/grammar/test_objectives.py::test_against_token_loop"
_RANKS = "tests/grammar/test_objectives.py::test_ranks_equal_one_rank"
_CALLS = "tests/grammar/test_objectives.py::test_one_call_after_another"
_ROPE_CALLS = "tests/grammar/test_rope_states.py::test_two_calls_are_one"
_ROPE_RANKS = "tests/grammar/test_rope_states.py::test_ranks_continue_too"
_FORWARD = "tests/ops/test_derivatives.py::test_angles_in_forward_mode"
_THETA = "tests/grammar/test_rope_gradients.py::test_against_the_loop"
_LONG = "tests/grammar/test_rope_gradients.py::test_nothing_adds_up_over_long_texts"
_THETA_RANKS = "tests/grammar/test_rope_gradients.py::test_over_ranks"
_THETA_KERNELS = "tests/grammar/test_rope_gradients.py::test_in_kernels"
_THETA_KERNELS_RANKS = "tests/grammar/test_rope_gradients.py::test_over_ranks_in_kernels[delta-bounds0]"
_THETA_SIZES = "tests/grammar/test_rope_gradients.py::test_sizes"
_EDGES = "tests/grammar/test_objectives_edges.py::"
_EARLIER = "tests/compiler/test_earlier_inputs.py::"

OBJECTIVES = [
    *_in(
        "flexsp/compiler/arguments.py",
        ("previous(wide, cu_seqlens, sp, None if", "previous(wide, None, sp, None if",
         "the token before is of another document", _EARLIER + "test_against_a_token_loop[bounds1-False]"),
        ("None if start is None else start.to(wide.dtype))", "None)", "what stands before first tokens is forgotten",
         _EARLIER + "test_against_a_token_loop[None-True]"),
        ("previous(wide, cu_seqlens, sp,", "previous(wide, cu_seqlens, None,", "shards begin without the token before",
         _EARLIER + "test_ranks_equal_one_rank[lengths0-None]"),
    ),
    *_in(
        "flexsp/compiler/frontend/meta.py",
        (" or tokens[what.before].before is not None", "", "an input is two tokens earlier",
         _EARLIER + "test_wrong_metadata_is_named[of one that is earlier itself]"),
    ),
    *_in(
        "flexsp/grammar/rope.py",
        ("-angle.unsqueeze(-2)", "0 * angle.unsqueeze(-2)", "final states stay in the frame of their call",
         _ROPE_CALLS),
        ("tokens = self._cu_seqlens.diff().unsqueeze(-1)", "tokens = self._cu_seqlens[1:].unsqueeze(-1)",
         "documents are turned back by their end in the pack", _ROPE_RANKS + "[packed-few]"),
        ("last(self._sums, self._before,", "last(self._sums, None,", "a call without tokens forgets the angle",
         _ROPE_CALLS),
        ("running_sum(steps, cu_seqlens, sp, self._before,", "running_sum(steps, cu_seqlens, sp, None,",
         "the angle of an initial state is not read", _ROPE_CALLS),
        ("self._of_tokens - self._speed", "self._of_tokens", "positions begin at 1 where the state keeps the angle",
         _LOOP),
        ("total = self._T if self._sp is None else self._sp.shard_range(self._T)[2]", "total = self._T",
         "states are turned back by the last shard alone", _ROPE_RANKS + "[batch-few]"),
    ),
    *_in("flexsp/grammar/objectives.py",
        ("return self.eps is None", "return True", "sums of squares are taken to turn with keys", _ROPE_CALLS),
    ),
    *_in("flexsp/scan/tokens.py",
        ("x.to(torch.float64) / unit,", "(x / unit).to(torch.float64),", "a turn is rounded to float32",
         "tests/grammar/test_rope_states.py::test_angles_of_long_texts_are_precise"),
    ),
    *_in(
        "flexsp/ops/_delta.py",
        ("F.pad(q, (0, 0, 0, 0, steps - q.shape[2], 0))", "F.pad(q, (0, 0, 0, 0, 0, steps - q.shape[2]))",
         "queries of a token read before its last key", _LOOP + "[delta rows-batch]"),
    ),
    *_in(
        "flexsp/grammar/objectives.py",
        ("delta.run(name, delta.Heads(B, T, H, H, K, V), tokens, call.scale, options, rows, self.rank)",
         "delta.run(name, delta.Heads(B, T, H, H, K, V), tokens, call.scale, options, rows + 1, self.rank)",
         "keys are read where they are not", _LOOP + "[delta rows-batch]"),
        ("v = value_rows(call.values, call", "v = value_rows(call.v, call", "values are written without their steps",
         _LOOP + "[delta rows, rope-batch]"),
    ),
    *_in(
        "flexsp/grammar/mapped.py",
        ("x.split(1)]", "x.split(_B)]", "features may depend on other sequences",
         _MAP + "test_what_looks_at_other_tokens_is_refused[dtype0-over_the_batch]"),
        ("row[:, t : t + 1]) for t in range(_T)", "row[:, t : t + _T]) for t in [0]", "features may depend on other tokens",
         _MAP + "test_what_looks_at_other_tokens_is_refused[dtype0-centred]"),
        ("or whole.requires_grad", "or False", "nobody knows of parameters", _MAP + "test_bits_over_ranks"),
        ("atol=most, equal_nan=True", "atol=most", "features that are not finite are other features",
         _MAP + "test_features_that_are_not_finite_are_not_taken_for_others"),
        ("return found.to(x.dtype)", "return found", "features have the dtype of autocast", _MAP + "test_half_precision_and_autocast"),
    ),
    *_in(
        "flexsp/grammar/flex_linear_attention.py",
        ('made("q", q), made("k", k)', 'made("q", q), k', "keys have no features", _MAP + "test_against_token_loop[gates]"),
        ('{"q": rows[0], "k": rows[1], "v": v}', '{"q": q, "k": k, "v": v}', "segments have features of features",
         _MAP + "test_bits_over_ranks"),
    ),
    *_in(
        "flexsp/grammar/decay.py",
        ("vector=not per_head, trapezoidal=trapezoidal)", "vector=not per_head)",
         "gates have Euler's rule whatever is asked for", _LOOP + "[trapezoid, a gate a channel, read-batch]"),
    ),
    *_in(
        "flexsp/grammar/objectives.py",
        ("over = (1 / (sums + self.eps))", "over = (1 / (sums + 2 * self.eps))", "eps counts twice", _LOOP),
        ('if self.at == "read":', 'if self.at != "read":', "queries and keys are taken for each other", _LOOP),
        ("before = previous(squares, call.cu_seqlens, call.group, start)", "before = previous(squares, None, None)",
         "squares of keys reach the next document", _LOOP),
        ("gate.exp() * eta.unsqueeze(-1) * before", "eta.unsqueeze(-1) * before",
         "the trapezoidal term of P does not decay", _LOOP),
        ("first[..., None, None] * products(last_keys", "0 * first[..., None, None] * products(last_keys",
         "the token before a call is forgotten", _CALLS),
        ("o = o + own_products(call.scale * reads", "o = o + own_products(reads",
         "a token's own products have no scale", _LOOP),
        ("if self.eps is not None and call.q.dtype == torch.float16", "if self.eps is None",
         "queries over P overflow in float16", _EDGES + "test_small_keys_in_float16"),
        ("columns += [] if P is None else [P.unsqueeze(-1)]", "columns += [] if P is None else [0 * P.unsqueeze(-1)]",
         "final states have no sums", _LOOP),
        ("(call.values, psi)", "(call.values, -psi)",
         "values turn the wrong way round", _LOOP),
        ("rotate(rotate(S, psi).transpose(-1, -2), theta)", "rotate(rotate(S, psi).transpose(-1, -2), 0 * theta)",
         "final states are not turned from the left", _LOOP),
        ("before - self.discount * k, p, end", "before + self.discount * k, p, end", "what is to come counts negative",
         _LOOP),
        ("before = previous(k, call.cu_seqlens, call.group, start)",
         "before = previous(k, call.cu_seqlens, None, start)",
         "the key before a shard is 0", _RANKS + "[difference, bootstrapped-batch]"),
        ("left = previous(lam, call.cu_seqlens, call.group, start)", "left = lam - k.square()",
         "the precision before a token has decayed twice", _LOOP),
        ("gain = spread / (1 + (spread * k)", "gain = spread / (2 + (spread * k)", "the gain is too small", _LOOP),
    ),
    *_in(
        "flexsp/grammar/programs.py",
        ("fill(torch.ones_like(logits).tril(0) < 0.5", "fill(torch.ones_like(logits) < 0.5",
         "tokens see values of later ones", _LOOP),
        ("weights.sum(-1) + (-largest).exp()", "weights.sum(-1)", "there is no candidate of value 0", _LOOP),
        ("logits.amax(-1).clamp(min=0.0)", "0 * logits[:, 0]", "logits overflow",
         _EDGES + "test_large_logits"),
        ("fallback=fallback, chunk_size=chunk_size", "fallback=fallback", "blocks are of 64", _LOOP),
    ),
    *_in(
        "flexsp/grammar/engines.py",
        ("None if self.initial is None else self.initial[..., : self.sizes[1], -1]", "None",
         "sums and keys start anew with every call", _CALLS),
    ),
    *_in(
        "flexsp/scan/tokens.py",
        ("            mine = initial\n        first = _a", "            pass\n        first = _a",
         "a first rank without tokens loses the token before a call", _RANKS + "[difference, bootstrapped-batch]"),
        ("cu_seqlens, place, place == begin)", "cu_seqlens, place, place != begin)", "initial tokens stand elsewhere",
         _LOOP),
    ),
    *_in(
        "flexsp/grammar/objectives.py",
        ("without_tail(x, call.cu_seqlens, call.group) for x in (call.q", "x for x in (call.q",
         "tokens behind the last document have their own products", "tests/kernels/test_tail.py::test_objectives[spectral]"),
        ("Turns(-steps[0] / _TURN", "Turns(steps[0] / _TURN", "the engine's turns have the other sign", _LOOP + "[spectral-batch]"),
        ("of_values=-steps[1] / _TURN", "of_values=steps[1] / _TURN", "values turn the other way for the engine", _LOOP + "[spectral-batch]"),
        ("with torch.no_grad():  # the engine", "with torch.enable_grad():  # the engine", "angles have gradients of their sums, too",
         _LOOP + "[spectral-batch]"),
        ("(0, 0, 0, 0, self.rank - 1, 0))", "(0, 0, 0, 0, 0, self.rank - 1))", "turned queries read before the last key",
         _THETA + "[batch-delta rows]"),
        ("call.cu_seqlens * self._rows", "call.cu_seqlens", "documents have a row a token", _THETA + "[packed-delta rows]"),
    ),
    *_in(
        "flexsp/grammar/flex_linear_attention.py",
        ("reads, keys = (without_tail(x, cu_seqlens, group) for x in (q, k))", "reads, keys = q, k",
         "own products come from behind the last document", "tests/kernels/test_tail.py::test_tails_are_not_read"),
        ("own = scale * (reads * keys)", "own = 2 * scale * (reads * keys)",
         "tokens have their own products twice", "tests/grammar/test_grammar.py::test_against_token_loop[gla, rope-batch]"),
        ("not alone", "False", "gradients of theta are sums over the text", _LONG + "[delta-2048]"),
        ("alone = self._custom is not None or", "alone = self.transition.rank > 1 or", "gradients of theta of several rows are sums over the text",
         _LONG + "[delta rows-2048]"),
    ),
    *_in(
        "flexsp/grammar/programs.py",
        ("found.rows = rows", "found.rows = 1", "shards have a row a token", _THETA_RANKS + "[batch-delta rows]"),
    ),
    *_in(
        "flexsp/grammar/rope.py",
        ("if self._taken:", "if False:", "turning kept keys back has a gradient, turning them has none",
         _ROPE_CALLS + "[one step; trapezoid; theta]"),
        ("steps = steps.detach() if fixed else steps", "pass", "angles have derivatives twice in forward mode",
         _FORWARD + "[delta_rule]"),
    ),
    *_in(
        "flexsp/grammar/objectives.py",
        ("torch.cat(steps, -1).detach()", "torch.cat(steps, -1)", "psi has derivatives twice in forward mode",
         _FORWARD + "[spectral]"),
        ("strict=call.turns is not None", "strict=False", "rows read their own products twice", _THETA + "[batch-rows, trapezoid]"),
        ("call.theta.detach() - call.theta)", "call.theta - call.theta)", "the key before turns with the token",
         _THETA + "[batch-difference]"),
    ),
    *_in(
        "flexsp/grammar/turned.py",
        ("sp, self.of_token,", "sp, 1,", "in PyTorch shards have a row a token", _THETA_RANKS + "[packed-delta rows]"),
        ("angle - angle.detach()) for name", "angle.detach() - angle) for name", "rows turn the other way", _THETA + "[batch-difference]"),
        ("turn_rows(S, -self.angles[:, :, chunk])", "S", "angles forget later chunks", _THETA + "[batch-difference]"),
        ("self.angles.detach() - self.angles)", "self.angles - self.angles.detach())", "shards turn what passes them the other way",
         _THETA_RANKS + "[batch-delta]"),
        ('return plan.n_docs > 0 or not plan.scanned', "return not plan.scanned", "kernels have no last states of documents",
         _THETA_KERNELS_RANKS),
    ),
    *_in(
        "flexsp/compiler/linear_attention.py",
        ("x.chunk_size == self._C]", "x.chunk_size is None]", "programs with a chunk_size have no gradients of theta",
         _THETA + "[batch-contrastive]"),
    ),
    *_in(
        "flexsp/kernels/angles.py",
        ("u2 * x1 - u1 * x2", "u2 * x1 + u1 * x2", "both channels of a pair turn the same way", _THETA_KERNELS + "[delta-None]"),
        ("reverse=True", "reverse=False", "angles turn earlier tokens", _THETA_KERNELS + "[delta-None]"),
        ("one * d_two - two * d_one", "one * d_two + two * d_one", "states turn the same way in both channels",
         _THETA_KERNELS + "[delta-None]"),
        ("    if THIRD:", "    if False:", "what writes is not turned", _THETA_KERNELS + "[difference-bounds1]"),
        ("n_chunks + c + 1) * K", "n_chunks + c) * K", "a chunk ends where it begins", _THETA_KERNELS + "[delta-None]"),
        ("behind = ended + row * K * V", "behind = ended", "sequences and heads share one last state", _THETA_KERNELS + "[delta-None]"),
        ("        if last:\n", "        if first:\n", "documents end where they begin", _THETA_KERNELS + "[difference-bounds1]"),
        ("+ n_seg) * H + h)", "+ n_seg - 1) * H + h)", "angles forget the next rank in kernels", _THETA_KERNELS_RANKS),
        ("(p < K // 2)[:, None] & (v < V)", "(p < K)[:, None] & (v < V)", "pairs beside the state are read", _THETA_SIZES),
    ),
]  # fmt: skip
# ruff: noqa: E501 (texts of code are kept whole)
