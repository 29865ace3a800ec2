// Fused loops over contiguous float32 tensors, compiled for this machine by `nn.kernel_library`.
//
// Each reads and writes memory once where a chain of torch's operations does so several times. Threads share the
// elements or rows of large tensors; the result does not depend on their number. Plain loops, which compilers
// vectorize: `omp simd` allows them to reorder the sums of a row. Products and attention name vectors, of any machine's
// width.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include <omp.h>

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
inline float dropout_factor_of(int16_t bits, int32_t threshold, float scale) {
    return bits >= threshold ? scale : 0.0f;
}

// Calls `loop` with whether there is memory at `pointer`, as a constant: a loop for each case.
template <typename Loop>
inline void with_or_without(const void* pointer, Loop loop) {
    if (pointer)
        loop(std::true_type{});
    else
        loop(std::false_type{});
}

// Float32 values per register of this machine, and how many rows of a product its registers hold at a time: of kVector
// columns, of twice as many, and of as many vectors as suit large products.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kTile = 12, kDoubleTile = 12, kWideParts = 4, kWideTile = 6;
#elif defined(__AVX__)
constexpr int kLanes = 8, kTile = 6, kDoubleTile = 3, kWideParts = 2, kWideTile = 6;
#else
constexpr int kLanes = 4, kTile = 2, kDoubleTile = 1, kWideParts = 4, kWideTile = 2;
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

// `parts` vectors of columns of `product`, in as many rows as `tile` or, if there are fewer, in `rows`.
template <bool adds, int parts, int tile>
inline void product_of_rows(float* c, int64_t c_row, const float* a, int64_t a_row, int64_t a_column, const float* b,
                            int64_t b_row, int64_t rows, int64_t depth) {
    if constexpr (tile > 1)
        if (rows < tile)
            return product_of_rows<adds, parts, tile - 1>(c, c_row, a, a_row, a_column, b, b_row, rows, depth);
    const float* own_rows[tile];
    for (int i = 0; i < tile; ++i) own_rows[i] = a + i * a_row;
    Vector sums[tile][parts] = {};
    for (int64_t k = 0; k < depth; ++k) {
        const UnalignedVector* place = vectors(b + k * b_row);
        Vector factors[parts];
#pragma GCC unroll 8
        for (int part = 0; part < parts; ++part) factors[part] = place[part];
#pragma GCC unroll 16
        for (int i = 0; i < tile; ++i)
#pragma GCC unroll 8
            for (int part = 0; part < parts; ++part) sums[i][part] += own_rows[i][k * a_column] * factors[part];
    }
#pragma GCC unroll 16
    for (int i = 0; i < tile; ++i) {
        UnalignedVector* place = vectors(c + i * c_row);
#pragma GCC unroll 8
        for (int part = 0; part < parts; ++part) place[part] = sums[i][part] + (adds ? place[part] : Vector{});
    }
}

constexpr int64_t kDepth = 128;  // rows of b that a product reads at a time: they stay in the cache

// c [rows, columns] = a [rows, depth] × b [depth, columns], or += if `adds`. Columns are a multiple of `parts` vectors.
// The element (i, k) of a is a[i × a_row + k × a_column]; b and c have their rows b_row and c_row apart.
template <bool adds, int parts = kParts, int tile = kTile>
inline void product(float* c, int64_t c_row, const float* a, int64_t a_row, int64_t a_column, const float* b,
                    int64_t b_row, int64_t rows, int64_t columns, int64_t depth) {
    const int64_t own = std::min(depth, kDepth);
    for (int64_t column = 0; column < columns; column += parts * kLanes)
        for (int64_t row = 0; row < rows; row += tile)
            product_of_rows<adds, parts, tile>(c + row * c_row + column, c_row, a + row * a_row, a_row, a_column,
                                               b + column, b_row, rows - row, own);
    if (depth > own)
        product<true, parts, tile>(c, c_row, a + own * a_column, a_row, a_column, b + own * b_row, b_row, rows, columns,
                                   depth - own);
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

constexpr int64_t kFewRows = 128;  // more that lie far apart fall into the same few sets of a cache

// The rows themselves if their width is a multiple of kVector and they are few or side by side, else copies in
// `scratch` that are, padded with zeros.
inline Rows pack_rows(Rows rows, int64_t count, int64_t width, float* scratch) {
    const int64_t padded_width = padded(width);
    if (width == padded_width && (count < kFewRows || rows.stride == width)) return rows;
    for (int64_t row = 0; row < count; ++row) {
        std::memcpy(scratch + row * padded_width, rows.start + row * rows.stride, width * sizeof(float));
        std::fill(scratch + row * padded_width + width, scratch + (row + 1) * padded_width, 0.0f);
    }
    return {scratch, padded_width};
}

template <int first, int... lane>
inline Vector interleaved(Vector left, Vector right, std::integer_sequence<int, lane...>) {
#if defined(__clang__)
    return __builtin_shufflevector(left, right, (lane % 2 * kLanes + lane / 2 + first)...);
#else  // g++ has that from 12 on
    return __builtin_shuffle(left, right, Integers{(lane % 2 * kLanes + lane / 2 + first)...});
#endif
}

// Transposes a square of numbers. Each round interleaves the rows of its first half with those of its second.
inline void transpose(Vector (&square)[kLanes]) {
    constexpr std::make_integer_sequence<int, kLanes> lanes;
#pragma GCC unroll 4
    for (int done = 1; done < kLanes; done *= 2) {
        Vector next[kLanes];
#pragma GCC unroll 8
        for (int i = 0; i < kLanes / 2; ++i) {
            next[2 * i] = interleaved<0>(square[i], square[i + kLanes / 2], lanes);
            next[2 * i + 1] = interleaved<kLanes / 2>(square[i], square[i + kLanes / 2], lanes);
        }
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) square[i] = next[i];
    }
}

// Copies `count` rows × `scale` as columns to `out` [width, columns]; the other columns become zero.
template <int64_t columns>
inline void copy_transposed(float* out, Rows rows, int64_t count, int64_t width, float scale) {
    const int64_t whole = width / kLanes * kLanes;
    for (int64_t i = 0; i < whole; i += kLanes)
        for (int64_t first = 0; first < columns; first += kLanes) {
            Vector square[kLanes];
#pragma GCC unroll 16
            for (int row = 0; row < kLanes; ++row)
                square[row] = first + row < count ? vectors(rows.from(first + row).start + i)[0] * scale : Vector{};
            transpose(square);
#pragma GCC unroll 16
            for (int row = 0; row < kLanes; ++row) vectors(out + (i + row) * columns + first)[0] = square[row];
        }
    for (int64_t i = whole; i < width; ++i) {
        for (int64_t row = 0; row < count; ++row) out[i * columns + row] = rows.start[row * rows.stride + i] * scale;
        std::fill(out + i * columns + count, out + (i + 1) * columns, 0.0f);
    }
}

// Where the queries, keys or values [B, H, T, D/H] of each head lie, or their gradients, by their strides; rows are
// contiguous.
struct Heads {
    float* start;
    int64_t sample_stride, head_stride, row_stride;

    float* at(int64_t head, int64_t num_heads, int64_t row = 0) const {
        return start + head / num_heads * sample_stride + head % num_heads * head_stride + row * row_stride;
    }

    Rows of(int64_t head, int64_t num_heads) const { return {at(head, num_heads), row_stride}; }
};

struct AttentionParams {
    int64_t batch, heads, queries, keys, head_dim;
    int32_t causal, dropout_threshold;
    float softmax_scale, dropout_scale;

    template <typename Number>
    Number* row_of(Number* out, int64_t head, int64_t query) const {
        return out + ((head / heads * queries + query) * heads + head % heads) * head_dim;
    }

    // The number of keys that the queries up to `query` may see.
    int64_t end_of(int64_t query) const { return causal ? keys - queries + query + 1 : keys; }
};

// Queries per block of attention: one in each lane of its vectors.
constexpr int64_t kQueries = kVector, kDoubleQueries = 2 * kVector;

// Up to `most` queries of one head, from `first` on, and the keys `begin` to `end` - 1 that any of them sees. Scores
// and weights have a row per key and a column per query, so sums over the keys of a query are sums of whole vectors.
template <int64_t most>
struct Block {
    static constexpr int parts = most / kLanes;
    const AttentionParams& attn;
    int64_t head, first, rows, begin, end;
    const bool* is_allowed;  // by key; null: all keys
    const int16_t* bits;
    int64_t common_begin, common_end;  // the keys that all queries of the block see
    Integers begins[parts], ends[parts];

    Block(const AttentionParams& its_attn, int64_t its_head, int64_t its_first, const bool* allowed,
          const int64_t* starts, const int16_t* all_bits)
        : attn(its_attn), head(its_head), first(its_first), rows(std::min(most, attn.queries - first)) {
        const int64_t* own = starts ? starts + head / attn.heads * attn.queries + first : nullptr;
        begin = own ? own[0] : 0;
        common_begin = own ? own[rows - 1] : 0;
        common_end = attn.end_of(first);
        end = attn.end_of(first + rows - 1);
        is_allowed = allowed ? allowed + head / attn.heads * attn.keys : nullptr;
        bits = all_bits ? all_bits + (head * attn.queries + first) * attn.keys : nullptr;
        for (int64_t query = 0; query < most; ++query) {
            const int64_t own_or_last = std::min(query, rows - 1);
            begins[query / kLanes][query % kLanes] = own ? own[own_or_last] : 0;
            ends[query / kLanes][query % kLanes] = attn.end_of(first + own_or_last);
        }
    }

    int64_t count() const { return end - begin; }

    // Sets the scores of keys that a query does not see to -infinity.
    void mask(float* scores) const {
        const auto mask_some = [&](int64_t from, int64_t to) {
            for (int64_t j = from; j < to; ++j) {
                UnalignedVector* score = vectors(scores + (j - begin) * most);
                const Integers key = Integers{} + static_cast<int32_t>(j);
                for (int part = 0; part < parts; ++part)
                    score[part] = (begins[part] <= key) & (key < ends[part]) ? score[part] : Vector{} - INFINITY;
            }
        };
        mask_some(begin, std::min(common_begin, end));
        mask_some(std::max(begin, std::min(common_end, end)), end);
        if (!is_allowed) return;
        for (int64_t j = begin; j < end; ++j)
            if (!is_allowed[j]) std::fill_n(scores + (j - begin) * most, most, -INFINITY);
    }

    // Writes what dropout multiplies the weights by, laid out as the weights.
    void fill_dropout_factors(float* factors) const {
        constexpr int64_t kAtOnce = 64;  // keys, whose factors stay in the cache
        for (int64_t from = begin; from < end; from += kAtOnce)
            for (int64_t i = 0; i < rows; ++i)
                for (int64_t j = from; j < std::min(from + kAtOnce, end); ++j)
                    factors[(j - begin) * most + i] =
                        dropout_factor_of(bits[i * attn.keys + j], attn.dropout_threshold, attn.dropout_scale);
    }
};

// Whether blocks of twice as many queries are faster: keys are read half as often, but more scores are computed that the
// causal mask hides. With `starts`, blocks usually have few keys. Half a register per query gains nothing.
inline bool use_double_blocks(const AttentionParams& attn, const int64_t* starts) {
    return kLanes == kVector && !starts && attn.queries >= kDoubleQueries && attn.keys >= 512;
}

// `attention_forward` in blocks of `most` queries.
template <int64_t most>
void attend(float* out, float* log_sum_exp, const Heads* query, const Heads* key, const Heads* value,
            const bool* allowed, const int64_t* starts, const int16_t* bits, const AttentionParams& attn) {
    constexpr int parts = most / kLanes, tile = parts == kParts ? kTile : kDoubleTile;
    const int64_t padded_dim = padded(attn.head_dim), stride = attn.heads * attn.head_dim;
#pragma omp parallel if (attn.batch * attn.heads * attn.queries * attn.keys >= kParallelFrom)
    {
        const int64_t block_size = attn.keys * most;
        Scratch scratch((bits ? 2 : 1) * block_size + 2 * (most + attn.keys) * padded_dim);
        float *scaled_queries = scratch.take(most * padded_dim), *padded_out = scratch.take(most * padded_dim);
        float *weights = scratch.take(block_size), *dropout_factors = bits ? scratch.take(block_size) : weights;
        float* packed_keys = scratch.take(attn.keys * padded_dim);
        float* packed_values = scratch.take(attn.keys * padded_dim);
#pragma omp for
        for (int64_t head = 0; head < attn.batch * attn.heads; ++head) {
            const Rows queries = query->of(head, attn.heads);
            const Rows keys = pack_rows(key->of(head, attn.heads), attn.keys, attn.head_dim, packed_keys);
            const Rows values = pack_rows(value->of(head, attn.heads), attn.keys, attn.head_dim, packed_values);
            for (int64_t first = 0; first < attn.queries; first += most) {
                const Block<most> block(attn, head, first, allowed, starts, bits);
                const int64_t count = block.count();
                copy_transposed<most>(scaled_queries, queries.from(first), block.rows, attn.head_dim, attn.softmax_scale);
                product<false, parts, tile>(weights, most, keys.from(block.begin).start, keys.stride, 1, scaled_queries,
                               most, count, most, attn.head_dim);
                block.mask(weights);
                if (bits) block.fill_dropout_factors(dropout_factors);
                alignas(64) float inverse_sums[most];
                for (int part = 0; part < parts; ++part) {
                    UnalignedVector* weight = vectors(weights) + part;
                    const UnalignedVector* dropout_factor = vectors(dropout_factors) + part;
                    Vector row_max = Vector{} - INFINITY, row_sum = {};
                    for (int64_t j = 0; j < count; ++j)
                        row_max = weight[j * parts] > row_max ? weight[j * parts] : row_max;
                    for (int64_t j = 0; j < count; ++j) {
                        const Vector exponential = exp_of<Bits>(weight[j * parts] - row_max);
                        row_sum += exponential;
                        weight[j * parts] = bits ? exponential * dropout_factor[j * parts] : exponential;
                    }
                    for (int lane = 0; lane < kLanes; ++lane) {
                        const int64_t i = part * kLanes + lane;
                        inverse_sums[i] = 1.0f / row_sum[lane];
                        if (i < block.rows)
                            log_sum_exp[head * attn.queries + first + i] = row_max[lane] + std::log(row_sum[lane]);
                    }
                }
                float* own = attn.row_of(out, head, first);
                const bool is_aligned = attn.head_dim == padded_dim;
                product<false>(is_aligned ? own : padded_out, is_aligned ? stride : padded_dim, weights, 1, most,
                               values.from(block.begin).start, values.stride, block.rows, padded_dim, count);
                for (int64_t i = 0; i < block.rows; ++i)
                    for (int64_t k = 0; k < attn.head_dim; ++k)
                        own[i * stride + k] =
                            (is_aligned ? own[i * stride + k] : padded_out[i * padded_dim + k]) * inverse_sums[i];
            }
        }
    }
}

// `attention_backward` in blocks of `most` queries.
template <int64_t most>
void attend_backward(const Heads* grad_query, const Heads* grad_key, const Heads* grad_value, const float* grad,
                     const float* log_sum_exp, const Heads* query, const Heads* key, const Heads* value,
                     const bool* allowed, const int64_t* starts, const int16_t* bits, const AttentionParams& attn) {
    constexpr int parts = most / kLanes, tile = parts == kParts ? kTile : kDoubleTile;
    const int64_t padded_dim = padded(attn.head_dim), stride = attn.heads * attn.head_dim;
#pragma omp parallel if (attn.batch * attn.heads * attn.queries * attn.keys >= kParallelFrom)
    {
        const int64_t block_size = attn.keys * most;
        Scratch scratch((bits ? 4 : 2) * block_size + (5 * most + 4 * attn.keys) * padded_dim);
        float* scaled_queries = scratch.take(most * padded_dim);
        float* grad_columns = scratch.take(most * padded_dim);
        float* packed_queries = scratch.take(most * padded_dim);
        float* packed_grads = scratch.take(most * padded_dim);
        float* padded_out = scratch.take(most * padded_dim);
        float *weights = scratch.take(block_size), *grad_scores = scratch.take(block_size);
        float* dropout_factors = bits ? scratch.take(block_size) : weights;  // not read
        float* dropped_weights = bits ? scratch.take(block_size) : weights;
        float* packed_keys = scratch.take(attn.keys * padded_dim);
        float* packed_values = scratch.take(attn.keys * padded_dim);
        float* key_grads = scratch.take(attn.keys * padded_dim);
        float* value_grads = scratch.take(attn.keys * padded_dim);
#pragma omp for
        for (int64_t head = 0; head < attn.batch * attn.heads; ++head) {
            const Rows queries = query->of(head, attn.heads);
            const Rows keys = pack_rows(key->of(head, attn.heads), attn.keys, attn.head_dim, packed_keys);
            const Rows values = pack_rows(value->of(head, attn.heads), attn.keys, attn.head_dim, packed_values);
            std::fill(key_grads, key_grads + attn.keys * padded_dim, 0.0f);
            std::fill(value_grads, value_grads + attn.keys * padded_dim, 0.0f);
            for (int64_t first = 0; first < attn.queries; first += most) {
                const Block<most> block(attn, head, first, allowed, starts, bits);
                const int64_t count = block.count(), begin = block.begin;
                const Rows own_grad = {attn.row_of(grad, head, first), stride};
                const Rows query_rows = pack_rows(queries.from(first), block.rows, attn.head_dim, packed_queries);
                const Rows grad_rows = pack_rows(own_grad, block.rows, attn.head_dim, packed_grads);
                copy_transposed<most>(scaled_queries, query_rows, block.rows, attn.head_dim, attn.softmax_scale);
                copy_transposed<most>(grad_columns, grad_rows, block.rows, attn.head_dim, 1.0f);
                product<false, parts, tile>(weights, most, keys.from(begin).start, keys.stride, 1, scaled_queries, most,
                               count, most, attn.head_dim);
                product<false, parts, tile>(grad_scores, most, values.from(begin).start, values.stride, 1, grad_columns,
                               most, count, most, attn.head_dim);
                block.mask(weights);
                if (bits) block.fill_dropout_factors(dropout_factors);
                alignas(64) float block_lse[most];
                std::fill(block_lse, block_lse + most, INFINITY);  // weights of queries past the last one are zero
                std::copy_n(log_sum_exp + head * attn.queries + first, block.rows, block_lse);
                for (int part = 0; part < parts; ++part) {
                    const Vector lse = vectors(block_lse)[part];
                    UnalignedVector* weight = vectors(weights) + part;
                    UnalignedVector* grad_score = vectors(grad_scores) + part;
                    UnalignedVector* dropped_weight = vectors(dropped_weights) + part;
                    const UnalignedVector* dropout_factor = vectors(dropout_factors) + part;
                    Vector delta = {};  // FlashAttention's D, there the sum of out × grad
                    for (int64_t j = 0; j < count * parts; j += parts) {
                        const Vector probability = exp_of<Bits>(weight[j] - lse);
                        const Vector grad_weight = bits ? grad_score[j] * dropout_factor[j] : grad_score[j];
                        delta += probability * grad_weight;
                        weight[j] = probability;
                        grad_score[j] = grad_weight;
                        if (bits) dropped_weight[j] = probability * dropout_factor[j];
                    }
                    for (int64_t j = 0; j < count * parts; j += parts)
                        grad_score[j] = attn.softmax_scale * weight[j] * (grad_score[j] - delta);
                }
                float* own = grad_query->at(head, attn.heads, first);
                const bool is_aligned = attn.head_dim == padded_dim;
                const int64_t own_stride = grad_query->row_stride;
                product<false>(is_aligned ? own : padded_out, is_aligned ? own_stride : padded_dim, grad_scores, 1,
                               most, keys.from(begin).start, keys.stride, block.rows, padded_dim, count);
                if (!is_aligned)
                    for (int64_t i = 0; i < block.rows; ++i)
                        std::memcpy(own + i * own_stride, padded_out + i * padded_dim, attn.head_dim * sizeof(float));
                product<true>(key_grads + begin * padded_dim, padded_dim, grad_scores, most, 1, query_rows.start,
                              query_rows.stride, count, padded_dim, block.rows);
                product<true>(value_grads + begin * padded_dim, padded_dim, dropped_weights, most, 1,
                              grad_rows.start, grad_rows.stride, count, padded_dim, block.rows);
            }
            for (int64_t j = 0; j < attn.keys; ++j) {
                const size_t bytes = attn.head_dim * sizeof(float);
                std::memcpy(grad_key->at(head, attn.heads, j), key_grads + j * padded_dim, bytes);
                std::memcpy(grad_value->at(head, attn.heads, j), value_grads + j * padded_dim, bytes);
            }
        }
    }
}

// c [rows, columns] = aᵀ × b, or += if `adds`, of a [depth, rows] and b [depth, columns] with any number of columns.
template <bool adds>
inline void transposed_product(float* c, int64_t c_row, const float* a, int64_t a_row, const float* b, int64_t b_row,
                               int64_t rows, int64_t columns, int64_t depth) {
    constexpr int64_t kWide = kWideParts * kLanes;
    const int64_t wide = columns / kWide * kWide, narrow = (columns - wide) / kVector * kVector;
    product<adds, kWideParts, kWideTile>(c, c_row, a, 1, a_row, b, b_row, rows, wide, depth);
    product<adds>(c + wide, c_row, a, 1, a_row, b + wide, b_row, rows, narrow, depth);
    const int64_t done = wide + narrow, rest = columns - done;
    if (rest == 0) return;
    Scratch scratch((depth + rows) * kVector);
    const Rows padded_b = pack_rows({b + done, b_row}, depth, rest, scratch.take(depth * kVector));
    float* padded_c = scratch.take(rows * kVector);
    product<false>(padded_c, kVector, a, 1, a_row, padded_b.start, kVector, rows, kVector, depth);
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t i = 0; i < rest; ++i) {
            float& own = c[row * c_row + done + i];
            own = padded_c[row * kVector + i] + (adds ? own : 0.0f);
        }
}

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
    const float *values = in.values + start, *grad = in.grad + start, *residual = has_residual ? in.residual + start : nullptr;
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
