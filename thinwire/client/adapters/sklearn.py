"""Tasks of scikit-learn's linear models and multilayer perceptrons: the estimator's weights as a torch module.

    SGDClassifier, SGDRegressor            scikit-learn trains them, with partial_fit
    MLPClassifier, MLPRegressor            scikit-learn trains them, with partial_fit
    LogisticRegression, LinearRegression,  have no partial_fit: Thinwire's own loop minimizes the same objective, with
    Ridge                                  all keys of [local]

Invariant, tested: the torch module's predictions are those of the estimator with the same weights. The estimator is
never changed; `fitted` returns one that predicts with a trained model's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from thinwire.client.train.errors import BadTask
from thinwire.client.train.protocol import Split

from .adapted import AdaptedTask, RoundWork, imported, require_defaults

if TYPE_CHECKING:
    from thinwire.client.train.protocol import ClientInfo

PLAN = {
    "eta0": "[local] lr",
    "learning_rate": "[local] schedule",
    "learning_rate_init": "[local] lr",
    "power_t": "[local] schedule",
    "max_iter": "[local] epochs",
    "batch_size": "[local] batch",
}
NO_EFFECT = (
    "average", "class_weight", "dual", "early_stopping", "intercept_scaling", "l1_ratio", "max_fun", "n_iter_no_change",
    "positive", "solver", "tol", "validation_fraction", "warm_start",
)  # fmt: skip
TREES = ("sklearn.tree", "sklearn.ensemble", "xgboost", "lightgbm", "catboost")
ACTIVATIONS = {"identity": nn.Identity, "logistic": nn.Sigmoid, "tanh": nn.Tanh, "relu": nn.ReLU}


def _softmax(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if scores.shape[1] > 1:
        return nn.functional.cross_entropy(scores, targets, reduction="none")
    return nn.functional.binary_cross_entropy_with_logits(scores[:, 0], targets.to(scores.dtype), reduction="none")


def _squared(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return 0.5 * (scores - targets.reshape(scores.shape)).square().mean(1)


def _one_against_rest(of_margin: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    def loss(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        width = scores.shape[1]
        hot = nn.functional.one_hot(targets, width) if width > 1 else targets.reshape(-1, 1)
        return of_margin(scores * (2 * hot - 1)).sum(1)

    return loss


LOSSES = {
    "log_loss": _one_against_rest(lambda margin: nn.functional.softplus(-margin)),
    "hinge": _one_against_rest(lambda margin: torch.relu(1 - margin)),
    "squared_hinge": _one_against_rest(lambda margin: torch.relu(1 - margin).square()),
    "squared_error": _squared,
}  # of SGDClassifier and SGDRegressor, for one example each


@dataclass(frozen=True)
class _Kind:
    """Describes how an estimator becomes a task, and its parameters that have an effect besides those of all kinds."""

    classifies: bool
    by: str  # "sgd": partial_fit of a linear model, "mlp": partial_fit of a perceptron, "loop": Thinwire's own loop
    effective: tuple[str, ...] = ()


KINDS = {
    "SGDClassifier": _Kind(True, "sgd", ("l1_ratio", "class_weight")),
    "SGDRegressor": _Kind(False, "sgd", ("l1_ratio",)),
    "MLPClassifier": _Kind(True, "mlp", ("solver",)),
    "MLPRegressor": _Kind(False, "mlp", ("solver",)),
    "LogisticRegression": _Kind(True, "loop"),
    "LinearRegression": _Kind(False, "loop"),
    "Ridge": _Kind(False, "loop"),
}


def task(
    estimator: Any,
    data: Callable[[ClientInfo], Any],
    *,
    features: int,
    classes: Iterable[Any] = (),
    outputs: int = 1,
    examples: int | None = None,
) -> AdaptedTask:
    """Return the task of an estimator.

    `data(client)` gives `(X, y)` or `Split((X, y), (X, y))` for training and test: arrays of shape (examples, features)
    and (examples,). `classes` are all labels that any client may have; a regressor has `outputs` targets instead.
    `examples` is the number of training examples of all clients together: the penalty of a LogisticRegression or Ridge
    is shared by them. The run's seed replaces `random_state`. Raise `BadTask` for another kind of estimator, and for a
    parameter that would have no effect.
    """
    return AdaptedTask(*_Adapter.of(estimator, features, tuple(classes), outputs, examples).functions(data))


def fitted(estimator: Any, weights: Mapping[str, Any], classes: Iterable[Any] = ()) -> Any:
    """Return a copy of the estimator that predicts with the weights of a trained model.

    `weights` are the tensors of the model by name, as `safetensors.numpy.load_file` reads them from the file of
    `thinwire runs model`.
    """
    arrays = {name: np.asarray(value, np.float32) for name, value in weights.items()}
    prefixes = [name[: -len("weight")] for name in arrays if name.endswith("weight")]  # "" or "0.", "2.", "10."
    layers = [
        (arrays[one + "weight"], arrays.get(one + "bias")) for one in sorted(prefixes, key=lambda one: (len(one), one))
    ]
    adapter = _Adapter.of(estimator, layers[0][0].shape[1], tuple(classes), layers[-1][0].shape[0], 1)
    return adapter.filled(layers)


@dataclass(frozen=True)
class _Adapter:
    """The functions of the task of one estimator."""

    estimator: Any
    kind: _Kind
    features: int
    classes: tuple[Any, ...]
    outputs: int  # columns of scores: two classes have one
    penalty: float  # times the squared norm of the weights, in the mean loss of an example
    example_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    @classmethod
    def of(
        cls, estimator: Any, features: int, classes: tuple[Any, ...], outputs: int, examples: int | None
    ) -> _Adapter:
        kind, params = _kind_of(estimator), estimator.get_params()
        if kind.classifies and len(classes) < 2:
            raise BadTask(
                f"{_name(estimator)} with {len(classes)} classes",
                why="a client may lack a class, so the task names all of them",
                hint="sklearn.task(..., classes=range(10))",
            )
        name = params.get("loss", "squared_error")
        if kind.by == "sgd" and name not in LOSSES:
            raise BadTask(
                f"{_name(estimator)}(loss={name!r}) is not supported",
                why="clients evaluate the loss themselves, in torch",
                hint=f"one of {', '.join(sorted(LOSSES))}",
            )
        width = outputs if not kind.classifies else 1 if len(classes) == 2 else len(classes)
        loss = LOSSES[name] if kind.by == "sgd" else _softmax if kind.classifies else _squared
        ordered = tuple(sorted(classes)) if kind.classifies else ()
        return cls(estimator, kind, features, ordered, width, _penalty(estimator, kind, examples, width), loss)

    def functions(self, data: Callable[[ClientInfo], Any]) -> tuple[Any, ...]:
        """Return model, data, loss, metrics and train."""

        def split(client: ClientInfo) -> Split:
            given = data(client)
            train, test = (given.train, given.test) if isinstance(given, Split) else (given, None)
            return Split(self.examples(train), None if test is None else self.examples(test))

        return self.model, split, self.loss, self.metrics, None if self.kind.by == "loop" else self.train

    def model(self) -> nn.Module:
        """Make the module: zeros for a linear model, Glorot's uniform weights for a perceptron, as scikit-learn."""
        params = self.estimator.get_params()
        if self.kind.by != "mlp":
            linear = nn.Linear(self.features, self.outputs, bias=params["fit_intercept"])
            for parameter in linear.parameters():
                nn.init.zeros_(parameter)
            return linear
        hidden, activation = params["hidden_layer_sizes"], params["activation"]
        widths = [self.features, *(hidden if hasattr(hidden, "__iter__") else (hidden,)), self.outputs]
        layers: list[nn.Module] = []
        for fan_in, fan_out in zip(widths, widths[1:]):
            layer = nn.Linear(fan_in, fan_out)
            bound = ((2.0 if activation == "logistic" else 6.0) / (fan_in + fan_out)) ** 0.5
            for parameter in layer.parameters():
                nn.init.uniform_(parameter, -bound, bound)
            layers += [layer, ACTIVATIONS[activation]()]
        return nn.Sequential(*layers[:-1])

    def examples(self, given: Any) -> TensorDataset:
        """Return (X, y) as tensors, each label as the index of its class; raise `BadTask` for other shapes."""
        inputs, targets = given if isinstance(given, (tuple, list)) and len(given) == 2 else (None, ())
        if inputs is None or hasattr(inputs, "toarray") or np.ndim(inputs) != 2 or len(inputs) != len(targets):
            raise BadTask(
                "data(client) gave no (X, y) of dense arrays of the same length",
                why="X has a row for each example, and y its label",
                hint="return Split((X[train], y[train]), (X[test], y[test])); X.toarray() for a sparse X",
            )
        values, labels = np.asarray(inputs, np.float32), np.asarray(targets)
        if values.shape[1] != self.features:
            raise BadTask(
                f"data(client) gave {values.shape[1]} features, and the task has {self.features}",
                why="all clients train weights of one shape",
                hint=f"sklearn.task(..., features={values.shape[1]})",
            )
        if not self.kind.classifies:
            return TensorDataset(torch.from_numpy(values), torch.from_numpy(labels.astype(np.float32)))
        known = np.asarray(self.classes)
        index = np.minimum(np.searchsorted(known, labels), len(known) - 1)
        if not bool((known[index] == labels).all()):
            raise BadTask(
                "data(client) gave a label that is not one of the classes",
                why="the scores of a class are a row of the weights",
                hint="sklearn.task(..., classes=) with the labels of all clients",
            )
        return TensorDataset(torch.from_numpy(values), torch.from_numpy(index.astype(np.int64)))

    def loss(self, model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the mean loss of a batch, and the penalty if Thinwire's own loop minimizes it."""
        found = self.example_loss(model(batch[0]), batch[1]).mean()
        return found + self.penalty * model.weight.square().sum() if self.penalty else found  # type: ignore[operator]  # of nn.Linear

    def metrics(self, model: nn.Module, batch: Sequence[torch.Tensor]) -> dict[str, tuple[float, float]]:
        """Return the loss without penalty, and the accuracy of a classifier or a regressor's squared error."""
        scores, targets, count = model(batch[0]), batch[1], float(len(batch[1]))
        found = {"loss": (float(self.example_loss(scores, targets).detach().sum()), count)}
        if self.kind.classifies:
            predicted = scores.argmax(1) if self.outputs > 1 else (scores[:, 0] > 0).long()
            return {**found, "accuracy": (float((predicted == targets).sum()), count)}
        return {**found, "squared_error": (2 * found["loss"][0], count)}

    def train(self, model: nn.Module, data: TensorDataset, context: Any) -> int:
        """Train by partial_fit, with the weights of the module before and after; return the examples' weight."""
        inputs, targets = (tensor.numpy() for tensor in data.tensors)
        labels = np.asarray(self.classes)[targets] if self.kind.classifies else targets
        work = RoundWork.of(context.local, len(inputs))
        linears = [dict(layer.named_parameters()) for layer in model.modules() if isinstance(layer, nn.Linear)]
        weights = [(one["weight"].detach().cpu().numpy(), _values(one.get("bias"))) for one in linears]
        trained, done = self.filled(weights, int(np.random.randint(1 << 31))), 0  # noqa: NPY002 -- seeded
        for done, rows in enumerate(work.batches(), 1):
            self._set_rate(trained, float(context.lr((done - 0.5) / work.steps)), len(rows))
            trained.partial_fit(inputs[rows], labels[rows])
            context.progress(done, work.steps)
            if context.should_stop():
                break
        with torch.no_grad():
            for layer, (weight, bias) in zip(linears, self._layers(trained)):
                layer["weight"].copy_(torch.from_numpy(np.ascontiguousarray(weight)))
                if "bias" in layer:
                    layer["bias"].copy_(torch.from_numpy(np.ascontiguousarray(bias)))
        return work.weight(done)

    def filled(self, layers: list[Any], seed: int = 0) -> Any:
        """Return a copy of the estimator with these weights, and the state of an optimizer that has made no step."""
        made = imported("sklearn.base", "scikit-learn").clone(self.estimator)
        if self.kind.by == "loop":
            (weight, bias), one = layers[0], self.outputs == 1 and not self.kind.classifies
            made.coef_ = weight[0] if one else weight
            made.intercept_ = 0.0 if bias is None else bias[0] if one else bias
            made.n_features_in_ = self.features
            if self.kind.classifies:
                made.classes_ = np.asarray(self.classes)
            return made
        made.set_params(random_state=seed)
        self._set_rate(made, 0.1, 1)
        count = max(2, len(self.classes))
        labels = np.asarray(self.classes) if self.kind.classifies else np.zeros((count, self.outputs), np.float32)
        classes = {"classes": labels} if self.kind.classifies else {}
        labels = labels if self.kind.classifies or self.outputs > 1 else labels[:, 0]
        made.partial_fit(np.zeros((count, self.features), np.float32), labels, **classes)  # allocates everything
        for kept, given in zip(self._layers(made), layers):
            kept[0][...] = given[0]
            kept[1][...] = 0.0 if given[1] is None else given[1]
        if self.kind.by == "mlp":
            del made._optimizer  # with the moments of that call; the next partial_fit makes one
        return made

    def _layers(self, estimator: Any) -> list[Any]:
        """Return (weight, bias) of each layer as views of the estimator's arrays, in torch's shapes."""
        if self.kind.by == "mlp":
            return [(coef.T, bias) for coef, bias in zip(estimator.coefs_, estimator.intercepts_)]
        return [(estimator.coef_.reshape(self.outputs, self.features), estimator.intercept_)]

    def _set_rate(self, estimator: Any, lr: float, batch: int) -> None:
        if self.kind.by == "sgd":
            estimator.set_params(learning_rate="constant", eta0=lr)
            return
        estimator.set_params(learning_rate_init=lr, batch_size=batch)
        if hasattr(estimator, "_optimizer"):  # Adam reads the first name, SGD the second one
            estimator._optimizer.learning_rate_init = estimator._optimizer.learning_rate = lr


def _values(bias: torch.Tensor | None) -> Any:
    return None if bias is None else bias.detach().cpu().numpy()


def _name(estimator: Any) -> str:
    return type(estimator).__name__


def _kind_of(estimator: Any) -> _Kind:
    """Return the kind of an estimator whose parameters all have an effect; raise `BadTask` for any other one."""
    name, module = _name(estimator), type(estimator).__module__
    if module.startswith(TREES):
        raise BadTask(
            f"{name} is not supported: it has no weights to average",
            why="two clients' trees have other splits, so there is no mean of them",
            hint="MLPClassifier or SGDClassifier here; trees: XGBoost's own federated mode, or Flower's FedXgbBagging",
        )
    if name not in KINDS or not module.startswith("sklearn."):
        raise BadTask(
            f"{name} is not supported",
            why="clients average weights whose shape does not depend on their data",
            hint=f"one of {', '.join(KINDS)}; transform the inputs in data(client)",
        )
    kind, defaults = KINDS[name], type(estimator)().get_params()
    refused = {**PLAN, **dict.fromkeys((key for key in NO_EFFECT if key not in kind.effective), "")}
    require_defaults(name, estimator.get_params(), defaults, refused)
    if estimator.get_params().get("solver") == "lbfgs" and kind.by == "mlp":
        raise BadTask(
            f'{name}(solver="lbfgs") is not supported', why="it has no partial_fit", hint='solver="adam" or "sgd"'
        )
    return kind


def _penalty(estimator: Any, kind: _Kind, examples: int | None, width: int) -> float:
    """Return the factor of the squared weights in the mean loss; `BadTask` if the number of examples is missing.

    `width` is the number of outputs. A regressor's loss is the mean over them, and Ridge's penalty is of their sum.
    """
    params = estimator.get_params()
    if kind.by != "loop" or _name(estimator) == "LinearRegression":
        return 0.0
    kept = params.get("penalty", "l2")
    if kept not in ("deprecated", "l2", None):
        raise BadTask(
            f"{_name(estimator)}(penalty={kept!r}) is not supported",
            why="Thinwire's own loop minimizes squared weights only",
            hint='penalty="l2", or SGDClassifier(loss="log_loss", penalty="l1")',
        )
    strength = float(params["alpha"]) if "alpha" in params else 0.0 if kept is None else 1.0 / float(params["C"])
    if strength and not examples:
        raise BadTask(
            f"{_name(estimator)} has a penalty, and the task no number of examples",
            why="the penalty is added once to the sum over the examples of all clients",
            hint="sklearn.task(..., examples=) with their number; C=float('inf') or alpha=0 for no penalty",
        )
    return strength / (2.0 * examples * (1 if kind.classifies else width)) if examples else 0.0
