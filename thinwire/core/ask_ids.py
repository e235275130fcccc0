"""The id of an ask says for which run, round and device it is."""

from __future__ import annotations

FURTHER = "+"


def ask_id_of(run_id: str, number: int, device: str, further: bool = False) -> str:
    """The id of what a device is asked in a round; `further`: while an update of it stood in the round's buffer.

    >>> ask_id_of("digits-3", 12, "pi-01", further=True)
    'digits-3.12+.pi-01'
    """
    return f"{run_id}.{number}{FURTHER if further else ''}.{device}"


def asked_round(ask_id: str) -> int:
    """The round that an ask belonged to stands in its id, RUN.ROUND.DEVICE; 0 where none does.

    >>> asked_round("digits-3.12.pi-01"), asked_round("digits-3.12+.pi-01")
    (12, 12)
    """
    try:
        return int(_named(ask_id).removesuffix(FURTHER))
    except ValueError:
        return 0


def is_further(ask_id: str) -> bool:
    """Whether it was asked for the buffer after its round's, in which an update of its device stood."""
    return _named(ask_id).endswith(FURTHER)


def first_of(ask_id: str) -> str:
    """The id of what the device of a further ask was asked first in the same round, if it was.

    >>> first_of("digits-3.12+.pi-01")
    'digits-3.12.pi-01'
    """
    run_id, _, device = ask_id.rsplit(".", 2)
    return ask_id_of(run_id, asked_round(ask_id), device)


def within_run(ask_id: str) -> str:
    """Return an id without the name of its run, for draws that must not depend on that name.

    >>> within_run("digits-3.12+.pi-01")
    '12+.pi-01'
    """
    return ".".join(ask_id.rsplit(".", 2)[-2:])


def _named(ask_id: str) -> str:
    """What stands between the run and the device."""
    return ask_id.rsplit(".", 2)[-2] if ask_id.count(".") >= 2 else ""


def measuring_id_of(run_id: str, version: int, device: str) -> str:
    """The id under which a device is asked to measure the last version: no round's."""
    return f"{run_id}.eval{version}.{device}"
