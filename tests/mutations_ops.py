"""The changes of tests/mutate.py to public operators: the tail of packed documents, layouts, dtypes, edges of kernels."""

from __future__ import annotations

from tests.mutate import in_file as _in

__all__ = ["OPS"]

_CONSTANTS = "tests/kernels/test_selective_scan.py::test_the_same_for_all_tokens"
_TAIL, _PEERS, _EDGES = "tests/kernels/test_tail.py::", "tests/ops/test_peers_calls.py::", "tests/ops/test_op_edges.py::"
_RECIPES, _SEQ_IDX = "tests/ops/test_recipes.py::", "tests/ops/test_seq_idx.py::"
_UNTRANSFORMED = "        untransformed(cls.title, IN_PYTORCH)\n"
_FINAL = "        want_final = operators.wants_final(output_final_state, cu_seqlens, sp)\n        initial"
_DTYPES = "tests/compiler/test_fallback.py::test_all_dtypes_but_float64_have_kernels"
_CHECKS = "tests/ops/test_kept_checks.py::"

OPS = [
    *_in(
        "flexsp/ops/_recipe.py",
        ("facts += (kind, x)", "facts += (kind,)", "calls by recipe forget numbers", _RECIPES + "test_what_tells_calls_apart[the scale]"),
        ("[torch.is_grad_enabled(), len(GROUPS), *kwargs]", "[len(GROUPS), *kwargs]", "a call without gradients is taken for one with them",
         _RECIPES + "test_gradients_wanted_or_not_tell_calls_apart"),
        ("len(GROUPS), *kwargs]", "*kwargs]", "a call by recipe forgets a group that was opened since",
         _RECIPES + "test_a_group_that_is_opened_later_is_missed"),
        (" and each.aligned == _aligned(tensors)", "", "calls by recipe forget alignment",
         _RECIPES + "test_what_tells_calls_apart[alignment]"),
        ("facts += (group.id, group.transport", "facts += (group.transport", "calls by recipe forget the group",
         _RECIPES + "test_groups_tell_calls_apart_and_lengths_are_checked"),
        (", *(group.lengths or ())", "", "shards of another length than was set are taken",
         _RECIPES + "test_groups_tell_calls_apart_and_lengths_are_checked"),
        ('if getattr(group, "asked", 0) != asked:', "if False:", "lengths of other ranks are kept", _RECIPES + "test_over_ranks[True]"),
        ("is_in_torch_dispatch_mode() or transformed()", "is_in_torch_dispatch_mode()", "forward mode is not seen",
         _RECIPES + "test_transforms_and_forward_mode_are_refused_after_plain_calls"),
        ("watched = is_in_torch_dispatch_mode() or", "watched =", "graphs of operators have launches in place of operators",
         _RECIPES + "test_what_looks_at_a_call_sees_the_op"),
        (" or not _guards_tell()", "", "guards are trusted that tell nothing", _RECIPES + "test_without_guards_there_are_no_recipes"),
        ("found[1 - _LAYOUTS :]", "found", "layouts are kept without end", _RECIPES + "test_few_calls_are_kept"),
        (" or check.readable(tensors[0])", "", "values are read once", _RECIPES + "test_checks_of_values_are_made_where_they_are_asked_for"),
        (" and len({id(x) for x in tensors}) == len(tensors)", "", "a tensor stands for another one",
         _RECIPES + "test_tensors_that_are_read_otherwise_or_twice"),
    ),
    *_in(
        "flexsp/runtime/recipe.py",
        ("(y if get is None else None, get) for", "(y, get) for", "recipes keep tensors alive", _RECIPES + "test_no_tensor_of_a_noted_call_stays"),
        ("        if not isinstance(x, (list, tuple)):\n            raise _Unknown", "        if not isinstance(x, (list, tuple)):\n            return None",
         "what holds tensors is kept", _RECIPES + "test_what_no_step_made_has_no_recipe"),
        ("            self.complete = False  # numbers", "            pass  # numbers", "numbers of a noted call are kept",
         _RECIPES + "test_what_no_step_made_has_no_recipe"),
        ("    finally:\n        _here.notes = None\n", "    finally:\n        pass\n", "a call that fails is noted on",
         _RECIPES + "test_a_failing_call_leaves_no_notes"),
    ),
    *_in(
        "flexsp/runtime/steps.py",
        ("self.nbytes + x[0], *x[1:]", "x[0], *x[1:]", "buffers of a forward pass lie on each other", "tests/kernels/test_launch_plan.py::test_buffers_of_two_workspaces_in_one_piece_of_memory"),
    ),
    *_in(
        "flexsp/kernels/executable.py",
        ('*self._tails({"o": _rows_of(self.out[given.batched :])})', "", "outputs behind the last document are not written",
         _TAIL + "test_in_kernels[hgrn]"),
        (", *self._tails(self._gradients_of_tokens(makes))", "", "gradients behind the last document are not written",
         _TAIL + "test_in_kernels[hgrn]"),
        ("name in {*given.tokens, *plan.by_token}", "name in given.tokens", "a decay's gradient sums what no document holds",
         _TAIL + "test_in_kernels[gamma]"),
        ("plan.T // x[1])", "1)", "queries with fewer rows than keys have another tail", _TAIL + "test_in_kernels[gated_delta_product]"),
    ),
    *_in(
        "flexsp/kernels/tail.py",
        ("mask=at < left)", "mask=at < left - 1)", "the last number of the tail is not written", _TAIL + "test_in_kernels[hgrn]"),
    ),
    *_in(
        "flexsp/kernels/table.py",
        ("torch.where(used[:, None], rows, tail)", "torch.where(used[:, None], rows, 0)", "slots do not say where the tail begins",
         "tests/kernels/test_table.py::test_empty_documents_at_both_ends"),
    ),
    *_in(
        "flexsp/comm/documents.py",
        ("seq_idx = group.gather(seq_idx)", "pass", "ranks compare no indices over their edges",
         _SEQ_IDX + "test_documents_go_on_over_the_edges_of_ranks"),
        ("begins[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]", "begins[:, 1:] = seq_idx[:, 1:] > seq_idx[:, :-1]",
         "documents begin where indices grow", _SEQ_IDX + "test_boundaries"),
    ),
    *_in(
        "flexsp/ops/mamba2.py",
        ("index_copy(0, self.first, states)", "index_copy(0, self.last, states)", "a row's last document has its initial state",
         _SEQ_IDX + "test_runs_are_documents[False-2]"),
        ("final.index_select(0, runs.last)", "final.index_select(0, runs.first)", "a row's first document has its final state",
         _SEQ_IDX + "test_runs_are_documents[False-1]"),
    ),
    *_in(
        "flexsp/kernels/columns.py",
        ("x.repeat_interleave(self.n, dim)", "x.repeat(*[self.n if i == dim else 1 for i in range(x.dim())])",
         "blocks of columns have weights of another head", "tests/compiler/test_large_values.py::test_documents_as_in_pytorch[mamba3]"),
    ),
    *_in(
        "flexsp/integrations/transformers/check.py",
        ('({"head_dim"} if hasattr(module, "ssm_state_size") else set())', "set()", "wide heads of Mamba-2 are refused",
         "tests/integrations/test_transformers.py::test_other_configs[mamba2-wide]"),
    ),
    *_in(
        "flexsp/kernels/diagonal/in_pytorch.py",
        (".masked_fill(nowhere, 0.0)", "", "tokens of no document have an output", _TAIL + "test_in_pytorch[linear]"),
    ),
    *_in(
        "flexsp/compiler/frontend/functions.py",
        ("min(T, max(0, stop - bounds[-1]))", "min(T, max(0, T - bounds[-1]))", "ranks take the tail of the first",
         "tests/ops/test_sp_ops.py::test_documents_that_end_before_the_tokens[gla]"),
    ),
    *_in(
        "flexsp/ops/mamba2.py",
        ("without_tail((y + x * weight).to(x.dtype), cu_seqlens, sp)", "(y + x * weight).to(x.dtype)", "a skip reaches the tail",
         _TAIL + "test_in_pytorch[mamba2]"),
        ('    check.check_non_positive("A", A, "values <= 0, usually -exp(A_log)")\n', "", "states may grow",
         "tests/ops/test_kept_checks.py::test_bad_arguments_of_mamba2_after_good_ones[read-rates]"),
        ("if state_v_first is None and states:", "if False:", "the layout of states is guessed", "tests/ops/test_validation.py::test_mamba2"),
    ),
    *_in(
        "flexsp/nn/attention/local.py",
        (", (0, 1), value=self.total)", ", (0, 0))", "the tail sees the last document", _TAIL + "test_attention[False-2]"),
    ),
    *_in(
        "flexsp/grammar/objectives.py",
        ("o = without_tail(o, call.cu_seqlens, call.group)", "pass", "what tokens read of themselves reaches the tail",
         _TAIL + "test_objectives[rows]"),
    ),
    *_in(
        "flexsp/scan/tokens.py",
        ("return states.masked_fill(~here", "return states.masked_fill(here & ~here", "rows of other ranks reach gradients",
         "tests/ops/test_sp_ops.py::test_documents_that_end_before_the_tokens[mlstm]"),
    ),
    *_in(
        "flexsp/ops/_peers.py",
        ("elif isinstance(x, torch.Tensor) and x.dtype != lead and", "elif False and", "gates of another half precision are refused",
         _PEERS + "test_what_is_not_in_the_rows_dtype_is_taken_in_float32[simple_gla]"),
        ("made = made[0].to(given[out].dtype), made[1]", "pass", "outputs have the dtype that was computed in",
         _PEERS + "test_gradients_have_the_dtypes_of_the_arguments"),
        ("return made[0].flip(1), made[1]", "return made", "outputs from right to left stay so",
         _PEERS + "test_from_the_last_token_to_the_first[gla]"),
    ),
    *_in(
        "flexsp/ops/mlstm.py",
        ("m[:, -1] if T else entering", "m[:, -1] if T else begun", "a last rank without tokens has the first rank's maxima",
         _EDGES + "test_mlstm_with_a_last_rank_without_tokens"),
        ("tuple(x.transpose(1, 2) if", "tuple(x if", "heads are taken for tokens", "tests/ops/test_validation.py::test_mlstm_with_heads_first"),
    ),
    *_in(
        "flexsp/kernels/functions.py",
        ('how += f", boundaries {cu_seqlens.tolist()}"', 'how += ""', "ranks take different documents",
         "tests/comm/test_disagreement.py::test_values_that_all_ranks_must_agree_on"),
        (" and y.requires_grad]", "]", "in graphs, gradients are asked of final states that depend on nothing",
         "tests/compiler/test_no_tokens.py::test_compiled[kda_in_kernel]"),
    ),
    *_in(
        "flexsp/kernels/vector/walks.py",
        ("o_st, head * o_sh + p, valid, C)\n        slopes", "o_st, head + p, valid, C)\n        slopes", "outputs of later channels answer for the first",
         "tests/kernels/test_vector_state.py::test_kernels[several programs]"),
    ),
    *_in(
        "flexsp/ops/_validate.py",
        ("x.shape[0] < 1 or x.shape[2] < 1", "x.shape[0] < 1", "calls without heads are taken",
         "tests/ops/test_validation.py::test_mamba3_of_no_sequence_or_head"),
        ("if not 1 <= size <= most:", "if False:", "heads of any size are taken", "tests/ops/test_validation.py"),
        ('sp.check_signature((op, x.dtype, f"B={x.shape[0]}", *signature))', "pass", "ranks do not compare their calls",
         "tests/ops/test_sp_ops.py::test_ranks_must_agree_on_the_call"),
        ("if G < 1 or n % G:", "if G < 1:", "groups need not divide heads", "tests/ops/test_validation.py"),
    ),
    *_in(
        "flexsp/nn/recurrent.py",
        ("if rest or not 1 <= size <= most:", "if rest:", "layers take heads of any size",
         "tests/nn/test_layers.py::test_bad_input"),
    ),
    *_in(
        "flexsp/exceptions.py",
        ("dtype != torch.float64 and", "dtype != torch.float32 and", "float32 has no kernels", _DTYPES),
        ("dtype != torch.float64 and", "dtype != torch.float64 or", "all but float64 runs kernels, wherever it is", _DTYPES),
    ),
    *_in(
        "flexsp/kernels/engine.py",
        ("x.stride(), x.data_ptr()", "x.data_ptr()", "a later call is read by the first one's strides",
         _EDGES + "test_vector_states", _EDGES + "test_selective_scan"),
        (_UNTRANSFORMED + _FINAL, _FINAL, "transforms of torch.func reach the kernels",
         "tests/ops/test_derivatives.py::test_transforms_of_kernels_are_refused"),
    ),
    *_in(
        "flexsp/kernels/diagonal/op.py",
        ('("softplus", softplus), ("dt_bias", bias)', '("dt_bias", bias)', "a kept call forgets how steps are made",
         "tests/kernels/test_kept_calls.py::test_what_tells_calls_of_the_dual_apart[softplus]"),
        ('("D", skips)]', '("D", skips or bias)]', "a kept call takes a bias for a skip",
         "tests/kernels/test_kept_calls.py::test_what_tells_calls_of_the_dual_apart[no skip]"),
    ),
    *_in(
        "flexsp/ops/selective_scan.py",
        ("    u = without_tail(u, cu_seqlens, group)  #", "    #", "what lies behind documents reaches a constant B", _CONSTANTS),
        ("delta.to(wide_u.dtype).repeat", "delta.repeat", "gradients of steps are rounded number by number",
         "tests/kernels/test_selective_scan.py::test_the_same_for_all_tokens_beside_steps_of_half_precision"),
        ("u).repeat_interleave(N),", "u).repeat(N),", "numbers have the biases of other channels", _CONSTANTS),
        ("return x[None, None]\n", "return x[None, None].flip(2)\n", "channels have constants of others", _CONSTANTS),
    ),
    *_in(
        "flexsp/kernels/selective/selective_plan.py",
        ("        to[..., N:].zero_()\n", "", "columns behind the last number are read as they lie", _EDGES + "test_selective_scan"),
        ('["delta", self._z or "u", "do"], FINAL', '["delta", "u", "do"], FINAL', "gates of outputs are read as inputs lie",
         "tests/kernels/test_selective_scan.py::test_kernels[small steps]"),
    ),
    *_in(
        "flexsp/kernels/selective/grads.py",
        ("tl.store(to_state, g, mask=inside & first)", "tl.store(to_state, g, mask=inside)", "each segment writes gradients of initial states",
         _EDGES + "test_selective_scan"),
    ),
    *_in(
        "flexsp/kernels/primitives.py",
        ("tl.where(there, slope, 0.0)", "slope", "places without a token have a gradient", _EDGES + "test_selective_scan"),
    ),
    *_in(
        "flexsp/kernels/columns.py",
        ("x.repeat_interleave(self.n, dim)", "x.repeat([self.n if i == dim else 1 for i in range(x.dim())])",
         "blocks of columns have other heads' gates", "tests/compiler/test_large_values.py::test_as_in_pytorch[gated]"),
        ("(self.n, self.width)).transpose(2, 3).flatten(1, 2)", "(self.width, self.n)).movedim(4, 2).flatten(1, 2)",
         "columns of states go to other blocks", "tests/compiler/test_large_values.py::test_blocks"),
    ),
    *_in(
        "flexsp/kernels/mlstm/rows.py",
        ("tl.where(x > 200.0, 200.0, x)", "tl.where(x > 20.0, 20.0, x)", "the least normaliser is cut off", _EDGES + "test_mlstm_quotients"),
        ("tl.where(x < -200.0, -200.0,", "tl.where(x < -20.0, -20.0,", "the least normaliser is cut off below", _EDGES + "test_mlstm_quotients"),
        ("tl.abs(below) == least, 0.5, 1.0)", "tl.abs(below) == least, 1.0, 1.0)", "ties do not share a gradient",
         _EDGES + "test_mlstm_quotients"),
    ),
    *_in(
        "flexsp/kernels/mamba3/autograd_functions.py",
        ("-(-least // _STEP) * _STEP)", "least)", "tokens at segments' edges count twice", _EDGES + "test_mamba3"),
        ("heads = _divisor(H // B.shape[2], _HEADS)", "heads = min(H // B.shape[2], _HEADS)", "the last heads are left out", _EDGES + "test_mamba3"),
        ("z if z.stride(-1) == 1 else z.contiguous() for z in (B, C)", "z for z in (B, C)", "channels are taken to lie side by side",
         _EDGES + "test_mamba3"),
        ("None if z is None else z.contiguous() for z in (B_bias,", "z for z in (B_bias,", "biases are taken to be contiguous",
         _EDGES + "test_mamba3"),
    ),
    *_in(
        "flexsp/ops/mamba3.py",
        ("return angle - _TURN * (angle.detach() / _TURN).round()", "return angle", "decoding keeps whole turns",
         _EDGES + "test_decoding_of_mamba3_keeps_no_whole_turns"),
    ),
    *_in(
        "flexsp/ops/_delta.py",
        (' or name == "vector_gated_delta" or reads > 1)', " or reads > 1)", "gates of channels have a row for each token of several keys",
         "tests/compiler/test_reflections.py::test_against_token_loops[kda product]"),
        ("return out.to(v.dtype), final_state(last, call)", "return out, final_state(last, call)", "decoding answers in float32",
         "tests/ops/test_ops.py::test_recurrent_ops_of_programs[kda-dtype2]"),
    ),
    *_in(
        "flexsp/grammar/mask.py",
        ("dtypes=(q.dtype, torch.float32)", "dtypes=(q.dtype, torch.bfloat16)", "masks take no float32 beside half precision",
         "tests/grammar/test_custom_mask.py::test_arrays_may_be_in_float32_beside_half_precision[gated]"),
    ),
    *_in(
        "flexsp/grammar/objectives.py",
        ("call.column[:, :, None, :, None]).to(v.dtype)", "call.column[:, :, None, :, None]).to(v.dtype) * 0 + call.v",
         "step sizes do not weigh the values of several steps", "tests/grammar/test_objectives.py::test_against_token_loop[steps, exponential-batch]"),
    ),
    *_in(
        "flexsp/grammar/flex_linear_attention.py",
        ('of_tokens = self.transition.kind == "spectral" or', "of_tokens =", "angles of spectral transitions answer to rounded rows",
         "tests/grammar/test_objectives_edges.py::test_the_engine_is_given_rows_of_one_dtype[spectral]"),
        ('"spectral" or "theta" in self.features.inputs', '"spectral"', "angles of rope answer to rounded rows",
         "tests/ops/test_gate_gradients.py::test_angles[rope]"),
    ),
    *_in(
        "flexsp/nn/verify.py",
        ("{torch.float64: torch.complex128, ", "{", "complex numbers keep their precision",
         "tests/nn/test_verify.py::test_complex_numbers_are_converted_to_the_precision_that_is_asked_for"),
        ("if sum(lengths[:rank]) % 2 == 0 and", "if sum(lengths[:rank]) % 2 == 2 and", "verify cuts on the edges of chunks",
         "tests/nn/test_verify.py::test_cuts_are_off_the_edges_of_chunks[2]"),
    ),
    *_in(
        "flexsp/devices.py",
        ("if B * H > MOST_HEADS:", "if B * H >= MOST_HEADS:", "as many heads as a grid has are refused",
         "tests/kernels/test_engine_edges.py::test_more_heads_than_a_grid_has_rows"),
    ),
    *_in(
        "flexsp/nn/attention/function.py",
        ("(not q.is_cuda or q.dtype == torch.float64)", "(not q.is_cuda)", "flex attention is asked for float64",
         "tests/nn/test_attention.py::test_what_auto_takes"),
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
]
# ruff: noqa: E501 (texts of code are kept whole)
