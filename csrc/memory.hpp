// Encodes with error feedback: compensates, encodes and updates the memory of a bucket while it is in the first-level
// cache (`Memory` in thinwire/compression/vector_ops.py). `values` becomes the updated memory.
#pragma once

namespace {

// Prepares `values` for adding the decoded values with -sign: the compensated values stay for a residual, else `memory`
// replaces them.
inline void put_back(float* values, const float* memory, float sign, int64_t size) {
    if (sign < 0) std::memcpy(values, memory, static_cast<size_t>(size) * sizeof(float));
}

// Calls encode(at, here) and then add(at, here) for each bucket. Returns 0 if a value is not finite, before or after.
template <typename Encode, typename Add>
int32_t each_compensated(float* values, const float* memory, float sign, int64_t size, Encode encode, Add add) {
    for (int64_t at = 0; at < size; at += BUCKET) {
        const int64_t here = at_most(BUCKET, size - at);
        if (!TW(add_finite)(values + at, memory + at, here, sign) || !encode(at, here)) return 0;
        put_back(values + at, memory + at, sign, here);
        add(at, here);
        if (!TW(finite)(values + at, here)) return 0;
    }
    return 1;
}

}  // namespace

TW_EXPORT int32_t TW(levels_compensate)(
    float* values, const float* memory, float sign, int64_t size, int32_t levels, float most, int32_t nearest,
    uint32_t first, uint32_t word, int32_t bits, float* scales, uint8_t* out) {
    return each_compensated(
        values, memory, sign, size,
        [&](int64_t at, int64_t here) {
            return TW(levels_encode)(
                values + at, here, levels, most, nearest, first + static_cast<uint32_t>(at), word, bits,
                scales + at / BUCKET, out + at / 8 * bits);
        },
        [&](int64_t at, int64_t here) {
            const int64_t edges[] = {0, here};
            TW(levels_add)(out + at / 8 * bits, bits, scales + at / BUCKET, edges, 0, here, -sign, 1, values + at);
        });
}

TW_EXPORT int32_t TW(sign_compensate)(
    float* values, const float* memory, float sign, int64_t size, float* means, uint8_t* out) {
    return each_compensated(
        values, memory, sign, size,
        [&](int64_t at, int64_t here) {
            return TW(sign_encode)(values + at, here, means + at / BUCKET * 2, out + at / 8);
        },
        [&](int64_t at, int64_t here) {
            TW(sign_add)(out + at / 8, 1, means + at / BUCKET * 2, 0, here, -sign, 1, values + at);
        });
}

TW_EXPORT int32_t TW(fp16_compensate)(
    float* values, const float* memory, float sign, int64_t size, int8_t* exponents, uint8_t* halves) {
    return each_compensated(
        values, memory, sign, size,
        [&](int64_t at, int64_t here) {
            return TW(fp16_encode)(values + at, here, exponents + at / BUCKET, halves + 2 * at);
        },
        [&](int64_t at, int64_t here) {
            TW(fp16_add)(halves + 2 * at, exponents + at / BUCKET, 0, here, -sign, 1, values + at);
        });
}

TW_EXPORT int32_t TW(bf16_compensate)(float* values, const float* memory, float sign, int64_t size, uint8_t* halves) {
    return each_compensated(
        values, memory, sign, size,
        [&](int64_t at, int64_t here) { return TW(bf16_encode)(values + at, here, halves + 2 * at); },
        [&](int64_t at, int64_t here) { TW(bf16_add)(halves + 2 * at, 0, here, -sign, 1, values + at); });
}

// ternary with error feedback: buckets begin again at each tensor, and symbols may begin at any bit.
TW_EXPORT int32_t TW(ternary_compensate)(
    float* values, const float* memory, float sign, const int64_t* edges, int64_t tensors, float most, int32_t bits,
    float* scales, uint8_t* out) {
    Packer symbols(out, bits);
    for (const int64_t* edge = edges; edge < edges + tensors; ++edge)
        for (int64_t at = edge[0]; at < edge[1]; at += BUCKET) {
            const int64_t here = at_most(BUCKET, edge[1] - at);
            float* x = values + at;
            if (!TW(add_finite)(x, memory + at, here, sign)) return 0;
            const float scale = usable(float_of(largest_bits(x, here)), most);
            int8_t* found = symbols.room();
            round_to_nearest(x, here, inverse_of(scale), 1, found);
            put_back(x, memory + at, sign, here);
            for (int64_t i = 0; i < here; ++i) x[i] += static_cast<float>(found[i]) * scale * -sign;
            if (!TW(finite)(x, here)) return 0;
            symbols.wrote(here);
            *scales++ = scale;
        }
    symbols.finish();
    return 1;
}

// values += sign * memory, and the sum of each bucket's squares. Returns 0 if a value is not finite.
TW_EXPORT int32_t TW(add_squares)(float* values, const float* memory, float sign, int64_t size, double* sums) {
    for (int64_t at = 0; at < size; at += BUCKET) {
        const int64_t here = at_most(BUCKET, size - at);
        if (!TW(add_finite)(values + at, memory + at, here, sign)) return 0;
        sums[at / BUCKET] = sum_of_squares(values + at, here);
    }
    return 1;
}

// `steps_encode` with error feedback, for values that are compensated already.
TW_EXPORT int32_t TW(steps_compensate)(
    float* values, const float* memory, float sign, int64_t size, float step, int32_t bits, uint8_t* out) {
    for (int64_t at = 0; at < size; at += BUCKET) {
        const int64_t here = at_most(BUCKET, size - at), edges[] = {0, here};
        uint8_t* to = out + at / 8 * bits;
        TW(steps_encode)(values + at, here, step, bits, to);
        put_back(values + at, memory + at, sign, here);
        TW(levels_add)(to, bits, &step, edges, 0, here, -sign, 1, values + at);
        if (!TW(finite)(values + at, here)) return 0;
    }
    return 1;
}
