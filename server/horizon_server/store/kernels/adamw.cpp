// The host side of an optimizer step: AdamW on the split master, its merge and split, sums of gradients and of squares,
// and a STREAM triad to measure them against. C ABI, no dependency but the C++ standard library.
//
// Bits: every element goes through the same sequence of single IEEE operations (no contraction, no reassociation, default
// rounding, subnormals kept), so results depend neither on the instruction set nor on the vector width nor on the number of
// threads, and horizon_server/store/reference.py gives the same bits.
//
// The build reads its flags from the next line, so that a library is stale exactly when this file or a
// header has changed.
// build-flags: -std=c++17 -O3 -fno-math-errno -ffp-contract=off -fvisibility=hidden -fPIC -shared -pthread

#include <cmath>
#include <cstdint>
#include <cstring>

#include "threads.h"

#define HZ_API extern "C" __attribute__((visibility("default")))
#define HZ_INLINE static inline __attribute__((always_inline))
#if defined(__x86_64__) && defined(__gnu_linux__)
#define HZ_X86
#include <immintrin.h>
#endif
#if defined(HZ_CLONES)
// Given on the command line: a test builds single variants to compare their bits.
#define HZ_ONE_VARIANT
#elif defined(HZ_X86)
// No AVX-512 variant but of compressed states: the other loops wait for memory, and measured no faster with it.
#define HZ_CLONES __attribute__((target_clones("default", "avx2")))
#else
#define HZ_CLONES
#endif

// ------------------------------------------------------------------------------------------------------- arithmetic

namespace hz {

constexpr int64_t kChunk = 1 << 15;       // elements a thread takes at once: under 1 MiB of planes
constexpr int64_t kBlock = 32;            // elements between two rounds of prefetches: one cache line of `hi`
constexpr int64_t kAhead = 512;           // elements that prefetches run ahead
constexpr int64_t kCompressedAhead = 1024;  // as kAhead, of compressed planes, which have fewer bytes per element
constexpr int64_t kNormBlock = 1 << 16;   // elements summed up by themselves, fixed: it decides the rounding
constexpr int64_t kNormLanes = 16;        // partial sums per block, fixed for the same reason

template <typename To, typename From>
HZ_INLINE To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}

HZ_INLINE float widen(float value) { return value; }
HZ_INLINE float widen(uint16_t bf16_bits) { return bits_as<float>(static_cast<uint32_t>(bf16_bits) << 16); }

HZ_INLINE float merge_one(uint16_t hi, int16_t lo) {
    return bits_as<float>((static_cast<uint32_t>(hi) << 16) + static_cast<uint32_t>(static_cast<int32_t>(lo)));
}

// Guards as in reference.py: NaN becomes the quiet NaN, a finite value never rounds to Inf.
HZ_INLINE uint32_t guarded_bits(float master) {
    const uint32_t bits = bits_as<uint32_t>(master);
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t finite = magnitude < 0x7f7f7fffu ? magnitude : 0x7f7f7fffu;
    const uint32_t special = magnitude == 0x7f800000u ? 0x7f800000u : 0x7fc00000u;
    return (bits & 0x80000000u) | (magnitude >= 0x7f800000u ? special : finite);
}

// The master beside compressed moments: 24 bits of the fp32 pattern, rounded to nearest, which leave eight for `lo`.
constexpr int32_t kInfinity = 0x7f800000;
constexpr int32_t kLargest24 = 0x7f7f7f00;  // the largest number of 24 bits whose `hi` is finite

HZ_INLINE float merge_one(uint16_t hi, int8_t lo) {
    return bits_as<float>((static_cast<uint32_t>(hi) << 16) + (static_cast<uint32_t>(static_cast<int32_t>(lo)) << 8));
}

// Guards as for 16 bits of `lo`, with the largest number of 24 bits whose `hi` is finite.
HZ_INLINE void split_one(float master, uint16_t& hi, int8_t& lo) {
    // Signed, because AVX2 has no unsigned comparison; a magnitude is positive either way.
    const int32_t bits = bits_as<int32_t>(master);
    const int32_t magnitude = bits & 0x7fffffff;
    const int32_t finite = magnitude < kLargest24 ? magnitude : kLargest24;
    const int32_t special = magnitude == kInfinity ? kInfinity : 0x7fc00000;
    const uint32_t guarded = (static_cast<uint32_t>(bits) & 0x80000000u) |
                             static_cast<uint32_t>(magnitude >= kInfinity ? special : finite);
    const uint32_t rounded = (guarded + 0x80u) & 0xffffff00u;
    hi = static_cast<uint16_t>((rounded + 0x8000u) >> 16);
    lo = static_cast<int8_t>((rounded >> 8) & 0xffu);
}

HZ_INLINE void split_one(float master, uint16_t& hi, int16_t& lo) {
    const uint32_t bits = guarded_bits(master);
    hi = static_cast<uint16_t>((bits + 0x8000u) >> 16);
    lo = static_cast<int16_t>(bits & 0xffffu);
}

template <typename Low>
HZ_INLINE void merge_body(const uint16_t* __restrict hi, const Low* __restrict lo, float* __restrict out, int64_t n) {
    for (int64_t i = 0; i < n; ++i) out[i] = merge_one(hi[i], lo[i]);
}

template <typename Low>
HZ_INLINE void split_body(const float* __restrict master, uint16_t* __restrict hi, Low* __restrict lo, int64_t n) {
    for (int64_t i = 0; i < n; ++i) split_one(master[i], hi[i], lo[i]);
}

struct Segment {
    int64_t offset;
    int64_t num_elements;
    float decay_factor;
    float step_scale;
};

struct Scalars {
    float grad_scale;
    float beta1;
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    float scaled_eps;
    float scaled_step_size;
    float most_ratio;
};

constexpr int64_t kLineBytes = 64;

// Nine streams are more than the hardware follows well, and it stops at every page. The address may lie beyond the plane: a
// prefetch never faults.
template <typename Value>
HZ_INLINE void prefetch_block(const Value* plane, int64_t at) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(plane) + static_cast<uintptr_t>(at) * sizeof(Value);
    for (uintptr_t byte = 0; byte < kBlock * sizeof(Value); byte += kLineBytes) {
        __builtin_prefetch(reinterpret_cast<const void*>(address + byte));
    }
}

// Step size and eps come multiplied by the root of the second bias correction, which saves a division: as in reference.py.
template <typename Grad>
HZ_INLINE void adamw_body(uint16_t* __restrict hi, int16_t* __restrict lo, float* __restrict exp_avg,
                          float* __restrict exp_avg_sq, const Grad* __restrict grads, int64_t n, float decay_factor,
                          const Scalars s) {
    for (int64_t i = 0; i < n; ++i) {
        const float grad = widen(grads[i]) * s.grad_scale;
        const float first = s.beta1 * exp_avg[i] + s.one_minus_beta1 * grad;
        const float second = s.beta2 * exp_avg_sq[i] + (s.one_minus_beta2 * grad) * grad;
        const float decayed = merge_one(hi[i], lo[i]) * decay_factor;
        const float denominator = std::sqrt(second) + s.scaled_eps;
        exp_avg[i] = first;
        exp_avg_sq[i] = second;
        split_one(decayed - (s.scaled_step_size * first) / denominator, hi[i], lo[i]);
    }
}

template <typename Grad>
HZ_INLINE void adamw_blocks(uint16_t* hi, int16_t* lo, float* exp_avg, float* exp_avg_sq, const Grad* grads, int64_t n,
                            float decay_factor, const Scalars& s) {
    const int64_t whole = n - n % kBlock;
    for (int64_t at = 0; at < whole; at += kBlock) {
        prefetch_block(hi, at + kAhead);
        prefetch_block(lo, at + kAhead);
        prefetch_block(exp_avg, at + kAhead);
        prefetch_block(exp_avg_sq, at + kAhead);
        prefetch_block(grads, at + kAhead);
        adamw_body(hi + at, lo + at, exp_avg + at, exp_avg_sq + at, grads + at, kBlock, decay_factor, s);
    }
    adamw_body(hi + whole, lo + whole, exp_avg + whole, exp_avg_sq + whole, grads + whole, n - whole, decay_factor, s);
}

HZ_CLONES void adamw_fp32(uint16_t* hi, int16_t* lo, float* exp_avg, float* exp_avg_sq, const float* grads, int64_t n,
                          float decay_factor, const Scalars& s) {
    adamw_blocks(hi, lo, exp_avg, exp_avg_sq, grads, n, decay_factor, s);
}

HZ_CLONES void adamw_bf16(uint16_t* hi, int16_t* lo, float* exp_avg, float* exp_avg_sq, const uint16_t* grads,
                          int64_t n, float decay_factor, const Scalars& s) {
    adamw_blocks(hi, lo, exp_avg, exp_avg_sq, grads, n, decay_factor, s);
}

// Compressed moments, as reference.adamw_compressed explains them: a code for each, and for each block of kBlock elements
// a scale of the first moments next to one of the roots of the second.

constexpr int64_t kGroups = 16;                  // of a strip, which is updated loop by loop
constexpr int64_t kStrip = kGroups * kBlock;
constexpr int32_t kLargestFirst = 0x71800000;    // 2^100, in fp32 bits: no scale of first moments is above it
constexpr int32_t kSmallestFirst = 0x0d800000;   // 2^-100: nor below it
constexpr int32_t kLargestRoot = 0x5f000000;     // 2^63: its square is finite
constexpr int32_t kSmallestRoot = 0x19800000;    // 2^-76: the root of an fp32 number is larger, or 0
constexpr float kFirstCodes = 254.0f;            // twice the largest code of a first moment
// As kFirstCodes, less what roundings can add: no code is beyond the largest.
constexpr float kFirstCodesWithin = kFirstCodes * (1.0f - 1.0f / (1 << 20));
constexpr float kRootCodes = 255.0f;

struct Dither {
    float first[kBlock];
    float root[kBlock];
};

// The bfloat16 number from `largest` on upwards, as fp32 bits.
HZ_INLINE int32_t scale_bits(int32_t largest, int32_t least, int32_t most) {
    const int32_t within = largest < most ? largest : most;
    const int32_t up = (within + 0xffff) & ~0xffff;
    return up < least ? least : up;
}

// The planes of a tensor, from one of its blocks on.
struct CompressedPlanes {
    uint16_t* hi;
    int8_t* lo;
    int8_t* firsts;
    uint8_t* roots;
    uint16_t* scales;

    CompressedPlanes from(int64_t at) const {
        return {hi + at, lo + at, firsts + at, roots + at, scales + 2 * (at / kBlock)};
    }
};

#if defined(HZ_X86) && !defined(HZ_ONE_VARIANT)
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq")
namespace avx512 {
#include "lanes_avx512.h"
#include "compressed.h"
}  // namespace avx512
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2")
namespace avx2 {
#include "lanes_avx2.h"
#include "compressed.h"
}  // namespace avx2
#pragma GCC pop_options
#endif

// What the command line alone allows.
namespace plain {
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include "lanes_avx512.h"
#elif defined(__AVX2__)
#include "lanes_avx2.h"
#else
#include "lanes_portable.h"
#endif
#include "compressed.h"
}  // namespace plain

static decltype(&plain::compressed) compressed_variant() {
#if defined(HZ_X86) && !defined(HZ_ONE_VARIANT)
    __builtin_cpu_init();
    const bool has_words = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    if (has_words && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq")) return avx512::compressed;
    if (__builtin_cpu_supports("avx2")) return avx2::compressed;
#endif
    return plain::compressed;
}

HZ_CLONES void merge_range_24(const uint16_t* hi, const int8_t* lo, float* out, int64_t n) { merge_body(hi, lo, out, n); }
HZ_CLONES void split_range_24(const float* master, uint16_t* hi, int8_t* lo, int64_t n) { split_body(master, hi, lo, n); }

HZ_CLONES void merge_range(const uint16_t* hi, const int16_t* lo, float* out, int64_t n) { merge_body(hi, lo, out, n); }
HZ_CLONES void split_range(const float* master, uint16_t* hi, int16_t* lo, int64_t n) { split_body(master, hi, lo, n); }

template <typename Value>
HZ_INLINE double sum_squares_body(const Value* __restrict values, int64_t n) {
    double lanes[kNormLanes] = {};
    const int64_t whole = n - n % kNormLanes;
    for (int64_t i = 0; i < whole; i += kNormLanes) {
        for (int64_t lane = 0; lane < kNormLanes; ++lane) {
            const double value = widen(values[i + lane]);
            lanes[lane] += value * value;
        }
    }
    for (int64_t lane = 0; lane < n - whole; ++lane) {
        const double value = widen(values[whole + lane]);
        lanes[lane] += value * value;
    }
    for (int64_t width = kNormLanes / 2; width > 0; width /= 2) {
        for (int64_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
    }
    return lanes[0];
}

HZ_CLONES double sum_squares_fp32(const float* values, int64_t n) { return sum_squares_body<float>(values, n); }
HZ_CLONES double sum_squares_bf16(const uint16_t* values, int64_t n) { return sum_squares_body<uint16_t>(values, n); }

HZ_CLONES void add_range(float* __restrict total, const float* __restrict values, int64_t n) {
    for (int64_t i = 0; i < n; ++i) total[i] += values[i];
}

HZ_CLONES void triad_range(double* __restrict a, const double* __restrict b, const double* __restrict c, double scale,
                           int64_t n) {
    for (int64_t i = 0; i < n; ++i) a[i] = b[i] + scale * c[i];
}

// ------------------------------------------------------------------------------------------------------------ loops

template <typename Body>
static void for_each_chunk(int64_t num_chunks, int num_threads, const Body& body) {
    const Task task = [](const void* context, int64_t chunk) { (*static_cast<const Body*>(context))(chunk); };
    pool().run(task, &body, num_chunks, num_threads);
}

template <typename Body>
static void for_each_range(int64_t n, int64_t grain, int num_threads, const Body& body) {
    for_each_chunk((n + grain - 1) / grain, num_threads, [&](int64_t chunk) {
        const int64_t start = chunk * grain;
        body(start, n - start < grain ? n - start : grain);
    });
}

// What a row without a gradient reads; zero bits are 0.0 in both dtypes.
static const float no_gradient[kChunk] = {};

static Scalars with_step_scale(Scalars scalars, float step_scale) {
    scalars.scaled_step_size *= step_scale;
    return scalars;
}

static double in_order(const double* partials, int64_t n) {
    double total = 0;
    for (int64_t block = 0; block * kNormBlock < n; ++block) total += partials[block];
    return total;
}

static int64_t chunks_of(const Segment& segment) { return (segment.num_elements + kChunk - 1) / kChunk; }

// The elements of all segments, in pieces of up to a chunk of one of them.
template <typename Body>
static void for_each_piece(const Segment* segments, int64_t num_segments, int num_threads, const Body& body) {
    int64_t num_chunks = 0;
    for (int64_t i = 0; i < num_segments; ++i) num_chunks += chunks_of(segments[i]);
    for_each_chunk(num_chunks, num_threads, [&](int64_t chunk) {
        const Segment* segment = segments;
        for (; chunk >= chunks_of(*segment); ++segment) chunk -= chunks_of(*segment);
        const int64_t start = chunk * kChunk;
        const int64_t left = segment->num_elements - start;
        body(*segment, segment->offset + start, left < kChunk ? left : kChunk);
    });
}

}  // namespace hz

// ------------------------------------------------------------------------------------------------------------ C ABI

HZ_API void hz_adamw(uint16_t* hi, int16_t* lo, float* exp_avg, float* exp_avg_sq, const void* grads, int grads_are_bf16,
                     const hz::Segment* segments, int64_t num_segments, const hz::Scalars* scalars, int num_threads) {
    hz::for_each_piece(segments, num_segments, num_threads, [&](const hz::Segment& segment, int64_t at, int64_t n) {
        const hz::Scalars own = hz::with_step_scale(*scalars, segment.step_scale);
        if (grads_are_bf16) {
            hz::adamw_bf16(hi + at, lo + at, exp_avg + at, exp_avg_sq + at, static_cast<const uint16_t*>(grads) + at, n,
                           segment.decay_factor, own);
        } else {
            hz::adamw_fp32(hi + at, lo + at, exp_avg + at, exp_avg_sq + at, static_cast<const float*>(grads) + at, n,
                           segment.decay_factor, own);
        }
    });
}

// Some rows of a table whose planes start at the pointers: the gradient of `rows[i]` is row `sources[i]` of `values`, or zero
// where that is negative.
HZ_API void hz_adamw_rows(uint16_t* hi, int16_t* lo, float* exp_avg, float* exp_avg_sq, const void* values,
                          int values_are_bf16, const int64_t* rows, const int64_t* sources, int64_t num_rows, int64_t width,
                          float decay_factor, float step_scale, const hz::Scalars* scalars, int num_threads) {
    const hz::Scalars own = hz::with_step_scale(*scalars, step_scale);
    const int64_t grain = width < hz::kChunk ? hz::kChunk / width : 1;
    hz::for_each_range(num_rows, grain, num_threads, [&](int64_t first, int64_t count) {
        for (int64_t i = first; i < first + count; ++i) {
            for (int64_t start = 0; start < width; start += hz::kChunk) {
                const int64_t n = width - start < hz::kChunk ? width - start : hz::kChunk;
                const int64_t at = rows[i] * width + start;
                const int64_t from = sources[i] * width + start;
                if (sources[i] >= 0 && values_are_bf16) {
                    hz::adamw_bf16(hi + at, lo + at, exp_avg + at, exp_avg_sq + at,
                                   static_cast<const uint16_t*>(values) + from, n, decay_factor, own);
                } else {
                    const float* grads = sources[i] >= 0 ? static_cast<const float*>(values) + from : hz::no_gradient;
                    hz::adamw_fp32(hi + at, lo + at, exp_avg + at, exp_avg_sq + at, grads, n, decay_factor, own);
                }
            }
        }
    });
}

// As hz_adamw, of compressed planes; `scales` has two for each block of a plane, and segments begin with a block. `dither`
// is kBlock numbers for the first moments and as many for the roots.
HZ_API void hz_adamw_compressed(uint16_t* hi, int8_t* lo, int8_t* first_codes, uint8_t* root_codes, uint16_t* scales,
                                const void* grads, int grads_are_bf16, const hz::Segment* segments,
                                int64_t num_segments, const hz::Scalars* scalars, const float* dither,
                                int num_threads) {
    hz::Dither own;
    std::memcpy(&own, dither, sizeof(own));
    const hz::CompressedPlanes planes{hi, lo, first_codes, root_codes, scales};
    static const auto update = hz::compressed_variant();
    const int64_t grad_bytes = grads_are_bf16 ? sizeof(uint16_t) : sizeof(float);
    hz::for_each_piece(segments, num_segments, num_threads, [&](const hz::Segment& segment, int64_t at, int64_t n) {
        const hz::Scalars s = hz::with_step_scale(*scalars, segment.step_scale);
        update(planes.from(at), static_cast<const char*>(grads) + at * grad_bytes, grads_are_bf16, n,
               segment.decay_factor, s, own);
    });
}

HZ_API void hz_merge_24(const uint16_t* hi, const int8_t* lo, float* out, int64_t n, int num_threads) {
    hz::for_each_range(n, hz::kChunk, num_threads,
                       [&](int64_t at, int64_t count) { hz::merge_range_24(hi + at, lo + at, out + at, count); });
}

HZ_API void hz_split_24(const float* master, uint16_t* hi, int8_t* lo, int64_t n, int num_threads) {
    hz::for_each_range(n, hz::kChunk, num_threads,
                       [&](int64_t at, int64_t count) { hz::split_range_24(master + at, hi + at, lo + at, count); });
}

HZ_API void hz_merge(const uint16_t* hi, const int16_t* lo, float* out, int64_t n, int num_threads) {
    hz::for_each_range(n, hz::kChunk, num_threads,
                       [&](int64_t at, int64_t count) { hz::merge_range(hi + at, lo + at, out + at, count); });
}

HZ_API void hz_split(const float* master, uint16_t* hi, int16_t* lo, int64_t n, int num_threads) {
    hz::for_each_range(n, hz::kChunk, num_threads,
                       [&](int64_t at, int64_t count) { hz::split_range(master + at, hi + at, lo + at, count); });
}

// `partials` holds one double per started block of hz_norm_block() elements.
HZ_API double hz_sum_squares(const void* values, int values_are_bf16, int64_t n, double* partials, int num_threads) {
    hz::for_each_range(n, hz::kNormBlock, num_threads, [&](int64_t at, int64_t count) {
        partials[at / hz::kNormBlock] = values_are_bf16
                                            ? hz::sum_squares_bf16(static_cast<const uint16_t*>(values) + at, count)
                                            : hz::sum_squares_fp32(static_cast<const float*>(values) + at, count);
    });
    return hz::in_order(partials, n);
}

// As hz_sum_squares, of what `total` is after `values` were added to it.
HZ_API double hz_add(float* total, const float* values, int64_t n, double* partials, int num_threads) {
    hz::for_each_range(n, hz::kNormBlock, num_threads, [&](int64_t at, int64_t count) {
        hz::add_range(total + at, values + at, count);
        partials[at / hz::kNormBlock] = hz::sum_squares_fp32(total + at, count);
    });
    return hz::in_order(partials, n);
}

// `out` holds one double per started block of `block` elements: the sum of its squares, as hz_sum_squares adds a block.
HZ_API void hz_square_blocks(const void* values, int values_are_bf16, int64_t n, int64_t block, double* out,
                             int num_threads) {
    hz::for_each_range(n, block, num_threads, [&](int64_t at, int64_t count) {
        out[at / block] = values_are_bf16 ? hz::sum_squares_bf16(static_cast<const uint16_t*>(values) + at, count)
                                          : hz::sum_squares_fp32(static_cast<const float*>(values) + at, count);
    });
}

HZ_API void hz_triad(double* a, const double* b, const double* c, double scale, int64_t n, int num_threads) {
    hz::for_each_range(n, hz::kChunk, num_threads,
                       [&](int64_t at, int64_t count) { hz::triad_range(a + at, b + at, c + at, scale, count); });
}

HZ_API int64_t hz_norm_block() { return hz::kNormBlock; }

HZ_API const char* hz_isa() {
#if defined(__x86_64__) && defined(__gnu_linux__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) return "avx2";
    return "x86-64";
#elif defined(__aarch64__)
    return "aarch64";
#else
    return "portable";
#endif
}
