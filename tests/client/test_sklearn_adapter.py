"""scikit-learn's estimators as tasks: the torch module predicts as the estimator, and partial_fit trains it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge, SGDClassifier, SGDRegressor
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.svm import SVC

from thinwire.client import Context, Split, own_part
from thinwire.client.adapters import sklearn as adapter
from thinwire.client.task import as_task
from thinwire.client.train.context import TrainingControl
from thinwire.client.train.errors import BadTask
from thinwire.client.train.module import build
from thinwire.client.train.protocol import ClientInfo, Local
from thinwire.client.train.schedule import Schedule
from thinwire.core import RunPlan
from thinwire.simulation import simulate

FEATURES, EXAMPLES = 5, 64
DRAW = np.random.Generator(np.random.PCG64(5))
X = DRAW.normal(size=(EXAMPLES, FEATURES)).astype(np.float32)
TRUE = DRAW.normal(size=(FEATURES, 3))
LABELS = np.array(["ant", "bee", "cat"])[(X @ TRUE).argmax(1)]
VALUES = X @ TRUE[:, 0] + 0.5
CLASSIFIERS = (
    SGDClassifier(), SGDClassifier(loss="log_loss", fit_intercept=False), MLPClassifier((7, 6), activation="tanh"),
    MLPClassifier((7,), solver="sgd", activation="logistic"),
)  # fmt: skip


def adapted(estimator: Any, labels: np.ndarray = LABELS, **more: Any) -> Any:
    classes: Any = {} if labels.dtype.kind == "f" else {"classes": np.unique(labels)}
    return adapter.task(estimator, lambda client: (X, labels), features=FEATURES, **classes, **more)


def trained(task: Any, **local: Any) -> tuple[torch.nn.Module, Any, int]:
    module, data = build(as_task("animals", task)), task.data(ClientInfo()).train
    return module, data, task.train(module, data, Context(Local(**{"lr": 0.05, "epochs": 4.0, **local})))


def weights(module: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize("labels", [LABELS, np.where(LABELS == "ant", 1, 0)], ids=["three", "two"])
@pytest.mark.parametrize("estimator", CLASSIFIERS, ids=str)
def test_the_module_predicts_as_the_estimator_with_its_weights(estimator: Any, labels: np.ndarray) -> None:
    task = adapted(estimator, labels)
    before = task.metrics(build(as_task("animals", task)), task.data(ClientInfo()).train.tensors)
    module, data, seen = trained(task)
    found = task.metrics(module, data.tensors)
    assert (seen, found["accuracy"][1]) == (EXAMPLES, EXAMPLES)
    assert found["loss"][0] < before["loss"][0]
    same = adapter.fitted(estimator, weights(module), np.unique(labels))
    assert np.count_nonzero(same.predict(X) == labels) == found["accuracy"][0]
    assert not hasattr(estimator, "classes_"), "the estimator that was given is not changed"


@pytest.mark.parametrize("estimator", [SGDRegressor(), MLPRegressor(hidden_layer_sizes=(7,))], ids=str)
def test_a_regressor_learns_and_predicts_the_same_values(estimator: Any) -> None:
    task = adapted(estimator, VALUES)
    module, data, _ = trained(task, epochs=30.0)
    error, count = task.metrics(module, data.tensors)["squared_error"]
    predicted = adapter.fitted(estimator, weights(module)).predict(X)
    assert error / count == pytest.approx(float(np.square(predicted - VALUES).mean()), rel=1e-4, abs=1e-6)
    assert error / count < 0.3 * float(VALUES.var())


@pytest.mark.parametrize(
    ("solver", "optimizer"),
    [
        ("adam", lambda params: torch.optim.Adam(params, lr=0.01)),
        ("sgd", lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, nesterov=True)),
    ],
)
def test_a_perceptron_makes_the_steps_of_an_optimizer_that_begins_with_the_round(
    solver: str, optimizer: Callable[..., torch.optim.Optimizer]
) -> None:
    """The moments of the call that allocates the estimator's arrays do not remain."""
    task = adapted(MLPClassifier((7,), solver=solver, alpha=0.0))
    module, data, _ = trained(task, lr=0.01, epochs=3.0, batch=EXAMPLES)
    here = build(as_task("animals", task))
    stepping = optimizer(here.parameters())
    for _ in range(3):
        stepping.zero_grad()
        task.loss(here, data.tensors).backward()
        stepping.step()
    for name, tensor in here.state_dict().items():
        assert torch.allclose(module.state_dict()[name], tensor, atol=1e-4), name


@pytest.mark.parametrize(
    ("estimator", "outputs"),
    [(LogisticRegression(C=2.0, tol=1e-4), 1), (Ridge(alpha=3.0), 1), (Ridge(alpha=30.0), 2), (LinearRegression(), 1)],
    ids=str,
)
def test_thinwires_own_loop_minimizes_the_objective_of_an_estimator_without_partial_fit(
    estimator: Any, outputs: int
) -> None:
    values = X @ TRUE[:, :2] if outputs == 2 else VALUES
    labels = LABELS if isinstance(estimator, LogisticRegression) else values
    task = adapted(estimator, labels, examples=EXAMPLES, outputs=outputs)
    assert task.train is None
    module, batch = task.model(), task.data(ClientInfo()).train.tensors
    stepping = torch.optim.LBFGS(module.parameters(), max_iter=60)

    def closure() -> torch.Tensor:
        stepping.zero_grad()
        loss: torch.Tensor = task.loss(module, batch)
        loss.backward()
        return loss

    stepping.step(closure)
    assert np.allclose(module.weight.detach().numpy(), estimator.fit(X, labels).coef_, atol=0.01)


def test_clients_with_two_labels_each_train_one_classifier_together() -> None:
    def read(client: ClientInfo) -> Split:
        mine = own_part(LABELS, client)
        return Split((X[mine], LABELS[mine]), (X, LABELS))

    task = adapter.task(SGDClassifier(loss="log_loss"), read, features=FEATURES, classes=np.unique(LABELS))
    plan = RunPlan.parse('[run]\ntask = "animals"\nrounds = 3\n[local]\nlr = 0.1\nepochs = 1\nschedule = "linear"')
    found = simulate(task, plan, clients=3, split="shards(2)")
    assert found.run.status == "done"
    assert found.metrics["accuracy"] > 0.7


@pytest.mark.parametrize("estimator", [SGDClassifier(), MLPClassifier((7,))], ids=str)
def test_a_step_has_the_rate_of_its_middle_so_the_first_one_of_a_warm_up_is_made(estimator: Any) -> None:
    class Recorded(Context):
        def lr(self, progress: float) -> float:
            rates.append(super().lr(progress))
            return rates[-1]

    rates, schedule = list[float](), Schedule(warmup=1.0, begin=0.0, until=0.5)
    context = Recorded(Local(lr=0.1, steps=4, batch=8), control=TrainingControl(schedule))
    task = adapted(estimator)
    task.train(build(as_task("animals", task)), task.data(ClientInfo()).train, context)
    assert rates == pytest.approx([0.1 * schedule.factor(step, 4) for step in range(4)])
    assert rates[0] > 0


def test_a_training_without_time_ends_early_and_weighs_less() -> None:
    class Late(Context):
        def should_stop(self) -> bool:
            return self.done >= 2

    task, context = adapted(SGDClassifier()), Late(Local(lr=0.1, steps=8, batch=8))
    module = build(as_task("animals", task))
    assert task.train(module, task.data(ClientInfo()).train, context) == EXAMPLES // 4
    assert (context.done, context.total) == (2, 8)


@pytest.mark.parametrize(
    ("estimator", "what", "hint"),
    [
        (RandomForestClassifier(), "no weights to average", "FedXgbBagging"),
        (SVC(), "SVC is not supported", "MLPClassifier"),
        (SGDClassifier(max_iter=5), "max_iter=5", "[local] epochs"),
        (SGDClassifier(average=True), "average=True", "leave average out"),
        (SGDClassifier(loss="perceptron"), "loss='perceptron'", "log_loss"),
        (MLPClassifier(learning_rate_init=0.1), "learning_rate_init", "[local] lr"),
        (MLPClassifier(solver="lbfgs"), "lbfgs", "adam"),
        (LogisticRegression(), "a penalty", "examples="),
        (LogisticRegression(solver="saga"), "solver", "leave solver out"),
    ],
    ids=str,
)
def test_what_would_have_no_effect_is_refused(estimator: Any, what: str, hint: str) -> None:
    with pytest.raises(BadTask) as refused:
        adapted(estimator)
    assert what in refused.value.what
    assert hint in refused.value.hint
    assert refused.value.why


@pytest.mark.parametrize(
    ("data", "what"),
    [
        ((X[:, :3], LABELS), "3 features"),
        ((X, np.full(EXAMPLES, "dog")), "not one of the classes"),
        (X, "no (X, y)"),
    ],
)
def test_data_of_another_form_are_refused(data: Any, what: str) -> None:
    task = adapter.task(SGDClassifier(), lambda client: data, features=FEATURES, classes=np.unique(LABELS))
    with pytest.raises(BadTask) as refused:
        task.data(ClientInfo())
    assert what in refused.value.what


def test_a_classifier_without_classes_is_refused() -> None:
    with pytest.raises(BadTask, match="a client may lack a class"):
        adapter.task(SGDClassifier(), lambda client: (X, LABELS), features=FEATURES)
