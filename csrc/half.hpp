// float16 with a power of two for each bucket, and bfloat16; thinwire/compression/codecs/identity_fp16_bf16.py defines
// the bits.
#pragma once

namespace {

constexpr int TOP = 15, LEAST_EXPONENT = -126, MOST_EXPONENT = 112;
constexpr float LARGEST_HALF = 65504.0f;

// Rounds to nearest, ties to even; magnitudes are at most 65504.
inline uint16_t half_of(float value) {
    const uint32_t bits = bits_of(value), magnitude = bits & MAGNITUDE;
    const uint16_t sign = static_cast<uint16_t>((bits ^ magnitude) >> 16);
    if (magnitude < 0x38800000u)  // under 2^-14: adding 1/2 rounds to multiples of 2^-24
        return sign | static_cast<uint16_t>(bits_of(float_of(magnitude) + 0.5f) - 0x3F000000u);
    const uint32_t rounded = magnitude + 0xFFFu + (magnitude >> 13 & 1) - (112u << 23);
    return sign | static_cast<uint16_t>(rounded >> 13);
}

inline float float_of_half(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16, magnitude = half & 0x7FFFu;
    // As a float with the same bits it is 2^112 times too small, normal or not; multiplying by that factor is exact.
    return float_of(bits_of(float_of(magnitude << 13) * 0x1p112f) | sign);
}

inline float power_of(int exponent) { return float_of(static_cast<uint32_t>(exponent + 127) << 23); }

inline int exponent_for(uint32_t largest) {
    if (!largest) return -TOP;
    const int exponent = static_cast<int>(largest >> 23) - 126 - TOP;  // as frexp; denormals are clamped to the minimum
    return exponent < LEAST_EXPONENT ? LEAST_EXPONENT : exponent > MOST_EXPONENT ? MOST_EXPONENT : exponent;
}

inline float held(float place) {
    place = place < LARGEST_HALF ? place : LARGEST_HALF;
    return place > -LARGEST_HALF ? place : -LARGEST_HALF;
}

inline void store(uint8_t* to, uint16_t half) { std::memcpy(to, &half, 2); }

inline uint16_t load(const uint8_t* from) {
    uint16_t half;
    std::memcpy(&half, from, 2);
    return half;
}

}  // namespace

// Returns 0 for NaN or infinity. `halves` may begin at any byte.
TW_EXPORT int32_t TW(fp16_encode)(const float* values, int64_t size, int8_t* exponents, uint8_t* halves) {
    for (int64_t at = 0; at < size; at += BUCKET) {
        const int64_t here = at_most(BUCKET, size - at);
        const uint32_t largest = largest_bits(values + at, here);
        if (largest >= INFINITE) return 0;
        const int exponent = exponent_for(largest);
        exponents[at / BUCKET] = static_cast<int8_t>(exponent);
        const float down = power_of(-exponent);
        const float* from = values + at;
        uint8_t* to = halves + 2 * at;
        int64_t i = 0;
#ifdef __AVX512F__
        const __m512 most = _mm512_set1_ps(LARGEST_HALF), least = _mm512_set1_ps(-LARGEST_HALF);
        for (; i + 16 <= here; i += 16) {
            __builtin_prefetch(from + i + BUCKET);
            __m512 place = _mm512_mul_ps(_mm512_loadu_ps(from + i), _mm512_set1_ps(down));
            place = _mm512_max_ps(_mm512_min_ps(place, most), least);
            _mm256_storeu_si256(
                reinterpret_cast<__m256i*>(to + 2 * i), _mm512_cvtps_ph(place, _MM_FROUND_TO_NEAREST_INT));
        }
#elif defined(__F16C__)
        const __m256 most = _mm256_set1_ps(LARGEST_HALF), least = _mm256_set1_ps(-LARGEST_HALF);
        for (; i + 8 <= here; i += 8) {
            __builtin_prefetch(from + i + BUCKET);
            __m256 place = _mm256_mul_ps(_mm256_loadu_ps(from + i), _mm256_set1_ps(down));
            place = _mm256_max_ps(_mm256_min_ps(place, most), least);
            _mm_storeu_si128(
                reinterpret_cast<__m128i*>(to + 2 * i), _mm256_cvtps_ph(place, _MM_FROUND_TO_NEAREST_INT));
        }
#endif
        for (; i < here; ++i) store(to + 2 * i, half_of(held(from[i] * down)));
    }
    return 1;
}

// into[0 ..] (+)= factor * (half * power), for the values start .. stop.
TW_EXPORT void TW(fp16_add)(
    const uint8_t* halves, const int8_t* exponents, int64_t start, int64_t stop, float factor, int32_t adds,
    float* into) {
    for (int64_t at = start; at < stop;) {
        const int64_t end = at_most(at - at % BUCKET + BUCKET, stop), size = end - at;
        const float up = power_of(exponents[at / BUCKET]);
        const uint8_t* from = halves + 2 * at;
        float* to = into + (at - start);
        int64_t i = 0;
#ifdef __AVX512F__
        for (; i + 16 <= size; i += 16) {
            __builtin_prefetch(from + 2 * (i + AHEAD));
            __builtin_prefetch(to + i + AHEAD);
            const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 2 * i));
            __m512 value = _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(up));
            value = _mm512_mul_ps(value, _mm512_set1_ps(factor));
            _mm512_storeu_ps(to + i, adds ? _mm512_add_ps(_mm512_loadu_ps(to + i), value) : value);
        }
#elif defined(__F16C__)
        for (; i + 8 <= size; i += 8) {
            __builtin_prefetch(from + 2 * (i + AHEAD));
            __builtin_prefetch(to + i + AHEAD);
            const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 2 * i));
            __m256 value = _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(up));
            value = _mm256_mul_ps(value, _mm256_set1_ps(factor));
            _mm256_storeu_ps(to + i, adds ? _mm256_add_ps(_mm256_loadu_ps(to + i), value) : value);
        }
#endif
        for (; i < size; ++i) {
            const float value = float_of_half(load(from + 2 * i)) * up * factor;
            to[i] = adds ? to[i] + value : value;
        }
        at = end;
    }
}

TW_EXPORT int32_t TW(bf16_encode)(const float* values, int64_t size, uint8_t* halves) {
    for (int64_t at = 0; at < size; at += BUCKET) {
        const int64_t here = at_most(BUCKET, size - at);
        if (largest_bits(values + at, here) >= INFINITE) return 0;
        for (int64_t i = at; i < at + here; ++i) {
            const uint32_t bits = bits_of(values[i]);
            uint32_t rounded = (bits + 0x7FFFu + (bits >> 16 & 1)) >> 16;
            rounded = (rounded & 0x7FFFu) >= 0x7F80u ? (rounded & 0x8000u) | 0x7F7Fu : rounded;
            store(halves + 2 * i, static_cast<uint16_t>(rounded));
        }
    }
    return 1;
}

TW_EXPORT void TW(bf16_add)(
    const uint8_t* halves, int64_t start, int64_t stop, float factor, int32_t adds, float* into) {
    const uint8_t* from = halves + 2 * start;
    const auto add = [=](int64_t i) {
        const float value = float_of(static_cast<uint32_t>(load(from + 2 * i)) << 16) * factor;
        into[i] = adds ? into[i] + value : value;
    };
    streamed(stop - start, add, reinterpret_cast<const uint16_t*>(from), into);
}

// Returns 1 if no half has all of these exponent bits, which are those of infinity and NaN.
TW_EXPORT int32_t TW(halves_finite)(const uint8_t* halves, int64_t items, int32_t exponent) {
    uint16_t largest = 0;
    const uint16_t mask = static_cast<uint16_t>(exponent);
    for (int64_t at = 0; at < items; at += BUCKET) {
        for (int64_t i = 0; i < BUCKET; i += 32) __builtin_prefetch(halves + 2 * (at + BUCKET + i));
        const int64_t end = at_most(at + BUCKET, items);
        for (int64_t i = at; i < end; ++i) {
            const uint16_t bits = load(halves + 2 * i) & mask;
            largest = bits > largest ? bits : largest;
        }
    }
    return largest < mask;
}
