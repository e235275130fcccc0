// Packs symbols of `bits` bits, eight at a time: eight symbols of b bits are b bytes
// (thinwire/compression/codecs/pack_zstd.py defines the bits).
#pragma once

namespace {

// A mask of `bits` bits in each lane, from bit `from` on.
constexpr uint64_t bits_of_lanes(int lane, int bits, int from = 0) {
    const uint64_t each = (~uint64_t{0} >> (64 - bits)) << from;
    return lane == 64 ? each : each * (~uint64_t{0} / ((uint64_t{1} << (lane % 64)) - 1));
}

// Joins the lowest bits of the two halves of each lane of twice the width; vectors of words do many at once.
template <int BITS, int WIDTH>
inline uint64_t joined(uint64_t word) {
    constexpr uint64_t low = bits_of_lanes(2 * WIDTH, BITS), high = bits_of_lanes(2 * WIDTH, BITS, BITS);
    return (word & low) | (word >> (WIDTH - BITS) & high);
}

template <int BITS, int WIDTH>
inline uint64_t parted(uint64_t word) {
    constexpr uint64_t low = bits_of_lanes(2 * WIDTH, BITS), high = bits_of_lanes(2 * WIDTH, BITS, WIDTH);
    return (word & low) | (word << (WIDTH - BITS) & high);
}

template <int BITS>
inline uint64_t squeezed(uint64_t eight) {
    return joined<4 * BITS, 32>(joined<2 * BITS, 16>(joined<BITS, 8>(eight)));
}

// Sign-extends two's complement in the lowest bits: flips the sign bit and subtracts it; no byte borrows from the next.
template <int BITS>
inline uint64_t spread(uint64_t word) {
    constexpr uint64_t sign = bits_of_lanes(8, 1, BITS - 1), top = bits_of_lanes(8, 1, 7);
    word = parted<BITS, 8>(parted<2 * BITS, 16>(parted<4 * BITS, 32>(word)));
    return (((word ^ sign) | top) - sign) ^ top;
}

constexpr int64_t WORDS = BUCKET / 8;  // words of eight symbols that are packed together

// Reads BYTES bytes as a word; as a native integer if there is one of that size, so that loops vectorize.
template <int BYTES>
inline uint64_t loaded(const uint8_t* from) {
    if constexpr (BYTES == 1) return *from;
    uint64_t word = 0;
    uint32_t half;
    uint16_t quarter;
    if constexpr (BYTES == 2) return std::memcpy(&quarter, from, BYTES), quarter;
    if constexpr (BYTES == 4) return std::memcpy(&half, from, BYTES), half;
    return std::memcpy(&word, from, BYTES), word;
}

template <int BITS>
void pack_all(const int8_t* symbols, int64_t items, uint8_t* out) {
    uint64_t words[WORDS];
    for (; items > 0; items -= BUCKET, symbols += BUCKET, out += WORDS * BITS) {
        const int64_t here = at_most(BUCKET, items), whole = here / 8, rest = here % 8;
        for (int64_t i = 0; i < whole; ++i) {
            uint64_t eight;
            std::memcpy(&eight, symbols + 8 * i, 8);
            words[i] = squeezed<BITS>(eight);
        }
        for (int64_t i = 0; i < whole; ++i) std::memcpy(out + i * BITS, &words[i], BITS);
        if (!rest) continue;
        uint64_t last = 0;
        std::memcpy(&last, symbols + 8 * whole, static_cast<size_t>(rest));
        last = squeezed<BITS>(last);
        std::memcpy(out + whole * BITS, &last, static_cast<size_t>((rest * BITS + 7) / 8));
    }
}

template <int BITS>
void unpack_all(const uint8_t* data, int64_t items, int8_t* symbols) {
    uint64_t words[WORDS];
    for (; items > 0; items -= BUCKET, symbols += BUCKET, data += WORDS * BITS) {
        const int64_t here = at_most(BUCKET, items), whole = here / 8, rest = here % 8;
        const int64_t bytes = (here * BITS + 7) / 8;
        int64_t i = 0;
        if constexpr (BITS & (BITS - 1))
            for (; i * BITS + 8 <= bytes; ++i) words[i] = loaded<8>(data + i * BITS);  // `spread` masks the excess
        for (; i < whole; ++i) words[i] = loaded<BITS>(data + i * BITS);
        for (i = 0; i < whole; ++i) {
            const uint64_t eight = spread<BITS>(words[i]);
            std::memcpy(symbols + 8 * i, &eight, 8);
        }
        if (!rest) continue;
        uint64_t last = 0;
        std::memcpy(&last, data + whole * BITS, static_cast<size_t>((rest * BITS + 7) / 8));
        last = spread<BITS>(last);
        std::memcpy(symbols + 8 * whole, &last, static_cast<size_t>(rest));
    }
}

void pack_symbols(const int8_t* symbols, int64_t items, int bits, uint8_t* out) {
    switch (bits) {
        case 1: return pack_all<1>(symbols, items, out);
        case 2: return pack_all<2>(symbols, items, out);
        case 3: return pack_all<3>(symbols, items, out);
        case 4: return pack_all<4>(symbols, items, out);
        case 5: return pack_all<5>(symbols, items, out);
        case 6: return pack_all<6>(symbols, items, out);
        case 7: return pack_all<7>(symbols, items, out);
    }
}

void unpack_symbols(const uint8_t* data, int64_t items, int bits, int8_t* symbols) {
    switch (bits) {
        case 1: return unpack_all<1>(data, items, symbols);
        case 2: return unpack_all<2>(data, items, symbols);
        case 3: return unpack_all<3>(data, items, symbols);
        case 4: return unpack_all<4>(data, items, symbols);
        case 5: return unpack_all<5>(data, items, symbols);
        case 6: return unpack_all<6>(data, items, symbols);
        case 7: return unpack_all<7>(data, items, symbols);
    }
}

// Takes an encoder's symbols a bucket at a time. Whole bytes go to their place in the frame; smaller symbols go to a
// buffer in the first-level cache, from which they are packed. Tensors may end anywhere: an incomplete group of eight
// waits for the next symbols.
class Packer {
  public:
    Packer(uint8_t* out, int bits) : out_(out), bits_(bits) {}
    int8_t* room() { return bits_ == 8 ? reinterpret_cast<int8_t*>(out_) : symbols_ + waiting_; }
    void wrote(int64_t items) {
        if (bits_ == 8) {
            out_ += items;
            return;
        }
        const int64_t all = waiting_ + items;
        waiting_ = all % 8;
        pack_symbols(symbols_, all - waiting_, bits_, out_);
        out_ += all / 8 * bits_;
        if (all >= 8) std::memcpy(symbols_, symbols_ + all - waiting_, 8);
    }
    void finish() { pack_symbols(symbols_, waiting_, bits_, out_); }

  private:
    uint8_t* out_;
    const int bits_;
    int64_t waiting_ = 0;
    int8_t symbols_[BUCKET + 16];
};

// Unpacks any stretch of at most a bucket into whole symbols.
class Unpacker {
  public:
    Unpacker(const uint8_t* data, int bits) : data_(data), bits_(bits) {}
    const int8_t* stretch(int64_t first, int64_t items) {
        if (bits_ == 8) return reinterpret_cast<const int8_t*>(data_) + first;
        const int64_t before = first % 8;
        unpack_symbols(data_ + first / 8 * bits_, before + items, bits_, symbols_);
        return symbols_ + before;
    }

  private:
    const uint8_t* data_;
    const int bits_;
    int8_t symbols_[BUCKET + 16];
};

}  // namespace

TW_EXPORT void TW(pack)(const int8_t* symbols, int64_t items, int32_t bits, uint8_t* out) {
    pack_symbols(symbols, items, bits, out);
}

TW_EXPORT void TW(unpack)(const uint8_t* data, int64_t items, int32_t bits, int8_t* symbols) {
    unpack_symbols(data, items, bits, symbols);
}

// Returns the smallest symbol, or 0 if all are larger.
TW_EXPORT int32_t TW(least)(const uint8_t* data, int64_t items, int32_t bits) {
    Unpacker symbols(data, bits);
    int8_t least = 0;
    for (int64_t at = 0; at < items; at += BUCKET) {
        const int64_t here = at_most(BUCKET, items - at);
        const int8_t* from = symbols.stretch(at, here);
        for (int64_t i = 0; i < here; ++i) least = from[i] < least ? from[i] : least;
    }
    return least;
}
