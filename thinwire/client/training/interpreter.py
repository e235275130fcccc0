"""The Python that trains: ours, or another one that has numpy and torch and nothing of ours."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import thinwire
from thinwire.core.errors import UsageError
from thinwire.core.home import private_folder, write_atomically

OURS = Path(thinwire.__file__).parent
OLDEST = (3, 8)
PATIENCE_S = 60.0  # an SD card takes its time
PACKAGES = ("numpy", "torch")
# `thinwire` by its place: what else stands on this interpreter's path neither hides it nor is hidden.
BEGIN = """
import sys, importlib.util
if sys.path[:1] == [""]: del sys.path[0]
found = importlib.util.spec_from_file_location("thinwire", sys.argv[2] + "/__init__.py",
    submodule_search_locations=[sys.argv[2]])
sys.modules["thinwire"] = importlib.util.module_from_spec(found)
found.loader.exec_module(sys.modules["thinwire"])
from thinwire.client.compute.process import main
main(int(sys.argv[1]))
"""
ASK = """
import json, sys
found = {"python": "%d.%d.%d" % sys.version_info[:3]}
for name in sys.argv[1:]:
    try:
        from importlib.metadata import version
        found[name] = version(name)
    except ImportError: pass
print(json.dumps(found))
"""


def installed() -> dict[str, str]:
    """Of our own Python and what it trains with, without importing it."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


@dataclass(frozen=True)
class Interpreter:
    """`path` is None for our own. `folder` is the client's, where another one finds a copy of what it needs of ours."""

    path: Path | None
    folder: Path

    def command(self, descriptor: int) -> list[str]:
        code = OURS if self.path is None else self._copied()
        return [str(self.path or sys.executable), "-c", BEGIN, str(descriptor), str(code)]

    @property
    def environment(self) -> Mapping[str, str]:
        kept = {name: value for name, value in os.environ.items() if self.path is None or name != "PYTHONHOME"}
        return {**kept, "PYTHONUNBUFFERED": "1"}

    @cached_property
    def versions(self) -> Mapping[str, str]:
        """Of Python, numpy and torch as their metadata say, without importing them; one that says nothing is left out.

        `UsageError` where it is no Python that can train.
        """
        return installed() if self.path is None else self._asked(self.path)

    def _asked(self, path: Path) -> Mapping[str, str]:
        try:
            done = subprocess.run(
                [str(path), "-c", ASK, *PACKAGES], capture_output=True, timeout=PATIENCE_S, env=dict(self.environment),
                stdin=subprocess.DEVNULL, check=False,
            )  # fmt: skip
            found = json.loads(done.stdout)
            python = tuple(int(number) for number in str(found["python"]).split("."))
        except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"--python {path} cannot be run",
                why=str(error)[:200] if isinstance(error, OSError) else "it does not answer as a Python does",
                hint="a Python from 3.8 on with numpy and torch",
            ) from error
        if python < OLDEST:
            raise UsageError(f"--python {path} is Python {found['python']}", why="3.8 is the oldest that can train")
        return {str(name): str(value) for name, value in found.items()}

    def _copied(self) -> Path:
        """The few files that it needs: `compute/` imports nothing else of ours."""
        root = self.folder / "worker" / "thinwire"
        inner = [path.relative_to(OURS) for path in sorted((OURS / "client" / "compute").glob("*.py"))]
        for name in (Path("__init__.py"), Path("client", "__init__.py"), *inner):
            data, path = (OURS / name).read_bytes(), root / name
            if not path.is_file() or path.read_bytes() != data:
                private_folder(path.parent)
                write_atomically(path, data)
        return root
