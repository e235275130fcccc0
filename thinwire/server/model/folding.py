"""Folding off the poll thread: one worker, first in first out, so that the order of folding is the journal's."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from thinwire.core.errors import BadPayload
from thinwire.core.types import UpdateId

T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """One update's fold: done in `seconds`, or refused with the reason."""

    update_id: UpdateId
    seconds: float
    refused: str = ""


class AtOnce(Executor):
    """Work is done when it is given."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class Folds:
    """Folds that were begun and are not yet reported.

    A BadPayload refuses its update; anything else is our own defect and is raised where the driver looks. `at_once`:
    where nothing waits meanwhile a thread costs more than a small fold.
    """

    def __init__(self, at_once: bool = False) -> None:
        self._worker = AtOnce() if at_once else ThreadPoolExecutor(max_workers=1, thread_name_prefix="fold")
        self._begun: list[Future[Outcome]] = []
        self._of: dict[UpdateId, Future[Outcome]] = {}

    def begin(self, update_id: UpdateId, fold: Callable[[], None]) -> None:
        def timed() -> Outcome:
            start = time.perf_counter()
            try:
                fold()
            except BadPayload as error:
                return Outcome(update_id, time.perf_counter() - start, refused=f"bad-payload: {error}")
            return Outcome(update_id, time.perf_counter() - start)

        self._of[update_id] = self._worker.submit(timed)
        self._begun.append(self._of[update_id])

    def withdraw(self, update_id: UpdateId) -> bool:
        """Whether a fold that was begun here could still be kept from happening; it is not reported then."""
        future = self._of.get(update_id)
        if future is None or not future.cancel():
            return False
        self._begun.remove(future)
        return True

    def finished(self, wait_s: float = 0.0) -> list[Outcome]:
        """The folds that ended, in their order; waits up to `wait_s` for the first of them."""
        if self._begun and wait_s:
            wait(self._begun[:1], timeout=wait_s)
        done = []
        while self._begun and self._begun[0].done():
            done.append(self._begun.pop(0).result())
        return done

    @property
    def running(self) -> bool:
        return bool(self._begun)

    def close(self) -> None:
        self._worker.shutdown(wait=True, cancel_futures=True)
