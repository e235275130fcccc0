"""The reference page of all codecs and coders, from what their classes declare."""

from __future__ import annotations

from docs.generate.table import table
from thinwire.compression.catalog import SAMPLE, CodecInfo, described

HEAD = ("name", "example", "what it does", "alone", "with error feedback", "bits a parameter", "paper")
INTRO = f"""\
# Codecs

All names that a chain may contain. `thinwire codecs` prints the same list, with the codecs of installed packages;
[bring a codec of your own](../how/your-own-codec.md) says how to add one.

The error bound is that of one call: omega is the variance of an unbiased codec, delta the contraction. Bits are
counted on {SAMPLE} normal values."""


def codecs_page() -> str:
    """Return the page with a table for each role."""
    rows = described()
    parts = [INTRO]
    for role in dict.fromkeys(row.role for row in rows):
        found = [_cells(row) for row in rows if row.role == role]
        parts.append(f"## {HEADINGS.get(role, role)}\n\n{table(HEAD, found)}")
    return "\n\n".join(parts)


HEADINGS = {
    "quantizer": "Quantizers",
    "sparsifier": "Sparsifiers",
    "lowrank": "Low rank",
    "coder": "Coders",
    "alias": "Aliases",
}


def _cells(row: CodecInfo) -> tuple[str, ...]:
    what = f"{row.stands_for}: {row.what}" if row.stands_for else row.what
    return f"`{row.name}`", f"`{row.example}`", what, row.kind, row.under_feedback, f"{row.bits:.2g}", row.paper
