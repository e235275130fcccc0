"""What runs without torch: everything but a device's own work and simulations."""

from __future__ import annotations

import subprocess
import sys

import pytest

BLOCK = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" or name.startswith("torch."):
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, NoTorch())
"""


def without_torch(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCK + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_aggregators_parts_import_no_torch():
    done = without_torch(
        "import thinwire, thinwire.core, thinwire.aggregation, thinwire.store, thinwire.server.service\n"
        "import thinwire.web.app, thinwire.cli.main, thinwire.client\n"
        "from thinwire.flower import FlowerFleet; from thinwire.transport import HttpsLink as FlowerLink\n"
        "print('torch' in sys.modules)"
    )
    assert done.stdout == "False\n", done.stderr


CLI = "from thinwire.cli.main import main; raise SystemExit(main(sys.argv[1:]))"


@pytest.mark.parametrize("words", [["runs", "list"], ["devices", "list"], ["codecs"], ["plan", "keys"], ["--help"]])
def test_commands_that_only_read_run_without_torch(tmp_path, words):
    home = ["--home", str(tmp_path)] if words[0] in ("runs", "devices") else []
    done = without_torch(CLI, *words, *home)
    assert done.returncode == 0, done.stderr


def test_a_service_and_a_handover_need_no_torch_to_refuse(tmp_path):
    done = without_torch(CLI, "aggregator", "status", "--home", str(tmp_path))
    assert done.returncode == 4, done.stderr


def test_a_command_that_needs_torch_says_how_it_is_had(tmp_path):
    (tmp_path / "task.py").write_text("import torch\ndef model(): ...\ndef data(site): ...\ndef loss(m, b): ...\n")
    done = without_torch(CLI, "task", "check", str(tmp_path / "task.py"))
    assert done.returncode in (1, 3)
    for kind in ("CPU", "CUDA", "Jetson"):
        assert kind in done.stderr
