"""What each quantizer promises beyond the laws of all codecs, held against its paper's numbers."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.codec_examples import decoded, layout_of, made
from thinwire.compression import parse
from thinwire.compression.codecs.int8_qsgd_natural import Qsgd
from thinwire.compression.codecs.sign_ternary_twobit import Sign, Ternary, TwoBit
from thinwire.core import Key


@pytest.mark.parametrize(("spec", "omega"), [("natural", 1 / 8), ("qsgd(4)", None), ("qsgd(8, l2)", None)])
def test_the_mean_of_many_is_the_value(spec: str, omega: float | None) -> None:
    x = made(4096, 8, "normal", 0)
    found = np.array([decoded(spec, x, key) for key in range(200)], np.float64)
    noise = found.var(axis=0).sum() / 200
    assert ((found.mean(axis=0) - x) ** 2).sum() <= 1.3 * noise
    if omega is not None:
        assert ((found - x) ** 2).sum(axis=1).mean() <= omega * (x.astype(np.float64) ** 2).sum()


def test_natural_sends_powers_of_two() -> None:
    found = decoded("natural", made(500, 2, "steep", 3))
    fraction, _ = np.frexp(found[found != 0])
    assert (np.abs(fraction) == 0.5).all()


def test_ternary_clips_a_tensor_at_two_and_a_half_sigma_and_scales_each_by_itself() -> None:
    x = made(6000, 1, "normal", 0)
    x[0] = 50 * np.sqrt(np.mean(x[:2000] ** 2))
    codec = parse("ternary").bind(layout_of(6000))
    found = codec.decode(codec.encode(x, {}, Key(1)).payload)
    for start in (0, 2000, 4000):
        tensor = x[start : start + 2000].astype(np.float64)
        scale = min(np.abs(tensor).max(), 2.5 * np.sqrt(np.mean(tensor**2)))
        assert np.allclose(np.unique(np.abs(found[start : start + 2000])), [0, scale], rtol=1e-6)


def test_ternary_is_unbiased_where_nothing_is_clipped() -> None:
    x = np.clip(made(3000, 4, "normal", 0), -0.3, 0.3)
    sent = [Ternary().quantize(x, word * 7919) for word in range(400)]
    found = np.array([Ternary().dequantize(*each, slice(0, 3000), 0) for each in sent])
    noise = found.astype(np.float64).var(axis=0).sum() / 400
    assert ((found.mean(axis=0, dtype=np.float64) - x) ** 2).sum() <= 1.3 * noise


def test_what_natural_sends_of_the_smallest_is_right_in_the_mean() -> None:
    """Under 2^-126 of the bucket's largest there is no power left: the last one at times, else 0."""
    x = np.full(4096, 2.0**-90, np.float32) * np.linspace(0.1, 0.9, 4096, dtype=np.float32)
    x[0] = 2.0**36
    mean = np.mean([decoded("natural", x, key)[1:].astype(np.float64) for key in range(400)], axis=0)
    assert mean.sum() == pytest.approx(x[1:].astype(np.float64).sum(), rel=0.02)


def test_sign_sends_the_mean_of_either_side() -> None:
    x = made(5000, 6, "normal", 0)
    found = decoded("sign", x)
    for bucket in (slice(0, 4096), slice(4096, 5000)):
        for side in (x[bucket] >= 0, x[bucket] < 0):
            assert np.allclose(found[bucket][side], x[bucket][side].astype(np.float64).mean(), rtol=1e-6)
    scaled = decoded("sign(scaled)", x)
    for bucket in (slice(0, 4096), slice(4096, 5000)):
        assert np.allclose(np.abs(scaled[bucket]), np.abs(x[bucket].astype(np.float64)).mean(), rtol=1e-6)


def test_a_side_without_values_has_the_mean_0() -> None:
    assert np.array_equal(decoded("sign", np.full(10, -2, np.float32)), np.full(10, -2, np.float32))
    assert Sign().quantize(np.full(10, 2, np.float32), 0)[1].tolist() == [2.0, 0.0]


def test_two_bits_say_a_step_up_a_step_down_or_none() -> None:
    x = made(1000, 9, "normal", 2)
    step = np.float32(np.sqrt(np.mean(x.astype(np.float64) ** 2)) / 2)
    symbols, scales = TwoBit.read("0.5").quantize(x, 0)
    assert np.allclose(scales, [step])
    assert np.array_equal(symbols, np.where(x >= scales[0], 1, np.where(x <= -scales[0], -1, 0)))


def test_under_feedback_qsgd_rounds_to_nearest_and_its_largest_value_is_exact() -> None:
    x = made(4096, 3, "normal", 0)
    codec = parse("qsgd(2)").bind(layout_of(4096)).under_feedback()
    first, second = (codec.decode(codec.encode(x, {}, Key(k)).payload) for k in (1, 2))
    assert np.array_equal(first, second)
    assert np.abs(first).max() == np.abs(x).max()
    assert np.all(np.abs(first - x) <= np.abs(x))


def test_without_feedback_the_l2_form_of_qsgd_has_the_norm_of_its_bucket_as_scale() -> None:
    """The paper's; the mean would be right for any scale that no value is larger than."""
    x = made(5000, 3, "normal", 0)
    _, scales = Qsgd.read("4, l2").quantize(x, 77)
    norms = [np.linalg.norm(bucket.astype(np.float64)) for bucket in (x[:4096], x[4096:])]
    assert np.allclose(scales, np.array(norms) / 7, rtol=1e-6)


@pytest.mark.parametrize(("spec", "bits"), [("fp16", 11), ("bf16", 8)])
def test_a_cast_rounds_to_nearest(spec: str, bits: int) -> None:
    x = made(5000, 3, "normal", 0)
    x = x[np.abs(x) > 1e-3]  # in half precision with the bucket's power of two what is larger has all its bits
    lost = np.abs(decoded(spec, x).astype(np.float64) - x)
    assert np.all(lost <= 2.0**-bits * np.abs(x))
    assert (lost > 2.0 ** -(bits + 1) * np.abs(x)).any()
