// Which instruction set the reductions run on.
#pragma once

#include "reductions.h"

namespace allreduced {

// Returns the name users see: "avx512", "avx2", "baseline" or "neon".
const char* instruction_set();

// Returns the table of the best instruction set of this machine. Chosen once.
//
// ALLREDUCED_KERNELS_ISA=baseline|avx2|avx512 caps the choice, so that tests can compare the sets; more than the
// machine has means its best. Throws std::invalid_argument for any other value.
const KernelTable& kernels();

}  // namespace allreduced
