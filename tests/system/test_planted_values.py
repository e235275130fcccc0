"""What is known of a single client of a secure run: nothing but its presence, phases, bytes and times.

Values are planted in the replies of real clients, and searched for in all that the aggregator and the dashboard keep,
print, answer and hold in memory. The same search must find every one of them where the run is not secure, and the
points of the lattice and the scalars where the masks are 0.
"""

from __future__ import annotations

import contextlib
import json
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from backports import zstd

from tests.support.frozen import children
from tests.support.listed_files import files_under, unlisted
from tests.support.planted import CLIP, PLAIN, PRIVATE, SECURE, SIZE, Planted, Search, files_of, memory_of
from tests.support.processes import THINWIRE
from tests.support.secure_site import SecureSite
from thinwire.aggregation import codecs
from thinwire.aggregation.lattice import Lattice
from thinwire.aggregation.plan_codecs import lattice_of
from thinwire.cli.params import overrides
from thinwire.core import RunPlan
from thinwire.core.types import SecureWork
from thinwire.web.access import ANYONE, LEAST

pytestmark = pytest.mark.slow
DEVICES = ("pi-0", "pi-1", "pi-2")
HELD = DEVICES[-1]  # its training is held: what it plants is searched for at the end of the run only
PLANTED = Path(__file__).parent / "planted"
Found = Mapping[str, set[str]]
ENDLESS = ("/api/v1/live", "/api/v1/runs/{run_id}/events/stream")  # the pages show what these stream
NOT_THERE = ("/commands/1", "/revocations/1")  # nobody may have given a command
VALUES = ("weight", "metric", "norm", "buffer", "counter", "update")
SEEN = {  # what a plain run shows of a client, by place
    "store": ("weight", "metric", "norm", "counter"), "backup": ("weight", "metric", "norm", "counter"),
    "spool": ("update", "buffer"),
    "memory of the aggregator": ("weight", "update"),
    "memory of the dashboard": ("weight",), "dashboard": ("weight",),
}  # fmt: skip
UNMASKED = ("tests.support.unmasked",)


def pages(run_id: str) -> Iterator[str]:
    """All that a person with a role may read, by the table of roles: a route that is added is read too."""
    for row, need in LEAST.items():
        method, path = row.split(" ", 1)
        if method == "GET" and need != ANYONE and path not in ENDLESS:
            given = {"run_id": run_id, "number": 1, "version": 0}
            yield from dict.fromkeys(path.format(**given, name=name) for name in DEVICES)


def asked(site: SecureSite, run_id: str) -> bytes:
    """What the dashboard answers to somebody who looks at all of it."""
    login = json.loads(site.typed("aggregator", "status", "--login", "--json").stdout)["login"]
    with httpx.Client(base_url=f"http://{site.dashboard_at}", timeout=20, trust_env=False) as client:
        assert client.get(login).status_code < 400
        answers = [client.get(page, params={"runs": run_id}) for page in pages(run_id)]
    refused = [one.url.path for one in answers if not one.is_success and not one.url.path.endswith(NOT_THERE)]
    assert refused == []
    return b"\n".join(one.content for one in answers)


def places(site: SecureSite, run_id: str) -> dict[str, Iterable[bytes]]:
    """All that a run leaves on the aggregator's machine, by its place; the clients' own folders are theirs."""
    assert site.aggregator is not None
    home, answers = site.home / "aggregator", asked(site, run_id)
    backup = site.home.with_name(f"{time.monotonic_ns()}.tar")
    assert site.typed("aggregator", "backup", str(backup)).returncode == 0
    shown = [site.typed("runs", "show", run_id, *more).stdout.encode() for more in ((), ("--json",), ("--why",))]
    (dashboard,) = children(site.aggregator.pid)
    return {
        "store": [path.read_bytes() for path in home.glob("store.sqlite3*")],
        "spool": files_of(home / "spool"),
        "runs": files_of(home / "runs"),
        "backup": [backup.read_bytes()],
        "log": [site.log_of(site.aggregator).encode(), *(path.read_bytes() for path in home.rglob("*.log"))],
        "dashboard": [answers],
        "runs show": shown,
        "memory of the aggregator": memory_of(site.aggregator.pid),
        "memory of the dashboard": memory_of(dashboard),
    }


@contextlib.contextmanager
def planted_site(folder: Path, program: Sequence[str] = THINWIRE) -> Iterator[SecureSite]:
    """A site whose clients have joined, and train what is planted for them."""
    site = SecureSite(folder / "home", DEVICES)
    site.example, site.page = PLANTED, ("--dashboard", site.dashboard_at)
    site.aggregator_program = site.client_program = program
    try:
        site.serve()
        site.join()
        yield site
    finally:
        site.close()


@dataclass
class Looked:
    """What was found of each run of one site, during its round and after it, and the paths of all files by then."""

    runs: dict[str, tuple[Found, Found]] = field(default_factory=dict)
    files: set[str] = field(default_factory=set)


def searched(
    site: SecureSite, sets: Sequence[str], points: Lattice | None = None, files: set[str] | None = None
) -> tuple[Found, Found]:
    """What is found while the round of a run waits for its last update, and after it; `files` gets what there are."""
    search = Search.of(len(DEVICES), points)
    site.hold(HELD)
    run_id = site.begin(*sets)
    site.until_waiting_for(run_id, HELD)
    during = search.found(places(site, run_id))
    if files is not None:
        files |= files_under(site.home / "aggregator")
    site.release(HELD)
    row = site.until_done(run_id)
    assert (row.status, row.version) == ("done", 1), site.said()
    if files is not None:
        files |= files_under(site.home / "aggregator")
    return during, search.found(places(site, run_id))


def lattice() -> Lattice:
    """The lattice of the secure run: all its coordinates, in the order of the model."""
    plan = RunPlan.load(PLANTED / "plan.toml", overrides(list(SECURE)))
    assert plan.check(codecs) == []
    return lattice_of(plan, SIZE, SecureWork(len(DEVICES), 0, CLIP), "")


def names(found: Found) -> set[str]:
    """What was found anywhere."""
    return {name for some in found.values() for name in some}


@pytest.fixture(scope="module")
def looked(tmp_path_factory: pytest.TempPathFactory) -> Looked:
    """What is found of the runs of one site. Those that show nothing come first: nothing of an earlier one is found."""
    found = Looked()
    with planted_site(tmp_path_factory.mktemp("planted")) as site:
        found.runs["secure"] = searched(site, SECURE, lattice(), found.files)
        for mode in ("distributed", "central"):
            found.runs[mode] = searched(site, PRIVATE[mode], files=found.files)
        found.runs["plain"] = searched(site, PLAIN)
    return found


@pytest.fixture(scope="module")
def runs(looked: Looked) -> Mapping[str, tuple[Found, Found]]:
    return looked.runs


def of_client(number: int, *values: str) -> set[str]:
    return {f"client {number} {value}" for value in values}


def test_the_search_finds_every_value_of_a_run_that_is_not_secure(runs: Mapping[str, tuple[Found, Found]]) -> None:
    """In each place at least what it keeps of the clients that are not held: else the search is blind there."""
    during, after = runs["plain"]
    for number in range(len(DEVICES)):
        assert names(during) | names(after) >= of_client(number, *VALUES)
    for place, values in SEEN.items():
        found = during[place] | after[place]
        if place == "memory of the aggregator":  # what was aggregated may be overwritten, but not of every client
            for value in values:
                assert found & {name for number in range(len(DEVICES)) for name in of_client(number, value)}, found
        else:
            assert found >= of_client(1, *values), (place, during[place], after[place])


def test_the_search_finds_the_points_and_the_scalars_of_a_sum_without_masks(tmp_path: Path) -> None:
    with planted_site(tmp_path, UNMASKED) as site:
        during, after = searched(site, SECURE, lattice())
    points = {name for number in range(len(DEVICES) - 1) for name in of_client(number, "lattice")}
    scalars = {name for number in range(len(DEVICES) - 1) for name in of_client(number, "summed weight", "summed loss")}
    assert during["spool"] >= points | scalars
    in_memory = during["memory of the aggregator"] | after["memory of the aggregator"]
    assert in_memory & points, "what was added to the sum may be overwritten, but not of every client"


def test_nothing_of_a_client_is_found_in_a_secure_run(runs: Mapping[str, tuple[Found, Found]]) -> None:
    during, after = runs["secure"]
    assert names(during) | names(after) == set(), (during, after)


@pytest.mark.parametrize("mode", PRIVATE)
def test_nothing_of_a_client_is_found_in_a_private_run_but_a_central_update_until_its_round_is_over(
    runs: Mapping[str, tuple[Found, Found]], mode: str
) -> None:
    """In central mode the aggregator is trusted: it has single updates in its spool and memory, and nowhere else."""
    during, after = runs[mode]
    own = {"spool", "memory of the aggregator"} if mode == "central" else set[str]()
    updates = {name for number in range(len(DEVICES)) for name in of_client(number, "update")}
    for place, found in during.items():
        assert found <= (updates if place in own else set()), (place, found)
    for place, found in after.items():
        assert found <= (updates if place in own - {"spool"} else set()), (place, found)
    assert bool(during["spool"]) == (mode == "central"), "else the search is blind"


def test_every_file_of_an_aggregator_with_private_runs_is_on_the_page_of_outputs(looked: Looked) -> None:
    assert any(name.startswith("spool/") for name in looked.files), "a round was open"
    assert unlisted(looked.files) == []


@pytest.mark.parametrize("compress", [zstd.compress, zlib.compress])
def test_the_search_sees_into_compressed_bytes(compress: Callable[[bytes], bytes]) -> None:
    forms = Planted(1).forms(None)
    hidden = b"xx" + compress(b"a" * 99 + forms["update"][0]) + b"yy"
    assert Search.of(2).in_blob(hidden) == {"client 1 update"}
