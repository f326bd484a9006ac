// Stored numbers and the vectors they are computed in, for the sources beside this file.

#pragma once

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

}  // namespace
