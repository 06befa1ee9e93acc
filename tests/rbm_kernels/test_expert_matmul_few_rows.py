"""The grouped matmul for few rows: no order, no list, one launch per operator."""

import pytest
import torch
from matmul_kernels import check
from matmul_problems import DEVICE, problem, serving_kernels

from rbm_kernels import cosine_topk, expert_matmul
from rbm_kernels.ops.expert_matmul import config, launch

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.usefixtures("few_rows")]

MATMUL = ("expert_matmul", "expert_matmul_backward_input", "expert_matmul_backward_weight")
# (B, D, N, E, k)
SHAPES = {
    "usual": (40, 32, 48, 8, 3),
    "prime sizes": (37, 37, 31, 5, 2),
    "several tiles": (70, 70, 140, 3, 2),
    "one expert": (19, 8, 9, 1, 1),
    "all experts": (19, 8, 9, 3, 3),
    "more experts than a slice of biases holds": (60, 16, 16, 33, 3),
    "one row": (1, 33, 17, 3, 2),
    "no rows": (0, 8, 9, 3, 2),
}


@pytest.fixture(autouse=True)
def _no_order(monkeypatch):
    def refuse(*_):
        raise AssertionError("few rows are put in order")

    monkeypatch.setattr(launch, "expert_order", refuse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_against_reference(shape, dtype):
    check(problem(shape, dtype))


def test_without_bias():
    x, weight, _, *rest = problem((40, 16, 20, 5, 2))
    check((x, weight, None, *rest))


def test_what_is_not_finite_stays_with_its_expert():
    """Expert 0 and row 3, which uses experts 1 and 2, are not finite: everything else is unchanged."""
    x, weight, bias, gates, _, grad = problem((12, 16, 16, 4, 2))
    experts = torch.tensor([[2, 3], [0, 1], [3, 2], [1, 2]], dtype=torch.int32, device=DEVICE).repeat(3, 1)
    clean = launch.expert_matmul(x, weight, bias, gates, experts)
    clean_weight, _ = launch.backward_weight(grad, x, gates, experts, 4)
    weight[0, 0, 0], x[3, 1] = float("inf"), float("nan")
    y = launch.expert_matmul(x, weight, bias, gates, experts)
    untouched = (experts != 0).all(1)
    untouched[3] = False
    assert torch.equal(y[untouched], clean[untouched])
    assert not y[~untouched].isfinite().all(1).any()
    grad_weight, _ = launch.backward_weight(grad, x, gates, experts, 4)
    assert torch.equal(grad_weight[[0, 3]], clean_weight[[0, 3]])
    assert not grad_weight[1].isfinite().all()
    grad_x, grad_gates = launch.backward_input(grad, x, weight, bias, gates, experts)
    assert grad_x[untouched].isfinite().all()
    assert grad_gates[untouched].isfinite().all()


def test_how_many_are_few(monkeypatch):
    monkeypatch.undo()
    weights = 8 * 256 * 256
    for precision, most in (("half", 6_553), ("tf32", 6_553), ("ieee", 409)):
        assert config.is_small(most, 3, 8, weights, precision)
        assert not config.is_small(most + 1, 3, 8, weights, precision)
    assert config.sums_all_rows(256, 3, 8, weights)
    assert not config.sums_all_rows(257, 3, 8, weights)
    assert not config.sums_all_rows(256, 1, 1_024, 1_024 * weights)
    # Where every row uses every expert, nothing is wasted; many experts are wasted soon.
    assert config.is_small(10**9, 8, 8, weights, "ieee")
    assert not config.is_small(1_500, 8, 64, 8 * weights, "half")


@pytest.mark.skipif(DEVICE == "cuda", reason="counts what the interpreter launches")
def test_launches_of_a_training_step(monkeypatch):
    """Routing, product and their three backward operators: one launch each."""
    from triton.runtime.interpreter import GridExecutor

    launched = []
    run = GridExecutor.__call__

    def counting(self, *args, **kwargs):
        launched.append(self.fn.__name__)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", counting)
    x, weight, bias, _, _, _ = problem((40, 32, 24, 8, 3))
    memory = torch.randn(8, 32)
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    with serving_kernels(("cosine_topk", "cosine_topk_backward", "expert_order", *MATMUL)):
        gates, experts, _ = cosine_topk(x, memory, 3)
        y = expert_matmul(x, weight, bias, gates, experts)
        assert len(launched) == 2
        torch.autograd.grad(y.sum(), leaves)
    assert sorted(launched) == [
        "cosine_topk_bwd_kernel",
        "cosine_topk_fwd_kernel",
        "expert_matmul_bwd_kernel",
        "expert_matmul_bwd_weight_small_kernel",
        "expert_matmul_fwd_kernel",
    ]
