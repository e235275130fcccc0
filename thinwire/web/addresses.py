"""What may stand in an address of the page: one pattern for each kind, for pages and API alike."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query

RunId = Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]{1,80}$", description="an id, its unique beginning, or latest")]
DeviceName = Annotated[str, Path(pattern=r"^[a-z0-9-]{1,63}$")]
Number = Annotated[int, Path(ge=1, le=2**31 - 1)]
Since = Annotated[int, Query(ge=1, le=2**31 - 1, alias="from")]
OfRound = Annotated[int | None, Query(ge=1, le=2**31 - 1, alias="round")]
