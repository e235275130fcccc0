"""How many threads the kernels use: who says so."""

from __future__ import annotations

import threading

import pytest

from thinwire.compression import native
from thinwire.core.errors import UsageError


def test_the_environment_of_the_machine_has_the_last_word(monkeypatch) -> None:
    monkeypatch.delenv(native.THREADS_VARIABLE, raising=False)
    assert native.threads() == 1
    with native.planned_threads(3):
        assert native.threads() == 3
    for said, expected in (("2", 2), ("0", native.cores())):
        monkeypatch.setenv(native.THREADS_VARIABLE, said)
        with native.planned_threads(3):
            assert native.threads() == expected
    monkeypatch.setenv(native.THREADS_VARIABLE, "many")
    with pytest.raises(UsageError, match="many"):
        native.threads()


def test_what_one_thread_may_use_is_not_another_ones(monkeypatch) -> None:
    monkeypatch.delenv(native.THREADS_VARIABLE, raising=False)
    seen = list[int]()
    with native.planned_threads(3):
        other = threading.Thread(target=lambda: seen.append(native.threads()))
        other.start()
        other.join()
        assert native.each_of([(0, 1), (1, 2)], lambda a, b: native.threads()) == [1, 1]
    assert seen == [1]
