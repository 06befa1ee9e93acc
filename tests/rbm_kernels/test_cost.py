"""The formulas of cost: against floors computed by hand, and against the tensors that operators take."""

import pytest
import torch

from rbm_kernels import cosine_topk, expert_order, fold_experts, memory_statistics
from rbm_kernels.cost import Cost
from rbm_kernels.ops.cosine_topk import cost as cosine_topk_cost
from rbm_kernels.ops.cosine_topk import reference as cosine_topk_reference
from rbm_kernels.ops.expert_matmul import cost as expert_matmul_cost
from rbm_kernels.ops.expert_matmul import reference as expert_matmul_reference
from rbm_kernels.ops.expert_order import cost as expert_order_cost
from rbm_kernels.ops.fold_experts import cost as fold_experts_cost
from rbm_kernels.ops.memory_update import cost as memory_update_cost
from rbm_kernels.ops.routed_matmul import cost as routed_matmul_cost

B, D, N, E, K = 33, 20, 12, 5, 3
# Bytes and operations a second of the H200 that the targets were set for.
H200 = (4.3e12, 790e12)


def size(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.fixture
def routing() -> tuple[torch.Tensor, torch.Tensor]:
    chosen = torch.rand(B, E).topk(K)
    return chosen.values.softmax(-1), chosen.indices.int()


def test_floors_of_the_design():
    shape = (169_343, 256, 256, 8, 3, torch.bfloat16)
    forward, backward = expert_matmul_cost.forward(*shape), expert_matmul_cost.backward(*shape)
    # Operations bind: three products of 2 B k D N, where the bytes would take 42 and then 104 microseconds.
    assert round(forward.roofline_seconds(*H200) * 1e6) == 84
    assert round((forward + backward).roofline_seconds(*H200) * 1e6) == 253
    assert round(forward.bytes / H200[0] * 1e6) == 42
    assert round(backward.bytes / H200[0] * 1e6) == 104
    union = expert_matmul_cost.forward(*shape, mean_experts=3.04)
    assert union.flops / forward.flops == pytest.approx(3.04 / 3)
    assert union.bytes == forward.bytes


def test_routing_and_experts_in_one_read_rows_once_and_write_no_routing():
    x, memory, y = torch.randn(B, D), torch.randn(E, D), torch.randn(B, N)
    weight, bias = torch.randn(E, N, D), torch.randn(E, N)
    cost = routed_matmul_cost.forward(B, D, N, E, K, torch.float32)
    assert cost.bytes == size(x, memory, weight, bias, y)
    assert cost.flops == 2 * (B * E + B + E) * D + 2 * B * K * D * N


def test_one_row_reads_its_own_experts_alone():
    one = expert_matmul_cost.forward(1, D, N, E, K, torch.float32)
    assert one.bytes == 4 * (D + N + K * N * (D + 1)) + 8 * K


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_bytes_are_those_of_the_tensors(dtype, routing):
    gates, experts = routing
    gates = gates.double() if dtype == torch.float64 else gates
    h, grad = torch.randn(B, D).to(dtype), torch.randn(B, N).to(dtype)
    weight, bias = torch.randn(E, N, D).to(dtype), torch.randn(E, N).to(dtype)
    shape = (B, D, N, E, K, dtype)
    layer = (h, weight, bias, gates, experts)
    # Gates are 4 bytes in the formulas; float64 rows, which no kernel serves, have gates of 8.
    wide = 4 * B * K if dtype == torch.float64 else 0

    y = expert_matmul_reference.expert_matmul(*layer)
    assert expert_matmul_cost.forward(*shape).bytes + wide == size(*layer, y)
    grads = expert_matmul_reference.backward_input(grad, *layer)
    assert expert_matmul_cost.backward_input(*shape).bytes + 2 * wide == size(grad, *layer, *grads)
    assert expert_matmul_cost.backward_input(*shape, with_gates=False).bytes + wide == size(
        grad, weight, gates, experts, grads[0]
    )
    assert expert_matmul_cost.backward_weight(*shape).bytes + wide == size(grad, h, gates, experts, weight, bias)

    statistics = memory_statistics(h, gates, experts, E)
    assert memory_update_cost.statistics(B, D, E, K, dtype).bytes == size(h, gates, experts, *statistics)
    assert memory_update_cost.update(D, E, dtype).bytes == size(*statistics, statistics[0], statistics[0])

    parameters = weight, bias, torch.randn(E, D).to(dtype), torch.randn(1).to(dtype)
    for folded in (None, torch.bfloat16):
        both = fold_experts(*parameters, dtype=folded)
        assert fold_experts_cost.forward(D, N, E, dtype, folded).bytes == size(*parameters, *both)
        # Gradients of the folded ones are as large as those; gradients of the parameters as large as the parameters.
        assert fold_experts_cost.backward(D, N, E, dtype, folded).bytes == size(*both, *parameters, *parameters)

    order = expert_order(experts, E, 8)[:3]
    assert expert_order_cost.forward(B, E, K, 8) == Cost(size(experts, *order), 0)

    if dtype != torch.float64:
        memory = torch.randn(E, D)
        outputs = cosine_topk(h, memory, K)
        assert cosine_topk_cost.forward(B, D, E, K, dtype).bytes == size(h, memory, *outputs)
        grads = torch.ones_like(outputs[0]), torch.ones_like(outputs[2])
        grad_h = cosine_topk_reference.backward(*grads, h, memory, *outputs)
        assert cosine_topk_cost.backward(B, D, E, K, dtype).bytes == size(h, memory, *outputs, *grads, grad_h)


def test_operations():
    """Each formula by hand at one small shape."""
    assert cosine_topk_cost.forward(B, D, E, K, torch.float32).flops == 2 * D * (33 * 5 + 33 + 5)
    assert cosine_topk_cost.backward(B, D, E, K, torch.float32).flops == 2 * D * (33 * 3 + 2 * 33 + 5)
    assert memory_update_cost.statistics(B, D, E, K, torch.float32).flops == 2 * D * (33 * 3 + 33)
    assert memory_update_cost.update(D, E, torch.float32).flops == 5 * 5 * D
    # A product for each weight and bias, an exponential and a product for each expert's feature; then three and three.
    assert fold_experts_cost.forward(D, N, E, torch.float32).flops == 5 * 12 * D + 5 * 12 + 2 * 5 * D
    assert fold_experts_cost.backward(D, N, E, torch.float32).flops == 3 * (5 * 12 * D + 5 * 12 + 5 * D)


def test_the_longer_of_two_times():
    assert Cost(100, 10).roofline_seconds(10.0, 10.0) == 10.0
    assert Cost(10, 100).roofline_seconds(10.0, 10.0) == 10.0
    assert Cost(1, 2) + Cost(3, 4) == Cost(4, 6)
