// AdamW on compressed states for one instruction set: included once for each, after its lanes_*.h and in its namespace.
//
// A strip of 16 groups goes through two loops, one before its scales are known and one after, with what the first leaves
// for the second in the first cache.

constexpr int64_t kPair = sizeof(Pair) / sizeof(float);
constexpr int64_t kPairsOfGroup = kBlock / kPair;

struct Strip {
    alignas(64) float firsts[kStrip];
    alignas(64) float roots[kStrip];
    alignas(64) int32_t maxima[kGroups * 16];
    alignas(64) float first_steps[kGroups];
    alignas(64) float root_steps[kGroups];
    alignas(64) float first_scales[kGroups];
};

// What all elements share.
struct Update {
    Scalars scalars;
    float decay_factor;
    // Roots are in a unit in which a gradient's part of the root is its part of the first moment: one product for both.
    float root_unit;
    // The dither, in the order of lanes, as it is added: codes are rounded to the nearest, half a code below where
    // `dither` would round them down.
    alignas(64) float first_offsets[kBlock];
    alignas(64) float root_offsets[kBlock];

    explicit inline __attribute__((always_inline)) Update(const Scalars& s, float decay, const Dither& dither)
        : scalars(s), decay_factor(decay), root_unit(s.one_minus_beta1 / std::sqrt(s.one_minus_beta2)) {
        float firsts[kBlock], roots[kBlock];
        for (int64_t i = 0; i < kBlock; ++i) firsts[i] = dither.first[i] - 0.5f;
        for (int64_t i = 0; i < kBlock; ++i) roots[i] = dither.root[i] - 0.5f;
        for (int64_t i = 0; i < kBlock; i += kPair) {
            keep(load(firsts + i), first_offsets + i);
            keep(load(roots + i), root_offsets + i);
        }
    }
};

// New roots, first moments within their bounds, and of both the largest of a group.
template <typename Grad>
HZ_INLINE void decoded_and_updated(const CompressedPlanes& planes, const Grad* __restrict grads, int64_t num_groups,
                                   const Update& update, Strip& strip) {
    const Scalars& s = update.scalars;
    const Floats of_first = all(s.one_minus_beta1 * s.grad_scale), ratio = all(s.most_ratio / update.root_unit);
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
        const Floats first_step = all(strip.first_steps[group]), square_step = all(strip.root_steps[group]);
        Ints firsts, roots;
#pragma GCC unroll 4
        for (int64_t i = 0; i < kPairsOfGroup; ++i) {
            const int64_t at = begin + i * kPair;
            const Pair grad = load(grads + at);
            const Pair code = load_codes(planes.firsts + at), square = load_squares(planes.roots + at);
            const Pair own = {of_first * grad.a, of_first * grad.b};
            const auto root_after = [&](Floats own, Floats square) {
                return least(root_of(square_step * square + own * own), largest_root);
            };
            const auto first_after = [&](Floats own, Floats code) {
                return (first_step * code) / (codes_end - magnitude_of(code)) + own;
            };
            const Pair root = {root_after(own.a, square.a), root_after(own.b, square.b)};
            const Pair free = {first_after(own.a, code.a), first_after(own.b, code.b)};
            Ints of_firsts;
            keep(within(free, {ratio * root.a, ratio * root.b}, of_firsts), strip.firsts + at);
            keep(root, strip.roots + at);
            const Ints of_roots = most(as_ints(root.a), as_ints(root.b));
            firsts = i ? most(firsts, of_firsts) : of_firsts;
            roots = i ? most(roots, of_roots) : of_roots;
        }
        keep_maxima(firsts, roots, strip.maxima + group * 16);
    }
}

HZ_INLINE void rescaled(uint16_t* __restrict scales, int64_t num_groups, float root_unit, Strip& strip) {
    alignas(64) int32_t firsts[kGroups], roots[kGroups];
    reduce_maxima(strip.maxima, firsts, roots);
    const float per_unit = 1.0f / root_unit;
    for (int64_t group = 0; group < kGroups; ++group) {
        const int32_t first = scale_bits(firsts[group], kSmallestFirst, kLargestFirst);
        const int32_t largest = bits_as<int32_t>(bits_as<float>(roots[group]) * per_unit);
        const int32_t root = scale_bits(largest, kSmallestRoot, kLargestRoot);
        strip.first_scales[group] = bits_as<float>(first);
        strip.root_steps[group] = kRootCodes / (bits_as<float>(root) * root_unit);
        firsts[group] = firsts[group] ? first >> 16 : 0;
        roots[group] = roots[group] ? root >> 16 : 0;
    }
    for (int64_t group = 0; group < num_groups; ++group) {
        scales[2 * group] = static_cast<uint16_t>(firsts[group]);
        scales[2 * group + 1] = static_cast<uint16_t>(roots[group]);
    }
}

// New masters, and the codes of moments.
HZ_INLINE void encoded(const CompressedPlanes& planes, int64_t num_groups, const Update& update, const Strip& strip) {
    const Floats decay = all(update.decay_factor), codes_end = all(kFirstCodesWithin);
    const Floats step_size = all(update.scalars.scaled_step_size * update.root_unit);
    const Floats eps = all(update.scalars.scaled_eps * update.root_unit);
    for (int64_t group = 0; group < num_groups; ++group) {
        const int64_t begin = group * kBlock;
        prefetch_block(planes.hi, begin + kCompressedAhead);
        if (group % 2) prefetch_block(planes.lo, begin + kCompressedAhead);
        const Floats scale = all(strip.first_scales[group]), steps = all(strip.root_steps[group]);
#pragma GCC unroll 4
        for (int64_t i = 0; i < kPairsOfGroup; ++i) {
            const int64_t at = begin + i * kPair;
            const Pair first = loaded(strip.firsts + at), root = loaded(strip.roots + at);
            const Pair master = merged(planes.hi + at, planes.lo + at);
            const Pair first_offset = loaded(update.first_offsets + i * kPair);
            const Pair root_offset = loaded(update.root_offsets + i * kPair);
            const auto updated = [&](Floats master, Floats first, Floats root) {
                return master * decay - (step_size * first) / (root + eps);
            };
            const auto code_of = [&](Floats first, Floats offset) {
                return (codes_end * first) / (scale + magnitude_of(first)) + offset;
            };
            split({updated(master.a, first.a, root.a), updated(master.b, first.b, root.b)}, planes.hi + at,
                  planes.lo + at);
            store_codes({code_of(first.a, first_offset.a), code_of(first.b, first_offset.b)}, planes.firsts + at);
            store_root_codes({root.a * steps + root_offset.a, root.b * steps + root_offset.b}, root, planes.roots + at);
        }
    }
}

// Whole groups, up to a strip of them: all but what `encoded` does.
template <typename Grad>
HZ_INLINE void begun(const CompressedPlanes& planes, const Grad* grads, int64_t num_groups, const Update& update,
                     Strip& strip) {
    const Scalars& s = update.scalars;
    const float of_first = s.beta1, of_root = (std::sqrt(s.beta2) * (1.0f / kRootCodes)) * update.root_unit;
    for (int64_t group = 0; group < num_groups; ++group) {
        strip.first_steps[group] = widen(planes.scales[2 * group]) * of_first;
        const float root_step = widen(planes.scales[2 * group + 1]) * of_root;
        strip.root_steps[group] = root_step * root_step;
    }
    decoded_and_updated(planes, grads, num_groups, update, strip);
    for (int64_t row = num_groups * 16; row < kGroups * 16; ++row) strip.maxima[row] = 0;
    rescaled(planes.scales, num_groups, update.root_unit, strip);
}

template <typename Grad>
HZ_INLINE void range_updated(const CompressedPlanes& planes, const Grad* grads, int64_t n, const Update& update) {
    const int64_t whole = n - n % kBlock, in_strips = n - n % kStrip;
    Strip strips[2];
    // A strip is encoded after the next one has begun, so that the processor has other work while scales are reduced.
    for (int64_t at = 0; at < in_strips + kStrip; at += kStrip) {
        const int64_t last = at - kStrip;
        // By a number of groups that the compiler knows.
        if (at < in_strips) begun(planes.from(at), grads + at, kGroups, update, strips[at / kStrip % 2]);
        if (at > 0) encoded(planes.from(last), kGroups, update, strips[last / kStrip % 2]);
    }
    const auto some_updated = [&](const CompressedPlanes& some, const Grad* of_some, int64_t num_groups) {
        begun(some, of_some, num_groups, update, strips[0]);
        encoded(some, num_groups, update, strips[0]);
    };
    if (in_strips < whole) some_updated(planes.from(in_strips), grads + in_strips, (whole - in_strips) / kBlock);
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
    some_updated({hi, lo, firsts, roots, end.scales}, own_grads, 1);
    std::memcpy(end.hi, hi, rest * sizeof(*hi));
    std::memcpy(end.lo, lo, rest);
    std::memcpy(end.firsts, firsts, rest);
    std::memcpy(end.roots, roots, rest);
}

void compressed(const CompressedPlanes& planes, const void* grads, bool grads_are_bf16, int64_t n, float decay_factor,
                const Scalars& s, const Dither& dither) {
    const Update update(s, decay_factor, dither);
    if (grads_are_bf16) {
        range_updated(planes, static_cast<const uint16_t*>(grads), n, update);
    } else {
        range_updated(planes, static_cast<const float*>(grads), n, update);
    }
}
