"""The `sh` blocks of the pages, and how one page's blocks are run: in order, in one folder, with a home of its own.

A comment before a block says how it is run: `<!-- not run: WHY -->`, `<!-- exit 3 -->` (it must end with that code),
or `<!-- background until: TEXT -->` (it goes on running once it has printed TEXT; it is ended with the page).
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*/*.md")]
)
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!--\s*(not run|exit|background until):?\s*(.*?)\s*-->\s*$")
START_S, BLOCK_S, END_S = 90.0, 180.0, 20.0


@dataclass(frozen=True)
class Block:
    """One `sh` block; `how` is "run", "not run", "exit" or "background until", `word` what its comment says."""

    page: str
    line: int
    script: str
    how: str = "run"
    word: str = ""


def blocks_of(page: str) -> Iterator[Block]:
    text = (ROOT / page).read_text()
    for found in BLOCK.finditer(text):
        before = text[: found.start()]
        marked = MARK.search(before)
        how, word = (marked[1], marked[2]) if marked else ("run", "")
        yield Block(page, before.count("\n") + 2, found[1], how, word)


def free_port() -> int:
    with socket.socket() as there:
        there.bind(("127.0.0.1", 0))
        return int(there.getsockname()[1])


@dataclass
class Reader:
    """Runs a page's blocks as somebody would who types them one after the other."""

    folder: Path
    services: list[subprocess.Popen[str]] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cwd = self.folder / "here"
        self.cwd.mkdir()
        (self.cwd / "examples").symlink_to(ROOT / "examples")  # blocks are typed at the root of a checkout
        door, page = free_port(), free_port()
        self.ports = {"9090": str(door), "8080": str(page)}
        self.env = os.environ | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(self.folder),
            "THINWIRE_HOME": str(self.folder / "state"),
            "THINWIRE_LISTEN": f"127.0.0.1:{door}",
            "THINWIRE_PAGE": f"127.0.0.1:{page}",
            "OMP_NUM_THREADS": "1",
        }

    def read(self, block: Block) -> None:
        """Run one block; an AssertionError tells the place in the page and all that was printed."""
        script = block.script
        for usual, free in self.ports.items():
            script = script.replace(f"127.0.0.1:{usual}", f"127.0.0.1:{free}")
        if block.how == "background until":
            self._begin(block, script)
            return
        after = self.folder / "cwd"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", f"trap 'pwd > {after}' EXIT\n{script}"],
            cwd=self.cwd, env=self.env, capture_output=True, text=True, timeout=BLOCK_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        self.cwd = Path(after.read_text().strip())
        wanted = int(block.word) if block.how == "exit" else 0
        printed = f"{block.page}:{block.line} ended with {done.returncode}\n{done.stdout}{done.stderr}"
        assert done.returncode == wanted, printed

    def _begin(self, block: Block, script: str) -> None:
        """Start a service and wait for the words that say it is there; what it prints is drained from then on."""
        service = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", f"exec {script.strip()}"],
            cwd=self.cwd, env=self.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, start_new_session=True,
        )  # fmt: skip
        self.services.append(service)
        said, lines = threading.Event(), list[str]()

        def listen() -> None:
            assert service.stdout is not None
            for line in service.stdout:
                lines.append(line)
                if block.word in line:
                    said.set()
            said.set()

        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        self._threads.append(thread)
        assert said.wait(START_S), f"{block.page}:{block.line} never said {block.word!r}\n{''.join(lines)}"
        assert any(block.word in line for line in lines), f"{block.page}:{block.line} ended\n{''.join(lines)}"

    def close(self) -> None:
        """End what was started, newest first, as Ctrl-C would; what does not end is killed and told."""
        stubborn = []
        for service in reversed(self.services):
            if service.poll() is None:
                os.killpg(service.pid, signal.SIGINT)
            try:
                service.wait(END_S)
            except subprocess.TimeoutExpired:
                os.killpg(service.pid, signal.SIGKILL)
                service.wait()
                stubborn.append(service.args)
        for thread in self._threads:
            thread.join(END_S)
        for service in self.services:
            if service.stdout:
                service.stdout.close()
        assert not stubborn, f"had to be killed: {stubborn}"
