// Fused loops over contiguous float32 tensors, compiled for this machine by `nn.kernel_library`.
//
// Each reads and writes memory once where a chain of torch's operations does so several times. Threads share the
// elements or rows of large tensors; the result does not depend on their number. Plain loops, which compilers
// vectorize: `omp simd` allows them to reorder the sums of a row. Products and attention name vectors, of any machine's
// width.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include <omp.h>

#include "attention.h"
#include "norms.h"
#include "products.h"
#include "vectors.h"

namespace {

// The standard normal distribution at x: GELU is x × cdf, its derivative cdf + x × density.
struct Normal {
    float cdf, density;
};

// Abramowitz and Stegun 1964, formula 7.1.26, as in torch. One exponential serves both.
inline Normal normal_at(float x) {
    const float bell = exp_of(-0.5f * x * x);
    const float t = 1.0f / (1.0f + 0.3275911f * 0.70710678f * std::fabs(x));
    float sum = 1.061405429f;
    sum = sum * t - 1.453152027f;
    sum = sum * t + 1.421413741f;
    sum = sum * t - 0.284496736f;
    sum = sum * t + 0.254829592f;
    const float tail = 0.5f * sum * t * bell;
    return {x < 0.0f ? tail : 1.0f - tail, 0.39894228f * bell};
}

}  // namespace

extern "C" {

// The next values of numpy's SFC64 in this state.
void random_bits(const uint64_t* state, uint64_t* out, int64_t count) {
    uint64_t a = state[0], b = state[1], c = state[2], counter = state[3];
    for (int64_t i = 0; i < count; ++i) {
        const uint64_t value = a + b + counter++;
        a = b ^ (b >> 11);
        b = c + (c << 3);
        c = ((c << 24) | (c >> 40)) + value;
        out[i] = value;
    }
}

// out = values × dropout, plus `residual` unless that is null.
void dropout(float* out, const float* residual, const float* values, const int16_t* bits, int64_t count,
             int32_t threshold, float scale) {
    with_or_without(residual, [=](auto adds) {
#pragma omp parallel for simd if (parallel : count >= kParallelFrom)
        for (int64_t i = 0; i < count; ++i)
            out[i] = (adds ? residual[i] : 0.0f) + values[i] * dropout_factor_of(bits[i], threshold, scale);
    });
}

// out = gelu(values + bias) × dropout, and its derivative to `derivatives` unless that is null, of values [rows, width].
// Without dropout `bits` is null, without a bias `bias`.
void gelu(float* out, float* derivatives, const float* values, const float* bias, const int16_t* bits, int64_t rows,
          int64_t width, int32_t threshold, float scale) {
    const std::vector<float> zeros(bias ? 0 : width);
    const float* added = bias ? bias : zeros.data();
    with_or_without(bits, [=](auto drops) {
        with_or_without(derivatives, [=](auto with_derivatives) {
#pragma omp parallel for if (rows * width >= kParallelFrom)
            for (int64_t row = 0; row < rows; ++row) {
                const int64_t start = row * width;
#pragma omp simd
                for (int64_t i = 0; i < width; ++i) {
                    const float value = values[start + i] + added[i];
                    const Normal normal = normal_at(value);
                    const float dropout_factor = drops ? dropout_factor_of(bits[start + i], threshold, scale) : 1.0f;
                    out[start + i] = value * normal.cdf * dropout_factor;
                    if (with_derivatives)
                        derivatives[start + i] = (normal.cdf + value * normal.density) * dropout_factor;
                }
            }
        });
    });
}

// out = (values - mean) × scale × weight + bias by row, where scale is 1 / √(variance + epsilon); `statistics` [rows, 2]
// gets mean and scale. Without `centers` the mean is zero (root mean square norm); `bias` may be null.
void norm_forward(float* out, float* statistics, const float* values, const float* weight, const float* bias,
                  int64_t rows, int64_t width, int32_t centers, float epsilon) {
    with_or_without(bias, [=](auto has_bias) {
#pragma omp parallel for if (rows * width >= kParallelFrom)
        for (int64_t row = 0; row < rows; ++row) {
            const float* own = values + row * width;
            float sum = 0.0f, square_sum = 0.0f;
            if (centers) {
#pragma omp simd reduction(+ : sum)
                for (int64_t i = 0; i < width; ++i) sum += own[i];
            }
            const float mean = sum / width;
#pragma omp simd reduction(+ : square_sum)
            for (int64_t i = 0; i < width; ++i) square_sum += (own[i] - mean) * (own[i] - mean);
            const float scale = 1.0f / std::sqrt(square_sum / width + epsilon);
#pragma omp simd
            for (int64_t i = 0; i < width; ++i)
                out[row * width + i] = (own[i] - mean) * scale * weight[i] + (has_bias ? bias[i] : 0.0f);
            statistics[2 * row] = mean;
            statistics[2 * row + 1] = scale;
        }
    });
}

// The gradients of values, weight and bias from `grad` of `out`. `residual`, the gradient of the values from elsewhere,
// is added to theirs unless it is null. Rows are summed in as many parts whatever the number of threads.
void norm_backward(float* grad_values, float* grad_weight, float* grad_bias, const float* grad, const float* residual,
                   const float* values, const float* weight, const float* statistics, int64_t rows, int64_t width,
                   int32_t centers) {
    const int64_t num_sums = std::min<int64_t>(16, rows);
    std::vector<float> sums(num_sums * 2 * width);
    float* first_sums = sums.data();
    with_or_without(residual, [=](auto has_residual) {
#pragma omp parallel for if (rows * width >= kParallelFrom)
        for (int64_t part = 0; part < num_sums; ++part) {
            const NormGrads out{grad_values, first_sums + part * 2 * width, first_sums + part * 2 * width + width};
            const NormInputs in{grad, residual, values, weight, statistics, width, centers != 0};
            const int64_t end = rows * (part + 1) / num_sums;
            int64_t row = rows * part / num_sums;
            for (; row + kNormRows <= end; row += kNormRows) norm_backward_of_rows<kNormRows, has_residual>(out, in, row);
            for (; row < end; ++row) norm_backward_of_rows<1, has_residual>(out, in, row);
        }
    });
    for (int64_t i = 0; i < width; ++i) {
        float weight_sum = 0.0f, bias_sum = 0.0f;
        for (int64_t part = 0; part < num_sums; ++part) {
            weight_sum += first_sums[part * 2 * width + i];
            bias_sum += first_sums[part * 2 * width + width + i];
        }
        grad_weight[i] = weight_sum;
        if (grad_bias) grad_bias[i] = bias_sum;
    }
}

// out [B, T, H, D/H] = (softmax(query × keyᵀ × softmax_scale) × dropout) × value; without dropout `bits` [B, H, T, S]
// is null. A query sees the keys that `allowed` [B, S] marks (null: all), if `causal` those up to its own position
// (the queries are the last of the keys), and those from `starts` [B, T] on, which never decreases (null: key 0).
// Backward recomputes the weights from `log_sum_exp` [B, H, T]. Each head is computed by one thread, so no sum depends
// on the number of threads.
void attention_forward(float* out, float* log_sum_exp, const Heads* query, const Heads* key, const Heads* value,
                       const bool* allowed, const int64_t* starts, const int16_t* bits, const AttentionParams& attn) {
    const auto forward = use_double_blocks(attn, starts) ? attend<kDoubleQueries> : attend<kQueries>;
    forward(out, log_sum_exp, query, key, value, allowed, starts, bits, attn);
}

// The gradients of query, key and value from `grad` of `out`.
void attention_backward(const Heads* grad_query, const Heads* grad_key, const Heads* grad_value, const float* grad,
                        const float* log_sum_exp, const Heads* query, const Heads* key, const Heads* value,
                        const bool* allowed, const int64_t* starts, const int16_t* bits, const AttentionParams& attn) {
    const auto backward = use_double_blocks(attn, starts) ? attend_backward<kDoubleQueries> : attend_backward<kQueries>;
    backward(grad_query, grad_key, grad_value, grad, log_sum_exp, query, key, value, allowed, starts, bits, attn);
}

// sum [outputs, inputs] = gradᵀ × values, or += if `adds`, of grad [rows, outputs] and values [rows, inputs]. A block of
// the sum stays in the cache while the rows pass, kDepth at a time. Nothing is copied to be read faster: that would take
// a tenth of the time of a small product. The order of a sum does not depend on the number of threads.
void weight_grad(float* sum, const float* grad, const float* values, int64_t rows, int64_t outputs, int64_t inputs,
                 int32_t adds) {
    constexpr int64_t kMostOutputs = 192, kMostInputs = 512;
    const bool is_parallel = rows * outputs * inputs >= 32 * kParallelFrom;
    const int64_t threads = is_parallel ? omp_get_max_threads() : 1;
    const int64_t blocks = ((outputs - 1) / kMostOutputs / threads + 1) * threads;  // as many for each thread
    const int64_t height = ((outputs - 1) / blocks / kWideTile + 1) * kWideTile;
#pragma omp parallel for collapse(2) if (is_parallel)
    for (int64_t top = 0; top < outputs; top += height)
        for (int64_t left = 0; left < inputs; left += kMostInputs) {
            const int64_t block_rows = std::min(height, outputs - top), width = std::min(kMostInputs, inputs - left);
            for (int64_t first = 0; first == 0 || first < rows; first += kDepth) {
                const float *a = grad + first * outputs + top, *b = values + first * inputs + left;
                float* c = sum + top * inputs + left;
                const int64_t depth = std::min(kDepth, rows - first);
                if (adds || first > 0)
                    transposed_product<true>(c, inputs, a, outputs, b, inputs, block_rows, width, depth);
                else
                    transposed_product<false>(c, inputs, a, outputs, b, inputs, block_rows, width, depth);
            }
        }
}

// Replaces logits [rows, vocab_size] by the gradient of the cross-entropy with `targets` [rows], and writes the
// cross-entropy of each row to `losses`. Label smoothing gives each token of the vocabulary the target probability
// `token_smoothing`.
void cross_entropy(float* losses, float* logits, const int64_t* targets, int64_t rows, int64_t vocab_size,
                   float token_smoothing) {
    const float target_weight = 1.0f - token_smoothing * vocab_size;
#pragma omp parallel for if (rows * vocab_size >= kParallelFrom)
    for (int64_t row = 0; row < rows; ++row) {
        float *logit = logits + row * vocab_size, *target_logit = logit + targets[row];
        float row_max = -INFINITY, shifted_sum = 0.0f, row_sum = 0.0f;
#pragma omp simd reduction(max : row_max)
        for (int64_t i = 0; i < vocab_size; ++i) row_max = logit[i] > row_max ? logit[i] : row_max;
        if (token_smoothing != 0.0f) {
#pragma omp simd reduction(+ : shifted_sum)
            for (int64_t i = 0; i < vocab_size; ++i) shifted_sum += logit[i] - row_max;
        }
        const float shifted_target = *target_logit - row_max;
#pragma omp simd reduction(+ : row_sum)
        for (int64_t i = 0; i < vocab_size; ++i) row_sum += logit[i] = exp_of(logit[i] - row_max);
        const float log_sum = std::log(row_sum), inverse_sum = 1.0f / row_sum;
        losses[row] =
            target_weight * (log_sum - shifted_target) + token_smoothing * (vocab_size * log_sum - shifted_sum);
#pragma omp simd
        for (int64_t i = 0; i < vocab_size; ++i) logit[i] = logit[i] * inverse_sum - token_smoothing;
        *target_logit -= target_weight;
    }
}

}  // extern "C"
