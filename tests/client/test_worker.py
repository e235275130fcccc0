"""The worker: the same bits as in process, what it inherits and prints, and when it begins and ends."""

from __future__ import annotations

import hashlib
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.client.test_following import Other
from tests.support.small_task import Aggregator, plan_of
from tests.support.trained_elsewhere import TASK, Elsewhere
from thinwire.client import executor as workers
from thinwire.client import load_task, worker_process
from thinwire.client.task import initial_model
from thinwire.compression import parse
from thinwire.core.clock import VirtualClock
from thinwire.core.prng import Key
from thinwire.core.statedir import private_folder
from thinwire.core.types import ReplyHeader, Timings, Work


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker is started, not forked."""
    monkeypatch.setattr(worker_process, "subprocess", subprocess)


def untimed(header: ReplyHeader) -> ReplyHeader:
    return replace(header, timings=Timings())


def test_the_start_of_the_process_is_a_part_of_loading(elsewhere: Elsewhere, number: int, started: None) -> None:
    handler = elsewhere.handler()
    elsewhere.worker.close()
    loads = [elsewhere.answer(handler, number + more).timings.load_s for more in (0, 1)]
    assert loads[0] > 0.5 > loads[1] > 0.0, "the first one imports torch"


@pytest.mark.parametrize("codec", ["identity", "topk(0.1) > int8"])
@pytest.mark.parametrize("buffers", ["average", "local"])
def test_the_same_seed_gives_the_same_bits_in_process_and_elsewhere(
    tmp_path: Path, elsewhere: Elsewhere, one_thread: None, codec: str, buffers: str
) -> None:
    plan = plan_of(f'momentum = 0.9\nbuffers = "{buffers}"', codec, "auto")
    found = []
    here = Aggregator(tmp_path, load_task(elsewhere.spec), plan)
    there = elsewhere.handler(private_folder(tmp_path / "there"))
    for handler in (here.handler(), there):
        for at in (1, 2):
            header, bundle = handler.handle(here.assign(at), lambda: False, here.said.append)
            assert isinstance(header, ReplyHeader), header
            assert bundle is not None
            found.append((untimed(header), bundle.read_bytes()))
    assert found[:2] == found[2:]
    assert found[0][0].metrics["eval/accuracy"][1] == 24


@pytest.mark.parametrize("algorithm", ["scaffold", "feddyn"])
def test_a_devices_drift_is_corrected_elsewhere_as_it_is_here(
    tmp_path: Path, elsewhere: Elsewhere, one_thread: None, algorithm: str
) -> None:
    plan = plan_of(codec="topk(0.1) > int8", feedback="classic", run=f'algorithm = "{algorithm}"')
    other = Other(tmp_path, load_task(elsewhere.spec), plan)
    there = elsewhere.handler(private_folder(tmp_path / "there"))
    found = [[other.answer(handler, other.assign(at))[1] for at in (1, 2)] for handler in (other.handler(), there)]
    assert [body.read_bytes() for body in found[0]] == [body.read_bytes() for body in found[1]]


def test_a_task_that_failed_to_load_is_tried_again_after_a_while(tmp_path: Path) -> None:
    clock = VirtualClock()
    elsewhere = Elsewhere(tmp_path, threads=1, clock=clock.now)
    elsewhere.file.write_text(TASK.replace("    return nn.Seq", "    raise RuntimeError('full')\n    return nn.Seq"))
    elsewhere.worker.describe()
    try:
        assert (elsewhere.worker.is_due(), elsewhere.worker.manifests[0].error != "") == (False, True)
        clock.advance(workers.IDLE_S)
        assert elsewhere.worker.is_due()
        elsewhere.worker.restart()
        assert not elsewhere.worker.is_due(), "it waits again"
        elsewhere.file.write_text(TASK)
        elsewhere.worker.restart()
        clock.advance(workers.IDLE_S)
        assert not elsewhere.worker.is_due()
    finally:
        elsewhere.worker.close()


def test_another_device_after_a_restart_is_said(elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    monkeypatch.setattr(elsewhere.worker, "say", said.append)
    elsewhere.worker.restart()
    elsewhere.worker.trains_on = "cuda:0"
    elsewhere.worker.restart()
    assert said == ["the worker trains on cpu; before on cuda:0"]


def test_the_first_model_of_a_run_is_what_its_seed_makes_in_the_other_process_too(
    elsewhere: Elsewhere, number: int
) -> None:
    header = elsewhere.answer(elsewhere.handler(), number, kind="init")
    assert [part.name for part in header.parts] == ["frame/0", "buffers"], header
    first = initial_model(load_task(elsewhere.spec), elsewhere.aggregator.plan.run.seed)
    codec = parse("identity").bind(first.layout)
    frame = codec.encode(first.vector, codec.init(), Key(0)).payload
    assert header.parts[0].sha256 == hashlib.sha256(frame).hexdigest()
    assert header.counters == first.counters


def test_what_the_task_prints_goes_to_a_bounded_log(elsewhere: Elsewhere, number: int) -> None:
    handler = elsewhere.handler()
    elsewhere.wish("print('to stdout'); print('to stderr', file=sys.stderr); os.write(1, b'past Python\\n')")
    assert isinstance(elsewhere.answer(handler, number), ReplyHeader)
    elsewhere.worker.close()
    for text in ("to stdout", "to stderr", "past Python"):
        assert text in elsewhere.log
    elsewhere.wish("print('x' * (3 << 20))")
    assert isinstance(elsewhere.answer(handler, number, assignment_id="much", work=Work(1, 8)), ReplyHeader)
    elsewhere.worker.close()
    sizes = [(elsewhere.folder / name).stat().st_size for name in ("worker.log", "worker.log.1")]
    assert 0 < max(sizes) <= 1 << 20


def test_it_is_the_first_to_go_when_memory_runs_out(elsewhere: Elsewhere, number: int) -> None:
    assert isinstance(elsewhere.answer(elsewhere.handler(), number), ReplyHeader)
    score = Path(f"/proc/{elsewhere.worker.pid}/oom_score_adj")
    if not score.exists():
        pytest.skip("this system has no /proc/PID/oom_score_adj")
    assert int(score.read_text()) >= int(Path("/proc/self/oom_score_adj").read_text())


def test_it_inherits_nothing_but_its_socket(elsewhere: Elsewhere, number: int, started: None) -> None:
    handler = elsewhere.handler()
    seen = elsewhere.file.with_name("descriptors")
    if not Path("/proc/self/fd").exists():
        pytest.skip("this system has no /proc/self/fd")
    elsewhere.worker.close()
    with open(elsewhere.file) as inherited:
        os.set_inheritable(inherited.fileno(), True)
        elsewhere.wish(
            f"Path({str(seen)!r}).write_text(' '.join(sorted(os.readlink('/proc/self/fd/' + n).split(':')[0]"
            " for n in os.listdir('/proc/self/fd') if os.path.exists('/proc/self/fd/' + n))))"
        )
        assert isinstance(elsewhere.answer(handler, number), ReplyHeader)
    found = seen.read_text().split()
    assert str(elsewhere.file) not in found
    assert found.count("socket") == 1


def test_it_is_ended_after_a_while_without_an_assignment(elsewhere: Elsewhere, number: int) -> None:
    handler = elsewhere.handler()
    assert isinstance(elsewhere.answer(handler, number), ReplyHeader)
    elsewhere.worker.stop_if_idle()
    rested = elsewhere.worker.pid
    elsewhere.worker.idle_s = 0.0
    elsewhere.worker.stop_if_idle()
    assert (rested is None, elsewhere.worker.pid) == (False, None)
    elsewhere.worker.idle_s = workers.IDLE_S


def test_the_client_says_that_it_loads_the_task_again(elsewhere: Elsewhere, number: int) -> None:
    handler = elsewhere.handler()
    elsewhere.worker.close()
    said = list[list[str]]()
    for more in (0, 1):
        elsewhere.said.clear()
        assert isinstance(elsewhere.answer(handler, number + more), ReplyHeader)
        said.append([line for line in elsewhere.said if "loading the task" in line])
    assert said == [[f"round {number}: loading the task in a new worker, after idle time or an error"], []]


def test_a_restart_ends_the_process_that_has_the_old_code(elsewhere: Elsewhere) -> None:
    elsewhere.worker.describe()
    before = elsewhere.worker.pid
    assert before is not None
    elsewhere.worker.restart()
    assert elsewhere.worker.pid not in (None, before)
    with pytest.raises(ProcessLookupError):
        os.kill(before, 0)
