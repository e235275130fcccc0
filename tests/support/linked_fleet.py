"""A scripted fleet on Flower's LinkState: the engine's table is compared with the store's at each poll.

`LinkedFleet` stands between an aggregator and a fleet on a virtual clock. Whatever the aggregator sends goes into the
mailbox and the LinkState of a real embedded SuperLink too, and whatever arrives passes them, as it does over HTTPS. At
a restart the table is empty; the device registry fills in its nodes, and the aggregator its messages.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from thinwire.core.events import DeviceOffline, DeviceOnline
from thinwire.core.fleet import Arrival, ClientConnected, ClientDisconnected, Delivered, Envelope
from thinwire.core.run_events import is_sampled
from thinwire.core.types import Failure, ReplyHeader, UpdateId
from thinwire.flower.link_state import FlowerLinkState, SuperLink
from thinwire.store import Store
from thinwire.transport.server.mailbox import Mailbox


@functools.cache
def superlink() -> SuperLink:
    return SuperLink()


def new_state() -> FlowerLinkState:
    """Return an empty table as an embedded SuperLink would make it; the app around it is made once."""
    factory = superlink().app.state.linkstate_factory
    return FlowerLinkState(factory.federation_manager, factory.objectstore_factory.store())


class LinkedFleet:
    """A fleet, and the LinkState that holds its online devices and its assignments in flight.

    `agreed` leaves out the comparison of the tables, in a life in which another test has made it already.
    """

    def __init__(self, fleet: Any, store: Store, run_id: str, agreed: bool = False) -> None:
        self._fleet, self._store, self._run_id = fleet, store, run_id
        self.state, self.steps = new_state(), 0
        self._mailbox, self._is_checked, self._agreed = Mailbox(self.state), False, agreed
        self._withdrawn: set[str] = set()
        self.open, self.close = fleet.open, fleet.close
        for name in fleet.devices:
            if not any(row.name == name for row in store.roster.rows()):
                store.roster.enrol(name, name * 64, name.encode(), "loopback")
        for info in store.devices():
            if info.online:
                store.record_device(DeviceOffline(fleet.virtual.wall(), info.row.name, "the aggregator was restarted"))
        for row in store.roster.rows():
            self.state.register(row.name, row.public_key)

    def send(self, assignments: Sequence[Envelope]) -> None:
        self._is_checked = False
        self._mailbox.send(assignments)
        self._fleet.send(assignments)

    def cancel(self, assignment_ids: Sequence[str]) -> None:
        self._is_checked = False
        self._withdrawn |= set(assignment_ids)  # at a run's end the last evaluation comes before their outcomes
        self._mailbox.cancel(assignment_ids)
        self._fleet.cancel(assignment_ids)

    def ack(self, update_ids: Sequence[UpdateId]) -> None:
        self._is_checked = False
        for update_id in update_ids:
            self._mailbox.mark_acked(update_id)
        self._fleet.ack(update_ids)

    def drop_uploads(self, run_id: str) -> None:
        self._fleet.drop_uploads(run_id)

    def drop_replies(self, run_id: str) -> None:
        self._is_checked = False
        for header in self._fleet.spool.headers():
            if header.update_id.run == run_id:
                self._mailbox.mark_acked(header.update_id)
        self._fleet.drop_replies(run_id)

    def revoke_access(self, devices: Sequence[str]) -> None:
        raise NotImplementedError

    def delivered(self) -> Sequence[Delivered]:
        return list(self._fleet.delivered())

    def poll(self, wait_s: float) -> list[Arrival]:
        """Compare the two tables if either may have changed since the last poll, then return what arrives."""
        if not self._is_checked and not self._agreed:
            self.require_agreement()
        self._is_checked = True
        for arrival in self._fleet.poll(wait_s):
            self._is_checked = False
            self._arrive(arrival)
        return self._mailbox.poll(0.0)

    def require_agreement(self) -> None:
        """Fail unless LinkState and the store's tables name the same devices and the same assignments."""
        self.steps += 1
        assert self.state.online() == {info.row.name for info in self._store.devices() if info.online}
        if is_sampled(self._store.run(self._run_id).plan):
            return  # no table names its assignments
        rows = {row.assignment_id: row for row in self._store.updates(self._run_id)}
        outstanding = {assignment_id for assignment_id, row in rows.items() if row.outcome == "selected"}
        in_flight = self.trained()
        ended = outstanding - in_flight - self._withdrawn
        if ended:  # a reply to a pipelined round waits in the spool
            assert ended <= {header.assignment_id for header in self._fleet.spool.headers()}
        for row in (rows[one] for one in in_flight - outstanding):  # it is delivered if the device reconnects
            assert row.outcome == "failed" and row.reason.startswith("offline")
            assert row.device not in self.state.online()

    def trained(self) -> set[str]:
        """Return the ids of the assignments to train that are in flight."""
        names = self.state.devices()
        return {
            one.assignment_id for name in names for one in self.state.outstanding(name)
            if one.envelope.assignment.kind == "train"
        }  # fmt: skip

    def _arrive(self, arrival: Arrival) -> None:
        """Do what the device API does, and record connections as the service does."""
        match arrival:
            case ClientConnected(device=device):
                self.state.set_online(device)
                self._mailbox.add_arrival(arrival)
                self._store.record_device(DeviceOnline(self._fleet.virtual.wall(), device))
            case ClientDisconnected(device=device):
                self.state.set_offline(device)
                self._mailbox.add_arrival(arrival)
                self._store.record_device(DeviceOffline(self._fleet.virtual.wall(), device, arrival.why))
            case ReplyHeader() | Failure():
                device = arrival.update_id.device if isinstance(arrival, ReplyHeader) else arrival.device
                assert self._mailbox.receive(device, arrival)
