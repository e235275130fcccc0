"""The ledger's arithmetic is the accountant's, over the JSON texts that ledgers hold."""

from __future__ import annotations

import pytest

from thinwire.core.errors import DataLost
from thinwire.privacy.accounting import Release, costliest, epsilon, epsilon_of, releases_of

CHEAP = Release("discrete-gaussian", sensitivity=10.0, variance=900.0, dimensions=64)
DEAR = Release("skellam", sensitivity=10.0, variance=100.0, dimensions=64)


def test_epsilon_is_that_of_all_releases_together():
    spent = {CHEAP.to_json(): 3, DEAR.to_json(): 2}
    assert epsilon_of(spent, 1e-6) == epsilon({CHEAP: 3, DEAR: 2}, 1e-6)
    assert epsilon_of({CHEAP.to_json(): 0}, 1e-6) == 0.0


def test_two_texts_of_one_release_are_one():
    spaced = DEAR.to_json().replace(":", " :")
    assert releases_of({DEAR.to_json(): 2, spaced: 3}) == {DEAR: 5}


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "null", '{"distribution": "none"}', DEAR.to_json().replace("100.0", "-1")]
)
def test_a_text_that_is_no_release_has_no_epsilon(text):
    with pytest.raises(DataLost, match="not readable"):
        epsilon_of({CHEAP.to_json(): 1, text: 1}, 1e-6)


def test_the_costliest_kind_is_the_one_of_which_more_would_cost_the_most():
    kinds = [CHEAP.to_json(), DEAR.to_json()]
    assert costliest(kinds, {CHEAP.to_json(): 9}, 5, 1e-6) == DEAR.to_json()
    assert costliest(kinds[:1], {}, 5, 1e-6) == CHEAP.to_json()
    assert costliest([], {CHEAP.to_json(): 9}, 5, 1e-6) == ""
