"""Compresses the updates of a plain Flower app: `mod` on its clients, `wrap` around its strategy, and nothing else.

The app stays Flower's: its own ClientApp, strategy and SuperLink, no plan of ours.

    app = ClientApp(mods=[thinwire.flower.mod()])
    strategy = thinwire.flower.wrap(FedAvg(), "topk(0.01) > int8 > rice")

In a training round the strategy's messages carry the spec, so both ends agree. The mod sends the difference between the
arrays that the app returns and those that it got, encoded with error feedback where the codec needs it. The strategy
decodes it, adds it to what that node was sent, and hands the sum to the inner strategy. Replies to other messages,
records of metrics, and arrays that are no floats pass as they are.

**Which residual counts.** `Context.state` has the state of the codec before and after the last update, and the number
of that update. The next message says which number reached the strategy. If it is not the last one, the update was lost,
and the state before it counts. A SuperNode that was restarted has no state: it begins without a residual, and what the
residual had is lost.

Invariant: with the codec `identity` the inner strategy gets the bits that it would get without us, up to one rounding
of `base + (new - base)` in float32.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from thinwire.aggregation.plan_codecs import encoder
from thinwire.compression import BoundCodec, parse
from thinwire.core.errors import BadPayload, CodecError, ThinwireError, UsageError
from thinwire.core.layout import Layout
from thinwire.core.plan_schema import UplinkSection
from thinwire.core.prng import Key, derive
from thinwire.core.types import State, Vector

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict  # isort: skip
from flwr.serverapp.strategy import Strategy  # isort: skip

if TYPE_CHECKING:
    from flwr.serverapp import Grid

log = logging.getLogger("thinwire.flower")

OURS: Final = "thinwire"  # the ConfigRecord in a message and in `Context.state`
BEFORE: Final = "thinwire.before"  # ArrayRecords in `Context.state`
AFTER: Final = "thinwire.after"
DEFAULT: Final = "topk(0.01) > int8 > rice"
DOWN: Final = ("identity", "fp16", "int8")
FLOATS: Final = ("float16", "float32", "float64")
CLIPPING: Final = "clipping_norm"  # Flower's key for its client-side clipping mods

Call = Callable[[Message, Context], Message]


def mod(spec: str = "") -> Callable[[Message, Context, Call], Message]:
    """Return the first of a ClientApp's mods: it compresses the arrays of replies to training messages.

    The strategy says the codec. `spec` replaces it for this client; the strategy decodes each frame by its own spec, so
    give it to both ends or to the strategy alone. Without `wrap` around the strategy nothing is changed.
    """
    if spec:
        parse(spec)

    def compress(message: Message, context: Context, call_next: Call) -> Message:
        if message.metadata.message_type.partition(".")[0] != "train" or OURS not in message.content.config_records:
            return call_next(message, context)
        told = message.content.config_records[OURS]
        require_plain(message.content)
        expected = str(told["spec"])
        if spec and spec != expected:
            raise UsageError(
                f"this client compresses with {spec}, and the strategy expects {expected}",
                why="the strategy decodes with its own codec",
                hint=f"mod() without a codec, or wrap(strategy, {spec!r})",
            )
        arrays = received(message.content, told)
        del message.content[OURS]
        message.content.update(arrays)
        reply = call_next(message, context)
        if reply.has_content():
            key = derive(Key(message.metadata.run_id), "flower", message.metadata.dst_node_id)
            compressed(reply.content, arrays, expected, int(told["reached"]), context, key)  # type: ignore[arg-type]
        return reply

    return compress


def require_plain(content: RecordDict) -> None:
    """Raise `UsageError` for a message of an app whose other parts need the exact arrays of each client."""
    for record in content.config_records.values():
        if CLIPPING in record:
            raise UsageError(
                "a strategy with client-side clipping does not go with compressed updates",
                why="a decoded update may be longer than the norm to which the client clipped it",
                hint="DifferentialPrivacyServerSideFixedClipping inside wrap(), or Thinwire's [privacy]",
            )


def received(content: RecordDict, told: ConfigRecord) -> dict[str, ArrayRecord]:
    """Return the array records of a message; those that came compressed are decoded."""
    records = dict(content.array_records)
    if "frames" not in told:
        return records
    floats = Floats.read(told)
    return floats.put(records, floats.decode(str(told["down"]), _frames(told["frames"])))


def compressed(
    content: RecordDict, base: Mapping[str, ArrayRecord], spec: str, reached: int, context: Context, key: Key
) -> None:
    """Replace the float arrays of a reply by their encoded difference to `base`, and keep the state in the context.

    A record that the message did not have, or with other shapes, stays as it is.
    """
    records = {
        name: record
        for name, record in content.array_records.items()
        if name in base and Floats.of({name: record}) == Floats.of({name: base[name]})
    }
    floats = Floats.of({name: base[name] for name in records})
    if not floats.layout.size:
        return
    state, number = _state(context, reached)
    change = floats.vector(records)
    change -= floats.vector(base)
    codec = encoder(spec, UplinkSection(codec=spec), floats.layout)
    frames, after = list[bytes](), dict[str, np.ndarray[Any, Any]]()
    for segment in floats.layout.model_segments:
        fresh = codec.init(segment.index)
        held = {name: state.get(f"{segment.index}/{name}", array) for name, array in fresh.items()}
        held = {name: held[name] if held[name].shape == array.shape else array for name, array in fresh.items()}
        encoded = codec.encode(change[segment.span], held, derive(key, "encode", number), segment.index)
        frames.append(bytes(encoded.payload))
        after |= {f"{segment.index}/{name}": array for name, array in encoded.state.items()}
    context.state[BEFORE] = _record(state)
    context.state[AFTER] = _record(after)
    context.state[OURS] = ConfigRecord({"number": number})
    for name, record in records.items():
        content[name] = _without_floats(record)
    content[OURS] = ConfigRecord({"number": number, "frames": frames, "records": list(records)})


def _state(context: Context, reached: int) -> tuple[State, int]:
    """Return the codec's state for the next update, and that update's number."""
    if OURS not in context.state.config_records:
        return {}, 1
    number = int(context.state.config_records[OURS]["number"])  # type: ignore[arg-type]
    kept = context.state.array_records[AFTER if number == reached else BEFORE]
    return {name: array.numpy() for name, array in kept.items()}, number + 1


def _record(state: Mapping[str, np.ndarray[Any, Any]]) -> ArrayRecord:
    return ArrayRecord({name: Array(np.ascontiguousarray(array)) for name, array in state.items()})


def _frames(given: Any) -> list[bytes]:
    if not isinstance(given, list) or not all(isinstance(one, bytes) for one in given):
        raise BadPayload("a record without frames")
    return given


Place = tuple[str, str, str, tuple[int, ...]]  # record, array, dtype, shape


@dataclass(frozen=True)
class Floats:
    """The float arrays of some records as one vector of float32, in the order of the records and of their arrays."""

    places: tuple[Place, ...]  # of all arrays

    @classmethod
    def of(cls, records: Mapping[str, ArrayRecord]) -> Floats:
        """Return the places of the arrays of these records."""
        every = ((name, one, array) for name, record in records.items() for one, array in record.items())
        return cls(tuple((name, one, array.dtype, tuple(array.shape)) for name, one, array in every))

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> Floats:
        """Return the places that a message describes; raise `BadPayload` if it does not."""
        try:
            rows = zip(told["records"], told["arrays"], told["dtypes"], told["shapes"], strict=True)
            return cls(tuple((r, a, d, tuple(int(n) for n in s.split(",") if n)) for r, a, d, s in rows))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise BadPayload("a message that does not describe its arrays") from error

    def told(self) -> dict[str, list[str]]:
        """Return the description of the places in a message."""
        shapes = [",".join(map(str, shape)) for *_, shape in self.places]
        records, arrays, dtypes = ([str(place[at]) for place in self.places] for at in range(3))
        return {"records": records, "arrays": arrays, "dtypes": dtypes, "shapes": shapes}

    @property
    def layout(self) -> Layout:
        """Return the layout of the float arrays."""
        return _layout(tuple(place for place in self.places if place[2] in FLOATS))

    def vector(self, records: Mapping[str, ArrayRecord]) -> Vector:
        """Return the values of the float arrays, one after the other."""
        parts = [records[name][one].numpy().reshape(-1) for name, one, dtype, _ in self.places if dtype in FLOATS]
        return np.concatenate(parts, dtype=np.float32, casting="same_kind") if parts else np.zeros(0, np.float32)

    def put(self, records: Mapping[str, ArrayRecord], values: Vector) -> dict[str, ArrayRecord]:
        """Return the records with these values as their float arrays, in their own types and order."""
        made: dict[str, dict[str, Array]] = {}
        at = 0
        for name, one, dtype, shape in self.places:
            own = made.setdefault(name, {})
            if dtype not in FLOATS:
                own[one] = records[name][one]
                continue
            size = int(np.prod(shape, dtype=np.int64))
            own[one] = Array(values[at : at + size].reshape(shape).astype(dtype))
            at += size
        return {name: ArrayRecord(arrays) for name, arrays in made.items()}

    def decode(self, spec: str, frames: list[bytes]) -> Vector:
        """Return the decoded values; raise `BadPayload` for frames that are not those of this layout."""
        codec, segments = _bound(spec, self.layout), self.layout.model_segments
        if len(frames) != len(segments):
            raise BadPayload(f"{len(frames)} frames, and the model has {len(segments)} segments")
        made = np.zeros(self.layout.size, np.float32)
        for segment, frame in zip(segments, frames, strict=True):
            codec.check(frame, segment.index)
            codec.decode_add(frame, 1.0, made[segment.span], segment=segment.index)
        return made


def _without_floats(record: ArrayRecord) -> ArrayRecord:
    return ArrayRecord({one: array for one, array in record.items() if array.dtype not in FLOATS})


@lru_cache(maxsize=16)
def _layout(places: tuple[Place, ...]) -> Layout:
    return Layout.of({f"{record}/{one}": shape for record, one, _, shape in places})


@lru_cache(maxsize=16)
def _bound(spec: str, layout: Layout) -> BoundCodec:
    return parse(spec).bind(layout)


class Compressing:
    """What `wrap` puts in front of a strategy's own class: the messages of a training round and their replies."""

    _spec: str
    _down: str
    _sent: dict[int, dict[str, ArrayRecord]]  # node -> the arrays that its message gave to the app
    _reached: dict[int, int]  # node -> number of its last update that was decoded

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Yield the strategy's messages, each with the spec and the number of the node's last update that came."""
        self._sent.clear()
        messages = super().configure_train(server_round, arrays, config, grid)  # type: ignore[misc]
        ways: dict[int, tuple[dict[str, Any], RecordDict]] = {}  # of each content: several messages share one
        for message in messages:
            content = message.content
            require_plain(content)
            if id(content) not in ways:
                ways[id(content)] = self._down_of(content, server_round)
            base, down = ways[id(content)]
            node = message.metadata.dst_node_id
            self._sent[node] = base
            ours = ConfigRecord(dict(down.config_records.get(OURS, {})))
            ours["spec"], ours["reached"] = self._spec, self._reached.get(node, 0)
            about = message.metadata
            yield Message(
                RecordDict({**down, OURS: ours}), node, about.message_type,
                ttl=about.ttl, group_id=about.group_id, dst_task_id=about.dst_task_id,
            )  # fmt: skip

    def _down_of(self, content: RecordDict, server_round: int) -> tuple[dict[str, ArrayRecord], RecordDict]:
        """Return the arrays that the app will get, and the content that carries them."""
        records = dict(content.array_records)
        floats = Floats.of(records)
        if self._down == "identity" or not floats.layout.size:
            return records, content
        codec, values = _bound(self._down, floats.layout), floats.vector(records)
        key = derive(Key(0), "flower_down", server_round)
        frames = [
            bytes(codec.encode(values[one.span].copy(), codec.init(one.index), key, one.index).payload)
            for one in floats.layout.model_segments
        ]
        rest = {name: _without_floats(record) for name, record in records.items()}
        ours = ConfigRecord({"down": self._down, "frames": frames, **floats.told()})
        return floats.put(records, floats.decode(self._down, frames)), RecordDict({**content, **rest, OURS: ours})

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        """Hand the replies to the strategy, with the decoded arrays in the places of the frames."""
        return super().aggregate_train(server_round, list(self._decoded(replies)))  # type: ignore[misc]

    def _decoded(self, replies: Iterable[Message]) -> Iterator[Message]:
        for reply in replies:
            if reply.has_error() or OURS not in reply.content.config_records:
                yield reply
                continue
            node = reply.metadata.src_node_id
            try:
                yield self._whole(reply, node)
            except (ThinwireError, LookupError, TypeError, ValueError) as error:
                log.warning("the update of node %s is left out: %s", node, error)

    def _whole(self, reply: Message, node: int) -> Message:
        """Return a reply with whole arrays; raise for one without a message before it, or with other frames."""
        told, base = reply.content.config_records[OURS], self._sent[node]
        floats = Floats.of({str(name): base[str(name)] for name in told["records"]})  # type: ignore[union-attr]
        values = floats.vector(base)
        values += floats.decode(self._spec, _frames(told["frames"]))
        made = floats.put(reply.content.array_records, values)
        self._reached[node] = int(told["number"])  # type: ignore[arg-type]
        del reply.content[OURS]
        reply.content.update(made)
        return reply


def wrap(strategy: Strategy, spec: str = DEFAULT, *, down: str = "identity") -> Strategy:
    """Return the strategy with compressed updates: a copy whose class is a subclass of the given one's.

    `spec` is the codec of the updates, with error feedback where it needs it. `down` is that of the models on their
    way to the clients: "identity", "fp16" or "int8". `UsageError` for a strategy that cannot work on decoded updates,
    `CodecError` for a codec that cannot.
    """
    require_message_strategy(strategy)
    encoder(spec, UplinkSection(codec=spec), Layout.of({"any": (64,)}))
    if down not in DOWN:
        raise CodecError(f"down = {down!r}", why="it has no state on either end", hint=" or ".join(map(repr, DOWN)))
    kind = type(strategy)
    made: Any = object.__new__(type(f"Compressed{kind.__name__}", (Compressing, kind), {}))
    vars(made).update(vars(strategy), _spec=spec, _down=down, _sent={}, _reached={})
    compressed_one: Strategy = made
    return compressed_one


def require_message_strategy(strategy: Any) -> None:
    """Raise `UsageError` for what is no strategy of Flower's message API, or for one that needs the exact arrays."""
    name = type(strategy).__name__
    if not isinstance(strategy, Strategy):
        legacy = any(kind.__module__.startswith("flwr.server.strategy") for kind in type(strategy).__mro__)
        raise UsageError(
            f"{name} is no strategy of Flower's message API",
            why="it is one of flwr.server.strategy, which gets whole parameters" if legacy else "wrap() takes one",
            hint="from flwr.serverapp.strategy import FedAvg",
        )
    if "Xgb" in name:
        raise UsageError(f"{name} sends trees", why="a codec compresses float arrays", hint="use it without wrap()")
    if "ClientSide" in name:
        raise UsageError(
            f"{name} clips on the clients",
            why="a decoded update may be longer than the norm to which the client clipped it",
            hint=name.replace("ClientSide", "ServerSide"),
        )
