// Range asymmetric numeral systems, and the gaps between places that it codes; thinwire/compression/codecs/rans.py
// defines the bits.
#pragma once

namespace {

constexpr uint32_t LEAST_STATE = 1u << 16;  // of a state between two numbers
constexpr int64_t AT_A_TIME = 64;  // symbols that are compared at once

// A state x becomes x + start + x / frequency * rest. The quotient is the upper half of a product (Granlund and
// Montgomery 1994); a frequency of 1 has no such factor: its quotient is x - 1, and `start` has the difference.
struct Step {
    uint64_t factor;
    uint32_t start, rest, most;
};

inline void make_steps(const uint16_t* frequencies, const uint16_t* starts, int bits, Step* steps) {
    for (int byte = 0; byte < 256; ++byte) {
        const uint32_t f = frequencies[byte], all = 1u << bits;
        if (!f) continue;
        steps[byte].factor = f == 1 ? ~uint64_t{0} : ~uint64_t{0} / f + 1;
        steps[byte].start = starts[byte] + (f == 1 ? all - 1 : 0);
        steps[byte].rest = all - f;
        steps[byte].most = f << (32 - bits);
    }
}

#ifdef __AVX512F__
// Takes a row of sixteen lanes at once; a table has the frequency of each byte in its upper half, what is before it in
// its lower.
struct Rows {
    const uint32_t* both;
    __m128i bits, above;
    __m512i all, mask;

    Rows(const uint32_t* table, int width)
        : both(table),
          bits(_mm_cvtsi32_si128(width)),
          above(_mm_cvtsi32_si128(32 - width)),
          all(_mm512_set1_epi32(1 << width)),
          mask(_mm512_set1_epi32((1 << width) - 1)) {}

    __m512i of(__m512i numbers) const { return _mm512_i32gather_epi32(numbers, both, 4); }

    // Exact for whole numbers under 2^32: a quotient that is not whole is at least 2^-32 of itself below the next whole
    // number, and a division rounds by 2^-53.
    static __m256i quotient(__m256i x, __m256i f) {
        return _mm512_cvttpd_epu32(_mm512_div_pd(_mm512_cvtepu32_pd(x), _mm512_cvtepu32_pd(f)));
    }

    // Returns the place of the first word, as `rans_write` does; no word before it is written over.
    int64_t write(const uint8_t* numbers, uint32_t* states, uint16_t* words, int64_t at) const {
        const __m512i own = of(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers))));
        const __m512i f = _mm512_srli_epi32(own, 16), start = _mm512_and_si512(own, _mm512_set1_epi32(0xFFFF));
        __m512i x = _mm512_loadu_si512(states);
        const __mmask16 full = _mm512_cmpge_epu32_mask(x, _mm512_sll_epi32(f, above));
        at -= __builtin_popcount(full);
        const __m256i low = _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(full, x));
        _mm256_mask_storeu_epi16(words + at, static_cast<__mmask16>((1u << __builtin_popcount(full)) - 1), low);
        x = _mm512_mask_srli_epi32(x, full, x, 16);
        const __m256i first = quotient(_mm512_castsi512_si256(x), _mm512_castsi512_si256(f));
        const __m256i second = quotient(_mm512_extracti64x4_epi64(x, 1), _mm512_extracti64x4_epi64(f, 1));
        const __m512i q = _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
        const __m512i next = _mm512_add_epi32(x, _mm512_mullo_epi32(q, _mm512_sub_epi32(all, f)));
        _mm512_storeu_si512(states, _mm512_add_epi32(next, start));
        return at;
    }

    // Decodes one number of each lane as `rans_step` does. At least sixteen words are behind `at`.
    int64_t read(const uint8_t* data, int64_t at, const uint8_t* slots, uint32_t* states, uint8_t* out) const {
        __m512i x = _mm512_loadu_si512(states);
        const __m512i slot = _mm512_and_si512(x, mask);
        const __m512i four = _mm512_i32gather_epi32(_mm512_srli_epi32(slot, 2), slots, 4);
        const __m512i place = _mm512_slli_epi32(_mm512_and_si512(slot, _mm512_set1_epi32(3)), 3);
        const __m512i number = _mm512_and_si512(_mm512_srlv_epi32(four, place), _mm512_set1_epi32(0xFF));
        const __m512i own = of(number), start = _mm512_and_si512(own, _mm512_set1_epi32(0xFFFF));
        x = _mm512_mullo_epi32(_mm512_srli_epi32(own, 16), _mm512_srl_epi32(x, bits));
        x = _mm512_sub_epi32(_mm512_add_epi32(x, slot), start);
        const __mmask16 takes = _mm512_cmplt_epu32_mask(x, _mm512_set1_epi32(LEAST_STATE));
        const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + 2 * at));
        const __m512i word = _mm512_maskz_expand_epi32(takes, _mm512_cvtepu16_epi32(words));
        x = _mm512_or_si512(_mm512_mask_slli_epi32(x, takes, x, 16), word);
        _mm512_storeu_si512(states, x);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(number));
        return at + __builtin_popcount(takes);
    }
};
#endif

// Returns the place of the first of `words` that was written; they are written from the end on, and one more is
// written over before the first.
inline int64_t rans_write(
    const uint8_t* numbers, int64_t first, int64_t count, int64_t lanes, const Step* steps, uint32_t* states,
    uint16_t* words, int64_t at) {
    int64_t lane = count % lanes;
    for (int64_t i = count; i-- > first;) {
        lane = (lane ? lane : lanes) - 1;
        const Step step = steps[numbers[i]];
        uint32_t x = states[lane];
        const uint32_t full = x >= step.most;  // no branch: it would be guessed wrong every few numbers
        words[at - 1] = static_cast<uint16_t>(x);
        at -= full;
        x >>= 16 * full;
        const uint32_t quotient = static_cast<uint32_t>((static_cast<unsigned __int128>(step.factor) * x) >> 64);
        states[lane] = x + step.start + quotient * step.rest;
    }
    return at;
}

// Decodes one step of `here` lanes. Returns the place of the next word. `words` is at least 1; if there are too few, the
// last one is taken again, and the place returned is behind it.
inline int64_t rans_step(
    const uint8_t* data, int64_t words, int64_t at, int64_t here, int bits, const uint8_t* slots,
    const uint32_t* frequencies, uint32_t* states, uint8_t* out) {
    const uint32_t mask = (1u << bits) - 1;
    for (int64_t lane = 0; lane < here; ++lane) {
        const uint32_t slot = states[lane] & mask;
        const uint8_t number = slots[slot];
        const uint32_t of = frequencies[number];
        uint32_t x = (of >> 16) * (states[lane] >> bits) + slot - (of & 0xFFFF);
        const uint32_t takes = x < LEAST_STATE;
        uint16_t word;
        std::memcpy(&word, data + 2 * at_most(at, words - 1), 2);
        at += takes;
        states[lane] = x << 16 * takes | (word & (0u - takes));  // no branch here either
        out[lane] = number;
    }
    return at;
}

// Writes the classes of gaps, and the rest of each gap as bits.
struct GapsOut {
    uint8_t *classes, *rest, *first;
    int64_t before = -1;
    uint64_t held = 0;
    int filled = 0;
    GapsOut(uint8_t* to, uint8_t* bits) : classes(to), rest(bits), first(bits) {}
    void put(int64_t place) {
        const uint32_t gap = static_cast<uint32_t>(place - before - 1);
        const int width = 29 - __builtin_clz(gap | 4);
        before = place;
        *classes++ = static_cast<uint8_t>((gap >> width) + 4u * static_cast<uint32_t>(width));
        held |= static_cast<uint64_t>(gap & ((1u << width) - 1)) << filled;
        filled += width;
        std::memcpy(rest, &held, 8);
        rest += filled >> 3;
        held >>= filled & ~7;
        filled &= 7;
    }
    int64_t finish() const { return rest - first + (filled > 0); }
};

// Bit i is set if symbol i of the 64 at `symbols` is not the background.
inline uint64_t others(const int8_t* symbols, int8_t background) {
#if defined(__AVX512BW__)
    return _mm512_cmpneq_epi8_mask(_mm512_loadu_si512(symbols), _mm512_set1_epi8(background));
#elif defined(__AVX2__)
    const __m256i same = _mm256_set1_epi8(background), *at = reinterpret_cast<const __m256i*>(symbols);
    const uint32_t low = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_loadu_si256(at), same)));
    const uint32_t high =
        static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_loadu_si256(at + 1), same)));
    return ~(static_cast<uint64_t>(high) << 32 | low);
#else
    uint64_t found = 0, eight;
    const uint64_t same = 0x0101010101010101u * static_cast<uint8_t>(background);
    for (int i = 0; i < 64; i += 8) {
        std::memcpy(&eight, symbols + i, 8);
        for (uint64_t left = eight ^ same; left;) {
            const int byte = __builtin_ctzll(left) >> 3;
            found |= uint64_t{1} << (i + byte);
            left &= ~(uint64_t{0xFF} << (8 * byte));
        }
    }
    return found;
#endif
}

// Reads gaps: classes, and the rest of each as bits backwards from the end of the stream.
struct GapsIn {
    const uint8_t* data;
    int64_t length, bit, before;
    int64_t next(uint32_t number) {
        const uint32_t octave = number >> 2, width = octave - (octave > 0);
        const uint64_t gap = static_cast<uint64_t>(number - 4 * width) << width;
        before += static_cast<int64_t>(gap + (bits() & ((uint64_t{1} << width) - 1))) + 1;
        bit += width;
        return before;
    }
    uint64_t bits() const {
        uint64_t word = 0;
        const int64_t left = length - (bit >> 3);
        if (left >= 8) {
            std::memcpy(&word, data + left - 8, 8);
            word = __builtin_bswap64(word);
        } else {
            for (int64_t i = 0; i < left; ++i) word |= static_cast<uint64_t>(data[left - 1 - i]) << (8 * i);
        }
        return word >> (bit & 7);
    }
};

// Calls give(i, place) for each place; returns false if one is not under `size`. `state` has the bit and the place
// before.
template <typename Give>
bool rans_gaps(
    const uint8_t* classes, int64_t count, const uint8_t* data, int64_t length, int64_t size, int64_t* state, Give give) {
    GapsIn gaps{data, length, state[0], state[1]};
    for (int64_t i = 0; i < count; ++i) {
        const int64_t place = gaps.next(classes[i]);
        if (place >= size) return false;
        give(i, place);
    }
    state[0] = gaps.bit;
    state[1] = gaps.before;
    return true;
}

}  // namespace

// Tables have 256 entries, by the number that is coded.

TW_EXPORT void TW(rans_counts)(const uint8_t* numbers, int64_t count, int64_t* counts) {
    int64_t sums[4][256] = {};  // four: equal numbers in a row do not wait for each other
    int64_t i = 0;
    for (; i + 4 <= count; i += 4)
        for (int k = 0; k < 4; ++k) ++sums[k][numbers[i + k]];
    for (; i < count; ++i) ++sums[0][numbers[i]];
    for (int n = 0; n < 256; ++n) counts[n] = sums[0][n] + sums[1][n] + sums[2][n] + sums[3][n];
}

TW_EXPORT int64_t TW(rans_write)(
    const uint8_t* numbers, int64_t count, int64_t lanes, int32_t bits, const uint16_t* frequencies,
    const uint16_t* starts, uint32_t* states, uint16_t* words, int64_t at) {
    Step steps[256];
    make_steps(frequencies, starts, bits, steps);
    int64_t whole = 0;
#ifdef __AVX512F__
    if (lanes % 16 == 0) whole = count / 16 * 16;
#endif
    at = rans_write(numbers, whole, count, lanes, steps, states, words, at);
#ifdef __AVX512F__
    uint32_t both[256];
    for (int n = 0; n < 256; ++n) both[n] = static_cast<uint32_t>(frequencies[n]) << 16 | starts[n];
    const Rows rows(both, bits);
    for (int64_t i = whole; i > 0; i -= 16) at = rows.write(numbers + i - 16, states + (i - 16) % lanes, words, at);
#endif
    return at;
}

TW_EXPORT int64_t TW(rans_read)(
    const uint8_t* data, int64_t words, int64_t at, int64_t lanes, int32_t bits, const uint8_t* slots,
    const uint16_t* frequencies, const uint16_t* starts, uint32_t* states, int64_t count, uint8_t* out) {
    uint32_t both[256];
    for (int n = 0; n < 256; ++n) both[n] = static_cast<uint32_t>(frequencies[n]) << 16 | starts[n];
    const uint8_t none[2] = {};
    const uint8_t* from = words ? data : none;
    int64_t i = 0;
#ifdef __AVX512F__
    const Rows rows(both, bits);
    for (; lanes % 16 == 0 && i + lanes <= count && at + lanes <= words; i += lanes)
        for (int64_t lane = 0; lane < lanes; lane += 16)
            at = rows.read(data, at, slots, states + lane, out + i + lane);
#endif
    for (; i < count && at <= words; i += lanes)
        at = rans_step(from, words ? words : 1, at, at_most(lanes, count - i), bits, slots, both, states, out + i);
    return at <= words ? at : -1;
}

// `rest` has room for 3 bytes a place, and 8 more, all of which may be written. Returns the number of its bytes.
TW_EXPORT int64_t TW(rans_gaps_at)(const int64_t* places, int64_t count, uint8_t* classes, uint8_t* rest) {
    GapsOut gaps(classes, rest);
    for (int64_t i = 0; i < count; ++i) gaps.put(places[i]);
    return gaps.finish();
}

// Returns how many symbols are not the background, or -1 if more than `most` are. `sizes` receives the number of bytes
// of the rest, which has room for size / 32 + 16, and the last place.
TW_EXPORT int64_t TW(rans_gaps_of)(
    const int8_t* symbols, int64_t size, int32_t background, int64_t most, uint8_t* classes, uint8_t* values,
    uint8_t* rest, int64_t* sizes) {
    GapsOut gaps(classes, rest);
    const int8_t usual = static_cast<int8_t>(background);
    int64_t found = 0;
    for (int64_t at = 0; at < size; at += AT_A_TIME) {
        uint64_t here = 0;
        if (at + AT_A_TIME <= size) {
            __builtin_prefetch(symbols + at + 16 * AT_A_TIME);
            here = others(symbols + at, usual);
        } else {
            for (int64_t i = at; i < size; ++i) here |= static_cast<uint64_t>(symbols[i] != usual) << (i - at);
        }
        if (!here) continue;
        if (found + __builtin_popcountll(here) > most) return -1;
        for (; here; here &= here - 1) {
            const int64_t place = at + __builtin_ctzll(here);
            gaps.put(place);
            values[found++] = static_cast<uint8_t>(symbols[place]);
        }
    }
    sizes[0] = gaps.finish();
    sizes[1] = gaps.before;
    return found;
}

TW_EXPORT int32_t TW(rans_places)(
    const uint8_t* classes, int64_t count, const uint8_t* data, int64_t length, int64_t size, int64_t* state,
    int64_t* places) {
    if (!places) return rans_gaps(classes, count, data, length, size, state, [](int64_t, int64_t) {});
    return rans_gaps(classes, count, data, length, size, state, [=](int64_t i, int64_t place) { places[i] = place; });
}

TW_EXPORT int32_t TW(rans_fill)(
    const uint8_t* classes, int64_t count, const uint8_t* data, int64_t length, int64_t size, int64_t* state,
    const uint8_t* values, uint8_t* symbols) {
    const auto give = [=](int64_t i, int64_t place) { symbols[place] = values[i]; };
    return rans_gaps(classes, count, data, length, size, state, give);
}
