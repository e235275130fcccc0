// Which values reach a threshold: see aggregation/methods/topk.py.
#pragma once

// The places, counted from `first`, and the magnitudes' bits of all that reach `least`; returns how many. What does
// not fit `room` is counted, not written.
TW_EXPORT int64_t TW(reaching)(
    const float* values, int64_t size, uint32_t least, int64_t first, int64_t room, int64_t* places, uint32_t* found) {
    int64_t count = 0, i = 0;
#ifdef __AVX512F__
    const __m512i mask = _mm512_set1_epi32(static_cast<int>(MAGNITUDE)), low = _mm512_set1_epi32(static_cast<int>(least));
    for (; i + 16 <= size; i += 16) {
        const __m512i bits = _mm512_and_si512(_mm512_loadu_si512(values + i), mask);
        unsigned hit = _mm512_cmpge_epu32_mask(bits, low);
        for (; hit; hit &= hit - 1) {
            const int64_t at = i + __builtin_ctz(hit);
            if (count < room) {
                places[count] = first + at;
                found[count] = bits_of(values[at]) & MAGNITUDE;
            }
            ++count;
        }
    }
#endif
    // Few reach it: eight are looked at together before each is.
    for (; i + 8 <= size; i += 8) {
        uint32_t any = 0;
        for (int64_t j = 0; j < 8; ++j) any |= (bits_of(values[i + j]) & MAGNITUDE) >= least;
        if (!any) continue;
        for (int64_t j = i; j < i + 8; ++j) {
            const uint32_t bits = bits_of(values[j]) & MAGNITUDE;
            if (bits < least) continue;
            if (count < room) {
                places[count] = first + j;
                found[count] = bits;
            }
            ++count;
        }
    }
    for (; i < size; ++i) {
        const uint32_t bits = bits_of(values[i]) & MAGNITUDE;
        if (bits < least) continue;
        if (count < room) {
            places[count] = first + i;
            found[count] = bits;
        }
        ++count;
    }
    return count;
}
