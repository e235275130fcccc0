"""This module runs Flower's SuperLink inside this process: its app on our LinkState.

It listens on no address. Invariant: frames never enter Flower's object store.

`create_app` and everything behind it are private to flwr: see link_state.py.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME
from flwr.superlink.cli.flower_superlink import SuperLinkLifespan
from flwr.superlink.config_loader import SuperLinkLifespanConfig, load_control_authn_plugin
from flwr.superlink.main import create_app

from thinwire.flower.link_state import FlowerLinkState

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
}  # fmt: skip


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
