"""Our asks and answers inside Flower messages: a head as JSON bytes, and the parts one after the other."""

from __future__ import annotations

from dataclasses import dataclass

from flwr.app import ConfigRecord, Message, RecordDict

from thinwire.core.errors import BadPayload

RECORD, HEAD, PARTS = "thinwire", "head", "parts"


@dataclass(frozen=True)
class Carried:
    """What one message holds."""

    head: bytes
    parts: bytes = b""

    @classmethod
    def read(cls, message: Message) -> Carried:
        """`BadPayload` for a message of another app."""
        record = message.content.config_records.get(RECORD)
        head, parts = (record.get(name) if record else None for name in (HEAD, PARTS))
        if not isinstance(head, bytes) or not isinstance(parts, bytes):
            raise BadPayload("a Flower message that is not ours", why=f"it has no {RECORD} record")
        return cls(head, parts)

    def content(self) -> RecordDict:
        return RecordDict({RECORD: ConfigRecord({HEAD: self.head, PARTS: self.parts})})
