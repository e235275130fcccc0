"""Secret randomness: never twice the same, in no child, no copy, no pickle."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import threading

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR

from tests.support.scripted_rng import ScriptedRng
from thinwire.core.prng import SecretRng
from thinwire.privacy import secret_rng
from thinwire.privacy.secret_rng import CHUNK, StoredKey, SystemRng

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12: the test's own threads


def drawn(rng: SecretRng, count: int = 32) -> bytes:
    out = np.zeros(count, np.uint8)
    rng.fill(out)
    return out.tobytes()


def test_no_draw_repeats_another() -> None:
    rng, other = SystemRng(), SystemRng()
    found = [drawn(rng), drawn(rng), drawn(other), rng.random_bytes(32), rng.random_bytes(32)]
    assert len(set(found)) == len(found)


def test_a_generator_that_can_be_seeded_is_no_secret_randomness() -> None:
    """mypy refuses it where a `SecretRng` is wanted, and it would have none of the methods."""
    wanted = [name for name in dir(SecretRng) if not name.startswith("_")]
    assert wanted == ["fill", "random_bytes"]
    assert not [name for name in wanted if hasattr(np.random.default_rng(1), name)]
    assert not inspect.signature(SystemRng).parameters, "it takes no seed"


def test_a_forked_child_draws_other_bits_than_its_parent() -> None:
    rng = SystemRng()
    drawn(rng)  # the child inherits a stream that is in use
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, drawn(rng))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(read, 32) != drawn(rng)


def test_the_test_of_the_fork_sees_a_stream_that_is_not_renewed(monkeypatch) -> None:
    rng = SystemRng()
    drawn(rng)
    monkeypatch.setattr(rng, "_stream", lambda made=rng._stream(): made)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, drawn(rng))
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 32) == drawn(rng)


def test_a_grandchild_draws_under_a_key_of_its_own() -> None:
    before = secret_rng._forks
    child = os.fork()
    if child == 0:
        grandchild = os.fork()
        if grandchild == 0:
            os._exit(secret_rng._forks - before)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2


def test_each_thread_has_a_stream_of_its_own() -> None:
    rng, found = SystemRng(), []
    threads = [threading.Thread(target=lambda: found.append(drawn(rng, 4 * CHUNK))) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(set(found)) == 4


@pytest.mark.parametrize("again", [pickle.dumps, copy.copy, copy.deepcopy])
def test_it_cannot_be_pickled_or_copied(again) -> None:
    with pytest.raises(TypeError, match="must not be pickled or copied"):
        again(SystemRng())


@pytest.mark.parametrize("rng", [SystemRng(), ScriptedRng(1)])
@pytest.mark.parametrize("count", [0, 1, 7, CHUNK // 4 - 1, CHUNK // 4 + 1, CHUNK])
def test_an_array_is_filled_from_its_first_to_its_last_byte(rng: SecretRng, count: int) -> None:
    out = np.zeros((2, count), np.uint32)
    for _ in range(10):  # ten draws leave a byte at 0 with 2^-80
        more = np.zeros((2, count), np.uint32)
        rng.fill(more)
        out |= more
    assert out.view(np.uint8).all()


@pytest.mark.parametrize("gaps", [np.zeros(8, np.uint32)[::2], np.zeros((3, 2), np.uint32).T])
def test_an_array_with_gaps_is_refused(gaps) -> None:
    with pytest.raises(ValueError, match="must be contiguous"):
        SystemRng().fill(gaps)


def test_a_scripted_source_repeats_itself() -> None:
    assert drawn(ScriptedRng(3)) == drawn(ScriptedRng(3)) != drawn(ScriptedRng(4))


def test_a_stored_key_repeats_its_bits_and_is_no_source_of_keys() -> None:
    key = StoredKey.made()
    again = StoredKey.read(key.write())
    first, second = key.stream(), again.stream()
    found = np.zeros((2, 3 * CHUNK + 8), np.uint8)
    first.fill(found[0])
    for start in range(0, found.shape[1], CHUNK // 2):  # in other pieces
        second.fill(found[1, start : start + CHUNK // 2])
    assert found[0].tobytes() == found[1].tobytes()
    cipher = Cipher(AES256(bytes.fromhex(key.write())), CTR(bytes(16))).encryptor()
    assert found[0].tobytes() == cipher.update(bytes(found.shape[1]))
    assert not hasattr(first, "random_bytes"), "what needs a SecretRng does not take it"
    assert key.write() not in repr(key) + str(vars(first))


@pytest.mark.parametrize("text", ["", "00", "zz" * 32, "00" * 31, "00" * 33])
def test_another_text_than_that_of_a_stored_key_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"bytes|hex"):
        StoredKey.read(text)


def test_two_stored_keys_are_different_and_refuse_an_array_with_gaps() -> None:
    assert StoredKey.made().write() != StoredKey.made().write()
    with pytest.raises(ValueError, match="must be contiguous"):
        StoredKey.made().stream().fill(np.zeros(8, np.uint32)[::2])
