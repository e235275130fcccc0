// Adds the values of a sparse update at their indices.
#pragma once

TW_EXPORT void TW(sparse_add)(
    const int64_t* places, const float* values, int64_t items, float factor, int64_t shift, int32_t adds, float* into) {
    if (adds)
        for (int64_t i = 0; i < items; ++i) into[places[i] - shift] += values[i] * factor;
    else
        for (int64_t i = 0; i < items; ++i) into[places[i] - shift] = values[i] * factor;
}
