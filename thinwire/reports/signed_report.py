"""Sign a privacy report with the aggregator's key, verify it, and show it as a page.

The key is that of the aggregator's private CA, whose SHA-256 is the pin that devices trust. An aggregator without a CA
(plain loopback, simulations) has a key of its own in `report.key`, made for the first report. Both are P-256 keys.

The signature is ECDSA with SHA-256 over LABEL and the JSON of the report with sorted keys. LABEL separates it from the
certificates that a CA's key signs: they begin with another byte. A page holds the signed JSON, and is made from it
alone, so that to make it again shows whether its text is what was signed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import html
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_der_public_key,
    load_pem_private_key,
)

from thinwire.core.errors import DataLost
from thinwire.core.statedir import keep_private, write_atomically
from thinwire.reports.privacy_report import report_lines

if TYPE_CHECKING:
    from thinwire.core.statedir import AggregatorHome

LABEL: Final = b"thinwire privacy report 1\n"
OWN_KEY: Final = "report.key"
CA_STATE: Final = "state.json"  # as transport/server/tls.py writes it
LARGEST: Final = 64 << 20  # bytes of a file: a release has about 200
_EMBEDDED = re.compile(r'<script type="application/json" id="report">(.*?)</script>', re.DOTALL)
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem;color:#1a1c1f;"
    "background:#fff}h1{font-size:1.4rem}table{border-collapse:collapse;width:100%}th,td{text-align:left;"
    "vertical-align:top;padding:.35rem .6rem;border-bottom:1px solid #ddd;overflow-wrap:anywhere}"
    "th{white-space:nowrap;font-weight:600}.wide{overflow-x:auto}.wide td{overflow-wrap:normal;white-space:nowrap}"
    "code{font-size:.85em;overflow-wrap:anywhere}"
    "@media(prefers-color-scheme:dark){body{color:#e7e7e4;background:#121417}th,td{border-color:#2b3037}}"
)


def signing_key(place: AggregatorHome) -> ec.EllipticCurvePrivateKey:
    """Return the key of the aggregator's latest CA, or its own key for reports, which is made if it is missing."""
    state, own = place.root / "tls" / CA_STATE, place.root / OWN_KEY
    try:
        path = own
        if state.exists():
            path = place.root / "tls" / f"{json.loads(state.read_bytes())['pins'][0][:16]}.ca.key"
        elif not own.exists():
            made = ec.generate_private_key(ec.SECP256R1())
            write_atomically(own, made.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        keep_private(path)
        key = load_pem_private_key(path.read_bytes(), None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError("it is no EC key")
        return key
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise DataLost(
            f"cannot read the aggregator's key in {place.root}", str(error), "thinwire aggregator restore"
        ) from error


def sign_report(report: Mapping[str, Any], key: ec.EllipticCurvePrivateKey) -> dict[str, Any]:
    """Return the report with `signed_by`, the SHA-256 of the public key, the key itself, and the signature."""
    spki = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    signed = {
        **report, "signed_by": hashlib.sha256(spki).hexdigest(), "public_key": base64.b64encode(spki).decode(),
    }  # fmt: skip
    signature = key.sign(_signed_bytes(signed), ec.ECDSA(SHA256()))
    return {**signed, "signature": base64.b64encode(signature).decode()}


def verify_report(data: bytes, pin: str) -> dict[str, Any]:
    """Return the report in a JSON file or page; raise `DataLost` if the key with this SHA-256 did not sign it.

    A page is refused too if its text is not what this version makes of the signed JSON.
    """
    try:
        text = data.decode()
        embedded = _EMBEDDED.search(text)
        report = json.loads(embedded[1] if embedded else text)
        spki = base64.b64decode(report["public_key"], validate=True)
        signature = base64.b64decode(report["signature"], validate=True)
        if (found := hashlib.sha256(spki).hexdigest()) != pin.replace(" ", "").replace(":", "").lower():
            raise _refused(f"it is signed by the key {found}", "compare --pin with what the operator gave you")
        key = load_der_public_key(spki)
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise _refused("its key is no EC key", "get it from the operator again")
        key.verify(signature, _signed_bytes({k: v for k, v in report.items() if k != "signature"}), ec.ECDSA(SHA256()))
    except (ValueError, KeyError, TypeError, AttributeError, binascii.Error, RecursionError) as error:
        raise _refused(f"it is no signed report: {str(error)[:100]}", "thinwire privacy report RUN --json") from error
    except InvalidSignature as error:
        raise _refused("its text is not what was signed", "get it from the operator again") from error
    if embedded and as_page(report) != text:
        raise _refused(
            f"its text is not what {report['made_by']} makes of the signed report, or this version makes it "
            "in another way",
            "verify the JSON: thinwire privacy report RUN --json",
        )
    return dict(report)


def as_page(report: Mapping[str, Any]) -> str:
    """Return a signed report as one HTML page without scripts, with the signed JSON in it."""
    inside = json.dumps(report, sort_keys=True).replace("</", "<\\/")
    report, rows, before = json.loads(inside), list[str](), ""  # in the order in which the page's reader has it
    for label, text in report_lines(report):
        name = "" if label in ("", before) else label
        before = label or before
        rows.append(f'<tr><th scope="row">{html.escape(name)}</th><td>{html.escape(text)}</td></tr>')
    releases = "".join(
        f"<tr><td>{one['round']}</td><td>{html.escape(one['reserved_at'])}</td><td>{html.escape(one['state'])}</td>"
        f"<td><code>{html.escape(one['model_sha256'] or '-')}</code></td></tr>"
        for one in report["releases"]
    )
    title = html.escape(f"Privacy report of {report['run']['id']}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n'
        f"<body><main><h1>{title}</h1>\n<table>{''.join(rows)}</table>\n<h2>Released models</h2>\n"
        '<div class="wide" tabindex="0" role="region" aria-label="Released models"><table><thead><tr>'
        '<th scope="col">round</th><th scope="col">reserved</th><th scope="col">state</th>'
        f'<th scope="col">SHA-256 of the model</th></tr></thead><tbody>{releases}</tbody></table></div>\n'
        f"<p>Signed by the key <code>{html.escape(report['signed_by'])}</code>. To verify this page: "
        "<code>thinwire privacy verify FILE --pin</code> with this key as the operator or an invitation gives it."
        f'</p></main>\n<script type="application/json" id="report">{inside}</script></body></html>\n'
    )


def _signed_bytes(report: Mapping[str, Any]) -> bytes:
    return LABEL + json.dumps(report, sort_keys=True, separators=(",", ":")).encode()


def _refused(why: str, hint: str) -> DataLost:
    return DataLost("the report is not valid", why, hint)
