"""Where an aggregator is reached, and through which proxy."""

from __future__ import annotations

import base64
import ipaddress
import os
from dataclasses import dataclass
from urllib.parse import SplitResult, unquote, urlsplit

from thinwire.core.errors import UsageError

PORT = 9090
EXAMPLE = "https://agg.example:9090; on the aggregator's own machine http://127.0.0.1:9090"


@dataclass(frozen=True)
class Address:
    """A door's. Plain HTTP is for loopback alone: everything else is TLS.

    >>> Address.parse("https://agg.example")
    Address(tls=True, host='agg.example', port=9090)
    """

    tls: bool
    host: str
    port: int

    @classmethod
    def parse(cls, url: str) -> Address:
        parts, port = _split(url, url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
            raise UsageError(f"{url!r} is no address of an aggregator", why="https://HOST:PORT is", hint=EXAMPLE)
        found = cls(parts.scheme == "https", parts.hostname, port or PORT)
        if not found.tls and not found.is_loopback:
            raise UsageError(
                f"{url} would be talked to in the clear",
                why="plain HTTP is for this machine alone",
                hint=f"https://{parts.netloc}, after thinwire client join",
            )
        return found

    @property
    def is_loopback(self) -> bool:
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Proxy:
    """What carries TLS to the door by CONNECT. It sees nothing but the address."""

    host: str
    port: int
    authorization: str = ""

    @classmethod
    def towards(cls, address: Address) -> Proxy | None:
        """What HTTPS_PROXY says, where NO_PROXY does not say otherwise; loopback is never reached through one."""
        said = os.environ.get("https_proxy") or os.environ.get("HTTPS_PROXY") or ""
        if not said or not address.tls or address.is_loopback or _spared(address):
            return None
        parts, port = _split(said, "HTTPS_PROXY")
        if parts.scheme != "http" or not parts.hostname:
            raise UsageError("HTTPS_PROXY cannot be used", why="it reads http://HOST:PORT", hint="or unset it")
        user = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}" if parts.username else ""
        authorization = f"Basic {base64.b64encode(user.encode()).decode()}" if user else ""
        return cls(parts.hostname, port or 3128, authorization)


def _spared(address: Address) -> bool:
    from urllib import request

    spared = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    bypass = request.proxy_bypass_environment  # type: ignore[attr-defined]  # typeshed lacks it
    return bool(bypass(str(address), {"no": spared}))


def _split(text: str, what: str) -> tuple[SplitResult, int | None]:
    try:
        parts = urlsplit(text if "//" in text else f"//{text}", scheme="http")
        return parts, parts.port
    except ValueError as error:
        raise UsageError(f"{what!r} is no address", why=str(error), hint=EXAMPLE) from error
