"""A plan says how many threads add, and no bit of a model depends on it."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from thinwire.compression import Everything, native, parse
from thinwire.core import Key, Layout, RunPlan
from thinwire.core.types import Part, ReplyHeader, UpdateId
from thinwire.server.aggregator import RoundAggregator

LAYOUT = Layout.of({"w": (40_000,)})


@pytest.fixture
def parted(monkeypatch) -> list[int]:
    """Small parts are worth a thread too; how many there were of each call."""
    seen = list[int]()
    each_of = native.each_of

    def counted(pieces, work):
        seen.append(len(pieces))
        return each_of(pieces, work)

    monkeypatch.delenv(native.THREADS_VARIABLE, raising=False)
    monkeypatch.setattr(native, "LEAST", 8192)
    monkeypatch.setattr(native, "GRAIN", 4096)
    monkeypatch.setattr(native, "each_of", counted)
    return seen


@pytest.mark.parametrize("spec", ["int8", "fp16", "topk(0.1) > int8", "sign"])
def test_the_server_adds_on_as_many_threads_as_its_plan_says_and_to_the_same_bits(spec: str, parted) -> None:
    x = np.random.default_rng(1).standard_normal(LAYOUT.size, np.float32)
    codec = parse(spec).bind(LAYOUT)
    encoded = [codec.encode(x + np.float32(i), codec.init(), Key(i)) for i in range(3)]
    payloads = [one.payload for one in encoded]
    found, most = set[bytes](), list[int]()
    for count in (0, 1, 2, 3):
        plan = RunPlan.from_json({"run": {"task": "t"}, "local": {"lr": 1}, "server": {"threads": count}})
        aggregator = RoundAggregator(plan, LAYOUT, spec)
        parted.clear()
        for number, payload in enumerate(payloads):
            answer = ReplyHeader(
                "assignment", UpdateId("t-1", "a", number), 0, 9, 2, 2.0, parts=(Part("frame/0", len(payload), ""),)
            )
            aggregator.add(answer, partial(iter, [payload]), 1.0)
        change = aggregator.changes.close()
        assert change is not None
        found.add(change.tobytes())
        most.append(max(parted, default=1))
    assert len(found) == 1
    assert most[:2] == [1, 1]
    assert most == ([1, 1, 2, 3] if encoded[0].support is Everything.SENT else [1, 1, 1, 1])
