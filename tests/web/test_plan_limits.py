"""What a plan of the API can cost the dashboard: two checks at a time, few that wait, no text that breaks an answer."""

from __future__ import annotations

import asyncio
import json
import threading
from functools import partial
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.web.test_device_api_refusals import Visit
from tests.web.test_new_run import HERE, PLAN, WAYS, with_key
from thinwire.core.errors import Unreachable
from thinwire.store import Store
from thinwire.web import plan_routes
from thinwire.web.plan_routes import AT_MOST, AT_ONCE, OF_ONE, Planning

JSON = HERE | {"Content-Type": "application/json"}


def test_text_that_no_answer_could_hold_is_refused(page: TestClient, store: Store):
    for plan in (with_key("run.metric", "\ud800"), {**PLAN, "\ud800": {"a": 1}}):
        checked, started = (page.post(path, content=json.dumps({"plan": plan}), headers=JSON) for path in WAYS)
        assert (checked.status_code, started.status_code) == (200, 422)
        [problem] = checked.json()["problems"]
        assert problem["what"] == started.json()["detail"] == "the plan holds text that is not UTF-8"
    assert page.post(WAYS[0], content=json.dumps({"text": "# \ud800"}), headers=JSON).status_code == 422
    assert page.post(WAYS[0], content=json.dumps({"\ud800": 1}), headers=JSON).status_code == 422
    assert store.commands.pending() == []


def test_two_plans_are_checked_at_a_time(store: Store):
    """Pairs meet at a barrier, so two do run at once; a third one beside them would be counted."""
    at_work, most, pairs, guard = 0, 0, threading.Barrier(AT_ONCE), threading.Lock()

    def work(number: int) -> int:
        nonlocal at_work, most
        with guard:
            at_work += 1
            most = max(most, at_work)
        pairs.wait(20)
        with guard:
            at_work -= 1
        pairs.wait(20)
        return number

    async def tried() -> list[int]:
        planning = Planning(store, None)
        return await asyncio.gather(*(planning.in_turn(str(number), partial(work, number)) for number in range(6)))

    assert asyncio.run(tried()) == list(range(6))
    assert most == AT_ONCE == 2


def test_only_so_many_plans_wait_and_the_next_one_says_what_to_try(store: Store):
    held = threading.Event()

    async def tried() -> list[bool]:
        planning = Planning(store, None)
        tasks = [asyncio.create_task(planning.in_turn(str(n % 5), partial(held.wait, 20))) for n in range(AT_MOST)]
        await asyncio.sleep(0)  # each one has begun, and two have a thread
        try:
            with pytest.raises(Unreachable, match=r"checks 2 at a time, and 18 wait"):
                await planning.in_turn("anna", held.is_set)
        finally:
            held.set()
        return [*await asyncio.gather(*tasks), await planning.in_turn("anna", held.is_set)]

    assert asyncio.run(tried()) == [True] * (AT_MOST + 1), "the end of a check makes room"


def test_one_user_takes_a_part_of_the_turns(store: Store):
    held = threading.Event()

    async def tried() -> list[bool]:
        planning = Planning(store, None)
        tasks = [asyncio.create_task(planning.in_turn("eve", partial(held.wait, 20))) for _ in range(OF_ONE)]
        await asyncio.sleep(0)  # each one has begun, and two have a thread
        try:
            with pytest.raises(Unreachable, match="at most 4 of a user run or wait"):
                await planning.in_turn("eve", held.is_set)
            other = asyncio.create_task(planning.in_turn("anna", held.is_set))
        finally:
            held.set()
        found = [*await asyncio.gather(*tasks, other), await planning.in_turn("eve", held.is_set)]
        assert not planning._taken
        return found

    assert asyncio.run(tried()) == [True] * (OF_ONE + 2)


def test_a_check_for_which_there_is_no_room_is_a_problem_document(page: TestClient, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plan_routes, "AT_MOST", 0)
    refused = page.post(WAYS[0], json={"plan": PLAN}, headers=HERE)
    assert (refused.status_code, refused.headers["content-type"]) == (503, "application/problem+json")
    assert refused.json()["try"] == "the same again in ten seconds"


def test_a_file_of_settings_that_is_not_valid_is_told_without_what_it_has(visit: Visit, store: Store, tmp_path: Path):
    (tmp_path / "aggregator.toml").write_text('allow = "SECRET"')
    client = visit(lock=tmp_path / "aggregator" / "lock")
    assert client.post("/login", data={"code": store.logins.new_code()}).status_code == 303
    refused = client.post(WAYS[0], json={"plan": PLAN}, headers=HERE)
    assert (refused.status_code, refused.json()["detail"]) == (503, "aggregator.toml is not valid now")
    assert refused.json()["try"] == f"thinwire aggregator config --home {tmp_path}"
    assert "SECRET" not in refused.text
