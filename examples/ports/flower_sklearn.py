"""Flower's quickstart for scikit-learn: a logistic regression with a penalty on the iris table."""

from __future__ import annotations

from shipped_data import iris
from sklearn.linear_model import LogisticRegression

from thinwire.client.adapters import sklearn

model, data, loss, metrics, train = sklearn.task(
    LogisticRegression(), iris, features=4, classes=[0, 1, 2], examples=120
)
