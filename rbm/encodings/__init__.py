from typing import NamedTuple

from torch import Tensor


class Encodings(NamedTuple):
    observed: Tensor
    full: Tensor


def encode(split, config, num_classes, *, seed, cache, extra=()):
    return None
