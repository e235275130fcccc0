"""Tables of what unequal devices and thin lines cost, from docs/evidence/*.json alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median, stdev
from typing import Any

from docs.generate.evidence import Row, measured, read
from docs.generate.table import table

VIRTUAL = "on a virtual clock, which does not see what else the machine does"
NEVER_S = 1e9  # stands for "not in this run"


def every(name: str) -> str:
    return f"every single run is in [{name}.json]({name}.json)"


def links_part() -> str:
    document = read("links")
    figures, rows = document["figures"], document["rows"]
    uplinks = list(dict.fromkeys(row["uplink"] for row in rows))
    lines = [
        ("the ladder of these four" if uplink == "ladder" else f"`{uplink}` for all", _seconds(figures, rows, uplink))
        for uplink in uplinks
    ]
    single = [uplink for uplink in uplinks if uplink != "ladder"]
    best = min(single, key=lambda uplink: float(figures[f"seconds {uplink}"]))
    each = [f"{one / own:.2f}" for one, own in zip(_of(rows, best), _of(rows, "ladder"), strict=True)]
    means = {
        "speedup": f"seconds of the best single codec, as it was found afterwards (`{best}`), over the ladder's; "
        f"median of {', '.join(each)}",
        "in_time_share": "of all assignments of the ladder's runs, those whose answer was there by the deadline",
    }
    goals = {"speedup": "1.0", "in_time_share": "0.95"}
    step_ms, encode_ms = (1000 * figures[name] for name in ("step_s", "encode_s"))
    costs = f"a step took {step_ms:.2f} ms and an encoding {encode_ms:.2f} ms{_given(figures)}"
    return "\n\n".join((
        measured(document, VIRTUAL, costs, every("links")),
        table(("uplink", "seconds to the target"), lines),
        table(
            ("figure", "measured", "goal", "what it is"),
            [(f"`{name}`", f"{figures[name]:.2f}", goals[name], means[name]) for name in goals],
        ),
    ))  # fmt: skip


def _given(figures: Mapping[str, float]) -> str:
    return " (measured before, alone on the machine)" if figures.get("costs_given") else ""


def _of(rows: Sequence[Row], uplink: str) -> list[float]:
    """Seconds of each seed; a large number where it never came."""
    return [row["seconds"] or NEVER_S for row in rows if row["uplink"] == uplink]


def _seconds(figures: Mapping[str, float], rows: Sequence[Row], uplink: str) -> str:
    never = sum(row["seconds"] is None for row in rows if row["uplink"] == uplink)
    return f"{figures[f'seconds {uplink}']:.0f}" + (f" (never on {never} of the seeds)" if never else "")


def overlap_part() -> str:
    document = read("overlap")
    figures, rows = document["figures"], document["rows"]
    rounds = {overlap: [row["seconds"] for row in rows if row.get("overlap") is overlap] for overlap in (False, True)}
    seeds = len({row["seed"] for row in rows if "seed" in row})
    line = f"lines of {figures['mbit_per_s']:.1f} Mb/s, shaped by {figures['shaped_by']}"
    work = f"{figures['steps']} steps a round; one run of each of {len(rounds[True])} rounds"
    goals = {"speedup": "", "ideal": "", "share_of_ideal": "0.85 on 2 cores", "cpu_busy": ""}
    gaps = {"accuracy_gap": "at most 0.005", "accuracy_gap_sparse": ""}
    return "\n\n".join((
        measured(document, "with nothing else running", line, work, every("overlap")),
        table(
            ("", "without", "with overlap"),
            [
                ("median round", f"{figures['round_s']:.2f} s", f"{figures['round_overlap_s']:.2f} s"),
                ("all rounds", f"{min(rounds[False]):.2f} to {max(rounds[False]):.2f} s",
                 f"{min(rounds[True]):.2f} to {max(rounds[True]):.2f} s"),
                ("computing, of the median", f"{figures['compute_s']:.2f} s", f"{figures['compute_overlap_s']:.2f} s"),
                ("transfer, of the median", f"{figures['transfer_s']:.2f} s", "behind it"),
                ("accuracy at the end", f"{figures['accuracy']:.4f}", f"{figures['accuracy_overlap']:.4f}"),
            ],
        ),
        table(
            ("figure", "measured", "goal"),
            [(f"`{name}`", f"{figures[name]:.2f}", goal) for name, goal in goals.items()]
            + [
                (f"`{name}`, {seeds} seeds", f"{figures[name]:.4f} ± {figures[f'{name}_error']:.4f}", goal)
                for name, goal in gaps.items()
                if f"{name}_error" in figures  # not in a document of before seeds
            ]
            + [(f"`{name}`", str(figures[name]).lower(), "") for name in ("cpu_bound", "decides")],
        ),
    ))  # fmt: skip


def flower_mod_part() -> str:
    """Return the figures of a plain Flower app before and after the two lines."""
    document = read("flower-mod")
    figures, rows = document["figures"], document["rows"]
    used = next(row for row in rows if "codec" in row)
    seeds = sum("accuracy" in row for row in rows) // 2
    rounds = max(row["round"] for row in rows if "round" in row)
    goals = {
        "uplink_bytes_ratio": "25", "uplink_payload_ratio": "", "total_bytes_ratio": "",
        "accuracy_gap": "at most 0.005",
        "seconds_ratio": "at most 0.8", "seconds_ratio_loopback": "at most 1.3",
    }  # fmt: skip
    means = {
        "uplink_bytes_ratio": "bytes on the devices' lines to the aggregator, before over after",
        "uplink_payload_ratio": "bytes of the updates alone, float32 over frames",
        "total_bytes_ratio": "bytes on the lines in both directions, before over after",
        "accuracy_gap": f"accuracy before minus accuracy after, simulated, {seeds} seed{'s' * (seeds > 1)}",
        "seconds_ratio": "median round after over before, lines of 20 Mb/s",
        "seconds_ratio_loopback": "median round after over before, on loopback",
    }
    return "\n\n".join((
        measured(document, "with other work on the machine", f"`{used['codec']}` up, `{used['down']}` down",
                 f"{rounds} rounds of each", every("flower-mod")),
        table(
            ("figure", "measured", "goal", "what it is"),
            [(f"`{n}`", f"{figures[n]:.3g}", goal, means[n]) for n, goal in goals.items() if n in figures],
        ),
    ))  # fmt: skip


def stragglers_part() -> str:
    document = read("stragglers")
    figures = document["figures"]
    rows: Sequence[Row] = [row for row in document["rows"] if not row.get("real")]
    real: Sequence[Row] = [row for row in document["rows"] if row.get("real")]
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    settings = {
        "one dead": [row for row in rows if row["dying"] and not row["exponent"]],
        "all alive": [row for row in rows if not row["dying"]],
        "one dead, `staleness_exponent = 0.5`": [row for row in rows if row["exponent"]],
    }
    costs = ", ".join(f"{1000 * figures[name]:.2f}" for name in ("step_s", "encode_s", "exchange_s")) + " ms"
    said = f"a step, encoding and an exchange took {costs}, drawn out {figures['stretch']:.0f} times{_given(figures)}"
    return "\n\n".join((
        measured(document, VIRTUAL, said, every("stragglers")),
        *(part for name, of in settings.items() for part in (f"{name[0].upper()}{name[1:]}:", _policies(of, policies))),
        """\
Seconds are medians over the seeds, accuracies means. "Never" would be within the run, which made a quarter more rounds
than waiting for all (the buffer twice as many); such a seed counts as 0 in the figures.""",
        table(("figure", "measured", "goal", "what it is"), _straggling(figures, policies[1:])),
        "The accuracy gap of each pair of seed and setting, with late answers in full:",
        table(("policy", "mean", "standard error", "least", "most"), _gaps(rows, policies[1:])),
        "Real processes:",
        _policies(real, list(dict.fromkeys(row["policy"] for row in real))),
    ))  # fmt: skip


def _policies(rows: Sequence[Row], policies: Sequence[str]) -> str:
    lines = []
    for policy in policies:
        of = [row for row in rows if row["policy"] == policy]
        never = sum(row["seconds"] is None for row in of)
        seconds = f"{median(row['seconds'] or NEVER_S for row in of):,.0f}" + f" (never on {never})" * bool(never)
        lines.append((
            policy, seconds, f"{fmean(row['accuracy'] for row in of):.3f}",
            f"{fmean(row['slow_accuracy'] for row in of):.3f}",
        ))  # fmt: skip
    return table(("policy", "seconds to the target", "accuracy", "on the slow client's own data"), lines)


def _gaps(rows: Sequence[Row], policies: Sequence[str]) -> list[tuple[str, ...]]:
    full = [row for row in rows if not row["exponent"]]
    of = {(row["policy"], row["dying"], row["seed"]): row["accuracy"] for row in full}
    pairs = sorted({(row["dying"], row["seed"]) for row in full})
    found = list[tuple[str, ...]]()
    for policy in policies:
        gaps = [of["waiting", *pair] - of[policy, *pair] for pair in pairs]
        error = stdev(gaps) / len(gaps) ** 0.5
        found.append((policy, f"{fmean(gaps):.4f}", f"{error:.4f}", f"{min(gaps):.4f}", f"{max(gaps):.4f}"))
    return found


STRAGGLING = {
    "speedup": (3, "seconds of waiting for all over those of the policy, one client dead; median of the seeds"),
    "speedup_all_alive": (2, "the same while nobody dies"),
    "accuracy_gap": (
        0.005,
        "what the policy loses of accuracy at as many aggregated updates (below 0: it gains), mean",
    ),
    "slow_client_gap": (None, "the same on the slow client's own test split"),
    "speedup discounted": (None, "`speedup` with `staleness_exponent = 0.5`, a plan's default"),
    "accuracy_gap discounted": (None, "`accuracy_gap` with it"),
    "slow_client_gap discounted": (None, "`slow_client_gap` with it"),
    "real_speedup": (None, "six real client processes, one ten times slower, one killed; one run each"),
}


def _straggling(figures: Mapping[str, float], policies: Sequence[str]) -> list[tuple[str, ...]]:
    """Of every figure the worst policy, and each."""
    found = list[tuple[str, ...]]()
    for name, (goal, about) in STRAGGLING.items():
        if not (each := {policy: figures[f"{name} {policy}"] for policy in policies if f"{name} {policy}" in figures}):
            continue
        form = ".4f" if "gap" in name else ".1f"
        worst = f"**{figures[name]:{form}}**" if name in figures else ""
        missed = " **(missed)**" * (goal is not None and not _met(name, figures[name], goal))
        told = ", ".join(f"{policy} {value:{form}}" for policy, value in each.items())
        found.append((f"`{name}`", worst, "" if goal is None else f"{goal}{missed}", f"{about}: {told}"))
    return found


def _met(name: str, value: float, goal: float) -> bool:
    return value <= goal if "gap" in name else value >= goal


def faults_part() -> str:
    document = read("faults")
    figures = document["figures"]
    lines = [
        (
            row["fault"], f"{row['met']} of {row['struck']}", str(row["unanswered"]),
            str(row["late_answers"]), str(row["lost_updates"]), str(row["double_aggregations"]),
            row["identical_why"] if row["identical_share"] is None else f"{row['identical_share']:g}",
            ", ".join(f"{seconds:.1f}" for seconds in row["recoveries_s"]),
        )
        for row in document["rows"]
    ]  # fmt: skip
    goals = {"aggregator_max_recovery_s": 10, "device_max_recovery_s": 5}
    header = (
        "fault", "strikes that met their aim", "assignments without an answer", "late answers", "lost updates",
        "double folds",
        "identical share", "seconds until it went on",
    )  # fmt: skip
    told = [
        (f"`{name}`", f"{figures[name]:.1f}", f"{goal}" + " **(missed)**" * (figures[name] > goal))
        for name, goal in goals.items()
    ]
    return "\n\n".join((
        measured(document, _beside(document), every("faults")),
        table(header, lines),
        table(("figure", "measured", "goal"), told),
    ))  # fmt: skip


def _beside(document: Mapping[str, Any]) -> str:
    """What else ran, as the load told while rows were measured: a run of this benchmark alone makes one of 1 to 2."""
    most = max(row["load"] for row in document["rows"])
    if most <= document["machine"]["cores"] + 1:
        return "with nothing else running"
    return f"beside other processes, with a load average of up to {most:.0f}, as the seconds show"


PARTS: dict[str, Callable[[], str]] = {
    "faults": faults_part, "stragglers": stragglers_part, "links": links_part, "overlap": overlap_part,
    "flower-mod": flower_mod_part,
}  # fmt: skip
