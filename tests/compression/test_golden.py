"""The bits of every codec, as they were written down once: encoded bytes and decoded floats."""

from __future__ import annotations

import hashlib

import pytest

from tests.compression.write_golden import FOLDER, name_of
from tests.support.codec_examples import SPECS, fixed_vector, is_ours_alone, layout_of
from thinwire.compression import parse
from thinwire.core import Key

OURS = [spec for spec in SPECS if is_ours_alone(spec)]
HINT = "a new codec's are written by python -m tests.compression.write_golden"


def test_the_vector_of_the_golden_files_is_what_it_was() -> None:
    digest = hashlib.sha256(fixed_vector().astype("<f4").tobytes()).hexdigest()
    assert digest == "49cc8f16a80b6b12dbf43a46e0a6091754c12a59b1659057b58940d47c0b54a5"


@pytest.mark.parametrize("spec", OURS)
def test_encoding_gives_the_golden_bytes(spec: str) -> None:
    codec = parse(spec).bind(layout_of(fixed_vector().size, spec))
    path = FOLDER / f"{name_of(spec)}.frame"
    assert path.is_file(), HINT
    assert codec.encode(fixed_vector(), codec.init(), Key(1, 2)).payload == path.read_bytes()


@pytest.mark.parametrize("spec", SPECS)
def test_decoding_the_golden_bytes_gives_the_golden_floats(spec: str) -> None:
    codec = parse(spec).bind(layout_of(fixed_vector().size, spec))
    path = FOLDER / f"{name_of(spec)}.frame"
    assert path.is_file(), HINT
    assert codec.decode(path.read_bytes()).astype("<f4").tobytes() == path.with_suffix(".f4").read_bytes()


def test_no_golden_file_is_left_over() -> None:
    names = {name_of(spec) + end for spec in SPECS for end in (".frame", ".f4")}
    assert {path.name for path in FOLDER.iterdir()} == names
