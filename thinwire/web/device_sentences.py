"""What a person wants to know about a device, an invitation or a decision, in one sentence each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from thinwire.core.texts import duration
from thinwire.store import DeviceAction, DoorNote, InvitationRow

CAME = {
    "loopback": "over this machine's own address",
    "invitation": "with an invitation",
    "manual": "approved by a person",
    "stock": "as a stock Flower node, by its public key",
}
DOES = {
    "enrol": "came", "join": "joined", "add": "was added by its public key", "approve": "was approved",
    "revoke": "was shut out", "leave": "left, and shut itself out",
}  # fmt: skip
DECIDING = ("enrol", "join", "add", "approve", "revoke", "leave")


def standing(state: str, how: str, tls: bool) -> str:
    """How the door takes a device: one that came over loopback waits for a person once the door speaks TLS."""
    return "pending" if state == "approved" and how == "loopback" and tls else state


def waits(state: str, how: str, invitation: int | None) -> str:
    """Why a device is pending."""
    if state == "approved":
        return (
            "It came over this machine's own address, which lets nobody in now that the door is open to other machines."
        )
    if how == "invitation":
        which = f"invitation {invitation}" if invitation else "an invitation"
        return f"It joined with {which}, which asks for approval by hand."
    return "Its key is known here, and nobody has approved it yet."


def let_in(how: str, last: DeviceAction | None) -> str:
    """By what an approved device may take part."""
    if last is not None and last.what in ("approve", "add"):
        return f"Approved by {last.who}."
    return {
        "loopback": "Let in by itself: it came over this machine's own address.",
        "invitation": "Let in by the invitation that it joined with.",
    }.get(how, "Approved.")


def out(last: DeviceAction | None) -> str:
    """By whom a device was shut out."""
    if last is None:
        return "Shut out."
    return "It left by itself." if last.what == "leave" else f"Shut out by {last.who}."


def action(said: DeviceAction) -> str:
    """What was done and how: `joined: invitation 3, from 192.0.2.7:40000, pending`."""
    if said.what == "rename":
        return f"was renamed: it {said.detail}"
    words = DOES.get(said.what, said.what)
    return f"{words}: {said.detail}" if said.detail else words


def invited(row: InvitationRow, now: float) -> str:
    """What became of an invitation."""
    match row.state:
        case "open":
            by_hand = "; who comes waits for approval" if row.approve_manually else ""
            return f"open for {_left(row.expires_at - now)} more{by_hand}"
        case "used":
            return f"used by {row.used_by}"
        case "withdrawn":
            return "withdrawn before anybody used it"
        case "expired":
            return "expired unused"


def _left(count: float) -> str:
    return duration(max(0.0, count)) if count < 48 * 3600 else f"{count / 86400:.0f} days"


def told(note: DoorNote) -> str:
    """What the outside learned of a refusal: of an invitation only that it cannot be used."""
    return "no invitation that can be used" if note.kind == "join" else note.why


def differs(what: str, run_id: str) -> str:
    return f"its {what} is not that of {run_id}"


def stays(rounds: Mapping[str, Sequence[int]]) -> str:
    """Where the updates of a device are part of a model.

    >>> stays({"digits-1": [1, 2, 3, 5], "ecg-2": [4]}), stays({})
    ('digits-1 rounds 1–3, 5; ecg-2 round 4', 'no model')
    """
    said = []
    for run_id, numbers in rounds.items():
        spans: list[list[int]] = []
        for number in numbers:
            if spans and number == spans[-1][1] + 1:
                spans[-1][1] = number
            else:
                spans.append([number, number])
        shown = ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in spans)
        said.append(f"{run_id} {'round' if len(numbers) == 1 else 'rounds'} {shown}")
    return "; ".join(said) or "no model"


def approved(name: str, aggregator: str) -> str:
    when = "when an aggregator is running again" if aggregator == "gone" else "at its next call"
    return f"{name} is approved: it is let in {when}."


def shut_out(name: str, aggregator: str, confirmed: bool | None) -> str:
    """How far a revocation has gone: the row counts at once, what was open is cleared by the aggregator."""
    if confirmed:
        return f"{name} is shut out, and what was open is cleared: its calls, uploads, asks and answers not yet folded."
    if confirmed is False:
        return f"{name} was approved again before the aggregator had carried that out."
    if aggregator == "gone":
        return f"{name} is shut out. No aggregator is running: the next one applies it before its door opens."
    return f"{name} is shut out: the door refuses it from now on. The aggregator is clearing what was open."


def withdrawn(number: int) -> str:
    return f"Invitation {number} is withdrawn: nobody can join with it."
