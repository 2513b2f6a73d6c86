// N inputs and one output in a single pass, for one instruction set (ALLREDUCED_ISA, which the build defines).
//
// For a few vectors' worth of elements, all sources are combined in registers, in their order, and the result is
// stored once: memory traffic is N reads and one write, and target may be one of the sources, since everything that is
// read of an element is read before it is written. All names live in a namespace of this instruction set.
#include "reductions.h"

#include "elements.h"
#include "operations.h"

namespace allreduced::ALLREDUCED_ISA {
namespace {

#define ALLREDUCED_INLINE inline __attribute__((always_inline))

constexpr std::size_t kUnroll = 4;  // vectors that are accumulated side by side

// Reduces kVectors vectors at byte `offset`. kSources is the number of sources, or 0 to take it from the operands.
template <class E, class Op, std::size_t kSources, std::size_t kVectors>
ALLREDUCED_INLINE void combine(const unsigned char* const* sources, std::size_t source_count, unsigned char* target,
                               std::size_t offset, double divisor) {
    const std::size_t n = kSources != 0 ? kSources : source_count;
    typename E::Vector values[kVectors];
    for (std::size_t v = 0; v < kVectors; ++v) values[v] = E::load(sources[0] + offset + v * E::kVectorBytes);
    for (std::size_t s = 1; s < n; ++s) {
        const unsigned char* source = sources[s] + offset;
        for (std::size_t v = 0; v < kVectors; ++v) {
            values[v] = Op::combine(values[v], E::load(source + v * E::kVectorBytes));
        }
    }
    for (std::size_t v = 0; v < kVectors; ++v) {
        E::store(target + offset + v * E::kVectorBytes, Op::finish(values[v], divisor));
    }
}

// The last elements, fewer than a vector: the same arithmetic on padded copies.
template <class E, class Op>
void combine_rest(const Operands& operands, std::size_t offset, std::size_t bytes) {
    unsigned char padded[E::kVectorBytes] = {};
    __builtin_memcpy(padded, operands.sources[0] + offset, bytes);
    typename E::Vector value = E::load(padded);
    for (std::size_t s = 1; s < operands.source_count; ++s) {
        __builtin_memcpy(padded, operands.sources[s] + offset, bytes);
        value = Op::combine(value, E::load(padded));
    }
    E::store(padded, Op::finish(value, operands.divisor));
    __builtin_memcpy(operands.target + offset, padded, bytes);
}

template <class E, class Op, std::size_t kSources>
void reduce_sources(const Operands& operands) {
    const unsigned char* local[kSources != 0 ? kSources : 1];  // in registers: stores to target cannot change them
    for (std::size_t s = 0; s < kSources; ++s) local[s] = operands.sources[s];
    const unsigned char* const* sources = kSources != 0 ? local : operands.sources;
    const std::size_t n = operands.source_count;
    unsigned char* const target = operands.target;
    const double divisor = operands.divisor;

    std::size_t offset = operands.first * E::kItemBytes;
    const std::size_t end = offset + operands.count * E::kItemBytes;
    for (; end - offset >= kUnroll * E::kVectorBytes; offset += kUnroll * E::kVectorBytes) {
        combine<E, Op, kSources, kUnroll>(sources, n, target, offset, divisor);
    }
    for (; end - offset >= E::kVectorBytes; offset += E::kVectorBytes) {
        combine<E, Op, kSources, 1>(sources, n, target, offset, divisor);
    }
    if (offset < end) combine_rest<E, Op>(operands, offset, end - offset);
}

template <class E, template <class> class Op>
void reduce(const Operands& operands) {
    // Unrolling for a known number of sources pays for two, and only for data in the nearest cache.
    if (operands.source_count == 2) {
        reduce_sources<E, Op<E>, 2>(operands);
    } else {
        reduce_sources<E, Op<E>, 0>(operands);
    }
}

template <class E>
void copy(const Operands& operands) {
    if (operands.target != operands.sources[0]) {
        const std::size_t offset = operands.first * E::kItemBytes;
        __builtin_memcpy(operands.target + offset, operands.sources[0] + offset, operands.count * E::kItemBytes);
    }
}

}  // namespace

// Rows: dtype codes. Columns: reduction codes (copy, sum, mean, prod, min, max).
extern const KernelTable kTable;
const KernelTable kTable = {
    {0, Float32::kItemBytes, Float64::kItemBytes, Int32::kItemBytes, Int64::kItemBytes},
    {
        {},
        {copy<Float32>, reduce<Float32, Sum>, reduce<Float32, Mean>, reduce<Float32, Prod>, reduce<Float32, Min>,
         reduce<Float32, Max>},
        {copy<Float64>, reduce<Float64, Sum>, reduce<Float64, Mean>, reduce<Float64, Prod>, reduce<Float64, Min>,
         reduce<Float64, Max>},
        {copy<Int32>, reduce<Int32, Sum>, nullptr, reduce<Int32, Prod>, reduce<Int32, Min>, reduce<Int32, Max>},
        {copy<Int64>, reduce<Int64, Sum>, nullptr, reduce<Int64, Prod>, reduce<Int64, Min>, reduce<Int64, Max>},
    },
};

}  // namespace allreduced::ALLREDUCED_ISA
