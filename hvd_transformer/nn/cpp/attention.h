// Scaled dot-product attention, a block of queries at a time (FlashAttention, Dao et al. 2022, arXiv 2205.14135).

#pragma once

#include <cmath>

#include "products.h"

namespace {

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
                    score[part] = ((begins[part] <= key) & (key < ends[part])) ? score[part] : Vector{} - INFINITY;
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
// causal mask hides. With `starts`, blocks usually have few keys. Narrower registers gain nothing.
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
                copy_transposed<most>(scaled_queries, queries.from(first), block.rows, attn.head_dim,
                                      attn.softmax_scale);
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
                deep_product(is_aligned ? own : padded_out, is_aligned ? stride : padded_dim, weights, 1, most,
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
                deep_product(is_aligned ? own : padded_out, is_aligned ? own_stride : padded_dim, grad_scores, 1, most,
                             keys.from(begin).start, keys.stride, block.rows, padded_dim, count);
                if (!is_aligned)
                    for (int64_t i = 0; i < block.rows; ++i)
                        std::memcpy(own + i * own_stride, padded_out + i * padded_dim, attn.head_dim * sizeof(float));
                product<true>(key_grads + begin * padded_dim, padded_dim, grad_scores, most, 1, query_rows.start,
                              query_rows.stride, count, padded_dim, block.rows);
                product<true>(value_grads + begin * padded_dim, padded_dim, dropped_weights, most, 1, grad_rows.start,
                              grad_rows.stride, count, padded_dim, block.rows);
            }
            for (int64_t j = 0; j < attn.keys; ++j) {
                const size_t bytes = attn.head_dim * sizeof(float);
                std::memcpy(grad_key->at(head, attn.heads, j), key_grads + j * padded_dim, bytes);
                std::memcpy(grad_value->at(head, attn.heads, j), value_grads + j * padded_dim, bytes);
            }
        }
    }
}

}  // namespace
