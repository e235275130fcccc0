"""What SCAFFOLD and FedDyn cannot be combined with: both ends remember what each device sent, to the last frame."""

from __future__ import annotations

from collections.abc import Iterator

from thinwire.core.all_sections import Sections
from thinwire.core.check_codecs import CodecBook
from thinwire.core.errors import CodecError
from thinwire.core.refusal import Refusal

FEDAVG = '[run] algorithm = "fedavg"'


def algorithm_refusals(plan: Sections, codecs: CodecBook) -> Iterator[Refusal]:
    """Of fedavg nothing but a key that is another's."""
    run = plan.run
    if run.algorithm != "feddyn" and run.alpha != type(run).model_fields["alpha"].default:
        yield Refusal(
            f"[run] alpha = {run.alpha:g} with algorithm = {run.algorithm!r}", "it is feddyn's",
            '[run] algorithm = "feddyn", or leave alpha out',
        )  # fmt: skip
    if run.algorithm == "fedavg":
        return
    yield from _never(plan)
    if run.algorithm == "scaffold":
        yield from _scaffold(plan, codecs)
    else:
        yield from _feddyn(plan)


def _never(plan: Sections) -> Iterator[Refusal]:
    cohort, local, uplink = plan.cohort, plan.local, plan.uplink
    for given, what, why, hint in (
        (local.overlap is not None, "[local] overlap",
         "a device would be corrected by what was true before the updates that are still on their way", FEDAVG),
        (cohort.mode == "buffered", '[cohort] mode = "buffered"',
         "the mean is over all devices, and in a buffer the quicker ones stand more often", '[cohort] mode = "sync"'),
        (plan.secure.enabled, "[secure] enabled = true",
         "masks hide which device's sum moved, and a lost one could not be taken back", FEDAVG),
        (plan.privacy.mode != "off", f'[privacy] mode = "{plan.privacy.mode}"',
         "what is remembered of a device's data goes out again in every later round, and no ledger here counts that",
         FEDAVG),
        (uplink.feedback == "ef21", '[uplink] feedback = "ef21"',
         "both would remember what each device sent, and move the model by their own sum of it",
         '[uplink] feedback = "classic"'),
        (uplink.dgc or uplink.momentum > 0, "momentum correction in [uplink]",
         "it adds up gradients of one step, and correcting a device's drift is for many", "[local] momentum"),
        (local.durability == "exit", '[local] durability = "exit"',
         "a device that is killed would lose what the aggregator's mean goes on from", '[local] durability = "round"'),
        (cohort.late == "fold" and cohort.staleness_exponent > 0, "late updates that count less",
         "the aggregator's mean is right only while each update counts as much as the device took it to",
         '[cohort] late = "drop", or staleness_exponent = 0'),
    ):  # fmt: skip
        if given:
            yield Refusal(f"[run] algorithm = {plan.run.algorithm!r} with {what}", why, hint)


def _scaffold(plan: Sections, codecs: CodecBook) -> Iterator[Refusal]:
    if plan.local.optimizer != "sgd":
        yield Refusal(
            f"[run] algorithm = 'scaffold' with [local] optimizer = {plan.local.optimizer!r}",
            "a device's mean gradient is read from how far it went, which only sgd's steps tell",
            '[local] optimizer = "sgd", or [run] algorithm = "feddyn"',
        )
    for spec in dict.fromkeys([*plan.uplink.codecs, *plan.uplink.layers.values()]):
        try:
            codecs.parse(spec)
        except CodecError:
            continue  # it is refused by itself
        try:
            codecs.require_contraction(spec, "ef21")
        except CodecError:
            yield Refusal(
                f"[run] algorithm = 'scaffold' with {spec!r}",
                "control variates travel as differences, and each has to bring the aggregator nearer: "
                "this codec promises nothing of one call",
                "[uplink] codec = 'topk(0.05) > int8'",
            )


def _feddyn(plan: Sections) -> Iterator[Refusal]:
    for given, what, why, hint in (
        (plan.local.prox > 0, f"[local] prox = {plan.local.prox:g}", "alpha holds a device to the model already",
         "[run] alpha, and leave prox out"),
        (plan.local.partial, "[local] partial = true",
         "a device is taken to have gone as far as its own loss leads it, and not as far as the time allowed",
         "leave partial out, or fewer [local] steps"),
        (plan.local.steps == "auto", '[local] steps = "auto"',
         "a device is taken to have gone as far as its own loss leads it, and not as far as its speed allowed",
         "[local] steps = a number"),
        (plan.server.optimizer != "fedavg" or plan.server.lr != 1, "a server optimizer",
         "the paper's own step takes its place", "leave [server] optimizer and lr out"),
    ):  # fmt: skip
        if given:
            yield Refusal(f"[run] algorithm = 'feddyn' with {what}", why, hint)
