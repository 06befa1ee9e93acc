// Numbers below the normal range of their type, as zeros: rbm_kernels/_denormals.py.
#pragma once

#include "checks.h"

namespace rbm::cpu {

bool flush_denormals(const Tensor& like, bool flushes);

}  // namespace rbm::cpu
