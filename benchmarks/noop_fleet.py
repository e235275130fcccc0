"""Many devices that do not train in one process: a thread a device, each with a connection and a key of its own.

Run as `python -c "from benchmarks.noop_fleet import main; main()" URL FIRST LAST FOLDER TASK=TENSORSxROWSxCOLUMNS`.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from benchmarks.noop_client import Shape, serve


def main() -> None:
    """Serve until the process is ended."""
    url, first, last, folder, *tasks = sys.argv[1:]
    shapes = {task: Shape.parse(shape) for task, _, shape in (text.partition("=") for text in tasks)}
    threads = [
        threading.Thread(target=serve, args=(url, f"device-{number}", Path(folder) / f"device-{number}", shapes))
        for number in range(int(first), int(last))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
