"""Handle an assignment: train or evaluate for it, and commit one reply.

`AssignmentHandler` applies the outcomes that came with the assignment, trains, encodes and commits. Only a committed
reply leaves the device. The rules of exactly-once delivery are in client/outbox.py, the files in client/run_state.py,
the work itself in client/execute.py.

If the plan has overlap (`[local.overlap]`), `begin` trains for the next assignment while `finish` still encodes and
commits an earlier one. `Begun` is an assignment between the two steps. In a secure round `begin` advertises and trains,
`finish` masks, and another thread calls `handle_phase` meanwhile.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from thinwire.client import errors, execute, outbox, payload
from thinwire.client.admission import AdmissionController
from thinwire.client.assignment_context import AssignmentContext, HandlerEnvironment, UplinkTimeEstimator
from thinwire.client.calls import Say
from thinwire.client.errors import FAILED, CannotReply
from thinwire.client.execute import Begun, Result, Trained
from thinwire.client.executor import Executor, InProcessExecutor
from thinwire.client.outbox import OutcomeHandler, PipelineState
from thinwire.client.personal import executor_for
from thinwire.client.run_state import ClientRunState, Entry, RunFolder, write_behind_folder
from thinwire.client.run_store import RunStore
from thinwire.client.secure import SecureRounds, Send
from thinwire.client.train.errors import Cancelled, full_text
from thinwire.client.train.protocol import ClientInfo
from thinwire.client.train.task import LoadedTask
from thinwire.core.errors import DataLost
from thinwire.core.fleet import Delivery
from thinwire.core.plan import RunPlan
from thinwire.core.protocol import is_protected
from thinwire.core.records import replace
from thinwire.core.statedir import require_room
from thinwire.core.types import PROTOCOL, Assignment, Failure, PhaseReply, Reply, ReplyHeader, training_id
from thinwire.privacy.participant import SecureIdentity

ReplyWithFile = tuple[Reply, Path | None]  # a reply, and the file that holds its parts one after the other


class AssignmentHandler:
    """Handles the assignments of one task, over all runs of that task.

    `admission` admits assignments, `runs` holds the state of every run, `executor` executes the task. `folder` is the
    client's directory. `client` has its name and its data. The handler needs `secure` for secure rounds.

    Invariant: a repeated assignment gets the same bytes again. A failure leaves the last commit as it was.
    """

    def __init__(
        self,
        task: LoadedTask | Executor,
        folder: Path,
        client: ClientInfo,
        admission: AdmissionController | None = None,
        secure: SecureIdentity | None = None,
        environment: HandlerEnvironment = HandlerEnvironment(),
    ) -> None:
        self.rounds = SecureRounds(secure)
        self.admission = admission or AdmissionController(carries=secure.carries if secure is not None else frozenset())
        self.name, self.folder, self.client = client.name, folder, client  # an operator may rename the device
        self.executor: Executor = InProcessExecutor(task, client.device) if isinstance(task, LoadedTask) else task
        self.environment, self.clock = environment, environment.clock
        write_behind = partial(
            write_behind_folder, write=environment.write, min_free=lambda: self.admission.min_free_bytes
        )
        self.runs = RunStore(folder, environment.folders or write_behind, lambda: self.admission.policy.max_runs)
        # Two tables by run id.
        self._uplink_estimators = defaultdict[str, UplinkTimeEstimator](UplinkTimeEstimator)
        self._pipelines: dict[str, PipelineState] = {}

    def continue_sequences(self, sequences: Mapping[str, int], identities: Mapping[str, str] | None = None) -> None:
        """Number further replies above `sequences`: in each run the highest that the aggregator has of this device.

        `identities` are the identities of those runs.
        """
        self.runs.seen |= sequences
        self.runs.identities = dict(identities or {})

    def handle(
        self, delivery: Delivery, cancelled: Callable[[], bool], say: Say, queue_s: float = 0.0
    ) -> ReplyWithFile:
        """Return the committed reply to an assignment, except one of a secure round, which has phases.

        Raises `Cancelled` if the aggregator withdrew the assignment during the work.
        """
        begun = self.begin(delivery, cancelled, say, queue_s)
        return self.finish(begun) if isinstance(begun, Begun) else begun

    def begin(
        self, delivery: Delivery, cancelled: Callable[[], bool], say: Say, queue_s: float = 0.0,
        send: Send | None = None,
    ) -> ReplyWithFile | Begun:  # fmt: skip
        """Return the reply, or with overlap or in a secure round a `Begun` from which `finish` makes the reply.

        With overlap, the next assignment may begin before `finish` is called. One thread calls `finish`, in the order
        in which the assignments began. `queue_s` is the time that the assignment waited on this device. `send` sends
        the advertisement of a secure round as soon as the model is loaded; training waits until it returns.
        """
        try:
            begun = self._begin(delivery, cancelled, say, queue_s, send)
        except Cancelled:
            raise
        except Exception as error:  # an error in a task's code fails this assignment and does not end this program
            begun = self._failed(error, delivery.assignment, say), None
        if not isinstance(begun, Begun):
            self.admission.mark_ended(delivery.assignment)
        return begun

    def finish(self, begun: Begun) -> ReplyWithFile:
        """Encode and commit what was trained, and return the reply.

        An update that failed to encode is removed from the start of the next training. A training that began before
        this was known moves no values that stay on the device. In a secure round this waits for the phase `masked` (see
        `is_ready`), and raises `Cancelled` if the round is over before that.
        """
        assignment, pipeline = begun.job.assignment, self._pipeline(begun.job.assignment.run)
        try:
            reply = self._finish(begun)
        except Cancelled:
            raise
        except Exception as error:
            if isinstance(begun.outcome, Trained):
                pipeline.failed |= {begun.outcome.header.update_id.sequence}
            reply = self._failed(error, assignment, begun.job.say), None
        finally:
            pipeline.unfinished.discard(assignment.assignment_id)
        self.admission.mark_ended(assignment)
        return reply

    def handle_phase(self, delivery: Delivery, say: Say) -> PhaseReply | Failure | None:
        """Return the reply to a later phase of a secure round; None for `masked`, to which the update is the reply.

        Any thread may call it, also while another one trains. If the client leaves the round, the reply is a failure of
        the training assignment, and its training ends.
        """
        try:
            return self.rounds.handle(delivery)
        except Exception as error:
            training = training_id(delivery.assignment.assignment_id)
            self.rounds.forget(training)
            return self._failed(error, replace(delivery.assignment, assignment_id=training), say)

    def mark_withdrawn(self, assignment: Assignment) -> None:
        """Record that the aggregator withdrew an assignment that had begun: its work ended without a reply."""
        # An assignment that is still being made arrived twice, and the first one continues.
        if assignment.assignment_id not in self._pipeline(assignment.run).unfinished:
            self.admission.mark_ended(assignment)

    def overlaps(self, assignment: Assignment) -> bool:
        """Return True if the next assignment may begin while the reply to this one is being finished."""
        return assignment.kind == "train" and outbox.delay_of(self.admission.plans.known(assignment)) > 0

    def stop(self, assignment: Assignment, say: Say) -> None:
        """Delete the state of a run that is over, except its sequence.

        The state of another run with the same id stays, because its identity differs.
        """
        if self.runs.end(assignment.run, say, assignment.identity):
            self._uplink_estimators.pop(assignment.run, None)
            self._pipelines.pop(assignment.run, None)
            self.rounds.forget_run(assignment.run)

    def save(self, say: Say) -> None:
        """Make durable the state that plans allow to wait: at the exit, and from time to time before it."""
        self.runs.save(say)

    def unsent_replies(self, say: Say = lambda line: None) -> list[tuple[ReplyHeader, Path | None]]:
        """Return every reply on disk that has no outcome yet, with its file.

        A reply that the privacy ledger cannot record is left out.
        """
        replies = []
        for header, path in self.runs.unsent_replies(self.executor.name, say):
            try:  # the ledger lacks it if the process was killed after the commit
                self.admission.mark_answered(header.identity, header.assignment_id)
            except DataLost as error:
                say(f"{header.assignment_id}: its reply is not sent: {error}")
            else:
                replies.append((header, path))
        return replies

    def mark_delivered(self, reply: Reply, upload_s: float | None = None) -> None:
        """Record that the aggregator has the reply.

        `upload_s` is the time of its upload, given only if the first attempt succeeded.
        """
        if isinstance(reply, ReplyHeader) and reply.parts and upload_s is not None and reply.update_id.run in self.runs:
            self._uplink_estimators[reply.update_id.run].add_upload(reply, upload_s)
        self.runs.mark_delivered(reply)

    def mark_unreadable(self, reply: ReplyHeader) -> Failure:
        """Record that this disk has lost a committed reply, and return the failure that is sent instead."""
        self.runs.mark_delivered(reply, outbox.remove_unreadable)
        return errors.unreadable(reply, self.name)

    def _begin(
        self, delivery: Delivery, cancelled: Callable[[], bool], say: Say, queue_s: float, send: Send | None
    ) -> ReplyWithFile | Begun:
        assignment, pipeline, began = delivery.assignment, self._pipeline(delivery.assignment.run), self.clock.now()
        if assignment.assignment_id in pipeline.unfinished:  # read before the state, which gets the reply first
            raise Cancelled  # the assignment came again, and its reply is being finished
        folder, state = self.runs.open(assignment.run, say)
        is_own = state.identity in ("", assignment.identity)
        if is_own and (entry := outbox.find(state, assignment.assignment_id)) is not None:
            self.admission.mark_answered(assignment.identity, assignment.assignment_id)
            say(f"round {assignment.round}: the reply was made before and is sent again")
            return entry.header, folder.path(entry)
        if assignment.secure is not None:
            self.rounds.forget_run(assignment.run)
        seen = state.sequence if is_own else self.runs.seen.get(assignment.run, 0)
        delivery, resolved = self._admitted(delivery, seen)
        folder, state = self.runs.open(assignment.run, say, assignment.identity)  # a declined one replaces no state
        self._forget_idle_runs()
        if pipeline.state is not None and pipeline.state.identity != assignment.identity:
            pipeline = self._pipelines[assignment.run] = PipelineState()
            self._uplink_estimators.pop(assignment.run, None)
        executor = self._executor(resolved)
        assignment = delivery.assignment
        if assignment.kind == "train" and self.admission.min_free_bytes:  # now, and not when its state is written
            more_bytes = max(0, payload.least_kept_bytes(resolved, executor.layout) - state.nbytes)
            require_room(self.folder, more_bytes, self.admission.min_free_bytes)
        job = AssignmentContext(
            delivery, resolved, self.name, cancelled, say, queue_s,
            may_measure=self.admission.allows("evaluate"),
            uplink_estimator=self._uplink_estimators[assignment.run],
            limit=self.admission.limit(self.clock),
            began=began,
            max_state_bytes=self.admission.max_state_bytes,
            folder=self.folder,
            environment=self.environment,
        )  # fmt: skip
        seen = max(pipeline.sequence, self.runs.seen.get(assignment.run, 0))
        update_id = outbox.next_id(state, assignment.run, self.name, seen)
        header = ReplyHeader(
            assignment.assignment_id, update_id, assignment.base_version, 0, identity=assignment.identity
        )
        if self.overlaps(assignment):
            return self._begin_overlapped(job, header, pipeline.state or state, folder)
        self._pipelines.pop(assignment.run, None)  # no assignment is between `begin` and `finish`
        outcome_handler = self._outcome_handler(job, folder)
        state = self._apply_outcomes(outcome_handler, state)
        if assignment.kind == "train" and job.plan.has_client_state:
            outcome_handler.require_client_state(state)
        if assignment.secure is not None:
            return self._begin_secure(job, header, state, send)
        make = execute.first_model if assignment.kind == "init" else execute.work
        return self._commit(assignment, folder, make(job, header, state, executor, self.client))

    def _admitted(self, delivery: Delivery, sequence: int) -> tuple[Delivery, RunPlan]:
        """Return an assignment with its resolved plan; raise `CannotReply` if it is not valid or not allowed here."""
        assignment = delivery.assignment
        if assignment.protocol > PROTOCOL:
            raise CannotReply(
                "protocol", f"the aggregator speaks protocol {assignment.protocol}, this client {PROTOCOL}"
            )
        # Otherwise the number of runs on disk would have no bound.
        if assignment.run.rpartition("-")[0] != assignment.task:
            raise CannotReply(
                "protocol", f"no run of the task {assignment.task!r} can be called {assignment.run[:80]!r}"
            )
        if delivery.error is not None:
            raise delivery.error
        require_room(self.folder, 0, self.admission.min_free_bytes)
        plan = self.admission.admit(assignment, sequence)  # before anything is loaded
        if assignment.plan is not plan:
            assignment = replace(assignment, plan=plan)
            delivery = replace(delivery, assignment=assignment)
        resolved = self.admission.plans.parsed(plan)
        if delivery.bundle is None:  # no part was fetched, so the link has not checked the sizes
            payload.require_parts(assignment, resolved, self._executor(resolved).layout)
        if assignment.kind not in ("init", "train", "evaluate"):
            raise CannotReply("protocol", f"this client cannot {assignment.kind}")
        if (assignment.secure is not None) != (resolved.secure.enabled and assignment.kind == "train"):
            raise CannotReply("protocol", "only an assignment to train under masks has terms of a secure round")
        return delivery, resolved

    def _begin_overlapped(
        self, job: AssignmentContext, header: ReplyHeader, state: ClientRunState, folder: RunFolder
    ) -> Begun:
        """Train for an assignment from the state in which the last training ended.

        A failure becomes the outcome of the `Begun`, so it is sent after the earlier replies.
        """
        assignment, executor = job.assignment, self._executor(job.plan)
        pipeline = self._pipelines.setdefault(assignment.run, PipelineState())
        if state.layout_digest not in ("", executor.layout.digest):
            state = ClientRunState(sequence=state.sequence, identity=state.identity)
        state = pipeline.without_failed(state, self.runs[assignment.run][1])
        outcomes = self._outcome_handler(job, folder).outcomes
        pending = outbox.still_pending(state.pending, outcomes, assignment.base_version, job.plan.local.delay)
        pipeline.state = state = replace(state, pending=pending)
        try:
            trained = execute.train_finite(job, header, state, executor, self.client)
        except Cancelled:
            raise
        except Exception as error:
            return Begun(job, self._failed(error, assignment, job.say), self.clock.now())
        pipeline.state = replace(trained.next_state, sequence=header.update_id.sequence)
        pipeline.unfinished.add(assignment.assignment_id)
        pipeline.follows |= {header.update_id.sequence}
        return Begun(job, trained, self.clock.now(), pipeline.follows)

    def _begin_secure(
        self, job: AssignmentContext, header: ReplyHeader, state: ClientRunState, send: Send | None
    ) -> Begun:
        """Send this client's advertisement once the model is loaded, and train until the client leaves the round."""
        executor, policy, assignment = self._executor(job.plan), self.admission.policy, job.assignment
        if assignment.round <= state.encoded_at:  # a client masks one vector a round, also for a restored aggregator
            raise CannotReply(FAILED, "order", f"round {state.encoded_at} of this run was summed here before")
        with self.rounds.open_round(job, executor.layout.size, policy, send):
            trained = execute.train_finite(job, header, state, executor, self.client)
        self._pipelines.setdefault(assignment.run, PipelineState()).unfinished.add(assignment.assignment_id)
        return Begun(job, trained, self.clock.now())

    def _finish(self, begun: Begun) -> ReplyWithFile:
        job, assignment, trained = begun.job, begun.job.assignment, begun.outcome
        folder, state = self.runs.open(assignment.run, job.say, assignment.identity)
        state, layout = self._apply_outcomes(self._outcome_handler(job, folder), state), self._executor(job.plan).layout
        if isinstance(trained, Failure):
            return trained, None
        spent = trained.header.timings
        spent = replace(spent, queue_s=spent.queue_s + self.clock.now() - begun.at)
        trained = replace(trained, header=replace(trained.header, timings=spent))
        new, failed = trained.next_state, self._pipeline(assignment.run).failed
        merged = replace(
            state, layout_digest=new.layout_digest, replica=new.replica, replica_version=new.replica_version,
            pending=outbox.without(new.pending, failed),
        )  # fmt: skip
        merged = outbox.with_own_values(merged, new) if begun.follows.isdisjoint(failed) else merged
        make = execute.encode_update if assignment.secure is None else self.rounds.encode
        return self._commit(assignment, folder, make(job, trained, merged, layout))

    def _executor(self, plan: RunPlan) -> Executor:
        return executor_for(self.executor, plan) if plan.local.personal_layers else self.executor

    def _pipeline(self, run: str) -> PipelineState:
        """Return the `PipelineState` of a run, or an empty one that is not stored."""
        return self._pipelines.get(run) or PipelineState()

    def _forget_idle_runs(self) -> None:
        """Remove the estimates, pipelines and secure rounds of runs that `runs` no longer has."""
        for run in {*self._uplink_estimators, *self._pipelines, *self.rounds.runs}:
            if run not in self.runs and not self._pipeline(run).unfinished:
                self._uplink_estimators.pop(run, None)
                self._pipelines.pop(run, None)
                self.rounds.forget_run(run)

    def _outcome_handler(self, job: AssignmentContext, folder: RunFolder) -> OutcomeHandler:
        return OutcomeHandler(job.assignment, job.plan, self._executor(job.plan).layout, self.name, folder, job.say)

    def _apply_outcomes(self, outcome_handler: OutcomeHandler, state: ClientRunState) -> ClientRunState:
        """Return the state after the outcomes of the assignment, and commit it.

        The commit comes first, so that the outcomes count even if the work after them fails.
        """
        after = outcome_handler.apply(state)
        if after is not state:
            self.runs.commit(outcome_handler.assignment, outcome_handler.folder, after)
        return after

    def _commit(self, assignment: Assignment, folder: RunFolder, result: Result) -> ReplyWithFile:
        """Commit a reply. After the commit exactly these bytes are sent, also by a later process."""
        header, state, begun = result.header, result.state, self.clock.now()
        silent = is_protected(assignment)  # then the header has no facts of this device
        if header.parts and state.lost:
            header, state = header if silent else replace(header, lost=state.lost), replace(state, lost="")
        file = f"{header.update_id.sequence}.parts" if header.parts else ""
        entry = Entry(header, assignment.round, file, first=assignment.kind == "init")
        state = outbox.append(state, entry)
        self.runs.commit(assignment, folder, state, {entry.file: result.body} if entry.file else {})
        if silent:  # an assignment of another plan has no booking
            self.admission.mark_answered(assignment.identity, assignment.assignment_id)
        commit_s = self.clock.now() - begun
        if silent:
            return header, folder.path(entry)
        if header.parts:
            self._uplink_estimators[assignment.run].add_encode(header, commit_s)
        return replace(header, timings=replace(header.timings, commit_s=commit_s)), folder.path(entry)

    def _failed(self, error: Exception, assignment: Assignment, say: Say) -> Failure:
        """Return the failure to send, and print the whole error on this device."""
        if self.environment.debug:
            raise error
        failure = errors.failure_of(error, assignment, self.name, self.executor.file, self.folder)
        failed = "" if failure.kind in (*errors.NO_ERROR_KINDS, errors.FAILED) else "failed, "
        said = error.owner_text if isinstance(error, CannotReply) else full_text(error)
        say(f"round {assignment.round}: {failed}{failure.kind}: {said}")
        plan = self.admission.plans.known(assignment)  # most assignments name their plan by its digest
        if not is_protected(replace(assignment, plan=plan or assignment.plan)):
            return failure
        with contextlib.suppress(DataLost):  # a failure may reveal data, so the next attempt is booked
            self.admission.mark_answered(assignment.identity, assignment.assignment_id)
        return errors.without_details(failure)
