"""The one script and the one sheet of styles of the dashboard, and how answers travel: compressed, and kept by name."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.support.api_answers import Told
from thinwire.web.bundle import BadModule, Bundle, module, script, styles
from thinwire.web.security import STATIC


def test_the_script_has_each_module_once_after_those_that_it_imports():
    text = script(STATIC).body.decode()
    order = re.findall(r'^\$\["([^"]+)"\] = ', text, re.MULTILINE)
    theirs = {path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*.js")}
    assert sorted(order) == sorted(theirs - {"login.js", "theme.js", "live-worker.js"}), "these are files of their own"
    assert order[-1] == "app.js"
    for place, part in enumerate(re.split(r'^\$\["[^"]+"\] = ', text, flags=re.MULTILINE)[1:]):
        assert set(re.findall(r'\$\["([^"]+)"\]', part)) <= set(order[:place])


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ('import x from "./x.js";\nx();', 'const x = $["x.js"].default;\nx();\nreturn {  };'),
        ('export { a, b as c } from "./v/x.js";', '\nreturn { a: $["v/x.js"].a, c: $["v/x.js"].b };'),
        ("const a = 1, b = 2;export{a as d,b};", "const a = 1, b = 2;\nreturn { d: a, b };"),
        ("export default function(){return 1}", "const $default = function(){return 1} return { default: $default };"),
        ("/* export const old = 1; */\nexport class New {}", "\nclass New {}\nreturn { New };"),
    ],
)  # fmt: skip
def test_a_module_becomes_a_function_with_its_exports(text: str, made: str):
    assert re.sub(r"\s+", " ", module(text, "y.js")[0]).strip() == re.sub(r"\s+", " ", made).strip()


@pytest.mark.parametrize("text", ['import "./x.js";', "export * from './x.js';", "export let a = 1;", "x = `a"])
def test_what_it_cannot_put_into_the_script_is_refused(text: str):
    with pytest.raises(BadModule, match=r"y\.js"):
        module(text, "y.js")


def test_modules_in_a_circle_are_refused(tmp_path: Path):
    (tmp_path / "app.js").write_text('import { b } from "./b.js";\nexport const a = b;')
    (tmp_path / "b.js").write_text('import { a } from "./app.js";\nexport const b = a;')
    with pytest.raises(BadModule, match=r"app\.js imports b\.js imports app\.js"):
        script(tmp_path)


def test_another_content_has_another_name():
    assert Bundle("app", "js", b"a").name != Bundle("app", "js", b"b").name


def test_a_page_names_both_files_and_a_browser_may_keep_them_for_ever(page: TestClient):
    text = page.get("/").text
    for made in (script(STATIC), styles(STATIC)):
        assert f"./static/{made.name}" in text
        answer = page.get(f"/static/{made.name}")
        assert answer.content == made.body
        assert answer.headers["content-encoding"] == "gzip"
        assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
        again = page.get(f"/static/{made.name}", headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        plain = page.get(f"/static/{made.name}", headers={"Accept-Encoding": "identity"})
        assert (plain.content, plain.headers.get("content-encoding")) == (made.body, None)
        assert gzip.decompress(made.zipped) == made.body


def test_a_large_answer_is_compressed_and_a_small_one_is_not(page: TestClient, told: Told):
    assert page.get(f"/api/v1/runs/{told.run_id}/view").headers["content-encoding"] == "gzip"
    assert "content-encoding" not in page.get("/api/v1/service").headers
