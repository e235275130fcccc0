// One path: every kernel, compiled for one instruction set. TW_PATH is its name and the suffix of every symbol.
#include <math.h>  // functions of doubles only: those of C, which no path compiles

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define TW_JOINED(name, path) name##_##path
#define TW_NAMED(name, path) TW_JOINED(name, path)
#define TW_EXPORT extern "C" __attribute__((visibility("default")))
#define TW(name) TW_NAMED(tw_##name, TW_PATH)

// Everything except the exports has internal linkage: the linker must never use one path's function for another's.
#include "bits.hpp"
#include "finite.hpp"
#include "pack.hpp"
#include "lanes.hpp"
#include "levels.hpp"
#include "half.hpp"
#include "natural.hpp"
#include "topk.hpp"
#include "delta.hpp"
#include "rice.hpp"
#include "rans.hpp"
#include "sparse.hpp"
#include "lowrank.hpp"
#include "sums.hpp"
#include "ternary.hpp"
#include "memory.hpp"
#include "rotation.hpp"
#include "eden_block.hpp"
#include "eden.hpp"
#include "eden_add.hpp"
#include "eden_sparse.hpp"
#include "lattice.hpp"
#include "sampler.hpp"
