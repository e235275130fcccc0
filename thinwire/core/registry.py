"""This module finds codecs, optimizers and reductions by name, in our own registries and in installed packages.

`Blame` names the installed package in whose code an exception was raised. A defect of another package is then not
reported as one of Thinwire.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.machinery import SourceFileLoader
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar

from thinwire.core.errors import CodecError, UsageError

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """Maps names to things of one kind; a wrong name raises an error with the nearest right one.

    With a `group`, the registry also has what other packages install under that group of entry points. With `places`,
    `find` also imports a thing by its place, MODULE:NAME or FILE.py:NAME. Such a thing is imported on first use, and is
    what `admit(name, thing)` returns, which raises `CodecError` if it is not valid.

    Invariant: another package cannot replace a name of our own. A name from outside never leads to code that is not
    on this machine; whether a plan may name it is decided before, by core/plan_names.py.

    >>> shapes: Registry[int] = Registry("shape"); shapes.add("square", 4); shapes["square"]
    4
    """

    def __init__(
        self, kind: str, group: str = "", admit: Callable[[str, Any], T] | None = None, places: bool = False
    ) -> None:
        self.kind, self.group, self.places = kind, group, places
        self.admit = admit or (lambda name, thing: thing)
        self.own: set[str] = set()  # the names that no other package brings
        self._named: dict[str, T] = {}
        self._lazy: dict[str, Callable[[], T]] = {}
        self._placed: dict[str, T] = {}  # by their places

    @cached_property
    def _installed(self) -> dict[str, EntryPoint]:
        return {entry.name: entry for entry in entry_points(group=self.group)} if self.group else {}

    @property
    def installed(self) -> Mapping[str, EntryPoint]:
        """Return the entry points of other packages by name, without importing them."""
        return self._installed

    def outside(self) -> Iterator[Outside]:
        """Yield the things of installed packages, and those that were found by their places."""
        for name, entry in self.installed.items():
            package = entry.dist.name if entry.dist else entry.module.partition(".")[0]
            yield Outside(name, entry.module, package, entry.value)
        for name, thing in self._placed.items():
            yield Outside(name, getattr(thing, "__module__", ""), name.rpartition(":")[0], name)

    def _loaded(self, name: str) -> T:
        """Import the thing of an entry point; raise `CodecError`, which names the package, if that fails.

        The error has no text of the exception, because it may be sent to another machine.
        """
        entry = self._installed[name]
        package = entry.dist.name if entry.dist else entry.value
        try:
            thing = entry.load()
        except Exception as error:  # the package's code may raise anything
            raise CodecError(
                f"the {self.kind} {name!r} of {package} does not import",
                why=f"{type(error).__name__} in {entry.value}",
                hint=f"python -c 'import {entry.module}' shows the whole traceback",
            ) from error
        return self._named.setdefault(name, self.admit(name, thing))

    def add(self, name: str, thing: T) -> None:
        """Register a thing; raise ValueError if the name is taken."""
        if name in self._named or name in self._lazy:
            raise ValueError(f"{self.kind} {name!r} is registered twice")
        self._named[name] = thing
        self.own.add(name)

    def add_lazy(self, name: str, load: Callable[[], T]) -> None:
        """Register a thing of our own that `load` imports on first use; raise ValueError if the name is taken."""
        if name in self._named or name in self._lazy:
            raise ValueError(f"{self.kind} {name!r} is registered twice")
        self._lazy[name] = load
        self.own.add(name)

    def find(self, name: str, also: Iterable[str] = ()) -> T:
        """Return the thing of that name; raise `CodecError` with the nearest name, of `also` too, if there is none."""
        if name in self:
            return self[name]
        if self.places and ":" in name:
            if name not in self._placed:
                self._placed[name] = self.admit(name, placed(self.kind, name))
            return self._placed[name]
        known = sorted({*self, *also})
        near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.6)
        raise CodecError(
            f"no {self.kind} {name!r}", why=f"known: {', '.join(known)}", hint="".join(near) or "one of these"
        )

    @contextlib.contextmanager
    def lent(self, given: Any, thing: T) -> Iterator[str]:
        """Yield the place, `object:NAME` after what was `given`, under which `find` returns a thing for a while.

        Raise `UsageError` for a text: the plan names a thing that is registered.
        """
        if isinstance(given, str):
            why = "only an object or a class of this process is given beside the plan"
            hint = f'[server] reduce or optimizer = "{given}" in the plan'
            raise UsageError(f"{given!r} is a text", why=why, hint=hint)
        name = f"object:{getattr(given, '__name__', type(given).__name__)}"
        self._placed[name] = thing
        try:
            yield name
        finally:
            del self._placed[name]

    def __getitem__(self, name: str) -> T:
        if name in self._named:
            return self._named[name]
        if name in self._lazy:
            return self._named.setdefault(name, self._lazy[name]())
        return self._loaded(name) if name in self._installed else self._named[name]

    def __contains__(self, name: object) -> bool:
        return name in self._named or name in self._lazy or name in self._installed

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._lazy, *self._named, *self._installed]))

    def __len__(self) -> int:
        return len({*self._lazy, *self._named, *self._installed})


def placed(kind: str, place: str) -> Any:
    """Import the thing at MODULE:NAME or FILE.py:NAME; raise `CodecError` if that fails.

    The error has no text of the exception, because it may be sent to another machine.
    """
    where, _, name = place.rpartition(":")
    try:
        if not where.endswith(".py"):
            return getattr(importlib.import_module(where), name)
        module = f"thinwire_file_{hashlib.sha256(where.encode()).hexdigest()[:16]}"
        if module not in sys.modules:
            loader = SourceFileLoader(module, str(Path(where).resolve(strict=True)))
            made = importlib.util.module_from_spec(importlib.util.spec_from_loader(module, loader))  # type: ignore[arg-type]
            sys.modules[module] = made  # where dataclasses look for it
            try:
                loader.exec_module(made)
            except BaseException:
                del sys.modules[module]
                raise
        return getattr(sys.modules[module], name)
    except Exception as error:  # the module's code may raise anything
        raise CodecError(
            f"no {kind} at {place!r}",
            why=f"{type(error).__name__} while this process imported it",
            hint="MODULE:NAME of a module that the aggregator's Python finds, or /FOLDER/FILE.py:NAME",
        ) from error


@dataclass(frozen=True)
class Outside:
    """Holds a thing that is not ours: its name in a plan, its module, and the package or file that brings it."""

    name: str
    module: str
    package: str
    entry: str


@dataclass(frozen=True)
class Blame:
    """Holds the thing of others whose code raised an exception, or called another library that raised it."""

    kind: str
    name: str
    package: str
    entry: str  # MODULE:NAME, as its package says
    place: str  # FILE:LINE

    def said(self, error: BaseException) -> str:
        """Return the exception in a sentence for the user of this machine only: its text may hold data."""
        told = f": {error}" if str(error) else ""
        return f"the {self.kind} {self.name!r} of {self.package} raised {type(error).__name__}{told}"


def blamed(error: BaseException, *registries: Registry[Any]) -> Blame | None:
    """Return the thing of others that is innermost in the traceback; None if only our own code is in it."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        for kind, one in ((registry.kind, one) for registry in registries for one in registry.outside()):
            if _holds(one.module, frame.filename):
                return Blame(kind, one.name, one.package, one.entry, f"{frame.filename}:{frame.lineno}")
    return None


def _holds(name: str, filename: str) -> bool:
    """Return True if the file is the module of this name, or is in the same package."""
    module = sys.modules.get(name)
    if module is None or not module.__file__:
        return False
    beside = Path(module.__file__).parent in Path(filename).parents
    return filename == module.__file__ or (bool(module.__package__) and beside)
