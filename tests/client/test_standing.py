"""What is left for `thinwire client status` and `logs` to read."""

from __future__ import annotations

import errno
import itertools
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.small_task import Aggregator, plan_of, task_of
from thinwire.client.calls import ClientStatus, StatusReporter
from thinwire.core.clock import VirtualClock
from thinwire.core.errors import NotAccepted, Unreachable
from thinwire.core.fleet import Delivery, Hello, Welcome
from thinwire.core.log_file import LOG_FILE, Logbook, last_lines, new_lines
from thinwire.core.types import Failure, PhaseReply, Reply


@dataclass
class ScriptedLink:
    """A link whose pulls are written down beforehand."""

    pulls: list[Delivery | Exception | None] = field(default_factory=list)
    withdrawn: set[str] = field(default_factory=set)

    def hello(self, hello: Hello) -> Welcome:
        return Welcome(hello.name, server_time=1_700_000_060.0)

    def pull(self, wait_s: float) -> Delivery | None:
        found = self.pulls.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    def push(self, reply: Reply, bundle: Path | None = None) -> None: ...

    def answer(self, reply: PhaseReply | Failure, wait_s: float) -> Delivery | None:
        return self.pull(wait_s)

    def cancelled(self) -> frozenset[str]:
        return frozenset(self.withdrawn)

    def close(self) -> None: ...


@pytest.fixture
def assignments(tmp_path):
    aggregator = Aggregator(tmp_path / "assignments", task_of(), plan_of())
    return [aggregator.assign(1), aggregator.assign(2)]


def test_the_file_follows_a_device_through_its_day(tmp_path, assignments):
    clock, inside = (
        VirtualClock(),
        ScriptedLink([assignments[0], None, Unreachable("nobody there", "cut"), assignments[1]]),
    )
    link = StatusReporter(inside, tmp_path, clock.wall)

    def now() -> ClientStatus:
        found = ClientStatus.load(tmp_path)
        assert found is not None
        return found

    assert now().state == "connecting"
    link.hello(Hello("pi-01", "p"))
    assert (now().state, now().skew_s, now().connected_at) == ("idle", 60.0, clock.wall())
    link.pull(1)
    assert (now().state, now().run, now().round) == ("working", assignments[0].assignment.run, 1)
    link.push(Failure("task-error", "x", assignments[0].assignment.assignment_id))
    assert (now().state, now().round, now().answered) == ("idle", 1, 1)
    clock.advance(60)
    link.pull(1)
    assert (now().at, now().connected_at) == (clock.wall(), clock.wall() - 60)
    with pytest.raises(Unreachable):
        link.pull(1)
    assert (now().state, now().connected_at, now().last_error) == ("offline", None, "nobody there (cut)")
    link.pull(1)
    assert (now().state, now().last_error, now().connected_at) == ("working", "nobody there (cut)", clock.wall())
    inside.withdrawn = {assignments[1].assignment.assignment_id}
    inside.pulls = [None]
    link.pull(1)
    assert now().state == "idle"
    inside.pulls = [Unreachable("this link was closed", "by this program")]
    link.close()
    with pytest.raises(Unreachable):
        link.pull(1)
    assert (now().state, now().last_error) == ("idle", "nobody there (cut)"), "its own end is no error"


def test_a_device_does_not_work_on_an_assignment_whose_reply_was_refused(tmp_path, assignments, monkeypatch):
    inside = ScriptedLink([assignments[0], None])
    link = StatusReporter(inside, tmp_path)

    def refuse(reply: Reply, bundle: Path | None = None) -> None:
        raise NotAccepted("the reply is too large")

    link.pull(1)
    monkeypatch.setattr(inside, "push", refuse)
    with pytest.raises(NotAccepted):
        link.push(Failure("task-error", "x", assignments[0].assignment.assignment_id))
    link.pull(1)
    status = ClientStatus.load(tmp_path)
    assert status is not None
    assert (status.state, status.answered) == ("idle", 0)


def test_what_is_not_readable_or_written_ends_nothing(tmp_path):
    assert ClientStatus.load(tmp_path) is None
    (tmp_path / "status.json").write_text('{"state": "idle", "of another version": 1}')
    assert ClientStatus.load(tmp_path) is None
    StatusReporter(ScriptedLink(), tmp_path / "gone").hello(Hello("pi-01", "p"))
    Logbook(tmp_path / "gone", print)("said all the same")


def test_an_output_that_takes_no_bytes_ends_nothing(tmp_path):
    def gone(line: str) -> None:
        raise OSError(errno.EIO, "Input/output error")

    Logbook(tmp_path, gone)("said all the same")
    assert last_lines(tmp_path, 1)[0].endswith("said all the same")


def test_a_log_keeps_the_newest_lines_within_its_bound(tmp_path):
    said: list[str] = []
    log = Logbook(tmp_path, said.append, most=1000, wall=lambda: 0.0)
    for n in range(500):
        log(f"line {n}")
    assert said == [f"line {n}" for n in range(500)]
    assert sum((tmp_path / name).stat().st_size for name in (LOG_FILE, f"{LOG_FILE}.1")) <= 2000
    assert last_lines(tmp_path, 3) == [f"1970-01-01T00:00:00Z line {n}" for n in (497, 498, 499)]
    many = last_lines(tmp_path, 1000)
    assert [line.rpartition(" ")[2] for line in many] == [str(n) for n in range(500 - len(many), 500)]


def test_who_follows_a_log_misses_no_line_when_a_new_file_is_begun(tmp_path):
    log = Logbook(tmp_path, lambda line: None, most=200, wall=lambda: 0.0)
    log("before")
    numbers = itertools.count()

    def wait(_seconds: float) -> None:
        log(f"line {next(numbers)}")

    seen = [line.rpartition(" ")[2] for line in itertools.islice(new_lines(tmp_path, wait), 50)]
    assert seen == [str(n) for n in range(50)]


def test_who_follows_before_there_is_a_log_sees_its_first_line(tmp_path):
    log = Logbook(tmp_path, lambda line: None, wall=lambda: 0.0)
    assert next(new_lines(tmp_path, lambda _s: log("first"))).endswith("first")
