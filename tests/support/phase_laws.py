"""The laws of core/fleet.py for the phases of a secure round, which `FleetLaws` holds against every Fleet."""

from __future__ import annotations

from pathlib import Path

from tests.support.fleet_words import PATIENCE_S, Setting, answer, envelope, join, polled, pulled
from thinwire.client.payload import parts_of
from thinwire.core.types import Failure, PhaseReply, ReplyHeader, phase_id


class PhaseLaws:
    """The messages of phases: which assignment each settles, and which comes next."""

    def test_a_message_of_a_phase_is_polled_with_its_device_and_settles_its_assignment(self, setting: Setting) -> None:
        link, assignment_id = join(setting, "pi-1"), phase_id("digits-1.3.pi-1", "share")
        setting.fleet.send([envelope("pi-1", assignment_id)])
        pulled(link)
        given = PhaseReply(assignment_id, "c2hhcmVz", device="pi-2")
        link.push(given)
        found = polled(setting.fleet, PhaseReply)
        assert (found.assignment_id, found.message, found.device) == (assignment_id, "c2hhcmVz", "pi-1")
        link.close()
        assert join(setting, "pi-1").pull(0.1) is None

    def test_a_message_of_a_phase_is_answered_with_the_next_assignment(self, setting: Setting) -> None:
        link, share, agree = join(setting, "pi-1"), *(phase_id("digits-1.3.pi-1", name) for name in ("share", "agree"))
        setting.fleet.send([envelope("pi-1", share)])
        pulled(link)
        setting.fleet.send([envelope("pi-1", agree)])
        found = link.answer(PhaseReply(share, "c2hhcmVz"), PATIENCE_S)
        assert found is not None
        assert found.assignment.assignment_id == agree
        assert polled(setting.fleet, PhaseReply).assignment_id == share
        assert link.answer(PhaseReply(agree, "c2lnbmVk"), 0.1) is None
        assert polled(setting.fleet, PhaseReply).assignment_id == agree

    def test_a_request_without_a_byte_is_read_as_empty(self, setting: Setting, tmp_path: Path) -> None:
        """So an aggregator that was restarted requests an advertisement again."""
        link = join(setting, "pi-1")
        setting.fleet.send([envelope("pi-1", phase_id("digits-1.3.pi-1", "advertise"), tmp_path, b"")])
        delivery = pulled(link)
        assert [len(request) for _, request in parts_of(delivery.bundle, delivery.assignment.parts)] == [0]

    def test_an_advertisement_leaves_its_assignment_with_the_device(self, setting: Setting) -> None:
        """So a withdrawal of the round still reaches a device that trains, and the assignment does not come twice."""
        link = join(setting, "pi-1")
        setting.fleet.send([envelope("pi-1", "digits-1.3.pi-1")])
        pulled(link)
        link.push(PhaseReply("digits-1.3.pi-1", "a2V5cw=="))
        assert polled(setting.fleet, PhaseReply).assignment_id == "digits-1.3.pi-1"
        assert link.pull(0.1) is None
        setting.fleet.cancel(["digits-1.3.pi-1"])
        link.pull(0.1)
        assert link.cancelled() == {"digits-1.3.pi-1"}

    def test_the_update_ends_the_phase_masked_and_a_failure_ends_all(self, setting: Setting) -> None:
        link, training = join(setting, "pi-1"), "digits-1.3.pi-1"
        masked, agree = phase_id(training, "masked"), phase_id(training, "agree")
        setting.fleet.send([envelope("pi-1", training), envelope("pi-1", masked)])
        assert [pulled(link).assignment.assignment_id for _ in range(2)] == [training, masked]
        link.push(answer("pi-1", training))
        polled(setting.fleet, ReplyHeader)
        setting.fleet.send([envelope("pi-1", agree)])
        pulled(link)
        assert link.answer(Failure("failed", "survivors", training), 0.1) is None
        assert polled(setting.fleet, Failure).text == "survivors"
        link.close()
        assert join(setting, "pi-1").pull(0.1) is None
