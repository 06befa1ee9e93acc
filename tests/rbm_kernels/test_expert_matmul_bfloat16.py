"""The grouped matmul in bfloat16 on a CPU, which multiplies pairs of numbers where the processor can (AVX512-BF16)."""

import pytest
import torch
from matmul_problems import NAMES, by_operators, by_reference, check_error, in_float64, problem

OPS = torch.ops.rbm
# (B, D, N, E, k), so many rows that experts are packed.
SHAPES = {
    "usual": (300, 64, 96, 4, 2),
    "odd sizes": (301, 257, 131, 3, 2),
    "one feature": (200, 1, 40, 3, 1),
    "one output": (200, 40, 1, 3, 2),
    "longer than a block": (120, 1029, 24, 3, 3),
    "an expert with an odd number of rows": (151, 33, 70, 1, 1),
    "more rows than are kept together": (2100, 150, 70, 1, 1),
    "more outputs than a slice": (70, 40, 1100, 2, 2),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_against_reference(shape):
    arguments = problem(shape, torch.bfloat16, device="cpu")
    exact, eager = by_reference(*in_float64(arguments)), by_reference(*arguments)
    for name, *each in zip(NAMES, by_operators(*arguments), exact, eager, strict=True):
        check_error(name, *each)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_small_integers_have_the_bits_of_float32(shape):
    """Sums that float32 holds exactly, gates that are powers of two: the one rounding is the result's."""
    b, d, n, e, k = shape
    generator = torch.Generator().manual_seed(0)

    def integers(*size):
        return torch.randint(-3, 4, size, generator=generator).float()

    tensors = integers(b, d), integers(e, n, d), integers(e, n), 0.5 ** torch.randint(0, 3, (b, k), generator=generator)
    experts = torch.rand(b, e, generator=generator).argsort(-1)[:, :k].int().contiguous()
    x, weight, bias, gates = tensors
    grad = integers(b, n)
    wide = by_operators(x, weight, bias, gates, experts, grad)
    narrow = by_operators(*(t.bfloat16() for t in (x, weight, bias)), gates, experts, grad.bfloat16())
    for name, got, expected in zip(NAMES, narrow, wide, strict=True):
        assert torch.equal(got, expected.to(got.dtype)), name


@pytest.mark.parametrize("features", [64, 65])
def test_rows_and_weights_anywhere_in_memory(features):
    """Rows that begin at odd places, and end before numbers that are not finite."""
    x, weight, bias, gates, experts, grad = problem((200, features, 48, 3, 2), torch.bfloat16, device="cpu")
    expected = by_operators(x, weight, bias, gates, experts, grad)

    def within(tensor):
        room = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 3), float("nan"), dtype=tensor.dtype)
        room[..., 1:-2] = tensor
        return room[..., 1:-2]

    flat = torch.empty(weight.numel() + 1, dtype=weight.dtype)
    flat[1:] = weight.flatten()
    got = by_operators(within(x), flat[1:].view_as(weight), bias, gates, experts, within(grad))
    for name, one, other in zip(NAMES, got, expected, strict=True):
        assert torch.equal(one, other), name


def test_what_is_not_finite_is_rounded_as_pytorch_rounds():
    x, weight, bias, gates, experts, _ = problem((200, 32, 32, 3, 2), torch.bfloat16, device="cpu")
    x[0, 0], x[1, 0], weight[0] = float("nan"), float("inf"), 1.0
    experts[:2] = torch.tensor([0, 1], dtype=torch.int32)
    x[2], weight[1], experts[2] = 3e38, 1.0, torch.tensor([1, 0], dtype=torch.int32)
    y = OPS.expert_matmul(x, weight, bias, gates, experts, None, None, None, 0)
    assert y[0].isnan().all()
    assert y[2].isposinf().all()
    assert y[3:].isfinite().all()
    assert not y[1].isfinite().any()
