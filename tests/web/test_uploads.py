"""Initial models through the dashboard: bounded, streamed, only their header is read, and gone when unused."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from playwright.sync_api import expect
from safetensors.numpy import save
from starlette.testclient import TestClient

from tests.support.browsing import Open
from tests.support.filled_store import twelve_rounds
from tests.support.serving import Shown, serving
from thinwire.core import disk_reserve
from thinwire.core.errors import PlanError, Refused
from thinwire.core.statedir import hold
from thinwire.core.tensor_header import MAX_HEADER, header_length, read_header
from thinwire.store import Store
from thinwire.web import uploads
from thinwire.web.uploads import UNUSED_S, remove_unused

HERE = {"Origin": "http://127.0.0.1:8080"}
MODEL = save({"w": np.ones((3, 2), np.float32), "n": np.zeros(1, np.int64)})


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "aggregator" / "lock"
    path.parent.mkdir()
    with hold(path, {}):
        yield path


@pytest.fixture
def client(visit: Any, store: Store, lock: Path) -> TestClient:
    found: TestClient = visit(lock=lock)
    found.post("/login", data={"code": store.logins.new_code()})
    return found


def put(client: TestClient, body: bytes) -> Any:
    return client.post("/api/v1/uploads", content=body, headers=HERE)


def left(lock: Path) -> list[Path]:
    return sorted((lock.parent / "uploads").glob("*"))


def test_a_model_is_stored_under_a_random_name_and_usable_in_a_plan(client: TestClient, lock: Path):
    answer = put(client, MODEL)
    assert answer.status_code == 201
    said = answer.json()
    assert (said["tensors"], said["elements"], said["size"]) == (2, 7, len(MODEL))
    [file] = left(lock)
    assert file.read_bytes() == MODEL
    assert said["init"] == f"upload:{file.stem}"
    assert len(file.stem) == 32
    assert put(client, MODEL).json()["init"] != said["init"]
    plan = {"run": {"task": "digits", "init": said["init"]}, "local": {"lr": 1}}
    assert client.post("/api/v1/plans/check", json={"plan": plan}, headers=HERE).json()["ok"]
    os.utime(file, (1.0, 1.0))
    assert client.post("/api/v1/runs", json={"plan": plan}, headers=HERE).status_code == 202
    assert time.time() - file.stat().st_mtime < 60, "a command counts as a use"
    for name in ("upload:0000", "upload:../../store", "upload:"):
        plan["run"]["init"] = name
        found = client.post("/api/v1/plans/check", json={"plan": plan}, headers=HERE).json()
        assert [one["what"] for one in found["problems"]] == ["there is no such upload"], name


def header(length: int, text: bytes, body: int) -> bytes:
    return struct.pack("<Q", length) + text + bytes(body)


GOOD = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
BAD = {
    "empty": b"\x00",
    "header too long": header(2**62, b"{}", 8),
    "header longer than the file": header(1000, b"{}", 8),
    "no JSON": header(4, b"{{{{", 8),
    "a list": header(2, b"[]", 0),
    "deep": header(20_000, b"[" * 20_000, 0),
    "a gap": header(len(GOOD), GOOD.replace(b"[0,8]", b"[4,12]").ljust(len(GOOD)), 12),
    "rest": header(len(GOOD), GOOD, 9),
    "short": header(len(GOOD), GOOD, 7),
    "huge shape": header(
        83, b'{"w":{"dtype":"F32","shape":[9223372036854775807,8],"data_offsets":[0,8]}}'.ljust(83), 8
    ),
    "unknown type": header(len(GOOD), GOOD.replace(b"F32", b"F8X"), 8),
    "a negative shape": header(len(GOOD) + 1, GOOD.replace(b"[2]", b"[-2]"), 8),
    "pickle": b"\x80\x04\x95" + bytes(200),
}


@pytest.mark.parametrize("body", BAD.values(), ids=BAD)
def test_what_is_no_model_is_refused_and_leaves_nothing(client: TestClient, lock: Path, body: bytes):
    answer = put(client, body)
    assert answer.status_code == 422, answer.text
    assert answer.json()["why"]
    assert answer.json()["try"]
    assert left(lock) == []


@given(st.binary(max_size=200))
def test_no_header_makes_it_allocate_or_fail_otherwise(data: bytes):
    for total in (len(data), len(data) + 2**40):
        try:
            length = header_length(data[:8], total)
            assert length <= MAX_HEADER
            read_header(data[8 : 8 + length], total)
        except PlanError:
            pass


def test_the_size_is_the_operators(client: TestClient, lock: Path):
    (lock.parent.parent / "aggregator.toml").write_text("max_upload_mb = 1\n")
    big = save({"w": np.zeros(300_000, np.float32)})
    answer = put(client, big)
    assert (answer.status_code, answer.json()["detail"]) == (409, "a model of 1 MB is not taken")
    assert "up to 1 MB" in answer.json()["why"]
    (lock.parent.parent / "aggregator.toml").write_text("max_upload_mb = 0\n")
    assert put(client, MODEL).status_code == 409
    assert left(lock) == []


def test_only_uploads_may_be_large_and_only_with_a_session(client: TestClient, visit: Any, lock: Path):
    assert client.post("/api/v1/plans/check", content=b"x" * 70_000, headers=HERE).status_code == 413
    assert put(visit(lock=lock), MODEL).status_code == 401
    assert client.post("/api/v1/uploads", content=MODEL).status_code == 403, "nothing says which page sent it"
    assert left(lock) == []


def test_a_full_disk_is_told_before_anything_is_written(
    client: TestClient, lock: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(disk_reserve, "FREE_BYTES", 2**62)
    answer = put(client, MODEL)
    assert (answer.status_code, answer.json()["detail"]) == (409, "the disk has too little space")
    assert left(lock) == []


def test_the_folder_has_room_for_four_of_the_largest(client: TestClient, lock: Path):
    (lock.parent.parent / "aggregator.toml").write_text("max_upload_mb = 1\n")
    big = save({"w": np.zeros(240_000, np.float32)})
    assert [put(client, big).status_code for _ in range(5)] == [201] * 4 + [409]
    assert put(client, big).json()["detail"] == "there are too many uploads"
    assert len(left(lock)) == 4


def test_two_uploads_at_once_are_taken_however_fast_the_third_is_and_the_disk_has_room_for_both(
    lock: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: list[int] = []
    monkeypatch.setattr(uploads, "require_space", lambda folder, more: asked.append(more))

    async def body() -> AsyncIterator[bytes]:
        yield MODEL

    async def scene() -> None:
        taking = uploads.Uploads(lock)
        found = await asyncio.gather(*(taking.take(body(), len(MODEL)) for _ in range(5)), return_exceptions=True)
        assert [isinstance(one, Refused) for one in found] == [False, False, True, True, True]
        assert max(asked) == 2 * len(MODEL)
        assert (await taking.take(body(), len(MODEL))).tensors == 2

    asyncio.run(scene())


def test_an_upload_that_drips_ends_at_its_deadline(lock: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(uploads, "CHUNK_S", 0.2)
    monkeypatch.setattr(uploads, "LEAST_RATE", 10**9)

    async def drips() -> AsyncIterator[bytes]:
        for at in range(len(MODEL)):
            yield MODEL[at : at + 1]
            await asyncio.sleep(0.05)

    async def scene() -> None:
        with pytest.raises(PlanError, match="did not arrive as a whole"):
            await uploads.Uploads(lock).take(drips(), len(MODEL))

    asyncio.run(scene())
    assert left(lock) == []


def test_the_header_of_an_upload_is_bounded(client: TestClient, lock: Path):
    large = header(10**6 + 1, GOOD.ljust(10**6 + 1), 8)
    answer = put(client, large)
    assert (answer.status_code, answer.json()["detail"]) == (422, "the upload's header is too large")
    assert left(lock) == []


def test_an_unused_file_goes_after_a_day_and_nothing_else_does(tmp_path: Path):
    now = 10 * UNUSED_S
    for name, age in (("old.safetensors", 1.1), ("new.safetensors", 0.9), ("old.part", 1.1), ("old.txt", 9.0)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (now - age * UNUSED_S,) * 2)
    remove_unused(tmp_path, now)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.safetensors", "old.txt"]
    remove_unused(tmp_path / "missing", now)


def test_an_upload_that_is_cut_off_leaves_nothing(store: Store, lock: Path):
    with serving(store.url, "127.0.0.1:0", "--lock", str(lock)) as served:
        host, port = served.address.split(":")
        cookie = session(store, served)
        with socket.create_connection((host, int(port))) as line:
            head = (
                f"POST /api/v1/uploads HTTP/1.1\r\nHost: {served.address}\r\nOrigin: http://{served.address}\r\n"
                f"Cookie: {cookie}\r\nContent-Length: 100000000\r\n\r\n"
            )
            line.sendall(head.encode() + header(len(GOOD), GOOD, 8)[:60])
            until(lambda: len(left(lock)) == 1)
        until(lambda: left(lock) == [])


def session(store: Store, served: Shown) -> str:
    import http.client
    import urllib.parse

    line = http.client.HTTPConnection(served.address)
    body = urllib.parse.urlencode({"code": store.logins.new_code()})
    line.request("POST", "/login", body, {"Content-Type": "application/x-www-form-urlencoded"})
    found = line.getresponse().headers["set-cookie"]
    line.close()
    return str(found).partition(";")[0]


def until(holds: Any) -> None:
    end = time.monotonic() + 15
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_person_uploads_a_model_in_the_form(store: Store, lock: Path, look: Open, tmp_path: Path):
    twelve_rounds(store)
    file = tmp_path / "mine.safetensors"
    file.write_bytes(MODEL)
    with serving(store.url, "127.0.0.1:0", "--lock", str(lock)) as served:
        page = look(served.url, "new")
        page.locator("#f-local-lr").fill("0.5")
        page.locator(".own-model input").set_input_files(file)
        expect(page.locator(".own-model")).to_contain_text("mine.safetensors is uploaded: 2 tensors, 7 values")
        [stored] = left(lock)
        expect(page.locator("#f-run-init")).to_have_value(f"upload:{stored.stem}")
        expect(page.locator(".plan-state")).to_contain_text("First model: the uploaded model.")
