"""How a simulation's processes write: a reader sees the old or the new file, whoever is killed; a power cut may not."""

from __future__ import annotations

from pathlib import Path

from thinwire.core.home import disk_error


def write_replaced(path: Path, data: bytes) -> None:
    draft = path.with_name(f".{path.name}.draft")
    try:
        draft.write_bytes(data)
        draft.replace(path)
    except OSError as error:
        raise disk_error(error, path) from error
