// Vectors of 4 fp32 numbers, which every compiler has; pairs of them are 8 elements in their order. For processors that
// no other file of lanes is for.

typedef float Floats __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));

struct Pair {
    Floats a, b;
};

HZ_INLINE Floats all(float value) { return Floats{value, value, value, value}; }
HZ_INLINE Ints all(int32_t value) { return Ints{value, value, value, value}; }
HZ_INLINE Ints as_ints(Floats value) { return reinterpret_cast<Ints>(value); }
HZ_INLINE Floats as_floats(Ints value) { return reinterpret_cast<Floats>(value); }
HZ_INLINE Floats root_of(Floats value) {
    return Floats{std::sqrt(value[0]), std::sqrt(value[1]), std::sqrt(value[2]), std::sqrt(value[3])};
}
// Of a NaN and a number, the second.
HZ_INLINE Floats least(Floats a, Floats b) { return a < b ? a : b; }
HZ_INLINE Ints least(Ints a, Ints b) { return a < b ? a : b; }
HZ_INLINE Ints most(Ints a, Ints b) { return a > b ? a : b; }
HZ_INLINE Floats magnitude_of(Floats value) { return as_floats(as_ints(value) & 0x7fffffff); }
// Numbers with magnitudes up to `limits`, of a NaN that one; in `largest`, the larger magnitudes of two.
HZ_INLINE Pair within(Pair values, Pair limits, Ints& largest) {
    const Ints signs = ~all(0x7fffffff);
    const Ints a = as_ints(least(magnitude_of(values.a), limits.a));
    const Ints b = as_ints(least(magnitude_of(values.b), limits.b));
    largest = most(a, b);
    return {as_floats(a | (as_ints(values.a) & signs)), as_floats(b | (as_ints(values.b) & signs))};
}

template <typename Value>
HZ_INLINE Ints four_ints(const Value* values) {
    return Ints{values[0], values[1], values[2], values[3]};
}

template <typename Value>
HZ_INLINE Floats four_floats(const Value* values, float factor) {
    return Floats{values[0] * factor, values[1] * factor, values[2] * factor, values[3] * factor};
}

HZ_INLINE Pair load(const uint16_t* bf16_bits) {
    return {as_floats(four_ints(bf16_bits) << 16), as_floats(four_ints(bf16_bits + 4) << 16)};
}

HZ_INLINE Pair load(const float* values) { return {four_floats(values, 1.0f), four_floats(values + 4, 1.0f)}; }

// Codes, times 65,536.
HZ_INLINE Pair load_codes(const int8_t* codes) {
    return {four_floats(codes, 65536.0f), four_floats(codes + 4, 65536.0f)};
}

HZ_INLINE Pair load_squares(const uint8_t* codes) {
    const Pair values = {four_floats(codes, 1.0f), four_floats(codes + 4, 1.0f)};
    return {values.a * values.a, values.b * values.b};
}

HZ_INLINE Pair merged(const uint16_t* hi, const int8_t* lo) {
    return {as_floats((four_ints(hi) << 16) + four_ints(lo) * 256),
            as_floats((four_ints(hi + 4) << 16) + four_ints(lo + 4) * 256)};
}

HZ_INLINE void split(Pair masters, uint16_t* hi, int8_t* lo) {
    for (int i = 0; i < 4; ++i) {
        split_one(masters.a[i], hi[i], lo[i]);
        split_one(masters.b[i], hi[4 + i], lo[4 + i]);
    }
}

// To the nearest, the even one of two: the sum has no place for fractions.
HZ_INLINE Ints rounded(Floats value) { return as_ints(value + all(12582912.0f)) - 0x4b400000; }

template <typename Code>
HZ_INLINE void store_bytes(Ints a, Ints b, Code* codes) {
    for (int i = 0; i < 4; ++i) {
        codes[i] = static_cast<Code>(a[i]);
        codes[4 + i] = static_cast<Code>(b[i]);
    }
}

HZ_INLINE void store_codes(Pair values, int8_t* codes) { store_bytes(rounded(values.a), rounded(values.b), codes); }

// A root above 0 has a code of at least 1.
HZ_INLINE Ints root_code(Floats value, Floats root) {
    return least(most(rounded(value), least(as_ints(root), all(1))), all(255));
}

HZ_INLINE void store_root_codes(Pair values, Pair roots, uint8_t* codes) {
    store_bytes(root_code(values.a, roots.a), root_code(values.b, roots.b), codes);
}

HZ_INLINE Pair loaded(const float* pair) { return load(pair); }

HZ_INLINE void keep(Pair values, float* pair) { std::memcpy(pair, &values, sizeof(values)); }

HZ_INLINE void keep_maxima(Ints firsts, Ints roots, int32_t* row) {
    std::memcpy(row, &firsts, sizeof(firsts));
    std::memcpy(row + 8, &roots, sizeof(roots));
}

HZ_INLINE int32_t largest_of_four(const int32_t* row) {
    const int32_t low = row[0] > row[1] ? row[0] : row[1], high = row[2] > row[3] ? row[2] : row[3];
    return low > high ? low : high;
}

HZ_INLINE void reduce_maxima(const int32_t* rows, int32_t* firsts, int32_t* roots) {
    for (int i = 0; i < 16; ++i) {
        firsts[i] = largest_of_four(rows + i * 16);
        roots[i] = largest_of_four(rows + i * 16 + 8);
    }
}
