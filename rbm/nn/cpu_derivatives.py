"""PReLU, rows of unit length and SwiGLU, with derivatives that pass over memory less often than PyTorch's on a CPU.

In SimMLP, the first two act on the rows of all nodes, which are larger than a cache; in
:class:`~rbm.nn.feed_forward.RbMFeedForward`, SwiGLU acts on the hidden rows of all experts.
"""

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from rbm.utils.precision import autocast_dtype
from rbm.utils.transforms import is_eager_on_cpu
from rbm_kernels._library import gradients_of
from rbm_kernels.ops.packed_feed_forward import ACTIVATIONS

_plain_swiglu, _ = ACTIVATIONS["swiglu"]
_SHORTEST = 1e-12  # a shorter row is divided by this, as F.normalize does


class PReLU(nn.PReLU):
    """PReLU with one slope."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if x.dtype == autocast_dtype(x, weight.dtype):
            weight = weight.to(x.dtype)  # as autocast does
        plain = _is_plain(x) or x.dtype != weight.dtype
        return super().forward(x) if plain else _PReLU.apply(x, weight)


def unit_rows(x: Tensor) -> Tensor:
    """Rows ``[..., H]`` divided by their lengths, as by ``F.normalize(x, dim=-1)``."""
    return F.normalize(x, dim=-1) if _is_plain(x) else _UnitRows.apply(x)


def swiglu(x: Tensor) -> Tensor:
    """SiLU of the first half times the second half: ``[..., 2 I]`` to ``[..., I]``. Only ``x`` is kept for backward."""
    return _plain_swiglu(x) if _is_plain(x) else _SwiGLU.apply(x)


def _is_plain(x: Tensor) -> bool:
    """Whether PyTorch's own function serves: it is as fast, or forward mode, a transformation, a trace, or a subclass
    of Tensor, such as one without numbers, needs it.
    """
    if not torch.is_grad_enabled() or forward_ad._current_level >= 0 or torch._C._get_tracing_state():
        return True
    return type(x) is not Tensor or not is_eager_on_cpu(x)


def _has_no_out(gradient: Tensor) -> bool:
    """Whether PyTorch's ``out=`` refuses the gradient: it is a batch of gradients, transformed, or has a tangent."""
    is_batch = torch._C._functorch.is_legacy_batchedtensor(gradient)
    return is_batch or forward_ad._current_level >= 0 or not is_eager_on_cpu(gradient)


class _PReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(x, slope)
        return F.leaky_relu(x, slope.item())

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, slope = ctx.saved_tensors
        if torch.is_grad_enabled():  # the derivative will be derived again
            return tuple(gradients_of(F.prelu, (x, slope), ctx.needs_input_grad, (gradient,)))
        to_slope = torch.linalg.vecdot(gradient, x.clamp_max(0)).sum()
        return torch.ops.aten.leaky_relu_backward(gradient, x, slope.item(), False), to_slope.reshape(slope.shape)


class _UnitRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        lengths = torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min_(_SHORTEST)
        unit = x / lengths
        ctx.save_for_backward(x, unit, lengths)
        return unit

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        x, unit, lengths = ctx.saved_tensors
        if torch.is_grad_enabled():
            return torch.autograd.grad(F.normalize(x, dim=-1), x, gradient, create_graph=True)[0]
        along = torch.linalg.vecdot(gradient, unit).unsqueeze(-1)
        return torch.addcmul(gradient, unit, along, value=-1).div_(lengths)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, value = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(value)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        [x] = ctx.saved_tensors
        if torch.is_grad_enabled():
            return gradients_of(_plain_swiglu, (x,), ctx.needs_input_grad, (gradient,))[0]
        gate, value = x.chunk(2, dim=-1)
        if _has_no_out(gradient):
            share = gate.sigmoid()
            slope = share * (1 + gate * (1 - share))  # of SiLU
            return torch.cat([gradient * value * slope, gradient * gate * share], dim=-1)
        found = torch.empty_like(x)
        to_gate, to_value = found.chunk(2, dim=-1)
        torch.mul(gradient, F.silu(gate), out=to_value)
        torch.mul(gradient, value, out=to_gate)
        torch.ops.aten.silu_backward.grad_input(to_gate, gate, grad_input=to_gate)
        return found
