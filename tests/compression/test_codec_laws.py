"""The laws of a codec (thinwire/conformance) on every one that is registered: a new one is picked up by itself."""

from __future__ import annotations

import pytest

from tests.support.codec_examples import SPECS
from thinwire.aggregation import codecs
from thinwire.compression import parse
from thinwire.conformance.codec_suite import *  # noqa: F403
from thinwire.conformance.frame_suite import *  # noqa: F403


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each law once for each spec."""
    if "spec" in metafunc.fixturenames:
        metafunc.parametrize("spec", SPECS)


def test_every_registered_name_is_run() -> None:
    for name, step in codecs.items():
        assert step.examples
        assert all(name in example and parse(example).spec in SPECS for example in step.examples)
