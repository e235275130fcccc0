"""The golden transcript of a whole round: participants send these bytes, and the aggregator makes this sum of them."""

from __future__ import annotations

import json

import numpy as np

from tests.privacy.write_transcript import FILE, recorded
from tests.support.secure_cohort import Cohort, identity, name_of, terms_of
from thinwire.core.types import PHASES
from thinwire.privacy.masks import centered
from thinwire.privacy.secure_round import MaskedSum, SecureRound

GOLDEN = json.loads(FILE.read_text())


def test_participants_send_the_recorded_bytes():
    _, found = recorded()
    assert json.loads(json.dumps(found)) == GOLDEN


def test_an_aggregator_sums_the_recorded_bytes():
    terms = terms_of(5, 3, lanes=25)
    identities = {name_of(i): identity(i) for i in range(5)}
    server = SecureRound(terms, bytes.fromhex(GOLDEN["context0"]), identities)
    for phase in PHASES:
        for name, raw in GOLDEN["messages"][phase].items():
            server.receive(name, bytes.fromhex(raw))
        assert {name: raw.hex() for name, raw in server.close().items()} == GOLDEN["requests"][phase]
    total = MaskedSum(terms)
    for vectors in GOLDEN["masked"].values():
        total.add(bytes.fromhex(vectors["update"]), bytes.fromhex(vectors["scalars"]))
    lanes, scalars = total.unmask(server.unmasking_keys())
    assert centered(lanes, terms.width).tolist() == GOLDEN["sum"]["update"]
    assert scalars == GOLDEN["sum"]["scalars"]


def test_the_recorded_sum_is_that_of_the_survivors():
    cohort = Cohort(terms_of(5, 3, lanes=25), 5, seed=7)
    names = [GOLDEN["clients"][str(index)]["name"] for index in GOLDEN["survivors"]]
    wanted, scalars = cohort.wanted(names)
    assert np.array_equal(wanted, GOLDEN["sum"]["update"])
    assert scalars == GOLDEN["sum"]["scalars"]
    assert len(names) == 4 and "client-001" not in names
