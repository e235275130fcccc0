"""The dashboard's scripts and styles, each as one file: assembled from static/ when the dashboard starts.

A page then needs a few requests instead of 40, and there is no build step. The name of each file contains the digest of
its content, so a browser keeps it until it changes.

The script is one ES module. Each module of static/ becomes a function in it, which is called once, after those that it
imports. Invariant: it has the same exports as the module, except that an imported name does not follow later
assignments; no module of static/ assigns to a name that it exports.
"""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Final

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from thinwire.web.comments import BadScript, script_without_comments, style_without_comments

FIRST: Final = "app.js"
STYLES: Final = ("vendor/uplot.css", "style.css")
FOREVER: Final = "public, max-age=31536000, immutable"
NOTICE: Final = "// Of thinwire and of preact, htm and uPlot, whose licenses are in static/vendor/LICENSE.*"
_IMPORT = re.compile(r'^import\s*(?P<what>[^"]+?)\s*from\s*"(?P<path>\./[^"]+|\.\./[^"]+)";?', re.MULTILINE)
_AGAIN = re.compile(r'^export\s*\{(?P<what>[^}]*)\}\s*from\s*"(?P<path>\./[^"]+)";?', re.MULTILINE)
_DECLARED = re.compile(r"^export (?=(?:const|(?:async )?function|class) (?P<name>\w+))", re.MULTILINE)
_DEFAULT = re.compile(r"\bexport default (?=function)")
_LISTED = re.compile(r"\bexport\s*\{(?P<what>[^}]*)\};?")


class BadModule(Exception):
    """Reports a module that the bundle does not support: the message names the module and what is wrong."""


@dataclass(frozen=True)
class Bundle:
    """Holds a file that is served from memory under a name with its digest."""

    stem: str
    suffix: str
    body: bytes

    @cached_property
    def name(self) -> str:
        """Return the file's name, which changes with its content."""
        return f"{self.stem}-{hashlib.sha256(self.body).hexdigest()[:16]}.{self.suffix}"

    @cached_property
    def zipped(self) -> bytes:
        """Return the content, compressed once."""
        return gzip.compress(self.body, 9, mtime=0)

    def answer(self, headers: Headers) -> Response:
        """Return the response to a request with these headers."""
        own = {"Cache-Control": FOREVER, "ETag": f'"{self.name}"', "Vary": "Accept-Encoding"}
        if headers.get("if-none-match") == own["ETag"]:
            return Response(status_code=304, headers=own)
        kind = {"js": "text/javascript", "css": "text/css"}[self.suffix]
        if "gzip" not in headers.get("accept-encoding", ""):
            return Response(self.body, media_type=kind, headers=own)
        return Response(self.zipped, media_type=kind, headers={**own, "Content-Encoding": "gzip"})


class BundledFiles(StaticFiles):
    """Serves the static files, with the bundles among them."""

    def __init__(self, folder: Path, *bundles: Bundle) -> None:
        super().__init__(directory=folder)
        self._bundles: Mapping[str, Bundle] = {one.name: one for one in bundles}

    async def get_response(self, path: str, scope: Scope) -> Response:
        """Return a bundle, or the file of the folder."""
        if (found := self._bundles.get(path)) and scope["method"] in ("GET", "HEAD"):
            return found.answer(Headers(scope=scope))
        return await super().get_response(path, scope)


@cache
def styles(folder: Path) -> Bundle:
    """Return all styles as one file."""
    texts = ((folder / name).read_text(encoding="utf-8") for name in STYLES)
    return Bundle("page", "css", style_without_comments("\n".join(texts)).encode())


@cache
def script(folder: Path) -> Bundle:
    """Return all modules that `FIRST` imports as one module."""
    done: dict[str, str] = {}
    _add(folder, FIRST, done, ())
    parts = [f'$["{name}"] = (() => {{\n{text}\n}})();' for name, text in done.items()]
    return Bundle("app", "js", "\n".join([NOTICE, "const $ = {};", *parts, ""]).encode())


def _add(folder: Path, name: str, done: dict[str, str], waiting: tuple[str, ...]) -> None:
    """Add a module to `done`, after those that it imports."""
    if name in waiting:
        raise BadModule(f"{' imports '.join((*waiting, name))}")
    if name in done:
        return
    text = (folder / name).read_text(encoding="utf-8")
    made, needed = module(text, name)
    for other in needed:
        _add(folder, other, done, (*waiting, name))
    done[name] = made


def module(text: str, name: str) -> tuple[str, list[str]]:
    """Return the body of a function that gives the exports of a module, and the modules that it imports.

    >>> module('import { a as b } from "./x.js";\\nexport const c = b + 1;', "y.js")
    ('const { a: b } = $["x.js"];\\nconst c = b + 1;\\nreturn { c };', ['x.js'])
    """
    needed, exports = list[str](), dict[str, str]()
    try:
        text = script_without_comments(text)  # a comment may hold code that is not used
    except BadScript as error:
        raise BadModule(f"{name}: {error}") from error

    def path(found: re.Match[str]) -> str:
        needed.append((Path(name).parent / found["path"]).as_posix().removeprefix("./"))
        return f'$["{needed[-1]}"]'

    def imported(found: re.Match[str]) -> str:
        held, what = path(found), found["what"]
        if not what.startswith("{"):
            return f"const {what} = {held}.default;"
        return f"const {{ {', '.join(_pairs(what.strip('{}'), ': '))} }} = {held};"

    def again(found: re.Match[str]) -> str:
        held = path(found)
        for inner, outer in _exported(found["what"]):
            exports[outer] = f"{held}.{inner}"
        return ""

    def declared(found: re.Match[str]) -> str:
        exports[found["name"]] = found["name"]
        return ""

    def listed(found: re.Match[str]) -> str:
        exports.update({outer: inner for inner, outer in _exported(found["what"])})
        return ""

    def default(_: re.Match[str]) -> str:
        exports["default"] = "$default"
        return "const $default = "

    for pattern, change in (
        (_AGAIN, again), (_IMPORT, imported), (_DECLARED, declared), (_DEFAULT, default), (_LISTED, listed),
    ):  # fmt: skip
        text = pattern.sub(change, text)
    if left := re.search(r"^(?:import|export)\b.*", text, re.MULTILINE):
        raise BadModule(f"{name}: {left[0][:80]}")
    given = ", ".join(outer if outer == inner else f"{outer}: {inner}" for outer, inner in exports.items())
    return f"{text.rstrip()}\nreturn {{ {given} }};", needed


def _exported(text: str) -> list[tuple[str, str]]:
    """Return the (inner, outer) names of a list of exports."""
    names = [one.split() for one in _pairs(text, " ")]
    return [(one[0], one[-1]) for one in names]


def _pairs(text: str, between: str) -> list[str]:
    """Return the names of a list such as `a as b, c`, with `between` in the place of `as`."""
    return [re.sub(r"\s+as\s+", between, one.strip()) for one in text.split(",") if one.strip()]
