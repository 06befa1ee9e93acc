"""The first layer of a student between an evaluation and the training forward that follows it.

Where all rows take part in every step, weights move once an epoch. The first layer's output, which costs nearly all of
a forward over many features, is then the same in both: :class:`FirstLayer` makes it once. Training gets the bits that
it would have had.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rbm.nn.rbm_layer import FusedRbMLayer
from rbm.nn.students import CHUNK_ROWS, MLPStudent, RbMStudent, Trace


class FirstLayer:
    """A student on rows that stay.

    Args:
        student: one that :meth:`serves` approves of.
        x: dense ``[B, F]``.
    """

    def __init__(self, student: MLPStudent | RbMStudent, x: Tensor) -> None:
        self.student, self.x, self.layer = student, x, student.layers[0]
        self._kept: tuple[list[int], Tensor | None, Any] | None = None

    @staticmethod
    def serves(student: nn.Module, x: object) -> bool:
        """Whether a student's first layer does the same in training as in evaluation: it drops nothing out. On a CPU
        alone, for no more rows than evaluation takes at once.
        """
        if type(student) not in (MLPStudent, RbMStudent) or not isinstance(x, Tensor) or len(x) > CHUNK_ROWS:
            return False
        return x.device.type == "cpu" and x.layout == torch.strided and getattr(student.layers[0], "dropout", 0) == 0

    @torch.no_grad()
    def logits(self) -> Tensor:
        """Logits ``[B, C]`` in eval mode; the next :meth:`train` begins with their first layer's output."""
        student, layer = self.student, self.layer
        if getattr(student, "pretraining", False) or self._must_run():
            return student(self.x)
        routed = isinstance(layer, FusedRbMLayer)
        first = layer(self.x, return_routing=True) if routed else layer(self.x)
        self._kept = self._versions(), layer.memory.clone() if routed else None, first
        return student(self.x, first=first)

    def train(self) -> tuple[Tensor, Trace]:
        """``student(x, return_trace=True)`` in training mode."""
        kept, self._kept, layer = self._kept, None, self.layer
        if kept is None or kept[0] != self._versions() or self._must_run():
            return self.student(self.x, return_trace=True)
        _, memory, first = kept
        if memory is None:
            return self.student(self.x, first=known_product(layer.weight, layer.bias, self.x, first), return_trace=True)
        if layer.track_memory:
            layer.update_memory()
        if not torch.equal(layer.memory, memory):
            return self.student(self.x, return_trace=True)
        y, routing = first
        if layer.track_memory:
            layer._record(self.x, routing.gates, routing.experts)
        y = _KnownExperts.apply(*layer._fold(None), self.x, routing.gates, routing.experts, y)
        return self.student(self.x, first=(y, routing), return_trace=True)

    def _must_run(self) -> bool:
        """Whether the layer itself has to see every forward: where it counts rows, and under autocast."""
        return getattr(self.layer, "track_usage", False) or torch._C._is_any_autocast_enabled()

    def _versions(self) -> list[int]:
        """They move with what is written to the first layer's parameters."""
        return [parameter._version for parameter in self.layer.parameters()]


def known_product(weight: Tensor, bias: Tensor, rows: Tensor, known: Tensor) -> Tensor:
    """``known``, which is ``rows weight^T + bias`` for ``rows [B, F]``, with the gradients of that product."""
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
    """The same of :func:`rbm_kernels.expert_matmul`: rows and gates are data."""

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
