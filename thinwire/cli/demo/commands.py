"""`thinwire demo`: a live run of several processes on this machine, compared with training without limits.

The demo starts aggregator and clients, follows one run with a failure half-way, trains two baselines, and prints a
table of accuracy, bytes and seconds. It runs examples/digits, which lies in the checkout beside the package, or where
the wheel installed it, with as many clients and threads as this machine can carry.
"""

from __future__ import annotations

import os
import platform
import runpy
import shlex
import shutil
import sys
import tempfile
import time
import webbrowser
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli import console
from thinwire.cli.demo.processes import SLOW_STEP_S, Crowd, Disturbance, names_of, roles
from thinwire.cli.demo.report import document, protected, spent, tell_table
from thinwire.cli.local_state import aggregator_home, command_line, open_store
from thinwire.cli.params import Json
from thinwire.cli.runs.progress import Teller, screen
from thinwire.core import formatting
from thinwire.core.equipment import GIB
from thinwire.core.signals import ENDS, interruptible, undisturbed

if TYPE_CHECKING:
    from thinwire.core import RunPlan
    from thinwire.store import Store


def demo(
    clients: Annotated[int, typer.Option("--clients", min=0, help="client processes; 0: as many as memory allows")] = 0,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="number of rounds")] = 20,
    seed: Annotated[int, typer.Option("--seed", min=0, help="seed of data, model and rounds")] = 1,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="do not open the dashboard")] = False,
    exit_: Annotated[bool, typer.Option("--exit", help="end after printing the table")] = False,
    secure: Annotated[bool, typer.Option("--secure", help="sum the updates under masks")] = False,
    private: Annotated[bool, typer.Option("--private", help="clip the updates and add noise to their sum")] = False,
    json: Json = False,
) -> None:
    """Run a live federated run of several processes: one client is slow, one is killed and returns."""
    browse, stay = not (no_browser or json), not (exit_ or json)
    raise typer.Exit(show(clients, rounds, seed, browse=browse, stay=stay, json=json, secure=secure, private=private))


STATUS_READ_S = 0.1  # between two reads of the run's events
Tell = Callable[[str], None]


def show(
    clients: int,
    rounds: int,
    seed: int,
    *,
    browse: bool,
    stay: bool,
    json: bool,
    secure: bool = False,
    private: bool = False,
) -> int:
    """Run the demo and return the exit code of its run. Invariant: no process is left behind."""
    count = clients or client_count(free_bytes(), MAX_PRIVATE if private else MOST)
    plan = plan_of(rounds, seed, count, secure=secure, private=private)
    began, began_at = time.monotonic(), time.time()
    with folder() as home, interruptible(*ENDS) as look, Crowd(home) as crowd:
        console.note(f"state    {home}")
        about = crowd.aggregator()
        run_id, code = _run(crowd, home, plan, count, look, partial(_show_page, about, home, browse))
        found: dict[str, Any] = {
            "clients": count,
            "home": str(home),
            "dashboard_url": f"http://{about['dashboard']}/runs/{run_id}",
        }
        since = time.monotonic()
        if code == 0:
            found |= _baselines(plan, count)
        found |= {"baselines_s": time.monotonic() - since}
        with open_store(home) as store:
            found = document(store, run_id) | found
            found |= {"start_s": next((one.opened_at - began_at for one in store.rounds(run_id)), 0.0)}
            if secure:
                found["secure"] = protected(store, run_id, plan)
            if private:
                found["privacy"] = spent(store, run_id, plan)
        if private and code == 0:
            found["accuracy"] = measured(home, run_id, plan, count)
        found |= {"wall_s": time.monotonic() - began, "versions": versions()}
        if json:
            console.document(found)
            console.note(_kept(home))
        else:
            tell_table(found)
        if stay and code == 0 and console.on_terminal():
            _stay()
    return code


@contextmanager
def folder() -> Iterator[Path]:
    """Yield the demo's state directory: Ctrl-C removes it; otherwise it stays, for its run or its error."""
    home = Path(tempfile.mkdtemp(prefix="thinwire-demo-"))
    try:
        yield home
    except KeyboardInterrupt:
        with undisturbed():
            shutil.rmtree(home, ignore_errors=True)
        console.note(f"broken off; {home} is removed")
        raise
    except Exception:
        console.note(_kept(home))
        raise


def _kept(home: Path) -> str:
    """Return the sentence that names the kept state directory."""
    return f"its state and its logs are kept in {home}; to remove them: rm -r {shlex.quote(str(home))}"


def _show_page(about: Mapping[str, Any], home: Path, browse: bool, store: Store, run_id: str) -> None:
    """Print the address of the run's page in the dashboard, and open it in the browser if there is one."""
    from thinwire.cli.aggregator.serve import login_url

    page = f"runs/{run_id}"
    url = login_url(about["dashboard_url"], store.logins.new_code(), page)
    if sys.stderr.isatty():
        console.note(f"web      {url}")
    else:  # this output may be kept in a file, so it has no login code
        login = command_line("aggregator status --login", home)
        console.note(f"web      {about['dashboard_url']}/{page}    (to log in: {login})")
    if browse and has_desktop():
        webbrowser.open(url)


def _run(
    crowd: Crowd,
    home: Path,
    plan: RunPlan,
    count: int,
    look: Callable[[], None],
    show_page: Callable[[Store, str], None],
) -> tuple[str, int]:
    """Start the clients, submit the run, show its page, and follow it with its disturbance.

    Return (run id, exit code).
    """
    from thinwire.cli.run import hand_over

    threads, names = thread_count(count), names_of(count)
    slow, victim = roles(names)
    file = digits()

    def start(name: str) -> None:
        part = f"{names.index(name)}/{count}"
        given = ["--aggregator", crowd.api, "--task", f"{plan.run.task}={file / 'task.py'}", "--partition", part]
        given += ["--split", SPLIT, "--seed", str(plan.run.seed), "--threads", str(threads)]
        crowd.client(name, given, SLOW_STEP_S if name == slow else 0.0)

    for name in names:
        start(name)
    processes, each = formatting.counted(count, "process", "processes"), formatting.counted(threads, "torch thread")
    console.note(f"clients  {processes}, {each} each; {slow} is slow")
    with open_store(home, read_only=False) as store:
        run_id = hand_over(store, home, plan, plan_file(kind_of(plan)), None)
        show_page(store, run_id)
        disturbance = Disturbance(victim, max(1, plan.run.rounds // 2), crowd.kill, start)
        teller, seen = Teller(hides_sample=plan.privacy.sampling_rate is not None), 0
        with screen() as (tell, update):
            while not teller.over:
                for seq, event in store.events(run_id, after=seen):
                    seen = seq
                    for line in [*teller.hear(event), *teller.then(disturbance.hear(event))]:
                        tell(line)
                for line in teller.then(disturbance.look(time.monotonic())):
                    tell(line)
                look()
                _all_alive(crowd)
                update(f"{run_id}: {teller.now}")
                time.sleep(STATUS_READ_S)
            for line in disturbance.end():
                tell(line)
            tell(f"{run_id} {teller.status}: {teller.text}")
    return run_id, teller.exit_code


def _all_alive(crowd: Crowd) -> None:
    """Raise `ThinwireError` if a process ended by itself."""
    from thinwire.core.errors import ThinwireError

    if dead := crowd.dead():
        raise ThinwireError(
            f"{dead[0]} ended by itself", why=crowd.last_words(dead[0]), hint=f"its log: {crowd.log(dead[0])}"
        )


def _baselines(plan: RunPlan, count: int) -> dict[str, Any]:
    """Train the two baselines and return their accuracies: the same run uncompressed, and all data in one place."""
    found: dict[str, Any] = {}
    with screen() as (tell, update):
        for name, train in (("uncompressed", uncompressed), ("centralised", centralised)):
            update(f"for comparison: {name} ({'simulated in this process' if name == 'uncompressed' else 'one place'})")
            began = time.monotonic()
            accuracy = train(plan, count)["accuracy"]
            said = f"accuracy {formatting.figure(accuracy)} after {time.monotonic() - began:.1f} s"
            tell(f"for comparison: {name} {said}")
            found[f"accuracy_{name}"] = accuracy
    return found


def _stay() -> None:
    """Keep the dashboard running until Ctrl-C."""
    console.note("the dashboard runs until Ctrl-C")
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        console.note("")


SPLIT = "dirichlet(0.3)"


def digits() -> Path:
    """Return the folder of examples/digits; `NotFound` if neither the checkout nor the installation has it."""
    import thinwire
    from thinwire.core.errors import NotFound

    checkout = Path(thinwire.__file__).parents[1] / "examples" / "digits"
    installed = Path(sys.prefix) / "share" / "thinwire" / "examples" / "digits"
    for folder in (checkout, installed):
        if (folder / "task.py").is_file():
            return folder
    raise NotFound("examples/digits is not here", why=f"neither {checkout} nor {installed}", hint="make demo")


def plan_file(kind: str) -> Path:
    """Return the file of the example's plan: `plan`, `secure`, `private` or `private-secure`."""
    return digits() / f"{kind}.toml"


def kind_of(plan: RunPlan) -> str:
    """Return the name of the file that a plan of the demo was read from."""
    kinds = ("private" if plan.privacy.mode != "off" else "", "secure" if plan.secure.enabled else "")
    return "-".join(filter(None, kinds)) or "plan"


def plan_of(rounds: int, seed: int, clients: int, *, secure: bool = False, private: bool = False) -> RunPlan:
    """Return the example's plan with the demo's options; each round waits for all clients.

    One client is killed. A private round that may lose none would then be spent without a sum, and the last round
    would be missing, so there a round may lose one client of however few. And one may be corrupt, as each client is
    that reads the models. `UsageError` for fewer clients than a sum under masks needs.
    """
    from thinwire.core import RunPlan
    from thinwire.core.errors import UsageError
    from thinwire.core.secure_numbers import LEAST_CLIENTS, share_of

    if secure and clients < LEAST_CLIENTS:
        raise UsageError(
            f"--clients {clients} with --secure",
            why="each of two clients could subtract its own update from the sum, and the sum of one is its update",
            hint=f"--clients {LEAST_CLIENTS}, or more",
        )
    if secure and private and clients == LEAST_CLIENTS:
        raise UsageError(
            f"--clients {clients} with --private --secure",
            why=f"one of them is killed in a round, and a sum needs {LEAST_CLIENTS}",
            hint=f"--clients {LEAST_CLIENTS + 1}, or more",
        )
    kind = "-".join(name for name, given in (("private", private), ("secure", secure)) if given) or "plan"
    sets: dict[str, Any] = {"run.rounds": rounds, "run.seed": seed, "cohort.wait_for": clients}
    if secure and private:  # how much noise each adds follows from their number
        sets |= {"cohort.clients": clients}
        if not share_of(RunPlan.load(plan_file(kind)).secure.max_dropout, clients):
            sets |= {"secure.max_dropout": 1 / clients, "secure.max_corrupt": 1 / clients}
    return RunPlan.load(plan_file(kind), {key: str(value) for key, value in sets.items()})


def uncompressed(plan: RunPlan, clients: int) -> Mapping[str, float]:
    """Simulate the same run with dense updates in the clear, without noise, and return the last model's metrics."""
    from thinwire.core import RunPlan
    from thinwire.simulation import simulate

    raw: dict[str, Any] = plan.to_json()
    raw["uplink"] |= {"codec": "identity", "feedback": "none"}
    raw["secure"], raw["privacy"] = {}, {}
    raw["run"]["evaluate"] = "clients"
    task = f"{plan.run.task}={digits() / 'task.py'}"
    return simulate(task, RunPlan.from_json(raw), clients=clients, split=SPLIT).metrics


def centralised(plan: RunPlan, clients: int) -> Mapping[str, float]:
    """Train the same model on the data of all clients in one place and return its metrics."""
    train: Callable[..., Mapping[str, float]] = runpy.run_path(str(digits() / "centralised.py"))["centralised"]
    return train(plan, clients, SPLIT)


def measured(home: Path, run_id: str, plan: RunPlan, clients: int) -> float:
    """Return the accuracy of the last released model on the data that the clients kept for evaluation.

    In a private run no client evaluates. This process can, because it makes the data of all clients; no aggregator can.
    """
    from thinwire.reports.stored_models import stored_model

    file = home / "released.safetensors"
    with open_store(home) as store:
        stored_model(store, aggregator_home(home), run_id, "last").export(file)
    measure: Callable[..., Mapping[str, float]] = runpy.run_path(str(digits() / "centralised.py"))["measured"]
    return measure(file, plan, clients, SPLIT)["accuracy"]


FEWEST, MOST = 4, 8
MAX_PRIVATE = 20  # the noise in the mean falls with the number of clients


def client_count(free_bytes: float, most: int = MOST) -> int:
    """Return the number of clients for this memory: one for each half GiB, from four to `most`.

    >>> client_count(1 * GIB), client_count(3.2 * GIB), client_count(64 * GIB), client_count(64 * GIB, 20)
    (4, 6, 8, 20)
    """
    return max(FEWEST, min(most, int(2 * free_bytes / GIB)))


def thread_count(clients: int) -> int:
    """Return the number of torch threads of each client; together they are at most the number of cores."""
    from thinwire.client.device_info import usable_cores

    return max(1, usable_cores() // clients)


def free_bytes() -> float:
    """Return the memory for new processes in bytes: the system's, or less if a container's limit is lower."""
    from thinwire.client.device_info import memory

    free = memory()[1]
    return float(MOST * GIB) if free is None else free


def has_desktop() -> bool:
    """Return True if this machine can open a browser."""
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def versions() -> dict[str, str]:
    """Return the versions of everything that figures may depend on."""
    from importlib.metadata import version

    found = {name: version(name) for name in ("thinwire", "flwr", "torch", "numpy")}
    return {**found, "python": platform.python_version(), "system": platform.platform()}
