"""Every private name of flwr that we use is there and takes what we pass: a new release of flwr fails here, by name."""

from __future__ import annotations

import ast
import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import thinwire.flower
from thinwire.flower.superlink import PRIVATE_NAMES, Grid, SuperLink
from thinwire.transport.protocol import signing

# What flwr documents; all else that we import must stand in PRIVATE_NAMES or be a plain constant.
PUBLIC = {"flwr.app:ConfigRecord", "flwr.app:Message", "flwr.app:RecordDict"}
CONSTANTS = {
    "flwr.common.constant:HEARTBEAT_DEFAULT_INTERVAL": 30,
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
}
CLASSES = {"flwr.supercore.constant:TaskType": "SERVER_APP", "flwr.common.constant:SubStatus": "COMPLETED"}


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
    assert {file for file, _ in used} == {"superlink.py"}


def test_asks_and_replies_live_in_flowers_state() -> None:
    superlink = SuperLink()
    grid = Grid(superlink)
    node = superlink.node("pi-1", b"a key")
    ask = grid.ask(node, b"an ask")
    assert superlink.state.num_message_ins() == 1
    reply = grid.reply(ask, b"a reply")
    assert superlink.state.num_message_res() == 1
    superlink.node_has_left(node)
    assert grid.collect([reply]) == [b"a reply"]
    assert (superlink.state.num_message_ins(), superlink.state.num_message_res()) == (0, 0)


def test_an_ask_that_was_handed_out_is_not_handed_out_by_flower() -> None:
    superlink = SuperLink()
    grid = Grid(superlink)
    node = superlink.node("pi-1", b"a key")
    grid.delivered(grid.ask(node, b"one"))
    kept = grid.ask(node, b"two")
    assert superlink.state.get_message_ins(node_id=node, limit=None) == [kept]


def test_a_node_is_online_between_its_calls_and_its_leaving() -> None:
    superlink = SuperLink()
    node = superlink.node("pi-1", b"a key")

    def status() -> str:
        return str(superlink.state.get_node_info(node_ids=[node])[0].status)

    assert (status(), superlink.node("pi-1", b"a key")) == ("offline", node)
    superlink.node_is_here(node)
    assert status() == "online"
    superlink.node_has_left(node)
    assert status() == "offline"


def test_asks_and_replies_outlive_a_run_that_flower_gave_up() -> None:
    """It does so when this machine slept, or its clock jumped, for more than a minute."""
    superlink = SuperLink()
    grid = Grid(superlink)
    node, before = superlink.node("pi-1", b"a key"), superlink.run_id
    ask = grid.ask(node, b"an ask")
    assert superlink.state.finish_task(superlink.task_id, "failed", "no heartbeat")
    assert grid.collect([grid.reply(ask, b"a reply")]) == [b"a reply"]
    assert superlink.run_id != before
    superlink.state.finish_task(superlink.task_id, "failed", "no heartbeat")
    assert grid.ask(node, b"another").metadata.run_id == superlink.run_id
