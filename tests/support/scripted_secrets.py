"""Clients whose secrets follow from their names, so that a run of processes and a simulation draw the same.

`python -m tests.support.scripted_secrets client start ...` is a client process of that kind. $LEAVES says where clients
leave a round, as JSON: `{"sim-1": {"2": "masked"}}`. In that phase a client tells that it leaves, or with $DIES set, it
is killed.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from tests.support.scripted_rng import ScriptedRng
from thinwire.cli.client import start
from thinwire.cli.main import main
from thinwire.client import secure
from thinwire.client.errors import FAILED, CannotReply
from thinwire.core.fleet import Delivery
from thinwire.core.types import PhaseReply, phase_of, training_id
from thinwire.privacy.contexts import simulated_key
from thinwire.privacy.participant import SecureIdentity
from thinwire.transport.device.identity import KEY_FILE

Leaves = Mapping[str, Mapping[str, str]]  # name -> round -> phase
_simulated, _handle = secure.simulated_identity, secure.SecureRounds.handle


def scripted_identity(name: str) -> SecureIdentity:
    """The identity of a simulated client whose name decides everything that it draws, in the order of its draws."""
    numbers = itertools.count(int.from_bytes(name.encode(), "big") << 32)
    return replace(_simulated(name), rng=lambda: ScriptedRng(next(numbers)))


def put_key(folder: Path, name: str) -> None:
    """Give a device that has not joined the key of the simulated client of its name."""
    folder.mkdir(parents=True, mode=0o700)
    pem = simulated_key(name).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (folder / KEY_FILE).touch(mode=0o600)
    (folder / KEY_FILE).write_bytes(pem)


def leaving(leaves: Leaves, dies: bool = False) -> Any:
    """A patch by which clients leave rounds in the phases that `leaves` names."""

    def handle(self: secure.SecureRounds, delivery: Delivery) -> PhaseReply | None:
        training = training_id(delivery.assignment.assignment_id)
        _, number, name = training.rsplit(".", 2)
        if leaves.get(name, {}).get(number) != phase_of(delivery.assignment.assignment_id):
            return _handle(self, delivery)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        self.forget(training)
        raise CannotReply(FAILED, "order", "it leaves, as the test wants")

    return patch.object(secure.SecureRounds, "handle", handle)


if __name__ == "__main__":
    own = sys.argv[sys.argv.index("--name") + 1]
    start.secure_identity = lambda key, pinned: scripted_identity(own)
    with leaving(json.loads(os.environ["LEAVES"]), "DIES" in os.environ):
        sys.exit(main())
