// Matrix products with weights laid out once, at memory speed for few rows and at the processor's peak for many.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "team.h"
#include "tiles.h"

namespace {

// With few rows several panels are read at once, which keeps more of memory busy; the numbers are measured.
constexpr int64_t most_wide_rows = 4, most_panels = 8;
constexpr int64_t panels_of_a_piece = 8;
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
        share(count, 4, [&](int64_t begin, int64_t end) {
            for (int64_t tile = begin; tile < end; ++tile) {
                uint32_t* place = memory.data() + first(tile) * num_groups;
                for (int64_t group = 0; group < num_groups; ++group)
                    for (int64_t row = first(tile); row < first(tile + 1); ++row)
                        *place++ = rows[row * num_groups + group];
            }
        });
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
    const bool is_small = num_rows * num_groups * num_outputs <= 65536;
    share(num_panels, is_small ? num_panels : panels_of_a_piece, [&](int64_t first, int64_t last) {
        multiply_panels<Groups>(tiles, packed, first, last, finish);
    });
}

// inputs (n, in) times weights (out, in), plus a bias (out,) or null.
template <typename T>
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
    multiply<GroupsOf<T>>(reinterpret_cast<const uint32_t*>(inputs), packed, num_rows, num_groups, num_outputs, finish);
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
    share(num_rows, rows_of(num_inputs), [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row)
            row_steps[row] = quantize_row(inputs + row * num_inputs, num_inputs, bytes.data() + row * num_inputs);
    });
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
