"""How `benchmarks.flower_mod` makes its figures, and that its simulated app learns before and after the two lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.flower_mod import APP, PRESETS, WAYS, Preset, accuracies, dense_bytes, figures, without_ours


def rows_of(way: str, seconds: float, payload: int, up: int) -> list[dict[str, object]]:
    made: list[dict[str, object]] = [{"way": way, "seed": 1, "accuracy": 0.9 if way == "before" else 0.89}]
    for line, slower in (("loopback", 1.0), ("20 Mb/s", 3.0)):
        made += [{"line": line, "way": way, "round": n, "seconds": s * slower} for n, s in ((1, 99.0), (2, seconds))]
        on_line = up if line != "loopback" else 0
        made.append({"line": line, "way": way, "payload": payload, "up": on_line, "down": 2 * on_line})
    return made


def test_figures_leave_out_the_first_round_and_count_bytes_on_the_lines() -> None:
    found = figures([*rows_of("before", 10.0, 3000, 4000), *rows_of("after", 8.0, 100, 160)])
    assert found["seconds_ratio"] == found["seconds_ratio_loopback"] == pytest.approx(0.8)
    assert (found["uplink_payload_ratio"], found["uplink_bytes_ratio"]) == (30.0, 25.0)
    assert found["total_bytes_ratio"] == pytest.approx(25.0)
    assert found["accuracy_gap"] == pytest.approx(0.01)


def test_the_app_before_the_two_lines_imports_nothing_of_thinwire(tmp_path: Path) -> None:
    made = without_ours(APP, tmp_path / "before") / "compressed_digits"
    client, server = ((made / name).read_text() for name in ("client_app.py", "server_app.py"))
    assert "\napp = ClientApp()\n" in client
    assert "import thinwire" not in client + server
    for text in (client, server):
        compile(text, "app", "exec")


def test_the_full_preset_has_more_than_a_million_parameters() -> None:
    assert dense_bytes(PRESETS["full"].hidden) > dense_bytes(PRESETS["small"].hidden) > 4_000_000


def test_the_simulated_app_learns_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_run_id", "_task_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    found = {row["way"]: row["accuracy"] for row in accuracies(Preset(128, 0, 1, 6))}
    assert set(found) == set(WAYS)
    assert min(found.values()) > 0.5
