"""Whether code runs eagerly, or is compiled or transformed by ``torch.func``."""

import torch
from torch import Tensor


def is_transformed() -> bool:
    """Whether ``torch.func`` (grad, jvp, vmap, ...) transforms the code; False while compiling."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def is_eager_on_cpu(x: Tensor) -> bool:
    """Whether a CPU runs the code that reads ``x``, which is neither compiled nor transformed by ``torch.func``."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and not is_transformed()
