"""The stock programs of Flower beside us: their nodes and apps work at our device API, and neither see nor touch
ours.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import processes as measured
from benchmarks import stock as plain_flower
from benchmarks.processes import free_port
from tests.support.fork_server import Forked, forking, run_forked
from tests.support.processes import EXAMPLE, THINWIRE, Site, environment
from thinwire.client.run_state import RunFolder
from thinwire.core import RunPlan

APP = Path(__file__).parent / "tiny_app"
OURS = Path(__file__).parents[2] / "examples" / "stock_flower"
COMPRESSED = OURS.with_name("compressed_flower_app")
BIN = Path(sys.executable).parent
PATIENCE_S = 180


class Stock(Site):
    """An aggregator that allows stock nodes, and Flower's own programs."""

    tls = False

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.aggregator_program = ("tests.support.forked_superexec",)

    def start_aggregator(self, *more: str) -> subprocess.Popen[bytes]:
        begun = super().start_aggregator("--allow-stock-nodes", *(["--san", "localhost"] if self.tls else []), *more)
        address = self.serving()["control_address"]
        config = f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "{address}"\ninsecure = true\n'
        self.flwr_home.mkdir(exist_ok=True)
        (self.flwr_home / "config.toml").write_text(config)
        return begun

    @property
    def flwr_home(self) -> Path:
        return self.home.parent / "flwr"

    def node(self, config: str, *security: str) -> subprocess.Popen[bytes]:
        address = self.listen.replace("127.0.0.1", "localhost") if self.tls else self.listen
        words = [*(security or ("--insecure",)), "--superlink", address, "--port", str(free_port())]
        log = open(self.home.parent / f"log-{len(self.processes)}.txt", "wb")  # noqa: SIM115  # the process holds it
        node = Forked(
            [BIN / "flower-supernode", *words, "--node-config", config], env=self.environment(),
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        log.close()
        self.processes.append(node)
        return node

    def flwr(self, *words: str) -> str:
        command = [str(BIN / "flwr"), *words]
        try:
            done = run_forked(command, PATIENCE_S, env=self.environment(), stdin=subprocess.DEVNULL)
        except subprocess.TimeoutExpired as late:
            raise AssertionError(f"{late.output}\n{self.said()}") from late
        assert done.returncode == 0, done.stdout + done.stderr + self.said()
        return done.stdout

    def environment(self) -> dict[str, str]:
        quiet = ("FLWR_DISABLE_UPDATE_CHECK", "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION")
        path = os.pathsep.join([str(BIN), os.environ.get("PATH", os.defpath)])
        return {**environment(), **dict.fromkeys(quiet, "1"), "FLWR_TELEMETRY_ENABLED": "0", "PATH": path,
                "FLWR_HOME": str(self.flwr_home)}  # fmt: skip


@pytest.fixture
def stock(tmp_path: Path) -> Iterator[Stock]:
    made = Stock(tmp_path / "home")
    yield made
    made.close()


def with_overlap(folder: Path) -> Path:
    """Our app with delayed averaging in its plan: a stock node is sent one round at a time and runs it without."""
    shutil.copytree(OURS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    plan = folder / "digits_app" / "plan.toml"
    plan.write_text(plan.read_text().replace("[local]\n", "[local]\noverlap = { max_delay = 1 }\n"))
    assert RunPlan.load(plan).local.delay == 1
    return folder


def test_stock_nodes_train_theirs_and_ours_and_neither_see_nor_touch_our_devices(stock: Stock) -> None:
    stock.start_aggregator()
    stock.start_client("pi-1")
    for nth in range(2):
        config = f'task="{EXAMPLE / "task.py"}" partition="{nth}/2" home="{stock.home.parent / "nodes"}" add={nth + 1}'
        stock.node(config)
    run_id = stock.begin("run.rounds=3", "cohort.wait_for=1")
    said = stock.flwr("run", str(APP), "here", "--stream")
    assert "RESULT 2 [1.5, 1.5, 1.5, 1.5]" in said, "all nodes that it sees are the two stock ones"
    model = stock.home.parent / "model.safetensors"
    app = with_overlap(stock.home.parent / "ours")
    said = stock.flwr("run", str(app), "here", "--stream", "--run-config", f'rounds=2 out="{model}"')
    assert all(f"thinwire: round {number}: 2 of 2 nodes" in said for number in (1, 2)), said
    assert model.stat().st_size > 30_000
    for file in (stock.home.parent / "nodes").glob("node-*/**/state.json"):
        state, _ = RunFolder(file.parent).load()
        assert state.sequence == 2
        assert list(state.pending) == ["2"], "round by round: round 1's change was in the model of the second"
    assert stock.until_done(run_id).status == "done"
    runs = json.loads(stock.flwr("ls", "here", "--format", "json"))["runs"]
    assert len(runs) == 2, "no run of ours is among theirs"
    devices = json.loads(stock.typed("devices", "list", "--json").stdout)
    assert [(device["name"], device["how"]) for device in devices] == [("pi-1", "loopback")]
    assert stock.run(run_id).aggregated_count == 3


def test_a_tls_device_api_passes_stock_nodes_whose_key_was_approved_and_no_others(stock: Stock) -> None:
    stock.tls, stock.aggregator_program = True, THINWIRE  # it starts flower-superexec as a user's does
    stock.start_aggregator()
    keys = [stock.home.parent / name for name in ("approved", "unknown")]
    for key in keys:
        subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", key], check=True)
    ca = next((stock.home / "aggregator" / "tls").glob("*.ca.pem"))
    approved, unknown = (("--root-certificates", str(ca), "--auth-supernode-private-key", str(key)) for key in keys)
    done = stock.typed("devices", "approve", "--key", f"{keys[0]}.pub", "--name", "hospital-3")
    assert done.returncode == 0, done.stderr
    refused = stock.node("add=9", *unknown)
    stock.node("add=5", *approved)
    said = stock.flwr("run", str(APP), "here", "--stream", "--run-config", "nodes=1")
    assert "RESULT 1 [5.0, 5.0, 5.0, 5.0]" in said
    stock.until(lambda: refused.poll() is not None or "not approved" in stock.log_of(refused))
    assert stock.typed("devices", "revoke", "hospital-3").returncode == 0
    devices = json.loads(stock.typed("devices", "list", "--json").stdout)
    assert [(device["name"], device["how"], device["state"]) for device in devices] == [
        ("hospital-3", "stock", "revoked")
    ]


def that_tells_its_state(app: Path) -> None:
    """Let the copied app write how many arrays each node's state has, and wait behind round 2 until it may go on."""
    client, server = (app / "compressed_digits" / f"{end}_app.py" for end in ("client", "server"))
    told = (
        '    with open(f"{config[\'out\']}.{number}", "a") as file:\n'
        "        print(len(context.state.array_records), file=file)\n"
    )
    waits = '        while server_round == 2 and not Path(f"{out}.go").exists():\n            time.sleep(0.05)\n'
    for file, before, line in (
        (client, "    net = task.model(", told), (server, '        return MetricRecord({"accuracy"', waits),
    ):  # fmt: skip
        assert file.read_text().count(before) == 1
        file.write_text(file.read_text().replace(before, line + before))


def test_two_lines_compress_a_plain_app_and_a_restarted_node_begins_without_a_residual(tmp_path: Path) -> None:
    """The app, the SuperLink and the SuperNodes are Flower's own; one SuperNode is restarted behind round 2."""
    rounds, hidden, out = 4, 256, tmp_path / "rounds.jsonl"
    dense = 4 * (64 * hidden + hidden + hidden * hidden + hidden + 10 * hidden + 10)
    config = f'nodes=2 hidden={hidden} num-server-rounds={rounds} codec="topk(0.05) > int8 > rice" down="int8"'
    with forking(measured), measured.Processes(tmp_path) as processes:
        flower = plain_flower.Stock(tmp_path, processes, 2, COMPRESSED)
        that_tells_its_state(flower.app)
        found = flower.run(f'{config} out="{out}"', out, 3, PATIENCE_S)
        os.kill(flower.node_pids[1], signal.SIGTERM)
        processes.ended(flower.node_pids[1], PATIENCE_S)
        flower.start_node(1)
        Path(f"{out}.go").touch()
        found = flower.lines_of(out, rounds + 1, PATIENCE_S)
    states = [[int(line) for line in Path(f"{out}.{node}").read_text().split()] for node in (0, 1)]
    assert states == [[0, 2, 2, 2], [0, 2, 0, 2]], "the residual before and after the last update"
    payloads = [line["uplink_payload"] for line in found]
    assert payloads[0] == 0 < payloads[1] < payloads[2] < payloads[3] < payloads[4] < 2 * rounds * dense / 25
    assert found[-1]["accuracy"] > found[0]["accuracy"] + 0.3
