// Rounds vectors to the integers of secure aggregation and adds them back; thinwire/aggregation/lattice.py defines the
// bits. A window is a part of the vector's coordinates in the order of its blocks.
#pragma once

namespace {

struct Window {
    const uint32_t* order;  // numbers of the vector's blocks, or null: the window is the vector itself
    int64_t block, count;   // coordinates of a block and of the window; the vector's last block may be shorter

    // Calls work(at, from, items) for window positions at .. at + items, which are consecutive in the vector.
    template <class Work>
    void each(int64_t first, int64_t last, Work work) const {
        last = at_most(last, count);
        for (int64_t at = first, items; at < last; at += items) {
            const int64_t within_block = order ? at % block : 0;
            items = at_most(order ? block - within_block : last - at, last - at);
            work(at, order ? static_cast<int64_t>(order[at / block]) * block + within_block : at, items);
        }
    }

    // Prefetches the block that is a chunk after this position: blocks of a walk are in no order that a processor knows.
    void ask_after(const float* values, int64_t at) const {
        if (!order || at + CHUNK >= count) return;
        const float* next = values + static_cast<int64_t>(order[(at + CHUNK) / block]) * block;
        for (int64_t i = 0; i < block; i += 16) __builtin_prefetch(next + i);
    }

    // Writes the coordinates first .. first + size times both factors, and zeros for positions after the last one.
    void read(const float* values, int64_t first, int64_t size, float near, float factor, float* to) const {
        each(first, first + size, [=](int64_t at, int64_t from, int64_t items) {
            ask_after(values, at);
            for (int64_t i = 0; i < items; ++i) to[at - first + i] = values[from + i] * near * factor;
        });
        for (int64_t i = first < count ? count - first : 0; i < size; ++i) to[i] = 0;
    }
};

// A place is rounded up with the probability of its fraction: a draw is the middle of one of 2^16 equal parts of [0, 1).
template <class Lane>
inline void round_places(const float* places, int64_t size, int32_t most, const uint16_t* draws, Lane* lanes) {
    for (int64_t i = 0; i < size; ++i) {
        const int32_t below = whole_below(places[i]);
        const float share = places[i] - static_cast<float>(below);
        const float draw = (static_cast<float>(static_cast<int32_t>(draws[i])) + 0.5f) * 0x1p-16f;
        int32_t symbol = below + (draw < share);
        symbol = symbol > most ? most : symbol;
        lanes[i] = static_cast<Lane>(symbol < -most ? -most : symbol);
    }
}

// Writes integers as floats, and returns the largest magnitude. A lane's lowest `width` bits are two's complement.
template <class Lane>
inline uint32_t centered(const Lane* lanes, int64_t size, int32_t width, float* to) {
    const int32_t unused = 32 - width;
    uint32_t largest = 0;
    for (int64_t i = 0; i < size; ++i) {
        const int32_t symbol = static_cast<int32_t>(static_cast<uint32_t>(lanes[i]) << unused) >> unused;
        const uint32_t magnitude = symbol < 0 ? 0u - static_cast<uint32_t>(symbol) : static_cast<uint32_t>(symbol);
        largest = magnitude > largest ? magnitude : largest;
        to[i] = static_cast<float>(symbol);
    }
    return largest;
}

inline uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

}  // namespace

// Writes the sum of squares of each bucket of a window.
TW_EXPORT void TW(lattice_squares)(
    const float* values, const uint32_t* order, int64_t block, int64_t count, double* sums) {
    const Window window = {order, block, count};
    float bucket[BUCKET];
    for (int64_t at = 0; at < count; at += BUCKET) {
        window.read(values, at, BUCKET, 1.0f, 1.0f, bucket);
        sums[at / BUCKET] = sum_of_squares(bucket, at_most(BUCKET, count - at));
    }
}

// Rounds the window's positions start .. stop, one rotated block if `rotate`, at most 2^16 otherwise. The places are the
// coordinates times near * factor, rotated. Returns the bits of the largest place.
TW_EXPORT uint32_t TW(lattice_round)(
    const float* values, const uint32_t* order, int64_t block, int64_t count, int64_t start, int64_t stop, float near,
    float factor, int32_t rotate, uint32_t word, int32_t most, const uint16_t* draws, float* room, int32_t lane_bytes,
    uint8_t* lanes) {
    const Window window = {order, block, count};
    const int64_t size = stop - start;
    float* places = lined(room);
    uint32_t largest = 0;
    Words products[RADIX];
    const Signs signs(static_cast<uint32_t>(start), word);
    if (rotate)
        for (int r = 0; r < RADIX; ++r) products[r] = signs.below(static_cast<uint32_t>(r * WIDE), GROUP);
    const auto round = [&](const float* chunk, int64_t at, int64_t here) {
        largest = larger(largest, largest_bits(chunk, here));
        if (lane_bytes == 2)
            round_places(chunk, here, most, draws + at, reinterpret_cast<uint16_t*>(lanes) + at);
        else
            round_places(chunk, here, most, draws + at, reinterpret_cast<uint32_t*>(lanes) + at);
    };
    for (int64_t at = 0; at < size; at += CHUNK) {
        const int64_t here = at_most(CHUNK, size - at);
        float* chunk = rotate ? places + at / CHUNK * PITCH : places;
        window.read(values, start + at, here, near, factor, chunk);
        const auto value = [&](int64_t i, int r) {
            const Words product = products[r] + signs.above(static_cast<uint32_t>(at + i), GROUP);
            return within(Signs::on(loaded(chunk + i + r * WIDE), product));
        };
        if (!rotate)
            round(chunk, at, here);
        else if (here == CHUNK)
            turn_chunk(chunk, value);
        else
            turn_small(chunk, here, value);
    }
    if (!rotate) return largest;
    turn_chunks(places, size);
    for (int64_t at = 0; at < size; at += CHUNK) round(places + at / CHUNK * PITCH, at, at_most(CHUNK, size - at));
    return largest;
}

// Adds the integers of positions start .. stop, rotated back, times `factor`, to the window's coordinates, or replaces
// those. Returns the largest magnitude of an integer.
TW_EXPORT uint32_t TW(lattice_add)(
    const uint8_t* lanes, int32_t lane_bytes, int32_t width, const uint32_t* order, int64_t block, int64_t count,
    int64_t start, int64_t stop, int32_t rotate, uint32_t word, float factor, int32_t adds, float* room, float* into) {
    const Window window = {order, block, count};
    const int64_t size = stop - start;
    float* values = lined(room);
    uint32_t largest = 0;
    for (int64_t at = 0; at < size; at += CHUNK) {
        const int64_t here = at_most(CHUNK, size - at);
        float* chunk = values + at / CHUNK * PITCH;
        largest = larger(
            largest, lane_bytes == 2 ? centered(reinterpret_cast<const uint16_t*>(lanes) + at, here, width, chunk)
                                     : centered(reinterpret_cast<const uint32_t*>(lanes) + at, here, width, chunk));
        if (!rotate) continue;
        const auto value = [&](int64_t i, int r) { return within(loaded(chunk + i + r * WIDE)); };
        if (here == CHUNK)
            turn_chunk(chunk, value);
        else
            turn_small(chunk, here, value);
    }
    if (rotate) turn_chunks(values, size);
    const Signs signs(static_cast<uint32_t>(start), word);
    float back[CHUNK];
    for (int64_t at = 0; at < size; at += CHUNK) {
        const int64_t here = at_most(CHUNK, size - at);
        if (rotate) {
            turn_back<false>(FloatRows{values}, signs, at, at + here, 1.0f, factor, back - at);
        } else {
            const float* chunk = values + at / CHUNK * PITCH;
            for (int64_t i = 0; i < here; ++i) back[i] = chunk[i] * factor;
        }
        window.each(start + at, start + at + here, [&](int64_t position, int64_t to, int64_t items) {
            const float* from = back + (position - start - at);
            float* target = into + to;
            window.ask_after(into, position);
            if (adds)
                for (int64_t i = 0; i < items; ++i) target[i] += from[i];
            else
                for (int64_t i = 0; i < items; ++i) target[i] = from[i];
        });
    }
    return largest;
}
