"""The changes that tests/mutate.py makes to engines, kernels and what runs them; see tests/mutations.py."""

from __future__ import annotations

from tests.mutate import in_file as _in
from tests.mutations_diagonal import DIAGONAL

_ENGINE = "tests/test_triton_engine.py::"
_EDGES = "tests/test_engine_edges.py::"
_LENGTHS = "tests/test_torch_compile.py::test_one_graph_of_kernels_of_all_lengths"
_ANY_LENGTH = "tests/test_torch_compile.py::test_one_graph_of_all_lengths_and_batches"
_UNUSUAL = "tests/test_unusual_tensors.py::"
_PLAIN = _ENGINE + "test_plain[simple_gla]"
_SSD = _ENGINE + "test_plain[mamba2_groups]"
_SUMS = "tests/test_reference.py::test_errors_of_running_sums_are_averaged_over_cotangents"
_ARITHMETIC = "tests/test_triton_private.py::test_quick_arithmetic_is_arithmetic"
_REWRITTEN = "tests/test_triton_private.py::test_the_quick_interpreter_rewrites_kernels_as_the_plain_one"
_ALIKE = "tests/test_triton_private.py::test_the_quick_interpreter_computes_and_refuses_the_same"
_HALF = "tests/test_triton_private.py::test_bfloat16_in_the_interpreter"
_REFERENCE = "tests/test_reference.py::"
_GENERATED = "tests/test_generated.py::"
_BEHIND = "tests/test_gated_keys.py::test_heads_and_sequences_behind_strides"
_DELTA = "tests/test_delta_engine.py::"
_KEYS_OF_TOKENS = "tests/test_keys_of_tokens.py::test_as_a_row_a_key[three keys, packed]"
_VECTORS = "tests/test_launch_plan.py::test_inputs_are_copied_where_vectors_of_them_do_not_lie_at_multiples_of_16_bytes"
_DELTA_ALL = _DELTA + "test_batched_and_packed[deltanet]"
_CHANNELS_IN_GLUON = "tests/test_compile_delta.py::test_kernels[bf16 128, gates of channels]"
_IN_GLUON = "tests/test_compile_delta.py::test_kernels[bf16 128]"
_MANY_CHANNELS_IN_GLUON = "tests/test_compile_delta.py::test_kernels[bf16 64, many heads, gates of channels]"
_REPEATED = "tests/test_reflections.py::test_against_token_loops"
_STEPS = "tests/test_reflections.py::test_gradients_of_steps"
_DELTA_LARGE = _DELTA + "test_large_heads"
_DELTA_GATED = _DELTA + "test_batched_and_packed[gated_deltanet]"
_DELTA_SEGMENTS = _DELTA + "test_segments[strong]"
_STARTS = _DELTA + "test_documents_that_begin_where_segments_or_ranks_do"
_DELTA_SLOW = _DELTA + "test_segments[slow]"
_CHANNELS = _DELTA + "test_gates_of_channels[medium]"
_CHANNELS_CLOSED = _DELTA + "test_gates_of_channels[closed]"
_CHANNELS_GROWTH = _DELTA + "test_gates_of_channels[growth]"

_KEYS = "tests/test_keys.py::test_against_float64"
_LAUNCHES = "tests/test_keys.py::test_what_tells_launches_apart"
_CHECKS = "tests/test_kept_checks.py::"
_GROUPS = "tests/test_grouped_heads.py::test_as_repeated[gated]"
_SHARED = "tests/test_grouped_heads.py::test_decoding_and_dispatch_modes"
_GROUPS_OVER_RANKS = "tests/test_grouped_heads.py::test_over_ranks[gated]"
_OPS = "tests/test_ops.py::test_against_the_token_loop"


KERNELS = [
    *DIAGONAL,
    *_in(
        "flexsp/scan/propagate.py",
        (' & (tl.atomic_add(counters, 0, sem="relaxed") == 0)', "", "ranks push on after a failure",
         "tests/test_propagate.py::test_behind_a_cut_launches_after_a_failure_pass_it_on"),
    ),
    *_in(
        "flexsp/scan/neighbours.py",
        ("wait_epoch(control + 8, epoch - 2,", "wait_epoch(control + 8, epoch - 9,", "a sender waits for no credit",
         "tests/test_propagate.py::test_slow_receiver_is_not_overrun"),
        ("tl.where((seen >> 32) == epoch, kind, _MISMATCH)", "kind", "a later tile is taken for this one",
         "tests/test_propagate.py::test_what_flags_say"),
    ),
    *_in(
        "flexsp/kernels/delta/wy_transform.py",
        ("below = i[:, None] > i[None, :]", "below = i[:, None] >= i[None, :]", "the matrix has a diagonal twice", _DELTA_ALL),
        ("found - new[:, None, :]", "found + new[:, None, :]", "substitution adds", _DELTA_ALL),
        ("found = unit_inverse(x, C)\n    if", "found = unit_inverse(0.95 * x, C)\n    if", "keys that are alike are less so",
         "tests/test_reflections.py::test_steps_that_do_not_reflect[gated]"),
        ("_joined(a, -_product", "_joined(a, _product", "blocks of the inverse have the wrong sign", _DELTA_ALL),
        ("growth = tl.maximum(tl.abs(1.0 - given * squares), 1.0,", "growth = tl.maximum(0.0 * squares, 1.0,",
         "the horizon knows no growth by large keys", _DELTA + "test_large_keys_have_no_horizon"),
        ("(tl.load(chunk_beta + at * C + i) * scale)[None, :]", "(tl.load(chunk_beta + at * C + i) * scale)[:, None]",
         "scores have the strength of queries", _DELTA_ALL),
        ("kc = (kc * power(total)[:, None]).to(DOT)", "kc = kc.to(DOT)", "W has no decay", _DELTA_GATED),
        ("y = tl.reshape(b.to(DOT), [K // _PART, _PART, N])", "y = tl.reshape(b.to(DOT), [K // _PART, _PART, N]) * (tl.arange(0, K // _PART) < 4)[:, None, None]",
         "products over many keys end at 128", _DELTA_LARGE + "[deltanet]"),
    ),
    *_in(
        "flexsp/ops/_delta.py",
        ("heads.HV // tokens[x].shape[2], False)", "1, False)", "decoding takes the keys of each head to be there", _SHARED),
        ("repeats = 1 if _on_engine(heads, q) else", "repeats = 1 if False else", "keys are repeated before an engine", _GROUPS),
    ),
    *_in(
        "flexsp/kernels/delta/channels.py",
        ("~((total >= -_SMALL) & (total <= _SMALL / 8))", "~((total >= -1e9) & (total <= 1e9))",
         "a whole chunk is one block, whatever its gates", _CHANNELS_CLOSED),
        ("+ (((1 << level) + 1) >> 1), start + tl", "+ ((1 << level) >> 1), start + tl",
         "a token of its own decays to the middle of itself", _CHANNELS_CLOSED),
        ("tl.trans((of_keys - found.to(tl.float32)).to(DOT))", "0.0", "pairs of keys are rounded before the inverse",
         "tests/test_reflections.py::test_inverses_of_keys_that_are_alike"),
        ("if inverse.dtype.element_ty == tl.bfloat16:", "if False:", "the roundings of pairs are not read",
         "tests/test_reflections.py::test_inverses_of_keys_that_are_alike"),
        ("tl.where(within, -1.0, 1.0)", "1.0", "tokens before the middle decay towards it the wrong way", _CHANNELS),
        ("_power(x * sign, rest * sign, DOT)", "_power(x, rest, DOT)", "what is written decays twice", _CHANNELS),
        ("tl.where(n == 0, i + 1, tl.where(odd, start, 0))", "tl.where(n == 0, i, tl.where(odd, start, 0))",
         "a query does not read its own token", _CHANNELS),
        ("start - (1 << level))", "start - (2 << level))", "blocks meet others than the one before", _CHANNELS_CLOSED),
        ("first = tl.floor(gate * _STEPS) / _STEPS", "first = gate * 1.0", "sums of gates are rounded in fp32", _CHANNELS_GROWTH),
        ("h * beta_sh + start * beta_st, beta_st, length, C).to(tl.float32)\n    square", "h + start * beta_st, beta_st, length, C).to(tl.float32)\n    square",
         "steps behind strides are another head's", _DELTA + "test_batched_and_packed[vector_gated_delta]"),
        ("e = _decays(blocks, which + 1, first", "e = _decays(blocks, which, first", "what is written decays from the start", _CHANNELS),
        ("for v1 in tl.static_range(0, V, BV):", "for v1 in tl.static_range(0, BV, BV):",
         "gradients of reads and writes are of the first values", _DELTA_LARGE + "[vector_gated_delta]"),
        ("of_pairs -= mm(y, N", "of_pairs += mm(y, N", "gradients of pairs have the wrong sign", _CHANNELS),
        ("to_g = _exact_sums(_ones(blocks, 3, C)", "to_g = _exact_sums(_ones(blocks, 0, C)", "dg sums the wrong way", _CHANNELS),
        ("to_g += _exact_sums(_ones(blocks, 2, C)", "to_g += _exact_sums(_ones(blocks, 0, C)",
         "dg has what a token writes itself", _CHANNELS),
        ("sums -= pe.to(tl.float32) * z", "sums -= 0.0 * z", "what pairs of tokens add to dg does not cancel", _CHANNELS),
        ("other=0.0) * end)[None, :]", "other=0.0) * 0.0)[None, :]", "dg lacks what passes the chunk", _CHANNELS),
    ),
    *_in(
        "flexsp/kernels/delta/walks.py",
        ("h // GROUP * k_sh\n    slot = states", "h // GROUP * (GROUP == 1) * k_sh\n    slot = states", "segments sum up the first head's keys",
         _GROUPS_OVER_RANKS),
        ("h // GROUP * k_sh\n    do += b * do_sb + h * do_sh\n    slot", "h // GROUP * (GROUP == 1) * k_sh\n    do += b * do_sb + h * do_sh\n    slot",
         "gradients of states come through the first head's keys", _GROUPS_OVER_RANKS),
        ("last = c1 - 1 if REVERSE else c0", "last = c0 if REVERSE else c1 - 1",
         "a segment counts its last chunk's decay twice", _DELTA + "test_what_counts_at_the_ends_of_segments"),
        ("if length >= 0:  # always", "if length < 0:", "scores beside long rows are zero", _DELTA_LARGE + "[vector_gated_delta]"),
        ("        if PACKED:\n            lives = lives & ~begins(table, c0, c1)\n        tl.store(transition_nonzero", "        tl.store(transition_nonzero",
         "NaN passes segments in which a document begins",
         _DELTA + "test_nan_stays_in_its_document_where_segments_have_two[True]"),
        ("tl.where(inside & ~gone, i + 1, 0)", "tl.where(inside & ~gone, i, 0)", "a chunk too few is walked", _DELTA_SLOW),
        ("reached + growth <= HORIZON", "reached + growth <= HORIZON / 20", "the horizon is too near", _DELTA + "test_large_numbers_far_away"),
        ("return walked, ~(total <= HORIZON)", "return walked, ~(total <= 0.0)", "no segment has a matrix", _DELTA_SLOW),
        ("S = tl.where(lives, S, 0.0)", "S = S", "the matrix of what decays is the unit", _DELTA_SEGMENTS),
        ("beta = beta * power(end - b)\n    if", "beta = beta * power(b - end)\n    if",
         "what is written grows", _DELTA_GATED),
        ("dS -= _written(dN, wc", "dS += _written(dN, wc", "errors have no gradient of states", _DELTA_ALL),
        ("            dS = tl.where(first, 0.0, dS)\n    _put", "            dS = dS\n    _put",
         "gradients flow past a document's start in `summarize_backward`", _STARTS + "[segments]"),
        ("c1 = c0 + walked", "c1 = c1 - (c1 - c0 - walked) - 1", "a chunk too few is collected", _DELTA_SLOW),
    ),
    *_in(
        "flexsp/kernels/delta/tokens.py",
        ("return _places(start, length, C, STEPS, 0)", "return _places(start, length, C, STEPS, STEPS - 1)",
         "a token's gate is that of its last key", _KEYS_OF_TOKENS),
        ("key = (start % STEPS).to(tl.int32) + i", "key = i", "every chunk begins with a token", _KEYS_OF_TOKENS),
        ("store_tokens(base, tl.trans(x), stride_t, start,", "store_tokens(base, tl.trans(x), stride_t, 0,",
         "all outputs are those of the first tokens", "tests/test_keys_of_tokens.py::test_as_a_row_a_key[two keys]"),
    ),
    *_in(
        "flexsp/kernels/delta/tiling.py",
        ("min(end * self.per_seg, self.n_chunks)", "end * self.per_seg", "a part has chunks past the last",
         "tests/test_plans_cover.py::test_the_delta_engine"),
        ("return min(self.per_part * self.per_seg, self.n_chunks)", "return self.per_seg", "a part has no room for its chunks",
         "tests/test_plans_cover.py::test_the_delta_engine"),
        ("return max(64, 1 << (self.K - 1).bit_length())", "return 64 if self.K <= 64 else 128", "states have 128 rows at most",
         _DELTA_LARGE + "[gated_deltanet]"),
    ),
    *_in(
        "flexsp/scan/dense.py",
        ("some > 0", "some >= 0", "NaN passes ranks in which a document begins",
         _DELTA + "test_nan_stays_in_its_document_over_ranks[True]"),
        ("for i in range(0, BK, BLOCK):", "for i in range(0, BLOCK, BLOCK):", "large matrices multiply the first rows",
         "tests/test_propagate.py::test_one_rank_with_a_dense_transition"),
    ),
    *_in(
        "flexsp/kernels/delta/scan_segments.py",
        ("n0 = n_seg if REVERSE else 0", "n0 = 0", "gradients enter at the wrong end", _DELTA_SLOW),
        ("if lives & (of_state | passes):", "if not lives & (of_state | passes):",
         "matrices that are nothing are used, others not", _DELTA_SLOW),
        ("if lives & (of_state | passes):", "if lives:", "NaN behind a document's beginning reaches the rank's matrix",
         _DELTA + "test_nan_stays_in_its_document_over_ranks[True]"),
        ("at = inner[None, :] * K + rows[:, None] if REVERSE else", "at = rows[:, None] * K + inner[None, :] if REVERSE else",
         "A is not turned backward", _DELTA_SLOW),
    ),
    *_in(
        "flexsp/kernels/delta/grads.py",
        ("h // GROUP * q_sh", "h // GROUP * (GROUP == 1) * q_sh", "gradients are of the first head's queries", _GROUPS),
        ("tl.cumsum(until, axis=0, reverse=True)", "tl.cumsum(until, axis=0)", "dg sums the wrong way", _DELTA_GATED),
        ("before = at - 1 + (2", "before = at + (2", "dg has what a token itself writes", _DELTA_GATED),
        ("tl.where(i == length - 1, kept * power(end), 0.0)", "tl.where(i == C - 1, kept * power(end), 0.0)",
         "dg of short chunks has nothing of what passes them", _DELTA_GATED),
        ("to_k = to_k * -power(bc)[:, None]", "to_k = to_k * power(bc)[:, None]", "dk has the wrong sign", _DELTA_GATED),
        ("to_q += own[:, None] * pc.to(tl.float32)", "to_q += 0.0", "a query does not read its own token", _DELTA_ALL),
        ("by_keys = ~by_errors(gain, at, length, w)", "by_keys = i >= 0", "steps of keys that are alike have gradients that cancel",
         _STEPS + "[gated]"),
    ),
    *_in(
        "flexsp/kernels/primitives.py",
        ("(row % H).to(tl.int64) * g_sh", "(row % H) * g_sh", "heads of gates lie within 2^31 numbers",
         _EDGES + "test_heads_of_gates_that_lie_far_apart"),
        ("value = value * w\n", "value = value * 1.0\n", "one column does not decay", "tests/test_mlstm_kernels.py"),
    ),
    *_in(
        "flexsp/kernels/engine.py",
        ("(x.dtype, x.shape, x.stride()", "(x.dtype, x.stride()", "calls with fewer groups run those of more",
         "tests/test_ssd.py::test_calls_that_differ_in_groups_alone"),
    ),
    *_in(
        "flexsp/kernels/primitives.py",
        ("h if GROUP == 1 else h // GROUP", "h if GROUP == 1 else h % GROUP", "heads read another group", _SSD),
        ("tl.where(x < 0.0, e, 1.0) / (1.0 + e)", "tl.where(x > 0.0, e, 1.0) / (1.0 + e)",
         "another derivative of softplus", _SSD),
    ),
    *_in(
        "flexsp/runtime/triton_private.py",
        ("bits + 0x7FFF + ((bits >> 16) & 1)", "bits", "the interpreter rounds towards zero", _HALF),
        ("(handle.data.astype(\"uint32\") << 16)", "handle.data.astype(\"uint32\")", "bits taken for numbers", _HALF),
    ),
    *_in(
        "flexsp/testing/quick_interpreter.py",
        ("key = (element_ty.name, ", "key = (", "types of one shape are one type", _ALIKE),
        ("if data.itemsize > size:", "if False:", "numbers may be wider than their type", _ARITHMETIC),
        ("if a is b else broadcast", "if a == b or len(a) == len(b) else broadcast", "unlike shapes pass", _ALIKE),
        ("lhs.dtype is rhs.dtype in _NUMBERS", "lhs.dtype in _NUMBERS", "int meets float as it is", _ALIKE),
        ("self.ast_transformer.visit(ast.Module([found], []))", "ast.Module([found], [])", "numbers are no tensors", _REWRITTEN),
        ("shapes.setdefault(tuple([n.value for n in self.shape])", "shapes.setdefault(len(self.shape)",
         "shapes of as many sizes are one", _ALIKE),
    ),
    *_in(
        "flexsp/testing/quick_arithmetic.py",
        ("if of is to:", "if of in (to, tl.float64):", "wide numbers stay what they are", _ARITHMETIC),
    ),
    *_in(
        "flexsp/testing/compare.py",
        ("math.isfinite(self.bound) and self.error", "self.error", "what is not finite is as good as a reference that is not",
         _REFERENCE + "test_what_is_not_finite_never_passes"),
        ("x.numel() < FEW or x.dim() < 4", "x.numel() < FEW", "running sums count as many numbers", _SUMS),
        ("if _rows(x) < ROWS", "if False", "a row that outweighs all others has many errors",
         _REFERENCE + "test_a_row_that_outweighs_all_others_has_one_error[one row]"),
        ("if _rows(x) < ROWS", "if True", "every tensor is credited with its largest error",
         _REFERENCE + "test_a_row_that_outweighs_all_others_has_one_error[all rows]"),
        ("_pooled(got), _pooled(want[:n])", "_pooled(got[:1]), _pooled(want[:1])", "one cotangent tells", _SUMS),
    ),
    *_in(
        "flexsp/kernels/table.py",
        ("first = (chunk == 0) & (begin[doc] >= start)", "first = chunk == 0", "a document begins anew on every rank",
         "tests/test_table.py"),
        ("+ (C - 1)) // C)", "+ C) // C)", "a chunk too many where C divides a document", "tests/test_table.py"),
        (".clamp(0, C)", ".clamp(1, C)", "empty documents have a token", "tests/test_table.py"),
        ("(begin >= stop)", "(begin > stop)", "empty documents at the end are lost", "tests/test_table.py"),
    ),
    *_in(
        "flexsp/testing/bounds.py",
        ("(at + np.uint64(nbytes) > ", "(at > ", "just behind a tensor", "tests/test_bounds.py"),
        ("or last + np.uint64(nbytes) > ", "or first + np.uint64(nbytes) > ", "the first element tells", "tests/test_bounds.py"),
    ),
    *_in(
        "flexsp/kernels/primitives.py",
        ("GATE_MIN = tl.constexpr(-104.0)", "GATE_MIN = tl.constexpr(float(\"-inf\"))", "gates are not clamped",
         "tests/test_nonfinite.py::test_gates_of_minus_infinity_in_kernels"),
        ("GATE_MIN, propagate_nan=tl.PropagateNan.ALL)", "GATE_MIN)", "a NaN gate is a closed one",
         _EDGES + "test_nan_is_seen_from_its_token_on[g]"),
        ("+ (row % H).to(tl.int64) * g_sh", "+ (row // H) * g_sh", "gates of another head", _PLAIN),
        ("mask = (rows < K) & (cols < V)", "mask = (rows < K) & (rows < V)", "columns past V", _PLAIN),
        ("length = tl.minimum(T - start, C)", "length = C", "the last chunk is as long as the others", _PLAIN),
    ),
    *_in(
        "flexsp/kernels/engine.py",
        ("(x.dtype, x.shape, x.stride(), x", "(x.dtype, x.shape, x", "a kept call forgets strides", "tests/test_kept_calls.py"),
        ("(x.dtype, x.shape, x.stride(), x", "(x.shape, x.stride(), x", "a kept call forgets types", "tests/test_kept_calls.py"),
        ("x.data_ptr() % 16 == 0)", "True)", "a kept call forgets alignment", "tests/test_kept_calls.py"),
        ("asked.scale, asked.want_final,", "asked.scale,", "a kept call forgets final states", "tests/test_kept_calls.py"),
        ("asked.scale, asked.want_final,", "asked.want_final,", "a kept call forgets the scale",
         "tests/test_kept_calls.py"),
        ("id(tiling), asked.tensors", "asked.tensors", "a kept call forgets how it is cut",
         "tests/test_kept_calls.py::test_the_number_of_documents_tells_calls_apart"),
    ),
    *_in(
        "flexsp/compiler/linear_attention.py",
        ("in_memory if self._autotune else plain", "plain", "a watched pass has another plan than the one that is not",
         _UNUSUAL + "test_a_watched_call_has_the_plan_of_others"),
    ),
    *_in(
        "flexsp/kernels/functions.py",
        ("return torch.compiler.is_dynamo_compiling() and", "return False and", "whole chunks are another graph",
         _ANY_LENGTH + "[simple_gla]"),
    ),
    *_in(
        "flexsp/scan/maxima.py",
        ("if torch.compiler.is_dynamo_compiling() and", "if False and", "twice as many tokens are another graph",
         _ANY_LENGTH + "[mlstm]"),
    ),
    *_in(
        "flexsp/kernels/operators.py",
        ("key = _MANY_SIZES + key", "pass", "another length is another graph", _LENGTHS + "[False-False]"),
        ("SymInt n_docs", "int n_docs", "another number of documents is another graph", _LENGTHS + "[True-False]"),
        ("not x.is_neg() and not", "not", "views that negate are read as they lie", _UNUSUAL + "test_views_that_negate[ops]"),
        ("type(x) in _TENSORS and", "", "tensors without memory are read", _UNUSUAL + "test_tensors_without_memory"),
        ("key is None or plain(do", "True or plain(do", "gradients without memory are read",
         _UNUSUAL + "test_tensors_without_memory[kernels]"),
        ("if _dtypes(tensors, initial) != ctx.dtypes", "if False", "hooks may give back other inputs",
         _UNUSUAL + "test_hooks_that_give_back_others[ops]"),
        ("            ctx.operation = _operation(key)", "            pass", "a variant ends before its backward pass",
         _UNUSUAL + "test_tensors_without_memory[kernels]"),
        ("table = table if n_docs else None", "pass", "checkpoints keep another number of tensors in operators",
         _UNUSUAL + "test_a_checkpoint_of_which_one_pass_is_watched"),
        ("x.new_empty(x.shape if wants else 0)", "x.new_empty(x.shape)", "graphs hold gradients that nobody wants",
         _UNUSUAL + "test_operators_give_what_their_fakes_say[ops]"),
        ("x.new_empty(0) if dx is None or not wants else dx.contiguous()", "dx", "gradients lie otherwise than graphs know",
         _UNUSUAL + "test_operators_give_what_their_fakes_say"),
    ),
    *_in(
        "flexsp/kernels/launch_spec.py",
        ("for name in self.inputs)}) == 1", "for name in self.inputs[:1])}) == 1", "strides of one input serve all",
         "tests/test_launch_plan.py::test_one_token_stride_for_all"),
        ("len({*self.others, *(", "len({*(", "strides of inputs serve outputs",
         "tests/test_launch_plan.py::test_one_token_stride_for_all"),
    ),
    *_in(
        "flexsp/kernels/delta/exact.py",
        ("(tl.abs(beta) > LEAST_BETA)", "(tl.abs(beta) >= 0.0)", "a step of 0 divides", _STEPS + "[gated]"),
        ("ALIKE = tl.constexpr(1 / 3)", "ALIKE = tl.constexpr(2.0)", "no keys are alike", _STEPS + "[kda]"),
        (") & (c < c1)).to(tl.int32)", ")).to(tl.int32)", "all last segments are done token by token",
         "tests/test_reflections.py::test_what_is_done_token_by_token[False]"),
        ("2 * asked >= tokens", "64 * asked >= tokens", "a few tokens that repeat make a text slow",
         "tests/test_reflections.py::test_what_is_done_token_by_token[False]"),
        ("tl.constexpr(1.25)", "tl.constexpr(0.95)", "steps that are contractions are done token by token",
         "tests/test_reflections.py::test_what_is_done_token_by_token[False]"),
        ("v = of_head(v, b, h,", "v = of_head(v, 0, h,", "values of later sequences are the first one's", _REPEATED + "[gated]"),
        ("b, h, do_sb, do_sh)", "b, h, do_sb, 1)", "gradients behind strides are another head's", _REPEATED + "[gated]"),
        ("tl.abs(given) > LIMIT * length", "given > 1e9 * length", "keys that repeat are done in chunks", _REPEATED + "[gated]"),
        ("lives = c1 >= c0\n        if PACKED:\n            lives = ~begins", "lives = c1 < c0\n        if PACKED:\n            lives = ~begins", "a matrix of a segment done token by token is zero",
         "tests/test_reflections.py::test_over_ranks[gated]"),
    ),
    *_in(
        "flexsp/compiler/backend/exact.py",
        (', *token_at("exact_i")]\n    return make_walk', "]\n    return make_walk", "the gradient of a token is taken at the one before",
         _REPEATED + "[own]"),
    ),
    *_in(
        "flexsp/compiler/backend/by_token.py",
        ('f"{da.f32} * {x.f32}"', 'f"{da.f32} + {x.f32}"', "gradients of a token's score are sums", _REPEATED + "[rwkv7]"),
        ('"sum_over({q.f32} * {k.f32} + 0.0, 1)[:, None]"', '"sum_over({k.f32} * {k.f32} + 0.0, 1)[:, None]"',
         "a token's score is that of its key", _REPEATED + "[rwkv7]"),
    ),
    *_in(
        "flexsp/compiler/planning/exact.py",
        ("return self.code.inverts and", "return False and", "inverses of generated kernels are rounded", _REPEATED + "[rwkv7]"),
        ("panels += -(-self.state[0] // width)", "panels += 0", "a shard done token by token hands on a rounded transition",
         "tests/test_reflections.py::test_generated_over_ranks[rwkv7]"),
    ),
    *_in(
        "flexsp/compiler/backend/intrinsic_kernels.py",
        ("mask=some > j, other=0.0)\n        found +=", "mask=some >= j, other=0.0)\n        found +=",
         "an inverse's size has its diagonal", "tests/test_reflections.py::test_which_segments_of_generated_kernels"),
        ("alike > _ALIKE * length", "alike > C * C", "rates just beyond 1 stay in chunks",
         "tests/test_reflections.py::test_which_segments_of_generated_kernels"),
        ("alike > _ALIKE * length", "alike > _ALIKE * C", "keys of short documents are not alike",
         "tests/test_reflections.py::test_which_segments_of_generated_kernels"),
        ("alike > _REPEATED * C * length, -found", "alike > C * C * C, -found",
         "one key and rates up to 1 stay in chunks",
         "tests/test_reflections.py::test_which_segments_of_generated_kernels"),
    ),
    *_in(
        "flexsp/kernels/delta/exact_grads.py",
        ("beta = of_head(beta, b, h,", "beta = of_head(beta, 0, h,", "steps are the first sequence's", _REPEATED + "[gated]"),
        ("    g = of_head(g, b, h,", "    g = of_head(g, 0, h,", "gates are the first sequence's", _REPEATED + "[kda]"),
        ("behind += of_query - _row", "behind += of_query + _row", "gates' gradients add what keys take", _REPEATED + "[kda]"),
        ("(a - read).to", "(a + read).to", "keys' gradients add what is read", _REPEATED + "[delta]"),
    ),
    *_in(
        "flexsp/kernels/delta/exact_grads.py",
        ("tl.debug_barrier()  # rows are read by", "pass  # rows are read by", "rows are read before they are there",
         _REPEATED + "[gated]"),
    ),
    *_in(
        "flexsp/kernels/delta/channels.py",
        ("tl.debug_barrier()  # all of a tile", "pass  # all of a tile", "a tile is written while it is read",
         _DELTA + "test_batched_and_packed[vector_gated_delta]"),
    ),
    *_in(
        "flexsp/compiler/backend/intrinsic_kernels.py",
        ("            tl.debug_barrier()\n            at = pair", "            at = pair", "blocks are read before they are there",
         "tests/test_generated_programs.py::test_inverse_kernel[32]"),
    ),
    *_in(
        "flexsp/kernels/delta/hopper_channels.py",
        ("    visible()\n    of_keys", "    of_keys", "products read what is not there yet", _CHANNELS_IN_GLUON),
    ),
    *_in(
        "flexsp/kernels/delta/hopper_walks.py",
        ("if LATER and not DEEP:\n            gl.thread_barrier()", "if LATER and not DEEP:\n            pass",
         "keys are copied over those that are read", _MANY_CHANNELS_IN_GLUON),
        ("arrived(2 if DEEP else 1 if LATER else 0)", "arrived(3 if DEEP else 1 if LATER else 0)",
         "a chunk's copies may be under way", _CHANNELS_IN_GLUON),
        ("arrived(3 if DEEP else 1)\n        if READS", "arrived(4 if DEEP else 1)\n        if READS",
         "copies of what is read later may be under way", _CHANNELS_IN_GLUON),
    ),
    *_in(
        "flexsp/kernels/delta/hopper_horizon.py",
        ("        arrived(0)\n        c = c0", "        arrived(1)\n        c = c0",
         "a chunk that is multiplied may be under way", _CHANNELS_IN_GLUON),
    ),
    *_in(
        "flexsp/kernels/delta/hopper_grads.py",
        ("gl.thread_barrier()  # all warps", "pass  # all warps", "what products read is written over", _IN_GLUON),
        ("    S._keep_alive()\n    dS._keep_alive()\n", "", "states that products read are written over", _IN_GLUON),
    ),
    *_in(
        "flexsp/kernels/delta/base_plan.py",
        ("or (self.tiling.n_docs and scanned)", "or False", "NaN passes segments without decay",
         _DELTA + "test_nan_stays_in_its_document_where_segments_have_two[False]"),
        ("or (self.tiling.n_docs and scanned)", "or (self.tiling.n_docs and self.tiling.n_seg > 1)",
         "NaN passes a rank without segments", _DELTA + "test_nan_stays_in_its_document_over_ranks[False]"),
    ),
    *_in(
        "flexsp/kernels/delta/delta_plan.py",
        ('"REPEATS": p.group', '"REPEATS": p.group - 1', "the last head of a group adds nothing to gradients", _GROUPS),
        ("tuple(x or states for x in pointers)", 'tuple(x or "q" for x in pointers)',
         "where segments join, a pointer that is not used has another type", "tests/test_compile_delta.py::test_kernels[over ranks]"),
    ),
    *_in(
        "flexsp/kernels/delta/scan_segments.py",
        ("    begin(PDL)\n", "", "a kernel reads before the one before is done",
         "tests/test_kernel_launch.py::test_kernels_wait_for_the_one_before_in_their_first_statement"),
    ),
    *_in(
        "flexsp/kernels/gated_keys/prepare.py",
        ("g += batch * g_sb + h", "g += batch + h", "sequences behind strides are read as if behind none, where gates are small", _BEHIND),
        ("g + batch * g_sb + h", "g + batch + h", "sequences behind strides are read as if behind none", _BEHIND),
    ),
    *_in(
        "flexsp/kernels/gated_keys/tiles.py",
        ("(~(end >= _MUCH))", "(end < _MUCH)", "a chunk with a NaN gate is taken for small",
         "tests/test_gated_keys.py::test_closed_gates_and_nan[dtype0]"),
    ),
    *_in(
        "flexsp/kernels/executable.py",
        ("        if filled:\n", "        if False:\n", "operators return what lay in memory",
         _UNUSUAL + "test_operators_give_what_their_fakes_say[packed kernels]"),
        ("(x.stride(), x.data_ptr() % 16 == 0) for x in (*tensors", "(x.dim(), x.data_ptr() % 16 == 0) for x in (*tensors",
         "an executable forgets strides", "tests/test_dispatch.py::test_gradients_of_tensors_that_lie_otherwise"),
        ("if self.sp_id >= 0 else", "if self.sp_id > 0 else", "the first group is none where saved tensors lie otherwise",
         "tests/test_dispatch.py::test_gradients_of_tensors_that_lie_otherwise[2]"),
        ("for x in (do, dfinal)), dinitial, asked)", "for x in (do, dfinal)), None, asked)",
         "a backward pass forgets whether initial states want gradients", "tests/test_generated_edges.py"),
        ("dinitial, asked)\n", "dinitial)\n", "a kept backward pass forgets whose gradients are asked for",
         "tests/test_kept_calls.py"),
        ("well = well and do.data_ptr() % 16 == 0 and", "well = well and",
         "an outputs' gradient is read in vectors wherever it lies", _VECTORS),
        ("not (aligned and aligned_16(self.strides[name]))", "not aligned_16(self.strides[name])",
         "copies are not made of inputs at odd addresses", _VECTORS),
        ("not (aligned and aligned_16(self.strides[name]))", "not aligned",
         "copies are not made of inputs with odd strides", _VECTORS),
        ("found[name].clone(memory_format=torch.contiguous_format)", "found[name].contiguous()",
         "a contiguous input at an odd address is not copied", _VECTORS),
        ("(None,) if self.plan.surely_fits else (None, given", "(None,) if True else (None, given",
         "a gradient of final states that does not fit is found out late",
         "tests/test_dispatch.py::test_kernels_that_may_not_fit_are_compiled_before_the_first_is_launched"),
        ("saved.dtype != torch.uint8 or saved.numel() != self.saved.nbytes", "False",
         "hooks may give back what kernels cannot read", _UNUSUAL + "test_hooks_that_give_back_others"),
        ("not saved.is_contiguous() or saved.data_ptr() % 16", "False", "memory is read that does not lie well",
         _UNUSUAL + "test_hooks_that_give_back_others"),
        ("if not self.plan.surely_fits:", "if self.plan.surely_fits:",
         "a forward pass runs that has no room for its backward pass",
         "tests/test_dispatch.py::test_kernels_that_may_not_fit_are_compiled_before_the_first_is_launched"),
        ("(plan.n_docs > 0 and self.chained) or plan", "plan",
         "final states of documents that end elsewhere are not zero", _GENERATED + "test_two_uneven_ranks[gla]"),
    ),
    *_in(
        "flexsp/kernels/keys.py",
        ("grad - values * scale * along", "grad + values * scale * along", "the gradient of a norm has the wrong sign", _KEYS),
        ("(row % H) * x_sh", "(row % T) * x_sh", "keys are read from other heads", _KEYS),
        ("for r in tl.static_range(REPEATS):\n        grad +=", "for r in tl.static_range(1):\n        grad +=",
         "one value head's gradient reaches the key", _KEYS),
        ("tl.program_id(0).to(tl.int64) * ROWS", "tl.program_id(0) * ROWS", "offsets of keys overflow",
         "tests/test_keys.py::test_offsets_are_of_64_bits"),
        ("_unit(x1, y1, x1_sb", "_unit(x1, y1, x0_sb", "keys are read with the strides of queries", _KEYS),
        ("max(lengths) * H", "lengths[0] * H", "keys end with the tokens of queries", _KEYS),
        ("x1.shape, x1.stride(), one", "x1.shape, one", "a kept launch forgets the strides of keys",
         _LAUNCHES + "[strides of the second]"),
        ("(x.dtype, x.data_ptr() % 16 == 0) for", "(x.dtype, True) for", "a kept launch forgets alignment",
         _LAUNCHES + "[alignment of the second]"),
        ("x1.stride(), one,", "x1.stride(),", "queries alone have the launch of both", _LAUNCHES + "[only one]"),
        ("key = (repeats, norm,", "key = (norm,", "a kept launch forgets the value heads", _LAUNCHES + "[repeats]"),
        ("if not all(ctx.needs_input_grad[2:])", "if False", "keys that nobody learns have gradients",
         "tests/test_keys.py::test_gradients_of_one_of_two"),
        ("tensors[-1] is tensors[-2]", "x0 is x1", "of a tensor that is query and key one is made",
         "tests/test_keys.py::test_gradients_of_one_of_two"),
    ),
    *_in(
        "flexsp/kernels/keys_in_pytorch.py",
        ("wide.unsqueeze(3).expand(-1, -1, -1, repeats, -1)", "wide.unsqueeze(2).expand(-1, -1, repeats, -1, -1)",
         "value heads have other keys", _OPS),
    ),
    *_in(
        "flexsp/kernels/raw_gates_in_pytorch.py",
        ('return -slope * F.softplus(raw)', 'return -F.softplus(raw)', "A_log has no effect", _OPS),
        ("factor * found", "found", "the bound of gates has no effect", _OPS),
    ),
    *_in(
        "flexsp/ops/_delta.py",
        ("2.0 if allow_neg_eigval", "1.0 if allow_neg_eigval", "no negative eigenvalues", _OPS),
        (" and engine_runs(heads.K, ColumnBlocks.of(heads.V).width, q.device)", "", "generated kernels get gates that nobody clamped",
         "tests/test_nonfinite.py::test_closed_gates_of_delta_rules[torch.float32]"),
        ("call.cu_seqlens * steps", "call.cu_seqlens", "documents end at a step of a token", "tests/test_ops.py::test_documents_and_strides"),
        ('            check.check_non_positive("g", g', '            print("g", g', "gates are not looked at",
         _CHECKS + "test_bad_arguments_after_good_ones[gates]"),
    ),
    *_in(
        "flexsp/ops/_validate.py",
        ("key += (type(x), x)", "key += (None, x)", "True passes for 1", _CHECKS + "test_what_tells_arguments_apart[True for 1]"),
        ("key += (x.shape, x.dtype, x.device)", "key += (x.shape, x.device)", "a check forgets dtypes",
         _CHECKS + "test_what_tells_arguments_apart[dtypes]"),
        ("key += (x.shape, x.dtype, x.device)", "key += (x.shape, x.dtype)", "a check forgets devices",
         _CHECKS + "test_what_tells_arguments_apart[devices]"),
        ("if len(kept) >= _KEPT:", "if False:", "answers pile up", _CHECKS + "test_answers_that_are_kept_are_not_many"),
        ("or torch.jit.is_tracing()", "", "sizes of a trace are kept", _CHECKS + "test_traces_keep_nothing"),
        ("elif isinstance(x, torch.Tensor):", "elif False:", "subclasses are told apart by their addresses",
         _CHECKS + "test_what_is_looked_at_anew[subclasses]"),
    ),
    *_in(
        "flexsp/kernels/launch_plan.py",
        ("if self.own(name) and name not in written:", "if False:", "launches read what nothing wrote",
         "tests/test_lowering.py::test_what_nothing_wrote_is_not_read"),
        ("        if unwritten:", "        if False:", "launches leave out what a call returns",
         "tests/test_lowering.py::test_what_nothing_wrote_is_not_read"),
        ("zero=self.n_docs > 0 or not dfinal", "zero=self.n_docs > 0", "gradients of final states are not asked for",
         _ENGINE + "test_gradients_of_sums"),
        ("return [*launches, *([last] if dinitial else [])]", "return [last] if dinitial else []",
         "without tokens, inputs have no gradients", "tests/test_no_tokens.py::test_as_kernels[delta_rule]"),
        ('copied("@dinitial", "@dfinal") if dfinal', 'zeroed("@dinitial") if dfinal',
         "without tokens, initial states have no gradients", "tests/test_no_tokens.py::test_as_kernels[delta_rule]"),
        ('[copied("@states", "@initial", 0)] if self.initial and not self.n_docs else []', "[]",
         "a first rank without tokens drops the initial state", _DELTA + "test_over_ranks[deltanet]"),
        ('[copied("@dinitial", "@dstates", None, 0)] if dinitial else []', "[]",
         "a first rank without tokens gives no gradients of the initial state", _DELTA + "test_over_ranks[deltanet]"),
    ),
]

# ruff: noqa: E501 (texts of code are kept whole)
