"""The service manager of this machine: where its units lie, and what it is told when one comes or goes."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from thinwire.core.errors import NotFound, ThinwireError, UsageError
from thinwire.core.home import disk_error, write_atomically

BOOTED = Path("/run/systemd/system")  # sd_booted(3)
SYSTEM_UNITS = Path("/etc/systemd/system")
TELL_S = 60.0


@dataclass(frozen=True)
class Systemd:
    """The user's own instance, or with `system` that of the machine."""

    system: bool = False

    @property
    def folder(self) -> Path:
        if self.system:
            return SYSTEM_UNITS
        return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "systemd" / "user"

    @property
    def command(self) -> str:
        """What a person types before the verb."""
        return "systemctl" if self.system else "systemctl --user"

    @property
    def journal(self) -> str:
        return "journalctl" if self.system else "journalctl --user"

    def has(self, file: str) -> bool:
        return (self.folder / file).is_file()

    def install(self, file: str, text: str) -> Path:
        """Write the unit, let it start at boot and start it now; the one of before is replaced."""
        self.require()
        path = self.folder / file
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise disk_error(error, path) from error
        write_atomically(path, text.encode(), mode=0o644)
        self._tell("daemon-reload")
        self._tell("enable", file)
        self._tell("restart", file)
        return path

    def uninstall(self, file: str) -> Path:
        """Stop it and take the unit away; the state folder stays."""
        path = self.folder / file
        if not path.is_file():
            raise NotFound(f"there is no service {file}", why=f"{path} is not there", hint="service install makes one")
        self.require()
        self._tell("disable", "--now", file)
        path.unlink(missing_ok=True)
        self._tell("daemon-reload")
        return path

    def require(self) -> None:
        """Refuse where no service can be installed."""
        if not BOOTED.is_dir() or shutil.which("systemctl") is None:
            raise ThinwireError(
                "this machine has no systemd to run a service",
                why=f"{BOOTED} is not there" if not BOOTED.is_dir() else "systemctl is not installed",
                hint="service install --print shows the unit; whatever starts `thinwire ... start` instead should do "
                "so again when it ends, but not after 2, 3, 5 or 8",
            )
        if self.system and os.geteuid() != 0:
            raise UsageError(
                "--system needs root", why=f"the unit lies in {SYSTEM_UNITS}", hint="sudo, or without --system"
            )

    def _tell(self, *words: str) -> None:
        command: Sequence[str] = [*self.command.split(), *words]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TELL_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ThinwireError(f"`{' '.join(command)}` did not come back", why=str(error)) from error
        if done.returncode:
            raise ThinwireError(
                f"`{' '.join(command)}` failed ({done.returncode})",
                why=(done.stderr or done.stdout).strip()[-500:],
                hint="log in as this user (not by su), or use --system" if not self.system else "",
            )
