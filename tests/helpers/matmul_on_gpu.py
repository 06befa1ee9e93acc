"""What the GPU tests of the grouped matmul compare: all results of its operators, with the reference's."""

import torch
from float32_sums import check_float32_sums
from matmul_problems import NAMES, by_reference, in_float64
from on_gpu import float32_products

from rbm_kernels.ops.expert_matmul.precision import architecture_and_precision, input_precision

DTYPES = {"bfloat16": torch.bfloat16, "ieee": torch.float32, "tf32": torch.float32, "float16": torch.float16}


def by_operators(x, weight, bias, gates, experts, grad, order=()):
    """What the operators make of a problem, in the order of NAMES."""
    return (
        torch.ops.rbm.expert_matmul(x, weight, bias, gates, experts, *order),
        *torch.ops.rbm.expert_matmul_backward_input(grad, x, weight, bias, gates, experts, True, *order),
        torch.ops.rbm.expert_matmul_backward_input(grad, x, weight, bias, gates, experts, False, *order)[0],
        *torch.ops.rbm.expert_matmul_backward_weight(grad, x, gates, experts, weight.shape[0], bias is not None),
    )


def check(results, arguments, names=NAMES):
    """Results (None where there is none) against the reference in float64 and, as a peer, in the dtype at hand.

    How far they may be off depends on how float32 is multiplied, which PyTorch's setting says when this is called.

    Terms one after the other: k products of D for ``y``, k of N for ``grad_x``, one of N and one of D for the gates,
    and for weight and bias an expert's rows, which kernels add up in slices of 16 to 32, and then the slices.
    """
    weight, experts = arguments[1], arguments[4]
    architecture, precision = architecture_and_precision(arguments[0])
    products = "half" if precision == "half" else input_precision(architecture, precision)
    (_, out_features, in_features), k = weight.shape, experts.shape[1]
    rows = 32 + int(experts.flatten().bincount().max()) // 16 if experts.numel() else 0
    along = {"y": k * (in_features + 1), "grad_x": k * (out_features + 1), "grad_gates": in_features + out_features}
    exact, eager = by_reference(*in_float64(arguments)), by_reference(*arguments)
    squared = [a.square() if a is not None and a.is_floating_point() else a for a in in_float64(arguments)]
    for name, got, *wanted in zip(names, results, exact, eager, by_reference(*squared), strict=True):
        if got is not None:
            check_float32_sums(
                name, got, *wanted, terms=along.get(name.removesuffix(" alone"), rows), products=products
            )


def check_operators(arguments, precision="ieee", order=()):
    """All results of the operators, float32 products as ``precision`` says."""
    with float32_products("tf32" if precision == "tf32" else "ieee"):
        check(by_operators(*arguments, order), arguments)
