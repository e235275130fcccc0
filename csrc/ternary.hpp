// ternary (signs times one scale a tensor) and twobit (a step up, down or none);
// thinwire/compression/codecs/sign_ternary_twobit.py defines the bits.
#pragma once

// Tensor t has the values edges[t] .. edges[t + 1] and a scale for each of its buckets. With `nearest`, each bucket
// rounds to nearest on its own maximum. Returns 0 for NaN or infinity.
TW_EXPORT int32_t TW(ternary_encode)(
    const float* values, const int64_t* edges, int64_t tensors, double sigmas, float most, int32_t nearest,
    uint32_t word, int32_t bits, float* scales, uint8_t* out) {
    Packer symbols(out, bits);
    for (const int64_t* edge = edges; edge < edges + tensors; ++edge) {
        uint32_t largest = 0;
        double squares = 0;
        for (int64_t at = edge[0]; at < edge[1] && !nearest; at += BUCKET) {
            const int64_t here = at_most(BUCKET, edge[1] - at);
            const uint32_t found = largest_bits(values + at, here);
            largest = found > largest ? found : largest;
            squares += sum_of_squares(values + at, here);
        }
        const double clip = sigmas * sqrt(squares / static_cast<double>(edge[1] - edge[0]));
        const double top = static_cast<double>(float_of(largest));
        const float clipped = static_cast<float>(top < clip ? top : clip);
        for (int64_t at = edge[0]; at < edge[1]; at += BUCKET) {
            const int64_t here = at_most(BUCKET, edge[1] - at);
            if (nearest) largest = largest_bits(values + at, here);
            if (largest >= INFINITE) return 0;
            const float scale = usable(nearest ? float_of(largest) : clipped, most), inverse = inverse_of(scale);
            if (nearest)
                round_to_nearest(values + at, here, inverse, 1, symbols.room());
            else
                round_at_random(values + at, here, inverse, 1, static_cast<uint32_t>(at), word, symbols.room());
            symbols.wrote(here);
            *scales++ = scale;
        }
    }
    symbols.finish();
    return 1;
}

// Writes 1 for values of at least `step`, -1 for values of at most -step, 0 between.
TW_EXPORT void TW(steps_encode)(const float* values, int64_t size, float step, int32_t bits, uint8_t* out) {
    Packer symbols(out, bits);
    for (int64_t at = 0; at < size; at += BUCKET) {
        const int64_t here = at_most(BUCKET, size - at);
        const float* from = values + at;
        int8_t* to = symbols.room();
        const auto place = [=](int64_t i) { to[i] = static_cast<int8_t>((from[i] >= step) - (from[i] <= -step)); };
        streamed(here, place, from);
        symbols.wrote(here);
    }
    symbols.finish();
}
