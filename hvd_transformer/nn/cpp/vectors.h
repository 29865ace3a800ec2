// What all kernels share: vectors of any machine's width, exponentials, dropout.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

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

// Float32 values per register of this machine.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kParts = kVector / kLanes;

typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));
// Named where it is used: g++ leaves the attributes out of what `auto*` stands for.
typedef Vector UnalignedVector __attribute__((aligned(sizeof(float)), may_alias));
typedef int32_t Integers __attribute__((vector_size(kLanes * sizeof(int32_t))));
typedef uint32_t Bits __attribute__((vector_size(kLanes * sizeof(uint32_t))));

inline UnalignedVector* vectors(float* values) { return reinterpret_cast<UnalignedVector*>(values); }
inline const UnalignedVector* vectors(const float* values) { return reinterpret_cast<const UnalignedVector*>(values); }

}  // namespace
