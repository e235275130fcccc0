"""Tables of what secure aggregation costs, from docs/evidence/secure-{sum,round,support}.json alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from textwrap import fill
from typing import Any

from docs.generate.evidence import WIDE, Row, measured, paragraph, read
from docs.generate.table import table

SHARED = "with other work on the same two cores"
RATIOS = {  # figure -> its goal, its meaning
    "client_cpu_ratio": (10, "processor time of a client, theirs over ours without rotation"),
    "server_cpu_ratio": (10, "processor time of the aggregator, theirs over ours without rotation"),
    "server_cpu_ratio_drop": (None, "the same with 30 % drop-outs"),
    "bytes_ratio_dense": (5, "uplink bytes of a client, theirs (int64) over ours (8 bits, with rotation)"),
    "bytes_ratio_modulus": (None, "the same, if theirs were the 4 bytes that their modulus needs"),
    "bytes_ratio_support": (40, "the same with a support of 0.1 and int64"),
}
OPTIONS = {  # option -> what its values are called, its value in the plain case
    "bits": ("{} bits", 8), "support": ("support {:g}", 1.0), "rotate": ("rotation in blocks of {}", 0),
    "post_quantum": ("ML-KEM", False), "dropout": ("{:.0%} drop-outs", 0.0),
}  # fmt: skip
COSTS = ("client_cpu_s", "server_cpu_s", "uplink_bytes")
LANE_BITS = 17  # from here on a lane has 32 bits
PEAKS = {
    "server_peak_models": (4, "most memory of a phase on the aggregator, in models of float32"),
    "client_peak_models": (4, "the same on a client"),
}
GOALS = {"share": "below 1000"}  # a client answers within a second while it trains
PHASES = {
    "advertise": "until the advertisements of all clients: the model is downloaded and loaded meanwhile",
    "share": "until all shares; clients train meanwhile",
    "masked": "until all masked vectors, without the wait",
    "agree": "until all signatures",
    "unmask": "until all disclosed shares",
    "sum": "until the masks are removed",
}


def secure_work_part() -> str:
    """Return the figures of one round's work, compared with those of Flower's SecAgg+."""
    document = read("secure-sum-figures")
    figures, rows = document["figures"], document["rows"]
    first = rows[0]
    size = f"{first['params'] / 1e6:.2f} M parameters, {first['clients']} clients"
    repeats = f"medians of {min(row['repeats'] for row in rows)} runs"
    header = ("figure", "measured", "goal", "what it is")
    lines = [*_lines(figures, RATIOS, "at least"), *_lines(figures, PEAKS, "at most")]
    how = measured(document, "with nothing else running", size, repeats)
    return "\n\n".join((paragraph(WORK), how, table(header, lines), _mask_speed(first)))


def secure_options_part() -> str:
    """Return by how much each option of a plan changes the work of a round."""
    crossed = read("secure-sum-crossed")
    first = crossed["rows"][0]
    size = f"{first['params'] / 1e6:.2f} M parameters, {first['clients']} clients"
    repeats = f"medians of {min(row['repeats'] for row in crossed['rows'])} runs"
    how = measured(crossed, f"at a load of 8 to 17 {SHARED.removeprefix('with other work ')}", size, repeats)
    return "\n\n".join((paragraph(OPTIONS_TEXT), how, _factors(crossed["rows"])))


def _factors(rows: Sequence[Row]) -> str:
    """Return by how much each value of an option multiplies the costs, over all cases of the other options."""
    ours = {tuple(row[name] for name in OPTIONS): row for row in rows if row["system"] == "thinwire"}
    lines = []
    for place, (told, plain) in enumerate(OPTIONS.values()):
        for value in sorted({case[place] for case in ours} - {plain}, key=lambda one: abs(one - plain)):
            pairs = [(row, ours[(*case[:place], plain, *case[place + 1 :])])
                     for case, row in ours.items() if case[place] == value]  # fmt: skip
            factors = (sorted(row[cost] / base[cost] for row, base in pairs) for cost in COSTS)
            spread = [f"{median(each):.2f} ({each[0]:.2f} to {each[-1]:.2f})" for each in factors]
            lines.append((told.format(value), str(len(pairs)), *spread))
    return table(("option", "cases", "client's processor", "aggregator's processor", "uplink bytes"), lines)


def secure_cohorts_part() -> str:
    """Return one round's work for several cohorts and models, compared with Flower's SecAgg+."""
    document = read("secure-sum")
    return "\n\n".join((measured(document, SHARED), _ratios(document["rows"])))


def secure_cases() -> str:
    """Return all cases for several cohorts and models, one option at a time."""
    document = read("secure-sum")
    return "\n\n".join(("## All cases", paragraph(CASES_TEXT), measured(document, SHARED), _cases(document["rows"])))


def secure_summary() -> str:
    """Return the figures of all benchmarks that have a goal, in one table."""
    work, rounds, support = read("secure-sum-figures")["figures"], read("secure-round"), read("secure-support")
    first, task = read("secure-sum-figures")["rows"][0], support["rows"][0]["task"]
    size = f"{first['params'] / 1e6:.2f} M parameters, {first['clients']} clients"
    rows = [
        ("processor time of a client", f"{work['client_cpu_ratio']:.3g} times less", "at least 10", FLOWER, size),
        ("processor time of the aggregator", f"{work['server_cpu_ratio']:.3g} times less", "at least 10", FLOWER, size),
        ("uplink bytes of a client", f"{work['bytes_ratio_dense']:.3g} times fewer", "at least 5", FLOWER, size),
        ("uplink bytes of a client, support 0.1", f"{work['bytes_ratio_support']:.3g} times fewer", "at least 40",
         FLOWER, size),
        ("time of a round", f"{rounds['figures']['round_slowdown']:.3f} times as long", "at most 1.15",
         "a round without secure aggregation", "8 clients, 5 s of training"),
        ("accuracy, support 0.1 with FedAdam", f"{support['figures'][f'adam_gap {task}']:.4f} lower", "at most 0.01",
         "support 1", f"`{task}`, {support['rows'][0]['rounds']} rounds"),
    ]  # fmt: skip
    return table(("what", "measured", "goal", "compared with", "setting"), rows)


def _mask_speed(row: Row) -> str:
    """Return how fast a client expands its masks, by its whole work of a case without rotation."""
    width = 8 * row["uplink_bytes"] / row["params"]  # in bits, with some bytes of the other phases
    each = row["params"] * (2 if width < LANE_BITS else 4)  # its self mask, and one for each other client
    seconds, streams = row["client_cpu_s"], row["clients"]
    said = (
        f"Masking runs at the speed of AES, not at that of a memory copy: a client expands {streams} streams of "
        f"{each / 1e6:.0f} MB in {seconds:.2f} s of processor time, its other work included, which is "
        f"{streams * each / seconds / 1e9:.1f} GB a second."
    )
    return fill(said, WIDE)


def _ratios(rows: Sequence[Row]) -> str:
    """Return their processor time over ours for each case that both have."""
    ours, theirs = (
        {
            (row["params"], row["clients"], row["dropout"]): row
            for row in rows
            if row["system"] == system and _plain(row)
        }
        for system in ("thinwire", "flwr")
    )
    header = ("parameters", "clients", "drop-outs", "client, theirs over ours", "aggregator, theirs over ours")
    lines = [
        (
            f"{params / 1e6:.2f} M", str(clients), f"{dropout:.0%}",
            *(f"{row[name] / ours[params, clients, dropout][name]:.1f}" for name in ("client_cpu_s", "server_cpu_s")),
        )
        for (params, clients, dropout), row in theirs.items()
    ]  # fmt: skip
    return table(header, lines)


def _plain(row: Row) -> bool:
    return (row["bits"], row["support"], row["rotate"], row["post_quantum"]) == (8, 1, 0, False)


def _lines(figures: Mapping[str, float], told: Mapping[str, Any], bound: str) -> list[tuple[str, ...]]:
    return [
        (f"`{name}`", f"{figures[name]:.3g}", "" if goal is None else f"{bound} {goal}", meaning)
        for name, (goal, meaning) in told.items()
        if name in figures
    ]


def _cases(rows: Sequence[Row]) -> str:
    header = (
        "who",
        "parameters",
        "clients",
        "case",
        "client ms",
        "aggregator ms",
        "uplink MB",
        "client models",
        "server models",
    )
    lines = [
        (
            "**Thinwire**" if row["system"] == "thinwire" else "Flower", f"{row['params'] / 1e6:.2f} M",
            str(row["clients"]), _case(row),
            *(f"{1000 * row[name]:.0f}" for name in ("client_cpu_s", "server_cpu_s")),
            f"{row['uplink_bytes'] / 1e6:.2f}",
            *(f"{row[name]:.2f}" for name in ("client_peak_models", "server_peak_models")),
        )
        for row in rows
    ]  # fmt: skip
    return table(header, lines)


def _case(row: Row) -> str:
    told = [f"{row['bits']} bits"] if row["system"] == "thinwire" else []
    told += [f"support {row['support']:g}"] * (row["support"] != 1)
    told += [f"rotation {row['rotate']}"] * bool(row["rotate"]) + ["ML-KEM"] * bool(row["post_quantum"])
    return ", ".join([*told, *[f"{row['dropout']:.0%} drop-outs"] * bool(row["dropout"])]) or "plain"


def secure_round_part() -> str:
    """Return the seconds of rounds with and without secure aggregation, and those of the phases."""
    document = read("secure-round")
    figures, rows = document["figures"], document["rows"]
    plain, secure = ([row for row in rows if row["secure"] is one] for one in (False, True))
    counted = f"{len(plain)} rounds without and {len(secure)} with secure aggregation, by turns"
    margins = sorted(row["share_margin_s"] for row in secure)
    told = [
        ("`round_slowdown`", f"{figures['round_slowdown']:.3f}", "at most 1.15", "`secure_s` over `plain_s`"),
        ("`plain_s`", _around(plain), "", "the median plain round (the shortest to the longest)"),
        ("`secure_s`", _around(secure), "", "the same with secure aggregation"),
        ("`share_margin_s`", f"{margins[0]:.2f} s", "above 0",
         f"by how much `share` ended before the wait could, in the worst round (median {median(margins):.2f} s)"),
        ("`requests_secure`", f"{figures['requests_secure']:.3g}", "7 without the model's download",
         f"requests of a client in a round: {_routes(secure)}"),
        ("`requests_plain`", f"{figures['requests_plain']:.3g}", "", f"the same without: {_routes(plain)}"),
    ]  # fmt: skip
    phases = [
        (
            f"`{name}`" if name != "sum" else "the sum",
            f"{1000 * figures[f'{name}_s']:.0f}",
            GOALS.get(name, ""),
            meaning,
        )
        for name, meaning in PHASES.items()
    ]
    return "\n\n".join((
        measured(document, SHARED, counted),
        table(("figure", "measured", "goal", "what it is"), told),
        table(("phase", "ms", "goal", "what the time is, from the close of the phase before"), phases),
    ))  # fmt: skip


def _around(rows: Sequence[Row]) -> str:
    seconds = [row["seconds"] for row in rows]
    return f"{median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"


def _routes(rows: Sequence[Row]) -> str:
    """Return the requests of the median round by route."""
    names = sorted({name for row in rows for name in row["routes"]})
    return ", ".join(f"{median(row['routes'].get(name, 0.0) for row in rows):g} `{name}`" for name in names)


def secure_support_part() -> str:
    """Return what a support of 0.1 costs in accuracy."""
    document = read("secure-support")
    figures, rows = document["figures"], document["rows"]
    lines = []
    for task in dict.fromkeys(row["task"] for row in rows):
        own = [row for row in rows if row["task"] == task]
        for arm in dict.fromkeys(row["arm"] for row in own):
            values = [row["accuracy"] for row in own if row["arm"] == arm]
            gap = f"{figures[f'{arm}_gap {task}']:+.4f}" if f"{arm}_gap {task}" in figures else ""
            error = figures.get(f"{arm}_gap_error {task}")
            cells = f"{sum(values) / len(values):.4f}", gap + (f" ± {error:.4f}" if error is not None else "")
            lines.append((f"`{task}`, {own[0]['rounds']} rounds", ARMS[arm], str(len(values)), *cells))
    header = ("task", "run", "seeds", "accuracy", "gap to dense (goal: at most 0.01)")
    return "\n\n".join((measured(document, "simulated"), table(header, lines)))


ARMS = {
    "dense": "support 1",
    "support": "support 0.1",
    "no_residual": 'support 0.1, `feedback = "none"`',
    "momentum": 'the same with `[server] optimizer = "fedavgm"`, momentum 0.8',
    "adam": 'the same with `[server] optimizer = "fedadam"`, lr 0.03, momentum 0.8',
}


FLOWER = "Flower's SecAgg+"
WORK = (
    "The benchmark runs the steps of one client and of the aggregator in one round, and the steps of Flower's SecAgg+ "
    "on the same vectors. A ratio is theirs over ours."
)
OPTIONS_TEXT = (
    "A row compares each case that has the option with the case that differs in this option alone. Its cells are "
    "factors on the cost: the median over all such pairs (the least to the most)."
)
CASES_TEXT = (
    "Each row is one round: processor time of one client and of the aggregator, uplink bytes of one client, and the "
    "most memory of a phase, in models of float32."
)
SECTIONS: dict[str, Callable[[], str]] = {
    "Summary": secure_summary,
    "Processor time, memory and bytes of a round": secure_work_part,
    "Cost of each option": secure_options_part,
    "Larger cohorts and a smaller model": secure_cohorts_part,
    "Time of a round": secure_round_part,
    "Accuracy with a support": secure_support_part,
}


def secure_part() -> str:
    """Return the tables of the page, without that of all cases."""
    return "\n\n".join(f"## {title}\n\n{part()}" for title, part in SECTIONS.items())
