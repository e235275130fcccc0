"""The history of a simulated run, for a notebook: its rounds, the assignments of each client, and the model.

`simulate` (run.py) returns a `History`. Progress of a run that goes on is printed by `Progress`, one line for all
rounds.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from thinwire.aggregation.downlink import named_tensors
from thinwire.client.personal_files import values_of
from thinwire.core.errors import NotFound, ThinwireError
from thinwire.core.events import NO_STEP, ClientFailed, Evaluated, Event, RoundClosed
from thinwire.core.run_events import is_sampled
from thinwire.core.statedir import AggregatorHome
from thinwire.reports.secure_rounds import why_not_known
from thinwire.reports.stored_models import StoredModel, stored_model
from thinwire.simulation.storage import CLIENTS
from thinwire.store import RoundRow, RunRow, Store, UpdateRow

if TYPE_CHECKING:
    import torch

MAX_FAILURES = 20  # in a history
# Figures of a round that would reveal how many clients Poisson sampling selected.
HIDDEN_BY_SAMPLING = ("selected", "aggregated", "late", "dropped", "failed", "payload_up", "payload_down")


@dataclass(frozen=True)
class History:
    """Holds the result of a simulation: the row of the run, those of its rounds, and those of its assignments.

    `failures` has one line for each of the first `MAX_FAILURES` failed assignments: the round, the client, the kind of
    the failure and the place in the task. Two histories are equal if their runs, rounds and failures are.
    """

    run: RunRow
    rounds: list[RoundRow]
    failures: tuple[str, ...] = ()
    updates: list[UpdateRow] = field(default_factory=list, repr=False, compare=False)
    _model: StoredModel | None = field(default=None, repr=False, compare=False)
    _make_model: Callable[[], Any] | None = field(default=None, repr=False, compare=False)  # the task's model()
    _clients: Path | None = field(default=None, repr=False, compare=False)  # their folders, if the run has a home

    @classmethod
    def read(cls, store: Store, home: AggregatorHome, run_id: str, make_model: Callable[[], Any]) -> History:
        """Return the history of a run that is over; `make_model` is the task's `model`."""
        run = store.run(run_id)
        try:
            model = stored_model(store, home, run_id, "last" if run.version else "0")
        except NotFound:  # the run failed before it had a model
            model = None
        failed = (event for _, event in store.events(run_id) if isinstance(event, ClientFailed))
        failures = tuple(
            f"round {one.round}: {one.device} {one.kind}: {one.text}" for one in itertools.islice(failed, MAX_FAILURES)
        )
        clients = home.simulation(run_id).parent / CLIENTS
        return cls(run, store.rounds(run_id), failures, store.updates(run_id), model, make_model, clients)

    def __repr__(self) -> str:
        """Return one line: a notebook shows it for a cell that ends in a history."""
        values = "".join(f", {name} {value:.4g}" for name, value in sorted(self.metrics.items()))
        return f"<History of {self.run.run_id}: {self.run.status}, {self.run.status_text}{values}>"

    @property
    def metrics(self) -> Mapping[str, float]:
        """Return the metrics of the last model, pooled over the clients' test splits."""
        return self.run.metrics

    @property
    def payload_up(self) -> int | None:
        """Return the bytes of all uplink payloads; None with Poisson sampling, as in `records`."""
        return None if is_sampled(self.run.plan) else self.run.payload_up

    def model(self, client: str = "") -> torch.nn.Module:
        """Return a new module of the task with the tensors of the run's last model, in evaluation mode.

        With the name of a `client`, the personal layers are those of this client. Otherwise they are those that the
        task's `model()` makes, as frozen tensors are. Raise `NotFound` if the run ended before it had a model, and for
        a client that has kept no personal layers: only a run with a home keeps them.
        """
        import torch

        if self._model is None or self._make_model is None:
            raise NotFound(f"{self.run.run_id} has no model", why=self.run.status_text)
        found, made = self._model, self._make_model()
        tensors = named_tensors(found.layout, found.params, found.buffers, found.row.counters, found.fixed)
        tensors |= {other: tensors[name] for other, name in found.layout.aliases if name in tensors}
        tensors |= self._personal(client) if client else {}
        made.load_state_dict({name: torch.from_numpy(values) for name, values in tensors.items()}, strict=False)
        return made.eval()  # type: ignore[no-any-return]  # the task's model() may be anything with a state

    def _personal(self, client: str) -> Mapping[str, Any]:
        run_id = self.run.run_id
        own = values_of(self._clients / client, run_id) if self._clients else None
        if own is None or not own.arrays:
            raise NotFound(
                f"{run_id} keeps no personal layers of {client!r}",
                why="its plan has none, the client has trained none, or the simulation had no home",
                hint='[local] personal_layers in the plan, simulate(..., home="experiments"), and a name of clients()',
            )
        return own.arrays

    def series(self, metric: str) -> list[float | None]:
        """Return one value of a metric for each round; None if the round's model was not evaluated."""
        return [row.metrics.get(metric) for row in self.rounds]

    def records(self) -> list[dict[str, Any]]:
        """Return one flat row for each round: its figures, the bytes of all clients, the metrics of the model it made,
        and as `train/NAME` those of its training. With Poisson sampling its counts and bytes are None, as elsewhere.
        """
        return [
            {
                "round": row.round, "reason": row.reason, "codec": row.codec, "selected": len(row.selected),
                "aggregated": len(row.aggregated), "late": row.late, "dropped": row.dropped, "failed": row.failed,
                "seconds": row.seconds, "payload_up": row.payload_up, "payload_down": row.payload_down,
                **(dict.fromkeys(HIDDEN_BY_SAMPLING) if row.hides_sample else {}), **row.metrics,
                **{f"train/{name}": value for name, value in row.train_metrics.items()},
            }
            for row in self.rounds
        ]  # fmt: skip

    def client_records(self) -> list[dict[str, Any]]:
        """Return one flat row for each assignment, in the order of rounds and clients.

        It has the outcome of the update and its reason, the client's examples and steps, its seconds of training, its
        bytes, the norms of update and residual, and the metrics of the model that it got, on its own test split. Under
        masks and with privacy no client reports facts of its data: such a value is None.
        """
        is_known = not why_not_known(self.run)
        return [
            {
                "round": row.round, "client": row.device, "outcome": row.outcome, "reason": row.reason,
                "staleness": row.staleness, "examples": row.examples if is_known else None,
                "steps": row.steps if is_known else None, "train_s": row.train_s,
                "payload_up": row.payload_up, "payload_down": row.payload_down, "norm": row.norm,
                "residual_norm": row.residual_norm, **row.metrics,
            }
            for row in sorted(self.updates, key=lambda row: (row.round, row.device))
        ]  # fmt: skip

    def frame(self) -> Any:
        """Return the records as a pandas DataFrame; raise `ThinwireError` if pandas is not installed.

        >>> simulate(task, plan, clients=20).frame().plot(x="round", y="accuracy")  # doctest: +SKIP
        """
        return _frame(self.records(), "frame", "records")

    def clients(self) -> Any:
        """Return the client records as a pandas DataFrame; raise `ThinwireError` if pandas is not installed.

        >>> simulate(task, plan, clients=20).clients().groupby("client")["eval/accuracy"].last()  # doctest: +SKIP
        """
        return _frame(self.client_records(), "clients", "client_records")


def _frame(rows: Sequence[Mapping[str, Any]], name: str, plain: str) -> Any:
    try:
        pandas = importlib.import_module("pandas")
    except ImportError as error:
        raise ThinwireError(
            f"history.{name}() needs pandas, which is not installed",
            why=str(error),
            hint=f"pip install 'thinwire[notebook]', or pandas; history.{plain}() gives the same rows",
        ) from error
    return pandas.DataFrame.from_records(rows)


class RunFailed(ThinwireError):
    """Raised if a simulated run failed; `history` has its rounds until then."""

    def __init__(self, history: History) -> None:
        run = history.run
        hint = "error.history has its rounds; simulate(..., debug=True) raises an error of the task where it happens"
        super().__init__(f"the run {run.run_id} failed: {run.status_text}", "\n".join(history.failures[:3]), hint)
        self.history, self.exit_code = history, run.exit_code
        self.add_note(f"try: {hint}")  # a notebook shows the traceback


@dataclass
class Progress:
    """Prints the progress of a run as one line, which each round overwrites."""

    rounds: int
    out: IO[str] = field(default_factory=lambda: sys.stderr)
    _metrics: str = ""
    _width: int = 0

    def __call__(self, event: Event) -> None:
        """Take an event of the run."""
        if isinstance(event, Evaluated):
            self._metrics = "".join(f"  {name} {value:.4g}" for name, value in sorted(event.metrics.items()))
        elif isinstance(event, RoundClosed):
            note = f" ({event.reason})" if event.reason in NO_STEP else ""
            line = f"round {event.round} of {self.rounds}{note}  {event.seconds:.1f} s{self._metrics}"
            print("\r" + line.ljust(self._width), end="", file=self.out, flush=True)
            self._width = len(line)

    def end(self) -> None:
        """End the line, if one was printed."""
        if self._width:
            print(file=self.out, flush=True)


def is_interactive() -> bool:
    """Return True if a person sees the output: standard error is a terminal, or the process runs a notebook."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def event_handler(
    on_round: Callable[[RoundClosed], object] | None,
    on_evaluate: Callable[[Evaluated], object] | None,
    progress: Progress | None,
) -> Callable[[Event], None]:
    """Return the function that passes each event of a run to the callbacks that are given."""

    def on_event(event: Event) -> None:
        if progress is not None:
            progress(event)
        if on_round is not None and isinstance(event, RoundClosed):
            on_round(event)
        if on_evaluate is not None and isinstance(event, Evaluated):
            on_evaluate(event)

    return on_event
