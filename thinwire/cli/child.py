"""`python -m thinwire.cli.child MODULE ...` runs a module that ends with the process that began it.

A parent that is killed outright cannot end its children: a page that outlived its aggregator would hold the port.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time

LOOK_S = 0.2


def end_with(parent: int) -> None:
    """End this process, softly and then hard, once `parent` is no longer its parent."""
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(2.0)
    os._exit(0)


def main() -> None:
    parent = int(os.environ.get("THINWIRE_PARENT", os.getppid()))
    threading.Thread(target=end_with, args=(parent,), name="parent", daemon=True).start()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
