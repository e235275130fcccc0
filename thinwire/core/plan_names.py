"""Find what a plan names of code and files on the aggregator's machine, and whether `aggregator.toml` allows it.

A plan that a person types on the machine may name whatever is installed there. A plan from the API may not: `allow` in
`aggregator.toml` lists what else than Thinwire's own it may name.

Invariant: `named_in` finds a name before any code is imported for it, and knows every key whose value may lead to code
or to a file: `NAMING` and `HARMLESS` together have all keys of a plan that hold text (a test compares them).
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.metadata import entry_points

from thinwire.core.plan_errors import Problem
from thinwire.core.plan_schema import Sections

CODECS, OPTIMIZERS = "thinwire.codecs", "thinwire.optimizers"  # groups of entry points
REDUCTIONS = "thinwire.reductions"  # no group: another package's one is named by its place
NAMING = ("run.init", "uplink.codec", "uplink.layers", "uplink.ladder", "downlink.codec", "server.optimizer",
          "server.reduce")  # fmt: skip
HARMLESS = {
    "run.task": "a device maps it to the code that is installed there; the aggregator has no use for the code",
    "run.keep": "words of our own, checked by a rule",
    "run.metric": "a key of the numbers that clients report",
    "run.target": "a metric, as above",
    "cohort.wait_for": "names of devices",
    "server.max_norm": "a quantile",
    "local.personal_layers": "globs of the model's tensors",
    "secure.metrics": "metrics, as above",
    "secure.histograms": "metrics, as above",
    "privacy.population": "a name in the privacy ledger",
}
OwnNames = Mapping[str, Collection[str]]  # group of entry points -> names of our own
RUN, UPLOAD = "run:", "upload:"  # how `[run] init` names a model that this aggregator holds
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_]*")  # names of stages, as compression/spec.py reads them
_QUOTED = re.compile(r"\"[^\"]*\"|'[^']*'")  # a pattern of tensors, in layers(...)
_BETWEEN = re.compile(r"[\s>(),=\"']")  # what stands between the words of a spec
_PLACED = re.compile(r"[:/\\]")  # in MODULE:CLASS or a path: no codec is called so
_UPLOAD_ID = re.compile(r"[0-9a-f]{1,32}")


@dataclass(frozen=True)
class Name:
    """Holds a name that leads to code or to a file, and the key of the plan that has it."""

    section: str
    key: str
    name: str
    group: str = ""  # of entry points, among which the name is one of code; "" for a path


def named_in(plan: Sections, own: OwnNames) -> list[Name]:
    """Return what a plan names of code and files, except for the names in `own`, which are Thinwire's.

    >>> from thinwire.core.plan import RunPlan
    >>> plan = {"run": {"task": "t", "init": "/models/a.safetensors"}, "local": {"lr": 1}, "uplink": {"codec": "a > b"}}
    >>> own = {CODECS: ["a", "eden", "identity"], OPTIMIZERS: ["fedavg"], REDUCTIONS: ["mean"]}
    >>> [one.name for one in named_in(RunPlan.from_json(plan), own)]
    ['/models/a.safetensors', 'b']
    """
    return list(dict.fromkeys(_names(plan, own)))


def _names(plan: Sections, own: OwnNames) -> Iterator[Name]:
    init = plan.run.init
    if init not in ("", "device") and not init.startswith((RUN, UPLOAD)):
        yield Name("run", "init", init)
    uplink, downlink = plan.uplink, plan.downlink
    specs = [("uplink", "codec", uplink.codec), ("downlink", "codec", downlink.codec)]
    specs += [("uplink", "ladder", spec) for spec in uplink.ladder]
    specs += [("uplink", "layers", spec) for spec in uplink.layers.values()]
    for section, key, spec in specs:
        for word in (*_WORD.findall(spec), *_places(spec)):
            if word not in own[CODECS] and word != "layers":
                yield Name(section, key, word, CODECS)
    reduce = plan.server.reduce.partition("(")[0].strip()
    for key, value, group in (("optimizer", plan.server.optimizer, OPTIMIZERS), ("reduce", reduce, REDUCTIONS)):
        if value not in own[group]:
            yield Name("server", key, value, group)


def _places(spec: str) -> Iterator[str]:
    """Yield the words of a spec that look like code or a path, outside of its patterns, in linear time.

    >>> list(_places('layers("a/b:c"=fp16; d/e=evil:X > /x.so)'))
    ['evil:X', '/x.so']
    """
    for rule in re.split("[;(]", _QUOTED.sub(" ", spec)):
        yield from (word for word in _BETWEEN.split(rule.rpartition("=")[2]) if _PLACED.search(word))


def origin_problems(plan: Sections) -> list[Problem]:
    """Return a problem if nobody could make the first model of a run that the aggregator starts without a task's code.

    Else a device makes it. Under masks and with privacy none does, because its model would leave it in the clear.
    """
    if plan.run.init or not plan.is_protected:
        return []
    why = "the aggregator has no code of the task, and no device makes a first model under masks or with privacy"
    hint = "an uploaded model, or run:ID@0 of a run that thinwire run began; or thinwire run PLAN, which makes one"
    return [Problem(("run", "init"), "the plan has no [run] init", why, hint)]


def named_model(init: str) -> tuple[str, str] | None:
    """Return run and model of `run:ID@MODEL`, the last model if it names none; None for every other origin.

    >>> named_model("run:digits-1@0"), named_model("run:digits-1"), named_model("device")
    (('digits-1', '0'), ('digits-1', 'last'), None)
    """
    run_id, _, model = init.removeprefix(RUN).partition("@")
    return (run_id, model or "last") if init.startswith(RUN) else None


def upload_id(init: str) -> str:
    """Return the id in `upload:ID`; "" if it is none that an upload was given.

    >>> upload_id("upload:0a1b"), upload_id("upload:../store")
    ('0a1b', '')
    """
    found = init.removeprefix(UPLOAD)
    return found if _UPLOAD_ID.fullmatch(found) else ""


def installed() -> dict[tuple[str, str], str]:
    """Return the codecs and optimizers of other packages on this machine, (group, name) -> MODULE:CLASS.

    It imports none of them. A codec and an optimizer may have the same name.
    """
    return {(group, entry.name): entry.value for group in (CODECS, OPTIMIZERS) for entry in entry_points(group=group)}


def refused_names(
    plan: Sections, own: OwnNames, allow: Sequence[str], others: Mapping[tuple[str, str], str]
) -> list[Problem]:
    """Return a problem for each name in a plan that `allow` does not list; `others` are the `installed` ones.

    A name that is neither installed nor a path is left to the check of the plan, which refuses it with the nearest one.
    """
    found = []
    for one in named_in(plan, own):
        key, is_path = (one.group, one.name), not one.group
        value = others.get(key, one.name)
        is_code = is_path or key in others or _PLACED.search(one.name) is not None
        if is_code and not is_allowed(one.name, allow) and not is_allowed(value, allow):
            where = f"[{one.section}] {one.key} names {one.name!r}"
            what = "a file of this machine" if is_path else f"the code {value} of another package"
            found.append(
                Problem(
                    (one.section, one.key), where, f"it is {what}, and aggregator.toml does not allow it",
                    f'allow = ["{value}"] in aggregator.toml, by who runs the aggregator; or leave it out',
                )
            )  # fmt: skip
    return found


def is_allowed(name: str, allow: Sequence[str]) -> bool:
    """Return True if a pattern of `allow` matches the name; a path must be absolute and without `..`.

    Of MODULE:CLASS and FILE.py:CLASS, the pattern matches both halves, each alone: files of models are no code.

    >>> is_allowed("/models/a.safetensors", ["/models/*"]), is_allowed("/models/../etc/passwd", ["/models/*"])
    (True, False)
    >>> is_allowed("/models/a.py:A", ["/models/*"]), is_allowed("/models/a.py:A", ["/models/*:A"])
    (False, True)
    """
    if ("/" in name or "\\" in name) and (not name.startswith("/") or posixpath.normpath(name) != name):
        return False
    where, colon, thing = name.rpartition(":")
    patterns = (pattern.rpartition(":") for pattern in allow)
    return any(colon == has and fnmatchcase(where, of) and fnmatchcase(thing, what) for of, has, what in patterns)
