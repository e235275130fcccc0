"""From a change to an update's frames, and to what the device carries on to its next one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.aggregation.ef21 import REFERENCE
from thinwire.aggregation.feedback import MOMENTUM, RESIDUAL, BoundFeedback
from thinwire.aggregation.uplink import encoder
from thinwire.client.disk.state import RunState
from thinwire.core.keys import Key
from thinwire.core.layout import Layout
from thinwire.core.sections import UplinkSection
from thinwire.core.types import Payload, State, Vector

PLACES = {RESIDUAL: "residual", REFERENCE: "residual", MOMENTUM: "momentum"}  # a codec's array -> the state's vector


def encode(
    change: Vector, state: RunState, spec: str, uplink: UplinkSection, layout: Layout, key: Key, round_number: int = 0
) -> tuple[list[Payload], RunState]:
    """The frame of each segment of the model, and the state after it. `change` is donated; `state` is only read.

    The residual is first aged by the rounds since the last encode. What `spec` knows of the last codec's own memory,
    by name and size, it goes on with: the rest of that is forgotten, the residual never.
    """
    codec, payloads, own = encoder(spec, uplink, layout), list[Payload](), dict[str, NDArray[Any]]()
    whole: dict[str, Vector] = {}
    for segment in layout.model_segments:
        held = _held(codec.init(segment.index), state, segment.index, segment.span)
        if isinstance(codec, BoundFeedback):
            held = codec.aged(held, uplink.feedback_decay, round_number - state.encoded_at)
        encoded = codec.encode(change[segment.span], held, key, segment.index)
        payloads.append(encoded.payload)
        for name, array in encoded.state.items():
            if name not in PLACES:
                own[f"{segment.index}/{name}"] = array
                continue
            into = whole.get(PLACES[name])
            if into is None:  # the change's own memory becomes the residual or the reference: one vector less
                into = whole[PLACES[name]] = np.empty(change.size, np.float32) if name == MOMENTUM else change
            if array.base is not into and array is not into:
                into[segment.span] = array
    made = replace(
        state, residual=whole.get("residual"), momentum=whole.get("momentum"), memory=own, encoded_at=round_number
    )
    return payloads, made


def _held(fresh: State, state: RunState, segment: int, span: slice) -> State:
    """What the codec begins with: of its arrays those that the state has."""
    held = dict(fresh)
    for name in fresh:
        kept: Mapping[str, Vector | None] = {"residual": state.residual, "momentum": state.momentum}
        if name not in PLACES:
            held[name] = state.memory.get(f"{segment}/{name}", fresh[name])
        elif (vector := kept[PLACES[name]]) is not None:
            held[name] = vector[span]
    return held
