// Gaps between places as varints: see aggregation/coders/delta.py.
#pragma once

// Returns how many bytes were written; `out` has room for four a place.
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

// 0: these are no `items` rising places under `size` in their shortest form; the oracle says why not.
TW_EXPORT int32_t TW(delta_read)(const uint8_t* data, int64_t length, int64_t items, int64_t size, int64_t* places) {
    const uint8_t *at = data, *end = data + length;
    int64_t place = -1;
    for (int64_t i = 0; i < items; ++i) {
        int64_t gap = 0;
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
