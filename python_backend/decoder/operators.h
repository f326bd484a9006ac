// The decoder's operators between the matrix products, for CPUs: one pass over memory each.
//
// Values are computed in float32 whatever they are stored in. A value that is not finite stays so: the engine
// looks for it in the logits. Names of sizes as in model.py; all tensors are contiguous.

#pragma once

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "lanes.h"

namespace {

struct AttentionSizes {
    int64_t num_kv_heads, group, head_width, block_tokens, max_blocks;
    float scale;
};

inline float sum_of(Lanes value) {
    typedef float Eight __attribute__((vector_size(32)));
    typedef float Four __attribute__((vector_size(16)));
    Eight eight[2];
    std::memcpy(eight, &value, sizeof value);
    eight[0] += eight[1];
    Four four[2];
    std::memcpy(four, eight, sizeof four);
    four[0] += four[1];
    return (four[0][0] + four[0][2]) + (four[0][1] + four[0][3]);
}

// Softmax state of the query heads that share one key head, kept up block by block (arXiv:2205.14135).
struct Running {
    float* queries;  // (group, width), scaled
    float* sums;     // (group, width): values so far, weighted
    float* highest;  // (group,): largest score so far
    float* total;    // (group,): sum of the weights
};

// One block of one key head: `count` keys and values.
// `fixed` is the lane groups in a head, 0 for any number.
template <typename T, int fixed>
void attend_block(const T* key, const T* value, int64_t count, int64_t group, int64_t width, const Running& run,
                  float* scores) {
    const int64_t parts = fixed ? fixed : width / lanes;
    for (int64_t g = 0; g < group; ++g) {
        const float* query = run.queries + g * width;
        float peak = run.highest[g];
        for (int64_t t = 0; t < count; ++t) {
            Lanes dot = load(query) * load(key + t * width);
            for (int64_t part = 1; part < parts; ++part)
                dot += load(query + part * lanes) * load(key + t * width + part * lanes);
            scores[t] = sum_of(dot);
            peak = scores[t] > peak ? scores[t] : peak;
        }
        const float correction = exponential(run.highest[g] - peak);
        float added = 0;
#pragma omp simd reduction(+ : added)
        for (int64_t t = 0; t < count; ++t) {
            scores[t] = exponential(scores[t] - peak);
            added += scores[t];
        }
        run.total[g] = run.total[g] * correction + added;
        run.highest[g] = peak;
        constexpr int64_t step = fixed ? fixed : 1;
        Lanes result[step];
        for (int64_t part = 0; part < parts; part += step) {
            float* sum = run.sums + g * width + part * lanes;
            for (int64_t i = 0; i < step; ++i) result[i] = load(sum + i * lanes) * correction;
            for (int64_t t = 0; t < count; ++t)
                for (int64_t i = 0; i < step; ++i)
                    result[i] += scores[t] * load(value + t * width + (part + i) * lanes);
            std::memcpy(sum, result, sizeof result);
        }
    }
}

// Key heads `first_head` to `last_head` of one sequence. Heads are the inner loop, since those of a block lie
// one behind the other: memory is read in long runs.
template <typename T, int fixed>
void attend_heads(const T* query, const T* keys, const T* values, const int64_t* table, int64_t length,
                  int64_t first_head, int64_t last_head, const AttentionSizes& sizes, T* out) {
    const int64_t group = sizes.group, width = sizes.head_width, tokens = sizes.block_tokens;
    const int64_t num_queries = (last_head - first_head) * group, offset = first_head * group * width;
    std::vector<float> memory(num_queries * (2 * width + 2) + tokens, 0.0f);
    float* queries = memory.data();
    float* sums = queries + num_queries * width;
    float* highest = sums + num_queries * width;
    float* total = highest + num_queries;
    for (int64_t i = 0; i < num_queries * width; ++i) queries[i] = wide(query[offset + i]) * sizes.scale;
    std::fill_n(highest, num_queries, -INFINITY);
    for (int64_t first = 0; first < length; first += tokens) {
        const int64_t start = table[first / tokens] * sizes.num_kv_heads;
        for (int64_t h = first_head; h < last_head; ++h) {
            const int64_t at = (start + h) * tokens * width, row = (h - first_head) * group;
            attend_block<T, fixed>(keys + at, values + at, std::min(tokens, length - first), group, width,
                                   {queries + row * width, sums + row * width, highest + row, total + row},
                                   total + num_queries);
        }
    }
    for (int64_t q = 0; q < num_queries; ++q)
        for (int64_t i = 0; i < width; ++i)
            store(sums[q * width + i] / total[q], out[offset + q * width + i]);
}

template <typename T>
void attend_decodes(const T* query, const T* keys, const T* values, const int64_t* tables,
                    const int64_t* lengths, int64_t num_sequences, const AttentionSizes& sizes, T* out) {
    const int64_t row = sizes.num_kv_heads * sizes.group * sizes.head_width;
    const int64_t threads = omp_get_max_threads();
    const int64_t parts = std::min(sizes.num_kv_heads, (threads - 1) / num_sequences + 1);
    auto attend = sizes.head_width == 4 * lanes   ? attend_heads<T, 4>
                  : sizes.head_width == 8 * lanes ? attend_heads<T, 8>
                                                  : attend_heads<T, 0>;
#pragma omp parallel for collapse(2) schedule(dynamic, 1)
    for (int64_t b = 0; b < num_sequences; ++b)
        for (int64_t part = 0; part < parts; ++part)
            attend(query + b * row, keys, values, tables + b * sizes.max_blocks, lengths[b],
                   part * sizes.num_kv_heads / parts, (part + 1) * sizes.num_kv_heads / parts, sizes,
                   out + b * row);
}

// hidden += added (where given); out = hidden / root mean square * weight.
template <typename T>
void add_and_norm(T* hidden, const T* added, const T* weight, T* out, int64_t num_rows, int64_t width,
                  float epsilon) {
#pragma omp parallel for if (num_rows * width > 65536)
    for (int64_t n = 0; n < num_rows; ++n) {
        T* row = hidden + n * width;
        if (added != nullptr) {
            const T* more = added + n * width;
#pragma omp simd
            for (int64_t i = 0; i < width; ++i) store(wide(row[i]) + wide(more[i]), row[i]);
        }
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < width; ++i) squares += wide(row[i]) * wide(row[i]);
        const float factor = 1.0f / std::sqrt(squares / static_cast<float>(width) + epsilon);
        T* result = out + n * width;
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) store(wide(row[i]) * factor * wide(weight[i]), result[i]);
    }
}

// out = silu(gate) * up, where a row of `gate_up` is both, one behind the other.
template <typename T>
void gate(const T* gate_up, T* out, int64_t num_rows, int64_t width) {
#pragma omp parallel for if (num_rows * width > 65536)
    for (int64_t n = 0; n < num_rows; ++n) {
        const T* row = gate_up + 2 * n * width;
        T* result = out + n * width;
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) {
            const float value = wide(row[i]);
            const float away = value > -80.0f ? -value : 80.0f;
            store(value / (1.0f + exponential(away)) * wide(row[width + i]), result[i]);
        }
    }
}

struct RotationSizes {
    int64_t num_heads, num_kv_heads, head_width, block_tokens;
};

template <typename T>
void rotate_head(const T* head, const float* cosine, const float* sine, int64_t width, T* out) {
    const int64_t half = width / 2;
#pragma omp simd
    for (int64_t i = 0; i < half; ++i) {
        const float first = wide(head[i]), second = wide(head[half + i]);
        store(first * cosine[i] - second * sine[i], out[i]);
        store(second * cosine[half + i] + first * sine[half + i], out[half + i]);
    }
}

// Queries turned into `query`, keys turned and values as they are into their places in the cache.
template <typename T>
void rotate_and_store(const T* heads, const float* cosine, const float* sine, const int64_t* positions,
                      const int64_t* blocks, int64_t num_rows, const RotationSizes& sizes, T* query, T* keys,
                      T* values) {
    const int64_t width = sizes.head_width, tokens = sizes.block_tokens;
#pragma omp parallel for if (num_rows * sizes.num_heads * width > 65536)
    for (int64_t n = 0; n < num_rows; ++n) {
        const T* row = heads + n * (sizes.num_heads + 2 * sizes.num_kv_heads) * width;
        const float* c = cosine + positions[n] * width;
        const float* s = sine + positions[n] * width;
        for (int64_t h = 0; h < sizes.num_heads; ++h)
            rotate_head(row + h * width, c, s, width, query + (n * sizes.num_heads + h) * width);
        const T* key = row + sizes.num_heads * width;
        const T* value = key + sizes.num_kv_heads * width;
        for (int64_t h = 0; h < sizes.num_kv_heads; ++h) {
            const int64_t at = (blocks[n] * sizes.num_kv_heads + h) * tokens + positions[n] % tokens;
            rotate_head(key + h * width, c, s, width, keys + at * width);
            std::copy_n(value + h * width, width, values + at * width);
        }
    }
}

}  // namespace
