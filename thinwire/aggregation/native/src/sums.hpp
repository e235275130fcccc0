// Sums in eight lanes, bucket by bucket (aggregation/sums.py), and what is made of them: sign's two means.
#pragma once

namespace {

constexpr int LANES = 8;

inline double folded(const double* lane) {
    const double a = lane[0] + lane[4], b = lane[1] + lane[5], c = lane[2] + lane[6], d = lane[3] + lane[7];
    return (a + c) + (b + d);
}

inline double magnitude_of(float value) { return static_cast<double>(float_of(bits_of(value) & MAGNITUDE)); }

}  // namespace

TW_EXPORT void TW(bucket_sums)(const float* values, int64_t size, int32_t squares, double* sums) {
    for (int64_t at = 0; at < size; at += BUCKET) {
        const int64_t end = at + at_most(BUCKET, size - at);
        double lane[LANES] = {};
        int64_t i = at;
        for (; i + LANES <= end; i += LANES)
            for (int j = 0; j < LANES; ++j) {
                const double value = magnitude_of(values[i + j]);
                lane[j] += squares ? value * value : value;
            }
        for (int j = 0; i < end; ++i, ++j) {
            const double value = magnitude_of(values[i]);
            lane[j] += squares ? value * value : value;
        }
        sums[at / BUCKET] = folded(lane);
    }
}

TW_EXPORT void TW(maxima)(const float* values, int64_t size, float* found) {
    for (int64_t at = 0; at < size; at += BUCKET)
        found[at / BUCKET] = float_of(largest_bits(values + at, at_most(BUCKET, size - at)));
}

// A bit a value, set where it is under 0, and each side's mean magnitude. 0: there is NaN or infinity.
TW_EXPORT int32_t TW(sign_encode)(const float* values, int64_t size, float* means, uint8_t* out) {
    for (int64_t at = 0; at < size; at += BUCKET) {
        const int64_t here = at_most(BUCKET, size - at);
        if (largest_bits(values + at, here) >= INFINITE) return 0;
        const float* from = values + at;
        double above[LANES] = {}, below[LANES] = {};
        int64_t under = 0, i = 0;
#ifdef __AVX512F__
        __m512d over_zero = _mm512_setzero_pd(), under_zero = _mm512_setzero_pd();
        for (; i + LANES <= here; i += LANES) {
            const __m256 eight = _mm256_loadu_ps(from + i);
            const __mmask8 negative = _mm256_cmp_ps_mask(eight, _mm256_setzero_ps(), _CMP_LT_OQ);
            const __m512d magnitude = _mm512_abs_pd(_mm512_cvtps_pd(eight));
            over_zero = _mm512_mask_add_pd(over_zero, static_cast<__mmask8>(~negative), over_zero, magnitude);
            under_zero = _mm512_mask_add_pd(under_zero, negative, under_zero, magnitude);
            under += __builtin_popcount(negative);
            out[(at + i) / 8] = negative;
        }
        _mm512_storeu_pd(above, over_zero);
        _mm512_storeu_pd(below, under_zero);
#endif
        for (; i + LANES <= here; i += LANES) {
            uint8_t byte = 0;
            for (int j = 0; j < LANES; ++j) {
                const double value = magnitude_of(from[i + j]);
                const bool negative = from[i + j] < 0;
                above[j] += negative ? 0.0 : value;
                below[j] += negative ? value : 0.0;
                byte = static_cast<uint8_t>(byte | negative << j);
            }
            under += __builtin_popcount(byte);
            out[(at + i) / 8] = byte;
        }
        if (i < here) out[(at + i) / 8] = 0;
        for (int j = 0; i < here; ++i, ++j) {
            const double value = magnitude_of(from[i]);
            const bool negative = from[i] < 0;
            (negative ? below : above)[j] += value;
            out[(at + i) / 8] = static_cast<uint8_t>(out[(at + i) / 8] | negative << j);
            under += negative;
        }
        const int64_t over = here - under;
        means[at / BUCKET * 2] = static_cast<float>(folded(above) / static_cast<double>(over > 1 ? over : 1));
        means[at / BUCKET * 2 + 1] = static_cast<float>(folded(below) / static_cast<double>(under > 1 ? under : 1));
    }
    return 1;
}

// into[0 ..] (+)= factor * (the mean of the symbol's side), for the values start .. stop.
TW_EXPORT void TW(sign_add)(
    const uint8_t* data, int32_t bits, const float* means, int64_t start, int64_t stop, float factor, int32_t adds,
    float* into) {
    Unpacker symbols(data, bits);
    for (int64_t at = start; at < stop;) {
        const int64_t end = at_most(at - at % BUCKET + BUCKET, stop), size = end - at;
        const float above = means[at / BUCKET * 2] * factor, below = -means[at / BUCKET * 2 + 1] * factor;
        const int8_t* from = symbols.stretch(at, size);
        float* to = into + (at - start);
        for (int64_t i = 0; i < size; ++i) {
            const float value = from[i] < 0 ? below : above;
            to[i] = adds ? to[i] + value : value;
        }
        at = end;
    }
}
