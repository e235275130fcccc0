"""A task's dress rehearsal in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from thinwire.cli.say import seconds, size

LINKS_MBIT = (1, 10, 100)


def checked(module: str, data: Path | None, plan: Path | None) -> dict[str, Any]:
    """Rehearse a task by the plan, or by a plan's defaults; the document of `task check --json`."""
    from thinwire.aggregation import codecs
    from thinwire.client import Site, load_task
    from thinwire.client.rehearsal import rehearse
    from thinwire.core import RunPlan

    read = RunPlan.load(plan) if plan else RunPlan.parse('[run]\ntask = "task"\n[local]\nlr = 0.01')
    if refused := read.check(codecs):
        raise refused[0].error()
    task = load_task(module if "=" in module else f"{read.run.task}={module}")
    found = dataclasses.asdict(rehearse(task, Site(data=data.absolute() if data else None), read))
    uploads = {f"{rate}": found["up_bytes"] * 8 / (rate * 1e6) for rate in LINKS_MBIT}
    return {"task": task.name, "plan": str(plan) if plan else None, **found, "upload_s_at_mbit": uploads}


def lines(found: dict[str, Any]) -> Iterator[str]:
    """What a person reads."""
    yield f"{found['task']}: a task that trains"
    yield f"model      {found['parameters']} trained parameters in {found['tensors']} tensors{_beside(found)}"
    if found["left_out"]:
        yield f"not sent   {found['left_out']}"
    tested = "no test data (it will not be measured)"
    if found["test_examples"] is not None:
        tested = f"{found['test_examples']} to be measured on"
    yield f"data       {_count(found['train_examples'])} examples to train on, {tested}"
    yield f"batch      {', '.join(found['batch'])}"
    yield f"loss       {found['loss_before']:.4f} before one step, {found['loss_after']:.4f} after it"
    yield "metrics    " + ", ".join(f"{name} {value:.4f}" for name, value in found["metrics"].items())
    for name in found["counted_once"]:
        yield f"           {name} has a count of 1 over {found['measured']} examples, as a mean has: small batches and"
        yield "           small clients then count as much as large ones; return the sum and the number of examples"
    whose = " of train()" if found["own_train"] else ""
    held = size(found["peak_bytes"])
    yield f"step       {found['step_s'] * 1000:.2f} ms{whose}; this process held {held} at most"
    ratio = found["dense_bytes"] / max(1, found["up_bytes"])
    yield f"a round    {size(found['up_bytes'])} up by {found['codec']}, {ratio:.1f} times less than dense;"
    first = f", {size(found['dense_bytes'])} the first time" if found["down_bytes"] != found["dense_bytes"] else ""
    yield f"           {size(found['down_bytes'])} down{first}"
    times = ", ".join(f"{seconds(value)} at {rate} Mb/s" for rate, value in found["upload_s_at_mbit"].items())
    yield f"upload     {times}"


def _beside(found: dict[str, Any]) -> str:
    kinds = [f"{found[kind]} {kind}" for kind in ("buffers", "frozen") if found[kind]]
    return f", {' and '.join(kinds)} beside them" if kinds else ""


def _count(examples: int | None) -> str:
    return "an unknown number of" if examples is None else str(examples)
