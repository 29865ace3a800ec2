// Fused loops over contiguous float32 tensors, compiled for this machine by `nn.kernel_library`.
//
// Each reads and writes memory once where a chain of torch's operations does so several times. Threads share the
// elements or rows of large tensors; the result does not depend on their number. Plain loops, which compilers
// vectorize: `omp simd` allows them to reorder the sums of a row.

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t kParallelFrom = 32768;  // elements; for fewer, waking threads costs more than it saves
constexpr int64_t kVector = 16;           // float32 values per AVX-512 register

// exp(x) for x ≤ 88, with a relative error below 2e-7: the polynomial of Cephes' expf, without its branches.
inline float exp_of(float x) {
    const float power = std::nearbyint(x * 1.44269504f);
    float rest = x - power * 0.693359375f;
    rest += power * 2.12194440e-4f;
    float sum = 1.9875691500e-4f;
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    const int32_t exponent = (static_cast<int32_t>(power) + 127) << 23;
    float scale;
    std::memcpy(&scale, &exponent, sizeof scale);
    return x < -87.0f ? 0.0f : sum * scale;  // NaN stays NaN
}

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

// What dropout multiplies a value by.
inline float kept(int16_t bits, int32_t least, float scale) { return bits >= least ? scale : 0.0f; }

// The keys that a query may see, as whole vectors: those beyond `seen` are masked or have the weight zero.
inline int64_t seen_by(int64_t row, int64_t queries, int64_t keys, bool causal) {
    return causal ? keys - queries + row % queries + 1 : keys;
}

inline int64_t whole_vectors(int64_t seen, int64_t keys) {
    const int64_t width = (seen + kVector - 1) / kVector * kVector;
    return width < keys ? width : keys;
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
void dropout(float* out, const float* residual, const float* values, const int16_t* bits, int64_t count, int32_t least,
             float scale) {
    if (residual) {
#pragma omp parallel for simd if (count >= kParallelFrom)
        for (int64_t i = 0; i < count; ++i) out[i] = residual[i] + values[i] * kept(bits[i], least, scale);
    } else {
#pragma omp parallel for simd if (count >= kParallelFrom)
        for (int64_t i = 0; i < count; ++i) out[i] = values[i] * kept(bits[i], least, scale);
    }
}

// out = gelu(values) × dropout; without dropout `bits` is null.
void gelu_forward(float* out, const float* values, const int16_t* bits, int64_t count, int32_t least, float scale) {
    if (bits) {
#pragma omp parallel for simd if (count >= kParallelFrom)
        for (int64_t i = 0; i < count; ++i)
            out[i] = values[i] * normal_at(values[i]).cdf * kept(bits[i], least, scale);
    } else {
#pragma omp parallel for simd if (count >= kParallelFrom)
        for (int64_t i = 0; i < count; ++i) out[i] = values[i] * normal_at(values[i]).cdf;
    }
}

void gelu_backward(float* out, const float* grad, const float* values, const int16_t* bits, int64_t count,
                   int32_t least, float scale) {
    if (bits) {
#pragma omp parallel for simd if (count >= kParallelFrom)
        for (int64_t i = 0; i < count; ++i) {
            const Normal normal = normal_at(values[i]);
            out[i] = grad[i] * kept(bits[i], least, scale) * (normal.cdf + values[i] * normal.density);
        }
    } else {
#pragma omp parallel for simd if (count >= kParallelFrom)
        for (int64_t i = 0; i < count; ++i) {
            const Normal normal = normal_at(values[i]);
            out[i] = grad[i] * (normal.cdf + values[i] * normal.density);
        }
    }
}

// Replaces scores [rows, keys] by weights = softmax(scores × factor); dropped = weights × dropout. Row r is query
// r % queries of sample r / rows_per_sample. It sees the keys that `allowed` [samples, keys] marks (null: all) and, if
// `causal`, those up to its own position; the queries are the last of the keys.
void softmax_dropout_forward(float* dropped, float* scores, const bool* allowed, const int16_t* bits, int64_t rows,
                             int64_t queries, int64_t keys, int64_t rows_per_sample, int32_t causal, float factor,
                             int32_t least, float scale) {
#pragma omp parallel for if (rows * keys >= kParallelFrom)
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t seen = seen_by(row, queries, keys, causal), width = whole_vectors(seen, keys);
        const bool* may_see = allowed ? allowed + row / rows_per_sample * keys : nullptr;
        const int16_t* bit = bits + row * keys;
        float *weight = scores + row * keys, *result = dropped + row * keys;
        float top = -INFINITY, total = 0.0f;
        if (may_see) {
#pragma omp simd reduction(max : top)
            for (int64_t i = 0; i < width; ++i) {
                weight[i] = may_see[i] && i < seen ? weight[i] * factor : -INFINITY;
                top = weight[i] > top ? weight[i] : top;
            }
        } else {
#pragma omp simd reduction(max : top)
            for (int64_t i = 0; i < width; ++i) {
                weight[i] = i < seen ? weight[i] * factor : -INFINITY;
                top = weight[i] > top ? weight[i] : top;
            }
        }
#pragma omp simd reduction(+ : total)
        for (int64_t i = 0; i < width; ++i) total += weight[i] = exp_of(weight[i] - top);
        const float share = 1.0f / total;
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) {
            weight[i] *= share;
            result[i] = weight[i] * kept(bit[i], least, scale);
        }
        std::memset(weight + width, 0, (keys - width) * sizeof(float));
        std::memset(result + width, 0, (keys - width) * sizeof(float));
    }
}

// The gradient of the scores, from `grad` of the dropped weights.
void softmax_dropout_backward(float* out, const float* grad, const float* weights, const int16_t* bits, int64_t rows,
                              int64_t queries, int64_t keys, int32_t causal, float factor, int32_t least, float scale) {
#pragma omp parallel for if (rows * keys >= kParallelFrom)
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t width = whole_vectors(seen_by(row, queries, keys, causal), keys), start = row * keys;
        const float *slope = grad + start, *weight = weights + start;
        const int16_t* bit = bits + start;
        float *result = out + start, mean = 0.0f;
#pragma omp simd reduction(+ : mean)
        for (int64_t i = 0; i < width; ++i) mean += weight[i] * slope[i] * kept(bit[i], least, scale);
#pragma omp simd
        for (int64_t i = 0; i < width; ++i)
            result[i] = factor * weight[i] * (slope[i] * kept(bit[i], least, scale) - mean);
        std::memset(result + width, 0, (keys - width) * sizeof(float));
    }
}

// Replaces logits [rows, width] by the gradient of the cross-entropy with `targets` [rows], and writes the
// cross-entropy of each row to `losses`. Label smoothing gives `even` of a target's weight to each token.
void cross_entropy(float* losses, float* logits, const int64_t* targets, int64_t rows, int64_t width, float even) {
    const float rest = 1.0f - even * width;
#pragma omp parallel for if (rows * width >= kParallelFrom)
    for (int64_t row = 0; row < rows; ++row) {
        float *logit = logits + row * width, *goal = logit + targets[row];
        float top = -INFINITY, sum = 0.0f, total = 0.0f;
#pragma omp simd reduction(max : top)
        for (int64_t i = 0; i < width; ++i) top = logit[i] > top ? logit[i] : top;
        if (even != 0.0f) {
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < width; ++i) sum += logit[i] - top;
        }
        const float of_goal = *goal - top;
#pragma omp simd reduction(+ : total)
        for (int64_t i = 0; i < width; ++i) total += logit[i] = exp_of(logit[i] - top);
        const float log_total = std::log(total), share = 1.0f / total;
        losses[row] = rest * (log_total - of_goal) + even * (width * log_total - sum);
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) logit[i] = logit[i] * share - even;
        *goal -= rest;
    }
}

}  // extern "C"
