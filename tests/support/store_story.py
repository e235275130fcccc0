"""Runs that are made up: plans, heads, and whole histories of events as the server writes them."""

from __future__ import annotations

from hypothesis import strategies as st

from thinwire.core.events import (
    ClientFailed,
    ClientReconnected,
    ClientSelected,
    DropReason,
    Evaluated,
    Event,
    ModelStored,
    RoundClosed,
    RoundOpened,
    RunStatusChanged,
    UpdateAccepted,
    UpdateAggregated,
    UpdateDropped,
)
from thinwire.core.fleet import TaskReport
from thinwire.core.layout import Layout
from thinwire.core.plan import RunPlan
from thinwire.core.serialization import reply_to_json
from thinwire.core.types import Part, ReplyHeader, Timings, Transfer, UpdateId
from thinwire.store import Store

PLAN = RunPlan.parse('[run]\ntask = "digits"\nrounds = 4\n[local]\nlr = 0.5')
LAYOUT = Layout.of({"w": (3, 2), "b": (2,)})
DENSE = LAYOUT.size * 4
DEVICES = ("pi-01", "pi-02", "pi-03")


def new_run(store: Store, task: str = "digits", source: str = "devices") -> str:
    run_id = store.create_run(task, PLAN, LAYOUT, TaskReport(task, codecs=("int8",)), source=source)  # type: ignore[arg-type]  # a test may say a plain str
    store.record(run_id, [ModelStored(1.0, 0, "aa", "v0.model", [("full/0", 32, "ff")]), status("queued")])
    return run_id


def status(name: str, at: float = 2.0, exit_code: int = 0) -> RunStatusChanged:
    return RunStatusChanged(at, name, f"is {name}", exit_code)  # type: ignore[arg-type]  # a test may say a plain str


def opened(run_id: str, number: int, devices: tuple[str, ...] = DEVICES) -> list[Event]:
    assignments = {device: f"{run_id}.{number}.{device}" for device in devices}
    first = RoundOpened(
        10.0 * number, number, 1.0, number - 1, "aa", list(devices), assignments, "int8", 60.0, len(assignments), 1
    )
    return [
        first,
        *(
            ClientSelected(10.0 * number, number, device, assignment_id, 1000)
            for device, assignment_id in assignments.items()
        ),
    ]


def header(run_id: str, number: int, device: str, sequence: int = 0, wire: bool = True) -> ReplyHeader:
    return ReplyHeader(
        f"{run_id}.{number}.{device}", UpdateId(run_id, device, sequence or number), number - 1, 40, 5, 5.0, 1.5,
        {"train/loss": (3.0, 2.0)}, Timings(0.1, 0.2, 0.3, 0.4, 0.5), (Part("frame/0", 100 + number, "ff"),),
        residual_norm=0.5, transfer=Transfer(11.0, 12.0, 13.0, 500, 600, 3) if wire else Transfer(11.0, 12.0, 13.0),
    )  # fmt: skip


def accepted(reply: ReplyHeader, assignment_round: int, round_number: int = 0) -> UpdateAccepted:
    number = round_number or assignment_round
    return UpdateAccepted(
        14.0, number, assignment_round, reply.update_id.device, reply.assignment_id, str(reply.update_id),
        number - assignment_round,
        1.0, number != assignment_round, 4.0, reply_to_json(reply),
    )  # fmt: skip


def dropped(reply: ReplyHeader, assignment_round: int, reason: DropReason, round_number: int = 0) -> UpdateDropped:
    return UpdateDropped(
        15.0, round_number or assignment_round, assignment_round, reply.update_id.device, reply.assignment_id,
        str(reply.update_id),
        reason, 5.0, reply_to_json(reply),
    )  # fmt: skip


def closed(number: int, aggregated: list[str], gone: tuple[str, ...] = (), reason: str = "all") -> RoundClosed:
    return RoundClosed(10.0 * number + 9, number, reason, number, aggregated, list(gone), [], 9.0, 8.0, {"loss": 1.0})  # type: ignore[arg-type]  # a test may say a plain str


BACK = ("back", "back-folded", "back-failed")
FATES = (*BACK, "aggregated", "silent", "failed", "failed-folded", "dropped", "bad", "twice", "late", "late-dropped")


@st.composite
def histories(draw: st.DrawFn, run_id: str) -> list[list[Event]]:
    """What a server could record in one run, in the batches in which it would."""
    batches: list[list[Event]] = []
    to_come: list[tuple[int, str, str]] = []  # answers that come in a later round
    for number in range(1, draw(st.integers(1, 4)) + 1):
        batches.append(opened(run_id, number))
        aggregated: list[str] = []
        for assignment_round, device, fate in to_come:
            reply = header(run_id, assignment_round, device)
            if fate == "late":
                batches.append([accepted(reply, assignment_round, number)])
                aggregated.append(str(reply.update_id))
            else:
                batches.append([dropped(reply, assignment_round, "late", number)])
        to_come = []
        for device in draw(st.permutations(DEVICES)):
            fate = draw(st.sampled_from(FATES))
            batches += _fate(run_id, number, device, fate, aggregated)
            if fate.startswith("late"):
                to_come.append((number, device, fate))
        if draw(st.booleans()):
            batches.append([UpdateAggregated(16.0, number, update_id, 0.1) for update_id in aggregated])
        few = draw(st.booleans())
        end = closed(number, [], tuple(aggregated), "too-few") if few else closed(number, aggregated)
        measured = Evaluated(
            17.0, number - 1, number - 1, {"loss": 1.0 / number}, {"loss": [0.0, 1.0]}, 9, 3, best=True,
            payload_bytes=number * 7, sent_bytes=draw(st.sampled_from([None, 8])), received_bytes=9,
        )  # fmt: skip
        batches.append([measured, end])
    return draw(merged([batch for batch in batches if batch]))


@st.composite
def merged(draw: st.DrawFn, batches: list[list[Event]]) -> list[list[Event]]:
    """The same events in the same order, in fewer commits."""
    fewer = [list(batches[0])]
    for batch in batches[1:]:
        if draw(st.booleans()):
            fewer[-1].extend(batch)
        else:
            fewer.append(list(batch))
    return fewer


def _fate(run_id: str, number: int, device: str, fate: str, aggregated: list[str]) -> list[list[Event]]:
    reply = header(run_id, number, device, wire=device != "pi-03")
    failed = ClientFailed(13.0, number, device, reply.assignment_id, "offline", "went away", 3.0)
    if fate.startswith("back"):
        back: list[list[Event]] = [[failed], [ClientReconnected(13.5, number, device, reply.assignment_id, 3.5)]]
        return back + _fate(run_id, number, device, fate.removeprefix("back").removeprefix("-"), aggregated)
    if fate in ("aggregated", "failed-folded"):
        aggregated.append(str(reply.update_id))
        return [[failed], [accepted(reply, number)]] if fate == "failed-folded" else [[accepted(reply, number)]]
    if fate == "twice":
        aggregated.append(str(reply.update_id))
        again = header(run_id, number, device, sequence=90 + number)
        return [[accepted(reply, number), dropped(again, number, "duplicate")], [accepted(reply, number)]]
    if fate == "bad":
        return [[accepted(reply, number)], [dropped(reply, number, "bad-payload")]]
    if fate == "failed":
        return [[failed]]
    return [[dropped(reply, number, "stale")]] if fate == "dropped" else []
