"""What the API answers about devices, invitations and the door. `*_at` are wall-clock seconds since 1970."""

from __future__ import annotations

from pydantic import Field

from thinwire.web.schemas import Answer


class Task(Answer):
    """A task as a device has it. `differs`: sentences, one for each digest that is not that of the newest run."""

    name: str
    version: str = ""
    error: str = ""
    source_digest: str = ""
    layout_digest: str = ""
    differs: tuple[str, ...] = ()


class Measured(Answer):
    """Of `samples` that were seen: the median, and what nine of ten kept to. Null while they do not say.

    `least`: all that was sent is too little to tell a rate by, which may be higher.
    """

    p50: float | None = None
    p90: float | None = None
    samples: int = 0
    least: bool = False


class Link(Answer):
    """`up` and `down` in bits/s, `rtt` in seconds: as the aggregator measured them; null where nothing was measured.
    `rtt_s`, `skew_s` (how far its clock is behind): as its hello said.
    """

    rtt: Measured | None = None
    up: Measured | None = None
    down: Measured | None = None
    rtt_s: float | None = None
    skew_s: float | None = None


class Has(Answer):
    """What a device says that it has; null where it did not say. `sentence`: all that is known, in words."""

    cores: int | None = None
    memory_bytes: int | None = None
    free_bytes: int | None = None
    mains: bool | None = None
    metered: bool | None = None
    sentence: str = ""


class Device(Answer):
    """A device that may, might or may no longer reach the aggregator.

    `standing` is how the door takes it (pending, approved, revoked), which a plain row says only for a plain door;
    `sentence` says why. `heard_at`: when it was heard last. `left_at`: since when it is not heard of, where that is
    known.
    """

    device: str
    standing: str
    sentence: str
    state: str
    how: str
    came: str  # `how` in words
    fingerprint: str
    created_at: float
    online: bool
    seen_at: float | None
    heard_at: float | None
    left_at: float | None
    left_why: str
    tasks: list[Task]
    versions: dict[str, str]
    link: Link
    has: Has
    updates: int
    payload_up: int
    last_outcome: str


class Action(Answer):
    """What was done to a device's row, in words, by whom and when."""

    at: float
    who: str
    what: str
    sentence: str


class Asked(Answer):
    """One ask of a device and what came of it; see `models.Update`."""

    ask_id: str
    run_id: str
    round: int
    outcome: str
    reason: str
    asked_at: float | None
    asked_why: str
    instead_of: str
    work_reason: str
    arrived_at: float | None
    examples: int
    steps: int
    residual_ratio: float | None
    state_lost: str
    clipped: list[str]
    payload_up: int
    wire_up: int | None
    up_bytes_s: float | None


class Stays(Answer):
    """The rounds of a run whose models hold updates of a device."""

    run_id: str
    rounds: list[int]


class Declined(Answer):
    """The last time that a device's own policy said no, where that is among its last asks."""

    run_id: str
    round: int
    rule: str
    at: float | None


class DevicePage(Device):
    """A device with all that its page shows."""

    actions: list[Action]
    asked: list[Asked]
    stays: list[Stays]
    stays_text: str
    declined: Declined | None
    policy: str  # the digest of its policy, where it has one of its own
    seq: int
    now: float


class Invitation(Answer):
    """An invitation as it is listed; its secret is known to nobody here."""

    id: int
    name: str
    state: str
    sentence: str
    created_at: float
    expires_at: float
    approve_manually: bool
    who: str
    used_by: str
    used_at: float | None


class DoorRefusal(Answer):
    """What the door refused; `why` is for the operator, `told` is all that the outside learned."""

    at: float
    kind: str
    address: str
    name: str
    why: str
    told: str


class Compared(Answer):
    """What a person had before them when they decided: the order is refused when the key is another one by now."""

    fingerprint: str = Field(pattern=r"^[0-9a-f]{64}$")


class Decided(Answer):
    """What became of an approval or a revocation. `order`: whom to ask whether the aggregator has carried it out.

    `confirmed` is null while that is not known; `stays` is what remains of a device that was shut out.
    """

    device: str
    standing: str
    sentence: str
    order: int | None = None
    confirmed: bool | None = None
    stays: tuple[Stays, ...] = ()
    stays_text: str = ""


class Withdrawn(Answer):
    invitation: int
    sentence: str
