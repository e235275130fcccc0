"""The noise of tree aggregation: increments sum to that of a prefix, and keys are stored no longer than needed."""

from __future__ import annotations

import itertools
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from numpy.typing import NDArray

from thinwire.core.errors import NotWritten
from thinwire.privacy.accounting import Release
from thinwire.privacy.noise_plan import NoisePlan, sampler_of
from thinwire.privacy.secret_rng import StoredKey
from thinwire.privacy.tree_aggregation import nodes
from thinwire.server import tree_noise
from thinwire.server.tree_noise import KEYS, StoredTree, TreeNoise

SIGMA, SIZE = 50.0, 1000
NOISE = NoisePlan(Release("discrete-gaussian", 1.0, SIGMA**2, SIZE), 1.0, SIGMA, SIGMA**2, 0, 1)

Draws = NDArray[np.int64]


class Rounds:
    """Makes rounds with a new `TreeNoise` each, as processes would that are killed after each commit."""

    def __init__(self, folder: Path, length: int, size: int = SIZE) -> None:
        self.folder, self.length, self.size = folder, length, size
        self.last, self.prefix = 0, np.zeros(size, np.int64)
        self.stored: dict[tuple[int, int], StoredKey] = {}  # first round of a tree, place -> its key at the commit

    @property
    def tree(self) -> TreeNoise:
        return TreeNoise(self.folder, NOISE, self.length)

    def draw(self, number: int) -> Draws:
        out = np.full(self.size, 7, np.int32)
        self.tree.draw(number, self.last, out)
        return out.astype(np.int64)

    def make(self, number: int, settles: bool = True) -> Draws:
        """Return the noise of all rounds so far in the model, after this round made a step."""
        self.prefix = self.prefix + self.draw(number)
        if (tree := self.tree._read()) is not None:
            self.stored |= {(tree.first, place): key for place, key in tree.keys.items()}
        self.last = number
        if settles:
            self.tree.settle(number)
        return self.prefix

    def noise(self, first: int, place: int) -> Draws:
        """Return the noise of all nodes of a prefix, each drawn from its key alone."""
        found = np.zeros(self.size, np.int64)
        for end in nodes(place):
            one = np.empty(self.size, np.int32)
            sampler_of("discrete-gaussian", SIGMA**2).fill(one, self.stored[first, end].stream())
            found += one
        return found


@pytest.mark.parametrize("settles", [True, False])
def test_the_sum_of_the_increments_is_exactly_the_noise_of_the_prefix(tmp_path: Path, settles: bool) -> None:
    rounds = Rounds(tmp_path, 16)
    for number in range(1, 17):
        np.testing.assert_array_equal(rounds.make(number, settles), rounds.noise(1, number))


def test_the_same_holds_over_chunks_and_where_rounds_make_no_step(tmp_path: Path) -> None:
    rounds = Rounds(tmp_path, 16, size=3 * 2**17 + 5)
    for number in (2, 3, 5, 6, 9, 11, 12, 15):
        np.testing.assert_array_equal(rounds.make(number), rounds.noise(2, number - 1))


def test_a_new_tree_begins_when_one_is_complete_and_the_old_noise_stays(tmp_path: Path) -> None:
    rounds = Rounds(tmp_path, 3)
    for number in range(1, 4):
        rounds.make(number)
    assert not (tmp_path / KEYS).exists(), "a complete tree needs no key"
    np.testing.assert_array_equal(rounds.make(4), rounds.noise(1, 3) + rounds.noise(4, 1))
    np.testing.assert_array_equal(rounds.make(6), rounds.noise(1, 3) + rounds.noise(4, 3))


def test_a_round_that_is_made_again_before_its_commit_has_other_noise(tmp_path: Path) -> None:
    rounds = Rounds(tmp_path, 8)
    for number in range(1, 8):
        before = rounds.draw(number)
        assert np.mean(before == rounds.draw(number)) < 0.1
        np.testing.assert_array_equal(rounds.make(number), rounds.noise(1, number))


def test_the_stored_keys_are_those_of_the_last_prefix_and_nobody_else_reads_them(tmp_path: Path) -> None:
    rounds = Rounds(tmp_path, 8)
    for number in range(1, 8):
        rounds.make(number)
        tree = rounds.tree._read()
        assert tree is not None
        assert sorted(tree.keys, reverse=True) == list(nodes(number))
        assert (tmp_path / KEYS).stat().st_mode & 0o777 == 0o600
        assert [path.name for path in tmp_path.iterdir()] == [KEYS]


@pytest.mark.parametrize("loss", ["missing", "damaged", "half", "another sampler"])
def test_without_its_keys_a_new_tree_begins(tmp_path: Path, loss: str) -> None:
    rounds = Rounds(tmp_path, 8)
    for number in (1, 2, 3):
        rounds.make(number)
    kept, file = rounds.prefix, tmp_path / KEYS
    if loss == "missing":
        file.unlink()
    elif loss == "damaged":
        file.write_bytes(b"{")
    elif loss == "half":
        tree = rounds.tree._read()
        assert tree is not None
        rounds.tree._write(StoredTree(tree.first, {3: tree.keys[3]}))
    else:
        file.write_bytes(file.read_bytes().replace(NOISE.sampler.digest.encode(), b"00" * 32))
    np.testing.assert_array_equal(rounds.make(4), kept + rounds.noise(4, 1))


def test_what_a_killed_process_left_of_a_file_is_deleted(tmp_path: Path) -> None:
    rounds = Rounds(tmp_path, 2)
    with patch("os.replace", side_effect=KeyboardInterrupt), patch("os.unlink"), pytest.raises(KeyboardInterrupt):
        rounds.draw(1)
    assert [path.name.startswith(f".{KEYS}.") for path in tmp_path.iterdir()] == [True]
    rounds.tree.settle(0)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_takes_no_keys_releases_nothing(tmp_path: Path) -> None:
    with (
        patch.object(tree_noise, "write_atomically", side_effect=NotWritten("full", "", "")),
        pytest.raises(NotWritten),
    ):
        Rounds(tmp_path, 2).draw(1)


def test_the_noise_of_prefixes_has_the_variance_of_their_nodes_and_is_independent_where_they_share_none(
    tmp_path: Path,
) -> None:
    """Over 2^16 coordinates a variance is right to 0.55 percent (one sigma), a correlation to 0.4 percent."""
    rounds, size = Rounds(tmp_path, 8, size=2**16), 2**16
    found = [np.zeros(size), *(rounds.make(number) / SIGMA for number in range(1, 9))]
    for a, b in itertools.product(range(1, 9), repeat=2):
        shared = len(set(nodes(a)) & set(nodes(b)))
        assert np.mean(found[a] * found[b]) == pytest.approx(shared, abs=0.1), (a, b)
    increments = np.diff(found, axis=0)
    assert np.mean(increments[7] ** 2) == pytest.approx(4, abs=0.1), "place 8 takes off three nodes and adds one"
    assert abs(float(np.mean(found[8]))) < 5 / 256
