"""Secure aggregation on a device: the client's part in the open secure rounds of one task.

`SecureRounds` holds one `Participant` for each open round and is called by three threads:

    thread      does                                                          calls
    main        loads the model, then trains                                  `open_round`, `forget_run`
    pull        answers the requests of later phases while training runs      `handle`
    background  waits for the rotation's seed; encodes and masks the update   `encode`

Secrets are in memory only. A round is dropped when the client withdraws from it, when the aggregator withdraws its
assignment, and when the next assignment of its run begins. A new process answers no round of an earlier one.

Invariant: an assignment has one `Participant`, which is never copied. After `encode` has masked a vector, the same
participant masks no second one.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from thinwire.aggregation.lattice import Lattice, Points
from thinwire.aggregation.plan_codecs import LATTICE, keeps_residual, lattice_of, rotation_key
from thinwire.aggregation.private_lattice import NotRounded, clip_layers
from thinwire.client import payload
from thinwire.client.assignment_context import AssignmentContext
from thinwire.client.errors import FAILED, CannotReply
from thinwire.client.execute import Result, Trained
from thinwire.client.train.errors import Cancelled
from thinwire.compression.native import cores, planned_threads
from thinwire.compression.vector_ops import finite
from thinwire.core.errors import BadPayload
from thinwire.core.protocol import without_facts
from thinwire.core.types import Part, PhaseReply, phase_of, training_id
from thinwire.privacy.contexts import context_of_assignment, identity_of, model_digest, simulated_key, terms_of
from thinwire.privacy.messages import PROCESS_BYTES, SECRET_BYTES, max_bytes
from thinwire.privacy.participant import MaskedVectors, Participant, SecureIdentity, Withdraw
from thinwire.privacy.secret_rng import SystemRng
from thinwire.privacy.summed_metrics import client_scalars

if TYPE_CHECKING:
    from thinwire.client.policy import Policy
    from thinwire.client.run_state import ClientRunState
    from thinwire.core.fleet import Delivery
    from thinwire.core.layout import Layout
    from thinwire.core.types import Assignment, Vector

Send = Callable[[PhaseReply], None]
RECHECK_S = 0.2  # longest delay until a waiting thread notices that the assignment was withdrawn
REQUEST = "request"  # the part of a phase's assignment
MAX_REQUEST_BYTES = 32 << 20  # of a phase's request that is fetched: 10 000 clients with ML-KEM have less
MASKED = "masked"  # the only part of a masked update


SIMULATED = frozenset({"secure", "secure.post_quantum"})  # parts of [secure] for simulated clients: they pin no roster
_ECDSA = ec.ECDSA(hashes.SHA256(), deterministic_signing=True)


def simulated_identity(name: str) -> SecureIdentity:
    """Return the identity of a simulated client: its key follows from its name, and its masks are random."""
    key, process = simulated_key(name), hashlib.sha256(name.encode()).digest()[:PROCESS_BYTES]
    return SecureIdentity(identity_of(key), lambda data: key.sign(data, _ECDSA), rng=SystemRng, process=process)


@dataclass
class _Round:
    participant: Participant
    lattice: Lattice
    run: str
    seed: bytes | None = None  # of the rotation, from `prepare` on


class SecureRounds:
    """The open secure rounds of one handler, by the id of their training assignment.

    Without an identity no round is ever opened.
    """

    def __init__(self, identity: SecureIdentity | None) -> None:
        self._identity = identity
        self._changed = threading.Condition(threading.RLock())
        self._open: dict[str, _Round] = {}
        self._left: dict[str, str] = {}  # training id of a round that this client left -> its run

    @contextlib.contextmanager
    def open_round(self, job: AssignmentContext, size: int, policy: Policy, send: Send | None) -> Iterator[None]:
        """Open a round around a block that trains: once the block has loaded the model. Drop it if the block fails.

        `size` is the number of trained parameters. `send` gets the client's advertisement. `policy` is the owner's.
        Training is cancelled if the client leaves the round. Raises `CannotReply` for terms that no round has.
        """
        withdrawn, training = job.cancelled, job.assignment.assignment_id
        if self._identity is None or send is None:
            raise CannotReply("declined", "secure: this client cannot sum under masks")

        def loaded(buffers: Vector | None) -> None:
            send(self._advertise(job, size, buffers, policy))

        job.cancelled, job.loaded = lambda: withdrawn() or self.has_left(training), loaded
        try:
            yield
        except BaseException:
            self.forget(training)
            raise

    def _advertise(self, job: AssignmentContext, size: int, buffers: Vector | None, policy: Policy) -> PhaseReply:
        """Begin a round with the model as it was loaded, and return the client's advertisement.

        `buffers` are the float buffers that came with the model.
        """
        assignment, plan, device = job.assignment, job.plan, job.device
        work, training = assignment.secure, assignment.assignment_id
        if work is None:
            raise CannotReply("protocol", "the plan sums under masks, and the assignment has no terms for it")
        try:
            lattice = lattice_of(plan, size, work, assignment.identity)
            lattice.walk.coordinates(work.window)
        except ValueError as error:  # numbers of the aggregator's that no lattice has
            raise CannotReply("protocol", f"no secure round has these terms: {error}") from error
        terms = terms_of(plan, work, lattice.lanes, lattice.width, lattice.grid)
        context = context_of_assignment(assignment, model_digest(assignment.base_digest, buffers), terms)
        with self._changed:
            self._left.pop(training, None)
            try:
                made = Participant(
                    device, self.identity, terms, context, policy.min_cohort or 0, policy.min_survivors or 0
                )
                advertisement = made.advertise()
            except Withdraw as error:
                raise _failed(error) from error
            self._open[training] = _Round(made, lattice, assignment.run)
        return _reply(assignment, advertisement)

    def handle(self, delivery: Delivery) -> PhaseReply | None:
        """Handle the request of a phase: return this client's message, or None for `masked`, which the update answers.

        Raises `CannotReply` ("failed", with the reason of the `Withdraw` as its text) if the client leaves the round.
        """
        assignment_id = delivery.assignment.assignment_id
        training = training_id(assignment_id)
        with self._changed:
            if (one := self._open.get(training)) is None:
                if phase_of(assignment_id) == "advertise":
                    return None  # the advertisement comes with the training assignment
                why = "has left it" if training in self._left else "began it in another process"
                raise CannotReply(FAILED, "order", f"a phase of a secure round was not answered: this client {why}")
            try:
                message = self._answer(one, phase_of(assignment_id), self._request(one, delivery))
            except Withdraw as error:
                self.forget(training)
                raise _failed(error) from error
        return None if message is None else _reply(delivery.assignment, message)

    def _answer(self, one: _Round, phase: str, request: bytes) -> bytes | None:
        match phase:
            case "advertise":  # again, for an aggregator that was restarted
                return one.participant.advertise()
            case "share":
                return one.participant.share(request)
            case "masked":
                one.seed = one.participant.prepare(request)
                self._changed.notify_all()
                return None
            case "agree":
                return one.participant.agree(request)
            case "unmask":
                return one.participant.unmask(request)
        raise Withdraw("order", f"no phase of a secure round is called {phase[:40]!r}")

    def _request(self, one: _Round, delivery: Delivery) -> bytes:
        """Read the request of a phase, after its length was checked."""
        parts, terms = delivery.assignment.parts, one.participant.terms
        most = max_request_bytes(terms.selected, terms.post_quantum)
        if [part.name for part in parts] != [REQUEST] or parts[0].length > most:
            raise Withdraw("message", f"a request that is not one part of at most {most:,} bytes")
        try:
            ((_, request),) = payload.parts_of(delivery.bundle, parts)
        except (BadPayload, OSError) as error:
            raise Withdraw("message", f"a request that is not readable: {error}") from error
        return request

    @property
    def identity(self) -> SecureIdentity:
        """Return the identity of this device."""
        assert self._identity is not None
        return self._identity

    @property
    def runs(self) -> set[str]:
        """Return the runs of the open rounds."""
        with self._changed:
            return {one.run for one in self._open.values()}

    def forget_run(self, run: str) -> None:
        """Drop the rounds of a run, because its next assignment begins or the run is over."""
        with self._changed:
            for training in [training for training, one in self._open.items() if one.run == run]:
                del self._open[training]
            self._left = {training: of for training, of in self._left.items() if of != run}
            self._changed.notify_all()

    def forget(self, assignment_id: str) -> None:
        """Drop the round of an assignment to train, or of one of its phases, and end the wait of its `encode`."""
        training = training_id(assignment_id)
        with self._changed:
            if (one := self._open.pop(training, None)) is not None:
                self._left[training] = one.run
            self._changed.notify_all()

    def has_left(self, training: str) -> bool:
        """Return True if this client left the round of this training assignment, so that its training can end."""
        return training in self._left

    def is_ready(self, training: str) -> bool:
        """Return True if `encode` would not wait: the seed of the rotation is here, or the round is over."""
        with self._changed:
            return (one := self._open.get(training)) is None or one.seed is not None

    def encode(self, job: AssignmentContext, trained: Trained, state: ClientRunState, layout: Layout) -> Result:
        """Encode an update on the lattice and mask it; return the reply, and the state with the new residual.

        It waits until the seed of the rotation is here, and raises `Cancelled` if the round is over before that.
        """
        assignment, raw_update = job.assignment, trained.raw_update
        assert raw_update is not None
        assert assignment.secure is not None
        one = self._prepared(assignment.assignment_id, job.cancelled)
        assert one.seed is not None
        keeps, age = keeps_residual(job.plan), max(1, assignment.round - state.encoded_at)
        with planned_threads(job.plan.local.codec_threads or cores()):
            if keeps and state.residual is not None:
                decay = np.float32(job.plan.uplink.feedback_decay**age)
                with np.errstate(over="ignore", invalid="ignore"):
                    raw_update += state.residual if decay == 1 else decay * state.residual
            if not finite(raw_update):  # zeros, and no failure: see `without_divergence`
                raw_update.fill(0.0)
            if job.plan.privacy.clipping == "per-layer":
                clip_layers(raw_update, layout.model_tensors, assignment.secure.clip)
            try:
                key, rng = rotation_key(one.seed), self.identity.rng()
                examples, window = trained.header.examples, assignment.secure.window
                points = one.lattice.encode(raw_update, examples, window, key, rng)
            except NotRounded as error:
                self.forget(assignment.assignment_id)
                raise CannotReply(FAILED, "lattice", f"left the round: {error}") from error
            fits = one.lattice.fits(points, self.identity.rng())
            made = client_scalars(
                job.plan.secure, trained.header.metrics, trained.header.histograms, self.identity.rng()
            )
            made |= {"weight": points.weight, "fits": fits}
            scalars = [made[name] for name in one.participant.terms.scalars]
            vectors = self._masked(assignment.assignment_id, points, scalars)
        del points  # a model of lanes
        parts, body = pack_vectors(vectors)
        bare = without_facts(replace(trained.header, parts=parts, codec=LATTICE))
        kept = raw_update if keeps else None
        return Result(bare, replace(state, residual=kept, encoded_at=assignment.round, noised=False), body)

    def _prepared(self, training: str, cancelled: Callable[[], bool]) -> _Round:
        """Return the round once its seed is here; raise `Cancelled` if it is over before that."""
        with self._changed:
            while (one := self._open.get(training)) is not None and one.seed is None and not cancelled():
                self._changed.wait(RECHECK_S)
            if one is None or cancelled():
                self.forget(training)
                raise Cancelled
            return one

    def _masked(self, training: str, points: Points, scalars: list[int]) -> MaskedVectors:
        with self._changed:
            if (one := self._open.get(training)) is None:
                raise Cancelled
            try:
                return one.participant.mask(points.lanes, scalars)
            except Withdraw as error:
                self.forget(training)
                raise _failed(error) from error


def pack_vectors(vectors: MaskedVectors) -> tuple[tuple[Part, ...], bytes]:
    """Return the part of a masked update, and its body: the packed update, then the scalars."""
    body = b"".join((vectors.update.data, vectors.scalars))
    return (Part(MASKED, len(body), hashlib.sha256(body).hexdigest()),), body


def max_request_bytes(selected: int, post_quantum: bool) -> int:
    """Return the largest request of any phase of a round of so many clients, in bytes."""
    roster = selected * max_bytes("advertise", selected, post_quantum)
    delivery = max_bytes("share", selected, post_quantum) + selected * (4 + SECRET_BYTES)
    return 4 + max(roster, delivery)


def _reply(assignment: Assignment, message: bytes) -> PhaseReply:
    return PhaseReply(assignment.assignment_id, base64.b64encode(message).decode(), identity=assignment.identity)


def _failed(error: Withdraw) -> CannotReply:
    """Return the failure of a client that leaves a round; the text of the error is for its owner alone."""
    return CannotReply(FAILED, error.reason, f"left the round: {error}; try: {error.hint}")
