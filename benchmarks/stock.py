"""The stock side: a `flower-superlink`, `flower-supernode`s and an app run by `flwr run`, as their manual says."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.processes import Processes, free_port, status_bytes

APP = Path(__file__).parent / "stock_app"
BIN = Path(sys.executable).parent
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
LINK = "bench"


class Stock:
    """Started with `nodes` SuperNodes; `rounds` runs the app once and gives the seconds of its rounds."""

    def __init__(self, folder: Path, processes: Processes, nodes: int) -> None:
        self.folder, self.processes, self.nodes = folder, processes, nodes
        home = folder / "flower"
        home.mkdir()
        self.env = {**QUIET, "FLWR_HOME": str(home), "HOME": str(home), "PATH": f"{BIN}:/usr/local/bin:/usr/bin:/bin"}
        self.address = f"127.0.0.1:{(port := free_port())}"
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "{LINK}"\n\n[superlink.{LINK}]\naddress = "{self.address}"\ninsecure = true\n'
        )
        self.app = shutil.copytree(APP, folder / "stock_app", ignore=shutil.ignore_patterns("__pycache__"))
        link = [str(BIN / "flower-superlink"), "--insecure", "--host", "127.0.0.1", "--port", str(port)]
        self.pid = processes.start("superlink", link, self.env)
        for node in range(nodes):
            command = [str(BIN / "flower-supernode"), "--insecure", "--superlink", self.address]
            processes.start(f"supernode-{node}", [*command, "--port", str(free_port())], self.env)
        self._runs = 0

    def rounds(self, count: int, floats: int, within_s: float) -> list[float]:
        """Seconds of each of `count` rounds with an array of so many float32."""
        self._runs += 1
        out = self.folder / f"stock-{self._runs}.jsonl"
        out.touch()
        config = f'nodes={self.nodes} rounds={count} floats={floats} out="{out}"'
        self._flwr_run(config)
        self.processes.until(lambda: len(_lines(out)) >= count, within_s, f"{count} rounds of the stock app")
        lines = _lines(out)
        for line in lines:
            if (line["answers"], line["failed"], line["floats"]) != (self.nodes, 0, self.nodes * floats):
                raise RuntimeError(f"a round of the stock app went wrong: {line}")
        return [float(line["seconds"]) for line in lines]

    def peak_bytes(self) -> int:
        return status_bytes(self.pid, "VmHWM")

    def _flwr_run(self, config: str) -> None:
        """Submit the app; again while the SuperLink is not yet listening."""

        def taken() -> bool:
            command = [str(BIN / "flwr"), "run", str(self.app), LINK, "--run-config", config]
            done = subprocess.run(
                command, env=self.env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=60
            )
            (self.folder / "flwr-run.log").write_text(done.stdout + done.stderr)
            return done.returncode == 0

        self.processes.until(taken, 60, f"flwr run was taken (see {self.folder / 'flwr-run.log'})")


def _lines(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in out.read_text().splitlines(True) if line.endswith("\n")]
