"""`thinwire` as it is, but the clients of an aggregator that it starts poll every second."""

from __future__ import annotations

import sys

from thinwire.cli.main import main
from thinwire.flower.fleet import FlowerFleet

POLL_S = 1.0

if __name__ == "__main__":
    defaults = FlowerFleet.__init__.__kwdefaults__
    assert defaults is not None
    defaults["poll_s"] = POLL_S
    sys.exit(main())
