// Prepares a block of drive or eden(b) for encoding: its statistics, its scaling to about 1, and its rotation.
#pragma once

namespace {

constexpr int FAR_EXPONENT = 100;

// Prefetches into the second-level cache; an address beyond the vector's end is harmless.
inline void ahead(const float* values) { __builtin_prefetch(values, 0, 2); }

// Statistics of a block before its rotation; `least` is the bits of the smallest magnitude other than 0, less one.
struct Seen {
    uint32_t largest = 0, least = ~0u;
    double squares = 0;
};

#ifdef __AVX512F__
// Statistics of `BUCKETS` buckets together: additions of different sums overlap.
template <int BUCKETS>
inline void see(const float* values, int64_t size, __m512i& largest, __m512i& least, double* squares) {
    __m512d sum[BUCKETS];
    for (int n = 0; n < BUCKETS; ++n) sum[n] = _mm512_setzero_pd();
    for (int64_t i = 0; i < size; i += WIDE)
#pragma GCC unroll 4
        for (int n = 0; n < BUCKETS; ++n) {
            const float* from = values + n * BUCKET + i;
            const __m512i bits = _mm512_and_si512(_mm512_loadu_si512(from), _mm512_set1_epi32(MAGNITUDE));
            largest = _mm512_max_epu32(largest, bits);
            least = _mm512_min_epu32(least, _mm512_sub_epi32(bits, _mm512_set1_epi32(1)));
            // The square of a float is exact in a double, so fused or not, there is one rounding.
            const __m512d low = _mm512_cvtps_pd(_mm256_loadu_ps(from));
            const __m512d high = _mm512_cvtps_pd(_mm256_loadu_ps(from + 8));
            sum[n] = _mm512_fmadd_pd(low, low, sum[n]);
            sum[n] = _mm512_fmadd_pd(high, high, sum[n]);
        }
    for (int n = 0; n < BUCKETS; ++n) {
        double lane[LANES];
        _mm512_storeu_pd(lane, sum[n]);
        *squares += folded(lane);
    }
}
#endif

inline Seen seen(const float* values, int64_t size) {
    Seen found;
#ifdef __AVX512F__
    __m512i largest = _mm512_setzero_si512(), least = _mm512_set1_epi32(-1);
    int64_t at = 0;
    for (; at + 4 * BUCKET <= size; at += 4 * BUCKET) see<4>(values + at, BUCKET, largest, least, &found.squares);
    for (; at < size; at += BUCKET) see<1>(values + at, at_most(BUCKET, size - at), largest, least, &found.squares);
    found.largest = _mm512_reduce_max_epu32(largest);
    found.least = _mm512_reduce_min_epu32(least);
#else
    for (int64_t at = 0; at < size; at += BUCKET) {
        const int64_t end = at + at_most(BUCKET, size - at);
        for (int64_t i = at; i < end; ++i) {
            const uint32_t bits = bits_of(values[i]) & MAGNITUDE;
            found.largest = bits > found.largest ? bits : found.largest;
            found.least = bits - 1 < found.least ? bits - 1 : found.least;
        }
        found.squares += sum_of_squares(values + at, end - at);
    }
#endif
    return found;
}

// The exponent that scales a block to about 1, as the oracle scales every block. Returns 0 if the scaling would change
// no bit: sums stay finite, and no value becomes so small that it loses bits.
inline int needed_exponent(const Seen& seen) {
    int exponent = 0;
    (void)frexp(static_cast<double>(float_of(seen.largest)), &exponent);
    const bool loses = exponent > 0 && seen.least < (static_cast<uint32_t>(exponent + 1) << 23) - 1;
    return loses || exponent > FAR_EXPONENT || exponent < -FAR_EXPONENT ? exponent : 0;
}

// A block that was written as its values times 2^-exponent, rotated inside each chunk.
struct Prepared {
    int exponent;
    double squares;  // the sum of the squares of the scaled values
    float inverse() const { return static_cast<float>(1 / sqrt(squares)); }
};

inline Prepared prepared(const float* values, int64_t size, const Seen& seen, const Signs& signs, float* block) {
    const int exponent = needed_exponent(seen);
    Words products[RADIX];
    for (int r = 0; r < RADIX; ++r) products[r] = signs.below(static_cast<uint32_t>(r * WIDE), GROUP);
    double squares = 0;
    for (int64_t at = 0; at < size; at += CHUNK) {
        const float* from = values + at;
        const int64_t here = at_most(CHUNK, size - at);
        float* chunk = block + at / CHUNK * PITCH;
        if (exponent) {
            for (int64_t i = 0; i < here; ++i)
                chunk[i] = static_cast<float>(ldexp(static_cast<double>(from[i]), -exponent));
            from = chunk;
            squares += sum_of_squares(from, here);
        }
        const auto value = [&](int64_t i, int r) {
            const Words product = products[r] + signs.above(static_cast<uint32_t>(at + i), GROUP);
            if (r % 2 == 0) ahead(values + size + (at + i + r * WIDE) / 2);
            return within(Signs::on(loaded(from + i + r * WIDE), product));
        };
        if (here == CHUNK)
            turn_chunk(chunk, value);
        else
            turn_small(chunk, here, value);
    }
    return {exponent, exponent ? squares : seen.squares};
}

}  // namespace
