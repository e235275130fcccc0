"""How processes of ours end: with their code and all that they printed, and not taken apart."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.small_task import plan_of, task_of
from thinwire.client import load_task
from thinwire.client.task import LoadedTask
from thinwire.client.task_check import rehearse
from thinwire.client.train.errors import Exited
from thinwire.client.train.protocol import ClientInfo
from thinwire.core.errors import TaskError
from thinwire.simulation import RunFailed, simulate

BEGIN = """
import atexit, sys, threading, time
from thinwire.client.train.errors import FastExit as Ending
ending = Ending()

class TakenApart:
    def __del__(self, write=sys.__stdout__.write):
        write("taken apart\\n")

kept = TakenApart()
kept.itself = kept  # only the interpreter's own end finds it
"""


def ended(code: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-c", BEGIN + code], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout, done.stderr


def test_what_was_printed_is_out_and_what_atexit_has_was_called_and_threads_have_ended() -> None:
    code = """
atexit.register(print, "called")
threading.Thread(target=lambda: (time.sleep(0.1), print("the thread ended"))).start()
print("said")
print("told", file=sys.stderr)
ending.code = 3
raise SystemExit(3)
"""
    assert ended(code) == (3, "said\nthe thread ended\ncalled\n", "told\n")


@pytest.mark.parametrize(("code", "returned"), [("raise SystemExit(7)", 7), ("raise ValueError('a defect')", 1)])
def test_a_process_whose_end_was_not_foreseen_ends_as_any_other(code: str, returned: int) -> None:
    found, out, err = ended(code)
    assert (found, out) == (returned, "taken apart\n")
    assert ("a defect" in err) == (returned == 1)


def test_what_is_imported_for_good_is_left_alone_by_the_collector() -> None:
    code = """
import gc
from thinwire.client.train.worker import imported_for_good
with imported_for_good():
    inside = gc.isenabled()
    many = [[number] for number in range(1000)]
print(inside, gc.isenabled(), gc.get_freeze_count() > 1000)
gc.disable()
with imported_for_good():
    pass
print(gc.isenabled())
ending.code = 0
"""
    assert ended(code) == (0, "False True True\nFalse\n", "")


ATTEMPTS = {
    "SystemExit": lambda: sys.exit(0),
    "KeyboardInterrupt": lambda: _raise(KeyboardInterrupt()),
    "os._exit": lambda: os._exit(0),
}
FUNCTIONS = ("model", "data", "loss", "metrics", "train", "optimizer")


def _raise(error: BaseException) -> None:
    raise error


def ending_in(function: str, by: str) -> LoadedTask:
    def ends(*given: Any) -> None:
        ATTEMPTS[by]()

    return replace(task_of(**{function: ends}), file=__file__)


@pytest.mark.parametrize("by", ATTEMPTS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_task_that_would_end_the_process_is_a_task_error_with_its_place_in_check_and_sim(
    function: str, by: str
) -> None:
    task = ending_in(function, by)
    plan = plan_of('optimizer = "task"' if function == "optimizer" else "", run="rounds = 1")
    said = rf"{by} at test_ending.py:\d+"
    with pytest.raises(TaskError, match=said):
        rehearse(task, ClientInfo(), plan)
    if function == "model":
        with pytest.raises(TaskError, match=said):
            simulate(task, plan, clients=2)
        return
    with pytest.raises(RunFailed) as failed:
        simulate(task, plan, clients=2)
    assert (failed.value.history.run.status, failed.value.exit_code) == ("failed", 6)
    assert re.search(said, failed.value.history.failures[0])
    with pytest.raises(Exited):
        simulate(task, plan, clients=2, debug=True)


@pytest.mark.parametrize("code", ["import sys; sys.exit()", "import os; os._exit(0)", "raise KeyboardInterrupt"])
def test_a_task_that_would_end_the_process_at_its_import_is_refused_with_its_place(tmp_path: Path, code: str) -> None:
    file = tmp_path / "task.py"
    file.write_text(f"a = 1\n{code}\n")
    with pytest.raises(TaskError, match="cannot import") as refused:
        load_task(f"x={file}")
    assert " at task.py:2: it would end the whole process" in refused.value.why


SIGNALLED = """
import os, signal, sys
from thinwire.client.train.errors import task_code
before = signal.getsignal(signal.SIGINT)
def told(make):
    try:
        with task_code():
            make()
    except BaseException as error:
        print(type(error).__name__)
def ends_at_ctrl_c():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000): pass
    except KeyboardInterrupt:
        sys.exit(1)  # as Lightning does
told(lambda: os.kill(os.getpid(), signal.SIGINT))
told(ends_at_ctrl_c)
assert signal.getsignal(signal.SIGINT) is before
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(4))
told(lambda: os.kill(os.getpid(), signal.SIGTERM))
for way in (os._exit, sys.exit):
    if (child := os.fork()) == 0:
        try:
            with task_code():
                if (grandchild := os.fork()) == 0:
                    way(9)
        finally:
            os._exit(os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]) if grandchild else 9)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
told(lambda: os._exit(0))
sys.stdout.flush()
os._exit(3)
"""


def test_ctrl_c_a_termination_and_a_forked_process_end_as_they_would_without() -> None:
    done = subprocess.run([sys.executable, "-c", SIGNALLED], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["KeyboardInterrupt", "KeyboardInterrupt", "SystemExit", "9", "9", "Exited"]
    assert (done.returncode, done.stderr) == (3, "")
