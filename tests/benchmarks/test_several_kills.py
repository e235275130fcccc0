"""`benchmarks.several_kills`: nothing is lost or counted twice, and its count finds both where they are."""

from __future__ import annotations

from benchmarks.several_kills import judged
from tests.support.benchmark_document import document_of
from tests.support.store_story import accepted, closed, header
from thinwire.core.events import RoundResumed, UpdateAggregated


def test_two_kills_lose_nothing_and_count_nothing_twice() -> None:
    made = document_of("several_kills")
    assert len(made["rows"]) == 2
    assert made["figures"] == {"runs_done": 3, "lost_updates": 0, "double_counts": 0}


def test_a_lost_update_and_one_that_was_counted_twice_are_found() -> None:
    replies = [header("digits-1", 1, name) for name in ("pi-01", "pi-02")]
    first, second = (str(one.update_id) for one in replies)
    came = [accepted(one, 1) for one in replies]
    assert judged([*came, closed(1, [first])]) == {"lost_updates": 2, "double_counts": 0}
    once = UpdateAggregated(1.0, 1, first, 0.0)
    assert judged([*came, once, closed(1, [first], gone=(second,))]) == {"lost_updates": 0, "double_counts": 0}
    assert judged([*came, once, once, closed(1, [first, second])])["double_counts"] == 1
    resumed = RoundResumed(2.0, 1, 1.0, 0.0)  # its sum died with the process, and is made again
    assert judged([*came, once, resumed, once, closed(1, [first], gone=(second,))])["double_counts"] == 0
    again = header("digits-1", 2, "pi-01")  # a second reply of the device to an assignment of the same round
    both = [*came, accepted(again, 1), once, UpdateAggregated(1.0, 1, str(again.update_id), 0.0)]
    assert judged([*both, closed(1, [first, str(again.update_id)], gone=(second,))])["double_counts"] == 1
