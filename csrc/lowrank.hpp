// Adds the product of two thin factors to a vector; thinwire/compression/codecs/powersgd.py defines the order of the terms.
#pragma once

namespace {

constexpr int64_t TILE = 256, ROWS = 16;  // a tile of `right` stays in the first-level cache for ROWS rows

// sums (+)= TERMS products, one after the other, each rounded.
template <int TERMS, bool FIRST>
inline void add_terms(const float* p, const float* q, int64_t cols, int64_t here, float* sums) {
    float left[TERMS];
    for (int k = 0; k < TERMS; ++k) left[k] = p[k];
    for (int64_t j = 0; j < here; ++j) {
        float sum = FIRST ? left[0] * q[j] : sums[j] + left[0] * q[j];
        for (int k = 1; k < TERMS; ++k) sum += left[k] * q[k * cols + j];
        sums[j] = sum;
    }
}

// Computes a part of one row; `q` points to the columns of `right` there.
inline void add_row(
    const float* p, const float* q, int64_t cols, int32_t rank, int64_t here, float factor, int32_t adds, float* to) {
    float sums[TILE];
    int32_t k = rank < 4 ? 1 : 4;
    if (k == 4)
        add_terms<4, true>(p, q, cols, here, sums);
    else
        add_terms<1, true>(p, q, cols, here, sums);
    for (; k + 4 <= rank; k += 4) add_terms<4, false>(p + k, q + k * cols, cols, here, sums);
    for (; k < rank; ++k) add_terms<1, false>(p + k, q + k * cols, cols, here, sums);
    if (adds)
        for (int64_t j = 0; j < here; ++j) to[j] += sums[j] * factor;
    else
        for (int64_t j = 0; j < here; ++j) to[j] = sums[j] * factor;
}

}  // namespace

// into[0 ..] (+)= factor * (left right)[start .. stop] of a matrix of `cols` columns, row after row. `right` has a row
// for each of left's columns.
TW_EXPORT void TW(lowrank_add)(
    const float* left, const float* right, int64_t cols, int32_t rank, int64_t start, int64_t stop, float factor,
    int32_t adds, float* into) {
    for (int64_t first = start / cols; first * cols < stop; first += ROWS)
        for (int64_t col = 0; col < cols; col += TILE)
            for (int64_t row = first; row < first + ROWS; ++row) {
                const int64_t from = row * cols + col, to = row * cols + at_most(col + TILE, cols);
                const int64_t a = from < start ? start : from, b = at_most(to, stop);
                if (a < b)
                    add_row(
                        left + row * rank, right + (a - row * cols), cols, rank, b - a, factor, adds,
                        into + (a - start));
            }
}
