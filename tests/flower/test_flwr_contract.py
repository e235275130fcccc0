"""Every private name of flwr that we use is there and takes what we pass: a new release of flwr fails here, by name."""

from __future__ import annotations

import ast
import inspect
import re
from datetime import UTC, datetime, timedelta
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import thinwire.flower
from tests.support.fleet_words import envelope
from thinwire.core.link_state import Outstanding
from thinwire.flower import compressed_app
from thinwire.flower.link_state import (
    ASSIGNMENT,
    ATTRIBUTES,
    PRIVATE_NAMES,
    RECORD,
    REPLY,
    FlowerLinkState,
    SuperLink,
)  # fmt: skip
from thinwire.transport.protocol import signing

from flwr.app import Message  # isort: skip
from flwr.server.superlink.linkstate import InMemoryLinkState  # isort: skip

# What flwr documents; all else that we import must stand in PRIVATE_NAMES or be a plain constant.
PUBLIC = {
    *(f"flwr.app:{name}" for name in ("Array", "ArrayRecord", "ConfigRecord", "Context", "Error", "Message")),
    "flwr.app:RecordDict", "flwr.serverapp:Grid", "flwr.serverapp.strategy:Strategy",
}  # fmt: skip
CONSTANTS = {
    "flwr.common.constant:NOOP_ACCOUNT_NAME": "none",
    "flwr.common.constant:NOOP_FLWR_AID": "<id:none>",
    "flwr.common.constant:SUPERLINK_NODE_ID": 1,
    "flwr.common.constant:TIMESTAMP_HEADER": signing.TIMESTAMP_HEADER,
    "flwr.common.constant:SYSTEM_TIME_TOLERANCE": -signing.EARLIEST_S,
    "flwr.supercore.constant:MAX_TIMESTAMP_DIFF_SECONDS": signing.LATEST_S,
    "flwr.supercore.constant:FLEET_HTTP_PUBLIC_KEY_HEADER": signing.PUBLIC_KEY_HEADER,
    "flwr.supercore.constant:FLEET_HTTP_SIGNATURE_HEADER": signing.SIGNATURE_HEADER,
    "flwr.supercore.constant:FLWR_IN_MEMORY_DB_NAME": ":flwr-in-memory:",
    "flwr.supercore.constant:NOOP_FEDERATION_ID": "@none/default",
    "flwr.supercore.differential_privacy:KEY_CLIPPING_NORM": compressed_app.CLIPPING,
    "flwr.common.secure_aggregation.secaggplus_constants:RECORD_KEY_CONFIGS": compressed_app.SECAGG,
    "flwr.common.constant:ErrorCode.UNKNOWN": compressed_app.UNKNOWN,
}
CLASSES = {
    "flwr.supercore.constant:TaskType": "SERVER_APP",
    "flwr.supercore.constant:NodeStatus": "ONLINE",
}


def resolve(name: str) -> Any:
    module, _, attributes = name.partition(":")
    found: Any = import_module(module)
    for attribute in attributes.split("."):
        found = getattr(found, attribute)
    return found


@pytest.mark.parametrize("name", PRIVATE_NAMES)
def test_a_private_name_is_there_and_takes_what_we_pass(name: str) -> None:
    try:
        found = resolve(name)
    except (ImportError, AttributeError) as error:
        pytest.fail(f"flwr no longer has {name}: {error}")
    takes = inspect.signature(found).parameters
    missing = set(PRIVATE_NAMES[name]) - set(takes)
    assert not missing, f"{name} no longer takes {sorted(missing)}: {list(takes)}"
    needed = {
        p.name for p in takes.values() if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    }
    assert needed <= set(PRIVATE_NAMES[name]), f"{name} needs {sorted(needed - set(PRIVATE_NAMES[name]))} now"


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_constant_of_flower_is_what_we_built_on(name: str) -> None:
    assert resolve(name) == CONSTANTS[name]


@pytest.mark.parametrize("name", CLASSES)
def test_a_word_of_flower_is_there(name: str) -> None:
    assert getattr(resolve(name), CLASSES[name])


def test_nothing_else_of_flwr_is_imported() -> None:
    used = set()
    ours = Path(next(iter(thinwire.flower.__path__)))
    for path in (path for path in ours.glob("*.py") if not path.name.startswith("stock_")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "flwr":
                used |= {(path.name, f"{node.module}:{alias.name}") for alias in node.names}
            assert not (isinstance(node, ast.Import) and any(a.name.split(".")[0] == "flwr" for a in node.names)), path
    assert {name for _, name in used} <= PUBLIC | set(PRIVATE_NAMES) | set(CONSTANTS) | set(CLASSES)
    assert {file for file, _ in used} == {"compressed_app.py", "float_arrays.py", "link_state.py"}
    assert {name for file, name in used if file != "link_state.py"} <= PUBLIC, "it runs in apps of other people"


def test_an_attribute_of_flowers_state_is_there() -> None:
    state = SuperLink().state
    assert {name: type(getattr(state, name)).__name__ for name in ATTRIBUTES} == ATTRIBUTES


def test_flower_stores_and_deletes_messages_by_two_methods_that_the_index_sees() -> None:
    """A message that flwr removed elsewhere would stay in the index by node."""
    tree = ast.parse(inspect.getsource(import_module(InMemoryLinkState.__module__)))
    (of_flower,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "InMemoryLinkState"]
    changing = set()
    for method in of_flower.body:
        for node in ast.walk(method):
            if isinstance(node, ast.Attribute) and node.attr == "message_ins_store":
                text = ast.unparse(method)
                if re.search(r"(del self\.message_ins_store|self\.message_ins_store(\[\w+\] = |\.pop|\.clear))", text):
                    changing.add(method.name)  # type: ignore[attr-defined]  # only methods have one
    assert changing == {"store_message_ins", "delete_messages"}


def in_flight(assignment_id: str, device: str = "pi-1", said: bytes = b"an ask") -> Outstanding:
    return Outstanding(envelope(device, assignment_id), said)


def state_with(*devices: str) -> FlowerLinkState:
    state = SuperLink().state
    for device in devices:
        state.register(device, device.encode())
    return state


def content(message: Message, kind: str) -> object:
    return message.content[RECORD][kind]


def test_the_embedded_superlink_runs_on_our_state() -> None:
    superlink = SuperLink()
    assert superlink.app.state.linkstate_factory.state() is superlink.state


def test_assignments_and_replies_live_in_flowers_state() -> None:
    state, assignment = state_with("pi-1"), in_flight("assignment-1")
    state.store(assignment)
    assert content(state.message_ins_store["assignment-1"], ASSIGNMENT) == b"an ask"
    reply = state.reply(assignment, b"a reply")
    assert (state.num_message_ins(), state.num_message_res()) == (1, 1)
    assert (state.outstanding("pi-1"), state.in_flight()) == ([], {"assignment-1"})
    state.set_offline("pi-1")
    assert content(reply, REPLY) == b"a reply"
    state.collect([reply])
    assert (state.num_message_ins(), state.num_message_res()) == (0, 0)


def test_an_assignment_that_was_handed_out_is_not_handed_out_by_flower_and_again_by_us() -> None:
    state, one, two = state_with("pi-1"), in_flight("one"), in_flight("two")
    state.store(one)
    state.deliver(one, 1.0)
    state.store(two)
    node_id = state.get_node_id_by_public_key(b"pi-1")
    assert node_id is not None
    assert state.get_message_ins(node_id=node_id, limit=None) == [state.message_ins_store["two"]]
    assert state.outstanding("pi-1") == [one, two]


def test_an_assignment_that_is_sent_again_outlives_the_collection_of_its_first_reply() -> None:
    state, first, again = state_with("pi-1"), in_flight("assignment-1"), in_flight("assignment-1")
    state.store(first)
    failed = state.reply(first, b"failed")
    state.store(again)
    state.collect([failed])
    assert state.outstanding("pi-1") == [again]
    state.collect([state.reply(again, b"done")])
    assert not state.in_flight()


def test_what_flower_deletes_leaves_the_index() -> None:
    state = state_with("pi-1")
    state.store(in_flight("assignment-1"))
    state.delete_messages({"assignment-1"})
    assert (state.outstanding("pi-1"), state.device_of("assignment-1")) == ([], "")


def test_a_node_is_online_from_its_hello_to_its_leaving_for_however_long() -> None:
    state = state_with("pi-1", "pi-2")
    assert state.online() == set()
    state.set_online("pi-1")
    with patch(
        "flwr.server.superlink.linkstate.in_memory_linkstate.now", lambda: datetime.now(UTC) + timedelta(days=9)
    ):
        assert state.online() == {"pi-1"}
    state.set_offline("pi-1")
    assert state.online() == set()


def test_a_key_under_another_name_is_the_same_node() -> None:
    state = state_with("pi-1")
    state.set_online("pi-1")
    state.register("pi-9", b"pi-1")
    assert state.names_of(b"pi-1") == ["pi-1", "pi-9"]
    state.set_offline("pi-1")
    state.set_online("pi-9")
    state.set_offline("pi-1")
    assert (state.online(), len(state.nodes)) == ({"pi-9"}, 1)


def test_a_device_that_was_revoked_has_no_name_until_it_is_registered_again() -> None:
    state = state_with("pi-1")
    state.set_online("pi-1")
    assert state.forget("pi-1")
    assert not state.forget("pi-1")
    assert (state.knows("pi-1"), state.online()) == (False, set())
    state.register("pi-1", b"pi-1")
    state.store(in_flight("assignment-1"))
    assert (len(state.nodes), state.device_of("assignment-1")) == (1, "pi-1")


def test_assignments_and_replies_outlive_a_run_that_flower_gave_up() -> None:
    """It does so a minute after the last heartbeat of its task, and we send none."""
    state, assignment, other = state_with("pi-1"), in_flight("assignment-1"), in_flight("assignment-2")
    state.store(assignment)
    state.store(other)
    assert state.claim_task(state.task_id)
    assert state.activate_task(state.task_id)
    assert state.finish_task(state.task_id, "failed", "no heartbeat")
    state.collect([state.reply(assignment, b"a reply")])
    assert (state.outstanding("pi-1"), state.in_flight()) == ([other], {"assignment-2"})
    state.store(in_flight("assignment-3"))
    assert state.in_flight() == {"assignment-2", "assignment-3"}
