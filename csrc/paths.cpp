// Reports the library's ABI number, and which paths it has and this processor can run.
#include <cstring>

#define TW_EXPORT extern "C" __attribute__((visibility("default")))

#if defined(TW_HAS_AVX2) || defined(TW_HAS_AVX512)
#include <cpuid.h>

// Older compilers have no name for this flag, bit 29 of leaf 1's ecx.
static bool has_f16c() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
}
#endif

// Python refuses a library with another number. Change it here and in thinwire/compression/native/__init__.py (ABI)
// whenever the parameters of a kernel, or their meaning, change.
TW_EXPORT unsigned tw_abi() { return 7; }

TW_EXPORT int tw_runs(const char* path) {
    if (!std::strcmp(path, "scalar")) return 1;
#ifdef TW_HAS_NEON
    if (!std::strcmp(path, "neon")) return 1;  // every 64-bit ARM has it
#endif
#if defined(TW_HAS_AVX2) || defined(TW_HAS_AVX512)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
                      __builtin_cpu_supports("bmi2") && has_f16c() && __builtin_cpu_supports("popcnt");
#endif
#ifdef TW_HAS_AVX2
    if (!std::strcmp(path, "avx2")) return avx2;
#endif
#ifdef TW_HAS_AVX512
    if (!std::strcmp(path, "avx512"))
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
    return 0;
}

// Some linkers require this name, but the library is never imported as a Python module.
extern "C" __attribute__((visibility("default"))) void* PyInit_kernels(void) { return nullptr; }
