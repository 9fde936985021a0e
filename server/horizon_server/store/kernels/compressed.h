// AdamW on compressed states for one instruction set: included once for each, after its lanes_*.h and in its namespace.
//
// A strip of 16 groups goes through four short loops, with what one leaves for the next in the first cache. One loop
// would have so long a chain of operations per element that the processor's window held few elements and waited for
// divisions.

constexpr int64_t kPair = sizeof(Pair) / sizeof(float);
constexpr int64_t kPairsOfGroup = kBlock / kPair;

struct Strip {
    alignas(64) float firsts[kStrip];
    alignas(64) float signs[kStrip];
    alignas(64) float roots[kStrip];
    alignas(64) int32_t maxima[kGroups * 16];
    alignas(64) float first_steps[kGroups];
    alignas(64) float root_steps[kGroups];
};

// The dither, in the order of lanes, as it is added: codes are rounded to the nearest, half a code below where `dither`
// would round them down.
struct Offsets {
    alignas(64) float first[kBlock];
    alignas(64) float root[kBlock];

    explicit inline __attribute__((always_inline)) Offsets(const Dither& dither) {
        float firsts[kBlock], roots[kBlock];
        for (int64_t i = 0; i < kBlock; ++i) firsts[i] = dither.first[i] + (kFirstCodes - 0.5f);
        for (int64_t i = 0; i < kBlock; ++i) roots[i] = dither.root[i] - 0.5f;
        for (int64_t i = 0; i < kBlock; i += kPair) {
            keep(load(firsts + i), first + i);
            keep(load(roots + i), root + i);
        }
    }
};

// The new roots, and in `signs` the first moments before they are bounded.
template <typename Grad>
HZ_INLINE void decoded_and_updated(const CompressedPlanes& planes, const Grad* __restrict grads, int64_t num_groups,
                                   const Scalars& s, Strip& strip) {
    const Floats of_first = all(s.one_minus_beta1 * s.grad_scale);
    const Floats of_root = all(std::sqrt(s.one_minus_beta2) * s.grad_scale);
    const Floats codes_end = all(kFirstCodes * 65536.0f), largest_root = all(bits_as<float>(kLargestRoot));
    for (int64_t group = 0; group < num_groups; ++group) {
        const int64_t begin = group * kBlock;
        prefetch_block(grads, begin + kCompressedAhead);
        // Two groups of codes are a cache line.
        if (group % 2) {
            prefetch_block(planes.firsts, begin + kCompressedAhead);
        } else {
            prefetch_block(planes.roots, begin + kCompressedAhead);
        }
        const Floats first_step = all(strip.first_steps[group]), root_step = all(strip.root_steps[group]);
#pragma GCC unroll 4
        for (int64_t i = 0; i < kPairsOfGroup; ++i) {
            const int64_t at = begin + i * kPair;
            const Pair grad = load(grads + at);
            const Pair code = load_codes(planes.firsts + at), root = load_codes(planes.roots + at);
            const auto square_of = [&](Floats grad, Floats code) {
                const Floats last = root_step * code, own = of_root * grad;
                return least(root_of(last * last + own * own), largest_root);
            };
            const auto first_of = [&](Floats grad, Floats code) {
                return (first_step * code) / (codes_end - magnitude_of(code)) + of_first * grad;
            };
            keep({first_of(grad.a, code.a), first_of(grad.b, code.b)}, strip.signs + at);
            keep({square_of(grad.a, root.a), square_of(grad.b, root.b)}, strip.roots + at);
        }
    }
}

// First moments within their bounds, without their signs, and the largest of a group.
HZ_INLINE void bounded(int64_t num_groups, const Scalars& s, Strip& strip) {
    const Floats ratio = all(s.most_ratio);
    for (int64_t group = 0; group < num_groups; ++group) {
        Ints firsts, roots;
#pragma GCC unroll 4
        for (int64_t i = 0; i < kPairsOfGroup; ++i) {
            const int64_t at = group * kBlock + i * kPair;
            const Pair root = loaded(strip.roots + at), free = loaded(strip.signs + at);
            const Pair first = {least(magnitude_of(free.a), ratio * root.a),
                                least(magnitude_of(free.b), ratio * root.b)};
            keep(first, strip.firsts + at);
            const Ints of_firsts = most(as_ints(first.a), as_ints(first.b));
            const Ints of_roots = most(as_ints(root.a), as_ints(root.b));
            firsts = i ? most(firsts, of_firsts) : of_firsts;
            roots = i ? most(roots, of_roots) : of_roots;
        }
        keep_maxima(firsts, roots, strip.maxima + group * 16);
    }
}

HZ_INLINE void masters_updated(const CompressedPlanes& planes, int64_t num_groups, float decay_factor, const Scalars& s,
                               const Strip& strip) {
    const Floats decay = all(decay_factor), step_size = all(s.scaled_step_size), eps = all(s.scaled_eps);
    for (int64_t at = 0; at < num_groups * kBlock; at += kPair) {
        if (at % kBlock == 0) prefetch_block(planes.hi, at + kCompressedAhead);
        if (at % (2 * kBlock) == 0) prefetch_block(planes.lo, at + kCompressedAhead);
        const Pair first = loaded(strip.firsts + at), sign = loaded(strip.signs + at), root = loaded(strip.roots + at);
        const Pair master = merged(planes.hi + at, planes.lo + at);
        const auto updated = [&](Floats master, Floats first, Floats sign, Floats root) {
            return master * decay - (step_size * turned_as(first, sign)) / (root + eps);
        };
        split({updated(master.a, first.a, sign.a, root.a), updated(master.b, first.b, sign.b, root.b)}, planes.hi + at,
              planes.lo + at);
    }
}

HZ_INLINE void rescaled(uint16_t* __restrict scales, int64_t num_groups, Strip& strip) {
    alignas(64) int32_t firsts[kGroups], roots[kGroups];
    reduce_maxima(strip.maxima, firsts, roots);
    for (int64_t group = 0; group < kGroups; ++group) {
        const int32_t first = scale_bits(firsts[group], kSmallestFirst, kLargestFirst);
        const int32_t root = scale_bits(roots[group], kSmallestRoot, kLargestRoot);
        strip.first_steps[group] = 1.0f / bits_as<float>(first);
        strip.root_steps[group] = kRootCodes / bits_as<float>(root);
        firsts[group] = firsts[group] ? first >> 16 : 0;
        roots[group] = roots[group] ? root >> 16 : 0;
    }
    for (int64_t group = 0; group < num_groups; ++group) {
        scales[2 * group] = static_cast<uint16_t>(firsts[group]);
        scales[2 * group + 1] = static_cast<uint16_t>(roots[group]);
    }
}

HZ_INLINE void encoded(const CompressedPlanes& planes, int64_t num_groups, const Offsets& offsets, const Strip& strip) {
    const Floats codes_end = all(kFirstCodes), one = all(1.0f);
    for (int64_t group = 0; group < num_groups; ++group) {
        const Floats per_scale = all(strip.first_steps[group]), steps = all(strip.root_steps[group]);
#pragma GCC unroll 4
        for (int64_t i = 0; i < kPairsOfGroup; ++i) {
            const int64_t at = group * kBlock + i * kPair;
            const Pair first = loaded(strip.firsts + at), sign = loaded(strip.signs + at);
            const Pair root = loaded(strip.roots + at);
            const Pair first_offset = loaded(offsets.first + i * kPair), root_offset = loaded(offsets.root + i * kPair);
            const auto code_of = [&](Floats first, Floats sign, Floats offset) {
                return turned_as(offset - codes_end / (one + first * per_scale), sign);
            };
            store_codes({code_of(first.a, sign.a, first_offset.a), code_of(first.b, sign.b, first_offset.b)},
                        planes.firsts + at);
            store_root_codes({root.a * steps + root_offset.a, root.b * steps + root_offset.b}, root, planes.roots + at);
        }
    }
}

// Whole groups, up to a strip of them.
template <typename Grad>
HZ_INLINE void strip_updated(const CompressedPlanes& planes, const Grad* grads, int64_t num_groups, float decay_factor,
                             const Scalars& s, const Offsets& offsets) {
    Strip strip;
    const float of_first = s.beta1, of_root = std::sqrt(s.beta2) * (1.0f / kRootCodes);
    for (int64_t group = 0; group < num_groups; ++group) {
        strip.first_steps[group] = widen(planes.scales[2 * group]) * of_first;
        strip.root_steps[group] = (widen(planes.scales[2 * group + 1]) * of_root) * (1.0f / 65536.0f);
    }
    decoded_and_updated(planes, grads, num_groups, s, strip);
    bounded(num_groups, s, strip);
    masters_updated(planes, num_groups, decay_factor, s, strip);
    for (int64_t row = num_groups * 16; row < kGroups * 16; ++row) strip.maxima[row] = 0;
    rescaled(planes.scales, num_groups, strip);
    encoded(planes, num_groups, offsets, strip);
}

template <typename Grad>
HZ_INLINE void range_updated(const CompressedPlanes& planes, const Grad* grads, int64_t n, float decay_factor,
                             const Scalars& s, const Dither& dither) {
    const Offsets offsets(dither);
    const int64_t whole = n - n % kBlock;
    int64_t at = 0;
    // By a number that the compiler knows.
    for (; at + kStrip <= whole; at += kStrip) {
        strip_updated(planes.from(at), grads + at, kGroups, decay_factor, s, offsets);
    }
    if (at < whole) strip_updated(planes.from(at), grads + at, (whole - at) / kBlock, decay_factor, s, offsets);
    if (whole == n) return;
    // A tensor's last block, with zeros after its end, which change nothing of the others.
    const CompressedPlanes end = planes.from(whole);
    const int64_t rest = n - whole;
    uint16_t hi[kBlock] = {};
    int8_t lo[kBlock] = {}, firsts[kBlock] = {};
    uint8_t roots[kBlock] = {};
    Grad own_grads[kBlock] = {};
    std::memcpy(hi, end.hi, rest * sizeof(*hi));
    std::memcpy(lo, end.lo, rest);
    std::memcpy(firsts, end.firsts, rest);
    std::memcpy(roots, end.roots, rest);
    std::memcpy(own_grads, grads + whole, rest * sizeof(*grads));
    const Grad* const from = own_grads;
    strip_updated({hi, lo, firsts, roots, end.scales}, from, 1, decay_factor, s, offsets);
    std::memcpy(end.hi, hi, rest * sizeof(*hi));
    std::memcpy(end.lo, lo, rest);
    std::memcpy(end.firsts, firsts, rest);
    std::memcpy(end.roots, roots, rest);
}

void compressed(const CompressedPlanes& planes, const void* grads, bool grads_are_bf16, int64_t n, float decay_factor,
                const Scalars& s, const Dither& dither) {
    if (grads_are_bf16) {
        range_updated(planes, static_cast<const uint16_t*>(grads), n, decay_factor, s, dither);
    } else {
        range_updated(planes, static_cast<const float*>(grads), n, decay_factor, s, dither);
    }
}
