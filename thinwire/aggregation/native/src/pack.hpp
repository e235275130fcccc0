// Symbols of `bits` bits side by side, eight at a time: eight of b bits are b bytes (aggregation/coders/pack.py).
#pragma once

namespace {

constexpr uint64_t ONES = 0x0101010101010101u;

inline uint64_t squeezed(uint64_t eight, int bits) {
#ifdef __BMI2__
    return _pext_u64(eight, ONES * ((1u << bits) - 1));
#else
    uint64_t out = 0;
    for (int i = 0; i < 8; ++i) out |= (eight >> (8 * i) & ((1u << bits) - 1)) << (bits * i);
    return out;
#endif
}

inline uint64_t spread(uint64_t squeezed, int bits) {
#ifdef __BMI2__
    return _pdep_u64(squeezed, ONES * ((1u << bits) - 1));
#else
    uint64_t out = 0;
    for (int i = 0; i < 8; ++i) out |= (squeezed >> (bits * i) & ((1u << bits) - 1)) << (8 * i);
    return out;
#endif
}

inline void pack_symbols(const int8_t* symbols, int64_t items, int bits, uint8_t* out) {
    int64_t i = 0;
    for (; i + 8 <= items; i += 8, out += bits) {
        uint64_t eight;
        std::memcpy(&eight, symbols + i, 8);
        eight = squeezed(eight, bits);
        std::memcpy(out, &eight, static_cast<size_t>(bits));
    }
    if (i < items) {
        uint64_t rest = 0;
        std::memcpy(&rest, symbols + i, static_cast<size_t>(items - i));
        rest = squeezed(rest, bits);
        std::memcpy(out, &rest, static_cast<size_t>(((items - i) * bits + 7) / 8));
    }
}

// Each byte's lowest bits as two's complement: flip the sign bit, take it away; no byte borrows from the next.
inline uint64_t with_sign(uint64_t eight, int bits) {
    const uint64_t sign = ONES << (bits - 1), top = ONES << 7;
    return (((eight ^ sign) | top) - sign) ^ top;
}

}  // namespace

TW_EXPORT void TW(pack)(const int8_t* symbols, int64_t items, int32_t bits, uint8_t* out) {
    pack_symbols(symbols, items, bits, out);
}

TW_EXPORT void TW(unpack)(const uint8_t* data, int64_t items, int32_t bits, int8_t* symbols) {
    int64_t i = 0;
    for (; i + 8 <= items; i += 8, data += bits) {
        uint64_t eight = 0;
        std::memcpy(&eight, data, static_cast<size_t>(bits));
        eight = with_sign(spread(eight, bits), bits);
        std::memcpy(symbols + i, &eight, 8);
    }
    if (i < items) {
        uint64_t rest = 0;
        std::memcpy(&rest, data, static_cast<size_t>(((items - i) * bits + 7) / 8));
        rest = with_sign(spread(rest, bits), bits);
        std::memcpy(symbols + i, &rest, static_cast<size_t>(items - i));
    }
}
