"""Figures of the README, of the four pages that it quotes and of the index of evidence, from docs/evidence/*.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from docs.generate.evidence import at_commit, measured, read
from docs.generate.names import code, count
from docs.generate.table import table
from thinwire.core.formatting import counted

Figures = Mapping[str, float]
LOAD = "with nothing else running"
DEMO, ACCURACY = "`thinwire demo --json`", "`python -m benchmarks.accuracy_bytes --preset full --json` (hours)"
ROUND, API = "`python -m benchmarks.round_overhead --json`", "`python -m benchmarks.device_api --json`"
STEP = ("all", "enough", "deadline")  # closing reasons of rounds that changed the model
DEVICE = "`python -m benchmarks.device_footprint --json`"
PAGE = {
    "drift": "how/different-data.md", "mailbox": "evidence/device-api.md",
    "secure-sum-figures": "evidence/secure-sum.md", "secure-round": "evidence/secure-sum.md",
    "secure-support": "evidence/secure-sum.md",
    "privacy-audit": "evidence/privacy.md", "privacy-utility": "evidence/privacy.md", "sampler": "evidence/privacy.md",
    "page": "evidence/dashboard.md", "dashboard-load": "evidence/dashboard.md", "several-runs": "evidence/dashboard.md",
}  # fmt: skip  # of documents without their own
CLAIMS = (  # document, claim, its figure, the figure's form
    ("demo", "update in the demo, compared with dense fp32", "uplink_ratio", "{:.0f} times smaller"),
    ("codecs", "encoding with `int8`, compared with a copy in memory", "encode_ratio int8", "{:.2f} times as long"),
    (
        "peers",
        "`int8`, compared with the fastest of others' methods in numpy or torch",
        "ratio int8",
        "{:.0f} times as fast",
    ),
    (
        "round-overhead",
        "round without training, compared with stock Flower's fixed waits",
        "noop_ratio",
        "{:.0f} times as fast",
    ),
    ("device-api", "processor for an assignment and its reply", "cpu_ms_per_client_round", "{:.1f} ms"),
    ("mailbox", "the same in mailbox and LinkState", "mailbox_us", "{:.0f} us"),
    ("device-load", "poll of a device while another one floods", "honest_pull_ratio", "{:.1f} times as long"),
    ("device-footprint", "memory of a client that waits", "idle_rss_bare_mb", "{:.0f} MB"),
    ("fold", "aggregation of `topk(0.01) > int8 > rice`", "topk_updates_per_s", "{:.0f} updates/s"),
    ("simulation", "simulated round, compared with Flower's simulation", "sim_overhead_ratio", "{:.0f} times as fast"),
    ("stragglers", "time to the target with a deadline, one client slow, one dead", "speedup", "{:.1f} times as fast"),
    ("links", "time to the target with a codec ladder", "speedup", "{:.2f} times as fast"),
    ("overlap", "round with overlap", "speedup", "{:.2f} times as fast"),
    ("faults", "updates lost under 13 kinds of faults", "lost_updates", "{}"),
    (
        "secure-sum-figures",
        "uplink of a client with secure aggregation, compared with Flower's SecAgg+",
        "bytes_ratio_dense",
        "{:.1f} times smaller",
    ),
    ("secure-round", "round with secure aggregation", "round_slowdown", "{:.2f} times as long"),
    (
        "secure-support",
        "accuracy with a tenth of the coordinates in a masked sum, `fedadam`",
        "adam_gap",
        "{:.3f} less",
    ),
    (
        "privacy-audit",
        "epsilon that an attacker shows where 1 is claimed, the largest of three",
        "audited_lower_distributed",
        "{:.2f}",
    ),
    (
        "privacy-utility",
        "accuracy with distributed privacy at epsilon 2, compared with central",
        "distributed_gap",
        "{:.3f} less",
    ),
    ("sampler", "draw of a discrete Gaussian, sigma 4096", "ns_per_draw_4096", "{:.1f} ns"),
    ("page", "first curve of a run of 10 000 rounds, cold dashboard", "cold_first_curve_ms", "{:.0f} ms"),
    ("several-runs", "device time of four runs over their priorities, most over least", "fairness", "{:.2f}"),
    ("drift", "accuracy with SCAFFOLD on unequal data", "gain scaffold identity", "{:+.1f} points"),
    ("robust", "accuracy with 30 % hostile clients, `median`, worst attack, iid", "worst_gap_30", "{:.3f} less"),
    ("personal", "accuracy of the worst client with personal layers", "worst_client_gain", "{:+.3f}"),
)
MODELS = {"digits": "an MLP on the digits", "cnn": "a CNN", "code_lm": "a language model of 1 M parameters"}
Line = tuple[str, str, str]  # the figure's names, its value, its meaning


def readme_table() -> str:
    """Return one row a figure: what it is, its value with unit, and the command that prints it."""
    demo, rounds, api, device = (figures(name) for name in ("demo", "round-overhead", "device-api", "device-footprint"))
    smaller, fewer = "times smaller than dense fp32", "times fewer than fp32"
    return table(("figure", "value", "command"), (
        ("update in the demo, payload", f"{demo['uplink_ratio']:.0f} {smaller}", DEMO),
        ("update in the demo, wire (with HTTP and signatures)", f"{wire_ratio(demo):.0f} {smaller}", DEMO),
        ("accuracy in the demo, compressed", f"{demo['accuracy']:.3f} (one seed)", DEMO),
        ("accuracy in the demo, uncompressed", f"{demo['accuracy_uncompressed']:.3f} (one seed)", DEMO),
        ("accuracy in the demo, all data in one place", f"{demo['accuracy_centralised']:.3f} (one seed)", DEMO),
        ("rounds with a step in the demo, one of 8 clients killed in a round and reconnected",
         f"{sum(demo.get(f'closed {reason}', 0) for reason in STEP):.0f} of {demo['rounds']:.0f}", DEMO),
        *(
            (f"uplink bytes of {chain} with {model}, within half a point", f"{ratio} {fewer}", ACCURACY)
            for model, chain, ratio in decided_ratios()
        ),
        ("round without training, 3 clients, journal and database included", seconds(rounds["noop_ours_s"]), ROUND),
        ("the same with stock Flower, most of it fixed waits", seconds(rounds["noop_stock_s"]), ROUND),
        ("round with 100 MB each way, 3 clients", seconds(rounds["big_round_s"]), ROUND),
        ("memory of that round", f"{rounds['big_peak_models']:.1f} models", ROUND),
        ("the same round with stock Flower", seconds(rounds["big_stock_s"]), ROUND),
        ("bytes of a device over TLS beyond the payload",
         f"{api['wire_bytes_per_client_round'] / 1000:.1f} kB a round", API),
        ("bytes of a device without work", f"{api['idle_bytes_per_day'] / 1e6:.2f} MB a day", API),
        ("reconnection of 1000 devices after a restart", seconds(api["reconnect_1000_s"]), API),
        ("memory of a client that waits", f"{device['idle_rss_bare_mb']:.0f} MB", DEVICE),
        ("memory of a client with torch, between two rounds", f"{device['idle_rss_mb']:.0f} MB", DEVICE),
        ("processor of a client that waits", f"{device['idle_cpu_bare_percent']:.2f} % of a core", DEVICE),
        ("disk of a client, without torch and numpy", f"{device['installed_mb']:.0f} MB", DEVICE),
        ("packages of a client, without torch and numpy", f"{device['distributions']:.0f}", DEVICE),
    ))  # fmt: skip


def evidence_index() -> str:
    """Return one row a committed document: a claim with its page, one figure, the machine, the date, the command."""
    rows = [
        (
            f"[{claim}]({PAGE.get(name, f'evidence/{name}.md')})",
            form.format(figures(name)[figure]),
            *_measured(read(name)),
        )
        for name, claim, figure, form in CLAIMS
    ]
    models = read("accuracy-bytes")["models"].values()
    page = "evidence/accuracy-bytes.md"
    first = [
        (
            f"[uplink bytes of {chain} with {model}, compared with fp32]({page})",
            f"{ratio} times fewer",
            *_measured(made),
        )
        for (model, chain, ratio), made in zip(decided_ratios(), models, strict=True)
    ]
    return table(("claim", "figure", "machine", "date", "command"), [*first, *rows])


def _measured(document: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return machine, date and command of a committed document."""
    machine, benchmark = document["machine"], document.get("benchmark")
    command = f"python -m benchmarks.{benchmark} --preset {document['preset']}" if benchmark else document["command"]
    if benchmark == "demo":
        command = "thinwire demo"
    return f"{machine['cpu']}, {counted(machine['cores'], 'core')}", document["at"][:10], f"`{command} --json`"


def demo_part() -> str:
    found = figures("demo")
    updates = round(found["dense_up_bytes"] / 38_440)
    closed = ", ".join(f"{n:.0f} `{name.removeprefix('closed ')}`" for name, n in found.items() if "closed " in name)
    return page("demo", "seed 1", (
        ("`accuracy`", f"{found['accuracy']:.3f}", "accuracy of the final model on the clients' test splits"),
        ("`accuracy_uncompressed`", f"{found['accuracy_uncompressed']:.3f}",
         "the same run in the command's own process, with `identity`"),
        ("`accuracy_centralised`", f"{found['accuracy_centralised']:.3f}",
         "the same model, trained on all data in one place"),
        ("`uplink_ratio`", f"{found['uplink_ratio']:.0f}", "dense float32 bytes over payload bytes, uplink"),
        ("`dense_up_bytes`", count(int(found["dense_up_bytes"])), f"{updates} updates of 38 440 bytes"),
        ("`payload_up_bytes`", count(int(found["payload_up_bytes"])), "the same updates in frames"),
        ("`wire_up_bytes`", count(int(found["wire_up_bytes"])),
         f"bytes on the sockets, uplink: {wire_ratio(found):.1f} times less than dense"),
        ("`payload_down_bytes`", count(int(found["payload_down_bytes"])),
         "uncompressed models: those of the rounds, and the final one for its evaluation"),
        ("`wire_down_bytes`", count(int(found["wire_down_bytes"])), "bytes on the sockets, downlink"),
        ("`closed_reasons`", closed,
         "`all`: every selected client replied; a round that closes without the killed client is `enough`"),
        ("`late`, `dropped`, `failed`", ", ".join(f"{found[one]:.0f}" for one in ("late", "dropped", "failed")),
         "updates after their round, updates without effect, assignments without an update"),
        ("`rounds_s`", seconds(found["rounds_s"], 3), "the federated run, including the wait for devices"),
        ("`wall_s`", seconds(found["wall_s"], 3), "the whole command, including both baselines"),
    ))  # fmt: skip


def round_part() -> str:
    found = figures("round-overhead")
    return page("round-overhead", "times are medians, with the minimum and the maximum in parentheses", (
        ("`noop_ours_s`", spread(found, "noop_ours"), "a round in which 3 devices receive and send four floats"),
        ("`noop_stock_s`", spread(found, "noop_stock"), "the same with stock Flower"),
        ("`noop_ratio`", f"{found['noop_ratio']:.0f}", "stock Flower's round over Thinwire's"),
        ("`requests_per_client_round`", f"{found['requests_per_client_round']:.2f}",
         "HTTP requests of one device in one round"),
        ("`server_cpu_ms_per_client_round`", f"{found['server_cpu_ms_per_client_round']:.1f}",
         "CPU of the aggregator (ms)"),
        ("`big_round_s`", spread(found, "big_round"),
         "100 MB down to and up from each of 3 devices; Thinwire averages them"),
        ("`big_stock_s`", spread(found, "big_stock"), "the same with stock Flower, which averages nothing"),
        ("`big_peak_models`", f"{found['big_peak_models']:.2f}",
         "peak memory of the aggregator over its idle memory, in models"),
    ))  # fmt: skip


def api_part() -> str:
    found, mailbox = figures("device-api"), figures("mailbox")
    return page("device-api", "OpenSSL 3", (
        ("`handshakes_per_s`", f"{found['handshakes_per_s']:.0f}",
         "strangers that connect, complete a TLS 1.3 handshake (P-256), and disconnect"),
        ("`handshake_cpu_ms`", f"{found['handshake_cpu_ms']:.2f} ms", "CPU of one such handshake"),
        ("`requests_per_s`", count(round(found["requests_per_s"])),
         "signed requests with an immediate response, on 8 persistent connections"),
        ("`request_cpu_ms`", f"{found['request_cpu_ms']:.2f} ms", "CPU of one such request"),
        ("`cpu_ms_per_client_round`", f"{found['cpu_ms_per_client_round']:.1f} ms",
         "an assignment and its reply, durable (fsync), read and acknowledged"),
        ("`mailbox_us` (`python -m benchmarks.mailbox`)", f"{mailbox['mailbox_us']:.0f} us",
         "CPU of mailbox and LinkState for an assignment and its reply, 1000 devices at once; goal 200; measured on "
         + at_commit(read("mailbox"))),
        ("`wire_bytes_per_client_round`", count(round(found["wire_bytes_per_client_round"])),
         "uplink and downlink together, without the 2 x 10 000 bytes of payload; goal 2 048"),
        ("`idle_bytes_per_day`", count(round(found["idle_bytes_per_day"])),
         "of a device that waits, uplink and downlink together; goal 1 000 000"),
        ("`reconnect_1000_s`", seconds(found["reconnect_1000_s"]),
         "until each of 1000 devices has registered again after a restart, 24 at a time, without a deliberate wait"),
        ("`reconnect_cpu_ms`", f"{found['reconnect_cpu_ms']:.1f} ms", "CPU of one of them, handshake included"),
        ("`spread_s`", seconds(found["spread_s"]),
         "the period over which the aggregator spreads the reconnects of those 1000 devices"),
    ))  # fmt: skip


def device_part() -> str:
    found = figures("device-footprint")
    return page("device-footprint", "torch built for CPU", (
        ("`idle_rss_bare_mb`", f"{found['idle_rss_bare_mb']:.0f} MB",
         "a connected, waiting client without the worker: one process"),
        ("`idle_rss_mb`", f"{found['idle_rss_mb']:.0f} MB",
         "a client that waits after a round, with the worker: both processes together"),
        ("`idle_cpu_bare_percent`", f"{found['idle_cpu_bare_percent']:.2f} %",
         "of one core, without an assignment and without the worker; a tick of the clock is 0.05 %"),
        ("`idle_cpu_percent`", f"{found['idle_cpu_percent']:.2f} %", "the same with the worker"),
        ("`first_start_s`", seconds(found["first_start_s"]),
         "from the first start of the program until it is connected; each start imports torch to describe the task"),
        ("`start_s`", seconds(found["start_s"]), "the same for a later start"),
        ("`distributions`", f"{found['distributions']:.0f}",
         "distributions that `thinwire[client]` adds beside numpy, including Thinwire"),
        ("`installed_mb`", f"{found['installed_mb']:.1f} MB",
         "files of these distributions as pip installed them, including bytecode"),
    ))  # fmt: skip


def figures(name: str) -> Figures:
    found: Figures = read(name)["figures"]
    return found


def page(name: str, setting: str, lines: Sequence[Line]) -> str:
    return f"{measured(read(name), LOAD, setting)}\n\n{table(('figure', 'measured', 'what it is'), lines)}"


def wire_ratio(demo: Figures) -> float:
    return demo["dense_up_bytes"] / demo["wire_up_bytes"]


def decided_ratios() -> list[tuple[str, str, str]]:
    """Return each model, the chain that fresh seeds (B) decided for, and how many times fewer bytes it sends up."""
    models: Mapping[str, Any] = read("accuracy-bytes")["models"]
    decided = {name: model["conclusion"] for name, model in models.items()}
    return [(MODELS[name], code(found["chain"]), f"{found['figure']:.3g}") for name, found in decided.items()]


def seconds(value: float, digits: int = 2) -> str:
    """Return the seconds with so many significant digits.

    >>> seconds(0.04416), seconds(9.96), seconds(16.88)
    ('0.044 s', '10 s', '17 s')
    """
    return f"{float(f'{value:.{digits}g}'):g} s"


def spread(found: Figures, name: str) -> str:
    """Return the median of a time with its minimum and maximum."""
    median, least, most = (f"{found[f'{name}{end}']:.3g}" for end in ("_s", "_least_s", "_most_s"))
    return f"{median} s ({least} to {most})"


PARTS: dict[str, Callable[[], str]] = {
    "demo": demo_part, "round-overhead": round_part, "device-api": api_part, "device-footprint": device_part,
}  # fmt: skip
