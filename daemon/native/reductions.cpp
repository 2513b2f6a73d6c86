// N inputs and one output in a single pass, for one instruction set (ALLREDUCED_ISA, which the build defines).
//
// For a few vectors' worth of elements, all sources are combined in registers, in their order, and the result is
// stored once: memory traffic is N reads and one write, and target may be one of the sources, since everything that is
// read of an element is read before it is written. All names live in a namespace of this instruction set.
#include "reductions.h"

#include <type_traits>

#include "elements.h"
#include "narrow_floats.h"
#include "operations.h"

namespace allreduced::ALLREDUCED_ISA {
namespace {

#define ALLREDUCED_INLINE inline __attribute__((always_inline))

constexpr std::size_t kCacheLine = 64;
// Bytes that are asked for ahead of what is read, where much is read: the memory is then waited for while what came is
// converted and combined. It costs nothing where combining is all but free, and may lie behind the end of a source.
constexpr std::size_t kAhead = 1024;

// What the memory holds: sources of Element_, but partial results in the last `partials` of them if kMixed_; a target of
// Target_, which is Element_ or its Partial.
template <class Element_, class Target_, bool kMixed_>
struct Layout {
    using Element = Element_;
    using Partial = typename Element::Partial;
    using Target = Target_;
    using Vector = typename Element::Vector;
    static constexpr bool kMixed = kMixed_;
    // Partial results come one vector at a time, in the order of their elements.
    static constexpr bool kPaired = Element::kPaired && !kMixed && std::is_same_v<Element, Target>;
    static constexpr std::size_t kLanes = Element::kLanes;
    // Vectors that are accumulated side by side; of narrow elements more, which take as much memory.
    static constexpr std::size_t kUnroll = Element::kItemBytes < sizeof(typename Element::Scalar) ? 8 : 4;
};

template <class E>
typename E::Vector load_padded(const unsigned char* at, std::size_t count) {
    unsigned char padded[E::kLanes * E::kItemBytes] = {};
    __builtin_memcpy(padded, at, count * E::kItemBytes);
    return E::load(padded);
}

// Returns the elements at `element` of one source.
template <class L>
ALLREDUCED_INLINE typename L::Vector load(const unsigned char* source, bool partial, std::size_t element) {
    using Element = typename L::Element;
    using Partial = typename L::Partial;
    if (L::kMixed && partial) return Partial::load(source + element * Partial::kItemBytes);
    return Element::load(source + element * Element::kItemBytes);
}

// Gets kVectors vectors of one source, from `element` on; `read(v, value)` takes each.
template <class L, std::size_t kVectors, bool kPrefetch, class Read>
ALLREDUCED_INLINE void load_all(const unsigned char* source, bool partial, std::size_t element, Read read) {
    using Element = typename L::Element;
    if constexpr (kPrefetch) {
        constexpr std::size_t kBytes = kVectors * L::kLanes * Element::kItemBytes;
        const unsigned char* const at = source + element * Element::kItemBytes + kAhead;
        for (std::size_t byte = 0; byte < kBytes; byte += kCacheLine) __builtin_prefetch(at + byte);
    }
    if constexpr (L::kPaired && kVectors % 2 == 0) {
        for (std::size_t v = 0; v < kVectors; v += 2) {
            typename L::Vector first, second;
            Element::load_pair(source + (element + v * L::kLanes) * Element::kItemBytes, first, second);
            read(v, first);
            read(v + 1, second);
        }
    } else {
        for (std::size_t v = 0; v < kVectors; ++v) read(v, load<L>(source, partial, element + v * L::kLanes));
    }
}

// Reduces kVectors vectors from `element` on. kSources is the number of sources, or 0 to take `source_count`.
template <class L, class Op, std::size_t kSources, std::size_t kVectors, bool kStreaming>
ALLREDUCED_INLINE void combine(const unsigned char* const* sources, std::size_t source_count, std::size_t elements,
                               unsigned char* target, std::size_t element, double divisor) {
    using Target = typename L::Target;
    const std::size_t n = kSources != 0 ? kSources : source_count;
    typename L::Vector values[kVectors];
    using V = typename L::Vector;
    const auto begin = [&values](std::size_t v, V value) { values[v] = Op::begin(value); };
    const auto combine = [&values](std::size_t v, V value) { values[v] = Op::combine(values[v], value); };
    load_all<L, kVectors, kStreaming>(sources[0], elements == 0, element, begin);
    for (std::size_t s = 1; s < n; ++s) {
        load_all<L, kVectors, kStreaming>(sources[s], s >= elements, element, combine);
    }
    for (std::size_t v = 0; v < kVectors; ++v) values[v] = Op::finish(values[v], divisor);
    constexpr std::size_t kStep = L::kPaired && kVectors % 2 == 0 ? 2 : 1;
    for (std::size_t v = 0; v < kVectors; v += kStep) {
        unsigned char* const at = target + (element + v * L::kLanes) * Target::kItemBytes;
        if constexpr (kStep == 2 && kStreaming) {
            Target::stream_pair(at, values[v], values[v + 1]);
        } else if constexpr (kStep == 2) {
            Target::store_pair(at, values[v], values[v + 1]);
        } else if constexpr (kStreaming) {
            Target::stream(at, values[v]);
        } else {
            Target::store(at, values[v]);
        }
    }
}

// The last elements, fewer than a vector: the same arithmetic on padded copies.
template <class L, class Op>
void combine_rest(const Operands& operands, std::size_t element, std::size_t count) {
    using Element = typename L::Element;
    using Partial = typename L::Partial;
    using Target = typename L::Target;
    const auto load_rest = [&](std::size_t s) {
        if (L::kMixed && s >= operands.source_count - operands.partials) {
            return load_padded<Partial>(operands.sources[s] + element * Partial::kItemBytes, count);
        }
        return load_padded<Element>(operands.sources[s] + element * Element::kItemBytes, count);
    };
    typename L::Vector value = Op::begin(load_rest(0));
    for (std::size_t s = 1; s < operands.source_count; ++s) value = Op::combine(value, load_rest(s));
    unsigned char padded[L::kLanes * Target::kItemBytes];
    Target::store(padded, Op::finish(value, operands.divisor));
    __builtin_memcpy(operands.target + element * Target::kItemBytes, padded, count * Target::kItemBytes);
}

template <class L, class Op, std::size_t kSources, bool kStreaming = false>
void reduce_sources(const Operands& operands) {
    const unsigned char* local[kSources != 0 ? kSources : 1];  // in registers: stores to target cannot change them
    for (std::size_t s = 0; s < kSources; ++s) local[s] = operands.sources[s];
    const unsigned char* const* sources = kSources != 0 ? local : operands.sources;
    const std::size_t n = operands.source_count;
    const std::size_t elements = n - operands.partials;
    unsigned char* const target = operands.target;
    const double divisor = operands.divisor;

    std::size_t element = operands.first;
    const std::size_t end = element + operands.count;
    constexpr std::size_t kVectors = L::kUnroll;
    for (; end - element >= kVectors * L::kLanes; element += kVectors * L::kLanes) {
        combine<L, Op, kSources, kVectors, kStreaming>(sources, n, elements, target, element, divisor);
    }
    if constexpr (kStreaming) stream_end();
    for (; end - element >= L::kLanes; element += L::kLanes) {
        combine<L, Op, kSources, 1, false>(sources, n, elements, target, element, divisor);
    }
    if (element < end) combine_rest<L, Op>(operands, element, end - element);
}

template <class E, template <class> class Op>
void reduce(const Operands& operands) {
    using Partial = typename E::Partial;
    if constexpr (!std::is_same_v<E, Partial>) {
        if (operands.partial_target) return reduce_sources<Layout<E, Partial, true>, Op<E>, 0>(operands);
        if (operands.partials > 0) return reduce_sources<Layout<E, E, true>, Op<E>, 0>(operands);
    }
    const auto begin = reinterpret_cast<std::uintptr_t>(operands.target) + operands.first * E::kItemBytes;
    if (operands.streaming && begin % (E::kLanes * E::kItemBytes * (E::kPaired ? 2 : 1)) == 0) {
        return reduce_sources<Layout<E, E, false>, Op<E>, 0, true>(operands);
    }
    // Unrolling for a known number of sources pays for two, and only for data in the nearest cache.
    if (operands.source_count == 2) {
        reduce_sources<Layout<E, E, false>, Op<E>, 2>(operands);
    } else {
        reduce_sources<Layout<E, E, false>, Op<E>, 0>(operands);
    }
}

// What keeps the only source as it is: a conversion where source and target differ.
template <class E>
struct Identity : Operation<E> {
    static typename E::Vector combine(typename E::Vector a, typename E::Vector) { return a; }
};

template <class E>
void copy(const Operands& operands) {
    const bool from_partial = operands.partials > 0;
    if constexpr (!std::is_same_v<E, typename E::Partial>) {
        if (from_partial != operands.partial_target) return reduce<E, Identity>(operands);
    }
    if (operands.target != operands.sources[0]) {
        const std::size_t itemsize = from_partial ? E::Partial::kItemBytes : E::kItemBytes;
        const std::size_t offset = operands.first * itemsize;
        __builtin_memcpy(operands.target + offset, operands.sources[0] + offset, operands.count * itemsize);
    }
}

// Columns: copy, sum, mean, prod, min, max, band, bor, bxor, land, lor, lxor. Where the sign of an integer does not
// matter, both kinds share the kernel of the unsigned one.

template <class E, class Unsigned>
constexpr KernelRow integer() {
    return {E::kItemBytes,
            E::kItemBytes,
            {copy<Unsigned>, reduce<Unsigned, Sum>, nullptr, reduce<Unsigned, Prod>, reduce<E, Min>, reduce<E, Max>,
             reduce<Unsigned, BitAnd>, reduce<Unsigned, BitOr>, reduce<Unsigned, BitXor>, reduce<Unsigned, LogicalAnd>,
             reduce<Unsigned, LogicalOr>, reduce<Unsigned, LogicalXor>}};
}

template <class E>
constexpr KernelRow floating() {
    return {E::kItemBytes,
            E::Partial::kItemBytes,
            {copy<E>, reduce<E, Sum>, reduce<E, Mean>, reduce<E, Prod>, reduce<E, Min>, reduce<E, Max>, nullptr,
             nullptr, nullptr, reduce<E, LogicalAnd>, reduce<E, LogicalOr>, reduce<E, LogicalXor>}};
}

template <class E>
constexpr KernelRow complex() {
    return {E::kItemBytes, E::kItemBytes, {copy<E>, reduce<E, Sum>, reduce<E, Mean>, reduce<E, Prod>}};
}

// Any byte but 0 is true. The sum is "or", as in NumPy and torch.distributed.
constexpr KernelRow boolean() {
    constexpr Kernel all = reduce<UInt8, LogicalAnd>;
    constexpr Kernel any = reduce<UInt8, LogicalOr>;
    constexpr Kernel odd = reduce<UInt8, LogicalXor>;
    return {1, 1, {copy<UInt8>, any, nullptr, all, all, any, all, any, odd, all, any, odd}};
}

}  // namespace

extern const KernelTable kTable;
constexpr KernelTable kTable = {{
    {},
    floating<Float32>(),
    floating<Float64>(),
    integer<Int32, UInt32>(),
    integer<Int64, UInt64>(),
    integer<Int8, UInt8>(),
    integer<Int16, UInt16>(),
    integer<UInt8, UInt8>(),
    integer<UInt16, UInt16>(),
    integer<UInt32, UInt32>(),
    integer<UInt64, UInt64>(),
    boolean(),
    floating<Float16>(),
    floating<BFloat16>(),
    complex<Complex64>(),
    complex<Complex128>(),
}};

}  // namespace allreduced::ALLREDUCED_ISA
