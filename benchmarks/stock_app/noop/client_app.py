"""A device of the stock side: answers an array with that array and something added."""

from __future__ import annotations

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.query()
def query(message: Message, context: Context) -> Message:
    """Every float differs from what came: an answer that a node's store has already would not be sent."""
    values = message.content.array_records["arrays"]["w"].numpy() + np.float32(1 + context.node_id % 1000)
    return Message(RecordDict({"arrays": ArrayRecord({"w": Array(values)})}), reply_to=message)
