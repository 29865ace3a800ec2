// Products of matrices that fit the cache, and what they read: rows side by side, padded, transposed.

#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "vectors.h"

namespace {

// How many rows of a product the registers hold at a time: of kVector columns, of twice as many, and of as many vectors
// as suit large products.
#if defined(__AVX512F__)
constexpr int kTile = 12, kDoubleTile = 12, kWideParts = 4, kWideTile = 6;
#elif defined(__AVX__)
constexpr int kTile = 6, kDoubleTile = 3, kWideParts = 2, kWideTile = 6;
#else
constexpr int kTile = 2, kDoubleTile = 1, kWideParts = 4, kWideTile = 2;
#endif

inline int64_t padded(int64_t count) { return (count + kVector - 1) / kVector * kVector; }

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

// c [rows, columns] = a [rows, depth] × b [depth, columns], or += if `adds`. Columns are a multiple of `parts` vectors.
// The element (i, k) of a is a[i × a_row + k × a_column]; b and c have their rows b_row and c_row apart.
template <bool adds, int parts = kParts, int tile = kTile>
inline void product(float* c, int64_t c_row, const float* a, int64_t a_row, int64_t a_column, const float* b,
                    int64_t b_row, int64_t rows, int64_t columns, int64_t depth) {
    for (int64_t column = 0; column < columns; column += parts * kLanes)
        for (int64_t row = 0; row < rows; row += tile)
            product_of_rows<adds, parts, tile>(c + row * c_row + column, c_row, a + row * a_row, a_row, a_column,
                                               b + column, b_row, rows - row, depth);
}

constexpr int64_t kDepth = 128;  // rows of b that stay in the cache

// The same of any depth, kDepth rows of b at a time.
inline void deep_product(float* c, int64_t c_row, const float* a, int64_t a_row, int64_t a_column, const float* b,
                         int64_t b_row, int64_t rows, int64_t columns, int64_t depth) {
    product<false>(c, c_row, a, a_row, a_column, b, b_row, rows, columns, std::min(kDepth, depth));
    for (int64_t k = kDepth; k < depth; k += kDepth)
        product<true>(c, c_row, a + k * a_column, a_row, a_column, b + k * b_row, b_row, rows, columns,
                      std::min(kDepth, depth - k));
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

}  // namespace
