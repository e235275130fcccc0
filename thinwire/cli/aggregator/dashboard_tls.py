"""The dashboard beyond loopback: who may reach it, by which names, and with which certificate.

Its certificate is the operator's (`--cert`), or a leaf of its own that the aggregator's CA issues. The dashboard's
process gets the leaf and its key, and never the key of the CA. Invariant: such a leaf lacks the name that devices look
for, so nobody poses as the device API with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.cli.aggregator.tls import ANY, Certificates, own_addresses
from thinwire.cli.params import Address
from thinwire.core.errors import Refused, UsageError
from thinwire.core.net import is_ip_address
from thinwire.web.settings import reach_options

if TYPE_CHECKING:
    from thinwire.core.statedir import AggregatorHome
    from thinwire.store import Store

RENEWED_S = 3600.0  # between two looks whether the leaf is due


@dataclass(frozen=True)
class Reach:
    """Holds how browsers reach the dashboard: names beyond loopback, a proxy, and the files of its certificate."""

    names: tuple[str, ...] = ()
    proxy: str = ""
    certificate: Path | None = None
    key: Path | None = None

    def words(self) -> list[str]:
        """Return the options for `python -m thinwire.web`."""
        found = [word for name in self.names for word in ("--name", name)]
        found += ["--proxy", self.proxy] if self.proxy else []
        return found + (["--cert", str(self.certificate), "--key", str(self.key)] if self.certificate else [])

    def options(self) -> list[str]:
        """Return what a running dashboard must have noted in its lock to stay."""
        return reach_options(self.names, self.proxy, self.certificate)


@dataclass(frozen=True)
class Exposure:
    """The options `--dashboard`, `--dashboard-name` and `--proxy` of `aggregator start`."""

    address: Address
    names: tuple[str, ...] = ()
    proxy: str = ""

    def require_possible(self) -> None:
        """Raise `UsageError` if the options do not fit together."""
        if self.proxy and not is_ip_address(self.proxy):
            raise UsageError(
                f"--proxy {self.proxy!r} is no address", "its headers count by the address of its connection",
                "--proxy 192.0.2.7",
            )  # fmt: skip

    def require_admin(self, store: Store) -> None:
        """Raise `Refused` if the dashboard would be open to other machines before an admin may log in."""
        if not self.address.is_loopback and not store.users.has_admin():
            raise Refused(
                f"--dashboard {self.address} would be open to other machines, and there is no admin yet",
                "users log in with passwords there, and somebody has to decide who they are",
                "thinwire aggregator users add NAME --role admin",
            )

    def reach(self, place: AggregatorHome, certificates: Certificates) -> Reach:
        """Return how the dashboard is reached; issue its certificate if it needs one that is not there or is due."""
        if self.address.is_loopback:
            return Reach(self.names, self.proxy)
        names = self.names or tuple(self._hosts())
        if certificates.certificate is not None and certificates.key is not None:
            return Reach(names, self.proxy, certificates.certificate.absolute(), certificates.key.absolute())
        from thinwire.core.statedir import private_folder
        from thinwire.transport.server.tls import InternalCA

        folder = private_folder(place.root / "dashboard-tls")
        found = Reach(names, self.proxy, folder / "leaf.pem", folder / "leaf.key")
        InternalCA(place.tls, [*certificates.names, *names]).issue(folder / "leaf.pem", folder / "leaf.key", names)
        return found

    def _hosts(self) -> list[str]:
        """Return the addresses by which other machines reach the listener."""
        return own_addresses(self.address.host) if self.address.host in ANY else [self.address.host]
