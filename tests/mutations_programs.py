"""The changes of tests/mutate.py to programs of three functions: states of parts, rows a token, tiles."""

from __future__ import annotations

from tests.mutate import in_file as _in

__all__ = ["PROGRAMS"]

_PARTS = "tests/compiler/test_state_parts.py::"
_NUMBERS = "tests/grammar/test_random_states.py::test_gates_of_channels_beside_numbers"
_PIECES = "tests/compiler/test_generated_programs.py::test_what_needs_all_columns_is_not_taken_in_pieces"
_SENDS = "tests/scan/test_exchange_by_kernel.py::test_who_sends"
_CUTS = "tests/compiler/test_nearly_right_programs.py::test_functions_that_disagree_about_where_a_chunk_ends"
_EDGES = "tests/compiler/test_nearly_right_programs.py::test_chunks_that_are_part_of_the_model"
_CHECK = "tests/compiler/test_check.py::"
_DECODE = "tests/compiler/test_decode.py::"
_STEPS = _DECODE + "test_kernels_against_token_loop"
_ROWS = "tests/compiler/test_input_rows.py::"

PROGRAMS = [
    *_in(
        "flexsp/compiler/planning/generated_plan.py",
        ('"DITHERED": self.products == torch.bfloat16', '"DITHERED": False', "generated inverses are rounded to the nearest number",
         "tests/compiler/test_reflections.py::test_which_generated_inverses_are_dithered"),
    ),
    *_in(
        "flexsp/compiler/backend/pieces.py",
        ("return node.target in _WITH_DIAGONAL or (", "return (", "each piece of the columns has a diagonal of its own", _PIECES),
        ("return sizes[at % len(sizes)] == self.cols", "return False", "running sums start anew in each piece", _PIECES),
        ("found = strange or later", "found = strange", "pieces read a part of a sum over all", _PIECES),
        ('return f"{size} - v0" if size == self.cols else super()._limit(size)', "return super()._limit(size)",
         "the last piece reads past the row",
         "tests/compiler/test_large_states.py::test_pieces_give_what_whole_tiles_give[gla_own_bias]"),
    ),
    *_in(
        "flexsp/scan/by_kernel.py",
        ("max(F.shape[2:]) <= _COLUMNS", "F.shape[3] <= _COLUMNS", "states of more than 256 rows go to the kernel", _SENDS),
        ("max(F.shape[2:]) <= _COLUMNS", "F.shape[2] <= _COLUMNS", "states of more than 256 columns go to it", _SENDS),
    ),
    *_in(
        "flexsp/scan/maxima.py",
        ("start, cut = start.new_full(a.shape[:-1], -torch.inf), first", "cut = first", "what enters the first rank reaches the first document",
         "tests/grammar/test_max_plus.py::test_nothing_enters_from_before_the_documents"),
    ),
    *_in(
        "flexsp/kernels/operators.py",
        ("def forward(ctx: Any, *given: Any) -> tuple[torch.Tensor, Optional]:",
         "def forward(ctx: Any, a: Any, b: Any, c: Any, d: Any, e: Any, *f: Any) -> Any:\n        given = a, b, c, d, e, *f",
         "a graph takes forward for one without ctx",
         "tests/compiler/test_torch_compile.py::test_one_graph_where_all_sizes_are_symbols[hgrn]"),
    ),
    *_in(
        "flexsp/compiler/planning/lowering.py",
        ("if hasattr(x, former) and", "if False and", "an engine's methods of former names are not asked",
         "tests/compiler/test_lowering.py::test_what_no_program_carries"),
    ),
    *_in(
        "flexsp/compiler/frontend/check.py",
        ("if name not in own and not OURS.match(name)", "if name not in own", "an input is named like a gradient",
         "tests/compiler/test_messages.py::test_names_of_inputs_that_kernels_have[d_k]"),
        ("float(z.abs().max())", "float(z.max())", "negative numbers are taken to be small",
         "tests/compiler/test_nearly_right_programs.py::test_numbers_are_compared_by_their_size[-1000000.0]"),
        ("apart = _difference(second.after, whole.after)", "apart = 0.0", "states may depend on where chunks end", _CUTS),
        ("apart = _difference(o, whole.o)", "apart = 0.0", "outputs may depend on where chunks end", _CUTS),
        ("second = self._run(self._part(values, _CUT, _LONG), first.after)",
         "second = self._run(self._part(values, _CUT, _LONG), state)", "the second chunk is not entered by the first one's state",
         _CUTS),
        ("torch.cat([x[:_CUT], torch.zeros_like(x[_CUT:])])", "x[:_CUT]", "no tokens of zeros are tried",
         _CHECK + "test_what_tokens_of_zeros_do"),
        ("self.measured.grows += ((name, strong),)", "pass", "inputs that grow are not reported",
         _CHECK + "test_the_report_of_a_gated_program"),
        ("self.measured.cuts = max(self.measured.cuts or 0.0, _relative(x, y))", "self.measured.cuts = 0.0",
         "what chunks differ by is not measured", _CHECK + "test_chunks_that_are_part_of_a_program"),
        ("torch.Generator(device=\"cpu\").manual_seed(seed)", "torch.Generator(device=\"cpu\").manual_seed(0)",
         "every seed draws the same chunks", _CHECK + "test_the_report_of_a_gated_program"),
        ("self.measured.affine = max(self.measured.affine, apart)", "pass", "no distance from A S + F is measured",
         _CHECK + "test_the_report_of_a_gated_program"),
    ),
    *_in(
        "flexsp/compiler/decode.py",
        ("prev_s.copy_(final)", "pass", "states stay as they were", _DECODE + "test_against_token_loop[gla]"),
        ("or not all(x.of_columns for x in layout.places())", "", "a block reads what another one has stored",
         _DECODE + "test_kernels_of_columns_beside_panels"),
        ("clamped(tokens[name]) for", "tokens[name] for", "closed gates are not clamped",
         _DECODE + "test_a_closed_gate_starts_anew"),
        ("if made.rows * MOST_TOKENS < T:", "if MOST_TOKENS < T:", "rows of tokens count as tokens",
         _DECODE + "test_rows_of_tokens"),
        ("x.dim() == 3 or x.stride(-1) == 1", "True", "channels are taken to lie side by side", _STEPS + "[gla]"),
    ),
    *_in(
        "flexsp/compiler/backend/decode.py",
        ('        "tl.debug_barrier()  # other threads may have yet to read what this one writes over",\n', "",
         "states are written over before all threads have read them", _STEPS + "[gla]"),
        ('x.store("left" + at, f"S{x.suffix}")', 'x.store("left" + at, f"0 * S{x.suffix}")', "no state is left",
         _STEPS + "[gla]"),
        ('"start = first + n"', '"start = first"', "all tokens are the first one", _STEPS + "[gla]"),
        ('*renewed("S", new)]', "]", "states do not change", _STEPS + "[hgrn]"),
    ),
    *_in(
        "flexsp/compiler/frontend/check.py",
        ("text is None, found.cuts", "True, found.cuts", "chunks never matter",
         _CHECK + "test_chunks_that_are_part_of_a_program"),
        ('kind not in ("max-plus", "sequential")', 'kind != "sequential"',
         "a maximum is called affine", _CHECK + "test_updates_that_are_not_affine"),
    ),
    *_in(
        "flexsp/compiler/arguments.py",
        ("if length and into % chunk:", "if False:", "shards start inside chunks that are part of the model", _EDGES),
        ("max(n for n in bounds or [0] if n <= start)", "0", "chunks of packed documents count from the sequence's start",
         _EDGES),
    ),
    *_in(
        "flexsp/compiler/frontend/functions.py",
        ("        if B:\n            return vmap", "        if True:\n            return vmap", "functions are mapped over no sequences",
         "tests/compiler/test_no_tokens.py::test_no_sequences[gla_own_bias]"),
        ("*self.tokens.values(), *self.params.values()]", "*self.tokens.values()]",
         "parameters have no gradient on an empty shard",
         "tests/scan/test_cuts_between_ranks.py::test_parameters_have_gradients_on_a_rank_without_tokens"),
        ("len(states[-1]) >= free", "len(states[-1]) >= max(widths)", "units lie beside a state of parts",
         "tests/grammar/test_custom_transition.py::test_transition_on_ranks_equals_one_rank[counted delta-lengths3]"),
    ),
    *_in(
        "flexsp/compiler/frontend/functions.py",
        ("thin = thin and not has_parts(self.program.decay)", "thin = thin", "what is beside a part decays as its row",
         _NUMBERS),
    ),
    *_in(
        "flexsp/compiler/frontend/flows.py",
        ("self.sizes[flow.part]", "self.sizes[None]", "factors of a part are taken for those of the whole state", _NUMBERS),
    ),
    *_in(
        "flexsp/compiler/arguments.py",
        ("at, n - 1 - at))", "n - 1 - at, at))", "a value lies at another row of its token",
         _ROWS + "test_against_a_token_loop[2-None-False]"),
        ("cu_seqlens * meta.rows", "cu_seqlens", "documents are counted in rows of tokens",
         _ROWS + "test_against_a_token_loop[2-bounds1-False]"),
        ("extra + 1 + len(rows)", "extra + 1", "heads that come first come before a token's rows", _ROWS + "test_heads_first"),
    ),
    *_in(
        "flexsp/compiler/dispatch.py",
        ("if plan is None and code.program.lowerings and", "if False and",
         "kernels that are known to be wrong run what a lowering declines",
         "tests/compiler/test_lowering.py::test_what_a_lowering_serves_and_does_not_take_runs_in_pytorch"),
    ),
    *_in(
        "flexsp/variants/delta_rule.py",
        ("return not (several and", "return not (False and", "the delta engine says that it takes what it does not",
         "tests/compiler/test_lowering.py::test_the_delta_engine_serves_what_it_takes"),
    ),
    *_in(
        "flexsp/compiler/linear_attention.py",
        ("                self._refused(str(error))", "                raise",
         "a fallback is lost where a lowering serves a call and does not take it",
         "tests/compiler/test_lowering.py::test_what_a_lowering_serves_and_does_not_take_runs_in_pytorch"),
        ("if not self.program.lowerings:", "if True:", "kernels are generated for calls that an engine runs",
         "tests/compiler/test_scalar_decay.py::test_kernels_are_generated_where_no_engine_runs_a_call"),
        ("meta.sizes(), meta.rows or 1", "meta.sizes(), 1", "ranks count rows of tokens as tokens",
         _ROWS + "test_ranks_equal_the_token_loop[2-lengths0-bounds1]"),
    ),
    *_in(
        "flexsp/compiler/graphs/inverses.py",
        ("if None in found:", "if found:", "the adjoint of an inverse multiplies [C, C] matrices",
         "tests/compiler/test_step_graphs.py::test_adjoint_of_an_inverse"),
        ("(one, other)), None)", "(one, x.args[1])), None)", "a factor of the adjoint of an inverse is another product",
         "tests/compiler/test_step_graphs.py::test_variants[deltanet]"),
    ),
    *_in(
        "flexsp/compiler/graphs/differentiate.py",
        ("copy_of_it.name = copy_of_it.target = node.name", "pass", "an input named as Python's own is not found",
         "tests/compiler/test_messages.py::test_names_of_inputs_that_graphs_write_their_own_way[input]"),
        ("        if node.name in names:\n", "        if False:\n", "an input has the name of an operator's node",
         "tests/compiler/test_messages.py::test_names_of_inputs_that_graphs_write_their_own_way[mul]"),
        (' and dims(node)[0] != last)', ")", "a walk over some columns reads the first rows of a tile",
         "tests/compiler/test_generated_programs.py::test_kept_tiles_of_all_orders[no axis is tokens]"),
    ),
    *_in(
        "flexsp/compiler/planning/generated_plan.py",
        ("if self.code.dense and not all(holds) else", "if False else", "a matrix multiplies what is beside parts",
         _PARTS + "test_ranks[counted delta-lengths7-None]"),
    ),
    *_in(
        "flexsp/compiler/backend/walks.py",
        ("{cols} == {first}, {name}, 0.0)", "{cols} == {first}, 1.0, 0.0)", "ranks forget the decay of a number",
         _PARTS + "test_ranks[counted delta-lengths7-None]"),
        ("if place.sizes and not place.of_columns", "if not place.of_columns", "segments forget the decay of a number",
         _PARTS + "test_one_rank[counted0]"),
    ),
    *_in(
        "flexsp/compiler/backend/tile_ops.py",
        ("tl.maximum(g.to(tl.float32), GATE_MIN, propagate_nan=tl.PropagateNan.ALL)", "g.to(tl.float32)",
         "generated kernels read gates that nobody clamped", "tests/kernels/test_beside_kernels.py::test_closed_gates_in_bfloat16[hgrn2]"),
        ("tl.where(g.to(tl.float32) <= GATE_MIN, 0.0, x)", "x", "gates that are closed have gradients",
         "tests/kernels/test_beside_kernels.py::test_closed_gates_in_bfloat16[rwkv6]"),
        ("if length >= 0:  # always\n            x = tl.dot(a.to(DOT), b.to(DOT),",
         "if length >= 0:  # always\n            x = tl.dot(a.to(DOT), b,", "products of eight warps have operands of two types",
         "tests/compiler/test_large_states.py::test_operands_of_products_are_rounded_alike"),
        ("_SMALL = tl.constexpr(2048)", "_SMALL = tl.constexpr(1024)", "lanes of a larger sum round differently",
         "tests/compiler/test_generated_offline.py::test_llvm_workaround_of_a_sum_round_alike"),
    ),
]
# ruff: noqa: E501 (texts of code are kept whole)
