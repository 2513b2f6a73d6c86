// Element types as vectors: how they are loaded, stored and held while they are accumulated.
//
// Included by reductions.cpp only. A new dtype is a new type here (or in narrow_floats.h) and a row in the table of
// reductions.cpp. An element tells
//   Vector      what is accumulated (for 16-bit floats: of float)
//   Partial     the element whose memory holds an accumulated value without loss; itself unless it is narrower
//   kItemBytes  bytes of one element in memory
//   kLanes      elements of one Vector
//   load, store, stream: between memory at any address and a Vector
//   kPaired     whether there are load_pair, store_pair, stream_pair too, which do that with two Vectors at a time
// and the operations that it supports do the rest.
#pragma once

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include <cstddef>
#include <cstdint>
#include <utility>

namespace allreduced::ALLREDUCED_ISA {
namespace {

#if defined(__AVX512F__)
constexpr std::size_t kRegisterBytes = 64;
#elif defined(__AVX2__)
constexpr std::size_t kRegisterBytes = 32;
#else
constexpr std::size_t kRegisterBytes = 16;
#endif

template <class Scalar, std::size_t kCount = kRegisterBytes / sizeof(Scalar)>
struct Register {
    typedef Scalar type __attribute__((vector_size(kCount * sizeof(Scalar))));
};

template <class V>
inline V load_vector(const unsigned char* at) {
    V value;
    __builtin_memcpy(&value, at, sizeof value);
    return value;
}

// Stores a vector at a multiple of its size without reading its cache line first.
template <class V>
inline void stream_vector(unsigned char* at, V value) {
#if defined(__AVX512F__)
    if constexpr (sizeof value == 64) return _mm512_stream_si512(reinterpret_cast<__m512i*>(at), (__m512i)value);
#endif
#if defined(__AVX2__)
    if constexpr (sizeof value == 32) return _mm256_stream_si256(reinterpret_cast<__m256i*>(at), (__m256i)value);
#endif
#if defined(__SSE2__)
    if constexpr (sizeof value == 16) return _mm_stream_si128(reinterpret_cast<__m128i*>(at), (__m128i)value);
#endif
    __builtin_memcpy(at, &value, sizeof value);
}

// Orders streamed stores before everything that other threads see later.
inline void stream_end() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

template <class T>
struct Plain {
    static constexpr bool kPaired = false;
    using Partial = Plain;
    using Scalar = T;
    using Vector = typename Register<T>::type;
    static constexpr std::size_t kItemBytes = sizeof(T);
    static constexpr std::size_t kLanes = kRegisterBytes / kItemBytes;

    static Vector load(const unsigned char* at) { return load_vector<Vector>(at); }
    static void store(unsigned char* at, Vector value) { __builtin_memcpy(at, &value, sizeof value); }
    static void stream(unsigned char* at, Vector value) { stream_vector(at, value); }
};

using Float32 = Plain<float>;
using Float64 = Plain<double>;

// Integers wrap: they are added and multiplied as unsigned numbers, whatever their sign.
using Int8 = Plain<std::int8_t>;
using Int16 = Plain<std::int16_t>;
using Int32 = Plain<std::int32_t>;
using Int64 = Plain<std::int64_t>;
using UInt8 = Plain<std::uint8_t>;
using UInt16 = Plain<std::uint16_t>;
using UInt32 = Plain<std::uint32_t>;
using UInt64 = Plain<std::uint64_t>;

// Pairs of real and imaginary part, one behind the other as in memory.
template <class T>
struct Complex : Plain<T> {
    using Partial = Complex;
    using Vector = typename Plain<T>::Vector;
    static constexpr std::size_t kItemBytes = 2 * sizeof(T);
    static constexpr std::size_t kLanes = kRegisterBytes / kItemBytes;

    static Vector swapped(Vector value) { return swapped(value, std::make_index_sequence<2 * kLanes>()); }
    static Vector real_twice(Vector value) { return real_twice(value, std::make_index_sequence<2 * kLanes>()); }
    static Vector imaginary_twice(Vector value) {
        return imaginary_twice(value, std::make_index_sequence<2 * kLanes>());
    }

   private:
    template <std::size_t... kAt>
    static Vector swapped(Vector value, std::index_sequence<kAt...>) {
        return __builtin_shufflevector(value, value, (kAt ^ 1)...);
    }
    template <std::size_t... kAt>
    static Vector real_twice(Vector value, std::index_sequence<kAt...>) {
        return __builtin_shufflevector(value, value, (kAt & ~std::size_t{1})...);
    }
    template <std::size_t... kAt>
    static Vector imaginary_twice(Vector value, std::index_sequence<kAt...>) {
        return __builtin_shufflevector(value, value, (kAt | 1)...);
    }
};

using Complex64 = Complex<float>;
using Complex128 = Complex<double>;

}  // namespace
}  // namespace allreduced::ALLREDUCED_ISA
