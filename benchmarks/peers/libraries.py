"""Other projects' kernels, where they are installed: which there are, which take part, and why the others do not.

Nothing of them is in this repository. An adapter, ``with_NAME.py``, imports its library when it is imported itself;
``experts`` in it has the signature of ``expert_matmul``, ``ffn`` that of ``ffn.py``. An adapter raises
NotImplementedError for what its library does not compute; suites write that down.
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
    """``name`` is what it is imported by; ``on_cpu`` says that its kernels run on CPU tensors in the interpreter."""

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
    """The libraries that can be called here and compute ``experts`` or ``ffn``, by name."""
    found = (library for library in LIBRARIES if computes in library.computes and _missing(library) is None)
    return {library.name: getattr(_adapter(library.name), computes) for library in found}


def missing_libraries() -> list[str]:
    """What would be measured too if it were there: the name of each, and why not."""
    reasons = {library.name: _missing(library) for library in LIBRARIES}
    return [f"{name} ({reason})" for name, reason in reasons.items() if reason is not None]


def refuse_exact_float32(x: Tensor, name: str) -> None:
    """Raise NotImplementedError where float32 is asked for and a library knows TensorFloat-32 alone."""
    if x.is_cuda and x.dtype == torch.float32 and not multiplies_as_tf32():
        raise NotImplementedError(f"{name} multiplies float32 as TensorFloat-32 alone")


def multiplies_as_tf32() -> bool:
    """What PyTorch's own switch says, which suites set."""
    return torch.get_float32_matmul_precision() != "highest"


def _adapter(name: str):
    return import_module(f"benchmarks.peers.with_{name}")


@cache
def _missing(library: Library) -> str | None:
    """Why a library takes no part; None where it does."""
    try:
        _adapter(library.name)
    except ModuleNotFoundError as error:
        return "not installed" if error.name == library.name else f"no module {error.name}"
    except Exception as error:  # whatever a library raises where it finds no GPU, or another version
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    interpreted = library.on_cpu and os.environ.get("TRITON_INTERPRET") == "1"
    return None if torch.cuda.is_available() or interpreted else "needs a GPU"
