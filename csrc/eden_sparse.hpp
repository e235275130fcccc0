// Encodes eden(b) for b between whole numbers as the places of what is sent, which is little, and decodes it into a sum:
// rotates back in 16-bit integers what was sent, 1 and -1. Sums of up to 32767 of them are exact there and in float32,
// so the order of additions is free, and bits are those of `eden_add`.
#pragma once

namespace {

#if defined(__AVX512F__)
constexpr int SHORT_LANES = 32;
#elif defined(__AVX2__)
constexpr int SHORT_LANES = 16;
#else
constexpr int SHORT_LANES = 8;
#endif
typedef int16_t Shorts __attribute__((vector_size(2 * SHORT_LANES)));

constexpr int64_t ROW = 32;  // values whose butterflies are looked up
constexpr int64_t SHORT_CHUNK = 1 << 13;  // 16 KiB
constexpr int64_t MOST_SHORTS = 32767;
constexpr int SHORT_RADIX = SHORT_LANES == 16 ? 8 : 16;

inline Shorts shorts_at(const int16_t* from) {
    Shorts row;
    std::memcpy(&row, from, sizeof row);
    return row;
}

// What is sent of the part of a vector that begins at `first`: the places in the whole vector, and the symbols 1 and ~1
// there. Both arrays have space for `space` of them, and for AT_LEAST more, which may be written over.
struct Sent {
    static constexpr int64_t AT_LEAST = 4;  // the same number as in thinwire/compression/codecs/drive_eden.py
    int64_t *places, first, space;
    int8_t* symbols;
    int64_t count = 0;

    // Sends those of the 64 values at `at` whose bit is set. Few are, and a loop over so few would be guessed wrong.
    void put(uint64_t sent, uint64_t negative, int64_t at) {
        const int64_t end = count + __builtin_popcountll(sent);
        if (end > space) {
            space = -1;
            return;
        }
        do {
            for (int64_t k = 0; k < AT_LEAST; ++k, sent &= sent - 1) {
                const int bit = __builtin_ctzll(sent | uint64_t{1} << 63);
                places[count + k] = first + at + bit;
                symbols[count + k] = static_cast<int8_t>(1 ^ -static_cast<int>(negative >> bit & 1));
            }
            count += AT_LEAST;
        } while (count < end);
        count = end;
    }
};

// Bit i of word n is set if value 64 n + i of a block is sent, and if it is negative.
struct Marks {
    uint64_t sent[LARGEST_BLOCK / 64], negative[LARGEST_BLOCK / 64];
};

#ifdef __AVX512F__
// Marks the values that reach the border, and returns the sum of their magnitudes. `TURNED`: as of `symbols_of`.
template <bool TURNED>
inline double marked(float* block, int64_t size, float inverse, float border, const float* next, Marks& marks) {
    double lane[LARGEST_BLOCK / CHUNK][LANES] = {};
    const __m512 scale = _mm512_set1_ps(inverse), least = _mm512_set1_ps(border);
    const auto use = [&](int64_t r, int64_t i, Floats turned) {
        if (r % 2 == 0) ahead(next + size / 2 + i * 8 + r * WIDE / 2);
        const __m512 magnitude = _mm512_abs_ps(turned);
        const __mmask16 sent = _mm512_cmp_ps_mask(_mm512_mul_ps(magnitude, scale), least, _CMP_GE_OQ);
        const __mmask16 negative = _mm512_movepi32_mask(as<__m512i>(turned));
        std::memcpy(reinterpret_cast<uint8_t*>(marks.sent) + (r * CHUNK + i) / 8, &sent, 2);
        std::memcpy(reinterpret_cast<uint8_t*>(marks.negative) + (r * CHUNK + i) / 8, &negative, 2);
        const __m512 of = _mm512_maskz_mov_ps(sent, magnitude);
        __m512d sum = _mm512_loadu_pd(lane[r]);
        sum = _mm512_add_pd(sum, _mm512_cvtps_pd(_mm512_castps512_ps256(of)));
        sum = _mm512_add_pd(sum, _mm512_cvtps_pd(_mm512_extractf32x8_ps(of, 1)));
        _mm512_storeu_pd(lane[r], sum);
    };
    const int64_t chunks = size < CHUNK ? 1 : size / CHUNK;
    if (!TURNED && size == LARGEST_BLOCK) {
        between<16>(block, CHUNK, use);
    } else {
        if constexpr (!TURNED) turn_chunks(block, size);
        for (int64_t r = 0; r < chunks; ++r)
            for (int64_t i = 0; i < at_most(CHUNK, size); i += WIDE) use(r, i, loaded(block + r * PITCH + i));
    }
    double along = 0;
    for (int64_t r = 0; r < chunks; ++r) along += folded(lane[r]);
    return along;
}
#endif

// Sends the values of a rotated block that reach the border, and returns the sum of their magnitudes.
inline double sent_of(
    float* block, int64_t at, int64_t size, float inverse, const Levels& levels, const float* next, Sent& sent) {
    Marks marks;
#ifdef __AVX512F__
    double along = marked<false>(block, size, inverse, levels.border[0], next, marks);
    if (along == 0) {
        if (size == LARGEST_BLOCK) turn_chunks(block, size);
        along = marked<true>(block, size, inverse, largest_of(block, size) * inverse, next, marks);
    }
#else
    int8_t symbols[LARGEST_BLOCK];
    const double along = bytes_of<2>(block, size, inverse, levels, next, reinterpret_cast<uint8_t*>(symbols));
    for (int64_t i = 0; i < size; i += 64) {
        marks.sent[i / 64] = others(symbols + i, 0);
        marks.negative[i / 64] = marks.sent[i / 64] & others(symbols + i, 1);
    }
#endif
    for (int64_t i = 0; i < size && sent.space >= 0; i += 64)
        sent.put(marks.sent[i / 64], marks.negative[i / 64], at + i);
    return along;
}

// The rows of a rotated block of 16-bit integers.
struct ShortRows {
    const int16_t* block;
    float one(int64_t i) const { return static_cast<float>(block[i]); }
    Floats row(int64_t i) const {
#if defined(__AVX512F__) || defined(__AVX2__) || defined(__ARM_NEON)
        typedef int16_t Some __attribute__((vector_size(2 * WIDE)));
        Some some;
        std::memcpy(&some, block + i, sizeof some);
        return __builtin_convertvector(some, Floats);
#else
        return one(i);
#endif
    }
};

// The butterflies of 1 and of -1 at each place of a row.
struct Patterns {
    int16_t of[2][ROW][ROW];
    Patterns() {
        for (int i = 0; i < ROW; ++i)
            for (int j = 0; j < ROW; ++j) {
                of[0][i][j] = __builtin_parity(static_cast<unsigned>(i & j)) ? -1 : 1;
                of[1][i][j] = static_cast<int16_t>(-of[0][i][j]);
            }
    }
};

// The block of the values that were sent, rotated back except for signs and scale.
inline void short_block(
    const int64_t* places, const int8_t* symbols, int64_t count, int64_t first, int64_t size, const Patterns& patterns,
    int16_t* block) {
    std::memset(block, 0, static_cast<size_t>(size) * sizeof *block);
    for (int64_t k = 0; k < count; ++k) {
        const int64_t place = places[k] - first;
        const int16_t* pattern = patterns.of[symbols[k] < 0][place % ROW];
        int16_t* row = block + place / ROW * ROW;
        for (int j = 0; j < ROW; ++j) row[j] = static_cast<int16_t>(row[j] + pattern[j]);
    }
    const int64_t chunk = at_most(SHORT_CHUNK, size);
    for (int64_t i = 0; i < size; i += chunk) rows_from<Shorts, SHORT_RADIX>(block + i, chunk, ROW);
}

// The last butterflies of a whole block of the largest size, then `turn_back`.
template <bool ADDS>
inline void last_rows(const int16_t* block, const Signs& signs, float scale, float factor, float* to) {
    constexpr int CHUNKS = LARGEST_BLOCK / SHORT_CHUNK;
    Words products[RADIX];
    for (int r = 0; r < RADIX; ++r) products[r] = signs.below(static_cast<uint32_t>(r * WIDE), GROUP);
    for (int64_t i = 0; i < SHORT_CHUNK; i += SHORT_LANES) {
        Shorts row[CHUNKS];
#pragma GCC unroll 8
        for (int r = 0; r < CHUNKS; ++r) row[r] = shorts_at(block + i + r * SHORT_CHUNK);
        across<CHUNKS>(row);
#pragma GCC unroll 8
        for (int r = 0; r < CHUNKS; ++r) {
            int16_t turned[SHORT_LANES];
            std::memcpy(turned, &row[r], sizeof turned);
            const int64_t at = i + r * SHORT_CHUNK;
            const uint32_t above = signs.above(static_cast<uint32_t>(at), GROUP);
#pragma GCC unroll 8
            for (int j = 0; j < SHORT_LANES; j += WIDE) {
                const Words product = products[(at + j) % GROUP / WIDE] + above;
                const Floats value = Signs::on(ShortRows{turned}.row(j), product) * scale * factor;
                stored(to + at + j, ADDS ? loaded(to + at + j) + value : value);
            }
        }
    }
}

// The same in float32, for a block of more values than `MOST_SHORTS`.
inline void float_block(
    const int64_t* places, const int8_t* symbols, int64_t count, int64_t first, int64_t size, float* block) {
    std::memset(block, 0, ROOM * sizeof *block);
    for (int64_t k = 0; k < count; ++k) {
        const int64_t place = places[k] - first;
        block[place / CHUNK * PITCH + place % CHUNK] = symbols[k] < 0 ? -1.0f : 1.0f;
    }
    for (int64_t at = 0; at < size; at += CHUNK) {
        float* chunk = block + at / CHUNK * PITCH;
        const auto value = [&](int64_t i, int r) { return within(loaded(chunk + i + r * WIDE)); };
        if (size < CHUNK)
            turn_small(chunk, size, value);
        else
            turn_chunk(chunk, value);
    }
    turn_chunks(block, size);
}

}  // namespace

// Writes a float32 for each block, and the places and symbols of what is sent of all blocks. Returns how many there are,
// -1 if there is no space for them, or -2 for NaN or infinity.
TW_EXPORT int64_t TW(eden_sparse_encode)(
    const float* values, int64_t size, uint32_t first, uint32_t word, float border, double divisor, float most,
    float* room, int64_t space, uint8_t* scales, int64_t* places, int8_t* symbols) {
    Levels levels{{0, 1}, {border}, 2};
    float* block = lined(room);
    Sent sent{places, first, space, symbols};
    int64_t at = 0;
    for (int64_t here; (here = block_in(size - at)) != 0; at += here, scales += 4) {
        const Seen all = seen(values + at, here);
        if (all.largest >= INFINITE) return -2;
        float scale = 0;
        if (all.largest) {
            const Signs signs(first + static_cast<uint32_t>(at), word);
            const Prepared own = prepared(values + at, here, all, signs, block);
            const double along = sent_of(block, at, here, own.inverse(), levels, values + at + here, sent);
            if (sent.space < 0) return -1;
            scale = scale_of(own, along, divisor, most);
        }
        std::memcpy(scales, &scale, 4);
    }
    return largest_bits(values + at, size - at) >= INFINITE ? -2 : sent.count;
}

// into[0 ..] (+)= factor * value, for the rotated values in start .. stop of a vector of `size`, of which `count` were
// sent, at rising places.
TW_EXPORT void TW(eden_sparse_add)(
    const int64_t* places, const int8_t* symbols, int64_t count, const uint8_t* scales, int64_t size, int64_t start,
    int64_t stop, uint32_t word, float factor, int32_t adds, float* room, float* into) {
    const Patterns patterns;
    float* block = lined(room);
    int16_t* shorts = reinterpret_cast<int16_t*>(block);
    int64_t at = start - start % LARGEST_BLOCK;
    scales += at / LARGEST_BLOCK * 4;
    const int64_t* const last_place = places + count;
    const int64_t* from = std::lower_bound(places, last_place, at);
    for (int64_t here; at < stop && (here = block_in(size - at)) != 0; at += here, scales += 4) {
        const int64_t* const to_place = std::lower_bound(from, last_place, at + here);
        if (at + here > start) {
            float scale;
            std::memcpy(&scale, scales, 4);
            const Signs signs(static_cast<uint32_t>(at), word);
            const int64_t first = at > start ? 0 : start - at, last = at_most(here, stop - at);
            float* to = into + (at - start);
            if (to_place - from <= MOST_SHORTS) {
                short_block(from, symbols + (from - places), to_place - from, at, here, patterns, shorts);
                if (last - first == LARGEST_BLOCK) {
                    if (adds)
                        last_rows<true>(shorts, signs, scale, factor, to);
                    else
                        last_rows<false>(shorts, signs, scale, factor, to);
                } else {
                    rows_from<Shorts, SHORT_RADIX>(shorts, here, at_most(SHORT_CHUNK, here));
                    turn_back_from(ShortRows{shorts}, signs, first, last, scale, factor, adds, to);
                }
            } else {
                float_block(from, symbols + (from - places), to_place - from, at, here, block);
                turn_back_from(FloatRows{block}, signs, first, last, scale, factor, adds, to);
            }
        }
        from = to_place;
    }
}
