#include "instruction_set.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace allreduced {
namespace {

struct Candidate {
    const char* name;
    const KernelTable* table;
    bool (*runs_here)();
};

// Best first. The last one runs everywhere.
const Candidate kCandidates[] = {
#if ALLREDUCED_WITH_avx512
    {"avx512", &avx512::kTable,
     [] {
         return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
     }},
#endif
#if ALLREDUCED_WITH_avx2
    {"avx2", &avx2::kTable, [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"); }},
#endif
#if defined(__aarch64__)
    {"neon", &baseline::kTable, [] { return true; }},
#endif
    {"baseline", &baseline::kTable, [] { return true; }},
};

const Candidate& choose() {
    constexpr const char* kVariable = "ALLREDUCED_KERNELS_ISA";
    const char* cap = std::getenv(kVariable);
    bool allowed = cap == nullptr || *cap == '\0';
    for (const Candidate& candidate : kCandidates) {
        allowed = allowed || std::strcmp(candidate.name, cap) == 0;
        if (allowed && candidate.runs_here()) return candidate;
    }
    std::string names;
    for (const Candidate& candidate : kCandidates) {
        names += (names.empty() ? "" : ", ") + std::string(candidate.name);
    }
    throw std::invalid_argument(std::string(kVariable) + "=" + cap + " is not known; there are " + names);
}

const Candidate& chosen() {
    static const Candidate& candidate = choose();
    return candidate;
}

}  // namespace

const KernelTable& kernels() { return *chosen().table; }

const char* instruction_set() { return chosen().name; }

}  // namespace allreduced
