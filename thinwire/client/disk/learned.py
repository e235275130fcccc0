"""What a client's folder holds that was made from local data, or may quote them; deleted when the device leaves."""

from __future__ import annotations

import shutil
from pathlib import Path

from thinwire.core.errors import DataLost

FOLDERS = ("runs", "downloads", "plans")
LOGS = ("client.log", "worker.log", "last-error.txt")  # an exception's text and what a task prints may hold data


def delete_learned(folder: Path) -> None:
    """Delete updates, residuals, models, plans and logs. The owner's settings stay; a link is removed, never followed.

    `DataLost` names what this disk did not delete.
    """
    found = [folder / name for name in FOLDERS] + [path for name in LOGS for path in folder.glob(f"{name}*")]
    for path in found:
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise DataLost(
                f"cannot delete {path}", why=error.strerror or str(error),
                hint="make it writable and leave again: it may hold what was learned from this device's data",
            ) from error  # fmt: skip
