"""Forwards that activation checkpointing repeats during the backward pass: what changes a layer must not happen twice.

Python sees a repeated forward in eager mode alone. A compiled forward asks the operator ``rbm::is_first_forward`` as it
runs: ``checkpoint(torch.compile(block), x)`` runs the same graph in the backward pass, and a graph that holds a
checkpoint has a copy of the block there.
"""

import torch
from torch import Tensor

from rbm_kernels._library import LIBRARY

# A replayed CUDA graph would give the answer of its recording.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)
LIBRARY.define("is_first_forward(Tensor like) -> Tensor", tags=_TAGS)


def is_recomputing() -> bool:
    """Whether this forward runs inside a backward pass, which is where activation checkpointing repeats it.

    False while a forward is compiled: see :func:`first_forward`.
    """
    return not torch.compiler.is_compiling() and _inside_backward()


def first_forward(like: Tensor) -> Tensor | None:
    """While compiling, a tensor that is true where the forward is no repeated one as it runs; None in eager mode.

    Args:
        like: any tensor of the layer, on whose device the answer is.

    Returns:
        bool ``[]``, or None, where :func:`is_recomputing` has the answer. Exported programs ask nothing.
    """
    if not torch.compiler.is_compiling() or torch.compiler.is_exporting():
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
