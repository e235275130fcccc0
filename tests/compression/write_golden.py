"""Write the golden files that are missing: `python -m tests.compression.write_golden`.

They hold what a codec's bits are. A change of them is a change of the format: frames in outboxes, logs and spools of
running installations could not be read any more. So one that is there is never written over.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.codec_examples import SPECS, fixed_vector, layout_of
from thinwire.compression import parse
from thinwire.core import Key

FOLDER = Path(__file__).parents[1] / "golden" / "frames"


def name_of(spec: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", spec.lower()).strip("-")


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    x = fixed_vector()
    for spec in SPECS:
        if (FOLDER / f"{name_of(spec)}.frame").exists():
            continue
        codec = parse(spec).bind(layout_of(x.size, spec))
        payload = codec.encode(x.copy(), codec.init(), Key(1, 2)).payload
        (FOLDER / f"{name_of(spec)}.frame").write_bytes(payload)
        (FOLDER / f"{name_of(spec)}.f4").write_bytes(codec.decode(payload).astype("<f4").tobytes())


if __name__ == "__main__":
    main()
