"""The changes of tests/mutate.py to examples/."""

from __future__ import annotations

from tests.mutate import in_file as _in

__all__ = ["EXAMPLES"]

_TEST = "tests/test_synthetics.py::"
_DOCUMENTS = "tests/bench/test_bench_documents.py::"
_STOPS = _TEST + "test_training_stops_once_all_lengths_are_solved"
_BATCHES = _TEST + "test_batches_are_fresh_and_tests_are_not"
_TABLE = _TEST + "test_a_table_of_a_file"

EXAMPLES = [
    *_in(
        "examples/synthetic_tasks.py",
        ("bits.cumsum(1) % 2", "bits.cumsum(1) % 3 % 2", "parity is another count",
         _TEST + "test_parity_is_that_of_all_bits_so_far"),
        ("S3.index(tuple(after[before.index(i)]", "S3.index(tuple(before[after.index(i)]", "steps lead the other way",
         _TEST + "test_permutations_act_one_after_another"),
        ("[:, :count].sort(1).values", "[:, :count]", "marks have the symbols in another order",
         _TEST + "test_marks_stand_for_the_symbols_in_their_order"),
        ("scatter_(1, places, values)", "scatter_(1, places.flip(1), values)", "answers stand at other questions",
         _TEST + "test_questions_are_answered_by_the_pairs_before"),
        ("[after[:, :-1], after[:, 1:]]", "[after[:, 1:] * 0, after[:, 1:]]", "a token is its own label",
         _TEST + "test_a_token_does_not_tell_its_label"),
        ("if length > self.lengths[0]:", "if length > 999:", "positions of the training's length count in longer texts",
         _BATCHES),
        (".manual_seed(zlib.crc32", ".manual_seed(time.time_ns() % 2**32 + 0 * zlib.crc32", "tests differ from call to call",
         _BATCHES),
        ("all(min(accuracy) >= SOLVED", "all(max(accuracy) >= SOLVED", "one length solved stops the training", _STOPS),
        ("for _, accuracy in curve[-2:]", "for _, accuracy in curve[-1:]", "one good test stops the training",
         _TEST + "test_one_good_test_is_not_enough"),
        ("manual_seed(1 + seed)", "manual_seed(1)", "seeds have one stream of texts", _TEST + "test_seeds_draw_other_texts"),
    ),
    *_in(
        "examples/synthetics.py",
        ('while "error" not in result:', "while True:", "a process goes on after an error",
         _TEST + "test_an_error_is_a_line_of_the_pipe_and_the_worker_ends"),
        ("worker.end()\n                    worker = None", "pass", "a worker is kept after an error",
         _TEST + "test_a_worker_trains_many_cells_and_a_new_one_comes_after_an_error"),
        ('"task": task, "seed": seed, **result}', '"task": task, "seed": 0, **result}', "lines have no seed",
         _TEST + "test_a_worker_trains_many_cells_and_a_new_one_comes_after_an_error"),
        ("for what in (*SAME, \"tiny\"):", "for what in SAME:", "tiny results are mixed with others",
         _TEST + "test_results_of_another_machine_or_commit_are_not_mixed"),
        ('lines if line.endswith("}")]  # the last', "lines]  # the last", "a line cut off stops a run",
         _TEST + "test_results_go_on_from_a_line_cut_off_and_the_last_of_a_cell_counts"),
        ("statistics.median(found), found[-1])", "statistics.mean(found), found[-1])", "the table has means", _TABLE),
        ('if row.get("solved")]', "]", "unsolved runs count among the steps", _TABLE),
    ),
    *_in(
        "tests/tested.py",
        (' or report.outcome != "passed"', "", "a test whose fixture fails is not counted",
         "tests/test_tested.py::test_a_session_leaves_a_record"),
        ("env = runs[-1][1]", "env = runs[0][1]", "the table shows the oldest run", "tests/test_tested.py::test_a_cell_has_the_newest_run_of_each_file_with_all_its_parts"),
        ('endswith(f"/{of}")', 'endswith("")', "a half is added to a whole", "tests/test_tested.py::test_a_cell_has_the_newest_run_of_each_file_with_all_its_parts"),
        ('run["environment"]["device"] != "cpu"', "True", "runs on CPU stand among those on GPUs", "tests/test_tested.py::test_a_cell_has_the_newest_run_of_each_file_with_all_its_parts"),
    ),
    *_in(
        "flexsp/bench/summary.py",
        ("alone[key][0] >= date", "alone[key][0] <= date", "an earlier time of an op is shown",
         _DOCUMENTS + "test_an_earlier_time_of_an_op_alone_gives_way_to_a_later_one"),
        ("            if not others:", "            if True:", "times beside another library go",
         _DOCUMENTS + "test_an_earlier_time_of_an_op_alone_gives_way_to_a_later_one"),
        ('key=lambda result: str(result["environment"]["date"])', "key=lambda result: 0", "an earlier step is shown",
         _DOCUMENTS + "test_of_the_same_training_step_the_newest_is_shown"),
        (" if any(ratio for _, ratio in by.values())", "", "layers without another library are among the ratios",
         "tests/bench/test_bench_released.py::test_tables_of_released_layers"),
    ),
]
# ruff: noqa: E501 (texts of code are kept whole)
