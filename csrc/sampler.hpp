// Reads draws of integer noise from a table of thresholds (thinwire/privacy/samplers.py defines the table and the bits).
#pragma once

// A word is a sign (its lowest bit) and a position, the other 63 bits. The magnitude drawn is the number of thresholds
// below the position. guide[b] is that number at the first position whose upper `bits` bits are b. Returns the index of
// the first word whose position equals a threshold, and writes nothing for it and the words after it; else `count`.
TW_EXPORT int64_t TW(sampler_draw)(
    const uint64_t* words, int64_t count, const uint64_t* thresholds, const uint32_t* guide, int32_t bits,
    int32_t* out) {
    for (int64_t i = 0; i < count; ++i) {
        const uint64_t position = words[i] >> 1, part = words[i] >> (64 - bits);
        uint32_t found = guide[part];
        found += thresholds[found] < position;  // most parts hold at most one threshold: this step needs no branch
        if (__builtin_expect(thresholds[found] < position, 0)) {
            uint32_t last = guide[part + 1];
            ++found;
            while (found < last) {
                const uint32_t middle = found + (last - found) / 2;
                if (thresholds[middle] < position)
                    found = middle + 1;
                else
                    last = middle;
            }
        }
        if (__builtin_expect(thresholds[found] == position, 0)) return i;
        const uint32_t sign = 0u - static_cast<uint32_t>(words[i] & 1);
        out[i] = static_cast<int32_t>((found ^ sign) - sign);
    }
    return count;
}
