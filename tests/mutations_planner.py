# ruff: noqa: E501 (texts of code are kept whole)
"""Changes of flexsp/planner that tests/mutate.py makes; see tests/mutations.py. Its copy has no result files."""

from __future__ import annotations

from tests.mutate import in_file as _in

__all__ = ["PLANNER"]

_PLAN = "tests/planner/test_training_plan.py::"

PLANNER = [
    *_in(
        "flexsp/planner/model_sizes.py",
        ("numbers * _chosen(module, config) // module.num_experts", "numbers // module.num_experts", "one expert is chosen",
         _PLAN + "test_parameters_are_those_of_the_built_model[qwen3_next]"),
        ("if adapter is None or int(adapter[1]) == hybrid:", "if True:", "a token meets all adapters of a shared block",
         _PLAN + "test_a_token_meets_the_weights_that_the_layers_call[zamba2]"),
        ("            seen.add(id(parameter))\n", "", "a shared block counts in each layer",
         _PLAN + "test_parameters_are_those_of_the_built_model[zamba2]"),
    ),
    *_in(
        "flexsp/planner/memory.py",
        ("math.ceil(rows / ranks) * (numbers // rows)", "numbers // ranks", "rows are cut", _PLAN + "test_memory_by_hand"),
        ("2 * numbers * state", "numbers * state", "AdamW has one state", _PLAN + "test_memory_by_hand"),
        ("(layers + 1) * hidden", "hidden", "one layer keeps its hidden states", _PLAN + "test_memory_by_hand"),
        ("key_heads_of_rank(mixer, split.sp)) * wide * tokens", "key_heads_of_rank(mixer, split.sp)) * wide * split.shard(tokens)",
         "heads have the tokens of a shard", _PLAN + "test_memory_of_softmax_attention_by_hand"),
    ),
    *_in(
        "flexsp/planner/measured.py",
        ("max(bytes_ratio, products_ratio)", "products_ratio", "small heads take no time for their bytes",
         _PLAN + "test_operators_take_no_less_time_for_more"),
        ("last.forward * amount / last.tokens, last.both * amount / last.tokens", "last.forward, last.both",
         "long sequences take no longer", _PLAN + "test_operators_take_no_less_time_for_more"),
    ),
    *_in(
        "flexsp/planner/step_time.py",
        ("_sum(tokens - shard + 1, tokens - full)", "_sum(1, shard - full)", "the first rank's queries for the last one's",
         _PLAN + "test_attention_flops_token_by_token"),
        ("total += both + setup.checkpointing * forward", "total += both", "operators are not computed again",
         _PLAN + "test_time_by_hand"),
        ("* (2 + again) * 1e-3 if split.sp > 1", "* 1e-3 if split.sp > 1", "states travel in one pass",
         _PLAN + "test_ranks_add_what_the_cost_model_says"),
        ("moved * (1 - 1 / setup.host)", "moved", "a rank sends itself its parameters",
         _PLAN + "test_ranks_add_what_the_cost_model_says"),
    ),
    *_in(
        "flexsp/planner/splits.py",
        ("(-x.tokens_per_s, x.split.sp)", "(x.tokens_per_s, x.split.sp)", "the worst split is first",
         _PLAN + "test_the_best_split_is_first_and_those_that_do_not_fit_are_last"),
        ("_TIE = 0.01", "_TIE = 0.0", "a split that hardly fits is first for a rate that is as good",
         _PLAN + "test_of_equal_rates_less_memory_is_first"),
        ("found += _in_half(model, setup)", "pass", "nobody is told of states in bfloat16",
         _PLAN + "test_advice_of_states_in_bfloat16_fits"),
        ("low // 1024 * 1024 if low >= 1024 else low", "high + 1024", "advice does not fit", _PLAN + "test_advice_fits"),
    ),
    *_in(
        "flexsp/planner/setup.py",
        ("-(-(last_start + self.sp) // host)", "-(-self.sp // host)", "groups begin with a host",
         _PLAN + "test_hosts_of_a_group"),
        ('"m": 1024**2', '"m": 1000**2', "a million", _PLAN + "test_numbers_of_tokens"),
    ),
]
