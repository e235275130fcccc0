"""Take docs/images/run.png and write docs/evidence/demo.json again, both from one demo (`python -m docs.picture`)."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from threading import Thread
from typing import Any

from playwright.sync_api import Page, ViewportSize, sync_playwright

from benchmarks.document import document

HERE = Path(__file__).parent
PICTURE, FIGURES = HERE / "images" / "run.png", HERE / "evidence" / "demo.json"
HOME, LOGIN = re.compile(r"^web .*--home (\S+)\)"), re.compile(r"http://127\.0\.0\.1:\d+/login\S*")
THINWIRE = Path(sys.executable).with_name("thinwire")
SIZE: ViewportSize = {"width": 1400, "height": 1000}
WAIT_MS = 180_000


def main() -> None:
    with tempfile.TemporaryDirectory() as home:
        demo = subprocess.Popen(
            [THINWIRE, "demo", "--no-browser", "--exit", "--json"],
            env=os.environ | {"HOME": home, "TMPDIR": home},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        assert demo.stdout is not None
        assert demo.stderr is not None
        try:
            state = next(found[1] for line in demo.stderr if (found := HOME.search(line)))
            Thread(target=demo.stderr.read, daemon=True).start()  # the demo must never wait for a reader
            take(login(state))
            printed = json.loads(demo.stdout.read())
        except BaseException:
            os.killpg(demo.pid, signal.SIGINT)
            raise
        finally:
            demo.wait()
    FIGURES.write_text(json.dumps(kept(printed), indent=1) + "\n")


def login(state: str) -> str:
    """Return the address that logs in to the dashboard of a state directory."""
    told = subprocess.check_output([THINWIRE, "aggregator", "status", "--login", "--home", state], text=True)
    found: list[str] = LOGIN.findall(told)
    return found[0]


def take(address: str) -> None:
    """Log in, wait for the newest run's last round, and save a screenshot of the dashboard."""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page: Page = chromium.new_page(viewport=SIZE, device_scale_factor=1)
        page.set_default_timeout(WAIT_MS)
        page.goto(address)
        if "/runs/" not in page.url:
            page.locator("a[href*='runs/']").first.click()
        page.get_by_text(re.compile("Done: 20 rounds")).first.wait_for()
        page.wait_for_timeout(1000)  # the last redraw of the curves
        page.screenshot(path=PICTURE, full_page=True)
        chromium.close()


def kept(printed: dict[str, Any]) -> dict[str, Any]:
    """Return the demo's numbers as a benchmark's document; the paths of this machine are left out."""
    figures = {name: value for name, value in printed.items() if isinstance(value, (int, float))}
    closed = {f"closed {reason}": printed["closed_reasons"].count(reason) for reason in printed["closed_reasons"]}
    return document("demo", "default", [], figures | closed)


if __name__ == "__main__":
    main()
