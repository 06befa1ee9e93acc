"""Launches of Triton kernels: machines, launches prepared once per shape, options shared by all kernels.

Everything that depends only on shapes (grid, tiles, constants) is computed on the first call with these shapes and
cached: a training step launches the same dozen kernels again and again, and the host must stay ahead of the GPU.
"""

from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

Prepare = TypeVar("Prepare", bound=Callable)

# Options of every kernel. Fused multiply-add is Triton's default; set here so that no environment variable changes it.
OPTIONS = {"enable_fp_fusion": True}
# Shapes that a function caches: enough for the batch sizes of a server and a few layers.
_REMEMBERED = 1024
# Registers of a multiprocessor (sm_80 to sm_120) and the maximum per thread; they are allocated in units of eight.
_REGISTERS, _MOST = 65_536, 255
_prepared: list[Callable] = []


class Machine(NamedTuple):
    """Architecture (such as 90) and number of multiprocessors."""

    architecture: int
    multiprocessors: int


# The machine assumed for CPU tensors: an H200 in Triton's interpreter. ptx_executor sets the GPU whose code it runs.
CPU_STANDS_FOR = Machine(90, 132)


@cache
def machine_of(device: torch.device) -> Machine:
    """Architecture and size of ``device``. The CPU counts as ``CPU_STANDS_FOR``; other devices get an H200's size."""
    if device.type == "cpu":
        return CPU_STANDS_FOR
    major, minor = torch.cuda.get_device_capability(device)
    known = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
    return Machine(10 * major + minor, known)


def prepared(function: Prepare) -> Prepare:
    """Cache the results of ``function``, whose arguments are numbers and dtypes only."""
    remembering = lru_cache(maxsize=_REMEMBERED)(function)
    _prepared.append(remembering)
    return remembering


def forget_prepared() -> None:
    """Clear all caches, after a change of a configuration (used by the tuner and the tests)."""
    for remembering in _prepared:
        remembering.cache_clear()


def next_power_of_2(size: int) -> int:
    """The next power of two; 1 for size 0. Triton has the same function, but not every module may import Triton."""
    return 1 << (max(1, size) - 1).bit_length()


def contiguous(tensor: Tensor | None) -> Tensor | None:
    """The tensor itself if it is contiguous, else a copy; None for an optional argument that is absent."""
    return None if tensor is None else tensor.contiguous()


def with_adjacent_features(x: Tensor) -> Tensor:
    """``x [B, D]`` itself, whatever the stride of its rows, if features are adjacent; else a copy."""
    return x if x.stride(1) == 1 else x.contiguous()


def addressable(x: Tensor) -> Tensor:
    """``x [B, D]`` itself if features are adjacent and the rows of a tile span less than 2^31 elements; else a copy.

    A tile has at most 64 rows of a batch, or all memory vectors: at most 128.
    """
    return x if x.stride(1) == 1 and x.stride(0) < 2**31 // 128 else x.contiguous()


def launcher(kernel, grid: tuple[int, ...], *, programs: int | None = None, **constants) -> Callable[..., None]:
    """Bind ``kernel`` to its grid, constants, warps and stages; all kernels are launched through this function.

    ``programs`` is the number of programs that share a multiprocessor and its registers. It is given where ptxas by
    default would fit one more program by spilling (up to 24 bytes with Triton 3.6 and 3.9). Triton has no such option
    for AMD GPUs.

    Returns:
        A function of the remaining arguments (tensors and numbers), in their order.
    """
    if programs is not None and torch.version.hip is None:
        constants["maxnreg"] = min(_MOST, _REGISTERS // (32 * constants["num_warps"] * programs) // 8 * 8)
    constants |= OPTIONS
    return _Launcher(kernel, grid, constants) if _is_compiled(kernel) else partial(kernel[grid], **constants)


def _is_compiled(kernel) -> bool:
    """Whether Triton compiles ``kernel``. Its interpreter does not, and a test may pass something else."""
    return type(kernel).__module__ == "triton.runtime.jit" and type(kernel).__name__ == "JITFunction"


class _Launcher:
    """Launches of a kernel with one grid and one set of constants.

    ``kernel[grid](...)`` binds all arguments and constants to their names, asks Triton's settings and builds the key of
    its cache, for every launch: on the host this takes several times as long as the launch. So that happens only once
    for each combination of all that Triton compiles for: the current device, each tensor's dtype and whether its
    address is a multiple of 16, which arguments are None, and of each integer whether it is 1, whether it is a multiple
    of 16 and its width. Later launches pass the compiled kernel to the driver, and addresses in place of tensors.

    Triton's own way is always taken if anything but a CUDA GPU is to run the kernel, if another function has taken the
    place of ``JITFunction.run`` (to count launches, or to compile only), and with hooks, debugging or instrumentation,
    which that function serves.
    """

    def __init__(self, kernel, grid: tuple[int, ...], constants: dict[str, Any]):
        from triton import knobs
        from triton.backends import backends
        from triton.compiler import CompiledKernel
        from triton.runtime import driver

        self._kernel, self._grid = kernel, (*grid, 1, 1)[:3]
        self._ordinarily = partial(kernel[grid], **constants)
        names = [name for name in kernel.arg_names if name in constants]
        self._arguments = len(kernel.arg_names) - len(names)
        # The driver takes all values by place. The arguments come first: otherwise Triton refuses the first launch.
        self._constants = tuple(constants[name] for name in names)
        self._compiled: dict[tuple, Any] = {}
        self._knobs, self._driver = knobs, driver
        self._CudaDriver = backends["nvidia"].driver if "nvidia" in backends else ()
        self._CompiledKernel = CompiledKernel
        self._tritons_own = type(kernel).__init__.__globals__

    def __call__(self, *arguments):
        if not self._is_plain():
            return self._ordinarily(*arguments)
        driver = self._driver.active
        device = driver.get_current_device()
        key, values = [device], []
        for argument in arguments:
            if argument is None:
                key.append(None)
            elif isinstance(argument, Tensor) and argument.is_cuda:
                address = argument.data_ptr()
                key += (argument.dtype, address % 16 == 0)
                argument = address
            elif type(argument) is int:
                key.append(1 if argument == 1 else 16 if argument % 16 == 0 else 0)
                if not -(2**31) <= argument < 2**31:
                    key.append("i64" if argument < 2**63 else "u64")
            elif type(argument) is float or type(argument) is bool:
                key.append(type(argument))
            else:
                return self._ordinarily(*arguments)
            values.append(argument)
        key = tuple(key)
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._ordinarily(*arguments)
            if type(compiled) is self._CompiledKernel and len(arguments) == self._arguments:
                self._compiled[key] = compiled
            return compiled
        stream, no_hooks = driver.get_current_stream(device), (None, None, None)
        compiled.run(
            *self._grid, stream, compiled.function, compiled.packed_metadata, *no_hooks, *values, *self._constants
        )
        return compiled

    def _is_plain(self) -> bool:
        """Whether a launch is no more than a call of the driver of a CUDA GPU."""
        runtime = self._knobs.runtime
        before, after = runtime.launch_enter_hook, runtime.launch_exit_hook  # a function, or a list of some, or None
        return (
            getattr(type(self._kernel).run, "__globals__", None) is self._tritons_own
            and not self._kernel.pre_run_hooks
            and not runtime.debug
            and not self._knobs.compilation.instrumentation_mode
            and not getattr(before, "calls", before)
            and not getattr(after, "calls", after)
            and isinstance(self._driver.active, self._CudaDriver)
        )
