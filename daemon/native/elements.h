// Element types as vectors: how they are loaded, stored and held while they are accumulated.
//
// Included by reductions.cpp only. A new dtype is a new type here and a line in the table of reductions.cpp. An
// element tells
//   Vector        what is accumulated (for 16-bit floats: of float)
//   kItemBytes    bytes of one element in memory
//   kVectorBytes  bytes in memory that fill one Vector
//   load, store   between memory at any address and a Vector
// and the operations that it supports do the rest.
#pragma once

#include <cstddef>
#include <cstdint>

namespace allreduced::ALLREDUCED_ISA {
namespace {

#if defined(__AVX512F__)
constexpr std::size_t kRegisterBytes = 64;
#elif defined(__AVX2__)
constexpr std::size_t kRegisterBytes = 32;
#else
constexpr std::size_t kRegisterBytes = 16;
#endif

template <class Scalar>
struct Register {
    typedef Scalar type __attribute__((vector_size(kRegisterBytes)));
};

template <class T>
struct Plain {
    using Scalar = T;
    using Vector = typename Register<T>::type;
    static constexpr std::size_t kItemBytes = sizeof(T);
    static constexpr std::size_t kVectorBytes = kRegisterBytes;

    static Vector load(const unsigned char* at) {
        Vector value;
        __builtin_memcpy(&value, at, sizeof value);
        return value;
    }
    static void store(unsigned char* at, Vector value) { __builtin_memcpy(at, &value, sizeof value); }
};

struct Float32 : Plain<float> {};
struct Float64 : Plain<double> {};

// Integers wrap, so they are added and multiplied as unsigned numbers.
struct Int32 : Plain<std::int32_t> {
    using Wrapping = Register<std::uint32_t>::type;
};
struct Int64 : Plain<std::int64_t> {
    using Wrapping = Register<std::uint64_t>::type;
};

}  // namespace
}  // namespace allreduced::ALLREDUCED_ISA
