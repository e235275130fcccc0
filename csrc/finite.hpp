// Checks for NaN and infinity, in the same pass as the work on a vector.
#pragma once

namespace {

constexpr int64_t STRETCH = 4096;  // values between two checks for an early stop

}  // namespace

TW_EXPORT int32_t TW(finite)(const float* values, int64_t size) {
    for (int64_t at = 0; at < size; at += STRETCH)
        if (largest_bits(values + at, at_most(STRETCH, size - at)) >= INFINITE) return 0;
    return 1;
}

// values += sign * others, sign 1 or -1, so that no product rounds. Returns 0 if a sum is not finite; the values after
// it are unchanged.
TW_EXPORT int32_t TW(add_finite)(float* values, const float* others, int64_t size, float sign) {
    for (int64_t at = 0; at < size; at += STRETCH) {
        float* to = values + at;
        const float* from = others + at;
        const int64_t here = at_most(STRETCH, size - at);
        uint32_t largest = 0;
        for (int64_t i = 0; i < here; ++i) {
            const float sum = to[i] + sign * from[i];
            const uint32_t bits = bits_of(sum) & MAGNITUDE;
            largest = bits > largest ? bits : largest;
            to[i] = sum;
        }
        if (largest >= INFINITE) return 0;
    }
    return 1;
}
