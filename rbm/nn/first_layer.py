"""Shares the first layer's output between an evaluation and the next training forward.

If every step uses all rows, weights change once per epoch, and both forwards compute the same first layer, which takes
nearly all of the time with many features. :class:`FirstLayer` computes it once. Training results are bitwise the same.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rbm.nn import folded_weights as folding
from rbm.nn.rbm_layer import FusedRbMLayer
from rbm.nn.students import MLPStudent, RbMStudent, Trace
from rbm.utils.chunks import CHUNK_ROWS
from rbm.utils.precision import autocast_dtype, cast_once


class FirstLayer:
    """A student on constant rows.

    Args:
        student: student for which :meth:`serves` is true.
        x: dense ``[B, F]``.
    """

    def __init__(self, student: MLPStudent | RbMStudent, x: Tensor) -> None:
        self.student, self.x, self.layer = student, x, student.layers[0]
        self._kept: tuple[Any, Tensor | None, Any] | None = None

    @staticmethod
    def serves(student: nn.Module, x: object) -> bool:
        """Whether a student's first layer computes the same in training as in evaluation, that is, without dropout.
        Only on the CPU, and for at most as many rows as evaluation processes at once.
        """
        if type(student) not in (MLPStudent, RbMStudent) or not isinstance(x, Tensor) or len(x) > CHUNK_ROWS:
            return False
        return x.device.type == "cpu" and x.layout == torch.strided and getattr(student.layers[0], "dropout", 0) == 0

    @torch.no_grad()
    def logits(self) -> Tensor:
        """Logits ``[B, C]`` in eval mode; the next :meth:`train` reuses the first layer's output."""
        student, layer = self.student, self.layer
        if getattr(student, "pretraining", False) or self._must_run():
            return student(self.x)
        routed = isinstance(layer, FusedRbMLayer)
        first = layer(self.x, return_routing=True) if routed else layer(cast_once(self.x))
        self._kept = self._versions(), layer.memory.clone() if routed else None, first
        return student(self.x, first=first)

    def train(self) -> tuple[Tensor, Trace]:
        """``student(x, return_trace=True)`` in training mode."""
        kept, self._kept, layer = self._kept, None, self.layer
        if kept is None or kept[0] != self._versions() or self._must_run():
            return self.student(self.x, return_trace=True)
        _, memory, first = kept
        if memory is None:
            first = known_product(layer.weight, layer.bias, cast_once(self.x), first)
            return self.student(self.x, first=first, return_trace=True)
        if layer.track_memory:
            layer.update_memory()
        if not torch.equal(layer.memory, memory):
            return self.student(self.x, return_trace=True)
        y, routing = first
        if layer.track_memory:
            layer._record(self.x, routing.gates, routing.experts)
        experts = layer._fold(autocast_dtype(self.x, layer.weight.dtype))
        y = _KnownExperts.apply(*experts, cast_once(self.x), routing.gates, routing.experts, y)
        return self.student(self.x, first=(y, routing), return_trace=True)

    def _must_run(self) -> bool:
        """Whether the layer itself must run in every forward: if it tracks usage."""
        return getattr(self.layer, "track_usage", False)

    def _versions(self) -> tuple[list[tuple[int, int]], int, torch.dtype | None]:
        """What changes when the first layer's parameters do: their versions and addresses (an assignment of ``.data``
        keeps the version) and the number of optimizer steps (fused ones count no versions); and autocast's dtype.
        """
        parameters = [*self.layer.parameters()]
        versions = [(parameter._version, parameter.data_ptr()) for parameter in parameters]
        return versions, folding.optimizer_steps(), autocast_dtype(self.x, parameters[0].dtype)


def known_product(weight: Tensor, bias: Tensor, rows: Tensor, known: Tensor) -> Tensor:
    """Return ``known``, the product ``rows weight^T + bias`` for ``rows [B, F]``, with the gradients of the product."""
    return _KnownProduct.apply(weight, bias, rows, known)


class _KnownProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: Tensor, bias: Tensor, rows: Tensor, known: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return known.view_as(known)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        return gradient.T @ rows, gradient.sum(0), None, None


class _KnownExperts(torch.autograd.Function):
    """The same for :func:`rbm_kernels.expert_matmul`, with gradients for weight and bias only."""

    @staticmethod
    def forward(ctx, weight, bias, rows, gates, experts, known) -> Tensor:
        ctx.save_for_backward(rows, gates, experts)
        ctx.experts, ctx.has_bias = weight.shape[0], bias is not None
        return known.view_as(known)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, gates, experts = ctx.saved_tensors
        weight, bias = torch.ops.rbm.expert_matmul_backward_weight(
            gradient.contiguous(), rows, gates, experts, ctx.experts, ctx.has_bias
        )
        return weight, bias if ctx.has_bias else None, None, None, None, None
