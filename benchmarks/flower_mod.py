"""A plain Flower app before and after the two lines: `thinwire.flower.mod()` and `thinwire.flower.wrap(...)`.

    python -m benchmarks.flower_mod [--preset tiny|small|full] --json

The app is examples/compressed_flower_app, an MLP of 4.3 M parameters (`full`) on the digits, with a SuperLink and two
SuperNodes as real processes, as `flwr run` starts it; before the two lines it is a copy that does not import Thinwire.
It runs on loopback, and where network namespaces are allowed, also on lines of 20 Mb/s in both directions (tc tbf):
there the kernel counts each byte on the wire, with Flower's own requests, its app and all headers. `seconds_ratio` is
the median round after over that before, without the first. `accuracy_gap` is simulated with the same clients and
messages in one process, on several seeds: the mean accuracy of the last quarter of the rounds before, minus that after.
"""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from benchmarks.document import note
from benchmarks.entry import run_in_folder
from benchmarks.processes import Processes
from benchmarks.stock import ROOT, Stock
from tests.support.namespaces import AGGREGATOR
from tests.support.shaped import Star, star, why_not
from thinwire.flower import wrap

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict  # isort: skip
from flwr.serverapp.strategy import FedAvg, Strategy  # isort: skip
from flwr.supercore.task_identity import TaskIdentity  # isort: skip

APP = ROOT / "examples" / "compressed_flower_app"
CODEC, DOWN = "topk(0.02) > int8 > rice", "int8"
NODES, MBIT = ("device-0", "device-1"), 20.0
WAYS = {"before": "", "after": CODEC}
OURS = ("import thinwire.flower\n", "mods=[thinwire.flower.mod()]")  # what an app has of Thinwire
EPOCHS, LR = 2, 0.1


@dataclass(frozen=True)
class Preset:
    """`hidden` units of a layer, `rounds` on each line; `seeds` and `seed_rounds` of the simulated accuracy."""

    hidden: int
    rounds: int
    seeds: int
    seed_rounds: int


PRESETS = {"tiny": Preset(64, 2, 1, 2), "small": Preset(1024, 3, 1, 20), "full": Preset(2048, 5, 3, 30)}


def measure(preset: Preset, folder: Path) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Run the app on its lines, and simulate its accuracy."""
    rows = list(accuracies(preset))
    note(f"accuracy: {rows}")
    (folder / "loopback").mkdir()
    rows += on(folder / "loopback", preset, None)
    reason = why_not()
    if not reason:
        (folder / "line").mkdir()
        rates = dict.fromkeys(NODES, MBIT)
        with star(rates, rates, queued="100ms") as net:
            rows += on(folder / "line", preset, net)
    return [*rows, {"way": "after", "codec": CODEC, "down": DOWN, "why_no_line": reason}], figures(rows)


def on(folder: Path, preset: Preset, net: Star | None) -> Iterator[dict[str, Any]]:
    """Yield a row a round of the app before and after the two lines, and one with the bytes of each."""
    line = "loopback" if net is None else f"{MBIT:g} Mb/s"
    machines = [] if net is None else [net.aggregator, *net.devices.values()]
    inside = [("ip", "netns", "exec", name) for name in machines]
    with Processes(folder) as processes:
        stock = Stock(folder, processes, len(NODES), APP, inside, AGGREGATOR if net else "127.0.0.1")
        apps = {"before": without_ours(stock.app, folder / "before"), "after": stock.app}
        for way, codec in WAYS.items():
            stock.app = apps[way]
            out, before = folder / f"{way}.jsonl", counted(net)
            words = f'codec="{codec}" down="{DOWN}" num-server-rounds={preset.rounds} hidden={preset.hidden}'
            found = stock.run(f'nodes={len(NODES)} {words} out="{out}"', out, preset.rounds + 1, 120.0 * preset.rounds)
            up, down = (now - then for now, then in zip(counted(net), before, strict=True))
            seconds = [other["at"] - one["at"] for one, other in pairwise(found)]
            for number, taken in enumerate(seconds, 1):
                yield {"line": line, "way": way, "round": number, "seconds": taken}
            payload = found[-1]["uplink_payload"] or preset.rounds * len(NODES) * dense_bytes(preset.hidden)
            yield {"line": line, "way": way, "up": up, "down": down, "payload": payload}
            note(f"{line}, {way}: {median(seconds):.1f} s a round, {up} B up, {down} B down")


def without_ours(app: Path, to: Path) -> Path:
    """Write the app without Thinwire's lines, so that its processes do not import it; return its folder."""
    shutil.copytree(app, to)
    for file in (to / "compressed_digits").glob("*_app.py"):
        text = file.read_text()
        for words in OURS:
            text = text.replace(words, "")
        file.write_text(text)
    return to


def dense_bytes(hidden: int) -> int:
    """Return the bytes of the model in float32: three layers with their biases."""
    return 4 * (64 * hidden + hidden + hidden * hidden + hidden + hidden * 10 + 10)


def counted(net: Star | None) -> tuple[int, int]:
    """Return the bytes that the kernel has counted on the devices' lines: up, down."""
    if net is None:
        return 0, 0
    up = down = 0
    for device in net.devices:
        words = ["ip", "-n", net.router, "-s", "-j", "link", "show", "dev", device]
        (told,) = json.loads(subprocess.run(words, capture_output=True, check=True).stdout)
        up, down = up + told["stats64"]["rx"]["bytes"], down + told["stats64"]["tx"]["bytes"]
    return up, down


def figures(rows: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Return what the rows come to; a line that was not there has no figures."""
    rows = list(rows)
    found: dict[str, float] = {}

    def of(way: str, key: str, line: str = "") -> list[float]:
        return [row[key] for row in rows if row["way"] == way and key in row and line in ("", row.get("line"))]

    for line, name in (("loopback", "seconds_ratio_loopback"), (f"{MBIT:g} Mb/s", "seconds_ratio")):
        seconds = {way: of(way, "seconds", line)[1:] for way in WAYS}
        if seconds["before"]:
            found[name] = median(seconds["after"]) / median(seconds["before"])
    payload = {way: sum(of(way, "payload", "loopback")) for way in WAYS}
    found["uplink_payload_ratio"] = payload["before"] / payload["after"]
    up, down = ({way: sum(of(way, key)) for way in WAYS} for key in ("up", "down"))
    if up["after"]:
        found["uplink_bytes_ratio"] = up["before"] / up["after"]
        found["total_bytes_ratio"] = (up["before"] + down["before"]) / (up["after"] + down["after"])
    found["accuracy_gap"] = fmean(of("before", "accuracy")) - fmean(of("after", "accuracy"))
    found["accuracy"], found["accuracy_after"] = fmean(of("before", "accuracy")), fmean(of("after", "accuracy"))
    return found


def accuracies(preset: Preset) -> Iterator[dict[str, Any]]:
    """Yield the accuracy of each seed before and after the two lines."""
    for seed in range(1, preset.seeds + 1):
        for way in WAYS:
            yield {"way": way, "seed": seed, "accuracy": accuracy(way, preset, seed)}


class InProcess:
    """Answers messages by the app's own clients; each has a context that stays."""

    def __init__(self, hidden: int, seed: int) -> None:
        self.app = import_module("compressed_digits.client_app").app
        config = {"hidden": hidden, "local-epochs": EPOCHS, "learning-rate": LR}
        self.contexts = {
            node: Context(seed, node, {"partition-id": at, "num-partitions": len(NODES)}, RecordDict(), dict(config))
            for at, node in enumerate(range(11, 11 + len(NODES)))
        }

    def get_node_ids(self) -> list[int]:
        """Return the ids of all nodes."""
        return list(self.contexts)

    def answer(self, message: Message) -> Message:
        """Return the reply of the message's node."""
        reply: Message = self.app(copy.deepcopy(message), self.contexts[message.metadata.dst_node_id])
        return reply


@contextmanager
def in_a_task() -> Iterator[None]:
    """Give this process the run that Flower's messages are made in."""
    for name in ("_run_id", "_task_id", "_node_id"):
        setattr(TaskIdentity, name, 1)
    sys.path.insert(0, str(APP))
    try:
        yield
    finally:
        sys.path.remove(str(APP))


def accuracy(way: str, preset: Preset, seed: int) -> float:
    """Return the mean accuracy of the models of the last quarter of the rounds."""
    with in_a_task():
        torch.set_num_threads(1)  # as the nodes of the real runs have it
        task = import_module("compressed_digits.task")
        net = task.model(min(1024, preset.hidden), seed)
        grid: Any = InProcess(net[0].out_features, seed)
        strategy: Strategy = FedAvg(fraction_evaluate=0.0)
        if WAYS[way]:
            strategy = wrap(strategy, WAYS[way], down=DOWN)
        arrays, found = ArrayRecord(net.state_dict()), []
        for number in range(1, preset.seed_rounds + 1):
            messages = strategy.configure_train(number, arrays, ConfigRecord(), grid)
            made, _ = strategy.aggregate_train(number, [grid.answer(message) for message in messages])
            assert made is not None
            arrays = made
            net.load_state_dict(arrays.to_torch_state_dict())
            found.append(task.accuracy(net))
        note(f"{way}, seed {seed}: " + " ".join(f"{one:.3f}" for one in found))
        return fmean(found[-max(1, len(found) // 4) :])


if __name__ == "__main__":
    run_in_folder("flower_mod", __doc__ or "", PRESETS, measure)
