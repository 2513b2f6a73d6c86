// The reductions and the table that finds them.
//
// reductions.cpp is compiled once per instruction set; each copy exports one table. Nothing in this header may
// generate code: the linker keeps one copy of an inline function, and it could be the one with AVX-512 in it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace allreduced {

// Codes of allreduced.core.dtypes.DType and allreduced.core.reductions.Reduction; they never change.
enum class DType : std::uint8_t {
    float32 = 1,
    float64 = 2,
    int32 = 3,
    int64 = 4,
    int8 = 5,
    int16 = 6,
    uint8 = 7,
    uint16 = 8,
    uint32 = 9,
    uint64 = 10,
    boolean = 11,
    float16 = 12,
    bfloat16 = 13,
    complex64 = 14,
    complex128 = 15,
};
enum class Reduction : std::uint8_t {
    copy = 0,
    sum = 1,
    mean = 2,
    prod = 3,
    min = 4,
    max = 5,
    band = 6,
    bor = 7,
    bxor = 8,
    land = 9,
    lor = 10,
    lxor = 11,
};

constexpr std::size_t kDTypes = 16;      // highest code + 1
constexpr std::size_t kReductions = 12;  // highest code + 1

// What one call reduces: `count` elements from the element `first` on, of arrays that start at any address. `target` is
// one of the sources, with elements of the same size, or overlaps none.
struct Operands {
    const unsigned char* const* sources;
    std::size_t source_count;  // at least 1
    std::size_t partials;      // so many of the last sources hold partial results: float for 16-bit floats, else no other
    unsigned char* target;
    bool partial_target;  // target takes a partial result
    std::size_t first;
    std::size_t count;
    double divisor;  // of mean
    bool streaming;  // store past the cache where the target's place allows: the target is no source, and large
};

using Kernel = void (*)(const Operands&);

struct KernelRow {
    std::size_t itemsize;          // 0: no such dtype
    std::size_t partial_itemsize;  // of partial results
    Kernel at[kReductions];        // nullptr: not defined for this dtype
};

struct KernelTable {
    KernelRow row[kDTypes];
};

namespace baseline { extern const KernelTable kTable; }
namespace avx2 { extern const KernelTable kTable; }
namespace avx512 { extern const KernelTable kTable; }

}  // namespace allreduced
