"""`thinwire privacy report` and `verify`: a signed document that claims nothing that the ledger does not bear out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from tests.store.test_privacy_ledger import enrol, reserve
from tests.support.browsing import axe, browser, lasting_browser, overflow
from tests.support.private_story import DEVICES, PLAIN, PRIVATE, PrivateStory
from tests.support.store_story import LAYOUT
from thinwire.core.plan_values import PrivacySection
from thinwire.core.statedir import AggregatorHome
from thinwire.privacy.accounting import Release, epsilon
from thinwire.privacy.noise_plan import noise_plan, participations_of
from thinwire.reports.privacy_report import (
    ADJACENCY,
    LABEL,
    LATTICE,
    WHO,
    as_page,
    audit_text,
    privacy_report,
    sign_report,
    signing_key,
    verify_report,
)
from thinwire.store import Store
from thinwire.transport.server.tls import InternalCA

__all__ = ["browser", "lasting_browser"]
SECURE = """
[secure]
enabled = true
max_corrupt = 0.1
max_dropout = 0.1
"""


@pytest.fixture
def story(store: Store) -> PrivateStory:
    """Three rounds, the last of which released nothing."""
    enrol(store, *DEVICES)
    found = PrivateStory(store)
    for number in range(3):
        found.play(released=number < 2)
    return found


def cost(story: PrivateStory, rounds: int) -> float:
    return epsilon({noise_plan(story.parsed, LAYOUT.model_size, 1).release: rounds}, 1e-3)


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("apart", "most", "cap"),
    [(1, None, 6), (2, None, 3), (4, None, 2), (2, 2, 2), (2, 5, 3)],
)
def test_the_cap_counts_in_how_far_apart_rounds_of_one_client_are(
    store: Store, apart: int, most: int | None, cap: int
) -> None:
    enrol(store, *DEVICES)
    tree = f'mechanism = "tree"\nmin_separation = {apart}\n'
    plan = PRIVATE + tree + ("" if most is None else f"max_participations = {most}\n")
    story = PrivateStory(store, plan=plan)
    found = privacy_report(store, store.run(story.run_id))
    assert found["participation"]["cap_of_the_plan"] == cap == participations_of(story.parsed)


def test_a_report_answers_what_a_data_protection_officer_asks(thinwire: Any, home: Path, story: PrivateStory):
    found = thinwire("privacy", "report", story.run_id, "--json", "--home", home).document
    assert (found["unit"], found["guarantee"]["delta"]) == ("one client with all its data", 1e-3)
    assert found["adjacency"].startswith("zero-out")
    assert cost(story, 3) <= found["guarantee"]["epsilon"] <= 1.01 * cost(story, 3)
    assert found["participation"]["most_rounds_of_one_client"] == 3
    assert (found["participation"]["cap_of_the_plan"], found["participation"]["budget"]) == (6, 6.0)
    (kind,) = found["mechanism"]["kinds"]
    assert (kind["distribution"], kind["rounds"]) == ("discrete-gaussian", 3)
    assert [one["state"] for one in found["releases"]] == ["committed", "committed", "reserved"]
    assert found["releases"][0]["model_sha256"] == f"{1:064x}"
    assert found["rounds_without_a_release"] == 1
    assert found["codecs"]["uplink"] == "eden(4)"
    assert "of the claimed 1 (commit" in found["audit"]
    assert "no device can check" in found["trust"]["in_short"]
    assert any("Sybils" in one for one in found["assumptions"]["not_enforced"])
    assert any("honest" in one for one in found["assumptions"]["not_enforced"])
    assert found["left_out"] == []
    said = thinwire("privacy", "report", story.run_id, "--home", home)
    assert said.code == 0
    shown = (
        "adjacency  zero-out",
        "Sybils",
        "guesses right in at most",
        "eden(4)",
        "an attack on this code",
        "signed by",
    )
    for text in shown:
        assert text in said.out


def test_a_report_of_a_sampled_run_says_that_everyone_pays_and_no_number_of_clients(thinwire, home, store, tmp_path):
    enrol(store, *DEVICES)
    plan = PRIVATE.replace("clients = 3\n", "").replace("budget = 6.0\n", "sampling_rate = 0.5\n")
    story, release = PrivateStory(store, plan=plan), Release("discrete-gaussian", 10.0, 225.0, 32, rate=0.5).to_json()
    for number in (1, 2):
        reserve(store, story.run_id, number, "digits", release, [])
    report = thinwire("privacy", "report", story.run_id, "--json", "--home", home)
    part = report.document["participation"]
    assert (part["sampling_rate"], part["clients"], part["most_rounds_of_one_client"]) == (0.5, None, 2)
    said = "each client of the population pays for 2 of at most 6, sampled or not; the number of sampled clients is not"
    page = thinwire("privacy", "report", story.run_id, "--html", "--home", home).out
    shown = " ".join(thinwire("privacy", "report", story.run_id, "--home", home).out.split())
    assert said in page
    assert said in shown
    assert "0 clients" not in page + shown
    for text in (report.out, page):
        file = written(tmp_path / "report", text)
        assert thinwire("privacy", "verify", file, "--pin", report.document["signed_by"]).code == 0


def test_no_client_is_named(thinwire: Any, home: Path, story: PrivateStory):
    for form in ("--json", "--html"):
        out = thinwire("privacy", "report", story.run_id, form, "--home", home).out
        assert not [name for name in DEVICES if name in out]


def test_a_signed_report_is_verified_by_the_key_and_by_no_other(
    thinwire: Any, home: Path, story: PrivateStory, tmp_path
):
    for form in ("--json", "--html"):
        said = thinwire("privacy", "report", story.run_id, form, "--home", home)
        file = written(tmp_path / f"report{form}", said.out)
        pin = thinwire("privacy", "report", story.run_id, "--json", "--home", home).document["signed_by"]
        good = thinwire("privacy", "verify", file, "--pin", pin)
        assert (good.code, good.out.split(" ")[0]) == (0, "valid:")
        assert story.run_id in good.out
        assert thinwire("privacy", "verify", file, "--pin", "0" * 64).code == 8
        written(file, said.out.replace("zero-out", "zero-0ut", 1))
        refused = thinwire("privacy", "verify", file, "--pin", pin)
        assert refused.code == 8
        assert "not what" in refused.err
    written(file, "[]")
    assert "no signed report" in thinwire("privacy", "verify", file, "--pin", pin).err
    assert thinwire("privacy", "verify", tmp_path / "none", "--pin", pin).code == 2


def test_every_field_is_signed(store: Store, home: Path, story: PrivateStory):
    key = signing_key(AggregatorHome.under(home))
    signed = sign_report(privacy_report(store, store.run(story.run_id)), key)
    assert verify_report(json.dumps(signed).encode(), signed["signed_by"]) == signed
    for name in signed.keys() - {"signature", "public_key", "signed_by"}:
        changed = {**signed, name: "another"}
        with pytest.raises(Exception, match="not valid"):
            verify_report(json.dumps(changed).encode(), signed["signed_by"])


def test_the_key_is_that_of_the_ca_whose_pin_the_devices_trust(home: Path):
    place = AggregatorHome.under(home)
    own = signing_key(place)
    assert place.report_key.stat().st_mode & 0o777 == 0o600
    assert signing_key(place).private_numbers() == own.private_numbers(), "it is made once"
    authority = InternalCA(place.tls)
    assert sign_report({"run": 1}, signing_key(place))["signed_by"] == authority.pin
    rotated = authority.rotate()
    assert sign_report({"run": 1}, signing_key(place))["signed_by"] == rotated
    assert LABEL[0] != 0x30, "no certificate begins so"


def test_a_figure_that_cannot_be_claimed_is_left_out_with_the_reason(store: Store, story: PrivateStory):
    store.roster.revoke(DEVICES[0], "me")
    assert "epsilon" in privacy_report(store, store.run(story.run_id))["guarantee"]
    from tests.store.test_privacy_ledger import report as booked

    booked(store, DEVICES[1], "digits", 9)  # the device knows of nine, this ledger of three
    found = privacy_report(store, store.run(story.run_id))
    assert "epsilon_all_runs" not in found["guarantee"]
    assert "9 releases" in found["left_out"][0]


def test_a_run_without_privacy_has_no_report(thinwire: Any, home: Path, store: Store):
    plain = PrivateStory(store, plan=PLAIN)
    said = thinwire("privacy", "report", plain.run_id, "--home", home)
    assert said.code == 2
    assert "has no differential privacy" in said.err
    assert thinwire("privacy", "report", plain.run_id, "--json", "--html", "--home", home).code == 2


def test_each_mode_has_its_neighbours_and_who_is_trusted_with_what():
    modes = set(get_args(get_type_hints(PrivacySection)["mode"])) - {"off"}
    assert ADJACENCY.keys() == WHO.keys() == modes


def test_a_sum_under_masks_has_its_own_assumptions_and_no_codec(store: Store):
    secure = PRIVATE.replace("central", "distributed").replace("2.0", "1.0").replace("budget = 6.0", "") + SECURE
    story = PrivateStory(store, plan=secure)
    story.play(tuple(f"pi-{n:02}" for n in range(10)))
    found = privacy_report(store, store.run(story.run_id))
    assert found["codecs"]["uplink"] == LATTICE
    assert "not trusted with single updates" in found["trust"]["aggregator"]
    assert any("follows the protocol" in one for one in found["assumptions"]["not_enforced"])
    assert "in mode distributed" in found["audit"]
    assert not any("The aggregator is honest" in one for one in found["assumptions"]["not_enforced"])


def test_an_audit_is_quoted_for_the_modes_that_it_attacked(tmp_path: Path):
    committed = Path(__file__).parents[2] / "docs" / "evidence" / "privacy-audit.json"
    for mode in ("central", "distributed"):
        assert audit_text(committed, mode).startswith(
            f"an attack on this code in mode {mode} showed at least epsilon 0."
        )
    figures = {"audited_lower": 0.68, "audited_lower_distributed": 0.55, "claimed_epsilon": 1.0}
    file = written(tmp_path / "audit.json", json.dumps({"figures": figures, "commit": "ab" * 20}))
    assert "at least epsilon 0.68 of the claimed 1 " in audit_text(file, "central")
    assert "at least epsilon 0.55 of the claimed 1 " in audit_text(file, "distributed")
    for mode in ("local", "example", "tree"):
        assert audit_text(file, mode) == "not audited"
    del figures["audited_lower_distributed"]
    written(file, json.dumps({"figures": figures, "commit": "ab" * 20}))
    assert audit_text(file, "distributed") == "not audited", "the figure of another mode is not quoted"
    assert audit_text(written(file, "{}"), "central") == audit_text(tmp_path / "none", "central") == "not audited"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_readable_for_all_and_at_every_width(
    store: Store, story: PrivateStory, browser, tmp_path, scheme, home
):
    signed = sign_report(privacy_report(store, store.run(story.run_id)), signing_key(AggregatorHome.under(home)))
    file = written(tmp_path / "page.html", as_page(signed))
    for width in (390, 1400):
        page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
        page.goto(file.as_uri())
        assert axe(page) == []
        assert overflow(page) <= 0
        page.close()


def test_a_text_in_a_plan_cannot_leave_its_cell(store: Store, home: Path):
    evil = PrivateStory(store, plan=PRIVATE + 'population = "</script><b>&"')
    signed = sign_report(privacy_report(store, store.run(evil.run_id)), signing_key(AggregatorHome.under(home)))
    page = as_page(signed)
    assert "<b>&" not in page.split("<script")[0]
    assert page.count("</script>") == 1
    assert verify_report(page.encode(), signed["signed_by"]) == signed
