// Operations on vectors of elements: combine(a, b) in order of the sources, then finish once.
//
// Included by reductions.cpp only. A new reduction is a new template here and a column in the table.
#pragma once

#include "elements.h"

namespace allreduced::ALLREDUCED_ISA {
namespace {

// Elements that wrap have a type `Wrapping`; the others compute in their own Vector.
template <class E>
auto arithmetic(int) -> typename E::Wrapping;
template <class E>
auto arithmetic(long) -> typename E::Vector;
template <class E>
using Arithmetic = decltype(arithmetic<E>(0));

struct Unfinished {
    template <class V>
    static V finish(V value, double) {
        return value;
    }
};

template <class E>
struct Sum : Unfinished {
    using V = typename E::Vector;
    static V combine(V a, V b) { return (V)((Arithmetic<E>)a + (Arithmetic<E>)b); }
};

template <class E>
struct Prod : Unfinished {
    using V = typename E::Vector;
    static V combine(V a, V b) { return (V)((Arithmetic<E>)a * (Arithmetic<E>)b); }
};

template <class E>
struct Mean : Sum<E> {
    using V = typename E::Vector;
    static V finish(V value, double divisor) { return value / (typename E::Scalar)divisor; }
};

// As numpy.minimum and numpy.maximum: a NaN wins, the first one if both are; of 0.0 and -0.0 the second wins.
template <class E>
struct Min : Unfinished {
    using V = typename E::Vector;
    static V combine(V a, V b) { return ((a < b) | (a != a)) ? a : b; }
};

template <class E>
struct Max : Unfinished {
    using V = typename E::Vector;
    static V combine(V a, V b) { return ((a > b) | (a != a)) ? a : b; }
};

}  // namespace
}  // namespace allreduced::ALLREDUCED_ISA
