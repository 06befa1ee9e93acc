"""Argument checks shared by the operators: a message names operator and argument, what came and what was expected."""

import torch
from torch import Tensor

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def accumulation_dtype(*tensors: Tensor) -> torch.dtype:
    """float32 at least, float64 where an argument is float64."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def check_dtype(op: str, name: str, tensor: Tensor, expected: tuple[torch.dtype, ...]) -> None:
    """Raise TypeError unless the dtype of ``tensor`` is one of ``expected``."""
    if tensor.dtype not in expected:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in expected)
        raise TypeError(f"rbm::{op}: {name} has dtype {str(tensor.dtype).removeprefix('torch.')}, expected {names}")


def check_shape(op: str, name: str, tensor: Tensor, expected: tuple[int | None, ...], why: str) -> None:
    """Raise ValueError unless the shape of ``tensor`` equals ``expected``; ``None`` stands for any size."""
    fits = tensor.dim() == len(expected) and all(
        want is None or got == want for got, want in zip(tensor.shape, expected, strict=True)
    )
    if not fits:
        wanted = ", ".join("*" if size is None else str(size) for size in expected)
        raise ValueError(f"rbm::{op}: {name} has shape {list(tensor.shape)}, expected [{wanted}] ({why})")


def check_top_k(op: str, k: int, num_experts: int) -> None:
    """Raise ValueError unless ``1 <= k <= num_experts``."""
    if not 1 <= k <= num_experts:
        raise ValueError(
            f"rbm::{op}: k is {k}, expected between 1 and the number of experts, {num_experts} (the rows of memory)"
        )
