"""Tables of differential privacy: audits, accuracy against epsilon, samplers, from docs/evidence/*.json alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from docs.generate.evidence import Row, measured, read
from docs.generate.table import table
from thinwire.core.formatting import counted

SHARED = "with other work on the same two cores"
NOISE = {1.0: "as claimed", 0.5: "half", 0.0: "none"}
MUST = {1.0: "below the claim", 0.5: "above it", 0.0: "above it"}
SUMS = {
    "central": "`PrivateSum`",
    "distributed": "`PrivateLattice`, fewest honest clients",
    "one": "`PrivateLattice`, the same, all canaries in one sum",
}
ARMS = {  # arm of the rows -> what it is
    "central": "central",
    "amplified": "central, with amplification by sampling",
    "distributed": "distributed",
    "distributed 0.25": "distributed, `[secure] support = 0.25`",
    "flower": "Flower, central",
}
GAPS = {  # figure -> its goal, what it is
    "distributed_gap": (0.01, "central minus distributed"),
    "peer_gap": (0.0, "Flower minus central"),
    "support_gap": (None, "distributed minus the same with a support of 0.25"),
    "amplification_gain": (None, "with amplification minus central"),
}
SIGMAS, GOAL_NS = (16, 256, 4096), 30


def audit_part() -> str:
    """Return what the audit showed of epsilon."""
    document = read("privacy-audit")
    rows: Sequence[Row] = document["rows"]
    sums = [row for row in rows if row["attack"] != "released models"]
    runs = [row for row in rows if row["attack"] == "released models"]
    lines = [
        (_sum(row), NOISE[row["noise"]], f"{row['right']} of {row['guesses']}",
         f"{row['claimed_epsilon']:g}", f"{row['audited_lower']:.2f}", MUST[row["noise"]])
        for row in sums
    ]  # fmt: skip
    header = ("sum", "noise", "right guesses", "claimed epsilon", "epsilon is at least (95 %)", "must be")
    canaries = f"{sums[0]['canaries']:,}".replace(",", " ")
    about = measured(document, SHARED, f"{canaries} canaries for each row of sums, delta {sums[0]['delta']:g}")
    attacked = [
        (row["mode"], NOISE[row["noise"]], f"{row['canaries']}, {row['rounds']}",
         f"{row['right']} of {row['guesses']}", "" if row["claimed_epsilon"] is None else f"{row['claimed_epsilon']:g}",
         f"{row['audited_lower']:.2f}")
        for row in runs
    ]  # fmt: skip
    more = table(
        ("run", "noise", "clients, rounds", "right guesses", "claimed epsilon", "epsilon is at least (95 %)"), attacked
    )
    released = f"The released models of runs of `examples/digits`, delta {runs[0]['delta']:g}:"
    return "\n\n".join((about, table(header, lines), released, more))


def _sum(row: Row) -> str:
    return SUMS["one" if row["mode"] == "distributed" and row["attack"] == "one sum" else row["mode"]]


def utility_part(name: str = "privacy-utility") -> str:
    """Return accuracy against epsilon of one document, and the gaps."""
    document = read(name)
    rows, figures = document["rows"], document["figures"]
    epsilons = sorted({row["epsilon"] for row in rows if row["epsilon"] is not None})
    lines = [
        (told, *(_around(figures, f"accuracy{{}} {arm}, {epsilon:g}") for epsilon in epsilons))
        for arm, told in ARMS.items()
        if any(row["arm"] == arm for row in rows)
    ]
    lines.append(("no privacy", *("" for _ in epsilons[1:]), _around(figures, "accuracy{} none")))
    work = [_work(rows, epsilon) for epsilon in epsilons]
    gaps = [
        (f"`{name}`", f"{figures[name]:+.4f}", "" if goal is None else f"at most {goal:g}", meaning,
         *(_around(figures, f"{name}{{}} {epsilon:g}", "+") for epsilon in epsilons))
        for name, (goal, meaning) in GAPS.items()
        if name in figures
    ]  # fmt: skip
    seeds, draws = (len({row[name] for row in rows}) for name in ("seed", "draw"))
    names = tuple(f"epsilon {epsilon:g}" for epsilon in epsilons)
    return "\n\n".join((
        measured(document, "in one process", f"delta {rows[0]['delta']:g}",
                 f"{seeds} seeds with {counted(draws, 'draw')} of the noise each",
                 "mean ± standard error over the seeds"),
        table(("accuracy", *names), [*lines, ("rounds, clip", *work)]),
        table(("figure", "largest", "goal", "what it is", *names), gaps),
    ))  # fmt: skip


def _around(figures: Mapping[str, Any], name: str, sign: str = "") -> str:
    """Return a mean with its standard error; `name` has a place for "_error"."""
    if (mean := figures.get(name.format(""))) is None:
        return ""
    error = figures.get(name.format("_error"))
    return f"{mean:{sign}.4f}" + ("" if error is None else f" ± {error:.4f}")


def _work(rows: Sequence[Row], epsilon: float) -> str:
    row = next(row for row in rows if row["epsilon"] == epsilon)
    return f"{row['rounds']}, {row['clip']:g}"


def sampler_part() -> str:
    """Return what a draw of the noise takes."""
    document = read("sampler")
    rows = document["rows"]
    goals = {("discrete_gaussian", sigma) for sigma in SIGMAS} | {("skellam", sigma) for sigma in SIGMAS}
    lines = [
        (row["distribution"].replace("_", " "), f"{row['sigma']:g}", f"{row['ns_per_draw']:.1f}",
         f"at most {GOAL_NS}" if (row["distribution"], row["sigma"]) in goals else "",
         f"{row['numpy_ns_per_draw']:.0f}", f"{row['build_ms']:.0f}", f"{row['table_bytes'] / 1e6:.2f}",
         f"{row['distance']:.1e}")
        for row in rows
    ]  # fmt: skip
    header = (
        "distribution", "sigma", "ns a draw", "goal", "ns without the kernel", "table ms", "table MB", "distance",
    )  # fmt: skip
    path = f"one thread, {rows[0]['path']}, AES included, processor time"
    return "\n\n".join((measured(document, SHARED, path), table(header, lines)))


SECTIONS: dict[str, Callable[[], str]] = {
    "What an attacker shows": audit_part,
    "Accuracy against epsilon": utility_part,
    "Accuracy against epsilon, of a language model": partial(utility_part, "privacy-utility-code_lm"),
    "Time of a draw": sampler_part,
}


def privacy_part() -> str:
    """Return all tables of the page."""
    return "\n\n".join(f"## {title}\n\n{part()}" for title, part in SECTIONS.items())


PARTS: dict[str, Callable[[], str]] = {"privacy": privacy_part}
