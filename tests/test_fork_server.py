"""A process that a test forks is what a started one is: arguments, surroundings, parent, signals and exit code."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.fork_server import (
    FIXED,
    Forked,
    forking,
    is_forkable,
    is_server,
    with_python,
)
from tests.support.forked_programs import forked_programs
from tests.support.frozen import children
from tests.support.namespaces import do, ip, why_not
from tests.support.processes import environment

TELL = """
import json, os, signal, sys
print(json.dumps({
    "argv": sys.argv, "executable": sys.executable, "env": dict(os.environ), "cwd": os.getcwd(),
    "leads": os.getsid(0) == os.getpid(), "parent": os.getppid(), "main": __name__, "path": sys.path[0],
    "stdin": sys.stdin.read(), "tty": [os.isatty(n) for n in range(3)], "buffered": sys.stdout.write_through,
    "handlers": [str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)],
    "mask": [int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    "cmdline": open("/proc/self/cmdline").read().rstrip("\\0").split("\\0"),
    "umask": os.umask(0), "thinwire": [name for name in sys.modules if name.startswith("thinwire")],
}))
"""
ENV = {**environment(), **FIXED}


def told(popen: type[subprocess.Popen[Any]], *words: str, **more: Any) -> dict[str, Any]:
    process = popen(
        [sys.executable, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **{"env": ENV, **more}
    )
    out, _ = process.communicate("typed", timeout=60)
    assert process.returncode == 0
    found: dict[str, Any] = json.loads(out)
    return found


def test_a_forked_process_sees_what_a_started_one_sees(tmp_path: Path) -> None:
    (tmp_path / "tell.py").write_text(TELL)
    for *words, buffered in (["-c", TELL, "--a", "b", ""], [str(tmp_path / "tell.py"), "--a", "1"], ["-m", "tell", ""]):
        unbuffered = {"PYTHONUNBUFFERED": buffered} if buffered else {}
        more = {"cwd": tmp_path, "env": {**ENV, **unbuffered, "ONLY": "here"}, "start_new_session": len(words) > 3}
        forked, started = told(Forked, *words, **more), told(subprocess.Popen, *words, **more)
        if words[0] != "-c":  # there it has imported what it may import
            forked["thinwire"] = started["thinwire"]
        assert forked == started


def test_a_process_of_a_pool_is_forked_too() -> None:
    with forking(), ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(os.getppid).result() == os.getpid()
        assert pool.submit(eval, "'torch' in __import__('sys').modules").result(), "it has imported nothing by itself"


def test_the_parent_is_the_process_that_starts_it_also_of_what_it_starts() -> None:
    nested = (
        "import os, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import os; print(os.getppid(), os.getpid(), flush=True)'])\n"
        "print(os.getppid(), os.getpid(), child.pid, child.wait(), flush=True)"
    )
    process = Forked([sys.executable, "-c", nested], env=ENV, stdout=subprocess.PIPE, text=True)
    first, second = process.communicate(timeout=60)[0].splitlines()
    assert second.split() == [str(os.getpid()), str(process.pid), first.split()[1], "0"]
    assert first.split()[0] == str(process.pid)


def test_it_and_what_it_starts_are_in_the_network_namespace_of_a_started_one() -> None:
    if reason := why_not():
        pytest.skip(reason)
    tell = "import os; print(os.readlink('/proc/self/ns/net'), flush=True)"
    nested = f"{tell}; import subprocess, sys; subprocess.run([sys.executable, '-c', {tell!r}], check=True)"
    name = f"tw{os.getpid()}f"
    do("netns", "add", name)
    try:
        inside = ["ip", "netns", "exec", name, sys.executable, "-c", nested]
        forked, started = (
            popen(inside, env=ENV, stdout=subprocess.PIPE, text=True).communicate(timeout=60)[0].split()
            for popen in (Forked, subprocess.Popen)
        )
    finally:
        ip("netns", "delete", name)
    assert forked == started == [started[0]] * 2 != [os.readlink("/proc/self/ns/net")] * 2


@pytest.mark.parametrize("code", ["raise SystemExit(3)", "raise ValueError", "raise KeyboardInterrupt", "os._exit(7)"])
def test_it_ends_with_the_code_of_a_started_one(code: str) -> None:
    ended = [
        popen([sys.executable, "-c", f"import os\n{code}"], env=ENV, stderr=subprocess.DEVNULL).wait(60)
        for popen in (Forked, subprocess.Popen)
    ]
    assert ended[0] == ended[1] != 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGHUP])
def test_a_signal_ends_it_and_its_server_with_it(number: signal.Signals) -> None:
    default = "signal.signal(signal.SIGHUP, signal.SIG_DFL)"  # tests under nohup inherit that it is ignored
    code = f"import os, signal; {default}; os.write(1, b'x'); signal.pause()"
    process = Forked([sys.executable, "-c", code], env=ENV, stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout as out:
        assert out.read(1) == b"x"
        assert children(process.pid) == set()
        process.send_signal(number)
        assert process.wait(60) == -number
        assert out.read() == b"", "nobody else holds its output"


def test_what_a_server_cannot_be_told_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    python, env = sys.executable, ENV
    monkeypatch.setenv("PYTHONPATH", "/has/a/sitecustomize")  # in this process since; the server began without
    assert is_forkable([python, "-m", "thinwire.cli"], env)
    for words, other in [
        (["/usr/bin/env", "-c", "true"], env),
        ([python, "-I", "-c", "1"], env),
        ([python], env),
        ([python, "-c", "1"], {**env, "PYTHONHASHSEED": "1"}),
        ([python, "-c", "1"], {**env, "PYTHONPATH": "/has/a/sitecustomize"}),
        ([python, "-c", "1"], {**env, "OMP_NUM_THREADS": "2"}),
    ]:
        assert not is_forkable(words, other)
    process = Forked([python, "-I", "-c", "import sys; print(sys.flags.isolated)"], env=env, stdout=subprocess.PIPE)
    assert process.communicate(timeout=60)[0] == b"1\n"
    assert not is_server(process.pid)


def test_a_script_of_this_python_is_forked_by_its_path_and_by_its_name() -> None:
    script = Path(sys.executable).parent / "thinwire"
    env = {**ENV, "PATH": os.pathsep.join([str(script.parent), os.defpath])}
    for words in ([str(script), "--version"], ["thinwire", "--version"]):
        assert with_python(words, env) == [sys.executable, str(script), "--version"]
        forked, started = (
            popen(words, env=env, stdout=subprocess.PIPE).communicate(timeout=60)[0]
            for popen in (Forked, subprocess.Popen)
        )
        assert forked == started != b""
    for words in (["sh", "-c", "true"], ["no such program"], [sys.executable, "-c", "1"], []):
        assert with_python(words, env) == words


def test_a_program_of_a_shell_passes_words_streams_signals_and_codes(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import signal, sys\n"
        "try:\n"
        "    while sys.argv[1:] == ['wait']:\n"
        "        print('waits', flush=True)\n"
        "        signal.pause()\n"
        "except KeyboardInterrupt: sys.exit(9)\n"
        "print(sys.argv[1:], sys.stdin.read(), flush=True)\n"
        "sys.exit(5)\n"
    )
    (tmp_path / "bin").mkdir()
    with forked_programs({"program.py": [sys.executable, str(program)]}, tmp_path / "bin") as found:
        env = {**ENV, **found, "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}
        done = subprocess.run(
            ["bash", "-c", "echo in | program.py 'a b' c"], env=env, capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stdout) == (5, "['a b', 'c'] in\n\n")
        for number, code in ((signal.SIGINT, 9), (signal.SIGTERM, -signal.SIGTERM)):
            with subprocess.Popen(["program.py", "wait"], env=env, stdout=subprocess.PIPE, text=True) as waiting:
                assert waiting.stdout is not None
                assert waiting.stdout.readline() == "waits\n"
                waiting.send_signal(number)
                assert waiting.wait(60) == code
        with subprocess.Popen(["program.py", "wait"], env=env, stdout=subprocess.PIPE, text=True) as killed:
            assert killed.stdout is not None
            assert killed.stdout.readline() == "waits\n"
            killed.kill()
            assert killed.stdout.read() == "", "its process ended with it"
