"""Each device's node in Flower's registry: found again by its key, and there or gone as the device is."""

from __future__ import annotations

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_der_public_key

from thinwire.core.fleet import DeviceRow
from thinwire.flower.lane.exchange import Exchange
from thinwire.flower.superlink import SuperLink


class Nodes:
    """A node stays when its device is shut out: Flower lets no key return that was deleted."""

    def __init__(self, superlink: SuperLink, exchange: Exchange) -> None:
        self._superlink, self._exchange = superlink, exchange
        self._known: dict[str, int] = {}  # by the fingerprint of the device's key

    def register(self, row: DeviceRow) -> int:
        """The device's node, under the name that it has now."""
        if (node_id := self._known.get(row.fingerprint)) is None:
            pem = load_der_public_key(row.public_key).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
            node_id = self._known[row.fingerprint] = self._superlink.node(row.name, pem)
        if self._exchange.node_of(row.name) != node_id:
            self._exchange.register(row.name, node_id)
        return node_id

    def names_of(self, row: DeviceRow) -> list[str]:
        """The names under which this key has come since the start."""
        return self._exchange.names_of(self._known.get(row.fingerprint, 0))

    def is_here(self, row: DeviceRow) -> None:
        self._superlink.node_is_here(self.register(row))

    def has_left(self, device: str) -> None:
        if node_id := self._exchange.node_of(device):
            self._superlink.node_has_left(node_id)
