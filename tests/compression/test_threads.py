"""How many threads the kernels use: who says so."""

from __future__ import annotations

import threading

import pytest

from thinwire.compression.native import threads
from thinwire.core.errors import UsageError


def test_the_environment_of_the_machine_has_the_last_word(monkeypatch) -> None:
    monkeypatch.delenv(threads.VARIABLE, raising=False)
    assert threads.threads() == 1
    with threads.planned_threads(3):
        assert threads.threads() == 3
    for said, expected in (("2", 2), ("0", threads.cores())):
        monkeypatch.setenv(threads.VARIABLE, said)
        with threads.planned_threads(3):
            assert threads.threads() == expected
    monkeypatch.setenv(threads.VARIABLE, "many")
    with pytest.raises(UsageError, match="many"):
        threads.threads()


def test_what_one_thread_may_use_is_not_another_ones(monkeypatch) -> None:
    monkeypatch.delenv(threads.VARIABLE, raising=False)
    seen = list[int]()
    with threads.planned_threads(3):
        other = threading.Thread(target=lambda: seen.append(threads.threads()))
        other.start()
        other.join()
        assert threads.each_of([(0, 1), (1, 2)], lambda a, b: threads.threads()) == [1, 1]
    assert seen == [1]
