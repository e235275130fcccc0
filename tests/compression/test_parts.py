"""No bit of a vector that is cut into parts depends on the path and on how many threads it runs."""

from __future__ import annotations

import pytest

from tests.support.codec_examples import SPECS, fixed_vector, layout_of, takes_feedback
from thinwire.compression import feedback, native, parse
from thinwire.compression.base import BoundCodec
from thinwire.core import Key
from thinwire.core.types import Vector

COUNTS = (1, 2, 3)


def seen(codec: BoundCodec, x: Vector) -> tuple[bytes, ...]:
    """All bits that come of one vector: its frame, what that decodes to and adds to a part, what is remembered."""
    encoded = codec.encode(x.copy(), codec.init(), Key(1, 2))
    into = x.copy()
    codec.decode_add(encoded.payload, 0.3, into, slice(7, x.size - 4099))
    kept = [encoded.state[name].tobytes() for name in sorted(encoded.state)]
    return bytes(encoded.payload), codec.decode(encoded.payload).tobytes(), into.tobytes(), *kept


@pytest.mark.parametrize("spec", SPECS)
def test_a_vector_that_is_cut_into_parts_gives_what_numpy_gives_of_it_whole(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts as small as they may be, and two threads for what makes three of them."""
    monkeypatch.setattr(native, "LEAST", native.GRAIN)
    x = fixed_vector(3 * native.GRAIN + 777)
    with native.using_threads(3):
        assert len(native.parts(0, x.size)) == 3
    for around in [parse(spec), *([feedback(parse(spec))] if takes_feedback(spec) else [])]:
        codec = around.bind(layout_of(x.size, spec))
        with native.using("numpy"):
            expected = seen(codec, x)
        best, *others = native.available()[:-1]
        for path, count in [*((best, count) for count in COUNTS), *((path, COUNTS[-1]) for path in others)]:
            with native.using(path), native.using_threads(count):
                assert seen(codec, x) == expected, (path, count)
