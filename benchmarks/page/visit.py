"""Measure one browser's visit to a run: what it loads, when it draws, and what it takes while the run goes on."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Iterator
from statistics import quantiles
from typing import Any, Final

from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from benchmarks.page.recipe import Teller

CHROMIUM: Final = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell")
FLAGS: Final = ("--no-sandbox", "--disable-background-networking", "--disable-gpu")
UPDATES_A_SECOND: Final = 4
WATCH: Final = """
  new MutationObserver((_, observer) => {
    if (!document.querySelector(".curve canvas")) return;
    observer.disconnect();
    requestAnimationFrame(() => requestAnimationFrame(() => { window.firstCurve = performance.now(); }));
  }).observe(document, { childList: true, subtree: true });
"""
FRAMES: Final = """
  window.frames_ms = [];
  let before = performance.now();
  const frame = (now) => { window.frames_ms.push(now - before); before = now; requestAnimationFrame(frame); };
  requestAnimationFrame(frame);
"""


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Start the system's Chromium."""
    found = next((path for name in CHROMIUM if (path := shutil.which(name))), None)
    if found is None:
        raise SystemExit("this benchmark needs chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=list(FLAGS))
        yield browser
        browser.close()


class Visit:
    """A browser context with a session, and its page of one run; `bytes` counts what the network carried."""

    def __init__(self, browser: Browser, url: str, code: str, run_id: str) -> None:
        self.context: BrowserContext = browser.new_context(viewport={"width": 1300, "height": 900})
        self.url, self.run_id = url, run_id
        login = self.context.new_page()
        login.goto(f"{url}/login#{code}")
        login.wait_for_selector("main h1")
        login.close()
        self.page: Page = self.context.new_page()
        self.page.add_init_script(WATCH)
        self.bytes, self.requests = 0, 0
        self.session = self.context.new_cdp_session(self.page)
        self.session.send("Network.enable")
        self.session.send("Network.setCacheDisabled", {"cacheDisabled": True})
        self.session.send("Performance.enable")
        self.session.on("Network.loadingFinished", self._loaded)

    def _loaded(self, event: dict[str, Any]) -> None:
        self.bytes, self.requests = self.bytes + int(event["encodedDataLength"]), self.requests + 1

    def open(self) -> float:
        """Open the run's page; return the milliseconds from the navigation to the first curve."""
        self.page.goto(f"{self.url}/runs/{self.run_id}")
        self.page.wait_for_selector(".curve canvas", timeout=600_000)
        while not (drawn := self.page.evaluate("window.firstCurve ?? 0")):  # its policy allows no evaluated conditions
            self.page.wait_for_timeout(20)
        return float(drawn)

    def follow(self, run: Teller, seconds: float) -> list[float]:
        """Let the run go on with four replies a second; return the milliseconds between the frames meanwhile."""
        ending = threading.Event()
        thread = threading.Thread(target=_go_on, args=(run, ending), daemon=True)
        self.page.evaluate(FRAMES)
        thread.start()
        self.page.wait_for_timeout(1000 * seconds)
        ending.set()
        thread.join()
        return [float(one) for one in self.page.evaluate("window.frames_ms")]

    def heap_mb(self) -> float:
        """Return the megabytes of the JavaScript objects, after a collection."""
        self.session.send("HeapProfiler.collectGarbage")
        found = self.session.send("Performance.getMetrics")["metrics"]
        return float(next(one["value"] for one in found if one["name"] == "JSHeapUsedSize")) / 1e6

    def close(self) -> None:
        """End the visit."""
        self.context.close()


def p95(values: list[float]) -> float:
    """Return the value that 95 of 100 do not pass."""
    return quantiles(values, n=20)[-1] if len(values) > 1 else values[0]


def _go_on(run: Teller, ending: threading.Event) -> None:
    """Record replies, one at a time, and a new round where all have replied."""
    waiting = list(run.assigned[len(run.assigned) // 2 :])
    due = time.monotonic()
    while not ending.wait(max(0.0, due - time.monotonic())):
        due += 1 / UPDATES_A_SECOND
        if waiting:
            run.answer([waiting.pop()])
        else:
            run.close()
            run.now = time.time()
            run.open()
            waiting = list(run.assigned)
