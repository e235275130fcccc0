"""One ask, one answer: settle the verdicts, do the work, commit; only then may the answer leave."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from thinwire.client import exchange, failures, outbox
from thinwire.client.afterwards import Afterwards
from thinwire.client.bench import Bench, Here
from thinwire.client.compute.clock import REAL, Clock
from thinwire.client.compute.errors import Cancelled, NotFinite
from thinwire.client.compute.site import Site
from thinwire.client.compute.task import LoadedTask
from thinwire.client.failures import CannotAnswer
from thinwire.client.gate import Gate
from thinwire.client.state import Entry, RunFolder, RunState, Write
from thinwire.client.until_exit import WaitingFolder, waiting_folder
from thinwire.client.work import Job, Result, Say, TakeBase, work
from thinwire.core.errors import BadPayload, DataLost, NonFiniteUpdate
from thinwire.core.fleet import Delivery
from thinwire.core.home import write_atomically
from thinwire.core.plan import RunPlan
from thinwire.core.types import PROTOCOL, Ask, Failure, ReplyHead, Vector

Reply = ReplyHead | Failure
Answer = tuple[Reply, Path | None]  # with the file in which its parts stand one after the other
KINDS: tuple[tuple[type[Exception], str], ...] = (
    (NonFiniteUpdate, "non-finite"),
    (NotFinite, "non-finite"),
    (BadPayload, "base-mismatch"),
    (DataLost, "disk"),
)
NOT_WRONG = ("declined", "need-plan")  # nothing went wrong: the last error is still the last error


class Session:
    """A device's work for one task, over all runs that ask for it.

    Law: an ask that was answered gets the same bytes again; whatever fails leaves the last commit as it was.
    """

    def __init__(
        self,
        name: str,
        task: LoadedTask | Bench,
        folder: Path,
        site: Site,
        *,
        slow_step_s: float = 0.0,
        write: Write = write_atomically,
        debug: bool = False,
        gate: Gate | None = None,
        folders: Callable[[Path, str], RunFolder] | None = None,
        take_base: TakeBase = exchange.take_base,
        clock: Clock = REAL,
        may_stop: bool = True,
    ) -> None:
        self.gate = gate or Gate()
        self.name, self.folder, self.site = name, folder, site
        self.bench: Bench = Here(task, site.device) if isinstance(task, LoadedTask) else task
        self.slow_step_s, self.debug = slow_step_s, debug
        self.clock, self.may_stop = clock, may_stop  # may_stop: whether a deadline may end training, as the plan allows
        self._folders, self._take_base = folders or partial(waiting_folder, write=write), take_base
        self.seen: dict[str, int] = {}  # run -> the highest sequence that the aggregator has seen
        self._runs: dict[str, tuple[RunFolder, RunState]] = {}
        self._afterwards: defaultdict[str, Afterwards] = defaultdict(Afterwards)

    @property
    def held_bytes(self) -> int:
        """Of all vectors in memory."""
        return sum(state.nbytes for _, state in self._runs.values())

    def welcomed(self, sequences: Mapping[str, int]) -> None:
        """Go on above what the aggregator has seen of this device."""
        self.seen |= sequences

    def answer(self, delivery: Delivery, cancelled: Callable[[], bool], say: Say, queue_s: float = 0.0) -> Answer:
        """The answer to an ask, committed. `Cancelled` when the ask was withdrawn meanwhile."""
        try:
            return self._answer(delivery, cancelled, say, queue_s)
        except Cancelled:
            raise
        except Exception as error:  # whatever happens in a task's code is this ask's failure, not this program's end
            if self.debug:
                raise
            failure = self._failure(error, delivery.ask)
            failed = "" if failure.kind in NOT_WRONG else "failed, "
            said = error.said if isinstance(error, CannotAnswer) else error
            say(f"round {delivery.ask.round}: {failed}{failure.kind}: {said}")
            return failure, None

    def stop(self, ask: Ask, say: Say) -> None:
        """The run is over: nobody waits for an answer, and nothing of it is needed any more but the sequence."""
        self._afterwards.pop(ask.run, None)
        try:
            folder, state = self._state(ask.run, say)
            state = outbox.over(state)
            folder.commit(state)
            self._runs[ask.run] = folder, state
        except (CannotAnswer, DataLost) as error:  # what is left on disk does no harm, and other runs go on
            say(str(error))
        else:
            say(f"{ask.run} is over")

    def save(self, say: Say) -> None:
        """Make durable what plans let wait: at the exit, and from time to time before it."""
        for folder, _ in self._runs.values():
            if isinstance(folder, WaitingFolder):
                try:
                    folder.save()
                except (DataLost, OSError) as error:
                    say(f"{folder.folder.name}: what waits to be saved cannot be: {error}")

    def unsent(self, say: Say = lambda line: None) -> list[tuple[ReplyHead, Path | None]]:
        """Everything on disk on which there is no verdict yet: what a new process sends again."""
        found = []
        for path in sorted((self.folder / "runs").glob("*/state.json")):
            if path.parent.name.rpartition("-")[0] != self.bench.name:  # a run's id is TASK-N: another session's
                continue
            folder, state = self._state(path.parent.name, say)
            found += [(entry.head, folder.path(entry)) for entry in state.outbox]
        return found

    def delivered(self, reply: Reply, upload_s: float | None = None) -> None:
        """The other end has it; `upload_s` where it went there in one go."""
        if isinstance(reply, ReplyHead) and reply.parts and upload_s is not None:
            self._afterwards[reply.update_id.run].sent(reply, upload_s)
        if isinstance(reply, ReplyHead) and reply.update_id.run in self._runs:
            folder, state = self._runs[reply.update_id.run]
            self._runs[reply.update_id.run] = folder, outbox.delivered(state, reply)

    def _answer(self, delivery: Delivery, cancelled: Callable[[], bool], say: Say, queue_s: float) -> Answer:
        ask = delivery.ask
        folder, state = self._state(ask.run, say)
        if (made := outbox.find(state, ask.ask_id)) is not None:
            say(f"round {ask.round}: answered before, sent again")
            return made.head, folder.path(made)
        if ask.protocol > PROTOCOL:
            raise CannotAnswer("protocol", f"the aggregator speaks protocol {ask.protocol}, this client {PROTOCOL}")
        plan = self.gate.admit(ask, state.sequence)  # before anything is loaded
        ask = replace(ask, plan=plan)
        delivery = replace(delivery, ask=ask)
        settled = self._settled(ask, folder, state, say)
        head = ReplyHead(
            ask.ask_id, outbox.next_id(state, ask.run, self.name, self.seen.get(ask.run, 0)), ask.base_version, 0
        )
        if ask.kind not in ("train", "evaluate"):
            raise CannotAnswer("protocol", f"this client cannot {ask.kind}")
        if settled is not state:
            self._keep(ask, folder, settled)  # a verdict counts even if the work after it fails
        if ask.kind == "train" and _feedback(ask) == "ef21":
            self._require_reference(ask.run, settled)
        job = Job(
            delivery, RunPlan.from_json(plan), self.name, cancelled, say, queue_s, self.slow_step_s,
            self.gate.allows("evaluate"), self._take_base, self.may_stop, self._afterwards[ask.run], self.clock,
        )  # fmt: skip
        return self._commit(ask, folder, work(job, head, settled, self.bench, self.site))

    def _require_reference(self, run: str, state: RunState) -> None:
        """With ef21 the aggregator's sum holds what this device sent before: it goes on from there, or not at all."""
        forgotten = self.seen.get(run, 0) > state.sequence
        if forgotten or (state.encoded_at and state.residual is None):
            raise CannotAnswer(
                "state-lost", "what ef21 has sent of this device is not on its disk any more: join under another name"
            )

    def _state(self, run: str, say: Say) -> tuple[RunFolder, RunState]:
        if run not in self._runs:
            try:
                folder = self._folders(self.folder, run)
            except DataLost as error:
                raise CannotAnswer("protocol", error.what) from error
            state, said = folder.load()
            for line in said:
                say(line)
            self._runs[run] = folder, state
        return self._runs[run]

    def _settled(self, ask: Ask, folder: RunFolder, state: RunState, say: Say) -> RunState:
        """The state after the ask's verdicts, and without what is too old for one."""
        layout, plan = self.bench.layout, {} if isinstance(ask.plan, str) else ask.plan
        if state.layout_digest not in ("", layout.digest):
            say(f"{ask.run}: the model has changed; what was not yet sent of the old one is lost")
            state = RunState(sequence=state.sequence)

        feedback = _feedback(ask)

        def back(entry: Entry, residual: Vector | None) -> Vector | None:
            if feedback == "none":
                return residual
            sign = -1.0 if feedback == "ef21" else 1.0
            try:
                back = exchange.refund(folder.path(entry), entry.head.parts, entry.head.codec, layout, residual, sign)
            except (OSError, BadPayload) as error:
                if feedback == "ef21":
                    raise CannotAnswer(
                        "state-lost", f"an update that was not used cannot be taken back: {error}"
                    ) from error
                say(f"round {entry.round}: its update was not used, and is damaged on this disk: {error}")
                return residual
            say(f"round {entry.round}: its update was not used, it goes into the next one")
            return back

        own = [verdict for verdict in ask.verdicts if verdict.update_id.device == self.name]
        settled = outbox.settle(outbox.begun_anew(state, ask.references_from), own, back)
        if ask.kind != "train" or feedback == "ef21":  # ef21 has to know what became of each of its updates
            return settled
        return outbox.expire(settled, ask.round, int(plan.get("cohort", {}).get("max_staleness", 5)))

    def _commit(self, ask: Ask, folder: RunFolder, result: Result) -> Answer:
        """From here on the answer exists: whatever happens, it is this one that is sent."""
        head, begun = result.head, self.clock.now()
        entry = Entry(head, ask.round, f"{head.update_id.sequence}.parts" if head.parts else "")
        state = outbox.append(result.state, entry)
        self._keep(ask, folder, state, {entry.file: result.body} if entry.file else {})
        if head.parts:
            self._afterwards[ask.run].encoded(head, self.clock.now() - begun)
        return head, folder.path(entry)

    def _keep(self, ask: Ask, folder: RunFolder, state: RunState, parts: Mapping[str, bytes] | None = None) -> None:
        """Durable from here on, or until `save` where the plan lets it wait; a simulation's folders know better."""
        local = {} if isinstance(ask.plan, str) else ask.plan.get("local", {})
        if local.get("durability") == "exit" and isinstance(folder, WaitingFolder):
            folder.hold(state, parts)
        else:
            folder.commit(state, parts)
        self._runs[ask.run] = folder, state

    def _failure(self, error: Exception, ask: Ask) -> Failure:
        kind = next((kind for types, kind in KINDS if isinstance(error, types)), "task-error")
        text = failures.place(error, self.bench.file)
        if isinstance(error, CannotAnswer):
            kind, text = error.kind, str(error)
        if kind in NOT_WRONG:
            return Failure(kind, text, ask.ask_id, self.name)
        with contextlib.suppress(DataLost):  # a full disk must not hide what went wrong
            failures.remember(self.folder, error, f"{ask.run}, round {ask.round}: {kind}")
        return Failure(kind, text, ask.ask_id, self.name)


def _feedback(ask: Ask) -> str:
    """The feedback of the ask's plan."""
    uplink = {} if isinstance(ask.plan, str) else ask.plan.get("uplink", {})
    return str(uplink.get("feedback", "classic"))
