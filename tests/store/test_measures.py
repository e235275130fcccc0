"""What is known of devices is kept over runs, replaced in the commit of what it was learned from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.store_story import accepted, header, new_run, opened
from thinwire.core.errors import NotFound
from thinwire.store import MeasureRow, Store

ROW = MeasureRow("pi-01", "up", "", [[1000.0, 0.1], [2000.0, 0.30000000000000004]], 8e4, 5e4, 3.0)


def test_a_row_comes_back_bit_for_bit_and_the_newest_stands(store: Store) -> None:
    run_id, more = new_run(store), replace(ROW, kind="step", work="model/32", p50=None)
    store.record(run_id, opened(run_id, 1), [ROW, more])
    assert store.measures() == [more, ROW]
    newer = replace(ROW, samples=[[1.0, 1.0]], p90=1e300, at=4.0)
    store.record(run_id, opened(run_id, 2), [newer])
    assert store.measures() == [more, newer]


def test_what_could_not_be_recorded_was_not_learned_either(store: Store) -> None:
    with pytest.raises(NotFound):
        store.record("no-such-run", opened("no-such-run", 1), [ROW])
    assert store.measures() == []


def test_it_goes_with_a_device_that_gets_another_name(store: Store) -> None:
    run_id = new_run(store)
    store.roster.enrol("pi-01", "aa", b"key", "loopback")
    store.record(run_id, opened(run_id, 1, ("pi-02",)), [ROW])
    store.roster.rename("pi-01", "ward-3")
    assert store.measures() == [replace(ROW, device="ward-3")]


@pytest.mark.parametrize(
    ("numbers", "ratio"),
    [
        ({"norm": 10.0, "a": 5.0, "residual_norm": 3.0}, 1.5),
        ({"norm": 0.0, "a": 5.0, "residual_norm": 3.0}, None),
        ({"norm": 1.7e308, "a": 5.0, "residual_norm": -1.7e308}, None),
        ({"norm": 1e-300, "a": 1e9, "residual_norm": 1e300}, None),
    ],
)
def test_an_update_says_how_large_its_residual_is_beside_its_change(
    store: Store, numbers: dict[str, float], ratio: float | None
) -> None:
    run_id = new_run(store)
    reply = replace(header(run_id, 1, "pi-01"), **numbers)  # type: ignore[arg-type]  # floats of three fields
    store.record(run_id, [*opened(run_id, 1), accepted(reply, 1)])
    assert {row.device: row.residual_ratio for row in store.updates(run_id, 1)}["pi-01"] == ratio
