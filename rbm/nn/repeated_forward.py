"""Detection of forwards that activation checkpointing repeats in the backward pass and that must not change a layer.

Python code can detect a repeated forward only in eager mode. A compiled forward calls the operator
``rbm::is_first_forward`` at run time: ``checkpoint(torch.compile(block), x)`` runs the same graph again in the backward
pass, and the graph of a model that contains a checkpoint has a copy of the block in its backward part.
"""

import torch
from torch import Tensor

from rbm_kernels._library import LIBRARY, is_exporting

# A replayed CUDA graph would return the value from its capture.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)
LIBRARY.define("is_first_forward(Tensor like) -> Tensor", tags=_TAGS)


def is_recomputing() -> bool:
    """Whether this forward runs inside a backward pass, where activation checkpointing repeats it.

    False while compiling: see :func:`first_forward`.
    """
    return not torch.compiler.is_compiling() and _inside_backward()


def first_forward(like: Tensor) -> Tensor | None:
    """While compiling, a tensor that is true at run time unless the forward is a repeated one; None in eager mode.

    Args:
        like: any tensor of the layer; the result is on its device.

    Returns:
        bool ``[]``; None in eager mode, where :func:`is_recomputing` is used, and while exporting.
    """
    if not torch.compiler.is_compiling() or is_exporting():
        return None
    return torch.ops.rbm.is_first_forward(like)


def _inside_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _is_first_forward(like: Tensor) -> Tensor:
    return torch.full((), not _inside_backward(), dtype=torch.bool, device=like.device)


def _fake_is_first_forward(like: Tensor) -> Tensor:
    return like.new_empty((), dtype=torch.bool)


LIBRARY.impl("is_first_forward", _is_first_forward, "CompositeExplicitAutograd")
torch.library.register_fake("rbm::is_first_forward", _fake_is_first_forward, lib=LIBRARY)
