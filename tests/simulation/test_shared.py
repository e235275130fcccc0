"""A client's folder that several processes use in turn: whoever is killed, the last commit is there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from thinwire.client.run_state import ClientRunState
from thinwire.simulation.storage import shared_folder

FIRST = ClientRunState(1, residual=np.array([1, 2], np.float32))
SECOND = ClientRunState(2, residual=np.array([3, 4], np.float32))


class Killed(Exception):
    pass


@pytest.mark.parametrize("step", ["write_bytes", "unlink", "rename"])
@pytest.mark.parametrize("nth", [1, 2])
def test_who_is_killed_at_any_step_leaves_the_state_before_or_after_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, nth: int
) -> None:
    shared_folder(tmp_path, "t-1").commit(FIRST)
    whole, steps = getattr(Path, step), []

    def killed(path: Path, *args: object, **kwargs: object) -> object:
        steps.append(path)
        if len(steps) == nth:
            if step == "write_bytes":
                whole(path, b'{"half of')
            raise Killed
        return whole(path, *args, **kwargs)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(Path, step, killed)
        shared_folder(tmp_path, "t-1").commit(SECOND)
    state, said = shared_folder(tmp_path, "t-1").load()
    assert not said
    kept = FIRST if state.sequence == 1 else SECOND
    assert state.sequence == kept.sequence
    assert state.residual is not None and kept.residual is not None
    assert state.residual.tolist() == kept.residual.tolist()


def test_what_was_never_committed_is_not_there(tmp_path: Path) -> None:
    folder = shared_folder(tmp_path, "t-1")
    folder.folder.mkdir(parents=True)
    (folder.folder / ".state.json.draft").write_bytes(b'{"half of')
    state, said = folder.load()
    assert (state.sequence, state.lost, said) == (0, "", [])
