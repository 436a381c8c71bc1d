"""The changes of tests/mutate.py to states whose numbers have a factor each, to states that are maxima, and to
states of delta rules whose sizes are not those of tiles."""

from __future__ import annotations

from tests.mutate import in_file as _in

__all__ = ["STATES"]

_PROGRAMS = "tests/compiler/test_generated_programs.py::"
_DELTA = "tests/kernels/test_hopper_delta.py::test_against_the_token_loop[96, 192]"

STATES = [
    *_in(
        "flexsp/scan/segments.py",
        (
            'float("-inf") if BY == 2 else 0.0)\n    segment',
            "0.0)\n    segment",
            "segments that are not there write 0",
            "tests/scan/test_propagate.py::test_ranks_with_maxima_and_with_factors[posix]",
        ),
    ),
    *_in(
        "flexsp/scan/propagate.py",
        (
            'float("-inf") if BY == 2 else 0.0, NUMBER)',
            "0.0, NUMBER)",
            "ranks begin maxima at 0",
            "tests/scan/test_propagate.py::test_ranks_with_maxima_and_with_factors[posix]",
        ),
    ),
    *_in(
        "flexsp/compiler/backend/walks.py",
        (
            "total = tl.where(length > 0, total {sign} {each}, total)",
            "total = total {sign} {each}",
            "chunks without tokens multiply each number",
            _PROGRAMS + "test_a_decay_that_no_token_changes[A.sigmoid()-bounds7-lengths7]",
        ),
    ),
    *_in(
        "flexsp/compiler/planning/generated_plan.py",
        (
            '[ones("@decay")] if factors',
            '[zeroed("@decay")] if factors',
            "a shard without tokens drops the state",
            "tests/compiler/test_generated.py::test_three_ranks_with_an_empty_shard[gla_outer_gates]",
        ),
    ),
    *_in(
        "flexsp/scan/maxima.py",
        (
            "reached < F, 0.0, 0.5",
            "reached < F, 0.0, 1.0",
            "equal numbers do not share their gradient",
            "tests/grammar/test_max_plus.py::test_equal_numbers_share_gradients_as_in_a_loop",
        ),
        (
            "F, shift = torch.where(first, torch.maximum(F, a + begun), F)",
            "F, shift = F",
            "documents begin at -inf",
            "tests/grammar/test_max_plus.py::test_against_the_token_loop[packed]",
        ),
    ),
    *_in(
        "flexsp/scan/transitions.py",
        (
            'by=2, adjoint="elementwise"',
            'by=2, adjoint="max-plus"',
            "gradients of maxima are maxima",
            _PROGRAMS + "test_maxima[a matrix]",
        ),
    ),
    *_in(
        "flexsp/kernels/gluon.py",
        ("found = found & (gl.arange", "found = found | (gl.arange", "tiles have what lies beyond their rows", _DELTA),
    ),
    *_in(
        "flexsp/kernels/delta/hopper_grads.py",
        ("passes += passed", "passes += 0.0", "of a chunk's decay only the last values have a gradient", _DELTA),
        ("there = there & (columns < K)", "there = there & True", "gradients of a row are written beyond it", _DELTA),
    ),
]
