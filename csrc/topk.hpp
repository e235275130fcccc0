// Selects the values that reach a threshold (thinwire/compression/codecs/topk_randk_threshold.py).
#pragma once

// Writes the indices, counted from `first`, and the bits of all values whose magnitude reaches `least`; returns their
// number. Values beyond `room` are counted, not written.
TW_EXPORT int64_t TW(reaching)(
    const float* values, int64_t size, uint32_t least, int64_t first, int64_t room, int32_t* places, uint32_t* found) {
    int64_t count = 0, i = 0;
#ifdef __AVX512F__
    const __m512i mask = _mm512_set1_epi32(static_cast<int>(MAGNITUDE)), low = _mm512_set1_epi32(static_cast<int>(least));
    __m512i at = _mm512_add_epi32(
        _mm512_set1_epi32(static_cast<int>(first)),
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    for (; i + 16 <= size; i += 16, at = _mm512_add_epi32(at, _mm512_set1_epi32(16))) {
        const __m512i bits = _mm512_loadu_si512(values + i);
        const __mmask16 hit = _mm512_cmpge_epu32_mask(_mm512_and_si512(bits, mask), low);
        if (count + 16 <= room) {  // writes all sixteen; the next ones overwrite those that do not count
            _mm512_storeu_si512(places + count, _mm512_maskz_compress_epi32(hit, at));
            _mm512_storeu_si512(found + count, _mm512_maskz_compress_epi32(hit, bits));
        }
        count += __builtin_popcount(hit);
    }
#endif
    // Few values reach it, so eight are checked together before each one is.
    for (; i + 8 <= size; i += 8) {
        uint32_t any = 0;
        for (int64_t j = 0; j < 8; ++j) any |= (bits_of(values[i + j]) & MAGNITUDE) >= least;
        if (!any) continue;
        for (int64_t j = i; j < i + 8; ++j) {
            const uint32_t bits = bits_of(values[j]);
            if ((bits & MAGNITUDE) < least) continue;
            if (count < room) {
                places[count] = static_cast<int32_t>(first + j);
                found[count] = bits;
            }
            ++count;
        }
    }
    for (; i < size; ++i) {
        const uint32_t bits = bits_of(values[i]);
        if ((bits & MAGNITUDE) < least) continue;
        if (count < room) {
            places[count] = static_cast<int32_t>(first + i);
            found[count] = bits;
        }
        ++count;
    }
    return count;
}
