// Stored numbers and the vectors they are computed in, for the sources beside this file.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

struct BFloat16 {
    uint16_t bits;
};

inline float wide(float value) { return value; }

inline float wide(BFloat16 value) {
    uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

inline void store(float value, float& place) { place = value; }

inline void store(float value, BFloat16& place) {  // to nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    place.bits = static_cast<uint16_t>(value != value ? 0x7fc0 : rounded);
}

// e ** x for x <= 88, relative error below 2e-7: 2 ** n times the Taylor series of the rest, |rest| <= ln(2) / 2.
inline float exponential(float x) {
    float bounded = x > -87.0f ? x : -87.0f;
    float n = std::nearbyint(bounded * 1.44269504f);
    float rest = bounded - n * 0.693359375f + n * 2.12194440e-4f;  // ln(2) in two parts, the first exact in n
    float series = 1.0f / 5040;
    series = series * rest + 1.0f / 720;
    series = series * rest + 1.0f / 120;
    series = series * rest + 1.0f / 24;
    series = series * rest + 1.0f / 6;
    series = series * rest + 0.5f;
    series = series * rest + 1.0f;
    series = series * rest + 1.0f;
    int32_t exponent = (static_cast<int32_t>(n) + 127) << 23;
    float power;
    std::memcpy(&power, &exponent, sizeof power);
    return x == x ? series * power : x;
}

// Sixteen lanes, which compilers split on processors with narrower registers.
constexpr int64_t lanes = 16;
typedef float Lanes __attribute__((vector_size(lanes * sizeof(float))));
typedef uint16_t HalfLanes __attribute__((vector_size(lanes * sizeof(uint16_t))));
typedef uint32_t BitLanes __attribute__((vector_size(lanes * sizeof(uint32_t))));

inline Lanes load(const float* place) {
    Lanes result;
    std::memcpy(&result, place, sizeof result);
    return result;
}

inline Lanes load(const BFloat16* place) {
    HalfLanes half;
    std::memcpy(&half, place, sizeof half);
    const BitLanes bits = __builtin_convertvector(half, BitLanes) << 16;
    Lanes result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

inline void store(Lanes values, float* place) { std::memcpy(place, &values, sizeof values); }

inline void store(Lanes values, BFloat16* place) {  // as one by one
    BitLanes bits;
    std::memcpy(&bits, &values, sizeof bits);
    const BitLanes rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const HalfLanes half = __builtin_convertvector(values == values ? rounded : BitLanes{} + 0x7fc0, HalfLanes);
    std::memcpy(place, &half, sizeof half);
}

template <typename To, typename From>
inline To as(From value) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To result;
    std::memcpy(&result, &value, sizeof result);
    return result;
}

inline BitLanes load_bits(const void* place) {
    BitLanes result;
    std::memcpy(&result, place, sizeof result);
    return result;
}

// The sums of sixteen vectors, each in a lane: neighbours are added, four times, while two vectors become one.
inline Lanes sums_of(const Lanes (&rows)[lanes]) {
    typedef int32_t Places __attribute__((vector_size(lanes * sizeof(int32_t))));
    const Places own[] = {{0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30},
                          {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29},
                          {0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27},
                          {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}};
    Lanes sums[lanes];
    std::memcpy(sums, rows, sizeof sums);
#pragma GCC unroll 4
    for (int level = 0; level < 4; ++level)
#pragma GCC unroll 8
        for (int i = 0; i < lanes >> (level + 1); ++i)
            sums[i] = __builtin_shuffle(sums[2 * i], sums[2 * i + 1], own[level]) +
                      __builtin_shuffle(sums[2 * i], sums[2 * i + 1], own[level] + (1 << level));
    return sums[0];
}

}  // namespace
