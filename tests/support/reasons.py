"""Reasons of decisions, and notes, that stores and events of tests hold."""

from __future__ import annotations

from collections.abc import Mapping

from thinwire.core.formatting import Reason, Reasons
from thinwire.reports.reason_text import sentence


def noted(text: str) -> list[Reason]:
    """A note, or the reasons of a decision, whose sentence is this text."""
    return [Reason("unable", {"text": text})]


def sentences(reasons: Mapping[str, Reasons]) -> dict[str, str]:
    """The reasons of each device as a sentence."""
    return {device: sentence(one) for device, one in reasons.items()}
