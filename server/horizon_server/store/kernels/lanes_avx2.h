// Vectors of 8 fp32 numbers. Pairs of them are 16 elements, in the order in which unpacking words leaves them: `a` has
// the elements whose index modulo 8 is below 4, `b` the others.

using Floats = __m256;
using Ints = __m256i;

struct Pair {
    Floats a, b;
};

HZ_INLINE Floats all(float value) { return _mm256_set1_ps(value); }
HZ_INLINE Ints all(int32_t value) { return _mm256_set1_epi32(value); }
HZ_INLINE Ints as_ints(Floats value) { return _mm256_castps_si256(value); }
HZ_INLINE Floats as_floats(Ints value) { return _mm256_castsi256_ps(value); }
HZ_INLINE Floats root_of(Floats value) { return _mm256_sqrt_ps(value); }
// Of a NaN and a number, the second.
HZ_INLINE Floats least(Floats a, Floats b) { return _mm256_min_ps(a, b); }
HZ_INLINE Ints most(Ints a, Ints b) { return _mm256_max_epi32(a, b); }
HZ_INLINE Floats magnitude_of(Floats value) { return _mm256_and_ps(value, as_floats(all(0x7fffffff))); }
// Numbers with magnitudes up to `most`, of a NaN that one; in `largest`, the larger magnitudes of two.
HZ_INLINE Pair within(Pair values, Pair limits, Ints& largest) {
    const Floats signs = as_floats(all(0x7fffffff));
    const Floats a = least(magnitude_of(values.a), limits.a), b = least(magnitude_of(values.b), limits.b);
    largest = most(as_ints(a), as_ints(b));
    return {_mm256_or_ps(a, _mm256_andnot_ps(signs, values.a)), _mm256_or_ps(b, _mm256_andnot_ps(signs, values.b))};
}

HZ_INLINE Ints load_ints(const void* at) { return _mm256_loadu_si256(static_cast<const __m256i*>(at)); }
HZ_INLINE __m128i load_bytes(const void* at) { return _mm_loadu_si128(static_cast<const __m128i*>(at)); }

HZ_INLINE Pair interleaved(Ints low_words, Ints high_words) {
    return {as_floats(_mm256_unpacklo_epi16(low_words, high_words)),
            as_floats(_mm256_unpackhi_epi16(low_words, high_words))};
}

HZ_INLINE Pair load(const uint16_t* bf16_bits) { return interleaved(_mm256_setzero_si256(), load_ints(bf16_bits)); }

HZ_INLINE Pair load(const float* values) {
    const Ints low = load_ints(values), high = load_ints(values + 8);
    return {as_floats(_mm256_permute2x128_si256(low, high, 0x20)),
            as_floats(_mm256_permute2x128_si256(low, high, 0x31))};
}

HZ_INLINE Pair converted(Pair ints) {
    return {_mm256_cvtepi32_ps(as_ints(ints.a)), _mm256_cvtepi32_ps(as_ints(ints.b))};
}

// Codes, times 65,536.
HZ_INLINE Pair load_codes(const int8_t* codes) {
    return converted(interleaved(_mm256_setzero_si256(), _mm256_cvtepi8_epi16(load_bytes(codes))));
}

HZ_INLINE Pair load_squares(const uint8_t* codes) {
    const Ints words = _mm256_cvtepu8_epi16(load_bytes(codes));
    return converted(interleaved(_mm256_mullo_epi16(words, words), _mm256_setzero_si256()));
}

HZ_INLINE Pair merged(const uint16_t* hi, const int8_t* lo) {
    const Ints low = _mm256_cvtepi8_epi16(load_bytes(lo));
    const Ints high = _mm256_add_epi16(load_ints(hi), _mm256_srai_epi16(low, 15));
    return interleaved(_mm256_slli_epi16(low, 8), high);
}

HZ_INLINE Ints guarded(Ints bits) {
    const Ints magnitude = _mm256_and_si256(bits, all(0x7fffffff));
    const Ints is_infinity = _mm256_cmpeq_epi32(magnitude, all(kInfinity));
    const Ints special = _mm256_blendv_epi8(all(0x7fc00000), all(kInfinity), is_infinity);
    const Ints finite = _mm256_min_epi32(magnitude, all(kLargest24));
    const Ints found = _mm256_blendv_epi8(finite, special, _mm256_cmpgt_epi32(magnitude, all(kInfinity - 1)));
    return _mm256_or_si256(found, _mm256_andnot_si256(all(0x7fffffff), bits));
}

// Sixteen bytes of words that are in the order of elements.
HZ_INLINE __m128i low_bytes(Ints packed) {
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}

HZ_INLINE void split(Pair masters, uint16_t* hi, int8_t* lo) {
    Ints rounded, high;
    const auto halve = [&](Ints a, Ints b) {
        const Ints low_words = all(0xffff);
        const Ints low = _mm256_packus_epi32(_mm256_and_si256(a, low_words), _mm256_and_si256(b, low_words));
        rounded = _mm256_add_epi16(low, _mm256_set1_epi16(0x80));
        // From 0x7f80 on, rounding to 24 bits or the sign of the low word carries, and never both.
        const Ints carries = _mm256_srli_epi16(_mm256_or_si256(low, rounded), 15);
        high = _mm256_add_epi16(_mm256_packus_epi32(_mm256_srli_epi32(a, 16), _mm256_srli_epi32(b, 16)), carries);
    };
    halve(as_ints(masters.a), as_ints(masters.b));
    // What needs a guard has an exponent of ones, but for NaN that no operation gives.
    const Ints exponents = _mm256_and_si256(high, all(0x7f807f80));
    if (__builtin_expect(_mm256_movemask_epi8(_mm256_cmpeq_epi16(exponents, all(0x7f807f80))) != 0, 0)) {
        halve(guarded(as_ints(masters.a)), guarded(as_ints(masters.b)));
    }
    const Ints low = _mm256_srai_epi16(rounded, 8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(hi), high);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(lo), low_bytes(_mm256_packs_epi16(low, low)));
}

HZ_INLINE void store_codes(Pair values, int8_t* codes) {
    const Ints words = _mm256_packs_epi32(_mm256_cvtps_epi32(values.a), _mm256_cvtps_epi32(values.b));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), low_bytes(_mm256_packs_epi16(words, words)));
}

// A root above 0 has a code of at least 1.
HZ_INLINE void store_root_codes(Pair values, Pair roots, uint8_t* codes) {
    const Ints a = most(_mm256_cvtps_epi32(values.a), _mm256_min_epi32(as_ints(roots.a), all(1)));
    const Ints b = most(_mm256_cvtps_epi32(values.b), _mm256_min_epi32(as_ints(roots.b), all(1)));
    const Ints words = _mm256_packs_epi32(a, b);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), low_bytes(_mm256_packus_epi16(words, words)));
}

HZ_INLINE Pair loaded(const float* pair) { return {_mm256_load_ps(pair), _mm256_load_ps(pair + 8)}; }

HZ_INLINE void keep(Pair values, float* pair) {
    _mm256_store_ps(pair, values.a);
    _mm256_store_ps(pair + 8, values.b);
}

HZ_INLINE void store_ints(Ints value, int32_t* at) { _mm256_store_si256(reinterpret_cast<__m256i*>(at), value); }

HZ_INLINE void keep_maxima(Ints firsts, Ints roots, int32_t* row) {
    store_ints(firsts, row);
    store_ints(roots, row + 8);
}

HZ_INLINE Ints joined(Ints a, Ints b) { return most(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b)); }

// Of four rows, in each half of a vector: what halves of a row give.
HZ_INLINE Ints of_four(const int32_t* rows) {
    const Ints low = joined(load_ints(rows), load_ints(rows + 16));
    const Ints high = joined(load_ints(rows + 32), load_ints(rows + 48));
    return most(_mm256_unpacklo_epi64(low, high), _mm256_unpackhi_epi64(low, high));
}

// Of 16 rows of 8 candidates of each kind, the maxima.
HZ_INLINE void reduce_maxima(const int32_t* rows, int32_t* firsts, int32_t* roots) {
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
        for (int kind = 0; kind < 2; ++kind) {
            const Ints low = of_four(rows + i * 128 + kind * 8), high = of_four(rows + i * 128 + 64 + kind * 8);
            store_ints(most(_mm256_permute2x128_si256(low, high, 0x20), _mm256_permute2x128_si256(low, high, 0x31)),
                       (kind ? roots : firsts) + i * 8);
        }
    }
}
