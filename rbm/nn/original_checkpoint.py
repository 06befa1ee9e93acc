"""Loads students of the paper's released code with unchanged logits.

The released code (github.com/Rufaim/routing-by-memory) does not write files; users call
``torch.save(model.state_dict(), path)`` for its module ``RbM``. For layers ``l`` with ``E`` experts from ``D`` to ``N``
features, its names map to the names of this package as follows:

=====================================  ====================  ===================================================
``layers.l.routing_memory``            ``[E, D]``            ``memory``
``layers.l.temperature``               ``[1]``               ``log_scale``: the logarithm of the output's scale
``layers.l.const_attention``           ``[E, D]``            ``attention``
``layers.l.const_attention``           zeros ``[E]``         none: a layer without input attention
``layers.l.experts.i.1.weight, bias``  ``[N, D]``, ``[N]``   ``weight[i]``, ``bias[i]``
``norms.l.batch_norm.*``               ``[N]``, a count      the same of BatchNorm
``norms.l.weight, bias``               ``[N]``               LayerNorm
``mlp_feature_encoder.weight, bias``   ``[H, H]``, ``[H]``   none: only used to train with similarity distillation
=====================================  ====================  ===================================================
"""

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from rbm.nn.saved_student import build
from rbm.nn.students import RbMStudent
from rbm.utils.files import as_path
from rbm.utils.tensor_files import check_finite, read_pickled

_UNUSED = ("mlp_feature_encoder.weight", "mlp_feature_encoder.bias")
_BATCH_NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def load_released(
    source: Path | str | Mapping[str, Tensor], *, top_k: int, dropout: float = 0.0, decay: float = 0.9
) -> RbMStudent:
    """Convert an RbM student of the paper's released code: same logits, in eval mode, float32, on the CPU.

    Args:
        source: the ``state_dict()`` of the released class ``RbM``, or a file that contains it, written by
            ``torch.save``. Files are read with ``weights_only``.
        top_k: the released setting ``k``, which is not in the state. It is 3 in most of the released configurations,
            and 2 for PubMed and, in the transductive setting, for Physics.
        dropout: the released setting of the same name, for further training; logits do not depend on it.
        decay: the released setting ``momentum``, likewise.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: this is not a state of the released ``RbM``: names are missing or unknown, shapes do not match, or
            memory vectors are zero, as they are before the end of pretraining; or a setting is out of range.
    """
    state = dict(source) if isinstance(source, Mapping) else _read(as_path("source", source))
    where = "the state" if isinstance(source, Mapping) else str(source)
    unfit = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if unfit or not state:
        found = f"{unfit[0]!r}: {type(state[unfit[0]]).__name__}" if unfit else "nothing"
        raise ValueError(f"{where} holds {found}, expected tensors by name, as model.state_dict() gives them")
    if not all(isinstance(name, str) for name in state) or any(_is_unusable(tensor) for tensor in state.values()):
        raise ValueError(f"{where} holds other than dense real tensors by name, as model.state_dict() gives them")
    check_finite(where, state)
    released = _Released(state, where)
    converted = released.converted()
    student = build(RbMStudent, {**released.arguments, "top_k": top_k, "dropout": dropout, "decay": decay})
    student.load_state_dict(converted)
    return student.eval()


def _is_unusable(tensor: Tensor) -> bool:
    return tensor.layout != torch.strided or tensor.device.type == "meta" or tensor.is_quantized


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise FileNotFoundError(f"checkpoint {path} does not exist")
    try:
        content = read_pickled(path)
    except ValueError as error:
        # This includes a whole pickled module: loading it would run its code.
        raise ValueError(
            f"{path} cannot be read as a file of tensors ({error});"
            " write torch.save(model.state_dict(), path) with the released code and load that"
        ) from error
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} holds {type(content).__name__}, expected what model.state_dict() gave")
    return dict(content)


class _Released:
    """A state with the released names that is converted piece by piece; error messages name its source."""

    def __init__(self, state: dict[str, Tensor], where: str) -> None:
        self.left, self.where = state, where
        self.layers = self._count(r"layers\.(\d+)\.routing_memory")
        if self.layers == 0:
            raise ValueError(
                f"{where} has no layers.0.routing_memory, so it is no state of the released RbM; it has"
                f" {', '.join(sorted(state)[:4])}{', ...' if len(state) > 4 else ''}"
            )
        memory = self._look("layers.0.routing_memory", 2)
        self.experts, width = memory.shape
        # The first expert of each layer defines the sizes; everything else is checked against them.
        outs = [self._look(f"layers.{i}.experts.0.1.weight", 2).shape[0] for i in range(self.layers)]
        self.sizes = list(zip([width, *outs[:-1]], outs, strict=True))
        self.attends = self._look("layers.0.const_attention").dim() == 2
        self.norm = "none"
        if "norms.0.batch_norm.weight" in state:
            self.norm = "batch"
        elif "norms.0.weight" in state:
            self.norm = "layer"
        self.arguments = {
            "in_channels": width,
            "hidden_channels": outs[0],
            "out_channels": outs[-1],
            "num_layers": self.layers,
            "num_experts": self.experts,
            "norm": self.norm,
            "input_attention": self.attends,
        }
        if len(set(outs[:-1])) > 1:
            raise ValueError(f"{where} has hidden layers of widths {outs[:-1]}, expected one width for all")

    def converted(self) -> dict[str, Tensor]:
        """The state with the names of this package; every released name must have been used."""
        ours: dict[str, Tensor] = {}
        for i, (fan_in, fan_out) in enumerate(self.sizes):
            ours |= {f"layers.{i}.{name}": tensor for name, tensor in self._layer(i, fan_in, fan_out).items()}
            if i > 0 and self.norm != "none":
                ours |= {f"norms.{i - 1}.{name}": tensor for name, tensor in self._norm(i - 1, fan_in).items()}
        unknown = sorted(set(self.left) - set(_UNUSED))
        if unknown:
            raise ValueError(
                f"{self.where} has names that the released RbM with {self.layers} layers of {self.experts} experts and"
                f" norm {self.norm!r} has not: {', '.join(unknown[:4])}{', ...' if len(unknown) > 4 else ''}"
            )
        return ours

    def _layer(self, i: int, fan_in: int, fan_out: int) -> dict[str, Tensor]:
        prefix, experts = f"layers.{i}", range(self.experts)
        memory = self._take(f"{prefix}.routing_memory", self.experts, fan_in)
        if not memory.any():
            raise ValueError(
                f"{self.where}: {prefix}.routing_memory holds only zeros, as before the end of pretraining, when"
                " nothing is routed; save a state of a later epoch"
            )
        layer = {
            "memory": memory,
            "log_scale": self._take(f"{prefix}.temperature", 1),
            "weight": torch.stack([self._take(f"{prefix}.experts.{e}.1.weight", fan_out, fan_in) for e in experts]),
            "bias": torch.stack([self._take(f"{prefix}.experts.{e}.1.bias", fan_out) for e in experts]),
        }
        if self.attends:
            layer["attention"] = self._take(f"{prefix}.const_attention", self.experts, fan_in)
        elif self._take(f"{prefix}.const_attention", self.experts).any():
            raise ValueError(f"{self.where}: {prefix}.const_attention of shape [{self.experts}] holds more than zeros")
        return layer

    def _norm(self, i: int, width: int) -> dict[str, Tensor]:
        if self.norm == "layer":
            return {name: self._take(f"norms.{i}.{name}", width) for name in ("weight", "bias")}
        sizes = {name: () if name == "num_batches_tracked" else (width,) for name in _BATCH_NORM}
        return {name: self._take(f"norms.{i}.batch_norm.{name}", *size) for name, size in sizes.items()}

    def _count(self, pattern: str) -> int:
        return len({match[1] for name in self.left if (match := re.fullmatch(pattern, name))})

    def _look(self, name: str, dims: int | None = None) -> Tensor:
        if name not in self.left:
            raise ValueError(f"{self.where} lacks {name}, which every state of the released RbM of its size has")
        tensor = self.left[name]
        if dims is not None and tensor.dim() != dims:
            raise ValueError(f"{self.where}: {name} has shape {list(tensor.shape)}, expected {dims} dimensions")
        return tensor

    def _take(self, name: str, *shape: int) -> Tensor:
        tensor = self._look(name)
        if tensor.shape != shape:
            raise ValueError(f"{self.where}: {name} has shape {list(tensor.shape)}, expected {list(shape)}")
        return self.left.pop(name)
