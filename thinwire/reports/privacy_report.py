"""The privacy report of one run: a document for a data-protection officer, by the questions of NIST SP 800-226 (2025).

It answers: what is the unit and who are neighbours; epsilon and delta; which mechanism, with which numbers; who is
trusted with what; how often one client took part; what was released when; what was done before and after the noise;
which assumptions are enforced and which are not; what an audit has shown; and what epsilon means for one person.

Invariant: a figure without a bound is left out, and `left_out` has the reason. No client is named.

A report is signed with the key of the aggregator's private CA, whose SHA-256 is the pin that devices trust. An
aggregator without a CA (plain loopback, simulations) has a key of its own in `report.key`, made for the first report.
Both are P-256 keys. The signature is ECDSA with SHA-256 over LABEL and the JSON of the report with sorted keys. LABEL
separates it from the certificates that a CA's key signs: they begin with another byte. A page holds the signed JSON,
and is made from it alone, so that to make it again shows whether its text is what was signed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import html
import json
import math
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
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

import thinwire
from thinwire.core.errors import DataLost, UsageError
from thinwire.core.formatting import counted, rounded_up
from thinwire.core.statedir import keep_private, write_atomically
from thinwire.privacy.accounting import releases_of
from thinwire.privacy.meaning import meaning, right_guesses, unit_text
from thinwire.privacy.noise_plan import most_participations
from thinwire.reports import secure_rounds
from thinwire.reports.privacy import (
    EVERYONE,
    SIMULATED,
    TREE,
    TRUSTED,
    sampling_text,
    spending_of_run,
)
from thinwire.store.read_models import population_of, privacy_section

if TYPE_CHECKING:
    from thinwire.core.plan_values import PrivacySection
    from thinwire.core.statedir import AggregatorHome
    from thinwire.store import PrivacyRow, RunRow, Store


AUDIT: Final = Path(thinwire.__file__).parents[1] / "docs" / "evidence" / "privacy-audit.json"  # in a checkout only
AUDITED: Final[Mapping[str, str]] = {"central": "audited_lower", "distributed": "audited_lower_distributed"}  # figures
ADJACENCY: Final[Mapping[str, str]] = {
    "central": "zero-out: two runs are neighbours if one client's clipped update is zero in one of them in every round",
    "distributed": "zero-out: two runs are neighbours if one client's clipped update is zero in one of them in every "
    "round; the noise counted is that of the fewest honest survivors",
    "local": "replace: two runs are neighbours if all data of one client are replaced by any other",
    "example": "add or remove: two runs are neighbours if one record of one device is in one of them only",
}
WHO: Final[Mapping[str, Mapping[str, str]]] = {
    "central": {
        "aggregator": "trusted with each single update in the clear, with adding the noise, and with the sampler's "
        "randomness; epsilon is its claim, which no device can check",
        "other clients": "not trusted: they see released models only",
        "readers of the models": "not trusted: epsilon bounds what they learn",
        "operator's backups": "trusted like the aggregator; they have no spool of a private run and no raw sum",
    },
    "distributed": {
        "aggregator": "not trusted with single updates: it sees noised sums, as secure aggregation assumes",
        "other clients": "trusted in part: at least the counted number of honest survivors adds its noise, and takes "
        "it off no model; a client that does counts as a corrupt one",
        "readers of the models": "not trusted: epsilon bounds what they learn",
    },
    "local": {"aggregator": "not trusted: each update is noised on the device", "readers of the models": "not trusted"},
    "example": {
        "aggregator": "not trusted with single records; a client's data as a whole are not protected from it",
        "readers of the models": "not trusted with single records",
    },
}
PIPELINE: Final[Mapping[str, str]] = {
    "central": "device: encode; aggregator: decode, clip, round to the grid, sum, add noise once, make the step; then "
    "the downlink codec. The uplink codec is before the clip and the noise, so it costs accuracy and no privacy. What "
    "comes after the noise only processes it further.",
    "distributed": "device: support, clip, rotate, round, add its noise; aggregator: sum under masks, decode",
    "local": "device: clip, round to the grid, add noise, encode. The uplink codec is after the noise.",
    "example": "device, at each step: sample records, clip each gradient, round to the grid, sum, add noise; then "
    "encode. The uplink codec is after the noise.",
}
LATTICE: Final = "integers on a grid, summed under masks"
ENFORCED: Final = (
    "A round is reserved in the ledger before an assignment leaves, and a reservation stays spent.",
    "A reply that tells more of its data than the update is refused; weights are equal; no metric is released.",
    "The budget and max_participations are checked for each client before each round.",
)
NOT_ENFORCED: Final = (
    "One person has one client: several devices of one person, or of one attacker (Sybils), count as different ones.",
    "Each aggregator and each population counts alone: what the same data spent elsewhere is not in this figure.",
    "Who took part, when, and how many bytes a device sent are recorded without noise.",
    "Nobody chose the noise or the rounds of a run by what an earlier run showed; a budget holds also if someone did.",
)
ACCOUNTING: Final = "Rényi, for releases that no earlier output decided; delta includes what samplers may miss"
CLIPPED: Final = "The aggregator clips each decoded update, and checks the exact norm of the integers that it sums."
SERVER_HONEST: Final = "The aggregator is honest: it clips, adds noise, keeps the ledger, and deletes updates."
KEYS_KEPT: Final = "Nobody reads or copies the stored keys of the noise of a tree before they are deleted."
CLIENTS_CLIP: Final = "Each client clips by itself: the length of a lying client's update is not bounded."


def privacy_report(store: Store, run: RunRow) -> dict[str, Any]:
    """Return the report of a private run as JSON types; raise `UsageError` for a run without privacy."""
    spent = spending_of_run(store, run)
    if spent is None:
        raise UsageError(
            f"{run.run_id} has no differential privacy",
            why='its plan has [privacy] mode = "off": no epsilon bounds what its models tell of a client',
            hint="thinwire privacy ledger, for the runs that have",
        )
    privacy, mode = privacy_section(run), spent.mode
    own = [row for row in store.privacy.rows(population_of(run)) if row.run_id == run.run_id and row.release]
    secure = secure_rounds.protection(run, [len(one.selected) for one in store.rounds(run.run_id)])
    left_out, tree = list[str](), [TREE.format(privacy.min_separation)] if privacy.mechanism == "tree" else []
    unknown = store.privacy.unknown().get(spent.population, "")
    if unknown:
        left_out.append(f"epsilon in all runs of {spent.population}: {unknown}")
    if spent.epsilon_run is None:
        left_out.append("epsilon: the releases have no bound at this delta, or a newer version wrote them")
    return {
        "about": "privacy report, by the questions of NIST SP 800-226",
        "made_at": moment(time.time()),
        "made_by": f"thinwire {thinwire.__version__}",
        "run": {
            "id": run.run_id, "identity": run.identity, "task": run.task, "status": run.status, "source": run.source,
            "created_at": moment(run.created_at),
            "plan_sha256": hashlib.sha256(json.dumps(run.plan, sort_keys=True).encode()).hexdigest(),
        },
        "unit": unit_text(mode),
        "adjacency": ADJACENCY[mode],
        "guarantee": _guarantee(spent.epsilon_run, None if unknown else spent.epsilon, spent.delta),
        "mechanism": {
            "mode": mode,
            "clip": _clip(privacy),
            "amplification": sampling_text(mode, spent.rate),
            "kinds": list(_kinds(own)),
        },
        "trust": {"in_short": SIMULATED if run.source == "sim" else TRUSTED.get(mode, ""), **WHO[mode]},
        "participation": {
            "cap_of_the_plan": most_participations(privacy, run.plan["run"]["rounds"]),
            "most_rounds_of_one_client": spent.participations, "sampling_rate": privacy.sampling_rate,
            "clients": spent.clients if privacy.sampling_rate is None else None, "population": spent.population,
            "budget": privacy.budget,
        },
        "releases": [_release(row) for row in own],
        "rounds_without_a_release": spent.reserved - spent.released,
        "codecs": {
            "uplink": LATTICE if secure else run.plan["uplink"]["codec"], "downlink": run.plan["downlink"]["codec"],
            "order": PIPELINE.get(mode, ""),
        },
        "assumptions": {
            "enforced": [*ENFORCED, *([CLIPPED] if mode == "central" else []), *tree],
            "not_enforced": [
                SERVER_HONEST if mode == "central" else CLIENTS_CLIP,
                *([KEYS_KEPT] if tree else ()),
                *(secure.assumes if secure else ()),
                *NOT_ENFORCED,
            ],
        },
        "audit": audit_text(AUDIT, privacy.mechanism if tree else mode),
        "meaning": meaning(spent.epsilon_run, spent.delta, mode),
        "left_out": left_out,
    }  # fmt: skip


def _clip(privacy: PrivacySection) -> str:
    """Return the clip, and how it follows the updates if it does."""
    said = f"{privacy.clip:g}" if privacy.clip is not None else "none"
    said += ", then the noised median of the norms" if privacy.adaptive else ""
    return said + (", divided among the tensors" if privacy.clipping == "per-layer" else "")


def _guarantee(of_run: float | None, of_all: float | None, delta: float) -> dict[str, Any]:
    """Return the claimed figures; one that has no bound is not in it."""
    found: dict[str, Any] = {"delta": delta, "accounting": ACCOUNTING}
    for name, value in (("epsilon", of_run), ("epsilon_all_runs", of_all)):
        if value is not None and math.isfinite(value):
            found[name] = float(rounded_up(value))
    if "epsilon" in found:
        found["right_guesses_at_most"] = right_guesses(found["epsilon"], delta)
    return found


def _kinds(rows: list[PrivacyRow]) -> Iterator[dict[str, Any]]:
    """Yield each kind of release with its numbers in grid steps, and how many rounds have it."""
    counts = Counter(row.release for row in rows)
    for text, count in counts.items():
        try:
            (release,) = releases_of({text: 1})
        except DataLost:
            yield {"rounds": count, "unreadable": True}
            continue
        yield {
            "rounds": count, "distribution": release.distribution, "sensitivity": release.sensitivity,
            "variance": release.variance, "dimensions": release.dimensions, "parties": release.parties,
            "rate": release.rate, "distance_of_a_draw": release.distance, "steps": release.steps, "unit": release.unit,
        }  # fmt: skip


def _release(row: PrivacyRow) -> dict[str, Any]:
    return {"round": row.round, "reserved_at": moment(row.at), "state": row.state, "model_sha256": row.digest or None}


def moment(at: float) -> str:
    """Return a wall-clock time as ISO 8601 in UTC, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def audit_text(path: Path, mode: str) -> str:
    """Return what the committed audit has shown of the noise of a mode; "not audited" if it attacked no such noise."""
    try:
        found = json.loads(path.read_text())
        lower, claimed = (found["figures"][name] for name in (AUDITED[mode], "claimed_epsilon"))
        return (
            f"an attack on this code in mode {mode} showed at least epsilon {lower:.3g} of the claimed {claimed:g} "
            f"(commit {found['commit'][:12]}); it audits the code, not this run"
        )
    except (OSError, ValueError, KeyError, TypeError):
        return "not audited"


def report_lines(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the report as labels and texts; a label of "" goes on with the one before."""
    run, said, mechanism, part = (report[name] for name in ("run", "guarantee", "mechanism", "participation"))
    yield "run", f"{run['id']} of the task {run['task']}, {run['status']}, made {run['created_at']}"
    yield "unit", report["unit"]
    yield "adjacency", report["adjacency"]
    if "epsilon" in said:
        yield "epsilon", f"{said['epsilon']:g} in this run, at delta = {said['delta']:g} ({said['accounting']})"
    if "epsilon_all_runs" in said:
        yield "", f"{said['epsilon_all_runs']:g} in all runs of the population {part['population']}"
    yield "meaning", report["meaning"]
    for kind in mechanism["kinds"]:
        if "distribution" in kind:
            grid = f"standard deviation {math.sqrt(kind['variance']):.6g} and sensitivity {kind['sensitivity']:.6g}"
            grid += f" in grid steps, {kind['dimensions']} dimensions"
            grid += f", the noise of {kind['parties']} honest clients" if kind["parties"] > 1 else ""
            yield (
                "mechanism",
                f"{kind['distribution']}, {grid}, {counted(kind['rounds'], 'round')}; clip = {mechanism['clip']}",
            )
    yield "sampling", mechanism["amplification"]
    yield "trust", report["trust"]["in_short"]
    yield from (("trust", f"{who}: {what}") for who, what in sorted(report["trust"].items()) if who != "in_short")
    most = f"{part['most_rounds_of_one_client']} of at most {part['cap_of_the_plan']}"
    budget = "" if part["budget"] is None else f"; budget = {part['budget']:g}"
    if part.get("sampling_rate") is None:
        yield "rounds", f"one client took part in {most}; {counted(part['clients'], 'client')}{budget}"
    else:
        paid = f"{EVERYONE} pays for {most}, sampled or not"
        yield "rounds", f"{paid}; the number of sampled clients is not shown{budget}"
    released = [one for one in report["releases"] if one["state"] == "committed"]
    when = f", {released[0]['reserved_at']} to {released[-1]['reserved_at']}" if released else ""
    yield "releases", f"{counted(len(released), 'model')}{when}; {report['rounds_without_a_release']} spent without one"
    yield "codecs", f"uplink {report['codecs']['uplink']}, downlink {report['codecs']['downlink']}"
    yield "", report["codecs"]["order"]
    for name, label in (("enforced", "enforced"), ("not_enforced", "assumed")):
        yield from ((label, one) for one in report["assumptions"][name])
    yield "audit", report["audit"]
    yield from (("left out", one) for one in report["left_out"])
    yield "made", f"{report['made_at']} by {report['made_by']}"


LABEL: Final = b"thinwire privacy report 1\n"
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
    state, own = place.root / "tls" / CA_STATE, place.report_key
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
