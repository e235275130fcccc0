"""The pictures of the dashboard: each page has them, each is linked, and together they stay small."""

from __future__ import annotations

from docs.screenshots import FOLDER, PAGES, SCHEMES, WIDE_PAGES, WIDTHS, picture
from tests.support.shell_blocks import ROOT
from thinwire.web.access import LEAST

MAX_BYTES = 1_500_000
NO_PAGES = ("/api/", "/static/", "/healthz")


def test_each_page_of_the_dashboard_has_its_pictures() -> None:
    routes = {path for method, _, path in (key.partition(" ") for key in LEAST) if method == "GET"}
    shown = PAGES | WIDE_PAGES
    assert {route for _, route in shown.values()} == {path for path in routes if not path.startswith(NO_PAGES)}
    files = {picture(name, width, scheme) for name in shown for width in WIDTHS for scheme in SCHEMES}
    assert files == set(FOLDER.iterdir()), "python -m docs.screenshots"
    assert sum(file.stat().st_size for file in files) < MAX_BYTES
    page = (ROOT / "docs" / "how" / "dashboard.md").read_text()
    assert [file.name for file in sorted(files) if f"images/pages/{file.name})" not in page] == []
