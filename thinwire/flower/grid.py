"""A Grid on Flower's state: asks and reply heads are Flower Messages. Frames never enter its object store.

A `Message` gets its metadata whole: Flower's public way to fill it goes through a process-wide identity.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import cast

from thinwire.flower.superlink import SuperLink  # first: it sets what flwr reads when it is imported

from flwr.app import ConfigRecord, Message, RecordDict  # isort: skip
from flwr.app.message import make_message  # isort: skip
from flwr.app.metadata import Metadata  # isort: skip
from flwr.common.constant import SUPERLINK_NODE_ID  # isort: skip

__all__ = ["Grid", "Message", "said"]

RECORD = "thinwire"
ASK, REPLY = "ask", "reply"
TTL_S = 10 * 365 * 86400.0  # the round decides when an ask is too old, not Flower


class Grid:
    """Messages of our Flower run. Called from the fleet's thread and the door's; Flower's state has its own lock."""

    def __init__(self, superlink: SuperLink) -> None:
        self._superlink, self._state = superlink, superlink.state

    def ask(self, node_id: int, data: bytes, group: str = "") -> Message:
        """Store an ask for a node."""
        for _ in range(2):
            message = self._message(ASK, data, SUPERLINK_NODE_ID, node_id, group=group)
            if self._state.store_message_ins(message) is not None:
                return message
            self._superlink.beat()  # Flower may have given up our run
        raise RuntimeError(f"Flower did not take an ask for node {node_id}")

    def delivered(self, message: Message) -> None:
        """Mark an ask as handed out, as Flower does at a node's pull. Re-delivery is ours, so this only informs.

        Flower's own `get_message_ins` looks at every message of every node at each call.
        """
        message.metadata.delivered_at = datetime.now(UTC).isoformat()

    def reply(self, ask: Message, data: bytes) -> Message:
        """Store the reply to an ask; where Flower has given up the ask's run, to an empty one in its place."""
        for _ in range(2):
            meta = ask.metadata
            reply = self._message(
                REPLY, data, meta.dst_node_id, SUPERLINK_NODE_ID, meta.message_id, meta.group_id, meta.run_id
            )
            reply.metadata.ttl = meta.created_at + meta.ttl - reply.metadata.created_at
            if self._state.store_message_res(reply) is not None:
                return reply
            self._superlink.beat()
            ask = self.ask(meta.dst_node_id, b"", meta.group_id)
        raise RuntimeError(f"Flower did not take a reply of node {ask.metadata.dst_node_id}")

    def collect(self, replies: Sequence[Message]) -> list[bytes]:
        """Take replies out of Flower's state, which forgets them and their asks.

        Flower's own `get_message_res` puts an error in the place of a reply whose node has gone offline since.
        """
        self._state.delete_messages(message_ins_ids={reply.metadata.reply_to_message_id for reply in replies})
        return [said(reply) for reply in replies]

    def forget(self, message: Message) -> None:
        """Delete an ask that is withdrawn."""
        self._state.delete_messages(message_ins_ids={message.metadata.message_id})

    def _message(
        self,
        kind: str,
        data: bytes,
        src_node_id: int,
        dst_node_id: int,
        reply_to: str = "",
        group: str = "",
        run: int = 0,
    ) -> Message:
        metadata = Metadata(
            run_id=run or self._superlink.run_id,
            message_id=uuid.uuid4().hex,
            src_node_id=src_node_id,
            dst_node_id=dst_node_id,
            reply_to_message_id=reply_to,
            group_id=group,
            created_at=time.time(),
            ttl=TTL_S,
            message_type="query",
            src_task_id=self._superlink.task_id,
        )
        return make_message(metadata, RecordDict({RECORD: ConfigRecord({kind: data})}))


def said(reply: Message) -> bytes:
    """What a reply holds."""
    return cast(bytes, reply.content[RECORD][REPLY])
