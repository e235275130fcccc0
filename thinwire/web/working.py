"""What each client does now: from its newest ask, and from whether its device is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from thinwire.store import ClientRow, DeviceInfo, RoundRow, RunRow, UpdateRow
from thinwire.web import models

ENDED = ("done", "failed", "stopped")


def client_states(
    run: RunRow,
    newest: RoundRow | None,
    latest: Sequence[Sequence[UpdateRow]],
    clients: Sequence[ClientRow],
    devices: Sequence[DeviceInfo],
) -> list[models.Client]:
    """Everybody who was asked, or was not asked in the newest round and why; `latest` are rounds, newest first."""
    known = {info.row.name: info for info in devices}
    # who is busy with an earlier round is asked nothing in the newest
    open_asks = {u.device: u for rows in reversed(latest[1:]) for u in rows if u.outcome == "asked"}
    open_asks |= {u.device: u for u in (latest[0] if latest else ()) if u.outcome in ("asked", "accepted")}
    working = open_asks if newest is not None and not newest.reason and run.status not in ENDED else {}
    examples = {u.device: u.examples for rows in reversed(latest) for u in rows if u.examples}
    ratios = {u.device: u.residual_ratio for rows in reversed(latest) for u in rows if u.residual_ratio is not None}
    not_asked = dict(newest.not_asked) if newest is not None and run.status not in ENDED else {}
    shown = [
        models.Client(
            **{name: getattr(row, name) for name in _COUNTS}, examples=examples.get(row.device, 0),
            residual_ratio=ratios.get(row.device),
            **_now(run, working.get(row.device), known.get(row.device), not_asked.get(row.device)),
        )
        for row in clients
    ]  # fmt: skip
    absent = sorted(not_asked.keys() - {row.device for row in clients})
    return shown + [_never_asked(name, run, known.get(name), not_asked) for name in absent]


_COUNTS = (
    "device", "asked", "arrived", "folded_count", "late", "dropped", "failed", "last_outcome", "last_at",
    "payload_up", "payload_down", "wire_up", "wire_down",
)  # fmt: skip


def _never_asked(name: str, run: RunRow, info: DeviceInfo | None, why: Mapping[str, str]) -> models.Client:
    return models.Client(
        device=name, asked=0, arrived=0, folded_count=0, late=0, dropped=0, failed=0, examples=0, last_outcome="",
        last_at=None, payload_up=0, payload_down=0, wire_up=None, wire_down=None, **_now(run, None, info, why[name]),
    )  # fmt: skip


def _now(run: RunRow, ask: UpdateRow | None, info: DeviceInfo | None, not_asked: str | None) -> dict[str, object]:
    """`state` is one word for the eye, `state_text` the same for reading."""
    if info is not None and not info.online:
        return {"state": "away", "state_text": "away", "since": info.heard_at}
    if run.status in ENDED:
        return {"state": "idle", "state_text": "simulated" if run.source == "sim" else "idle"}
    if ask is not None and ask.outcome == "accepted":
        return {"state": "arrived", "state_text": f"round {ask.round} is being folded"}
    if ask is not None:
        return {"state": "working", "state_text": f"in round {ask.round}", "since": ask.asked_at}
    if not_asked:
        return {"state": "not-asked", "state_text": f"not asked: {not_asked}"}
    return {"state": "idle", "state_text": "idle"}
