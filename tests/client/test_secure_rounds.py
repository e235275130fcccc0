"""Secure rounds of real handlers: the sum is exact, and a client leaves before anything secret does."""

from __future__ import annotations

import numpy as np

from tests.support.secure_clients import SecureClients


def trained(clients: SecureClients) -> dict[str, np.ndarray]:
    """What each client has learned in this round, before anything is encoded."""
    return {name: begun.outcome.change.copy() for name, begun in clients.begun.items()}


def test_the_sum_is_that_of_the_points_and_the_rest_stays_in_the_residuals(tmp_path):
    clients = SecureClients(tmp_path)
    clients.open()
    changes = trained(clients)
    clients.run()
    mean, scalars = clients.sum()
    sent = {name: changes[name] - clients.residual(name) for name in changes}
    np.testing.assert_allclose(mean, np.mean(list(sent.values()), axis=0), atol=1e-6)
    assert scalars == {"weight": 4}
    assert np.abs(mean).max() > 0
