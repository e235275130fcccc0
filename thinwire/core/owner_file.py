"""Reads settings files: the device owner's `client.toml`, and `aggregator.toml` in the aggregator's state directory."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, ValidationError, ValidationInfo, field_validator

from thinwire.core.errors import PlanError
from thinwire.core.net import is_loopback
from thinwire.core.plan_errors import explain
from thinwire.core.plan_values import Section

File = TypeVar("File", bound=BaseModel)


def read_owner_file(path: Path, model: type[File], what: str, keys: str, must_exist: bool = False) -> File:
    """Return the content of a TOML file, or the defaults if the file is missing and optional.

    `what` names the file in errors ("policy"), `keys` says where its keys are listed. Raise `PlanError`, which
    names every wrong key and value.
    """
    try:
        text = path.read_text()
    except FileNotFoundError as error:
        if must_exist:
            raise PlanError(
                f"there is no {what} {path}", why="it was named, so it has to be there", hint=keys
            ) from error
        return model()
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(
            f"cannot read the {what} {path}", why=str(error), hint="make it readable, or move it"
        ) from error
    return parse_owner_text(text, model, str(path), keys)


def parse_owner_text(text: str, model: type[File], source: str, keys: str) -> File:
    """Return the content of a TOML text from `source`; raise `PlanError`, which names every wrong key and value."""
    try:
        return model.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise PlanError(f"{source} is not TOML", why=str(error), hint='a line reads: key = "value"') from error
    except ValidationError as error:
        found = [explain(model, _without_secret(details), "file", keys) for details in error.errors()]
        whats, whys = ("; ".join(dict.fromkeys(column)) for column in ([f[0] for f in found], [f[1] for f in found]))
        raise PlanError(f"{source}: {whats}", why=whys, hint=found[0][2]) from error


def _without_secret(details: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an error of pydantic without its value if that is the webhook, whose address lets one post there.

    The error's text gets into the journal and to viewers of the dashboard.
    """
    is_secret = details["loc"] in (("alerts",), ("alerts", "webhook"))
    return {**details, "input": "..."} if is_secret else details


MAX_RUNS, RUNS_LIMIT = 4, 64
MAX_ALLOWED = 256  # patterns
MAX_UPLOAD_MB, UPLOAD_LIMIT_MB = 512, 16_384
MAX_KEEP_DAYS = 36_500
WEBHOOK = re.compile(r"https?://[^\s/?#]+[^\s]*")
SMTP = re.compile(r"[A-Za-z0-9.-]+:[0-9]{1,5}")


class AlertSettings(Section):
    """Alerts of the dashboard: when there is one, and where its messages go.

    Only this file names the targets: nothing that reaches the API can make the dashboard call another machine.
    """

    webhook: str = Field(default="", description="URL that gets each message as JSON by POST; empty: none")
    email_to: tuple[str, ...] = Field(default=(), description="addresses that get each message by e-mail")
    email_from: str = Field(default="", description="sender of these e-mails; default: the first address")
    smtp: str = Field(default="localhost:25", description="HOST:PORT of the mail server")
    smtp_security: Literal["none", "starttls", "tls"] = Field(
        default="none", description="how the connection to the mail server is protected"
    )
    smtp_user: str = Field(default="", description="user at the mail server; empty: no login")
    smtp_password_file: str = Field(default="", description="file with this user's password, which others cannot read")
    no_progress_min: float = Field(
        default=30, gt=0, description="minutes without a closed round after which a running run has an alert"
    )
    too_few_min: float = Field(
        default=10, gt=0, description="minutes for which a run may wait for devices before it has an alert"
    )
    offline_min: float = Field(default=2, gt=0, description="minutes for which the aggregator may be down")
    min_free_disk_mb: int = Field(default=1000, ge=0, description="free space below which there is an alert")
    certificate_days: float = Field(default=14, ge=0, description="days before the end of the device API's certificate")

    @field_validator("webhook")
    @classmethod
    def _is_a_url(cls, url: str) -> str:
        if url and not WEBHOOK.fullmatch(url):
            example = '"https://chat.example.org/hooks/thinwire"'
            raise ValueError(f"it should be a URL that begins with https:// or http://, such as {example}")
        try:
            has_port = urlsplit(url).port != 0
        except ValueError:  # its text has the port, which may be a part of a secret
            has_port = False
        if not has_port:
            raise ValueError("its port should be a number from 1 to 65535")
        return url

    @field_validator("smtp")
    @classmethod
    def _is_a_host_with_port(cls, server: str) -> str:
        if not SMTP.fullmatch(server):
            raise ValueError('it should be HOST:PORT of the mail server, such as "mail.example.org:587"')
        return server

    @field_validator("smtp_user")
    @classmethod
    def _has_a_protected_password(cls, user: str, before: ValidationInfo) -> str:
        host = str(before.data.get("smtp", "")).rpartition(":")[0]
        if user and before.data.get("smtp_security") == "none" and not is_loopback(host):
            raise ValueError('its password would be readable on the way: smtp_security should be "starttls" or "tls"')
        return user


class AggregatorFile(Section):
    """The content of `HOME/aggregator.toml`: what the operator of an aggregator decides for all its runs."""

    max_runs: int = Field(
        default=MAX_RUNS,
        ge=1,
        le=RUNS_LIMIT,
        description="runs whose rounds go on at once; others wait in the queue. A run that is paused or waits for "
        "offline devices does not count",
    )
    allow: list[str] = Field(
        default=[],
        max_length=MAX_ALLOWED,
        description="what a plan from the dashboard may name beside Thinwire's own codecs, optimizers and "
        "reductions: MODULE:CLASS of other code, or the path of an initial model; * stands for any letters",
    )
    max_upload_mb: int = Field(
        default=MAX_UPLOAD_MB,
        ge=0,
        le=UPLOAD_LIMIT_MB,
        description="largest initial model that the dashboard takes, in MB; 0: none",
    )
    memory_mb: int | None = Field(
        default=None,
        ge=64,
        description="memory of all runs together, by estimate; a run that does not fit stays queued. Left out: 80 % of "
        "what the machine or the control group has available at the start",
    )
    keep_days: int | None = Field(
        default=None,
        ge=1,
        le=MAX_KEEP_DAYS,
        description="days after its end at which a run is deleted as by `thinwire runs delete`, and after which "
        "connections, measurements, refusals, invitations and closed alerts are deleted; the privacy ledger and the "
        "audit log stay. Left out: nothing is deleted by age",
    )
    alerts: AlertSettings = AlertSettings()


def settings_of(section: Section, prefix: str = "") -> Iterator[tuple[str, Any, bool]]:
    """Yield each setting with its value and whether the file gives it; a key of a table is `table.key`."""
    for key in type(section).model_fields:
        value = getattr(section, key)
        if isinstance(value, Section):
            yield from settings_of(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value, key in section.model_fields_set


AGGREGATOR_FILE = "aggregator.toml"


def aggregator_file(home: Path) -> AggregatorFile:
    """Return what `HOME/aggregator.toml` says, or the defaults without that file; raise `PlanError` if it is wrong."""
    keys = "docs/reference/aggregator.md lists the keys"
    return read_owner_file(home / AGGREGATOR_FILE, AggregatorFile, "file of settings", keys)
