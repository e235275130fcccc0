"""A name, and what is built from it: the one way in which a codec, optimizer or reduce is found."""

from __future__ import annotations

import difflib
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar

from thinwire.core.errors import CodecError

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """Names to things of one kind; registering is one line, and a wrong name is answered with the nearest right one.

    With a `group` also what is installed here under that group of entry points: it is imported when it is asked for,
    and must pass `admit`. What is our own keeps its name: no other package can take its place. A name that comes from
    outside never leads to code that nobody installed here.

    >>> shapes: Registry[int] = Registry("shape"); shapes.add("square", 4); shapes["square"]
    4
    """

    def __init__(self, kind: str, group: str = "") -> None:
        self.kind, self.group = kind, group
        self._named: dict[str, T] = {}

    def admit(self, name: str, thing: Any) -> T:
        """What an installed package gave, if it is what it must be; else `CodecError`."""
        admitted: T = thing
        return admitted

    @cached_property
    def _installed(self) -> dict[str, EntryPoint]:
        return {entry.name: entry for entry in entry_points(group=self.group)} if self.group else {}

    @property
    def installed(self) -> Mapping[str, EntryPoint]:
        """What other packages bring, by name; it need not hold what it says."""
        return self._installed

    def _loaded(self, name: str) -> T:
        """`CodecError` names the package; an exception's text stays here, for it may go to another machine."""
        entry = self._installed[name]
        package = entry.dist.name if entry.dist else entry.value
        try:
            thing = entry.load()
        except Exception as error:  # whatever the package's code raises
            raise CodecError(
                f"the {self.kind} {name!r} of {package} cannot be imported",
                why=f"{type(error).__name__} in {entry.value}",
                hint=f"python -c 'import {entry.module}' shows the whole traceback",
            ) from error
        return self._named.setdefault(name, self.admit(name, thing))

    def add(self, name: str, thing: T) -> None:
        if name in self._named:
            raise ValueError(f"{self.kind} {name!r} is registered twice")
        self._named[name] = thing

    def register(self, name: str) -> Callable[[T], T]:
        """As a decorator: `@codecs.register("int8")`."""

        def keep(thing: T) -> T:
            self.add(name, thing)
            return thing

        return keep

    def find(self, name: str, also: Iterable[str] = ()) -> T:
        """The thing of that name; `CodecError` with the nearest name, of `also` too, when there is none."""
        if name in self._named or name in self._installed:
            return self[name]
        known = sorted({*self, *also})
        near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.6)
        raise CodecError(
            f"no {self.kind} {name!r}", why=f"known: {', '.join(known)}", hint="".join(near) or "one of these"
        )

    def __getitem__(self, name: str) -> T:
        if name not in self._named and name in self._installed:
            return self._loaded(name)
        return self._named[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._named, *self._installed]))

    def __len__(self) -> int:
        return len({*self._named, *self._installed})


# Whose code an exception came from, where another package's is called: what is not ours is not called our defect.


@dataclass(frozen=True)
class Blame:
    """The installed thing in whose code an exception was raised, or whose call of another library raised it."""

    kind: str
    name: str
    package: str
    entry: str  # MODULE:NAME, as its package says
    place: str  # FILE:LINE

    def said(self, error: BaseException) -> str:
        """For who stands before this machine: an exception's own text may hold data, and is for nobody else."""
        told = f": {error}" if str(error) else ""
        return f"the {self.kind} {self.name!r} of {self.package} raised {type(error).__name__}{told}"


def blamed(error: BaseException, *registries: Registry[Any]) -> Blame | None:
    """Who of what is installed stands innermost in the traceback; None where it is our own code alone."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        for kind, name, entry in ((r.kind, *found) for r in registries for found in r.installed.items()):
            if _holds(entry, frame.filename):
                package = entry.dist.name if entry.dist else entry.module.partition(".")[0]
                return Blame(kind, name, package, entry.value, f"{frame.filename}:{frame.lineno}")
    return None


def _holds(entry: EntryPoint, filename: str) -> bool:
    """Whether this file is the module of an entry point, or stands in the same package."""
    module = sys.modules.get(entry.module)
    if module is None or not module.__file__:
        return False
    beside = Path(module.__file__).parent in Path(filename).parents
    return filename == module.__file__ or (bool(module.__package__) and beside)
