// Rice codes in three regions: parameters, quotients, remainders; thinwire/compression/codecs/delta_rice.py defines the
// bits.
#pragma once

namespace {

constexpr int64_t RICE_BLOCK = 4096;
constexpr int MOST_PARAMETER = 24;
constexpr uint8_t RAW = 255;

// The numbers of a block: gaps between indices, or zigzag numbers of symbols. They keep the last index between blocks.
struct Gaps {
    const int64_t* places;
    int64_t before = -1;
    void take(int64_t start, int64_t count, uint32_t* numbers) {
        for (int64_t i = 0; i < count; ++i) {
            numbers[i] = static_cast<uint32_t>(places[start + i] - before - 1);
            before = places[start + i];
        }
    }
    void give(int64_t start, int64_t count, const uint64_t* numbers, int64_t* out) {
        for (int64_t i = 0; i < count; ++i) out[start + i] = before += static_cast<int64_t>(numbers[i]) + 1;
    }
};

struct Zigzag {
    const int8_t* symbols;
    void take(int64_t start, int64_t count, uint32_t* numbers) {
        for (int64_t i = 0; i < count; ++i) {
            const int32_t symbol = symbols[start + i];
            numbers[i] = (static_cast<uint32_t>(symbol) << 1) ^ static_cast<uint32_t>(symbol >> 31);
        }
    }
    void give(int64_t start, int64_t count, const uint64_t* numbers, int8_t* out) {
        for (int64_t i = 0; i < count; ++i)
            out[start + i] = static_cast<int8_t>((numbers[i] >> 1) ^ (0 - (numbers[i] & 1)));
    }
};

struct BitsOut {
    uint8_t* to;
    uint64_t held = 0;
    int filled = 0;
    void put(uint64_t low, int width) {  // width <= 24
        held |= low << filled;
        filled += width;
        while (filled >= 8) {
            *to++ = static_cast<uint8_t>(held);
            held >>= 8;
            filled -= 8;
        }
    }
    void finish() {
        if (filled) *to++ = static_cast<uint8_t>(held);
    }
};

// Returns the parameter of the shortest code near the mean's number of bits, the smallest of equal ones.
inline int best_parameter(const uint32_t* numbers, int64_t count, int64_t* length) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += numbers[i];
    int near = 0;
    for (uint64_t mean = sum / static_cast<uint64_t>(count); mean; mean >>= 1) ++near;
    near = near > MOST_PARAMETER ? MOST_PARAMETER : near;
    const int last = near + 1 > MOST_PARAMETER ? MOST_PARAMETER : near + 1;
    int best = -1;
    for (int k = near > 2 ? near - 2 : 0; k <= last; ++k) {
        uint64_t quotients = 0;
        for (int64_t i = 0; i < count; ++i) quotients += numbers[i] >> k;
        const int64_t bits = static_cast<int64_t>(quotients) + count * (k + 1);
        if (best < 0 || bits < *length) {
            best = k;
            *length = bits;
        }
    }
    return best;
}

// `unary` is zeroed; it and `remainders` have `room` bytes each. `sizes` receives the number of bytes used of each.
template <typename From>
bool rice_write(
    From from, int64_t items, int raw, int64_t room, uint8_t* parameters, uint8_t* unary, uint8_t* remainders, int64_t* sizes) {
    BitsOut low{remainders};
    int64_t bit = 0, total = 0;
    uint32_t numbers[RICE_BLOCK];
    for (int64_t at = 0; at < items; at += RICE_BLOCK) {
        const int64_t count = at_most(RICE_BLOCK, items - at);
        from.take(at, count, numbers);
        int64_t length = 0;
        const int parameter = best_parameter(numbers, count, &length);
        const bool coded = !(raw && length >= raw * count);
        const int width = coded ? parameter : raw;
        if ((total += coded ? length : raw * count) > 8 * room) return false;
        *parameters++ = coded ? static_cast<uint8_t>(parameter) : RAW;
        const uint32_t mask = (1u << width) - 1;
        for (int64_t i = 0; width && i < count; ++i) low.put(numbers[i] & mask, width);
        for (int64_t i = 0; coded && i < count; ++i) {
            bit += numbers[i] >> parameter;
            unary[bit >> 3] |= static_cast<uint8_t>(1u << (bit & 7));
            ++bit;
        }
    }
    low.finish();
    sizes[0] = (bit + 7) / 8;
    sizes[1] = low.to - remainders;
    return true;
}

inline uint64_t bits_at(const uint8_t* data, int64_t length, int64_t bit) {
    uint64_t word = 0;
    const int64_t byte = bit >> 3, left = length - byte;
    if (left >= 8)
        std::memcpy(&word, data + byte, 8);
    else
        for (int64_t i = 0; i < left; ++i) word |= static_cast<uint64_t>(data[byte + i]) << (8 * i);
    return word >> (bit & 7);
}

// Returns false unless an encoder makes this stream for `items` numbers under `limit`.
template <typename To, typename Out>
bool rice_read(To to, const uint8_t* data, int64_t length, int64_t items, int raw, uint64_t limit, Out* out) {
    const int64_t blocks = (items + RICE_BLOCK - 1) / RICE_BLOCK;
    if (length < blocks) return false;
    int64_t low_bits = 0;
    for (int64_t b = 0; b < blocks; ++b) {
        if (data[b] == RAW ? !raw : data[b] > MOST_PARAMETER) return false;
        low_bits += at_most(RICE_BLOCK, items - b * RICE_BLOCK) * (data[b] == RAW ? raw : data[b]);
    }
    const int64_t low_bytes = (low_bits + 7) / 8, unary_bytes = length - blocks - low_bytes;
    if (unary_bytes < 0) return false;
    const uint8_t *unary = data + blocks, *low = unary + unary_bytes;
    int64_t bit = 0, low_bit = 0, word_at = 0;  // word: the unread bits of the eight quotient bytes before word_at
    uint64_t word = 0, numbers[RICE_BLOCK];
    for (int64_t b = 0; b < blocks; ++b) {
        const int64_t count = at_most(RICE_BLOCK, items - b * RICE_BLOCK);
        const bool coded = data[b] != RAW;
        const int width = coded ? data[b] : raw;
        const uint64_t mask = (uint64_t{1} << width) - 1;
        for (int64_t i = 0; i < count; ++i, low_bit += width)
            numbers[i] = width ? bits_at(low, low_bytes, low_bit) & mask : 0;
        for (int64_t i = 0; coded && i < count; ++i) {
            while (!word) {
                if (word_at >= unary_bytes) return false;
                word = bits_at(unary, unary_bytes, word_at * 8);
                word_at += 8;
            }
            const int64_t end = (word_at - 8) * 8 + __builtin_ctzll(word);
            word &= word - 1;
            const uint64_t quotient = static_cast<uint64_t>(end - bit);
            bit = end + 1;
            if (quotient >= limit) return false;
            numbers[i] |= quotient << width;
        }
        uint64_t largest = 0;
        for (int64_t i = 0; i < count; ++i) largest = numbers[i] > largest ? numbers[i] : largest;
        if (largest >= limit) return false;
        to.give(b * RICE_BLOCK, count, numbers, out);
    }
    // Only the zeros that fill the last byte may follow.
    if (word || (bit + 7) / 8 != unary_bytes) return false;
    return !(low_bits % 8) || !(low[low_bytes - 1] >> (low_bits % 8));
}

}  // namespace

TW_EXPORT int32_t TW(rice_write_places)(
    const int64_t* places, int64_t items, int64_t room, uint8_t* parameters, uint8_t* unary, uint8_t* remainders,
    int64_t* sizes) {
    return rice_write(Gaps{places}, items, 0, room, parameters, unary, remainders, sizes);
}

TW_EXPORT int32_t TW(rice_write_symbols)(
    const int8_t* symbols, int64_t items, int32_t raw, int64_t room, uint8_t* parameters, uint8_t* unary,
    uint8_t* remainders, int64_t* sizes) {
    return rice_write(Zigzag{symbols}, items, raw, room, parameters, unary, remainders, sizes);
}

TW_EXPORT int32_t TW(rice_read_places)(
    const uint8_t* data, int64_t length, int64_t items, int64_t size, int64_t* places) {
    const bool whole = rice_read(Gaps{nullptr}, data, length, items, 0, static_cast<uint64_t>(size), places);
    return whole && places[items - 1] < size;
}

TW_EXPORT int32_t TW(rice_read_symbols)(
    const uint8_t* data, int64_t length, int64_t items, int32_t raw, int8_t* symbols) {
    return rice_read(Zigzag{nullptr}, data, length, items, raw, uint64_t{1} << raw, symbols);
}
