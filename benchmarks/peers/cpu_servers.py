"""The experts of vLLM, SGLang and llama.cpp for serving on a CPU: two products with SwiGLU between them.

Those of vLLM and SGLang are one kernel each with packed weights, operators of vLLM's build for CPUs (``torch.ops._C``);
its sources contain SGLang's kernel too. They take part if that build is installed, or if ``RBM_PEER_LIBRARIES`` names
shared libraries (separated by ``:``) that register them. llama.cpp's (:mod:`benchmarks.peers.with_ggml`) take part if
``RBM_PEER_LIBRARIES`` names ``libggml-cpu.so``, as in the folder ``llama_cpp/lib`` of llama-cpp-python. This repository
contains no code of theirs. vLLM's kernel multiplies bfloat16 with AMX, or widens it on processors that have none;
SGLang's multiplies bfloat16 by oneDNN's kernels. A library that is loaded so must ask Linux for the tile registers
itself (``at::cpu::init_amx``), because vLLM leaves that to others.
"""

import ctypes
import os
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.peers import with_ggml

# Takes rows [B, D], gates [B, k] and experts [B, k].
Prepared = Callable[[Tensor, Tensor, Tensor], Tensor]


def prepared(up: Tensor, down: Tensor) -> dict[str, Prepared]:
    """Those that are at hand, by name, with packed ``up [E, 2 I, D]`` and ``down [E, D, I]``."""
    libraries = [
        ctypes.CDLL(path, mode=os.RTLD_LAZY)  # it may lack functions that are not called here
        for path in filter(None, os.environ.get("RBM_PEER_LIBRARIES", "").split(os.pathsep))
    ]
    found: dict[str, Callable[[Tensor, Tensor], Prepared]] = {}
    if hasattr(torch.ops._C, "cpu_fused_moe"):
        found["vllm"] = _vllm
    for library in filter(with_ggml.is_in, libraries):
        found["ggml"] = partial(with_ggml.Experts, library)
    if up.dtype == torch.bfloat16 and hasattr(torch.ops._C, "fused_experts_cpu"):
        found["sglang"] = _sglang
    return {name: prepare(up.detach(), down.detach()) for name, prepare in found.items()}


def _vllm(up: Tensor, down: Tensor) -> Prepared:
    isa = "amx" if up.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported() else "vec"
    packed = [torch.empty_like(weight) for weight in (up, down)]
    for weight, into in zip((up, down), packed, strict=True):
        torch.ops._C.prepack_moe_weight(weight, into, isa)

    def answer(x: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
        y = torch.empty_like(x)
        torch.ops._C.cpu_fused_moe(y, x, *packed, None, None, gates, experts, False, "silu", isa)
        return y

    return answer


def _sglang(up: Tensor, down: Tensor) -> Prepared:
    packed = [torch.ops._C.convert_weight_packed(weight) for weight in (up, down)]

    def answer(x: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
        y = torch.empty_like(x)
        # No quantisation (0), so no scales; weights packed as above (True); SiLU (0).
        torch.ops._C.fused_experts_cpu(y, x, *packed, gates, experts, 0, *[None] * 10, True, 0)
        return y

    return answer
