"""One ask, one answer: settle the verdicts, do the work, commit; only then may the answer leave."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from thinwire.client import errors, outbox, payload
from thinwire.client.admission import Gate
from thinwire.client.context import Afterwards, Job, Say, TakeBase
from thinwire.client.errors import CannotAnswer
from thinwire.client.execute import Result, Trained, encoded, first_model, least_kept_bytes, trained, work
from thinwire.client.executor import Bench, Here
from thinwire.client.outbox import Settling
from thinwire.client.run_state import Entry, RunFolder, RunState, Write, waiting_folder
from thinwire.client.run_store import KeptRuns, Reply
from thinwire.client.train.errors import Cancelled, in_full
from thinwire.client.train.protocol import Site
from thinwire.client.train.schedule import REAL, Clock
from thinwire.client.train.task import LoadedTask
from thinwire.core.errors import NonFiniteUpdate
from thinwire.core.fleet import Delivery
from thinwire.core.plan import RunPlan
from thinwire.core.statedir import require_room, write_atomically
from thinwire.core.types import PROTOCOL, Ask, Failure, ReplyHead

Answer = tuple[Reply, Path | None]  # with the file in which its parts stand one after the other
SMALLER_LR = "a smaller [local] lr"


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
        take_base: TakeBase = payload.take_base,
        clock: Clock = REAL,
        may_stop: bool = True,
    ) -> None:
        self.gate = gate or Gate()
        self.name, self.folder, self.site = name, folder, site
        self.bench: Bench = Here(task, site.device) if isinstance(task, LoadedTask) else task
        self.slow_step_s, self.debug = slow_step_s, debug
        self.clock, self.may_stop = clock, may_stop  # may_stop: whether a deadline may end training, as the plan allows
        self.kept = KeptRuns(
            folder, folders or partial(waiting_folder, write=write, min_free=lambda: self.gate.min_free_bytes)
        )
        self._take_base = take_base
        self._afterwards: dict[str, Afterwards] = {}  # of runs that are kept, and so are these
        self._ahead: dict[str, Ahead] = {}

    @property
    def held_bytes(self) -> int:
        """Of all vectors in memory."""
        return self.kept.held_bytes

    def welcomed(self, sequences: Mapping[str, int], identities: Mapping[str, str] | None = None) -> None:
        """Go on above what the aggregator has seen of this device in its runs, which have these identities."""
        self.kept.seen |= sequences
        self.kept.identities = dict(identities or {})

    def answer(self, delivery: Delivery, cancelled: Callable[[], bool], say: Say, queue_s: float = 0.0) -> Answer:
        """The answer to an ask, committed. `Cancelled` when the ask was withdrawn meanwhile."""
        begun = self.begin(delivery, cancelled, say, queue_s)
        return self.finish(begun) if isinstance(begun, Begun) else begun

    def begin(
        self, delivery: Delivery, cancelled: Callable[[], bool], say: Say, queue_s: float = 0.0
    ) -> Answer | Begun:
        """The answer, or, where the plan has training go on meanwhile, what `finish` makes it of.

        The next ask may be begun before. One thread finishes, in the order in which asks were begun.
        """
        try:
            begun = self._begin(delivery, cancelled, say, queue_s)
        except Cancelled:
            raise
        except Exception as error:  # whatever happens in a task's code is this ask's failure, not this program's end
            begun = self._failed(error, delivery.ask, say), None
        if not isinstance(begun, Begun):
            self._ended(delivery.ask, begun[0])
        return begun

    def finish(self, begun: Begun) -> Answer:
        """The answer, committed. A change that could not be encoded is not gone on with."""
        ask, ahead = begun.job.ask, self._ahead_of(begun.job.ask.run)
        try:
            answer = self._finish(begun)
        except Exception as error:
            if isinstance(begun.outcome, Trained):
                ahead.void |= {begun.outcome.head.update_id.sequence}
            answer = self._failed(error, ask, begun.job.say), None
        finally:
            ahead.making.discard(ask.ask_id)
        self._ended(ask, answer[0])
        return answer

    def withdrawn(self, ask: Ask) -> None:
        """Take in that the aggregator withdrew an assignment that was begun: its work ended without a reply."""
        if ask.ask_id not in self._ahead_of(ask.run).making:  # else it came twice, and the first one goes on
            self.gate.ended(ask)

    def overlaps(self, ask: Ask) -> bool:
        """Whether the next ask may be begun while the answer to this one is finished."""
        return ask.kind == "train" and outbox.delay_of(self.gate.plans.known(ask)) > 0

    def stop(self, ask: Ask, say: Say) -> None:
        """Give up all of a run that is over but the sequence; what is kept of another run with its id stays."""
        if self.kept.over(ask.run, say, ask.identity):
            self._afterwards.pop(ask.run, None)
            self._ahead.pop(ask.run, None)

    def save(self, say: Say) -> None:
        """Make durable what plans let wait: at the exit, and from time to time before it."""
        self.kept.save(say)

    def unsent(self, say: Say = lambda line: None) -> list[tuple[ReplyHead, Path | None]]:
        """Everything on disk on which there is no verdict yet: what a new process sends again."""
        return self.kept.unsent(self.bench.name, say)

    def delivered(self, reply: Reply, upload_s: float | None = None) -> None:
        """The other end has it; `upload_s` where it went there in one go."""
        if isinstance(reply, ReplyHead) and reply.parts and upload_s is not None and reply.update_id.run in self.kept:
            self._afterwards.setdefault(reply.update_id.run, Afterwards()).sent(reply, upload_s)
        self.kept.delivered(reply)

    def _begin(self, delivery: Delivery, cancelled: Callable[[], bool], say: Say, queue_s: float) -> Answer | Begun:
        ask, ahead = delivery.ask, self._ahead_of(delivery.ask.run)
        if ask.ask_id in ahead.making:  # before the state is read: it leaves this set when it stands there
            raise Cancelled  # it came again: its answer is on its way
        folder, state = self.kept.opened(ask.run, say, ask.identity)
        self._forget_gone()
        if ahead.state is not None and ahead.state.identity != ask.identity:
            ahead = self._ahead[ask.run] = Ahead()
            self._afterwards.pop(ask.run, None)
        if (made := outbox.find(state, ask.ask_id)) is not None:
            say(f"round {ask.round}: answered before, sent again")
            return made.head, folder.path(made)
        if ask.protocol > PROTOCOL:
            raise CannotAnswer("protocol", f"the aggregator speaks protocol {ask.protocol}, this client {PROTOCOL}")
        if ask.run.rpartition("-")[0] != ask.task:  # or the number of runs that are kept would have no bound
            raise CannotAnswer("protocol", f"no run of the task {ask.task!r} can be called {ask.run[:80]!r}")
        if delivery.error is not None:
            raise delivery.error
        require_room(self.folder, 0, self.gate.min_free_bytes)
        used = replace(state, sequence=max(state.sequence, ahead.sequence))
        plan = self.gate.admit(ask)  # before anything is loaded
        ask = replace(ask, plan=plan)
        if delivery.bundle is None:  # no part was fetched: the link judged them as is done here
            payload.require_parts(ask, RunPlan.from_json(plan), self.bench.layout)
        if ask.kind not in ("init", "train", "evaluate"):
            raise CannotAnswer("protocol", f"this client cannot {ask.kind}")
        resolved = RunPlan.from_json(plan)
        if ask.kind == "train":  # rather than when all is trained, and its state is written
            more_bytes = max(0, least_kept_bytes(resolved, self.bench.layout) - state.nbytes)
            require_room(self.folder, more_bytes, self.gate.min_free_bytes)
        job = Job(
            replace(delivery, ask=ask), resolved, self.name, cancelled, say, queue_s, self.slow_step_s,
            self.gate.allows("evaluate"), self._take_base, self.may_stop,
            self._afterwards.setdefault(ask.run, Afterwards()), self.clock, self.gate.limit(self.clock),
        )  # fmt: skip
        update_id = outbox.next_id(used, ask.run, self.name, self.kept.seen.get(ask.run, 0))
        head = ReplyHead(ask.ask_id, update_id, ask.base_version, 0, identity=ask.identity)
        if self.overlaps(ask):
            return self._begin_ahead(job, head, ahead.state or state, folder)
        self._ahead.pop(ask.run, None)  # all that was begun is finished, and the state holds it
        settling = self._settling(job, folder)
        state = self._settle(settling, state)
        if ask.kind == "train" and job.plan.remembered:
            settling.require_memory(state)
        make = first_model if ask.kind == "init" else work
        return self._commit(ask, folder, make(job, head, state, self.bench, self.site))

    def _begin_ahead(self, job: Job, head: ReplyHead, state: RunState, folder: RunFolder) -> Begun:
        """Train from where the last training led. What fails is told in its turn, after the answers before it."""
        ask, layout = job.ask, self.bench.layout
        ahead = self._ahead.setdefault(ask.run, Ahead())
        if state.layout_digest not in ("", layout.digest):
            state = RunState(sequence=state.sequence, identity=state.identity)
        going_on, told = outbox.without(state.pending, ahead.void), self._settling(job, folder).verdicts
        pending = outbox.still_pending(going_on, told, ask.base_version, job.plan.local.delay)
        ahead.state = state = replace(state, pending=pending)
        try:
            found = trained(job, head, state, self.bench, self.site)
            if not math.isfinite(found.head.norm):
                raise NonFiniteUpdate("a change holds NaN or infinity", why="training diverged", hint=SMALLER_LR)
        except Cancelled:
            raise
        except Exception as error:
            return Begun(job, self._failed(error, ask, job.say), self.clock.now())
        ahead.state = replace(found.carried, sequence=head.update_id.sequence)
        ahead.making.add(ask.ask_id)
        return Begun(job, found, self.clock.now())

    def _finish(self, begun: Begun) -> Answer:
        job, ask, found = begun.job, begun.job.ask, begun.outcome
        folder, state = self.kept.opened(ask.run, job.say, ask.identity)
        state = self._settle(self._settling(job, folder), state)
        if isinstance(found, Failure):
            return found, None
        spent = found.head.timings
        spent = replace(spent, queue_s=spent.queue_s + self.clock.now() - begun.at)
        found = replace(found, head=replace(found.head, timings=spent))
        new, void = found.carried, self._ahead_of(ask.run).void
        onto = replace(
            state, layout_digest=new.layout_digest, counters=new.counters, buffers=new.buffers, shadow=new.shadow,
            shadow_version=new.shadow_version, pending=outbox.without(new.pending, void),
        )  # fmt: skip
        return self._commit(ask, folder, encoded(job, found, onto, self.bench.layout))

    def _ahead_of(self, run: str) -> Ahead:
        """Return what was begun of a run; where nothing was, an empty one that is not kept."""
        return self._ahead.get(run) or Ahead()

    def _forget_gone(self) -> None:
        """Keep nothing in memory of runs that were given up, or in which nothing was done."""
        for run in {*self._afterwards, *self._ahead}:
            if run not in self.kept and not self._ahead_of(run).making:
                self._afterwards.pop(run, None)
                self._ahead.pop(run, None)

    def _ended(self, ask: Ask, reply: Reply) -> None:
        """Count the assignment as ended, unless it goes on at once: the aggregator sends the model again, in full."""
        if not (isinstance(reply, Failure) and reply.kind == "base-mismatch"):
            self.gate.ended(ask)

    def _settling(self, job: Job, folder: RunFolder) -> Settling:
        return Settling(job.ask, job.plan, self.bench.layout, self.name, folder, job.say)

    def _settle(self, settling: Settling, state: RunState) -> RunState:
        """The state after the ask's verdicts, kept: they count even if the work after them fails."""
        after = settling.settled(state)
        if after is not state:
            self.kept.keep(settling.ask, settling.folder, after)
        return after

    def _commit(self, ask: Ask, folder: RunFolder, result: Result) -> Answer:
        """From here on the answer exists: whatever happens, it is this one that is sent."""
        head, state, begun = result.head, result.state, self.clock.now()
        if head.parts:
            head, state = replace(head, lost=state.lost), replace(state, lost="")
        entry = Entry(head, ask.round, f"{head.update_id.sequence}.parts" if head.parts else "", ask.kind == "init")
        state = outbox.append(state, entry)
        self.kept.keep(ask, folder, state, {entry.file: result.body} if entry.file else {})
        if head.parts:
            self._afterwards.setdefault(ask.run, Afterwards()).encoded(head, self.clock.now() - begun)
        return head, folder.path(entry)

    def _failed(self, error: Exception, ask: Ask, say: Say) -> Failure:
        """What is told of an error, which is said here in full."""
        if self.debug:
            raise error
        failure = errors.told(error, ask, self.name, self.bench.file, self.folder)
        failed = "" if failure.kind in errors.NOT_WRONG else "failed, "
        said = error.said if isinstance(error, CannotAnswer) else in_full(error)
        say(f"round {ask.round}: {failed}{failure.kind}: {said}")
        return failure


# What stands between an ask that was trained for and its answer, while the next one may be begun.


@dataclass(frozen=True)
class Begun:
    """An ask that was trained for, or failed: what is left is to settle its verdicts, encode, commit and send.

    `at`, on the session's clock, is when it began to wait for that.
    """

    job: Job
    outcome: Trained | Failure
    at: float


@dataclass
class Ahead:
    """Where the next training of a run starts while earlier answers are still being encoded.

    `state` is None when no answer is: then the committed state counts. `making`: asks that were begun and not finished.
    `void`: sequences of changes that could not be encoded; the thread that finishes replaces the set, so that the one
    that trains may go through it meanwhile.
    """

    state: RunState | None = None
    making: set[str] = field(default_factory=set)
    void: frozenset[int] = frozenset()

    @property
    def sequence(self) -> int:
        return self.state.sequence if self.state is not None else 0
