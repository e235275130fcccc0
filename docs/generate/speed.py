"""Tables of how long things take, from docs/evidence/{codecs,fold,peers,device-load}.json alone: what
`python -m benchmarks.NAME --json` printed, on a machine that did nothing else but for device-load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.peers import PEERS
from docs.generate.evidence import Row, measured, paragraph, read
from docs.generate.table import table
from thinwire.compression import parse

QUIET = "with AVX-512 and nothing else running"

# What this project set itself for normal values, one thread and AVX-512, in copies; feedback may cost so much more.
ENCODE_LIMITS = {
    "fp16": 1.0, "int8": 1.3, "qsgd(4)": 1.5, "ternary": 2.3, "sign": 1.3, "twobit(1)": 1.3, "topk(0.01)": 2.2,
    "topk(0.01) > int8 > rice": 2.6, "topk(0.001)": 1.4, "drive": 2.6, "powersgd(4)": 4.5,
    "eden(0.3)": 2.6, "eden(0.1)": 2.6,
}  # fmt: skip
DECODE_LIMITS = {
    "topk(0.01)": 0.4, "topk(0.01) > int8 > rice": 1.0, "int8": 0.9, "fp16": 1.0, "drive": 2.2,
    "eden(0.3)": 1.0, "eden(0.1)": 1.0,
}  # fmt: skip
FEEDBACK_MORE = 1.4
PLACES_GOAL = 0.083  # bits a parameter
DISTURBED = 1.2  # times the usual copy
HARDLY = 1.05  # under so many times as fast there is nothing to speak of
FOLD_GOALS = {
    "fp16_bandwidth_share": (1.0, "payloads of 51 MB"),
    "int8_bandwidth_share": (1.0, "payloads of 26 MB"),
    "topk_updates_per_s": (100, "whole folds of `topk(0.01) > int8 > rice`, checks of the frames included"),
    "peak_models": (3, "most memory of a round (not over the goal): the sum, one segment, what is mapped of the spool"),
    "check_ms": (None, "SHA-256 of a payload (51 MB), and the check of all frames but the last"),
}

LOAD_GOALS = {
    "flood_memory_mb": (64, "growth of the aggregator's peak memory (MB)"),
    "honest_pull_ratio": (3, "95th percentile of the other device's poll, flooded over idle"),
    "refused_signature_ms": (1, "the aggregator's processor for a request with a wrong signature (ms)"),
}


def about(document: Mapping[str, Any], *more: str) -> str:
    return measured(document, QUIET, *more)


def codecs_part() -> str:
    document = read("codecs")
    rows: Sequence[Row] = document["rows"]
    figures = document["figures"]
    size = (f"the copy ran at {figures['memcpy_gb_s']:.3g} GB/s", f"third-level cache {figures['l3_mb']:.0f} MB")
    return "\n\n".join((
        about(document, *size),
        "## Normal values, one thread, AVX-512",
        f"""\
"Limit" is what this project set itself for such a machine, before; with feedback {FEEDBACK_MORE} more. A ratio over its
limit is **bold**.""",
        _there_and_back(_of(rows, data="normal", threads=1, path="avx512"), limits=True),
        """\
The relative error is the norm of what is lost over the norm of what was there, of one call. With feedback what is lost
is sent later.""",
        *filter(None, (_places(figures),)),
        "## Heavy tails",
        "Student's values with two degrees of freedom: the largest are hundreds of times larger than most.",
        _there_and_back(_of(rows, data="heavy", threads=1, path="avx512"), limits=False),
        "## Two threads, and other paths",
        """\
Normal values. Copies (on one thread) that an encode takes, and after the stroke those of decoding and adding.""",
        _paths(_of(rows, data="normal")),
        *filter(None, (disturbed(rows),)),
    ))  # fmt: skip


def disturbed(rows: Sequence[Row]) -> str:
    """Which of the rows that are shown were measured while the copies beside them took far longer than usual."""
    usual = median(row["memcpy_ms"] for row in rows)
    found = [
        f"{_name(row)} ({row['data']} values, {row['path']}, {row['threads']} thread{'s' * (row['threads'] > 1)}: "
        f"{row['memcpy_ms']:.1f} ms)"
        for row in rows
        if row["memcpy_ms"] > DISTURBED * usual and (row["data"] == "normal" or row["threads"] == 1)
    ]
    if not found:
        return ""
    return paragraph(
        f"A copy took {usual:.1f} ms in the median. Where it took over {DISTURBED:g} times that, something held "
        f"the machine for a while, and what stands there says little: {', '.join(found)}."
    )


def _places(figures: Mapping[str, float]) -> str:
    """What places alone take; nothing where the run did not compute it."""
    if "place_entropy topk(0.01)" not in figures:
        return ""
    rice, delta = (figures[f"place_bits topk(0.01) > {name}"] for name in ("rice", "delta"))
    return paragraph(
        f"The places of the largest 1 % alone take {rice:.4f} bits a parameter with `rice` (goal {PLACES_GOAL}) and "
        f"{delta:.4f} with `delta`; their entropy is {figures['place_entropy topk(0.01)']:.4f}."
    )


def _of(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def _there_and_back(rows: Sequence[Row], limits: bool) -> str:
    header = (
        "codec",
        "encode ms",
        "copies",
        *(["limit"] * limits),
        "decode and add ms",
        "copies",
        *(["limit"] * limits),
    )
    lines = []
    for row in rows:
        more = FEEDBACK_MORE if row["feedback"] else 0.0
        codec = parse(row["codec"]).spec
        encode = ENCODE_LIMITS[codec] + more if codec in ENCODE_LIMITS else None
        ways = (("encode", "encode", encode), ("decode", "decode_add", DECODE_LIMITS.get(codec)))
        cells = [_name(row)]
        for ratio, ms, limit in ways:
            cells += [_ms(row[f"{ms}_ms"]), _within(row[f"{ratio}_ratio"], limit if limits else None)]
            if limits:
                cells.append("" if limit is None else f"{limit:.3g}")
        lines.append((*cells, f"{row['bits_per_param']:.4g}", f"{row['relative_error']:.3g}"))
    return table((*header, "bits a parameter", "relative error"), lines)


def _paths(rows: Sequence[Row]) -> str:
    columns = (("avx512", 1), ("avx512", 2), ("avx2", 1), ("scalar", 1), ("numpy", 1))
    found = {(_name(row), row["path"], row["threads"]): row for row in rows}
    lines = []
    for name in dict.fromkeys(_name(row) for row in rows):
        cells = [found.get((name, *column)) for column in columns]
        lines.append((name, *(_both(row) if row else "" for row in cells)))
    return table(("codec", *(f"{path}, {threads} thread{'s' * (threads > 1)}" for path, threads in columns)), lines)


def _both(row: Row) -> str:
    return f"{row['encode_ratio']:.3g} / {row['decode_ratio']:.3g}"


def _name(row: Row) -> str:
    return f"`{row['codec']}`" + (" + feedback" if row["feedback"] else "")


def _within(ratio: float, limit: float | None) -> str:
    return f"**{ratio:.3g}**" if limit is not None and ratio > limit else f"{ratio:.3g}"


def _ms(value: float) -> str:
    return f"{value:,.0f}".replace(",", " ") if value >= 100 else f"{value:.1f}"


def fold_part() -> str:
    document = read("fold")
    copies = [row["memcpy_gb_per_s"] for row in document["rows"]]
    told = table(("figure", "value", "goal", "what it is"), [
        (f"`{name}`", f"{document['figures'][name]:.3g}", "" if goal is None else f"{goal:g}", meaning)
        for name, (goal, meaning) in FOLD_GOALS.items()
    ])  # fmt: skip
    lines = [
        (
            f"`{row['codec']}`", *(_ms(row[f"{name}_ms"]) for name in ("add", "memcpy")),
            f"{row['bandwidth_share']:.3g}", *(_ms(row[f"{name}_ms"]) for name in ("digest", "check", "fold")),
        )
        for row in document["rows"]
    ]  # fmt: skip
    header = ("codec", "add ms", "copy ms", "share", "SHA-256 ms", "check ms", "fold ms")
    rate = (
        f"medians of {document['rows'][0]['updates']}", f"the copy ran at {min(copies):.3g} to {max(copies):.3g} GB/s",
    )  # fmt: skip
    return "\n\n".join((about(document, *rate), told, table(header, lines)))


def peers_part() -> str:
    document = read("peers")
    rows, figures = document["rows"], document["figures"]
    fastest = {(row["method"], row["threads"]): row["who"] for row in rows if row["fastest"]}
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        one, two = fastest[method, 1], fastest[method, 2]
        cells = [
            f"{figures[found]:.3g}" if (found := f"{figure} {method}{threads}") in figures else "none"
            for figure in ("ratio", "ratio_as_good") for threads in ("", " 2")
        ]  # fmt: skip
        lines.append((f"`{method}`", one if one == two else f"{one}; on 2 threads {two}", *cells))
    header = ("ours", "fastest peer", "ratio, 1 thread", "2 threads", "as good: 1 thread", "2 threads")
    return "\n\n".join((
        about(document, "25.56 million normal float32 in ResNet-50's shapes, medians"),
        """\
"Ratio" is the time of the fastest peer over ours. What they send and lose differs, so bits a parameter and the relative
error stand beside the time: a peer that sends and loses at most a twentieth more than ours is "as good", and the last
two columns are the fastest of those over ours.""",
        table(header, lines),
        *filter(None, (_behind(figures), _not_yet(rows))),
        "## All of it",
        '"Copies" is the time over that of a plain copy on one thread.',
        _everybody(rows),
    ))  # fmt: skip


def _behind(figures: Mapping[str, float]) -> str:
    """Where ours is no faster than the fastest peer, or hardly."""
    found = {
        name.removeprefix("ratio "): value
        for name, value in figures.items()
        if name.startswith("ratio ") and value < HARDLY
    }
    if not found:
        return ""
    told = [
        f"`{name.removesuffix(' 2')}` on {'two threads' if name.endswith(' 2') else 'one thread'} ({value:.3g}: "
        f"{'the peer is faster' if value < 1 else 'no difference to speak of'})"
        for name, value in found.items()
    ]
    return paragraph(f"Ours is not the faster one everywhere: {', and '.join(told)}.")


def _not_yet(rows: Sequence[Row]) -> str:
    """Methods that got a peer after this run."""
    missing = [f"`{method}`" for method in PEERS if method not in {row["method"] for row in rows}]
    return (
        paragraph(f"Not in this run, which was made before they had a peer: {', '.join(missing)}.") if missing else ""
    )


def _everybody(rows: Sequence[Row]) -> str:
    two = {(row["method"], row["who"]): row for row in rows if row["threads"] == 2}
    lines = [
        (
            f"`{row['method']}`", "**ours**" if row["who"] == "thinwire" else row["who"], _ms(row["encode_ms"]),
            f"{row['encode_ratio']:.3g}", _ms(two[row["method"], row["who"]]["encode_ms"]),
            f"{row['bits_per_param']:.4g}", f"{row['relative_error']:.3g}",
        )
        for row in rows if row["threads"] == 1
    ]  # fmt: skip
    header = ("method", "who", "ms, 1 thread", "copies", "ms, 2 threads", "bits a parameter", "relative error")
    return table(header, lines)


def device_load_part() -> str:
    document = read("device-load")
    told = table(("figure", "value", "goal (at most)", "what it is"), [
        (f"`{name}`", f"{document['figures'][name]:.3g}", f"{goal:g}", meaning)
        for name, (goal, meaning) in LOAD_GOALS.items()
    ])  # fmt: skip
    lines = [
        (
            row["transport"], f"{row['flood_memory_mb']:.3g}", _ms(row["idle_pull_p95_ms"]),
            _ms(row["flooded_pull_p95_ms"]), _ms(row["flooded_pull_max_ms"]), f"{row['honest_pull_ratio']:.3g}",
            f"{row['refused_signature_ms']:.2g}", str(sum(row[name] for name in row if name.startswith("flood "))),
        )
        for row in document["rows"]
    ]  # fmt: skip
    header = (
        "transport", "memory MB", "idle p95 ms", "flooded p95 ms", "longest ms", "ratio", "refused signature ms",
        "requests of the flood",
    )  # fmt: skip
    how = "with nothing else running"
    return "\n\n".join((measured(document, how), told, table(header, lines)))


PARTS: dict[str, Callable[[], str]] = {
    "codecs": codecs_part,
    "fold": fold_part,
    "peers": peers_part,
    "device-load": device_load_part,
}
