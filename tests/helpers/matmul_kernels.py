"""What the launch functions of the grouped matmul make of a problem, against the reference."""

from matmul_problems import NAMES, by_reference, check_error, in_float64

from rbm_kernels.ops.expert_matmul import launch


def by_kernels(x, weight, bias, gates, experts, grad, order=()):
    """What the kernels make of a problem, in the order of NAMES."""
    grad_x_alone, nothing = launch.backward_input(grad, x, weight, bias, gates, experts, False, *order)
    assert nothing.numel() == 0
    return (
        launch.expert_matmul(x, weight, bias, gates, experts, *order),
        *launch.backward_input(grad, x, weight, bias, gates, experts, True, *order),
        grad_x_alone,
        *launch.backward_weight(grad, x, gates, experts, weight.shape[0], bias is not None),
    )


def check(arguments, order=()):
    exact, eager = by_reference(*in_float64(arguments)), by_reference(*arguments)
    for name, got, want, plain in zip(NAMES, by_kernels(*arguments, order), exact, eager, strict=True):
        check_error(name, got, want, plain)
