"""Where a device stands at its aggregator, asked without changing anything there or disturbing its client."""

from __future__ import annotations

import http.client
import time
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric import ec

from thinwire.core.errors import ThinwireError
from thinwire.flower.device.address import Address
from thinwire.flower.device.call import Call, finish
from thinwire.flower.device.clockwork import Clockwork
from thinwire.flower.device.connection import Connection
from thinwire.flower.device.meaning import meaning, silence
from thinwire.flower.device.trust import Trust
from thinwire.flower.wire.refusals import Refusal
from thinwire.flower.wire.signing import Signer

NO_ASK = "/tw/v1/asks/thinwire.doctor/bundle"  # nobody's: who may ask is told so, who may not is told that


@dataclass(frozen=True)
class Stood:
    """`error`: why this device may not take part, None where it may. `skew_s`: how far its clock is behind.

    `kind` is the door's word for it: "ask" (approved), "hello" (a plain door makes the row at the first start), ...
    """

    kind: str
    fingerprint: str
    skew_s: float | None = None
    error: ThinwireError | None = None


def ask(url: str, trust: Trust | None, key: ec.EllipticCurvePrivateKey) -> Stood:
    """`Unreachable` where nobody answers, or nobody whom we trust."""
    clock = Clockwork()
    signer = Signer(key, clock.now)
    connection = Connection(Address.parse(url), signer, clock, lambda: trust)
    try:
        with connection.made(Call("GET", NO_ASK, whole_key=True)) as answer:
            finish(answer)
        return Stood("ask", signer.fingerprint)
    except Refusal as refusal:
        skew_s = refusal.now - time.time() if refusal.now else None
        fine = (refusal.status, refusal.kind) in ((404, "ask"), (401, "hello"))
        error = None if fine else meaning(refusal, url, tls=trust is not None, fingerprint=signer.fingerprint)
        return Stood(refusal.kind, signer.fingerprint, skew_s, error)
    except (OSError, http.client.HTTPException) as error:
        raise silence(error, url, tls=trust is not None) from error
    finally:
        connection.close()
