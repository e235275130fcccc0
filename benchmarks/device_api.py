"""Measure what the device API costs over TLS: handshakes, requests, rounds, a day without work, and a restart.

    python -m benchmarks.device_api [--preset small|full] --json

The device API is a process of its own with a real store, spool and CA; strangers and devices are threads of this one,
so on two cores both ends share the machine. A round is an assignment and its answer with small payloads through our own
client's link, durable in the spool: without the run's journal, fold and model, which `benchmarks.round_overhead`
measures.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.device_api_load import Answering, Devices, handshakes, quiet_poll, requests
from benchmarks.device_api_process import ApiProcess, api_process
from benchmarks.document import note
from benchmarks.entry import run_in_folder
from thinwire.core.link_state import POLL_S

PAYLOAD_BYTES = 10_000
WARM_ROUNDS = 2
WAIT_S = 30.0


@dataclass(frozen=True)
class Preset:
    """`poll_s`: how long the poll waits whose bytes are counted; what it lacks of a real one is calculated."""

    handshakes: int
    clients: int
    requests_each: int
    rounds: int
    poll_s: float
    devices: int


PRESETS = {
    "tiny": Preset(20, 2, 10, 3, 0.2, 20),  # seconds: for the tests
    "small": Preset(1000, 8, 250, 50, 2.0, 1000),
    "full": Preset(5000, 8, 1000, 250, POLL_S, 1000),
}


def measure(preset: Preset, folder: Path) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Measure one load after the other at one device API; the restart last."""
    rows, figures = list[dict[str, Any]](), dict[str, float]()

    def found(what: str, count: int, seconds: float, **more: float) -> None:
        rows.append({"what": what, "count": count, "seconds": round(seconds, 6), **more})
        note(f"{what}: {count} in {seconds:.2f} s")

    with api_process(folder) as api:
        few = Devices.admitted(api, preset.clients, folder / "few")
        few.greet()
        before = api.cpu_s()
        seconds = handshakes(api, few.trust, preset.handshakes)
        figures["handshakes_per_s"] = preset.handshakes / seconds
        figures["handshake_cpu_ms"] = 1000 * (api.cpu_s() - before) / preset.handshakes
        found("handshakes", preset.handshakes, seconds)

        count, before = preset.clients * preset.requests_each, api.cpu_s()
        seconds = requests(api, few, preset.requests_each)
        figures["requests_per_s"], figures["request_cpu_ms"] = count / seconds, 1000 * (api.cpu_s() - before) / count
        found("requests", count, seconds)

        figures |= _rounds(api, few, preset, folder, rows)

        one = Devices.admitted(api, 1, folder / "one")
        one.greet()
        poll = quiet_poll(api, one, preset.poll_s)
        figures["idle_bytes_per_day"] = poll.a_day()
        found("quiet poll", 1, preset.poll_s, bytes=poll.bytes, segments=poll.segments)
        one.close()

        many = Devices.admitted(api, preset.devices, folder / "many")
        spread_s = many.greet()
        api.request("restart")
        before = api.cpu_s()
        seconds = many.come_back()
        figures[f"reconnect_{preset.devices}_s"] = seconds
        figures["reconnect_cpu_ms"] = 1000 * (api.cpu_s() - before) / preset.devices
        figures["spread_s"] = spread_s
        found("devices that came back", preset.devices, seconds)
        many.close()
    return rows, figures


def _rounds(
    api: ApiProcess, devices: Devices, preset: Preset, folder: Path, rows: list[dict[str, Any]]
) -> dict[str, float]:
    """A snapshot is taken when every device waits again: then the bytes are those of whole rounds."""
    answers = preset.clients * preset.rounds

    def waiting(polls: int) -> Mapping[str, Any]:
        until = time.monotonic() + WAIT_S
        while (stats := api.stats())["requests"]["pull"] < polls:
            if time.monotonic() > until:
                raise TimeoutError("the devices do not wait for assignments")
            time.sleep(0.01)
        return stats

    devices.greet()  # the polls of before came on other connections, which are closed
    polled = api.stats()["requests"]["pull"] + preset.clients * (WARM_ROUNDS + 1)
    with Answering(devices, PAYLOAD_BYTES, folder):
        for number in range(WARM_ROUNDS):
            api.request("round", number=number + 1, devices=devices.names, payload_bytes=PAYLOAD_BYTES)
        before, cpu_s = waiting(polled), api.cpu_s()
        for number in range(preset.rounds):
            told = api.request(
                "round", number=WARM_ROUNDS + number + 1, devices=devices.names, payload_bytes=PAYLOAD_BYTES
            )  # fmt: skip
            rows.append({"what": "round", "round": number + 1, "seconds": round(told["seconds"], 6)})
        after = waiting(polled + answers)
        cpu_s = api.cpu_s() - cpu_s
    spent = sum(after[key] - before[key] for key in ("sent_bytes", "received_bytes"))
    note(f"{preset.rounds} rounds of {preset.clients} devices")
    return {
        "cpu_ms_per_client_round": 1000 * cpu_s / answers,
        "wire_bytes_per_client_round": spent / answers - 2 * PAYLOAD_BYTES,
    }


if __name__ == "__main__":
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a thousand devices are two thousand files here
    run_in_folder("device_api", __doc__, PRESETS, measure)
