"""A name, and what is built from it: the one way in which a codec, optimizer or reduce is found."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
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
