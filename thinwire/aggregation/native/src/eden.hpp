// drive and eden(b): aggregation/methods/eden.py, whose bits these are.
#pragma once

namespace {

constexpr int MOST_LEVELS = 8;
constexpr int64_t ROOM = PITCH * (LARGEST_BLOCK / CHUNK);  // floats that one block needs

struct Levels {
    float level[MOST_LEVELS], border[MOST_LEVELS];
    int count;
};

inline Levels levels_of(const float* levels, int32_t width) {
    Levels found = {};
    found.count = 1 << (width - 1);
    for (int i = 0; i < found.count; ++i) found.level[i] = levels[i];
    for (int i = 0; i + 1 < found.count; ++i) found.border[i] = (levels[i + 1] + levels[i]) * 0.5f;
    return found;
}

inline float power_of_two(int exponent) { return static_cast<float>(ldexp(1.0, exponent)); }

inline int exponent_of(float value) {
    int exponent = 0;
    (void)frexp(static_cast<double>(value), &exponent);
    return exponent;
}

inline float* lined(float* room) {  // to the begin of a cache line
    return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(room) + 63) & ~static_cast<uintptr_t>(63));
}

// The values times 2^exponent, rotated inside each chunk; gives their sum of squares. `next`: what is read after them.
inline double turned_near(
    const float* values, int64_t size, int exponent, const Signs& signs, const float* next, float* block) {
    const float up = power_of_two(exponent > 127 ? exponent - 127 : 0);  // 2^148 is no float: two steps, both exact
    const float scale = power_of_two(exponent > 127 ? 127 : exponent);
    Words products[RADIX];
    for (int r = 0; r < RADIX; ++r) products[r] = signs.below(static_cast<uint32_t>(r * WIDE), GROUP);
    double squares = 0;
    for (int64_t at = 0; at < size; at += CHUNK) {
        const float* from = values + at;
        const int64_t here = at_most(CHUNK, size - at);
        float* chunk = block + at / CHUNK * PITCH;
        double lane[LANES] = {};
        if (up != 1) {
            for (int64_t i = 0; i < here; ++i) chunk[i] = from[i] * up;
            from = chunk;
        }
#ifdef __AVX512F__
        const __m512 factor = _mm512_set1_ps(scale);
        __m512d sum = _mm512_setzero_pd();
        const auto value = [&](int64_t i, int r) {
            const __m512 near = _mm512_mul_ps(_mm512_loadu_ps(from + i + r * WIDE), factor);
            // The square of a float is exact in a double: fused or not, one rounding.
            const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(near));
            const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(near, 1));
            sum = _mm512_fmadd_pd(low, low, sum);
            sum = _mm512_fmadd_pd(high, high, sum);
            return within(Signs::on(near, products[r] + signs.above(static_cast<uint32_t>(at + i), GROUP)));
        };
#else
        (void)next;
        for (int64_t i = 0; i < here; i += LANES)
            for (int j = 0; j < LANES; ++j) {
                const float near = from[i + j] * scale;
                lane[j] += static_cast<double>(near) * static_cast<double>(near);
                chunk[i + j] = near;
            }
        const auto value = [&](int64_t i, int r) {
            const Words product = products[r] + signs.above(static_cast<uint32_t>(at + i), GROUP);
            return within(Signs::on(loaded(chunk + i + r * WIDE), product));
        };
#endif
        if (here == CHUNK)
            turn_chunk(chunk, value);
        else
            turn_small(chunk, here, value);
#ifdef __AVX512F__
        _mm512_storeu_pd(lane, sum);
#endif
        squares += folded(lane);
    }
    return squares;
}

#ifdef __AVX512F__
// How many borders are at most this, and a byte of it: ~found under zero.
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

// Symbols, and the sum of each value's magnitude times its level. `out` holds bytes, or bits where the width is 1.
template <int WIDTH, bool BITS>
inline double symbols_of(const float* block, int64_t size, float inverse, const Levels& levels, const float* next, uint8_t* out) {
    const int64_t chunks = size < CHUNK ? 1 : size / CHUNK;
    double lane[LARGEST_BLOCK / CHUNK][LANES] = {};
#ifdef __AVX512F__
    const __m512 scale = _mm512_set1_ps(inverse);
    const __m512 table = _mm512_castps256_ps512(_mm256_loadu_ps(levels.level));
    const __m512 borders = _mm512_castps256_ps512(_mm256_loadu_ps(levels.border));
    const __m512d only = _mm512_set1_pd(static_cast<double>(levels.level[0]));
    const auto use = [&](int r, int64_t i, __m512 turned) {
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
            const __m512i symbol = _mm512_xor_si512(found, _mm512_movm_epi32(negative));
            _mm_storeu_si128(reinterpret_cast<__m128i*>(out + at), _mm512_cvtepi32_epi8(symbol));
        }
        // 24 bits times 24 bits are exact in a double.
        __m512d sum = _mm512_loadu_pd(lane[r]);
        sum = _mm512_fmadd_pd(_mm512_cvtps_pd(_mm512_castps512_ps256(magnitude)), low_level, sum);
        sum = _mm512_fmadd_pd(_mm512_cvtps_pd(_mm512_extractf32x8_ps(magnitude, 1)), high_level, sum);
        _mm512_storeu_pd(lane[r], sum);
    };
    turn_chunks(block, size, [&](int64_t i, const Floats* row, auto count) {
#pragma GCC unroll 16
        for (int r = 0; r < count.rows; ++r) {
            use(r, i, row[r]);
        }
    });
#else
    float* turned = const_cast<float*>(block);
    turn_chunks(block, size, [&](int64_t i, const Floats* row, auto count) {
        for (int r = 0; r < count.rows; ++r) stored(turned + r * PITCH + i, row[r]);
    });
    for (int64_t r = 0; r < chunks; ++r) {
        const int64_t here = at_most(CHUNK, size);
        for (int64_t i = 0; i < here; i += LANES) {
            const float* from = turned + r * PITCH + i;
            uint8_t* to = out + (BITS ? (r * CHUNK + i) / 8 : r * CHUNK + i);
            uint32_t bits = 0;
            for (int j = 0; j < LANES; ++j) {
                const float magnitude = float_of(bits_of(from[j]) & MAGNITUDE);
                int found = 0;
                for (int k = 0; k + 1 < 1 << (WIDTH - 1); ++k) found += magnitude * inverse >= levels.border[k];
                const int negative = from[j] < 0;
                lane[r][j] += static_cast<double>(magnitude) * static_cast<double>(levels.level[found]);
                if constexpr (BITS)
                    bits |= static_cast<uint32_t>(negative) << j;
                else
                    to[j] = static_cast<uint8_t>(negative ? ~found : found);
            }
            if constexpr (BITS) *to = static_cast<uint8_t>(bits);
        }
    }
#endif
    double along = 0;
    for (int64_t r = 0; r < chunks; ++r) along += folded(lane[r]);
    return along;
}

template <int WIDTH>
inline double packed_symbols(
    const float* block, int64_t size, float inverse, const Levels& levels, const float* next, int32_t bits, uint8_t* out) {
    if (bits == 8) return symbols_of<WIDTH, false>(block, size, inverse, levels, next, out);
    if constexpr (WIDTH == 1) return symbols_of<WIDTH, true>(block, size, inverse, levels, next, out);
    int8_t symbols[LARGEST_BLOCK];
    const double along =
        symbols_of<WIDTH, false>(block, size, inverse, levels, next, reinterpret_cast<uint8_t*>(symbols));
    pack_symbols(symbols, size, bits, out);
    return along;
}

}  // namespace

// A float32 for each block, and symbols of `bits` bits each, 0 in the tail. 0: there is NaN or infinity.
TW_EXPORT int32_t TW(eden_encode)(
    const float* values, int64_t size, uint32_t first, uint32_t word, int32_t width, int32_t bits, const float* table,
    double divisor, float most, float* room, uint8_t* scales, uint8_t* out) {
    const Levels levels = levels_of(table, width);
    float* block = lined(room);
    int64_t at = 0;
    for (int64_t here; (here = block_in(size - at)) != 0; at += here, scales += 4) {
        const uint32_t largest = largest_bits(values + at, here);
        if (largest >= INFINITE) return 0;
        uint8_t* to = out + at * bits / 8;
        float sent = 0;
        if (largest) {
            const int exponent = exponent_of(float_of(largest));
            const Signs signs(first + static_cast<uint32_t>(at), word);
            const double square = turned_near(values + at, here, -exponent, signs, values + at + here, block);
            const float inverse = static_cast<float>(1 / sqrt(square));
            const double along = width == 1   ? packed_symbols<1>(block, here, inverse, levels, values + at + here, bits, to)
                                 : width == 2 ? packed_symbols<2>(block, here, inverse, levels, values + at + here, bits, to)
                                 : width == 3 ? packed_symbols<3>(block, here, inverse, levels, values + at + here, bits, to)
                                              : packed_symbols<4>(block, here, inverse, levels, values + at + here, bits, to);
            const double scale = ldexp(square / along / divisor, exponent);
            sent = static_cast<float>(scale < static_cast<double>(most) ? scale : static_cast<double>(most));
        } else {
            std::memset(to, 0, static_cast<size_t>(here * bits / 8));
        }
        std::memcpy(scales, &sent, 4);
    }
    if (largest_bits(values + at, size - at) >= INFINITE) return 0;
    std::memset(out + at * bits / 8, 0, static_cast<size_t>(((size - at) * bits + 7) / 8));
    return 1;
}

// into[0 ..] (+)= factor * value, for the values start .. stop of a vector of this size that are rotated.
TW_EXPORT void TW(eden_add)(
    const uint8_t* data, int32_t bits, const uint8_t* scales, int64_t size, int64_t start, int64_t stop, uint32_t word,
    int32_t width, const float* table, float factor, int32_t adds, float* room, float* into) {
    Unpacker symbols(data, bits);
    float* block = lined(room);
    float level[16];  // of a symbol's four lowest bits
    for (int i = 0; i < 8; ++i) {
        level[i] = table[i & ((1 << (width - 1)) - 1)];
        level[15 - i] = -level[i];
    }
    int64_t at = start - start % LARGEST_BLOCK;
    scales += at / LARGEST_BLOCK * 4;
    for (int64_t here; at < stop && (here = block_in(size - at)) != 0; at += here, scales += 4) {
        if (at + here <= start) continue;
        float scale;
        std::memcpy(&scale, scales, 4);
        const bool whole = at >= start && at + here <= stop;
        for (int64_t in = 0; in < here; in += CHUNK) {
            float* chunk = block + in / CHUNK * PITCH;
            const float* target = into + (at + in - start);
#ifdef __AVX512F__
            const __m512 levels = _mm512_loadu_ps(level);
#endif
            const int8_t* from = symbols.stretch(at + in, at_most(CHUNK, here));
            const auto value = [&](int64_t i, int r) -> Floats {
#ifdef __AVX512F__
                __builtin_prefetch(target + i + r * WIDE, 0, 2);
                const __m128i sixteen = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i + r * WIDE));
                return within(_mm512_permutexvar_ps(_mm512_cvtepi8_epi32(sixteen), levels));
#else
                float each[WIDE];
                for (int j = 0; j < WIDE; ++j) each[j] = level[from[i + r * WIDE + j] & 15];
                return within(loaded(each));
#endif
            };
            if (here >= CHUNK)
                turn_chunk(chunk, value);
            else
                turn_small(chunk, here, value);
        }
        const Signs signs(static_cast<uint32_t>(at), word);
        uint32_t above[LARGEST_BLOCK / CHUNK];
        for (int r = 0; r < LARGEST_BLOCK / CHUNK; ++r) above[r] = signs.above(static_cast<uint32_t>(r * CHUNK), CHUNK);
        float* to = whole ? into + (at - start) : block;
        const int64_t pitch = whole ? CHUNK : PITCH;
        // All rows are read before one is written: a processor takes addresses 4 KiB apart for the same at first.
        const auto put = [&](int64_t i, Floats* row, auto count, bool adding) {
            const Words below = signs.below(static_cast<uint32_t>(i), CHUNK);
#pragma GCC unroll 16
            for (int r = 0; r < count.rows; ++r) {
                row[r] = Signs::on(row[r], below + above[r]) * scale * factor;
                if (adding) row[r] = loaded(to + r * pitch + i) + row[r];
            }
#pragma GCC unroll 16
            for (int r = 0; r < count.rows; ++r) stored(to + r * pitch + i, row[r]);
        };
        if (whole && adds)
            turn_chunks(block, here, [&](int64_t i, Floats* row, auto count) { put(i, row, count, true); });
        else
            turn_chunks(block, here, [&](int64_t i, Floats* row, auto count) { put(i, row, count, false); });
        if (whole) continue;
        for (int64_t i = at > start ? at : start; i < at_most(at + here, stop); ++i) {
            const float value = block[(i - at) / CHUNK * PITCH + (i - at) % CHUNK];
            into[i - start] = adds ? into[i - start] + value : value;
        }
    }
}

// Floats that either needs room for.
TW_EXPORT int64_t TW(eden_room)() { return ROOM + 16; }
