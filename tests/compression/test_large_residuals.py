"""How large a residual gets off normal data: what docs/explain/codecs.md says of it, measured."""

from __future__ import annotations

import numpy as np
import pytest

from thinwire.compression import feedback, parse
from thinwire.core.layout import Layout
from thinwire.core.prng import Key

SIZE, ROUNDS = 4096, 300
DRAW = np.random.default_rng(7)
NORMAL = DRAW.standard_normal(SIZE)
OUTLIER = np.where(np.arange(SIZE) == 9, 1000.0, NORMAL)


def largest(spec: str, values: np.ndarray | None) -> float:
    """The largest residual beside its change, over rounds of the same values each, or of None: normal ones again."""
    bound = feedback(parse(spec)).bind(Layout.of({"w": (SIZE,)}))
    state, found, draw = bound.init(), 0.0, np.random.default_rng(1)
    for number in range(ROUNDS):
        x = (draw.standard_normal(SIZE) if values is None else values).astype(np.float32)
        norm = float(np.linalg.norm(x))
        state = bound.encode(x, state, Key(1, number)).state
        found = max(found, float(np.linalg.norm(state["residual"])) / norm)
    return found


@pytest.mark.parametrize(
    ("spec", "values", "least", "most"),
    [
        ("topk(0.01)", None, 3.0, 6.0),
        ("topk(0.01)", NORMAL, 35.0, 60.0),
        ("topk(0.1)", NORMAL, 3.0, 6.0),
        ("sign", None, 0.5, 1.5),
        ("sign", NORMAL, 10.0, 30.0),
        ("qsgd(2)", NORMAL, 1.0, 3.0),
        ("qsgd(2)", OUTLIER, 10.0, 30.0),
        ("sign", OUTLIER, 100.0, 400.0),
        ("int8", OUTLIER, 0.0, 0.5),
        ("eden(2)", OUTLIER, 0.0, 1.0),
    ],
)
def test_a_residual_is_as_large_as_is_said(spec: str, values: np.ndarray | None, least: float, most: float) -> None:
    assert least <= largest(spec, values) <= most
