"""A device that does not train: it answers each assignment with a change of the right size, by our own client's link.

Run as `python -c "from benchmarks.noop_client import main; main()" URL NAME FOLDER TASK=TENSORSxROWSxCOLUMNS ...`.
No torch is loaded and nothing is learned, as in the stock app beside it; all that travels is encoded and hashed again
for each assignment.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from thinwire.compression import parse
from thinwire.core import Key, Layout
from thinwire.core.errors import Unreachable
from thinwire.core.fleet import Delivery, Hello, TaskReport
from thinwire.core.types import Assignment, Part, ReplyHeader, UpdateId
from thinwire.transport.device.identity import device_key
from thinwire.transport.device.link import HttpsLink

CODEC = "identity"
EXAMPLES = 100


@dataclass(frozen=True)
class Shape:
    """A model of `tensors` matrices."""

    tensors: int
    rows: int
    columns: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        tensors, rows, columns = (int(n) for n in text.split("x"))
        return cls(tensors, rows, columns)

    def __str__(self) -> str:
        return f"{self.tensors}x{self.rows}x{self.columns}"

    @property
    def floats(self) -> int:
        return self.tensors * self.rows * self.columns

    @property
    def layout(self) -> Layout:
        return Layout.of({f"w{i:03d}": (self.rows, self.columns) for i in range(self.tensors)})


class Echo:
    """Answers assignments on one task."""

    def __init__(self, shape: Shape, folder: Path) -> None:
        self.layout, self.bundle = shape.layout, folder / "answer"
        self.codec = parse(CODEC).bind(self.layout)
        self.changes = [np.full(segment.size, 1e-3, dtype=np.float32) for segment in self.layout.segments]

    def answer(self, assignment: Assignment, update_id: UpdateId, download_s: float) -> tuple[ReplyHeader, Path | None]:
        metrics = {"eval/loss": (1.0 / (1 + assignment.base_version) * EXAMPLES, float(EXAMPLES))}
        if assignment.kind != "train":
            header = ReplyHeader(
                assignment.assignment_id,
                update_id,
                assignment.base_version,
                EXAMPLES,
                metrics=metrics,
                identity=assignment.identity,
            )
            return header, None
        parts = []
        with open(self.bundle, "wb") as file:
            for number, change in enumerate(self.changes):
                change[0] = assignment.round
                frame = self.codec.encode(change.copy(), self.codec.init(number), Key(assignment.round), number).payload
                parts.append(Part(f"frame/{number}", len(frame), hashlib.sha256(frame).hexdigest()))
                file.write(frame)
        header = ReplyHeader(
            assignment.assignment_id, update_id, assignment.base_version, EXAMPLES, steps=1, a=1.0, norm=1.0,
            metrics=metrics,
            parts=tuple(parts), codec=assignment.codec, identity=assignment.identity,
        )  # fmt: skip
        return header, self.bundle


def serve(url: str, name: str, folder: Path, shapes: dict[str, Shape]) -> None:
    """Serve the aggregator until the process is ended."""
    folder.mkdir(parents=True, exist_ok=True)
    echoes = {task: Echo(shape, folder) for task, shape in shapes.items()}
    tasks = tuple(TaskReport(task, layout_digest=echo.layout.digest, codecs=(CODEC,)) for task, echo in echoes.items())
    link = HttpsLink(url, device_key(folder), name, folder)
    hello = Hello(name, uuid.uuid4().hex, tasks)
    numbers = itertools.count(1)
    while not _said(link, hello):
        time.sleep(0.1)
    while True:
        delivery = link.pull(25.0)
        if delivery is not None and delivery.assignment.kind != "stop":
            update_id = UpdateId(delivery.assignment.run, name, next(numbers))
            link.push(*echoes[delivery.assignment.task].answer(delivery.assignment, update_id, delivery.download_s))
        _forget(delivery)


def _said(link: HttpsLink, hello: Hello) -> bool:
    with contextlib.suppress(Unreachable):  # it is still starting
        link.hello(hello)
        return True
    return False


def _forget(delivery: Delivery | None) -> None:
    if delivery is not None and delivery.bundle is not None:
        delivery.bundle.unlink()


def main() -> None:
    url, name, folder, *tasks = sys.argv[1:]
    shapes = {task: Shape.parse(shape) for task, _, shape in (text.partition("=") for text in tasks)}
    serve(url, name, Path(folder), shapes)
