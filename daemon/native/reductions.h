// The reductions and the table that finds them.
//
// reductions.cpp is compiled once per instruction set; each copy exports one table. Nothing in this header may
// generate code: the linker keeps one copy of an inline function, and it could be the one with AVX-512 in it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace allreduced {

// Codes of allreduced.core.dtypes.DType and allreduced.core.reductions.Reduction; they never change.
enum class DType : std::uint8_t { float32 = 1, float64 = 2, int32 = 3, int64 = 4 };
enum class Reduction : std::uint8_t { copy = 0, sum = 1, mean = 2, prod = 3, min = 4, max = 5 };

constexpr std::size_t kDTypes = 5;      // highest code + 1
constexpr std::size_t kReductions = 6;  // highest code + 1

// What one call reduces: `count` elements from the element `first` on, of arrays that start at any address. `target` is
// one of the sources or overlaps none.
struct Operands {
    const unsigned char* const* sources;
    std::size_t source_count;  // at least 1
    unsigned char* target;
    std::size_t first;
    std::size_t count;
    double divisor;     // of mean
};

using Kernel = void (*)(const Operands&);

struct KernelTable {
    std::size_t itemsize[kDTypes];    // 0: no such dtype
    Kernel at[kDTypes][kReductions];  // nullptr: not defined for this dtype
};

namespace baseline { extern const KernelTable kTable; }
namespace avx2 { extern const KernelTable kTable; }
namespace avx512 { extern const KernelTable kTable; }

}  // namespace allreduced
