"""Mutation test: small changes of the code, drawn at random, and how many of them the tests notice.

    python -m tests.mutate [--count 40] [--seed COMMIT] [--jobs 2] [--limit 300] [--json]

A mutant has one operator, comparison, condition or number changed, or one statement left out. Mutants are drawn from
all of `thinwire/` by the seed, which is the commit that is checked out, so that nobody chooses them. Each is made in a
worktree of that commit, one a job. Tests run there until one fails: first those that import the changed module, then
those of its part. The one that failed runs again without the mutant, and has to pass. Left out are tests with processes
of their own (`tests/system`, `tests/benchmarks`), because they import the installed package, and `tests/extras`, which
need other packages. A mutant that no test notices within `--limit` seconds a step survives: it is a gap in the tests,
or equivalent to the original. A person decides which.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ROOT = Path(__file__).parents[1]
HANGS = ("-o", "faulthandler_timeout=90")  # seconds: a mutant that loops for ever is noticed, and not by --limit
LEFT_OUT = ("system", "benchmarks", "docs", "extras", "golden", "support")
COMPARED: dict[type[ast.cmpop], ast.cmpop] = {
    ast.Lt: ast.LtE(), ast.LtE: ast.Lt(), ast.Gt: ast.GtE(), ast.GtE: ast.Gt(), ast.Eq: ast.NotEq(),
    ast.NotEq: ast.Eq(), ast.Is: ast.IsNot(), ast.IsNot: ast.Is(), ast.In: ast.NotIn(), ast.NotIn: ast.In(),
}  # fmt: skip
COUNTED: dict[type[ast.operator], ast.operator] = {
    ast.Add: ast.Sub(), ast.Sub: ast.Add(), ast.Mult: ast.Div(), ast.Div: ast.Mult(), ast.FloorDiv: ast.Mult(),
    ast.Mod: ast.FloorDiv(),
}  # fmt: skip
UNSEEN = {"annotation", "returns", "decorator_list", "type_params"}  # fields that change nothing when the code runs


@dataclass(frozen=True)
class Mutant:
    """One change: the source between two positions (line from 1, column in bytes) is replaced."""

    file: str
    start: tuple[int, int]
    stop: tuple[int, int]
    after: str

    def apply(self, source: str) -> str:
        """Return the changed source.

        >>> Mutant("a.py", (2, 4), (2, 9), "a >= b").apply("x = 1\\ny = a > b\\n")
        'x = 1\\ny = a >= b\\n'
        """
        lines = source.encode().splitlines(keepends=True)
        (first, left), (last, right) = self.start, self.stop
        changed = lines[first - 1][:left] + self.after.encode() + lines[last - 1][right:]
        return b"".join([*lines[: first - 1], changed, *lines[last:]]).decode()


def mutants(file: str, source: str) -> Iterator[Mutant]:
    """Yield every mutant of a module."""
    for node in _run(ast.parse(source)):
        for after in _changed(node):
            stop = (node.end_lineno or 0, node.end_col_offset or 0)
            yield Mutant(file, (node.lineno, node.col_offset), stop, after)


def _run(node: ast.AST) -> Iterator[Any]:
    """Yield the expressions and statements of a tree that have an effect when the code runs."""
    if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
        return
    if isinstance(node, ast.expr | ast.stmt):
        yield node
    for name, value in ast.iter_fields(node):
        if name not in UNSEEN:
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _run(child)


def _changed(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Compare(left, [operator], [right]):
            yield f"({ast.unparse(ast.Compare(left, [COMPARED[type(operator)]], [right]))})"
        case ast.BoolOp(operator, values):
            other = ast.Or() if isinstance(operator, ast.And) else ast.And()
            yield f"({ast.unparse(ast.BoolOp(other, values))})"
        case ast.UnaryOp(ast.Not(), operand):
            yield f"({ast.unparse(operand)})"
        case ast.BinOp(left, operator, right) if type(operator) in COUNTED and not {str, bytes} & _constants(node):
            yield f"({ast.unparse(ast.BinOp(left, COUNTED[type(operator)], right))})"
        case ast.Constant(bool() as value):
            yield str(not value)
        case ast.Constant(int() | float() as value):
            yield str(value + 1)
        case ast.IfExp(test, body, orelse):
            yield f"({ast.unparse(ast.IfExp(ast.UnaryOp(ast.Not(), test), body, orelse))})"
        case ast.Expr(ast.Call()) | ast.AugAssign() | ast.Raise() | ast.Continue() | ast.Break():
            yield "pass"


def _constants(node: ast.AST) -> set[type]:
    found = {type(each.value) for each in ast.walk(node) if isinstance(each, ast.Constant)}
    return found | ({str} if any(isinstance(each, ast.JoinedStr) for each in ast.walk(node)) else set())


def drawn(root: Path, count: int, seed: str) -> list[Mutant]:
    """Draw mutants, each as likely as any other."""
    files = [path for path in sorted(root.glob("thinwire/**/*.py")) if "migrations" not in path.parts]
    every = [each for path in files for each in mutants(path.relative_to(root).as_posix(), path.read_text())]
    return random.Random(seed).sample(every, count)


def checks_of(root: Path, file: str) -> list[list[str]]:
    """Return the test files that import a module, those of its part first, then the others of its part."""
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    part, name = file.split("/")[1], module.rpartition(".")
    imports = re.compile(rf"{re.escape(module)}\b|from {re.escape(name[0])} import [^\n]*\b{re.escape(name[2])}\b")
    direct, others = list[str](), list[str]()
    for path in sorted(root.glob("tests/**/test_*.py")):
        if (path.relative_to(root / "tests").parts[0]) not in LEFT_OUT:
            shown, text = path.relative_to(root).as_posix(), path.read_text()
            if imports.search(text):
                direct.append(shown)
            elif shown.startswith(f"tests/{part}/") or f"thinwire.{part}" in text:
                others.append(shown)
    for found in (direct, others):
        found.sort(key=lambda one: (not one.startswith(f"tests/{part}/"), one))
    own = [] if part == "conformance" else [file]  # the suite of laws runs on a codec that its caller names
    return [each for each in ([*own, *direct], others) if each]


def _failure(root: Path, files: Sequence[str], limit_s: float) -> str:
    """Run tests until one fails; return which one failed, "" if all passed or time was over."""
    words = ["-m", "pytest", "-q", "-x", "--doctest-modules", "-p", "no:cacheprovider", "-n", "0", *HANGS, *files]
    try:
        done = subprocess.run(
            [sys.executable, *words], cwd=root, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return ""
    if done.returncode in (0, 5):  # 5: there is no test in them
        return ""
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return failed[0] if failed else f"exit code {done.returncode}"


def noticed(root: Path, mutant: Mutant, limit_s: float) -> dict[str, Any]:
    """Run the tests of a mutant; return its row."""
    path = root / mutant.file
    source, began, by = path.read_text(), time.monotonic(), ""
    line = source.splitlines()[mutant.start[0] - 1].strip()
    for files in checks_of(root, mutant.file):
        path.write_text(mutant.apply(source))
        try:
            by = _failure(root, files, limit_s)
        finally:
            path.write_text(source)
        file, _, test = by.partition("[")[0].partition("::")  # an id of parameters may have blanks
        again = [f"{file}::{test}"] if test else [file, "--collect-only"] if file in files else files
        if by and _failure(root, again, limit_s):
            raise SystemExit(f"error: {by} fails without the mutant, too\ntry:   make test PYTEST_ARGS={by}")
        if by:
            break
    return {
        "file": mutant.file, "line": mutant.start[0], "source": line, "after": mutant.after, "noticed": bool(by),
        "by": by, "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip


def measure(count: int, seed: str, jobs: int, limit_s: float) -> list[dict[str, Any]]:
    """Make the mutants in worktrees, and return a row for each."""
    free, rows = SimpleQueue[Path](), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="thinwire-mutants-") as folder:
        places = [Path(folder) / str(number) for number in range(jobs)]
        try:
            for place in places:
                git("worktree", "add", "-q", "--detach", str(place), seed)
                for kernels in ROOT.glob("thinwire/compression/native/kernels*.so"):
                    shutil.copy(kernels, place / kernels.relative_to(ROOT))
                free.put(place)

            def made(mutant: Mutant) -> dict[str, Any]:
                place = free.get()
                try:
                    row = noticed(place, mutant, limit_s)
                finally:
                    free.put(place)
                print(json.dumps(row), file=sys.stderr, flush=True)
                return row

            with ThreadPoolExecutor(jobs) as pool:
                rows += pool.map(made, drawn(places[0], count, seed))
        finally:
            for place in places:
                git("worktree", "remove", "--force", str(place))
    return rows


def git(*words: str) -> str:
    """Run git in this repository; return what it prints."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def main(words: Sequence[str] | None = None) -> None:
    """Print which mutants survived, or one JSON document."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", help="the commit whose mutants are drawn; default: the one that is checked out")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for the tests of one step")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(words)
    seed = git("rev-parse", f"{given.seed or 'HEAD'}^{{commit}}")
    rows = measure(given.count, seed, given.jobs, given.limit)
    count = sum(row["noticed"] for row in rows)
    if given.json:
        print(json.dumps({"mutants": seed, "rows": rows, "figures": {"count": len(rows), "noticed": count}}, indent=1))
        return
    for row in rows:
        if not row["noticed"]:
            print(f"{row['file']}:{row['line']}: survived: {row['source']} -> {row['after']}")
    print(f"{count} of {len(rows)} mutants of {seed[:12]} were noticed")


if __name__ == "__main__":
    main()
