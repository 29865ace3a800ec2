// Fused loops over contiguous float32 tensors, compiled for this machine by `nn.kernel_library`.
//
// Each reads and writes memory once where a chain of torch's operations does so several times. Threads share the
// elements or rows of large tensors; the result does not depend on their number. Plain loops, which compilers
// vectorize: `omp simd` allows them to reorder the sums of a row. Only `product` names vectors, of any machine's width.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace {

constexpr int64_t kParallelFrom = 32768;  // elements; for fewer, waking threads costs more than it saves
constexpr int64_t kVector = 16;           // float32 values per AVX-512 register

// exp(x) for x ≤ 88, with a relative error below 2e-7: the polynomial of Cephes' expf, without its branches. `Bits`:
// unsigned integers as wide as the numbers.
template <typename Bits, typename Number>
inline Number exp_of(Number x) {
    const Number shifted = x * 1.44269504f + 12582912.0f;  // 1.5 × 2^23: the sum's low bits are the nearest integer
    const Number power = shifted - 12582912.0f;
    Number rest = x - power * 0.693359375f;
    rest += power * 2.12194440e-4f;
    Number sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    Bits exponent;
    std::memcpy(&exponent, &shifted, sizeof exponent);
    exponent = (exponent << 23) + 0x3f800000u;
    Number scale;
    std::memcpy(&scale, &exponent, sizeof scale);
    return x < -87.0f ? Number{} : sum * scale;  // NaN stays NaN
}

inline float exp_of(float x) { return exp_of<uint32_t>(x); }

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

// Calls `loop` with whether there is memory at `pointer`, as a constant: a loop for each case.
template <typename Loop>
inline void with_or_without(const void* pointer, Loop loop) {
    if (pointer)
        loop(std::true_type{});
    else
        loop(std::false_type{});
}

constexpr int64_t kQueries = kVector;  // attention takes so many at a time, one in each place of its vectors
// Float32 values per register here, and as many rows of a product at a time as its registers hold.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kTile = 12;
#elif defined(__AVX__)
constexpr int kLanes = 8, kTile = 6;
#else
constexpr int kLanes = 4, kTile = 2;
#endif
constexpr int kParts = kVector / kLanes;

inline int64_t padded(int64_t count) { return (count + kVector - 1) / kVector * kVector; }

typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));
// Named where it is used: g++ leaves the attributes out of what `auto*` stands for.
typedef Vector UnalignedVector __attribute__((aligned(sizeof(float)), may_alias));
typedef int32_t Integers __attribute__((vector_size(kLanes * sizeof(int32_t))));
typedef uint32_t Bits __attribute__((vector_size(kLanes * sizeof(uint32_t))));

inline UnalignedVector* vectors(float* values) { return reinterpret_cast<UnalignedVector*>(values); }
inline const UnalignedVector* vectors(const float* values) { return reinterpret_cast<const UnalignedVector*>(values); }

// kVector columns of `product`, in as many rows as `tile` or, if there are fewer, in `rows`.
template <bool adds, int tile>
inline void product_of_rows(float* c, int64_t c_row, const float* a, int64_t a_row, int64_t a_column, const float* b,
                            int64_t b_row, int64_t rows, int64_t depth) {
    if constexpr (tile > 1)
        if (rows < tile)
            return product_of_rows<adds, tile - 1>(c, c_row, a, a_row, a_column, b, b_row, rows, depth);
    const float* own_rows[tile];
    for (int i = 0; i < tile; ++i) own_rows[i] = a + i * a_row;
    Vector sums[tile][kParts] = {};
    for (int64_t k = 0; k < depth; ++k) {
        const UnalignedVector* place = vectors(b + k * b_row);
        Vector factors[kParts];
#pragma GCC unroll 4
        for (int part = 0; part < kParts; ++part) factors[part] = place[part];
#pragma GCC unroll 16
        for (int i = 0; i < tile; ++i)
#pragma GCC unroll 4
            for (int part = 0; part < kParts; ++part) sums[i][part] += own_rows[i][k * a_column] * factors[part];
    }
#pragma GCC unroll 16
    for (int i = 0; i < tile; ++i) {
        UnalignedVector* place = vectors(c + i * c_row);
#pragma GCC unroll 4
        for (int part = 0; part < kParts; ++part) place[part] = sums[i][part] + (adds ? place[part] : Vector{});
    }
}

// c [rows, columns] = a [rows, depth] × b [depth, columns], or += if `adds`. Columns are a multiple of kVector. The
// element (i, k) of a is a[i × a_row + k × a_column]; b and c have their rows b_row and c_row apart.
template <bool adds>
inline void product(float* c, int64_t c_row, const float* a, int64_t a_row, int64_t a_column, const float* b,
                    int64_t b_row, int64_t rows, int64_t columns, int64_t depth) {
    for (int64_t column = 0; column < columns; column += kVector)
        for (int64_t row = 0; row < rows; row += kTile)
            product_of_rows<adds, kTile>(c + row * c_row + column, c_row, a + row * a_row, a_row, a_column, b + column,
                                         b_row, rows - row, depth);
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

// Rows of values, `stride` apart.
struct Rows {
    const float* start;
    int64_t stride;

    Rows from(int64_t row) const { return {start + row * stride, stride}; }
};

// The rows themselves if their width is that of vectors, else copies in `scratch` that end with zeros.
inline Rows whole_vectors(Rows rows, int64_t count, int64_t width, float* scratch) {
    const int64_t padded_width = padded(width);
    if (width == padded_width) return rows;
    for (int64_t row = 0; row < count; ++row) {
        std::memcpy(scratch + row * padded_width, rows.start + row * rows.stride, width * sizeof(float));
        std::fill(scratch + row * padded_width + width, scratch + (row + 1) * padded_width, 0.0f);
    }
    return {scratch, padded_width};
}

// `count` rows as columns [width, kQueries], times `factor`; the columns that are left are zero.
inline void copy_across(float* out, Rows rows, int64_t count, int64_t width, float factor) {
    for (int64_t i = 0; i < width; ++i) {
        for (int64_t row = 0; row < count; ++row) out[i * kQueries + row] = rows.start[row * rows.stride + i] * factor;
        std::fill(out + i * kQueries + count, out + (i + 1) * kQueries, 0.0f);
    }
}

// Where the queries, keys or values of each head lie: the strides of samples, heads and rows; rows are contiguous.
struct Heads {
    const float* start;
    int64_t sample, head, row;

    Rows of(int64_t index, int64_t heads) const {
        return {start + index / heads * sample + index % heads * head, row};
    }
};

// `least` and `scale`: of dropout.
struct Attention {
    int64_t samples, heads, queries, keys, width;
    int32_t causal, least;
    float factor, scale;

    template <typename Number>
    Number* row_of(Number* out, int64_t head, int64_t query) const {
        return out + ((head / heads * queries + query) * heads + head % heads) * width;
    }

    // The number of keys that the queries up to `query` may see.
    int64_t end_of(int64_t query) const { return causal ? keys - queries + query + 1 : keys; }
};

// kQueries queries of one head, from `first` on, or those that are left, and the keys `begin` to `end` - 1 that any of
// them sees. Scores and weights have a row for each key and a column for each query, so whatever is summed over the
// keys of a query is summed by whole vectors.
struct Block {
    const Attention& is;
    int64_t head, first, rows, begin, end;
    const bool* may_see;  // a key; null: all
    const int16_t* bits;
    int64_t same_begin, same_end;  // the keys that all these queries see
    Integers begins[kParts], ends[kParts];

    Block(const Attention& attention, int64_t its_head, int64_t its_first, const bool* allowed, const int64_t* starts,
          const int16_t* all_bits)
        : is(attention), head(its_head), first(its_first), rows(std::min(kQueries, is.queries - first)) {
        const int64_t* own = starts ? starts + head / is.heads * is.queries + first : nullptr;
        begin = own ? own[0] : 0;
        same_begin = own ? own[rows - 1] : 0;
        same_end = is.end_of(first);
        end = is.end_of(first + rows - 1);
        may_see = allowed ? allowed + head / is.heads * is.keys : nullptr;
        bits = all_bits ? all_bits + (head * is.queries + first) * is.keys : nullptr;
        for (int64_t query = 0; query < kQueries; ++query) {
            const int64_t own_or_last = std::min(query, rows - 1);
            begins[query / kLanes][query % kLanes] = own ? own[own_or_last] : 0;
            ends[query / kLanes][query % kLanes] = is.end_of(first + own_or_last);
        }
    }

    int64_t count() const { return end - begin; }

    // -infinity for the scores of what is not seen.
    void mask(float* scores) const {
        const auto mask_some = [&](int64_t from, int64_t to) {
            for (int64_t j = from; j < to; ++j) {
                UnalignedVector* score = vectors(scores + (j - begin) * kQueries);
                const Integers key = Integers{} + static_cast<int32_t>(j);
                for (int part = 0; part < kParts; ++part)
                    score[part] = (begins[part] <= key) & (key < ends[part]) ? score[part] : Vector{} - INFINITY;
            }
        };
        mask_some(begin, std::min(same_begin, end));
        mask_some(std::max(begin, std::min(same_end, end)), end);
        if (!may_see) return;
        for (int64_t j = begin; j < end; ++j)
            if (!may_see[j]) std::fill_n(scores + (j - begin) * kQueries, kQueries, -INFINITY);
    }

    // What dropout multiplies the weights by: as many rows and columns.
    void draw(float* factors) const {
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = begin; j < end; ++j)
                factors[(j - begin) * kQueries + i] = kept(bits[i * is.keys + j], is.least, is.scale);
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
    with_or_without(residual, [=](auto adds) {
#pragma omp parallel for simd if (parallel : count >= kParallelFrom)
        for (int64_t i = 0; i < count; ++i)
            out[i] = (adds ? residual[i] : 0.0f) + values[i] * kept(bits[i], least, scale);
    });
}

// out = gelu(values) × dropout, and its derivative to `slopes` unless that is null; without dropout `bits` is null.
void gelu(float* out, float* slopes, const float* values, const int16_t* bits, int64_t count, int32_t least,
          float scale) {
    with_or_without(bits, [=](auto drops) {
        with_or_without(slopes, [=](auto slopes_too) {
#pragma omp parallel for simd if (parallel : count >= kParallelFrom)
            for (int64_t i = 0; i < count; ++i) {
                const Normal normal = normal_at(values[i]);
                const float factor = drops ? kept(bits[i], least, scale) : 1.0f;
                out[i] = values[i] * normal.cdf * factor;
                if (slopes_too) slopes[i] = (normal.cdf + values[i] * normal.density) * factor;
            }
        });
    });
}

// out [samples, queries, heads, width] = (softmax(query × keyᵀ × factor) × dropout) × value; without dropout `bits`
// [samples, heads, queries, keys] is null. A query sees the keys that `allowed` [samples, keys] marks (null: all), if
// `causal` those up to its own position, the queries being the last of the keys, and those from `starts` [samples,
// queries] on, which never decreases (null: key 0). Backward forms the weights anew from `log_totals` [samples, heads,
// queries]. Each head is computed by one thread, so no sum depends on their number.
void attention_forward(float* out, float* log_totals, const Heads* query, const Heads* key, const Heads* value,
                       const bool* allowed, const int64_t* starts, const int16_t* bits, const Attention* sizes) {
    const Attention& is = *sizes;
    const int64_t width = padded(is.width), stride = is.heads * is.width;
#pragma omp parallel if (is.samples * is.heads * is.queries * is.keys >= kParallelFrom)
    {
        Scratch scratch(kQueries * (2 * width + 2 * is.keys) + is.keys * width);
        float *asked = scratch.take(kQueries * width), *mixed = scratch.take(kQueries * width);
        float *weights = scratch.take(is.keys * kQueries), *factors = scratch.take(is.keys * kQueries);
        float* spare = scratch.take(is.keys * width);
#pragma omp for
        for (int64_t head = 0; head < is.samples * is.heads; ++head) {
            const Rows keys = key->of(head, is.heads), queries = query->of(head, is.heads);
            const Rows values = whole_vectors(value->of(head, is.heads), is.keys, is.width, spare);
            for (int64_t first = 0; first < is.queries; first += kQueries) {
                const Block block(is, head, first, allowed, starts, bits);
                const int64_t count = block.count();
                copy_across(asked, queries.from(first), block.rows, is.width, is.factor);
                product<false>(weights, kQueries, keys.from(block.begin).start, keys.stride, 1, asked, kQueries, count,
                               kQueries, is.width);
                block.mask(weights);
                if (bits) block.draw(factors);
                alignas(64) float shares[kQueries];
                for (int part = 0; part < kParts; ++part) {
                    UnalignedVector* weight = vectors(weights) + part;
                    const UnalignedVector* factor = vectors(factors) + part;
                    Vector top = Vector{} - INFINITY, total = {};
                    for (int64_t j = 0; j < count; ++j) top = weight[j * kParts] > top ? weight[j * kParts] : top;
                    for (int64_t j = 0; j < count; ++j) {
                        const Vector its = exp_of<Bits>(weight[j * kParts] - top);
                        total += its;
                        weight[j * kParts] = bits ? its * factor[j * kParts] : its;
                    }
                    for (int lane = 0; lane < kLanes; ++lane) {
                        const int64_t i = part * kLanes + lane;
                        shares[i] = 1.0f / total[lane];
                        if (i < block.rows)
                            log_totals[head * is.queries + first + i] = top[lane] + std::log(total[lane]);
                    }
                }
                float* own = is.row_of(out, head, first);
                const bool whole = is.width == width;
                product<false>(whole ? own : mixed, whole ? stride : width, weights, 1, kQueries,
                               values.from(block.begin).start, values.stride, block.rows, width, count);
                for (int64_t i = 0; i < block.rows; ++i)
                    for (int64_t k = 0; k < is.width; ++k)
                        own[i * stride + k] = (whole ? own[i * stride + k] : mixed[i * width + k]) * shares[i];
            }
        }
    }
}

// The gradients of query, key and value, laid out as `out`, from `grad` of `out`.
void attention_backward(float* grad_query, float* grad_key, float* grad_value, const float* grad, const float* out,
                        const float* log_totals, const Heads* query, const Heads* key, const Heads* value,
                        const bool* allowed, const int64_t* starts, const int16_t* bits, const Attention* sizes) {
    const Attention& is = *sizes;
    const int64_t width = padded(is.width), stride = is.heads * is.width;
#pragma omp parallel if (is.samples * is.heads * is.queries * is.keys >= kParallelFrom)
    {
        Scratch scratch(kQueries * (5 * width + 4 * is.keys) + 3 * is.keys * width);
        float *asked = scratch.take(kQueries * width), *slopes = scratch.take(kQueries * width);
        float *query_spare = scratch.take(kQueries * width), *grad_spare = scratch.take(kQueries * width);
        float *mixed = scratch.take(kQueries * width), *weights = scratch.take(is.keys * kQueries);
        float *grads = scratch.take(is.keys * kQueries), *factors = scratch.take(is.keys * kQueries);
        float *dropped = bits ? scratch.take(is.keys * kQueries) : weights;
        float *spare = scratch.take(is.keys * width), *of_keys = scratch.take(is.keys * width);
        float* of_values = scratch.take(is.keys * width);
#pragma omp for
        for (int64_t head = 0; head < is.samples * is.heads; ++head) {
            const Rows keys = whole_vectors(key->of(head, is.heads), is.keys, is.width, spare);
            const Rows values = value->of(head, is.heads), queries = query->of(head, is.heads);
            std::fill(of_keys, of_keys + is.keys * width, 0.0f);
            std::fill(of_values, of_values + is.keys * width, 0.0f);
            for (int64_t first = 0; first < is.queries; first += kQueries) {
                const Block block(is, head, first, allowed, starts, bits);
                const int64_t count = block.count(), begin = block.begin;
                const Rows own_grad = {is.row_of(grad, head, first), stride};
                const Rows query_rows = whole_vectors(queries.from(first), block.rows, is.width, query_spare);
                const Rows grad_rows = whole_vectors(own_grad, block.rows, is.width, grad_spare);
                copy_across(asked, query_rows, block.rows, is.width, is.factor);
                copy_across(slopes, grad_rows, block.rows, is.width, 1.0f);
                product<false>(weights, kQueries, keys.from(begin).start, keys.stride, 1, asked, kQueries, count,
                               kQueries, is.width);
                product<false>(grads, kQueries, values.from(begin).start, values.stride, 1, slopes, kQueries, count,
                               kQueries, is.width);
                block.mask(weights);
                if (bits) block.draw(factors);
                alignas(64) float means[kQueries] = {}, logs[kQueries];
                std::fill(logs, logs + kQueries, INFINITY);  // no weight for queries that are not there
                std::copy_n(log_totals + head * is.queries + first, block.rows, logs);
                for (int64_t i = 0; i < block.rows; ++i) {
                    const float *result = is.row_of(out, head, first + i), *its = own_grad.start + i * stride;
                    float mean = 0.0f;
#pragma omp simd reduction(+ : mean)
                    for (int64_t k = 0; k < is.width; ++k) mean += result[k] * its[k];
                    means[i] = mean;
                }
                for (int part = 0; part < kParts; ++part) {
                    const Vector mean = vectors(means)[part];
                    const Vector log_total = vectors(logs)[part];
                    UnalignedVector* weight = vectors(weights) + part;
                    UnalignedVector* slope = vectors(grads) + part;
                    UnalignedVector* kept_weight = vectors(dropped) + part;
                    const UnalignedVector* factor = vectors(factors) + part;
                    for (int64_t j = 0; j < count * kParts; j += kParts) {
                        const Vector its = exp_of<Bits>(weight[j] - log_total);
                        const Vector back = bits ? slope[j] * factor[j] : slope[j];
                        kept_weight[j] = bits ? its * factor[j] : its;
                        slope[j] = is.factor * its * (back - mean);
                    }
                }
                float* own = is.row_of(grad_query, head, first);
                const bool whole = is.width == width;
                product<false>(whole ? own : mixed, whole ? stride : width, grads, 1, kQueries, keys.from(begin).start,
                               keys.stride, block.rows, width, count);
                if (!whole)
                    for (int64_t i = 0; i < block.rows; ++i)
                        std::memcpy(own + i * stride, mixed + i * width, is.width * sizeof(float));
                product<true>(of_keys + begin * width, width, grads, kQueries, 1, query_rows.start, query_rows.stride,
                              count, width, block.rows);
                product<true>(of_values + begin * width, width, dropped, kQueries, 1, grad_rows.start, grad_rows.stride,
                              count, width, block.rows);
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
