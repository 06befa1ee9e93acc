"""Checks of constructor arguments: messages name the argument, the value, and what is expected.

The checks return Python's own types: NumPy numbers, such as ``y.max() + 1``, print differently and may not be saved as
plain numbers.
"""

import math
import re
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch

from rbm.utils.files import first_line

# Dtypes of parameters; the operators support no others.
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_sizes(**sizes: int) -> list[int]:
    """Check whole numbers of at least 1, and return them in the order given.

    Raises:
        TypeError: one is not a whole number; ``True`` and ``3.0`` are not accepted.
        ValueError: one is below 1.
    """
    return [check_at_least(name, size, 1) for name, size in sizes.items()]


def check_at_least(name: str, value: int, least: int) -> int:
    """Check and return a whole number of at least ``least``; TypeError or ValueError for others."""
    if (whole := _whole(name, value)) < least:
        raise ValueError(f"{name} is {value}, expected at least {least}")
    return whole


def check_top_k(top_k: int, num_experts: int) -> int:
    """Check and return the number of experts per row, from 1 to ``num_experts``; TypeError or ValueError for others."""
    whole = _whole("top_k", top_k)
    if not 1 <= whole <= num_experts:
        raise ValueError(f"top_k is {top_k}, expected between 1 and num_experts={num_experts}")
    return whole


def check_number(name: str, value: float, fits: Callable[[float], bool], expected: str) -> float:
    """Check and return a real number for which ``fits`` is true.

    Raises:
        TypeError: not a real number; ``True`` is not accepted.
        ValueError: ``fits`` is false; the message says what is ``expected``.
    """
    if isinstance(value, bool | np.bool_) or not isinstance(value, Real):
        raise TypeError(f"{name} is {_shown(value)}, expected a number{_remedy('float', name, value)}")
    value = value if isinstance(value, int | float) else float(value)
    if not fits(value):
        raise ValueError(f"{name} is {value}, expected {expected}")
    return value


def check_probability(name: str, value: float) -> float:
    """Check and return a number in [0, 1), such as a dropout."""
    return check_number(name, value, lambda p: 0.0 <= p < 1.0, "at least 0 and below 1")


def check_positive(name: str, value: float) -> float:
    """Check and return a finite number above 0."""
    return check_number(name, value, lambda v: 0.0 < v < math.inf, "a positive number, not an infinite one")


def check_weight(name: str, value: float) -> float:
    """Check and return a finite number of at least 0, such as the weight of a loss."""
    return check_number(name, value, lambda v: 0.0 <= v < math.inf, "at least 0, not infinite")


def check_divisor(name: str, value: float, dtype: torch.dtype) -> float:
    """Check and return a positive number that is finite in ``dtype``, as is its inverse."""
    limits = torch.finfo(dtype)
    expected = (
        f"a positive number, not an infinite one, between {limits.tiny:.6g} and {limits.max:.6g}, the range of {dtype}"
    )
    return check_number(name, value, lambda v: limits.tiny <= v <= limits.max, expected)


def check_flags(**flags: bool) -> None:
    """Raise TypeError unless all are True or False: a string such as ``"no"`` would count as true."""
    for name, flag in flags.items():
        if not isinstance(flag, bool | np.bool_):
            raise TypeError(f"{name} is {_shown(flag)}, expected True or False")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(choices)}")


def check_device_and_dtype(device: torch.device | str | int | None, dtype: torch.dtype | None) -> None:
    """Raise TypeError or ValueError unless floating-point tensors of ``dtype`` can be made on ``device``."""
    if dtype is not None and dtype not in DTYPES:
        raise TypeError(f"dtype is {_shown(dtype)}, expected one of {', '.join(map(str, DTYPES))}, or None")
    if device is None:
        return
    try:
        torch.empty(0, device=device)
    except Exception as error:  # an AssertionError if PyTorch was built without CUDA
        raise ValueError(
            f"device is {_shown(device)}, expected one that PyTorch has here, such as 'cpu' or 'meta', or 'cuda' where"
            f" torch.cuda.is_available() says so ({first_line(error)})"
        ) from error


def usable_device(device: torch.device | str) -> str:
    """Check a device for training or timing, and return its name.

    Raises:
        TypeError: neither a device nor its name.
        ValueError: no CPU or CUDA device, or one that is not usable here.
    """
    if not isinstance(device, torch.device | str):
        raise TypeError(f"device is {_shown(device)}, expected cpu, cuda, or cuda:0 and so on")
    name = str(device)
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"device is {name!r}, expected cpu, cuda, or cuda:0 and so on")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device is {name!r}, which is not usable here: {first_line(error)}") from error
    return name


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool | np.bool_) or not isinstance(value, Integral):
        raise TypeError(f"{name} is {_shown(value)}, expected a whole number{_remedy('int', name, value)}")
    return int(value)


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{type(value).__name__} {shown[:50]}..."


def _remedy(kind: str, name: str, value: Any) -> str:
    """Advice for values that contain a number, such as 3.0 or an array or tensor of one element."""
    one = isinstance(value, float) and value.is_integer()
    one = one or (isinstance(value, torch.Tensor | np.ndarray) and math.prod(value.shape) == 1)
    return f"; use {kind}({name})" if one else ""
