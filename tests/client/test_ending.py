"""How processes of ours end: with their code and all that they printed, and not taken apart."""

from __future__ import annotations

import subprocess
import sys

import pytest

BEGIN = """
import atexit, sys, threading, time
from thinwire.client.compute.ending import Ending
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
from thinwire.client.compute.importing import imported_for_good
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
