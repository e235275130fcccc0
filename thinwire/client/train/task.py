"""Tasks: finding, importing and checking a module or object with `model`, `data` and `loss`.

Invariant: only the user of this machine chooses the code that a task's name stands for. The user gives `--task
NAME=MODULE` or installs a package with the entry-point group `thinwire.tasks`. The client never imports a name that
came over the network.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import BadTask, BadUsage, TrainError, place, task_code

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
NEEDED = {
    "model": "model() gives a torch.nn.Module",
    "data": "data(client) gives a Dataset, a DataLoader or Split(train, test)",
    "loss": "loss(model, batch) gives one number",
}
OPTIONAL = ("metrics", "evaluate", "optimizer", "train")


@dataclass(frozen=True)
class LoadedTask:
    """A task's name and its code. `file` is the source that the digest covers and that failures refer to.

    `spec` is the NAME=MODULE by which another process imports it; "" for an object of this process.
    """

    name: str
    module: Any
    version: str = ""
    source_digest: str = ""
    file: str = ""
    spec: str = ""

    def optional(self, name: str) -> Callable[..., Any] | None:
        """Return an optional function of the task, or None if the task does not have it."""
        found = getattr(self.module, name, None)
        return found if callable(found) else None

    @property
    def defines(self) -> frozenset[str]:
        """Return the names of the optional functions that the task has."""
        return frozenset(name for name in OPTIONAL if self.optional(name) is not None)


def load_task(spec: str) -> LoadedTask:
    """Import the task of `NAME=MODULE`.

    MODULE is a dotted name or a path to a .py file, either with `:OBJECT` behind it. Raise `BadTask` with the error in
    the code and its place.
    """
    name, equals, module = spec.partition("=")
    if not equals or not NAME.fullmatch(name) or not module:
        raise BadUsage(
            f"the task {spec!r} is not valid",
            why="it reads NAME=MODULE: a name of letters, digits, - and _, and where its code is",
            hint="digits=path/to/task.py",
        )
    return replace(as_task(name, _imported(module)), spec=spec)


def as_task(name: str, module: Any) -> LoadedTask:
    """Make a task of any object that has the needed functions; raise `BadTask` if one is missing."""
    if missing := [needed for needed in NEEDED if not callable(getattr(module, needed, None))]:
        raise BadTask(
            f"{_called(module)} is no task: it has no {', '.join(missing)}",
            why="; ".join(NEEDED[needed] for needed in missing),
            hint="thinwire init DIR writes one that runs",
        )
    if _needs_an_object(module):
        raise BadTask(
            f"the class {module.__name__} is no task: its functions need an object",
            why="they are called as model(), data(client) and loss(model, batch)",
            hint=f"{module.__name__}(), an object of it",
        )
    file = _source(module)
    digest = hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""
    return LoadedTask(name, module, str(getattr(module, "__version__", "")), digest, file or _written_in(module.model))


def _imported(text: str) -> Any:
    file, dot, attribute = text.rpartition(":")
    if not dot or os.sep in attribute:
        file, attribute = text, ""
    folder = Path(file)  # one as `thinwire init` makes it is its task.py, and a package is a module
    is_task = (folder / "task.py").is_file() and not (folder / "__init__.py").exists()
    is_path = file.endswith(".py") or os.sep in file or is_task
    module = _from_file(folder) if is_path else _from_name(file)
    try:
        return getattr(module, attribute) if attribute else module
    except AttributeError:
        raise BadTask(
            f"there is no {attribute!r} in {file}", why="it stands behind the colon", hint=f"one of: {_public(module)}"
        ) from None


def _from_file(given: Path) -> ModuleType:
    path = given.expanduser().absolute()
    if path.is_dir():
        path /= "task.py"
    if not path.is_file():
        raise BadTask(
            f"cannot import the task {given}",
            why=f"there is no file {path}",
            hint="a path to a .py file, or a module's dotted name",
        )
    name = f"thinwire_task_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise BadTask(f"cannot import the task {given}", why="it is not Python code", hint="a .py file")
    _search(path.parent)  # files in the same folder can be imported, as for a script
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with task_code():
            spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        raise _refused(error, str(given), str(path)) from error
    return module


def _from_name(name: str) -> ModuleType:
    _search(Path.cwd())
    try:
        with task_code():
            return importlib.import_module(name)
    except BaseException as error:
        found = sys.modules.get(name)
        raise _refused(error, name, _source(found) if found else "") from error


def _search(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _refused(error: BaseException, given: str, file: str) -> BaseException:
    """Describe an import error for the user of this machine, who may see the error's own text."""
    if isinstance(error, (KeyboardInterrupt, TrainError)):
        return error
    where = place(error, file)
    if isinstance(error, SyntaxError):
        where = f"SyntaxError at {os.path.basename(error.filename or given)}:{error.lineno}"
    hint = "a path to a .py file, or a module's dotted name that can be imported here"
    if isinstance(error, ImportError) and error.name and error.name != given:
        hint = f"install {error.name.split('.')[0]} into this environment ({sys.prefix})"
    elif not isinstance(error, ImportError):
        hint = f"python {given} shows the whole traceback"
    return BadTask(f"cannot import the task {given}", why=f"{where}: {error}", hint=hint)


def _source(module: Any) -> str:
    try:
        file = inspect.getsourcefile(module if inspect.ismodule(module) or inspect.isclass(module) else type(module))
    except (TypeError, OSError):  # built in, or defined in a notebook's cell or on a command line, which have no file
        return ""
    return os.path.abspath(file) if file and os.path.exists(file) else ""


def _written_in(function: Any) -> str:
    """Return the file name in a function's code object: a notebook's cell has a name and no file."""
    code = getattr(function, "__code__", None)
    return os.path.abspath(code.co_filename) if code is not None else ""


def _needs_an_object(module: Any) -> bool:
    """Return True if this is a class whose model() is a method that the class does not bind."""
    function: Any = module.model
    method = inspect.isclass(module) and inspect.isfunction(function)
    return method and next(iter(inspect.signature(function).parameters), "") == "self"


def _called(module: Any) -> str:
    return _source(module) or getattr(module, "__name__", type(module).__name__)


def _public(module: Any) -> str:
    return ", ".join(name for name in sorted(vars(module)) if not name.startswith("_"))[:200]
