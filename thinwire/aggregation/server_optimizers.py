"""Server optimizers: make the next model from the mean change of a round.

The mean change takes the place of a negative gradient: x' = x + lr * f(change). The optimizer's state is saved with
each version of the model and restored bit for bit, so a run that was killed continues with the same numbers.

The learning rate of a step is `[server] lr` times the factor of the plan's schedule. The factor depends on the position
in the run, from 0 to 1: the middle of the step, (steps made + 1/2) / rounds. The steps that a run has made follow from
its journal. `lr_factor` computes the same values as `Schedule` of `client/train/schedule.py`, for a worker without this
package; a test holds both equal.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from thinwire.compression.vector_ops import blocks
from thinwire.core.errors import CodecError
from thinwire.core.plan_schema import ServerSection
from thinwire.core.registry import Registry
from thinwire.core.types import State, Vector

if TYPE_CHECKING:
    from thinwire.core.plan import RunPlan

MOMENTUM, SECOND = "momentum", "second"  # names in the state
SETTINGS = ("momentum", "beta2", "tau")  # keys of the plan's [server]
LARGEST = np.finfo(np.float32).max


CONTRACT = "a subclass of thinwire.aggregation.ServerOptimizer: docs/how/your-own-optimizer.md"


class ServerOptimizer(ABC):
    """A server optimizer, constructed for each step with `lr` and its keys of `SETTINGS` that the plan gives.

    A subclass is a frozen dataclass with `lr`, whose other fields have defaults.
    """

    @abstractmethod
    def step(self, params: Vector, change: Vector, state: State) -> tuple[Vector, State]:
        """Return the next model and the next state.

        `params` and `change` are float32 of the same size. All three arguments are donated: the step may overwrite
        them. The first state is empty; a later one is the state that the last step returned, arrays by name.
        """


@dataclass(frozen=True)
class FedAvg(ServerOptimizer):
    """Federated averaging (McMahan et al. 2017): x' = x + lr * change; lr = 1 is plain averaging.

    >>> FedAvg(lr=0.5).step(np.float32([1, 2]), np.float32([2, 2]), {})[0]
    array([2., 3.], dtype=float32)
    """

    lr: float = 1.0

    def step(self, params: Vector, change: Vector, state: State) -> tuple[Vector, State]:
        rate = np.float32(self.lr)
        for start, stop in blocks(params.size):
            params[start:stop] += rate * change[start:stop]
        return params, state


@dataclass(frozen=True)
class FedAvgM(ServerOptimizer):
    """Federated averaging with server momentum (Hsu, Qi and Brown 2019), steadier if clients differ.

        v' = momentum v + change;  x' = x + lr v'

    >>> FedAvgM(momentum=0.5).step(np.float32([0]), np.float32([1]), {"momentum": np.float32([2])})[0]
    array([2.], dtype=float32)
    """

    lr: float = 1.0
    momentum: float = 0.9

    def step(self, params: Vector, change: Vector, state: State) -> tuple[Vector, State]:
        velocity = _state_or_default(state, MOMENTUM, params, 0.0)
        rate, kept = np.float32(self.lr), np.float32(self.momentum)
        for start, stop in blocks(params.size):
            here = velocity[start:stop]
            here *= kept
            here += change[start:stop]
            params[start:stop] += rate * here
        return params, {MOMENTUM: velocity}


@dataclass(frozen=True)
class FedAdagrad(ServerOptimizer):
    """Adagrad on the server ("Adaptive federated optimization", algorithm 2, Reddi et al. 2021; Duchi et al. 2011).

        m' = momentum m + (1 - momentum) change;  v' = v + change^2
        x' = x + lr m' / (sqrt(v') + tau)

    v begins at tau^2, as in the paper. It only grows, so steps become smaller.

    >>> FedAdagrad().second(np.float32([4]), np.float32([1]))
    array([5.], dtype=float32)
    """

    lr: float = 1.0
    momentum: float = 0.0
    tau: float = 1e-3

    def step(self, params: Vector, change: Vector, state: State) -> tuple[Vector, State]:
        first, second = (
            _state_or_default(state, MOMENTUM, params, 0.0),
            _state_or_default(state, SECOND, params, self.tau**2),
        )
        rate, kept, tau = np.float32(self.lr), np.float32(self.momentum), np.float32(self.tau)
        with np.errstate(over="ignore"):
            for start, stop in blocks(params.size):
                m, v, moved = first[start:stop], second[start:stop], change[start:stop]
                m *= kept
                m += (1 - kept) * moved
                v[:] = np.minimum(self.second(v, moved * moved), LARGEST)
                params[start:stop] += rate * m / (np.sqrt(v) + tau)
        return params, {MOMENTUM: first, SECOND: second}

    def second(self, v: Vector, square: Vector) -> Vector:
        """Return the next v of a block."""
        return v + square


@dataclass(frozen=True)
class FedAdam(FedAdagrad):
    """Adam on the server (Reddi et al. 2021): FedAdagrad with v' = beta2 v + (1 - beta2) change^2.

    There is no bias correction, as in the paper.

    >>> FedAdam(lr=0.1, momentum=0.0, beta2=0.0, tau=1e-9).step(np.float32([1]), np.float32([7]), {})[0]
    array([1.1], dtype=float32)
    """

    momentum: float = 0.9
    beta2: float = 0.99

    def second(self, v: Vector, square: Vector) -> Vector:
        kept = np.float32(self.beta2)
        return kept * v + (1 - kept) * square


@dataclass(frozen=True)
class FedYogi(FedAdam):
    """Yogi on the server (Reddi et al. 2021; Zaheer et al. 2018): FedAdam with another second moment.

        v' = v - (1 - beta2) change^2 sign(v - change^2)

    v moves by no more than the squared change, so that a few quiet rounds do not enlarge the next step.

    >>> FedYogi(beta2=0.5).second(np.float32([4]), np.float32([1]))
    array([3.5], dtype=float32)
    """

    def second(self, v: Vector, square: Vector) -> Vector:
        part: Vector = np.minimum((1 - np.float32(self.beta2)) * square, LARGEST)
        moved: Vector = v - part * np.sign(v - square)
        return moved


def _state_or_default(state: State, name: str, like: Vector, begin: float) -> Vector:
    return state[name] if name in state else np.full_like(like, begin)


def settings(name: str) -> Iterator[str]:
    """Yield the plan's keys that an optimizer knows besides lr.

    >>> list(settings("fedavgm")), list(settings("fedadagrad"))
    (['momentum'], ['momentum', 'tau'])
    """
    known = inspect.signature(optimizers.find(name)).parameters
    yield from (key for key in SETTINGS if key in known)


def server_optimizer(server: ServerSection) -> ServerOptimizer:
    """Return the plan's optimizer with the keys that the plan gives.

    Raise CodecError for a key that the optimizer does not know.
    """
    known = list(settings(server.optimizer))
    given = {key: getattr(server, key) for key in SETTINGS if getattr(server, key) is not None}
    for key in given:
        if key not in known:
            knows = f"it knows lr, {', '.join(known)}" if known else "it knows lr only"
            raise CodecError(
                f"[server] {key} with optimizer = {server.optimizer!r}", why=knows, hint=f"leave {key} out"
            )
    return optimizers.find(server.optimizer)(lr=server.lr, **given)


def lr_factor(kind: str, warmup: float, end: float, position: float) -> float:
    """Return the factor of the learning rate at a position in the run, from 0 to 1.

    `kind` is constant, linear or cosine (Loshchilov and Hutter 2017, without restarts). Over the share `warmup` of the
    run the factor rises from 0 to 1; over the rest it falls from 1 to `end`.

    >>> lr_factor("linear", 0.0, 0.0, 0.75), lr_factor("constant", 0.5, 0.0, 0.25)
    (0.25, 0.5)
    """
    position = min(1.0, position)
    if position < warmup:
        return position / warmup
    if kind == "constant":
        return 1.0
    gone = (position - warmup) / (1.0 - warmup)
    left = 1.0 - gone if kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * gone))
    return end + (1.0 - end) * left


def server_rate(plan: RunPlan, steps_made: int) -> float:
    """Return the learning rate of the server's next step, in a run that has made so many steps."""
    server = plan.server
    position = (steps_made + 0.5) / (server.schedule_rounds or plan.run.rounds)
    return server.lr * lr_factor(server.schedule, server.lr_warmup, server.lr_end, position)


def server_section_at(plan: RunPlan, steps_made: int) -> ServerSection:
    """Return `[server]` with the learning rate of the next step as its `lr`."""
    return plan.server.model_copy(update={"lr": server_rate(plan, steps_made)}) if plan.server.moves else plan.server


def apply_optimizer(server: ServerSection, params: Vector, change: Vector, state: State) -> tuple[Vector, State]:
    """Apply the plan's optimizer, and return the next model and state.

    Raise CodecError if an optimizer of another package returns anything but a model and a state.
    """
    size = params.size
    given = server_optimizer(server).step(params, change, state)
    if wrong := _problem_with(given, size):
        raise CodecError(f"the step of the server optimizer {server.optimizer!r}", why=wrong, hint=CONTRACT)
    return given


def _problem_with(given: Any, size: int) -> str:
    """Return why the result of a step is not valid; "" if it is."""
    if not (isinstance(given, tuple) and len(given) == 2):
        return f"it gave {type(given).__name__}, not (params, state)"
    params, state = given
    if not (isinstance(params, np.ndarray) and params.dtype == np.float32 and params.shape == (size,)):
        return f"its params are no float32 vector of {size}"
    if not (isinstance(state, Mapping) and all(isinstance(array, np.ndarray) for array in state.values())):
        return "its state is no dictionary of numpy arrays"
    return ""


def admit(name: str, thing: Any) -> Callable[..., ServerOptimizer]:
    """Return an optimizer of another package; raise CodecError unless it is a whole class that lr alone makes."""
    called = f"{getattr(thing, '__module__', '?')}:{getattr(thing, '__name__', type(thing).__name__)}"
    if not (isinstance(thing, type) and issubclass(thing, ServerOptimizer)):
        why = f"{called} is no subclass of ServerOptimizer"
    elif missing := sorted(getattr(thing, "__abstractmethods__", ())):
        why = f"{called} has no {', '.join(missing)}"
    else:
        try:
            inspect.signature(thing).bind(lr=1.0)
        except TypeError:
            why = f"{called} is not made with lr alone"
        else:
            return thing
    raise CodecError(f"{name!r} is no server optimizer", why=why, hint=CONTRACT)


optimizers: Registry[Callable[..., ServerOptimizer]] = Registry(
    "server optimizer", "thinwire.optimizers", admit, places=True
)
for optimizer in (FedAvg, FedAvgM, FedAdam, FedYogi, FedAdagrad):
    optimizers.add(optimizer.__name__.lower(), optimizer)
