"""A client process that lies: `python -m tests.support.liar twice|garbage client start ...`, else as `thinwire`.

twice: each update is sent once more under a number of its own. garbage: its frames are random bytes that fit their
digests.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from thinwire.cli.main import main
from thinwire.core.types import Reply, ReplyHeader, UpdateId
from thinwire.transport.device.link import HttpsLink

Push = Callable[[HttpsLink, Reply, Path | None], None]
BEYOND = 10**9  # no honest number comes there
honest = HttpsLink.push


def twice(link: HttpsLink, reply: Reply, bundle: Path | None = None) -> None:
    honest(link, reply, bundle)
    if isinstance(reply, ReplyHeader) and reply.parts:
        update = reply.update_id
        honest(link, replace(reply, update_id=UpdateId(update.run, update.device, update.sequence + BEYOND)), bundle)


def garbage(link: HttpsLink, reply: Reply, bundle: Path | None = None) -> None:
    if isinstance(reply, ReplyHeader) and bundle is not None:
        frames = [random.Random(part.sha256).randbytes(part.length) for part in reply.parts]
        bundle = bundle.with_suffix(".garbage")
        bundle.write_bytes(b"".join(frames))
        digests = [hashlib.sha256(frame).hexdigest() for frame in frames]
        parts = tuple(replace(part, sha256=digest) for part, digest in zip(reply.parts, digests, strict=True))
        reply = replace(reply, parts=parts)
    honest(link, reply, bundle)


LIES: dict[str, Push] = {"twice": twice, "garbage": garbage}

if __name__ == "__main__":
    HttpsLink.push = LIES[sys.argv.pop(1)]  # type: ignore[assignment]  # so that the process lies wherever it pushes
    sys.exit(main())
