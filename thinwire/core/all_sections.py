"""All sections of a plan as plain values: what is checked, and what core/plan.py reads, stores and binds."""

from __future__ import annotations

from typing import Literal

from thinwire.core.sections import (
    CohortSection,
    DownlinkSection,
    LocalSection,
    PrivacySection,
    RunSection,
    Section,
    SecureSection,
    ServerSection,
    UplinkSection,
)


class Sections(Section):
    """Two keys have no default, `[run] task` and `[local] lr`."""

    plan_version: Literal[1] = 1
    run: RunSection
    cohort: CohortSection = CohortSection()
    local: LocalSection
    uplink: UplinkSection = UplinkSection()
    downlink: DownlinkSection = DownlinkSection()
    server: ServerSection = ServerSection()
    secure: SecureSection = SecureSection()
    privacy: PrivacySection = PrivacySection()
