"""The table of personal data in docs/how/personal-data.md has every column that may be about a person."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from thinwire.store.database import METADATA
from thinwire.store.forgetting import NAMED, OWN_RULE, ROLES

PAGE = Path(__file__).parents[2] / "docs" / "how" / "personal-data.md"
TABLES = {table.name: {column.name for column in table.c} for table in METADATA.sorted_tables}
NOT_PERSONAL = {  # of runs, models and the house itself
    "runs": "number run_id task task_number source status exit_code plan layout size task_report created_at started_at "
    "finished_at rounds_total rounds_closed version model_digest model_file best_version best_value metrics metrics0 "
    "clipped dense_up dense_down identity payload_up payload_down wire_up wire_down aggregated_count late dropped "
    "failed totals name tags archived_at deleted_at",
    "rounds": "run_id round opened_at closed_at reason base_version version deadline_s codec target_updates "
    "min_updates considered replied unanswered seconds metrics train_metrics ignored spent downtimes missed_s "
    "secure_sum changed payload_up payload_down wire_up wire_down aggregated_count late dropped failed "
    "until_s until_payload until_wire point",
    "phases": "run_id round phase closed_at elapsed_s",
    "clients": "run_id",
    "updates": "run_id round changed",
    "journal": "seq run_id at kind",
    "segments": "run_id last_seq first_seq",
    "snapshots": "run_id seq",
    "checkpoints": "run_id version digest file parts counters at",
    "privacy_participants": "entry",
    "invitations": "id secret_hash approve_manually created_at expires_at used_at withdrawn_at",
    "device_actions": "id at what",
    "refusal_notes": "id at kind",
    "commands": "id kind run_id at answered_at",
    "logins": "code_hash expires_at used_at",
    "alerts": "id kind subject opened_at closed_at acknowledged_at opening_sent_at closing_sent_at failures "
    "failure due_at sent_to",
    "sessions": "token_hash",
    "tokens": "id secret_hash",
}


def listed() -> dict[tuple[str, str], str]:
    """The columns in the table, with what makes each go away."""
    found = dict[tuple[str, str], str]()
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 5 or not line.startswith("|"):
            continue
        for table, column in re.findall(r"`([a-z_]+)\.([a-z_0-9*]+)`", cells[1]):
            if table in TABLES:
                for one in TABLES[table] if column == "*" else [column]:
                    found.setdefault((table, one), cells[4])
    return found


@pytest.mark.parametrize("table", TABLES)
def test_each_column_is_in_the_table_of_the_page_or_is_not_about_a_person(table: str):
    personal = {column for name, column in listed() if name == table}
    others = set(NOT_PERSONAL.get(table, "").split())
    assert personal | others == TABLES[table], "a new column: is it about a person?"
    assert not personal & others


def test_forgetting_a_device_reaches_each_column_of_which_the_page_says_so():
    for (table, column), how in listed().items():
        reached = table in OWN_RULE or column in ROLES or (table, column) in NAMED
        if how == "forget" and table not in ("clients", "updates"):  # their rows are those of a pseudonym afterwards
            assert reached, (table, column)


def test_each_column_that_forgetting_changes_is_on_the_page():
    known = listed()
    text = {("rounds", "reason"), ("rounds", "dropped"), ("runs", "clipped")}  # a code, a count, names of metrics
    counts = {("clients", "selected"), ("runs", "dropped"), ("clients", "dropped")}
    for table, columns in TABLES.items():
        for column in columns:
            if (column in ROLES and table not in OWN_RULE) or (table, column) in NAMED:
                assert (table, column) in known.keys() | text | counts, (table, column)
