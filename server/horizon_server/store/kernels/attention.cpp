// Causal attention within documents in bf16 on a CPU with AVX512-BF16: forward and backward, in blocks that stay in its
// caches. C ABI, no dependency but the C++ standard library.
//
// Scores, their exponentials and all sums are fp32; the factors of a product are bf16 (two per lane and instruction),
// as in FlashAttention-2 (arXiv 2307.08691), whose order of loops this is. Backward goes over the scores twice, once for
// the queries' gradient and once for that of keys and values, so that every task writes rows of its own: nothing is
// added up between threads, and the bits depend neither on their number nor on the other documents of the row.
//
// The build reads its flags from the next line, so that a library is stale exactly when this file has changed.
// build-flags: -std=c++17 -O3 -fno-math-errno -fvisibility=hidden -fPIC -shared

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#define HZ_API extern "C" __attribute__((visibility("default")))

namespace hz {

using Bf16 = uint16_t;

// [heads, tokens, size]; strides in elements, that of `size` is 1.
struct Tensor {
    Bf16* data;
    int64_t head_stride;
    int64_t token_stride;
};

struct Problem {
    int64_t num_heads;
    int64_t num_key_heads;
    int64_t size;
    int64_t value_size;
    int64_t num_tokens;
    int64_t num_documents;
    // Where documents start, and the end of the last one.
    const int64_t* ends;
    float scale;
};

// GOMP_parallel of the OpenMP runtime that torch computes with: its threads are awake already, and no second set of
// threads competes with them for the cores.
using Parallel = void (*)(void (*task)(void*), void* context, unsigned num_threads, unsigned flags);

}  // namespace hz

// GCC knows the instructions since its version 10. HZ_PORTABLE is given by a test.
#if defined(__x86_64__) && (defined(__clang__) || __GNUC__ >= 10) && !defined(HZ_PORTABLE)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
#endif

#include <immintrin.h>

namespace hz {

#define HZ_INLINE static inline __attribute__((always_inline))

constexpr int kLanes = 16;
// Rows of a register tile: with four vectors of columns their sums take 24 of the 32 registers.
constexpr int kTile = 6;
constexpr int kTileColumns = 4;
// Rows that a task owns, a multiple of the tile, and the rows of the other side that it goes over at once.
constexpr int kRows = 96;
constexpr int kBlock = kTileColumns * kLanes;
constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kLn2 = 0.69314718055994530942f;

HZ_INLINE int64_t rounded_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// The first rows of the first columns of a product: sums of pairs of bf16, which are one number of 32 bits here.
// A is [ROWS, pairs], B is [pairs, columns] with the two of a pair next to each other.
template <int ROWS, int COLUMNS>
HZ_INLINE void tile(
    const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride, int64_t num_pairs, float* c,
    int64_t c_stride, bool add) {
    __m512 sums[ROWS][COLUMNS];
    for (int row = 0; row < ROWS; ++row)
        for (int column = 0; column < COLUMNS; ++column)
            sums[row][column] = add ? _mm512_loadu_ps(c + row * c_stride + column * kLanes) : _mm512_setzero_ps();
    for (int64_t pair = 0; pair < num_pairs; ++pair) {
        __m512bh factors[COLUMNS];
        for (int column = 0; column < COLUMNS; ++column)
            factors[column] = (__m512bh)_mm512_loadu_si512(b + pair * b_stride + column * kLanes);
        for (int row = 0; row < ROWS; ++row) {
            const __m512bh factor = (__m512bh)_mm512_set1_epi32(static_cast<int>(a[row * a_stride + pair]));
            for (int column = 0; column < COLUMNS; ++column)
                sums[row][column] = _mm512_dpbf16_ps(sums[row][column], factor, factors[column]);
        }
    }
    for (int row = 0; row < ROWS; ++row)
        for (int column = 0; column < COLUMNS; ++column)
            _mm512_storeu_ps(c + row * c_stride + column * kLanes, sums[row][column]);
}

using TileFunction = void (*)(const uint32_t*, int64_t, const uint32_t*, int64_t, int64_t, float*, int64_t, bool);

template <int ROWS, int COLUMNS>
void tile_of(
    const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride, int64_t num_pairs, float* c,
    int64_t c_stride, bool add) {
    tile<ROWS, COLUMNS>(a, a_stride, b, b_stride, num_pairs, c, c_stride, add);
}

#define HZ_TILES(rows) {tile_of<rows, 1>, tile_of<rows, 2>, tile_of<rows, 3>, tile_of<rows, 4>}
static const TileFunction kTiles[kTile][kTileColumns] = {HZ_TILES(1), HZ_TILES(2), HZ_TILES(3),
                                                         HZ_TILES(4), HZ_TILES(5), HZ_TILES(6)};

// C (+)= A B for at most kTile rows and any multiple of kLanes columns.
HZ_INLINE void product(
    int64_t rows, int64_t columns, const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride,
    int64_t num_pairs, float* c, int64_t c_stride, bool add) {
    for (int64_t column = 0; column < columns; column += kBlock) {
        const int64_t vectors = std::min<int64_t>(columns - column, kBlock) / kLanes;
        kTiles[rows - 1][vectors - 1](a, a_stride, b + column, b_stride, num_pairs, c + column, c_stride, add);
    }
}

// 2**x for x <= 0, to the last bits of fp32; what is below the least normal number becomes about that. NaN stays NaN.
HZ_INLINE __m512 exp2_of(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-126.0f), x);
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 rest = _mm512_sub_ps(x, whole);
    // Taylor's series of 2**rest: |rest| <= 1/2, so what is left out is 1.2e-7 of it.
    __m512 power = _mm512_set1_ps(1.5403530e-4f);
    for (float factor : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f})
        power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(factor));
    return _mm512_scalef_ps(power, whole);
}

HZ_INLINE void store_bf16(Bf16* to, __m512 values) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(values));
}

HZ_INLINE __m512 load_bf16(const Bf16* from, __mmask16 mask) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

// The lanes of a vector that starts at `start` which are in [first, stop).
HZ_INLINE __mmask16 lanes(int64_t start, int64_t first, int64_t stop) {
    const int64_t low = std::clamp<int64_t>(first - start, 0, kLanes), high = std::clamp<int64_t>(stop - start, 0, kLanes);
    return static_cast<__mmask16>(((1u << high) - 1u) & ~((1u << low) - 1u));
}

HZ_INLINE __m512i load_part(const Bf16* row, int64_t start, int64_t size) {
    const int64_t left = std::min<int64_t>(size - start, 32);
    if (left <= 0) return _mm512_setzero_si512();
    return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << left) - 1), row + start);
}

// 16 by 16 numbers of 32 bits.
HZ_INLINE void transpose(__m512i (&r)[kLanes]) {
    __m512i t[kLanes];
    for (int i = 0; i < kLanes; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < kLanes; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; ++i) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

// Rows of a head, which may be fewer than a block has; what is missing counts as zeros.
struct Rows {
    const Bf16* data;
    int64_t stride;
    int64_t count;
    int64_t size;

    const Bf16* row(int64_t index) const { return data + index * stride; }
};

HZ_INLINE Rows rows_of(const Tensor& tensor, int64_t head, int64_t start, int64_t count, int64_t size) {
    return {tensor.data + head * tensor.head_stride + start * tensor.token_stride, tensor.token_stride, count, size};
}

// Rows next to each other, as the first factor of a product: [count, pairs].
HZ_INLINE void copy(const Rows& rows, uint32_t* to, int64_t stride) {
    for (int64_t row = 0; row < rows.count; ++row)
        for (int64_t pair = 0; pair < stride; pair += kLanes)
            _mm512_storeu_si512(to + row * stride + pair, load_part(rows.row(row), 2 * pair, rows.size));
}

// Pairs along a row: [pairs, kBlock], for products that sum over `size`.
HZ_INLINE void pack_across(const Rows& rows, uint32_t* to) {
    for (int64_t first = 0; first < kBlock; first += kLanes)
        for (int64_t pair = 0; 2 * pair < rows.size; pair += kLanes) {
            __m512i part[kLanes];
            for (int i = 0; i < kLanes; ++i)
                part[i] = first + i < rows.count ? load_part(rows.row(first + i), 2 * pair, rows.size)
                                                 : _mm512_setzero_si512();
            transpose(part);
            for (int i = 0; i < kLanes; ++i) _mm512_storeu_si512(to + (pair + i) * kBlock + first, part[i]);
        }
}

// Pairs of rows: [kBlock / 2, stride], for products that sum over rows.
HZ_INLINE void pack_along(const Rows& rows, uint32_t* to, int64_t stride) {
    alignas(64) uint16_t low[32], high[32];
    for (int i = 0; i < kLanes; ++i) {
        low[2 * i] = static_cast<uint16_t>(i);
        low[2 * i + 1] = static_cast<uint16_t>(32 + i);
        high[2 * i] = static_cast<uint16_t>(kLanes + i);
        high[2 * i + 1] = static_cast<uint16_t>(32 + kLanes + i);
    }
    const __m512i take_low = _mm512_load_si512(low), take_high = _mm512_load_si512(high);
    for (int64_t pair = 0; pair < kBlock / 2; ++pair)
        for (int64_t column = 0; column < stride; column += 32) {
            const __m512i zeros = _mm512_setzero_si512();
            const __m512i one = 2 * pair < rows.count ? load_part(rows.row(2 * pair), column, rows.size) : zeros;
            const __m512i two =
                2 * pair + 1 < rows.count ? load_part(rows.row(2 * pair + 1), column, rows.size) : zeros;
            uint32_t* to_pair = to + pair * stride + column;
            _mm512_storeu_si512(to_pair, _mm512_permutex2var_epi16(one, take_low, two));
            _mm512_storeu_si512(to_pair + kLanes, _mm512_permutex2var_epi16(one, take_high, two));
        }
}

HZ_INLINE void store_rows(const float* from, int64_t stride, const Rows& to) {
    for (int64_t row = 0; row < to.count; ++row)
        for (int64_t column = 0; column < to.size; column += kLanes) {
            const __m256i values = (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from + row * stride + column));
            _mm256_mask_storeu_epi16(const_cast<Bf16*>(to.row(row)) + column, lanes(column, 0, to.size), values);
        }
}

// What a thread computes in, kept between calls.
class Workspace {
  public:
    explicit Workspace(const Problem& problem)
        : size_columns(rounded_up(problem.size, 32)), value_columns(rounded_up(problem.value_size, 32)) {
        // Two own factors, two sums, four packed blocks.
        const int64_t columns = size_columns + value_columns;
        const int64_t needed = kRows * columns / 2 + kRows * columns + kBlock * columns + kLanes;
        static thread_local std::vector<uint32_t> memory;
        if (static_cast<int64_t>(memory.size()) < needed) memory.resize(static_cast<size_t>(needed));
        const uintptr_t start = (reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64;
        next_ = reinterpret_cast<uint32_t*>(start);
    }

    uint32_t* factor(int64_t columns) { return take(kRows * columns / 2); }
    uint32_t* packed(int64_t columns) { return take(kBlock * columns / 2); }
    float* sums(int64_t columns) {
        float* found = reinterpret_cast<float*>(take(kRows * columns));
        std::fill_n(found, kRows * columns, 0.0f);
        return found;
    }

    // Sizes of heads, up to whole vectors of bf16.
    const int64_t size_columns;
    const int64_t value_columns;

  private:
    uint32_t* take(int64_t count) {
        uint32_t* found = next_;
        next_ += count;
        return found;
    }

    uint32_t* next_;
};

// Rows of a document that one task owns.
struct Part {
    int64_t document_start;
    int64_t document_size;
    int64_t start;
    int64_t count;
};

struct Call {
    Problem problem;
    Tensor query, key, value, output, gradient{}, for_query{}, for_key{}, for_value{};
    float* logsumexp = nullptr;
    float* dots = nullptr;
    std::vector<Part> parts{};
    std::atomic<int64_t> next{0};
    int64_t num_heads = 0;
    void (*run)(Call& call, const Part& part, int64_t head) = nullptr;

    int64_t group_size() const { return problem.num_heads / problem.num_key_heads; }
};

struct RowTile {
    alignas(64) float scores[kTile * kBlock];
    alignas(64) float slopes[kTile * kBlock];
    alignas(64) Bf16 weights[kTile * kBlock];
    alignas(64) Bf16 changes[kTile * kBlock];

    const uint32_t* weight_pairs() const { return reinterpret_cast<const uint32_t*>(weights); }
    const uint32_t* change_pairs() const { return reinterpret_cast<const uint32_t*>(changes); }
};

static void forward_part(Call& call, const Part& part, int64_t head) {
    const Problem& problem = call.problem;
    Workspace space(problem);
    const int64_t key_head = head / call.group_size(), size_pairs = space.size_columns / 2;
    const int64_t value_columns = space.value_columns, first = part.document_start + part.start;
    uint32_t* queries = space.factor(space.size_columns);
    uint32_t *keys = space.packed(space.size_columns), *values = space.packed(value_columns);
    float* sums = space.sums(value_columns);
    float maxima[kRows], totals[kRows] = {};
    std::fill_n(maxima, kRows, -std::numeric_limits<float>::infinity());
    copy(rows_of(call.query, head, first, part.count, problem.size), queries, size_pairs);
    const __m512 scale = _mm512_set1_ps(problem.scale * kLog2E);
    RowTile work;
    for (int64_t block = 0; block < part.start + part.count; block += kBlock) {
        const int64_t num_keys = std::min<int64_t>(kBlock, part.document_size - block);
        const int64_t at = part.document_start + block;
        pack_across(rows_of(call.key, key_head, at, num_keys, problem.size), keys);
        pack_along(rows_of(call.value, key_head, at, num_keys, problem.value_size), values, value_columns);
        for (int64_t row = 0; row < part.count; row += kTile) {
            const int64_t rows = std::min<int64_t>(kTile, part.count - row);
            // Keys of the block that the first row, and that any row, sees.
            const int64_t seen_first = part.start + row + 1 - block;
            const int64_t seen = std::min(num_keys, seen_first + rows - 1);
            if (seen <= 0) continue;
            const int64_t columns = rounded_up(seen, kLanes);
            product(rows, columns, queries + row * size_pairs, size_pairs, keys, kBlock, (problem.size + 1) / 2,
                    work.scores, kBlock, false);
            for (int64_t i = 0; i < rows; ++i) {
                const int64_t stop = std::min(num_keys, seen_first + i);
                Bf16* weights = work.weights + i * kBlock;
                if (stop <= 0) {
                    std::memset(weights, 0, static_cast<size_t>(columns) * sizeof(Bf16));
                    continue;
                }
                __m512 scores[kTileColumns], largest = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
                for (int64_t column = 0; column < columns; column += kLanes) {
                    const __m512 score = _mm512_mul_ps(_mm512_load_ps(work.scores + i * kBlock + column), scale);
                    scores[column / kLanes] = score;
                    largest = _mm512_mask_max_ps(largest, lanes(column, 0, stop), largest, score);
                }
                float& maximum = maxima[row + i];
                const float before = maximum;
                maximum = std::max(before, _mm512_reduce_max_ps(largest));
                const __m512 subtracted = _mm512_set1_ps(maximum);
                __m512 added = _mm512_setzero_ps();
                for (int64_t column = 0; column < columns; column += kLanes) {
                    const __m512 weight = _mm512_maskz_mov_ps(
                        lanes(column, 0, stop), exp2_of(_mm512_sub_ps(scores[column / kLanes], subtracted)));
                    added = _mm512_add_ps(added, weight);
                    store_bf16(weights + column, weight);
                }
                float& total = totals[row + i];
                if (maximum != before && block) {
                    const __m512 factor = exp2_of(_mm512_set1_ps(before - maximum));
                    float* sum = sums + (row + i) * value_columns;
                    for (int64_t column = 0; column < value_columns; column += kLanes)
                        _mm512_store_ps(sum + column, _mm512_mul_ps(_mm512_load_ps(sum + column), factor));
                    total *= _mm512_cvtss_f32(factor);
                }
                total += _mm512_reduce_add_ps(added);
            }
            product(rows, value_columns, work.weight_pairs(), kBlock / 2, values, value_columns, (seen + 1) / 2,
                    sums + row * value_columns, value_columns, true);
        }
    }
    for (int64_t row = 0; row < part.count; ++row) {
        const __m512 total = _mm512_set1_ps(totals[row]);
        float* sum = sums + row * value_columns;
        for (int64_t column = 0; column < value_columns; column += kLanes)
            _mm512_store_ps(sum + column, _mm512_div_ps(_mm512_load_ps(sum + column), total));
        call.logsumexp[head * problem.num_tokens + first + row] = maxima[row] * kLn2 + std::log(totals[row]);
    }
    store_rows(sums, value_columns, rows_of(call.output, head, first, part.count, problem.value_size));
}

// The weights of a row of scores, and the gradients of the scores: exp(s - logsumexp), and that times (slope - dot).
// `logsumexp` (in powers of two) and `dot` belong to a lane's query.
HZ_INLINE void change(
    RowTile& work, int64_t at, __mmask16 mask, __m512 scale, __m512 score_scale, __m512 logsumexp, __m512 dot) {
    const __m512 score = _mm512_fmsub_ps(_mm512_load_ps(work.scores + at), score_scale, logsumexp);
    const __m512 weight = _mm512_maskz_mov_ps(mask, exp2_of(score));
    const __m512 slope = _mm512_mul_ps(_mm512_sub_ps(_mm512_load_ps(work.slopes + at), dot), scale);
    store_bf16(work.weights + at, weight);
    store_bf16(work.changes + at, _mm512_maskz_mul_ps(mask, weight, slope));
}

// The gradient of a part's queries, and the dot products of the output and its gradient.
static void query_part(Call& call, const Part& part, int64_t head) {
    const Problem& problem = call.problem;
    Workspace space(problem);
    const int64_t key_head = head / call.group_size(), size_columns = space.size_columns;
    const int64_t size_pairs = size_columns / 2, value_pairs = space.value_columns / 2;
    const int64_t first = part.document_start + part.start;
    uint32_t *queries = space.factor(size_columns), *gradients = space.factor(space.value_columns);
    uint32_t *across = space.packed(size_columns), *along = space.packed(size_columns);
    uint32_t* values = space.packed(space.value_columns);
    float* sums = space.sums(size_columns);
    const float* logsumexp = call.logsumexp + head * problem.num_tokens + first;
    float* dots = call.dots + head * problem.num_tokens + first;
    const Rows gradient = rows_of(call.gradient, head, first, part.count, problem.value_size);
    const Rows output = rows_of(call.output, head, first, part.count, problem.value_size);
    copy(rows_of(call.query, head, first, part.count, problem.size), queries, size_pairs);
    copy(gradient, gradients, value_pairs);
    for (int64_t row = 0; row < part.count; ++row) {
        __m512 dot = _mm512_setzero_ps();
        for (int64_t column = 0; column < problem.value_size; column += kLanes) {
            const __mmask16 mask = lanes(column, 0, problem.value_size);
            dot = _mm512_fmadd_ps(
                load_bf16(gradient.row(row) + column, mask), load_bf16(output.row(row) + column, mask), dot);
        }
        dots[row] = _mm512_reduce_add_ps(dot);
    }
    const __m512 scale = _mm512_set1_ps(problem.scale), score_scale = _mm512_set1_ps(problem.scale * kLog2E);
    RowTile work;
    for (int64_t block = 0; block < part.start + part.count; block += kBlock) {
        const int64_t num_keys = std::min<int64_t>(kBlock, part.document_size - block);
        const int64_t at = part.document_start + block;
        const Rows keys = rows_of(call.key, key_head, at, num_keys, problem.size);
        pack_across(keys, across);
        pack_along(keys, along, size_columns);
        pack_across(rows_of(call.value, key_head, at, num_keys, problem.value_size), values);
        for (int64_t row = 0; row < part.count; row += kTile) {
            const int64_t rows = std::min<int64_t>(kTile, part.count - row);
            const int64_t seen_first = part.start + row + 1 - block;
            const int64_t seen = std::min(num_keys, seen_first + rows - 1);
            if (seen <= 0) continue;
            const int64_t columns = rounded_up(seen, kLanes);
            product(rows, columns, queries + row * size_pairs, size_pairs, across, kBlock, (problem.size + 1) / 2,
                    work.scores, kBlock, false);
            product(rows, columns, gradients + row * value_pairs, value_pairs, values, kBlock,
                    (problem.value_size + 1) / 2, work.slopes, kBlock, false);
            for (int64_t i = 0; i < rows; ++i) {
                const __m512 subtracted = _mm512_set1_ps(logsumexp[row + i] * kLog2E);
                const __m512 dot = _mm512_set1_ps(dots[row + i]);
                const int64_t stop = std::min(num_keys, seen_first + i);
                for (int64_t column = 0; column < columns; column += kLanes)
                    change(work, i * kBlock + column, lanes(column, 0, stop), scale, score_scale, subtracted, dot);
            }
            product(rows, size_columns, work.change_pairs(), kBlock / 2, along, size_columns, (seen + 1) / 2,
                    sums + row * size_columns, size_columns, true);
        }
    }
    store_rows(sums, size_columns, rows_of(call.for_query, head, first, part.count, problem.size));
}

// The gradients of a part's keys and values, from all heads that share them: with keys as rows, queries as columns.
static void key_part(Call& call, const Part& part, int64_t key_head) {
    const Problem& problem = call.problem;
    Workspace space(problem);
    const int64_t size_columns = space.size_columns, value_columns = space.value_columns;
    const int64_t size_pairs = size_columns / 2, value_pairs = value_columns / 2;
    const int64_t first = part.document_start + part.start;
    uint32_t *keys = space.factor(size_columns), *values = space.factor(value_columns);
    uint32_t *queries_across = space.packed(size_columns), *queries_along = space.packed(size_columns);
    uint32_t *gradients_across = space.packed(value_columns), *gradients_along = space.packed(value_columns);
    float *for_keys = space.sums(size_columns), *for_values = space.sums(value_columns);
    copy(rows_of(call.key, key_head, first, part.count, problem.size), keys, size_pairs);
    copy(rows_of(call.value, key_head, first, part.count, problem.value_size), values, value_pairs);
    const __m512 scale = _mm512_set1_ps(problem.scale), score_scale = _mm512_set1_ps(problem.scale * kLog2E);
    const __m512 to_base_2 = _mm512_set1_ps(kLog2E);
    RowTile work;
    for (int64_t head = key_head * call.group_size(); head < (key_head + 1) * call.group_size(); ++head)
        for (int64_t block = part.start / kBlock * kBlock; block < part.document_size; block += kBlock) {
            const int64_t num_queries = std::min<int64_t>(kBlock, part.document_size - block);
            const int64_t at = part.document_start + block;
            const Rows queries = rows_of(call.query, head, at, num_queries, problem.size);
            const Rows gradients = rows_of(call.gradient, head, at, num_queries, problem.value_size);
            pack_across(queries, queries_across);
            pack_along(queries, queries_along, size_columns);
            pack_across(gradients, gradients_across);
            pack_along(gradients, gradients_along, value_columns);
            const float* logsumexp = call.logsumexp + head * problem.num_tokens + at;
            const float* dots = call.dots + head * problem.num_tokens + at;
            const int64_t columns = rounded_up(num_queries, kLanes);
            for (int64_t row = 0; row < part.count; row += kTile) {
                const int64_t rows = std::min<int64_t>(kTile, part.count - row);
                // The first query of the block that sees the first key.
                const int64_t seeing_first = part.start + row - block;
                if (seeing_first >= num_queries) break;
                const int64_t left = std::max<int64_t>(seeing_first, 0) / kLanes * kLanes, left_pairs = left / 2;
                product(rows, columns - left, keys + row * size_pairs, size_pairs, queries_across + left, kBlock,
                        (problem.size + 1) / 2, work.scores + left, kBlock, false);
                product(rows, columns - left, values + row * value_pairs, value_pairs, gradients_across + left,
                        kBlock, (problem.value_size + 1) / 2, work.slopes + left, kBlock, false);
                for (int64_t column = left; column < columns; column += kLanes) {
                    const __mmask16 there = lanes(column, 0, num_queries);
                    const __m512 sums = _mm512_mul_ps(_mm512_maskz_loadu_ps(there, logsumexp + column), to_base_2);
                    const __m512 dot = _mm512_maskz_loadu_ps(there, dots + column);
                    for (int64_t i = 0; i < rows; ++i)
                        change(work, i * kBlock + column, lanes(column, seeing_first + i, num_queries), scale,
                               score_scale, sums, dot);
                }
                const int64_t num_pairs = (num_queries + 1) / 2 - left_pairs;
                product(rows, value_columns, work.weight_pairs() + left_pairs, kBlock / 2,
                        gradients_along + left_pairs * value_columns, value_columns, num_pairs,
                        for_values + row * value_columns, value_columns, true);
                product(rows, size_columns, work.change_pairs() + left_pairs, kBlock / 2,
                        queries_along + left_pairs * size_columns, size_columns, num_pairs,
                        for_keys + row * size_columns, size_columns, true);
            }
        }
    store_rows(for_keys, size_columns, rows_of(call.for_key, key_head, first, part.count, problem.size));
    store_rows(for_values, value_columns, rows_of(call.for_value, key_head, first, part.count, problem.value_size));
}

static void work_on(void* context) {
    Call& call = *static_cast<Call*>(context);
    const int64_t num_tasks = static_cast<int64_t>(call.parts.size()) * call.num_heads;
    for (int64_t task; (task = call.next.fetch_add(1, std::memory_order_relaxed)) < num_tasks;)
        call.run(call, call.parts[static_cast<size_t>(task / call.num_heads)], task % call.num_heads);
}

static void run_all(
    Call& call, void (*run)(Call&, const Part&, int64_t), int64_t num_heads, Parallel parallel, int num_threads) {
    call.run = run;
    call.num_heads = num_heads;
    call.next.store(0, std::memory_order_relaxed);
    parallel(work_on, &call, static_cast<unsigned>(num_threads), 0);
}

// The rows of documents in parts, the ones with most work first.
static void divide(Call& call, bool is_late_longer) {
    const Problem& problem = call.problem;
    call.parts.clear();
    for (int64_t i = 0; i < problem.num_documents; ++i)
        for (int64_t start = 0, size = problem.ends[i + 1] - problem.ends[i]; start < size; start += kRows)
            call.parts.push_back({problem.ends[i], size, start, std::min<int64_t>(kRows, size - start)});
    const auto work = [=](const Part& part) {
        return is_late_longer ? part.start : part.document_size - part.start;
    };
    std::stable_sort(call.parts.begin(), call.parts.end(), [&](const Part& one, const Part& other) {
        return work(one) > work(other);
    });
}

}  // namespace hz

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

// Whether this CPU has the instructions.
HZ_API int hz_attention_runs() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512bf16");
}

// Writes `output` and `logsumexp` [heads, tokens].
HZ_API void hz_attention(
    const hz::Problem* problem, const hz::Tensor* query, const hz::Tensor* key, const hz::Tensor* value,
    const hz::Tensor* output, float* logsumexp, hz::Parallel parallel, int num_threads) {
    hz::Call call{*problem, *query, *key, *value, *output};
    call.logsumexp = logsumexp;
    hz::divide(call, true);
    hz::run_all(call, hz::forward_part, problem->num_heads, parallel, num_threads);
}

// Writes the three gradients from that of the output, and `dots` [heads, tokens], which it needs itself.
HZ_API void hz_attention_backward(
    const hz::Problem* problem, const hz::Tensor* query, const hz::Tensor* key, const hz::Tensor* value,
    const hz::Tensor* output, const hz::Tensor* gradient, const float* logsumexp, float* dots,
    const hz::Tensor* for_query, const hz::Tensor* for_key, const hz::Tensor* for_value, hz::Parallel parallel,
    int num_threads) {
    hz::Call call{*problem, *query, *key, *value, *output, *gradient, *for_query, *for_key, *for_value};
    call.logsumexp = const_cast<float*>(logsumexp);
    call.dots = dots;
    hz::divide(call, true);
    hz::run_all(call, hz::query_part, problem->num_heads, parallel, num_threads);
    hz::divide(call, false);
    hz::run_all(call, hz::key_part, problem->num_key_heads, parallel, num_threads);
}

#else

HZ_API int hz_attention_runs() { return 0; }

#endif
