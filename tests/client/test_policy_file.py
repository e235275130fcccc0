"""What a policy file says: wrong keys and values are named, and a policy has a digest and hours."""

from __future__ import annotations

from datetime import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.client.test_policy import names
from thinwire.client.policy import Policy, load_policy, parse_policy
from thinwire.core.errors import PlanError


@given(key=names.filter(lambda key: key not in Policy.model_fields), value=st.integers())
def test_a_key_of_the_policy_that_this_version_does_not_know_is_refused(key, value):
    quoted = "".join(f"\\U{ord(letter):08x}" for letter in key if not 0xD800 <= ord(letter) < 0xE000)
    with pytest.raises(PlanError) as caught:
        parse_policy(f'[policy]\n"{quoted}" = {value}')
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[policy]\nhour = '22:00-06:00'", "[policy] hour"),
        ("hours = '22:00-06:00'", "[hours]"),
        ("[policy]\nhours = '22-06'", "[policy] hours"),
        ("[policy]\nhours = '22:00-22:00'", "[policy] hours"),
        ("[policy]\nhours = '24:00-06:00'", "[policy] hours"),
        ("[policy]\ntasks = []", "[policy] tasks"),
        ("[policy]\nkinds = ['stop']", "[policy] kinds"),
        ("[policy]\nrounds_a_day = 0", "[policy] rounds_a_day"),
        ("[policy]\nrounds_a_day = true", "[policy] rounds_a_day"),
        ("[policy]\nmax_epsilon = '4'", "[policy] max_epsilon"),
        ("[policy]\nadversary = 'any'", "[policy] adversary"),
        ("[policy]\nmax_corrupt_assumed = 1.0", "[policy] max_corrupt_assumed"),
        ("[policy]\nmin_cohort = 0", "[policy] min_cohort"),
        ("[policy]\nmin_survivors = true", "[policy] min_survivors"),
        ("[policy]\nmax_epsilon = inf", "[policy] max_epsilon"),
        ("[policy]\nmetered = false", "[policy] metered"),
        ("[policy]\nprivacy = 'central'", "[policy] privacy"),
        ("[policy", "is not TOML"),
    ],
)
def test_a_file_that_cannot_be_names_the_key(text, named):
    with pytest.raises(PlanError) as caught:
        parse_policy(text)
    assert named in caught.value.what
    assert (caught.value.exit_code, bool(caught.value.hint)) == (3, True)


def test_a_file_that_is_not_there_forbids_nothing_unless_it_was_named(tmp_path):
    assert load_policy(tmp_path / "client.toml") == Policy()
    with pytest.raises(PlanError):
        load_policy(tmp_path / "client.toml", must_exist=True)
    (tmp_path / "client.toml").mkdir()
    with pytest.raises(PlanError):
        load_policy(tmp_path / "client.toml")


def test_two_policies_have_two_digests():
    assert Policy().digest == Policy().digest != Policy(hours="22:00-06:00").digest


def test_an_hour_is_a_minutes_matter():
    policy = Policy(hours="22:00-06:00")
    assert policy.is_open(time(5, 59, 59))
    assert not policy.is_open(time(21, 59, 59))
