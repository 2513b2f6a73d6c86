#include "request.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "instruction_set.h"

namespace allreduced {
namespace {

// More than any address space has, and far from overflowing.
constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 56;
// A target of so many bytes is not in the caches any more when somebody reads it; storing it past them saves reading
// it first. Tiles of operations between nodes are smaller: they are sent from the cache at once.
constexpr std::size_t kStreamedBytes = std::size_t{16} << 20;
constexpr std::size_t kMostSources = std::size_t{1} << 16;

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

const KernelRow& row(std::int64_t dtype) {
    if (dtype < 0 || dtype >= static_cast<std::int64_t>(kDTypes) || kernels().row[dtype].itemsize == 0) {
        refuse("unknown dtype code " + std::to_string(dtype));
    }
    return kernels().row[dtype];
}

Kernel find(std::int64_t dtype, std::int64_t reduction) {
    const KernelRow& kernels = row(dtype);
    if (reduction < 0 || reduction >= static_cast<std::int64_t>(kReductions)) {
        refuse("unknown reduction code " + std::to_string(reduction));
    }
    const Kernel kernel = kernels.at[reduction];
    if (kernel == nullptr) {
        refuse("reduction code " + std::to_string(reduction) + " is not defined for dtype code " +
               std::to_string(dtype));
    }
    return kernel;
}

}  // namespace

Request::Request(std::int64_t dtype, std::int64_t reduction, std::int64_t divisor, std::int64_t count,
                 const std::vector<std::uintptr_t>& sources, std::uintptr_t target, Partials partials)
    : kernel_(find(dtype, reduction)),
      itemsize_(partials.target ? row(dtype).partial_itemsize : row(dtype).itemsize),
      count_(static_cast<std::size_t>(count)),
      divisor_(static_cast<double>(divisor)),
      partials_(static_cast<std::size_t>(partials.sources)),
      target_(reinterpret_cast<unsigned char*>(target)),
      partial_target_(partials.target) {
    const std::uint64_t most = kMostBytes / row(dtype).partial_itemsize;
    if (count < 0 || static_cast<std::uint64_t>(count) > most) {
        refuse("count must be between 0 and " + std::to_string(most) + ", got " + std::to_string(count));
    }
    if (divisor < 1) refuse("divisor must be at least 1, got " + std::to_string(divisor));
    if (sources.empty()) refuse("sources is empty; at least one is needed");
    if (sources.size() > kMostSources) {
        refuse("sources has " + std::to_string(sources.size()) + " entries; at most " + std::to_string(kMostSources) +
               " are supported");
    }
    if (static_cast<Reduction>(reduction) == Reduction::copy && sources.size() != 1) {
        refuse("copy takes one source, got " + std::to_string(sources.size()));
    }
    if (partials.sources < 0 || partials_ > sources.size()) {
        refuse("partials must be between 0 and the number of sources, got " + std::to_string(partials.sources));
    }
    sources_.reserve(sources.size());
    for (const std::uintptr_t source : sources) {
        if (source == 0 && count > 0) refuse("a source address is 0");
        const bool partial = sources_.size() >= sources.size() - partials_;
        const std::size_t itemsize = partial ? row(dtype).partial_itemsize : row(dtype).itemsize;
        if (source == target && itemsize != itemsize_ && count > 0) {
            refuse("the target is a source whose elements have another size");
        }
        sources_.push_back(reinterpret_cast<const unsigned char*>(source));
    }
    if (target == 0 && count > 0) refuse("the target address is 0");
    streaming_ = count_ >= kStreamedBytes / itemsize_ &&
                 std::find(sources_.begin(), sources_.end(), target_) == sources_.end();
}

void Request::run(std::size_t first, std::size_t count) const {
    if (count == 0) return;
    kernel_({sources_.data(), sources_.size(), partials_, target_, partial_target_, first, count, divisor_, streaming_});
}

DefaultFloatingPoint::DefaultFloatingPoint() : saved_{} {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
}

DefaultFloatingPoint::~DefaultFloatingPoint() { std::fesetenv(&saved_); }

}  // namespace allreduced
