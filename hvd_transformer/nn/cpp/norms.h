// Backward of layer norm and root mean square norm.

#pragma once

#include "vectors.h"

namespace {

constexpr int kNormRows = 4;  // rows of a norm's backward at a time: their sums for a column stay in registers

struct NormInputs {
    const float *grad, *residual, *values, *weight, *statistics;
    int64_t width;
    bool centers;
};

struct NormGrads {
    float *values, *weight_sums, *bias_sums;
};

// `norm_backward` of `count` rows from `first` on.
template <int count, bool has_residual>
inline void norm_backward_of_rows(const NormGrads& out, const NormInputs& in, int64_t first) {
    const int64_t width = in.width, start = first * width;
    const float *values = in.values + start, *grad = in.grad + start;
    const float* residual = has_residual ? in.residual + start : nullptr;
    const float* weight = in.weight;
    float *grad_values = out.values + start, *weight_sums = out.weight_sums, *bias_sums = out.bias_sums;
    float means[count], scales[count], grad_means[count], slopes[count];
    for (int row = 0; row < count; ++row) {
        const float *own = values + row * width, *own_grad = grad + row * width;
        const float mean = in.statistics[2 * (first + row)], scale = in.statistics[2 * (first + row) + 1];
        float sum = 0.0f, product_sum = 0.0f;
#pragma omp simd reduction(+ : sum, product_sum)
        for (int64_t i = 0; i < width; ++i) {
            sum += own_grad[i] * weight[i];
            product_sum += own_grad[i] * weight[i] * (own[i] - mean);
        }
        means[row] = mean;
        scales[row] = scale;
        grad_means[row] = in.centers ? sum / width : 0.0f;
        slopes[row] = product_sum * scale / width;
    }
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) {
        float weight_sum = weight_sums[i], bias_sum = bias_sums[i];
#pragma GCC unroll 4
        for (int row = 0; row < count; ++row) {
            const int64_t place = row * width + i;
            const float normal = (values[place] - means[row]) * scales[row];
            weight_sum += grad[place] * normal;
            bias_sum += grad[place];
            grad_values[place] = scales[row] * (grad[place] * weight[i] - grad_means[row] - normal * slopes[row]) +
                                 (has_residual ? residual[place] : 0.0f);
        }
        weight_sums[i] = weight_sum;
        bias_sums[i] = bias_sum;
    }
}

}  // namespace
