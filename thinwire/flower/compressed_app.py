"""Compresses the updates of a plain Flower app: `mod` on its clients, `wrap` around its strategy, and nothing else.

The app stays Flower's: its own ClientApp, strategy and SuperLink, no plan of ours.

    app = ClientApp(mods=[thinwire.flower.mod()])
    strategy = thinwire.flower.wrap(FedAvg(), "topk(0.01) > int8 > rice")

In a training round the strategy's messages carry the spec, so both ends agree. The mod sends the difference between the
arrays that the app returns and those that it got, encoded with error feedback where the codec needs it. The strategy
decodes it, adds it to what that node was sent, and hands the sum to the inner strategy. Replies to other messages,
records of metrics, and arrays that are no floats pass as they are.

**Which residual counts.** The strategy numbers its training rounds. `Context.state` has the state of the codec before
and after the last update, and the number of its round. The next message says the number of the last update that was
decoded. If it is not the number in the context, the update was lost, and the state before it counts. So a message that
is answered twice gives the same bits twice. A SuperNode that was restarted has no state: it begins without a residual,
and what the residual had is lost. So does a node whose state is that of another strategy of the app, by its `by`.

Invariant: with the codec `identity` the strategy gets the bits that it would get without us. Other codecs add the
decoded update to the sent arrays in float32, so a float64 array comes back with the precision of float32.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from thinwire.aggregation.plan_codecs import encoder
from thinwire.compression import parse
from thinwire.core.errors import BadPayload, CodecError, ThinwireError, UsageError
from thinwire.core.layout import Layout
from thinwire.core.plan_schema import UplinkSection
from thinwire.core.prng import Key, derive
from thinwire.core.types import State
from thinwire.flower.float_arrays import Floats, bound

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict  # isort: skip
from flwr.serverapp.strategy import Strategy  # isort: skip

if TYPE_CHECKING:
    from flwr.serverapp import Grid

log = logging.getLogger("thinwire.flower")

OURS: Final = "thinwire"  # the ConfigRecord in a message and in `Context.state`
BEFORE: Final = "thinwire.before"  # ArrayRecords in `Context.state`
AFTER: Final = "thinwire.after"
# An empty ArrayRecord in a reply with frames. A mod of Flower that comes before ours gets two records then, and fails.
# Else it might clip the arrays that are left and add its noise to them alone.
ENCODED: Final = "thinwire.encoded"
DEFAULT: Final = "topk(0.01) > int8 > rice"
DOWN: Final = ("identity", "fp16", "int8")
CLIPPING: Final = "clipping_norm"  # Flower's key for its client-side clipping mods
SECAGG: Final = "secaggplus_configs"  # Flower's record for its secaggplus_mod
UNKNOWN: Final = 0  # Flower's code of an error that is none of its own

Call = Callable[[Message, Context], Message]


def mod(spec: str = "") -> Callable[[Message, Context, Call], Message]:
    """Return the first of a ClientApp's mods: it compresses the arrays of replies to training messages.

    The strategy's messages name the codec. With `spec`, the client accepts only messages that name the same one, and
    raises `UsageError` for others. Without `wrap` around the strategy the mod changes no reply.
    """
    accepted = parse(spec).spec if spec else ""

    def compress(message: Message, context: Context, call_next: Call) -> Message:
        if message.metadata.message_type.partition(".")[0] != "train":
            return call_next(message, context)
        require_plain(message.content)
        if OURS not in message.content.config_records:
            return call_next(message, context)
        told = message.content.config_records[OURS]
        expected, number, reached, by = _terms(told)
        if accepted and accepted != expected:
            raise UsageError(
                f"this client compresses with {spec}, and the strategy expects {expected}",
                why="the strategy decodes with its own codec",
                hint=f"mod() without a codec, or wrap(strategy, {spec!r})",
            )
        arrays = received(message.content, told)
        del message.content[OURS]
        message.content.update(arrays)
        base = {name: ArrayRecord(dict(record)) for name, record in arrays.items()}  # an app may change its message
        node, run = message.metadata.dst_node_id, Key(message.metadata.run_id)
        reply = call_next(message, context)
        if reply.has_content() and expected != "identity":
            terms = UpdateTerms(number, reached, by, derive(run, "flower", node, number, by))
            compress_reply(reply.content, base, expected, terms, context)
        return reply

    return compress


@dataclass(frozen=True)
class UpdateTerms:
    """Holds what one update depends on beside its arrays: its number, and the key of its codec's random draws.

    `reached` is the number of the node's last update that the strategy decoded, 0 if there is none, and `by` the id of
    that strategy.
    """

    number: int
    reached: int
    by: str
    key: Key


def _terms(told: ConfigRecord) -> tuple[str, int, int, str]:
    try:
        return str(told["spec"]), int(told["number"]), int(told["reached"]), str(told["by"])  # type: ignore[arg-type]
    except (LookupError, TypeError, ValueError) as error:
        raise BadPayload("a message that does not say its codec, its number and the last number") from error


def require_plain(content: RecordDict) -> None:
    """Raise `UsageError` for a message of an app whose other parts need the exact arrays of each client."""
    if SECAGG in content.config_records:
        raise UsageError(
            "secaggplus_mod does not go with compressed updates",
            why="it masks whole arrays, and a masked array has nothing to compress",
            hint="a plan with [secure], which compresses under the masks, or the app without mod()",
        )
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
    if told.get("down") not in DOWN:
        raise BadPayload(f"arrays that came as {told.get('down')!r}", why=f"it is none of {', '.join(DOWN)}")
    floats, frames = Floats.read(told), _frames(told["frames"])
    if floats.size > sum(map(len, frames)):
        raise BadPayload(
            f"{sum(map(len, frames))} bytes of frames", why=f"{floats.size} values take a byte each or more"
        )
    return floats.put(records, floats.decode(str(told["down"]), frames))


def compress_reply(
    content: RecordDict, base: Mapping[str, ArrayRecord], spec: str, terms: UpdateTerms, context: Context
) -> None:
    """Replace the float arrays of a reply by their encoded difference to `base`, and keep the state in the context.

    A float array that the message did not have, or had in another shape, stays as it is, and the log names it.
    """
    records = dict(content.array_records)
    floats = Floats.matching(records, base)
    if whole := [one[1] for one in set(Floats.of(records).places) - set(floats.places)]:
        log.warning("float arrays %s are sent whole: the message had none of that shape", sorted(whole))
    if not floats.layout.size:
        return
    state = _state(context, terms)
    change = floats.vector(records)
    change -= floats.vector(base)
    codec = encoder(spec, UplinkSection(codec=spec), floats.layout)
    frames, after = list[bytes](), dict[str, np.ndarray[Any, Any]]()
    for segment in floats.layout.model_segments:
        fresh = codec.init(segment.index)
        held = {name: state.get(f"{segment.index}/{name}", array) for name, array in fresh.items()}
        held = {name: held[name] if held[name].shape == array.shape else array for name, array in fresh.items()}
        encoded = codec.encode(change[segment.span], held, terms.key, segment.index)
        frames.append(bytes(encoded.payload))
        after |= {f"{segment.index}/{name}": array for name, array in encoded.state.items()}
    context.state[BEFORE] = _record(state)
    context.state[AFTER] = _record(after)
    context.state[OURS] = ConfigRecord({"number": terms.number, "by": terms.by})
    for name, record in records.items():
        content[name] = floats.others(name, record)
    content[OURS], content[ENCODED] = ConfigRecord({"frames": frames, **floats.told()}), ArrayRecord()


def _state(context: Context, terms: UpdateTerms) -> State:
    """Return the codec's state for the next update: that after the last update if it was decoded, else before it."""
    last = context.state.config_records.get(OURS)
    if last is None or last.get("by") != terms.by:
        return {}
    kept = context.state.array_records[AFTER if last["number"] == terms.reached else BEFORE]
    return {name: array.numpy() for name, array in kept.items()}


def _record(state: State) -> ArrayRecord:
    return ArrayRecord({name: Array(np.ascontiguousarray(array)) for name, array in state.items()})


def _frames(given: Any) -> list[bytes]:
    if not isinstance(given, list) or not all(isinstance(one, bytes) for one in given):
        raise BadPayload("a record without frames")
    return given


class Compressing:
    """Encodes the messages of a training round and decodes their replies: `wrap` puts it before a strategy's class."""

    uplink_payload: int  # bytes of the frames of all decoded updates
    uplink_dense: int  # bytes of the same updates in float32
    _spec: str
    _down: str
    _sent: dict[int, tuple[Message, dict[str, ArrayRecord]]]  # node -> its message, and the arrays that its app got
    _by: str  # which strategy numbers the rounds: an app may have several
    _number: int  # of the training round: it never goes back, also if the strategy is started twice
    _reached: dict[int, int]  # node -> number of its last update that was decoded

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Return the strategy's messages, each with the spec and the number of the node's last update that came.

        A list, as of Flower's own strategies: a grid reads it more than once.
        """
        self._sent.clear()
        self._number += 1
        messages = list(super().configure_train(server_round, arrays, config, grid))  # type: ignore[misc]
        made = list[Message]()
        ways: dict[int, tuple[dict[str, Any], RecordDict]] = {}  # of each content: several messages share one
        for message in messages:
            content = message.content
            require_plain(content)
            if id(content) not in ways:
                ways[id(content)] = self._down_of(content)
            base, down = ways[id(content)]
            node = message.metadata.dst_node_id
            ours = ConfigRecord(dict(down.config_records.get(OURS, {})))
            ours["spec"], ours["number"], ours["reached"] = self._spec, self._number, self._reached.get(node, 0)
            ours["by"] = self._by
            about = message.metadata
            sent = Message(
                RecordDict({**down, OURS: ours}), node, about.message_type,
                ttl=about.ttl, group_id=about.group_id, dst_task_id=about.dst_task_id,
            )  # fmt: skip
            self._sent[node] = sent, base
            made.append(sent)
        return made

    def _down_of(self, content: RecordDict) -> tuple[dict[str, ArrayRecord], RecordDict]:
        """Return the arrays that the app will get, and the content that carries them."""
        records = dict(content.array_records)
        floats = Floats.of(records)
        if self._down == "identity" or not floats.layout.size:
            return records, content
        codec, values = bound(self._down, floats.layout), floats.vector(records)
        key = derive(Key(0), "flower_down", self._by, self._number)  # other draws in each run and strategy
        frames = [
            bytes(codec.encode(values[one.span].copy(), codec.init(one.index), key, one.index).payload)
            for one in floats.layout.model_segments
        ]
        rest = {name: floats.others(name, record) for name, record in records.items()}
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
            if node not in self._sent:
                log.warning("the update of node %s is left out: it answers no message of this round", node)
                continue
            sent, base = self._sent[node]
            try:
                yield self._whole(reply, node, base)
            except (ThinwireError, LookupError, TypeError, ValueError) as error:
                reason = f"the update of node {node} is left out: {error}"
                log.warning(reason)
                yield Message(Error(UNKNOWN, reason), reply_to=sent)

    def _whole(self, reply: Message, node: int, base: Mapping[str, ArrayRecord]) -> Message:
        """Return a reply with whole arrays; raise for one whose frames are not those of the arrays in `base`."""
        told = reply.content.config_records[OURS]
        floats = Floats.read(told)
        if floats != floats.checked(base):
            raise BadPayload("an update with float arrays that its message did not have")
        values = floats.vector(base)
        frames = _frames(told["frames"])
        values += floats.decode(self._spec, frames)
        made = floats.put(reply.content.array_records, values)
        self._reached[node] = self._number
        self.uplink_payload += sum(map(len, frames))
        self.uplink_dense += values.nbytes
        del reply.content[OURS]
        reply.content.pop(ENCODED, None)
        reply.content.update(made)
        return reply


def wrap(strategy: Strategy, spec: str = DEFAULT, *, down: str = "identity") -> Strategy:
    """Return the strategy with compressed updates: a copy whose class is a subclass of the given one's.

    `spec` is the codec of the updates, with error feedback where it needs it. `down` is that of the models on their
    way to the clients: "identity", "fp16" or "int8". The attributes `uplink_payload` and `uplink_dense` of the returned
    strategy count the bytes of the decoded updates, and those of the same updates in float32. `UsageError` for a
    strategy that cannot work on decoded updates, `CodecError` for a codec that cannot.
    """
    require_message_strategy(strategy)
    encoder(spec, UplinkSection(codec=spec), Layout.of({"any": (64,)}))
    if down not in DOWN:
        raise CodecError(
            f"down = {down!r}",
            why="the models are sent with a codec that keeps no state",
            hint=" or ".join(map(repr, DOWN)),
        )
    kind = type(strategy)
    made: Any = object.__new__(type(f"Compressed{kind.__name__}", (Compressing, kind), {}))
    vars(made).update(vars(strategy), _spec=parse(spec).spec, _down=down, _sent={}, _number=0, _reached={})
    vars(made).update(_by=secrets.token_hex(8), uplink_payload=0, uplink_dense=0)
    compressed_one: Strategy = made
    return compressed_one


def require_message_strategy(strategy: Any) -> None:
    """Raise `UsageError` for what is no strategy of Flower's message API, or for one that needs the exact arrays."""
    if isinstance(inner := getattr(strategy, "strategy", None), Strategy):  # of Flower's wrappers for privacy
        require_message_strategy(inner)
    name = type(strategy).__name__
    if isinstance(strategy, type):
        called = strategy.__name__
        raise UsageError(f"{called} is a class", why="wrap() takes a strategy", hint=f"wrap({called}(), ...)")
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
