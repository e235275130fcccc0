"""The worker: a process that trains. It is started with one socket, serves requests on it, and ends when it is closed.

    {"do": "load", "tasks", "device", "threads"}    {"loaded", "device", "versions"} | {"missing"} | {"wrong"}
    {"do": "work", "id", "task", ..} and vectors    {"told"} .. {"done"} and vectors | {"failed"} | {"cancelled"}
    {"do": "cancel", "id"}

The task's prints go to stdout and stderr, which are the client's log; they never reach the socket.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import platform
import select
import signal
import socket
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import Cancelled, FastExit, TrainError, full_text, kind, place
from .framed_socket import FramedSocket
from .protocol import ClientInfo, TrainRequest
from .task import LoadedTask, load_task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .private import Secrets
    from .runtime import TaskRuntime


TELL_S = 0.5  # between two progress messages
EXIT_GRACE_S = 2.0  # time to finish after the client has closed the socket
MAX_TEXT, MAX_TRACE = 2000, 64000
DEVICE_ERRORS = ("CUDA error", "CUBLAS_", "CUDNN_", "HIP error", "MPS backend")  # of torch
FIRST_KILLED = "800"  # of 1000: out of memory, the kernel kills this process before the client that restarts it


def main(descriptor: int, secrets: Callable[[], Secrets] | None = None) -> None:
    """Serve the socket with this file descriptor until it is closed; `secrets` is for training with noise."""
    ending = FastExit()
    faulthandler.enable()
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(FIRST_KILLED)
    sock = socket.socket(fileno=descriptor)
    threading.Thread(target=_end_with, args=(descriptor,), daemon=True).start()
    with contextlib.suppress(EOFError):
        WorkerLoop(FramedSocket(sock), secrets).run()
    ending.code = 0


def _end_with(descriptor: int) -> None:
    """Kill this process once the client has closed the socket: nobody needs the work in progress any more."""
    poll = select.poll()
    poll.register(descriptor, getattr(select, "POLLRDHUP", 0))
    poll.poll()
    time.sleep(EXIT_GRACE_S)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)  # including all processes that the task has started
    os._exit(1)


class WorkerLoop:
    """Serves one client; handles one request at a time."""

    def __init__(self, wire: FramedSocket, secrets: Callable[[], Secrets] | None = None) -> None:
        self.wire, self.device, self.secrets = wire, "cpu", secrets
        self.runtimes: dict[str, TaskRuntime] = {}
        self._poll = select.poll()
        self._poll.register(wire.sock.fileno(), select.POLLIN)

    def run(self) -> None:
        """Handle requests until the socket is closed; raise `EOFError` then."""
        while True:
            header = self.wire.header()
            if header["do"] == "load":
                with imported_for_good():
                    loaded = self.load(header)
                self.wire.send(loaded)
            elif header["do"] == "work":
                self.work(header)

    def load(self, header: Mapping[str, Any]) -> dict[str, Any]:
        """Import the tasks and describe their models."""
        try:
            import torch

            from .runtime import TaskRuntime, compute_device, use_threads
        except ModuleNotFoundError as error:
            return {"missing": error.name}
        use_threads(header["threads"])
        try:
            self.device = compute_device(header["device"])
        except TrainError as wrong:
            return {"wrong": _wrong(wrong)}
        found = []
        for spec in header["tasks"]:
            try:
                task = load_task(spec)
            except TrainError as wrong:
                found.append({"spec": spec, "wrong": _wrong(wrong)})
                continue
            self.runtimes[task.name] = runtime = TaskRuntime(task, self.device, self.secrets)
            found.append({"spec": spec, **_described(runtime, task)})
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        return {"loaded": found, "device": self.device, "versions": versions}

    def work(self, header: Mapping[str, Any]) -> None:
        """Execute one request and send its result, its failure or its cancellation."""
        runtime, number = self.runtimes[header["task"]], header["id"]
        request, client = (
            TrainRequest.from_json(header["order"]),
            replace(_client_info(header["client"]), device=self.device),
        )
        layout, began = runtime.layout, time.monotonic()
        given = ["params", *(name for name in ("buffers", "shift", "kept") if header[name])]
        shared, own = layout.split(request.personal)
        size_of = {"buffers": shared.buffer_size, "kept": own.size + own.buffer_size}
        sizes = [size_of.get(name, shared.size) for name in given]
        vectors = dict(zip(given, self.wire.vectors(header, sizes)))
        state = self.wire.arrays(header, request.max_state_bytes) or {}
        receive_s, told_at = time.monotonic() - began, 0.0
        request = replace(request.after(receive_s), shift=vectors.get("shift"), kept=vectors.get("kept"), state=state)

        def on_progress(what: str, done: int, total: int) -> None:
            nonlocal told_at
            now = time.monotonic()
            if now - told_at >= TELL_S or done == total:
                told_at = now
                self.wire.send({"told": [what, done, total]})

        try:
            done = runtime.do(
                request, client, vectors["params"], vectors.get("buffers"), on_progress, lambda: self._cancelled(number)
            )
        except Cancelled:
            self.wire.send({"cancelled": number})
        except Exception as error:  # the task's code may raise anything; the client replies with it
            self.wire.send({"failed": _failed(error, runtime.task.file)})
        else:
            done.load_s += receive_s
            trained = [vector for vector in (done.params, done.buffers, done.kept) if vector is not None]
            self.wire.send({"done": done.to_json()}, *trained, arrays=done.state)

    def _cancelled(self, number: int) -> bool:
        """Return True if the client has cancelled this request; called between two batches."""
        while self._poll.poll(0):
            header = self.wire.header()
            if header["do"] == "cancel" and header["id"] == number:
                return True
        return False


def _described(runtime: TaskRuntime, task: LoadedTask) -> dict[str, Any]:
    """Describe a task: its version, source and layout, or the place of the error that `model()` raised."""
    told: dict[str, Any] = {
        "name": task.name, "version": task.version, "source_digest": task.source_digest, "file": task.file,
        "layout": None, "error": "", "left_out": "",
    }  # fmt: skip
    try:
        told["layout"] = runtime.layout.to_json()
        told["left_out"] = runtime.left_out
    except Exception as error:  # model() may raise anything; another task of this device may work
        told["error"] = place(error, task.file)
        traceback.print_exc()
    return told


def _failed(error: Exception, file: str) -> dict[str, Any]:
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    found = {
        "kind": kind(error),
        "place": place(error, file),
        "said": full_text(error)[:MAX_TEXT],
        "trace": trace[-MAX_TRACE:],
    }
    return {**found, "out_of_memory": out_of_memory(error), "broken": breaks_device(error)}


def out_of_memory(error: BaseException) -> bool:
    """Return True for an out-of-memory error of Python or torch.

    For a GPU torch has a class of its own; for the machine's memory it raises a RuntimeError whose text names the
    cause.
    """
    if isinstance(error, MemoryError):
        return True
    said = str(error)
    return isinstance(error, RuntimeError) and ("out of memory" in said or "can't allocate memory" in said)


def breaks_device(error: BaseException) -> bool:
    """Return True for an error of a GPU that may stay in this process: each later call would fail by it."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in DEVICE_ERRORS)


def _wrong(wrong: TrainError) -> list[str]:
    return [type(wrong).__name__, wrong.what, wrong.why, wrong.hint]


def _client_info(raw: Mapping[str, Any]) -> ClientInfo:
    return ClientInfo(**{**raw, "data": Path(raw["data"]) if raw["data"] else None})


@contextlib.contextmanager
def imported_for_good() -> Iterator[None]:
    """Exclude the objects made in this block from garbage collection, now and in every later collection.

    It is for imports that stay until the process ends. The import of torch takes a tenth less time, that of Flower's
    SuperLink an eighth.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
