"""Write the golden file of masks if it is missing: `python -m tests.privacy.write_golden`.

It holds what a mask's bits, a packed vector's bytes and a derived key are. With others, the masks of devices of two
versions would not cancel, so it is never written over.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from thinwire.privacy.keys import PairKeys, hkdf
from thinwire.privacy.masks import Lanes, add_mask, lane_dtype, mask_key, pack, packed_size

FILE = Path(__file__).parents[1] / "golden" / "privacy" / "masks.json"
WIDTHS = [*range(1, 33)]
STARTS = [0, 1, 7, 8, 12_345, 2**32 + 3]  # lanes: within a block of AES, and behind 32 bits


def masked(dtype: type, start: int) -> str:
    lanes: Lanes = np.zeros(9, dtype)
    add_mask(lanes, bytes(range(32)), 1, start)
    return lanes.astype(lanes.dtype.newbyteorder("<")).tobytes().hex()


def packed(width: int) -> str:
    lanes: Lanes = np.zeros(21, lane_dtype(width))
    add_mask(lanes, bytes(range(1, 33)), -1)
    out = np.empty(packed_size(lanes.size, width), np.uint8)
    pack(lanes, width, out)
    return out.tobytes().hex()


def golden() -> dict[str, dict[str, str]]:
    root, peer = PairKeys.from_root(bytes(32), "mask", True), PairKeys.from_root(b"\x01" * 32, "mask", False)
    return {
        "masks": {
            f"{dtype.__name__} {start}": masked(dtype, start)
            for dtype in (np.uint16, np.uint32, np.uint64)
            for start in STARTS
        },
        "packed": {str(width): packed(width) for width in WIDTHS},
        "derived": {
            "hkdf": hkdf(bytes(32), "label", b"context", 64).hex(),
            "mask_key": mask_key(bytes(32), b"context", "update").hex(),
            "x25519": root.public.x25519.hex(),
            "ml_kem hkdf": hkdf(root.public.ml_kem, "a test", b"").hex(),
            "exchange": root.exchange(peer.public).hex(),
        },
    }


def main() -> None:
    if not FILE.exists():
        FILE.write_text(json.dumps(golden(), indent=1) + "\n")


if __name__ == "__main__":
    main()
