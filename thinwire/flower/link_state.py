"""This module runs Flower's SuperLink inside this process, on a LinkState of ours.

The LinkState adds to Flower's in-memory one what flwr 1.41 lacks: an index by node, a wake, and delivery again.

`FlowerLinkState` inherits the registry (node id by public key), the online state of nodes, and a message's life from
its assignment to its collected reply. It is the table of the embedded SuperLink, and it implements the Protocol
`LinkState` of core/link_state.py. A message's id is its assignment's id. The SuperLink
listens on no address.

Invariant: frames never enter Flower's object store.

Flower documents none of the names that are used here. `PRIVATE_NAMES` and `ATTRIBUTES` list them, and
tests/flower/test_flwr_contract.py fails with the names that another release of flwr has moved.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.app.message import make_message
from flwr.app.metadata import Metadata
from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID, SUPERLINK_NODE_ID
from flwr.server.superlink.linkstate import InMemoryLinkState
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NOOP_FEDERATION_ID, NodeStatus, TaskType
from flwr.supercore.object_store.object_store import ObjectStore
from flwr.superlink.cli.flower_superlink import SuperLinkLifespan
from flwr.superlink.config_loader import SuperLinkLifespanConfig, load_control_authn_plugin
from flwr.superlink.federation import FederationManager
from flwr.superlink.main import create_app

from thinwire.core.link_state import Outstanding

logging.getLogger("flwr").setLevel(logging.ERROR)  # its messages about start and stop would confuse our users

# Where each undocumented name of flwr is, and the parameters that we pass.
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
    "flwr.supercore.object_store:ObjectStoreFactory.store": ("self",),
    "flwr.superlink.routers.fleet.router:get_enable_supernode_auth": ("request",),
    "flwr.server.superlink.linkstate:InMemoryLinkState": ("federation_manager", "object_store"),
    "flwr.server.superlink.linkstate:InMemoryLinkState.create_run": (
        "self", "fab_id", "fab_version", "fab_hash", "override_config", "federation_id", "federation_config",
        "flwr_aid", "primary_task_type",
    ),
    "flwr.server.superlink.linkstate:InMemoryLinkState._is_finished_run": ("self", "run_id"),
    "flwr.server.superlink.linkstate:InMemoryLinkState.create_node": (
        "self", "owner_aid", "owner_name", "public_key", "heartbeat_interval", "name",
    ),
    "flwr.server.superlink.linkstate:InMemoryLinkState.get_node_id_by_public_key": ("self", "public_key"),
    "flwr.server.superlink.linkstate:InMemoryLinkState.get_node_info": ("self", "statuses"),
    "flwr.server.superlink.linkstate:InMemoryLinkState.acknowledge_node_heartbeat": (
        "self", "node_id", "heartbeat_interval",
    ),
    "flwr.server.superlink.linkstate:InMemoryLinkState.deactivate_node": ("self", "node_id"),
    "flwr.server.superlink.linkstate:InMemoryLinkState.store_message_ins": ("self", "message"),
    "flwr.server.superlink.linkstate:InMemoryLinkState.store_message_res": ("self", "message"),
    "flwr.server.superlink.linkstate:InMemoryLinkState.delete_messages": ("self", "message_ins_ids"),
    "flwr.supercore.object_store.object_store:ObjectStore": (),
    "flwr.superlink.federation:FederationManager": (),
    "flwr.app.metadata:Metadata": (
        "run_id", "message_id", "src_node_id", "dst_node_id", "reply_to_message_id", "group_id", "created_at", "ttl",
        "message_type", "src_task_id",
    ),
    "flwr.app.message:make_message": ("metadata", "content"),
}  # fmt: skip
# Attributes of an `InMemoryLinkState` that we read, and their types.
ATTRIBUTES = {
    "lock": "RLock", "nodes": "dict", "run_ids": "dict",
    "message_ins_store": "dict", "message_res_store": "dict",
}  # fmt: skip

RECORD, ASSIGNMENT, REPLY = "thinwire", "assignment", "reply"
FOREVER_S = 10 * 365 * 86400.0  # the round decides when an assignment expires, the transport when a device is offline


@dataclass
class _OfNode:
    """Holds what is in flight to one node, and the ids that its client reported to have.

    A renamed device has one node and two names: an assignment is in flight to the name that it was sent to.
    """

    outstanding: dict[str, Outstanding] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)


class FlowerLinkState(InMemoryLinkState):
    """Holds the nodes and messages of the embedded SuperLink, and the one Flower run of our assignments.

    Every method takes Flower's own lock. The methods without a docstring here are those of `core.link_state.LinkState`.

    Invariant: `message_ins_store` holds exactly the assignments of the index and those whose reply was not collected.
    """

    def __init__(self, federation_manager: FederationManager, object_store: ObjectStore) -> None:
        super().__init__(federation_manager, object_store)
        self._names: dict[str, int] = {}  # device -> node id
        self._index: dict[int, _OfNode] = {}
        self._replies = itertools.count(1)
        self._wake: Callable[[Iterable[str]], None] = lambda devices: None
        self.run_id = self.create_run(
            "thinwire/aggregator", "1", None, {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP
        )
        self.task_id = self.run_ids[self.run_id].run.primary_task_id or 0

    # The registry, and which nodes are online

    def register(self, device: str, public_key: bytes) -> None:
        """Enter a device by its key; a new node is set offline, because Flower takes no messages for `registered`."""
        with self.lock:
            node_id = self.get_node_id_by_public_key(public_key)
            if node_id is None:
                node_id = self.create_node(
                    owner_aid=NOOP_FLWR_AID,
                    owner_name=NOOP_ACCOUNT_NAME,
                    public_key=public_key,
                    heartbeat_interval=FOREVER_S,
                    name=device,
                )
                self._index[node_id] = _OfNode()
                self.acknowledge_node_heartbeat(node_id, FOREVER_S)
                self.deactivate_node(node_id)
            self._names[device] = node_id

    def knows(self, device: str) -> bool:
        """Return True if a device of this name is registered."""
        return device in self._names

    def devices(self) -> list[str]:
        """Return the names of all registered devices."""
        with self.lock:
            return list(self._names)

    def names_of(self, public_key: bytes) -> list[str]:
        """Return the names under which this key was registered since the start."""
        with self.lock:
            node_id = self.get_node_id_by_public_key(public_key)
            return [name for name, other in self._names.items() if other == node_id]

    def forget(self, device: str) -> bool:
        """Set a revoked device offline and remove its name; its node stays, as Flower never takes a deleted key."""
        with self.lock:
            self.set_offline(device)
            return self._names.pop(device, None) is not None

    def set_online(self, device: str) -> None:
        """Set a device online until `set_offline`: Flower's own time limit for a node never passes."""
        with self.lock:
            node_id = self._names[device]
            self.nodes[node_id].name = device  # a renamed device is online under its new name
            self.acknowledge_node_heartbeat(node_id, FOREVER_S)

    def set_offline(self, device: str) -> None:
        """Set a device offline; nothing happens if it is online under another name."""
        with self.lock:
            node_id = self._names.get(device, 0)
            if node_id and self.nodes[node_id].name == device:
                self.deactivate_node(node_id)

    def online(self) -> set[str]:
        """Return the names of the devices that are online."""
        return {node.name for node in self.get_node_info(statuses=[NodeStatus.ONLINE])}

    # The wake

    def watch(self, wake: Callable[[Iterable[str]], None]) -> None:
        """Have `wake` called with the names of devices for which something changed."""
        self._wake = wake

    def wake(self, devices: Iterable[str]) -> None:
        """Report that something changed for these devices."""
        self._wake(devices)

    # Messages

    def store(self, outstanding: Outstanding) -> None:
        """Put an assignment in flight; it replaces one of the same id, which may carry another form of the model."""
        one, envelope = outstanding.assignment_id, outstanding.envelope
        with self.lock:
            if one in self.message_ins_store:
                self.delete_messages({one})
            node_id, group = self._names[envelope.device], f"{envelope.assignment.run}/{envelope.assignment.round}"
            message = self._message(ASSIGNMENT, outstanding.data, one, SUPERLINK_NODE_ID, node_id, "", group)
            if self.store_message_ins(message) is None:
                raise RuntimeError(f"Flower did not take assignment {one} for {envelope.device}")
            self._index[node_id].outstanding[one] = outstanding

    def outstanding(self, device: str) -> list[Outstanding]:
        """Return the assignments in flight to a device, in the order sent; Flower would return each of them once."""
        with self.lock:
            return [one for one in self._of(device).outstanding.values() if one.envelope.device == device]

    def find(self, device: str, assignment_id: str) -> Outstanding | None:
        """Return an assignment in flight to this device, or None."""
        with self.lock:
            found = self._of(device).outstanding.get(assignment_id)
            return found if found and found.envelope.device == device else None

    def device_of(self, assignment_id: str) -> str:
        """Return the device to which an assignment is in flight, "" if it is not in flight."""
        with self.lock:
            message = self.message_ins_store.get(assignment_id)
            node = self._index.get(message.metadata.dst_node_id) if message else None
            found = node.outstanding.get(assignment_id) if node else None
            return found.envelope.device if found else ""

    def deliver(self, outstanding: Outstanding, at: float) -> None:
        """Record that an assignment was sent to its device, in Flower's message too."""
        with self.lock:
            outstanding.pulled_at = at
            if message := self.message_ins_store.get(outstanding.assignment_id):
                message.metadata.delivered_at = datetime.fromtimestamp(at, UTC).isoformat()

    def set_held(self, device: str, assignment_ids: Collection[str]) -> None:
        """Record the ids of the assignments that the device's client reports to have."""
        with self.lock:
            self._of(device).held = set(assignment_ids)

    def held(self, device: str) -> set[str]:
        """Return the ids that the device's client reported last and has not replied to."""
        with self.lock:
            return set(self._of(device).held)

    def release(self, device: str, assignment_id: str) -> None:
        """Remove an id from the held ones, because its reply is here."""
        with self.lock:
            self._of(device).held.discard(assignment_id)

    def next_for(self, device: str) -> Outstanding | None:
        """Return the oldest assignment in flight that the device's client does not have, or None."""
        with self.lock:
            node = self._of(device)
            free = (one for name, one in node.outstanding.items() if name not in node.held)
            return next((one for one in free if one.envelope.device == device), None)

    def reply(self, outstanding: Outstanding, data: bytes) -> Message:
        """Store the reply to an assignment in flight."""
        with self.lock:
            assigned = self.message_ins_store[outstanding.assignment_id].metadata
            message = self._message(
                REPLY, data, f"reply-{next(self._replies)}", assigned.dst_node_id, SUPERLINK_NODE_ID,
                assigned.message_id, assigned.group_id, assigned.created_at + assigned.ttl,
            )  # fmt: skip
            if self.store_message_res(message) is None:
                raise RuntimeError(f"Flower did not take the reply to assignment {outstanding.assignment_id}")
            del self._of(outstanding.envelope.device).outstanding[outstanding.assignment_id]
            return message

    def collect(self, replies: Sequence[Message]) -> None:
        """Remove replies and their assignments, but no assignment that was sent again under its id meanwhile.

        Flower's own `get_message_res` would replace a reply by an error if its node has gone offline since.
        """
        with self.lock:
            here = [one.metadata for one in replies if one.metadata.message_id in self.message_res_store]
            self.delete_messages({metadata.reply_to_message_id for metadata in here})

    def remove(self, outstanding: Outstanding) -> None:
        """Remove an assignment that gets no reply."""
        self.delete_messages({outstanding.assignment_id})

    def in_flight(self) -> set[str]:
        """Return the ids of all assignments whose reply was not collected."""
        with self.lock:
            return set(self.message_ins_store)

    def delete_messages(self, message_ins_ids: set[str]) -> None:
        """Delete assignments and their replies, also from the index: Flower calls it for messages that expired."""
        with self.lock:
            for one in message_ins_ids:
                if message := self.message_ins_store.get(one):
                    self._index[message.metadata.dst_node_id].outstanding.pop(one, None)
            super().delete_messages(message_ins_ids)

    def _is_finished_run(self, run_id: int) -> bool:
        """Return False: our run lasts as long as this process, whatever Flower knows of the heartbeats of its task."""
        return False

    def _of(self, device: str) -> _OfNode:
        return self._index.get(self._names.get(device, 0)) or _OfNode()

    def _message(
        self, kind: str, data: bytes, message_id: str, src_node_id: int, dst_node_id: int, reply_to: str, group: str,
        until: float = 0.0,
    ) -> Message:  # fmt: skip
        """Return a message with its metadata as a whole: Flower's public way uses an identity of the whole process."""
        created_at = time.time()
        metadata = Metadata(
            run_id=self.run_id,
            message_id=message_id,
            src_node_id=src_node_id,
            dst_node_id=dst_node_id,
            reply_to_message_id=reply_to,
            group_id=group,
            created_at=created_at,
            ttl=until - created_at if until else FOREVER_S,
            message_type="query",
            src_task_id=self.task_id,
        )
        metadata.delivered_at = ""
        return make_message(metadata, RecordDict({RECORD: ConfigRecord({kind: data})}))


class SuperLink:
    """Holds the app of Flower's SuperLink and its state, which is ours.

    The state is disposable: the device registry, the spool and the journal fill it at each start.
    """

    def __init__(self) -> None:
        self.app = create_app(config(), SuperLinkLifespan)
        factory = self.app.state.linkstate_factory
        self.state = FlowerLinkState(factory.federation_manager, factory.objectstore_factory.store())
        factory.state_instance = self.state

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Enter the app's lifespan, as a server would."""
        async with self.app.router.lifespan_context(self.app):
            yield


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
