"""What an expert would try: against a device that joins, as a stranger at the door, and as a device that was let in."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.flower.certificates import Authority
from tests.flower.test_joining import listening
from thinwire.core.errors import Refused
from thinwire.flower import device_key
from thinwire.flower.certificates import server_name
from thinwire.flower.invitation import Invitation
from thinwire.flower.joining import join
from thinwire.flower.trust import Trust

# In the middle, at join


@pytest.mark.parametrize("before", [False, True])
def test_a_pinned_certificate_brings_no_other_one_along(tmp_path: Path, before: bool) -> None:
    """One PEM text may hold several certificates: whoever stands in between adds his own CA to the door's."""
    door, his = Authority(), Authority()
    secret = Invitation.draw(door.pin)
    both = his.pem + door.pem if before else door.pem + his.pem
    shows: dict[str, object] = {"cas": [both], "server_name": server_name(door.pin)}
    forged, refused = his.chain(tmp_path, name=server_name(door.pin)), "not the aggregator of this invitation"
    with listening(forged, shows) as (url, heard), pytest.raises(Refused, match=refused):
        join(url, secret, device_key(tmp_path), "pi-1", {})
    assert len(heard) == 1, "he was asked for the CA, and for nothing else"


def test_a_file_of_trust_holds_each_certificate_once_and_nothing_beside_it(tmp_path: Path) -> None:
    door, his = Authority(), Authority()
    trust = Trust("https://agg.example", ("as an operator has it:\n" + door.pem + his.pem,), server_name(door.pin))
    assert [int(str(ca["serialNumber"]), 16) for ca in trust.context().get_ca_certs()] == [
        door.certificate.serial_number
    ]
