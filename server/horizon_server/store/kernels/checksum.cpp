// The checksum of data that comes from a drive; store/checksum.py has the C ABI and the reference.
//
// Two sums in each of eight lanes of 64-bit words: of the words, and of that sum after each row, which weighs a word by
// its place (Fletcher, "An arithmetic checksum for serial transmissions", 1982). Additions alone, so that compilers
// vectorise it and memory limits it.
//
// The build reads its flags from the next line, so that a library is stale exactly when this file has changed.
// build-flags: -std=c++17 -O3 -fvisibility=hidden -fPIC -shared

#include <cstdint>
#include <cstring>

#define HZ_API extern "C" __attribute__((visibility("default")))
#if defined(__x86_64__) && defined(__gnu_linux__)
#define HZ_CLONES __attribute__((target_clones("default", "avx2")))
#else
#define HZ_CLONES
#endif

// `num_words` is a multiple of 8; `data` is aligned to 8 bytes. `sums` gets the 8 plain sums and then the 8 weighted.
HZ_API HZ_CLONES void hz_checksum(const uint64_t* data, int64_t num_words, uint64_t* sums) {
    uint64_t plain[8] = {0}, weighted[8] = {0};
    for (int64_t row = 0; row < num_words; row += 8) {
        for (int lane = 0; lane < 8; ++lane) {
            plain[lane] += data[row + lane];
            weighted[lane] += plain[lane];
        }
    }
    std::memcpy(sums, plain, sizeof(plain));
    std::memcpy(sums + 8, weighted, sizeof(weighted));
}
