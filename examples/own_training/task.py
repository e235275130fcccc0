"""The digits of examples/digits with a training loop of the task's own: SGD whose momentum each client keeps.

`context.state` holds the momentum between a client's assignments. No optimizer of torch is needed for it.
"""

import importlib.util
import itertools
from pathlib import Path

import torch
from torch.utils.data import DataLoader

digits = importlib.util.module_from_spec(
    spec := importlib.util.spec_from_file_location("digits_task", Path(__file__).parents[1] / "digits" / "task.py")
)
spec.loader.exec_module(digits)
model, data, loss = digits.model, digits.data, digits.loss

MOMENTUM = 0.9


def train(model, data, context):
    """Make `[local] steps` steps, or fewer if the time is up; return the examples seen."""
    steps, seen = context.local.steps, 0
    kept = {name: torch.from_numpy(array) for name, array in context.state.items()}
    velocity = {name: kept.get(name, torch.zeros_like(p)) for name, p in model.named_parameters()}
    batches = itertools.chain.from_iterable(itertools.repeat(DataLoader(data, context.local.batch, shuffle=True)))
    for step in range(steps):
        if context.should_stop():
            break
        batch = next(batches)
        value = loss(model, batch)
        model.zero_grad()
        value.backward()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                velocity[name].mul_(MOMENTUM).add_(parameter.grad)
                parameter.add_(velocity[name], alpha=-context.lr((step + 0.5) / steps))
        seen += len(batch[0])
        context.report("loss", value, len(batch[0]))
        context.progress(step + 1, steps)
    context.state = {name: values.numpy() for name, values in velocity.items()}
    return seen
