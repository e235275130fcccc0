"""The schemas of the API's responses about devices, invitations and refusals.

`*_at` are wall-clock seconds since 1970.
"""

from __future__ import annotations

from pydantic import Field

from thinwire.web.round_schemas import Update
from thinwire.web.schemas import Answer


class Task(Answer):
    """A task of a device. `differs` has a sentence for each digest that differs from that of the latest run."""

    name: str
    version: str = ""
    error: str = ""
    source_digest: str = ""
    layout_digest: str = ""
    differs: tuple[str, ...] = ()


class Measured(Answer):
    """Statistics of `samples` measurements: the median `p50`, and the bound `p90` that nine of ten kept.

    Both are null while unknown. With `least` all transfers were too small to measure a rate, and the real rate may be
    higher.
    """

    p50: float | None = None
    p90: float | None = None
    samples: int = 0
    least: bool = False


class Link(Answer):
    """A device's link by the aggregator's measurements: `up` and `down` in bits/s, `rtt` in seconds; null if unknown.

    `rtt_s` and `skew_s`, the seconds that the device's clock is behind, are from its last registration.
    """

    rtt: Measured | None = None
    up: Measured | None = None
    down: Measured | None = None
    rtt_s: float | None = None
    skew_s: float | None = None


class Has(Answer):
    """The capabilities that a device reports; null if it does not. `sentence` describes all that is known."""

    cores: int | None = None
    memory_bytes: int | None = None
    free_bytes: int | None = None
    mains: bool | None = None
    metered: bool | None = None
    sentence: str = ""


class Device(Answer):
    """A device that is, may be, or was allowed to reach the aggregator.

    `standing` is the state in which the device API treats it: pending, approved or revoked. If the device API has TLS,
    the row's own `state` may differ from it. `sentence` gives the reason. `last_seen_at` is the last contact; a device
    that is online and silent beyond `suspect_at` has missed a pull.
    `disconnected_at` is the moment of the disconnect, if known.
    """

    device: str
    standing: str
    sentence: str
    state: str
    how: str
    came: str  # the sentence for `how`
    fingerprint: str
    created_at: float
    online: bool
    seen_at: float | None
    last_seen_at: float | None
    suspect_at: float | None
    disconnected_at: float | None
    disconnect_reason: str
    tasks: list[Task]
    versions: dict[str, str]
    link: Link
    has: Has
    tags: list[str]
    updates: int
    payload_up: int
    last_outcome: str
    last_run: str  # in which that was
    last_is_over: bool  # of that run
    next_step: str  # the one thing to do about it now; "" if there is none


class Action(Answer):
    """An entry of a device's audit log: what was done, by whom and when, with a sentence."""

    at: float
    who: str
    what: str
    sentence: str


class DeviceAssignment(Update):
    """An assignment of a device and its outcome, with the rate of its upload in bytes/s."""

    run_id: str
    up_bytes_s: float | None = None


class Stays(Answer):
    """The rounds of a run whose models contain updates of a device."""

    run_id: str
    rounds: list[int]


class Declined(Answer):
    """The last refusal by a device's own policy in a run that is not over, if among the device's last assignments."""

    run_id: str
    round: int
    rule: str
    at: float | None


class DevicePage(Device):
    """A device with all that its page shows."""

    actions: list[Action]
    assignments: list[DeviceAssignment]
    stays: list[Stays]
    stays_text: str
    declined: Declined | None
    policy: str  # the digest of its policy; "" for the default one
    seq: int
    now: float


class ListedInvitation(Answer):
    """An invitation in the list; its secret is not stored."""

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


class RefusedRequest(Answer):
    """A refusal by the device API: `why` is for users of the dashboard, `told` is all that the sender received."""

    at: float
    kind: str
    address: str
    name: str
    why: str
    told: str


class ShownFingerprint(Answer):
    """Holds the fingerprint that a person saw when they decided; the decision is refused if the key has changed."""

    fingerprint: str = Field(pattern=r"^[0-9a-f]{64}$")


class Decided(Answer):
    """The result of an approval or a revocation.

    `command` is the number of the command, by which to read whether the aggregator has carried it out. `confirmed` is
    null while that is unknown. `stays` lists the aggregated updates of a revoked device.
    """

    device: str
    standing: str
    sentence: str
    command: int | None = None
    confirmed: bool | None = None
    stays: tuple[Stays, ...] = ()
    stays_text: str = ""


class MadeInvitation(Answer):
    """A new invitation: its text, and the command to type on the device. Neither is shown again."""

    id: int
    name: str
    url: str
    urls: tuple[str, ...]
    invitation: str
    command: str
    expires_at: float


class Renamed(Answer):
    """The new name of a device, and the name that it had."""

    device: str
    was: str


class Tagged(Answer):
    """All tags of a device."""

    device: str
    tags: list[str]


class HealthRow(Answer):
    """Holds the figures of a device from `begin_at` to `end_at`; one is null if nothing was measured.

    `online` is the share of the time for which it was online. These are medians over the replies to assignments of
    that time: `outside_s` (seconds between an assignment and its reply that were not the device's own work: round trips
    and waiting), `up_bits_s`, `down_bits_s` and `step_s` (seconds a local step). `failures` counts failed and dropped
    updates.
    """

    begin_at: float
    end_at: float
    online: float | None
    outside_s: float | None
    up_bits_s: float | None
    down_bits_s: float | None
    step_s: float | None
    assignments: int | None
    failures: int | None


class Health(Answer):
    """The health of a device over time. Earlier assignments than `read_since` were too many to be read.

    `not_known` is the reason why figures are missing, if a run hides them.
    """

    device: str
    span: str
    rows: list[HealthRow]
    read_since: float | None
    not_known: str


class Withdrawn(Answer):
    """The result of withdrawing an invitation."""

    invitation: int
    sentence: str
