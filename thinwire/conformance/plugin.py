"""The pytest plugin that runs the conformance suite on another package's codec: `pytest --thinwire-codec mypkg:Mine`.

pytest loads this file in every environment where Thinwire is installed, so it imports nothing before the option is
given.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

LAWS = tuple(Path(__file__).with_name(name) for name in ("codec_suite.py", "frame_suite.py"))
SPECS = pytest.StashKey[Any]()
BEHIND = {
    "quantizer": ("{} > zstd", "topk(0.3) > {}"),
    "sparsifier": ("{} > int8", "{} > fp16 > zstd"),
    "coder": ("identity > {}", "topk(0.3) > int8 > {}", "topk(0.3) > sign > rice > {}"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option `--thinwire-codec`."""
    group = parser.getgroup("thinwire")
    group.addoption(
        "--thinwire-codec",
        metavar="MODULE:CLASS",
        help="hold a step of a chain of your own to Thinwire's laws; alone, nothing else is collected",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the class for this run and collect the conformance suite, alone if no path was given."""
    if not (named := config.getoption("--thinwire-codec")):
        return
    config.stash[SPECS] = specs(named)
    given = config.args if config.args_source == config.ArgsSource.ARGS else []
    config.args = [*given, *map(str, LAWS)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test of the suite once for each spec."""
    if SPECS in metafunc.config.stash and metafunc.definition.path in LAWS:
        metafunc.parametrize("spec", metafunc.config.stash[SPECS])


def specs(named: str) -> list[str]:
    """Return the examples of the class, alone and in chains; raise UsageError if the class is no codec."""
    try:
        importlib.import_module("hypothesis")
    except ImportError as error:
        raise pytest.UsageError("--thinwire-codec needs hypothesis: pip install hypothesis") from error
    from thinwire.compression import parse
    from thinwire.compression.catalog import steps
    from thinwire.core.errors import CodecError

    thing = _imported(named)
    place = -1 if getattr(thing, "role", "") == "coder" else 0
    name = _stage(str(next(iter(getattr(thing, "examples", ())), "?")), place).partition("(")[0]
    try:
        if name not in steps or steps[name] is not thing:
            steps.add(name, steps.admit(name, thing))
        found = [parse(example).spec for example in thing.examples]
        alone = [_stage(spec, place) for spec in found if place or ">" not in spec]
        chains = [parse(form.format(spec)).spec for spec in alone for form in BEHIND[thing.role]]
    except (CodecError, ValueError) as error:
        raise pytest.UsageError(f"--thinwire-codec {named}: {error}") from error
    return list(dict.fromkeys([*found, *chains]))


def _stage(spec: str, place: int) -> str:
    return spec.split(">")[place].strip()


def _imported(named: str) -> Any:
    module, colon, name = named.partition(":")
    if not colon:
        raise pytest.UsageError(f"--thinwire-codec {named} names no class: it reads MODULE:CLASS, as in mypkg:Mine")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise pytest.UsageError(f"--thinwire-codec {named} does not import: {error}") from error
