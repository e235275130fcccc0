"""Start Python processes for tests by forking one that has imported torch and the other libraries: a fork server.

Importing torch costs a process 1.3 s of CPU, scikit-learn 1.2 s, Flower 0.6 s, SQLAlchemy and pydantic 0.5 s, and the
tests start hundreds of processes. A forked process imports them in no time. It is a process like any other: it has the
arguments, environment, directory, file descriptors, session and umask that it was started with, its parent is the
process that started it, and signals and exit codes are its own. Processes that it starts in turn are forked as well,
by a server of its own. What `ip netns exec` starts is forked into that network namespace; there, /sys is the one of
this process.

A script that pip installed for this Python, such as `flower-supernode`, is Python with that script.

Invariants: a server has one thread and has run nothing but imports when it forks. What cannot be told by forking is
started afresh: another program, other `PYTHON...` variables, another number of threads (`is_forkable`).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import inspect
import io
import json
import multiprocessing.util
import os
import random
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).parents[2]
LIBRARIES = (
    "torch", "numpy", "pydantic", "cryptography.x509", "cryptography.hazmat.primitives.serialization.pkcs12", "typer",
    "rich.console", "rich.table", "rich.progress", "sqlalchemy.dialects.sqlite", "alembic.command", "fastapi",
    "uvicorn", "starlette", "backports.zstd", "safetensors.numpy", "sklearn.datasets", "thinwire.cli.main",
    "thinwire.core", "thinwire.store", "thinwire.aggregation", "thinwire.server.service", "thinwire.client.agent",
    "thinwire.client.train.worker", "thinwire.privacy", "thinwire.reports", "thinwire.cli.aggregator.serve",
    "thinwire.flower.fleet", "tests.support.checked_routes", "thinwire.simulation.run", "thinwire.web.app",
)  # fmt: skip
PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
CLONE_NEWNET = 0x40000000  # setns(2)
NETWORKS, INSIDE = Path("/run/netns"), ("ip", "netns", "exec")  # ip-netns(8)
COMM, SERVER = Path("/proc/self/comm"), "fork-server"  # the name of a process, by which a test knows a server
MAX_REQUEST = 1 << 20  # bytes of arguments and environment
MAX_DESCRIPTORS = 64
MAX_SHOWN = 8000  # bytes of a command line that other processes see
ABOVE = 512  # the first descriptor of those that are on their way to their number
EXECUTE = subprocess.Popen._execute_child  # type: ignore[attr-defined]  # private: it starts the program of a Popen
SPAWN = multiprocessing.util.spawnv_passfds  # how multiprocessing starts a process
BEGUN = dict(os.environ)  # with which a server imports its libraries, whatever a test sets later
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # a program inherits which of them are ignored

Run = Callable[[], object]


class ForkServer:
    """The end of a server at which processes are requested; `fork` may be called by several threads."""

    def __init__(self, wire: socket.socket, pid: int = 0) -> None:
        self.pid = pid  # of the server, where this process began it
        self._wire, self._one_at_a_time = wire, threading.Lock()

    def fork(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        """Return the pid of a new child of this process that does as `request` says."""
        with self._one_at_a_time, _subreaper():
            socket.send_fds(self._wire, [json.dumps(request).encode()], descriptors)
            return int(self._wire.recv(64))


@contextlib.contextmanager
def _subreaper() -> Iterator[None]:
    """Make this process the parent of a descendant whose own parent ends, instead of init."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def is_forkable(words: Sequence[str], env: Mapping[str, str]) -> bool:
    """Return True if this command line is Python with a module, a program or code that a server may run."""
    variables = {name for name in {*env, *BEGUN} if name.startswith("PYTHON")} | {"OMP_NUM_THREADS"}
    variables -= {"PYTHONUNBUFFERED", "PYTHONPATH"}
    return (
        len(words) > 1 and words[0] == sys.executable
        and (words[1] in ("-P", "-m", "-c") or not words[1].startswith("-"))
        and all(env.get(name) == FIXED.get(name, BEGUN.get(name)) for name in variables)
        and _more_paths(env) == _more_paths(BEGUN)
    )  # fmt: skip


def with_python(words: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Return a command line with this Python before it if it begins with a script for it, as pip installs them."""
    found = shutil.which(words[0], path=env.get("PATH")) if words and words[0] != sys.executable else None
    programs = Path(sys.executable).parent.resolve()
    if found is None or Path(found).parent.resolve() != programs:
        return list(words)
    with open(found, "rb") as file:
        mark, _, python = file.readline().strip().partition(b"#!")
    is_ours = not mark and Path(os.fsdecode(python)).parent.resolve() == programs
    return [sys.executable, found, *words[1:]] if is_ours else list(words)


def _more_paths(env: Mapping[str, str]) -> list[str]:
    return [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", str(ROOT))]


FIXED = {"OMP_NUM_THREADS": "1"}  # which libraries read when they are imported


def execute_child(popen: subprocess.Popen[Any], *given: Any) -> None:
    """Do what `subprocess.Popen._execute_child` does, by forking where it can be."""
    asked = inspect.signature(EXECUTE).bind(popen, *given).arguments
    words = [os.fspath(word) for word in asked["args"]] if not isinstance(asked["args"], str | bytes) else []
    network, words = (words[3], words[4:]) if tuple(words[:3]) == INSIDE else ("", words)
    env = dict(os.environ if asked["env"] is None else asked["env"])
    words = with_python(words, env)
    if asked["shell"] or asked["preexec_fn"] or asked["executable"] or not is_forkable(words, env):
        EXECUTE(popen, *given)
        return
    ends = [asked["p2cread"], asked["c2pwrite"], asked["errwrite"]]
    ends = [number if end < 0 else end for number, end in enumerate(ends)]
    request = {
        **_request(words, env, asked["pass_fds"]), "network": network, "cwd": os.fspath(asked["cwd"] or os.getcwd()),
        "session": asked["start_new_session"], "group": asked["process_group"],
    }  # fmt: skip
    try:
        popen.pid = server().fork(request, [*ends, *asked["pass_fds"]])
        popen._child_created = True  # type: ignore[attr-defined]  # private to Popen
    finally:
        popen._close_pipe_fds(  # type: ignore[attr-defined]  # private to Popen
            *(asked[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"))
        )


def spawn(path: bytes, args: Sequence[Any], descriptors: Sequence[int]) -> int:
    """Do what `multiprocessing.util.spawnv_passfds` does, by forking where it can be."""
    options = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # private: those of the server too
    words = [os.fsdecode(word) for word in args]
    if words[1 : 1 + len(options)] == options:
        del words[1 : 1 + len(options)]
    env = dict(os.environ)
    if not is_forkable(words, env):
        return SPAWN(path, args, descriptors)
    return server().fork(_request(words, env, descriptors), [0, 1, 2, *descriptors])


def _request(words: Sequence[str], env: Mapping[str, str], descriptors: Sequence[int]) -> dict[str, Any]:
    return {
        "words": words[1:], "network": "", "env": env, "cwd": os.getcwd(), "umask": _umask(),
        "session": False, "group": -1, "to": [0, 1, 2, *descriptors],
        "ignored": [number for number in ENDING if signal.getsignal(number) == signal.SIG_IGN],  # under nohup: SIGHUP
    }  # fmt: skip


def _umask() -> int:
    return int(Path("/proc/self/status").read_text().partition("Umask:")[2].split()[0], 8)


_servers: list[ForkServer] = []  # the one of this process, once it is needed; a forked process begins with its own
_BEGINNING = threading.Lock()  # threads that need the first one at once share it


def server() -> ForkServer:
    """Return the server of this process, which ends with it; the first call waits for its imports."""
    with _BEGINNING:
        if not _servers:
            _servers.append(_begin())
        return _servers[0]


@contextlib.contextmanager
def begun_with(env: Mapping[str, str]) -> Iterator[None]:
    """Have a server of its own fork in this block, which begins with these variables too."""
    own = list[ForkServer]()
    with patch.dict(BEGUN, env), patch.object(sys.modules[__name__], "_servers", own):
        yield
        for each in own:
            each._wire.close()


def _begin() -> ForkServer:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        path = os.pathsep.join(filter(None, [str(ROOT), BEGUN.get("PYTHONPATH")]))
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fork_server", str(theirs.fileno()), " " * MAX_SHOWN],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env={**BEGUN, **FIXED, "PYTHONPATH": path},
        )  # fmt: skip
    atexit.register(process.wait)
    atexit.register(ours.close)
    return ForkServer(ours, process.pid)


def is_server(pid: int) -> bool:
    """Return True if this process forks others; False also if it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == SERVER
    except OSError:
        return False


class Forked(subprocess.Popen[Any]):
    """A `subprocess.Popen` whose process is forked by the server of this process."""

    def _execute_child(self, *given: Any) -> None:
        execute_child(self, *given)


def run_forked(command: Sequence[str], timeout: float, **more: Any) -> subprocess.CompletedProcess[str]:
    """Do what `subprocess.run` does that captures text."""
    with Forked(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            process.kill()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@contextlib.contextmanager
def forking(*modules: types.ModuleType) -> Iterator[None]:
    """Have these modules, which call `subprocess.Popen`, and all pools of processes fork in this block."""
    with contextlib.ExitStack() as patched:
        patched.enter_context(patch.dict(os.environ, FIXED))
        patched.enter_context(patch.object(multiprocessing.util, "spawnv_passfds", spawn))
        for module in modules:
            calls = types.SimpleNamespace(**{**vars(subprocess), "Popen": Forked})
            patched.enter_context(patch.object(module, "subprocess", calls))
        yield


def serve(wire: socket.socket) -> Run:
    """Fork processes until the other end is closed; return in each of them only, with what it runs."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(wire, MAX_REQUEST, MAX_DESCRIPTORS)
        if not message:
            os._exit(0)
        request = json.loads(message)
        pids, go = os.pipe(), os.pipe()
        between = os.fork()
        if between == 0:
            if os.fork():
                os._exit(0)
            for number in (pids[0], go[1], wire.detach()):
                os.close(number)
            return _child(request, descriptors, pids[1], go[0])
        for number in (*descriptors, pids[1], go[0]):
            os.close(number)
        pid = int(os.read(pids[0], 64))
        os.waitpid(between, 0)  # now its child is a child of the process that requested it
        for number in (pids[0], go[1]):
            os.close(number)
        wire.send(str(pid).encode())


def _child(request: Mapping[str, Any], descriptors: Sequence[int], told: int, go: int) -> Run:
    if request["network"]:
        _enter(NETWORKS / request["network"])
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        for number in (*descriptors, told, go):
            os.close(number)
        ours.close()
        return serve(theirs)
    theirs.close()
    COMM.write_text("python")
    if request["session"]:
        os.setsid()
    if request["group"] >= 0:
        os.setpgid(0, request["group"])
    for number in ENDING:
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in request["ignored"] else default)
    os.write(told, str(os.getpid()).encode())  # from now on it and its process group may be signalled
    os.close(told)
    os.read(go, 1)
    os.close(go)
    mine = fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, ABOVE)
    ours.close()
    _take(descriptors, request["to"])
    os.umask(request["umask"])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    _servers[:] = [ForkServer(socket.socket(fileno=mine))]
    subprocess.Popen._execute_child = Forked._execute_child  # type: ignore[attr-defined]  # private to Popen
    multiprocessing.util.spawnv_passfds = spawn  # type: ignore[assignment]  # its stub takes anything
    random.seed()
    sys.modules["numpy"].random.seed()
    _show(request["words"])
    return _program(request["words"])


def _enter(network: Path) -> None:
    """Enter a network namespace, and all processes that this one starts with it."""
    libc = ctypes.CDLL(None, use_errno=True)
    with network.open() as opened:
        if libc.setns(opened.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "no such namespace can be entered", str(network))


def _show(words: Sequence[str]) -> None:
    """Put the command line where the kernel reads it (proc(5), arg_start): a test looks for processes by it."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    shown = "\0".join([sys.executable, *words]).encode()[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, shown, len(shown))


def _take(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Give each descriptor its number, as the process that is started expects it."""
    above = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, ABOVE) for number in descriptors]
    for number in descriptors:
        if number > 2:
            os.close(number)
    for given, number in zip(above, numbers, strict=True):
        os.dup2(given, number)
        os.close(given)


def _program(words: Sequence[str]) -> Run:
    """Return what Python would run for these words, and set `sys` up for it."""
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    for name, number in (("stdout", 1), ("stderr", 2)) if unbuffered else ():
        raw: Any = io.FileIO(number, "w", closefd=False)
        stream = io.TextIOWrapper(raw, encoding="utf-8", write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    if not unbuffered:
        sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())  # type: ignore[union-attr]  # it is a file
    sys.orig_argv = [sys.executable, *words]
    safe, words = words[0] == "-P", words[words[0] == "-P" :]
    kind, what, rest = (words[0], words[1], words[2:]) if words[0] in ("-m", "-c") else ("", words[0], words[1:])
    sys.path[0] = {"-m": os.getcwd(), "-c": ""}.get(kind, os.path.dirname(what))
    sys.path[:1] = [] if safe else sys.path[:1]
    sys.argv = [{"-c": "-c"}.get(kind, what), *rest]
    if kind == "-m":
        return lambda: runpy.run_module(what, run_name="__main__", alter_sys=True)
    if kind == "-c":
        pooled = "spawn_main" in what  # by multiprocessing; else it may import its own Thinwire, as a worker's does
        for name in [name for name in sys.modules if not pooled and name.partition(".")[0] == "thinwire"]:
            del sys.modules[name]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        return lambda: exec(compile(what, "<string>", "exec"), main.__dict__)
    return lambda: runpy.run_path(what, run_name="__main__")


def end(run: Run) -> None:
    """Run a program, and end as Python does, but without taking its objects apart, which takes 0.2 s of CPU."""
    code = 0
    try:
        run()
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            raise
        code = ended.code or 0
    threading._shutdown()  # type: ignore[attr-defined]  # private: it waits for threads
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        sys.exit(code)  # Python says what is wrong
    os._exit(code & 0xFF)


def main() -> Run:
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)  # of a terminal: the server ends when its process does
    COMM.write_text(SERVER)
    sys.modules["tests.support.fork_server"] = sys.modules["__main__"]  # also where a forked process imports it
    gc.disable()
    for name in LIBRARIES:
        importlib.import_module(name)
    importlib.reload(sys.modules["thinwire.cli"])  # its function `main` has the name of a module
    for torchs in weakref.finalize._registry:  # type: ignore[attr-defined]  # private: at an end they take 40 ms of CPU
        torchs.atexit = False
    gc.enable()
    gc.freeze()
    assert len(os.listdir("/proc/self/task")) == 1, "a library began a thread, so that this process cannot be forked"
    return serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    end(main())
