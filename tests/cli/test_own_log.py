"""The log of an aggregator in the background stays within its bound, and loses no line while it does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.cli.test_aggregator import background, until
from thinwire.cli.aggregator.serve import SERVICE_LOG
from thinwire.core.log_file import MAX_LOG_BYTES

__all__ = ["background"]
MOST, LINE, LINES = 20_000, 100, 1000
PRINTING = f"""
import os, sys
from pathlib import Path
from thinwire.core.log_file import turn_over
log = Path(sys.argv[1])
for number in range({LINES}):
    os.write(1 + number % 2, f"{{number:0{LINE - 1}}}\\n".encode())
    turn_over(log, {MOST})
"""


def sizes(log: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in log.parent.glob(f"{log.name}*")}


def printed_into(file: Path, log: Path) -> None:
    with open(file, "ab") as out:
        subprocess.run([sys.executable, "-c", PRINTING, str(log)], stdout=out, stderr=out, check=True, timeout=60)


def test_the_log_keeps_the_last_lines_of_both_outputs_within_two_bounds(tmp_path: Path) -> None:
    log = tmp_path / SERVICE_LOG
    printed_into(log, log)
    assert sizes(log).keys() == {SERVICE_LOG, f"{SERVICE_LOG}.1"}
    assert max(sizes(log).values()) <= MOST + LINE
    lines = ((tmp_path / f"{SERVICE_LOG}.1").read_text() + log.read_text()).splitlines()
    assert [int(line) for line in lines] == list(range(LINES - len(lines), LINES))
    assert len(lines) > MOST / LINE


def test_output_that_goes_elsewhere_is_left_alone(tmp_path: Path) -> None:
    log, elsewhere = tmp_path / SERVICE_LOG, tmp_path / "journal"
    log.write_text("of another start")
    printed_into(elsewhere, log)
    assert (log.read_text(), elsewhere.stat().st_size) == ("of another start", LINES * LINE)
    assert sizes(log).keys() == {SERVICE_LOG}


def test_an_aggregator_in_the_background_begins_its_log_again_when_it_is_full(home: Path, background: str) -> None:
    log = home / "aggregator" / SERVICE_LOG
    assert background.splitlines()[0] in log.read_text()
    with open(log, "ab") as file:
        file.write(b"x" * (MAX_LOG_BYTES + 1))
    until(lambda: sizes(log).keys() == {SERVICE_LOG, f"{SERVICE_LOG}.1"}, "the log is begun again")
    assert sizes(log)[SERVICE_LOG] < MAX_LOG_BYTES < sizes(log)[f"{SERVICE_LOG}.1"]
