"""Every regular expression of the package takes steps in proportion to the text that it sees.

Steps are counted by a small backtracking matcher on the pattern's own parse tree: no clock decides, and no other load.
Each repetition of a pattern is reached by the shortest text that leads there, pumped, and followed by a wrong end.
"""

from __future__ import annotations

import ast
import importlib
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import thinwire
from thinwire.core.errors import CodecError

op: Any = importlib.import_module("re._constants")  # private: no other parser has each step of a pattern
parser: Any = importlib.import_module("re._parser")
ROOT = Path(thinwire.__file__).parent
CALLS = {"compile", "match", "fullmatch", "search", "sub", "split", "findall", "finditer"}
ANYWHERE = {"search", "sub", "split", "findall", "finditer"}  # begun at each letter of the text
LENGTH = 32  # a pumped text; then twice and four times as long
MAX_STEPS = 200_000  # where counting ends: a cubic pattern takes more at four times LENGTH
BOUNDED = 600  # steps that a repetition with an upper bound may take until that is reached
LETTERS = 'a1 .-_/"(=,;>:\n'

# Patterns that no stranger's text reaches, each with the reason.
OWN = {
    ("cli/sim.py", "COMMA"): "an option that the operator types; a command line is short",
    ("compression/spec.py", "search"): "examples of installed codecs, for a name that is registered",
    **{
        ("web/bundle.py", name): "modules of the dashboard, which are the package's own"
        for name in ("_IMPORT", "_AGAIN", "_DECLARED", "_DEFAULT", "_LISTED", "search", "sub")
    },
    **{
        ("web/comments.py", name): "scripts and styles of the dashboard, which are the package's own"
        for name in ("STRING", "TEMPLATE", "REGEX", "STYLE")
    },
}


class TooMany(Exception):
    """The count has reached MAX_STEPS."""


IS = {op.CATEGORY_DIGIT: r"\d", op.CATEGORY_SPACE: r"\s", op.CATEGORY_WORD: r"\w", op.CATEGORY_NOT_SPACE: r"\S"}


def one(code: Any, value: Any, letter: str) -> bool:
    """Return whether a node that takes one letter takes this one."""
    if code is op.ANY:
        return True
    if code in (op.LITERAL, op.NOT_LITERAL):
        return bool((ord(letter) == value) == (code is op.LITERAL))
    negated, found = value[0][0] is op.NEGATE, False
    for kind, given in value[negated:]:
        if kind is op.CATEGORY:
            found |= re.match(IS[given], letter) is not None
        else:
            low, high = given if kind is op.RANGE else (given, given)
            found |= low <= ord(letter) <= high
    return found != negated


def steps(pattern: str, text: str, flags: int = 0, how: str = "fullmatch") -> int:
    """Return how many nodes of the pattern's tree are tried until it fits or has failed."""
    count, tree = 0, list(parser.parse(pattern, flags))
    Next = Callable[[int], bool]

    def end_of(nodes: list[Any], i: int) -> int:
        """Return where these nodes end, -1 where they do not fit."""
        ends: list[int] = []

        def note(j: int) -> bool:
            ends.append(j)
            return True

        return ends[-1] if run(nodes, i, note) else -1

    def run(nodes: list[Any], i: int, then: Next) -> bool:
        nonlocal count
        count += 1
        if count > MAX_STEPS:
            raise TooMany
        if not nodes:
            return then(i)
        (code, value), rest = nodes[0], nodes[1:]
        if code in (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN):
            return i < len(text) and one(code, value, text[i]) and run(rest, i + 1, then)
        if code is op.AT:
            fits = {op.AT_END: i == len(text) or text[i:] == "\n", op.AT_BEGINNING: i == 0}.get(value, True)
            return fits and run(rest, i, then)
        if code is op.SUBPATTERN:
            return run(list(value[3]), i, lambda j: run(rest, j, then))
        if code is op.BRANCH:
            return any(run(list(way), i, lambda j: run(rest, j, then)) for way in value[1])
        if code in (op.ASSERT, op.ASSERT_NOT):
            return run(list(value[1]), i, lambda j: True) == (code is op.ASSERT) and run(rest, i, then)
        if code is op.ATOMIC_GROUP or code is op.POSSESSIVE_REPEAT:
            inside = [(op.MAX_REPEAT, value)] if code is op.POSSESSIVE_REPEAT else list(value)
            end = end_of(inside, i)
            return end >= 0 and run(rest, end, then)
        assert code in (op.MAX_REPEAT, op.MIN_REPEAT), code
        least, most, body = value
        if len(body) == 1 and body[0][0] in (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN):
            end = i
            while end < len(text) and end - i < most and one(body[0][0], body[0][1], text[end]):
                end, count = end + 1, count + 1
            ways = range(i + least, end + 1) if code is op.MIN_REPEAT else range(end, i + least - 1, -1)
            return any(run(rest, j, then) for j in ways)

        def again(done: int, at: int) -> bool:
            more = done < most and run(list(body), at, lambda j: j > at and again(done + 1, j))
            return more or (done >= least and run(rest, at, then))

        return again(0, i)

    try:
        for start in range(len(text) if how in ANYWHERE else 1):
            if run(tree, start, (lambda j: j == len(text)) if how == "fullmatch" else lambda j: True):
                break
    except TooMany:
        return MAX_STEPS
    return count


def shortest(nodes: Any) -> str:
    """Return a short text that these nodes fit."""
    text = ""
    for code, value in nodes:
        if code is op.LITERAL:
            text += chr(value)
        elif code in (op.NOT_LITERAL, op.ANY, op.IN):
            text += next(letter for letter in LETTERS if one(code, value, letter))
        elif code is op.SUBPATTERN:
            text += shortest(value[3])
        elif code is op.BRANCH:
            text += shortest(value[1][0])
        elif code in (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT):
            text += shortest(value[2]) * value[0]
        elif code is op.ATOMIC_GROUP:
            text += shortest(value)
    return text


def repeats(nodes: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each repetition's body with the shortest text that leads to it."""
    for at, (code, value) in enumerate(nodes):
        here = before + shortest(nodes[:at])
        if code in (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT):
            yield here, value[2]
            yield from repeats(value[2], here)
        elif code is op.SUBPATTERN:
            yield from repeats(value[3], here)
        elif code is op.BRANCH:
            for way in value[1]:
                yield from repeats(way, here)
        elif code is op.ATOMIC_GROUP:
            yield from repeats(value, here)


def pumped(pattern: str, flags: int) -> Iterator[Callable[[int], str]]:
    """Yield texts of a given length: what leads to a repetition of the pattern, that again and again, a wrong end."""
    found = list(repeats(parser.parse(pattern, flags)))
    befores = {before for before, _ in found} | {""}
    bodies = {shortest(body) for _, body in found} | set(LETTERS) | {"a ", 'a"', "a.", "/a"}
    for before, body, end in itertools.product(sorted(befores), sorted(bodies - {""}), ("", "\0", ")")):
        yield lambda n, before=before, body=body, end=end: before + (body * n)[:n] + end  # type: ignore[misc]  # mypy cannot type defaults


def written() -> dict[tuple[str, str], tuple[str, int, str]]:
    """Every regular expression of the package: (file, name) -> (pattern, flags, how it is used)."""
    found: dict[tuple[str, str], tuple[str, int, str]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        source, where = path.read_text(), str(path.relative_to(ROOT))
        if "import re\n" not in source:
            continue
        nodes = list(ast.walk(ast.parse(source)))
        uses: dict[str, str] = {
            call.func.value.id: call.func.attr
            for call in nodes
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in CALLS
            and isinstance(call.func.value, ast.Name)
        }  # fmt: skip
        named = {
            id(node.value): target.id
            for node in nodes
            if isinstance(node, ast.Assign | ast.AnnAssign)
            and isinstance(target := node.targets[0] if isinstance(node, ast.Assign) else node.target, ast.Name)
        }
        for call in nodes:
            function = call.func if isinstance(call, ast.Call) else None
            if not isinstance(call, ast.Call) or not isinstance(function, ast.Attribute) or function.attr not in CALLS:
                continue
            if not isinstance(function.value, ast.Name) or function.value.id != "re":
                continue
            name = named.get(id(call), function.attr if function.attr != "compile" else f"line {call.lineno}")
            if (where, name) in OWN or where == "transport/protocol/http.py":
                continue
            if function.attr == "compile":
                made = getattr(importlib.import_module(f"thinwire.{where[:-3].replace('/', '.')}"), name)
                text = made.pattern if isinstance(made.pattern, str) else made.pattern.decode()
                found[where, name] = text, made.flags, uses.get(name, "fullmatch")
            else:
                assert isinstance(call.args[0], ast.Constant), f"{where}:{call.lineno} is not a constant"
                found[where, name] = str(call.args[0].value), 0, function.attr
    from thinwire.transport.protocol.http import ROUTES

    return found | {("transport/protocol/http.py", each.name): (each.path, 0, "fullmatch") for each in ROUTES}


PATTERNS = written()


@pytest.mark.parametrize("where", PATTERNS, ids=lambda where: " ".join(where))
def test_a_pattern_takes_steps_in_proportion_to_its_text(where: tuple[str, str]) -> None:
    pattern, flags, how = PATTERNS[where]
    for text in pumped(pattern, flags):
        few, many = (steps(pattern, text(n), flags, how) for n in (LENGTH, 4 * LENGTH))
        assert many <= 6 * few + BOUNDED, (
            f"{pattern!r} takes {few} steps for {text(8)!r}.., {many} for four times as much"
        )


def test_the_count_of_steps_tells_a_cubic_pattern_from_a_linear_one() -> None:
    assert steps(r"(a+)+b", "a" * 64) == MAX_STEPS
    assert steps(r"\s*([^=]+?)\s*=", " " * 256) == MAX_STEPS
    assert steps(r"\s*+([^=\s][^=]*+)=", " " * 256) < 600
    assert steps(r"a?b", "ab") <= 6


@pytest.mark.parametrize("spec", ["layers(" + " " * 4000 + ")", "a" + " " * 4000 + "!", "layers(a" + " " * 4000 + ")"])
def test_a_codec_of_blanks_is_refused_at_once(spec: str) -> None:
    from thinwire.compression import parse

    with pytest.raises(CodecError, match="cannot read"):
        parse(spec)
