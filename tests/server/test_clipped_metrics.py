"""What `best` and `target` go by: a robust mean of what clients measured, alike after a restart."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.server.test_hostile_devices import liar
from tests.support.server_bench import Bench, drive_through, killed
from thinwire.cli.runs.render import capping, clipping
from thinwire.core.errors import BadPayload, PlanError
from thinwire.core.events import Evaluated, RoundClosed
from thinwire.core.serialization import MAX_METRICS, reply_from_bytes, reply_to_bytes
from thinwire.core.types import Assignment, Metrics, ReplyHeader, UpdateId
from thinwire.server.evaluation import (
    CLIP_FACTOR,
    UNITS_SLACK,
    Robust,
    bounded,
    names_in,
    pooled,
    robust,
    too_few,
    units_of,
)
from thinwire.server.state.model_history import Measured


def replies(values: Sequence[float], counts: Sequence[float] = ()) -> list[Measured]:
    weights = counts or [10.0] * len(values)
    pairs = zip(values, weights, strict=True)
    return [Measured(str(n), str(n), 40, {"eval/m": (v * w, w)}) for n, (v, w) in enumerate(pairs)]


def test_honest_values_are_pooled_as_they_are() -> None:
    """Also those that differ: what clients of the versions before differed by is no lie."""
    drawn, widths, clipped = random.Random(1), dict[str, float](), 0
    for _ in range(200):
        found = robust(replies([drawn.gauss(0.5, 0.1) for _ in range(8)]), widths)
        widths |= found.widths
        clipped += bool(found.clipped)
    assert clipped <= 2


@pytest.mark.parametrize("lie", [1e90, -1e90, 0.9, 0.0])
def test_one_lie_moves_the_mean_no_farther_than_honest_clients_differ(lie: float) -> None:
    honest = [0.50, 0.51, 0.49, 0.52, 0.48]
    found = robust(replies([*honest, lie]), {})
    assert found.clipped == {"5": ["m"]}
    assert abs(found.means["m"] - fmean(honest)) < CLIP_FACTOR * 0.04


def test_of_six_clients_two_that_agree_do_not_decide() -> None:
    found = robust(replies([0.5, 0.5, 0.5, 0.5, 1e90, 1e90]), {})
    assert found.means["m"] < 0.53


def test_a_count_moves_no_median_and_weighs_at_most_ten_usual_ones() -> None:
    found = robust(replies([0.50, 0.51, 0.49, 0.9], [10, 10, 10, 1e90]), {})
    assert found.means["m"] <= 0.51 + CLIP_FACTOR * 0.01 + 1e-9
    alone = robust(replies([0.5, 0.5, 0.5], [10, 10, 1e90]), {})
    assert alone.clipped == {"2": ["m"]}
    assert alone.means["m"] == pytest.approx(0.5)


def test_of_two_clients_nothing_is_clipped() -> None:
    assert robust(replies([0.5, 1e90]), {}) == Robust({}, {}, {})


def test_a_spread_that_was_seen_before_is_no_lie() -> None:
    narrow = replies([0.5, 0.5, 0.5, 0.1])
    assert robust(narrow, {}).clipped
    assert not robust(narrow, {"m": 0.5}).clipped


def test_no_value_counts_as_less_than_nothing_where_the_others_are_not() -> None:
    found = robust(replies([1.0, 2.0, 3.0, -9.0]), {})
    assert found.means["m"] == pytest.approx((1 + 2 + 3 + 0) / 4)
    assert not robust(replies([-1.0, 2.0, -3.0, -3.0]), {}).clipped


def test_a_count_is_bounded_by_the_examples_and_units_that_clients_showed() -> None:
    tokens = [Measured(str(n), str(n), 10, {"eval/m": (1280.0, 640.0)}) for n in range(3)]
    units = units_of(tokens, {})
    assert units == {"eval/m": 64.0}
    lie = Measured("3", "3", 10, {"eval/m": (9e20, 3e20)})
    found = bounded([*tokens, lie], units, {})
    assert found[:3] == tokens
    assert found[3].metrics["eval/m"] == pytest.approx((UNITS_SLACK * 640.0 * 3, UNITS_SLACK * 640.0))
    many = Measured("4", "4", 2**40, {"eval/m": (9e20, 3e20)})
    assert bounded([*tokens, many], units, {})[3].metrics["eval/m"][1] == UNITS_SLACK * 6400.0


def test_a_bounded_count_weighs_less_and_is_named_as_clipped() -> None:
    said = replies([0.5, 0.5, 0.5, 0.51], [10, 10, 10, 40])
    held = replies([0.5, 0.5, 0.5, 0.51], [10, 10, 10, 20])
    assert not robust(said, {}).clipped
    found = robust(said, {}, held)
    assert found.clipped == {"3": ["m"]}
    assert found.means["m"] == pytest.approx((15 + 20 * 0.51) / 50)


def test_of_two_clients_a_bounded_count_decides_nothing() -> None:
    assert robust(replies([0.5, 0.6]), {}, replies([0.5, 0.6], [10, 5])) == Robust({}, {}, {})


def test_of_fewer_than_three_clients_no_unit_is_learned_and_no_count_is_without_bound() -> None:
    lies = [Measured(str(n), str(n), 10, {"eval/m": (0.0, 9e99)}) for n in range(2)]
    assert units_of(lies, {}) == {}
    assert [reply.metrics["eval/m"][1] for reply in bounded(lies, {}, {})] == [UNITS_SLACK * 10 * 2.0**20] * 2
    assert bounded([lies[0]._replace(examples=0)], {}, {})[0].metrics["eval/m"][1] == 2.0**53
    assert bounded([lies[0]._replace(examples=2**60)], {}, {})[0].metrics["eval/m"][1] == 2.0**53


@pytest.mark.parametrize(
    ("clients", "replies", "few"), [(1, 1, 0), (1, 2, 0), (1, 3, 1), (2, 4, 0), (2, 5, 1), (3, 99, 0)]
)
def test_fewer_than_three_clients_and_than_half_decide_nothing(clients: int, replies: int, few: int) -> None:
    assert too_few(clients, replies) == bool(few)


def test_a_metric_that_nobody_reports_ends_a_run_at_its_end_where_few_measured_by_then(tmp_path: Path) -> None:
    bench = lying(tmp_path, 2, {"clients": 1}, metric="acuracy")
    row = bench.drive()
    assert (row.status, row.exit_code, row.rounds_closed) == ("failed", PlanError.exit_code, 2)


def test_names_that_few_carry_are_no_metrics() -> None:
    said: list[Metrics] = [{"eval/a": (1.0, 1.0)}, {"eval/a": (3.0, 1.0)}, {"eval/b": (1.0, 1.0)}, {}]
    assert names_in(said, "eval/") == ["eval/a"]
    assert pooled(said, "eval/") == {"a": 2.0}
    assert names_in([{"eval/" + "x" * 65: (1.0, 1.0)}], "eval/") == []
    assert len(names_in([{f"eval/{n}": (1.0, 1.0) for n in range(1000)}], "eval/")) == MAX_METRICS


HEAD = ReplyHeader("toy-1.1.a", UpdateId("toy-1", "a", 1), 0, 10)


@pytest.mark.parametrize("accuracy", [(11.0, 10.0), (-1.0, 10.0), (1e90, 1.0)])
def test_an_impossible_accuracy_is_no_reply(accuracy: tuple[float, float]) -> None:
    with pytest.raises(BadPayload, match="reply"):
        reply_from_bytes(reply_to_bytes(replace(HEAD, metrics={"eval/accuracy": accuracy})))


def test_an_accuracy_made_of_means_may_be_rounded() -> None:
    reply_from_bytes(reply_to_bytes(replace(HEAD, metrics={"eval/accuracy": (10.000001, 10.0)})))


def lying(folder: Path, rounds: int = 3, cohort: dict[str, Any] | None = None, **run: Any) -> Bench:
    def says(wrong: float) -> Any:
        def lie(assignment: Assignment, header: ReplyHeader) -> ReplyHeader:
            own: Metrics = {"eval/loss": (10 * wrong + assignment.base_version, 10.0), "eval/accuracy": (6.0, 10.0)}
            invented = {f"eval/{assignment.round}-{n}": (1.0, 1.0) for n in range(5)} if wrong > 9 else {}
            return replace(header, metrics={**own, **invented})

        return lie

    devices = [liar(name, says(wrong)) for name, wrong in (("a", 0.1), ("b", 0.11), ("c", 0.12), ("d", 1e80))]
    return Bench(folder, devices, run={"rounds": rounds, **run}, cohort=cohort or {})


def test_what_decides_is_alike_wherever_the_aggregator_was_killed(tmp_path: Path) -> None:
    def decided(bench: Bench) -> object:
        row = bench.store.run(bench.run_id)
        told = [(e.version, e.metrics, e.robust, e.clipped, e.widths, e.units) for e in bench.events(Evaluated)]
        rounds = [(e.round, e.names, e.ignored, e.metrics) for e in bench.events(RoundClosed)]
        return told, rounds, row.best_version, row.best_value, row.clipped

    whole = lying(tmp_path / "whole", 2)
    places = drive_through(whole)
    expected = decided(whole)
    assert whole.store.run(whole.run_id).best_version == 0

    def check(bench: Bench, where: str) -> None:
        assert decided(bench) == expected, where

    killed(lambda folder: lying(folder, 2), tmp_path, places, check)


@pytest.mark.parametrize("key", [{"metric": "acuracy"}, {"target": {"metric": "f1", "value": 0.9}}])
def test_a_plan_that_goes_by_a_metric_that_nobody_reports_ends_after_the_first_round(
    tmp_path: Path, key: dict[str, Any]
) -> None:
    bench = lying(tmp_path, 30, **key)
    row = bench.drive()
    assert (row.status, row.exit_code, row.rounds_closed) == ("failed", PlanError.exit_code, 1)
    assert "is no metric of the task toy" in row.status_text
    assert "accuracy, loss" in row.status_text


def test_a_run_of_one_round_ends_so_too(tmp_path: Path) -> None:
    row = lying(tmp_path, 1, metric="acuracy").drive()
    assert (row.status, row.exit_code) == ("failed", PlanError.exit_code)


def test_what_people_are_shown_is_what_decides_and_names_who_was_clipped(tmp_path: Path) -> None:
    bench = lying(tmp_path, 2)
    row = bench.drive()
    rounds = bench.store.rounds(row.run_id)
    assert rounds[0].metrics["loss"] > 1e70
    assert rounds[0].decisive["loss"] < 1
    assert row.metrics0["loss"] < 1
    assert row.spread0.keys() == {"accuracy"}
    said = list(clipping(replace(row, metrics=rounds[0].metrics, clipped=rounds[0].clipped), rounds))
    assert said[0].startswith("values of clients were clipped, as for best and target; the plain mean is loss ")
    assert said[1] == "d: clipped loss after 1 of 2 rounds"
    assert said[2] == "10 metrics were ignored: fewer than half of a round's updates carried them"


def honest(folder: Path, tested: Sequence[int], **cohort: Any) -> Bench:
    """Clients that train on equally much and measure on as much as `tested`; a client's loss is its place."""

    def says(place: int, count: float) -> Any:
        return lambda assignment, header: replace(header, metrics={"eval/loss": (place * count, count)})

    devices = [liar(f"d{n}", says(n, float(count))) for n, count in enumerate(tested)]
    return Bench(folder, devices, run={"rounds": 2}, cohort=cohort)


@pytest.mark.parametrize("tested", [(50, 1000), (50, 50, 50, 1000), (10, 10, 10, 40_000)])
def test_the_metrics_are_the_plain_mean_of_all_whatever_decides(tmp_path: Path, tested: tuple[int, ...]) -> None:
    bench = honest(tmp_path, tested)
    row, (event, *_) = bench.drive(), bench.events(Evaluated)
    plain = sum(n * count for n, count in enumerate(tested)) / sum(tested)
    assert event.metrics["loss"] == pytest.approx(plain)
    assert bench.store.rounds(row.run_id)[0].metrics["loss"] == pytest.approx(plain)
    assert event.examples == sum(tested)
    largest = f"d{len(tested) - 1}"
    assert {update_id.split("/")[1] for update_id in event.clipped} == ({largest} if len(tested) > 2 else set())


@pytest.mark.parametrize(("most", "weight"), [(10.0, 500), (2.0, 100), ("none", 1000)])
def test_max_weight_rules_the_weight_in_a_metric_too(tmp_path: Path, most: Any, weight: int) -> None:
    bench = honest(tmp_path, (50, 50, 50, 1000), max_weight=most)
    bench.drive()
    (event, *_) = bench.events(Evaluated)
    assert event.decisive["loss"] == pytest.approx((50 * (0 + 1 + 2) + weight * 3) / (150 + weight))
    assert bool(event.clipped) == (weight < 1000)


def test_a_run_that_is_shown_says_whose_weight_was_capped(tmp_path: Path) -> None:
    def large(assignment: Assignment, header: ReplyHeader) -> ReplyHeader:
        return replace(header, examples=100 * header.examples)

    devices = [liar(name, lambda assignment, header: header) for name in "abc"] + [liar("d", large)]
    row = (bench := Bench(tmp_path, devices, run={"rounds": 2})).drive()
    (said,) = capping(bench.store.updates(row.run_id), bench.store.rounds(row.run_id))
    assert said.startswith("d: weight capped in 2 of 2 rounds, lastly")
    assert "times the median" in said


def test_in_a_buffered_run_one_device_decides_nothing_either(tmp_path: Path) -> None:
    bench = lying(tmp_path, 4, cohort={"mode": "buffered", "buffer": 4}, target={"metric": "loss", "value": 0.05})
    row = bench.drive()
    assert row.status == "done"
    assert row.best_value is not None
    assert 0 < row.best_value < 1
    assert all(value < 9 for e in bench.events(Evaluated) if not e.few for value in (e.decisive["loss"],))
