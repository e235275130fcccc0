"""The id of an ask says for which run, round and device it is."""

from __future__ import annotations


def ask_id_of(run_id: str, number: int, device: str) -> str:
    """The id of what a device is asked in a round.

    >>> asked_round(ask_id_of("digits-3", 12, "pi-01"))
    12
    """
    return f"{run_id}.{number}.{device}"


def asked_round(ask_id: str) -> int:
    """The round that an ask belonged to stands in its id, RUN.ROUND.DEVICE; 0 where none does."""
    try:
        return int(ask_id.rsplit(".", 2)[1])
    except (IndexError, ValueError):
        return 0


def measuring_id_of(run_id: str, version: int, device: str) -> str:
    """The id under which a device is asked to measure the last version: no round's."""
    return f"{run_id}.eval{version}.{device}"
