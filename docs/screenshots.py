"""Take docs/images/pages: each page of the dashboard, light and dark, wide and narrow (`python -m docs.screenshots`).

The pages show stores that are filled as an aggregator would fill them, so pictures change when pages do. This program
holds the lock of the state directory in place of an aggregator: to the dashboard one is running. Chromium takes the
pictures and encodes them as WebP. `tests/docs/test_screenshots.py` compares them with the dashboard's routes.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final, Literal

from playwright.sync_api import Browser, Page, ViewportSize, expect, sync_playwright

from benchmarks.page.recipe import Recipe, Teller, fill
from tests.support.api_answers import LAYOUT
from tests.support.filled_fleet import a_fleet, measured
from tests.support.filled_store import finish, new_run, twelve_rounds
from tests.support.private_story import PRIVATE, PrivateStory
from tests.support.secure_story import SecureStory
from tests.support.serving import showing
from thinwire.core.clock import BEAT_S, HEARD, repeating, write_heard
from thinwire.core.events import DeviceOnline, RunStatusChanged
from thinwire.core.layout import Layout
from thinwire.core.statedir import AggregatorHome, default_home, lock_file, write_about
from thinwire.store import Store
from thinwire.store.alerts import Condition

FOLDER: Final = Path(__file__).parent / "images" / "pages"
PAGES: Final = {  # name of the picture -> (path of the page, perhaps a section of it; its route in web/access.py)
    "login": ("login", "/login"),
    "runs": ("", "/"),
    "run": ("runs/digits-4", "/runs/{run_id}"),
    "run-rounds": ("runs/digits-1?round=4#rounds", "/runs/{run_id}"),
    "run-private": ("runs/digits-2", "/runs/{run_id}"),
    "run-secure": ("runs/digits-3", "/runs/{run_id}"),
    "compare": ("compare?runs=digits-3,digits-4&metric=accuracy", "/compare"),
    "new": ("new?from=digits-1", "/new"),
    "devices": ("devices", "/devices"),
    "device": ("devices/pi-01", "/devices/{name}"),
    "alerts": ("alerts", "/alerts"),
    "users": ("users", "/users"),
    "audit": ("audit", "/audit"),
}
WIDE_PAGES: Final = {"run-heat-map": ("runs/digits-1#rounds", "/runs/{run_id}")}  # of a run with more than 200 clients
WIDTHS: Final[dict[str, ViewportSize]] = {
    "wide": {"width": 1440, "height": 900},
    "narrow": {"width": 400, "height": 800},
}
SCHEMES: Final[tuple[Literal["light", "dark"], ...]] = ("light", "dark")
TALLEST: Final = {"wide": 1100, "narrow": 1100}  # CSS pixels; the rest of a page is left out
SCALES: Final = {"wide": 0.75, "narrow": 1.0}  # pixels of a picture for a CSS pixel
QUALITY: Final = 0.4  # of WebP
WAIT_MS: Final = 30_000
DRAWN_MS: Final = 800  # for the last redraw of a page that has all its data
ENCODE: Final = """async ([png, quality]) => {
  const image = await createImageBitmap(await (await fetch(`data:image/png;base64,${png}`)).blob());
  const canvas = Object.assign(document.createElement("canvas"), { width: image.width, height: image.height });
  canvas.getContext("2d").drawImage(image, 0, 0);
  return canvas.toDataURL("image/webp", quality).split(",")[1];
}"""


def picture(name: str, width: str, scheme: str) -> Path:
    """Return the file of a picture."""
    return FOLDER / f"{name}-{width}-{scheme}.webp"


def main() -> None:
    """Take all pictures."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for filled, pages in ((of_each_kind, PAGES), (of_many_clients, WIDE_PAGES)):
            with dashboard(filled) as (store, url):
                take(chromium, store, url, pages)
        chromium.close()
    print(f"{sum(file.stat().st_size for file in FOLDER.iterdir()) / 1e6:.2f} MB in {FOLDER}")


@contextlib.contextmanager
def dashboard(filled: Callable[[Store], Iterable[str]]) -> Iterator[tuple[Store, str]]:
    """Serve the dashboard on a filled store; give the store, and the address."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        os.environ["XDG_STATE_HOME"] = folder  # commands on the pages name no folder of this machine
        home = AggregatorHome.under(default_home(), durable=False)
        store = stack.enter_context(Store.open(home.database, durable=False))
        write_about(stack.enter_context(lock_file(home.lock)), {})
        names, heard = filled(store), home.lock.with_name(HEARD)
        stack.enter_context(repeating(lambda: write_heard(heard, dict.fromkeys(names, time.time())), BEAT_S, "heard"))
        yield store, stack.enter_context(showing(store.url, home.lock)).url


def of_each_kind(store: Store) -> list[str]:
    """Record runs of each kind, of which one goes on and one stands still, devices of each kind, users and alerts.

    It returns the devices that are connected.
    """
    now = time.time()
    finish(twelve_rounds(store, at=now - 9000))
    private = PrivateStory(store, at=now - 6000, plan=PRIVATE, layout=LAYOUT)
    secure = SecureStory(store, at=now - 3000, layout=Layout.of({"w": (1000, 120), "b": (120,)}))
    for number in range(5):
        private.play(released=number != 2)
        secure.play({"pi-03": "share", "pi-07": "masked"} if number == 2 else {})
    private.end("done", "5 rounds")
    run = new_run(store, rounds=30, at=now - 70, more='[uplink]\ncodec = "topk(0.01) > int8 > zstd"\n')
    for name in run.devices:
        store.record_device(DeviceOnline(now - 8000, name))
    while run.round < 20:
        run.quiet_round(run.draw.uniform(2.6, 3.4))
    run.open()
    for name in run.devices[:5]:
        run.answer(name, run.draw.uniform(0.6, 1.2))
    said = RunStatusChanged(now, "running", "round 21 of 30")
    store.record(run.run_id, [said], [row for name in run.devices for row in measured(name, now)])
    a_fleet(store, now)
    store.alerts.update([Condition("certificate", "", "the certificate of the device API ends in 9 days")])
    store.alerts.update([])
    for name, role in (("ann", "admin"), ("bo", "operator"), ("eve", "viewer")):
        store.users.add(name, role, "correct horse battery staple", "operator")
    return [*run.devices, "cam-01", "jetson-1"]


def of_many_clients(store: Store) -> Sequence[str]:
    """Record a run with 210 clients, all of which are selected in each round, and let it go on now."""
    recipe = Recipe("wide", 60, 210, 210)
    fill(store, recipe, time.time() - 60 * 8.0)
    return Teller.resume(store, recipe).names


def take(chromium: Browser, store: Store, url: str, pages: dict[str, tuple[str, str]]) -> None:
    """Save the pictures of these pages."""
    encoder = chromium.new_page()
    for (width, viewport), scheme in itertools.product(WIDTHS.items(), SCHEMES):
        new_page = partial(
            chromium.new_page, viewport=viewport, color_scheme=scheme, device_scale_factor=SCALES[width]
        )  # fmt: skip
        page, stranger = new_page(), new_page()
        page.goto(f"{url}/login#{store.logins.new_code()}")
        page.wait_for_selector(".head h1")
        for name, (path, _) in pages.items():
            shot = taken(stranger if path == "login" else page, f"{url}/{path}", TALLEST[width])
            made = encoder.evaluate(ENCODE, [base64.b64encode(shot).decode(), QUALITY])
            picture(name, width, scheme).write_bytes(base64.b64decode(made))


def taken(page: Page, url: str, tallest: int) -> bytes:
    """Return a picture of a page as PNG, once it shows all its data."""
    page.set_default_timeout(WAIT_MS)
    page.goto(url)
    page.wait_for_selector("h1")
    expect(page.locator(".loading:visible")).to_have_count(0, timeout=WAIT_MS)
    page.wait_for_timeout(DRAWN_MS)
    box = page.locator(f"#{url.partition('#')[2]}" if "#" in url else "html").bounding_box()
    assert box is not None, f"nothing to see at {url}"
    return page.screenshot(full_page=True, clip={**box, "height": min(box["height"], tallest)})


if __name__ == "__main__":
    main()
