// Fused loops over contiguous float32 tensors, compiled for this machine by `nn.kernel_library`.
//
// Each reads and writes memory once where a chain of torch's operations does so several times. Threads share the
// elements or rows of large tensors; the result does not depend on their number. Plain loops, which compilers
// vectorize: `omp simd` allows them to reorder the sums of a row. Only `product` names vectors, of any machine's width.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

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

constexpr int64_t kRows = 16;  // queries that attention takes at a time
#if defined(__AVX512F__)
constexpr int kLanes = 16;  // float32 values per register here
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kParts = kVector / kLanes, kTile = 8 / kParts;  // a product sums kTile × kParts registers at a time

inline int64_t padded(int64_t count) { return (count + kVector - 1) / kVector * kVector; }

typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));
typedef Vector UnalignedVector __attribute__((aligned(sizeof(float)), may_alias));

// c [rows, columns] = a [rows, depth] × b [depth, columns], or += if `adds`. Rows are a multiple of kTile, columns of
// kVector. The element (i, k) of a is a[i × a_row + k × a_column]; b and c have their rows b_row and c_row apart.
template <bool adds>
inline void product(float* c, int64_t c_row, const float* a, int64_t a_row, int64_t a_column, const float* b,
                    int64_t b_row, int64_t rows, int64_t columns, int64_t depth) {
    for (int64_t column = 0; column < columns; column += kVector) {
        for (int64_t row = 0; row < rows; row += kTile) {
            Vector sums[kTile][kParts] = {};
            for (int64_t k = 0; k < depth; ++k) {
                const auto* place = reinterpret_cast<const UnalignedVector*>(b + k * b_row + column);
                Vector factors[kParts];
                for (int part = 0; part < kParts; ++part) factors[part] = place[part];
                for (int i = 0; i < kTile; ++i)
                    for (int part = 0; part < kParts; ++part)
                        sums[i][part] += a[(row + i) * a_row + k * a_column] * factors[part];
            }
            for (int i = 0; i < kTile; ++i) {
                auto* place = reinterpret_cast<UnalignedVector*>(c + (row + i) * c_row + column);
                for (int part = 0; part < kParts; ++part) place[part] = sums[i][part] + (adds ? place[part] : Vector{});
            }
        }
    }
}

// Memory of one thread, aligned for vectors.
class Scratch {
public:
    explicit Scratch(int64_t count) : memory_(count / kLanes), next_(reinterpret_cast<float*>(memory_.data())) {}

    float* take(int64_t count) {
        float* taken = next_;
        next_ += count;
        return taken;
    }

private:
    std::vector<Vector> memory_;
    float* next_;
};

// Rows of `width` values, `stride` apart, to rows of `padded_width` values that end with zeros.
inline void copy_rows(float* out, const float* values, int64_t stride, int64_t rows, int64_t width,
                      int64_t padded_width) {
    for (int64_t row = 0; row < rows; ++row) {
        std::memcpy(out + row * padded_width, values + row * stride, width * sizeof(float));
        std::fill(out + row * padded_width + width, out + (row + 1) * padded_width, 0.0f);
    }
}

// The same rows as columns: [width, padded_rows].
inline void copy_across(float* out, const float* values, int64_t stride, int64_t rows, int64_t width,
                        int64_t padded_rows) {
    for (int64_t i = 0; i < width; ++i) {
        for (int64_t row = 0; row < rows; ++row) out[i * padded_rows + row] = values[row * stride + i];
        std::fill(out + i * padded_rows + rows, out + (i + 1) * padded_rows, 0.0f);
    }
}

// Which keys a query sees, of those that `may_see` marks (null: all): `begin` to `end` - 1.
struct Seen {
    int64_t begin, end;
};

// score × factor of what is seen, -infinity for the rest of the keys in `range`; returns the largest.
inline float scale_and_mask(float* score, Seen seen, Seen range, const bool* may_see, float factor) {
    float top = -INFINITY;
    std::fill(score + range.begin, score + seen.begin, -INFINITY);
#pragma omp simd reduction(max : top)
    for (int64_t j = seen.begin; j < seen.end; ++j) {
        score[j] = !may_see || may_see[j] ? score[j] * factor : -INFINITY;
        top = score[j] > top ? score[j] : top;
    }
    std::fill(score + seen.end, score + range.end, -INFINITY);
    return top;
}

// Where the queries, keys or values of each head lie: the strides of samples, heads and rows; rows are contiguous.
struct Heads {
    const float* start;
    int64_t sample, head, row;

    const float* of(int64_t index, int64_t heads) const {
        return start + index / heads * sample + index % heads * head;
    }
};

// `least` and `scale`: of dropout.
struct Attention {
    int64_t samples, heads, queries, keys, width;
    int32_t causal, least;
    float factor, scale;

    // `starts` [samples, queries]: the first key that each query sees, which never decreases; null: key 0.
    Seen seen_by(int64_t head, int64_t query, const int64_t* starts) const {
        return {starts ? starts[head / heads * queries + query] : 0, causal ? keys - queries + query + 1 : keys};
    }

    // The keys that kRows queries see, as whole vectors.
    Seen seen_by_rows(int64_t head, int64_t first, const int64_t* starts) const {
        const int64_t begin = seen_by(head, first, starts).begin, end = seen_by(head, first + kRows - 1, nullptr).end;
        return {begin / kVector * kVector, padded(std::min(keys, end))};
    }

    template <typename Number>
    Number* row_of(Number* out, int64_t head, int64_t query) const {
        return out + ((head / heads * queries + query) * heads + head % heads) * width;
    }

    void drop(float* out, const float* values, const int16_t* bits, Seen range) const {
        const int64_t real = std::min(range.end, keys);
#pragma omp simd
        for (int64_t j = range.begin; j < real; ++j) out[j] = values[j] * kept(bits[j], least, scale);
        std::fill(out + real, out + range.end, 0.0f);
    }
};

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

// out [samples, queries, heads, width] = (softmax(query × keyᵀ × factor) × dropout) × value; without dropout `bits`
// [samples, heads, queries, keys] is null. A query sees the keys that `allowed` [samples, keys] marks (null: all) and,
// if `causal`, those up to its own position; the queries are the last of the keys. `starts` as in `Seen`. Backward forms
// the weights anew from `log_totals` [samples, heads, queries]. Each head is computed by one thread, so no sum depends
// on their number.
void attention_forward(float* out, float* log_totals, const Heads* query, const Heads* key, const Heads* value,
                       const bool* allowed, const int64_t* starts, const int16_t* bits, const Attention* sizes) {
    const Attention& is = *sizes;
    const int64_t width = padded(is.width), keys = padded(is.keys);
#pragma omp parallel if (is.samples * is.heads * is.queries * is.keys >= kParallelFrom)
    {
        Scratch scratch(kRows * (2 * width + 2 * keys) + 2 * keys * width);
        float *asked = scratch.take(kRows * width), *mixed = scratch.take(kRows * width);
        float *weights = scratch.take(kRows * keys), *dropped = bits ? scratch.take(kRows * keys) : weights;
        float *keys_across = scratch.take(keys * width), *values = scratch.take(keys * width);
#pragma omp for
        for (int64_t head = 0; head < is.samples * is.heads; ++head) {
            const bool* may_see = allowed ? allowed + head / is.heads * is.keys : nullptr;
            copy_across(keys_across, key->of(head, is.heads), key->row, is.keys, is.width, keys);
            copy_rows(values, value->of(head, is.heads), value->row, is.keys, is.width, width);
            for (int64_t first = 0; first < is.queries; first += kRows) {
                const int64_t rows = std::min(kRows, is.queries - first);
                const Seen range = is.seen_by_rows(head, first, starts);
                const int64_t begin = range.begin, count = range.end - begin;
                copy_rows(asked, query->of(head, is.heads) + first * query->row, query->row, rows, is.width, width);
                product<false>(weights + begin, keys, asked, width, 1, keys_across + begin, keys, kRows, count,
                               is.width);
                for (int64_t i = 0; i < rows; ++i) {
                    const int64_t row = head * is.queries + first + i;
                    float *weight = weights + i * keys, total = 0.0f;
                    const Seen seen = is.seen_by(head, first + i, starts);
                    const float top = scale_and_mask(weight, seen, range, may_see, is.factor);
#pragma omp simd reduction(+ : total)
                    for (int64_t j = begin; j < range.end; ++j) total += weight[j] = exp_of(weight[j] - top);
                    log_totals[row] = top + std::log(total);
                    const float share = 1.0f / total;
                    for (int64_t j = begin; j < range.end; ++j) weight[j] *= share;
                    if (bits) is.drop(dropped + i * keys, weight, bits + row * is.keys, range);
                }
                product<false>(mixed, width, dropped + begin, keys, 1, values + begin * width, width, kRows, width,
                               count);
                for (int64_t i = 0; i < rows; ++i)
                    std::memcpy(is.row_of(out, head, first + i), mixed + i * width, is.width * sizeof(float));
            }
        }
    }
}

// The gradients of query, key and value, laid out as `out`, from `grad` of `out`.
void attention_backward(float* grad_query, float* grad_key, float* grad_value, const float* grad, const float* out,
                        const float* log_totals, const Heads* query, const Heads* key, const Heads* value,
                        const bool* allowed, const int64_t* starts, const int16_t* bits, const Attention* sizes) {
    const Attention& is = *sizes;
    const int64_t width = padded(is.width), keys = padded(is.keys), stride = is.heads * is.width;
#pragma omp parallel if (is.samples * is.heads * is.queries * is.keys >= kParallelFrom)
    {
        Scratch scratch(kRows * (3 * width + 3 * keys) + 5 * keys * width);
        float *asked = scratch.take(kRows * width), *slopes = scratch.take(kRows * width);
        float *mixed = scratch.take(kRows * width), *weights = scratch.take(kRows * keys);
        float *grads = scratch.take(kRows * keys), *dropped = bits ? scratch.take(kRows * keys) : weights;
        float *key_rows = scratch.take(keys * width), *keys_across = scratch.take(keys * width);
        float *values_across = scratch.take(keys * width), *of_keys = scratch.take(keys * width);
        float* of_values = scratch.take(keys * width);
#pragma omp for
        for (int64_t head = 0; head < is.samples * is.heads; ++head) {
            const bool* may_see = allowed ? allowed + head / is.heads * is.keys : nullptr;
            copy_rows(key_rows, key->of(head, is.heads), key->row, is.keys, is.width, width);
            copy_across(keys_across, key->of(head, is.heads), key->row, is.keys, is.width, keys);
            copy_across(values_across, value->of(head, is.heads), value->row, is.keys, is.width, keys);
            std::fill(of_keys, of_keys + keys * width, 0.0f);
            std::fill(of_values, of_values + keys * width, 0.0f);
            for (int64_t first = 0; first < is.queries; first += kRows) {
                const int64_t rows = std::min(kRows, is.queries - first);
                const Seen range = is.seen_by_rows(head, first, starts);
                const int64_t begin = range.begin, count = range.end - begin;
                copy_rows(asked, query->of(head, is.heads) + first * query->row, query->row, rows, is.width, width);
                copy_rows(slopes, is.row_of(grad, head, first), stride, rows, is.width, width);
                product<false>(weights + begin, keys, asked, width, 1, keys_across + begin, keys, kRows, count,
                               is.width);
                product<false>(grads + begin, keys, slopes, width, 1, values_across + begin, keys, kRows, count,
                               is.width);
                for (int64_t i = 0; i < kRows; ++i) {
                    float *weight = weights + i * keys, *slope = grads + i * keys;
                    if (i >= rows) {
                        std::fill(weight + begin, weight + range.end, 0.0f);
                        std::fill(slope + begin, slope + range.end, 0.0f);
                        if (bits) std::fill(dropped + i * keys + begin, dropped + i * keys + range.end, 0.0f);
                        continue;
                    }
                    const int64_t row = head * is.queries + first + i;
                    const float log_total = log_totals[row], *result = is.row_of(out, head, first + i);
                    float mean = 0.0f;
#pragma omp simd reduction(+ : mean)
                    for (int64_t j = 0; j < is.width; ++j) mean += result[j] * slopes[i * width + j];
                    scale_and_mask(weight, is.seen_by(head, first + i, starts), range, may_see, is.factor);
#pragma omp simd
                    for (int64_t j = begin; j < range.end; ++j) weight[j] = exp_of(weight[j] - log_total);
                    if (bits) {
                        is.drop(slope, slope, bits + row * is.keys, range);
                        is.drop(dropped + i * keys, weight, bits + row * is.keys, range);
                    }
#pragma omp simd
                    for (int64_t j = begin; j < range.end; ++j) slope[j] = is.factor * weight[j] * (slope[j] - mean);
                }
                product<false>(mixed, width, grads + begin, keys, 1, key_rows + begin * width, width, kRows, width,
                               count);
                for (int64_t i = 0; i < rows; ++i)
                    std::memcpy(is.row_of(grad_query, head, first + i), mixed + i * width, is.width * sizeof(float));
                product<true>(of_keys + begin * width, width, grads + begin, 1, keys, asked, width, count, width,
                              kRows);
                product<true>(of_values + begin * width, width, dropped + begin, 1, keys, slopes, width, count, width,
                              kRows);
            }
            for (int64_t j = 0; j < is.keys; ++j) {
                const int64_t place = ((head / is.heads * is.keys + j) * is.heads + head % is.heads) * is.width;
                std::memcpy(grad_key + place, of_keys + j * width, is.width * sizeof(float));
                std::memcpy(grad_value + place, of_values + j * width, is.width * sizeof(float));
            }
        }
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
