"""An environment that is made for one measurement and thrown away: what we compare with is no dependency of ours."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

INSTALL_S = 900.0


class NotInstallable(Exception):
    """Its message is why: there is no network, no wheel, no space."""


def made(folder: Path, *requirements: str) -> Path:
    """The Python of a new environment with these; what it lacks it finds among our own packages (torch)."""
    venv.EnvBuilder().create(folder)
    python = folder / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", *requirements]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=INSTALL_S
        )
    except subprocess.TimeoutExpired:
        raise NotInstallable(f"pip took longer than {INSTALL_S:.0f} s") from None
    if done.returncode:
        raise NotInstallable((done.stderr.strip().splitlines() or ["pip failed"])[-1][:300])
    lend(python)
    return python


def lend(python: Path) -> None:
    """Let it import our packages where it has none of its own."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    folder = python.parents[1] / "lib" / version / "site-packages"
    (folder / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
