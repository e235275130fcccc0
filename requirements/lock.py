"""`make lock`: write every distribution that the tests need, with the SHA-256 of its file, beside this program.

pip resolves them by pyproject.toml and constraints.txt, on the kind of machine that the file is for. torch is left out:
its builds for CPU, CUDA and Jetson have one version and other files, and constraints.txt pins that version.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements" / "linux-x86_64-py311.txt"
FOR = ("Linux", "x86_64", (3, 11))
EXTRAS = "client,server,demo,dev"
LEFT_OUT = ("thinwire", "torch")
ABOUT = """\
# Python 3.11 on x86-64 Linux: pip install --require-hashes --no-deps -r requirements/linux-x86_64-py311.txt
# Written by `make lock`. torch is not in it; constraints.txt has its version.
"""


def main() -> int:
    if (platform.system(), platform.machine(), sys.version_info[:2]) != FOR:
        print("error: the file is for Python 3.11 on x86-64 Linux, and this is none", file=sys.stderr)
        return 2
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--only-binary", ":all:", "--report", str(report), "--constraint", str(ROOT / "constraints.txt")]
        subprocess.run([*command, f"{ROOT}[{EXTRAS}]", *build], check=True)
        found = json.loads(report.read_text())["install"]
    LOCK.write_text(ABOUT + "".join(f"{line}\n" for line in sorted(lines(found), key=str.lower)))
    return 0


def lines(found: list[dict[str, object]]) -> list[str]:
    made = []
    for one in found:
        metadata, file = one["metadata"], one["download_info"]
        assert isinstance(metadata, dict)
        assert isinstance(file, dict)
        if metadata["name"] not in LEFT_OUT:
            digest = file["archive_info"]["hashes"]["sha256"]
            made.append(f"{metadata['name']}=={metadata['version']} --hash=sha256:{digest}")
    return made


if __name__ == "__main__":
    raise SystemExit(main())
