"""Count the words that docs/glossary.md bans: its table gives them in bold, in the right column.

A word counts in any case and with the endings -s, -es, -d, -ed and -ing; `a_name`, `a-name` and `aName` are read as two
words. A word with a note, such as `head (of a reply)`, counts only in a sentence or name that also has the noun.

| area | what is searched |
|---|---|
| docs | pages that people write: `*.md` of the root, `docs/` and `examples/`, without the glossary and `docs/adr/`, whose pages are superseded and not edited |
| help | `docs/reference/`, which is generated from help texts, descriptions of keys, errors and exit codes |
| messages | strings with a space in `thinwire/`: errors, log lines, tables, help |
| data | strings without one (JSON keys, kinds, columns, options), fields of classes, classes of `core/events.py` |
| dashboard | HTML and JavaScript under `thinwire/web/static/`, without `vendor/` |
| docstrings | of all modules, classes and functions in `thinwire/` |
| identifiers | names of files, classes, functions and arguments in `thinwire/` |

Labels of `derive()`, of `word32()` and of the signature are not searched: a hash reads them. Comments, tests and benchmarks are not either.
"""  # noqa: E501  # rows of a table

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
GLOSSARY = ROOT / "docs/glossary.md"
IN_CODE = ("docstrings", "identifiers")
HASHED = ("derive", "word32")  # functions whose arguments a hash reads
SIGNED = "thinwire lane v1"  # in the glossary's table too: the label of a signature
BOLD = re.compile(r"\*\*(?P<text>[^*]+)\*\*(?: \(of an? (?P<noun>\w+)\))?")
HUMP, SEPARATOR = re.compile(r"(?<=[a-z0-9])(?=[A-Z])"), re.compile(r"[_-]+")
SENTENCE = re.compile(r"[.:;!?]\s|\n\s*\n|\|")
BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")  # of a statement
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Banned:
    """A bold word of the glossary; with a `noun` it counts only beside that noun."""

    text: str
    noun: str = ""

    @property
    def pattern(self) -> str:
        """A regular expression for text that went through `spaced`."""
        endings = "s?" if self.noun else "(?:e?s|e?d|ing)?"
        return r"\s+".join(map(re.escape, spaced(self.text).split())) + ("" if " " in self.text else endings)


def bold_words(page: str) -> list[Banned]:
    """Return the bold words in the last column of the glossary's tables, longer ones first.

    >>> bold_words("| what comes back | reply | **head** (of a reply), answer |")
    [Banned(text='head', noun='reply')]
    """
    cells = [line.rstrip("| ").rpartition("|")[2] for line in page.splitlines() if line.startswith("| ")]
    found = [Banned(bold["text"], bold["noun"] or "") for cell in cells for bold in BOLD.finditer(cell)]
    return sorted(found, key=lambda word: -len(word.text))


def spaced(text: str) -> str:
    """Return the text in lower case with the words of its names apart.

    >>> spaced("AskTakenUp, ask_id")
    'ask taken up, ask id'
    """
    return SEPARATOR.sub(" ", HUMP.sub(" ", text)).lower()


def count(texts: Iterator[str] | list[str], words: list[Banned]) -> Counter[str]:
    """Count the banned words in texts; where two overlap, the first of `words` counts.

    >>> count(["Asked again: the door is shut."], [Banned("ask"), Banned("door"), Banned("shut", "page")])
    Counter({'ask': 1, 'door': 1})
    """
    pattern = re.compile(r"\b(?:" + "|".join(f"(?P<w{i}>{word.pattern})" for i, word in enumerate(words)) + r")\b")
    found = Counter[str]()
    for text in texts:
        for sentence in SENTENCE.split(spaced(text)):
            for match in pattern.finditer(sentence):
                word = words[int(str(match.lastgroup)[1:])]
                if word.noun in sentence:
                    found[word.text] += 1
    return found


def banned(root: Path = ROOT) -> dict[str, Counter[str]]:
    """Return how often each bold word stands in each area."""
    words, texts = bold_words(GLOSSARY.read_text()), dict[str, list[str]]()
    pages = [*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("examples/**/*.md")]
    reference = [page for page in pages if page.parent == root / "docs/reference"]
    by_hand = [page for page in pages if page not in (*reference, GLOSSARY) and page.parent != root / "docs/adr"]
    static = root / "thinwire/web/static"
    dashboard = [path for path in static.glob("*") if path.suffix in (".html", ".js")]
    for area, paths in (("docs", by_hand), ("help", reference), ("dashboard", dashboard)):
        texts[area] = [path.read_text().replace(SIGNED, "") for path in paths]
    for path in sorted((root / "thinwire").rglob("*.py")):
        texts.setdefault("identifiers", []).append(path.stem)
        for area, text in code_texts(parsed(path), are_events=path.stem == "events"):
            texts.setdefault(area, []).append(text)
    return {area: count(found, words) for area, found in texts.items()}


@cache
def parsed(path: Path) -> ast.Module:
    """Return the tree of a file."""
    return ast.parse(path.read_text())


def walked(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield what `ast.walk` yields but contexts (`Load`), each node before those in it: twice as fast."""
    found = [tree]
    while found:
        node = found.pop()
        yield node
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, list):
                found += [each for each in value if isinstance(each, ast.AST)]
            elif isinstance(value, ast.AST) and not isinstance(value, ast.expr_context):
                found.append(value)


def definitions(tree: ast.AST) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield a module, and its classes and functions at any depth: only blocks of statements are walked.

    >>> [getattr(each, "name", "") for each in definitions(ast.parse("if a:\\n  class B:\\n    def c(self): ..."))]
    ['', 'B', 'c']
    """
    if isinstance(tree, DOCUMENTED):
        yield tree
    for block in BLOCKS:
        for each in getattr(tree, block, ()):
            yield from definitions(each)


def code_texts(tree: ast.Module, *, are_events: bool = False) -> Iterator[tuple[str, str]]:
    """Yield (area, text) of all that a module says or names; its classes are data where they `are_events`."""
    nodes = list(walked(tree))
    seen = {id(each) for call in nodes if _is_hashed(call) for each in ast.walk(call)}
    for node in nodes:
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)) is not None:
            seen.add(id(node.body[0].value))  # type: ignore[attr-defined]  # a docstring is an expression
            yield "docstrings", text
        if isinstance(node, ast.ClassDef):
            yield "data" if are_events else "identifiers", node.name
            for each in node.body:
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                    yield "data", each.target.id
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield "identifiers", node.name
        elif isinstance(node, ast.arg):
            yield "identifiers", node.arg
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in seen:
            yield "messages" if " " in node.value else "data", node.value


def _is_hashed(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    return getattr(node.func, "attr", getattr(node.func, "id", "")) in HASHED
