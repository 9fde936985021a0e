// Vectors of 16 fp32 numbers. A group of 32 elements is one pair of them, in the order in which unpacking words leaves
// them: `a` has the elements whose index modulo 8 is below 4, `b` the others.

using Floats = __m512;
using Ints = __m512i;

struct Pair {
    Floats a, b;
};

HZ_INLINE Floats all(float value) { return _mm512_set1_ps(value); }
HZ_INLINE Ints all(int32_t value) { return _mm512_set1_epi32(value); }
HZ_INLINE Ints as_ints(Floats value) { return _mm512_castps_si512(value); }
HZ_INLINE Floats as_floats(Ints value) { return _mm512_castsi512_ps(value); }
HZ_INLINE Floats root_of(Floats value) { return _mm512_sqrt_ps(value); }
// Of a NaN and a number, the second.
HZ_INLINE Floats least(Floats a, Floats b) { return _mm512_min_ps(a, b); }
HZ_INLINE Ints most(Ints a, Ints b) { return _mm512_max_epi32(a, b); }
HZ_INLINE Floats magnitude_of(Floats value) { return _mm512_and_ps(value, as_floats(all(0x7fffffff))); }
// Numbers with magnitudes up to `limits`, of a NaN that one; in `largest`, the larger magnitudes of two.
HZ_INLINE Pair within(Pair values, Pair limits, Ints& largest) {
    // 2: of two numbers, the smaller magnitude with the sign of the first; 11: the larger magnitude.
    const Pair found = {_mm512_range_ps(values.a, limits.a, 2), _mm512_range_ps(values.b, limits.b, 2)};
    largest = as_ints(_mm512_range_ps(found.a, found.b, 11));
    return found;
}

HZ_INLINE Pair interleaved(Ints low_words, Ints high_words) {
    return {as_floats(_mm512_unpacklo_epi16(low_words, high_words)),
            as_floats(_mm512_unpackhi_epi16(low_words, high_words))};
}

HZ_INLINE Pair load(const uint16_t* bf16_bits) {
    return interleaved(_mm512_setzero_si512(), _mm512_loadu_si512(bf16_bits));
}

HZ_INLINE Pair load(const float* values) {
    const Ints low = _mm512_loadu_si512(values), high = _mm512_loadu_si512(values + 16);
    return {as_floats(_mm512_shuffle_i32x4(low, high, 0x88)), as_floats(_mm512_shuffle_i32x4(low, high, 0xdd))};
}

HZ_INLINE Pair converted(Pair ints) {
    return {_mm512_cvtepi32_ps(as_ints(ints.a)), _mm512_cvtepi32_ps(as_ints(ints.b))};
}

// Codes, times 65,536.
HZ_INLINE Pair load_codes(const int8_t* codes) {
    const Ints words = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
    return converted(interleaved(_mm512_setzero_si512(), words));
}

HZ_INLINE Pair load_squares(const uint8_t* codes) {
    const Ints words = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
    return converted(interleaved(_mm512_mullo_epi16(words, words), _mm512_setzero_si512()));
}

HZ_INLINE Pair merged(const uint16_t* hi, const int8_t* lo) {
    const Ints low = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(lo)));
    const Ints high = _mm512_add_epi16(_mm512_loadu_si512(hi), _mm512_srai_epi16(low, 15));
    return interleaved(_mm512_slli_epi16(low, 8), high);
}

HZ_INLINE Ints guarded(Ints bits) {
    const Ints magnitude = _mm512_and_si512(bits, all(0x7fffffff));
    const Ints special = _mm512_mask_mov_epi32(all(0x7fc00000), _mm512_cmpeq_epi32_mask(magnitude, all(kInfinity)),
                                               all(kInfinity));
    const Ints finite = _mm512_min_epi32(magnitude, all(kLargest24));
    const Ints found = _mm512_mask_mov_epi32(finite, _mm512_cmpge_epi32_mask(magnitude, all(kInfinity)), special);
    return _mm512_or_si512(found, _mm512_andnot_si512(all(0x7fffffff), bits));
}

// Where the elements of a pair, in their order, have their low words: those of `b` come after all words of `a`.
struct WordOrder {
    alignas(64) int16_t low[32];

    constexpr WordOrder() : low() {
        for (int i = 0; i < 32; ++i) low[i] = static_cast<int16_t>(2 * (i / 8 * 4 + i % 4) + (i % 8 < 4 ? 0 : 32));
    }
};
static constexpr WordOrder word_order{};

HZ_INLINE void split(Pair masters, uint16_t* hi, int8_t* lo) {
    const Ints low_words = _mm512_load_si512(word_order.low);
    const Ints high_words = _mm512_add_epi16(low_words, _mm512_set1_epi16(1));
    Ints low, high;
    const auto halve = [&](Ints a, Ints b) {
        low = _mm512_permutex2var_epi16(a, low_words, b);
        high = _mm512_permutex2var_epi16(a, high_words, b);
        // From here on, rounding to 24 bits or the sign of the low word carries, and never both.
        const __mmask32 carries = _mm512_cmpge_epu16_mask(low, _mm512_set1_epi16(0x7f80));
        high = _mm512_mask_add_epi16(high, carries, high, _mm512_set1_epi16(1));
    };
    halve(as_ints(masters.a), as_ints(masters.b));
    // What needs a guard has an exponent of ones, but for NaN that no operation gives.
    const Ints exponents = _mm512_and_si512(high, all(0x7f807f80));
    if (__builtin_expect(_mm512_cmpeq_epi16_mask(exponents, all(0x7f807f80)) != 0, 0)) {
        halve(guarded(as_ints(masters.a)), guarded(as_ints(masters.b)));
    }
    const Ints bytes = _mm512_srli_epi16(_mm512_add_epi16(low, _mm512_set1_epi16(0x80)), 8);
    _mm512_storeu_si512(hi, high);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(lo), _mm512_cvtepi16_epi8(bytes));
}

HZ_INLINE Ints rounded_words(Pair values) {
    return _mm512_packs_epi32(_mm512_cvtps_epi32(values.a), _mm512_cvtps_epi32(values.b));
}

HZ_INLINE void store_codes(Pair values, int8_t* codes) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), _mm512_cvtsepi16_epi8(rounded_words(values)));
}

// A root above 0 has a code of at least 1.
HZ_INLINE void store_root_codes(Pair values, Pair roots, uint8_t* codes) {
    // Bits of a positive number, which the pack keeps above 0.
    const Ints above = _mm512_packs_epi32(as_ints(roots.a), as_ints(roots.b));
    const Ints words = _mm512_max_epi16(rounded_words(values), _mm512_min_epi16(above, _mm512_set1_epi16(1)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), _mm512_cvtusepi16_epi8(words));
}

HZ_INLINE Pair loaded(const float* pair) { return {_mm512_load_ps(pair), _mm512_load_ps(pair + 16)}; }

HZ_INLINE void keep(Pair values, float* pair) {
    _mm512_store_ps(pair, values.a);
    _mm512_store_ps(pair + 16, values.b);
}

// The maxima of one group, from 16 candidates of each kind to 8.
HZ_INLINE void keep_maxima(Ints firsts, Ints roots, int32_t* row) {
    _mm512_store_si512(row, most(_mm512_shuffle_i64x2(firsts, roots, 0x44), _mm512_shuffle_i64x2(firsts, roots, 0xee)));
}

HZ_INLINE Ints joined(Ints a, Ints b) { return most(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b)); }

// Of 16 rows of 8 candidates of each kind, the maxima.
HZ_INLINE void reduce_maxima(const int32_t* rows, int32_t* firsts, int32_t* roots) {
    Ints four[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const int32_t* const row = rows + i * 64;
        const Ints low = joined(_mm512_load_si512(row), _mm512_load_si512(row + 16));
        const Ints high = joined(_mm512_load_si512(row + 32), _mm512_load_si512(row + 48));
        four[i] = most(_mm512_unpacklo_epi64(low, high), _mm512_unpackhi_epi64(low, high));
    }
    const Ints low = most(_mm512_shuffle_i32x4(four[0], four[1], 0x88), _mm512_shuffle_i32x4(four[0], four[1], 0xdd));
    const Ints high = most(_mm512_shuffle_i32x4(four[2], four[3], 0x88), _mm512_shuffle_i32x4(four[2], four[3], 0xdd));
    _mm512_store_si512(firsts, _mm512_shuffle_i32x4(low, high, 0x88));
    _mm512_store_si512(roots, _mm512_shuffle_i32x4(low, high, 0xdd));
}
