// Varints of the gaps between sorted indices; thinwire/compression/codecs/delta_rice.py defines the bits.
#pragma once

// Returns the number of bytes written. `out` must hold four bytes an index (the caller allocates ten).
TW_EXPORT int64_t TW(delta_write)(const int64_t* places, int64_t items, uint8_t* out) {
    uint8_t* to = out;
    int64_t before = -1;
    for (int64_t i = 0; i < items; ++i) {
        uint64_t gap = static_cast<uint64_t>(places[i] - before - 1);
        before = places[i];
        for (; gap > 0x7F; gap >>= 7) *to++ = static_cast<uint8_t>(gap | 0x80);
        *to++ = static_cast<uint8_t>(gap);
    }
    return to - out;
}

#ifdef __AVX512F__
namespace {

// Reads all gaps of one or two bytes in the next sixteen bytes and returns their number; 0 if a gap is longer, -1 if
// one is not in its shortest form.
inline int64_t read_sixteen(const uint8_t** at, int64_t* place, int64_t* places) {
    const __m512i zero = _mm512_setzero_si512(), low = _mm512_set1_epi32(0x7F);
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(*at)));
    const unsigned more = _mm512_cmpgt_epu32_mask(bytes, low), second = more << 1 & 0xFFFF, ends = ~more & 0xFFFF;
    if (more & second) return 0;
    if (_mm512_mask_cmpeq_epu32_mask(static_cast<__mmask16>(second), bytes, zero)) return -1;
    const __m512i before = _mm512_and_si512(_mm512_alignr_epi32(bytes, zero, 15), low);
    const __m512i both = _mm512_or_si512(_mm512_slli_epi32(bytes, 7), before);
    __m512i sums = _mm512_mask_mov_epi32(bytes, static_cast<__mmask16>(second), both);
    sums = _mm512_add_epi32(sums, _mm512_set1_epi32(1));
    sums = _mm512_maskz_compress_epi32(static_cast<__mmask16>(ends), sums);
    sums = _mm512_add_epi32(sums, _mm512_alignr_epi32(sums, zero, 15));
    sums = _mm512_add_epi32(sums, _mm512_alignr_epi32(sums, zero, 14));
    sums = _mm512_add_epi32(sums, _mm512_alignr_epi32(sums, zero, 12));
    sums = _mm512_add_epi32(sums, _mm512_alignr_epi32(sums, zero, 8));
    const __m256i upper = _mm512_extracti64x4_epi64(sums, 1);
    const __m512i from = _mm512_set1_epi64(*place);
    _mm512_storeu_si512(places, _mm512_add_epi64(from, _mm512_cvtepi32_epi64(_mm512_castsi512_si256(sums))));
    _mm512_storeu_si512(places + 8, _mm512_add_epi64(from, _mm512_cvtepi32_epi64(upper)));
    *place += _mm256_extract_epi32(upper, 7);
    *at += 16 - (more >> 15);
    return __builtin_popcount(ends);
}

}  // namespace
#endif

// Returns 0 unless the data is `items` rising indices under `size` in their shortest form; the oracle then raises why.
TW_EXPORT int32_t TW(delta_read)(const uint8_t* data, int64_t length, int64_t items, int64_t size, int64_t* places) {
    const uint8_t *at = data, *end = data + length;
    int64_t place = -1;
    for (int64_t i = 0; i < items; ++i) {
        int64_t gap = 0;
#ifdef __AVX512F__
        for (int64_t read = 1; read && i + 16 < items && end - at >= 16; i += read)
            if ((read = read_sixteen(&at, &place, places + i)) < 0) return 0;
#endif
        for (int shift = 0;; shift += 7) {
            if (at == end || shift > 21) return 0;
            const uint8_t byte = *at++;
            gap |= static_cast<int64_t>(byte & 0x7F) << shift;
            if (byte >= 0x80) continue;
            if (byte == 0 && shift) return 0;
            break;
        }
        places[i] = place += gap + 1;
    }
    return at == end && place < size;
}
