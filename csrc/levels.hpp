// Uniform quantizers; thinwire/compression/codecs/int8_qsgd_natural.py defines the bits.
#pragma once

namespace {

constexpr float LEAST = 0x1p-110f;
constexpr float TO_NEAREST = 0x1.8p23f;  // a float near it has no fraction: adding it rounds to nearest, ties to even

// floor, for values that fit an int32.
inline int32_t whole_below(float place) {
    const int32_t towards_zero = static_cast<int32_t>(place);
    return towards_zero - (place < static_cast<float>(towards_zero));
}

inline int8_t clipped(int32_t symbol, int32_t levels) {
    symbol = symbol > levels ? levels : symbol;
    return static_cast<int8_t>(symbol < -levels ? -levels : symbol);
}

// The scale as it is sent: every level and the inverse are finite.
inline float usable(float scale, float most) {
    scale = scale < most ? scale : most;
    return scale < LEAST ? 0.0f : scale;
}

inline float inverse_of(float scale) { return scale > 0 ? 1.0f / scale : 0.0f; }

inline void round_at_random(
    const float* values, int64_t size, float inverse, int32_t levels, uint32_t first, uint32_t word, int8_t* symbols) {
    int64_t i = 0;
#ifdef __AVX512F__
    // 24 bits times 2^-24 are exact, so a fused multiply-add rounds once, as the two steps do.
    const __m512 factor = _mm512_set1_ps(inverse), unit = _mm512_set1_ps(0x1p-24f);
    const __m512i top = _mm512_set1_epi32(levels), bottom = _mm512_set1_epi32(-levels);
    const __m512i key = _mm512_set1_epi32(static_cast<int>(word)), step = _mm512_set1_epi32(16);
    __m512i index = _mm512_add_epi32(
        _mm512_set1_epi32(static_cast<int>(first)),
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    for (; i + 16 <= size; i += 16) {
        // Prefetch the next bucket: nothing else would, and its first use is the search for its maximum.
        _mm_prefetch(reinterpret_cast<const char*>(values + i + BUCKET), _MM_HINT_T0);
        const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(values + i), factor);
        const __m512 place = _mm512_fmadd_ps(drawn(_mm512_xor_si512(index, key)), unit, scaled);
        __m512i symbol = _mm512_cvt_roundps_epi32(place, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
        symbol = _mm512_max_epi32(_mm512_min_epi32(symbol, top), bottom);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(symbols + i), _mm512_cvtepi32_epi8(symbol));
        index = _mm512_add_epi32(index, step);
    }
#elif defined(__AVX2__)
    const __m256 factor = _mm256_set1_ps(inverse), unit = _mm256_set1_ps(0x1p-24f);
    const __m256i key = _mm256_set1_epi32(static_cast<int>(word)), step = _mm256_set1_epi32(8);
    const __m128i top = _mm_set1_epi8(static_cast<char>(levels)), bottom = _mm_set1_epi8(static_cast<char>(-levels));
    __m256i index = _mm256_add_epi32(
        _mm256_set1_epi32(static_cast<int>(first)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    const auto eight = [&](const float* from) {
        const __m256 share = _mm256_mul_ps(drawn(_mm256_xor_si256(index, key)), unit);
        const __m256 place = _mm256_add_ps(_mm256_mul_ps(_mm256_loadu_ps(from), factor), share);
        index = _mm256_add_epi32(index, step);
        return _mm256_cvttps_epi32(_mm256_floor_ps(place));
    };
    for (; i + 16 <= size; i += 16) {
        _mm_prefetch(reinterpret_cast<const char*>(values + i + BUCKET), _MM_HINT_T0);
        const __m256i low = eight(values + i), both = _mm256_packs_epi32(low, eight(values + i + 8));
        const __m256i sixteen = _mm256_permute4x64_epi64(both, 0xD8);  // the packing above works within each half
        __m128i symbol = _mm_packs_epi16(_mm256_castsi256_si128(sixteen), _mm256_extracti128_si256(sixteen, 1));
        symbol = _mm_max_epi8(_mm_min_epi8(symbol, top), bottom);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(symbols + i), symbol);
    }
#endif
    for (; i < size; ++i) {
        const float place = values[i] * inverse + uniform(first + static_cast<uint32_t>(i), word);
        symbols[i] = clipped(whole_below(place), levels);
    }
}

inline void round_to_nearest(const float* values, int64_t size, float inverse, int32_t levels, int8_t* symbols) {
    for (int64_t i = 0; i < size; ++i) {
        const float place = (values[i] * inverse + TO_NEAREST) - TO_NEAREST;
        symbols[i] = clipped(static_cast<int32_t>(place), levels);
    }
}

}  // namespace

// Writes symbols for given scales. `first` is the index of the first value for the hash.
TW_EXPORT void TW(levels_round)(
    const float* values, int64_t size, const float* scales, int32_t levels, int32_t nearest, uint32_t first,
    uint32_t word, int32_t bits, uint8_t* out) {
    Packer symbols(out, bits);
    for (int64_t at = 0; at < size; at += BUCKET) {
        const int64_t here = at_most(BUCKET, size - at);
        const float inverse = inverse_of(scales[at / BUCKET]);
        if (nearest)
            round_to_nearest(values + at, here, inverse, levels, symbols.room());
        else
            round_at_random(
                values + at, here, inverse, levels, first + static_cast<uint32_t>(at), word, symbols.room());
        symbols.wrote(here);
    }
    symbols.finish();
}

// Writes scales and symbols of `bits` bits each, while a bucket is in cache. A scale is the largest magnitude over
// `levels`, at most `most`. Returns 0 for NaN or infinity; the output is invalid then.
TW_EXPORT int32_t TW(levels_encode)(
    const float* values, int64_t size, int32_t levels, float most, int32_t nearest, uint32_t first, uint32_t word,
    int32_t bits, float* scales, uint8_t* out) {
    Packer symbols(out, bits);
    for (int64_t at = 0; at < size; at += BUCKET) {
        const int64_t here = at_most(BUCKET, size - at);
        const uint32_t largest = largest_bits(values + at, here);
        if (largest >= INFINITE) return 0;
        const float scale = usable(float_of(largest) / static_cast<float>(levels), most), inverse = inverse_of(scale);
        scales[at / BUCKET] = scale;
        if (nearest)
            round_to_nearest(values + at, here, inverse, levels, symbols.room());
        else
            round_at_random(
                values + at, here, inverse, levels, first + static_cast<uint32_t>(at), word, symbols.room());
        symbols.wrote(here);
    }
    symbols.finish();
    return 1;
}

// into[0 ..] (+)= factor * (symbol * scale), for the values start .. stop. Tensor t begins at edges[t] and ends at
// edges[t + 1]; its buckets begin with it.
TW_EXPORT void TW(levels_add)(
    const uint8_t* data, int32_t bits, const float* scales, const int64_t* edges, int64_t start, int64_t stop,
    float factor, int32_t adds, float* into) {
    Unpacker symbols(data, bits);
    for (int64_t at = start; at < stop;) {
        for (; edges[1] <= at; ++edges) scales += (edges[1] - edges[0] + BUCKET - 1) / BUCKET;
        const int64_t number = (at - edges[0]) / BUCKET;
        const int64_t end = at_most(at_most(edges[0] + (number + 1) * BUCKET, edges[1]), stop), size = end - at;
        const float scale = scales[number];
        const int8_t* from = symbols.stretch(at, size);
        float* to = into + (at - start);
        if (adds)
            streamed(size, [=](int64_t i) { to[i] += static_cast<float>(from[i]) * scale * factor; }, from, to);
        else
            streamed(size, [=](int64_t i) { to[i] = static_cast<float>(from[i]) * scale * factor; }, from, to);
        at = end;
    }
}
