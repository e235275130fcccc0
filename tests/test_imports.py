"""What runs without torch: everything but a device's own work and simulations. What a device runs without: Flower."""

from __future__ import annotations

import json
import re
import subprocess
import sys

BLOCK = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" or name.startswith("torch."):
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, NoTorch())
"""


NOT_ON_A_DEVICE = """
import sys
from thinwire.cli.main import OF_THE_SERVER
class NoServer:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in OF_THE_SERVER:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NoServer())
"""
CLI = "from thinwire.cli.main import main; raise SystemExit(main(sys.argv[1:]))"
EACH = """
import json
from thinwire.cli.main import main
for words in json.loads(sys.argv[1]):
    print("ended with", main(words))
"""
LOADED = "assert not OF_THE_SERVER & set(sys.modules), sorted(OF_THE_SERVER & set(sys.modules))"


def codes(done: subprocess.CompletedProcess[str]) -> list[int]:
    """The exit codes that `EACH` prints, one for each command."""
    return [int(code) for code in re.findall(r"^ended with (\d+)$", done.stdout, re.MULTILINE)]


def on_a_device(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", NOT_ON_A_DEVICE + code, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def without_torch(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCK + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_aggregators_parts_import_no_torch():
    done = without_torch(
        "import thinwire, thinwire.core, thinwire.aggregation, thinwire.store, thinwire.server.service\n"
        "import thinwire.web.app, thinwire.cli.main, thinwire.client\n"
        "from thinwire.flower import FlowerFleet; from thinwire.transport.device.link import HttpsLink as FlowerLink\n"
        "print('torch' in sys.modules)"
    )
    assert done.stdout == "False\n", done.stderr


ORM = "sys.modules['sqlalchemy.orm'] = None  # 70 ms of each command: the tables are Core's"


def test_commands_that_only_read_and_a_service_that_refuses_run_without_torch(tmp_path):
    home = ["--home", str(tmp_path)]
    commands = [
        (["--help"], 0), (["plan", "keys"], 0), (["codecs"], 0), (["runs", "list", *home], 0),
        (["devices", "list", *home], 0), (["aggregator", "status", *home], 4),
    ]  # fmt: skip
    done = without_torch(f"{ORM}\n{EACH}", json.dumps([words for words, _ in commands]))
    assert codes(done) == [code for _, code in commands], done.stderr


def test_a_command_that_needs_torch_says_how_it_is_had(tmp_path):
    (tmp_path / "task.py").write_text("import torch\ndef model(): ...\ndef data(client): ...\ndef loss(m, b): ...\n")
    done = without_torch(CLI, "task", "check", str(tmp_path / "task.py"))
    assert done.returncode in (1, 3)
    for kind in ("CPU", "CUDA", "Jetson"):
        assert kind in done.stderr


def test_a_client_runs_without_flower_and_the_database(tmp_path):
    commands = {
        "status": 0, "logs": 9, "leave": 9, "reload": 9, "join https://127.0.0.1:1": 2,
        "start --aggregator http://127.0.0.1:1 --task t=/nowhere.py": 3,
    }  # fmt: skip
    words = [["client", *text.split(), "--home", str(tmp_path / str(nth))] for nth, text in enumerate(commands)]
    done = on_a_device(EACH + LOADED, json.dumps(words))
    assert codes(done) == list(commands.values()), done.stdout + done.stderr
    assert done.returncode == 0, done.stderr


def test_the_whole_agent_is_imported_without_flower():
    modules = ("client.agent", "transport", "transport.device.enroll", "cli.client.commands", "cli.doctor.client")
    done = on_a_device("".join(f"import thinwire.{name}\n" for name in modules))
    assert done.returncode == 0, done.stderr


NEVER_RUN_ON_A_DEVICE = {
    "asyncio", "multiprocessing", "sqlite3", "torch", "rich", "pygments", "backports.zstd", "numpy.random", "numpy.ma",
    "thinwire.core.events", "thinwire.core.run_events", "thinwire.reports", "thinwire.server",
    "thinwire.store", "thinwire.simulation", "thinwire.conformance", "thinwire.transport.server",
}  # fmt: skip


def test_a_client_that_waits_has_not_loaded_what_it_never_runs(tmp_path):
    """All parts of a client are imported before it looks at its tasks, and this task is not there."""
    code = CLI.replace("raise SystemExit(main(sys.argv[1:]))", "main(sys.argv[1:]); print(*sys.modules)")
    words = [
        "client",
        "start",
        "--aggregator",
        "http://127.0.0.1:1",
        "--task",
        "t=/nowhere.py",
        "--home",
        str(tmp_path),
    ]
    command = [sys.executable, "-c", f"import sys; {code}", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    loaded = set(done.stdout.split())
    assert {"thinwire.client.agent", "thinwire.transport.device.link"} <= loaded, done.stderr
    assert not NEVER_RUN_ON_A_DEVICE & loaded


def test_an_aggregator_on_a_device_says_what_to_install(tmp_path):
    done = on_a_device(CLI, "aggregator", "start", "--home", str(tmp_path))
    assert done.returncode == 1
    assert "thinwire[server]" in done.stderr
