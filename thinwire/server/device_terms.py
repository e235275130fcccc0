"""Terms of a round for each of its devices: the codec, the work, the deadline, and whether the device evaluates.
A reply's header is checked against them.

This gathers what is known of devices, from the journal and from earlier runs, and passes it to the pure decisions in
`policy/`. `round_mode.py` opens a round with the result, and `round_runner.py` selects devices later. Headers of
replies come from devices, and are not trusted: `invalid_reply` looks at one before a round sees it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from thinwire.aggregation.plan_codecs import codec_of, rungs
from thinwire.core.events import RoundOpened
from thinwire.core.formatting import Reason
from thinwire.core.protocol import without_facts
from thinwire.core.types import ReplyHeader, assignment_id_of, assignment_round, is_follow_up
from thinwire.server.context import RunContext
from thinwire.server.policy.assignment_terms import (
    DEADLINE_SHARE,
    Deadline,
    DeviceSpeed,
    RungChoice,
    auto_deadline,
    choose_rung,
    choose_work,
    fixed,
)
from thinwire.server.policy.cohort import SelectionWeights, evaluates, in_time, replacement_candidates, weights
from thinwire.server.policy.eligibility import AbleDevices
from thinwire.server.round_events import Replacement
from thinwire.store.device_profiles import update_bytes, work_key, workload

Expected = Mapping[str, Sequence[float | None]]  # device -> p90 in seconds for each codec; None: unknown


def codecs_of(running: RunContext) -> list[str]:
    """Return the codecs of the next round, least compressed first: only one if the plan has no ladder.

    A secure round has the lattice in place of a codec.
    """
    uplink, run_state = running.plan.uplink, running.run_state
    if running.plan.secure.enabled:
        return [running.codec]
    if uplink.ladder:
        return rungs(uplink)
    return [codec_of(uplink, run_state.steps_made + len(run_state.open_rounds.rounds))]


def expected(running: RunContext, number: int, sizes: Mapping[str, int], codecs: Sequence[str]) -> Expected:
    """Return for each device the seconds within which nine of ten replies arrive, for each of the codecs.

    `sizes` maps each device to the bytes of the model that it is sent.
    """
    plan, work, sizes_seen = running.plan, work_key(running.plan, running.layout), running.run_state.codecs.update_sizes
    ups = [update_bytes(codec, running.layout, sizes_seen) for codec in codecs]
    found = dict[str, list[float | None]]()
    for device, down in sizes.items():
        known = running.device_profiles.device(device, work)
        times = [known.seconds(workload(plan, number, down, up)) for up in ups]
        found[device] = [time.p90 if time else None for time in times]
    return found


def weights_of(running: RunContext, number: int, candidates: Sequence[str]) -> SelectionWeights:
    """Return the selection weights of the candidates.

    The plan decides by what: the seconds of a local step, or of downloading the model and sending the smallest update.
    """
    plan, work, selection = running.plan, work_key(running.plan, running.layout), running.plan.cohort.selection
    if selection == "uniform":
        return SelectionWeights()
    known = {device: running.device_profiles.device(device, work) for device in candidates}
    if selection == "speed":
        return weights(selection, {d: one.step.p50 if one.step else None for d, one in known.items()}, "step")
    up = update_bytes(codecs_of(running)[-1], running.layout, running.run_state.codecs.update_sizes)
    sent = {d: workload(plan, number, running.distributor.payload_for(d).size, up) for d in candidates}
    return weights(selection, {d: one.travels_s(sent[d]) for d, one in known.items()}, "exchange")


def deadline_of(running: RunContext, times: Expected, wanted: int, min_updates: int) -> Deadline:
    """Return the plan's deadline, or the automatic one, with its reason.

    The automatic one follows from the devices' links and speed with the smallest codec. It is multiplied by the number
    of waves if `max_concurrency` splits the selected devices. `min_updates` is the number of updates that a step needs.
    """
    if (seconds := running.plan.cohort.deadline_s) != "auto":
        return fixed(seconds)
    found = auto_deadline({device: own[-1] for device, own in times.items()}, wanted, min_updates)
    return running.mode.deadline_in_waves(found, len(times))


def rungs_of(running: RunContext, times: Expected, codecs: Sequence[str], fits_s: float) -> dict[str, RungChoice]:
    """Return each device's rung of the codec ladder, with the reason; empty if the plan has no ladder."""
    if len(codecs) == 1:
        return {}
    positions = running.run_state.codecs.positions
    return {device: choose_rung(codecs, own, fits_s, positions.get(device)) for device, own in times.items()}


def own_terms(running: RunContext, number: int, device: str, down_bytes: int, left_s: float) -> dict[str, Any]:
    """Return the fields of `ClientSelected` for a device that is selected `left_s` s before its round ends."""
    return {
        **own_work(running, device, left_s),
        **own_codec(running, number, device, down_bytes, left_s),
        "evaluates": evaluates(running.plan, number, device),
    }


def own_codec(running: RunContext, number: int, device: str, down_bytes: int, left_s: float) -> dict[str, Any]:
    """Return the codec fields of `ClientSelected` for a device that is selected `left_s` s before the round ends.

    They are empty without a ladder. With an automatic deadline the codec makes the round not much longer than the
    smallest codec would.
    """
    codecs = codecs_of(running)
    if len(codecs) == 1:
        return {}
    times = expected(running, number, {device: down_bytes}, codecs)
    fits_s = DEADLINE_SHARE * left_s
    if running.plan.cohort.deadline_s == "auto":
        fits_s = min(fits_s, deadline_of(running, times, wanted=1, min_updates=1).fits_s)
    choice = rungs_of(running, times, codecs, fits_s)[device]
    return {"codec": choice.position.codec, "codec_reason": choice.reasons}


def most_common(chosen: Mapping[str, RungChoice], codecs: Sequence[str]) -> str:
    """Return the codec of most devices, and the less compressed one of two; without a ladder the only codec."""
    selected = [choice.position.codec for choice in chosen.values()]
    return max(codecs, key=selected.count)


def own_work(running: RunContext, device: str, deadline_s: float) -> dict[str, Any]:
    """Return the work fields of `ClientSelected` for a device; empty if the plan sets the work and not its speed."""
    local = running.plan.local
    if local.steps != "auto":
        return {}
    speed = running.run_state.speeds.of(device)
    before = None if speed else _speed_in_earlier_runs(running, device)
    work = choose_work(local, speed or before, deadline_s)
    reasons = [*work.reasons, *([Reason("earlier-runs", {})] if before else [])]
    return {"steps": work.steps, "batch": work.batch, "work_reason": reasons}


def _speed_in_earlier_runs(running: RunContext, device: str) -> DeviceSpeed | None:
    """Estimate a device's speed from earlier runs, for use until it has replied in this run.

    Return None if any part of it was never measured with this model and batch size.
    """
    plan, local = running.plan, running.plan.local
    known = running.device_profiles.device(device, work_key(plan, running.layout))
    up = update_bytes(running.codec, running.layout, running.run_state.codecs.update_sizes)
    evaluation = workload(plan, 1, running.distributor.payload_for(device).size, up)  # without a local step
    rest = known.seconds(evaluation)
    if known.step is None or known.epoch_steps is None or rest is None:
        return None
    examples = round(known.epoch_steps.p50 * local.batch * local.accumulate)
    return DeviceSpeed(known.step.p90 / local.batch, rest.p90, examples)


MAX_CODEC_LETTERS = 64  # in a reply that names a codec; the frames themselves decide whether they can be decoded


def invalid_reply(running: RunContext, header: ReplyHeader) -> tuple[str, str] | None:
    """Return kind and text of the failure if a reply is not a valid update of this run, otherwise None.

    A reply is valid only if its assignment went to the same device. It must have frames, and start from the version
    that the assignment named. Under masks and with privacy its header tells nothing of the client. The update of an
    invalid reply is not dropped: its assignment fails.
    """
    if running.plan.is_protected and header != without_facts(header):
        return "protocol", "an update whose header has facts about its client, in a run that may know none"
    if header.update_id.device in running.revoked():
        return "refused", "revoked"
    assigned = running.run_state.ledger.find(header.assignment_id, header.update_id.device)
    if assigned is None and not is_forgotten(running, header):
        return "protocol", "it replies to no assignment of its own"
    if not header.parts:
        return "protocol", "an answer without frames"
    if assigned is not None and header.base_version != assigned.base_version:
        return "base-mismatch", f"trained from version {header.base_version}, assigned from {assigned.base_version}"
    if len(header.codec) > max(MAX_CODEC_LETTERS, len(assigned_codec(running, header))):
        return "protocol", f"it names a codec in {len(header.codec)} letters, and its assignment has a shorter one"
    return None


def is_forgotten(running: RunContext, header: ReplyHeader) -> bool:
    """Return True if the device may have had this assignment in a round that the ledger has forgotten."""
    name = assignment_id_of(
        running.run_id,
        assignment_round(header.assignment_id),
        header.update_id.device,
        is_follow_up(header.assignment_id),
    )
    return header.assignment_id == name and running.run_state.ledger.is_forgotten(name)


def assigned_codec(running: RunContext, header: ReplyHeader) -> str:
    """Return the codec that was assigned for this reply.

    The codec of a late reply, or of another device, may differ from the codec of most devices.
    """
    assigned = running.run_state.ledger.find(header.assignment_id, header.update_id.device)
    return assigned.codec if assigned else running.codec


def assigned_steps(running: RunContext, header: ReplyHeader) -> int:
    """Return the steps that were assigned for this reply; 0 if the plan counts epochs instead."""
    steps = running.plan.local.steps
    if steps == "auto":
        assigned = running.run_state.ledger.find(header.assignment_id, header.update_id.device)
        return assigned.steps if assigned else 0
    return steps or 0


class Replacements:
    """Candidates for replacements in a round: connected, able and idle devices that are not in its `assignments`."""

    def __init__(self, running: RunContext, opened: RoundOpened, assignments: Mapping[str, str]) -> None:
        self._running, self._opened, self._assignments = running, opened, assignments
        self._sampled = deque(opened.later)  # sampled at the opening: selected first when a slot is free
        self._pool = AbleDevices(running.eligibility, running.run_state.backoff)

    def in_time(self, left_s: float) -> Iterator[Replacement]:
        """Yield the candidates that can reply within `left_s` seconds, first those that the round sampled at its
        opening.

        The search runs lazily. A round that needs more devices than are free wants those that other runs have.
        """
        running, run_state, opened = self._running, self._running.run_state, self._opened
        while self._sampled and self._sampled[0] in self._assignments:
            self._sampled.popleft()
        terms = left_s, run_state.reply_seconds, opened.deadline_s
        for device in in_time(self._sampled, *terms):
            if running.is_free(device):
                yield self._replacement(device)
        sampled = set(self._sampled)
        able = self._pool.now(self._assignments, running.elapsed)
        idle = (device for device in able if device not in sampled and running.is_free(device))
        for device in replacement_candidates(idle, *terms, running.plan.run.seed, opened.round):
            yield self._replacement(device)
        running.leases.want(running.run_id, running.leases.reasons(running.run_id, able))

    def _replacement(self, device: str) -> Replacement:
        """Return the device as a candidate, with its `assignment_id` in this round."""
        return Replacement(device, assignment_id_of(self._running.run_id, self._opened.round, device))
