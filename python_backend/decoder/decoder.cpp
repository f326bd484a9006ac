// The decoder's arithmetic on a CPU: what Python calls, and a whole step of decodes in one call.
//
// Plain C++17 with threads, so that any compiler builds it in a few seconds for the machine it runs on. All tensors are
// contiguous; `native.py` and `linear.py` describe them.

#include <cstdint>
#include <vector>

#include "operators.h"
#include "products.h"
#include "prompts.h"

namespace {

// As `_Weight`, `_Layer` and `_Model` in fused.py.
struct Weight {
    const uint32_t* packed;
    const void* bias;      // null: none
    const float* steps;    // null: not int8
    const int32_t* totals;
    int64_t num_inputs, num_outputs;
};

struct Layer {
    const void *input_norm, *mlp_norm;
    Weight qkv, output, gate_up, down;
    void *keys, *values;
};

struct Model {
    int64_t num_layers, width, mlp_width, num_heads, num_kv_heads, head_width, block_tokens;
    const float *cosine, *sine;
    float epsilon, scale;
};

struct Decodes {
    int64_t count, max_blocks;
    const int64_t *positions, *blocks, *tables, *lengths;
};

template <typename T>
void multiply(const T* inputs, const Weight& weight, int64_t num_rows, T* out) {
    const T* bias = static_cast<const T*>(weight.bias);
    if (weight.steps == nullptr)
        product(inputs, weight.packed, bias, num_rows, weight.num_inputs, weight.num_outputs, out);
    else
        product_int8(inputs, weight.packed, weight.steps, weight.totals, bias, num_rows, weight.num_inputs,
                     weight.num_outputs, out);
}

// What the layers make of `hidden` (n, width), which they change; `out` (n, width) is the last norm of it.
template <typename T>
void decode(const Model& model, const Layer* layers, const T* norm, const Decodes& step, T* hidden, T* out) {
    const int64_t n = step.count, query_width = model.num_heads * model.head_width;
    const RotationSizes rotation{model.num_heads, model.num_kv_heads, model.head_width, model.block_tokens};
    const AttentionSizes attention{model.num_kv_heads, model.num_heads / model.num_kv_heads, model.head_width,
                                   model.block_tokens, step.max_blocks,                      model.scale};
    std::vector<T> heads(n * (query_width + 2 * model.num_kv_heads * model.head_width)), query(n * query_width);
    std::vector<T> attended(n * query_width), both(n * 2 * model.mlp_width), gated(n * model.mlp_width);
    std::vector<T> added(n * model.width);
    for (int64_t index = 0; index < model.num_layers; ++index) {
        const Layer& layer = layers[index];
        T *keys = static_cast<T*>(layer.keys), *values = static_cast<T*>(layer.values);
        add_and_norm(hidden, index == 0 ? nullptr : added.data(), static_cast<const T*>(layer.input_norm), out, n,
                     model.width, model.epsilon);
        multiply(out, layer.qkv, n, heads.data());
        rotate_and_store(heads.data(), model.cosine, model.sine, step.positions, step.blocks, n, rotation,
                         query.data(), keys, values);
        attend_decodes(query.data(), keys, values, step.tables, step.lengths, n, attention, attended.data());
        multiply(attended.data(), layer.output, n, added.data());
        add_and_norm(hidden, added.data(), static_cast<const T*>(layer.mlp_norm), out, n, model.width, model.epsilon);
        multiply(out, layer.gate_up, n, both.data());
        gate(both.data(), gated.data(), n, model.mlp_width);
        multiply(gated.data(), layer.down, n, added.data());
    }
    add_and_norm(hidden, added.data(), norm, out, n, model.width, model.epsilon);
}

}  // namespace

// Weights (out, groups) into panels; `packed` has zeros where the last panel has no outputs.
extern "C" void pack(const uint32_t* weights, int64_t num_outputs, int64_t num_groups, uint32_t* packed) {
    Team::instance().run((num_outputs + panel_outputs - 1) / panel_outputs, [&](int64_t panel) {
        for (int64_t group = 0; group < num_groups; ++group)
            for (int64_t i = 0; i < panel_outputs; ++i) {
                const int64_t output = panel * panel_outputs + i;
                if (output < num_outputs)
                    packed[(panel * num_groups + group) * panel_outputs + i] = weights[output * num_groups + group];
            }
    });
}

#define OPERATORS(T, suffix)                                                                                    \
    extern "C" void attend_decodes_##suffix(const T* query, const T* keys, const T* values,                     \
                                            const int64_t* tables, const int64_t* lengths,                      \
                                            int64_t num_sequences, int64_t num_kv_heads, int64_t group,         \
                                            int64_t head_width, int64_t block_tokens, int64_t max_blocks,       \
                                            float scale, T* out) {                                              \
        attend_decodes<T>(query, keys, values, tables, lengths, num_sequences,                                  \
                          {num_kv_heads, group, head_width, block_tokens, max_blocks, scale}, out);             \
    }                                                                                                           \
    extern "C" void add_and_norm_##suffix(T* hidden, const T* added, const T* weight, T* out, int64_t num_rows, \
                                          int64_t width, float epsilon) {                                       \
        add_and_norm<T>(hidden, added, weight, out, num_rows, width, epsilon);                                  \
    }                                                                                                           \
    extern "C" void gate_##suffix(const T* gate_up, T* out, int64_t num_rows, int64_t width) {                  \
        gate<T>(gate_up, out, num_rows, width);                                                                 \
    }                                                                                                           \
    extern "C" void rotate_and_store_##suffix(                                                                  \
        const T* heads, const float* cosine, const float* sine, const int64_t* positions,                       \
        const int64_t* blocks, int64_t num_rows, int64_t num_heads, int64_t num_kv_heads, int64_t head_width,   \
        int64_t block_tokens, T* query, T* keys, T* values) {                                                   \
        rotate_and_store<T>(heads, cosine, sine, positions, blocks, num_rows,                                   \
                            {num_heads, num_kv_heads, head_width, block_tokens}, query, keys, values);          \
    } \
    extern "C" void attend_prompt_##suffix(const T* query, const T* keys, const T* values, const int64_t* table,     \
                                           int64_t num_tokens, int64_t num_before, int64_t num_kv_heads,             \
                                           int64_t group, int64_t head_width, int64_t block_tokens, float scale,     \
                                           T* out) {                                                                 \
        attend_prompt<T>(query, keys, values, table,                                                                 \
                         {num_tokens, num_before, num_kv_heads, group, head_width, block_tokens, scale}, out);       \
    }                                                                                                                \
    extern "C" void product_##suffix(const T* inputs, const uint32_t* packed, const T* bias, int64_t num_rows,       \
                                     int64_t num_inputs, int64_t num_outputs, T* out) {                              \
        product(inputs, packed, bias, num_rows, num_inputs, num_outputs, out);                                       \
    }                                                                                                                \
    extern "C" void product_int8_##suffix(const T* inputs, const uint32_t* packed, const float* steps,               \
                                          const int32_t* totals, const T* bias, int64_t num_rows,                    \
                                          int64_t num_inputs, int64_t num_outputs, T* out) {                         \
        product_int8(inputs, packed, steps, totals, bias, num_rows, num_inputs, num_outputs, out);                   \
    }                                                                                                                \
    extern "C" void decode_##suffix(const Model* model, const Layer* layers, const T* norm, const Decodes* step,     \
                                    T* hidden, T* out) {                                                             \
        decode(*model, layers, norm, *step, hidden, out);                                                            \
    }

OPERATORS(float, float32)
OPERATORS(BFloat16, bfloat16)
