"""Measure what a client's work costs here: a step, encoding an update, and one exchange with a real aggregator."""

from __future__ import annotations

import math
import tempfile
from argparse import ArgumentParser
from dataclasses import dataclass
from pathlib import Path

from benchmarks.noop_client import Shape
from benchmarks.ours import Ours
from benchmarks.processes import Processes
from thinwire.client import ClientInfo
from thinwire.client.task import load_task
from thinwire.core import RunPlan
from thinwire.core.events import Event, UpdateAccepted
from thinwire.core.statedir import AggregatorHome
from thinwire.simulation import run_sim
from thinwire.store import Store

ROUNDS = 20
WITHIN_S = 120.0


@dataclass(frozen=True)
class Costs:
    """Seconds, each the least of twenty: of a training step, of encoding an update, and of an exchange, in which one
    device process is sent a model as large as the task's and sends one back, over the aggregator's device API on
    loopback, until that is durable. The least, for whatever else runs on the machine only adds to them.
    """

    step_s: float
    encode_s: float
    exchange_s: float
    given: bool = False  # measured before this run, and typed

    @classmethod
    def of(cls, text: str) -> Costs:
        """
        >>> Costs.of("0.001,0.002,0.03")
        Costs(step_s=0.001, encode_s=0.002, exchange_s=0.03, given=True)
        """
        step_s, encode_s, exchange_s = (float(seconds) for seconds in text.split(","))
        return cls(step_s, encode_s, exchange_s, given=True)

    def figures(self) -> dict[str, float]:
        """Return the costs under the names that a benchmark's document has."""
        seconds = {"step_s": self.step_s, "encode_s": self.encode_s, "exchange_s": self.exchange_s}
        return {**seconds, "costs_given": float(self.given)}

    def __str__(self) -> str:
        named = {"a step": self.step_s, "an encoding": self.encode_s, "an exchange": self.exchange_s}
        return ", ".join(f"{name} takes {seconds * 1e3:.3f} ms" for name, seconds in named.items())

    def times(self, factor: float) -> Costs:
        return Costs(self.step_s * factor, self.encode_s * factor, self.exchange_s * factor, self.given)


def add_option(parser: ArgumentParser) -> None:
    """`--costs`, which `Costs.of` reads."""
    parser.add_argument("--costs", help="measured before, with nothing else on the machine: STEP,ENCODE,EXCHANGE in s")


def measured(task: str, plan: RunPlan, parameters: int) -> Costs:
    """Return the costs of a plan's work with a task (NAME=MODULE) whose model has so many trained parameters."""
    step_s, encode_s = _work(task, plan)
    return Costs(step_s, encode_s, _exchange(parameters))


def _work(task: str, plan: RunPlan) -> tuple[float, float]:
    raw, headers = plan.to_json(), list[dict[str, float]]()
    alone = RunPlan.from_json({**raw, "run": {**raw["run"], "rounds": ROUNDS}, "cohort": {}})

    def on_event(event: Event) -> None:
        if isinstance(event, UpdateAccepted):
            spent = event.header["timings"]
            headers.append({"step_s": spent["train_s"] / event.header["steps"], "encode_s": spent["encode_s"]})

    with tempfile.TemporaryDirectory(prefix="thinwire-bench-") as folder:
        home = AggregatorHome.under(Path(folder), durable=False)
        with Store.open(home.database, durable=False) as store:
            run_sim(alone, load_task(task), store=store, home=home, clients=1, client=ClientInfo(), on_event=on_event)
    step_s, encode_s = (min(header[name] for header in headers) for name in ("step_s", "encode_s"))
    return step_s, encode_s


def _exchange(parameters: int) -> float:
    side = math.isqrt(parameters)
    with tempfile.TemporaryDirectory(prefix="thinwire-bench-") as name, Processes(Path(name)) as processes:
        ours = Ours(Path(name), processes, 1, {"noop": Shape(1, side, side)})
        try:
            ours.rounds("noop", ROUNDS, WITHIN_S)
            runs = ours.store.runs()
            return min(
                row.arrived_at - row.pulled_at
                for row in ours.store.updates(runs[-1].run_id)
                if row.arrived_at and row.pulled_at and row.payload_up
            )
        finally:
            ours.close()
