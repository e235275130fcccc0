"""Removes the comments of scripts and styles, which a browser need not load.

What looks like a comment within a string, a template or a regular expression stays. Invariant: a script does the same
without its comments, which `tests/web/test_comments.py` compares in a browser. A compressed script loses a tenth by it;
rjsmin, a library for this, damages templates within templates.

A slash divides after an operand and begins a regular expression elsewhere (ECMA-262, section 12). After a closing brace
only a parser knows which, so a slash there is refused.
"""

from __future__ import annotations

import re
from typing import Final

PLAIN: Final = re.compile(r"[^\"'`/{}()]+")
STRING: Final = re.compile(r"\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'", re.DOTALL)
TEMPLATE: Final = re.compile(r"(?:\\.|\$(?!\{)|[^`\\$])*(?P<end>`|\$\{)", re.DOTALL)  # to its end, or to a value in it
REGEX: Final = re.compile(r"/(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\[\n])+/")
COMMENT: Final = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
WORD: Final = re.compile(r"(?<![\w$.])[a-z]+$")  # at the end of a text, and no property
OPERAND: Final = re.compile(r"(?:[\w$)\]\"'`]|\+\+|--)$")
BEFORE_REGEX: Final = frozenset(
    ("await", "case", "delete", "do", "else", "in", "instanceof", "new", "return", "throw", "typeof", "void", "yield")
)
BEFORE_HEAD: Final = frozenset(("for", "if", "while", "with"))  # a statement follows the parentheses after these
STYLE: Final = re.compile(
    r"(?P<kept>\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|url\((?:\\.|[^)\"'\\])*\))|[ \t]*/\*.*?\*/\n?", re.DOTALL
)


class BadScript(ValueError):
    """Reports a script in which this module cannot tell what is a comment; the message has the line."""


def style_without_comments(text: str) -> str:
    """Return a style sheet without its comments.

    >>> style_without_comments('a { content: "/*" } /* b */')
    'a { content: "/*" } '
    """
    return STYLE.sub(lambda found: found["kept"] or ("\n" if found[0].endswith("\n") else " "), text)


def script_without_comments(text: str) -> str:
    """Return a script without its comments.

    Raise `BadScript` for a slash after a closing brace, and for a literal or a bracket without an end.

    >>> script_without_comments('a = "//"; // b')
    'a = "//";'
    """
    return _Reader(text).stripped()


class _Reader:
    """Reads a script once. `_open` has the open brackets: `{`, `${` in a template, `(`, or `head` for `if (`.

    `_before` is what stands before, without spaces and comments; of a regular expression its last slash is a quote.
    """

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0
        self._kept, self._open = list[str](), list[str]()
        self._before, self._is_head = "", False

    def stripped(self) -> str:
        """Return the script without its comments."""
        while self._at < len(self._text):
            if plain := PLAIN.match(self._text, self._at):
                self._keep(plain[0])
            else:
                self._read(self._text[self._at])
        if self._open:
            raise self._wrong()
        return "".join(self._kept)

    def _read(self, mark: str) -> None:
        """Read what this mark begins or ends."""
        match mark:
            case "/":
                self._slash()
            case "`":
                self._template()
            case "'" | '"':
                self._keep(self._literal(STRING)[0])
            case "{" | "(":
                self._open.append("head" if mark == "(" and self._word() in BEFORE_HEAD else mark)
                self._keep(mark)
            case _:
                self._close(mark)

    def _close(self, mark: str) -> None:
        opened = self._open.pop() if self._open else ""
        if opened not in (("{", "${") if mark == "}" else ("(", "head")):
            raise self._wrong()
        self._is_head = opened == "head"
        if opened == "${":
            self._template()
        else:
            self._keep(mark)

    def _template(self) -> None:
        """Read a template's text, from its first quote or the end of a value on."""
        found = self._literal(TEMPLATE, 1)
        if found["end"] == "${":
            self._open.append("${")
        self._keep(self._text[self._at] + found[0])
        self._before = "(" if found["end"] == "${" else "`"

    def _slash(self) -> None:
        """Skip a comment, or read a regular expression or a division."""
        if comment := COMMENT.match(self._text, self._at):
            self._skip(comment)
        elif self._before.endswith("}"):
            raise self._wrong()
        elif self._divides():
            self._keep("/")
        else:
            self._keep(self._literal(REGEX)[0])
            self._before = '"'

    def _divides(self) -> bool:
        if self._before.endswith(")"):
            return not self._is_head
        return bool(OPERAND.search(self._before)) and self._word() not in BEFORE_REGEX

    def _skip(self, comment: re.Match[str]) -> None:
        """Leave a comment out, with the spaces before it, and with its line if it has nothing else."""
        line = self._text.rfind("\n", 0, self._at) + 1
        is_first = not self._text[line : self._at].strip(" \t")
        if self._kept:
            self._kept[-1] = self._kept[-1].rstrip(" \t")
        self._at = comment.end()
        if is_first and self._text.startswith("\n", self._at):
            self._at += 1
        elif not is_first and comment[0].startswith("/*"):  # it separates words, and lines if it has several
            self._kept.append("\n" if "\n" in comment[0] else " ")

    def _word(self) -> str:
        found = WORD.search(self._before)
        return found[0] if found else ""

    def _literal(self, kind: re.Pattern[str], after: int = 0) -> re.Match[str]:
        if found := kind.match(self._text, self._at + after):
            return found
        raise self._wrong()

    def _keep(self, piece: str) -> None:
        self._kept.append(piece)
        self._at += len(piece)
        self._before = piece.rstrip() or self._before

    def _wrong(self) -> BadScript:
        line = self._text.count("\n", 0, self._at) + 1
        return BadScript(f"line {line}: {self._text[self._at : self._at + 40]!r} is not understood")
