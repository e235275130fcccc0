// Decodes drive and eden(b) into a sum; thinwire/compression/codecs/drive_eden.py defines the bits.
#pragma once

namespace {

// Levels after the butterflies between the lanes of a row, then inside a chunk.
class Turned {
  public:
    Turned(const float* levels, int32_t width) {
        for (int i = 0; i < 8; ++i) {
            level_[i] = levels[i & ((1 << (width - 1)) - 1)];
            level_[15 - i] = -level_[i];
        }
        for (int bits = 0; bits < 1 << TOGETHER; ++bits)
            for (int j = 0; j < TOGETHER; ++j) together_[bits][j] = level_[bits >> j & 1 ? 15 : 0];
        for (auto& rows : together_)
            for (int h = 1; h < TOGETHER; h *= 2)
                for (int j = 0; j < TOGETHER; ++j)
                    if (!(j & h)) {
                        const float a = rows[j], b = rows[j + h];
                        rows[j] = a + b;
                        rows[j + h] = a - b;
                    }
    }

    // Symbols of one bit each.
    void from_bits(const uint8_t* data, int64_t size, float* chunk) const {
        turn(chunk, size, [&](int64_t i, int r) -> Floats {
            const int64_t at = i + r * WIDE;
#if defined(__AVX512F__)
            const __m512 low = _mm512_broadcast_f32x8(_mm256_loadu_ps(together_[data[at / 8]]));
            const __m512 high = _mm512_broadcast_f32x8(_mm256_loadu_ps(together_[data[at / 8 + 1]]));
            const __m512 one = _mm512_set1_ps(1.0f);
            return _mm512_fmadd_ps(high, _mm512_mask_sub_ps(one, 0xFF00, _mm512_setzero_ps(), one), low);
#else
            return loaded(together_[data[at / 8] >> at % 8 & ((1 << TOGETHER) - 1)]);
#endif
        });
    }

    void from_symbols(const int8_t* symbols, int64_t size, float* chunk) const {
#ifdef __AVX512F__
        const __m512 levels = _mm512_loadu_ps(level_);
#endif
        turn(chunk, size, [&](int64_t i, int r) -> Floats {
            const int8_t* from = symbols + i + r * WIDE;
#ifdef __AVX512F__
            const __m128i sixteen = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
            return within(_mm512_permutexvar_ps(_mm512_cvtepi8_epi32(sixteen), levels));
#else
            float each[WIDE];
            for (int j = 0; j < WIDE; ++j) each[j] = level_[from[j] & 15];
            return within(loaded(each));
#endif
        });
    }

  private:
    static constexpr int TOGETHER = WIDE < 8 ? WIDE : 8;  // one-bit values of one table lookup

    template <class At>
    static void turn(float* chunk, int64_t size, At at) {
        if (size == CHUNK)
            turn_chunk(chunk, at);
        else
            turn_small(chunk, size, at);
    }

    float level_[16];  // indexed by a symbol's four lowest bits
    float together_[1 << TOGETHER][TOGETHER];
};

// The rows of a rotated block in chunks of floats.
struct FloatRows {
    const float* block;
    float one(int64_t i) const { return block[i / CHUNK * PITCH + i % CHUNK]; }
    Floats row(int64_t i) const { return loaded(block + i / CHUNK * PITCH + i % CHUNK); }
};

// to[first .. last] (+)= factor * (scale * value), times the random signs.
template <bool ADDS, class Rows>
inline void turn_back(
    Rows rows, const Signs& signs, int64_t first, int64_t last, float scale, float factor, float* to) {
    Words products[RADIX];
    for (int r = 0; r < RADIX; ++r) products[r] = signs.below(static_cast<uint32_t>(r * WIDE), GROUP);
    const auto one = [&](int64_t i) {
        const float turned = rows.one(i);
        const float value = float_of(bits_of(turned) ^ signs.of(static_cast<uint32_t>(i))) * scale * factor;
        to[i] = ADDS ? to[i] + value : value;
    };
    int64_t i = first;
    for (; i < last && i % GROUP; ++i) one(i);
    for (; i + GROUP <= last; i += GROUP) {
        const uint32_t above = signs.above(static_cast<uint32_t>(i), GROUP);
#pragma GCC unroll 16
        for (int r = 0; r < RADIX; ++r) {
            const Floats value = Signs::on(rows.row(i + r * WIDE), products[r] + above) * scale * factor;
            float* here = to + i + r * WIDE;
            stored(here, ADDS ? loaded(here) + value : value);
        }
    }
    for (; i < last; ++i) one(i);
}

template <class Rows>
inline void turn_back_from(
    Rows rows, const Signs& signs, int64_t first, int64_t last, float scale, float factor, int32_t adds, float* to) {
    if (adds)
        turn_back<true>(rows, signs, first, last, scale, factor, to);
    else
        turn_back<false>(rows, signs, first, last, scale, factor, to);
}

}  // namespace

// into[0 ..] (+)= factor * value, for the rotated values in start .. stop of a vector of `size`.
TW_EXPORT void TW(eden_add)(
    const uint8_t* data, int32_t bits, const uint8_t* scales, int64_t size, int64_t start, int64_t stop, uint32_t word,
    int32_t width, const float* table, float factor, int32_t adds, float* room, float* into) {
    Unpacker symbols(data, bits);
    const Turned turned(table, width);
    float* block = lined(room);
    int64_t at = start - start % LARGEST_BLOCK;
    scales += at / LARGEST_BLOCK * 4;
    for (int64_t here; at < stop && (here = block_in(size - at)) != 0; at += here, scales += 4) {
        if (at + here <= start) continue;
        for (int64_t in = 0; in < here; in += CHUNK) {
            float* chunk = block + in / CHUNK * PITCH;
            if (bits == 1)
                turned.from_bits(data + (at + in) / 8, at_most(CHUNK, here), chunk);
            else
                turned.from_symbols(symbols.stretch(at + in, at_most(CHUNK, here)), at_most(CHUNK, here), chunk);
        }
        turn_chunks(block, here);
        float scale;
        std::memcpy(&scale, scales, 4);
        const Signs signs(static_cast<uint32_t>(at), word);
        const int64_t first = at > start ? 0 : start - at, last = at_most(here, stop - at);
        turn_back_from(FloatRows{block}, signs, first, last, scale, factor, adds, into + (at - start));
    }
}

// Encodes with error feedback block by block (see memory.hpp); the tail is not changed. Signs are a hash of
// index ^ word, and a block begins where index + i == index ^ i.
TW_EXPORT int32_t TW(eden_compensate)(
    float* values, const float* memory, float sign, int64_t size, uint32_t first, uint32_t word, int32_t width,
    int32_t bits, const float* table, double divisor, float most, float* room, uint8_t* scales, uint8_t* out) {
    int64_t at = 0;
    for (int64_t here; (here = block_in(size - at)) != 0; at += here, scales += 4) {
        float* x = values + at;
        uint8_t* to = out + at * bits / 8;
        const uint32_t own = word ^ (first + static_cast<uint32_t>(at));
        if (!TW(add_finite)(x, memory + at, here, sign)) return 0;
        if (!TW(eden_encode)(x, here, 0, own, width, bits, table, divisor, most, room, scales, to)) return 0;
        put_back(x, memory + at, sign, here);
        TW(eden_add)(to, bits, scales, here, 0, here, own, width, table, -sign, 1, room, x);
        if (!TW(finite)(x, here)) return 0;
    }
    return 1;
}
