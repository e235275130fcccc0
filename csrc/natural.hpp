// Natural compression: powers of two, rounded at random; thinwire/compression/codecs/int8_qsgd_natural.py defines the
// bits.
#pragma once

namespace {

constexpr int MOST_TOP = 127, LEAST_TOP = -100, POWERS = 127;
constexpr uint32_t FRACTION = 0x7FFFFFu;

// The rare cases that the loop below leaves out: denormals, and values below the smallest power.
inline int8_t natural_symbol(float value, int top, uint32_t drawn) {
    uint32_t magnitude = bits_of(value) & MAGNITUDE;
    if (!magnitude) return 0;
    const float size = float_of(magnitude);
    int lifted = 0;
    if (magnitude <= FRACTION) {
        magnitude = bits_of(size * 0x1p24f);
        lifted = 24;
    }
    int steps = static_cast<int>(magnitude >> 23) - lifted - top + (drawn < 2 * (magnitude & FRACTION));
    if (steps < 1) {
        const float chance = static_cast<float>(ldexp(static_cast<double>(size), POWERS - 1 - top));
        steps = static_cast<float>(static_cast<int32_t>(drawn)) * 0x1p-24f < chance;
    }
    steps = steps > POWERS ? POWERS : steps;
    return static_cast<int8_t>(bits_of(value) > MAGNITUDE ? -steps : steps);
}

}  // namespace

// Returns 0 for NaN or infinity.
TW_EXPORT int32_t TW(natural_encode)(
    const float* values, int64_t size, uint32_t first, uint32_t word, int8_t* tops, int8_t* symbols) {
    for (int64_t at = 0; at < size; at += BUCKET) {
        const int64_t here = at_most(BUCKET, size - at);
        const float* from = values + at;
        int8_t* to = symbols + at;
        const uint32_t largest = largest_bits(from, here), index = first + static_cast<uint32_t>(at);
        if (largest >= INFINITE) return 0;
        const int over = static_cast<int>(largest >> 23) - 126;  // 2^over is above the largest value
        const int top = over > MOST_TOP ? MOST_TOP : over < LEAST_TOP ? LEAST_TOP : over;
        tops[at / BUCKET] = static_cast<int8_t>(top);
        int32_t rare = 0;
        for (int64_t i = 0; i < here; ++i) {
            const uint32_t bits = bits_of(from[i]), magnitude = bits & MAGNITUDE;
            const uint32_t drawn = lowbias32((index + static_cast<uint32_t>(i)) ^ word) >> 8;
            int32_t steps = static_cast<int32_t>(magnitude >> 23) - top + (drawn < 2 * (magnitude & FRACTION));
            rare |= (magnitude != 0) & ((steps < 1) | (magnitude <= FRACTION));
            steps = steps > POWERS ? POWERS : steps;
            steps = magnitude ? steps : 0;
            to[i] = static_cast<int8_t>(bits > MAGNITUDE ? -steps : steps);
        }
        for (int64_t i = 0; rare && i < here; ++i)
            to[i] = natural_symbol(from[i], top, lowbias32((index + static_cast<uint32_t>(i)) ^ word) >> 8);
    }
    return 1;
}

// into[0 ..] (+)= factor * power, for the values start .. stop.
TW_EXPORT void TW(natural_add)(
    const int8_t* symbols, const int8_t* tops, int64_t start, int64_t stop, float factor, int32_t adds, float* into) {
    for (int64_t at = start; at < stop;) {
        const int64_t end = at_most(at - at % BUCKET + BUCKET, stop), size = end - at;
        const float top = float_of(static_cast<uint32_t>(tops[at / BUCKET] + 127) << 23);
        const int8_t* from = symbols + at;
        float* to = into + (at - start);
        const auto add = [=](int64_t i) {
            const int32_t symbol = from[i], steps = symbol < 0 ? -symbol : symbol;
            // As exponent bits, `steps` is the float 2^(steps - 127), and 0 is 0.
            const uint32_t bits = static_cast<uint32_t>(steps) << 23 | (static_cast<uint32_t>(symbol) & 0x80000000u);
            const float value = float_of(bits) * top * factor;
            to[i] = adds ? to[i] + value : value;
        };
        streamed(size, add, from, to);
        at = end;
    }
}
