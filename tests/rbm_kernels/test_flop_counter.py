"""PyTorch's FlopCounterMode counts the products of matrices in the operators, as it does those of its own."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from operator_arguments import B, D, E, K, N, arguments
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from rbm import FusedRbMLayer, RbMFeedForward
from rbm_kernels import NetworkLayer, pack_network, packed_network
from rbm_kernels._flop_counter import formulas

EXPERTS, ROUTING, MEMORY = 2 * B * K * D * N, 2 * B * E * D, 2 * B * K * D
STORED = len(arguments()["sparse_expert_matmul"]["values"])
COUNTS = {
    "cosine_topk": ROUTING,
    "cosine_topk_backward": MEMORY,
    "expert_matmul": EXPERTS,
    "expert_matmul_backward_input": EXPERTS,
    "expert_matmul_backward_weight": EXPERTS,
    "routed_matmul": ROUTING + EXPERTS,
    "routed_matmul_packed": ROUTING + EXPERTS,
    "routed_matmul_int8": ROUTING + EXPERTS,
    "packed_feed_forward": ROUTING + 2 * EXPERTS,
    "packed_network": 2 * B * D * N,
    "sparse_expert_matmul": 2 * STORED * K * N,
    "sparse_expert_matmul_backward_gates": 2 * STORED * K * N,
    "sparse_expert_matmul_backward_weight": 2 * STORED * K * N,
    "memory_statistics": MEMORY,
    # These multiply no matrices.
    "expert_order": 0,
    "fold_experts": 0,
    "fold_experts_backward": 0,
    "memory_update_": 0,
    "pack_experts": 0,
}


def counted(function, *args, **kwargs) -> int:
    with FlopCounterMode(display=False) as counter:
        function(*args, **kwargs)
    return counter.get_total_flops()


@pytest.mark.parametrize("operator", arguments())
def test_each_operator(operator):
    given, call = arguments()[operator], getattr(torch.ops.rbm, operator)
    assert counted(call, **given) == COUNTS[operator]
    assert counted(call, *given.values()) == COUNTS[operator]
    meta = {name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    assert counted(call, **meta) == (0 if operator == "packed_network" else COUNTS[operator])


def test_every_formula_is_for_an_operator():
    assert formulas().keys() == {operator for operator, count in COUNTS.items() if count}


def test_an_int8_linear_layer_and_a_network_that_routes():
    int8 = torch.zeros(1, 1, 4, 64, dtype=torch.int8)
    assert counted(torch.ops.rbm.routed_matmul_int8, torch.randn(B, D), None, int8, N) == 2 * B * D * N
    weight, router = torch.randn(E, N, D), (torch.randn(7, D), torch.randn(7))
    network = pack_network(
        [
            NetworkLayer(weight, None, N, D, torch.randn(E, 7), K, router=router),
            NetworkLayer(torch.randn(E, 6, N), None, 6, N, torch.randn(E, N), K),
        ]
    )
    first, second = D * 7 + 7 * E + K * D * N, N * E + K * N * 6
    assert counted(packed_network, torch.randn(B, D), network, 6) == 2 * B * (first + second)
    with FakeTensorMode() as mode:
        rows = mode.from_tensor(torch.randn(B, D))
        assert counted(torch.ops.rbm.packed_network, rows, mode.from_tensor(network), 6) == 0


def trained(model, rows: int) -> int:
    """Counted in a forward and a backward pass whose rows need a gradient too."""
    x = torch.randn(rows, 16, requires_grad=True)
    return counted(lambda: model(x).sum().backward())


# The model, and the operations of a row: in a forward pass, and in both passes of training.
_DENSE, _LAYER, _FEED_FORWARD = 2 * 16 * 8, 2 * 3 * 16 * 8, 2 * 3 * 2 * 16 * 32
MODELS = {
    "Linear": (lambda: nn.Linear(16, 8), _DENSE, 3 * _DENSE),
    # Rows times 5 memory vectors; in training also 3 gates times rows, and 3 memory vectors in the gradient of a row.
    "FusedRbMLayer": (
        lambda: FusedRbMLayer(16, 8, 5, 3, detach_gates=False),
        _LAYER + 2 * 16 * 5,
        3 * _LAYER + 2 * 16 * (5 + 3 + 3),
    ),
    "RbMFeedForward": (
        lambda: RbMFeedForward(16, 32, 5, 3),
        _FEED_FORWARD + 2 * 16 * 5,
        3 * _FEED_FORWARD + 2 * 16 * (5 + 3),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_forward_and_a_backward_pass(name):
    make, forward, both = MODELS[name]
    model = make()
    assert trained(model, 10) == 10 * both
    assert trained(model, 0) == 0
    with FakeTensorMode():
        assert trained(make(), 10) == 10 * both
    with torch.no_grad():
        assert counted(model.eval(), torch.randn(10, 16)) == 10 * forward


@pytest.fixture
def _compiles_again() -> Iterator[None]:
    """PyTorch compiles no more, in this process, the code that it called under the counter: other tests need it."""
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:Using `torch.compile")
@pytest.mark.usefixtures("_compiles_again")
def test_compiled(name):
    make, _, both = MODELS[name]
    compiled = torch.compile(make(), backend="aot_eager", dynamic=True)
    compiled(torch.randn(7, 16, requires_grad=True)).sum().backward()
    assert [trained(compiled, rows) for rows in (10, 12)] == [10 * both, 12 * both]


def test_the_counter_is_not_imported_with_this_package():
    """Importing it takes longer than importing this package."""
    program = """if True:
        import importlib.util, sys, torch
        import rbm, rbm_kernels
        assert "torch.utils.flop_counter" not in sys.modules
        assert importlib.util.find_spec("torch.utils.flop_counter").name == "torch.utils.flop_counter"
        import torch.utils.flop_counter as counter
        assert torch.ops.rbm.expert_matmul in counter.flop_registry
        assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("rbm")]
    """
    subprocess.run([sys.executable, "-c", program], check=True)
    # The other way round is how this module imports them.
