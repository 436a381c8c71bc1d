"""Mutations of the engine for states that decay by a scalar."""

from __future__ import annotations

from tests.mutate import in_file as _in

__all__ = ["DIAGONAL"]

_ENGINE = "tests/test_triton_engine.py::"
_HORIZON = "tests/test_horizon.py::test_gates_of_all_kinds"
_SKIPS = "tests/test_horizon.py::test_what_is_behind_the_horizon_is_not_walked"
_EDGES = "tests/test_engine_edges.py::"
_PLAIN = _ENGINE + "test_plain[simple_gla]"
_SSD = _ENGINE + "test_plain[mamba2_groups]"
_WEIGHTS = _ENGINE + "test_plain[weights, simple_gla]"
_WRITES = _ENGINE + "test_plain[write gates, simple_gla]"
_OTHER_GATES = "tests/test_shared_keys.py::test_of_other_gates"
_OF_SHARED = "tests/test_shared_keys.py::test_of_mamba2[1-1]"
_OF_BLOCKS = "tests/test_shared_keys.py::test_of_mamba2[1000-3]"
_LONG_GATES = "tests/test_gate_gradients.py::test_nothing_is_carried_over_chunks_in_bfloat16[1]"
_LONG_EDGES = "tests/test_gate_gradients.py::test_nothing_is_carried_over_chunks_in_bfloat16[4]"
_WALKS = "tests/test_hopper_walks.py::test_against_the_token_loop"
_LARGE = "tests/test_compile_diagonal.py::test_what_the_interpreter_cannot_show[bf16 256-races]"
_REFERENCE = "tests/test_reference.py::"

DIAGONAL = [
    *_in(
        "flexsp/kernels/diagonal/summarize.py",
        ("S += written(x, w, y, V, DOT, PREC)", "S += written(x, None, y * w[:, None], V, DOT, PREC)",
         "states at edges are of other rounded operands than the walks' own", _LONG_EDGES),
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
        ("power(b_end - written_at)[None, :], kc", "power(b_end)[None, :], kc", "keys decay from the chunk's start", _PLAIN),
        ("weights[None, :], 0.0)", "tl.sum(weights) / C, 0.0)", "tokens have a weight in common", _WEIGHTS),
    ),
    *_in(
        "flexsp/kernels/diagonal/grads.py",
        ("+ (tile * (tl.num_programs(1) // H) + b) * n_seg * H", "+ (tile * (tl.num_programs(1) // H)) * n_seg * H",
         "edges of B > 1 overlap", _EDGES + "test_several_sequences_heads_and_tiles_of_keys"),
        ("tl.load(edges + (i * (tl.num_programs(0) // H) + b)", "tl.load(edges + (i + b)",
         "edges of K > 32 are read as if B were 1", _EDGES + "test_several_sequences_heads_and_tiles_of_keys"),
        ("noise = (b_end < DROP) &", "noise = (b_end < 2 * DROP - 100) &",
         "rounding is carried past closed gates", _EDGES + "test_large_numbers_behind_closed_gates_leave_no_rounding"),
        ("previous += tl.load(term - 1, mask=before", "previous += tl.load(term, mask=before", "a token's own write counts as one before", _PLAIN),
        ("before = valid & (rows > 0)", "before = valid", "the row above a chunk is read", _PLAIN),
        ("written(qc, scale + tl.zeros([C], tl.float32), oc, V, DOT, PREC)", "written(qc, None, oc, V, DOT, PREC) * scale",
         "operands of products held over turns need a third buffer",
         "tests/test_compile_diagonal.py::test_shared_memory_without_learned_gates"),
        ("arrived = _all_of(read_sums, at // C, READ_TILES, READ_BK)", "arrived = tl.sum(read, axis=0)",
         "rounded reads are carried from chunk to chunk", _LONG_GATES),
        ("departed = _all_of(write_sums, at // C, TILES, BK)", "departed = tl.sum(previous, axis=0)",
         "rounded writes are carried from chunk to chunk", _LONG_GATES),
        ("_inner_by_rows(ends + (at_doc * per_chunk + tile) * BK, S, end",
         "_inner_by_rows(ends + (at_doc * per_chunk + tile) * BK, S.to(DOT).to(tl.float32), end",
         "rounded last states are carried from chunk to chunk", _LONG_GATES.replace("[1]", "[packed]")),
        ("ROUNDING * ROUNDING * carried)", "1.0e30 * carried)", "what passes strong decay is always dropped",
         "tests/test_scalar_decay.py::test_gradients_of_gates_before_strong_decay"),
        ("straddle += arrived", "straddle += 0.0", "reads do not straddle", _ENGINE + "test_segments[1]"),
        ("straddle = tl.where(last, edge, straddle)", "straddle = straddle",
         "what straddles a document's end stays", _ENGINE + "test_segments[1]"),
        ("S += written(kc, power(b_end - written_at)", "S += written(kc, power(b_end)",
         "keys decay from the chunk's start for dq", _PLAIN),
        ("da = (dac * decay).to(DOT)", "da = dac.to(DOT)", "dk without the decay", _PLAIN),
        ("dvc += read * weight\n", "dvc += read\n", "gradients of values lack the skip weight", _SSD),
        ("dvc += read * weights[:, None]", "dvc += read", "gradients of values lack weights of tokens", _WEIGHTS),
        ("SUMS, dvc * vc.to(DOT)", "SUMS, (dvc + (oc.to(tl.float32) * weights[:, None] if BY_TOKEN else 0.0)) * vc.to(DOT)",
         "gates answer for what tokens read of themselves", _ENGINE + "test_dk_and_dv_from_one_walk[2]"),
        ("total += tl.load(x + at", "total = tl.load(x + at", "gradients of weights are those of the last part",
         _ENGINE + "test_several_tiles"),
    ),
    *_in(
        "flexsp/kernels/diagonal/shared_grads.py",
        ("(b.to(tl.int64) * kept + c - first_seg * per_seg)", "(c - first_seg * per_seg)",
         "sequences leave their states in one place", _OF_SHARED),
        ("reset = last if REVERSE else first", "reset = False", "states of one document enter the next", _OF_SHARED),
        ("if PACKED and LEFT:", "if False:", "no gradients of initial states of documents", _OF_SHARED),
        ("+ block) * C * C + i[:, None] * C", ") * C * C + i[:, None] * C", "blocks of heads leave scores in one place",
         _OF_BLOCKS),
        ("tl.join(tl.join(writes, same), tl.join(pairs", "tl.join(tl.join(writes, pairs), tl.join(same",
         "what tokens read stands where products of values do", _OF_SHARED),
        ("through += tl.load(passes + at * TILES + n)", "through = tl.load(passes + at * TILES + n)",
         "what passes a chunk is that of the last tile of keys", _OF_SHARED),
        ("tl.where(diagonal, products, 0.0)", "products", "what passes a chunk is of all pairs of columns", _OF_SHARED),
        ("+ tl.cumsum(read, axis=0, reverse=True)", "+ tl.sum(read, axis=0)", "tokens before a gate read past it",
         _OF_SHARED),
        ("tl.trans(ds), qc", "ds, qc", "dk takes what queries read as what keys do", _OF_SHARED),
    ),
    *_in(
        "flexsp/kernels/diagonal/shared_plan.py",
        ("range(0, self.plan.n_seg, self._segments)", "range(0, 1, self._segments)", "one piece of the tokens only",
         _OF_BLOCKS),
        ("first_chunk = first * p.per_seg", "first_chunk = first", "pieces begin at chunks of others",
         "tests/test_shared_keys.py::test_of_other_gates[2]"),
    ),
    *_in(
        "flexsp/kernels/diagonal/step_sizes.py",
        ("b - tl.log2(_positive(step).to(gate.dtype.element_ty))", "b", "keys are not multiplied by their steps", _SSD),
        ("tl.where((step >= 0.0) & (step < _LEAST), _LEAST, step)", "step", "steps of 0 have no gradient",
         "tests/test_ssd.py::test_steps_of_zero"),
        ("written / _positive(step)) * slope", "written / _positive(step))", "the gradient of dt without softplus's",
         _SSD),
        ("valid & ~(step * slow < GATE_MIN)", "valid", "gates that are clamped have a gradient",
         "tests/test_ssd.py::test_gates_that_are_clamped"),
        ("tl.where((step < least) | (step > most), 0.0, slope)", "slope", "steps beyond their limits have a gradient",
         "tests/test_ssd.py::test_limits_of_steps"),
        ("step = tl.where(i < length, step, 0.0)", "pass", "the least step goes on behind the last token",
         "tests/test_ssd.py::test_limits_of_steps"),
        ("(of_gate * slow + written", "(of_gate + written", "the gradient of dt without A", _SSD),
        ("to_A += of_gate * step", "to_A += of_gate", "the gradient of A without the step", _SSD),
        ("x + (i[:, None] * H + group * GROUP) * N", "x + (i[:, None] * H + group) * N", "other heads than the group's",
         _SSD),
    ),
    *_in(
        "flexsp/kernels/diagonal/diagonal_plan.py",
        ('"@writes" if self._exact else "@of_steps"', '"@writes"', "steps' gradients leave out pairs in a chunk", _SSD),
        ('"@of_steps", self._dk_tiles * self._parts(self.tiling.tiles.dk)', '"@of_steps", 1',
         "gradients of write gates are of one part of the channels", _ENGINE + "test_dk_and_dv_from_one_walk[2]"),
        ('            return "@writes", 1\n', '            return "@writes", 2\n',
         "write gates where heads share keys have the gradients of the next chunk too", _OTHER_GATES),
        ('("i" in wanted and self.shared is not None)', "False", "write gates where heads share keys want decays' gradients",
         _OTHER_GATES),
        ("to, steps=self.write_gates, skip", "to, steps=False, skip", "write gates where heads share keys have no gradient",
         _OTHER_GATES),
        ('return self.gate in wanted or "i" in wanted', "return self.gate in wanted",
         "write gates have gradients only where decays have", _ENGINE + "test_weights_of_tokens"),
        ("(write,)\n", "(1, 0, 0)\n", "all tokens have the first one's write gate", _WRITES),
    ),
    *_in(
        "flexsp/kernels/primitives.py",
        ("decay - log * LOG2E", "decay - log", "write gates are not natural logarithms", _WRITES),
        ("at = write + (row // H).to(tl.int64) * w_sb + (row % H)", "at = write + (row % H)",
         "write gates are those of the first sequence", _WRITES),
    ),
    *_in(
        "flexsp/kernels/diagonal/in_pytorch.py",
        ("clamped(since_start[..., -1])", "clamped(since_start[..., 0])",
         "a chunk's decay is its first token's", _REFERENCE + "test_lengths[131-dtype0]"),
        ("torch.where(inside < length", "torch.where(inside <= length", "a chunk reads a token too many",
         _REFERENCE + "test_documents"),
        ("k.to(dtype) * i.to(dtype).exp()", "k.to(dtype) * i.to(dtype).exp2()", "write gates are powers of two",
         _REFERENCE + "test_weights_of_tokens"),
        ("found + self.weights * self.v", "found", "weights of tokens are left out", _REFERENCE + "test_weights_of_tokens"),
    ),
    *_in(
        "flexsp/kernels/diagonal/tiling.py",
        ("// choice.chunk) + n_docs", "// choice.chunk)", "documents have no chunks of their own", "tests/test_plans_cover.py"),
        ("max(1, -(-n_chunks // per_seg)), pieces", "max(1, n_chunks // per_seg), pieces", "the last segment is left out",
         "tests/test_plans_cover.py"),
        ("n_chunks, B * H, device", "n_chunks, B, device", "segments do not count heads",
         "tests/test_plans_cover.py"),
    ),
    *_in(
        "flexsp/kernels/diagonal/hopper_plan.py",
        ('"BY_TOKEN": skip == "w"', '"BY_TOKEN": False', "walks in Gluon take weights of tokens for those of heads",
         "tests/test_launch_plan.py::test_nothing_is_read_before_it_is_written_in_the_engine"),
        ('"TURNED": of_keys', '"TURNED": not of_keys', "large states lie the other way round", _WALKS + "[gates]"),
    ),
    *_in(
        "flexsp/kernels/diagonal/hopper_walks.py",
        ("skip + (start + i) * skip_st", "skip + i * skip_st", "all chunks have the weights of the first",
         _WALKS + "[weights]"),
        ("ends = first if REVERSE else last", "ends = last", "gradients of documents' states are of their ends",
         _WALKS + "[gates]"),
        ("later = gl.minimum(n + 1, count - 1)", "later = n + 1", "what is read ahead may lie in another segment",
         _WALKS + "[gates]"),
        ("found * (power(b_end - reads) if REVERSE", "found * (power(reads) if REVERSE",
         "gradients of large states decay from the wrong end", _WALKS + "[gates]"),
        ("_diagonal(of_skip + at[1] * 2 * C, scores, i == j)", "_diagonal(of_skip + at[1] * 2 * C, scores, i >= j)",
         "weights have what all tokens read", _WALKS + "[weights]"),
        ("visible()  # its pairs", "pass  # its pairs", "copies go where products still read", _LARGE),
        ("        arrived(0)\n        scores = _scores(rs.index(1 - s)", "        scores = _scores(rs.index(1 - s)",
         "products read what is not there yet", _LARGE),
    ),
    *_in(
        "flexsp/kernels/diagonal/diagonal_plan.py",
        ('"@edges" if last is None else "@ends"', '"@edges"',
         "gates of packed documents forget the last states", _ENGINE + "test_documents[simple_gla]"),
        ('if "w" in wanted:', 'if self.of_gate(wanted):', "weights have gradients only where gates have",
         _ENGINE + "test_weights_of_tokens"),
    ),
]
# ruff: noqa: E501 (texts of code are kept whole)
