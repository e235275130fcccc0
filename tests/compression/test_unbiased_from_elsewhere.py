"""A quantizer of another package that is only unbiased stands inside a residual divided by 1 + omega."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.codecs_elsewhere import install
from thinwire.compression import Contractive, parse
from thinwire.compression.catalog import steps
from thinwire.compression.feedback import ef21, feedback
from thinwire.conformance.codec_suite import made
from thinwire.core import Key, Layout

ROOT = Path(__file__).parents[2]
OMEGA = 63.0  # sqrt(4096) - 1
WILD = '''
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from thinwire.compression.base import Quantizer, Unbiased
from thinwire.core.prng import uniform
from thinwire.core.errors import BadPayload


@dataclass(frozen=True)
class Wild(Quantizer):
    """Signs, kept with probability |x| / ||bucket||, times that norm."""

    examples: ClassVar[tuple[str, ...]] = ("wild",)
    spec: ClassVar[str] = "wild"
    bits: ClassVar[int] = 8

    def kind(self):
        return Unbiased(63.0)

    def quantize(self, values, word):
        starts = np.arange(0, values.size, 4096)
        squares = np.add.reduceat(values.astype(np.float64) ** 2, starts) if values.size else np.zeros(0)
        norms = np.sqrt(squares).astype(np.float32)
        each = np.repeat(norms, 4096)[: values.size]
        kept = uniform(0, values.size, word) * each < np.abs(values)
        return (np.sign(values) * kept).astype(np.int8), norms

    def dequantize(self, symbols, scales, span, word):
        return symbols[span] * np.repeat(scales, 4096)[span]

    def check(self, symbols, scales):
        if not (np.isfinite(scales).all() and (scales >= 0).all() and (np.abs(symbols.astype(np.int16)) <= 1).all()):
            raise BadPayload("a value that wild never makes")
'''


@pytest.fixture
def mypkg(tmp_path: Path) -> Path:
    """A folder in which a package is installed that brings the step `wild` by entry point."""
    install(tmp_path, WILD, "thinwire.codecs", "wild = mypkg:Wild")
    return tmp_path


@pytest.fixture
def wild(mypkg: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(mypkg)
    monkeypatch.setitem(steps._named, "wild", steps.admit("wild", importlib.import_module("mypkg").Wild))
    yield
    sys.modules.pop("mypkg")
    parse.cache_clear()


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    # The plugins of other packages take as long to import as pytest.
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    call = [sys.executable, "-m", *words]
    return subprocess.run(call, cwd=folder, text=True, capture_output=True, timeout=240, check=False, env=environment)


@pytest.mark.usefixtures("wild")
def test_inside_a_residual_it_contracts_alone_and_behind_a_sparsifier() -> None:
    layout = Layout.of({"w": (600,)})
    delta = 1 / (1 + OMEGA)
    assert feedback(parse("wild")).bind(layout).kind == Contractive(delta)
    assert feedback(parse("topk(0.5) > wild")).bind(layout).kind == Contractive(0.5 * delta)
    assert feedback(parse('layers("*.bias"=fp16; *=wild)')).bind(Layout.of({"w": (6,), "b.bias": (2,)})).kind == (
        Contractive(delta)
    )
    assert ef21(parse("wild")).bind(layout).kind == Contractive(delta)


@pytest.mark.usefixtures("wild")
def test_inside_a_residual_a_1_plus_omegath_of_the_update_is_sent_in_the_mean() -> None:
    x = made(600, 1, "normal", 0)
    codec = feedback(parse("wild")).bind(Layout.of({"w": (600,)}))
    sent = [codec.decode(codec.encode(x.copy(), codec.init(), Key(k)).payload).astype(np.float64) for k in range(400)]
    assert np.mean(sent, axis=0) @ x / (x @ x) == pytest.approx(1 / (1 + OMEGA), rel=0.05)


@pytest.mark.usefixtures("wild")
def test_without_feedback_nothing_is_divided() -> None:
    x = made(600, 1, "normal", 0)
    codec = parse("wild").bind(Layout.of({"w": (600,)}))
    sent = [codec.decode(codec.encode(x, codec.init(), Key(k)).payload).astype(np.float64) for k in range(400)]
    assert np.mean(sent, axis=0) @ x / (x @ x) == pytest.approx(1, rel=0.05)


def test_it_is_found_by_its_entry_point_and_measured_with_feedback(mypkg: Path) -> None:
    done = run(mypkg, "thinwire.cli", "codecs", "try", "topk(0.1) > wild", "--params", "20000", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "diverge" not in done.stdout


def test_the_plugin_finds_that_it_keeps_the_laws_of_feedback(mypkg: Path) -> None:
    laws = "residual and wild] or what_was_sent and wild]"
    done = run(mypkg, "pytest", "-p", "thinwire.conformance.plugin", "-p", "no:cacheprovider", "-q", "-k", laws,
               "--thinwire-codec", "mypkg:Wild")  # fmt: skip
    assert done.returncode == 0, done.stdout
