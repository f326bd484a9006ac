// Attention of a part of a prompt to itself and to what stands before it, straight from the blocks of the cache.
//
// Scores and results are products with panels (tiles.h): keys with one token an output, values with one channel an
// output. All scores of a row are there before its softmax, and a row is computed alike however the prompt is cut.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "team.h"
#include "tiles.h"

namespace {

struct PromptSizes {
    int64_t num_tokens, num_before, num_kv_heads, group, head_width, block_tokens;
    float scale;
};

// The keys and values of one key head as panels.
template <typename T>
class PackedHead {
  public:
    static constexpr int64_t per_group = 4 / static_cast<int64_t>(sizeof(T));

    PackedHead(const T* keys, const T* values, const int64_t* table, int64_t head, const PromptSizes& sizes)
        : width(sizes.head_width), num_tokens((sizes.num_before + sizes.num_tokens + panel_outputs - 1) / panel_outputs *
                                              panel_outputs),
          keys_(num_tokens * width / per_group), values_(value_panels() * num_tokens / per_group * panel_outputs) {
        for (int64_t token = 0; token < sizes.num_before + sizes.num_tokens; ++token) {
            const int64_t block = table[token / sizes.block_tokens] * sizes.num_kv_heads + head;
            const int64_t at = (block * sizes.block_tokens + token % sizes.block_tokens) * width;
            take_key(keys + at, token);
            take_value(values + at, token);
        }
    }

    int64_t value_panels() const { return (width + panel_outputs - 1) / panel_outputs; }
    const uint32_t* keys(int64_t panel) const { return keys_.data() + panel * panel_outputs * width / per_group; }
    const uint32_t* values(int64_t panel) const {
        return values_.data() + panel * num_tokens / per_group * panel_outputs;
    }

  private:
    void take_key(const T* key, int64_t token) {
        uint32_t* place = keys_.data() + token / panel_outputs * panel_outputs * width / per_group + token % panel_outputs;
        for (int64_t group = 0; group < width / per_group; ++group)
            std::memcpy(place + group * panel_outputs, key + group * per_group, 4);
    }

    void take_value(const T* value, int64_t token) {
        for (int64_t channel = 0; channel < width; ++channel) {
            const int64_t panel = channel / panel_outputs * (num_tokens / per_group);
            uint32_t* place = values_.data() + (panel + token / per_group) * panel_outputs + channel % panel_outputs;
            std::memcpy(reinterpret_cast<T*>(place) + token % per_group, value + channel, sizeof(T));
        }
    }

    int64_t width, num_tokens;
    std::vector<uint32_t> keys_, values_;
};

// Softmax over the first `count` of `size` scores, the rest zero; the weights go to every `stride`-th group of `out`.
// Gives what they must be divided by.
template <typename T>
float weigh(float* scores, int64_t count, int64_t size, float scale, int64_t stride, uint32_t* out) {
    constexpr int64_t per_group = PackedHead<T>::per_group;
    float peak = -INFINITY, total = 0;
#pragma omp simd reduction(max : peak)
    for (int64_t i = 0; i < count; ++i) peak = std::max(peak, scores[i]);
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < count; ++i) {
        scores[i] = exponential((scores[i] - peak) * scale);
        total += scores[i];
    }
    std::fill(scores + count, scores + size, 0.0f);
    for (int64_t first = 0; first < size; first += lanes) {
        T weights[lanes];
        store(load(scores + first), weights);
        for (int64_t i = 0; i < lanes; i += per_group) {
            std::memcpy(out, weights + i, sizeof *out);
            out += stride;
        }
    }
    return total;
}

// Rows `first` to `last` of one query head.
template <typename T>
void attend_rows(const T* query, const PackedHead<T>& packed, int64_t query_head, int64_t first, int64_t last,
                 const PromptSizes& sizes, T* out) {
    typedef GroupsOf<T> Groups;
    constexpr int64_t per_group = PackedHead<T>::per_group;
    const int64_t rows = last - first, width = sizes.head_width, num_groups = width / per_group;
    const int64_t row_width = sizes.num_kv_heads * sizes.group * width;
    const int64_t num_panels = (sizes.num_before + last + panel_outputs - 1) / panel_outputs;
    const int64_t size = num_panels * panel_outputs;
    std::vector<uint32_t> inputs(rows * std::max(num_groups, size / per_group));
    std::vector<float> scores(rows * size);
    typename Groups::Sums sums[max_rows][2];
    for (int64_t row = 0; row < rows; ++row) {
        const T* place = query + (first + row) * row_width + query_head * width;
        for (int64_t group = 0; group < num_groups; ++group)
            std::memcpy(&inputs[group * rows + row], place + group * per_group, 4);
    }
    auto multiply = narrow_tile<Groups>(rows);
    for (int64_t panel = 0; panel < num_panels; ++panel) {
        multiply(inputs.data(), packed.keys(panel), num_groups, nullptr, 0, sums);
        for (int64_t row = 0; row < rows; ++row)
            std::memcpy(&scores[row * size + panel * panel_outputs], sums[row], sizeof sums[row]);
    }
    float totals[max_rows];
    for (int64_t row = 0; row < rows; ++row)
        totals[row] = weigh<T>(&scores[row * size], sizes.num_before + first + row + 1, size, sizes.scale, rows,
                               inputs.data() + row);
    for (int64_t panel = 0; panel < packed.value_panels(); ++panel) {
        multiply(inputs.data(), packed.values(panel), size / per_group, nullptr, 0, sums);
        for (int64_t row = 0; row < rows; ++row) {
            float values[panel_outputs];
            std::memcpy(values, sums[row], sizeof values);
            T* place = out + (first + row) * row_width + query_head * width + panel * panel_outputs;
            for (int64_t i = 0; i < std::min(panel_outputs, width - panel * panel_outputs); ++i)
                store(values[i] / totals[row], place[i]);
        }
    }
}

template <typename T>
void attend_prompt(const T* query, const T* keys, const T* values, const int64_t* table, const PromptSizes& sizes,
                   T* out) {
    std::vector<std::unique_ptr<PackedHead<T>>> heads(sizes.num_kv_heads);
    const int64_t num_tiles = (sizes.num_tokens + max_rows - 1) / max_rows, num_heads = sizes.num_kv_heads * sizes.group;
    Team& team = Team::instance();
    team.run(sizes.num_kv_heads,
             [&](int64_t head) { heads[head] = std::make_unique<PackedHead<T>>(keys, values, table, head, sizes); });
    share(num_heads * num_tiles, 4, [&](int64_t first, int64_t last) {
        for (int64_t piece = first; piece < last; ++piece) {
            const int64_t head = piece / num_tiles, tile = piece % num_tiles;
            attend_rows(query, *heads[head / sizes.group], head, tile * sizes.num_tokens / num_tiles,
                        (tile + 1) * sizes.num_tokens / num_tiles, sizes, out);
        }
    });
}

}  // namespace
