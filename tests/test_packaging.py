"""What a device has to install: at most twenty distributions beside torch and numpy, and none of the aggregator's."""

from __future__ import annotations

import email
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements" / "linux-x86_64-py311.txt"
MAX_ON_A_DEVICE = 20  # beside numpy
NOT_ON_A_DEVICE = {
    "flwr",
    "sqlalchemy",
    "fastapi",
    "uvicorn",
    "protobuf",
    "grpcio",
    "requests",
    "pycryptodome",
    "httpx",
    "torch",
    "psycopg",
    "pwdlib",
    "prometheus-client",
    "playwright",
    "hypothesis",
}
NO_INDEX = re.compile(r"No matching distribution|Could not find a version|Connection|Temporary failure|timed out|SSL")


def installed_with(wheel: Path, extra: str) -> set[str]:
    """The distributions that this wheel needs with an extra on this machine, and itself.

    By its own metadata, and those of the installed versions, which `constraints.txt` pins.
    """
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (name for name in opened.namelist() if name.endswith(".dist-info/METADATA"))
        ours = email.message_from_bytes(opened.read(name)).get_all("Requires-Dist", [])
    seen, todo = set[tuple[str, str]](), [("thinwire", each) for each in ("", extra)]
    while todo:
        name, extra = one = todo.pop()
        if one in seen:
            continue
        seen.add(one)
        for wanted in map(Requirement, ours if name == "thinwire" else requires(name) or []):
            if wanted.marker is None or wanted.marker.evaluate({"extra": extra}):
                todo += [(canonical(wanted.name), each) for each in ("", *wanted.extras)]
    return {name for name, _ in seen}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """What a build needs, copied: a build leaves its own folders beside what it builds."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("thinwire", "csrc", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc", "*.so"))
    for path in [ROOT / "pyproject.toml", ROOT / "setup.py", ROOT / "MANIFEST.in", *ROOT.glob("*.md")]:
        shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def built(tmp_path_factory, sdist):
    """The wheel as pip builds it, in isolation: with kernels if there is a compiler."""
    return wheel(tmp_path_factory.mktemp("built"), sdist, THINWIRE_OPTIMIZED="-O0")  # built in a quarter of the time


@pytest.mark.network
def test_a_client_installs_few_distributions_and_no_flower(built):
    client = installed_with(built, "client")
    assert {"thinwire", "numpy", "cryptography", "cffi"} < client, "also what a need of ours needs"
    assert len(client - {"numpy"}) <= MAX_ON_A_DEVICE, sorted(client)
    assert client & NOT_ON_A_DEVICE == set()
    assert installed_with(built, "server") & NOT_ON_A_DEVICE >= {"flwr", "grpcio", "sqlalchemy", "fastapi"}


def test_the_server_names_no_torch():
    named = {canonical(re.split(r"[\[<>=!~ ]", text)[0]) for text in project()["optional-dependencies"]["server"]}
    assert "torch" not in named
    assert project()["requires-python"] == ">=3.11,<3.14"


@pytest.fixture(scope="module")
def sdist(source):
    """What is published as source: whatever it lacks, no wheel that is built of it has."""
    pytest.importorskip("setuptools")
    build = "from setuptools.build_meta import build_sdist; build_sdist('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True, timeout=300)
    (made,) = (source / "dist").iterdir()
    return made


def wheel(folder: Path, sdist: Path, *more: str, **environment: str) -> Path:
    """A wheel that pip builds of the source distribution."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", *more]
    command += ["--wheel-dir", str(folder), str(sdist)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **environment})
    if done.returncode and NO_INDEX.search(done.stderr):
        pytest.skip("no package index is reachable for the build's own needs")
    assert done.returncode == 0, done.stderr
    (made,) = folder.glob("thinwire-*.whl")
    return made


def names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def said_by_the_doctor(wheel: Path, folder: Path) -> str:
    """Of the kernels, by what the wheel installs and nothing else of ours."""
    zipfile.ZipFile(wheel).extractall(folder)
    assignment = "import thinwire.cli.doctor.checks as selected; print(selected.__file__); print(selected.kernels())"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("THINWIRE_")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", assignment], capture_output=True, text=True, timeout=300, cwd=folder, check=True,
        env={**environment, "PYTHONPATH": str(folder)},
    )  # fmt: skip
    where, said = done.stdout.splitlines()
    assert Path(where).is_relative_to(folder)
    return said


def kernels(inside: set[str]) -> list[str]:
    return [name for name in inside if name.startswith("thinwire/compression/native/kernels.")]


@pytest.mark.network
def test_all_that_is_not_code_is_packaged(tmp_path, built):
    """A wheel has the dashboard's files, the migrations, the templates, the example, and kernels if there is a
    compiler.
    """
    inside, compiler = names(built), bool(shutil.which("c++") and shutil.which("cc"))
    assert len(kernels(inside)) == compiler
    assert said_by_the_doctor(built, tmp_path / "installed").startswith("numpy") != compiler
    package = ROOT / "thinwire"
    wanted = {
        path.relative_to(ROOT).as_posix()
        for path in package.rglob("*")
        if path.is_file() and path.suffix not in {".pyc", ".so"} and "__pycache__" not in path.parts
    }
    assert wanted - inside == set()
    for name in ("task.py", "plan.toml", "centralised.py"):
        assert any(path.endswith(f"share/thinwire/examples/digits/{name}") for path in inside)


def test_without_a_compiler_it_installs_all_the_same_and_the_doctor_says_why(tmp_path, sdist):
    made = wheel(tmp_path, sdist, "--no-build-isolation", CC="/bin/false", CXX="/bin/false")
    assert "thinwire/compression/native/__init__.py" in names(made)
    assert kernels(names(made)) == []
    said = said_by_the_doctor(made, tmp_path / "installed")
    assert said.startswith("numpy, ")
    assert "no kernels were built at its installation" in said


def test_every_pinned_version_is_one_of_ours_or_of_what_ours_need():
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9_.!]+", pin) for pin in pins)
    assert "torch==2.13.0" in pins


def test_no_committed_file_of_the_build_names_a_machine_or_a_registry():
    for name in ("pyproject.toml", "Makefile", "constraints.txt", ".ci/run", LOCK, "requirements/lock.py"):
        text = (ROOT / name).read_text()
        assert re.findall(r"/(?:work|root|tmp)/|https?://", text) == [], name


def project() -> dict:
    found: dict = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


LOCKED = re.compile(r"([A-Za-z0-9_.-]+)==([A-Za-z0-9_.!+]+) --hash=sha256:[0-9a-f]{64}")


def locked() -> dict[str, str]:
    """Each distribution of the lock with its version."""
    rows = [line for line in LOCK.read_text().splitlines() if not line.startswith("#")]
    found = [LOCKED.fullmatch(row) for row in rows]
    assert all(found), [row for row, one in zip(rows, found, strict=True) if one is None]
    return {canonical(one[1]): one[2] for one in found if one}


def test_the_lock_has_the_versions_of_the_constraints_and_no_torch():
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = {canonical(name): version for name, _, version in (pin.partition("==") for pin in pins)}
    assert locked() == {name: version for name, version in pinned.items() if name != "torch"}


@pytest.mark.skipif(
    (sys.platform, platform.machine(), sys.version_info[:2]) != ("linux", "x86_64", (3, 11)), reason="another machine's"
)
def test_the_lock_has_all_that_the_tests_stand_on():
    """By the metadata of what is installed, without an index: whatever pip would add would come without a hash."""
    held, seen = locked(), set[tuple[str, str]]()
    todo = [("thinwire", extra) for extra in ("client", "server", "demo", "dev")]
    while todo:
        name, extra = one = todo.pop()
        if one in seen:
            continue
        seen.add(one)
        assert name in held or name in ("thinwire", "torch"), name
        # torch's own builds differ in what they need besides: the lock has what all of them need
        wanted = [each for each in map(Requirement, requires(name) or []) if "nvidia" not in each.name]
        for each in wanted:
            if each.marker is None or each.marker.evaluate({"extra": extra}):
                todo += [(canonical(each.name), more) for more in ("", *each.extras)]


def test_no_floor_is_above_what_is_tested():
    extras = project()["optional-dependencies"]
    held = {**locked(), "torch": "2.13.0"}
    for wanted in map(Requirement, [*project()["dependencies"], *extras["server"], *extras["demo"], *extras["dev"]]):
        if wanted.name != "thinwire":
            assert wanted.specifier.contains(held[canonical(wanted.name)]), wanted


def test_floors_leave_out_versions_with_known_vulnerabilities():
    """Each row of the table of advisories in pyproject.toml is the floor of a requirement, also of the build."""
    rows = re.findall(r"^#   ([a-z0-9-]+) ([0-9.]+) +CVE-[0-9-]+ ", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    named = project()
    texts = [*named["dependencies"], *(text for extra in named["optional-dependencies"].values() for text in extra)]
    wanted = [Requirement(text) for text in texts]
    assert len(rows) == 15
    for name, min_updates in rows:
        found = [each for each in wanted if canonical(each.name) == canonical(name)]
        assert found, f"{name} is not required"
        for each in found:
            least = [one.version for one in each.specifier if one.operator == ">="]
            assert least and tuple(map(int, least[0].split("."))) >= tuple(map(int, min_updates.split("."))), str(each)
