"""A layer, its outputs at inference, and the expected outputs: for the tests of cached experts."""

import torch

from rbm import FusedRbMLayer


def make(**options):
    layer = FusedRbMLayer(6, 4, 5, 3, **options).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer


def answer(layer, x):
    with torch.no_grad():
        return layer(x)


def expected(layer, x):
    """The output of the two operators with the current parameters."""
    with torch.enable_grad():
        return layer(x).detach()
