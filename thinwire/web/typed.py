"""Commands inside sentences that were recorded, or that the store wrote: they name our state directory when shown."""

from __future__ import annotations

import re

COMMANDS = (
    "run", "sim",
    "aggregator start", "aggregator status", "aggregator stop", "aggregator doctor", "aggregator backup",
    "aggregator restore", "aggregator service install", "aggregator ca show", "aggregator ca rotate",
    "runs compare", "runs list", "runs show", "runs watch", "runs model", "runs stop",
    "devices list", "devices show", "devices invite", "devices approve", "devices revoke", "devices rename",
)  # fmt: skip
"""Those with `--home` that are typed on the aggregator's machine; `thinwire client` has a state of its own."""

_WITHOUT_HOME = re.compile(rf"\bthinwire (?:{'|'.join(COMMANDS)})(?![-\w])(?![^;,()]* --home )")


def with_home(sentence: str, option: str) -> str:
    """The sentence, with `option` (" --home FOLDER", or nothing) behind the words of each command that lacks it.

    >>> with_home("end it: thinwire runs stop digits-1 (or wait)", " --home /srv/fl")
    'end it: thinwire runs stop --home /srv/fl digits-1 (or wait)'
    >>> with_home("type on it: thinwire client reload", " --home /srv/fl")
    'type on it: thinwire client reload'
    """
    return _WITHOUT_HOME.sub(lambda found: found[0] + option, sentence) if option else sentence
