"""Changes of what ranks say after a fault, for tests/mutate.py."""

# ruff: noqa: E501 (texts of code are kept whole)
from __future__ import annotations

from tests.mutate import in_file as _in

__all__ = ["FAULTS"]

_CAUSE = "tests/comm/test_root_cause.py::"
_FAULTS = "tests/comm/test_faults.py::"
_WAITED = _FAULTS + "test_traces_of_ranks_that_waited"
_DIFFERENT = _FAULTS + "test_traces_of_ranks_in_different_calls"
_CIRCLE = _FAULTS + "test_traces_of_ranks_that_wait_for_each_other"
_VERDICT = _FAULTS + "test_a_verdict_stays_unless_its_rank_reports_another"
_STORE = _FAULTS + "test_ranks_take_over_the_first_verdict"
_WRITTEN = _FAULTS + "test_a_user_writes_what_has_been_exchanged[posix]"
_ALL = _FAULTS + "test_all_ranks_name_the_same_fault"

FAULTS = [
    *_in(
        "flexsp/comm/faults.py",
        ('key=lambda row: (row["heard"], row["number"], row["rank"])', 'key=lambda row: (row["number"], row["rank"])',
         "what a rank only heard counts as much as what another met", _WAITED),
        ('about = [row for row in reports.values() if row["peer"] == rank] or', "about =",
         "another rank's report says where the fault began", _WAITED),
        ("(CLOSED, \"broke off its connection to\") if by[\"closed\"]", "(CLOSED, \"broke off its connection to\") if False",
         "a rank that died is called silent", _WAITED),
        ("len(reports) == world_size - 1 and made == same", "len(reports) == world_size - 1",
         "a rank that waits for another is called silent", _CIRCLE),
        ("if decided or verdict is None:", "if True:", "a rank that came late changes the verdict", _VERDICT),
        ("(verdict is None or verdict.kind != CIRCLE)", "verdict is None", "a rank that waits in another call is not found",
         _CIRCLE),
        ("verdict is not None and verdict.kind == MISMATCH", "verdict is not None",
         "a rank that made another call stays a silent one", _DIFFERENT),
        ("(-votes[rank], _gave_up(reports, rank), rank))\n    other", "(votes[rank], _gave_up(reports, rank), rank))\n    other",
         "most ranks are wrong", _DIFFERENT),
        ("_gave_up(reports, rank), rank))\n    other", "rank))\n    other", "a rank that gave up a call is believed", _DIFFERENT),
        ('not row["heard"] or at not in reports or at in path', "True", "what a rank heard is taken for what it met",
         _DIFFERENT),
        ("        at = row[\"peer\"] if row[\"peer\"] is not None else _instead(reports, path, world_size)",
         "        at = row[\"peer\"]", "who waited for all ranks learns from none",
         _FAULTS + "test_traces_from_ranks_that_do_not_know_for_whom_they_waited"),
        ("if index not in read and store.check([f\"{key}/report/{index}\"]):", "if index not in read:",
         "a rank that died while it reported stops the others", _STORE),
        ('before = "" if verdict is None else', 'before = "" if True else', "a verdict is never corrected",
         _FAULTS + "test_a_rank_that_was_named_too_early_corrects_the_verdict"),
        ("        except OSError as problem:", "        except KeyError as problem:", "a full disk hides the error",
         _FAULTS + "test_a_folder_that_cannot_be_written_hides_no_error"),
        ("    answers = report(sp, error)\n    found", "    sp.reported, answers = _report_of(sp, error), True\n    found",
         "ranks keep to themselves what they met", _FAULTS + "test_a_rank_tells_the_others_once_what_it_met"),
        ("    _dump(sp, error)\n    record_root_cause(sp, error)\n    return error\n\n\ndef among",
         "    record_root_cause(sp, error)\n    return error\n\n\ndef among", "files do not say whose fault it was",
         _ALL + "[process_group-chain-dies-True]"),
        ("    record_root_cause(sp, error)\n    return error\n\n\ndef among", "    return error\n\n\ndef among",
         "torchrun is told nothing", _CAUSE + "test_torchrun_names_the_rank_at_fault[hangs-True]"),
        ("if answers and (store", "if (store", "ranks wait for reports in a store that is gone",
         _CAUSE + "test_no_rank_waits_long_for_the_reports_of_others[False]"),
        ("min(patience, _MOST_S)", "patience", "ranks wait for minutes before their job ends",
         _CAUSE + "test_no_rank_waits_long_for_the_reports_of_others[True]"),
    ),
    *_in(
        "flexsp/comm/root_cause.py",
        ("now - 1)", "now + 1)", "the rank at fault fails later than who tells of it",
         _CAUSE + "test_the_rank_at_fault_is_told_of_as_earlier"),
        ("rank - own + local", "rank", "the file of another rank of the host",
         _CAUSE + "test_the_rank_at_fault_is_told_of_as_earlier"),
        ("sp.global_ranks[error.fault.rank]", "error.fault.rank", "ranks of a group are taken for ranks of the world",
         _CAUSE + "test_the_rank_at_fault_is_told_of_as_earlier"),
        ("        time.sleep(_LATER_S)", "        pass", "healthy ranks fail in the same second",
         _CAUSE + "test_a_healthy_rank_lets_a_second_pass"),
        ("    if mine.parent.name != str(local):", "    if False:", "files of other launchers are written",
         _CAUSE + "test_without_files_nothing_happens[elsewhere]"),
    ),
    *_in(
        "flexsp/comm/recorder.py",
        ("entry[_ENDED] = time_ns()", "entry", "exchanges never end", _WRITTEN),
        ("(peer, rank) if peer == entry[_SOURCE]", "(rank, peer) if peer == entry[_SOURCE]", "hops go the wrong way",
         _ALL + "[process_group-chain-dies-True]"),
    ),
    *_in(
        "flexsp/comm/ranks.py",
        ("        beside.replace(file)\n", "        file.write_text(beside.read_text())\n", "a file may be read half written",
         _WRITTEN),
        ("            self.failure = self.records.error(self.rank)  # once", "            raise self.records.error(self.rank) or OSError  # once",
         "kernels' errors do not say where it began", _ALL + "[posix-chain-calls another op-False]"),
    ),
    *_in(
        "flexsp/comm/device.py",
        ("tl.store(record + 7, number)", "tl.store(record + 7, low)", "which call it was is not told",
         _ALL + "[posix-chain-calls another op-False]"),
    ),
    *_in(
        "flexsp/exceptions.py",
        ("self.direction, self.detail)\n        return (type(self), fields, vars(self))",
         "self.direction, self.detail)\n        return (type(self), fields)", "a fault is lost between processes",
         _FAULTS + "test_errors_keep_what_they_say_in_other_processes"),
    ),
    *_in(
        "flexsp/launch/termination.py",
        ("            signal.signal(signal.SIGTERM, signal.SIG_DFL)", "            pass", "children of a rank are not ended",
         _FAULTS + "test_a_rank_that_torchrun_ends_writes_its_exchanges"),
        ("    atexit.register(_let_it_write)", "    pass", "a handler of the user's leaves no time to write",
         _FAULTS + "test_a_rank_that_torchrun_ends_writes_its_exchanges"),
        ("    if signal.getsignal(signal.SIGTERM) is _left_to_the_thread:\n        ctypes", "    if True:\n        ctypes",
         "the user's handler does not decide", _FAULTS + "test_a_rank_that_torchrun_ends_writes_its_exchanges"),
    ),
    *_in(
        "flexsp/launch/cli.py",
        ("        _run_first(words)\n", "        pass\n", "registered transports have no names on the command line",
         "tests/launch/test_cli.py::test_registered_transports_have_names_on_the_command_line"),
    ),
    *_in(
        "flexsp/launch/bootstrap.py",
        ("            if not bool((gone == want).all()):", "            if False:", "a state that arrived wrong passes",
         "tests/comm/test_transport.py::test_a_trial_of_a_transport[wrong]"),
    ),
]
