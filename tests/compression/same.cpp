// Prints a check sum of what each kernel gives, on the path that it is compiled for: all paths print the same lines.
#include "path.cpp"

#include <cstdio>
#include <vector>

namespace {

using Bytes = std::vector<uint8_t>;

uint32_t sum_of(const void* data, size_t size) {  // FNV-1a
    uint32_t sum = 2166136261u;
    for (size_t i = 0; i < size; ++i) sum = (sum ^ static_cast<const uint8_t*>(data)[i]) * 16777619u;
    return sum;
}

template <typename T>
void show(const char* name, int64_t size, const std::vector<T>& out) {
    std::printf("%s %lld %08x\n", name, static_cast<long long>(size), sum_of(out.data(), out.size() * sizeof(T)));
}

// Values of many magnitudes, zeros of both signs, denormals, ties and whole buckets of nothing.
std::vector<float> values_of(int64_t size) {
    std::vector<float> values(static_cast<size_t>(size));
    for (int64_t i = 0; i < size; ++i) {
        const uint32_t drawn = lowbias32(static_cast<uint32_t>(i) + 1);
        const float whole = static_cast<float>(static_cast<int32_t>(drawn >> 8) - (1 << 23)) * 0x1p-23f;
        float value = i % 3 ? whole : whole * float_of((drawn % 60 + 90) << 23);
        if (i % 97 == 5) value = i % 2 ? 0.0f : -0.0f;
        if (i % 101 == 7) value = float_of(drawn & 0x807FFFFFu);
        if (i % 89 == 3) value = static_cast<float>(drawn % 9) * 0.5f - 2.0f;
        values[static_cast<size_t>(i)] = i / BUCKET == 2 ? 0.0f : value;
    }
    return values;
}

// What each kernel inside a residual leaves in the values, and what it sends.
void held_of_size(int64_t size) {
    const std::vector<float> values = values_of(size), rest(values.rbegin(), values.rend());
    const size_t n = static_cast<size_t>(size), buckets = static_cast<size_t>((size + BUCKET - 1) / BUCKET);
    const int64_t edges[] = {0, size / 7, size / 7 + size / 2, size};
    const float* memory = rest.data();
    const auto fed = [&](const char* name, size_t sent, auto encode) {
        for (const float sign : {1.0f, -1.0f}) {
            std::vector<float> x = values;
            Bytes out(sent), scales(8 * buckets + 256);
            std::printf("%s %d\n", name, encode(x.data(), sign, scales.data(), out.data()));
            show(name, size, x);
            show("its scales", size, scales);
            show("its symbols", size, out);
        }
    };
    const auto floats = [](uint8_t* scales) { return reinterpret_cast<float*>(scales); };

    for (const int32_t bits : {2, 5, 8})
        fed("levels_compensate", (n * static_cast<size_t>(bits) + 7) / 8, [&](float* x, float sign, uint8_t* s, uint8_t* q) {
            const int32_t levels = (1 << (bits - 1)) - 1;
            return TW(levels_compensate)(x, memory, sign, size, levels, 0x1p100f, 1, 8, 0x12345678u, bits, floats(s), q);
        });
    fed("sign_compensate", (n + 7) / 8, [&](float* x, float sign, uint8_t* s, uint8_t* q) {
        return TW(sign_compensate)(x, memory, sign, size, floats(s), q);
    });
    fed("fp16_compensate", 2 * n, [&](float* x, float sign, uint8_t* s, uint8_t* q) {
        return TW(fp16_compensate)(x, memory, sign, size, reinterpret_cast<int8_t*>(s), q);
    });
    fed("bf16_compensate", 2 * n, [&](float* x, float sign, uint8_t*, uint8_t* q) {
        return TW(bf16_compensate)(x, memory, sign, size, q);
    });
    fed("ternary_compensate", (n + 3) / 4, [&](float* x, float sign, uint8_t* s, uint8_t* q) {
        return TW(ternary_compensate)(x, memory, sign, edges, 3, 0x1p127f, 2, floats(s), q);
    });
    fed("add_squares", 0, [&](float* x, float sign, uint8_t* s, uint8_t*) {
        return TW(add_squares)(x, memory, sign, size, reinterpret_cast<double*>(s));
    });
    fed("steps_compensate", (n + 3) / 4, [&](float* x, float sign, uint8_t*, uint8_t* q) {
        return TW(steps_compensate)(x, memory, sign, size, 0.25f, 2, q);
    });
    const float table[] = {0.45f, 1.5f, 0.975f};  // levels, then the border between them
    std::vector<float> room(static_cast<size_t>(TW(eden_room)()));
    fed("eden_compensate", (n + 3) / 4, [&](float* x, float sign, uint8_t* s, uint8_t* q) {
        return TW(eden_compensate)(x, memory, sign, size, 0, 5, 2, 2, table, 1.25, 0x1p100f, room.data(), s, q);
    });
}

// Lattice points of a window: the even blocks of 64 coordinates, from the last to the first, or the vector itself.
void lattice(const std::vector<float>& values, const std::vector<float>& into) {
    const int64_t size = static_cast<int64_t>(values.size());
    std::vector<uint32_t> even;
    for (int64_t at = size / 64 - 1; at >= 0; --at)
        if (at % 2 == 0) even.push_back(static_cast<uint32_t>(at));
    std::vector<uint16_t> draws(LARGEST_BLOCK);
    for (size_t i = 0; i < draws.size(); ++i) draws[i] = static_cast<uint16_t>(lowbias32(static_cast<uint32_t>(i)));
    std::vector<float> room(static_cast<size_t>(TW(eden_room)()));
    int exponent = 0;
    (void)frexp(static_cast<double>(float_of(largest_bits(values.data(), size))), &exponent);
    const float near = static_cast<float>(ldexp(1, static_cast<int>(at_most(-exponent, 126))));  // integers hold the places
    for (const bool walks : {false, true}) {
        const int64_t count = walks ? 64 * static_cast<int64_t>(even.size()) : size;
        const uint32_t* order = walks ? even.data() : nullptr;
        std::vector<double> sums(static_cast<size_t>((count + BUCKET - 1) / BUCKET));
        TW(lattice_squares)(values.data(), order, 64, count, sums.data());
        show("lattice_squares", size, sums);
        for (const int32_t bytes : {2, 4})
            for (const bool rotate : {false, true}) {
                std::vector<float> to = into;
                const int64_t padded = rotate ? (count + 63) / 64 * 64 : count;
                for (int64_t start = 0, stop; start < padded; start = stop) {
                    stop = start + (rotate ? block_in(padded - start) : at_most(LARGEST_BLOCK, padded - start));
                    Bytes lanes(static_cast<size_t>((stop - start) * bytes));
                    const uint32_t largest = TW(lattice_round)(
                        values.data(), order, 64, count, start, stop, near, 100.0f, rotate, 5, 127, draws.data(),
                        room.data(), bytes, lanes.data());
                    std::printf("lattice_round %08x\n", largest);
                    show("its lanes", size, lanes);
                    const uint32_t most = TW(lattice_add)(
                        lanes.data(), bytes, 12, order, 64, count, start, stop, rotate, 5, -0.3f, walks, room.data(),
                        to.data());
                    std::printf("lattice_add %u\n", most);
                }
                show("lattice_add", size, to);
            }
    }
}

void of_size(int64_t size) {
    const std::vector<float> values = values_of(size);
    const float* x = values.data();
    const size_t n = static_cast<size_t>(size), buckets = static_cast<size_t>((size + BUCKET - 1) / BUCKET);
    const int64_t start = size / 3, stop = size - size / 5;
    const int64_t edges[] = {0, size / 7, size / 7 + size / 2, size};
    std::vector<float> into(values.rbegin(), values.rend());
    const auto added = [&](const char* name, auto add) {
        for (int adds = 0; adds < 2; ++adds) {
            std::vector<float> to = into;
            add(adds, to.data() + start);
            show(name, size, to);
        }
    };

    std::vector<float> sum = into;
    std::printf("add_finite %d\n", TW(add_finite)(sum.data(), x, size, -1.0f));
    show("its sums", size, sum);
    std::printf("finite %d\n", TW(finite)(x, size));
    std::vector<double> sums(buckets);
    for (int squares = 0; squares < 2; ++squares) {
        TW(bucket_sums)(x, size, squares, sums.data());
        show("bucket_sums", size, sums);
    }
    std::vector<float> maxima(buckets);
    TW(maxima)(x, size, maxima.data());
    show("maxima", size, maxima);

    for (int32_t bits = 2; bits <= 8; ++bits) {
        const int32_t levels = (1 << (bits - 1)) - 1;
        for (int nearest = 0; nearest < 2; ++nearest) {
            Bytes out((n * static_cast<size_t>(bits) + 7) / 8);
            std::vector<float> scales(buckets);
            TW(levels_encode)(x, size, levels, 0x1p100f, nearest, 8, 0x12345678u, bits, scales.data(), out.data());
            show("levels_encode", size, out);
            show("its scales", size, scales);
            TW(levels_round)(x, size, maxima.data(), levels, nearest, 8, 0x12345678u, bits, out.data());
            show("levels_round", size, out);
            const int64_t whole[] = {0, size};
            added("levels_add", [&](int adds, float* to) {
                TW(levels_add)(out.data(), bits, scales.data(), whole, start, stop, 0.3f, adds, to);
            });
            if (bits == 8) continue;
            std::vector<int8_t> symbols(n);
            TW(unpack)(out.data(), size, bits, symbols.data());
            show("unpack", size, symbols);
            std::printf("least %d\n", TW(least)(out.data(), size, bits));
            Bytes again(out.size());
            TW(pack)(symbols.data(), size, bits, again.data());
            show("pack", size, again);
        }
    }
    for (int nearest = 0; nearest < 2; ++nearest) {
        Bytes out((n + 3) / 4);
        std::vector<float> scales(buckets + 3);
        TW(ternary_encode)(x, edges, 3, 2.5, 0x1p127f, nearest, 99, 2, scales.data(), out.data());
        show("ternary_encode", size, out);
        show("its scales", size, scales);
        added("levels_add", [&](int adds, float* to) {
            TW(levels_add)(out.data(), 2, scales.data(), edges, start, stop, 0.3f, adds, to);
        });
    }
    Bytes steps((n + 3) / 4), signs((n + 7) / 8), halves(2 * n);
    TW(steps_encode)(x, size, 0.25f, 2, steps.data());
    show("steps_encode", size, steps);
    std::vector<float> means(2 * buckets);
    TW(sign_encode)(x, size, means.data(), signs.data());
    show("sign_encode", size, signs);
    show("its means", size, means);
    added("sign_add", [&](int adds, float* to) {
        TW(sign_add)(signs.data(), 1, means.data(), start, stop, 0.3f, adds, to);
    });
    std::vector<int8_t> exponents(buckets);
    TW(fp16_encode)(x, size, exponents.data(), halves.data());
    show("fp16_encode", size, halves);
    show("its exponents", size, exponents);
    added("fp16_add", [&](int adds, float* to) {
        TW(fp16_add)(halves.data(), exponents.data(), start, stop, 0.3f, adds, to);
    });
    std::printf("halves_finite %d\n", TW(halves_finite)(halves.data(), size, 0x7C00));
    TW(bf16_encode)(x, size, halves.data());
    show("bf16_encode", size, halves);
    added("bf16_add", [&](int adds, float* to) { TW(bf16_add)(halves.data(), start, stop, 0.3f, adds, to); });
    std::vector<int8_t> symbols(n);
    TW(natural_encode)(x, size, 8, 77, exponents.data(), symbols.data());
    show("natural_encode", size, symbols);
    added("natural_add", [&](int adds, float* to) {
        TW(natural_add)(symbols.data(), exponents.data(), start, stop, 0.3f, adds, to);
    });

    if (size >= 64)
        added("lowrank_add", [&](int adds, float* to) {
            TW(lowrank_add)(x, values.data() + size / 2, size / 9, 3, start, stop, 0.3f, adds, to);
        });

    const float levels[] = {0.125f, 0.5f, 0.75f, 1.0f, 1.5f, 2.0f, 2.5f, 3.0f};
    std::vector<float> room(static_cast<size_t>(TW(eden_room)()));
    for (int32_t width = 1; width <= 4; ++width) {
        const int count = 1 << (width - 1);
        float table[15];
        for (int i = 0; i < count; ++i) table[i] = levels[i];
        for (int i = 0; i + 1 < count; ++i) table[count + i] = (levels[i] + levels[i + 1]) * 0.5f;
        Bytes out((n * static_cast<size_t>(width) + 7) / 8), scales(4 * (buckets + 64));
        TW(eden_encode)(x, size, 0, 5, width, width, table, 1.25, 0x1p100f, room.data(), scales.data(), out.data());
        show("eden_encode", size, out);
        show("its scales", size, scales);
        added("eden_add", [&](int adds, float* to) {
            const uint8_t *q = out.data(), *s = scales.data();
            TW(eden_add)(q, width, s, size, start, stop, 5, width, table, 0.3f, adds, room.data(), to);
        });
    }
    // Few values are sent, then nearly all: 16-bit integers, then floats.
    for (const float border : {2.5f, 0.01f}) {
        const float table[] = {0.0f, 1.0f, border};
        std::vector<int8_t> every(n);
        Bytes scales(4 * (buckets + 64));
        uint8_t* const to = reinterpret_cast<uint8_t*>(every.data());
        TW(eden_encode)(x, size, 0, 5, 2, 8, table, 1.0, 0x1p100f, room.data(), scales.data(), to);
        show("sparse eden_encode", size, every);
        std::vector<int64_t> places;
        std::vector<int8_t> sent;
        for (size_t i = 0; i < n; ++i)
            if (every[i]) places.push_back(static_cast<int64_t>(i)), sent.push_back(every[i]);
        const int64_t count = static_cast<int64_t>(places.size());
        std::vector<int64_t> found(n + 4);
        std::vector<int8_t> symbols(n + 4);
        const int64_t had = TW(eden_sparse_encode)(
            x, size, 0, 5, border, 1.0, 0x1p100f, room.data(), size, scales.data(), found.data(), symbols.data());
        found.resize(static_cast<size_t>(had));
        symbols.resize(static_cast<size_t>(had));
        std::printf("eden_sparse_encode %d\n", found == places && symbols == sent);
        show("its scales", size, scales);
        added("eden_sparse_add", [&](int adds, float* into) {
            TW(eden_sparse_add)(
                places.data(), sent.data(), count, scales.data(), size, start, stop, 5, 0.3f, adds, room.data(), into);
        });
    }
    Bytes stream(8 * n);
    for (size_t i = 0; i < stream.size(); ++i) stream[i] = static_cast<uint8_t>(lowbias32(static_cast<uint32_t>(i)));
    for (int32_t bytes = 2; bytes <= 8; bytes *= 2)
        for (int32_t subtracts = 0; subtracts < 2; ++subtracts) {
            std::vector<uint64_t> lanes(n, 0x0123456789ABCDEFu);
            TW(lanes_add)(lanes.data(), stream.data(), size, bytes, subtracts);
            show("lanes_add", size, lanes);
        }
    for (int32_t width = 1; width < 32; ++width) {
        if (width == 16) continue;
        const int32_t bytes = width < 16 ? 2 : 4;
        Bytes out((n * static_cast<size_t>(width) + 7) / 8);
        TW(lanes_pack)(stream.data(), size, bytes, width, out.data());
        show("lanes_pack", size, out);
        std::vector<uint32_t> lanes(n, 0x89ABCDEFu);
        const int64_t packed = static_cast<int64_t>(out.size());
        TW(lanes_add_packed)(out.data(), packed, width, start, stop - start, bytes, lanes.data());
        show("lanes_add_packed", size, lanes);
    }
    lattice(values, into);
    // Thresholds of about equal distances, and many near 2^63, as in a tail; the first word equals one.
    std::vector<uint64_t> thresholds, words(n);
    std::memcpy(words.data(), stream.data(), stream.size());
    for (uint64_t k = 1; k < 40; ++k) thresholds.push_back((k << 57) + k);
    for (uint64_t k = 40; k > 0; --k) thresholds.push_back((uint64_t{1} << 63) - (k << 50));
    thresholds.push_back(uint64_t{1} << 63);
    std::vector<uint32_t> guide;
    for (uint64_t part = 0, at = 0; part <= 16; ++part) {
        while (thresholds[at] < part << 59) ++at;
        guide.push_back(static_cast<uint32_t>(at));
    }
    for (const bool equal : {false, true}) {
        std::vector<int32_t> drawn(n);
        if (equal) words[n / 2] = 2 * thresholds[7];
        const int64_t count = TW(sampler_draw)(words.data(), size, thresholds.data(), guide.data(), 4, drawn.data());
        std::printf("sampler_draw %lld\n", static_cast<long long>(count));
        show("its draws", size, drawn);
    }
    std::vector<int32_t> places(n);
    std::vector<uint32_t> found(n);
    const int64_t reached = TW(reaching)(x, size, bits_of(0.5f), 0, size, places.data(), found.data());
    std::vector<float> to = into;
    const std::vector<int64_t> sent(places.begin(), places.end());
    TW(sparse_add)(sent.data(), x, reached, 0.3f, 0, 1, to.data());
    show("sparse_add", size, to);
    places.resize(static_cast<size_t>(reached));
    show("reaching", size, places);
}

// The streams of some golden files: of the vector of tests/support/codec_examples.py, fixed_vector().
void golden() {
    const int64_t size = 4200, buckets = 2;
    std::vector<float> x(size);
    for (int64_t i = 0; i < size; ++i) {
        const uint32_t drawn = lowbias32(static_cast<uint32_t>(i) + 1);
        const float whole = static_cast<float>(drawn >> 8) - 0x1p23f;
        const uint32_t exponent = 127u - 30u - static_cast<uint32_t>(i % 40);
        x[static_cast<size_t>(i)] = whole * float_of(exponent << 23);
    }
    Bytes halves(2 * size), signs((size + 7) / 8), symbols(size);
    std::vector<int8_t> exponents(buckets);
    std::vector<float> means(2 * buckets), scales(buckets);
    TW(bf16_encode)(x.data(), size, halves.data());
    show("golden bf16", 0, halves);
    TW(fp16_encode)(x.data(), size, exponents.data(), halves.data());
    show("golden fp16", 0, halves);
    show("golden fp16", 1, exponents);
    TW(sign_encode)(x.data(), size, means.data(), signs.data());
    show("golden sign", 0, signs);
    show("golden sign", 1, means);
    TW(levels_encode)(x.data(), size, 127, 0x1p100f, 0, 0, TW_WORD, 8, scales.data(), symbols.data());
    show("golden int8", 0, symbols);
    show("golden int8", 1, scales);
}

}  // namespace

int main() {
    golden();
    for (const int64_t size : {1, 7, 64, 4095, 4097, 20000, 70001}) {
        of_size(size);
        held_of_size(size);
    }
}
