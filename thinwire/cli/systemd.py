"""Units of systemd: the text that keeps `thinwire ... start` running, and systemctl that installs and removes it.

A unit runs with no more rights than it needs (systemd.exec(5)): it may write to its state directory and a cache only.
systemd restarts it after any exit code except 2, 3, 5 and 8, with which the same words would end the same way again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from thinwire.core.errors import NotFound, ThinwireError, UsageError
from thinwire.core.statedir import disk_error, write_atomically

BOOTED = Path("/run/systemd/system")  # sd_booted(3)
SYSTEM_UNITS = Path("/etc/systemd/system")
TELL_S = 60.0


@dataclass(frozen=True)
class Systemd:
    """The service manager of this user, or with `system` that of the machine."""

    system: bool = False

    @property
    def folder(self) -> Path:
        """Return the folder of the units."""
        if self.system:
            return SYSTEM_UNITS
        return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "systemd" / "user"

    @property
    def command(self) -> str:
        """Return the systemctl command as a person types it, before the verb."""
        return "systemctl" if self.system else "systemctl --user"

    @property
    def journal(self) -> str:
        """Return the journalctl command as a person types it."""
        return "journalctl" if self.system else "journalctl --user"

    def has(self, file: str) -> bool:
        """Return True if the unit `file` is installed."""
        return (self.folder / file).is_file()

    def install(self, file: str, text: str) -> Path:
        """Write the unit, enable it at boot, start it now, and return its path; an older unit is replaced."""
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
        """Stop and remove the unit and return its former path; the state directory stays. `NotFound` without a unit."""
        path = self.folder / file
        if not path.is_file():
            raise NotFound(f"there is no service {file}", why=f"{path} is not there", hint="service install makes one")
        self.require()
        self._tell("disable", "--now", file)
        path.unlink(missing_ok=True)
        self._tell("daemon-reload")
        return path

    def require(self) -> None:
        """Raise an error if no service can be installed: there is no systemd, or `system` without root."""
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
        """Run systemctl with `words`; `ThinwireError` if it fails."""
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


NO_USE = "2 3 5 8"  # usage, plan or task, refused, data lost: a start with the same words would end the same way
HOMES = (Path("/home"), Path("/root"), Path("/run/user"))
SCRATCH = (Path("/tmp"), Path("/var/tmp"))  # noqa: S108 - not used, only looked for
RESTART_S, SPREAD_S = 5, 10
FILES = 65_536  # the device API holds one or two connections for each device; the default of a process is 1024


@dataclass(frozen=True)
class Unit:
    """A unit of systemd that runs `command` in `folder`, and may write only to `state` and a cache.

    `user` is the user that a unit of the whole system runs as, and "" for a unit of the installing user. `says` is the
    description.
    """

    name: str
    says: str
    command: tuple[str, ...]
    folder: Path
    state: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    low_port: bool = False  # True if the command listens on a port below 1024

    @property
    def file(self) -> str:
        """Return the name of the unit's file."""
        return f"{self.name}.service"

    def text(self) -> str:
        """Return the whole file. Equal units have equal text."""
        sections = (("Unit", self._unit()), ("Service", [*self._service(), *self._walls()]), ("Install", self._when()))
        return "\n".join(f"[{title}]\n" + "".join(f"{row}\n" for row in rows) for title, rows in sections)

    def _unit(self) -> list[str]:
        """Return the lines of [Unit]."""
        net = ["Wants=network-online.target", "After=network-online.target"] if self.user else []
        return [f"Description={self.says.replace('%', '%%')}", *net, "StartLimitIntervalSec=0"]

    def _service(self) -> list[str]:
        """Return the lines of [Service] that start and restart the command."""
        caches = {"XDG_CACHE_HOME": "%C/thinwire", "CUDA_CACHE_PATH": "%C/thinwire/cuda"}
        return [
            "Type=exec",
            *([f"User={self.user}"] if self.user else []),
            f"WorkingDirectory={str(self.folder).replace('%', '%%')}",
            *(f"Environment={quoted(f'{name}={value}')}" for name, value in self.environment.items()),
            *(f"Environment={name}={value}" for name, value in caches.items()),
            f"ExecStart={' '.join(quoted(word, runs=True) for word in self.command)}",
            "Restart=always",
            f"RestartPreventExitStatus={NO_USE}",
            f"RestartSec={self.restart_s}",
            "KillMode=mixed",
            "TimeoutStopSec=60",
            "# the kernel may take the process that trains: the service stays, and reports it",
            "OOMPolicy=continue",
            f"LimitNOFILE={FILES}",
        ]

    def _walls(self) -> list[str]:
        """Return the lines of [Service] that restrict the process."""
        used = (self.state, self.folder, Path(self.command[0]))
        caps = "CAP_NET_BIND_SERVICE" if self.low_port else ""
        kernel = [  # a user's own service manager may not take capabilities away: the unit would not start (218)
            "ProtectKernelModules=yes",
            "ProtectKernelLogs=yes",
            "ProtectHostname=yes",
            "ProtectProc=invisible",
            "RemoveIPC=yes",
            f"CapabilityBoundingSet={caps}",
            f"AmbientCapabilities={caps}",
        ]
        return [
            "",
            "NoNewPrivileges=yes",
            "ProtectSystem=strict",
            f"ReadWritePaths={quoted(str(self.state))}",
            "CacheDirectory=thinwire",
            f"PrivateTmp={'no' if _any_under(used, SCRATCH) else 'yes'}",
            f"ProtectHome={'read-only' if not self.user or _any_under(used, HOMES) else 'yes'}",
            "ProtectKernelTunables=yes",
            "ProtectControlGroups=yes",
            "RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK",
            "RestrictNamespaces=yes",
            "RestrictRealtime=yes",
            "RestrictSUIDSGID=yes",
            "LockPersonality=yes",
            "SystemCallArchitectures=native",
            "SystemCallFilter=@system-service",
            "SystemCallErrorNumber=EPERM",
            "UMask=0077",
            *(kernel if self.user else []),
            "# left out: MemoryDenyWriteExecute (torch compiles kernels as it runs); PrivateDevices and ProtectClock",
            "# (both would take the GPU away)",
        ]

    def _when(self) -> list[str]:
        """Return the lines of [Install]."""
        return [f"WantedBy={'multi-user' if self.user else 'default'}.target"]

    @property
    def restart_s(self) -> int:
        """Return the seconds before a restart, from 5 to 14.

        They are derived from name and folders, so that devices do not reconnect together.
        """
        sampling = hashlib.sha256(f"{self.name} {self.folder} {self.state}".encode()).digest()[0]
        return RESTART_S + sampling % SPREAD_S


def quoted(word: str, runs: bool = False) -> str:
    """Quote a word so that systemd reads the same word back; `runs` is for ExecStart, where $ is doubled.

    >>> print(quoted("split=dirichlet(0.3)"), quoted('50% "a" b'), quoted("$HOME", runs=True))
    split=dirichlet(0.3) "50%% \\"a\\" b" "$$HOME"
    """
    said = word.replace("\\", "\\\\").replace("%", "%%").replace('"', '\\"').replace("\n", "\\n")
    said = said.replace("$", "$$") if runs else said
    plain = word and not set(word) & set(" \t\n\"'\\;$")
    return said if plain else f'"{said}"'


def _any_under(paths: tuple[Path, ...], roots: tuple[Path, ...]) -> bool:
    """Return True if any of `paths` lies under any of `roots`."""
    return any(path.is_relative_to(root) for path in paths for root in roots)
