// A few rows of numbers times a panel of weights, all sums kept in registers.
//
// Weights are read as groups of four bytes along the inputs: one float32, two bfloat16 or four int8. A panel holds 32
// outputs, group by group, so that one vector instruction takes a group of 16 outputs, and memory is read in order:
//
//     panel 0   group 0: outputs 0 .. 31 │ group 1: outputs 0 .. 31 │ ...
//     panel 1   group 0: outputs 32 .. 63 │ ...                          zeros behind the last output
//
// A row's sums are made in the same order whatever stands beside it: neighbours never change a result.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX512BF16__) || defined(__AVX512VNNI__)
#include <immintrin.h>
#endif

#include "lanes.h"

namespace {

constexpr int64_t panel_outputs = 2 * lanes;
constexpr int max_rows = 13;     // of a tile: 26 sums, two weights and an input fill 32 registers
constexpr int64_t ahead = 2048;  // bytes; measured: fetching so far ahead reaches the full bandwidth
typedef int32_t IntegerLanes __attribute__((vector_size(lanes * sizeof(int32_t))));

struct Float32Groups {
    typedef Lanes Sums;
    static Sums add(Sums sums, BitLanes weights, BitLanes inputs) { return sums + as<Lanes>(weights) * as<Lanes>(inputs); }
    static Sums add(Sums sums, BitLanes weights, uint32_t input) { return sums + as<Lanes>(weights) * as<float>(input); }
};

struct BFloat16Groups {
    typedef Lanes Sums;
    static Sums add(Sums sums, BitLanes weights, BitLanes inputs) {
#ifdef __AVX512BF16__
        return (Lanes)_mm512_dpbf16_ps((__m512)sums, as<__m512bh>(weights), as<__m512bh>(inputs));
#else
        sums += as<Lanes>(weights << 16) * as<Lanes>(inputs << 16);
        return sums + as<Lanes>(weights & 0xffff0000u) * as<Lanes>(inputs & 0xffff0000u);
#endif
    }
    static Sums add(Sums sums, BitLanes weights, uint32_t input) { return add(sums, weights, BitLanes{} + input); }
};

struct Int8Groups {  // inputs from 0 to 255, weights from -127 to 127
    typedef IntegerLanes Sums;
    static Sums add(Sums sums, BitLanes weights, uint32_t input) {
#ifdef __AVX512VNNI__
        return (Sums)_mm512_dpbusd_epi32((__m512i)sums, _mm512_set1_epi32(input), (__m512i)weights);
#else
        for (int shift = 0; shift < 32; shift += 8)
            sums += ((IntegerLanes)(weights << (24 - shift)) >> 24) * static_cast<int32_t>(input >> shift & 0xff);
        return sums;
#endif
    }
};

template <typename T>
using GroupsOf = std::conditional_t<std::is_same<T, float>::value, Float32Groups, BFloat16Groups>;

// `rows` inputs times `panels` panels, which lie one behind the other. Of a single panel `step` bytes a group are
// fetched from `next` on. Of several, memory's own prefetching follows each; for a single row it must look further.
template <typename Groups, int rows, int panels>
void multiply_tile(const uint32_t* input, const uint32_t* panel, int64_t num_groups, const char* next, int64_t step,
                   typename Groups::Sums (*out)[2]) {
    typename Groups::Sums sums[panels * rows][2];
    for (auto& pair : sums) pair[0] = pair[1] = typename Groups::Sums{};
    for (int64_t group = 0; group < num_groups; ++group, input += rows, panel += panel_outputs) {
        if (panels == 1) {
            __builtin_prefetch(next, 0, 2);
            if (step > 64) __builtin_prefetch(next + 64, 0, 2);
            next += step;
        }
#pragma GCC unroll 8
        for (int p = 0; p < panels; ++p) {
            const uint32_t* place = panel + p * num_groups * panel_outputs;
            if (panels > 1 && rows == 1) {
                __builtin_prefetch(reinterpret_cast<const char*>(place) + ahead, 0, 2);
                __builtin_prefetch(reinterpret_cast<const char*>(place) + ahead + 64, 0, 2);
            }
            const BitLanes low = load_bits(place), high = load_bits(place + lanes);
#pragma GCC unroll 16
            for (int row = 0; row < rows; ++row) {
                sums[p * rows + row][0] = Groups::add(sums[p * rows + row][0], low, input[row]);
                sums[p * rows + row][1] = Groups::add(sums[p * rows + row][1], high, input[row]);
            }
        }
    }
    for (int i = 0; i < panels * rows; ++i) std::memcpy(out[i], sums[i], sizeof sums[i]);
}

template <typename Groups>
using Tile = void (*)(const uint32_t*, const uint32_t*, int64_t, const char*, int64_t, typename Groups::Sums (*)[2]);

template <typename Groups>
Tile<Groups> narrow_tile(int64_t rows) {
    static constexpr Tile<Groups> tiles[] = {
        nullptr,
        multiply_tile<Groups, 1, 1>,
        multiply_tile<Groups, 2, 1>,
        multiply_tile<Groups, 3, 1>,
        multiply_tile<Groups, 4, 1>,
        multiply_tile<Groups, 5, 1>,
        multiply_tile<Groups, 6, 1>,
        multiply_tile<Groups, 7, 1>,
        multiply_tile<Groups, 8, 1>,
        multiply_tile<Groups, 9, 1>,
        multiply_tile<Groups, 10, 1>,
        multiply_tile<Groups, 11, 1>,
        multiply_tile<Groups, 12, 1>,
        multiply_tile<Groups, 13, 1>,
    };
    static_assert(sizeof tiles / sizeof *tiles == max_rows + 1, "one for each number of rows");
    return tiles[rows];
}

}  // namespace
