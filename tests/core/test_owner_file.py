"""`aggregator.toml`: the defaults without it, and an error that names every wrong key and value."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinwire.core.errors import PlanError
from thinwire.core.owner_file import aggregator_file


def test_without_a_file_the_defaults_hold(tmp_path: Path) -> None:
    found = aggregator_file(tmp_path)
    assert (found.max_runs, found.model_fields_set) == (4, set())


def test_the_file_decides(tmp_path: Path) -> None:
    (tmp_path / "aggregator.toml").write_text("max_runs = 2\n")
    assert aggregator_file(tmp_path).max_runs == 2


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("max_runs = 0", "max_runs = 0 is not valid"),
        ("max_runs = 65", "max_runs = 65 is not valid"),
        ('max_runs = "many"', "max_runs = 'many' is not valid"),
        ("max_run = 2", "unknown key max_run"),
        ("max_runs 2", "is not TOML"),
    ],
)
def test_what_is_wrong_is_named_with_the_file(tmp_path: Path, text: str, what: str) -> None:
    (tmp_path / "aggregator.toml").write_text(text)
    with pytest.raises(PlanError, match=what) as refused:
        aggregator_file(tmp_path)
    assert str(tmp_path / "aggregator.toml") in str(refused.value)
    assert refused.value.hint


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('webhook = "notaurl"', 'a URL that begins with https:// or http://, such as "https://'),
        ('webhook = "ftp://chat.example.org"', "a URL that begins with https:// or http://"),
        ('smtp = "mail"', 'HOST:PORT of the mail server, such as "mail.example.org:587"'),
    ],
)
def test_what_a_target_of_alerts_should_be_is_told_in_words(tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "aggregator.toml").write_text(f"[alerts]\n{line}\n")
    with pytest.raises(PlanError) as refused:
        aggregator_file(tmp_path)
    assert words in refused.value.why
    assert "pattern" not in refused.value.why


@pytest.mark.parametrize(
    "text",
    [
        '[alerts]\nwebhook = "https://chat.example.org/hooks/a SECRET"',
        '[alerts]\nwebhook = "chat.example.org/hooks/SECRET"',
        '[alerts]\nwebhook = "https://chat.example.org:SECRET"',
        '[alerts]\nwebhook = ["https://chat.example.org/hooks/SECRET"]',
        'alerts = "https://chat.example.org/hooks/SECRET"',
    ],
)
def test_an_error_shows_no_webhook(tmp_path: Path, text: str) -> None:
    """Its text gets into the journal and to viewers, and who knows the address posts there."""
    (tmp_path / "aggregator.toml").write_text(text)
    with pytest.raises(PlanError) as refused:
        aggregator_file(tmp_path)
    assert "alerts" in refused.value.what
    assert "SECRET" not in refused.value.text()
