// Matrix products with weights laid out once, at memory speed for few rows and at the processor's peak for many.
//
// Weights are read as groups of four bytes along the inputs: one float32, two bfloat16 or four int8. A panel holds 32
// outputs, group by group, so that one vector instruction takes a group of 16 outputs, and memory is read in order:
//
//     panel 0   group 0: outputs 0 .. 31 │ group 1: outputs 0 .. 31 │ ...
//     panel 1   group 0: outputs 32 .. 63 │ ...                          zeros behind the last output
//
// A row's sums are made in the same order whatever stands beside it: neighbours never change a result.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX512BF16__) || defined(__AVX512VNNI__)
#include <immintrin.h>
#endif

#include "lanes.h"

namespace {

constexpr int64_t panel_outputs = 2 * lanes;
constexpr int max_rows = 13;     // of a tile: 26 sums, two weights and an input fill 32 registers
constexpr int64_t ahead = 2048;  // bytes; measured: fetching so far ahead reaches the full bandwidth
typedef int32_t IntegerLanes __attribute__((vector_size(lanes * sizeof(int32_t))));

template <typename To, typename From>
inline To as(From value) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To result;
    std::memcpy(&result, &value, sizeof result);
    return result;
}

inline BitLanes load_bits(const uint32_t* place) {
    BitLanes result;
    std::memcpy(&result, place, sizeof result);
    return result;
}

struct Float32Groups {
    typedef Lanes Sums;
    static Sums add(Sums sums, BitLanes weights, uint32_t input) { return sums + as<Lanes>(weights) * as<float>(input); }
};

struct BFloat16Groups {
    typedef Lanes Sums;
    static Sums add(Sums sums, BitLanes weights, uint32_t input) {
#ifdef __AVX512BF16__
        return (Lanes)_mm512_dpbf16_ps((__m512)sums, as<__m512bh>(weights), as<__m512bh>(_mm512_set1_epi32(input)));
#else
        sums += as<Lanes>(weights << 16) * as<float>(input << 16);
        return sums + as<Lanes>(weights & 0xffff0000u) * as<float>(input & 0xffff0000u);
#endif
    }
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

// With few rows several panels are read at once, which keeps more of memory busy; the numbers are measured.
constexpr int64_t most_wide_rows = 4, most_panels = 8;
constexpr int panels_at_once(int64_t rows) { return rows == 1 ? 8 : rows <= 3 ? 4 : 3; }

template <typename Groups>
Tile<Groups> wide_tile(int64_t rows) {
    static constexpr Tile<Groups> tiles[] = {
        nullptr,
        multiply_tile<Groups, 1, panels_at_once(1)>,
        multiply_tile<Groups, 2, panels_at_once(2)>,
        multiply_tile<Groups, 3, panels_at_once(3)>,
        multiply_tile<Groups, 4, panels_at_once(4)>,
    };
    static_assert(sizeof tiles / sizeof *tiles == most_wide_rows + 1, "one for each number of rows");
    return tiles[rows];
}

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

// The rows of a product in tiles of nearly equal numbers, each with its inputs group by group.
struct Tiles {
    int64_t num_rows, num_groups, count;
    const uint32_t* inputs;
    std::vector<uint32_t> memory;

    Tiles(const uint32_t* rows, int64_t num_rows, int64_t num_groups)
        : num_rows(num_rows), num_groups(num_groups), count((num_rows + max_rows - 1) / max_rows), inputs(rows) {
        if (num_rows == 1) return;
        memory.resize(num_rows * num_groups);
        inputs = memory.data();
#pragma omp parallel for if (count > 4)
        for (int64_t tile = 0; tile < count; ++tile) {
            uint32_t* place = memory.data() + first(tile) * num_groups;
            for (int64_t group = 0; group < num_groups; ++group)
                for (int64_t row = first(tile); row < first(tile + 1); ++row) *place++ = rows[row * num_groups + group];
        }
    }

    int64_t first(int64_t tile) const { return tile * num_rows / count; }
    int64_t rows(int64_t tile) const { return first(tile + 1) - first(tile); }
    const uint32_t* start(int64_t tile) const { return inputs + first(tile) * num_groups; }
};

// Panels `panel` to `last`: calls finish(row, panel, sums) with the 32 sums of each row and panel.
template <typename Groups, typename Finish>
void multiply_panels(const Tiles& tiles, const uint32_t* packed, int64_t panel, int64_t last, Finish finish) {
    const int64_t size = tiles.num_groups * panel_outputs;
    const bool is_wide = tiles.num_rows <= most_wide_rows;
    const int64_t at_once = panels_at_once(tiles.num_rows);
    typename Groups::Sums sums[max_rows][2];
    static_assert(max_rows >= most_panels && max_rows >= 3 * most_wide_rows, "room for either kind of tile");
    for (; is_wide && panel + at_once <= last; panel += at_once) {
        wide_tile<Groups>(tiles.num_rows)(tiles.start(0), packed + panel * size, tiles.num_groups, nullptr, 0, sums);
        for (int64_t p = 0; p < at_once; ++p)
            for (int64_t row = 0; row < tiles.num_rows; ++row) finish(row, panel + p, sums[p * tiles.num_rows + row]);
    }
    // While one panel is multiplied with the tiles, the next one comes in, so that neither waits for the other.
    for (; panel < last; ++panel)
        for (int64_t tile = 0; tile < tiles.count; ++tile) {
            const char* next = reinterpret_cast<const char*>(packed + (panel + 1) * size);
            const int64_t bytes = size * static_cast<int64_t>(sizeof(uint32_t));
            narrow_tile<Groups>(tiles.rows(tile))(tiles.start(tile), packed + panel * size, tiles.num_groups,
                                                  next + tile * bytes / tiles.count, 128 / tiles.count, sums);
            for (int64_t row = 0; row < tiles.rows(tile); ++row) finish(tiles.first(tile) + row, panel, sums[row]);
        }
}

template <typename Groups, typename Finish>
void multiply(const uint32_t* inputs, const uint32_t* packed, int64_t num_rows, int64_t num_groups,
              int64_t num_outputs, Finish finish) {
    if (num_rows == 0) return;
    const Tiles tiles(inputs, num_rows, num_groups);
    const int64_t num_panels = (num_outputs + panel_outputs - 1) / panel_outputs;
#pragma omp parallel if (num_rows * num_groups * num_outputs > 65536)
    {
        const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
        multiply_panels<Groups>(tiles, packed, thread * num_panels / threads, (thread + 1) * num_panels / threads,
                                finish);
    }
}

// inputs (n, in) times weights (out, in), plus a bias (out,) or null.
template <typename Groups, typename T>
void product(const T* inputs, const uint32_t* packed, const T* bias, int64_t num_rows, int64_t num_inputs,
             int64_t num_outputs, T* out) {
    const int64_t num_groups = num_inputs * static_cast<int64_t>(sizeof(T)) / 4;
    auto finish = [=](int64_t row, int64_t panel, const Lanes* sums) {
        const int64_t first = panel * panel_outputs, count = std::min(panel_outputs, num_outputs - first);
        T* place = out + row * num_outputs + first;
        float values[panel_outputs];
        std::memcpy(values, sums, sizeof values);
        for (int64_t i = 0; i < count; ++i) store(values[i] + (bias == nullptr ? 0.0f : wide(bias[first + i])), place[i]);
    };
    multiply<Groups>(reinterpret_cast<const uint32_t*>(inputs), packed, num_rows, num_groups, num_outputs, finish);
}

// A row as bytes from 1 to 255, where 128 is zero; gives the value of one step. A value that is not finite makes the
// step so, and with it the whole row of the product.
template <typename T>
float quantize_row(const T* row, int64_t count, uint8_t* bytes) {
    float peak = 0, check = 0;
#pragma omp simd reduction(max : peak) reduction(+ : check)
    for (int64_t i = 0; i < count; ++i) {
        peak = std::max(peak, std::fabs(wide(row[i])));
        check += wide(row[i]) * 0.0f;
    }
    const float inverse = peak > 0 && check == 0 ? 127 / peak : 0;
#pragma omp simd
    for (int64_t i = 0; i < count; ++i)
        bytes[i] = static_cast<uint8_t>(static_cast<int32_t>(wide(row[i]) * inverse + 128.5f));
    return peak / 127 + check;
}

// The same with int8 weights: `steps` (out,) has the value of one step of each output's weights, `totals` (out,) their
// sums. Rows are quantized on the way.
template <typename T>
void product_int8(const T* inputs, const uint32_t* packed, const float* steps, const int32_t* totals, const T* bias,
                  int64_t num_rows, int64_t num_inputs, int64_t num_outputs, T* out) {
    std::vector<uint8_t> bytes(num_rows * num_inputs);
    std::vector<float> row_steps(num_rows);
#pragma omp parallel for if (num_rows * num_inputs > 65536)
    for (int64_t row = 0; row < num_rows; ++row)
        row_steps[row] = quantize_row(inputs + row * num_inputs, num_inputs, bytes.data() + row * num_inputs);
    auto finish = [&](int64_t row, int64_t panel, const IntegerLanes* sums) {
        const int64_t first = panel * panel_outputs, count = std::min(panel_outputs, num_outputs - first);
        T* place = out + row * num_outputs + first;
        int32_t values[panel_outputs];
        std::memcpy(values, sums, sizeof values);
        for (int64_t i = 0; i < count; ++i) {
            const float value = static_cast<float>(values[i] - 128 * totals[first + i]) * (steps[first + i] * row_steps[row]);
            store(value + (bias == nullptr ? 0.0f : wide(bias[first + i])), place[i]);
        }
    };
    multiply<Int8Groups>(reinterpret_cast<const uint32_t*>(bytes.data()), packed, num_rows, num_inputs / 4, num_outputs,
                         finish);
}

}  // namespace

// Weights (out, groups) into panels; `packed` has zeros where the last panel has no outputs.
extern "C" void pack(const uint32_t* weights, int64_t num_outputs, int64_t num_groups, uint32_t* packed) {
#pragma omp parallel for
    for (int64_t panel = 0; panel < (num_outputs + panel_outputs - 1) / panel_outputs; ++panel)
        for (int64_t group = 0; group < num_groups; ++group)
            for (int64_t i = 0; i < panel_outputs; ++i) {
                const int64_t output = panel * panel_outputs + i;
                if (output < num_outputs)
                    packed[(panel * num_groups + group) * panel_outputs + i] = weights[output * num_groups + group];
            }
}

#define PRODUCTS(T, Groups, suffix)                                                                                  \
    extern "C" void product_##suffix(const T* inputs, const uint32_t* packed, const T* bias, int64_t num_rows,       \
                                     int64_t num_inputs, int64_t num_outputs, T* out) {                              \
        product<Groups>(inputs, packed, bias, num_rows, num_inputs, num_outputs, out);                               \
    }                                                                                                                \
    extern "C" void product_int8_##suffix(const T* inputs, const uint32_t* packed, const float* steps,               \
                                          const int32_t* totals, const T* bias, int64_t num_rows, int64_t num_inputs, \
                                          int64_t num_outputs, T* out) {                                             \
        product_int8(inputs, packed, steps, totals, bias, num_rows, num_inputs, num_outputs, out);                   \
    }

PRODUCTS(float, Float32Groups, float32)
PRODUCTS(BFloat16, BFloat16Groups, bfloat16)
