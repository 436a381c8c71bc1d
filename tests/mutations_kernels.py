"""The changes that tests/mutate.py makes to engines, kernels and what runs them; see tests/mutations.py."""

from __future__ import annotations

from tests.mutate import in_file as _in

__all__ = ["KERNELS"]

_ENGINE = "tests/test_triton_engine.py::"
_HORIZON = "tests/test_horizon.py::test_gates_of_all_kinds"
_SKIPS = "tests/test_horizon.py::test_what_is_behind_the_horizon_is_not_walked"
_EDGES = "tests/test_engine_edges.py::"
_UNUSUAL = "tests/test_unusual_tensors.py::"
_PLAIN = _ENGINE + "test_plain[simple_gla]"
_SUMS = "tests/test_reference.py::test_errors_of_running_sums_are_averaged_over_cotangents"
_ALIKE = "tests/test_triton_private.py::test_the_quick_interpreter_computes_and_refuses_the_same"
_HALF = "tests/test_triton_private.py::test_bfloat16_in_the_interpreter"
_REFERENCE = "tests/test_reference.py::"
_GENERATED = "tests/test_generated.py::"
_DELTA = "tests/test_delta_engine.py::"
_KEYS_OF_TOKENS = "tests/test_keys_of_tokens.py::test_as_a_row_a_key[three keys, packed]"
_VECTORS = "tests/test_launches.py::test_inputs_are_copied_where_vectors_of_them_do_not_lie_at_multiples_of_16_bytes"
_DELTA_ALL = _DELTA + "test_batched_and_packed[deltanet]"
_CHANNELS_IN_GLUON = "tests/test_compile_delta.py::test_kernels[bf16 128, gates of channels]"
_IN_GLUON = "tests/test_compile_delta.py::test_kernels[bf16 128]"
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
    *_in(
        "flexsp/kernels/delta/prepare.py",
        ("below = i[:, None] > i[None, :]", "below = i[:, None] >= i[None, :]", "the matrix has a diagonal twice", _DELTA_ALL),
        ("found - new[:, None, :]", "found + new[:, None, :]", "substitution adds", _DELTA_ALL),
        ("_joined(a, -_product", "_joined(a, _product", "blocks of the inverse have the wrong sign", _DELTA_ALL),
        ("growth = tl.maximum(tl.abs(1.0 - given * squares), 1.0,", "growth = tl.maximum(0.0 * squares, 1.0,",
         "the horizon knows no growth by large keys", _DELTA + "test_large_keys_have_no_horizon"),
        ("(tl.load(strength + at * C + i) * scale)[None, :]", "(tl.load(strength + at * C + i) * scale)[:, None]",
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
        ("~((total >= -_LITTLE) & (total <= _LITTLE / 8))", "~((total >= -1e9) & (total <= 1e9))",
         "a whole chunk is one block, whatever its gates", _CHANNELS_CLOSED),
        ("+ (((1 << level) + 1) >> 1), start + tl", "+ ((1 << level) >> 1), start + tl",
         "a token of its own decays to the middle of itself", _CHANNELS_CLOSED),
        ("tl.where(within, -1.0, 1.0)", "1.0", "tokens before the middle decay towards it the wrong way", _CHANNELS),
        ("_power(x * sign, rest * sign, DOT)", "_power(x, rest, DOT)", "what is written decays twice", _CHANNELS),
        ("tl.where(n == 0, i + 1, tl.where(odd, start, 0))", "tl.where(n == 0, i, tl.where(odd, start, 0))",
         "a query does not read its own token", _CHANNELS),
        ("start - (1 << level))", "start - (2 << level))", "blocks meet others than the one before", _CHANNELS_CLOSED),
        ("first = tl.floor(gate * _STEPS) / _STEPS", "first = gate * 1.0", "sums of gates are rounded in fp32", _CHANNELS_GROWTH),
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
        ("if length >= 0:  # always", "if length < 0:", "scores beside long rows are zero", _DELTA_LARGE + "[vector_gated_delta]"),
        ("        if PACKED:\n            lives = lives & ~begins(table, c0, c1)\n        tl.store(alive", "        tl.store(alive",
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
         "gradients flow past a document's start in `collect`", _STARTS + "[segments]"),
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
        "flexsp/kernels/delta/plan.py",
        ("return max(64, 1 << (self.K - 1).bit_length())", "return 64 if self.K <= 64 else 128", "states have 128 rows at most",
         _DELTA_LARGE + "[gated_deltanet]"),
    ),
    *_in(
        "flexsp/scan/dense.py",
        ("for i in range(0, BK, BLOCK):", "for i in range(0, BLOCK, BLOCK):", "large matrices multiply the first rows",
         "tests/test_propagate.py::test_one_rank_with_a_dense_transition"),
    ),
    *_in(
        "flexsp/kernels/delta/join.py",
        ("n0 = n_seg if REVERSE else 0", "n0 = 0", "gradients enter at the wrong end", _DELTA_SLOW),
        ("if lives:", "if not lives:", "matrices that are nothing are used, others not", _DELTA_SLOW),
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
    ),
    *_in(
        "flexsp/kernels/diagonal/summarize.py",
        ("slot = (b * (n_seg + 1) + seg + (0", "slot = (b * n_seg + seg + (0", "states of B > 1 overlap", _PLAIN),
        ("w = power(bc) * scale if REVERSE", "w = power(bc) if REVERSE", "no scale backward", _PLAIN),
        ("            S = tl.where(first, 0.0, S)  #", "            S = S  #",
         "gradients flow past a document's start", _ENGINE + "test_segments[256]"),
        ("HORIZON = tl.constexpr(-104.0", "HORIZON = tl.constexpr(-40.0", "the horizon is too near", _HORIZON),
        ("n1 = c0 + walked", "n1 = c1", "the backward walk has no horizon", _SKIPS),
        ("n0 = c1 - walked", "n0 = c0", "the walk has no horizon", _SKIPS),
        ("nearer = c - 1 if REVERSE else c + 1", "nearer = c", "a chunk's own decay puts it behind the horizon", _HORIZON),
        ("mask=inside, other=0).to(tl.int32)", "mask=inside & (i == 0), other=0).to(tl.int32)",
         "only the last chunk's cut counts, with gates", _EDGES + "test_a_document_that_starts_inside_a_segment_between_others"),
        ("cuts = cuts | first.to(tl.int32)", "cuts = first.to(tl.int32)", "only the last chunk's cut counts",
         _EDGES + "test_a_document_that_starts_inside_a_segment_between_others"),
        ("beside = slot + H if REVERSE else slot - H", "beside = slot + 1 if REVERSE else slot - H",
         "zeros beside another head's state", _EDGES + "test_several_sequences_heads_and_tiles_of_keys"),
        ("mask=(tile == 0) & (h == 0)", "mask=(tile == 0) & (h == 1)", "no head writes the cuts",
         _ENGINE + "test_segments[256]"),
    ),
    *_in(
        "flexsp/kernels/diagonal/output.py",
        ("later = rows[None, :] >= rows", "later = rows[None, :] > rows", "a token does not see itself",
         _ENGINE + "test_plain[linear]"),
        ("slot = (b * (n_seg + 1) + seg)", "slot = (b * n_seg + seg)", "states of B > 1 overlap", _PLAIN),
        ("at_doc = (doc * H + h)", "at_doc = (doc * H)", "heads of documents' states overlap",
         _ENGINE + "test_documents[simple_gla]"),
        ("power(b_end - bc)[None, :], kc", "power(b_end)[None, :], kc", "keys decay from the chunk's start", _PLAIN),
    ),
    *_in(
        "flexsp/kernels/diagonal/grads.py",
        ("+ (tile * (tl.num_programs(1) // H) + b) * n_seg * H", "+ (tile * (tl.num_programs(1) // H)) * n_seg * H",
         "edges of B > 1 overlap", _EDGES + "test_several_sequences_heads_and_tiles_of_keys"),
        ("tl.load(edges + (i * (tl.num_programs(0) // H) + b)", "tl.load(edges + (i + b)",
         "edges of K > 32 are read as if B were 1", _EDGES + "test_several_sequences_heads_and_tiles_of_keys"),
        ("noise = (b_end < DROP) &", "noise = (b_end < 2 * DROP - 100) &",
         "rounding is carried past closed gates", _EDGES + "test_large_numbers_behind_closed_gates_leave_no_rounding"),
        ("before = (rows[None, :] < rows", "before = (rows[None, :] <= rows", "a token's own write counts as one before",
         _PLAIN),
        ("mask=valid & (rows > 0), other=0.0)", "mask=valid, other=0.0)", "the row above a chunk is read", _PLAIN),
        ("ROUNDING * ROUNDING * carried)", "1.0e30 * carried)", "what passes strong decay is always dropped",
         "tests/test_scalar_decay.py::test_gradients_of_gates_before_strong_decay"),
        ("straddle += tl.sum(read, axis=0)", "straddle += 0.0", "reads do not straddle", _ENGINE + "test_segments[1]"),
        ("straddle = tl.where(last, edge, straddle)", "straddle = straddle",
         "what straddles a document's end stays", _ENGINE + "test_segments[1]"),
        ("            S += mm(tl.trans(kc) * power(b_end - bc)", "            S += mm(tl.trans(kc) * power(b_end)",
         "keys decay from the chunk's start for dq", _PLAIN),
        ("da = (dac * decay).to(DOT)", "da = dac.to(DOT)", "dk without the decay", _PLAIN),
    ),
    *_in(
        "flexsp/runtime/triton_private.py",
        ("bits + 0x7FFF + ((bits >> 16) & 1)", "bits", "the interpreter rounds towards zero", _HALF),
        ("(handle.data.astype(\"uint32\") << 16)", "handle.data.astype(\"uint32\")", "bits taken for numbers", _HALF),
    ),
    *_in(
        "flexsp/runtime/quick_interpreter.py",
        ("key = (element_ty.name, ", "key = (", "types of one shape are one type", _ALIKE),
        ("if a is b else broadcast", "if a == b or len(a) == len(b) else broadcast", "unlike shapes pass", _ALIKE),
        ("lhs.dtype is rhs.dtype in _NUMBERS", "lhs.dtype in _NUMBERS", "int meets float as it is", _ALIKE),
        ("shapes.setdefault(tuple([n.value for n in self.shape])", "shapes.setdefault(len(self.shape)",
         "shapes of as many sizes are one", _ALIKE),
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
        "flexsp/kernels/diagonal/in_pytorch.py",
        ("since_start[..., -1].clamp", "since_start[..., 0].clamp",
         "a chunk's decay is its first token's", _REFERENCE + "test_lengths[131-dtype0]"),
        ("torch.where(inside < length", "torch.where(inside <= length", "a chunk reads a token too many",
         _REFERENCE + "test_documents"),
    ),
    *_in(
        "flexsp/kernels/table.py",
        ("first = (chunk == 0) & (begin[doc] >= start)", "first = chunk == 0", "a document begins anew on every rank",
         "tests/test_table.py"),
        ("+ (C - 1)) // C)", "+ C) // C)", "a chunk too many where C divides a document", "tests/test_table.py"),
        (".clamp(0, C)", ".clamp(1, C)", "empty documents have a token", "tests/test_table.py"),
        ("(begin >= stop)", "(begin > stop)", "empty documents at the end are lost", "tests/test_table.py"),
    ),
    *_in("flexsp/testing/bounds.py", ("(at + np.uint64(nbytes) > ", "(at > ", "just behind a tensor", "tests/test_bounds.py")),
    *_in(
        "flexsp/kernels/primitives.py",
        ("GATE_MIN = tl.constexpr(-104.0)", "GATE_MIN = tl.constexpr(float(\"-inf\"))", "gates are not clamped",
         "tests/test_nonfinite.py::test_gates_of_minus_infinity_in_kernels"),
        ("GATE_MIN, propagate_nan=tl.PropagateNan.ALL)", "GATE_MIN)", "a NaN gate is a closed one",
         _EDGES + "test_nan_is_seen_from_its_token_on[g]"),
        ("+ (row % H) * g_sh", "+ (row // H) * g_sh", "gates of another head", _PLAIN),
        ("mask = (rows < K) & (cols < V)", "mask = (rows < K) & (rows < V)", "columns past V", _PLAIN),
        ("length = tl.minimum(T - start, C)", "length = C", "the last chunk is as long as the others", _PLAIN),
    ),
    *_in(
        "flexsp/kernels/diagonal/plan.py",
        ("// choice.chunk) + docs", "// choice.chunk)", "documents have no chunks of their own", "tests/test_plans_cover.py"),
        ("max(1, -(-n_chunks // per_seg)))", "max(1, n_chunks // per_seg))", "the last segment is left out",
         "tests/test_plans_cover.py"),
        ("n_chunks, B * H, device", "n_chunks, B, device", "segments do not count heads",
         "tests/test_plans_cover.py"),
    ),
    *_in(
        "flexsp/kernels/diagonal/dispatch.py",
        ("(x.dtype, x.stride(), x", "(x.dtype, x", "a kept call forgets strides", "tests/test_kept_calls.py"),
        ("(x.dtype, x.stride(), x", "(x.stride(), x", "a kept call forgets types", "tests/test_kept_calls.py"),
        ("x.data_ptr() % 16 == 0) for x", "True) for x", "a kept call forgets alignment", "tests/test_kept_calls.py"),
        ("*looks, scale, want_final,", "*looks, scale,", "a kept call forgets final states", "tests/test_kept_calls.py"),
        ("*looks, scale, want_final,", "*looks, want_final,", "a kept call forgets the scale",
         "tests/test_kept_calls.py"),
        ("key = (id(plan), given", "key = (given", "a kept call forgets its plan", "tests/test_kept_calls.py"),
    ),
    *_in(
        "flexsp/kernels/diagonal/launches.py",
        ("p.packed and self.ends and self.gate", "False and self.gate",
         "gates of packed documents forget the last states", _ENGINE + "test_documents[simple_gla]"),
        ('zero=p.packed or not dfinal', 'zero=p.packed', "gradients of final states are not asked for",
         _ENGINE + "test_gradients_of_sums"),
    ),
    *_in(
        "flexsp/compiler/linear_attention.py",
        ("in_memory if self._autotune else plain", "plain", "a watched pass has another plan than the one that is not",
         _UNUSUAL + "test_a_watched_call_has_the_plan_of_others"),
    ),
    *_in(
        "flexsp/kernels/operators.py",
        ("not x.is_neg() and not", "not", "views that negate are read as they lie", _UNUSUAL + "test_views_that_negate[ops]"),
        ("type(x) in _TENSORS and", "", "tensors without memory are read", _UNUSUAL + "test_tensors_without_memory"),
        ("key is None or plain(do", "True or plain(do", "gradients without memory are read",
         _UNUSUAL + "test_tensors_without_memory[kernels]"),
        ("if _dtypes(tensors, initial) != ctx.dtypes", "if False", "hooks may give back other inputs",
         _UNUSUAL + "test_hooks_that_give_back_others[ops]"),
        ("            ctx.operation = _operation(key)", "            pass", "a variant ends before its backward pass",
         _UNUSUAL + "test_tensors_without_memory[kernels]"),
        ("table = table if docs else None", "pass", "checkpoints keep another number of tensors in operators",
         _UNUSUAL + "test_a_checkpoint_of_which_one_pass_is_watched"),
        ("final if keeps_final else None", "None", "gates of packed documents forget the last states in operators",
         _UNUSUAL + "test_tensors_without_memory[packed ops]"),
        ("x.new_empty(x.shape if wants else 0)", "x.new_empty(x.shape)", "graphs hold gradients that nobody wants",
         _UNUSUAL + "test_operators_give_what_their_fakes_say[ops]"),
        ("x.new_empty(0) if dx is None or not wants else dx.contiguous()", "dx", "gradients lie otherwise than graphs know",
         _UNUSUAL + "test_operators_give_what_their_fakes_say"),
    ),
    *_in(
        "flexsp/kernels/launches.py",
        ("for name in self.inputs)}) == 1", "for name in self.inputs[:1])}) == 1", "strides of one input serve all",
         "tests/test_launches.py::test_one_token_stride_for_all"),
        ("len({*self.others, *(", "len({*(", "strides of inputs serve outputs",
         "tests/test_launches.py::test_one_token_stride_for_all"),
    ),
    *_in(
        "flexsp/kernels/delta/hopper_channels.py",
        ("    visible()\n    of_keys", "    of_keys", "products read what is not there yet", _CHANNELS_IN_GLUON),
    ),
    *_in(
        "flexsp/kernels/delta/hopper_walks.py",
        ("arrived(2 if DEEP else 1 if LATER else 0)", "arrived(3 if DEEP else 1 if LATER else 0)",
         "a chunk's copies may be under way", _CHANNELS_IN_GLUON),
        ("arrived(3 if DEEP else 1)\n        if READS", "arrived(4 if DEEP else 1)\n        if READS",
         "copies of what is read later may be under way", _CHANNELS_IN_GLUON),
    ),
    *_in(
        "flexsp/kernels/delta/hopper_reach.py",
        ("        arrived(0)\n        c = c0", "        arrived(1)\n        c = c0",
         "a chunk that is multiplied may be under way", _CHANNELS_IN_GLUON),
    ),
    *_in(
        "flexsp/kernels/delta/hopper_grads.py",
        ("gl.thread_barrier()  # all warps", "pass  # all warps", "what products read is written over", _IN_GLUON),
        ("    S._keep_alive()\n    dS._keep_alive()\n", "", "states that products read are written over", _IN_GLUON),
    ),
    *_in(
        "flexsp/kernels/delta/launches.py",
        ("or (self.plan.docs and self.plan.n_seg > 1)", "or False", "NaN passes segments without decay",
         _DELTA + "test_nan_stays_in_its_document_where_segments_have_two[False]"),
        ('"REPEATS": p.group', '"REPEATS": p.group - 1', "the last head of a group adds nothing to gradients", _GROUPS),
        ("tuple(x or states for x in pointers)", 'tuple(x or "q" for x in pointers)',
         "where segments join, a pointer that is not used has another type", "tests/test_compile_delta.py::test_kernels[over ranks]"),
        ("return [*launches, *([first] if dinitial else [])]", "return [first] if dinitial else []",
         "without tokens, inputs have no gradients", "tests/test_no_tokens.py::test_as_kernels[delta_rule]"),
        ('copied("@dinitial", "@dfinal") if dfinal', 'zeroed("@dinitial") if dfinal',
         "without tokens, initial states have no gradients", "tests/test_no_tokens.py::test_as_kernels[delta_rule]"),
    ),
    *_in(
        "flexsp/kernels/recipe.py",
        ("(x.stride(), x.data_ptr() % 16 == 0) for x in (*tensors", "(x.dim(), x.data_ptr() % 16 == 0) for x in (*tensors",
         "a recipe forgets strides", "tests/test_dispatch.py::test_gradients_of_tensors_that_lie_otherwise"),
        ("for x in (do, dfinal)), dinitial, asked)", "for x in (do, dfinal)), None, asked)",
         "a backward pass forgets whether initial states want gradients", "tests/test_generated_edges.py"),
        ("dinitial, asked)\n", "dinitial)\n", "a kept backward pass forgets whose gradients are asked for",
         "tests/test_kept_calls.py"),
        ("not (aligned and in_vectors(self.strides[name]))", "not in_vectors(self.strides[name])",
         "copies are not made of inputs at odd addresses", _VECTORS),
        ("not (aligned and in_vectors(self.strides[name]))", "not aligned",
         "copies are not made of inputs with odd strides", _VECTORS),
        ("found[name].clone(memory_format=torch.contiguous_format)", "found[name].contiguous()",
         "a contiguous input at an odd address is not copied", _VECTORS),
        ("(None,) if self.call.facts.sure else (None, given", "(None,) if True else (None, given",
         "a gradient of final states that does not fit is found out late",
         "tests/test_dispatch.py::test_kernels_that_may_not_fit_are_compiled_before_the_first_is_launched"),
        ("saved.dtype != torch.uint8 or saved.numel() != self.saved.nbytes", "False",
         "hooks may give back what kernels cannot read", _UNUSUAL + "test_hooks_that_give_back_others"),
        ("not saved.is_contiguous() or saved.data_ptr() % 16", "False", "memory is read that does not lie well",
         _UNUSUAL + "test_hooks_that_give_back_others"),
        ("if not self.call.facts.sure:", "if self.call.facts.sure:",
         "a forward pass runs that has no room for its backward pass",
         "tests/test_dispatch.py::test_kernels_that_may_not_fit_are_compiled_before_the_first_is_launched"),
        ("(call.facts.docs > 0 and self.chained) or call", "call",
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
        "flexsp/ops/_delta.py",
        ('return -slope * F.softplus(raw)', 'return -F.softplus(raw)', "A_log has no effect", _OPS),
        ("lower_bound * raw.sigmoid()", "-1.0 * raw.sigmoid()", "the bound of gates has no effect", _OPS),
        ("2.0 * found if allow_neg_eigval", "found if allow_neg_eigval", "no negative eigenvalues", _OPS),
        (" and engine_runs(heads.K, heads.V, q.device)", "", "generated kernels get gates that nobody clamped",
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
        "flexsp/kernels/launches.py",
        ("if call.own(name) and name not in written:", "if False:", "launches read what nothing wrote",
         "tests/test_lowering.py::test_what_nothing_wrote_is_not_read"),
        ("    if left:", "    if False:", "launches leave out what a call returns",
         "tests/test_lowering.py::test_what_nothing_wrote_is_not_read"),
    ),
]

# ruff: noqa: E501 (texts of code are kept whole)
