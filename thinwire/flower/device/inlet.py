"""Reading from a socket that may stay silent for minutes: it looks up now and then, and can say that something came."""

from __future__ import annotations

import io
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any

_NOT_YET = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Inlet:
    """A socket as http.client sees it: something to send on, and a file to read from.

    `came` reads what is there already without waiting; it is given by the file afterwards. `quiet` is called every
    `look_s` seconds of silence, with how long it lasts, and ends the wait by raising.
    """

    def __init__(self, sock: socket.socket, look_s: float, quiet: Callable[[float], None]) -> None:
        self._sock, self._look_s, self._quiet = sock, look_s, quiet
        self._ahead = b""

    def came(self) -> bool:
        """Whether the other end has said something, or hung up. TLS's own messages do not count."""
        before = self._sock.gettimeout()
        self._sock.settimeout(0.0)
        try:
            self._ahead += self._sock.recv(65_536)
        except _NOT_YET:
            return False
        except OSError:
            return True
        finally:
            self._sock.settimeout(before)
        return True

    def makefile(self, mode: str, *_: Any) -> io.BufferedReader:
        return io.BufferedReader(_Reading(self))

    def sendall(self, data: Any) -> None:
        self._sock.sendall(data)

    def close(self) -> None:
        """http.client closes what it is done with, and an answer may not be read yet: the line's owner closes it."""

    def read_into(self, buffer: Any) -> int:
        if self._ahead:
            data, self._ahead = self._ahead[: len(buffer)], self._ahead[len(buffer) :]
            buffer[: len(data)] = data
            return len(data)
        began = time.monotonic()
        self._sock.settimeout(self._look_s)
        while True:
            try:
                return self._sock.recv_into(buffer)
            except TimeoutError:
                self._quiet(time.monotonic() - began)


class _Reading(io.RawIOBase):
    def __init__(self, inlet: Inlet) -> None:
        self._inlet = inlet

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._inlet.read_into(memoryview(buffer).cast("B"))
