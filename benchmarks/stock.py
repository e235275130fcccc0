"""The stock side: a `flower-superlink`, `flower-supernode`s and an app run by `flwr run`, as their manual says."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.processes import Processes, free_port, status_bytes

APP = Path(__file__).parent / "stock_app"
ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
LINK = "bench"


class Stock:
    """Started with `nodes` SuperNodes; `rounds` runs the app once and gives the seconds of its rounds."""

    def __init__(
        self,
        folder: Path,
        processes: Processes,
        nodes: int,
        app: Path = APP,
        inside: Sequence[tuple[str, ...]] = (),
        at: str = "127.0.0.1",
    ) -> None:
        """Start them. `inside`: what the SuperLink's command and those of the nodes begin with, where each runs on a
        machine of its own; `at`: the SuperLink's address there.
        """
        self.folder, self.processes, self.nodes = folder, processes, nodes
        self._inside = tuple(inside) or ((),) * (nodes + 1)
        home = folder / "flower"
        home.mkdir()
        self.env = {**QUIET, "FLWR_HOME": str(home), "HOME": str(home), "PATH": f"{BIN}:/usr/local/bin:/usr/bin:/bin"}
        self.env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.address = f"127.0.0.1:{(port := free_port())}"
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "{LINK}"\n\n[superlink.{LINK}]\naddress = "{self.address}"\ninsecure = true\n'
        )
        self.app = shutil.copytree(app, folder / app.name, ignore=shutil.ignore_patterns("__pycache__"))
        host = "127.0.0.1" if at == "127.0.0.1" else "0.0.0.0"
        link = [*self._inside[0], str(BIN / "flower-superlink"), "--insecure", "--host", host, "--port", str(port)]
        self.pid = processes.start("superlink", link, self.env)
        self._link_at = f"{at}:{port}"
        self.node_pids = [self.start_node(node) for node in range(nodes)]
        self._runs = 0

    def start_node(self, node: int) -> int:
        """Start a SuperNode, also in the place of one that has ended; return its process id."""
        link = [str(BIN / "flower-supernode"), "--insecure", "--superlink", self._link_at]
        config = f"partition-id={node} num-partitions={self.nodes}"
        words = ["--port", str(free_port()), "--node-config", config]
        return self.processes.start(f"supernode-{node}", [*self._inside[node + 1], *link, *words], self.env)

    def rounds(self, count: int, floats: int, within_s: float) -> list[float]:
        """Seconds of each of `count` rounds with an array of so many float32."""
        self._runs += 1
        out = self.folder / f"stock-{self._runs}.jsonl"
        out.touch()
        config = f'nodes={self.nodes} rounds={count} floats={floats} out="{out}"'
        lines = self.run(config, out, count, within_s)
        for line in lines:
            if (line["answers"], line["failed"], line["floats"]) != (self.nodes, 0, self.nodes * floats):
                raise RuntimeError(f"a round of the stock app went wrong: {line}")
        return [float(line["seconds"]) for line in lines]

    def run(self, config: str, out: Path, count: int, within_s: float) -> list[dict[str, float]]:
        """Run the app with this run-config until it has written so many lines of JSON to `out`; return them."""
        self._flwr_run(config)
        return self.lines_of(out, count, within_s)

    def lines_of(self, out: Path, count: int, within_s: float) -> list[dict[str, float]]:
        """Return the lines of the app that runs, once there are so many."""
        self.processes.until(lambda: out.exists() and len(_lines(out)) >= count, within_s, f"{count} lines of the app")
        return _lines(out)

    def peak_bytes(self) -> int:
        return status_bytes(self.pid, "VmHWM")

    def _flwr_run(self, config: str) -> None:
        """Submit the app; again while the SuperLink is not yet listening."""

        def taken() -> bool:
            command = [*self._inside[0], str(BIN / "flwr"), "run", str(self.app), LINK, "--run-config", config]
            done = subprocess.run(
                command, env=self.env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=60
            )
            (self.folder / "flwr-run.log").write_text(done.stdout + done.stderr)
            return done.returncode == 0

        self.processes.until(taken, 60, f"flwr run was taken (see {self.folder / 'flwr-run.log'})")


def _lines(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in out.read_text().splitlines(True) if line.endswith("\n")]
