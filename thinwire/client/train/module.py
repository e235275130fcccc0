"""The task's torch module: building it, seeding it, and copying it to and from one flat vector.

Task code draws from global random generators. While it runs they are seeded by a key; afterwards their state is
restored.

In the flat vector tied weights stand once. Frozen tensors and fixed buffers are not sent. Fixed buffers are integers,
bools, complex numbers, and floats that `model()` makes infinite or NaN, as in a mask of -inf. The layout's digest
covers their values, so the aggregator refuses a client whose code makes other values.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import numbers
import random
import zlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from .errors import BadTask, TrainError, describe, place, task_code
from .layout import Key, Layout, Tensor, derive, seed63, slices

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .task import LoadedTask


class InitialModel(NamedTuple):
    """The initial model (version 0): trained parameters, float buffers, counters (single integers), and fixed values.

    `fixed` holds the fixed buffers, and the frozen tensors that `model()` draws at random: a user who loads the
    exported model could not make those. Both are equal in every run, since every client draws them by one seed.
    `left_out` describes the state that is not sent.
    """

    layout: Layout
    params: Vector
    buffers: Vector
    counters: dict[str, int]
    fixed: dict[str, NDArray[Any]]
    left_out: str


def build(task: LoadedTask, key: Key | None = None) -> nn.Module:
    """Build the task's module.

    Without a key every device uses the same seed, so that frozen tensors agree.
    """
    with seeded(key or derive(Key(0), "model")), task_code():
        module = task.module.model()
    if not isinstance(module, nn.Module):
        raise BadTask(
            f"model() of the task {task.name} gave {describe(module)}",
            why="it must give a torch.nn.Module, freshly made",
            hint=_instead(module),
        )
    return module


def first_model(task: LoadedTask, run_seed: int, personal: tuple[str, ...] = ()) -> InitialModel:
    """Draw the initial model by the run's seed, without the tensors that are personal.

    Raise `BadTask` with the place at which the task's code raised.
    """
    try:
        everywhere = build(task)
        layout = layout_of(everywhere).split(personal)[0]
        module = build(task, derive(Key(run_seed), "init"))
    except TrainError:
        raise
    except Exception as error:  # whatever model() raises is the task's error
        raise BadTask(f"model() of the task {task.name} raised {place(error, task.file)}", why=str(error)) from error
    return InitialModel(
        layout, read(module, layout), read_buffers(module, layout),
        read_counters(module, layout), read_fixed(everywhere, layout, module),
        left_out(module),
    )  # fmt: skip


def _instead(value: Any) -> str:
    """Return the code to write in model() in place of this value."""
    if value is None:
        return "return the module at the end of model()"
    if inspect.isclass(value) and issubclass(value, nn.Module):
        return f"return {value.__name__}(...), an object of the class"
    if isinstance(value, Mapping):
        return "make the module, and load these weights: net = Net(); net.load_state_dict(weights); return net"
    if isinstance(value, (tuple, list)):
        return "return the module alone; what goes with it (a tokenizer, a config) stands at the top of the task"
    return "def model(): return nn.Linear(2, 1)"


def seed_all(key: Key) -> None:
    """Seed torch, numpy and `random` so that their next draws depend on the key alone."""
    seed = seed63(key)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
        torch.cuda.manual_seed_all(seed)
    elif torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002 -- task code uses the global generator
    random.seed(seed)


def seed_in_secret(key: Key) -> None:
    """Seed the generators by all 128 bits of a secret key, so that nobody can try all seeds; a GPU keeps 63 of them.

    In `seed_all` numpy and torch on a CPU keep 32. Both have the Mersenne Twister, whose whole state is set here: by
    `init_by_array` (Matsumoto and Nishimura 1998) from the key's words and a number for each library.
    """
    seed_all(key)
    words = [word for half in key for word in (half & 0xFFFFFFFF, half >> 32)]
    np.random.seed([*words, 0])  # noqa: NPY002 -- task code uses the global generator
    twister = np.random.RandomState([*words, 1]).get_state(legacy=False)["state"]["key"]
    state = torch.default_generator.get_state()
    state[24 : 24 + 8 * len(twister)] = torch.from_numpy(twister.astype("<u8").view(np.uint8))
    torch.default_generator.set_state(state)
    random.seed(key.a << 64 | key.b)


_are_kept = ContextVar("_are_kept", default=False)  # True within a `keep_generators` block


@contextlib.contextmanager
def keep_generators() -> Iterator[None]:
    """Restore the generators of this process after the block; a block within another one does nothing.

    To read and restore their state takes longer than the work of a small client, so a simulation has one block for all
    its clients.
    """
    if _are_kept.get():
        yield
        return
    with contextlib.ExitStack() as stack:
        stack.callback(torch.default_generator.set_state, torch.default_generator.get_state())
        stack.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002 -- task code uses the global generator
        stack.callback(random.setstate, random.getstate())
        stack.callback(_are_kept.reset, _are_kept.set(True))
        yield


@contextlib.contextmanager
def seeded(key: Key) -> Iterator[None]:
    """Seed the generators of this process, and restore their state as `keep_generators` does."""
    with keep_generators():
        seed_all(key)
        yield


if TYPE_CHECKING:
    Vector = NDArray[np.float32]

REAL_ONLY = "float32; of a complex number its real and imaginary part, joined by torch.view_as_complex"
MAX_NAMED = 3  # modules named in one message
STORED = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "complex64")


def layout_of(module: nn.Module) -> Layout:
    """Return the layout of a module: its tensors with names, shapes and roles.

    Trained tensors are those with `requires_grad`; buffers are those that a state dict keeps. Raise `BadTask` for a
    model with nothing to train, or with tensors that no float32 vector can hold.
    """
    first: dict[int, str] = {}
    tensors: list[Tensor] = []
    aliases: list[tuple[str, str]] = []
    values: list[torch.Tensor] = []
    for name, tensor, role in _named(module):
        if id(tensor) in first:
            aliases.append((name, first[id(tensor)]))
            continue
        first[id(tensor)] = name
        tensors.append(Tensor(name, tuple(tensor.shape), str(tensor.dtype).split(".")[-1], role))
        values.append(tensor)
    if not any(t.role == "trained" and t.size for t in tensors):
        raise BadTask("model() has nothing to train", why="no parameter has requires_grad", hint="unfreeze some")
    layout, whole = Layout(tuple(tensors), tuple(aliases)), hashlib.sha256()
    untrained, checksums = {t.name for t in layout.untrained}, []
    for t, tensor in zip(tensors, values):
        if t.name in untrained:
            data = _bytes(tensor).data
            whole.update(data)
            checksums.append(f"{zlib.crc32(data):08x}")
    return replace(layout, frozen_digest=whole.hexdigest(), frozen_values=tuple(checksums)) if untrained else layout


def _named(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, str]]:
    """Yield every name of every tensor with its role, in the module's order."""
    for name, parameter in members(module, "_parameters"):
        if nn.parameter.is_lazy(parameter):
            raise BadTask(
                f"model() has a tensor without a shape: {name}",
                why="lazy layers get theirs at the first call",
                hint="call the model once on an example in model(), or give the sizes",
            )
        if parameter.requires_grad and not parameter.dtype.is_floating_point:
            raise BadTask(f"{name} is trained as {parameter.dtype}", why="updates are float32 vectors", hint=REAL_ONLY)
        yield name, parameter, "trained" if parameter.requires_grad else "frozen"
    kept = set(module.state_dict(keep_vars=True))
    for name, buffer in members(module, "_buffers"):
        if name in kept:
            if not buffer.dtype.is_floating_point and str(buffer.dtype).split(".")[-1] not in STORED:
                raise BadTask(
                    f"the buffer {name} is {buffer.dtype}",
                    why="a model is exported as safetensors, which has no such type",
                    hint="complex64 instead of complex128; or register_buffer(.., persistent=False)",
                )
            floats = buffer.dtype.is_floating_point
            yield name, buffer, "buffer" if not floats or bool(np.isfinite(_flat(buffer)).all()) else "fixed"


def left_out(module: nn.Module) -> str:
    """Describe the state that the module's state dict has but that is not sent; return "" if there is none."""
    own = getattr(nn.Module, "get_extra_state", None)  # since torch 1.10
    names = [
        name or type(inner).__name__
        for name, inner in module.named_modules()
        if getattr(type(inner), "get_extra_state", None) is not own
    ]
    said = "get_extra_state() does not travel and is not in the exported model"
    return f"{said}: {', '.join(names[:MAX_NAMED])}" if names else ""


def members(module: nn.Module, kind: str) -> Iterator[tuple[str, Any]]:
    """Yield `_parameters` or `_buffers` of a module by name, with every name of a tied tensor.

    `named_parameters` and `named_buffers` can do so only since torch 2.
    """
    for prefix, inner in module.named_modules(remove_duplicate=False):
        for name, tensor in getattr(inner, kind).items():
            if tensor is not None:
                yield (f"{prefix}.{name}" if prefix else name), tensor


def member(module: nn.Module, name: str) -> torch.Tensor | None:
    """Return the parameter or buffer of this name, or None if the module no longer has it."""
    found: Any = module
    for step in name.split("."):
        found = getattr(found, step, None)
    return found if isinstance(found, torch.Tensor) else None


def hash_values(tensor: torch.Tensor, into: Any) -> None:
    """Feed a tensor's bytes to a hash."""
    into.update(_bytes(tensor).data)


def _bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    found: NDArray[np.uint8] = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return found


def read(module: nn.Module, layout: Layout) -> Vector:
    """Return the trained parameters as one vector, in the order of the layout."""
    out: Vector = np.empty(layout.size, np.float32)
    for t, span in slices(layout.trained):
        out[span] = _flat(_tensor(module, t))
    return out


def write(module: nn.Module, layout: Layout, vector: Vector) -> None:
    """Set the trained parameters and clear their gradients."""
    with torch.no_grad():
        for t, span in slices(layout.trained):
            parameter = _tensor(module, t)
            parameter.copy_(torch.from_numpy(vector[span]).view(t.shape))
            parameter.grad = None


def read_buffers(module: nn.Module, layout: Layout) -> Vector:
    """Return the float buffers (running means and the like) as one vector."""
    parts = [_flat(_tensor(module, t)) for t in layout.buffers]
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def write_buffers(module: nn.Module, layout: Layout, vector: Vector) -> None:
    """Set the float buffers."""
    with torch.no_grad():
        for t, span in slices(layout.buffers):
            _tensor(module, t).copy_(torch.from_numpy(vector[span]).view(t.shape))


def read_kept(module: nn.Module, own: Layout) -> Vector:
    """Return the floats of personal tensors as one vector: parameters, then float buffers."""
    return np.concatenate([read(module, own), read_buffers(module, own)])


def write_kept(module: nn.Module, own: Layout, vector: Vector) -> None:
    """Set the floats of personal tensors."""
    write(module, own, vector[: own.size])
    write_buffers(module, own, vector[own.size :])


def zeros(size: int) -> Vector:
    """Return a vector of zeros."""
    return np.zeros(size, np.float32)


def read_counters(module: nn.Module, layout: Layout) -> dict[str, int]:
    """Return the integer buffers of one element by name."""
    return {t.name: int(_tensor(module, t).item()) for t in layout.counters}


def read_fixed(module: nn.Module, layout: Layout, otherwise_seeded: nn.Module) -> dict[str, NDArray[Any]]:
    """Return by name the fixed buffers, and the frozen tensors that differ in a module built with another seed."""
    drawn = [t for t in layout.tensors if t.role == "frozen" and not _equal(module, otherwise_seeded, t)]
    return {t.name: _array(_tensor(module, t)) for t in (*layout.fixed, *drawn)}


def _equal(one: nn.Module, other: nn.Module, t: Tensor) -> bool:
    return bool((_bytes(_tensor(one, t)) == _bytes(_tensor(other, t))).all())


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    kept = tensor.detach().cpu()
    lacking = str(kept.dtype).startswith(("torch.bfloat", "torch.float8"))  # numpy has no such types
    found: NDArray[Any] = (kept.float() if lacking else kept).numpy().copy()
    return found


def write_counters(module: nn.Module, layout: Layout, values: Mapping[str, int]) -> None:
    """Set those integer buffers that `values` names."""
    with torch.no_grad():
        for t in layout.counters:
            if t.name in values:
                _tensor(module, t).fill_(values[t.name])


def _tensor(module: nn.Module, t: Tensor) -> torch.Tensor:
    """Return a tensor of the model; raise `BadTask` if task code removed it or changed its shape."""
    found = member(module, t.name)
    if found is None or tuple(found.shape) != t.shape:
        now = "is no longer in the model" if found is None else f"now has the shape {tuple(found.shape)}"
        raise BadTask(
            f"{t.name} {now}", why="training changed the model's structure", hint="give model() its final structure"
        )
    return found


def _flat(tensor: torch.Tensor) -> Vector:
    return tensor.detach().to("cpu", torch.float32).reshape(-1).numpy()


def as_loss(value: Any) -> torch.Tensor:
    """Return the result of `loss` as a scalar tensor; raise `BadTask` if it is not one number."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_floating_point():
        return value.reshape(())
    raise BadTask(
        f"loss(model, batch) gave {describe(value)}",
        why="it must give one number as a tensor of floats, which torch can differentiate",
        hint=_one_number(value),
    )


def _one_number(value: Any) -> str:
    """Return the code to write in loss(model, batch) in place of this value."""
    if value is None:
        return "return the loss at the end of loss(model, batch)"
    if isinstance(value, torch.Tensor):
        return "return loss.mean()" if value.numel() > 1 else "a tensor of one float: .mean() of the losses"
    if isinstance(value, (numbers.Number, np.ndarray)):
        return "return the tensor itself, without .item(), float() or .numpy()"
    if isinstance(value, Mapping):
        return 'return output["loss"]'
    if isinstance(value, (tuple, list)):
        return "return the loss alone; what else is measured goes into metrics(model, batch)"
    return "return nn.functional.cross_entropy(model(inputs), targets)"
