# ruff: noqa: E501 (texts of code are kept whole)
"""Changes of `flexsp simulate` that tests/mutate.py makes; see tests/mutations.py. Its copy has no result files."""

from __future__ import annotations

from tests.mutate import in_file as _in

__all__ = ["SIMULATION"]

_BY = "tests/bench/test_simulate.py::"

SIMULATION = [
    *_in(
        "flexsp/scan/tile_order.py",
        ("early = has_in and has_out and cut and not dense", "early = False", "a cut does not let tiles go early",
         "tests/scan/test_tile_order.py"),
        ("range(block, tiles, blocks)", "range(block, tiles)", "every block has all tiles", "tests/scan/test_tile_order.py"),
    ),
    *_in(
        "flexsp/bench/simulation/network.py",
        ("(now - self._since) * self.rate / len(self._on)", "(now - self._since) * self.rate",
         "messages do not share a link", _BY + "test_messages_on_a_link_share_its_rate"),
        ("if len(self._queue) > 1:", "if len(self._queue) > 9:", "a card sends all at once",
         _BY + "test_a_card_sends_one_message_after_another_to_a_rank"),
        ("max(self._started + self._least, clock.now)", "clock.now", "a message is as fast as its links",
         _BY + "test_one_message_takes_its_bytes_and_the_latency"),
    ),
    *_in(
        "flexsp/bench/simulation/exchange.py",
        ("if epoch > 2:", "if epoch > 3:", "the third call waits for no credit",
         _BY + "test_a_sender_waits_for_the_credit_of_the_call_before_last"),
        ("            if before is not None:\n                yield before\n", "", "kernels of NCCL run side by side",
         _BY + "test_a_rank_starts_one_kernel_of_messages_after_the_other"),
        ("hosts > 1 and card < rates.gather_gb_s", "False", "an all-gather needs no cards",
         _BY + "test_an_all_gather_goes_over_all_cards"),
    ),
    *_in(
        "flexsp/bench/simulation/trace.py",
        ("call.stamped = True", "call.stamped = False", "stamps cost nothing", _BY + "test_torch_messages_by_hand"),
        ("(last - at).bit_length()", "1", "hosts near the end are like the others",
         _BY + "test_ranks_that_are_alike_do_the_same"),
    ),
]  # fmt: skip
