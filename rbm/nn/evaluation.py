"""Evaluation of a module that may be in the middle of its training."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Set eval mode inside the block, and restore the mode of each submodule afterwards, such as a frozen norm's."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:  # parents come before their children
            if part.training != training:
                part.train(training)
