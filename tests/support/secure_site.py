"""A home whose clients joined over TLS and take part in secure rounds; a test can hold the training of each."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.support.processes import THINWIRE, Site
from thinwire.core.events import RoundOpened, UpdateAccepted
from thinwire.core.run_events import PhaseClosed
from thinwire.core.types import PHASES

MASKED = Path(__file__).parents[1] / "system" / "masked"
SECURE = (
    "secure.enabled=true", "secure.max_corrupt=0.25", "secure.max_dropout=0.25", "secure.metrics={ accuracy = 1.0 }",
)  # fmt: skip  # what a plan of that folder needs to sum under masks
PLAIN = ("uplink.codec='identity'",)  # and to do it without


class SecureSite(Site):
    """A site with TLS. `clients` are its processes by the name of their device."""

    def __init__(self, home: Path, devices: Sequence[str]) -> None:
        super().__init__(home)
        self.example, self.devices, self.counted = MASKED, devices, home.parent / "counted.txt"
        self.aggregator_program = ("tests.support.counted_api",)
        self.client_program: Sequence[str] = THINWIRE
        self.more = {"COUNTED": str(self.counted)}
        self.clients: dict[str, subprocess.Popen[bytes]] = {}

    def serve(self) -> subprocess.Popen[bytes]:
        """Start the aggregator, also again."""
        return self.start_aggregator("--san", "localhost")

    def join(self) -> None:
        """Have all devices join, and start their clients."""
        invited = json.loads(self.typed("devices", "invite", "--count", str(len(self.devices)), "--json").stdout)
        for name, one in zip(self.devices, invited, strict=True):
            joined = self.typed("client", "join", one["url"], one["invitation"], "--name", name)
            assert joined.returncode == 0, joined.stderr
        for name in self.devices:
            self.start_device(name)

    def start_device(self, name: str) -> None:
        part = f"{self.devices.index(name)}/{len(self.devices)}"
        task = f"digits={self.example / 'task.py'}"
        self.more = {**self.more, "HOLD": str(self.hold_of(name))}
        words = ("client", "start", "--name", name, "--task", task, "--partition", part)
        self.clients[name] = self.start(*words, program=self.client_program)

    def hold_of(self, name: str) -> Path:
        """The file that holds a client's training while it exists."""
        return self.home.parent / f"hold-{name}"

    def hold(self, name: str) -> None:
        self.hold_of(name).touch()

    def release(self, name: str) -> None:
        self.hold_of(name).unlink()

    def until_waiting_for(self, run_id: str, *held: str) -> int:
        """Wait until a round has the updates of all its clients but the held ones; return its number.

        In a secure round the phase `masked` is open then.
        """
        number = 0

        def waits() -> bool:
            nonlocal number
            events = self.events(run_id)
            opened = [event for event in events if isinstance(event, RoundOpened)]
            if not opened:
                return False
            number = opened[-1].round
            arrived = {e.device for e in events if isinstance(e, UpdateAccepted) and e.round == number}
            phases = [e.phase for e in events if isinstance(e, PhaseClosed) and e.round == number]
            return phases in ([], list(PHASES[:2])) and arrived == set(opened[-1].assignments) - set(held)

        self.until(waits, f"a round waits for {', '.join(held)}")
        return number
