"""Load the exported model into scikit-learn: python examples/tabular/read.py model.safetensors."""

from __future__ import annotations

import sys

import numpy as np
from safetensors.numpy import load_file
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import SGDClassifier
from task import TYPICAL

from thinwire.client.adapters import sklearn

estimator = sklearn.fitted(SGDClassifier(loss="log_loss"), load_file(sys.argv[1]), classes=[0, 1])
rows, labels = load_breast_cancer(return_X_y=True)
scaled = np.log(rows / TYPICAL + 0.1)
print(f"accuracy {estimator.score(scaled, labels):.3f} on all rows")
print("chance of class 1 in the first row:", estimator.predict_proba(scaled[:1])[0, 1].round(3))
