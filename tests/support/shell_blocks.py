"""The `sh` blocks of the pages, and how one page's blocks are run: in order, in one folder, with a home of its own.

A comment before a block says how it is run: `<!-- not run: WHY -->`, `<!-- run in: PAGE -->` (its lines are run there),
`<!-- exit 3 -->` (it must end with that code),
or `<!-- background until: TEXT -->` (it goes on running once it has printed TEXT; it ends with the document).
Two things are changed on the way: addresses, to ports that are free on this machine, and a simulation whose line does
not say how many rounds it has ends after two.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.processes import free_port
from tests.support.forked_programs import forked_programs

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*/*.md")]
)
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!--\s*(not run|run in|exit|background until):?\s*(.*?)\s*-->\s*$")
BIN = Path(sys.executable).parent
PROGRAMS = {"thinwire": [sys.executable, str(BIN / "thinwire")], "python": [sys.executable]}
SIMULATED = re.compile(r"^(thinwire sim \S+)(?!.*run\.rounds)", re.MULTILINE)
SHORT = r"\1 --set run.rounds=2"
START_S, BLOCK_S, END_S = 90.0, 180.0, 20.0


@dataclass(frozen=True)
class Block:
    """One `sh` block; `how` is "run" or what its comment says, `word` what stands behind that."""

    page: str
    line: int
    script: str
    how: str = "run"
    word: str = ""

    @property
    def runs(self) -> bool:
        return self.how not in ("not run", "run in")


def blocks_of(page: str) -> Iterator[Block]:
    text = (ROOT / page).read_text()
    for found in BLOCK.finditer(text):
        before = text[: found.start()]
        marked = MARK.search(before)
        how, word = (marked[1], marked[2]) if marked else ("run", "")
        yield Block(page, before.count("\n") + 2, found[1], how, word)


@dataclass
class Service:
    """What a background block started, and the words by which it says that it is there."""

    block: Block
    process: subprocess.Popen[str]
    said: threading.Event = field(default_factory=threading.Event)
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reader = threading.Thread(target=self._listen, daemon=True)
        self.reader.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as printed:
            for line in printed:
                self.lines.append(line)
                if self.block.word in line:
                    self.said.set()
        self.said.set()

    @property
    def command(self) -> list[str]:
        return self.block.script.split()[:3]

    def wait(self) -> None:
        there = self.said.wait(START_S) and any(self.block.word in line for line in self.lines)
        where = f"{self.block.page}:{self.block.line}"
        assert there, f"{where} never said {self.block.word!r}\n{''.join(self.lines)}"

    def end(self) -> bool:
        """End it as Ctrl-C would; False when it had to be killed."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            return False
        finally:
            self.reader.join(END_S)
        return True


@dataclass
class Reader:
    """Runs a page's blocks as somebody would who types them one after the other."""

    folder: Path
    services: list[Service] = field(default_factory=list)
    opened: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __post_init__(self) -> None:
        self.cwd = self.folder / "here"
        self.cwd.mkdir()
        (self.cwd / "examples").symlink_to(ROOT / "examples")  # blocks are typed at the root of a checkout
        api, page = (f"127.0.0.1:{port}" for port in (free_port(), free_port()))
        self.addresses = {
            "127.0.0.1:9090": api,
            "0.0.0.0:9090": api,  # of a page with --san it has TLS all the same
            "agg.example:9090": f"localhost:{api.rpartition(':')[2]}",
            "127.0.0.1:8080": page,
            "thinwire aggregator start": f"thinwire aggregator start --listen {api} --dashboard {page}",
        }
        programs = self.folder / "bin"
        programs.mkdir()
        self.env = (
            os.environ
            | self.opened.enter_context(forked_programs(PROGRAMS, programs))
            | {
                "PATH": os.pathsep.join([str(programs), str(BIN), os.environ["PATH"]]),
                "HOME": str(self.folder),
                "TMPDIR": str(self.folder),
                "THINWIRE_HOME": str(self.folder / "state"),
                "OMP_NUM_THREADS": "1",  # several clients at once, as on several devices
            }
        )

    def read(self, block: Block) -> None:
        """Run one block; an AssertionError tells the place in the document and all that was printed."""
        script = SIMULATED.sub(SHORT, block.script)
        for usual, free in self.addresses.items():
            script = script.replace(usual, free)
        background = block.how == "background until"
        for service in self.services:
            if not (background and service.command == script.split()[:3]):  # devices start beside each other
                service.wait()
        if background:
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
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", f"exec {script.strip()}"],
            cwd=self.cwd, env=self.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, start_new_session=True,
        )  # fmt: skip
        self.services.append(Service(block, process))

    def close(self) -> None:
        """End what was started, newest first; what does not end by itself is told."""
        with self.opened:
            stubborn = [service.block for service in reversed(self.services) if not service.end()]
        assert not stubborn, f"had to be killed: {stubborn}"
