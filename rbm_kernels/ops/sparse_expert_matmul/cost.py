"""Operations of :func:`rbm_kernels.sparse_expert_matmul` and its two backward operators: ``2 nnz k N`` each."""


def _counted(_crow, _col, values, weight, _bias, _scale, gates, *_, **__) -> int:
    return 2 * values.shape[0] * gates.shape[1] * weight.shape[1]


def _counted_backward_gates(_grad, *arguments, **__) -> int:
    """The forward products once more."""
    return _counted(*arguments)


def _counted_backward_weight(grad, _crow, _col, values, _weight, _scale, gates, *_, **__) -> int:
    return 2 * values.shape[0] * gates.shape[1] * grad.shape[1]


FLOP_FORMULAS = {
    "sparse_expert_matmul": _counted,
    "sparse_expert_matmul_backward_gates": _counted_backward_gates,
    "sparse_expert_matmul_backward_weight": _counted_backward_weight,
}
