"""A file of parts keeps what fits its digests, and nothing behind it."""

from __future__ import annotations

import hashlib

import pytest

from thinwire.core.part_file import DamagedPart, PartFile, damaged_part
from thinwire.core.types import Part

BODIES = (b"first", b"", b"the second one")
PARTS = tuple(Part(str(i), len(body), hashlib.sha256(body).hexdigest()) for i, body in enumerate(BODIES))
WHOLE = b"".join(BODIES)


@pytest.mark.parametrize(
    ("found", "kept"),
    [
        (WHOLE, WHOLE),
        (WHOLE[:7], WHOLE[:7]),
        (WHOLE + b"behind", WHOLE),
        (b"First" + WHOLE[5:], b""),
        (WHOLE[:5] + b"THE second one", WHOLE[:5]),
    ],
)
def test_what_a_file_holds_is_kept_as_far_as_it_fits(tmp_path, found, kept):
    path = tmp_path / "parts"
    path.write_bytes(found)
    file = PartFile(path, PARTS)
    file.check()
    assert (path.read_bytes(), file.size) == (kept, len(kept))


def test_a_file_that_is_missing_begins_at_0(tmp_path):
    file = PartFile(tmp_path / "parts", PARTS)
    file.check()
    assert (file.size, file.left, [file.offset(i) for i in range(3)]) == (0, 5, [0, 0, 0])


def test_a_part_that_does_not_fit_is_cut_off_when_it_is_complete(tmp_path):
    file = PartFile(tmp_path / "parts", PARTS)
    with file.open(create=True) as opened:
        file.append(opened, b"first")
        with pytest.raises(DamagedPart, match="part '2'"):
            file.append(opened, b"THE second one")
        assert (file.size, file.left) == (5, 14)
        file.append(opened, b"the second one")
    assert file.path.read_bytes() == WHOLE
    assert file.left == 0
    with file.path.open("rb") as source:
        assert damaged_part(source, PARTS) is None
