"""What every test stands on: no state directory of this machine's user is ever touched."""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter, defaultdict
from collections.abc import Generator
from pathlib import Path

import hypothesis
import pytest

# How long an example takes depends on what else the machine does.
hypothesis.settings.register_profile("thinwire", deadline=None)
hypothesis.settings.load_profile("thinwire")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell made this a background job: children would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


ROOT = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    """Import the package as its users do: pytest rewrites each module of a package that has a plugin of its own."""
    hook = config.pluginmanager.rewrite_hook
    getattr(hook, "_must_rewrite", set()).discard("thinwire")  # private: what is marked can be marked no less
    hook.mark_rewrite("thinwire.conformance")
    worker = getattr(config, "workerinput", None)  # of pytest-xdist
    if worker is not None:
        # While one test has stopped processes, the end of another one's can make the kernel hang up the whole group of
        # processes (setpgid(2), orphaned groups). With a group for each worker that is one test's own affair.
        os.setpgid(0, 0)
    if worker is not None and [config.rootpath / one for one in config.args] == [ROOT]:
        config.args = _begin_elsewhere(int(worker["workerid"].removeprefix("gw")), int(worker["workercount"]))


def _begin_elsewhere(nth: int, workers: int) -> list[str]:
    """Return all files of tests in the order in which the nth worker reads them.

    Each worker begins with its own share. In a fresh clone it writes the rewritten assertions of that share to a cache,
    and finds those of the others there when it comes to them: else each worker would rewrite all 490 files, for 20 s.
    """
    extras = ROOT / "extras"  # `make test-extras`
    files = sorted(path for path in ROOT.rglob("test_*.py") if extras not in path.parents)
    sizes = [path.stat().st_size for path in files]
    first = next(at for at in range(len(files)) if sum(sizes[: at + 1]) * workers > sum(sizes) * nth)
    return [str(path) for path in (*files[first:], *files[:first])]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the garbage collector, which would walk all that is imported, and all tests, again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()  # nor do the tests walk it


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let all parts go on side by side, each with its longest files first.

    Some parts wait for processes, sockets and a browser, and others compute: one after another, the first would leave
    the cores idle and the second share them. A long file that is begun last is what a single worker is at in the end;
    long is, roughly, a file of many lines or of many cases.
    """
    cases = Counter(item.path for item in items)
    parts = defaultdict[str, list[Path]](list)
    for path in sorted(cases, key=lambda path: (-path.stat().st_size - 30 * cases[path], path)):
        parts[path.relative_to(ROOT).parts[0] if path.is_relative_to(ROOT) else ""].append(path)
    share = {path: nth / len(paths) for paths in parts.values() for nth, path in enumerate(paths)}
    items.sort(key=lambda item: (share[item.path], item.path))  # the same order in each worker


@pytest.fixture(autouse=True)
def _own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that forgets --home writes into a folder of pytest's, and is not told where somebody's services are."""
    monkeypatch.setenv("THINWIRE_HOME", str(Path(tmp_path_factory.getbasetemp()) / "home-nobody-named"))
    for name in ("THINWIRE_LISTEN", "THINWIRE_DASHBOARD"):
        monkeypatch.delenv(name, raising=False)
