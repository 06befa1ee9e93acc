"""Students that run as one operator on a CPU, :func:`rbm_kernels.packed_network`, instead of one operator per layer.

The weights of all layers are packed at the first call and kept until one of them changes;
:class:`~rbm.nn.rbm_layer.FusedRbMLayer` names the changes that are not noticed. The result equals that of the separate
layers, which are used in all other cases: while gradients are enabled, in training, for sparse rows and other
precisions, under autocast and ``torch.func``, in compiled and exported programs, if a layer has hooks or counts its
rows, for layers of other classes, and if the package has no compiled libraries.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as global_hooks

from rbm.nn import folded_weights as folding
from rbm_kernels import NetworkLayer, pack_network, packed_network

# Attributes of a layer that may change between two calls. Sizes do not change.
_SETTINGS = ("training", "top_k", "gate_temperature", "track_usage", "gates_over", "eps", "residual", "forward")
# Parameters that a layer may lack and be given later.
_OPTIONAL = ("bias", "attention")


class Packed(NamedTuple):
    """A packed network, and the versions and settings of the layers that it was packed from."""

    network: Tensor | None  # None if the layers run separately
    in_features: int
    out_features: int
    steps: int
    children: tuple[tuple[dict, str, nn.Module | None], ...]  # None for modules and parameters that do not exist
    tensors: tuple[tuple[dict, str, Tensor, int, int, Tensor], ...]
    settings: tuple[tuple[dict, ...], tuple[str, ...], list]
    hooks: tuple[dict, ...]

    def is_current(self) -> bool:
        """Whether nothing has changed since packing. This runs at each call, so it must be fast."""
        if folding.steps() != self.steps or any(self.hooks):
            return False
        for children, name, child in self.children:
            if children.get(name) is not child:
                return False
        for tensors, name, tensor, version, address, _ in self.tensors:
            if tensors.get(name) is not tensor or tensor._version != version or tensor.data_ptr() != address:
                return False
        owners, names, values = self.settings
        return [*map(dict.get, owners, names)] == values


class PackedMixin:
    """Mixin for a student with ``layers`` and ``norms``, ReLU after each norm, and a last layer without either. Another
    student has its own ``_packed_children`` and :meth:`_network_layers`.
    """

    _packed_children: tuple[str, ...] = ("layers", "norms")  # modules that hold all parts of the network
    _packed: Packed | None = None

    def _network_layers(self) -> list[NetworkLayer] | None:
        """Arguments of the operator; None if it cannot compute this student."""
        layers, norms = [*self.layers], [*self.norms]
        if len(norms) != len(layers) - 1:
            return None
        hidden = [network_layer(*parts, relu=True) for parts in zip(layers[:-1], norms, strict=True)]
        return all_or_none([*hidden, network_layer(layers[-1])])

    def _answer_at_once(self, x: Any) -> Tensor | None:
        """Logits ``[B, C]`` of rows ``[B, F]``; None if the layers must run separately."""
        if torch.compiler.is_compiling() or not _is_served_row(x):
            return None
        packed = self._packed
        if packed is None or not packed.is_current():
            if any(_hooks(self)):
                return None
            packed = self._packed = _pack(self)
        if packed.network is None or x.shape[1] != packed.in_features:
            return None
        return packed_network(x, packed.network, packed.out_features)

    def train(self, mode: bool = True) -> "PackedMixin":
        """Like :meth:`torch.nn.Module.train`; the packed network is dropped."""
        self._packed = None
        return super().train(mode)

    def _apply(self, fn: Callable, recurse: bool = True) -> "PackedMixin":
        self._packed = None
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict:
        # A copy has its own parameters: their version counters start again and cannot be compared with the original's.
        return {**super().__getstate__(), "_packed": None}


def _is_served_row(x: Any) -> bool:
    """Whether ``x`` is dense float32 rows on a CPU, outside of autocast, transformations and traces."""
    return (
        type(x) is Tensor
        and x.is_cpu
        and x.dtype is torch.float32
        and x.layout is torch.strided
        and not x.is_nested
        and x.dim() == 2
        and not torch._C._is_any_autocast_enabled()
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._get_tracing_state()
        and forward_ad._current_level < 0
    )


def _parts(student: PackedMixin) -> list[nn.Module]:
    modules = student._modules
    return [part for name in student._packed_children for part in modules[name].modules()]


def _hooks(student: PackedMixin) -> tuple[dict, ...]:
    everywhere = (global_hooks._global_forward_hooks, global_hooks._global_forward_pre_hooks)
    return everywhere + tuple(
        hooks for part in _parts(student) for hooks in (part._forward_hooks, part._forward_pre_hooks)
    )


@torch.no_grad()
def _pack(student: PackedMixin) -> Packed:
    # Read versions before values: if another thread writes in between, the packed copy is recognised as outdated.
    steps, watched, tensors = folding.steps(), True, []
    parts = _parts(student)
    children = [(parent._modules, name, child) for parent in parts for name, child in parent._modules.items()]
    settings = [(part.__dict__, name) for part in parts if not isinstance(part, nn.ModuleList) for name in _SETTINGS]
    owners, names = zip(*settings, strict=True)
    values = [*map(dict.get, owners, names)]
    children += [(student._modules, name, student._modules[name]) for name in student._packed_children]
    # What may be added: by append(), and where a layer has none.
    children += [(part._modules, str(len(part)), None) for part in parts if isinstance(part, nn.ModuleList)]
    weighted = [part._parameters for part in parts if "weight" in part._parameters]
    children += [(owned, name, None) for owned in weighted for name in _OPTIONAL if owned.get(name) is None]
    for part in parts:
        for owned in (part._parameters, part._buffers):
            for name, tensor in owned.items():
                if tensor is None or name in part._non_persistent_buffers_set:
                    continue
                if not folding.is_watched(tensor):
                    watched = False
                    continue
                # The alias keeps the memory alive, so that no other tensor can get the same address.
                tensors.append((owned, name, tensor, tensor._version, tensor.data_ptr(), tensor.detach()))
    # The eager reference of the operator is slower than the layers.
    is_compiled = torch._C._dispatch_has_kernel_for_dispatch_key("rbm::packed_network", "CPU")
    layers = student._network_layers() if watched and is_compiled else None
    return Packed(
        network=None if layers is None else pack_network(layers),
        in_features=student.in_channels,
        out_features=0 if layers is None else layers[-1].out_features,
        steps=steps,
        children=tuple(children),
        tensors=tuple(tensors),
        settings=(owners, names, values),
        hooks=_hooks(student),
    )


def network_layer(layer: nn.Module, norm: nn.Module | None = None, **more: Any) -> NetworkLayer | None:
    """What the operator computes for a layer, its norm and further members of :class:`~rbm_kernels.NetworkLayer`; None
    if it cannot.
    """
    # Only the class's own method counts, because a derived class may have another forward.
    described = type(layer).__dict__.get("network_layer")
    if described is None or not runs_as_its_class(layer):
        return None
    found = described(layer)
    if found is not None and norm is not None:
        found = _with_norm(found, norm)
    return found._replace(**more) if found is not None and _is_served(found) else None


def all_or_none(layers: list[NetworkLayer | None]) -> list[NetworkLayer] | None:
    """The layers; None if one of them is None."""
    return None if None in layers else layers


def runs_as_its_class(module: nn.Module) -> bool:
    """Whether a module is in eval mode, with the forward of its class."""
    return not module.training and "forward" not in module.__dict__


def _with_norm(layer: NetworkLayer, norm: nn.Module) -> NetworkLayer | None:
    if not runs_as_its_class(norm):
        return None
    if type(norm) is nn.Identity:
        return layer
    if type(norm) is nn.LayerNorm and norm.weight is not None and norm.bias is not None:
        return layer._replace(norm="layer", scale=norm.weight, shift=norm.bias, eps=norm.eps)
    described = type(norm).__dict__.get("affine")
    if described is None:  # only BatchNorm of rbm.nn.students has it
        return None
    if any(getattr(norm, name) is None for name in ("weight", "bias", "running_mean", "running_var")):
        return None
    scale, shift = described(norm)
    return layer._replace(norm="affine", scale=scale, shift=shift)


def _is_served(layer: NetworkLayer) -> bool:
    tensors = [layer.bias, layer.memory, layer.scale, layer.shift, *(layer.router or ())]
    if layer.weight.dtype != torch.int8:
        tensors.append(layer.weight)
    return all(t is None or (t.dtype == torch.float32 and t.is_cpu) for t in tensors) and layer.weight.is_cpu
