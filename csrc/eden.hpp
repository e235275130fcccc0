// Encodes drive and eden(b); thinwire/compression/codecs/drive_eden.py defines the bits.
#pragma once

namespace {

constexpr int MOST_LEVELS = 8;
constexpr int64_t ROOM = PITCH * (LARGEST_BLOCK / CHUNK);  // floats of working memory for one block

struct Levels {
    float level[MOST_LEVELS], border[MOST_LEVELS];
    int count;
};

// `table` has the levels, then the borders between them.
inline Levels levels_of(const float* table, int32_t width) {
    Levels found = {};
    found.count = 1 << (width - 1);
    for (int i = 0; i < found.count; ++i) found.level[i] = table[i];
    for (int i = 0; i + 1 < found.count; ++i) found.border[i] = table[found.count + i];
    return found;
}

inline float* lined(float* room) {  // aligned to a cache line
    return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(room) + 63) & ~static_cast<uintptr_t>(63));
}

#ifdef __AVX512F__
// The symbol of a value as a byte: the number of borders that are at most its magnitude, ~found for negative values.
template <int WIDTH>
inline __m512i found_among(__m512 place, __m512 borders) {
    __m512i found = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int step = 1 << (WIDTH - 2); step; step /= 2) {
        const __m512i middle = _mm512_add_epi32(found, _mm512_set1_epi32(step - 1));
        const __mmask16 reaches = _mm512_cmp_ps_mask(place, _mm512_permutexvar_ps(middle, borders), _CMP_GE_OQ);
        found = _mm512_mask_add_epi32(found, reaches, found, _mm512_set1_epi32(step));
    }
    return found;
}
#endif

// Writes symbols and returns the sum of each value's magnitude times its level. `out` holds bytes, or bits if the
// width is 1. The symbol of a level of 0 has no sign. `TURNED`: the block is rotated to its end already.
template <int WIDTH, bool BITS, bool TURNED = false>
inline double symbols_of(
    float* block, int64_t size, float inverse, const Levels& levels, const float* next, uint8_t* out) {
    const int64_t chunks = size < CHUNK ? 1 : size / CHUNK;
    double lane[LARGEST_BLOCK / CHUNK][LANES] = {};
#ifdef __AVX512F__
    const __m512 scale = _mm512_set1_ps(inverse);
    const __m512 table = _mm512_castps256_ps512(_mm256_loadu_ps(levels.level));
    const __m512 borders = _mm512_castps256_ps512(_mm256_loadu_ps(levels.border));
    const __m512d only = _mm512_set1_pd(static_cast<double>(levels.level[0]));
    const __m512i unsigned_least = _mm512_set1_epi32(levels.level[0] == 0 ? 0 : -1);
    const __m512i all = _mm512_set1_epi32(-1);
    const auto use = [&](int64_t r, int64_t i, Floats turned) {
        if (r % 2 == 0) ahead(next + size / 2 + i * 8 + r * WIDE / 2);
        const __mmask16 negative = _mm512_cmp_ps_mask(turned, _mm512_setzero_ps(), _CMP_LT_OQ);
        const __m512 magnitude = _mm512_abs_ps(turned);
        __m512d low_level = only, high_level = only;
        const int64_t at = r * CHUNK + i;
        if constexpr (WIDTH == 1) {
            if constexpr (BITS) {
                const uint16_t sixteen = static_cast<uint16_t>(negative);
                std::memcpy(out + at / 8, &sixteen, 2);
            } else {
                _mm_storeu_si128(reinterpret_cast<__m128i*>(out + at), _mm_movm_epi8(negative));
            }
        } else {
            const __m512i found = found_among<WIDTH>(_mm512_mul_ps(magnitude, scale), borders);
            const __m512 level = _mm512_permutexvar_ps(found, table);
            low_level = _mm512_cvtps_pd(_mm512_castps512_ps256(level));
            high_level = _mm512_cvtps_pd(_mm512_extractf32x8_ps(level, 1));
            const __mmask16 has_sign = _mm512_mask_test_epi32_mask(negative, _mm512_or_si512(found, unsigned_least), all);
            const __m512i symbol = _mm512_xor_si512(found, _mm512_movm_epi32(has_sign));
            _mm_storeu_si128(reinterpret_cast<__m128i*>(out + at), _mm512_cvtepi32_epi8(symbol));
        }
        // The product of two 24-bit significands is exact in a double.
        __m512d sum = _mm512_loadu_pd(lane[r]);
        sum = _mm512_fmadd_pd(_mm512_cvtps_pd(_mm512_castps512_ps256(magnitude)), low_level, sum);
        sum = _mm512_fmadd_pd(_mm512_cvtps_pd(_mm512_extractf32x8_ps(magnitude, 1)), high_level, sum);
        _mm512_storeu_pd(lane[r], sum);
    };
    if (WIDTH == 1 && size == LARGEST_BLOCK) {
        between<16>(block, CHUNK, use);
    } else {
        if constexpr (!TURNED) turn_chunks(block, size);
        for (int64_t r = 0; r < chunks; ++r)
            for (int64_t i = 0; i < at_most(CHUNK, size); i += WIDE) use(r, i, loaded(block + r * PITCH + i));
    }
#else
    (void)next;
    if constexpr (!TURNED) turn_chunks(block, size);
    for (int64_t r = 0; r < chunks; ++r) {
        const int64_t here = at_most(CHUNK, size);
        const float* from = block + r * PITCH;
        float level[CHUNK];
        int32_t symbol[CHUNK];  // as wide as floats, so that the loop vectorizes over a row
        const Levels own = levels;
        for (int64_t i = 0; i < here; ++i) {
            const float place = float_of(bits_of(from[i]) & MAGNITUDE) * inverse;
            int32_t found = 0;
            float nearest = own.level[0];
#pragma GCC unroll 8
            for (int k = 0; k + 1 < 1 << (WIDTH - 1); ++k) {
                found = place >= own.border[k] ? k + 1 : found;
                nearest = place >= own.border[k] ? own.level[k + 1] : nearest;
            }
            level[i] = nearest;
            symbol[i] = (from[i] < 0) & (nearest > 0) ? ~found : found;
        }
        if constexpr (!BITS)
            for (int64_t i = 0; i < here; ++i) out[r * CHUNK + i] = static_cast<uint8_t>(symbol[i]);
        for (int64_t i = 0; i < here; i += LANES) {
            for (int j = 0; j < LANES; ++j) {
                const float magnitude = float_of(bits_of(from[i + j]) & MAGNITUDE);
                lane[r][j] += static_cast<double>(magnitude) * static_cast<double>(level[i + j]);
            }
            if constexpr (BITS) out[(r * CHUNK + i) / 8] = static_cast<uint8_t>(under_zero(from + i));
        }
    }
#endif
    double along = 0;
    for (int64_t r = 0; r < chunks; ++r) along += folded(lane[r]);
    return along;
}

// The largest magnitude of a rotated block.
inline float largest_of(const float* block, int64_t size) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < size; i += CHUNK) {
        const uint32_t here = largest_bits(block + i / CHUNK * PITCH, at_most(CHUNK, size - i));
        largest = here > largest ? here : largest;
    }
    return float_of(largest);
}

inline float scale_of(const Prepared& own, double along, double divisor, float most) {
    const double scale = ldexp(own.squares / along / divisor, own.exponent);
    return static_cast<float>(scale < static_cast<double>(most) ? scale : static_cast<double>(most));
}

// As `symbols_of`, with the largest values of a block if none reaches the border.
template <int WIDTH>
inline double bytes_of(
    float* block, int64_t size, float inverse, const Levels& levels, const float* next, uint8_t* out) {
    const double along = symbols_of<WIDTH, false>(block, size, inverse, levels, next, out);
    if (WIDTH != 2 || along != 0) return along;
    Levels lower = levels;
    lower.border[0] = largest_of(block, size) * inverse;
    return symbols_of<WIDTH, false, true>(block, size, inverse, lower, next, out);
}

template <int WIDTH>
inline double packed_symbols(
    float* block, int64_t size, float inverse, const Levels& levels, const float* next, int32_t bits, uint8_t* out) {
    if (bits == 8) return bytes_of<WIDTH>(block, size, inverse, levels, next, out);
    if constexpr (WIDTH == 1) return symbols_of<WIDTH, true>(block, size, inverse, levels, next, out);
    int8_t symbols[LARGEST_BLOCK];
    const double along = bytes_of<WIDTH>(block, size, inverse, levels, next, reinterpret_cast<uint8_t*>(symbols));
    pack_symbols(symbols, size, bits, out);
    return along;
}

}  // namespace

// Writes a float32 for each block, and symbols of `bits` bits each, 0 in the tail. Returns 0 for NaN or infinity.
TW_EXPORT int32_t TW(eden_encode)(
    const float* values, int64_t size, uint32_t first, uint32_t word, int32_t width, int32_t bits, const float* table,
    double divisor, float most, float* room, uint8_t* scales, uint8_t* out) {
    const Levels levels = levels_of(table, width);
    float* block = lined(room);
    int64_t at = 0;
    for (int64_t here; (here = block_in(size - at)) != 0; at += here, scales += 4) {
        const Seen all = seen(values + at, here);
        if (all.largest >= INFINITE) return 0;
        uint8_t* to = out + at * bits / 8;
        float sent = 0;
        if (all.largest) {
            const Signs signs(first + static_cast<uint32_t>(at), word);
            const Prepared own = prepared(values + at, here, all, signs, block);
            const float inverse = own.inverse();
            const float* next = values + at + here;
            const double along = width == 1   ? packed_symbols<1>(block, here, inverse, levels, next, bits, to)
                                 : width == 2 ? packed_symbols<2>(block, here, inverse, levels, next, bits, to)
                                 : width == 3 ? packed_symbols<3>(block, here, inverse, levels, next, bits, to)
                                              : packed_symbols<4>(block, here, inverse, levels, next, bits, to);
            sent = scale_of(own, along, divisor, most);
        } else {
            std::memset(to, 0, static_cast<size_t>(here * bits / 8));
        }
        std::memcpy(scales, &sent, 4);
    }
    if (largest_bits(values + at, size - at) >= INFINITE) return 0;
    std::memset(out + at * bits / 8, 0, static_cast<size_t>(((size - at) * bits + 7) / 8));
    return 1;
}

// The number of floats of working memory that encoding or decoding needs.
TW_EXPORT int64_t TW(eden_room)() { return ROOM + 16; }
