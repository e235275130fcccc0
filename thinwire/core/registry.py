"""A name, and what is built from it: the one way in which a codec, optimizer or reduce is found."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

from thinwire.core.errors import CodecError

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """Names to things of one kind; registering is one line, and a wrong name is answered with the nearest right one.

    >>> shapes: Registry[int] = Registry("shape"); shapes.add("square", 4); shapes["square"]
    4
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._named: dict[str, T] = {}

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

    def find(self, name: str) -> T:
        """The thing of that name; `CodecError` with the nearest names when there is none."""
        if name in self._named:
            return self._named[name]
        near = difflib.get_close_matches(name, self._named, n=3, cutoff=0.4) or sorted(self._named)
        raise CodecError(
            f"no {self.kind} {name!r}", why=f"known: {', '.join(sorted(self._named))}", hint=" or ".join(near)
        )

    def __getitem__(self, name: str) -> T:
        return self._named[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._named)

    def __len__(self) -> int:
        return len(self._named)
