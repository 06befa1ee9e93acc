"""Temperatures of the gates: what every operator that routes refuses, and the least that it takes."""

import math
from importlib import import_module

import pytest
import torch
from operator_arguments import D, E, K, N, arguments

from rbm_kernels import NetworkLayer, pack_network
from rbm_kernels._library import TRITON_OPERATORS
from rbm_kernels.ops.cosine_topk import op as cosine_topk_op

REFUSED = (ValueError, TypeError, RuntimeError)
ROUTED = ["cosine_topk", "cosine_topk_backward", "routed_matmul", "routed_matmul_packed", "packed_feed_forward"]
ROUTED += ["routed_matmul_int8"]


@pytest.mark.parametrize("implementation", ["torch.ops", "meta", "reference", "triton"])
@pytest.mark.parametrize("operator", ROUTED)
def test_a_temperature_that_is_zero_or_infinite_in_the_dtype_of_the_gates(operator, implementation):
    """1e-39 is a number in float32, but its inverse is not."""
    given, call = [*arguments()[operator].values()], getattr(torch.ops.rbm, operator)
    if operator == "cosine_topk_backward" and implementation in ("meta", "reference"):
        pytest.skip("it gets what the forward pass has had")
    if implementation == "reference":
        names = {"routed_matmul_int8": "int8_experts", "routed_matmul_packed": "packed_experts"}
        call = import_module(f"rbm_kernels.ops.{names.get(operator, operator)}.op")._eager
    elif implementation == "triton":
        call = TRITON_OPERATORS.get(operator)
    if call is None:
        pytest.skip("no Triton kernel")
    if implementation in ("meta", "triton"):
        given = [value.to("meta") if torch.is_tensor(value) else value for value in given]
    for temperature in (1e-50, 1e-39, 1e39, math.inf, math.nan, 0.0, -1.0):
        with pytest.raises(REFUSED, match=rf"rbm::{operator}: temperature is .*, expected .* between 1\.17549e-38 and"):
            call(*given, temperature=temperature)
    if operator in ("cosine_topk", "routed_matmul") and implementation != "triton":
        wide = [value.double() if torch.is_tensor(value) else value for value in given]
        call(*wide, temperature=1e-50)
        with pytest.raises(REFUSED, match=r"between 2\.22507e-308 and"):
            call(*wide, temperature=1e-310)


def test_gates_of_the_least_temperature_are_numbers():
    h, memory = torch.randn(9, D), torch.randn(6, D)
    for route in (torch.ops.rbm.cosine_topk, cosine_topk_op._eager):
        gates, _, _ = route(h, memory, K, temperature=torch.finfo(torch.float32).tiny)
        assert torch.equal(gates, torch.eye(K)[:1].expand(9, K))


def test_a_packed_network_with_such_a_temperature():
    layer = NetworkLayer(torch.randn(E, N, D), None, N, D, torch.randn(E, D), K, 1e-50)
    with pytest.raises(ValueError, match=r"rbm::pack_network: layers\[0\]\.temperature is 1e-50, expected a positive"):
        pack_network([layer])
