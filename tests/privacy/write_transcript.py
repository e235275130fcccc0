"""Record a whole secure round: `python -m tests.privacy.write_transcript` writes a file if it is missing.

Five clients begin, and one is lost before it sends its masked vector. Four disclose their shares, of which three are
enough. The file has every message and what is needed to remove the masks by hand, in hexadecimal. It is never written
over: with other bytes, devices of two versions could not meet in one round.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.secure_cohort import Cohort, name_of, terms_of
from thinwire.core.types import PHASES, Phase
from thinwire.privacy.messages import Disclosure

FILE = Path(__file__).parents[1] / "golden" / "privacy" / "round.json"
LOST: dict[Phase, list[str]] = {"masked": [name_of(1)]}


def recorded() -> tuple[Cohort, dict[str, Any]]:
    """The cohort after its round, and the document of it."""
    cohort, requests = Cohort(terms_of(5, 3, lanes=25), 5, seed=7), dict[str, dict[str, str]]()
    closed = cohort.server.close

    def close() -> dict[str, bytes]:
        phase, found = cohort.server.phase, closed()
        requests[phase] = {name: raw.hex() for name, raw in found.items()}
        return found

    cohort.server.close = close  # type: ignore[method-assign]  # to record
    cohort.run(LOST)
    server = cohort.server
    disclosed = [
        {
            "holder": server._index[name],
            "dealer": dealer,
            "of": "root" if is_root else "self mask",
            "share": share.hex(),
        }
        for phase, name, raw in cohort.sent
        if phase == "unmask"
        for dealer, is_root, share in Disclosure.read(raw, 5).shares
    ]
    lanes, scalars = cohort.sum()
    return cohort, {
        "width": cohort.terms.width,
        "lanes": cohort.terms.lanes,
        "scalars": list(cohort.terms.scalars),
        "threshold": server.graph.t,
        "context0": cohort.context0.hex(),
        "context1": server._context1.hex(),
        "context2": server._context2.hex(),
        "clients": {
            str(index): {"name": one.name, "mask_x25519": one.mask.x25519.hex()}
            for index, one in enumerate(server._roster, 1)
        },
        "delivered": server._sharers,
        "survivors": server._survivors,
        "disclosed": disclosed,
        "masked": {
            str(server._index[name]): {
                "update": cohort.vectors[name].update.tobytes().hex(),
                "scalars": cohort.vectors[name].scalars.hex(),
            }
            for name in server.survivors
        },
        "sum": {"update": lanes.tolist(), "scalars": scalars},
        "messages": {phase: {name: raw.hex() for sent, name, raw in cohort.sent if sent == phase} for phase in PHASES},
        "requests": requests,
    }


def main() -> None:
    if not FILE.exists():
        FILE.write_text(json.dumps(recorded()[1], indent=1) + "\n")


if __name__ == "__main__":
    main()
