"""The last contact of each online device, as far as it may be shown.

During a run with Poisson sampling it would tell who was sampled. An assignment ends the waiting pull of a sampled
device when a round opens, and the device calls again at once. The others call when their own pulls end. So until such a
run is over, and until each device has called after it, every online device is shown as heard just now.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from thinwire.core.clock import heard_by
from thinwire.core.events import ENDED
from thinwire.core.link_state import SUSPECT_S
from thinwire.core.run_events import is_sampled

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from thinwire.store import RunRow


def last_contacts(runs: Sequence[RunRow], lock: Path | None) -> dict[str, float]:
    """Return the wall-clock time of the last contact of each online device, from the record beside the lock.

    `runs` are all runs. Without a record the result is empty.
    """
    heard, now = heard_by(lock) if lock else {}, time.time()
    return dict.fromkeys(heard, now) if any(_hides(run, now) for run in runs) else heard


def _hides(run: RunRow, now: float) -> bool:
    """Return True if the present contacts of devices may tell who was sampled in a run."""
    if run.source != "devices" or run.status in ("preparing", "queued") or not is_sampled(run.plan):
        return False
    return run.status not in ENDED or now - (run.finished_at or 0.0) <= 2 * SUSPECT_S
