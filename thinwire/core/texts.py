"""Words of others, made fit to be stored and shown."""

from __future__ import annotations


def plain(text: str) -> str:
    """One line without what would move a terminal's cursor, turn a line around, or be no UTF-8.

    >>> plain("a\\x1b[2J\\n\\u202e\\ud800b")
    'a?[2J???b'
    """
    return text if text.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in text)


def grouped(digits: str) -> str:
    """A fingerprint as two people read it to each other.

    >>> grouped("0123456789abcdef" * 2)
    '01234567 89abcdef 01234567 89abcdef'
    """
    return " ".join(digits[at : at + 8] for at in range(0, len(digits), 8))
