"""A snapshot of a run's state and the events after it give the same state as the whole journal."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given, settings

from tests.server.test_scripted_modes import buffered, down_a_ladder, partial_work
from tests.server.test_scripted_rounds import stories
from tests.support.crashes import Killed
from tests.support.server_bench import Bench, killing, outcome, three
from tests.support.stories import Story, told, whole_runs
from thinwire.core.events import ClientFailed, Event, RoundOpened, RunStatusChanged
from thinwire.server.run_end import close_undriven
from thinwire.server.state import snapshot
from thinwire.server.state.run_state import RunState
from thinwire.store import Store


def state_of(events: list[Event], delay: int) -> RunState:
    state = RunState(delay)
    for event in events:
        state.apply(event)
    return state


def law(story: Story) -> None:
    """At each event: what a snapshot gives, with the later events, is what all events give."""
    with tempfile.TemporaryDirectory() as folder:
        events = told(story, Path(folder)).events
    delay = story.plan.local.delay
    whole, before = state_of(events, delay), RunState(delay)
    for at in range(len(events)):
        resumed = snapshot.parse(snapshot.serialize(before))
        assert resumed == before, f"before event {at}"
        if at % 5 == 0:
            for event in events[at:]:
                resumed.apply(event)
            assert resumed == whole, f"from event {at}"
        before.apply(events[at])


@settings(whole_runs, max_examples=8)
@given(stories())
def test_of_synchronous_and_pipelined_rounds(story: Story) -> None:
    law(story)


@settings(whole_runs, max_examples=5)
@given(buffered())
def test_of_buffered_rounds(story: Story) -> None:
    law(story)


@settings(whole_runs, max_examples=5)
@given(partial_work() | down_a_ladder())
def test_of_devices_with_work_and_codecs_of_their_own(story: Story) -> None:
    law(story)


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "null", "{", '{"format":"x","state":[]}', '{"format":"FORMAT","state":[1,2]}', "1" * 5000]
)
def test_what_is_no_snapshot_of_this_version_is_not_read(text: str) -> None:
    assert snapshot.parse(text.replace("FORMAT", snapshot.fingerprint())) is None


def test_one_that_is_too_large_is_neither_written_nor_read() -> None:
    state = RunState()
    text = snapshot.serialize(state)
    with patch.object(snapshot, "MAX_SNAPSHOT_BYTES", len(text) - 1):
        assert snapshot.serialize(state) == ""
        assert snapshot.parse(text) is None
    assert snapshot.parse(text) == state


def test_places_that_share_an_object_share_it_again() -> None:
    state = RunState()
    both = Shared(state, state)
    found = snapshot._Reader().typed(json.loads(json.dumps(snapshot._Writer().plain(both, Shared))), Shared)
    assert found == both
    assert found.first is found.second


@dataclass
class Shared:
    first: RunState
    second: RunState


ROUNDS = 7


def killed_in_round_6(folder: Path) -> Bench:
    bench = Bench(folder, three(), run={"rounds": ROUNDS})
    with contextlib.suppress(Killed):
        bench.drive(on_event=killing(lambda event: isinstance(event, RoundOpened) and event.round == 6))
    bench.restart()
    return bench


@contextlib.contextmanager
def reading(store: Store, text: str | None = None) -> Iterator[list[int]]:
    """Give the events that are read of a journal; with a `text`, it is found in place of the snapshot."""
    read, stream, kept = list[int](), store.stream, store.snapshot

    def streamed(run_id: str, after: int = 0) -> Iterator[tuple[int, Event]]:
        for found in stream(run_id, after):
            read.append(found[0])
            yield found

    with (
        patch.object(store, "stream", streamed),
        patch.object(store, "snapshot", lambda run_id: (kept(run_id)[0], text or kept(run_id)[1])),
    ):
        yield read


def restarted(folder: Path, text: str | None = None) -> tuple[object, int]:
    """What a run comes to that dies as its sixth round opens, and how many events the restart reads."""
    bench = killed_in_round_6(folder)
    with reading(bench.store, text) as read:
        bench.drive()
    assert bench.store.snapshot(bench.run_id) == (0, ""), "a run that is over needs none"
    found = outcome(bench)
    bench.store.close()
    return found, len(read)


def test_a_restart_reads_the_snapshot_and_the_events_after_it(tmp_path: Path) -> None:
    undisturbed = Bench(tmp_path / "undisturbed", three(), run={"rounds": ROUNDS})
    undisturbed.drive()
    found, read = restarted(tmp_path / "killed")
    assert found == outcome(undisturbed)
    assert read <= 5, "the opening of round 6, and its assignments"
    undisturbed.store.close()


def test_a_run_that_nobody_drives_is_closed_from_the_snapshot_and_the_events_after_it(tmp_path: Path) -> None:
    failures = []
    for name, text in (("snapshot", None), ("journal", "of another version")):
        bench = killed_in_round_6(tmp_path / name)
        with reading(bench.store, text) as read:
            close_undriven(bench.store, bench.run_id, RunStatusChanged(99.0, "stopped", "stopped by a person", 10))
        failures.append([(e.assignment_id, e.kind, e.elapsed_s) for e in bench.events(ClientFailed)])
        assert (len(read) <= 5) == (text is None)
        bench.store.close()
    assert failures[0] == failures[1] != []


def test_a_snapshot_that_is_not_readable_leaves_the_whole_journal(tmp_path: Path) -> None:
    good, few = restarted(tmp_path / "good")
    found, read = restarted(tmp_path / "damaged", text='{"format":"of another version"}')
    assert found == good
    assert read > few
