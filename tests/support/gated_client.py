"""A device that stands behind its gate, with what it read counted."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from tests.support.small_task import Aggregator, examples, plan_of, task_of
from thinwire.client.admission import AdmissionController
from thinwire.client.handler import AssignmentHandler
from thinwire.client.policy import Policy
from thinwire.client.train.protocol import Split
from thinwire.core.types import Failure, Reply, ReplyHeader

NOON = datetime(2026, 11, 21, 12, 0, tzinfo=timezone(timedelta(hours=1)))


class Device:
    """A handler behind a gate, whose task notes when its data are requested."""

    def __init__(self, folder: Path, policy: Policy, text: str = "", **admission: Any) -> None:
        self.folder, self.policy, self.read = folder, policy, 0
        self.aggregator = Aggregator(
            folder, task_of(data=self.data), plan_of(text, run='evaluate = "off"' if "[privacy]" in text else "")
        )
        self.at = NOON
        self.price: bool | None = None
        self.admission_options = admission
        self.start()

    def data(self, client: object) -> Split:
        self.read += 1
        return Split(examples(), examples(6, 4))

    def start(self) -> None:
        """As a new process would."""
        (self.folder / "device").mkdir(parents=True, exist_ok=True)
        options: dict[str, Any] = {
            "now": lambda: self.at,
            "is_metered": lambda link: self.price,
            **self.admission_options,
        }
        self.admission = AdmissionController(self.policy, self.folder / "device", **options)
        self.handler: AssignmentHandler = self.aggregator.handler(admission=self.admission)

    def assign(self, number: int = 1, kind: str = "train", **changed: Any) -> Reply:
        answer: Reply = self.aggregator.answer(self.handler, self.aggregator.assign(number, kind, **changed))[0]
        return answer

    def kind(self, *args: Any, **changed: Any) -> str:
        """Of the failure that an assignment comes to, else "reply"."""
        answer = self.assign(*args, **changed)
        return answer.kind if isinstance(answer, Failure) else "reply"

    def rule(self, *args: Any, **changed: Any) -> str:
        answer = self.assign(*args, **changed)
        if isinstance(answer, ReplyHeader):
            return ""
        assert isinstance(answer, Failure)
        assert answer.kind == "declined", answer
        return answer.text.partition(":")[0]

    @property
    def counts(self) -> Path:
        return self.folder / "device" / "policy.json"
