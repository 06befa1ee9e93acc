"""Kernels of other projects, if installed: which are known, which take part, and why the others do not.

This repository contains no code of theirs. An adapter ``with_NAME.py`` imports its library when it is imported itself;
its ``experts`` has the signature of ``expert_matmul``, its ``ffn`` that of ``ffn.py``. An adapter raises
NotImplementedError for what its library does not compute; suites record that.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module

import torch
from torch import Tensor


@dataclass(frozen=True)
class Library:
    """``name`` is the module to import; ``on_cpu`` tells whether its kernels run on CPU tensors in the interpreter."""

    name: str
    computes: tuple[str, ...]
    on_cpu: bool = False


LIBRARIES = (
    Library("scattermoe", ("experts", "ffn"), on_cpu=True),
    Library("triton_kernels", ("experts",)),
    Library("megablocks", ("experts",)),
    Library("tutel", ("experts",)),
    Library("liger_kernel", ("ffn",), on_cpu=True),
    Library("sonicmoe", ("ffn",)),
)


def usable(computes: str) -> dict[str, Callable[..., Tensor]]:
    """The libraries that can be used here and compute ``experts`` or ``ffn``, by name."""
    found = (library for library in LIBRARIES if computes in library.computes and _missing(library) is None)
    return {library.name: getattr(_adapter(library.name), computes) for library in found}


def missing_libraries() -> list[str]:
    """The libraries that would be measured if they were usable: the name of each, and the reason."""
    reasons = {library.name: _missing(library) for library in LIBRARIES}
    return [f"{name} ({reason})" for name, reason in reasons.items() if reason is not None]


def refuse_exact_float32(x: Tensor, name: str) -> None:
    """Raise NotImplementedError if plain float32 is required but a library only supports TensorFloat-32."""
    if x.is_cuda and x.dtype == torch.float32 and not multiplies_as_tf32():
        raise NotImplementedError(f"{name} multiplies float32 only as TensorFloat-32")


def multiplies_as_tf32() -> bool:
    """The state of PyTorch's own switch, which suites set."""
    return torch.get_float32_matmul_precision() != "highest"


def _adapter(name: str):
    return import_module(f"benchmarks.peers.with_{name}")


@cache
def _missing(library: Library) -> str | None:
    """Why a library does not take part; None if it does."""
    try:
        _adapter(library.name)
    except ModuleNotFoundError as error:
        return "not installed" if error.name == library.name else f"no module {error.name}"
    except Exception as error:  # libraries raise different errors without a GPU or with another version
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    interpreted = library.on_cpu and os.environ.get("TRITON_INTERPRET") == "1"
    return None if torch.cuda.is_available() or interpreted else "needs a GPU"
