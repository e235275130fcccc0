"""The words that were typed for `start`: a service is started with the same ones, in the same folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from thinwire.core.home import write_atomically

FILE = "start.json"
ONCE = ("--background", "--once")  # of a start by hand: a service is neither


@dataclass(frozen=True)
class Typed:
    """`words` stand behind `thinwire NOUN start`, and were typed in `folder`."""

    words: tuple[str, ...]
    folder: Path

    def with_option(self, option: str, value: str) -> Typed:
        """With an option that these words leave open."""
        return Typed((*self.words, option, value), self.folder)

    def remember(self, place: Path) -> None:
        """Keep them beside the state that they belong to."""
        said = {"words": [word for word in self.words if word not in ONCE], "folder": str(self.folder)}
        write_atomically(place / FILE, json.dumps(said).encode())

    @classmethod
    def remembered(cls, place: Path) -> Typed | None:
        """Those of the last start here; None where it was never started, or the file is damaged."""
        try:
            said = json.loads((place / FILE).read_bytes())
            return cls(tuple(str(word) for word in said["words"]), Path(said["folder"]))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    @classmethod
    def now(cls) -> Typed:
        """Those of the command that runs (`thinwire.cli.app.main` hands them on); none where no command runs."""
        context = click.get_current_context(silent=True)
        said: Any = context.find_root().obj if context else None
        return cls(tuple(said or ())[2:], Path.cwd())


def understood(noun: str, verb: str, words: Sequence[str]) -> dict[str, Any]:
    """What `thinwire NOUN VERB` would make of these words; they are refused now, not at the next boot.

    It is looked for from the command that runs, so that a command needs to import no other.
    """
    root: Any = click.get_current_context().find_root().command
    command = root.commands[noun].commands[verb]
    return dict(command.make_context(f"thinwire {noun} {verb}", list(words)).params)
