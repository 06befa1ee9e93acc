"""How threads of a CPU divide the grouped matmul: rows, columns, and weights that are packed before or on the way."""

import pytest
import torch
from matmul_problems import NAMES, by_operators, by_reference, problem

OPS = torch.ops.rbm
# (B, D, N, E, k). All weights are packed before from 1,024 pairs per expert on. Otherwise each thread packs at most
# 256 columns (512 in bfloat16) of at most 512 rows at once.
SHAPES = {
    "packed before": (1100, 40, 200, 2, 2),
    "packed in several parts": (90, 530, 1100, 2, 2),
    "more parts than threads": (2100, 30, 1100, 9, 1),
    "one panel": (130, 30, 40, 2, 2),
    "no features": (130, 0, 40, 2, 2),
    "no outputs": (130, 40, 0, 2, 2),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_any_number_of_threads(threads, shape, dtype):
    """Integers, so that every order of a sum has the same bits; as the reference in float64 gives them."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias, gates, experts, grad = problem(shape, torch.float64, device="cpu")
    x, weight, bias, grad = (t.round().clamp(-2, 2).to(dtype) for t in (x, weight, bias, grad))
    gates = (0.5 ** torch.randint(0, 3, gates.shape, generator=generator)).to(
        torch.float64 if dtype == torch.float64 else torch.float32
    )
    wide = [t.double() if t.is_floating_point() else t for t in (x, weight, bias, gates, experts, grad)]
    expected = by_reference(*wide)
    for count in (1, 2, 3, 4, 8):
        threads(count)
        got = by_operators(x, weight, bias, gates, experts, grad)
        for name, one, other in zip(NAMES, got, expected, strict=True):
            assert torch.equal(one, other.to(one.dtype)), f"{name}, {count} threads"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_have_the_same_bits_however_weights_are_packed(threads, dtype):
    """Also of a thread that shares its columns with no other, and in a batch for which all weights are packed."""
    shape = (2200, 600, 330, 2, 2)
    x, weight, bias, gates, experts, _ = problem(shape, dtype, device="cpu")

    def forward(count, rows):
        threads(count)
        return OPS.expert_matmul(x[:rows], weight, bias, gates[:rows], experts[:rows], None, None, None, 0)

    every = forward(1, 2200)
    for count, rows in ((2, 2200), (1, 700), (2, 700), (4, 300)):
        assert torch.equal(forward(count, rows), every[:rows]), (count, rows)
