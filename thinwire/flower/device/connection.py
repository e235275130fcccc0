"""One keep-alive connection of a device: signed requests, bodies from files, the right time, and where to come from."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from thinwire.core.errors import BadPayload, DataLost
from thinwire.flower.device.address import Address
from thinwire.flower.device.call import Call, Slice
from thinwire.flower.device.clockwork import Clockwork
from thinwire.flower.device.inlet import Inlet
from thinwire.flower.device.line import Line, dial, moved
from thinwire.flower.device.trust import Trust
from thinwire.flower.wire.refusals import Refusal
from thinwire.flower.wire.signing import Signer

SILENT_S = 60.0  # without a byte for so long, beyond what a pull waits anyway; also for each piece that is sent
LOOK_S = 5.0  # how often a waiting line looks whether this machine has moved
PIECE_BYTES = 64 * 2**10  # sent at once: a line of 2 kB/s manages it within SILENT_S
MAX_REFUSAL_BYTES = 65_536


class Moved(ConnectionError):
    """This machine comes from another address now: whatever was under way is made again at once."""


class Connection:
    """Used by one thread at a time, but for `close`. `made` yields the answer to a call.

    What the door refuses is raised as `Refusal`; OSError and `http.client.HTTPException` mean that nobody answers. A
    stamp that the door does not take is corrected by the time that it says, and the call made once more at once.
    """

    def __init__(
        self,
        address: Address,
        signer: Signer,
        clock: Clockwork,
        trust: Callable[[], Trust | None] = lambda: None,
        *,
        look_s: float = LOOK_S,
        moved: Callable[[Line], bool] = lambda line: moved(line.sock),
    ) -> None:
        self.address, self._signer, self._clock, self._trust = address, signer, clock, trust
        self._look_s, self._moved = look_s, moved
        self._busy = threading.Lock()
        self._line: Line | None = None
        self._http: http.client.HTTPConnection | None = None
        self._inlet: Inlet | None = None
        self._wait_s = 0.0
        self.closed = False
        self._is_known = False  # whether the aggregator of this line is the one that the last hello was said to

    @contextmanager
    def made(self, call: Call) -> Iterator[http.client.HTTPResponse]:
        with self._busy:
            try:
                answer = self._answered(call)
                yield answer
                if not answer.isclosed() or answer.will_close:
                    self._drop()  # the rest of it would be taken for the next answer
            except Refusal:
                raise
            except BaseException:
                self._drop()
                raise

    def open(self) -> float:
        """Dial if it is not open; gives one round trip in seconds."""
        with self._busy:
            try:
                return self._opened().rtt_s
            except BaseException:
                self._drop()
                raise

    def require_dates(self) -> None:
        """`Unreachable` when the certificate of this connection is not valid now, as far as the time is known."""
        if self._line is not None and self._line.dates is not None:
            self._clock.require_valid(*self._line.dates, str(self.address))

    def known(self) -> None:
        """Note that the aggregator at the other end of this line knows this process by its hello."""
        self._is_known = self._line is not None

    def is_known(self) -> bool:
        """Whether this line is open, and its other end knows this process; of a line in use as far as its user saw."""
        if self._busy.acquire(blocking=False):
            try:
                if self._inlet is not None and self._inlet.came():
                    self._drop()
            finally:
                self._busy.release()
        return self._is_known

    def close(self) -> None:
        """From any thread and for good: whoever waits on it stops waiting."""
        self.closed = True
        if (line := self._line) is not None:
            line.hang_up()
        if self._busy.acquire(timeout=1.0):
            try:
                self._drop()
            finally:
                self._busy.release()

    def _answered(self, call: Call) -> http.client.HTTPResponse:
        try:
            return self._once(call)
        except Refusal as refusal:
            if refusal.kind != "clock" or not refusal.now:
                raise
            self._clock.learn(refusal.now)
        return self._once(call)

    def _once(self, call: Call) -> http.client.HTTPResponse:
        if self._inlet is not None and self._inlet.came():
            self._drop()  # it was closed while it lay idle
        line = self._opened()
        self.require_dates()
        whole = self._send(call, line)
        assert self._http is not None
        self._wait_s = call.wait_s
        answer = self._http.getresponse()
        if answer.chunked and answer.status < 400:
            raise http.client.HTTPException("an answer in chunks, which no aggregator gives")
        if answer.status < 400:
            return answer
        # http.client reads a chunk of -1 bytes without end; what stays unread, the connection is dropped for.
        said = b"" if answer.chunked else answer.read(MAX_REFUSAL_BYTES)
        refusal = Refusal.read(answer.status, said, {name.lower(): value for name, value in answer.getheaders()})
        if not whole or not answer.isclosed() or answer.will_close:
            self._drop()
        raise refusal

    def _send(self, call: Call, line: Line) -> bool:
        """False where the other end had answered before it had all."""
        made = self._http
        assert made is not None
        line.sock.settimeout(SILENT_S)
        made.putrequest(call.method, call.target, skip_accept_encoding=True)
        signed = self._signer.headers(call.method, call.target, call.digest, call.length, whole_key=call.whole_key)
        for name, value in {**signed, **call.headers}.items():
            made.putheader(name, value)
        if call.method in ("POST", "PUT"):
            made.putheader("content-length", str(call.length))
        if isinstance(call.body, bytes):
            made.endheaders(call.body or None)
            return True
        made.endheaders()
        return self._stream(made, call.body)

    def _stream(self, made: http.client.HTTPConnection, body: Slice) -> bool:
        assert self._inlet is not None
        left = body.length
        with _opened(body.path) as file:
            file.seek(body.start)
            while left:
                data = file.read(min(PIECE_BYTES, left))
                if not data:
                    raise BadPayload(f"{body.path} is shorter than its head says")
                if self._inlet.came():
                    return False
                try:
                    made.send(data)
                except (BrokenPipeError, ConnectionResetError):
                    return False  # the answer may be there all the same
                left -= len(data)
        return True

    def _opened(self) -> Line:
        if self.closed:
            raise ConnectionAbortedError("this link was closed")
        if self._line is None:
            self._line = line = dial(self.address, self._trust())
            if self.closed:
                raise ConnectionAbortedError("this link was closed")
            self._inlet = Inlet(line.sock, self._look_s, self._quiet)
            self._http = made = http.client.HTTPConnection(self.address.host, self.address.port)
            made.auto_open = 0  # what is dialled is verified here
            made.sock = self._inlet
        return self._line

    def _quiet(self, silent_s: float) -> None:
        """Called now and then while nothing comes."""
        if self._line is not None and self._moved(self._line):
            raise Moved("this machine's address has changed")
        if silent_s >= self._wait_s + SILENT_S:
            raise TimeoutError(f"nothing came for {silent_s:.0f} s")

    def _drop(self) -> None:
        line, self._line, self._inlet = self._line, None, None
        self._is_known = False
        if self._http is not None:
            self._http.close()
            self._http = None
        if line is not None:
            line.sock.close()


def _opened(path: Path) -> BinaryIO:
    try:
        return open(path, "rb", buffering=0)
    except OSError as error:  # the disk's: the wire's would be tried again
        raise DataLost(f"cannot read {path}", why=error.strerror or str(error)) from error
