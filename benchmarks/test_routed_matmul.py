"""Routing and experts in one call against two operators of eager PyTorch, given the same folded weights: few rows."""

import pytest
import torch

from benchmarks.harness import Results
from benchmarks.peers import sorted_addmm
from benchmarks.shapes import Shape
from rbm_kernels import routed_matmul
from rbm_kernels.cosine_topk import reference as routing
from rbm_kernels.expert_matmul import reference as matmul


@pytest.mark.parametrize("rows", [1, 8, 64, 256])
def test_routed_matmul(benchmark, compare, results: Results, rows: int):
    shape = Shape(rows)
    x, memory = torch.randn(rows, shape.features), torch.randn(shape.experts, shape.features)
    weight = torch.randn(shape.experts, shape.outputs, shape.features) / shape.features**0.5
    bias, k = torch.randn(shape.experts, shape.outputs), shape.top_k

    def eager():
        return matmul.expert_matmul(x, weight, bias, *routing.cosine_topk(x, memory, k)[:2])

    def sorted_pairs():
        return sorted_addmm(x, weight, bias, *routing.cosine_topk(x, memory, k)[:2])

    with torch.inference_mode():
        variants = {"rbm": lambda: routed_matmul(x, memory, weight, bias, k), "eager": eager, "sorted": sorted_pairs}
        for variant in variants.values():
            torch.testing.assert_close(variant(), eager(), rtol=1e-4, atol=1e-4)
        timings = compare(variants)
        benchmark(variants["rbm"])
    for name, timing in timings.items():
        results.add("routed_matmul", str(shape), name, "seconds", timing)
