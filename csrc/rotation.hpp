// The rotation of thinwire/compression/rotation.py: random signs, then butterflies of distance 1, 2, 4, .. in that
// order. Grouping butterflies changes no bit: each is one addition and one subtraction of the same two values.
#pragma once

namespace {

#if defined(__AVX512F__)
constexpr int WIDE = 16, RADIX = 16;  // lanes of a row; rows in registers at once
#elif defined(__AVX2__)
constexpr int WIDE = 8, RADIX = 8;
#elif defined(__ARM_NEON)
constexpr int WIDE = 4, RADIX = 16;
#else
constexpr int WIDE = 1, RADIX = 8;
#endif

constexpr int64_t LARGEST_BLOCK = 1 << 16, SMALLEST_BLOCK = 1 << 6;
constexpr int64_t CHUNK = BUCKET;  // 16 KiB: butterflies up to here stay in the first-level cache
constexpr int64_t PITCH = CHUNK + 16;  // distance of chunks, so that they do not share cache lines
constexpr int64_t GROUP = WIDE * RADIX;
constexpr uint32_t SIGN = 0x80000000u;

#if defined(__AVX512F__) || defined(__AVX2__) || defined(__ARM_NEON)
typedef float Floats __attribute__((vector_size(WIDE * 4)));
typedef uint32_t Words __attribute__((vector_size(WIDE * 4)));
#else
typedef float Floats;
typedef uint32_t Words;
#endif

template <class To, class From>
inline To as(From from) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

inline Floats loaded(const float* from) {
    Floats row;
    std::memcpy(&row, from, sizeof row);
    return row;
}

inline void stored(float* to, Floats row) { std::memcpy(to, &row, sizeof row); }

inline Words counted(uint32_t first) {
    uint32_t each[WIDE];
    for (int i = 0; i < WIDE; ++i) each[i] = first + static_cast<uint32_t>(i);
    Words words;
    std::memcpy(&words, each, sizeof words);
    return words;
}

// The signs of one block: the highest bits of lowbias32(index ^ word), which the hash's last step does not change. An
// index is first ^ i with the same upper half in the whole block, so the hash's first step is an xor with a constant
// (`key_`). The product of disjoint bits is the sum of their products, so most indices need only an addition.
class Signs {
  public:
    Signs(uint32_t first, uint32_t word) : key_((first ^ word) ^ (first ^ word) >> 16) {}

    // The hash's first products for the bits of i below a power of two, and for those from it on.
    Words below(uint32_t i, uint32_t power) const { return ((counted(i) ^ key_) & (power - 1)) * 0x7FEB352Du; }
    uint32_t above(uint32_t i, uint32_t power) const { return ((i ^ key_) & ~(power - 1)) * 0x7FEB352Du; }

    uint32_t of(uint32_t i) const {
        const uint32_t product = (i ^ key_) * 0x7FEB352Du;
        return ((product ^ product >> 15) * 0x846CA68Bu) & SIGN;
    }

    // The row with the signs of the hash of both parts.
    static Floats on(Floats row, Words product) {
        product = (product ^ product >> 15) * 0x846CA68Bu;
#ifdef __AVX512F__
        return as<Floats>(_mm512_ternarylogic_epi32(
            as<__m512i>(row), as<__m512i>(product), _mm512_set1_epi32(static_cast<int>(SIGN)), 0x78));
#else
        return as<Floats>(as<Words>(row) ^ (product & SIGN));
#endif
    }

  private:
    const uint32_t key_;
};

template <class Row>
inline Row difference(Row a, Row b) {
    return a - b;
}

#ifdef __AVX512F__
// a - b as a fused step, which is exact for a factor of 1: on processors with separate fused units both kinds of units
// share the work.
inline Floats difference(Floats a, Floats b) { return _mm512_fnmadd_ps(b, _mm512_set1_ps(1.0f), a); }
#endif

// Butterflies between rows.
template <int ROWS, int H = 1, class Row>
inline void across(Row* row) {
    if constexpr (H < ROWS) {
#pragma GCC unroll 16
        for (int i = 0; i < ROWS / 2; ++i) {
            const int low = i / H * 2 * H + i % H;
            const Row a = row[low], b = row[low + H];
            row[low] = a + b;
            row[low + H] = difference(a, b);
        }
        across<ROWS, 2 * H>(row);
    }
}

// Butterflies between the lanes of a row: lanes i and i ^ H are swapped, then one is added and one subtracted.
template <int H>
inline Floats exchanged(Floats row) {
#if defined(__AVX512F__)
    if constexpr (H == 1) return _mm512_permute_ps(row, 0xB1);
    if constexpr (H == 2) return _mm512_permute_ps(row, 0x4E);
    if constexpr (H == 4) return _mm512_shuffle_f32x4(row, row, 0xB1);
    if constexpr (H == 8) return _mm512_shuffle_f32x4(row, row, 0x4E);
#elif defined(__AVX2__)
    if constexpr (H == 1) return _mm256_permute_ps(row, 0xB1);
    if constexpr (H == 2) return _mm256_permute_ps(row, 0x4E);
    if constexpr (H == 4) return _mm256_permute2f128_ps(row, row, 1);
#elif defined(__ARM_NEON)
    if constexpr (H == 1) return vrev64q_f32(row);
    if constexpr (H == 2) return vextq_f32(row, row, 2);
#endif
    return row;
}

template <int H = 1>
inline Floats within(Floats row) {
    if constexpr (H < WIDE) {
        uint32_t upper[WIDE];
        for (int i = 0; i < WIDE; ++i) upper[i] = i & H ? SIGN : 0;
        Words signs;
        std::memcpy(&signs, upper, sizeof signs);
#if defined(__AVX512F__)
        // Multiplying by 1 or -1 is exact, so the fused step rounds once, as an addition does.
        row = _mm512_fmadd_ps(row, as<Floats>(signs | bits_of(1.0f)), exchanged<H>(row));
#else
        row = exchanged<H>(row) + as<Floats>(as<Words>(row) ^ signs);
#endif
        return within<2 * H>(row);
    }
    return row;
}

// Butterflies of ROWS rows that are `distance` apart.
template <class Row, int ROWS, class Item>
inline void rows(Item* items, int64_t size, int64_t distance) {
    constexpr int64_t LANES_OF_ROW = sizeof(Row) / sizeof(Item);
    for (int64_t from = 0; from < size; from += ROWS * distance)
        for (int64_t i = from; i < from + distance; i += LANES_OF_ROW) {
            Row row[ROWS];
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r) std::memcpy(&row[r], items + i + r * distance, sizeof row[r]);
            across<ROWS>(row);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r) std::memcpy(items + i + r * distance, &row[r], sizeof row[r]);
        }
}

// Butterflies of the distances from `distance` to size / 2, MOST rows in registers at once.
template <class Row, int MOST, class Item>
inline void rows_from(Item* items, int64_t size, int64_t distance) {
    for (; distance * MOST <= size; distance *= MOST) rows<Row, MOST>(items, size, distance);
    if (distance * 8 == size) rows<Row, 8>(items, size, distance);
    if (distance * 4 == size) rows<Row, 4>(items, size, distance);
    if (distance * 2 == size) rows<Row, 2>(items, size, distance);
}

// All butterflies inside a chunk. at(i, r) returns the r-th row after i, with the butterflies between its lanes done.
template <class At>
inline void turn_chunk(float* chunk, At at) {
    for (int64_t i = 0; i < CHUNK; i += GROUP) {
        Floats row[RADIX];
#pragma GCC unroll 16
        for (int r = 0; r < RADIX; ++r) row[r] = at(i, r);
        across<RADIX>(row);
#pragma GCC unroll 16
        for (int r = 0; r < RADIX; ++r) stored(chunk + i + r * WIDE, row[r]);
    }
    rows_from<Floats, RADIX>(chunk, CHUNK, GROUP);
}

// All butterflies of a block that is smaller than a chunk; a vector has at most one of each size.
template <class At>
inline void turn_small(float* block, int64_t size, At at) {
    for (int64_t i = 0; i < size; i += WIDE)
        stored(block + i, at(i / GROUP * GROUP, static_cast<int>(i % GROUP / WIDE)));
    for (int64_t h = WIDE; h < size; h *= 2)
        for (int64_t from = 0; from < size; from += 2 * h)
            for (int64_t i = from; i < from + h; i += WIDE) {
                const Floats a = loaded(block + i), b = loaded(block + i + h);
                stored(block + i, a + b);
                stored(block + i + h, a - b);
            }
}

// The butterflies between the chunks of a block. use(r, i, row) receives the final rows of chunk r in rising order
// of i.
template <int CHUNKS, class Use>
inline void between(const float* block, int64_t size, Use use) {
    for (int64_t i = 0; i < size; i += WIDE) {
        Floats row[CHUNKS];
#pragma GCC unroll 16
        for (int r = 0; r < CHUNKS; ++r) row[r] = loaded(block + r * PITCH + i);
        across<CHUNKS>(row);
#pragma GCC unroll 16
        for (int r = 0; r < CHUNKS; ++r) use(r, i, row[r]);
    }
}

// The butterflies between the chunks of a block, in place.
template <int CHUNKS>
inline void between_in_place(float* block) {
    between<CHUNKS>(block, CHUNK, [&](int r, int64_t i, Floats row) { stored(block + r * PITCH + i, row); });
}

inline void turn_chunks(float* block, int64_t size) {
    switch (size / CHUNK) {
        case 16: return between_in_place<16>(block);
        case 8: return between_in_place<8>(block);
        case 4: return between_in_place<4>(block);
        case 2: return between_in_place<2>(block);
    }
}

// Returns the size of the next block: the largest power of two in the rest, at most 2^16, or 0 if the rest is the tail.
inline int64_t block_in(int64_t left) {
    if (left < SMALLEST_BLOCK) return 0;
    int64_t block = SMALLEST_BLOCK;
    while (block < LARGEST_BLOCK && 2 * block <= left) block *= 2;
    return block;
}

}  // namespace
