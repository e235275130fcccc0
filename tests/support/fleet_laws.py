"""The laws of core/fleet.py, held against every Fleet: subclass `FleetLaws` and give it `make`.

`make()` is a context manager that yields something with `.fleet`, `.link(name)` (a new, unused Link of a device that
may join), `.spool` and `.roster`. Where it also has `.restart()`, that closes the fleet and builds a new one as
`.fleet` over the same spool and roster, as a restart of the aggregator would; links of before stay usable.
"""

from __future__ import annotations

import contextlib
import threading
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleet_words import (
    PATIENCE_S,
    Setting,
    answer,
    answers_now,
    envelope,
    hello,
    join,
    polled,
    pulled,
    written,
)
from tests.support.phase_laws import PhaseLaws
from thinwire.core.errors import Refused, ThinwireError
from thinwire.core.fleet import ClientConnected, ClientDisconnected, Delivery, Envelope
from thinwire.core.types import Assignment, Failure, ReplyHeader, Timings, UpdateId


class FleetLaws(PhaseLaws):
    """Subclass it as `class TestMyFleet(FleetLaws)` with a `make` of your own."""

    def make(self, folder: Path) -> AbstractContextManager[Any]:
        raise NotImplementedError

    @pytest.fixture
    def setting(self, tmp_path: Path) -> Any:
        with self.make(tmp_path) as made:
            yield made

    def test_a_hello_is_welcomed_and_polled(self, setting: Setting) -> None:
        said = hello("pi-1")
        welcome = setting.link("pi-1").hello(said)
        assert (welcome.name, welcome.poll_s > 0) == ("pi-1", True)
        joined = polled(setting.fleet, ClientConnected)
        heard = replace(joined.hello, link=said.link, trusted_pins=said.trusted_pins)  # those the link itself adds
        assert (joined.device, heard) == ("pi-1", said)

    def test_an_assignment_arrives_with_its_parts_in_a_file(self, setting: Setting, tmp_path: Path) -> None:
        link = join(setting, "pi-1")
        sent = envelope("pi-1", "assignment-1", tmp_path, b"first", b"", b"third" * 1000)
        setting.fleet.send([sent])
        delivery = pulled(link)
        assert delivery.assignment == sent.assignment
        assert delivery.bundle is not None
        assert delivery.bundle.read_bytes() == b"first" + b"third" * 1000

    def test_an_assignment_without_parts_has_no_file(self, setting: Setting) -> None:
        link = join(setting, "pi-1")
        setting.fleet.send([envelope("pi-1", "assignment-1")])
        assert pulled(link).bundle is None

    def test_a_pull_without_an_assignment_ends(self, setting: Setting) -> None:
        assert join(setting, "pi-1").pull(0.05) is None

    def test_each_device_gets_its_own_assignments_in_order(self, setting: Setting) -> None:
        one, two = join(setting, "pi-1"), join(setting, "pi-2")
        setting.fleet.send([envelope("pi-2", "b"), envelope("pi-1", "a1"), envelope("pi-1", "a2")])
        assert [
            pulled(one).assignment.assignment_id,
            pulled(one).assignment.assignment_id,
            pulled(two).assignment.assignment_id,
        ] == ["a1", "a2", "b"]

    def test_that_a_device_got_an_assignment_is_told_once(self, setting: Setting) -> None:
        link = join(setting, "pi-1")
        setting.fleet.send([envelope("pi-1", "assignment-1"), envelope("pi-1", "assignment-2")])
        assert list(setting.fleet.delivered()) == []
        pulled(link)
        link.pull(0.0)
        told = [(one.device, one.assignment.assignment_id) for one in setting.fleet.delivered()]
        assert told in ([("pi-1", "assignment-1"), ("pi-1", "assignment-2")], []), (
            "nothing of a fleet whose answers come at once"
        )
        assert list(setting.fleet.delivered()) == []

    def test_an_assignment_is_not_delivered_twice_to_the_process_that_holds_it(self, setting: Setting) -> None:
        link = join(setting, "pi-1")
        setting.fleet.send([envelope("pi-1", "assignment-1")])
        pulled(link)
        assert link.pull(0.1) is None

    def test_an_assignment_is_delivered_again_to_a_new_process(self, setting: Setting, tmp_path: Path) -> None:
        first = join(setting, "pi-1")
        setting.fleet.send([envelope("pi-1", "assignment-1", tmp_path, b"model")])
        pulled(first)
        first.close()
        second = join(setting, "pi-1")
        again = pulled(second)
        assert again.assignment.assignment_id == "assignment-1"
        assert again.bundle is not None
        assert again.bundle.read_bytes() == b"model"

    def test_an_answered_assignment_is_not_delivered_again(self, setting: Setting) -> None:
        first = join(setting, "pi-1")
        setting.fleet.send([envelope("pi-1", "assignment-1")])
        pulled(first)
        first.push(answer("pi-1", "assignment-1"))
        first.close()
        assert join(setting, "pi-1").pull(0.1) is None

    def test_an_assignment_to_a_device_that_is_away_waits_for_it(self, setting: Setting) -> None:
        join(setting, "pi-1").close()
        polled(setting.fleet, ClientDisconnected)
        setting.fleet.send([envelope("pi-1", "assignment-1")])
        assert pulled(join(setting, "pi-1")).assignment.assignment_id == "assignment-1"

    def test_a_header_is_polled_when_its_parts_are_durable(self, setting: Setting, tmp_path: Path) -> None:
        link = join(setting, "pi-1")
        setting.fleet.send([envelope("pi-1", "assignment-1")])
        pulled(link)
        given = answer("pi-1", "assignment-1", 1, b"abc", b"", b"de" * 50_000)
        link.push(given, written(tmp_path, b"abc", b"", b"de" * 50_000))
        header = polled(setting.fleet, ReplyHeader)
        assert header.update_id == given.update_id
        assert (header.metrics, header.parts, header.norm) == (given.metrics, given.parts, given.norm)
        assert header.transfer is not None
        assert 0.0 < header.transfer.pulled_at <= header.transfer.began_at <= header.transfer.arrived_at
        assert setting.spool.header(given.update_id) is not None
        assert [bytes(part) for part in setting.fleet.open(given.update_id)] == [b"abc", b"", b"de" * 50_000]

    def test_a_failure_is_polled_with_its_device(self, setting: Setting) -> None:
        link = join(setting, "pi-1")
        setting.fleet.send([envelope("pi-1", "assignment-1")])
        pulled(link)
        link.push(Failure("task-error", "ValueError at task.py:7", "assignment-1"))
        failure = polled(setting.fleet, Failure)
        assert (failure.kind, failure.assignment_id, failure.device) == ("task-error", "assignment-1", "pi-1")
        assert failure.text == "ValueError at task.py:7"

    def test_an_assignment_that_failed_is_sent_again_to_the_process_that_waits(
        self, setting: Setting, tmp_path: Path
    ) -> None:
        link, waited = join(setting, "pi-1"), list[Delivery]()
        setting.fleet.send([envelope("pi-1", "assignment-1", tmp_path, b"model")])
        pulled(link)
        waiting = threading.Thread(target=lambda: waited.append(pulled(link)))  # its pull may begin before the push
        waiting.start()
        link.push(Failure("need-plan", "", "assignment-1"))
        polled(setting.fleet, Failure)
        again = envelope("pi-1", "assignment-1", tmp_path, b"model")
        setting.fleet.send([again])
        waiting.join(PATIENCE_S)
        assert [delivery.assignment for delivery in waited] == [again.assignment]
        link.push(answer("pi-1", "assignment-1"))
        assert polled(setting.fleet, ReplyHeader).assignment_id == "assignment-1"

    def test_a_process_that_says_something_else_is_polled_again(self, setting: Setting) -> None:
        link, said = setting.link("pi-1"), hello("pi-1")
        link.hello(said)
        polled(setting.fleet, ClientConnected)
        other = replace(said, versions={"thinwire": "test", "policy": "another"})
        link.hello(other)
        assert polled(setting.fleet, ClientConnected).hello.versions == other.versions

    def test_the_same_push_again_is_answered_and_not_polled_again(self, setting: Setting, tmp_path: Path) -> None:
        link, given, bundle = (
            join(setting, "pi-1"),
            answer("pi-1", "assignment-1", 1, b"abc"),
            written(tmp_path, b"abc"),
        )
        setting.fleet.send([envelope("pi-1", "assignment-1")])
        pulled(link)
        link.push(given, bundle)
        polled(setting.fleet, ReplyHeader)
        link.push(given, bundle)
        assert not answers_now(setting.fleet)

    def test_another_digest_under_the_same_update_id_is_a_lost_state(self, setting: Setting, tmp_path: Path) -> None:
        link = join(setting, "pi-1")
        setting.fleet.send([envelope("pi-1", "assignment-1"), envelope("pi-1", "assignment-2")])
        link.push(answer("pi-1", "assignment-1", 1, b"abc"), written(tmp_path, b"abc"))
        first = polled(setting.fleet, ReplyHeader)
        with contextlib.suppress(Refused):
            link.push(answer("pi-1", "assignment-2", 1, b"xyz"), written(tmp_path, b"xyz"))
        arrived = answers_now(setting.fleet)
        assert [type(arrival) for arrival in arrived] == [Failure]
        assert (getattr(arrived[0], "kind", ""), arrived[0].assignment_id) == ("state-lost", "assignment-2")
        assert b"".join(setting.fleet.open(first.update_id)) == b"abc"

    @pytest.mark.parametrize(
        "changed",
        [
            {"assignment_id": "assignment-2"}, {"steps": 6}, {"a": 4.0}, {"norm": 2.5}, {"examples": 31},
            {"base_version": 3},
            {"codec": "int8"}, {"metrics": {"loss": (3.0, 7.0)}}, {"counters": {"n": 3}}, {"planned": 9},
        ],
        ids=lambda changed: next(iter(changed)),
    )  # fmt: skip
    def test_a_reply_that_differs_in_what_is_aggregated_or_in_its_assignment_is_a_lost_state(
        self, setting: Setting, changed: dict[str, Any]
    ) -> None:
        """No assignment is settled without a reply or a failure, else the aggregator would wait for it."""
        link, given = join(setting, "pi-1"), answer("pi-1", "assignment-1")
        setting.fleet.send([envelope("pi-1", "assignment-1"), envelope("pi-1", "assignment-2")])
        link.push(given)
        polled(setting.fleet, ReplyHeader)
        with contextlib.suppress(Refused):
            link.push(replace(given, **changed))
        arrived = answers_now(setting.fleet)
        assert [getattr(arrival, "kind", "") for arrival in arrived] == ["state-lost"]
        assert arrived[0].assignment_id == changed.get("assignment_id", "assignment-1")

    def test_a_reply_with_other_times_is_the_same_one(self, setting: Setting) -> None:
        link, given = join(setting, "pi-1"), answer("pi-1", "assignment-1")
        setting.fleet.send([envelope("pi-1", "assignment-1")])
        link.push(given)
        polled(setting.fleet, ReplyHeader)
        link.push(replace(given, timings=Timings(download_s=2.0)))
        assert not answers_now(setting.fleet)

    def test_bytes_that_do_not_match_their_digest_never_arrive(self, setting: Setting, tmp_path: Path) -> None:
        link = join(setting, "pi-1")
        with pytest.raises(ThinwireError):
            link.push(answer("pi-1", "assignment-1", 1, b"abc"), written(tmp_path, b"abd"))
        assert not answers_now(setting.fleet)
        assert setting.spool.header(UpdateId("digits-1", "pi-1", 1)) is None

    def test_an_answer_to_an_assignment_that_nobody_knows_is_polled(self, setting: Setting, tmp_path: Path) -> None:
        join(setting, "pi-1").push(answer("pi-1", "of-before", 4, b"late"), written(tmp_path, b"late"))
        header = polled(setting.fleet, ReplyHeader)
        assert (header.assignment_id, header.update_id.sequence) == ("of-before", 4)

    def test_nobody_answers_in_anothers_name(self, setting: Setting) -> None:
        link = join(setting, "pi-1")
        with pytest.raises(Refused):
            link.push(answer("pi-2", "assignment-1"))
        assert not answers_now(setting.fleet)

    def test_a_cancelled_assignment_is_withdrawn_at_the_next_call(self, setting: Setting) -> None:
        link = join(setting, "pi-1")
        setting.fleet.send([envelope("pi-1", "assignment-1")])
        pulled(link)
        setting.fleet.cancel(["assignment-1"])
        link.pull(0.1)
        assert "assignment-1" in link.cancelled()

    def test_a_cancelled_assignment_is_never_delivered(self, setting: Setting) -> None:
        link = join(setting, "pi-1")
        setting.fleet.send([envelope("pi-1", "assignment-1"), envelope("pi-1", "assignment-2")])
        setting.fleet.cancel(["assignment-1"])
        assert pulled(link).assignment.assignment_id == "assignment-2"

    def test_an_assignment_that_is_sent_again_after_a_cancel_is_delivered(self, setting: Setting) -> None:
        link = join(setting, "pi-1")
        setting.fleet.send([envelope("pi-1", "assignment-1")])
        pulled(link)
        setting.fleet.cancel(["assignment-1"])
        link.pull(0.1)
        setting.fleet.send([envelope("pi-1", "assignment-1")])
        assert pulled(link).assignment.assignment_id == "assignment-1"
        assert "assignment-1" not in link.cancelled()

    def test_only_what_a_device_holds_is_withdrawn(self, setting: Setting) -> None:
        link = join(setting, "pi-1")
        setting.fleet.send([envelope("pi-1", "assignment-1"), envelope("pi-1", "assignment-2")])
        pulled(link)
        link.push(answer("pi-1", "assignment-1"))
        setting.fleet.cancel(["assignment-1", "assignment-2"])
        link.pull(0.1)
        assert not link.cancelled(), "it has replied to one, and was never given the other"

    def test_a_stop_is_given_once_needs_no_answer_and_is_said_to_be_taken(self, setting: Setting) -> None:
        link = join(setting, "pi-1")
        setting.fleet.send([Envelope("pi-1", Assignment("stop-1", "digits-1", "digits", "stop", ""))])
        assert pulled(link).assignment.kind == "stop"
        link.pull(0.0)
        assert [(one.device, one.assignment.kind) for one in setting.fleet.delivered()] == [("pi-1", "stop")]
        link.close()
        assert join(setting, "pi-1").pull(0.1) is None

    def test_a_device_that_is_gone_is_said_to_have_left(self, setting: Setting) -> None:
        join(setting, "pi-1").close()
        assert polled(setting.fleet, ClientDisconnected).device == "pi-1"

    def test_a_second_live_process_of_one_name_is_refused(self, setting: Setting) -> None:
        first = join(setting, "pi-1")
        first.pull(0.05)
        with pytest.raises(Refused):
            setting.link("pi-1").hello(hello("pi-1"))

    def test_a_poll_without_arrivals_ends(self, setting: Setting) -> None:
        assert list(setting.fleet.poll(0.01)) == []

    def test_what_is_acked_leaves_the_spool(self, setting: Setting, tmp_path: Path) -> None:
        given = answer("pi-1", "assignment-1", 1, b"abc")
        join(setting, "pi-1").push(given, written(tmp_path, b"abc"))
        polled(setting.fleet, ReplyHeader)
        setting.fleet.ack([given.update_id])
        assert setting.spool.header(given.update_id) is None
        setting.fleet.ack([given.update_id])  # a second ack changes nothing

    def test_a_lost_state_is_seen_after_the_ack_too(self, setting: Setting, tmp_path: Path) -> None:
        link, given = join(setting, "pi-1"), answer("pi-1", "assignment-1", 1, b"abc")
        link.push(given, written(tmp_path, b"abc"))
        polled(setting.fleet, ReplyHeader)
        setting.fleet.ack([given.update_id])
        with contextlib.suppress(Refused):
            link.push(answer("pi-1", "assignment-2", 1, b"xyz"), written(tmp_path, b"xyz"))
        assert [arrival.kind for arrival in answers_now(setting.fleet) if isinstance(arrival, Failure)] == [
            "state-lost"
        ]

    def test_a_welcome_says_the_highest_sequence_that_came(self, setting: Setting) -> None:
        link = join(setting, "pi-1")
        link.push(answer("pi-1", "assignment-1", 7))
        polled(setting.fleet, ReplyHeader)
        link.close()
        assert setting.link("pi-1").hello(hello("pi-1")).sequences["digits-1"] == 7

    def test_who_is_revoked_is_refused_and_nothing_of_it_is_left(self, setting: Setting, tmp_path: Path) -> None:
        link, other = join(setting, "pi-1"), join(setting, "pi-2")
        setting.fleet.send(
            [envelope("pi-1", "assignment-1"), envelope("pi-1", "assignment-2"), envelope("pi-2", "assignment-3")]
        )
        given = answer("pi-1", "assignment-2", 1, b"abc")
        link.push(given, written(tmp_path, b"abc"))
        setting.fleet.revoke_access(["pi-1"])
        arrived = setting.fleet.poll(0.2)
        refused = [(a.kind, a.text, a.assignment_id) for a in arrived if isinstance(a, Failure)]
        assert refused == [("refused", "revoked", "assignment-1")]
        assert [(a.device, a.why) for a in arrived if isinstance(a, ClientDisconnected)] == [("pi-1", "revoked")]
        assert not [a for a in arrived if isinstance(a, ReplyHeader)]
        assert setting.spool.header(given.update_id) is None
        assert pulled(other).assignment.assignment_id == "assignment-3"
        setting.fleet.revoke_access(["pi-1", "nobody"])

    def test_a_header_that_was_not_acked_comes_again_after_a_restart(self, setting: Any, tmp_path: Path) -> None:
        _can_restart(setting)
        link = join(setting, "pi-1")
        for sequence in (1, 2):
            link.push(answer("pi-1", f"assignment-{sequence}", sequence, b"abc"), written(tmp_path, b"abc"))
            polled(setting.fleet, ReplyHeader)
        setting.fleet.ack([UpdateId("digits-1", "pi-1", 1)])
        setting.restart()
        again = polled(setting.fleet, ReplyHeader)
        assert again.update_id.sequence == 2
        assert b"".join(setting.fleet.open(again.update_id)) == b"abc"
        assert not answers_now(setting.fleet)

    def test_a_link_outlives_a_restart(self, setting: Any, tmp_path: Path) -> None:
        _can_restart(setting)
        link = join(setting, "pi-1")
        setting.fleet.send([envelope("pi-1", "assignment-1")])
        pulled(link)
        setting.restart()
        setting.fleet.send([envelope("pi-1", "assignment-1"), envelope("pi-1", "assignment-2")])
        assert pulled(link).assignment.assignment_id == "assignment-2"  # it holds the first one
        link.push(answer("pi-1", "assignment-1", 1, b"abc"), written(tmp_path, b"abc"))
        assert polled(setting.fleet, ReplyHeader).assignment_id == "assignment-1"

    def test_an_assignment_from_before_a_restart_is_withdrawn_too(self, setting: Any) -> None:
        _can_restart(setting)
        link = join(setting, "pi-1")
        setting.fleet.send([envelope("pi-1", "assignment-1")])
        pulled(link)
        setting.restart()
        link.pull(0.1)
        setting.fleet.cancel(["assignment-1"])
        link.pull(0.1)
        assert "assignment-1" in link.cancelled()


def _can_restart(setting: Any) -> None:
    if not hasattr(setting, "restart"):
        pytest.skip("this fleet cannot be restarted")
