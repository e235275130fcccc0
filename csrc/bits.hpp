// Bits of floats, the hash of stochastic rounding (thinwire/core/prng.py), and prefetching.
#pragma once

namespace {

constexpr int64_t BUCKET = 4096;
constexpr uint32_t MAGNITUDE = 0x7FFFFFFFu;  // all bits except the sign: magnitudes sort like integers
constexpr uint32_t INFINITE = 0x7F800000u;

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t lowbias32(uint32_t x) {
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    x ^= x >> 16;
    return x;
}

// Uniform in [0, 1): the upper 24 bits of the hash, which a float holds exactly.
inline float uniform(uint32_t index, uint32_t word) {
    return static_cast<float>(static_cast<int32_t>(lowbias32(index ^ word) >> 8)) * 0x1p-24f;
}

inline int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

constexpr int64_t AT_ONCE = 64, AHEAD = 1024;  // values

template <typename Value>
inline void ask_for(const Value* values) {
    for (int64_t i = 0; i < AT_ONCE; i += 64 / sizeof(Value)) __builtin_prefetch(values + i);
}

// Calls work(i) for each of `size` values and prefetches `streams` AHEAD of it. The processor's own prefetch ends with
// the page, which holds only 1024 floats.
template <typename Work, typename... Value>
inline void streamed(int64_t size, Work work, const Value*... streams) {
    int64_t i = 0;
    for (; i + AT_ONCE <= size; i += AT_ONCE) {
        (ask_for(streams + i + AHEAD), ...);
        for (int64_t k = i; k < i + AT_ONCE; ++k) work(k);
    }
    for (; i < size; ++i) work(i);
}

// Bits of the largest magnitude: at least those of infinity if a value is not finite.
inline uint32_t largest_bits(const float* values, int64_t size) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < size; ++i) {
        const uint32_t bits = bits_of(values[i]) & MAGNITUDE;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

#ifdef __AVX512F__
// The upper 24 bits of `uniform` for sixteen (or eight) indices, before the scaling.
inline __m512 drawn(__m512i x) {
    x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
    x = _mm512_mullo_epi32(x, _mm512_set1_epi32(0x7FEB352D));
    x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 15));
    x = _mm512_mullo_epi32(x, _mm512_set1_epi32(static_cast<int>(0x846CA68Bu)));
    return _mm512_cvtepi32_ps(_mm512_xor_si512(_mm512_srli_epi32(x, 8), _mm512_srli_epi32(x, 24)));
}
#elif defined(__AVX2__)
inline __m256 drawn(__m256i x) {
    x = _mm256_xor_si256(x, _mm256_srli_epi32(x, 16));
    x = _mm256_mullo_epi32(x, _mm256_set1_epi32(0x7FEB352D));
    x = _mm256_xor_si256(x, _mm256_srli_epi32(x, 15));
    x = _mm256_mullo_epi32(x, _mm256_set1_epi32(static_cast<int>(0x846CA68Bu)));
    return _mm256_cvtepi32_ps(_mm256_xor_si256(_mm256_srli_epi32(x, 8), _mm256_srli_epi32(x, 24)));
}
#endif

}  // namespace
