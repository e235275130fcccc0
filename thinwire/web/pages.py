"""The two HTML files that everything else hangs on; their addresses are relative, so that any prefix works."""

from __future__ import annotations

import html
from functools import cache
from pathlib import Path

from starlette.responses import HTMLResponse

STATIC = Path(__file__).parent / "static"


@cache
def _file(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def shell(depth: int, home: str) -> HTMLResponse:
    """The page's frame, `depth` folders below the root; static/app.js fills it. `home` ends commands that are shown."""
    text = _file("page.html").replace("{{root}}", ".." if depth else ".")
    return HTMLResponse(text.replace("{{home}}", html.escape(home)))


def login_page(home: str, said: str = "", status: int = 200) -> HTMLResponse:
    """The form for a code; `said` is why the last one was refused."""
    text = _file("login.html").replace("{{said}}", html.escape(said)).replace("{{home}}", html.escape(home))
    return HTMLResponse(text, status)
