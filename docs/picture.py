"""Take docs/images/run.png anew: a real demo in a home of its own, its page in chromium (`python -m docs.picture`)."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Page, ViewportSize, sync_playwright

PICTURE = Path(__file__).parent / "images" / "run.png"
LOGIN = re.compile(r"http://127\.0\.0\.1:\d+/login\S*")
SIZE: ViewportSize = {"width": 1400, "height": 1000}
WAIT_MS = 180_000


def main() -> None:
    with tempfile.TemporaryDirectory() as home:
        demo = subprocess.Popen(
            [Path(sys.executable).with_name("thinwire"), "demo", "--no-browser", "--exit"],
            env=os.environ | {"HOME": home, "TMPDIR": home},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            assert demo.stdout is not None
            address = next(found[0] for line in demo.stdout if (found := LOGIN.search(line)))
            take(address)
        finally:
            os.killpg(demo.pid, signal.SIGINT)
            demo.communicate()


def take(address: str) -> None:
    """Log in, wait for the newest run's last round, and keep what the window shows."""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page: Page = chromium.new_page(viewport=SIZE, device_scale_factor=1)
        page.set_default_timeout(WAIT_MS)
        page.goto(address)
        if "/runs/" not in page.url:
            page.locator("a[href*='runs/']").first.click()
        page.get_by_text(re.compile("Done: 20 rounds")).first.wait_for()
        page.wait_for_timeout(1000)  # the curves' last redraw
        page.screenshot(path=PICTURE, full_page=True)
        chromium.close()


if __name__ == "__main__":
    main()
