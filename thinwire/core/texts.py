"""Words of others, made fit to be stored and shown."""

from __future__ import annotations


def plain(text: str) -> str:
    """One line without what would move a terminal's cursor, turn a line around, or be no UTF-8.

    >>> plain("a\\x1b[2J\\n\\u202e\\ud800b")
    'a?[2J???b'
    """
    return text if text.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in text)
