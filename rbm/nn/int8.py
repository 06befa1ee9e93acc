"""Students with 8-bit integer weights, for inference with a quarter of the memory.

Each output column of each expert has its own scale, and each row gets one at run time. Products are summed in integers
(:func:`rbm_kernels.routed_matmul_int8`); memory vectors, biases, gates and norms stay float32.
"""

import copy

import torch
from torch import Tensor, nn

from rbm.nn.folded_weights import fold
from rbm.nn.memory_router import Routing
from rbm.nn.moe import MoELayer
from rbm.nn.rbm_layer import FusedRbMLayer
from rbm.nn.sparse_rows import Features, Linear, SparseRows, as_rows
from rbm_kernels import NetworkLayer, cosine_topk, quantize_experts, routed_matmul_int8

KINDS = ("int8",)
# A subclass with a forward of its own computes something else.
_FORWARDS = (FusedRbMLayer.forward, Linear.forward, nn.Linear.forward)
_DENSE_NUMBERS = 2**22  # size of the chunks in which sparse rows are made dense: 16 MiB


class Int8Layer(nn.Module):
    """A linear layer, or a layer that routes by memory, with 8-bit weights; from float32 rows ``[..., in_features]`` to
    ``[..., out_features]``. It has no derivative. Conversions such as ``half()`` change nothing: rows and memory stay
    float32.

    Sparse rows are made dense in chunks, so that sparse and dense rows give equal results.

    Args:
        weight: of the experts, with attention and scale folded in, ``[E, out_features, in_features]``, float32.
        bias: ``[E, out_features]``, or None.
        memory: memory vectors ``[E, in_features]``, float32, or None for a single expert that all rows use.
        top_k: experts a row uses.
        gate_temperature: divides the cosines before the softmax.

    Attributes:
        experts: int8, the result of :func:`rbm_kernels.quantize_experts`.
        memory: memory vectors, or None.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: numbers are not finite.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        memory: Tensor | None = None,
        top_k: int = 1,
        gate_temperature: float = 1.0,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape[1:]
        self.top_k, self.gate_temperature = top_k, gate_temperature
        self.register_buffer("experts", quantize_experts(weight, bias))
        self.register_buffer("memory", None if memory is None else memory.detach().clone())

    @classmethod
    @torch.no_grad()
    def of(cls, layer: FusedRbMLayer | nn.Linear) -> "Int8Layer":
        """Quantise a trained layer."""
        if isinstance(layer, FusedRbMLayer):
            folded = fold(layer.weight, layer.bias, layer.attention, layer.log_scale)
            return cls(*folded, layer.memory, layer.top_k, layer.gate_temperature)
        return cls(layer.weight[None], None if layer.bias is None else layer.bias[None])

    def forward(self, h: Features, *, return_routing: bool = False) -> Tensor | tuple[Tensor, Routing]:
        """Map rows ``[..., in_features]`` to ``[..., out_features]``; with ``return_routing`` also return the routing,
        which a linear layer does not support.

        Raises:
            TypeError: the rows have another dtype.
            ValueError: the rows have another size.
        """
        is_plain = isinstance(h, Tensor) and h.layout is torch.strided and not h.is_nested
        if is_plain and h.dim() == 2 and not return_routing:
            return self._answer(h)
        rows = as_rows(h)
        if isinstance(rows, SparseRows):
            return self._of_sparse(rows, return_routing)
        if rows.dim() == 0:
            raise ValueError(f"input has shape [], expected [..., {self.in_features}] (in_features of the layer)")
        flat, shape = rows.reshape(-1, rows.shape[-1]), rows.shape[:-1]
        y = self._answer(flat).reshape(*shape, self.out_features)
        if not return_routing:
            return y
        routing = cosine_topk(flat, self.memory, self.top_k, temperature=self.gate_temperature)
        return y, Routing(*(part.reshape(*shape, self.top_k) for part in routing))

    def network_layer(self) -> NetworkLayer:
        """The layer in the form that :func:`rbm_kernels.packed_network` takes."""
        sizes = (self.out_features, self.in_features)
        return NetworkLayer(self.experts, None, *sizes, self.memory, self.top_k, self.gate_temperature)

    def _apply(self, fn, recurse: bool = True) -> "Int8Layer":
        before = self.memory
        super()._apply(fn, recurse)
        if before is not None and self.memory.dtype != before.dtype:
            self.memory = before.to(self.memory.device)
        return self

    def _of_sparse(self, rows: SparseRows, return_routing: bool) -> Tensor | tuple[Tensor, Routing]:
        count = max(1, _DENSE_NUMBERS // max(1, self.in_features))
        starts = range(0, max(1, rows.shape[0]), count)
        parts = [self(rows[first : first + count].to_dense(), return_routing=return_routing) for first in starts]
        if not return_routing:
            return torch.cat(parts)
        answers, routings = zip(*parts, strict=True)
        return torch.cat(answers), Routing(*map(torch.cat, zip(*routings, strict=True)))

    def _answer(self, rows: Tensor) -> Tensor:
        buffers = self._buffers  # faster than attributes of a module
        return routed_matmul_int8(
            rows, buffers["memory"], buffers["experts"], self.out_features, self.top_k, self.gate_temperature
        )

    def extra_repr(self) -> str:
        routes = "" if self.memory is None else f", num_experts={len(self.memory)}, top_k={self.top_k}"
        return f"{self.in_features}, {self.out_features}{routes}, int8"


@torch.inference_mode(False)  # as for rbm.nn.saved_student.rebuild
def quantized(student: nn.Module, kind: str = "int8") -> nn.Module:
    """A copy of a student in eval mode, for inference only, with 8-bit weights in its linear layers and the layers that
    route by memory.

    Its rows and logits stay float32, and :func:`rbm.export_student` supports it. It cannot be saved; save the original
    student. A layer with hooks, or with a forward of its own, stays in float32.

    Args:
        student: a trained student in float32, or one such layer alone.
        kind: ``int8``.

    Raises:
        TypeError: parameters are not float32.
        ValueError: ``kind`` is unknown, or the student has no such layers: trees, or the mixtures of
            :mod:`rbm.nn.moe`.
    """
    check_kind(kind)
    holder = nn.Sequential(copy.deepcopy(student))  # the student itself may be such a layer
    if not _replace(holder, {}):
        raise ValueError(
            f"quantize is {kind!r}, but a {type(student).__name__} has no layer that 8 bits serve (linear layers and"
            " FusedRbMLayer); leave it out"
        )
    found = holder[0]
    found.__dict__["_arguments"] = None  # a module rebuilt from them would not fit these weights
    return found.eval().requires_grad_(False)


def check_kind(kind: str | None) -> None:
    """Raise ValueError unless ``kind`` is None or one that :func:`quantized` knows."""
    if kind not in (None, *KINDS):
        raise ValueError(f"quantize is {kind!r}, expected {' or '.join(KINDS)}; leave it out for float32")


def _is_plain(child: nn.Module | None) -> bool:
    """Whether a module computes what its class does: a forward or hooks of its own would be lost with it."""
    if getattr(type(child), "forward", None) not in _FORWARDS or "forward" in child.__dict__:
        return False
    return not (child._forward_hooks or child._forward_pre_hooks)


def _replace(module: nn.Module, replaced: dict[nn.Module, Int8Layer]) -> int:
    """Replace the layers of a module by quantised ones, and return how often. A layer that occurs several times is
    quantised once: ``replaced`` has the layers so far.
    """
    count = 0
    for name, child in module._modules.items():
        if _is_plain(child):
            if child not in replaced:
                replaced[child] = Int8Layer.of(child)
            module._modules[name] = replaced[child]
            count += 1
        # nn.MultiheadAttention reads the weight of its linear layer instead of calling it.
        elif child is not None and not isinstance(child, MoELayer | nn.MultiheadAttention):
            count += _replace(child, replaced)
    return count
