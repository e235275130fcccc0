"""Tables of what unequal devices and thin lines cost, from docs/evidence/{stragglers,links,overlap}.json alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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
        "in_time_share": "of all asks of the ladder's runs, those whose answer was there by the deadline",
    }
    goals = {"speedup": "1.0", "in_time_share": "0.95"}
    costs = f"a step took {1000 * figures['step_s']:.2f} ms and an encoding {1000 * figures['encode_s']:.2f} ms"
    return "\n\n".join((
        measured(document, VIRTUAL, costs, every("links")),
        table(("uplink", "seconds to the target"), lines),
        table(
            ("figure", "measured", "goal", "what it is"),
            [(f"`{name}`", f"{figures[name]:.2f}", goals[name], means[name]) for name in goals],
        ),
    ))  # fmt: skip


def _of(rows: Sequence[Row], uplink: str) -> list[float]:
    """Seconds of each seed; a large number where it never came."""
    return [row["seconds"] or NEVER_S for row in rows if row["uplink"] == uplink]


def _seconds(figures: Mapping[str, float], rows: Sequence[Row], uplink: str) -> str:
    never = sum(row["seconds"] is None for row in rows if row["uplink"] == uplink)
    return f"{figures[f'seconds {uplink}']:.0f}" + (f" (never on {never} of the seeds)" if never else "")


def overlap_part() -> str:
    document = read("overlap")
    figures, rows = document["figures"], document["rows"]
    rounds = {overlap: [row["seconds"] for row in rows if row["overlap"] is overlap] for overlap in (False, True)}
    line = f"lines of {figures['mbit_per_s']:.1f} Mb/s, shaped by {figures['shaped_by']}"
    work = f"{figures['steps']} steps a round; one run of each of {len(rounds[True])} rounds"
    goals = {
        "speedup": "", "ideal": "", "share_of_ideal": "0.85 on 2 cores", "accuracy_gap": "at most 0.005",
        "cpu_busy": "",
    }  # fmt: skip
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
            + [(f"`{name}`", str(figures[name]).lower(), "") for name in ("cpu_bound", "decides")],
        ),
    ))  # fmt: skip


PARTS: dict[str, Callable[[], str]] = {"links": links_part, "overlap": overlap_part}
