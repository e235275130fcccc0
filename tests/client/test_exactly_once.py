"""A device's outbox against a model of it: whatever crashes or is told twice, no change is lost or counts twice."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from thinwire.client import outbox
from thinwire.client.payload import encode, pack_reply, restore_update
from thinwire.client.run_state import NOT_KNOWN, ClientRunState, Entry, RunFolder, write_unsynced
from thinwire.core import Key, Layout
from thinwire.core.errors import DataLost
from thinwire.core.plan_schema import UplinkSection
from thinwire.core.types import ReplyHeader, UpdateId, UpdateOutcome, Vector

LAYOUT = Layout.of({"w": (6,)})
CODEC = "topk(0.34) > int8"
WITH_FEEDBACK = UplinkSection(feedback="classic")


class Crash(Exception):
    """The power went."""


class Disk:
    """Writes files until it is told to fail at one of them."""

    def __init__(self) -> None:
        self.left: int | None = None

    def write(self, path: Path, data: bytes) -> None:
        if self.left == 0:
            raise Crash
        self.left = None if self.left is None else self.left - 1
        write_unsynced(path, data)


class Device(RuleBasedStateMachine):
    """Law: residual + what is in the outbox + what was aggregated = the sum of all changes that were committed."""

    def __init__(self) -> None:
        super().__init__()
        self.folder, self.disk = Path(tempfile.mkdtemp()), Disk()
        self.given = np.zeros(6)
        self.aggregated = np.zeros(6)
        self.outcomes: dict[UpdateId, str] = {}  # what the aggregator decided, once and for all
        self.sent: dict[UpdateId, bytes] = {}
        self.rounds = 0
        self.start()

    def start(self) -> None:
        self.disk.left = None
        self.run_folder = RunFolder(self.folder / "run", self.disk.write)
        self.state, said = self.run_folder.load()
        assert said == []

    def body(self, entry: Entry) -> bytes:
        path = self.run_folder.path(entry)
        assert path is not None
        return path.read_bytes()

    def decoded(self, entry: Entry) -> Vector:
        return restore_update(self.run_folder.path(entry), entry.header.parts, CODEC, LAYOUT, None)

    def after(self, outcomes: list[UpdateOutcome]) -> ClientRunState:
        def back(entry: Entry, state: ClientRunState) -> ClientRunState:
            path = self.run_folder.path(entry)
            return replace(state, residual=restore_update(path, entry.header.parts, CODEC, LAYOUT, state.residual))

        return outbox.apply_outcomes(self.state, outcomes, back)

    def commit(
        self, state: ClientRunState, files: Mapping[str, bytes] | None = None, crash_at: int | None = None
    ) -> bool:
        """False when it crashed; then a new process has read what is on disk."""
        self.disk.left = crash_at
        try:
            self.run_folder.commit(state, files)
        except Crash:
            before = self.state
            self.start()
            assert outbox_ids(self.state) == outbox_ids(before)
            return False
        self.disk.left, self.state = None, state
        return True

    @rule(
        change=st.lists(st.integers(-100, 100), min_size=6, max_size=6),
        crash_at=st.one_of(st.none(), st.integers(0, 2)),
    )
    def train(self, change: list[int], crash_at: int | None) -> None:
        vector = np.array(change, np.float32)
        self.rounds += 1
        name = outbox.next_id(self.state, "run", "pi", 0)
        payloads, state = encode(vector.copy(), self.state, CODEC, WITH_FEEDBACK, LAYOUT, Key(self.rounds))
        parts, body = pack_reply(payloads, LAYOUT, None)
        entry = Entry(ReplyHeader(f"a-{self.rounds}", name, 0, 1, parts=parts), self.rounds, f"{name.sequence}.parts")
        state = outbox.append(state, entry)
        if self.commit(state, {entry.file: body}, crash_at):
            self.given += vector

    @rule(which=st.integers(0, 20), outcome=st.sampled_from(["aggregated", "dropped"]))
    def decide(self, which: int, outcome: str) -> None:
        """The aggregator takes up an answer that may have been sent."""
        if self.state.outbox:
            entry = self.state.outbox[which % len(self.state.outbox)]
            self.outcomes.setdefault(entry.header.update_id, outcome)

    @precondition(lambda self: self.outcomes)
    @rule(data=st.data(), crash_at=st.one_of(st.none(), st.integers(0, 1)))
    def hear(self, data: st.DataObject, crash_at: int | None) -> None:
        """Verdicts come, some of them for the second time."""
        told = data.draw(st.lists(st.sampled_from(sorted(self.outcomes)), unique=True))
        waiting = {entry.header.update_id: self.decoded(entry) for entry in self.state.outbox}
        state = self.after([UpdateOutcome(name, self.outcomes[name]) for name in told])  # type: ignore[arg-type]  # literals
        if state is not self.state and self.commit(state, crash_at=crash_at):
            for name in told:
                if self.outcomes[name] == "aggregated" and name in waiting:
                    self.aggregated += waiting[name]

    @rule()
    def restart(self) -> None:
        before = self.state
        self.start()
        assert outbox_ids(self.state) == outbox_ids(before)
        assert self.state.sequence == before.sequence

    @invariant()
    def nothing_is_lost_and_nothing_counts_twice(self) -> None:
        residual = np.zeros(6) if self.state.residual is None else self.state.residual.astype(np.float64)
        waiting = sum((self.decoded(entry).astype(np.float64) for entry in self.state.outbox), np.zeros(6))
        np.testing.assert_allclose(residual + waiting + self.aggregated, self.given, atol=1e-2)

    @invariant()
    def what_is_sent_again_is_the_same_bytes(self) -> None:
        for entry in self.state.outbox:
            body = self.body(entry)
            assert self.sent.setdefault(entry.header.update_id, body) == body

    def teardown(self) -> None:
        shutil.rmtree(self.folder)


def outbox_ids(state: ClientRunState) -> list[UpdateId]:
    return [entry.header.update_id for entry in state.outbox]


TestDevice = Device.TestCase
TestDevice.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def entry_of(sequence: int, round_number: int = 1) -> Entry:
    return Entry(ReplyHeader(f"a-{sequence}", UpdateId("run", "pi", sequence), 0, 1), round_number)


def test_a_sequence_is_never_used_twice_and_goes_on_above_what_the_aggregator_has_seen():
    state = outbox.append(ClientRunState(), entry_of(1))
    with pytest.raises(ValueError, match="used before"):
        outbox.append(state, entry_of(1))
    assert outbox.next_id(state, "run", "pi", 41).sequence == 42
    assert outbox.next_id(outbox.end_run(state), "run", "pi", 0).sequence == 2


def test_answers_without_a_outcome_are_discarded_after_the_largest_staleness():
    state = outbox.append(ClientRunState(), entry_of(1, round_number=2))
    assert outbox.expire(state, 7, 5) is state
    late = outbox.expire(state, 8, 5)
    assert outbox_ids(late) == outbox_ids(state), "its outcome may come with the next assignment"
    told = outbox.apply_outcomes(late, [UpdateOutcome(UpdateId("run", "pi", 1), "aggregated", 3)], lambda *_: late)
    assert told.outbox == ()
    assert outbox.expire(late, 9, 5).outbox == ()


@pytest.mark.parametrize(("first", "lost"), [(False, "damaged"), (True, "")])
def test_of_a_lost_update_the_state_is_damaged_and_of_a_lost_first_model_it_is_not(first: bool, lost: str):
    parts, _ = pack_reply([b"frames"], LAYOUT, None)
    entry = replace(entry_of(1), header=replace(entry_of(1).header, parts=parts), first=first)
    after = outbox.remove_unreadable(outbox.append(ClientRunState(), entry), entry.header)
    assert (after.outbox, after.lost) == ((), lost)
    assert outbox.remove_unreadable(after, entry.header) is after


def test_a_damaged_residual_begins_at_zero_and_says_so(tmp_path):
    RunFolder(tmp_path, write_unsynced).commit(ClientRunState(3, "digest", np.array([1, 2], np.float32)))
    (damaged,) = tmp_path.glob("residual-*")
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    state, said = RunFolder(tmp_path).load()
    assert (state.sequence, state.residual) == (3, None)
    assert "begins at zero" in said[0]


ELSEWHERE = b'{"sequence":1,"layout_digest":"","counters":{},"outbox":[{"head":{},"round":1,"file":"../x"}]}'


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"sequence": "x"}', ELSEWHERE])
def test_a_damaged_state_begins_again_and_says_so(tmp_path, damage):
    (tmp_path / "state.json").write_bytes(damage)
    state, said = RunFolder(tmp_path).load()
    assert state == ClientRunState(lost="damaged", references_from=NOT_KNOWN)
    assert "begins again" in said[0]


def test_an_answer_that_is_damaged_on_disk_is_not_sent(tmp_path):
    folder, body = RunFolder(tmp_path, write_unsynced), b"frames"
    parts, _ = pack_reply([body], LAYOUT, None)
    entry = replace(entry_of(1), header=replace(entry_of(1).header, parts=parts), file="1.parts")
    folder.commit(outbox.append(ClientRunState(), entry), {"1.parts": body})
    assert RunFolder(tmp_path).load()[0].outbox == (entry,)
    (tmp_path / "1.parts").write_bytes(b"framez")
    state, said = RunFolder(tmp_path).load()
    assert state.outbox == ()
    assert state.lost == "damaged", "what it left in the state cannot be taken back"
    assert hashlib.sha256(body).hexdigest() not in said[0]


def test_a_disk_that_fails_leaves_the_commit_before(tmp_path):
    folder = RunFolder(tmp_path, write_unsynced)
    folder.commit(outbox.append(ClientRunState(), entry_of(1)))

    def full(path: Path, data: bytes) -> None:
        raise DataLost("the disk is full")

    with pytest.raises(DataLost):
        RunFolder(tmp_path, full).commit(outbox.append(folder.load()[0], entry_of(2)))
    assert [e.header.update_id.sequence for e in RunFolder(tmp_path).load()[0].outbox] == [1]
