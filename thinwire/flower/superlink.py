"""This module runs Flower's SuperLink inside this process: its app, its state, and one Flower run for our assignments.

It listens on no address; only `Grid` and `Nodes` use it. `Grid` stores assignments and replies as Flower messages.
Invariant: frames never enter Flower's object store. A `Message` gets its metadata as a whole, because Flower's public
way to fill it uses an identity of the whole process.

`create_app` and everything behind it are private to flwr. They are used in this file only, `PRIVATE_NAMES` lists them,
and tests/flower/test_flwr_contract.py fails with the names that another release of flwr has moved.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, cast

from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, NOOP_ACCOUNT_NAME, NOOP_FLWR_AID, SubStatus
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NOOP_FEDERATION_ID, TaskType
from flwr.superlink.cli.flower_superlink import SuperLinkLifespan
from flwr.superlink.config_loader import SuperLinkLifespanConfig, load_control_authn_plugin
from flwr.superlink.main import create_app

from thinwire.core.errors import ThinwireError

from flwr.app import ConfigRecord  # isort: skip
from flwr.app import Message, RecordDict

from flwr.app.message import make_message  # isort: skip
from flwr.app.metadata import Metadata  # isort: skip
from flwr.common.constant import SUPERLINK_NODE_ID  # isort: skip
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_der_public_key

from thinwire.core.fleet import DeviceRow
from thinwire.transport.server.mailbox import Mailbox

__all__ = [
    "Grid",
    "Message",
    "said",
]


os.environ.update(  # read by flwr when it is imported: flwr must send nothing on its own
    FLWR_TELEMETRY_ENABLED="0",
    FLWR_DISABLE_UPDATE_CHECK="1",
    FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION="1",
)

logging.getLogger("flwr").setLevel(logging.ERROR)  # its messages about start and stop would confuse our users

TASK_HEARTBEAT_S = 20.0  # Flower fails a task after 60 s without one
NODE_HEARTBEAT_S = 30.0  # a node counts as online for twice this after its last call

# Undocumented names of flwr that we use: where each is, and the parameters that we pass.
PRIVATE_NAMES: Mapping[str, tuple[str, ...]] = {
    "flwr.superlink.main:create_app": ("config", "superlink_lifespan_class"),
    "flwr.superlink.config_loader:SuperLinkLifespanConfig": (
        "control_address", "health_server_address", "host", "port", "insecure", "certificates",
        "superexec_auth_secret", "authn_plugin", "event_log_plugin", "fleet_event_log_plugin", "enable_event_log",
        "artifact_provider", "enable_supernode_auth", "fleet_api_type", "fleet_api_address", "simulation",
        "ssl_ca_certfile", "ssl_certfile", "ssl_keyfile", "database", "isolation", "runtime_dependency_install",
    ),
    "flwr.superlink.config_loader:load_control_authn_plugin": (),
    "flwr.superlink.cli.flower_superlink:SuperLinkLifespan": ("config", "state_factory"),
    "flwr.server.superlink.linkstate:LinkStateFactory.state": ("self",),
    "flwr.server.superlink.linkstate:LinkState.create_run": (
        "self", "fab_id", "fab_version", "fab_hash", "override_config", "federation_id", "federation_config",
        "flwr_aid", "primary_task_type",
    ),
    "flwr.server.superlink.linkstate:LinkState.get_run_info": ("self", "run_ids"),
    "flwr.server.superlink.linkstate:LinkState.claim_task": ("self", "task_id"),
    "flwr.server.superlink.linkstate:LinkState.activate_task": ("self", "task_id"),
    "flwr.server.superlink.linkstate:LinkState.acknowledge_task_heartbeat": ("self", "task_id"),
    "flwr.server.superlink.linkstate:LinkState.finish_task": ("self", "task_id", "sub_status", "details"),
    "flwr.server.superlink.linkstate:LinkState.create_node": (
        "self", "owner_aid", "owner_name", "public_key", "heartbeat_interval", "name",
    ),
    "flwr.server.superlink.linkstate:LinkState.get_node_id_by_public_key": ("self", "public_key"),
    "flwr.server.superlink.linkstate:LinkState.get_node_info": ("self", "node_ids", "statuses"),
    "flwr.server.superlink.linkstate:LinkState.acknowledge_node_heartbeat": ("self", "node_id", "heartbeat_interval"),
    "flwr.server.superlink.linkstate:LinkState.deactivate_node": ("self", "node_id"),
    "flwr.server.superlink.linkstate:LinkState.store_message_ins": ("self", "message"),
    "flwr.server.superlink.linkstate:LinkState.store_message_res": ("self", "message"),
    "flwr.server.superlink.linkstate:LinkState.delete_messages": ("self", "message_ins_ids"),
    "flwr.superlink.routers.fleet.router:get_enable_supernode_auth": ("request",),
    "flwr.app.metadata:Metadata": (
        "run_id", "message_id", "src_node_id", "dst_node_id", "reply_to_message_id", "group_id", "created_at", "ttl",
        "message_type", "src_task_id",
    ),
    "flwr.app.message:make_message": ("metadata", "content"),
}  # fmt: skip


class SuperLink:
    """Holds the app, its in-memory state, and the Flower run (without a FAB) of our assignments.

    The state is disposable: nodes are registered again from our roster at each start.
    """

    def __init__(self) -> None:
        self.app = create_app(config(), SuperLinkLifespan)
        self.state: Any = self.app.state.linkstate_factory.state()
        self.run_id, self.task_id = self._begin_run()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Enter the app's lifespan, as a server would; finish the Flower run at the end."""
        async with self.app.router.lifespan_context(self.app):
            try:
                yield
            finally:
                self.state.finish_task(self.task_id, SubStatus.COMPLETED, "")

    def beat(self) -> None:
        """Report to Flower that our task is alive; begin a new run if Flower gave it up (the machine slept or its
        clock jumped).
        """
        if not self.state.acknowledge_task_heartbeat(self.task_id):
            self.run_id, self.task_id = self._begin_run()

    def _begin_run(self) -> tuple[int, int]:
        run_id = self.state.create_run(
            "thinwire/aggregator", "1", None, {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP
        )
        runs = self.state.get_run_info(run_ids=[run_id])
        task_id = runs[0].primary_task_id if runs else 0
        if not (self.state.claim_task(task_id) and self.state.activate_task(task_id)):
            raise ThinwireError(
                "Flower's SuperLink did not take our run",
                why="is another release of flwr installed?",
                hint="pip install 'flwr>=1.41,<1.42'",
            )
        return run_id, task_id

    def node(self, name: str, public_pem: bytes) -> int:
        """Return the id of a key's node; create it if it is new.

        A new node is set offline and not left registered, because Flower accepts no messages for a registered one.
        """
        known: int | None = self.state.get_node_id_by_public_key(public_pem)
        if known:
            return known
        made: int = self.state.create_node(
            owner_aid=NOOP_FLWR_AID,
            owner_name=NOOP_ACCOUNT_NAME,
            public_key=public_pem,
            heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL,
            name=name,
        )
        self.node_is_here(made)
        self.node_has_left(made)
        return made

    def node_is_here(self, node_id: int) -> None:
        """Set a node online."""
        self.state.acknowledge_node_heartbeat(node_id, NODE_HEARTBEAT_S)

    def node_has_left(self, node_id: int) -> None:
        """Set a node offline."""
        self.state.deactivate_node(node_id)


def config() -> SuperLinkLifespanConfig:
    """Return the configuration of a SuperLink that starts no SuperExec (isolation "process") and listens nowhere."""
    return SuperLinkLifespanConfig(
        control_address="",
        health_server_address=None,
        host="127.0.0.1",
        port=0,
        insecure=True,
        certificates=None,
        superexec_auth_secret=None,
        authn_plugin=load_control_authn_plugin(),
        event_log_plugin=None,
        fleet_event_log_plugin=None,
        enable_event_log=False,
        artifact_provider=None,
        enable_supernode_auth=True,
        fleet_api_type="grpc-rere",
        fleet_api_address=None,
        simulation=False,
        ssl_ca_certfile=None,
        ssl_certfile=None,
        ssl_keyfile=None,
        database=FLWR_IN_MEMORY_DB_NAME,
        isolation="process",
        runtime_dependency_install=False,
    )


RECORD = "thinwire"
ASK, REPLY = "ask", "reply"
TTL_S = 10 * 365 * 86400.0  # the round decides when an assignment expires, not Flower


class Grid:
    """Stores the messages of our Flower run.

    The fleet's thread and the device API's thread call it; Flower's state has a lock of its own.
    """

    def __init__(self, superlink: SuperLink) -> None:
        self._superlink, self._state = superlink, superlink.state

    def ask(self, node_id: int, data: bytes, group: str = "") -> Message:
        """Store an assignment for a node."""
        for _ in range(2):
            message = self._message(ASK, data, SUPERLINK_NODE_ID, node_id, group=group)
            if self._state.store_message_ins(message) is not None:
                return message
            self._superlink.beat()  # Flower may have given up our run
        raise RuntimeError(f"Flower did not take an ask for node {node_id}")

    def delivered(self, message: Message) -> None:
        """Mark an assignment as delivered, as Flower does at a node's pull; it has no effect, because we deliver again
        ourselves.

        Flower's own `get_message_ins` would look at every message of every node at each call.
        """
        message.metadata.delivered_at = datetime.now(UTC).isoformat()

    def reply(self, ask: Message, data: bytes) -> Message:
        """Store the reply to an assignment; if Flower has given up the assignment's run, store an empty assignment
        first.
        """
        for _ in range(2):
            meta = ask.metadata
            reply = self._message(
                REPLY, data, meta.dst_node_id, SUPERLINK_NODE_ID, meta.message_id, meta.group_id, meta.run_id
            )
            reply.metadata.ttl = meta.created_at + meta.ttl - reply.metadata.created_at
            if self._state.store_message_res(reply) is not None:
                return reply
            self._superlink.beat()
            ask = self.ask(meta.dst_node_id, b"", meta.group_id)
        raise RuntimeError(f"Flower did not take a reply of node {ask.metadata.dst_node_id}")

    def collect(self, replies: Sequence[Message]) -> list[bytes]:
        """Take replies out of Flower's state, which deletes them and their assignments.

        Flower's own `get_message_res` would replace a reply by an error if its node has gone offline since.
        """
        self._state.delete_messages(message_ins_ids={reply.metadata.reply_to_message_id for reply in replies})
        return [said(reply) for reply in replies]

    def forget(self, message: Message) -> None:
        """Delete a withdrawn assignment."""
        self._state.delete_messages(message_ins_ids={message.metadata.message_id})

    def _message(
        self,
        kind: str,
        data: bytes,
        src_node_id: int,
        dst_node_id: int,
        reply_to: str = "",
        group: str = "",
        run: int = 0,
    ) -> Message:
        metadata = Metadata(
            run_id=run or self._superlink.run_id,
            message_id=uuid.uuid4().hex,
            src_node_id=src_node_id,
            dst_node_id=dst_node_id,
            reply_to_message_id=reply_to,
            group_id=group,
            created_at=time.time(),
            ttl=TTL_S,
            message_type="query",
            src_task_id=self._superlink.task_id,
        )
        return make_message(metadata, RecordDict({RECORD: ConfigRecord({kind: data})}))


def said(reply: Message) -> bytes:
    """Return the bytes of a reply."""
    return cast(bytes, reply.content[RECORD][REPLY])


class Nodes:
    """Maps each device to its node in Flower's registry, by the device's key, and keeps the node online or offline.

    A node stays registered when its device is revoked, because Flower never accepts a deleted key again.
    """

    def __init__(self, superlink: SuperLink, exchange: Mailbox) -> None:
        self._superlink, self._exchange = superlink, exchange
        self._known: dict[str, int] = {}  # by the fingerprint of the device's key

    def register(self, row: DeviceRow) -> int:
        """Return the device's node, under its current name; register it if it is new."""
        if (node_id := self._known.get(row.fingerprint)) is None:
            pem = load_der_public_key(row.public_key).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
            node_id = self._known[row.fingerprint] = self._superlink.node(row.name, pem)
        if self._exchange.node_of(row.name) != node_id:
            self._exchange.register(row.name, node_id)
        return node_id

    def names_of(self, row: DeviceRow) -> list[str]:
        """Return the names under which this key has connected since the start."""
        return self._exchange.names_of(self._known.get(row.fingerprint, 0))

    def is_here(self, row: DeviceRow) -> None:
        """Set the device's node online."""
        self._superlink.node_is_here(self.register(row))

    def has_left(self, device: str) -> None:
        """Set the device's node offline."""
        if node_id := self._exchange.node_of(device):
            self._superlink.node_has_left(node_id)
