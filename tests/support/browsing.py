"""A browser for the tests of the dashboard; its fixtures are known to all of them through conftest.py."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.support.serving import Shown, showing
from thinwire.store import Store

AXE = (Path(__file__).parents[1] / "web" / "vendor" / "axe.min.js").read_text()
# The shell is Chromium without a window: a page takes it two thirds of the CPU.
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
SERIOUS = ("serious", "critical")
LOOK = """async (serious) => {
  const weak = (impact) => !serious.includes(impact);
  const ofCheck = (check) => axe._audit.data.checks[check.id ?? check]?.impact ?? "unknown";
  const rules = axe._audit.rules.filter((rule) => weak(rule.impact)
    && [...rule.any, ...rule.all, ...rule.none].every((check) => !["unknown", ...serious].includes(ofCheck(check))));
  const off = Object.fromEntries(rules.map((rule) => [rule.id, { enabled: false }]));
  return (await axe.run(document, { resultTypes: ["violations"], rules: off })).violations;
}"""
WAIT_MS = 15_000  # how long a condition may take on a busy machine; nothing waits so long in earnest


@dataclass
class Lasting:
    """A browser that several modules of tests use, one after the other.

    While Playwright drives it, its event loop is said to run in this thread. Other tests run loops of their own, so it
    is said so only as long as the browser is in use. One that has crashed is started again for the next module.
    """

    launch: Callable[[], Browser]
    browser: Browser
    loop: asyncio.AbstractEventLoop

    @contextmanager
    def in_use(self) -> Iterator[Browser]:
        asyncio._set_running_loop(self.loop)
        try:
            if not self.browser.is_connected():
                self.browser = self.launch()
            yield self.browser
        finally:
            asyncio._set_running_loop(None)


@pytest.fixture(scope="session")
def lasting_browser() -> Iterator[Lasting]:
    """Chromium: to start it with its driver takes a second of CPU, more than most files of tests have it do."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.fail("these tests need chromium: apt-get install chromium, or `make test` as root, which installs it")
    with ExitStack() as stack:
        playwright = stack.enter_context(sync_playwright())
        flags = ["--no-sandbox", "--disable-background-networking", "--disable-gpu"]
        launch = partial(playwright.chromium.launch, executable_path=found, args=flags)
        made = Lasting(launch, launch(), asyncio.get_running_loop())
        asyncio._set_running_loop(None)
        yield made
        asyncio._set_running_loop(made.loop)
        made.browser.close()


@pytest.fixture(scope="module")
def browser(lasting_browser: Lasting) -> Iterator[Browser]:
    with lasting_browser.in_use() as opened:
        yield opened


@pytest.fixture
def served(store: Store, tmp_path: Path) -> Iterator[Shown]:
    with showing(store.url) as running:
        yield running


Open = Callable[..., Page]
# What moves by itself on a run's page takes the browser a fifth of a core as long as the page is open.
CONTEXT: Mapping[str, Any] = {"viewport": {"width": 1000, "height": 900}, "reduced_motion": "reduce"}


@contextmanager
def pages(browser: Browser, watched: Container[str] = ("error", "warning")) -> Iterator[Open]:
    """Makes pages, each of a person of its own; at the end no script may have failed, and the console tells nothing
    of the kinds that are `watched`.
    """
    contexts, wrong = [], list[str]()

    def open_(**options: Any) -> Page:
        context = browser.new_context(**{**CONTEXT, **options})
        contexts.append(context)
        context.set_default_timeout(WAIT_MS)
        page = context.new_page()
        page.on("console", lambda m: wrong.append(f"{m.text} {m.location['url']}") if m.type in watched else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        return page

    expect.set_options(timeout=WAIT_MS)
    yield open_
    for context in contexts:
        context.close()
    wrong = [text for text in wrong if "ERR_CONNECTION" not in text and "ERR_INCOMPLETE" not in text]
    assert not wrong, "the console tells:\n" + "\n".join(wrong)


@pytest.fixture
def look(browser: Browser, store: Store) -> Iterator[Open]:
    """Opens an address as one who has logged in; at the end nothing may have gone wrong in the console."""
    with pages(browser) as new_page:

        def open_(url: str, path: str = "", **options: Any) -> Page:
            page = new_page(**options)
            code, own = store.logins.new_code(), {"Origin": url}
            page.context.request.post(f"{url}/login", form={"code": code}, headers=own, max_redirects=0)
            page.goto(f"{url}/{path}")
            page.wait_for_selector(".head h1")
            return page

        yield open_


def axe(page: Page) -> list[str]:
    """What axe-core finds to be serious; rules by which it cannot find anything serious take it a third of its time."""
    if not page.evaluate("typeof axe === 'object'"):
        page.evaluate(AXE)
    return [
        f"{v['id']}: {node['html']} {node.get('failureSummary', '')}"
        for v in page.evaluate(LOOK, SERIOUS) if v["impact"] in SERIOUS for node in v["nodes"]
    ]  # fmt: skip


def axe_in_both(page: Page) -> list[str]:
    """What axe-core finds in the dark and in the light colors, which a page takes from its system at once."""
    found = list[str]()
    for scheme in ("dark", "light"):
        page.emulate_media(color_scheme=scheme)
        found += [f"{scheme}: {one}" for one in axe(page)]
    return found


def overflow(page: Page) -> int:
    return int(page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))
