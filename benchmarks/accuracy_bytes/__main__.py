"""What accuracy each codec costs, and how many bytes it saves: the protocol of docs/evidence/accuracy-bytes.md.

python -m benchmarks.accuracy_bytes --preset committed --json
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.accuracy_bytes import archive, committed
from benchmarks.accuracy_bytes.models import FULL
from benchmarks.accuracy_bytes.presets import SMALL, Runs
from benchmarks.document import document, show
from benchmarks.entry import arguments

FOLDER = Path("accuracy-bytes")
COMMAND = "python -m benchmarks.accuracy_bytes --preset {}"


def main() -> None:
    parser = arguments("accuracy_bytes", __doc__, ("small", "full", "committed"))
    parser.add_argument("--folder", type=Path, help=f"where cells of the full preset are kept; {FOLDER}/")
    parser.add_argument("--models", default=",".join(FULL), help="which ones, in this order")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    chosen = parser.parse_args()
    command = COMMAND.format(chosen.preset)
    names = chosen.models.split(",")
    if chosen.preset == "committed":
        found = committed.read()
    elif chosen.preset == "full":
        folder = chosen.folder or FOLDER
        models = {name: FULL[name] for name in names}
        found = Runs(models, folder, chosen.workers, True, command, archive.KEPT).all()
    else:
        with tempfile.TemporaryDirectory(prefix="thinwire-bench-") as folder:
            models = {name: SMALL[name] for name in names}
            found = Runs(models, Path(folder), chosen.workers, False, command).all()
    show(told(chosen.preset, found), chosen.json)


def told(preset: str, found: dict[str, Any]) -> dict[str, Any]:
    """The document that every benchmark prints; a figure that is not there is null, with its reason."""
    made = document("accuracy_bytes", preset, committed.rows(found), {})
    figures = {name: value and round(value, 6) for name, value in committed.figures(found).items()}
    return {**made, "decides": found.get("decides", True), "figures": figures, "reasons": committed.reasons(found)}


if __name__ == "__main__":
    main()
