"""Counting the parameters of a student."""

from torch import nn

from rbm.nn.rbm_layer import FusedRbMLayer


def count_parameters(student: nn.Module) -> tuple[int, int]:
    """Numbers that a student holds and that the prediction of one node uses: ``(total, active)``.

    The memory vectors, which a router compares every row with, count in both. Of the weights, biases and attentions of
    a layer's ``num_experts`` experts ``top_k`` are active.
    """
    total = sum(parameter.numel() for parameter in student.parameters())
    idle = 0
    for layer in student.modules():
        if not hasattr(layer, "num_experts"):
            continue
        if isinstance(layer, FusedRbMLayer):
            total += layer.memory.numel()
        experts = (layer.weight, layer.bias, getattr(layer, "attention", None))
        idle += (layer.num_experts - layer.top_k) * sum(p[0].numel() for p in experts if p is not None)
    return total, total - idle
