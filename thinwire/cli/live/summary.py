"""What the demo came to: one document, and the same as a table with what to type next."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from thinwire.cli import say
from thinwire.cli.places import again
from thinwire.cli.runs.shown import total

if TYPE_CHECKING:
    from thinwire.store import Store


def document(store: Store, run_id: str) -> dict[str, Any]:
    """The run's part of `thinwire demo --json`; bytes are those of both ways, and of each."""
    row = store.run(run_id)
    rounds = store.rounds(run_id)
    spent: Counter[str] = Counter()
    for one in rounds:
        spent.update(one.spent)
    return {
        "run_id": run_id,
        "status": row.status,
        "rounds": row.rounds_closed,
        "closed_reasons": [one.reason for one in rounds if one.closed_at],
        "accuracy": row.metrics.get("accuracy"),
        "accuracy_uncompressed": None,
        "accuracy_centralised": None,
        "payload_bytes": total(row.payload_up, row.payload_down),
        "wire_bytes": total(row.wire_up, row.wire_down),
        "dense_bytes": total(row.dense_up, row.dense_down),
        "payload_up_bytes": row.payload_up,
        "payload_down_bytes": row.payload_down,
        "wire_up_bytes": row.wire_up,
        "wire_down_bytes": row.wire_down,
        "dense_up_bytes": row.dense_up,
        "dense_down_bytes": row.dense_down,
        "uplink_ratio": row.dense_up / row.payload_up if row.payload_up else None,
        "late": row.late,
        "dropped": row.dropped,
        "failed": row.failed,
        "rounds_s": sum(one.seconds or 0.0 for one in rounds),
        "spent_s": dict(spent),
    }


def tell_table(found: dict[str, Any]) -> None:
    """The table on stdout, what to type next on stderr."""
    say.line()
    for name in ("accuracy", "accuracy_uncompressed", "accuracy_centralised"):
        label = {"accuracy": "over thin wires"}.get(name, name.removeprefix("accuracy_"))
        say.line(f"accuracy   {say.figure(found[name])}  {label}")
    say.line()
    ways = ("up", "down")
    rows = [(way, *(say.size(found[f"{kind}_{way}_bytes"]) for kind in ("payload", "wire", "dense"))) for way in ways]
    say.table(("bytes", "payload", "wire", "dense fp32"), rows, right=("payload", "wire", "dense fp32"))
    say.line(f"uplink     {found['uplink_ratio'] or 0:.0f} times fewer payload bytes than dense fp32")
    say.line()
    reasons = ", ".join(f"{count} {reason}" for reason, count in Counter(found["closed_reasons"]).items())
    say.line(f"rounds     {found['rounds']} of {found['clients']} clients, closed for: {reasons}")
    say.line(f"updates    late {found['late']}, dropped {found['dropped']}, failed {found['failed']}")
    say.line(f"seconds    {found['wall_s']:.0f} in all, {found['rounds_s']:.0f} of them in rounds; along the slowest:")
    stages = sorted(found["spent_s"].items(), key=lambda item: -item[1])
    say.line(
        "           " + ", ".join(f"{name.removesuffix('_s')} {value:.1f}" for name, value in stages if value > 0.05)
    )
    say.note("")
    home = found["home"]
    say.note("next")
    say.note(f"  every round of it       {again('runs show latest', home)}")
    say.note(f"  take the model          {again('runs model latest --out model.safetensors', home)}")
    say.note("  a model of your own     thinwire init mine")
    say.note(f"  remove all of this      rm -r {home}")
