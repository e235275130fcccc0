"""The bytes of a secure round that are announced are those of its messages."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from tests.support.secure_cohort import Cohort, name_of, terms_of
from thinwire.core.errors import PlanError
from thinwire.core.types import PHASES, Phase
from thinwire.privacy.contexts import SecureTerms
from thinwire.privacy.masks import packed_size
from thinwire.privacy.round_cost import phase_bytes


@dataclass
class Counting(Cohort):
    """A cohort that counts the bytes of all requests and answers by phase; a masked answer is its two vectors."""

    up: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    down: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))

    def answer(self, phase: Phase, name: str, request: bytes) -> bytes:
        made = super().answer(phase, name, request)
        self.down[phase] += len(request)
        self.up[phase] += len(made)
        return made


TERMS = {
    "complete": terms_of(7, 4),
    "post-quantum": terms_of(5, 3, post_quantum=True),
    "k-regular": SecureTerms(40, 0.1, 0.1, lanes=9, width=16, graph="k-regular"),
}


@pytest.mark.parametrize("kind", TERMS)
def test_each_phase_has_the_bytes_that_were_announced(kind):
    terms = TERMS[kind]
    cohort = Counting(terms, terms.selected)
    cohort.run()
    for one in phase_bytes(terms, len(name_of(0))):
        if one.phase != "masked":
            assert one.up * terms.selected == pytest.approx(cohort.up[one.phase], rel=0.02)
        assert one.down * terms.selected == pytest.approx(cohort.down[one.phase], rel=0.02)


def test_the_masked_vectors_are_the_packed_lanes_and_the_scalars():
    terms = SecureTerms(10, 0.1, 0.1, lanes=1000, width=12, scalars=("weight", "fits"))
    assert phase_bytes(terms)[2].up == packed_size(1000, 12) + 8 * 3 == 1524


def test_terms_without_a_threshold_have_no_cost():
    with pytest.raises(PlanError):
        phase_bytes(SecureTerms(2, 0.1, 0.1, lanes=9, width=16))
