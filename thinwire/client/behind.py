"""What is done behind the training: one thread that finishes and sends answers, in the order they were begun in."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from thinwire.client.link.calls import BrokenOff

Job = Callable[[], object]
LOOK_S = 0.2  # how long an end may go unnoticed by who waits


class Behind:
    """Law: jobs run one after the other, in the order given; `failed` hears of the first error, and no job follows it.

    Two threads never send at once: who wants to send something itself waits with `drained` until nothing is left.
    """

    def __init__(self, failed: Callable[[Exception], None], ending: threading.Event) -> None:
        self._failed, self._ending = failed, ending
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._broken = False

    def put(self, job: Job) -> None:
        if self._thread is None:  # plans without overlap need none
            self._thread = threading.Thread(target=self._run, name="behind", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    @property
    def idle(self) -> bool:
        return self._jobs.unfinished_tasks == 0

    def drained(self) -> bool:
        """Wait until nothing is left; False when this program ends meanwhile."""
        with self._jobs.all_tasks_done:
            while self._jobs.unfinished_tasks and not self._ending.is_set():
                self._jobs.all_tasks_done.wait(LOOK_S)
        return self.idle

    def close(self, timeout_s: float) -> None:
        """After `ending` is set: what is being written is written, what was not begun stays undone."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if not (self._broken or self._ending.is_set()):
                    job()
            except BrokenOff:
                pass
            except Exception as error:  # it ends the program, not this thread alone
                self._broken = True
                self._failed(error)
            finally:
                self._jobs.task_done()
        self._jobs.task_done()
