"""An answer's parts go into the spool without a network, each held against its digest, as at the door."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from thinwire.core.errors import BadPayload
from thinwire.core.fleet import Spool
from thinwire.core.home import private_opener
from thinwire.core.types import ReplyHead, Transfer
from thinwire.simulation.spool import HeldSpool

BLOCK = 1 << 20


def spooled(spool: Spool, reply: ReplyHead, bundle: Path | bytes | None, transfer: Callable[[], Transfer]) -> ReplyHead:
    """The head, with `transfer` taken once the parts stand in the spool; `BadPayload` where one is not its digest's."""
    if isinstance(spool, HeldSpool) and spool.has_room(reply):
        body = io.BytesIO()
        _copy(bundle, body, reply)
        head = reply.arrived(transfer())
        spool.hold(head, body.getbuffer())
        return head
    draft = spool.draft(reply.update_id)
    try:
        with open(draft, "wb", opener=private_opener) as out:
            _copy(bundle, out, reply)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    head = reply.arrived(transfer())
    spool.commit(draft, head)
    return head


def _copy(bundle: Path | bytes | None, out: BinaryIO, head: ReplyHead) -> None:
    """The parts, each held against its digest."""
    if bundle is None:
        if head.parts:
            raise BadPayload("an answer whose parts are missing")
        return
    with bundle.open("rb") if isinstance(bundle, Path) else io.BytesIO(bundle) as source:
        for part in head.parts:
            digest, left = hashlib.sha256(), part.length
            while left and (block := source.read(min(left, BLOCK))):
                digest.update(block)
                out.write(block)
                left -= len(block)
            if left or digest.hexdigest() != part.sha256:
                raise BadPayload(f"{part.name} is not what its digest says")
