"""This module finds the state directory, locks its parts, and replaces files without ever leaving half a file.

Invariant: other users cannot read or change what Thinwire creates, whatever the umask.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from thinwire.core.errors import DataLost, NotWritten, ThinwireError

T = TypeVar("T")
log = logging.getLogger("thinwire.home")

MB = 10**6
SWEEPS = "sweeps"
DASHBOARD_LOCK = "dashboard.lock"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # random(4)
OTHERS = stat.S_IRWXG | stat.S_IRWXO
NO_MORE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)  # the disk accepts no writes, for now


def find_home(given: str | Path | None = None) -> Path:
    """Return `--home`, else THINWIRE_HOME, else the XDG state directory."""
    if given:
        return Path(given).expanduser().absolute()
    if env := os.environ.get("THINWIRE_HOME"):
        return Path(env).expanduser().absolute()
    return default_home()


def default_home() -> Path:
    """Return the XDG state directory, which all of this user's terminals use without `--home` and THINWIRE_HOME."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser().absolute() / "thinwire"


@dataclass(frozen=True)
class AggregatorHome:
    """Holds the paths in `HOME/aggregator/`: database, spool, and a folder with models and bundles for each run."""

    root: Path
    durable: bool = True  # False for a temporary directory, in which nothing is synced

    @classmethod
    def under(cls, home: Path, durable: bool = True) -> AggregatorHome:
        """Return the paths under a state directory; create `HOME/aggregator` if it is missing."""
        return cls(private_folder(_state_directory(home) / "aggregator"), durable)

    @property
    def database(self) -> Path:
        """Return the file of the SQLite database."""
        return self.root / "store.sqlite3"

    @property
    def lock(self) -> Path:
        """Return the file that a running aggregator locks."""
        return self.root / "lock"

    @property
    def dashboard_lock(self) -> Path:
        """Return the file that a running dashboard locks."""
        return self.root / DASHBOARD_LOCK

    @property
    def spool(self) -> Path:
        """Return the directory of replies whose updates are not aggregated yet; create it if it is missing."""
        return private_folder(self.root / "spool")

    @property
    def tls(self) -> Path:
        """Return the directory of the device API's certificates and keys; create it if it is missing."""
        return private_folder(self.root / "tls")

    @property
    def uploads(self) -> Path:
        """Return the directory of initial models that came through the dashboard; it is in no backup."""
        return self.root / "uploads"

    @property
    def roster(self) -> Path:
        """Return the file `HOME/roster.json`: devices that an offline key approved for `adversary = "malicious"`."""
        return self.root.parent / "roster.json"

    @property
    def report_key(self) -> Path:
        """Return the path of the key that signs privacy reports where there is no CA."""
        return self.root / "report.key"

    @property
    def sweeps(self) -> Path:
        """Return the directory of sweeps: it has one directory for each group of simulated runs."""
        return self.root / SWEEPS

    def simulation(self, run_id: str) -> Path:
        """Return the file that describes a simulation which outlives its process, in the folder of its clients."""
        return self.root / "simulated" / run_id / "simulation.json"

    def owner(self, run_id: str) -> Path:
        """Return the lock file of the process that simulates this run or transfers it; it is in no backup."""
        return self.root / "runs" / run_id / ".owner"

    def messages(self, run_id: str) -> Path:
        """Return the directory of the messages of a run's open secure round; it is in no backup."""
        return self.root / "runs" / run_id / "secure"

    def run(self, run_id: str) -> Path:
        """Return the directory of a run's models and downlink bundles; create it if it is missing."""
        return private_folder(self.root / "runs" / run_id)


def client_home(home: Path, name: str) -> Path:
    """Return `HOME/clients/NAME/` with the key, residuals and outbox of one client; create it if it is missing."""
    private_folder(_state_directory(home) / "clients")
    return private_folder(home / "clients" / name)


def _state_directory(home: Path) -> Path:
    """Create the directory that `--home` names if it is missing.

    An existing directory may stay readable for others, but only its owner may add files to it.
    """
    found = _made(home)
    _close(home, found, 0 if found.st_mode & stat.S_ISVTX else stat.S_IWGRP | stat.S_IWOTH)
    return home


def private_folder(path: Path) -> Path:
    """Create a directory and its missing parents with mode 0700, whatever the umask; return it.

    If our own directory was open to other users, its mode is fixed, with a warning.
    """
    _close(path, _made(path), OTHERS)
    return path


def keep_private(path: Path) -> None:
    """Close our own file to other users, with a warning; ignore a missing file, and a link to one of someone else."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISLNK((found := path.lstat()).st_mode):
            _close(path, found, OTHERS)


def require_its_database(database: Path) -> None:
    """Raise `DataLost` if the SQLite file is missing or empty while runs or updates exist, which only it could list."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if database.stat().st_size:
            return
    restoring = database.parent.with_name(f".{database.parent.name}.restoring")
    if restoring.is_dir() and not database.exists():
        why = f"{restoring} is what it had written, and a new aggregator would have another CA"
        what = f"a restore into {database.parent} was interrupted"
        raise DataLost(what, why, hint="thinwire aggregator restore FILE, once more")
    folders = (database.with_name(name) for name in ("runs", "spool"))
    found = next((one for folder in folders if folder.is_dir() for one in sorted(folder.iterdir())), None)
    if found is not None:
        raise DataLost(
            f"the database {database} is {'empty' if database.exists() else 'not there'}",
            why=f"{found} stands beside it: a new one would know neither the runs nor the devices that were here",
            hint="restore a backup: thinwire aggregator restore FILE --force; or start again: --home FOLDER",
        )


def private_opener(path: str, flags: int) -> int:
    """Open a file with mode 0600, whatever the umask, in `open(..., opener=private_opener)`."""
    return os.open(path, flags, 0o600)


def _made(path: Path) -> os.stat_result:
    """Create a directory if it is missing; return its state.

    Each parent is created with mode 0700: `mkdir(parents=True)` would leave the parents' mode to the umask.
    """
    try:
        if not path.is_dir():
            for folder in [*reversed(path.parents), path]:
                if not folder.is_dir():
                    folder.mkdir(mode=0o700, exist_ok=True)
        return path.stat()
    except OSError as error:
        raise disk_error(error, path) from error


def _close(path: Path, found: os.stat_result, bits: int) -> None:
    if found.st_mode & bits and found.st_uid == os.geteuid():
        try:
            path.chmod(stat.S_IMODE(found.st_mode) & ~bits)
        except OSError as error:
            raise disk_error(error, path) from error
        could, mode = "use" if bits == OTHERS else "write into", stat.S_IMODE(found.st_mode)
        log.warning("warning: other users could %s %s (mode %o); it is closed to them now", could, path, mode)


ON_FULL_DISK: ContextVar[Callable[[NotWritten], None] | None] = ContextVar("on_full_disk", default=None)
"""What a write does where the disk is full: wait until there is space, or raise the error. None: raise it."""


def patiently(write: Callable[[], T]) -> T:
    """Return what `write` returns; where the disk is full, wait as `ON_FULL_DISK` says and call it again."""
    while True:
        try:
            return write()
        except NotWritten as error:
            if (wait := ON_FULL_DISK.get()) is None:
                raise
            wait(error)


def write_atomically(path: Path, data: bytes | memoryview, mode: int = 0o600) -> None:
    """Replace a file by `data`; after a crash at any moment the old or the new file is complete and durable."""
    patiently(lambda: _replace(path, data, mode))


def _replace(path: Path, data: bytes | memoryview, mode: int) -> None:
    try:
        descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                os.fchmod(file.fileno(), mode)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(draft)
            raise
        sync_path(path.parent)
    except OSError as error:
        raise disk_error(error, path) from error


def sync_path(path: Path) -> None:
    """Make the content of a file, or the renames in a directory, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_room(folder: Path, more_bytes: int, min_free_bytes: int) -> None:
    """Raise `NotWritten` if `more_bytes` more would leave less than `min_free_bytes` of the disk free."""
    if not min_free_bytes:
        return
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise disk_error(error, folder) from error
    if free - more_bytes < min_free_bytes:
        raise NotWritten(
            f"min_free_disk_mb = {min_free_bytes // MB}: {max(0, more_bytes) / MB:,.1f} MB more do not fit on a disk "
            f"with {free / MB:,.1f} MB free",
            why=f"the disk of {folder} would have less free than its owner keeps free",
            hint="free some space, or a smaller [policy] min_free_disk_mb in client.toml",
        )


def disk_error(error: OSError, path: Path) -> ThinwireError:
    """Return the error of a failed disk operation, with a hint that fits its cause."""
    hint = {
        errno.ENOSPC: "free some space, or use another disk: --home FOLDER",
        errno.EROFS: "the disk is read-only: --home FOLDER on one that is not",
        errno.EACCES: "run as the folder's owner, or use another: --home FOLDER",
    }.get(error.errno or 0, "look at the disk, or use another: --home FOLDER")
    kind = NotWritten if error.errno in NO_MORE else DataLost
    return kind(f"cannot write {path}", why=error.strerror or str(error), hint=hint)


class Held(ThinwireError):
    """Another process has locked the directory; `holder` is what that process wrote about itself."""

    def __init__(self, path: Path, holder: Mapping[str, Any]) -> None:
        of_client = path.parent.parent.name == "clients"
        own = "another name: --name NAME" if of_client else "a folder of its own: --home FOLDER"
        super().__init__(
            f"{path.parent} is in use by process {holder.get('pid', '?')}",
            why="two processes on one state directory would write over each other",
            hint=f"stop the other one, or give this one {own}",
        )
        self.holder = dict(holder)


@contextlib.contextmanager
def hold(path: Path, about: Mapping[str, Any]) -> Iterator[None]:
    """Lock a directory through its lock file and write `about`, with our pid, into it; raise `Held` if it is locked."""
    with lock_file(path) as descriptor:
        write_about(descriptor, about)
        yield


@contextlib.contextmanager
def lock_file(path: Path, kind: int = fcntl.LOCK_EX) -> Iterator[int]:
    """Hold a lock on a file, an exclusive one by default; the system releases it when this process ends for any reason.

    It yields the file's descriptor, and raises `Held` if another process has the lock.
    """
    try:
        access = os.O_RDWR if kind == fcntl.LOCK_EX else os.O_RDONLY  # a look at the lock needs no writable disk
        descriptor = os.open(path, access | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise disk_error(error, path) from error
    try:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Held(path, _read(path)) from None
        except OSError as error:  # no locks on this disk
            raise disk_error(error, path) from error
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def own(path: Path, is_new: bool = True) -> Iterator[None]:
    """Hold a new lock file, which becomes visible only when it is locked, or else that of a process that has died.

    If the block raises, the unlocked file stays. Raise `Held` if another process has locked the file.
    """
    draft = path.with_name(f"{path.name}.{os.getpid()}") if is_new else path
    with lock_file(draft) as descriptor:
        write_about(descriptor, _machine(path))
        os.replace(draft, path)
        yield
        path.unlink(missing_ok=True)


def dead_owner(path: Path) -> str | None:
    """Return the process that made this lock file and has died, in words; None if it lives or its death is not certain.

    It is not certain without a file, or if the process ran on another machine, whose locks may not be visible here. The
    containers of a machine have their own hosts, but one kernel, which sees the locks of a file system that they share.
    """
    about = _read(path)
    if not any(about.get(key) == name for key, name in _machine(path).items()) or holder(path) is not None:
        return None
    return f"process {about.get('pid')}"


def _machine(path: Path) -> dict[str, str]:
    """Return the names of this machine: its host, and on Linux the boot id with the number of the file system."""
    found = {"host": socket.gethostname()}
    with contextlib.suppress(OSError):
        found["boot"] = f"{BOOT_ID.read_text().strip()} {path.parent.stat().st_dev}"
    return found


def write_about(descriptor: int, about: Mapping[str, Any]) -> None:
    """Write what other processes may know about the holder into the lock file: its pid and addresses."""
    data = json.dumps({"pid": os.getpid(), **about}).encode()
    os.pwrite(descriptor, data, 0)
    os.ftruncate(descriptor, len(data))


def holder(path: Path) -> dict[str, Any] | None:
    """Return what the process that has this lock wrote about itself, or None if the file is not locked."""
    if not path.exists():
        return None
    try:
        with lock_file(path, fcntl.LOCK_SH):  # two that look at once are no holder to each other
            return None
    except Held as held:
        return held.holder


def living_holder(path: Path) -> dict[str, Any] | None:
    """Return what the process that has this lock wrote about itself; None without one.

    Testing the lock holds it for a moment, which would refuse an aggregator that is starting. Therefore it is tested
    only while the process that wrote it lives.
    """
    try:
        os.kill(int(_read(path)["pid"]), 0)
    except PermissionError:
        pass
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return holder(path)


def _read(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
        return dict(json.loads(path.read_bytes() or b"{}"))
    return {}
