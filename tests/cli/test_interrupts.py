"""Ctrl-C counts wherever it falls."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from thinwire.core.signals import ended_by_signals, handled, interruptible


class Interrupted:
    """Python drops what a finalizer raises."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):  # the handler runs between two instructions of this
            pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_a_finalizer_swallowed_is_raised_by_the_next_look() -> None:
    with interruptible() as look:
        look()
        held = [Interrupted()]
        held.clear()
        with pytest.raises(KeyboardInterrupt):
            look()


def test_handlers_are_as_before_afterwards() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with interruptible(signal.SIGINT, signal.SIGTERM):
        assert signal.getsignal(signal.SIGTERM) != before[1]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_thread_that_is_told_of_no_signals_may_look_too() -> None:
    looked = []

    def work() -> None:
        with interruptible() as look:
            look()
            looked.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert looked


def test_a_closed_terminal_ends_a_client_cleanly_and_nohup_keeps_it() -> None:
    for before, ends in ((lambda number, frame: None, True), (signal.SIG_IGN, False)):
        with handled([signal.SIGHUP], before), ended_by_signals(threading.Event()) as ending:
            for _ in range(2):  # as of the kernel and of the shell
                os.kill(os.getpid(), signal.SIGHUP)
            assert ending.is_set() == ends
