"""The changes of tests/mutate.py to schedules over ranks, above all of several hosts."""

from __future__ import annotations

from tests.mutate import in_file as _in

__all__ = ["HOSTS"]

_FILE = "tests/scan/test_hierarchical.py::"
_HOSTS = _FILE + "test_what_arrives"
_KERNEL = "tests/scan/test_composing.py::test_against_pytorch"
_COST = "tests/scan/test_cost.py::test_forms_of_several_hosts_by_hand"

HOSTS = [
    *_in(
        "flexsp/scan/schedules.py",
        ("sp.world_size - 1, sp.rank, -1)", "sp.world_size - 1, sp.rank + 1, -1)", "the next rank's gradient is lost",
         "tests/scan/test_schedules.py::test_incoming_state[2-all_gather]"),
    ),
    *_in(
        "flexsp/scan/hierarchical.py",
        ("(state if at < 2 * d else through, place", "(state if at < d else through, place",
         "a message meets another buffer", _HOSTS),
        ("upto[d:], upto[:-d]", "upto[d:], upto[1 : 1 - d or None]",
         "ranks of a host are not composed in order", _HOSTS),
        ("return _Place(local[::-1], ", "return _Place(local, ",
         "ranks of a host go backward in the other direction", _HOSTS),
        ("composed(transition, heard, arrived[0])", "composed(transition, arrived[0], heard)",
         "hosts are not composed in order", _HOSTS),
        ("through = heard[1]", "through = heard[0]", "a host leaves itself out", _HOSTS),
        ("hosts - 1).bit_length()", "hosts).bit_length() - 1", "a step between hosts is missing", _HOSTS),
        ("            running[tick] = runs[tick]", "            running |= dict(enumerate(runs))",
         "all pieces are gathered before one goes on", _FILE + "test_pieces_are_under_way_together"),
        ("int(nbytes // PIECE_BYTES)", "MOST_PIECES", "small states are cut into pieces",
         _FILE + "test_small_states_are_in_one_piece_and_large_ones_in_several"),
        ("shares = [0, *itertools.accumulate(hosts)], min(hosts)", "shares = [0, *itertools.accumulate(hosts)], 1",
         "one network card carries all", _FILE + "test_every_network_card_carries_its_part"),
    ),
    *_in(
        "flexsp/scan/transitions.py",
        ("through.masked_fill_(closed, 0.0)", "pass", "an infinite factor opens what is closed",
         _FILE + "test_what_is_not_finite_stays_before_a_cut"),
        ("through.masked_fill_(before == -torch.inf, -torch.inf)", "pass", "maxima pass documents with a shift of +inf",
         _FILE + "test_shifts_that_are_not_finite_stay_before_a_cut"),
        ("state.add_(F)", "pass", "what the later one adds is lost", _HOSTS),
    ),
    *_in(
        "flexsp/scan/compose_kernel.py",
        ("tl.where(a == 0.0, 0.0, a * S) + F", "a * S + F", "NaN passes where documents begin", _KERNEL),
        ("(a == 0.0) | (before == 0.0)", "a == 0.0", "an infinite factor opens what is closed", _KERNEL),
        ("if earlier.dim() == 3 else 0", "if earlier.dim() == 4 else 0", "many stretches meet one", _KERNEL),
        ("inside & (c == 0)", "inside & (r == 0)", "factors of all rows but one are left out", _KERNEL),
    ),
    *_in(
        "flexsp/scan/cost.py",
        ("nbytes / (inside * pieces)", "nbytes / pieces", "one network card carries all", _COST),
        ("far * first + behind}", "far * nbytes}", "nothing flows between hosts", _COST),
    ),
    *_in(
        "flexsp/launch/bootstrap.py",
        ("itertools.groupby(machines)", "itertools.groupby(sorted(machines))",
         "ranks that are no neighbours share a host", _FILE + "test_hosts_of_ranks"),
        ("check_calls, per_host)\n", "check_calls)\n", "ranks disagree about their hosts",
         _FILE + "test_hosts_are_found_or_given"),
    ),
]
