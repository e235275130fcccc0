"""Count what a reader of the repository meets: files, imports, hops of one update, words, docstrings.

    python -m benchmarks.house [--preset small|full|committed] --json

Sizes. `python_files`, `lines` (all lines) and `files_over_400` count the `.py` files under `thinwire/`.
`files_under_60` leaves out `__init__`, `__main__`, migrations and files of one codec (folder `codecs`).

`closure_encode`: modules of ours that a fresh process has imported once it has encoded a vector with `int8` and error
feedback. `files_per_encode`: files of ours in which one more encode calls a function; parsing and binding are over.

Files of one update, of one assignment. A run is started as a person starts it: an aggregator, a client with its worker,
and a plan of one client, `int8` with error feedback, everything else as it is by default. In the three processes
`sys.setprofile` notes each function of ours that is called. A period lasts from the training of one round to the
training of the next one, so one period holds every step of one update and of one assignment: reply, commit, sum,
outcome, selection, request, training. A file counts when a function of it was called in most of the periods after the
first two. Bodies of modules and classes do not count, nor do methods that dataclasses generate, nor work that is done
from time to time.

- `files_per_update`: files of `server/` and `store/` in the aggregator's process.
- `files_per_assignment`: files of `client/` and its transport in the client's two processes.

What each part has is a figure beside them (`files_per_update server`). Each file is a row, also where its part is not
counted.

`undocumented_public`: modules, classes, functions and methods without a docstring, where neither they nor what they
stand in begins with an underscore. A method has the docstring that it inherits, as `help()` shows it.

`riddles`: percent of all docstrings that begin with a word of `RIDDLES`.

`banned_words`: how often docs, help texts, messages, names of data and the dashboard use the bold words of
docs/glossary.md; `banned_in_code` counts docstrings and identifiers. `benchmarks.words` says what is searched.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
import threading
import time
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.entry import run_in_folder
from benchmarks.processes import Processes, free_port
from benchmarks.words import IN_CODE, banned, definitions, parsed

ROOT = Path(__file__).parents[1]
OURS = ROOT / "thinwire"
SMALL_LINES, LARGE_LINES = 60, 400
NOT_SMALL = {"migrations", "codecs"}  # folders
RIDDLES = re.compile(r"(As|For|How|Of|That|The same|Those|Until|What|When|Where|Whether|Which|Who|Whom|Whose|Why)\b")
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
ENCODE = """
import sys
import numpy as np
from thinwire.compression import feedback, parse
from thinwire.core import Key, Layout
codec = feedback(parse("int8")).bind(Layout.of({"w": (1000,)}))
key, (first, second) = Key(1), np.ones((2, 1000), np.float32)
state = codec.encode(first, codec.init(), key).state
closure = sum(name.partition(".")[0] == "thinwire" for name in sys.modules)
from benchmarks.house import files_called
print(closure, *files_called(lambda: codec.encode(second, state, key)))
"""

COUNTED = {  # by part: the folder under thinwire/
    "update": ("server", "store"),
    "assignment": ("client", "transport"),
}
WITHIN_S = 120.0
FIRST = 2  # periods that are not counted: caches fill
TICKS_PER_S = 200  # within a tick a file is noted once
TRACE = "HOUSE_TRACE"  # environment: the folder to which processes write what they call
TRACED = "from benchmarks.house import trace; from thinwire.cli import main; trace(); main()"
TASK = """
import os
import time
from benchmarks.house import trace
from benchmarks.noop_task import data, loss as plain_loss, model
trace()  # of the client's worker, which imports this

def loss(module, batch):
    with open(os.path.join(os.environ["HOUSE_TRACE"], "periods"), "a") as file:
        file.write(f"{time.monotonic()}\\n")
    return plain_loss(module, batch)
"""
PLAN = """
[run]
task = "task"
rounds = {rounds}
[cohort]
wait_for = 1
[local]
steps = 1
lr = 1.0
[uplink]
codec = "int8"
feedback = "classic"
"""


@dataclass(frozen=True)
class Preset:
    """`rounds` of the run whose calls are noted."""

    rounds: int


PRESETS = {"tiny": Preset(5), "small": Preset(8), "full": Preset(20), "committed": Preset(20)}


def measure(preset: Preset, folder: Path) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Count all of it."""
    rows, figures = list[dict[str, Any]](), dict[str, float](sizes(OURS))
    done = subprocess.run([sys.executable, "-c", ENCODE], cwd=ROOT, capture_output=True, text=True, check=True)
    closure, *files = done.stdout.split()
    figures["closure_encode"], figures["files_per_encode"] = int(closure), len(files)
    rows += [{"what": "file of one encode", "file": name} for name in files]
    for what, found in called(preset.rounds, folder).items():
        parts = Counter(name.split("/")[1] for name in found)
        counted = COUNTED[what]
        figures[f"files_per_{what}"] = sum(n for part, n in parts.items() if part in counted)
        figures |= {f"files_per_{what} {part}": count for part, count in sorted(parts.items())}
        rows += [{"what": f"file of one {what}", "file": name} for name in found]
    trees = {_name(path): parsed(path) for path in python_files(OURS)}
    missing = list(undocumented(trees))
    figures["undocumented_public"] = len(missing)
    rows += [{"what": "without a docstring", "name": name} for name in missing]
    documented = [text for tree in trees.values() for text in docstrings(tree)]
    figures["riddles"] = 100 * sum(map(is_riddle, documented)) / len(documented)
    words = banned()
    figures["banned_words"] = sum(uses.total() for area, uses in words.items() if area not in IN_CODE)
    figures["banned_in_code"] = sum(uses.total() for area, uses in words.items() if area in IN_CODE)
    for area, uses in words.items():
        rows += [{"what": "banned word", "area": area, "word": word, "count": n} for word, n in uses.most_common()]
    return rows, figures


def python_files(folder: Path) -> list[Path]:
    """Return the Python files under `folder`, sorted."""
    return sorted(folder.rglob("*.py"))


def sizes(folder: Path) -> dict[str, float]:
    """Return the four figures of files and lines."""
    lines = {path: len(path.read_text().splitlines()) for path in python_files(folder)}
    short = [path for path, count in lines.items() if count < SMALL_LINES and not _may_be_short(path)]
    return {
        "python_files": len(lines),
        "files_under_60": len(short),
        "files_over_400": sum(count > LARGE_LINES for count in lines.values()),
        "lines": sum(lines.values()),
    }


def _may_be_short(path: Path) -> bool:
    return path.stem in ("__init__", "__main__") or path.parent.name in NOT_SMALL


def undocumented(trees: Mapping[str, ast.Module]) -> Iterator[str]:
    """Yield `FILE:NAME` of public names without a docstring, from a tree for each file of a package."""
    nodes = (node for tree in trees.values() for node in definitions(tree))
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}

    def documented(kind: ast.ClassDef, method: str, seen: frozenset[str] = frozenset()) -> bool:
        own = {node.name: node for node in kind.body if isinstance(node, FUNCTIONS)}
        if method in own and ast.get_docstring(own[method]):
            return True
        names = {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in kind.bases} - seen
        return any(documented(classes[name], method, seen | names) for name in names & set(classes))

    def missing(parent: ast.Module | ast.ClassDef, inside: str) -> Iterator[str]:
        for node in parent.body:
            if not isinstance(node, ast.ClassDef | FUNCTIONS) or node.name.startswith("_"):
                continue
            marks = {ast.unparse(each).rpartition(".")[2] for each in node.decorator_list}
            inherits = isinstance(parent, ast.ClassDef) and documented(parent, node.name)
            if not (ast.get_docstring(node) or inherits or marks & {"overload", "setter"}):
                yield f"{inside}{node.name}"
            if isinstance(node, ast.ClassDef):
                yield from missing(node, f"{inside}{node.name}.")

    for file, tree in trees.items():
        if any(part.startswith("_") and not part.startswith("__") for part in Path(file).parts):
            continue
        if tree.body and ast.get_docstring(tree) is None:
            yield f"{file}:"
        yield from (f"{file}:{name}" for name in missing(tree, ""))


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield every docstring of a module, private ones too."""
    for node in definitions(tree):
        if text := ast.get_docstring(node):
            yield text


def is_riddle(docstring: str) -> bool:
    """Return True if a docstring begins with a word of `RIDDLES`.

    >>> is_riddle("What was sent."), is_riddle("Send the update."), is_riddle("The same, for one segment.")
    (True, False, True)
    """
    return RIDDLES.match(docstring) is not None


def called(rounds: int, folder: Path) -> dict[str, list[str]]:
    """Run a plan of `rounds` rounds; return the files of one update and of one assignment, as the module says."""
    notes, task, plan = folder / "notes", folder / "task.py", folder / "plan.toml"
    notes.mkdir()
    task.write_text(TASK)
    plan.write_text(PLAN.format(rounds=rounds))
    home, listen = ["--home", str(folder / "home")], f"127.0.0.1:{free_port()}"
    thinwire, env = [sys.executable, "-c", TRACED], {"PYTHONPATH": str(ROOT), TRACE: str(notes)}
    with Processes(folder) as processes:
        words = [*thinwire, "aggregator", "start", "--listen", listen, "--no-dashboard", *home]
        aggregator = processes.start("aggregator", words, env)
        log = processes.log("aggregator")
        processes.until(lambda: listen in log.read_text(), WITHIN_S, "the aggregator serves")
        words = ["--aggregator", f"http://{listen}", "--task", f"task={task}", "--name", "device-1"]
        processes.start("client", [*thinwire, "client", "start", *words, *home], env)
        words = [sys.executable, "-m", "thinwire.cli", "run", str(plan), *home]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=WITHIN_S, check=False)
    if done.returncode:
        raise RuntimeError(f"thinwire run ended with {done.returncode}:\n{done.stderr}{done.stdout}")
    starts = [float(line) for line in (notes / "periods").read_text().split()]
    if len(starts) != rounds:
        raise RuntimeError(f"{rounds} rounds trained {len(starts)} times: a period is not one round")
    found: dict[str, list[Path]] = {"update": [], "assignment": []}
    for process in notes.glob("*.calls"):
        found["update" if process.stem == str(aggregator) else "assignment"].append(process)
    return {what: in_most_periods("".join(each.read_text() for each in noted), starts) for what, noted in found.items()}


def in_most_periods(calls: str, starts: list[float]) -> list[str]:
    """Return the files that were called in most periods after the first ones, sorted.

    `calls` has a line `SECONDS FILE` for each call; a period lasts from one of `starts` to the next.

    >>> in_most_periods("5.1 a\\n5.2 b\\n6.3 a\\n9.0 c\\n", [1.0, 2.0, 5.0, 6.0, 7.0])
    ['a']
    """
    found = defaultdict[str, set[int]](set)
    for line in calls.splitlines():
        at, _, name = line.partition(" ")
        if FIRST < (period := bisect(starts, float(at))) < len(starts):
            found[name].add(period)
    return sorted(name for name, periods in found.items() if len(periods) > (len(starts) - 1 - FIRST) / 2)


def files_called(work: Callable[[], object]) -> list[str]:
    """Return the files of ours in which a call of `work` calls a function, sorted."""
    found = set[str]()
    sys.setprofile(lambda frame, event, _: found.add(file_of(frame)) if event == "call" else None)
    try:
        work()
    finally:
        sys.setprofile(None)
    return sorted(found - {""})


def file_of(frame: FrameType) -> str:
    """Return the file of ours whose function runs, or "" for other code and for bodies of modules and classes."""
    code = frame.f_code
    ours = bool(code.co_flags & inspect.CO_OPTIMIZED) and code.co_filename.startswith(f"{OURS}{os.sep}")
    return _name(Path(code.co_filename)) if ours else ""


def trace() -> None:
    """Note from here on, in this thread and in later ones, which files of ours run a function, and when.

    Nothing is noted where `HOUSE_TRACE` is not set, as in the process of `thinwire run`, which imports the task too.
    """
    if TRACE not in os.environ:
        return
    out = os.open(Path(os.environ[TRACE]) / f"{os.getpid()}.calls", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    names, last = dict[Any, str](), dict[str, int]()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        if (name := names.get(code)) is None:
            name = names[code] = file_of(frame)
        if name and last.get(name) != (tick := int(TICKS_PER_S * (now := time.monotonic()))):
            last[name] = tick
            os.write(out, f"{now} {name}\n".encode())

    threading.setprofile(note)
    sys.setprofile(note)


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


if __name__ == "__main__":
    run_in_folder("house", __doc__, PRESETS, measure)
