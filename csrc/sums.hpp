// Sums in eight lanes, bucket by bucket (thinwire/compression/vector_ops.py defines the order), and the two means of
// `sign`.
#pragma once

namespace {

// Four lanes as a vector type of gcc and clang, which compiles to each path's own instructions.
typedef float Singles __attribute__((vector_size(16)));
typedef double Doubles __attribute__((vector_size(32)));
typedef int64_t Longs __attribute__((vector_size(32)));

constexpr int LANES = 8;
constexpr int64_t ABSOLUTE = INT64_MAX;  // mask of all bits except the sign
constexpr double ENDLESS = 0x1p1000;     // more than any sum of finite floats

inline Doubles wide(const float* four) {
#ifdef __AVX2__
    return (Doubles)_mm256_cvtps_pd(_mm_loadu_ps(four));  // gcc 12 splits the generic form into two halves
#else
    Singles values;
    std::memcpy(&values, four, sizeof values);
    return __builtin_convertvector(values, Doubles);
#endif
}

inline double folded(const double* lane) {
    const double a = lane[0] + lane[4], b = lane[1] + lane[5], c = lane[2] + lane[6], d = lane[3] + lane[7];
    return (a + c) + (b + d);
}

struct Lanes {
    Doubles low{}, high{};

    double sum() const {
        const double lane[LANES] = {low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3]};
        return folded(lane);
    }
};

// Calls work(values, index) for each group of eight, the last one padded with zeros, which do not change a sum, and
// prefetches the next bucket.
template <typename Work>
inline void each_eight(const float* values, int64_t size, Work work) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        __builtin_prefetch(values + i + BUCKET);
        work(values + i, i);
    }
    if (i == size) return;
    float rest[LANES] = {};
    std::memcpy(rest, values + i, static_cast<size_t>(size - i) * sizeof(float));
    work(rest, i);
}

inline double sum_of_magnitudes(const float* values, int64_t size) {
    Lanes lanes;
    each_eight(values, size, [&](const float* eight, int64_t) {
        lanes.low += (Doubles)((Longs)wide(eight) & ABSOLUTE);
        lanes.high += (Doubles)((Longs)wide(eight + 4) & ABSOLUTE);
    });
    return lanes.sum();
}

inline double sum_of_squares(const float* values, int64_t size) {
    Lanes lanes;
    each_eight(values, size, [&](const float* eight, int64_t) {
        const Doubles low = wide(eight), high = wide(eight + 4);
        lanes.low += low * low;
        lanes.high += high * high;
    });
    return lanes.sum();
}

// Adds each of four values to the sum of its sign; the other sum gets a 0 and does not change.
inline void add_by_side(const float* four, Doubles& above, Doubles& below) {
    const Longs value = (Longs)wide(four), magnitude = value & ABSOLUTE, negative = value < 0;
    above += (Doubles)(magnitude & ~negative);
    below += (Doubles)(magnitude & negative);
}

// A bit for each of eight values: set if it is below 0.
inline unsigned under_zero(const float* eight) {
#ifdef __AVX2__
    const __m256 less = _mm256_cmp_ps(_mm256_loadu_ps(eight), _mm256_setzero_ps(), _CMP_LT_OQ);
    return static_cast<unsigned>(_mm256_movemask_ps(less));
#else
    unsigned bits = 0;
    for (int j = 0; j < LANES; ++j) bits |= static_cast<unsigned>(eight[j] < 0) << j;
    return bits;
#endif
}

inline float mean(double sum, int64_t items) {
    return static_cast<float>(sum / static_cast<double>(items > 1 ? items : 1));
}

}  // namespace

TW_EXPORT void TW(bucket_sums)(const float* values, int64_t size, int32_t squares, double* sums) {
    for (int64_t at = 0; at < size; at += BUCKET) {
        const int64_t here = at_most(BUCKET, size - at);
        sums[at / BUCKET] = squares ? sum_of_squares(values + at, here) : sum_of_magnitudes(values + at, here);
    }
}

TW_EXPORT void TW(maxima)(const float* values, int64_t size, float* found) {
    for (int64_t at = 0; at < size; at += BUCKET)
        found[at / BUCKET] = float_of(largest_bits(values + at, at_most(BUCKET, size - at)));
}

// Writes a bit for each value, set if it is below 0, and the mean magnitude of each sign. Returns 0 for NaN or
// infinity, which a sum shows.
TW_EXPORT int32_t TW(sign_encode)(const float* values, int64_t size, float* means, uint8_t* out) {
    for (int64_t at = 0; at < size; at += BUCKET) {
        const int64_t here = at_most(BUCKET, size - at);
        Lanes above, below;
        int64_t under = 0;
        each_eight(values + at, here, [&](const float* eight, int64_t i) {
            add_by_side(eight, above.low, below.low);
            add_by_side(eight + 4, above.high, below.high);
            const unsigned byte = under_zero(eight);
            under += __builtin_popcount(byte);
            out[(at + i) / 8] = static_cast<uint8_t>(byte);
        });
        const double over_zero = above.sum(), below_zero = below.sum();
        if (!(over_zero + below_zero < ENDLESS)) return 0;
        means[at / BUCKET * 2] = mean(over_zero, here - under);
        means[at / BUCKET * 2 + 1] = mean(below_zero, under);
    }
    return 1;
}

// into[0 ..] (+)= factor * (the mean of the symbol's sign), for the values start .. stop.
TW_EXPORT void TW(sign_add)(
    const uint8_t* data, int32_t bits, const float* means, int64_t start, int64_t stop, float factor, int32_t adds,
    float* into) {
    Unpacker symbols(data, bits);
    for (int64_t at = start; at < stop;) {
        const int64_t end = at_most(at - at % BUCKET + BUCKET, stop), size = end - at;
        const float above = means[at / BUCKET * 2] * factor, below = -means[at / BUCKET * 2 + 1] * factor;
        const int8_t* from = symbols.stretch(at, size);
        float* to = into + (at - start);
        const auto add = [=](int64_t i) {
            const float value = from[i] < 0 ? below : above;
            to[i] = adds ? to[i] + value : value;
        };
        streamed(size, add, from, to);
        at = end;
    }
}
