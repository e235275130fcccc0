"""Two ends find a version of the wire, or say which of them is to be updated."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.core.errors import Refused
from thinwire.core.protocol import SPEAKS, SPOKEN, Range
from thinwire.core.types import PROTOCOL

ranges = st.tuples(st.integers(1, 5), st.integers(0, 2)).map(lambda pair: Range(pair[0], pair[0] + pair[1]))


@given(ranges, ranges)
def test_both_ends_agree_on_the_newest_that_both_speak(one: Range, other: Range) -> None:
    both = set(range(one.oldest, one.newest + 1)) & set(range(other.oldest, other.newest + 1))
    if both:
        assert one.agreed(other) == other.agreed(one) == max(both)
    else:
        with pytest.raises(Refused):
            one.agreed(other)


@pytest.mark.parametrize(("device", "behind"), [(Range(1, 1), "the device"), (Range(6, 7), "the aggregator")])
def test_no_overlap_names_both_ranges_and_who_is_to_be_updated(device: Range, behind: str) -> None:
    with pytest.raises(Refused) as refused:
        Range(3, 4).agreed(device)
    assert "3 to 4" in refused.value.what
    assert str(device) in refused.value.what
    assert behind in refused.value.hint


def test_an_aggregator_speaks_the_newest_and_the_one_before() -> None:
    assert max(SPOKEN) == SPEAKS.newest == PROTOCOL
    assert SPEAKS.oldest == max(min(SPOKEN), PROTOCOL - 1)
