"""`thinwire` as it is, but with masks of 0: a control, in which a search must find what masks hide."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

from thinwire.cli.main import main
from thinwire.privacy import participant, secure_round


def _unchanged(lanes: Any, masks: Iterable[Any]) -> None:
    """Add nothing."""


if __name__ == "__main__":
    with patch.object(participant, "add_masks", _unchanged), patch.object(secure_round, "add_masks", _unchanged):
        sys.exit(main())
