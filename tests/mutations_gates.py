"""The changes of tests/mutate.py to ops and layers with a gate for each channel."""

from __future__ import annotations

from tests.mutate import in_file as _in

__all__ = ["GATES"]

_OPS = "tests/test_vector_gates.py::test_against_the_token_loop"
_SIZES = "tests/test_vector_gates.py::test_gates_of_all_sizes"
_LAYERS = "tests/test_gated_layers.py::test_formulas"
_RWKV7 = "tests/test_rwkv7_layer.py::test_formulas"
_MAMBA3 = "tests/test_mamba3.py::test_against_the_token_loop"
_BY_KERNEL = "tests/test_exchange_by_kernel.py::"
_MAMBA3_RANKS = "tests/test_mamba3.py::test_ranks_equal_one_rank"
_MAMBA3_LAYER = "tests/test_mamba3.py::test_the_layers_formula"
_MAMBA3_KERNELS = "tests/test_mamba3_kernels.py::test_kernels[documents]"
_MAMBA3_PARTS = "tests/test_mamba3_kernels.py::test_parts"
_MAMBA3_OVER = "tests/test_mamba3_kernels.py::test_documents_over_ranks"

_HALF = "tests/test_generated_programs.py::test_scores_kernels_of_bfloat16"

_SUMS_OF_GLA = "tests/test_gate_gradients.py::test_gates[gla]"
_SUMS_OF_HGRN2 = "tests/test_gate_gradients.py::test_gates[hgrn2]"

GATES = [
    *_in(
        "flexsp/comm/derivatives.py",
        ("x = x if x.stride() == stride else x.contiguous()", "pass", "kernels read saved tensors in other strides",
         "tests/test_derivatives.py::test_saved_tensors_may_come_back_in_other_strides"),
        ("if x.dtype != dtype:", "if False:", "kernels read saved tensors of another type",
         "tests/test_derivatives.py::test_changed_saved_tensors_are_refused"),
    ),
    *_in(
        "flexsp/compiler/backend/intrinsic_kernels.py",
        ("kc * tl.exp(-beyond)\n", "kc * tl.exp(beyond)\n", "keys of mild chunks decay the other way",
         _HALF + "[16-mild]"),
        ("tl.where(far == 0, 1, 0)", "1", "all chunks meet in the middle", _HALF + "[64-to -1e4]"),
        ("tl.where(i < j + zero, both, 0.0)", "tl.where(i > j + zero, both, 0.0)",
         "keys of mild chunks have the gradients of queries", _HALF + "[16-mild]"),
        ("to_b -= new * y.to(tl.float32)", "to_b -= new * (kc * tl.exp(-beyond))",
         "what pairs of mild chunks add to gates does not cancel", _HALF + "[16-mild]"),
        ("tl.where(second, new, -new) * x.to(tl.float32)", "tl.where(second, new * qc, -new * kc) * decay",
         "what pairs of halves add to gates does not cancel", _HALF + "[64-to -1e4]"),
    ),
    *_in(
        "flexsp/variants/hgrn2.py",
        ("decayed_scores(q, -g.expm1(), b)", "decayed_scores(q, g.exp(), b)", "keys are the gates themselves", _OPS),
    ),
    *_in(
        "flexsp/variants/rwkv6.py",
        ("lower.tril(-1) - lower.tril(-2)", "lower.tril(0) - lower.tril(-1)", "a token reads what it wrote", _OPS),
        ("g.cumsum(0) - g ", "g.cumsum(0) ", "a token reads the state after its own decay", _OPS),
        ("(q * u * k)", "(q * k)", "the bonus has no effect", _OPS),
    ),
    *_in(
        "flexsp/variants/vector_state.py",
        ("g.cumsum(0).exp() * chunk_state", "g.exp() * chunk_state", "what enters a chunk decays by one gate", _OPS),
    ),
    *_in(
        "flexsp/ops/_programs.py",
        ("functional.threshold(wide(g, like), least, least)", "functional.threshold(wide(g, like), -1e9, -1e9)",
         "gates are not clamped", _SIZES),
        ("state.transpose(-1, -2).contiguous() if call.state_v_first else state", "state",
         "final states have keys first", "tests/test_vector_gates.py::test_states_with_values_first"),
        ("new if bonus is None else S", "new if bonus is None else new", "decoding reads twice what it wrote",
         "tests/test_vector_gates.py::test_token_by_token"),
        ("S.clone() if S is state else S", "S", "the state of no tokens is the one that was given",
         "tests/test_vector_gates.py::test_no_tokens"),
    ),
    *_in(
        "flexsp/ops/rg_lru.py",
        ("-torch.expm1(2 * g)", "-torch.expm1(g)", "inputs are weighed by another root", _OPS),
        ("torch.where(closed, 1.0, x).sqrt()", "x.sqrt()", "a gate that underflowed has no gradient", _SIZES),
    ),
    *_in(
        "flexsp/nn/recurrent.py",
        ("*self._taps(), cu_seqlens)", "*self._taps())", "convolutions reach across documents",
         "tests/test_gated_layers.py::test_documents_are_separate"),
        ("return y, LayerCache(state, conv_cache)", "return y, LayerCache(state, cache.conv)",
         "a prompt leaves no inputs to the convolutions", "tests/test_gated_layers.py::test_decoding"),
    ),
    *_in(
        "flexsp/nn/gated_layers.py",
        ("x.repeat_interleave(repeats, dim=2)", "x.repeat(1, 1, repeats, 1)", "heads read other groups' keys", _LAYERS),
        ("g = g.clamp(min=self.clamp_min)", "pass", "the least gate has no effect", _LAYERS),
        ("bound.clamp(min=torch.finfo(g.dtype).tiny)", "bound", "a bound of 0 has no gradient",
         "tests/test_gated_layers.py::test_the_least_gate_has_a_gradient"),
        ("(F.silu(_wide(i)) * -g.expm1())", "(_wide(i) * -g.expm1())", "HGRN's inputs are not activated", _LAYERS),
        ('F.silu(q), "v"', 'q, "v"', "HGRN2's queries are not activated", _LAYERS),
        ("heads @ self.input_gate_weight", "heads @ self.recurrent_gate_weight", "both gates have one map", _LAYERS),
        ("-most.log() / 8", "-most.log() / 4", "the initial decays are other ones",
         "tests/test_gated_layers.py::test_initialisation"),
    ),
    *_in(
        "flexsp/variants/rwkv7.py",
        ("g.cumsum(0) - g  # a token", "g.cumsum(0)  # a token", "what is removed is read after the decay", _OPS),
        ("(b * left).T @ (w @ prev_s)", "(b * left).T @ (w @ chunk_state)", "what a chunk removes is read elsewhere",
         _OPS),
        ("decayed_scores(q, b, since) @ reads", "decayed_scores(q, b, since) @ u",
         "what enters a chunk is not removed inside it", _OPS),
    ),
    *_in(
        "flexsp/ops/rwkv7.py",
        ("removed = (removes[:, t] * state)", "removed = (removes[:, t] * decay[:, t].unsqueeze(-1) * state)",
         "decoding reads the decayed state", "tests/test_vector_gates.py::test_token_by_token"),
    ),
    *_in(
        "flexsp/nn/rwkv7.py",
        ("before.masked_fill((since < 1)[None, :, None], 0.0)", "before", "the token before a document is mixed in",
         "tests/test_rwkv7_layer.py::test_decoding_and_documents"),
        ("first = tokens_before(x, 1, sp)", "first = 0 * tokens_before(x, 1, sp)",
         "a shard's first token is mixed with 0",
         "tests/test_rwkv7_layer.py::test_ranks_equal_one_rank"),
        ("-math.exp(-0.5)", "-math.exp(-0.6)", "decays have another bound", _RWKV7),
        ("(1 + (a - 1) * self.k_a)", "(1 + a * self.k_a)", "keys have other strengths", _RWKV7),
        ("eps = self.head_dim * check_eps", "eps = check_eps", "the norm's epsilon does not grow with heads", _RWKV7),
        ("channel / D) ** (power * left)", "channel / D) ** power", "first weights do not depend on the layer",
         "tests/test_rwkv7_layer.py::test_initialisation"),
    ),
    *_in(
        "flexsp/compiler/graphs/differentiate.py",
        ('return self.role in ("gates", "exponents")', 'return self.role == "gates"', "gates grow past a chunk's end",
         "tests/test_generated.py::test_gates_far_past_underflow_are_finite[rwkv6]"),
    ),
    *_in(
        "flexsp/ops/mamba3.py",
        ("initial.ssm + eta_first[..., None, None] * products(initial.k, value_rows(initial.v, mimo_x))", "initial.ssm",
         "the token before a text is forgotten", _MAMBA3),
        ("(tokens.gamma + eta)[:, :,", "(tokens.gamma + tokens.eta)[:, :,", "products are weighed by their own step",
         _MAMBA3),
        ("wrapped=True", "wrapped=False", "angles keep whole turns",
         "tests/test_mamba3.py::test_long_texts_have_precise_angles"),
        ("tie(y, ends[0]) if ends else y", "y", "graphs do not answer for the exchange of last tokens",
         "tests/test_mamba3.py::test_graphs_over_ranks[uneven]"),
        ("tokens.eta[:, t, :, None, None] * products(state.k", "tokens.gamma[:, t, :, None, None] * products(state.k",
         "decoding weighs the token before otherwise", "tests/test_mamba3.py::test_token_by_token"),
    ),
    *_in(
        "flexsp/ops/mamba3.py",
        ("_by_kernels if _has_kernels(sizes, given) else _in_pytorch", "_in_pytorch", "no kernel of Mamba-3 runs",
         _MAMBA3_KERNELS),
        ("arrived.onto(found, arrived.documents, True)", "arrived.onto(found, None, True)",
         "final angles of all documents go on from other ranks", _MAMBA3_OVER),
    ),
    *_in(
        "flexsp/kernels/mamba3/turns.py",
        ("total = tl.where(closed[j] != 0, 0.0, total)", "pass", "sums go on from segment to segment across documents",
         _MAMBA3_KERNELS),
        ("return tl.where(document >= 0, start, total)", "return tl.where(document >= 0, 0.0, total)",
         "documents begin with no angle", _MAMBA3_KERNELS),
        ("(total - tl.floor(total + 0.5)).to(tl.float32)", "total.to(tl.float32)", "kernels keep whole turns",
         _MAMBA3_PARTS),
        ("back * (1.0 - slope * slope)", "back * (1.0 - slope)", "angles have another derivative", _MAMBA3_KERNELS),
        ("tl.abs(x) < _NEAR_ZERO", "tl.abs(x) < 0.0", "small angles are rounded off", _MAMBA3_PARTS),
        ("total = tl.load(initial + b * W + w, mask=valid, other=0.0).to(tl.float64)", "pass",
         "sequences begin with no angle", "tests/test_mamba3_kernels.py::test_kernels[plain]"),
    ),
    *_in(
        "flexsp/kernels/mamba3/rotations.py",
        ("sign = 1.0 - 2.0 * tl.abs(half)", "sign = 1.0", "half a turn turns nothing", _MAMBA3_PARTS),
        ("tl.where((t < until)[:, None]", "tl.where((t <= until)[:, None]",
         "what arrives reaches the next document", _MAMBA3_OVER),
        ("there & (t < count)", "there", "ranks before answer for all documents", _MAMBA3_OVER),
        ("of_weight - back * product", "of_weight", "a token's weight has no part in its own product", _MAMBA3_KERNELS),
        ("weight * v2 - less * y2\n        u1", "weight * v2\n        u1", "keys get nothing from own products",
         _MAMBA3_KERNELS),
        ("products += x3 * y3 + x4 * y4", "pass", "own products leave out channels that do not turn",
         "tests/test_mamba3_kernels.py::test_kernels[plain]"),
        ("inside = (p < K // 2) & (second < 2)", "inside = (p < K) & (second < 2)", "biases reach other channels",
         "tests/test_mamba3_kernels.py::test_kernels[documents without states]"),
        ("other=0.0).to(tl.float32) + factor[:, None] * back", "other=0.0).to(tl.float32)",
         "values get nothing from the skip", _MAMBA3_KERNELS),
        ("tl.range(group * (H // G), (group + 1) * (H // G), num", "tl.range(0, H // G, num",
         "all groups answer for the first one's heads", _MAMBA3_KERNELS),
    ),
    *_in(
        "flexsp/kernels/run.py",
        ("x.data_ptr() % 16 == 0)", "True)", "launches forget alignments",
         "tests/test_mamba3_kernels.py::test_what_tells_launches_apart[alignment of B]"),
    ),
    *_in(
        "flexsp/kernels/mamba3/op.py",
        ("None if dlast is None else _dense(dlast).contiguous()", "None", "sums do not answer to the ranks behind",
         _MAMBA3_OVER),
        ("zip(shapes, grads[:4]", "zip(shapes, (*grads[:3], None)", "outputs do not answer for the skip",
         _MAMBA3_KERNELS),
    ),
    *_in(
        "flexsp/ops/_rows.py",
        ("row >= j, -eta", "row > j, -eta", "a token reads its own products twice", _MAMBA3),
        ("sp=sp, op=op, rows=R", "sp=sp, op=op, rows=1", "rows are taken for tokens", _MAMBA3_RANKS),
    ),
    *_in(
        "flexsp/ops/_rotary.py",
        ("x[..., :S], x[..., K // 2 : K // 2 + S]", "x[..., :S], x[..., S : 2 * S]", "halves pair other channels",
         _MAMBA3),
    ),
    *_in(
        "flexsp/scan/by_kernel.py",
        ("own, entering = slots if reverse else reversed(slots)", "own, entering = reversed(slots)",
         "states go to the right where they should go to the left", _BY_KERNEL + "test_both_roads_agree[2]"),
        ("(F.new_zeros if first", "(F.new_ones if first", "what enters the first rank is not 0",
         _BY_KERNEL + "test_values"),
        ("-(-rows // each), each", "rows // each, each", "tiles have no room", _BY_KERNEL + "test_values"),
        (" with states {facts_of((F,))}", "", "states of two shapes in equal tiles are taken for each other",
         _BY_KERNEL + "test_ranks_in_different_calls[shape]"),
        (" and dtype == torch.float32", "", "what is not float32 is sent in it", _BY_KERNEL + "test_who_sends"),
        (" and device.type == sp.device.type", "", "tensors elsewhere are sent by the group's kernel",
         _BY_KERNEL + "test_who_sends"),
    ),
    *_in(
        "flexsp/scan/exchange.py",
        ("not ctx.reverse, ctx.call", "True, ctx.call", "the adjoint of what goes to the left goes to the left",
         _BY_KERNEL + "test_gradients_in_reverse"),
        ("dA.mT if dA is not None and ctx.reverse and", "dA.mT if dA is not None and not ctx.reverse and",
         "matrices have the gradient of their transposes", _BY_KERNEL + "test_gradients_in_reverse[dense]"),
    ),
    *_in(
        "flexsp/scan/sequence.py",
        ("min(lengths) >= width", "max(lengths) >= width", "one shard stands for all",
         _BY_KERNEL + "test_tokens_before"),
        ("_any_token(x, T), sp, \"the token behind\"", "None, sp, \"the token behind\"",
         "tokens of all ranks behind are added up", _BY_KERNEL + "test_tokens_before_and_behind"),
        ("int(T > 0), dtype", "1, dtype", "nothing passes a rank without tokens",
         _BY_KERNEL + "test_tokens_before_and_behind"),
        ("_where(place + 1 < stop, b", "_where(place + 1 <= stop, b", "the next document's first token is seen",
         "tests/test_mamba3.py::test_documents_and_strides"),
        ("(cu_seqlens[1:] - 1 - start)", "(cu_seqlens[1:] - start)", "final states are of the next document",
         "tests/test_mamba3.py::test_documents_and_strides"),
        ("here = here & (begin < stop)", "pass", "a document without tokens ends on several ranks", _MAMBA3_RANKS),
        ("mine = initial.to(mine.dtype)", "pass", "a first rank without tokens loses the initial sum",
         _MAMBA3_RANKS + "[cases1-kinds1]"),
    ),
    *_in(
        "flexsp/nn/mamba3.py",
        ("z.unsqueeze(2) * self.mimo_z.transpose(0, 1)", "z.unsqueeze(2).expand_as(y)", "the gate has no factors",
         _MAMBA3_LAYER),
        (".clamp(min=self.A_floor)", "", "decays have no bound", _MAMBA3_LAYER),
        ('"rotate_pairwise": not self.is_mimo', '"rotate_pairwise": True', "MIMO rotates neighbours", _MAMBA3_LAYER),
    ),
    *_in(
        "flexsp/compiler/graphs/differentiate.py",
        ("last = len(node.args) - 1  # the matrix", 'last = 0 if kind == "inverse" else -1  # the matrix',
         "running gates are kept in half precision", "tests/test_generated.py::test_batched[rwkv6]"),
    ),
    *_in(
        "flexsp/compiler/backend/pieces.py",
        ("{name} += {value.text}", "{name} = {value.text}", "the last piece is the sum of all",
         "tests/test_large_states.py::test_both_sizes[gla]"),
        ("range(0, {self.cols}, ", "range({block(self.cols)}, {self.cols}, ", "the first piece is left out",
         "tests/test_large_states.py::test_both_sizes[gla]"),
    ),
    *_in(
        "flexsp/kernels/gated_keys/prepare.py",
        ("beyond = own - 0.5 * end[None, :]", "beyond = own - 0.4 * end[None, :]", "keys are decayed by another part",
         "tests/test_gated_keys.py::test_one_sequence[mild]"),
        ("store_rows(b, own, K, C, at, C, K, BN)", "pass", "gradients read gates that nothing left",
         "tests/test_gated_keys.py::test_one_sequence[wild]"),
        ("tl.where(far == 0, 1, 0)", "1", "all chunks have mild gates",
         "tests/test_gated_keys.py::test_one_sequence[wild]"),
    ),
    *_in(
        "flexsp/kernels/gated_keys/grads.py",
        ("tl.exp(2.0 * half) * kept", "kept", "what a chunk keeps of a state does not decay",
         "tests/test_gated_keys.py::test_one_sequence[mild]"),
        ("kc = (kc * down).to(DOT)", "kc = kc * down",
         "what pairs of mild chunks add to gates does not cancel", _SUMS_OF_GLA),
        ("        x = x.to(DOT)\n        apart", "        apart", "what pairs of halves add to gates does not cancel",
         _SUMS_OF_GLA),
    ),
    *_in(
        "flexsp/compiler/planning/launches.py",
        ('return [f"{name}{i}" for i in range(3)]', 'return [f"{name}{i}" for i in (0, 1, 1)]',
         "gradients of running gates are written over those of keys", _SUMS_OF_HGRN2),
    ),
    *_in(
        "flexsp/compiler/engine.py",
        ("if padded(K) * padded(V) <= 128 * 64:", "if True:", "numbers beside large states are not refused",
         "tests/test_state_parts.py::test_numbers_beside_large_states"),
    ),
]  # fmt: skip
