// Masked vectors of secure aggregation (thinwire/privacy/masks.py defines the bits): whole numbers in lanes of 16, 32 or
// 64 bits, added modulo the lane, and packed in `width` bits a lane. Eight lanes are `width` bytes. No loop branches on
// a lane's value, which may be secret.
#pragma once

namespace {

// Moves the lowest `width` bits of the lanes in a word together, and apart again. A word has four lanes of 16 bits or two
// of 32.
template <typename Lane>
class Squeeze {
  public:
    static constexpr int PER = 8 / sizeof(Lane), BITS = 8 * sizeof(Lane);

    explicit Squeeze(int width)
        : width_(width),
          low_(bits_of_lanes(2 * BITS, width)),
          high_(bits_of_lanes(2 * BITS, width, width)),
          far_(bits_of_lanes(2 * BITS, width, BITS)),
          lower_(PER == 4 ? bits_of_lanes(64, 2 * width) : 0),
          upper_(PER == 4 ? bits_of_lanes(64, 2 * width, 2 * width) : 0),
          beyond_(PER == 4 ? bits_of_lanes(64, 2 * width, 32) : 0) {}

    uint64_t together(uint64_t word) const {
        word = (word & low_) | (word >> (BITS - width_) & high_);
        if constexpr (PER == 4) word = (word & lower_) | (word >> (32 - 2 * width_) & upper_);
        return word;
    }

    uint64_t apart(uint64_t word) const {
        if constexpr (PER == 4) word = (word & lower_) | (word << (32 - 2 * width_) & beyond_);
        return (word & low_) | (word << (BITS - width_) & far_);
    }

  private:
    const int width_;
    const uint64_t low_, high_, far_, lower_, upper_, beyond_;
};

// Where a group of eight lanes has its second half: `odd` is 4 if the first half ends within a byte, else 0.
struct Halves {
    const int two, odd;  // bits of two lanes, at most 62
    const int64_t second;  // byte

    explicit Halves(int width) : two(2 * width), odd(4 * width % 8), second((4 * width - odd) / 8) {}
};

inline void store(uint64_t word, uint8_t* to) { std::memcpy(to, &word, 8); }

// Writes eight lanes from two words of four lanes together (60 bits at most), or from four words of two.
template <int WORDS_A_GROUP>
inline void store_group(const uint64_t* words, Halves at, uint8_t* to) {
    if constexpr (WORDS_A_GROUP == 2) {
        store(words[0], to);
        store(words[1] << at.odd | words[0] >> (2 * at.two - at.odd), to + at.second);
    } else {
        const uint64_t low = words[2] | words[3] << at.two, high = words[3] >> (64 - at.two);
        store(words[0] | words[1] << at.two, to);
        store(words[1] >> (64 - at.two), to + 8);
        store(low << at.odd | words[1] >> (at.two - at.odd), to + at.second);
        store(high << at.odd | low >> 1 >> (63 - at.odd), to + at.second + 8);
    }
}

// Reads the words of `store_group`; bits above those of their lanes may be any.
template <int WORDS_A_GROUP>
inline void load_group(const uint8_t* from, Halves at, uint64_t* words) {
    words[0] = loaded<8>(from);
    const uint64_t low = loaded<8>(from + at.second);
    if constexpr (WORDS_A_GROUP == 2) {
        words[1] = low >> at.odd;
    } else {
        const uint64_t high = loaded<8>(from + at.second + 8), next = low >> at.odd | high << 1 << (63 - at.odd);
        words[1] = words[0] >> at.two | loaded<8>(from + 8) << (64 - at.two);
        words[2] = next;
        words[3] = next >> at.two | high >> at.odd << (64 - at.two);
    }
}

constexpr int64_t BEHIND = 16;  // bytes that are read or written behind a group of eight

template <typename Lane>
void pack_lanes(const Lane* lanes, int64_t count, int width, uint8_t* out) {
    constexpr int PER = Squeeze<Lane>::PER, GROUP = 8 / PER;
    const Squeeze<Lane> squeeze(width);
    const Halves at(width);
    uint64_t words[BUCKET / PER];
    uint8_t last[BUCKET * sizeof(Lane) + BEHIND];
    for (int64_t left = (count * width + 7) / 8; count > 0; count -= BUCKET, lanes += BUCKET) {
        const int64_t here = at_most(BUCKET, count), groups = (here + 7) / 8, whole = here / PER;
        const int64_t bytes = (here * width + 7) / 8;
        for (int64_t i = 0; i < whole; ++i) {
            uint64_t word;
            std::memcpy(&word, lanes + PER * i, 8);
            words[i] = squeeze.together(word);
        }
        for (int64_t i = whole; i < groups * GROUP; ++i) {  // the rest, padded with zeros
            uint64_t word = 0;
            if (here > PER * i) std::memcpy(&word, lanes + PER * i, static_cast<size_t>(here - PER * i) * sizeof(Lane));
            words[i] = squeeze.together(word);
        }
        uint8_t* const to = left < groups * width + BEHIND ? last : out;
        for (int64_t g = 0; g < groups; ++g) store_group<GROUP>(words + GROUP * g, at, to + g * width);
        if (to == last) std::memcpy(out, last, static_cast<size_t>(bytes));
        out += bytes;
        left -= bytes;
    }
}

// into[0 ..] += the lanes start .. start + count of `size` packed bytes.
template <typename Lane>
void add_packed_lanes(const uint8_t* packed, int64_t size, int width, int64_t start, int64_t count, Lane* into) {
    constexpr int PER = Squeeze<Lane>::PER, GROUP = 8 / PER;
    const Squeeze<Lane> squeeze(width);
    const Halves half(width);
    uint64_t words[BUCKET / PER];
    Lane lanes[BUCKET];
    uint8_t last[BUCKET * sizeof(Lane) + BEHIND];
    const int64_t stop = start + count;
    for (int64_t at = start - start % 8; at < stop; at += BUCKET) {
        const int64_t here = at_most(BUCKET, stop - at), groups = (here + 7) / 8, left = size - at / 8 * width;
        const uint8_t* from = packed + at / 8 * width;
        if (left < groups * width + BEHIND) {
            const int64_t bytes = at_most(left, groups * width);
            std::memcpy(last, from, static_cast<size_t>(bytes));
            std::memset(last + bytes, 0, static_cast<size_t>(groups * width + BEHIND - bytes));
            from = last;
        }
        for (int64_t g = 0; g < groups; ++g) load_group<GROUP>(from + g * width, half, words + GROUP * g);
        for (int64_t i = 0; i < groups * GROUP; ++i) {
            const uint64_t word = squeeze.apart(words[i]);
            std::memcpy(lanes + PER * i, &word, 8);
        }
        const int64_t skipped = at < start ? start - at : 0;
        Lane* const to = into + (at + skipped - start);
        for (int64_t i = 0; i < here - skipped; ++i) to[i] = static_cast<Lane>(to[i] + lanes[skipped + i]);
    }
}

template <typename Lane>
void add_stream(Lane* lanes, const uint8_t* stream, int64_t count, bool subtracts) {
    const Lane* values = reinterpret_cast<const Lane*>(stream);
    if (subtracts)
        for (int64_t i = 0; i < count; ++i) lanes[i] = static_cast<Lane>(lanes[i] - values[i]);
    else
        for (int64_t i = 0; i < count; ++i) lanes[i] = static_cast<Lane>(lanes[i] + values[i]);
}

}  // namespace

// lanes[i] += or -= the little-endian numbers of a stream that begins at a multiple of their size.
TW_EXPORT void TW(lanes_add)(void* lanes, const uint8_t* stream, int64_t count, int32_t bytes, int32_t subtracts) {
    switch (bytes) {
        case 2: return add_stream(static_cast<uint16_t*>(lanes), stream, count, subtracts);
        case 4: return add_stream(static_cast<uint32_t*>(lanes), stream, count, subtracts);
        case 8: return add_stream(static_cast<uint64_t*>(lanes), stream, count, subtracts);
    }
}

// `width` is 1 .. 15 in lanes of 2 bytes, 17 .. 31 in lanes of 4.
TW_EXPORT void TW(lanes_pack)(const void* lanes, int64_t count, int32_t bytes, int32_t width, uint8_t* out) {
    switch (bytes) {
        case 2: return pack_lanes(static_cast<const uint16_t*>(lanes), count, width, out);
        case 4: return pack_lanes(static_cast<const uint32_t*>(lanes), count, width, out);
    }
}

TW_EXPORT void TW(lanes_add_packed)(
    const uint8_t* packed, int64_t size, int32_t width, int64_t start, int64_t count, int32_t bytes, void* into) {
    switch (bytes) {
        case 2: return add_packed_lanes(packed, size, width, start, count, static_cast<uint16_t*>(into));
        case 4: return add_packed_lanes(packed, size, width, start, count, static_cast<uint32_t*>(into));
    }
}
