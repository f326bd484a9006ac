// The decoder's operators between the matrix products, for CPUs: one pass over memory each.
//
// Values are computed in float32 whatever they are stored in. A value that is not finite stays so: the engine
// looks for it in the logits. Names of sizes as in model.py; all tensors are contiguous.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "team.h"
#include "tiles.h"

namespace {

struct AttentionSizes {
    int64_t num_kv_heads, group, head_width, block_tokens, max_blocks;
    float scale;
};

// A row of a head is read 64 bytes at a time, the last of them filled up with zeros; each gives `parts_of` vectors,
// for bfloat16 one of the even channels and one of the odd.
template <typename T>
constexpr int64_t parts_of = 4 / static_cast<int64_t>(sizeof(T));
template <typename T>
constexpr int64_t channels_of = lanes * parts_of<T>;

inline Lanes part(BitLanes bits, int64_t, float) { return as<Lanes>(bits); }
inline Lanes part(BitLanes bits, int64_t odd, BFloat16) { return as<Lanes>(odd ? bits & 0xffff0000u : bits << 16); }

template <typename T, int fixed>
BitLanes load_channels(const T* row, int64_t index, int64_t width) {
    const int64_t first = index * channels_of<T>;
    if (fixed || first + channels_of<T> <= width) return load_bits(row + first);
    BitLanes result{};
    std::memcpy(&result, row + first, (width - first) * sizeof(T));
    return result;
}

// Softmax state of one query head, kept up block by block (arXiv:2205.14135).
template <typename T>
struct Running {
    const T* query;
    Lanes* sums;     // values so far, weighted: part by part
    float highest;   // largest score so far
    float total;     // sum of the weights
};

// The scores of up to sixteen keys; of the others minus infinity. `fixed` is the loads of a row, 0 for any number.
template <typename T, int fixed>
Lanes score_keys(const T* query, const T* keys, int64_t count, int64_t width, float scale) {
    const int64_t num_loads = fixed ? fixed : (width + channels_of<T> - 1) / channels_of<T>;
    auto dot = [&](int64_t token) {
        Lanes sums{};
        for (int64_t i = 0; i < num_loads; ++i)
            sums = GroupsOf<T>::add(sums, load_channels<T, fixed>(keys + token * width, i, width),
                                    load_channels<T, fixed>(query, i, width));
        return sums;
    };
    Lanes dots[lanes];
    if (count == lanes) {
#pragma GCC unroll 16
        for (int64_t token = 0; token < lanes; ++token) dots[token] = dot(token);
        return sums_of(dots) * scale;
    }
    for (int64_t token = 0; token < lanes; ++token) dots[token] = token < count ? dot(token) : Lanes{};
    Lanes scores = sums_of(dots) * scale;
    for (int64_t token = count; token < lanes; ++token) scores[token] = -INFINITY;
    return scores;
}

// Up to sixteen keys and values of one key head.
template <typename T, int fixed>
void attend_tokens(const T* keys, const T* values, int64_t count, int64_t width, float scale, Running<T>& run) {
    float weights[lanes];
    const Lanes scores = score_keys<T, fixed>(run.query, keys, count, width, scale);
    std::memcpy(weights, &scores, sizeof weights);
    float peak = run.highest, added = 0;
#pragma omp simd reduction(max : peak)
    for (int64_t t = 0; t < lanes; ++t) peak = weights[t] > peak ? weights[t] : peak;
#pragma omp simd reduction(+ : added)
    for (int64_t t = 0; t < lanes; ++t) {
        weights[t] = exponential(weights[t] - peak);
        added += weights[t];
    }
    const float correction = exponential(run.highest - peak);
    run.total = run.total * correction + added;
    run.highest = peak;
    const int64_t num_loads = fixed ? fixed : (width + channels_of<T> - 1) / channels_of<T>;
    constexpr int64_t at_once = fixed ? fixed : 1, parts = parts_of<T>;
    for (int64_t first = 0; first < num_loads; first += at_once) {
        Lanes results[at_once * parts];
        for (int64_t i = 0; i < at_once * parts; ++i) results[i] = run.sums[first * parts + i] * correction;
        for (int64_t t = 0; t < count; ++t)
            for (int64_t i = 0; i < at_once; ++i) {
                const BitLanes bits = load_channels<T, fixed>(values + t * width, first + i, width);
                for (int64_t p = 0; p < parts; ++p) results[i * parts + p] += weights[t] * part(bits, p, T{});
            }
        std::memcpy(run.sums + first * parts, results, sizeof results);
    }
}

// Key heads `first_head` to `last_head` of one sequence. Heads are the inner loop, since those of a block lie
// one behind the other: memory is read in long runs.
template <typename T, int fixed>
void attend_heads(const T* query, const T* keys, const T* values, const int64_t* table, int64_t length,
                  int64_t first_head, int64_t last_head, const AttentionSizes& sizes, T* out) {
    const int64_t group = sizes.group, width = sizes.head_width, tokens = sizes.block_tokens;
    const int64_t num_heads = last_head - first_head, offset = first_head * group * width;
    const int64_t num_sums = (width + channels_of<T> - 1) / channels_of<T> * parts_of<T>;
    std::vector<Lanes> sums(num_heads * group * num_sums);
    std::vector<Running<T>> runs(num_heads * group);
    for (int64_t q = 0; q < num_heads * group; ++q)
        runs[q] = {query + offset + q * width, sums.data() + q * num_sums, -INFINITY, 0.0f};
    const int64_t num_blocks = (length + tokens - 1) / tokens;
    for (int64_t block = 0; block < num_blocks; ++block)
        for (int64_t h = 0; h < num_heads; ++h) {
            const int64_t at = (table[block] * sizes.num_kv_heads + first_head + h) * tokens * width;
            const int64_t count = std::min(tokens, length - block * tokens);
            for (int64_t g = 0; g < group; ++g)
                for (int64_t t = 0; t < count; t += lanes)
                    attend_tokens<T, fixed>(keys + at + t * width, values + at + t * width, std::min(lanes, count - t),
                                            width, sizes.scale, runs[h * group + g]);
        }
    for (int64_t q = 0; q < num_heads * group; ++q)
        for (int64_t i = 0; i < width; ++i) {
            const int64_t load = i / channels_of<T>, channel = i % channels_of<T>;
            const Lanes& sum = runs[q].sums[load * parts_of<T> + channel % parts_of<T>];
            store(sum[channel / parts_of<T>] / runs[q].total, out[offset + q * width + i]);
        }
}

template <typename T>
void attend_decodes(const T* query, const T* keys, const T* values, const int64_t* tables,
                    const int64_t* lengths, int64_t num_sequences, const AttentionSizes& sizes, T* out) {
    const int64_t row = sizes.num_kv_heads * sizes.group * sizes.head_width;
    const int64_t threads = omp_get_max_threads();
    const int64_t parts = std::min(sizes.num_kv_heads, (threads - 1) / num_sequences + 1);
    auto attend = sizes.head_width == 64    ? attend_heads<T, 64 / channels_of<T>>
                  : sizes.head_width == 128 ? attend_heads<T, 128 / channels_of<T>>
                                            : attend_heads<T, 0>;
    Team::instance().run(num_sequences * parts, [&](int64_t piece) {
        const int64_t b = piece / parts, part = piece % parts;
        attend(query + b * row, keys, values, tables + b * sizes.max_blocks, lengths[b],
               part * sizes.num_kv_heads / parts, (part + 1) * sizes.num_kv_heads / parts, sizes, out + b * row);
    });
}

// hidden += added (where given); out = hidden / root mean square * weight.
template <typename T>
void add_and_norm(T* hidden, const T* added, const T* weight, T* out, int64_t num_rows, int64_t width,
                  float epsilon) {
    share(num_rows, rows_of(width), [&](int64_t first, int64_t last) {
        for (int64_t n = first; n < last; ++n) {
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
    });
}

// out = silu(gate) * up, where a row of `gate_up` is both, one behind the other.
template <typename T>
void gate(const T* gate_up, T* out, int64_t num_rows, int64_t width) {
    share(num_rows, rows_of(width), [&](int64_t first, int64_t last) {
        for (int64_t n = first; n < last; ++n) {
            const T* row = gate_up + 2 * n * width;
            T* result = out + n * width;
#pragma omp simd
            for (int64_t i = 0; i < width; ++i) {
                const float value = wide(row[i]);
                const float away = value > -80.0f ? -value : 80.0f;
                store(value / (1.0f + exponential(away)) * wide(row[width + i]), result[i]);
            }
        }
    });
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
    share(num_rows, rows_of(sizes.num_heads * width), [&](int64_t first, int64_t last) {
        for (int64_t n = first; n < last; ++n) {
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
    });
}

}  // namespace
