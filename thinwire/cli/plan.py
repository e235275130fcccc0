"""`thinwire plan` and `thinwire init`: write, check, explain and compare plans, and start a task of one's own."""

from __future__ import annotations

import dataclasses
import re
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from thinwire.cli import console
from thinwire.cli.params import Home, Json, PlanFile, Sets, Task, overrides
from thinwire.core import formatting

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from thinwire.core import RunPlan
    from thinwire.reports.plan_check import Estimate

Clients: TypeAlias = Annotated[
    int | None, typer.Option("--clients", min=1, metavar="N", help="devices online; default: the plan's, or 10")
]

app = typer.Typer(name="plan", help="Plans: all rules of a run.", no_args_is_help=True)


@app.command()
def new(
    file: Annotated[Path | None, typer.Argument(help="file to write; default: standard output")] = None,
    task: Annotated[str, typer.Option("--task", metavar="NAME", help="name of the task")] = "mine",
    lr: Annotated[float, typer.Option(help="learning rate on the device")] = 0.1,
) -> None:
    """Write a plan of the two lines that every plan needs."""
    from thinwire.core import RunPlan
    from thinwire.core.errors import UsageError

    text = f'[run]\ntask = "{task}"\n\n[local]\nlr = {lr:g}\n'
    RunPlan.parse(text)
    if file is None:
        console.line(text.rstrip())
        return
    if file.exists():
        raise UsageError(f"{file} exists", why="a plan is not overwritten", hint="another name, or remove it first")
    _write(file, text)
    console.note(f"wrote {file}; next: thinwire plan check {file}")


@app.command()
def check(plan: PlanFile, sets: Sets = None, clients: Clients = None, json: Json = False) -> None:
    """Check whether a plan can run; if not, print everything that is wrong with it."""
    from thinwire.aggregation import codecs
    from thinwire.cli.run import begins_early
    from thinwire.core import RunPlan
    from thinwire.core.plan_rules import as_error
    from thinwire.core.secure_numbers import fewest_devices
    from thinwire.reports.secure_rounds import few_visits, numbers_text, thresholds, uplink_text

    read = RunPlan.load(plan, overrides(sets), codecs=codecs)
    refused = read.check(codecs)
    is_known = clients is not None or isinstance(read.cohort.clients, int)  # else devices that are online decide
    masked = thresholds(read, clients) if read.secure.enabled and is_known and not refused else None
    if json:
        rows = [{"what": r.what, "why": r.why, "try": r.hint} for r in refused]
        found = {"plan": str(plan), "ok": not refused, "digest": read.digest, "refusals": rows}
        console.document(found | ({"secure_round": masked} if masked else {}))
    if refused:
        raise as_error(refused, str(plan))
    if not json:
        uplink = uplink_text(read) if read.secure.enabled else " | ".join(read.uplink.codecs)
        console.line(f"{plan}: ok ({formatting.counted(read.run.rounds, 'round')} of {read.run.task}, uplink {uplink})")
        if masked:
            console.line(f"{masked['protection']}:")
            console.line(numbers_text(masked))
    if read.secure.enabled:
        _warn([few_visits(read)])
        if not is_known:
            needs = f"it needs {least} devices or more; " if (least := fewest_devices(read)) else ""
            console.note(f"{needs}whom it protects depends on their number: thinwire plan check {plan} --clients N")
    if not json and (said := begins_early(read, clients)):
        console.note(said)


@app.command()
def explain(
    plan: PlanFile, sets: Sets = None, clients: Clients = None, task: Task = None, json: Json = False, home: Home = None
) -> None:
    """Show each key of a plan with its value and meaning, the cost of a secure round, and epsilon of a private run.

    If the aggregator of this machine knows devices with the task, the seconds are those of their measured links, and
    without --clients a secure round is one of those that are online, or else of all.
    """
    from thinwire.aggregation import codecs
    from thinwire.cli import privacy_cost
    from thinwire.core import RunPlan, plan_text
    from thinwire.core.plan_rules import as_error
    from thinwire.reports.secure_rounds import round_cost

    read = RunPlan.load(plan, overrides(sets), codecs=codecs)
    if refused := read.check(codecs):
        raise as_error(refused, str(plan))
    values, is_private = read.to_json(), read.privacy.mode != "off"
    size = parameters_of(read, plan, task) if read.secure.enabled or is_private else 0
    private = privacy_cost.private_run(read, size, clients) if is_private else None

    def cost() -> dict[str, Any]:
        at_hand = _at_hand(read, home)
        counted = _counted(read, at_hand) if clients is None and at_hand else clients
        return round_cost(read, size, counted) | ({"devices": dataclasses.asdict(at_hand)} if at_hand else {})

    if json:
        masked = {"secure_round": cost()} if read.secure.enabled else {}
        console.document(values | masked | ({"private_run": privacy_cost.to_json(private)} if private else {}))
        return
    rows = [
        (f"[{section}] {name}", _toml(value), given, field.description or "")
        for section, name, field in plan_text.plan_keys()
        for value in (values[section][name],)
        for given in ("" if plan_text.is_default(field, value) else "set",)
    ]
    if read.secure.enabled:
        rows = [LATTICE_ROW if row[0] == LATTICE_ROW[0] else row for row in rows]
    console.table(("key", "value", "set", "meaning"), rows)
    if read.secure.enabled:
        console.line()
        _print_cost(found := cost())
        _warn(found["warnings"])
    if private:
        console.line()
        console.sentence(privacy_cost.sentence(private), begin="privacy  ")


def _at_hand(plan: RunPlan, home: Path | None) -> Estimate | None:
    """Return the cost of a run by the links and speeds of the devices that have its task; None if there are none."""
    from thinwire.cli.local_state import aggregator_home, has_database, open_store, require_home
    from thinwire.reports.plan_check import estimate
    from thinwire.store.task_layouts import hosts, known_task

    require_home(home)
    if not has_database(aggregator_home(home)):
        return None
    with open_store(home) as store:
        there = hosts(store.devices(), plan.run.task)
        return estimate(plan, known_task(store, plan.run.task), there, store.measures()) if there else None


def _counted(plan: RunPlan, at_hand: Estimate) -> int | None:
    """Return how many devices at hand a secure round may select from; None if they are too few for a sum."""
    from thinwire.core.secure_numbers import fewest_devices

    count = sum(row.online for row in at_hand.devices) or len(at_hand.devices)
    return count if count >= max(fewest_devices(plan), 1) else None


def parameters_of(plan: RunPlan, file: Path, task: str | None) -> int:
    """Return the number of trained parameters of the plan's task, whose code is imported here."""
    from thinwire.cli.task import load
    from thinwire.client.task import initial_model

    return initial_model(load(plan.run.task, file, task), plan.run.seed, plan.local.personal_layers).layout.model_size


def _warn(warnings: list[str]) -> None:
    for warning in filter(None, warnings):
        console.note(f"warning: {warning}")


@app.command()
def diff(one: PlanFile, other: PlanFile, json: Json = False) -> None:
    """Show the keys in which two plans differ."""
    from thinwire.core import RunPlan, plan_text

    left, right = RunPlan.load(one).to_json(), RunPlan.load(other).to_json()
    found = [
        (f"[{section}] {name}", left[section][name], right[section][name])
        for section, name, _ in plan_text.plan_keys()
        if left[section][name] != right[section][name]
    ]
    if json:
        console.document({key: [a, b] for key, a, b in found})
    elif found:
        console.table(("key", str(one), str(other)), [(key, _toml(a), _toml(b)) for key, a, b in found])
    else:
        console.note("the plans are equal")


@app.command()
def keys(
    section: Annotated[str | None, typer.Argument(help="run, cohort, local, uplink, ...; default: all")] = None,
    json: Json = False,
) -> None:
    """List the keys that a plan may have, with their defaults."""
    from thinwire.core import plan_text
    from thinwire.core.errors import NotFound

    rows = [
        (f"[{s}] {name}", _default(field), field.description or "")
        for s, name, field in plan_text.plan_keys()
        if section in (None, s)
    ]
    if not rows:
        known = ", ".join(dict.fromkeys(s for s, _, _ in plan_text.plan_keys()))
        raise NotFound(f"a plan has no section [{section}]", why=f"it has {known}", hint="thinwire plan keys")
    if json:
        console.document([{"key": key, "default": default, "meaning": meaning} for key, default, meaning in rows])
    else:
        console.table(("key", "default", "meaning"), rows)


def _default(field: FieldInfo) -> str:
    """Return the default of a key as it is written in a plan, or (needed)."""
    from thinwire.core import plan_text

    return "(needed)" if field.is_required() else _toml(plan_text.default_of(field))


def _toml(value: Any) -> str:
    """Return a value as it is written in a plan; a key without a value becomes a dash."""
    from thinwire.core import plan_text

    return formatting.NOTHING if value is None else plan_text.toml(value)


def init(directory: Annotated[Path, typer.Argument(metavar="DIR", help="new or empty folder")]) -> None:
    """Write task.py (your model and data go there) and plan.toml (two lines) into a folder."""
    from thinwire.core.errors import UsageError

    name = re.sub(r"[^A-Za-z0-9_-]+", "-", directory.absolute().name).strip("-_")[:63] or "mine"
    templates = files("thinwire.cli") / "templates"
    written = {
        "task.py": (templates / "task.py.txt").read_text(),
        "plan.toml": f'[run]\ntask = "{name}"\n\n[local]\nlr = 0.5\n',
    }
    if there := [one for one in written if (directory / one).exists()]:
        raise UsageError(
            f"{directory / there[0]} exists", why="nothing is overwritten", hint="thinwire init ANOTHER-FOLDER"
        )
    for one, text in written.items():
        _write(directory / one, text)
        console.line(str(directory / one))
    console.note("next, with the same two files:")
    console.note(f"  thinwire task check {directory}/task.py --plan {directory}/plan.toml")
    console.note(f"  thinwire sim {directory}/plan.toml --clients 4")
    console.note("  thinwire aggregator start        (then, for each device:)")
    console.note(
        f"  thinwire client start --aggregator http://127.0.0.1:9090 --task {name}={directory}/task.py --name NAME"
    )
    console.note(f"  thinwire run {directory}/plan.toml")


def _write(path: Path, text: str) -> None:
    """Write a new file and its folder where the person wants it; raise `UsageError` if that is not possible there."""
    from thinwire.core.errors import DataLost, UsageError
    from thinwire.core.statedir import write_atomically

    why, hint = "", "another folder, in which you may write"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode(), mode=0o644)
    except FileExistsError:
        why = f"{path.parent} is a file, and no folder"
    except OSError as error:
        why = error.strerror or str(error)
    except DataLost as error:
        why = error.why
    if why:
        raise UsageError(f"cannot write {path}", why=why, hint=hint)


LATTICE_ROW = ("[uplink] codec", "(lattice)", "", "not used under masks: see [secure] bits, support and rotate")


def _print_cost(found: dict[str, Any]) -> None:
    """Print what `round_cost` found."""
    from thinwire.core.formatting import size
    from thinwire.reports.secure_rounds import cost_lines

    console.line(f"a secure round of {found['selected']} clients, {found['parameters']} parameters; bytes of a client:")
    rows = [
        (phase, size(both["up"]), size(both["down"]) if both["down"] else "the model")
        for phase, both in found["phases"].items()
    ]
    console.table(("phase", "up", "down"), [*rows, ("all", size(found["up_bytes"]), size(found["down_bytes"]))])
    for line in cost_lines(found):
        console.line(line)
