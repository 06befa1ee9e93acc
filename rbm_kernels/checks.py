"""Argument checks shared by the operators. Messages name the operator, the argument, what was passed and expected."""

import torch
from torch import Tensor

# Rows, features and experts are numbered in int32.
MOST_SIZE = 2**31 - 1
FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def accumulation_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if one of the tensors is float64, otherwise float32."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def check_dtype(op: str, name: str, tensor: Tensor, expected: tuple[torch.dtype, ...]) -> None:
    """Raise TypeError unless ``tensor`` is a dense tensor, and its dtype one of ``expected``."""
    if not isinstance(tensor, Tensor):
        remedy = "" if tensor is None else f"; use torch.as_tensor({name})"
        raise TypeError(f"rbm::{op}: {name} is a {type(tensor).__name__}, expected a tensor{remedy}")
    if tensor.layout != torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        raise TypeError(f"rbm::{op}: {name} has layout {layout}, expected a dense tensor; use {name}.to_dense()")
    if tensor.dtype not in expected:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in expected)
        remedy = f"; use {name}.to({expected[0]})" if len(expected) == 1 else ""
        raise TypeError(
            f"rbm::{op}: {name} has dtype {str(tensor.dtype).removeprefix('torch.')}, expected {names}{remedy}"
        )


def check_shape(op: str, name: str, tensor: Tensor, expected: tuple[int | None, ...], why: str) -> None:
    """Raise ValueError unless the shape of ``tensor`` equals ``expected``; ``None`` matches any size."""
    fits = tensor.dim() == len(expected) and all(
        want is None or got == want for got, want in zip(tensor.shape, expected, strict=True)
    )
    if not fits:
        wanted = ", ".join("*" if size is None else str(size) for size in expected)
        raise ValueError(f"rbm::{op}: {name} has shape {list(tensor.shape)}, expected [{wanted}] ({why})")
    # Symbolic sizes of a traced program are skipped: the comparison would become a guard.
    if any(isinstance(size, int) and size > MOST_SIZE for size in tensor.shape):
        raise ValueError(
            f"rbm::{op}: {name} has shape {list(tensor.shape)}, expected sizes below 2^31: split the batch"
        )


def is_within(op: str, name: str, value: float, least: float, most: float, expected: str = "a whole number") -> bool:
    """Whether ``least <= value <= most``.

    Raises:
        TypeError: ``value`` cannot be compared with numbers, or is a float where a whole number is expected.
    """
    try:
        fits = least <= value <= most
    except TypeError:
        raise TypeError(f"rbm::{op}: {name} is {value!r}, expected {expected}") from None
    if expected == "a whole number" and isinstance(value, float):
        raise TypeError(f"rbm::{op}: {name} is {value!r}, expected {expected}")
    return fits


def check_bias(op: str, bias: Tensor | None, weight: Tensor) -> None:
    """Raise TypeError or ValueError unless ``bias`` is None or ``[E, N]`` in the dtype of ``weight [E, N, D]``."""
    if bias is not None:
        check_dtype(op, "bias", bias, (weight.dtype,))
        check_shape(op, "bias", bias, tuple(weight.shape[:2]), "experts by outputs, as in weight")


def check_indices(op: str, name: str, indices: Tensor, count: int) -> None:
    """Raise RuntimeError unless the indices are between 0 and ``count - 1``, like the C++ operators.

    For the eager references. Only tensors on the CPU are checked: elsewhere the host would wait for the device.
    """
    if indices.device.type != "cpu" or indices.numel() == 0:
        return
    least, most = (int(bound) for bound in indices.aminmax())
    if least < 0 or most >= count:
        first = ((indices < 0) | (indices >= count)).nonzero()[0]
        row = f" in row {int(first[0])}" if indices.dim() > 1 else ""
        bad = int(indices[tuple(first)])
        raise RuntimeError(f"rbm::{op}: {name} holds {bad}{row}, expected between 0 and {count - 1}")


def check_out_features(op: str, out_features: int) -> None:
    """Raise ValueError if the size is negative or does not fit in int32."""
    if not is_within(op, "out_features", out_features, 0, MOST_SIZE):
        raise ValueError(f"rbm::{op}: out_features is {out_features}, expected between 0 and {MOST_SIZE}")


def check_num_experts(op: str, num_experts: int) -> None:
    """Raise ValueError unless there is at least one expert and experts can be numbered in int32."""
    if not is_within(op, "num_experts", num_experts, 1, MOST_SIZE):
        raise ValueError(
            f"rbm::{op}: num_experts is {num_experts}, expected between 1 and {MOST_SIZE}: experts are numbered in"
            " int32"
        )


def check_tiles(op: str, rows: int, block_m: int, num_experts: int) -> None:
    """Raise ValueError if int32 indices do not suffice for kernels over ordered rows.

    They index ``tile_experts [tiles, E]``, and number all positions of the last tile even if it is not full.
    """
    tiles = -(-rows // block_m)
    if tiles * max(num_experts, block_m) > MOST_SIZE:
        raise ValueError(
            f"rbm::{op}: {rows} rows in tiles of {block_m} are {tiles} tiles of {num_experts} experts, expected fewer"
            " than 2^31 rows and fewer than 2^31 elements of tile_experts: split the batch"
        )


def check_temperature(op: str, name: str, temperature: float, dtype: torch.dtype) -> None:
    """Raise ValueError unless cosines of ``dtype`` can be divided by the temperature.

    Below the least normal number of ``dtype``, the inverse may be infinite, and gates NaN.
    """
    limits = torch.finfo(dtype)
    if not is_within(op, name, temperature, limits.tiny, limits.max, "a number"):
        raise ValueError(
            f"rbm::{op}: {name} is {temperature}, expected a positive number between {limits.tiny:.6g} and"
            f" {limits.max:.6g}, the range of {str(dtype).removeprefix('torch.')}"
        )


def check_devices(op: str, **tensors: Tensor | None) -> None:
    """Raise ValueError unless all tensors are on the device of the first."""
    given = [(name, tensor) for name, tensor in tensors.items() if isinstance(tensor, Tensor)]
    first_name, first = given[0]
    for name, tensor in given[1:]:
        if tensor.device != first.device:
            raise ValueError(
                f"rbm::{op}: {name} is on {tensor.device} and {first_name} on {first.device}, expected all tensors on"
                f" one device: move one, as {name}.to({first_name}.device) does"
            )


def check_top_k(op: str, k: int, num_experts: int) -> None:
    """Raise ValueError unless ``1 <= k <= num_experts``."""
    if not is_within(op, "k", k, 1, num_experts):
        raise ValueError(f"rbm::{op}: k is {k}, expected between 1 and the number of experts, {num_experts}")
