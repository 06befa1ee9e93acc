// Registers every C++ operator of the library. The build compiles this file once into librbm_cpu and once, with
// RBM_CUDA_LIBRARY defined, into librbm_cuda. Schemas, fake implementations and derivatives are in
// rbm_kernels/ops/<operator>/op.py; only implementations are bound here.
#include <torch/csrc/stable/library.h>

#include "cosine_topk.h"
#include "denormals.h"
#include "expert_matmul.h"
#include "expert_order.h"
#include "memory_update.h"
#include "packed_experts.h"
#include "packed_feed_forward.h"
#include "packed_network.h"
#include "routed_matmul.h"
#include "routed_matmul_int8.h"
#include "sparse_expert_matmul.h"

#ifdef RBM_CUDA_LIBRARY

STABLE_TORCH_LIBRARY_IMPL(rbm, CUDA, m) {
  m.impl("memory_statistics", TORCH_BOX(&rbm::cuda::memory_statistics));
  m.impl("memory_update_", TORCH_BOX(&rbm::cuda::memory_update_));
}

#else

STABLE_TORCH_LIBRARY_IMPL(rbm, CPU, m) {
  m.impl("cosine_topk", TORCH_BOX(&rbm::cpu::cosine_topk));
  m.impl("cosine_topk_backward", TORCH_BOX(&rbm::cpu::cosine_topk_backward));
  m.impl("expert_order", TORCH_BOX(&rbm::cpu::expert_order));
  m.impl("flush_denormals", TORCH_BOX(&rbm::cpu::flush_denormals));
  m.impl("expert_matmul", TORCH_BOX(&rbm::cpu::expert_matmul));
  m.impl("expert_matmul_backward_input", TORCH_BOX(&rbm::cpu::expert_matmul_backward_input));
  m.impl("expert_matmul_backward_weight", TORCH_BOX(&rbm::cpu::expert_matmul_backward_weight));
  m.impl("pack_experts", TORCH_BOX(&rbm::cpu::pack_experts));
  m.impl("routed_matmul_packed", TORCH_BOX(&rbm::cpu::routed_matmul_packed));
  m.impl("packed_feed_forward", TORCH_BOX(&rbm::cpu::packed_feed_forward));
  m.impl("packed_network", TORCH_BOX(&rbm::cpu::packed_network));
  m.impl("routed_matmul", TORCH_BOX(&rbm::cpu::routed_matmul));
  m.impl("routed_matmul_int8", TORCH_BOX(&rbm::cpu::routed_matmul_int8));
  m.impl("memory_statistics", TORCH_BOX(&rbm::cpu::memory_statistics));
  m.impl("memory_update_", TORCH_BOX(&rbm::cpu::memory_update_));
  m.impl("sparse_expert_matmul", TORCH_BOX(&rbm::cpu::sparse_expert_matmul));
  m.impl("sparse_expert_matmul_backward_gates", TORCH_BOX(&rbm::cpu::sparse_expert_matmul_backward_gates));
  m.impl("sparse_expert_matmul_backward_weight", TORCH_BOX(&rbm::cpu::sparse_expert_matmul_backward_weight));
}

#endif
