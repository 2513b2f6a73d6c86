// Operations on vectors of elements: begin with the first source, combine(a, b) in order of the sources, finish once.
//
// Included by reductions.cpp only. A new reduction is a new template here and a column in the table.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "elements.h"

namespace allreduced::ALLREDUCED_ISA {
namespace {

template <class E>
struct Operation {
    using V = typename E::Vector;
    static V begin(V value) { return value; }
    static V finish(V value, double) { return value; }
};

// Integers come here as unsigned elements, which wrap.
template <class E>
struct Sum : Operation<E> {
    static_assert(!std::is_integral_v<typename E::Scalar> || std::is_unsigned_v<typename E::Scalar>);
    using V = typename E::Vector;
    static V combine(V a, V b) { return a + b; }
};

template <class E>
struct Prod : Operation<E> {
    static_assert(!std::is_integral_v<typename E::Scalar> || std::is_unsigned_v<typename E::Scalar>);
    using V = typename E::Vector;
    static V combine(V a, V b) { return a * b; }
};

// (a + bi)(c + di) = (ac - bd) + (ad + bc)i as it stands: no care for infinities that meet NaN.
template <class T>
struct Prod<Complex<T>> : Operation<Complex<T>> {
    using E = Complex<T>;
    using V = typename E::Vector;
    static V combine(V a, V b) {
        V alternating;  // -1, 1, …: exact, so that one addition does both signs
        for (std::size_t lane = 0; lane < 2 * E::kLanes; ++lane) alternating[lane] = lane % 2 == 0 ? T(-1) : T(1);
        return E::real_twice(a) * b + E::imaginary_twice(a) * E::swapped(b) * alternating;
    }
};

template <class E>
struct Mean : Sum<E> {
    using V = typename E::Vector;
    static V finish(V value, double divisor) { return value / (typename E::Scalar)divisor; }
};

// As numpy.minimum and numpy.maximum: a NaN wins, the first one if both are. Of 0.0 and -0.0 the second wins.
template <class E>
struct Min : Operation<E> {
    using V = typename E::Vector;
    static V combine(V a, V b) { return ((a < b) | (a != a)) ? a : b; }
};

template <class E>
struct Max : Operation<E> {
    using V = typename E::Vector;
    static V combine(V a, V b) { return ((a > b) | (a != a)) ? a : b; }
};

template <class E>
struct BitAnd : Operation<E> {
    using V = typename E::Vector;
    static V combine(V a, V b) { return a & b; }
};

template <class E>
struct BitOr : Operation<E> {
    using V = typename E::Vector;
    static V combine(V a, V b) { return a | b; }
};

template <class E>
struct BitXor : Operation<E> {
    using V = typename E::Vector;
    static V combine(V a, V b) { return a ^ b; }
};

// What is not zero is true, NaN too. Results are 1 and 0 of the element's type, also of a single source.
template <class E>
struct Logical {
    using V = typename E::Vector;
    template <class Condition>
    static V one_if(Condition condition) {
        return condition ? V{} + (typename E::Scalar)1 : V{};
    }
    static V begin(V value) { return one_if(value != 0); }
    static V finish(V value, double) { return value; }
};

template <class E>
struct LogicalAnd : Logical<E> {
    using V = typename E::Vector;
    static V combine(V a, V b) { return Logical<E>::one_if((a != 0) & (b != 0)); }
};

template <class E>
struct LogicalOr : Logical<E> {
    using V = typename E::Vector;
    static V combine(V a, V b) { return Logical<E>::one_if((a != 0) | (b != 0)); }
};

template <class E>
struct LogicalXor : Logical<E> {
    using V = typename E::Vector;
    static V combine(V a, V b) { return Logical<E>::one_if((a != 0) ^ (b != 0)); }
};

}  // namespace
}  // namespace allreduced::ALLREDUCED_ISA
