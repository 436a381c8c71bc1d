"""The changes of tests/mutate.py to programs of three functions: states of parts, rows a token, tiles."""

from __future__ import annotations

from tests.mutate import in_file as _in

__all__ = ["PROGRAMS"]

_PARTS = "tests/test_state_parts.py::"
_NUMBERS = "tests/test_random_states.py::test_gates_of_channels_beside_numbers"
_ROWS = "tests/test_input_rows.py::"

PROGRAMS = [
    *_in(
        "flexsp/compiler/frontend/functions.py",
        ("        if B:\n            return vmap", "        if True:\n            return vmap", "functions are mapped over no sequences",
         "tests/test_no_tokens.py::test_no_sequences[gla_own_bias]"),
        ("*self.tokens.values(), *self.params.values()]", "*self.tokens.values()]",
         "parameters have no gradient on an empty shard",
         "tests/test_cuts_between_ranks.py::test_parameters_have_gradients_on_a_rank_without_tokens"),
        ("len(states[-1]) >= free", "len(states[-1]) >= max(widths)", "units lie beside a state of parts",
         "tests/test_custom_transition.py::test_transition_on_ranks_equals_one_rank[counted delta-lengths3]"),
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
        "flexsp/compiler/linear_attention.py",
        ("meta.sizes(), meta.rows or 1", "meta.sizes(), 1", "ranks count rows of tokens as tokens",
         _ROWS + "test_ranks_equal_the_token_loop[2-lengths0-bounds1]"),
    ),
    *_in(
        "flexsp/compiler/graphs/differentiate.py",
        (' and dims(node)[0] != last)', ")", "a walk over some columns reads the first rows of a tile",
         "tests/test_generated_programs.py::test_kept_tiles_of_all_orders[no axis is tokens]"),
    ),
    *_in(
        "flexsp/compiler/planning/launches.py",
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
]
# ruff: noqa: E501 (texts of code are kept whole)
