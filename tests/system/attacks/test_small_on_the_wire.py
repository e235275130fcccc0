"""Bodies that are small on the wire and large in memory: bounded by the run before anything of them is made."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.callers import Caller
from tests.support.fleet_words import answer, answers_now, hello
from tests.system.attacks.places import attacked, device_of
from tests.transport.test_flood import MAX_MORE_BYTES, crowded
from thinwire.aggregation.plan_codecs import codec_of
from thinwire.client.train import context, evaluate
from thinwire.core.fleet import FixedLimits
from thinwire.core.layout import Layout, Tensor
from thinwire.core.plan import RunPlan
from thinwire.core.protocol import BYTES_A_TOKEN, MAX_DEPTH, read_json
from thinwire.core.score_histogram import MAX_METRIC_LETTERS
from thinwire.core.serialization import (
    FREE_HEADER_BYTES,
    MAX_METRICS,
    reply_from_bytes,
    reply_to_bytes,
    reply_to_json,
)
from thinwire.core.types import Part, ReplyHeader, UpdateId
from thinwire.server.service import limit_of
from thinwire.transport.protocol.http import HELLO, JOIN, PULL, PUSH, pack
from thinwire.transport.protocol.registration import to_bytes

both = pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
DEEP = b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1)
MANY = b"[" + b"[]," * 30_000 + b"[]]"
RULES = {f"blocks.{nth}.*": "topk(0.01) > int8" for nth in range(100)}
PLAN = RunPlan.from_json({"run": {"task": "toy"}, "local": {"lr": 1.0}, "uplink": {"codec": "fp16", "layers": RULES}})
LAYOUT = Layout.build(  # a model of many layers with a counter each
    [Tensor(f"blocks.{nth}.convolution.{name}", shape, dtype, role)  # type: ignore[arg-type]  # literals
     for nth in range(1500)
     for name, shape, dtype, role in (
         ("weight", (1 << 20,), "float32", "trained"), ("num_batches_tracked", (), "int64", "buffer"))]
)  # fmt: skip
LIMIT = limit_of(PLAN, LAYOUT)


def bare(raw: dict[str, Any], **more: bytes) -> bytes:
    """A JSON object with further keys whose values are these bytes."""
    extra = b"".join(b',"%s":%s' % (name.encode(), value) for name, value in more.items())
    return json.dumps(raw).encode()[:-1] + extra + b"}"


def largest_reply(letter: str = "\U0001f600") -> ReplyHeader:
    """What the largest honest reply of the model holds, with numbers of many digits and names of wide letters."""
    digest = "0123456789abcdef" * 4
    names = [f"eval/{nth:02d}" + letter * (MAX_METRIC_LETTERS - 2) for nth in range(MAX_METRICS)]
    return ReplyHeader(
        "toy-1.1000000.pi-1", UpdateId("toy-1", "pi-1", 2**62), 10**9, 2**40, 2**40, 1e9 / 3, 1e99 / 3,
        dict.fromkeys(names, (1e+99 / 3, 1e+29 / 3)),
        parts=tuple(Part(f"frame/{nth}", 2**40, digest) for nth in range(LIMIT.parts)),
        codec=codec_of(PLAN.uplink, 1),
        counters={tensor.name: 2**63 - 1 for tensor in LAYOUT.of_role("buffer")},
        residual_norm=1e99 / 3, planned=2**40, lost="l" * 200,
    )  # fmt: skip


def test_the_largest_honest_reply_is_read_within_its_runs_limit() -> None:
    assert LIMIT.parts == len(LAYOUT.segments) + 1 > 80
    assert LIMIT.counters == 1500
    for letter in ("a", "\u4e00", "\U0001f600"):
        data = reply_to_bytes(largest_reply(letter))
        assert len(data) <= LIMIT.header_bytes
        assert reply_from_bytes(data, LIMIT.header_bytes) == largest_reply(letter)


def test_what_a_device_and_an_aggregator_take_of_metrics_is_the_same() -> None:
    losses_and_personal = 3  # of evaluation and of training; `eval/personal`
    most = evaluate.MAX_METRICS + context.MAX_REPORTED + losses_and_personal
    assert (most, evaluate.MAX_METRIC_LETTERS) == (MAX_METRICS, MAX_METRIC_LETTERS)


@both
def test_the_largest_honest_reply_passes_the_device_api_and_one_part_more_is_its_devices_failure(
    tmp_path: Path, tls: bool
) -> None:
    with attacked(tmp_path, tls=tls, limits=FixedLimits(LIMIT)) as here:
        caller, honest = device_of(here), reply_to_json(largest_reply())
        header = honest | {"parts": [part | {"length": 1} for part in honest["parts"]]}
        said = caller.call("POST", PUSH, pack(json.dumps(header).encode()))
        assert (said.status, len(said.told["offsets"])) == (200, LIMIT.parts)
        for key, more in (
            ("parts", [*header["parts"], header["parts"][0]]),
            ("counters", {**header["counters"], "one more": 1}),
        ):
            said = caller.call("POST", PUSH, pack(json.dumps(header | {key: more}).encode()))
            assert said.short == (413, "too-large"), key
        assert [getattr(reply, "kind", "") for reply in answers_now(here.fleet)] == ["protocol"] * 2


REFUSED: dict[str, Any] = {
    "unknown key": {"added_later": 1},
    "unknown key of a part": {"parts": [{"name": "f", "length": 0, "sha256": "", "offset": 0, "x": 1}]},
    "unknown key of timings": {"timings": {"sleep_s": 1.0}},
    "many metrics": {"metrics": {f"eval/{nth}": [1.0, 1.0] for nth in range(MAX_METRICS + 1)}},
    "long metric": {"metrics": {"eval/" + "m" * (MAX_METRIC_LETTERS + 1): [1.0, 1.0]}},
    "texts as numbers": {"examples": "7"},
    "truth as a number": {"steps": True},
    "half a step": {"steps": 1.5},
    "a list as a text": {"codec": ["a"]},
    "many steps": {"steps": 2**62},
    "a norm whose square is infinite": {"norm": 1e200},
    "another spelling of an id": {"update_id": "digits-1/pi-1/07"},
    "digits of another script": {"update_id": "digits-1/pi-1/\u0667"},
}


@both
def test_what_an_honest_reply_never_holds_is_refused(tmp_path: Path, tls: bool) -> None:
    with attacked(tmp_path, tls=tls) as here:
        caller, plain = device_of(here), reply_to_json(answer("pi-1", "digits-1.1.pi-1", 1))
        for what, more in REFUSED.items():
            said = caller.call("POST", PUSH, pack(json.dumps({**plain, **more}).encode()))
            assert said.short == (409, "protocol"), what
        nan = json.dumps({**plain, "norm": float("nan")}).encode()
        assert caller.call("POST", PUSH, pack(nan)).short == (409, "protocol")
        assert not answers_now(here.fleet)
        assert caller.push(answer("pi-1", "digits-1.1.pi-1", 1)).status == 200, "and the honest one is taken"


@both
def test_every_json_of_a_device_is_bounded_in_depth_and_values_before_it_is_parsed(
    tmp_path: Path, tls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    with attacked(tmp_path, tls=tls) as here:
        caller = device_of(here)
        bodies = {
            HELLO: json.loads(to_bytes(hello(caller.name, caller.process))),
            PUSH: reply_to_json(answer("pi-1", "a", 1)),
            PULL: {"process": caller.process, "wait_s": 0.0, "in_flight": []},
        }  # fmt: skip
        if tls:
            bodies[JOIN] = {"secret": "0" * 32, "name": "pi-9", "versions": {}}

        def loads(text: str, **_how: Any) -> Any:
            made.append(len(text))
            return {}

        monkeypatch.setattr("thinwire.core.protocol.json", SimpleNamespace(loads=loads))
        for path, raw in bodies.items():
            for value in (DEEP, MANY, b'"' * 70_001, b"[" * 60_000, b"[0" + b",0" * 40_000 + b"]"):
                status = caller.call("POST", path, pack(bare(raw, versions=value))).status
                assert status in (403, 409, 429), (path, value[:10], status)
        assert made == []


@pytest.mark.slow
def test_pushes_of_150_kb_hold_little_memory_and_keep_nobody_waiting(tmp_path: Path) -> None:
    with crowded(tmp_path) as api:
        liar, before = Caller(api, "pi-2"), api.memory()
        assert liar.join(api.secrets.pop()).status == 200
        assert liar.hello().status == 200
        empty = b"".join(random.Random(3).choices((b"[],[],", b"{},{},"), k=690_000))
        pushes = [pack(b"[" + empty + b"0]")] * 16
        assert 130_000 < len(pushes[0]) < 260_000

        def push(body: bytes) -> int | None:
            try:
                return liar.call("POST", PUSH, body).status
            except ConnectionError:  # a device has at most four connections: the oldest is closed for the fifth
                return None

        with ThreadPoolExecutor(8) as threads:
            said = threads.map(push, pushes)
            assert api.round_s() > 0
            answers = set(said)
        assert answers & {409, 413, 503}
        assert answers <= {409, 413, 503, None}
        assert api.memory("VmHWM") - before <= MAX_MORE_BYTES


def test_a_reader_makes_no_more_than_its_bound_says() -> None:
    assert read_json(b'{"a":"\\\\\\"[[[[[[[[[[[["}', 800) == {"a": '\\"[[[[[[[[[[[['}
    assert read_json(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH, 8000)
    for text in (
        DEEP, b"]" + b"[" * 2, b"[1,2", b"NaN", b"[Infinity]", b"[" + b"1," * 200 + b"1]", '"\u00e9'.encode("utf-16"),
        b'{"a":"\xff"}', b"9" * 5000,
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"."):
            read_json(text, 100 * BYTES_A_TOKEN)
    assert FREE_HEADER_BYTES // BYTES_A_TOKEN > 10_000
