"""Scripts and styles without their comments: what looks like one within a literal stays, and all do the same."""

from __future__ import annotations

import random

import pytest
from playwright.sync_api import Browser

from thinwire.web.comments import BadScript, script_without_comments, style_without_comments
from thinwire.web.security import STATIC


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("// a\nb // c\nd", "b\nd"),
        ("  /* a\n b */\nc /* d */ e /* f\n */ g", "c  e\n g"),
        ("a = '// b' + \"/* c */\" + '\\'// d'", None),
        ("a = `// b ${c /* d */ + `/* ${{}} */`} // e`", "a = `// b ${c  + `/* ${{}} */`} // e`"),
        ("a = /[/*]\\//g.test(b) // c", "a = /[/*]\\//g.test(b)"),
        ("a = b / c / d; e = (f) / g[h] / i++ / 2 // j", "a = b / c / d; e = (f) / g[h] / i++ / 2"),
        ("if (a) /'/.test(b); return /`/ // c", "if (a) /'/.test(b); return /`/"),
        ("a.return / 2 // '", "a.return / 2"),
    ],
)
def test_only_comments_are_removed(text: str, left: str | None):
    assert script_without_comments(text) == (text if left is None else left)


@pytest.mark.parametrize("text", ["a = {} / 2", "a = 'b\n'", "a = `b", "/* a", "a = ${b}}", "f(a"])
def test_a_script_that_is_not_understood_is_refused_with_its_line(text: str):
    with pytest.raises(BadScript, match=r"^line [12]: "):
        script_without_comments(text)


def test_styles_keep_their_strings_and_addresses():
    text = 'a { content: "/* b */"; background: url(c/*d) } /* e */\nf {}'
    assert style_without_comments(text) == 'a { content: "/* b */"; background: url(c/*d) }\nf {}'
    left = style_without_comments((STATIC / "style.css").read_text())
    assert "/*" not in left


VALUES = ("'// a'", '"/* b"', "`// ${1 /* c */} d`", '/[/"]\\//.source', "(8 /* e */ / 2)", "[6][0] / 3", "`*/`")
COMMENTS = (" ", "/* '` */", "// \"'`/*\n", "\n// ${\n", "/* a\nb */", "/**/")


def test_a_script_has_the_same_value_without_its_comments(browser: Browser):
    draw = random.Random(21)
    texts = []
    for _ in range(300):
        parts = [f"{draw.choice(COMMENTS)}{draw.choice(VALUES)}{draw.choice(COMMENTS)}" for _ in range(6)]
        texts.append(f"({draw.choice(COMMENTS)}() => {{ return [{','.join(parts)}] }})()")
    page = browser.new_page()
    run = "texts => texts.map((text) => JSON.stringify((0, eval)(text)))"
    assert page.evaluate(run, texts) == page.evaluate(run, list(map(script_without_comments, texts)))
    page.close()
