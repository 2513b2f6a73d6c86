// A reduction as callers ask for it, checked.
#pragma once

#include <cfenv>
#include <cstdint>
#include <vector>

#include "reductions.h"

namespace allreduced {

// Which operands hold partial results, in the type that accumulates: the last `sources` of the sources; the target.
struct Partials {
    std::int64_t sources = 0;
    bool target = false;
};

// The checked request: what to run, on which memory. It can be cut into ranges of elements.
class Request {
   public:
    // Throws std::invalid_argument: unknown dtype or reduction code, a pair that is not defined, no source, a copy of
    // more than one source, negative or too large count, divisor < 1, null address, more partial results than sources, a
    // target that is a source with elements of another size.
    Request(std::int64_t dtype, std::int64_t reduction, std::int64_t divisor, std::int64_t count,
            const std::vector<std::uintptr_t>& sources, std::uintptr_t target, Partials partials = {});

    std::size_t count() const { return count_; }

    // Bytes of one element of the target.
    std::size_t itemsize() const { return itemsize_; }

    // Bytes that are read and written for one element, for sharing: sources count like the target.
    std::size_t bytes_per_element() const { return itemsize_ * (sources_.size() + 1); }

    // Reduces elements first .. first + count - 1 on the calling thread.
    void run(std::size_t first, std::size_t count) const;

   private:
    Kernel kernel_;
    std::size_t itemsize_;
    std::size_t count_;
    double divisor_;
    std::vector<const unsigned char*> sources_;
    std::size_t partials_;
    unsigned char* target_;
    bool partial_target_;
    bool streaming_ = false;
};

// Sets the floating-point environment to the default (round to nearest, subnormals kept) and restores it at the end:
// a library with -ffast-math in the same process must not change results.
class DefaultFloatingPoint {
   public:
    DefaultFloatingPoint();
    ~DefaultFloatingPoint();
    DefaultFloatingPoint(const DefaultFloatingPoint&) = delete;
    DefaultFloatingPoint& operator=(const DefaultFloatingPoint&) = delete;

   private:
    std::fenv_t saved_;
};

}  // namespace allreduced
