"""The units of systemd: what stands in them, that systemd reads them so, and what install and uninstall tell it."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import typer
from click.core import ParameterSource

from thinwire.cli import service as aggregator_service
from thinwire.cli import systemd
from thinwire.cli.main import program
from thinwire.cli.systemd import NO_USE, Unit, quoted
from thinwire.core.start_options import StartOptions
from thinwire.core.statedir import AggregatorHome, client_home, hold

START = ["--aggregator", "http://127.0.0.1:9090", "--task", "digits=digits/task.py", "--split", "dirichlet(0.3)"]


@pytest.fixture
def manager(tmp_path, monkeypatch):
    """A systemd that only writes down what it is told; gives that list when called."""
    told = tmp_path / "told"
    told.write_text("")
    program = tmp_path / "bin" / "systemctl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {shlex.quote(str(told))}\n')
    program.chmod(0o755)
    (tmp_path / "booted").mkdir()
    monkeypatch.setattr(systemd, "BOOTED", tmp_path / "booted")
    monkeypatch.setattr(systemd, "SYSTEM_UNITS", tmp_path / "system")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return lambda: told.read_text().splitlines()


def rows(text: str) -> dict[str, str]:
    """The rows of the first unit in the text."""
    lines = [line for line in text.splitlines() if "=" in line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in reversed(lines))


def command_in(text: str) -> list[str]:
    """ExecStart as systemd would split it; what it undoes beyond a shell's quotes is undone here."""
    return shlex.split(rows(text)["ExecStart"].replace("%%", "%").replace("$$", "$"))


def unit(**changes: object) -> Unit:
    words = {
        "name": "thinwire-client-pi-03", "says": "Thinwire client pi-03", "folder": Path("/srv"),
        "command": (sys.executable, "-m", "thinwire.cli", "client", "start"), "state": Path("/srv/thin wire"),
    }  # fmt: skip
    return Unit(**(words | changes))  # type: ignore[arg-type]  # the names are Unit's own


def test_print_shows_the_words_that_were_typed_and_touches_nothing(thinwire, home, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    said = thinwire("client", "service", "install", "--print", *START, "--name", "pi-03", "--home", home)
    assert said.code == 0, said.err
    assert command_in(said.out)[-len(START) - 4 :] == ["client", "start", *START, "--name", "pi-03"]
    assert rows(said.out)["WorkingDirectory"] == str(Path.cwd())
    assert rows(said.out)["RestartPreventExitStatus"] == "2 3 5 8" == NO_USE
    assert rows(said.out)["Restart"] == "always"
    assert f"Environment=THINWIRE_HOME={home}\n" in said.out
    assert list(tmp_path.iterdir()) == []


def test_a_unit_is_closed_as_far_as_torch_and_a_gpu_allow():
    found = rows(unit(user="pi", command=("/opt/thinwire/bin/python", "-m", "thinwire.cli", "client", "start")).text())
    for key, value in {
        "NoNewPrivileges": "yes", "ProtectSystem": "strict", "PrivateTmp": "yes", "ProtectHome": "yes",
        "ReadWritePaths": '"/srv/thin wire"', "OOMPolicy": "continue", "KillMode": "mixed", "CapabilityBoundingSet": "",
        "RestrictAddressFamilies": "AF_INET AF_INET6 AF_UNIX AF_NETLINK", "User": "pi",
    }.items():  # fmt: skip
        assert found.get(key) == value, key
    assert not {"MemoryDenyWriteExecute", "PrivateDevices", "ProtectClock"} & set(found)


def test_a_users_unit_requests_nothing_that_only_root_may():
    found = rows(unit().text())
    assert not {"User", "CapabilityBoundingSet", "AmbientCapabilities", "ProtectKernelModules"} & set(found)
    assert (found["WantedBy"], found["ProtectHome"]) == ("default.target", "read-only")


def test_what_lies_in_a_folder_for_scratch_is_not_hidden_from_the_service():
    assert rows(unit(state=Path("/var/tmp/state")).text())["PrivateTmp"] == "no"
    assert rows(unit(user="pi", command=("/usr/bin/x",), state=Path("/home/pi/s")).text())["ProtectHome"] == "read-only"
    assert rows(unit(user="pi", command=("/usr/bin/x",)).text())["ProtectHome"] == "yes"


def test_devices_are_not_started_again_in_the_same_second():
    waits = {unit(name=f"thinwire-client-pi-{n}").restart_s for n in range(50)}
    assert waits == set(range(min(waits), max(waits) + 1))
    assert (len(waits), min(waits)) == (10, 5)


@pytest.mark.parametrize("word", ["50% of $HOME", 'a "b" c', "it's", "back\\slash", "semi;colon", "", "plain=1"])
def test_a_word_is_quoted_so_that_it_comes_back(word):
    assert shlex.split(quoted(word, runs=True).replace("%%", "%").replace("$$", "$")) == [word]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("user", ["", "root"])
def test_systemd_reads_the_unit_without_a_complaint(tmp_path, user):
    made = unit(user=user, command=(*unit().command, "--data", "a b/50%", "--split", "$x;"))
    path = tmp_path / made.file
    path.write_text(made.text())
    environment = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)}
    command = ["systemd-analyze", *([] if user else ["--user"]), "verify", "--man=no", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    complaints = [line for line in (done.stderr + done.stdout).splitlines() if made.name in line]
    assert (done.returncode, complaints) == (0, []), done.stderr


def test_install_puts_the_unit_in_place_and_uninstall_takes_it_away(thinwire, home, tmp_path, manager):
    said = thinwire("client", "service", "install", *START, "--name", "pi-03", "--home", home)
    assert said.code == 0, said.err
    path = tmp_path / "config" / "systemd" / "user" / "thinwire-client-pi-03.service"
    assert command_in(path.read_text())[-2:] == ["--name", "pi-03"]
    assert manager() == ["--user daemon-reload", *(f"--user {verb} {path.name}" for verb in ("enable", "restart"))]
    assert "loginctl enable-linger" in said.out
    assert (home / "clients" / "pi-03").stat().st_mode & 0o777 == 0o700  # systemd wants it to be there
    gone = thinwire("client", "service", "uninstall", "--name", "pi-03", "--home", home)
    assert (gone.code, gone.out) == (0, f"stopped and taken away: {path}; the state directory stays as it is\n")
    assert manager()[3:] == ["--user disable --now thinwire-client-pi-03.service", "--user daemon-reload"]
    assert not path.exists()
    assert thinwire("client", "service", "uninstall", "--name", "pi-03", "--home", home).code == 9


def test_a_service_begins_as_the_last_start_by_hand_did(thinwire, home, tmp_path):
    place = AggregatorHome.under(home)
    options = {"listen": "127.0.0.1:9999", "background": True, "no_dashboard": True}
    StartOptions(options, tmp_path).save(place.root)
    said = thinwire("aggregator", "service", "install", "--print", "--home", home)
    assert command_in(said.out)[-5:] == ["aggregator", "start", "--listen", "127.0.0.1:9999", "--no-dashboard"]
    assert rows(said.out)["WorkingDirectory"] == str(tmp_path)


def test_the_dashboard_has_a_unit_of_its_own_which_goes_with_the_aggregator_s(thinwire, home, tmp_path, manager):
    units = tmp_path / "config" / "systemd" / "user"
    words = ["--dashboard", "127.0.0.1:8081", "--home", home]
    assert thinwire("aggregator", "service", "install", *words).code == 0
    commands = {path.stem: command_in(path.read_text())[-4:] for path in units.iterdir()}
    assert commands == {
        "thinwire-aggregator": ["aggregator", "start", "--dashboard", "127.0.0.1:8081"],
        "thinwire-dashboard": ["aggregator", "dashboard", "--listen", "127.0.0.1:8081"],
    }
    assert thinwire("aggregator", "service", "uninstall").code == 0
    assert list(units.iterdir()) == []
    assert "--user disable --now thinwire-dashboard.service" in manager()
    assert thinwire("aggregator", "service", "install", "--no-dashboard", "--home", home).code == 0
    assert [path.stem for path in units.iterdir()] == ["thinwire-aggregator"]


@pytest.mark.parametrize(
    "words",
    [["--dashboard", "0.0.0.0:8443", "--dashboard-name", "fl.example"], ["--proxy", "192.0.2.7"]],
    ids=["other machines", "a proxy"],
)
def test_a_dashboard_that_others_reach_is_started_by_the_aggregator_s_unit(thinwire, home, tmp_path, manager, words):
    assert thinwire("aggregator", "service", "install", *words, "--home", home).code == 0
    (unit,) = (tmp_path / "config" / "systemd" / "user").iterdir()
    assert command_in(unit.read_text())[-len(words) - 2 :] == ["aggregator", "start", *words]


def test_a_start_keeps_the_options_that_it_was_given(thinwire, home):
    task = "digits=examples/digits/task.py"
    paths = {"data": "my data", "python": sys.executable}
    words = ["--aggregator", "127.0.0.1:9", "--task", task, "--name", "pi-01"]
    words += [word for name, path in paths.items() for word in (f"--{name}", path)]
    assert thinwire("client", "start", *words, "--once", "--home", home).code == 4
    assert json.loads((home / "clients" / "pi-01" / "start.json").read_text()) == {
        "options": {"aggregator": "127.0.0.1:9", "task": [task], "name": "pi-01", **paths}, "folder": str(Path.cwd()),
    }  # fmt: skip


def test_a_start_on_a_full_disk_says_that_its_options_are_not_kept(thinwire, home, monkeypatch):
    """It serves all the same: other commands alone read them, and they have those of the start before."""
    words = ["--aggregator", "127.0.0.1:9", "--task", "digits=examples/digits/task.py", "--name", "pi-01", "--once"]
    assert thinwire("client", "start", *words, "--home", home).code == 4
    kept = home / "clients" / "pi-01" / "start.json"
    before, make = kept.read_bytes(), tempfile.mkstemp

    def full(dir: Path, prefix: str) -> tuple[int, str]:
        if prefix == ".start.json.":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return make(dir=dir, prefix=prefix)

    monkeypatch.setattr(tempfile, "mkstemp", full)
    said = thinwire("client", "start", *words, "--seed", "7", "--home", home)
    assert said.code == 4
    assert (
        f"warning: cannot write {kept} (No space left on device): a service and the doctor use the options of the start"
        " before\ntry:   free some space, or use another disk: --home FOLDER\n"
    ) in said.err
    assert kept.read_bytes() == before


@pytest.mark.parametrize("noun", ["aggregator", "client"])
def test_each_option_of_a_start_is_written_by_the_name_of_its_parameter(noun):
    root: Any = typer.main.get_command(program())
    start = root.commands[noun].commands["start"]
    for option in start.params:
        kept = StartOptions({option.name: True if option.is_flag else ["1"] if option.multiple else "1"})
        context = start.make_context("start", list(kept.words()))
        assert context.get_parameter_source(option.name) == ParameterSource.COMMANDLINE, option.name


def test_an_address_of_the_environment_is_kept_for_the_service(thinwire, home, monkeypatch):
    monkeypatch.setenv("THINWIRE_LISTEN", "127.0.0.1:80")
    said = thinwire("aggregator", "service", "install", "--print", "--home", home)
    assert command_in(said.out)[-2:] == ["--listen", "127.0.0.1:80"]
    assert "THINWIRE_LISTEN" not in rows(said.out)


def test_words_that_start_would_not_take_are_refused_before_anything_is_written(thinwire, home, tmp_path, manager):
    for wrong in (["--nonsense"], [*START, "--once"], ["--partition"]):
        assert thinwire("client", "service", "install", *wrong, "--name", "pi-03", "--home", home).code == 2
    assert thinwire("aggregator", "service", "install", "--background", "--home", home).code == 2
    assert not (tmp_path / "config").exists()
    assert manager() == []


def test_a_client_that_runs_by_hand_is_not_taken_over(thinwire, home, manager):
    with hold(client_home(home, "pi-03") / "lock", {}):
        said = thinwire("client", "service", "install", *START, "--name", "pi-03", "--home", home)
    assert (said.code, f"process {os.getpid()}" in said.err) == (1, True)
    assert manager() == []


def test_without_systemd_it_says_what_to_do_instead(thinwire, home, tmp_path, monkeypatch):
    monkeypatch.setattr(systemd, "BOOTED", tmp_path / "none")
    said = thinwire("client", "service", "install", *START, "--name", "pi-03", "--home", home)
    assert (said.code, "--print" in said.err, home.exists()) == (1, True, False)


def test_what_systemd_says_is_handed_on(thinwire, home, tmp_path, manager):
    (tmp_path / "bin" / "systemctl").write_text("#!/bin/sh\necho 'no bus' >&2; exit 1\n")
    said = thinwire("aggregator", "service", "install", "--listen", "127.0.0.1:0", "--home", home)
    assert (said.code, "no bus" in said.err) == (1, True)


def test_an_address_with_a_password_does_not_get_into_a_unit(thinwire, home, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://me:secret@proxy:3128")
    said = thinwire("client", "service", "install", "--print", *START, "--name", "pi-03", "--home", home)
    assert "secret" not in said.out
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    said = thinwire("client", "service", "install", "--print", *START, "--name", "pi-03", "--home", home)
    assert "Environment=HTTPS_PROXY=http://proxy:3128\n" in said.out


def test_who_stops_an_aggregator_that_is_a_service_is_told_that_it_comes_back(thinwire, home, manager):
    assert aggregator_service.comes_back() == ""
    said = thinwire("aggregator", "service", "install", "--listen", "127.0.0.1:0", "--home", home)
    assert said.code == 0, said.err
    assert "systemctl --user stop thinwire-aggregator" in aggregator_service.comes_back()
