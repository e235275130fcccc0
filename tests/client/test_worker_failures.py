"""A worker that fails, hangs or is withdrawn fails its assignment alone: the service and the next one go on."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleet_words import until
from tests.support.small_task import plan_of
from tests.support.trained_elsewhere import Elsewhere
from thinwire.cli.systemd import NO_USE
from thinwire.client import worker_process
from thinwire.client.admission import AdmissionController
from thinwire.client.policy import Policy
from thinwire.client.train.errors import Cancelled
from thinwire.client.worker_process import Watchdog, WorkerDied
from thinwire.core.clock import VirtualClock
from thinwire.core.errors import ThinwireError
from thinwire.core.types import Failure, ReplyHeader, Work

ENDLESS = "time.sleep(3600)"


def test_a_step_that_never_ends_is_ended_by_the_owners_limit(
    elsewhere: Elsewhere, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "CANCEL_GRACE_S", 0.1)
    handler = elsewhere.handler()
    handler.admission = AdmissionController(Policy(max_assignment_minutes=0.005))
    elsewhere.wish(ENDLESS)
    failure = elsewhere.answer(handler, number)
    assert (failure.kind, failure.text.partition(":")[0]) == ("declined", "max_assignment_minutes")
    assert elsewhere.worker.pid is None
    handler.admission = AdmissionController()
    elsewhere.wish()
    assert isinstance(elsewhere.answer(handler, number), ReplyHeader)


@pytest.mark.parametrize(
    ("wish", "text"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL: perhaps there was no memory left"),
        ("import ctypes; ctypes.CDLL(None)._exit(7)", "ended with exit code 7"),
        ("import ctypes; ctypes.string_at(0)", "killed by SIGSEGV"),
        ("raise MemoryError", "out of memory: MemoryError at task.py:32"),
        ("torch.empty(1 << 60)", "out of memory: RuntimeError at task.py:32"),
    ],
)
def test_whatever_ends_it_fails_its_assignment_and_the_next_one_finds_a_fresh_one(
    elsewhere: Elsewhere, number: int, wish: str, text: str
) -> None:
    handler = elsewhere.handler()
    elsewhere.wish(wish)
    failure = elsewhere.answer(handler, number)
    assert failure == Failure("worker", text, f"a-{number}", "pi-01")
    assert elsewhere.worker.pid is None
    elsewhere.wish()
    assert isinstance(elsewhere.answer(handler, number), ReplyHeader)


@pytest.mark.parametrize(
    ("wish", "by"),
    [("sys.exit(0)", "SystemExit"), ("raise KeyboardInterrupt", "KeyboardInterrupt"), ("os._exit(0)", "os._exit")],
)
def test_task_code_that_requests_its_processs_end_fails_its_assignment_by_its_place(
    elsewhere: Elsewhere, number: int, wish: str, by: str
) -> None:
    handler = elsewhere.handler()
    elsewhere.wish(wish)
    assert elsewhere.answer(handler, number) == Failure("task-error", f"{by} at task.py:32", f"a-{number}", "pi-01")
    assert elsewhere.worker.pid is not None
    assert "a task raises an error, or returns" in elsewhere.said[-1]


def test_a_refusal_in_our_own_words_is_said_once_with_what_to_try(elsewhere: Elsewhere, number: int) -> None:
    handler, what = elsewhere.handler(), '[local] optimizer = "task" with a task that has no optimizer(params, local)'
    failure = elsewhere.answer(handler, number, plan=plan_of('optimizer = "task"').to_json())
    assert failure == Failure("task-error", what, f"a-{number}", "pi-01")
    line = f'task-error: {what} (optimizer() makes the optimizer); try: [local] optimizer = "sgd"'
    assert elsewhere.said[-1].endswith(f"failed, {line}")


def test_one_that_hangs_past_the_deadline_is_ended(elsewhere: Elsewhere, number: int) -> None:
    handler = elsewhere.handler()
    assert isinstance(elsewhere.answer(handler, number), ReplyHeader)  # it is there: starting it takes its time
    elsewhere.wish(ENDLESS)
    elsewhere.worker.watchdog.hung_s = 0.2
    failure = elsewhere.answer(handler, number, assignment_id="hangs", deadline_s=0.2)
    assert (failure.kind, failure.text.startswith("hung: ")) == ("worker", True)
    elsewhere.worker.watchdog.hung_s = worker_process.HUNG_S
    elsewhere.wish()
    assert isinstance(elsewhere.answer(handler, number, assignment_id="after"), ReplyHeader)


class Scripted:
    """A process that is heard as a script says: (seconds that pass, head or None) each."""

    def __init__(self, clock: VirtualClock, *script: tuple[float, dict[str, Any] | None]) -> None:
        self.clock, self.script, self.killed = clock, list(script), False

    def receive(self, wait_s: float) -> dict[str, Any] | None:
        seconds, header = self.script.pop(0)
        self.clock.advance(seconds)
        return header

    def kill(self) -> None:
        self.killed = True

    def translated_errors(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def result(watchdog: Watchdog, child: Scripted, given_s: float) -> dict[str, Any]:
    return watchdog.wait_for_result(child, lambda *_: None, lambda: False, watchdog.deadline(given_s))  # type: ignore[arg-type]  # a double


def test_what_is_slow_is_not_taken_for_what_hangs() -> None:
    clock = VirtualClock()
    watchdog = Watchdog(60.0, clock.now)
    step = (59.0, {"told": ["train", 1, 0]})
    late = Scripted(clock, *[step] * 100, (59.0, {"done": {}}))
    assert result(watchdog, late, given_s=10.0) == {"done": {}}
    hung = Scripted(clock, *[step] * 3, (30.0, None), (31.0, None))
    with pytest.raises(WorkerDied, match="hung: 61 s without a sign of life, and past the deadline"):
        result(watchdog, hung, given_s=10.0)
    assert hung.killed
    early = Scripted(clock, (3000.0, None), (3000.0, {"done": {}}))
    assert result(watchdog, early, given_s=6000.0) == {"done": {}}


def test_after_one_that_hung_the_next_has_twice_as_long() -> None:
    clock = VirtualClock()
    watchdog = Watchdog(60.0, clock.now)
    for quiet_s in (60.0, 120.0, 240.0):
        with pytest.raises(WorkerDied):
            result(watchdog, Scripted(clock, (10.0 + quiet_s, None), (1.0, None)), given_s=10.0)


def test_a_withdrawn_assignment_ends_with_its_batch_and_the_process_stays(
    elsewhere: Elsewhere, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "CANCEL_GRACE_S", 60.0)  # however slow this machine is
    handler = elsewhere.handler()
    assert isinstance(elsewhere.answer(handler, number), ReplyHeader)
    before, begun = elsewhere.worker.pid, elsewhere.begun()
    with pytest.raises(Cancelled):
        elsewhere.answer(handler, number, begun.exists, assignment_id="withdrawn", work=Work(10_000_000, 8))
    elsewhere.wish()
    assert isinstance(elsewhere.answer(handler, number, assignment_id="after"), ReplyHeader)
    assert elsewhere.worker.pid == before


def test_one_that_does_not_let_go_of_a_withdrawn_assignment_is_ended(
    elsewhere: Elsewhere, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = elsewhere.handler()
    monkeypatch.setattr(worker_process, "CANCEL_GRACE_S", 0.1)
    begun = elsewhere.begun(f"; {ENDLESS}")
    with pytest.raises(Cancelled):
        elsewhere.answer(handler, number, begun.exists)
    assert elsewhere.worker.pid is None


def test_one_that_died_while_it_rested_costs_no_assignment(elsewhere: Elsewhere, number: int) -> None:
    handler = elsewhere.handler()
    assert isinstance(elsewhere.answer(handler, number), ReplyHeader)
    child = elsewhere.worker._child
    assert child is not None
    os.kill(child.process.pid, 9)
    child.process.wait()
    assert isinstance(elsewhere.answer(handler, number, assignment_id="after"), ReplyHeader)


def test_an_error_of_a_gpu_that_may_stay_ends_the_process(elsewhere: Elsewhere, number: int) -> None:
    handler = elsewhere.handler()
    elsewhere.wish("raise RuntimeError('CUDA error: an illegal memory access was encountered')")
    assert elsewhere.answer(handler, number) == Failure(
        "task-error", "RuntimeError at task.py:32", f"a-{number}", "pi-01"
    )
    assert elsewhere.worker.pid is None


def test_what_a_worker_started_ends_with_it_though_it_ended_by_itself(elsewhere: Elsewhere, number: int) -> None:
    handler, pid = elsewhere.handler(), elsewhere.file.with_name("pid")
    elsewhere.wish(
        "import ctypes, subprocess; child = subprocess.Popen(['sleep', '3600']);"
        f" Path({str(pid)!r}).write_text(str(child.pid)); ctypes.CDLL(None)._exit(7)"
    )
    assert elsewhere.answer(handler, number).kind == "worker"
    until(lambda: not runs(int(pid.read_text())))


def runs(pid: int) -> bool:
    """True while the process is there, and no zombie: its new parent may take its time."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_process_that_ends_while_it_loads_is_no_error_of_the_task(tmp_path: Path) -> None:
    """A service is started again: the kernel may have killed it for want of memory."""
    elsewhere = Elsewhere(tmp_path, threads=1)
    elsewhere.file.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    with pytest.raises(ThinwireError, match="ended before it knew the tasks") as refused:
        elsewhere.worker.describe()
    assert str(refused.value.exit_code) not in NO_USE.split()


def test_an_error_tells_its_class_and_place_and_its_text_stays_here(elsewhere: Elsewhere, number: int) -> None:
    handler = elsewhere.handler()
    elsewhere.wish("raise ValueError('the patient is Ada')")
    failure = elsewhere.answer(handler, number)
    assert failure == Failure("task-error", "ValueError at task.py:32", f"a-{number}", "pi-01")
    assert "the patient is Ada" in elsewhere.said[-1]
    kept = (elsewhere.folder / "last-error.txt").read_text()
    assert "the patient is Ada" in kept
    assert 'task.py", line 32, in loss' in kept


def test_a_loss_that_is_no_number_is_told_as_that(elsewhere: Elsewhere, number: int) -> None:
    handler = elsewhere.handler()
    elsewhere.wish("batch[0].fill_(float('nan'))")
    assert elsewhere.answer(handler, number).kind == "non-finite"
